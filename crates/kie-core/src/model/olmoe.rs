//! OLMoE (Muennighoff et al., "OLMoE: Open Mixture-of-Experts Language Models", 2024): a softmax
//! router whose factors need not sum to 1, and norms of q and k over all heads.

use super::config::Config;
use super::spec::{Mlp, NormSpan, Spec};
use super::transformer;
use crate::error::Result;

pub(super) fn spec(config: &Config<'_>) -> Result<Spec> {
    if config.get("clip_qkv").is_some() {
        return config.unsupported("clip_qkv", "clamped q, k and v; only null");
    }
    let traits = transformer::Traits {
        qk_norm: Some(NormSpan::AllHeads),
        mlps,
        eps: 1e-5,
        ..transformer::Traits::LLAMA
    };
    transformer::spec(config, &traits)
}

fn mlps(config: &Config<'_>, layers: usize) -> Result<Vec<Mlp>> {
    Ok(vec![transformer::softmax_experts(config, "intermediate_size")?; layers])
}
