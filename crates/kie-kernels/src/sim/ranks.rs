//! Several simulated machines that run a model together, under one scheduler: each is asked for its
//! launch, and the last one's starts them all, so that the interleaving of all ranks is the seed's.
//!
//! Each rank owns what it allocates: a kernel that loads or copies from another's memory, or stores
//! into it but for symmetric memory in the system's scope, faults with both ranks and the address.
//! Seen are words, states, copies and words of the host, not plain loads and stores of C++. Virtual
//! ranks that share one machine (kie-kccl) own nothing apart and cannot be told from each other.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{memory_of, shared_of, Options, Sim};
use crate::error::{Error, Result};
use crate::machine::{
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

/// The machines that `name` describes, in order of rank; see [`Options::parse`].
///
/// # Errors
/// [`Error::NoDevice`] for a name that is not understood, or where there is no C++ compiler.
pub fn open(name: &str) -> Result<Vec<Arc<dyn Machine>>> {
    let options = Options::parse(name)?;
    let ranks = options.ranks as usize;
    let sim = Sim::new(options)?;
    if ranks == 1 {
        return Ok(vec![Arc::new(sim)]);
    }
    Ok(of(sim, ranks))
}

/// The machines of a group, in order of rank.
fn of(sim: Sim, ranks: usize) -> Vec<Arc<dyn Machine>> {
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

    fn wait(&mut self) -> bool {
        locked(&self.flight).as_mut().is_none_or(|flight| flight.wait())
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
        Ok(memory_of(self.sim.region_of_rank(bytes, self.rank, false)?, bytes))
    }

    fn alloc_symmetric(&self, bytes: usize) -> Result<Memory> {
        Ok(memory_of(self.sim.region_of_rank(bytes, self.rank, true)?, bytes))
    }

    fn alloc_shared(&self, bytes: usize) -> Result<Shared> {
        Ok(shared_of(self.sim.region_of_rank(bytes, self.rank, false)?, bytes))
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::mono::source::join;

    /// Two ranks run `body`, in which rank 1 may do with rank 0's memory what it should not: `own`
    /// is what `alloc` gave rank 0, `open` what `alloc_symmetric` did.
    fn outcome(body: &str) -> (Result<bool>, u64) {
        let machines = super::open("sim:ranks=2,blocks=1").unwrap();
        let text = join(Platform::Sim, ("toy", "#include \"platform.h\"\n"))
            + "struct Args { u64 rank; u64* own; u64* open; };\nKIE_KERNEL(toy, 32, Args a) {\n"
            + "KIE_SHARED_BYTES(shared);\nSlot* slot = (Slot*)shared;\nslot_init(slot, 1);\n"
            + &format!("if (a.rank == 1 && thread() == 0) {{ {body} }}\n}}\n");
        let source = Source { defines: Vec::new(), text, entries: vec!["toy"] };
        let module = machines[0].compile(&source).unwrap();
        let own = machines[0].alloc(4096).unwrap();
        let open = machines[0].alloc_symmetric(4096).unwrap();
        // Freed memory has no owner.
        drop(machines[0].alloc(1 << 20).unwrap());
        let flights = (0..2_u64).map(|rank| {
            let args: Vec<u8> =
                [rank, own.address, open.address].iter().flat_map(|w| w.to_ne_bytes()).collect();
            let launch =
                Launch { entry: "toy", blocks: 1, threads: 32, shared_bytes: 1024, args: &args };
            machines[rank as usize].launch(&module, &launch).unwrap()
        });
        let mut flights: Vec<_> = flights.collect();
        let outcome = loop {
            match flights[1].done() {
                Ok(false) => std::thread::yield_now(),
                ended => break ended,
            }
        };
        (outcome, own.address)
    }

    #[test]
    fn a_rank_reaches_anothers_memory_only_as_it_may() {
        for lawful in [
            "store_word_system(a.open + 511, 1);",
            "store_words_system(a.open + 2, 1, 2);",
            "store_state(a.open, Quad{{1, 2, 3, 4}});",
            "u64 mine[2] = {}; store_word(mine, load_word(mine + 1));",
        ] {
            assert_eq!(outcome(lawful).0, Ok(true), "{lawful}");
        }
        for stray in [
            "store_word_system(a.own, 1);",
            "store_words_system(a.own, 1, 2);",
            "store_state(a.own, Quad{{1, 2, 3, 4}});",
            "store_word(a.open, 1);",
            "load_word(a.own);",
            "load_word(a.open);",
            "u64 x, y; load_words_system(a.open, x, y);",
            "load_state(a.own);",
            "store_host(a.own, 1ull);",
            "load_host(a.own);",
            "copy_async(slot, shared + 512, a.open, 16, stream_policy());",
        ] {
            let error = outcome(stray).0.unwrap_err().to_string();
            let named = error.contains("rank 1: ") && error.contains("is memory of rank 0, which");
            assert!(named, "{stray}: {error}");
        }
        let (error, own) = outcome("load_word(a.own + 1);");
        let error = error.unwrap_err().to_string();
        assert!(error.contains(&format!("load_word at {:#x} is", own + 8)), "{error}");
    }
}
