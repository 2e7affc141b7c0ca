//! The monokernel: one launch that holds the whole decode loop, over any [`machine`].
//!
//! A program comes in as every device gets it; [`model`] reads it as layers that are all alike,
//! [`cut`] deals the work out to blocks, [`pack`] brings the weights into the order in which blocks
//! take them, [`runner`] feeds launches and carries their tokens to the mailbox.

pub mod cache;
pub mod clock;
pub mod cut;
pub(crate) mod library;
pub mod loaded;
pub mod machine;
pub mod model;
pub mod pack;
pub mod runner;
#[cfg(test)]
pub(crate) mod shapes;
pub mod source;
pub mod wire;

use std::sync::Arc;
use std::time::Duration;

use self::cut::Cut;
use self::loaded::Loaded;
use self::machine::Machine;
use self::model::Model;
use self::runner::Runner;
use crate::device::{Buffer, Device, DeviceInfo, HostBytes, Options, Running};
use crate::error::Result;
use crate::mailbox::Mailbox;
use crate::validate::ValidProgram;

/// How long a wait inside a kernel lasts where nobody says.
const HANG_TIMEOUT: Duration = Duration::from_secs(1);

/// A machine as a device: weights stay where they are on the host until a program starts, which
/// packs them onto the machine.
pub struct Mono {
    machine: Arc<dyn Machine>,
    info: DeviceInfo,
    first_epoch: u32,
    hang_timeout: Duration,
}

impl Mono {
    /// The device of a machine.
    ///
    /// # Errors
    /// What the machine says when asked what it has.
    pub fn new(machine: Arc<dyn Machine>, options: &Options) -> Result<Self> {
        let info = machine.info()?;
        let info = DeviceInfo {
            name: info.name,
            model: info.model,
            blocks: info.multiprocessors,
            memory_bytes: info.memory_bytes,
            free_bytes: info.free_bytes,
            arch: info.arch,
        };
        Ok(Self {
            machine,
            info,
            first_epoch: options.first_epoch.unwrap_or(1),
            hang_timeout: options.hang_timeout.unwrap_or(HANG_TIMEOUT),
        })
    }
}

impl Device for Mono {
    fn info(&self) -> DeviceInfo {
        self.info.clone()
    }

    fn load(&self, bytes: Arc<dyn HostBytes>) -> Result<Buffer> {
        Ok(Buffer::in_place(bytes))
    }

    fn describe(&self, program: &ValidProgram) -> Result<String> {
        let program = program.program();
        let model = Model::read(program)?;
        let cut = Cut::new(&model, &self.machine.info()?, program.dims.max_positions)?;
        Ok(cut.to_string())
    }

    fn compile(&self, program: &ValidProgram) -> Result<()> {
        let program = program.program();
        let model = Model::read(program)?;
        let cut = Cut::new(&model, &self.machine.info()?, program.dims.max_positions)?;
        loaded::compile(&*self.machine, &model, &cut).map(drop)
    }

    fn start(
        &self,
        program: ValidProgram,
        buffers: Vec<Buffer>,
        mailbox: Arc<Mailbox>,
    ) -> Result<Box<dyn Running>> {
        let loaded = Loaded::new(self.machine.clone(), &program, &buffers)?;
        Ok(Box::new(Runner::new(loaded, mailbox, self.first_epoch, self.hang_timeout)))
    }
}
