//! The CPU device. Its fast levels and its scalar level run the same programs through the same
//! walk ([`pass`]); the scalar level is the oracle for the others.
//!
//! The host thread is member 0 of the thread team: [`Running::drive`] runs one pass on it. Small
//! checkpoints are read in place, from where they were mapped; large ones from huge pages.

mod arena;
pub mod attention;
pub mod matmul;
pub mod numbers;
pub mod ops;
mod pass;
pub mod prefill;
pub mod simd;
mod slots;
pub mod stream;
pub mod team;

use std::sync::Arc;
use std::time::Duration;

use crate::device::{Buffer, Device, DeviceInfo, HostBytes, Options, Running};
use crate::error::{Error, Result};
use crate::mailbox::Mailbox;
use crate::validate::ValidProgram;
use simd::Level;

/// The machine's own processor.
pub struct Cpu {
    threads: usize,
    level: Level,
    max_itl: Option<Duration>,
}

impl Cpu {
    /// A CPU device with `options.threads` threads (all that the process may use by default).
    ///
    /// # Errors
    /// [`Error::NoDevice`] for zero threads or an instruction set that this machine lacks.
    pub fn new(options: &Options) -> Result<Self> {
        let refuse = |detail: String| Err(Error::NoDevice { device: "cpu".to_owned(), detail });
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
        Ok(Self { threads, level, max_itl: options.max_itl })
    }
}

/// Cores that this process may run on.
pub fn allowed_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

impl Device for Cpu {
    fn info(&self) -> DeviceInfo {
        let (total, free) = memory();
        DeviceInfo {
            name: "cpu".to_owned(),
            model: processor_name(),
            blocks: self.threads as u32,
            memory_bytes: total,
            free_bytes: free,
            arch: self.level.name().to_owned(),
        }
    }

    fn load(&self, bytes: Arc<dyn HostBytes>) -> Result<Buffer> {
        if bytes.bytes().len() < arena::COPY_FROM {
            return Ok(Buffer::in_place(bytes));
        }
        Ok(Buffer::in_place(Arc::new(arena::Arena::copy(bytes.bytes(), self.threads))))
    }

    fn start(
        &self,
        program: ValidProgram,
        buffers: Vec<Buffer>,
        mailbox: Arc<Mailbox>,
    ) -> Result<Box<dyn Running>> {
        let team = team::Team::new(self.threads, true)
            .map_err(|e| Error::Failed(format!("threads: {e}")))?;
        let pass = pass::Pass::new(program, buffers, self.level)?;
        Ok(Box::new(slots::Slots::new(pass, team, mailbox, self.max_itl)))
    }
}

/// Total and available memory in bytes, the tighter of the machine's and the control group's.
pub fn memory() -> (u64, u64) {
    let field = |text: &str, key: &str| {
        let line = text.lines().find(|l| l.starts_with(key))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok()
    };
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = field(&info, "MemTotal:").map_or(u64::MAX, |kb| kb * 1024);
    let free = field(&info, "MemAvailable:").map_or(u64::MAX, |kb| kb * 1024);
    let number = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    match (number("/sys/fs/cgroup/memory.max"), number("/sys/fs/cgroup/memory.current")) {
        (Some(max), Some(used)) => (total.min(max), free.min(max.saturating_sub(used))),
        (None, _) | (_, None) => (total, free),
    }
}

/// What the processor calls itself.
pub fn processor_name() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = info.lines().find(|l| l.starts_with("model name"));
    line.and_then(|l| l.split(": ").nth(1)).unwrap_or("unknown processor").to_owned()
}

/// CLOCK_MONOTONIC in nanoseconds.
pub(crate) fn now_ns() -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is a valid timespec; the clock exists on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut t) };
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}
