//! Chat templates: messages to the text that a model was trained on, rendered as transformers does
//! (Jinja 2 with `trim_blocks` and `lstrip_blocks`; values print as Python prints them).
//!
//! Invariants: a template that does not parse is an error when it is used, not when the model is
//! loaded; rendering takes at most [`FUEL`] instructions; nothing is read but the variables given.
//! `strftime_now` tells UTC, as the time zone of a machine is no input of a model.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::value::{Kwargs, Value as Jinja};
use minijinja::{Environment, ErrorKind, State};
use serde_json::{Map, Value};

use crate::pyfmt::{py_json, py_str, strftime, JsonStyle};
use crate::{Error, Result};

/// Instructions that one rendering may take; a chat of 1,000 messages takes about 100,000.
const FUEL: u64 = 5_000_000;

/// The chat templates of one model, by name; most have one, `default`.
#[derive(Debug)]
pub(crate) struct ChatTemplates {
    env: Environment<'static>,
    /// Why a template does not parse, or nothing.
    names: BTreeMap<String, Option<String>>,
    /// The template looks into parts of a content, so that it takes lists of them.
    takes_parts: BTreeMap<String, bool>,
    tokens: Vec<(&'static str, String)>,
}

impl ChatTemplates {
    /// `sources` by name; `tokens` are variables such as `bos_token`.
    pub(crate) fn new(
        sources: BTreeMap<String, String>,
        tokens: Vec<(&'static str, String)>,
    ) -> Self {
        let mut env = environment();
        let mut names = BTreeMap::new();
        let mut takes_parts = BTreeMap::new();
        for (name, source) in sources {
            let looks = ["'text'", "\"text\"", ".text"].iter().any(|t| source.contains(t));
            takes_parts.insert(name.clone(), looks);
            let source = without_generation_marks(&source).into_owned();
            let fault = env.add_template_owned(name.clone(), source).err().map(|e| say(&e));
            names.insert(name, fault);
        }
        Self { env, names, takes_parts, tokens }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// As [`crate::tokenizer::Tokenizer::apply_chat_template`].
    pub(crate) fn render(
        &self,
        messages: &Value,
        add_generation_prompt: bool,
        extra: &Map<String, Value>,
    ) -> Result<String> {
        let fail = |what: String| Error::Template(what);
        let with_tools = extra.get("tools").is_some_and(|t| !t.is_null());
        let wanted = ["tool_use", "default"];
        let name =
            wanted.iter().skip(usize::from(!with_tools)).find_map(|&n| self.names.get_key_value(n));
        let Some((name, fault)) = name else {
            let have: Vec<_> = self.names.keys().collect();
            return Err(fail(match have.is_empty() {
                true => "this model has none".to_string(),
                false => format!("wanted one named default, got {have:?}"),
            }));
        };
        if let Some(fault) = fault {
            return Err(fail(fault.clone()));
        }
        let takes_parts = self.takes_parts.get(name).is_some_and(|&t| t);
        let mut variables = Map::new();
        variables.insert("messages".into(), checked_messages(messages, takes_parts)?);
        variables.insert("add_generation_prompt".into(), add_generation_prompt.into());
        // Templates ask `tools is not none`, which is true of what is not there at all.
        variables.insert("tools".into(), Value::Null);
        variables.insert("documents".into(), Value::Null);
        for (token, text) in &self.tokens {
            variables.insert((*token).into(), text.as_str().into());
        }
        variables.extend(extra.iter().map(|(k, v)| (k.clone(), v.clone())));
        let template = self.env.get_template(name).map_err(|e| fail(say(&e)))?;
        template.render(Jinja::from_serialize(&variables)).map_err(|e| fail(say(&e)))
    }
}

/// The messages as the template takes them: a list of text parts becomes one text, with line breaks
/// between, where the template knows only text.
fn checked_messages(messages: &Value, takes_parts: bool) -> Result<Value> {
    let fail = |at: usize, what: &str| Error::Template(format!("message {at}: {what}"));
    let Some(list) = messages.as_array() else {
        return Err(Error::Template("messages: wanted a list of {role, content}".to_string()));
    };
    let mut out = Vec::with_capacity(list.len());
    for (at, message) in list.iter().enumerate() {
        let Some(message) = message.as_object() else {
            return Err(fail(at, "wanted an object with role and content"));
        };
        if !message.get("role").is_some_and(Value::is_string) {
            return Err(fail(at, "wanted a role, as a string"));
        }
        let mut message = message.clone();
        match message.get_mut("content") {
            None | Some(Value::Null | Value::String(_)) => {}
            Some(Value::Array(_)) if takes_parts => {}
            Some(Value::Array(parts)) => {
                let texts: Option<Vec<&str>> =
                    parts.iter().map(|p| p.as_str().or_else(|| p.get("text")?.as_str())).collect();
                let Some(texts) = texts else {
                    return Err(fail(at, "this model's template takes only text parts"));
                };
                let text = texts.join("\n");
                message.insert("content".into(), text.into());
            }
            Some(Value::Bool(_) | Value::Number(_) | Value::Object(_)) => {
                return Err(fail(at, "content: wanted a string or a list of parts"));
            }
        }
        out.push(Value::Object(message));
    }
    Ok(Value::Array(out))
}

fn environment() -> Environment<'static> {
    let mut env = Environment::new();
    env.set_trim_blocks(true);
    env.set_lstrip_blocks(true);
    env.set_fuel(Some(FUEL));
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    env.set_formatter(|out, _: &State, value| Ok(out.write_str(&py_str(value)?)?));
    env.add_filter("string", |value: Jinja| py_str(&value).map(Cow::into_owned));
    env.add_filter("tojson", tojson);
    env.add_function("raise_exception", |what: String| -> std::result::Result<Jinja, _> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, what))
    });
    env.add_function("strftime_now", |format: String| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        strftime(&format, now)
    });
    env
}

/// `json.dumps` of Python without ASCII escapes, as transformers sets it up.
fn tojson(value: Jinja, options: Kwargs) -> std::result::Result<String, minijinja::Error> {
    let style = JsonStyle {
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        indent: options.get("indent")?,
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        separators: options.get("separators")?,
    };
    options.assert_all_used()?;
    if value.is_undefined() {
        let what = "tojson: the value is undefined";
        return Err(minijinja::Error::new(ErrorKind::UndefinedError, what));
    }
    let json = serde_json::to_value(&value)
        .map_err(|e| minijinja::Error::new(ErrorKind::BadSerialization, e.to_string()))?;
    Ok(py_json(&json, &style))
}

/// Turns `{% generation %}` and its end, which mark trained text for transformers and render to
/// nothing, into `{% with %}`: the same scope, the same white space.
fn without_generation_marks(source: &str) -> Cow<'_, str> {
    let mut out = String::new();
    let mut done = 0;
    for (at, _) in source.match_indices("{%") {
        let tag = source[at + 2..].split("%}").next().unwrap_or_default();
        let name = tag.trim_matches(|c: char| c.is_whitespace() || "-+".contains(c));
        let with = match name {
            "generation" => "with",
            "endgeneration" => "endwith",
            _ => continue,
        };
        let start = at + 2 + tag.find(name).unwrap_or(0);
        out.push_str(&source[done..start]);
        out.push_str(with);
        done = start + name.len();
    }
    out.push_str(&source[done..]);
    if done == 0 {
        Cow::Borrowed(source)
    } else {
        Cow::Owned(out)
    }
}

/// What went wrong, in one line.
fn say(error: &minijinja::Error) -> String {
    let what = match error.kind() {
        ErrorKind::OutOfFuel => Cow::from(format!("takes more than {FUEL} instructions")),
        kind => error.detail().map_or_else(|| kind.to_string().into(), |d| d.to_string().into()),
    };
    match error.line() {
        Some(line) => format!("{what} (line {line})"),
        None => what.into_owned(),
    }
}
