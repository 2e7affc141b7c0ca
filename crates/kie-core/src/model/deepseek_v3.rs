//! DeepSeek-V3 and R1 ("DeepSeek-V3 Technical Report", 2024) and Kimi K2 ("Kimi K2: Open Agentic
//! Intelligence", 2025), which are of one architecture: latent attention, first layers that are
//! dense, then experts with a sigmoid router and shared ones. Layers that predict further tokens
//! take no part; of Kimi K2.5 and later the model of text is read, and nothing of vision.

use super::config::Config;
use super::quantization;
use super::rope::{self, Factors, Head, Rope, RopeStyle};
use super::spec::{
    ExpertGroups, Experts, Gated, Latent, Mixer, Mlp, Scoring, Shared, Spec, TensorSpec,
};
use super::transformer::{self, ExpertNames, Tied};
use crate::error::Result;

/// Epsilon of the latents' norms, whatever that of the others is (`modeling_deepseek_v3.py` of
/// transformers).
const LATENT_EPS: f32 = 1e-6;

/// Most layers that predict further tokens.
const MOST_FURTHER: i64 = 64;

/// Keys that change nothing at inference, or repeat what others say.
const HARMLESS: &[&str] =
    &["aux_loss_alpha", "ep_size", "head_dim", "pretraining_tp", "qk_head_dim", "seq_aux"];

/// Keys of Kimi's outer config, which are about vision.
const VISION: &[&str] = &[
    "ignore_index",
    "media_placeholder_token_id",
    "use_unified_vision_chunk",
    "video_placeholder",
    "vision_config",
];

pub(super) fn spec(config: &Config<'_>) -> Result<Spec> {
    let (latent, factors) = latent(config)?;
    let (dense, experts) = (transformer::gated(config)?, experts(config)?);
    let layers = config.layers()?;
    config.need("first_k_dense_replace")?;
    let first = config.integer_or("first_k_dense_replace", 0)?;
    let mlp = |layer: usize| match (layer as i64) < first {
        true => Mlp::Gated(dense),
        false => Mlp::Experts(experts),
    };
    let of_layer = |layer| transformer::layer(Mixer::Latent(latent), mlp(layer));
    let mut spec = transformer::with_layers(config, (0..layers).map(of_layer).collect(), Tied::No)?;
    spec.rope_factors = factors;
    let names = ExpertNames { shared: "mlp.shared_experts", ..transformer::Traits::LLAMA.experts };
    spec.tensors = transformer::tensors(&spec, &names);
    let further = match config.integer_or("num_nextn_predict_layers", 0)? {
        count @ 0..=MOST_FURTHER => count as usize,
        count => {
            let detail = format!("{count}; 0 to {MOST_FURTHER}");
            return config.unsupported("num_nextn_predict_layers", detail);
        }
    };
    let beyond = (layers..layers + further).map(|layer| format!("model.layers.{layer}."));
    spec.ignored_below.extend(beyond);
    config.finish(HARMLESS)?;
    Ok(spec)
}

/// Kimi K2.5: the model of text is inside of one that sees.
pub(super) fn kimi_k25(config: &Config<'_>) -> Result<Spec> {
    let text = config.model("text_config")?;
    let mut spec = spec(&text)?;
    spec.quantization = spec.quantization.or(quantization::read(config)?);
    spec.bos = spec.bos.or(config.token_ids("bos_token_id")?.first().copied());
    if spec.eos.is_empty() {
        spec.eos = config.token_ids("eos_token_id")?;
    }
    if config.flag_or("tie_word_embeddings", spec.tied)? != spec.tied {
        return config.unsupported("tie_word_embeddings", "not what text_config says");
    }
    let inner = |name: &str| format!("language_model.{name}");
    let ignored = spec.ignored.iter_mut().chain(&mut spec.ignored_below);
    ignored.for_each(|name| *name = inner(name));
    spec.tensors.iter_mut().for_each(|TensorSpec { name, .. }| *name = inner(name));
    spec.ignored_below.extend(["vision_tower.", "mm_projector."].map(str::to_owned));
    config.finish(VISION)?;
    Ok(spec)
}

fn latent(config: &Config<'_>) -> Result<(Latent, Factors)> {
    let heads = config.size("num_attention_heads")?;
    let kv_heads = config.size_or("num_key_value_heads", heads)?;
    if kv_heads != heads {
        let detail = format!("{kv_heads} of {heads} heads; as many wanted");
        return config.unsupported("num_key_value_heads", detail);
    }
    let turned = config.size("qk_rope_head_dim")?;
    let (rope, factors) = rope::read(config, Head { dim: turned, partial: false })?;
    let style = match config.flag_or("rope_interleave", true)? {
        true => RopeStyle::Interleaved,
        false => RopeStyle::HalfSplit,
    };
    let latent = Latent {
        heads,
        query_rank: config.optional_size("q_lora_rank")?,
        rank: config.size("kv_lora_rank")?,
        plain: config.size("qk_nope_head_dim")?,
        turned,
        value: config.size("v_head_dim")?,
        rope: Rope { style, ..rope },
        eps: LATENT_EPS,
    };
    Ok((latent, factors))
}

fn experts(config: &Config<'_>) -> Result<Experts> {
    for (key, known) in [("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")] {
        if let Some(other) = config.text(key)?.filter(|said| *said != known) {
            return config.unsupported(key, format!("{other:?}; {known:?}"));
        }
    }
    if config.size_or("moe_layer_freq", 1)? != 1 {
        return config.unsupported("moe_layer_freq", "only 1");
    }
    let scoring = Scoring::Sigmoid { normed: config.flag_or("norm_topk_prob", true)? };
    let keys = ["n_routed_experts", "moe_intermediate_size"];
    let experts = transformer::experts(config, keys, scoring)?;
    let (count, chosen) = (config.size("n_group")?, config.size("topk_group")?);
    let most = if experts.count.is_multiple_of(count) { experts.count / count } else { 0 };
    if count > 64 || chosen > count || experts.chosen > most * chosen {
        let (of, all) = (experts.chosen, experts.count);
        let detail = format!("{of} of {all} experts in {chosen} of {count} groups");
        return config.unsupported("n_group/topk_group", detail);
    }
    let groups = ExpertGroups { count: count as u32, chosen: chosen as u32 };
    Ok(Experts {
        correction: true,
        groups: (chosen < count).then_some(groups),
        factor: config.positive("routed_scaling_factor")? as f32,
        shared: shared(config, &experts)?,
        ..experts
    })
}

/// Experts that every position goes to, as one.
pub(super) fn shared(config: &Config<'_>, experts: &Experts) -> Result<Option<Shared>> {
    let ones = config.optional_size("n_shared_experts")?;
    if ones.is_some_and(|ones| ones > experts.count) {
        return config.unsupported("n_shared_experts", "more than n_routed_experts");
    }
    Ok(ones.map(|ones| {
        let each = Gated { ffn: ones * experts.each.ffn, ..experts.each };
        Shared { each, scaled: false }
    }))
}
