//! One device: what owns its memory, its two streams, and what must wait until no kernel runs.
//!
//! Invariants: everything here that makes the driver wait for a running kernel (freeing memory or
//! code) happens under the lock of [`Flights`] while none is active; a launch takes the same lock.
//! The device is this thread's current one only during a call, whichever thread makes it. CUDA's
//! context is the primary one, so that other libraries' memory is valid beside ours.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::api::{
    index_of, Address, Answer, Api, Facts, Handle, Ordinal, Paths, EVENT_DISABLE_TIMING,
    STREAM_NON_BLOCKING,
};
use crate::error::{Error, Result};

/// A device in use.
pub(super) struct Context<A: Api> {
    pub api: A,
    pub ordinal: Ordinal,
    /// Such as `cuda:0`.
    pub name: String,
    pub arch: String,
    pub facts: Facts,
    /// What owns the device's memory; 0 where nothing does.
    pub owner: Handle,
    /// Kernels, one after another.
    pub launches: Handle,
    /// Copies, beside the kernels.
    pub copies: Handle,
    pub staging: Mutex<Lanes>,
    flights: Mutex<Flights>,
    /// How long the drop of a flight waits for its end.
    pub patience: Duration,
}

/// Pinned buffers that copies go through.
#[derive(Default)]
pub(super) struct Lanes {
    /// All of them, one after another; 0: none.
    pub host: usize,
    pub lanes: Vec<Lane>,
}

/// Buffers that one thread fills in rotation.
pub(super) struct Lane {
    pub buffers: Vec<usize>,
    /// What marks the end of the copy out of each; none for a single buffer, whose copies the
    /// stream's end tells.
    pub ended: Vec<Handle>,
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
    /// Another process's memory.
    Opened(Address),
    Host(usize),
    Code(Handle),
}

/// The device is this thread's current one while this lives.
pub(super) struct Current<'a, A: Api> {
    context: &'a Context<A>,
    before: Ordinal,
}

impl<A: Api> Drop for Current<'_, A> {
    fn drop(&mut self) {
        self.context.api.leave(self.context.ordinal, self.before);
    }
}

impl<A: Api> Context<A> {
    pub fn open(name: &str, paths: &Paths) -> Result<Arc<Self>> {
        let index = index_of(A::KIND, name)?;
        let name = format!("{}:{index}", A::KIND);
        let api = A::open(paths, &name)?;
        let ordinal = api.find(&name, index)?;
        let arch = api.arch(&name, ordinal)?;
        let facts = api.facts(&name, ordinal, paths)?;
        // Given back when `Self` goes, which from here on owns it.
        let owner = api.retain(&name, ordinal)?;
        let mut this = Self {
            api,
            ordinal,
            name,
            arch,
            facts,
            owner,
            launches: 0,
            copies: 0,
            staging: Mutex::default(),
            flights: Mutex::default(),
            patience: paths.patience,
        };
        this.launches = this.stream()?;
        this.copies = this.stream()?;
        this.make_lanes()?;
        Ok(Arc::new(this))
    }

    /// Makes the device current on this thread.
    pub fn current(&self) -> Result<Current<'_, A>> {
        let before = self.check(self.api.enter(self.owner, self.ordinal))?;
        Ok(Current { context: self, before })
    }

    pub fn check<T>(&self, answer: Answer<T>) -> Result<T> {
        self.api.check(&self.name, answer)
    }

    /// [`Error::Failed`] about a launch of `entry`.
    pub fn refuse(&self, entry: &str, detail: &str) -> Error {
        Error::Failed(format!("{}: launch of {entry}: {detail}", self.name))
    }

    fn stream(&self) -> Result<Handle> {
        let _current = self.current()?;
        let mut stream = 0;
        let make = &self.api.calls().stream;
        // SAFETY: a live handle; given back with `self`.
        self.check(make.with(|f| unsafe { f(&mut stream, STREAM_NON_BLOCKING) }))?;
        Ok(stream)
    }

    pub fn event(&self) -> Result<Handle> {
        let _current = self.current()?;
        let mut event = 0;
        let make = &self.api.calls().event;
        // SAFETY: a live handle; its owner gives it back.
        self.check(make.with(|f| unsafe { f(&mut event, EVENT_DISABLE_TIMING) }))?;
        Ok(event)
    }

    pub fn free_event(&self, event: Handle) {
        if let Ok(_current) = self.current() {
            // SAFETY: made by `event`, given back once; what it marks may still run.
            let _ = self.api.calls().free_event.with(|f| unsafe { f(event) });
        }
    }

    /// Marks the end of what is in a stream now.
    pub fn record(&self, event: Handle, stream: Handle) -> Answer<()> {
        // SAFETY: our own event and stream.
        self.api.calls().record_event.with(|f| unsafe { f(event, stream) })
    }

    /// Waits for what an event marks.
    pub fn wait_event(&self, event: Handle) -> Result<()> {
        // SAFETY: our own event, recorded before.
        self.check(self.api.calls().wait_event.with(|f| unsafe { f(event) }))
    }

    /// Waits for the copies, not for kernels.
    pub fn wait_copies(&self) -> Result<()> {
        // SAFETY: our own stream.
        self.check(self.api.calls().wait_stream.with(|f| unsafe { f(self.copies) }))
    }

    /// Pinned host memory that every device of the process reaches. Not zeroed.
    pub fn pinned(&self, bytes: usize) -> Result<*mut c_void> {
        const WHERE: &str = "host memory that the GPU reaches";
        let _current = self.current()?;
        let mut host = std::ptr::null_mut();
        let alloc = &self.api.calls().alloc_host;
        // SAFETY: a live pointer; its owner retires it.
        let answer = alloc.with(|f| unsafe { f(&mut host, bytes, A::HOST_FLAGS) });
        self.api.check_memory(WHERE, bytes, answer).map(|()| host)
    }

    /// The buffers of copies. Made at once: pinning memory may wait for a running kernel.
    fn make_lanes(&mut self) -> Result<()> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let (count, shape) = (cores.min(A::STAGING.lanes_max), A::STAGING);
        let host = self.pinned(count * shape.num_buffers * shape.chunk_bytes)? as usize;
        let mut lanes = Lanes { host, lanes: Vec::with_capacity(count) };
        let events = if shape.num_buffers > 1 { shape.num_buffers } else { 0 };
        let made = (0..count).try_for_each(|lane| {
            let numbers = lane * shape.num_buffers..(lane + 1) * shape.num_buffers;
            let buffers = numbers.map(|n| host + n * shape.chunk_bytes).collect();
            lanes.lanes.push(Lane { buffers, ended: Vec::new() });
            (0..events).try_for_each(|_| {
                lanes.lanes[lane].ended.push(self.event()?);
                Ok(())
            })
        });
        // Whatever there is goes with `self`.
        self.staging = Mutex::new(lanes);
        made
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
    pub fn one_ended(&self) {
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
        let calls = self.api.calls();
        for what in flights.retired.drain(..) {
            // A failure means that the device is lost to this process, with all that is on it.
            let _ = match what {
                // SAFETY: allocated by us, given back once, and no kernel of ours runs.
                Retired::Device(address) => calls.free.with(|f| unsafe { f(address) }),
                Retired::Opened(address) => self.api.ipc().map_or(Ok(()), |ipc| ipc.close(address)),
                // SAFETY: as above.
                Retired::Host(host) => calls.free_host.with(|f| unsafe { f(host as *mut c_void) }),
                // SAFETY: as above; the functions in it are used through its owner only.
                Retired::Code(module) => calls.unload.with(|f| unsafe { f(module) }),
            };
        }
    }
}

impl<A: Api> Drop for Context<A> {
    fn drop(&mut self) {
        // Flights own the context, so none is active.
        let staging = self.staging.get_mut().unwrap_or_else(PoisonError::into_inner);
        let Lanes { host, lanes } = std::mem::take(staging);
        for event in lanes.into_iter().flat_map(|lane| lane.ended) {
            self.free_event(event);
        }
        if host != 0 {
            self.retire(Retired::Host(host));
        }
        if let Ok(_current) = self.current() {
            for stream in [self.launches, self.copies].into_iter().filter(|&s| s != 0) {
                // SAFETY: ours, given back once.
                let _ = self.api.calls().free_stream.with(|f| unsafe { f(stream) });
            }
        }
        self.api.release(self.ordinal);
    }
}
