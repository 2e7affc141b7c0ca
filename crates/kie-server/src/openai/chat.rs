//! POST `/v1/chat/completions`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::Json;
use kie_core::Engine;
use serde::Serialize;
use serde_json::{json, Value};

use super::chunk::{self, Chunk};
use super::logprobs;
use super::types::{self, Head, Streaming};
use crate::app::App;
use crate::errors::ApiError;
use crate::generate::{Event, Generation, Prepared};
use crate::request::Fields;
use crate::{messages, sampling, sse};

/// Fields that change the answer and have nothing behind them yet.
const REFUSED: [&str; 9] = [
    "tools",
    "tool_choice",
    "functions",
    "function_call",
    "structured_outputs",
    "grammar",
    "speculate",
    "prediction",
    "audio",
];

/// The handler.
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let (body, caller) = super::received(&app, request).await?;
    let (prepared, streaming) = super::prepared(&app, body, prepare).await?;
    let (seed, with_logprobs) = (prepared.params.seed, prepared.params.logprobs.is_some());
    let served = app.served()?;
    let engine = with_logprobs.then(|| served.engine.clone());
    let mut generation = Generation::start(&app, caller, prepared)?;
    if streaming.on {
        generation.first_word().await?;
        let head = Head::new(served, "chatcmpl", "chat.completion.chunk");
        return Ok(sse::response(Chunks {
            head,
            generation,
            streaming,
            seed,
            engine,
            begun: false,
        }));
    }
    let head = Head::new(served, "chatcmpl", "chat.completion");
    let (tokens, done) = generation.collect().await?;
    let logprobs = engine.map(|engine| logprobs::chat(&engine, &tokens));
    let message = json!({"role": "assistant", "content": done.text, "refusal": null});
    let part = json!({"message": message});
    Ok(Json(chunk::whole(head, &done, part, logprobs)).into_response())
}

fn prepare(app: &App, mut fields: Fields) -> Result<(Prepared, Streaming), ApiError> {
    let served = app.served()?;
    types::take_model(&mut fields, served)?;
    types::refuse(&mut fields, &REFUSED)?;
    let text = |v: &Value| v["type"] == "text";
    fields.neutral("response_format", "{\"type\": \"text\"}", text)?;
    let streaming = Streaming::take(&mut fields)?;
    let mut params = sampling::take(&mut fields)?;
    sampling::take_without_effect(&mut fields)?;
    let names = ["max_completion_tokens", "max_tokens"];
    params.max_tokens = types::take_max_tokens(&mut fields, &names, 1)?;
    params.logprobs = take_logprobs(&mut fields)?;
    let given = fields.need("messages")?;
    fields.finish()?;
    let messages = messages::for_template(given, served.template)?;
    let ids = messages::encode(served, &messages)?;
    let interval = streaming.interval;
    Ok((Prepared { ids, params, interval, prompt_field: "messages" }, streaming))
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
}

/// The stream of one answer.
struct Chunks {
    head: Head,
    generation: Generation,
    streaming: Streaming,
    seed: Option<u64>,
    /// Where log-probabilities are wanted.
    engine: Option<Engine>,
    begun: bool,
}

impl Chunks {
    fn chunk<'a>(&'a self, delta: Delta<'a>, logprobs: Option<Value>) -> Chunk<'a, Part<'a>> {
        Chunk::new(&self.head, Part { delta }, logprobs)
    }

    fn begin(&mut self, out: &mut Vec<u8>) {
        if !std::mem::replace(&mut self.begun, true) {
            let delta = Delta { role: Some("assistant"), content: Some("") };
            sse::data(out, &self.chunk(delta, None).seeded(self.seed));
        }
    }
}

impl sse::Frames for Chunks {
    async fn next(&mut self, out: &mut Vec<u8>) -> bool {
        if !self.begun && !self.generation.has_news() {
            self.begin(out);
            return true;
        }
        let event = self.generation.next().await;
        self.begin(out);
        match event {
            Event::Tokens(tokens) => {
                let text: String = tokens.iter().map(|token| token.text.as_str()).collect();
                if !text.is_empty() || self.engine.is_some() {
                    let delta = Delta { role: None, content: Some(&text) };
                    let engine = self.engine.as_ref();
                    let logprobs = engine.map(|e| logprobs::chat(e, &tokens));
                    sse::data(out, &self.chunk(delta, logprobs));
                }
                true
            }
            Event::Done(done) => {
                let last = self.chunk(Delta::default(), None).seeded(self.seed);
                last.end(out, self.streaming, &done);
                false
            }
            Event::Failed(error) => {
                sse::data(out, &error.openai());
                false
            }
        }
    }
}
