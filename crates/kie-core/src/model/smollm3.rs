//! SmolLM3 (Hugging Face, 2025): Llama where every fourth layer has no rotary embedding (NoPE; Yang
//! et al., "Rope to Nope and Back Again", 2025).

use super::config::Config;
use super::qwen2;
use super::spec::Spec;
use super::transformer::{self, Tied};
use crate::error::Result;

pub(super) fn spec(config: &Config<'_>) -> Result<Spec> {
    let traits = transformer::Traits {
        windows: qwen2::windows,
        tied: Tied::Yes,
        harmless: &["pretraining_tp"],
        ..transformer::Traits::LLAMA
    };
    let layers = config.layers()?;
    let every = config.size_or("no_rope_layer_interval", 4)?;
    // The list says 1 of a layer that has one.
    let turns: Vec<bool> = match config.switches("no_rope_layers")? {
        Some(list) if list.len() == layers => list,
        Some(list) => {
            let detail = format!("{} entries for {layers} layers", list.len());
            return config.unsupported("no_rope_layers", detail);
        }
        None => (1..=layers).map(|layer| !layer.is_multiple_of(every)).collect(),
    };
    let mut spec = transformer::spec(config, &traits)?;
    for (layer, turns) in spec.layers.iter_mut().zip(turns) {
        if let Some(attention) = layer.mixer.attention_mut().filter(|_| !turns) {
            attention.rope.features = 0;
        }
    }
    Ok(spec)
}
