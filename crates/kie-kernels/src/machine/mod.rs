//! What kernels need of the machine under them, and nothing more: memory, a compiler, a launch.
//! `cuda`, `hip` and `sim` each implement [`Machine`]; everything above (planning, packing,
//! requests, collectives) is written once over it.
//!
//! # Memory between host and kernel
//! [`Memory`] belongs to the device; the host writes it while no kernel uses the bytes, or before a
//! kernel is told of them. [`Shared`] is host memory that a running kernel reads and writes, one
//! aligned 32- or 64-bit word at a time: the host's side of each word is an atomic.

pub mod cache;
pub mod group;
pub mod handle;
#[cfg(target_os = "linux")]
pub(crate) mod library;
mod platform;
pub mod recorded;

use std::any::Any;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::handle::{Handle, HandleFault};
pub use self::platform::Platform;
use crate::error::{Error, Result};

/// What the machine has, as far as a plan asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineInfo {
    /// Name to open it again, such as `cuda:0`.
    pub name: String,
    /// What a person would call it.
    pub model: String,
    /// Architecture that sources are compiled for, such as `sm_90a`.
    pub arch: String,
    /// Multiprocessors: one block each.
    pub multiprocessors: u32,
    /// Dies with multiprocessors and a second-level cache of their own, to which the grid's blocks
    /// are handed in turn; 1: no such division.
    pub chiplets: u32,
    /// Most shared memory of a block, in bytes.
    pub shared_bytes: u32,
    /// Device memory, in bytes.
    pub memory_bytes: u64,
    /// Device memory free now, in bytes.
    pub free_bytes: u64,
}

impl MachineInfo {
    /// Whether warps pass registers on to others: compute capability 9.0 and later, by the
    /// instructions of the family's own architecture (PTX ISA 8.0, `setmaxnreg`).
    pub fn passes_registers(&self) -> bool {
        self.arch.starts_with("sm_") && self.arch.ends_with('a')
    }

    /// Whether four warps multiply as one, with operands that none of them loads (`wgmma`): compute
    /// capability 9.0 and no other. The simulator's older GPU has warps of 64.
    pub fn multiplies_wide(&self) -> bool {
        self.arch == "sm_90a" || self.arch == "sim-warp32"
    }
}

/// One compilation: the text is self-contained (no include), `defines` come before it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// Names and values of `#define` lines, in order.
    pub defines: Vec<(String, String)>,
    /// All headers in their order, as one text.
    pub text: String,
    /// `extern "C"` kernels that the module must have.
    pub entries: Vec<&'static str>,
}

/// Device memory, freed when its last owner goes.
#[derive(Clone)]
pub struct Memory {
    /// Address in the device's space.
    pub address: u64,
    /// Length in bytes.
    pub bytes: usize,
    /// Frees it.
    pub owner: Arc<dyn Any + Send + Sync>,
}

/// Host memory that kernels reach, freed when its last owner goes.
#[derive(Clone)]
pub struct Shared {
    /// Address in the device's space.
    pub address: u64,
    host: *const u8,
    bytes: usize,
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the host side is reached only through atomics.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// Wraps `bytes` bytes at `host`, which the device sees at `address`.
    ///
    /// # Safety
    /// The memory is zeroed, 64-byte aligned, lives as long as `owner`, and nobody reaches it but
    /// through this value and the device.
    pub unsafe fn new(
        address: u64,
        host: *const u8,
        bytes: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Self { address, host, bytes, _owner: owner }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// True if there is nothing.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The aligned 32-bit word at `offset` bytes.
    pub fn word32(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset + 4 <= self.bytes, "{offset} of {}", self.bytes);
        // SAFETY: in bounds and aligned (asserted; the base by `new`), live while `self` is.
        unsafe { AtomicU32::from_ptr(self.host.add(offset).cast_mut().cast()) }
    }

    /// The aligned 64-bit word at `offset` bytes.
    pub fn word64(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.bytes, "{offset} of {}", self.bytes);
        // SAFETY: in bounds and aligned (asserted; the base by `new`), live while `self` is.
        unsafe { AtomicU64::from_ptr(self.host.add(offset).cast_mut().cast()) }
    }
}

/// Compiled code on a machine.
pub trait Module: Any + Send + Sync {
    /// For the machine that made it.
    fn as_any(&self) -> &dyn Any;
}

/// One launch: all blocks are resident at once, or it is refused.
#[derive(Debug, Clone, Copy)]
pub struct Launch<'a> {
    /// Which of the module's kernels.
    pub entry: &'a str,
    /// Blocks of the grid.
    pub blocks: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
    /// The kernel's one parameter, by value.
    pub args: &'a [u8],
}

/// A kernel on its way. Dropping it waits for its end.
pub trait Flight: Send {
    /// Whether it has ended; never waits.
    ///
    /// # Errors
    /// [`crate::Error::Failed`] with what the driver (or the simulator) said.
    fn done(&mut self) -> Result<bool>;

    /// Waits for its end, as dropping it does. False where that was not seen: then whatever the
    /// kernel stores into must stay, on other machines, too.
    fn wait(&mut self) -> bool {
        wait_within(self, Duration::MAX).unwrap_or(false)
    }
}

/// Waits for a kernel's end, for so long at most: false where it has not ended by then.
///
/// # Errors
/// As [`Flight::done`].
pub fn wait_within(flight: &mut (impl Flight + ?Sized), patience: Duration) -> Result<bool> {
    let (began, mut pause) = (Instant::now(), Duration::from_micros(10));
    while !flight.done()? {
        if began.elapsed() >= patience {
            return Ok(false);
        }
        std::thread::sleep(pause);
        pause = (2 * pause).min(Duration::from_millis(1));
    }
    Ok(true)
}

/// What another machine must know of one to reach its memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Machines of one platform may reach each other.
    pub platform: Platform,
    /// Such as `cuda:1`.
    pub name: String,
    /// The driver's number of the device.
    pub ordinal: i32,
    /// The driver's handle of what owns the device's memory; 0 where there is none.
    pub owner: usize,
    /// PCI address, such as `0000:17:00.0`, where it has one.
    pub bus: Option<String>,
}

impl Peer {
    /// The typed refusal of machines that cannot reach each other.
    pub fn refuse(&self, other: &Self, why: &str) -> Error {
        Error::Failed(format!("{} cannot reach the memory of {}: {why}", self.name, other.name))
    }
}

/// A machine that kernels run on.
pub trait Machine: Send + Sync {
    /// Which headers its sources start with.
    fn platform(&self) -> Platform;

    /// Threads that run in step: one or two teams of 32. Threads of a block that have work of their
    /// own take a whole warp each.
    fn warp(&self) -> u32 {
        32
    }

    /// What it has now.
    ///
    /// # Errors
    /// [`crate::Error::Failed`] if the driver does not answer.
    fn info(&self) -> Result<MachineInfo>;

    /// Compiles, or takes the result of an earlier compilation from the cache on disk.
    ///
    /// # Errors
    /// [`crate::Error::Compile`] with the compiler's words; [`crate::Error::NoDevice`] where there
    /// is no compiler.
    fn compile(&self, source: &Source) -> Result<Arc<dyn Module>>;

    /// Zeroed device memory, 256-byte aligned.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    fn alloc(&self, bytes: usize) -> Result<Memory>;

    /// As [`Machine::alloc`]: memory that kernels of other machines may store into, once they have
    /// called [`Machine::enable_peer`]. All else is the machine's own.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    fn alloc_symmetric(&self, bytes: usize) -> Result<Memory> {
        self.alloc(bytes)
    }

    /// What another process needs to open memory that [`Machine::alloc_symmetric`] gave, all of it.
    ///
    /// # Errors
    /// [`Error::Handle`] for memory that no other process can open.
    fn export(&self, memory: &Memory) -> Result<Handle> {
        let _ = memory;
        let fault = HandleFault::Private("devices of this kind hand out none".to_owned());
        Err(Error::Handle { device: self.info()?.name, fault })
    }

    /// Opens another process's memory of `bytes` bytes: kernels of this machine reach it as that
    /// process's own do. Closed when its last owner goes; the other process must keep it so long.
    ///
    /// # Errors
    /// [`Error::Handle`] for a handle of another kind or length, or of memory that is no more.
    fn import(&self, handle: &Handle, bytes: usize) -> Result<Memory> {
        let (device, platform) = (self.info()?.name, self.platform());
        let fault = match handle.check(platform, bytes) {
            Ok(()) => handle.stale("devices of this kind open none"),
            Err(fault) => fault,
        };
        Err(Error::Handle { device, fault })
    }

    /// Zeroed host memory that kernels reach.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    fn alloc_shared(&self, bytes: usize) -> Result<Shared>;

    /// Copies to the device. When it returns, kernels launched (or told) afterwards see the bytes;
    /// it never waits for a running kernel.
    ///
    /// # Errors
    /// [`crate::Error::Failed`].
    fn write(&self, to: &Memory, offset: usize, bytes: &[u8]) -> Result<()>;

    /// Copies several pieces, each to its offset, as [`Machine::write`] does one.
    ///
    /// # Errors
    /// [`crate::Error::Failed`].
    fn write_all(&self, to: &Memory, pieces: &[(usize, &[u8])]) -> Result<()> {
        pieces.iter().try_for_each(|(offset, bytes)| self.write(to, *offset, bytes))
    }

    /// Copies from the device what ended kernels wrote; of a running one, what has arrived.
    ///
    /// # Errors
    /// [`crate::Error::Failed`].
    fn read(&self, from: &Memory, offset: usize, out: &mut [u8]) -> Result<()>;

    /// Starts a kernel and returns at once. Launches of one machine run one after another.
    ///
    /// # Errors
    /// [`crate::Error::Failed`], also where the blocks would not all be resident.
    fn launch(&self, module: &Arc<dyn Module>, launch: &Launch<'_>) -> Result<Box<dyn Flight>>;

    /// The same for a kernel that meets no other machine's: machines that start together with
    /// others do not wait for them here.
    ///
    /// # Errors
    /// As [`Machine::launch`].
    fn launch_alone(
        &self,
        module: &Arc<dyn Module>,
        launch: &Launch<'_>,
    ) -> Result<Box<dyn Flight>> {
        self.launch(module, launch)
    }

    /// How other machines of this process name it.
    ///
    /// # Errors
    /// [`Error::Failed`] where machines of this kind do not reach each other.
    fn peer(&self) -> Result<Peer> {
        Err(Error::Failed("machines of this kind do not reach each other".to_owned()))
    }

    /// Whether kernels of this machine may reach the other's memory once
    /// [`Machine::enable_peer`] has been called.
    ///
    /// # Errors
    /// [`Error::Failed`] if the driver does not answer.
    fn reaches(&self, other: &dyn Machine) -> Result<bool> {
        let (ours, theirs) = (self.peer()?, other.peer()?);
        Ok(ours == theirs)
    }

    /// From now on kernels of this machine reach all memory of `other`, at its own addresses, for
    /// as long as both live. Once is enough; once more does no harm.
    ///
    /// # Errors
    /// [`Error::Failed`] where they cannot reach each other.
    fn enable_peer(&self, other: &dyn Machine) -> Result<()> {
        let (ours, theirs) = (self.peer()?, other.peer()?);
        if ours == theirs {
            return Ok(());
        }
        Err(ours.refuse(&theirs, "machines of this kind do not reach each other"))
    }
}
