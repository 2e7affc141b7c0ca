//! What a model is, as data: [`Spec`], and the registry that reads one from `config.json`.
//!
//! Model files (`laneformer.rs`, `llama.rs`, ...) hold no arithmetic: each turns its config dialect
//! and its tensor names into a `Spec`. A model of one lane is an ordinary transformer; a Laneformer
//! has several lanes, each with its own residual stream and its own slice of heads and neurons.

pub(crate) mod adapter;
mod config;
mod deepseek_v3;
mod deepseek_v4;
mod gemma3;
mod generation;
mod gpt_oss;
mod hybrid;
mod laneformer;
mod llama;
mod mistral;
mod mixtral;
mod olmo2;
mod olmoe;
mod phi3;
pub(crate) mod quantization;
mod qwen2;
mod qwen3;
mod qwen3_moe;
mod qwen3_next;
pub(crate) mod rope;
mod smollm3;
pub(crate) mod spec;
mod transformer;

use std::path::Path;

use serde_json::Value;

use crate::error::{Error, Result};
use crate::gguf;
use crate::json;
use crate::weights::safetensors::Mapped;
use config::Config;
pub use generation::Generation;
use generation::GENERATION;
pub use quantization::{Group, Quantization};
pub use rope::{Factors, Llama3Scaling, Rope, RopeStyle, Scaling, Turns, YarnScaling};
pub use spec::*;

/// Turns a family's config into a spec.
type Read = fn(&Config<'_>) -> Result<Spec>;

/// One line a `model_type`.
const REGISTRY: &[(&str, Read)] = &[
    ("deepseek_v3", deepseek_v3::spec),
    ("deepseek_v4", deepseek_v4::spec),
    ("gemma3_text", gemma3::spec),
    ("gpt_oss", gpt_oss::spec),
    ("kie_hybrid", hybrid::spec),
    ("kimi_k2", deepseek_v3::spec),
    ("kimi_k25", deepseek_v3::kimi_k25),
    ("laneformer", laneformer::spec),
    ("laneformer_tp", laneformer::spec),
    ("llama", llama::spec),
    ("mistral", mistral::spec),
    ("mixtral", mixtral::spec),
    ("olmo2", olmo2::spec),
    ("olmoe", olmoe::spec),
    ("phi3", phi3::spec),
    ("qwen2", qwen2::spec),
    ("qwen3", qwen3::spec),
    ("qwen3_moe", qwen3_moe::spec),
    ("qwen3_next", qwen3_next::spec),
    ("smollm3", smollm3::spec),
];

/// The `model_type`s that kie reads.
pub fn architectures() -> impl Iterator<Item = &'static str> {
    REGISTRY.iter().map(|(name, _)| *name)
}

/// How weights may be stored.
pub fn encodings() -> &'static [&'static str] {
    &[
        "F32",
        "F16",
        "BF16",
        "FP8 (E4M3 in blocks)",
        "FP4 (E2M1 experts beside FP8)",
        "MXFP4",
        "compressed-tensors (FP8, INT8, INT4, MXFP4)",
        "AWQ",
        "GPTQ",
        "GGUF",
    ]
}

/// What kie runs, in one line.
pub(crate) fn supported() -> &'static str {
    static LINE: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    LINE.get_or_init(|| {
        let architectures: Vec<_> = architectures().collect();
        let (architectures, encodings) = (architectures.join(", "), encodings().join(", "));
        format!("kie runs {architectures}, stored as {encodings}; `kie models` has examples")
    })
}

impl Spec {
    /// Reads `config.json` and what `generation_config.json` says about the end of a sequence.
    ///
    /// # Errors
    /// [`Error::Load`] for a file that is not what it should be, [`Error::UnsupportedModel`] for
    /// what kie does not know.
    pub fn read(folder: &Path) -> Result<Self> {
        if gguf::is_gguf(folder) {
            let file = Mapped::gguf(folder)?;
            let mut spec = Self::from_config(&gguf::model::config(&file, folder)?, folder)?;
            gguf::model::rope(&mut spec, &file);
            return Ok(spec);
        }
        let file = folder.join("config.json");
        let mut spec = Self::from_config(&json::read(&file)?, &file)?;
        let generation = Generation::read(folder)?;
        let named = generation.eos.iter().chain(&generation.bos);
        if let Some(id) = named.into_iter().find(|id| **id as usize >= spec.vocab) {
            let wanted = format!("ids below vocab_size {}", spec.vocab);
            let file = folder.join(GENERATION);
            return Err(Error::tensor(file, "bos_token_id/eos_token_id", wanted, id.to_string()));
        }
        spec.bos = generation.bos.or(spec.bos);
        if !generation.eos.is_empty() {
            spec.eos = generation.eos;
        }
        Ok(spec)
    }

    /// The spec in a parsed `config.json`; `file` is for messages.
    ///
    /// # Errors
    /// As [`Spec::read`].
    pub fn from_config(value: &Value, file: &Path) -> Result<Self> {
        let config = Config::new(value, file)?;
        let name = config.need("model_type")?.as_str().unwrap_or_default();
        let Some((name, read)) = REGISTRY.iter().find(|(known, _)| *known == name) else {
            return config.unsupported("model_type", format!("{name:?}"));
        };
        let mut spec = read(&config)?;
        spec.architecture = (*name).to_owned();
        let ropes = spec.layers.iter().filter_map(|layer| layer.mixer.rope());
        let ropes = ropes.map(|(rope, _)| rope.stretched(spec.max_positions));
        spec.stretched = ropes.max().unwrap_or(spec.max_positions);
        for attention in spec.layers.iter_mut().filter_map(|l| l.mixer.attention_mut()) {
            // One that sees the whole context is none.
            attention.window = attention.window.filter(|window| *window < spec.stretched);
        }
        spec.check(&config)?;
        Ok(spec)
    }

    /// What no family may break.
    fn check(&self, config: &Config<'_>) -> Result<()> {
        for layer in &self.layers {
            match &layer.mixer {
                Mixer::Attention(attention) => attention.check(config)?,
                Mixer::Delta(delta) => delta.check(config)?,
                Mixer::Latent(latent) => latent.check(config)?,
                Mixer::Compressed(compressed) => compressed.check(config)?,
            }
        }
        self.check_ropes(config)?;
        if !self.norm_eps.is_normal() {
            return config.unsupported("rms_norm_eps/norm_eps", "no normal float32 number");
        }
        let vocab = self.vocab as u32;
        if let Some(id) = self.eos.iter().chain(&self.bos).find(|id| **id >= vocab) {
            let detail = format!("{id} is not below vocab_size {vocab}");
            return config.unsupported("bos_token_id/eos_token_id", detail);
        }
        let most = 1u64 << 46;
        match self.tensors.iter().map(TensorSpec::numbers).try_fold(0u64, u64::checked_add) {
            Some(numbers) if numbers < most => Ok(()),
            Some(_) | None => config.unsupported("hidden_size", "the model is absurdly large"),
        }
    }

    /// What rotary embeddings may not be. A position turns by a radian at most; more is noise, and
    /// soon not finite.
    fn check_ropes(&self, config: &Config<'_>) -> Result<()> {
        let mut known: Vec<(Rope, usize)> = Vec::new();
        for (rope, head_dim) in self.layers.iter().filter_map(|layer| layer.mixer.rope()) {
            if known.contains(&(rope, head_dim)) {
                continue;
            }
            known.push((rope, head_dim));
            for positions in [1, self.stretched] {
                let turns = rope.turns(head_dim, &self.rope_factors, positions);
                let bad = |f: &&f64| !(0.0..=1.0).contains(*f);
                if let Some(got) = turns.frequencies.iter().find(bad) {
                    let got = format!("{got:e} radians a position; 1 at most (rope_theta from 1)");
                    return config.unsupported("rope_theta/rope_scaling", got);
                }
                if !(turns.length as f32).is_normal() {
                    let got = format!("cos and sin times {:e}", turns.length);
                    return config.unsupported("rope_scaling.attention_factor", got);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
