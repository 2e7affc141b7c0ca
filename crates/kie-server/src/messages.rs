//! Chat messages of OpenAI's form, checked. `crate::chat` writes them for a template.
//!
//! What comes out is an object with `role` (system, user, assistant or tool) and `content`, a
//! string; an assistant's may have `tool_calls`, whose arguments are text, and `reasoning_content`;
//! a tool's has `tool_call_id` and, where the call is known, `name`.

use serde_json::{json, Map, Value};

use crate::errors::ApiError;
use crate::request::{kind_of, wanted_but};

/// What a message may have besides role and content; none of it reaches a template.
const IGNORED: [&str; 7] =
    ["name", "annotations", "cache_control", "refusal", "audio", "function_call", "reasoning"];

/// Checks `messages` of chat completions.
///
/// # Errors
/// 400 with the path of what is wrong.
pub(crate) fn checked(given: Value) -> Result<Vec<Value>, ApiError> {
    let Value::Array(given) = given else {
        let got = kind_of(&given);
        return Err(ApiError::field("messages", format!("messages: wanted a list, got {got}")));
    };
    if given.is_empty() {
        return Err(ApiError::field("messages", "messages: wanted at least one message, got none"));
    }
    let mut messages: Vec<Value> = Vec::with_capacity(given.len());
    for (at, message) in given.into_iter().enumerate() {
        let mut message = one(&format!("messages[{at}]"), message)?;
        name_result(&messages, &mut message);
        messages.push(message);
    }
    Ok(messages)
}

/// Gives a tool's result the name of the tool that was called; some templates write it.
pub(crate) fn name_result(before: &[Value], result: &mut Value) {
    let Some(id) = result.get("tool_call_id").filter(|_| result["role"] == "tool") else { return };
    let calls = before.iter().rev().filter_map(|m| m.get("tool_calls")?.as_array()).flatten();
    let name =
        calls.into_iter().find(|call| &call["id"] == id).map(|c| c["function"]["name"].clone());
    if let Some(name) = name {
        result["name"] = name;
    }
}

fn one(at: &str, message: Value) -> Result<Value, ApiError> {
    let Value::Object(mut message) = message else {
        let got = kind_of(&message);
        return Err(ApiError::field(at, format!("{at}: wanted an object, got {got}")));
    };
    let role = match message.remove("role") {
        Some(Value::String(role)) => role,
        got => {
            let got = got.as_ref().map_or("nothing", kind_of);
            let param = format!("{at}.role");
            return Err(ApiError::field(param, format!("{at}.role: wanted a string, got {got}")));
        }
    };
    let role = match role.as_str() {
        "developer" | "system" => "system",
        "user" => "user",
        "assistant" => "assistant",
        "tool" => "tool",
        _ => {
            let wanted = "system, developer, user, assistant or tool";
            let message = format!("{at}.role: wanted {wanted}, got {role:?}");
            return Err(ApiError::field(format!("{at}.role"), message));
        }
    };
    let content = match message.remove("content") {
        None | Some(Value::Null) if role == "assistant" => String::new(),
        content => text_of(&format!("{at}.content"), content.unwrap_or(Value::Null))?,
    };
    let mut out = json!({"role": role, "content": content});
    if role == "assistant" {
        if let Some(calls) = message.remove("tool_calls").filter(|calls| !calls.is_null()) {
            let calls = tool_calls(&format!("{at}.tool_calls"), calls)?;
            if !calls.is_empty() {
                out["tool_calls"] = calls.into();
            }
        }
    }
    let thought = message.remove("reasoning_content");
    if let (Some(Value::String(thought)), "assistant") = (thought, role) {
        out["reasoning_content"] = thought.into();
    }
    if role == "tool" {
        let path = format!("{at}.tool_call_id");
        match message.remove("tool_call_id") {
            Some(Value::String(id)) => out["tool_call_id"] = id.into(),
            got => return Err(missing(&path, "a string", got.as_ref())),
        }
    }
    known_only(at, &message)?;
    Ok(out)
}

/// Calls that an assistant made: id, name, and arguments as text.
fn tool_calls(at: &str, given: Value) -> Result<Vec<Value>, ApiError> {
    let Value::Array(calls) = given else { return Err(wanted_but(at, "a list", &given)) };
    let one = |(n, call): (usize, &Value)| {
        let at = format!("{at}[{n}]");
        let path = |name: &str| format!("{at}.{name}");
        let text = |value: &Value, name: &str| match value.as_str() {
            Some(text) => Ok(text.to_owned()),
            None => Err(missing(&path(name), "a string", Some(value).filter(|v| !v.is_null()))),
        };
        if !call.is_object() {
            return Err(wanted_but(&at, "an object", call));
        }
        if !call["type"].is_null() && call["type"] != "function" {
            return Err(wanted_but(&path("type"), "\"function\"", &call["type"]));
        }
        let id = text(&call["id"], "id")?;
        let name = text(&call["function"]["name"], "function.name")?;
        let arguments = text(&call["function"]["arguments"], "function.arguments")?;
        Ok(json!({"id": id, "type": "function",
            "function": {"name": name, "arguments": arguments}}))
    };
    calls.iter().enumerate().map(one).collect()
}

fn missing(path: &str, wanted: &str, got: Option<&Value>) -> ApiError {
    match got {
        Some(got) => wanted_but(path, wanted, got),
        None => ApiError::field(path, format!("{path}: missing; wanted {wanted}")),
    }
}

fn known_only(at: &str, rest: &Map<String, Value>) -> Result<(), ApiError> {
    for (name, value) in rest {
        if !value.is_null() && !IGNORED.contains(&name.as_str()) {
            let param = format!("{at}.{name}");
            return Err(ApiError::field(&param, format!("{param}: unknown field")));
        }
    }
    Ok(())
}

/// Text of a content: a string, or a list of text parts, which are joined.
///
/// # Errors
/// 400 for images, audio, files and what no API has.
pub(crate) fn text_of(at: &str, content: Value) -> Result<String, ApiError> {
    let parts = match content {
        Value::String(text) => return Ok(text),
        Value::Array(parts) => parts,
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => {
            let got = kind_of(&content);
            let message = format!("{at}: wanted a string or a list of parts, got {got}");
            return Err(ApiError::field(at, message));
        }
    };
    let mut text = String::new();
    for (n, part) in parts.iter().enumerate() {
        let piece = match part.get("type").and_then(Value::as_str) {
            Some("text" | "input_text" | "output_text") => part.get("text").and_then(Value::as_str),
            Some("refusal") => part.get("refusal").and_then(Value::as_str),
            kind => {
                let kind = kind.unwrap_or("no type");
                let message = format!("{at}[{n}]: unsupported content: {kind}; text is taken");
                return Err(ApiError::field(at, message));
            }
        };
        let wanted = || ApiError::field(at, format!("{at}[{n}].text: wanted a string"));
        text.push_str(piece.ok_or_else(wanted)?);
    }
    Ok(text)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn calls_and_their_results() {
        let call = json!({"id": "c1", "type": "function",
            "function": {"name": "add", "arguments": "{}"}});
        let given = json!([
            {"role": "developer", "content": "Be brief."},
            {"role": "assistant", "content": null, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "2"}]},
            {"role": "user", "content": [
                {"type": "text", "text": "a"}, {"type": "text", "text": "b"},
            ]},
        ]);
        let found = checked(given).unwrap();
        assert_eq!(found[0], json!({"role": "system", "content": "Be brief."}));
        let wanted = json!({"role": "assistant", "content": "", "tool_calls": [call]});
        assert_eq!(found[1], wanted);
        let result = json!({"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"});
        assert_eq!(found[2], result);
        assert_eq!(found[3], json!({"role": "user", "content": "ab"}));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let wrong = [
            (json!("hi"), "messages"),
            (json!([]), "messages"),
            (json!([3]), "messages[0]"),
            (json!([{"content": "x"}]), "messages[0].role"),
            (json!([{"role": "robot", "content": "x"}]), "messages[0].role"),
            (json!([{"role": "user"}]), "messages[0].content"),
            (json!([{"role": "user", "content": 3}]), "messages[0].content"),
            (
                json!([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
                "messages[0].content",
            ),
            (json!([{"role": "user", "content": "x", "foo": 1}]), "messages[0].foo"),
            (json!([{"role": "tool", "content": "x"}]), "messages[0].tool_call_id"),
            (
                json!([{"role": "assistant", "tool_calls": [{"id": "1", "function": {}}]}]),
                "messages[0].tool_calls[0].function.name",
            ),
            (json!([{"role": "user", "content": "x", "tool_calls": []}]), "messages[0].tool_calls"),
        ];
        for (given, param) in wrong {
            let error = checked(given).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{}", error.message);
        }
    }
}
