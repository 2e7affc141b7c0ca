//! `Server`: the HTTP server of kie-server, over an engine that Python has opened.

use std::time::Duration;

use kie_server::{Config, Log};
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::args;
use crate::engine::Engine;
use crate::owned::Owned;

/// A port that answers; with 503 until it has an engine.
#[pyclass(frozen, module = "kie._kie")]
pub struct Server(Owned<kie_server::Server>);

#[pymethods]
impl Server {
    #[new]
    #[pyo3(signature = (**options))]
    fn new(py: Python<'_>, options: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let config = config(options)?;
        let place = format!("{}:{}", config.host, config.port);
        let server = py.detach(|| kie_server::Server::bind(config));
        let server = server.map_err(|e| PyOSError::new_err(format!("{place}: {e}")))?;
        Ok(Self(Owned::new(server)))
    }

    /// Host and port that it listens on.
    fn address(&self, py: Python<'_>) -> PyResult<(String, u16)> {
        let address = self.0.get(py)?.address();
        Ok((address.ip().to_string(), address.port()))
    }

    /// Begins to answer from `engine`.
    fn serve(&self, py: Python<'_>, engine: &Engine) -> PyResult<()> {
        let (server, engine) = (self.0.get(py)?, engine.core(py)?);
        py.detach(|| server.serve(engine));
        Ok(())
    }

    /// Takes no new requests; running ones have the configured time.
    fn drain(&self, py: Python<'_>) -> PyResult<()> {
        self.0.get(py)?.drain();
        Ok(())
    }

    /// Waits for at most `timeout` seconds until a drained server is over; true if it is.
    fn wait(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let server = self.0.get(py)?;
        let timeout = Duration::try_from_secs_f64(timeout).unwrap_or(Duration::ZERO);
        let over = py.detach(|| server.wait(timeout));
        py.check_signals()?;
        Ok(over)
    }
}

/// What is not among the keywords has its default.
fn config(options: Option<&Bound<'_, PyDict>>) -> PyResult<Config> {
    let mut config = Config::default();
    for (name, value) in options.into_iter().flatten() {
        let name: String = name.extract()?;
        let name = name.as_str();
        match name {
            "host" => config.host = args::text(&value, name)?,
            "port" => config.port = value.extract()?,
            "api_key" => config.api_key = value.extract()?,
            "served_model_name" => config.served_model_name = value.extract()?,
            "max_body_mb" => config.max_body_bytes = args::count::<usize>(name, &value)? << 20,
            "header_timeout_s" => config.header_timeout = seconds(name, &value)?,
            "body_timeout_s" => config.body_timeout = seconds(name, &value)?,
            "drain_s" => config.drain = seconds(name, &value)?,
            "silence_s" => config.silence = seconds(name, &value)?,
            "cors_origins" => config.cors_origins = value.extract()?,
            "allowed_hosts" => config.allowed_hosts = value.extract()?,
            "log_json" => config.log = if value.extract()? { Log::Json } else { Log::Off },
            "otlp_endpoint" => config.otlp_endpoint = value.extract()?,
            "metrics_compat_vllm" => config.metrics_compat_vllm = value.extract()?,
            "protect_metrics" => config.protect_metrics = value.extract()?,
            "protect_page" => config.protect_page = value.extract()?,
            unknown => return Err(args::unexpected(unknown)),
        }
    }
    Ok(config)
}

fn seconds(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Duration> {
    let given: f64 = value.extract()?;
    Duration::try_from_secs_f64(given).map_err(|_| {
        crate::error::invalid(value.py(), format!("{name} must be 0 seconds or more, got {given}"))
    })
}
