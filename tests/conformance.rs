//! Every fixture × every level of the CPU that this machine has: logits at every position within
//! the gate, the greedy continuation token by token, decode against prefill.
//!
//! Fixtures are the folders of `tests/data`, and those under `KIE_FIXTURES` where it is set.
//!
//! Gates are relative L2 norms over a prompt: 1e-5 for float32 weights; 2e-3 for 16-bit and FP8
//! weights on the decode path, 1.5e-2 on the prefill path (which may use 16-bit activations).

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use kie_core::engine::{Engine, LogitsPath};
use kie_core::request::{EngineConfig, Prompt, Request, SamplingParams};
use kie_kernels::cpu::simd::{self, Level};
use safetensors::SafeTensors;

struct Golden {
    ids: Vec<u32>,
    logits: Vec<f32>,
    generated: Vec<u32>,
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn fixtures() -> Vec<PathBuf> {
    let mut roots = vec![repository().join("tests/data")];
    roots.extend(std::env::var_os("KIE_FIXTURES").map(PathBuf::from));
    let folders = roots.iter().flat_map(|root| root.read_dir().unwrap()).map(|e| e.unwrap().path());
    let mut folders: Vec<_> = folders.filter(|f| supported(f)).collect();
    folders.sort();
    folders.dedup_by_key(|f| f.file_name().unwrap().to_owned());
    assert!(folders.len() >= 10, "the repository carries at least ten: {folders:?}");
    folders
}

/// A fixture of an architecture that kie has.
fn supported(folder: &Path) -> bool {
    let known = ["laneformer", "laneformer_tp", "llama", "mistral", "qwen2", "qwen3"];
    let Ok(config) = std::fs::read(folder.join("config.json")) else { return false };
    let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    folder.join("golden.safetensors").exists() && known.iter().any(|k| config["model_type"] == *k)
}

fn goldens(folder: &Path) -> Vec<Golden> {
    let bytes = std::fs::read(folder.join("golden.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let words = |name: &str| -> Option<Vec<[u8; 4]>> {
        let tensor = file.tensor(name).ok()?;
        Some(tensor.data().chunks_exact(4).map(|w| w.try_into().unwrap()).collect())
    };
    let ids = |name: &str| -> Option<Vec<u32>> {
        Some(words(name)?.into_iter().map(u32::from_le_bytes).collect())
    };
    let floats = |name: &str| -> Option<Vec<f32>> {
        Some(words(name)?.into_iter().map(f32::from_le_bytes).collect())
    };
    (0..)
        .map_while(|i| {
            Some(Golden {
                ids: ids(&format!("prompt_{i}.ids"))?,
                logits: floats(&format!("prompt_{i}.logits"))?,
                generated: ids(&format!("prompt_{i}.gen_ids"))?,
            })
        })
        .collect()
}

fn relative(ours: &[f32], golden: &[f32]) -> f64 {
    assert_eq!(ours.len(), golden.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let error = norm(&mut ours.iter().zip(golden).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    error / norm(&mut golden.iter().map(|b| f64::from(*b)))
}

fn float32(folder: &Path) -> bool {
    let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let single = file.iter().all(|(_, t)| t.dtype() == safetensors::Dtype::F32);
    single
}

fn open(folder: &Path, level: Level, threads: usize) -> Engine {
    let config = EngineConfig { threads: Some(threads), max_batch: 4, ..EngineConfig::default() };
    Engine::builder(folder).config(config).device("cpu").level(level).build().unwrap()
}

fn greedy(engine: &Engine, ids: &[u32], count: usize) -> Vec<u32> {
    let params = SamplingParams {
        max_tokens: Some(count),
        temperature: Some(0.0),
        ignore_eos: true,
        ..SamplingParams::default()
    };
    let request = Request { prompt: Prompt::Ids(ids.to_vec()), params };
    engine.generate(request).unwrap().token_ids
}

fn check(folder: &Path, level: Level) {
    let name = folder.file_name().unwrap().to_string_lossy().into_owned();
    let engine = open(folder, level, 2);
    let gates = if float32(folder) { [1e-5, 1e-5] } else { [2e-3, 1.5e-2] };
    let goldens = goldens(folder);
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
    let golden = goldens(&folder).pop().unwrap();
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
