//! How a model's work is cut for the monokernel: sizes padded to what the kernel's tiles need,
//! rows dealt out to blocks, each block's line of weights in the order in which it takes them.
//!
//! This is the host's half of `kernels/common/shape.h`. Its results stand among the definitions,
//! and the kernel's `static_assert`s compare them with its own: a difference does not compile.

use std::collections::BTreeSet;
use std::fmt;

use super::machine::{MachineInfo, Platform};
use super::model::Model;
use crate::abi::{HeadMode, PAGE};
use crate::error::{Error, Result};

/// Most columns of a weight pass: the second operand of a matrix unit has eight.
pub const COLUMNS_MAX: u32 = 8;
/// Blocks that split the pages of one kv head, at most. Who merges owns few words where parts are
/// merged by owners; elsewhere a block merges all of its lane's, and more parts cost registers.
const MOST_SPLITS: u32 = 8;
const MOST_SPLITS_MERGED: u32 = 16;
/// Bytes of a block's line from which on the weights, not the exchange, make the step's time: those
/// of a whole 2B are, those of a quarter of an 8B are not.
const LONG_LINE: u64 = 32 << 20;
/// Bytes of a block's line below which the words of a step are waited for more than its weights.
const SHORT_LINE: u64 = 12 << 20;
/// Widest vectors that all blocks may ask for again and again.
const NARROW: u32 = 4096;
/// Bytes of a block's line below which a step is hardly more than its exchanges.
const SHORTEST_LINE: u64 = 6 << 20;

/// What bounds a stage.
#[derive(Debug, Clone, Copy)]
struct Stage {
    /// Bytes, at most.
    slot_bytes: u32,
    /// Tile pairs that a warp holds in registers.
    held: u32,
}

/// How the warps of a block share a matrix of `rows` x `k` (shape.h's `Split`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Split {
    /// Rows of a block.
    pub rows: u32,
    /// Columns.
    pub k: u32,
    /// Warps that share `k`.
    pub k_warps: u32,
    /// Pairs of 16 columns in a stage.
    pub chunk: u32,
    /// Stages.
    pub stages: u32,
    /// Bytes of a stage.
    pub stage_bytes: u32,
}

impl Split {
    /// Warps that share the rows; the others share `k`.
    fn row_warps(rows: u32, k: u32, warps: u32, slot_bytes: u32) -> u32 {
        let tiles_all = rows.div_ceil(16);
        let fits = |w: &u32| {
            warps.is_multiple_of(*w)
                && tiles_all.is_multiple_of(*w)
                && k.is_multiple_of(32 * (warps / w))
                && rows * 64 * (warps / w) <= slot_bytes
        };
        if tiles_all >= warps {
            warps
        } else {
            (1..warps).find(fits).unwrap_or(warps)
        }
    }

    fn new(rows: u32, k: u32, warps: u32, stage: Stage) -> Option<Self> {
        let row_warps = Self::row_warps(rows, k, warps, stage.slot_bytes);
        Self::with_row_warps(rows, k, row_warps, warps, stage)
    }

    fn with_row_warps(rows: u32, k: u32, row_warps: u32, warps: u32, stage: Stage) -> Option<Self> {
        let Stage { slot_bytes, held } = stage;
        let tiles_all = rows.div_ceil(16);
        let k_warps = warps / row_warps;
        let tiles = tiles_all.div_ceil(row_warps);
        let pairs = k / 32 / k_warps;
        let bytes = k_warps * rows * 64;
        let good =
            |c: &u32| pairs.is_multiple_of(*c) && c * bytes <= slot_bytes && c * tiles <= held;
        let chunk = (1..=pairs).rev().find(good).unwrap_or(1);
        let stage_bytes = chunk * bytes;
        let whole = pairs * 32 * k_warps == k && stage_bytes <= slot_bytes;
        whole.then_some(Self { rows, k, k_warps, chunk, stages: pairs / chunk, stage_bytes })
    }

    /// Bytes of the whole matrix in a line.
    pub const fn bytes(&self) -> u64 {
        self.stages as u64 * self.stage_bytes as u64
    }
}

/// One matrix of a layer, by its place in the line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Matrix {
    /// Queries, keys, values.
    Qkv,
    /// Attention's output.
    Output,
    /// Gate and up, row by row in turn.
    GateUp,
    /// The mlp's output.
    Down,
}

/// One of the decode kernels of a cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kind {
    /// Columns of a step.
    pub columns: u32,
    /// Sequences' keys and values come through the ring (stream.h).
    pub streamed: bool,
}

/// The cut of a model for a machine.
#[derive(Debug, Clone, PartialEq)]
pub struct Cut {
    /// Sizes, padded.
    pub hidden: u32,
    /// Features of a head, padded.
    pub head_dim: u32,
    /// MLP width of a lane, padded.
    pub ffn: u32,
    /// Blocks of the grid.
    pub blocks: u32,
    /// Dies among which the machine deals out the grid's blocks; see [`Cut::block_of`].
    pub chiplets: u32,
    /// Warps that compute.
    pub warps: u32,
    /// Bytes of a slot of the ring: of a stage, at most.
    pub slot_bytes: u32,
    /// Blocks that share the pages of a kv head.
    pub splits: u32,
    /// Attention parts are merged by owners first.
    pub merge: bool,
    /// Tile pairs of a stage that a warp holds in registers.
    pub held: u32,
    /// Weight bytes in flight of a block.
    pub in_flight_bytes: u32,
    /// Pages of a longest sequence.
    pub pages_max: u32,
    /// Shared memory of a block at most.
    pub shared_max: u32,
    /// The matrices of a layer.
    pub layer: [(Matrix, Split); 4],
    /// Rows of the head that one pass takes, and the rest.
    pub head: Split,
    /// Passes of `head`.
    pub head_passes: u32,
    /// The rest of the head's rows.
    pub tail: Option<Split>,
    /// Rows of the head a block has.
    pub rows_head: u32,
    /// Columns of the widest kernel; there is one for a single column, too.
    pub columns: u32,
}

/// What shape.h lays out in shared memory besides vectors, parts and ring, about.
const OTHERS_BYTES: u32 = 16 << 10;

/// What a block has of a layer: its rows of each matrix, and their columns, padded.
#[derive(Debug, Clone, Copy)]
struct Rows {
    qkv: u32,
    gate_up: u32,
    /// Of the residual: of attention's output and of the mlp's.
    residual: u32,
    hidden: u32,
    attn: u32,
    ffn: u32,
    warps: u32,
}

impl Rows {
    /// The matrices, as warps share them and stages cut them.
    fn layer(&self, stage: Stage) -> Option<[(Matrix, Split); 4]> {
        let Self { warps, residual, hidden, .. } = *self;
        let split = |rows, k| Split::new(rows, k, warps, stage);
        // A thread owns the same residual rows in both: either of them by rows means both.
        let row_warps = |k| Split::row_warps(residual, k, warps, stage.slot_bytes);
        let by_rows = [self.attn, self.ffn].into_iter().any(|k| row_warps(k) == warps);
        let owned = |k| {
            let row_warps = if by_rows { warps } else { row_warps(k) };
            Split::with_row_warps(residual, k, row_warps, warps, stage)
        };
        Some([
            (Matrix::Qkv, split(self.qkv, hidden)?),
            (Matrix::Output, owned(self.attn)?),
            (Matrix::GateUp, split(self.gate_up, hidden)?),
            (Matrix::Down, owned(self.ffn)?),
        ])
    }

    /// Bytes of a layer.
    fn bytes(&self) -> u64 {
        let of = |rows: u32, k: u32| 2 * u64::from(rows) * u64::from(k);
        of(self.qkv + self.gate_up, self.hidden) + of(self.residual, self.attn + self.ffn)
    }

    /// Bytes of weights that a ring of such slots holds in `room`: stages fill a slot or do not.
    fn held_by_ring(&self, stage: Stage, room: u32) -> u64 {
        let stages = |layer: [(Matrix, Split); 4]| layer.iter().map(|(_, s)| s.stages).sum::<u32>();
        let Some(stages) = self.layer(stage).map(stages) else { return 0 };
        u64::from(room / stage.slot_bytes) * self.bytes() / u64::from(stages)
    }

    /// Slots of a size that did well on one H200 (benches/gpu/NOTES.md), the one whose ring holds
    /// more, or smaller ones where shared memory has no room for three beside the vectors; the
    /// kernel, which knows the room exactly, refuses fewer than two.
    fn slot_bytes(&self, held: u32, shared_bytes: u32) -> u32 {
        let vectors = 2 * (self.hidden + self.attn.max(self.ffn));
        let room = shared_bytes.saturating_sub(vectors + OTHERS_BYTES);
        let usual: &[u32] = if self.warps == 12 { &[18 << 10, 24 << 10] } else { &[16 << 10] };
        let fits = |slot_bytes: &&u32| 3 * **slot_bytes <= room;
        let holds =
            |slot_bytes: &&u32| self.held_by_ring(Stage { slot_bytes: **slot_bytes, held }, room);
        let best = usual.iter().filter(fits).max_by_key(holds);
        let smaller = [12 << 10, 8 << 10, 6 << 10].into_iter().find(|size| 3 * size <= room);
        best.copied().or(smaller).unwrap_or(6 << 10)
    }
}

/// Tile pairs of a stage that a warp holds in registers. Twelve warps have fewer registers each,
/// and where steps are short several stages are held.
fn held(model: &Model, rows: &Rows) -> u32 {
    if rows.warps > 8 || u64::from(model.layers) * rows.bytes() < LONG_LINE {
        2
    } else {
        4
    }
}

/// Rows of the head that a block of a lane of `each` has, and their columns.
fn head(model: &Model, each: u32, hidden: u32) -> (u32, u32) {
    let per_lane = model.head_mode == HeadMode::PerLane;
    let blocks = if per_lane { each } else { each * model.lanes * model.ranks };
    let concat = model.head_mode == HeadMode::Concat;
    (share(model.vocab, blocks, 2), if concat { model.lanes_all() } else { 1 } * hidden)
}

fn share(rows: u32, blocks: u32, unit: u32) -> u32 {
    rows.div_ceil(blocks).next_multiple_of(unit)
}

impl Cut {
    /// The cut that reads the fewest bytes a block, among the block counts the machine can hold.
    ///
    /// # Errors
    /// [`Error::InvalidProgram`] where no cut fits, with what does not.
    pub fn new(model: &Model, machine: &MachineInfo, positions: u32) -> Result<Self> {
        let most = machine.multiprocessors / model.lanes;
        let least = model.kv_heads.max(1);
        if most < least {
            return refuse(format!(
                "{} lanes of {} kv heads need {} multiprocessors, {} has {}",
                model.lanes,
                model.kv_heads,
                model.lanes * least,
                machine.name,
                machine.multiprocessors
            ));
        }
        let from = least.max(most * 3 / 4);
        let all = (from..=most).filter_map(|n| {
            // Wider slots only where a stage needs them: fewer of them fit.
            let least = [0, 24 << 10, 32 << 10, 48 << 10];
            least.iter().find_map(|w| Self::with_blocks(model, machine, positions, n, *w))
        });
        // Equal bytes: the fewer blocks the better, as each one more only waits and polls. Parts of
        // attention that cannot be merged by owners cost a narrow model about a twentieth.
        let owners = |c: &Self| c.warps == 8 && model.lanes_all() == 1;
        let cost = |c: &Self| c.line_bytes(model) * if owners(c) && !c.merge { 21 } else { 20 };
        let best = all.min_by_key(|c| (cost(c), c.blocks));
        let none = || {
            let Model { lanes, hidden, heads, kv_heads, head_dim, ffn, .. } = model;
            refuse(format!(
                "no cut fits: {lanes} lanes of hidden {hidden}, {heads}/{kv_heads} heads of \
                 {head_dim}, ffn {ffn} on {} multiprocessors with {} bytes of shared memory; query \
                 heads a kv head are at most 8",
                machine.multiprocessors, machine.shared_bytes
            ))
        };
        best.map_or_else(none, Ok)
    }

    /// With `each` blocks a lane and slots of at least `slot_least` bytes; none if that is no cut.
    fn with_blocks(
        model: &Model,
        m: &MachineInfo,
        positions: u32,
        each: u32,
        slot_least: u32,
    ) -> Option<Self> {
        let wide = [model.hidden, model.heads * model.head_dim, model.ffn];
        let warps = if wide.iter().all(|w| w.is_multiple_of(384)) { 12 } else { 8 };
        let unit = 4 * warps.max(8);
        let hidden = model.hidden.next_multiple_of(unit);
        let head_dim = model.head_dim.next_multiple_of(32);
        let ffn = model.ffn.next_multiple_of(unit);
        let attn = model.heads * head_dim;
        if !attn.is_multiple_of(unit) || model.heads / model.kv_heads > 8 {
            return None;
        }
        let rows = Rows {
            qkv: share(attn + 2 * model.kv_heads * head_dim, each, 2),
            gate_up: share(2 * ffn, each, 4),
            residual: share(hidden, each, 2),
            hidden,
            attn,
            ffn,
            warps,
        };
        let held = held(model, &rows);
        let slot_bytes = rows.slot_bytes(held, m.shared_bytes).max(slot_least);
        let stage = Stage { slot_bytes, held };
        let split = |rows, k| Split::new(rows, k, warps, stage);
        let layer = rows.layer(stage)?;
        let blocks = each * model.lanes;
        let (rows_head, width) = head(model, each, hidden);
        let pass_rows = rows_head.min(16 * warps);
        let rest = rows_head % pass_rows;
        let tail = if rest > 0 { Some(split(rest, width)?) } else { None };
        let merge = model.lanes_all() == 1 && warps == 8 && (attn / 2).is_multiple_of(each);
        let mut cut = Self {
            hidden,
            head_dim,
            ffn,
            blocks,
            chiplets: m.chiplets.max(1),
            warps,
            slot_bytes,
            splits: if merge { MOST_SPLITS_MERGED } else { MOST_SPLITS }.min(each / model.kv_heads),
            merge,
            held,
            in_flight_bytes: 0,
            pages_max: positions.div_ceil(PAGE as u32),
            shared_max: m.shared_bytes,
            layer,
            head: split(pass_rows, width)?,
            head_passes: rows_head / pass_rows,
            tail,
            rows_head,
            columns: 1,
        };
        cut.in_flight_bytes = cut.in_flight(model);
        let fits = |c: &u32| cut.shared_bytes(width, attn, *c) <= m.shared_bytes;
        let room = slot_least == 0 || fits(&1);
        cut.columns = [COLUMNS_MAX, 4, 2].into_iter().find(fits).unwrap_or(1);
        room.then_some(cut)
    }

    /// Shared memory of the vectors at work.
    fn vector_bytes(&self, width: u32, attn: u32, columns: u32) -> u32 {
        // Where every warp has a range of its own, several columns' vectors stay where they are.
        let kept = |n: usize, k| {
            if columns > 1 && self.layer[n].1.k_warps == self.warps {
                0
            } else {
                k
            }
        };
        let (wide, narrow) = (width.max(self.hidden), kept(1, attn).max(kept(3, self.ffn)));
        let pad = if columns > 1 { 32 } else { 0 };
        // One place for both, one after the other, unless only the wide one needs a place.
        let room = if columns == 1 { wide + narrow } else { wide.max(narrow) + 2 * pad };
        2 * room * columns
    }

    /// Shared memory with two slots of the ring, about: shape.h knows it exactly and refuses less.
    fn shared_bytes(&self, width: u32, attn: u32, columns: u32) -> u32 {
        let parts = |s: &Split| if s.k_warps > 1 { 4 * s.k_warps * s.rows * columns } else { 0 };
        let of = |n: usize| parts(&self.layer[n].1);
        let tail = self.tail.as_ref().map_or(0, parts);
        let parts = of(0).max(of(2)).max(parts(&self.head)).max(tail) + of(1).max(of(3));
        self.vector_bytes(width, attn, columns) + parts + 2 * self.slot_bytes + OTHERS_BYTES
    }

    /// The kernels of this cut.
    pub fn kernels(&self, model: &Model, platform: Platform) -> Vec<Kind> {
        // Bits do not depend on neighbours: where sequences are long, all kernels stream, or none.
        let streamed =
            platform != Platform::Hip && [1, self.columns].iter().all(|c| self.streams(model, *c));
        let mut all = Vec::new();
        if !streamed || self.streams_from(model) > 0 {
            all.push(Kind { columns: 1, streamed: false });
        }
        if streamed {
            all.push(Kind { columns: 1, streamed });
        }
        if self.columns > 1 {
            all.push(Kind { columns: self.columns, streamed });
        }
        all
    }

    /// Whether pages fit the ring's slots, and shared memory what joins them (stream.h).
    fn streams(&self, model: &Model, columns: u32) -> bool {
        let attn = model.heads * self.head_dim;
        let concat = model.head_mode == HeadMode::Concat;
        let width = if concat { model.lanes_all() } else { 1 } * self.hidden;
        let group = model.heads / model.kv_heads;
        let heads = if columns > 1 { self.warps * (group + 2) * self.head_dim * 2 } else { 0 };
        let join = self.warps * (self.head_dim / 16) * 8 * group.div_ceil(2) * 16;
        let there = heads + join <= self.vector_bytes(width, attn, columns);
        let own = if there { 0 } else { heads + join };
        PAGE as u32 * self.head_dim * 2 <= self.slot_bytes
            && self.shared_bytes(width, attn, columns) + own <= self.shared_max
    }

    /// The first position that the kernel of one column with streamed keys is for. Where a step is
    /// short, loads are sooner as long as no block has two pages; then both make the same bits.
    /// Measured on one H200, shape by shape (benches/gpu/NOTES.md).
    pub fn streams_from(&self, model: &Model) -> u32 {
        let long = self.line_bytes(model) >= LONG_LINE;
        if long {
            0
        } else {
            self.splits * PAGE as u32
        }
    }

    /// Whether a gather asks for all its words at once, and once more for what was late: where the
    /// chain of exchanges weighs more than the weights. Measured on one H200, shape by shape.
    fn retries(&self, model: &Model, columns: u32) -> bool {
        let line = self.line_bytes(model);
        let narrow = model.lanes == 1 && self.hidden.max(self.ffn) <= NARROW;
        columns == 1 && (line < SHORT_LINE || narrow && line < LONG_LINE)
    }

    /// Weight bytes in flight of a block: more hide the memory's latency, but stand before every
    /// word that somebody waits for. Measured on one H200, shape by shape (benches/gpu/NOTES.md).
    fn in_flight(&self, model: &Model) -> u32 {
        let line = self.line_bytes(model);
        match self.warps {
            _ if line < SHORTEST_LINE => 36 << 10,
            12 => 72 << 10,
            _ if self.hidden < 4096 => 56 << 10,
            _ => 144 << 10,
        }
    }

    /// Stages of a product that are in registers before its vector has arrived.
    fn ahead(&self, model: &Model) -> u32 {
        if self.line_bytes(model) < LONG_LINE {
            4
        } else {
            1
        }
    }

    /// Whether stages stand side by side in the ring, and more of gate and up in registers: where a
    /// rank waits for others about as long as its weights take, the stream stands still once the
    /// ring is full, so that what it holds counts. Twelve warps have no registers for that.
    fn packed(&self, model: &Model) -> bool {
        let line = self.line_bytes(model);
        model.ranks > 1
            && model.lanes == 1
            && self.warps == 8
            && (SHORT_LINE..LONG_LINE).contains(&line)
    }

    /// Blocks of a lane.
    pub const fn blocks_a_lane(&self, model: &Model) -> u32 {
        self.blocks / model.lanes
    }

    /// Which block of the work a block of the grid is (place.h): numbered die by die, so that those
    /// of a lane, who exchange most, share as few second-level caches as can be.
    pub const fn block_of(&self, grid_block: u32) -> u32 {
        let (die, row) = (grid_block % self.chiplets, grid_block / self.chiplets);
        let (each, more) = (self.blocks / self.chiplets, self.blocks % self.chiplets);
        die * each + if die < more { die } else { more } + row
    }

    /// The dies on which a lane's blocks lie.
    pub fn dies_of(&self, model: &Model, lane: u32) -> BTreeSet<u32> {
        let each = self.blocks_a_lane(model);
        let own = |block: u32| self.block_of(block) / each == lane;
        (0..self.blocks).filter(|block| own(*block)).map(|block| block % self.chiplets).collect()
    }

    /// Where lanes lie, to print; nothing where there is one die.
    pub fn placement(&self, model: &Model) -> String {
        if self.chiplets == 1 {
            return String::new();
        }
        let lane = |lane| {
            let dies = self.dies_of(model, lane);
            let ends = dies.first().zip(dies.last()).map_or((0, 0), |(a, b)| (*a, *b));
            match ends {
                (one, other) if one == other => format!("lane {lane} on {one}"),
                (from, to) => format!("lane {lane} on {from} to {to}"),
            }
        };
        let lanes: Vec<_> = (0..model.lanes).map(lane).collect();
        format!("placed    {} chiplets: {}\n", self.chiplets, lanes.join(", "))
    }

    /// Rows of a block in one matrix.
    pub fn rows(&self, matrix: Matrix) -> u32 {
        self.layer[matrix as usize].1.rows
    }

    /// Bytes of a layer in a block's line.
    pub fn layer_bytes(&self) -> u64 {
        self.layer.iter().map(|(_, s)| s.bytes()).sum()
    }

    /// Bytes of a block's line: what it reads a token.
    pub fn line_bytes(&self, model: &Model) -> u64 {
        let tail = self.tail.map_or(0, |t| t.bytes());
        u64::from(model.layers) * self.layer_bytes()
            + u64::from(self.head_passes) * self.head.bytes()
            + tail
    }

    /// Stages and bytes of each segment of a step, in order; the first `layers * 4` are layers.
    pub fn segments(&self, model: &Model) -> Vec<[u32; 2]> {
        let layer = self.layer.iter().map(|(_, s)| [s.stages, s.stage_bytes]);
        let mut all: Vec<_> = (0..model.layers).flat_map(|_| layer.clone()).collect();
        all.extend((0..self.head_passes).map(|_| [self.head.stages, self.head.stage_bytes]));
        all.extend(self.tail.map(|t| [t.stages, t.stage_bytes]));
        all
    }

    /// Places of a vector's words, which layers use in turn (shape.h).
    fn turns(&self, model: &Model) -> u32 {
        let before = self.blocks_a_lane(model) - 1;
        let qkv = (model.heads + 2 * model.kv_heads) * self.head_dim;
        let awaited = before * self.rows(Matrix::Qkv) < qkv
            || before * self.rows(Matrix::Output) < self.hidden
            || before * self.rows(Matrix::GateUp) < 2 * self.ffn;
        if awaited && model.layers > 2 {
            2
        } else {
            model.layers
        }
    }

    /// Words of 8 bytes of the exchange, at least as many as shape.h lays out.
    pub fn words(&self, model: &Model, columns: u32) -> u64 {
        let (c, each) = (u64::from(columns), u64::from(self.blocks_a_lane(model)));
        let all = u64::from(self.turns(model)) * u64::from(model.lanes);
        let words = |matrix, a_word: u64| {
            c * (u64::from(self.rows(matrix)) * each / a_word).next_multiple_of(16)
        };
        let hidden = words(Matrix::Output, 2);
        let attn = u64::from(model.heads * self.head_dim);
        let parts = u64::from(self.splits) * c * attn;
        let vectors = 2 * hidden + words(Matrix::Qkv, 2) + words(Matrix::GateUp, 4) + c * attn / 2;
        let (ranks, lanes) = (u64::from(model.ranks), u64::from(model.lanes_all()));
        let others = (2 * u64::from(model.turns_other()) + 1) * lanes * hidden;
        let choice =
            u64::from(self.blocks) * ranks * c * (12 + 2 * 13 * 48 + 4) + 2 * 13 * c * 8 + 16;
        all * (vectors + parts) + others + choice
    }

    /// Threads of a block: teams of 32 that compute, a warp of the machine's that copies, one that
    /// watches the host.
    pub const fn threads(&self, platform: Platform, warp: u32) -> u32 {
        let helpers = match platform {
            Platform::Cuda => 4,
            Platform::Hip | Platform::Sim => 2,
        };
        self.warps * 32 + helpers * warp
    }

    /// The definitions in front of the sources.
    pub fn defines(&self, model: &Model, kind: Kind) -> Vec<(String, String)> {
        let Kind { columns, streamed } = kind;
        let scale = std::f64::consts::LOG2_E / f64::from(model.head_dim).sqrt();
        let float = |v: f64| format!("{v:e}f");
        let head_mode = model.head_mode as u32;
        let retries = self.retries(model, columns);
        let all = [
            ("LAYERS", model.layers.to_string()),
            ("HIDDEN", self.hidden.to_string()),
            ("HIDDEN_REAL", model.hidden.to_string()),
            ("HEADS", model.heads.to_string()),
            ("KV_HEADS", model.kv_heads.to_string()),
            ("HEAD_DIM", self.head_dim.to_string()),
            ("HEAD_DIM_REAL", model.head_dim.to_string()),
            ("QUERY_SCALE", float(scale)),
            ("FFN", self.ffn.to_string()),
            ("VOCAB", model.vocab.to_string()),
            ("LANES", model.lanes.to_string()),
            ("RANKS", model.ranks.to_string()),
            ("VOCAB_ALL", model.vocab_all.to_string()),
            ("HEAD_MODE", head_mode.to_string()),
            ("NORM_LANES", model.norm_lanes.to_string()),
            ("HEAD_NORM", model.head_norm.to_string()),
            ("BIAS", model.bias.to_string()),
            ("EPS", float(f64::from(model.eps))),
            ("BLOCKS", self.blocks.to_string()),
            ("WARPS", self.warps.to_string()),
            ("COLUMNS", columns.to_string()),
            ("STREAMED", streamed.to_string()),
            ("SLOT_BYTES", self.slot_bytes.to_string()),
            ("SPLITS", self.splits.to_string()),
            ("MERGE", u32::from(self.merge).to_string()),
            ("TURNS_OTHER", model.turns_other().to_string()),
            ("POLL", u32::from(!retries).to_string()),
            ("AHEAD", self.ahead(model).to_string()),
            ("PACKED", self.packed(model).to_string()),
            ("HELD", self.held.to_string()),
            ("NO_WAITS", "false".to_owned()),
            ("NO_STREAM", "false".to_owned()),
            ("NO_RANKS", "false".to_owned()),
            ("PAGES_MAX", self.pages_max.to_string()),
            ("REST_GATHER", if retries { 100 } else { 250 }.to_string()),
            ("REST_MERGE", "0".to_owned()),
            ("SHARED_MAX", self.shared_max.to_string()),
            ("ROWS_QKV", self.rows(Matrix::Qkv).to_string()),
            ("ROWS_O", self.rows(Matrix::Output).to_string()),
            ("ROWS_GU", self.rows(Matrix::GateUp).to_string()),
            ("ROWS_HEAD", self.rows_head.to_string()),
            ("LINE_BYTES", self.line_bytes(model).to_string()),
            ("WORDS", self.words(model, columns).to_string()),
            ("ARGS_BYTES", size_of::<super::wire::Args>().to_string()),
        ];
        // Where there is one die, nothing of this is in the source.
        let dies = (self.chiplets > 1).then(|| ("CHIPLETS", self.chiplets.to_string()));
        all.into_iter().chain(dies).map(|(name, value)| (format!("KIE_{name}"), value)).collect()
    }
}

impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "cut       {} blocks of {} warps, {} columns, {} KB slots, {} KB in flight, \
             {} splits{}",
            self.blocks,
            self.warps,
            self.columns,
            self.slot_bytes / 1024,
            self.in_flight_bytes / 1024,
            self.splits,
            if self.merge { ", merged by owners" } else { "" }
        )?;
        for (matrix, s) in &self.layer {
            writeln!(
                f,
                "  {matrix:?}: {} rows x {}, {} k-warps, {} stages of {} bytes",
                s.rows, s.k, s.k_warps, s.stages, s.stage_bytes
            )?;
        }
        writeln!(f, "  head: {} rows in {} passes", self.rows_head, self.head_passes)
    }
}

fn refuse<T>(detail: String) -> Result<T> {
    Err(Error::InvalidProgram { step: usize::MAX, detail })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::shapes::{amd, model, nvidia};
    use super::*;

    #[test]
    fn short_steps_hold_more_stages_before_the_words_are_there() {
        for (name, held, ahead, poll, rest) in [
            ("lane", "2", "4", "0", "100"),
            ("1b", "2", "4", "1", "250"),
            ("2b", "2", "1", "1", "250"),
            ("8b", "4", "1", "1", "250"),
        ] {
            let cut = Cut::new(&model(name), &nvidia(), 4096).unwrap();
            let of = |columns| cut.defines(&model(name), Kind { columns, streamed: false });
            let value = |list: &[(String, String)], of: &str| {
                list.iter().find(|(name, _)| name == of).unwrap().1.clone()
            };
            let one = of(1);
            let seen =
                ["KIE_HELD", "KIE_AHEAD", "KIE_POLL", "KIE_REST_GATHER"].map(|n| value(&one, n));
            assert_eq!(seen, [held, ahead, poll, rest], "{name}");
            assert_eq!(value(&of(8), "KIE_POLL"), "1", "{name}: several columns wait for one word");
        }
    }

    /// What each of so many machines has of a model: heads, mlp and vocabulary, or lanes.
    fn rank(name: &str, ranks: u32) -> Model {
        let whole = match name {
            "plain" => {
                Model { heads: 32, kv_heads: 16, ffn: 12_288, vocab: 32_000, ..model("lane") }
            }
            _ => model(name),
        };
        if whole.lanes > 1 {
            return Model { ranks, lanes: whole.lanes / ranks, ..whole };
        }
        Model {
            ranks,
            heads: whole.heads / ranks,
            kv_heads: whole.kv_heads / ranks,
            ffn: whole.ffn / ranks,
            vocab: whole.vocab / ranks,
            ..whole
        }
    }

    #[test]
    fn a_rank_is_cut_by_what_it_holds() {
        // Name, ranks: KB of a slot, KB in flight, stages ahead, first position with pages through
        // the ring, whether a gather asks for all at once.
        for (name, ranks, wanted) in [
            ("8b", 1, (16, 144, 1, 0, false)),
            ("8b", 2, (16, 144, 1, 0, false)),
            ("8b", 4, (16, 144, 4, 512, true)),
            ("1b", 1, (16, 56, 4, 1024, false)),
            ("1b", 4, (16, 36, 4, 512, true)),
            ("2b", 1, (24, 72, 1, 0, false)),
            ("2b", 4, (24, 72, 4, 512, true)),
            ("2b", 8, (18, 36, 4, 512, true)),
            ("plain", 4, (24, 72, 4, 512, true)),
            ("lane", 1, (18, 36, 4, 512, true)),
        ] {
            let model = rank(name, ranks);
            let cut = Cut::new(&model, &nvidia(), 4096).unwrap();
            let seen = (
                cut.slot_bytes >> 10,
                cut.in_flight_bytes >> 10,
                cut.ahead(&model),
                cut.streams_from(&model),
                cut.retries(&model, 1),
            );
            assert_eq!(seen, wanted, "{name} on {ranks}: {cut}");
        }
    }

    #[test]
    fn ranks_whose_stream_stands_hold_more_of_it() {
        let all = [("8b", 1), ("8b", 2), ("8b", 4), ("plain", 4), ("1b", 4), ("2b", 4), ("2b", 8)];
        for (name, ranks) in all {
            let model = rank(name, ranks);
            let cut = Cut::new(&model, &nvidia(), 4096).unwrap();
            assert_eq!(cut.packed(&model), (name, ranks) == ("8b", 4), "{name} on {ranks}: {cut}");
        }
    }

    #[test]
    fn blocks_are_numbered_die_by_die() {
        let cut = |model: &Model, machine: &MachineInfo| Cut::new(model, machine, 4096).unwrap();
        for name in ["2b", "lane", "1b"] {
            let model = model(name);
            for chiplets in 1..=12 {
                let cut = Cut { chiplets, ..cut(&model, &amd()) };
                let mut seen: Vec<_> = (0..cut.blocks).map(|block| cut.block_of(block)).collect();
                seen.sort_unstable();
                assert!(seen.into_iter().eq(0..cut.blocks), "{name}, {chiplets}");
            }
        }
        // Eight lanes on eight dies: each has one, so nothing of a gather inside a lane leaves it.
        let model = model("2b");
        let amd = cut(&model, &amd());
        assert_eq!(amd.chiplets, 8);
        for lane in 0..8 {
            assert_eq!(amd.dies_of(&model, lane), BTreeSet::from([lane]), "{amd}");
        }
        let wide = |lane| {
            Cut { chiplets: 8, ..amd.clone() }.dies_of(&Model { lanes: 2, ..model.clone() }, lane)
        };
        assert_eq!(wide(1), BTreeSet::from([4, 5, 6, 7]));
        assert!(amd
            .placement(&model)
            .starts_with("placed    8 chiplets: lane 0 on 0, lane 1 on 1"));
        let nvidia = cut(&model, &nvidia());
        assert!((0..nvidia.blocks).all(|block| nvidia.block_of(block) == block));
        assert_eq!(nvidia.placement(&model), "");
        let named = |cut: &Cut| {
            let defines = cut.defines(&model, Kind { columns: 1, streamed: false });
            defines.iter().any(|(name, _)| name == "KIE_CHIPLETS")
        };
        assert!(named(&amd) && !named(&nvidia));
    }

    #[test]
    fn slots_widen_only_where_a_stage_needs_it() {
        let cut = |m: &Model| Cut::new(m, &nvidia(), 4096).unwrap();
        for (name, slot_bytes) in [("2b", 24), ("lane", 18), ("1b", 16), ("8b", 16)] {
            assert_eq!(cut(&model(name)).slot_bytes, slot_bytes << 10, "{name}");
        }
        let sizes =
            |hidden, heads, kv_heads, ffn| Model { hidden, heads, kv_heads, ffn, ..model("8b") };
        // The widths of dense models of 24 and 32 thousand million weights.
        for wide in [sizes(5120, 32, 8, 32_768), sizes(5120, 40, 8, 27_648)] {
            let cut = cut(&wide);
            assert!((24..=48).contains(&(cut.slot_bytes >> 10)), "{cut}");
        }
        let error = Cut::new(&sizes(4096, 32, 2, 14_336), &nvidia(), 4096).unwrap_err();
        assert!(error.to_string().contains("32/2 heads"), "{error}");
    }
}
