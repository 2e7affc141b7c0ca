//! Weights in memory of the process's own: what happens to the files once they are read changes
//! nothing. In huge pages, where there are that many: a stream over gigabytes of 4 kB pages misses
//! the address cache once a page; 2 MB pages read about 8 % faster.

use std::alloc::{alloc, dealloc, Layout};

use crate::device::Stop;
use crate::error::{Error, Result};

/// Bytes that are copied between two looks at [`Stop`].
const PIECE: usize = 8 << 20;

const HUGE_PAGE: usize = 2 << 20;

/// A copy of bytes, aligned to huge pages.
pub struct Arena {
    start: *mut u8,
    len: usize,
    layout: Layout,
}

// SAFETY: the memory is written by `copy` alone, before anybody else has the arena.
unsafe impl Send for Arena {}
// SAFETY: as above: afterwards it is only read.
unsafe impl Sync for Arena {}

impl Arena {
    /// Copies `bytes` with `threads` threads, each of which is the first to touch its part.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::GivenUp`] once `stop` is set.
    pub fn copy(bytes: &[u8], threads: usize, stop: &Stop) -> Result<Self> {
        let failed = || Error::OutOfMemory {
            device: "the host".to_owned(),
            wanted_bytes: bytes.len() as u64,
        };
        let size = bytes.len().max(1);
        let align = if size < HUGE_PAGE { 64 } else { HUGE_PAGE };
        let layout = Layout::from_size_align(size, align).map_err(|_| failed())?;
        // SAFETY: the layout's size is not zero.
        let start = unsafe { alloc(layout) };
        if start.is_null() {
            return Err(failed());
        }
        let arena = Self { start, len: bytes.len(), layout };
        // SAFETY: the range is ours. A kernel that declines leaves small pages: slower, not wrong.
        #[cfg(target_os = "linux")]
        unsafe {
            libc::madvise(start.cast(), size, libc::MADV_HUGEPAGE)
        };
        let share = bytes.len().div_ceil(threads).next_multiple_of(HUGE_PAGE);
        let first = start as usize;
        let part = |part: usize, from: &[u8]| {
            for (piece, from) in from.chunks(PIECE).enumerate() {
                if stop.is_set() {
                    return;
                }
                let to = first + part * share + piece * PIECE;
                // SAFETY: parts and their pieces are disjoint and inside the allocation, as `from`
                // is in `bytes`.
                unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to as *mut u8, from.len()) };
            }
        };
        std::thread::scope(|scope| {
            let mut parts = bytes.chunks(share.max(1)).enumerate();
            let own = parts.next();
            for (n, from) in parts {
                let work = move || part(n, from);
                // Without another thread it takes longer.
                if std::thread::Builder::new().spawn_scoped(scope, work).is_err() {
                    work();
                }
            }
            own.into_iter().for_each(|(n, from)| part(n, from));
        });
        stop.check()?;
        Ok(arena)
    }
}

impl AsRef<[u8]> for Arena {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: `copy` wrote all of it before it gave the arena away.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: allocated by `copy` with this layout.
        unsafe { dealloc(self.start, self.layout) };
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_equal_whatever_the_threads() {
        let byte = |i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8;
        let bytes: Vec<u8> = (0..5_000_003).map(byte).collect();
        let stop = Stop::default();
        for threads in [1, 2, 5] {
            let arena = Arena::copy(&bytes, threads, &stop).unwrap();
            assert!(arena.as_ref() == bytes);
        }
        for few in [0, 1] {
            assert_eq!(Arena::copy(&bytes[..few], 3, &stop).unwrap().as_ref(), &bytes[..few]);
        }
        stop.set();
        assert!(matches!(Arena::copy(&bytes, 2, &stop), Err(Error::GivenUp)));
    }
}
