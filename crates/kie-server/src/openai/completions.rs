//! POST `/v1/completions`: the older path, with a prompt as text or ids.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::Json;
use kie_core::request::{Completion, FinishReason, Timings, Token, Usage};
use kie_core::Engine;
use serde::Serialize;
use serde_json::{json, Value};

use super::chunk::{self, Chunk};
use super::logprobs::{joined, Legacy};
use super::types::{self, Head, Streaming};
use crate::app::{App, Served};
use crate::errors::ApiError;
use crate::format::Format;
use crate::generate::{Generation, Prepared, Writer, Written};
use crate::request::{ids_of, kind_of, Fields};
use crate::{sampling, sse};

const FIELD: &str = "prompt";
/// Fields that change the answer and have nothing behind them yet.
const REFUSED: [&str; 1] = ["suffix"];

/// The handler.
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let (body, caller) = super::received(&app, request).await?;
    let (prepared, wanted) = super::prepared(&app, body, prepare).await?;
    let seed = prepared.params.seed;
    let served = app.served()?;
    let engine = wanted.logprobs.map(|_| served.engine.clone());
    let mut legacy = Legacy::new(wanted.logprobs.unwrap_or(0));
    let front = match wanted.echo {
        Some(text) => Some((text, of_prompt(&engine, &mut legacy, &prepared.ids).await?)),
        None => None,
    };
    let head = Head::new(served, "cmpl", "text_completion");
    if prepared.params.max_tokens == Some(0) {
        let done = only_prompt(&prepared, &served.name);
        return Ok(Json(whole(head, &done, front, None)).into_response());
    }
    let mut generation = Generation::start(&app, caller, prepared).await?;
    let streaming = wanted.streaming;
    if streaming.on {
        generation.first_word().await?;
        let chunks = Chunks { head, streaming, seed, engine, legacy, front };
        return Ok(sse::response(Written::new(generation, chunks), app.config.silence));
    }
    let (tokens, done) = generation.collect().await?;
    let logprobs = engine.map(|engine| legacy.of_tokens(&engine, &tokens));
    Ok(Json(whole(head, &done, front, logprobs)).into_response())
}

/// What the answer is to look like.
struct Wanted {
    streaming: Streaming,
    /// The prompt's text, where it is to come first.
    echo: Option<String>,
    logprobs: Option<usize>,
}

/// The prompt's log-probabilities, where they are wanted.
async fn of_prompt(
    engine: &Option<Engine>,
    legacy: &mut Legacy,
    ids: &[u32],
) -> Result<Option<Value>, ApiError> {
    let Some(engine) = engine.clone() else { return Ok(None) };
    let (ids, mut own) = (ids.to_vec(), std::mem::replace(legacy, Legacy::new(0)));
    let work = tokio::task::spawn_blocking(move || {
        let found = own.of_prompt(&engine, &ids);
        (own, found)
    });
    let ended = |_| ApiError::unavailable("the server is shutting down");
    let (own, found) = work.await.map_err(ended)?;
    *legacy = own;
    found.map(Some)
}

/// The completion of a request for no token.
fn only_prompt(prepared: &Prepared, model: &str) -> Completion {
    let prompt_tokens = prepared.ids.len();
    Completion {
        text: String::new(),
        token_ids: Vec::new(),
        finish_reason: FinishReason::Length,
        stop_reason: None,
        logprobs: None,
        usage: Usage { prompt_tokens, ..Usage::default() },
        timings: Timings::default(),
        seed: prepared.params.seed.unwrap_or(0),
        model: model.to_owned(),
    }
}

fn prepare(app: &App, mut fields: Fields) -> Result<(Prepared, Wanted), ApiError> {
    let served = app.served()?;
    types::take_model(&mut fields, served)?;
    types::refuse(&mut fields, &REFUSED)?;
    let format = Format::take(&mut fields)?;
    let streaming = Streaming::take(&mut fields)?;
    let mut params = sampling::take(&mut fields)?;
    sampling::take_without_effect(&mut fields)?;
    fields.neutral("best_of", "1", |v| v.as_f64() == Some(1.0))?;
    let echo = fields.flag("echo")?.unwrap_or(false);
    let least = usize::from(!echo || streaming.on);
    params.max_tokens = types::take_max_tokens(&mut fields, &["max_tokens"], least)?;
    params.logprobs = fields.count("logprobs")?;
    if let Some(got) = params.logprobs.filter(|most| *most > types::ALTERNATIVES_MAX) {
        let most = types::ALTERNATIVES_MAX;
        let message = format!("logprobs: wanted 0 to {most}, got {got}");
        return Err(ApiError::field("logprobs", message));
    }
    let given = fields.need(FIELD)?;
    fields.finish()?;
    let text = given.as_str().or_else(|| given.get(0)?.as_str()).map(str::to_owned);
    let ids = ids(served, given)?;
    let refused = |e: kie_core::Error| ApiError::engine(&e, FIELD);
    let echo = match (echo, text) {
        (false, _) => None,
        (true, Some(text)) => Some(text),
        (true, None) => Some(served.engine.detokenize(&ids, true).map_err(refused)?),
    };
    let (interval, logprobs) = (streaming.interval, params.logprobs);
    let prepared = Prepared { ids, params, interval, prompt_field: FIELD, format };
    Ok((prepared, Wanted { streaming, echo, logprobs }))
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

/// A prompt's text and log-probabilities, to stand in front.
type Front = Option<(String, Option<Value>)>;

fn whole(head: Head, done: &Completion, front: Front, logprobs: Option<Value>) -> Value {
    let (before, of_prompt) = front.unwrap_or_default();
    let logprobs = match (of_prompt, logprobs) {
        (Some(first), Some(second)) => Some(joined(first, second)),
        (first, second) => first.or(second),
    };
    let part = json!({"text": before + &done.text});
    chunk::whole(head, done, part, logprobs, types::finish(done, false))
}

/// What a chunk's choice holds.
#[derive(Serialize)]
struct Part<'a> {
    text: &'a str,
}

/// The stream of one answer.
struct Chunks {
    head: Head,
    streaming: Streaming,
    seed: Option<u64>,
    /// Where log-probabilities are wanted.
    engine: Option<Engine>,
    legacy: Legacy,
    /// The prompt, until it is sent.
    front: Front,
}

impl Chunks {
    fn chunk<'a>(&'a self, text: &'a str, logprobs: Option<Value>) -> Chunk<'a, Part<'a>> {
        Chunk::new(&self.head, self.streaming, Part { text }, logprobs)
    }
}

impl Writer for Chunks {
    fn begin(&mut self, out: &mut Vec<u8>) {
        if let Some((text, logprobs)) = self.front.take() {
            sse::data(out, &self.chunk(&text, logprobs));
        }
    }

    fn tokens(&mut self, tokens: &[Token], out: &mut Vec<u8>) {
        let text: String = tokens.iter().map(|token| token.text.as_str()).collect();
        if !text.is_empty() || self.engine.is_some() {
            let logprobs = self.engine.as_ref().map(|e| self.legacy.of_tokens(e, tokens));
            sse::data(out, &self.chunk(&text, logprobs));
        }
    }

    fn done(&mut self, done: &Completion, out: &mut Vec<u8>) {
        let last = self.chunk("", None).seeded(self.seed);
        last.end(out, self.streaming, done, types::finish(done, false));
    }

    fn failed(&mut self, error: &ApiError, out: &mut Vec<u8>) {
        sse::data(out, &error.openai());
    }
}
