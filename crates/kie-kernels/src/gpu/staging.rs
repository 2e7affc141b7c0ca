//! Copies between pageable host memory and the device, by pinned memory in between.
//!
//! Several threads copy into buffers of their own while earlier buffers are on their way: one
//! thread's `memcpy` (page faults of a mapped file included) is slower than the bus. Invariant: no
//! copy is under way in any buffer while [`Context::staging`] is not locked.

use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{MutexGuard, PoisonError};

use super::api::{Address, Api};
use super::context::{Context, Lane, Lanes};
use crate::error::{Error, Result};

/// What fills the buffers of a copy to the device.
#[derive(Clone, Copy)]
pub(super) enum Fill<'a> {
    /// So many zeros from an address on.
    Zeros(Address, usize),
    /// Pieces of host memory.
    Pieces(&'a CopyPlan<'a>),
}

/// Pieces as buffers take them: cut to what one holds, those that are neighbours on the device
/// together.
pub(super) struct CopyPlan<'a> {
    parts: Vec<&'a [u8]>,
    /// Where each buffer goes, and its first part.
    buffers: Vec<(Address, usize)>,
}

impl<'a> CopyPlan<'a> {
    pub fn new(pieces: &[(Address, &'a [u8])], chunk_bytes: usize) -> Self {
        let mut plan = Self { parts: Vec::with_capacity(pieces.len()), buffers: Vec::new() };
        // Where the buffer at hand ends, and how much it still takes.
        let (mut end, mut room) = (0, 0);
        for (at, bytes) in pieces {
            let (mut at, mut bytes) = (*at, *bytes);
            while !bytes.is_empty() {
                if room == 0 || at != end {
                    plan.buffers.push((at, plan.parts.len()));
                    room = chunk_bytes;
                }
                let (part, rest) = bytes.split_at(bytes.len().min(room));
                plan.parts.push(part);
                at += part.len() as Address;
                (end, room, bytes) = (at, room - part.len(), rest);
            }
        }
        plan
    }
}

impl Fill<'_> {
    /// Buffers of so many bytes that it fills.
    fn count(&self, chunk_bytes: usize) -> usize {
        match self {
            Self::Zeros(_, bytes) => bytes.div_ceil(chunk_bytes),
            Self::Pieces(plan) => plan.buffers.len(),
        }
    }

    /// Fills a buffer and tells where it goes, and its length.
    fn put(&self, index: usize, buffer: &mut [u8]) -> (Address, usize) {
        match self {
            Self::Zeros(address, bytes) => {
                let at = index * buffer.len();
                let len = buffer.len().min(bytes - at);
                buffer[..len].fill(0);
                (address + at as Address, len)
            }
            Self::Pieces(plan) => {
                let (at, first) = plan.buffers[index];
                let end = plan.buffers.get(index + 1).map_or(plan.parts.len(), |next| next.1);
                let mut len = 0;
                for part in &plan.parts[first..end] {
                    buffer[len..len + part.len()].copy_from_slice(part);
                    len += part.len();
                }
                (at, len)
            }
        }
    }
}

impl<A: Api> Context<A> {
    const CHUNK_BYTES: usize = A::STAGING.chunk_bytes;

    fn lanes(&self) -> MutexGuard<'_, Lanes> {
        // A panic leaves the buffers as they are; they hold nothing between copies.
        self.staging.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies to the device; when it returns the bytes are there.
    pub fn copy_in(&self, fill: Fill<'_>) -> Result<()> {
        let staging = self.lanes();
        let chunks = fill.count(Self::CHUNK_BYTES);
        let next = AtomicUsize::new(0);
        let (first, rest) = staging.lanes.split_at(1);
        let helpers = chunks.saturating_sub(1).min(rest.len());
        let ended = std::thread::scope(|scope| {
            let others: Vec<_> = rest[..helpers]
                .iter()
                .map_while(|lane| {
                    // With fewer threads it takes longer.
                    let fill = || self.fill_lane(lane, fill, &next);
                    std::thread::Builder::new().spawn_scoped(scope, fill).ok()
                })
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
        let _current = self.current()?;
        let chunks = fill.count(Self::CHUNK_BYTES);
        let num_buffers = lane.buffers.len();
        for round in 0.. {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= chunks {
                break;
            }
            let (buffer, ended) =
                (lane.buffers[round % num_buffers], lane.ended.get(round % num_buffers));
            match ended {
                Some(ended) if round >= num_buffers => self.wait_event(*ended)?,
                None if round > 0 => self.wait_copies()?,
                Some(_) | None => {}
            }
            // SAFETY: this lane's buffer of so many pinned bytes; the copy out of it has ended, and
            // the lock on `staging` keeps all other threads away.
            let room =
                unsafe { std::slice::from_raw_parts_mut(buffer as *mut u8, Self::CHUNK_BYTES) };
            let (at, len) = fill.put(index, room);
            let (from, copy) = (buffer as *const c_void, &self.api.calls().copy_in);
            // SAFETY: the caller checked that there is room; the buffer stays as it is until the
            // copy has ended.
            self.check(copy.with(|f| unsafe { f(at, from, len, self.copies) }))?;
            if let Some(ended) = ended {
                self.check(self.record(*ended, self.copies))?;
            }
        }
        Ok(())
    }

    /// Copies from the device. For results, which are small: one buffer, one thread.
    pub fn copy_out(&self, from: Address, out: &mut [u8]) -> Result<()> {
        let staging = self.lanes();
        let _current = self.current()?;
        let buffer = staging.lanes[0].buffers[0];
        for (index, chunk) in out.chunks_mut(Self::CHUNK_BYTES).enumerate() {
            let at = from + (index * Self::CHUNK_BYTES) as Address;
            let (to, len) = (buffer as *mut c_void, chunk.len());
            let copy = &self.api.calls().copy_out;
            // SAFETY: the caller checked the source; the buffer is ours while the lock is.
            let started = self.check(copy.with(|f| unsafe { f(to, at, len, self.copies) }));
            // Also after an error: the buffer must be free when the lock is.
            started.and(self.wait_copies())?;
            // SAFETY: so many bytes of the buffer were just written, and nobody writes it now.
            let bytes = unsafe { std::slice::from_raw_parts(buffer as *const u8, len) };
            chunk.copy_from_slice(bytes);
        }
        Ok(())
    }
}
