//! What `kie.bench` measures inside a device; see kie-core's `measure`.

use std::path::PathBuf;

use kie_core::engine::Engine;
use kie_core::measure::{echo as round_trips, Work};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::args::{count, options as engine_options};
use crate::engine::{detached, json};

/// Times of decode steps from inside the kernel, as JSON.
#[pyfunction]
#[pyo3(signature = (path, *, prompt_tokens, tokens, runs, **options))]
pub fn measure(
    py: Python<'_>,
    path: PathBuf,
    prompt_tokens: &Bound<'_, PyAny>,
    tokens: &Bound<'_, PyAny>,
    runs: &Bound<'_, PyAny>,
    options: Option<&Bound<'_, PyDict>>,
) -> PyResult<String> {
    let config = engine_options(options)?;
    let work = Work {
        prompt_tokens: count("prompt_tokens", prompt_tokens)?,
        tokens: count("max_tokens", tokens)?,
        runs: count("runs", runs)?,
    };
    let found = detached(py, move || Engine::builder(path).config(config).measure(work))?;
    json(py, &found)
}

/// Microseconds of each of `rounds` round trips of a token between a GPU and the host.
#[pyfunction]
#[pyo3(signature = (*, rounds, **options))]
pub fn echo(
    py: Python<'_>,
    rounds: &Bound<'_, PyAny>,
    options: Option<&Bound<'_, PyDict>>,
) -> PyResult<Vec<f64>> {
    let (config, rounds) = (engine_options(options)?, count("rounds", rounds)?);
    detached(py, move || round_trips(&config, rounds))
}
