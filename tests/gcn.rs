//! The monokernel as machine code of gfx942, executed on an emulator of it, never on the hardware:
//! tokens are the recorded ones, logits within the gate.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

mod support;

use std::path::PathBuf;
use std::time::Instant;

use kie_core::engine::{Engine, LogitsPath};
use kie_core::Grammar;
use support::{goldens, greedy, greedy_request, half, open_on, repository};

/// Relative L2 over a prompt, as for the monokernel elsewhere, or what tests/data/bounds.json has
/// for a fixture.
fn gate(name: &str, ranks: &str) -> f64 {
    let text = std::fs::read(repository().join("tests/data/bounds.json")).unwrap();
    let bounds: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let known = bounds.get(name).and_then(|known| {
        known.get("flips").or_else(|| known.get(if ranks == "1" { "one" } else { "several" }))
    });
    known.and_then(serde_json::Value::as_f64).unwrap_or(2e-3)
}

fn fixture(name: &str) -> PathBuf {
    repository().join("tests/data").join(name)
}

/// False, with one line that says so, where LLVM's tools are missing and this is not CI.
fn has_tools(test: &str) -> bool {
    let found = kie_gcn::toolchain::is_here();
    assert!(found || std::env::var("CI").as_deref() != Ok("true"), "{test}: no llvm-objdump-19");
    if !found {
        eprintln!("skipped: {test}: no llvm-objdump-19");
    }
    found
}

/// Positions of a prompt and tokens of a continuation.
fn check(name: &str, device: &str, positions: usize, tokens: usize) -> Engine {
    let folder = fixture(name);
    let golden = &goldens(&folder, "")[0];
    let engine = open_on(&folder, device);
    let begin = Instant::now();
    let ids = &golden.ids[..golden.ids.len().min(positions)];
    let ours = engine.logits(ids, LogitsPath::Decode).unwrap();
    let error = golden.error(&ours.values);
    eprintln!("{name} {device}: relative L2 {error:.2e}, {:?}", begin.elapsed());
    let ranks = device.split("ranks=").nth(1).map_or("1", |rest| &rest[..1]);
    assert!(error <= gate(name, ranks), "{name} {device}: {error:.2e}");
    let (begin, count) = (Instant::now(), golden.generated.len().min(tokens));
    let got = greedy(&engine, &golden.ids, count);
    let all = golden.ids.len() + count;
    eprintln!("{name} {device}: {all} positions and tokens, {:?}", begin.elapsed());
    assert_eq!(got, golden.generated[..count], "{name} {device}");
    engine
}

#[test]
fn a_lane_model_runs_as_machine_code() {
    if has_tools("laneformer_d2 on gcn") {
        check("laneformer_d2", "gcn:seed=1,blocks=4", 4, 4);
    }
}

#[test]
fn a_dense_model_runs_as_machine_code() {
    if has_tools("llama on gcn") {
        let engine = check("llama", "gcn:seed=2,blocks=4", 4, 4);
        let mut request = greedy_request(&[3, 4], 3);
        request.params.ignore_eos = false;
        request.params.grammar = Some(Grammar::Regex("[0-9]{3}[a-f]{9}".into()));
        let cpu = Engine::builder(fixture("llama")).device("cpu").dtype(half(&fixture("llama")));
        let wanted = cpu.build().unwrap().generate(request.clone()).unwrap().token_ids;
        assert_eq!(engine.generate(request).unwrap().token_ids, wanted, "under a grammar");
    }
}

#[test]
fn ranks_run_as_machine_code() {
    if has_tools("laneformer_d2 on two gcn") {
        check("laneformer_d2", "gcn:seed=3,blocks=4,ranks=2", 2, 3);
    }
}

#[test]
fn a_model_runs_on_weak_memory() {
    if has_tools("llama on weak gcn") {
        check("llama", "gcn:seed=4,blocks=4,weak=1", 2, 2);
    }
}

/// Every fixture of the repository that the monokernel takes.
#[test]
#[ignore = "minutes: make gcn"]
fn every_fixture_runs_as_machine_code() {
    let refused = ["own_gemma3", "own_olmo2", "own_qwen3_next", "own_phi3"];
    for folder in support::fixtures() {
        let name = folder.file_name().unwrap().to_str().unwrap();
        if has_tools(name) && !refused.contains(&name) {
            check(name, "gcn:seed=5,blocks=8", 4, 8);
        }
    }
}
