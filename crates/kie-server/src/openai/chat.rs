//! POST `/v1/chat/completions`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::Json;
use kie_core::request::{Completion, Token};
use kie_core::Engine;
use serde::Serialize;
use serde_json::{json, Value};

use super::chunk::{self, Chunk};
use super::logprobs;
use super::types::{self, Head, Streaming};
use crate::app::App;
use crate::chat::{Answer, Conversation, Encoded};
use crate::errors::ApiError;
use crate::format::Format;
use crate::generate::{Generation, Prepared, Writer, Written};
use crate::request::Fields;
use crate::tools::{Call, Part as Piece, Tools};
use crate::{messages, sampling, sse};

/// Fields that change the answer and have nothing behind them yet.
const REFUSED: [&str; 3] = ["functions", "function_call", "audio"];

/// A request that may be submitted, and how its answer is to be read.
struct Asked {
    prepared: Prepared,
    streaming: Streaming,
    answer: Answer,
}

/// The handler.
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let (body, caller) = super::received(&app, request).await?;
    let Asked { prepared, streaming, mut answer } = super::prepared(&app, body, prepare).await?;
    let (seed, with_logprobs) = (prepared.params.seed, prepared.params.logprobs.is_some());
    let served = app.served()?;
    let engine = with_logprobs.then(|| served.engine.clone());
    let mut generation = Generation::start(&app, caller, prepared).await?;
    if streaming.on {
        generation.first_word().await?;
        let head = Head::new(served, "chatcmpl", "chat.completion.chunk");
        let chunks = Chunks { head, streaming, seed, engine, answer, calls: 0 };
        return Ok(sse::response(Written::new(generation, chunks), app.config.silence));
    }
    let head = Head::new(served, "chatcmpl", "chat.completion");
    let (tokens, done) = generation.collect().await?;
    let logprobs = engine.map(|engine| logprobs::chat(&engine, &tokens));
    let mut parts = answer.read(&tokens);
    parts.extend(answer.finish());
    let (message, called) = message(&answer, parts);
    let finish = types::finish(&done, called);
    Ok(Json(chunk::whole(head, &done, json!({"message": message}), logprobs, finish))
        .into_response())
}

/// The message of a whole answer, and whether it calls.
fn message(answer: &Answer, parts: Vec<Piece>) -> (Value, bool) {
    let (mut text, mut thought, mut calls) = (String::new(), String::new(), Vec::new());
    for part in parts {
        match part {
            Piece::Text(piece) => text.push_str(&piece),
            Piece::Reasoning(piece) => thought.push_str(&piece),
            Piece::Call(call) => calls.push(json!({
                "id": answer.call_id(call.id.as_deref(), "call_"),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            })),
            Piece::Mark(_) => {}
        }
    }
    let called = !calls.is_empty();
    let content = if called && text.is_empty() { Value::Null } else { text.into() };
    let mut message = json!({"role": "assistant", "content": content, "refusal": null});
    if !thought.is_empty() {
        message["reasoning_content"] = thought.into();
    }
    if called {
        message["tool_calls"] = calls.into();
    }
    (message, called)
}

fn prepare(app: &App, mut fields: Fields) -> Result<Asked, ApiError> {
    let served = app.served()?;
    types::take_model(&mut fields, served)?;
    types::refuse(&mut fields, &REFUSED)?;
    let format = Format::take(&mut fields)?;
    let streaming = Streaming::take(&mut fields)?;
    let mut params = sampling::take(&mut fields)?;
    sampling::take_without_effect(&mut fields)?;
    let names = ["max_completion_tokens", "max_tokens"];
    params.max_tokens = types::take_max_tokens(&mut fields, &names, 1)?;
    params.logprobs = take_logprobs(&mut fields)?;
    let tools = Arc::new(Tools::take(&mut fields)?);
    let effort = if served.chat.has_effort { fields.text("reasoning_effort")? } else { None };
    let given = fields.need("messages")?;
    fields.finish()?;
    let messages = messages::checked(given)?;
    let talk = Conversation { messages, tools, effort, format, ..Conversation::default() };
    let Encoded { ids, answer, format } = talk.encode(served, "messages")?;
    let interval = streaming.interval;
    let prepared = Prepared { ids, params, interval, prompt_field: "messages", format };
    Ok(Asked { prepared, streaming, answer })
}

/// `logprobs` with `top_logprobs`: alternatives a token.
fn take_logprobs(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let on = fields.flag("logprobs")?.unwrap_or(false);
    match fields.count("top_logprobs")? {
        Some(0) | None => Ok(on.then_some(0)),
        Some(_) if !on => {
            let message = "top_logprobs: only with \"logprobs\": true";
            Err(ApiError::field("top_logprobs", message))
        }
        Some(most) if most > types::ALTERNATIVES_MAX => {
            let wanted = types::ALTERNATIVES_MAX;
            let message = format!("top_logprobs: wanted 0 to {wanted}, got {most}");
            Err(ApiError::field("top_logprobs", message))
        }
        Some(most) => Ok(Some(most)),
    }
}

/// What a chunk's choice holds.
#[derive(Serialize)]
struct Part<'a> {
    delta: Delta<'a>,
}

#[derive(Serialize, Default)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<[Value; 1]>,
}

/// The stream of one answer.
struct Chunks {
    head: Head,
    streaming: Streaming,
    seed: Option<u64>,
    /// Where log-probabilities are wanted.
    engine: Option<Engine>,
    answer: Answer,
    /// Calls so far.
    calls: usize,
}

impl Chunks {
    fn chunk<'a>(&'a self, delta: Delta<'a>, logprobs: Option<Value>) -> Chunk<'a, Part<'a>> {
        Chunk::new(&self.head, self.streaming, Part { delta }, logprobs)
    }

    /// Writes parts, neighbours of one kind in one chunk; the first chunk has the log-probabilities
    /// of all.
    fn write(&mut self, parts: Vec<Piece>, mut logprobs: Option<Value>, out: &mut Vec<u8>) {
        let (mut text, mut thought) = (String::new(), String::new());
        for part in parts {
            match part {
                Piece::Text(piece) => text.push_str(&piece),
                Piece::Reasoning(piece) => thought.push_str(&piece),
                Piece::Mark(_) => {}
                Piece::Call(call) => {
                    self.write_text(&mut text, &mut thought, &mut logprobs, out);
                    self.write_call(&call, &mut logprobs, out);
                }
            }
        }
        self.write_text(&mut text, &mut thought, &mut logprobs, out);
        if logprobs.is_some() {
            let delta = Delta { content: Some(""), ..Delta::default() };
            sse::data(out, &self.chunk(delta, logprobs));
        }
    }

    fn write_text(
        &self,
        text: &mut String,
        thought: &mut String,
        logprobs: &mut Option<Value>,
        out: &mut Vec<u8>,
    ) {
        // Reasoning ends before text begins.
        if !thought.is_empty() {
            let delta = Delta { reasoning_content: Some(thought), ..Delta::default() };
            sse::data(out, &self.chunk(delta, logprobs.take()));
        }
        if !text.is_empty() {
            let delta = Delta { content: Some(text), ..Delta::default() };
            sse::data(out, &self.chunk(delta, logprobs.take()));
        }
        thought.clear();
        text.clear();
    }

    /// A call as OpenAI streams it: its id and name, then its arguments.
    fn write_call(&mut self, call: &Call, logprobs: &mut Option<Value>, out: &mut Vec<u8>) {
        let index = self.calls;
        self.calls += 1;
        let first = json!({
            "index": index,
            "id": self.answer.call_id(call.id.as_deref(), "call_"),
            "type": "function",
            "function": {"name": call.name, "arguments": ""},
        });
        let second = json!({"index": index, "function": {"arguments": call.arguments}});
        for piece in [first, second] {
            let delta = Delta { tool_calls: Some([piece]), ..Delta::default() };
            sse::data(out, &self.chunk(delta, logprobs.take()));
        }
    }
}

impl Writer for Chunks {
    fn begin(&mut self, out: &mut Vec<u8>) {
        let delta = Delta { role: Some("assistant"), content: Some(""), ..Delta::default() };
        sse::data(out, &self.chunk(delta, None).seeded(self.seed));
    }

    fn tokens(&mut self, tokens: &[Token], out: &mut Vec<u8>) {
        let parts = self.answer.read(tokens);
        let logprobs = self.engine.as_ref().map(|e| logprobs::chat(e, tokens));
        self.write(parts, logprobs, out);
    }

    fn done(&mut self, done: &Completion, out: &mut Vec<u8>) {
        let parts = self.answer.finish();
        self.write(parts, None, out);
        let finish = types::finish(done, self.calls > 0);
        let last = self.chunk(Delta::default(), None).seeded(self.seed);
        last.end(out, self.streaming, done, finish);
    }

    fn failed(&mut self, error: &ApiError, out: &mut Vec<u8>) {
        sse::data(out, &error.openai());
    }
}
