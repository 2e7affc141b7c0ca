//! The simulated machine: the very kernel sources that a GPU's compiler takes, compiled by the C++
//! compiler at hand and run on seeded fibers (`kernels/sim/fibers.h` has the model).
//!
//! Invariants: all fibers of a launch run on one thread of their own; launches of one machine run
//! one after another, in the order in which they were asked for; the same seed gives the same
//! schedule, unless the kernel waits for the host.

mod compile;
#[cfg(test)]
mod decode_tests;
#[cfg(test)]
mod encoding_tests;
mod memory;
pub mod ranks;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::machine::handle::{Handle, HandleFault};
use crate::machine::{
    Flight, Launch, Machine, MachineInfo, Memory, Module, Peer, Platform, Shared, Source,
};
pub use compile::compiler;
use compile::Library;
use memory::Region;

/// Stack of a fiber. Not a power of two: equal frames of neighbouring lanes would share cache sets.
const STACK_BYTES: usize = (64 << 10) + 17 * 64;
/// Most threads of a block, as on GPUs.
const THREADS_MAX: u32 = 1024;
const ERROR_BYTES: usize = 4096;

/// What a simulated machine is like. [`ranks::open`] reads it from a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Draws the schedule.
    pub seed: u64,
    /// Threads in lock step, 32 or 64.
    pub warp: u32,
    /// Multiprocessors, of each rank.
    pub blocks: u32,
    /// Dies among which each rank's blocks are dealt out round-robin.
    pub chiplets: u32,
    /// Machines that [`ranks::open`] makes, under one scheduler.
    pub ranks: u32,
    /// Most shared memory of a block, in bytes.
    pub shared_bytes: u32,
    /// A launch that switches more often, without waiting for the host, fails.
    pub switches_max: u64,
    /// A launch in which only the host could let anybody go on, for so long, fails.
    pub host_ms_max: u64,
    /// At warp 64, a team that waits also stops the other team of its wave.
    pub hold: bool,
    /// Kernels are compiled for ThreadSanitizer (`kernels/sim/order.h`), which must have been
    /// loaded with the process.
    pub races: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            seed: 0,
            warp: 32,
            blocks: 8,
            chiplets: 1,
            ranks: 1,
            shared_bytes: 232_448,
            switches_max: 20_000_000_000,
            host_ms_max: 5000,
            hold: false,
            races: false,
        }
    }
}

impl Options {
    /// From `sim`, `sim:0,1` (ranks) or `sim:seed=3,warp=64,blocks=8`, each key at most once.
    /// There are `seed`, `warp`, `blocks`, `chiplets`, `ranks`, `shared` (bytes), `switches`,
    /// `host` (ms), `hold` and `races` (0 or 1).
    ///
    /// # Errors
    /// [`Error::NoDevice`] with the part that is not understood.
    pub fn parse(name: &str) -> Result<Self> {
        let fault = |detail: String| Error::NoDevice { device: name.to_owned(), detail };
        let list = match name.strip_prefix("sim") {
            Some("") => "",
            Some(rest) if rest.starts_with(':') => &rest[1..],
            _ => return Err(fault("a simulator's name is sim or sim:key=value,..".to_owned())),
        };
        let numbers = list.split(',').enumerate();
        if (2..=8).contains(&numbers.clone().count())
            && numbers.clone().all(|(at, part)| part.parse() == Ok(at))
        {
            return Ok(Self { ranks: numbers.count() as u32, ..Self::default() });
        }
        let mut found = BTreeMap::new();
        for part in list.split(',').filter(|part| !part.is_empty()) {
            let Some((key, value)) = part.split_once('=') else {
                return Err(fault(format!("{part:?} is not key=value")));
            };
            let number: u64 = value
                .parse()
                .map_err(|_| fault(format!("{key}: wanted a number, got {value:?}")))?;
            if found.insert(key, number).is_some() {
                return Err(fault(format!("{key} stands twice")));
            }
        }
        let mut options = Self::default();
        for (key, number) in found {
            let range = match key {
                "seed" => 0..=u64::MAX,
                "warp" => 32..=64,
                "blocks" => 1..=1024,
                "chiplets" => 1..=64,
                "ranks" => 1..=8,
                "shared" => 1024..=1 << 24,
                "switches" => 1..=u64::MAX,
                "host" => 1..=1 << 40,
                "hold" | "races" => 0..=1,
                _ => {
                    let known = "seed, warp, blocks, chiplets, ranks, shared, switches, host, \
                                 hold, races";
                    return Err(fault(format!("no option {key}; there are {known}")));
                }
            };
            if !range.contains(&number) || (key == "warp" && number % 32 != 0) {
                let (low, high) = range.into_inner();
                let either = if key == "warp" { "one of 32, 64" } else { "in range" };
                return Err(fault(format!("{key}: {number} is not {either} ({low} to {high})")));
            }
            let small = u32::try_from(number).unwrap_or(u32::MAX);
            match key {
                "seed" => options.seed = number,
                "warp" => options.warp = small,
                "blocks" => options.blocks = small,
                "chiplets" => options.chiplets = small,
                "ranks" => options.ranks = small,
                "shared" => options.shared_bytes = small,
                "switches" => options.switches_max = number,
                "host" => options.host_ms_max = number,
                "races" => options.races = number != 0,
                _ => options.hold = number != 0,
            }
        }
        Ok(options)
    }

    fn name(&self) -> String {
        let Self { seed, warp, blocks, chiplets, shared_bytes: shared, .. } = self;
        let (switches, host, hold) = (self.switches_max, self.host_ms_max, u32::from(self.hold));
        let dies = if *chiplets > 1 { format!(",chiplets={chiplets}") } else { String::new() };
        let races = if self.races { ",races=1" } else { "" };
        format!(
            "sim:seed={seed},warp={warp},blocks={blocks}{dies},shared={shared},\
             switches={switches},host={host},hold={hold}{races}"
        )
    }
}

/// `source` with `from` replaced by `to`, for tests that a wrong kernel is found out.
///
/// # Errors
/// [`Error::Failed`] unless `from` stands exactly once in the text: a mutant that is no mutant
/// would prove nothing.
pub fn mutate(source: &Source, from: &str, to: &str) -> Result<Source> {
    let found = source.text.matches(from).count();
    if found != 1 || from == to {
        return Err(Error::Failed(format!(
            "a mutant needs its snippet once in the source, got {found} times: {from:?} -> {to:?}"
        )));
    }
    Ok(Source { text: source.text.replacen(from, to, 1), ..source.clone() })
}

/// How a launch went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trace {
    /// Hash of which wave ran and which copy landed, in order.
    pub schedule: u64,
    /// Times that a fiber was entered.
    pub switches: u64,
    /// Times that a wave was drawn.
    pub steps: u64,
    /// Virtual time at the end.
    pub now_ns: u64,
}

/// `kie_sim::Launch` of `kernels/sim/fibers.h`.
#[repr(C)]
struct RawLaunch {
    entry: usize,
    args: *const c_void,
    seed: u64,
    switches_max: u64,
    host_ns_max: u64,
    now_ns: u64,
    shared: *mut u8,
    stacks: *mut u8,
    shared_stride: u64,
    shared_bytes: u64,
    stack_stride: u64,
    host_pace: extern "C" fn(u64) -> u64,
    error: *mut c_char,
    error_bytes: u64,
    /// Of a rank.
    blocks: u32,
    threads: u32,
    warp: u32,
    hold: u32,
    ranks: u64,
    /// Bytes between the parameters of two ranks.
    args_stride: u64,
    switches: u64,
    steps: u64,
    schedule: u64,
    /// In the order of addresses.
    owned: *const Owned,
    owned_count: u64,
    /// Memory of other processes is open.
    others: u64,
}

/// Memory of one rank (`kie_sim::Owned`).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Owned {
    from: u64,
    to: u64,
    rank: u32,
    /// Others may store into it.
    open: u32,
}

/// Rests about `ns` and returns how long it was.
extern "C" fn host_pace(ns: u64) -> u64 {
    let start = Instant::now();
    std::thread::sleep(Duration::from_nanos(ns));
    u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// What launches leave to the next one.
#[derive(Default)]
struct State {
    serving: u64,
    now_ns: u64,
    stacks: Option<Region>,
    shared: Option<Region>,
    trace: Option<Trace>,
}

struct Inner {
    id: u64,
    options: Options,
    compiler: compile::Compiler,
    tickets: AtomicU64,
    state: Mutex<State>,
    turn: Condvar,
    /// What belongs to a rank, and whether others may store into it.
    owned: Mutex<Vec<(usize, bool, Weak<Region>)>>,
    /// Memory of other processes was opened: a wait may be for one of them, in its time.
    others: AtomicBool,
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on a rank's own; freed memory is forgotten.
    fn own(&self, rank: usize, open: bool, region: &Arc<Region>) {
        let mut owned = self.owned.lock().unwrap_or_else(PoisonError::into_inner);
        owned.retain(|(.., region)| region.strong_count() > 0);
        owned.push((rank, open, Arc::downgrade(region)));
    }

    /// What belongs to ranks, in the order of addresses, kept alive as long as the regions are.
    fn owned(&self) -> (Vec<Owned>, Vec<Arc<Region>>) {
        let owned = self.owned.lock().unwrap_or_else(PoisonError::into_inner);
        let live =
            owned.iter().filter_map(|(rank, open, weak)| Some((rank, open, weak.upgrade()?)));
        let one = |(rank, open, region): (&usize, &bool, Arc<Region>)| {
            let from = region.start() as u64;
            let (to, rank, open) = (from + region.len() as u64, *rank as u32, u32::from(*open));
            (Owned { from, to, rank, open }, region)
        };
        let mut all: Vec<_> = live.map(one).collect();
        all.sort_by_key(|(owned, _)| owned.from);
        all.into_iter().unzip()
    }
}

/// The CPU as a machine for kernels. Clones are the same machine.
#[derive(Clone)]
pub struct Sim {
    inner: Arc<Inner>,
}

struct SimModule {
    machine: u64,
    library: Library,
}

impl Module for SimModule {
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Sim {
    /// Opens the machine that `name` describes; see [`Options::parse`].
    ///
    /// # Errors
    /// [`Error::NoDevice`] for a name that is not understood, or where there is no C++ compiler.
    pub fn open(name: &str) -> Result<Self> {
        Self::new(Options::parse(name)?)
    }

    /// Opens a machine.
    ///
    /// # Errors
    /// [`Error::NoDevice`] where there is no C++ compiler.
    pub fn new(options: Options) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let compiler = compile::Compiler::find(&options.name(), options.races)?;
        let state = State { now_ns: 1_000_000, ..State::default() };
        let inner = Inner {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            options,
            compiler,
            tickets: AtomicU64::new(0),
            state: Mutex::new(state),
            turn: Condvar::new(),
            owned: Mutex::default(),
            others: AtomicBool::new(false),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// How the launch that ended last went, also if it failed.
    pub fn last_trace(&self) -> Option<Trace> {
        self.inner.state().trace
    }

    fn fault(&self, fault: HandleFault) -> Error {
        Error::Handle { device: self.inner.options.name(), fault }
    }

    fn region(&self, bytes: usize) -> Result<Arc<Region>> {
        Ok(Arc::new(Region::new(bytes, &self.inner.options.name())?))
    }

    /// New memory of one rank of several.
    fn region_of_rank(&self, bytes: usize, rank: usize, open: bool) -> Result<Arc<Region>> {
        let region = self.region(bytes)?;
        self.inner.own(rank, open, &region);
        Ok(region)
    }

    /// A launch on every rank, each with parameters of its own.
    fn launch_all(
        &self,
        module: &Arc<dyn Module>,
        launch: &Launch<'_>,
        ranks: &[&[u8]],
    ) -> Result<Box<dyn Flight>> {
        let Some(compiled) = module.as_any().downcast_ref::<SimModule>() else {
            return Err(Error::Failed("the module was compiled for another machine".to_owned()));
        };
        let entry = self.check(compiled, launch)?;
        let words = launch.args.len().div_ceil(16);
        let mut args = Vec::with_capacity(words * ranks.len());
        for part in ranks.iter().flat_map(|args| args.chunks(16)) {
            let mut whole = [0; 16];
            whole[..part.len()].copy_from_slice(part);
            args.push(u128::from_ne_bytes(whole));
        }
        // The lock makes ticket and thread one step: a ticket without a thread would stop all.
        let state = self.inner.state();
        let job = Job {
            inner: Arc::clone(&self.inner),
            module: Arc::clone(module),
            ticket: self.inner.tickets.load(Ordering::Relaxed),
            entry,
            blocks: launch.blocks,
            ranks: ranks.len(),
            threads: launch.threads,
            shared_bytes: launch.shared_bytes,
            args,
        };
        let thread = std::thread::Builder::new()
            .name("kie-sim".to_owned())
            .spawn(move || job.run())
            .map_err(|error| Error::Failed(format!("no thread for a launch: {error}")))?;
        self.inner.tickets.fetch_add(1, Ordering::Relaxed);
        drop(state);
        Ok(Box::new(SimFlight { thread: Some(thread), outcome: Ok(()) }))
    }

    /// Everything about a launch that can be known to be wrong beforehand.
    fn check(&self, module: &SimModule, launch: &Launch<'_>) -> Result<usize> {
        let options = &self.inner.options;
        let fault = |detail: String| Err(Error::Failed(format!("{}: {detail}", launch.entry)));
        if module.machine != self.inner.id {
            return fault("the module was compiled for another machine".to_owned());
        }
        let Some(entry) = module.library.entry(launch.entry) else {
            return fault("the module has no such kernel".to_owned());
        };
        if launch.blocks == 0 || launch.blocks > options.blocks {
            let (got, most) = (launch.blocks, options.blocks);
            return fault(format!("{got} blocks, 1 to {most} can be resident"));
        }
        let most = entry.threads.min(THREADS_MAX);
        if launch.threads == 0 || launch.threads > most {
            return fault(format!("{} threads a block, at most {most}", launch.threads));
        }
        if launch.shared_bytes > options.shared_bytes {
            let (got, most) = (launch.shared_bytes, options.shared_bytes);
            return fault(format!("{got} bytes of shared memory, at most {most}"));
        }
        Ok(entry.address)
    }
}

/// A launch on its way to its thread.
struct Job {
    inner: Arc<Inner>,
    module: Arc<dyn Module>,
    ticket: u64,
    entry: usize,
    /// Of a rank.
    blocks: u32,
    ranks: usize,
    threads: u32,
    shared_bytes: u32,
    /// Of each rank, aligned as any parameter may want it.
    args: Vec<u128>,
}

/// Lets the next launch begin, whatever happens to this one.
struct Turn<'a>(&'a Inner);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.state().serving += 1;
        self.0.turn.notify_all();
    }
}

impl Job {
    fn run(self) -> Result<()> {
        let mut state = self.inner.state();
        while state.serving != self.ticket {
            state = self.inner.turn.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let (stacks, shared, now_ns) = (state.stacks.take(), state.shared.take(), state.now_ns);
        drop(state);
        let _turn = Turn(&self.inner);
        let device = self.inner.options.name();
        let blocks = self.blocks as usize * self.ranks;
        let fibers = blocks * self.threads as usize;
        let stacks = Region::at_least(stacks, fibers * STACK_BYTES, &device)?;
        let stride = (self.shared_bytes as usize).next_multiple_of(1024) + 1024;
        let shared = Region::at_least(shared, blocks * stride, &device)?;
        let (outcome, trace) = self.fly(&stacks, &shared, stride as u64, now_ns);
        let mut state = self.inner.state();
        state.now_ns = trace.now_ns;
        state.trace = Some(trace);
        state.stacks = Some(stacks);
        state.shared = Some(shared);
        outcome
    }

    fn fly(&self, stacks: &Region, shared: &Region, stride: u64, now: u64) -> (Result<()>, Trace) {
        let library = self.library();
        let mut error = vec![0_u8; ERROR_BYTES];
        let (owned, _kept) = self.inner.owned();
        let mut raw = RawLaunch {
            entry: self.entry,
            args: self.args.as_ptr().cast(),
            seed: self.inner.options.seed,
            switches_max: self.inner.options.switches_max,
            host_ns_max: self.inner.options.host_ms_max * 1_000_000,
            now_ns: now,
            shared: shared.start(),
            stacks: stacks.start(),
            shared_stride: stride,
            shared_bytes: u64::from(self.shared_bytes),
            stack_stride: STACK_BYTES as u64,
            host_pace,
            error: error.as_mut_ptr().cast(),
            error_bytes: ERROR_BYTES as u64,
            blocks: self.blocks,
            threads: self.threads,
            warp: self.inner.options.warp,
            hold: self.inner.options.hold.into(),
            ranks: self.ranks as u64,
            args_stride: (self.args.len() / self.ranks * 16) as u64,
            switches: 0,
            steps: 0,
            schedule: 0,
            owned: owned.as_ptr(),
            owned_count: owned.len() as u64,
            others: self.inner.others.load(Ordering::Relaxed).into(),
        };
        // SAFETY: the function is the module's `kie_sim_run` with this very layout; the regions
        // are as large as `run` made them, nothing else uses them or the module's statics, since
        // this launch has the machine's turn and a module belongs to one machine. What the kernel
        // does with addresses in its args is the caller's promise, as on any machine.
        let code: c_int = unsafe { (library.run)(std::ptr::from_mut(&mut raw).cast()) };
        let trace = Trace {
            schedule: raw.schedule,
            switches: raw.switches,
            steps: raw.steps,
            now_ns: raw.now_ns,
        };
        if code == 0 {
            return (Ok(()), trace);
        }
        let end = error.iter().position(|&byte| byte == 0).unwrap_or(error.len());
        let text = String::from_utf8_lossy(&error[..end]).into_owned();
        let name = self.inner.options.name();
        (Err(Error::Failed(format!("{name}: {text}"))), trace)
    }

    fn library(&self) -> &Library {
        let module = self.module.as_any().downcast_ref::<SimModule>();
        &module.expect("`launch` has looked").library
    }
}

struct SimFlight {
    thread: Option<JoinHandle<Result<()>>>,
    outcome: Result<()>,
}

impl SimFlight {
    fn land(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.outcome = thread
                .join()
                .unwrap_or_else(|_| Err(Error::Failed("the simulator panicked".to_owned())));
        }
    }
}

impl Flight for SimFlight {
    fn done(&mut self) -> Result<bool> {
        if self.thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
            return Ok(false);
        }
        self.land();
        self.outcome.clone().map(|()| true)
    }

    fn wait(&mut self) -> bool {
        self.land();
        true
    }
}

impl Drop for SimFlight {
    fn drop(&mut self) {
        self.land();
    }
}

impl Machine for Sim {
    fn platform(&self) -> Platform {
        Platform::Sim
    }

    fn warp(&self) -> u32 {
        self.inner.options.warp
    }

    fn info(&self) -> Result<MachineInfo> {
        let options = &self.inner.options;
        let (memory_bytes, free_bytes) = crate::limits::memory();
        Ok(MachineInfo {
            name: options.name(),
            model: format!("simulator, {}", self.inner.compiler.version),
            arch: format!("sim-warp{}", options.warp),
            multiprocessors: options.blocks,
            chiplets: options.chiplets,
            shared_bytes: options.shared_bytes,
            memory_bytes,
            free_bytes,
        })
    }

    fn compile(&self, source: &Source) -> Result<Arc<dyn Module>> {
        let library = self.inner.compiler.library(source, self.inner.options.warp)?;
        Ok(Arc::new(SimModule { machine: self.inner.id, library }))
    }

    fn alloc(&self, bytes: usize) -> Result<Memory> {
        Ok(memory_of(self.region(bytes)?, bytes))
    }

    fn alloc_symmetric(&self, bytes: usize) -> Result<Memory> {
        let region = Region::open_to_others(bytes, &self.inner.options.name())?;
        Ok(memory_of(Arc::new(region), bytes))
    }

    fn export(&self, memory: &Memory) -> Result<Handle> {
        let region = region_of(memory, 0, memory.bytes)?;
        region.export(memory.bytes).map_err(|fault| self.fault(fault))
    }

    fn import(&self, handle: &Handle, bytes: usize) -> Result<Memory> {
        let region = Region::import(handle, bytes).map_err(|fault| self.fault(fault))?;
        self.inner.others.store(true, Ordering::Relaxed);
        Ok(memory_of(Arc::new(region), bytes))
    }

    fn alloc_shared(&self, bytes: usize) -> Result<Shared> {
        Ok(shared_of(self.region(bytes)?, bytes))
    }

    fn write(&self, to: &Memory, offset: usize, bytes: &[u8]) -> Result<()> {
        region_of(to, offset, bytes.len())?.write(offset, bytes);
        Ok(())
    }

    fn read(&self, from: &Memory, offset: usize, out: &mut [u8]) -> Result<()> {
        region_of(from, offset, out.len())?.read(offset, out);
        Ok(())
    }

    fn peer(&self) -> Result<Peer> {
        Ok(Peer {
            platform: Platform::Sim,
            name: self.inner.options.name(),
            ordinal: 0,
            owner: self.inner.id as usize,
            bus: None,
        })
    }

    /// All simulators of a process live in its one address space.
    fn reaches(&self, other: &dyn Machine) -> Result<bool> {
        Ok(other.peer()?.platform == Platform::Sim)
    }

    fn enable_peer(&self, other: &dyn Machine) -> Result<()> {
        if self.reaches(other)? {
            return Ok(());
        }
        Err(self.peer()?.refuse(&other.peer()?, "it is no simulator"))
    }

    fn launch(&self, module: &Arc<dyn Module>, launch: &Launch<'_>) -> Result<Box<dyn Flight>> {
        self.launch_all(module, launch, &[launch.args])
    }
}

fn memory_of(region: Arc<Region>, bytes: usize) -> Memory {
    Memory { address: region.start() as u64, bytes, owner: region }
}

fn shared_of(region: Arc<Region>, bytes: usize) -> Shared {
    let start = region.start();
    // SAFETY: a region is zeroed and aligned to a page, lives in the owner given here, and its
    // address goes nowhere else.
    unsafe { Shared::new(start as u64, start, bytes, region) }
}

/// The region behind a simulator's memory, if the range lies in it.
fn region_of(memory: &Memory, offset: usize, bytes: usize) -> Result<&Region> {
    let fits = offset.checked_add(bytes).is_some_and(|end| end <= memory.bytes);
    match memory.owner.downcast_ref::<Region>() {
        Some(region) if fits && region.len() >= memory.bytes => Ok(region),
        Some(_) => Err(Error::Failed(format!(
            "{bytes} bytes at {offset} of a memory of {} bytes",
            memory.bytes
        ))),
        None => Err(Error::Failed("memory of another machine".to_owned())),
    }
}
