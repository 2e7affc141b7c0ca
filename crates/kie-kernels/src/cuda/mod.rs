//! NVIDIA GPUs: [`Machine`] over the CUDA driver and NVRTC, both found at run time; nothing of CUDA
//! is needed to build.
//!
//! # What waits for a running kernel
//! A persistent kernel never ends by itself, so what waits for it may wait for ever. `write`,
//! `read`, `info` and `launch` (which queues) do not. Freed memory and code is kept until no
//! kernel of this machine runs. `compile` (which loads the code), `alloc` and `alloc_shared` should
//! come before the launch: they do not wait by themselves, but the driver may.

mod context;
mod driver;
mod ffi;
mod launch;
pub mod nvrtc;
mod peer;
mod staging;
#[cfg(test)]
mod tests;

use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use self::context::{Context, Retired};
use self::driver::Driver;
use self::ffi::{device_attribute, Address};
pub use self::launch::{CudaModule, Entry};
use self::nvrtc::{compile_source, Compiled, Nvrtc};
use self::staging::Fill;
use crate::error::{Error, Result};
use crate::mono::cache::Cache;
use crate::mono::handle::{Handle, HandleFault};
use crate::mono::machine::{
    Flight, Launch, Machine, MachineInfo, Memory, Module, Peer, Platform, Shared, Source,
};

/// Where things are, apart so that tests can put others in their place.
#[derive(Debug, Clone)]
struct Paths {
    driver: PathBuf,
    /// In the order in which they are tried.
    nvrtc: Vec<PathBuf>,
    cache: Cache,
    /// How long the drop of a flight waits for its end.
    patience: Duration,
}

impl Paths {
    fn usual(nvrtc_dirs: &[PathBuf]) -> Self {
        Self::keeping(nvrtc_dirs, None)
    }

    /// With compiled kernels in `cache_dir`.
    fn keeping(nvrtc_dirs: &[PathBuf], cache_dir: Option<&Path>) -> Self {
        Self {
            driver: "libcuda.so.1".into(),
            nvrtc: nvrtc::candidates(nvrtc_dirs),
            cache: cache_dir.map_or_else(Cache::usual, Cache::at),
            patience: Duration::from_secs(10),
        }
    }
}

/// Opens `cuda` (the first) or `cuda:N`. `nvrtc_dirs` are further folders in which NVRTC may lie,
/// `cache_dir` is where compiled kernels are kept.
///
/// # Errors
/// [`Error::NoDevice`] with what is missing and what to do about it.
pub fn open(
    name: &str,
    nvrtc_dirs: &[PathBuf],
    cache_dir: Option<&Path>,
) -> Result<Arc<dyn Machine>> {
    Ok(Arc::new(Cuda::open(name, &Paths::keeping(nvrtc_dirs, cache_dir))?))
}

/// How many GPUs the driver sees.
///
/// # Errors
/// [`Error::NoDevice`] where there is no driver, or none that will do.
pub fn count() -> Result<u32> {
    Driver::open(&Paths::usual(&[]).driver, "cuda")?.count("cuda")
}

/// One GPU.
struct Cuda {
    context: Arc<Context>,
    paths: Paths,
    /// Loaded when first needed: it is a hundred megabytes.
    nvrtc: OnceLock<Result<Nvrtc>>,
}

/// Device memory of ours, or another process's that we opened.
struct Block {
    context: Arc<Context>,
    address: Address,
    bytes: usize,
    opened: bool,
}

impl Drop for Block {
    fn drop(&mut self) {
        let retired = if self.opened { Retired::Opened } else { Retired::Device };
        self.context.retire(retired(self.address));
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

impl Cuda {
    fn open(name: &str, paths: &Paths) -> Result<Self> {
        let context = Context::open(name, paths)?;
        Ok(Self { context, paths: paths.clone(), nvrtc: OnceLock::new() })
    }

    fn nvrtc(&self) -> Result<&Nvrtc> {
        let newest = self.context.driver.version / 1000;
        let found = self.nvrtc.get_or_init(|| Nvrtc::open(&self.paths.nvrtc, Some(newest)));
        found.as_ref().map_err(|error| match error {
            Error::BackendMissing { detail, .. } => {
                Error::BackendMissing { device: self.context.name.clone(), detail: detail.clone() }
            }
            other => other.clone(),
        })
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
        let end = |at: usize, len: usize| at.checked_add(len);
        let within = end(offset, bytes).is_some_and(|end| end <= memory.bytes);
        let base = memory.address.checked_sub(block.address).map(|base| base as usize);
        let part = base.and_then(|base| end(base, memory.bytes)).is_some_and(|e| e <= block.bytes);
        if !within || !part {
            return Err(fault("outside of it"));
        }
        Ok(memory.address + offset as Address)
    }

    /// Zeroes new memory. A kernel that runs may leave no room for the driver's own kernel, so then
    /// zeros are copied.
    fn zero(&self, address: Address, bytes: usize) -> Result<()> {
        let flights = self.context.flights();
        if flights.active > 0 {
            drop(flights);
            return self.context.copy_in(Fill::Zeros(address, bytes));
        }
        let _current = self.context.current()?;
        let (api, stream) = (&self.context.driver.api, self.context.copies);
        // SAFETY: our own memory, not yet published.
        let code = unsafe { (api.cuMemsetD8Async)(address, 0, bytes, stream) };
        self.context.check("cuMemsetD8Async", code)?;
        self.context.wait_copies()
    }

    /// From the cache or from the compiler; with notes for the user.
    fn code(&self, source: &Source) -> Result<(Compiled, bool, Vec<String>)> {
        let nvrtc = self.nvrtc()?;
        let key = nvrtc.key(source, &self.context.arch);
        if let Some(kept) = self.paths.cache.get(key).and_then(|entry| unpack(&entry)) {
            return Ok((kept, true, Vec::new()));
        }
        let compiled = compile_source(nvrtc, source, &self.context.arch)?;
        let kept = self.paths.cache.put(key, &pack(&compiled));
        Ok((compiled, false, kept.err().into_iter().collect()))
    }
}

/// An entry of the cache: length of the log, log, cubin.
fn pack(compiled: &Compiled) -> Vec<u8> {
    let length = (compiled.log.len() as u64).to_le_bytes();
    [&length[..], compiled.log.as_bytes(), &compiled.cubin].concat()
}

fn unpack(entry: &[u8]) -> Option<Compiled> {
    let (length, rest) = entry.split_first_chunk::<8>()?;
    let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
    let (log, cubin) = rest.split_at_checked(length)?;
    Some(Compiled { cubin: cubin.to_vec(), log: String::from_utf8(log.to_vec()).ok()? })
}

impl Machine for Cuda {
    fn platform(&self) -> Platform {
        Platform::Cuda
    }

    fn info(&self) -> Result<MachineInfo> {
        let context = &self.context;
        let (driver, name, ordinal) = (&context.driver, &context.name, context.ordinal);
        let shared = driver.attribute(name, ordinal, device_attribute::SHARED_BYTES_OPT_IN)?;
        let _current = context.current()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: two live integers.
        let code = unsafe { (driver.api.cuMemGetInfo_v2)(&mut free, &mut total) };
        context.check("cuMemGetInfo", code)?;
        // SAFETY: a live integer.
        let code = unsafe { (driver.api.cuDeviceTotalMem_v2)(&mut total, ordinal) };
        context.check("cuDeviceTotalMem", code)?;
        Ok(MachineInfo {
            name: name.clone(),
            model: driver.model(name, ordinal)?,
            arch: context.arch.clone(),
            multiprocessors: context.multiprocessors,
            chiplets: 1,
            shared_bytes: shared.max(0) as u32,
            memory_bytes: total as u64,
            free_bytes: free as u64,
        })
    }

    fn compile(&self, source: &Source) -> Result<Arc<dyn Module>> {
        let (compiled, cached, notes) = self.code(source)?;
        let mut module = CudaModule::load(&self.context, &compiled.cubin, source)?;
        (module.log, module.cached, module.notes) = (compiled.log, cached, notes);
        Ok(Arc::new(module))
    }

    fn alloc(&self, bytes: usize) -> Result<Memory> {
        let room = bytes.max(1).next_multiple_of(256);
        let mut address = 0;
        {
            let _current = self.context.current()?;
            // SAFETY: a live integer; `Block` frees it.
            let code = unsafe { (self.context.driver.api.cuMemAlloc_v2)(&mut address, room) };
            self.context.driver.check_memory(&self.context.name, "cuMemAlloc", code, room)?;
        }
        let context = self.context.clone();
        let block = Block { context, address, bytes: room, opened: false };
        self.zero(address, room)?;
        Ok(Memory { address, bytes, owner: Arc::new(block) })
    }

    fn export(&self, memory: &Memory) -> Result<Handle> {
        self.inside(memory, 0, memory.bytes)?;
        let block = memory.owner.downcast_ref::<Block>();
        if block.is_none_or(|block| block.opened || block.address != memory.address) {
            let fault = HandleFault::Private("it is a part, or another process's".to_owned());
            return Err(Error::Handle { device: self.context.name.clone(), fault });
        }
        self.context.export(memory.address, memory.bytes)
    }

    fn import(&self, handle: &Handle, bytes: usize) -> Result<Memory> {
        let address = self.context.import(handle, bytes)?;
        let context = self.context.clone();
        let block = Block { context, address, bytes, opened: true };
        Ok(Memory { address, bytes, owner: Arc::new(block) })
    }

    fn alloc_shared(&self, bytes: usize) -> Result<Shared> {
        let room = bytes.max(1).next_multiple_of(64);
        let host = self.context.pinned(room)?;
        let owner = Arc::new(Pinned { context: self.context.clone(), host: host as usize });
        // SAFETY: so many bytes, not yet published.
        unsafe { std::ptr::write_bytes(host.cast::<u8>(), 0, room) };
        let _current = self.context.current()?;
        let mut address = 0;
        let api = &self.context.driver.api;
        // SAFETY: a live integer, memory that was allocated mapped; no flags are defined.
        let code = unsafe { (api.cuMemHostGetDevicePointer_v2)(&mut address, host, 0) };
        self.context.check("cuMemHostGetDevicePointer", code)?;
        if !(host as usize).is_multiple_of(64) {
            let detail = format!("{}: pinned memory is not aligned", self.context.name);
            return Err(Error::Failed(detail));
        }
        let host: *const c_void = host;
        // SAFETY: zeroed and aligned above, lives as long as `owner`, and has no other user.
        Ok(unsafe { Shared::new(address, host.cast(), bytes, owner) })
    }

    fn write(&self, to: &Memory, offset: usize, bytes: &[u8]) -> Result<()> {
        self.write_all(to, &[(offset, bytes)])
    }

    fn write_all(&self, to: &Memory, pieces: &[(usize, &[u8])]) -> Result<()> {
        let places = pieces.iter().map(|(offset, bytes)| {
            let address = self.inside(to, *offset, bytes.len())?;
            Ok((address, *bytes))
        });
        let pieces = places.collect::<Result<Vec<_>>>()?;
        self.context.copy_in(Fill::Pieces(&staging::Cut::new(&pieces)))
    }

    fn read(&self, from: &Memory, offset: usize, out: &mut [u8]) -> Result<()> {
        let address = self.inside(from, offset, out.len())?;
        self.context.copy_out(address, out)
    }

    fn launch(&self, module: &Arc<dyn Module>, launch: &Launch<'_>) -> Result<Box<dyn Flight>> {
        launch::launch(&self.context, module, launch)
    }

    fn peer(&self) -> Result<Peer> {
        self.context.peer()
    }

    fn reaches(&self, other: &dyn Machine) -> Result<bool> {
        self.context.reaches(&other.peer()?)
    }

    fn enable_peer(&self, other: &dyn Machine) -> Result<()> {
        self.context.enable_peer(&other.peer()?)
    }
}
