//! Qwen3, mixture of experts ("Qwen3 Technical Report", 2025): Qwen3 with a softmax router in every
//! `decoder_sparse_step`th layer but those of `mlp_only_layers`.

use super::config::Config;
use super::spec::{Mlp, NormSpan, Spec};
use super::{qwen2, transformer};
use crate::error::Result;

pub(super) fn spec(config: &Config<'_>) -> Result<Spec> {
    let traits = transformer::Traits {
        qk_norm: Some(NormSpan::Head),
        windows: qwen2::windows,
        mlps,
        ..transformer::Traits::LLAMA
    };
    transformer::spec(config, &traits)
}

pub(super) fn mlps(config: &Config<'_>, layers: usize) -> Result<Vec<Mlp>> {
    let experts = transformer::softmax_experts(config, "moe_intermediate_size")?;
    let dense = Mlp::Gated(transformer::gated(config)?);
    let every = config.size_or("decoder_sparse_step", 1)?;
    let only = config.layer_list("mlp_only_layers", layers)?;
    let is_dense = |layer: usize| only.contains(&layer) || !(layer + 1).is_multiple_of(every);
    Ok((0..layers).map(|layer| if is_dense(layer) { dense } else { experts }).collect())
}
