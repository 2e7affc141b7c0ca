//! Several machines as one: lanes over ranks (delayed or summed at once), dense models cut into one
//! lane a rank. All ranks run under one seeded scheduler.

use kie_core::engine::{Engine, LogitsPath};
use kie_core::request::EngineConfig;

use super::machines::Grouped;
use super::support::{goldens, greedy, greedy_request, half, open_on};
use super::{check, fixture, is_wide, two_at_a_time, Job};

/// Fixture, ranks, blocks of each: so every head mode, both exchanges, one lane a rank and several,
/// biases, head norms, windows, FP8, experts and MXFP4, latents, at 2, 4 and 8 ranks.
const TOGETHER: &[(&str, u32, u32)] = &[
    ("laneformer_d2", 4, 2),
    ("own_laneformer_alone", 2, 4),
    ("laneformer_d2_noearly_vp_lanescale", 2, 6),
    ("laneformer_d2_noearly_vp_lanescale", 4, 2),
    ("own_laneformer_replicate", 4, 4),
    ("own_laneformer_mixed", 2, 4),
    ("own_laneformer_mixed", 8, 2),
    ("own_laneformer_preagg", 2, 4),
    ("own_hybrid", 2, 4),
    ("llama", 2, 5),
    ("own_mistral", 4, 2),
    ("qwen2", 2, 3),
    ("qwen3", 2, 4),
    ("own_llama_f16", 4, 2),
    ("own_llama_fp8_tied", 2, 4),
    ("own_llama_fp8_tied", 8, 2),
    ("qwen3_moe", 2, 5),
    ("own_gpt_oss", 4, 2),
    ("gpt_oss_mxfp4", 2, 4),
    ("own_deepseek_v3", 4, 2),
    ("own_deepseek_v4", 2, 4),
];

/// With those, every fixture as far as its lanes or heads admit it.
const TOGETHER_WIDE: &[(&str, u32, u32)] = &[
    ("own_laneformer_preagg", 4, 4),
    ("laneformer_d2", 2, 8),
    ("own_laneformer_alone", 4, 4),
    ("own_laneformer_replicate", 2, 8),
    ("own_laneformer_replicate", 8, 3),
    ("own_laneformer_mixed", 4, 6),
    ("own_mistral", 2, 8),
    ("own_llama_f16", 2, 8),
    ("own_llama_fp8_tied", 4, 6),
    ("own_mixtral", 2, 4),
    ("qwen3_moe", 4, 4),
    ("gpt_oss_mxfp4", 4, 4),
];

/// Kv heads on several machines, with a query head each or two and one; three, three and two of
/// eight kv heads.
const UNEVEN: &[(&str, u32, u32)] =
    &[("qwen2", 4, 2), ("qwen3", 4, 3), ("llama", 4, 3), ("own_llama_fp8_tied", 3, 4)];

fn together(list: &[(&str, u32, u32)]) {
    let job = |(at, &(name, ranks, blocks)): (usize, &(&str, u32, u32))| Job {
        folder: fixture(name),
        device: format!("sim:ranks={ranks},blocks={blocks},seed={at},warp={}", 32 + at % 2 * 32),
        prompt: if is_wide() { usize::MAX } else { 24 },
        positions: 4,
        tokens: 6,
    };
    two_at_a_time(list.iter().enumerate().map(job).collect(), |job| check(&job));
}

#[test]
fn several_machines_are_one() {
    together(TOGETHER);
    if is_wide() {
        together(TOGETHER_WIDE);
    }
}

#[test]
fn heads_that_do_not_divide_are_shared_or_left_out() {
    together(UNEVEN);
}

/// Sequences together on several machines, with prompts in columns or in the prefill kernel.
#[test]
fn sequences_together_are_what_they_are_alone() {
    let all =
        [("laneformer_d2", 2, 4, true), ("laneformer_d2", 4, 2, false), ("llama", 2, 4, true)];
    two_at_a_time(all.into(), |(name, ranks, blocks, wide)| {
        let config = EngineConfig { max_batch: 4, prefix_cache: false, ..EngineConfig::default() };
        let device = format!("sim:ranks={ranks},blocks={blocks},seed=6");
        let builder = Engine::builder(fixture(name)).config(config).device(&device);
        let engine = builder.prefill_kernel(wide).build().unwrap();
        let prompts: Vec<Vec<u32>> = [40, 7, 25]
            .map(|count| (0..count).map(|i| 3 + (i * 37 + count) % 300).collect())
            .into();
        let ask = |ids: &Vec<u32>| engine.stream(greedy_request(ids, 8)).unwrap();
        let alone: Vec<_> =
            prompts.iter().map(|ids| ask(ids).completion().unwrap().token_ids).collect();
        let streams: Vec<_> = prompts.iter().map(ask).collect();
        for (mut stream, alone) in streams.into_iter().zip(&alone) {
            assert_eq!(&stream.completion().unwrap().token_ids, alone, "{name} on {ranks}");
        }
    });
}

/// The same where warps share the columns of a matrix, and other lanes' words are dealt out to all
/// threads: matrices of the usual fixtures are too narrow for that.
#[test]
fn sequences_together_whose_warps_share_columns() {
    let model = Grouped::new("ranks");
    let prompts: Vec<Vec<u32>> =
        [5, 11].map(|count| (0..count).map(|i| (i * 37 + count) % 256).collect()).into();
    let open = |device: &str| {
        let config = EngineConfig { max_batch: 4, prefix_cache: false, ..EngineConfig::default() };
        Engine::builder(&model.0).config(config).device(device).build().unwrap()
    };
    let engine = open("sim:ranks=2,blocks=16,seed=6");
    let plan = &engine.info().plan;
    assert!(plan.contains("Output: 32 rows x 256, 8 k-warps"), "{plan}");
    let (ask, reference) = (|engine: &Engine, ids| engine.stream(ids).unwrap(), open("cpu"));
    let streams: Vec<_> = prompts.iter().map(|ids| ask(&engine, greedy_request(ids, 6))).collect();
    for (mut stream, ids) in streams.into_iter().zip(&prompts) {
        let wanted = ask(&reference, greedy_request(ids, 6)).completion().unwrap().token_ids;
        assert_eq!(stream.completion().unwrap().token_ids, wanted, "{} ids", ids.len());
    }
}

/// Experts over eight machines, a head each, alone and together.
#[test]
fn experts_on_eight_machines_are_those_of_one() {
    let model = Grouped::experts("experts");
    let config = EngineConfig { max_batch: 4, prefix_cache: false, ..EngineConfig::default() };
    let open = |device: &str| {
        Engine::builder(&model.0).config(config.clone()).device(device).build().unwrap()
    };
    let (one, eight) = (open("cpu"), open("sim:ranks=8,blocks=2,seed=6"));
    let prompts: Vec<Vec<u32>> =
        [5, 11, 3].map(|count| (0..count).map(|i| (i * 37 + count) % 256).collect()).into();
    let wanted: Vec<_> = prompts.iter().map(|ids| greedy(&one, ids, 5)).collect();
    assert_eq!(greedy(&eight, &prompts[0], 5), wanted[0]);
    let streams: Vec<_> =
        prompts.iter().map(|ids| eight.stream(greedy_request(ids, 5)).unwrap()).collect();
    for (mut stream, wanted) in streams.into_iter().zip(&wanted) {
        assert_eq!(&stream.completion().unwrap().token_ids, wanted);
    }
}

#[test]
fn bits_do_not_depend_on_the_schedule() {
    let folder = fixture("qwen2");
    let golden = &goldens(&folder, "")[1];
    let logits = |seed: u32| {
        let engine = open_on(&folder, &format!("sim:ranks=2,blocks=8,seed={seed}"));
        engine.logits(&golden.ids, LogitsPath::Prefill).unwrap().values
    };
    let first = logits(1);
    for seed in 2..4 {
        let same = first.iter().zip(&logits(seed)).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same, "seed {seed}");
    }
}

#[test]
fn what_does_not_divide_is_refused_in_words() {
    for (name, ranks) in [("qwen2", 8), ("qwen3", 3), ("laneformer_d2", 3), ("laneformer_d2", 8)] {
        let device = format!("sim:ranks={ranks},blocks=8");
        let config = EngineConfig::default();
        let builder = Engine::builder(fixture(name)).config(config).device(&device);
        let engine = builder.dtype(half(&fixture(name))).build();
        let Err(error) = engine else { panic!("{name} on {ranks}") };
        let wanted = format!("do not divide by {ranks} ranks");
        assert!(error.to_string().contains(&wanted), "{name} on {ranks}: {error}");
        assert_eq!(error.class(), "UnsupportedModelError", "{name} on {ranks}: {error}");
    }
}

#[test]
fn ranks_are_named_by_number_where_there_are_any() {
    let open = |device: &str| Engine::builder(fixture("llama")).device(device).build();
    assert_eq!(open("sim:0,1").map(|e| e.info().device).unwrap(), "sim:0,1");
    assert_eq!(open("cpu:0,1").map(|e| e.info().device).unwrap(), "cpu:0,1");
    assert_eq!(open("cpu:0").map(|e| e.info().device).unwrap(), "cpu:0");
    for device in ["cpu:1", "cpu:1,0", "cpu:0,0", "cpu:ranks=2", "cpu:0,1,2,3,4,5,6,7,8", "cpu:"] {
        let error = open(device).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.contains(device) && error.contains("such as \"cpu:0,1\""), "{error}");
    }
    for device in ["sim:1,0", "sim:0,2", "sim:0,1,2,3,4,5,6,7,8"] {
        assert!(open(device).is_err(), "{device}");
    }
}
