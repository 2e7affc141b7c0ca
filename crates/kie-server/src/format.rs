//! How the text of an answer must look: `response_format`, vLLM's `structured_outputs`, `grammar`,
//! and what the other APIs have for it, in one form.

use kie_core::Grammar;
use serde_json::{Map, Value};

use crate::errors::ApiError;
use crate::request::{wanted_but, Fields};

/// What the text must be, and the field that says so.
#[derive(Debug, Clone)]
pub(crate) struct Format {
    pub(crate) grammar: Grammar,
    pub(crate) field: String,
}

impl Format {
    fn new(field: &str, grammar: Grammar) -> Option<Self> {
        Some(Self { grammar, field: field.to_owned() })
    }

    /// Takes the fields of chat completions and completions.
    ///
    /// # Errors
    /// 400 with the path of what is wrong, or of the second that is there.
    pub(crate) fn take(fields: &mut Fields) -> Result<Option<Self>, ApiError> {
        let mut found = None;
        for (name, read) in [
            ("response_format", of_response as fn(&str, Value) -> _),
            ("structured_outputs", of_vllm),
            ("grammar", of_grammar),
        ] {
            let Some(given) = fields.take(name) else { continue };
            let more: Option<Self> = read(name, given)?;
            if more.is_some() && found.is_some() {
                let message = format!("{name}: the text has a form already");
                return Err(ApiError::field(name, message));
            }
            found = found.or(more);
        }
        Ok(found)
    }

    /// `text.format` of Responses, `output_config.format` of Messages: flat schemas.
    ///
    /// # Errors
    /// 400 with the path of what is wrong.
    pub(crate) fn of(field: &str, given: Value) -> Result<Option<Self>, ApiError> {
        match given.get("type").and_then(Value::as_str) {
            Some("json_schema") => Ok(Self::new(field, schema(field, object(field, given)?)?)),
            _ => of_response(field, given),
        }
    }
}

fn object(field: &str, given: Value) -> Result<Map<String, Value>, ApiError> {
    match given {
        Value::Object(mut object) => {
            object.retain(|_, value| !value.is_null());
            Ok(object)
        }
        other => Err(wanted_but(field, "an object", &other)),
    }
}

fn known(field: &str, given: &Map<String, Value>, names: &[&str]) -> Result<(), ApiError> {
    match given.keys().find(|key| !names.contains(&key.as_str())) {
        None => Ok(()),
        Some(key) => {
            let path = format!("{field}.{key}");
            Err(ApiError::field(&path, format!("{path}: unknown field")))
        }
    }
}

/// The schema of an object that names and describes it; whether it is strict changes nothing, since
/// each is kept to.
fn schema(field: &str, given: Map<String, Value>) -> Result<Grammar, ApiError> {
    known(field, &given, &["type", "name", "description", "schema", "strict"])?;
    let path = format!("{field}.schema");
    match given.get("schema") {
        Some(of @ (Value::Object(_) | Value::Bool(_))) => Ok(Grammar::json_schema(of)),
        Some(other) => Err(wanted_but(&path, "a schema", other)),
        None => Err(ApiError::field(&path, format!("{path}: missing; wanted a schema"))),
    }
}

fn of_response(field: &str, given: Value) -> Result<Option<Format>, ApiError> {
    let mut given = object(field, given)?;
    let kinds = "one of text, json_object, json_schema, grammar";
    let path = format!("{field}.type");
    let kind = given.get("type").and_then(Value::as_str).map(str::to_owned);
    match kind.as_deref() {
        Some("text") => known(field, &given, &["type"]).map(|()| None),
        Some("json_object") => {
            known(field, &given, &["type"])?;
            Ok(Format::new(field, Grammar::json_object()))
        }
        Some("json_schema") => {
            known(field, &given, &["type", "json_schema"])?;
            let path = format!("{field}.json_schema");
            let inner = given.remove("json_schema").unwrap_or_default();
            Ok(Format::new(field, schema(&path, object(&path, inner)?)?))
        }
        Some("grammar") => of_grammar(field, Value::Object(given)),
        _ => match given.get("type") {
            Some(other) => Err(wanted_but(&path, kinds, other)),
            None => Err(ApiError::field(&path, format!("{path}: missing; wanted {kinds}"))),
        },
    }
}

/// `{"syntax": "regex" | "lark" | "json_schema", "definition": ...}`, or text in Lark.
fn of_grammar(field: &str, given: Value) -> Result<Option<Format>, ApiError> {
    if let Value::String(text) = given {
        return Ok(Format::new(field, Grammar::Lark(text)));
    }
    let given = object(field, given)?;
    known(field, &given, &["type", "syntax", "definition"])?;
    let text = |name: &str| {
        let path = format!("{field}.{name}");
        match given.get(name) {
            Some(Value::String(text)) => Ok(text.clone()),
            Some(other) => Err(wanted_but(&path, "a string", other)),
            None => Err(ApiError::field(&path, format!("{path}: missing; wanted a string"))),
        }
    };
    let grammar = match text("syntax")?.as_str() {
        "regex" => Grammar::Regex(text("definition")?),
        "lark" => Grammar::Lark(text("definition")?),
        "json_schema" => match given.get("definition") {
            Some(of @ (Value::Object(_) | Value::Bool(_))) => Grammar::json_schema(of),
            _ => Grammar::JsonSchema(text("definition")?),
        },
        other => {
            let path = format!("{field}.syntax");
            let wanted = "one of regex, lark, json_schema";
            return Err(wanted_but(&path, wanted, &Value::String(other.to_owned())));
        }
    };
    Ok(Format::new(field, grammar))
}

/// One of `json`, `regex`, `choice`, `grammar`, `json_object`.
fn of_vllm(field: &str, given: Value) -> Result<Option<Format>, ApiError> {
    let given = object(field, given)?;
    let mut all = given.into_iter();
    let (Some((kind, value)), None) = (all.next(), all.next()) else {
        let message = format!("{field}: wanted exactly one of json, regex, choice, grammar");
        return Err(ApiError::field(field, message));
    };
    let path = format!("{field}.{kind}");
    let grammar = match (kind.as_str(), value) {
        ("json", of @ (Value::Object(_) | Value::Bool(_))) => Grammar::json_schema(&of),
        ("json", Value::String(text)) => Grammar::JsonSchema(text),
        ("regex", Value::String(text)) => Grammar::Regex(text),
        ("grammar", Value::String(text)) => Grammar::Lark(text),
        ("json_object", Value::Bool(true)) => Grammar::json_object(),
        ("choice", Value::Array(list)) if !list.is_empty() => {
            let texts = list.iter().map(|text| match text {
                Value::String(text) if !text.is_empty() => Ok(text.as_str()),
                other => Err(wanted_but(&path, "a list of texts", other)),
            });
            Grammar::Lark(choice(texts.collect::<Result<_, _>>()?))
        }
        ("json" | "regex" | "grammar" | "json_object" | "choice", other) => {
            return Err(wanted_but(&path, "what it is called after", &other));
        }
        _ => return Err(ApiError::field(&path, format!("{path}: unknown or unsupported field"))),
    };
    Ok(Format::new(field, grammar))
}

/// One of several texts.
fn choice(texts: Vec<&str>) -> String {
    let quoted: Vec<String> = texts.into_iter().map(quoted).collect();
    format!("start: {}", quoted.join(" | "))
}

/// A text as it stands in Lark.
pub(crate) fn quoted(text: &str) -> String {
    Value::String(text.to_owned()).to_string()
}
