//! Where stored weights go: [`Cut`]'s rows in the order in which blocks take them, sixteen rows by
//! sixteen columns a tile, in the order of a matrix unit's first operand, as halves. The bytes are
//! moved on the device (`kernels/common/pack.h`, driven by [`super::upload`]); here are the tables
//! that tell it, for every stored row, where it goes.
//!
//! A *unit* is 16 rows x 32 columns, two tiles of 32 bytes a row: lane `4 g + t` of a team takes,
//! of the rows `2 g` and `2 g + 1`, the columns `8 t .. 8 t + 4` (first tile) and the four after
//! them. What no stored row goes to is padding and stays zero.

use std::collections::BTreeMap;
use std::ops::Range;

use half::{bf16, f16};

use super::cut::{Cut, Matrix, Split};
use super::model::Model;
use super::wire::Wire;
use crate::abi::{Codes, HeadMode, Program, Tensor};
use crate::cpu::matmul::Matrix as Stored;
use crate::cpu::numbers::row_to_f32;
use crate::device::Buffer;

/// A program's weights, as they are stored.
pub struct Weights<'a> {
    /// The program.
    pub program: &'a Program,
    /// Its buffers.
    pub buffers: &'a [Buffer],
    /// The program as the monokernel sees it.
    pub model: &'a Model,
    /// Its cut.
    pub cut: &'a Cut,
    /// The machine among those that run it together.
    pub rank: u32,
}

/// Where a stored row goes (pack.h's `PackPlace`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Place {
    /// Bytes from [`Target::to`].
    pub at: u64,
    /// Bytes from the first tile of a unit to its second.
    pub half: u32,
    padding: u32,
}

// SAFETY: a u64 and two u32s.
unsafe impl Wire for Place {}

impl Place {
    /// No place: the row is another machine's.
    pub const NOWHERE: Self = Self::new(u64::MAX, 0);

    const fn new(at: u64, half: u32) -> Self {
        Self { at, half, padding: 0 }
    }

    /// Row `row` of a block's rows of one matrix.
    fn in_units(split: &Split, row: u32) -> Self {
        let here = (split.rows - row / 16 * 16).min(16);
        let at = row / 16 * 1024 + row % 16 / 2 * 64 + row % 2 * 4;
        Self::new(u64::from(at), here / 2 * 64)
    }
}

/// Places of the rows of a stored matrix, from row `first` on.
#[derive(Debug, Default, PartialEq)]
pub struct Table {
    /// The first row that goes anywhere.
    pub first: u32,
    /// One a row.
    pub places: Vec<Place>,
}

impl Table {
    fn of(rows: &[(u32, Place)]) -> Self {
        let first = rows.iter().map(|(row, _)| *row).min().unwrap_or(0);
        let end = rows.iter().map(|(row, _)| *row + 1).max().unwrap_or(0);
        let mut places = vec![Place::NOWHERE; (end - first) as usize];
        for (row, place) in rows {
            debug_assert_eq!(places[(row - first) as usize], Place::NOWHERE, "row {row} twice");
            places[(row - first) as usize] = *place;
        }
        Self { first, places }
    }

    /// The row behind the last one that goes anywhere.
    pub fn end(&self) -> u32 {
        self.first + self.places.len() as u32
    }
}

/// Numbers of a row in equal parts, each padded to a width of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parts {
    /// How many.
    pub count: u32,
    /// Numbers of each.
    pub real: u32,
    /// The same with padding.
    pub padded: u32,
    /// Numbers of the stored row before the first part.
    pub skip: u32,
}

/// One use of a stored matrix.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Target {
    /// Index of the table of its rows.
    pub table: usize,
    /// Its columns.
    pub parts: Parts,
    /// How blocks share its units; none: halves, row after row.
    pub split: Option<Split>,
    /// Address that places count from.
    pub to: u64,
}

/// Everything that goes anywhere.
#[derive(Debug, Default)]
pub struct Packing {
    /// Places of rows, shared by all layers.
    pub tables: Vec<Table>,
    /// What is made of each stored matrix, by tensor and lane.
    pub tasks: BTreeMap<(u32, u32), Vec<Target>>,
}

/// Rows with their places, by some key and the stored lane.
type Found<K> = BTreeMap<(K, u32), Vec<(u32, Place)>>;

impl Packing {
    /// A table of rows.
    fn table(&mut self, rows: &[(u32, Place)]) -> usize {
        self.tables.push(Table::of(rows));
        self.tables.len() - 1
    }
}

/// Addresses of what is packed.
#[derive(Debug, Clone, Copy)]
pub struct To {
    /// All lines.
    pub line: u64,
    /// The embedding table, `[vocab][hidden]`.
    pub embed: u64,
    /// Norm scales, `[2 layers + 1][norm lanes][hidden]`.
    pub norms: u64,
}

impl Weights<'_> {
    /// A tensor of the program.
    pub fn tensor(&self, index: u32) -> &Tensor {
        &self.program.tensors[index as usize]
    }

    /// A stored matrix.
    pub fn stored(&self, tensor: u32, lane: u32) -> Stored<'_> {
        Stored::of(self.tensor(tensor), lane as usize, self.buffers)
    }

    /// Where a feature of a turned head lies in the checkpoint: pairs are neighbours on the device.
    fn feature(&self, at: u32) -> Option<u32> {
        let dim = self.model.head_dim;
        match (at < dim, self.model.interleaved) {
            (false, _) => None,
            (true, true) => Some(at),
            (true, false) => Some(at / 2 + at % 2 * (dim / 2)),
        }
    }

    /// Which query and kv heads of the stored matrices this machine's lanes have.
    fn heads(&self) -> [Range<u32>; 2] {
        self.model.heads_of(self.rank)
    }

    /// Row `row` of q, k and v one after another, heads padded: (which, row in the stored matrix).
    fn qkv_row(&self, row: u32) -> Option<(usize, u32)> {
        let (m, dim) = (self.model, self.cut.head_dim);
        let (head, at) = (row / dim, row % dim);
        let [query, kv] = self.heads();
        let real = |heads: Range<u32>, head: u32, at: u32| {
            let head = heads.start + head;
            (head < heads.end).then_some(head * m.head_dim + at)
        };
        if head < m.heads {
            Some((0, real(query, head, self.feature(at)?)?))
        } else if head < m.heads + m.kv_heads {
            Some((1, real(kv, head - m.heads, self.feature(at)?)?))
        } else if head < m.heads + 2 * m.kv_heads && at < m.head_dim {
            Some((2, real(kv, head - m.heads - m.kv_heads, at)?))
        } else {
            None
        }
    }

    /// Row `row` (over all blocks of a lane) of a layer's matrix: which of its tensors, the lane
    /// in it, the row. The row may lie behind the tensor's last.
    fn source(&self, matrix: Matrix, lane: u32, row: u32) -> Option<(usize, u32, u32)> {
        let m = self.model;
        let of = |which: usize, row: u32, rows: u32| {
            let (lane, row) = self.lane_row(lane, row, rows);
            (which, lane, row)
        };
        match matrix {
            Matrix::Qkv => {
                let (which, row) = self.qkv_row(row)?;
                Some((which, if m.sliced { 0 } else { self.lane_all(lane) }, row))
            }
            Matrix::Output | Matrix::Down => {
                let lane = if m.sliced { 0 } else { self.lane_all(lane) };
                (row < m.hidden).then_some((0, lane, row))
            }
            Matrix::GateUp => (row / 2 < m.ffn).then(|| of((row % 2) as usize, row / 2, m.ffn)),
        }
    }

    /// A row of a lane's `rows` rows: of its own matrix, or of its slice of the whole one.
    fn lane_row(&self, lane: u32, row: u32, rows: u32) -> (u32, u32) {
        match self.model.sliced {
            true => (0, self.lane_all(lane) * rows + row),
            false => (self.lane_all(lane), row),
        }
    }

    /// A lane of this machine among all lanes.
    fn lane_all(&self, lane: u32) -> u32 {
        self.rank * self.model.lanes + lane
    }

    /// Tensors of a layer's matrix.
    fn tensors(&self, layer: usize, matrix: Matrix) -> Vec<u32> {
        let l = &self.model.layer[layer];
        match matrix {
            Matrix::Qkv => l.qkv.to_vec(),
            Matrix::Output => vec![l.outputs[0]],
            Matrix::GateUp => l.gate_up.to_vec(),
            Matrix::Down => vec![l.outputs[1]],
        }
    }

    /// Columns of a layer's matrix. A machine has one lane of a sliced matrix.
    fn parts(&self, matrix: Matrix) -> Parts {
        let (m, c) = (self.model, self.cut);
        let slice = if m.sliced { self.rank } else { 0 };
        let [query, _] = self.heads();
        let heads = query.end - query.start;
        let (count, real, padded, skip) = match matrix {
            Matrix::Qkv | Matrix::GateUp => (1, m.hidden, c.hidden, 0),
            Matrix::Output => (heads, m.head_dim, c.head_dim, query.start * m.head_dim),
            Matrix::Down => (1, m.ffn, c.ffn, slice * m.ffn),
        };
        Parts { count, real, padded, skip }
    }

    /// A row of the hidden width.
    fn whole(&self) -> Parts {
        Parts { count: 1, real: self.model.hidden, padded: self.cut.hidden, skip: 0 }
    }

    /// Everything that is packed, and where it goes.
    pub fn packing(&self, to: To) -> Packing {
        let mut all = Packing::default();
        self.layers(&mut all, to.line);
        self.head(&mut all, to.line);
        let row_bytes = 2 * u64::from(self.cut.hidden);
        let rows = |count: u32| -> Vec<_> {
            (0..count).map(|n| (n, Place::new(u64::from(n) * row_bytes, 0))).collect()
        };
        let plain = |table, to| Target { table, parts: self.whole(), split: None, to };
        let table = all.table(&rows(self.program.dims.vocab));
        all.tasks.entry((self.model.embed, 0)).or_default().push(plain(table, to.embed));
        let table = all.table(&rows(self.model.norm_lanes));
        let norms = self.model.layer.iter().flat_map(|l| l.norms).chain([self.model.final_norm]);
        for (n, norm) in norms.enumerate() {
            let to = to.norms + n as u64 * u64::from(self.model.norm_lanes) * row_bytes;
            all.tasks.entry((norm, 0)).or_default().push(plain(table, to));
        }
        all
    }

    /// The layers' parts of all lines.
    fn layers(&self, all: &mut Packing, line: u64) {
        let each = self.cut.blocks_a_lane(self.model);
        let line_bytes = self.cut.line_bytes(self.model);
        let mut before = 0;
        for (matrix, split) in &self.cut.layer {
            let mut found: Found<usize> = BTreeMap::new();
            for block in 0..self.cut.blocks {
                let (lane, rank) = (block / each, block % each);
                for row in 0..split.rows {
                    let source = self.source(*matrix, lane, rank * split.rows + row);
                    let Some((which, lane, from)) = source else { continue };
                    let mut place = Place::in_units(split, row);
                    place.at += u64::from(block) * line_bytes + before;
                    found.entry((which, lane)).or_default().push((from, place));
                }
            }
            let (parts, split) = (self.parts(*matrix), Some(*split));
            for ((which, lane), rows) in found {
                let table = all.table(&rows);
                for layer in 0..self.model.layers as usize {
                    let to = line + layer as u64 * self.cut.layer_bytes();
                    let tensor = self.tensors(layer, *matrix)[which];
                    let target = Target { table, parts, split, to };
                    all.tasks.entry((tensor, lane)).or_default().push(target);
                }
            }
            before += split.map_or(0, |s| s.bytes());
        }
    }

    /// The head's part of all lines.
    fn head(&self, all: &mut Packing, line: u64) {
        let (m, c) = (self.model, self.cut);
        let per_lane = m.head_mode == HeadMode::PerLane;
        let each = c.blocks_a_lane(m);
        let line_bytes = c.line_bytes(m);
        let passes = (0..c.head_passes).map(|_| c.head).chain(c.tail);
        let passes: Vec<Split> = passes.collect();
        // Full passes first, then the tail.
        let mut found: Found<bool> = BTreeMap::new();
        for block in 0..c.blocks {
            let (lane, seat) = match per_lane {
                true => (block / each, block % each),
                false => (0, self.rank * c.blocks + block),
            };
            let mut before = u64::from(m.layers) * c.layer_bytes();
            let mut first = seat * c.rows_head;
            for split in &passes {
                for row in 0..split.rows.min(m.vocab.saturating_sub(first)) {
                    let (lane, from) = match per_lane {
                        true => self.lane_row(lane, first + row, m.vocab),
                        false => (0, first + row),
                    };
                    let mut place = Place::in_units(split, row);
                    place.at += u64::from(block) * line_bytes + before;
                    found.entry((*split != c.head, lane)).or_default().push((from, place));
                }
                before += split.bytes();
                first += split.rows;
            }
        }
        let count = if m.head_mode == HeadMode::Concat { m.lanes_all() } else { 1 };
        let parts = Parts { count, ..self.whole() };
        for ((tail, lane), rows) in found {
            let split = if tail { c.tail } else { Some(c.head) };
            let target = Target { table: all.table(&rows), parts, split, to: line };
            all.tasks.entry((m.head, lane)).or_default().push(target);
        }
    }

    /// A row's first number beyond float16, which has no place on a device.
    pub fn beyond_half(&self, tensor: u32, lane: u32, row: u32) -> Option<f32> {
        let stored = self.stored(tensor, lane);
        let mut floats = vec![0.0; stored.cols];
        row_of(&stored, row as usize, &mut floats);
        floats.into_iter().find(|x| x.abs() > f16::MAX.to_f32())
    }

    /// Norm scales of heads as halves, `[layers][q, k][head_dim]`, in the device's order.
    pub fn head_norms(&self) -> Vec<u8> {
        let mut floats = vec![0.0; self.model.head_dim as usize];
        let mut out = Vec::new();
        for norm in self.model.layer.iter().flat_map(|l| l.head_norms) {
            row_of(&Stored::of(self.tensor(norm), 0, self.buffers), 0, &mut floats);
            for at in 0..self.cut.head_dim {
                let value = self.feature(at).map_or(0.0, |f| floats[f as usize]);
                out.extend(f16::from_f32(value).to_le_bytes());
            }
        }
        out
    }

    /// Biases of q, k, v as floats, `[layers][lanes][rows of all blocks]`.
    pub fn biases(&self) -> Vec<u8> {
        let (m, c) = (self.model, self.cut);
        let rows = c.rows(Matrix::Qkv) * c.blocks_a_lane(m);
        let mut out = Vec::new();
        for layer in &m.layer {
            for lane in 0..m.lanes {
                let lane = self.lane_all(lane);
                let values = layer.biases.map(|bias| self.bias(bias, lane));
                for row in 0..rows {
                    let value =
                        self.qkv_row(row).map_or(0.0, |(which, row)| values[which][row as usize]);
                    out.extend(value.to_le_bytes());
                }
            }
        }
        out
    }

    /// A lane's numbers of a bias: a row a lane, or one row for all.
    fn bias(&self, index: u32, lane: u32) -> Vec<f32> {
        let tensor = self.tensor(index);
        let stored = Stored::of(tensor, 0, self.buffers);
        let mut floats = vec![0.0; stored.cols];
        row_of(&stored, if tensor.rows > 1 { lane as usize } else { 0 }, &mut floats);
        floats
    }
}

/// A row as numbers. Float32 checkpoints are rounded to bfloat16, as the field publishes them in 16
/// bits: half the digits, but no range is lost, and the result is that of the published model.
fn row_of(stored: &Stored<'_>, row: usize, out: &mut [f32]) {
    row_to_f32(stored, row, out);
    if stored.codes == Codes::F32 {
        out.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
    }
}
