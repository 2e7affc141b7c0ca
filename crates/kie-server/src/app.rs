//! What all requests share: options, the engine once it is there, whether the server is leaving.

use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use kie_core::{Engine, Info};
use tokio::sync::watch;

use crate::chat::Chat;
use crate::config::Config;
use crate::errors::ApiError;
use crate::log::Logger;
use crate::metrics::Metrics;
use crate::queue::Queue;
use crate::trace::Tracer;

/// Where a server is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Loading or serving; whether the engine is there tells which.
    Open,
    /// No new requests.
    Draining,
    /// Running requests end now.
    Over,
}

/// See the module.
pub(crate) struct App {
    pub(crate) config: Config,
    pub(crate) metrics: Metrics,
    pub(crate) log: Logger,
    pub(crate) queue: Arc<Queue>,
    pub(crate) tracer: Tracer,
    served: OnceLock<Served>,
    pub(crate) phase: watch::Sender<Phase>,
    /// Seconds since 1970 when it began.
    pub(crate) created: u64,
}

/// An engine and what answers say about it.
pub(crate) struct Served {
    pub(crate) engine: Engine,
    pub(crate) info: Info,
    /// Name of the model in answers.
    pub(crate) name: String,
    /// `system_fingerprint`: version, and a hash of what decides an answer's bits.
    pub(crate) fingerprint: String,
    /// What its chat template does.
    pub(crate) chat: Chat,
}

impl App {
    /// A server that loads.
    pub(crate) fn new(config: Config, tracer: Tracer) -> Arc<Self> {
        Arc::new(Self {
            metrics: Metrics::new(),
            log: Logger::new(config.log),
            queue: Arc::default(),
            tracer,
            config,
            served: OnceLock::new(),
            phase: watch::Sender::new(Phase::Open),
            created: unix_seconds(),
        })
    }

    /// Begins to serve `engine`; a second one is dropped.
    pub(crate) fn serve(&self, engine: Engine) {
        let info = engine.info();
        let name = self.config.served_model_name.clone().unwrap_or_else(|| info.model.clone());
        let fingerprint = fingerprint(&info);
        let chat = Chat::of(&engine);
        drop(self.served.set(Served { engine, info, name, fingerprint, chat }));
    }

    /// The engine; 503 before it is there.
    pub(crate) fn served(&self) -> Result<&Served, ApiError> {
        self.served.get().ok_or_else(|| ApiError::unavailable("the model is loading"))
    }

    /// Where the server is in its life.
    pub(crate) fn phase(&self) -> Phase {
        *self.phase.borrow()
    }
}

impl Served {
    /// Whether a request may call the model so.
    pub(crate) fn answers_to(&self, model: &str) -> bool {
        model == self.name || model == self.info.model || model == "default"
    }
}

/// Waits until the server is in one of the phases that `is` names.
pub(crate) async fn reached(phase: &mut watch::Receiver<Phase>, is: impl Fn(Phase) -> bool) {
    // The sender lives in the app; were it gone, all would be over.
    drop(phase.wait_for(|phase| is(*phase)).await);
}

/// Seconds since 1970.
pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

fn fingerprint(info: &Info) -> String {
    let plan = format!(
        "{} {} {} {} {} {} {} {}",
        info.model,
        info.arch,
        info.device,
        info.device_arch,
        info.dtype,
        info.threads,
        info.context,
        info.weight_bytes
    );
    // FNV-1a, which no version of the standard library changes.
    let hash = plan.bytes().fold(0xCBF2_9CE4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3)
    });
    format!("kie-{}-{:08x}", env!("CARGO_PKG_VERSION"), hash >> 32)
}
