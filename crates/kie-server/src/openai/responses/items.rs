//! `input`: text, or items, into messages of the form that `crate::messages` describes.

use serde_json::{json, Map, Value};

use crate::errors::ApiError;
use crate::messages::{name_result, text_of};
use crate::request::wanted_but;

/// Appends `input` to what is there.
///
/// # Errors
/// 400 with the path of what is wrong.
pub(super) fn messages(given: Value, out: &mut Vec<Value>) -> Result<(), ApiError> {
    let items = match given {
        Value::String(text) => {
            out.push(json!({"role": "user", "content": text}));
            return Ok(());
        }
        Value::Array(items) => items,
        other => return Err(wanted_but("input", "a string or a list of items", &other)),
    };
    if items.is_empty() {
        return Err(ApiError::field("input", "input: wanted at least one item, got none"));
    }
    // Of the turn that comes next.
    let mut thought = String::new();
    for (n, item) in items.into_iter().enumerate() {
        let at = format!("input[{n}]");
        let Value::Object(mut item) = item else {
            return Err(wanted_but(&at, "an object", &item));
        };
        let kind = match item.remove("type") {
            None | Some(Value::Null) => "message".to_owned(),
            Some(Value::String(kind)) => kind,
            Some(other) => return Err(wanted_but(&format!("{at}.type"), "a string", &other)),
        };
        match kind.as_str() {
            "message" => message(&at, item, &mut thought, out)?,
            "function_call" => call(&at, &item, &mut thought, out)?,
            "function_call_output" => result(&at, item, out)?,
            "reasoning" => thought.push_str(&reasoning(&item)),
            _ => {
                let path = format!("{at}.type");
                let kind: String = kind.chars().take(40).collect();
                return Err(ApiError::field(&path, format!("{path}: unsupported item: {kind}")));
            }
        }
    }
    Ok(())
}

fn message(
    at: &str,
    mut item: Map<String, Value>,
    thought: &mut String,
    out: &mut Vec<Value>,
) -> Result<(), ApiError> {
    let role = match item.get("role").and_then(Value::as_str) {
        Some("developer" | "system") => "system",
        Some("user") => "user",
        Some("assistant") => "assistant",
        _ => {
            let got = item.get("role").unwrap_or(&Value::Null);
            let wanted = "system, developer, user or assistant";
            return Err(wanted_but(&format!("{at}.role"), wanted, got));
        }
    };
    let known = ["role", "content", "id", "status", "phase"];
    if let Some(name) = item.iter().find(|(n, v)| !v.is_null() && !known.contains(&n.as_str())) {
        let path = format!("{at}.{}", name.0);
        return Err(ApiError::field(&path, format!("{path}: unknown field")));
    }
    let content = item.remove("content").unwrap_or_default();
    let text = text_of(&format!("{at}.content"), content)?;
    let mut message = json!({"role": role, "content": text});
    if role == "assistant" && !thought.is_empty() {
        message["reasoning_content"] = std::mem::take(thought).into();
    }
    out.push(message);
    Ok(())
}

/// Calls that follow each other, or an assistant's text, are of one turn.
fn call(
    at: &str,
    item: &Map<String, Value>,
    thought: &mut String,
    out: &mut Vec<Value>,
) -> Result<(), ApiError> {
    let id = text(at, item, "call_id")?;
    let (name, arguments) = (text(at, item, "name")?, text(at, item, "arguments")?);
    let call = json!({"id": id, "type": "function",
        "function": {"name": name, "arguments": arguments}});
    match out.last_mut().filter(|last| last["role"] == "assistant" && thought.is_empty()) {
        Some(last) => match last.get_mut("tool_calls").and_then(Value::as_array_mut) {
            Some(calls) => calls.push(call),
            None => last["tool_calls"] = json!([call]),
        },
        None => {
            let mut message = json!({"role": "assistant", "content": "", "tool_calls": [call]});
            if !thought.is_empty() {
                message["reasoning_content"] = std::mem::take(thought).into();
            }
            out.push(message);
        }
    }
    Ok(())
}

fn result(at: &str, mut item: Map<String, Value>, out: &mut Vec<Value>) -> Result<(), ApiError> {
    let id = text(at, &item, "call_id")?;
    let said = text_of(&format!("{at}.output"), item.remove("output").unwrap_or_default())?;
    let mut result = json!({"role": "tool", "content": said, "tool_call_id": id});
    name_result(out, &mut result);
    out.push(result);
    Ok(())
}

/// What was thought, where it is not encrypted.
fn reasoning(item: &Map<String, Value>) -> String {
    let parts = item.get("content").and_then(Value::as_array).into_iter().flatten();
    parts.filter_map(|part| part["text"].as_str()).collect()
}

fn text(at: &str, item: &Map<String, Value>, name: &str) -> Result<String, ApiError> {
    let found = item.get(name).unwrap_or(&Value::Null);
    let wrong = || wanted_but(&format!("{at}.{name}"), "a string", found);
    found.as_str().map(str::to_owned).ok_or_else(wrong)
}
