//! What quantising weights costs: logits of a built-in text beside those of the model as stored.

use crate::engine::{Builder, Engine, LogitsPath};
use crate::error::{Error, Result};
use crate::request::EngineConfig;

/// Some prose and some code.
const TEXT: &str = "The quick brown fox jumps over the lazy dog, and in 1969 two people walked \
on the Moon. To sort a list, compare neighbours and swap them while they are out of order.\n\n\
def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        \
a, b = b, a + b\n    return a\n";
/// Most tokens of it that are read.
const TOKENS: usize = 96;

/// A line on the relative error of a quantised engine's logits. `builder` opened it; a second
/// engine is opened as the model is stored, which is done on the CPU only, and where there is room.
///
/// # Errors
/// [`Error::Interrupted`], and what reading logits of the quantised engine meets.
pub(crate) fn with_stored(engine: &Engine, builder: &Builder) -> Result<String> {
    let device = engine.info().device;
    if !device.starts_with("cpu") {
        return Ok(format!("converted logits were not compared: {device} is no CPU\n"));
    }
    let mut ids = engine.tokenize(TEXT, true)?;
    ids.truncate(TOKENS.min(engine.context()));
    let config = EngineConfig {
        device,
        dtype: "auto".to_owned(),
        max_seq_len: Some(ids.len()),
        max_batch: 1,
        prefix_cache: false,
        ..builder.config.clone()
    };
    let stored = builder.another(config).build().and_then(|stored| {
        let logits = stored.logits(&ids, LogitsPath::Prefill);
        stored.close();
        logits
    });
    let before = match stored {
        Ok(logits) => logits.values,
        Err(Error::Interrupted) => return Err(Error::Interrupted),
        Err(why) => {
            let why = why.to_string();
            let why = why.lines().next().unwrap_or_default();
            return Ok(format!("converted logits were not compared: as stored it gives: {why}\n"));
        }
    };
    let after = engine.logits(&ids, LogitsPath::Prefill)?.values;
    let square = |x: f32| f64::from(x).powi(2);
    let error: f64 = after.iter().zip(&before).map(|(a, b)| square(a - b)).sum();
    let size: f64 = before.iter().map(|b| square(*b)).sum();
    let relative = (error / size.max(f64::MIN_POSITIVE)).sqrt();
    let count = ids.len();
    Ok(format!(
        "converted logits of a built-in text ({count} tokens): relative error {relative:.1e}\n"
    ))
}
