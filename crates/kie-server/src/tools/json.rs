//! Where a JSON value ends, byte by byte, and calls made of one.

use serde_json::Value;

use super::{Call, Tools};

/// Finds the end of an object or a list. What lies between is checked by a real parser later.
#[derive(Debug, Default)]
pub(crate) struct Extent {
    depth: usize,
    in_string: bool,
    escaped: bool,
}

/// What a byte meant.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    More,
    /// The value ends with it.
    End,
    /// It stands outside of strings and no JSON has it there.
    Strange,
}

impl Extent {
    /// Takes the next byte; the first must open the value.
    pub(crate) fn take(&mut self, byte: u8) -> Seen {
        if self.in_string {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' => self.escaped = true,
                b'"' => self.in_string = false,
                _ => {}
            }
            return Seen::More;
        }
        match byte {
            b'"' => self.in_string = true,
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' => {
                self.depth -= 1;
                if self.depth == 0 {
                    return Seen::End;
                }
            }
            b'<' => return Seen::Strange,
            _ => {}
        }
        Seen::More
    }
}

/// The call that an object is: `name`, and `arguments` or `parameters`.
pub(crate) fn call(object: &Value) -> Option<Call> {
    let name = object.get("name")?.as_str().filter(|name| !name.is_empty())?;
    let given = object.get("arguments").or_else(|| object.get("parameters"));
    let arguments = match given {
        None | Some(Value::Null) => "{}".to_owned(),
        Some(Value::Object(map)) => serde_json::to_string(map).ok()?,
        // Some models write them as JSON in a string.
        Some(Value::String(text)) => arguments(text)?,
        Some(Value::Bool(_) | Value::Number(_) | Value::Array(_)) => return None,
    };
    let id = object.get("id").and_then(Value::as_str).map(str::to_owned);
    Some(Call { id, name: name.to_owned(), arguments, raw: String::new() })
}

/// An object's text, compact.
pub(crate) fn arguments(text: &str) -> Option<String> {
    match serde_json::from_str(text) {
        Ok(Value::Object(map)) => serde_json::to_string(&map).ok(),
        Ok(_) | Err(_) => None,
    }
}

/// An argument that was written as plain text, in the type that the tool's schema gives it.
pub(crate) fn typed(tools: &Tools, tool: &str, name: &str, text: &str) -> Value {
    let plain = || Value::String(text.to_owned());
    let schema = tools.parameters(tool).and_then(|p| p.get("properties")?.get(name));
    let kinds = match schema.and_then(|schema| schema.get("type")) {
        Some(Value::String(kind)) => vec![kind.as_str()],
        Some(Value::Array(kinds)) => kinds.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    if kinds.contains(&"string") || (kinds.is_empty() && schema.is_none()) {
        return plain();
    }
    serde_json::from_str(text.trim()).unwrap_or_else(|_| plain())
}
