//! GPT-OSS (OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025): a softmax router over the
//! chosen experts, clamped SwiGLU, biases everywhere, sinks, every other layer windowed. Experts
//! stand in one tensor a layer, gate and up by turns: as MXFP4, or in BF16 as columns.

use super::config::Config;
use super::spec::{Experts, Gate, Gated, Mlp, Role, Scoring, Spec, Stored};
use super::transformer::{self, ExpertNames};
use crate::error::Result;

/// On the gate in the exponent of its sigmoid, where the config is silent.
const ALPHA: f64 = 1.702;

pub(super) fn spec(config: &Config<'_>) -> Result<Spec> {
    if !config.flag_or("attention_bias", true)? {
        return config.unsupported("attention_bias", "false; only true");
    }
    let traits = transformer::Traits {
        qkv_bias: true,
        out_bias: true,
        sinks: true,
        windows,
        mlps,
        experts: ExpertNames {
            router: "mlp.router",
            each: ["mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            ..transformer::Traits::LLAMA.experts
        },
        eps: 1e-5,
        harmless: &["initial_context_length"],
        ..transformer::Traits::LLAMA
    };
    let mut spec = transformer::spec(config, &traits)?;
    for tensor in &mut spec.tensors {
        tensor.stored = match tensor.role {
            Role::ExpertGate(_) => Stored::Stacked { part: 0, of: 2, turned: true },
            Role::ExpertUp(_) => Stored::Stacked { part: 1, of: 2, turned: true },
            Role::ExpertDown(_) => Stored::Stacked { part: 0, of: 1, turned: true },
            Role::ExpertGateBias(_) => Stored::Alternate { part: 0, of: 2 },
            Role::ExpertUpBias(_) => Stored::Alternate { part: 1, of: 2 },
            _ => continue,
        };
    }
    Ok(spec)
}

/// Every other layer, the first one included, where `layer_types` is silent.
fn windows(config: &Config<'_>, layers: usize) -> Result<Vec<Option<usize>>> {
    let window = config.size_or("sliding_window", 128)?;
    let unsaid = || (0..layers).map(|layer| layer.is_multiple_of(2)).collect();
    let windowed = transformer::windowed(config, layers)?.unwrap_or_else(unsaid);
    Ok(windowed.into_iter().map(|windowed| windowed.then_some(window)).collect())
}

fn mlps(config: &Config<'_>, layers: usize) -> Result<Vec<Mlp>> {
    let keys = ["num_local_experts", "intermediate_size"];
    let experts = transformer::experts(config, keys, Scoring::SoftmaxOfChosen)?;
    if let Some(other) = config.optional_size("experts_per_token")?.filter(|n| *n != experts.chosen)
    {
        let detail = format!("{other}, and {} by num_experts_per_tok", experts.chosen);
        return config.unsupported("experts_per_token", detail);
    }
    let alpha = config.positive_or("swiglu_alpha", ALPHA)? as f32;
    let limit = config.positive_or("swiglu_limit", 7.0)? as f32;
    let each = Gated { gate: Gate::ClampedSwiglu { alpha, limit }, ..experts.each };
    Ok(vec![Mlp::Experts(Experts { each, bias: true, ..experts }); layers])
}
