//! OLMo 2 ("2 OLMo 2 Furious", 2025): norms behind attention and MLP instead of before them, and
//! on q and k over all heads at once.

use super::config::Config;
use super::spec::{NormSpan, Norms, Spec};
use super::transformer;
use crate::error::Result;

pub(super) fn spec(config: &Config<'_>) -> Result<Spec> {
    let traits = transformer::Traits {
        qk_norm: Some(NormSpan::AllHeads),
        norms: Norms::Behind,
        ..transformer::Traits::LLAMA
    };
    transformer::spec(config, &traits)
}
