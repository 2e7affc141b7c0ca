//! A model's chat template: what it can say, and a request's messages and tools in its words.
//!
//! Invariants: what a template cannot say is not lost. System text goes before the first user turn,
//! tools into the system text, calls and their results into turns as text.

use std::collections::BTreeMap;
use std::sync::Arc;

use kie_core::request::Token;
use kie_core::tokenizer::Tokenizer;
use kie_core::Engine;
use serde_json::{json, Map, Value};

use crate::app::Served;
use crate::errors::ApiError;
use crate::format::Format;
use crate::tools::{Around, Family, Parser, Part, Tools, THINK, THINK_END};

/// Text that no template contains.
const PROBE: &str = "qZ7probe";
/// Nine letters, as Mistral's template wants them.
const CALL_ID: &str = "R8callid9";

/// What a template does.
#[derive(Debug, Clone, Default)]
pub(crate) struct Chat {
    /// Writes a system message.
    system: bool,
    /// Writes tools.
    tools: bool,
    /// How it wants the arguments of calls; `None`: it writes none.
    calls: Option<Arguments>,
    /// How its model writes calls.
    family: Option<Family>,
    /// Its model's answers may begin with reasoning.
    reasons: bool,
    /// Has a switch for reasoning, and one for how much of it.
    pub(crate) has_thinking: bool,
    pub(crate) has_effort: bool,
    /// Marks that are special tokens, which an answer's text leaves out.
    marks: Arc<BTreeMap<u32, String>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Arguments {
    Object,
    Text,
}

impl Chat {
    /// Tries it out.
    pub(crate) fn of(engine: &Engine) -> Self {
        let tokenizer = engine.tokenizer();
        let Some(source) = tokenizer.chat_template(true) else { return Self::default() };
        let plain = tokenizer.chat_template(false).unwrap_or_default();
        let family = Family::of(source);
        let marked = |text: &str| plain.contains(text);
        Self {
            system: says(tokenizer, &[json!({"role": "system", "content": PROBE})], None),
            tools: says_tools(tokenizer),
            calls: [Arguments::Object, Arguments::Text]
                .into_iter()
                .find(|arguments| says_calls(tokenizer, *arguments)),
            family: Some(family),
            reasons: family == Family::Harmony || marked(THINK) || marked(THINK_END),
            has_thinking: marked("enable_thinking"),
            has_effort: marked("reasoning_effort"),
            marks: Arc::new(marks(tokenizer, family)),
        }
    }

    /// Whether answers may hold reasoning.
    pub(crate) fn reasons(&self) -> bool {
        self.reasons
    }
}

/// Whether the probe is in what the template makes of these messages and a user's.
fn says(tokenizer: &Tokenizer, messages: &[Value], tools: Option<Value>) -> bool {
    let mut all = messages.to_vec();
    all.push(json!({"role": "user", "content": "x"}));
    let extra = tools.map(|tools| ("tools".to_owned(), tools)).into_iter().collect();
    let said = tokenizer.apply_chat_template(&Value::Array(all), true, &extra);
    said.is_ok_and(|text| text.contains(PROBE))
}

fn says_tools(tokenizer: &Tokenizer) -> bool {
    let parameters = json!({"type": "object", "properties": {"x": {"type": "string"}}});
    let function = json!({"name": PROBE, "description": "x", "parameters": parameters});
    says(tokenizer, &[], Some(json!([{"type": "function", "function": function}])))
}

/// Whether a call's arguments and a result are written; quotes in them must not be escaped again.
fn says_calls(tokenizer: &Tokenizer, arguments: Arguments) -> bool {
    let given = match arguments {
        Arguments::Object => json!({"x": PROBE}),
        Arguments::Text => json!(format!("{{\"x\": \"{PROBE}\"}}")),
    };
    let function = json!({"name": "probe", "arguments": given});
    let call = json!({"id": CALL_ID, "type": "function", "function": function});
    let messages = json!([
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "R8result", "tool_call_id": CALL_ID, "name": "probe"},
    ]);
    let said = tokenizer.apply_chat_template(&messages, true, &Map::new());
    said.is_ok_and(|text| {
        let written = text.contains(&format!("\"{PROBE}\""))
            || text.contains(&format!(">{PROBE}"))
            || text.contains(&format!("\n{PROBE}"));
        written && text.contains("R8result")
    })
}

fn marks(tokenizer: &Tokenizer, family: Family) -> BTreeMap<u32, String> {
    let special = |mark: &&str| {
        let id = tokenizer.token_id(mark)?;
        let silent = tokenizer.decode(&[id], true).is_ok_and(|text| text.is_empty());
        silent.then(|| (id, (*mark).to_owned()))
    };
    family.special().iter().filter_map(special).collect()
}

/// A conversation as every API brings it: messages of OpenAI's form, of which `crate::messages`
/// says more, and tools.
#[derive(Debug, Default)]
pub(crate) struct Conversation {
    pub(crate) messages: Vec<Value>,
    pub(crate) tools: Arc<Tools>,
    /// Text that the answer begins with.
    pub(crate) begun: String,
    /// Variables of templates that have them.
    pub(crate) thinking: Option<bool>,
    pub(crate) effort: Option<String>,
    /// What the text must be.
    pub(crate) format: Option<Format>,
}

/// A conversation as the engine takes it.
pub(crate) struct Encoded {
    pub(crate) ids: Vec<u32>,
    pub(crate) answer: Answer,
    /// What the whole answer must be, and the field that says so.
    pub(crate) format: Option<Format>,
}

impl Conversation {
    /// Ids of the prompt, and what reads the answer. `field` is the messages' in errors.
    ///
    /// # Errors
    /// 400 for what the template or the tokenizer refuses.
    pub(crate) fn encode(mut self, served: &Served, field: &str) -> Result<Encoded, ApiError> {
        let refused = |e: kie_core::Error| ApiError::engine(&e, field);
        let chat = &served.chat;
        let tokenizer = served.engine.tokenizer();
        let mut extra = Map::new();
        if chat.tools && !self.tools.is_empty() {
            extra.insert("tools".to_owned(), self.tools.list().into());
        }
        if let Some(thinking) = self.thinking.filter(|_| chat.has_thinking) {
            extra.insert("enable_thinking".to_owned(), thinking.into());
        }
        if let Some(effort) = self.effort.take().filter(|_| chat.has_effort) {
            extra.insert("reasoning_effort".to_owned(), effort.into());
        }
        let messages = written(std::mem::take(&mut self.messages), &self.tools, chat);
        let text = tokenizer.apply_chat_template(&Value::Array(messages), true, &extra);
        let text = text.map_err(refused)? + &self.begun;
        let ids = tokenizer.encode(&text, false).map_err(refused)?;
        let inside = chat.reasons && text.trim_end().ends_with(THINK);
        let format = self.rules(served, inside)?;
        let answer = Answer::new(chat, self.tools, inside);
        Ok(Encoded { ids, answer, format })
    }

    /// What the whole answer must be, with reasoning in front and calls where there may be some.
    fn rules(&mut self, served: &Served, inside: bool) -> Result<Option<Format>, ApiError> {
        let (chat, engine) = (&served.chat, &served.engine);
        if let Some(tools) = Arc::get_mut(&mut self.tools) {
            tools.hold(&engine.runs_grammars())?;
        }
        let around = Around {
            family: chat.family.unwrap_or(Family::Tagged),
            template: engine.tokenizer().chat_template(true).unwrap_or_default(),
            marks: &chat.marks,
            // An answer that the client has begun is past its reasoning.
            reasons: chat.reasons && (inside || self.begun.is_empty()),
            inside,
        };
        let field = match &self.format {
            Some(format) => format.field.clone(),
            None if self.tools.forced.is_some() => "tool_choice".to_owned(),
            None => "tools".to_owned(),
        };
        let body = self.format.take().map(|format| format.grammar);
        let wrong = |why: String| ApiError::field(&field, format!("{field}: {why}"));
        let grammar = around.grammar(&self.tools, body.as_ref()).map_err(wrong)?;
        Ok(grammar.map(|grammar| Format { grammar, field }))
    }
}

/// Messages as a template of these abilities takes them.
fn written(messages: Vec<Value>, tools: &Tools, chat: &Chat) -> Vec<Value> {
    let mut messages = match chat.calls {
        Some(arguments) => {
            let mut messages = messages;
            messages.iter_mut().for_each(|message| with_arguments(message, arguments));
            messages
        }
        None => calls_as_text(messages),
    };
    if !chat.tools && !tools.is_empty() {
        let text = tools_as_text(tools);
        match messages.first_mut().filter(|first| first["role"] == "system") {
            Some(first) => {
                let said = first["content"].as_str().unwrap_or_default();
                first["content"] = format!("{said}\n\n{text}").into();
            }
            None => messages.insert(0, json!({"role": "system", "content": text})),
        }
    }
    if chat.system {
        return messages;
    }
    fold_system(messages)
}

/// The arguments of a message's calls, which come as text, as the template wants them.
fn with_arguments(message: &mut Value, wanted: Arguments) {
    let Some(calls) = message.get_mut("tool_calls").and_then(Value::as_array_mut) else { return };
    for call in calls {
        let arguments = &mut call["function"]["arguments"];
        if let (Arguments::Object, Some(text)) = (wanted, arguments.as_str()) {
            if let Ok(object @ Value::Object(_)) = serde_json::from_str(text) {
                *arguments = object;
            }
        }
    }
}

fn tools_as_text(tools: &Tools) -> String {
    let list = Value::from(tools.list());
    format!(
        "Tools: {list}\n\nTo call a tool, answer with its name and arguments as JSON:\n\
         <tool_call>\n{{\"name\": \"...\", \"arguments\": {{...}}}}\n</tool_call>"
    )
}

/// Calls into the text of the turns that made them, results into turns of the user.
fn calls_as_text(messages: Vec<Value>) -> Vec<Value> {
    let mut out: Vec<Value> = Vec::with_capacity(messages.len());
    let mut results = false;
    for mut message in messages {
        let said = message["content"].as_str().unwrap_or_default().to_owned();
        let is_result = message["role"] == "tool";
        if is_result {
            let text = format!("<tool_response>\n{said}\n</tool_response>");
            match out.last_mut().filter(|_| results) {
                Some(last) => {
                    let before = last["content"].as_str().unwrap_or_default();
                    last["content"] = format!("{before}\n{text}").into();
                }
                None => out.push(json!({"role": "user", "content": text})),
            }
        } else {
            let calls = message.as_object_mut().and_then(|m| m.remove("tool_calls"));
            let mut text = said;
            for call in calls.iter().filter_map(Value::as_array).flatten() {
                let function = &call["function"];
                let arguments = function["arguments"].as_str().unwrap_or("{}");
                let name = &function["name"];
                let call = format!("{{\"name\": {name}, \"arguments\": {arguments}}}");
                let gap = if text.is_empty() { "" } else { "\n" };
                text.push_str(&format!("{gap}<tool_call>\n{call}\n</tool_call>"));
            }
            message["content"] = text.into();
            out.push(message);
        }
        results = is_result;
    }
    out
}

/// System text in front of the first user turn.
fn fold_system(messages: Vec<Value>) -> Vec<Value> {
    let is = |message: &Value, role: &str| message["role"] == role;
    if !messages.iter().any(|m| is(m, "system")) {
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

/// Reads an answer: tokens into parts.
pub(crate) struct Answer {
    /// `None`: all of it is text.
    parser: Option<Parser>,
    family: Option<Family>,
    marks: Arc<BTreeMap<u32, String>>,
    thought: usize,
}

impl Answer {
    fn new(chat: &Chat, tools: Arc<Tools>, inside: bool) -> Self {
        let family = chat.family.unwrap_or(Family::Tagged);
        let wanted = chat.reasons || !tools.is_empty();
        let parser = wanted.then(|| Parser::new(family, tools, chat.reasons, inside));
        Self { parser, family: chat.family, marks: Arc::clone(&chat.marks), thought: 0 }
    }

    /// The next tokens.
    pub(crate) fn read(&mut self, tokens: &[Token]) -> Vec<Part> {
        let Some(parser) = &mut self.parser else {
            let text: String = tokens.iter().map(|token| token.text.as_str()).collect();
            return if text.is_empty() { Vec::new() } else { vec![Part::Text(text)] };
        };
        let mut parts = Vec::new();
        for token in tokens {
            self.thought += usize::from(parser.is_reasoning());
            for mark in token.token_ids.iter().filter_map(|id| self.marks.get(id)) {
                parts.extend(parser.push(mark));
            }
            parts.extend(parser.push(&token.text));
        }
        joined(parts)
    }

    /// Tokens so far that came while the model reasoned.
    pub(crate) fn thought(&self) -> usize {
        self.thought
    }

    /// The end.
    pub(crate) fn finish(&mut self) -> Vec<Part> {
        self.parser.as_mut().map(Parser::finish).unwrap_or_default()
    }

    /// A call's id: the model's own, or a new one in the form that its template takes.
    pub(crate) fn call_id(&self, given: Option<&str>, prefix: &str) -> String {
        match given {
            Some(id) if !id.is_empty() => id.to_owned(),
            _ if self.family == Some(Family::Mistral) => random_letters(9),
            _ => format!("{prefix}{}", random_letters(24)),
        }
    }
}

/// Neighbours of one kind as one.
fn joined(parts: Vec<Part>) -> Vec<Part> {
    let mut out: Vec<Part> = Vec::with_capacity(parts.len());
    for part in parts {
        match (out.last_mut(), part) {
            (Some(Part::Text(all)), Part::Text(more))
            | (Some(Part::Reasoning(all)), Part::Reasoning(more)) => all.push_str(&more),
            (_, part) => out.push(part),
        }
    }
    out
}

/// Letters and digits that nobody had before.
pub(crate) fn random_letters(count: usize) -> String {
    use std::hash::{BuildHasher, Hasher};
    const LETTERS: &[u8] = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";
    let mut out = String::with_capacity(count);
    while out.len() < count {
        let mut random = std::hash::RandomState::new().build_hasher().finish();
        for _ in 0..8.min(count - out.len()) {
            out.push(char::from(LETTERS[(random % 62) as usize]));
            random /= 62;
        }
    }
    out
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_a_template_cannot_say_becomes_text() {
        let mut tools = Tools::default();
        let tool = json!({"name": "add"}).as_object().unwrap().clone();
        tools.add("tools[0]", tool, "parameters").unwrap();
        let call = json!({"id": "1", "type": "function",
            "function": {"name": "add", "arguments": "{\"a\": 1}"}});
        let messages = vec![
            json!({"role": "system", "content": "Be brief."}),
            json!({"role": "user", "content": "1+1?"}),
            json!({"role": "assistant", "content": "Hm.", "tool_calls": [call]}),
            json!({"role": "tool", "content": "2", "tool_call_id": "1"}),
            json!({"role": "tool", "content": "3", "tool_call_id": "2"}),
        ];
        let plain = written(messages.clone(), &tools, &Chat::default());
        let roles: Vec<&str> = plain.iter().map(|m| m["role"].as_str().unwrap()).collect();
        assert_eq!(roles, ["user", "assistant", "user"]);
        let texts: Vec<&str> = plain.iter().map(|m| m["content"].as_str().unwrap()).collect();
        assert!(texts[0].starts_with("Be brief.\n\nTools: [{\"type\":\"function\""));
        assert!(texts[0].ends_with("</tool_call>\n\n1+1?"));
        let call = "{\"name\": \"add\", \"arguments\": {\"a\": 1}}";
        assert_eq!(texts[1], format!("Hm.\n<tool_call>\n{call}\n</tool_call>"));
        let result = |n| format!("<tool_response>\n{n}\n</tool_response>");
        assert_eq!(texts[2], format!("{}\n{}", result(2), result(3)));
        let able =
            Chat { system: true, tools: true, calls: Some(Arguments::Object), ..Chat::default() };
        let kept = written(messages, &tools, &able);
        assert_eq!(kept.len(), 5);
        assert_eq!(kept[2]["tool_calls"][0]["function"]["arguments"], json!({"a": 1}));
    }
}
