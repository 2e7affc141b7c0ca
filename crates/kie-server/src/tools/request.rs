//! `tools` and `tool_choice`, in OpenAI's forms; the other APIs bring theirs into these.

use std::collections::HashSet;

use serde_json::{json, Map, Value};

use crate::errors::ApiError;
use crate::request::{kind_of, wanted_but, Fields};

/// Longest name of a tool, of Anthropic's API.
const NAME_MAX: usize = 128;

/// The tools of a request, each `{"type": "function", "function": {...}}`.
#[derive(Debug, Default)]
pub(crate) struct Tools(Vec<Value>);

/// Whether the model may call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Choice {
    Auto,
    None,
}

impl Tools {
    /// Takes `tools` and `tool_choice` of chat completions.
    ///
    /// # Errors
    /// 400 with the path of what is wrong.
    pub(crate) fn take(fields: &mut Fields) -> Result<Self, ApiError> {
        let given = fields.take("tools");
        let mut tools = Self::default();
        for (n, mut tool) in list("tools", given)?.into_iter().enumerate() {
            let at = format!("tools[{n}]");
            function_type(&at, &tool)?;
            let function = match tool.remove("function") {
                Some(Value::Object(function)) => function,
                got => return Err(missing(&format!("{at}.function"), "an object", got.as_ref())),
            };
            let inner = format!("{at}.function");
            tools.add(&inner, function, "parameters")?;
        }
        let choice = choice(fields.take("tool_choice"), &tools)?;
        Ok(if choice == Choice::None { Self::default() } else { tools })
    }

    /// Adds one from `name`, `description` and its schema, which stands under `schema`; `at` is the
    /// path of the object. What else it has only tunes caching or strictness.
    ///
    /// # Errors
    /// 400 with the path of what is wrong.
    pub(crate) fn add(
        &mut self,
        at: &str,
        mut given: Map<String, Value>,
        schema: &str,
    ) -> Result<(), ApiError> {
        given.retain(|_, value| !value.is_null());
        let path = format!("{at}.name");
        let name = match given.remove("name") {
            Some(Value::String(name)) => name,
            got => return Err(missing(&path, "a string", got.as_ref())),
        };
        let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'-';
        if !(1..=NAME_MAX).contains(&name.len()) || !name.bytes().all(plain) {
            let wanted = format!("1 to {NAME_MAX} letters, digits, _ and -");
            return Err(wanted_but(&path, &wanted, &Value::String(name)));
        }
        if self.has(&name) {
            return Err(ApiError::field(&path, format!("{path}: {name} is there twice")));
        }
        let description = match given.remove("description") {
            Some(Value::String(text)) => text,
            None => String::new(),
            Some(other) => {
                return Err(wanted_but(&format!("{at}.description"), "a string", &other));
            }
        };
        let parameters = match given.remove(schema) {
            Some(Value::Object(schema)) => schema,
            None => {
                json!({"type": "object", "properties": {}}).as_object().cloned().unwrap_or_default()
            }
            Some(other) => return Err(wanted_but(&format!("{at}.{schema}"), "an object", &other)),
        };
        self.0.push(json!({"type": "function", "function": {
            "name": name, "description": description, "parameters": parameters,
        }}));
        Ok(())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn list(&self) -> &[Value] {
        &self.0
    }

    fn function(&self, name: &str) -> Option<&Value> {
        self.0.iter().map(|tool| &tool["function"]).find(|function| function["name"] == name)
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.function(name).is_some()
    }

    /// The schema of a tool's arguments.
    pub(crate) fn parameters(&self, name: &str) -> Option<&Value> {
        self.function(name)?.get("parameters")
    }

    /// Names, for messages.
    fn names(&self) -> HashSet<&str> {
        self.0.iter().filter_map(|tool| tool["function"]["name"].as_str()).collect()
    }
}

/// A list of objects; absent is empty.
///
/// # Errors
/// 400 with the path of what is none.
pub(crate) fn list(name: &str, given: Option<Value>) -> Result<Vec<Map<String, Value>>, ApiError> {
    let list = match given {
        None => return Ok(Vec::new()),
        Some(Value::Array(list)) => list,
        Some(other) => return Err(wanted_but(name, "a list", &other)),
    };
    let objects = list.into_iter().enumerate().map(|(n, entry)| match entry {
        Value::Object(mut object) => {
            object.retain(|_, value| !value.is_null());
            Ok(object)
        }
        other => Err(wanted_but(&format!("{name}[{n}]"), "an object", &other)),
    });
    objects.collect()
}

/// A tool must be a function.
///
/// # Errors
/// 400 for what the API's own servers do.
pub(crate) fn function_type(at: &str, tool: &Map<String, Value>) -> Result<(), ApiError> {
    match tool.get("type") {
        Some(Value::String(kind)) if kind == "function" => Ok(()),
        got => Err(missing(&format!("{at}.type"), "\"function\"", got)),
    }
}

fn missing(path: &str, wanted: &str, got: Option<&Value>) -> ApiError {
    match got {
        Some(got) => wanted_but(path, wanted, got),
        None => ApiError::field(path, format!("{path}: missing; wanted {wanted}")),
    }
}

/// `tool_choice`: a forced call needs a grammar, which there is none yet.
///
/// # Errors
/// 400.
pub(crate) fn choice(given: Option<Value>, tools: &Tools) -> Result<Choice, ApiError> {
    let field = "tool_choice";
    let forced = |what: &str| {
        let message = format!("{field}: {what} is not supported; wanted auto or none");
        Err(ApiError::field(field, message))
    };
    match given {
        None => Ok(Choice::Auto),
        Some(Value::String(choice)) => match choice.as_str() {
            "auto" => Ok(Choice::Auto),
            "none" => Ok(Choice::None),
            "required" | "any" => forced("a forced call"),
            _ => Err(wanted_but(field, "auto or none", &Value::String(choice))),
        },
        Some(Value::Object(choice)) => {
            let kind = choice.get("type").and_then(Value::as_str).unwrap_or_default();
            let named = choice.get("function").and_then(|f| f.get("name"));
            let named = named.or_else(|| choice.get("name")).and_then(Value::as_str);
            match (kind, named) {
                ("auto", _) => Ok(Choice::Auto),
                ("none", _) => Ok(Choice::None),
                (_, Some(name)) if !tools.names().contains(name) => {
                    Err(ApiError::field(field, format!("{field}: there is no tool {name:?}")))
                }
                _ => forced("a forced call"),
            }
        }
        Some(other) => {
            let got = kind_of(&other);
            let message = format!("{field}: wanted a string or an object, got {got}");
            Err(ApiError::field(field, message))
        }
    }
}
