//! The kinds of machines that there are kernels for.

use std::time::Duration;

/// Between two looks at a simulated launch.
const SIM_POLL: Duration = Duration::from_micros(200);

/// Which platform headers stand in front of `kernels/common`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Platform {
    /// NVIDIA.
    Cuda,
    /// AMD.
    Hip,
    /// The CPU, for tests.
    Sim,
}

impl Platform {
    /// Between two looks at a launch: a simulated one runs on this machine's cores and is left to
    /// them for a while; a GPU's is looked at again at once.
    pub fn between_looks(self) {
        if self == Self::Sim {
            std::thread::sleep(SIM_POLL);
        }
    }
}
