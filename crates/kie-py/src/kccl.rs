//! `kie.kccl`: collectives of one host. Bytes in, bytes out; the package turns arrays into bytes.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kie_kccl::algorithm::Table;
use kie_kccl::topology::simulated;
use kie_kccl::{Communicator as Ranks, Dtype, Error, Op, Options, Topology};
use kie_kernels::{device, devices};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyDict};

use crate::args::{count, integer};
use crate::error;
use crate::owned::Owned;

/// The exception for `error`; an exception from building it if even that fails.
fn raise(py: Python<'_>, error: &Error) -> PyErr {
    let (class, code, hint) = match error {
        Error::Ranks { .. }
        | Error::Size { .. }
        | Error::NotNumbers { .. }
        | Error::TooLarge { .. } => ("InvalidRequestError", "collective", ""),
        Error::Topology { .. } => (
            "InvalidRequestError",
            "topology",
            "correct it, or let `kie doctor --topology FILE` write that of this machine",
        ),
        Error::Unreachable { .. } => {
            ("DeviceError", "unreachable", "choose GPUs that nvidia-smi topo -p2p r shows as OK")
        }
        Error::Stalled { .. } => {
            ("DeviceError", "stalled", "the communicator is ready again: repeat the collective")
        }
        Error::Closed { .. } => ("DeviceError", "closed", "make a new communicator"),
        Error::NotBuilt { .. } => ("InvalidRequestError", "not_built", ""),
        Error::Device(kie_kernels::Error::NoDevice { .. }) => ("NoDeviceError", "no_device", ""),
        _ => ("DeviceError", "device", ""),
    };
    let context = PyDict::new(py);
    error::instance(py, class, error.to_string(), code, hint, context).unwrap_or_else(|e| e)
}

fn invalid(py: Python<'_>, message: String) -> PyErr {
    error::invalid(py, message)
}

fn op_of(py: Python<'_>, name: &str) -> PyResult<Op> {
    let names = || Op::ALL.map(Op::name).join(", ");
    Op::from_name(name).ok_or_else(|| invalid(py, format!("op {name:?}: there are {}", names())))
}

fn dtype_of(py: Python<'_>, name: &str) -> PyResult<Dtype> {
    let names = || Dtype::ALL.map(Dtype::name).join(", ");
    Dtype::from_name(name)
        .ok_or_else(|| invalid(py, format!("dtype {name:?}: there are {}", names())))
}

fn make(
    devices: &[String],
    ranks: Option<usize>,
    options: &Options,
    opening: &device::Options,
) -> Result<Ranks, Error> {
    // One device by itself is that of so many virtual ranks; otherwise its name says how many.
    let listed = |count: usize| match ranks {
        Some(got) if got != count => {
            Err(Error::Ranks { wanted: format!("{} has {count}", devices.join(" and ")), got })
        }
        _ => Ok(count),
    };
    match devices {
        [one] if one == "cpu" => return Ranks::cpu(ranks.unwrap_or(2)),
        [several] if several.starts_with("cpu:") => {
            devices::open(several, opening)?;
            return Ranks::cpu(listed(1 + several.matches(',').count())?);
        }
        _ => {}
    }
    let (mut machines, mut options) = (Vec::new(), options.clone());
    for name in devices {
        let (told, topology) = simulated(name)?;
        machines.extend(devices::machines(&told, opening)?);
        options.topology = options.topology.or(topology);
    }
    match (ranks, &machines[..]) {
        (Some(ranks), [machine]) => Ranks::virtual_ranks(machine.clone(), ranks, &options),
        (_, several) => {
            listed(several.len())?;
            Ranks::new(several, &options)
        }
    }
}

/// Ranks that work together.
#[pyclass(module = "kie._kie", frozen)]
pub struct Communicator {
    ranks: Owned<Mutex<Ranks>>,
}

impl Communicator {
    fn lock(&self, py: Python<'_>) -> PyResult<MutexGuard<'_, Ranks>> {
        // A panic under the lock leaves the devices' own state, which says if they can go on.
        Ok(self.ranks.get(py)?.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[pymethods]
impl Communicator {
    #[new]
    #[pyo3(signature = (devices, *, ranks, message_bytes, budget_s, threads, topology, nvrtc_dirs))]
    #[allow(clippy::too_many_arguments)] // one per keyword
    fn new(
        py: Python<'_>,
        devices: Vec<String>,
        ranks: &Bound<'_, PyAny>,
        message_bytes: &Bound<'_, PyAny>,
        budget_s: f64,
        threads: &Bound<'_, PyAny>,
        topology: Option<PathBuf>,
        nvrtc_dirs: Vec<PathBuf>,
    ) -> PyResult<Self> {
        let ranks: Option<usize> = integer("ranks", ranks)?;
        let (message_bytes, threads) =
            (count("message_bytes", message_bytes)?, count("threads", threads)?);
        if devices.is_empty() || (ranks.is_some() && devices.len() > 1) {
            let text = "devices: one name and a number of virtual ranks, or one name a rank";
            return Err(invalid(py, text.to_owned()));
        }
        if devices.len() > 1 && devices.iter().any(|name| name.starts_with("cpu")) {
            let text = "devices: the CPU is one: \"cpu\" with ranks=, or \"cpu:0,1\"";
            return Err(invalid(py, text.to_owned()));
        }
        let budget = Duration::try_from_secs_f64(budget_s)
            .map_err(|why| invalid(py, format!("budget_s {budget_s}: {why}")))?;
        let made = py.detach(|| {
            let topology = topology.as_deref().map(Topology::load).transpose()?;
            let options =
                Options { message_bytes, budget, threads, topology, ..Options::default() };
            let opening = device::Options { nvrtc_dirs, ..device::Options::default() };
            make(&devices, ranks, &options, &opening)
        });
        let ranks = made.map_err(|error| raise(py, &error))?;
        Ok(Self { ranks: Owned::new(Mutex::new(ranks)) })
    }

    #[getter]
    fn ranks(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.lock(py)?.ranks())
    }

    /// The topology, and the algorithm of every operation and size.
    fn table(&self, py: Python<'_>) -> PyResult<String> {
        Ok(Table(self.lock(py)?.topology()).to_string())
    }

    /// Writes the topology to a file.
    fn save_topology(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        let path: &Path = &path;
        self.lock(py)?.topology().save(path).map_err(|error| raise(py, &error))
    }

    /// The algorithm of a message.
    fn plan(&self, py: Python<'_>, op: &str, bytes: &Bound<'_, PyAny>) -> PyResult<String> {
        let (op, bytes) = (op_of(py, op)?, count("bytes", bytes)?);
        Ok(self.lock(py)?.plan(op, bytes).to_string())
    }

    /// Runs an operation: one input a rank, one output a rank.
    fn run<'py>(
        &self,
        py: Python<'py>,
        op: &str,
        dtype: &str,
        root: &Bound<'py, PyAny>,
        inputs: Vec<PyBackedBytes>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let (op, dtype, root) = (op_of(py, op)?, dtype_of(py, dtype)?, count("root", root)?);
        let ranks = self.ranks.get(py)?;
        let outputs = py.detach(|| {
            let inputs: Vec<&[u8]> = inputs.iter().map(|bytes| &**bytes).collect();
            let mut ranks = ranks.lock().unwrap_or_else(PoisonError::into_inner);
            ranks.run(op, dtype, root, &inputs)
        });
        let outputs = outputs.map_err(|error| raise(py, &error))?;
        Ok(outputs.iter().map(|bytes| PyBytes::new(py, bytes)).collect())
    }

    /// Microseconds of one operation on each rank, as the mean of `steps` inside one kernel.
    fn measure(
        &self,
        py: Python<'_>,
        op: &str,
        dtype: &str,
        bytes: &Bound<'_, PyAny>,
        steps: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<f64>> {
        let (op, dtype) = (op_of(py, op)?, dtype_of(py, dtype)?);
        let (bytes, steps) = (count("bytes", bytes)?, count("steps", steps)?);
        let ranks = self.ranks.get(py)?;
        let timing = py.detach(|| {
            let mut ranks = ranks.lock().unwrap_or_else(PoisonError::into_inner);
            ranks.measure(op, dtype, bytes, steps, None)
        });
        let timing = timing.map_err(|error| raise(py, &error))?;
        Ok(timing.rank_ns.iter().map(|ns| ns / 1e3).collect())
    }
}
