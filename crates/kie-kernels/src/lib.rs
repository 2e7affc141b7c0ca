//! Programs, the devices that run them, and nothing above: no file formats, no model names.

pub mod abi;
pub mod cpu;
#[cfg(target_os = "linux")]
pub mod cuda;
pub mod device;
pub mod encoding;
pub mod error;
pub mod field;
pub mod file;
#[cfg(target_os = "linux")]
pub mod hip;
pub mod kfd;
pub mod mailbox;
pub mod mono;
pub mod partition;
pub mod philox;
pub mod room;
pub mod sample;
mod shard;
pub mod sim;
pub mod validate;

pub use error::{Error, Result};
