//! GPUs: [`Machine`] over a driver and its run-time compiler, both found at run time; nothing of
//! either is needed to build. Memory, copies, modules, launches and what must wait for them are
//! written once, over what drivers have in common ([`api`]); `cuda` and `hip` hold their symbols
//! and all in which they differ.
//!
//! # What waits for a running kernel
//! A persistent kernel never ends by itself, so what waits for it may wait for ever. `write`,
//! `read`, `info` and `launch` (which queues) do not. Freed memory and code is kept until no
//! kernel of this machine runs, because the driver's own calls wait for the device. `compile`
//! (which loads the code), `alloc` and `alloc_shared` should come before the launch: they do not
//! wait by themselves, but the driver may.

pub mod api;
mod context;
mod launch;
pub mod rtc;
mod staging;

use std::ffi::c_void;
use std::sync::{Arc, OnceLock};

use self::api::{Address, Api, Ipc, Paths};
use self::context::{Context, Retired};
pub use self::launch::{Entry, GpuModule};
use self::rtc::{Compiled, Compiler};
use self::staging::{CopyPlan, Fill};
use crate::error::{Error, Result};
use crate::machine::handle::{Handle, HandleFault};
use crate::machine::{
    Flight, Launch, Machine, MachineInfo, Memory, Module, Peer, Platform, Shared, Source,
};

/// One GPU.
pub struct GpuMachine<A: Api> {
    context: Arc<Context<A>>,
    paths: Paths,
    /// Loaded when first needed: it is a hundred megabytes.
    compiler: OnceLock<Result<Compiler>>,
}

/// Device memory of ours, or another process's that we opened.
struct Block<A: Api> {
    context: Arc<Context<A>>,
    address: Address,
    bytes: usize,
    opened: bool,
}

impl<A: Api> Drop for Block<A> {
    fn drop(&mut self) {
        let retired = if self.opened { Retired::Opened } else { Retired::Device };
        self.context.retire(retired(self.address));
    }
}

/// Pinned host memory of ours.
struct Pinned<A: Api> {
    context: Arc<Context<A>>,
    host: usize,
}

impl<A: Api> Drop for Pinned<A> {
    fn drop(&mut self) {
        self.context.retire(Retired::Host(self.host));
    }
}

impl<A: Api> GpuMachine<A> {
    /// The GPU of this name.
    ///
    /// # Errors
    /// [`Error::NoDevice`] with what is missing and what to do about it.
    pub fn open(name: &str, paths: &Paths) -> Result<Self> {
        let context = Context::open(name, paths)?;
        Ok(Self { context, paths: paths.clone(), compiler: OnceLock::new() })
    }

    fn compiler(&self) -> Result<&Compiler> {
        let open = || self.context.api.compiler(&self.paths, &self.context.name);
        self.compiler.get_or_init(open).as_ref().map_err(Clone::clone)
    }

    /// The address of `bytes` bytes at `offset`, if they are ours.
    fn inside(&self, memory: &Memory, offset: usize, bytes: usize) -> Result<Address> {
        let fault = |why: &str| {
            Error::Failed(format!(
                "{}: {bytes} bytes at {offset} of {} bytes of memory: {why}",
                self.context.name, memory.bytes
            ))
        };
        let block = memory.owner.downcast_ref::<Block<A>>();
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

    /// Zeroes new memory. A kernel that runs may leave no room for the driver's own kernel, so then
    /// zeros are copied.
    fn zero(&self, address: Address, bytes: usize) -> Result<()> {
        let context = &self.context;
        let flights = context.flights();
        if flights.active > 0 {
            drop(flights);
            return context.copy_in(Fill::Zeros(address, bytes));
        }
        let _current = context.current()?;
        let fill = &context.api.calls().fill;
        // SAFETY: our own memory, not yet published.
        context.check(fill.with(|f| unsafe { f(address, 0, bytes, context.copies) }))?;
        context.wait_copies()
    }

    /// From the cache or from the compiler; with notes for the user.
    fn code(&self, source: &Source) -> Result<(Compiled, bool, Vec<String>)> {
        let (compiler, arch) = (self.compiler()?, &self.context.arch);
        let key = compiler.key(source, arch, self.context.api.code_version());
        if let Some(kept) = self.paths.cache.get(key).and_then(|entry| compiler.kept(&entry)) {
            return Ok((kept, true, Vec::new()));
        }
        let compiled = compiler.compile(source, arch)?;
        let kept = self.paths.cache.put(key, &compiled.to_entry());
        Ok((compiled, false, kept.err().into_iter().collect()))
    }

    fn handle_fault(&self, fault: HandleFault) -> Error {
        Error::Handle { device: self.context.name.clone(), fault }
    }

    /// What opens other processes' memory.
    fn ipc(&self) -> std::result::Result<&dyn Ipc, &'static str> {
        self.context.api.ipc().ok_or("devices of this kind hand out none and open none")
    }
}

impl<A: Api> Machine for GpuMachine<A> {
    fn platform(&self) -> Platform {
        A::PLATFORM
    }

    fn warp(&self) -> u32 {
        A::WARP
    }

    fn info(&self) -> Result<MachineInfo> {
        let context = &self.context;
        let _current = context.current()?;
        let [free, total] = context.check(context.api.memory(context.ordinal))?;
        Ok(MachineInfo {
            name: context.name.clone(),
            model: context.api.model(&context.name, context.ordinal)?,
            arch: context.arch.clone(),
            multiprocessors: context.facts.multiprocessors,
            chiplets: context.facts.chiplets,
            shared_bytes: context.facts.shared_bytes.saturating_sub(A::PLATFORM_SHARED_BYTES),
            memory_bytes: total as u64,
            free_bytes: free as u64,
        })
    }

    fn compile(&self, source: &Source) -> Result<Arc<dyn Module>> {
        let (compiled, cached, notes) = self.code(source)?;
        let mut module = GpuModule::load(&self.context, &compiled, source)?;
        (module.cached, module.notes) = (cached, notes);
        Ok(Arc::new(module))
    }

    fn alloc(&self, bytes: usize) -> Result<Memory> {
        let context = &self.context;
        let room = bytes.max(1).next_multiple_of(256);
        let mut address = 0;
        {
            let _current = context.current()?;
            // SAFETY: a live integer; `Block` frees it.
            let answer = context.api.calls().alloc.with(|f| unsafe { f(&mut address, room) });
            context.api.check_memory(&context.name, room, answer)?;
        }
        let block = Block { context: context.clone(), address, bytes: room, opened: false };
        self.zero(address, room)?;
        Ok(Memory { address, bytes, owner: Arc::new(block) })
    }

    fn export(&self, memory: &Memory) -> Result<Handle> {
        let private = |why: String| self.handle_fault(HandleFault::Private(why));
        let ipc = self.ipc().map_err(|why| private(why.to_owned()))?;
        self.inside(memory, 0, memory.bytes)?;
        let block = memory.owner.downcast_ref::<Block<A>>();
        if block.is_none_or(|block| block.opened || block.address != memory.address) {
            return Err(private("it is a part, or another process's".to_owned()));
        }
        let _current = self.context.current()?;
        let token = ipc.export(memory.address);
        let token = token.map_err(|fault| private(self.context.api.words(fault)))?;
        let (process, bytes) = (std::process::id(), memory.bytes as u64);
        Ok(Handle { platform: A::PLATFORM, process, bytes, token })
    }

    fn import(&self, handle: &Handle, bytes: usize) -> Result<Memory> {
        let context = &self.context;
        handle.check(A::PLATFORM, bytes).map_err(|fault| self.handle_fault(fault))?;
        let ipc = self.ipc().map_err(|why| self.handle_fault(handle.stale(why)))?;
        if handle.token.len() != ipc.token_bytes() {
            return Err(self.handle_fault(HandleFault::Garbled(handle.token.len())));
        }
        let address = {
            let _current = context.current()?;
            ipc.import(&handle.token).or_else(|fault| match ipc.is_stale(fault.code) {
                true => Err(self.handle_fault(handle.stale(context.api.words(fault)))),
                false => context.check(Err(fault)),
            })?
        };
        let block = Block { context: context.clone(), address, bytes, opened: true };
        Ok(Memory { address, bytes, owner: Arc::new(block) })
    }

    fn alloc_shared(&self, bytes: usize) -> Result<Shared> {
        let context = &self.context;
        let room = bytes.max(1).next_multiple_of(64);
        let host = context.pinned(room)?;
        let owner = Arc::new(Pinned { context: context.clone(), host: host as usize });
        // SAFETY: so many bytes, not yet published.
        unsafe { std::ptr::write_bytes(host.cast::<u8>(), 0, room) };
        let _current = context.current()?;
        let mut address = 0;
        // SAFETY: a live integer, memory that was allocated mapped; no flags are defined.
        let told = context.api.calls().host_address.with(|f| unsafe { f(&mut address, host, 0) });
        context.check(told)?;
        if !(host as usize).is_multiple_of(64) {
            let detail = format!("{}: pinned memory is not aligned", context.name);
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
        let plan = CopyPlan::new(&pieces, A::STAGING.chunk_bytes);
        self.context.copy_in(Fill::Pieces(&plan))
    }

    fn read(&self, from: &Memory, offset: usize, out: &mut [u8]) -> Result<()> {
        let address = self.inside(from, offset, out.len())?;
        self.context.copy_out(address, out)
    }

    fn launch(&self, module: &Arc<dyn Module>, launch: &Launch<'_>) -> Result<Box<dyn Flight>> {
        launch::launch(&self.context, module, launch)
    }

    fn peer(&self) -> Result<Peer> {
        let Context { api, name, ordinal, owner, .. } = &*self.context;
        let bus = Some(api.bus(name, *ordinal)?);
        let (platform, name) = (A::PLATFORM, name.clone());
        Ok(Peer { platform, name, ordinal: *ordinal, owner: *owner, bus })
    }

    /// What the driver says, whether or not [`Machine::enable_peer`] makes use of it.
    fn reaches(&self, other: &dyn Machine) -> Result<bool> {
        let (context, other) = (&self.context, other.peer()?);
        if other.platform != A::PLATFORM || other.ordinal == context.ordinal {
            return Ok(other.platform == A::PLATFORM);
        }
        context.api.can_access(&context.name, context.ordinal, other.ordinal)
    }

    fn enable_peer(&self, other: &dyn Machine) -> Result<()> {
        let context = &self.context;
        if !self.reaches(other)? {
            return Err(self.peer()?.refuse(&other.peer()?, A::NO_PEER));
        }
        let other = other.peer()?;
        if other.ordinal == context.ordinal {
            return Ok(());
        }
        let _current = context.current()?;
        match context.api.enable_peer(other.owner) {
            Some(answer) => context.check(answer),
            None => Err(self.peer()?.refuse(&other, A::NO_PEER)),
        }
    }
}
