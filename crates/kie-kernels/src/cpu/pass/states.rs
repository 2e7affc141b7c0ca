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
        let group = &self.pass.program.groups[place.state.group as usize];
        let working = &self.pass.working[place.state.group as usize];
        let current = self.pass.behind[place.slot];
        let part = |half: usize| {
            let layers = group.layers as usize * (2 * place.slot + half);
            let numbers = group.state.layer_bytes() as usize / 4;
            let at = (layers + place.state.layer as usize) * numbers;
            at + place.part.start..at + place.part.end
        };
        // SAFETY: this part of this slot's state is the item's own, and the other half is only
        // read.
        let state = unsafe { working.write(part(1 - current.half)) };
        if position == 0 {
            return (state, true);
        }
        if current.position == position {
            // SAFETY: nobody writes the half that is current.
            state.copy_from_slice(unsafe { working.read(part(current.half)) });
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

    /// Copies a state to the page that ends with `position`, if one does.
    pub(super) fn keep(&self, place: &Place, position: usize, state: &[f32]) {
        if (position + 1).is_multiple_of(PAGE) {
            let at = self.kept_at(place, position / PAGE);
            let pages = &self.pass.pages[place.state.group as usize];
            // SAFETY: this part of a page that one sequence writes is the item's own.
            store_f32(Dtype::F32, state, unsafe { pages.write(at) });
        }
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
