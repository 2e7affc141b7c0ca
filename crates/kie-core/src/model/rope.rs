//! Rotary position embedding: what a config says of it, and by how much each pair of features
//! turns. Tables are of the context that is served, so that a position turns alike in every
//! request; scalings that depend on the length of a text take that context as its length.
//!
//! Formulas: Su et al. 2021 (RoPE); Chen et al. 2023 (linear); "NTK-aware" scaling, dynamic as in
//! transformers; Peng et al. 2023 (YaRN, equations 17 to 22); Ding et al. 2024 (LongRoPE);
//! Llama 3.1's model card. Keys are those of transformers' `rope_scaling` and `rope_parameters`.

use std::f64::consts::PI;

use super::config::Config;
use crate::error::Result;

/// `rope_theta` where the config is silent.
const THETA: f64 = 10_000.0;

/// Rotary position embedding of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// Which features form a pair.
    pub style: RopeStyle,
    /// Features of a head that turn, the first ones; even. 0: none does (NoPE).
    pub features: usize,
    /// How it was stretched to longer contexts.
    pub scaling: Scaling,
}

/// Which two features of a head turn together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeStyle {
    /// (2j, 2j+1), as in Meta's Llama code and in Laneformer.
    Interleaved,
    /// (j, j + features/2), as Hugging Face stores Llama, Qwen and Mistral.
    HalfSplit,
}

/// How a rotary embedding is stretched, by its `rope_type`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scaling {
    /// `default`.
    None,
    /// `linear`: every frequency is divided.
    Linear {
        /// By this.
        factor: f64,
    },
    /// `dynamic`: the base grows with the context, beyond the original one.
    Dynamic {
        /// How much longer contexts may be.
        factor: f64,
        /// The original context, in positions.
        original: f64,
    },
    /// `llama3`.
    Llama3(Llama3Scaling),
    /// `yarn`.
    Yarn(YarnScaling),
    /// `longrope`: each frequency has a divisor, of [`Factors`].
    LongRope {
        /// The original context, in positions; longer ones take the long divisors.
        original: f64,
        /// On cos and sin.
        attention: f64,
    },
}

/// `rope_type: llama3`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Llama3Scaling {
    /// Frequencies below the low cut are divided by this.
    pub factor: f64,
    /// Low cut, in turns over the original context.
    pub low_freq_factor: f64,
    /// High cut.
    pub high_freq_factor: f64,
    /// The original context, in positions.
    pub original_max_positions: f64,
}

/// `rope_type: yarn`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct YarnScaling {
    /// Slow pairs are divided by this.
    pub factor: f64,
    /// The original context, in positions.
    pub original: f64,
    /// Pairs that turn more often over the original context stay as they are.
    pub beta_fast: f64,
    /// Pairs that turn less often are divided in full.
    pub beta_slow: f64,
    /// The ramp between the two begins and ends at whole pairs.
    pub truncate: bool,
    /// On cos and sin.
    pub attention: f64,
    /// On scores, where the model's latent attention asks for it (DeepSeek-V3).
    pub scores: f64,
}

/// Divisors of `longrope`, one a pair; empty without it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Factors {
    /// For contexts up to the original one.
    pub short: Vec<f64>,
    /// For longer ones.
    pub long: Vec<f64>,
}

/// How the pairs of a head turn.
#[derive(Debug, Clone, PartialEq)]
pub struct Turns {
    /// Radians a position of each pair.
    pub frequencies: Vec<f64>,
    /// What cos and sin are multiplied by.
    pub length: f64,
}

impl Rope {
    /// How heads of `head_dim` features turn where a context of `positions` is served.
    pub fn turns(&self, head_dim: usize, factors: &Factors, positions: usize) -> Turns {
        if self.features == 0 {
            return Turns { frequencies: vec![0.0; head_dim / 2], length: 1.0 };
        }
        let (dim, positions) = (self.features as f64, positions as f64);
        let pairs = 0..self.features / 2;
        let by_base = |theta: f64, j: usize| theta.powf(-2.0 * j as f64 / dim);
        let plain = |j: usize| by_base(self.theta, j);
        let all = |of: &dyn Fn(usize) -> f64| pairs.clone().map(of).collect();
        let (frequencies, length): (Vec<f64>, f64) = match self.scaling {
            Scaling::None => (all(&plain), 1.0),
            Scaling::Linear { factor } => (all(&|j| plain(j) / factor), 1.0),
            Scaling::Dynamic { factor, original } => {
                let ratio = positions.max(original) / original;
                let grown = (factor * ratio - (factor - 1.0)).powf(dim / (dim - 2.0));
                (all(&|j| by_base(self.theta * grown, j)), 1.0)
            }
            Scaling::Llama3(s) => (all(&|j| s.frequency(plain(j))), 1.0),
            Scaling::Yarn(s) => (all(&|j| s.frequency(plain(j), j, dim, self.theta)), s.attention),
            Scaling::LongRope { original, attention } => {
                let factors = if positions > original { &factors.long } else { &factors.short };
                (all(&|j| plain(j) / factors[j]), attention)
            }
        };
        Turns { frequencies, length }
    }

    /// What scores of latent attention are multiplied by.
    pub fn score_factor(&self) -> f64 {
        match self.scaling {
            Scaling::Yarn(yarn) => yarn.scores,
            Scaling::None
            | Scaling::Linear { .. }
            | Scaling::Dynamic { .. }
            | Scaling::Llama3(_)
            | Scaling::LongRope { .. } => 1.0,
        }
    }

    /// Longest context that may be asked for where the config says `max_positions`.
    pub fn stretched(&self, max_positions: usize) -> usize {
        match self.scaling {
            Scaling::Dynamic { factor, original } => (factor * original) as usize,
            Scaling::Yarn(s) => (s.factor * s.original) as usize,
            Scaling::None
            | Scaling::Linear { .. }
            | Scaling::Llama3(_)
            | Scaling::LongRope { .. } => max_positions,
        }
        .max(max_positions)
    }
}

impl Llama3Scaling {
    /// Itself, unless its cuts make no ramp.
    pub(super) fn checked(self, parameters: &Config<'_>) -> Result<Self> {
        if self.low_freq_factor >= self.high_freq_factor {
            return parameters.unsupported("low_freq_factor", "it must be below high_freq_factor");
        }
        Ok(self)
    }

    fn frequency(&self, f: f64) -> f64 {
        let turns = self.original_max_positions * f / (2.0 * PI);
        if turns < self.low_freq_factor {
            f / self.factor
        } else if turns > self.high_freq_factor {
            f
        } else {
            let t = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor);
            (1.0 - t) * f / self.factor + t * f
        }
    }
}

impl YarnScaling {
    /// Of pair `j` with the plain frequency `f`.
    fn frequency(&self, f: f64, j: usize, dim: f64, theta: f64) -> f64 {
        // The pair that turns so often over the original context, as a real number.
        let pair =
            |turns: f64| dim * (self.original / (turns * 2.0 * PI)).ln() / (2.0 * theta.ln());
        let (mut low, mut high) = (pair(self.beta_fast), pair(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(dim - 1.0));
        if low == high {
            high += 1e-3;
        }
        let slow = ((j as f64 - low) / (high - low)).clamp(0.0, 1.0);
        slow * f / self.factor + (1.0 - slow) * f
    }
}

/// Heads whose rotary embedding is read.
#[derive(Clone, Copy)]
pub(super) struct Head {
    /// Features.
    pub dim: usize,
    /// The family knows `partial_rotary_factor`.
    pub partial: bool,
}

/// `rope_theta` with `rope_scaling`, or transformers 5's `rope_parameters`, which holds both.
///
/// # Errors
/// Names the field, what is wanted and what there is.
pub(super) fn read(config: &Config<'_>, head: Head) -> Result<(Rope, Factors)> {
    let old = config.object("rope_scaling")?;
    let new = config.object("rope_parameters")?;
    if old.is_some() && new.is_some() {
        return config.unsupported("rope_scaling", "rope_parameters beside it");
    }
    let outer = config.optional_positive("rope_theta")?;
    one(config, new.or(old).as_ref(), outer, THETA, head)
}

/// What an object of parameters says, with the base that stands outside of it, if any does.
pub(super) fn one(
    config: &Config<'_>,
    parameters: Option<&Config<'_>>,
    outer: Option<f64>,
    default: f64,
    head: Head,
) -> Result<(Rope, Factors)> {
    let inner = parameters.map(|p| p.optional_positive("rope_theta")).transpose()?.flatten();
    if let (Some(inner), Some(outer), Some(parameters)) = (inner, outer, parameters) {
        if inner != outer {
            return parameters.unsupported("rope_theta", format!("{inner}, elsewhere {outer}"));
        }
    }
    let mut features = head.dim;
    if head.partial {
        for place in parameters.into_iter().chain([config]) {
            if let Some(share) = place.optional_positive("partial_rotary_factor")? {
                features = (head.dim as f64 * share) as usize;
                if features < 2 || features > head.dim || !features.is_multiple_of(2) {
                    let detail = format!("{share}: {features} of {} features turn", head.dim);
                    return place.unsupported("partial_rotary_factor", detail);
                }
            }
        }
    }
    let theta = inner.or(outer).unwrap_or(default);
    let mut rope = Rope { theta, style: RopeStyle::HalfSplit, features, scaling: Scaling::None };
    let Some(parameters) = parameters else { return Ok((rope, Factors::default())) };
    let (new, old) = (parameters.text("rope_type")?, parameters.text("type")?);
    if new.is_some() && old.is_some() && new != old {
        return parameters.unsupported("type", format!("{old:?} beside rope_type {new:?}"));
    }
    let mut factors = Factors::default();
    rope.scaling = match new.or(old) {
        None | Some("default") => Scaling::None,
        Some("linear") => Scaling::Linear { factor: parameters.at_least_one("factor")? },
        Some("dynamic") => Scaling::Dynamic {
            factor: parameters.at_least_one("factor")?,
            original: original(config, parameters)?.unwrap_or(stated(config)?),
        },
        Some("llama3") => Scaling::Llama3(llama3(parameters)?),
        Some("yarn") => Scaling::Yarn(yarn(config, parameters)?),
        Some("longrope" | "su") => {
            factors = divisors(parameters, features / 2)?;
            longrope(config, parameters)?
        }
        Some(other) => {
            let known = "default, linear, dynamic, llama3, yarn and longrope";
            return parameters.unsupported("rope_type", format!("{other:?}; {known}"));
        }
    };
    parameters.finish(&["finetuned"])?;
    Ok((rope, factors))
}

/// The original context, where the config tells it apart.
fn original(config: &Config<'_>, parameters: &Config<'_>) -> Result<Option<f64>> {
    let key = "original_max_position_embeddings";
    let (inner, outer) = (parameters.optional_positive(key)?, config.optional_positive(key)?);
    match (inner, outer) {
        (Some(inner), Some(outer)) if inner != outer => {
            parameters.unsupported(key, format!("{inner}, elsewhere {outer}"))
        }
        _ => Ok(inner.or(outer)),
    }
}

/// The context that the config states.
fn stated(config: &Config<'_>) -> Result<f64> {
    Ok(config.size("max_position_embeddings")? as f64)
}

fn llama3(parameters: &Config<'_>) -> Result<Llama3Scaling> {
    let scaling = Llama3Scaling {
        factor: parameters.positive("factor")?,
        low_freq_factor: parameters.positive("low_freq_factor")?,
        high_freq_factor: parameters.positive("high_freq_factor")?,
        original_max_positions: parameters.positive("original_max_position_embeddings")?,
    };
    scaling.checked(parameters)
}

fn yarn(config: &Config<'_>, parameters: &Config<'_>) -> Result<YarnScaling> {
    let factor = parameters.at_least_one("factor")?;
    let given = parameters.optional_positive("attention_factor")?;
    let scales = [parameters.not_zero("mscale")?, parameters.not_zero("mscale_all_dim")?];
    let length = |scale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 };
    let attention = given.unwrap_or(match scales {
        [Some(scale), Some(all)] => length(scale) / length(all),
        _ => length(1.0),
    });
    let scaling = YarnScaling {
        factor,
        original: original(config, parameters)?.unwrap_or(stated(config)?),
        beta_fast: parameters.positive_or("beta_fast", 32.0)?,
        beta_slow: parameters.positive_or("beta_slow", 1.0)?,
        truncate: parameters.flag_or("truncate", true)?,
        attention,
        scores: scales[1].map_or(1.0, |all| length(all) * length(all)),
    };
    if scaling.beta_fast < scaling.beta_slow {
        let detail = format!("{}, below beta_slow {}", scaling.beta_fast, scaling.beta_slow);
        return parameters.unsupported("beta_fast", detail);
    }
    Ok(scaling)
}

fn divisors(parameters: &Config<'_>, pairs: usize) -> Result<Factors> {
    let list = |key: &str| {
        let list = parameters.positives(key)?;
        match list.len() == pairs {
            true => Ok(list),
            false => {
                let detail = format!("{} numbers; one a pair wanted, {pairs}", list.len());
                parameters.unsupported(key, detail)
            }
        }
    };
    Ok(Factors { short: list("short_factor")?, long: list("long_factor")? })
}

fn longrope(config: &Config<'_>, parameters: &Config<'_>) -> Result<Scaling> {
    let (stated, original) = (stated(config)?, original(config, parameters)?);
    let stretch = match (original, parameters.optional_positive("factor")?) {
        (Some(original), _) => stated / original,
        (None, Some(factor)) => factor,
        (None, None) => {
            let detail = "nothing; wanted beside longrope, or a factor";
            return parameters.unsupported("original_max_position_embeddings", detail);
        }
    };
    let original = original.unwrap_or(stated);
    let length = if stretch <= 1.0 { 1.0 } else { (1.0 + stretch.ln() / original.ln()).sqrt() };
    let attention = parameters.optional_positive("attention_factor")?.unwrap_or(length);
    Ok(Scaling::LongRope { original, attention })
}
