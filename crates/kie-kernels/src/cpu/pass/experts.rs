//! Mixture of experts, by one member: which experts a column goes to, and their products. An
//! expert's matrices are read for the columns that chose it, together, and not where none did.
//! Columns of a prompt are packed expert by expert.
//!
//! Invariant: a column's experts are added in the order of their ids, whoever else chose them, so
//! that its bits do not depend on its neighbours.

use std::ops::Range;

use super::steps::{add, intersect};
use super::Walk;
use super::DECODE_COLUMNS;
use crate::abi::{Dims, ExpertsDown, ExpertsGateUp, Program, Route, Scoring, StepKind};
use crate::cpu::matmul::matmul;
use crate::cpu::ops;
use crate::cpu::prefill::{pack_block, prefill, Form, Line, Part, BLOCK};
use crate::field::{Columns, Field};
use crate::matrix::Matrix;

/// Rows of an expert that are multiplied at a time, so that gates meet their ups in a cache.
const TILE: usize = 128;

/// A column, and which of its chosen experts.
#[derive(Clone, Copy, Default)]
struct Pair {
    column: u32,
    place: u32,
}

/// Columns by expert.
#[derive(Default)]
struct Grouped {
    /// Where each expert's pairs end.
    ends: Vec<usize>,
    /// Experts in ascending order, the columns of each as well.
    pairs: Vec<Pair>,
}

impl Grouped {
    /// Groups columns whose choices are given, of so many experts.
    fn fill<'c>(
        &mut self,
        columns: Range<usize>,
        experts: u32,
        choice: impl Fn(usize) -> &'c [f32],
    ) {
        self.ends.clear();
        self.ends.resize(experts as usize + 1, 0);
        let ids = |column| choice(column).iter().map(|id| *id as usize);
        columns.clone().flat_map(&ids).for_each(|id| self.ends[id + 1] += 1);
        (0..experts as usize).for_each(|id| self.ends[id + 1] += self.ends[id]);
        self.pairs.resize(self.ends[experts as usize], Pair::default());
        for column in columns {
            for (place, id) in ids(column).enumerate() {
                self.pairs[self.ends[id]] = Pair { column: column as u32, place: place as u32 };
                self.ends[id] += 1;
            }
        }
        self.ends.pop();
    }

    /// The experts that were chosen, each with its pairs.
    fn each(&self) -> impl Iterator<Item = (u32, &[Pair])> {
        let starts = std::iter::once(&0).chain(&self.ends);
        let ranges = starts.zip(&self.ends).map(|(start, end)| *start..*end);
        let chosen = (0..).zip(ranges).filter(|(_, range)| !range.is_empty());
        chosen.map(|(expert, range)| (expert, &self.pairs[range]))
    }

    /// Packed blocks of all of them.
    fn blocks(&self) -> usize {
        self.each().map(|(_, pairs)| pairs.len().div_ceil(BLOCK)).sum()
    }
}

/// What one member alone uses.
#[derive(Default)]
pub(super) struct Scratch {
    grouped: Grouped,
    /// Inputs of the columns of one product, one behind the other.
    gathered: Vec<f32>,
    /// Products of a tile: of gates and ups, or of two lanes.
    products: [Vec<f32>; 2],
}

/// Packed inputs of all pairs, in each [`Form`].
pub(super) type Lines = [Field<Line>; 2];

/// The largest sizes of a program's experts.
#[derive(Default)]
pub(super) struct Largest {
    pairs: usize,
    experts: usize,
    width: usize,
    /// Lines of packed blocks, in each form.
    lines: [usize; 2],
}

impl Largest {
    pub(super) fn of(program: &Program, form_of: impl Fn(u32) -> Form) -> Self {
        let Dims { hidden, lanes, columns, .. } = program.dims;
        let mut most = Self::default();
        for step in &program.steps {
            let (experts, chosen, width, weights, lanes) = match &step.kind {
                StepKind::ExpertsGateUp(s) => (s.experts, s.chosen, hidden, &s.weights[..], 1),
                StepKind::ExpertsDown(s) => {
                    (s.experts, s.chosen, s.ffn, std::slice::from_ref(&s.weight), lanes)
                }
                StepKind::Embed(_)
                | StepKind::Qkv(_)
                | StepKind::Attend(_)
                | StepKind::Project(_)
                | StepKind::ProjectNormed(_)
                | StepKind::GateUp(_)
                | StepKind::Route(_)
                | StepKind::Head(_)
                | StepKind::Sample(_) => continue,
            };
            let pairs = columns as usize * chosen as usize;
            most.pairs = most.pairs.max(pairs);
            most.experts = most.experts.max(experts as usize);
            most.width = most.width.max(width as usize);
            let blocks = lanes as usize * (pairs / BLOCK + pairs.min(experts as usize));
            for weight in weights {
                let form = form_of(*weight);
                let lines = &mut most.lines[form as usize];
                *lines = blocks.saturating_mul(form.lines(width as usize)).max(*lines);
            }
        }
        most
    }

    /// Bytes of [`Largest::lines`] and of so many members' [`Scratch`].
    pub(super) fn bytes(&self, columns: usize, members: usize) -> u64 {
        let lines: usize = self.lines.iter().map(|lines| lines * size_of::<Line>()).sum();
        let own = 4 * (BLOCK * self.width + 2 * TILE * columns) + 8 * self.pairs;
        let own = if self.pairs == 0 { 0 } else { own };
        lines as u64 + (members * own) as u64
    }

    pub(super) fn lines(&self) -> Lines {
        self.lines.map(Field::new)
    }

    /// What a member uses in passes of so many columns.
    pub(super) fn scratch(&self, columns: usize) -> Scratch {
        if self.pairs == 0 {
            return Scratch::default();
        }
        let ends = Vec::with_capacity(self.experts + 1);
        Scratch {
            grouped: Grouped { ends, pairs: Vec::with_capacity(self.pairs) },
            gathered: vec![0.0; BLOCK * self.width],
            products: [(); 2].map(|()| vec![0.0; TILE * columns.max(DECODE_COLUMNS)]),
        }
    }
}

/// What a product's columns are given as.
#[derive(Clone, Copy)]
enum Input<'a> {
    Columns(&'a [f32]),
    Packed(Part<'a>),
}

/// Inputs of so many pairs, one behind the other: in place where it is one.
fn gather<'a, 'x: 'a>(
    pairs: &[Pair],
    into: &'a mut [f32],
    input: impl Fn(&Pair) -> &'x [f32],
) -> &'a [f32] {
    if let [pair] = pairs {
        return input(pair);
    }
    let mut end = 0;
    for pair in pairs {
        let x = input(pair);
        into[end..end + x.len()].copy_from_slice(x);
        end += x.len();
    }
    &into[..end]
}

/// Rows in tiles.
fn tiles(rows: &Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let Range { start, end } = *rows;
    (start..end).step_by(TILE).map(move |first| first..end.min(first + TILE))
}

/// Ids of the largest logits, ascending, into the first half of `out`, their factors into the
/// second one. Equal ones go to the lower id; with a NaN among them all factors are NaN.
fn choose(scoring: Scoring, logits: &[f32], out: &mut [f32]) {
    let (ids, factors) = out.split_at_mut(out.len() / 2);
    if logits.iter().any(|logit| logit.is_nan()) {
        ids.iter_mut().enumerate().for_each(|(n, id)| *id = n as f32);
        return factors.fill(f32::NAN);
    }
    let mut last: Option<(f32, usize)> = None;
    for id in ids.iter_mut() {
        // Of those behind the last one, in the order of descending logits and ascending ids.
        let behind = |&(at, logit): &(usize, f32)| {
            last.is_none_or(|(value, id)| logit < value || logit == value && at > id)
        };
        let left = logits.iter().copied().enumerate().filter(behind);
        let best = left.reduce(|a, b| if b.1 > a.1 { b } else { a });
        let (at, logit) = best.expect("no more are chosen than there are");
        last = Some((logit, at));
        *id = at as f32;
    }
    ids.sort_unstable_by(f32::total_cmp);
    let chosen = |id: &f32| logits[*id as usize];
    let top = ids.iter().map(chosen).fold(f32::NEG_INFINITY, f32::max);
    for (factor, id) in factors.iter_mut().zip(&*ids) {
        *factor = (chosen(id) - top).exp();
    }
    let sum: f32 = match scoring {
        Scoring::SoftmaxOfChosen => factors.iter().sum(),
        Scoring::SoftmaxOfAll => logits.iter().map(|logit| (logit - top).exp()).sum(),
    };
    factors.iter_mut().for_each(|factor| *factor /= sum);
}

impl Walk<'_> {
    /// Logits in float32 for all columns: a choice is as good as its logits.
    pub(super) fn route(&self, step: &Route) {
        self.norm(step.norm, step.input, &[]);
        let (hidden, experts) = (self.dims().hidden as usize, step.experts as usize);
        let rows = self.rows(step.partition);
        let (x, matrix) = (self.normed(0, hidden), self.pass.matrix(step.weight, 0));
        let all = self.columns.len();
        let mut out = self.output(&self.pass.raw, rows.start, rows.len(), experts);
        for begin in (0..all).step_by(DECODE_COLUMNS) {
            let columns = begin..all.min(begin + DECODE_COLUMNS);
            let x = &x[columns.start * hidden..columns.end * hidden];
            let y = out.some(columns, 0..rows.len());
            matmul(self.pass.level, &matrix, rows.clone(), x, y, self.digits());
        }
        self.barrier.wait();
        for column in self.mine(all) {
            let at = self.at(0, column, experts);
            // SAFETY: one member a column.
            let logits = unsafe { self.pass.raw.write(at..at + experts) };
            if let Some(bias) = step.bias {
                add(logits, self.pass.constant(bias), 1.0);
            }
            let out = self.write(step.output, 0, column, 0..2 * step.chosen as usize);
            choose(step.scoring, logits, out);
        }
    }

    /// The chosen experts of a column, then their factors.
    fn choice(&self, choice: u32, column: usize, chosen: u32) -> [&[f32]; 2] {
        let all = self.read(choice, 0, column, 0..2 * chosen as usize);
        all.split_at(chosen as usize).into()
    }

    pub(super) fn experts_gate_up(&self, step: &ExpertsGateUp) {
        self.norm(step.norm, step.input, &[]);
        let (hidden, ffn) = (self.dims().hidden as usize, step.ffn as usize);
        let mine = self.rows(step.partition);
        let Scratch { grouped, gathered, products } = &mut self.scratch().experts;
        // Lanes hold the same residual stream.
        let normed = self.normed(0, hidden);
        let input = |pair: &Pair| &normed[pair.column as usize * hidden..][..hidden];
        for columns in self.paths() {
            let packed = columns.start == self.decode;
            let ids = |column| self.choice(step.choice, column, step.chosen)[0];
            grouped.fill(columns, step.experts, ids);
            if packed {
                self.pack_pairs(&step.weights, hidden, 1, grouped, gathered, |_, pair| input(pair));
            }
            for lane in 0..self.dims().lanes as usize {
                let part = intersect(&mine, lane * ffn..(lane + 1) * ffn);
                let rows = part.start - lane * ffn..part.end - lane * ffn;
                let mut block = 0;
                for (expert, pairs) in grouped.each() {
                    for pairs in pairs.chunks(if packed { pairs.len() } else { DECODE_COLUMNS }) {
                        let x = match packed {
                            true => Input::Packed(self.part(block, pairs.len(), hidden)),
                            false => Input::Columns(gather(pairs, gathered, input)),
                        };
                        for tile in tiles(&rows) {
                            for (weight, out) in step.weights.iter().zip(&mut *products) {
                                let matrix = self.pass.matrix(weight + expert, lane);
                                self.expert(&matrix, tile.clone(), (x, pairs.len()), out);
                            }
                            self.expert_gate(step, lane, expert, (pairs, &tile), products);
                        }
                    }
                    block += pairs.len().div_ceil(BLOCK);
                }
            }
        }
    }

    /// Biases and gates of a tile's products, to the columns' places of the expert.
    fn expert_gate(
        &self,
        step: &ExpertsGateUp,
        lane: usize,
        expert: u32,
        (pairs, tile): (&[Pair], &Range<usize>),
        [gates, ups]: &mut [Vec<f32>; 2],
    ) {
        let (ffn, lanes) = (step.ffn as usize, self.dims().lanes as usize);
        let rows = tile.len();
        let products = gates.chunks_exact_mut(rows).zip(ups.chunks_exact_mut(rows));
        for (pair, (gate, up)) in pairs.iter().zip(products) {
            if let Some(biases) = step.biases {
                let first = (expert as usize * lanes + lane) * ffn + tile.start;
                let [of_gate, of_up] = biases.map(|b| &self.pass.constant(b)[first..][..rows]);
                add(gate, of_gate, 1.0);
                add(up, of_up, 1.0);
            }
            ops::gate_mul(self.pass.level, step.gate, gate, up);
            let first = pair.place as usize * ffn + tile.start;
            let column = pair.column as usize;
            self.write(step.output, lane, column, first..first + rows).copy_from_slice(gate);
        }
    }

    pub(super) fn experts_down(&self, step: &ExpertsDown) {
        let (ffn, lanes) = (step.ffn as usize, self.dims().lanes as usize);
        let rows = self.rows(step.partition);
        let Scratch { grouped, gathered, products } = &mut self.scratch().experts;
        let input = |lane: usize, pair: &Pair| {
            let first = pair.place as usize * ffn;
            self.read(step.input, lane, pair.column as usize, first..first + ffn)
        };
        for columns in self.paths() {
            let packed = columns.start == self.decode;
            let ids = |column| self.choice(step.choice, column, step.chosen)[0];
            grouped.fill(columns, step.experts, ids);
            if packed {
                self.pack_pairs(&[step.weight], ffn, lanes, grouped, gathered, input);
            }
            let (blocks, mut block) = (grouped.blocks(), 0);
            for (expert, pairs) in grouped.each() {
                for pairs in pairs.chunks(if packed { pairs.len() } else { DECODE_COLUMNS }) {
                    for tile in tiles(&rows) {
                        for lane in 0..lanes {
                            let x = match packed {
                                true => {
                                    let block = lane * blocks + block;
                                    Input::Packed(self.part(block, pairs.len(), ffn))
                                }
                                false => {
                                    let input = |pair: &Pair| input(lane, pair);
                                    Input::Columns(gather(pairs, gathered, input))
                                }
                            };
                            let matrix = self.pass.matrix(step.weight + expert, lane);
                            let [sum, own] = &mut *products;
                            let out = if lane == 0 { &mut *sum } else { &mut *own };
                            self.expert(&matrix, tile.clone(), (x, pairs.len()), out);
                            if lane > 0 {
                                // Lanes in order, so that all end with the same bits.
                                add(&mut sum[..pairs.len() * tile.len()], own, 1.0);
                            }
                        }
                        self.expert_join(step, expert, (pairs, &tile), &mut products[0]);
                    }
                }
                block += pairs.len().div_ceil(BLOCK);
            }
        }
    }

    /// Adds a tile of an expert's outputs to the residual streams.
    fn expert_join(
        &self,
        step: &ExpertsDown,
        expert: u32,
        (pairs, tile): (&[Pair], &Range<usize>),
        sums: &mut [f32],
    ) {
        let hidden = self.dims().hidden as usize;
        for (pair, sum) in pairs.iter().zip(sums.chunks_exact_mut(tile.len())) {
            let column = pair.column as usize;
            if let Some(bias) = step.bias {
                let first = expert as usize * hidden + tile.start;
                add(sum, &self.pass.constant(bias)[first..], 1.0);
            }
            let [_, factors] = self.choice(step.choice, column, step.chosen);
            for lane in 0..self.dims().lanes as usize {
                let x = self.write(step.residual, lane, column, tile.clone());
                add(x, sum, factors[pair.place as usize]);
            }
        }
    }

    /// Columns of the decode path, then those of the prefill path, where there are any.
    fn paths(&self) -> impl Iterator<Item = Range<usize>> {
        let both = [0..self.decode, self.decode..self.columns.len()];
        both.into_iter().filter(|columns| !columns.is_empty())
    }

    /// `rows` of one expert's matrix for so many columns.
    fn expert(
        &self,
        matrix: &Matrix<'_>,
        rows: Range<usize>,
        (x, count): (Input<'_>, usize),
        out: &mut [f32],
    ) {
        if !self.goes_on() {
            return;
        }
        let y = Columns::of(out, rows.len(), rows.len(), count);
        match x {
            Input::Columns(x) => {
                matmul(self.pass.level, matrix, rows, x, y, self.digits());
            }
            Input::Packed(part) => {
                prefill(self.pass.level, matrix, rows, part, y, &|| self.goes_on());
            }
        }
    }

    /// Packs the pairs' inputs of `cols` numbers, a block by one member, in each form that the
    /// matrices want.
    fn pack_pairs<'x>(
        &self,
        weights: &[u32],
        cols: usize,
        lanes: usize,
        grouped: &Grouped,
        gathered: &mut [f32],
        input: impl Fn(usize, &Pair) -> &'x [f32],
    ) {
        let forms = weights.iter().map(|weight| self.pass.form(*weight));
        let blocks = || grouped.each().flat_map(|(_, pairs)| pairs.chunks(BLOCK));
        let all = (0..lanes).flat_map(|lane| blocks().map(move |pairs| (lane, pairs)));
        let mine = |(at, _): &(usize, _)| at % self.pass.program.blocks as usize == self.member;
        for (at, (lane, pairs)) in all.enumerate().filter(mine) {
            for (pair, x) in pairs.iter().zip(gathered.chunks_exact_mut(cols)) {
                x.copy_from_slice(input(lane, pair));
            }
            for form in forms.clone() {
                let lines = form.lines(cols);
                let place = at * lines..(at + 1) * lines;
                // SAFETY: one member a block, and nobody reads it before the barrier.
                let out = unsafe { self.pass.lines[form as usize].write(place) };
                pack_block(form, &gathered[..pairs.len() * cols], cols, out);
            }
        }
        self.barrier.wait();
    }

    /// So many columns of `cols` numbers from a packed block on.
    fn part(&self, block: usize, count: usize, cols: usize) -> Part<'_> {
        Part::new(count, cols, |form| {
            let (lines, field) = (form.lines(cols), &self.pass.lines[form as usize]);
            let end = block + count.div_ceil(BLOCK);
            // SAFETY: packed before the last barrier; nobody writes it in this phase.
            (field.count() >= end * lines)
                .then(|| unsafe { field.read(block * lines..end * lines) })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_are_chosen_and_ties_go_to_the_lower_id() {
        let chosen = |scoring, logits: &[f32], count: usize| {
            let mut out = vec![0.0; 2 * count];
            choose(scoring, logits, &mut out);
            out
        };
        let logits = [0.5, 2.0, -1.0, 2.0, 0.5, 0.5];
        let out = chosen(Scoring::SoftmaxOfChosen, &logits, 3);
        assert_eq!(out[..3], [0.0, 1.0, 3.0]);
        let all: f32 = logits.iter().map(|x: &f32| x.exp()).sum();
        let own: f32 = [0, 1, 3].iter().map(|id| logits[*id].exp()).sum();
        let parts = chosen(Scoring::SoftmaxOfAll, &logits, 3);
        for (n, id) in [0, 1, 3].into_iter().enumerate() {
            assert!((out[3 + n] - logits[id].exp() / own).abs() < 1e-6, "{out:?}");
            assert!((parts[3 + n] - logits[id].exp() / all).abs() < 1e-6, "{parts:?}");
        }
        assert_eq!(chosen(Scoring::SoftmaxOfChosen, &logits, 6)[..6], [0., 1., 2., 3., 4., 5.]);
        assert_eq!(chosen(Scoring::SoftmaxOfChosen, &[0.0; 4], 2), [0.0, 1.0, 0.5, 0.5]);
        let far = chosen(Scoring::SoftmaxOfChosen, &[f32::MIN, f32::NEG_INFINITY, 1e30], 2);
        assert_eq!(far, [0.0, 2.0, 0.0, 1.0]);
        for bad in [f32::NAN, f32::INFINITY] {
            let out = chosen(Scoring::SoftmaxOfChosen, &[1.0, bad, 3.0, 0.0], 2);
            assert!(out[2..].iter().any(|factor| factor.is_nan()), "{out:?}");
        }
        assert!(chosen(Scoring::SoftmaxOfAll, &[f32::NAN, 1.0], 1)[1].is_nan());
    }

    #[test]
    fn columns_stand_behind_their_experts_in_order() {
        let choices = [[1.0, 4.0], [0.0, 4.0], [1.0, 3.0]];
        let mut grouped = Grouped::default();
        for first in [0, 1] {
            grouped.fill(first..3, 5, |column| &choices[column]);
            let all: Vec<_> = grouped
                .each()
                .flat_map(|(expert, pairs)| pairs.iter().map(move |p| (expert, p.column, p.place)))
                .collect();
            let wanted = [(0, 1, 0), (1, 0, 0), (1, 2, 0), (3, 2, 1), (4, 0, 1), (4, 1, 1)];
            let wanted: Vec<_> =
                wanted.into_iter().filter(|(_, c, _)| *c >= first as u32).collect();
            assert_eq!(all, wanted);
            assert_eq!(grouped.blocks(), 4);
        }
    }
}
