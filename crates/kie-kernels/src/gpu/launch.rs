//! Loaded code and kernels under way.

use std::any::Any;
use std::ffi::{c_int, c_void, CString};
use std::sync::Arc;

use super::api::{Api, Fault, Handle, KernelFacts, NOT_FOUND, NOT_READY};
use super::context::{Context, Retired};
use super::rtc::Compiled;
use crate::error::{Error, Result};
use crate::machine::{wait_within, Flight, Launch, Module, Source};

/// One kernel of a module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its name.
    pub name: &'static str,
    /// What is known of it.
    pub facts: KernelFacts,
    function: Handle,
}

impl Entry {
    /// Bytes of its one parameter, 0 if there is none.
    pub fn args_bytes(&self) -> usize {
        self.facts.args_bytes.first().copied().unwrap_or(0)
    }
}

/// Code on the device.
pub struct GpuModule<A: Api> {
    context: Arc<Context<A>>,
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

impl<A: Api> Module for GpuModule<A> {
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl<A: Api> Drop for GpuModule<A> {
    fn drop(&mut self) {
        self.context.retire(Retired::Code(self.handle));
    }
}

impl<A: Api> GpuModule<A> {
    /// Loads all of the code now: code that is loaded at its first launch would wait for a kernel
    /// that runs by then.
    pub(super) fn load(
        context: &Arc<Context<A>>,
        compiled: &Compiled,
        source: &Source,
    ) -> Result<Self> {
        let _current = context.current()?;
        let (answer, bytes) = (context.api.load(&compiled.code), compiled.code.len());
        let mut this = Self {
            handle: context.api.check_memory(&context.name, bytes, answer)?,
            context: context.clone(),
            entries: Vec::with_capacity(source.entries.len()),
            log: compiled.log.clone(),
            cached: false,
            notes: Vec::new(),
        };
        for name in &source.entries {
            let entry = this.find(name, compiled)?;
            this.entries.push(entry);
        }
        Ok(this)
    }

    fn find(&self, name: &'static str, compiled: &Compiled) -> Result<Entry> {
        let context = &self.context;
        let refuse = |detail| Error::Compile { arch: context.arch.clone(), detail };
        let missing = || refuse(format!("the source has no extern \"C\" kernel {name}"));
        let symbol = CString::new(name)
            .map_err(|_| refuse(format!("a kernel's name with a zero byte: {name:?}")))?;
        let (mut function, find) = (0, &context.api.calls().function);
        // SAFETY: the module is loaded, the name is a C string.
        match find.with(|f| unsafe { f(&mut function, self.handle, symbol.as_ptr()) }) {
            Err(Fault { code: NOT_FOUND, .. }) => return Err(missing()),
            answer => context.check(answer)?,
        }
        let facts = context.check(context.api.kernel(function, name, compiled))?;
        let facts = facts.ok_or_else(missing)?;
        if facts.args_bytes.len() > 1 {
            let detail = format!("kernel {name} has several parameters; it may have one");
            return Err(refuse(detail));
        }
        if facts.spilled_registers > A::SPILLED_MAX {
            let (spilled, most) = (facts.spilled_registers, A::SPILLED_MAX);
            return Err(refuse(format!(
                "{spilled} registers of a thread of {name} do not fit, {most} may; the model's \
                 shape is too wide for this GPU: use device='cpu'"
            )));
        }
        Ok(Entry { name, facts, function })
    }

    fn entry(&self, launch: &Launch<'_>) -> Result<&Entry> {
        let refuse = |detail: String| self.context.refuse(launch.entry, &detail);
        let entry = self.entries.iter().find(|entry| entry.name == launch.entry);
        let entry = entry.ok_or_else(|| {
            let names: Vec<_> = self.entries.iter().map(|entry| entry.name).collect();
            refuse(format!("the module has only {}", names.join(", ")))
        })?;
        if launch.args.len() != entry.args_bytes() {
            let (wanted, got) = (entry.args_bytes(), launch.args.len());
            return Err(refuse(format!("its parameter has {wanted} bytes, not {got}")));
        }
        let most = entry.facts.threads_max;
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
pub(super) fn launch<A: Api>(
    context: &Arc<Context<A>>,
    module: &Arc<dyn Module>,
    launch: &Launch<'_>,
) -> Result<Box<dyn Flight>> {
    let ours = module.as_any().downcast_ref::<GpuModule<A>>();
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
    let (function, args) = (entry.function, args.as_mut_ptr());
    let (grid, block, shared) = (launch.blocks, launch.threads, launch.shared_bytes);
    let started = context.api.calls().launch.with(|f| {
        // SAFETY: the function belongs to `module`, which the flight keeps; its one parameter has
        // the size of `args` (checked by `entry`) and is copied before the call returns.
        unsafe { f(function, grid, 1, 1, block, 1, 1, shared, context.launches, args) }
    });
    if let Err(fault) = started {
        drop(flights);
        context.free_event(event);
        let words = context.api.words(fault);
        let detail =
            format!("{grid} blocks of {block} threads, {shared} bytes of shared memory: {words}");
        return Err(context.refuse(entry.name, &detail));
    }
    flights.active += 1;
    drop(flights);
    let mut flight = GpuFlight {
        context: context.clone(),
        module: module.clone(),
        name: entry.name,
        event,
        state: State::UnderWay,
    };
    match context.record(event, context.launches) {
        Ok(()) => Ok(Box::new(flight)),
        Err(fault) => Err(flight.lose(&context.api.words(fault))),
    }
}

/// Gives the function its shared memory and sees that all blocks fit at once.
fn see_room<A: Api>(context: &Context<A>, entry: &Entry, launch: &Launch<'_>) -> Result<()> {
    let Launch { blocks, threads, shared_bytes: shared, .. } = *launch;
    let most = context.facts.shared_bytes;
    let allowed = context.api.allow_shared(entry.function, &entry.facts, shared, most);
    allowed.map_err(|why| {
        let own = entry.facts.shared_bytes;
        let what = format!("{shared} bytes of shared memory a block besides its own {own}");
        context.refuse(entry.name, &format!("{what}{why}"))
    })?;
    let (mut fit, ask, function) = (0, &context.api.calls().occupancy, entry.function);
    let (block, bytes) = (threads as c_int, shared as usize);
    // SAFETY: a live integer and function.
    let answer = ask.with(|f| unsafe { f(&mut fit, function, block, bytes) });
    context.check(answer)?;
    let (fit, units) = (fit.max(0) as u32, context.facts.multiprocessors);
    if blocks > fit.saturating_mul(units) {
        let detail = format!(
            "{blocks} blocks of {threads} threads with {shared} bytes of shared memory, but {fit} \
             fit on each of {units} multiprocessors"
        );
        return Err(context.refuse(entry.name, &detail));
    }
    Ok(())
}

/// A kernel under way.
struct GpuFlight<A: Api> {
    context: Arc<Context<A>>,
    module: Arc<dyn Module>,
    name: &'static str,
    event: Handle,
    state: State,
}

enum State {
    UnderWay,
    Ended,
    Lost(Error),
}

impl<A: Api> GpuFlight<A> {
    /// The kernel's end will not be seen. What it may still use stays for good, as to free it would
    /// be to wait for it: the module, which holds the context, and (this flight being counted as
    /// active for ever) all memory.
    fn lose(&mut self, why: &str) -> Error {
        let error = Error::Failed(format!("{}: {why}", self.context.name));
        if !matches!(self.state, State::Lost(_)) {
            std::mem::forget(self.module.clone());
        }
        self.state = State::Lost(error.clone());
        error
    }
}

impl<A: Api> Flight for GpuFlight<A> {
    fn done(&mut self) -> Result<bool> {
        match &self.state {
            State::Ended => return Ok(true),
            State::Lost(error) => return Err(error.clone()),
            State::UnderWay => {}
        }
        let context = self.context.clone();
        let _current = context.current()?;
        // SAFETY: our own event, recorded behind the kernel.
        match context.api.calls().query_event.with(|f| unsafe { f(self.event) }) {
            Err(Fault { code: NOT_READY, .. }) => Ok(false),
            Ok(()) => {
                self.state = State::Ended;
                context.free_event(self.event);
                context.one_ended();
                Ok(true)
            }
            Err(fault) => {
                let words = context.api.words(fault);
                Err(self.lose(&format!("{}: {words}", self.name)))
            }
        }
    }

    fn wait(&mut self) -> bool {
        let patience = self.context.patience;
        if let Ok(false) = wait_within(self, patience) {
            self.lose(&format!("{} does not end", self.name));
        }
        // An error of `current` alone: the kernel's end was not seen either.
        if matches!(self.state, State::UnderWay) {
            self.lose("the device does not answer");
        }
        matches!(self.state, State::Ended)
    }
}

impl<A: Api> Drop for GpuFlight<A> {
    fn drop(&mut self) {
        self.wait();
    }
}
