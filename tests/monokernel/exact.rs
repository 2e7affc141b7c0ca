//! Numbers of two halves (`exact`): every kind of layer as close to its golden as float32 is. Where
//! the machine is simulated few positions are enough; `make sim` has all fixtures in full length.

use std::path::Path;

use kie_core::engine::{Engine, LogitsPath};
use kie_core::request::{EngineConfig, Prompt, Request, SamplingParams};

use super::support::{fixtures, float32, goldens, greedy, half, Folder};
use super::{fixture, is_wide, machines_of, refused_in, two_at_a_time, worst, Job};

/// Relative L2 over a prompt: float32's sums in another order, and 22 bits a number.
pub const GATE: f64 = 1e-5;

/// Fixture, ranks, blocks of each: lanes with delays and windows, the head's ways, classes, biases,
/// head norms, FP8, sums of several ranks, experts, latents with a shared expert, entries.
const SOME: &[(&str, usize, u32)] = &[
    ("laneformer_d2", 1, 8),
    ("own_laneformer_mixed", 2, 8),
    ("own_hybrid", 1, 11),
    ("qwen2", 1, 8),
    ("qwen3", 2, 8),
    ("own_llama_fp8_tied", 1, 11),
    ("own_gpt_oss", 1, 8),
    ("own_olmoe", 1, 5),
    ("own_qwen3_next", 2, 5),
    ("qwen3_moe", 2, 5),
    ("laneformer_d2_noearly_vp_lanescale", 2, 6),
    ("own_deepseek_v3", 1, 5),
    ("own_deepseek_v3", 2, 4),
    ("own_deepseek_v4", 1, 5),
    ("own_deepseek_v4", 2, 4),
];

fn open(folder: &Path, device: &str) -> Engine {
    let config = EngineConfig { max_batch: 4, exact: true, ..EngineConfig::default() };
    Engine::builder(folder).config(config).dtype(half(folder)).device(device).build().unwrap()
}

fn check(job: &Job) {
    let Job { folder, device, prompt, positions, tokens } = job;
    let name = folder.file_name().unwrap().to_string_lossy().into_owned();
    let engine = open(folder, device);
    let goldens = goldens(folder, if float32(folder) { "bf16w." } else { "" });
    let [prefill, decode] = [(LogitsPath::Prefill, *prompt), (LogitsPath::Decode, *positions)]
        .map(|(path, most)| worst(&engine, &goldens, path, most));
    eprintln!("{name} {device}, exact: relative L2 {prefill:.2e} prefill, {decode:.2e} decode");
    assert!(prefill.max(decode) <= GATE, "{name} {device}: {prefill:.2e}, {decode:.2e}");
    for (i, golden) in goldens.iter().enumerate() {
        let count = golden.generated.len().min(*tokens);
        let ours = greedy(&engine, &golden.ids, count);
        assert_eq!(ours, golden.generated[..count], "{name} {device} prompt {i}");
    }
}

#[test]
fn every_fixture_is_exact() {
    let job = |folder, device, (prompt, positions, tokens)| Job {
        folder,
        device,
        prompt,
        positions,
        tokens,
    };
    let all = (usize::MAX, usize::MAX, usize::MAX);
    let known = || fixtures().into_iter().filter(|folder| refused_in(folder).is_none());
    let mut jobs: std::collections::VecDeque<Job> = Default::default();
    if let Ok(device) = std::env::var("KIE_DEVICE") {
        jobs.extend(known().map(|folder| job(folder, device.clone(), all)));
    } else {
        for (at, &(name, ranks, blocks)) in SOME.iter().enumerate() {
            let warp = [32, 64][at % 2];
            let device = format!("sim:ranks={ranks},blocks={blocks},seed={at},warp={warp}");
            assert_eq!(machines_of(&device), ranks);
            jobs.push_back(job(fixture(name), device, (12, 3, 3)));
        }
        let widths: &[u32] = if is_wide() { &[32, 64] } else { &[] };
        for warp in widths {
            let device = format!("sim:blocks=8,seed=2,warp={warp}");
            jobs.extend(known().map(|folder| job(folder, device.clone(), all)));
        }
    }
    two_at_a_time(jobs, |job| check(&job));
}

/// Four ranks have 35 columns each of a matrix whose scales are for 128: its codes become halves.
#[test]
fn weights_that_would_be_rounded_are_refused() {
    let folder = fixture("own_llama_fp8_tied");
    let open = |exact| {
        let config = EngineConfig { max_batch: 1, exact, ..EngineConfig::default() };
        let engine = Engine::builder(&folder).config(config).device("sim:ranks=4,blocks=4");
        engine.build().map(|engine| engine.info().plan)
    };
    let plan = open(false).unwrap();
    assert!(plan.contains("as halves: down: scales of 128 columns"), "{plan}");
    let error = open(true).unwrap_err().to_string();
    assert!(
        error.contains("exact=True: weights would be rounded to halves on 4 ranks (down"),
        "{error}"
    );
}

/// What a sequence is does not depend on its neighbours: its tokens, and their probabilities to the
/// last bit. What the cache has of a prompt's beginning is what would be computed.
#[test]
fn exact_sequences_together_are_what_they_are_alone() {
    for name in ["qwen3", "laneformer_d2"] {
        let engine = open(&fixture(name), "sim:blocks=8,seed=3");
        assert!(engine.info().plan.contains("exact     two halves a number"), "it is said");
        let prompt = |count: u32| (0..count).map(move |i| 3 + (i * 37 + count) % 300);
        let start = |ids: Vec<u32>| {
            let params = SamplingParams {
                max_tokens: Some(5),
                temperature: Some(0.0),
                logprobs: Some(1),
                ignore_eos: true,
                ..SamplingParams::default()
            };
            engine.stream(Request { prompt: Prompt::Ids(ids), params }).unwrap()
        };
        let bits = |mut stream: kie_core::TokenStream| {
            let done = stream.completion().unwrap();
            let tokens = done.logprobs.unwrap().into_iter();
            tokens.map(|token| (token.id, token.logprob.to_bits())).collect::<Vec<_>>()
        };
        let ask = |count| start(prompt(count).collect());
        let alone = [70, 7, 25].map(|count| bits(ask(count)));
        let together = [70, 7, 25].map(ask).map(bits);
        assert!(alone == together, "{name}: {alone:?} {together:?}");
    }
}

/// A turn behind cached pages, and in an engine that computes them again.
#[test]
fn an_exact_session_goes_on_where_it_was_saved() {
    let (folder, from) = (Folder::new("exact"), fixture("qwen3"));
    let path = folder.0.join("turns.kie");
    let params = || SamplingParams {
        max_tokens: Some(4),
        temperature: Some(0.0),
        ignore_eos: true,
        ..SamplingParams::default()
    };
    let turn = |session: &mut kie_core::Session, text: &str| {
        session.generate(Prompt::Text(text.to_owned()), params()).unwrap().token_ids
    };
    let first = open(&from, "sim:blocks=8");
    let mut session = first.session(None).unwrap();
    turn(&mut session, &"Add two numbers. ".repeat(6));
    session.save(&path).unwrap();
    let wanted = turn(&mut session, "Again.");
    let other = open(&from, "sim:blocks=8");
    let mut session = other.load_session(&path).unwrap();
    assert_eq!(turn(&mut session, "Again."), wanted);
}
