//! What a stream yields and how it ends, as frozen Python objects without `__dict__`.
//! Fields become Python objects when they are read, so that a token nobody looks into costs
//! one allocation. All are made from their fields, too, which is how they are pickled.

use kie_core::request;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple, PyType};

/// What pickles an object: its class and its fields in the order of its constructor.
type Reduced<'py> = (Bound<'py, PyType>, Bound<'py, PyTuple>);

/// One generated token.
#[pyclass(frozen, eq, module = "kie", skip_from_py_object)]
#[derive(Clone, PartialEq)]
pub struct Token(pub request::Token);

#[pymethods]
impl Token {
    #[classattr]
    fn __match_args__(py: Python<'_>) -> PyResult<Bound<'_, PyTuple>> {
        PyTuple::new(py, ["text", "token_ids", "index"])
    }

    #[new]
    #[pyo3(signature = (text, token_ids, index, logprob, top_logprobs, t_ns))]
    fn new(
        text: String,
        token_ids: Vec<u32>,
        index: usize,
        logprob: Option<f32>,
        top_logprobs: Vec<PyRef<'_, TopLogprob>>,
        t_ns: u64,
    ) -> Self {
        let top_logprobs = TopLogprob::inner(&top_logprobs);
        Self(request::Token { text, token_ids, index, logprob, top_logprobs, t_ns })
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Reduced<'py>> {
        let (text, ids, top) = (self.text(), self.token_ids(py)?, self.top_logprobs(py)?);
        let fields = (text, ids, self.0.index, self.0.logprob, top, self.0.t_ns);
        Ok((py.get_type::<Self>(), fields.into_pyobject(py)?))
    }

    #[getter]
    fn text(&self) -> &str {
        &self.0.text
    }

    #[getter]
    fn token_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.0.token_ids)
    }

    #[getter]
    fn index(&self) -> usize {
        self.0.index
    }

    #[getter]
    fn logprob(&self) -> Option<f32> {
        self.0.logprob
    }

    #[getter]
    fn top_logprobs<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        TopLogprob::tuple(py, &self.0.top_logprobs)
    }

    #[getter]
    fn t_ns(&self) -> u64 {
        self.0.t_ns
    }

    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        dict.set_item("text", &self.0.text)?;
        dict.set_item("token_ids", &self.0.token_ids)?;
        dict.set_item("index", self.0.index)?;
        dict.set_item("logprob", self.0.logprob)?;
        dict.set_item("top_logprobs", TopLogprob::dicts(py, &self.0.top_logprobs)?)?;
        dict.set_item("t_ns", self.0.t_ns)?;
        Ok(dict)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let text = self.0.text.as_str().into_pyobject(py)?.repr()?;
        Ok(format!("Token(text={text}, token_ids={:?}, index={})", self.0.token_ids, self.0.index))
    }
}

/// A token and the natural log of its probability under the raw logits.
#[pyclass(frozen, eq, module = "kie", skip_from_py_object)]
#[derive(Clone, PartialEq)]
pub struct TopLogprob(pub request::TopLogprob);

impl TopLogprob {
    fn inner(all: &[PyRef<'_, Self>]) -> Vec<request::TopLogprob> {
        all.iter().map(|top| top.0.clone()).collect()
    }

    fn tuple<'py>(py: Python<'py>, all: &[request::TopLogprob]) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, all.iter().cloned().map(Self))
    }

    fn dicts<'py>(
        py: Python<'py>,
        all: &[request::TopLogprob],
    ) -> PyResult<Vec<Bound<'py, PyDict>>> {
        all.iter().cloned().map(|top| Self(top).to_dict(py)).collect()
    }
}

#[pymethods]
impl TopLogprob {
    #[classattr]
    fn __match_args__(py: Python<'_>) -> PyResult<Bound<'_, PyTuple>> {
        PyTuple::new(py, ["id", "logprob"])
    }

    #[new]
    fn new(id: u32, logprob: f32) -> Self {
        Self(request::TopLogprob { id, logprob })
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Reduced<'py>> {
        Ok((py.get_type::<Self>(), (self.0.id, self.0.logprob).into_pyobject(py)?))
    }

    #[getter]
    fn id(&self) -> u32 {
        self.0.id
    }

    #[getter]
    fn logprob(&self) -> f32 {
        self.0.logprob
    }

    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        dict.set_item("id", self.0.id)?;
        dict.set_item("logprob", self.0.logprob)?;
        Ok(dict)
    }

    fn __repr__(&self) -> String {
        format!("TopLogprob(id={}, logprob={:?})", self.0.id, self.0.logprob)
    }
}

/// A generated token, how probable it was, and what else was.
#[pyclass(frozen, eq, module = "kie", skip_from_py_object)]
#[derive(Clone, PartialEq)]
pub struct TokenLogprob(pub request::TokenLogprob);

#[pymethods]
impl TokenLogprob {
    #[classattr]
    fn __match_args__(py: Python<'_>) -> PyResult<Bound<'_, PyTuple>> {
        PyTuple::new(py, ["id", "logprob", "top_logprobs"])
    }

    #[new]
    fn new(id: u32, logprob: f32, top_logprobs: Vec<PyRef<'_, TopLogprob>>) -> Self {
        let top_logprobs = TopLogprob::inner(&top_logprobs);
        Self(request::TokenLogprob { id, logprob, top_logprobs })
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Reduced<'py>> {
        let fields = (self.0.id, self.0.logprob, self.top_logprobs(py)?);
        Ok((py.get_type::<Self>(), fields.into_pyobject(py)?))
    }

    #[getter]
    fn id(&self) -> u32 {
        self.0.id
    }

    #[getter]
    fn logprob(&self) -> f32 {
        self.0.logprob
    }

    #[getter]
    fn top_logprobs<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        TopLogprob::tuple(py, &self.0.top_logprobs)
    }

    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        dict.set_item("id", self.0.id)?;
        dict.set_item("logprob", self.0.logprob)?;
        dict.set_item("top_logprobs", TopLogprob::dicts(py, &self.0.top_logprobs)?)?;
        Ok(dict)
    }

    fn __repr__(&self) -> String {
        format!("TokenLogprob(id={}, logprob={:?})", self.0.id, self.0.logprob)
    }
}

/// A class of plain numbers: getters, `__match_args__`, `to_dict` and `__repr__` in that order.
macro_rules! numbers {
    ($(#[$doc:meta])* $class:ident { $($field:ident: $kind:ty),+ $(,)? }) => {
        $(#[$doc])*
        #[pyclass(frozen, eq, module = "kie", skip_from_py_object)]
        #[derive(Clone, PartialEq)]
        pub struct $class(pub request::$class);

        #[pymethods]
        impl $class {
            #[classattr]
            fn __match_args__(py: Python<'_>) -> PyResult<Bound<'_, PyTuple>> {
                PyTuple::new(py, [$(stringify!($field)),+])
            }

            #[new]
            #[allow(clippy::too_many_arguments)]
            fn new($($field: $kind),+) -> Self {
                Self(request::$class { $($field),+ })
            }

            fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Reduced<'py>> {
                let fields = [$(self.0.$field.into_pyobject(py)?.into_any()),+];
                Ok((py.get_type::<Self>(), PyTuple::new(py, fields)?))
            }

            $(#[getter]
            fn $field(&self) -> $kind {
                self.0.$field
            })+

            fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
                let dict = PyDict::new(py);
                $(dict.set_item(stringify!($field), self.0.$field)?;)+
                Ok(dict)
            }

            fn __repr__(&self) -> String {
                let fields = [$(format!("{}={:?}", stringify!($field), self.0.$field)),+];
                format!("{}({})", stringify!($class), fields.join(", "))
            }
        }
    };
}

numbers! {
    /// Token counts of one request.
    Usage { prompt_tokens: usize, completion_tokens: usize, cached_tokens: usize }
}

numbers! {
    /// Where the time of one request went.
    Timings {
        prompt_n: usize,
        prompt_ms: f64,
        prompt_per_second: f64,
        predicted_n: usize,
        predicted_ms: f64,
        predicted_per_second: f64,
        cache_n: usize,
        draft_n: usize,
        draft_n_accepted: usize,
        queue_ms: f64,
        ttft_ms: f64,
        itl_p50_us: f64,
        itl_p99_us: f64,
        itl_max_us: f64,
        bytes_per_token: u64,
        mbu: f64,
        mbu_peak: f64,
    }
}

/// What stopped a request, as Python has it.
#[derive(FromPyObject)]
enum Stopped {
    Id(u32),
    Text(String),
}

/// A finished request.
#[pyclass(frozen, eq, module = "kie", skip_from_py_object)]
#[derive(Clone, PartialEq)]
pub struct Completion(pub request::Completion);

#[pymethods]
impl Completion {
    #[classattr]
    fn __match_args__(py: Python<'_>) -> PyResult<Bound<'_, PyTuple>> {
        PyTuple::new(py, ["text", "finish_reason", "stop_reason"])
    }

    #[new]
    #[pyo3(signature = (
        text, token_ids, finish_reason, stop_reason, usage, timings, seed, model, logprobs=None
    ))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        text: String,
        token_ids: Vec<u32>,
        finish_reason: &str,
        stop_reason: Option<Stopped>,
        usage: PyRef<'_, Usage>,
        timings: PyRef<'_, Timings>,
        seed: u64,
        model: String,
        logprobs: Option<Vec<PyRef<'_, TokenLogprob>>>,
    ) -> PyResult<Self> {
        let unknown = || PyValueError::new_err(format!("no finish_reason {finish_reason:?}"));
        let reason = request::FinishReason::named(finish_reason).ok_or_else(unknown)?;
        let entries = |all: Vec<PyRef<'_, TokenLogprob>>| all.iter().map(|l| l.0.clone()).collect();
        Ok(Self(request::Completion {
            text,
            token_ids,
            finish_reason: reason,
            stop_reason: stop_reason.map(|stopped| match stopped {
                Stopped::Id(id) => request::StopReason::Id(id),
                Stopped::Text(text) => request::StopReason::Text(text),
            }),
            logprobs: logprobs.map(entries),
            usage: usage.0,
            timings: timings.0,
            seed,
            model,
        }))
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Reduced<'py>> {
        let end = (self.finish_reason(), self.stop_reason(py)?);
        let (usage, timings) = (self.usage(), self.timings());
        let (ids, logprobs) = (self.token_ids(py)?, self.logprobs(py)?);
        let fields =
            (self.text(), ids, end.0, end.1, usage, timings, self.0.seed, self.model(), logprobs);
        Ok((py.get_type::<Self>(), fields.into_pyobject(py)?))
    }

    #[getter]
    fn logprobs<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let entries = |all: &Vec<_>| PyTuple::new(py, all.iter().cloned().map(TokenLogprob));
        self.0.logprobs.as_ref().map(entries).transpose()
    }

    #[getter]
    fn text(&self) -> &str {
        &self.0.text
    }

    #[getter]
    fn token_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.0.token_ids)
    }

    #[getter]
    fn finish_reason(&self) -> &'static str {
        self.0.finish_reason.name()
    }

    #[getter]
    fn stop_reason<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        Ok(match &self.0.stop_reason {
            Some(request::StopReason::Text(text)) => Some(text.into_pyobject(py)?.into_any()),
            Some(request::StopReason::Id(id)) => Some(id.into_pyobject(py)?.into_any()),
            None => None,
        })
    }

    #[getter]
    fn usage(&self) -> Usage {
        Usage(self.0.usage)
    }

    #[getter]
    fn timings(&self) -> Timings {
        Timings(self.0.timings)
    }

    #[getter]
    fn seed(&self) -> u64 {
        self.0.seed
    }

    #[getter]
    fn model(&self) -> &str {
        &self.0.model
    }

    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        dict.set_item("text", &self.0.text)?;
        dict.set_item("token_ids", &self.0.token_ids)?;
        dict.set_item("finish_reason", self.finish_reason())?;
        dict.set_item("stop_reason", self.stop_reason(py)?)?;
        let entry = |one: &request::TokenLogprob| TokenLogprob(one.clone()).to_dict(py);
        let entries = |all: &Vec<_>| all.iter().map(entry).collect::<PyResult<Vec<_>>>();
        dict.set_item("logprobs", self.0.logprobs.as_ref().map(entries).transpose()?)?;
        dict.set_item("usage", self.usage().to_dict(py)?)?;
        dict.set_item("timings", self.timings().to_dict(py)?)?;
        dict.set_item("seed", self.0.seed)?;
        dict.set_item("model", &self.0.model)?;
        Ok(dict)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let text = self.0.text.as_str().into_pyobject(py)?.repr()?;
        let stop = match self.stop_reason(py)? {
            Some(reason) => reason.repr()?.to_string(),
            None => "None".to_owned(),
        };
        Ok(format!(
            "Completion(text={text}, finish_reason='{}', stop_reason={stop}, {})",
            self.finish_reason(),
            self.usage().__repr__(),
        ))
    }
}
