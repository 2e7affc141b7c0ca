//! Answers on OpenAI's wire: whole ones, and chunks of streamed ones with how they end. The paths
//! differ in what a choice holds, `P`: an object with the one field that their API gives it.

use kie_core::request::Completion;
use serde::Serialize;
use serde_json::{json, Value};

use super::types::{self, Head, Streaming};
use crate::sse;

/// One chunk of a stream, with its one choice.
#[derive(Serialize)]
pub(crate) struct Chunk<'a, P> {
    #[serde(flatten)]
    head: &'a Head,
    choices: [Choice<P>; 1],
    /// `null`, where the last chunk will have it.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<()>,
    #[serde(skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<Value>,
}

#[derive(Serialize)]
struct Choice<P> {
    index: u32,
    #[serde(flatten)]
    part: P,
    logprobs: Option<Value>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<Value>,
}

impl<'a, P: Serialize> Chunk<'a, P> {
    /// A chunk of an answer that goes on.
    pub(crate) fn new(
        head: &'a Head,
        streaming: Streaming,
        part: P,
        logprobs: Option<Value>,
    ) -> Self {
        let choice = Choice { index: 0, part, logprobs, finish_reason: None, stop_reason: None };
        let usage = streaming.include_usage.then_some(());
        Self { head, choices: [choice], usage, seed: None, timings: None }
    }

    /// The same with the request's seed.
    pub(crate) fn seeded(self, seed: Option<u64>) -> Self {
        Self { seed, ..self }
    }

    /// Sends it as the last one, with what ends a stream behind it.
    pub(crate) fn end(
        mut self,
        out: &mut Vec<u8>,
        streaming: Streaming,
        done: &Completion,
        (finish_reason, stop_reason): (&'static str, Value),
    ) {
        self.choices[0].finish_reason = Some(finish_reason);
        self.choices[0].stop_reason = Some(stop_reason);
        let timings = types::timings(&done.timings);
        if streaming.include_usage {
            sse::data(out, &self);
            sse::data(out, &types::usage_chunk(self.head, done, timings));
        } else {
            self.timings = Some(timings);
            sse::data(out, &self);
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
    }
}

/// A whole answer.
pub(crate) fn whole<P: Serialize>(
    head: Head,
    done: &Completion,
    part: P,
    logprobs: Option<Value>,
    (finish_reason, stop_reason): (&'static str, Value),
) -> Value {
    let (finish_reason, stop_reason) = (Some(finish_reason), Some(stop_reason));
    json!({
        "id": head.id,
        "object": head.object,
        "created": head.created,
        "model": head.model,
        "choices": [Choice { index: 0, part, logprobs, finish_reason, stop_reason }],
        "usage": types::usage(&done.usage),
        "timings": types::timings(&done.timings),
        "seed": done.seed,
        "system_fingerprint": head.system_fingerprint,
    })
}
