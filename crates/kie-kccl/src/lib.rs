//! Collectives of one host: which rank can reach which ([`topology`]), memory that all ranks map
//! ([`symmetric`]), the algorithm of a message ([`algorithm`]), and the [`Communicator`] over them.
//! The device side is `kernels/common/kccl.h`, for use inside other kernels, too.
//!
//! Ranks are GPUs of this process, or one of each of several processes ([`Joining`]), virtual ranks
//! of one machine (a GPU or the simulator), or nothing but the host's memory (`cpu`, the definition
//! of what every result must be).
//!
//! Invariants: every rank's bits are the same, and those of [`cpu`]; a rank that dies or is late
//! ends the collective in [`Error::Stalled`] within the budget.

pub mod algorithm;
pub mod cpu;
mod device;
mod discover;
pub mod error;
mod nvml;
pub mod op;
mod processes;
pub mod symmetric;
#[cfg(test)]
mod tests;
pub mod topology;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kie_kernels::machine::{Machine, Platform};

pub use self::algorithm::{choose, Algorithm};
use self::device::{Devices, Job};
pub use self::device::{Layout, RANKS_MAX};
pub use self::error::{Error, Result};
pub use self::op::{Dtype, Op};
pub use self::processes::Joining;
use self::symmetric::Symmetric;
pub use self::topology::Topology;

/// What a caller may choose about a communicator.
#[derive(Debug, Clone)]
pub struct Options {
    /// Largest message, the larger of a rank's input and output, in bytes.
    pub message_bytes: usize,
    /// Longest wait of a rank for another.
    pub budget: Duration,
    /// Most threads of a block; the simulator is slow with many.
    pub threads: u32,
    /// What lies between the ranks; `None`: what the machines tell.
    pub topology: Option<Topology>,
    /// Where collectives start counting, chosen by tests.
    pub first_seqno: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            message_bytes: 64 << 20,
            budget: Duration::from_secs(1),
            threads: 1024,
            topology: None,
            first_seqno: 1,
        }
    }
}

/// More than any machine has; three such areas and what lies before them have addresses.
const MESSAGE_BYTES_MAX: usize = 1 << 48;

/// How long collectives took inside one kernel.
#[derive(Debug, Clone, PartialEq)]
pub struct Timing {
    /// How they were done.
    pub algorithm: Algorithm,
    /// Nanoseconds of one, on each rank.
    pub rank_ns: Vec<f64>,
}

impl Timing {
    /// That of the slowest rank.
    pub fn ns(&self) -> f64 {
        self.rank_ns.iter().copied().fold(0.0, f64::max)
    }
}

/// Ranks that work together.
pub struct Communicator {
    ranks: usize,
    topology: Topology,
    message_bytes: usize,
    /// `None`: the host's memory.
    devices: Option<Devices>,
}

impl Communicator {
    /// Virtual ranks in the host's memory, one after another.
    ///
    /// # Errors
    /// [`Error::Ranks`].
    pub fn cpu(ranks: usize) -> Result<Self> {
        check_ranks(ranks)?;
        let topology = Topology::virtual_ranks("cpu", ranks as u32, ranks as u32, 64);
        Ok(Self { ranks, topology, message_bytes: usize::MAX, devices: None })
    }

    /// Virtual ranks on one machine, which runs their blocks side by side in one launch.
    ///
    /// # Errors
    /// [`Error::Ranks`], also where each rank would not have a multiprocessor, or what the machine
    /// says.
    pub fn virtual_ranks(
        machine: Arc<dyn Machine>,
        ranks: usize,
        options: &Options,
    ) -> Result<Self> {
        check_ranks(ranks)?;
        let info = machine.info()?;
        if (info.multiprocessors as usize) < ranks {
            let wanted = format!("{} has {} multiprocessors", info.name, info.multiprocessors);
            return Err(Error::Ranks { wanted, got: ranks });
        }
        let own = Topology::virtual_ranks(
            &info.name,
            ranks as u32,
            info.multiprocessors,
            options.threads,
        );
        Self::over(&vec![machine; ranks], own, options)
    }

    /// One rank on each machine; all must be different, or of one simulator.
    ///
    /// # Errors
    /// [`Error::Ranks`], [`Error::Size`], [`Error::Unreachable`] with the pair, [`Error::NotBuilt`]
    /// for several simulators, or what a machine says.
    pub fn new(machines: &[Arc<dyn Machine>], options: &Options) -> Result<Self> {
        check_ranks(machines.len())?;
        if machines[0].platform() != Platform::Sim {
            return Self::over(machines, Topology::discover(machines)?, options);
        }
        let owner = machines[0].peer()?.owner;
        for machine in machines {
            if machine.peer()?.owner != owner {
                // Another scheduler has a time of its own: bounds on waits would mean nothing.
                return Err(Error::NotBuilt {
                    what: "one communicator over several simulators",
                    remedy: "make ranks of one (sim:0,1)",
                });
            }
        }
        let (info, ranks) = (machines[0].info()?, machines.len() as u32);
        let units = info.multiprocessors * ranks;
        let own = Topology::virtual_ranks(&info.name, ranks, units, options.threads);
        Self::over(machines, own, options)
    }

    fn over(machines: &[Arc<dyn Machine>], own: Topology, options: &Options) -> Result<Self> {
        let layout = layout_for(options)?;
        let topology = options.topology.clone().unwrap_or(own);
        topology.check()?;
        if topology.ranks() != machines.len() {
            let wanted = format!("the topology {} has {}", topology.name, topology.ranks());
            return Err(Error::Ranks { wanted, got: machines.len() });
        }
        let memory = Symmetric::new(machines, layout.bytes)?;
        Self::over_memory(memory, layout, topology, options)
    }

    /// Over memory that all ranks have mapped.
    fn over_memory(
        memory: Symmetric,
        layout: Layout,
        mut topology: Topology,
        options: &Options,
    ) -> Result<Self> {
        for gpu in &mut topology.gpus {
            gpu.threads = gpu.threads.min(options.threads.max(32) / 32 * 32);
        }
        let ranks = memory.ranks();
        let devices = Devices::new(memory, layout, options.budget, options.first_seqno)?;
        let message_bytes = options.message_bytes;
        Ok(Self { ranks, topology, message_bytes, devices: Some(devices) })
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// The ranks of this process, which collectives here take inputs of and have outputs for: all,
    /// but for a communicator of several processes.
    pub fn local(&self) -> Range<usize> {
        self.devices.as_ref().map_or(0..self.ranks, |devices| devices.memory().local())
    }

    /// What lies between them.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// How a message of so many bytes goes; the same on all ranks.
    pub fn plan(&self, op: Op, bytes: usize) -> Algorithm {
        choose(op, bytes as u64, &self.topology)
    }

    /// The memory that all ranks map, with its layout; `None` for `cpu`.
    pub fn symmetric(&self) -> Option<(&Symmetric, Layout)> {
        self.devices.as_ref().map(|devices| (devices.memory(), devices.layout()))
    }

    /// Sequence number of the next collective; `None` for `cpu`.
    pub fn seqno(&self) -> Option<u32> {
        self.devices.as_ref().map(Devices::seqno)
    }

    /// Every rank gets the sum of all inputs.
    ///
    /// # Errors
    /// As [`Communicator::run`].
    pub fn all_reduce(&mut self, dtype: Dtype, inputs: &[&[u8]]) -> Result<Vec<Vec<u8>>> {
        self.run(Op::AllReduce, dtype, 0, inputs)
    }

    /// Rank r gets part r of the sum of all inputs.
    ///
    /// # Errors
    /// As [`Communicator::run`].
    pub fn reduce_scatter(&mut self, dtype: Dtype, inputs: &[&[u8]]) -> Result<Vec<Vec<u8>>> {
        self.run(Op::ReduceScatter, dtype, 0, inputs)
    }

    /// Every rank gets all inputs, in the order of the ranks.
    ///
    /// # Errors
    /// As [`Communicator::run`].
    pub fn all_gather(&mut self, dtype: Dtype, inputs: &[&[u8]]) -> Result<Vec<Vec<u8>>> {
        self.run(Op::AllGather, dtype, 0, inputs)
    }

    /// Every rank gets the root's input; the others' are ignored, and have its length.
    ///
    /// # Errors
    /// As [`Communicator::run`].
    pub fn broadcast(
        &mut self,
        dtype: Dtype,
        root: usize,
        inputs: &[&[u8]],
    ) -> Result<Vec<Vec<u8>>> {
        self.run(Op::Broadcast, dtype, root, inputs)
    }

    /// Rank r gets part r of every input.
    ///
    /// # Errors
    /// As [`Communicator::run`].
    pub fn all_to_all(&mut self, dtype: Dtype, inputs: &[&[u8]]) -> Result<Vec<Vec<u8>>> {
        self.run(Op::AllToAll, dtype, 0, inputs)
    }

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// As [`Communicator::run`].
    pub fn barrier(&mut self) -> Result<()> {
        self.run(Op::Barrier, Dtype::F32, 0, &vec![&[][..]; self.local().len()]).map(|_| ())
    }

    /// Any of the operations, by the algorithm of [`Communicator::plan`]: one input a rank of this
    /// process, all of the same length; one output each. After [`Error::Stalled`] the communicator
    /// is ready again; one of several processes is closed.
    ///
    /// # Errors
    /// [`Error::NotNumbers`], [`Error::Size`], [`Error::TooLarge`], [`Error::Stalled`],
    /// [`Error::Closed`], or what a machine says.
    pub fn run(
        &mut self,
        op: Op,
        dtype: Dtype,
        root: usize,
        inputs: &[&[u8]],
    ) -> Result<Vec<Vec<u8>>> {
        let slice = self.check(op, dtype, root, inputs)?;
        let algorithm = self.plan(op, slice * op.slices(self.ranks));
        self.run_as(op, dtype, root, inputs, algorithm)
    }

    /// As [`Communicator::run`], by another algorithm than planned: for tests and measurements.
    ///
    /// # Errors
    /// As [`Communicator::run`].
    pub fn run_as(
        &mut self,
        op: Op,
        dtype: Dtype,
        root: usize,
        inputs: &[&[u8]],
        algorithm: Algorithm,
    ) -> Result<Vec<Vec<u8>>> {
        let (ranks, local) = (self.ranks, self.local());
        let slice = self.check(op, dtype, root, inputs)?;
        let Some(devices) = self.devices.as_mut() else {
            return Ok(cpu::run(op, dtype, root, inputs));
        };
        if slice == 0 && op != Op::Barrier {
            return Ok(vec![Vec::new(); local.len()]);
        }
        let (layout, padded) = (devices.layout(), slice.next_multiple_of(16));
        for (rank, input) in local.clone().zip(inputs).filter(|(_, input)| !input.is_empty()) {
            let mut bytes = vec![0; padded * op.slices_in(ranks)];
            for (to, from) in bytes.chunks_exact_mut(padded).zip(input.chunks_exact(slice)) {
                to[..slice].copy_from_slice(from);
            }
            devices.memory().write(rank, layout.input, &bytes)?;
        }
        let (dtype, scale) = (dtype as u32, 1.0);
        let (steps, warm, slice_bytes) = (1, 0, padded);
        devices.run(&Job { op, dtype, root, slice_bytes, algorithm, steps, warm, scale })?;
        let read = |rank: usize| {
            let mut bytes = vec![0; padded * op.slices_out(ranks)];
            devices.memory().read(rank, layout.output, &mut bytes)?;
            let slices = bytes.chunks_exact(padded.max(1)).flat_map(|part| &part[..slice]);
            Ok(slices.copied().collect())
        };
        local.map(read).collect()
    }

    /// Does an operation `warm + steps` times inside one kernel on each rank and measures the last
    /// `steps`. Each all-reduce takes the last one's result, as a mean, so they cannot overlap.
    ///
    /// # Errors
    /// [`Error::NotBuilt`] for `cpu`, [`Error::Size`] for no steps; otherwise as
    /// [`Communicator::run`].
    pub fn measure(
        &mut self,
        op: Op,
        dtype: Dtype,
        bytes: usize,
        steps: u32,
        algorithm: Option<Algorithm>,
    ) -> Result<Timing> {
        let algorithm = algorithm.unwrap_or_else(|| self.plan(op, bytes));
        let ranks = self.ranks;
        check_numbers(op, dtype)?;
        let devices = self.devices.as_mut().ok_or(Error::NotBuilt {
            what: "a clock for virtual ranks of the CPU",
            remedy: "measure on cuda",
        })?;
        if bytes > self.message_bytes {
            return Err(too_large(op, bytes, self.message_bytes));
        }
        if steps == 0 {
            let (what, wanted) = ("steps".to_owned(), "1 or more".to_owned());
            return Err(Error::Size { op: op.name(), what, wanted, got: 0 });
        }
        let slice_bytes = (bytes / op.slices(ranks).max(1)).next_multiple_of(16);
        let warm = steps.div_ceil(10);
        devices.run(&Job {
            op,
            dtype: dtype as u32,
            root: 0,
            slice_bytes,
            algorithm,
            steps: warm + steps,
            warm,
            scale: 1.0 / ranks as f32,
        })?;
        let elapsed = devices.elapsed_ns(algorithm.blocks)?;
        let rank_ns = elapsed.iter().map(|ns| *ns as f64 / f64::from(steps)).collect();
        Ok(Timing { algorithm, rank_ns })
    }

    /// Bytes of a slice, if all fits together.
    fn check(&self, op: Op, dtype: Dtype, root: usize, inputs: &[&[u8]]) -> Result<usize> {
        let fault = |what: String, wanted: String, got: usize| {
            Err(Error::Size { op: op.name(), what, wanted, got })
        };
        check_numbers(op, dtype)?;
        let here = self.local().len();
        if inputs.len() != here {
            return fault("inputs".into(), format!("one a rank, {here}"), inputs.len());
        }
        if root >= self.ranks {
            return fault("root".into(), format!("below {}", self.ranks), root);
        }
        let bytes = inputs[0].len();
        if let Some(rank) = inputs.iter().position(|input| input.len() != bytes) {
            let what = format!("bytes of rank {rank}");
            return fault(what, format!("{bytes}, as of rank 0"), inputs[rank].len());
        }
        let slices = op.slices_in(self.ranks);
        let unit = slices * dtype.bytes();
        if bytes.checked_rem(unit).unwrap_or(bytes) != 0 {
            return fault("bytes of a rank".into(), format!("a multiple of {unit}"), bytes);
        }
        let slice = bytes.checked_div(slices).unwrap_or(0);
        let message = slice * op.slices(self.ranks);
        if message > self.message_bytes {
            return Err(too_large(op, message, self.message_bytes));
        }
        Ok(slice)
    }
}

/// The layout of a communicator's memory, if its options make sense.
fn layout_for(options: &Options) -> Result<Layout> {
    let refuse = |what: &str, wanted: String, got: usize| {
        Err(Error::Size { op: "communicator", what: what.to_owned(), wanted, got })
    };
    if options.threads == 0 {
        return refuse("threads", "1 or more".to_owned(), 0);
    }
    if options.message_bytes > MESSAGE_BYTES_MAX {
        let wanted = format!("at most {MESSAGE_BYTES_MAX}");
        return refuse("message_bytes", wanted, options.message_bytes);
    }
    Ok(Layout::new(options.message_bytes))
}

fn too_large(op: Op, bytes: usize, most: usize) -> Error {
    Error::TooLarge { op: op.name(), bytes, most }
}

fn check_numbers(op: Op, dtype: Dtype) -> Result<()> {
    if !op.takes(dtype) {
        return Err(Error::NotNumbers { op: op.name(), dtype: dtype.name() });
    }
    Ok(())
}

fn check_ranks(ranks: usize) -> Result<()> {
    match ranks {
        1..=RANKS_MAX => Ok(()),
        got => Err(Error::Ranks { wanted: format!("wanted 1 to {RANKS_MAX} of one host"), got }),
    }
}
