//! Memory of one process that another opens: what one hands to the other, by whatever way, and what
//! can be wrong with it. CUDA's handles are the driver's; the simulator's memory is a file without
//! a name that the other process finds in `/proc`.
//!
//! Invariant: a handle is plain bytes and owns nothing. The memory lives as long as the process
//! that allocated it keeps it; who opened it must have closed it by then.

use super::platform::Platform;

/// Begins every handle.
const MAGIC: &[u8; 8] = b"kie-mem1";
/// Bytes before the token.
const HEAD_BYTES: usize = 8 + 4 + 4 + 8;

/// What another process needs to open memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Handle {
    /// Kind of the machine whose memory it is.
    pub platform: Platform,
    /// The process that allocated it.
    pub process: u32,
    /// Length of the memory, in bytes.
    pub bytes: u64,
    /// What the machine's kind makes of it.
    pub token: Vec<u8>,
}

/// What is wrong with a handle, or with memory that should get one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HandleFault {
    /// Not the bytes of a handle.
    #[error("these {0} bytes are no handle, or only a part of one")]
    Garbled(usize),
    /// Of another kind of device.
    #[error("the handle is of {got:?} memory, this device opens {wanted:?} memory")]
    Kind {
        /// What the device opens.
        wanted: Platform,
        /// What the handle is of.
        got: Platform,
    },
    /// Of another length.
    #[error("the handle is of {got} bytes where {wanted} are wanted: all must ask for the same")]
    Size {
        /// Bytes that were expected.
        wanted: u64,
        /// Bytes of the memory.
        got: u64,
    },
    /// The memory is no more, or out of reach.
    #[error("the memory of process {process} is gone ({why}): it must live, and keep its memory")]
    Stale {
        /// The process that allocated it.
        process: u32,
        /// What the system said.
        why: String,
    },
    /// Memory that gets no handle.
    #[error("no other process can open this memory: {0}")]
    Private(String),
}

impl Handle {
    /// To send it.
    pub fn to_bytes(&self) -> Vec<u8> {
        let platform = match self.platform {
            Platform::Cuda => 0_u32,
            Platform::Hip => 1,
            Platform::Sim => 2,
        };
        let head = [platform.to_le_bytes(), self.process.to_le_bytes()].concat();
        [&MAGIC[..], &head, &self.bytes.to_le_bytes(), &self.token].concat()
    }

    /// As [`Handle::to_bytes`] wrote it.
    ///
    /// # Errors
    /// [`HandleFault::Garbled`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, HandleFault> {
        let garbled = HandleFault::Garbled(bytes.len());
        let Some((head, token)) = bytes.split_at_checked(HEAD_BYTES) else { return Err(garbled) };
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|n| head[at + n]));
        let platform = match word(8) {
            0 => Platform::Cuda,
            1 => Platform::Hip,
            2 => Platform::Sim,
            _ => return Err(garbled),
        };
        if &head[..8] != MAGIC {
            return Err(garbled);
        }
        let size = u64::from(word(16)) | u64::from(word(20)) << 32;
        Ok(Self { platform, process: word(12), bytes: size, token: token.to_vec() })
    }

    /// Whether it is of `bytes` bytes on such a platform.
    ///
    /// # Errors
    /// [`HandleFault::Kind`], [`HandleFault::Size`].
    pub fn check(&self, platform: Platform, bytes: usize) -> Result<(), HandleFault> {
        if self.platform != platform {
            return Err(HandleFault::Kind { wanted: platform, got: self.platform });
        }
        if self.bytes != bytes as u64 {
            return Err(HandleFault::Size { wanted: bytes as u64, got: self.bytes });
        }
        Ok(())
    }

    /// The fault of memory that is no more.
    pub fn stale(&self, why: impl ToString) -> HandleFault {
        HandleFault::Stale { process: self.process, why: why.to_string() }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_survives_being_sent_and_nothing_else_is_one() {
        for platform in [Platform::Cuda, Platform::Hip, Platform::Sim] {
            let handle = Handle { platform, process: 7, bytes: 1 << 40, token: vec![1, 2, 3] };
            let bytes = handle.to_bytes();
            assert_eq!(Handle::from_bytes(&bytes).unwrap(), handle);
            for cut in 0..HEAD_BYTES {
                assert_eq!(Handle::from_bytes(&bytes[..cut]), Err(HandleFault::Garbled(cut)));
            }
            let mut other = bytes.clone();
            other[0] ^= 1;
            assert!(Handle::from_bytes(&other).is_err());
            other = bytes;
            other[8] = 9;
            assert!(Handle::from_bytes(&other).is_err());
        }
    }
}
