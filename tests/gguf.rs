//! GGUF files against the same model as a folder of float32: every type of block, the rows of q and
//! k as llama.cpp orders them, the tokenizer, and files that are broken.
//!
//! Blocks are random bytes, and the twin's numbers are made of them by loops after ggml's
//! `dequantize_row_*`, which share nothing with kie's decoders.

#![allow(clippy::unwrap_used)]

mod support;

use std::path::{Path, PathBuf};

use half::{bf16, f16};
use kie_core::engine::{Engine, LogitsPath};
use kie_core::request::EngineConfig;
use kie_core::Result;
use kie_kernels::simd::{self, Level};
use proptest::prelude::*;
use serde_json::{json, Value};
use support::{relative, repository, Folder};

const HIDDEN: usize = 256;
const VOCAB: usize = 512;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = HIDDEN / HEADS;

struct Random(u64);

impl Random {
    fn byte(&mut self) -> u8 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        (self.0 >> 40) as u8
    }

    fn unit(&mut self) -> f32 {
        f32::from(i16::from_le_bytes([self.byte(), self.byte()])) / 32768.0
    }

    /// A small positive scale as a half.
    fn half(&mut self, size: f32) -> f16 {
        f16::from_f32(size * (1.0 + self.unit() / 2.0))
    }
}

/// ggml's number of a type, numbers and bytes of a block.
const TYPES: [(u32, usize, usize); 7] =
    [(0, 1, 4), (1, 1, 2), (30, 1, 2), (8, 32, 34), (2, 32, 18), (12, 256, 144), (14, 256, 210)];

/// A random block of a type, and its numbers.
fn block(kind: u32, random: &mut Random) -> (Vec<u8>, Vec<f32>) {
    let mut bytes = |n: usize| -> Vec<u8> { (0..n).map(|_| random.byte()).collect() };
    match kind {
        0 => {
            let v = random.unit() / 16.0;
            (v.to_le_bytes().to_vec(), vec![v])
        }
        1 => {
            let v = f16::from_f32(random.unit() / 16.0);
            (v.to_le_bytes().to_vec(), vec![v.to_f32()])
        }
        30 => {
            let v = bf16::from_f32(random.unit() / 16.0);
            (v.to_le_bytes().to_vec(), vec![v.to_f32()])
        }
        8 => {
            let qs = bytes(32);
            let d = random.half(1.0 / 2048.0);
            let values = qs.iter().map(|q| f32::from(*q as i8) * d.to_f32()).collect();
            ([&d.to_le_bytes()[..], &qs].concat(), values)
        }
        2 => {
            let qs = bytes(16);
            let d = random.half(1.0 / 128.0);
            let low = qs.iter().map(|q| i32::from(q & 15) - 8);
            let high = qs.iter().map(|q| i32::from(q >> 4) - 8);
            let values = low.chain(high).map(|q| q as f32 * d.to_f32()).collect();
            ([&d.to_le_bytes()[..], &qs].concat(), values)
        }
        12 => {
            let (scales, qs) = (bytes(12), bytes(128));
            let (d, dmin) = (random.half(1.0 / 4096.0), random.half(1.0 / 512.0));
            let pair = |j: usize| -> (f32, f32) {
                let (a, b) = if j < 4 {
                    (scales[j] & 63, scales[j + 4] & 63)
                } else {
                    let a = (scales[j + 4] & 0xf) | ((scales[j - 4] >> 6) << 4);
                    (a, (scales[j + 4] >> 4) | ((scales[j] >> 6) << 4))
                };
                (d.to_f32() * f32::from(a), dmin.to_f32() * f32::from(b))
            };
            let mut values = Vec::new();
            for (j, q) in qs.chunks(32).enumerate() {
                let ((d1, m1), (d2, m2)) = (pair(2 * j), pair(2 * j + 1));
                values.extend(q.iter().map(|q| d1 * f32::from(q & 0xf) - m1));
                values.extend(q.iter().map(|q| d2 * f32::from(q >> 4) - m2));
            }
            let head = [d.to_le_bytes(), dmin.to_le_bytes()].concat();
            ([head, scales, qs].concat(), values)
        }
        _ => six_bits(random),
    }
}

/// A block of Q6_K.
fn six_bits(random: &mut Random) -> (Vec<u8>, Vec<f32>) {
    let mut bytes = |n: usize| -> Vec<u8> { (0..n).map(|_| random.byte()).collect() };
    let (ql, qh, scales) = (bytes(128), bytes(64), bytes(16));
    let d = random.half(1.0 / 65536.0);
    let mut values = vec![0.0; 256];
    for n in 0..2 {
        let (ql, qh, y) = (&ql[64 * n..], &qh[32 * n..], &mut values[128 * n..]);
        for l in 0..32 {
            let sc = |k: usize| d.to_f32() * f32::from(scales[8 * n + l / 16 + 2 * k] as i8);
            let q = |low: u8, high: u8| f32::from(low | (high & 3) << 4) - 32.0;
            y[l] = sc(0) * q(ql[l] & 0xf, qh[l]);
            y[l + 32] = sc(1) * q(ql[l + 32] & 0xf, qh[l] >> 2);
            y[l + 64] = sc(2) * q(ql[l] >> 4, qh[l] >> 4);
            y[l + 96] = sc(3) * q(ql[l + 32] >> 4, qh[l] >> 6);
        }
    }
    ([ql, qh, scales, d.to_le_bytes().to_vec()].concat(), values)
}

/// A tensor of the file and of the twin.
struct Pair {
    gguf: String,
    name: String,
    shape: Vec<usize>,
    kind: u32,
    bytes: Vec<u8>,
    values: Vec<f32>,
}

fn tensor(names: [&str; 2], shape: &[usize], kind: u32, random: &mut Random) -> Pair {
    let (_, numbers, _) = TYPES.iter().find(|(k, ..)| *k == kind).unwrap();
    let (mut bytes, mut values) = (Vec::new(), Vec::new());
    for _ in 0..shape.iter().product::<usize>() / numbers {
        let (b, v) = block(kind, random);
        bytes.extend(b);
        values.extend(v);
    }
    let [gguf, name] = names.map(str::to_owned);
    Pair { gguf, name, shape: shape.to_vec(), kind, bytes, values }
}

/// A norm's scales near 1, of few digits: a GPU has 16 bits for them.
fn norm(names: [&str; 2], random: &mut Random) -> Pair {
    let mut one = || (1.0 + random.unit() / 4.0).to_bits() & 0xffff_0000;
    let values: Vec<f32> = (0..HIDDEN).map(|_| f32::from_bits(one())).collect();
    let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let [gguf, name] = names.map(str::to_owned);
    Pair { gguf, name, shape: vec![HIDDEN], kind: 0, bytes, values }
}

/// The rows of heads as Hugging Face has them: halves one behind the other, not pairs.
fn unpermuted(values: &[f32], heads: usize) -> Vec<f32> {
    let row = |head: usize, at: usize| head * DIM + at % (DIM / 2) * 2 + at / (DIM / 2);
    let rows = (0..heads).flat_map(|head| (0..DIM).map(move |at| row(head, at)));
    rows.flat_map(|row| values[row * HIDDEN..(row + 1) * HIDDEN].to_vec()).collect()
}

fn model(kind: u32) -> Vec<Pair> {
    let mut random = Random(u64::from(kind) + 3);
    let r = &mut random;
    let kv = DIM * KV_HEADS;
    let embed = if kind == 30 { 30 } else { 1 };
    let name = |part: &str| format!("model.layers.0.{part}.weight");
    let mut all = vec![
        tensor(["token_embd.weight", "model.embed_tokens.weight"], &[VOCAB, HIDDEN], embed, r),
        norm(["output_norm.weight", "model.norm.weight"], r),
        norm(["blk.0.attn_norm.weight", &name("input_layernorm")], r),
        norm(["blk.0.ffn_norm.weight", &name("post_attention_layernorm")], r),
    ];
    for (gguf, part, rows, cols) in [
        ("attn_q", "self_attn.q_proj", HIDDEN, HIDDEN),
        ("attn_k", "self_attn.k_proj", kv, HIDDEN),
        ("attn_v", "self_attn.v_proj", kv, HIDDEN),
        ("attn_output", "self_attn.o_proj", HIDDEN, HIDDEN),
        ("ffn_gate", "mlp.gate_proj", HIDDEN, HIDDEN),
        ("ffn_up", "mlp.up_proj", HIDDEN, HIDDEN),
        ("ffn_down", "mlp.down_proj", HIDDEN, HIDDEN),
    ] {
        let gguf = format!("blk.0.{gguf}.weight");
        // Files of mixed types are the rule: v is of another than q and k.
        let kind = if part.ends_with("v_proj") && kind == 12 { 14 } else { kind };
        let mut pair = tensor([&gguf, &name(part)], &[rows, cols], kind, r);
        match part {
            "self_attn.q_proj" => pair.values = unpermuted(&pair.values, HEADS),
            "self_attn.k_proj" => pair.values = unpermuted(&pair.values, KV_HEADS),
            _ => {}
        }
        all.push(pair);
    }
    all
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// One key; lists of strings and of whole numbers only.
fn key(out: &mut Vec<u8>, name: &str, value: &Value) {
    text(out, name);
    let scalar = |out: &mut Vec<u8>, value: &Value| match value {
        Value::String(s) => text(out, s),
        Value::Number(n) if n.is_u64() => out.extend((n.as_u64().unwrap() as u32).to_le_bytes()),
        Value::Number(n) => out.extend((n.as_f64().unwrap() as f32).to_le_bytes()),
        Value::Bool(b) => out.push(u8::from(*b)),
        other => panic!("{other}"),
    };
    let kind = |value: &Value| match value {
        Value::String(_) => 8_u32,
        Value::Number(n) if n.is_u64() => 4,
        Value::Number(_) => 6,
        Value::Bool(_) => 7,
        other => panic!("{other}"),
    };
    match value {
        Value::Array(list) => {
            out.extend(9_u32.to_le_bytes());
            out.extend(kind(&list[0]).to_le_bytes());
            out.extend((list.len() as u64).to_le_bytes());
            list.iter().for_each(|value| scalar(out, value));
        }
        value => {
            out.extend(kind(value).to_le_bytes());
            scalar(out, value);
        }
    }
}

fn metadata() -> Vec<(&'static str, Value)> {
    let file = repository().join("tests/data/llama/tokenizer.json");
    let tokenizer: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let mut tokens = vec![json!("unused"); VOCAB];
    for (token, id) in tokenizer["model"]["vocab"].as_object().unwrap() {
        tokens[id.as_u64().unwrap() as usize] = json!(token);
    }
    let mut kinds = vec![json!(1); VOCAB];
    for token in tokenizer["added_tokens"].as_array().unwrap() {
        let id = token["id"].as_u64().unwrap() as usize;
        (tokens[id], kinds[id]) = (token["content"].clone(), json!(3));
    }
    let merges = tokenizer["model"]["merges"].as_array().unwrap().iter();
    let merge = |m: &Value| json!(format!("{} {}", m[0].as_str().unwrap(), m[1].as_str().unwrap()));
    vec![
        ("general.architecture", json!("llama")),
        ("llama.embedding_length", json!(HIDDEN)),
        ("llama.block_count", json!(1)),
        ("llama.feed_forward_length", json!(HIDDEN)),
        ("llama.attention.head_count", json!(HEADS)),
        ("llama.attention.head_count_kv", json!(KV_HEADS)),
        ("llama.attention.layer_norm_rms_epsilon", json!(1e-5)),
        ("llama.rope.freq_base", json!(10000.0)),
        ("llama.context_length", json!(256)),
        ("tokenizer.ggml.model", json!("gpt2")),
        ("tokenizer.ggml.pre", json!("llama-bpe")),
        ("tokenizer.ggml.tokens", Value::Array(tokens)),
        ("tokenizer.ggml.token_type", Value::Array(kinds)),
        ("tokenizer.ggml.merges", Value::Array(merges.map(merge).collect())),
        ("tokenizer.ggml.bos_token_id", json!(505)),
        ("tokenizer.ggml.eos_token_id", json!(506)),
    ]
}

fn gguf(pairs: &[Pair], metadata: &[(&str, Value)]) -> Vec<u8> {
    let mut out = b"GGUF".to_vec();
    out.extend(3_u32.to_le_bytes());
    out.extend((pairs.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    metadata.iter().for_each(|(name, value)| key(&mut out, name, value));
    let mut data: Vec<u8> = Vec::new();
    for pair in pairs {
        text(&mut out, &pair.gguf);
        out.extend((pair.shape.len() as u32).to_le_bytes());
        pair.shape.iter().rev().for_each(|d| out.extend((*d as u64).to_le_bytes()));
        out.extend(pair.kind.to_le_bytes());
        out.extend((data.len() as u64).to_le_bytes());
        data.extend(&pair.bytes);
        data.resize(data.len().next_multiple_of(32), 0);
    }
    out.resize(out.len().next_multiple_of(32), 0);
    out.extend(data);
    out
}

impl Folder {
    fn file(&self, bytes: &[u8]) -> PathBuf {
        let path = self.0.join("model.gguf");
        std::fs::write(&path, bytes).unwrap();
        path
    }

    /// The twin: norms in float32, matrices in `dtype`.
    fn twin(&self, pairs: &[Pair], dtype: &str) {
        let (mut header, mut body) = (serde_json::Map::new(), Vec::<u8>::new());
        for pair in pairs {
            let begin = body.len();
            let dtype = if pair.shape.len() == 1 { "F32" } else { dtype };
            match dtype {
                "F32" => body.extend(pair.values.iter().flat_map(|v| v.to_le_bytes())),
                _ => body.extend(pair.values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes())),
            }
            let entry = json!({"dtype": dtype, "shape": pair.shape,
                "data_offsets": [begin, body.len()]});
            header.insert(pair.name.clone(), entry);
        }
        let header = Value::Object(header).to_string();
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.extend(body);
        std::fs::write(self.0.join("model.safetensors"), file).unwrap();
        let config = json!({"model_type": "llama", "hidden_size": HIDDEN,
            "intermediate_size": HIDDEN, "num_hidden_layers": 1, "vocab_size": VOCAB,
            "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
            "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "tie_word_embeddings": true, "bos_token_id": 505, "eos_token_id": 506});
        std::fs::write(self.0.join("config.json"), config.to_string()).unwrap();
        let llama = repository().join("tests/data/llama");
        for name in ["tokenizer.json", "tokenizer_config.json"] {
            std::fs::copy(llama.join(name), self.0.join(name)).unwrap();
        }
    }
}

fn open(path: &Path, device: &str, level: Option<Level>) -> Result<Engine> {
    let config = EngineConfig { max_batch: 2, ..EngineConfig::default() };
    let builder = Engine::builder(path).config(config).device(device);
    match level {
        Some(level) => builder.level(level).build(),
        None => builder.build(),
    }
}

fn logits(engine: &Engine, path: LogitsPath) -> Vec<f32> {
    let ids: Vec<u32> = (0..24).map(|n| n * 97 % 500).collect();
    engine.logits(&ids, path).unwrap().values
}

#[test]
fn every_type_of_block_has_the_values_of_its_twin() {
    for (kind, ..) in TYPES {
        let (pairs, folder, twin) = (model(kind), Folder::new("file"), Folder::new("twin"));
        let path = folder.file(&gguf(&pairs, &metadata()));
        twin.twin(&pairs, "F32");
        let plain = open(&twin.0, "cpu", Some(Level::Scalar)).unwrap();
        let wanted = logits(&plain, LogitsPath::Decode);
        for level in simd::available() {
            let engine = open(&path, "cpu", Some(level)).unwrap();
            // Keys of 16-bit weights may be halves: those of so small a model are float32.
            for (run, gate) in [(LogitsPath::Decode, 1e-5), (LogitsPath::Prefill, 1.5e-2)] {
                let gate = if level <= Level::Avx512 { 1e-5 } else { gate };
                let error = relative(&logits(&engine, run), &wanted);
                assert!(error <= gate, "type {kind} {level:?} {run:?}: {error:.1e}");
            }
        }
        let engine = open(&path, "cpu", None).unwrap();
        for sample in ["Hello, wide world 12345", "  def f(x):\n    return x", "<|bos|>ab", "é漢"]
        {
            let ids = engine.tokenize(sample, true).unwrap();
            assert_eq!(ids, plain.tokenize(sample, true).unwrap(), "{sample:?}");
            let back = plain.detokenize(&ids, true).unwrap();
            assert_eq!(engine.detokenize(&ids, true).unwrap(), back);
        }
    }
}

/// Blocks that a GPU's stream does not carry become halves: the bits of a twin of halves.
#[test]
fn the_simulator_has_halves_of_blocks() {
    let (pairs, folder, twin) = (model(14), Folder::new("sim"), Folder::new("sim-twin"));
    let path = folder.file(&gguf(&pairs, &metadata()));
    twin.twin(&pairs, "F16");
    let engines = [&path, &twin.0].map(|path| open(path, "sim", None).unwrap());
    let [bytes, wanted] = engines.each_ref().map(|engine| engine.info().bytes_per_token);
    assert_eq!(bytes, wanted, "halves are read");
    let [ours, wanted] = engines.map(|engine| logits(&engine, LogitsPath::Decode));
    assert!(ours == wanted, "{:.1e}", relative(&ours, &wanted));
}

/// Blocks of 32 with a scale go through the stream as they are. Beside the CPU, rows of the
/// embedding are rounded to halves.
#[test]
fn the_simulator_decodes_blocks_with_a_scale() {
    for (n, kind) in [8, 2].into_iter().enumerate() {
        let (pairs, folder) = (model(kind), Folder::new("carried"));
        let path = folder.file(&gguf(&pairs, &metadata()));
        let device = format!("sim:seed={n},blocks=8,warp={}", [32, 64][n % 2]);
        let config = EngineConfig { max_batch: 2, exact: true, ..EngineConfig::default() };
        let engine = Engine::builder(&path).config(config).device(device).build().unwrap();
        let plan = engine.info().plan;
        assert!(!plan.contains("as halves") && !plan.contains("rounded"), "{kind}: {plan}");
        let ours = logits(&engine, LogitsPath::Decode);
        let wanted = logits(&open(&path, "cpu", Some(Level::Scalar)).unwrap(), LogitsPath::Decode);
        let error = relative(&ours, &wanted);
        eprintln!("type {kind}: {error:.1e}");
        assert!(error <= 1e-3, "type {kind}: {error:.1e}");
    }
}

#[test]
fn what_is_broken_is_refused_by_its_field() {
    let (pairs, folder) = (model(8), Folder::new("broken"));
    let refusal = |bytes: &[u8]| {
        let error = open(&folder.file(bytes), "cpu", None).err().unwrap().to_string();
        assert!(error.contains("model.gguf"), "{error}");
        error
    };
    let whole = gguf(&pairs, &metadata());
    let changed = |at: usize, bytes: &[u8]| {
        let mut file = whole.clone();
        file[at..at + bytes.len()].copy_from_slice(bytes);
        file
    };
    assert!(refusal(&changed(0, b"GGML")).contains("magic"));
    assert!(refusal(&changed(4, &[9])).contains("version"));
    assert!(refusal(&changed(8, &[255; 8])).contains("tensor count"));
    assert!(refusal(&changed(16, &[255; 8])).contains("metadata count"));
    assert!(refusal(&changed(24, &[255; 8])).contains("key 0"));
    assert!(refusal(&whole[..whole.len() / 2]).contains("bytes at a multiple of 32"));
    assert!(refusal(&whole[..30]).contains("key 0"));
    let find = |name: &str| {
        let at = whole.windows(name.len()).position(|w| w == name.as_bytes()).unwrap();
        at + name.len()
    };
    let q = "blk.0.attn_q.weight";
    let at = find(q);
    assert!(refusal(&changed(at, &[200])).contains(q), "dimensions");
    assert!(refusal(&changed(at + 4, &[255; 8])).contains(q), "a size");
    assert!(refusal(&changed(at + 20, &[11])).contains("ggml type 11"), "a type");
    assert!(refusal(&changed(at + 24, &[255; 8])).contains(q), "an offset");
    let tokens = find("tokenizer.ggml.tokens");
    assert!(refusal(&changed(tokens + 8, &[255; 8])).contains("tokenizer.ggml.tokens"));
    let with = |name: &'static str, value: Value| {
        let mut all = metadata();
        match all.iter_mut().find(|(key, _)| *key == name) {
            Some(entry) => entry.1 = value,
            None => all.push((name, value)),
        }
        refusal(&gguf(&pairs, &all))
    };
    assert!(with("general.architecture", json!("mamba")).contains("mamba"));
    assert!(with("tokenizer.ggml.pre", json!("falcon")).contains("falcon"));
    assert!(with("tokenizer.ggml.model", json!("bert")).contains("bert"));
    assert!(with("llama.rope.scaling.type", json!("yarn")).contains("yarn"));
    assert!(with("llama.expert_count", json!(8)).contains("expert_count"));
    assert!(with("general.alignment", json!(3)).contains("general.alignment"));
    assert!(with("llama.block_count", json!(2)).contains("blk.1.attn_norm.weight"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Nothing in a file makes the loader panic, hang or take memory that the file does not have.
    #[test]
    fn changed_bytes_are_an_error_or_a_model(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let pairs = model(2);
        let mut bytes = gguf(&pairs, &metadata());
        // Most of what can be wrong stands before the data.
        let head = bytes.len() - pairs.iter().map(|p| p.bytes.len()).sum::<usize>();
        for (at, byte) in changes {
            bytes[at.index(head)] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let folder = Folder::new("fuzz");
        let path = folder.file(&bytes);
        if let Ok(spec) = kie_core::model::Spec::read(&path) {
            drop(kie_core::tokenizer::Tokenizer::from_dir(&path, spec.vocab));
            drop(kie_core::weights::Checkpoint::open(&path, &spec));
        }
    }
}
