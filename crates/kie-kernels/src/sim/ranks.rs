//! Several simulated machines that run a model together, under one scheduler: each is asked for its
//! launch, and the last one's starts them all, so that the interleaving of all ranks is the seed's.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Sim;
use crate::error::{Error, Result};
use crate::mono::machine::{
    Flight, Launch, Machine, MachineInfo, Memory, Module, Peer, Platform, Shared, Source,
};

/// One of the machines.
struct Rank {
    sim: Sim,
    rank: usize,
    group: Arc<Group>,
}

struct Group {
    ranks: usize,
    waiting: Mutex<Waiting>,
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

/// The machines of a group, in order of rank.
pub(super) fn of(sim: Sim, ranks: usize) -> Vec<Arc<dyn Machine>> {
    let group = Arc::new(Group { ranks, waiting: Mutex::default() });
    let one = |rank| -> Arc<dyn Machine> {
        Arc::new(Rank { sim: sim.clone(), rank, group: group.clone() })
    };
    (0..ranks).map(one).collect()
}

/// Lands when all of its group have.
struct Together {
    flight: Arc<Mutex<Option<Box<dyn Flight>>>>,
    group: Arc<Group>,
}

impl Flight for Together {
    fn done(&mut self) -> Result<bool> {
        locked(&self.flight).as_mut().map_or(Ok(false), |flight| flight.done())
    }
}

impl Drop for Together {
    /// One that never took off, because a later rank's launch was refused, is forgotten.
    fn drop(&mut self) {
        let mut waiting = locked(&self.group.waiting);
        if Arc::ptr_eq(&waiting.flight, &self.flight) {
            *waiting = Waiting::default();
        }
    }
}

impl Machine for Rank {
    fn platform(&self) -> Platform {
        self.sim.platform()
    }

    fn warp(&self) -> u32 {
        self.sim.warp()
    }

    fn info(&self) -> Result<MachineInfo> {
        self.sim.info()
    }

    fn compile(&self, source: &Source) -> Result<Arc<dyn Module>> {
        self.sim.compile(source)
    }

    fn alloc(&self, bytes: usize) -> Result<Memory> {
        self.sim.alloc(bytes)
    }

    fn alloc_shared(&self, bytes: usize) -> Result<Shared> {
        self.sim.alloc_shared(bytes)
    }

    fn peer(&self) -> Result<Peer> {
        self.sim.peer()
    }

    fn reaches(&self, other: &dyn Machine) -> Result<bool> {
        self.sim.reaches(other)
    }

    fn enable_peer(&self, other: &dyn Machine) -> Result<()> {
        self.sim.enable_peer(other)
    }

    fn write(&self, to: &Memory, offset: usize, bytes: &[u8]) -> Result<()> {
        self.sim.write(to, offset, bytes)
    }

    fn read(&self, from: &Memory, offset: usize, out: &mut [u8]) -> Result<()> {
        self.sim.read(from, offset, out)
    }

    fn launch_alone(
        &self,
        module: &Arc<dyn Module>,
        launch: &Launch<'_>,
    ) -> Result<Box<dyn Flight>> {
        self.sim.launch(module, launch)
    }

    fn launch(&self, module: &Arc<dyn Module>, launch: &Launch<'_>) -> Result<Box<dyn Flight>> {
        let mut waiting = locked(&self.group.waiting);
        if waiting.args.len() != self.rank {
            let (rank, next) = (self.rank, waiting.args.len());
            return Err(Error::Failed(format!("rank {rank} was launched where {next} was due")));
        }
        waiting.args.push(launch.args.to_vec());
        let flight = waiting.flight.clone();
        if waiting.args.len() == self.group.ranks {
            let all = std::mem::take(&mut *waiting);
            let args: Vec<&[u8]> = all.args.iter().map(Vec::as_slice).collect();
            *locked(&all.flight) = Some(self.sim.launch_all(module, launch, &args)?);
        }
        Ok(Box::new(Together { flight, group: self.group.clone() }))
    }
}
