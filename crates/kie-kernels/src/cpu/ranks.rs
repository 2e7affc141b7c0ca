//! Virtual ranks (`cpu:0,1`): a dense model cut into one lane a rank, heads, neurons and vocabulary
//! dealt out as several GPUs deal them. All lanes run in this address space on one thread team;
//! their outputs are added in float32, in the order of the ranks. A model with lanes of its own is
//! run as it is: its ranks would be groups of its lanes.
//!
//! Invariants: a lane's numbers are the checkpoint's, unchanged; what a rank has less than others
//! is filled up with zeros, which add nothing. Slices that lie in the checkpoint as a lane wants
//! them are read in place; the others (columns of output matrices, mostly) are copied.

use std::ops::Range;
use std::sync::Arc;

use crate::abi::{Dims, Encoding, HeadMode, Op, Program, Tensor, GROUPS, NONE};
use crate::device::Buffer;
use crate::error::{Error, Result};
use crate::mono::lower::model::{dealt, Class, Model};

/// Most ranks, as on GPUs.
pub(super) const RANKS_MAX: usize = 8;

/// Ranks of a device's name; none where it is no such name.
pub(super) fn count(name: &str) -> Option<u32> {
    let Some(list) = name.strip_prefix("cpu:") else { return (name == "cpu").then_some(1) };
    let numbered = list.split(',').enumerate().all(|(rank, n)| n == rank.to_string());
    let count = list.split(',').count();
    (numbered && count <= RANKS_MAX).then_some(count as u32)
}

/// Bytes of one page of a group, kv heads that several ranks have counted for each; heads that do
/// not divide count as in the program, which is refused later.
pub(super) fn page_bytes(dims: &Dims, group: usize, ranks: u32) -> u64 {
    let sliced = dims.lanes == 1 && ranks > 1;
    let dealt = if sliced { dealt(dims.heads, dims.kv_heads, ranks) } else { None };
    let kv_heads = dealt.map_or(dims.kv_heads * dims.lanes, |(_, each)| each * ranks);
    Dims { lanes: 1, kv_heads, ..*dims }.page_bytes(group)
}

/// What each lane has of a stored matrix, padded with zeros to `shape`.
struct Slices {
    from: Tensor,
    rows: Vec<Range<u32>>,
    cols: Vec<Range<u32>>,
    shape: [u32; 2],
}

/// A program cut into lanes, and what must be copied for it.
pub(super) struct Lanes {
    pub program: Program,
    copies: Vec<(usize, Slices)>,
    /// A line for people.
    pub how: String,
    cut: bool,
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 {
        a
    } else {
        gcd(b, a % b)
    }
}

impl Slices {
    /// Whether the lanes' rows lie one after another, as a tensor of lanes has them.
    fn in_place(&self) -> bool {
        let [rows, cols] = self.shape;
        let lines_up = |(lane, r): (u32, &Range<u32>)| *r == (lane * rows..(lane + 1) * rows);
        (0..).zip(&self.rows).all(lines_up)
            && self.cols.iter().all(|c| *c == (0..cols))
            && (rows * self.rows.len() as u32, cols) == (self.from.rows, self.from.cols)
            && (!self.from.encoding.has_scales()
                || rows.is_multiple_of(self.from.encoding.group[0]))
    }

    /// Rows and columns of a group that lies within one of the stored ones.
    fn group(&self) -> [u32; 2] {
        let within = |group: u32, parts: &[Range<u32>], size: u32| {
            parts.iter().fold(gcd(group, size), |g, part| gcd(g, part.start))
        };
        let [rows, cols] = self.from.encoding.group;
        if rows == 0 {
            return [0, 0];
        }
        [within(rows, &self.rows, self.shape[0]), within(cols, &self.cols, self.shape[1])]
    }

    /// The tensor, its numbers in place or at the beginning of `buffer`, its scales and zero points
    /// behind them.
    fn tensor(&self, buffer: u32) -> Tensor {
        let (lanes, [rows, cols]) = (self.rows.len() as u32, self.shape);
        let whole = Tensor { lanes, rows, cols, ..self.from };
        if self.in_place() {
            return whole;
        }
        let scale_offset = (whole.lane_bytes() * u64::from(lanes)).next_multiple_of(4);
        let encoding = Encoding { group: self.group(), ..self.from.encoding };
        let copied =
            Tensor { buffer, offset: 0, encoding, scale_buffer: buffer, scale_offset, ..whole };
        let zero_offset = scale_offset + copied.scale_bytes() * u64::from(lanes);
        Tensor { zero_offset, ..copied }
    }

    /// The codes, then the scales, then the zero points.
    fn copy(&self, to: &Tensor, buffers: &[Buffer]) -> Vec<u8> {
        let mut out = vec![0; to.scale_offset as usize];
        let codes = to.encoding.codes;
        let stored = buffers[self.from.buffer as usize].host();
        let (from_row, to_row) = (self.from.row_bytes() as usize, to.row_bytes() as usize);
        for (lane, (rows, cols)) in self.rows.iter().zip(&self.cols).enumerate() {
            for (at, row) in rows.clone().enumerate() {
                let from = self.from.offset as usize
                    + row as usize * from_row
                    + codes.bytes_of(cols.start as usize);
                let to = (lane * to.rows as usize + at) * to_row;
                let bytes = codes.bytes_of(cols.len());
                out[to..to + bytes].copy_from_slice(&stored[from..from + bytes]);
            }
        }
        let from = &self.from;
        let beside = |offset: u64| &buffers[from.scale_buffer as usize].host()[offset as usize..];
        if to.encoding.has_scales() {
            let size = to.encoding.scale.bytes();
            self.groups(to, size, beside(from.scale_offset), &mut out);
        }
        if to.encoding.zeros {
            self.groups(to, 1, beside(from.zero_offset), &mut out);
        }
        out
    }

    /// What is stored for each group of all lanes, `size` bytes each.
    fn groups(&self, to: &Tensor, size: usize, stored: &[u8], out: &mut Vec<u8>) {
        let [_, grid] = self.from.scale_grid();
        let ([down, across], of) = (to.encoding.group, self.from.encoding.group);
        for (rows, cols) in self.rows.iter().zip(&self.cols) {
            for row in (rows.start..rows.start + to.rows).step_by(down as usize) {
                for col in (cols.start..cols.start + to.cols).step_by(across as usize) {
                    // Behind the last number there are zeros, whatever their scale.
                    let [row, col] = [row.min(rows.end - 1), col.min(cols.end - 1)];
                    let at = size * (row / of[0] * grid + col / of[1]) as usize;
                    out.extend(&stored[at..at + size]);
                }
            }
        }
    }
}

/// Rows `0..rows` in so many parts of `each`, the last ones shorter.
fn parts(rows: u32, each: u32, count: u32) -> Vec<Range<u32>> {
    (0..count).map(|n| (n * each).min(rows)..((n + 1) * each).min(rows)).collect()
}

/// Ends of the shares of `rows` rows, on multiples of `unit`, one a block.
fn split(rows: u32, unit: u32, blocks: u32) -> impl Iterator<Item = u32> {
    let units = u64::from(rows.div_ceil(unit));
    (0..=blocks)
        .map(move |b| (units * u64::from(b) / u64::from(blocks)) as u32 * unit)
        .map(move |row| row.min(rows))
}

/// Rows of a block at least, for the processor's tiles.
const TILE_ROWS: u32 = 16;

struct Builder<'a> {
    model: &'a Model,
    /// Of all layers.
    class: &'a Class,
    ranks: u32,
    /// Buffers of the program as it was given.
    buffers: u32,
    /// Query and kv heads of each rank.
    heads: Vec<[Range<u32>; 2]>,
    program: Program,
    copies: Vec<(usize, Slices)>,
}

impl Builder<'_> {
    /// A new tensor in place of `index`.
    fn sliced(
        &mut self,
        index: u32,
        rows: Vec<Range<u32>>,
        cols: Vec<Range<u32>>,
        shape: [u32; 2],
    ) -> u32 {
        let slices = Slices { from: self.program.tensors[index as usize], rows, cols, shape };
        let buffer = self.buffers + self.copies.len() as u32;
        let at = self.program.tensors.len();
        self.program.tensors.push(slices.tensor(buffer));
        if !slices.in_place() {
            self.copies.push((at, slices));
        }
        at as u32
    }

    fn by_rows(&mut self, index: u32, rows: Vec<Range<u32>>, each: u32) -> u32 {
        let cols = self.program.tensors[index as usize].cols;
        let all = vec![0..cols; rows.len()];
        self.sliced(index, rows, all, [each, cols])
    }

    fn by_cols(&mut self, index: u32, cols: Vec<Range<u32>>, each: u32) -> u32 {
        let rows = self.program.tensors[index as usize].rows;
        let all = vec![0..rows; cols.len()];
        self.sliced(index, all, cols, [rows, each])
    }

    /// Features of each rank's query (0) or kv (1) heads, and places for them.
    fn features(&self, which: usize) -> (Vec<Range<u32>>, u32) {
        let (m, dim) = (self.class, self.class.head_dim);
        let of = |heads: &[Range<u32>; 2]| heads[which].start * dim..heads[which].end * dim;
        (self.heads.iter().map(of).collect(), [m.heads, m.kv_heads][which] * dim)
    }

    /// A bias is one row; afterwards it is one a lane.
    fn bias(&mut self, index: u32, which: usize) -> u32 {
        if index == NONE {
            return NONE;
        }
        let (cols, each) = self.features(which);
        let at = self.by_cols(index, cols, each);
        let tensor = &mut self.program.tensors[at as usize];
        (tensor.lanes, tensor.rows) = (1, self.ranks);
        at
    }

    fn steps(&mut self) {
        let (m, ranks) = (self.model, self.ranks);
        let ffn = parts(self.program.dims.ffn, self.class.ffn, ranks);
        let vocab = parts(m.vocab_all, m.vocab, ranks);
        let mut widths = vec![None; self.program.vectors.len()];
        let mut before = Op::Embed;
        for index in 0..self.program.steps.len() {
            let mut step = self.program.steps[index];
            match step.op {
                Op::Embed => widths[step.output as usize] = Some(m.hidden),
                Op::Qkv => {
                    for (n, which) in [0, 1, 1].into_iter().enumerate() {
                        let (rows, each) = self.features(which);
                        step.weights[n] = self.by_rows(step.weights[n], rows, each);
                        step.biases[n] = self.bias(step.biases[n], which);
                    }
                    widths[step.output as usize] = Some(self.class.heads * self.class.head_dim);
                }
                Op::Attend => {
                    widths[step.output as usize] = Some(self.class.heads * self.class.head_dim)
                }
                Op::Project => {
                    let attended = before == Op::Attend;
                    let (cols, each) =
                        if attended { self.features(0) } else { (ffn.clone(), self.class.ffn) };
                    step.weights[0] = self.by_cols(step.weights[0], cols, each);
                    step.mix_delay = 0;
                }
                Op::GateUp => {
                    for n in 0..2 {
                        step.weights[n] =
                            self.by_rows(step.weights[n], ffn.clone(), self.class.ffn);
                    }
                    widths[step.output as usize] = Some(self.class.ffn);
                }
                Op::Head => step.weights[0] = self.by_rows(step.weights[0], vocab.clone(), m.vocab),
                Op::Sample => {}
            }
            before = step.op;
            self.program.steps[index] = step;
        }
        for (vector, width) in self.program.vectors.iter_mut().zip(widths) {
            if let Some(width) = width {
                (vector.lanes, vector.width) = (ranks, width);
            }
        }
    }

    fn splits(&mut self) {
        let d = self.program.dims;
        let program = &mut self.program;
        program.splits.clear();
        for step in &mut program.steps {
            step.split = program.splits.len() as u32;
            let (rows, unit) = match step.op {
                Op::Embed | Op::Project => (d.hidden, TILE_ROWS),
                Op::Qkv => (d.lanes * (d.heads + 2 * d.kv_heads), 1),
                Op::Attend => (d.lanes * d.kv_heads, 1),
                Op::GateUp => (d.lanes * d.ffn, TILE_ROWS),
                Op::Head => (d.vocab, TILE_ROWS),
                Op::Sample => (1, 1),
            };
            program.splits.extend(split(rows, unit, program.blocks));
        }
    }
}

impl Lanes {
    /// Cuts a program for so many ranks.
    ///
    /// # Errors
    /// [`Error::Indivisible`]; [`Error::InvalidProgram`] for a factor that ranks would each apply.
    pub fn new(program: &Program, ranks: u32) -> Result<Self> {
        let model = Model::read(program, ranks)?;
        let d = &program.dims;
        if !model.sliced {
            let how = format!("ranks     {ranks} virtual ones, {} lanes each\n", model.lanes);
            let program = program.clone();
            return Ok(Self { program, copies: Vec::new(), how, cut: false });
        }
        if let Some(step) =
            program.steps.iter().position(|s| s.op == Op::Project && s.mix_own != 1.0)
        {
            let detail = "one lane's output has a factor, and ranks would each have it".to_owned();
            return Err(Error::InvalidProgram { step, detail });
        }
        let [class] = &model.classes[..] else {
            let detail = "layers of several classes, which `cpu` does not deal out".to_owned();
            return Err(Error::InvalidProgram { step: 1, detail });
        };
        let last = program.tensors.iter().map(|t| t.buffer.max(t.scale_buffer)).max();
        let mut builder = Builder {
            model: &model,
            class,
            ranks,
            buffers: last.map_or(0, |last| last + 1),
            heads: (0..ranks).map(|rank| model.heads_of(rank, class)).collect(),
            program: program.clone(),
            copies: Vec::new(),
        };
        builder.steps();
        let dims = &mut builder.program.dims;
        (dims.lanes, dims.heads, dims.kv_heads) = (ranks, class.heads, class.kv_heads);
        (dims.ffn, dims.head_mode) = (class.ffn, HeadMode::PerLane);
        builder.splits();
        debug_assert!((0..GROUPS)
            .all(|group| builder.program.dims.page_bytes(group) == page_bytes(d, group, ranks)));
        let (program, copies) = (builder.program, builder.copies);
        let how = format!(
            "ranks     {ranks} virtual ones, a lane each: {} query, {} kv heads, ffn {}, {} ids\n",
            class.heads, class.kv_heads, class.ffn, model.vocab
        );
        Ok(Self { program, copies, how, cut: true })
    }

    /// Whether it is another program than the one given.
    pub fn are_cut(&self) -> bool {
        self.cut
    }

    /// Bytes of weights, stored and copied, of KV pages, and of all else, about.
    pub fn bytes(&self, before: &Program) -> [u64; 3] {
        let d = &self.program.dims;
        let copied = |(at, _): &(usize, Slices)| self.program.tensors[*at].bytes();
        let stored: u64 = before.tensors.iter().map(Tensor::bytes).sum();
        let pages = |group: usize| d.page_bytes(group) * u64::from(d.group_pages[group]);
        // What a pass computes a column, with normed, packed and raw twins; then the mailbox.
        let vectors = self.program.vectors.iter().map(|v| u64::from(v.lanes) * u64::from(v.width));
        let column = 12 * (vectors.sum::<u64>() + u64::from(d.lanes * d.hidden));
        let slot = u64::from(d.max_positions) * 24 + u64::from(d.vocab) * 40;
        [
            stored + self.copies.iter().map(copied).sum::<u64>(),
            (0..GROUPS).map(pages).sum(),
            u64::from(d.columns) * column + u64::from(d.slots) * slot,
        ]
    }

    /// The program and its buffers: those given and the copies behind them.
    pub fn load(self, mut buffers: Vec<Buffer>) -> (Program, Vec<Buffer>) {
        let Self { mut program, copies, .. } = self;
        let first = buffers.len() as u32;
        for (n, (at, slices)) in (0_u32..).zip(copies) {
            let tensor = &mut program.tensors[at];
            (tensor.buffer, tensor.scale_buffer) = (first + n, first + n);
            let bytes = slices.copy(&slices.tensor(0), &buffers);
            buffers.push(Buffer::in_place(Arc::new(bytes)));
        }
        (program, buffers)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::abi::{Codes, Dtype, Layout};
    use crate::cpu::matmul::Matrix;
    use crate::cpu::numbers::row_to_f32;

    #[test]
    fn names_say_how_many() {
        let all = ["cpu", "cpu:0", "cpu:0,1,2", "cpu:0,1,2,3,4,5,6,7"].map(count);
        assert_eq!(all, [Some(1), Some(1), Some(3), Some(8)]);
        for name in ["cpu:", "cpu:1", "cpu:0,2", "cpu:0,1,", "cpu:+0", "cpu:0,1,2,3,4,5,6,7,8", "c"]
        {
            assert_eq!(count(name), None, "{name}");
        }
    }

    /// A stored matrix of 24 x 40 behind 4 other bytes, and its scales in blocks of 8 x 16.
    fn stored(codes: Codes) -> (Tensor, Vec<Buffer>) {
        let (rows, cols, mut state) = (24, 40, 7_u32);
        let mut byte = move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // No exponent is that of numbers that are none.
            (state >> 24) as u8 & 0xb7
        };
        let numbers: Vec<u8> = (0..4 + rows * cols * codes.bytes_of(1)).map(|_| byte()).collect();
        let scaled = codes == Codes::E4m3;
        let group = if scaled { [8, 16] } else { [0, 0] };
        let scales = (0..9).flat_map(|n| (n as f32 * 0.37 + 0.1).to_le_bytes()).collect::<Vec<_>>();
        let buffers = [numbers, scales].map(|bytes| Buffer::in_place(Arc::new(bytes)));
        let tensor = Tensor {
            buffer: 0,
            encoding: Encoding::scaled(codes, group, Dtype::F32),
            layout: Layout::RowMajor,
            lanes: 1,
            rows: rows as u32,
            cols: cols as u32,
            scale_buffer: 1,
            offset: 4,
            scale_offset: 0,
            zero_offset: 0,
        };
        (tensor, buffers.into())
    }

    #[test]
    fn a_lane_has_its_numbers_and_zeros_behind_them() {
        let even = |n: u32, size: u32| parts(size, size.div_ceil(n), n);
        // By rows and columns; evenly, with less for the last, and twice the same.
        let cases = [
            (even(3, 24), vec![0..40; 3], [8, 40]),
            (even(4, 24), vec![0..40; 4], [6, 40]),
            (even(5, 24), vec![0..40; 5], [5, 40]),
            (vec![0..24; 2], even(2, 40), [24, 20]),
            (vec![0..24; 3], even(3, 40), [24, 14]),
            (vec![0..12, 0..12, 12..24, 12..24], vec![0..40; 4], [12, 40]),
        ];
        for codes in [Codes::F32, Codes::Bf16, Codes::E4m3] {
            let (from, mut buffers) = stored(codes);
            for (rows, cols, shape) in &cases {
                let slices = Slices { from, rows: rows.clone(), cols: cols.clone(), shape: *shape };
                let to = slices.tensor(2);
                assert_eq!(to.buffer == 0, slices.in_place());
                if !slices.in_place() {
                    buffers.truncate(2);
                    buffers.push(Buffer::in_place(Arc::new(slices.copy(&to, &buffers))));
                    assert_eq!(
                        buffers[2].len() as u64,
                        to.scale_offset + to.bytes() - to.lane_bytes() * u64::from(to.lanes)
                    );
                }
                let whole = Matrix::of(&from, 0, &buffers);
                let (mut wanted, mut got) = (vec![0.0; 40], vec![0.0; shape[1] as usize]);
                for (lane, (rows, cols)) in rows.iter().zip(cols).enumerate() {
                    for at in 0..shape[0] {
                        row_to_f32(&Matrix::of(&to, lane, &buffers), at as usize, &mut got);
                        let there = rows.start + at < rows.end;
                        row_to_f32(&whole, (rows.start + at).min(23) as usize, &mut wanted);
                        for (n, got) in got.iter().enumerate() {
                            let col = cols.start as usize + n;
                            let inside = there && col < cols.end as usize;
                            let wanted = if inside { wanted[col] } else { 0.0 };
                            assert!(*got == wanted, "{codes:?} {shape:?}: {lane}, {at}, {n}");
                        }
                    }
                }
            }
        }
        let (from, _) = stored(Codes::E4m3);
        let (rows, cols) = (even(3, 24), vec![0..40; 3]);
        assert!(Slices { from, rows, cols, shape: [8, 40] }.in_place(), "whole blocks stay");
    }
}
