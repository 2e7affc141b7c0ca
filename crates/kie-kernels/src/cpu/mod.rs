//! The CPU device. Its fast levels and its scalar level run the same programs through the same
//! walk ([`pass`]); the scalar level is the oracle for the others.
//!
//! `cpu:0,1` is the same with virtual ranks ([`ranks`]): as many lanes in one address space.
//!
//! The host thread is member 0 of the thread team: [`Running::drive`] runs one pass on it. Weights
//! are copied when they are loaded ([`arena`]), so that nothing is read from a file afterwards.

mod arena;
pub mod attention;
mod barrier;
mod codes;
mod compressed;
mod delta;
pub mod digits;
mod experts;
mod hyper;
#[cfg(test)]
mod loomed;
pub mod matmul;
pub mod ops;
mod pass;
pub mod prefill;
mod ranks;
mod slots;
pub mod stream;
pub mod team;
mod wait;
mod watch;

use std::sync::Arc;
use std::time::Duration;

use crate::abi::{PageGroup, Program};
use crate::buffer::{Buffer, HostBytes};
use crate::device::{Device, DeviceInfo, Footprint, Options, Running, Stop};
use crate::error::{Error, Result};
use crate::host::allowed_cores;
use crate::lookup::DRAFT_MAX;
use crate::mailbox::Mailbox;
use crate::shard::state_of;
use crate::simd::{self, Level};
use crate::validate::{validate, ValidProgram};
use ranks::Lanes;

/// The machine's own processor.
pub struct Cpu {
    name: String,
    /// Virtual ranks.
    ranks: u32,
    threads: usize,
    level: Level,
    max_itl: Option<Duration>,
    stop: Stop,
}

impl Cpu {
    /// A CPU device with `options.threads` threads (all that the process may use by default), by
    /// its name: `cpu`, or `cpu:0,1` with so many virtual ranks.
    ///
    /// # Errors
    /// [`Error::NoDevice`] for zero threads or an instruction set that this machine lacks, or ranks
    /// that are not numbered from 0 on.
    pub fn new(name: &str, options: &Options) -> Result<Self> {
        let refuse = |detail: String| Err(Error::NoDevice { device: name.to_owned(), detail });
        let Some(ranks) = ranks::count(name) else {
            let most = ranks::RANKS_MAX;
            return refuse(format!(
                "virtual ranks are listed from 0 on, {most} at most, such as \"cpu:0,1\"; the CPU \
                 itself is \"cpu\""
            ));
        };
        if options.meter.is_some() {
            return refuse(
                "its passes are timed from outside, not phase by phase; name a GPU, such as \
                 cuda:0"
                    .to_owned(),
            );
        }
        let threads = options.threads.unwrap_or_else(allowed_cores);
        if threads == 0 || threads > 1024 {
            return refuse(format!("threads must be 1 to 1024, got {threads}"));
        }
        let level = options.level.unwrap_or_else(simd::detect);
        if !level.is_available() {
            return refuse(format!("this processor does not have {level:?}"));
        }
        let (name, stop) = (name.to_owned(), options.stop.clone());
        Ok(Self { name, ranks, threads, level, max_itl: options.max_itl, stop })
    }

    /// A program cut for the virtual ranks, if there are several.
    fn lanes(&self, program: &Program) -> Result<Option<Lanes>> {
        (self.ranks > 1).then(|| Lanes::new(program, self.ranks)).transpose()
    }
}

impl Device for Cpu {
    fn info(&self) -> DeviceInfo {
        let (total, free) = crate::limits::memory();
        DeviceInfo {
            name: self.name.clone(),
            model: processor_name(),
            blocks: self.threads as u32,
            memory_bytes: total,
            free_bytes: free,
            arch: self.level.name().to_owned(),
        }
    }

    fn load(&self, bytes: Arc<dyn HostBytes>) -> Result<Buffer> {
        let copy = arena::Arena::copy(bytes.bytes(), self.threads, &self.stop)?;
        Ok(Buffer::in_place(Arc::new(copy)))
    }

    fn describe(&self, program: &ValidProgram) -> Result<String> {
        Ok(self.lanes(program.program())?.map_or_else(String::new, |lanes| lanes.how))
    }

    fn page_bytes(&self, group: &PageGroup) -> u64 {
        PageGroup { state: state_of(group, self.ranks), ..*group }.page_bytes()
    }

    fn footprints(&self, program: &ValidProgram) -> Result<Vec<Footprint>> {
        let program = program.program();
        let Some(lanes) = self.lanes(program)?.filter(Lanes::are_cut) else {
            return Ok(Vec::new());
        };
        let [weight_bytes, kv_bytes, scratch_bytes] = lanes.bytes(program);
        let (name, part, free_bytes) =
            (self.name.clone(), "all ranks".to_owned(), crate::limits::memory().1);
        Ok(vec![Footprint { name, part, weight_bytes, kv_bytes, scratch_bytes, free_bytes }])
    }

    fn refuses_drafts(&self, _: &ValidProgram) -> Option<&'static str> {
        None
    }

    fn masked_drafts(&self, _: &ValidProgram) -> usize {
        DRAFT_MAX
    }

    fn start(
        &self,
        program: ValidProgram,
        buffers: Vec<Buffer>,
        mailbox: Arc<Mailbox>,
    ) -> Result<Box<dyn Running>> {
        let (program, buffers) = match self.lanes(program.program())? {
            None => (program, buffers),
            Some(lanes) => {
                let (program, buffers) = lanes.load(buffers);
                (validate(program, &buffers)?, buffers)
            }
        };
        let team = team::Team::new(self.threads, true)
            .map_err(|e| Error::Failed(format!("threads: {e}")))?;
        let pass = pass::Pass::new(program, buffers, self.level)?;
        Ok(Box::new(slots::Slots::new(pass, team, mailbox, self.max_itl)))
    }
}

/// What the processor calls itself.
pub fn processor_name() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = info.lines().find(|l| l.starts_with("model name"));
    line.and_then(|l| l.split(": ").nth(1)).unwrap_or("unknown processor").to_owned()
}
