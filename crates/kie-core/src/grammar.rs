//! Grammars: what an answer's text must be. [`spec`] is what callers say, `schema` what of JSON
//! Schema can be promised, `compiled` a grammar over a model's vocabulary, `ending` how a text ends
//! legally, `follower` the thread that makes a sequence's masks while the device computes.
//!
//! Invariants: a grammar that cannot be kept to is refused before anything runs; what a mask allows
//! depends on the grammar, the vocabulary and the tokens before, never on time.

pub(crate) mod compiled;
mod ending;
pub(crate) mod follower;
mod schema;
pub mod spec;
pub mod times;

pub use spec::Grammar;

impl Grammar {
    /// A JSON Schema as `%json` of a Lark grammar takes it.
    ///
    /// # Errors
    /// Why it cannot be kept to.
    pub fn embedded(text: &str) -> Result<String, String> {
        Ok(schema::prepared(text)?.to_string())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
