//! AMD GPUs (gfx942): [`Machine`] over the HIP runtime and hipRTC, both found at run time; nothing
//! of ROCm is needed to build. It has run against a stand-in for the runtime only, never on a GPU.
//!
//! # What waits for a running kernel
//! A persistent kernel never ends by itself, so what waits for it may wait for ever. `write`,
//! `read`, `info` and `launch` (which queues) do not. Freed memory and code is kept until no
//! kernel of this machine runs, because the runtime's own calls wait for the device. `compile`
//! (which loads the code), `alloc` and `alloc_shared` should come before the launch.

pub mod code_object;
mod context;
mod ffi;
pub mod hiprtc;
mod launch;
mod runtime;
#[cfg(test)]
mod tests;

use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use self::context::{Context, Fill, Retired};
use self::ffi::Address;
use self::hiprtc::{compile_source, Compiled, Hiprtc};
pub use self::launch::HipModule;
use self::runtime::Runtime;
use crate::error::{Error, Result};
use crate::kfd;
use crate::mono::cache::Cache;
use crate::mono::machine::{
    Flight, Launch, Machine, MachineInfo, Memory, Module, Peer, Platform, Shared, Source,
};

/// Shared memory of a block that `kernels/hip/platform.h` keeps for itself, in bytes.
const PLATFORM_SHARED_BYTES: u32 = 16;

/// Where things are, apart so that tests can put others in their place.
#[derive(Debug, Clone)]
struct Paths {
    /// In the order in which they are tried, as are the compilers.
    runtime: Vec<PathBuf>,
    hiprtc: Vec<PathBuf>,
    cache: Cache,
    /// What Linux tells of the GPUs.
    nodes: PathBuf,
    /// How long the drop of a flight waits for its end.
    patience: Duration,
}

impl Paths {
    fn usual(cache_dir: Option<&Path>) -> Self {
        Self {
            runtime: runtime::runtime_candidates(),
            hiprtc: hiprtc::candidates(),
            cache: cache_dir.map_or_else(Cache::usual, Cache::at),
            nodes: kfd::NODES.into(),
            patience: Duration::from_secs(10),
        }
    }
}

/// Opens `hip` (the first) or `hip:N`; compiled kernels are kept in `cache_dir`.
///
/// # Errors
/// [`Error::NoDevice`] with what is missing and what to do about it.
pub fn open(name: &str, cache_dir: Option<&Path>) -> Result<Arc<dyn Machine>> {
    Ok(Arc::new(Hip::open(name, &Paths::usual(cache_dir))?))
}

/// How many GPUs the runtime sees.
///
/// # Errors
/// [`Error::NoDevice`] where there is no runtime, or none that will do.
pub fn count() -> Result<u32> {
    Runtime::open(&Paths::usual(None).runtime, "hip")?.count("hip")
}

/// One GPU.
struct Hip {
    context: Arc<Context>,
    paths: Paths,
    /// Loaded when first needed: it brings a compiler along.
    hiprtc: OnceLock<Result<Hiprtc>>,
}

/// Device memory of ours.
struct Block {
    context: Arc<Context>,
    address: Address,
    bytes: usize,
}

impl Drop for Block {
    fn drop(&mut self) {
        self.context.retire(Retired::Device(self.address));
    }
}

/// Pinned host memory of ours.
struct Pinned {
    context: Arc<Context>,
    host: usize,
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.context.retire(Retired::Host(self.host));
    }
}

impl Hip {
    fn open(name: &str, paths: &Paths) -> Result<Self> {
        let context = Context::open(name, paths)?;
        Ok(Self { context, paths: paths.clone(), hiprtc: OnceLock::new() })
    }

    fn hiprtc(&self) -> Result<&Hiprtc> {
        let open = || Hiprtc::open(&self.paths.hiprtc, &self.context.name);
        self.hiprtc.get_or_init(open).as_ref().map_err(Clone::clone)
    }

    /// The address of `bytes` bytes at `offset`, if they are ours.
    fn inside(&self, memory: &Memory, offset: usize, bytes: usize) -> Result<Address> {
        let fault = |why: &str| {
            Error::Failed(format!(
                "{}: {bytes} bytes at {offset} of {} bytes of memory: {why}",
                self.context.name, memory.bytes
            ))
        };
        let block = memory.owner.downcast_ref::<Block>();
        let block = block.filter(|block| Arc::ptr_eq(&block.context, &self.context));
        let block = block.ok_or_else(|| fault("the memory belongs to another machine"))?;
        let within = offset.checked_add(bytes).is_some_and(|end| end <= memory.bytes);
        let base = memory.address.checked_sub(block.address).map(|base| base as usize);
        let part = base.and_then(|base| base.checked_add(memory.bytes));
        if !within || part.is_none_or(|end| end > block.bytes) {
            return Err(fault("outside of it"));
        }
        Ok(memory.address + offset as Address)
    }

    /// From the cache or from the compiler; with notes for the user.
    fn code(&self, source: &Source) -> Result<(Compiled, bool, Vec<String>)> {
        let hiprtc = self.hiprtc()?;
        let arch = &self.context.arch;
        let key = hiprtc.key(source, arch, self.context.runtime.version);
        if let Some(kept) = self.paths.cache.get(key).and_then(|entry| unpack(&entry)) {
            return Ok((kept, true, Vec::new()));
        }
        let compiled = compile_source(hiprtc, source, arch)?;
        let kept = self.paths.cache.put(key, &pack(&compiled));
        Ok((compiled, false, kept.err().into_iter().collect()))
    }
}

/// An entry of the cache: length of the log, log, code.
fn pack(compiled: &Compiled) -> Vec<u8> {
    let length = (compiled.log.len() as u64).to_le_bytes();
    [&length[..], compiled.log.as_bytes(), &compiled.code].concat()
}

fn unpack(entry: &[u8]) -> Option<Compiled> {
    let (length, rest) = entry.split_first_chunk::<8>()?;
    let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
    let (log, code) = rest.split_at_checked(length)?;
    Compiled::new(code.to_vec(), String::from_utf8(log.to_vec()).ok()?).ok()
}

impl Machine for Hip {
    fn platform(&self) -> Platform {
        Platform::Hip
    }

    fn warp(&self) -> u32 {
        64
    }

    fn info(&self) -> Result<MachineInfo> {
        let context = &self.context;
        let _current = context.current()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: two live integers.
        let code = unsafe { (context.runtime.api.hipMemGetInfo)(&mut free, &mut total) };
        context.check("hipMemGetInfo", code)?;
        Ok(MachineInfo {
            name: context.name.clone(),
            model: context.runtime.model(&context.name, context.ordinal)?,
            arch: context.arch.clone(),
            multiprocessors: context.multiprocessors,
            chiplets: context.chiplets,
            shared_bytes: context.shared_bytes.saturating_sub(PLATFORM_SHARED_BYTES),
            memory_bytes: total as u64,
            free_bytes: free as u64,
        })
    }

    fn compile(&self, source: &Source) -> Result<Arc<dyn Module>> {
        let (compiled, cached, notes) = self.code(source)?;
        let mut module = HipModule::load(&self.context, &compiled, source)?;
        (module.cached, module.notes) = (cached, notes);
        Ok(Arc::new(module))
    }

    fn alloc(&self, bytes: usize) -> Result<Memory> {
        let room = bytes.max(1).next_multiple_of(256);
        let mut address = 0;
        {
            let _current = self.context.current()?;
            // SAFETY: a live integer; `Block` frees it.
            let code = unsafe { (self.context.runtime.api.hipMalloc)(&mut address, room) };
            self.context.runtime.check_memory(&self.context.name, "hipMalloc", code, room)?;
        }
        let block = Block { context: self.context.clone(), address, bytes: room };
        self.context.zero(address, room)?;
        Ok(Memory { address, bytes, owner: Arc::new(block) })
    }

    fn alloc_shared(&self, bytes: usize) -> Result<Shared> {
        let room = bytes.max(1).next_multiple_of(64);
        let host = self.context.pinned(room)?;
        let owner = Arc::new(Pinned { context: self.context.clone(), host: host as usize });
        // SAFETY: so many bytes, not yet published.
        unsafe { std::ptr::write_bytes(host.cast::<u8>(), 0, room) };
        let _current = self.context.current()?;
        let (mut address, api) = (0, &self.context.runtime.api);
        // SAFETY: a live integer, memory that was allocated mapped; no flags are defined.
        let code = unsafe { (api.hipHostGetDevicePointer)(&mut address, host, 0) };
        self.context.check("hipHostGetDevicePointer", code)?;
        if !(host as usize).is_multiple_of(64) {
            let detail = format!("{}: pinned memory is not aligned", self.context.name);
            return Err(Error::Failed(detail));
        }
        let host: *const c_void = host;
        // SAFETY: zeroed and aligned above, lives as long as `owner`, and has no other user.
        Ok(unsafe { Shared::new(address, host.cast(), bytes, owner) })
    }

    fn write(&self, to: &Memory, offset: usize, bytes: &[u8]) -> Result<()> {
        let address = self.inside(to, offset, bytes.len())?;
        self.context.copy_in(address, Fill::Bytes(bytes))
    }

    fn read(&self, from: &Memory, offset: usize, out: &mut [u8]) -> Result<()> {
        let address = self.inside(from, offset, out.len())?;
        self.context.copy_out(address, out)
    }

    fn peer(&self) -> Result<Peer> {
        let Context { name, ordinal, bus, .. } = &*self.context;
        let (platform, name, bus) = (Platform::Hip, name.clone(), Some(bus.clone()));
        Ok(Peer { platform, name, ordinal: *ordinal, owner: 0, bus })
    }

    /// What the runtime says. It is for people only: several of these have never worked
    /// together, so [`Machine::enable_peer`] refuses.
    fn reaches(&self, other: &dyn Machine) -> Result<bool> {
        let (context, other) = (&self.context, other.peer()?);
        if other.platform != Platform::Hip || other.ordinal == context.ordinal {
            return Ok(other.platform == Platform::Hip);
        }
        context.runtime.reaches(&context.name, context.ordinal, other.ordinal)
    }

    fn launch(&self, module: &Arc<dyn Module>, launch: &Launch<'_>) -> Result<Box<dyn Flight>> {
        launch::launch(&self.context, module, launch)
    }
}
