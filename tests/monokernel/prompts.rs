//! Prompts through the prefill kernel, simulated: wide tiles done in place, the logic as it is.

use kie_core::engine::{Engine, LogitsPath};
use kie_core::request::EngineConfig;

use super::fixture;
use super::support::{float32, goldens, greedy};

/// The fixtures that the kernel takes: one lane, heads without norms, no windows. Among them are
/// padded heads, rows beyond the matrices, biases and an odd number of heads a group.
const FIXTURES: [&str; 5] = ["llama", "llama_tied", "qwen2", "own_llama_f16", "own_llama_fp8_tied"];

fn open(name: &str, blocks: u32) -> Engine {
    let config = EngineConfig { max_batch: 2, prefix_cache: false, ..EngineConfig::default() };
    let device = format!("sim:seed={blocks},warp=32,blocks={blocks}");
    let builder = Engine::builder(fixture(name)).config(config).device(device);
    builder.prefill_kernel(true).build().unwrap()
}

#[test]
fn recorded_continuations_follow_prompts_in_the_prefill_kernel() {
    for (name, blocks) in FIXTURES.into_iter().flat_map(|n| [(n, 8), (n, 11)]) {
        let folder = fixture(name);
        let engine = open(name, blocks);
        for golden in goldens(&folder, if float32(&folder) { "bf16w." } else { "" }) {
            let count = golden.generated.len().min(6);
            let ours = greedy(&engine, &golden.ids, count);
            assert_eq!(ours, golden.generated[..count], "{name}, {} ids", golden.ids.len());
        }
    }
}

/// More than a tile, and a last page that is not whole; judged by the decode kernel's logits.
#[test]
fn a_long_prompt_continues_as_the_decode_kernel_would() {
    let engine = open("own_llama_f16", 8);
    let mut ids: Vec<u32> = (0..301).map(|i| 3 + (i * 7919 + i * i * 31) % 400).collect();
    let made = greedy(&engine, &ids, 4);
    ids.extend(&made[..3]);
    let logits = engine.logits(&ids, LogitsPath::Prefill).unwrap();
    let rows = logits.values.chunks_exact(logits.vocab).skip(300);
    for (row, token) in rows.zip(made) {
        let best = row.iter().copied().fold(f32::MIN, f32::max);
        let spread = best - row.iter().copied().fold(f32::MAX, f32::min);
        let lost = best - row[token as usize];
        assert!(lost <= 2e-3 * spread, "token {token} is {lost} below the best, of {spread}");
    }
}
