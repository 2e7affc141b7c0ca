//! The engine: from a checkpoint folder to a typed stream of tokens.
//!
//! [`model`] reads what a model is, `plan` decides what runs where, `engine` admits requests and
//! polls the ring, `stream` hands tokens to the caller. Devices live in `kie-kernels`.

mod admission;
mod answer;
mod builder;
mod compare;
mod descriptor;
mod device;
pub mod dry_run;
pub mod engine;
mod errand;
pub mod error;
mod folder;
mod gguf;
pub mod grammar;
mod growth;
mod guarded;
mod hint;
mod host;
mod inbox;
mod json;
pub mod load;
#[cfg(test)]
mod loomed;
pub mod measure;
pub mod memory;
pub mod metrics;
pub mod model;
pub mod patience;
mod pieces;
pub mod plan;
mod primitive;
mod process;
mod pyfmt;
pub mod request;
mod ring;
mod saved;
pub mod selftest;
pub mod session;
mod shared;
pub mod stream;
pub mod template;
pub mod text;
pub mod tokenizer;
pub mod weights;

pub use kie_kernels::device::Stop;

pub use builder::Builder;
pub use dry_run::DryRun;
pub use engine::{Engine, Logits};
pub use error::{Error, Result};
pub use grammar::Grammar;
pub use metrics::Metrics;
pub use patience::Patience;
pub use process::Process;
pub use request::LogitsPath;
pub use session::Session;
pub use shared::Info;
pub use stream::{Next, TokenStream};
