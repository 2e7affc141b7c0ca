//! Chat templates: messages to the text that a model was trained on, rendered as transformers does
//! (Jinja 2 with `trim_blocks` and `lstrip_blocks`; values print as Python prints them).
//!
//! Templates come with models and are not trusted: each is rendered on a thread of its own, whose
//! stack is known and which may be given up, from bytecode that is charged for what it does
//! ([`compiled`], [`meter`], [`builtins`]).
//!
//! Invariants: a template that does not parse is an error when it is used, not when the model is
//! loaded; rendering takes at most [`FUEL`] instructions; nothing is read but the variables given.
//! `strftime_now` tells UTC, as the time zone of a machine is no input of a model.

mod builtins;
mod compiled;
pub(crate) mod meter;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use minijinja::machinery::{make_string_output, Vm};
use minijinja::value::Value as Jinja;
use minijinja::{AutoEscape, ErrorKind};
use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::guarded::guarded;
use crate::patience::{apart, Patience};

/// Instructions that one rendering may take, checks included; a chat of 1,000 messages takes about
/// 300,000.
const FUEL: u64 = 10_000_000;

/// Of the rendering thread. What recurses (the parser over a tag's tokens, the library over values)
/// takes a few kB a level, for some thousand levels at most; only what is touched takes memory.
const STACK_BYTES: usize = 64 << 20;

/// What is waited for.
const WHAT: &str = "rendering the chat template";

/// The chat templates of one model, by name; most have one, `default`.
#[derive(Debug)]
pub(crate) struct ChatTemplates {
    templates: BTreeMap<String, Template>,
    tokens: Vec<(&'static str, String)>,
}

#[derive(Debug)]
struct Template {
    source: Arc<str>,
    /// The template looks into parts of a content, so that it takes lists of them.
    takes_parts: bool,
}

impl ChatTemplates {
    /// `sources` by name; `tokens` are variables such as `bos_token`.
    pub(crate) fn new(
        sources: BTreeMap<String, String>,
        tokens: Vec<(&'static str, String)>,
    ) -> Self {
        let template = |source: String| {
            let takes_parts = ["'text'", "\"text\"", ".text"].iter().any(|t| source.contains(t));
            let source = without_generation_marks(&source).into_owned().into();
            Template { source, takes_parts }
        };
        let templates = sources.into_iter().map(|(name, source)| (name, template(source)));
        Self { templates: templates.collect(), tokens }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.templates.is_empty()
    }

    fn named(&self, with_tools: bool) -> Option<&Template> {
        let wanted = ["tool_use", "default"];
        let mut wanted = wanted.iter().skip(usize::from(!with_tools));
        wanted.find_map(|&name| self.templates.get(name))
    }

    /// As [`crate::tokenizer::Tokenizer::chat_template`].
    pub(crate) fn source(&self, with_tools: bool) -> Option<&str> {
        Some(&self.named(with_tools)?.source)
    }

    /// As [`crate::tokenizer::Tokenizer::apply_chat_template_within`].
    pub(crate) fn render(
        &self,
        messages: &Value,
        add_generation_prompt: bool,
        extra: &Map<String, Value>,
        patience: &Patience<'_>,
    ) -> Result<String> {
        let fail = |what: String| Error::Template(what);
        let with_tools = extra.get("tools").is_some_and(|t| !t.is_null());
        let Some(template) = self.named(with_tools) else {
            let have: Vec<_> = self.templates.keys().collect();
            return Err(fail(match have.is_empty() {
                true => "this model has none".to_string(),
                false => format!("wanted one named default, got {have:?}"),
            }));
        };
        let mut variables = Map::new();
        variables.insert("messages".into(), checked_messages(messages, template.takes_parts)?);
        variables.insert("add_generation_prompt".into(), add_generation_prompt.into());
        // Templates ask `tools is not none`, which is true of what is not there at all.
        variables.insert("tools".into(), Value::Null);
        variables.insert("documents".into(), Value::Null);
        for (token, text) in &self.tokens {
            variables.insert((*token).into(), text.as_str().into());
        }
        variables.extend(extra.iter().map(|(k, v)| (k.clone(), v.clone())));
        let source = Arc::clone(&template.source);
        // The thread gives up by itself; should it not notice, it is left behind.
        let most = meter::TIME_MAX.as_secs_f64() + 1.0;
        let own = patience.at_most(Some(most));
        let rendered = apart(WHAT, STACK_BYTES, &own, move |given_up| {
            meter::begin(given_up);
            guarded(|| Ok(rendered(&source, &variables)?))
        });
        match rendered {
            Ok(text) => text.map_err(fail),
            // Whose patience it was that came to its end.
            Err(Error::GivenUp { late: true, .. }) if patience.check(WHAT).is_ok() => {
                Err(fail(meter::too_long()))
            }
            Err(error) => Err(error),
        }
    }
}

/// Renders on this thread. The error is one line.
fn rendered(source: &str, variables: &Map<String, Value>) -> std::result::Result<String, String> {
    let env = builtins::environment(FUEL);
    let compiled = compiled::compile("template", source).map_err(|e| say(&e))?;
    let mut text = String::new();
    let mut out = make_string_output(&mut text);
    let root = Jinja::from_serialize(variables);
    let vm = Vm::new(&env);
    let done = vm.eval(&compiled.main, root, &compiled.blocks, &mut out, AutoEscape::None);
    done.map(drop).map_err(|e| say(&e))?;
    Ok(text)
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
