//! Text out of ids, one id at a time, against the text of all ids together; stop strings against a
//! search in the whole text. Over byte-level tokenizers, one made as Llama 2's is, and others.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use kie_core::text::{decode_within, StopMatcher, TextDecoder};
use kie_core::tokenizer::Tokenizer;
use kie_core::{Error, Patience};
use proptest::prelude::*;
use serde_json::{json, Map, Value};

/// Ids of the made tokenizers: three special ones, all bytes, then words.
const WORDS: [&str; 16] = [
    "▁", "▁▁", "▁a", "a", "b", "ab", "▁the", "é", "你", "😀", "\u{301}", "the", "<0x4>", "<0x+A>",
    "##b", "\u{FFFD}",
];
const BYTE: u32 = 3;
const WORD: u32 = BYTE + 256;

/// A BPE tokenizer with byte fallback, and this decoder.
fn made(name: &str, decoder: Value) -> Tokenizer {
    let mut vocab = Map::new();
    for special in ["<unk>", "<s>", "</s>"] {
        vocab.insert(special.into(), vocab.len().into());
    }
    for byte in 0..256 {
        vocab.insert(format!("<0x{byte:02X}>"), vocab.len().into());
    }
    for word in WORDS {
        vocab.insert(word.into(), vocab.len().into());
    }
    let special = |id: u32, text: &str| {
        json!({"id": id, "content": text, "single_word": false, "lstrip": false,
               "rstrip": false, "normalized": false, "special": true})
    };
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": null,
        "post_processor": {"type": "TemplateProcessing", "pair": [],
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                       {"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": decoder,
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "fuse_unk": true,
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "byte_fallback": true,
            "ignore_merges": false, "vocab": vocab,
            "merges": ["▁ ▁", "▁ a", "a b"]}
    });
    let config = json!({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": true});
    let dir = std::env::temp_dir().join(format!("kie-text-{}-{name}", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    fs::write(dir.join("tokenizer_config.json"), config.to_string()).unwrap();
    let made = Tokenizer::from_dir(&dir, 320).unwrap();
    fs::remove_dir_all(&dir).unwrap();
    made
}

fn replace() -> Value {
    json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "})
}

fn strip(start: usize) -> Value {
    json!({"type": "Strip", "content": " ", "start": start, "stop": 0})
}

fn sequence(decoders: &[Value]) -> Value {
    json!({"type": "Sequence", "decoders": decoders})
}

static LLAMA2: LazyLock<Tokenizer> = LazyLock::new(|| {
    let (fallback, fuse) = (json!({"type": "ByteFallback"}), json!({"type": "Fuse"}));
    made("llama2", sequence(&[replace(), fallback, fuse, strip(1)]))
});

/// All shapes of decoders, with their names.
static TOKENIZERS: LazyLock<Vec<(&str, Tokenizer)>> = LazyLock::new(|| {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let stored = |dir: &str| Tokenizer::from_dir(&data.join(dir), 4096).unwrap();
    let (fallback, fuse) = (json!({"type": "ByteFallback"}), json!({"type": "Fuse"}));
    let metaspace = |scheme: &str| {
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme,
               "split": true})
    };
    let nested = sequence(&[sequence(&[strip(1), replace()]), fallback.clone(), fuse.clone()]);
    vec![
        ("bos", stored("tests/data/laneformer_d2")),
        ("qwen", stored("tests/data/qwen2")),
        ("default", stored("python/kie/demo")),
        ("llama2", LLAMA2.clone()),
        ("gemma", made("gemma", sequence(&[replace(), fallback.clone(), fuse.clone()]))),
        ("strip3", made("strip3", sequence(&[fallback.clone(), fuse.clone(), strip(3)]))),
        ("bytes", made("bytes", fallback.clone())),
        ("nested", made("nested", nested)),
        ("metaspace", made("metaspace", metaspace("always"))),
        ("never", made("never", metaspace("never"))),
        ("both", made("both", sequence(&[metaspace("first"), fallback, fuse]))),
        ("wordpiece", made("wp", json!({"type": "WordPiece", "prefix": "##", "cleanup": true}))),
        (
            "level",
            made(
                "level",
                sequence(&[
                    replace(),
                    json!({"type": "ByteLevel",
            "add_prefix_space": true, "trim_offsets": true, "use_regex": true}),
                ]),
            ),
        ),
        ("none", made("none", Value::Null)),
    ]
});

/// Bytes that often nearly make characters, all bytes, words, and specials.
fn any_id() -> impl Strategy<Value = u32> {
    let utf8 = prop::sample::select(&b"\n a\xC3\xA9\xE4\xBD\xA0\xF0\x9F\x98\x80\xED\xFF"[..]);
    prop_oneof![
        4 => utf8.prop_map(|b| BYTE + u32::from(b)),
        2 => 0..BYTE + 256,
        5 => WORD..WORD + 16,
        1 => 0u32..4096,
        1 => prop::sample::select(vec![0, 1, 2, 505, 506, 511, 4095, 5000, u32::MAX]),
    ]
}

/// The text of each id in turn, then what was held back.
fn pieces_of(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<String> {
    let mut decoder = TextDecoder::new(tokenizer);
    let mut pieces: Vec<String> = ids.iter().map(|&id| decoder.push(id).to_string()).collect();
    pieces.push(decoder.finish().to_string());
    assert_eq!(decoder.finish(), "");
    pieces
}

fn whole(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    let known: Vec<u32> =
        ids.iter().copied().filter(|&id| (id as usize) < tokenizer.vocab()).collect();
    tokenizer.decode(&known, true).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn pieces_make_the_whole(ids in prop::collection::vec(any_id(), 0..40)) {
        for (name, tokenizer) in TOKENIZERS.iter() {
            let pieces = pieces_of(tokenizer, &ids);
            prop_assert_eq!(pieces.concat(), whole(tokenizer, &ids), "{}: {:?}", name, ids);
        }
    }

    #[test]
    fn tokens_of_the_fixtures_make_the_whole(ids in prop::collection::vec(0u32..512, 0..80)) {
        for (name, tokenizer) in &TOKENIZERS[..3] {
            let pieces = pieces_of(tokenizer, &ids);
            prop_assert_eq!(pieces.concat(), whole(tokenizer, &ids), "{}: {:?}", name, ids);
        }
    }

    #[test]
    fn text_comes_back(text in "\\PC{0,30}") {
        // Llama 2's own normaliser writes a space as this character, so it comes back as a space.
        let text = text.replace('\u{2581}', "_");
        for (name, tokenizer) in TOKENIZERS[..4].iter().filter(|(name, _)| *name != "qwen") {
            let ids = tokenizer.encode(&text, true).unwrap();
            prop_assert_eq!(pieces_of(tokenizer, &ids).concat(), text.as_str(), "{}", name);
        }
    }

    #[test]
    fn stops_do_not_depend_on_the_pieces(
        pieces in prop::collection::vec("[ab]{0,4}|é|\u{3a9}|[a-cé]{1,2}", 0..12),
        stops in prop::collection::vec("[ab]{1,5}|é|aé|[a-cé]{0,3}", 0..4),
    ) {
        let text = pieces.concat();
        // First to end, then longest, then first in the list.
        let hit = stops.iter().enumerate().filter(|(_, s)| !s.is_empty())
            .filter_map(|(i, s)| text.find(s.as_str()).map(|at| (at + s.len(), at, i))).min();
        let mut matcher = StopMatcher::new(&stops);
        let (mut out, mut fed) = (String::new(), String::new());
        for piece in &pieces {
            out.push_str(matcher.push(piece));
            fed.push_str(piece);
            if matcher.hit().is_none() {
                // Nothing is held back but what a stop begins with.
                let held = &fed[out.len()..];
                prop_assert!(held.is_empty() || stops.iter().any(|s| s.starts_with(held)));
                prop_assert_eq!(matcher.holds_back(), !held.is_empty());
            }
        }
        out.push_str(matcher.finish());
        prop_assert_eq!(matcher.finish(), "");
        prop_assert_eq!(matcher.hit(), hit.map(|(_, _, i)| i));
        prop_assert_eq!(out.as_str(), &text[..hit.map_or(text.len(), |(_, at, _)| at)]);
    }

    #[test]
    fn beginnings_of_a_stop_do_not_hide_it(
        stop in "[ab]{1,9}",
        cuts in prop::collection::vec(0usize..10, 0..12),
    ) {
        let pieces: Vec<&str> = cuts.iter().map(|&cut| &stop[..cut.min(stop.len())]).collect();
        let mut matcher = StopMatcher::new(std::slice::from_ref(&stop));
        let mut out: String = pieces.iter().map(|piece| matcher.push(piece).to_string()).collect();
        out.push_str(matcher.finish());
        let text = pieces.concat();
        prop_assert_eq!(matcher.hit().is_some(), text.contains(&stop));
        prop_assert_eq!(out.as_str(), text.split(&stop).next().unwrap());
    }

    #[test]
    fn stops_work_on_tokens(
        ids in prop::collection::vec(any_id(), 0..40),
        stop in "[ab ]{1,3}|é",
    ) {
        for (_, tokenizer) in TOKENIZERS.iter() {
            let mut matcher = StopMatcher::new(std::slice::from_ref(&stop));
            let mut out = String::new();
            for piece in pieces_of(tokenizer, &ids) {
                out.push_str(matcher.push(&piece));
            }
            out.push_str(matcher.finish());
            let text = whole(tokenizer, &ids);
            prop_assert_eq!(out.as_str(), text.split(&stop).next().unwrap());
            prop_assert_eq!(matcher.hit().is_some(), text.contains(&stop));
        }
    }
}

fn bytes(text: &[u8]) -> Vec<u32> {
    text.iter().map(|&b| BYTE + u32::from(b)).collect()
}

fn word(text: &str) -> u32 {
    WORD + WORDS.iter().position(|w| *w == text).unwrap() as u32
}

#[test]
fn llama2_text_comes_back() {
    let ids = LLAMA2.encode("a the\n你ab 😀!", true).unwrap();
    assert_eq!(ids[0], 1);
    assert!(ids.contains(&(BYTE + u32::from(b'\n'))) && ids.contains(&(BYTE + u32::from(b'!'))));
    assert_eq!(LLAMA2.decode(&ids, true).unwrap(), "a the\n你ab 😀!");
}

#[test]
fn runs_of_bytes_are_held_until_they_are_certain() {
    // A run that a word ends.
    let mut ids = bytes("\né".as_bytes());
    ids.push(word("a"));
    assert_eq!(pieces_of(&LLAMA2, &ids), ["", "", "", "\néa", ""]);
    // What breaks turns all of the run into U+FFFD at once; the run then hides nothing.
    let mut ids = bytes(b"\n\xFFa");
    ids.push(word("a"));
    assert_eq!(pieces_of(&LLAMA2, &ids), ["", "\u{FFFD}\u{FFFD}", "\u{FFFD}", "a", ""]);
    // Cut short at the end; a special token does not end a run.
    let mut ids = bytes(b"\n\xE4\xBD");
    ids.insert(1, 2);
    assert_eq!(pieces_of(&LLAMA2, &ids), ["", "", "", "", "\u{FFFD}\u{FFFD}\u{FFFD}"]);
    // The space of the first word only.
    let ids = [1, word("▁▁"), word("▁a"), word("▁a")];
    assert_eq!(pieces_of(&LLAMA2, &ids), ["", " ", " a", " a", ""]);
}

#[test]
fn byte_level_text_is_held_only_while_incomplete() {
    let tokenizer = &TOKENIZERS[0].1;
    let ids = tokenizer.encode("a你<|end|>b", true).unwrap();
    let pieces = ["", "a", "", "", "你", "", "b", ""];
    assert_eq!(pieces_of(tokenizer, &ids), pieces);
    assert_eq!(pieces_of(tokenizer, &ids[..4]), ["", "a", "", "", "\u{FFFD}"]);
    let broken = [ids[2], ids[2], ids[1]];
    assert_eq!(pieces_of(tokenizer, &broken), ["", "\u{FFFD}", "\u{FFFD}a", ""]);
}

#[test]
fn other_decoders_go_through_a_window() {
    let trailing = json!({"type": "BPEDecoder", "suffix": "b"});
    let tokenizer = made("window", trailing);
    let ids = [1, word("ab"), word("a"), word("ab"), 2, word("é"), word("ab")];
    let pieces = pieces_of(&tokenizer, &ids);
    assert_eq!(pieces.concat(), "a aa éa");
    assert_eq!(pieces.concat(), tokenizer.decode(&ids, true).unwrap());
    assert!(pieces.iter().filter(|p| !p.is_empty()).count() >= 4, "{pieces:?}");
}

#[test]
fn the_longest_of_two_stops_that_end_together_wins() {
    let stops = ["b".to_string(), "ab".to_string(), String::new()];
    let mut matcher = StopMatcher::new(&stops);
    assert_eq!(matcher.push("xa"), "x");
    assert_eq!(matcher.push("by"), "");
    assert_eq!(matcher.hit(), Some(1));
    assert_eq!(matcher.push("more"), "");
    assert_eq!(matcher.hit(), Some(1));
    assert_eq!(matcher.finish(), "");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn what_may_be_given_up_is_the_same_text(ids in prop::collection::vec(any_id(), 0..40)) {
        for (name, tokenizer) in TOKENIZERS.iter() {
            for skip_special in [true, false] {
                let got = decode_within(tokenizer, &ids, skip_special, &Patience::ENDLESS);
                match tokenizer.decode(&ids, skip_special) {
                    Ok(text) => prop_assert_eq!(got.unwrap(), text, "{}: {:?}", name, &ids),
                    Err(error) => {
                        prop_assert_eq!(got.unwrap_err().to_string(), error.to_string());
                    }
                }
            }
        }
    }
}

/// No more than sixteen threads may be left behind at work, so these must end.
#[test]
fn decoding_that_is_given_up_ends() {
    let (_, tokenizer) = &TOKENIZERS[0];
    let ids: Vec<u32> = (0..2_000_000).map(|n| 3 + n % 200).collect();
    for _ in 0..40 {
        let asked = std::cell::Cell::new(false);
        let once = || !asked.replace(true);
        let given_up = decode_within(tokenizer, &ids, true, &Patience::asking(&once));
        assert!(matches!(given_up, Err(Error::GivenUp { .. })), "{given_up:?}");
    }
}
