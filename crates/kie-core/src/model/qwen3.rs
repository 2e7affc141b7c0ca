//! Qwen3, dense ("Qwen3 Technical Report", 2025): a norm on each head's q and k, no biases.

use super::config::Config;
use super::{qwen2, transformer, Spec};
use crate::error::Result;

pub(super) fn spec(config: &Config<'_>) -> Result<Spec> {
    let traits = transformer::Traits { qkv_bias: false, qk_norm: true, windows: qwen2::windows };
    transformer::spec(config, &traits)
}
