//! What `barrier.rs` is made of: atomic words, a bounded spin, sleep on a word. Tests have loom's
//! versions of the same names.

use std::time::{Duration, Instant};

pub use std::sync::atomic::{AtomicBool, AtomicU32};

/// Pauses between two looks at the clock.
const PAUSES: u32 = 16;

/// Turns of a spin that lasts for a bounded time.
pub struct Spin {
    turns: u32,
    start: Instant,
    most: Duration,
}

impl Spin {
    pub fn new(most: Duration) -> Self {
        Self { turns: 0, start: Instant::now(), most }
    }

    /// A short pause; false once the time is over.
    pub fn turn(&mut self) -> bool {
        std::hint::spin_loop();
        self.turns += 1;
        !self.turns.is_multiple_of(PAUSES) || self.start.elapsed() < self.most
    }
}

/// Sleep on a word, and waking those who do: a futex.
pub struct Sleep;

#[cfg(target_os = "linux")]
impl Sleep {
    pub const fn new() -> Self {
        Self
    }

    /// Sleeps while `word` is `seen`; may return early.
    pub fn wait(&self, word: &AtomicU32, seen: u32) {
        let no_timeout = std::ptr::null::<libc::timespec>();
        let op = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
        // SAFETY: `word` outlives the call; a null timeout means none.
        unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), op, seen, no_timeout) };
    }

    /// Wakes all who sleep on `word`.
    pub fn wake(&self, word: &AtomicU32) {
        let op = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
        // SAFETY: waking reads nothing but the address.
        unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), op, libc::c_int::MAX) };
    }
}

#[cfg(not(target_os = "linux"))]
impl Sleep {
    pub const fn new() -> Self {
        Self
    }

    /// Sleeps for a moment, whatever `word` is.
    pub fn wait(&self, _word: &AtomicU32, _seen: u32) {
        std::thread::sleep(Duration::from_micros(200));
    }

    /// Sleepers wake up by themselves.
    pub fn wake(&self, _word: &AtomicU32) {}
}
