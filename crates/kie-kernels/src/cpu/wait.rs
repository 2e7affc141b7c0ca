//! What `barrier.rs` is made of: atomic words, a bounded spin, sleep on a word. Tests have loom's
//! versions of the same names.

use std::time::{Duration, Instant};

pub use std::sync::atomic::{AtomicBool, AtomicU32};

use crate::park;

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

/// Sleep on a word, and waking those who do.
pub struct Sleep;

impl Sleep {
    pub const fn new() -> Self {
        Self
    }

    /// Sleeps while `word` is `seen`; may return early.
    pub fn wait(&self, word: &AtomicU32, seen: u32) {
        park::wait(word, seen, None);
    }

    /// Wakes all who sleep on `word`.
    pub fn wake(&self, word: &AtomicU32) {
        park::wake_all(word);
    }
}
