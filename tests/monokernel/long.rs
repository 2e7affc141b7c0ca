//! Contexts of many pages a block, simulated: they come through the ring, to one column or to
//! several, with windows, normed heads and lanes. Judged by the CPU's logits.

use kie_core::engine::{Engine, LogitsPath};

use super::fixture;
use super::support::{greedy_request, open_on};

/// Fixtures, blocks so few that a block has several pages, and the width of a warp.
const MODELS: [(&str, u32, u32); 5] = [
    ("own_llama_f16", 2, 64),
    ("qwen3", 4, 32),
    ("own_mistral", 2, 32),
    ("laneformer_d2", 8, 64),
    ("own_laneformer_replicate", 8, 32),
];
/// A page begins among the tokens that follow.
const PROMPT: usize = 185;
const TOKENS: usize = 12;

/// Every token is the CPU's best but for a hair.
fn judge(name: &str, cpu: &Engine, ids: &[u32], tokens: &[u32]) {
    let whole = [ids, &tokens[..tokens.len() - 1]].concat();
    let logits = cpu.logits(&whole, LogitsPath::Prefill).unwrap();
    let rows = logits.values.chunks_exact(logits.vocab).skip(ids.len() - 1);
    for (i, (row, token)) in rows.zip(tokens).enumerate() {
        let best = row.iter().copied().fold(f32::MIN, f32::max);
        let spread = best - row.iter().copied().fold(f32::MAX, f32::min);
        let lost = best - row[*token as usize];
        assert!(lost <= 2e-3 * spread, "{name} token {i}: {lost} below the best, of {spread}");
    }
}

#[test]
fn long_contexts_continue_as_on_the_cpu_alone_beside_others_and_from_the_cache() {
    super::two_at_a_time(MODELS.into(), |(name, blocks, warp)| {
        let folder = fixture(name);
        let cpu = open_on(&folder, "cpu");
        let engine = open_on(&folder, &format!("sim:seed=5,warp={warp},blocks={blocks}"));
        let prompt = |n: usize, by: u32| -> Vec<u32> {
            (0..n as u32).map(|i| 3 + (i * by + i * i * 31) % 400).collect()
        };
        let prompts = [prompt(PROMPT, 7919), prompt(PROMPT - 64, 104_729), prompt(70, 101)];
        let alone =
            prompts.each_ref().map(|ids| engine.generate(greedy_request(ids, TOKENS)).unwrap());
        for (ids, done) in prompts.iter().zip(&alone) {
            assert_eq!((done.usage.cached_tokens, done.token_ids.len()), (0, TOKENS), "{name}");
            judge(name, &cpu, ids, &done.token_ids);
        }
        let beside =
            prompts.each_ref().map(|ids| engine.stream(greedy_request(ids, TOKENS)).unwrap());
        for (mut stream, done) in beside.into_iter().zip(&alone) {
            let again = stream.completion().unwrap();
            assert_eq!(again.token_ids, done.token_ids, "{name}: neighbours change a token");
        }
    });
}
