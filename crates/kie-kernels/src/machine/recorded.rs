//! A machine of which only the description is at hand: plans can be made for it, nothing can run.

use std::sync::Arc;

use super::{Flight, Launch, Machine, MachineInfo, Memory, Module, Peer, Platform, Shared, Source};
use crate::error::{Error, Result};

/// What is known of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recorded {
    /// What it has; all its memory is free.
    pub info: MachineInfo,
    /// Which headers its sources would start with.
    pub platform: Platform,
    /// Threads that run in step.
    pub warp: u32,
}

impl Recorded {
    fn absent<T>(&self) -> Result<T> {
        Err(Error::NoDevice {
            device: self.info.name.clone(),
            detail: "it is known from a file only: plans can be made for it, nothing can run on it"
                .to_owned(),
        })
    }
}

impl Machine for Recorded {
    fn platform(&self) -> Platform {
        self.platform
    }

    fn warp(&self) -> u32 {
        self.warp
    }

    fn info(&self) -> Result<MachineInfo> {
        Ok(self.info.clone())
    }

    fn compile(&self, _: &Source) -> Result<Arc<dyn Module>> {
        self.absent()
    }

    fn alloc(&self, _: usize) -> Result<Memory> {
        self.absent()
    }

    fn alloc_shared(&self, _: usize) -> Result<Shared> {
        self.absent()
    }

    fn write(&self, _: &Memory, _: usize, _: &[u8]) -> Result<()> {
        self.absent()
    }

    fn read(&self, _: &Memory, _: usize, _: &mut [u8]) -> Result<()> {
        self.absent()
    }

    fn launch(&self, _: &Arc<dyn Module>, _: &Launch<'_>) -> Result<Box<dyn Flight>> {
        self.absent()
    }

    fn peer(&self) -> Result<Peer> {
        self.absent()
    }
}
