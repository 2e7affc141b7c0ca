//! Fields that all APIs share: how tokens are chosen, and what is taken without effect.
//!
//! Ranges are the engine's to check: its message begins with the parameter's name.

use kie_core::request::{Prediction, SamplingParams, Speculate};
use serde_json::Value;

use crate::errors::ApiError;
use crate::request::{ids_of, wanted_but, Fields};

/// Largest `logit_bias`, in entries.
const BIAS_MAX: usize = 1024;
/// Drawn seeds are below this, so that every client's numbers hold them.
const DRAWN_SEEDS: u64 = 1 << 53;

/// Takes the sampling fields; `max_tokens` and `logprobs` are each API's own.
///
/// # Errors
/// 400 with the field.
pub(crate) fn take(fields: &mut Fields) -> Result<SamplingParams, ApiError> {
    let count32 = |name: &str, n: usize| {
        u32::try_from(n).map_err(|_| ApiError::field(name, format!("{name}: {n} is too large")))
    };
    Ok(SamplingParams {
        temperature: fields.number("temperature")?,
        top_p: fields.number("top_p")?,
        top_k: fields.count("top_k")?.map(|k| count32("top_k", k)).transpose()?,
        min_p: fields.number("min_p")?,
        repetition_penalty: fields.number("repetition_penalty")?,
        presence_penalty: fields.number("presence_penalty")?.unwrap_or(0.0),
        frequency_penalty: fields.number("frequency_penalty")?.unwrap_or(0.0),
        stop: fields.strings("stop")?.unwrap_or_default(),
        stop_token_ids: fields.ids("stop_token_ids")?.unwrap_or_default(),
        min_tokens: fields.count("min_tokens")?.unwrap_or(0),
        ignore_eos: fields.flag("ignore_eos")?.unwrap_or(false),
        seed: Some(fields.bits("seed")?.unwrap_or_else(drawn_seed)),
        logit_bias: bias(fields)?,
        timeout: fields.number("timeout")?,
        speculate: speculate(fields)?,
        prediction: prediction(fields)?,
        max_tokens: None,
        grammar: None,
        logprobs: None,
    })
}

/// Takes what every OpenAI path accepts without effect.
///
/// # Errors
/// 400 where the value would ask for an effect.
pub(crate) fn take_without_effect(fields: &mut Fields) -> Result<(), ApiError> {
    for name in ["user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"] {
        fields.text(name)?;
    }
    for name in ["metadata", "prompt_cache_options"] {
        fields.object(name)?;
    }
    fields.flag("parallel_tool_calls")?;
    let off = |v: &Value| v == &Value::Bool(false);
    let empty = |v: &Value| v.as_array().is_some_and(Vec::is_empty);
    fields.neutral("n", "1", |v| v.as_f64() == Some(1.0))?;
    fields.neutral("store", "false", off)?;
    fields.neutral("background", "false", off)?;
    fields.neutral("service_tier", "\"auto\"", |v| v == "auto" || v == "default")?;
    fields.neutral("truncation", "\"disabled\"", |v| v == "disabled")?;
    fields.neutral("include", "an empty list", empty)?;
    fields.neutral("modalities", "[\"text\"]", |v| v == &serde_json::json!(["text"]))?;
    fields.neutral("thinking", "{\"type\": \"disabled\"}", |v| v["type"] == "disabled")
}

/// A seed for a request that named none.
fn drawn_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    // The standard library keys its hash maps from the system's random numbers.
    std::hash::RandomState::new().build_hasher().finish() % DRAWN_SEEDS
}

fn speculate(fields: &mut Fields) -> Result<Option<Speculate>, ApiError> {
    let name = "speculate";
    match fields.take(name) {
        None => Ok(None),
        Some(Value::String(from)) if from == "lookup" => Ok(Some(Speculate::Lookup)),
        Some(Value::String(from)) if from == "mtp" => Ok(Some(Speculate::Mtp)),
        Some(other) => Err(wanted_but(name, "\"lookup\" or \"mtp\"", &other)),
    }
}

/// OpenAI's `{"type": "content", "content": ...}`, or the content alone: text, parts of text, or
/// token ids.
fn prediction(fields: &mut Fields) -> Result<Option<Prediction>, ApiError> {
    let name = "prediction";
    let Some(given) = fields.take(name) else { return Ok(None) };
    let content = match &given {
        Value::Object(object) if given["type"] == "content" && object.len() == 2 => {
            &given["content"]
        }
        other => other,
    };
    match content {
        Value::String(text) => return Ok(Some(Prediction::Text(text.clone()))),
        Value::Array(parts) => {
            if let Some(ids) = ids_of(content) {
                return Ok(Some(Prediction::Ids(ids)));
            }
            let texts =
                parts.iter().map(|part| part["text"].as_str().filter(|_| part["type"] == "text"));
            if let Some(texts) = texts.collect::<Option<Vec<&str>>>() {
                return Ok(Some(Prediction::Text(texts.concat())));
            }
        }
        _ => {}
    }
    Err(wanted_but(name, "{\"type\": \"content\", \"content\": text}", &given))
}

fn bias(fields: &mut Fields) -> Result<Vec<(u32, f64)>, ApiError> {
    let name = "logit_bias";
    let Some(map) = fields.object(name)? else { return Ok(Vec::new()) };
    if map.len() > BIAS_MAX {
        let got = map.len();
        let message = format!("{name} must have at most {BIAS_MAX} entries, got {got}");
        return Err(ApiError::field(name, message));
    }
    let entry = |(id, value): (&String, &Value)| {
        let wrong = || wanted_but(name, "token ids with numbers", value);
        Ok((id.parse().map_err(|_| wrong())?, value.as_f64().ok_or_else(wrong)?))
    };
    map.iter().map(entry).collect()
}
