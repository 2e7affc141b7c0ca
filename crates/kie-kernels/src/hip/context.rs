//! One device, its two streams, the pinned buffer of copies, and what must wait until no kernel
//! runs.
//!
//! Invariants: everything here that makes the runtime wait for a running kernel (freeing memory or
//! code) happens under the lock of [`Flights`] while none is active; a launch takes the same lock.
//! The device is this thread's current one only during a call, whichever thread makes it. The
//! pinned buffer is used under its lock, which is given back when no copy is under way.

use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::ffi::{self, Address, Handle};
use super::runtime::{index_of, Runtime};
use super::Paths;
use crate::error::{Error, Result};
use crate::kfd;

/// Bytes of the buffer that copies go through.
pub(super) const CHUNK_BYTES: usize = 4 << 20;

/// A device in use.
pub(super) struct Context {
    pub runtime: Runtime,
    pub ordinal: c_int,
    /// Such as `hip:0`.
    pub name: String,
    pub arch: String,
    pub multiprocessors: u32,
    /// Dies among which the grid's blocks are dealt out.
    pub chiplets: u32,
    /// PCI address.
    pub bus: String,
    /// Most shared memory of a block.
    pub shared_bytes: u32,
    /// Kernels, one after another.
    pub launches: Handle,
    /// Copies, beside the kernels.
    copies: Handle,
    buffer: Mutex<usize>,
    flights: Mutex<Flights>,
    /// How long the drop of a flight waits for its end.
    pub patience: Duration,
}

/// Kernels under way, and what is freed when there are none.
#[derive(Default)]
pub(super) struct Flights {
    pub active: usize,
    retired: Vec<Retired>,
}

/// What freeing would make the runtime wait.
pub(super) enum Retired {
    Device(Address),
    Host(usize),
    Code(Handle),
}

/// What goes to the device.
#[derive(Clone, Copy)]
pub(super) enum Fill<'a> {
    Bytes(&'a [u8]),
    Zeros(usize),
}

/// The device is this thread's current one while this lives.
pub(super) struct Current<'a>(&'a Context, c_int);

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if self.1 != self.0.ordinal {
            // SAFETY: an index that the runtime gave. Should it fail, our device stays current.
            let _ = unsafe { (self.0.runtime.api.hipSetDevice)(self.1) };
        }
    }
}

impl Context {
    pub fn open(name: &str, paths: &Paths) -> Result<Arc<Self>> {
        let index = index_of(name)?;
        let name = format!("hip:{index}");
        let runtime = Runtime::open(&paths.runtime, &name)?;
        let ordinal = runtime.find(&name, index)?;
        let arch = runtime.arch(&name, ordinal)?;
        let ask = |which| runtime.attribute(&name, ordinal, which).map(|n| n.max(0) as u32);
        let multiprocessors = ask(ffi::device_attribute::MULTIPROCESSORS)?;
        let shared_bytes = ask(ffi::device_attribute::SHARED_BYTES)?;
        let bus = runtime.bus(&name, ordinal)?;
        let node = kfd::gpus(&paths.nodes).into_iter().find(|node| node.bus == bus);
        let chiplets = node.map_or(1, |node| node.chiplets);
        let mut this = Self {
            runtime,
            ordinal,
            name,
            arch,
            multiprocessors,
            chiplets,
            bus,
            shared_bytes,
            launches: 0,
            copies: 0,
            buffer: Mutex::new(0),
            flights: Mutex::default(),
            patience: paths.patience,
        };
        this.launches = this.stream()?;
        this.copies = this.stream()?;
        // Made at once: pinning memory may wait for a running kernel.
        let buffer = this.pinned(CHUNK_BYTES)? as usize;
        this.buffer = Mutex::new(buffer);
        Ok(Arc::new(this))
    }

    /// Makes the device current on this thread.
    pub fn current(&self) -> Result<Current<'_>> {
        let mut before = 0;
        // SAFETY: a live integer.
        let code = unsafe { (self.runtime.api.hipGetDevice)(&mut before) };
        self.check("hipGetDevice", code)?;
        if before != self.ordinal {
            // SAFETY: an index below the count.
            let code = unsafe { (self.runtime.api.hipSetDevice)(self.ordinal) };
            self.check("hipSetDevice", code)?;
        }
        Ok(Current(self, before))
    }

    pub fn check(&self, call: &str, code: ffi::Code) -> Result<()> {
        self.runtime.check(&self.name, call, code)
    }

    fn stream(&self) -> Result<Handle> {
        let _current = self.current()?;
        let (mut stream, flags) = (0, ffi::STREAM_NON_BLOCKING);
        // SAFETY: a live handle; destroyed with `self`.
        let code = unsafe { (self.runtime.api.hipStreamCreateWithFlags)(&mut stream, flags) };
        self.check("hipStreamCreateWithFlags", code)?;
        Ok(stream)
    }

    pub fn event(&self) -> Result<Handle> {
        let _current = self.current()?;
        let (mut event, flags) = (0, ffi::EVENT_DISABLE_TIMING);
        // SAFETY: a live handle; its owner destroys it.
        let code = unsafe { (self.runtime.api.hipEventCreateWithFlags)(&mut event, flags) };
        self.check("hipEventCreateWithFlags", code)?;
        Ok(event)
    }

    pub fn destroy_event(&self, event: Handle) {
        if let Ok(_current) = self.current() {
            // SAFETY: made by `event`, given back once; what it marks may still run.
            let _ = unsafe { (self.runtime.api.hipEventDestroy)(event) };
        }
    }

    /// Pinned host memory that every device of the process reaches. Not zeroed.
    pub fn pinned(&self, bytes: usize) -> Result<*mut c_void> {
        const WHERE: &str = "host memory that the GPU reaches";
        let _current = self.current()?;
        let mut host = std::ptr::null_mut();
        let flags = ffi::HOST_PORTABLE_MAPPED_COHERENT;
        // SAFETY: a live pointer; its owner retires it.
        let code = unsafe { (self.runtime.api.hipHostMalloc)(&mut host, bytes, flags) };
        self.runtime.check_memory(WHERE, "hipHostMalloc", code, bytes)?;
        Ok(host)
    }

    /// Zeroes new memory. A kernel that runs may leave no room for the runtime's own kernel, so
    /// then zeros are copied.
    pub fn zero(&self, address: Address, bytes: usize) -> Result<()> {
        let flights = self.flights();
        if flights.active > 0 {
            drop(flights);
            return self.copy_in(address, Fill::Zeros(bytes));
        }
        let _current = self.current()?;
        // SAFETY: our own memory, not yet published.
        let code = unsafe { (self.runtime.api.hipMemsetD8Async)(address, 0, bytes, self.copies) };
        self.check("hipMemsetD8Async", code)?;
        self.wait_copies()
    }

    /// Copies to the device; when it returns the bytes are there.
    pub fn copy_in(&self, to: Address, fill: Fill<'_>) -> Result<()> {
        let buffer = self.buffer();
        let _current = self.current()?;
        let total = match fill {
            Fill::Bytes(bytes) => bytes.len(),
            Fill::Zeros(bytes) => bytes,
        };
        for at in (0..total).step_by(CHUNK_BYTES) {
            let len = CHUNK_BYTES.min(total - at);
            // SAFETY: so many pinned bytes; no copy out of them is under way, and the lock keeps
            // everybody else away.
            let room = unsafe { std::slice::from_raw_parts_mut(*buffer as *mut u8, len) };
            match fill {
                Fill::Bytes(bytes) => room.copy_from_slice(&bytes[at..at + len]),
                Fill::Zeros(_) => room.fill(0),
            }
            let (to, from) = (to + at as Address, *buffer as *const c_void);
            // SAFETY: the caller checked that `to` has room; the buffer stays as it is until the
            // copy has ended.
            let code = unsafe { (self.runtime.api.hipMemcpyHtoDAsync)(to, from, len, self.copies) };
            let started = self.check("hipMemcpyHtoDAsync", code);
            // Also after an error: the buffer must be free when the lock is.
            started.and(self.wait_copies())?;
        }
        Ok(())
    }

    /// Copies from the device.
    pub fn copy_out(&self, from: Address, out: &mut [u8]) -> Result<()> {
        let buffer = self.buffer();
        let _current = self.current()?;
        for (index, chunk) in out.chunks_mut(CHUNK_BYTES).enumerate() {
            let at = from + (index * CHUNK_BYTES) as Address;
            let (to, len) = (*buffer as *mut c_void, chunk.len());
            // SAFETY: the caller checked the source; the buffer is ours while the lock is.
            let code = unsafe { (self.runtime.api.hipMemcpyDtoHAsync)(to, at, len, self.copies) };
            let started = self.check("hipMemcpyDtoHAsync", code);
            started.and(self.wait_copies())?;
            // SAFETY: so many bytes of the buffer were just written, and nobody writes it now.
            chunk.copy_from_slice(unsafe { std::slice::from_raw_parts(*buffer as *const u8, len) });
        }
        Ok(())
    }

    /// Waits for the copies, not for kernels.
    fn wait_copies(&self) -> Result<()> {
        // SAFETY: our own stream.
        let code = unsafe { (self.runtime.api.hipStreamSynchronize)(self.copies) };
        self.check("hipStreamSynchronize", code)
    }

    fn buffer(&self) -> MutexGuard<'_, usize> {
        // A panic leaves the buffer as it is; it holds nothing between copies.
        self.buffer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn flights(&self) -> MutexGuard<'_, Flights> {
        // A panic under the lock leaves plain numbers, which are whole at every point.
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Frees now if no kernel runs, or else when the last one has ended.
    pub fn retire(&self, what: Retired) {
        let mut flights = self.flights();
        flights.retired.push(what);
        self.free_retired(&mut flights);
    }

    /// One kernel less is under way.
    pub fn landed(&self) {
        let mut flights = self.flights();
        flights.active -= 1;
        self.free_retired(&mut flights);
    }

    fn free_retired(&self, flights: &mut Flights) {
        if flights.active > 0 || flights.retired.is_empty() {
            return;
        }
        // Where it is not to be had now it may be with the next that is freed.
        let Ok(_current) = self.current() else { return };
        let api = &self.runtime.api;
        for what in flights.retired.drain(..) {
            // A failure means that the device is lost to this process, with all that is on it.
            let _ = match what {
                // SAFETY: allocated by us, given back once, and no kernel of ours runs.
                Retired::Device(address) => unsafe { (api.hipFree)(address) },
                // SAFETY: as above.
                Retired::Host(host) => unsafe { (api.hipHostFree)(host as *mut c_void) },
                // SAFETY: as above; the functions in it are used through its owner only.
                Retired::Code(module) => unsafe { (api.hipModuleUnload)(module) },
            };
        }
    }

    /// [`Error::Failed`] about a launch of `entry`.
    pub fn refuse(&self, entry: &str, detail: &str) -> Error {
        Error::Failed(format!("{}: launch of {entry}: {detail}", self.name))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // Flights own the context, so none is active.
        let buffer = *self.buffer();
        if buffer != 0 {
            self.retire(Retired::Host(buffer));
        }
        if let Ok(_current) = self.current() {
            for stream in [self.launches, self.copies].into_iter().filter(|&s| s != 0) {
                // SAFETY: ours, given back once.
                let _ = unsafe { (self.runtime.api.hipStreamDestroy)(stream) };
            }
        }
    }
}
