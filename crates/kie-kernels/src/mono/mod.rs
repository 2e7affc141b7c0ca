//! The monokernel: one launch that holds the whole decode loop, over any [`Machine`].
//!
//! A program comes in as every device gets it; [`lower`] reads it as layers of a few classes and
//! decides every size, [`pack`] brings the weights into the order in which blocks take them,
//! [`runner`] feeds launches and carries their tokens to the mailbox.

pub mod clock;
pub mod echo;
pub mod interleave;
pub mod loaded;
pub mod lower;
pub mod pack;
pub mod prefill;
mod probe;
pub mod runner;
#[cfg(test)]
pub(crate) mod shapes;
pub mod source;
pub mod upload;
pub mod wire;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use self::interleave::Bounds;
use self::loaded::Loaded;
use self::lower::layout::Layout;
use self::lower::model::{self, Model};
use self::lower::partition::Partition;
use self::lower::tiling::AsHalves;
use self::lower::tuning::Tuning;
use self::prefill::Plan;
use self::probe::Probe;
use self::runner::Runner;
use crate::abi::{Codes, Encoding, PageGroup, Program, PAGE};
use crate::buffer::{Buffer, HostBytes};
use crate::device::{Device, DeviceInfo, ExactReuse, Footprint, Options, Running, Stop};
use crate::error::{Error, Result};
use crate::host::side_by_side;
use crate::lookup::DRAFT_MAX;
use crate::machine::{Machine, Platform};
use crate::mailbox::Mailbox;
use crate::meter::Meter;
use crate::validate::ValidProgram;

/// How long a wait inside a kernel lasts where nobody says.
const HANG_TIMEOUT: Duration = Duration::from_secs(1);

/// A machine as a device: weights stay where they are on the host until a program starts, which
/// packs them onto the machine.
pub struct Mono {
    /// In order of rank; all run every program together.
    machines: Vec<Arc<dyn Machine>>,
    info: DeviceInfo,
    first_seqno: u32,
    hang_timeout: Duration,
    bounds: Bounds,
    /// See [`Options::reproducible`].
    reproducible: bool,
    /// See [`Model::parts`].
    parts: u32,
    stop: Stop,
    /// Whether prompts run in the prefill kernel where it fits.
    prefill_kernel: Option<bool>,
    /// In place of the machine's own row.
    tuning: Option<Tuning>,
    /// Times launches; some of what it runs computes garbage.
    meter: Option<Arc<Meter>>,
    /// What the last program became: an engine asks for it several times while it opens.
    last: Mutex<Option<(Program, Lowered)>>,
}

/// What each rank runs of a program, and its partition.
type Ranks = Arc<[(Model, Partition)]>;
/// The same of what predicts further tokens beside a model, where something does.
type Lowered = (Ranks, Option<Ranks>);

impl Mono {
    /// The device of one machine, or of several as one.
    ///
    /// # Errors
    /// What a machine says when asked what it has.
    pub fn new(name: &str, machines: Vec<Arc<dyn Machine>>, options: &Options) -> Result<Self> {
        let infos = machines.iter().map(|m| m.info()).collect::<Result<Vec<_>>>()?;
        let first = &infos[0];
        let info = DeviceInfo {
            name: name.to_owned(),
            model: match infos.len() {
                1 => first.model.clone(),
                several => format!("{several} x {}", first.model),
            },
            blocks: first.multiprocessors,
            memory_bytes: infos.iter().map(|i| i.memory_bytes).sum(),
            // All hold the same, so what one has not is of no use on the others.
            free_bytes: infos.iter().map(|i| i.free_bytes).min().unwrap_or(0) * infos.len() as u64,
            arch: first.arch.clone(),
        };
        Ok(Self {
            machines,
            info,
            first_seqno: options.first_seqno.unwrap_or(1),
            hang_timeout: options.hang_timeout.unwrap_or(HANG_TIMEOUT),
            prefill_kernel: options.prefill_kernel,
            meter: options.meter.clone(),
            bounds: Bounds { gap: options.max_itl, launch: options.max_launch },
            tuning: options.tuning,
            reproducible: options.reproducible,
            parts: if options.exact { 2 } else { 1 },
            stop: options.stop.clone(),
            last: Mutex::default(),
        })
    }

    /// How the prefill kernel runs a model, if it does.
    fn plan(
        &self,
        model: &Model,
        partition: &Partition,
        machine: &dyn Machine,
        program: &ValidProgram,
    ) -> Result<Option<Plan>> {
        // The simulator's wide tiles are slow: its tests ask for them.
        let usual = machine.platform() != Platform::Sim;
        // Its activations have one part.
        if !self.prefill_kernel.unwrap_or(usual) || self.parts > 1 || model.mtp.is_some() {
            return Ok(None);
        }
        let on = (machine.platform(), &machine.info()?);
        let program = program.program();
        let positions = (program.dims.max_positions, program.dims.chunk() as u32);
        let plan = Plan::new(model, partition, on, positions, self.bounds.gap.is_some());
        Ok(plan.map(|plan| plan.with_residuals(program.predicts())))
    }

    fn lower(&self, program: &ValidProgram) -> Result<Ranks> {
        Ok(self.lower_both(program)?.0)
    }

    /// The program's model, and what predicts further tokens beside it.
    fn lower_both(&self, program: &ValidProgram) -> Result<Lowered> {
        let program = program.program();
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, lowered)) = last.as_ref().filter(|(lowered, _)| lowered == program) {
            return Ok(lowered.clone());
        }
        let ranks = self.machines.len() as u32;
        let model = self.partitioned(Model::read(program, ranks)?, program)?;
        let mtp = Model::read_mtp(program, ranks)?;
        let mtp = mtp.map(|mtp| self.partitioned(mtp, program)).transpose()?;
        for ((of_model, part), (of_mtp, other)) in model.iter().zip(mtp.iter().flat_map(|m| &**m)) {
            goes_beside(program, (of_model, part), (of_mtp, other))?;
        }
        let lowered = (model, mtp);
        *last = Some((program.clone(), lowered.clone()));
        Ok(lowered)
    }

    /// A model's partition on each machine.
    fn partitioned(&self, model: Model, program: &Program) -> Result<Ranks> {
        let model = Model { parts: self.parts, ..model };
        let one = |machine: &Arc<dyn Machine>| -> Result<(Model, Partition)> {
            let machine = machine.info()?;
            let tuning = self.tuning.unwrap_or_else(|| Tuning::of(&machine));
            let partition = Partition::tuned(&model, &machine, program.dims.max_positions, tuning)?;
            refuse_rounding(&model, &partition)?;
            Ok((model.clone(), partition))
        };
        self.machines.iter().map(one).collect()
    }

    /// Everything of a model, on all machines, which know each other's words.
    fn load_all(
        &self,
        program: &ValidProgram,
        buffers: &[Buffer],
        lowered: &Ranks,
    ) -> Result<Vec<Loaded>> {
        let load = |rank: &usize| -> Result<Loaded> {
            let (rank, machine) = (*rank, &self.machines[*rank]);
            self.stop.check()?;
            let (model, partition) = lowered[rank].clone();
            let plan = self.plan(&model, &partition, &**machine, program)?;
            let parts = (model, partition, plan);
            Loaded::new(machine.clone(), program, buffers, parts, rank as u32)
        };
        let ranks: Vec<usize> = (0..self.machines.len()).collect();
        let mut loaded = side_by_side(&ranks, "loading", load)?;
        self.stop.check()?;
        let words: Vec<_> = loaded.iter().map(|l| (l.machine.clone(), l.words_address())).collect();
        for rank in &mut loaded {
            rank.connect(&words)?;
        }
        Ok(loaded)
    }
}

/// What predicts further tokens reads the residual where the model's kernels leave it, and its
/// columns are drafts'.
fn goes_beside(
    program: &Program,
    (model, partition): (&Model, &Partition),
    (mtp, other): (&Model, &Partition),
) -> Result<()> {
    let refuse = |why: &str| {
        let detail = format!("for the monokernel: multi-token prediction {why}");
        Err(Error::InvalidProgram { step: program.model_steps(), detail })
    };
    if model.parts > 1 && other.columns == 1 {
        return refuse("of layers with experts does not go with exact=True");
    }
    let [kind] = &other.kernels(mtp, Platform::Cuda)[..] else { return refuse("in no one kernel") };
    if other.columns == 1 || Layout::new(mtp, other, *kind).is_err() {
        return refuse("has no room in shared memory for columns of drafts");
    }
    if (partition.hidden, partition.columns) != (other.hidden, other.columns) {
        return refuse("has other columns than the model beside it");
    }
    if model.lanes > 1 || model.hyper.is_some() {
        return refuse("of several residual streams");
    }
    Ok(())
}

/// Weights that become halves are rounded: no exact numbers follow from them.
fn refuse_rounding(model: &Model, partition: &Partition) -> Result<()> {
    let rounded = partition.as_halves.iter().find(|matrix| matrix.rounds);
    let Some(AsHalves { why, .. }) = rounded.filter(|_| model.parts > 1) else { return Ok(()) };
    let detail = format!(
        "exact=True: weights would be rounded to halves on {} ranks ({why}); device=\"cpu\" rounds \
         none",
        model.ranks
    );
    Err(Error::InvalidProgram { step: usize::MAX, detail })
}

impl Device for Mono {
    fn info(&self) -> DeviceInfo {
        self.info.clone()
    }

    fn load(&self, bytes: Arc<dyn HostBytes>) -> Result<Buffer> {
        Ok(Buffer::in_place(bytes))
    }

    fn rounds_f32(&self) -> bool {
        true
    }

    fn carries_columns(&self) -> bool {
        true
    }

    fn carries(&self, encoding: &Encoding) -> bool {
        match encoding.codes {
            Codes::I4 | Codes::Q8x0 | Codes::Q4x0 => true,
            Codes::F32 | Codes::F16 | Codes::Bf16 | Codes::E4m3 | Codes::E2m1 | Codes::I8 => {
                !encoding.zeros
            }
            Codes::Q4k | Codes::Q6k => false,
        }
    }

    fn describe(&self, program: &ValidProgram) -> Result<String> {
        let (model, partition) = &self.lower(program)?[0];
        let prompts = match self.plan(model, partition, &*self.machines[0], program)? {
            Some(plan) => plan.to_string(),
            None => {
                format!("prompts   {} positions a pass of the decode kernel\n", partition.columns)
            }
        };
        let exact = match self.parts {
            1 => "",
            _ => "exact     two halves a number, keys and values in float32\n",
        };
        let mtp = match self.lower_both(program)?.1 {
            None => String::new(),
            Some(mtp) => {
                let bytes = mtp[0].1.read_bytes(&mtp[0].0) * u64::from(mtp[0].1.blocks);
                format!("mtp       a kernel of its own, which reads {bytes} bytes a draft\n")
            }
        };
        Ok(format!("{partition}{}{exact}{prompts}{mtp}", partition.placement(model)))
    }

    fn lowered(&self, program: &ValidProgram) -> Result<String> {
        let (model, partition) = &self.lower(program)?[0];
        lower::print::lowered(model, partition, self.machines[0].platform())
    }

    fn chunk(&self, experts: bool) -> u32 {
        let ranks = self.machines.len() as u32;
        match self.machines[0].platform() {
            Platform::Cuda if self.parts == 1 => prefill::chunk(ranks, experts),
            Platform::Cuda | Platform::Hip | Platform::Sim => 512,
        }
    }

    fn page_bytes(&self, group: &PageGroup) -> u64 {
        model::page_bytes(group, (self.machines.len() as u32, self.info.blocks), self.parts)
    }

    fn as_halves(&self, program: &ValidProgram) -> Result<Vec<u32>> {
        let (model, partition) = &self.lower(program)?[0];
        Ok(partition.tensors_as_halves(model))
    }

    fn footprints(&self, program: &ValidProgram) -> Result<Vec<Footprint>> {
        let (ranks, mtp) = self.lower_both(program)?;
        let one = |(rank, (model, partition)): (usize, &(Model, Partition))| -> Result<Footprint> {
            let plan = self.plan(model, partition, &*self.machines[rank], program)?;
            let info = self.machines[rank].info()?;
            let program = program.program();
            let mut all = loaded::bytes(program, model, partition, plan.as_ref());
            if let Some(mtp) = &mtp {
                let more = loaded::bytes(program, &mtp[rank].0, &mtp[rank].1, None);
                all.iter_mut().zip(more).for_each(|(bytes, more)| *bytes += more);
            }
            let [weight_bytes, kv_bytes, scratch_bytes] = all;
            let part = model.part(rank as u32);
            let (name, free_bytes) = (info.name, info.free_bytes);
            Ok(Footprint { name, part, weight_bytes, kv_bytes, scratch_bytes, free_bytes })
        };
        ranks.iter().enumerate().map(one).collect()
    }

    fn compile(&self, program: &ValidProgram) -> Result<()> {
        let (ranks, mtp) = self.lower_both(program)?;
        for (machine, (model, partition)) in self.machines.iter().zip(mtp.iter().flat_map(|m| &**m))
        {
            loaded::compile(&**machine, model, partition, None, true)?;
        }
        self.machines.iter().zip(&*ranks).try_for_each(|(machine, (model, partition))| {
            let plan = self.plan(model, partition, &**machine, program)?;
            let (_, wide) = loaded::compile(&**machine, model, partition, plan.as_ref(), true)?;
            machine.compile(&upload::kernel(machine.platform()))?;
            wide.transpose().map(drop)
        })
    }

    /// Products over few positions of a chunk are cut along k, so a position's bits depend on how
    /// many go through the layers with it: whole chunks are alike whatever their prompts. Columns
    /// of the decode kernel have their bits alone.
    fn exact_reuse(&self, program: &ValidProgram) -> Result<ExactReuse> {
        let (model, partition) = &self.lower(program)?[0];
        let plan = self.plan(model, partition, &*self.machines[0], program)?;
        Ok(match plan {
            Some(plan) => ExactReuse { every: plan.chunk, last: false },
            None => ExactReuse { every: PAGE as u32, last: true },
        })
    }

    fn refuses_drafts(&self, program: &ValidProgram) -> Option<&'static str> {
        let ranks = self.lower(program).ok()?;
        let (model, partition) = &ranks[0];
        let kernels = partition.kernels(model, self.machines[0].platform());
        let none = !kernels.iter().any(|kernel| kernel.lookup);
        none.then_some("its kernels have room for one row of a sequence a step")
    }

    fn masked_drafts(&self, program: &ValidProgram) -> usize {
        match (self.refuses_drafts(program), self.lower(program)) {
            (None, Ok(ranks)) => DRAFT_MAX.min(ranks[0].1.columns as usize - 1),
            (Some(_), _) | (_, Err(_)) => 0,
        }
    }

    fn echo(&self, rounds: u32) -> Result<Vec<f64>> {
        echo::round_trips(&*self.machines[0], rounds, self.hang_timeout)
    }

    fn start(
        &self,
        program: ValidProgram,
        buffers: Vec<Buffer>,
        mailbox: Arc<Mailbox>,
    ) -> Result<Box<dyn Running>> {
        let (lowered, mtp) = self.lower_both(&program)?;
        let mut loaded = self.load_all(&program, &buffers, &lowered)?;
        let mtp = mtp.map(|mtp| self.load_all(&program, &buffers, &mtp)).transpose()?;
        let scratch: Vec<_> =
            loaded.iter().filter_map(|l| Some(l.prefill.as_ref()?.scratch())).collect();
        for prefill in loaded.iter_mut().filter_map(|l| l.prefill.as_mut()) {
            prefill.connect(&scratch);
        }
        if let Some(meter) = &self.meter {
            for rank in &mut loaded {
                rank.probe = Some(Probe::new(
                    &*rank.machine,
                    &rank.model,
                    &rank.partition,
                    rank.dims.max_positions,
                )?);
            }
            meter.started(loaded.len(), probe::phases(&loaded[0].model, &loaded[0].partition));
        }
        let (seqno, patience) = (self.first_seqno, self.hang_timeout);
        let mut runner = Runner::new(loaded, mailbox, seqno, patience, self.bounds);
        if let Some(mtp) = mtp {
            runner.set_predictor(mtp, seqno, patience);
        }
        runner.reproducible = self.reproducible;
        Ok(Box::new(runner.metered(self.meter.clone())))
    }
}
