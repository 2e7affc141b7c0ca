//! Models whose kernels every platform's compiler is tried on: the sizes of real checkpoints, for a
//! real machine.

use super::lower::compressed::{Compressed, CompressedTensors, Entries, EntryTensors, Index};
use super::lower::delta::Delta;
use super::lower::experts::{Experts, SharedExpert};
use super::lower::hyper::{Hyper, HyperTensors};
use super::lower::latent::Latent;
use super::lower::layout::Kind;
use super::lower::matrix::Matrix;
use super::lower::model::{Class, Coded, Extras, Layer, Model, Mtp, Norm};
use super::lower::partition::Partition;
use super::lower::tiling::StoredBits;
use super::prefill::Plan;
use super::source;
use crate::abi::{ExpertGroups, Gate, HeadMode, NormSpan, Scoring, NONE};
use crate::machine::{MachineInfo, Platform, Source};
use crate::meter::Mode;

/// `2b`: eight lanes of a laneformer; `lane`: one of them; `1b`, `8b`: dense models.
pub fn model(name: &str) -> Model {
    let encodings = [
        ("-fp8", StoredBits::F8, [128, 128]),
        ("-int4", StoredBits::I4, [1, 32]),
        ("-mxfp4", StoredBits::E2m1, [1, 32]),
        ("-awq", StoredBits::I4Zeros, [1, 128]),
        ("-int8", StoredBits::I8, [1, 4096]),
        ("-q8", StoredBits::I8Half, [1, 32]),
        ("-q4", StoredBits::I4Half, [1, 32]),
    ];
    for (suffix, bits, group) in encodings {
        if let Some(name) = name.strip_suffix(suffix) {
            return coded(model(name), |_| Some(Coded { bits, group }));
        }
    }
    let dense = name == "1b" || name == "8b";
    let of = |lane, small, large| match name {
        "8b" => large,
        "1b" => small,
        _ => lane,
    };
    let norm = Norm { tensor: 0, rows: 1 };
    let class = Class {
        heads: of(4, 32, 32),
        kv_heads: of(2, 8, 8),
        heads_all: [of(4, 32, 32), of(2, 8, 8)],
        head_dim: of(96, 64, 128),
        still: 0,
        gated: false,
        delta: None,
        ffn: of(1536, 8192, 14_336),
        ffn_all: of(1536, 8192, 14_336),
        head_norm: None,
        bias: false,
        output_bias: false,
        sinks: false,
        rope: 0,
        latent: None,
        compressed: None,
        experts: None,
        predicts: false,
    };
    let lanes = if name == "2b" { 8 } else { 1 };
    let layer = if lanes > 1 { delayed() } else { in_shards(1) };
    Model {
        parts: 1,
        ranks: 1,
        sliced: false,
        vocab_all: if dense { 128_256 } else { 4000 * lanes },
        lanes,
        hidden: of(3072, 2048, 4096),
        vocab: if dense { 128_256 } else { 4000 },
        head_mode: HeadMode::PerLane,
        interleaved: false,
        eps: 1e-5,
        pools: 2,
        classes: vec![class],
        layer: vec![layer; of(15, 16, 32) as usize],
        coded: Vec::new(),
        coded_head: None,
        mtp: None,
        embed: 0,
        head: 0,
        final_norm: norm,
        residual_shift: 0,
        hyper: None,
    }
}

/// `8b` in shards on so many machines.
pub fn sliced(ranks: u32) -> Model {
    let share = |c: &mut Class| {
        (c.heads, c.kv_heads, c.ffn) = (c.heads / ranks, c.kv_heads / ranks, c.ffn / ranks);
    };
    let whole = with_class(model("8b"), share);
    let (layer, vocab) = (vec![in_shards(ranks); whole.layer.len()], whole.vocab_all / ranks);
    Model { ranks, sliced: true, vocab, layer, ..whole }
}

/// `gpt-oss-120b`, `qwen3-30b-fp8`: with experts, on so many machines.
pub fn with_experts(name: &str, ranks: u32) -> Model {
    let dense = model("8b");
    let is_gpt = name == "gpt-oss-120b";
    let of = |gpt, qwen| if is_gpt { gpt } else { qwen };
    let scoring = Scoring::SoftmaxOfChosen;
    let gate = match is_gpt {
        true => Gate::ClampedSwiglu { alpha: 1.702, limit: 7.0 },
        false => Gate::Silu,
    };
    let (count, chosen, bias) = (128, of(4, 8), is_gpt);
    let experts = Experts {
        count,
        chosen,
        scoring,
        correction: false,
        by_token: false,
        groups: None,
        factor: 1.0,
        gate,
        router_bias: bias,
        bias,
        shared: None,
    };
    let (heads, kv_heads, ffn) = (of(64, 32), of(8, 4), of(2880, 768));
    let sizes = |c: &mut Class| {
        *c = Class {
            heads: heads / ranks,
            kv_heads: (kv_heads / ranks).max(1),
            heads_all: [heads, kv_heads],
            head_dim: of(64, 128),
            still: 0,
            gated: false,
            delta: None,
            ffn: ffn.div_ceil(ranks).next_multiple_of(32),
            ffn_all: ffn,
            head_norm: (!is_gpt).then_some(NormSpan::Head),
            bias,
            output_bias: bias,
            sinks: bias,
            rope: 0,
            latent: None,
            compressed: None,
            experts: Some(experts),
            predicts: false,
        };
    };
    let (bits, group) = match is_gpt {
        true => (StoredBits::E2m1, [1, 32]),
        false => (StoredBits::F8, [128, 128]),
    };
    let layer = |at: u32| Layer { window: of((at + 1) % 2 * 128, 0), ..in_shards(ranks) };
    let vocab = of(201_088, 151_936);
    let model = Model {
        ranks,
        sliced: ranks > 1,
        hidden: of(2880, 2048),
        vocab: vocab / ranks,
        vocab_all: vocab,
        layer: (0..of(36, 48)).map(layer).collect(),
        residual_shift: of(4, 0),
        ..with_class(dense, sizes)
    };
    coded(model, |m| (!is_gpt || m.is_experts()).then_some(Coded { bits, group }))
}

/// `kimi-k2` (experts of INT4), `deepseek-v3` (FP8): latents and shared experts behind dense first
/// layers, on so many machines.
pub fn with_latents(name: &str, ranks: u32) -> Model {
    let is_kimi = name == "kimi-k2";
    let of = |kimi, deepseek| if is_kimi { kimi } else { deepseek };
    let share = |all: u32| all.div_ceil(ranks);
    let (heads, ffn, vocab) = (of(64, 128), 2048, of(163_840, 129_280));
    let (plain, turned) = (128, 64);
    let scale = 1.0 / 192f32.sqrt();
    let latent = Latent { query_rank: 1536, rank: 512, plain, turned, eps: 1e-6, scale };
    let groups = (!is_kimi).then_some(ExpertGroups { count: 8, chosen: 4 });
    let experts = Experts {
        count: of(384, 256),
        chosen: 8,
        scoring: Scoring::Sigmoid { normed: true },
        correction: true,
        by_token: false,
        groups,
        factor: if is_kimi { 2.827 } else { 2.5 },
        gate: Gate::Silu,
        router_bias: false,
        bias: false,
        shared: Some(SharedExpert { ffn: share(ffn), ffn_all: ffn, scaled: false }),
    };
    let base = with_experts("qwen3-30b-fp8", 1);
    let dense = Class {
        heads: share(heads),
        kv_heads: 1,
        heads_all: [heads, 1],
        head_dim: 128,
        ffn: share(18_432),
        ffn_all: 18_432,
        head_norm: None,
        latent: Some(latent),
        experts: None,
        ..base.classes[0]
    };
    let routed = Class { ffn: share(ffn), ffn_all: ffn, experts: Some(experts), ..dense };
    let layer = |at: u32| Layer { class: usize::from(at >= of(1, 3)), ..in_shards(ranks) };
    let (bits, group) = match is_kimi {
        true => (StoredBits::I4, [1, 32]),
        false => (StoredBits::F8, [128, 128]),
    };
    let model = Model {
        ranks,
        sliced: ranks > 1,
        hidden: 7168,
        interleaved: true,
        vocab: share(vocab),
        vocab_all: vocab,
        classes: vec![dense, routed],
        layer: (0..61).map(layer).collect(),
        ..base
    };
    let mut model = coded(model, |m| (!is_kimi || m.is_experts()).then_some(Coded { bits, group }));
    if is_kimi {
        model.coded[0] = Default::default();
    }
    model
}

/// The same with such codes; the router and the head have none.
pub fn coded(model: Model, of: impl Fn(Matrix) -> Option<Coded>) -> Model {
    let of = |m| of(m).filter(|_| !matches!(m, Matrix::Router | Matrix::Gates)).map(Ok);
    let coded = model.classes.iter().map(|_| Matrix::ALL.map(of)).collect();
    Model { coded, ..model }
}

/// `qwen3-coder-next-fp8`: three layers of four with a gated delta rule, the fourth with gated
/// attention, experts in all; on so many machines.
pub fn coder_next(ranks: u32) -> Model {
    let experts = with_experts("qwen3-30b-fp8", ranks);
    let one = experts.classes[0];
    let ffn_all = 512;
    let shared = Some(SharedExpert { ffn: ffn_all / ranks, ffn_all, scaled: true });
    let recurrent = Class {
        heads: 32 / ranks,
        kv_heads: 16 / ranks,
        heads_all: [32, 16],
        head_dim: 128,
        ffn: ffn_all / ranks,
        ffn_all,
        head_norm: None,
        delta: Some(Delta { key_dim: 128, taps: 4 }),
        experts: one.experts.map(|e| Experts { count: 512, chosen: 10, shared, ..e }),
        ..one
    };
    let attention = Class {
        heads: 16 / ranks,
        kv_heads: (2 / ranks).max(1),
        heads_all: [16, 2],
        head_dim: 256,
        still: 192,
        gated: true,
        delta: None,
        head_norm: Some(NormSpan::Head),
        ..recurrent
    };
    let layer = |at: u32| {
        let class = usize::from(at % 4 == 3);
        Layer { class, pool: [1 - class as u32, 0], ..experts.layer[0].clone() }
    };
    let layer = (0..48).map(layer).collect();
    let model = Model { classes: vec![recurrent, attention], layer, ..experts };
    coded(model, |_| Some(Coded { bits: StoredBits::F8, group: [128, 128] }))
}

/// Its layer that predicts further tokens.
pub fn coder_next_mtp(ranks: u32) -> Model {
    let model = coder_next(ranks);
    let class = Class { predicts: true, ..model.classes[1] };
    let layer = Layer { class: 0, ..model.layer[3].clone() };
    let mtp = Some(Mtp { norms: [model.final_norm; 3] });
    let model = Model { classes: vec![class], layer: vec![layer], mtp, ..model };
    coded(model, |_| Some(Coded { bits: StoredBits::F8, group: [128, 128] }))
}

/// `deepseek-v4-flash`: four residual streams, attention over a window and entries of every 4
/// positions, which an indexer chooses among, or of every 128; experts of FP4, those of the first
/// layers by token. On so many machines.
pub fn with_entries(ranks: u32) -> Model {
    let base = with_latents("deepseek-v3", ranks);
    let share = |all: u32| all.div_ceil(ranks);
    let (heads, ffn, vocab) = (64, 2048, 129_280);
    let experts = Experts {
        chosen: 6,
        scoring: Scoring::SqrtSoftplus { normed: true },
        groups: None,
        factor: 1.5,
        gate: Gate::ClampedSilu { limit: 10.0 },
        ..base.classes[1].experts.expect("it has experts")
    };
    let by_token = Experts { correction: false, by_token: true, ..experts };
    let index = Some(Index { heads: 64, dim: 128, chosen: 512, pool: 1 });
    let sparse = Entries { every: 4, sets: 2, pools: [4, 0], index };
    let heavy = Entries { every: 128, sets: 1, pools: [5, 2], index: None };
    let class = |entries: Option<Entries>, experts: Experts| Class {
        heads: share(heads),
        heads_all: [heads, 1],
        head_dim: 512,
        ffn: share(ffn),
        ffn_all: ffn,
        sinks: true,
        latent: None,
        compressed: Some(Compressed {
            query_rank: 1024,
            turned: 64,
            groups: share(8),
            group_rank: 1024,
            entries,
        }),
        experts: Some(experts),
        ..base.classes[1]
    };
    let classes = vec![
        class(None, by_token),
        class(Some(sparse), by_token),
        class(Some(sparse), experts),
        class(Some(heavy), experts),
    ];
    let head = HyperTensors { weight: 0, scale: 0, base: 0 };
    let model = Model {
        hidden: 4096,
        eps: 1e-6,
        pools: 6,
        vocab: share(vocab),
        vocab_all: vocab,
        classes,
        layer: (0..43).map(|at| with_entries_at(at, &base.layer[0])).collect(),
        hyper: Some(Hyper { streams: 4, eps: 1e-6, rounds: 20, head }),
        ..base
    };
    coded(model, |m| match m {
        m if m.is_experts() => Some(Coded { bits: StoredBits::E2m1, group: [1, 32] }),
        // Beside BF16.
        Matrix::LatentDown => None,
        _ => Some(Coded { bits: StoredBits::F8, group: [128, 128] }),
    })
}

/// One of its layers.
fn with_entries_at(at: u32, base: &Layer) -> Layer {
    let made = EntryTensors { weights: [0; 2], bias: 0, norm: 0 };
    let class = [0, 0, 1].get(at as usize).copied().unwrap_or(2 + at as usize % 2);
    let indexed = class == 1 || class == 2;
    let compressed = CompressedTensors {
        down: [0; 2],
        norms: [0; 2],
        query: 0,
        group: 0,
        entries: [(class > 0).then_some(made), indexed.then_some(made)],
        index: indexed.then_some([0; 2]),
        // Numbers of a layer among those of its kind.
        places: [at.saturating_sub(2) / 2; 3],
    };
    Layer {
        class,
        window: 128,
        pool: [3, at],
        compressed: Some(compressed),
        hyper: [HyperTensors { weight: 0, scale: 0, base: 0 }; 2],
        ..base.clone()
    }
}

/// The same with another only class.
pub fn with_class(model: Model, change: impl Fn(&mut Class)) -> Model {
    let mut model = model;
    model.classes.iter_mut().for_each(change);
    model
}

/// A layer that sees everything, of a model without lanes, in shards on so many machines.
fn in_shards(ranks: u32) -> Layer {
    let sliced = ranks > 1;
    let delay = [if sliced { 0 } else { -1 }; 2];
    Layer { window: 0, pool: [0, 0], delay, shares: [sliced; 2], ..delayed() }
}

/// A layer that sees a window, and other lanes' outputs of two layers before.
pub fn delayed() -> Layer {
    Layer {
        class: 0,
        qkv: [0; 3],
        biases: [NONE; 3],
        head_norms: [NONE; 2],
        outputs: [0; 2],
        gate_up: [0; 2],
        latent: None,
        compressed: None,
        hyper: [HyperTensors::NONE; 2],
        extras: Extras::default(),
        norms: [Norm { tensor: 0, rows: 1 }; 2],
        window: 512,
        pool: [1, 0],
        own: [1.0; 2],
        delay: [2; 2],
        shares: [true; 2],
    }
}

/// A H200.
pub fn nvidia() -> MachineInfo {
    MachineInfo {
        name: "cuda:0".into(),
        model: "H200".into(),
        arch: "sm_90a".into(),
        multiprocessors: 132,
        chiplets: 1,
        shared_bytes: 232_448,
        memory_bytes: 141 << 30,
        free_bytes: 140 << 30,
    }
}

/// A MI300X.
pub fn amd() -> MachineInfo {
    MachineInfo {
        name: "hip:0".into(),
        model: "MI300X".into(),
        arch: "gfx942".into(),
        multiprocessors: 304,
        chiplets: 8,
        shared_bytes: 65_520,
        memory_bytes: 192 << 30,
        free_bytes: 190 << 30,
    }
}

/// The decode kernel of a model on a machine, and its partition.
pub fn decode(
    model: &Model,
    machine: &MachineInfo,
    platform: Platform,
    kind: Kind,
) -> (Source, Partition) {
    let partition = Partition::new(model, machine, 33_280).expect("a partition");
    let source = source::decode(platform, (model, &partition), kind, Mode::Full);
    (source.expect("it fits"), partition)
}

/// How the prefill kernel runs a model on a H200, where it fits.
pub fn prefill_plan(model: &Model) -> Option<Plan> {
    prefill_plan_on(model, &nvidia())
}

/// The same on another machine.
pub fn prefill_plan_on(model: &Model, machine: &MachineInfo) -> Option<Plan> {
    let partition = Partition::new(model, machine, 33_280).expect("a partition");
    let platform = if machine.arch.starts_with("gfx") { Platform::Hip } else { Platform::Cuda };
    Plan::new(model, &partition, (platform, machine), (33_280, 512), false)
}

/// Its kernels, for many positions and for few.
pub fn prefill(model: &Model) -> Vec<Source> {
    prefill_on(model, &nvidia())
}

/// The same on another machine.
pub fn prefill_on(model: &Model, machine: &MachineInfo) -> Vec<Source> {
    let partition = Partition::new(model, machine, 33_280).expect("a partition");
    let sources = |plan: Plan| plan.sources(model, &partition).expect("it fits");
    prefill_plan_on(model, machine).map_or_else(Vec::new, sources)
}
