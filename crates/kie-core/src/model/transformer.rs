//! What the Llama family has in common: one residual stream, Hugging Face's key and tensor names.
//! A family differs by [`Traits`] only.

use super::config::Config;
use super::{
    quantization, Attention, Gated, HeadKind, Join, LayerSpec, Llama3Scaling, Mixer, Mlp, Role,
    Rope, RopeStyle, Spec, TensorSpec,
};
use crate::error::Result;

/// How a family departs from Llama.
pub(super) struct Traits {
    /// Biases on q, k and v.
    pub qkv_bias: bool,
    /// Norms on each head's q and k.
    pub qk_norm: bool,
    /// Which layers are windowed.
    pub windows: fn(&Config<'_>, usize) -> Result<Vec<Option<usize>>>,
}

/// `rope_theta` where the config is silent.
const THETA: f64 = 10_000.0;

/// Reads a config of the family into a spec.
pub(super) fn spec(config: &Config<'_>, traits: &Traits) -> Result<Spec> {
    let heads = config.size("num_attention_heads")?;
    let attention = Attention {
        heads,
        kv_heads: config.size_or("num_key_value_heads", heads)?,
        head_dim: config.size_or("head_dim", config.size("hidden_size")? / heads)?,
        window: None,
        rope: rope(config)?,
        qk_norm: traits.qk_norm,
        qkv_bias: traits.qkv_bias,
    };
    let mlp = Gated { ffn: config.size("intermediate_size")? };
    let windows = (traits.windows)(config, config.layers()?)?;
    let layers = windows.into_iter().map(|window| layer(Attention { window, ..attention }, mlp));
    if config.size_or("pretraining_tp", 1)? != 1 {
        return config.unsupported("pretraining_tp", "only 1");
    }
    let spec = with_layers(config, layers.collect())?;
    config.finish(&["is_llama_config"])?;
    Ok(spec)
}

/// A layer of a model with one residual stream.
pub(super) fn layer(attention: Attention, mlp: Gated) -> LayerSpec {
    LayerSpec {
        mixer: Mixer::Attention(attention),
        mixer_join: Join::Sum,
        mlp: Mlp::Gated(mlp),
        mlp_join: Join::Sum,
    }
}

/// The spec of a model with these layers, all else read from the config.
pub(super) fn with_layers(config: &Config<'_>, layers: Vec<LayerSpec>) -> Result<Spec> {
    let tied = config.flag_or("tie_word_embeddings", false)?;
    silu(config)?;
    let mut spec = Spec {
        architecture: String::new(),
        hidden: config.size("hidden_size")?,
        vocab: config.size("vocab_size")?,
        max_positions: config.size("max_position_embeddings")?,
        norm_eps: config.positive_or("rms_norm_eps", 1e-6)? as f32,
        lanes: 1,
        layers,
        head: HeadKind::Replicate,
        tied,
        norm_per_lane: false,
        quantization: quantization::read(config)?,
        tensors: Vec::new(),
        ignored: Vec::new(),
        bos: config.token_ids("bos_token_id")?.first().copied(),
        eos: config.token_ids("eos_token_id")?,
    };
    spec.tensors = tensors(&spec);
    if tied {
        spec.ignored.push("lm_head.weight".to_owned());
    }
    Ok(spec)
}

/// The only activation there is, under its two names.
pub(super) fn silu(config: &Config<'_>) -> Result<()> {
    match config.text("hidden_act")? {
        None | Some("silu" | "swish") => Ok(()),
        Some(other) => config.unsupported("hidden_act", format!("{other:?}; only silu")),
    }
}

/// `rope_theta` with `rope_scaling`, or transformers 5's `rope_parameters`, which holds both.
pub(super) fn rope(config: &Config<'_>) -> Result<Rope> {
    let style = RopeStyle::HalfSplit;
    let outer = config.optional_positive("rope_theta")?;
    let old = config.object("rope_scaling")?;
    let new = config.object("rope_parameters")?;
    if old.is_some() && new.is_some() {
        return config.unsupported("rope_scaling", "rope_parameters beside it");
    }
    let Some(parameters) = new.or(old) else {
        return Ok(Rope { theta: outer.unwrap_or(THETA), style, scaling: None });
    };
    let inner = parameters.optional_positive("rope_theta")?;
    if let (Some(inner), Some(outer)) = (inner, outer) {
        if inner != outer {
            return parameters.unsupported("rope_theta", format!("{inner}, elsewhere {outer}"));
        }
    }
    let theta = inner.or(outer).unwrap_or(THETA);
    Ok(Rope { theta, style, scaling: llama3_scaling(&parameters)? })
}

fn llama3_scaling(parameters: &Config<'_>) -> Result<Option<Llama3Scaling>> {
    let (new, old) = (parameters.text("rope_type")?, parameters.text("type")?);
    if new.is_some() && old.is_some() && new != old {
        return parameters.unsupported("type", format!("{old:?} beside rope_type {new:?}"));
    }
    let scaling = match new.or(old) {
        None | Some("default") => None,
        Some("llama3") => Some(Llama3Scaling {
            factor: parameters.positive("factor")?,
            low_freq_factor: parameters.positive("low_freq_factor")?,
            high_freq_factor: parameters.positive("high_freq_factor")?,
            original_max_positions: parameters.positive("original_max_position_embeddings")?,
        }),
        Some(other) => {
            return parameters.unsupported("rope_type", format!("{other:?}; default and llama3"));
        }
    };
    parameters.finish(&[])?;
    Ok(scaling)
}

/// Hugging Face's names.
fn tensors(spec: &Spec) -> Vec<TensorSpec> {
    let hidden = spec.hidden;
    let mut list = Vec::new();
    let mut add = |role, name: String, shape: &[usize]| {
        list.push(TensorSpec { role, name, shape: shape.to_vec() });
    };
    add(Role::Embedding, "model.embed_tokens.weight".to_owned(), &[spec.vocab, hidden]);
    for (i, layer) in spec.layers.iter().enumerate() {
        let (Mixer::Attention(attention), Mlp::Gated(Gated { ffn })) = (&layer.mixer, layer.mlp);
        let (q, kv) = (attention.query_width(), attention.kv_width());
        let name = |part: &str| format!("model.layers.{i}.{part}");
        add(Role::AttentionNorm(i), name("input_layernorm.weight"), &[hidden]);
        add(Role::Q(i), name("self_attn.q_proj.weight"), &[q, hidden]);
        add(Role::K(i), name("self_attn.k_proj.weight"), &[kv, hidden]);
        add(Role::V(i), name("self_attn.v_proj.weight"), &[kv, hidden]);
        if attention.qkv_bias {
            add(Role::QBias(i), name("self_attn.q_proj.bias"), &[q]);
            add(Role::KBias(i), name("self_attn.k_proj.bias"), &[kv]);
            add(Role::VBias(i), name("self_attn.v_proj.bias"), &[kv]);
        }
        if attention.qk_norm {
            add(Role::QNorm(i), name("self_attn.q_norm.weight"), &[attention.head_dim]);
            add(Role::KNorm(i), name("self_attn.k_norm.weight"), &[attention.head_dim]);
        }
        add(Role::O(i), name("self_attn.o_proj.weight"), &[hidden, q]);
        add(Role::MlpNorm(i), name("post_attention_layernorm.weight"), &[hidden]);
        add(Role::Gate(i), name("mlp.gate_proj.weight"), &[ffn, hidden]);
        add(Role::Up(i), name("mlp.up_proj.weight"), &[ffn, hidden]);
        add(Role::Down(i), name("mlp.down_proj.weight"), &[hidden, ffn]);
    }
    add(Role::FinalNorm, "model.norm.weight".to_owned(), &[hidden]);
    if !spec.tied {
        add(Role::Head, "lm_head.weight".to_owned(), &[spec.vocab, hidden]);
    }
    list
}
