//! How long masks take, counted in buckets.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Upper bounds of the buckets, in microseconds; what takes longer is in one more.
pub const BOUNDS_US: [u64; 12] =
    [5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 20_000, 100_000];

/// Counts of an engine since it was opened.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MaskTimes {
    /// Masks of each bucket, the last one without a bound.
    pub counts: [u64; BOUNDS_US.len() + 1],
    /// Seconds of all.
    pub sum_s: f64,
}

/// The atomics behind [`MaskTimes`].
#[derive(Debug, Default)]
pub(crate) struct Counted {
    counts: [AtomicU64; BOUNDS_US.len() + 1],
    sum_ns: AtomicU64,
}

impl Counted {
    pub(crate) fn add(&self, took: Duration) {
        let bucket = BOUNDS_US.partition_point(|us| u128::from(*us) < took.as_micros());
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum_ns.fetch_add(took.as_nanos() as u64, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> MaskTimes {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counts = std::array::from_fn(|at| get(&self.counts[at]));
        MaskTimes { counts, sum_s: get(&self.sum_ns) as f64 / 1e9 }
    }
}
