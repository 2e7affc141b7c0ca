//! DeepSeek-V4 ("DeepSeek-V4", 2026): attention over a window and compressed entries behind it, of
//! which an indexer chooses some where they are many; several residual streams
//! (hyper-connections); experts beside shared ones, those of the first layers by token. Tensors
//! have the names of the release. Layers that predict further tokens take no part.

use super::config::Config;
use super::deepseek_v3;
use super::quantization::Quantization;
use super::rope::{self, Factors, Head, Rope, RopeStyle, Scaling, YarnScaling};
use super::spec::{
    Compressed, Entries, Experts, Gate, Gated, Hyper, Index, LayerSpec, Mixer, Mlp, Role, Scoring,
    Spec, Stored, TensorSpec,
};
use super::transformer::{self, Tied};
use crate::error::Result;

/// Bases of the rotary embedding where the config is silent: of layers without entries, and of the
/// others.
const PLAIN_THETA: f64 = 10_000.0;
const ENTRIES_THETA: f64 = 160_000.0;

/// Positions of an entry where entries overlap and an indexer chooses some; elsewhere they do not.
const INDEXED: usize = 4;

/// Keys that change nothing at inference, or repeat what others say.
const HARMLESS: &[&str] = &["expert_dtype", "num_nextn_predict_layers"];

/// What transformers 5 calls the layers, by whether they have entries and choose of them.
const SLIDING: &str = "sliding_attention";
const SPARSE: &str = "compressed_sparse_attention";
const HEAVY: &str = "heavily_compressed_attention";

pub(super) fn spec(config: &Config<'_>) -> Result<Spec> {
    let count = config.layers()?;
    let (ratios, hashed) = (ratios(config, count)?, hashed(config, count)?);
    let (plain, experts) = (attention(config)?, experts(config)?);
    let [main, other] = ropes(config, plain.dim, plain.turned)?;
    let index = match ratios.contains(&INDEXED) {
        true => Some(Index {
            heads: config.size("index_n_heads")?,
            dim: config.size("index_head_dim")?,
            chosen: config.size("index_topk")?,
        }),
        false => {
            for key in ["index_n_heads", "index_head_dim", "index_topk"] {
                config.get(key);
            }
            None
        }
    };
    let layer = |(every, by_token): (usize, bool)| {
        let indexed = every == INDEXED;
        let index = index.filter(|_| indexed);
        let entries = (every > 0).then_some(Entries { every, overlap: indexed, index });
        let rope = if every > 0 { other } else { main };
        let mixer = Mixer::Compressed(Compressed { entries, rope, ..plain });
        let experts = Experts { by_token, correction: !by_token, ..experts };
        transformer::layer(mixer, Mlp::Experts(experts))
    };
    let layers = ratios.into_iter().zip(hashed).map(layer).collect();
    let mut spec = transformer::with_layers(config, layers, Tied::No)?;
    spec.hyper = Some(hyper(config)?);
    spec.quantization = spec.quantization.map(|scheme| match scheme {
        Quantization::Fp8(group) => Quantization::Fp8Fp4(group),
        other => other,
    });
    spec.tensors = tensors(&spec);
    spec.ignored = if spec.tied { vec!["head.weight".to_owned()] } else { Vec::new() };
    spec.ignored_below.push("mtp.".to_owned());
    config.finish(HARMLESS)?;
    Ok(spec)
}

/// Positions of an entry of each layer; 0 where there are none.
fn ratios(config: &Config<'_>, layers: usize) -> Result<Vec<usize>> {
    let told = config.counts("compress_ratios")?;
    let Some(types) = config.texts("layer_types")?.filter(|types| !types.is_empty()) else {
        config.need("compress_ratios")?;
        let mut ratios = told.unwrap_or_default();
        // Those of layers that predict further tokens stand behind.
        if ratios.len() < layers {
            let detail = format!("{} entries for {layers} layers", ratios.len());
            return config.unsupported("compress_ratios", detail);
        }
        ratios.truncate(layers);
        return Ok(ratios);
    };
    let rates = config.object("compress_rates")?;
    let rate = |kind: &str| match &rates {
        Some(rates) => rates.size(kind),
        None => config.unsupported("compress_rates", "nothing; wanted beside layer_types"),
    };
    if types.len() != layers {
        let detail = format!("{} entries for {layers} layers", types.len());
        return config.unsupported("layer_types", detail);
    }
    let ratio = |kind: &&str| match *kind {
        SLIDING => Ok(0),
        SPARSE => rate(SPARSE),
        HEAVY => rate(HEAVY),
        other => config.unsupported("layer_types", format!("{other:?}")),
    };
    let ratios = types.iter().map(ratio).collect::<Result<Vec<usize>>>()?;
    if told.is_some_and(|told| !told.starts_with(&ratios)) {
        return config.unsupported("compress_ratios", "not what layer_types says");
    }
    Ok(ratios)
}

/// Layers whose experts go by the token.
fn hashed(config: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    let first = config.integer_or("num_hash_layers", 0)?;
    let Some(types) = config.texts("mlp_layer_types")? else {
        return Ok((0..layers as i64).map(|layer| layer < first).collect());
    };
    if types.len() != layers {
        let detail = format!("{} entries for {layers} layers", types.len());
        return config.unsupported("mlp_layer_types", detail);
    }
    let kind = |name: &&str| match *name {
        "hash_moe" => Ok(true),
        "moe" => Ok(false),
        other => config.unsupported("mlp_layer_types", format!("{other:?}")),
    };
    let hashed = types.iter().map(kind).collect::<Result<Vec<bool>>>()?;
    let differs = |(layer, hashed): (i64, &bool)| (layer < first) != *hashed;
    if config.has("num_hash_layers") && (0..).zip(&hashed).any(differs) {
        return config.unsupported("num_hash_layers", "not what mlp_layer_types says");
    }
    Ok(hashed)
}

/// What all layers' attention has in common.
fn attention(config: &Config<'_>) -> Result<Compressed> {
    if config.size_or("num_key_value_heads", 1)? != 1 {
        return config.unsupported("num_key_value_heads", "only 1");
    }
    let turned = config.size("qk_rope_head_dim")?;
    let rope = Rope {
        theta: PLAIN_THETA,
        style: RopeStyle::Interleaved,
        features: turned,
        scaling: Scaling::None,
    };
    Ok(Compressed {
        heads: config.size("num_attention_heads")?,
        dim: config.size("head_dim")?,
        turned,
        query_rank: config.size("q_lora_rank")?,
        groups: config.size("o_groups")?,
        group_rank: config.size("o_lora_rank")?,
        window: config.size("sliding_window")?,
        entries: None,
        rope,
    })
}

/// How layers without entries turn, and the others. YaRN leaves the length of what turns alone.
fn ropes(config: &Config<'_>, dim: usize, turned: usize) -> Result<[Rope; 2]> {
    let head = Head { dim: turned, partial: false };
    let bases = ["rope_theta", "compress_rope_theta"].map(|key| config.optional_positive(key));
    let both = config.object("rope_parameters")?;
    let parts = match &both {
        Some(both) => [both.object("main")?, both.object("compress")?],
        None => [None, config.object("rope_scaling")?],
    };
    if let (Some(both), Some(_)) = (&both, config.get("rope_scaling")) {
        return both.unsupported("main", "beside rope_scaling");
    }
    for place in parts.iter().flatten().chain([config]) {
        let share = place.optional_positive("partial_rotary_factor")?;
        if share.is_some_and(|share| (dim as f64 * share) as usize != turned) {
            let detail = format!("{turned} of {dim} features turn by qk_rope_head_dim");
            return place.unsupported("partial_rotary_factor", detail);
        }
    }
    let [main, other] = bases;
    let one = |part: &Option<Config<'_>>, outer, default| {
        let (rope, factors) = rope::one(config, part.as_ref(), outer, default, head)?;
        let scaling = match rope.scaling {
            Scaling::Yarn(yarn) => {
                Scaling::Yarn(YarnScaling { attention: 1.0, scores: 1.0, ..yarn })
            }
            other => other,
        };
        if factors != Factors::default() {
            return config.unsupported("rope_scaling", "longrope; default or yarn");
        }
        Ok(Rope { style: RopeStyle::Interleaved, scaling, ..rope })
    };
    let ropes = [one(&parts[0], main?, PLAIN_THETA)?, one(&parts[1], other?, ENTRIES_THETA)?];
    both.map_or(Ok(()), |both| both.finish(&[]))?;
    Ok(ropes)
}

fn experts(config: &Config<'_>) -> Result<Experts> {
    for (key, known) in [("scoring_func", "sqrtsoftplus"), ("topk_method", "noaux_tc")] {
        if let Some(other) = config.text(key)?.filter(|said| *said != known) {
            return config.unsupported(key, format!("{other:?}; {known:?}"));
        }
    }
    let scoring = Scoring::SqrtSoftplus { normed: config.flag_or("norm_topk_prob", true)? };
    let keys = ["n_routed_experts", "moe_intermediate_size"];
    let experts = transformer::experts(config, keys, scoring)?;
    let gate = match config.optional_positive("swiglu_limit")? {
        Some(limit) => Gate::ClampedSilu { limit: limit as f32 },
        None => Gate::Silu,
    };
    let experts = Experts { each: Gated { gate, ..experts.each }, ..experts };
    let factor = config.positive("routed_scaling_factor")? as f32;
    Ok(Experts { factor, shared: deepseek_v3::shared(config, &experts)?, ..experts })
}

fn hyper(config: &Config<'_>) -> Result<Hyper> {
    let within = |key: &str, most: usize| match config.size(key)? {
        size if size <= most => Ok(size),
        size => config.unsupported(key, format!("{size}; {most} at most")),
    };
    Ok(Hyper {
        streams: within("hc_mult", kie_kernels::abi::STREAMS_MAX)?,
        rounds: within("hc_sinkhorn_iters", 1000)?,
        eps: config.positive("hc_eps")? as f32,
    })
}

/// The names of the release.
fn tensors(spec: &Spec) -> Vec<TensorSpec> {
    let (hidden, vocab) = (spec.hidden, spec.vocab);
    let one = |role, name: &str, shape: &[usize]| TensorSpec::of(role, name.to_owned(), shape);
    let mut list = vec![one(Role::Embedding, "embed.weight", &[vocab, hidden])];
    for (at, layer) in spec.layers.iter().enumerate() {
        let name = |part: &str| format!("layers.{at}.{part}");
        for (module, part) in [(0, "attn"), (1, "ffn")] {
            list.extend(of_streams(spec, 2 * at + module, &name(&format!("hc_{part}"))));
        }
        list.push(one(Role::AttentionNorm(at), &name("attn_norm.weight"), &[hidden]));
        list.push(one(Role::MlpNorm(at), &name("ffn_norm.weight"), &[hidden]));
        list.extend(of_attention(at, hidden, layer));
        if let Mlp::Experts(experts) = &layer.mlp {
            list.extend(of_experts(at, spec, experts));
        }
    }
    list.extend(of_streams(spec, 2 * spec.layers.len(), "hc_head"));
    list.push(one(Role::FinalNorm, "norm.weight", &[hidden]));
    if !spec.tied {
        list.push(one(Role::Head, "head.weight", &[vocab, hidden]));
    }
    list
}

/// What a module's streams are mixed by; the head joins none.
fn of_streams(spec: &Spec, module: usize, name: &str) -> [TensorSpec; 3] {
    let streams = spec.hyper.map_or(1, |hyper| hyper.streams);
    let (rows, scales) = match module < 2 * spec.layers.len() {
        true => (streams * (2 + streams), 3),
        false => (streams, 1),
    };
    let of =
        |role, part: &str, shape: &[usize]| TensorSpec::of(role, format!("{name}_{part}"), shape);
    [
        of(Role::HyperWeight(module), "fn", &[rows, streams * spec.hidden]),
        of(Role::HyperScale(module), "scale", &[scales]),
        of(Role::HyperBase(module), "base", &[rows]),
    ]
}

fn of_attention(at: usize, hidden: usize, layer: &LayerSpec) -> Vec<TensorSpec> {
    let Mixer::Compressed(c) = &layer.mixer else { return Vec::new() };
    let mut list = Vec::new();
    let mut add = |role, part: &str, shape: &[usize]| {
        list.push(TensorSpec::of(role, format!("layers.{at}.attn.{part}"), shape));
    };
    let (q, rank) = (c.query_width(), c.query_rank);
    add(Role::QDown(at), "wq_a.weight", &[rank, hidden]);
    add(Role::QDownNorm(at), "q_norm.weight", &[rank]);
    add(Role::Q(at), "wq_b.weight", &[q, rank]);
    add(Role::KvDown(at), "wkv.weight", &[c.dim, hidden]);
    add(Role::KvDownNorm(at), "kv_norm.weight", &[c.dim]);
    add(Role::GroupDown(at), "wo_a.weight", &[c.group_rows(), q / c.groups]);
    add(Role::O(at), "wo_b.weight", &[hidden, c.group_rows()]);
    add(Role::Sinks(at), "attn_sink", &[c.heads]);
    let Some(entries) = c.entries else { return list };
    let rows = entries.rows(c.dim);
    add(Role::EntryValues(at), "compressor.wkv.weight", &[rows, hidden]);
    add(Role::EntryScores(at), "compressor.wgate.weight", &[rows, hidden]);
    add(Role::EntryBias(at), "compressor.ape", &[entries.every, rows]);
    add(Role::EntryNorm(at), "compressor.norm.weight", &[c.dim]);
    let Some(index) = entries.index else { return list };
    let rows = entries.rows(index.dim);
    add(Role::IndexQuery(at), "indexer.wq_b.weight", &[index.heads * index.dim, rank]);
    add(Role::IndexWeights(at), "indexer.weights_proj.weight", &[index.heads, hidden]);
    add(Role::IndexValues(at), "indexer.compressor.wkv.weight", &[rows, hidden]);
    add(Role::IndexScores(at), "indexer.compressor.wgate.weight", &[rows, hidden]);
    add(Role::IndexBias(at), "indexer.compressor.ape", &[entries.every, rows]);
    add(Role::IndexNorm(at), "indexer.compressor.norm.weight", &[index.dim]);
    list
}

fn of_experts(at: usize, spec: &Spec, experts: &Experts) -> Vec<TensorSpec> {
    let (hidden, count) = (spec.hidden, experts.count);
    let name = |part: &str| format!("layers.{at}.ffn.{part}");
    let of = |role, part: &str, shape: &[usize]| TensorSpec::of(role, name(part), shape);
    let mut list = vec![of(Role::Router(at), "gate.weight", &[count, hidden])];
    if experts.correction {
        list.push(of(Role::RouterCorrection(at), "gate.bias", &[count]));
    }
    if experts.by_token {
        let table = of(Role::TokenExperts(at), "gate.tid2eid", &[spec.vocab, experts.chosen]);
        list.push(TensorSpec { stored: Stored::Integers { below: count }, ..table });
    }
    let shapes = |ffn: usize| [[ffn, hidden], [ffn, hidden], [hidden, ffn]];
    let roles = [Role::ExpertGate(at), Role::ExpertUp(at), Role::ExpertDown(at)];
    let parts = ["w1", "w3", "w2"];
    for ((role, part), shape) in roles.into_iter().zip(parts).zip(shapes(experts.each.ffn)) {
        let each = of(role, &format!("experts.{{e}}.{part}.weight"), &shape);
        list.push(TensorSpec { experts: count, ..each });
    }
    let Some(shared) = experts.shared else { return list };
    let roles = [Role::SharedGate(at), Role::SharedUp(at), Role::SharedDown(at)];
    for ((role, part), shape) in roles.into_iter().zip(parts).zip(shapes(shared.each.ffn)) {
        list.push(of(role, &format!("shared_experts.{part}.weight"), &shape));
    }
    list
}
