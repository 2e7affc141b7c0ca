//! Measuring the decode kernel from inside: how long each step took by the device's clock, where a
//! block's time went phase by phase, and what is left of a step without its waits, its weights or
//! the other machines.
//!
//! A device that was opened with a [`Meter`] has a kernel of one column for each further [`Mode`]
//! beside the usual ones, and runs the meter's present mode. Some of the modes compute garbage, so
//! a meter is for those who look at times and hand no token on ([`Mode::is_garbage`]).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::loaded::died;
use super::lower::model::{Layer, Model};
use super::lower::partition::{Kind, Matrix, Partition};
use super::machine::{Machine, Memory, Module};
use super::source;
use super::wire::Args;
use crate::error::{Error, Result};

/// Phases of a step that a block tells apart (block.h's `stamp`).
pub const PHASES: usize = 16;

/// What a launch of one sequence's tokens runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// The usual kernel.
    #[default]
    Full,
    /// The usual kernel, its time told phase by phase.
    Trace,
    /// Nobody waits for another's words: what the weight stream takes by itself.
    StreamOnly,
    /// No weights arrive and nobody waits for them: what the exchange takes by itself.
    ExchangeOnly,
    /// Each of several machines by itself: it takes its own words for those of the others. What a
    /// step takes where nobody is far away.
    Alone,
}

impl Mode {
    const ALL: [Self; 5] =
        [Self::Full, Self::Trace, Self::StreamOnly, Self::ExchangeOnly, Self::Alone];

    /// Those that make sense on so many machines, in order.
    pub fn of(ranks: usize) -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(move |mode| *mode != Self::Alone || ranks > 1)
    }

    /// As reports have it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Trace => "trace",
            Self::StreamOnly => "stream_only",
            Self::ExchangeOnly => "exchange_only",
            Self::Alone => "alone",
        }
    }

    /// Whether what it computes means nothing.
    pub const fn is_garbage(self) -> bool {
        matches!(self, Self::StreamOnly | Self::ExchangeOnly | Self::Alone)
    }
}

/// What one launch took.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// What it ran.
    pub mode: Mode,
    /// Device time at the start of each step and at the end of the last, in nanoseconds.
    pub stamps: Vec<u64>,
    /// Clock ticks of each block in each phase; empty but for [`Mode::Trace`].
    pub ticks: Vec<[u64; PHASES]>,
}

/// What a phase is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Phase {
    /// In words.
    pub name: &'static str,
    /// Bytes of weights that all blocks take in it a step.
    pub bytes: u64,
}

#[derive(Debug, Default)]
struct Book {
    mode: Mode,
    ranks: usize,
    phases: Vec<Phase>,
    seen: Vec<Seen>,
}

/// Between who measures and the thread that runs launches.
#[derive(Debug, Default)]
pub struct Meter(Mutex<Book>);

impl Meter {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Chooses what later launches run.
    pub fn set_mode(&self, mode: Mode) {
        self.book().mode = mode;
    }

    /// What launches run now.
    pub fn mode(&self) -> Mode {
        self.book().mode
    }

    /// Machines that run together, once a program has been started.
    pub fn ranks(&self) -> usize {
        self.book().ranks
    }

    /// The phases, once a program has been started.
    pub fn phases(&self) -> Vec<Phase> {
        self.book().phases.clone()
    }

    /// What was seen since the last call.
    pub fn take(&self) -> Vec<Seen> {
        std::mem::take(&mut self.book().seen)
    }

    pub(super) fn started(&self, ranks: usize, phases: Vec<Phase>) {
        let mut book = self.book();
        (book.ranks, book.phases) = (ranks, phases);
    }

    pub(super) fn note(&self, seen: Seen) {
        self.book().seen.push(seen);
    }
}

/// The phases of a step, in the order of the kernel's numbers.
pub fn phases(model: &Model, partition: &Partition) -> Vec<Phase> {
    let blocks = u64::from(partition.blocks);
    let layers = |m: Matrix| {
        let of = |layer: &Layer| partition.classes[layer.class].tiling(m).bytes();
        blocks * model.layer.iter().map(of).sum::<u64>()
    };
    let head = blocks * partition.head_bytes();
    let all = [
        ("attention input: gather, norm", 0),
        ("qkv: product", layers(Matrix::Qkv)),
        ("qkv: turn, publish", 0),
        ("attention: scores, values", 0),
        ("attention: merge, gather", 0),
        ("attention output: product", layers(Matrix::Output)),
        ("attention output: add, publish", 0),
        ("mlp input: gather, norm", 0),
        ("gate/up: product", layers(Matrix::GateUp)),
        ("gate/up: silu, publish", 0),
        ("activations: gather", 0),
        ("down: product", layers(Matrix::Down)),
        ("down: add, publish", 0),
        ("head input: gather, norm", 0),
        ("head: product", head),
        ("token: offers, choice", 0),
    ];
    all.map(|(name, bytes)| Phase { name, bytes }).into()
}

/// A program's kernels to measure with, and where they write times.
pub(super) struct Probe {
    /// By mode, and by whether pages are streamed.
    modules: Vec<((Mode, bool), Arc<dyn Module>)>,
    stamps: Memory,
    trace: Memory,
}

impl Probe {
    /// Compiles them, side by side. `positions`: of a longest sequence.
    ///
    /// # Errors
    /// What the machine's compiler says, [`Error::OutOfMemory`].
    pub fn new(
        machine: &dyn Machine,
        model: &Model,
        partition: &Partition,
        positions: u32,
    ) -> Result<Self> {
        let one = |mode: Mode, kind: Kind| -> Result<((Mode, bool), Arc<dyn Module>)> {
            let source = source::decode(machine.platform(), (model, partition), kind, mode)?;
            Ok(((mode, kind.streamed), machine.compile(&source)?))
        };
        let one = &one;
        let mut kinds = partition.kernels(model, machine.platform());
        kinds.retain(|kind| kind.columns == 1);
        let modules = std::thread::scope(|scope| {
            let modes = Mode::of(model.ranks as usize).skip(1);
            let pairs = modes.flat_map(|m| kinds.iter().map(move |k| (m, *k)));
            let all: Vec<_> = pairs.map(|(m, k)| scope.spawn(move || one(m, k))).collect();
            let landed = all.into_iter().map(|t| t.join().unwrap_or_else(|_| Err(died())));
            landed.collect::<Result<_>>()
        })?;
        let stamps = machine.alloc((positions as usize + 1) * 8)?;
        let trace = machine.alloc(partition.blocks as usize * PHASES * 8)?;
        Ok(Self { modules, stamps, trace })
    }

    /// The kernel of a mode, if it is not the usual one; `args` learns where to write.
    pub fn module(&self, mode: Mode, streamed: bool, args: &mut Args) -> Option<&Arc<dyn Module>> {
        args.stamps = self.stamps.address;
        if mode == Mode::Trace {
            args.trace = self.trace.address;
        }
        self.modules.iter().find(|(m, _)| *m == (mode, streamed)).map(|(_, module)| module)
    }

    /// What a launch of so many steps wrote.
    ///
    /// # Errors
    /// What the machine says; [`Error::Failed`] for steps that were not made.
    pub fn read(&self, machine: &dyn Machine, mode: Mode, steps: u32) -> Result<Seen> {
        let words = |memory: &Memory, count: usize| -> Result<Vec<u64>> {
            let mut bytes = vec![0; count * 8];
            machine.read(memory, 0, &mut bytes)?;
            let word = |b: &[u8]| u64::from_le_bytes(std::array::from_fn(|i| b[i]));
            Ok(bytes.chunks_exact(8).map(word).collect())
        };
        let stamps = words(&self.stamps, steps as usize + 1)?;
        if stamps.iter().zip(&stamps[1..]).any(|(a, b)| b < a) {
            let detail = format!("the stamps of {steps} measured steps run back");
            return Err(Error::Failed(detail));
        }
        let ticks = match mode {
            Mode::Trace => words(&self.trace, self.trace.bytes / 8)?,
            Mode::Full | Mode::StreamOnly | Mode::ExchangeOnly | Mode::Alone => Vec::new(),
        };
        let ticks = ticks.chunks_exact(PHASES).map(|t| std::array::from_fn(|i| t[i])).collect();
        Ok(Seen { mode, stamps, ticks })
    }
}
