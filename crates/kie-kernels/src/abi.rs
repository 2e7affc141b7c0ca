//! Every byte that crosses between host and device is defined here, once.
//!
//! A [`Program`] is the plan as data: the only thing a runner reads besides its buffers and its
//! mailbox. It is a list of [`Step`]s over [`Tensor`]s (what is read-only), [`Vector`]s (what one
//! column of a pass computes) and KV pages. A *column* is one position of one sequence; a *pass*
//! runs all steps over up to `Dims::columns` columns at once.

pub use crate::encoding::{Codes, Dtype, Encoding};
pub use crate::sample::Sampling;

/// Positions of a KV page.
pub const PAGE: usize = 64;
/// "No tensor", "no vector", "no window" in a table index.
pub const NONE: u32 = u32::MAX;
/// Most stop ids of a request (end-of-sequence ids included).
pub const MAX_STOP_IDS: usize = 64;
/// Most entries of a request's logit bias.
pub const MAX_BIAS: usize = 1024;
/// Most alternatives a token can report.
pub const MAX_ALTERNATIVES: usize = 20;
/// Layer groups with page pools of their own: 0 sees everything, 1 is windowed.
pub const GROUPS: usize = 2;

/// How the numbers of a matrix lie in its buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Layout {
    /// Row after row, as checkpoints store them. What the CPU reads in place.
    RowMajor = 0,
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

/// A float32 activation, `lanes` x `width` numbers a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Vector {
    /// Lanes that have their own copy.
    pub lanes: u32,
    /// Numbers a lane.
    pub width: u32,
}

/// What a step does. One row here, one function in each runner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum Op {
    /// `output[l] = weights[0][token]` for every lane.
    Embed = 0,
    /// `q, k, v = W · norm(input) + bias`, optional norm of each q and k head, rotary; q goes to
    /// `output`, k and v into the pages of `group`.
    Qkv = 1,
    /// `output = softmax(q kᵀ / sqrt(head_dim)) v` over the pages of `group`.
    Attend = 2,
    /// `o = W · input`; kept in `partial` where a later layer wants it; then the residual stream
    /// `output += mix_own · o + others` (see [`Step::mix_delay`]).
    Project = 3,
    /// `output = silu(W0 · norm(input)) * (W1 · norm(input))`.
    GateUp = 4,
    /// Logits of the columns that want them, into `output`.
    Head = 5,
    /// Chooses a token for the columns that want one.
    Sample = 6,
}

/// How [`Op::Head`] combines the lanes.
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

/// One fused operation over all lanes, all columns and all blocks.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct Step {
    /// What to do.
    pub op: Op,
    /// Layer it belongs to; layers count from 0, the head is one past the last.
    pub layer: u16,
    /// Matrices: (q, k, v), (gate, up), or one.
    pub weights: [u32; 3],
    /// Biases of the same, or [`NONE`].
    pub biases: [u32; 3],
    /// RMSNorm scale applied to the input, or [`NONE`].
    pub norm: u32,
    /// Norm scales of each q and each k head, or [`NONE`].
    pub head_norms: [u32; 2],
    /// Vector read.
    pub input: u32,
    /// Vector written.
    pub output: u32,
    /// Vector that keeps this module's own output for a later layer, or [`NONE`].
    pub partial: u32,
    /// Vector with the other lanes' outputs to add (of this layer or an earlier one), or [`NONE`].
    pub others: u32,
    /// Factor on the lane's own output.
    pub mix_own: f32,
    /// Layers since `others` was written; 0 is an ordinary sum over lanes; -1: none is added.
    pub mix_delay: i32,
    /// Page group of the layer.
    pub group: u32,
    /// Index of the layer inside its group.
    pub group_layer: u32,
    /// Positions a query sees, itself included, or [`NONE`].
    pub window: u32,
    /// First of `blocks + 1` entries in [`Program::splits`]: which block does which rows.
    pub split: u32,
}

/// Sizes that inner loops depend on.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct Dims {
    /// Width of a residual stream.
    pub hidden: u32,
    /// Lanes on this device.
    pub lanes: u32,
    /// Query heads of one lane.
    pub heads: u32,
    /// Key/value heads of one lane.
    pub kv_heads: u32,
    /// Features of a head.
    pub head_dim: u32,
    /// MLP width of one lane.
    pub ffn: u32,
    /// Vocabulary.
    pub vocab: u32,
    /// Epsilon of the norms.
    pub eps: f32,
    /// 1: rotary pairs are (2j, 2j+1); 0: (j, j + head_dim/2).
    pub rope_interleaved: u32,
    /// How the head combines lanes.
    pub head_mode: HeadMode,
    /// Number format of the KV pages.
    pub kv_dtype: Dtype,
    /// Longest sequence, in positions.
    pub max_positions: u32,
    /// Sequences that can run at once.
    pub slots: u32,
    /// Most columns of one pass: `slots` decoding ones and the rest of a prefill chunk.
    pub columns: u32,
    /// Layers of each page group.
    pub group_layers: [u32; GROUPS],
    /// Pages of each group's pool.
    pub group_pages: [u32; GROUPS],
}

impl Dims {
    /// Numbers of k (or of v) that one position adds in one layer, over the device's lanes.
    pub const fn kv_width(&self) -> usize {
        (self.lanes * self.kv_heads * self.head_dim) as usize
    }

    /// Bytes of one page of a group: for each layer, lane and kv head 64 keys, then 64 values.
    pub const fn page_bytes(&self, group: usize) -> u64 {
        self.group_layers[group] as u64
            * self.kv_width() as u64
            * 2
            * PAGE as u64
            * self.kv_dtype.bytes() as u64
    }

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
    /// Row boundaries, `blocks + 1` a step.
    pub splits: Vec<u32>,
    /// Rotary inverse frequencies, float32 `[head_dim / 2]`, in radians a position.
    pub rope: u32,
}

/// What a request wants of the device. Written by the host before the command that names the slot.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct SlotParams {
    /// Prompt tokens.
    pub prompt: u32,
    /// Positions whose KV is already in the pages.
    pub cached: u32,
    /// Most tokens to generate.
    pub max_new: u32,
    /// Tokens before which no stop id may be chosen.
    pub min_new: u32,
    /// Entries in the slot's stop ids.
    pub stop_ids: u32,
    /// Entries in the slot's logit bias.
    pub bias: u32,
    /// How tokens are chosen.
    pub sampling: Sampling,
}

/// What the device is told to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum CommandKind {
    /// Prefill the slot's prompt from `cached`, then decode until a stop rule hits.
    Start = 1,
    /// End the slot after the token in flight.
    Cancel = 2,
    /// Run prompt positions `a .. a + b` as prompt chunk and leave their logits in the mailbox.
    LogitsPrefill = 3,
    /// The same for the single position `a`, by the decode path.
    LogitsDecode = 4,
}

/// One order to the device, 64 bytes.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub struct Command {
    /// What to do.
    pub kind: CommandKind,
    /// For which slot.
    pub slot: u32,
    /// First argument.
    pub a: u32,
    /// Second argument.
    pub b: u32,
}

/// Why a slot ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum SlotEnd {
    /// Still running.
    Running = 0,
    /// A stop id was chosen; it is the last record.
    StopId = 1,
    /// `max_new` tokens were made.
    Length = 2,
    /// A cancel took effect.
    Cancelled = 3,
    /// Logits were not finite: the weights or the conversion are at fault.
    NotFinite = 4,
    /// A logits command is done.
    Logits = 5,
}

/// One token as the device reports it.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct Record {
    /// The token.
    pub token: u32,
    /// Natural log of its probability under the raw logits; 0 where not asked for.
    pub logprob: f32,
    /// CLOCK_MONOTONIC when it was chosen.
    pub t_ns: u64,
}
