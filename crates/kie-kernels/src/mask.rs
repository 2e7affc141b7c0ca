//! Which tokens a sequence may go on with, as bits that another thread writes while the device
//! works on the step before.
//!
//! # Protocol
//! Mask `n` says what token `n` may be, counted from the first that is made. It depends on the
//! tokens before, so whoever writes it has seen token `n - 1`, or guesses it: behind mask `n` stand
//! drafts of the tokens `n`, `n + 1`, ..., each with the mask of the token that follows it. Those
//! masks hold only as long as the tokens are the drafts.
//!
//! One place is enough. The writer begins anew only when it has seen a token that is no draft, and
//! a device that chose such a token has read its mask before and takes none of those behind it.
//! `written` tells which mask the place begins with, and 0 while that changes; what a device reads
//! beside it counts only if `written` is the same afterwards. `drafts` grows; the words and the id
//! behind it are stored before it is.

use std::sync::atomic::{fence, AtomicU32, Ordering};

/// The masks of one sequence.
#[derive(Debug)]
pub struct Masks {
    /// Those of the first token, then of the one behind each draft.
    words: Box<[AtomicU32]>,
    /// Words of a mask.
    width: usize,
    ids: Box<[AtomicU32]>,
    /// Drafts that are there.
    drafts: AtomicU32,
    /// The token that the first mask is of, plus 1.
    written: AtomicU32,
}

/// Where a sequence stands on a device.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// Tokens made.
    pub made: usize,
    /// The last of them.
    pub last: u32,
    /// The first token of the masks that were read last.
    pub begin: usize,
}

impl Masks {
    /// For a vocabulary of `vocab` ids and as many drafts at most; no mask is there yet.
    pub fn new(vocab: usize, drafts: usize) -> Self {
        let zeros = |count: usize| (0..count).map(|_| AtomicU32::new(0)).collect();
        let width = vocab.div_ceil(32);
        Self {
            words: zeros((drafts + 1) * width),
            width,
            ids: zeros(drafts),
            drafts: AtomicU32::new(0),
            written: AtomicU32::new(0),
        }
    }

    /// Drafts that there is room for.
    pub fn drafts_max(&self) -> usize {
        self.ids.len()
    }

    /// Writes mask `index` and begins anew with it: bit `id % 32` of word `id / 32` allows `id`.
    /// Words that are missing allow nothing. The caller has seen token `index - 1`, which is none
    /// of the drafts before.
    pub fn write(&self, index: usize, bits: &[u32]) {
        self.written.store(0, Ordering::Relaxed);
        fence(Ordering::Release);
        self.drafts.store(0, Ordering::Relaxed);
        self.fill(0, bits);
        self.written.store(index as u32 + 1, Ordering::Release);
    }

    /// Adds a draft, and what the token behind it may be.
    ///
    /// # Panics
    /// Where there is no room for one more.
    pub fn add_draft(&self, id: u32, bits: &[u32]) {
        let drafts = self.drafts.load(Ordering::Relaxed) as usize;
        self.ids[drafts].store(id, Ordering::Relaxed);
        self.fill(drafts + 1, bits);
        self.drafts.store(drafts as u32 + 1, Ordering::Release);
    }

    fn fill(&self, mask: usize, bits: &[u32]) {
        let words = &self.words[mask * self.width..][..self.width];
        for (at, word) in words.iter().enumerate() {
            word.store(bits.get(at).copied().unwrap_or(0), Ordering::Relaxed);
        }
    }

    /// Device: mask `index`, once it is there, where drafts do not matter.
    pub fn read(&self, index: usize) -> Option<&[AtomicU32]> {
        let there = self.written.load(Ordering::Acquire) == index as u32 + 1;
        there.then(|| &self.words[..self.width])
    }

    /// Device: the mask of the next token, once it is there.
    pub fn next(&self, place: &mut Place) -> Option<&[AtomicU32]> {
        let behind = self.behind(place)?;
        place.begin = place.made - behind;
        Some(&self.words[behind * self.width..][..self.width])
    }

    /// Device: drafts of the tokens that follow; how many there are.
    pub fn drafted(&self, place: &Place, out: &mut [u32]) -> usize {
        let Some(behind) = self.behind(place) else { return 0 };
        let drafts = self.drafts.load(Ordering::Acquire) as usize;
        // More than there were when the place began anew: it has, meanwhile.
        let ids = self.ids[..drafts].get(behind..).unwrap_or_default();
        for (to, id) in out.iter_mut().zip(ids) {
            *to = id.load(Ordering::Relaxed);
        }
        if self.behind(place) == Some(behind) {
            out.len().min(ids.len())
        } else {
            0
        }
    }

    /// Device: what the token behind draft `n` may be, of those that [`Masks::drafted`] found.
    pub fn behind_draft(&self, place: &Place, n: usize) -> Option<&[AtomicU32]> {
        let mask = self.behind(place)? + n + 1;
        let there = mask <= self.drafts.load(Ordering::Acquire) as usize;
        there.then(|| &self.words[mask * self.width..][..self.width])
    }

    /// Drafts between the first mask and that of the next token, where that is there.
    fn behind(&self, place: &Place) -> Option<usize> {
        let written = self.written.load(Ordering::Acquire);
        if written == place.made as u32 + 1 {
            return Some(0);
        }
        // All tokens since the masks' first one but the last were found to be the drafts before.
        let behind = place.made.checked_sub(place.begin)?;
        if written != place.begin as u32 + 1
            || behind > self.drafts.load(Ordering::Acquire) as usize
        {
            return None;
        }
        let is_draft = self.ids[behind - 1].load(Ordering::Relaxed) == place.last;
        fence(Ordering::Acquire);
        (is_draft && self.written.load(Ordering::Relaxed) == written).then_some(behind)
    }
}

/// Whether a mask allows an id; ids beyond it are not allowed.
pub(crate) fn allows(mask: &[AtomicU32], id: usize) -> bool {
    let word = mask.get(id / 32).map_or(0, |word| word.load(Ordering::Relaxed));
    word >> (id % 32) & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(mask: Option<&[AtomicU32]>) -> Option<Vec<usize>> {
        mask.map(|mask| (0..70).filter(|id| allows(mask, *id)).collect())
    }

    #[test]
    fn a_mask_is_there_once_it_is_written_and_for_its_token_alone() {
        let masks = Masks::new(40, 0);
        assert!(masks.read(0).is_none());
        masks.write(0, &[1 << 31]);
        assert_eq!(ids(masks.read(0)), Some(vec![31]));
        assert!(masks.read(1).is_none());
        masks.write(1, &[0, 1 << 7]);
        assert!(masks.read(0).is_none());
        assert_eq!(ids(masks.read(1)), Some(vec![39]));
    }

    #[test]
    fn masks_behind_drafts_hold_for_as_long_as_the_tokens_are_the_drafts() {
        let masks = Masks::new(40, 2);
        let mut place = Place { made: 0, last: 0, begin: 0 };
        let mut out = [0; 3];
        assert!(masks.next(&mut place).is_none());
        masks.write(0, &[2]);
        masks.add_draft(1, &[4]);
        assert_eq!(masks.drafted(&place, &mut out), 1);
        masks.add_draft(2, &[8]);
        assert_eq!((masks.drafted(&place, &mut out), out), (2, [1, 2, 0]));
        let behind = [0, 1, 2].map(|n| ids(masks.behind_draft(&place, n)));
        assert_eq!(behind, [Some(vec![2]), Some(vec![3]), None]);
        assert_eq!(ids(masks.next(&mut place)), Some(vec![1]));
        (place.made, place.last) = (1, 1);
        assert_eq!((masks.drafted(&place, &mut out), out[0]), (1, 2));
        assert_eq!(ids(masks.next(&mut place)), Some(vec![2]));
        assert_eq!(ids(masks.behind_draft(&place, 0)), Some(vec![3]));
        let (mut other, mut end) = (place, place);
        (end.made, end.last) = (2, 2);
        assert_eq!(ids(masks.next(&mut end)), Some(vec![3]));
        assert_eq!(masks.drafted(&end, &mut out), 0);
        (end.made, end.last) = (3, 3);
        assert!(masks.next(&mut end).is_none(), "that is what the token behind the last one is");
        // Another token than the draft.
        (other.made, other.last) = (2, 9);
        assert!(masks.next(&mut other).is_none());
        assert_eq!(masks.drafted(&other, &mut out), 0);
        masks.write(2, &[16]);
        assert_eq!(ids(masks.next(&mut other)), Some(vec![4]));
        assert_eq!((other.begin, masks.drafted(&other, &mut out)), (2, 0));
        // Who stood there before the place began anew.
        assert_eq!(ids(masks.next(&mut place)), None);
    }
}
