//! What a collective can answer instead of doing its work.

use std::fmt;
use std::path::PathBuf;

use kie_kernels::machine::handle::HandleFault;

/// Result with [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// One enum for the crate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A number of ranks that there is nothing for.
    #[error("{got} ranks: {wanted}")]
    Ranks {
        /// What would do.
        wanted: String,
        /// Ranks asked for.
        got: usize,
    },
    /// Data that do not fit the operation.
    #[error("{op}: {what}: wanted {wanted}, got {got}")]
    Size {
        /// Name of the operation.
        op: &'static str,
        /// Which data.
        what: String,
        /// What would do.
        wanted: String,
        /// What there was.
        got: usize,
    },
    /// A sum of what is not known to be numbers.
    #[error("{op} of {dtype}: bytes are moved, never added: give f16, bf16 or f32 numbers")]
    NotNumbers {
        /// Name of the operation.
        op: &'static str,
        /// The format.
        dtype: &'static str,
    },
    /// A message larger than the symmetric memory was made for.
    #[error("{op}: {bytes} bytes, the communicator was made for {most}: raise message_bytes")]
    TooLarge {
        /// Name of the operation.
        op: &'static str,
        /// Bytes of the message.
        bytes: usize,
        /// Most bytes.
        most: usize,
    },
    /// Two ranks whose memory cannot be mapped on each other.
    #[error("rank {from} cannot reach the memory of rank {to}: {detail}")]
    Unreachable {
        /// The rank that would store.
        from: usize,
        /// The rank whose memory it is.
        to: usize,
        /// The driver's words.
        detail: String,
    },
    /// Another process's memory that cannot be opened.
    #[error("memory of rank {rank}: {fault}")]
    Handle {
        /// The rank whose memory it is.
        rank: usize,
        /// What is wrong with its handle.
        fault: HandleFault,
    },
    /// A rank died, came too late, or its words were lost. The communicator is ready again.
    #[error("{op} {seqno} stalled: {}", Waits(.waits))]
    Stalled {
        /// Name of the operation.
        op: &'static str,
        /// Its number since the communicator was made or cleared.
        seqno: u32,
        /// Which rank waited for which when the first wait expired; at least one.
        waits: Vec<Wait>,
    },
    /// An earlier failure left nothing to go on with.
    #[error("the communicator is closed: {why}; make a new one")]
    Closed {
        /// That failure.
        why: String,
    },
    /// A thing whose place is there and that is not built.
    #[error("{what} is not built: {remedy}")]
    NotBuilt {
        /// The thing.
        what: &'static str,
        /// What to do instead.
        remedy: &'static str,
    },
    /// A topology that cannot be read, written or used.
    #[error("topology {}: {detail}", .path.display())]
    Topology {
        /// The file, or what stands for it.
        path: PathBuf,
        /// What is wrong.
        detail: String,
    },
    /// What a machine said.
    #[error(transparent)]
    Device(#[from] kie_kernels::Error),
}

/// One rank whose wait for another expired.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wait {
    /// The rank that waited.
    pub rank: u32,
    /// The rank that it waited for.
    pub peer: u32,
    /// What did not come.
    pub what: What,
    /// Sequence number of the last thing that had come, where it is known.
    pub seen: u32,
}

/// What a rank may wait for (kccl.h's `Where`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// Pushed words.
    Words,
    /// That it is there at all.
    Arrival,
    /// Its part of the sums, or of the data dealt out.
    Parts,
    /// Its results.
    Results,
    /// A number that the kernel does not know.
    Other(u8),
}

impl Wait {
    /// From the word that the kernel leaves; `None` where no wait expired.
    pub(crate) fn of(word: u64) -> Option<Self> {
        if word >> 63 == 0 {
            return None;
        }
        let what = match (word >> 56) as u8 & 0x7f {
            1 => What::Words,
            2 => What::Arrival,
            3 => What::Parts,
            4 => What::Results,
            other => What::Other(other),
        };
        let byte = |shift: u32| u32::from((word >> shift) as u8);
        Some(Self { rank: byte(48), peer: byte(40), what, seen: word as u32 })
    }
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.what {
            What::Words => "words",
            What::Arrival => "arrival",
            What::Parts => "parts",
            What::Results => "results",
            What::Other(_) => "unknown things",
        };
        write!(f, "rank {} gave up on the {what} of rank {}", self.rank, self.peer)
    }
}

struct Waits<'a>(&'a [Wait]);

impl fmt::Display for Waits<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, wait) in self.0.iter().enumerate() {
            write!(f, "{}{wait}", if index == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}
