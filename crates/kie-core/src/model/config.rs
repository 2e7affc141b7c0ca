//! Reading `config.json` strictly: a key is used, named as harmless, or an error.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// A config object that remembers which keys were asked for.
pub(super) struct Config<'a> {
    map: &'a Map<String, Value>,
    file: PathBuf,
    /// Where this object stands in the file, empty or `rope_scaling.`.
    prefix: String,
    asked: RefCell<BTreeSet<String>>,
    /// A model's config, not a part of one.
    whole: bool,
}

/// Largest count that a config may name; keeps products of sizes inside 64 bits.
const MOST: u64 = 1 << 24;

/// Most layers: a spec holds an entry for each, before any file is looked at.
const MOST_LAYERS: usize = 4096;

/// Keys of any family that change nothing at inference, or repeat what other keys say.
const HARMLESS: &[&str] = &[
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "attn_implementation",
    "auto_map",
    "chunk_size_feed_forward",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "finetuning_task",
    "id2label",
    "initializer_range",
    "is_decoder",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "model_type",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "output_scores",
    "pad_token_id",
    "prefix",
    "problem_type",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "sep_token_id",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
];

/// Keys that may be there as long as they switch nothing on: null, false, 0 or empty.
const OFF: &[&str] = &[
    "add_cross_attention",
    "attention_bias",
    "bad_words_ids",
    "begin_suppress_tokens",
    "cross_attention_hidden_size",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "is_encoder_decoder",
    "layer_types",
    "mlp_bias",
    "no_repeat_ngram_size",
    "pruned_heads",
    "rope_interleaved",
    "rope_parameters",
    "rope_scaling",
    "sliding_window",
    "suppress_tokens",
    "tie_encoder_decoder",
    "use_mrope",
    "use_sliding_window",
];

impl<'a> Config<'a> {
    pub(super) fn new(value: &'a Value, file: &Path) -> Result<Self> {
        Ok(Self { whole: true, ..Self::nested(value, file, "")? })
    }

    fn nested(value: &'a Value, file: &Path, prefix: &str) -> Result<Self> {
        let map = value
            .as_object()
            .ok_or_else(|| Error::load(file, format!("an object {prefix}"), kind(value)))?;
        let asked = RefCell::default();
        Ok(Self { map, file: file.to_owned(), prefix: prefix.to_owned(), asked, whole: false })
    }

    /// The value of a key; `null` counts as absent.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.asked.borrow_mut().insert(key.to_owned());
        self.map.get(key).filter(|v| !v.is_null())
    }

    /// A finite number from 1 on.
    pub(super) fn at_least_one(&self, key: &str) -> Result<f64> {
        match self.positive(key)? {
            number if number >= 1.0 => Ok(number),
            _ => Err(self.wrong(key, "a number from 1 on", self.need(key)?)),
        }
    }

    /// A finite number above 0; 0 stands for none.
    pub(super) fn not_zero(&self, key: &str) -> Result<Option<f64>> {
        match self.get(key).and_then(Value::as_f64) {
            Some(0.0) => Ok(None),
            Some(_) | None => self.optional_positive(key),
        }
    }

    /// A list of finite numbers above 0; it must be there.
    pub(super) fn positives(&self, key: &str) -> Result<Vec<f64>> {
        let value = self.need(key)?;
        let number = |v: &Value| v.as_f64().filter(|n| n.is_finite() && *n > 0.0);
        let list = value.as_array().and_then(|a| a.iter().map(number).collect());
        list.ok_or_else(|| self.wrong(key, "a list of numbers above 0", value))
    }

    /// A list of 0 and 1.
    pub(super) fn switches(&self, key: &str) -> Result<Option<Vec<bool>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let switch = |v: &Value| v.as_u64().filter(|n| *n < 2).map(|n| n == 1);
        let list = value.as_array().and_then(|a| a.iter().map(switch).collect());
        list.map(Some).ok_or_else(|| self.wrong(key, "a list of 0 and 1", value))
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.map.get(key).is_some_and(|v| !v.is_null())
    }

    fn wrong(&self, key: &str, wanted: &str, got: &Value) -> Error {
        Error::tensor(&self.file, format!("{}{key}", self.prefix), wanted, shown(got))
    }

    /// A value that must be there.
    pub(super) fn need(&self, key: &str) -> Result<&'a Value> {
        self.get(key).ok_or_else(|| {
            Error::tensor(&self.file, format!("{}{key}", self.prefix), "a value", "nothing")
        })
    }

    pub(super) fn unsupported<T>(&self, key: &str, detail: impl Into<String>) -> Result<T> {
        let what = format!("{}: {}{key}", self.file.display(), self.prefix);
        Err(Error::UnsupportedModel { what, detail: detail.into() })
    }

    fn count(&self, key: &str, value: &Value) -> Result<usize> {
        match value.as_u64() {
            Some(n) if (1..=MOST).contains(&n) => Ok(n as usize),
            Some(_) | None => Err(self.wrong(key, &format!("a whole number 1 to {MOST}"), value)),
        }
    }

    /// A size: a whole number from 1.
    pub(super) fn size(&self, key: &str) -> Result<usize> {
        self.count(key, self.need(key)?)
    }

    /// The number of layers.
    pub(super) fn layers(&self) -> Result<usize> {
        let key = "num_hidden_layers";
        match self.size(key)? {
            n if n <= MOST_LAYERS => Ok(n),
            n => self.unsupported(key, format!("{n}; at most {MOST_LAYERS}")),
        }
    }

    pub(super) fn size_or(&self, key: &str, default: usize) -> Result<usize> {
        self.get(key).map_or(Ok(default), |v| self.count(key, v))
    }

    pub(super) fn optional_size(&self, key: &str) -> Result<Option<usize>> {
        self.get(key).map(|v| self.count(key, v)).transpose()
    }

    pub(super) fn integer_or(&self, key: &str, default: i64) -> Result<i64> {
        match self.get(key) {
            None => Ok(default),
            Some(v) => match v.as_i64() {
                Some(n) if n.unsigned_abs() <= MOST => Ok(n),
                Some(_) | None => Err(self.wrong(key, "a whole number", v)),
            },
        }
    }

    /// A finite number above 0.
    pub(super) fn positive(&self, key: &str) -> Result<f64> {
        let v = self.need(key)?;
        match v.as_f64() {
            Some(n) if n.is_finite() && n > 0.0 => Ok(n),
            Some(_) | None => Err(self.wrong(key, "a number above 0", v)),
        }
    }

    pub(super) fn optional_positive(&self, key: &str) -> Result<Option<f64>> {
        self.get(key).map(|_| self.positive(key)).transpose()
    }

    pub(super) fn positive_or(&self, key: &str, default: f64) -> Result<f64> {
        Ok(self.optional_positive(key)?.unwrap_or(default))
    }

    pub(super) fn flag_or(&self, key: &str, default: bool) -> Result<bool> {
        match self.get(key) {
            None => Ok(default),
            Some(v) => v.as_bool().ok_or_else(|| self.wrong(key, "true or false", v)),
        }
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>> {
        match self.get(key) {
            None => Ok(None),
            Some(v) => v.as_str().map(Some).ok_or_else(|| self.wrong(key, "a string", v)),
        }
    }

    /// A list of layer indices below `layers`.
    pub(super) fn layer_list(&self, key: &str, layers: usize) -> Result<Vec<usize>> {
        let Some(v) = self.get(key) else { return Ok(Vec::new()) };
        let index = |v: &Value| v.as_u64().filter(|i| *i < layers as u64).map(|i| i as usize);
        let list = v.as_array().and_then(|a| a.iter().map(index).collect::<Option<Vec<_>>>());
        list.ok_or_else(|| self.wrong(key, &format!("a list of layers below {layers}"), v))
    }

    /// A list of strings.
    pub(super) fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>> {
        let Some(v) = self.get(key) else { return Ok(None) };
        let list = v.as_array().and_then(|a| a.iter().map(Value::as_str).collect());
        list.map(Some).ok_or_else(|| self.wrong(key, "a list of strings", v))
    }

    /// A list of sizes.
    pub(super) fn sizes(&self, key: &str) -> Result<Option<Vec<usize>>> {
        let Some(v) = self.get(key) else { return Ok(None) };
        let list = v.as_array().ok_or_else(|| self.wrong(key, "a list of whole numbers", v))?;
        list.iter().map(|v| self.count(key, v)).collect::<Result<_>>().map(Some)
    }

    /// A list of whole numbers from 0 on.
    pub(super) fn counts(&self, key: &str) -> Result<Option<Vec<usize>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let count = |v: &Value| v.as_u64().filter(|n| *n <= MOST).map(|n| n as usize);
        let list = value.as_array().and_then(|a| a.iter().map(count).collect());
        list.map(Some).ok_or_else(|| self.wrong(key, "a list of whole numbers", value))
    }

    /// One token id or a list of them.
    pub(super) fn token_ids(&self, key: &str) -> Result<Vec<u32>> {
        let Some(v) = self.get(key) else { return Ok(Vec::new()) };
        let id = |v: &Value| v.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids = match v {
            Value::Array(list) => list.iter().map(id).collect::<Option<Vec<_>>>(),
            other => id(other).map(|id| vec![id]),
        };
        ids.ok_or_else(|| self.wrong(key, "a token id or a list of them", v))
    }

    /// A nested object.
    pub(super) fn object(&self, key: &str) -> Result<Option<Config<'a>>> {
        let prefix = format!("{}{key}.", self.prefix);
        self.get(key).map(|v| Config::nested(v, &self.file, &prefix)).transpose()
    }

    /// A nested object that is the config of a model inside of this one; it must be there.
    pub(super) fn model(&self, key: &str) -> Result<Config<'a>> {
        let nested =
            Config::nested(self.need(key)?, &self.file, &format!("{}{key}.", self.prefix))?;
        Ok(Config { whole: true, ..nested })
    }

    /// A list of objects; it must be there.
    pub(super) fn objects(&self, key: &str) -> Result<Vec<Config<'a>>> {
        let value = self.need(key)?;
        let list = value.as_array().ok_or_else(|| self.wrong(key, "a list of objects", value))?;
        let entry = |(at, value): (usize, &'a Value)| {
            Config::nested(value, &self.file, &format!("{}{key}[{at}].", self.prefix))
        };
        list.iter().enumerate().map(entry).collect()
    }

    /// Refuses every key that nobody asked for and that is not known to change nothing: by
    /// [`HARMLESS`], by `harmless` for this family, or by [`OFF`] and its value.
    pub(super) fn finish(&self, harmless: &[&str]) -> Result<()> {
        let asked = self.asked.borrow();
        for (key, value) in self.map {
            let name = key.as_str();
            let whole = self.whole;
            if asked.contains(key) || harmless.contains(&name) || whole && HARMLESS.contains(&name)
            {
                continue;
            }
            if !(whole && OFF.contains(&name)) {
                return self.unsupported(key, "kie does not know this flag and will not guess");
            }
            if !switched_off(value) {
                return self.unsupported(key, format!("{}; only switched off", shown(value)));
            }
        }
        Ok(())
    }
}

/// Whether a value says that something is off.
pub(super) fn switched_off(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(on) => !on,
        Value::Number(n) => n.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// A value, short enough for a message.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
