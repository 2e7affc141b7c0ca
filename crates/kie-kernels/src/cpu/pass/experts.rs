//! Mixture of experts, by one member: which experts a column goes to, and their products. An
//! expert's matrices are read for the columns that chose it, together, and not where none did.
//! Columns of a prompt are packed expert by expert.
//!
//! Invariant: a column's experts are added in the order of their ids, whoever else chose them, so
//! that its bits do not depend on its neighbours.

use std::ops::Range;

use super::steps::{add, intersect};
use super::Walk;
use crate::abi::{ExpertsDown, ExpertsGateUp, Route};
use crate::cpu::experts::{choose, gather, tiles, Grouped, Pair, Scratch, DECODE_COLUMNS};
use crate::cpu::matmul::matmul;
use crate::cpu::ops;
use crate::cpu::prefill::{pack_block, prefill, Part, BLOCK};
use crate::field::Columns;
use crate::matrix::Matrix;

/// What a product's columns are given as.
#[derive(Clone, Copy)]
enum Input<'a> {
    Columns(&'a [f32]),
    Packed(Part<'a>),
}

impl Walk<'_> {
    /// Logits in float32 for all columns: a choice is as good as its logits.
    pub(super) fn route(&self, step: &Route) {
        self.norm(step.norm, step.input, &[]);
        let (hidden, experts) = (self.dims().hidden as usize, step.experts as usize);
        let rows = self.rows(step.partition);
        let (x, matrix) = (self.normed(0, hidden), self.pass.matrix(step.weight, 0));
        let all = self.columns.len();
        let out = self.output(&self.pass.raw, rows.start, rows.len(), experts);
        self.exactly(&matrix, rows, x, out);
        self.barrier.wait();
        for column in self.mine(all) {
            let at = self.at(0, column, experts);
            // SAFETY: one member a column.
            let logits = unsafe { self.pass.raw.write(at..at + experts) };
            if let Some(bias) = step.bias {
                add(logits, self.pass.constant(bias), 1.0);
            }
            let out = self.write(step.output, 0, column, 0..2 * step.chosen as usize);
            let correction = step.correction.map(|c| self.pass.constant(c));
            let told = step.by_token.map(|table| {
                let chosen = step.chosen as usize;
                &self.pass.constant(table)[self.columns[column].token as usize * chosen..][..chosen]
            });
            choose(step, (correction, told), logits, out);
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
        let room = products[0].len();
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
                        for tile in tiles(&rows, room, pairs.len(), packed) {
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
        let room = products[0].len();
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
                    for tile in tiles(&rows, room, pairs.len(), packed) {
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
                prefill(self.pass.prompts, self.panels(), matrix, rows, part, y, &|| {
                    self.goes_on()
                });
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
