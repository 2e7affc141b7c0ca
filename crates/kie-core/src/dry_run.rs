//! A model planned and not loaded: what each machine would hold and do, what lies between the
//! machines, and which way their messages go. The machines may be known from a file only.

use std::path::Path;
use std::sync::Arc;

use kie_kccl::algorithm::Table;
use kie_kccl::topology::{simulated, Topology};
use kie_kernels::device::{Device, DeviceInfo, Footprint, Options};
use kie_kernels::devices;
use kie_kernels::machine::Machine;
use serde::Serialize;

use crate::builder::Builder;
use crate::error::{Error, Result};
use crate::plan;
use crate::weights::Checkpoint;

/// What [`Builder::plan`] tells.
#[derive(Debug, Clone, Serialize)]
pub struct DryRun {
    /// The device, as [`Builder::device`] takes it.
    pub device: String,
    /// What lies between its machines; nothing for the CPU, which is one.
    pub topology: Option<Topology>,
    /// The topology and the ways of messages, printed; empty for the CPU.
    pub algorithms: String,
    /// What each machine would hold, in order of rank; nothing for the CPU.
    pub ranks: Vec<Share>,
    /// The plan, printed.
    pub plan: String,
    /// All that was computed for a GPU's kernels, printed, of the first machine; empty for the CPU.
    pub lowered: String,
}

/// What one machine would hold, in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Share {
    /// Name of the machine.
    pub name: String,
    /// Which part of the model it has, in words.
    pub part: String,
    /// Weights as it reads them.
    pub weight_bytes: u64,
    /// KV pages.
    pub kv_bytes: u64,
    /// Everything else.
    pub scratch_bytes: u64,
    /// Its free memory.
    pub free_bytes: u64,
}

impl From<&Footprint> for Share {
    fn from(held: &Footprint) -> Self {
        Self {
            name: held.name.clone(),
            part: held.part.clone(),
            weight_bytes: held.weight_bytes,
            kv_bytes: held.kv_bytes,
            scratch_bytes: held.scratch_bytes,
            free_bytes: held.free_bytes,
        }
    }
}

/// Most machines of one device.
const RANKS_MAX: usize = 8;

impl Builder {
    /// Plans, reads no weights and starts nothing. With `file`, a recorded topology, the device is
    /// named on it (`auto`: all of its GPUs) and need not be there.
    ///
    /// # Errors
    /// [`Error::Topology`] for the file; otherwise as [`Builder::compile`].
    pub fn plan(self, file: Option<&Path>) -> Result<DryRun> {
        let spec = self.spec()?;
        let checkpoint = Checkpoint::open(&self.path, &spec)?;
        let checkpoint = checkpoint.with_adapter(self.config.adapter.as_deref(), &spec)?;
        let (device, topology) = match file {
            Some(file) => {
                let part = Topology::load(file)?.named(&self.config.device);
                let part = part.map_err(|error| of_file(error, file))?;
                (recorded(&part, file)?, Some(part))
            }
            None => {
                let (device, _) = self.choose(&spec, &checkpoint)?;
                let topology = between(&device.info().name, &self.options()?)?;
                (device, topology)
            }
        };
        let plan = plan::outline(&spec, &checkpoint, &*device, &self.config)?;
        let algorithms = match &topology {
            Some(one) if one.ranks() == 1 => format!("{one}\none machine: no messages\n"),
            Some(several) => Table(several).to_string(),
            None => String::new(),
        };
        let lowered = device.lowered(&plan.program)?;
        let device = device.info().name;
        let ranks = plan.machines().iter().map(Share::from).collect();
        Ok(DryRun { device, topology, algorithms, ranks, plan: plan.to_string(), lowered })
    }
}

/// An error about a topology, which knows its name only, with the file that it came from.
fn of_file(error: kie_kccl::Error, file: &Path) -> Error {
    match error {
        kie_kccl::Error::Topology { detail, .. } => {
            Error::Topology { path: file.to_path_buf(), detail }
        }
        other => other.into(),
    }
}

/// The device of machines that are known from a file.
fn recorded(topology: &Topology, file: &Path) -> Result<Arc<dyn Device>> {
    let fault = |detail: String| Error::Topology { path: file.to_path_buf(), detail };
    if topology.ranks() > RANKS_MAX {
        let got = topology.ranks();
        return Err(fault(format!("device: wanted 1 to {RANKS_MAX} GPUs of it, got {got}")));
    }
    let machines = topology.machines().map_err(|error| of_file(error, file))?;
    let kinds: Vec<_> = machines.iter().map(|machine| machine.platform()).collect();
    if kinds.iter().any(|kind| *kind != kinds[0]) {
        return Err(fault("device: wanted GPUs of one vendor, got several".to_owned()));
    }
    let names: Vec<_> = topology.gpus.iter().map(|gpu| gpu.name.as_str()).collect();
    let numbers: Vec<_> =
        names.iter().map(|name| name.split_once(':').map_or(*name, |(_, number)| number)).collect();
    let kind = names[0].split(':').next().unwrap_or(names[0]);
    let name = format!("{kind}:{}", numbers.join(","));
    Ok(devices::of_machines(&name, machines, &Options::default())?)
}

/// What lies between the machines of a device that is there.
fn between(name: &str, options: &Options) -> Result<Option<Topology>> {
    if name.split(':').next() == Some("cpu") {
        return Ok(None);
    }
    let (told, part) = simulated(name)?;
    if part.is_some() {
        return Ok(part);
    }
    let machines = devices::machines(&told, options)?;
    if !name.starts_with("sim") {
        return Ok(Some(Topology::discover(&machines)?));
    }
    let (ranks, units) = (machines.len() as u32, machines[0].info()?.multiprocessors);
    Ok(Some(Topology::virtual_ranks("sim", ranks, units * ranks, 1024)))
}

/// The GPUs of this host and what lies between them; `None` where there is none. Those that cannot
/// be opened are left out.
///
/// # Errors
/// What a driver says.
pub fn topology_of_host() -> Result<Option<Topology>> {
    let options = Options::default();
    let open = |info: kie_kernels::Result<DeviceInfo>| {
        let machines = devices::machines(&info.ok()?.name, &options);
        machines.ok()?.pop()
    };
    let machines: Vec<Arc<dyn Machine>> = devices::gpus().into_iter().filter_map(open).collect();
    if machines.is_empty() {
        return Ok(None);
    }
    Ok(Some(Topology::discover(&machines)?))
}
