//! POST `/v1/responses`: nothing is stored, so a conversation comes whole with each request.
//!
//! ```text
//! request.rs  a body's items into messages      events.rs  a streamed answer
//! ```

mod events;
mod items;
mod request;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::Json;
use kie_core::request::{Completion, FinishReason};
use serde_json::{json, Map, Value};

use super::types;
use crate::app::{unix_seconds, App, Served};
use crate::chat::{random_letters, Answer};
use crate::errors::ApiError;
use crate::generate::{Generation, Written};
use crate::sse;
use crate::tools::{Call, Part};
use request::Asked;

/// The handler.
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let (body, caller) = super::received(&app, request).await?;
    let asked = super::prepared(&app, body, request::prepare).await?;
    let Asked { prepared, stream, mut answer, echoed } = asked;
    let head = Head::new(app.served()?, echoed);
    let mut generation = Generation::start(&app, caller, prepared).await?;
    if stream {
        generation.first_word().await?;
        let events = Written::new(generation, events::Events::new(head, answer));
        return Ok(sse::response(events, app.config.silence));
    }
    let (tokens, done) = generation.collect().await?;
    let mut parts = answer.read(&tokens);
    parts.extend(answer.finish());
    let output = output(&answer, parts, status(&done));
    let done = Some((&*done, answer.thought()));
    Ok(Json(head.response(output, done)).into_response())
}

/// What a response says beside its output.
struct Head {
    id: String,
    created: u64,
    model: String,
    fingerprint: String,
    /// Fields of the request that are said again.
    echoed: Map<String, Value>,
}

impl Head {
    fn new(served: &Served, echoed: Map<String, Value>) -> Self {
        Self {
            id: format!("resp_{}", random_letters(24)),
            created: unix_seconds(),
            model: served.name.clone(),
            fingerprint: served.fingerprint.clone(),
            echoed,
        }
    }

    /// The response; without `done`, the end and tokens of reasoning, one that is in progress.
    fn response(&self, output: Vec<Value>, done: Option<(&Completion, usize)>) -> Value {
        let status = done.map_or("in_progress", |(done, _)| status(done));
        let cut = status == "incomplete";
        let why = if cut { json!({"reason": "max_output_tokens"}) } else { Value::Null };
        let mut response = json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": false,
            "error": null,
            "incomplete_details": why,
            "model": self.model,
            "output": output,
            "previous_response_id": null,
            "store": false,
            "truncation": "disabled",
            "usage": done.map(usage),
            "system_fingerprint": self.fingerprint,
        });
        if let Some(fields) = response.as_object_mut() {
            fields.extend(self.echoed.clone());
            if let Some((done, _)) = done {
                fields.insert("timings".to_owned(), types::timings(&done.timings));
                fields.insert("seed".to_owned(), done.seed.into());
            }
        }
        response
    }
}

/// Of a response that ended, and of its last item.
fn status(done: &Completion) -> &'static str {
    match done.finish_reason {
        FinishReason::Stop => "completed",
        FinishReason::Length
        | FinishReason::Timeout
        | FinishReason::Cancelled
        | FinishReason::Error => "incomplete",
    }
}

fn usage((done, thought): (&Completion, usize)) -> Value {
    let usage = &done.usage;
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    })
}

/// A new item's id.
fn item_id(prefix: &str) -> String {
    format!("{prefix}_{}", random_letters(24))
}

fn text_part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

fn reasoning_part(text: &str) -> Value {
    json!({"type": "reasoning_text", "text": text})
}

fn message_item(id: &str, status: &str, content: Vec<Value>) -> Value {
    json!({
        "id": id, "type": "message", "status": status, "role": "assistant", "content": content,
    })
}

fn reasoning_item(id: &str, status: &str, content: Vec<Value>) -> Value {
    json!({"id": id, "type": "reasoning", "status": status, "summary": [], "content": content})
}

fn call_item(id: &str, status: &str, call_id: &str, call: &Call, arguments: &str) -> Value {
    json!({
        "id": id,
        "type": "function_call",
        "status": status,
        "call_id": call_id,
        "name": call.name,
        "arguments": arguments,
    })
}

/// The items of a whole answer; at least one. The last has `status`, unless it is a call: those are
/// whole.
fn output(answer: &Answer, parts: Vec<Part>, status: &str) -> Vec<Value> {
    let (mut output, mut open): (Vec<Value>, Option<Part>) = (Vec::new(), None);
    let close = |open: Option<Part>, status: &str, output: &mut Vec<Value>| match open {
        Some(Part::Text(text)) => {
            output.push(message_item(&item_id("msg"), status, vec![text_part(&text)]));
        }
        Some(Part::Reasoning(text)) => {
            output.push(reasoning_item(&item_id("rs"), status, vec![reasoning_part(&text)]));
        }
        Some(Part::Call(call)) => {
            let call_id = answer.call_id(call.id.as_deref(), "call_");
            let id = item_id("fc");
            output.push(call_item(&id, "completed", &call_id, &call, &call.arguments));
        }
        Some(Part::Mark(_)) | None => {}
    };
    for part in parts {
        match (&mut open, part) {
            (_, Part::Mark(_)) => {}
            (Some(Part::Text(all)), Part::Text(text)) => all.push_str(&text),
            (Some(Part::Reasoning(all)), Part::Reasoning(text)) => all.push_str(&text),
            (_, part) => close(open.replace(part), "completed", &mut output),
        }
    }
    close(open, status, &mut output);
    if output.is_empty() {
        output.push(message_item(&item_id("msg"), status, vec![text_part("")]));
    }
    output
}
