//! Symmetric memory: one block of the same size on every rank, which all ranks map. The only way
//! by which a rank's kernels come to another's memory.
//!
//! Invariants: the blocks are zeroed when made; each stays mapped on every rank as long as this
//! lives, because it holds all machines; the host touches a block only while no kernel uses it.

use std::sync::Arc;

use kie_kernels::mono::machine::{Machine, Memory};

use crate::error::{Error, Result};

/// How ranks come to each other's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mapping {
    /// All ranks are machines of this process: peer access.
    InProcess,
    /// Ranks are processes that hand each other handles, one a rank, as the driver exports them.
    Ipc(Vec<Vec<u8>>),
}

/// The blocks of all ranks.
pub struct Symmetric {
    machines: Vec<Arc<dyn Machine>>,
    blocks: Vec<Memory>,
    bytes: usize,
}

impl Symmetric {
    /// `bytes` bytes on each machine, reachable from all. A machine may stand several times: then
    /// its blocks are those of virtual ranks.
    ///
    /// # Errors
    /// [`Error::Unreachable`] with the pair, [`Error::NotBuilt`] for handles between processes, or
    /// what a machine says.
    pub fn new(machines: &[Arc<dyn Machine>], bytes: usize, mapping: &Mapping) -> Result<Self> {
        if let Mapping::Ipc(_) = mapping {
            return Err(Error::NotBuilt {
                what: "symmetric memory between processes",
                remedy: "keep all ranks in one process (Mapping::InProcess)",
            });
        }
        for (from, ours) in machines.iter().enumerate() {
            for (to, theirs) in machines.iter().enumerate() {
                if from != to && !Arc::ptr_eq(ours, theirs) {
                    ours.enable_peer(&**theirs).map_err(|error| Error::Unreachable {
                        from,
                        to,
                        detail: error.to_string(),
                    })?;
                }
            }
        }
        let blocks: kie_kernels::Result<_> =
            machines.iter().map(|machine| machine.alloc_symmetric(bytes)).collect();
        Ok(Self { machines: machines.to_vec(), blocks: blocks?, bytes })
    }

    /// Bytes of each block.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// How many blocks there are.
    pub fn ranks(&self) -> usize {
        self.blocks.len()
    }

    /// The machine of a rank.
    pub fn machine(&self, rank: usize) -> &Arc<dyn Machine> {
        &self.machines[rank]
    }

    /// Where a rank's block starts: the same number on all ranks.
    pub fn address(&self, rank: usize) -> u64 {
        self.blocks[rank].address
    }

    /// Copies into a rank's block.
    ///
    /// # Errors
    /// What the machine says.
    pub fn write(&self, rank: usize, offset: usize, bytes: &[u8]) -> Result<()> {
        Ok(self.machines[rank].write(&self.blocks[rank], offset, bytes)?)
    }

    /// Copies out of a rank's block what ended kernels wrote.
    ///
    /// # Errors
    /// What the machine says.
    pub fn read(&self, rank: usize, offset: usize, out: &mut [u8]) -> Result<()> {
        Ok(self.machines[rank].read(&self.blocks[rank], offset, out)?)
    }
}
