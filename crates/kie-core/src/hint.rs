//! What to do about an error.

use crate::error::Error;
use crate::model;

impl Error {
    /// One line that says what to do about it; empty where the message says it.
    pub fn hint(&self) -> &str {
        match self {
            Self::Load { hint, .. } => {
                hint.as_deref().unwrap_or("fetch the model folder again, or point at the right one")
            }
            Self::UnsupportedModel { what, .. } if what.ends_with(" ranks") => {
                "ask for a number of ranks that lanes and heads can be dealt out to"
            }
            Self::UnsupportedModel { .. } => model::supported(),
            Self::NoDevice { .. } => "`kie doctor` lists the devices of this machine",
            Self::BackendMissing { .. } => "`kie doctor` names the missing part and its command",
            Self::DriverTooOld { .. } => "install a newer driver",
            Self::EngineHang { .. } => "report the dump; the engine must be opened again",
            Self::Device(_) => "`kie doctor` checks the device",
            Self::OutOfMemory { plan, .. } => plan.lines().last().unwrap_or_default(),
            Self::Topology { .. } => {
                "correct it, or let `kie doctor --topology FILE` write that of this machine"
            }
            Self::Write { .. } => "make room there, or name another folder",
            // The message says what was wanted and what came.
            Self::InvalidRequest(_) | Self::Grammar(_) => "",
            Self::ContextLength { .. } => {
                "shorten the prompt, lower max_tokens or raise max_seq_len"
            }
            Self::GivenUp { .. } => "give it more time",
            Self::Template(_) => "pass prompt=, or messages that the template accepts",
            Self::EngineClosed => "open a new engine",
            Self::QueueFull(_) => "retry later, or raise max_queue",
        }
    }
}
