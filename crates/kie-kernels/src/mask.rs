//! Which tokens a sequence may go on with, as bits that another thread writes while the device
//! works on the step before.
//!
//! # Protocol
//! Mask `n` says what token `n` may be, counted from the first that is made. It is made of the
//! tokens before, so whoever writes mask `n` has seen token `n - 1`, and the device that chose that
//! one has read mask `n - 1` before: one place is enough. `written = n + 1` is stored with release
//! behind the words of mask `n`; the device loads it with acquire and reads words only where it
//! says that mask `n` is there.

use std::sync::atomic::{AtomicU32, Ordering};

/// The masks of one sequence.
#[derive(Debug)]
pub struct Masks {
    words: Box<[AtomicU32]>,
    written: AtomicU32,
}

impl Masks {
    /// For a vocabulary of `vocab` ids; no mask is there yet.
    pub fn new(vocab: usize) -> Self {
        let words = (0..vocab.div_ceil(32)).map(|_| AtomicU32::new(0)).collect();
        Self { words, written: AtomicU32::new(0) }
    }

    /// Writes mask `index`: bit `id % 32` of word `id / 32` allows `id`. Words that are missing
    /// allow nothing. The caller has seen token `index - 1`.
    pub fn write(&self, index: usize, bits: &[u32]) {
        for (at, word) in self.words.iter().enumerate() {
            word.store(bits.get(at).copied().unwrap_or(0), Ordering::Relaxed);
        }
        self.written.store(index as u32 + 1, Ordering::Release);
    }

    /// Device: mask `index`, once it is there.
    pub fn read(&self, index: usize) -> Option<&[AtomicU32]> {
        (self.written.load(Ordering::Acquire) == index as u32 + 1).then_some(&*self.words)
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

    #[test]
    fn a_mask_is_there_once_it_is_written_and_for_its_token_alone() {
        let masks = Masks::new(40);
        assert!(masks.read(0).is_none());
        masks.write(0, &[1 << 31]);
        let mask = masks.read(0).expect("it was written");
        let allowed: Vec<usize> = (0..70).filter(|id| allows(mask, *id)).collect();
        assert_eq!(allowed, [31]);
        assert!(masks.read(1).is_none());
        masks.write(1, &[0, 1 << 7]);
        assert!(masks.read(0).is_none());
        let mask = masks.read(1).expect("it was written");
        assert_eq!((0..70).filter(|id| allows(mask, *id)).collect::<Vec<_>>(), [39]);
    }
}
