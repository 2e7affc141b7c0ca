//! The one error type of the crate. Each variant is one Python exception class (`class`), and each
//! message says what was wrong, where, what was wanted and what was found.

use std::path::PathBuf;

/// Result with [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong, from a bad flag to a device that stopped answering.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file of a model folder is missing, cut short or not what it claims to be.
    #[error(
        "{}{}: wanted {wanted}, got {got}",
        file.display(),
        tensor.as_ref().map(|t| format!(": {t}")).unwrap_or_default()
    )]
    Load {
        /// The file at fault.
        file: PathBuf,
        /// The tensor or key at fault, where one is.
        tensor: Option<String>,
        /// What a loader needs there.
        wanted: String,
        /// What stands there.
        got: String,
        /// How to get from one to the other, where that is known.
        hint: Option<String>,
    },
    /// The architecture, a flag or a storage format that kie does not know.
    #[error("{what}: not supported ({detail})")]
    UnsupportedModel {
        /// The config key or feature.
        what: String,
        /// Its value and what kie supports.
        detail: String,
    },
    /// The device asked for does not exist here.
    #[error("no such device: {device} ({detail})")]
    NoDevice {
        /// As the caller wrote it.
        device: String,
        /// What was looked for and what the remedy is.
        detail: String,
    },
    /// The device exists but its software part (driver, compiler) does not, or is too old.
    #[error("{device}: {detail}")]
    BackendMissing {
        /// As the caller wrote it.
        device: String,
        /// What is missing.
        detail: String,
    },
    /// The driver is older than kie needs.
    #[error("driver {have} is too old: {need} or newer is needed")]
    DriverTooOld {
        /// Installed version.
        have: String,
        /// Oldest version that works.
        need: String,
    },
    /// A wait on the device outran its budget.
    #[error("the engine hangs: {detail}")]
    EngineHang {
        /// Step, block, slot, wanted and seen.
        detail: String,
    },
    /// Any other failure of a device.
    #[error("device error: {0}")]
    Device(String),
    /// The plan does not fit into what is free; refused before anything was loaded.
    #[error("out of memory: {need} bytes needed, {free} free\n{plan}")]
    OutOfMemory {
        /// Bytes the plan needs.
        need: u64,
        /// Bytes that are free.
        free: u64,
        /// The printed plan; its last line, the hint, says what to lower or raise.
        plan: String,
    },
    /// A file cannot be written.
    #[error("{}: not written ({detail})", file.display())]
    Write {
        /// The file or folder.
        file: PathBuf,
        /// What the system said.
        detail: String,
    },
    /// A file that says how machines are linked is missing, broken or contradicts itself.
    #[error("topology {}: {detail}", path.display())]
    Topology {
        /// The file.
        path: PathBuf,
        /// Where, what was wanted and what was found.
        detail: String,
    },
    /// A request or an option that makes no sense.
    #[error("{0}")]
    InvalidRequest(String),
    /// Prompt (and wanted tokens) exceed the context.
    #[error(
        "prompt of {prompt} tokens and {max_tokens} to generate exceed the context of {limit}"
    )]
    ContextLength {
        /// Tokens in the prompt.
        prompt: usize,
        /// Tokens asked for.
        max_tokens: usize,
        /// The engine's context.
        limit: usize,
    },
    /// The chat template is missing or refused the messages.
    #[error("chat template: {0}")]
    Template(String),
    /// A grammar that cannot be compiled, or not be followed.
    #[error("grammar: {0}")]
    Grammar(String),
    /// Whoever waited wanted no answer any more, or not so late.
    #[error("{what}: {}", if *late { "its time is over" } else { "given up by its caller" })]
    GivenUp {
        /// What was waited for.
        what: &'static str,
        /// A deadline passed; otherwise the caller was asked and did not go on.
        late: bool,
    },
    /// The engine was closed, or closed while the request ran.
    #[error("the engine is closed")]
    EngineClosed,
    /// More requests wait than `max_queue` allows.
    #[error("the queue is full ({0} requests wait)")]
    QueueFull(usize),
}

impl Error {
    /// A [`Error::Load`] without a tensor.
    pub fn load(
        file: impl Into<PathBuf>,
        wanted: impl Into<String>,
        got: impl Into<String>,
    ) -> Self {
        let (file, wanted, got) = (file.into(), wanted.into(), got.into());
        Self::Load { file, tensor: None, wanted, got, hint: None }
    }

    /// A [`Error::Load`] about one tensor or key.
    pub fn tensor(
        file: impl Into<PathBuf>,
        tensor: impl Into<String>,
        wanted: impl Into<String>,
        got: impl Into<String>,
    ) -> Self {
        Self::Load {
            file: file.into(),
            tensor: Some(tensor.into()),
            wanted: wanted.into(),
            got: got.into(),
            hint: None,
        }
    }

    /// The same, with what to do about it, where a [`Error::Load`] does not say that yet.
    #[must_use]
    pub fn or_hint(mut self, told: &str) -> Self {
        if let Self::Load { hint, .. } = &mut self {
            hint.get_or_insert_with(|| told.into());
        }
        self
    }

    /// Name of the Python exception class.
    pub fn class(&self) -> &'static str {
        match self {
            Self::Load { .. } => "LoadError",
            Self::UnsupportedModel { .. } => "UnsupportedModelError",
            Self::NoDevice { .. } => "NoDeviceError",
            Self::BackendMissing { .. } => "BackendMissingError",
            Self::DriverTooOld { .. } => "DriverTooOldError",
            Self::EngineHang { .. } => "EngineHangError",
            Self::Device(_) => "DeviceError",
            Self::OutOfMemory { .. } => "OutOfMemoryError",
            Self::Topology { .. } | Self::InvalidRequest(_) => "InvalidRequestError",
            Self::ContextLength { .. } => "ContextLengthError",
            Self::Template(_) => "TemplateError",
            Self::Grammar(_) => "GrammarError",
            Self::GivenUp { .. } | Self::Write { .. } => "KieError",
            Self::EngineClosed => "EngineClosedError",
            Self::QueueFull(_) => "QueueFullError",
        }
    }

    /// A stable, machine-readable code.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Load { .. } => "load",
            Self::UnsupportedModel { .. } => "unsupported_model",
            Self::NoDevice { .. } => "no_device",
            Self::BackendMissing { .. } => "backend_missing",
            Self::DriverTooOld { .. } => "driver_too_old",
            Self::EngineHang { .. } => "engine_hang",
            Self::Device(_) => "device",
            Self::OutOfMemory { .. } => "out_of_memory",
            Self::Topology { .. } => "topology",
            Self::Write { .. } => "write",
            Self::InvalidRequest(_) => "invalid_request",
            Self::ContextLength { .. } => "context_length",
            Self::Template(_) => "template",
            Self::Grammar(_) => "grammar",
            Self::GivenUp { .. } => "given_up",
            Self::EngineClosed => "engine_closed",
            Self::QueueFull(_) => "queue_full",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Error;
    use kie_kernels::Error as Device;

    #[test]
    fn errors_of_devices_keep_their_class() {
        let (device, detail) = ("cuda:0".to_owned(), "why".to_owned());
        let arch = "sm_90a".to_owned();
        let all = [
            (
                Device::NoDevice { device: device.clone(), detail: detail.clone() },
                "NoDeviceError",
                "`kie doctor` lists",
            ),
            (
                Device::BackendMissing { device: device.clone(), detail: detail.clone() },
                "BackendMissingError",
                "`kie doctor` names",
            ),
            (
                Device::DriverTooOld { device, have: "12.0".into(), need: "12.4".into() },
                "DriverTooOldError",
                "install a newer driver",
            ),
            (
                Device::Indivisible { ranks: 3, detail: detail.clone() },
                "UnsupportedModelError",
                "number of ranks",
            ),
            (Device::Compile { arch, detail: detail.clone() }, "DeviceError", "`kie doctor`"),
            (Device::Hang(detail.clone()), "EngineHangError", "opened again"),
            (Device::Failed(detail), "DeviceError", "`kie doctor`"),
        ];
        for (error, class, hint) in all {
            let said = error.to_string();
            let ours = Error::from(error);
            assert_eq!(ours.class(), class, "{said}");
            assert!(ours.hint().contains(hint), "{class}: {}", ours.hint());
            let why = ["why", "12.0"].into_iter().find(|w| said.contains(w));
            assert!(ours.to_string().contains(why.unwrap_or("?")), "{ours} for {said}");
        }
    }
}
