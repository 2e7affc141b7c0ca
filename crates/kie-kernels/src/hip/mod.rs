//! AMD GPUs (gfx942): the symbols of the HIP runtime and hipRTC, and what only they do. The machine
//! itself is [`GpuMachine`]. It has run against a stand-in for the runtime only, never on a GPU.

pub mod code_object;
mod ffi;
mod hiprtc;
mod rocm;
mod runtime;
#[cfg(test)]
mod tests;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

pub use self::runtime::Runtime;
use crate::error::Result;
use crate::gpu::api::{Api, Paths};
use crate::gpu::{GpuMachine, GpuModule};
use crate::kfd;
use crate::machine::cache::Cache;
use crate::machine::Machine;

/// One GPU.
pub type Hip = GpuMachine<Runtime>;
/// Code on one.
pub type HipModule = GpuModule<Runtime>;

/// With compiled kernels in `cache_dir`.
fn paths(cache_dir: Option<&Path>) -> Paths {
    Paths {
        driver: rocm::candidates(&runtime::NAMES),
        compiler: hiprtc::candidates(),
        cache: cache_dir.map_or_else(Cache::usual, Cache::at),
        nodes: kfd::NODES.into(),
        patience: Duration::from_secs(10),
    }
}

/// Opens `hip` (the first) or `hip:N`; compiled kernels are kept in `cache_dir`.
///
/// # Errors
/// [`Error::NoDevice`](crate::Error::NoDevice) with what is missing and what to do about it.
pub fn open(name: &str, cache_dir: Option<&Path>) -> Result<Arc<dyn Machine>> {
    Ok(Arc::new(Hip::open(name, &paths(cache_dir))?))
}

/// How many GPUs the runtime sees.
///
/// # Errors
/// [`Error::NoDevice`](crate::Error::NoDevice) where there is no runtime, or none that will do.
pub fn count() -> Result<u32> {
    Runtime::open(&paths(None), Runtime::KIND)?.count(Runtime::KIND)
}
