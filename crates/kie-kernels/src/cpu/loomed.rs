//! `barrier.rs` once more, over loom's primitives: every interleaving of small cases. Cells stand
//! for the rows of a [`crate::field::Field`]: loom fails where two members touch one without an
//! order.

// The second look at barrier.rs is what this module is for.
#![allow(dead_code, clippy::unwrap_used, clippy::duplicate_mod)]

/// Loom's versions of `super::wait`.
mod wait {
    use std::time::Duration;

    use loom::sync::atomic::{self, fence, Ordering};
    use loom::sync::{Condvar, Mutex};

    pub use atomic::AtomicBool;

    /// loom takes a sequentially consistent access for acquire and release; a fence on its inner
    /// side gives the order that such accesses have among themselves.
    pub struct AtomicU32(atomic::AtomicU32);

    impl AtomicU32 {
        pub fn new(value: u32) -> Self {
            Self(atomic::AtomicU32::new(value))
        }

        pub fn load(&self, order: Ordering) -> u32 {
            if order == Ordering::SeqCst {
                fence(order);
            }
            self.0.load(order)
        }

        pub fn store(&self, value: u32, order: Ordering) {
            self.0.store(value, order);
        }

        pub fn fetch_add(&self, value: u32, order: Ordering) -> u32 {
            let before = self.0.fetch_add(value, order);
            if order == Ordering::SeqCst {
                fence(order);
            }
            before
        }

        pub fn fetch_sub(&self, value: u32, order: Ordering) -> u32 {
            self.0.fetch_sub(value, order)
        }
    }

    /// One turn, then sleep.
    pub struct Spin(bool);

    impl Spin {
        pub fn new(_most: Duration) -> Self {
            Self(true)
        }

        pub fn turn(&mut self) -> bool {
            loom::thread::yield_now();
            std::mem::replace(&mut self.0, false)
        }
    }

    /// A futex: comparing and falling asleep are one step.
    pub struct Sleep {
        lock: Mutex<()>,
        sleepers: Condvar,
    }

    impl Sleep {
        pub fn new() -> Self {
            Self { lock: Mutex::new(()), sleepers: Condvar::new() }
        }

        pub fn wait(&self, word: &AtomicU32, seen: u32) {
            let lock = self.lock.lock().unwrap();
            if word.load(Ordering::SeqCst) == seen {
                drop(self.sleepers.wait(lock).unwrap());
            }
        }

        pub fn wake(&self, _word: &AtomicU32) {
            drop(self.lock.lock().unwrap());
            self.sleepers.notify_all();
        }
    }
}

#[path = "barrier.rs"]
mod barrier;

use std::sync::Arc;
use std::time::Duration;

use barrier::{Barrier, Event};
use loom::cell::UnsafeCell;
use loom::thread;
use wait::AtomicBool;

/// All interleavings with up to so many preemptions.
fn model(preemptions: usize, case: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(case);
}

/// A barrier, and a row a member.
struct Job {
    barrier: Barrier,
    rows: Vec<UnsafeCell<usize>>,
}

// SAFETY: loom watches every access to a row.
unsafe impl Sync for Job {}
// SAFETY: as above.
unsafe impl Send for Job {}

/// Each member writes its row, meets the others, reads all rows, meets them again, writes its own.
fn phases(job: &Job, member: usize, count: usize) {
    for phase in 1..=count {
        // SAFETY: loom fails if somebody else is there.
        job.rows[member].with_mut(|row| unsafe { *row = phase });
        job.barrier.wait();
        for row in &job.rows {
            // SAFETY: as above.
            assert_eq!(row.with(|row| unsafe { *row }), phase);
        }
        if phase < count {
            job.barrier.wait();
        }
    }
}

fn members_meet(members: usize, count: usize, preemptions: usize) {
    model(preemptions, move || {
        let job = Arc::new(Job {
            barrier: Barrier::new(members as u32, Duration::ZERO),
            rows: (0..members).map(|_| UnsafeCell::new(0)).collect(),
        });
        let others = (1..members).map(|member| {
            let job = Arc::clone(&job);
            thread::spawn(move || phases(&job, member, count))
        });
        let others: Vec<_> = others.collect();
        phases(&job, 0, count);
        others.into_iter().for_each(|other| other.join().unwrap());
    });
}

#[test]
fn two_members_hand_their_rows_over() {
    members_meet(2, 2, 3);
}

#[test]
fn three_members_hand_their_rows_over() {
    members_meet(3, 1, 1);
}

/// A job's place, and the words by which it is handed over and back.
struct Handing {
    started: Event,
    finished: Event,
    job: UnsafeCell<u32>,
}

// SAFETY: loom watches every access to the job.
unsafe impl Sync for Handing {}
// SAFETY: as above.
unsafe impl Send for Handing {}

#[test]
fn a_job_is_seen_and_its_end_too() {
    model(3, || {
        let all =
            Handing { started: Event::new(), finished: Event::new(), job: UnsafeCell::new(0) };
        let caller = Arc::new(all);
        let member = Arc::clone(&caller);
        let never = || AtomicBool::new(false);
        let thread = thread::spawn(move || {
            member.started.wait_past(0, Duration::ZERO, &never());
            // SAFETY: loom fails if the caller is there, too.
            member.job.with_mut(|job| unsafe { *job += 1 });
            member.finished.bump();
        });
        // SAFETY: as above.
        caller.job.with_mut(|job| unsafe { *job = 1 });
        caller.started.bump();
        caller.finished.wait_past(0, Duration::ZERO, &never());
        // SAFETY: as above.
        assert_eq!(caller.job.with(|job| unsafe { *job }), 2);
        thread.join().unwrap();
    });
}
