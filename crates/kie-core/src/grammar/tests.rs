//! Grammars over the default model's vocabulary, followed by a device that chooses at random.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kie_kernels::mask::{Masks, Place};
use serde_json::{json, Value};

use super::compiled::{Compiled, Grammars};
use super::ending;
use super::follower::{Follower, Plan};
use super::spec::Grammar;
use crate::engine::fake::{tokenizer, EOS, VOCAB};
use crate::error::Error;
use crate::patience::Patience;
use crate::tokenizer::Tokenizer;

const WATCH: Duration = Duration::from_micros(50);

fn grammars() -> Grammars {
    Grammars::new(tokenizer(false), VOCAB, &[EOS])
}

fn compile(grammars: &Grammars, grammar: &Grammar) -> Result<Arc<Compiled>, String> {
    match grammars.compiled(grammar, &Patience::ENDLESS) {
        Ok(compiled) => Ok(compiled),
        Err(Error::Grammar(why)) => Err(why),
        Err(other) => panic!("{other}"),
    }
}

fn schema(of: &Value) -> Grammar {
    Grammar::json_schema(of)
}

fn refused(of: &Value) -> String {
    compile(&grammars(), &schema(of)).err().unwrap_or_else(|| panic!("{of} compiled"))
}

/// Numbers that look random.
struct Draw(u64);

impl Draw {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % n as u64) as usize
    }
}

/// Ids of a mask, once it is there.
fn mask(masks: &Masks, follower: &Follower, index: usize) -> Vec<u32> {
    next_mask(masks, follower, &mut Place { made: index, last: 0, begin: index })
}

fn next_mask(masks: &Masks, follower: &Follower, place: &mut Place) -> Vec<u32> {
    let (begun, index) = (Instant::now(), place.made);
    loop {
        if let Some(words) = masks.next(place) {
            let words: Vec<u32> =
                words.iter().map(|w| w.load(std::sync::atomic::Ordering::Relaxed)).collect();
            let allowed = |id: &u32| words[*id as usize / 32] >> (id % 32) & 1 == 1;
            return (0..VOCAB as u32).filter(allowed).collect();
        }
        assert!(follower.failure().is_none(), "{:?}", follower.failure());
        assert!(begun.elapsed() < Duration::from_secs(60), "mask {index}");
        std::thread::sleep(Duration::from_micros(20));
    }
}

struct Made {
    text: String,
    ended: bool,
    shaped: bool,
}

/// Follows a sequence of `min_new` to `max_new` tokens, with up to `drafts` of what is forced.
fn follow(compiled: Arc<Compiled>, (min_new, max_new): (usize, usize), drafts: usize) -> Follower {
    let stop_ids = vec![EOS];
    let plan = Plan { max_new, min_new, stop_ids, drafts, watch: WATCH, expected: None };
    Follower::new(compiled, plan, Arc::default(), || {}).unwrap()
}

/// What comes out where every allowed id is as likely as any other.
fn walk(compiled: &Arc<Compiled>, max_new: usize, min_new: usize, seed: u64) -> Made {
    let mut follower = follow(Arc::clone(compiled), (min_new, max_new), 0);
    let masks = follower.begin();
    let mut draw = Draw(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let mut ids = Vec::new();
    while ids.len() < max_new {
        let able = mask(&masks, &follower, ids.len());
        assert!(!able.is_empty());
        let id = able[draw.below(able.len())];
        if id == EOS {
            break;
        }
        ids.push(id);
        follower.push(id);
        follower.publish();
    }
    let ended = ids.len() < max_new;
    let text = tokenizer(false).decode(&ids, true).unwrap();
    Made { text, ended, shaped: follower.shaped() }
}

/// Compares what two sequences of the same tokens are allowed, one with drafts and one without;
/// how many tokens were drafts that were there in time.
fn compare(compiled: &Arc<Compiled>, max_new: usize, seed: u64) -> usize {
    let follower = |drafts| follow(Arc::clone(compiled), (3, max_new), drafts);
    let (mut plain, mut other) = (follower(0), follower(5));
    let (alone, beside) = (plain.begin(), other.begin());
    let mut draw = Draw(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let mut place = Place { made: 0, last: 0, begin: 0 };
    let mut right = 0;
    while place.made < max_new {
        let able = mask(&alone, &plain, place.made);
        assert_eq!(next_mask(&beside, &other, &mut place), able, "token {}", place.made);
        let mut drafts = [0; 5];
        if draw.below(2) == 0 {
            std::thread::sleep(Duration::from_micros(300));
        }
        let drafted = beside.drafted(&place, &mut drafts);
        let mut id = able[draw.below(able.len())];
        if drafted > 0 && draw.below(4) > 0 {
            assert!(able.contains(&drafts[0]), "draft {} of token {}", drafts[0], place.made);
            (id, right) = (drafts[0], right + 1);
        }
        (place.made, place.last) = (place.made + 1, id);
        for follower in [&mut plain, &mut other] {
            follower.push(id);
            follower.publish();
        }
        if id == EOS {
            break;
        }
    }
    assert_eq!(plain.shaped(), other.shaped());
    right
}

#[test]
fn drafts_change_no_mask() {
    let all = grammars();
    let names = ["identifier_of_the_account", "description_of_the_change"];
    let members = names.map(|name| (name.to_owned(), json!({"type": "string", "maxLength": 9})));
    let object = json!({
        "type": "object", "properties": serde_json::Map::from_iter(members), "required": names,
        "additionalProperties": false,
    });
    let digits = r#"start: "begin of the text: " N " and here is the end of it"
        N: /[0-9]{1,3}/"#;
    let bounded = r#"start: "begin of the text: " n " and here is the end of it"
        n[max_tokens=2]: /[0-9]+/"#;
    for (grammar, drafts) in [
        (schema(&object), true),
        (Grammar::Lark(digits.into()), true),
        (Grammar::Regex("(a long beginning|another one)-[a-z]{2,4}-the same end".into()), true),
        // Tokens are not taken back.
        (Grammar::Lark(bounded.into()), false),
    ] {
        let compiled = compile(&all, &grammar).unwrap();
        let budgets = [6, 40, 300, 300, 300, 300];
        let run = |(seed, max_new): (u64, &usize)| compare(&compiled, *max_new, seed);
        let right: usize = (0..).zip(&budgets).map(run).sum();
        assert_eq!(right > 0, drafts, "{grammar:?}");
    }
}

#[test]
fn what_cannot_be_kept_to_is_refused_with_its_place() {
    let at = |keyword: &str, value: Value| {
        let mut inner = json!({"type": "array"});
        inner[keyword] = value;
        refused(&json!({"type": "object", "properties": {"a": inner}}))
    };
    for (keyword, value) in [
        ("uniqueItems", json!(true)),
        ("contains", json!({})),
        ("not", json!({})),
        ("if", json!({})),
        ("dependentRequired", json!({})),
        ("propertyNames", json!({})),
        ("unevaluatedProperties", json!(false)),
        ("maxlength", json!(3)),
        ("x-guidance", json!({"lenient": true})),
        ("$dynamicRef", json!("#")),
    ] {
        let why = at(keyword, value);
        assert_eq!(why, format!("#/properties/a: \"{keyword}\" is not supported"));
    }
    for (schema, wanted) in [
        (json!({"type": "string", "format": "uri-template"}), "format"),
        (json!({"$ref": "https://example.com/x"}), "$ref"),
        (json!({"$ref": "#/$defs/none"}), "#/$defs/none"),
        (json!({"properties": {"a": {"$id": "x"}}}), "$id"),
        (json!({"type": "text"}), "type"),
        (json!({"type": "integer", "minimum": 3, "maximum": 2}), "nsatisfiable"),
        (json!(false), "nsatisfiable"),
        (json!([1]), "object, true or false"),
        (json!({"oneOf": [{"type": "number"}, {"type": "integer"}]}), "oneOf"),
    ] {
        let why = refused(&schema);
        assert!(why.contains(wanted) && !why.contains('\n'), "{schema}: {why}");
    }
    let deep = (0..100).fold(json!({}), |inner, _| json!({"items": inner}));
    assert!(refused(&deep).contains("64 deep"));
    for (grammar, wanted) in [
        (Grammar::JsonSchema("{".into()), "no JSON"),
        (Grammar::Regex("(".into()), "regex"),
        (Grammar::Regex(String::new()), "empty"),
        (Grammar::Regex("a\\".into()), "backslash"),
        (Grammar::Lark("begin: \"a\"".into()), "start"),
        (Grammar::Lark("start: undefined".into()), "undefined"),
        (Grammar::Regex("a".repeat(2 << 20)), "bytes"),
    ] {
        let why = compile(&grammars(), &grammar).err().unwrap();
        assert!(why.contains(wanted), "{why}");
    }
    let endless = Grammars::new(tokenizer(false), VOCAB, &[]);
    assert!(compile(&endless, &Grammar::json_object()).err().unwrap().contains("end-of-sequence"));
}

#[test]
fn alternatives_that_exclude_each_other_are_taken() {
    let tagged = |tag: &str| {
        json!({"type": "object", "required": ["kind"], "additionalProperties": false,
            "properties": {"kind": {"const": tag}}})
    };
    let schema_of = json!({
        "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {"type": "null"}],
        "$defs": {"a": tagged("a"), "b": tagged("b")},
    });
    let compiled = compile(&grammars(), &schema(&schema_of)).unwrap();
    for seed in 1..20 {
        let text = walk(&compiled, 60, 0, seed).text;
        let value: Value = serde_json::from_str(&text).unwrap();
        assert!([json!(null), json!({"kind": "a"}), json!({"kind": "b"})].contains(&value));
    }
}

#[test]
fn whatever_is_chosen_the_text_is_legal_and_ends_within_its_budget() {
    let all = grammars();
    let object = json!({
        "type": "object", "additionalProperties": false, "required": ["name", "tags"],
        "properties": {
            "name": {"type": "string", "minLength": 2},
            "tags": {"type": "array", "items": {"enum": ["red", "green", 7]}, "minItems": 1},
            "deep": {"$ref": "#"},
        },
    });
    for of in [json!({"type": "object"}), object, json!(true), json!({"type": "string"})] {
        let compiled = compile(&all, &schema(&of)).unwrap();
        let shortest = compiled.shortest().unwrap().len();
        for max_new in [shortest, shortest + 1, shortest + 5, 40, 100, 300] {
            for seed in 1..6 {
                let Made { text, .. } = walk(&compiled, max_new, 0, seed);
                let parsed: Result<Value, _> = serde_json::from_str(&text);
                assert!(parsed.is_ok(), "{max_new} tokens: {text}");
                assert!(!text.contains(", ,") && !text.contains('\n'), "{text}");
            }
        }
        // Less than any legal text: what there is.
        if shortest > 1 {
            assert!(!walk(&compiled, shortest - 1, 0, 1).ended);
        }
    }
}

#[test]
fn a_finite_text_ends_by_itself_and_least_tokens_hold_while_there_is_a_choice() {
    let all = grammars();
    let compiled = compile(&all, &Grammar::Regex("(yes|no)!{1,3}".into())).unwrap();
    for seed in 1..30 {
        let Made { text, ended, shaped } = walk(&compiled, 64, 0, seed);
        assert!(ended && !shaped, "{text}");
        assert!(text.starts_with("yes!") || text.starts_with("no!"), "{text}");
    }
    let many = compile(&all, &Grammar::Regex("[ab]+".into())).unwrap();
    for seed in 1..10 {
        let ids = tokenizer(false).encode(&walk(&many, 64, 9, seed).text, false).unwrap();
        assert!(ids.len() >= 5, "{ids:?}");
        let Made { ended, .. } = walk(&compiled, 64, 40, seed);
        assert!(ended, "nothing else is legal");
    }
    let lark =
        Grammar::Lark("start: \"[\" list? \"]\"\nlist: NUM (\",\" NUM)*\nNUM: /[0-9]/".into());
    let compiled = compile(&all, &lark).unwrap();
    for seed in 1..10 {
        let list: Vec<u8> = serde_json::from_str(&walk(&compiled, 30, 0, seed).text).unwrap();
        assert!(list.iter().all(|n| *n < 10));
    }
}

/// Rules of which each is the next one.
fn chain(rules: usize) -> String {
    let rule = |n: usize| format!("a{n}: a{}\n", n + 1);
    let all: String = (0..rules).map(rule).collect();
    format!("start: a0\n{all}a{rules}: \"x\"")
}

/// Definitions of which each is the next one.
fn references(definitions: usize) -> Value {
    let place = |n: usize| json!({"$ref": format!("#/$defs/d{n}")});
    let mut all: serde_json::Map<String, Value> =
        (0..definitions).map(|n| (format!("d{n}"), place(n + 1))).collect();
    all.insert(format!("d{definitions}"), json!({"type": "null"}));
    json!({"$ref": "#/$defs/d0", "$defs": all})
}

#[test]
fn hostile_grammars_end_soon() {
    let all = grammars();
    let wide: serde_json::Map<String, Value> =
        (0..3000).map(|n| (format!("p{n}"), json!({"$ref": "#"}))).collect();
    let mut doubled = json!({"type": "string"});
    for _ in 0..40 {
        doubled = json!({"anyOf": [doubled.clone(), {"type": "array", "items": {}}]});
    }
    let hostile = [
        Grammar::Regex("((a{1,1000}){1,1000}){1,1000}".into()),
        Grammar::Regex("(a|aa|aaa)*b".repeat(300)),
        Grammar::Regex("[a-z]{1000000000}".into()),
        Grammar::Regex("(".repeat(5000) + &")".repeat(5000)),
        Grammar::Lark("start: start start | \"a\"".into()),
        Grammar::Lark(format!("start: {}", "(".repeat(20_000))),
        schema(&json!({"type": "string", "minLength": 1_000_000_000_u64})),
        schema(&json!({"type": "array", "minItems": 1_000_000_000_u64})),
        schema(&json!({"type": "object", "properties": wide, "required": ["p1", "p2"]})),
        schema(&json!({"allOf": [{"$ref": "#"}]})),
        schema(&json!({"$ref": "#"})),
        schema(&json!({"pattern": "^(a+)+$(b+)+$", "type": "string"})),
        schema(&doubled),
        Grammar::JsonSchema("[".repeat(100_000)),
        // What is followed by recursion, once as far as it may be, once further.
        Grammar::Lark(chain(4_000)),
        Grammar::Lark(chain(80_000)),
        schema(&references(4_000)),
        schema(&references(20_000)),
    ];
    for grammar in hostile {
        let begun = Instant::now();
        let compiled = compile(&all, &grammar);
        let named = grammar.definition().chars().take(50).collect::<String>();
        assert!(begun.elapsed() < Duration::from_secs(20), "{named}: {:?}", begun.elapsed());
        let Ok(compiled) = compiled else { continue };
        let mut follower = follow(compiled, (0, 6), 0);
        let masks = follower.begin();
        for index in 0..6 {
            let begun = Instant::now();
            while masks.read(index).is_none() && follower.failure().is_none() {
                assert!(begun.elapsed() < Duration::from_secs(20), "{named}");
                std::thread::sleep(Duration::from_micros(50));
            }
            if follower.failure().is_some() {
                break;
            }
            let id = mask(&masks, &follower, index)[0];
            if id == EOS {
                break;
            }
            follower.push(id);
            follower.publish();
        }
    }
}

#[test]
fn grammars_are_kept_and_a_sequence_may_begin_anew() {
    let all = grammars();
    let one = Grammar::Regex("[0-9]{4}".into());
    let first = compile(&all, &one).unwrap();
    assert!(Arc::ptr_eq(&first, &compile(&all, &one).unwrap()));
    for n in 1..40 {
        compile(&all, &Grammar::Regex(format!("[0-9]{{{n}}}x"))).unwrap();
        if n == 20 {
            compile(&all, &one).unwrap();
        }
    }
    assert!(Arc::ptr_eq(&first, &compile(&all, &one).unwrap()), "it was used lately");
    let mut follower = follow(first, (0, 8), 0);
    for _ in 0..3 {
        let masks = follower.begin();
        let able = mask(&masks, &follower, 0);
        follower.push(able[0]);
        follower.publish();
        assert!(!mask(&masks, &follower, 1).is_empty());
    }
}

#[test]
fn whoever_waits_for_a_grammar_may_give_up() {
    let never = || false;
    let patience = Patience::asking(&never);
    let given_up = grammars().compiled(&Grammar::json_object(), &patience);
    assert!(matches!(given_up, Err(Error::GivenUp { late: false, .. })));
}

#[test]
fn the_first_token_reads_as_the_text_will() {
    let tokenizer: Tokenizer = tokenizer(false);
    let words = (0..VOCAB as u32).filter_map(|id| tokenizer.grammar_word(id)).count();
    assert!(words > VOCAB / 2);
    assert_eq!(tokenizer.grammar_word(EOS).unwrap(), b"\xFF</s>");
}

/// A byte-level vocabulary of so many ids, of pieces that texts are made of.
fn made(ids: usize) -> Tokenizer {
    let mut vocab = serde_json::Map::new();
    vocab.insert("</s>".into(), 0.into());
    for byte in 0..=255u8 {
        let letter = match byte {
            0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte),
            0..=0x20 => char::from_u32(0x100 + u32::from(byte)).unwrap(),
            0x7F..=0xA0 => char::from_u32(0x121 + u32::from(byte) - 0x7F).unwrap(),
            0xAD => '\u{143}',
        };
        vocab.insert(letter.to_string(), vocab.len().into());
    }
    let mut draw = Draw(7);
    let parts = ["in", "er", "the", "con", "\":", "{\"", "\",", "0", "12", "tion", "Ġ", "A", "é"];
    while vocab.len() < ids {
        let word: String = (0..1 + draw.below(4)).map(|_| parts[draw.below(parts.len())]).collect();
        let tail = char::from(b'a' + draw.below(26) as u8);
        let number = draw.below(40);
        let word = if number < 20 { word } else { format!("{word}{tail}{number}") };
        let next = vocab.len();
        vocab.entry(word).or_insert_with(|| next.into());
    }
    let special = json!({"id": 0, "content": "</s>", "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false, "special": true});
    let file = json!({"version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [special], "normalizer": null, "pre_tokenizer": null,
        "post_processor": null, "decoder": {"type": "ByteLevel", "add_prefix_space": false,
        "trim_offsets": false, "use_regex": false},
        "model": {"type": "BPE", "vocab": vocab, "merges": []}});
    let dir = std::env::temp_dir().join(format!("kie-masks-{}-{ids}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(dir.join("tokenizer.json"), file.to_string()).unwrap();
    std::fs::write(dir.join("tokenizer_config.json"), "{}").unwrap();
    let made = Tokenizer::from_dir(&dir, ids).unwrap();
    std::fs::remove_dir_all(&dir).unwrap();
    made
}

/// An ending that is known is one as long as the text does not leave it: it ends the text, and one
/// token more makes it longer by `growth` at most, as the count of what is left relies on.
#[test]
fn an_ending_that_is_known_ends_the_text_still() {
    let text = json!({"type": "string"});
    let all = json!({"type": "object", "properties": {"name": text, "text": text, "more": text},
        "required": ["name", "text"], "additionalProperties": false});
    let grammars = grammars();
    let compiled = compile(&grammars, &schema(&all)).unwrap();
    let vocabulary = &compiled.vocabulary;
    let (mut kept, mut searched) = (0, 0);
    for seed in 1..20 {
        let mut matcher = compiled.begin();
        let mut draw = Draw(seed * 0x9E37_79B9);
        let mut known: Vec<u32> = Vec::new();
        for _ in 0..60 {
            let still = !known.is_empty() && ending::is_one(&mut matcher, &known, &vocabulary.eos);
            let found = vocabulary.ending(&mut matcher, &known).unwrap();
            if still {
                kept += 1;
                assert_eq!(found, known);
            } else {
                searched += 1;
            }
            if !known.is_empty() {
                assert!(
                    found.len() <= known.len() + compiled.growth(),
                    "{found:?} behind {known:?}"
                );
            }
            let mut copy = matcher.deep_clone();
            copy.consume_tokens(&found).unwrap();
            assert!(copy.is_accepting().unwrap());
            let mask = matcher.compute_mask_or_eos().unwrap();
            let able = mask.to_list();
            let id = able[draw.below(able.len())];
            if id == EOS || matcher.consume_token(id).is_err() {
                break;
            }
            known = found;
            vocabulary.take_from(&mut known, id);
        }
    }
    assert!(kept > searched && searched > 19, "{kept} kept, {searched} searched");
}

/// Whatever token says some of an ending: what is left of it is the rest of its text.
#[test]
fn an_ending_is_taken_by_any_tokens_that_say_it() {
    let words = tokenizer(false);
    let word = |id: u32| words.grammar_word(id).unwrap_or_default();
    let grammars = grammars();
    let compiled = compile(&grammars, &schema(&json!({"type": "object"}))).unwrap();
    let text = b"name\": \"a\"}";
    let whole = compiled.vocabulary.split(text);
    let mut said = 0;
    for id in 0..VOCAB as u32 {
        let mut ending = whole.clone();
        compiled.vocabulary.take_from(&mut ending, id);
        let left: Vec<u8> = ending.iter().flat_map(|id| word(*id)).collect();
        let rest = text.strip_prefix(&word(id)[..]).unwrap_or(text);
        assert_eq!(left, rest, "token {id}");
        said += usize::from(rest.len() < text.len());
    }
    assert!(said > 0);
}

/// The median and the 99th percentile.
fn middle_and_last(mut times: Vec<f64>) -> (f64, f64) {
    times.sort_by(f64::total_cmp);
    let at = |q: f64| times[((times.len() - 1) as f64 * q) as usize];
    (at(0.5), at(0.99))
}

/// Not a gate (machines are shared): `cargo test -p kie-core --lib grammar::tests::times --
/// --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn times() {
    let members: serde_json::Map<String, Value> = (0..24)
        .map(|n| {
            let kinds = [json!("string"), json!("integer"), json!("boolean")];
            (format!("member_{n}"), json!({"type": kinds[n % 3]}))
        })
        .collect();
    let tool = json!({"type": "object", "properties": &members, "additionalProperties": false});
    let names: Vec<String> = (0..8).map(|n| format!("member_{n}")).collect();
    let required = json!({"type": "object", "properties": members, "required": names,
        "additionalProperties": false});
    for ids in [32_000, 128_000] {
        let begun = Instant::now();
        let all = Grammars::new(made(ids), ids, &[0]);
        let tokenizer = begun.elapsed();
        all.warm(&Patience::ENDLESS).unwrap();
        let vocabulary = begun.elapsed() - tokenizer;
        for (name, of) in [
            ("object", json!({"type": "object"})),
            ("tool", tool.clone()),
            ("tool with 8 required", required.clone()),
        ] {
            let begun = Instant::now();
            let compiled = compile(&all, &schema(&of)).unwrap();
            let compiling = begun.elapsed();
            let begun = Instant::now();
            drop(compiled.begin());
            let copying = begun.elapsed();
            let [mut taken, mut endings, mut known] = [const { Vec::new() }; 3];
            for seed in 1..20 {
                let mut matcher = compiled.begin();
                let mut draw = Draw(seed * 0x9E37_79B9);
                for n in 0..200 {
                    let begun = Instant::now();
                    let mask = matcher.compute_mask_or_eos().unwrap();
                    taken.push(begun.elapsed().as_secs_f64() * 1e6);
                    if n % 10 == 0 {
                        let begun = Instant::now();
                        let found = compiled.vocabulary.ending(&mut matcher, &[]);
                        endings.push(begun.elapsed().as_secs_f64() * 1e6);
                        let begun = Instant::now();
                        drop(compiled.vocabulary.ending(&mut matcher, &found.unwrap_or_default()));
                        known.push(begun.elapsed().as_secs_f64() * 1e6);
                    }
                    let able = mask.to_list();
                    let id = able[draw.below(able.len())];
                    if id == 0 || matcher.consume_token(id).is_err() {
                        break;
                    }
                }
            }
            let count = taken.len();
            let [(mask, last), (found, most), (again, longest)] =
                [taken, endings, known].map(middle_and_last);
            eprintln!(
                "{ids} ids, {name}: mask p50 {mask:.1} us, p99 {last:.1} us, of {count}; an ending \
                 p50 {found:.1} us, p99 {most:.1} us, a known one {again:.1} and {longest:.1}; \
                 compiled in {compiling:.1?}, copied in {copying:.1?}; vocabulary {vocabulary:.1?}",
            );
        }
    }
}

#[path = "suite.rs"]
mod suite;
