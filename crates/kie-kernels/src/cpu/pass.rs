//! Walks a program once over a set of columns, every member of the team through the same steps.
//!
//! # Who writes what
//! A step is one or more phases with a barrier behind each. Inside a phase a member writes only
//! the rows of its own block (from the program's splits) or the items whose number is congruent to
//! its own; all other data of the phase is read-only. The barrier's release/acquire makes a
//! phase's writes visible to the next. That is the argument behind every `Field` access below.
//!
//! # Layout
//! Vectors are lane-major: `[lane][column][width]`, so that one lane's columns are contiguous.

use std::cell::UnsafeCell;
use std::ops::Range;

use super::attention::{self, KvPage};
use super::matmul::{matmul, Matrix};
use super::prefill::{pack, prefill, Packed};
use super::simd::Level;
use super::team::{Barrier, Team};
use super::{numbers, ops};
use crate::abi::{Codes, Dims, HeadMode, Op, Program, Step, Tensor, Vector, GROUPS, NONE, PAGE};
use crate::device::Buffer;
use crate::error::Result;
use crate::mailbox::Mailbox;
use crate::validate::ValidProgram;

/// Columns that the decode path takes in one go.
const DECODE_COLUMNS: usize = 8;
/// Query positions of one prefill attention item.
const QUERY_BLOCK: usize = 16;

/// Which arithmetic a column gets; part of what it computes, so never a matter of neighbours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Path {
    /// Float32 activations.
    Decode,
    /// Many columns at once; 16-bit weights meet 16-bit activations where the processor has units
    /// for that.
    Prefill,
}

/// One position of one sequence.
#[derive(Debug, Clone, Copy)]
pub(super) struct Column {
    pub slot: usize,
    pub position: usize,
    pub token: u32,
    pub path: Path,
    /// Its logits are wanted.
    pub wanted: bool,
}

/// Memory that the members write in disjoint parts (see the module's argument).
struct Field<T>(UnsafeCell<Vec<T>>);

// SAFETY: parts are disjoint between barriers, by the module's argument.
unsafe impl<T: Send> Sync for Field<T> {}

impl<T: Copy + Default> Field<T> {
    fn new(len: usize) -> Self {
        Self(UnsafeCell::new(vec![T::default(); len]))
    }

    /// # Safety
    /// Nobody writes `range` in this phase but the caller, or nobody at all.
    #[allow(clippy::mut_from_ref)]
    unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        // SAFETY: the vector's own pointer, not a reference to the vector, is what members share.
        let all = unsafe { &mut *self.0.get() };
        assert!(range.start <= range.end && range.end <= all.len(), "{range:?} of {}", all.len());
        // SAFETY: in bounds (asserted); disjointness is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(all.as_mut_ptr().add(range.start), range.len()) }
    }
}

/// What one member alone uses.
struct Scratch {
    attention: attention::Scratch,
    /// One stream, where the head combines lanes.
    stream: Vec<f32>,
}

/// A program with its memory.
pub(super) struct Pass {
    program: Program,
    buffers: Vec<Buffer>,
    level: Level,
    vectors: Vec<Field<f32>>,
    /// Normed (or lane-combined) input of the current step, `[lane][column][width]`.
    normed: Field<f32>,
    /// Raw matrix outputs, `[lane][column][rows]`: q|k|v, up, or a module's output.
    raw: Field<f32>,
    /// Packed prefill activations, one a lane.
    packed: Vec<UnsafeCell<Packed>>,
    /// KV pages, one arena a group.
    pages: [Field<u8>; GROUPS],
    /// cos then sin of the pass's columns, `[column][head_dim]`.
    angles: Field<f32>,
    /// Rotary inverse frequencies.
    frequencies: Vec<f32>,
    /// Norm scales and biases as float32, by tensor; empty for the others.
    constants: Vec<Box<[f32]>>,
    /// Final streams of the wanted columns, and their logits.
    logits: Field<f32>,
    wanted: Vec<usize>,
    members: Vec<UnsafeCell<Scratch>>,
}

// SAFETY: `packed` entries are written by one member a phase, `members[i]` by member i only.
unsafe impl Sync for Pass {}

impl Pass {
    pub(super) fn new(program: ValidProgram, buffers: Vec<Buffer>, level: Level) -> Result<Self> {
        let program = program.program().clone();
        let d = program.dims;
        let columns = d.columns as usize;
        let lanes = d.lanes as usize;
        let field = |v: &Vector| Field::new((v.lanes * v.width) as usize * columns);
        let widest = (d.lanes * d.hidden) as usize;
        let qkv = ((d.heads + 2 * d.kv_heads) * d.head_dim) as usize;
        let inner = d.hidden.max(d.ffn).max(d.heads * d.head_dim) as usize;
        let raw = qkv.max(d.ffn as usize).max(d.hidden as usize);
        let arena = |g: usize| Field::new(d.page_bytes(g) as usize * d.group_pages[g] as usize);
        let packed = || Packed::with_capacity(d.chunk(), inner);
        let member = || {
            let stream = vec![0.0; d.hidden as usize];
            let heads = (d.heads / d.kv_heads) as usize;
            let head_dim = d.head_dim as usize;
            let attention = attention::Scratch::with_capacity(heads, head_dim, QUERY_BLOCK);
            UnsafeCell::new(Scratch { attention, stream })
        };
        let mut pass = Self {
            vectors: program.vectors.iter().map(field).collect(),
            normed: Field::new(widest * columns),
            raw: Field::new(lanes * raw * columns),
            packed: (0..lanes).map(|_| UnsafeCell::new(packed())).collect(),
            pages: [arena(0), arena(1)],
            angles: Field::new(columns * d.head_dim as usize),
            frequencies: Vec::new(),
            constants: Vec::new(),
            logits: Field::new(d.slots as usize * d.vocab as usize),
            wanted: Vec::with_capacity(columns),
            members: (0..program.blocks).map(|_| member()).collect(),
            level,
            buffers,
            program,
        };
        pass.constants = pass.constants();
        pass.frequencies = pass.constants[pass.program.rope as usize].to_vec();
        Ok(pass)
    }

    pub(super) fn dims(&self) -> &Dims {
        &self.program.dims
    }

    /// Logits of the `row`-th wanted column of the last pass.
    pub(super) fn logits(&self, row: usize) -> &[f32] {
        let vocab = self.program.dims.vocab as usize;
        // SAFETY: no pass runs: `run` takes `&mut self`.
        unsafe { self.logits.part(row * vocab..(row + 1) * vocab) }
    }

    /// Computes all steps for `columns`; decode-path columns must come first.
    pub(super) fn run(&mut self, columns: &[Column], team: &Team, mailbox: &Mailbox) {
        self.wanted.clear();
        let wanted = columns.iter().enumerate().filter(|(_, c)| c.wanted);
        self.wanted.extend(wanted.map(|(i, _)| i));
        let rows = self.wanted.len() * self.program.dims.vocab as usize;
        let logits = self.logits.0.get_mut();
        if rows > logits.len() {
            logits.resize(rows, 0.0);
        }
        self.turn(columns);
        let decode = columns.iter().take_while(|c| c.path == Path::Decode).count();
        let pass: &Self = self;
        team.run(|member, barrier| {
            let walk = Walk { pass, columns, decode, member, barrier, mailbox };
            for step in &pass.program.steps {
                walk.step(step);
            }
        });
    }

    /// Rotary angles of the pass: position times inverse frequency in float32, as the references.
    fn turn(&mut self, columns: &[Column]) {
        let half = self.frequencies.len();
        let angles = self.angles.0.get_mut();
        for (at, column) in angles.chunks_exact_mut(2 * half).zip(columns) {
            let (cos, sin) = at.split_at_mut(half);
            for ((c, s), f) in cos.iter_mut().zip(sin).zip(&self.frequencies) {
                (*s, *c) = (column.position as f32 * f).sin_cos();
            }
        }
    }

    fn matrix(&self, tensor: &Tensor, lane: usize) -> Matrix<'_> {
        Matrix::of(tensor, lane, &self.buffers)
    }

    /// What steps use number by number, converted once.
    fn constants(&self) -> Vec<Box<[f32]>> {
        let steps = self.program.steps.iter();
        let mut used: Vec<u32> =
            steps.flat_map(|s| [s.norm].into_iter().chain(s.biases).chain(s.head_norms)).collect();
        used.push(self.program.rope);
        let convert = |(index, tensor): (usize, &Tensor)| {
            if !used.contains(&(index as u32)) {
                return Box::default();
            }
            let (rows, cols) = (tensor.rows as usize, tensor.cols as usize);
            let mut numbers = vec![0.0; rows * cols];
            for (row, out) in numbers.chunks_exact_mut(cols).enumerate() {
                numbers::row_to_f32(&self.matrix(tensor, 0), row, out);
            }
            numbers.into()
        };
        self.program.tensors.iter().enumerate().map(convert).collect()
    }

    /// A norm scale or bias, if the step has one.
    fn constant(&self, index: u32) -> Option<&[f32]> {
        (index != NONE).then(|| &*self.constants[index as usize])
    }
}

/// One member's walk through one pass.
struct Walk<'a> {
    pass: &'a Pass,
    columns: &'a [Column],
    /// Columns of the decode path; they come first.
    decode: usize,
    member: usize,
    barrier: &'a Barrier,
    mailbox: &'a Mailbox,
}

impl Walk<'_> {
    fn step(&self, step: &Step) {
        match step.op {
            Op::Embed => self.embed(step),
            Op::Qkv => self.qkv(step),
            Op::Attend => self.attend(step),
            Op::Project => self.project(step),
            Op::GateUp => self.gate_up(step),
            Op::Head => self.head(step),
            // Tokens are chosen between passes, where the control plane needs them.
            Op::Sample => return,
        }
        self.barrier.wait();
    }

    fn dims(&self) -> &Dims {
        &self.pass.program.dims
    }

    /// Items of this member: those congruent to its number.
    fn mine(&self, items: usize) -> impl Iterator<Item = usize> {
        (self.member..items).step_by(self.pass.program.blocks as usize)
    }

    /// Rows of this member's block.
    fn rows(&self, step: &Step) -> Range<usize> {
        let at = step.split as usize + self.member;
        let split = &self.pass.program.splits;
        split[at] as usize..split[at + 1] as usize
    }

    fn at(&self, lane: usize, column: usize, width: usize) -> usize {
        (lane * self.dims().columns as usize + column) * width
    }

    /// `width` numbers of a vector, from `from`. See the module's argument for why this is sound.
    #[allow(clippy::mut_from_ref)]
    fn vector(&self, index: u32, lane: usize, column: usize, part: Range<usize>) -> &mut [f32] {
        let width = self.pass.program.vectors[index as usize].width as usize;
        let at = self.at(lane, column, width);
        // SAFETY: rows and items of a phase are disjoint between members (module docs).
        unsafe { self.pass.vectors[index as usize].part(at + part.start..at + part.end) }
    }

    fn embed(&self, step: &Step) {
        let tensor = self.pass.program.tensors[step.weights[0] as usize];
        let hidden = self.dims().hidden as usize;
        for item in self.mine(self.columns.len()) {
            for lane in 0..self.dims().lanes as usize {
                let out = self.vector(step.output, lane, item, 0..hidden);
                let row = self.columns[item].token as usize;
                numbers::row_to_f32(&self.pass.matrix(&tensor, 0), row, out);
            }
        }
    }

    /// RMSNorm of every column and lane of `input` into `normed`, packed where prefill wants it.
    fn norm(&self, step: &Step, weights: &[u32]) {
        let (hidden, lanes) = (self.dims().hidden as usize, self.dims().lanes as usize);
        let scale = self.pass.constant(step.norm);
        for item in self.mine(self.columns.len() * lanes) {
            let (lane, column) = (item % lanes, item / lanes);
            let x = self.vector(step.input, lane, column, 0..hidden);
            let at = self.at(lane, column, hidden);
            // SAFETY: one member an item.
            let out = unsafe { self.pass.normed.part(at..at + hidden) };
            self.normalise(scale, lane, x, out);
        }
        self.barrier.wait();
        self.pack_input(weights, hidden, lanes, |lane| {
            let at = self.at(lane, self.decode, hidden);
            // SAFETY: nobody writes `normed` in this phase.
            unsafe { self.pass.normed.part(at..at + (self.columns.len() - self.decode) * hidden) }
        });
    }

    fn normalise(&self, scale: Option<&[f32]>, lane: usize, x: &[f32], out: &mut [f32]) {
        let factor = 1.0 / (ops::mean_square(self.pass.level, x) + self.dims().eps).sqrt();
        let Some(scale) = scale else {
            return out.iter_mut().zip(x).for_each(|(o, x)| *o = x * factor);
        };
        // A scale is one row shared by the lanes, or one row a lane.
        let row = if scale.len() == x.len() { 0 } else { lane * x.len() };
        for ((o, x), scale) in out.iter_mut().zip(x).zip(&scale[row..]) {
            *o = scale * (x * factor);
        }
    }

    /// Packs the prefill columns of each lane's input as each of the matrices `weights` wants
    /// them; one member a lane.
    fn pack_input<'x>(
        &self,
        weights: &[u32],
        width: usize,
        lanes: usize,
        input: impl Fn(usize) -> &'x mut [f32],
    ) {
        let columns = self.columns.len() - self.decode;
        if columns == 0 {
            return;
        }
        let mut codes = [Codes::F32; 3];
        let codes = &mut codes[..weights.len()];
        for (codes, weight) in codes.iter_mut().zip(weights) {
            *codes = self.pass.program.tensors[*weight as usize].encoding.codes;
        }
        for lane in self.mine(lanes) {
            // SAFETY: one member a lane, and nobody reads `packed` before the barrier.
            let packed = unsafe { &mut *self.pass.packed[lane].get() };
            pack(self.pass.level, codes, input(lane), columns, width, packed);
        }
        self.barrier.wait();
    }

    /// `rows` of one matrix for all columns, into `out[column * stride + row - rows.start]`.
    fn multiply(
        &self,
        matrix: &Matrix<'_>,
        rows: Range<usize>,
        x: &[f32],
        lane: usize,
        out: Output<'_>,
    ) {
        if rows.is_empty() {
            return;
        }
        let width = matrix.cols;
        let part = |columns: Range<usize>| {
            let last = (columns.len() - 1) * out.stride + rows.len();
            let at = out.at + columns.start * out.stride;
            // SAFETY: a member's own rows of every column; columns of other rows between them are
            // not touched, though the slice spans them.
            unsafe { out.field.part(at..at + last) }
        };
        for begin in (0..self.decode).step_by(DECODE_COLUMNS) {
            let columns = begin..self.decode.min(begin + DECODE_COLUMNS);
            let x = &x[columns.start * width..columns.end * width];
            let y = part(columns.clone());
            matmul(self.pass.level, matrix, rows.clone(), x, columns.len(), y, out.stride);
        }
        if self.decode < self.columns.len() {
            // SAFETY: packed before the last barrier; nobody writes it in this phase.
            let packed = unsafe { &*self.pass.packed[lane].get() };
            let y = part(self.decode..self.columns.len());
            prefill(self.pass.level, matrix, rows, packed, y, out.stride);
        }
    }

    fn normed(&self, lane: usize, width: usize) -> &[f32] {
        let at = self.at(lane, 0, width);
        // SAFETY: nobody writes `normed` in this phase.
        unsafe { self.pass.normed.part(at..at + self.columns.len() * width) }
    }

    fn qkv(&self, step: &Step) {
        let d = *self.dims();
        self.norm(step, &step.weights);
        let hd = d.head_dim as usize;
        let heads = [d.heads as usize, d.kv_heads as usize, d.kv_heads as usize];
        let per_lane: usize = heads.iter().sum();
        let stride = per_lane * hd;
        let mine = self.rows(step);
        for lane in 0..d.lanes as usize {
            let x = self.normed(lane, d.hidden as usize);
            let mut first = lane * per_lane;
            for (which, count) in heads.into_iter().enumerate() {
                let part = intersect(&mine, first..first + count);
                let matrix = self
                    .pass
                    .matrix(&self.pass.program.tensors[step.weights[which] as usize], lane);
                let rows = (part.start - first) * hd..(part.end - first) * hd;
                let offset = (first - lane * per_lane) * hd + rows.start;
                let at = self.at(lane, 0, stride) + offset;
                self.multiply(&matrix, rows, x, lane, Output { field: &self.pass.raw, at, stride });
                for head in part {
                    self.finish_head(step, lane, which, head - first, head - lane * per_lane);
                }
                first += count;
            }
        }
    }

    /// Bias, head norm and rotary of one head of q, k or v, then to where attention reads it.
    fn finish_head(&self, step: &Step, lane: usize, which: usize, head: usize, raw_head: usize) {
        let d = self.dims();
        let hd = d.head_dim as usize;
        let stride = ((d.heads + 2 * d.kv_heads) * d.head_dim) as usize;
        let heads = if which == 0 { d.heads } else { d.kv_heads } as usize;
        for column in 0..self.columns.len() {
            let at = self.at(lane, column, stride) + raw_head * hd;
            // SAFETY: the head is this member's own.
            let x = unsafe { self.pass.raw.part(at..at + hd) };
            if let Some(bias) = self.pass.constant(step.biases[which]) {
                let bias = &bias[(lane * heads + head) * hd..][..hd];
                x.iter_mut().zip(bias).for_each(|(x, b)| *x += b);
            }
            if which < 2 {
                if let Some(scale) = self.pass.constant(step.head_norms[which]) {
                    let factor = 1.0 / (ops::mean_square(self.pass.level, x) + d.eps).sqrt();
                    x.iter_mut().zip(scale).for_each(|(x, scale)| *x *= factor * scale);
                }
                self.rotate(column, x);
            }
            if which == 0 {
                self.vector(step.output, lane, column, head * hd..(head + 1) * hd)
                    .copy_from_slice(x);
            } else {
                self.store_kv(step, lane, column, head, which == 2, x);
            }
        }
    }

    fn rotate(&self, column: usize, x: &mut [f32]) {
        let (hd, half) = (x.len(), x.len() / 2);
        // SAFETY: nobody writes the angles during a pass.
        let angles = unsafe { self.pass.angles.part(column * hd..(column + 1) * hd) };
        let (cos, sin) = angles.split_at(half);
        let turn = |a: &mut f32, b: &mut f32, cos: f32, sin: f32| {
            (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
        };
        let angles = cos.iter().zip(sin);
        if self.dims().rope_interleaved == 1 {
            for (pair, (cos, sin)) in x.chunks_exact_mut(2).zip(angles) {
                let (a, b) = pair.split_at_mut(1);
                turn(&mut a[0], &mut b[0], *cos, *sin);
            }
        } else {
            let (a, b) = x.split_at_mut(half);
            for ((a, b), (cos, sin)) in a.iter_mut().zip(b).zip(angles) {
                turn(a, b, *cos, *sin);
            }
        }
    }

    /// First byte of the 64 keys (or values) of one page, layer, lane and kv head.
    fn kv_at(&self, step: &Step, page: usize, lane: usize, head: usize, values: bool) -> usize {
        let d = self.dims();
        let group = step.group as usize;
        let half = PAGE * d.head_dim as usize * d.kv_dtype.bytes();
        let head = (step.group_layer * d.lanes + lane as u32) * d.kv_heads + head as u32;
        page * d.page_bytes(group) as usize + (2 * head as usize + usize::from(values)) * half
    }

    fn page(&self, step: &Step, slot: usize, logical: usize) -> usize {
        // SAFETY: the slot runs, so host and control plane leave its page table alone.
        let memory = unsafe { self.mailbox.slot_of_device(slot) };
        memory.pages[step.group as usize][logical] as usize
    }

    fn store_kv(
        &self,
        step: &Step,
        lane: usize,
        column: usize,
        head: usize,
        values: bool,
        x: &[f32],
    ) {
        let Column { slot, position, .. } = self.columns[column];
        let page = self.page(step, slot, position / PAGE);
        let bytes = x.len() * self.dims().kv_dtype.bytes();
        let at = self.kv_at(step, page, lane, head, values) + position % PAGE * bytes;
        // SAFETY: this position of this head is this member's own.
        let out = unsafe { self.pass.pages[step.group as usize].part(at..at + bytes) };
        numbers::store_f32(self.dims().kv_dtype, x, out);
    }

    fn attend(&self, step: &Step) {
        let d = self.dims();
        let heads = (d.lanes * d.kv_heads) as usize;
        let prefills = self.columns.len() - self.decode;
        let blocks = prefills.div_ceil(QUERY_BLOCK);
        for item in self.mine((self.decode + blocks) * heads) {
            // Consecutive items are the heads of one block of queries.
            let (block, head) = (item / heads, item % heads);
            let (lane, head) = (head / d.kv_heads as usize, head % d.kv_heads as usize);
            if block < self.decode {
                self.attend_columns(step, lane, head, block..block + 1);
                continue;
            }
            let first = self.decode + (block - self.decode) * QUERY_BLOCK;
            let columns = first..(first + QUERY_BLOCK).min(self.columns.len());
            // Columns of one sequence are neighbours; each sequence has its own pages.
            let mut begin = columns.start;
            for sequence in self.columns[columns].chunk_by(|a, b| a.slot == b.slot) {
                self.attend_columns(step, lane, head, begin..begin + sequence.len());
                begin += sequence.len();
            }
        }
    }

    /// The query heads that share one kv head, for columns of one sequence and one path.
    fn attend_columns(&self, step: &Step, lane: usize, head: usize, columns: Range<usize>) {
        let d = self.dims();
        let (hd, shared) = (d.head_dim as usize, (d.heads / d.kv_heads) as usize);
        let first_seen = |column: usize| match step.window {
            NONE => 0,
            window => (self.columns[column].position + 1).saturating_sub(window as usize),
        };
        let Column { slot, path, .. } = self.columns[columns.start];
        // Pages before the first key may be gone: count from the page that holds it.
        let begin = first_seen(columns.start) / PAGE;
        let half = PAGE * hd * d.kv_dtype.bytes();
        let pages = &self.pass.pages[step.group as usize];
        let page = |logical: usize| {
            let page = self.page(step, slot, begin + logical);
            let at = |values| self.kv_at(step, page, lane, head, values);
            let (k, v) = (at(false), at(true));
            // SAFETY: keys and values were stored before the last barrier.
            let k = unsafe { pages.part(k..k + half) };
            // SAFETY: as above.
            let v = unsafe { pages.part(v..v + half) };
            KvPage { k, v }
        };
        let span = |column: usize| {
            first_seen(column) - begin * PAGE..=self.columns[column].position - begin * PAGE
        };
        let width = shared * hd;
        let stride = d.heads as usize * hd;
        let heads = |vector: u32| {
            let at = self.at(lane, columns.start, stride) + head * width;
            let last = (columns.len() - 1) * stride + width;
            // SAFETY: this kv head's query heads are the item's own; what lies between the columns
            // is spanned, not touched.
            unsafe { self.pass.vectors[vector as usize].part(at..at + last) }
        };
        let (q, out) = (heads(step.input), heads(step.output));
        let scale = 1.0 / (hd as f32).sqrt();
        // SAFETY: member's own scratch.
        let scratch = unsafe { &mut (*self.pass.members[self.member].get()).attention };
        let (level, dtype) = (self.pass.level, d.kv_dtype);
        if path == Path::Decode {
            let span = span(columns.start);
            attention::attend(level, dtype, hd, q, page, span, scale, out, scratch);
            return;
        }
        let mut spans = [const { 0..=0 }; QUERY_BLOCK];
        spans.iter_mut().zip(columns.clone()).for_each(|(s, column)| *s = span(column));
        let spans = &spans[..columns.len()];
        attention::attend_chunk(
            level, dtype, hd, shared, q, page, spans, scale, out, stride, scratch,
        );
    }

    fn project(&self, step: &Step) {
        let d = *self.dims();
        let (hidden, lanes) = (d.hidden as usize, d.lanes as usize);
        let tensor = self.pass.program.tensors[step.weights[0] as usize];
        let width = tensor.cols as usize;
        let all = self.columns.len();
        let input = |lane, columns: Range<usize>| {
            let at = self.at(lane, columns.start, width);
            // SAFETY: nobody writes the input in this step.
            unsafe { self.pass.vectors[step.input as usize].part(at..at + columns.len() * width) }
        };
        self.pack_input(&step.weights[..1], width, lanes, |lane| input(lane, self.decode..all));
        let rows = self.rows(step);
        for lane in 0..lanes {
            let at = self.at(lane, 0, hidden) + rows.start;
            let out = Output { field: &self.pass.raw, at, stride: hidden };
            let matrix = self.pass.matrix(&tensor, lane);
            self.multiply(&matrix, rows.clone(), input(lane, 0..all), lane, out);
        }
        for column in 0..all {
            self.mix(step, rows.clone(), column);
        }
    }

    /// Adds the module's outputs to the residual streams; this member's rows of one column.
    fn mix(&self, step: &Step, rows: Range<usize>, column: usize) {
        let (hidden, lanes) = (self.dims().hidden as usize, self.dims().lanes as usize);
        let own = |lane: usize| -> &[f32] {
            let at = self.at(lane, column, hidden);
            // SAFETY: this member's own rows, written above by itself.
            unsafe { self.pass.raw.part(at + rows.start..at + rows.end) }
        };
        for lane in 0..lanes {
            let x = self.vector(step.output, lane, column, rows.clone());
            if step.mix_delay == 0 {
                // Lanes in order, so that all end with the same bits.
                (0..lanes).for_each(|l| add(x, own(l), 1.0));
                continue;
            }
            add(x, own(lane), step.mix_own);
            for other in (0..lanes).filter(|l| step.mix_delay > 0 && *l != lane) {
                add(x, self.vector(step.others, other, column, rows.clone()), 1.0);
            }
        }
        if step.partial != NONE {
            for lane in 0..lanes {
                self.vector(step.partial, lane, column, rows.clone()).copy_from_slice(own(lane));
            }
        }
    }

    fn gate_up(&self, step: &Step) {
        let d = *self.dims();
        self.norm(step, &step.weights[..2]);
        let ffn = d.ffn as usize;
        let mine = self.rows(step);
        for lane in 0..d.lanes as usize {
            let part = intersect(&mine, lane * ffn..(lane + 1) * ffn);
            let rows = part.start - lane * ffn..part.end - lane * ffn;
            let x = self.normed(lane, d.hidden as usize);
            let at = self.at(lane, 0, ffn) + rows.start;
            let fields = [&self.pass.vectors[step.output as usize], &self.pass.raw];
            for (tensor, field) in step.weights.iter().zip(fields) {
                let matrix = self.pass.matrix(&self.pass.program.tensors[*tensor as usize], lane);
                self.multiply(&matrix, rows.clone(), x, lane, Output { field, at, stride: ffn });
            }
            for column in 0..self.columns.len() {
                let gate = self.vector(step.output, lane, column, rows.clone());
                let at = self.at(lane, column, ffn);
                // SAFETY: this member's own rows.
                let up = unsafe { self.pass.raw.part(at + rows.start..at + rows.end) };
                ops::silu_mul(self.pass.level, gate, up);
            }
        }
    }

    /// Final norm and lane combination of the wanted columns into `normed`, packed to the front;
    /// then logits by the decode path, whatever path the column took so far.
    fn head(&self, step: &Step) {
        let d = *self.dims();
        let (hidden, lanes) = (d.hidden as usize, d.lanes as usize);
        let wanted = &self.pass.wanted;
        for row in self.mine(wanted.len()) {
            self.final_norm(step, row, wanted[row]);
        }
        self.barrier.wait();
        let tensor = self.pass.program.tensors[step.weights[0] as usize];
        let width = tensor.cols as usize;
        let vocab = d.vocab as usize;
        let mine = self.rows(step);
        let parts = if d.head_mode == HeadMode::PerLane { lanes } else { 1 };
        // The last parts are shorter, or empty, where the vocabulary does not divide.
        let each = vocab.div_ceil(parts);
        for part in 0..parts {
            let slice = (part * each).min(vocab)..((part + 1) * each).min(vocab);
            let rows = intersect(&mine, slice.clone());
            let matrix = self.pass.matrix(&tensor, part);
            for begin in (0..wanted.len()).step_by(DECODE_COLUMNS) {
                let n = DECODE_COLUMNS.min(wanted.len() - begin);
                if rows.is_empty() {
                    break;
                }
                let at = part * d.columns as usize * hidden + begin * width;
                // SAFETY: nobody writes `normed` in this phase.
                let x = unsafe { self.pass.normed.part(at..at + n * width) };
                let at = begin * vocab + rows.start;
                let last = (n - 1) * vocab + rows.len();
                // SAFETY: this member's own rows of every column.
                let y = unsafe { self.pass.logits.part(at..at + last) };
                let local = rows.start - slice.start..rows.end - slice.start;
                matmul(self.pass.level, &matrix, local, x, n, y, vocab);
            }
        }
    }

    /// The head's input for one wanted column, at `row` of `normed`.
    fn final_norm(&self, step: &Step, row: usize, column: usize) {
        let d = self.dims();
        let (hidden, lanes) = (d.hidden as usize, d.lanes as usize);
        let scale = self.pass.constant(step.norm);
        let stream = |lane| -> &[f32] { self.vector(step.input, lane, column, 0..hidden) };
        // SAFETY: one member a row.
        let place = |at: usize| unsafe { self.pass.normed.part(at..at + hidden) };
        // SAFETY: member's own scratch.
        let scratch = unsafe { &mut (*self.pass.members[self.member].get()).stream };
        match d.head_mode {
            HeadMode::PerLane => {
                for lane in 0..lanes {
                    let out = place(self.at(lane, row, hidden));
                    self.normalise(scale, lane, stream(lane), out);
                }
            }
            HeadMode::Concat => {
                for lane in 0..lanes {
                    let out = place((row * lanes + lane) * hidden);
                    self.normalise(scale, lane, stream(lane), out);
                }
            }
            HeadMode::SumThenNorm => {
                scratch.copy_from_slice(stream(0));
                for lane in 1..lanes {
                    scratch.iter_mut().zip(stream(lane)).for_each(|(s, x)| *s += x);
                }
                self.normalise(scale, 0, scratch, place(row * hidden));
            }
            HeadMode::Mean => {
                let out = place(row * hidden);
                self.normalise(scale, 0, stream(0), out);
                for lane in 1..lanes {
                    self.normalise(scale, lane, stream(lane), scratch);
                    out.iter_mut().zip(scratch.iter()).for_each(|(o, x)| *o += x);
                }
                out.iter_mut().for_each(|o| *o /= lanes as f32);
            }
        }
    }
}

/// `x += factor * y`.
fn add(x: &mut [f32], y: &[f32], factor: f32) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += factor * y);
}

/// Where a product goes: `field[at + column * stride + row]`.
struct Output<'a> {
    field: &'a Field<f32>,
    at: usize,
    stride: usize,
}

fn intersect(a: &Range<usize>, b: Range<usize>) -> Range<usize> {
    let start = a.start.clamp(b.start, b.end);
    start..a.end.clamp(start, b.end)
}
