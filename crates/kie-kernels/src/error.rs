//! What a device can answer instead of doing its work.

use crate::machine::handle::HandleFault;

/// Result with [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// One enum for all runners.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No device of this name exists here.
    #[error("no such device: {device} ({detail})")]
    NoDevice {
        /// As the caller wrote it.
        device: String,
        /// What was looked for.
        detail: String,
    },
    /// The device is there, software that it needs is not.
    #[error("{device}: {detail}")]
    BackendMissing {
        /// As the caller wrote it.
        device: String,
        /// What was looked for.
        detail: String,
    },
    /// The driver is older than kie needs.
    #[error("{device}: the driver is too old: it speaks {have}, at least {need} is needed")]
    DriverTooOld {
        /// As the caller wrote it.
        device: String,
        /// What it speaks.
        have: String,
        /// What it must speak, and the remedy.
        need: String,
    },
    /// Memory of another process that cannot be opened, or that no other process can open.
    #[error("{device}: {fault}")]
    Handle {
        /// The device that was to open it, or has it.
        device: String,
        /// What is wrong.
        fault: HandleFault,
    },
    /// A plan that a device must not run.
    #[error("invalid program: step {step}: {detail}")]
    InvalidProgram {
        /// Index of the step, or `usize::MAX` where it is not about one.
        step: usize,
        /// What is wrong.
        detail: String,
    },
    /// A model that so many machines cannot share.
    #[error("{ranks} ranks: {detail}")]
    Indivisible {
        /// Machines.
        ranks: u32,
        /// What does not divide, and what would.
        detail: String,
    },
    /// Memory that could not be had.
    #[error("{wanted_bytes} bytes could not be allocated on {device}")]
    OutOfMemory {
        /// The device.
        device: String,
        /// Bytes asked for.
        wanted_bytes: u64,
    },
    /// A kernel that does not compile for the machine at hand.
    #[error("kernel compilation failed for {arch}: {detail}")]
    Compile {
        /// Architecture asked for.
        arch: String,
        /// The compiler's words.
        detail: String,
    },
    /// Whoever asked wants the result no more: a [`crate::device::Stop`] was set.
    #[error("given up by its caller")]
    GivenUp,
    /// A kernel waited for something that did not come.
    #[error("the kernel hangs: {0}")]
    Hang(String),
    /// A thread of the device panicked or the operating system refused one.
    #[error("device failure: {0}")]
    Failed(String),
}
