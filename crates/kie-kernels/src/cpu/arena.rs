//! Weights in huge pages. A mapped file comes in 4 kB pages, and a stream over gigabytes of them
//! misses the address cache once a page; 2 MB pages read about 8 % faster. Worth a copy for weights
//! that are read from memory each token, not for those that a cache holds.

use std::alloc::{alloc, dealloc, handle_alloc_error, Layout};

/// Bytes from which weights are copied: larger than most last-level caches' share of a core.
pub const COPY_FROM: usize = 256 << 20;

const HUGE_PAGE: usize = 2 << 20;

/// A copy of bytes, aligned to huge pages.
pub struct Arena {
    start: *mut u8,
    layout: Layout,
}

// SAFETY: the memory is written by `copy` alone, before anybody else has the arena.
unsafe impl Send for Arena {}
// SAFETY: as above: afterwards it is only read.
unsafe impl Sync for Arena {}

impl Arena {
    /// Copies `bytes` with `threads` threads, each of which is the first to touch its part.
    ///
    /// # Panics
    /// For no bytes.
    pub fn copy(bytes: &[u8], threads: usize) -> Self {
        assert!(!bytes.is_empty(), "an arena of nothing");
        let layout = Layout::from_size_align(bytes.len(), HUGE_PAGE)
            .expect("a slice is shorter than isize::MAX, also rounded up to 2 MB");
        // SAFETY: the layout's size is not zero.
        let start = unsafe { alloc(layout) };
        if start.is_null() {
            handle_alloc_error(layout);
        }
        // SAFETY: the range is ours. A kernel that declines leaves small pages: slower, not wrong.
        unsafe { libc::madvise(start.cast(), layout.size(), libc::MADV_HUGEPAGE) };
        let share = bytes.len().div_ceil(threads).next_multiple_of(HUGE_PAGE);
        let first = start as usize;
        std::thread::scope(|scope| {
            for (part, from) in bytes.chunks(share).enumerate() {
                // An address crosses threads, a pointer would not; it is one again inside.
                let to = first + part * share;
                scope.spawn(move || {
                    // SAFETY: parts are disjoint and inside the allocation, as `from` in `bytes`.
                    unsafe {
                        std::ptr::copy_nonoverlapping(from.as_ptr(), to as *mut u8, from.len());
                    }
                });
            }
        });
        Self { start, layout }
    }
}

impl AsRef<[u8]> for Arena {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: `copy` wrote all of it.
        unsafe { std::slice::from_raw_parts(self.start, self.layout.size()) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: allocated by `copy` with this layout.
        unsafe { dealloc(self.start, self.layout) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_equal_whatever_the_threads() {
        let byte = |i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8;
        let bytes: Vec<u8> = (0..5_000_003).map(byte).collect();
        for threads in [1, 2, 5] {
            let arena = Arena::copy(&bytes, threads);
            assert!(arena.as_ref() == bytes);
        }
        assert_eq!(Arena::copy(&bytes[..1], 3).as_ref(), &bytes[..1]);
    }
}
