//! Chat messages, from what the APIs send to what a template takes.
//!
//! Invariant: what a template cannot say is not lost. System text goes before the first user turn
//! where the template would drop or refuse it.

use kie_core::Engine;
use serde_json::{json, Map, Value};

use crate::app::Served;
use crate::errors::ApiError;
use crate::request::kind_of;

/// Text that no template contains.
const PROBE: &str = "qZ7probe";
/// What a message may have besides role and content; none of it reaches a template.
const IGNORED: [&str; 8] = [
    "name",
    "annotations",
    "cache_control",
    "refusal",
    "audio",
    "function_call",
    "reasoning_content",
    "reasoning",
];

/// What a template does with messages.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Abilities {
    /// Writes a system message.
    pub(crate) system: bool,
}

impl Abilities {
    /// Tries it out.
    pub(crate) fn of(engine: &Engine) -> Self {
        let probe =
            [json!({"role": "system", "content": PROBE}), json!({"role": "user", "content": "x"})];
        let said = engine.apply_chat_template(&probe, true);
        Self { system: said.is_ok_and(|text| text.contains(PROBE)) }
    }
}

/// Checks `messages` of chat completions and writes them for a template of `abilities`.
///
/// # Errors
/// 400 with the path of what is wrong.
pub(crate) fn for_template(given: Value, abilities: Abilities) -> Result<Vec<Value>, ApiError> {
    let Value::Array(given) = given else {
        let got = kind_of(&given);
        return Err(ApiError::field("messages", format!("messages: wanted a list, got {got}")));
    };
    if given.is_empty() {
        return Err(ApiError::field("messages", "messages: wanted at least one message, got none"));
    }
    let mut messages = Vec::with_capacity(given.len());
    for (at, message) in given.into_iter().enumerate() {
        messages.push(one(&format!("messages[{at}]"), message)?);
    }
    Ok(fold_system(messages, abilities))
}

/// Ids of messages that [`for_template`] wrote.
///
/// # Errors
/// 400 for what the template or the tokenizer refuses.
pub(crate) fn encode(served: &Served, messages: &[Value]) -> Result<Vec<u32>, ApiError> {
    let refused = |e: kie_core::Error| ApiError::engine(&e, "messages");
    let text = served.engine.apply_chat_template(messages, true).map_err(refused)?;
    served.engine.tokenize(&text, false).map_err(refused)
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
        _ => {
            let wanted = "system, developer, user or assistant";
            let message = format!("{at}.role: wanted {wanted}, got {role:?}");
            return Err(ApiError::field(format!("{at}.role"), message));
        }
    };
    let content = match message.remove("content") {
        None | Some(Value::Null) if role == "assistant" => String::new(),
        content => text_of(&format!("{at}.content"), content.unwrap_or(Value::Null))?,
    };
    known_only(at, &message)?;
    Ok(json!({"role": role, "content": content}))
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

/// System text in front of the first user turn, where the template has no place for it.
fn fold_system(messages: Vec<Value>, abilities: Abilities) -> Vec<Value> {
    let is = |message: &Value, role: &str| message["role"] == role;
    if abilities.system || !messages.iter().any(|m| is(m, "system")) {
        return messages;
    }
    let (system, mut rest): (Vec<Value>, Vec<Value>) =
        messages.into_iter().partition(|m| is(m, "system"));
    let texts: Vec<&str> = system.iter().filter_map(|m| m["content"].as_str()).collect();
    let text = texts.join("\n\n");
    match rest.iter_mut().find(|m| is(m, "user")) {
        Some(user) => {
            let said = user["content"].as_str().unwrap_or_default();
            user["content"] = format!("{text}\n\n{said}").into();
        }
        None => rest.insert(0, json!({"role": "user", "content": text})),
    }
    rest
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn system_text_goes_before_the_first_user_turn() {
        let given = json!([
            {"role": "developer", "content": "Be brief."},
            {"role": "assistant", "content": null},
            {"role": "user", "content": [
                {"type": "text", "text": "a"}, {"type": "text", "text": "b"},
            ]},
        ]);
        let folded = for_template(given.clone(), Abilities { system: false }).unwrap();
        assert_eq!(folded.len(), 2);
        assert_eq!(folded[0], json!({"role": "assistant", "content": ""}));
        assert_eq!(folded[1], json!({"role": "user", "content": "Be brief.\n\nab"}));
        let kept = for_template(given, Abilities { system: true }).unwrap();
        assert_eq!(kept[0], json!({"role": "system", "content": "Be brief."}));
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
        ];
        for (given, param) in wrong {
            let error = for_template(given, Abilities::default()).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{}", error.message);
        }
    }
}
