//! Loaded code and kernels under way.

use std::any::Any;
use std::ffi::{c_int, c_void, CString};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::context::{Context, Retired};
use super::ffi::{self, function_attribute, Handle};
use crate::error::{Error, Result};
use crate::mono::machine::{Flight, Launch, Module, Source};

/// What the driver says of one kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its name.
    pub name: &'static str,
    /// Registers of a thread.
    pub registers: u32,
    /// Local memory of a thread, in bytes: arrays and registers that did not fit.
    pub local_bytes: u32,
    /// Shared memory of a block besides what a launch asks for, in bytes.
    pub shared_bytes: u32,
    /// Most threads of a block.
    pub threads_max: u32,
    /// Size of its parameter.
    pub args_bytes: usize,
    function: Handle,
}

/// Code on the device.
pub struct CudaModule {
    context: Arc<Context>,
    handle: Handle,
    /// Its kernels, in the order of [`Source::entries`].
    pub entries: Vec<Entry>,
    /// The compiler's words, also when the code came from the cache.
    pub log: String,
    /// True if it came from the cache.
    pub cached: bool,
    /// What the user should know, such as a cache that cannot be written.
    pub notes: Vec<String>,
}

impl Module for CudaModule {
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for CudaModule {
    fn drop(&mut self) {
        self.context.retire(Retired::Code(self.handle));
    }
}

impl CudaModule {
    /// Loads all of `cubin` now: code that is loaded at its first launch would wait for a kernel
    /// that runs by then.
    pub(super) fn load(context: &Arc<Context>, cubin: &[u8], source: &Source) -> Result<Self> {
        let _current = context.current()?;
        let mut handle = 0;
        let none = std::ptr::null_mut;
        let image = cubin.as_ptr().cast();
        // SAFETY: the image is an ELF file, which tells its own length; no options.
        let code = unsafe {
            (context.driver.api.cuModuleLoadDataEx)(&mut handle, image, 0, none(), none().cast())
        };
        context.driver.check_memory(&context.name, "cuModuleLoadDataEx", code, cubin.len())?;
        let mut this = Self {
            context: context.clone(),
            handle,
            entries: Vec::with_capacity(source.entries.len()),
            log: String::new(),
            cached: false,
            notes: Vec::new(),
        };
        for name in &source.entries {
            let entry = this.find(name)?;
            this.entries.push(entry);
        }
        Ok(this)
    }

    fn find(&self, name: &'static str) -> Result<Entry> {
        let context = &self.context;
        let symbol = CString::new(name).map_err(|_| Error::Compile {
            arch: context.arch.clone(),
            detail: format!("a kernel's name with a zero byte: {name:?}"),
        })?;
        let mut function = 0;
        // SAFETY: the module is loaded, the name is a C string.
        let code = unsafe {
            (context.driver.api.cuModuleGetFunction)(&mut function, self.handle, symbol.as_ptr())
        };
        if code == ffi::NOT_FOUND {
            let detail = format!("the source has no extern \"C\" kernel {name}");
            return Err(Error::Compile { arch: context.arch.clone(), detail });
        }
        context.check("cuModuleGetFunction", code)?;
        let ask = |which| -> Result<u32> {
            let mut value = 0;
            // SAFETY: a live integer and function.
            let code =
                unsafe { (context.driver.api.cuFuncGetAttribute)(&mut value, which, function) };
            context.check("cuFuncGetAttribute", code)?;
            Ok(value.max(0) as u32)
        };
        Ok(Entry {
            name,
            registers: ask(function_attribute::REGISTERS)?,
            local_bytes: ask(function_attribute::LOCAL_BYTES)?,
            shared_bytes: ask(function_attribute::SHARED_BYTES)?,
            threads_max: ask(function_attribute::THREADS_MAX)?,
            args_bytes: self.args_bytes(name, function)?,
            function,
        })
    }

    /// Size of the one parameter, 0 if there is none.
    fn args_bytes(&self, name: &str, function: Handle) -> Result<usize> {
        let mut sizes = [None, None];
        for (index, size) in sizes.iter_mut().enumerate() {
            let (mut at, mut bytes) = (0, 0);
            // SAFETY: live integers; an index without a parameter is answered with an error.
            let code = unsafe {
                (self.context.driver.api.cuFuncGetParamInfo)(function, index, &mut at, &mut bytes)
            };
            if code != ffi::INVALID_VALUE {
                self.context.check("cuFuncGetParamInfo", code)?;
                *size = Some(bytes);
            }
        }
        if sizes[1].is_some() {
            let detail = format!("kernel {name} has several parameters; it may have one");
            return Err(Error::Compile { arch: self.context.arch.clone(), detail });
        }
        Ok(sizes[0].unwrap_or(0))
    }

    fn entry(&self, launch: &Launch<'_>) -> Result<&Entry> {
        let refuse = |detail: String| {
            Error::Failed(format!("{}: launch of {}: {detail}", self.context.name, launch.entry))
        };
        let entry = self.entries.iter().find(|entry| entry.name == launch.entry);
        let entry = entry.ok_or_else(|| {
            let names: Vec<_> = self.entries.iter().map(|entry| entry.name).collect();
            refuse(format!("the module has only {}", names.join(", ")))
        })?;
        if launch.args.len() != entry.args_bytes {
            let (wanted, got) = (entry.args_bytes, launch.args.len());
            return Err(refuse(format!("its parameter has {wanted} bytes, not {got}")));
        }
        if launch.blocks == 0 || launch.threads == 0 || launch.threads > entry.threads_max {
            return Err(refuse(format!(
                "{} blocks of {} threads; it takes 1 to {} threads",
                launch.blocks, launch.threads, entry.threads_max
            )));
        }
        Ok(entry)
    }
}

/// Starts a kernel of `module`, or refuses if not all its blocks can be resident.
pub(super) fn launch(
    context: &Arc<Context>,
    module: &Arc<dyn Module>,
    launch: &Launch<'_>,
) -> Result<Box<dyn Flight>> {
    let ours = module.as_any().downcast_ref::<CudaModule>();
    let ours = ours.filter(|ours| Arc::ptr_eq(&ours.context, context));
    let ours = ours.ok_or_else(|| {
        Error::Failed(format!("{}: the module belongs to another machine", context.name))
    })?;
    let entry = ours.entry(launch)?;
    let _current = context.current()?;
    make_room(context, entry, launch)?;
    let event = context.event()?;
    // Under the lock: no memory may be freed between the launch and its being counted.
    let mut flights = context.flights();
    let api = &context.driver.api;
    let mut args = [launch.args.as_ptr() as *mut c_void];
    // SAFETY: the function belongs to `module`, which the flight keeps; its one parameter has the
    // size of `args` (checked by `entry`) and is copied before the call returns.
    let code = unsafe {
        (api.cuLaunchCooperativeKernel)(
            entry.function,
            launch.blocks,
            1,
            1,
            launch.threads,
            1,
            1,
            launch.shared_bytes,
            context.launches,
            args.as_mut_ptr(),
        )
    };
    if code != ffi::SUCCESS {
        drop(flights);
        context.destroy_event(event);
        return Err(refused(context, launch, code));
    }
    flights.active += 1;
    drop(flights);
    let mut flight = CudaFlight {
        context: context.clone(),
        module: module.clone(),
        name: entry.name,
        event,
        state: State::Flying,
    };
    // SAFETY: our own event and stream.
    let code = unsafe { (api.cuEventRecord)(event, context.launches) };
    if code != ffi::SUCCESS {
        return Err(flight.lose(format!(
            "{}: {}",
            context.name,
            context.driver.words("cuEventRecord", code)
        )));
    }
    Ok(Box::new(flight))
}

/// Gives the function its shared memory and sees that all blocks fit at once.
fn make_room(context: &Context, entry: &Entry, launch: &Launch<'_>) -> Result<()> {
    let api = &context.driver.api;
    let most = function_attribute::DYNAMIC_SHARED_BYTES_MAX;
    let shared = launch.shared_bytes;
    // SAFETY: a live function; the driver refuses what the device does not have.
    let code = unsafe { (api.cuFuncSetAttribute)(entry.function, most, shared as c_int) };
    if code != ffi::SUCCESS {
        return Err(Error::Failed(format!(
            "{}: launch of {}: {shared} bytes of shared memory a block besides its own {}: {}",
            context.name,
            entry.name,
            entry.shared_bytes,
            context.driver.words("cuFuncSetAttribute", code)
        )));
    }
    let mut fit = 0;
    // SAFETY: a live integer and function.
    let code = unsafe {
        (api.cuOccupancyMaxActiveBlocksPerMultiprocessor)(
            &mut fit,
            entry.function,
            launch.threads as c_int,
            shared as usize,
        )
    };
    context.check("cuOccupancyMaxActiveBlocksPerMultiprocessor", code)?;
    let fit = fit.max(0) as u32;
    if launch.blocks > fit.saturating_mul(context.multiprocessors) {
        return Err(Error::Failed(format!(
            "{}: launch of {}: {} blocks of {} threads with {shared} bytes of shared memory, but \
             {fit} fit on each of {} multiprocessors",
            context.name, entry.name, launch.blocks, launch.threads, context.multiprocessors
        )));
    }
    Ok(())
}

fn refused(context: &Context, launch: &Launch<'_>, code: ffi::Code) -> Error {
    let words = context.driver.words("cuLaunchCooperativeKernel", code);
    Error::Failed(format!(
        "{}: launch of {} with {} blocks of {} threads and {} bytes of shared memory: {words}",
        context.name, launch.entry, launch.blocks, launch.threads, launch.shared_bytes
    ))
}

/// A kernel under way.
struct CudaFlight {
    context: Arc<Context>,
    module: Arc<dyn Module>,
    name: &'static str,
    event: Handle,
    state: State,
}

enum State {
    Flying,
    Landed,
    Lost(Error),
}

impl CudaFlight {
    /// The kernel's end will not be seen. What it may still use stays for good, as to free it would
    /// be to wait for it: the module, which holds the context, and (this flight being counted as
    /// active for ever) all memory.
    fn lose(&mut self, why: String) -> Error {
        let error = Error::Failed(why);
        if !matches!(self.state, State::Lost(_)) {
            std::mem::forget(self.module.clone());
        }
        self.state = State::Lost(error.clone());
        error
    }
}

impl Flight for CudaFlight {
    fn done(&mut self) -> Result<bool> {
        match &self.state {
            State::Landed => return Ok(true),
            State::Lost(error) => return Err(error.clone()),
            State::Flying => {}
        }
        let context = self.context.clone();
        let _current = context.current()?;
        // SAFETY: our own event, recorded behind the kernel.
        match unsafe { (context.driver.api.cuEventQuery)(self.event) } {
            ffi::NOT_READY => Ok(false),
            ffi::SUCCESS => {
                self.state = State::Landed;
                context.destroy_event(self.event);
                context.landed();
                Ok(true)
            }
            code => {
                let words = context.driver.words("cuEventQuery", code);
                Err(self.lose(format!("{}: {}: {words}", context.name, self.name)))
            }
        }
    }

    fn wait(&mut self) -> bool {
        let deadline = Instant::now() + self.context.patience;
        let mut rest = Duration::from_micros(10);
        while let Ok(false) = self.done() {
            if Instant::now() >= deadline {
                self.lose(format!("{}: {} does not end", self.context.name, self.name));
                return false;
            }
            std::thread::sleep(rest);
            rest = (2 * rest).min(Duration::from_millis(1));
        }
        // An error of `current` alone: the kernel's end was not seen either.
        if matches!(self.state, State::Flying) {
            self.lose(format!("{}: the context does not answer", self.context.name));
        }
        matches!(self.state, State::Landed)
    }
}

impl Drop for CudaFlight {
    fn drop(&mut self) {
        self.wait();
    }
}
