//! What an answer may be where calls must be legal: a grammar of a family's marks around the tools'
//! schemas, and around a format.
//!
//! Invariants: what the grammar lets through as a call, the parser reads as one; reasoning comes
//! before it as without a grammar.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use kie_core::Grammar;

use super::{harmony, Family, Forced, Tools, THINK, THINK_END};
use crate::format::quoted;

/// Any text that has no special token in it.
const ANY: &str = "/(?s:.+)/?";
const SPACE: &str = "/[ \\t\\r\\n]{1,3}/?";
/// A line may end.
const LINE: &str = "\"\\n\"?";

/// What an answer's text is made of.
pub(crate) struct Around<'a> {
    pub(crate) family: Family,
    /// The template's text.
    pub(crate) template: &'a str,
    /// Marks that are special tokens.
    pub(crate) marks: &'a BTreeMap<u32, String>,
    /// Answers may begin with reasoning; `inside`: the prompt has its opening mark.
    pub(crate) reasons: bool,
    pub(crate) inside: bool,
}

/// A mark as it stands in a grammar.
enum Mark {
    Token(u32),
    Text(&'static str),
}

impl Around<'_> {
    fn mark(&self, text: &'static str) -> Mark {
        match self.marks.iter().find(|(_, mark)| *mark == text) {
            Some((id, _)) => Mark::Token(*id),
            None => Mark::Text(text),
        }
    }

    fn said(&self, text: &'static str) -> String {
        match self.mark(text) {
            Mark::Token(id) => format!("<[{id}]>"),
            Mark::Text(text) => quoted(text),
        }
    }

    /// The grammar of an answer that is `body`, or a call where there are tools; nothing where any
    /// text will do.
    pub(crate) fn grammar(
        &self,
        tools: &Tools,
        body: Option<&Grammar>,
    ) -> Result<Option<Grammar>, String> {
        let forced = tools.forced.is_some();
        let strict = tools.strict.iter().any(|strict| *strict);
        if !forced && !strict {
            match body {
                None => return Ok(None),
                Some(body) if tools.is_empty() && !self.reasons => return Ok(Some(body.clone())),
                Some(_) => {}
            }
        }
        let mut rules = String::new();
        let mut start: Vec<String> = Vec::new();
        if !tools.is_empty() {
            self.calls(tools, &mut rules);
            start.push(self.one_call());
        }
        match body.filter(|_| !forced) {
            Some(body) => {
                writeln!(rules, "body: {}", nested(body)?).map_err(|e| e.to_string())?;
                start.push(self.final_text("body"));
            }
            None if !forced => start = self.free(&mut rules),
            None => {}
        }
        let thought = self.thought(&mut rules);
        Ok(Some(Grammar::Lark(format!("start: {thought}({})\n{rules}", start.join(" | ")))))
    }

    /// Reasoning in front.
    fn thought(&self, rules: &mut String) -> String {
        if self.family == Family::Harmony {
            if let Mark::Text(_) = self.mark("<|end|>") {
                // Nothing but the budget might end what has no token for its end.
                return String::new();
            }
            let said = |text| self.said(text);
            let _ = writeln!(
                rules,
                "analysis: {} \"analysis\" {} {ANY} {} {} \"assistant\"",
                said("<|channel|>"),
                said("<|message|>"),
                said("<|end|>"),
                said("<|start|>"),
            );
            return "analysis? ".to_owned();
        }
        if !self.reasons {
            return String::new();
        }
        let _ = match self.mark(THINK_END) {
            Mark::Token(id) => writeln!(rules, "thought: {ANY} <[{id}]>"),
            Mark::Text(_) => writeln!(rules, "thought[lazy]: /(?s:.*)<\\/think>/"),
        };
        match self.inside {
            true => format!("thought {SPACE} "),
            false => format!("({} thought {SPACE})? ", self.said(THINK)),
        }
    }

    /// What the user reads, as the family has it.
    fn final_text(&self, body: &str) -> String {
        match self.family {
            Family::Harmony => {
                let (channel, message) = (self.said("<|channel|>"), self.said("<|message|>"));
                format!("{channel} \"final\" {message} {body}")
            }
            _ => body.to_owned(),
        }
    }

    /// The mark behind which a call begins, where the family has one.
    fn opener(&self) -> Option<Mark> {
        let text = match self.family {
            Family::Tagged => "<tool_call>",
            Family::Mistral => "[TOOL_CALLS]",
            Family::DeepSeek => "<｜tool▁calls▁begin｜>",
            Family::Kimi => "<|tool_calls_section_begin|>",
            Family::Llama | Family::Harmony => return None,
        };
        Some(self.mark(text))
    }

    /// A call from its opening mark on.
    fn one_call(&self) -> String {
        match self.opener() {
            Some(Mark::Token(id)) => format!("<[{id}]> call"),
            Some(Mark::Text(text)) => format!("{} call", quoted(text)),
            None => "call".to_owned(),
        }
    }

    /// Text in which there may be calls: what begins as one is one.
    fn free(&self, rules: &mut String) -> Vec<String> {
        match (self.family, self.opener()) {
            (Family::Harmony, _) => vec![self.final_text(ANY), "call".to_owned()],
            // Text that begins with a brace would be a call.
            (Family::Llama, _) => vec!["/[^{](?s:.*)/?".to_owned(), "call".to_owned()],
            (_, Some(Mark::Token(id))) => vec![format!("{ANY} (<[{id}]> call {SPACE})*")],
            (_, Some(Mark::Text(text))) => {
                let mark = escaped(text);
                let none = match self.family {
                    Family::Tagged => format!("{mark}|<function="),
                    _ => mark.clone(),
                };
                let _ = writeln!(rules, "lead[lazy]: /(?s:.*){mark}/");
                let _ = writeln!(rules, "REST: /(?s:.+)/ & ~/(?s:.*)({none})(?s:.*)/");
                vec!["(lead call)* REST?".to_owned()]
            }
            (_, None) => vec![ANY.to_owned()],
        }
    }

    /// `call`: behind its opening mark, one of the tools with arguments of its schema.
    fn calls(&self, tools: &Tools, rules: &mut String) {
        let mut names = Vec::new();
        let any = Grammar::embedded("{\"type\":\"object\"}").unwrap_or_default();
        for (n, function) in tools.functions().enumerate() {
            let name = function["name"].as_str().unwrap_or_default();
            let wanted = match &tools.forced {
                Some(Forced::Tool(wanted)) => wanted == name,
                Some(Forced::Any) | None => true,
            };
            if !wanted {
                continue;
            }
            // What is not forced is held to a schema only where the client says so.
            let held = tools.strict[n] || tools.forced.is_some();
            let schema = match held {
                true => tools.schemas[n].as_str(),
                false => any.as_str(),
            };
            let _ = writeln!(rules, "args{n}: %json {schema}");
            let _ = writeln!(rules, "call{n}: {}", self.called(name, &format!("args{n}")));
            names.push(format!("call{n}"));
        }
        let _ = writeln!(rules, "call: {}", names.join(" | "));
    }

    fn called(&self, name: &str, args: &str) -> String {
        let said = |text| self.said(text);
        let object = |key: &str, end: &str| {
            let begin = quoted(&format!("{{\"name\": \"{name}\", \"{key}\": "));
            format!("{begin} {args} {}", quoted(end))
        };
        match self.family {
            Family::Tagged => {
                let call = object("arguments", "}");
                format!("{LINE} {call} {LINE} {}", said("</tool_call>"))
            }
            Family::Llama => object("parameters", "}"),
            Family::Mistral if self.template.contains("[ARGS]") => {
                format!("{} {} {args}", quoted(name), said("[ARGS]"))
            }
            Family::Mistral => {
                let call = object("arguments", "}]");
                format!("\" \"? \"[\" {call}")
            }
            Family::DeepSeek => {
                let begin = said("<｜tool▁call▁begin｜>");
                let (mark, end) = (said("<｜tool▁sep｜>"), said("<｜tool▁call▁end｜>"));
                let ends = said("<｜tool▁calls▁end｜>");
                match self.template.contains("```json") {
                    true => {
                        let head = quoted(&format!("{name}\n```json\n"));
                        format!("{begin} \"function\" {mark} {head} {args} \"\\n```\" {end} {ends}")
                    }
                    false => format!("{begin} {} {mark} {args} {end} {ends}", quoted(name)),
                }
            }
            Family::Kimi => {
                let (begin, mark) =
                    (said("<|tool_call_begin|>"), said("<|tool_call_argument_begin|>"));
                let (end, ends) = (said("<|tool_call_end|>"), said("<|tool_calls_section_end|>"));
                let id = quoted(&format!("functions.{name}:0"));
                format!("{begin} {id} {mark} {args} {end} {ends}")
            }
            Family::Harmony => {
                let to = quoted(&format!("commentary {}{name} ", harmony::FUNCTIONS));
                let (channel, message) = (said("<|channel|>"), said("<|message|>"));
                let constrain = said("<|constrain|>");
                let end = said("<|call|>");
                format!("{channel} {to} ({constrain} \"json\")? {message} {args} {end}?")
            }
        }
    }
}

/// A grammar within another.
fn nested(grammar: &Grammar) -> Result<String, String> {
    match grammar {
        Grammar::JsonSchema(text) => Ok(format!("%json {}", Grammar::embedded(text)?)),
        Grammar::Regex(text) => Ok(format!("/{}/", slashed(text))),
        Grammar::Lark(text) => Ok(format!("%lark {{\n{text}\n}}")),
    }
}

/// A regular expression between slashes.
fn slashed(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut quoted = false;
    for c in text.chars() {
        match c {
            '/' if !quoted => out.push_str("\\/"),
            '\n' => out.push_str("\\n"),
            c => out.push(c),
        }
        quoted = c == '\\' && !quoted;
    }
    out
}

/// A text in a regular expression between slashes.
fn escaped(text: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || c == '_' || !c.is_ascii();
    let mut out = String::new();
    for c in text.chars() {
        if !plain(c) && !"<>".contains(c) {
            out.push('\\');
        }
        out.push(c);
    }
    out
}
