//! What the Llama family has in common: one residual stream, Hugging Face's key and tensor names.
//! A family differs by [`Traits`] only.

use super::config::Config;
use super::quantization;
use super::rope::{self, Factors};
use super::spec::{
    Attention, Gate, Gated, HeadKind, Join, LayerSpec, Mixer, Mlp, NormSpan, Norms, Role, Spec,
    TensorSpec,
};
use crate::error::Result;

/// How a family departs from Llama.
pub(super) struct Traits {
    /// Biases on q, k and v.
    pub qkv_bias: bool,
    /// Norms on q and k.
    pub qk_norm: Option<NormSpan>,
    /// Where the norms of the residual stream stand.
    pub norms: Norms,
    /// Heads may turn in part.
    pub partial_rope: bool,
    /// Whether the head is the embedding where the config is silent.
    pub tied: Tied,
    /// Which layers are windowed.
    pub windows: fn(&Config<'_>, usize) -> Result<Vec<Option<usize>>>,
    /// Keys of the family that change nothing.
    pub harmless: &'static [&'static str],
}

impl Traits {
    /// Llama itself.
    pub const LLAMA: Self = Self {
        qkv_bias: false,
        qk_norm: None,
        norms: Norms::Before,
        partial_rope: false,
        tied: Tied::No,
        windows: |_, layers| Ok(vec![None; layers]),
        harmless: &["is_llama_config"],
    };
}

/// Whether a family's head is its embedding where the config is silent.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Tied {
    Yes,
    No,
}

/// Reads a config of the family into a spec.
pub(super) fn spec(config: &Config<'_>, traits: &Traits) -> Result<Spec> {
    let heads = config.size("num_attention_heads")?;
    let head_dim = config.size_or("head_dim", config.size("hidden_size")? / heads)?;
    let head = rope::Head { dim: head_dim, partial: traits.partial_rope };
    let (rope, factors) = rope::read(config, head)?;
    let attention = Attention {
        heads,
        kv_heads: config.size_or("num_key_value_heads", heads)?,
        head_dim,
        window: None,
        rope,
        qk_norm: traits.qk_norm,
        qkv_bias: traits.qkv_bias,
    };
    let mlp = Gated { ffn: config.size("intermediate_size")?, gate: Gate::Silu };
    silu(config)?;
    let windows = (traits.windows)(config, config.layers()?)?;
    let layers = windows.into_iter().map(|window| {
        let attention = Attention { window, ..attention };
        LayerSpec { norms: traits.norms, ..layer(attention, mlp) }
    });
    let tp_is_harmless = traits.harmless.contains(&"pretraining_tp");
    if !tp_is_harmless && config.size_or("pretraining_tp", 1)? != 1 {
        return config.unsupported("pretraining_tp", "only 1");
    }
    let mut spec = with_layers(config, layers.collect(), traits.tied)?;
    spec.rope_factors = factors;
    config.finish(traits.harmless)?;
    Ok(spec)
}

/// A layer of a model with one residual stream.
pub(super) fn layer(attention: Attention, mlp: Gated) -> LayerSpec {
    LayerSpec {
        mixer: Mixer::Attention(attention),
        mixer_join: Join::Sum,
        mlp: Mlp::Gated(mlp),
        mlp_join: Join::Sum,
        norms: Norms::Before,
    }
}

/// The spec of a model with these layers, all else read from the config.
pub(super) fn with_layers(
    config: &Config<'_>,
    layers: Vec<LayerSpec>,
    unsaid: Tied,
) -> Result<Spec> {
    let said = config.get("tie_word_embeddings").is_some();
    let tied = config.flag_or("tie_word_embeddings", unsaid == Tied::Yes)?;
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
        embedding_factor: 1.0,
        rope_factors: Factors::default(),
        stretched: 0,
        quantization: quantization::read(config)?,
        tensors: Vec::new(),
        ignored: Vec::new(),
        bos: config.token_ids("bos_token_id")?.first().copied(),
        eos: config.token_ids("eos_token_id")?,
    };
    spec.tensors = tensors(&spec);
    // Where nothing was said a head of its own would contradict: it is then surplus.
    if tied && said {
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

/// Hugging Face's names.
fn tensors(spec: &Spec) -> Vec<TensorSpec> {
    let hidden = spec.hidden;
    let mut list = Vec::new();
    let mut add = |role, name: String, shape: &[usize]| {
        list.push(TensorSpec::of(role, name, shape));
    };
    add(Role::Embedding, "model.embed_tokens.weight".to_owned(), &[spec.vocab, hidden]);
    for (i, layer) in spec.layers.iter().enumerate() {
        let (Mixer::Attention(attention), Mlp::Gated(Gated { ffn, .. })) =
            (&layer.mixer, layer.mlp);
        let (q, kv) = (attention.query_width(), attention.kv_width());
        let name = |part: &str| format!("model.layers.{i}.{part}");
        // The names of before and behind differ from family to family.
        let norms: &[(Role, &str)] = match layer.norms {
            Norms::Before => &[
                (Role::AttentionNorm(i), "input_layernorm"),
                (Role::MlpNorm(i), "post_attention_layernorm"),
            ],
            Norms::Behind => &[
                (Role::AttentionOutNorm(i), "post_attention_layernorm"),
                (Role::MlpOutNorm(i), "post_feedforward_layernorm"),
            ],
            Norms::Around => &[
                (Role::AttentionNorm(i), "input_layernorm"),
                (Role::AttentionOutNorm(i), "post_attention_layernorm"),
                (Role::MlpNorm(i), "pre_feedforward_layernorm"),
                (Role::MlpOutNorm(i), "post_feedforward_layernorm"),
            ],
        };
        for (role, norm) in norms {
            add(*role, name(&format!("{norm}.weight")), &[hidden]);
        }
        add(Role::Q(i), name("self_attn.q_proj.weight"), &[q, hidden]);
        add(Role::K(i), name("self_attn.k_proj.weight"), &[kv, hidden]);
        add(Role::V(i), name("self_attn.v_proj.weight"), &[kv, hidden]);
        if attention.qkv_bias {
            add(Role::QBias(i), name("self_attn.q_proj.bias"), &[q]);
            add(Role::KBias(i), name("self_attn.k_proj.bias"), &[kv]);
            add(Role::VBias(i), name("self_attn.v_proj.bias"), &[kv]);
        }
        if let Some(span) = attention.qk_norm {
            let [q, kv] = match span {
                NormSpan::Head => [attention.head_dim; 2],
                NormSpan::AllHeads => [q, kv],
            };
            add(Role::QNorm(i), name("self_attn.q_norm.weight"), &[q]);
            add(Role::KNorm(i), name("self_attn.k_norm.weight"), &[kv]);
        }
        add(Role::O(i), name("self_attn.o_proj.weight"), &[hidden, q]);
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
