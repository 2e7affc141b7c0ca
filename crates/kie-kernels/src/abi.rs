//! Every byte that crosses between host and device is defined here, once.
//!
//! A [`Program`] is the plan as data: the only thing a runner reads besides its buffers and its
//! mailbox. It is a list of [`Step`]s over [`Tensor`]s (what is read-only), [`Vector`]s (what one
//! column of a pass computes) and [`PageGroup`]s (what is kept of a sequence). A *column* is one
//! position of one sequence; a *pass* runs all steps over up to `Dims::columns` columns at once.

mod commands;
mod compressed;
mod hyper;
mod mtp;
mod places;

use std::ops::Range;

pub use commands::{Command, CommandKind, Drafts, Record, SlotEnd, SlotParams};
pub use compressed::{
    Compress, CompressedAttend, CompressedDown, CompressedHeads, CompressedIndex, CompressedQuery,
    Entries, GroupedDown,
};
pub use hyper::{HyperIn, HyperJoin, HyperOut, STREAMS_MAX};
pub use mtp::MtpIn;
pub use places::{Rotary, StateAt};

pub use crate::encoding::{Codes, Dtype, Encoding};
pub use crate::sample::Sampling;

/// Positions of a KV page.
pub const PAGE: usize = 64;
/// "No entry" in a table that a runner lowers a program to.
pub const NONE: u32 = u32::MAX;
/// Most stop ids of a request (end-of-sequence ids included).
pub const MAX_STOP_IDS: usize = 64;
/// Most entries of a request's logit bias.
pub const MAX_BIAS: usize = 1024;
/// Most alternatives a token can report.
pub const MAX_ALTERNATIVES: usize = 20;

/// How the numbers of a matrix lie in its buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Layout {
    /// Row after row, as checkpoints store them. What the CPU reads in place.
    RowMajor = 0,
    /// Column after column, each of `rows * row_step` plain numbers, of one lane. What GPUs make
    /// rows of, some at a time, while they load.
    ColumnMajor = 1,
}

/// A read-only array in one of the program's buffers: `lanes` matrices of `rows` x `cols`.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct Tensor {
    /// Index into the buffers that the program is started with.
    pub buffer: u32,
    /// How the numbers are stored.
    pub encoding: Encoding,
    /// Order of the numbers.
    pub layout: Layout,
    /// Matrices, one a lane; vectors shared by the lanes have 1.
    pub lanes: u32,
    /// Rows of one lane's matrix.
    pub rows: u32,
    /// Columns of one lane's matrix, whole pieces of its codes.
    pub cols: u32,
    /// Stored rows, of codes and of scales, from one row to the next: 1, or 2 where the rows of two
    /// matrices alternate in the checkpoint.
    pub row_step: u32,
    /// Buffer that holds the scales (row-major per lane) and the zero points (the same, bytes).
    pub scale_buffer: u32,
    /// Byte offset of the first number.
    pub offset: u64,
    /// Byte offset of the first scale.
    pub scale_offset: u64,
    /// Byte offset of the first zero point.
    pub zero_offset: u64,
}

impl Tensor {
    /// Bytes of one row of codes.
    pub fn row_bytes(&self) -> u64 {
        self.encoding.codes.bytes_of(self.cols as usize) as u64
    }

    /// Bytes of one lane's matrix, scales excluded.
    pub fn lane_bytes(&self) -> u64 {
        u64::from(self.rows) * self.row_bytes()
    }

    /// Where the codes of a lane's matrix are, from `offset` on: from its first row to its last,
    /// and what lies between them.
    pub fn lane_range(&self, lane: u32) -> Range<u64> {
        match self.layout {
            Layout::RowMajor => self.range(lane, self.row_bytes(), 1),
            Layout::ColumnMajor => {
                let (rows, step) = (u64::from(self.rows), u64::from(self.row_step));
                let before = u64::from(self.cols).saturating_sub(1) * rows * step;
                let one = self.encoding.codes.bytes_of(1) as u64;
                0..(before + stored_rows(rows, step)) * one
            }
        }
    }

    /// The same of its scales, from `scale_offset` on.
    pub fn scale_range(&self, lane: u32) -> Range<u64> {
        let [_, across] = self.scale_grid();
        let row = u64::from(across) * self.encoding.scale.bytes() as u64;
        self.range(lane, row, self.encoding.group[0])
    }

    /// The same of its zero points, from `zero_offset` on.
    pub fn zero_range(&self, lane: u32) -> Range<u64> {
        let [_, across] = self.scale_grid();
        let row = if self.encoding.zeros { u64::from(across) } else { 0 };
        self.range(lane, row, self.encoding.group[0])
    }

    /// Of something that `group` stored rows have `bytes` of.
    fn range(&self, lane: u32, bytes: u64, group: u32) -> Range<u64> {
        let (rows, step) = (u64::from(self.rows), u64::from(self.row_step));
        let each = |rows: u64| rows.div_ceil(u64::from(group.max(1))) * bytes;
        let start = u64::from(lane) * each(rows * step);
        start..start + each(stored_rows(rows, step))
    }

    /// Groups of one lane's matrix, `[rows, cols]`; a scale each.
    pub fn scale_grid(&self) -> [u32; 2] {
        self.encoding.grid(self.rows, self.cols)
    }

    /// Groups of one lane's matrix.
    pub fn groups(&self) -> u64 {
        let [rows, cols] = self.scale_grid();
        u64::from(rows) * u64::from(cols)
    }

    /// Bytes of the scales of one lane's matrix.
    pub fn scale_bytes(&self) -> u64 {
        self.groups() * self.encoding.scale.bytes() as u64
    }

    /// Bytes of the zero points of one lane's matrix.
    pub fn zero_bytes(&self) -> u64 {
        if self.encoding.zeros {
            self.groups()
        } else {
            0
        }
    }

    /// Bytes read when every number is read once, scales and zero points included.
    pub fn bytes(&self) -> u64 {
        u64::from(self.lanes) * (self.lane_bytes() + self.scale_bytes() + self.zero_bytes())
    }
}

/// Stored rows from the first to the last of `rows`, `step` apart.
pub(crate) fn stored_rows(rows: u64, step: u64) -> u64 {
    rows.saturating_sub(1) * step + rows.min(1)
}

/// A float32 activation, `lanes` x `width` numbers a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Vector {
    /// Lanes that have their own copy.
    pub lanes: u32,
    /// Numbers a lane.
    pub width: u32,
}

/// One fused operation over all lanes, all columns and all blocks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step {
    /// Layer it belongs to; layers count from 0, the head is one past the last.
    pub layer: u16,
    /// What it does, and on what.
    pub kind: StepKind,
}

/// What a step does, with the operands and sizes of its own. Matrices, scales and biases are
/// indices into [`Program::tensors`], inputs and outputs into [`Program::vectors`]. One row here,
/// one function in each runner.
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(missing_docs)]
pub enum StepKind {
    Embed(Embed),
    Qkv(Qkv),
    Attend(Attend),
    DeltaIn(DeltaIn),
    DeltaRule(DeltaRule),
    LatentDown(LatentDown),
    LatentQuery(LatentQuery),
    LatentAttend(LatentAttend),
    LatentUp(LatentUp),
    CompressedDown(CompressedDown),
    Compress(Compress),
    CompressedIndex(CompressedIndex),
    CompressedQuery(CompressedQuery),
    CompressedAttend(CompressedAttend),
    GroupedDown(GroupedDown),
    HyperIn(HyperIn),
    HyperOut(HyperOut),
    Project(Project),
    ProjectNormed(ProjectNormed),
    GateUp(GateUp),
    Route(Route),
    ExpertsGateUp(ExpertsGateUp),
    ExpertsDown(ExpertsDown),
    Head(Head),
    Sample(Sample),
    MtpIn(MtpIn),
}

impl StepKind {
    /// Its name, to print.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Embed(_) => "embed",
            Self::Qkv(_) => "qkv",
            Self::Attend(_) => "attend",
            Self::DeltaIn(_) => "delta_in",
            Self::DeltaRule(_) => "delta_rule",
            Self::LatentDown(_) => "latent_down",
            Self::LatentQuery(_) => "latent_query",
            Self::LatentAttend(_) => "latent_attend",
            Self::LatentUp(_) => "latent_up",
            Self::CompressedDown(_) => "compressed_down",
            Self::Compress(_) => "compress",
            Self::CompressedIndex(_) => "compressed_index",
            Self::CompressedQuery(_) => "compressed_query",
            Self::CompressedAttend(_) => "compressed_attend",
            Self::GroupedDown(_) => "grouped_down",
            Self::HyperIn(_) => "hyper_in",
            Self::HyperOut(_) => "hyper_out",
            Self::Project(_) => "project",
            Self::ProjectNormed(_) => "project_normed",
            Self::GateUp(_) => "gate_up",
            Self::Route(_) => "route",
            Self::ExpertsGateUp(_) => "experts_gate_up",
            Self::ExpertsDown(_) => "experts_down",
            Self::Head(_) => "head",
            Self::Sample(_) => "sample",
            Self::MtpIn(_) => "mtp_in",
        }
    }
}

/// `output[l] = factor · table[token]` for every lane.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Embed {
    /// `[vocab, hidden]`, shared by the lanes.
    pub table: u32,
    /// On every number; 1 leaves them alone.
    pub factor: f32,
    /// `[hidden]` a lane; or several times that, one copy behind the other, shared by the lanes.
    pub output: u32,
}

/// `q, k, v = W · norm(input) + bias`, optional norm of each q and k head, rotary embedding of q
/// and k; q goes to `output`, k and v into the pages of `state`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Qkv {
    /// RMSNorm scale of the input, `[hidden]` or `[lanes, hidden]`; without one it is taken as it
    /// is.
    pub norm: Option<u32>,
    /// q, k and v, `[lanes, rows, hidden]`. With `gates` q has twice its rows: those of a head,
    /// then those of its gate.
    pub weights: [u32; 3],
    /// Biases of the same, one row or one a lane.
    pub biases: Option<[u32; 3]>,
    /// RMSNorm scales of q and k before they are turned.
    pub head_norms: Option<[u32; 2]>,
    /// What those norms are over.
    pub norm_span: NormSpan,
    /// How q and k are turned.
    pub rotary: Rotary,
    /// Heads of one lane.
    pub heads: Heads,
    /// Residual streams.
    pub input: u32,
    /// q, `[heads.query * heads.dim]` a lane.
    pub output: u32,
    /// What [`Attend`] gates its output by, the same size.
    pub gates: Option<u32>,
    /// Where k and v are kept.
    pub state: StateAt,
    /// Which block does which heads, gates counted as heads; see [`Program::row_partition`].
    pub partition: u32,
}

impl Qkv {
    /// Heads of q, k and v, and of gates.
    pub const fn all_heads(&self) -> u32 {
        let gates = if self.gates.is_some() { self.heads.query } else { 0 };
        self.heads.all() + gates
    }
}

/// `output = softmax(q kᵀ / sqrt(heads.dim)) v` over the pages of `state`, times the sigmoid of
/// `gates` where there are some. A sink is a score beside those of the keys whose value is 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attend {
    /// Heads of one lane.
    pub heads: Heads,
    /// q, `[heads.query * heads.dim]` a lane.
    pub input: u32,
    /// The same size.
    pub gates: Option<u32>,
    /// The same size.
    pub output: u32,
    /// Where k and v are kept.
    pub state: StateAt,
    /// Positions a query sees, itself included; all of them where there is none.
    pub window: Option<u32>,
    /// Sinks, `[lanes, heads.query]`.
    pub sinks: Option<u32>,
}

/// `outputs = W · norm(input)`: what [`DeltaRule`] is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaIn {
    /// RMSNorm scale of the input, `[hidden]`; without one it is taken as it is.
    pub norm: Option<u32>,
    /// `[lanes, heads.keys * heads.rows(), hidden]`: q, k, the v of its value heads and their z,
    /// key head by key head. `[lanes, 2 * heads.values, hidden]`: b, then a, of each key head's
    /// value heads.
    pub weights: [u32; 2],
    /// Heads of one lane.
    pub heads: DeltaHeads,
    /// Residual streams.
    pub input: u32,
    /// The rows of each of the two.
    pub outputs: [u32; 2],
    /// Which block does which rows: of each lane those of the first matrix, then the second's.
    pub partition: u32,
}

impl DeltaIn {
    /// Rows of one lane of both matrices.
    pub const fn rows(&self) -> u32 {
        self.heads.keys * self.heads.rows() + 2 * self.heads.values
    }
}

/// The gated delta rule (Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024). q, k and v are
/// `silu` of a convolution over positions, channel by channel; q and k of each head are divided by
/// their lengths, q by `sqrt(key_dim)`, too. For each value head, with S `[key_dim, value_dim]`:
///
/// ```text
/// S = S exp(-exp(decay) softplus(a + bias)),  S += k (sigmoid(b) (v - Sᵀ k))ᵀ,  o = Sᵀ q
/// output = norm(o) silu(z)
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaRule {
    /// Heads of one lane.
    pub heads: DeltaHeads,
    /// What the taps are multiplied by, the own position's last: a row a channel of q, then of k,
    /// then of v, over all lanes.
    pub conv: u32,
    /// A number a value head, over all lanes.
    pub decay: u32,
    /// The same.
    pub bias: u32,
    /// RMSNorm scale of a head's output, `[value_dim]`.
    pub norm: u32,
    /// What [`DeltaIn`] put out.
    pub inputs: [u32; 2],
    /// `[heads.values * heads.value_dim]` a lane.
    pub output: u32,
    /// Where S and the last inputs of the convolution are kept.
    pub state: StateAt,
}

/// Heads of one lane's gated delta rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeltaHeads {
    /// Heads of q and k.
    pub keys: u32,
    /// Heads of v; a multiple of `keys`, whose heads have equally many, one behind the other.
    pub values: u32,
    /// Features of a head of q and k.
    pub key_dim: u32,
    /// Features of a head of v.
    pub value_dim: u32,
    /// Taps of the convolution, the own position included.
    pub taps: u32,
}

impl DeltaHeads {
    /// Value heads of a key head.
    pub const fn shared(self) -> u32 {
        self.values / self.keys
    }

    /// Channels of a key head: q, k, and v of its value heads.
    pub const fn channels(self) -> u32 {
        2 * self.key_dim + self.shared() * self.value_dim
    }

    /// Numbers that a key head takes in: its channels, then z.
    pub const fn rows(self) -> u32 {
        self.channels() + self.shared() * self.value_dim
    }

    /// Numbers of v, or of the output.
    pub const fn value_width(self) -> u32 {
        self.values * self.value_dim
    }

    /// Numbers that a key head keeps of a sequence: the last `taps - 1` inputs of its channels,
    /// oldest first, then S of each value head.
    pub const fn kept(self) -> u32 {
        self.channels() * (self.taps - 1) + self.shared() * self.key_dim * self.value_dim
    }
}

/// Sizes of one lane's latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): heads share
/// one latent a position, of which each makes keys and values of its own, and one turned key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LatentHeads {
    /// Heads.
    pub count: u32,
    /// Width of the latent.
    pub rank: u32,
    /// Features of a head's query and key that do not turn.
    pub plain: u32,
    /// Those behind them, which do; even.
    pub turned: u32,
    /// Features of a head's value.
    pub value: u32,
}

impl LatentHeads {
    /// Numbers of a head's query.
    pub const fn query(self) -> u32 {
        self.plain + self.turned
    }

    /// Numbers that are kept of a position, and of a query that meets them.
    pub const fn key(self) -> u32 {
        self.rank + self.turned
    }

    /// Rows that make a head's key and value of a latent.
    pub const fn up(self) -> u32 {
        self.plain + self.value
    }
}

/// `x = norm(input)`; `output = norm(Wq · x)`, or x itself; `[c, r] = W · x`: norm(c) and r,
/// turned, go into the pages of `state`. Lanes hold the same residual stream (ranks); the first
/// one's is read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LatentDown {
    /// RMSNorm scale of the input, `[hidden]`; without one it is taken as it is.
    pub norm: Option<u32>,
    /// Wq, `[width, hidden]`, and the RMSNorm scale of its product.
    pub query: Option<[u32; 2]>,
    /// Numbers of `output`.
    pub width: u32,
    /// W, `[rank + turned, hidden]`.
    pub weight: u32,
    /// RMSNorm scale of the latent, `[rank]`.
    pub scale: u32,
    /// Epsilon of the norms of both products.
    pub eps: f32,
    /// How r is turned.
    pub rotary: Rotary,
    /// Heads of one lane.
    pub heads: LatentHeads,
    /// Residual streams.
    pub input: u32,
    /// `[width]`, shared by the lanes.
    pub output: u32,
    /// Where latents are kept.
    pub state: StateAt,
    /// Which block does which rows of Wq, then of W.
    pub partition: u32,
}

/// Queries that meet latents: `[p, r] = W_h · input` of each head, p of the plain features;
/// `output_h = [U_hᵀ p, turned r]`, where U_h are the rows of `up` that make the head's key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentQuery {
    /// `[lanes, count * (plain + turned), width of input]`.
    pub weight: u32,
    /// Of each head the rows of its key, then those of its value:
    /// `[lanes, count * (plain + value), rank]`.
    pub up: u32,
    /// How r is turned.
    pub rotary: Rotary,
    /// Heads of one lane.
    pub heads: LatentHeads,
    /// What [`LatentDown`] put out.
    pub input: u32,
    /// `[count * (rank + turned)]` a lane.
    pub output: u32,
    /// Which block does which heads.
    pub partition: u32,
}

/// `output_h = softmax(scale · q_h cᵀ) c` over what the pages of `state` keep: each position is
/// read once, as key and as value. What comes of turned keys means nothing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LatentAttend {
    /// Heads of one lane.
    pub heads: LatentHeads,
    /// On scores.
    pub scale: f32,
    /// `[count * (rank + turned)]` a lane.
    pub input: u32,
    /// The same size.
    pub output: u32,
    /// Where latents are kept.
    pub state: StateAt,
}

/// Values of heads: `output_h = V_h · input_h`, where V_h are the rows of `weight` that make the
/// head's value, and of the input the latent's part is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentUp {
    /// As [`LatentQuery::up`].
    pub weight: u32,
    /// Heads of one lane.
    pub heads: LatentHeads,
    /// `[count * (rank + turned)]` a lane.
    pub input: u32,
    /// `[count * value]` a lane.
    pub output: u32,
    /// Which block does which heads.
    pub partition: u32,
}

/// `o_l = W_l · input_l + bias`, joined to the residual streams; kept where a later layer wants it.
/// Where the outputs of several lanes are summed (ranks) the bias is added once.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Project {
    /// `[lanes, hidden, width of input]`.
    pub weight: u32,
    /// `[hidden]`; only with [`Join::Sum`].
    pub bias: Option<u32>,
    /// Attention's or the MLP's output.
    pub input: u32,
    /// Residual streams, read and written.
    pub residual: u32,
    /// How `o` joins them.
    pub join: Join,
    /// Vector that keeps `o` for a later layer.
    pub keep: Option<u32>,
    /// Which block does which rows.
    pub partition: u32,
}

/// How the lanes' outputs o_l of one module join the residual streams x_l.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Join {
    /// `x_l += sum of o_m over all lanes m`: an all-reduce without delay.
    Sum,
    /// `x_l += factor · o_l`.
    Own {
        /// On the lane's own output.
        factor: f32,
    },
    /// `x_l += o_l + sum of the other lanes' outputs` of the same kind of module, `layers` ago.
    Delayed {
        /// Layers since `from` was written, 1 or more.
        layers: u32,
        /// Vector that an earlier step kept.
        from: u32,
    },
}

/// `x_l += norm(sum of W_m · input_m over all lanes m)`: a module whose output is normed before it
/// joins the residual streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProjectNormed {
    /// `[lanes, hidden, width of input]`.
    pub weight: u32,
    /// RMSNorm scale of the output, `[hidden]`.
    pub norm: u32,
    /// Attention's or the MLP's output.
    pub input: u32,
    /// Residual streams, read and written.
    pub residual: u32,
    /// Which block does which rows.
    pub partition: u32,
}

/// `output = gate(W0 · norm(input), W1 · norm(input))`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GateUp {
    /// RMSNorm scale of the input, `[hidden]` or `[lanes, hidden]`; without one it is taken as it
    /// is.
    pub norm: Option<u32>,
    /// Gate and up, `[lanes, ffn, hidden]`.
    pub weights: [u32; 2],
    /// What is made of the gate.
    pub gate: Gate,
    /// A row of `[hidden]`: the output is multiplied by the sigmoid of its product with
    /// `norm(input)` (Qwen's shared expert).
    pub scale: Option<u32>,
    /// Inner width of one lane.
    pub ffn: u32,
    /// Residual streams.
    pub input: u32,
    /// `[ffn]` a lane.
    pub output: u32,
    /// Which block does which rows.
    pub partition: u32,
}

/// Which experts a column goes to: those with the largest scores, made of
/// `logits = W · norm(input) + bias`, equal ones by the lower id. A logit that is NaN makes every
/// factor NaN. Lanes hold the same residual stream (ranks); the first one's is read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Route {
    /// RMSNorm scale of the input, `[hidden]`; without one it is taken as it is.
    pub norm: Option<u32>,
    /// `[experts, hidden]`, shared by the lanes.
    pub weight: u32,
    /// `[experts]`.
    pub bias: Option<u32>,
    /// What scores and factors are made of logits.
    pub scoring: Scoring,
    /// `[experts]`, on the scores for the choice alone; not with a softmax.
    pub correction: Option<u32>,
    /// `[vocab, chosen]`: the experts of each token, as numbers, in place of the largest scores.
    pub by_token: Option<u32>,
    /// The choice is among the experts of some groups; not with a softmax.
    pub groups: Option<ExpertGroups>,
    /// On every factor.
    pub factor: f32,
    /// Experts of the layer.
    pub experts: u32,
    /// Experts of a column.
    pub chosen: u32,
    /// Residual streams.
    pub input: u32,
    /// `[2 * chosen]`, shared by the lanes: ids, ascending, as numbers; then their factors.
    pub output: u32,
    /// Which block does which logits.
    pub partition: u32,
}

/// What the factors of chosen experts are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scoring {
    /// The softmax over all logits, as it is (OLMoE).
    SoftmaxOfAll,
    /// The softmax over the logits of the chosen ones: they sum to 1 (Mixtral, Qwen3, GPT-OSS).
    SoftmaxOfChosen,
    /// Scores and factors are sigmoids of logits (DeepSeek-V3).
    Sigmoid {
        /// Factors are divided by the sum of the chosen ones.
        normed: bool,
    },
    /// The same of `sqrt(ln(1 + e^x))` (DeepSeek-V4).
    SqrtSoftplus {
        /// Factors are divided by the sum of the chosen ones.
        normed: bool,
    },
}

impl Scoring {
    /// Scores are of each logit by itself.
    pub const fn is_single(self) -> bool {
        matches!(self, Self::Sigmoid { .. } | Self::SqrtSoftplus { .. })
    }
}

/// Experts in equal groups, one behind the other. A column chooses among those of the groups whose
/// two best scores have the largest sums, equal ones by the lower number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Groups of the layer, at most 64; divides its experts.
    pub count: u32,
    /// Groups of a column.
    pub chosen: u32,
}

/// For each chosen expert e, the n-th of `choice`:
/// `output[n] = gate(W0_e · norm(input) + b0_e, W1_e · norm(input) + b1_e)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertsGateUp {
    /// RMSNorm scale of the input, `[hidden]`; without one it is taken as it is.
    pub norm: Option<u32>,
    /// Gate and up of expert 0, `[lanes, ffn, hidden]`; those of the others are the tensors behind
    /// it, of the same shape and encoding.
    pub weights: [u32; 2],
    /// Biases of the same, `[experts, lanes, ffn]` in one tensor.
    pub biases: Option<[u32; 2]>,
    /// What is made of gate and up.
    pub gate: Gate,
    /// Inner width of one lane of one expert.
    pub ffn: u32,
    /// Experts of the layer.
    pub experts: u32,
    /// Experts of a column.
    pub chosen: u32,
    /// Residual streams.
    pub input: u32,
    /// What [`Route`] put out.
    pub choice: u32,
    /// `[chosen, ffn]` a lane.
    pub output: u32,
    /// Which block does which rows of every expert: `lanes * ffn` of them.
    pub partition: u32,
}

/// `x += sum over the chosen experts e of factor_e (sum over the lanes of W_e · input_e + b_e)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertsDown {
    /// Matrix of expert 0, `[lanes, hidden, ffn]`; those of the others are the tensors behind it,
    /// of the same shape and encoding.
    pub weight: u32,
    /// Biases, `[experts, hidden]` in one tensor.
    pub bias: Option<u32>,
    /// Inner width of one lane of one expert.
    pub ffn: u32,
    /// Experts of the layer.
    pub experts: u32,
    /// Experts of a column.
    pub chosen: u32,
    /// What [`ExpertsGateUp`] put out.
    pub input: u32,
    /// What [`Route`] put out.
    pub choice: u32,
    /// Residual streams, read and written.
    pub residual: u32,
    /// Which block does which rows.
    pub partition: u32,
}

/// Logits of the columns that want them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// RMSNorm scale of the input.
    pub norm: u32,
    /// The output matrix; its shape depends on `mode`.
    pub weight: u32,
    /// How the lanes are combined.
    pub mode: HeadMode,
    /// Residual streams.
    pub input: u32,
    /// `[vocab]`.
    pub output: u32,
    /// Which block does which rows.
    pub partition: u32,
}

/// Chooses a token for the columns that want one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    /// Logits.
    pub input: u32,
}

/// What the norms of q and k are over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormSpan {
    /// Each head by itself; scales `[heads.dim]`, shared by the heads.
    Head,
    /// All heads at once; scales `[heads.query * heads.dim]` and `[heads.kv * heads.dim]`.
    AllHeads,
}

/// What is made of gate g and up u in a gated MLP.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Gate {
    /// `u g / (1 + e^-g)`.
    Silu,
    /// `u g / (1 + e^-2t)`, `t = sqrt(2 / pi) (g + 0.044715 g^3)`: GELU by its tanh approximation.
    GeluTanh,
    /// `(v + 1) h / (1 + e^(-alpha h))`, `h = min(g, limit)`, `v = max(-limit, min(u, limit))`: the
    /// clamped SwiGLU of GPT-OSS.
    ClampedSwiglu {
        /// On the gate in the exponent.
        alpha: f32,
        /// Above 0.
        limit: f32,
    },
    /// `v h / (1 + e^-h)`, h and v as above (DeepSeek-V4).
    ClampedSilu {
        /// Above 0.
        limit: f32,
    },
}

/// Heads of one lane's attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Heads {
    /// Query heads.
    pub query: u32,
    /// Key/value heads; divides `query`.
    pub kv: u32,
    /// Features of a head; even.
    pub dim: u32,
}

impl Heads {
    /// Numbers of q.
    pub const fn query_width(self) -> u32 {
        self.query * self.dim
    }

    /// Numbers of k, or of v.
    pub const fn kv_width(self) -> u32 {
        self.kv * self.dim
    }

    /// Heads of q, k and v.
    pub const fn all(self) -> u32 {
        self.query + 2 * self.kv
    }
}

/// Layers whose state lies in the same pages: one page holds [`PAGE`] positions of all of them, or
/// what they keep behind its last position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageGroup {
    /// What a layer keeps of a position.
    pub state: StateKind,
    /// Layers of the group.
    pub layers: u32,
    /// Most positions that one of them looks back, the own included; all where there is none. Of
    /// what is recurrent it is 2: what is kept behind the position before says all.
    pub window: Option<u32>,
    /// Pages of the group's pool.
    pub pages: u32,
}

impl PageGroup {
    /// Bytes of one page.
    pub const fn page_bytes(&self) -> u64 {
        self.layers as u64 * self.state.layer_bytes()
    }

    /// A page holds what is kept behind its last position, and is written once that is computed.
    pub const fn is_recurrent(&self) -> bool {
        matches!(self.state, StateKind::Recurrent { .. } | StateKind::Sums { .. })
    }
}

/// What a layer keeps of the positions it has seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StateKind {
    /// For each lane and kv head 64 keys, then 64 values.
    KeysValues {
        /// Format of the numbers.
        dtype: Dtype,
        /// Lanes.
        lanes: u32,
        /// Key/value heads of one lane.
        kv_heads: u32,
        /// Features of a head.
        head_dim: u32,
    },
    /// For each lane and key head [`DeltaHeads::kept`] float32 numbers, which every position
    /// changes. While a sequence runs they are the runner's; a page has a copy of them as they are
    /// behind its last position.
    Recurrent {
        /// Lanes.
        lanes: u32,
        /// Heads of one lane.
        heads: DeltaHeads,
    },
    /// 64 rows that are keys and values of all heads: latents, then turned keys. Lanes share them.
    Latents {
        /// Format of the numbers.
        dtype: Dtype,
        /// Numbers of a position.
        width: u32,
    },
    /// Rows that are keys and values of all heads, one for every so many positions, in the page of
    /// the last of them. Lanes share them.
    Entries {
        /// Format of the numbers.
        dtype: Dtype,
        /// Numbers of an entry.
        width: u32,
        /// Positions of one: divides [`PAGE`], or is whole pages.
        every: u32,
    },
    /// float32 numbers, which every position changes, as [`StateKind::Recurrent`]. Lanes share
    /// them.
    Sums {
        /// How many.
        numbers: u32,
    },
}

impl StateKind {
    /// Bytes of one layer in one page.
    pub const fn layer_bytes(&self) -> u64 {
        match *self {
            Self::KeysValues { dtype, lanes, kv_heads, head_dim } => {
                lanes as u64
                    * kv_heads as u64
                    * head_dim as u64
                    * 2
                    * PAGE as u64
                    * dtype.bytes() as u64
            }
            Self::Recurrent { lanes, heads } => {
                lanes as u64 * heads.keys as u64 * heads.kept() as u64 * 4
            }
            Self::Latents { dtype, width } => width as u64 * PAGE as u64 * dtype.bytes() as u64,
            Self::Entries { dtype, width, every } => {
                width as u64 * (PAGE as u64).div_ceil(every as u64) * dtype.bytes() as u64
            }
            Self::Sums { numbers } => numbers as u64 * 4,
        }
    }
}

/// How [`Head`] combines the lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum HeadMode {
    /// `W · mean_l norm(x_l)`.
    Mean = 0,
    /// `W · norm(sum_l x_l)`.
    SumThenNorm = 1,
    /// Lane l's matrix yields its slice from `norm(x_l)`.
    PerLane = 2,
    /// `W · concat_l norm(x_l)`.
    Concat = 3,
}

/// Sizes that all steps share.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct Dims {
    /// Width of a residual stream.
    pub hidden: u32,
    /// Lanes on this device.
    pub lanes: u32,
    /// Vocabulary.
    pub vocab: u32,
    /// Epsilon of the norms.
    pub eps: f32,
    /// Longest sequence, in positions.
    pub max_positions: u32,
    /// Sequences that can run at once.
    pub slots: u32,
    /// Most columns of one pass: `slots` decoding ones and the rest of a prefill chunk.
    pub columns: u32,
}

impl Dims {
    /// Pages of a longest sequence.
    pub const fn max_pages(&self) -> usize {
        (self.max_positions as usize).div_ceil(PAGE)
    }

    /// Most prompt positions of one pass.
    pub const fn chunk(&self) -> usize {
        (self.columns - self.slots) as usize
    }
}

/// What a device runs. Buffers are given when it starts: `buffers[0]` belongs to the planner
/// (rotary frequencies and the like), the others are weights; pages and vectors are the runner's.
#[derive(Debug, Clone, PartialEq)]
pub struct Program {
    /// Sizes.
    pub dims: Dims,
    /// Blocks (threads on the CPU) it is planned for.
    pub blocks: u32,
    /// What is done, in order.
    pub steps: Vec<Step>,
    /// What is read.
    pub tensors: Vec<Tensor>,
    /// What is computed.
    pub vectors: Vec<Vector>,
    /// What is kept of a sequence. The first group sees everything; it has no layers, and its
    /// pages no bytes, where all layers are windowed.
    pub groups: Vec<PageGroup>,
    /// Row ranges of the blocks: `blocks + 1` ascending ends from a step's `partition` on.
    pub row_partition: Vec<u32>,
}

impl Program {
    /// Steps of a pass of the model: all, or those before [`MtpIn`]. The others are those of a
    /// pass of drafts.
    pub fn model_steps(&self) -> usize {
        let begins = |kind: &StepKind| matches!(kind, StepKind::MtpIn(_));
        let first = self.steps.iter().position(|step| begins(&step.kind));
        first.unwrap_or(self.steps.len())
    }

    /// Whether further tokens can be predicted.
    pub fn predicts(&self) -> bool {
        self.model_steps() < self.steps.len()
    }
}
