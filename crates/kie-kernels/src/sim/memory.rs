//! Memory of the simulated machine: pages of the host.
//!
//! Invariant: a region is mapped, readable and writable from its birth to its drop.

use crate::error::{Error, Result};

/// Zeroed pages.
pub(super) struct Region {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: a region is an address range; what is done with the bytes goes through raw pointers.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// At least `bytes` bytes of zeros on behalf of `device`.
    pub(super) fn new(bytes: usize, device: &str) -> Result<Self> {
        let refused =
            || Error::OutOfMemory { device: device.to_owned(), wanted_bytes: bytes as u64 };
        if bytes as u64 > of_host().0 {
            return Err(refused());
        }
        let length = bytes.max(1);
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new anonymous mapping touches nothing that exists.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), length, protection, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(refused());
        }
        Ok(Self { start: start.cast(), bytes: length })
    }

    /// `old` if it is large enough, otherwise a new one.
    pub(super) fn at_least(old: Option<Self>, bytes: usize, device: &str) -> Result<Self> {
        match old {
            Some(region) if region.bytes >= bytes => Ok(region),
            _ => Self::new(bytes, device),
        }
    }

    pub(super) fn start(&self) -> *mut u8 {
        self.start
    }

    pub(super) fn len(&self) -> usize {
        self.bytes
    }

    /// Copies in.
    pub(super) fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.bytes, "{offset} of {}", self.bytes);
        let to = self.start.wrapping_add(offset);
        // SAFETY: in bounds (asserted); nobody has references into a region, so `bytes` is apart.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    /// Copies out.
    pub(super) fn read(&self, offset: usize, out: &mut [u8]) {
        assert!(offset + out.len() <= self.bytes, "{offset} of {}", self.bytes);
        let from = self.start.wrapping_add(offset);
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) };
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length, and this is the last use.
        unsafe { libc::munmap(self.start.cast(), self.bytes) };
    }
}

/// Bytes of the host's memory: all, and free now.
pub(super) fn of_host() -> (u64, u64) {
    let ask = |what| {
        // SAFETY: sysconf takes any name and touches no memory of ours.
        u64::try_from(unsafe { libc::sysconf(what) }).unwrap_or(0)
    };
    let page = ask(libc::_SC_PAGESIZE);
    (ask(libc::_SC_PHYS_PAGES) * page, ask(libc::_SC_AVPHYS_PAGES) * page)
}
