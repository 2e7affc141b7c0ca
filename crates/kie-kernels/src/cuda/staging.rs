//! Copies between pageable host memory and the device, by pinned memory in between.
//!
//! Several threads copy into buffers of their own while earlier buffers are on their way: one
//! thread's `memcpy` (page faults of a mapped file included) is slower than the bus. Invariant: no
//! copy is under way in any buffer while [`super::context::Context::staging`] is not locked.

use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{MutexGuard, PoisonError};

use super::context::{Context, Retired};
use super::ffi::{Address, Handle};
use crate::error::{Error, Result};

/// Bytes of one buffer.
pub(super) const CHUNK_BYTES: usize = 2 << 20;
/// Most threads that fill buffers, each with two of its own: four fill them at 28 GB/s on a server
/// with one H200, eight at 39, more no faster.
const LANES_MAX: usize = 8;

/// The buffers.
#[derive(Default)]
pub(super) struct Staging {
    /// All of them, one after another.
    host: usize,
    lanes: Vec<Lane>,
}

/// Two buffers that one thread fills in rotation.
struct Lane {
    buffers: [usize; 2],
    /// The copy out of each has ended.
    ended: [Handle; 2],
}

impl Staging {
    pub fn new(context: &Context) -> Result<Self> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let lanes = cores.min(LANES_MAX);
        // Made at once: pinning memory may wait for a running kernel.
        let host = context.pinned(2 * lanes * CHUNK_BYTES)? as usize;
        let mut staging = Self { host, lanes: Vec::with_capacity(lanes) };
        let made = (0..lanes).try_for_each(|lane| {
            let buffers = [0, 1].map(|n| host + (2 * lane + n) * CHUNK_BYTES);
            let first = context.event()?;
            staging.lanes.push(Lane { buffers, ended: [first, 0] });
            staging.lanes[lane].ended[1] = context.event()?;
            Ok(())
        });
        match made {
            Ok(()) => Ok(staging),
            Err(error) => {
                staging.free(context);
                Err(error)
            }
        }
    }

    pub fn free(self, context: &Context) {
        for event in self.lanes.iter().flat_map(|lane| lane.ended).filter(|&e| e != 0) {
            context.destroy_event(event);
        }
        if self.host != 0 {
            context.retire(Retired::Host(self.host));
        }
    }
}

/// What fills the buffers of a copy to the device.
#[derive(Clone, Copy)]
pub(super) enum Fill<'a> {
    /// So many zeros from an address on.
    Zeros(Address, usize),
    /// Pieces of host memory.
    Pieces(&'a Cut<'a>),
}

/// Pieces as buffers take them: cut to what one holds, those that are neighbours on the device
/// together.
pub(super) struct Cut<'a> {
    parts: Vec<&'a [u8]>,
    /// Where each buffer goes, and its first part.
    buffers: Vec<(Address, usize)>,
}

impl<'a> Cut<'a> {
    pub fn new(pieces: &[(Address, &'a [u8])]) -> Self {
        let mut cut = Self { parts: Vec::with_capacity(pieces.len()), buffers: Vec::new() };
        // Where the buffer at hand ends, and how much it still takes.
        let (mut end, mut room) = (0, 0);
        for (at, bytes) in pieces {
            let (mut at, mut bytes) = (*at, *bytes);
            while !bytes.is_empty() {
                if room == 0 || at != end {
                    cut.buffers.push((at, cut.parts.len()));
                    room = CHUNK_BYTES;
                }
                let (part, rest) = bytes.split_at(bytes.len().min(room));
                cut.parts.push(part);
                at += part.len() as Address;
                (end, room, bytes) = (at, room - part.len(), rest);
            }
        }
        cut
    }
}

impl Fill<'_> {
    /// Buffers that it fills.
    fn count(&self) -> usize {
        match self {
            Self::Zeros(_, bytes) => bytes.div_ceil(CHUNK_BYTES),
            Self::Pieces(cut) => cut.buffers.len(),
        }
    }

    /// Fills a buffer and tells where it goes, and its length.
    fn put(&self, index: usize, buffer: &mut [u8]) -> (Address, usize) {
        match self {
            Self::Zeros(address, bytes) => {
                let at = index * CHUNK_BYTES;
                let len = CHUNK_BYTES.min(bytes - at);
                buffer[..len].fill(0);
                (address + at as Address, len)
            }
            Self::Pieces(cut) => {
                let (at, first) = cut.buffers[index];
                let end = cut.buffers.get(index + 1).map_or(cut.parts.len(), |next| next.1);
                let mut len = 0;
                for part in &cut.parts[first..end] {
                    buffer[len..len + part.len()].copy_from_slice(part);
                    len += part.len();
                }
                (at, len)
            }
        }
    }
}

impl Context {
    fn staging(&self) -> MutexGuard<'_, Staging> {
        // A panic leaves the buffers as they are; they hold nothing between copies.
        self.staging.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies to the device; when it returns the bytes are there.
    pub fn copy_in(&self, fill: Fill<'_>) -> Result<()> {
        let staging = self.staging();
        let chunks = fill.count();
        let next = AtomicUsize::new(0);
        let (first, rest) = staging.lanes.split_at(1);
        let helpers = chunks.saturating_sub(1).min(rest.len());
        let ended = std::thread::scope(|scope| {
            let others: Vec<_> = rest[..helpers]
                .iter()
                .map(|lane| scope.spawn(|| self.fill_lane(lane, fill, &next)))
                .collect();
            let mut ended = self.fill_lane(&first[0], fill, &next);
            for other in others {
                let panicked = |_| Err(Error::Failed(format!("{}: a copy panicked", self.name)));
                ended = ended.and(other.join().unwrap_or_else(panicked));
            }
            ended
        });
        let _current = self.current()?;
        // Also after an error: the buffers must be free when the lock is.
        ended.and(self.wait_copies())
    }

    fn fill_lane(&self, lane: &Lane, fill: Fill<'_>, next: &AtomicUsize) -> Result<()> {
        let api = &self.driver.api;
        let _current = self.current()?;
        let chunks = fill.count();
        for turn in 0.. {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= chunks {
                break;
            }
            let (buffer, ended) = (lane.buffers[turn % 2], lane.ended[turn % 2]);
            if turn >= 2 {
                // SAFETY: our own event, recorded two turns ago.
                let code = unsafe { (api.cuEventSynchronize)(ended) };
                self.check("cuEventSynchronize", code)?;
            }
            // SAFETY: this lane's buffer of so many pinned bytes; the copy out of it has ended, and
            // the lock on `staging` keeps all other threads away.
            let room = unsafe { std::slice::from_raw_parts_mut(buffer as *mut u8, CHUNK_BYTES) };
            let (at, len) = fill.put(index, room);
            let from = buffer as *const c_void;
            // SAFETY: the caller checked that there is room; the buffer stays as it is until
            // `ended`.
            let code = unsafe { (api.cuMemcpyHtoDAsync_v2)(at, from, len, self.copies) };
            self.check("cuMemcpyHtoDAsync", code)?;
            // SAFETY: our own event and stream.
            let code = unsafe { (api.cuEventRecord)(ended, self.copies) };
            self.check("cuEventRecord", code)?;
        }
        Ok(())
    }

    /// Copies from the device. For results, which are small: one buffer, one thread.
    pub fn copy_out(&self, from: Address, out: &mut [u8]) -> Result<()> {
        let staging = self.staging();
        let _current = self.current()?;
        let buffer = staging.lanes[0].buffers[0];
        for (index, chunk) in out.chunks_mut(CHUNK_BYTES).enumerate() {
            let at = from + (index * CHUNK_BYTES) as Address;
            let (to, len) = (buffer as *mut c_void, chunk.len());
            // SAFETY: the caller checked the source; the buffer is ours while the lock is.
            let code = unsafe { (self.driver.api.cuMemcpyDtoHAsync_v2)(to, at, len, self.copies) };
            self.check("cuMemcpyDtoHAsync", code)?;
            self.wait_copies()?;
            // SAFETY: so many bytes of the buffer were just written, and nobody writes it now.
            let bytes = unsafe { std::slice::from_raw_parts(buffer as *const u8, len) };
            chunk.copy_from_slice(bytes);
        }
        Ok(())
    }
}
