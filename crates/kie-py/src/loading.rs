//! Long work of kie-core that hears signals: it runs on a thread of its own, while the caller's
//! looks at signals, and calls back, every few milliseconds.
//!
//! Invariants: callbacks run on the caller's thread; what they raise, or a signal's handler, ends
//! the work, and is what the caller gets, whether or not the work was done by then. Work that does
//! not notice in time (a compiler's) is left behind: it ends by itself, and what it made is
//! dropped.

use std::sync::mpsc::{channel, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kie_core::plan::Progress;
use kie_core::{Error, Stop};
use pyo3::prelude::*;

use crate::error::raise;

/// Longest time between two looks at signals.
const SLICE: Duration = Duration::from_millis(10);
/// How long work that was told to end is waited for.
const PATIENCE: Duration = Duration::from_millis(30);

enum Event<T> {
    Told(String, u64, u64),
    Done(kie_core::Result<T>),
}

/// Runs `work`; it is given what ends it and whom to tell how it goes.
pub fn interruptible<T: Send + 'static>(
    py: Python<'_>,
    callback: Option<&Py<PyAny>>,
    work: impl FnOnce(Stop, Arc<Progress>) -> kie_core::Result<T> + Send + 'static,
) -> PyResult<T> {
    let (sender, events) = channel();
    // Only this thread ever takes the lock: it may be carried where the interpreter is let go.
    let events = Mutex::new(events);
    let (stop, told) = (Stop::default(), sender.clone());
    let progress: Arc<Progress> = Arc::new(move |stage: &str, done, total| {
        // Nobody listens where the caller has left.
        drop(told.send(Event::Told(stage.to_owned(), done, total)));
    });
    let told_to_end = stop.clone();
    let thread = std::thread::Builder::new().name("kie-load".to_owned()).stack_size(STACK_BYTES);
    let thread = thread.spawn(move || {
        let done = work(told_to_end, progress);
        drop(sender.send(Event::Done(done)));
    });
    thread.map_err(|error| raise(py, Error::Device(format!("loading thread: {error}"))))?;
    follow(py, callback, &events).inspect_err(|_| {
        stop.set();
        py.detach(|| leave(&events));
    })
}

/// As much as the main thread has: whoever parses may recurse.
const STACK_BYTES: usize = 8 << 20;

fn follow<T: Send>(
    py: Python<'_>,
    callback: Option<&Py<PyAny>>,
    events: &Mutex<Receiver<Event<T>>>,
) -> PyResult<T> {
    let mut looked = Instant::now();
    loop {
        match py.detach(|| next(events, SLICE)) {
            Ok(Event::Told(stage, done, total)) => {
                callback.map(|call| call.call1(py, (stage, done, total))).transpose()?;
            }
            Ok(Event::Done(done)) => {
                py.check_signals()?;
                return done.map_err(|error| raise(py, error));
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                let error = Error::Device("the loading thread died".to_owned());
                return Err(raise(py, error));
            }
        }
        if looked.elapsed() >= SLICE {
            py.check_signals()?;
            looked = Instant::now();
        }
    }
}

/// Waits a little for the end; what was made is dropped.
fn leave<T>(events: &Mutex<Receiver<Event<T>>>) {
    let until = Instant::now() + PATIENCE;
    let left = || until.saturating_duration_since(Instant::now());
    while let Ok(Event::Told(..)) = next(events, left()) {}
}

fn next<T>(
    events: &Mutex<Receiver<Event<T>>>,
    timeout: Duration,
) -> Result<Event<T>, RecvTimeoutError> {
    events.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(timeout)
}
