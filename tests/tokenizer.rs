//! The tokenizers and chat templates of the fixtures and of the default model against recordings,
//! templates against Jinja 2, and files and texts that are broken, hostile or very long.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kie_core::tokenizer::Tokenizer;
use kie_core::Error;
use serde_json::{json, Map, Value};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn fixture(name: &str) -> PathBuf {
    root().join("tests/data").join(name)
}

fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

/// A folder of its own for one test, deleted at the end.
struct Folder(PathBuf);

impl Folder {
    /// With the tokenizer of a fixture.
    fn new(test: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("kie-tokenizer-{}-{test}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        for file in ["tokenizer.json", "tokenizer_config.json"] {
            fs::copy(fixture("llama").join(file), dir.join(file)).unwrap();
        }
        Self(dir)
    }

    fn write(&self, file: &str, bytes: impl AsRef<[u8]>) {
        fs::write(self.0.join(file), bytes).unwrap();
    }

    /// Replaces keys of a JSON file; null removes one.
    fn edit(&self, file: &str, edits: &Value) {
        let mut json = json_of(&self.0.join(file));
        for (key, value) in edits.as_object().unwrap() {
            json[key] = value.clone();
        }
        json.as_object_mut().unwrap().retain(|_, v| !v.is_null());
        self.write(file, json.to_string());
    }

    fn load(&self) -> Tokenizer {
        Tokenizer::from_dir(&self.0, 512).unwrap()
    }

    /// The file, key and texts of the load error.
    fn fault(&self, vocab: usize) -> (String, String) {
        match Tokenizer::from_dir(&self.0, vocab).unwrap_err() {
            Error::Load { file, tensor, wanted, got, .. } => {
                assert!(!wanted.is_empty() && !got.is_empty());
                let file = file.file_name().unwrap().to_str().unwrap().to_string();
                (file, format!("{}: {wanted}: {got}", tensor.unwrap_or_default()))
            }
            other => panic!("wanted a load error, got {other}"),
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn the_fixtures_tokenize_as_recorded() {
    let with_bos = ["laneformer_d2", "llama", "own_mistral"];
    for (golden, models) in [("laneformer_d2", &with_bos[..]), ("qwen2", &["qwen2", "qwen3"])] {
        let golden = json_of(&fixture(golden).join("tokenizer_golden.json"));
        let cases = golden["cases"].as_array().unwrap();
        let chats = golden["chat"].as_array().unwrap();
        assert!(cases.len() > 20 && chats.len() > 3);
        for model in models {
            let t = Tokenizer::from_dir(&fixture(model), 512).unwrap();
            assert_eq!((t.vocab(), t.bos(), t.eos()), (512, Some(505), Some(506)));
            for (token, id) in golden["special_ids"].as_object().unwrap() {
                assert_eq!(t.token_id(token).map(u64::from), id.as_u64());
            }
            for case in cases {
                let text = case["text"].as_str().unwrap();
                let all = ids(&case["ids"]);
                assert_eq!(t.encode(text, true).unwrap(), all, "{model}: {text:?}");
                assert_eq!(t.encode(text, false).unwrap(), ids(&case["ids_no_special"]));
                // The decodings are recorded of the ids without added special tokens.
                let plain = ids(&case["ids_no_special"]);
                assert_eq!(t.decode(&plain, false).unwrap(), case["decoded"].as_str().unwrap());
                let skipped = case["decoded_skip_special"].as_str().unwrap();
                assert_eq!(t.decode(&all, true).unwrap(), skipped);
            }
            for chat in chats {
                let prompt = chat["add_generation_prompt"].as_bool().unwrap();
                let (messages, none) = (&chat["messages"], Map::new());
                let text = t.apply_chat_template(messages, prompt, &none).unwrap();
                assert_eq!(text, chat["text"].as_str().unwrap(), "{model}");
                assert_eq!(t.encode_chat(messages, prompt, &none).unwrap(), ids(&chat["ids"]));
            }
        }
    }
}

#[test]
fn the_default_model_tokenizes_as_recorded() {
    let dir = root().join("python/kie/demo");
    let t = Tokenizer::from_dir(&dir, 4096).unwrap();
    let mut chats = 0;
    for prompt in json_of(&dir.join("golden.json"))["prompts"].as_array().unwrap() {
        let text = prompt["prompt"].as_str().unwrap();
        let wanted = ids(&prompt["prompt_ids"]);
        if let Some(messages) = prompt.get("messages") {
            chats += 1;
            let none = Map::new();
            assert_eq!(t.apply_chat_template(messages, true, &none).unwrap(), text);
            assert_eq!(t.encode_chat(messages, true, &none).unwrap(), wanted);
        } else {
            assert_eq!(t.encode(text, true).unwrap(), wanted);
        }
        let generated = ids(&prompt["greedy_ids"]);
        let end = prompt["eos_at"].as_u64().map_or(generated.len(), |at| at as usize);
        assert_eq!(t.decode(&generated[..end], true).unwrap(), prompt["text"].as_str().unwrap());
    }
    assert_eq!(chats, 1);
    let refused = json!([{"role": "tool", "content": "x"}]);
    let error = t.apply_chat_template(&refused, true, &Map::new()).unwrap_err();
    assert!(error.to_string().contains("Unknown role: tool"), "{error}");
}

#[test]
fn templates_render_as_in_jinja2() {
    let folder = Folder::new("jinja2");
    folder.edit("tokenizer_config.json", &json!({"bos_token": "<|bos|>"}));
    for case in json_of(&root().join("tests/data/templates/jinja2.json")).as_array().unwrap() {
        folder.write("chat_template.jinja", case["template"].as_str().unwrap());
        let mut extra = case["extra"].as_object().unwrap().clone();
        extra.insert("bos_token".into(), "<s>".into());
        let text = folder.load().apply_chat_template(&case["messages"], true, &extra).unwrap();
        assert_eq!(text, case["text"].as_str().unwrap(), "{}", case["name"]);
    }
}

#[test]
fn templates_are_found_by_name_and_file() {
    let folder = Folder::new("named");
    let render = |extra: Value| {
        let extra = extra.as_object().unwrap().clone();
        let messages = json!([{"role": "user", "content": "x"}]);
        folder.load().apply_chat_template(&messages, false, &extra)
    };
    let named = json!([{"name": "default", "template": "D{{ eos_token }}"},
                       {"name": "tool_use", "template": "T"}]);
    folder.edit("tokenizer_config.json", &json!({"chat_template": named}));
    assert_eq!(render(json!({})).unwrap(), "D<|eos|>");
    assert_eq!(render(json!({"tools": [1]})).unwrap(), "T");
    folder.write("chat_template.jinja", "J");
    assert_eq!(render(json!({})).unwrap(), "J");
    fs::remove_file(folder.0.join("chat_template.jinja")).unwrap();
    let other = json!([{"name": "rag", "template": "R"}]);
    folder.edit("tokenizer_config.json", &json!({"chat_template": other}));
    assert!(matches!(render(json!({})), Err(Error::Template(m)) if m.contains("rag")));
    folder.edit("tokenizer_config.json", &json!({"chat_template": null}));
    assert!(!folder.load().has_chat_template());
    assert!(matches!(render(json!({})), Err(Error::Template(_))));
}

#[test]
fn messages_are_checked() {
    let t = Tokenizer::from_dir(&fixture("llama"), 512).unwrap();
    let render = |m: Value| t.apply_chat_template(&m, false, &Map::new());
    let parts = json!([{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]);
    assert_eq!(render(parts).unwrap(), "<|bos|><|user|>a\nb<|end|>\n");
    let image = json!([{"role": "user", "content": [{"type": "image", "url": "u"}]}]);
    for wrong in [
        image,
        json!({}),
        json!("hi"),
        json!(["hi"]),
        json!([{"content": "hi"}]),
        json!([{"role": 1}]),
        json!([{"role": "user", "content": 3}]),
    ] {
        assert!(matches!(render(wrong), Err(Error::Template(_))));
    }
}

#[test]
fn hostile_templates_end_in_an_error() {
    let folder = Folder::new("hostile");
    let endless = "{% for a in range(10000) %}{% for b in range(10000) %}{{ a }}{% endfor %}\
                   {% endfor %}";
    let cases = [
        (endless, "takes more than"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ 'x' * 10000000000 }}", "constants"),
        ("{% set n = 10000000000 %}{{ 'x' * n }}", "takes more than"),
        ("{{ raise_exception('no such luck') }}", "no such luck (line 1)"),
        ("{% for %}", "line 1"),
        ("{{ missing.attribute }}", "line 1"),
        ("{{ missing | tojson }}", "undefined"),
        ("{% include 'other' %}", "line 1"),
        ("{{ strftime_now('%Q') }}", "unknown code"),
    ];
    for (template, says) in cases {
        folder.write("chat_template.jinja", template);
        let t = folder.load();
        let start = Instant::now();
        let error = t.apply_chat_template(&json!([]), true, &Map::new()).unwrap_err();
        assert!(matches!(error, Error::Template(_)), "{error}");
        assert!(error.to_string().contains(says), "{template}: {error}");
        assert!(start.elapsed() < Duration::from_secs(20));
    }
    folder.write("chat_template.jinja", "{{ strftime_now('%Y') | int > 2000 }}");
    let now = folder.load().apply_chat_template(&json!([]), true, &Map::new()).unwrap();
    assert_eq!(now, "True");
}

#[test]
fn bos_follows_the_config() {
    let folder = Folder::new("bos");
    let first = |edits: Value| {
        folder.edit("tokenizer_config.json", &edits);
        let t = folder.load();
        assert_eq!(t.encode("a", false).unwrap(), [64]);
        t.encode("a", true).unwrap()
    };
    assert_eq!(first(json!({})), [505, 64]);
    assert_eq!(first(json!({"add_bos_token": null})), [505, 64]);
    assert_eq!(first(json!({"add_bos_token": false})), [64]);
    folder.edit("tokenizer.json", &json!({"post_processor": null}));
    assert_eq!(first(json!({"add_bos_token": false})), [64]);
    assert_eq!(first(json!({"add_bos_token": true})), [505, 64]);
    assert_eq!(first(json!({"bos_token": {"content": "<|bos|>"}})), [505, 64]);
    assert_eq!(first(json!({"bos_token": null})), [64]);
    assert_eq!(folder.load().bos(), None);
}

#[test]
fn limits_in_the_file_are_ignored() {
    let folder = Folder::new("limits");
    let truncation = json!({"direction": "Right", "max_length": 3, "strategy": "LongestFirst",
                            "stride": 0});
    let padding = json!({"strategy": {"Fixed": 64}, "direction": "Right", "pad_id": 507,
                         "pad_to_multiple_of": null, "pad_type_id": 0, "pad_token": "<|pad|>"});
    folder.edit("tokenizer.json", &json!({"truncation": truncation, "padding": padding}));
    let whole = Tokenizer::from_dir(&fixture("llama"), 512).unwrap();
    let text = "The little engine waited.";
    assert_eq!(folder.load().encode(text, true).unwrap(), whole.encode(text, true).unwrap());
}

#[test]
fn broken_files_are_load_errors() {
    let good = fs::read(fixture("llama").join("tokenizer.json")).unwrap();
    let folder = Folder::new("broken");
    for at in [0, 1, 2, good.len() / 3, good.len() / 2, good.len() - 2] {
        folder.write("tokenizer.json", &good[..at]);
        assert_eq!(folder.fault(512).0, "tokenizer.json", "cut at {at}");
    }
    let nested = format!("{}1{}", "[".repeat(100_000), "]".repeat(100_000));
    let bytes = [b"\xFF\xFE".as_slice(), b"null", b"[]", b"{}", b"3", nested.as_bytes()];
    for bytes in bytes {
        folder.write("tokenizer.json", bytes);
        assert_eq!(folder.fault(512).0, "tokenizer.json");
    }
    let edits = [
        json!({"model": 3}),
        json!({"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}),
        json!({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["b c"]}}),
        json!({"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}),
        json!({"model": {"type": "Unigram", "unk_id": 7, "vocab": [["a", 0.0]]}}),
        json!({"decoder": {"type": "Nonsense"}}),
        json!({"decoder": 3}),
        json!({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}),
        json!({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("},
                                 "behavior": "Isolated", "invert": false}}),
        json!({"added_tokens": [{"id": "x"}]}),
        json!({"version": "9"}),
    ];
    for edits in edits {
        folder.write("tokenizer.json", &good);
        folder.edit("tokenizer.json", &edits);
        assert_eq!(folder.fault(512).0, "tokenizer.json", "{edits}");
    }
    fs::remove_file(folder.0.join("tokenizer.json")).unwrap();
    assert_eq!(folder.fault(512).0, "tokenizer.json");
    fs::create_dir(folder.0.join("tokenizer.json")).unwrap();
    assert_eq!(folder.fault(512).0, "tokenizer.json");
}

#[test]
fn broken_configs_are_load_errors() {
    let folder = Folder::new("configs");
    let file = "tokenizer_config.json";
    let good = fs::read(folder.0.join(file)).unwrap();
    for bytes in [&b""[..], b"{", b"[]", b"null", b"\xFF", &good[..good.len() / 2]] {
        folder.write(file, bytes);
        assert_eq!(folder.fault(512).0, file);
    }
    let edits = [
        ("bos_token", json!(3)),
        ("eos_token", json!({"text": "<|eos|>"})),
        ("eos_token", json!("<|no such token|>")),
        ("add_bos_token", json!("yes")),
        ("chat_template", json!(3)),
        ("chat_template", json!([{"name": "default"}])),
    ];
    for (key, value) in edits {
        folder.write(file, &good);
        folder.edit(file, &json!({key: value}));
        let (at, says) = folder.fault(512);
        assert_eq!(at, file);
        assert!(says.starts_with(key), "{says}");
    }
    folder.write(file, &good);
    folder.write("chat_template.jinja", b"\xFF");
    assert_eq!(folder.fault(512).0, "chat_template.jinja");
    fs::remove_file(folder.0.join("chat_template.jinja")).unwrap();
    fs::remove_file(folder.0.join(file)).unwrap();
    assert_eq!(folder.fault(512).0, file);
}

#[test]
fn a_tokenizer_fits_its_model() {
    let folder = Folder::new("vocab");
    assert!(folder.fault(511).1.contains("512 ids"));
    assert_eq!(Tokenizer::from_dir(&folder.0, 640).unwrap().vocab(), 512);
    let beyond = json!({"type": "TemplateProcessing", "pair": [],
        "single": [{"SpecialToken": {"id": "x", "type_id": 0}},
                   {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"x": {"id": "x", "ids": [100_000], "tokens": ["x"]}}});
    folder.edit("tokenizer.json", &json!({"post_processor": beyond}));
    assert!(folder.fault(512).1.contains("100001 ids"));
    let huge = json!({"type": "BPE", "vocab": {"a": 4_294_967_295u32}, "merges": []});
    folder.edit("tokenizer.json", &json!({"model": huge, "added_tokens": []}));
    assert_eq!(folder.fault(512).0, "tokenizer.json");
}

#[test]
fn ids_are_checked() {
    let t = Tokenizer::from_dir(&fixture("llama"), 600).unwrap();
    assert_eq!(t.decode(&[550, 64, 599], true).unwrap(), "a");
    assert_eq!(t.decode(&[], true).unwrap(), "");
    for id in [600, u32::MAX] {
        assert!(matches!(t.decode(&[64, id], true), Err(Error::InvalidRequest(_))));
    }
    // A decoder that counts its tokens minus one.
    let folder = Folder::new("no-tokens");
    folder.edit("tokenizer.json", &json!({"decoder": {"type": "BPEDecoder", "suffix": "</w>"}}));
    assert_eq!(folder.load().decode(&[505, 506], true).unwrap(), "");
}

/// Of each text, and of prose.
fn ten_megabytes(model: &str, texts: &[(&str, usize)]) {
    let prose =
        "The little engine waited, 12345 times; über 你好 😀 \n\n  def f(x):\n\treturn x\r\n";
    let t = Tokenizer::from_dir(&fixture(model), 512).unwrap();
    let start = Instant::now();
    for (text, bytes) in texts {
        match t.encode(&text.repeat(bytes / text.len()), false) {
            Ok(ids) => assert!(!ids.is_empty() && ids.iter().all(|&id| id < 512)),
            Err(e) => assert!(matches!(e, Error::InvalidRequest(_)), "{e}"),
        }
    }
    let count = TEN_MEGABYTES / prose.len();
    let whole = t.encode(&prose.repeat(count), false).unwrap();
    let piece = t.encode(prose, false).unwrap();
    assert_eq!(whole.len(), count * piece.len());
    assert!(whole.chunks(piece.len()).all(|ids| ids == piece));
    assert!(start.elapsed() < Duration::from_secs(120), "{model}: {:?}", start.elapsed());
}

const TEN_MEGABYTES: usize = 10_000_000;

#[test]
fn ten_megabytes_end_in_ids_or_in_an_error() {
    ten_megabytes("llama", &[(" ", TEN_MEGABYTES), ("a", TEN_MEGABYTES)]);
}

#[test]
fn ten_megabytes_cut_into_words_end_in_ids_or_in_an_error() {
    let odd = ["\n", "1", "!", "a b", "é", "\u{0301}", "\0", "<|bos|>", "<|"];
    ten_megabytes("qwen2", &odd.map(|text| (text, TEN_MEGABYTES / 10)));
}
