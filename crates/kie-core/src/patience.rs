//! Waits that may be given up: for a deadline, or because whoever asked wants no answer any more.
//!
//! There is one way of giving up: whoever waits has [`Patience`], which is asked on the thread that
//! waits (only there can signals be looked at); what works for it on other threads has a [`Stop`],
//! which is set when the patience is over; and both end in [`Error::GivenUp`].
//!
//! Code of libraries that can be neither bounded nor interrupted from inside runs [`apart`], on a
//! thread whose stack is known; a caller that gives up leaves it behind. Few may be left behind at
//! a time, so that hostile input does not fill the machine with them.

use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::mpsc::{channel, Receiver, RecvTimeoutError};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kie_kernels::device::Stop;

use crate::error::{Error, Result};

/// Longest time between two looks at what may end a wait.
const SLICE: Duration = Duration::from_millis(15);

/// Threads that were given up and still run, at most.
const LEFT_BEHIND_MAX: usize = 16;

/// How long a caller waits. Asked every 15 ms while it waits, on the thread that waits.
#[derive(Clone, Copy)]
pub struct Patience<'a> {
    until: Option<Instant>,
    goes_on: Option<&'a dyn Fn() -> bool>,
}

impl<'a> Patience<'a> {
    /// Waits as long as it takes.
    pub const ENDLESS: Patience<'static> = Patience { until: None, goes_on: None };

    /// Waits while `goes_on` says so.
    pub fn asking(goes_on: &'a dyn Fn() -> bool) -> Self {
        Self { until: None, goes_on: Some(goes_on) }
    }

    /// The same, but `seconds` from now at most (where that is a time).
    #[must_use]
    pub fn at_most(self, seconds: Option<f64>) -> Self {
        let time = seconds.and_then(|s| Duration::try_from_secs_f64(s).ok());
        let until = time.and_then(|time| Instant::now().checked_add(time));
        Self { until: self.until.into_iter().chain(until).min(), ..self }
    }

    /// Whether there is any left.
    ///
    /// # Errors
    /// [`Error::GivenUp`], naming `what` was waited for.
    pub fn check(&self, what: &'static str) -> Result<()> {
        let late = self.until.is_some_and(|until| Instant::now() >= until);
        if late || self.goes_on.is_some_and(|goes_on| !goes_on()) {
            return Err(Error::GivenUp { what, late });
        }
        Ok(())
    }

    /// Waits for what `receiver` gets; nothing if nobody sends any more.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub(crate) fn receive<T>(
        &self,
        receiver: &Receiver<T>,
        what: &'static str,
    ) -> Result<Option<T>> {
        loop {
            match receiver.recv_timeout(self.slice()) {
                Ok(value) => return Ok(Some(value)),
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
                Err(RecvTimeoutError::Timeout) => self.check(what)?,
            }
        }
    }

    /// How long to wait before the next [`check`](Self::check).
    pub(crate) fn slice(&self) -> Duration {
        let left = self.until.map(|until| until.saturating_duration_since(Instant::now()));
        left.map_or(SLICE, |left| left.min(SLICE))
    }
}

const RUNS: u8 = 0;
const LEFT: u8 = 1;
const DONE: u8 = 2;
static LEFT_BEHIND: AtomicUsize = AtomicUsize::new(0);

/// Counts itself out when the thread ends, however it does.
struct Run(Arc<AtomicU8>);

impl Drop for Run {
    fn drop(&mut self) {
        if self.0.swap(DONE, Ordering::AcqRel) == LEFT {
            LEFT_BEHIND.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// Runs `work` on a thread with a stack of `stack_bytes`. What it is told by a caller that gave up
/// is set before that caller returns.
///
/// # Errors
/// [`Error::GivenUp`]; [`Error::Device`] where there can be no thread, or it died.
pub(crate) fn apart<T: Send + 'static>(
    what: &'static str,
    stack_bytes: usize,
    patience: &Patience<'_>,
    work: impl FnOnce(Stop) -> T + Send + 'static,
) -> Result<T> {
    let failed = |why: String| Error::Device(format!("{what}: {why}"));
    let left = LEFT_BEHIND.load(Ordering::Acquire);
    if left >= LEFT_BEHIND_MAX {
        return Err(failed(format!("{left} threads that were given up are still at work")));
    }
    patience.check(what)?;
    let (done, result) = channel();
    let state = Arc::new(AtomicU8::new(RUNS));
    let given_up = Stop::default();
    let (run, told) = (Run(Arc::clone(&state)), given_up.clone());
    let body = move || {
        let _run = run;
        // Nobody listens once the caller has given up.
        let _ = done.send(work(told));
    };
    let thread = std::thread::Builder::new().name("kie-apart".to_owned()).stack_size(stack_bytes);
    thread.spawn(body).map_err(|error| failed(format!("no thread: {error}")))?;
    match patience.receive(&result, what) {
        Ok(Some(value)) => Ok(value),
        Ok(None) => Err(failed("its thread died".to_owned())),
        Err(error) => {
            given_up.set();
            let runs = state.compare_exchange(RUNS, LEFT, Ordering::AcqRel, Ordering::Acquire);
            // It may have ended in between; then it is not counted.
            if runs.is_ok() {
                LEFT_BEHIND.fetch_add(1, Ordering::AcqRel);
            }
            Err(error)
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn whoever_gives_up_leaves_the_work_behind() {
        let begun = Instant::now();
        let work = |given_up: Stop| {
            while !given_up.is_set() {
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        let asked = std::cell::Cell::new(0);
        let three_times = || asked.replace(asked.get() + 1) < 3;
        let patience = Patience::asking(&three_times);
        let given_up = apart("waiting", 1 << 20, &patience, work).unwrap_err();
        assert!(matches!(given_up, Error::GivenUp { what: "waiting", late: false }));
        let short = Patience::ENDLESS.at_most(Some(0.02));
        let late = apart("waiting", 1 << 20, &short, work).unwrap_err();
        assert!(matches!(late, Error::GivenUp { late: true, .. }));
        assert_eq!(apart("adding", 1 << 20, &Patience::ENDLESS, |_| 1 + 1).unwrap(), 2);
        assert!(begun.elapsed() < Duration::from_secs(30));
        // What heard that it was given up ends and is counted out.
        while LEFT_BEHIND.load(Ordering::Acquire) > 0 {
            assert!(begun.elapsed() < Duration::from_secs(60));
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn no_time_is_no_patience_and_odd_times_are_endless() {
        assert!(Patience::ENDLESS.at_most(Some(0.0)).check("it").is_err());
        for odd in [f64::NAN, f64::INFINITY, -1.0, 1e300] {
            assert!(Patience::ENDLESS.at_most(Some(odd)).check("it").is_ok(), "{odd}");
        }
    }
}
