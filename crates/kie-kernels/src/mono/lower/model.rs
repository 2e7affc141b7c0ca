//! A program read as what the monokernel runs: layers of a few classes. Layers of a class have the
//! same phases and sizes and differ in numbers alone (windows, delays, where their tensors and
//! pages are). What is no such program is refused here, with the step, before a byte is allocated.

use std::ops::Range;

use super::delta::{self, Delta};
use super::matrix::Matrix;
use super::tiling::StoredBits;
use crate::abi::{
    Attend, Codes, DeltaHeads, DeltaIn, DeltaRule, Dtype, Encoding, ExpertGroups, ExpertsDown,
    ExpertsGateUp, Gate, GateUp, HeadMode, Heads, Join, LatentAttend, LatentDown, LatentHeads,
    LatentQuery, LatentUp, NormSpan, PageGroup, Program, Project, Qkv, Rotary, Route, Scoring,
    StateAt, StateKind, StepKind, Tensor, NONE, PAGE,
};
use crate::error::{Error, Result};
use crate::shard::{dealt, heads_of, indivisible, normed_over_all_heads, state_of};

/// Sizes of one lane, and where its tensors are.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// Halves of a number of a vector: 1, or 2 (ops/parts.h). Keys and values are halves, or
    /// floats.
    pub parts: u32,
    /// Machines that run it together, each the same number of lanes.
    pub ranks: u32,
    /// Lanes of one machine.
    pub lanes: u32,
    /// Lanes are slices of matrices that the program has whole (tensor parallelism), not matrices
    /// of their own.
    pub sliced: bool,
    /// Ids of the whole vocabulary.
    pub vocab_all: u32,
    /// Width of a residual stream.
    pub hidden: u32,
    /// Rows of one head matrix: of the vocabulary, or of a lane's slice of it.
    pub vocab: u32,
    /// How the head combines lanes.
    pub head_mode: HeadMode,
    /// Rotary pairs are neighbours in the checkpoint.
    pub interleaved: bool,
    /// Epsilon of the norms.
    pub eps: f32,
    /// Pools of pages, at most [`MOST_POOLS`].
    pub pools: u32,
    /// What layers are alike in.
    pub classes: Vec<Class>,
    /// What differs from layer to layer.
    pub layer: Vec<Layer>,
    /// How the matrices of each class are stored.
    pub coded: Vec<[Stored; Matrix::COUNT]>,
    /// How the head is.
    pub coded_head: Stored,
    /// Tensor of the embedding table.
    pub embed: u32,
    /// Tensor of the head.
    pub head: u32,
    /// The final norm's scale.
    pub final_norm: Norm,
    /// The residual is carried as 2^-shift of what it is.
    pub residual_shift: u32,
}

/// How a matrix is stored, where its codes could stay as they are in all layers of a class; or why
/// they could not. None: plain numbers.
pub type Stored = Option<std::result::Result<Coded, String>>;

/// Most chosen experts: each is a lane of a warp.
pub const MOST_CHOSEN: u32 = 16;

/// Most experts of a layer: a warp holds all logits in registers.
pub const MOST_EXPERTS: u32 = 512;

/// Most groups of experts: each is a lane of a warp.
pub const MOST_GROUPS: u32 = 32;

/// What the residual of models with a clamped gate is divided by, as a power of two: published
/// traces of GPT-OSS-120B have 92,580, beyond float16, and inputs of norms up to that times their
/// scales.
const CLAMPED_SHIFT: u32 = 4;

/// Most pools of pages: what differs in size or is windowed has one of its own.
pub const MOST_POOLS: usize = 4;

/// Most classes of a model: each is a copy of the layer's code.
pub const MOST_CLASSES: usize = 4;

/// What the layers of a class are alike in: all that is a constant while one of them runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Class {
    /// Query heads; of a delta rule heads of v.
    pub heads: u32,
    /// Key/value heads; of a delta rule heads of q and k.
    pub kv_heads: u32,
    /// The same two of the program, where these are a machine's share.
    pub heads_all: [u32; 2],
    /// Features of a head; of a delta rule those of a head of v.
    pub head_dim: u32,
    /// Features of a head of q and k that do not turn, the last ones.
    pub still: u32,
    /// Attention's output is gated.
    pub gated: bool,
    /// A delta rule in place of attention.
    pub delta: Option<Delta>,
    /// MLP width.
    pub ffn: u32,
    /// The same of the program.
    pub ffn_all: u32,
    /// What norms of q and k are over, if they have any.
    pub head_norm: Option<NormSpan>,
    /// q, k and v have biases.
    pub bias: bool,
    /// Attention's output has a bias.
    pub output_bias: bool,
    /// Heads have sinks.
    pub sinks: bool,
    /// Tensor of the rotary table.
    pub rope: u32,
    /// Attention over latents: heads have values of `head_dim` and one kv head.
    pub latent: Option<Latent>,
    /// The mlp is some of several experts, of `ffn` each.
    pub experts: Option<Experts>,
}

/// Latents of a layer's attention, and what heads make of them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Latent {
    /// Numbers of the latent of queries.
    pub query_rank: u32,
    /// Numbers of the latent of keys and values.
    pub rank: u32,
    /// Features of a head's query and key that do not turn.
    pub plain: u32,
    /// Those behind them, which do.
    pub turned: u32,
    /// Epsilon of the latents' norms.
    pub eps: f32,
    /// On scores.
    pub scale: f32,
}

impl Latent {
    /// Numbers that are kept of a position, padded: whole 16 bytes of halves.
    pub const fn kept(&self) -> u32 {
        (self.rank + self.turned).next_multiple_of(8)
    }
}

/// Experts of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Experts {
    /// How many.
    pub count: u32,
    /// Those of a column.
    pub chosen: u32,
    /// What factors are made of.
    pub scoring: Scoring,
    /// Scores have corrections for the choice.
    pub correction: bool,
    /// The choice is among the experts of some groups.
    pub groups: Option<ExpertGroups>,
    /// On every factor.
    pub factor: f32,
    /// What is made of gate and up.
    pub gate: Gate,
    /// The router has a bias.
    pub router_bias: bool,
    /// Gate, up and down have biases.
    pub bias: bool,
    /// The expert that all columns go to.
    pub shared: Option<SharedExpert>,
}

/// An expert beside the chosen ones.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SharedExpert {
    /// MLP width.
    pub ffn: u32,
    /// The same of the program.
    pub ffn_all: u32,
    /// Its output is multiplied by the sigmoid of one more of the router's logits.
    pub scaled: bool,
}

impl Experts {
    /// Rows of the router.
    pub fn logits(&self) -> u32 {
        self.count + u32::from(self.shared.is_some_and(|shared| shared.scaled))
    }
}

impl Class {
    /// Query heads of a kv head.
    pub const fn group(&self) -> u32 {
        self.heads / self.kv_heads
    }

    /// Rows of the products with the layer's input, where a head is so wide.
    pub const fn input_rows(&self, head_dim: u32) -> u32 {
        match &self.delta {
            Some(delta) => self.kv_heads * delta.rows(self.group(), head_dim),
            None if self.gated => 2 * (self.heads + self.kv_heads) * head_dim,
            None => (self.heads + 2 * self.kv_heads) * head_dim,
        }
    }

    /// Heads whose norms of q, and of k, have weights of their own.
    pub const fn normed_heads(&self) -> [u32; 2] {
        match self.head_norm {
            None => [0, 0],
            Some(NormSpan::Head) => [1, 1],
            Some(NormSpan::AllHeads) => [self.heads, self.kv_heads],
        }
    }

    /// Words of the weights of these norms on a device, where a head is so wide.
    pub const fn head_norm_words(&self, head_dim: u32) -> u32 {
        let [query, kv] = self.normed_heads();
        (query + kv) * head_dim / 2
    }
}

/// A matrix whose stored codes may stay as they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Coded {
    /// Its codes in the stream.
    pub bits: StoredBits,
    /// Rows and columns that share a scale.
    pub group: [u32; 2],
}

impl Coded {
    /// Of an encoding; none: plain numbers, which become halves.
    fn of(stored: &Encoding) -> Stored {
        let group = match stored.codes.row().group {
            0 => stored.group,
            among => [1, among],
        };
        let bits = match (stored.codes, stored.scale, stored.zeros) {
            _ if !stored.is_quantised() => return None,
            (Codes::E4m3, _, false) => StoredBits::F8,
            (Codes::I8, _, false) => StoredBits::I8,
            (Codes::Q8x0, ..) => StoredBits::I8Half,
            (Codes::Q4x0, ..) => StoredBits::I4Half,
            (Codes::I4, Dtype::Bf16, false) if group[0] == 1 => StoredBits::I4,
            (Codes::I4, Dtype::F16, false) if group[0] == 1 => StoredBits::I4Half,
            (Codes::I4, Dtype::F16, true) if group[0] == 1 => StoredBits::I4Zeros,
            (Codes::E2m1, Dtype::F8E8m0, false) if group[0] == 1 => StoredBits::E2m1,
            _ => return Some(Err(format!("stored as {stored}"))),
        };
        Some(Ok(Self { bits, group }))
    }
}

/// A norm's scale: a tensor, and its rows, 1 or one a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Norm {
    /// The tensor.
    pub tensor: u32,
    /// Its rows.
    pub rows: u32,
}

/// Tensors that some layers have, or [`NONE`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extras {
    /// Bias of attention's output.
    pub output_bias: u32,
    /// Sinks of heads.
    pub sinks: u32,
    /// The router and its bias.
    pub router: u32,
    /// See above.
    pub router_bias: u32,
    /// Corrections of scores for the choice.
    pub correction: u32,
    /// Biases of the experts' gate, up and down.
    pub biases: [u32; 3],
    /// Gate, up and down of the shared expert.
    pub shared: [u32; 3],
    /// The row whose product scales it.
    pub shared_scale: u32,
    /// Of a delta rule.
    pub delta: delta::Tensors,
}

impl Default for Extras {
    fn default() -> Self {
        Self {
            output_bias: NONE,
            sinks: NONE,
            router: NONE,
            router_bias: NONE,
            correction: NONE,
            biases: [NONE; 3],
            shared: [NONE; 3],
            shared_scale: NONE,
            delta: delta::Tensors::default(),
        }
    }
}

/// Tensors of attention over latents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentTensors {
    /// What makes the latent of queries, and that of keys and values.
    pub down: [u32; 2],
    /// Norms of both.
    pub norms: [u32; 2],
    /// What makes heads' queries.
    pub query: u32,
    /// What would make heads' keys and values, in turn.
    pub up: u32,
}

/// One layer: tensors by index, and numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    /// Index into [`Model::classes`].
    pub class: usize,
    /// q, k, v; of a delta rule its one matrix, or [`NONE`].
    pub qkv: [u32; 3],
    /// Their biases, or [`NONE`].
    pub biases: [u32; 3],
    /// Norms of q and of k, or [`NONE`].
    pub head_norms: [u32; 2],
    /// Attention's output matrix, then the mlp's, of experts the first one's.
    pub outputs: [u32; 2],
    /// Gate and up, of experts the first one's.
    pub gate_up: [u32; 2],
    /// Attention over latents.
    pub latent: Option<LatentTensors>,
    /// What else some layers have, or [`NONE`].
    pub extras: Extras,
    /// Norm scales before attention and before the mlp.
    pub norms: [Norm; 2],
    /// Positions a query sees; 0: all.
    pub window: u32,
    /// Page group, and the layer's index in it.
    pub pool: [u32; 2],
    /// Factor on the lane's own output of attention and mlp.
    pub own: [f32; 2],
    /// Layers since the others' output that is added; -1: none is.
    pub delay: [i32; 2],
    /// Whether other lanes will want the outputs.
    pub shares: [bool; 2],
}

impl Layer {
    /// The tensors of one of its matrices; of experts the first one's.
    pub fn tensors(&self, matrix: Matrix) -> Vec<u32> {
        let (extras, latent) = (&self.extras, &self.latent);
        let of = |pick: fn(&LatentTensors) -> Vec<u32>| latent.as_ref().map_or_else(Vec::new, pick);
        let all = match matrix {
            Matrix::Qkv => self.qkv.to_vec(),
            Matrix::Gates => vec![extras.delta.gates],
            Matrix::LatentDown => of(|l| l.down.to_vec()),
            Matrix::QueryUp => of(|l| vec![l.query]),
            Matrix::KeyUp | Matrix::ValueUp => of(|l| vec![l.up]),
            Matrix::Output => vec![self.outputs[0]],
            Matrix::Router => vec![extras.router, extras.shared_scale],
            Matrix::SharedGateUp => extras.shared[..2].to_vec(),
            Matrix::GateUp => self.gate_up.to_vec(),
            Matrix::SharedDown => vec![extras.shared[2]],
            Matrix::Down => vec![self.outputs[1]],
        };
        all.into_iter().filter(|tensor| *tensor != NONE).collect()
    }
}

impl Model {
    /// Layers.
    pub fn layers(&self) -> u32 {
        self.layer.len() as u32
    }

    /// The class of a layer.
    pub fn class_of(&self, layer: usize) -> &Class {
        &self.classes[self.layer[layer].class]
    }

    /// Layers of a class.
    pub fn layers_of(&self, class: usize) -> u32 {
        self.layer.iter().filter(|layer| layer.class == class).count() as u32
    }

    /// All norms, in the order of their rows on a device.
    pub fn norms(&self) -> impl Iterator<Item = Norm> + '_ {
        self.layer.iter().flat_map(|l| l.norms).chain([self.final_norm])
    }

    /// Rows of all norms.
    pub fn norm_rows(&self) -> u32 {
        self.norms().map(|norm| norm.rows).sum()
    }

    /// Lanes of all machines.
    pub const fn lanes_all(&self) -> u32 {
        self.lanes * self.ranks
    }

    /// Buffers of the words of what other lanes want, which layers use in rotation: as few as let
    /// no lane write a layer's where another may still read an earlier one's (ops/all_reduce.h).
    pub fn num_buffers_other(&self) -> u32 {
        if self.lanes_all() == 1 {
            return 1;
        }
        let layers = self.layer.len();
        // Outputs are numbered in the order of the work. Where output `at` is made, an earlier
        // one's words are read, if any.
        let source = |at: usize| {
            let delay = usize::try_from(self.layer.get(at / 2)?.delay[at % 2]).ok()?;
            at.checked_sub(2 * delay)
        };
        // When a lane stores output `at` it has all that it read for those before: the lanes that
        // stored that were done with what they read for what comes before it. Of what is read for
        // one and the same output threads read parts side by side, so nothing follows.
        let done = |at: usize| (0..at).filter_map(source).max().unwrap_or(0);
        let fits = |buffers: &usize| {
            (2 * buffers..2 * layers).all(|at| {
                let mut readers = (0..2 * layers).filter(|n| source(*n) == Some(at - 2 * buffers));
                readers.all(|reader| reader < done(at))
            })
        };
        (1..layers).find(fits).unwrap_or(layers) as u32
    }

    /// Reads a program, for so many machines, with numbers of one part.
    ///
    /// # Errors
    /// [`Error::InvalidProgram`] with the step that is not as expected, [`Error::Indivisible`].
    pub fn read(program: &Program, ranks: u32) -> Result<Self> {
        let (d, pools) = (&program.dims, pools(program)?);
        let mut steps = Steps { program, at: 0 };
        let StepKind::Embed(embed) = steps.next()? else { return steps.refuse("embed") };
        if embed.factor != 1.0 {
            return refuse(0, format!("embeddings times {}, 1 wanted", embed.factor));
        }
        let sliced = d.lanes == 1 && ranks > 1;
        let lanes_all = if sliced { ranks } else { d.lanes };
        // A norm of slices is that of the one lane there is.
        let lanes = if sliced { 1 } else { lanes_all };
        let (classes, layer, interleaved) = layers(&mut steps, ranks, (lanes, sliced))?;
        let StepKind::Head(head) = steps.next()? else { return steps.refuse("head") };
        let head_at = steps.at - 1;
        let StepKind::Sample(_) = steps.next()? else { return steps.refuse("sample") };
        if steps.at != program.steps.len() || layer.is_empty() {
            let count = layer.len();
            return refuse(steps.at, format!("{count} layers, then what is no step of theirs"));
        }
        if !lanes_all.is_multiple_of(ranks) {
            let [heads, kv_heads] = classes[0].heads_all;
            return Err(indivisible(d.lanes, heads, kv_heads, ranks));
        }
        let per_lane = d.lanes == 1 || head.mode == HeadMode::PerLane;
        let clamped =
            |c: &Class| c.experts.is_some_and(|e| matches!(e.gate, Gate::ClampedSwiglu { .. }));
        let residual_shift = if classes.iter().any(clamped) { CLAMPED_SHIFT } else { 0 };
        if lanes_all > ranks && classes.iter().any(|c: &Class| c.experts.is_some()) {
            return refuse(head_at, format!("experts in {lanes_all} lanes, one wanted"));
        }
        let mut model = Self {
            parts: 1,
            ranks,
            lanes: lanes_all / ranks,
            sliced,
            vocab_all: d.vocab,
            hidden: d.hidden,
            vocab: if per_lane { d.vocab.div_ceil(lanes_all) } else { d.vocab },
            head_mode: if per_lane { HeadMode::PerLane } else { head.mode },
            interleaved,
            eps: d.eps,
            pools,
            classes,
            layer,
            coded: Vec::new(),
            coded_head: None,
            embed: embed.table,
            head: head.weight,
            final_norm: Norm::read(program, head.norm, lanes, head_at)?,
            residual_shift,
        };
        let width = program.tensors.get(model.embed as usize).map(|t| t.cols);
        if width != Some(model.hidden) {
            return refuse(0, format!("embedding of width {width:?}, not {}", model.hidden));
        }
        model.coded = (0..model.classes.len()).map(|c| model.coded_of(program, c)).collect();
        model.coded_head = Self::coded_as(program, &[model.head]);
        Ok(model)
    }

    /// What [`Model::coded`] says of a program's class.
    fn coded_of(&self, program: &Program, class: usize) -> [Stored; Matrix::COUNT] {
        let experts = self.classes[class].experts.map_or(1, |e| e.count);
        Matrix::ALL.map(|matrix| {
            // The router's logits, and gates, are as good as their numbers.
            if matches!(matrix, Matrix::Router | Matrix::Gates) {
                return None;
            }
            let count = if matrix.is_experts() { experts } else { 1 };
            let of_layer =
                |l: &Layer| l.tensors(matrix).into_iter().flat_map(move |t| t..t + count);
            let layers = self.layer.iter().filter(|l| l.class == class);
            let stored = Self::coded_as(program, &layers.flat_map(of_layer).collect::<Vec<_>>());
            let turned = |coded: Coded| match coded {
                Coded { bits: StoredBits::F8, group: [rows, columns] } => {
                    Ok(Coded { bits: StoredBits::F8, group: [columns, rows] })
                }
                _ => Err("rows that are turned around, and scales a row".to_owned()),
            };
            if matrix == Matrix::KeyUp {
                stored.map(|coded| coded.and_then(turned))
            } else {
                stored
            }
        })
    }

    /// How all of some tensors are stored.
    fn coded_as(program: &Program, tensors: &[u32]) -> Stored {
        let all = tensors.iter().filter_map(|t| program.tensors.get(*t as usize));
        let all: Vec<_> = all.map(|t| Coded::of(&t.encoding)).collect();
        let first = all.first()?.clone();
        match all.iter().all(|coded| *coded == first) {
            true => first,
            false => Some(Err("layers or parts of it are stored differently".to_owned())),
        }
    }

    /// How a matrix of a class is stored.
    pub fn stored(&self, class: usize, matrix: Matrix) -> &Stored {
        self.coded.get(class).map_or(&None, |coded| &coded[matrix as usize])
    }

    /// Which of the program's query and kv heads of a class a machine's lane has, of as many places
    /// as the class has heads; the last places may stay empty.
    pub fn heads_of(&self, rank: u32, class: &Class) -> [Range<u32>; 2] {
        let [heads, kv_heads] = class.heads_all;
        if !self.sliced {
            return [0..class.heads, 0..class.kv_heads];
        }
        heads_of(rank, self.ranks, heads, kv_heads)
    }

    /// Which part of the program a machine has, in words.
    pub fn part(&self, rank: u32) -> String {
        let span = |range: Range<u32>| match range.len() {
            0 => "none".to_owned(),
            1 => range.start.to_string(),
            _ => format!("{} to {}", range.start, range.end - 1),
        };
        if self.ranks == 1 {
            return "all of it".to_owned();
        }
        if !self.sliced {
            let lanes = rank * self.lanes..(rank + 1) * self.lanes;
            return format!("lanes {} of {}", span(lanes), self.lanes_all());
        }
        let end = |rank: u32, each: u32, all: u32| (rank * each).min(all);
        let rows = |each, all| span(end(rank, each, all)..end(rank + 1, each, all));
        let of_class = |class: &Class| {
            let [query, kv] = self.heads_of(rank, class);
            format!(
                "heads {} of {}, kv heads {} of {}, features {} of {}",
                span(query),
                class.heads_all[0],
                span(kv),
                class.heads_all[1],
                rows(class.ffn, class.ffn_all),
                class.ffn_all,
            )
        };
        let classes: Vec<_> = self.classes.iter().map(of_class).collect();
        let ids = rows(self.vocab, self.vocab_all);
        format!("{}, ids {ids} of {}", classes.join(" or "), self.vocab_all)
    }
}

/// The classes of a program's layers, the layers, and whether rotary pairs are neighbours; `lanes`
/// with whether they are slices.
fn layers(
    steps: &mut Steps<'_>,
    ranks: u32,
    lanes: (u32, bool),
) -> Result<(Vec<Class>, Vec<Layer>, bool)> {
    let program = steps.program;
    let (mut classes, mut layers): (Vec<Class>, Vec<Layer>) = (Vec::new(), Vec::new());
    let mut interleaved = false;
    while steps.at_layer() {
        let first = steps.at;
        let phases = steps.layer()?;
        phases.known(program, first)?;
        if let Some(Rotary { interleaved: turns, .. }) = phases.mixer.rotary() {
            let known = layers.iter().any(|l: &Layer| classes[l.class].delta.is_none());
            if known && interleaved != turns {
                return refuse(first, "rotary pairs differ from layer to layer".to_owned());
            }
            interleaved = turns;
        }
        let class = Class::read(program, &phases, ranks)?;
        let index = classes.iter().position(|c| *c == class).unwrap_or(classes.len());
        if index == classes.len() {
            classes.push(class);
        }
        if classes.len() > MOST_CLASSES {
            return refuse(first, format!("a layer of class {index}: {MOST_CLASSES} at most"));
        }
        layers.push(Layer::read(program, &phases, index, lanes, first)?);
    }
    Ok((classes, layers, interleaved))
}

/// The steps of a program, one after another.
struct Steps<'a> {
    program: &'a Program,
    at: usize,
}

/// The phases of a layer: attention or a delta rule, then an mlp.
struct Phases<'a> {
    mixer: Mixer<'a>,
    output: &'a Project,
    /// Number of the first step of the mlp.
    second: usize,
    mlp: Mlp<'a>,
}

enum Mixer<'a> {
    Attention {
        qkv: &'a Qkv,
        attend: &'a Attend,
    },
    Delta {
        input: &'a DeltaIn,
        rule: &'a DeltaRule,
    },
    Latent {
        down: &'a LatentDown,
        query: &'a LatentQuery,
        attend: &'a LatentAttend,
        up: &'a LatentUp,
    },
}

impl Mixer<'_> {
    fn rotary(&self) -> Option<Rotary> {
        match self {
            Self::Attention { qkv, .. } => Some(qkv.rotary),
            Self::Delta { .. } => None,
            Self::Latent { down, .. } => Some(down.rotary),
        }
    }

    /// The norm before it.
    fn norm(&self) -> Option<u32> {
        match self {
            Self::Attention { qkv, .. } => qkv.norm,
            Self::Delta { input, .. } => input.norm,
            Self::Latent { down, .. } => down.norm,
        }
    }

    /// Where its state is kept, and the positions that a query sees; 0: all.
    fn state(&self) -> (StateAt, u32) {
        match self {
            Self::Attention { qkv, attend } => (qkv.state, attend.window.unwrap_or(0)),
            Self::Delta { rule, .. } => (rule.state, 0),
            Self::Latent { down, .. } => (down.state, 0),
        }
    }

    /// Refuses what there is no code for yet; `first` is its first step.
    fn known(&self, program: &Program, first: usize) -> Result<()> {
        let table = self.rotary().and_then(|rotary| program.tensors.get(rotary.table as usize));
        let features = 2 * table.map_or(0, |t| t.cols);
        if self.norm().is_none() {
            return refuse(first, "attention without a norm before it".to_owned());
        }
        let one_lane = match self {
            Self::Attention { qkv, attend } => {
                let (dim, gated) = (qkv.heads.dim, qkv.gates.is_some());
                let whole = features == dim || (features < dim && qkv.head_norms.is_some());
                if !whole {
                    let detail = format!("qkv turns {features} features of {dim}, all wanted");
                    return refuse(first, detail);
                }
                if gated != attend.gates.is_some() {
                    return refuse(first + 1, "gates that are not used".to_owned());
                }
                attend.sinks.is_some() || gated
            }
            Self::Delta { rule, .. } => {
                Delta::of(rule.heads).known().or_else(|got| refuse(first + 1, got))?;
                true
            }
            Self::Latent { down, .. } => {
                if down.query.is_none() {
                    return refuse(first, "queries without a latent of their own".to_owned());
                }
                let odd = down.width % 2 == 1 || down.heads.rank % 4 != 0;
                if odd || features != down.heads.turned {
                    return refuse(first, "latents of widths that are no whole pairs".to_owned());
                }
                false
            }
        };
        if one_lane && program.dims.lanes > 1 {
            return refuse(first + 1, "lanes with sinks, gates or delta rules".to_owned());
        }
        Ok(())
    }
}

enum Mlp<'a> {
    Dense {
        gate_up: &'a GateUp,
        down: &'a Project,
    },
    Experts {
        route: &'a Route,
        gate_up: &'a ExpertsGateUp,
        down: &'a ExpertsDown,
        /// Beside the chosen ones.
        shared: Option<(&'a GateUp, &'a Project)>,
    },
}

impl Mlp<'_> {
    /// The norm before it.
    fn norm(&self) -> Option<u32> {
        match self {
            Self::Dense { gate_up, .. } => gate_up.norm,
            Self::Experts { route, .. } => route.norm,
        }
    }

    /// Inner width, of one expert.
    fn ffn(&self) -> u32 {
        match self {
            Self::Dense { gate_up, .. } => gate_up.ffn,
            Self::Experts { gate_up, .. } => gate_up.ffn,
        }
    }

    fn experts(&self) -> Option<Experts> {
        let Self::Experts { route, gate_up, shared, .. } = self else { return None };
        let shared = shared.map(|(GateUp { ffn, scale, .. }, _)| SharedExpert {
            ffn: *ffn,
            ffn_all: *ffn,
            scaled: scale.is_some(),
        });
        Some(Experts {
            count: route.experts,
            chosen: route.chosen,
            scoring: route.scoring,
            correction: route.correction.is_some(),
            groups: route.groups,
            factor: route.factor,
            gate: gate_up.gate,
            router_bias: route.bias.is_some(),
            bias: gate_up.biases.is_some(),
            shared,
        })
    }

    /// Refuses what there is no code for yet; `first` is its first step.
    fn known(&self, first: usize) -> Result<()> {
        if self.norm().is_none() {
            return refuse(first, "an mlp without a norm before it".to_owned());
        }
        match self {
            Self::Dense { down, .. } if down.bias.is_some() => {
                refuse(first + 1, "project with a bias, none wanted".to_owned())
            }
            Self::Dense { gate_up, .. } if gate_up.scale.is_some() => {
                refuse(first, "gate_up times a sigmoid, none wanted".to_owned())
            }
            Self::Dense { gate_up, .. } => match gate_up.gate {
                Gate::Silu => Ok(()),
                Gate::GeluTanh => refuse(first, "gate_up with a GELU, SiLU wanted".to_owned()),
                Gate::ClampedSwiglu { .. } => {
                    refuse(first, "gate_up with a clamped SwiGLU, SiLU wanted".to_owned())
                }
                Gate::ClampedSilu { .. } => {
                    refuse(first, "gate_up with a clamped SiLU, SiLU wanted".to_owned())
                }
            },
            Self::Experts { route, gate_up, down, shared } => {
                let (experts, chosen) = (route.experts, route.chosen);
                if experts > MOST_EXPERTS || chosen > MOST_CHOSEN.min(experts) {
                    let most = format!("{MOST_CHOSEN} of {MOST_EXPERTS} at most");
                    return refuse(first, format!("{chosen} of {experts} experts, {most}"));
                }
                if let Some(ExpertGroups { count, .. }) =
                    route.groups.filter(|g| g.count > MOST_GROUPS)
                {
                    return refuse(
                        first,
                        format!("{count} groups of experts, {MOST_GROUPS} at most"),
                    );
                }
                if matches!(route.scoring, Scoring::SqrtSoftplus { .. }) || route.by_token.is_some()
                {
                    return refuse(first, "a router by token, or by a softplus".to_owned());
                }
                if gate_up.norm != route.norm {
                    return refuse(first, "the router and experts have norms of their own".into());
                }
                if let Some((of, down)) = shared {
                    let plain = matches!(down.join, Join::Sum | Join::Own { factor: 1.0 });
                    if of.norm != route.norm || of.gate != gate_up.gate || !plain {
                        let detail = "a shared expert with a norm, gate or sum of its own";
                        return refuse(first + 2, detail.to_owned());
                    }
                    if down.bias.is_some() || gate_up.biases.is_some() {
                        return refuse(first + 2, "a shared expert with biases".to_owned());
                    }
                }
                if gate_up.biases.is_some() != down.bias.is_some() {
                    return refuse(first + 2, "biases in some of the experts' products".into());
                }
                match gate_up.gate {
                    Gate::Silu | Gate::ClampedSwiglu { .. } => Ok(()),
                    Gate::GeluTanh => {
                        refuse(first + 1, "experts with a GELU, SiLU wanted".to_owned())
                    }
                    Gate::ClampedSilu { .. } => {
                        refuse(first + 1, "experts with a clamped SiLU, SiLU wanted".to_owned())
                    }
                }
            }
        }
    }
}

impl Phases<'_> {
    /// Refuses what a phase has no code for yet; `first` is the layer's first step.
    fn known(&self, program: &Program, first: usize) -> Result<()> {
        let Self { mixer, output, second, mlp } = self;
        mixer.known(program, first)?;
        if output.bias.is_some() && program.dims.lanes > 1 {
            return refuse(second - 1, "lanes with biases of attention's output".to_owned());
        }
        mlp.known(*second)
    }
}

impl<'a> Steps<'a> {
    fn at_layer(&self) -> bool {
        let starts = |kind| {
            matches!(kind, StepKind::Qkv(_) | StepKind::DeltaIn(_) | StepKind::LatentDown(_))
        };
        self.program.steps.get(self.at).is_some_and(|step| starts(step.kind))
    }

    fn next(&mut self) -> Result<&'a StepKind> {
        let Some(step) = self.program.steps.get(self.at) else {
            return refuse(self.at, "the end where the order of phases goes on".to_owned());
        };
        self.at += 1;
        Ok(&step.kind)
    }

    /// The step just taken is not the one that the order of known phases has here.
    fn refuse<T>(&self, wanted: &str) -> Result<T> {
        let got = self.program.steps[self.at - 1].kind.name();
        refuse(self.at - 1, format!("{got} where the order of known phases has {wanted}"))
    }

    fn project(&mut self) -> Result<&'a Project> {
        match self.next()? {
            StepKind::Project(project) => Ok(project),
            _ => self.refuse("project"),
        }
    }

    fn layer(&mut self) -> Result<Phases<'a>> {
        let mixer = match self.next()? {
            StepKind::Qkv(qkv) => {
                let StepKind::Attend(attend) = self.next()? else { return self.refuse("attend") };
                Mixer::Attention { qkv, attend }
            }
            StepKind::DeltaIn(input) => {
                let StepKind::DeltaRule(rule) = self.next()? else {
                    return self.refuse("delta_rule");
                };
                Mixer::Delta { input, rule }
            }
            StepKind::LatentDown(down) => {
                let StepKind::LatentQuery(query) = self.next()? else {
                    return self.refuse("latent_query");
                };
                let StepKind::LatentAttend(attend) = self.next()? else {
                    return self.refuse("latent_attend");
                };
                let StepKind::LatentUp(up) = self.next()? else { return self.refuse("latent_up") };
                Mixer::Latent { down, query, attend, up }
            }
            _ => return self.refuse("qkv"),
        };
        let output = self.project()?;
        let second = self.at;
        let mlp = match self.next()? {
            StepKind::GateUp(gate_up) => Mlp::Dense { gate_up, down: self.project()? },
            StepKind::Route(route) => {
                let StepKind::ExpertsGateUp(gate_up) = self.next()? else {
                    return self.refuse("experts_gate_up");
                };
                let (beside, down) = match self.next()? {
                    StepKind::GateUp(beside) => (Some(beside), self.next()?),
                    down => (None, down),
                };
                let StepKind::ExpertsDown(down) = down else {
                    return self.refuse("experts_down");
                };
                let shared = match beside {
                    Some(gate_up) => Some((gate_up, self.project()?)),
                    None => None,
                };
                Mlp::Experts { route, gate_up, down, shared }
            }
            _ => return self.refuse("gate_up or route"),
        };
        Ok(Phases { mixer, output, second, mlp })
    }
}

impl Class {
    fn read(program: &Program, phases: &Phases<'_>, ranks: u32) -> Result<Self> {
        let (ffn, experts) = (phases.mlp.ffn(), phases.mlp.experts());
        let whole = Self {
            heads: 0,
            kv_heads: 0,
            heads_all: [0, 0],
            head_dim: 0,
            still: 0,
            gated: false,
            delta: None,
            ffn,
            ffn_all: ffn,
            head_norm: None,
            bias: false,
            output_bias: phases.output.bias.is_some(),
            sinks: false,
            rope: phases.mixer.rotary().map_or(NONE, |rotary| rotary.table),
            latent: None,
            experts,
        };
        let whole = match &phases.mixer {
            Mixer::Attention { qkv, attend } => {
                let Heads { query, kv, dim } = qkv.heads;
                let table = program.tensors.get(qkv.rotary.table as usize);
                Self {
                    heads: query,
                    kv_heads: kv,
                    head_dim: dim,
                    still: dim - 2 * table.map_or(0, |t| t.cols),
                    gated: qkv.gates.is_some(),
                    head_norm: qkv.head_norms.map(|_| qkv.norm_span),
                    bias: qkv.biases.is_some(),
                    sinks: attend.sinks.is_some(),
                    rope: qkv.rotary.table,
                    ..whole
                }
            }
            Mixer::Latent { down, attend, .. } => {
                let LatentHeads { count, rank, plain, turned, value } = down.heads;
                let (query_rank, eps, scale) = (down.width, down.eps, attend.scale);
                let latent = Some(Latent { query_rank, rank, plain, turned, eps, scale });
                Self { heads: count, kv_heads: 1, head_dim: value, latent, ..whole }
            }
            Mixer::Delta { rule, .. } => {
                let DeltaHeads { keys, values, value_dim, .. } = rule.heads;
                let delta = Some(Delta::of(rule.heads));
                Self { heads: values, kv_heads: keys, head_dim: value_dim, delta, ..whole }
            }
        };
        let (query, kv, lanes) = (whole.heads, whole.kv_heads, program.dims.lanes);
        let whole = Self { heads_all: [query, kv], ..whole };
        if lanes > 1 || ranks == 1 {
            return Ok(whole);
        }
        if whole.head_norm == Some(NormSpan::AllHeads) {
            return Err(normed_over_all_heads(ranks));
        }
        let Some((heads, kv_heads)) = dealt(query, kv, ranks) else {
            return Err(indivisible(lanes, query, kv, ranks));
        };
        // Whole units of an expert, whose groups of codes share scales.
        let share = |ffn: u32, unit| ffn.div_ceil(ranks).next_multiple_of(unit);
        let of_rank = |e: Experts| {
            let shared =
                e.shared.map(|shared| SharedExpert { ffn: share(shared.ffn, 32), ..shared });
            Experts { shared, ..e }
        };
        let ffn = share(ffn, if experts.is_some() { 32 } else { 1 });
        Ok(Self { heads, kv_heads, ffn, experts: experts.map(of_rank), ..whole })
    }
}

impl Norm {
    fn read(program: &Program, tensor: u32, lanes_all: u32, step: usize) -> Result<Self> {
        match program.tensors.get(tensor as usize).map(|t| t.rows) {
            Some(rows) if rows == 1 || rows == lanes_all => Ok(Self { tensor, rows }),
            Some(rows) => refuse(step, format!("a norm of {rows} rows for {lanes_all} lanes")),
            None => refuse(step, "a product without a norm".to_owned()),
        }
    }
}

impl Layer {
    fn read(
        program: &Program,
        phases: &Phases<'_>,
        class: usize,
        (lanes, sliced): (u32, bool),
        first: usize,
    ) -> Result<Self> {
        let Phases { mixer, output, second, mlp } = phases;
        let rows_of = |t: u32| program.tensors.get(t as usize).map_or(1, |t: &Tensor| t.rows);
        let mut extras = Extras { output_bias: output.bias.unwrap_or(NONE), ..Extras::default() };
        let (mut qkv, mut biases, mut head_norms) = ([NONE; 3], [NONE; 3], [NONE; 2]);
        let mut latent = None;
        match mixer {
            Mixer::Attention { qkv: of, attend } => {
                if of.head_norms.into_iter().flatten().any(|norm| rows_of(norm) != 1) {
                    let detail = "norms of heads that differ from lane to lane";
                    return refuse(first, detail.to_owned());
                }
                (qkv, biases) = (of.weights, of.biases.unwrap_or([NONE; 3]));
                head_norms = of.head_norms.unwrap_or([NONE; 2]);
                extras.sinks = attend.sinks.unwrap_or(NONE);
            }
            Mixer::Delta { input, rule } => {
                qkv[0] = input.weights[0];
                extras.delta = delta::Tensors::of(input, rule);
            }
            Mixer::Latent { down, query, up, .. } => {
                let [weight, norm] = down.query.unwrap_or([NONE; 2]);
                latent = Some(LatentTensors {
                    down: [weight, down.weight],
                    norms: [norm, down.scale],
                    query: query.weight,
                    up: up.weight,
                });
            }
        }
        let (state, window) = mixer.state();
        // The lane's own factor, and the delay of the others.
        let join = |project: &Project| match project.join {
            Join::Sum => (1.0, 0),
            Join::Own { factor } => (factor, if sliced { 0 } else { -1 }),
            Join::Delayed { layers, .. } => (1.0, if sliced { 0 } else { layers as i32 }),
        };
        let shares = |p: &Project| sliced || p.keep.is_some() || p.join == Join::Sum;
        // Experts' outputs are summed at once.
        let (gate_up, down, of_down) = match mlp {
            Mlp::Dense { gate_up, down } => {
                (gate_up.weights, down.weight, (join(down), shares(down)))
            }
            Mlp::Experts { route, gate_up, down, shared } => {
                extras.router = route.weight;
                extras.router_bias = route.bias.unwrap_or(NONE);
                extras.correction = route.correction.unwrap_or(NONE);
                if let Some((of, down)) = shared {
                    let [gate, up] = of.weights;
                    extras.shared = [gate, up, down.weight];
                    extras.shared_scale = of.scale.unwrap_or(NONE);
                }
                let [gate, up] = gate_up.biases.unwrap_or([NONE; 2]);
                extras.biases = [gate, up, down.bias.unwrap_or(NONE)];
                (gate_up.weights, down.weight, ((1.0, 0), true))
            }
        };
        let joins = [join(output), of_down.0];
        Ok(Self {
            class,
            qkv,
            biases,
            head_norms,
            outputs: [output.weight, down],
            gate_up,
            latent,
            extras,
            norms: [
                Norm::read(program, mixer.norm().unwrap_or(NONE), lanes, first)?,
                Norm::read(program, mlp.norm().unwrap_or(NONE), lanes, *second)?,
            ],
            window,
            pool: [state.group, state.layer],
            own: joins.map(|(own, _)| own),
            delay: joins.map(|(_, delay)| delay),
            shares: [shares(output), of_down.1],
        })
    }
}

/// Pools of pages that tables have room for.
fn pools(program: &Program) -> Result<u32> {
    let kept = |group: &&PageGroup| group.is_recurrent() && group.layers > 0;
    if program.groups.iter().filter(kept).count() > 1 {
        return refuse(1, "recurrent states of several shapes, one wanted".to_owned());
    }
    match program.groups.len() {
        // Tables have two rows also where one is empty.
        groups @ ..=MOST_POOLS => Ok(groups.max(2) as u32),
        groups => refuse(1, format!("{groups} page groups: {MOST_POOLS} at most")),
    }
}

/// Bytes of one KV page of a group on all of so many machines, each of which has whole kv heads
/// with what that pads, in so many halves a number; heads that do not divide are refused later. Of
/// a recurrent state on machines of so many blocks, at most.
pub fn page_bytes(group: &PageGroup, (ranks, blocks): (u32, u32), parts: u32) -> u64 {
    let width = match state_of(group, ranks) {
        StateKind::KeysValues { lanes, kv_heads, head_dim, .. } => {
            2 * u64::from(lanes * kv_heads) * u64::from(head_dim.next_multiple_of(32))
        }
        // Each machine has all of them.
        StateKind::Latents { width, .. } => u64::from(ranks * width.next_multiple_of(8)),
        StateKind::Recurrent { lanes, heads } => {
            return u64::from(group.layers * lanes) * delta::most_bytes(heads, blocks);
        }
        // No kernel keeps such a state: lowering refuses what has one.
        StateKind::Entries { .. } | StateKind::Sums { .. } => {
            return group.page_bytes();
        }
    };
    u64::from(group.layers) * width * PAGE as u64 * 2 * u64::from(parts)
}

fn refuse<T>(step: usize, detail: String) -> Result<T> {
    Err(Error::InvalidProgram { step, detail: format!("for the monokernel: {detail}") })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mono::shapes::model;

    #[test]
    fn pages_are_halves_in_whole_tiles() {
        let group = |head_dim| PageGroup {
            state: StateKind::KeysValues {
                dtype: crate::abi::Dtype::F32,
                lanes: 1,
                kv_heads: 2,
                head_dim,
            },
            layers: 3,
            window: None,
            pages: 1,
        };
        // Keys and values of 64 positions of one head in three layers, as halves.
        let one = 3 * 2 * 64 * 128 * 2;
        assert_eq!(page_bytes(&group(128), (1, 1), 1), 2 * one);
        assert_eq!(page_bytes(&group(128), (8, 1), 1), 8 * one);
        assert_eq!(page_bytes(&group(128), (8, 1), 2), 16 * one, "two halves a number");
        // Heads are padded to whole tiles.
        assert_eq!(page_bytes(&group(40), (8, 1), 1), 8 * one / 2);
    }

    #[test]
    fn words_for_other_lanes_have_as_many_places_as_delays_ask_for() {
        let with = |delay: &dyn Fn(u32) -> i32| {
            let model = model("2b");
            let layer = |n| Layer { delay: [delay(n); 2], ..model.layer[0] };
            Model { layer: (0..model.layers()).map(layer).collect(), ..model.clone() }
                .num_buffers_other()
        };
        assert_eq!(model("8b").num_buffers_other(), 1, "there is no other lane");
        assert_eq!(with(&|_| 0), 1);
        assert_eq!(with(&|_| 1), 3);
        assert_eq!(with(&|_| 2), 5);
        assert_eq!(with(&|n| if n < 3 { -1 } else { 3 }), 7);
        assert_eq!(with(&|n| if n == 14 { 2 } else { -1 }), 3, "12's words are read in layer 14");
        assert_eq!(with(&|n| if n == 14 { 14 } else { -1 }), 15, "and here layer 0's");
    }
}
