//! Prompts through the prefill kernel, simulated: wide tiles done in place, the logic as it is.

use kie_core::engine::Engine;
use kie_core::request::{EngineConfig, Prompt, Request, SamplingParams, Token};
use kie_core::Result;

use super::failures::open_kernel;
use super::support::half;
use super::support::prompts::{
    check, continuation, ids, ids_from, judge, reference, Made, FIXTURES, GATE,
};
use super::{fixture, two_at_a_time};

fn open_with(name: &str, device: &str, config: EngineConfig) -> Engine {
    let builder = Engine::builder(fixture(name)).config(config).device(device);
    let engine = builder.dtype(half(&fixture(name))).prefill_kernel(true).build().unwrap();
    let plan = &engine.info().plan;
    assert!(plan.contains("prompts   up to"), "{plan}");
    assert!(!plan.contains("no prefill kernel"), "{plan}");
    engine
}

fn open(name: &str, blocks: u32) -> Engine {
    let config = EngineConfig { max_batch: 2, prefix_cache: false, ..EngineConfig::default() };
    open_with(name, &format!("sim:seed={blocks},warp=32,blocks={blocks}"), config)
}

#[test]
fn recorded_continuations_follow_prompts_in_the_prefill_kernel() {
    let all = FIXTURES.into_iter().zip([8, 11].into_iter().cycle());
    two_at_a_time(all.collect(), |(name, blocks)| {
        let off = check(&fixture(name), &open(name, blocks)).unwrap();
        assert!(off <= GATE, "{name}, {blocks} blocks: {off:.2e}");
    });
}

/// More than a tile, and a last page that is not whole.
#[test]
fn a_long_prompt_continues_as_the_reference_would() {
    let all = ["own_llama_f16", "laneformer_d2", "qwen3"];
    two_at_a_time(all.into(), |name| {
        let reference = reference(&fixture(name));
        judge(name, &open(name, 8), &reference, &ids(301), 4);
    });
}

/// Two head sizes, two widths of the mlp, windows and biases in some layers; two rotary bases. On
/// several machines meeting by phases, and by a queue in which layers of two classes are at work.
#[test]
fn layers_of_several_classes_go_through_the_prefill_kernel() {
    let all = [
        ("own_hybrid", "warp=32,blocks=8,seed=1", 301, 4),
        ("own_hybrid", "warp=64,blocks=5,seed=2", 23, 4),
        ("own_hybrid", "ranks=2,blocks=4,seed=3", 90, 4),
        ("own_hybrid", "ranks=2,blocks=3,seed=4", 500, 4),
        ("own_smollm3", "blocks=8,seed=5", 70, 2),
    ];
    two_at_a_time(all.into(), |(name, device, count, classes)| {
        let config = EngineConfig { max_batch: 2, prefix_cache: false, ..EngineConfig::default() };
        let engine = open_with(name, &format!("sim:{device}"), config);
        let plan = &engine.info().plan;
        assert!(plan.contains(&format!("{classes} classes of layers")), "{plan}");
        judge(name, &engine, &reference(&fixture(name)), &ids(count), 3);
    });
}

/// More places than a tile of an expert has, than a chunk, none for some experts; teams of half a
/// wave.
#[test]
fn experts_take_the_places_that_chose_them() {
    let all = [
        ("own_mixtral", "warp=64,blocks=8,seed=1", 301),
        ("gpt_oss_mxfp4", "blocks=11,seed=2", 620),
        ("own_qwen3_next", "warp=64,blocks=5,seed=5", 90),
        ("own_qwen3_next", "ranks=2,blocks=4,seed=6", 301),
        ("qwen3_moe", "ranks=2,blocks=4,seed=3", 530),
        ("qwen3_moe", "warp=64,blocks=3,seed=4", 23),
    ];
    two_at_a_time(all.into(), |(name, device, count)| {
        let config = EngineConfig { max_batch: 2, prefix_cache: false, ..EngineConfig::default() };
        let engine = open_with(name, &format!("sim:{device}"), config);
        judge(name, &engine, &reference(&fixture(name)), &ids(count), 2);
    });
}

/// Several chunks, where a sequence of windows has pages for one chunk and its window only, and
/// prompts that find their beginnings.
#[test]
fn windows_move_over_a_ring_of_pages_and_prefixes_are_found() {
    let config = EngineConfig { max_batch: 2, kv_bytes: Some(1), ..EngineConfig::default() };
    let name = "own_mistral";
    let engine = open_with(name, "sim:seed=5,warp=32,blocks=8", config);
    let reference = reference(&fixture(name));
    for count in [1300, 130, 300, 1335] {
        judge(name, &engine, &reference, &ids(count), 3);
    }
}

/// The last position goes with the others, on either side of a page's and a tile's edge, and behind
/// what was found of a prompt; where only it is left, it is a step of decoding. Of the model with
/// experts the ids are others: behind 129 of these and two tokens a router's second and third
/// logits are 0.001 apart, which a rounding turns around, and with them the third token.
#[test]
fn first_tokens_are_the_references_whatever_is_left_of_a_prompt() {
    let all = [
        ("own_llama_f16", 8, 0),
        ("laneformer_d2_noearly_vp_lanescale", 11, 0),
        ("own_qwen3_next", 8, 1),
    ];
    two_at_a_time(all.into(), |(name, blocks, first)| {
        let ids = |count| ids_from(first, count);
        let config = EngineConfig { max_batch: 2, reproducible: false, ..EngineConfig::default() };
        let device = format!("sim:seed={blocks},warp=32,blocks={blocks}");
        let (engine, reference) = (open_with(name, &device, config), reference(&fixture(name)));
        for (count, cached) in [(64, 0), (65, 64), (63, 0), (129, 64), (129, 128), (128, 64)] {
            let request = || Request {
                prompt: Prompt::Ids(ids(count)),
                params: SamplingParams { max_tokens: Some(3), ..greedy() },
            };
            let done = engine.generate(request()).unwrap();
            assert_eq!(done.usage.cached_tokens, cached, "{name}, {count} ids");
            let wanted = reference.generate(request()).unwrap().token_ids;
            assert_eq!(done.token_ids, wanted, "{name}, {count} ids, {cached} of them cached");
            judge(name, &engine, &reference, &ids(count), 2);
        }
    });
}

/// A prompt goes on from the copy of a state that an earlier one's chunk left inside it.
#[test]
fn copies_of_states_serve_prompts_in_the_prefill_kernel() {
    let name = "own_qwen3_next";
    let config = EngineConfig { max_batch: 2, reproducible: false, ..EngineConfig::default() };
    let (engine, reference) =
        (open_with(name, "sim:blocks=8,seed=8", config), reference(&fixture(name)));
    for count in [70, 170, 200] {
        judge(name, &engine, &reference, &ids(count), 3);
        let params = SamplingParams { max_tokens: Some(1), ..greedy() };
        let request = Request { prompt: Prompt::Ids(ids(count)), params };
        let found = engine.generate(request).unwrap().usage.cached_tokens;
        assert_eq!(found, count as usize / 64 * 64, "{count} ids");
    }
}

fn greedy() -> SamplingParams {
    SamplingParams { temperature: Some(0.0), ignore_eos: true, ..SamplingParams::default() }
}

/// Penalties that know the prompt, filters, bans, log-probabilities: from the first token on.
#[test]
fn first_tokens_are_chosen_as_they_were_asked_for() {
    let penalties = SamplingParams {
        temperature: Some(0.8),
        top_p: Some(0.9),
        repetition_penalty: Some(1.3),
        presence_penalty: 0.7,
        frequency_penalty: 0.4,
        seed: Some(21),
        logprobs: Some(3),
        ..greedy()
    };
    let repeats = SamplingParams { repetition_penalty: Some(1.7), ..greedy() };
    let bias = SamplingParams { logit_bias: vec![(17, 6.0)], logprobs: Some(0), ..greedy() };
    let (engine, reference) = (open("qwen2", 8), reference(&fixture("qwen2")));
    let stop = reference
        .generate(Request { prompt: Prompt::Ids(ids(70)), params: greedy() })
        .unwrap()
        .token_ids[0];
    let banned = SamplingParams { stop_token_ids: vec![stop], min_tokens: 2, ..greedy() };
    let stopped = SamplingParams { stop_token_ids: vec![stop], ..greedy() };
    let of = |engine: &Engine, params: &SamplingParams| {
        let params = SamplingParams { max_tokens: Some(4), ..params.clone() };
        let request = Request { prompt: Prompt::Ids(ids(70)), params };
        engine.stream(request).unwrap().collect::<Result<Vec<_>>>().unwrap()
    };
    for (what, params) in [
        ("penalties", penalties),
        ("repetition", repeats),
        ("bias", bias),
        ("banned", banned),
        ("stopped", stopped),
    ] {
        let (ours, theirs) = (of(&engine, &params), of(&reference, &params));
        assert_eq!(ours.len(), theirs.len(), "{what}");
        for (a, b) in ours.iter().zip(&theirs) {
            assert_eq!(a.token_ids, b.token_ids, "{what}");
            assert_eq!(a.logprob.is_some(), params.logprobs.is_some(), "{what}");
            let off = a.logprob.unwrap_or(0.0) - b.logprob.unwrap_or(0.0);
            assert!(off.abs() < 0.05, "{what}: {:?} and {:?}", a.logprob, b.logprob);
        }
    }
}

/// Fixture, ranks, blocks of each: lanes over ranks, delayed or not at all; lanes cut from dense
/// models, which add each other's outputs at once.
const TOGETHER: &[(&str, u32, u32)] = &[
    ("laneformer_d2", 2, 4),
    ("laneformer_d2_noearly_vp_lanescale", 2, 6),
    ("own_laneformer_replicate", 4, 4),
    ("llama", 2, 4),
    ("qwen3", 2, 5),
    ("own_llama_fp8_tied", 4, 3),
    ("gpt_oss_mxfp4", 2, 5),
];

#[test]
fn prompts_run_on_several_machines_as_on_one() {
    let all = TOGETHER.iter().enumerate();
    two_at_a_time(all.collect(), |(seed, &(name, ranks, blocks))| {
        let config = EngineConfig { max_batch: 2, prefix_cache: false, ..EngineConfig::default() };
        let device = format!("sim:ranks={ranks},blocks={blocks},seed={seed}");
        let off = check(&fixture(name), &open_with(name, &device, config)).unwrap();
        assert!(off <= GATE, "{name}, {ranks} ranks: {off:.2e}");
    });
}

/// A model without lanes over three ranks, which slice them.
const SLICED: &str = "own_llama_fp8_tied";

/// Slices of one group of places; of two, with norms of heads; of several chunks, the last one's
/// last group owned by one rank only.
#[test]
fn long_prompts_on_several_machines_go_by_groups_of_places() {
    let all = [
        (SLICED, "ranks=3,blocks=3,seed=1", 500),
        ("qwen2", "ranks=2,blocks=2,seed=3", 700),
        ("qwen3", "ranks=2,blocks=5,seed=4", 517),
        ("own_mistral", "ranks=2,blocks=7,seed=5", 1540),
    ];
    two_at_a_time(all.into(), |(name, device, count)| {
        let config = EngineConfig { max_batch: 2, prefix_cache: false, ..EngineConfig::default() };
        let engine = open_with(name, &format!("sim:{device}"), config);
        judge(name, &engine, &reference(&fixture(name)), &ids(count), 2);
    });
}

/// No rank waits for ever for one that does not publish what it sent.
#[test]
fn a_rank_that_tells_nothing_ends_the_request() {
    let silent = (
        "        store_word_system(stream_word(args, w.stage,",
        "        if (w.stage != kDoReduceO || args.model.rank != 2)
            store_word_system(stream_word(args, w.stage,",
    );
    let device = "sim:ranks=3,blocks=3,seed=6,host=300";
    let engine = open_kernel("kie_prefill", SLICED, device, silent.0, silent.1);
    let error = continuation(&engine, &ids(300), 1).unwrap_err().to_string();
    assert!(error.contains("in step 0 waited for the prefill kernel's wait 0x"), "{error}");
    assert!(engine.is_closed());
}

/// Ids and log-probabilities behind a prompt, as bits, while a sequence decodes beside it: how many
/// tokens that one made before the first of these, and whether they were those that it makes alone.
fn beside(engine: &Engine, ids: &[u32]) -> (Vec<Made>, usize, bool) {
    let params = SamplingParams {
        max_tokens: Some(60),
        temperature: Some(0.0),
        ignore_eos: true,
        ..SamplingParams::default()
    };
    let start = || {
        let prompt = Prompt::Ids(vec![5, 9, 17]);
        engine.stream(Request { prompt, params: params.clone() }).unwrap()
    };
    let alone: Vec<Token> = start().collect::<Result<_>>().unwrap();
    let mut victim = start();
    let mut tokens: Vec<Token> = victim.by_ref().take(2).map(Result::unwrap).collect();
    let made = std::thread::scope(|scope| {
        let newcomer = scope.spawn(|| continuation(engine, ids, 3).unwrap());
        while !newcomer.is_finished() {
            tokens.extend(victim.next().map(Result::unwrap));
        }
        newcomer.join().unwrap()
    });
    let meanwhile = tokens.len() - 2;
    tokens.extend(victim.map(Result::unwrap));
    let same = alone.iter().zip(&tokens).all(|(a, b)| a.token_ids == b.token_ids);
    (made, meanwhile, same && alone.len() == tokens.len())
}

/// Between the layers of a prompt's chunk sequences go on, and neither changes a bit of the other.
#[test]
fn a_prompt_beside_a_sequence_goes_some_layers_at_a_time() {
    // Fixture, its layers, ranks, blocks of each.
    let all = [
        ("own_llama_f16", 3, 1, 4),
        ("own_llama_f16", 3, 2, 3),
        ("laneformer_d2", 6, 1, 4),
        ("laneformer_d2", 6, 2, 4),
        ("gpt_oss_mxfp4", 4, 1, 4),
        ("own_qwen3_next", 3, 1, 4),
    ];
    two_at_a_time(all.into(), |(name, layers, ranks, blocks)| {
        let config = EngineConfig {
            max_batch: 2,
            prefix_cache: false,
            max_itl_ms: Some(0.01),
            ..EngineConfig::default()
        };
        let device = format!("sim:ranks={ranks},blocks={blocks},seed=3");
        let engine = open_with(name, &device, config);
        let ids = ids(150);
        let alone = continuation(&engine, &ids, 3).unwrap();
        let (made, meanwhile, same) = beside(&engine, &ids);
        assert!(same, "{name}: the prompt beside it changes a token");
        assert_eq!(made, alone, "{name}: the sequence beside it changes a bit");
        assert!(meanwhile >= layers, "{name}: {meanwhile} tokens beside {layers} layers");
    });
}

/// What is wrong, with which fixture, what the sources say, what they should not say.
const MUTANTS: &[(&str, &str, &str, &str)] = &[
    (
        "ranks do not wait for each other",
        "laneformer_d2",
        "seen < wanted; seen = load_word_system(word)",
        "false; seen = load_word_system(word)",
    ),
    (
        "a rank writes over what others have yet to read",
        "laneformer_d2",
        "kind * kPast + layer % kPast)",
        "kind * kPast + layer % 1)",
    ),
    (
        "a rank keeps what its lanes added to itself",
        "laneformer_d2",
        "rank < kRanks; ++rank) {\n        u64* there",
        "rank < 1; ++rank) {\n        u64* there",
    ),
    (
        "a rank keeps its slices' sums to itself",
        "llama",
        "const long hop = args.peer_offset[",
        "const long hop = 0 * args.peer_offset[",
    ),
    (
        "a rank keeps what the next product takes to itself",
        "llama",
        "args.scratch + at + args.peer_offset[my]",
        "args.scratch + at + 0 * args.peer_offset[my]",
    ),
    (
        "a rank keeps the squares of its places to itself",
        "llama",
        "(float*)(to + args.peer_offset[r])",
        "(float*)(to + 0 * args.peer_offset[r])",
    ),
    (
        "a rank adds sums of places that are not its own",
        "llama",
        "(int)(args.model.rank + kRanks - from % kRanks) % kRanks",
        "(int)(args.model.rank + 1 + kRanks - from % kRanks) % kRanks",
    ),
    (
        "a rank tells of the last residual, which another owns",
        "llama",
        "owner_of(place / 8) != (int)args.model.rank",
        "owner_of(place / 8) == (int)args.model.rank",
    ),
    (
        "a rank forgets the last group of eight places that it owns",
        "llama",
        "return {first, over(max_i(over(s.to, 8) - first, 0), kRanks)};",
        "return {first, over(max_i(over(s.to, 8) - first, 0), kRanks) - 1};",
    ),
    (
        "others' outputs are those of another layer",
        "laneformer_d2",
        "past_at(args, kind, layer - delay, l)[at]",
        "past_at(args, kind, layer - delay + 1, l)[at]",
    ),
    (
        "blocks do not wait for each other",
        "laneformer_d2",
        "seen < wanted; seen = load_word(args.arrivals)",
        "false; seen = load_word(args.arrivals)",
    ),
    (
        "queries see one position less",
        "laneformer_d2",
        "k <= q - lowest) s[4 * j + i]",
        "k <= q - lowest + 1) s[4 * j + i]",
    ),
    ("keys take the queries' norm", "qwen3", "is_key * (C::kHeadDim / 2) + f / 2", "f / 2"),
    (
        "the first token follows the last position but one",
        "laneformer_d2",
        "place = chunk.to - 1, e",
        "place = chunk.to - 2, e",
    ),
    (
        "a rank takes its lanes' last residuals for another rank's",
        "laneformer_d2",
        "lane_of_model(args, l)) + pair",
        "l) + pair",
    ),
    (
        "a place adds one of its experts' parts several times",
        "gpt_oss_mxfp4",
        "places[place * C::kChosen + n]",
        "places[place * C::kChosen]",
    ),
    (
        "places of a word have one row of an expert",
        "gpt_oss_mxfp4",
        "takers_at(args, w)[id] & ((1u << t) - 1)",
        "takers_at(args, w)[id] & 0",
    ),
    (
        "a state stays where it was",
        "own_qwen3_next",
        "u8* left = working_at(args, l, args.state & 1)",
        "u8* left = working_at(args, l, ~args.state & 1)",
    ),
    (
        "places change S as if none were before them",
        "own_qwen3_next",
        "u[i] -= by[i] * u[j];",
        "u[i] -= by[i] * 0;",
    ),
    (
        "an output does not know its own place",
        "own_qwen3_next",
        "j + n < i + (q ? 1 : 0)",
        "j + n < i + (q ? 0 : 0)",
    ),
    (
        "the expert of all positions has no gate",
        "own_qwen3_next",
        "scale[n] = reciprocal_f(1.0f + exp2_f(-1.44269504f * *from));",
        "scale[n] = from != nullptr;",
    ),
    (
        "attention's output has no gates",
        "own_qwen3_next",
        "a *= reciprocal_f(1.0f + exp2_f(-1.44269504f * g0));",
        "a *= reciprocal_f(1.0f + exp2_f(-1.44269504f * g0 * 0));",
    ),
    ("attention has no sinks", "gpt_oss_mxfp4", "(C::kSinks)", "(false && C::kSinks)"),
    ("nothing", "laneformer_d2", "head_norms + is_key *", "head_norms + is_key  *"),
];

#[test]
fn every_mutant_is_found_out() {
    two_at_a_time(MUTANTS.iter().collect(), |(what, name, from, to)| {
        let ranks = if what.contains("rank") { 2 } else { 1 };
        let device = format!("sim:seed=1,ranks={ranks},blocks=8,host=300");
        let engine = open_kernel("kie_prefill", name, &device, from, to);
        let good = check(&fixture(name), &engine).is_ok_and(|off| off <= GATE);
        assert_eq!(good, *what == "nothing", "{what}: {from:?} -> {to:?}");
    });
}

#[test]
fn prompts_run_without_a_prefill_kernel_that_does_not_compile() {
    let (from, to) = ("KIE_KERNEL(kie_prefill,", "no such thing; KIE_KERNEL(kie_prefill,");
    let engine = open_kernel("kie_prefill", "llama", "sim:seed=2,blocks=8", from, to);
    let plan = &engine.info().plan;
    assert!(plan.contains("warning   rank 0: no prefill kernel: "), "{plan}");
    assert!(check(&fixture("llama"), &engine).unwrap() <= GATE);
}

/// A last item of a single tile of rows: no copying warp may fall behind the ring.
#[test]
fn an_item_of_one_tile_stops_nobody() {
    let name = "laneformer_d2_noearly_vp_lanescale";
    for seed in [2, 3, 5] {
        let config = EngineConfig { max_batch: 2, prefix_cache: false, ..EngineConfig::default() };
        let engine = open_with(name, &format!("sim:ranks=2,blocks=6,seed={seed}"), config);
        assert!(check(&fixture(name), &engine).unwrap() <= GATE, "seed {seed}");
    }
}
