//! Memory that kernels and the host share: zeroed bytes whose address in a kernel is their address
//! in this process. Every access is an atomic of its size, so that host and kernel may meet in a
//! word; none is made outside a live region.

use std::alloc::{alloc_zeroed, dealloc, Layout};
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, AtomicU8, Ordering::Relaxed};
use std::sync::Arc;

const PAGE: usize = 4096;

/// Zeroed bytes.
pub(crate) struct Region {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: the bytes are reached only through atomics.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// At least `bytes` bytes; nothing where the system has not so many.
    pub(crate) fn new(bytes: usize) -> Option<Self> {
        let bytes = bytes.max(1).checked_next_multiple_of(PAGE)?;
        let layout = Layout::from_size_align(bytes, PAGE).ok()?;
        // SAFETY: the layout has a size.
        let start = unsafe { alloc_zeroed(layout) };
        (!start.is_null()).then_some(Self { start, bytes })
    }

    /// Its address.
    pub(crate) fn start(&self) -> *mut u8 {
        self.start
    }

    /// Its length, in whole pages.
    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    fn at(&self, offset: usize, bytes: usize) -> *mut u8 {
        let fits = offset.is_multiple_of(bytes) && offset + bytes <= self.bytes;
        assert!(fits, "{bytes} at {offset} of {}", self.bytes);
        self.start.wrapping_add(offset)
    }

    /// A number of 1, 2, 4 or 8 bytes.
    #[inline]
    pub(crate) fn load(&self, offset: usize, bytes: usize) -> u64 {
        let at = self.at(offset, bytes);
        // SAFETY: in bounds and aligned (asserted), live while `self` is.
        unsafe {
            match bytes {
                1 => AtomicU8::from_ptr(at).load(Relaxed).into(),
                2 => AtomicU16::from_ptr(at.cast()).load(Relaxed).into(),
                4 => AtomicU32::from_ptr(at.cast()).load(Relaxed).into(),
                _ => AtomicU64::from_ptr(at.cast()).load(Relaxed),
            }
        }
    }

    /// The same, written.
    #[inline]
    pub(crate) fn store(&self, offset: usize, bytes: usize, value: u64) {
        let at = self.at(offset, bytes);
        // SAFETY: as in `load`.
        unsafe {
            match bytes {
                1 => AtomicU8::from_ptr(at).store(value as u8, Relaxed),
                2 => AtomicU16::from_ptr(at.cast()).store(value as u16, Relaxed),
                4 => AtomicU32::from_ptr(at.cast()).store(value as u32, Relaxed),
                _ => AtomicU64::from_ptr(at.cast()).store(value, Relaxed),
            }
        }
    }

    /// Copies in, in whole words as far as they go: the host's copies tear none either.
    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) {
        let (mut at, mut rest) = (offset, bytes);
        while !rest.is_empty() {
            let step = if at.is_multiple_of(8) && rest.len() >= 8 { 8 } else { 1 };
            let (now, later) = rest.split_at(step);
            let mut word = [0; 8];
            word[..step].copy_from_slice(now);
            self.store(at, step, u64::from_le_bytes(word));
            (at, rest) = (at + step, later);
        }
    }

    /// Copies out.
    pub(crate) fn read(&self, offset: usize, out: &mut [u8]) {
        let (mut at, mut rest) = (offset, out);
        while !rest.is_empty() {
            let step = if at.is_multiple_of(8) && rest.len() >= 8 { 8 } else { 1 };
            let (now, later) = rest.split_at_mut(step);
            now.copy_from_slice(&self.load(at, step).to_le_bytes()[..step]);
            (at, rest) = (at + step, later);
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let layout = Layout::from_size_align(self.bytes, PAGE).expect("`new` made it");
        // SAFETY: allocated by `new` with this layout, and this is the last use.
        unsafe { dealloc(self.start, layout) };
    }
}

/// All regions that a launch may reach.
pub(crate) struct Space {
    /// In the order of addresses.
    regions: Vec<Arc<Region>>,
    /// The one that was reached last.
    last: usize,
}

impl Space {
    pub(crate) fn new(mut regions: Vec<Arc<Region>>) -> Self {
        regions.sort_by_key(|region| region.start() as u64);
        Self { regions, last: 0 }
    }

    /// The region with these bytes and where they are in it; nothing for those that are nowhere,
    /// or not aligned.
    #[inline]
    pub(crate) fn find(&mut self, at: u64, bytes: usize) -> Option<(&Region, usize)> {
        let within = |region: &Arc<Region>| {
            let offset = at.wrapping_sub(region.start() as u64);
            offset.checked_add(bytes as u64).is_some_and(|end| end <= region.len() as u64)
        };
        if !self.regions.get(self.last).is_some_and(within) {
            let after = self.regions.partition_point(|region| region.start() as u64 <= at);
            self.last = after.checked_sub(1)?;
        }
        let region = &self.regions[self.last];
        let offset = at.wrapping_sub(region.start() as u64) as usize;
        (within(region) && at.is_multiple_of(bytes.min(4) as u64)).then_some((region, offset))
    }

    /// Words from `at` on, two at a time where they are aligned so.
    #[inline]
    pub(crate) fn load(&mut self, at: u64, words: &mut [u32]) -> Option<()> {
        let (region, mut offset) = self.find(at, 4 * words.len())?;
        let mut n = 0;
        while n < words.len() {
            if offset.is_multiple_of(8) && n + 2 <= words.len() {
                let both = region.load(offset, 8);
                (words[n], words[n + 1]) = (both as u32, (both >> 32) as u32);
                (n, offset) = (n + 2, offset + 8);
            } else {
                words[n] = region.load(offset, 4) as u32;
                (n, offset) = (n + 1, offset + 4);
            }
        }
        Some(())
    }

    /// The same, written.
    #[inline]
    pub(crate) fn store(&mut self, at: u64, words: &[u32]) -> Option<()> {
        let (region, mut offset) = self.find(at, 4 * words.len())?;
        let mut n = 0;
        while n < words.len() {
            if offset.is_multiple_of(8) && n + 2 <= words.len() {
                region.store(offset, 8, u64::from(words[n]) | u64::from(words[n + 1]) << 32);
                (n, offset) = (n + 2, offset + 8);
            } else {
                region.store(offset, 4, words[n].into());
                (n, offset) = (n + 1, offset + 4);
            }
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_where_they_were_put_and_nowhere_else() {
        let region = Arc::new(Region::new(100).expect("memory"));
        region.write(3, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]);
        let mut out = [0; 17];
        region.read(2, &mut out);
        assert_eq!(out, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0]);
        let start = region.start() as u64;
        let mut space = Space::new(vec![region]);
        let mut words = [0; 3];
        space.load(start + 4, &mut words).expect("inside");
        assert_eq!(words, [0x0504_0302, 0x0908_0706, 0x0d0c_0b0a]);
        space.store(start + 4092, &[7]).expect("inside");
        for (at, bytes) in [(start - 4, 4), (start + 4094, 4), (start + 4096, 1), (start + 2, 4)] {
            assert!(space.find(at, bytes).is_none(), "{bytes} at {at:x}");
        }
    }
}
