//! What this process asks of the system under it: cores, threads and the clock.

use std::thread::ScopedJoinHandle;

use crate::error::{Error, Result};

/// Cores that this process may run on.
pub fn allowed_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// What threads of a kind came to, in their order.
///
/// # Errors
/// The first thread's that failed; [`Error::Failed`] for one that panicked.
pub(crate) fn joined<T>(
    threads: Vec<ScopedJoinHandle<'_, Result<T>>>,
    kind: &str,
) -> Result<Vec<T>> {
    let died = |_| Err(Error::Failed(format!("a {kind} thread died")));
    threads.into_iter().map(|thread| thread.join().unwrap_or_else(died)).collect()
}

/// CLOCK_MONOTONIC in nanoseconds.
pub(crate) fn now_ns() -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is a valid timespec; the clock exists on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut t) };
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}
