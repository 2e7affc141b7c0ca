//! Measuring the decode kernel from inside: how long each step took by the device's clock, where a
//! block's time went phase by phase, and what is left of a step without its waits, its weights or
//! the other machines.
//!
//! A device that was opened with a [`Meter`] has a kernel of one column for each further [`Mode`]
//! beside the usual ones, and runs the meter's present mode. Some of the modes compute garbage, so
//! a meter is for those who look at times and hand no token on ([`Mode::is_garbage`]).

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Phases of a step that a block tells apart (block.h's `stamp`).
pub const PHASES: usize = 16;

/// What a launch of one sequence's tokens runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// The usual kernel.
    #[default]
    Full,
    /// The usual kernel, its time told phase by phase.
    Trace,
    /// Nobody waits for another's words: what the weight stream takes by itself.
    StreamOnly,
    /// No weights arrive and nobody waits for them: what the exchange takes by itself.
    ExchangeOnly,
    /// Each of several machines by itself: it takes its own words for those of the others. What a
    /// step takes where nobody is far away.
    Alone,
}

impl Mode {
    const ALL: [Self; 5] =
        [Self::Full, Self::Trace, Self::StreamOnly, Self::ExchangeOnly, Self::Alone];

    /// Those that make sense on so many machines, in order.
    pub fn of(ranks: usize) -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(move |mode| *mode != Self::Alone || ranks > 1)
    }

    /// As reports have it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Trace => "trace",
            Self::StreamOnly => "stream_only",
            Self::ExchangeOnly => "exchange_only",
            Self::Alone => "alone",
        }
    }

    /// Whether what it computes means nothing.
    pub const fn is_garbage(self) -> bool {
        matches!(self, Self::StreamOnly | Self::ExchangeOnly | Self::Alone)
    }
}

/// What one launch took.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// What it ran.
    pub mode: Mode,
    /// Device time at the start of each step and at the end of the last, in nanoseconds.
    pub stamps: Vec<u64>,
    /// Clock ticks of each block in each phase; empty but for [`Mode::Trace`].
    pub ticks: Vec<[u64; PHASES]>,
}

/// What a phase is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Phase {
    /// In words.
    pub name: &'static str,
    /// Bytes of weights that all blocks take in it a step.
    pub bytes: u64,
}

#[derive(Debug, Default)]
struct Book {
    mode: Mode,
    ranks: usize,
    phases: Vec<Phase>,
    seen: Vec<Seen>,
}

/// Between who measures and the thread that runs launches.
#[derive(Debug, Default)]
pub struct Meter(Mutex<Book>);

impl Meter {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Chooses what later launches run.
    pub fn set_mode(&self, mode: Mode) {
        self.book().mode = mode;
    }

    /// What launches run now.
    pub fn mode(&self) -> Mode {
        self.book().mode
    }

    /// Machines that run together, once a program has been started.
    pub fn ranks(&self) -> usize {
        self.book().ranks
    }

    /// The phases, once a program has been started.
    pub fn phases(&self) -> Vec<Phase> {
        self.book().phases.clone()
    }

    /// What was seen since the last call.
    pub fn take(&self) -> Vec<Seen> {
        std::mem::take(&mut self.book().seen)
    }

    pub(crate) fn started(&self, ranks: usize, phases: Vec<Phase>) {
        let mut book = self.book();
        (book.ranks, book.phases) = (ranks, phases);
    }

    pub(crate) fn note(&self, seen: Seen) {
        self.book().seen.push(seen);
    }
}
