//! Memory of the simulated machine: pages of the host, its own or those of a file without a name,
//! which other processes may open.
//!
//! Invariant: a region is mapped, readable and writable from its birth to its drop.

use std::fs::File;
use std::os::fd::AsRawFd;
#[cfg(target_os = "linux")]
use std::os::fd::FromRawFd;
use std::os::unix::fs::MetadataExt;

use crate::error::{Error, Result};
use crate::limits;
use crate::machine::handle::{Handle, HandleFault};
use crate::machine::Platform;

/// Zeroed pages.
pub(super) struct Region {
    start: *mut u8,
    bytes: usize,
    /// What the pages are of, where others may open them.
    file: Option<File>,
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
        if bytes as u64 > limits::memory().0 {
            return Err(refused());
        }
        Self::map(bytes.max(1), None).ok_or_else(refused)
    }

    /// The same in pages that other processes may open, where the system has such.
    pub(super) fn open_to_others(bytes: usize, device: &str) -> Result<Self> {
        let refused =
            || Error::OutOfMemory { device: device.to_owned(), wanted_bytes: bytes as u64 };
        if bytes as u64 > limits::memory().0 {
            return Err(refused());
        }
        let file = nameless();
        if let Some(file) = &file {
            file.set_len(bytes.max(1) as u64).map_err(|_| refused())?;
        }
        Self::map(bytes.max(1), file).ok_or_else(refused)
    }

    /// How another process opens the pages.
    pub(super) fn export(&self, bytes: usize) -> std::result::Result<Handle, HandleFault> {
        let private = |why: String| HandleFault::Private(why);
        let file = self.file.as_ref();
        let file = file.ok_or_else(|| private("it is no symmetric memory".to_owned()))?;
        let inode = file.metadata().map_err(|why| private(why.to_string()))?.ino();
        let number = file.as_raw_fd() as u32;
        let token = [&number.to_le_bytes()[..], &inode.to_le_bytes()].concat();
        let (platform, process) = (Platform::Sim, std::process::id());
        Ok(Handle { platform, process, bytes: bytes as u64, token })
    }

    /// Opens another process's pages.
    pub(super) fn import(handle: &Handle, bytes: usize) -> std::result::Result<Self, HandleFault> {
        handle.check(Platform::Sim, bytes)?;
        let token = handle.token.split_first_chunk::<4>();
        let Some((number, inode)) = token.and_then(|(n, rest)| Some((n, rest.first_chunk::<8>()?)))
        else {
            return Err(HandleFault::Garbled(handle.token.len()));
        };
        let path = format!("/proc/{}/fd/{}", handle.process, u32::from_le_bytes(*number));
        let file = File::options().read(true).write(true).open(path);
        let file = file.map_err(|why| handle.stale(why))?;
        let found = file.metadata().map_err(|why| handle.stale(why))?;
        // The number may have been given to another file since.
        if found.ino() != u64::from_le_bytes(*inode) || found.len() != bytes.max(1) as u64 {
            return Err(handle.stale("the descriptor is another file's now"));
        }
        Self::map(bytes.max(1), Some(file)).ok_or_else(|| handle.stale("it cannot be mapped"))
    }

    /// Pages of a file, or new ones.
    fn map(bytes: usize, file: Option<File>) -> Option<Self> {
        let (flags, number) = match &file {
            Some(file) => (libc::MAP_SHARED, file.as_raw_fd()),
            None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
        };
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, at an address of the system's choice, touches nothing that exists.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, number, 0) };
        (start != libc::MAP_FAILED).then(|| Self { start: start.cast(), bytes, file })
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
        // SAFETY: in bounds (asserted); there are no references into a region, so `bytes` is apart.
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

/// A new file in memory that goes with its last descriptor.
#[cfg(target_os = "linux")]
fn nameless() -> Option<File> {
    // SAFETY: a C string; a new file touches nothing that exists.
    let number = unsafe { libc::memfd_create(c"kie".as_ptr(), libc::MFD_CLOEXEC) };
    if number < 0 {
        return None;
    }
    // SAFETY: a descriptor that was just made and has no other user.
    Some(unsafe { File::from_raw_fd(number) })
}

/// Elsewhere there is none: memory is this process's alone.
#[cfg(not(target_os = "linux"))]
fn nameless() -> Option<File> {
    None
}
