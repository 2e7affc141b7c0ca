//! Anthropic's paths: `/v1/messages` and `/v1/messages/count_tokens`.
//!
//! ```text
//! request.rs  a body's blocks into messages of OpenAI's form      events.rs  a streamed answer
//! ```

mod blocks;
mod events;
mod request;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::Json;
use kie_core::request::{Completion, FinishReason, StopReason, Usage};
use serde_json::{json, Value};

use crate::app::App;
use crate::chat::{random_letters, Answer};
use crate::errors::ApiError;
use crate::generate::{Generation, Written};
use crate::openai::{prepared, received, types};
use crate::sse;
use crate::tools::Part;
use request::Asked;

/// POST `/v1/messages`.
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let (body, caller) = received(&app, request).await?;
    let asked = prepared(&app, body, request::prepare).await?;
    let Asked { prepared, stream, mut answer } = asked;
    let served = app.served()?;
    let id = format!("msg_{}", random_letters(24));
    let request_id = caller.id.clone();
    let usage = Usage { prompt_tokens: prepared.ids.len(), ..Usage::default() };
    let theirs = |error: ApiError| error.renamed("stop", "stop_sequences");
    let mut generation = Generation::start(&app, caller, prepared).await.map_err(theirs)?;
    let head = Head { id, model: served.name.clone(), fingerprint: served.fingerprint.clone() };
    if stream {
        generation.first_word().await?;
        let events = events::Events::new(head, answer, request_id, usage);
        return Ok(sse::response(Written::new(generation, events), app.config.silence));
    }
    let (tokens, done) = generation.collect().await?;
    let mut parts = answer.read(&tokens);
    parts.extend(answer.finish());
    Ok(Json(whole(&head, &answer, parts, &done)).into_response())
}

/// POST `/v1/messages/count_tokens`.
pub(crate) async fn count(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let (body, _) = received(&app, request).await?;
    let count = prepared(&app, body, request::count).await?;
    Ok(Json(json!({"input_tokens": count})))
}

/// What stands in an answer beside its content.
struct Head {
    id: String,
    model: String,
    fingerprint: String,
}

/// `message` with this content; `end` is why it stopped, where it has.
fn message(head: &Head, content: Vec<Value>, end: Option<(&str, Value)>, usage: Value) -> Value {
    let (reason, sequence) = end.map_or((Value::Null, Value::Null), |(r, s)| (r.into(), s));
    json!({
        "id": head.id,
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": usage,
    })
}

fn whole(head: &Head, answer: &Answer, parts: Vec<Part>, done: &Completion) -> Value {
    let mut content: Vec<Value> = Vec::new();
    let mut called = false;
    for part in parts {
        let (kind, field, text) = match part {
            Part::Text(text) => ("text", "text", text),
            Part::Reasoning(text) => ("thinking", "thinking", text),
            Part::Call(call) => {
                called = true;
                let id = answer.call_id(call.id.as_deref(), "toolu_");
                let input: Value = serde_json::from_str(&call.arguments).unwrap_or_default();
                content.push(json!({
                    "type": "tool_use", "id": id, "name": call.name, "input": input,
                }));
                continue;
            }
            Part::Mark(_) => continue,
        };
        match content.last_mut().filter(|last| last["type"] == kind) {
            Some(last) => {
                let all = last[field].as_str().unwrap_or_default().to_owned() + &text;
                last[field] = all.into();
            }
            None if kind == "thinking" => {
                content.push(json!({"type": kind, "thinking": text, "signature": ""}));
            }
            None => content.push(json!({"type": kind, "text": text})),
        }
    }
    let mut whole = message(head, content, Some(stop(done, called)), usage(&done.usage));
    whole["timings"] = types::timings(&done.timings);
    whole["seed"] = done.seed.into();
    whole["system_fingerprint"] = head.fingerprint.as_str().into();
    whole
}

/// `stop_reason` and `stop_sequence`.
fn stop(done: &Completion, called: bool) -> (&'static str, Value) {
    match (done.finish_reason, &done.stop_reason) {
        (FinishReason::Stop, _) if called => ("tool_use", Value::Null),
        (FinishReason::Stop, Some(StopReason::Text(text))) => ("stop_sequence", json!(text)),
        (FinishReason::Stop, _) => ("end_turn", Value::Null),
        (
            FinishReason::Length
            | FinishReason::Timeout
            | FinishReason::Cancelled
            | FinishReason::Error,
            _,
        ) => ("max_tokens", Value::Null),
    }
}

/// `usage`: tokens that came from the cache are not in `input_tokens`.
fn usage(usage: &Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "service_tier": "standard",
    })
}
