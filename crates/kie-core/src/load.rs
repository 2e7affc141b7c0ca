//! Where the time of opening an engine goes.

use std::time::Instant;

use kie_kernels::device::Phase;
use serde::Serialize;

/// A part of what opening an engine did.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct LoadPhase {
    /// What was done.
    pub name: String,
    /// How long it took.
    pub seconds: f64,
    /// Bytes that it moved; 0 where that says nothing.
    pub bytes: u64,
}

/// Where the time of opening an engine went.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct LoadReport {
    /// All of it, from the call on.
    pub seconds: f64,
    /// Its parts, in order.
    pub phases: Vec<LoadPhase>,
}

/// A clock that is read after each part.
pub(crate) struct Lap {
    pub(crate) began: Instant,
    last: Instant,
    pub(crate) phases: Vec<LoadPhase>,
}

impl Lap {
    pub(crate) fn start() -> Self {
        let now = Instant::now();
        Self { began: now, last: now, phases: Vec::new() }
    }

    /// What was done since the last part.
    pub(crate) fn next(&mut self, name: &str, bytes: u64) {
        let seconds = self.last.elapsed().as_secs_f64();
        self.phases.push(LoadPhase { name: name.to_owned(), seconds, bytes });
        self.last = Instant::now();
    }
}

impl From<Phase> for LoadPhase {
    fn from(phase: Phase) -> Self {
        Self { name: phase.name.to_owned(), seconds: phase.seconds, bytes: phase.bytes }
    }
}
