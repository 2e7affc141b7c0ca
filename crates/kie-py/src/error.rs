//! From `kie_core::Error` to the exception classes of `kie.errors`: one variant, one class, and
//! the variant's fields as `context`.

use kie_core::Error;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// The exception for `error`; an exception from building it if even that fails.
pub fn raise(py: Python<'_>, error: Error) -> PyErr {
    build(py, &error).unwrap_or_else(|failure| failure)
}

/// An `InvalidRequestError` with `message`.
pub fn invalid(py: Python<'_>, message: impl Into<String>) -> PyErr {
    raise(py, Error::InvalidRequest(message.into()))
}

fn build(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let context = context(py, error)?;
    instance(py, error.class(), error.to_string(), error.code(), error.hint(), context)
}

/// `kie.errors.<class>(message, code=, hint=, context=)`.
pub fn instance<'py>(
    py: Python<'py>,
    class: &str,
    message: String,
    code: &str,
    hint: &str,
    context: Bound<'py, PyDict>,
) -> PyResult<PyErr> {
    let keywords = PyDict::new(py);
    keywords.set_item("code", code)?;
    keywords.set_item("hint", hint)?;
    keywords.set_item("context", context)?;
    let class = py.import("kie.errors")?.getattr(class)?;
    Ok(PyErr::from_value(class.call((message,), Some(&keywords))?))
}

fn context<'py>(py: Python<'py>, error: &Error) -> PyResult<Bound<'py, PyDict>> {
    let fields = PyDict::new(py);
    match error {
        Error::Load { file, tensor, wanted, got, .. } => {
            fields.set_item("file", file.display().to_string())?;
            fields.set_item("tensor", tensor)?;
            fields.set_item("wanted", wanted)?;
            fields.set_item("got", got)?;
        }
        Error::UnsupportedModel { what, detail } => {
            fields.set_item("what", what)?;
            fields.set_item("detail", detail)?;
        }
        Error::NoDevice { device, detail } | Error::BackendMissing { device, detail } => {
            fields.set_item("device", device)?;
            fields.set_item("detail", detail)?;
        }
        Error::DriverTooOld { have, need } => {
            fields.set_item("have", have)?;
            fields.set_item("need", need)?;
        }
        Error::EngineHang { detail } => fields.set_item("dump", detail)?,
        Error::OutOfMemory { need, free, plan } => {
            fields.set_item("need", need)?;
            fields.set_item("free", free)?;
            fields.set_item("plan", plan)?;
        }
        Error::Write { file, detail } => {
            fields.set_item("file", file.display().to_string())?;
            fields.set_item("detail", detail)?;
        }
        Error::Topology { path, detail } => {
            fields.set_item("file", path.display().to_string())?;
            fields.set_item("detail", detail)?;
        }
        Error::ContextLength { prompt, max_tokens, limit } => {
            fields.set_item("prompt_tokens", prompt)?;
            fields.set_item("max_tokens", max_tokens)?;
            fields.set_item("limit", limit)?;
        }
        Error::QueueFull(waiting) => fields.set_item("waiting", waiting)?,
        // Their message says it all; the enum is non-exhaustive, so later variants land here.
        _ => {}
    }
    Ok(fields)
}
