//! GPT-OSS' channels: `<|channel|>analysis<|message|>...<|end|>`, then the next message.
//!
//! `analysis` is reasoning; `commentary to=functions.name` is a call; all else is text.

use super::parser::Flow;
use super::{json, Call, Part};

/// All marks; special tokens of the model.
pub(crate) const MARKS: &[&str] = &[
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|return|>",
    "<|call|>",
];
const ENDS: [&str; 5] = ["<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>"];
const MESSAGE: &str = "<|message|>";
pub(super) const FUNCTIONS: &str = "to=functions.";

/// See the module.
#[derive(Default)]
pub(crate) struct Harmony {
    flow: Flow,
    body: Option<Body>,
}

enum Body {
    Text,
    Reasoning,
    /// A call of this tool; its head is kept as it was written.
    Call {
        name: String,
        head: String,
        text: String,
    },
}

impl Harmony {
    pub(crate) fn is_reasoning(&self) -> bool {
        matches!(self.body, Some(Body::Reasoning))
    }

    pub(crate) fn run(&mut self, text: &str, at_end: bool, out: &mut Vec<Part>) {
        self.flow.buf.push_str(text);
        while !self.flow.buf.is_empty() && self.step(at_end, out) {}
        if at_end {
            if let Some(Body::Call { name, head, text }) = self.body.take() {
                out.push(called(name, head, text));
            }
        }
    }

    fn step(&mut self, at_end: bool, out: &mut Vec<Part>) -> bool {
        match &mut self.body {
            None => self.head(at_end, out),
            Some(_) => self.body(at_end, out),
        }
    }

    fn head(&mut self, at_end: bool, out: &mut Vec<Part>) -> bool {
        let buf = &self.flow.buf;
        // A model that writes no channels writes text.
        let marked = MARKS.iter().any(|m| buf.starts_with(m) || m.starts_with(buf.as_str()));
        if !marked {
            self.body = Some(Body::Text);
            return true;
        }
        let Some(at) = buf.find(MESSAGE) else {
            if at_end {
                let all = buf.len();
                out.push(Part::Mark(self.flow.take(all)));
            }
            return false;
        };
        let head = self.flow.take(at + MESSAGE.len());
        let until = |c: char| c.is_whitespace() || c == '<';
        let channel = head.rsplit("<|channel|>").next().filter(|_| head.contains("<|channel|>"));
        let channel = channel.and_then(|rest| rest.split(until).next()).unwrap_or_default();
        let tool = head.split(FUNCTIONS).nth(1).and_then(|rest| rest.split(until).next());
        self.body = Some(match tool.filter(|name| !name.is_empty()) {
            Some(name) => {
                let name = name.to_owned();
                Body::Call { name, head, text: String::new() }
            }
            None => {
                out.push(Part::Mark(head.clone()));
                if channel == "analysis" {
                    Body::Reasoning
                } else {
                    Body::Text
                }
            }
        });
        true
    }

    fn body(&mut self, at_end: bool, out: &mut Vec<Part>) -> bool {
        let (piece, found) = self.flow.until(&ENDS, at_end);
        match &mut self.body {
            Some(Body::Call { text, .. }) => text.push_str(&piece),
            Some(Body::Reasoning) if !piece.is_empty() => out.push(Part::Reasoning(piece)),
            Some(Body::Text) if !piece.is_empty() => out.push(Part::Text(piece)),
            Some(Body::Reasoning | Body::Text) | None => {}
        }
        let Some((which, space)) = found else { return false };
        // These begin the next head.
        let mark = match ENDS[which] {
            "<|start|>" | "<|channel|>" => 0,
            mark => mark.len(),
        };
        let end = self.flow.take(space + mark);
        match self.body.take() {
            Some(Body::Call { name, head, text }) => out.push(called(name, head, text + &end)),
            _ if end.is_empty() => {}
            _ => out.push(Part::Mark(end)),
        }
        true
    }
}

/// A call, or text if it is none.
fn called(name: String, head: String, text: String) -> Part {
    let body = ENDS.iter().find_map(|end| text.strip_suffix(end)).unwrap_or(&text);
    match json::arguments(body) {
        Some(arguments) => Part::Call(Call { id: None, name, arguments, raw: head + &text }),
        None => Part::Text(head + &text),
    }
}
