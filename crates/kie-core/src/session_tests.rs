//! Conversations, on the fake device.

use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use serde_json::json;

use super::*;
use crate::engine::fake::{open, Setup};
use crate::request::FinishReason;
use crate::Error;

fn greedy(max_tokens: usize) -> SamplingParams {
    SamplingParams { max_tokens: Some(max_tokens), temperature: Some(0.0), ..Default::default() }
}

fn say(text: &str) -> Prompt {
    Prompt::Text(text.to_owned())
}

const LONG: &str = "one two three four five six seven eight nine ten eleven twelve ";

#[test]
fn plain_text_goes_on_and_its_kv_is_kept() {
    let (engine, knobs) = open(&Setup { template: false, ..Setup::default() });
    let mut session = engine.session(Some("# notes\n")).unwrap();
    let first = session.generate(say(&LONG.repeat(20)), greedy(40)).unwrap();
    let before = session.tokens().unwrap().to_vec();
    assert!(before.ends_with(&first.token_ids));
    let second = session.generate(say("and then"), greedy(10)).unwrap();
    let kept = (before.len() - 1) / 64 * 64;
    assert_eq!(second.usage.cached_tokens, kept, "the answer's KV too");
    let mut wanted = before;
    wanted.extend(engine.tokenize("and then", false).unwrap());
    wanted.extend(&second.token_ids);
    assert_eq!(session.tokens().unwrap(), wanted);
    assert_eq!(session.turns(), 2);
    let refused = session.generate(Prompt::Messages(vec![]), greedy(1)).unwrap_err();
    assert!(matches!(refused, Error::Template(_)));
    assert_eq!(*knobs.corrupt.lock().unwrap(), None);
}

#[test]
fn a_chat_is_what_the_template_would_write() {
    let (engine, knobs) = open(&Setup::default());
    let mut session = engine.session(Some("be brief")).unwrap();
    let question = LONG.repeat(12);
    let first = session.generate(say(question.trim()), greedy(30)).unwrap();
    let second = session.generate(say("why?"), greedy(5)).unwrap();
    let messages = [
        json!({"role": "system", "content": "be brief"}),
        json!({"role": "user", "content": question.trim()}),
        json!({"role": "assistant", "content": first.text}),
        json!({"role": "user", "content": "why?"}),
    ];
    let rendered = engine.apply_chat_template(&messages, true).unwrap();
    let tokens = session.tokens().unwrap().to_vec();
    let prompt = &tokens[..second.usage.prompt_tokens];
    let again = engine.tokenize(&rendered, false).unwrap();
    let (a, b) = (engine.detokenize(prompt, false), engine.detokenize(&again, false));
    assert_eq!(a.unwrap(), b.unwrap());
    assert!(second.usage.cached_tokens >= 64, "{:?}", second.usage);
    assert_eq!(*knobs.corrupt.lock().unwrap(), None);
}

#[test]
fn what_a_stop_string_cut_is_not_in_the_past() {
    let (engine, knobs) = open(&Setup { template: false, ..Setup::default() });
    let mut session = engine.session(None).unwrap();
    let params = SamplingParams { stop: vec!["ta gam".into()], ..greedy(400) };
    let done = session.generate(say("alpha beta gamma delta"), params).unwrap();
    assert_eq!(done.finish_reason, FinishReason::Stop);
    let tokens = session.tokens().unwrap().to_vec();
    let seen = engine.detokenize(&tokens, true).unwrap();
    assert_eq!(seen, format!("alpha beta gamma delta{}", done.text));
    session.generate(say(" on"), greedy(3)).unwrap();
    assert_eq!(*knobs.corrupt.lock().unwrap(), None);
}

#[test]
fn forks_share_the_past_and_part_ways() {
    let (engine, knobs) = open(&Setup { template: false, context: 8192, ..Setup::default() });
    let mut session = engine.session(None).unwrap();
    let prompt: Vec<u32> = (0..4000).map(|i| 100 + i * 7 % 3000).collect();
    session.generate(Prompt::Ids(prompt), greedy(10)).unwrap();
    let turns = session.turns();
    let before = knobs.prefilled.load(SeqCst);
    session.tokens().unwrap();
    let begin = Instant::now();
    let mut fork = session.fork().unwrap();
    assert!(begin.elapsed() < Duration::from_millis(1), "{:?}", begin.elapsed());
    let a = session.generate(say("left"), greedy(20)).unwrap();
    let b = fork.generate(say("right"), greedy(20)).unwrap();
    assert!(a.usage.cached_tokens >= 3968 && b.usage.cached_tokens >= 3968);
    assert!(knobs.prefilled.load(SeqCst) - before < 256);
    assert_eq!((session.turns(), fork.turns()), (turns + 1, turns + 1));
    assert_ne!(session.tokens().unwrap(), fork.tokens().unwrap());
    drop(session);
    let c = fork.generate(say("more"), greedy(5)).unwrap();
    assert!(c.usage.cached_tokens >= 3968);
    assert_eq!(*knobs.corrupt.lock().unwrap(), None);
}

#[test]
fn rollback_forgets_turns_and_cancels_a_running_one() {
    let (engine, knobs) = open(&Setup { template: false, ..Setup::default() });
    let mut session = engine.session(None).unwrap();
    session.generate(say(LONG), greedy(70)).unwrap();
    let first = session.tokens().unwrap().to_vec();
    session.generate(say(LONG), greedy(70)).unwrap();
    knobs.pass_us.store(1000, SeqCst);
    let mut stream = session.stream(say(LONG), greedy(1500)).unwrap();
    assert!(stream.next().is_some());
    assert_eq!(session.turns(), 3);
    session.rollback(1).unwrap();
    assert_eq!(stream.completion().unwrap().finish_reason, FinishReason::Cancelled);
    knobs.pass_us.store(0, SeqCst);
    assert_eq!((session.turns(), session.tokens().unwrap()), (1, &first[..]));
    assert!(session.rollback(2).is_err());
    let again = session.generate(say("other"), greedy(70)).unwrap();
    assert!(again.usage.cached_tokens >= first.len() / 64 * 64 - 64);
    session.rollback(0).unwrap();
    assert!(session.tokens().unwrap().is_empty());
    assert_eq!(*knobs.corrupt.lock().unwrap(), None);
}

#[test]
fn a_dropped_turn_is_cancelled_and_the_session_goes_on() {
    let (engine, knobs) = open(&Setup { template: false, ..Setup::default() });
    knobs.pass_us.store(500, SeqCst);
    let mut session = engine.session(None).unwrap();
    drop(session.stream(say(LONG), greedy(1500)).unwrap());
    let done = session.generate(say("still there?"), greedy(4)).unwrap();
    assert_eq!((done.token_ids.len(), session.turns()), (4, 2));
    engine.close();
    assert!(matches!(session.generate(say("?"), greedy(1)), Err(Error::EngineClosed)));
}
