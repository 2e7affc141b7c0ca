//! Gemma 3, text ("Gemma 3 Technical Report", 2025): norms before and behind each module, with
//! scales stored less one; GELU; embeddings times sqrt(hidden); windowed layers with a rotary base
//! of their own, every sixth sees everything; queries divided by sqrt(query_pre_attn_scalar).

use super::config::Config;
use super::rope::{self, Factors, Head, Rope};
use super::spec::{
    Attention, Gate, Gated, LayerSpec, Mixer, Mlp, NormSpan, Norms, Role, Spec, Stored,
};
use super::transformer::{layer, windowed, with_layers, Tied};
use crate::error::Result;

/// Bases of the rotary embedding where the config is silent: of layers that see everything, and of
/// windowed ones.
const GLOBAL: f64 = 1_000_000.0;
const LOCAL: f64 = 10_000.0;

pub(super) fn spec(config: &Config<'_>) -> Result<Spec> {
    for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if config.get(key).is_some() {
            return config.unsupported(key, "soft caps of logits; only null");
        }
    }
    if config.flag_or("use_bidirectional_attention", false)? {
        return config.unsupported("use_bidirectional_attention", "true; only false");
    }
    match config.text("hidden_activation")? {
        None | Some("gelu_pytorch_tanh") => {}
        Some(other) => {
            let detail = format!("{other:?}; only gelu_pytorch_tanh");
            return config.unsupported("hidden_activation", detail);
        }
    }
    let heads = config.size("num_attention_heads")?;
    let head_dim = config.size_or("head_dim", 256)?;
    let kinds = kinds(config)?;
    let (local, global) = ropes(config, head_dim)?;
    let window = config.size_or("sliding_window", 4096)?;
    let mlp = Gated { ffn: config.size("intermediate_size")?, gate: Gate::GeluTanh };
    let kv_heads = config.size_or("num_key_value_heads", heads)?;
    let one = |windowed: bool| {
        let (window, rope) = if windowed { (Some(window), local) } else { (None, global.0) };
        let qk_norm = Some(NormSpan::Head);
        let plain = Attention::plain(heads, kv_heads, head_dim, rope);
        let attention = Attention { window, qk_norm, ..plain };
        LayerSpec { norms: Norms::Around, ..layer(Mixer::Attention(attention), Mlp::Gated(mlp)) }
    };
    let layers = kinds.into_iter().map(one).collect();
    let mut spec = with_layers(config, layers, Tied::Yes)?;
    spec.rope_factors = global.1;
    spec.embedding_factor = (spec.hidden as f32).sqrt();
    // The softmax divides by sqrt(head_dim): what is left of query_pre_attn_scalar goes to q.
    let scalar = config.positive_or("query_pre_attn_scalar", 256.0)?;
    let of_q = (head_dim as f64 / scalar).sqrt() as f32;
    for tensor in &mut spec.tensors {
        let factor = if matches!(tensor.role, Role::QNorm(_)) { of_q } else { 1.0 };
        if tensor.role.is_norm() {
            tensor.stored = Stored::Less { one: 1.0, factor };
        }
    }
    config.finish(&["cache_implementation"])?;
    Ok(spec)
}

/// Which layers are windowed: all but every `sliding_window_pattern`th, or as `layer_types` says.
fn kinds(config: &Config<'_>) -> Result<Vec<bool>> {
    let layers = config.layers()?;
    let pattern = config.size_or("_sliding_window_pattern", 6)?;
    let pattern = config.size_or("sliding_window_pattern", pattern)?;
    let unsaid = || (1..=layers).map(|layer| !layer.is_multiple_of(pattern)).collect();
    Ok(windowed(config, layers)?.unwrap_or_else(unsaid))
}

/// How windowed layers turn, and the others, with their divisors.
fn ropes(config: &Config<'_>, dim: usize) -> Result<(Rope, (Rope, Factors))> {
    let head = Head { dim, partial: false };
    let base = |key: &str| config.optional_positive(key);
    let (local, global) = (base("rope_local_base_freq")?, base("rope_theta")?);
    let Some(both) = config.object("rope_parameters")? else {
        let scaling = config.object("rope_scaling")?;
        let global = rope::one(config, scaling.as_ref(), global, GLOBAL, head)?;
        return Ok((rope::one(config, None, local, LOCAL, head)?.0, global));
    };
    let [windowed, full] = ["sliding_attention", "full_attention"].map(|key| both.object(key));
    let global = rope::one(config, full?.as_ref(), global, GLOBAL, head)?;
    let (local, divisors) = rope::one(config, windowed?.as_ref(), local, LOCAL, head)?;
    if divisors != Factors::default() {
        return both.unsupported("sliding_attention", "longrope; only in full_attention");
    }
    both.finish(&[])?;
    Ok((local, global))
}
