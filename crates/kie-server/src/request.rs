//! A JSON body, taken field by field.
//!
//! Invariants: `null` is absent; a field of the wrong type is 400 with its name; a field that
//! nobody took is unknown and 400 too, so that nothing a client asks for is dropped in silence.

use serde_json::{Map, Value};

use crate::errors::ApiError;

/// What a value is, in words.
pub(crate) fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Fields(Map<String, Value>);

impl Fields {
    /// The fields of a body.
    ///
    /// # Errors
    /// 400 for what is no JSON object.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let wrong = |why: String| ApiError::new(axum::http::StatusCode::BAD_REQUEST, why);
        match serde_json::from_slice(body) {
            Ok(Value::Object(mut map)) => {
                map.retain(|_, value| !value.is_null());
                Ok(Self(map))
            }
            Ok(other) => Err(wrong(format!("body: wanted a JSON object, got {}", kind_of(&other)))),
            Err(error) => Err(wrong(format!("body: not JSON: {error}"))),
        }
    }

    /// A field that stays to be taken.
    pub(crate) fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name)
    }

    /// A field, whatever it is.
    pub(crate) fn take(&mut self, name: &str) -> Option<Value> {
        self.0.remove(name)
    }

    /// A field that must be there.
    ///
    /// # Errors
    /// 400 without it.
    pub(crate) fn need(&mut self, name: &str) -> Result<Value, ApiError> {
        self.take(name).ok_or_else(|| ApiError::field(name, format!("{name}: missing")))
    }

    fn read<T>(
        &mut self,
        name: &str,
        wanted: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match read(&value) {
            Some(read) => Ok(Some(read)),
            None => Err(wanted_but(name, wanted, &value)),
        }
    }

    /// Text.
    ///
    /// # Errors
    /// 400 for another type; likewise below.
    pub(crate) fn text(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        self.read(name, "a string", |v| v.as_str().map(str::to_owned))
    }

    /// True or false.
    pub(crate) fn flag(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        self.read(name, "true or false", Value::as_bool)
    }

    /// A number.
    pub(crate) fn number(&mut self, name: &str) -> Result<Option<f64>, ApiError> {
        self.read(name, "a number", Value::as_f64)
    }

    /// A whole number from 0 on.
    pub(crate) fn count(&mut self, name: &str) -> Result<Option<usize>, ApiError> {
        self.read(name, "a whole number from 0 on", |v| usize::try_from(whole(v)?).ok())
    }

    /// A whole number in 64 bits, with or without a sign.
    pub(crate) fn bits(&mut self, name: &str) -> Result<Option<u64>, ApiError> {
        let read = |v: &Value| v.as_u64().or_else(|| v.as_i64().map(i64::cast_unsigned));
        self.read(name, "a whole number of 64 bits", |v| read(v).or_else(|| whole(v)))
    }

    /// A list of token ids.
    pub(crate) fn ids(&mut self, name: &str) -> Result<Option<Vec<u32>>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        if let Some(ids) = ids_of(&value) {
            return Ok(Some(ids));
        }
        let mut numbered = value.as_array().into_iter().flatten().enumerate();
        Err(match numbered.find(|(_, id)| id_of(id).is_none()) {
            Some((n, id)) => wanted_but(&format!("{name}[{n}]"), "a token id", id),
            None => wanted_but(name, "a list of token ids", &value),
        })
    }

    /// A string or a list of strings.
    pub(crate) fn strings(&mut self, name: &str) -> Result<Option<Vec<String>>, ApiError> {
        self.read(name, "a string or a list of strings", |v| match v {
            Value::String(text) => Some(vec![text.clone()]),
            v => v.as_array()?.iter().map(|t| t.as_str().map(str::to_owned)).collect(),
        })
    }

    /// An object.
    pub(crate) fn object(&mut self, name: &str) -> Result<Option<Map<String, Value>>, ApiError> {
        self.read(name, "an object", |v| v.as_object().cloned())
    }

    /// A field that is taken only where it changes nothing.
    ///
    /// # Errors
    /// 400 for every other value.
    pub(crate) fn neutral(
        &mut self,
        name: &str,
        wanted: &str,
        is: impl FnOnce(&Value) -> bool,
    ) -> Result<(), ApiError> {
        match self.take(name) {
            Some(value) if !is(&value) => Err(wanted_but(name, wanted, &value)),
            Some(_) | None => Ok(()),
        }
    }

    /// Fields that change nothing, whatever they hold.
    pub(crate) fn ignore(&mut self, names: &[&str]) {
        for name in names {
            self.0.remove(*name);
        }
    }

    /// The end: nothing may be left.
    ///
    /// # Errors
    /// 400 naming a field that nobody took.
    pub(crate) fn finish(self) -> Result<(), ApiError> {
        match self.0.keys().next() {
            Some(name) => {
                let short: String = name.chars().take(64).collect();
                let message = format!("{short}: unknown or unsupported field");
                Err(ApiError::field(short, message))
            }
            None => Ok(()),
        }
    }
}

/// `name: wanted ..., got ...`, with a short value shown.
pub(crate) fn wanted_but(name: &str, wanted: &str, got: &Value) -> ApiError {
    let shown = match got {
        Value::Bool(_) | Value::Number(_) => got.to_string(),
        Value::String(text) if text.len() <= 40 => got.to_string(),
        Value::String(_) | Value::Array(_) | Value::Object(_) | Value::Null => {
            kind_of(got).to_owned()
        }
    };
    ApiError::field(name, format!("{name}: wanted {wanted}, got {shown}"))
}

/// 5 and 5.0, as clients of languages with one kind of number send them.
fn whole(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| {
        let number = value.as_f64()?;
        let inside = (0.0..9e15).contains(&number) && number.fract() == 0.0;
        inside.then_some(number as u64)
    })
}

/// A list of ids.
pub(crate) fn ids_of(value: &Value) -> Option<Vec<u32>> {
    value.as_array()?.iter().map(id_of).collect()
}

fn id_of(value: &Value) -> Option<u32> {
    u32::try_from(whole(value)?).ok()
}
