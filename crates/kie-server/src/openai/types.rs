//! What chat completions and completions have in common on the wire.

use kie_core::request::{Completion, FinishReason, StopReason, Timings, Usage};
use serde::Serialize;
use serde_json::{json, Value};

use crate::app::{unix_seconds, Served};
use crate::errors::ApiError;
use crate::request::Fields;

/// Most alternatives a token, of OpenAI's API and of the engine.
pub(crate) const ALTERNATIVES_MAX: usize = 20;

/// What every answer and every chunk of it begins with.
#[derive(Serialize, Clone)]
pub(crate) struct Head {
    pub(crate) id: String,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) system_fingerprint: String,
}

impl Head {
    pub(crate) fn new(served: &Served, prefix: &str, object: &'static str) -> Self {
        Self {
            id: new_id(prefix),
            object,
            created: unix_seconds(),
            model: served.name.clone(),
            system_fingerprint: served.fingerprint.clone(),
        }
    }
}

/// An id that no other answer has.
pub(crate) fn new_id(prefix: &str) -> String {
    use std::hash::{BuildHasher, Hasher};
    let random = || std::hash::RandomState::new().build_hasher().finish();
    format!("{prefix}-{:016x}{:08x}", random(), random() as u32)
}

/// How an answer is to be streamed.
#[derive(Clone, Copy, Default)]
pub(crate) struct Streaming {
    pub(crate) on: bool,
    pub(crate) include_usage: bool,
    pub(crate) interval: Option<usize>,
}

impl Streaming {
    /// Takes `stream`, `stream_options` and `stream_interval`.
    ///
    /// # Errors
    /// 400 with the field.
    pub(crate) fn take(fields: &mut Fields) -> Result<Self, ApiError> {
        let on = fields.flag("stream")?.unwrap_or(false);
        let interval = fields.count("stream_interval")?;
        if interval == Some(0) {
            let message = "stream_interval: wanted at least 1, got 0";
            return Err(ApiError::field("stream_interval", message));
        }
        let mut include_usage = false;
        if let Some(options) = fields.object("stream_options")? {
            if !on {
                let message = "stream_options: only with \"stream\": true";
                return Err(ApiError::field("stream_options", message));
            }
            for (name, value) in &options {
                let at = format!("stream_options.{name}");
                match (name.as_str(), value) {
                    (_, Value::Null) | ("include_obfuscation", Value::Bool(_)) => {}
                    ("include_usage", Value::Bool(include)) => include_usage = *include,
                    ("include_usage" | "include_obfuscation", _) => {
                        return Err(ApiError::field(&at, format!("{at}: wanted true or false")));
                    }
                    _ => return Err(ApiError::field(&at, format!("{at}: unknown field"))),
                }
            }
        }
        Ok(Self { on, include_usage, interval })
    }
}

/// `finish_reason` in OpenAI's words, and `stop_reason`: the string or id that hit, or `timeout`
/// where the time was what ran out. An answer that ends by itself and `called` says `tool_calls`.
pub(crate) fn finish(done: &Completion, called: bool) -> (&'static str, Value) {
    match (done.finish_reason, &done.stop_reason) {
        (FinishReason::Stop, _) if called => ("tool_calls", Value::Null),
        _ => finish_plain(done),
    }
}

fn finish_plain(done: &Completion) -> (&'static str, Value) {
    match (done.finish_reason, &done.stop_reason) {
        (FinishReason::Stop, Some(StopReason::Text(text))) => ("stop", json!(text)),
        (FinishReason::Stop, Some(StopReason::Id(id))) => ("stop", json!(id)),
        (FinishReason::Stop, None) => ("stop", Value::Null),
        (FinishReason::Timeout, _) => ("length", json!("timeout")),
        (FinishReason::Length | FinishReason::Cancelled | FinishReason::Error, _) => {
            ("length", Value::Null)
        }
    }
}

/// `usage`.
pub(crate) fn usage(usage: &Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    })
}

/// `timings`, with llama-server's names and kie's own.
pub(crate) fn timings(t: &Timings) -> Value {
    json!({
        "prompt_n": t.prompt_n,
        "prompt_ms": t.prompt_ms,
        "prompt_per_second": t.prompt_per_second,
        "predicted_n": t.predicted_n,
        "predicted_ms": t.predicted_ms,
        "predicted_per_second": t.predicted_per_second,
        "cache_n": t.cache_n,
        "draft_n": t.draft_n,
        "draft_n_accepted": t.draft_n_accepted,
        "queue_ms": t.queue_ms,
        "ttft_ms": t.ttft_ms,
        "itl_p50_us": t.itl_p50_us,
        "itl_p99_us": t.itl_p99_us,
        "itl_max_us": t.itl_max_us,
        "bytes_per_token": t.bytes_per_token,
        "mbu": t.mbu,
        "mbu_peak": t.mbu_peak,
    })
}

/// The chunk behind the last one that holds `usage` and `timings`.
pub(crate) fn usage_chunk(head: &Head, done: &Completion, timings: Value) -> Value {
    json!({
        "id": head.id,
        "object": head.object,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.system_fingerprint,
        "choices": [],
        "usage": usage(&done.usage),
        "timings": timings,
    })
}

/// `model`, which must be the one that is served.
///
/// # Errors
/// 400 without it, 404 for another.
pub(crate) fn take_model(fields: &mut Fields, served: &Served) -> Result<(), ApiError> {
    match fields.text("model")? {
        Some(model) if served.answers_to(&model) => Ok(()),
        Some(model) => Err(crate::models::unknown(&model)),
        None => Err(ApiError::field("model", "model: missing")),
    }
}

/// What the engine has no part for yet: 400 with the field's name.
///
/// # Errors
/// The first of `names` that is there.
pub(crate) fn refuse(fields: &mut Fields, names: &[&str]) -> Result<(), ApiError> {
    match names.iter().find(|name| fields.take(name).is_some()) {
        Some(name) => Err(ApiError::field(*name, format!("{name}: not supported"))),
        None => Ok(()),
    }
}

/// The most tokens, under any of `names`.
///
/// # Errors
/// 400 for 0, and for two that differ.
pub(crate) fn take_max_tokens(
    fields: &mut Fields,
    names: &[&str],
    least: usize,
) -> Result<Option<usize>, ApiError> {
    let mut found: Option<usize> = None;
    for name in names {
        let Some(count) = fields.count(name)? else { continue };
        if count < least {
            let message = format!("{name}: wanted at least {least}, got {count}");
            return Err(ApiError::field(*name, message));
        }
        if found.is_some_and(|other| other != count) {
            let message = format!("{name}: given twice, under two names, with two values");
            return Err(ApiError::field(*name, message));
        }
        found = Some(count);
    }
    Ok(found)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn fields(body: &Value) -> Fields {
        Fields::parse(body.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn stream_options_need_a_stream() {
        let given = json!({"stream": true, "stream_options": {"include_usage": true}});
        let streaming = Streaming::take(&mut fields(&given)).unwrap();
        assert!(streaming.on && streaming.include_usage);
        let wrong = [
            (json!({"stream_options": {}}), "stream_options"),
            (json!({"stream": true, "stream_options": {"x": 1}}), "stream_options.x"),
            (
                json!({"stream": true, "stream_options": {"include_usage": 1}}),
                "stream_options.include_usage",
            ),
            (json!({"stream": 1}), "stream"),
            (json!({"stream_interval": 0}), "stream_interval"),
        ];
        for (given, param) in wrong {
            let error = Streaming::take(&mut fields(&given)).err().unwrap();
            assert_eq!(error.param.as_deref(), Some(param));
        }
    }

    #[test]
    fn most_tokens_have_several_names() {
        let names = ["max_completion_tokens", "max_tokens"];
        let take = |given: Value| take_max_tokens(&mut fields(&given), &names, 1);
        assert_eq!(take(json!({})).unwrap(), None);
        assert_eq!(take(json!({"max_tokens": 3, "max_completion_tokens": 3})).unwrap(), Some(3));
        assert_eq!(take(json!({"max_tokens": 3.0})).unwrap(), Some(3));
        for wrong in [
            json!({"max_tokens": 3, "max_completion_tokens": 4}),
            json!({"max_tokens": 0}),
            json!({"max_tokens": -1}),
            json!({"max_tokens": 1.5}),
            json!({"max_tokens": "3"}),
            json!({"max_tokens": true}),
        ] {
            assert_eq!(take(wrong).unwrap_err().param.as_deref(), Some("max_tokens"));
        }
    }
}
