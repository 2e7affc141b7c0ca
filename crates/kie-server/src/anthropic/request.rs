//! The fields of a request.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::blocks;
use crate::app::App;
use crate::chat::{Answer, Conversation, Encoded};
use crate::errors::ApiError;
use crate::format::Format;
use crate::generate::Prepared;
use crate::openai::types;
use crate::request::{wanted_but, Fields};
use crate::sampling;
use crate::tools::{list, Tools};

/// A request that may be submitted.
pub(super) struct Asked {
    pub(super) prepared: Prepared,
    pub(super) stream: bool,
    pub(super) answer: Answer,
}

/// Fields of `/v1/messages`.
pub(super) fn prepare(app: &App, mut fields: Fields) -> Result<Asked, ApiError> {
    let served = app.served()?;
    types::take_model(&mut fields, served)?;
    let stream = fields.flag("stream")?.unwrap_or(false);
    let interval = fields.count("stream_interval")?;
    if interval == Some(0) {
        let message = "stream_interval: wanted at least 1, got 0";
        return Err(ApiError::field("stream_interval", message));
    }
    let mut params = sampling::take(&mut fields)?;
    params.max_tokens = types::take_max_tokens(&mut fields, &["max_tokens"], 1)?;
    let stops = list_of_text(&mut fields, "stop_sequences")?;
    params.stop.extend(stops);
    let talk = conversation(app, &mut fields)?;
    fields.neutral("service_tier", "\"auto\"", |v| v == "auto" || v == "standard_only")?;
    fields.finish()?;
    let Encoded { ids, answer, format } = talk.encode(served, "messages")?;
    let prepared = Prepared { ids, params, interval, prompt_field: "messages", format };
    Ok(Asked { prepared, stream, answer })
}

/// Fields of `/v1/messages/count_tokens`: the prompt's tokens.
pub(super) fn count(app: &App, mut fields: Fields) -> Result<usize, ApiError> {
    let served = app.served()?;
    types::take_model(&mut fields, served)?;
    let talk = conversation(app, &mut fields)?;
    fields.finish()?;
    Ok(talk.encode(served, "messages")?.ids.len())
}

/// What decides the prompt, and what both paths take without effect.
fn conversation(app: &App, fields: &mut Fields) -> Result<Conversation, ApiError> {
    let served = app.served()?;
    for name in ["metadata", "cache_control", "context_management", "diagnostics"] {
        fields.object(name)?;
    }
    fields.text("user_profile_id")?;
    fields.neutral("speed", "\"standard\"", |v| v == "standard")?;
    let empty = |v: &Value| v.as_array().is_some_and(Vec::is_empty);
    fields.neutral("mcp_servers", "an empty list", empty)?;
    let format = output_config(fields)?;
    let thinking = thinking(fields, served.chat.reasons())?;
    let tools = tools(fields)?;
    let mut messages = Vec::new();
    if let Some(system) = fields.take("system") {
        let text = blocks::system(system)?;
        if !text.is_empty() {
            messages.push(serde_json::json!({"role": "system", "content": text}));
        }
    }
    let given = fields.need("messages")?;
    blocks::messages(given, &mut messages)?;
    // An answer that the client has begun is gone on with.
    let begun =
        messages.last().is_some_and(|m| m["role"] == "assistant" && m["tool_calls"].is_null());
    let begun = if begun { messages.pop() } else { None };
    let begun = begun.and_then(|m| m["content"].as_str().map(str::to_owned)).unwrap_or_default();
    let tools = Arc::new(tools);
    Ok(Conversation { messages, tools, begun, thinking, effort: None, format })
}

fn list_of_text(fields: &mut Fields, name: &str) -> Result<Vec<String>, ApiError> {
    match fields.take(name) {
        None => Ok(Vec::new()),
        Some(Value::Array(list)) => {
            let texts: Option<Vec<String>> =
                list.iter().map(|t| t.as_str().map(str::to_owned)).collect();
            texts.ok_or_else(|| ApiError::field(name, format!("{name}: wanted a list of strings")))
        }
        Some(other) => Err(wanted_but(name, "a list of strings", &other)),
    }
}

/// `thinking`: on or off where the template has a switch. A budget is not kept.
fn thinking(fields: &mut Fields, reasons: bool) -> Result<Option<bool>, ApiError> {
    let name = "thinking";
    let Some(given) = fields.object(name)? else { return Ok(None) };
    match given.get("type").and_then(Value::as_str) {
        Some("disabled") => Ok(Some(false)),
        Some("adaptive") => Ok(None),
        Some("enabled") if reasons => Ok(Some(true)),
        Some("enabled") => {
            Err(ApiError::field(name, "thinking: this model has none; wanted disabled or adaptive"))
        }
        _ => Err(ApiError::field("thinking.type", "thinking.type: wanted disabled or adaptive")),
    }
}

/// `output_config`: how the text is to look; the effort has no effect.
fn output_config(fields: &mut Fields) -> Result<Option<Format>, ApiError> {
    let name = "output_config";
    let mut format = None;
    for (key, value) in fields.object(name)?.unwrap_or_default() {
        let path = format!("{name}.{key}");
        match key.as_str() {
            _ if value.is_null() => {}
            "effort" => {}
            "format" => format = Format::of(&path, value)?,
            _ => return Err(ApiError::field(&path, format!("{path}: not supported"))),
        }
    }
    Ok(format)
}

fn tools(fields: &mut Fields) -> Result<Tools, ApiError> {
    let mut tools = Tools::default();
    for (n, tool) in list("tools", fields.take("tools"))?.into_iter().enumerate() {
        let at = format!("tools[{n}]");
        own(&at, &tool)?;
        tools.add(&at, tool, "input_schema")?;
    }
    tools.chosen(fields.take("tool_choice"))
}

/// A tool that the client runs, not the API's own servers.
fn own(at: &str, tool: &Map<String, Value>) -> Result<(), ApiError> {
    match tool.get("type") {
        None => Ok(()),
        Some(kind) if kind == "custom" => Ok(()),
        Some(kind) => Err(wanted_but(&format!("{at}.type"), "\"custom\"", kind)),
    }
}
