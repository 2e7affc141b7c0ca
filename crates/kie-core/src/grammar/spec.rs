//! A grammar as its caller writes it. Plain data.

use serde_json::Value;

/// What the text of an answer must be.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Grammar {
    /// JSON that is valid by a JSON Schema, which is JSON itself.
    JsonSchema(String),
    /// Text that a regular expression matches as a whole.
    Regex(String),
    /// Text of a context-free grammar in llguidance's form of Lark; it begins with `start`.
    Lark(String),
}

impl Grammar {
    /// JSON that is valid by `schema`.
    pub fn json_schema(schema: &Value) -> Self {
        Self::JsonSchema(schema.to_string())
    }

    /// Any JSON object.
    pub fn json_object() -> Self {
        Self::JsonSchema(r#"{"type":"object"}"#.to_owned())
    }

    /// The text that says it.
    pub fn definition(&self) -> &str {
        let (Self::JsonSchema(text) | Self::Regex(text) | Self::Lark(text)) = self;
        text
    }
}
