//! The engine on the default model, through the public interface: golden continuations, logits of
//! both paths, prefix reuse, sessions.
#![allow(clippy::unwrap_used)]

#[path = "engine/forced.rs"]
mod forced;
#[path = "engine/given_up.rs"]
mod given_up;
mod support;

use std::path::PathBuf;

use kie_core::request::{FinishReason, Prompt, Request, SamplingParams};
use kie_core::{Engine, LogitsPath};
use serde_json::Value;

fn demo() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../python/kie/demo")
}

fn open() -> Engine {
    Engine::builder(demo()).threads(2).max_batch(4).build().unwrap()
}

fn greedy(max_tokens: usize) -> SamplingParams {
    let temperature = Some(0.0);
    SamplingParams {
        max_tokens: Some(max_tokens),
        temperature,
        ignore_eos: true,
        ..Default::default()
    }
}

fn numbers<T: serde::de::DeserializeOwned>(value: &Value) -> Vec<T> {
    serde_json::from_value(value.clone()).unwrap()
}

fn text(prompt: &str, params: SamplingParams) -> Request {
    Request { prompt: Prompt::Text(prompt.to_owned()), params }
}

#[test]
fn greedy_continuations_are_the_golden_ones() {
    let engine = open();
    let golden = std::fs::read(demo().join("golden.json")).unwrap();
    let golden: Value = serde_json::from_slice(&golden).unwrap();
    for case in golden["prompts"].as_array().unwrap() {
        let prompt = case["prompt"].as_str().unwrap();
        let prompt_ids: Vec<u32> = numbers(&case["prompt_ids"]);
        let rendered = prompt.starts_with("<s>"); // a chat: the template wrote the special tokens
        assert_eq!(engine.tokenize(prompt, !rendered).unwrap(), prompt_ids);
        let wanted: Vec<u32> = numbers(&case["greedy_ids"]);
        let margins: Vec<f64> = numbers(&case["margins"]);
        let sure = margins.iter().position(|m| *m < 0.15).unwrap_or(wanted.len());
        let request = Request { prompt: Prompt::Ids(prompt_ids), params: greedy(wanted.len()) };
        let done = engine.generate(request).unwrap();
        assert_eq!(done.token_ids[..sure], wanted[..sure], "{prompt:?}");
        assert_eq!(done.text, engine.detokenize(&done.token_ids, true).unwrap());
    }
}

#[test]
fn both_paths_give_the_same_logits_and_the_greedy_token_is_their_best() {
    let engine = open();
    let ids = engine.tokenize("def add(a, b):\n    return a + b\n\n\ndef sub(", true).unwrap();
    let prefill = engine.logits(&ids, LogitsPath::Prefill).unwrap();
    let decode = engine.logits(&ids, LogitsPath::Decode).unwrap();
    assert_eq!(prefill.values.len(), ids.len() * prefill.vocab);
    let largest = prefill.values.iter().fold(0f32, |m, v| m.max(v.abs()));
    let pairs = prefill.values.iter().zip(&decode.values);
    let apart = pairs.map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
    assert!(apart <= 2e-2 * largest, "{apart} of {largest}");
    let last = &prefill.values[(ids.len() - 1) * prefill.vocab..];
    let best = last.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0;
    let request = Request { prompt: Prompt::Ids(ids), params: greedy(1) };
    assert_eq!(engine.generate(request).unwrap().token_ids, [best as u32]);
}

#[test]
fn neighbours_threads_and_the_cache_change_no_token() {
    let engine = open();
    let long = "def f(x):\n    return x + 1\n\n\n".repeat(30);
    let params = |seed| SamplingParams {
        seed: Some(seed),
        temperature: Some(0.8),
        top_p: Some(0.95),
        logprobs: Some(2),
        ..greedy(40)
    };
    let alone: Vec<_> =
        (0..4).map(|s| engine.generate(text(&long, params(s))).unwrap().token_ids).collect();
    let again = engine.generate(text(&long, params(0))).unwrap();
    assert!(again.usage.cached_tokens >= again.usage.prompt_tokens / 64 * 64 - 64);
    assert_eq!(again.token_ids, alone[0]);
    let streams: Vec<_> = (0..4).map(|s| engine.stream(text(&long, params(s))).unwrap()).collect();
    for (mut stream, alone) in streams.into_iter().zip(&alone) {
        assert_eq!(stream.completion().unwrap().token_ids, *alone);
    }
    let other = Engine::builder(demo()).threads(1).prefix_cache(false).build().unwrap();
    let done = other.generate(text(&long, params(3))).unwrap();
    assert_eq!((done.token_ids, done.usage.cached_tokens), (alone[3].clone(), 0));
}

#[test]
fn a_session_keeps_its_past_and_forks() {
    let engine = open();
    let mut session = engine.session(None).unwrap();
    let say = |text: &str| Prompt::Text(text.to_owned());
    session.generate(say(&"write a function ".repeat(40)), greedy(80)).unwrap();
    let mut fork = session.fork().unwrap();
    let a = session.generate(say("and a test"), greedy(20)).unwrap();
    let b = fork.generate(say("and a test"), greedy(20)).unwrap();
    assert!(a.usage.cached_tokens >= 128, "{:?}", a.usage);
    assert_eq!((&a.token_ids, a.usage.prompt_tokens), (&b.token_ids, b.usage.prompt_tokens));
    session.rollback(1).unwrap();
    let c = session.generate(say("and a test"), greedy(20)).unwrap();
    assert_eq!(c.token_ids, a.token_ids);
}

#[test]
fn a_stop_string_cuts_the_same_text() {
    let engine = open();
    let whole = engine.generate(text("def fibonacci(n):", greedy(60))).unwrap();
    let params = SamplingParams { stop: vec!["return".into()], ..greedy(60) };
    let cut = engine.generate(text("def fibonacci(n):", params)).unwrap();
    match whole.text.find("return") {
        Some(at) => {
            assert_eq!(cut.text, whole.text[..at]);
            assert_eq!(cut.finish_reason, FinishReason::Stop);
        }
        None => assert_eq!(cut.text, whole.text),
    }
}
