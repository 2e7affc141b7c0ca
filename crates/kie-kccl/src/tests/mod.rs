//! Virtual ranks in the simulator against the plain definition, and what goes wrong on purpose.

#![allow(clippy::unwrap_used)]

mod compiled;
mod faults;
#[cfg(target_os = "linux")]
mod gcn;
mod inside;
mod processes;
mod product;
mod recorded;

use std::sync::Arc;
use std::time::Duration;

use kie_kernels::error::Result;
use kie_kernels::machine::{
    Flight, Launch, Machine, MachineInfo, Memory, Module, Peer, Platform, Shared, Source,
};
use kie_kernels::sim::Sim;

use crate::{Algorithm, Communicator, Dtype, Op, Options};

/// Threads of a block: enough for two teams, few enough to be quick.
const THREADS: u32 = 64;

fn sim(seed: u64, blocks: u32, warp: u32) -> Arc<dyn Machine> {
    let name = format!("sim:seed={seed},blocks={blocks},warp={warp}");
    Arc::new(Sim::open(&name).unwrap())
}

fn options() -> Options {
    Options {
        message_bytes: 64 << 10,
        threads: THREADS,
        budget: Duration::from_secs(1),
        ..Options::default()
    }
}

fn virtual_ranks(machine: Arc<dyn Machine>, ranks: usize) -> Communicator {
    Communicator::virtual_ranks(machine, ranks, &options()).unwrap()
}

/// Numbers of about 1, other ones for each rank, whose sums have to be rounded.
fn inputs(dtype: Dtype, ranks: usize, numbers: usize, seed: u64) -> Vec<Vec<u8>> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let one = |_| -> Vec<u8> {
        let number = |v: f32| match dtype {
            Dtype::F16 => half::f16::from_f32(v).to_le_bytes().to_vec(),
            Dtype::Bf16 => half::bf16::from_f32(v).to_le_bytes().to_vec(),
            Dtype::F32 => v.to_le_bytes().to_vec(),
            Dtype::U8 => vec![(v * 127.0) as i8 as u8],
        };
        (0..numbers).flat_map(|_| number(next())).collect()
    };
    (0..ranks).map(one).collect()
}

fn slices(inputs: &[Vec<u8>]) -> Vec<&[u8]> {
    inputs.iter().map(Vec::as_slice).collect()
}

/// Both algorithms, whatever a topology would choose, small enough for several blocks and pieces.
fn algorithms(blocks: u32) -> [Algorithm; 2] {
    use crate::algorithm::Kind::{Bulk, OneShot};
    let algorithm =
        |kind, piece_bytes| Algorithm { kind, blocks, threads: THREADS, piece_bytes, cost_ns: 0 };
    [algorithm(OneShot, 0), algorithm(Bulk, 80 * 16)]
}

/// A machine whose compiler gets another text.
struct Mutant {
    machine: Arc<dyn Machine>,
    from: &'static str,
    to: String,
}

fn mutant(machine: Arc<dyn Machine>, from: &'static str, to: &str) -> Arc<dyn Machine> {
    Arc::new(Mutant { machine, from, to: to.to_owned() })
}

impl Machine for Mutant {
    fn platform(&self) -> Platform {
        self.machine.platform()
    }

    fn info(&self) -> Result<MachineInfo> {
        self.machine.info()
    }

    fn compile(&self, source: &Source) -> Result<Arc<dyn Module>> {
        assert_eq!(source.text.matches(self.from).count(), 1, "{}", self.from);
        let text = source.text.replace(self.from, &self.to);
        self.machine.compile(&Source { text, ..source.clone() })
    }

    fn alloc(&self, bytes: usize) -> Result<Memory> {
        self.machine.alloc(bytes)
    }

    fn alloc_symmetric(&self, bytes: usize) -> Result<Memory> {
        self.machine.alloc_symmetric(bytes)
    }

    fn alloc_shared(&self, bytes: usize) -> Result<Shared> {
        self.machine.alloc_shared(bytes)
    }

    fn write(&self, to: &Memory, offset: usize, bytes: &[u8]) -> Result<()> {
        self.machine.write(to, offset, bytes)
    }

    fn read(&self, from: &Memory, offset: usize, out: &mut [u8]) -> Result<()> {
        self.machine.read(from, offset, out)
    }

    fn launch(&self, module: &Arc<dyn Module>, launch: &Launch<'_>) -> Result<Box<dyn Flight>> {
        self.machine.launch(module, launch)
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
}
