//! Virtual ranks (`cpu:0,1`): a dense model cut into one lane a rank, heads, neurons and vocabulary
//! dealt out as several GPUs deal them. All lanes run in this address space on one thread team;
//! their outputs are added in float32, in the order of the ranks. A model with lanes of its own is
//! run as it is: its ranks would be groups of its lanes.
//!
//! Invariants: a lane's numbers are the checkpoint's, unchanged; what a rank has less than others
//! is filled up with zeros, which add nothing. Slices that lie in the checkpoint as a lane wants
//! them are read in place; the others (columns of output matrices, mostly) are copied.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use crate::abi::{
    Attend, Codes, CompressedAttend, CompressedHeads, CompressedQuery, DeltaHeads, DeltaIn,
    DeltaRule, Encoding, ExpertsDown, ExpertsGateUp, GroupedDown, HeadMode, Heads, HyperIn, Join,
    LatentAttend, LatentHeads, LatentQuery, LatentUp, NormSpan, PageGroup, Program, Qkv, StepKind,
    Tensor,
};
use crate::buffer::Buffer;
use crate::error::{Error, Result};
use crate::partition::partition_rows;
use crate::shard::{dealt, heads_of, indivisible, normed_over_all_heads, state_of};

/// Most ranks, as on GPUs.
pub(super) const RANKS_MAX: usize = 8;

/// Ranks of a device's name; none where it is no such name.
pub(super) fn count(name: &str) -> Option<u32> {
    let Some(list) = name.strip_prefix("cpu:") else { return (name == "cpu").then_some(1) };
    let numbered = list.split(',').enumerate().all(|(rank, n)| n == rank.to_string());
    let count = list.split(',').count();
    (numbered && count <= RANKS_MAX).then_some(count as u32)
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

    /// Whether some lane's columns begin or end inside a piece of codes.
    fn cuts_pieces(&self) -> bool {
        let piece = self.from.encoding.codes.row().numbers;
        let [_, group] = self.group();
        let inside = |n: u32| !n.is_multiple_of(piece);
        let parts = self.cols.iter().any(|part| inside(part.start) || inside(part.end));
        parts || inside(self.shape[1]) || inside(group)
    }

    /// Rows and columns of a group that lies within one of the stored ones.
    fn group(&self) -> [u32; 2] {
        // A padded group has a zero point of its own.
        let whole = |part: &Range<u32>| if self.from.encoding.zeros { part.end } else { 0 };
        let within = |group: u32, parts: &[Range<u32>], size: u32| {
            parts.iter().fold(gcd(group, size), |g, part| gcd(gcd(g, part.start), whole(part)))
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
        let whole = Tensor { row_step: 1, ..whole };
        let copied =
            Tensor { buffer, offset: 0, encoding, scale_buffer: buffer, scale_offset, ..whole };
        let zero_offset = scale_offset + copied.scale_bytes() * u64::from(lanes);
        Tensor { zero_offset, ..copied }
    }

    /// The codes, then the scales, then the zero points.
    fn copy(&self, to: &Tensor, buffers: &[Buffer]) -> Vec<u8> {
        let codes = to.encoding.codes;
        // What stands for zeros: all bits 0, but for integers with 8 added.
        let zero = if codes == Codes::I4 { 0x88 } else { 0 };
        let mut out = vec![zero; to.scale_offset as usize];
        let stored = buffers[self.from.buffer as usize].host();
        let step = self.from.row_step as usize;
        let (from_row, to_row) = (self.from.row_bytes() as usize * step, to.row_bytes() as usize);
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
            self.groups(to, size, beside(from.scale_offset), false, &mut out);
        }
        if to.encoding.zeros {
            self.groups(to, 1, beside(from.zero_offset), true, &mut out);
        }
        out
    }

    /// What is stored for each group of all lanes, `size` bytes each.
    fn groups(&self, to: &Tensor, size: usize, stored: &[u8], zeros: bool, out: &mut Vec<u8>) {
        let [_, grid] = self.from.scale_grid();
        let ([down, across], of) = (to.encoding.group, self.from.encoding.group);
        for (rows, cols) in self.rows.iter().zip(&self.cols) {
            for row in (rows.start..rows.start + to.rows).step_by(down as usize) {
                for col in (cols.start..cols.start + to.cols).step_by(across as usize) {
                    // Behind the last number there are zeros, whatever their scale; their zero
                    // point is 0.
                    if zeros && (row >= rows.end || col >= cols.end) {
                        out.push(0);
                        continue;
                    }
                    let [row, col] = [row.min(rows.end - 1), col.min(cols.end - 1)];
                    let row = row * self.from.row_step;
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

/// Parts of what the lanes share out, and places of each.
#[derive(Clone)]
struct Parts {
    of: Vec<Range<u32>>,
    each: u32,
}

impl Parts {
    /// The same where each part is so many.
    fn times(&self, many: u32) -> Self {
        let of = self.of.iter().map(|part| part.start * many..part.end * many);
        Self { of: of.collect(), each: self.each * many }
    }
}

struct Builder {
    ranks: u32,
    /// Buffers of the program as it was given.
    buffers: u32,
    program: Program,
    copies: Vec<(usize, Slices)>,
    /// What vectors hold that the lanes share out.
    held: HashMap<u32, Parts>,
    /// The head's matrix, and the same by lanes.
    head: Option<(u32, u32)>,
}

impl Builder {
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

    fn by_rows(&mut self, index: u32, rows: &Parts) -> u32 {
        let cols = self.program.tensors[index as usize].cols;
        let all = vec![0..cols; rows.of.len()];
        self.sliced(index, rows.of.clone(), all, [rows.each, cols])
    }

    fn by_cols(&mut self, index: u32, cols: &Parts) -> u32 {
        let rows = self.program.tensors[index as usize].rows;
        let all = vec![0..rows; cols.of.len()];
        self.sliced(index, all, cols.of.clone(), [rows, cols.each])
    }

    /// A bias is one row; afterwards it is one a lane.
    fn bias(&mut self, index: u32, cols: &Parts) -> u32 {
        let at = self.by_cols(index, cols);
        let tensor = &mut self.program.tensors[at as usize];
        (tensor.lanes, tensor.rows) = (1, self.ranks);
        at
    }

    /// A matrix an expert, each sliced by `slice`, one behind the other.
    fn bank(&mut self, first: u32, experts: u32, slice: impl Fn(&mut Self, u32) -> u32) -> u32 {
        let at = self.program.tensors.len() as u32;
        for expert in 0..experts {
            let sliced = slice(self, first + expert);
            debug_assert_eq!(sliced, at + expert, "a slice is one tensor");
        }
        at
    }

    /// Biases of experts, `[experts, rows]`; afterwards `[experts, ranks, rows of a rank]`.
    fn bank_bias(&mut self, index: u32, experts: u32, parts: &Parts) -> u32 {
        let from = self.program.tensors[index as usize];
        let of_expert = |expert: u32| {
            parts.of.iter().map(move |part| match from.cols {
                // A number a row.
                1 => {
                    let first = expert * (from.rows / experts);
                    (first + part.start..first + part.end, 0..1)
                }
                _ => (expert..expert + 1, part.clone()),
            })
        };
        let (rows, cols) = (0..experts).flat_map(of_expert).unzip();
        let shape = if from.cols == 1 { [parts.each, 1] } else { [1, parts.each] };
        let at = self.sliced(index, rows, cols, shape);
        let tensor = &mut self.program.tensors[at as usize];
        (tensor.lanes, tensor.rows) = (1, tensor.lanes * tensor.rows);
        at
    }

    /// Heads of one rank, and its features of q and of k or v.
    fn heads(&self, heads: Heads) -> Result<(Heads, [Parts; 2])> {
        let Heads { query, kv, dim } = heads;
        let Some((query_each, kv_each)) = dealt(query, kv, self.ranks) else {
            return Err(indivisible(1, query, kv, self.ranks));
        };
        let parts = |which: usize, each: u32| {
            let features = |rank| {
                let part = heads_of(rank, self.ranks, query, kv)[which].clone();
                part.start * dim..part.end * dim
            };
            Parts { of: (0..self.ranks).map(features).collect(), each: each * dim }
        };
        let each = Heads { query: query_each, kv: kv_each, dim };
        Ok((each, [parts(0, query_each), parts(1, kv_each)]))
    }

    fn evenly(&self, rows: u32) -> Parts {
        let each = rows.div_ceil(self.ranks);
        Parts { of: parts(rows, each, self.ranks), each }
    }

    /// Each lane has its own copy of the vector.
    fn widen(&mut self, vector: u32, width: u32) {
        let vector = &mut self.program.vectors[vector as usize];
        (vector.lanes, vector.width) = (self.ranks, width);
    }

    /// A module's output matrix, whose columns the ranks share as they do its input.
    fn output(&mut self, weight: u32, input: u32, step: usize) -> Result<u32> {
        let detail = "its input is not what ranks share out".to_owned();
        let parts = self.held.get(&input).cloned();
        let parts = parts.ok_or(Error::InvalidProgram { step, detail })?;
        Ok(self.by_cols(weight, &parts))
    }

    fn qkv(&mut self, qkv: &mut Qkv) -> Result<()> {
        let (heads, [query, kv]) = self.heads(qkv.heads)?;
        if qkv.head_norms.is_some() && qkv.norm_span == NormSpan::AllHeads {
            return Err(normed_over_all_heads(self.ranks));
        }
        // A head's gate lies behind it.
        let doubled = Parts {
            of: query.of.iter().map(|part| 2 * part.start..2 * part.end).collect(),
            each: 2 * query.each,
        };
        let of_q = if qkv.gates.is_some() { &doubled } else { &query };
        for (n, parts) in [of_q, &kv, &kv].into_iter().enumerate() {
            qkv.weights[n] = self.by_rows(qkv.weights[n], parts);
            if let Some(biases) = &mut qkv.biases {
                biases[n] = self.bias(biases[n], parts);
            }
        }
        qkv.heads = heads;
        self.widen(qkv.output, heads.query_width());
        if let Some(gates) = qkv.gates {
            self.widen(gates, heads.query_width());
        }
        Ok(())
    }

    /// Heads of one rank: whole key heads, each with its value heads.
    fn delta_heads(&self, heads: DeltaHeads) -> Result<DeltaHeads> {
        let ranks = self.ranks;
        if !heads.keys.is_multiple_of(ranks) {
            let keys = heads.keys;
            let detail = format!("{keys} key heads of a delta rule do not divide by {ranks} ranks");
            return Err(Error::Indivisible { ranks, detail });
        }
        Ok(DeltaHeads { keys: heads.keys / ranks, values: heads.values / ranks, ..heads })
    }

    fn delta_in(&mut self, step: &mut DeltaIn) -> Result<()> {
        let heads = self.delta_heads(step.heads)?;
        for (weight, output) in step.weights.iter_mut().zip(step.outputs) {
            let parts = self.evenly(self.program.tensors[*weight as usize].rows);
            *weight = self.by_rows(*weight, &parts);
            self.widen(output, parts.each);
        }
        step.heads = heads;
        Ok(())
    }

    /// Taps, decays and biases stay whole.
    fn delta_rule(&mut self, step: &mut DeltaRule) -> Result<()> {
        let parts = self.evenly(step.heads.value_width());
        step.heads = self.delta_heads(step.heads)?;
        self.widen(step.output, parts.each);
        self.held.insert(step.output, parts);
        Ok(())
    }

    fn attend(&mut self, attend: &mut Attend) -> Result<()> {
        let (heads, [query, _]) = self.heads(attend.heads)?;
        if let Some(sinks) = &mut attend.sinks {
            let of = query.of.iter().map(|part| part.start / heads.dim..part.end / heads.dim);
            *sinks = self.bias(*sinks, &Parts { of: of.collect(), each: heads.query });
        }
        attend.heads = heads;
        self.widen(attend.output, heads.query_width());
        self.held.insert(attend.output, query);
        Ok(())
    }

    /// Latent heads of one rank, and which of all heads each has.
    fn latent_heads(&self, heads: LatentHeads) -> Result<(LatentHeads, Parts)> {
        let Some((count, _)) = dealt(heads.count, heads.count, self.ranks) else {
            return Err(indivisible(1, heads.count, heads.count, self.ranks));
        };
        let of = (0..self.ranks).map(|rank| {
            let [part, _] = heads_of(rank, self.ranks, heads.count, heads.count);
            part
        });
        Ok((LatentHeads { count, ..heads }, Parts { of: of.collect(), each: count }))
    }

    fn latent_query(&mut self, step: &mut LatentQuery) -> Result<()> {
        let (heads, parts) = self.latent_heads(step.heads)?;
        step.weight = self.by_rows(step.weight, &parts.times(heads.query()));
        step.up = self.by_rows(step.up, &parts.times(heads.up()));
        step.heads = heads;
        self.widen(step.output, heads.count * heads.key());
        Ok(())
    }

    fn latent_attend(&mut self, step: &mut LatentAttend) -> Result<()> {
        let (heads, _) = self.latent_heads(step.heads)?;
        step.heads = heads;
        self.widen(step.output, heads.count * heads.key());
        Ok(())
    }

    fn latent_up(&mut self, step: &mut LatentUp) -> Result<()> {
        let (heads, parts) = self.latent_heads(step.heads)?;
        step.weight = self.by_rows(step.weight, &parts.times(heads.up()));
        step.heads = heads;
        self.widen(step.output, heads.count * heads.value);
        self.held.insert(step.output, parts.times(heads.value));
        Ok(())
    }

    /// Heads of one rank: whole groups.
    fn compressed_heads(&self, heads: CompressedHeads) -> Result<CompressedHeads> {
        let (ranks, CompressedHeads { count, groups, .. }) = (self.ranks, heads);
        if !groups.is_multiple_of(ranks) {
            let detail = format!("{groups} groups of heads do not divide by {ranks} ranks");
            return Err(Error::Indivisible { ranks, detail });
        }
        Ok(CompressedHeads { count: count / ranks, groups: groups / ranks, ..heads })
    }

    fn compressed_query(&mut self, step: &mut CompressedQuery) -> Result<()> {
        let parts = self.evenly(step.heads.width());
        step.heads = self.compressed_heads(step.heads)?;
        step.weight = self.by_rows(step.weight, &parts);
        self.widen(step.output, parts.each);
        Ok(())
    }

    /// Its output is by groups already.
    fn compressed_attend(&mut self, step: &mut CompressedAttend) -> Result<()> {
        let parts = self.evenly(step.heads.count);
        step.heads = self.compressed_heads(step.heads)?;
        step.sinks = self.bias(step.sinks, &parts);
        Ok(())
    }

    fn grouped_down(&mut self, step: &mut GroupedDown) {
        let parts = self.evenly(step.groups * step.rank);
        step.weight = self.by_rows(step.weight, &parts);
        step.groups /= self.ranks;
        self.widen(step.output, parts.each);
        self.held.insert(step.output, parts);
    }

    /// Streams are the same on all ranks, and in one address space there once.
    fn hyper_in(&mut self, step: &HyperIn) {
        let hidden = self.program.dims.hidden;
        self.widen(step.output, hidden);
        step.join.iter().for_each(|join| self.widen(join.sum, hidden));
    }

    fn experts_gate_up(&mut self, step: &mut ExpertsGateUp) {
        let (experts, parts) = (step.experts, self.evenly(step.ffn));
        for weight in &mut step.weights {
            *weight = self.bank(*weight, experts, |b, index| b.by_rows(index, &parts));
        }
        for bias in step.biases.iter_mut().flatten() {
            *bias = self.bank_bias(*bias, experts, &parts);
        }
        step.ffn = parts.each;
        self.widen(step.output, step.chosen * parts.each);
    }

    fn experts_down(&mut self, step: &mut ExpertsDown) {
        let parts = self.evenly(step.ffn);
        step.weight = self.bank(step.weight, step.experts, |b, index| b.by_cols(index, &parts));
        step.ffn = parts.each;
    }

    /// The head's matrix by lanes; drafts have the model's.
    fn head_of_lanes(&mut self, weight: u32) -> u32 {
        if let Some((_, sliced)) = self.head.filter(|(whole, _)| *whole == weight) {
            return sliced;
        }
        let parts = self.evenly(self.program.dims.vocab);
        let sliced = self.by_rows(weight, &parts);
        self.head = Some((weight, sliced));
        sliced
    }

    fn step(&mut self, index: usize) -> Result<()> {
        let mut step = self.program.steps[index];
        match &mut step.kind {
            StepKind::Embed(embed) => {
                let hidden = self.program.dims.hidden;
                if self.program.vectors[embed.output as usize].width == hidden {
                    self.widen(embed.output, hidden);
                }
            }
            StepKind::Qkv(qkv) => self.qkv(qkv)?,
            StepKind::Attend(attend) => self.attend(attend)?,
            StepKind::DeltaIn(delta) => self.delta_in(delta)?,
            StepKind::DeltaRule(delta) => self.delta_rule(delta)?,
            // Every rank has the latents of all heads; in one address space they are made once.
            StepKind::LatentDown(_) => {}
            StepKind::LatentQuery(query) => self.latent_query(query)?,
            StepKind::LatentAttend(attend) => self.latent_attend(attend)?,
            StepKind::LatentUp(up) => self.latent_up(up)?,
            // Keys and entries are those of all heads, as latents.
            StepKind::CompressedDown(_) | StepKind::Compress(_) | StepKind::CompressedIndex(_) => {}
            StepKind::CompressedQuery(query) => self.compressed_query(query)?,
            StepKind::CompressedAttend(attend) => self.compressed_attend(attend)?,
            StepKind::GroupedDown(down) => self.grouped_down(down),
            StepKind::HyperIn(hyper) => self.hyper_in(hyper),
            StepKind::HyperOut(_) => {}
            StepKind::Project(project) => {
                // One lane has nobody to wait for.
                let (Join::Sum | Join::Delayed { .. } | Join::Own { factor: 1.0 }) = project.join
                else {
                    let detail = "one lane's output has a factor, and ranks would each have it";
                    return Err(Error::InvalidProgram { step: index, detail: detail.to_owned() });
                };
                project.weight = self.output(project.weight, project.input, index)?;
                project.join = Join::Sum;
                if let Some(keep) = project.keep {
                    self.widen(keep, self.program.dims.hidden);
                }
            }
            StepKind::ProjectNormed(project) => {
                project.weight = self.output(project.weight, project.input, index)?;
            }
            StepKind::GateUp(gate_up) => {
                let parts = self.evenly(gate_up.ffn);
                for weight in &mut gate_up.weights {
                    *weight = self.by_rows(*weight, &parts);
                }
                gate_up.ffn = parts.each;
                self.widen(gate_up.output, parts.each);
                self.held.insert(gate_up.output, parts);
            }
            StepKind::Route(_) => {}
            StepKind::ExpertsGateUp(experts) => self.experts_gate_up(experts),
            StepKind::ExpertsDown(experts) => self.experts_down(experts),
            StepKind::Head(head) => {
                head.weight = self.head_of_lanes(head.weight);
                head.mode = HeadMode::PerLane;
            }
            // All lanes have the same streams, which are made once.
            StepKind::Sample(_) | StepKind::MtpIn(_) => {}
        }
        self.program.steps[index] = step;
        Ok(())
    }
}

impl Lanes {
    /// Cuts a program for so many ranks.
    ///
    /// # Errors
    /// [`Error::Indivisible`]; [`Error::InvalidProgram`] for a factor that ranks would each apply.
    pub fn new(program: &Program, ranks: u32) -> Result<Self> {
        let lanes = program.dims.lanes;
        if lanes > 1 {
            let query = |step: &StepKind| match step {
                StepKind::Qkv(qkv) => Some((qkv.heads.query, qkv.heads.kv)),
                StepKind::Embed(_)
                | StepKind::Attend(_)
                | StepKind::DeltaIn(_)
                | StepKind::DeltaRule(_)
                | StepKind::LatentDown(_)
                | StepKind::LatentQuery(_)
                | StepKind::LatentAttend(_)
                | StepKind::LatentUp(_)
                | StepKind::CompressedDown(_)
                | StepKind::Compress(_)
                | StepKind::CompressedIndex(_)
                | StepKind::CompressedQuery(_)
                | StepKind::CompressedAttend(_)
                | StepKind::GroupedDown(_)
                | StepKind::HyperIn(_)
                | StepKind::HyperOut(_)
                | StepKind::Project(_)
                | StepKind::ProjectNormed(_)
                | StepKind::GateUp(_)
                | StepKind::Route(_)
                | StepKind::ExpertsGateUp(_)
                | StepKind::ExpertsDown(_)
                | StepKind::Head(_)
                | StepKind::Sample(_)
                | StepKind::MtpIn(_) => None,
            };
            if !lanes.is_multiple_of(ranks) {
                let heads = program.steps.iter().find_map(|step| query(&step.kind));
                let (heads, kv_heads) = heads.unwrap_or_default();
                return Err(indivisible(lanes, heads, kv_heads, ranks));
            }
            let how = format!("ranks     {ranks} virtual ones, {} lanes each\n", lanes / ranks);
            let program = program.clone();
            return Ok(Self { program, copies: Vec::new(), how, cut: false });
        }
        let last = program.tensors.iter().map(|t| t.buffer.max(t.scale_buffer)).max();
        let mut builder = Builder {
            ranks,
            buffers: last.map_or(0, |last| last + 1),
            program: program.clone(),
            copies: Vec::new(),
            held: HashMap::new(),
            head: None,
        };
        (0..program.steps.len()).try_for_each(|index| builder.step(index))?;
        if let Some((_, cut)) = builder.copies.iter().find(|(_, slices)| slices.cuts_pieces()) {
            let codes = cut.from.encoding.codes;
            let detail = format!(
                "a rank's columns of a {} matrix are no whole pieces of {} numbers",
                codes.name(),
                codes.row().numbers
            );
            return Err(Error::Indivisible { ranks, detail });
        }
        let Builder { mut program, copies, .. } = builder;
        program.dims.lanes = ranks;
        for group in &mut program.groups {
            group.state = state_of(group, ranks);
        }
        program.row_partition = partition_rows(&mut program.steps, &program.dims, program.blocks);
        let how = format!("ranks     {ranks} virtual ones, a lane each: {}\n", shares(&program));
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
        let pages = |group: &PageGroup| group.page_bytes() * u64::from(group.pages);
        // What a pass computes a column, with normed, packed and raw twins; then the mailbox.
        let vectors = self.program.vectors.iter().map(|v| u64::from(v.lanes) * u64::from(v.width));
        let column = 12 * (vectors.sum::<u64>() + u64::from(d.lanes * d.hidden));
        let slot = u64::from(d.max_positions) * 24 + u64::from(d.vocab) * 40;
        [
            stored + self.copies.iter().map(copied).sum::<u64>(),
            self.program.groups.iter().map(pages).sum(),
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

/// What a lane has of each kind of layer, for people.
fn shares(program: &Program) -> String {
    let mut all: Vec<String> = Vec::new();
    for step in &program.steps {
        let share = match &step.kind {
            StepKind::Attend(Attend { heads: Heads { query, kv, .. }, .. }) => {
                format!("{query} query, {kv} kv heads")
            }
            StepKind::LatentAttend(attend) => format!("{} heads", attend.heads.count),
            StepKind::CompressedAttend(attend) => format!("{} heads", attend.heads.count),
            StepKind::GateUp(gate_up) => format!("ffn {}", gate_up.ffn),
            StepKind::ExpertsGateUp(experts) => format!("experts of {}", experts.ffn),
            StepKind::Head(_) => format!("{} ids", program.dims.vocab.div_ceil(program.dims.lanes)),
            StepKind::DeltaRule(DeltaRule { heads: DeltaHeads { keys, values, .. }, .. }) => {
                format!("{keys} key, {values} value heads of a delta rule")
            }
            StepKind::Embed(_)
            | StepKind::Qkv(_)
            | StepKind::DeltaIn(_)
            | StepKind::LatentDown(_)
            | StepKind::LatentQuery(_)
            | StepKind::LatentUp(_)
            | StepKind::CompressedDown(_)
            | StepKind::Compress(_)
            | StepKind::CompressedIndex(_)
            | StepKind::CompressedQuery(_)
            | StepKind::GroupedDown(_)
            | StepKind::HyperIn(_)
            | StepKind::HyperOut(_)
            | StepKind::Project(_)
            | StepKind::ProjectNormed(_)
            | StepKind::Route(_)
            | StepKind::ExpertsDown(_)
            | StepKind::Sample(_)
            | StepKind::MtpIn(_) => continue,
        };
        if !all.contains(&share) {
            all.push(share);
        }
    }
    all.join(", ")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::abi::{Dtype, Layout};
    use crate::matrix::row_to_f32;
    use crate::matrix::Matrix;

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
        let numbers: Vec<u8> = (0..4 + rows * codes.bytes_of(cols)).map(|_| byte()).collect();
        let scaled = matches!(codes, Codes::E4m3 | Codes::I4);
        let zeros = codes == Codes::I4;
        let group = if scaled { [8, 16] } else { [0, 0] };
        let scales = (0..9).flat_map(|n| (n as f32 * 0.37 + 0.1).to_le_bytes()).collect::<Vec<_>>();
        let points = (0..9).map(|n| (n as i8 - 4) as u8);
        let scales = scales.into_iter().chain(points).collect();
        let buffers = [numbers, scales].map(|bytes| Buffer::in_place(Arc::new(bytes)));
        let tensor = Tensor {
            buffer: 0,
            encoding: Encoding { zeros, ..Encoding::scaled(codes, group, Dtype::F32) },
            layout: Layout::RowMajor,
            lanes: 1,
            rows: rows as u32,
            cols: cols as u32,
            row_step: 1,
            scale_buffer: 1,
            offset: 4,
            scale_offset: 0,
            zero_offset: 36,
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
        for codes in [Codes::F32, Codes::Bf16, Codes::E4m3, Codes::I4] {
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
