//! Log-probabilities in the two forms that OpenAI has.

use kie_core::request::{Token, TopLogprob};
use kie_core::{Engine, LogitsPath};
use serde_json::{json, Map, Value};

use crate::errors::ApiError;

/// Largest table of logits that is made for the log-probabilities of a prompt, in numbers.
const LOGITS_MAX: usize = 128 << 20;

/// `logprobs` of chat completions.
pub(crate) fn chat(engine: &Engine, tokens: &[Token]) -> Value {
    let one = |id: u32, logprob: f32| {
        let bytes = engine.token_bytes(id);
        let text = String::from_utf8_lossy(&bytes).into_owned();
        json!({"token": text, "logprob": logprob, "bytes": bytes})
    };
    let entry = |token: &Token| {
        let mut entry = one(token.token_ids[0], token.logprob.unwrap_or(0.0));
        let top: Vec<Value> = token.top_logprobs.iter().map(|t| one(t.id, t.logprob)).collect();
        entry["top_logprobs"] = Value::Array(top);
        entry
    };
    json!({"content": tokens.iter().map(entry).collect::<Vec<_>>(), "refusal": null})
}

/// `logprobs` of completions, piece by piece.
pub(crate) struct Legacy {
    /// Characters before the next token.
    offset: usize,
    /// Alternatives a token.
    most: usize,
}

impl Legacy {
    pub(crate) fn new(most: usize) -> Self {
        Self { offset: 0, most }
    }

    /// The lists for the next tokens.
    pub(crate) fn of_tokens(&mut self, engine: &Engine, tokens: &[Token]) -> Value {
        let rows = tokens.iter().map(|t| (t.token_ids[0], t.logprob, t.top_logprobs.as_slice()));
        self.of_rows(engine, rows)
    }

    fn of_rows<'a>(
        &mut self,
        engine: &Engine,
        rows: impl Iterator<Item = (u32, Option<f32>, &'a [TopLogprob])>,
    ) -> Value {
        let (mut tokens, mut logprobs) = (Vec::new(), Vec::new());
        let (mut tops, mut offsets) = (Vec::new(), Vec::new());
        for (id, logprob, top) in rows {
            let bytes = engine.token_bytes(id);
            tokens.push(Value::from(named(&bytes)));
            logprobs.push(json!(logprob));
            let top: Map<String, Value> =
                top.iter().map(|t| (named(&engine.token_bytes(t.id)), json!(t.logprob))).collect();
            tops.push(if logprob.is_some() { Value::Object(top) } else { Value::Null });
            offsets.push(Value::from(self.offset));
            // Special tokens have a name and no text. Bytes that begin a character count, as the
            // offset is in characters.
            if engine.detokenize(&[id], true).is_ok_and(|text| !text.is_empty()) {
                self.offset += bytes.iter().filter(|byte| **byte & 0xC0 != 0x80).count();
            }
        }
        let tops = if self.most > 0 { Value::Array(tops) } else { Value::Null };
        json!({
            "tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops,
            "text_offset": offsets,
        })
    }

    /// The lists for a prompt: what precedes a token gives its probability, so the first has none.
    ///
    /// # Errors
    /// 400 for a prompt whose logits are too many, and what the engine refuses.
    pub(crate) fn of_prompt(&mut self, engine: &Engine, ids: &[u32]) -> Result<Value, ApiError> {
        let vocab = engine.info().vocab;
        let most = LOGITS_MAX / vocab.max(1);
        if ids.len() > most {
            let got = ids.len();
            let message = format!("logprobs with echo: at most {most} prompt tokens, got {got}");
            return Err(ApiError::field("logprobs", message));
        }
        let refused = |e: kie_core::Error| ApiError::engine(&e, "prompt");
        let logits = engine.logits(ids, LogitsPath::Prefill).map_err(refused)?;
        let mut tops = vec![(None, Vec::new())];
        for (row, next) in logits.values.chunks_exact(vocab).zip(&ids[1..]) {
            let (logprob, top) = probabilities(row, *next, self.most);
            tops.push((Some(logprob), top));
        }
        let rows =
            ids.iter().zip(&tops).map(|(id, (logprob, top))| (*id, *logprob, top.as_slice()));
        Ok(self.of_rows(engine, rows))
    }
}

/// Two pieces of a legacy `logprobs`, one behind the other.
pub(crate) fn joined(mut first: Value, second: Value) -> Value {
    if let (Value::Object(first), Value::Object(second)) = (&mut first, second) {
        for (name, value) in second {
            if let (Some(Value::Array(list)), Value::Array(more)) = (first.get_mut(&name), value) {
                list.extend(more);
            }
        }
    }
    first
}

/// Natural log of the probability of `id` among `logits`, and of the `most` most probable ids.
fn probabilities(logits: &[f32], id: u32, most: usize) -> (f32, Vec<TopLogprob>) {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|l| f64::from(l - highest).exp()).sum();
    let logprob = |l: f32| (f64::from(l - highest) - sum.ln()) as f32;
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    // Ties to the lower id.
    let before =
        |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    if most > 0 && most < order.len() {
        order.select_nth_unstable_by(most - 1, before);
    }
    order.truncate(most);
    order.sort_unstable_by(before);
    let top = order.iter().map(|&id| TopLogprob { id, logprob: logprob(logits[id as usize]) });
    (logprob(logits[id as usize]), top.collect())
}

/// A token as legacy clients read it: text, or `bytes:\x..` for what is part of a character.
fn named(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => {
            let hex: String = bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect();
            format!("bytes:{hex}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_are_of_the_raw_logits() {
        let (chosen, top) = probabilities(&[0.0, 2.0, 2.0, -1.0], 0, 2);
        let sum = 1.0 + 2.0 * 2.0_f64.exp() + (-1.0_f64).exp();
        assert!((f64::from(chosen) + sum.ln()).abs() < 1e-6);
        assert_eq!(top.iter().map(|t| t.id).collect::<Vec<_>>(), [1, 2]);
        assert!((f64::from(top[0].logprob) - (2.0 - sum.ln())).abs() < 1e-6);
        assert!(probabilities(&[1.0, 1.0], 1, 0).1.is_empty());
        assert_eq!(probabilities(&[1.0, 1.0], 1, 20).1.len(), 2);
    }

    #[test]
    fn parts_of_characters_have_names() {
        assert_eq!(named("é".as_bytes()), "é");
        assert_eq!(named(&[0xE2, 0x96]), "bytes:\\xe2\\x96");
    }
}
