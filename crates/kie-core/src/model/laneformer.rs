//! Laneformer: lanes with residual streams of their own, and delayed tensor parallelism (Kog).
//!
//! Two dialects: the released one (`laneformer`: `use_attention_comm`, `use_mlp_comm`,
//! `swa_layers`) and the earlier public code's (`laneformer_tp`: `use_comm`,
//! `sliding_window_n_layers`, `unclamped_layers`). Keys of both at once are refused.

use super::config::Config;
use super::quantization;
use super::rope::{Factors, Llama3Scaling, Rope, RopeStyle, Scaling};
use super::spec::{
    Attention, Gate, Gated, HeadKind, Join, LayerSpec, Mixer, Mlp, Norms, Role, Spec, TensorSpec,
};
use super::transformer::silu;
use crate::error::Result;

const RELEASED: [&str; 3] = ["use_attention_comm", "use_mlp_comm", "swa_layers"];
const EARLIER: [&str; 3] = ["use_comm", "sliding_window_n_layers", "unclamped_layers"];

/// What training left behind.
const HARMLESS: &[&str] = &["attn_mask_type", "depth_init", "multiple_of", "use_flex_attn"];

/// Reads either dialect.
pub(super) fn spec(config: &Config<'_>) -> Result<Spec> {
    let first = |keys: [&'static str; 3]| keys.into_iter().find(|key| config.has(key));
    if let (Some(new), Some(old)) = (first(RELEASED), first(EARLIER)) {
        return config.unsupported(new, format!("{old} beside it belongs to another dialect"));
    }
    let hidden = config.size("hidden_size")?;
    let heads = config.size("num_attention_heads")?;
    let lanes = config.size_or("num_lanes", 1)?;
    let layers = config.layers()?;
    let head = head(config)?;
    let joins = joins(config, layers, lanes)?;
    let windows = windows(config, layers)?;
    let head_dim = config.size_or("head_dim", hidden / heads)?;
    let kv_heads = config.size_or("num_key_value_heads", heads)?;
    let attention = Attention::plain(heads, kv_heads, head_dim, rope(config, head_dim)?);
    let ffn = config.size("intermediate_size")?;
    let layer = |([mixer_join, mlp_join], window): ([Join; 2], Option<usize>)| {
        let mixer = Mixer::Attention(Attention { window, ..attention });
        let mlp = Mlp::Gated(Gated { ffn, gate: Gate::Silu });
        LayerSpec { mixer, mixer_join, mlp, mlp_join, norms: Norms::Before }
    };
    if config.flag_or("tie_word_embeddings", false)? {
        return config.unsupported("tie_word_embeddings", "true; a Laneformer's head is its own");
    }
    silu(config)?;
    let mut spec = Spec {
        architecture: String::new(),
        hidden,
        vocab: config.size("vocab_size")?,
        max_positions: config.size("max_position_embeddings")?,
        norm_eps: config.positive_or("norm_eps", 1e-5)? as f32,
        lanes,
        hyper: None,
        layers: joins.into_iter().zip(windows).map(layer).collect(),
        mtp: None,
        predicts: false,
        head,
        tied: false,
        norm_per_lane: !config.flag_or("replicated_rmsn_scale", true)?,
        embedding_factor: 1.0,
        rope_factors: Factors::default(),
        stretched: 0,
        quantization: quantization::read(config)?,
        tensors: Vec::new(),
        ignored: Vec::new(),
        ignored_below: Vec::new(),
        bos: config.token_ids("bos_token_id")?.first().copied(),
        eos: config.token_ids("eos_token_id")?,
    };
    for (key, size) in [("num_attention_heads", heads), ("num_key_value_heads", attention.kv_heads)]
    {
        if !size.is_multiple_of(lanes) {
            return config.unsupported(key, format!("{size} heads over {lanes} lanes"));
        }
    }
    if !ffn.is_multiple_of(lanes) {
        let detail = format!("{ffn} neurons over {lanes} lanes");
        return config.unsupported("intermediate_size", detail);
    }
    if head == HeadKind::VocabParallel && !spec.vocab.is_multiple_of(lanes) {
        let detail = format!("{} ids over {lanes} lanes", spec.vocab);
        return config.unsupported("vocab_size", detail);
    }
    spec.tensors = tensors(&spec, ffn);
    config.finish(HARMLESS)?;
    Ok(spec)
}

fn head(config: &Config<'_>) -> Result<HeadKind> {
    let sum_first = config.flag_or("pre_norm_lane_agg", false)?;
    match (config.text("lm_head_type")?.unwrap_or("replicate"), sum_first) {
        ("replicate", false) => Ok(HeadKind::Replicate),
        ("replicate", true) => Ok(HeadKind::SumThenNorm),
        ("vocab_parallel", false) => Ok(HeadKind::VocabParallel),
        ("lane", false) => Ok(HeadKind::Concat),
        ("vocab_parallel" | "lane", true) => {
            config.unsupported("pre_norm_lane_agg", "true needs lm_head_type replicate")
        }
        (other, _) => config.unsupported("lm_head_type", format!("{other:?}")),
    }
}

/// How attention and MLP outputs join the streams. `use_early_comm` alone decides the layers below
/// the delay, whatever the later layers do; the layers right behind add the early outputs again.
fn joins(config: &Config<'_>, layers: usize, lanes: usize) -> Result<Vec<[Join; 2]>> {
    let delay = config.integer_or("broadcast_delay", 1)?;
    if delay < 1 {
        return config.unsupported("broadcast_delay", format!("{delay}; 1 layer or more"));
    }
    let delay = delay as usize;
    let silent = Join::Own { factor: (lanes as f32).sqrt() };
    let early = if config.flag_or("use_early_comm", true)? { Join::Sum } else { silent };
    let old = config.flag_or("use_comm", true)?;
    let comm = [config.flag_or("use_attention_comm", old)?, config.flag_or("use_mlp_comm", old)?];
    let join = |layer: usize, comm: bool| match (layer < delay, comm) {
        _ if lanes == 1 => Join::Sum,
        (true, _) => early,
        (false, true) => Join::Delayed { layers: delay },
        (false, false) => silent,
    };
    Ok((0..layers).map(|layer| comm.map(|comm| join(layer, comm))).collect())
}

fn windows(config: &Config<'_>, layers: usize) -> Result<Vec<Option<usize>>> {
    let window = config.optional_size("sliding_window")?;
    let listed = config.layer_list("swa_layers", layers)?;
    let count = config.integer_or("sliding_window_n_layers", 0)?;
    let full = config.layer_list("unclamped_layers", layers)?;
    if window.is_none() && (count != 0 || !listed.is_empty()) {
        return config.unsupported("sliding_window", "windowed layers without a window");
    }
    let slides = |layer: usize| {
        let at = layer as i64;
        let counted = at < count || at >= layers as i64 + count && count < 0;
        listed.contains(&layer) || (counted && !full.contains(&layer))
    };
    Ok((0..layers).map(|layer| window.filter(|_| slides(layer))).collect())
}

fn rope(config: &Config<'_>, features: usize) -> Result<Rope> {
    let theta = config.positive_or("rope_theta", 10_000.0)?;
    let style = RopeStyle::Interleaved;
    let Some(s) = config.object("rope_scaling")? else {
        return Ok(Rope { theta, style, features, scaling: Scaling::None });
    };
    let scaling = Llama3Scaling {
        factor: s.positive("scaling_factor")?,
        low_freq_factor: s.positive("low_freq_factor")?,
        high_freq_factor: s.positive("high_freq_factor")?,
        original_max_positions: s.positive("original_max_position_embeddings")?,
    };
    s.finish(&[])?;
    Ok(Rope { theta, style, features, scaling: Scaling::Llama3(scaling.checked(&s)?) })
}

/// Lane tensors have the lane first.
fn tensors(spec: &Spec, ffn: usize) -> Vec<TensorSpec> {
    let (hidden, lanes) = (spec.hidden, spec.lanes);
    let mut list = Vec::new();
    let mut add = |role, name: String, shape: &[usize]| {
        list.push(TensorSpec::of(role, name, shape));
    };
    let norm = |per_lane: bool, name: String| -> (String, Vec<usize>) {
        if per_lane {
            (format!("{name}.scale"), vec![lanes, hidden])
        } else {
            (format!("{name}.weight"), vec![hidden])
        }
    };
    add(Role::Embedding, "model.tok_embeddings.weight".to_owned(), &[spec.vocab, hidden]);
    for (i, layer) in spec.layers.iter().enumerate() {
        let Mixer::Attention(attention) = &layer.mixer else { continue };
        let (q, kv) = (attention.query_width() / lanes, attention.kv_width() / lanes);
        let ffn = ffn / lanes;
        let name = |part: &str| format!("model.layers.{i}.{part}");
        let (scale, shape) = norm(spec.norm_per_lane, name("attention_norm"));
        add(Role::AttentionNorm(i), scale, &shape);
        add(Role::Q(i), name("attention.wq.weight"), &[lanes, q, hidden]);
        add(Role::K(i), name("attention.wk.weight"), &[lanes, kv, hidden]);
        add(Role::V(i), name("attention.wv.weight"), &[lanes, kv, hidden]);
        add(Role::O(i), name("attention.wo.weight"), &[lanes, hidden, q]);
        let (scale, shape) = norm(spec.norm_per_lane, name("ffn_norm"));
        add(Role::MlpNorm(i), scale, &shape);
        add(Role::Gate(i), name("feed_forward.w1.weight"), &[lanes, ffn, hidden]);
        add(Role::Up(i), name("feed_forward.w3.weight"), &[lanes, ffn, hidden]);
        add(Role::Down(i), name("feed_forward.w2.weight"), &[lanes, hidden, ffn]);
    }
    // Where the lanes are summed before the final norm, that norm is one for all.
    let shared = spec.head == HeadKind::SumThenNorm;
    let (scale, shape) = norm(spec.norm_per_lane && !shared, "model.norm".to_owned());
    add(Role::FinalNorm, scale, &shape);
    match spec.head {
        HeadKind::Replicate | HeadKind::SumThenNorm => {
            add(Role::Head, "lm_head.weight".to_owned(), &[spec.vocab, hidden]);
        }
        HeadKind::VocabParallel => {
            add(Role::Head, "lm_head.weight".to_owned(), &[lanes, spec.vocab / lanes, hidden]);
        }
        HeadKind::Concat => {
            add(Role::Head, "lm_head.linear.weight".to_owned(), &[spec.vocab, lanes * hidden]);
        }
    }
    list
}
