//! Steps of the gated delta rule. An item is one key head of one sequence: a member walks its
//! columns in order, on a copy of the state that no other member touches.

use std::ops::Range;

use super::steps::intersect;
use super::{Column, Walk};
use crate::abi::{DeltaIn, DeltaRule, Dtype, PAGE};
use crate::cpu::delta::Rule;
use crate::numbers::{number_to_f32, store_f32};

/// Where a key head's state lies.
#[derive(Clone, Copy)]
struct Place<'a> {
    step: &'a DeltaRule,
    slot: usize,
    /// Of all lanes.
    head: usize,
}

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
        let mut first = 0;
        // Columns of one sequence are neighbours, in order.
        let sequences = self.columns.chunk_by(|a, b| a.slot == b.slot).map(|of| {
            first += of.len();
            first - of.len()..first
        });
        let items = sequences
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
        let place = Place { step, slot: self.columns[columns.start].slot, head };
        let state = self.recall(place, self.columns[columns.start].position);
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
            let Column { position, .. } = self.columns[column];
            if (position + 1).is_multiple_of(PAGE) {
                let at = self.kept_at(place, position / PAGE);
                let pages = &self.pass.pages[step.state.group as usize];
                // SAFETY: this head's part of a page that one sequence writes is the item's own.
                store_f32(Dtype::F32, state, unsafe { pages.write(at) });
            }
        }
    }

    /// The state that this pass writes, with what is kept behind the position before `position`.
    #[allow(clippy::mut_from_ref)]
    fn recall(&self, place: Place<'_>, position: usize) -> &mut [f32] {
        let working = &self.pass.working[place.step.state.group as usize];
        let current = self.pass.behind[place.slot];
        let part = |half: usize| {
            let (kept, keys) = (place.step.heads.kept() as usize, place.step.heads.keys as usize);
            let heads = self.dims().lanes as usize * keys;
            let group = &self.pass.program.groups[place.step.state.group as usize];
            let layers = group.layers as usize * (2 * place.slot + half);
            let at = ((layers + place.step.state.layer as usize) * heads + place.head) * kept;
            at..at + kept
        };
        // SAFETY: this head of this slot is the item's own, and the other half is only read.
        let state = unsafe { working.write(part(1 - current.half)) };
        if position == 0 {
            state.fill(0.0);
        } else if current.position == position {
            // SAFETY: nobody writes the half that is current.
            state.copy_from_slice(unsafe { working.read(part(current.half)) });
        } else {
            assert!(position.is_multiple_of(PAGE), "position {position} of slot {}", place.slot);
            let at = self.kept_at(place, position / PAGE - 1);
            // SAFETY: a page that a sequence goes on behind is not written.
            let bytes = unsafe { self.pass.pages[place.step.state.group as usize].read(at) };
            for (x, bytes) in state.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *x = number_to_f32(Dtype::F32, bytes);
            }
        }
        state
    }

    /// Bytes of a key head in its group's arena, in a sequence's `logical` page.
    fn kept_at(&self, place: Place<'_>, logical: usize) -> Range<usize> {
        let state = place.step.state;
        let group = &self.pass.program.groups[state.group as usize];
        let page = self.page(state, place.slot, logical) * group.page_bytes() as usize;
        let layer = state.layer as usize * group.state.layer_bytes() as usize;
        let bytes = 4 * place.step.heads.kept() as usize;
        let at = page + layer + place.head * bytes;
        at..at + bytes
    }
}
