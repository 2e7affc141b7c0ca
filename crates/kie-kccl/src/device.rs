//! Collectives on machines: layout of the symmetric memory, launches on all ranks, and the look
//! into what they left behind.
//!
//! Invariants: a launch is over on all ranks before the next one is made; a failed one is followed
//! by a clearing of all flags and words, while no kernel runs, or by no other launch at all.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kie_kernels::machine::{Flight, Launch, Machine, Module, Platform, Source};
use kie_kernels::mono::source::join;

use crate::algorithm::{Algorithm, Kind, BLOCKS_MAX, PUSH_BYTES_MAX};
use crate::error::{Error, Result, Wait};
use crate::op::Op;
use crate::symmetric::Symmetric;

/// The device functions and the kernel.
const KCCL: (&str, &str) = ("common/kccl.h", include_str!("../kernels/common/kccl.h"));

/// kccl.h's `kRanksMax`, `kPhases`, and the places of things.
pub const RANKS_MAX: usize = 8;
const PHASES: usize = 3;
const AT_WHY: usize = 8;
const AT_STAMPS: usize = 64;
const AT_FLAGS: usize = 4096;
const AT_SLOTS: usize = AT_FLAGS + 8 * PHASES * RANKS_MAX * BLOCKS_MAX as usize;
const SLOT_WORDS: usize = PUSH_BYTES_MAX as usize / 4;
const SLOT_BYTES: usize = 2 * RANKS_MAX * SLOT_WORDS * 8;
/// After this seqno all is cleared and they start anew.
const SEQNO_LAST: u32 = (1 << 31) - 1;
/// The kernels for [`Kind::OneShot`] and [`Kind::Bulk`].
const ENTRIES: [&str; 2] = ["kie_collective", "kie_collective_bulk"];
/// How much longer than its waits a launch may take before it is given up.
const GRACE: Duration = Duration::from_secs(20);

/// Where things lie in the symmetric memory of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Words that a rank may push to another at once.
    pub slot_words: usize,
    /// Offset of the staging.
    pub staging: usize,
    /// Offset of the input.
    pub input: usize,
    /// Offset of the output.
    pub output: usize,
    /// Bytes in all.
    pub bytes: usize,
}

impl Layout {
    pub(crate) fn new(message_bytes: usize) -> Self {
        // Each slice is rounded up to 16 bytes.
        let area = (message_bytes + 16 * RANKS_MAX).next_multiple_of(256);
        let staging = (AT_SLOTS + SLOT_BYTES).next_multiple_of(256);
        let (input, output) = (staging + area, staging + 2 * area);
        Self { slot_words: SLOT_WORDS, staging, input, output, bytes: staging + 3 * area }
    }
}

/// kccl.h's `Args`.
#[derive(Debug, Clone, Copy, Default)]
struct Args {
    base: [u64; RANKS_MAX],
    slot_words: u64,
    staging: u64,
    budget_ns: u64,
    input: u64,
    output: u64,
    quads: u64,
    first_rank: u32,
    blocks: u32,
    threads: u32,
    op: u32,
    dtype: u32,
    spare: u32,
    root: u32,
    piece: u32,
    seqno: u32,
    steps: u32,
    warm: u32,
    scale: f32,
}

impl Args {
    fn bytes(&self) -> Vec<u8> {
        let wide =
            [self.slot_words, self.staging, self.budget_ns, self.input, self.output, self.quads];
        let narrow = [
            self.first_rank,
            self.blocks,
            self.threads,
            self.op,
            self.dtype,
            self.spare,
            self.root,
            self.piece,
            self.seqno,
            self.steps,
            self.warm,
            self.scale.to_bits(),
        ];
        let wide = self.base.iter().chain(&wide).flat_map(|word| word.to_le_bytes());
        wide.chain(narrow.iter().flat_map(|word| word.to_le_bytes())).collect()
    }
}

/// One launch on all ranks.
#[derive(Debug, Clone, Copy)]
pub struct Job {
    /// What is done.
    pub op: Op,
    /// The kernel's number of the format.
    pub dtype: u32,
    /// Which rank's data a broadcast carries.
    pub root: usize,
    /// Bytes of a slice, a multiple of 16.
    pub slice_bytes: usize,
    /// How it is done.
    pub algorithm: Algorithm,
    /// How often, one after another.
    pub steps: u32,
    /// Steps before the clock starts.
    pub warm: u32,
    /// What sums are multiplied by.
    pub scale: f32,
}

/// The ranks of a communicator on machines.
pub struct Devices {
    memory: Symmetric,
    layout: Layout,
    modules: Vec<Arc<dyn Module>>,
    /// All ranks of this process are blocks of one launch.
    one_launch: bool,
    budget: Duration,
    seqno: u32,
    closed: Option<String>,
}

impl Devices {
    /// Compiles everything that a collective needs, over memory that was laid out for messages of
    /// so many bytes.
    pub fn new(
        memory: Symmetric,
        layout: Layout,
        budget: Duration,
        first_seqno: u32,
    ) -> Result<Self> {
        let (local, first) = (memory.local(), memory.machine(memory.local().start));
        let one_launch = local.clone().all(|rank| Arc::ptr_eq(memory.machine(rank), first));
        let launches = if one_launch { 1 } else { local.len() };
        let modules: Result<Vec<_>> = local
            .take(launches)
            .map(|rank| compile(&**memory.machine(rank), memory.ranks()))
            .collect();
        let (modules, seqno) = (modules?, first_seqno);
        Ok(Self { memory, layout, modules, one_launch, budget, seqno, closed: None })
    }

    pub fn memory(&self) -> &Symmetric {
        &self.memory
    }

    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// The next collective's number.
    pub fn seqno(&self) -> u32 {
        self.seqno
    }

    /// Does the job on all ranks and waits for its end.
    pub fn run(&mut self, job: &Job) -> Result<()> {
        if let Some(why) = &self.closed {
            return Err(Error::Closed { why: why.clone() });
        }
        if SEQNO_LAST - self.seqno < job.steps {
            self.clear("all sequence numbers have been used")?;
        }
        let seqno = self.seqno;
        self.seqno += job.steps;
        let ended = self.fly(job, seqno);
        let waits = self.waits()?;
        let outcome = match (ended, waits.is_empty()) {
            (ended, true) => ended,
            // A rank that was never launched is why the others stalled.
            (Err(error), false) => Err(error),
            (Ok(()), false) => Err(Error::Stalled { op: job.op.name(), seqno, waits }),
        };
        match &outcome {
            Err(error) if self.closed.is_none() => {
                // Elsewhere the others' words would have to go, too, while none of them runs.
                match self.clear(&error.to_string()) {
                    Ok(()) | Err(Error::Closed { .. }) => {}
                    Err(other) => return Err(other),
                }
            }
            Ok(()) | Err(_) => {}
        }
        outcome
    }

    /// Nanoseconds between the clock's start and the end, of each rank's slowest block.
    pub fn elapsed_ns(&self, blocks: u32) -> Result<Vec<u64>> {
        let one = |rank: usize| {
            let mut bytes = vec![0; 16 * blocks as usize];
            self.memory.read(rank, AT_STAMPS, &mut bytes)?;
            let stamps = words(&bytes);
            let start = stamps.iter().step_by(2).min().copied().unwrap_or(0);
            let end = stamps.iter().skip(1).step_by(2).max().copied().unwrap_or(0);
            Ok(end.saturating_sub(start))
        };
        self.memory.local().map(one).collect()
    }

    fn fly(&mut self, job: &Job, seqno: u32) -> Result<()> {
        let mut flights = Vec::new();
        let mut refused = None;
        for (index, module) in self.modules.iter().enumerate() {
            let rank = self.memory.local().start + index;
            let args = self.args(job, seqno, rank).bytes();
            let each = if self.one_launch { self.memory.local().len() as u32 } else { 1 };
            let launch = Launch {
                entry: ENTRIES[usize::from(job.algorithm.kind == Kind::Bulk)],
                blocks: job.algorithm.blocks * each,
                threads: job.algorithm.threads,
                shared_bytes: 0,
                args: &args,
            };
            match self.memory.machine(rank).launch(module, &launch) {
                Ok(flight) => flights.push(flight),
                Err(error) => {
                    refused = Some(Error::from(error));
                    break;
                }
            }
        }
        // Those that fly end by themselves, whatever happened to the others.
        let landed = self.land(flights, job.steps);
        refused.map_or(Ok(()), Err).and(landed)
    }

    fn land(&mut self, mut flights: Vec<Box<dyn Flight>>, steps: u32) -> Result<()> {
        let patience = self.budget + GRACE + Duration::from_micros(u64::from(steps) * 200);
        let deadline = Instant::now() + patience;
        let mut outcome = Ok(());
        while !flights.is_empty() {
            let mut index = 0;
            while index < flights.len() {
                match flights[index].done() {
                    Ok(false) => index += 1,
                    Ok(true) => drop(flights.swap_remove(index)),
                    Err(error) => {
                        drop(flights.swap_remove(index));
                        self.memory.keep();
                        self.closed = Some(error.to_string());
                        outcome = Err(error.into());
                    }
                }
            }
            if Instant::now() >= deadline {
                let why = format!("a kernel does not end within {} s", patience.as_secs());
                self.memory.keep();
                self.closed = Some(why.clone());
                return Err(Error::Closed { why });
            }
            if !flights.is_empty() {
                std::thread::sleep(Duration::from_micros(20));
            }
        }
        outcome
    }

    /// The waits that expired, if any did.
    fn waits(&mut self) -> Result<Vec<Wait>> {
        if self.closed.is_some() {
            return Ok(Vec::new());
        }
        let mut found = Vec::new();
        for rank in self.memory.local() {
            let mut word = [0; 8];
            self.memory.read(rank, AT_WHY, &mut word).map_err(|error| self.close(error))?;
            if let Some(wait) = Wait::of(u64::from_le_bytes(word)) {
                found.push(wait);
            }
        }
        Ok(found)
    }

    /// Zeroes everything that carries a seqno, on all ranks; with ranks of other processes, which
    /// may be at work, there is no more to be done.
    fn clear(&mut self, why: &str) -> Result<()> {
        if self.memory.local().len() < self.memory.ranks() {
            self.closed = Some(why.to_owned());
            return Err(Error::Closed { why: why.to_owned() });
        }
        let zeros = vec![0; AT_SLOTS + SLOT_BYTES];
        for rank in 0..self.memory.ranks() {
            self.memory.write(rank, 0, &zeros).map_err(|error| self.close(error))?;
        }
        self.seqno = 1;
        Ok(())
    }

    fn close(&mut self, error: Error) -> Error {
        self.closed = Some(error.to_string());
        error
    }

    fn args(&self, job: &Job, seqno: u32, first_rank: usize) -> Args {
        let mut base = [0; RANKS_MAX];
        for (rank, at) in base.iter_mut().enumerate().take(self.memory.ranks()) {
            *at = self.memory.address(rank);
        }
        Args {
            base,
            slot_words: self.layout.slot_words as u64,
            staging: self.layout.staging as u64,
            budget_ns: u64::try_from(self.budget.as_nanos()).unwrap_or(u64::MAX),
            input: self.layout.input as u64,
            output: self.layout.output as u64,
            quads: job.slice_bytes as u64 / 16,
            first_rank: first_rank as u32,
            blocks: job.algorithm.blocks,
            threads: job.algorithm.threads,
            op: Op::ALL.iter().position(|op| *op == job.op).unwrap_or(0) as u32,
            dtype: job.dtype,
            spare: 0,
            root: job.root as u32,
            piece: job.algorithm.piece_bytes / 16,
            seqno,
            steps: job.steps,
            warm: job.warm,
            scale: job.scale,
        }
    }
}

/// Little-endian words.
fn words(bytes: &[u8]) -> Vec<u64> {
    let word = |part: &[u8]| part.iter().rev().fold(0, |all, byte| all << 8 | u64::from(*byte));
    bytes.chunks_exact(8).map(word).collect()
}

/// The kernel of its own for so many ranks.
pub(crate) fn source(platform: Platform, ranks: usize) -> Source {
    let defines = vec![("KIE_RANKS".to_owned(), ranks.to_string())];
    Source { defines, text: join(platform, KCCL), entries: ENTRIES.to_vec() }
}

fn compile(machine: &dyn Machine, ranks: usize) -> Result<Arc<dyn Module>> {
    Ok(machine.compile(&source(machine.platform(), ranks))?)
}
