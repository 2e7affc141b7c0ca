//! What the examples share: opening devices, and numbers to work on.

use std::path::PathBuf;
use std::sync::Arc;

use kie_kernels::machine::Machine;

pub type Failure = Box<dyn std::error::Error>;

/// A device by name; `nvrtc`: further folders with its compiler.
pub fn open(name: &str, nvrtc: &[PathBuf]) -> Result<Arc<dyn Machine>, Failure> {
    if name.starts_with("sim") {
        return Ok(Arc::new(kie_kernels::sim::Sim::open(name)?));
    }
    Ok(kie_kernels::cuda::open(name, nvrtc, None)?)
}

/// Any bits that are finite numbers in every format.
pub fn pattern(bytes: usize, rank: usize) -> Vec<u8> {
    let word = |i: usize| {
        let mixed = ((i * 8 + rank) as u32).wrapping_mul(0x9e37_79b9);
        (mixed & 0x83ff_83ff) | 0x3c00_3c00
    };
    (0..bytes.div_ceil(4)).flat_map(|i| word(i).to_le_bytes()).take(bytes).collect()
}
