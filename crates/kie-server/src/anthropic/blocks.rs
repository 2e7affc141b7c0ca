//! Content blocks into messages of OpenAI's form, of which `crate::messages` says more.

use serde_json::{json, Map, Value};

use crate::errors::ApiError;
use crate::messages::name_result;
use crate::request::wanted_but;

/// `system`: a string, or text blocks.
///
/// # Errors
/// 400 with the path of what is wrong; likewise below.
pub(super) fn system(given: Value) -> Result<String, ApiError> {
    let texts = match given {
        Value::String(text) => return Ok(text),
        other => plain(&other, "system")?,
    };
    Ok(texts.join("\n\n"))
}

/// Appends `messages` to what is there.
pub(super) fn messages(given: Value, out: &mut Vec<Value>) -> Result<(), ApiError> {
    let Value::Array(given) = given else {
        return Err(wanted_but("messages", "a list", &given));
    };
    if given.is_empty() {
        return Err(ApiError::field("messages", "messages: wanted at least one message, got none"));
    }
    for (n, message) in given.iter().enumerate() {
        let at = format!("messages[{n}]");
        let Value::Object(message) = message else {
            return Err(wanted_but(&at, "an object", message));
        };
        let extra = message.iter().find(|(name, value)| {
            !value.is_null() && !["role", "content", "cache_control"].contains(&name.as_str())
        });
        if let Some((name, _)) = extra {
            let path = format!("{at}.{name}");
            return Err(ApiError::field(&path, format!("{path}: unknown field")));
        }
        let content = match message.get("content").unwrap_or(&Value::Null) {
            Value::String(text) => &json!([{"type": "text", "text": text}]),
            content => content,
        };
        let path = format!("{at}.content");
        match message.get("role").and_then(Value::as_str) {
            Some("user") => user(&path, content, out)?,
            Some("assistant") => assistant(&path, content, out)?,
            _ => {
                let path = format!("{at}.role");
                let got = message.get("role").unwrap_or(&Value::Null);
                return Err(wanted_but(&path, "user or assistant", got));
            }
        }
    }
    Ok(())
}

/// Results of tools are messages of their own, before what the user says beside them.
fn user(at: &str, content: &Value, out: &mut Vec<Value>) -> Result<(), ApiError> {
    let mut texts: Vec<&str> = Vec::new();
    let mut results = false;
    for (path, kind, block) in blocks(at, content)? {
        match kind {
            "text" => texts.push(text(&path, block, "text")?),
            "tool_result" => {
                results = true;
                let id = text(&path, block, "tool_use_id")?;
                let said = match block.get("content") {
                    None | Some(Value::Null) => String::new(),
                    Some(Value::String(text)) => text.clone(),
                    Some(list) => plain(list, &format!("{path}.content"))?.join("\n"),
                };
                let mut result = json!({"role": "tool", "content": said, "tool_call_id": id});
                name_result(out, &mut result);
                out.push(result);
            }
            kind => return Err(unsupported(&path, kind)),
        }
    }
    if texts.is_empty() && results {
        return Ok(());
    }
    let said = texts.join("\n");
    // This API takes turns of the user that follow each other as one; templates may refuse them.
    match out.last_mut().filter(|last| last["role"] == "user") {
        Some(last) => {
            let before = last["content"].as_str().unwrap_or_default();
            last["content"] = format!("{before}\n{said}").into();
        }
        None => out.push(json!({"role": "user", "content": said})),
    }
    Ok(())
}

fn assistant(at: &str, content: &Value, out: &mut Vec<Value>) -> Result<(), ApiError> {
    let (mut texts, mut thoughts, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    for (path, kind, block) in blocks(at, content)? {
        match kind {
            "text" => texts.push(text(&path, block, "text")?),
            "thinking" => thoughts.push(text(&path, block, "thinking")?),
            "redacted_thinking" => {}
            "tool_use" => {
                let (id, name) = (text(&path, block, "id")?, text(&path, block, "name")?);
                let input = block.get("input").unwrap_or(&Value::Null);
                if !input.is_object() {
                    return Err(wanted_but(&format!("{path}.input"), "an object", input));
                }
                calls.push(json!({"id": id, "type": "function",
                    "function": {"name": name, "arguments": input.to_string()}}));
            }
            kind => return Err(unsupported(&path, kind)),
        }
    }
    let mut message = json!({"role": "assistant", "content": texts.concat()});
    if !thoughts.is_empty() {
        message["reasoning_content"] = thoughts.concat().into();
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    out.push(message);
    Ok(())
}

/// A block's path, its type, and itself.
type Block<'a> = (String, &'a str, &'a Map<String, Value>);

/// The blocks of a content.
fn blocks<'a>(at: &str, content: &'a Value) -> Result<Vec<Block<'a>>, ApiError> {
    let list = match content {
        Value::Array(list) => list,
        other => return Err(wanted_but(at, "a string or a list of blocks", other)),
    };
    let block = |(n, block): (usize, &'a Value)| {
        let path = format!("{at}[{n}]");
        let Value::Object(block) = block else { return Err(wanted_but(&path, "an object", block)) };
        match block.get("type").and_then(Value::as_str) {
            Some(kind) => Ok((path, kind, block)),
            None => {
                let path = format!("{path}.type");
                Err(ApiError::field(&path, format!("{path}: missing")))
            }
        }
    };
    list.iter().enumerate().map(block).collect()
}

/// Texts of a list that holds nothing else.
fn plain(list: &Value, at: &str) -> Result<Vec<String>, ApiError> {
    let texts = blocks(at, list)?.into_iter().map(|(path, kind, block)| match kind {
        "text" => text(&path, block, "text").map(str::to_owned),
        kind => Err(unsupported(&path, kind)),
    });
    texts.collect()
}

fn text<'a>(at: &str, block: &'a Map<String, Value>, name: &str) -> Result<&'a str, ApiError> {
    let found = block.get(name).unwrap_or(&Value::Null);
    found.as_str().ok_or_else(|| wanted_but(&format!("{at}.{name}"), "a string", found))
}

fn unsupported(at: &str, kind: &str) -> ApiError {
    let kind: String = kind.chars().take(40).collect();
    ApiError::field(at, format!("{at}: unsupported content: {kind}; text is taken"))
}
