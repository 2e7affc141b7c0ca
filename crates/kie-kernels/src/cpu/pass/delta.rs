//! Steps of the gated delta rule. An item is one key head of one sequence: a member walks its
//! columns in order, on a copy of the state that no other member touches.

use std::ops::Range;

use super::states::Place;
use super::steps::intersect;
use super::Walk;
use crate::abi::{DeltaIn, DeltaRule};
use crate::cpu::delta::Rule;

impl Walk<'_> {
    pub(super) fn delta_in(&self, step: &DeltaIn) {
        let d = *self.dims();
        self.norm(step.norm, step.input, &step.weights);
        let counts = [step.heads.keys * step.heads.rows(), 2 * step.heads.values];
        let mine = self.rows(step.partition);
        for lane in 0..d.lanes as usize {
            let x = self.normed(lane, d.hidden as usize);
            let mut first = lane * step.rows() as usize;
            for (which, count) in counts.map(|count| count as usize).into_iter().enumerate() {
                let part = intersect(&mine, first..first + count);
                let rows = part.start - first..part.end - first;
                let field = &self.pass.vectors[step.outputs[which] as usize];
                let out =
                    self.output(field, self.at(lane, 0, count) + rows.start, rows.len(), count);
                let matrix = self.pass.matrix(step.weights[which], lane);
                self.multiply(&matrix, rows, x, lane, out);
                first += count;
            }
        }
    }

    pub(super) fn delta_rule(&self, step: &DeltaRule) {
        let (keys, lanes) = (step.heads.keys as usize, self.dims().lanes as usize);
        let items = self
            .sequences()
            .flat_map(|columns| (0..lanes * keys).map(move |head| (columns.clone(), head)));
        let blocks = self.pass.program.blocks as usize;
        for (columns, head) in items.skip(self.member).step_by(blocks) {
            self.delta_head(step, head, columns);
        }
    }

    /// One key head of one sequence.
    fn delta_head(&self, step: &DeltaRule, head: usize, columns: Range<usize>) {
        let (heads, keys) = (step.heads, step.heads.keys as usize);
        let (lane, own) = (head / keys, head % keys);
        let kept = heads.kept() as usize;
        let part = head * kept..(head + 1) * kept;
        let place = Place { state: step.state, slot: self.columns[columns.start].slot, part };
        let (state, begins) = self.recall(&place, self.columns[columns.start].position);
        if begins {
            state.fill(0.0);
        }
        let constant = |index: u32| self.pass.constant(index);
        let rule = Rule {
            heads,
            head,
            taps: constant(step.conv),
            decay: constant(step.decay),
            bias: constant(step.bias),
            norm: constant(step.norm),
            eps: self.dims().eps,
            level: self.pass.level,
        };
        let scratch = &mut self.scratch().delta;
        let part = |width: u32| own * width as usize..(own + 1) * width as usize;
        let [rows, gates] = [heads.rows(), 2 * heads.shared()].map(part);
        let out = part(heads.shared() * heads.value_dim);
        for column in columns {
            if !self.goes_on() {
                return;
            }
            let row = self.read(step.inputs[0], lane, column, rows.clone());
            let gates = self.read(step.inputs[1], lane, column, gates.clone());
            let out = self.write(step.output, lane, column, out.clone());
            rule.step(row, gates, state, out, scratch);
            self.keep(&place, column, state);
        }
    }
}
