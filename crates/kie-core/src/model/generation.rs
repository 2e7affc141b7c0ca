//! What a checkpoint recommends for generation.

use std::path::Path;

use kie_kernels::abi::MAX_STOP_IDS;
use serde_json::Value;

use super::config::Config;
use crate::error::{Error, Result};
use crate::json;

/// What `generation_config.json` recommends.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Generation {
    /// Id that begins a sequence.
    pub bos: Option<u32>,
    /// Ids that end a sequence.
    pub eos: Vec<u32>,
    /// False: greedy, whatever the temperature says.
    pub do_sample: Option<bool>,
    /// See [`crate::request::SamplingParams`].
    pub temperature: Option<f64>,
    /// The same.
    pub top_p: Option<f64>,
    /// The same.
    pub top_k: Option<u32>,
    /// The same.
    pub min_p: Option<f64>,
    /// The same.
    pub repetition_penalty: Option<f64>,
}

pub(super) const GENERATION: &str = "generation_config.json";

impl Generation {
    /// Reads the file; a folder without one recommends nothing.
    ///
    /// # Errors
    /// [`Error::Load`] for a file that is not JSON or has a value of the wrong kind.
    pub fn read(folder: &Path) -> Result<Self> {
        let file = folder.join(GENERATION);
        if !kie_kernels::file::is_listed(&file) {
            return Ok(Self::default());
        }
        let value = json::read(&file)?;
        let config = Config::new(&value, &file)?;
        // Here and not when a request comes without its own: the file is at fault.
        let number = |key: &str, wanted: &str, inside: fn(f64) -> bool| -> Result<Option<f64>> {
            let wrong = |v: &Value| Error::tensor(&file, key, wanted, v.to_string());
            let fits = |n: &f64| (*n as f32).is_finite() && inside(*n);
            let good = |v: &Value| v.as_f64().filter(fits).ok_or_else(|| wrong(v));
            config.get(key).map(good).transpose()
        };
        let whole = |v: &Value| v.as_u64().and_then(|k| u32::try_from(k).ok());
        let top_k = |v: &Value| {
            let wanted = "a whole number from 0";
            whole(v).ok_or_else(|| Error::tensor(&file, "top_k", wanted, v.to_string()))
        };
        let do_sample = config.get("do_sample").map(|_| config.flag_or("do_sample", false));
        let eos = config.token_ids("eos_token_id")?;
        if eos.len() > MAX_STOP_IDS {
            let (wanted, got) = (format!("at most {MAX_STOP_IDS} ids"), eos.len().to_string());
            return Err(Error::tensor(file, "eos_token_id", wanted, got));
        }
        let share = "a number above 0 and at most 1";
        let above = "a number above 0";
        Ok(Self {
            bos: config.token_ids("bos_token_id")?.first().copied(),
            eos,
            do_sample: do_sample.transpose()?,
            temperature: number("temperature", "a number from 0", |n| n >= 0.0)?,
            top_p: number("top_p", share, |n| n > 0.0 && n <= 1.0)?,
            top_k: config.get("top_k").map(top_k).transpose()?,
            min_p: number("min_p", "a number from 0 to 1", |n| (0.0..=1.0).contains(&n))?,
            repetition_penalty: number("repetition_penalty", above, |n| n as f32 > 0.0)?,
        })
    }
}
