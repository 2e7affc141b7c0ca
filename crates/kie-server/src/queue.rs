//! Who waits for a slot, and how long slots are held: positions, and after how many seconds to try
//! again.
//!
//! Invariant: the engine takes requests in the order in which they came, so a request's position is
//! how many before it have no token yet, less the slots that are left for them.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Weight of the newest request in the mean.
const NEWEST: f64 = 0.2;
/// Longest time that is told.
const RETRY_MAX_S: f64 = 120.0;

/// See the module.
#[derive(Default)]
pub(crate) struct Queue(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    next: u64,
    /// Requests without a token, by number.
    waiting: BTreeSet<u64>,
    /// Requests with one.
    running: usize,
    /// Mean time for which a slot is held, in seconds; 0 before the first request ended.
    held_s: f64,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request that the engine has taken.
    pub(crate) fn enter(self: &Arc<Self>) -> Place {
        let mut inner = self.lock();
        let number = inner.next;
        inner.next += 1;
        inner.waiting.insert(number);
        drop(inner);
        Place { queue: Arc::clone(self), number, begun: false }
    }

    /// A request held its slot for so long.
    pub(crate) fn held(&self, seconds: f64) {
        let mut inner = self.lock();
        inner.held_s = match inner.held_s {
            0.0 => seconds,
            mean => mean + NEWEST * (seconds - mean),
        };
    }

    /// Seconds until a refused request will find room: as long as the requests before it take.
    pub(crate) fn retry_after(&self, slots: usize) -> u64 {
        let inner = self.lock();
        let before = (inner.waiting.len() + inner.running).saturating_sub(slots) + 1;
        let seconds = inner.held_s * before as f64 / slots.max(1) as f64;
        seconds.clamp(1.0, RETRY_MAX_S).ceil() as u64
    }
}

/// A request's place; left when it is dropped.
pub(crate) struct Place {
    queue: Arc<Queue>,
    number: u64,
    begun: bool,
}

impl Place {
    /// It has a token.
    pub(crate) fn begin(&mut self) {
        if !std::mem::replace(&mut self.begun, true) {
            let mut inner = self.queue.lock();
            inner.waiting.remove(&self.number);
            inner.running += 1;
        }
    }

    /// How many will get a slot before it, itself included; `None` if it has one.
    pub(crate) fn position(&self, slots: usize) -> Option<usize> {
        let inner = self.queue.lock();
        if self.begun {
            return None;
        }
        let before = inner.waiting.range(..self.number).count() + inner.running;
        (before >= slots).then(|| before - slots + 1)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut inner = self.queue.lock();
        if self.begun {
            inner.running -= 1;
        } else {
            inner.waiting.remove(&self.number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_count_those_before() {
        let queue = Arc::new(Queue::default());
        let mut places: Vec<Place> = (0..4).map(|_| queue.enter()).collect();
        let positions = |places: &[Place]| -> Vec<Option<usize>> {
            places.iter().map(|place| place.position(2)).collect()
        };
        assert_eq!(positions(&places), [None, None, Some(1), Some(2)]);
        places[1].begin();
        assert_eq!(positions(&places), [None, None, Some(1), Some(2)]);
        drop(places.remove(1));
        assert_eq!(positions(&places), [None, None, Some(1)]);
        drop(places.remove(0));
        assert_eq!(positions(&places), [None, None]);
    }

    #[test]
    fn a_refused_request_is_told_how_long_those_before_it_take() {
        let queue = Arc::new(Queue::default());
        assert_eq!(queue.retry_after(2), 1);
        let _places: Vec<Place> = (0..6).map(|_| queue.enter()).collect();
        queue.held(4.0);
        // Four wait for two slots; the fifth turn ends after 5 * 4 / 2 seconds.
        assert_eq!(queue.retry_after(2), 10);
        queue.held(9.0);
        assert_eq!(queue.retry_after(2), 13);
        queue.held(1e9);
        assert_eq!(queue.retry_after(2), 120);
    }
}
