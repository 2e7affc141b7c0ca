//! Sleep on a word until it changes: a futex where the system has one, else a table of condition
//! variables. Feature `portable` takes the table on Linux, too.
//!
//! Invariant: who changes a word and then wakes it loses no sleeper: comparing the word and falling
//! asleep are one step for [`wake_all`].

#[cfg(all(target_os = "linux", not(feature = "portable")))]
pub use futex::{wait, wake_all};
#[cfg(not(all(target_os = "linux", not(feature = "portable"))))]
pub use table::{wait, wake_all};

/// The system's own.
#[cfg(all(target_os = "linux", any(test, not(feature = "portable"))))]
mod futex {
    use std::sync::atomic::AtomicU32;
    use std::time::Duration;

    /// Sleeps while `word` is `seen`, at most for `timeout`; may return early.
    pub fn wait(word: &AtomicU32, seen: u32, timeout: Option<Duration>) {
        let timeout = timeout.map(|t| libc::timespec {
            tv_sec: libc::time_t::try_from(t.as_secs()).unwrap_or(libc::time_t::MAX),
            tv_nsec: t.subsec_nanos().into(),
        });
        let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        let op = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
        // SAFETY: `word` and `timeout` live for the call; a futex word is only compared.
        unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), op, seen, timeout) };
    }

    /// Wakes all who sleep on `word`.
    pub fn wake_all(word: &AtomicU32) {
        let op = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
        // SAFETY: a wake uses the word's address as a key only.
        unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), op, libc::c_int::MAX) };
    }
}

/// What every system has. A lock that another thread holds during a fork stays held in the child,
/// where engines refuse to work before they would sleep.
#[cfg(any(test, feature = "portable", not(target_os = "linux")))]
mod table {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
    use std::time::Duration;

    /// Words with the same place wake each other for nothing, so a few more than there are threads.
    const PLACES: usize = 64;

    struct Place {
        lock: Mutex<()>,
        sleepers: Condvar,
    }

    static TABLE: [Place; PLACES] =
        [const { Place { lock: Mutex::new(()), sleepers: Condvar::new() } }; PLACES];

    impl Place {
        fn of(word: &AtomicU32) -> &'static Self {
            // Words that are waited for stand a cache line apart.
            &TABLE[(std::ptr::from_ref(word) as usize / 64) % PLACES]
        }

        fn lock(&self) -> MutexGuard<'_, ()> {
            self.lock.lock().unwrap_or_else(PoisonError::into_inner)
        }
    }

    /// Sleeps while `word` is `seen`, at most for `timeout`; may return early.
    pub fn wait(word: &AtomicU32, seen: u32, timeout: Option<Duration>) {
        let place = Place::of(word);
        let lock = place.lock();
        if word.load(Ordering::SeqCst) != seen {
            return;
        }
        match timeout {
            None => drop(place.sleepers.wait(lock)),
            Some(timeout) => drop(place.sleepers.wait_timeout(lock, timeout)),
        }
    }

    /// Wakes all who sleep on `word`.
    pub fn wake_all(word: &AtomicU32) {
        let place = Place::of(word);
        // Whoever has compared the word sleeps by now.
        drop(place.lock());
        place.sleepers.notify_all();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::{Duration, Instant};

    use super::table;

    type Wait = fn(&AtomicU32, u32, Option<Duration>);
    type Wake = fn(&AtomicU32);

    /// Both ways, by name.
    fn ways() -> Vec<(&'static str, Wait, Wake)> {
        vec![
            ("table", table::wait, table::wake_all),
            #[cfg(target_os = "linux")]
            ("futex", super::futex::wait, super::futex::wake_all),
        ]
    }

    #[test]
    fn a_word_that_has_changed_is_not_slept_on() {
        for (name, wait, _) in ways() {
            let start = Instant::now();
            wait(&AtomicU32::new(1), 0, None);
            assert!(start.elapsed() < Duration::from_secs(5), "{name}");
        }
    }

    #[test]
    fn a_timeout_ends_the_sleep_and_not_before() {
        for (name, wait, _) in ways() {
            let (word, most) = (AtomicU32::new(0), Duration::from_millis(40));
            let start = Instant::now();
            while start.elapsed() < most {
                wait(&word, 0, Some(most.saturating_sub(start.elapsed())));
            }
            assert!(start.elapsed() < Duration::from_secs(5), "{name}");
            let asleep = Instant::now();
            wait(&word, 0, Some(Duration::from_millis(40)));
            assert!(asleep.elapsed() > Duration::from_millis(30), "{name}: it did not sleep");
        }
    }

    #[test]
    fn no_wake_is_lost_between_comparing_and_sleeping() {
        const TURNS: u32 = 3_000;
        for (_, wait, wake_all) in ways() {
            let (ping, pong) = (AtomicU32::new(0), AtomicU32::new(0));
            let turn = |mine: &AtomicU32, theirs: &AtomicU32, first: bool| {
                for n in 0..TURNS {
                    if first {
                        mine.fetch_add(1, Ordering::SeqCst);
                        wake_all(mine);
                    }
                    while theirs.load(Ordering::SeqCst) == n {
                        wait(theirs, n, None);
                    }
                    if !first {
                        mine.fetch_add(1, Ordering::SeqCst);
                        wake_all(mine);
                    }
                }
            };
            std::thread::scope(|scope| {
                scope.spawn(|| turn(&ping, &pong, true));
                scope.spawn(|| turn(&pong, &ping, false));
            });
            assert_eq!((ping.into_inner(), pong.into_inner()), (TURNS, TURNS));
        }
    }

    #[test]
    fn all_sleepers_of_a_word_wake() {
        for (_, wait, wake_all) in ways() {
            let word = AtomicU32::new(0);
            std::thread::scope(|scope| {
                for _ in 0..8 {
                    scope.spawn(|| {
                        while word.load(Ordering::SeqCst) == 0 {
                            wait(&word, 0, None);
                        }
                    });
                }
                std::thread::sleep(Duration::from_millis(20));
                word.store(1, Ordering::SeqCst);
                wake_all(&word);
            });
        }
    }
}
