//! Words on which the members of a team wait for each other: an event that grows, and the barrier.
//!
//! Invariants: every wait is on a word that only grows, and whoever changes it wakes the sleepers
//! it can see (the counter of sleepers and the word are both sequentially consistent, so a sleeper
//! either sees the new word or is seen). What members wrote before a barrier is visible to all
//! behind it. Tests compile this file a second time over loom's primitives (`loomed.rs`).

use std::panic::resume_unwind;
use std::sync::atomic::Ordering::*;
use std::time::Duration;

use super::wait::{AtomicBool, AtomicU32, Sleep, Spin};

/// A word that grows, and those who wait for it.
#[repr(align(128))]
pub struct Event {
    pub word: AtomicU32,
    sleepers: AtomicU32,
    sleep: Sleep,
}

impl Event {
    pub fn new() -> Self {
        Self { word: AtomicU32::new(0), sleepers: AtomicU32::new(0), sleep: Sleep::new() }
    }

    /// Changes the word and wakes all sleepers.
    pub fn bump(&self) {
        self.word.fetch_add(1, SeqCst);
        if self.sleepers.load(SeqCst) > 0 {
            self.sleep.wake(&self.word);
        }
    }

    /// Returns once the word is no longer `seen`: spins while `spin` lasts and `hurry` is false,
    /// then sleeps.
    pub fn wait_past(&self, seen: u32, spin: Duration, hurry: &AtomicBool) {
        if self.word.load(Acquire) != seen {
            return;
        }
        let mut spin = Spin::new(spin);
        while !hurry.load(Relaxed) && spin.turn() {
            if self.word.load(Acquire) != seen {
                return;
            }
        }
        self.sleepers.fetch_add(1, SeqCst);
        while self.word.load(SeqCst) == seen {
            self.sleep.wait(&self.word, seen);
        }
        self.sleepers.fetch_sub(1, SeqCst);
    }
}

/// Where the members of a job meet.
pub struct Barrier {
    members: u32,
    pub(super) spin: Duration,
    arrived: AtomicU32,
    opened: Event,
    pub(super) broken: AtomicBool,
    pub(super) never: AtomicBool,
}

/// What a member unwinds with when another one has panicked.
pub struct Broken;

impl Barrier {
    pub(super) fn new(members: u32, spin: Duration) -> Self {
        Self {
            members,
            spin,
            arrived: AtomicU32::new(0),
            opened: Event::new(),
            broken: AtomicBool::new(false),
            never: AtomicBool::new(false),
        }
    }

    /// Returns when every member has called it; what they wrote before is then visible to all.
    ///
    /// # Panics
    /// Unwinds (silently) when another member of the job has panicked.
    pub fn wait(&self) {
        if self.members == 1 {
            return;
        }
        let seen = self.opened.word.load(Acquire);
        if !self.broken.load(Acquire) {
            if self.arrived.fetch_add(1, AcqRel) + 1 == self.members {
                self.arrived.store(0, Relaxed);
                self.opened.bump();
            } else {
                self.opened.wait_past(seen, self.spin, &self.never);
            }
        }
        if self.broken.load(Acquire) {
            resume_unwind(Box::new(Broken));
        }
    }

    pub(super) fn poison(&self) {
        self.broken.store(true, Release);
        self.opened.bump();
    }

    /// Ready for the next job; no member is inside.
    pub(super) fn reset(&self) {
        self.arrived.store(0, Relaxed);
        self.broken.store(false, Relaxed);
    }
}
