//! The fields of a request.

use std::sync::Arc;

use serde_json::{json, Map, Value};

use super::items;
use crate::app::App;
use crate::chat::{Answer, Conversation, Encoded};
use crate::errors::ApiError;
use crate::format::Format;
use crate::generate::Prepared;
use crate::openai::types;
use crate::request::{wanted_but, Fields};
use crate::sampling;
use crate::tools::{function_type, list, Tools};

/// Fields that change the answer and have nothing behind them.
const REFUSED: [&str; 5] =
    ["previous_response_id", "conversation", "prompt", "max_tool_calls", "moderation"];

/// A request that may be submitted.
pub(super) struct Asked {
    pub(super) prepared: Prepared,
    pub(super) stream: bool,
    pub(super) answer: Answer,
    /// What the response says again.
    pub(super) echoed: Map<String, Value>,
}

pub(super) fn prepare(app: &App, mut fields: Fields) -> Result<Asked, ApiError> {
    let served = app.served()?;
    types::take_model(&mut fields, served)?;
    types::refuse(&mut fields, &REFUSED)?;
    let mut echoed = Map::new();
    for name in ["instructions", "tools", "tool_choice", "reasoning", "metadata"] {
        let given = fields.get(name).cloned();
        echoed.insert(name.to_owned(), given.unwrap_or_else(|| absent(name)));
    }
    for name in ["temperature", "top_p", "max_output_tokens", "user", "prompt_cache_key"] {
        echoed.insert(name.to_owned(), fields.get(name).cloned().unwrap_or_default());
    }
    let parallel = fields.get("parallel_tool_calls").cloned().unwrap_or(true.into());
    echoed.insert("parallel_tool_calls".to_owned(), parallel);

    let streaming = types::Streaming::take(&mut fields)?;
    let mut params = sampling::take(&mut fields)?;
    include(&mut fields)?;
    let effort = reasoning(&mut fields)?;
    let own = fields.get("text").and_then(|text| text.get("format")).cloned();
    let own = own.filter(|format| !format.is_null());
    let own = own.unwrap_or_else(|| json!({"type": "text"}));
    echoed.insert("text".to_owned(), json!({"format": own}));
    let format = text(&mut fields)?.or(Format::take(&mut fields)?);
    fields.ignore(&["client_metadata"]);
    sampling::take_without_effect(&mut fields)?;
    fields.neutral("top_logprobs", "0", |v| v.as_f64() == Some(0.0))?;
    params.max_tokens = types::take_max_tokens(&mut fields, &["max_output_tokens"], 1)?;
    let tools = Arc::new(tools(&mut fields)?);
    let mut messages = Vec::new();
    if let Some(text) = fields.text("instructions")? {
        messages.push(json!({"role": "system", "content": text}));
    }
    items::messages(fields.need("input")?, &mut messages)?;
    fields.finish()?;
    let talk = Conversation { messages, tools, effort, format, ..Conversation::default() };
    let Encoded { ids, answer, format } = talk.encode(served, "input")?;
    let interval = streaming.interval;
    let prepared = Prepared { ids, params, interval, prompt_field: "input", format };
    Ok(Asked { prepared, stream: streaming.on, answer, echoed })
}

/// What a response says of a field that the request had not.
fn absent(name: &str) -> Value {
    match name {
        "tools" => json!([]),
        "tool_choice" => json!("auto"),
        "metadata" => json!({}),
        "reasoning" => json!({"effort": null, "summary": null}),
        _ => Value::Null,
    }
}

/// `include`: encrypted reasoning may be asked for and is never there; nothing else is known.
fn include(fields: &mut Fields) -> Result<(), ApiError> {
    let known = |v: &Value| v == "reasoning.encrypted_content";
    let wanted = "a list of nothing but \"reasoning.encrypted_content\"";
    fields.neutral("include", wanted, |v| v.as_array().is_some_and(|all| all.iter().all(known)))
}

/// `reasoning`: its effort, for templates that have one.
fn reasoning(fields: &mut Fields) -> Result<Option<String>, ApiError> {
    let mut effort = None;
    for (name, value) in fields.object("reasoning")?.unwrap_or_default() {
        match (name.as_str(), value) {
            (_, Value::Null) => {}
            ("effort", Value::String(given)) => effort = Some(given),
            ("summary" | "generate_summary", Value::String(_)) => {}
            ("effort" | "summary" | "generate_summary", other) => {
                return Err(wanted_but(&format!("reasoning.{name}"), "a string", &other));
            }
            _ => {
                let path = format!("reasoning.{name}");
                return Err(ApiError::field(&path, format!("{path}: unknown field")));
            }
        }
    }
    Ok(effort)
}

/// `text`: how the answer is to look.
fn text(fields: &mut Fields) -> Result<Option<Format>, ApiError> {
    let mut format = None;
    for (name, value) in fields.object("text")?.unwrap_or_default() {
        match name.as_str() {
            _ if value.is_null() => {}
            "verbosity" if value.is_string() => {}
            "format" => format = Format::of("text.format", value)?,
            _ => {
                let path = format!("text.{name}");
                return Err(ApiError::field(&path, format!("{path}: unknown field")));
            }
        }
    }
    Ok(format)
}

/// `tools` in the flat form of this API.
fn tools(fields: &mut Fields) -> Result<Tools, ApiError> {
    let mut tools = Tools::default();
    for (n, tool) in list("tools", fields.take("tools"))?.into_iter().enumerate() {
        let at = format!("tools[{n}]");
        function_type(&at, &tool)?;
        tools.add(&at, tool, "parameters")?;
    }
    tools.chosen(fields.take("tool_choice"))
}
