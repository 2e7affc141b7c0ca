//! What a server is started with.

use std::time::Duration;

use crate::log::Log;

/// How a server behaves. [`Default`] is what `kie serve` does without options.
#[derive(Debug, Clone)]
pub struct Config {
    /// Name or address to listen on.
    pub host: String,
    /// Port; 0 takes a free one.
    pub port: u16,
    /// The key that requests must bring; `None`: none.
    pub api_key: Option<String>,
    /// Name of the model in answers; `None`: its folder's.
    pub served_model_name: Option<String>,
    /// Longest body, in bytes; a longer one is 413.
    pub max_body_bytes: usize,
    /// Longest time for a request's head.
    pub header_timeout: Duration,
    /// Longest time for a request's body.
    pub body_timeout: Duration,
    /// How long running requests may go on after [`Server::drain`](crate::Server::drain).
    pub drain: Duration,
    /// How long a connection may rest between two requests.
    pub idle_timeout: Duration,
    /// Longest silence of a stream; then comes a comment.
    pub silence: Duration,
    /// Origins whose pages may read answers; `*`: all.
    pub cors_origins: Vec<String>,
    /// Names that a `Host` header may have on loopback besides those of this machine.
    pub allowed_hosts: Vec<String>,
    /// What is written to standard error.
    pub log: Log,
    /// Where spans go (`http://host:port` of an OpenTelemetry collector that takes OTLP); wants the
    /// feature `otlp`.
    pub otlp_endpoint: Option<String>,
    /// `/metrics` has vLLM's names, too.
    pub metrics_compat_vllm: bool,
    /// `/metrics` wants the key.
    pub protect_metrics: bool,
    /// `/` wants the key.
    pub protect_page: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            host: "127.0.0.1".to_owned(),
            port: 8000,
            api_key: None,
            served_model_name: None,
            max_body_bytes: 8 << 20,
            header_timeout: Duration::from_secs(10),
            body_timeout: Duration::from_secs(30),
            drain: Duration::from_secs(30),
            idle_timeout: Duration::from_secs(120),
            silence: Duration::from_secs(15),
            cors_origins: Vec::new(),
            allowed_hosts: Vec::new(),
            log: Log::Off,
            otlp_endpoint: None,
            metrics_compat_vllm: false,
            protect_metrics: false,
            protect_page: false,
        }
    }
}
