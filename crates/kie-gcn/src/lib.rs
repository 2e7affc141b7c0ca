//! Machine code of gfx942 without one: an emulator that runs what clang makes of the kernels, a
//! wave of 64 lanes at a time, as a [`Machine`](kie_kernels::machine::Machine) named `gcn`; and a
//! lint over the same text. Both are for tests. What passes here was executed on this emulator,
//! never on the hardware, and its speed says nothing about a GPU's.

#![cfg(target_os = "linux")]

pub mod clocks;
mod elf;
mod inst;
pub mod lint;
mod machine;
mod meaning;
mod memory;
mod number;
pub mod options;
pub mod ranks;
mod schedule;
#[cfg(test)]
mod tests;
pub mod text;
pub mod toolchain;
mod wave;
mod weak;

pub use machine::Gcn;

/// What is wrong with a listing of machine code.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// A mnemonic that has no meaning here.
    #[error("{address:x}: {text}: no such instruction is known")]
    Unknown {
        /// Where it stands.
        address: u64,
        /// The line.
        text: String,
    },
    /// Something else about a line.
    #[error("{address:x}: {text}: {what}")]
    Line {
        /// Where it stands.
        address: u64,
        /// The line.
        text: String,
        /// What about it.
        what: String,
    },
    /// Not a listing.
    #[error("{0}")]
    Listing(String),
}
