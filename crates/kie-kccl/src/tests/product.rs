//! Every operation, format, number of ranks, way and size gives the bits of the definition.

use super::*;
use crate::algorithm::{Kind, Table};
use crate::cpu;

/// Numbers of a slice: one, a part of a pair, a thread's worth and one more, several blocks' worth,
/// several pieces' worth with a ragged end.
const SIZES: [usize; 5] = [1, 7, 257, 1024, 2731];

fn check(communicator: &mut Communicator, op: Op, dtype: Dtype, slice: usize, way: Algorithm) {
    let ranks = communicator.ranks();
    let numbers = slice * op.slices_in(ranks);
    let given = inputs(dtype, ranks, numbers, (slice + ranks) as u64);
    let root = slice % ranks;
    let got = communicator.run_as(op, dtype, root, &slices(&given), way).unwrap();
    let wanted = cpu::run(op, dtype, root, &slices(&given));
    for rank in 0..ranks {
        assert!(
            got[rank] == wanted[rank],
            "{} of {slice} {dtype:?} on rank {rank} of {ranks}, {way}",
            op.name()
        );
    }
}

fn product(ranks: usize, seed: u64, warp: u32) {
    let machine = sim(seed, 2 * ranks as u32, warp);
    let mut communicator = virtual_ranks(machine, ranks);
    for op in Op::ALL {
        for dtype in Dtype::ALL {
            // What only moves does not look at the numbers.
            if op as u32 > Op::ReduceScatter as u32 && dtype == Dtype::Bf16 {
                continue;
            }
            let most = if op.slices(ranks) > 1 { 3 } else { SIZES.len() };
            for slice in &SIZES[..if ranks < 8 { SIZES.len() } else { most }] {
                for way in ways(2) {
                    check(&mut communicator, op, dtype, *slice, way);
                }
            }
        }
    }
}

#[test]
fn two_ranks_agree_with_the_definition() {
    product(2, 1, 32);
}

#[test]
fn four_ranks_agree_with_the_definition() {
    product(4, 2, 32);
}

#[test]
fn eight_ranks_agree_with_the_definition() {
    product(8, 3, 64);
}

#[test]
fn other_numbers_of_ranks_do_too() {
    for ranks in [1, 3, 7] {
        let mut communicator = virtual_ranks(sim(4, 2 * ranks as u32, 32), ranks);
        for op in Op::ALL {
            for way in ways(2) {
                check(&mut communicator, op, Dtype::F16, 261, way);
            }
        }
    }
}

#[test]
fn interleavings_change_no_bit() {
    for seed in 10..22 {
        let mut communicator = virtual_ranks(sim(seed, 8, if seed % 2 == 0 { 32 } else { 64 }), 4);
        for op in [Op::AllReduce, Op::Broadcast, Op::AllToAll, Op::ReduceScatter] {
            for way in ways(2) {
                check(&mut communicator, op, Dtype::F16, 300, way);
            }
        }
    }
}

#[test]
fn one_after_another_in_one_kernel() {
    for op in Op::ALL {
        for way in ways(2) {
            let mut communicator = virtual_ranks(sim(5, 8, 32), 4);
            let given = inputs(Dtype::F32, 4, 512 * op.slices_in(4), 9);
            let first = communicator.run_as(op, Dtype::F32, 0, &slices(&given), way).unwrap();
            let bytes = 2048 * op.slices(4);
            communicator.measure(op, Dtype::F32, bytes, 20, Some(way)).unwrap();
            assert_eq!(communicator.epoch(), Some(1 + 1 + 22));
            let Some((memory, layout)) = communicator.symmetric() else { panic!("a device") };
            for rank in 0..4 {
                let mut last = vec![0; first[rank].len()];
                memory.read(rank, layout.output, &mut last).unwrap();
                if op == Op::AllReduce {
                    // The mean of equal numbers is that number, ever after.
                    let quarter = |part: &[u8]| {
                        f32::from_le_bytes([part[0], part[1], part[2], part[3]]) * 0.25
                    };
                    let mean: Vec<u8> = first[rank]
                        .chunks_exact(4)
                        .flat_map(|part| quarter(part).to_le_bytes())
                        .collect();
                    assert!(last == mean, "rank {rank}, {way}");
                } else if op != Op::ReduceScatter {
                    assert!(last == first[rank], "{} rank {rank}, {way}", op.name());
                }
            }
        }
    }
}

#[test]
fn epochs_end_and_start_anew() {
    let more = Options { first_epoch: (1 << 31) - 3, ..options() };
    let mut communicator = Communicator::virtual_ranks(sim(6, 4, 32), 2, &more).unwrap();
    for round in 0..6 {
        for way in ways(2) {
            check(&mut communicator, Op::AllReduce, Dtype::F32, 100 + round, way);
        }
    }
    assert_eq!(communicator.epoch(), Some(1 + 10));
}

#[test]
fn the_planned_way_is_taken() {
    let mut communicator = virtual_ranks(sim(7, 8, 32), 4);
    for numbers in [4, 400, 4000, 16000] {
        let given = inputs(Dtype::F32, 4, numbers, 3);
        let got = communicator.all_reduce(Dtype::F32, &slices(&given)).unwrap();
        assert!(got == cpu::run(Op::AllReduce, Dtype::F32, 0, &slices(&given)), "{numbers}");
    }
    assert_eq!(communicator.plan(Op::AllReduce, 64).kind, Kind::OneShot);
    assert_eq!(communicator.plan(Op::AllReduce, 1 << 26).kind, Kind::Bulk);
    assert!(Table(communicator.topology()).to_string().contains("all-reduce: one-shot up to"));
    communicator.barrier().unwrap();
}
