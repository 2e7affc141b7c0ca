//! Symmetric memory: one block of the same size on every rank, which all ranks map. The only way
//! by which a rank's kernels come to another's memory.
//!
//! Invariants: the blocks are zeroed when made; each stays mapped on every rank as long as this
//! lives, because it holds all machines (of other processes' blocks, what opened them); the host
//! touches a block only while no kernel uses it.

use std::ops::Range;
use std::sync::Arc;

use kie_kernels::machine::{Machine, Memory};

use crate::error::{Error, Result};

/// The blocks of all ranks.
pub struct Symmetric {
    machines: Vec<Arc<dyn Machine>>,
    blocks: Vec<Memory>,
    bytes: usize,
    /// Ranks of this process.
    local: Range<usize>,
}

impl Symmetric {
    /// `bytes` bytes on each machine, reachable from all. A machine may stand several times: then
    /// its blocks are those of virtual ranks.
    ///
    /// # Errors
    /// [`Error::Unreachable`] with the pair, or what a machine says.
    pub fn new(machines: &[Arc<dyn Machine>], bytes: usize) -> Result<Self> {
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
        let local = 0..machines.len();
        Ok(Self { machines: machines.to_vec(), blocks: blocks?, bytes, local })
    }

    /// Blocks of other processes' ranks, opened on the machine of this process's one, and its own.
    pub(crate) fn joined(machine: Arc<dyn Machine>, rank: usize, blocks: Vec<Memory>) -> Self {
        let (machines, bytes) = (vec![machine; blocks.len()], blocks[rank].bytes);
        Self { machines, blocks, bytes, local: rank..rank + 1 }
    }

    /// A kernel whose end was not seen may still store into any block: they are never freed.
    pub(crate) fn keep(&self) {
        std::mem::forget(self.blocks.clone());
    }

    /// Bytes of each block.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// How many blocks there are.
    pub fn ranks(&self) -> usize {
        self.blocks.len()
    }

    /// The ranks of this process.
    pub fn local(&self) -> Range<usize> {
        self.local.clone()
    }

    /// The machine that reaches a rank's block from here: the rank's own, in one process.
    pub fn machine(&self, rank: usize) -> &Arc<dyn Machine> {
        &self.machines[rank]
    }

    /// Where a rank's block starts, as this process's ranks see it.
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
