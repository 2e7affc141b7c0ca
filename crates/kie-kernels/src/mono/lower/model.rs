//! A program as what the monokernel runs: layers of a few classes. Layers of a class have the same
//! phases and sizes and differ in numbers alone (windows, delays, where their tensors and pages
//! are).

use std::ops::Range;

use super::compressed::{self, Compressed, CompressedTensors};
use super::delta::{self, Delta};
use super::experts::Experts;
use super::hyper::{Hyper, HyperTensors};
use super::latent::{Latent, LatentTensors};
use super::matrix::Matrix;
use super::tiling::StoredBits;
use crate::abi::{Codes, Dtype, Encoding, HeadMode, NormSpan, PageGroup, StateKind, NONE, PAGE};
use crate::shard::{heads_of, state_of};

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
    /// The residual is several streams.
    pub hyper: Option<Hyper>,
    /// Its one layer predicts further tokens, beside another model.
    pub mtp: Option<Mtp>,
}

/// Norms of what a layer that predicts further tokens takes in: of the embedding, of the residual
/// stream, and behind the model's last layer; [`Model::final_norm`] is behind this one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mtp {
    /// In this order.
    pub norms: [Norm; 3],
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
pub(super) const CLAMPED_SHIFT: u32 = 4;

/// Most pools of pages: what differs in size or is windowed has one of its own. A launch is told of
/// the first [`FIRST_POOLS`] and of those behind them.
pub const MOST_POOLS: usize = FIRST_POOLS + MORE_POOLS;
/// See above.
pub const FIRST_POOLS: usize = 4;
/// See above.
pub const MORE_POOLS: usize = 4;

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
    /// Attention over a window and compressed entries: heads share one key of `head_dim`.
    pub compressed: Option<Compressed>,
    /// The mlp is some of several experts, of `ffn` each.
    pub experts: Option<Experts>,
    /// It begins with [`Matrix::MtpIn`].
    pub predicts: bool,
}

impl Class {
    /// Whether it keeps something that every position changes.
    pub fn is_recurrent(&self) -> bool {
        self.delta.is_some() || self.compressed.is_some_and(|of| of.entries.is_some())
    }

    /// Whether it is attention over keys and values.
    pub const fn attends(&self) -> bool {
        self.latent.is_none() && self.delta.is_none() && self.compressed.is_none()
    }

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
    pub(super) fn of(stored: &Encoding) -> Stored {
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
    /// The experts of each token.
    pub token_experts: u32,
    /// Biases of the experts' gate, up and down.
    pub biases: [u32; 3],
    /// Gate, up and down of the shared expert.
    pub shared: [u32; 3],
    /// The row whose product scales it.
    pub shared_scale: u32,
    /// Of a delta rule.
    pub delta: delta::Tensors,
    /// Of a layer that predicts further tokens.
    pub mtp_in: u32,
}

impl Default for Extras {
    fn default() -> Self {
        Self {
            output_bias: NONE,
            sinks: NONE,
            router: NONE,
            router_bias: NONE,
            correction: NONE,
            token_experts: NONE,
            biases: [NONE; 3],
            shared: [NONE; 3],
            shared_scale: NONE,
            delta: delta::Tensors::default(),
            mtp_in: NONE,
        }
    }
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
    /// Attention over a window and compressed entries.
    pub compressed: Option<CompressedTensors>,
    /// What attention and the mlp take of several residual streams.
    pub hyper: [HyperTensors; 2],
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
        if let Some(compressed) = &self.compressed {
            match matrix {
                Matrix::LatentDown => return compressed.down(),
                Matrix::QueryUp => return compressed.queries(),
                Matrix::ValueUp => return vec![compressed.group],
                _ => {}
            }
        }
        let (extras, latent) = (&self.extras, &self.latent);
        let of = |pick: fn(&LatentTensors) -> Vec<u32>| latent.as_ref().map_or_else(Vec::new, pick);
        let all = match matrix {
            Matrix::MtpIn => vec![extras.mtp_in],
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

/// Scale blocks that so many neighbouring rows touch, at most.
pub fn touched(stored: &Stored, rows: u32) -> u32 {
    let coded = stored.as_ref().and_then(|coded| coded.as_ref().ok());
    let down = coded.map_or(u32::MAX / 2, |coded| coded.group[0]);
    (rows + down).saturating_sub(2) / down + 1
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
        let mtp = self.mtp.iter().flat_map(|mtp| mtp.norms);
        self.layer.iter().flat_map(|l| l.norms).chain([self.final_norm]).chain(mtp)
    }

    /// The first row of the final norm.
    pub fn final_norm_row(&self) -> u32 {
        self.layer.iter().flat_map(|l| l.norms).map(|norm| norm.rows).sum()
    }

    /// Rows of all norms.
    pub fn norm_rows(&self) -> u32 {
        self.norms().map(|norm| norm.rows).sum()
    }

    /// Columns of the head, of a padded width.
    pub fn head_width(&self, hidden: u32) -> u32 {
        let streams = if self.head_mode == HeadMode::Concat { self.lanes_all() } else { 1 };
        streams * hidden
    }

    /// Numbers of the widest vector of residual streams, of a padded width.
    pub fn widest_input(&self, hidden: u32) -> u32 {
        self.head_width(hidden).max(if self.mtp.is_some() { 2 * hidden } else { hidden })
    }

    /// 32-bit words of a mask of all ids.
    pub const fn mask_words(&self) -> u32 {
        self.vocab_all.div_ceil(32)
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
        StateKind::Entries { width, every, .. } => {
            let all = ranks * group.layers;
            return u64::from(all) * u64::from(compressed::entries_bytes(width, every, parts));
        }
        StateKind::Sums { numbers } => {
            let all = ranks * group.layers;
            return u64::from(all) * u64::from(compressed::sums_bytes(numbers / 3));
        }
    };
    u64::from(group.layers) * width * PAGE as u64 * 2 * u64::from(parts)
}

#[cfg(test)]
#[path = "model_tests.rs"]
mod tests;
