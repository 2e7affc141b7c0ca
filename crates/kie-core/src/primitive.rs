//! What `ring.rs` is made of: atomic words, cells, one way to sleep on a word. Tests compile
//! `ring.rs` a second time over `loom`'s versions of the same names.
//!
//! Invariant: nothing here knows the protocol; every function is one system call or one access.

use std::cell;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::Ordering;
use std::sync::OnceLock;
use std::time::Duration;

pub use std::sync::atomic::AtomicU32;
pub use std::sync::Arc;

use kie_kernels::park;

use crate::descriptor::Descriptor;

/// Turns of the spin before a reader sleeps: a few microseconds.
pub const SPINS: u32 = 200;

/// A cell with loom's interface.
#[derive(Debug)]
#[repr(transparent)]
pub struct UnsafeCell<T>(cell::UnsafeCell<T>);

impl<T> UnsafeCell<T> {
    /// A cell.
    pub const fn new(value: T) -> Self {
        Self(cell::UnsafeCell::new(value))
    }

    /// The place, to read.
    pub fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
        f(self.0.get())
    }

    /// The place, to write.
    pub fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}

/// Room for `n` values. The memory is not touched, so unused room costs addresses only.
pub fn cells<T>(n: usize) -> Box<[UnsafeCell<MaybeUninit<T>>]> {
    let room = Box::<[UnsafeCell<MaybeUninit<T>>]>::new_uninit_slice(n);
    // SAFETY: UnsafeCell<MaybeUninit<T>> is transparent over MaybeUninit<T>, which needs no
    // initialisation.
    unsafe { room.assume_init() }
}

/// One turn of a spin.
pub fn pause() {
    std::hint::spin_loop();
}

/// Sleeps and wakes on a word, and by a descriptor for those who poll.
#[derive(Debug, Default)]
pub struct Waker {
    polled: OnceLock<Descriptor>,
}

impl Waker {
    /// Sleeps until woken, or returns at once if `word` is not `seen`; may return for no reason.
    pub fn wait(&self, word: &AtomicU32, seen: u32, timeout: Option<Duration>) {
        park::wait(word, seen, timeout);
    }

    /// Wakes all who sleep on `word`, and makes the descriptor readable.
    pub fn wake(&self, word: &AtomicU32) {
        park::wake_all(word);
        self.signal();
    }

    /// The descriptor, made on first use; true if this call made it.
    pub fn fd(&self) -> std::io::Result<(RawFd, bool)> {
        if let Some(polled) = self.polled.get() {
            return Ok((polled.as_raw_fd(), false));
        }
        let first = self.polled.set(Descriptor::new()?).is_ok();
        Ok((self.polled.get().map_or(-1, AsRawFd::as_raw_fd), first))
    }

    /// True if somebody polls.
    pub fn has_fd(&self) -> bool {
        self.polled.get().is_some()
    }

    /// Makes the descriptor readable, if there is one.
    pub fn signal(&self) {
        if let Some(polled) = self.polled.get() {
            polled.signal();
        }
    }

    /// Makes the descriptor unreadable, if there is one.
    pub fn drain(&self) {
        if let Some(polled) = self.polled.get() {
            polled.drain();
        }
    }
}

/// Waits until a descriptor is readable; false if `timeout_ms` pass first.
#[cfg(test)]
pub fn poll(fd: RawFd, timeout_ms: i32) -> bool {
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd, owned by this frame, is read and written.
    unsafe { libc::poll(&mut poll, 1, timeout_ms) == 1 }
}

/// Runs `f` in a fork of this process and returns what it said.
#[cfg(test)]
pub fn in_fork(f: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child runs `f`, which a test keeps to what a fork may do, and leaves.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let good = f();
        // SAFETY: ends the child at once, without running anything of the parent's.
        unsafe { libc::_exit(i32::from(!good)) };
    }
    let mut status = 1;
    // SAFETY: waits for the child made above.
    unsafe { libc::waitpid(child, &mut status, 0) };
    status == 0
}

/// What is another number in a fork.
pub type Forks = u32;

/// Forks between the first process that asked and this one.
pub fn forks() -> Forks {
    static FORKS: AtomicU32 = AtomicU32::new(0);
    static WATCHED: OnceLock<bool> = OnceLock::new();
    extern "C" fn forked() {
        FORKS.fetch_add(1, Ordering::Relaxed);
    }
    // SAFETY: the handler is code of this library, which is never unloaded, and touches one word.
    let watch = || unsafe { libc::pthread_atfork(None, None, Some(forked)) == 0 };
    match WATCHED.get_or_init(watch) {
        true => FORKS.load(Ordering::Relaxed),
        // Slower: a system call.
        false => std::process::id(),
    }
}

/// CLOCK_MONOTONIC in nanoseconds; no system call where the vDSO has it.
pub fn now_ns() -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is written; every system that is supported has the clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut t) };
    t.tv_sec.unsigned_abs() * 1_000_000_000 + t.tv_nsec.unsigned_abs()
}
