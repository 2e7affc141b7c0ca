//! Prompts through the prefill kernel against what is recorded of them.

use std::path::Path;

use kie_core::engine::{Engine, LogitsPath};
use kie_core::request::{EngineConfig, Prompt, Request, SamplingParams, Token};
use kie_core::Result;

use super::{float32, goldens, half};

/// Relative error of the likeliest ids' log-probabilities; a few roundings make 1e-3 to 3e-3.
pub const GATE: f64 = 5e-3;
/// Fewer positions run as columns of the decode kernel.
pub const MANY: usize = 17;

/// Every kind of model: padded heads, rows beyond the matrices, biases, norms of heads, an odd
/// number of heads a group; windows; lanes that hear of each other at once, later, or never;
/// experts, with biases and without, sinks, a scaled residual; delta rules, gated attention, an
/// expert that all positions go to.
pub const FIXTURES: [&str; 16] = [
    "llama",
    "own_mistral",
    "qwen2",
    "qwen3",
    "own_llama_f16",
    "own_llama_fp8_tied",
    "laneformer_d2",
    "own_laneformer_alone",
    "laneformer_d2_noearly_vp_lanescale",
    "own_laneformer_mixed",
    "own_laneformer_replicate",
    "qwen3_moe",
    "gpt_oss_mxfp4",
    "own_mixtral",
    "own_gpt_oss",
    "own_qwen3_next",
];

/// A token, and the likeliest ids at its place with their log-probabilities.
pub type Made = (u32, Vec<(u32, f32)>);

/// Greedy tokens, and for each the likeliest ids with their log-probabilities.
pub fn continuation(engine: &Engine, ids: &[u32], count: usize) -> Result<Vec<Made>> {
    let params = SamplingParams {
        max_tokens: Some(count),
        temperature: Some(0.0),
        logprobs: Some(20),
        ignore_eos: true,
        ..SamplingParams::default()
    };
    let request = Request { prompt: Prompt::Ids(ids.to_vec()), params };
    let tokens = engine.stream(request)?.collect::<Result<Vec<_>>>()?;
    let one = |t: &Token| {
        let likeliest = t.top_logprobs.iter().map(|top| (top.id, top.logprob)).collect();
        (t.token_ids[0], likeliest)
    };
    Ok(tokens.iter().map(one).collect())
}

/// How far the likeliest ids' log-probabilities are from those of logits, relative to these.
pub fn distance(likeliest: &[(u32, f32)], logits: &[f32]) -> f64 {
    assert_eq!(likeliest.len(), 20);
    let square = |v: f64| v * v;
    let all: Vec<f64> = logits.iter().map(|v| f64::from(*v)).collect();
    let mass = all.iter().map(|v| v.exp()).sum::<f64>().ln();
    let off: f64 = likeliest
        .iter()
        .map(|(id, ours)| square(f64::from(*ours) - (all[*id as usize] - mass)))
        .sum();
    let size: f64 = all.iter().map(|v| square(*v)).sum();
    (off / 20.0).sqrt() / (size / all.len() as f64).sqrt()
}

/// The worst distance behind a fixture's long prompts; infinite where a token is another one.
pub fn check(folder: &Path, engine: &Engine) -> Result<f64> {
    let name = folder.file_name().unwrap().to_str().unwrap();
    let goldens = goldens(folder, if float32(folder) { "bf16w." } else { "" });
    let long: Vec<_> = goldens.iter().filter(|g| g.ids.len() > MANY).collect();
    assert!(!long.is_empty(), "{name}");
    let mut worst = 0.0f64;
    for golden in long {
        let count = golden.generated.len().min(6);
        let made = continuation(engine, &golden.ids, count)?;
        let tokens: Vec<u32> = made.iter().map(|(token, _)| *token).collect();
        if tokens != golden.generated[..count] {
            return Ok(f64::INFINITY);
        }
        worst = worst.max(distance(&made[0].1, &golden.last));
    }
    eprintln!("{name}: {worst:.2e}");
    Ok(worst)
}

/// The CPU over weights of 16 bits, as the kernel has them.
pub fn reference(folder: &Path) -> Engine {
    let dtype = half(folder).to_owned();
    let config = EngineConfig { max_batch: 1, dtype, ..EngineConfig::default() };
    Engine::builder(folder).config(config).device("cpu").build().unwrap()
}

/// The worst distance of some tokens behind a prompt from what the reference makes of them.
pub fn judge(what: &str, engine: &Engine, reference: &Engine, ids: &[u32], count: usize) {
    let made = continuation(engine, ids, count).unwrap();
    let mut all = ids.to_vec();
    all.extend(made[..count - 1].iter().map(|(token, _)| *token));
    let logits = reference.logits(&all, LogitsPath::Decode).unwrap();
    let rows = logits.values.chunks_exact(logits.vocab).skip(ids.len() - 1);
    let worst = made.iter().zip(rows).map(|((_, l), row)| distance(l, row)).fold(0.0, f64::max);
    eprintln!("{what}, {} ids: {worst:.2e}", ids.len());
    assert!(worst <= GATE, "{what}, {} ids: {worst:.2e}", ids.len());
}

pub fn ids(count: u32) -> Vec<u32> {
    ids_from(0, count)
}

pub fn ids_from(first: u32, count: u32) -> Vec<u32> {
    (first..first + count).map(|i| 3 + (i * 7919 + i * i * 31) % 400).collect()
}
