//! Several residual streams: what a module takes of them, and how its output joins them.

use super::steps::add;
use super::Walk;
use crate::abi::{HyperIn, HyperOut, STREAMS_MAX};
use crate::cpu::hyper::mixes;

/// Numbers of a stream that are mixed at a time.
const NUMBERS: usize = 64;

impl Walk<'_> {
    pub(super) fn hyper_in(&self, step: &HyperIn) {
        let (hidden, lanes) = (self.dims().hidden as usize, self.dims().lanes as usize);
        let (rows, streams) = (step.rows() as usize, step.streams as usize);
        let (all, width) = (self.columns.len(), streams * hidden);
        let input = |column: usize| self.read(step.input, 0, column, 0..width);
        let mine = self.rows(step.partition);
        let out = self.output(&self.pass.raw, mine.start, mine.len(), rows);
        let matrix = self.pass.matrix(step.weight, 0);
        self.exactly(&matrix, mine, self.whole(step.input, 0, width), out);
        self.barrier.wait();
        let constants = [step.scale, step.base].map(|index| self.pass.constant(index));
        for column in self.mine(all) {
            let at = self.at(0, column, rows);
            // SAFETY: one member a column.
            let f = unsafe { self.pass.raw.write(at..at + rows) };
            let x = input(column);
            let factor = self.factor_by(self.dims().eps, x);
            f.iter_mut().for_each(|f| *f *= factor);
            let mix = step.join.map(|join| {
                for lane in 0..lanes {
                    self.write(join.sum, lane, column, 0..hidden).fill(0.0);
                }
                (join, self.write(join.mix, 0, column, 0..streams * (1 + streams)))
            });
            mixes(step, constants, f, mix);
            let out = self.write(step.output, 0, column, 0..hidden);
            out.fill(0.0);
            for (x, pre) in x.chunks_exact(hidden).zip(&*f) {
                add(out, x, *pre);
            }
            for lane in 1..lanes {
                self.write(step.output, lane, column, 0..hidden).copy_from_slice(out);
            }
        }
    }

    pub(super) fn hyper_out(&self, step: &HyperOut) {
        let (hidden, n) = (self.dims().hidden as usize, step.streams as usize);
        let mine = self.rows(step.partition);
        let mut before = [[0.0; NUMBERS]; STREAMS_MAX];
        for column in 0..self.columns.len() {
            let (post, comb) = self.read(step.mix, 0, column, 0..n * (1 + n)).split_at(n);
            for begin in mine.clone().step_by(NUMBERS) {
                let part = begin..mine.end.min(begin + NUMBERS);
                let sum = self.read(step.input, 0, column, part.clone());
                let stream = |i: usize| i * hidden + part.start..i * hidden + part.end;
                for (i, before) in before[..n].iter_mut().enumerate() {
                    let x = self.read(step.residual, 0, column, stream(i));
                    before[..x.len()].copy_from_slice(x);
                }
                for (j, post) in post.iter().enumerate() {
                    let out = self.write(step.residual, 0, column, stream(j));
                    out.iter_mut().zip(sum).for_each(|(out, y)| *out = post * y);
                    for (i, before) in before[..n].iter().enumerate() {
                        add(out, before, comb[i * n + j]);
                    }
                }
            }
        }
    }
}
