//! What a GGUF file's metadata say in the terms of `config.json`, `tokenizer.json` and
//! `tokenizer_config.json`, so that one reader serves both containers (llama.cpp's
//! `convert_hf_to_gguf.py`, the other way round).

use std::path::Path;

use serde_json::{json, Map, Value};

use super::Gguf;
use crate::error::{Error, Result};
use crate::model::rope::RopeStyle;
use crate::model::spec::{Role, Spec, TensorSpec};

/// The rotary frequencies' divisors, where the file has them.
const ROPE_FACTORS: &str = "rope_freqs.weight";

fn wrong(path: &Path, key: &str, wanted: &str, got: Option<&Value>) -> Error {
    let got = got.map_or("nothing".to_owned(), |v| v.to_string().chars().take(80).collect());
    Error::tensor(path, key, wanted, got)
}

fn text<'a>(file: &'a Gguf, path: &Path, key: &str) -> Result<&'a str> {
    let value = file.metadata.get(key);
    value.and_then(Value::as_str).ok_or_else(|| wrong(path, key, "a string", value))
}

/// The model as `config.json` would have it.
///
/// # Errors
/// [`Error::Load`] for keys that are missing, [`Error::UnsupportedModel`] for what kie has not.
pub(crate) fn config(file: &Gguf, path: &Path) -> Result<Value> {
    let unsupported = |key: &str, detail: String| {
        let what = format!("{}: {key}", path.display());
        Err(Error::UnsupportedModel { what, detail })
    };
    let arch = text(file, path, "general.architecture")?;
    if !["llama", "qwen2", "qwen3"].contains(&arch) {
        return unsupported("general.architecture", format!("{arch:?}; llama, qwen2, qwen3"));
    }
    if let Some(count) = file.metadata.get("split.count").filter(|n| n.as_u64() != Some(1)) {
        return unsupported("split.count", format!("{count}; one file"));
    }
    let mut config = Map::new();
    config.insert("model_type".to_owned(), arch.into());
    let mut take = |to: &str, from: &str, needed: bool| -> Result<()> {
        let key = format!("{arch}.{from}");
        match file.metadata.get(&key) {
            Some(value) => drop(config.insert(to.to_owned(), value.clone())),
            None if needed => return Err(wrong(path, &key, "a value", None)),
            None => {}
        }
        Ok(())
    };
    take("hidden_size", "embedding_length", true)?;
    take("num_hidden_layers", "block_count", true)?;
    take("intermediate_size", "feed_forward_length", true)?;
    take("num_attention_heads", "attention.head_count", true)?;
    take("num_key_value_heads", "attention.head_count_kv", false)?;
    take("head_dim", "attention.key_length", false)?;
    take("rms_norm_eps", "attention.layer_norm_rms_epsilon", true)?;
    take("rope_theta", "rope.freq_base", false)?;
    take("max_position_embeddings", "context_length", true)?;
    let scaling = file.metadata.get(&format!("{arch}.rope.scaling.type"));
    if let Some(other) = scaling.filter(|kind| kind.as_str() != Some("none")) {
        return unsupported("rope.scaling.type", format!("{other}; none"));
    }
    for key in ["expert_count", "attention.sliding_window", "rope.scaling.factor"] {
        let value = file.metadata.get(&format!("{arch}.{key}"));
        if let Some(other) = value.filter(|v| v.as_f64() != Some(0.0)) {
            return unsupported(key, format!("{other}; none"));
        }
    }
    let shape = |name: &str| file.tensors.iter().find(|t| t.name == name).map(|t| &t.shape[..]);
    let Some(&[vocab, _]) = shape("token_embd.weight") else {
        return Err(wrong(path, "token_embd.weight", "a matrix", None));
    };
    config.insert("vocab_size".to_owned(), vocab.into());
    config.insert("tie_word_embeddings".to_owned(), shape("output.weight").is_none().into());
    if arch == "qwen2" {
        config.insert("use_sliding_window".to_owned(), false.into());
    }
    for name in ["bos", "eos"] {
        let id = file.metadata.get(&format!("tokenizer.ggml.{name}_token_id"));
        config.insert(format!("{name}_token_id"), id.cloned().unwrap_or(Value::Null));
    }
    Ok(Value::Object(config))
}

/// A tensor's name in the file, by Hugging Face's.
pub(crate) fn file_name(name: &str) -> String {
    let fixed = [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.norm.weight", "output_norm.weight"),
        ("lm_head.weight", "output.weight"),
    ];
    if let Some((_, to)) = fixed.iter().find(|(from, _)| *from == name) {
        return (*to).to_owned();
    }
    let parts = [
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ];
    let Some((layer, rest)) =
        name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'))
    else {
        return name.to_owned();
    };
    let (stem, end) = rest.rsplit_once('.').unwrap_or((rest, ""));
    let to = parts.iter().find(|(from, _)| *from == stem).map_or(stem, |(_, to)| to);
    format!("blk.{layer}.{to}.{end}")
}

/// Names the spec's tensors as the file does, with what its rotary embedding is: rows of q and k of
/// `llama` are stored so that pairs are neighbours.
pub(crate) fn rope(spec: &mut Spec, file: &Gguf) {
    for tensor in &mut spec.tensors {
        tensor.name = file_name(&tensor.name);
    }
    if spec.architecture == "llama" {
        for layer in &mut spec.layers {
            if let Some(attention) = layer.mixer.attention_mut() {
                attention.rope.style = RopeStyle::Interleaved;
            }
        }
    }
    let heads = spec.layers[0].mixer.rope();
    let named = file.tensors.iter().any(|t| t.name == ROPE_FACTORS);
    if let Some((_, head_dim)) = heads.filter(|_| named) {
        let half = head_dim / 2;
        let (role, name) = (Role::RopeFactors, ROPE_FACTORS.to_owned());
        spec.tensors.push(TensorSpec::of(role, name, &[half]));
    }
}

/// A tokenizer as two JSON documents.
pub(crate) struct Tokens {
    /// `tokenizer.json`.
    pub tokenizer: Value,
    /// `tokenizer_config.json`.
    pub config: Value,
}

/// How a byte-pair tokenizer splits text first, by its name in the file (llama.cpp's
/// `llama-vocab.cpp`), as a regular expression.
fn splits(pre: &str) -> Option<String> {
    let digits = match pre {
        "llama-bpe" | "llama3" => r"\p{N}{1,3}",
        "qwen2" => r"\p{N}",
        _ => return None,
    };
    let words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+";
    let rest = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    Some(format!("{words}|{digits}|{rest}"))
}

/// The tokenizer of a file.
///
/// # Errors
/// [`Error::Load`] for keys that are missing or of another kind, [`Error::UnsupportedModel`] for
/// another kind of tokenizer.
pub(crate) fn tokenizer(file: &Gguf, path: &Path) -> Result<Tokens> {
    let list = |key: &'static str| {
        let value = file.metadata.get(key);
        value.and_then(Value::as_array).ok_or_else(|| wrong(path, key, "a list", value))
    };
    let unsupported = |key: &str, detail: String| {
        let what = format!("{}: {key}", path.display());
        Error::UnsupportedModel { what, detail }
    };
    let tokens = list("tokenizer.ggml.tokens")?;
    let named = |n: usize| tokens.get(n).and_then(Value::as_str);
    let mut vocab = Map::new();
    for (id, token) in tokens.iter().enumerate() {
        let known = token.as_str().ok_or_else(|| {
            wrong(path, "tokenizer.ggml.tokens", "a list of strings", Some(token))
        })?;
        vocab.insert(known.to_owned(), id.into());
    }
    let kinds = list("tokenizer.ggml.token_type").map_or(&[][..], |kinds| kinds);
    let id = |name: &str| {
        let key = format!("tokenizer.ggml.{name}_token_id");
        file.metadata.get(&key).and_then(Value::as_u64).and_then(|id| named(id as usize))
    };
    let flag =
        |key: &str, silent: bool| file.metadata.get(key).and_then(Value::as_bool).unwrap_or(silent);
    let model = text(file, path, "tokenizer.ggml.model")?;
    let (mut document, bos) = match model {
        "gpt2" => {
            let pre = text(file, path, "tokenizer.ggml.pre")?;
            let Some(pattern) = splits(pre) else {
                let detail = format!("{pre:?}; llama-bpe and qwen2");
                return Err(unsupported("tokenizer.ggml.pre", detail));
            };
            (byte_pairs(vocab, list("tokenizer.ggml.merges")?, &pattern, pre), pre != "qwen2")
        }
        "llama" => {
            let scores = list("tokenizer.ggml.scores")?;
            let merges = merges_by_score(tokens, scores);
            let space = flag("tokenizer.ggml.add_space_prefix", true);
            (sentence_pieces(vocab, merges, id("unknown"), space), true)
        }
        other => {
            return Err(unsupported("tokenizer.ggml.model", format!("{other:?}; gpt2 and llama")));
        }
    };
    document["version"] = "1.0".into();
    document["added_tokens"] = added(tokens, kinds);
    let mut config = json!({"add_bos_token": flag("tokenizer.ggml.add_bos_token", bos)});
    for (name, key) in [("bos", "bos_token"), ("eos", "eos_token"), ("padding", "pad_token")] {
        config[key] = id(name).into();
    }
    if id("bos").is_none() {
        config["add_bos_token"] = Value::Null;
    }
    config["chat_template"] =
        file.metadata.get("tokenizer.chat_template").cloned().unwrap_or(Value::Null);
    Ok(Tokens { tokenizer: document, config })
}

/// Tokens that texts are not cut into, by their kinds in the file.
fn added(tokens: &[Value], kinds: &[Value]) -> Value {
    const CONTROL: i64 = 3;
    const USER: i64 = 4;
    let found = tokens.iter().zip(kinds).enumerate();
    found
        .filter_map(|(id, (token, kind))| Some((id, token.as_str()?, kind.as_i64()?)))
        .filter(|(_, _, kind)| [CONTROL, USER].contains(kind))
        .map(|(id, token, kind)| {
            json!({"id": id, "content": token, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": kind == CONTROL})
        })
        .collect()
}

/// A byte-level tokenizer (GPT-2's).
fn byte_pairs(vocab: Map<String, Value>, merges: &[Value], pattern: &str, pre: &str) -> Value {
    let normalizer = if pre == "qwen2" { json!({"type": "NFC"}) } else { Value::Null };
    let bytes = |prefix: bool, regex: bool| {
        json!({"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true,
            "use_regex": regex})
    };
    json!({
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated",
                "invert": false},
            bytes(false, false),
        ]},
        "post_processor": bytes(true, true),
        "decoder": bytes(true, true),
        "model": {"type": "BPE", "vocab": vocab, "merges": merges,
            "ignore_merges": pre != "qwen2"},
    })
}

/// Merges of a SentencePiece model: every piece of two others, the likeliest first, as
/// transformers' `SentencePieceExtractor` makes them.
fn merges_by_score(tokens: &[Value], scores: &[Value]) -> Vec<Value> {
    let pieces: Vec<&str> = tokens.iter().filter_map(Value::as_str).collect();
    let ids: std::collections::HashMap<&str, usize> =
        pieces.iter().enumerate().map(|(id, piece)| (*piece, id)).collect();
    let mut found = Vec::new();
    for (id, piece) in pieces.iter().enumerate() {
        let score = scores.get(id).and_then(Value::as_f64).unwrap_or(0.0);
        let mut local: Vec<_> = piece
            .char_indices()
            .skip(1)
            .map(|(at, _)| piece.split_at(at))
            .filter_map(|(left, right)| Some((*ids.get(left)?, *ids.get(right)?, left, right)))
            .collect();
        local.sort_by_key(|(left, right, ..)| (*left, *right));
        found.extend(local.into_iter().map(|(_, _, left, right)| (score, left, right)));
    }
    found.sort_by(|a, b| b.0.total_cmp(&a.0));
    found.into_iter().map(|(_, left, right)| json!([left, right])).collect()
}

/// A tokenizer of SentencePiece's BPE kind (Llama 2's).
fn sentence_pieces(
    vocab: Map<String, Value>,
    merges: Vec<Value>,
    unknown: Option<&str>,
    space: bool,
) -> Value {
    let replace = |from: &str, to: &str| {
        let pattern = json!({"String": from});
        json!({"type": "Replace", "pattern": pattern, "content": to})
    };
    let mut normalizers = vec![replace(" ", "\u{2581}")];
    if space {
        normalizers.insert(0, json!({"type": "Prepend", "prepend": "\u{2581}"}));
    }
    let mut decoders =
        vec![replace("\u{2581}", " "), json!({"type": "ByteFallback"}), json!({"type": "Fuse"})];
    if space {
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    json!({
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": null,
        "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "unk_token": unknown,
            "fuse_unk": true, "byte_fallback": true},
    })
}
