//! The emulator as a machine for kernels: memory, modules and launches. All waves of a launch run
//! on one thread; launches of one machine run one after another.

use std::any::Any;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use kie_kernels::hip::code_object;
use kie_kernels::limits;
use kie_kernels::machine::{
    Flight, Launch, Machine, MachineInfo, Memory, Module, Peer, Platform, Shared, Source,
};
use kie_kernels::{Error, Result};

use crate::clocks::Clocks;
use crate::elf::{Descriptor, Object};
use crate::inst::{self, Code, VCC};
use crate::memory::{Region, Space};
use crate::options::Options;
use crate::schedule::Run;
use crate::toolchain::{self, ARCH};
use crate::wave::{Wave, World, LANES};
use crate::{text, weak};

/// Registers of a unit's lane, which its waves share; units of a multiprocessor.
const REGISTERS: u32 = 512;
const UNITS: u32 = 4;
/// Shared memory of a multiprocessor, in bytes.
const LOCAL_BYTES: u32 = 65_536;
/// Numbers are rounded to nearest, small ones kept.
const FLOAT_MODE: u32 = 0xf0;
/// Scalar registers for each property of a kernel's descriptor, in order, and which of these are
/// the parameters' address.
const USER_REGISTERS: [u32; 7] = [4, 2, 2, 2, 2, 2, 1];
const PARAMETERS: usize = 3;
/// What registers and shared memory hold before anything was written: nothing to rely upon.
const JUNK: u32 = 0xa5c3_a5c3;
/// Between two looks at a launch.
const LOOK: Duration = Duration::from_micros(100);

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Kernel {
    code: Code,
    descriptor: Descriptor,
    registers: u32,
    threads_max: u32,
}

struct GcnModule {
    machine: u64,
    kernels: BTreeMap<&'static str, Kernel>,
    image: Arc<Region>,
}

impl Module for GcnModule {
    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[derive(Default)]
struct State {
    serving: u64,
    now_ns: u64,
    issued: Vec<Clocks>,
}

struct Inner {
    id: u64,
    options: Options,
    folder: PathBuf,
    tickets: AtomicU64,
    state: Mutex<State>,
    turn: Condvar,
    regions: Mutex<Vec<Weak<Region>>>,
}

/// The emulator. Clones are the same machine.
#[derive(Clone)]
pub struct Gcn {
    inner: Arc<Inner>,
}

/// Where compiled kernels are kept: in `$KIE_CACHE`, or else a folder for this user.
pub(crate) fn cache_folder() -> PathBuf {
    match std::env::var_os("KIE_CACHE").filter(|folder| !folder.is_empty()) {
        Some(cache) => PathBuf::from(cache).join("gcn"),
        None => {
            let user = std::env::var("USER").unwrap_or_default();
            std::env::temp_dir().join(format!("kie-gcn-{user}"))
        }
    }
}

/// A listing's kernels, ready to run.
fn kernels_of(
    object: &Object<'_>,
    compiled: &toolchain::Compiled,
    entries: &[&'static str],
) -> std::result::Result<BTreeMap<&'static str, Kernel>, String> {
    let functions = text::functions(&compiled.listing).map_err(|fault| fault.to_string())?;
    let told = code_object::kernels(&compiled.object)?;
    let mut kernels = BTreeMap::new();
    for &entry in entries {
        let missing = || format!("the code has no kernel {entry}");
        let function = functions.iter().find(|f| f.name == entry).ok_or_else(missing)?;
        let facts = told.iter().find(|kernel| kernel.name == entry).ok_or_else(missing)?;
        let descriptor = object.descriptor(entry).ok_or_else(missing)?;
        if descriptor.float_mode != FLOAT_MODE {
            return Err(format!("{entry}: float mode {:#x}", descriptor.float_mode));
        }
        let code = inst::code(function).map_err(|fault| format!("{entry}: {fault}"))?;
        let (registers, threads_max) = (facts.registers, facts.threads_max);
        kernels.insert(entry, Kernel { code, descriptor, registers, threads_max });
    }
    Ok(kernels)
}

impl Gcn {
    /// A machine.
    pub fn new(options: Options) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let inner = Inner {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            options,
            folder: cache_folder(),
            tickets: AtomicU64::new(0),
            state: Mutex::new(State { now_ns: 1_000_000, ..State::default() }),
            turn: Condvar::new(),
            regions: Mutex::default(),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Opens the machine that `name` describes; see [`Options::parse`].
    ///
    /// # Errors
    /// [`Error::NoDevice`] for a name that is not understood.
    pub fn open(name: &str) -> Result<Self> {
        Ok(Self::new(Options::parse(name)?))
    }

    /// What waves have kept busy in all launches that have ended: of each place in a block, all
    /// blocks together.
    pub fn issued(&self) -> Vec<Clocks> {
        locked(&self.inner.state).issued.clone()
    }

    /// A module of machine code as llvm-objdump prints it, for tests that change the code.
    ///
    /// # Errors
    /// [`Error::Compile`] with the line that is not understood.
    pub fn module(
        &self,
        compiled: &toolchain::Compiled,
        entries: &[&'static str],
    ) -> Result<Arc<dyn Module>> {
        let refused = |detail: String| Error::Compile { arch: ARCH.to_owned(), detail };
        let object = Object::new(&compiled.object).map_err(|fault| refused(fault.to_string()))?;
        let kernels = kernels_of(&object, compiled, entries).map_err(refused)?;
        let bytes = object.image().ok_or_else(|| refused("a broken code object".to_owned()))?;
        let image = self.region(bytes.len())?;
        image.write(0, &bytes);
        Ok(Arc::new(GcnModule { machine: self.inner.id, kernels, image }))
    }

    fn region(&self, bytes: usize) -> Result<Arc<Region>> {
        let refused =
            || Error::OutOfMemory { device: self.inner.options.name(), wanted_bytes: bytes as u64 };
        if bytes as u64 > limits::memory().0 {
            return Err(refused());
        }
        let region = Arc::new(Region::new(bytes).ok_or_else(refused)?);
        let mut regions = locked(&self.inner.regions);
        regions.retain(|region| region.strong_count() > 0);
        regions.push(Arc::downgrade(&region));
        Ok(region)
    }

    /// Everything about a launch that can be known to be wrong beforehand.
    fn check(&self, kernel: &Kernel, launch: &Launch<'_>) -> Result<()> {
        let options = &self.inner.options;
        let fault = |detail: String| Err(Error::Failed(format!("{}: {detail}", launch.entry)));
        let (blocks, threads) = (launch.blocks, launch.threads);
        if blocks == 0 || blocks > options.blocks {
            return fault(format!("{blocks} blocks, 1 to {} can be resident", options.blocks));
        }
        if threads == 0 || threads > kernel.threads_max {
            return fault(format!("{threads} threads a block, at most {}", kernel.threads_max));
        }
        let waves = threads.div_ceil(LANES as u32).div_ceil(UNITS);
        if waves * kernel.registers > REGISTERS {
            let (each, most) = (kernel.registers, REGISTERS / waves);
            return fault(format!("{each} registers a wave, {most} can be resident"));
        }
        let own = kernel.descriptor.local_bytes;
        if launch.shared_bytes > options.shared_bytes || launch.shared_bytes + own > LOCAL_BYTES {
            let (got, most) = (launch.shared_bytes, options.shared_bytes.min(LOCAL_BYTES - own));
            return fault(format!("{got} bytes of shared memory, at most {most}"));
        }
        let wanted = kernel.descriptor.args_bytes as usize;
        if launch.args.len() > wanted {
            return fault(format!("{} bytes of parameters, {wanted} wanted", launch.args.len()));
        }
        Ok(())
    }

    /// A launch on every rank, each with parameters of its own.
    pub(crate) fn launch_all(
        &self,
        module: &Arc<dyn Module>,
        launch: &Launch<'_>,
        ranks: &[&[u8]],
    ) -> Result<Box<dyn Flight>> {
        let other = || Error::Failed("the module was compiled for another machine".to_owned());
        let own = module.as_any().downcast_ref::<GcnModule>();
        let own = own.filter(|own| own.machine == self.inner.id).ok_or_else(other)?;
        let unknown = || Error::Failed(format!("{}: no such kernel", launch.entry));
        let (entry, kernel) = own.kernels.get_key_value(launch.entry).ok_or_else(unknown)?;
        self.check(kernel, launch)?;
        let mut args = Vec::new();
        for given in ranks {
            let region = self.region(kernel.descriptor.args_bytes as usize)?;
            region.write(0, given);
            args.push(region);
        }
        // The lock makes ticket and thread one step: a ticket without a thread would stop all.
        let state = locked(&self.inner.state);
        let job = Job {
            inner: Arc::clone(&self.inner),
            module: Arc::clone(module),
            ticket: self.inner.tickets.load(Ordering::Relaxed),
            entry,
            blocks: launch.blocks,
            threads: launch.threads,
            shared_bytes: launch.shared_bytes,
            args,
        };
        let thread = std::thread::Builder::new()
            .name("kie-gcn".to_owned())
            .spawn(move || job.run())
            .map_err(|error| Error::Failed(format!("no thread for a launch: {error}")))?;
        self.inner.tickets.fetch_add(1, Ordering::Relaxed);
        drop(state);
        Ok(Box::new(GcnFlight { thread: Some(thread), outcome: Ok(()) }))
    }
}

/// A launch on its way to its thread.
struct Job {
    inner: Arc<Inner>,
    module: Arc<dyn Module>,
    ticket: u64,
    entry: &'static str,
    /// Of a rank.
    blocks: u32,
    threads: u32,
    shared_bytes: u32,
    /// Of each rank.
    args: Vec<Arc<Region>>,
}

/// Lets the next launch begin, whatever happens to this one.
struct Turn<'a>(&'a Inner);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        locked(&self.0.state).serving += 1;
        self.0.turn.notify_all();
    }
}

impl Job {
    fn run(self) -> Result<()> {
        let mut state = locked(&self.inner.state);
        while state.serving != self.ticket {
            state = self.inner.turn.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let now_ns = state.now_ns;
        drop(state);
        let _turn = Turn(&self.inner);
        let module = self.module.as_any().downcast_ref::<GcnModule>();
        let module = module.expect("`launch_all` has looked");
        let kernel = &module.kernels[self.entry];
        let options = &self.inner.options;
        let mut run = Run {
            code: &kernel.code,
            waves: self.waves(kernel),
            world: self.world(module, kernel, now_ns),
            random: options.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            steps_max: options.steps_max,
            steps: 0,
            spent: 0,
            turns: 0,
        };
        let ended = run.all();
        let mut state = locked(&self.inner.state);
        state.now_ns = run.world.now_ns;
        for wave in &run.waves {
            if state.issued.len() <= wave.number {
                state.issued.resize(wave.number + 1, Clocks::default());
            }
            state.issued[wave.number] += wave.issued;
        }
        drop(state);
        ended.map_err(|why| Error::Failed(format!("{}: {}: {why}", options.name(), self.entry)))
    }

    fn waves(&self, kernel: &Kernel) -> Vec<Wave> {
        let descriptor = &kernel.descriptor;
        let each = self.threads.div_ceil(LANES as u32) as usize;
        let before = |n: usize| -> u32 {
            let held = USER_REGISTERS.iter().enumerate().take(n);
            held.filter(|(bit, _)| descriptor.properties >> bit & 1 == 1).map(|(_, n)| n).sum()
        };
        let mut waves = Vec::new();
        for (rank, args) in self.args.iter().enumerate() {
            for block in 0..self.blocks {
                let number = rank * self.blocks as usize + block as usize;
                for wave in 0..each {
                    let mut wave = Wave::new(number, wave, self.threads);
                    wave.v[1..].fill([JUNK; LANES]);
                    wave.s[..usize::from(VCC)].fill(JUNK);
                    if descriptor.properties >> PARAMETERS & 1 == 1 {
                        wave.set64(before(PARAMETERS) as u8, args.start() as u64);
                    }
                    if descriptor.places & 1 == 1 {
                        wave.s[descriptor.user_registers as usize] = block;
                    }
                    waves.push(wave);
                }
            }
        }
        waves
    }

    fn world(&self, module: &GcnModule, kernel: &Kernel, now_ns: u64) -> World {
        let options = &self.inner.options;
        let regions = locked(&self.inner.regions).iter().filter_map(Weak::upgrade).collect();
        let (all, dies) = (self.args.len() * self.blocks as usize, options.chiplets as usize);
        let bytes = (kernel.descriptor.local_bytes + self.shared_bytes) as usize;
        let blocks = self.blocks as usize;
        let die_of = (0..all).map(|at| at / blocks * dies + at % blocks % dies).collect();
        let weak = options.weak.then(|| Box::new(weak::Weak::new(die_of, options.seed)));
        World {
            space: Space::new(regions),
            local: vec![vec![JUNK as u8; bytes]; all],
            weak,
            changes: 0,
            local_changes: vec![0; all],
            image: module.image.start() as u64,
            now_ns,
            random: options.seed | 1,
            fault: None,
        }
    }
}

struct GcnFlight {
    thread: Option<JoinHandle<Result<()>>>,
    outcome: Result<()>,
}

impl GcnFlight {
    fn land(&mut self) {
        if let Some(thread) = self.thread.take() {
            let panicked = |_| Err(Error::Failed("the emulator panicked".to_owned()));
            self.outcome = thread.join().unwrap_or_else(panicked);
        }
    }
}

impl Flight for GcnFlight {
    /// Rests for a moment: the launch needs this machine's cores.
    fn done(&mut self) -> Result<bool> {
        if self.thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
            std::thread::sleep(LOOK);
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

impl Drop for GcnFlight {
    fn drop(&mut self) {
        self.land();
    }
}

impl Machine for Gcn {
    fn platform(&self) -> Platform {
        Platform::Hip
    }

    fn warp(&self) -> u32 {
        LANES as u32
    }

    fn info(&self) -> Result<MachineInfo> {
        let options = &self.inner.options;
        let (memory_bytes, free_bytes) = limits::memory();
        Ok(MachineInfo {
            name: options.name(),
            model: "emulator of gfx942".to_owned(),
            arch: ARCH.to_owned(),
            multiprocessors: options.blocks,
            chiplets: options.chiplets,
            shared_bytes: options.shared_bytes,
            memory_bytes,
            free_bytes,
        })
    }

    fn compile(&self, source: &Source) -> Result<Arc<dyn Module>> {
        let compiled = toolchain::compile(source, &self.inner.folder)?;
        self.module(&compiled, &source.entries)
    }

    fn alloc(&self, bytes: usize) -> Result<Memory> {
        let region = self.region(bytes)?;
        Ok(Memory { address: region.start() as u64, bytes, owner: region })
    }

    fn alloc_shared(&self, bytes: usize) -> Result<Shared> {
        let region = self.region(bytes)?;
        let start = region.start();
        // SAFETY: a region is zeroed and aligned to a page, lives in the owner given here, and is
        // reached through atomics only.
        Ok(unsafe { Shared::new(start as u64, start, bytes, region) })
    }

    fn write(&self, to: &Memory, offset: usize, bytes: &[u8]) -> Result<()> {
        region_of(to, offset, bytes.len())?.write(offset, bytes);
        Ok(())
    }

    fn read(&self, from: &Memory, offset: usize, out: &mut [u8]) -> Result<()> {
        region_of(from, offset, out.len())?.read(offset, out);
        Ok(())
    }

    fn launch(&self, module: &Arc<dyn Module>, launch: &Launch<'_>) -> Result<Box<dyn Flight>> {
        self.launch_all(module, launch, &[launch.args])
    }

    fn peer(&self) -> Result<Peer> {
        Ok(Peer {
            platform: Platform::Hip,
            name: self.inner.options.name(),
            ordinal: 0,
            owner: self.inner.id as usize,
            bus: None,
        })
    }
}

/// The region behind an emulator's memory, if the range lies in it.
fn region_of(memory: &Memory, offset: usize, bytes: usize) -> Result<&Region> {
    let fits = offset.checked_add(bytes).is_some_and(|end| end <= memory.bytes);
    match memory.owner.downcast_ref::<Region>() {
        Some(region) if fits && region.len() >= memory.bytes => Ok(region),
        Some(_) => {
            let whole = memory.bytes;
            Err(Error::Failed(format!("{bytes} bytes at {offset} of a memory of {whole} bytes")))
        }
        None => Err(Error::Failed("memory of another machine".to_owned())),
    }
}
