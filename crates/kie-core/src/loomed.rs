//! `ring.rs` once more, over loom's primitives: every interleaving of small cases.

// The second look at ring.rs is what this module is for.
#![allow(dead_code, clippy::unwrap_used, clippy::duplicate_mod)]

/// Loom's versions of `crate::primitive`.
pub mod primitive {
    use std::mem::MaybeUninit;
    use std::time::Duration;

    use loom::sync::atomic::{AtomicBool, Ordering};
    use loom::sync::{Condvar, Mutex};

    pub use loom::cell::UnsafeCell;
    pub use loom::sync::atomic::AtomicU32;
    pub use loom::sync::Arc;

    pub const SPINS: u32 = 1;

    pub fn cells<T>(n: usize) -> Box<[UnsafeCell<MaybeUninit<T>>]> {
        (0..n).map(|_| UnsafeCell::new(MaybeUninit::uninit())).collect()
    }

    pub fn pause() {
        loom::thread::yield_now();
    }

    /// A futex: comparing and falling asleep are one step. The eventfd is a flag.
    #[derive(Default)]
    pub struct Waker {
        lock: Mutex<()>,
        sleepers: Condvar,
        readable: AtomicBool,
        polled: AtomicBool,
    }

    impl Waker {
        pub fn wait(&self, word: &AtomicU32, seen: u32, _timeout: Option<Duration>) {
            let lock = self.lock.lock().unwrap();
            if word.load(Ordering::SeqCst) == seen {
                drop(self.sleepers.wait(lock).unwrap());
            }
        }

        pub fn wake(&self, _word: &AtomicU32) {
            drop(self.lock.lock().unwrap());
            self.sleepers.notify_all();
            self.signal();
        }

        pub fn fd(&self) -> std::io::Result<(i32, bool)> {
            Ok((0, !self.polled.swap(true, Ordering::SeqCst)))
        }

        pub fn has_fd(&self) -> bool {
            self.polled.load(Ordering::SeqCst)
        }

        pub fn signal(&self) {
            if self.has_fd() {
                let _lock = self.lock.lock().unwrap();
                self.readable.store(true, Ordering::SeqCst);
                self.sleepers.notify_all();
            }
        }

        pub fn drain(&self) {
            self.readable.store(false, Ordering::SeqCst);
        }

        /// What poll(2) does.
        pub fn poll(&self) {
            let mut lock = self.lock.lock().unwrap();
            while !self.readable.load(Ordering::SeqCst) {
                lock = self.sleepers.wait(lock).unwrap();
            }
        }
    }
}

#[path = "ring.rs"]
mod ring;

use loom::thread;
use ring::{sequence, Bell};

/// All interleavings with up to three preemptions, which is where lost wake-ups live.
fn model(case: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(case);
}

fn write(mut writer: ring::Writer<u32, &'static str>) {
    writer.push(10);
    writer.publish();
    writer.push(11);
    writer.push(12);
    writer.publish();
    writer.end("done");
}

#[test]
fn a_sleeping_reader_gets_all() {
    model(|| {
        let (writer, reader) = sequence(3);
        let thread = thread::spawn(move || write(writer));
        let mut got = Vec::new();
        while reader.wait(got.len(), None) {
            match reader.get(got.len()) {
                Some(value) => got.push(value),
                None => break,
            }
        }
        assert_eq!((got, reader.end().copied()), (vec![10, 11, 12], Some("done")));
        thread.join().unwrap();
    });
}

#[test]
fn a_polling_reader_gets_all() {
    model(|| {
        let (writer, reader) = sequence(2);
        let thread = thread::spawn(move || {
            let mut writer: ring::Writer<u32, ()> = writer;
            writer.push(10);
            writer.publish();
            writer.push(11);
            writer.end(());
        });
        let mut got = Vec::new();
        reader.fd(0).unwrap();
        loop {
            if let Some(value) = reader.get(got.len()) {
                got.push(value);
            } else if reader.seen().1 && got.len() == reader.seen().0 {
                break;
            } else if !reader.rearm(got.len()) {
                reader.sequence.waker.poll();
            }
        }
        assert_eq!(got, [10, 11]);
        thread.join().unwrap();
    });
}

#[test]
fn two_readers_sleep_on_one_sequence() {
    model(|| {
        let (mut writer, reader) = sequence::<u32, ()>(1);
        let other = reader.clone();
        let thread = thread::spawn(move || {
            assert!(other.wait(0, None));
            assert_eq!(other.get(0), Some(7));
        });
        let last = thread::spawn(move || {
            writer.push(7);
            writer.publish();
        });
        assert!(reader.wait(0, None));
        assert_eq!(reader.get(0), Some(7));
        last.join().unwrap();
        thread.join().unwrap();
        assert!(reader.seen().1 && reader.end().is_none(), "a dropped writer ends it");
    });
}

#[test]
fn no_ring_of_the_bell_is_lost() {
    model(|| {
        let bell = loom::sync::Arc::new(Bell::default());
        let ringer = bell.clone();
        let thread = thread::spawn(move || ringer.ring());
        while !bell.rang() {
            bell.listen(None);
        }
        thread.join().unwrap();
    });
}
