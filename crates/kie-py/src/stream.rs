//! The iterator of one request.
//!
//! Invariants: a token that is ready is handed over without letting go of the interpreter; only
//! an empty ring detaches, and then for slices of 50 ms after which signals are looked at. The
//! lock is never held while Python code runs, so no two locks are ever taken in two orders.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use kie_core::{Next, TokenStream};
use pyo3::prelude::*;

use crate::error::raise;
use crate::owned::Owned;
use crate::types::{Completion, Token};

/// Longest wait between two looks at signals and at `cancel`.
const SLICE: Duration = Duration::from_millis(50);

/// One request's tokens.
#[pyclass(frozen, module = "kie._kie")]
pub struct Stream {
    tokens: Owned<Mutex<TokenStream>>,
    /// Set by `cancel` while another thread waits with the lock.
    cancelled: AtomicBool,
    finished: AtomicBool,
    seed: u64,
}

impl Stream {
    pub fn new(tokens: TokenStream) -> Self {
        let seed = tokens.seed();
        Self {
            tokens: Owned::new(Mutex::new(tokens)),
            cancelled: AtomicBool::new(false),
            finished: AtomicBool::new(false),
            seed,
        }
    }

    /// What is there now, without waiting; `None` while another thread holds the stream.
    fn poll(&self, py: Python<'_>) -> PyResult<Option<Next>> {
        let next = match self.tokens.get(py)?.try_lock() {
            Ok(mut tokens) => tokens.try_next(),
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner().try_next(),
            Err(TryLockError::WouldBlock) => return Ok(None),
        };
        self.note(py, next).map(Some)
    }

    /// Runs `wait` detached, with the stream locked, and looks at signals afterwards.
    fn detached<T: Send>(
        &self,
        py: Python<'_>,
        wait: impl Fn(&mut TokenStream) -> kie_core::Result<T> + Send + Sync,
    ) -> PyResult<kie_core::Result<T>> {
        let tokens = self.tokens.get(py)?;
        let result = py.detach(|| {
            let mut tokens = lock(tokens);
            let result = wait(&mut tokens);
            if self.cancelled.load(Ordering::Acquire) {
                tokens.cancel();
            }
            result
        });
        py.check_signals()?;
        Ok(result)
    }

    fn note(&self, py: Python<'_>, next: kie_core::Result<Next>) -> PyResult<Next> {
        if matches!(next, Ok(Next::Finished) | Err(_)) {
            self.finished.store(true, Ordering::Release);
        }
        next.map_err(|error| raise(py, error))
    }
}

#[pymethods]
impl Stream {
    fn __iter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    /// The next token; waits for it.
    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Token>> {
        let mut next = self.poll(py)?;
        loop {
            match next {
                Some(Next::Token(token)) => return Ok(Some(Token(token))),
                Some(Next::Finished) => return Ok(None),
                Some(Next::Pending) | None => {}
            }
            let received = self.detached(py, |tokens| tokens.recv_timeout(SLICE))?;
            next = Some(self.note(py, received)?);
        }
    }

    /// A token if one is ready, else `None`; never waits. `finished` tells the two ends apart.
    fn try_next(&self, py: Python<'_>) -> PyResult<Option<Token>> {
        Ok(match self.poll(py)? {
            Some(Next::Token(token)) => Some(Token(token)),
            Some(Next::Pending | Next::Finished) | None => None,
        })
    }

    /// All tokens that are ready; never waits.
    fn read_available(&self, py: Python<'_>) -> PyResult<Vec<Token>> {
        let mut ready = Vec::new();
        while let Some(token) = self.try_next(py)? {
            ready.push(token);
        }
        Ok(ready)
    }

    /// Reads to the end and returns the completion.
    fn result(&self, py: Python<'_>) -> PyResult<Completion> {
        while !self.finished.load(Ordering::Acquire) {
            let last = self.detached(py, drain_for_a_slice)?;
            self.note(py, last)?;
        }
        let completion = self.detached(py, TokenStream::completion)?;
        completion.map(Completion).map_err(|error| raise(py, error))
    }

    /// Asks the engine to stop; what is ready stays readable.
    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        self.cancelled.store(true, Ordering::Release);
        match self.tokens.get(py)?.try_lock() {
            Ok(tokens) => tokens.cancel(),
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner().cancel(),
            // The thread that waits sees the flag when its slice ends.
            Err(TryLockError::WouldBlock) => {}
        }
        Ok(())
    }

    /// An eventfd that becomes readable when there may be something new.
    fn poll_fd(&self, py: Python<'_>) -> PyResult<RawFd> {
        let fd = self.detached(py, |tokens| tokens.poll_fd())?;
        fd.map_err(|error| raise(py, error))
    }

    #[getter]
    fn finished(&self) -> bool {
        self.finished.load(Ordering::Acquire)
    }

    #[getter]
    fn seed(&self) -> u64 {
        self.seed
    }
}

/// Throws tokens away for at most [`SLICE`].
fn drain_for_a_slice(tokens: &mut TokenStream) -> kie_core::Result<Next> {
    let until = Instant::now() + SLICE;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        match tokens.recv_timeout(left)? {
            Next::Token(_) if left.is_zero() => return Ok(Next::Pending),
            Next::Token(_) => {}
            end @ (Next::Pending | Next::Finished) => return Ok(end),
        }
    }
}

fn lock(tokens: &Mutex<TokenStream>) -> MutexGuard<'_, TokenStream> {
    tokens.lock().unwrap_or_else(PoisonError::into_inner)
}
