//! A streamed answer: `message_start`, its blocks, `message_delta`, `message_stop`.

use kie_core::request::{Completion, Token, Usage};
use serde_json::{json, Value};

use super::{message, stop, usage, Head};
use crate::chat::Answer;
use crate::errors::ApiError;
use crate::generate::Writer;
use crate::openai::types;
use crate::router::RequestId;
use crate::sse;
use crate::tools::{Call, Part};

/// See the module.
pub(super) struct Events {
    head: Head,
    answer: Answer,
    request_id: RequestId,
    /// Of the prompt, for the beginning.
    usage: Usage,
    pinged: bool,
    called: bool,
    /// The block that is open.
    open: Option<Kind>,
    /// Blocks that are closed.
    closed: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Thinking,
}

impl Events {
    pub(super) fn new(head: Head, answer: Answer, request_id: RequestId, usage: Usage) -> Self {
        Self {
            head,
            answer,
            request_id,
            usage,
            pinged: false,
            called: false,
            open: None,
            closed: 0,
        }
    }

    fn write(&mut self, parts: Vec<Part>, out: &mut Vec<u8>) {
        for part in parts {
            match part {
                Part::Text(text) => self.text(Kind::Text, &text, out),
                Part::Reasoning(text) => self.text(Kind::Thinking, &text, out),
                Part::Call(call) => self.call(&call, out),
                Part::Mark(_) => {}
            }
        }
    }

    fn text(&mut self, kind: Kind, text: &str, out: &mut Vec<u8>) {
        if self.open != Some(kind) {
            self.close(out);
            let block = match kind {
                Kind::Text => json!({"type": "text", "text": ""}),
                Kind::Thinking => json!({"type": "thinking", "thinking": "", "signature": ""}),
            };
            self.start(&block, out);
            self.open = Some(kind);
        }
        let delta = match kind {
            Kind::Text => json!({"type": "text_delta", "text": text}),
            Kind::Thinking => json!({"type": "thinking_delta", "thinking": text}),
        };
        self.delta(&delta, out);
    }

    fn call(&mut self, call: &Call, out: &mut Vec<u8>) {
        self.close(out);
        self.called = true;
        let id = self.answer.call_id(call.id.as_deref(), "toolu_");
        let block = json!({"type": "tool_use", "id": id, "name": call.name, "input": {}});
        self.start(&block, out);
        self.delta(&json!({"type": "input_json_delta", "partial_json": call.arguments}), out);
        self.stop(out);
    }

    fn start(&mut self, block: &Value, out: &mut Vec<u8>) {
        let index = self.closed;
        let start = json!({"type": "content_block_start", "index": index, "content_block": block});
        send(out, &start);
        if !std::mem::replace(&mut self.pinged, true) {
            send(out, &json!({"type": "ping"}));
        }
    }

    fn delta(&self, delta: &Value, out: &mut Vec<u8>) {
        let index = self.closed;
        send(out, &json!({"type": "content_block_delta", "index": index, "delta": delta}));
    }

    fn stop(&mut self, out: &mut Vec<u8>) {
        send(out, &json!({"type": "content_block_stop", "index": self.closed}));
        self.closed += 1;
        self.open = None;
    }

    fn close(&mut self, out: &mut Vec<u8>) {
        match self.open {
            None => return,
            Some(Kind::Thinking) => {
                self.delta(&json!({"type": "signature_delta", "signature": ""}), out);
            }
            Some(Kind::Text) => {}
        }
        self.stop(out);
    }
}

impl Writer for Events {
    fn begin(&mut self, out: &mut Vec<u8>) {
        let message = message(&self.head, Vec::new(), None, usage(&self.usage));
        send(out, &json!({"type": "message_start", "message": message}));
    }

    fn tokens(&mut self, tokens: &[Token], out: &mut Vec<u8>) {
        let parts = self.answer.read(tokens);
        self.write(parts, out);
    }

    fn done(&mut self, done: &Completion, out: &mut Vec<u8>) {
        let parts = self.answer.finish();
        self.write(parts, out);
        self.close(out);
        let (reason, sequence) = stop(done, self.called);
        send(
            out,
            &json!({
                "type": "message_delta",
                "delta": {"stop_reason": reason, "stop_sequence": sequence},
                "usage": usage(&done.usage),
                "timings": types::timings(&done.timings),
                "seed": done.seed,
            }),
        );
        send(out, &json!({"type": "message_stop"}));
    }

    fn failed(&mut self, error: &ApiError, out: &mut Vec<u8>) {
        send(out, &error.anthropic(&self.request_id.0));
    }
}

/// An event under the name of its type.
fn send(out: &mut Vec<u8>, value: &Value) {
    sse::event(out, value["type"].as_str().unwrap_or_default(), value);
}
