//! Devices of one process that reach each other's memory.
//!
//! Invariant: what is opened stays open as long as both contexts live, which whoever uses the
//! memory sees to by holding both machines.

use std::ffi::CStr;

use super::context::Context;
use super::ffi;
use crate::error::Result;
use crate::mono::machine::{Peer, Platform};

/// Room for a PCI address with its zero.
const BUS_BYTES: usize = 32;

impl Context {
    pub(super) fn peer(&self) -> Result<Peer> {
        let mut text = [0; BUS_BYTES];
        // SAFETY: a live buffer of the length that is told.
        let code = unsafe {
            (self.driver.api.cuDeviceGetPCIBusId)(
                text.as_mut_ptr(),
                BUS_BYTES as i32 - 1,
                self.ordinal,
            )
        };
        self.check("cuDeviceGetPCIBusId", code)?;
        // SAFETY: the last byte is zero whatever the driver wrote before it.
        let bus = unsafe { CStr::from_ptr(text.as_ptr()) };
        Ok(Peer {
            platform: Platform::Cuda,
            name: self.name.clone(),
            ordinal: self.ordinal,
            owner: self.handle(),
            bus: Some(bus.to_string_lossy().to_lowercase()),
        })
    }

    pub(super) fn reaches(&self, other: &Peer) -> Result<bool> {
        if other.platform != Platform::Cuda {
            return Ok(false);
        }
        if other.ordinal == self.ordinal {
            return Ok(true);
        }
        let mut can = 0;
        // SAFETY: a live integer; the driver knows which numbers are devices.
        let code = unsafe {
            (self.driver.api.cuDeviceCanAccessPeer)(&mut can, self.ordinal, other.ordinal)
        };
        self.check("cuDeviceCanAccessPeer", code)?;
        Ok(can != 0)
    }

    pub(super) fn enable_peer(&self, other: &Peer) -> Result<()> {
        if !self.reaches(other)? {
            let why = "the driver says no: different kinds of devices, no link, or a virtual \
                       machine that isolates them; nvidia-smi topo -p2p r shows it";
            return Err(self.peer()?.refuse(other, why));
        }
        if other.ordinal == self.ordinal {
            return Ok(());
        }
        let _current = self.current()?;
        // SAFETY: a primary context, retained by the machine that named it; no flags are defined.
        let code = unsafe { (self.driver.api.cuCtxEnablePeerAccess)(other.owner, 0) };
        match code {
            ffi::PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            code => self.check("cuCtxEnablePeerAccess", code),
        }
    }
}
