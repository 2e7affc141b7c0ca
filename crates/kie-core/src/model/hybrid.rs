//! `kie_hybrid`: this project's own dialect for transformers whose layers differ in shape. It has
//! Hugging Face's tensor names and, in `layers`, an object a layer; `tests/data/README.md` lists
//! its keys. Made-up models use it; released families have files of their own.

use super::config::Config;
use super::rope::{Rope, RopeStyle, Scaling};
use super::spec::{Attention, Gate, Gated, LayerSpec, Mixer, Mlp, NormSpan, Spec};
use super::transformer::{layer, with_layers, Tied};
use crate::error::Result;

pub(super) fn spec(config: &Config<'_>) -> Result<Spec> {
    let entries = config.objects("layers")?;
    let count = config.layers()?;
    if entries.len() != count {
        return config.unsupported("layers", format!("{} entries for {count}", entries.len()));
    }
    let layers = entries.iter().map(one).collect::<Result<_>>()?;
    let spec = with_layers(config, layers, Tied::No)?;
    super::transformer::silu(config)?;
    config.finish(&[])?;
    Ok(spec)
}

fn one(config: &Config<'_>) -> Result<LayerSpec> {
    let heads = config.size("num_attention_heads")?;
    let head_dim = config.size("head_dim")?;
    let kv_heads = config.size_or("num_key_value_heads", heads)?;
    let rope = Rope {
        theta: config.positive("rope_theta")?,
        style: RopeStyle::HalfSplit,
        features: head_dim,
        scaling: Scaling::None,
    };
    let attention = Attention {
        window: config.optional_size("sliding_window")?,
        qk_norm: config.flag_or("qk_norm", false)?.then_some(NormSpan::Head),
        qkv_bias: config.flag_or("attention_bias", false)?,
        ..Attention::plain(heads, kv_heads, head_dim, rope)
    };
    let mlp = Gated { ffn: config.size("intermediate_size")?, gate: Gate::Silu };
    config.finish(&[])?;
    Ok(layer(Mixer::Attention(attention), Mlp::Gated(mlp)))
}
