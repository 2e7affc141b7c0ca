//! Sessions that are saved and loaded: they go on with the bits that they would have had, in an
//! engine that never saw them; what is no file of theirs is refused by name and changes nothing.

#![allow(clippy::unwrap_used)]

mod support;

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use kie_core::request::{Completion, EngineConfig, Prompt, Request, SamplingParams};
use kie_core::{Engine, Error, Patience, Session};
use safetensors::{Dtype, SafeTensors};
use support::{repository, Folder};

fn folder_of(name: &str) -> std::path::PathBuf {
    match name {
        "demo" => repository().join("python/kie/demo"),
        name => repository().join("tests/data").join(name),
    }
}

fn open_with(name: &str, change: impl Fn(&mut EngineConfig)) -> Engine {
    let mut config = EngineConfig {
        device: "cpu".to_owned(),
        threads: Some(2),
        max_batch: 2,
        max_seq_len: Some(1024),
        ..EngineConfig::default()
    };
    change(&mut config);
    Engine::builder(folder_of(name)).config(config).build().unwrap()
}

fn open(name: &str) -> Engine {
    open_with(name, |_| {})
}

fn turn(session: &mut Session, text: &str) -> Completion {
    let params = SamplingParams {
        max_tokens: Some(24),
        temperature: Some(0.8),
        seed: Some(5),
        logprobs: Some(2),
        ignore_eos: true,
        ..SamplingParams::default()
    };
    session.generate(Prompt::Text(text.to_owned()), params).unwrap()
}

/// Ids with the bits of their log-probabilities.
fn bits(done: &Completion) -> Vec<(u32, u32, Vec<u32>)> {
    let one = |token: &kie_core::request::TokenLogprob| {
        let others = token.top_logprobs.iter().map(|t| t.logprob.to_bits()).collect();
        (token.id, token.logprob.to_bits(), others)
    };
    done.logprobs.as_ref().unwrap().iter().map(one).collect()
}

const LONG: &str = "Write a function that adds two numbers and returns the sum of both of them. ";

/// Two turns, of which the first has several pages.
fn talked(engine: &Engine) -> Session {
    let mut session = engine.session(Some("You write Python.")).unwrap();
    turn(&mut session, &LONG.repeat(if engine.context() > 512 { 12 } else { 4 }));
    turn(&mut session, "And now subtract.");
    session
}

#[test]
fn a_loaded_session_goes_on_with_the_same_bits() {
    let folder = Folder::new("saved");
    let path = folder.0.join("turns.kie");
    // A window, a chat template, several lanes, experts, latents; pages in float32.
    for (name, reproducible) in [
        ("demo", true),
        ("demo", false),
        ("own_mistral", true),
        ("laneformer_d2", true),
        ("own_gemma3", true),
        ("gpt_oss_mxfp4", true),
        ("own_qwen3_next", true),
        ("own_qwen3_next", false),
        ("own_deepseek_v3", true),
        ("own_deepseek_v4", true),
        ("own_deepseek_v4", false),
    ] {
        let fresh = || {
            open_with(name, |c| {
                (c.reproducible, c.max_seq_len) =
                    (reproducible, c.max_seq_len.filter(|_| name == "demo"));
            })
        };
        let engine = fresh();
        let mut session = talked(&engine);
        session.save(&path).unwrap();
        let wanted = turn(&mut session, "Explain it.");
        let place = format!("{name}, reproducible={reproducible}");
        assert!(wanted.usage.cached_tokens >= 128, "{place}: {:?}", wanted.usage);
        let other = fresh();
        let mut loaded = other.load_session(&path).unwrap();
        assert_eq!(loaded.turns(), 2, "{place}");
        let mut second = loaded.fork().unwrap();
        let got = turn(&mut loaded, "Explain it.");
        assert_eq!(bits(&got), bits(&wanted), "{place}");
        assert_eq!(got.usage, wanted.usage, "{place}: pages came along");
        // Turns can be taken back, those of before too.
        second.rollback(1).unwrap();
        session.rollback(1).unwrap();
        let (a, b) = (turn(&mut second, "Again."), turn(&mut session, "Again."));
        assert_eq!(bits(&a), bits(&b), "{place}");
        assert_eq!(second.tokens().unwrap(), session.tokens().unwrap());
    }
}

#[test]
fn pages_are_used_only_where_they_would_have_been_made() {
    let folder = Folder::new("saved-elsewhere");
    let path = folder.0.join("turns.kie");
    let engine = open_with("demo", |c| c.reproducible = false);
    talked(&engine).save(&path).unwrap();
    let cached = |open: &dyn Fn(&mut EngineConfig)| {
        let engine = open_with("demo", open);
        let mut session = engine.load_session(&path).unwrap();
        turn(&mut session, "Explain it.").usage.cached_tokens
    };
    assert!(cached(&|c| c.reproducible = false) >= 128);
    // What decoding made is not what a cold run has.
    assert_eq!(cached(&|c| c.reproducible = true), 0);
    // Sums in another order.
    assert_eq!(cached(&|c| (c.device, c.reproducible) = ("cpu:0,1".to_owned(), false)), 0);
    assert_eq!(cached(&|c| (c.prefix_cache, c.reproducible) = (false, false)), 0);
}

#[test]
fn a_device_that_keeps_its_pages_saves_the_words() {
    let folder = Folder::new("saved-words");
    let path = folder.0.join("turns.kie");
    let engine = open_with("own_llama_f16", |c| {
        (c.device, c.max_seq_len, c.threads) = ("sim:blocks=8".to_owned(), Some(256), None);
    });
    let mut session = engine.session(None).unwrap();
    turn(&mut session, &LONG.repeat(2));
    session.save(&path).unwrap();
    let tokens = session.tokens().unwrap().to_vec();
    let elsewhere = open_with("own_llama_f16", |c| c.max_seq_len = Some(256));
    let error = elsewhere.load_session(&path).err();
    // The CPU keeps float32 where the kernels keep halves, but the program says the same.
    let mut loaded = match error {
        None => elsewhere.load_session(&path).unwrap(),
        Some(error) => panic!("{error}"),
    };
    assert_eq!(loaded.tokens().unwrap(), tokens);
    let again = engine.load_session(&path).unwrap().tokens().unwrap().to_vec();
    assert_eq!(again, tokens);
}

/// The tensors of a file, to change one and write them again.
fn changed(path: &Path, change: impl Fn(&mut Vec<(String, Dtype, Vec<usize>, Vec<u8>)>)) {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut all: Vec<_> = file
        .iter()
        .map(|(name, t)| (name.to_owned(), t.dtype(), t.shape().to_vec(), t.data().to_vec()))
        .collect();
    all.sort();
    change(&mut all);
    let views = all.iter().map(|(name, dtype, shape, data)| {
        (name, safetensors::tensor::TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    let out = safetensors::serialize(views, None).unwrap();
    std::fs::write(path, out).unwrap();
}

/// The text of `session` changed, its sum made right again.
fn retold(path: &Path, from: &str, to: &str) {
    changed(path, |all| {
        let at = all.iter().position(|(name, ..)| name == "session").unwrap();
        let text = String::from_utf8(all[at].3.clone()).unwrap();
        assert!(text.contains(from), "{from:?} in {text}");
        let text = text.replacen(from, to, 1).into_bytes();
        let sum = crc32fast::hash(&text);
        (all[at].2, all[at].3) = (vec![text.len()], text);
        let sums = all.iter().position(|(name, ..)| name == "sums").unwrap();
        all[sums].3[..4].copy_from_slice(&sum.to_le_bytes());
    });
}

fn refused(engine: &Engine, path: &Path, told: &[&str]) {
    let Err(error) = engine.load_session(path) else { panic!("{told:?} was loaded") };
    assert_eq!(error.class(), "LoadError", "{error}");
    let message = error.to_string();
    for part in told {
        assert!(message.contains(part), "{part:?} in {message:?}");
    }
}

#[test]
fn foreign_and_damaged_files_are_named() {
    let folder = Folder::new("saved-damaged");
    let at = |name: &str| folder.0.join(name);
    let engine = open("demo");
    let good = at("good.kie");
    talked(&engine).save(&good).unwrap();
    let bytes = std::fs::read(&good).unwrap();
    let bad = at("bad.kie");
    for part in [0, 7, 8, 9, 200, bytes.len() / 2, bytes.len() - 1] {
        std::fs::write(&bad, &bytes[..part]).unwrap();
        refused(&engine, &bad, &["bad.kie", "session.save()"]);
    }
    // One bit anywhere: in the header, in the words, in a page.
    for at in (0..bytes.len()).step_by(bytes.len() / 61) {
        let mut bytes = bytes.clone();
        bytes[at] ^= 1;
        std::fs::write(&bad, &bytes).unwrap();
        refused(&engine, &bad, &["bad.kie", "wanted", "got"]);
    }
    for (from, to, told) in [
        ("\"format\":1", "\"format\":2", &["format", "wanted 1", "got 2, written by kie"][..]),
        ("\"dtype\":\"auto\"", "\"dtype\":\"int4\"", &["dtype", "wanted auto", "got int4"]),
        ("\"weights\":\"", "\"weights\":\"0", &["weights", "(demo)"]),
        ("\"layout\":[\"", "\"layout\":[\"no ", &["layout", "no KeysValues"]),
        ("\"chat\":true", "\"chat\":false", &["chat", "wanted true"]),
        ("\"ids_kept\":0", "\"ids_kept\":9", &["states[0]"]),
        ("\"pages\":", "\"pages\":9", &["pages"]),
        ("\"states\":[", "\"states\":[7,", &["states[0]", "got 7"]),
    ] {
        std::fs::copy(&good, &bad).unwrap();
        retold(&bad, from, to);
        refused(&engine, &bad, told);
    }
    std::fs::copy(&good, &bad).unwrap();
    changed(&bad, |all| all.push(("more".to_owned(), Dtype::U8, vec![1], vec![0])));
    refused(&engine, &bad, &["more", "surplus"]);
    std::fs::copy(&good, &bad).unwrap();
    changed(&bad, |all| all.retain(|(name, ..)| name != "ids"));
    refused(&engine, &bad, &["ids"]);
    std::fs::copy(&good, &bad).unwrap();
    changed(&bad, |all| all.retain(|(name, ..)| name != "page.1.0"));
    refused(&engine, &bad, &["sums"]);
    refused(
        &open_with("llama", |c| c.max_seq_len = None),
        &good,
        &["weights", "(llama)", "(demo)"],
    );
    let pipe = CString::new(at("pipe").as_os_str().as_bytes()).unwrap();
    // SAFETY: makes a pipe of a name that ends.
    assert_eq!(unsafe { libc::mkfifo(pipe.as_ptr(), 0o600) }, 0);
    refused(&engine, &at("pipe"), &["not a regular file"]);
    refused(&engine, &folder.0, &["not a regular file"]);
    refused(&engine, &at("nowhere"), &["nowhere"]);
    std::fs::File::create(at("huge")).unwrap().set_len(1 << 40).unwrap();
    refused(&engine, &at("huge"), &["at most", "1099511627776 bytes"]);
    // The engine is as it was.
    let mut session = engine.load_session(&good).unwrap();
    assert!(turn(&mut session, "Explain it.").usage.cached_tokens >= 128);
}

#[test]
fn a_file_appears_whole_or_not_at_all() {
    let folder = Folder::new("saved-whole");
    let engine = open("demo");
    let mut session = talked(&engine);
    let path = folder.0.join("turns.kie");
    let left = || std::fs::read_dir(&folder.0).unwrap().count();
    let given_up = session.save_within(&path, &Patience::asking(&|| false)).unwrap_err();
    assert!(matches!(given_up, Error::GivenUp { .. }), "{given_up}");
    assert_eq!(left(), 0);
    let error = session.save(&folder.0.join("no/such/folder.kie")).unwrap_err();
    assert!(matches!(error, Error::Write { .. }), "{error}");
    let error = session.save(&folder.0).unwrap_err();
    assert!(error.to_string().contains("no regular file"), "{error}");
    session.save(&path).unwrap();
    let first = std::fs::read(&path).unwrap();
    turn(&mut session, "More.");
    session.save(&path).unwrap();
    assert!(std::fs::read(&path).unwrap() != first, "what stood there is replaced");
    assert_eq!(left(), 1);
    let given_up = engine.load_session_within(&path, &Patience::asking(&|| false));
    assert!(matches!(given_up, Err(Error::GivenUp { .. })));
    engine.close();
    assert!(matches!(session.save(&path), Err(Error::EngineClosed)));
    assert!(matches!(engine.load_session(&path), Err(Error::EngineClosed)));
}

/// Requests run while pages come and go, and none is disturbed.
#[test]
fn sessions_are_saved_and_loaded_beside_requests() {
    let folder = Folder::new("saved-beside");
    let engine = open("demo");
    let path = folder.0.join("turns.kie");
    let mut session = talked(&engine);
    session.save(&path).unwrap();
    let alone = turn(&mut engine.session(None).unwrap(), "Count to ten.");
    std::thread::scope(|scope| {
        let busy = scope.spawn(|| {
            let one = |_| turn(&mut engine.session(None).unwrap(), "Count to ten.");
            (0..8).map(one).all(|done| bits(&done) == bits(&alone))
        });
        for _ in 0..12 {
            session.save(&path).unwrap();
            engine.load_session(&path).unwrap();
        }
        assert!(busy.join().unwrap());
    });
}

/// Pages that find no room are computed again, with the same bits; turns that the context cannot
/// hold are refused.
#[test]
fn a_session_is_loaded_into_less_room() {
    let folder = Folder::new("saved-room");
    let path = folder.0.join("turns.kie");
    let engine = open("demo");
    let mut session = talked(&engine);
    session.save(&path).unwrap();
    let tokens = session.tokens().unwrap().len();
    let wanted = turn(&mut session, "Explain it.");
    // No more pages than one sequence may have, of which a request that runs holds some.
    let next = wanted.usage.prompt_tokens + wanted.usage.completion_tokens;
    let with = |kv_bytes: u64| {
        let config = EngineConfig {
            device: "cpu".to_owned(),
            max_seq_len: Some(next + 64),
            kv_bytes: Some(kv_bytes),
            ..EngineConfig::default()
        };
        Engine::builder(folder_of("demo")).config(config).build()
    };
    let refusal = with(1).err().unwrap().to_string();
    let least = refusal.split("at least ").nth(1).unwrap().split(',').next().unwrap();
    let small = with(least.parse().unwrap()).unwrap();
    let params = SamplingParams {
        max_tokens: Some(next - 300),
        ignore_eos: true,
        ..SamplingParams::default()
    };
    let ids = Prompt::Ids((5..205).collect());
    let mut beside = small.stream(Request { prompt: ids, params }).unwrap();
    beside.next().unwrap().unwrap();
    let mut loaded = small.load_session(&path).unwrap();
    drop(beside);
    let got = turn(&mut loaded, "Explain it.");
    assert_eq!(bits(&got), bits(&wanted));
    assert!(got.usage.cached_tokens < wanted.usage.cached_tokens, "{:?}", got.usage);
    let shorter = open_with("demo", |c| c.max_seq_len = Some(tokens - 1));
    let limit = format!("at most {} tokens", tokens - 1);
    refused(&shorter, &path, &["states", &limit, "max_seq_len", &format!("got {tokens} tokens")]);
    // As long as the context: it is there, and has no room for a turn.
    let full = open_with("demo", |c| c.max_seq_len = Some(tokens));
    let mut loaded = full.load_session(&path).unwrap();
    let prompt = Prompt::Text("Explain it.".to_owned());
    let error = loaded.stream(prompt, SamplingParams::default()).err().unwrap();
    assert_eq!(error.class(), "ContextLengthError", "{error}");
    assert_eq!(loaded.turns(), 2, "as it was");
}
