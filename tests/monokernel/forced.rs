//! Text that a grammar forces is drafted beside its masks: kernels check it as rows of one step,
//! each under a mask of its own, and the tokens are those of steps of one.

use std::sync::Arc;

use kie_core::engine::Engine;
use kie_core::request::{
    Completion, EngineConfig, FinishReason, Prediction, SamplingParams, Speculate,
};
use kie_core::Grammar;
use kie_kernels::device::{Options, Running};
use kie_kernels::devices;
use serde_json::{json, Map};

use super::failures::{edited_by, open_over, Edit};
use super::masks::deafened;
use super::requests::{base, generate, request, PROMPT};
use super::support::{half, Around};
use super::{fixture, two_at_a_time};

/// How often a busy machine may be late with drafts.
const TRIES: usize = 20;

/// Two numbers with names whose letters are tokens of their own each, as the fixtures split them.
fn grammar() -> Grammar {
    let names = ["QXZJKVWY", "KJZXQVWY"];
    let number = json!({"type": "integer", "minimum": 100, "maximum": 999});
    let members: Map<_, _> = names.iter().map(|name| ((*name).into(), number.clone())).collect();
    Grammar::json_schema(&json!({
        "type": "object", "properties": members, "required": names, "additionalProperties": false,
    }))
}

/// Greedy, and each further way to choose and to end.
fn ways() -> Vec<SamplingParams> {
    let base = |seed| SamplingParams {
        grammar: Some(grammar()),
        ignore_eos: false,
        logprobs: Some(0),
        ..base(200, seed)
    };
    let greedy = SamplingParams { temperature: Some(0.0), ..base(0) };
    vec![
        greedy.clone(),
        SamplingParams {
            top_k: Some(30),
            top_p: Some(0.9),
            repetition_penalty: Some(1.3),
            frequency_penalty: 0.4,
            ..base(1)
        },
        SamplingParams { max_tokens: Some(21), ..base(2) },
        SamplingParams { min_tokens: 20, logit_bias: vec![(17, 3.0)], ..base(3) },
        SamplingParams { stop: vec!["KVW".into()], ..base(4) },
        SamplingParams { speculate: Some(Speculate::Lookup), ..base(5) },
        SamplingParams { logprobs: Some(2), ..greedy },
    ]
}

/// A fixture on a device that checks drafts beside masks, or on one that does not say so.
fn open(name: &str, device: &str, drafts: bool) -> Engine {
    let exact = device.ends_with("exact=1");
    let device = device.trim_end_matches(",exact=1");
    let folder = fixture(name);
    let config = EngineConfig { max_batch: 4, exact, ..EngineConfig::default() };
    let builder = Engine::builder(&folder).config(config).dtype(half(&folder));
    if drafts {
        return builder.device(device).build().unwrap();
    }
    let inner = devices::open(device, &Options { exact, ..Options::default() }).unwrap();
    builder.runner(Arc::new(Around(inner, |run: Box<dyn Running>| run, false))).build().unwrap()
}

/// Tokens, their log-probabilities and alternatives, and the end.
fn told(done: &Completion) -> String {
    format!("{:?} {:?} {:?} {:?}", done.token_ids, done.text, done.logprobs, done.finish_reason)
}

/// Each way alone, whose drafts are mostly right.
fn compare(name: &str, device: &str, ways: &[SamplingParams]) {
    let [plain, drafting] = [false, true].map(|drafts| open(name, device, drafts));
    let without = |params| {
        let done = generate(&plain, &PROMPT, params);
        assert_eq!(done.timings.draft_n, 0);
        told(&done)
    };
    let wanted: Vec<_> = ways.iter().map(without).collect();
    let accepted = |(params, wanted): (&SamplingParams, &String)| {
        let done = generate(&drafting, &PROMPT, params);
        assert_eq!(told(&done), *wanted, "{name} {device} {params:?}");
        let (drafted, right) = (done.timings.draft_n, done.timings.draft_n_accepted);
        assert!(right <= drafted, "{:?}", done.timings);
        right
    };
    // A draft that comes late is none.
    let enough = |_| ways.iter().zip(&wanted).map(accepted).sum::<usize>() >= 10 * ways.len() / 2;
    assert!((0..TRIES).any(enough), "{name} {device}: few drafts");
}

/// One rank and two, warps of both widths, strict lock step, latents, two halves a number,
/// recurrent states.
const MACHINES: &[(&str, &str, usize)] = &[
    ("llama", "sim:seed=1,blocks=4", 7),
    ("laneformer_d2", "sim:seed=2,ranks=2,warp=64,blocks=4,hold=1", 2),
    ("own_deepseek_v3", "sim:seed=3,ranks=2,blocks=2", 2),
    ("llama", "sim:seed=4,blocks=4,exact=1", 2),
    ("own_qwen3_next", "sim:seed=10,warp=64,blocks=4", 2),
];

#[test]
fn forced_text_takes_fewer_steps_and_changes_no_token() {
    let ways = ways();
    two_at_a_time(MACHINES.iter().collect(), |(name, device, count)| {
        compare(name, device, &ways[..*count]);
    });
}

/// Two under the grammar, one that drafts from its text, and one without drafts.
#[test]
fn forced_text_beside_others_changes_no_token() {
    let machines = [
        ("llama", "sim:seed=5,blocks=4"),
        ("laneformer_d2", "sim:ranks=2,warp=64,blocks=4,hold=1"),
    ];
    two_at_a_time(machines.iter().collect(), |(name, device)| {
        let engine = open(name, device, true);
        let (free, ways) = (base(40, 9), ways());
        let mut all = [ways[0].clone(), free.clone(), ways[1].clone(), free];
        let alone = all.each_ref().map(|params| generate(&engine, &PROMPT, params));
        all[3].prediction = Some(Prediction::Ids(alone[3].token_ids.clone()));
        for _ in 0..2 {
            let start = |params: &SamplingParams| engine.stream(request(&PROMPT, params)).unwrap();
            let streams = all.each_ref().map(start);
            for (mut stream, alone) in streams.into_iter().zip(&alone) {
                assert_eq!(told(&stream.completion().unwrap()), told(alone), "{name} {device}");
            }
        }
    });
}

/// The host hears of tokens once nothing is left to do, so that each mask that is behind no draft
/// comes late.
#[test]
fn late_masks_beside_drafts_change_no_token() {
    let device = "sim:seed=9,blocks=4";
    for name in ["llama", "own_qwen3_next"] {
        let plain = open(name, device, false);
        let inner = devices::open(device, &Options::default()).unwrap();
        let late = Engine::builder(fixture(name)).max_batch(4).dtype(half(&fixture(name)));
        let late = late.runner(deafened(inner, Arc::default(), true)).build().unwrap();
        for params in &ways()[..3] {
            let wanted = told(&generate(&plain, &PROMPT, params));
            assert_eq!(told(&generate(&late, &PROMPT, params)), wanted, "{name}");
        }
    }
}

#[test]
fn a_request_is_cancelled_among_drafts() {
    let engine = open("llama", "sim:seed=6,blocks=4", true);
    let wanted = generate(&engine, &PROMPT, &ways()[0]);
    for taken in [1, 6] {
        // It may have ended before a busy machine comes to cancel it.
        let cancelled = |_| {
            let mut stream = engine.stream(request(&PROMPT, &ways()[0])).unwrap();
            assert_eq!(stream.by_ref().take(taken).count(), taken);
            stream.cancel();
            let done = stream.completion().unwrap();
            assert!(wanted.token_ids.starts_with(&done.token_ids), "{:?}", done.token_ids);
            done.finish_reason == FinishReason::Cancelled
        };
        assert!((0..TRIES).any(cancelled), "{taken}");
        assert_eq!(told(&generate(&engine, &PROMPT, &ways()[0])), told(&wanted));
    }
}

/// Edits of the kernel with which drafts beside masks change tokens.
const MUTANTS: &[(&str, &[Edit])] = &[
    (
        "a draft's row is without a mask",
        &[("if (is_masked(q) && ", "if (is_masked(q) && column < (int)args.live && ")],
    ),
    (
        "a draft's row has the mask of the row before all",
        &[
            ("(int)args.live ? ahead : 0)", "(int)args.live ? 0 * ahead : 0)"),
            (
                "tag = q.emitted + ahead + 1;",
                "tag = q.emitted + (column < (int)args.live ? ahead : 0) + 1;",
            ),
        ],
    ),
    (
        "a launch leaves the state before the drafts that were right",
        &[("if (kept < (int)args.live) continue;", "continue;")],
    ),
    ("nothing", &[("tag = q.emitted + ahead + 1;", "tag = q.emitted + ahead + 1; ")]),
];

#[test]
fn masks_of_other_rows_are_found_out() {
    let (params, name) = (&ways()[0], "own_qwen3_next");
    let wanted = told(&generate(&open(name, "sim:seed=8,blocks=4", false), &PROMPT, params));
    two_at_a_time(MUTANTS.iter().collect(), |(what, edits)| {
        let device = "sim:seed=8,blocks=4";
        let engine = open_over(name, edited_by("kie_decode", device, edits, &Arc::default()));
        let mut right = 0;
        let same = |_| {
            let done = engine.generate(request(&PROMPT, params));
            right += done.as_ref().map_or(0, |done| done.timings.draft_n_accepted);
            done.is_ok_and(|done| told(&done) == wanted)
        };
        let kept = (0..3).all(same);
        assert_eq!(kept, *what == "nothing", "{what}");
        assert!(right > 0 || !kept, "{what}: no drafts");
    });
}
