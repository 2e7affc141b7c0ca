//! How much longer a tokenizer's rules may make a text.
//!
//! Replacements in a row multiply: twelve that each write ten characters for one make a terabyte of
//! one byte, and an allocation that fails takes the process down. So each step's worst case is read
//! off `tokenizer.json`; a text that could outgrow its bound is first measured, step by step and
//! piece by piece, which takes little memory whatever comes out.

use serde_json::Value;
use tokenizers::{NormalizedString, Normalizer as _, NormalizerWrapper};

/// Bytes that every text may become.
const FREE_BYTES: u64 = 16 << 20;
/// How many times its length a longer text may become. Compatibility forms of Unicode make 11 times
/// the bytes of some characters, and of whole texts hardly 2.
const FACTOR: u64 = 4;
/// Bytes of a piece that is measured at a time.
const PIECE_BYTES: usize = 4096;
/// Most bytes that a measured piece may become in one step.
const MEASURED_BYTES_MAX: u64 = 64 << 20;
/// Steps of a tokenizer; real ones have up to 5.
const STEPS_MAX: usize = 64;

/// A step in the worst case: bytes `n` become `n * factor + added`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Worst {
    factor: u64,
    added: u64,
}

impl Worst {
    const fn times(factor: u64) -> Self {
        Self { factor, added: 0 }
    }

    fn of(self, bytes: u64) -> u64 {
        bytes.saturating_mul(self.factor).saturating_add(self.added)
    }
}

/// The normalizers of a tokenizer, taken apart.
#[derive(Debug, Default)]
pub(crate) struct Growth {
    steps: Vec<(Worst, NormalizerWrapper)>,
}

impl Growth {
    /// Of the `normalizer` of a tokenizer.json.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn of(normalizer: &Value) -> Result<Self, String> {
        let mut steps = Vec::new();
        for step in flat(normalizer, "normalizers")? {
            let rule = serde_json::from_value(step.clone()).map_err(|e| e.to_string())?;
            steps.push((worst(step), rule));
        }
        Ok(Self { steps })
    }

    /// Whether a text stays within its bound.
    ///
    /// # Errors
    /// What it would become.
    pub(crate) fn check(&self, text: &str) -> Result<(), String> {
        let most = FREE_BYTES.max(FACTOR.saturating_mul(text.len() as u64));
        let mut longest = text.len() as u64;
        let worst = self.steps.iter().fold(longest, |bytes, (worst, _)| {
            longest = worst.of(bytes).max(longest);
            worst.of(bytes)
        });
        if worst.max(longest) <= most {
            return Ok(());
        }
        self.measure(text, most)
    }

    fn measure(&self, text: &str, most: u64) -> Result<(), String> {
        let mut text = text.to_owned();
        for (step, (worst, rule)) in self.steps.iter().enumerate() {
            let mut grown = String::new();
            for piece in pieces(&text) {
                let bytes = worst.of(piece.len() as u64);
                let too_long = |bytes: u64| {
                    format!("normalizer {step} would make {bytes} bytes or more, {most} at most")
                };
                if bytes > MEASURED_BYTES_MAX {
                    return Err(too_long(bytes));
                }
                let mut piece = NormalizedString::from(piece);
                rule.normalize(&mut piece).map_err(|e| e.to_string())?;
                grown.push_str(piece.get());
                if grown.len() as u64 > most {
                    return Err(too_long(grown.len() as u64));
                }
            }
            text = grown;
        }
        Ok(())
    }
}

/// Bytes that the `decoder` of a tokenizer.json may make of a token of `bytes`.
///
/// # Errors
/// What is wrong with it.
pub(crate) fn decoded(decoder: &Value, bytes: u64) -> Result<u64, String> {
    let steps = flat(decoder, "decoders")?;
    Ok(steps.into_iter().fold(bytes, |bytes, step| worst(step).of(bytes)))
}

/// The steps of nested sequences.
fn flat<'a>(rule: &'a Value, list: &str) -> Result<Vec<&'a Value>, String> {
    let mut steps = Vec::new();
    let mut open = vec![rule];
    while let Some(rule) = open.pop() {
        match rule.get(list).and_then(Value::as_array) {
            Some(inner) => open.extend(inner.iter().rev()),
            None if rule.is_null() => {}
            None => steps.push(rule),
        }
        if steps.len() + open.len() > STEPS_MAX {
            return Err(format!("more than {STEPS_MAX} steps in a row"));
        }
    }
    Ok(steps)
}

/// A step in the worst case, by its type (`tokenizers` 0.22).
fn worst(step: &Value) -> Worst {
    let text = |key: &str| step.get(key).and_then(Value::as_str).map_or(0, |s| s.len() as u64);
    match step.get("type").and_then(Value::as_str) {
        Some("NFC" | "Lowercase" | "BertNormalizer") => Worst::times(3),
        Some("NFD" | "NFKC" | "NFKD") => Worst::times(11),
        Some("ByteLevel") => Worst { factor: 2, added: 2 },
        Some("Nmt" | "Strip" | "StripAccents" | "Fuse" | "CTC" | "BPEDecoder") => Worst::times(1),
        Some("WordPiece") => Worst { factor: 1, added: 1 },
        // A byte that is none is written as a character of three.
        Some("ByteFallback" | "Metaspace") => Worst { factor: 3, added: 3 },
        Some("Prepend") => Worst { factor: 1, added: text("prepend") },
        Some("Replace") => replace(step, text("content")),
        // What it is, or does, is not known from here: as long as its whole description each.
        _ => Worst::times(longest_entry(step)),
    }
}

fn replace(step: &Value, content: u64) -> Worst {
    let pattern = |kind: &str| step.get("pattern")?.get(kind)?.as_str();
    match pattern("String") {
        Some(pattern) if !pattern.is_empty() => {
            Worst::times(content.div_ceil(pattern.len() as u64).max(1))
        }
        // An expression may match a byte, or nothing, everywhere.
        _ => Worst { factor: content.saturating_add(1), added: content },
    }
}

/// Of a charsmap (SentencePiece): its replacements are texts that end with a zero. Otherwise the
/// length of all that is said.
fn longest_entry(step: &Value) -> u64 {
    let map = step.get("precompiled_charsmap").and_then(Value::as_str);
    let bytes = map.map_or_else(|| vec![b'x'; step.to_string().len()], base64);
    let longest = bytes.split(|byte| *byte == 0).map(<[u8]>::len).max().unwrap_or(0);
    (longest as u64).max(1)
}

/// The bytes of base64 (RFC 4648); characters that are none end it.
fn base64(text: &str) -> Vec<u8> {
    let digit = |c: u8| match c {
        b'A'..=b'Z' => Some(c - b'A'),
        b'a'..=b'z' => Some(c - b'a' + 26),
        b'0'..=b'9' => Some(c - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let digits: Vec<u8> = text.bytes().map_while(digit).collect();
    let mut bytes = Vec::with_capacity(digits.len());
    for group in digits.chunks(4) {
        let bits = group.iter().fold(0_u32, |bits, d| bits << 6 | u32::from(*d));
        let bits = bits << (6 * (4 - group.len()));
        bytes.extend_from_slice(&bits.to_be_bytes()[1..group.len().max(1)]);
    }
    bytes
}

/// A text in pieces of whole characters.
fn pieces(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    let mut first = true;
    std::iter::from_fn(move || {
        if rest.is_empty() && !std::mem::take(&mut first) {
            return None;
        }
        first = false;
        let mut end = PIECE_BYTES.min(rest.len());
        while !rest.is_char_boundary(end) {
            end += 1;
        }
        let (piece, behind) = rest.split_at(end);
        rest = behind;
        Some(piece)
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    fn replace(from: &str, to: &str) -> Value {
        json!({"type": "Replace", "pattern": {"String": from}, "content": to})
    }

    #[test]
    fn rows_of_replacements_are_refused_before_they_run() {
        let tenfold = vec![replace("a", &"a".repeat(10)); 12];
        let growth = Growth::of(&json!({"type": "Sequence", "normalizers": tenfold})).unwrap();
        growth.check("bbb").unwrap();
        growth.check("").unwrap();
        assert!(growth.check("bab").unwrap_err().contains("normalizer 7"));
        let nothing = json!({"type": "Replace", "pattern": {"Regex": ""}, "content": "x"});
        let growth = Growth::of(&json!({"type": "Sequence", "normalizers": [nothing]})).unwrap();
        growth.check(&"a".repeat(1 << 20)).unwrap();
        assert!(Growth::of(
            &json!({"type": "Sequence", "normalizers": vec![Value::Bool(true); 99]})
        )
        .is_err());
    }

    #[test]
    fn what_tokenizers_do_is_let_through() {
        let llama2 = json!({"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")]});
        for normalizer in [llama2, json!({"type": "NFC"}), json!({"type": "NFKC"}), Value::Null] {
            let growth = Growth::of(&normalizer).unwrap();
            growth.check(&"some words, and more. ".repeat(1 << 19)).unwrap();
        }
        assert_eq!(decoded(&replace("▁", " "), 100), Ok(100));
        let tenfold = vec![replace("a", &"a".repeat(10)); 12];
        let decoder = json!({"type": "Sequence", "decoders": tenfold});
        assert_eq!(decoded(&decoder, 1), Ok(10_u64.pow(12)));
    }

    #[test]
    fn base64_is_read() {
        assert_eq!(base64("aGVsbG8="), b"hello");
        assert_eq!(base64("aGVsbA"), b"hell");
        assert_eq!(base64(""), b"");
    }
}
