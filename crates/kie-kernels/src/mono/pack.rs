//! Where stored weights go: a [`Partition`]'s rows in the order in which blocks take them, sixteen
//! rows by sixteen columns a tile, in the order of a matrix unit's first operand, as halves or as
//! the codes that are stored (`kernels/common/ops`) with scales behind those of a stage. The bytes
//! are moved on the device (`kernels/common/pack.h`, driven by [`super::upload`]); here are
//! the tables that tell it, for every stored row, where it goes.
//!
//! A *unit* is 16 rows x 32 columns, two tiles of 32 bytes a row: lane `4 g + t` of a team takes,
//! of the rows `2 g` and `2 g + 1`, the columns `8 t .. 8 t + 4` (first tile) and the four after
//! them. What no stored row goes to is padding and stays zero.

mod entries;

use std::collections::BTreeMap;
use std::ops::Range;

use half::{bf16, f16};

use super::lower::delta::{self, Delta};
use super::lower::extras::Extras;
use super::lower::matrix::Matrix;
use super::lower::model::{Class, Model, Stored as Coding};
use super::lower::partition::{ClassPartition, Partition};
use super::lower::parts::Parts;
use super::lower::segments::{bank_offsets, layer_offsets, matrix_offset, page_offsets};
use super::lower::tiling::{StoredBits, Tiling};
use super::wire::PackPlace as Place;
use crate::abi::{Codes, HeadMode, Layout, Program, Tensor, NONE};
use crate::buffer::Buffer;
use crate::error::{Error, Result};
use crate::matrix::{row_to_f32, rows_of_columns, Matrix as Stored};

/// A weight that float16 does not hold; `far`: its value in words, if known.
pub fn beyond(far: &str, tensor: u32, row: u32) -> Error {
    Error::InvalidProgram {
        step: usize::MAX,
        detail: format!(
            "a weight{far} is beyond float16 (tensor {tensor}, row {row}); run on the CPU, or \
             convert the checkpoint"
        ),
    }
}

/// A program's weights, as they are stored.
pub struct Weights<'a> {
    /// The program.
    pub program: &'a Program,
    /// Its buffers.
    pub buffers: &'a [Buffer],
    /// The program as the monokernel sees it.
    pub model: &'a Model,
    /// Its partition.
    pub partition: &'a Partition,
    /// The machine among those that run it together.
    pub rank: u32,
}

impl Place {
    /// No place: the row is another machine's.
    pub const NOWHERE: Self = Self::new(u64::MAX, 0);

    /// Two rows that wrote the same word would race, if for the same bits.
    pub const NO_SCALE: u32 = u32::MAX;

    const fn new(at: u64, half: u32) -> Self {
        Self { at, half, scale: 0 }
    }

    /// Of codes, with the block's scale `scale`.
    fn coded(split: &Tiling, at: u32, scale: u32) -> Self {
        let at = split.codes_at() + at;
        let scale = split.scales_at() + scale * split.encoding.scale_bytes();
        Self { at: u64::from(at), half: 0, scale: scale.wrapping_sub(at) }
    }

    /// Row `row` of a block's rows of one matrix, which has the block's scale `scale`, as the first
    /// or not.
    fn in_units(split: &Tiling, row: u32, (scale, is_first): (u32, bool)) -> Self {
        let here = (split.rows - row / 16 * 16).min(16);
        let pairs = row % 16 / 2 * (4 * split.encoding.lane_bytes());
        let tile = row / 16 * (16 * split.encoding.row_bytes()) + pairs;
        match split.encoding.bits {
            StoredBits::F16 => Self::new(u64::from(tile + row % 2 * 4), here / 2 * 64),
            StoredBits::F8 | StoredBits::I8 => {
                let place = Self::coded(split, tile + row % 2 * 2, scale);
                Self { scale: if is_first { place.scale } else { Self::NO_SCALE }, ..place }
            }
            StoredBits::I8Half => Self::coded(split, tile + row % 2 * 2, row),
            StoredBits::I4 | StoredBits::E2m1 | StoredBits::I4Half | StoredBits::I4Zeros => {
                Self::coded(split, tile + row % 2 * 4, row)
            }
        }
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

/// One use of a stored matrix.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Target {
    /// Index of the table of its rows.
    pub table: usize,
    /// Its columns.
    pub parts: Parts,
    /// How blocks share its units; none: halves, row after row.
    pub split: Option<Tiling>,
    /// Address that places count from.
    pub to: u64,
    /// The matrix is packed turned around, from this row on: its rows are columns of what is
    /// multiplied, and the table has a place for each of its columns.
    pub turned: Option<u32>,
}

impl Target {
    /// The stored rows that something is made of.
    pub fn rows(&self, table: &Table) -> Range<u32> {
        self.turned.map_or(table.first..table.end(), |first| first..first + self.parts.real)
    }

    /// What the device is told of so many rows behind the first: whether they are columns, the
    /// first one's number among these, and bytes from the table's beginning to its places.
    pub fn place_of(&self, rows: u32) -> (u32, u32, u64) {
        match self.turned {
            None => (0, 0, u64::from(rows) * size_of::<Place>() as u64),
            Some(_) => (1, rows, 0),
        }
    }
}

/// Everything that goes anywhere.
#[derive(Debug, Default)]
pub struct Packing {
    /// Places of rows, shared by all layers.
    pub tables: Vec<Table>,
    /// What is made of each stored matrix, by tensor and lane.
    pub tasks: BTreeMap<(u32, u32), Vec<Target>>,
    /// Which of a stage's scales each row has, `[blocks][index bytes]` (shape.h).
    pub scale_index: Vec<u8>,
}

/// The scales that a block's rows of a matrix have, in the order in which the rows name them.
#[derive(Default)]
struct Scales {
    seen: Vec<(usize, u32, u32)>,
}

impl Scales {
    /// Number of the scale of a row of a stored matrix, and whether no row before had it.
    fn of(&mut self, split: &Tiling, scale: (usize, u32, u32)) -> (u32, bool) {
        let at = self.seen.iter().position(|seen| *seen == scale).unwrap_or(self.seen.len());
        let is_first = at == self.seen.len();
        if is_first {
            self.seen.push(scale);
        }
        debug_assert!(!split.encoding.scaled() || at < split.encoding.scale_rows as usize);
        (at as u32, is_first)
    }
}

/// Rows with their places, by some key and the stored lane.
type Found<K> = BTreeMap<(K, u32), Vec<(u32, Place)>>;

impl Packing {
    /// A table of rows.
    fn table(&mut self, rows: &[(u32, Place)]) -> usize {
        self.tables.push(Table::of(rows));
        self.tables.len() - 1
    }

    /// Says which of a stage's scales a row has, where its index byte stands.
    fn tell_scale(&mut self, tiling: &Tiling, at: u32, scale: u32) {
        if tiling.index_bytes() > 0 {
            self.scale_index[at as usize] = scale as u8;
        }
    }
}

/// Rows of the passes before each.
fn rows_before(passes: &[Tiling]) -> impl Iterator<Item = u32> + '_ {
    passes.iter().scan(0, |done, split| Some(std::mem::replace(done, *done + split.rows)))
}

/// Addresses of what is packed.
#[derive(Debug, Clone, Copy)]
pub struct To {
    /// All lines.
    pub line: u64,
    /// The embedding table, `[vocab][hidden]`.
    pub embed: u64,
    /// Experts, of each layer that has them `[experts][blocks][piece]`.
    pub experts: u64,
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
    fn feature(&self, class: &Class, at: u32) -> Option<u32> {
        self.turned(class.head_dim - class.still, at)
            .or((at >= class.head_dim - class.still && at < class.head_dim).then_some(at))
    }

    /// The same where so many features turn.
    fn turned(&self, dim: u32, at: u32) -> Option<u32> {
        match (at < dim, self.model.interleaved) {
            (false, _) => None,
            (true, true) => Some(at),
            (true, false) => Some(at / 2 + at % 2 * (dim / 2)),
        }
    }

    /// A class, and its part of the partition.
    fn class(&self, class: usize) -> (&Class, &ClassPartition) {
        (&self.model.classes[class], &self.partition.classes[class])
    }

    /// Row `row` of q, k and v one after another, heads padded: (which, row in the stored matrix).
    fn qkv_row(&self, class: usize, row: u32) -> Option<(usize, u32)> {
        let (c, part) = self.class(class);
        if let Some(delta) = &c.delta {
            return Some((0, self.delta_row(class, delta, row)?));
        }
        let (head, at) = (row / part.head_dim, row % part.head_dim);
        let [query, kv] = self.model.heads_of(self.rank, c);
        // A query head's rows, then those of its gate.
        let each = if c.gated { 2 } else { 1 };
        let (values, gates) = (c.heads + c.kv_heads, c.heads + 2 * c.kv_heads);
        let real = |heads: Range<u32>, head: u32, at: u32, each: u32| {
            let head = heads.start + head;
            (head < heads.end).then_some(head * each * c.head_dim + at)
        };
        if head < c.heads {
            Some((0, real(query, head, self.feature(c, at)?, each)?))
        } else if head < values {
            Some((1, real(kv, head - c.heads, self.feature(c, at)?, 1)?))
        } else if head < gates && at < c.head_dim {
            Some((2, real(kv, head - values, at, 1)?))
        } else if c.gated && head < gates + c.heads && at < c.head_dim {
            Some((0, real(query, head - gates, c.head_dim + at, each)?))
        } else {
            None
        }
    }

    /// Row `row` of a matrix that attention over latents has, as [`Weights::source`] says it, but
    /// for the keys', which are turned around.
    fn latent_source(&self, class: usize, matrix: Matrix, row: u32) -> Option<(usize, u32, u32)> {
        let (c, part) = self.class(class);
        if c.compressed.is_some() {
            return self.compressed_source(class, matrix, row);
        }
        let (of, padded) = (c.latent?, part.latent?);
        let heads = self.model.heads_of(self.rank, c)[0].clone();
        // The program's head, and the row of the head.
        let of_head = |rows: u32| {
            let head = heads.start + row / rows;
            (head < heads.end).then_some((head, row % rows))
        };
        match matrix {
            Matrix::LatentDown => {
                // Dealt out to all machines.
                let tiling = part.tiling(matrix);
                let row = row + self.rank * self.partition.blocks * tiling.rows;
                if row < padded.query_rank {
                    return (row < of.query_rank).then_some((0, 0, row));
                }
                let at = row - padded.query_rank;
                if at < padded.rank {
                    return (at < of.rank).then_some((1, 0, at));
                }
                Some((1, 0, of.rank + self.turned(of.turned, at - padded.rank)?))
            }
            Matrix::QueryUp => {
                let (head, at) = of_head(padded.query())?;
                let first = head * (of.plain + of.turned);
                if at < padded.plain {
                    return (at < of.plain).then_some((0, 0, first + at));
                }
                Some((0, 0, first + of.plain + self.turned(of.turned, at - padded.plain)?))
            }
            Matrix::ValueUp => {
                let (head, at) = of_head(part.head_dim)?;
                let first = head * (of.plain + c.head_dim) + of.plain;
                (at < c.head_dim).then_some((0, 0, first + at))
            }
            _ => None,
        }
    }

    /// What would make heads' keys of latents, turned around: each head's rows are its columns.
    fn keys(&self, all: &mut Packing, line: u64, class: usize) {
        let (c, part) = self.class(class);
        let Some((of, padded)) = c.latent.zip(part.latent) else { return };
        let tiling = *part.tiling(Matrix::KeyUp);
        let stream_bytes = self.partition.stream_bytes(self.model);
        let offsets = layer_offsets(self.model, self.partition);
        let before = matrix_offset(self.partition, class, Matrix::KeyUp);
        let parts = Parts { count: 1, real: of.plain, padded: padded.plain, skip: 0 };
        let scale_rows = block_rows(self.model.stored(class, Matrix::KeyUp));
        let index = self.partition.index_offset(class, Matrix::KeyUp);
        let mut scales: BTreeMap<u32, Scales> = BTreeMap::new();
        for (at, head) in self.model.heads_of(self.rank, c)[0].clone().enumerate() {
            let mut places = Vec::new();
            for column in 0..of.rank {
                let row = at as u32 * padded.rank + column;
                let (block, row) = (row / tiling.rows, row % tiling.rows);
                let of_block = scales.entry(block).or_default();
                let scale = of_block.of(&tiling, (0, at as u32, column / scale_rows));
                all.tell_scale(
                    &tiling,
                    block * self.partition.index_bytes() + index + row,
                    scale.0,
                );
                let mut place = Place::in_units(&tiling, row, scale);
                place.at += u64::from(block) * stream_bytes;
                places.push((column, place));
            }
            let table = all.table(&places);
            let turned = Some(head * (of.plain + c.head_dim));
            for (layer, offset) in self.model.layer.iter().zip(&offsets) {
                let Some(its) = layer.latent.filter(|_| layer.class == class) else { continue };
                let to = line + offset + before;
                let target = Target { table, parts, split: Some(tiling), to, turned };
                all.tasks.entry((its.up, 0)).or_default().push(target);
            }
        }
    }

    /// Row `row` (over all blocks of a lane) of a layer's matrix: which of its tensors, the lane
    /// in it, the row. The row may lie behind the tensor's last.
    fn source(
        &self,
        class: usize,
        matrix: Matrix,
        lane: u32,
        row: u32,
    ) -> Option<(usize, u32, u32)> {
        let (m, c) = (self.model, &self.model.classes[class]);
        let gate_up = |ffn: u32| {
            let (lane, from) = self.lane_row(lane, row / 2, ffn);
            (row / 2 < ffn).then_some(((row % 2) as usize, lane, from))
        };
        match matrix {
            Matrix::Qkv => {
                let (which, row) = self.qkv_row(class, row)?;
                Some((which, if m.sliced { 0 } else { self.lane_all(lane) }, row))
            }
            // Each machine has all of it.
            Matrix::MtpIn => (row < m.hidden).then_some((0, 0, row)),
            Matrix::Output | Matrix::SharedDown | Matrix::Down => {
                let lane = if m.sliced { 0 } else { self.lane_all(lane) };
                (row < m.hidden).then_some((0, lane, row))
            }
            Matrix::LatentDown | Matrix::QueryUp | Matrix::KeyUp | Matrix::ValueUp => {
                self.latent_source(class, matrix, row)
            }
            // They have places of their own, see `gates`.
            Matrix::Gates => None,
            // Each machine has all of it.
            Matrix::Router => {
                let of = c.experts.as_ref()?;
                let last = row == of.count && of.logits() > row;
                (row < of.count).then_some((0, 0, row)).or(last.then_some((1, 0, 0)))
            }
            Matrix::SharedGateUp => gate_up(c.experts?.shared?.ffn),
            Matrix::GateUp => gate_up(c.ffn),
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

    /// Columns of a layer's matrix. A machine has one lane of a sliced matrix.
    fn parts(&self, class: usize, matrix: Matrix) -> Parts {
        let (m, (c, part)) = (self.model, self.class(class));
        let slice = if m.sliced { self.rank } else { 0 };
        let [query, _] = m.heads_of(self.rank, c);
        let heads = query.end - query.start;
        let (count, real, padded, skip) = match matrix {
            Matrix::MtpIn => return Parts { count: 2, ..self.whole() },
            Matrix::Qkv
            | Matrix::Gates
            | Matrix::LatentDown
            | Matrix::Router
            | Matrix::SharedGateUp
            | Matrix::GateUp => {
                return self.whole();
            }
            Matrix::QueryUp | Matrix::ValueUp | Matrix::Output if c.compressed.is_some() => {
                let of = c.compressed.zip(part.compressed);
                let (of, padded) = of.expect("sizes of the class");
                return padded.parts(&of, (matrix, slice));
            }
            Matrix::QueryUp | Matrix::KeyUp | Matrix::ValueUp => {
                let latent = c.latent.zip(part.latent).expect("latents of the class");
                let (of, padded) = latent;
                match matrix {
                    Matrix::QueryUp => (1, of.query_rank, padded.query_rank, 0),
                    Matrix::KeyUp => (1, of.plain, padded.plain, 0),
                    _ => (1, of.rank, padded.rank, 0),
                }
            }
            Matrix::Output => (heads, c.head_dim, part.head_dim, query.start * c.head_dim),
            Matrix::SharedDown => {
                let ffn = c.experts.and_then(|e| e.shared).map_or(0, |shared| shared.ffn);
                (1, ffn, part.experts.map_or(0, |e| e.shared), slice * ffn)
            }
            Matrix::Down => (1, c.ffn, part.ffn, slice * c.ffn),
        };
        Parts { count, real, padded, skip }
    }

    /// A row of the hidden width.
    fn whole(&self) -> Parts {
        Parts { count: 1, real: self.model.hidden, padded: self.partition.hidden, skip: 0 }
    }

    /// Everything that is packed, and where it goes.
    pub fn packing(&self, to: To) -> Packing {
        let index = (self.partition.blocks * self.partition.index_bytes()) as usize;
        let mut all = Packing { scale_index: vec![0; index], ..Packing::default() };
        self.layers(&mut all, to);
        self.head(&mut all, to.line);
        let row_bytes = 2 * u64::from(self.partition.hidden);
        let rows = |count: u32| -> Vec<_> {
            (0..count).map(|n| (n, Place::new(u64::from(n) * row_bytes, 0))).collect()
        };
        let plain =
            |table, to| Target { table, parts: self.whole(), split: None, to, turned: None };
        let table = all.table(&rows(self.program.dims.vocab));
        all.tasks.entry((self.model.embed, 0)).or_default().push(plain(table, to.embed));
        all
    }

    /// The layers' parts of all lines, and their experts.
    fn layers(&self, all: &mut Packing, to: To) {
        for class in 0..self.model.classes.len() {
            for (matrix, _) in self.partition.classes[class].matrices() {
                match matrix {
                    Matrix::KeyUp => self.keys(all, to.line, class),
                    Matrix::Gates => self.gates(all, to.line, class),
                    _ => self.matrix(all, to, class, matrix),
                }
            }
        }
    }

    /// What gates a delta rule, in all layers of a class: b and a of each unit's head, so that
    /// those of a head have as many places as it has units.
    fn gates(&self, all: &mut Packing, line: u64, class: usize) {
        let (c, part) = self.class(class);
        let Some(delta) = &part.delta else { return };
        let (tiling, stream_bytes) =
            (*part.tiling(Matrix::Gates), self.partition.stream_bytes(self.model));
        let before = matrix_offset(self.partition, class, Matrix::Gates);
        let offsets = layer_offsets(self.model, self.partition);
        for split in 0..delta.unit.splits {
            let place = |head: u32| {
                let (key, inside, shared) = self.delta_head(c, head)?;
                let unit = head * delta.unit.splits + split;
                let (block, own) = (unit / delta.each, unit % delta.each);
                let one = |which: u32| {
                    let mut place = Place::in_units(&tiling, 2 * own + which, (0, true));
                    place.at += u64::from(block) * stream_bytes;
                    (2 * key * shared + which * shared + inside, place)
                };
                Some([one(0), one(1)])
            };
            let rows: Vec<_> = (0..c.heads).filter_map(place).flatten().collect();
            let table = all.table(&rows);
            for (layer, offset) in self.model.layer.iter().zip(&offsets) {
                if layer.class == class {
                    let to = line + offset + before;
                    let (parts, split) = (self.whole(), Some(tiling));
                    let target = Target { table, parts, split, to, turned: None };
                    let tensor = layer.extras.delta.gates;
                    all.tasks.entry((tensor, 0)).or_default().push(target);
                }
            }
        }
    }

    /// A lane's head of v in the program: its key head, its number there, and that head's heads.
    fn delta_head(&self, c: &Class, head: u32) -> Option<(u32, u32, u32)> {
        let [values, _] = self.model.heads_of(self.rank, c);
        let shared = c.heads_all[0] / c.heads_all[1];
        let real = values.start + head;
        (real < values.end).then_some((real / shared, real % shared, shared))
    }

    /// Row `row` of what a delta rule takes in, heads of v padded, in the stored matrix.
    fn delta_row(&self, class: usize, delta: &Delta, row: u32) -> Option<u32> {
        let (c, part) = self.class(class);
        let (group, width, keys) = (c.group(), part.head_dim, 2 * delta.key_dim);
        let each = delta.rows(group, width);
        let (head, at) = (row / each, row % each);
        let [_, key_heads] = self.model.heads_of(self.rank, c);
        let key = key_heads.start + head;
        if key >= key_heads.end {
            return None;
        }
        let shared_all = c.heads_all[0] / c.heads_all[1];
        let begin = key * delta.rows(shared_all, c.head_dim);
        let Some(at) = at.checked_sub(keys) else { return Some(begin + at) };
        // Of v, then of z.
        let (which, own, at) = (at / width / group, at / width % group, at % width);
        let (_, inside, _) = self.delta_head(c, head * group + own)?;
        let stored = begin + keys + (which * shared_all + inside) * c.head_dim + at;
        (at < c.head_dim).then_some(stored)
    }

    /// What a layer's delta rule has besides products.
    fn delta_numbers(
        &self,
        class: usize,
        at: &Extras,
        of: &delta::Tensors,
        put: &mut dyn FnMut(u32, &mut dyn Iterator<Item = f32>),
    ) {
        let (c, part) = self.class(class);
        let Some(delta) = &c.delta else { return };
        let [conv, decay, bias, norm] =
            [of.conv, of.decay, of.bias, of.norm].map(|tensor| self.numbers(tensor));
        let (group, width, key_dim) = (c.group(), part.head_dim, delta.key_dim);
        let [_, key_heads] = self.model.heads_of(self.rank, c);
        let [values_all, keys_all] = c.heads_all;
        // The stored channel of one of a lane's.
        let channel = |n: u32| {
            let each = 2 * key_dim + group * width;
            let (head, at) = (n / each, n % each);
            let key = key_heads.start + head;
            match at.checked_sub(2 * key_dim) {
                None if key >= key_heads.end => None,
                None => Some(at / key_dim * keys_all * key_dim + key * key_dim + at % key_dim),
                Some(at) => {
                    let (key, inside, shared) = self.delta_head(c, head * group + at / width)?;
                    let own = (key * shared + inside) * c.head_dim + at % width;
                    (at % width < c.head_dim).then_some(2 * keys_all * key_dim + own)
                }
            }
        };
        let taps = |n: u32| {
            let row = channel(n).map(|row| (row * delta.taps) as usize);
            (0..delta.taps as usize).map(|tap| row.map_or(0.0, |row| conv[row + tap])).collect()
        };
        let channels = c.kv_heads * (2 * key_dim + group * width);
        put(at.conv, &mut (0..channels).flat_map(|n| -> Vec<f32> { taps(n) }));
        let of_head = |numbers: &[f32], head: u32| {
            let real = self.delta_head(c, head).map(|(key, inside, shared)| key * shared + inside);
            real.filter(|n| *n < values_all).map_or(0.0, |n| numbers[n as usize])
        };
        put(at.decay, &mut (0..c.heads).map(|head| -of_head(&decay, head).exp()));
        put(at.decay_bias, &mut (0..c.heads).map(|head| of_head(&bias, head)));
        put(at.output_norm, &mut norm.into_iter());
    }

    /// A matrix's part of the lines, or of experts, in all layers of a class.
    fn matrix(&self, all: &mut Packing, to: To, class: usize, matrix: Matrix) {
        let each = self.partition.blocks_a_lane(self.model);
        let part = &self.partition.classes[class];
        let tiling = *part.tiling(matrix);
        let chosen = part.experts.filter(|_| matrix.is_experts());
        // From a block's part to the next one's.
        let block_bytes = match chosen {
            Some(_) => part.piece_bytes(),
            None => self.partition.stream_bytes(self.model),
        };
        let mut found: Found<usize> = BTreeMap::new();
        let block_rows = block_rows(self.model.stored(class, matrix));
        for block in 0..self.partition.blocks {
            let (lane, rank) = (block / each, block % each);
            let index =
                block * self.partition.index_bytes() + self.partition.index_offset(class, matrix);
            let mut scales = Scales::default();
            for row in 0..tiling.rows {
                let source = self.source(class, matrix, lane, rank * tiling.rows + row);
                let Some((which, lane, from)) = source else { continue };
                let scale = scales.of(&tiling, (which, lane, from / block_rows));
                all.tell_scale(&tiling, index + row, scale.0);
                let mut place = Place::in_units(&tiling, row, scale);
                place.at += u64::from(block) * block_bytes;
                found.entry((which, lane)).or_default().push((from, place));
            }
        }
        let before = matrix_offset(self.partition, class, matrix);
        let offsets = match chosen {
            Some(_) => bank_offsets(self.model, self.partition),
            None => layer_offsets(self.model, self.partition),
        };
        let begin = if chosen.is_some() { to.experts } else { to.line };
        let experts = chosen.map_or(1, |e| e.count);
        let expert_bytes = u64::from(self.partition.blocks) * part.piece_bytes();
        let (parts, split) = (self.parts(class, matrix), Some(tiling));
        for ((which, lane), rows) in found {
            let table = all.table(&rows);
            for (layer, offset) in offsets.iter().enumerate().take(self.model.layer.len()) {
                if self.model.layer[layer].class != class {
                    continue;
                }
                let first = self.model.layer[layer].tensors(matrix)[which];
                for expert in 0..experts {
                    let to = begin + offset + u64::from(expert) * expert_bytes + before;
                    let target = Target { table, parts, split, to, turned: None };
                    all.tasks.entry((first + expert, lane)).or_default().push(target);
                }
            }
        }
    }

    /// The head's part of all lines.
    fn head(&self, all: &mut Packing, line: u64) {
        let (m, c) = (self.model, self.partition);
        let per_lane = m.head_mode == HeadMode::PerLane;
        let each = c.blocks_a_lane(m);
        let stream_bytes = c.stream_bytes(m);
        let passes = (0..c.head_passes).map(|_| c.head).chain(c.tail);
        let passes: Vec<Tiling> = passes.collect();
        // Full passes first, then the tail.
        let mut found: Found<bool> = BTreeMap::new();
        for block in 0..c.blocks {
            let (lane, seat) = match per_lane {
                true => (block / each, block % each),
                false => (0, self.rank * c.blocks + block),
            };
            let mut before = stream_bytes - c.head_bytes();
            let mut first = seat * c.rows_head;
            let index = block * c.index_bytes() + c.index_offset(c.classes.len(), Matrix::Qkv);
            for (split, done) in passes.iter().zip(rows_before(&passes)) {
                let mut scales = Scales::default();
                for row in 0..split.rows.min(m.vocab.saturating_sub(first)) {
                    let (lane, from) = match per_lane {
                        true => self.lane_row(lane, first + row, m.vocab),
                        false => (0, first + row),
                    };
                    let scale = scales.of(split, (0, lane, from / block_rows(&m.coded_head)));
                    all.tell_scale(split, index + done + row, scale.0);
                    let mut place = Place::in_units(split, row, scale);
                    place.at += u64::from(block) * stream_bytes + before;
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
            let target = Target { table: all.table(&rows), parts, split, to: line, turned: None };
            all.tasks.entry((m.head, lane)).or_default().push(target);
        }
    }

    /// A row's first number beyond float16, which has no place on a device.
    pub fn beyond_half(&self, tensor: u32, lane: u32, row: u32) -> Option<f32> {
        let stored = self.stored(tensor, lane);
        let mut floats = vec![0.0; stored.cols];
        let (row, all) = (row as usize, 0..stored.cols);
        match self.tensor(tensor).layout {
            Layout::RowMajor => self.row(&stored, row, &mut floats),
            Layout::ColumnMajor => {
                let step = stored.row_step;
                let sizes = (stored.codes.bytes_of(1), stored.rows * step, step);
                let data = rows_of_columns(stored.data, sizes, row..row + 1, all);
                self.row(&Stored { data: &data, rows: 1, row_step: 1, ..stored }, 0, &mut floats);
            }
        }
        floats.into_iter().find(|x| x.abs() > f16::MAX.to_f32())
    }

    /// Norm scales in the order of their rows on a device: `[rows][parts][hidden]` halves.
    ///
    /// # Errors
    /// [`Error::InvalidProgram`] for one beyond float16.
    pub fn norms(&self) -> Result<Vec<u8>> {
        let mut out = Vec::new();
        for norm in self.model.norms() {
            let stored = self.stored(norm.tensor, 0);
            for row in 0..norm.rows as usize {
                let mut floats = vec![0.0; stored.cols];
                self.row(&stored, row, &mut floats);
                if let Some(far) = floats.iter().find(|x| x.abs() > f16::MAX.to_f32()) {
                    return Err(beyond(&format!(" of {far}"), norm.tensor, row as u32));
                }
                floats.resize(self.partition.hidden as usize, 0.0);
                self.put_parts(&floats, &mut out);
            }
        }
        Ok(out)
    }

    /// Numbers as halves, then what these leave (ops/parts.h), for as many parts as there are.
    fn put_parts(&self, floats: &[f32], out: &mut Vec<u8>) {
        let half = |x: &f32| f16::from_f32(*x);
        out.extend(floats.iter().flat_map(|x| half(x).to_le_bytes()));
        if self.model.parts > 1 {
            let rest = |x: &f32| f16::from_f32((x - half(x).to_f32()) * REST);
            out.extend(floats.iter().flat_map(|x| rest(x).to_le_bytes()));
        }
    }

    /// Norm scales of q and k as halves, in the device's order: of each layer that has them
    /// `[q, k][parts][head_dim]`, or where they are over all heads, `[heads then kv heads]` so.
    pub fn head_norms(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for layer in &self.model.layer {
            let (class, part) = self.class(layer.class);
            for (norm, heads) in layer.head_norms.into_iter().zip(class.normed_heads()) {
                let mut floats = vec![0.0; (heads * class.head_dim) as usize];
                if heads > 0 {
                    self.row(&Stored::of(self.tensor(norm), 0, self.buffers), 0, &mut floats);
                }
                for head in floats.chunks_exact(class.head_dim as usize) {
                    let at = |at| self.feature(class, at).map_or(0.0, |f| head[f as usize]);
                    self.put_parts(&(0..part.head_dim).map(at).collect::<Vec<_>>(), &mut out);
                }
            }
        }
        out
    }

    /// Biases of q, k, v as floats, `[lanes][rows of all blocks]` of each layer that has them.
    pub fn biases(&self) -> Vec<u8> {
        let (m, c) = (self.model, self.partition);
        let mut out = Vec::new();
        for layer in m.layer.iter().filter(|layer| m.classes[layer.class].bias) {
            let rows = c.classes[layer.class].tiling(Matrix::Qkv).rows * c.blocks_a_lane(m);
            for lane in 0..m.lanes {
                let lane = self.lane_all(lane);
                let values = layer.biases.map(|bias| self.bias(bias, lane));
                for row in 0..rows {
                    let value = self
                        .qkv_row(layer.class, row)
                        .map_or(0.0, |(which, row)| values[which][row as usize]);
                    out.extend(value.to_le_bytes());
                }
            }
        }
        out
    }

    /// Sinks and biases as floats, of each layer as [`Extras`] has them. What is added once where
    /// machines' outputs are summed the first one has.
    pub fn extras(&self) -> Vec<u8> {
        let (m, c) = (self.model, self.partition);
        let mut out: Vec<f32> = Vec::new();
        for layer in &m.layer {
            let at = Extras::new(m, c, layer.class);
            let mut all = vec![0.0f32; at.count as usize];
            let mut put = |from: u32, values: &mut dyn Iterator<Item = f32>| {
                let to = all[from as usize..].iter_mut();
                to.zip(values).for_each(|(to, value)| *to = value);
            };
            let (class, of) = (&m.classes[layer.class], &layer.extras);
            if of.sinks != NONE {
                let sinks = self.numbers(of.sinks);
                let heads = m.heads_of(self.rank, class)[0].clone();
                let scores = |head: u32| sinks[head as usize] * std::f32::consts::LOG2_E;
                put(at.sinks, &mut heads.map(scores));
            }
            if of.output_bias != NONE && self.rank == 0 {
                put(at.output_bias, &mut self.numbers(of.output_bias).into_iter());
            }
            if of.router_bias != NONE {
                put(at.router_bias, &mut self.numbers(of.router_bias).into_iter());
            }
            if let Some(latent) = &layer.latent {
                for (to, norm) in at.latent_norms.into_iter().zip(latent.norms) {
                    put(to, &mut self.numbers(norm).into_iter());
                }
            }
            if of.correction != NONE {
                put(at.correction, &mut self.numbers(of.correction).into_iter());
            }
            if of.token_experts != NONE {
                let ids = self.ids(of.token_experts).into_iter();
                put(at.token_experts, &mut ids.map(f32::from_bits));
            }
            if let Some(compressed) = &layer.compressed {
                self.compressed_numbers(&at, compressed, &mut put);
                let places = page_offsets(m, c, layer).into_iter().skip(1);
                put(at.places, &mut places.map(f32::from_bits));
            }
            if let Some(hyper) = &m.hyper {
                for (to, module) in at.hyper.into_iter().zip(&layer.hyper) {
                    put(to, &mut self.hyper_numbers(hyper, module, true).into_iter());
                }
            }
            self.delta_numbers(layer.class, &at, &of.delta, &mut put);
            self.expert_biases(layer.class, &at, of.biases, &mut put);
            out.extend(all);
        }
        if let Some(hyper) = &m.hyper {
            out.extend(self.hyper_numbers(hyper, &hyper.head, false));
        }
        out.iter().flat_map(|x| x.to_le_bytes()).collect()
    }

    /// Those of a layer's experts.
    fn expert_biases(
        &self,
        class: usize,
        at: &Extras,
        [gate, up, down]: [u32; 3],
        put: &mut dyn FnMut(u32, &mut dyn Iterator<Item = f32>),
    ) {
        let (c, part) = self.class(class);
        let Some(experts) = part.experts.filter(|_| down != NONE) else { return };
        let rows = |m| part.tiling(m).rows * self.partition.blocks;
        let (gate_up, down) = ([gate, up].map(|t| self.numbers(t)), self.numbers(down));
        let (ffn, hidden) = (c.ffn_all as usize, self.model.hidden as usize);
        let first = if self.model.sliced { self.rank * c.ffn } else { 0 };
        for expert in 0..experts.count {
            let at_expert = expert as usize;
            let of = |row: u32| {
                let its = &gate_up[(row % 2) as usize][at_expert * ffn..][..ffn];
                let feature = (first + row / 2) as usize;
                its.get(feature).filter(|_| row / 2 < c.ffn).copied().unwrap_or(0.0)
            };
            let count = rows(Matrix::GateUp);
            put(at.gate_up_bias + expert * count, &mut (0..count).map(of));
            if self.rank == 0 {
                let count = rows(Matrix::Down);
                let its = &down[at_expert * hidden..][..hidden];
                put(at.down_bias + expert * count, &mut its.iter().copied());
            }
        }
    }

    /// All numbers of a tensor, row after row.
    fn numbers(&self, tensor: u32) -> Vec<f32> {
        let tensor = self.tensor(tensor);
        let mut out = Vec::new();
        for lane in 0..tensor.lanes {
            let stored = Stored::of(tensor, lane as usize, self.buffers);
            let mut floats = vec![0.0; stored.cols];
            for row in 0..stored.rows {
                self.row(&stored, row, &mut floats);
                out.extend(&floats);
            }
        }
        out
    }

    /// A lane's numbers of a bias: a row a lane, or one row for all.
    fn bias(&self, index: u32, lane: u32) -> Vec<f32> {
        let tensor = self.tensor(index);
        let stored = Stored::of(tensor, 0, self.buffers);
        let mut floats = vec![0.0; stored.cols];
        self.row(&stored, if tensor.rows > 1 { lane as usize } else { 0 }, &mut floats);
        floats
    }

    /// A row as numbers. Float32 checkpoints are rounded to bfloat16, as the field publishes them
    /// in 16 bits: half the digits, but no range is lost, and the result is that of the published
    /// model. What is float32 beside 16 bits stays as it is.
    fn row(&self, stored: &Stored<'_>, row: usize, out: &mut [f32]) {
        row_to_f32(stored, row, out);
        let published = self.tensor(self.model.embed).encoding.codes == Codes::F32;
        if stored.codes == Codes::F32 && published {
            out.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
        }
    }
}

/// Rows of a stored matrix that share a scale.
fn block_rows(stored: &Coding) -> u32 {
    let coded = stored.as_ref().and_then(|coded| coded.as_ref().ok());
    coded.map_or(u32::MAX, |coded| coded.group[0])
}

/// What the second part of a number is multiplied by (ops/parts.h).
const REST: f32 = 2048.0;
