//! A streamed answer: `response.created`, its items, `response.completed`.

use kie_core::request::{Completion, Token};
use serde_json::{json, Value};

use super::{
    call_item, item_id, message_item, reasoning_item, reasoning_part, status, text_part, Head,
};
use crate::chat::Answer;
use crate::errors::ApiError;
use crate::generate::Writer;
use crate::sse;
use crate::tools::{Call, Part};

/// See the module.
pub(super) struct Events {
    head: Head,
    answer: Answer,
    /// Events so far.
    number: usize,
    open: Option<Open>,
    /// Items that are closed.
    output: Vec<Value>,
}

/// The item that is open.
struct Open {
    kind: Kind,
    id: String,
    text: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Message,
    Reasoning,
}

impl Kind {
    fn item(self, id: &str, status: &str, content: Vec<Value>) -> Value {
        match self {
            Self::Message => message_item(id, status, content),
            Self::Reasoning => reasoning_item(id, status, content),
        }
    }

    fn part(self, text: &str) -> Value {
        match self {
            Self::Message => text_part(text),
            Self::Reasoning => reasoning_part(text),
        }
    }

    /// What events about its text are called.
    fn events(self) -> &'static str {
        match self {
            Self::Message => "response.output_text",
            Self::Reasoning => "response.reasoning_text",
        }
    }
}

impl Events {
    pub(super) fn new(head: Head, answer: Answer) -> Self {
        let output = Vec::new();
        Self { head, answer, number: 0, open: None, output }
    }

    /// Sends an event of this type.
    fn send(&mut self, kind: &str, mut event: Value, out: &mut Vec<u8>) {
        event["type"] = kind.into();
        event["sequence_number"] = self.number.into();
        self.number += 1;
        sse::event(out, kind, &event);
    }

    fn write(&mut self, parts: Vec<Part>, out: &mut Vec<u8>) {
        for part in parts {
            match part {
                Part::Text(text) => self.text(Kind::Message, &text, out),
                Part::Reasoning(text) => self.text(Kind::Reasoning, &text, out),
                Part::Call(call) => self.call(&call, out),
                Part::Mark(_) => {}
            }
        }
    }

    fn text(&mut self, kind: Kind, text: &str, out: &mut Vec<u8>) {
        if self.open.as_ref().is_none_or(|open| open.kind != kind) {
            self.close("completed", out);
            let id = item_id(if kind == Kind::Message { "msg" } else { "rs" });
            let index = self.output.len();
            let item = kind.item(&id, "in_progress", Vec::new());
            let added = json!({"output_index": index, "item": item});
            self.send("response.output_item.added", added, out);
            let part = json!({
                "item_id": id, "output_index": index, "content_index": 0, "part": kind.part(""),
            });
            self.send("response.content_part.added", part, out);
            self.open = Some(Open { kind, id, text: String::new() });
        }
        let Some(open) = &mut self.open else { return };
        open.text.push_str(text);
        let mut delta = json!({
            "item_id": open.id,
            "output_index": self.output.len(),
            "content_index": 0,
            "delta": text,
        });
        if kind == Kind::Message {
            delta["logprobs"] = json!([]);
        }
        self.send(&format!("{}.delta", kind.events()), delta, out);
    }

    fn close(&mut self, status: &str, out: &mut Vec<u8>) {
        let Some(Open { kind, id, text }) = self.open.take() else { return };
        let index = self.output.len();
        let mut done = json!({
            "item_id": id, "output_index": index, "content_index": 0, "text": text,
        });
        if kind == Kind::Message {
            done["logprobs"] = json!([]);
        }
        self.send(&format!("{}.done", kind.events()), done, out);
        let part = kind.part(&text);
        let done = json!({
            "item_id": id, "output_index": index, "content_index": 0, "part": part,
        });
        self.send("response.content_part.done", done, out);
        self.item_done(kind.item(&id, status, vec![part]), out);
    }

    fn item_done(&mut self, item: Value, out: &mut Vec<u8>) {
        let index = self.output.len();
        self.send("response.output_item.done", json!({"output_index": index, "item": item}), out);
        self.output.push(item);
    }

    fn call(&mut self, call: &Call, out: &mut Vec<u8>) {
        self.close("completed", out);
        let (id, index) = (item_id("fc"), self.output.len());
        let call_id = self.answer.call_id(call.id.as_deref(), "call_");
        let item = call_item(&id, "in_progress", &call_id, call, "");
        self.send("response.output_item.added", json!({"output_index": index, "item": item}), out);
        let arguments = &call.arguments;
        let delta = json!({"item_id": id, "output_index": index, "delta": arguments});
        self.send("response.function_call_arguments.delta", delta, out);
        let done = json!({
            "item_id": id, "output_index": index, "name": call.name, "arguments": arguments,
        });
        self.send("response.function_call_arguments.done", done, out);
        self.item_done(call_item(&id, "completed", &call_id, call, arguments), out);
    }
}

impl Writer for Events {
    fn begin(&mut self, out: &mut Vec<u8>) {
        let response = self.head.response(Vec::new(), None);
        self.send("response.created", json!({"response": response}), out);
        self.send("response.in_progress", json!({"response": response}), out);
    }

    fn tokens(&mut self, tokens: &[Token], out: &mut Vec<u8>) {
        let parts = self.answer.read(tokens);
        self.write(parts, out);
    }

    fn done(&mut self, done: &Completion, out: &mut Vec<u8>) {
        let parts = self.answer.finish();
        self.write(parts, out);
        if self.open.is_none() && self.output.is_empty() {
            // An empty answer is one message.
            self.text(Kind::Message, "", out);
        }
        let status = status(done);
        self.close(status, out);
        let output = std::mem::take(&mut self.output);
        let response = self.head.response(output, Some((done, self.answer.thought())));
        self.send(&format!("response.{status}"), json!({"response": response}), out);
    }

    /// A failure in mid-stream is an event of its own; clients raise it.
    fn failed(&mut self, error: &ApiError, out: &mut Vec<u8>) {
        let inner = error.openai()["error"].take();
        let event = json!({
            "code": inner["code"].as_str().or(inner["type"].as_str()),
            "message": inner["message"],
            "param": inner["param"],
            "error": inner,
        });
        self.send("error", event, out);
    }
}
