//! `Engine` and `Session`: each call converts its arguments, detaches and calls kie-core.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use kie_core::engine::{self, LogitsPath};
use kie_core::request::Request;
use kie_core::session;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyDict};

use crate::args;
use crate::error::{invalid, raise};
use crate::loading::interruptible;
use crate::owned::Owned;
use crate::stream::Stream;

/// A loaded model.
#[pyclass(frozen, module = "kie._kie")]
pub struct Engine(Owned<engine::Engine>);

impl Engine {
    /// The engine itself.
    pub(crate) fn core(&self, py: Python<'_>) -> PyResult<engine::Engine> {
        self.0.get(py).cloned()
    }
}

/// Runs a fallible call of kie-core without the interpreter.
pub(crate) fn detached<T: Send>(
    py: Python<'_>,
    call: impl FnOnce() -> kie_core::Result<T> + Send,
) -> PyResult<T> {
    py.detach(call).map_err(|error| raise(py, error))
}

/// Compiles ahead what an engine with these options would, and returns the printed plan.
#[pyfunction]
#[pyo3(signature = (path, **options))]
pub fn compile(
    py: Python<'_>,
    path: PathBuf,
    options: Option<&Bound<'_, PyDict>>,
) -> PyResult<String> {
    let builder = engine::Engine::builder(path).config(args::options(options)?);
    interruptible(py, None, |stop, _| builder.stop(stop).compile())
}

/// The plan of a model that is not loaded, as JSON; `topology`, a file, stands for the machine.
#[pyfunction]
#[pyo3(signature = (path, *, topology, **options))]
pub fn plan(
    py: Python<'_>,
    path: PathBuf,
    topology: Option<PathBuf>,
    options: Option<&Bound<'_, PyDict>>,
) -> PyResult<String> {
    let builder = engine::Engine::builder(path).config(args::options(options)?);
    json(py, &detached(py, move || builder.plan(topology.as_deref()))?)
}

/// Values as the JSON that Python reads.
pub(crate) fn json<T: serde::Serialize>(py: Python<'_>, value: &T) -> PyResult<String> {
    serde_json::to_string(value).map_err(|e| invalid(py, format!("report: {e}")))
}

#[pymethods]
impl Engine {
    #[new]
    #[pyo3(signature = (path, *, progress, **options))]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        progress: Option<Py<PyAny>>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let builder = engine::Engine::builder(path).config(args::options(options)?);
        let opened = interruptible(py, progress.as_ref(), |stop, told| {
            builder.stop(stop).progress(told).build()
        });
        Ok(Self(Owned::new(opened?)))
    }

    #[pyo3(signature = (prompt, messages, sampling))]
    fn stream(
        &self,
        py: Python<'_>,
        prompt: Option<&Bound<'_, PyAny>>,
        messages: Option<&Bound<'_, PyAny>>,
        sampling: &Bound<'_, PyDict>,
    ) -> PyResult<Stream> {
        let params = args::sampling(py, sampling)?;
        let prompt = args::prompt(py, prompt, messages)?;
        let engine = self.0.get(py)?;
        Ok(Stream::new(detached(py, || engine.stream(Request { prompt, params }))?))
    }

    fn session(&self, py: Python<'_>, system: Option<&Bound<'_, PyAny>>) -> PyResult<Session> {
        let system = system.map(|text| args::text(text, "system")).transpose()?;
        let engine = self.0.get(py)?;
        Ok(Session::new(detached(py, || engine.session(system.as_deref()))?))
    }

    /// Little-endian float32 `[tokens, vocab]` and the two sizes.
    fn logits<'py>(
        &self,
        py: Python<'py>,
        ids: &Bound<'py, PyAny>,
        path: &str,
    ) -> PyResult<(Bound<'py, PyByteArray>, usize, usize)> {
        let path = match path {
            "prefill" => LogitsPath::Prefill,
            "decode" => LogitsPath::Decode,
            other => {
                let message = format!("path must be 'prefill' or 'decode', got {other:?}");
                return Err(invalid(py, message));
            }
        };
        let ids = args::ids(ids, "ids")?;
        let engine = self.0.get(py)?;
        let logits = detached(py, || engine.logits(&ids, path))?;
        let bytes = PyByteArray::new_with(py, logits.values.len() * 4, |bytes| {
            for (place, value) in bytes.chunks_exact_mut(4).zip(&logits.values) {
                place.copy_from_slice(&value.to_le_bytes());
            }
            Ok(())
        })?;
        Ok((bytes, logits.tokens, logits.vocab))
    }

    fn tokenize(
        &self,
        py: Python<'_>,
        text: &Bound<'_, PyAny>,
        add_special: bool,
    ) -> PyResult<Vec<u32>> {
        let text = args::text(text, "text")?;
        let engine = self.0.get(py)?;
        detached(py, || engine.tokenize(&text, add_special))
    }

    fn detokenize(
        &self,
        py: Python<'_>,
        ids: &Bound<'_, PyAny>,
        skip_special: bool,
    ) -> PyResult<String> {
        let ids = args::ids(ids, "ids")?;
        let engine = self.0.get(py)?;
        detached(py, || engine.detokenize(&ids, skip_special))
    }

    fn apply_chat_template(
        &self,
        py: Python<'_>,
        messages: &Bound<'_, PyAny>,
        add_generation_prompt: bool,
    ) -> PyResult<String> {
        let messages = args::messages(py, messages)?;
        let engine = self.0.get(py)?;
        detached(py, || engine.apply_chat_template(&messages, add_generation_prompt))
    }

    fn warmup(&self, py: Python<'_>) -> PyResult<()> {
        let engine = self.0.get(py)?;
        detached(py, || engine.warmup())
    }

    /// The report as JSON.
    fn info(&self, py: Python<'_>) -> PyResult<String> {
        json(py, &self.0.get(py)?.info())
    }

    /// The counters as JSON.
    fn metrics(&self, py: Python<'_>) -> PyResult<String> {
        json(py, &self.0.get(py)?.metrics())
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let engine = self.0.get(py)?;
        py.detach(|| engine.close());
        Ok(())
    }

    /// In a fork it is: the engine thread stayed behind.
    fn is_closed(&self) -> bool {
        self.0.here().is_none_or(engine::Engine::is_closed)
    }
}

/// A conversation whose KV stays between turns.
#[pyclass(frozen, module = "kie._kie")]
pub struct Session(Owned<Mutex<session::Session>>);

impl Session {
    fn new(session: session::Session) -> Self {
        Self(Owned::new(Mutex::new(session)))
    }

    /// Runs `call` detached, one at a time.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut session::Session) -> kie_core::Result<T> + Send,
    ) -> PyResult<T> {
        let session = self.0.get(py)?;
        detached(py, || call(&mut session.lock().unwrap_or_else(PoisonError::into_inner)))
    }
}

#[pymethods]
impl Session {
    #[pyo3(signature = (prompt, messages, sampling))]
    fn stream(
        &self,
        py: Python<'_>,
        prompt: Option<&Bound<'_, PyAny>>,
        messages: Option<&Bound<'_, PyAny>>,
        sampling: &Bound<'_, PyDict>,
    ) -> PyResult<Stream> {
        let params = args::sampling(py, sampling)?;
        let prompt = args::prompt(py, prompt, messages)?;
        Ok(Stream::new(self.with(py, |session| session.stream(prompt, params))?))
    }

    fn fork(&self, py: Python<'_>) -> PyResult<Self> {
        Ok(Self::new(self.with(py, |session| session.fork())?))
    }

    fn rollback(&self, py: Python<'_>, to: &Bound<'_, PyAny>) -> PyResult<()> {
        let to: usize = args::count("to", to)?;
        self.with(py, |session| session.rollback(to))
    }

    fn turns(&self, py: Python<'_>) -> PyResult<usize> {
        self.with(py, |session| Ok(session.turns()))
    }
}
