//! Several machines that run a model together, under one scheduler: each is asked for its launch,
//! and the last one's starts them all.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Flight, Launch, Machine, MachineInfo, Memory, Module, Peer, Platform, Shared, Source};
use crate::error::{Error, Result};

/// What runs all ranks' kernels at once.
pub trait Group: Machine + Clone + 'static {
    /// A launch on every rank, each with parameters of its own.
    ///
    /// # Errors
    /// As [`Machine::launch`].
    fn launch_all(
        &self,
        module: &Arc<dyn Module>,
        launch: &Launch<'_>,
        ranks: &[&[u8]],
    ) -> Result<Box<dyn Flight>>;

    /// Memory of one rank, which others may store into where it is `open`.
    ///
    /// # Errors
    /// As [`Machine::alloc`].
    fn alloc_of(&self, rank: usize, bytes: usize, open: bool) -> Result<Memory>;

    /// Host memory of one rank.
    ///
    /// # Errors
    /// As [`Machine::alloc_shared`].
    fn alloc_shared_of(&self, rank: usize, bytes: usize) -> Result<Shared>;
}

/// One of the machines.
struct Rank<M> {
    machine: M,
    rank: usize,
    /// How many there are.
    ranks: usize,
    waiting: Arc<Mutex<Waiting>>,
}

/// What has been launched of a group, in order of rank.
#[derive(Default)]
struct Waiting {
    args: Vec<Vec<u8>>,
    flight: Arc<Mutex<Option<Box<dyn Flight>>>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// So many machines, in order of rank; a single one is what it is.
pub fn of<M: Group>(machine: M, ranks: usize) -> Vec<Arc<dyn Machine>> {
    if ranks == 1 {
        return vec![Arc::new(machine)];
    }
    let waiting = Arc::new(Mutex::default());
    let one = |rank| -> Arc<dyn Machine> {
        Arc::new(Rank { machine: machine.clone(), rank, ranks, waiting: Arc::clone(&waiting) })
    };
    (0..ranks).map(one).collect()
}

/// Lands when all of its group have.
struct Together {
    flight: Arc<Mutex<Option<Box<dyn Flight>>>>,
    waiting: Arc<Mutex<Waiting>>,
}

impl Flight for Together {
    fn done(&mut self) -> Result<bool> {
        locked(&self.flight).as_mut().map_or(Ok(false), |flight| flight.done())
    }

    fn wait(&mut self) -> bool {
        locked(&self.flight).as_mut().is_none_or(|flight| flight.wait())
    }
}

impl Drop for Together {
    /// One that never took off, because a later rank's launch was refused, is forgotten.
    fn drop(&mut self) {
        let mut waiting = locked(&self.waiting);
        if Arc::ptr_eq(&waiting.flight, &self.flight) {
            *waiting = Waiting::default();
        }
    }
}

impl<M: Group> Machine for Rank<M> {
    fn platform(&self) -> Platform {
        self.machine.platform()
    }

    fn warp(&self) -> u32 {
        self.machine.warp()
    }

    fn info(&self) -> Result<MachineInfo> {
        self.machine.info()
    }

    fn compile(&self, source: &Source) -> Result<Arc<dyn Module>> {
        self.machine.compile(source)
    }

    fn alloc(&self, bytes: usize) -> Result<Memory> {
        self.machine.alloc_of(self.rank, bytes, false)
    }

    fn alloc_symmetric(&self, bytes: usize) -> Result<Memory> {
        self.machine.alloc_of(self.rank, bytes, true)
    }

    fn alloc_shared(&self, bytes: usize) -> Result<Shared> {
        self.machine.alloc_shared_of(self.rank, bytes)
    }

    fn peer(&self) -> Result<Peer> {
        self.machine.peer()
    }

    fn reaches(&self, other: &dyn Machine) -> Result<bool> {
        self.machine.reaches(other)
    }

    fn enable_peer(&self, other: &dyn Machine) -> Result<()> {
        self.machine.enable_peer(other)
    }

    fn write(&self, to: &Memory, offset: usize, bytes: &[u8]) -> Result<()> {
        self.machine.write(to, offset, bytes)
    }

    fn read(&self, from: &Memory, offset: usize, out: &mut [u8]) -> Result<()> {
        self.machine.read(from, offset, out)
    }

    fn launch_alone(
        &self,
        module: &Arc<dyn Module>,
        launch: &Launch<'_>,
    ) -> Result<Box<dyn Flight>> {
        self.machine.launch(module, launch)
    }

    fn launch(&self, module: &Arc<dyn Module>, launch: &Launch<'_>) -> Result<Box<dyn Flight>> {
        let mut waiting = locked(&self.waiting);
        if waiting.args.len() != self.rank {
            let (rank, next) = (self.rank, waiting.args.len());
            return Err(Error::Failed(format!("rank {rank} was launched where {next} was due")));
        }
        waiting.args.push(launch.args.to_vec());
        let flight = waiting.flight.clone();
        if waiting.args.len() == self.ranks {
            let all = std::mem::take(&mut *waiting);
            let args: Vec<&[u8]> = all.args.iter().map(Vec::as_slice).collect();
            *locked(&all.flight) = Some(self.machine.launch_all(module, launch, &args)?);
        }
        Ok(Box::new(Together { flight, waiting: Arc::clone(&self.waiting) }))
    }
}
