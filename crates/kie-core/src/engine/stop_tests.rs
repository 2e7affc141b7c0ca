//! Stop strings against a search in the whole text, over a tokenizer that spells what it has no
//! word for in bytes: what such a run says is certain only when it ends, at the latest with the
//! answer.

use std::sync::{Arc, LazyLock};

use proptest::prelude::*;
use serde_json::{json, Map};

use super::fake::{open, Knobs, Setup, VOCAB};
use super::*;
use crate::request::{FinishReason, StopReason};
use crate::stream::Next;

/// Ids of the made tokenizer: 0 is a special token, then all bytes, then words.
const BYTE: u32 = 1;
const WORD: u32 = BYTE + 256;
const WORDS: [&str; 6] = ["a", "b", "ab", "é", "\u{FFFD}", "a\u{FFFD}b"];

fn byte_fallback() -> Tokenizer {
    let mut vocab = Map::new();
    vocab.insert("<s>".into(), 0.into());
    (0..256).for_each(|byte| drop(vocab.insert(format!("<0x{byte:02X}>"), (BYTE + byte).into())));
    (WORD..).zip(WORDS).for_each(|(id, word)| drop(vocab.insert(word.into(), id.into())));
    let special = json!({"id": 0, "content": "<s>", "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false, "special": true});
    let file = json!({"version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [special], "normalizer": null, "pre_tokenizer": null,
        "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "fuse_unk": false,
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "byte_fallback": true,
            "ignore_merges": false, "vocab": vocab, "merges": ["a b"]}});
    let dir = std::env::temp_dir().join(format!("kie-stops-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(dir.join("tokenizer.json"), file.to_string()).unwrap();
    std::fs::write(dir.join("tokenizer_config.json"), "{}").unwrap();
    let made = Tokenizer::from_dir(&dir, VOCAB).unwrap();
    std::fs::remove_dir_all(&dir).unwrap();
    made
}

/// The fake answers with its prompt.
static ENGINE: LazyLock<(Engine, Arc<Knobs>)> =
    LazyLock::new(|| open(&Setup { tokenizer: Some(byte_fallback()), ..Setup::default() }));

fn any_id() -> impl Strategy<Value = u32> {
    let utf8 = prop::sample::select(&b"ab\xC3\xA9\xF0\x9F\xFF"[..]);
    prop_oneof![
        5 => utf8.prop_map(|b| BYTE + u32::from(b)),
        3 => WORD..WORD + WORDS.len() as u32,
        1 => Just(0u32),
    ]
}

/// What the answer `ids` must be: all of its text, searched for the stop that ends first, then the
/// longest.
fn naive(ids: &[u32], stops: &[String], stop_id: Option<u32>) -> (String, Option<StopReason>) {
    let end = ids.iter().position(|id| Some(*id) == stop_id);
    let text = ENGINE.0.detokenize(&ids[..end.unwrap_or(ids.len())], true).unwrap();
    let found = stops
        .iter()
        .enumerate()
        .filter_map(|(i, stop)| text.find(stop.as_str()).map(|at| (at + stop.len(), at, i)));
    match found.min() {
        Some((_, at, i)) => (text[..at].to_owned(), Some(StopReason::Text(stops[i].clone()))),
        None => (text, end.map(|_| StopReason::Id(stop_id.unwrap_or_default()))),
    }
}

fn check(ids: &[u32], stops: &[String], stop_id: Option<u32>) {
    let params = SamplingParams {
        max_tokens: Some(ids.len()),
        temperature: Some(0.0),
        stop: stops.to_vec(),
        stop_token_ids: stop_id.into_iter().collect(),
        ignore_eos: true,
        ..SamplingParams::default()
    };
    let request = Request { prompt: Prompt::Ids(ids.to_vec()), params };
    let mut stream = ENGINE.0.stream(request).unwrap();
    let mut text = String::new();
    loop {
        // Whatever is there, then a wait: the reader's cuts are as random as threads are.
        match stream.try_next().unwrap() {
            Next::Token(token) => text.push_str(&token.text),
            Next::Finished => break,
            Next::Pending => std::thread::yield_now(),
        }
    }
    let done = stream.completion().unwrap();
    let (wanted, reason) = naive(ids, stops, stop_id);
    assert_eq!((done.text.as_str(), &done.stop_reason), (wanted.as_str(), &reason), "{ids:?}");
    assert_eq!(text, wanted, "{ids:?}");
    let finish = if reason.is_some() { FinishReason::Stop } else { FinishReason::Length };
    assert_eq!(done.finish_reason, finish, "{ids:?}");
}

#[test]
fn a_stop_that_the_end_completes_stops() {
    let stop = |text: &str| vec![text.to_owned()];
    // A run of bytes is text when it ends: here with the answer.
    check(&[WORD, BYTE + 0x61], &stop("aa"), None);
    check(&[WORD, BYTE + 0xC3], &stop("a\u{FFFD}"), None);
    check(&[BYTE + 0x61, BYTE + 0x62, WORD + 2], &stop("ab"), Some(WORD + 2));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn stops_are_those_of_the_whole_text(
        ids in prop::collection::vec(any_id(), 1..16),
        stops in prop::collection::vec("[ab\u{FFFD}é]{1,3}", 1..4),
        stop_id in prop::option::weighted(0.3, any_id()),
    ) {
        check(&ids, &stops, stop_id);
    }
}
