//! What `kie.bench` measures inside a device; see kie-core's `measure`.

use std::path::PathBuf;

use kie_core::engine::Engine;
use kie_core::measure::{echo as round_trips, Work};
use kie_core::request::EngineConfig;
use pyo3::prelude::*;

use crate::engine::{detached, json};

/// Times of decode steps from inside the kernel, as JSON.
#[pyfunction]
#[pyo3(signature = (path, *, device, dtype, max_seq_len, cache_dir, nvrtc_dirs, prompt_tokens,
    tokens, runs))]
#[allow(clippy::too_many_arguments)] // one per keyword
pub fn measure(
    py: Python<'_>,
    path: PathBuf,
    device: String,
    dtype: String,
    max_seq_len: Option<usize>,
    cache_dir: Option<PathBuf>,
    nvrtc_dirs: Vec<PathBuf>,
    prompt_tokens: usize,
    tokens: usize,
    runs: usize,
) -> PyResult<String> {
    let defaults = EngineConfig::default();
    let config = EngineConfig { device, dtype, max_seq_len, cache_dir, nvrtc_dirs, ..defaults };
    let work = Work { prompt_tokens, tokens, runs };
    let found = detached(py, move || Engine::builder(path).config(config).measure(work))?;
    json(py, &found)
}

/// Microseconds of each of `rounds` round trips of a token between a GPU and the host.
#[pyfunction]
#[pyo3(signature = (*, device, cache_dir, nvrtc_dirs, rounds))]
pub fn echo(
    py: Python<'_>,
    device: String,
    cache_dir: Option<PathBuf>,
    nvrtc_dirs: Vec<PathBuf>,
    rounds: u32,
) -> PyResult<Vec<f64>> {
    let config = EngineConfig { device, cache_dir, nvrtc_dirs, ..EngineConfig::default() };
    detached(py, move || round_trips(&config, rounds))
}
