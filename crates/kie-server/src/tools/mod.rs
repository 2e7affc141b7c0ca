//! Tools: what a request says about them (`request.rs`), and calls in what a model writes.
//!
//! ```text
//! parser.rs  text, reasoning and calls, incrementally      reader.rs  one call, by family
//! harmony.rs the same for GPT-OSS' channels                json.rs    where a value ends
//! rules.rs   the grammar of legal calls
//! ```
//!
//! # Invariants
//! * However a text is cut into pieces, what is read of it is the same.
//! * [`Part::raw`] of all parts, joined, is the text: nothing that a model wrote is lost.
//! * What looks like a call and is none is text.

mod harmony;
mod json;
mod parser;
mod reader;
mod request;
mod rules;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod rules_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

pub(crate) use parser::Parser;
pub(crate) use request::{function_type, list, Forced, Tools};
pub(crate) use rules::Around;

/// How a model writes calls: the formats of the published chat templates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    /// `<tool_call>{json}</tool_call>` (Hermes, Qwen), or Qwen3-Coder's
    /// `<function=name><parameter=key>value</parameter></function>` in the same tags.
    Tagged,
    /// Llama 3: an object with `name` and `parameters`, with or without `<|python_tag|>`.
    Llama,
    /// `[TOOL_CALLS]` and a list, or `[TOOL_CALLS]name[ARGS]{json}`.
    Mistral,
    /// `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{json}<｜tool▁call▁end｜>`.
    DeepSeek,
    /// `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{json}<|tool_call_end|>`.
    Kimi,
    /// GPT-OSS: `<|channel|>commentary to=functions.name <|message|>{json}<|call|>`.
    Harmony,
}

/// What a family's text has around a call.
pub(crate) struct Marks {
    /// Each begins a call.
    pub(crate) openers: &'static [&'static str],
    /// What stands before the first call and means nothing.
    pub(crate) fronts: &'static [&'static str],
    /// What may stand behind a call and means nothing.
    pub(crate) closers: &'static [&'static str],
}

/// Marks of reasoning.
pub(crate) const THINK: &str = "<think>";
/// The end of it.
pub(crate) const THINK_END: &str = "</think>";

impl Family {
    /// The family of a template, from its text. One that has no tools gets [`Family::Tagged`],
    /// whose format the server then explains to the model by itself.
    pub(crate) fn of(template: &str) -> Self {
        let has = |text: &str| template.contains(text);
        if has("<|channel|>") {
            Self::Harmony
        } else if has("<｜tool▁calls▁begin｜>") {
            Self::DeepSeek
        } else if has("<|tool_calls_section_begin|>") {
            Self::Kimi
        } else if has("[TOOL_CALLS]") {
            Self::Mistral
        } else if has("<|python_tag|>") || has("function name, \"parameters\"") {
            Self::Llama
        } else {
            Self::Tagged
        }
    }

    pub(crate) fn marks(self) -> Marks {
        match self {
            Self::Tagged => Marks {
                openers: &["<tool_call>", "<function="],
                fronts: &[],
                closers: &["</tool_call>"],
            },
            Self::Llama => Marks { openers: &["<|python_tag|>"], fronts: &[], closers: &[";"] },
            Self::Mistral => Marks { openers: &["[TOOL_CALLS]"], fronts: &[], closers: &[] },
            Self::DeepSeek => Marks {
                openers: &["<｜tool▁call▁begin｜>"],
                fronts: &["<｜tool▁calls▁begin｜>"],
                closers: &["```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"],
            },
            Self::Kimi => Marks {
                openers: &["<|tool_call_begin|>"],
                fronts: &["<|tool_calls_section_begin|>"],
                closers: &["<|tool_call_end|>", "<|tool_calls_section_end|>"],
            },
            Self::Harmony => Marks { openers: &[], fronts: &[], closers: &[] },
        }
    }

    /// Marks that may be special tokens, which have no text of their own in an answer.
    pub(crate) fn special(self) -> Vec<&'static str> {
        let marks = self.marks();
        let own = match self {
            Self::Harmony => harmony::MARKS,
            Self::DeepSeek => &["<｜tool▁sep｜>"],
            Self::Kimi => &["<|tool_call_argument_begin|>"],
            Self::Mistral => &["[ARGS]", "[CALL_ID]"],
            Self::Tagged | Self::Llama => &[],
        };
        let lists = [marks.openers, marks.fronts, marks.closers, own, &[THINK, THINK_END]];
        lists.concat()
    }
}

/// A piece of an answer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Part {
    /// What the user reads.
    Text(String),
    /// What the model thought.
    Reasoning(String),
    /// A call of a tool.
    Call(Call),
    /// Marks and the white space around them.
    Mark(String),
}

/// A call of a tool.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Call {
    /// Where the model's format has one.
    pub(crate) id: Option<String>,
    pub(crate) name: String,
    /// A JSON object.
    pub(crate) arguments: String,
    /// What the model wrote.
    pub(crate) raw: String,
}

#[cfg(test)]
impl Part {
    /// What the model wrote.
    pub(crate) fn raw(&self) -> &str {
        match self {
            Self::Text(text) | Self::Reasoning(text) | Self::Mark(text) => text,
            Self::Call(call) => &call.raw,
        }
    }
}
