//! `Engine` and `Session`: each call converts its arguments, detaches and calls kie-core.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError, TryLockError};
use std::time::Duration;

use kie_core::engine::{self, LogitsPath};
use kie_core::plan::{save, Reads};
use kie_core::request::{Prompt, Request};
use kie_core::{session, Patience};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyDict};
use serde_json::{Map, Value};

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

/// The same for calls that may wait long: signals are looked at while they do, and what a handler
/// raises ends them.
pub(crate) fn patiently<T: Send>(
    py: Python<'_>,
    call: impl FnOnce(&Patience<'_>) -> kie_core::Result<T> + Send,
) -> PyResult<T> {
    let raised = Mutex::new(None);
    let goes_on = || {
        let signal = Python::attach(|py| py.check_signals());
        let quiet = signal.is_ok();
        if let Err(error) = signal {
            *raised.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        }
        quiet
    };
    let done = py.detach(|| call(&Patience::asking(&goes_on)));
    match raised.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => done.map_err(|error| raise(py, error)),
    }
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

/// Writes a model quantised to `to` into the new folder `out`; returns a line on what it saved.
#[pyfunction]
#[pyo3(signature = (path, out, *, to, progress))]
pub fn quantize(
    py: Python<'_>,
    path: PathBuf,
    out: PathBuf,
    to: String,
    progress: Option<Py<PyAny>>,
) -> PyResult<String> {
    interruptible(py, progress.as_ref(), move |stop, told| {
        let reads = Reads { progress: &*told, stop: &stop };
        save::quantize(&path, &out, &to, &reads)
    })
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

    /// `template`: further variables of the chat template.
    #[pyo3(signature = (prompt, messages, sampling, template=None))]
    fn stream(
        &self,
        py: Python<'_>,
        prompt: Option<&Bound<'_, PyAny>>,
        messages: Option<&Bound<'_, PyAny>>,
        sampling: &Bound<'_, PyDict>,
        template: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Stream> {
        let params = args::sampling(py, sampling)?;
        let engine = self.0.get(py)?;
        let mut prompt = args::prompt(py, prompt, messages, (&params, engine.context()))?;
        if let Some(extra) = template {
            let extra = args::object(py, extra, "chat_template_kwargs")?;
            let Prompt::Messages(messages) = &prompt else {
                let why = "chat_template_kwargs and tools go with messages, not with a prompt";
                return Err(invalid(py, why));
            };
            let messages = Value::Array(messages.clone());
            let tokenizer = engine.tokenizer();
            prompt = Prompt::Ids(patiently(py, |patience| {
                let patience = patience.at_most(params.timeout);
                tokenizer.encode_chat_within(&messages, true, &extra, &patience)
            })?);
        }
        let request = Request { prompt, params };
        Ok(Stream::new(patiently(py, |patience| engine.stream_within(request, patience))?))
    }

    fn session(&self, py: Python<'_>, system: Option<&Bound<'_, PyAny>>) -> PyResult<Session> {
        let system = system.map(|text| args::text(text, "system")).transpose()?;
        let engine = self.0.get(py)?;
        let context = engine.context();
        let session = patiently(py, |p| engine.session_within(system.as_deref(), p))?;
        Ok(Session::new(session, context))
    }

    fn load_session(&self, py: Python<'_>, path: PathBuf) -> PyResult<Session> {
        let engine = self.0.get(py)?;
        let context = engine.context();
        let session = patiently(py, |p| engine.load_session_within(&path, p))?;
        Ok(Session::new(session, context))
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
        let engine = self.0.get(py)?;
        let ids = args::prompt_ids(ids, "ids", (Some(0), engine.context()))?;
        let logits = patiently(py, |patience| engine.logits_within(&ids, path, patience))?;
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
        patiently(py, |patience| engine.tokenize_within(&text, add_special, patience))
    }

    fn detokenize(
        &self,
        py: Python<'_>,
        ids: &Bound<'_, PyAny>,
        skip_special: bool,
    ) -> PyResult<String> {
        let ids = args::ids(ids, "ids", args::IDS_MAX)?;
        let engine = self.0.get(py)?;
        patiently(py, |patience| engine.detokenize_within(&ids, skip_special, patience))
    }

    fn apply_chat_template(
        &self,
        py: Python<'_>,
        messages: &Bound<'_, PyAny>,
        add_generation_prompt: bool,
        template: &Bound<'_, PyAny>,
    ) -> PyResult<String> {
        let messages = Value::Array(args::messages(py, messages)?);
        let extra = args::object(py, template, "chat_template_kwargs")?;
        let tokenizer = self.0.get(py)?.tokenizer();
        patiently(py, |patience| {
            let rendered = (&messages, add_generation_prompt, &extra);
            tokenizer.apply_chat_template_within(rendered.0, rendered.1, rendered.2, patience)
        })
    }

    fn warmup(&self, py: Python<'_>) -> PyResult<()> {
        let engine = self.0.get(py)?;
        patiently(py, |patience| engine.warmup_within(patience))
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
pub struct Session {
    session: Owned<Mutex<session::Session>>,
    /// Positions of a longest sequence.
    context: usize,
}

impl Session {
    fn new(session: session::Session, context: usize) -> Self {
        Self { session: Owned::new(Mutex::new(session)), context }
    }

    /// Runs `call` detached, one at a time; whoever waits for another thread's call hears signals.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut session::Session, &Patience<'_>) -> kie_core::Result<T> + Send,
    ) -> PyResult<T> {
        let session = self.session.get(py)?;
        patiently(py, |patience| {
            let mut session = loop {
                match session.try_lock() {
                    Ok(session) => break session,
                    Err(TryLockError::Poisoned(poisoned)) => break poisoned.into_inner(),
                    Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(2)),
                }
                patience.check("another thread's call of the session")?;
            };
            call(&mut session, patience)
        })
    }
}

#[pymethods]
impl Session {
    /// `template`: further variables of the chat template.
    #[pyo3(signature = (prompt, messages, sampling, template=None))]
    fn stream(
        &self,
        py: Python<'_>,
        prompt: Option<&Bound<'_, PyAny>>,
        messages: Option<&Bound<'_, PyAny>>,
        sampling: &Bound<'_, PyDict>,
        template: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Stream> {
        let params = args::sampling(py, sampling)?;
        let prompt = args::prompt(py, prompt, messages, (&params, self.context))?;
        let extra = match template {
            Some(extra) => args::object(py, extra, "chat_template_kwargs")?,
            None => Map::new(),
        };
        let turn = self.with(py, |session, p| session.stream_within(prompt, params, &extra, p))?;
        Ok(Stream::new(turn))
    }

    fn fork(&self, py: Python<'_>) -> PyResult<Self> {
        Ok(Self::new(self.with(py, |session, p| session.fork_within(p))?, self.context))
    }

    fn rollback(&self, py: Python<'_>, to: &Bound<'_, PyAny>) -> PyResult<()> {
        let to: usize = args::count("to", to)?;
        self.with(py, |session, patience| session.rollback_within(to, patience))
    }

    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        self.with(py, |session, patience| session.save_within(&path, patience))
    }

    fn turns(&self, py: Python<'_>) -> PyResult<usize> {
        self.with(py, |session, _| Ok(session.turns()))
    }
}
