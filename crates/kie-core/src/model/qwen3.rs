//! Qwen3, dense ("Qwen3 Technical Report", 2025): a norm on each head's q and k, no biases.

use super::config::Config;
use super::spec::{NormSpan, Spec};
use super::{qwen2, transformer};
use crate::error::Result;

pub(super) fn spec(config: &Config<'_>) -> Result<Spec> {
    let traits = transformer::Traits {
        qk_norm: Some(NormSpan::Head),
        windows: qwen2::windows,
        ..transformer::Traits::LLAMA
    };
    transformer::spec(config, &traits)
}
