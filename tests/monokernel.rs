//! The monokernel on every fixture: the real kernel sources, simulated (`sim`) or on a GPU where
//! `KIE_DEVICE` names one. Logits of both paths within the gate of 16-bit arithmetic, the greedy
//! continuation token by token.

#![allow(clippy::unwrap_used)]

mod support;

use kie_core::engine::{Engine, LogitsPath};
use support::{fixtures, float32, goldens, greedy, open_on, relative};

/// Relative L2 over a prompt: activations and weights are halves on both paths.
const GATE: f64 = 2e-3;

fn devices() -> Vec<String> {
    match std::env::var("KIE_DEVICE") {
        Ok(name) => vec![name],
        Err(_) => {
            let seeds: u64 = std::env::var("SEEDS").map_or(1, |s| s.parse().unwrap());
            let one = |seed: u64| {
                let (warp, blocks) = if seed % 2 == 0 { (32, 8) } else { (64, 11) };
                format!("sim:seed={seed},warp={warp},blocks={blocks}")
            };
            (0..seeds).map(one).collect()
        }
    }
}

fn check(folder: &std::path::Path, engine: &Engine, device: &str) {
    let name = folder.file_name().unwrap().to_string_lossy().into_owned();
    let mut worst: f64 = 0.0;
    for (i, golden) in
        goldens(folder, if float32(folder) { "bf16w." } else { "" }).iter().enumerate()
    {
        for path in [LogitsPath::Prefill, LogitsPath::Decode] {
            let ours = engine.logits(&golden.ids, path).unwrap();
            let error = relative(&ours.values, &golden.logits);
            worst = worst.max(error);
            assert!(error <= GATE, "{name} {device} prompt {i} {path:?}: {error:.2e}");
        }
        let generated = greedy(engine, &golden.ids, golden.generated.len());
        assert_eq!(generated, golden.generated, "{name} {device} prompt {i}");
    }
    println!("{name} {device}: relative L2 {worst:.2e}");
}

#[test]
fn every_fixture() {
    let only = std::env::var("KIE_ONLY").ok();
    for device in devices() {
        for folder in fixtures() {
            if only.as_ref().is_some_and(|o| !folder.ends_with(o)) {
                continue;
            }
            check(&folder, &open_on(&folder, &device), &device);
        }
    }
}
