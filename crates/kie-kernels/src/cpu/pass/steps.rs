//! The arithmetic of each step, by one member. Who writes what in a phase is said in the module
//! above, which walks the steps.

use std::ops::Range;

use super::{Angles, Column, Path, Walk, DECODE_COLUMNS, QUERY_BLOCK};
use crate::abi::{
    Attend, Codes, Dtype, Embed, GateUp, Head, HeadMode, Heads, Join, NormSpan, Project,
    ProjectNormed, Qkv, Rotary, StateAt, StateKind, PAGE,
};
use crate::cpu::attention::{self, KvPage};
use crate::cpu::matmul::matmul;
use crate::cpu::ops;
use crate::cpu::prefill::{pack, prefill};
use crate::field::{Columns, Field};
use crate::matrix::{row_to_f32, Matrix};
use crate::numbers::store_f32;

/// Weights that the decode path takes between two looks whether it is to go on.
const DECODE_WEIGHTS: usize = 4 << 20;

impl Walk<'_> {
    pub(super) fn embed(&self, step: &Embed) {
        let to = self.pass.program.vectors[step.output as usize];
        let hidden = self.dims().hidden as usize;
        for item in self.mine(self.columns.len()) {
            for lane in 0..to.lanes as usize {
                let out = self.write(step.output, lane, item, 0..to.width as usize);
                let (first, others) = out.split_at_mut(hidden);
                let row = self.columns[item].token as usize;
                row_to_f32(&self.pass.matrix(step.table, 0), row, first);
                if step.factor != 1.0 {
                    first.iter_mut().for_each(|x| *x *= step.factor);
                }
                others.chunks_exact_mut(hidden).for_each(|other| other.copy_from_slice(first));
            }
        }
    }

    /// RMSNorm of every column and lane of `input` into `normed`, packed where prefill wants it;
    /// without a scale the input as it is.
    pub(super) fn norm(&self, scale: Option<u32>, input: u32, weights: &[u32]) {
        let (hidden, lanes) = (self.dims().hidden as usize, self.dims().lanes as usize);
        let scale = scale.map(|scale| self.pass.constant(scale));
        for item in self.mine(self.columns.len() * lanes) {
            let (lane, column) = (item % lanes, item / lanes);
            let x = self.read(input, lane, column, 0..hidden);
            let at = self.at(lane, column, hidden);
            // SAFETY: one member an item.
            let out = unsafe { self.pass.normed.write(at..at + hidden) };
            match scale {
                Some(scale) => self.normalise(scale, lane, x, out),
                None => out.copy_from_slice(x),
            }
        }
        self.barrier.wait();
        self.pack_input(weights, hidden, lanes, |lane| {
            let at = self.at(lane, self.decode, hidden);
            // SAFETY: nobody writes `normed` in this phase.
            unsafe { self.pass.normed.read(at..at + (self.columns.len() - self.decode) * hidden) }
        });
    }

    /// What RMSNorm multiplies numbers by, their scales apart.
    fn factor(&self, x: &[f32]) -> f32 {
        self.factor_by(self.dims().eps, x)
    }

    /// The same with an epsilon of its own.
    pub(super) fn factor_by(&self, eps: f32, x: &[f32]) -> f32 {
        1.0 / (ops::mean_square(self.pass.level, x) + eps).sqrt()
    }

    pub(super) fn normalise(&self, scale: &[f32], lane: usize, x: &[f32], out: &mut [f32]) {
        let factor = self.factor(x);
        // A scale is one row shared by the lanes, or one row a lane.
        let row = if scale.len() == x.len() { 0 } else { lane * x.len() };
        for ((o, x), scale) in out.iter_mut().zip(x).zip(&scale[row..]) {
            *o = scale * (x * factor);
        }
    }

    /// Packs the prefill columns of each lane's input as each of the matrices `weights` wants
    /// them; one member a lane.
    pub(super) fn pack_input<'x>(
        &self,
        weights: &[u32],
        width: usize,
        lanes: usize,
        input: impl Fn(usize) -> &'x [f32],
    ) {
        let columns = self.columns.len() - self.decode;
        if columns == 0 || weights.is_empty() {
            return;
        }
        let mut codes = [Codes::F32; 3];
        let codes = &mut codes[..weights.len()];
        for (codes, weight) in codes.iter_mut().zip(weights) {
            *codes = self.pass.program.tensors[*weight as usize].encoding.codes;
        }
        for lane in self.mine(lanes) {
            // SAFETY: one member a lane, and nobody reads `packed` before the barrier.
            let packed = unsafe { self.pass.packed.write(lane..lane + 1) };
            pack(self.pass.prompts, codes, input(lane), columns, width, &mut packed[0]);
        }
        self.barrier.wait();
    }

    /// `rows` of one matrix for all columns, into those rows' piece of each column.
    pub(super) fn multiply(
        &self,
        matrix: &Matrix<'_>,
        rows: Range<usize>,
        x: &[f32],
        lane: usize,
        out: Columns<'_, f32>,
    ) {
        if rows.is_empty() {
            return;
        }
        let width = matrix.cols;
        let mut out = out;
        for begin in (0..self.decode).step_by(DECODE_COLUMNS) {
            let columns = begin..self.decode.min(begin + DECODE_COLUMNS);
            let x = &x[columns.start * width..columns.end * width];
            self.decoded(matrix, &rows, x, out.some(columns, 0..rows.len()));
        }
        if self.decode < self.columns.len() {
            // SAFETY: packed before the last barrier; nobody writes it in this phase.
            let packed = unsafe { self.pass.packed.read(lane..lane + 1) };
            let y = out.some(self.decode..self.columns.len(), 0..rows.len());
            prefill(self.pass.prompts, self.panels(), matrix, rows, packed[0].all(), y, &|| {
                self.goes_on()
            });
        }
    }

    /// `rows` of one matrix by the decode path, into those rows' piece of each column.
    fn decoded(
        &self,
        matrix: &Matrix<'_>,
        rows: &Range<usize>,
        x: &[f32],
        mut out: Columns<'_, f32>,
    ) {
        let (columns, most) = (out.count(), (DECODE_WEIGHTS / matrix.cols).next_multiple_of(4));
        for begin in rows.clone().step_by(most) {
            if !self.goes_on() {
                return;
            }
            let some = begin..rows.end.min(begin + most);
            let y = out.some(0..columns, some.start - rows.start..some.end - rows.start);
            matmul(self.pass.level, matrix, some, x, y, self.digits());
        }
    }

    /// The same in float32 for all columns, whatever their path; these are not packed.
    pub(super) fn exactly(
        &self,
        matrix: &Matrix<'_>,
        rows: Range<usize>,
        x: &[f32],
        mut out: Columns<'_, f32>,
    ) {
        let (width, all) = (matrix.cols, self.columns.len());
        for begin in (0..all).step_by(DECODE_COLUMNS) {
            if rows.is_empty() || !self.goes_on() {
                return;
            }
            let columns = begin..all.min(begin + DECODE_COLUMNS);
            let x = &x[columns.start * width..columns.end * width];
            let y = out.some(columns, 0..rows.len());
            matmul(self.pass.level, matrix, rows.clone(), x, y, self.digits());
        }
    }

    /// All columns of one lane of a vector that nobody writes in this phase.
    pub(super) fn whole(&self, index: u32, lane: usize, width: usize) -> &[f32] {
        let at = self.at(lane, 0, width);
        // SAFETY: what a phase reads of others it does not write (module docs).
        unsafe { self.pass.vectors[index as usize].read(at..at + self.columns.len() * width) }
    }

    /// What this member has to do (`mine`) of matrices whose rows stand one behind the other, as
    /// told, in `raw`'s columns of `stride` numbers: all of them times lane 0's `x`.
    pub(super) fn multiply_stacked(
        &self,
        parts: impl Iterator<Item = (u32, Range<usize>)>,
        stride: usize,
        mine: &Range<usize>,
        x: &[f32],
    ) {
        for (weight, all) in parts {
            let part = intersect(mine, all.clone());
            let rows = part.start - all.start..part.end - all.start;
            let at = self.at(0, 0, stride) + part.start;
            let out = self.output(&self.pass.raw, at, rows.len(), stride);
            self.multiply(&self.pass.matrix(weight, 0), rows, x, 0, out);
        }
    }

    /// Where a product of this member's rows goes: `width` of them in every column, from `at` on.
    pub(super) fn output<'f>(
        &self,
        field: &'f Field<f32>,
        at: usize,
        width: usize,
        stride: usize,
    ) -> Columns<'f, f32> {
        // SAFETY: a member's own rows of every column (module docs).
        unsafe { field.columns(at, width, stride, self.columns.len()) }
    }

    pub(super) fn normed(&self, lane: usize, width: usize) -> &[f32] {
        let at = self.at(lane, 0, width);
        // SAFETY: nobody writes `normed` in this phase.
        unsafe { self.pass.normed.read(at..at + self.columns.len() * width) }
    }

    pub(super) fn qkv(&self, step: &Qkv) {
        let d = *self.dims();
        self.norm(step.norm, step.input, &step.weights);
        let (hd, per_lane) = (step.heads.dim as usize, step.all_heads() as usize);
        let heads = [step.heads.query, step.heads.kv, step.heads.kv].map(|count| count as usize);
        let stride = per_lane * hd;
        let mine = self.rows(step.partition);
        // Heads of a matrix are those of q and their gates by turns.
        let stored = [heads[0] + per_lane - heads.iter().sum::<usize>(), heads[1], heads[2]];
        for lane in 0..d.lanes as usize {
            let x = self.normed(lane, d.hidden as usize);
            let mut first = lane * per_lane;
            for (which, count) in stored.into_iter().enumerate() {
                let part = intersect(&mine, first..first + count);
                let matrix = self.pass.matrix(step.weights[which], lane);
                let rows = (part.start - first) * hd..(part.end - first) * hd;
                let offset = (first - lane * per_lane) * hd + rows.start;
                let at = self.at(lane, 0, stride) + offset;
                let out = self.output(&self.pass.raw, at, rows.len(), stride);
                self.multiply(&matrix, rows, x, lane, out);
                first += count;
            }
        }
        if step.head_norms.is_some() && step.norm_span == NormSpan::AllHeads {
            self.barrier.wait();
            self.span_factors(step);
            self.barrier.wait();
        }
        for lane in 0..d.lanes as usize {
            let mut first = lane * per_lane;
            for (which, count) in stored.into_iter().enumerate() {
                for raw in intersect(&mine, first..first + count) {
                    let (head, raw) = (raw - first, raw - lane * per_lane);
                    match step.gates.filter(|_| which == 0) {
                        Some(gates) if head % 2 == 1 => self.keep_gate(step, gates, lane, raw),
                        Some(_) => self.finish_head(step, lane, which, head / 2, raw),
                        None => self.finish_head(step, lane, which, head, raw),
                    }
                }
                first += count;
            }
        }
    }

    /// The gate of a query head, to where attention reads it.
    fn keep_gate(&self, step: &Qkv, gates: u32, lane: usize, raw_head: usize) {
        let (hd, stride) = (step.heads.dim as usize, (step.all_heads() * step.heads.dim) as usize);
        for column in 0..self.columns.len() {
            let at = self.at(lane, column, stride) + raw_head * hd;
            // SAFETY: the gate is this member's own.
            let x = unsafe { self.pass.raw.read(at..at + hd) };
            let head = raw_head / 2;
            self.write(gates, lane, column, head * hd..(head + 1) * hd).copy_from_slice(x);
        }
    }

    /// Factors of the norms over all heads of q and of k; the validator saw one lane.
    fn span_factors(&self, step: &Qkv) {
        let (q, kv) = (step.heads.query_width() as usize, step.heads.kv_width() as usize);
        for column in self.mine(self.columns.len()) {
            let at = self.at(0, column, q + 2 * kv);
            // SAFETY: q and k were written before the last barrier, and nobody writes them in this
            // phase.
            let x = unsafe { self.pass.raw.read(at..at + q + kv) };
            // SAFETY: one member a column.
            let out = unsafe { self.pass.factors.write(2 * column..2 * column + 2) };
            for (out, part) in out.iter_mut().zip([0..q, q..q + kv]) {
                *out = self.factor(&x[part]);
            }
        }
    }

    /// Bias, head norm and rotary of one head of q, k or v, then to where attention reads it.
    fn finish_head(&self, step: &Qkv, lane: usize, which: usize, head: usize, raw_head: usize) {
        let hd = step.heads.dim as usize;
        let stride = step.all_heads() as usize * hd;
        let heads = if which == 0 { step.heads.query } else { step.heads.kv } as usize;
        for column in 0..self.columns.len() {
            let at = self.at(lane, column, stride) + raw_head * hd;
            // SAFETY: the head is this member's own.
            let x = unsafe { self.pass.raw.write(at..at + hd) };
            if let Some(biases) = step.biases {
                let bias = &self.pass.constant(biases[which])[(lane * heads + head) * hd..][..hd];
                x.iter_mut().zip(bias).for_each(|(x, b)| *x += b);
            }
            if which < 2 {
                if let Some(norms) = step.head_norms {
                    let scale = self.pass.constant(norms[which]);
                    let (factor, scale) = match step.norm_span {
                        NormSpan::Head => (self.factor(x), scale),
                        // SAFETY: written before the last barrier.
                        NormSpan::AllHeads => unsafe {
                            let at = 2 * column + which;
                            (self.pass.factors.read(at..at + 1)[0], &scale[head * hd..][..hd])
                        },
                    };
                    x.iter_mut().zip(scale).for_each(|(x, scale)| *x *= factor * scale);
                }
                self.rotate(step.rotary, column, x);
            }
            if which == 0 {
                self.write(step.output, lane, column, head * hd..(head + 1) * hd)
                    .copy_from_slice(x);
            } else {
                let at = KvAt { state: step.state, lane, head };
                self.store_kv(&at, column, which == 2, x);
            }
        }
    }

    /// Turns the features that a rotary table has pairs of.
    pub(super) fn rotate(&self, rotary: Rotary, column: usize, x: &mut [f32]) {
        let table = self.angles_of(rotary);
        let numbers = 2 * table.pairs[0].len();
        let at = numbers * column;
        // SAFETY: nobody writes the angles during a pass.
        let angles = unsafe { table.turned.read(at..at + numbers) };
        turn(rotary.interleaved, angles, x);
    }

    /// What a pass knows of a rotary table.
    pub(super) fn angles_of(&self, rotary: Rotary) -> &Angles {
        let table = self.pass.angles.iter().find(|angles| angles.table == rotary.table);
        table.expect("every step's table has angles")
    }

    /// First byte of the 64 keys (or values) of one page, layer, lane and kv head, and the format
    /// of its numbers.
    fn kv_at(&self, at: &KvAt, page: usize, values: bool) -> (usize, Dtype) {
        let group = &self.pass.program.groups[at.state.group as usize];
        let StateKind::KeysValues { dtype, lanes, kv_heads, head_dim } = group.state else {
            unreachable!("the validator saw keys and values");
        };
        let half = PAGE * head_dim as usize * dtype.bytes();
        let head = (at.state.layer * lanes + at.lane as u32) * kv_heads + at.head as u32;
        let first = page * group.page_bytes() as usize;
        (first + (2 * head as usize + usize::from(values)) * half, dtype)
    }

    pub(super) fn page(&self, state: StateAt, slot: usize, logical: usize) -> usize {
        self.mailbox.page(slot, state.group as usize, logical) as usize
    }

    fn store_kv(&self, to: &KvAt, column: usize, values: bool, x: &[f32]) {
        let Column { slot, position, .. } = self.columns[column];
        let page = self.page(to.state, slot, position / PAGE);
        let (first, dtype) = self.kv_at(to, page, values);
        let bytes = x.len() * dtype.bytes();
        let at = first + position % PAGE * bytes;
        // SAFETY: this position of this head is this member's own.
        let out = unsafe { self.pass.pages[to.state.group as usize].write(at..at + bytes) };
        store_f32(dtype, x, out);
    }

    pub(super) fn attend(&self, step: &Attend) {
        let kv_heads = step.heads.kv as usize;
        let heads = self.dims().lanes as usize * kv_heads;
        self.attend_items(heads, |head, columns| {
            self.attend_columns(step, head / kv_heads, head % kv_heads, columns);
        });
    }

    /// Deals attention out: `each` takes one of so many parts of all heads, for columns of one
    /// sequence and one path.
    pub(super) fn attend_items(&self, parts: usize, each: impl Fn(usize, Range<usize>)) {
        let prefills = self.columns.len() - self.decode;
        let blocks = prefills.div_ceil(QUERY_BLOCK);
        for item in self.mine((self.decode + blocks) * parts) {
            // Consecutive items are the heads of one block of queries.
            let (block, part) = (item / parts, item % parts);
            if !self.goes_on() {
                return;
            }
            if block < self.decode {
                each(part, block..block + 1);
                continue;
            }
            let first = self.decode + (block - self.decode) * QUERY_BLOCK;
            let columns = first..(first + QUERY_BLOCK).min(self.columns.len());
            // Columns of one sequence are neighbours; each sequence has its own pages.
            let mut begin = columns.start;
            for sequence in self.columns[columns].chunk_by(|a, b| a.slot == b.slot) {
                each(part, begin..begin + sequence.len());
                begin += sequence.len();
            }
        }
    }

    /// The query heads that share one kv head, for columns of one sequence and one path.
    fn attend_columns(&self, step: &Attend, lane: usize, head: usize, columns: Range<usize>) {
        let Heads { query, kv, dim } = step.heads;
        let (hd, shared) = (dim as usize, (query / kv) as usize);
        let pages = &self.pass.pages[step.state.group as usize];
        let from = KvAt { state: step.state, lane, head };
        let (_, dtype) = self.kv_at(&from, 0, false);
        let half = PAGE * hd * dtype.bytes();
        let page = |page: usize| {
            let (k, v) = (self.kv_at(&from, page, false).0, self.kv_at(&from, page, true).0);
            // SAFETY: keys and values were stored before the last barrier.
            let k = unsafe { pages.read(k..k + half) };
            // SAFETY: as above.
            let v = unsafe { pages.read(v..v + half) };
            KvPage { k, v }
        };
        let first = lane * query as usize + head * shared;
        let attending = Attending {
            vectors: [step.input, step.output],
            lane,
            heads: head * shared..(head + 1) * shared,
            dim: hd,
            scale: 1.0 / (hd as f32).sqrt(),
            sinks: step.sinks.map(|sinks| &self.pass.constant(sinks)[first..first + shared]),
            window: step.window,
            state: step.state,
            dtype,
        };
        self.attend_pages(&attending, columns.clone(), page);
        self.gate_heads(step, lane, head, columns);
    }

    /// Heads over pages that they share, by their numbers, for columns of one sequence and path.
    pub(super) fn attend_pages<'p>(
        &self,
        of: &Attending<'_>,
        columns: Range<usize>,
        page: impl Fn(usize) -> KvPage<'p>,
    ) {
        let (hd, heads) = (of.dim, of.heads.len());
        let first_seen = |column: usize| match of.window {
            None => 0,
            Some(window) => (self.columns[column].position + 1).saturating_sub(window as usize),
        };
        let Column { slot, path, .. } = self.columns[columns.start];
        // Pages before the first key may be gone: count from the page that holds it.
        let begin = first_seen(columns.start) / PAGE;
        let page = |logical: usize| page(self.page(of.state, slot, begin + logical));
        let span = |column: usize| {
            first_seen(column) - begin * PAGE..=self.columns[column].position - begin * PAGE
        };
        let [input, output] = of.vectors;
        let width = heads * hd;
        let stride = self.pass.program.vectors[input as usize].width as usize;
        let at = self.at(of.lane, columns.start, stride) + of.heads.start * hd;
        let last = (columns.len() - 1) * stride + width;
        // SAFETY: nobody writes queries in this step.
        let q = unsafe { self.pass.vectors[input as usize].read(at..at + last) };
        let output = &self.pass.vectors[output as usize];
        // SAFETY: these heads are the item's own, in every column.
        let mut out = unsafe { output.columns(at, width, stride, columns.len()) };
        let scratch = &mut self.scratch().attention;
        let level = self.pass.level;
        let &Attending { scale, sinks, dtype, .. } = of;
        if path == Path::Decode {
            let (span, out) = (span(columns.start), out.piece(0));
            attention::attend(level, dtype, hd, q, page, span, scale, sinks, out, scratch);
            return;
        }
        let mut spans = [const { 0..=0 }; QUERY_BLOCK];
        spans.iter_mut().zip(columns.clone()).for_each(|(s, column)| *s = span(column));
        let spans = &spans[..columns.len()];
        attention::attend_chunk(
            level, dtype, hd, heads, q, stride, page, spans, scale, sinks, out, scratch,
        );
    }

    /// Multiplies the output of a kv head's query heads by the sigmoids of their gates.
    fn gate_heads(&self, step: &Attend, lane: usize, head: usize, columns: Range<usize>) {
        let Some(gates) = step.gates else { return };
        let width = (step.heads.query / step.heads.kv * step.heads.dim) as usize;
        for column in columns {
            let part = head * width..(head + 1) * width;
            let gates = self.read(gates, lane, column, part.clone());
            let out = self.write(step.output, lane, column, part);
            out.iter_mut().zip(gates).for_each(|(x, gate)| *x *= ops::sigmoid(*gate));
        }
    }

    pub(super) fn project(&self, step: &Project) {
        let rows = self.rows(step.partition);
        self.product(step.weight, step.input, &rows);
        for column in 0..self.columns.len() {
            self.mix(step, rows.clone(), column);
        }
    }

    /// Each lane's rows of `weight · input`, into `raw`.
    fn product(&self, weight: u32, input: u32, rows: &Range<usize>) {
        let (hidden, lanes) = (self.dims().hidden as usize, self.dims().lanes as usize);
        let width = self.pass.program.vectors[input as usize].width as usize;
        let all = self.columns.len();
        let input = |lane, columns: Range<usize>| {
            let at = self.at(lane, columns.start, width);
            // SAFETY: nobody writes the input in this step.
            unsafe { self.pass.vectors[input as usize].read(at..at + columns.len() * width) }
        };
        self.pack_input(&[weight], width, lanes, |lane| input(lane, self.decode..all));
        for lane in 0..lanes {
            let at = self.at(lane, 0, hidden) + rows.start;
            let out = self.output(&self.pass.raw, at, rows.len(), hidden);
            let matrix = self.pass.matrix(weight, lane);
            self.multiply(&matrix, rows.clone(), input(lane, 0..all), lane, out);
        }
    }

    /// A module's output, normed, joins the residual streams.
    pub(super) fn project_normed(&self, step: &ProjectNormed) {
        self.product(step.weight, step.input, &self.rows(step.partition));
        self.barrier.wait();
        let (hidden, lanes) = (self.dims().hidden as usize, self.dims().lanes as usize);
        let scale = self.pass.constant(step.norm);
        for column in self.mine(self.columns.len()) {
            let own = |lane: usize| {
                let at = self.at(lane, column, hidden);
                // SAFETY: products were written before the last barrier.
                unsafe { self.pass.raw.read(at..at + hidden) }
            };
            // Lanes in order, so that all end with the same bits.
            let sum = &mut self.scratch().stream[..];
            sum.copy_from_slice(own(0));
            (1..lanes).for_each(|lane| add(sum, own(lane), 1.0));
            let factor = self.factor(sum);
            for lane in 0..lanes {
                let x = self.write(step.residual, lane, column, 0..hidden);
                let normed = sum.iter().zip(scale);
                x.iter_mut().zip(normed).for_each(|(x, (y, scale))| *x += scale * (y * factor));
            }
        }
    }

    /// Adds the module's outputs to the residual streams; this member's rows of one column.
    fn mix(&self, step: &Project, rows: Range<usize>, column: usize) {
        let (hidden, lanes) = (self.dims().hidden as usize, self.dims().lanes as usize);
        let own = |lane: usize| -> &[f32] {
            let at = self.at(lane, column, hidden);
            // SAFETY: this member's own rows, written above by itself.
            unsafe { self.pass.raw.read(at + rows.start..at + rows.end) }
        };
        for lane in 0..lanes {
            let x = self.write(step.residual, lane, column, rows.clone());
            match step.join {
                // Lanes in order, so that all end with the same bits.
                Join::Sum => {
                    (0..lanes).for_each(|l| add(x, own(l), 1.0));
                    let bias = step.bias.map(|bias| &self.pass.constant(bias)[rows.clone()]);
                    bias.into_iter().for_each(|bias| add(x, bias, 1.0));
                }
                Join::Own { factor } => add(x, own(lane), factor),
                Join::Delayed { from, .. } => {
                    add(x, own(lane), 1.0);
                    for other in (0..lanes).filter(|l| *l != lane) {
                        add(x, self.read(from, other, column, rows.clone()), 1.0);
                    }
                }
            }
        }
        if let Some(keep) = step.keep {
            for lane in 0..lanes {
                self.write(keep, lane, column, rows.clone()).copy_from_slice(own(lane));
            }
        }
    }

    pub(super) fn gate_up(&self, step: &GateUp) {
        let d = *self.dims();
        self.norm(step.norm, step.input, &step.weights);
        let ffn = step.ffn as usize;
        let mine = self.rows(step.partition);
        for lane in 0..d.lanes as usize {
            let part = intersect(&mine, lane * ffn..(lane + 1) * ffn);
            let rows = part.start - lane * ffn..part.end - lane * ffn;
            let x = self.normed(lane, d.hidden as usize);
            let at = self.at(lane, 0, ffn) + rows.start;
            let fields = [&self.pass.vectors[step.output as usize], &self.pass.raw];
            for (tensor, field) in step.weights.iter().zip(fields) {
                let matrix = self.pass.matrix(*tensor, lane);
                let out = self.output(field, at, rows.len(), ffn);
                self.multiply(&matrix, rows.clone(), x, lane, out);
            }
            for column in 0..self.columns.len() {
                let gate = self.write(step.output, lane, column, rows.clone());
                let at = self.at(lane, column, ffn);
                // SAFETY: this member's own rows.
                let up = unsafe { self.pass.raw.read(at + rows.start..at + rows.end) };
                ops::gate_mul(self.pass.level, step.gate, gate, up);
                if let Some(scale) = step.scale.filter(|_| !gate.is_empty()) {
                    let hidden = d.hidden as usize;
                    let x = &x[column * hidden..][..hidden];
                    let dot: f32 =
                        x.iter().zip(self.pass.constant(scale)).map(|(x, w)| x * w).sum();
                    gate.iter_mut().for_each(|y| *y *= ops::sigmoid(dot));
                }
            }
        }
    }

    /// Final norm and lane combination of the wanted columns into `normed`, packed to the front;
    /// then logits by the decode path, whatever path the column took so far.
    pub(super) fn head(&self, step: &Head) {
        let d = *self.dims();
        let (hidden, lanes) = (d.hidden as usize, d.lanes as usize);
        let wanted = &self.pass.wanted;
        for row in self.mine(wanted.len()) {
            self.final_norm(step, row, wanted[row]);
        }
        self.barrier.wait();
        let width = self.pass.program.tensors[step.weight as usize].cols as usize;
        let vocab = d.vocab as usize;
        let mine = self.rows(step.partition);
        let parts = if step.mode == HeadMode::PerLane { lanes } else { 1 };
        // The last parts are shorter, or empty, where the vocabulary does not divide.
        let each = vocab.div_ceil(parts);
        for part in 0..parts {
            let slice = (part * each).min(vocab)..((part + 1) * each).min(vocab);
            let rows = intersect(&mine, slice.clone());
            let matrix = self.pass.matrix(step.weight, part);
            for begin in (0..wanted.len()).step_by(DECODE_COLUMNS) {
                let n = DECODE_COLUMNS.min(wanted.len() - begin);
                if rows.is_empty() {
                    break;
                }
                let at = part * d.columns as usize * hidden + begin * width;
                // SAFETY: nobody writes `normed` in this phase.
                let x = unsafe { self.pass.normed.read(at..at + n * width) };
                let at = begin * vocab + rows.start;
                // SAFETY: this member's own rows of every column.
                let y = unsafe { self.pass.logits.columns(at, rows.len(), vocab, n) };
                let local = rows.start - slice.start..rows.end - slice.start;
                self.decoded(&matrix, &local, x, y);
            }
        }
    }

    /// The head's input for one wanted column, at `row` of `normed`.
    fn final_norm(&self, step: &Head, row: usize, column: usize) {
        let d = self.dims();
        let (hidden, lanes) = (d.hidden as usize, d.lanes as usize);
        let scale = self.pass.constant(step.norm);
        let stream = |lane| self.read(step.input, lane, column, 0..hidden);
        // SAFETY: one member a row.
        let place = |at: usize| unsafe { self.pass.normed.write(at..at + hidden) };
        let scratch = &mut self.scratch().stream;
        match step.mode {
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

/// Turns pairs of features by cos, then sin, of as many angles.
pub(super) fn turn(interleaved: bool, angles: &[f32], x: &mut [f32]) {
    let half = angles.len() / 2;
    let (cos, sin) = angles.split_at(half);
    let x = &mut x[..2 * half];
    let turn = |a: &mut f32, b: &mut f32, cos: f32, sin: f32| {
        (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
    };
    let angles = cos.iter().zip(sin);
    if interleaved {
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

/// `x += factor * y`.
pub(super) fn add(x: &mut [f32], y: &[f32], factor: f32) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += factor * y);
}

/// Heads that attend over the same pages.
pub(super) struct Attending<'a> {
    /// Queries and what they see.
    pub vectors: [u32; 2],
    pub lane: usize,
    /// Of the lane.
    pub heads: Range<usize>,
    /// Numbers of a head.
    pub dim: usize,
    /// On scores.
    pub scale: f32,
    pub sinks: Option<&'a [f32]>,
    pub window: Option<u32>,
    pub state: StateAt,
    pub dtype: Dtype,
}

/// One kv head's place in the pages.
struct KvAt {
    state: StateAt,
    lane: usize,
    head: usize,
}

pub(super) fn intersect(a: &Range<usize>, b: Range<usize>) -> Range<usize> {
    let start = a.start.clamp(b.start, b.end);
    start..a.end.clamp(start, b.end)
}
