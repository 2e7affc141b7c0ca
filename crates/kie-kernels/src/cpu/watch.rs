//! Looks during a long pass whether anybody still wants it.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::host::now_ns;

/// How long a pass goes on between two looks; shorter ones are never given up.
const LOOK_NS: u64 = 4_000_000;
const NEVER: usize = usize::MAX;

/// Of one pass. Member 0, the host thread, looks. What it finds ends the pass behind the step that
/// it is in, for all members alike: they read the step's number when they have met at the barrier
/// that ends it. Until then all leave out what is dear, and meet at the step's barriers.
pub(super) struct Watch<'a> {
    wanted: &'a (dyn Fn() -> bool + Sync),
    /// Member 0's own.
    next_ns: AtomicU64,
    /// Steps that the pass has.
    steps: AtomicUsize,
}

impl<'a> Watch<'a> {
    /// Of a pass that begins now and is given up when it is not `wanted`.
    pub(super) fn new(wanted: &'a (dyn Fn() -> bool + Sync)) -> Self {
        let next_ns = AtomicU64::new(now_ns() + LOOK_NS);
        Self { wanted, next_ns, steps: AtomicUsize::new(NEVER) }
    }

    /// Whether `member`, which is in `step`, goes on with it.
    pub(super) fn goes_on(&self, member: usize, step: usize) -> bool {
        let goes_on = self.steps.load(Ordering::Relaxed) == NEVER;
        if member > 0 || !goes_on {
            return goes_on;
        }
        let now = now_ns();
        if now < self.next_ns.load(Ordering::Relaxed) {
            return true;
        }
        self.next_ns.store(now + LOOK_NS, Ordering::Relaxed);
        let wanted = (self.wanted)();
        if !wanted {
            self.steps.store(step + 1, Ordering::Relaxed);
        }
        wanted
    }

    /// Whether the pass has this step; asked behind the barrier of the step before.
    pub(super) fn has(&self, step: usize) -> bool {
        step < self.steps.load(Ordering::Relaxed)
    }

    /// Whether the pass was not given up; asked behind its end.
    pub(super) fn is_whole(&self) -> bool {
        self.steps.load(Ordering::Relaxed) == NEVER
    }
}
