//! What `kie.doctor()` cannot find out from Python.

use std::path::PathBuf;

use kie_core::model;
use kie_kernels::host::allowed_cores;
use kie_kernels::{bandwidth, cpu, device, devices, limits, simd};
use pyo3::exceptions::{PyMemoryError, PyValueError};
use pyo3::prelude::*;

use crate::engine::{detached, json};

/// Processor's name, the instruction set that the kernels use, memory in all and free, in bytes,
/// and the threads that an engine on the CPU has.
#[pyfunction]
pub fn host() -> (String, &'static str, u64, u64, usize) {
    let (total, free) = limits::memory();
    (cpu::processor_name(), simd::detect().name(), total, free, allowed_cores())
}

/// The `model_type`s that kie runs, and how weights may be stored.
#[pyfunction]
pub fn supported() -> (Vec<&'static str>, Vec<&'static str>) {
    (model::architectures().collect(), model::encodings().to_vec())
}

/// The C++ compiler that `device="sim"` would use; None if there is none.
#[pyfunction]
pub fn compiler(py: Python<'_>) -> Option<String> {
    py.detach(kie_kernels::sim::compiler).map(|(words, _)| words)
}

/// Name, model, architecture, multiprocessors, memory in all and free.
type Gpu = (String, String, String, u32, u64, u64);

/// The GPUs that can be used, and what the drivers said of the others.
#[pyfunction]
pub fn gpus(py: Python<'_>) -> (Vec<Gpu>, Vec<String>) {
    let (mut found, mut refused) = (Vec::new(), Vec::new());
    for gpu in py.detach(devices::gpus) {
        match gpu {
            Ok(i) => {
                found.push((i.name, i.model, i.arch, i.blocks, i.memory_bytes, i.free_bytes));
            }
            Err(error) => refused.push(error.to_string()),
        }
    }
    (found, refused)
}

/// The GPUs and what lies between them, printed, and as the JSON of a file; None without GPUs.
#[pyfunction]
pub fn topology(py: Python<'_>) -> PyResult<Option<(String, String)>> {
    let found = detached(py, kie_core::dry_run::topology_of_host)?;
    found.map(|topology| Ok((topology.to_string(), json(py, &topology)?))).transpose()
}

/// Bytes a second that `threads` threads read from a buffer of `gigabytes` (best of three passes,
/// buffer written before): what a CPU engine's decode is measured against.
#[pyfunction]
#[pyo3(signature = (threads = None, gigabytes = 2.0))]
pub fn read_bandwidth(py: Python<'_>, threads: Option<usize>, gigabytes: f64) -> PyResult<f64> {
    let threads = threads.unwrap_or_else(allowed_cores);
    if !(1..=1024).contains(&threads) {
        return Err(PyValueError::new_err(format!("threads must be 1 to 1024, got {threads}")));
    }
    if !(gigabytes > 0.0 && gigabytes <= 64.0) {
        return Err(PyValueError::new_err(format!("gigabytes must be 0 to 64, got {gigabytes}")));
    }
    py.detach(|| {
        let words = (gigabytes * 1e9 / 8.0) as u64;
        let mut buffer = Vec::new();
        let bytes = words as usize * 8;
        buffer.try_reserve_exact(bytes).map_err(|_| {
            PyMemoryError::new_err(format!("a buffer of {bytes} bytes to read cannot be had"))
        })?;
        for i in 0..words {
            buffer.extend_from_slice(&i.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        }
        let team = cpu::team::Team::new(threads, true)?;
        let passes = (0..3).map(|_| cpu::stream::read_bandwidth(&buffer, &team));
        Ok(passes.fold(0.0, f64::max) * 1e9)
    })
}

/// Bytes a second that a GPU's kernels read from its memory, by the ring of copies that decode has
/// (best of three runs of 60 ms); None where less than 2 GiB are free. `nvrtc_dirs`: folders in
/// which the CUDA run-time compiler may lie.
#[pyfunction]
pub fn gpu_bandwidth(
    py: Python<'_>,
    name: &str,
    nvrtc_dirs: Vec<PathBuf>,
) -> PyResult<Option<f64>> {
    detached(py, || {
        let options = device::Options { nvrtc_dirs, ..device::Options::default() };
        let machines = devices::machines(name, &options)?;
        Ok(match machines.first() {
            Some(machine) => bandwidth::measure(&**machine)?,
            None => None,
        })
    })
}
