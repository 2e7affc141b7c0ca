//! What the Llama family has in common: one residual stream, Hugging Face's key and tensor names.
//! A family differs by [`Traits`] only.

use super::config::Config;
use super::quantization;
use super::rope::{self, Factors};
use super::spec::{
    Attention, Delta, Experts, Gate, Gated, HeadKind, Join, Latent, LayerSpec, Mixer, Mlp,
    NormSpan, Norms, Role, Scoring, Spec, TensorSpec,
};
use crate::error::Result;

/// How a family departs from Llama.
pub(super) struct Traits {
    /// Biases on q, k and v.
    pub qkv_bias: bool,
    /// A bias on attention's output.
    pub out_bias: bool,
    /// Sinks beside attention's scores.
    pub sinks: bool,
    /// A gate on attention's output.
    pub gated: bool,
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
    /// Layers that have a recurrent state in place of attention.
    pub deltas: fn(&Config<'_>, usize) -> Result<Vec<Option<Delta>>>,
    /// The layers' MLPs.
    pub mlps: fn(&Config<'_>, usize) -> Result<Vec<Mlp>>,
    /// What the matrices of experts are called.
    pub experts: ExpertNames,
    /// Epsilon of the norms where the config is silent.
    pub eps: f64,
    /// Keys of the family that change nothing.
    pub harmless: &'static [&'static str],
}

impl Traits {
    /// Llama itself.
    pub const LLAMA: Self = Self {
        qkv_bias: false,
        out_bias: false,
        sinks: false,
        gated: false,
        qk_norm: None,
        norms: Norms::Before,
        partial_rope: false,
        tied: Tied::No,
        windows: |_, layers| Ok(vec![None; layers]),
        deltas: |_, layers| Ok(vec![None; layers]),
        mlps: |config, layers| Ok(vec![Mlp::Gated(gated(config)?); layers]),
        experts: ExpertNames {
            router: "mlp.gate",
            each: [
                "mlp.experts.{e}.gate_proj.weight",
                "mlp.experts.{e}.up_proj.weight",
                "mlp.experts.{e}.down_proj.weight",
            ],
            shared: "mlp.shared_expert",
        },
        eps: 1e-6,
        harmless: &["is_llama_config"],
    };
}

/// What a family calls the matrices of a layer's experts.
pub(super) struct ExpertNames {
    /// The router's module.
    pub router: &'static str,
    /// Gate, up and down of expert `{e}`.
    pub each: [&'static str; 3],
    /// The module of the shared expert.
    pub shared: &'static str,
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
    let kv_heads = config.size_or("num_key_value_heads", heads)?;
    let attention = Attention {
        qk_norm: traits.qk_norm,
        qkv_bias: traits.qkv_bias,
        out_bias: traits.out_bias,
        sinks: traits.sinks,
        gated: traits.gated,
        ..Attention::plain(heads, kv_heads, head_dim, rope)
    };
    let layers = config.layers()?;
    let (windows, mlps) = ((traits.windows)(config, layers)?, (traits.mlps)(config, layers)?);
    let deltas = (traits.deltas)(config, layers)?;
    let layers = windows.into_iter().zip(mlps).zip(deltas).map(|((window, mlp), delta)| {
        let attention = Mixer::Attention(Attention { window, ..attention });
        let mixer = delta.map_or(attention, Mixer::Delta);
        LayerSpec { norms: traits.norms, ..layer(mixer, mlp) }
    });
    let tp_is_harmless = traits.harmless.contains(&"pretraining_tp");
    if !tp_is_harmless && config.size_or("pretraining_tp", 1)? != 1 {
        return config.unsupported("pretraining_tp", "only 1");
    }
    let mut spec = with_layers(config, layers.collect(), traits.tied)?;
    spec.rope_factors = factors;
    spec.norm_eps = config.positive_or("rms_norm_eps", traits.eps)? as f32;
    spec.tensors = tensors(&spec, &traits.experts);
    config.finish(traits.harmless)?;
    Ok(spec)
}

/// The MLP of a dense layer.
pub(super) fn gated(config: &Config<'_>) -> Result<Gated> {
    silu(config)?;
    Ok(Gated { ffn: config.size("intermediate_size")?, gate: Gate::Silu })
}

/// Experts with a softmax router: how many there are and how wide each is, by these keys.
pub(super) fn experts(
    config: &Config<'_>,
    [count_key, ffn_key]: [&str; 2],
    scoring: Scoring,
) -> Result<Experts> {
    silu(config)?;
    let (count, chosen) = (config.size(count_key)?, config.size("num_experts_per_tok")?);
    if chosen > count {
        return config.unsupported("num_experts_per_tok", format!("{chosen} of {count} experts"));
    }
    let each = Gated { ffn: config.size(ffn_key)?, gate: Gate::Silu };
    // Keeps the numbers of all experts inside 32 bits.
    if count.saturating_mul(each.ffn.max(config.size("hidden_size")?)) > 1 << 28 {
        return config.unsupported(count_key, format!("{count} experts of {}", each.ffn));
    }
    Ok(Experts {
        count,
        chosen,
        each,
        scoring,
        correction: false,
        by_token: false,
        groups: None,
        factor: 1.0,
        shared: None,
        bias: false,
    })
}

/// The same where `norm_topk_prob` says whether factors sum to 1. The number of experts has another
/// key where transformers 5 wrote it.
pub(super) fn softmax_experts(config: &Config<'_>, ffn_key: &str) -> Result<Mlp> {
    let scoring = match config.flag_or("norm_topk_prob", false)? {
        true => Scoring::SoftmaxOfChosen,
        false => Scoring::SoftmaxOfAll,
    };
    let renamed = config.has("num_local_experts") && !config.has("num_experts");
    let count_key = if renamed { "num_local_experts" } else { "num_experts" };
    Ok(Mlp::Experts(experts(config, [count_key, ffn_key], scoring)?))
}

/// Which layers are windowed, where `layer_types` says so.
pub(super) fn windowed(config: &Config<'_>, layers: usize) -> Result<Option<Vec<bool>>> {
    let Some(types) = config.texts("layer_types")? else { return Ok(None) };
    if types.len() != layers {
        let detail = format!("{} entries for {layers} layers", types.len());
        return config.unsupported("layer_types", detail);
    }
    let kind = |name: &&str| match *name {
        "sliding_attention" => Ok(true),
        "full_attention" => Ok(false),
        other => config.unsupported("layer_types", format!("{other:?}")),
    };
    types.iter().map(kind).collect::<Result<_>>().map(Some)
}

/// A layer of a model with one residual stream.
pub(super) fn layer(mixer: Mixer, mlp: Mlp) -> LayerSpec {
    LayerSpec { mixer, mixer_join: Join::Sum, mlp, mlp_join: Join::Sum, norms: Norms::Before }
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
        hyper: None,
        layers,
        mtp: None,
        predicts: false,
        head: HeadKind::Replicate,
        tied,
        norm_per_lane: false,
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
    spec.tensors = tensors(&spec, &Traits::LLAMA.experts);
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
pub(super) fn tensors(spec: &Spec, names: &ExpertNames) -> Vec<TensorSpec> {
    let (hidden, vocab) = (spec.hidden, spec.vocab);
    let one = |role, name: &str, shape: &[usize]| TensorSpec::of(role, name.to_owned(), shape);
    let mut list = vec![one(Role::Embedding, "model.embed_tokens.weight", &[vocab, hidden])];
    for (i, layer) in spec.layers.iter().enumerate() {
        list.extend(of_layer(i, layer, hidden, names));
    }
    list.push(one(Role::FinalNorm, "model.norm.weight", &[hidden]));
    if !spec.tied {
        list.push(one(Role::Head, "lm_head.weight", &[vocab, hidden]));
    }
    list
}

/// Those of a layer.
pub(super) fn of_layer(
    i: usize,
    layer: &LayerSpec,
    hidden: usize,
    names: &ExpertNames,
) -> Vec<TensorSpec> {
    let mut list = Vec::new();
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
        list.push(TensorSpec::of(*role, name(&format!("{norm}.weight")), &[hidden]));
    }
    match &layer.mixer {
        Mixer::Attention(attention) => list.extend(of_attention(i, hidden, attention)),
        Mixer::Delta(delta) => list.extend(of_delta(i, hidden, delta)),
        Mixer::Latent(latent) => list.extend(of_latent(i, hidden, latent)),
        // Its family has names of its own for all tensors.
        Mixer::Compressed(_) => {}
    }
    let mut add = |role, name: String, shape: &[usize]| {
        list.push(TensorSpec::of(role, name, shape));
    };
    match &layer.mlp {
        Mlp::Gated(Gated { ffn, .. }) => {
            add(Role::Gate(i), name("mlp.gate_proj.weight"), &[*ffn, hidden]);
            add(Role::Up(i), name("mlp.up_proj.weight"), &[*ffn, hidden]);
            add(Role::Down(i), name("mlp.down_proj.weight"), &[hidden, *ffn]);
        }
        Mlp::Experts(experts) => list.extend(of_experts(i, hidden, experts, names)),
    }
    list
}

/// Those of softmax attention.
fn of_attention(i: usize, hidden: usize, attention: &Attention) -> Vec<TensorSpec> {
    let (q, kv) = (attention.query_width(), attention.kv_width());
    let mut list = Vec::new();
    let mut add = |role, name: String, shape: &[usize]| {
        list.push(TensorSpec::of(role, name, shape));
    };
    let name = |part: &str| format!("model.layers.{i}.{part}");
    add(Role::Q(i), name("self_attn.q_proj.weight"), &[attention.query_rows(), hidden]);
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
    if attention.out_bias {
        add(Role::OBias(i), name("self_attn.o_proj.bias"), &[hidden]);
    }
    if attention.sinks {
        add(Role::Sinks(i), name("self_attn.sinks"), &[attention.heads]);
    }
    list
}

/// Those of latent attention, with the names of DeepSeek-V3.
fn of_latent(i: usize, hidden: usize, latent: &Latent) -> Vec<TensorSpec> {
    let mut list = Vec::new();
    let mut add = |role, part: &str, shape: &[usize]| {
        let name = format!("model.layers.{i}.self_attn.{part}.weight");
        list.push(TensorSpec::of(role, name, shape));
    };
    let q = latent.query_width();
    match latent.query_rank {
        Some(rank) => {
            add(Role::QDown(i), "q_a_proj", &[rank, hidden]);
            add(Role::QDownNorm(i), "q_a_layernorm", &[rank]);
            add(Role::Q(i), "q_b_proj", &[q, rank]);
        }
        None => add(Role::Q(i), "q_proj", &[q, hidden]),
    }
    add(Role::KvDown(i), "kv_a_proj_with_mqa", &[latent.key_width(), hidden]);
    add(Role::KvDownNorm(i), "kv_a_layernorm", &[latent.rank]);
    add(Role::KvUp(i), "kv_b_proj", &[latent.up_width(), latent.rank]);
    add(Role::O(i), "o_proj", &[hidden, latent.heads * latent.value]);
    list
}

/// Those of a gated delta rule.
fn of_delta(i: usize, hidden: usize, delta: &Delta) -> Vec<TensorSpec> {
    let (values, width) = (delta.value_heads, delta.value_width());
    let parts: [(Role, &str, &[usize]); 7] = [
        (Role::DeltaIn(i), "in_proj_qkvz.weight", &[delta.channels() + width, hidden]),
        (Role::DeltaGates(i), "in_proj_ba.weight", &[2 * values, hidden]),
        (Role::DeltaConv(i), "conv1d.weight", &[delta.channels(), 1, delta.taps]),
        (Role::DeltaDecay(i), "A_log", &[values]),
        (Role::DeltaBias(i), "dt_bias", &[values]),
        (Role::DeltaNorm(i), "norm.weight", &[delta.value_dim]),
        (Role::O(i), "out_proj.weight", &[hidden, width]),
    ];
    let one = |(role, part, shape)| {
        TensorSpec::of(role, format!("model.layers.{i}.linear_attn.{part}"), shape)
    };
    parts.into_iter().map(one).collect()
}

/// The router of a layer and its experts, a tensor each; then the shared one.
fn of_experts(
    layer: usize,
    hidden: usize,
    experts: &Experts,
    names: &ExpertNames,
) -> Vec<TensorSpec> {
    let (count, ffn) = (experts.count, experts.each.ffn);
    let name = |part: &str| format!("model.layers.{layer}.{part}");
    let router = name(&format!("{}.weight", names.router));
    let mut list = vec![TensorSpec::of(Role::Router(layer), router, &[count, hidden])];
    let roles = [Role::ExpertGate(layer), Role::ExpertUp(layer), Role::ExpertDown(layer)];
    let shapes = [[ffn, hidden], [ffn, hidden], [hidden, ffn]];
    for ((role, each), shape) in roles.into_iter().zip(names.each).zip(shapes) {
        list.push(TensorSpec { experts: count, ..TensorSpec::of(role, name(each), &shape) });
    }
    if experts.bias {
        let router = name(&format!("{}.bias", names.router));
        list.push(TensorSpec::of(Role::RouterBias(layer), router, &[count]));
        let roles =
            [Role::ExpertGateBias(layer), Role::ExpertUpBias(layer), Role::ExpertDownBias(layer)];
        for ((role, each), rows) in roles.into_iter().zip(names.each).zip([ffn, ffn, hidden]) {
            list.push(TensorSpec::of(role, name(&format!("{each}_bias")), &[count, rows]));
        }
    }
    if experts.correction {
        let correction = name(&format!("{}.e_score_correction_bias", names.router));
        list.push(TensorSpec::of(Role::RouterCorrection(layer), correction, &[count]));
    }
    if let Some(shared) = experts.shared {
        let ffn = shared.each.ffn;
        for (role, part, shape) in [
            (Role::SharedGate(layer), "gate_proj", [ffn, hidden]),
            (Role::SharedUp(layer), "up_proj", [ffn, hidden]),
            (Role::SharedDown(layer), "down_proj", [hidden, ffn]),
        ] {
            let part = name(&format!("{}.{part}.weight", names.shared));
            list.push(TensorSpec::of(role, part, &shape));
        }
        if shared.scaled {
            let scale = name(&format!("{}_gate.weight", names.shared));
            list.push(TensorSpec::of(Role::SharedScale(layer), scale, &[1, hidden]));
        }
    }
    list
}
