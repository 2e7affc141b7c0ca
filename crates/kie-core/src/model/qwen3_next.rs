//! Qwen3-Next and Qwen3-Coder-Next (Qwen team, 2025): a gated delta rule (Yang, Kautz and
//! Hatamizadeh, "Gated Delta Networks", 2024) in all layers but every fourth, whose softmax
//! attention has a gate on its output and turns a part of each head; experts beside a shared one;
//! norms with scales stored less one.

use super::config::Config;
use super::spec::{
    Delta, Experts, Gated, LayerSpec, Mixer, Mlp, Mtp, NormSpan, Role, Shared, Spec, Stored,
    TensorSpec,
};
use super::{qwen3_moe, transformer};
use crate::error::Result;

/// Longest sides of the recurrent state, which keep its numbers inside 32 bits.
const DIM_MAX: usize = 1024;
const HEADS_MAX: usize = 1024;
const TAPS_MAX: usize = 64;

pub(super) fn spec(config: &Config<'_>) -> Result<Spec> {
    let traits = transformer::Traits {
        qk_norm: Some(NormSpan::Head),
        gated: true,
        partial_rope: true,
        deltas,
        mlps,
        ..transformer::Traits::LLAMA
    };
    for key in ["attention_bias", "use_sliding_window"] {
        if config.flag_or(key, false)? {
            return config.unsupported(key, "true; only false");
        }
    }
    let mut spec = transformer::spec(config, &traits)?;
    spec.mtp = mtp(&spec);
    let further = spec.mtp.iter_mut().flat_map(|mtp| &mut mtp.tensors);
    for tensor in spec.tensors.iter_mut().chain(further) {
        // That of a recurrent head's output is stored as it is.
        if tensor.role.is_norm() && !matches!(tensor.role, Role::DeltaNorm(_)) {
            tensor.stored = Stored::Less { one: 1.0, factor: 1.0 };
        }
    }
    spec.ignored_below.push(MTP.to_owned());
    Ok(spec)
}

/// What the names of the tensors of multi-token prediction begin with.
const MTP: &str = "mtp.";

/// The layer that predicts further tokens, with attention as the model's and experts as its last
/// layer's. It takes in what the model's head does, normed, as in vLLM's and SGLang's `mtp` models.
fn mtp(spec: &Spec) -> Option<Mtp> {
    let attends = |layer: &&LayerSpec| matches!(layer.mixer, Mixer::Attention(_));
    let (number, hidden) = (spec.layers.len(), spec.hidden);
    let layer = *spec.layers.iter().rev().find(attends)?;
    let layer = transformer::layer(layer.mixer, spec.layers.last()?.mlp);
    let whole = |role, name: &str, shape: &[usize]| {
        TensorSpec::of(role, format!("{MTP}{name}.weight"), shape)
    };
    let mut tensors = vec![
        whole(Role::MtpEmbeddingNorm, "pre_fc_norm_embedding", &[hidden]),
        whole(Role::MtpHiddenNorm, "pre_fc_norm_hidden", &[hidden]),
        whole(Role::MtpIn, "fc", &[hidden, 2 * hidden]),
        whole(Role::MtpNorm, "norm", &[hidden]),
    ];
    let names = &transformer::Traits::LLAMA.experts;
    let own = transformer::of_layer(number, &layer, hidden, names).into_iter().map(|tensor| {
        let name = tensor.name.replace(&format!("model.layers.{number}."), "mtp.layers.0.");
        TensorSpec { name, ..tensor }
    });
    tensors.extend(own);
    Some(Mtp { layer, tensors, prefix: MTP.to_owned() })
}

/// All layers but every `full_attention_interval`th, or as `layer_types` says.
fn deltas(config: &Config<'_>, layers: usize) -> Result<Vec<Option<Delta>>> {
    let size = |key: &str, most: usize| match config.size(key)? {
        size if size <= most => Ok(size),
        size => config.unsupported(key, format!("{size}; {most} at most")),
    };
    let delta = Delta {
        key_heads: size("linear_num_key_heads", HEADS_MAX)?,
        value_heads: size("linear_num_value_heads", HEADS_MAX)?,
        key_dim: size("linear_key_head_dim", DIM_MAX)?,
        value_dim: size("linear_value_head_dim", DIM_MAX)?,
        taps: size("linear_conv_kernel_dim", TAPS_MAX)?,
    };
    let every = config.size_or("full_attention_interval", 4)?;
    let recurrent = match config.texts("layer_types")? {
        None => (1..=layers).map(|layer| !layer.is_multiple_of(every)).collect(),
        Some(types) if types.len() != layers => {
            let detail = format!("{} entries for {layers} layers", types.len());
            return config.unsupported("layer_types", detail);
        }
        Some(types) => {
            let kind = |name: &&str| match *name {
                "linear_attention" => Ok(true),
                "full_attention" => Ok(false),
                other => config.unsupported("layer_types", format!("{other:?}")),
            };
            types.iter().map(kind).collect::<Result<Vec<bool>>>()?
        }
    };
    Ok(recurrent.into_iter().map(|recurrent| recurrent.then_some(delta)).collect())
}

/// Qwen3's experts, and beside them one that all positions go to, times a sigmoid.
fn mlps(config: &Config<'_>, layers: usize) -> Result<Vec<Mlp>> {
    let ffn = config.size("shared_expert_intermediate_size")?;
    let with_shared = |mlp: Mlp| match mlp {
        Mlp::Gated(_) => mlp,
        Mlp::Experts(experts) => {
            let each = Gated { ffn, ..experts.each };
            let shared = Some(Shared { each, scaled: true });
            Mlp::Experts(Experts { shared, ..experts })
        }
    };
    Ok(qwen3_moe::mlps(config, layers)?.into_iter().map(with_shared).collect())
}
