//! NVIDIA GPUs: the symbols of the CUDA driver and NVRTC, and what only they do. The machine itself
//! is [`GpuMachine`].

mod driver;
mod ffi;
pub mod nvrtc;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

pub use self::driver::Driver;
use crate::error::Result;
use crate::gpu::api::{Api, Paths};
use crate::gpu::{GpuMachine, GpuModule};
use crate::machine::cache::Cache;
use crate::machine::Machine;

/// One GPU.
pub type Cuda = GpuMachine<Driver>;
/// Code on one.
pub type CudaModule = GpuModule<Driver>;

/// With compiled kernels in `cache_dir`.
fn paths(nvrtc_dirs: &[PathBuf], cache_dir: Option<&Path>) -> Paths {
    Paths {
        driver: vec!["libcuda.so.1".into()],
        compiler: nvrtc::candidates(nvrtc_dirs),
        cache: cache_dir.map_or_else(Cache::usual, Cache::at),
        nodes: PathBuf::new(),
        patience: Duration::from_secs(10),
    }
}

/// Opens `cuda` (the first) or `cuda:N`. `nvrtc_dirs` are further folders in which NVRTC may lie,
/// `cache_dir` is where compiled kernels are kept.
///
/// # Errors
/// [`Error::NoDevice`](crate::Error::NoDevice) with what is missing and what to do about it.
pub fn open(
    name: &str,
    nvrtc_dirs: &[PathBuf],
    cache_dir: Option<&Path>,
) -> Result<Arc<dyn Machine>> {
    Ok(Arc::new(Cuda::open(name, &paths(nvrtc_dirs, cache_dir))?))
}

/// How many GPUs the driver sees.
///
/// # Errors
/// [`Error::NoDevice`](crate::Error::NoDevice) where there is no driver, or none that will do.
pub fn count() -> Result<u32> {
    Driver::open(&paths(&[], None), Driver::KIND)?.count(Driver::KIND)
}
