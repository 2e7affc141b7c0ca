//! The monokernel: one launch that holds the whole decode loop, over any [`machine`].
//!
//! A program comes in as every device gets it; [`model`] reads it as layers that are all alike,
//! [`cut`] deals the work out to blocks, [`pack`] brings the weights into the order in which blocks
//! take them, [`runner`] feeds launches and carries their tokens to the mailbox.

pub mod clock;
pub mod cut;
pub mod loaded;
pub mod cache;
pub(crate) mod library;
pub mod machine;
pub mod model;
pub mod pack;
pub mod runner;
#[cfg(test)]
pub(crate) mod shapes;
pub mod source;
pub mod wire;

use std::sync::Arc;

use self::loaded::Loaded;
use self::machine::Machine;
use self::runner::Runner;
use crate::device::{Buffer, Device, DeviceInfo, HostBytes, Running};
use crate::error::Result;
use crate::mailbox::Mailbox;
use crate::validate::ValidProgram;

/// A machine as a device: weights stay where they are on the host until a program starts, which
/// packs them onto the machine.
pub struct Mono {
    machine: Arc<dyn Machine>,
    info: DeviceInfo,
    first_epoch: u32,
}

impl Mono {
    /// The device of a machine. `first_epoch` is 1 but for tests of the epochs' end.
    ///
    /// # Errors
    /// What the machine says when asked what it has.
    pub fn new(machine: Arc<dyn Machine>, first_epoch: u32) -> Result<Self> {
        let info = machine.info()?;
        let info = DeviceInfo {
            name: info.name,
            model: info.model,
            blocks: info.multiprocessors,
            memory_bytes: info.memory_bytes,
            free_bytes: info.free_bytes,
            arch: info.arch,
        };
        Ok(Self { machine, info, first_epoch })
    }
}

impl Device for Mono {
    fn info(&self) -> DeviceInfo {
        self.info.clone()
    }

    fn load(&self, bytes: Arc<dyn HostBytes>) -> Result<Buffer> {
        Ok(Buffer::in_place(bytes))
    }

    fn start(
        &self,
        program: ValidProgram,
        buffers: Vec<Buffer>,
        mailbox: Arc<Mailbox>,
    ) -> Result<Box<dyn Running>> {
        let loaded = Loaded::new(self.machine.clone(), &program, &buffers)?;
        Ok(Box::new(Runner::new(loaded, mailbox, self.first_epoch)))
    }
}
