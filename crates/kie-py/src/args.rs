//! From Python arguments to the request types of kie-core. A wrong type is a `TypeError`, a
//! value that makes no sense an `InvalidRequestError`; neither is ever a panic.

use std::path::PathBuf;

use kie_core::request::{EngineConfig, Prediction, Prompt, SamplingParams, Speculate};
use kie_core::{Error, Grammar};
use pyo3::exceptions::{PyOverflowError, PyRecursionError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyBool, PyByteArray, PyBytes, PyDict, PyMapping, PyString};
use serde_json::{Map, Value};

use crate::error::{invalid, raise};

/// Token ids that a call takes where no context bounds them.
pub const IDS_MAX: usize = 1 << 24;

/// Messages, and stop strings, that are looked at before there are too many.
const MESSAGES_MAX: usize = 1 << 20;
const STRINGS_MAX: usize = 1 << 10;
/// Most tokens of a prediction.
const PREDICTION_MAX: usize = 1 << 20;

/// Items between two looks at signals.
const SIGNALS_EVERY: usize = 1 << 12;

/// The items of an iterable, at most `most` of them; whatever it is, signals are heard.
fn items<'py>(
    value: &Bound<'py, PyAny>,
    most: usize,
    refused: impl Fn() -> PyErr,
) -> PyResult<impl Iterator<Item = PyResult<Bound<'py, PyAny>>>> {
    let (py, items) = (value.py(), value.try_iter().map_err(|_| refused())?);
    Ok(items.enumerate().map(move |(index, item)| {
        if index % SIGNALS_EVERY == SIGNALS_EVERY - 1 {
            py.check_signals()?;
        }
        if index == most {
            return Err(invalid(py, format!("at most {most} items are taken, got more")));
        }
        item
    }))
}

/// Token ids of a prompt, for so many tokens to generate and such a context: one that is too long
/// is refused unread.
pub fn prompt_ids(
    value: &Bound<'_, PyAny>,
    name: &str,
    (max_tokens, limit): (Option<usize>, usize),
) -> PyResult<Vec<u32>> {
    match value.len() {
        Ok(prompt) if prompt > limit && !value.is_instance_of::<PyString>() => {
            let max_tokens = max_tokens.unwrap_or(1);
            Err(raise(value.py(), Error::ContextLength { prompt, max_tokens, limit }))
        }
        Ok(_) | Err(_) => ids(value, name, limit),
    }
}

/// Exactly one of a prompt (text or ids) and messages, for these parameters and a context.
pub fn prompt(
    py: Python<'_>,
    prompt: Option<&Bound<'_, PyAny>>,
    messages: Option<&Bound<'_, PyAny>>,
    (params, context): (&SamplingParams, usize),
) -> PyResult<Prompt> {
    match (prompt, messages) {
        (Some(_), Some(_)) | (None, None) => {
            Err(PyTypeError::new_err("exactly one of prompt= and messages= is needed"))
        }
        (None, Some(messages)) => Ok(Prompt::Messages(self::messages(py, messages)?)),
        (Some(prompt), None) => match prompt.cast::<PyString>() {
            Ok(_) => Ok(Prompt::Text(text(prompt, "prompt")?)),
            Err(_) => {
                let room = (params.max_tokens, context);
                Ok(Prompt::Ids(prompt_ids(prompt, "prompt", room)?))
            }
        },
    }
}

/// Text without lone surrogates.
pub fn text(value: &Bound<'_, PyAny>, name: &str) -> PyResult<String> {
    let string = value
        .cast::<PyString>()
        .map_err(|_| PyTypeError::new_err(format!("{name} must be str, got {}", kind(value))))?;
    match string.to_str() {
        Ok(text) => Ok(text.to_owned()),
        Err(failure) => Err(invalid(
            value.py(),
            format!("{name} is not valid Unicode text: {}", failure.value(value.py())),
        )),
    }
}

/// Token ids from any sequence of integers (`list`, `tuple`, a NumPy vector).
pub fn ids(value: &Bound<'_, PyAny>, name: &str, most: usize) -> PyResult<Vec<u32>> {
    let refuse = || format!("{name} must be a sequence of token ids, got {}", kind(value));
    if value.is_instance_of::<PyString>()
        || value.is_instance_of::<PyBytes>()
        || value.is_instance_of::<PyByteArray>()
        || value.is_instance_of::<PyDict>()
        || value.len().is_err()
    {
        return Err(PyTypeError::new_err(refuse()));
    }
    let items = items(value, most, || PyTypeError::new_err(refuse()))?;
    items.enumerate().map(|(index, item)| id(&item?, name, index)).collect()
}

fn id(item: &Bound<'_, PyAny>, name: &str, index: usize) -> PyResult<u32> {
    let wrong = |got: String| {
        let wanted = "wanted a token id (an integer from 0 to 4294967295)";
        invalid(item.py(), format!("{name}[{index}]: {wanted}, got {got}"))
    };
    if item.is_instance_of::<PyBool>() {
        return Err(wrong("a bool".to_owned()));
    }
    item.extract::<u32>().map_err(|failure| {
        if failure.is_instance_of::<PyOverflowError>(item.py()) {
            wrong(item.repr().map(|r| r.to_string()).unwrap_or_default())
        } else {
            wrong(kind(item))
        }
    })
}

/// Chat messages, by way of JSON: what JSON cannot say no template should see.
pub fn messages(py: Python<'_>, messages: &Bound<'_, PyAny>) -> PyResult<Vec<Value>> {
    if messages.is_instance_of::<PyString>() || messages.is_instance_of::<PyDict>() {
        let got = kind(messages);
        return Err(PyTypeError::new_err(format!("messages must be a list of dicts, got {got}")));
    }
    let refuse = || {
        PyTypeError::new_err(format!("messages must be a list of dicts, got {}", kind(messages)))
    };
    let list = items(messages, MESSAGES_MAX, refuse)?.collect::<PyResult<Vec<_>>>()?;
    if list.is_empty() {
        return Err(invalid(py, "messages is empty"));
    }
    json(py, list.into_pyobject(py)?.as_any(), "messages")
}

/// A value by way of JSON text; what Python's objects can be and JSON cannot (a circle, a depth
/// without an end, NaN) is refused in the name of the argument.
fn json<T: serde::de::DeserializeOwned>(
    py: Python<'_>,
    value: &Bound<'_, PyAny>,
    name: &str,
) -> PyResult<T> {
    let strict = [("allow_nan", false)].into_py_dict(py)?;
    let text = py.import("json")?.call_method("dumps", (value,), Some(&strict));
    let text: String = text.and_then(|text| text.extract()).map_err(|error| {
        let odd = error.is_instance_of::<PyValueError>(py)
            || error.is_instance_of::<PyRecursionError>(py);
        if odd {
            invalid(py, format!("{name}: {}", error.value(py)))
        } else {
            error
        }
    })?;
    serde_json::from_str(&text).map_err(|e| invalid(py, format!("{name}: {e}")))
}

/// A dict by way of JSON, as messages are.
pub fn object(
    py: Python<'_>,
    value: &Bound<'_, PyAny>,
    name: &str,
) -> PyResult<Map<String, Value>> {
    if !value.is_instance_of::<PyDict>() {
        return Err(PyTypeError::new_err(format!("{name} must be a dict, got {}", kind(value))));
    }
    json(py, value, name)
}

/// Sampling keywords; `None` stands for the default.
pub fn sampling(py: Python<'_>, keywords: &Bound<'_, PyDict>) -> PyResult<SamplingParams> {
    let mut params = SamplingParams::default();
    for (name, value) in keywords.iter() {
        let name: String = name.extract()?;
        set(py, &mut params, &name, &value)?;
    }
    Ok(params)
}

/// How an engine is opened; what is not among the keywords has its default.
pub fn options(keywords: Option<&Bound<'_, PyDict>>) -> PyResult<EngineConfig> {
    let mut config = EngineConfig::default();
    for (name, value) in keywords.into_iter().flatten() {
        let name: String = name.extract()?;
        match &*name {
            "name" => config.name = value.extract()?,
            "device" => config.device = text(&value, &name)?,
            "dtype" => config.dtype = text(&value, &name)?,
            "max_seq_len" => config.max_seq_len = integer(&name, &value)?,
            "max_batch" => config.max_batch = count(&name, &value)?,
            "max_queue" => config.max_queue = count(&name, &value)?,
            "kv_bytes" => config.kv_bytes = integer(&name, &value)?,
            "threads" => config.threads = integer(&name, &value)?,
            "prefix_cache" => config.prefix_cache = flag(&name, &value)?,
            "reproducible" => config.reproducible = flag(&name, &value)?,
            "exact" => config.exact = flag(&name, &value)?,
            "mtp" => config.mtp = flag(&name, &value)?,
            "idle" => config.idle = text(&value, &name)?,
            "max_itl_ms" => config.max_itl_ms = number(&name, &value)?,
            "max_launch_ms" => config.max_launch_ms = number(&name, &value)?,
            "hang_timeout_s" => {
                config.hang_timeout_s = number(&name, &value)?.ok_or_else(|| missing(&name))?;
            }
            "adapter" => config.adapter = path::<Option<PathBuf>>(&name, &value)?,
            "cache_dir" => config.cache_dir = path::<Option<PathBuf>>(&name, &value)?,
            "read_bandwidth" => config.read_bandwidth = number(&name, &value)?,
            "nvrtc_dirs" => config.nvrtc_dirs = path(&name, &value)?,
            unknown => return Err(unexpected(unknown)),
        }
    }
    Ok(config)
}

/// A keyword that nobody knows.
pub fn unexpected(name: &str) -> PyErr {
    PyTypeError::new_err(format!("got an unexpected keyword argument '{name}'"))
}

fn missing(name: &str) -> PyErr {
    PyTypeError::new_err(format!("{name} must be a number, got None"))
}

fn set(
    py: Python<'_>,
    params: &mut SamplingParams,
    name: &str,
    value: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let defaults = SamplingParams::default();
    match name {
        "max_tokens" => params.max_tokens = integer(name, value)?,
        "temperature" => params.temperature = number(name, value)?,
        "top_p" => params.top_p = number(name, value)?,
        "top_k" => params.top_k = integer(name, value)?,
        "min_p" => params.min_p = number(name, value)?,
        "repetition_penalty" => params.repetition_penalty = number(name, value)?,
        "presence_penalty" => {
            params.presence_penalty = number(name, value)?.unwrap_or(defaults.presence_penalty);
        }
        "frequency_penalty" => {
            params.frequency_penalty = number(name, value)?.unwrap_or(defaults.frequency_penalty);
        }
        "stop" => params.stop = strings(name, value)?,
        "stop_token_ids" => {
            params.stop_token_ids =
                if value.is_none() { Vec::new() } else { ids(value, name, STRINGS_MAX)? };
        }
        "min_tokens" => params.min_tokens = integer(name, value)?.unwrap_or(defaults.min_tokens),
        "ignore_eos" => params.ignore_eos = !value.is_none() && flag(name, value)?,
        "seed" => params.seed = integer(name, value)?,
        "logprobs" => params.logprobs = integer(name, value)?,
        "logit_bias" => params.logit_bias = bias(py, value)?,
        "timeout" => params.timeout = number(name, value)?,
        "speculate" => params.speculate = speculate(value)?,
        "prediction" => params.prediction = prediction(value)?,
        "grammar" => params.grammar = grammar(value)?,
        unknown => return Err(unexpected(unknown)),
    }
    Ok(())
}

/// Where drafts come from.
fn speculate(value: &Bound<'_, PyAny>) -> PyResult<Option<Speculate>> {
    if value.is_none() {
        return Ok(None);
    }
    match text(value, "speculate")?.as_str() {
        "lookup" => Ok(Some(Speculate::Lookup)),
        "mtp" => Ok(Some(Speculate::Mtp)),
        other => {
            let wanted = "\"lookup\", \"mtp\" or None";
            Err(invalid(value.py(), format!("speculate must be {wanted}, got {other:?}")))
        }
    }
}

/// Text or ids that are expected.
fn prediction(value: &Bound<'_, PyAny>) -> PyResult<Option<Prediction>> {
    if value.is_none() {
        return Ok(None);
    }
    if value.is_instance_of::<PyString>() {
        return Ok(Some(Prediction::Text(value.extract()?)));
    }
    Ok(Some(Prediction::Ids(ids(value, "prediction", PREDICTION_MAX)?)))
}

/// One of the classes of `kie.grammar`, by what they have.
fn grammar(value: &Bound<'_, PyAny>) -> PyResult<Option<Grammar>> {
    if value.is_none() {
        return Ok(None);
    }
    let field = |name: &str| value.getattr(name).ok()?.extract::<String>().ok();
    let made =
        field("definition").zip(field("syntax")).and_then(|(text, syntax)| match syntax.as_str() {
            "json_schema" => Some(Grammar::JsonSchema(text)),
            "regex" => Some(Grammar::Regex(text)),
            "lark" => Some(Grammar::Lark(text)),
            _ => None,
        });
    let wrong = || {
        let got = kind(value);
        format!("grammar must be kie.JsonSchema, kie.Regex or kie.Lark, got {got}")
    };
    made.map(Some).ok_or_else(|| PyTypeError::new_err(wrong()))
}

/// A count or `None`.
pub fn integer<T: TryFrom<u64>>(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Option<T>> {
    if value.is_none() {
        return Ok(None);
    }
    let range = |_| {
        let shown = value.repr().map(|r| r.to_string()).unwrap_or_default();
        let bits = 8 * size_of::<T>();
        invalid(value.py(), format!("{name} must be 0 to 2^{bits} - 1, got {shown}"))
    };
    if value.is_instance_of::<PyBool>() {
        return Err(PyTypeError::new_err(format!("{name} must be int or None, got bool")));
    }
    match value.extract::<u64>() {
        Ok(number) => T::try_from(number).map(Some).map_err(|_| range(())),
        Err(failure) if failure.is_instance_of::<PyOverflowError>(value.py()) => Err(range(())),
        Err(_) => {
            let got = kind(value);
            Err(PyTypeError::new_err(format!("{name} must be int or None, got {got}")))
        }
    }
}

/// A count.
pub fn count<T: TryFrom<u64>>(name: &str, value: &Bound<'_, PyAny>) -> PyResult<T> {
    integer(name, value)?.ok_or_else(|| missing(name))
}

/// A path, several, or none, as `T` says.
fn path<'py, T: FromPyObjectOwned<'py>>(name: &str, value: &Bound<'py, PyAny>) -> PyResult<T> {
    let wrong = || format!("{name} must be a path, got {}", kind(value));
    value.extract().map_err(|_: T::Error| PyTypeError::new_err(wrong()))
}

fn flag(name: &str, value: &Bound<'_, PyAny>) -> PyResult<bool> {
    let wrong = || format!("{name} must be bool, got {}", kind(value));
    value.extract().map_err(|_| PyTypeError::new_err(wrong()))
}

fn number(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Option<f64>> {
    if value.is_none() {
        return Ok(None);
    }
    if value.is_instance_of::<PyBool>() {
        return Err(PyTypeError::new_err(format!("{name} must be float or None, got bool")));
    }
    value.extract().map(Some).map_err(|_| {
        PyTypeError::new_err(format!("{name} must be float or None, got {}", kind(value)))
    })
}

fn strings(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
    if value.is_none() {
        return Ok(Vec::new());
    }
    if value.is_instance_of::<PyString>() {
        return Ok(vec![text(value, name)?]);
    }
    let wrong = || format!("{name} must be str or a sequence of str, got {}", kind(value));
    let items = items(value, STRINGS_MAX, || PyTypeError::new_err(wrong()))?;
    items.map(|item| text(&item?, name)).collect()
}

fn bias(py: Python<'_>, value: &Bound<'_, PyAny>) -> PyResult<Vec<(u32, f64)>> {
    if value.is_none() {
        return Ok(Vec::new());
    }
    let mapping = value.cast::<PyMapping>().map_err(|_| {
        let got = kind(value);
        PyTypeError::new_err(format!("logit_bias must map ids to numbers, got {got}"))
    })?;
    let entries = mapping.len()?;
    if entries > STRINGS_MAX {
        return Err(invalid(
            py,
            format!("logit_bias must have at most {STRINGS_MAX} entries, got {entries}"),
        ));
    }
    let mut pairs = Vec::new();
    for item in mapping.items()?.iter() {
        let (key, amount): (Bound<'_, PyAny>, Bound<'_, PyAny>) = item.extract()?;
        let amount = number("logit_bias", &amount)?
            .ok_or_else(|| invalid(py, "logit_bias: None is not a number"))?;
        pairs.push((id(&key, "logit_bias", pairs.len())?, amount));
    }
    Ok(pairs)
}

fn kind(value: &Bound<'_, PyAny>) -> String {
    value.get_type().name().map(|name| name.to_string()).unwrap_or_else(|_| "?".to_owned())
}
