//! Programs, the devices that run them, and nothing above: no file formats, no model names.

pub mod abi;
pub mod bandwidth;
pub mod buffer;
pub mod cpu;
#[cfg(target_os = "linux")]
pub mod cuda;
pub mod device;
pub mod devices;
pub mod encoding;
pub mod error;
pub mod field;
pub mod file;
#[cfg(target_os = "linux")]
pub mod gpu;
#[cfg(target_os = "linux")]
pub mod hip;
pub mod host;
pub mod kfd;
pub mod limits;
pub mod litmus;
pub mod lookup;
pub mod machine;
pub mod mailbox;
pub mod mask;
pub mod matrix;
pub mod meter;
pub mod mono;
pub mod numbers;
pub mod park;
pub mod partition;
pub mod philox;
pub mod room;
pub mod sample;
mod shard;
pub mod sim;
pub mod simd;
pub mod validate;

pub use error::{Error, Result};
