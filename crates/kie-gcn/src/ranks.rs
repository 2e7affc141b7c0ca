//! Several emulated machines that run a model together, under one scheduler.

use std::sync::Arc;

use kie_kernels::machine::group::{self, Group};
use kie_kernels::machine::{Flight, Launch, Machine, Memory, Module, Shared};
use kie_kernels::Result;

use crate::options::Options;
use crate::Gcn;

/// The machines that `name` describes, in order of rank; see [`Options::parse`].
///
/// # Errors
/// [`Error::NoDevice`](kie_kernels::Error::NoDevice) for a name that is not understood.
pub fn open(name: &str) -> Result<Vec<Arc<dyn Machine>>> {
    let options = Options::parse(name)?;
    let ranks = options.ranks as usize;
    Ok(group::of(Gcn::new(options), ranks))
}

/// Memory of one rank is reached like another's.
impl Group for Gcn {
    fn launch_all(
        &self,
        module: &Arc<dyn Module>,
        launch: &Launch<'_>,
        ranks: &[&[u8]],
    ) -> Result<Box<dyn Flight>> {
        Gcn::launch_all(self, module, launch, ranks)
    }

    fn alloc_of(&self, _: usize, bytes: usize, _: bool) -> Result<Memory> {
        self.alloc(bytes)
    }

    fn alloc_shared_of(&self, _: usize, bytes: usize) -> Result<Shared> {
        self.alloc_shared(bytes)
    }
}
