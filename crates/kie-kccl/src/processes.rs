//! Ranks of several processes: each has one, hands a handle of its memory to the others by whatever
//! way they talk, and opens theirs.
//!
//! Invariants: all processes choose the same options and number of ranks, and call the same
//! collectives in the same order; a rank's memory lives as long as any other's communicator. What
//! differs in length is refused here; the rest shows as a stall, which closes a communicator of
//! several processes: its words cannot be cleared while another rank may be at work.

use std::sync::Arc;

use kie_kernels::machine::handle::{Handle, HandleFault};
use kie_kernels::machine::{Machine, Memory};

use crate::error::{Error, Result};
use crate::symmetric::Symmetric;
use crate::topology::Topology;
use crate::{check_ranks, layout_for, Communicator, Options};

/// This process's rank, before it knows the others.
pub struct Joining {
    machine: Arc<dyn Machine>,
    memory: Memory,
    rank: usize,
    ranks: usize,
    options: Options,
}

impl Joining {
    /// Rank `rank` of `ranks`, on a machine of this process. Without a topology in the options all
    /// ranks are taken for equals of this one that are as near as virtual ranks: name one where
    /// links matter, the same on all ranks.
    ///
    /// # Errors
    /// [`Error::Ranks`], [`Error::Size`], or what the machine says.
    pub fn new(
        machine: Arc<dyn Machine>,
        rank: usize,
        ranks: usize,
        options: &Options,
    ) -> Result<Self> {
        check_ranks(ranks)?;
        if rank >= ranks {
            let wanted = format!("rank {rank} is not among them");
            return Err(Error::Ranks { wanted, got: ranks });
        }
        let memory = machine.alloc_symmetric(layout_for(options)?.bytes)?;
        Ok(Self { machine, memory, rank, ranks, options: options.clone() })
    }

    /// What the other processes need of this one.
    ///
    /// # Errors
    /// What the machine says where its memory cannot be opened by others.
    pub fn handle(&self) -> Result<Vec<u8>> {
        Ok(self.machine.export(&self.memory)?.to_bytes())
    }

    /// Opens the others' memory: handles in order of rank, this one's own among them.
    ///
    /// # Errors
    /// [`Error::Ranks`], [`Error::Topology`], and [`Error::Handle`] with the rank and what is
    /// wrong: another kind of device, another length, memory that is gone.
    pub fn join(self, handles: &[Vec<u8>]) -> Result<Communicator> {
        let Self { machine, memory, rank, ranks, options } = self;
        if handles.len() != ranks {
            let wanted = format!("one handle each, there are {}", handles.len());
            return Err(Error::Ranks { wanted, got: ranks });
        }
        let info = machine.info()?;
        let own = || Topology::virtual_ranks(&info.name, ranks as u32, info.multiprocessors, 1024);
        let topology = options.topology.clone().unwrap_or_else(own);
        topology.check()?;
        if topology.ranks() != ranks {
            let wanted = format!("the topology {} has {}", topology.name, topology.ranks());
            return Err(Error::Ranks { wanted, got: ranks });
        }
        let open = |(of, bytes): (usize, &Vec<u8>)| -> Result<Memory> {
            if of == rank {
                return Ok(memory.clone());
            }
            let fault = |fault: HandleFault| Error::Handle { rank: of, fault };
            let handle = Handle::from_bytes(bytes).map_err(fault)?;
            machine.import(&handle, memory.bytes).map_err(|error| match error {
                kie_kernels::Error::Handle { fault: why, .. } => fault(why),
                other => Error::Device(other),
            })
        };
        let blocks: Result<Vec<_>> = handles.iter().enumerate().map(open).collect();
        let memory = Symmetric::joined(machine.clone(), rank, blocks?);
        let layout = layout_for(&options)?;
        Communicator::over_memory(memory, layout, topology, &options)
    }
}
