//! One device's primary context, its two streams, and what must wait until no kernel runs.
//!
//! Invariants: everything here that makes the driver wait for a running kernel (freeing memory or
//! code) happens under the lock of [`Flights`] while none is active; a launch takes the same lock.
//! The context is the device's primary one, so that other libraries' memory is valid beside ours,
//! and it is current only during a call, whichever thread makes it.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::driver::{index_of, Driver};
use super::ffi::{self, device_attribute, Address, Handle, Ordinal};
use super::staging::Staging;
use super::Paths;
use crate::error::{Error, Result};

/// A device in use.
pub(super) struct Context {
    pub driver: Driver,
    pub ordinal: Ordinal,
    /// Such as `cuda:0`.
    pub name: String,
    pub arch: String,
    pub multiprocessors: u32,
    context: Handle,
    /// Kernels, one after another.
    pub launches: Handle,
    /// Copies, beside the kernels.
    pub copies: Handle,
    pub staging: Mutex<Staging>,
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

/// What freeing would make the driver wait.
pub(super) enum Retired {
    Device(Address),
    Opened(Address),
    Host(usize),
    Code(Handle),
}

/// The context is this thread's current one while this lives.
pub(super) struct Current<'a>(&'a Context);

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let mut ours = 0;
        // SAFETY: takes back what `Context::current` pushed on this thread.
        let _ = unsafe { (self.0.driver.api.cuCtxPopCurrent_v2)(&mut ours) };
    }
}

impl Context {
    pub fn open(name: &str, paths: &Paths) -> Result<Arc<Self>> {
        let index = index_of(name)?;
        let name = format!("cuda:{index}");
        let driver = Driver::open(&paths.driver, &name)?;
        let ordinal = driver.device(&name, index)?;
        let arch = driver.arch(&name, ordinal)?;
        let multiprocessors =
            driver.attribute(&name, ordinal, device_attribute::MULTIPROCESSORS)?.max(0) as u32;
        let mut context = 0;
        // SAFETY: a live handle; released when `Self` goes, which from here on owns it.
        let code = unsafe { (driver.api.cuDevicePrimaryCtxRetain)(&mut context, ordinal) };
        if code != ffi::SUCCESS {
            let detail = driver.words("cuDevicePrimaryCtxRetain", code);
            return Err(Error::NoDevice { device: name, detail });
        }
        let mut this = Self {
            driver,
            ordinal,
            name,
            arch,
            multiprocessors,
            context,
            launches: 0,
            copies: 0,
            staging: Mutex::default(),
            flights: Mutex::default(),
            patience: paths.patience,
        };
        this.launches = this.stream()?;
        this.copies = this.stream()?;
        let staging = Staging::new(&this)?;
        this.staging = Mutex::new(staging);
        Ok(Arc::new(this))
    }

    /// Makes the context current on this thread.
    pub fn current(&self) -> Result<Current<'_>> {
        // SAFETY: the context is retained while `self` lives; `Current` pops it.
        let code = unsafe { (self.driver.api.cuCtxPushCurrent_v2)(self.context) };
        self.check("cuCtxPushCurrent", code)?;
        Ok(Current(self))
    }

    /// What other devices call it by.
    pub fn handle(&self) -> Handle {
        self.context
    }

    pub fn check(&self, call: &str, code: ffi::Code) -> Result<()> {
        self.driver.check(&self.name, call, code)
    }

    fn stream(&self) -> Result<Handle> {
        let _current = self.current()?;
        let mut stream = 0;
        // SAFETY: a live handle; destroyed with `self`.
        let code =
            unsafe { (self.driver.api.cuStreamCreate)(&mut stream, ffi::STREAM_NON_BLOCKING) };
        self.check("cuStreamCreate", code)?;
        Ok(stream)
    }

    pub fn event(&self) -> Result<Handle> {
        let _current = self.current()?;
        let mut event = 0;
        // SAFETY: a live handle; its owner destroys it.
        let code =
            unsafe { (self.driver.api.cuEventCreate)(&mut event, ffi::EVENT_DISABLE_TIMING) };
        self.check("cuEventCreate", code)?;
        Ok(event)
    }

    pub fn destroy_event(&self, event: Handle) {
        if let Ok(_current) = self.current() {
            // SAFETY: made by `event`, given back once; what it marks may still run.
            let _ = unsafe { (self.driver.api.cuEventDestroy_v2)(event) };
        }
    }

    /// Waits for the copies, not for kernels.
    pub fn wait_copies(&self) -> Result<()> {
        // SAFETY: our own stream.
        let code = unsafe { (self.driver.api.cuStreamSynchronize)(self.copies) };
        self.check("cuStreamSynchronize", code)
    }

    /// Pinned host memory that every context and device of the process reaches. Not zeroed.
    pub fn pinned(&self, bytes: usize) -> Result<*mut c_void> {
        let _current = self.current()?;
        let mut host = std::ptr::null_mut();
        let flags = ffi::HOST_PORTABLE_MAPPED;
        // SAFETY: a live pointer; its owner retires it.
        let code = unsafe { (self.driver.api.cuMemHostAlloc)(&mut host, bytes, flags) };
        self.driver.check_memory(
            "host memory that the GPU reaches",
            "cuMemHostAlloc",
            code,
            bytes,
        )?;
        Ok(host)
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
        let api = &self.driver.api;
        for what in flights.retired.drain(..) {
            // A failure means that the context is gone, and all of it is freed with it.
            let _ = match what {
                // SAFETY: allocated by us, given back once, and no kernel of ours runs.
                Retired::Device(address) => unsafe { (api.cuMemFree_v2)(address) },
                // SAFETY: opened by us, given back once, and no kernel of ours runs.
                Retired::Opened(address) => unsafe { (api.cuIpcCloseMemHandle)(address) },
                // SAFETY: as above.
                Retired::Host(host) => unsafe { (api.cuMemFreeHost)(host as *mut c_void) },
                // SAFETY: as above; the functions in it are used through its owner only.
                Retired::Code(module) => unsafe { (api.cuModuleUnload)(module) },
            };
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // Flights own the context, so none is active.
        let staging = self.staging.get_mut().unwrap_or_else(PoisonError::into_inner);
        let staging = std::mem::take(staging);
        staging.free(self);
        if let Ok(_current) = self.current() {
            for stream in [self.launches, self.copies].into_iter().filter(|&s| s != 0) {
                // SAFETY: ours, given back once.
                let _ = unsafe { (self.driver.api.cuStreamDestroy_v2)(stream) };
            }
        }
        // SAFETY: retained once by `open`.
        let _ = unsafe { (self.driver.api.cuDevicePrimaryCtxRelease_v2)(self.ordinal) };
    }
}
