//! `tools` and `tool_choice`, in OpenAI's forms; the other APIs bring theirs into these.

use std::collections::HashSet;

use kie_core::Grammar;
use serde_json::{json, Map, Value};

use crate::errors::ApiError;
use crate::request::{wanted_but, Fields};

/// Longest name of a tool, of Anthropic's API.
const NAME_MAX: usize = 128;

/// The tools of a request, each `{"type": "function", "function": {...}}`.
#[derive(Debug, Default)]
pub(crate) struct Tools {
    list: Vec<Value>,
    /// Which of them hold their arguments to the schema, whether they are called or not.
    pub(super) strict: Vec<bool>,
    /// Their schemas as a grammar takes them, and the paths of those; only where one is needed.
    pub(super) schemas: Vec<String>,
    paths: Vec<String>,
    /// The call that must be made.
    pub(crate) forced: Option<Forced>,
}

/// What must be called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Forced {
    Any,
    Tool(String),
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
        tools.chosen(fields.take("tool_choice"))
    }

    /// Adds one from `name`, `description` and its schema, which stands under `schema`; `at` is the
    /// path of the object. What else it has only tunes caching.
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
        let strict = match given.remove("strict") {
            None => false,
            Some(Value::Bool(strict)) => strict,
            Some(other) => {
                return Err(wanted_but(&format!("{at}.strict"), "true or false", &other));
            }
        };
        self.strict.push(strict);
        self.paths.push(format!("{at}.{schema}"));
        self.list.push(json!({"type": "function", "function": {
            "name": name, "description": description, "parameters": parameters,
        }}));
        Ok(())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub(crate) fn list(&self) -> &[Value] {
        &self.list
    }

    fn function(&self, name: &str) -> Option<&Value> {
        self.functions().find(|function| function["name"] == name)
    }

    pub(super) fn functions(&self) -> impl Iterator<Item = &Value> {
        self.list.iter().map(|tool| &tool["function"])
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.function(name).is_some()
    }

    /// The schema of a tool's arguments.
    pub(crate) fn parameters(&self, name: &str) -> Option<&Value> {
        self.function(name)?.get("parameters")
    }

    /// The same with what `tool_choice` says; none where it says so.
    ///
    /// # Errors
    /// 400.
    pub(crate) fn chosen(mut self, given: Option<Value>) -> Result<Self, ApiError> {
        let field = "tool_choice";
        self.forced = match given {
            None => None,
            Some(Value::String(choice)) => match choice.as_str() {
                "auto" => None,
                "none" => return Ok(Self::default()),
                "required" | "any" => Some(Forced::Any),
                _ => {
                    let wanted = "auto, none or required";
                    return Err(wanted_but(field, wanted, &Value::String(choice)));
                }
            },
            Some(Value::Object(choice)) => {
                let kind = choice.get("type").and_then(Value::as_str).unwrap_or_default();
                let named = choice.get("function").and_then(|f| f.get("name"));
                let named = named.or_else(|| choice.get("name")).and_then(Value::as_str);
                match (kind, named) {
                    ("auto", _) => None,
                    ("none", _) => return Ok(Self::default()),
                    ("any" | "required", None) => Some(Forced::Any),
                    (_, Some(name)) if self.names().contains(name) => {
                        Some(Forced::Tool(name.to_owned()))
                    }
                    (_, Some(name)) => {
                        let message = format!("{field}: there is no tool {name:?}");
                        return Err(ApiError::field(field, message));
                    }
                    (_, None) => {
                        let message = format!("{field}: wanted the name of a tool");
                        return Err(ApiError::field(field, message));
                    }
                }
            }
            Some(other) => return Err(wanted_but(field, "a string or an object", &other)),
        };
        if self.forced.is_some() && self.is_empty() {
            return Err(ApiError::field(field, format!("{field}: there are no tools")));
        }
        Ok(self)
    }

    /// Looks at the schemas that calls will be held to; `able`: the engine runs grammars. Without
    /// them strictness has no effect, and no call can be forced.
    ///
    /// # Errors
    /// 400 with the path of a schema that cannot be kept to.
    pub(crate) fn hold(&mut self, able: &kie_core::Result<()>) -> Result<(), ApiError> {
        if let Err(why) = able {
            if self.forced.is_some() {
                let message = format!("tool_choice: a forced call is not supported: {why}");
                return Err(ApiError::field("tool_choice", message));
            }
            self.strict.fill(false);
        }
        let forced = self.forced.is_some();
        let mut schemas = Vec::with_capacity(self.list.len());
        for (n, function) in self.functions().enumerate() {
            let held = forced || self.strict[n];
            let text = function["parameters"].to_string();
            let refused = |why: String| {
                let path = self.paths[n].as_str();
                ApiError::field(path, format!("{path}: {why}"))
            };
            let schema = held.then(|| Grammar::embedded(&text)).transpose().map_err(refused)?;
            schemas.push(schema.unwrap_or_default());
        }
        self.schemas = schemas;
        Ok(())
    }

    /// Names, for messages.
    fn names(&self) -> HashSet<&str> {
        self.functions().filter_map(|function| function["name"].as_str()).collect()
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
