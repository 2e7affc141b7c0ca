//! POST `/v1/completions`: the older path, with a prompt as text or ids.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::Json;
use kie_core::request::Completion;
use serde::Serialize;
use serde_json::{json, Value};

use super::types::{self, Head, Streaming};
use crate::app::{App, Served};
use crate::errors::ApiError;
use crate::generate::{Event, Generation, Prepared};
use crate::request::{ids_of, kind_of, Fields};
use crate::{sampling, sse};

const FIELD: &str = "prompt";
/// Fields that change the answer and have nothing behind them yet.
const REFUSED: [&str; 6] =
    ["suffix", "response_format", "structured_outputs", "grammar", "speculate", "prediction"];

/// The handler.
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let (body, peer) = super::received(&app, request).await?;
    let (prepared, streaming) = super::prepared(&app, body, prepare).await?;
    let seed = prepared.params.seed;
    let served = app.served()?;
    let mut generation = Generation::start(&app, peer, prepared)?;
    let head = Head::new(served, "cmpl", "text_completion");
    if streaming.on {
        generation.first_word().await?;
        return Ok(sse::response(Chunks { head, generation, streaming, seed }));
    }
    let (_, done) = generation.collect().await?;
    Ok(Json(whole(head, &done)).into_response())
}

fn prepare(app: &App, mut fields: Fields) -> Result<(Prepared, Streaming), ApiError> {
    let served = app.served()?;
    types::take_model(&mut fields, served)?;
    types::refuse(&mut fields, &REFUSED)?;
    let streaming = Streaming::take(&mut fields)?;
    let mut params = sampling::take(&mut fields)?;
    sampling::take_without_effect(&mut fields)?;
    fields.neutral("best_of", "1", |v| v.as_f64() == Some(1.0))?;
    params.max_tokens = types::take_max_tokens(&mut fields, &["max_tokens"], 1)?;
    let given = fields.need(FIELD)?;
    fields.finish()?;
    let ids = ids(served, given)?;
    let interval = streaming.interval;
    Ok((Prepared { ids, params, interval, prompt_field: FIELD }, streaming))
}

/// Ids of a prompt: text, ids, or a list of one of either.
fn ids(served: &Served, given: Value) -> Result<Vec<u32>, ApiError> {
    let wrong = |got: &str| {
        let message = format!("{FIELD}: wanted text, token ids or a list of one, got {got}");
        Err(ApiError::field(FIELD, message))
    };
    if let Some(ids) = ids_of(&given).filter(|ids| !ids.is_empty()) {
        return Ok(ids);
    }
    match given {
        Value::String(text) => {
            let refused = |e: kie_core::Error| ApiError::engine(&e, FIELD);
            served.engine.tokenize(&text, true).map_err(refused)
        }
        Value::Array(mut list) if list.len() == 1 && !list[0].is_number() => {
            let one = list.pop().expect("it has one");
            match one {
                Value::Array(ref inner) if inner.iter().all(Value::is_number) => ids(served, one),
                Value::String(_) => ids(served, one),
                other => wrong(kind_of(&other)),
            }
        }
        Value::Array(list) if list.is_empty() => wrong("an empty list"),
        Value::Array(list) if list.iter().all(Value::is_number) => wrong("numbers that are no ids"),
        Value::Array(list) => wrong(&format!("a list of {}", list.len())),
        other => wrong(kind_of(&other)),
    }
}

fn whole(head: Head, done: &Completion) -> Value {
    let (finish_reason, stop_reason) = types::finish(done);
    json!({
        "id": head.id,
        "object": head.object,
        "created": head.created,
        "model": head.model,
        "choices": [{
            "index": 0,
            "text": done.text,
            "logprobs": null,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }],
        "usage": types::usage(&done.usage),
        "timings": types::timings(&done.timings),
        "seed": done.seed,
        "system_fingerprint": head.system_fingerprint,
    })
}

#[derive(Serialize)]
struct Chunk<'a> {
    #[serde(flatten)]
    head: &'a Head,
    choices: [Choice<'a>; 1],
    #[serde(skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<Value>,
}

#[derive(Serialize)]
struct Choice<'a> {
    index: u32,
    text: &'a str,
    logprobs: Option<Value>,
    finish_reason: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<Value>,
}

/// The stream of one answer.
struct Chunks {
    head: Head,
    generation: Generation,
    streaming: Streaming,
    seed: Option<u64>,
}

impl Chunks {
    fn chunk<'a>(&'a self, text: &'a str) -> Chunk<'a> {
        let choice =
            Choice { index: 0, text, logprobs: None, finish_reason: None, stop_reason: None };
        Chunk { head: &self.head, choices: [choice], seed: None, timings: None }
    }

    fn end(&self, out: &mut Vec<u8>, done: &Completion) {
        let (finish_reason, stop_reason) = types::finish(done);
        let mut last = self.chunk("");
        last.choices[0].finish_reason = Some(finish_reason);
        last.choices[0].stop_reason = Some(stop_reason);
        last.seed = self.seed;
        let timings = types::timings(&done.timings);
        if !self.streaming.include_usage {
            last.timings = Some(timings);
            sse::data(out, &last);
        } else {
            sse::data(out, &last);
            sse::data(out, &types::usage_chunk(&self.head, done, timings));
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
    }
}

impl sse::Frames for Chunks {
    async fn next(&mut self, out: &mut Vec<u8>) -> bool {
        match self.generation.next().await {
            Event::Tokens(tokens) => {
                let text: String = tokens.iter().map(|token| token.text.as_str()).collect();
                if !text.is_empty() {
                    sse::data(out, &self.chunk(&text));
                }
                true
            }
            Event::Done(done) => {
                self.end(out, &done);
                false
            }
            Event::Failed(error) => {
                sse::data(out, &error.openai());
                false
            }
        }
    }
}
