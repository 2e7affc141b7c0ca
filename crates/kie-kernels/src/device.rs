//! What a runner is: a [`Device`] runs programs, [`Running`] is a started one.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;

use crate::abi::{Encoding, PageGroup, PAGE};
use crate::buffer::{Buffer, HostBytes};
use crate::error::{Error, Result};
use crate::mailbox::Mailbox;
use crate::meter::Meter;
use crate::mono::lower::tuning::Tuning;
use crate::validate::ValidProgram;

/// What one device has.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceInfo {
    /// Name to ask for it again, such as `cpu` or `cuda:0`.
    pub name: String,
    /// What a person would call it.
    pub model: String,
    /// Blocks that a program for it is planned with: threads of a CPU, SMs of a GPU.
    pub blocks: u32,
    /// Memory, in bytes.
    pub memory_bytes: u64,
    /// Memory that is free now, in bytes.
    pub free_bytes: u64,
    /// Instruction set or architecture the arithmetic uses.
    pub arch: String,
}

/// What one machine of a device holds of a program, in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Footprint {
    /// Name of the machine.
    pub name: String,
    /// Which part of the model it has, in words.
    pub part: String,
    /// Weights as it reads them.
    pub weight_bytes: u64,
    /// KV pages.
    pub kv_bytes: u64,
    /// Everything else.
    pub scratch_bytes: u64,
    /// Its free memory.
    pub free_bytes: u64,
}

impl Footprint {
    /// All that it takes.
    pub const fn need(&self) -> u64 {
        self.weight_bytes + self.kv_bytes + self.scratch_bytes
    }
}

/// A place where programs run.
pub trait Device: Send + Sync {
    /// What it has.
    fn info(&self) -> DeviceInfo;

    /// Makes host bytes readable by the device: in place where the address space is shared.
    fn load(&self, bytes: Arc<dyn HostBytes>) -> Result<Buffer>;

    /// Whether it reads matrices of an encoding as they are stored. Others are rounded to halves
    /// before they are loaded, which is said.
    fn carries(&self, encoding: &Encoding) -> bool {
        let _ = encoding;
        true
    }

    /// Whether it makes rows of matrices that are stored by columns
    /// ([`Layout::ColumnMajor`](crate::abi::Layout)) itself, some at a time, as it loads them.
    fn carries_columns(&self) -> bool {
        false
    }

    /// Whether matrices in float32 are rounded to 16 bits when they are loaded.
    fn rounds_f32(&self) -> bool {
        false
    }

    /// How it will run a program, to print; empty where there is nothing to say.
    ///
    /// # Errors
    /// [`Error::InvalidProgram`] for what it cannot run.
    fn describe(&self, program: &ValidProgram) -> Result<String> {
        let _ = program;
        Ok(String::new())
    }

    /// All that it computes ahead of a program's start, to print: classes of layers, rows over
    /// blocks, what lies where; empty where there is nothing to say.
    ///
    /// # Errors
    /// As [`Device::describe`].
    fn lowered(&self, program: &ValidProgram) -> Result<String> {
        let _ = program;
        Ok(String::new())
    }

    /// Prompt positions of one pass at most: enough to amortise a read of all weights on a CPU.
    /// `experts`: some layers have them, and a pass reads nearly all.
    fn chunk(&self, experts: bool) -> u32 {
        let _ = experts;
        512
    }

    /// Bytes of one KV page of a group, wherever it lies: the same keys and values may lie on
    /// several machines, padded and in another type than the program's.
    fn page_bytes(&self, group: &PageGroup) -> u64 {
        group.page_bytes()
    }

    /// What each of its machines will hold of a program, in order of rank; nothing where what the
    /// program says of itself is all there is to say.
    ///
    /// # Errors
    /// As [`Device::describe`].
    fn footprints(&self, program: &ValidProgram) -> Result<Vec<Footprint>> {
        let _ = program;
        Ok(Vec::new())
    }

    /// Tensors of a program that a token reads as halves, however they are stored.
    ///
    /// # Errors
    /// As [`Device::describe`].
    fn as_halves(&self, program: &ValidProgram) -> Result<Vec<u32>> {
        let _ = program;
        Ok(Vec::new())
    }

    /// Compiles what a program needs, where code is compiled, so that a later start finds it kept.
    ///
    /// # Errors
    /// [`Error::Compile`] or [`Error::BackendMissing`].
    fn compile(&self, program: &ValidProgram) -> Result<()> {
        let _ = program;
        Ok(())
    }

    /// Why steps of a program check no drafts of tokens here, if they do not.
    fn refuses_drafts(&self, program: &ValidProgram) -> Option<&'static str> {
        let _ = program;
        Some("its kernels check one row of a sequence a step")
    }

    /// Drafts that steps of a program check beside a mask at most.
    fn masked_drafts(&self, program: &ValidProgram) -> usize {
        let _ = program;
        0
    }

    /// Microseconds of each of `rounds` round trips of a token, from the device to the host and
    /// back, one after another, by the device's clock.
    ///
    /// # Errors
    /// [`Error::NoDevice`] where device and host are one; [`Error::Hang`].
    fn echo(&self, rounds: u32) -> Result<Vec<f64>> {
        let _ = rounds;
        let detail = "the device is the host itself; name a GPU, such as cuda:0".to_owned();
        Err(Error::NoDevice { device: self.info().name, detail })
    }

    /// Where a prompt may go on behind cached pages with the very bits that it has without them.
    ///
    /// # Errors
    /// As [`Device::describe`].
    fn exact_reuse(&self, program: &ValidProgram) -> Result<ExactReuse> {
        let _ = program;
        Ok(ExactReuse { every: PAGE as u32, last: true })
    }

    /// Starts a program over its buffers. The calling thread becomes the host thread of the
    /// mailbox and must be the one that calls [`Running::drive`].
    fn start(
        &self,
        program: ValidProgram,
        buffers: Vec<Buffer>,
        mailbox: Arc<Mailbox>,
    ) -> Result<Box<dyn Running>>;
}

/// A part of what a start did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Phase {
    /// What was done.
    pub name: &'static str,
    /// How long it took.
    pub seconds: f64,
    /// Bytes that it moved; 0 where that says nothing.
    pub bytes: u64,
}

impl Phase {
    /// A phase that took so long.
    pub fn new(name: &'static str, took: Duration, bytes: u64) -> Self {
        Self { name, seconds: took.as_secs_f64(), bytes }
    }
}

/// Whether nobody waits for a slot's request any more: its caller left, or its time is over. Asked
/// on the host thread.
pub type Gone<'a> = &'a (dyn Fn(usize) -> bool + Sync);

/// A started program. Dropping it ends and joins whatever it started.
pub trait Running {
    /// Lets the device use the host thread: the CPU runs one pass on it and returns true if there
    /// was work; a GPU needs no host thread, returns whether it is busy and costs nothing. A long
    /// pass may be given up for requests that are `gone`: it is as if it had not begun.
    ///
    /// # Errors
    /// The device failed; the engine is of no more use.
    fn drive(&mut self, gone: Gone<'_>) -> Result<bool>;

    /// What the start did, in order; nothing where it did next to nothing.
    fn phases(&self) -> Vec<Phase> {
        Vec::new()
    }

    /// What does not work as it should, though everything runs: one line each.
    fn warnings(&self) -> Vec<String> {
        Vec::new()
    }

    /// The bytes of a page of a group, where they lie in the host's address space: to read or to
    /// write between two turns, when nothing runs on them.
    fn page(&mut self, group: usize, page: u32) -> Option<&mut [u8]> {
        let _ = (group, page);
        None
    }

    /// No request runs: frees what only a running program needs (spinning threads, the GPU).
    fn park(&mut self);
}

/// Where the keys and values of one prompt may stand in for another's, bit for bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExactReuse {
    /// At multiples of so many positions, which are a multiple of 64 themselves.
    pub every: u32,
    /// A prompt's last position is computed as all others are, so that it counts with them.
    pub last: bool,
}

/// Tells whatever opens or loads that its result is wanted no more. Clones are the same one.
#[derive(Debug, Clone, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Asks it to end.
    pub fn set(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether it is to end.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// Ends what asks.
    ///
    /// # Errors
    /// [`Error::GivenUp`] once it is set.
    pub fn check(&self) -> Result<()> {
        if self.is_set() {
            return Err(Error::GivenUp);
        }
        Ok(())
    }
}

/// What a caller may choose about a device.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Threads of the CPU; `None`: one a core that this process may use.
    pub threads: Option<usize>,
    /// Instruction set of the CPU, forced by tests; `None`: the best there is.
    pub level: Option<crate::simd::Level>,
    /// Further folders in which NVRTC may lie.
    pub nvrtc_dirs: Vec<PathBuf>,
    /// Where a GPU's steps start counting, chosen by tests; `None`: 1.
    pub first_seqno: Option<u32>,
    /// Where compiled kernels are kept; `None`: the user's cache folder.
    pub cache_dir: Option<PathBuf>,
    /// How long a wait inside a GPU's kernel lasts at most; `None`: a second.
    pub hang_timeout: Option<Duration>,
    /// Whether prompts run in the prefill kernel where it fits, chosen by tests; `None`: on CUDA.
    pub prefill_kernel: Option<bool>,
    /// Bound on the gap of a decoding slot beside a prefill.
    pub max_itl: Option<Duration>,
    /// Bound on a GPU's launch, which ends with the step or layer in which that time is over.
    pub max_launch: Option<Duration>,
    /// What was measured best on a GPU, in place of the table's row for it; chosen by tests.
    pub tuning: Option<Tuning>,
    /// Times a GPU's launches; what its requests say then may be garbage.
    pub meter: Option<Arc<Meter>>,
    /// A prompt has the same bits behind cached pages as without them
    /// ([`Device::exact_reuse`] says where that begins).
    pub reproducible: bool,
    /// A GPU's kernels have two halves a number, and keys and values in float32.
    pub exact: bool,
    /// Ends opening and loading.
    pub stop: Stop,
}
