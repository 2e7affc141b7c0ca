//! Devices of one process that reach each other's memory, and memory of other processes.
//!
//! Invariant: what is opened stays open as long as both contexts live, which whoever uses the
//! memory sees to by holding both machines.

use std::ffi::CStr;

use super::context::Context;
use super::ffi;
use super::ffi::{Address, IpcHandle};
use crate::error::{Error, Result};
use crate::mono::handle::{Handle, HandleFault};
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

    fn fault(&self, fault: HandleFault) -> Error {
        Error::Handle { device: self.name.clone(), fault }
    }

    /// How another process opens memory of ours, which begins at `address`.
    pub(super) fn export(&self, address: Address, bytes: usize) -> Result<Handle> {
        let mut handle = IpcHandle([0; 64]);
        let _current = self.current()?;
        // SAFETY: a live structure; the driver knows what is memory of this context.
        let code = unsafe { (self.driver.api.cuIpcGetMemHandle)(&mut handle, address) };
        if code != ffi::SUCCESS {
            let words = self.driver.words("cuIpcGetMemHandle", code);
            return Err(self.fault(HandleFault::Private(words)));
        }
        let (process, token) = (std::process::id(), handle.0.to_vec());
        Ok(Handle { platform: Platform::Cuda, process, bytes: bytes as u64, token })
    }

    /// Opens another process's memory; whoever calls this retires it.
    pub(super) fn import(&self, handle: &Handle, bytes: usize) -> Result<Address> {
        handle.check(Platform::Cuda, bytes).map_err(|fault| self.fault(fault))?;
        let token: Option<[u8; 64]> = handle.token.as_slice().try_into().ok();
        let Some(token) = token else {
            return Err(self.fault(HandleFault::Garbled(handle.token.len())));
        };
        let (mut address, flags) = (0, ffi::IPC_ENABLE_PEER);
        let _current = self.current()?;
        // SAFETY: a live integer; the driver looks through whatever bytes it is given.
        let code = unsafe {
            (self.driver.api.cuIpcOpenMemHandle_v2)(&mut address, IpcHandle(token), flags)
        };
        match code {
            ffi::SUCCESS => Ok(address),
            ffi::INVALID_VALUE | ffi::MAP_FAILED | ffi::INVALID_HANDLE => {
                let words = self.driver.words("cuIpcOpenMemHandle", code);
                Err(self.fault(handle.stale(words)))
            }
            code => self.check("cuIpcOpenMemHandle", code).map(|()| address),
        }
    }
}
