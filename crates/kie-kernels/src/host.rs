//! What this process asks of the system under it: cores, threads and the clock.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::error::{Error, Result};

/// Cores that this process may run on.
pub fn allowed_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// What `work` makes of each item, in their order: side by side, and one after another as far as
/// there can be no threads.
///
/// # Errors
/// The first item's that failed; [`Error::Failed`] for one whose thread, of this `kind`, panicked.
pub(crate) fn side_by_side<T: Sync, R: Send>(
    items: &[T],
    kind: &str,
    work: impl Fn(&T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let next = AtomicUsize::new(0);
    let done: Vec<_> = items.iter().map(|_| Mutex::new(None)).collect();
    let take = || {
        for (item, place) in std::iter::from_fn(|| {
            let at = next.fetch_add(1, Ordering::Relaxed);
            Some((items.get(at)?, &done[at]))
        }) {
            let made = work(item);
            *place.lock().unwrap_or_else(PoisonError::into_inner) = Some(made);
        }
    };
    std::thread::scope(|scope| {
        let spawn = |_| std::thread::Builder::new().spawn_scoped(scope, take).ok();
        let others: Vec<_> = (1..items.len()).map_while(spawn).collect();
        take();
        others.into_iter().for_each(|other| drop(other.join()));
    });
    let died = || Err(Error::Failed(format!("a {kind} thread died")));
    let made = done.into_iter().map(|place| place.into_inner().ok().flatten());
    made.map(|made| made.unwrap_or_else(died)).collect()
}

/// CLOCK_MONOTONIC in nanoseconds.
pub(crate) fn now_ns() -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is a valid timespec; the clock exists on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut t) };
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}
