//! What a request may ask for: every parameter is checked here, on the caller's thread, before
//! anything is queued. What comes out needs no further check.

use kie_kernels::abi::{Drafts, Sampling, MAX_ALTERNATIVES, MAX_BIAS, MAX_STOP_IDS};

use crate::error::{Error, Result};
use crate::model::Generation;
use crate::request::{Prediction, SamplingParams, Speculate};

/// Longest stop string, in bytes, and most of them.
const STOP_BYTES_MAX: usize = 1024;
const STOPS_MAX: usize = 64;

/// What a model and an engine allow.
pub(crate) struct Limits {
    /// Ids are below this.
    pub(crate) vocab: usize,
    /// Positions of a sequence.
    pub(crate) context: usize,
    /// The model's defaults, and its end-of-sequence ids.
    pub(crate) generation: Generation,
    /// Why steps check no drafts, if they do not.
    pub(crate) refuses_drafts: Option<&'static str>,
    /// Drafts that a step checks beside a mask, at most.
    pub(crate) masked_drafts: usize,
    /// The model's own layers draft.
    pub(crate) predicts: bool,
}

/// A request's parameters, every default filled in.
#[derive(Debug)]
pub(crate) struct Resolved {
    pub(crate) sampling: Sampling,
    pub(crate) max_new: usize,
    pub(crate) min_new: usize,
    pub(crate) stop_ids: Vec<u32>,
    pub(crate) bias: Vec<(u32, f32)>,
    pub(crate) drafts: Drafts,
    /// Nanoseconds from submission.
    pub(crate) timeout_ns: Option<u64>,
}

fn invalid<T>(detail: String) -> Result<T> {
    Err(Error::InvalidRequest(detail))
}

/// `value` as the device takes it, if it is inside.
fn number(name: &str, value: f64, wanted: &str, inside: impl Fn(f64) -> bool) -> Result<f32> {
    let single = value as f32;
    if !inside(value) || !single.is_finite() {
        return invalid(format!("{name} must be {wanted}, got {value}"));
    }
    Ok(single)
}

impl Limits {
    /// Checks the ids of a prompt.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`] for none or unknown ones, [`Error::ContextLength`] for too many.
    pub(crate) fn check_prompt(&self, ids: &[u32], max_tokens: Option<usize>) -> Result<()> {
        if ids.is_empty() {
            return invalid("the prompt is empty: at least one token is needed".to_owned());
        }
        if let Some(at) = ids.iter().position(|id| *id as usize >= self.vocab) {
            let (id, vocab) = (ids[at], self.vocab);
            return invalid(format!("prompt token {at} must be below {vocab}, got {id}"));
        }
        let wanted = ids.len().saturating_add(max_tokens.unwrap_or(1));
        if wanted > self.context {
            return Err(Error::ContextLength {
                prompt: ids.len(),
                max_tokens: max_tokens.unwrap_or(1),
                limit: self.context,
            });
        }
        Ok(())
    }

    /// Checks parameters for a prompt of `prompt` tokens and fills in the defaults.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`] names the parameter, what it may be and what it was.
    pub(crate) fn resolve(&self, p: &SamplingParams, prompt: usize) -> Result<Resolved> {
        let max_new = p.max_tokens.unwrap_or(self.context.saturating_sub(prompt));
        if max_new == 0 {
            return invalid("max_tokens must be at least 1, got 0".to_owned());
        }
        if p.min_tokens > max_new {
            let got = p.min_tokens;
            return invalid(format!("min_tokens must be at most max_tokens {max_new}, got {got}"));
        }
        let timeout_ns = self.timeout_ns(p)?;
        self.check_stops(p)?;
        Ok(Resolved {
            sampling: self.sampling(p)?,
            max_new,
            min_new: p.min_tokens,
            stop_ids: self.stop_ids(p)?,
            bias: self.bias(p)?,
            drafts: self.drafts(p)?,
            timeout_ns,
        })
    }

    /// The time of a request, in nanoseconds.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`] for what is no time.
    pub(crate) fn timeout_ns(&self, p: &SamplingParams) -> Result<Option<u64>> {
        let longest = u64::MAX as f64 / 4e9;
        let seconds = |t: f64| number("timeout", t, "above 0 s", |t| t > 0.0).map(|_| t);
        let timeout = p.timeout.map(seconds).transpose()?;
        Ok(timeout.map(|t| (t.min(longest) * 1e9) as u64))
    }

    fn sampling(&self, p: &SamplingParams) -> Result<Sampling> {
        let g = &self.generation;
        let greedy = (g.do_sample == Some(false)).then_some(0.0);
        let temperature = p.temperature.or(greedy).or(g.temperature).unwrap_or(1.0);
        let fraction = |v: f64| (0.0..=1.0).contains(&v);
        let any = |v: f64| v.is_finite();
        let top_p = p.top_p.or(g.top_p).unwrap_or(1.0);
        let min_p = p.min_p.or(g.min_p).unwrap_or(0.0);
        let repetition = p.repetition_penalty.or(g.repetition_penalty).unwrap_or(1.0);
        let most = MAX_ALTERNATIVES.min(self.vocab);
        if let Some(k) = p.logprobs.filter(|k| *k > most) {
            return invalid(format!("logprobs must be 0 to {most}, got {k}"));
        }
        Ok(Sampling {
            temperature: number("temperature", temperature, "at least 0", |v| v >= 0.0)?,
            top_p: number("top_p", top_p, "above 0 and at most 1", |v| v > 0.0 && v <= 1.0)?,
            min_p: number("min_p", min_p, "0 to 1", fraction)?,
            repetition_penalty: number("repetition_penalty", repetition, "above 0", |v| {
                v > 0.0 && v as f32 > 0.0
            })?,
            presence_penalty: number("presence_penalty", p.presence_penalty, "finite", any)?,
            frequency_penalty: number("frequency_penalty", p.frequency_penalty, "finite", any)?,
            top_k: p.top_k.or(g.top_k).unwrap_or(0),
            logprobs: p.logprobs.map_or(0, |k| k as u32 + 1),
            seed: p.seed.unwrap_or_else(draw_seed),
        })
    }

    fn drafts(&self, p: &SamplingParams) -> Result<Drafts> {
        let (name, drafts) = match (&p.speculate, &p.prediction) {
            (Some(Speculate::Lookup), _) => ("speculate", Drafts::Lookup),
            (Some(Speculate::Mtp), _) => ("speculate", Drafts::Mtp),
            (None, Some(_)) => ("prediction", Drafts::Lookup),
            (None, None) => return Ok(Drafts::None),
        };
        if let Some(Prediction::Ids(ids)) = &p.prediction {
            if let Some(at) = ids.iter().position(|id| *id as usize >= self.vocab) {
                let (id, vocab) = (ids[at], self.vocab);
                return invalid(format!("prediction token {at} must be below {vocab}, got {id}"));
            }
        }
        match self.refuses_drafts {
            Some(why) => invalid(format!("{name} is not to be had with this model here: {why}")),
            None if drafts == Drafts::Mtp && !self.predicts => invalid(
                "speculate=\"mtp\" wants an engine that was opened with mtp=True".to_owned(),
            ),
            None => Ok(drafts),
        }
    }

    fn stop_ids(&self, p: &SamplingParams) -> Result<Vec<u32>> {
        if let Some(id) = p.stop_token_ids.iter().find(|id| **id as usize >= self.vocab) {
            return invalid(format!("stop_token_ids must be below {}, got {id}", self.vocab));
        }
        let own: &[u32] = if p.ignore_eos { &[] } else { &self.generation.eos };
        let mut ids: Vec<u32> = own.iter().chain(&p.stop_token_ids).copied().collect();
        ids.sort_unstable();
        ids.dedup();
        if ids.len() > MAX_STOP_IDS {
            let got = ids.len();
            return invalid(format!(
                "stop_token_ids and the model's own must be at most {MAX_STOP_IDS}, got {got}"
            ));
        }
        Ok(ids)
    }

    fn bias(&self, p: &SamplingParams) -> Result<Vec<(u32, f32)>> {
        if p.logit_bias.len() > MAX_BIAS {
            let got = p.logit_bias.len();
            return invalid(format!("logit_bias must have at most {MAX_BIAS} entries, got {got}"));
        }
        let entry = |(id, bias): &(u32, f64)| {
            if *id as usize >= self.vocab {
                return invalid(format!("logit_bias ids must be below {}, got {id}", self.vocab));
            }
            Ok((*id, number("logit_bias", *bias, "finite", f64::is_finite)?))
        };
        p.logit_bias.iter().map(entry).collect()
    }

    fn check_stops(&self, p: &SamplingParams) -> Result<()> {
        if p.stop.len() > STOPS_MAX {
            let got = p.stop.len();
            return invalid(format!("stop must have at most {STOPS_MAX} strings, got {got}"));
        }
        let wrong = |s: &&String| s.is_empty() || s.len() > STOP_BYTES_MAX;
        match p.stop.iter().find(wrong) {
            Some(s) => invalid(format!(
                "stop strings must have 1 to {STOP_BYTES_MAX} bytes, got {}",
                s.len()
            )),
            None => Ok(()),
        }
    }
}

/// A random seed: the standard library keys its hash maps from the system's random numbers.
fn draw_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::hash::RandomState::new().build_hasher().finish()
}
