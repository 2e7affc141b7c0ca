//! Every fixture × every level of the CPU that this machine has: logits at every position within
//! the gate, the greedy continuation token by token, decode against prefill.
//!
//! Fixtures are the folders of `tests/data`, and those under `KIE_FIXTURES` where it is set.
//!
//! Gates are relative L2 norms over a prompt: 1e-5 for float32 weights; 2e-3 for 16-bit and FP8
//! weights on the decode path, 1.5e-2 on the prefill path (which may use 16-bit activations).

#![allow(clippy::unwrap_used)]

mod support;

use std::path::Path;

use kie_core::engine::{Engine, LogitsPath};
use kie_core::request::{EngineConfig, Prompt, Request, SamplingParams};
use kie_kernels::cpu::simd::{self, Level};
use support::{fixtures, float32, goldens, greedy, relative, repository};

fn open(folder: &Path, level: Level, threads: usize) -> Engine {
    let config = EngineConfig { threads: Some(threads), max_batch: 4, ..EngineConfig::default() };
    Engine::builder(folder).config(config).device("cpu").level(level).build().unwrap()
}

fn check(folder: &Path, level: Level) {
    let name = folder.file_name().unwrap().to_string_lossy().into_owned();
    let engine = open(folder, level, 2);
    let gates = if float32(folder) { [1e-5, 1e-5] } else { [2e-3, 1.5e-2] };
    let goldens = goldens(folder, "");
    assert!(!goldens.is_empty());
    for (i, golden) in goldens.iter().enumerate() {
        for (path, gate) in [LogitsPath::Decode, LogitsPath::Prefill].into_iter().zip(gates) {
            let ours = engine.logits(&golden.ids, path).unwrap();
            let error = relative(&ours.values, &golden.logits);
            let place = format!("{name} {level:?} prompt {i} {path:?}");
            assert!(error <= gate, "{place}: {error:.2e} > {gate:.1e}");
        }
        let generated = greedy(&engine, &golden.ids, golden.generated.len());
        assert_eq!(generated, golden.generated, "{name} {level:?} prompt {i}");
    }
}

#[test]
fn every_fixture_at_every_level() {
    for folder in fixtures() {
        for level in simd::available() {
            check(&folder, level);
        }
    }
}

#[test]
fn bits_do_not_depend_on_threads_chunks_or_neighbours() {
    let folder = repository().join("tests/data/laneformer_d2");
    let level = simd::detect();
    let golden = goldens(&folder, "").pop().unwrap();
    let logits = |threads: usize| {
        open(&folder, level, threads).logits(&golden.ids, LogitsPath::Prefill).unwrap().values
    };
    let one = logits(1);
    for threads in [2, 3, 5] {
        assert!(one.iter().zip(&logits(threads)).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
    let engine = open(&folder, level, 2);
    let sampled = |seed: u64| SamplingParams {
        max_tokens: Some(40),
        temperature: Some(1.3),
        seed: Some(seed),
        ignore_eos: true,
        ..SamplingParams::default()
    };
    let stream = |seed: u64| {
        let prompt = Prompt::Ids(golden.ids.clone());
        engine.stream(Request { prompt, params: sampled(seed) }).unwrap()
    };
    let alone: Vec<_> = (0..4).map(|s| stream(s).completion().unwrap().token_ids).collect();
    let mut together: Vec<_> = (0..4).map(stream).collect();
    for (seed, stream) in together.iter_mut().enumerate() {
        assert_eq!(stream.completion().unwrap().token_ids, alone[seed], "seed {seed}");
    }
    assert!(alone[1..].iter().any(|ids| *ids != alone[0]), "seeds must matter");
}

#[test]
fn default_model_continues_as_recorded() {
    let folder = repository().join("python/kie/demo");
    let text = std::fs::read_to_string(folder.join("golden.json")).unwrap();
    let golden: serde_json::Value = serde_json::from_str(&text).unwrap();
    let engine = open(&folder, simd::detect(), 2);
    for prompt in golden["prompts"].as_array().unwrap() {
        let numbers = |key: &str| prompt[key].as_array().unwrap().clone();
        let ids: Vec<u32> =
            numbers("prompt_ids").iter().map(|v| v.as_u64().unwrap() as u32).collect();
        let text = prompt["prompt"].as_str().unwrap();
        let special = !text.starts_with("<s>");
        assert_eq!(engine.tokenize(text, special).unwrap(), ids);
        let wanted = numbers("greedy_ids");
        let ours = greedy(&engine, &ids, wanted.len());
        let sure = numbers("margins").iter().take_while(|m| m.as_f64().unwrap() >= 0.15).count();
        assert!(sure > 0, "{text:?}");
        for step in 0..sure {
            assert_eq!(u64::from(ours[step]), wanted[step].as_u64().unwrap(), "{text:?} {step}");
        }
    }
}
