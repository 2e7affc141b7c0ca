//! A handle that belongs to the process which made it.
//!
//! Invariant: engine threads do not survive `fork`, so in a child the value is neither used (it
//! would wait for ever, or take its parent's wakes) nor dropped (it would join threads that are not
//! there).

use kie_core::{Error, Process};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error;

/// `T`, usable only in the process that called [`Owned::new`].
pub struct Owned<T> {
    value: Option<T>,
    process: Process,
}

impl<T> Owned<T> {
    pub fn new(value: T) -> Self {
        Self { value: Some(value), process: Process::current() }
    }

    /// The value, or an `EngineClosedError` that explains about forks.
    pub fn get(&self, py: Python<'_>) -> PyResult<&T> {
        match self.here() {
            Some(value) => Ok(value),
            None => Err(forked(py, self.process.id())?),
        }
    }

    /// The value, unless this is a fork.
    pub fn here(&self) -> Option<&T> {
        let value = self.value.as_ref().expect("only drop takes the value");
        self.process.is_current().then_some(value)
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        if !self.process.is_current() {
            std::mem::forget(self.value.take());
        }
    }
}

fn forked(py: Python<'_>, pid: u32) -> PyResult<PyErr> {
    let context = PyDict::new(py);
    context.set_item("pid", pid)?;
    let message = format!("this engine belongs to process {pid} and does not survive a fork");
    let hint = "open the engine in the child, or start the child with `spawn`";
    error::instance(py, Error::EngineClosed.class(), message, "forked", hint, context)
}
