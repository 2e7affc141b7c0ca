//! Which algorithm a collective takes: a pure function of operation, bytes and topology. It knows
//! nothing of the rank that asks, so all ranks choose the same.
//!
//! Two algorithms are built. *One-shot* pushes every datum with its sequence number in one word, as
//! NCCL's LL protocol does: one trip through the link and no fence, but twice the bytes, and every
//! rank makes every sum. *Bulk* moves plain bytes and flags: a barrier, then one or two rounds that
//! each end in a fence.
//!
//! There is no ring. Its sums would start at another rank for each part: alike on all ranks, but
//! not in the order of the ranks, so that bits would depend on a message's size. And where each GPU
//! has one link to a switch or a processor (the PCIe box) a rank sends 2 (n - 1) / n of a message
//! either way, so a ring only adds 2 (n - 2) rounds. Sums handed from rank to rank in their order
//! would keep the bits, but take float32 up and the result down: 2 to 3 messages through each link.
//! What a ring would gain is traffic between two sockets: 1.5 messages each way where bulk takes 2
//! among 4 GPUs, 1.75 for 4 among 8. No such machine was at hand to weigh that against the bits.

use std::fmt;

use crate::op::Op;
use crate::topology::Topology;

/// Most bytes that a rank pushes to another as words; twice as many are kept for each rank, twice.
pub const PUSH_BYTES_MAX: u64 = 512 << 10;
/// Most blocks of a collective: flags are laid out for so many.
pub const BLOCKS_MAX: u32 = 128;
/// Blocks that saturate a GPU's links with 16-byte stores; the others keep computing.
const BLOCKS_BULK: u32 = 64;
/// A piece is what one flag stands for: large enough to hide the fence, small enough to overlap.
const PIECE_BYTES: [u64; 2] = [4 << 10, 64 << 10];

/// Most threads of a block that pushes: each holds words of every rank in registers.
fn push_threads(ranks: usize) -> u32 {
    if ranks <= 4 {
        1024
    } else {
        512
    }
}

/// One of the algorithms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// LL words: each carries its sequence number.
    OneShot,
    /// Plain bytes, then flags.
    Bulk,
}

/// How a collective is done, on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Algorithm {
    /// Which one.
    pub kind: Kind,
    /// Blocks of each rank.
    pub blocks: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Bytes for which one flag stands; 0 where there are none.
    pub piece_bytes: u32,
    /// What it should take, from the topology's figures: for choosing, not for promising.
    pub cost_ns: u64,
}

/// What an algorithm puts on the links: exact numbers, so that two of them change places only once.
struct Traffic {
    /// Bytes from one rank to one other in all rounds, times the ranks.
    pair_times_ranks: u128,
    /// Nanoseconds whatever the bytes.
    fixed_ns: u64,
}

/// Chooses. `bytes` is the message: the larger of a rank's input and output.
pub fn choose(op: Op, bytes: u64, topology: &Topology) -> Algorithm {
    let push = traffic(op, bytes, topology, Kind::OneShot).cost(topology);
    let bulk = traffic(op, bytes, topology, Kind::Bulk).cost(topology);
    let (push_ns, bulk_ns) = (push.ns(), bulk.ns());
    let payload = pushed_bytes(op, bytes, topology);
    let smallest = |of: fn(&crate::topology::Gpu) -> u32| {
        topology.gpus.iter().map(of).min().unwrap_or(1).max(1)
    };
    let blocks_most = smallest(|gpu| gpu.multiprocessors).min(BLOCKS_MAX);
    let threads_most = smallest(|gpu| gpu.threads).min(push_threads(topology.ranks()));
    if op == Op::Barrier {
        let threads = threads_most.min(32);
        let kind = Kind::OneShot;
        return Algorithm { kind, blocks: 1, threads, piece_bytes: 0, cost_ns: push_ns };
    }
    if payload <= PUSH_BYTES_MAX && push.0 <= bulk.0 {
        // A pair a thread, and few threads a block: 1,024 of one block stand in line before its
        // one way out. 8 KB among four H200: 2.5 us from one block, 1.3 from eight, 1.24 from 32.
        let pairs = payload.div_ceil(8).max(1);
        let warp = topology.gpus.iter().map(|gpu| gpu.warp).max().unwrap_or(32).max(32);
        let threads = pairs.div_ceil(u64::from(blocks_most)).next_multiple_of(u64::from(warp));
        let threads = threads.min(u64::from(threads_most)) as u32;
        let blocks = pairs.div_ceil(u64::from(threads)).min(u64::from(blocks_most)) as u32;
        let kind = Kind::OneShot;
        return Algorithm { kind, blocks, threads, piece_bytes: 0, cost_ns: push_ns };
    }
    let part = bytes.div_ceil(topology.ranks() as u64).max(16);
    let blocks = part.div_ceil(PIECE_BYTES[0]).clamp(1, u64::from(blocks_most.min(BLOCKS_BULK)));
    let piece = part.div_ceil(blocks).next_multiple_of(16).clamp(16, PIECE_BYTES[1]) as u32;
    let threads = threads_most.min(512);
    let (kind, blocks) = (Kind::Bulk, blocks as u32);
    Algorithm { kind, blocks, threads, piece_bytes: piece, cost_ns: bulk_ns }
}

/// Largest message that goes one-shot.
pub fn threshold_bytes(op: Op, topology: &Topology) -> u64 {
    let (mut low, mut high) = (0_u64, 1_u64 << 40);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if choose(op, middle, topology).kind == Kind::OneShot {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    low
}

/// Data that a rank pushes to another when the message goes one-shot.
pub fn pushed_bytes(op: Op, bytes: u64, topology: &Topology) -> u64 {
    match op {
        Op::AllReduce | Op::Broadcast => bytes,
        Op::ReduceScatter | Op::AllGather | Op::AllToAll => bytes.div_ceil(topology.ranks() as u64),
        Op::Barrier => 0,
    }
}

fn traffic(op: Op, bytes: u64, topology: &Topology, kind: Kind) -> Traffic {
    let (via, bytes) = (topology.slowest(), u128::from(bytes));
    let (whole, rounds) = match op {
        Op::AllReduce | Op::Broadcast => (topology.ranks() as u128, 2),
        Op::ReduceScatter | Op::AllGather | Op::AllToAll => (1, 1),
        Op::Barrier => (0, 0),
    };
    match kind {
        // A word is half sequence number.
        Kind::OneShot => Traffic { pair_times_ranks: 2 * bytes * whole, fixed_ns: via.push_ns() },
        // Before the rounds, a meeting: flags alone.
        Kind::Bulk => Traffic {
            pair_times_ranks: bytes * u128::from(rounds),
            fixed_ns: via.push_ns() + rounds * via.round_ns(),
        },
    }
}

/// Time over a denominator that is the topology's.
struct Cost(u128, u128);

impl Cost {
    fn ns(&self) -> u64 {
        u64::try_from(self.0 / self.1).unwrap_or(u64::MAX)
    }
}

impl Traffic {
    fn cost(&self, topology: &Topology) -> Cost {
        let ranks = topology.ranks() as u128;
        let (pair, egress) = (u128::from(topology.pair_mb_s()), u128::from(topology.egress_mb_s()));
        // The slower of one pair's link and of all that a rank sends through its own.
        let slowness = egress.max((ranks - 1) * pair);
        let whole = ranks * pair * egress;
        Cost(u128::from(self.fixed_ns) * whole + 1000 * self.pair_times_ranks * slowness, whole)
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::OneShot => "one-shot",
            Kind::Bulk => "bulk",
        };
        write!(f, "{kind} {}x{}", self.blocks, self.threads)?;
        if self.piece_bytes > 0 {
            write!(f, " pieces of {}", self.piece_bytes)?;
        }
        Ok(())
    }
}

/// The topology, and what is chosen on it for messages of 16 B to 64 MB.
pub struct Table<'a>(pub &'a Topology);

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)?;
        for op in Op::ALL {
            let most = threshold_bytes(op, self.0);
            match op {
                Op::Barrier => writeln!(f, "\n{}: flags alone", op.name())?,
                _ => writeln!(f, "\n{}: one-shot up to {most} bytes", op.name())?,
            }
            for shift in (4..=26).step_by(2) {
                let bytes = 1_u64 << shift;
                let chosen = choose(op, bytes, self.0);
                let us = chosen.cost_ns as f64 / 1000.0;
                let line = chosen.to_string();
                writeln!(f, "{bytes:>10} B  {line:<34}{us:>10.1} us")?;
                if op == Op::Barrier {
                    break;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::topology::{pairs, Gpu, Link, Via, VERSION};

    fn via() -> impl Strategy<Value = Via> {
        prop_oneof![
            Just(Via::Same),
            (1_u32..19).prop_map(|links| Via::Nvlink { links }),
            Just(Via::Xgmi { links: 1 }),
            Just(Via::Pcie),
            Just(Via::Socket),
            Just(Via::Unknown),
        ]
    }

    fn topology() -> impl Strategy<Value = Topology> {
        (1_u32..=8).prop_flat_map(|ranks| {
            let gpu = (1_u32..400, 0_usize..3, 1_u64..2_000_000);
            let gpus = proptest::collection::vec(gpu, ranks as usize);
            let count = pairs(ranks).count();
            let links = proptest::collection::vec((via(), 1_u64..1_000_000), count);
            (Just(ranks), gpus, links).prop_map(|(ranks, gpus, links)| {
                let gpu = |(multiprocessors, threads, egress_mb_s): (u32, usize, u64)| Gpu {
                    name: String::new(),
                    model: String::new(),
                    arch: String::new(),
                    warp: 32,
                    shared_bytes: 0,
                    memory_bytes: 0,
                    bus: None,
                    numa: None,
                    multiprocessors,
                    chiplets: 1,
                    io_dies: 1,
                    threads: [64, 512, 1024][threads],
                    egress_mb_s,
                };
                let link = |((a, b), (via, mb_s)): ((u32, u32), (Via, u64))| Link {
                    a,
                    b,
                    via,
                    mb_s,
                    peer_access: None,
                };
                Topology {
                    version: VERSION,
                    name: String::new(),
                    gpus: gpus.into_iter().map(gpu).collect(),
                    links: pairs(ranks).zip(links).map(link).collect(),
                }
            })
        })
    }

    fn op() -> impl Strategy<Value = Op> {
        (0..Op::ALL.len()).prop_map(|index| Op::ALL[index])
    }

    proptest! {
        #[test]
        fn every_message_has_a_way_that_fits(
            op in op(), bytes in 0_u64..1 << 42, topology in topology()
        ) {
            let chosen = choose(op, bytes, &topology);
            let gpu = |of: fn(&Gpu) -> u32| topology.gpus.iter().map(of).min().unwrap();
            prop_assert!((1..=gpu(|g| g.multiprocessors).min(BLOCKS_MAX)).contains(&chosen.blocks));
            prop_assert!((32..=gpu(|g| g.threads)).contains(&chosen.threads));
            prop_assert_eq!(chosen.threads % 32, 0);
            let pushed = pushed_bytes(op, bytes, &topology);
            prop_assert!(chosen.kind == Kind::Bulk || pushed <= PUSH_BYTES_MAX);
            let pieces = u64::from(chosen.piece_bytes);
            prop_assert!(pieces.is_multiple_of(16) && pieces <= PIECE_BYTES[1]);
            prop_assert_eq!(pieces > 0, chosen.kind == Kind::Bulk);
        }

        #[test]
        fn a_larger_message_never_goes_back_to_words(
            op in op(), small in 0_u64..1 << 26, more in 0_u64..1 << 26, topology in topology()
        ) {
            let (a, b) = (choose(op, small, &topology), choose(op, small + more, &topology));
            prop_assert!(a.kind <= b.kind);
            prop_assert!(a.cost_ns <= b.cost_ns);
            prop_assert_eq!(a.kind == Kind::OneShot, small <= threshold_bytes(op, &topology));
        }

        #[test]
        fn all_ranks_choose_the_same(
            op in op(), bytes in 0_u64..1 << 26, topology in topology(), turn in 0_usize..8
        ) {
            let ranks = topology.ranks();
            let order: Vec<u32> = (0..ranks).map(|r| ((r + turn) % ranks) as u32).collect();
            let turned = topology.subset(&order).unwrap();
            prop_assert_eq!(choose(op, bytes, &turned), choose(op, bytes, &topology));
            let text = serde_json::to_string(&topology).unwrap();
            let read: Topology = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(choose(op, bytes, &read), choose(op, bytes, &topology));
        }
    }
}
