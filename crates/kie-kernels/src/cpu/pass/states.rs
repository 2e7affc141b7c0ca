//! Recurrent states of running sequences: each pass reads the one that is current and writes the
//! other; pages have copies of them behind their last positions.

use std::ops::Range;

use super::Walk;
use crate::abi::{Dtype, StateAt, PAGE};
use crate::numbers::{number_to_f32, store_f32};

/// Numbers of a layer's recurrent state that one item has to itself.
pub(super) struct Place {
    pub state: StateAt,
    pub slot: usize,
    pub part: Range<usize>,
}

impl Walk<'_> {
    /// Columns of each sequence: they are neighbours, in order.
    pub(super) fn sequences(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let mut first = 0;
        self.columns.chunk_by(|a, b| a.slot == b.slot).map(move |of| {
            first += of.len();
            first - of.len()..first
        })
    }

    /// The state that this pass writes, with what is kept behind the position before `position`;
    /// none is before the first one, and then true: what is there means nothing.
    #[allow(clippy::mut_from_ref)]
    pub(super) fn recall(&self, place: &Place, position: usize) -> (&mut [f32], bool) {
        let working = &self.pass.working[place.state.group as usize];
        let behind = &self.pass.behind[place.slot];
        let [current, next] = behind.states.map(|state| self.working_at(place, state));
        // SAFETY: this part of this slot's state is the item's own, and the current one is only
        // read.
        let state = unsafe { working.write(next) };
        if position == 0 {
            return (state, true);
        }
        if behind.position == position {
            // SAFETY: nobody writes the state that is current.
            state.copy_from_slice(unsafe { working.read(current) });
        } else {
            assert!(position.is_multiple_of(PAGE), "position {position} of slot {}", place.slot);
            let at = self.kept_at(place, position / PAGE - 1);
            // SAFETY: a page that a sequence goes on behind is not written.
            let bytes = unsafe { self.pass.pages[place.state.group as usize].read(at) };
            for (x, bytes) in state.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *x = number_to_f32(Dtype::F32, bytes);
            }
        }
        (state, false)
    }

    /// Copies a state behind a column to where its sequence goes on from, should what comes next be
    /// a wrong draft; and to the page that ends there, if one does.
    pub(super) fn keep(&self, place: &Place, column: usize, state: &[f32]) {
        let position = self.columns[column].position;
        if self.columns.get(column + 1).is_some_and(|next| next.drafted) {
            let at = self.working_at(place, self.pass.between[column]);
            let working = &self.pass.working[place.state.group as usize];
            // SAFETY: this part of what is left behind this column is the item's own.
            unsafe { working.write(at) }.copy_from_slice(state);
        }
        if (position + 1).is_multiple_of(PAGE) {
            let at = self.kept_at(place, position / PAGE);
            let pages = &self.pass.pages[place.state.group as usize];
            // SAFETY: this part of a page that one sequence writes is the item's own.
            store_f32(Dtype::F32, state, unsafe { pages.write(at) });
        }
    }

    /// A place in one of the states that sequences go on with.
    fn working_at(&self, place: &Place, state: usize) -> Range<usize> {
        let group = &self.pass.program.groups[place.state.group as usize];
        let numbers = group.state.layer_bytes() as usize / 4;
        let at = (group.layers as usize * state + place.state.layer as usize) * numbers;
        at + place.part.start..at + place.part.end
    }

    /// Bytes of a place in its group's arena, in a sequence's `logical` page.
    fn kept_at(&self, place: &Place, logical: usize) -> Range<usize> {
        let state = place.state;
        let group = &self.pass.program.groups[state.group as usize];
        let page = self.page(state, place.slot, logical) * group.page_bytes() as usize;
        let layer = state.layer as usize * group.state.layer_bytes() as usize;
        let at = page + layer;
        at + 4 * place.part.start..at + 4 * place.part.end
    }
}
