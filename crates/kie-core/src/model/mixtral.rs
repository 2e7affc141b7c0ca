//! Mixtral (Jiang et al., "Mixtral of Experts", 2024): Mistral with a softmax router in every
//! layer.

use super::config::Config;
use super::mistral;
use super::spec::{Mlp, Scoring, Spec};
use super::transformer::{self, ExpertNames};
use crate::error::Result;

pub(super) fn spec(config: &Config<'_>) -> Result<Spec> {
    let traits = transformer::Traits {
        windows: mistral::windows,
        mlps: |config, layers| {
            let keys = ["num_local_experts", "intermediate_size"];
            let experts = transformer::experts(config, keys, Scoring::SoftmaxOfChosen)?;
            Ok(vec![Mlp::Experts(experts); layers])
        },
        experts: ExpertNames {
            router: "block_sparse_moe.gate",
            each: [
                "block_sparse_moe.experts.{e}.w1.weight",
                "block_sparse_moe.experts.{e}.w3.weight",
                "block_sparse_moe.experts.{e}.w2.weight",
            ],
            ..transformer::Traits::LLAMA.experts
        },
        eps: 1e-5,
        ..transformer::Traits::LLAMA
    };
    transformer::spec(config, &traits)
}
