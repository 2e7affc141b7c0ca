//! Loaded code and kernels under way.

use std::any::Any;
use std::ffi::{c_int, c_void, CString};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::code_object::Kernel;
use super::context::{Context, Retired};
use super::ffi::{self, Handle};
use super::hiprtc::Compiled;
use crate::error::{Error, Result};
use crate::mono::machine::{Flight, Launch, Module, Source};

/// Code on the device.
pub struct HipModule {
    context: Arc<Context>,
    handle: Handle,
    entries: Vec<Entry>,
    /// The compiler's words, also when the code came from the cache.
    pub log: String,
    /// True if it came from the cache.
    pub cached: bool,
    /// What the user should know, such as a cache that cannot be written.
    pub notes: Vec<String>,
}

/// One kernel of a module.
struct Entry {
    name: &'static str,
    kernel: Kernel,
    args_bytes: usize,
    function: Handle,
}

impl Module for HipModule {
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for HipModule {
    fn drop(&mut self) {
        self.context.retire(Retired::Code(self.handle));
    }
}

impl HipModule {
    /// Loads all of the code now, before a kernel runs that loading would wait for.
    pub(super) fn load(
        context: &Arc<Context>,
        compiled: &Compiled,
        source: &Source,
    ) -> Result<Self> {
        let _current = context.current()?;
        let (mut handle, image) = (0, compiled.code.as_ptr().cast());
        // SAFETY: the image is an ELF file (it was read as one), which tells its own length.
        let code = unsafe { (context.runtime.api.hipModuleLoadData)(&mut handle, image) };
        let bytes = compiled.code.len();
        context.runtime.check_memory(&context.name, "hipModuleLoadData", code, bytes)?;
        let mut this = Self {
            context: context.clone(),
            handle,
            entries: Vec::with_capacity(source.entries.len()),
            log: compiled.log.clone(),
            cached: false,
            notes: Vec::new(),
        };
        for name in &source.entries {
            let entry = this.find(name, &compiled.kernels)?;
            this.entries.push(entry);
        }
        Ok(this)
    }

    /// What the compiler said of the kernels, in the order of [`Source::entries`].
    pub fn kernels(&self) -> impl Iterator<Item = &Kernel> {
        self.entries.iter().map(|entry| &entry.kernel)
    }

    fn find(&self, name: &'static str, kernels: &[Kernel]) -> Result<Entry> {
        let context = &self.context;
        let refuse = |detail| Error::Compile { arch: context.arch.clone(), detail };
        let missing = || refuse(format!("the source has no extern \"C\" kernel {name}"));
        let symbol = CString::new(name)
            .map_err(|_| refuse(format!("a kernel's name with a zero byte: {name:?}")))?;
        let kernel = kernels.iter().find(|kernel| kernel.name == name).ok_or_else(missing)?;
        let args_bytes = match kernel.args_bytes[..] {
            [] => 0,
            [bytes] => bytes,
            _ => {
                let detail = format!("kernel {name} has several parameters; it may have one");
                return Err(refuse(detail));
            }
        };
        let mut function = 0;
        // SAFETY: the module is loaded, the name is a C string.
        let code = unsafe {
            (context.runtime.api.hipModuleGetFunction)(&mut function, self.handle, symbol.as_ptr())
        };
        if code == ffi::NOT_FOUND {
            return Err(missing());
        }
        context.check("hipModuleGetFunction", code)?;
        Ok(Entry { name, kernel: kernel.clone(), args_bytes, function })
    }

    fn entry(&self, launch: &Launch<'_>) -> Result<&Entry> {
        let refuse = |detail: String| self.context.refuse(launch.entry, &detail);
        let entry = self.entries.iter().find(|entry| entry.name == launch.entry);
        let entry = entry.ok_or_else(|| {
            let names: Vec<_> = self.entries.iter().map(|entry| entry.name).collect();
            refuse(format!("the module has only {}", names.join(", ")))
        })?;
        if launch.args.len() != entry.args_bytes {
            let (wanted, got) = (entry.args_bytes, launch.args.len());
            return Err(refuse(format!("its parameter has {wanted} bytes, not {got}")));
        }
        let most = entry.kernel.threads_max;
        if launch.blocks == 0 || launch.threads == 0 || launch.threads > most {
            return Err(refuse(format!(
                "{} blocks of {} threads; it takes 1 to {most} threads",
                launch.blocks, launch.threads
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
    let ours = module.as_any().downcast_ref::<HipModule>();
    let ours = ours.filter(|ours| Arc::ptr_eq(&ours.context, context));
    let ours =
        ours.ok_or_else(|| context.refuse(launch.entry, "the module belongs to another machine"))?;
    let entry = ours.entry(launch)?;
    let _current = context.current()?;
    see_room(context, entry, launch)?;
    let event = context.event()?;
    // Under the lock: no memory may be freed between the launch and its being counted.
    let mut flights = context.flights();
    let mut args = [launch.args.as_ptr() as *mut c_void];
    // SAFETY: the function belongs to `module`, which the flight keeps; its one parameter has the
    // size of `args` (checked by `entry`) and is copied before the call returns.
    let code = unsafe {
        (context.runtime.api.hipModuleLaunchCooperativeKernel)(
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
        let words = context.runtime.words("hipModuleLaunchCooperativeKernel", code);
        return Err(context.refuse(
            entry.name,
            &format!(
                "{} blocks of {} threads, {} bytes of shared memory: {words}",
                launch.blocks, launch.threads, launch.shared_bytes
            ),
        ));
    }
    flights.active += 1;
    drop(flights);
    let mut flight = HipFlight {
        context: context.clone(),
        module: module.clone(),
        name: entry.name,
        event,
        state: State::Flying,
    };
    // SAFETY: our own event and stream.
    let code = unsafe { (context.runtime.api.hipEventRecord)(event, context.launches) };
    if code != ffi::SUCCESS {
        return Err(flight.lose(&context.runtime.words("hipEventRecord", code)));
    }
    Ok(Box::new(flight))
}

/// Sees that all blocks fit at once.
fn see_room(context: &Context, entry: &Entry, launch: &Launch<'_>) -> Result<()> {
    let (own, asked, most) = (entry.kernel.shared_bytes, launch.shared_bytes, context.shared_bytes);
    if own.saturating_add(asked) > most {
        let detail = format!(
            "{asked} bytes of shared memory a block besides its own {own}, but a block has {most}"
        );
        return Err(context.refuse(entry.name, &detail));
    }
    let mut fit = 0;
    // SAFETY: a live integer and function.
    let code = unsafe {
        (context.runtime.api.hipModuleOccupancyMaxActiveBlocksPerMultiprocessor)(
            &mut fit,
            entry.function,
            launch.threads as c_int,
            asked as usize,
        )
    };
    context.check("hipModuleOccupancyMaxActiveBlocksPerMultiprocessor", code)?;
    let (fit, units) = (fit.max(0) as u32, context.multiprocessors);
    if launch.blocks > fit.saturating_mul(units) {
        let (blocks, threads) = (launch.blocks, launch.threads);
        let detail = format!(
            "{blocks} blocks of {threads} threads with {asked} bytes of shared memory, but {fit} \
             fit on each of {units} multiprocessors"
        );
        return Err(context.refuse(entry.name, &detail));
    }
    Ok(())
}

/// A kernel under way.
struct HipFlight {
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

impl HipFlight {
    /// The kernel's end will not be seen. What it may still use, the context above all, stays for
    /// good: to free it would be to wait for it.
    fn lose(&mut self, why: &str) -> Error {
        let error = Error::Failed(format!("{}: {why}", self.context.name));
        if !matches!(self.state, State::Lost(_)) {
            std::mem::forget(self.context.clone());
            std::mem::forget(self.module.clone());
        }
        self.state = State::Lost(error.clone());
        error
    }
}

impl Flight for HipFlight {
    fn done(&mut self) -> Result<bool> {
        match &self.state {
            State::Landed => return Ok(true),
            State::Lost(error) => return Err(error.clone()),
            State::Flying => {}
        }
        let context = self.context.clone();
        let _current = context.current()?;
        // SAFETY: our own event, recorded behind the kernel.
        match unsafe { (context.runtime.api.hipEventQuery)(self.event) } {
            ffi::NOT_READY => Ok(false),
            ffi::SUCCESS => {
                self.state = State::Landed;
                context.destroy_event(self.event);
                context.landed();
                Ok(true)
            }
            code => {
                let words = context.runtime.words("hipEventQuery", code);
                Err(self.lose(&format!("{}: {words}", self.name)))
            }
        }
    }

    fn wait(&mut self) -> bool {
        let deadline = Instant::now() + self.context.patience;
        let mut rest = Duration::from_micros(10);
        while let Ok(false) = self.done() {
            if Instant::now() >= deadline {
                self.lose(&format!("{} does not end", self.name));
                return false;
            }
            std::thread::sleep(rest);
            rest = (2 * rest).min(Duration::from_millis(1));
        }
        // An error of `current` alone: the kernel's end was not seen either.
        if matches!(self.state, State::Flying) {
            self.lose("the device does not answer");
        }
        matches!(self.state, State::Landed)
    }
}

impl Drop for HipFlight {
    fn drop(&mut self) {
        self.wait();
    }
}
