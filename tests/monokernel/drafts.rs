//! Drafts of tokens, made and checked by kernels: they change when tokens come, and never which.

use std::sync::Arc;

use kie_core::engine::Engine;
use kie_core::request::{
    Completion, EngineConfig, Prediction, Prompt, Request, SamplingParams, Speculate,
};

use super::failures::{edited, open_over};
use super::requests::{base, ways};
use super::support::{goldens, greedy_request, half, open_on};
use super::{fixture, two_at_a_time};

const PROMPT: [u32; 16] = [5, 6, 7, 8, 9, 6, 7, 8, 5, 6, 7, 8, 9, 6, 7, 8];

/// All of an answer but its times.
fn told(done: &Completion) -> impl PartialEq + std::fmt::Debug {
    let Completion { text, token_ids, finish_reason, stop_reason, logprobs, .. } = done.clone();
    (text, token_ids, finish_reason, stop_reason, logprobs)
}

fn request(params: &SamplingParams, prediction: Option<&[u32]>) -> Request {
    let params = SamplingParams {
        speculate: Some(Speculate::Lookup),
        prediction: prediction.map(|ids| Prediction::Ids(ids.to_vec())),
        ..params.clone()
    };
    Request { prompt: Prompt::Ids(PROMPT.to_vec()), params }
}

fn plain(engine: &Engine, params: &SamplingParams) -> Completion {
    let prompt = Prompt::Ids(PROMPT.to_vec());
    engine.generate(Request { prompt, params: params.clone() }).unwrap()
}

fn greedy(tokens: usize) -> SamplingParams {
    SamplingParams { temperature: Some(0.0), ..base(tokens, 0) }
}

/// The ids with a few others in the middle.
fn changed(ids: &[u32]) -> Vec<u32> {
    let (at, of) = (ids.len() / 3, ids.len() / 3 + 3);
    [&ids[..at], &[4], &ids[of..]].concat()
}

/// Fixture and machine: lanes, ranks, warps of both widths, strict lock step, windows, experts,
/// latents, recurrent states, entries, experts stacked or not, several pages a block.
const MACHINES: &[(&str, &str)] = &[
    ("llama", "seed=1,blocks=8"),
    ("laneformer_d2", "seed=2,ranks=2,warp=64,blocks=4,hold=1"),
    ("own_mistral", "seed=4,ranks=2,blocks=3"),
    ("qwen3_moe", "seed=6,ranks=2,blocks=4"),
    ("own_gpt_oss", "seed=7,blocks=4,warp=64,hold=1"),
    ("own_deepseek_v3", "seed=8,ranks=2,blocks=2"),
    ("gpt_oss_mxfp4", "seed=19,blocks=4"),
    ("own_qwen3_next", "seed=12,blocks=8,hold=1"),
    ("own_qwen3_next", "seed=13,ranks=2,blocks=3,warp=64"),
    ("own_deepseek_v4", "seed=14,ranks=2,blocks=3"),
];

#[test]
fn drafts_change_no_token() {
    two_at_a_time(MACHINES.iter().collect(), |(name, machine)| {
        let engine = open_on(&fixture(name), &format!("sim:{machine}"));
        let sampled = SamplingParams { top_p: Some(0.9), logprobs: Some(0), ..base(24, 3) };
        for (params, expects) in [(greedy(24), true), (sampled, false)] {
            let wanted = plain(&engine, &params);
            assert_eq!(wanted.timings.draft_n, 0);
            let (right, wrong) = (&wanted.token_ids, &changed(&wanted.token_ids));
            let first = if expects { (Some(right), 18) } else { (None, 0) };
            for (prediction, least) in [first, (Some(wrong), 8)] {
                let done = engine.generate(request(&params, prediction.map(|p| &p[..])));
                let done = done
                    .unwrap_or_else(|e| panic!("{name} {machine} {:?} {e}", params.temperature));
                assert_eq!(told(&done), told(&wanted), "{name} {machine}");
                let (drafted, right) = (done.timings.draft_n, done.timings.draft_n_accepted);
                assert!(drafted >= right && right >= least, "{name}: {right} of {drafted}");
            }
        }
    });
}

/// Four at a time, each way to choose: some have drafts, one none, each right drafts or wrong ones.
fn beside(name: &str, machine: &str) {
    let engine = open_on(&fixture(name), &format!("sim:{machine}"));
    let ways = ways(16);
    let alone: Vec<_> = ways.iter().map(|(_, params)| plain(&engine, params)).collect();
    for (ways, alone) in ways.chunks(4).zip(alone.chunks(4)) {
        let start = |at: usize| {
            let (ids, params) = (&alone[at].token_ids, &ways[at].1);
            let prediction = if at == 2 { changed(ids) } else { ids.clone() };
            let mut request = request(params, Some(&prediction));
            if at == 1 {
                (request.params.speculate, request.params.prediction) = (None, None);
            }
            engine.stream(request).unwrap()
        };
        let streams: Vec<_> = (0..ways.len()).map(start).collect();
        for ((mut stream, (way, _)), alone) in streams.into_iter().zip(ways).zip(alone) {
            assert_eq!(told(&stream.completion().unwrap()), told(alone), "{name}: {way}");
        }
    }
}

#[test]
fn drafts_beside_others_change_no_token() {
    beside("llama", "seed=7,blocks=8");
    beside("laneformer_d2", "seed=2,ranks=2,blocks=4,warp=64,hold=1");
    beside("own_qwen3_next", "seed=15,blocks=4");
    beside("own_deepseek_v4", "seed=16,blocks=4,warp=64");
}

/// A page that drafts ended, right ones and wrong ones, has the copy of the state that steps of one
/// leave there.
#[test]
fn a_state_behind_drafts_is_kept_in_pages() {
    let machines =
        [("own_qwen3_next", "seed=17,blocks=4"), ("own_deepseek_v4", "seed=18,blocks=4")];
    two_at_a_time(machines.iter().collect(), |(name, machine)| {
        let folder = fixture(name);
        // Pages that steps made are taken up again.
        let config = EngineConfig { reproducible: false, ..EngineConfig::default() };
        let open = || {
            let builder = Engine::builder(&folder).config(config.clone()).dtype(half(&folder));
            builder.device(format!("sim:{machine}")).prefill_kernel(false).build().unwrap()
        };
        let ids: Vec<u32> = (0..57).map(|n| 5 + n * n % 41).collect();
        let params = SamplingParams { logprobs: Some(0), ..greedy(24) };
        let ask = |engine: &Engine, ids: &[u32], params: &SamplingParams| {
            let prompt = Prompt::Ids(ids.to_vec());
            engine.generate(Request { prompt, params: params.clone() }).unwrap()
        };
        let wanted = ask(&open(), &ids, &params);
        for wrong in 4..10 {
            let engine = open();
            let mut prediction = wanted.token_ids.clone();
            prediction[wrong] ^= 1;
            let expecting =
                SamplingParams { prediction: Some(Prediction::Ids(prediction)), ..params.clone() };
            let done = ask(&engine, &ids, &expecting);
            assert_eq!(told(&done), told(&wanted), "{name}: {wrong}");
            assert!(done.timings.draft_n_accepted >= 8, "{:?}", done.timings);
            let longer = [&ids[..], &wanted.token_ids[..10]].concat();
            let behind =
                ask(&engine, &longer, &SamplingParams { max_tokens: Some(14), ..params.clone() });
            assert_eq!(behind.token_ids, wanted.token_ids[10..], "{name}: {wrong}");
            assert_eq!(behind.usage.cached_tokens, 64, "{name}: {wrong}");
        }
    });
}

/// Stops and penalties look at what was chosen, not at drafts behind it.
#[test]
fn a_stop_among_drafts_ends_the_sequence() {
    let engine = open_on(&fixture("llama"), "sim:seed=9,blocks=4");
    let all = plain(&engine, &greedy(20)).token_ids;
    let stops = SamplingParams { stop_token_ids: vec![all[9]], ..greedy(20) };
    for params in [stops.clone(), SamplingParams { min_tokens: 12, ..stops }, greedy(10)] {
        let wanted = plain(&engine, &params);
        let done = engine.generate(request(&params, Some(&all))).unwrap();
        assert_eq!(told(&done), told(&wanted));
        assert!(done.timings.draft_n_accepted >= 5, "{:?}", done.timings);
    }
}

/// One rule: the kernels draft what the CPU does, and as often. Of recorded prompts, whose tokens
/// are the same on both, and of so few tokens that the kernel with drafts makes all of them.
#[test]
fn kernels_draft_what_the_cpu_drafts() {
    let folder = fixture("own_llama_f16");
    let cpu = open_on(&folder, "cpu");
    let sim = open_on(&folder, "sim:seed=10,blocks=4,warp=64");
    let mut drafted = 0;
    for golden in goldens(&folder, "").iter().filter(|golden| golden.ids.len() < 16) {
        let of = |engine: &Engine| {
            let mut request = greedy_request(&golden.ids, 8);
            request.params.speculate = Some(Speculate::Lookup);
            let done = engine.generate(request).unwrap();
            assert_eq!(done.token_ids, golden.generated[..8]);
            [done.timings.draft_n, done.timings.draft_n_accepted]
        };
        let seen = of(&sim);
        assert_eq!(seen, of(&cpu));
        drafted += seen[0];
    }
    assert!(drafted > 0);
}

/// Where nothing repeats, sequences go on in the kernel of one column, and come back.
#[test]
fn what_matches_nothing_has_few_drafts() {
    let engine = open_on(&fixture("llama"), "sim:seed=11,blocks=4");
    let hot = SamplingParams { temperature: Some(50.0), ..base(48, 5) };
    let wanted = plain(&engine, &hot);
    let done = engine.generate(request(&hot, None)).unwrap();
    assert_eq!(told(&done), told(&wanted));
    assert!(done.timings.draft_n < 24, "{:?}", done.timings);
    // Behind forty tokens that nobody expected come those that were.
    let late = wanted.token_ids[32..].to_vec();
    let done = engine.generate(request(&hot, Some(&late))).unwrap();
    assert_eq!(told(&done), told(&wanted));
    assert!(done.timings.draft_n_accepted >= 7, "{:?}", done.timings);
}

/// Edits of the kernel with which drafts change tokens, and of which fixture.
const MUTANTS: &[(&str, &str, &str, &str)] = &[
    (
        "a wrong draft is kept",
        "llama",
        "        if (picked.id != tokens_of(b)[d.first + accepted]) break;\n",
        "",
    ),
    ("a draft has no position of its own", "llama", "= d.made + 1 + me;", "= d.made + 1;"),
    ("drafts are not counted", "llama", "count += tokens_of(b)[c] == id;", "count += 0;"),
    ("nothing", "llama", "    u32 accepted = 0;\n", "    u32 accepted = 0; \n"),
    (
        "a step goes on from the state before the drafts that were right",
        "own_qwen3_next",
        "if (kept >= (int)args.live) number",
        "if (kept < 0) number",
    ),
    (
        "a sequence goes on behind its last draft",
        "own_qwen3_next",
        "if (picked.id != kLate) d.kept = column;",
        "if (d.count > 0) d.kept = d.first + d.count - 1;",
    ),
    (
        "each draft begins where its sequence did",
        "own_deepseek_v4",
        "return column > 0 && sequence_at(b.shared, column - 1)",
        "return false && sequence_at(b.shared, column - 1)",
    ),
];

#[test]
fn drafts_that_change_tokens_are_found_out() {
    let jobs: Vec<_> = MUTANTS.iter().collect();
    two_at_a_time(jobs.into(), |(what, name, from, to)| {
        let edit = (*from, *to);
        let runner = edited("kie_decode", "sim:seed=12,blocks=4", edit, &Arc::default());
        let engine = open_over(name, runner);
        let penalised = SamplingParams { frequency_penalty: 2.0, ..greedy(24) };
        let same = |params: &SamplingParams| {
            let wanted = plain(&engine, params);
            let predictions = [wanted.token_ids.clone(), changed(&wanted.token_ids)];
            predictions.iter().all(|prediction| {
                let done = engine.generate(request(params, Some(prediction))).unwrap();
                told(&done) == told(&wanted)
            })
        };
        let kept = same(&greedy(24)) && same(&penalised);
        assert_eq!(kept, *what == "nothing", "{what}");
    });
}
