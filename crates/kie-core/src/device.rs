//! Devices by name, simulated topologies included.

use std::sync::Arc;

use kie_kccl::topology::simulated;
use kie_kernels::device::{Device, Options};
use kie_kernels::devices;

use crate::error::{Error, Result};
use crate::selftest;

/// Opens a device by name, which for a simulator may have a `topology=FILE`.
pub(crate) fn open(name: &str, options: &Options) -> Result<Arc<dyn Device>> {
    let (told, topology) = simulated(name)?;
    // Nobody has seen a kernel on AMD's hardware yet.
    let untried = told.split(':').next() == Some("hip");
    if topology.is_none() && !untried {
        return Ok(devices::open(name, options)?);
    }
    let machines = devices::machines(&told, options)?;
    if untried {
        selftest::first_start(name, &machines, options)?;
    }
    // Called what the caller called it.
    Ok(devices::of_machines(name, machines, options)?)
}

impl From<kie_kccl::Error> for Error {
    fn from(error: kie_kccl::Error) -> Self {
        match error {
            kie_kccl::Error::Topology { path, detail } => Self::Topology { path, detail },
            kie_kccl::Error::Device(error) => error.into(),
            other => Self::Device(other.to_string()),
        }
    }
}
