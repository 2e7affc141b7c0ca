//! Mistral (Jiang et al., "Mistral 7B", 2023): Llama with a window on every layer, where the
//! config names one.

use super::config::Config;
use super::spec::Spec;
use super::transformer;
use crate::error::Result;

pub(super) fn spec(config: &Config<'_>) -> Result<Spec> {
    let traits = transformer::Traits { windows, ..transformer::Traits::LLAMA };
    transformer::spec(config, &traits)
}

/// One window for all layers.
pub(super) fn windows(config: &Config<'_>, layers: usize) -> Result<Vec<Option<usize>>> {
    Ok(vec![config.optional_size("sliding_window")?; layers])
}
