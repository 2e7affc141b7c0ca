//! Every operation, format, number of ranks, algorithm and size gives the bits of the definition.

use super::*;
use crate::algorithm::{Kind, Table};
use crate::cpu;

/// Numbers of a slice: none, one, to both sides of a word of 4, 8 and 16 bytes of each format, a
/// warp's and a block's worth of pairs and one more or less, several blocks' worth, several pieces'
/// worth with a ragged end.
const SIZES: [usize; 20] =
    [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 63, 65, 255, 257, 511, 1024, 1025, 2731];
/// The same where there are many ranks, which take long to simulate.
const FEW: [usize; 9] = [0, 1, 3, 4, 7, 9, 17, 257, 1025];

/// What [`cpu::run`] must give, on its own terms: sums of float32 from rank 0 on, rounded once.
fn wanted(op: Op, dtype: Dtype, root: usize, inputs: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let (ranks, width) = (inputs.len(), dtype.bytes());
    let slice = inputs[0].len() / op.slices_in(ranks).max(1);
    let number = |rank: usize, at: usize| match dtype {
        Dtype::F16 => half::f16::from_le_bytes([inputs[rank][at], inputs[rank][at + 1]]).to_f32(),
        Dtype::Bf16 => f32::from_le_bytes([0, 0, inputs[rank][at], inputs[rank][at + 1]]),
        Dtype::F32 => f32::from_le_bytes(inputs[rank][at..at + 4].try_into().unwrap()),
        Dtype::U8 => panic!("bytes are not added"),
    };
    let sum = |from: usize| -> Vec<u8> {
        let mut out = Vec::new();
        for at in (from..from + slice).step_by(width) {
            let mut total = number(0, at);
            for rank in 1..ranks {
                total += number(rank, at);
            }
            match dtype {
                Dtype::F16 => {
                    out.extend(half::f16::from_f32(rounded(total, 10, -14)).to_le_bytes())
                }
                Dtype::Bf16 => out.extend(&rounded(total, 7, -126).to_le_bytes()[2..]),
                Dtype::F32 | Dtype::U8 => out.extend(total.to_le_bytes()),
            }
        }
        out
    };
    let mut all = Vec::new();
    for rank in 0..ranks {
        all.push(match op {
            Op::AllReduce => sum(0),
            Op::ReduceScatter => sum(rank * slice),
            Op::AllGather => inputs.concat(),
            Op::Broadcast => inputs[root].clone(),
            Op::AllToAll => {
                inputs.iter().flat_map(|i| i[rank * slice..][..slice].to_vec()).collect()
            }
            Op::Barrier => Vec::new(),
        });
    }
    all
}

/// To so many digits behind the first, ties to even; infinite beyond the largest number that has
/// the exponents up to 1 - `least`.
fn rounded(x: f32, digits: i32, least: i32) -> f32 {
    if !x.is_finite() || x == 0.0 {
        return x;
    }
    let x = f64::from(x);
    let unit = 2f64.powi((x.abs().log2().floor() as i32).max(least) - digits);
    let y = (x / unit).round_ties_even() * unit;
    let beyond = y.abs() >= 2f64.powi(2 - least);
    (if beyond { f64::INFINITY.copysign(x) } else { y }) as f32
}

fn check_with(
    communicator: &mut Communicator,
    op: Op,
    dtype: Dtype,
    given: &[Vec<u8>],
    algorithm: Option<Algorithm>,
) {
    let (ranks, bytes) = (communicator.ranks(), given[0].len());
    let root = bytes % ranks;
    let data = slices(given);
    let got = match algorithm {
        Some(algorithm) => communicator.run_as(op, dtype, root, &data, algorithm).unwrap(),
        None => communicator.run(op, dtype, root, &data).unwrap(),
    };
    let wanted = wanted(op, dtype, root, given);
    for rank in 0..ranks {
        let (name, algorithm) = (op.name(), algorithm.map(|algorithm| algorithm.to_string()));
        assert!(
            got[rank] == wanted[rank],
            "{name} of {bytes} bytes of {dtype:?} on rank {rank} of {ranks}, {algorithm:?}"
        );
    }
}

fn check(
    communicator: &mut Communicator,
    op: Op,
    dtype: Dtype,
    slice: usize,
    algorithm: Algorithm,
) {
    let numbers = slice * op.slices_in(communicator.ranks());
    let given = inputs(dtype, communicator.ranks(), numbers, (slice + numbers) as u64);
    check_with(communicator, op, dtype, &given, Some(algorithm));
}

/// Operations and formats that go together.
fn pairs() -> impl Iterator<Item = (Op, Dtype)> {
    Op::ALL.into_iter().flat_map(|op| op.dtypes().map(move |dtype| (op, dtype)))
}

fn product(ranks: usize, seed: u64, warp: u32, sizes: &[usize]) {
    product_on(sim(seed, 2 * ranks as u32, warp), ranks, sizes);
}

pub fn product_on(machine: Arc<dyn Machine>, ranks: usize, sizes: &[usize]) {
    let mut communicator = virtual_ranks(machine, ranks);
    for (op, dtype) in pairs() {
        for slice in sizes {
            for algorithm in algorithms(2) {
                check(&mut communicator, op, dtype, *slice, algorithm);
            }
        }
    }
}

#[test]
fn the_definition_adds_in_the_order_of_the_ranks() {
    for ranks in [1, 2, 3, 4, 7, 8] {
        let mut communicator = Communicator::cpu(ranks).unwrap();
        for (op, dtype) in pairs() {
            for slice in SIZES.into_iter().chain([65_536, 100_003]) {
                let numbers = slice * op.slices_in(ranks);
                let given = inputs(dtype, ranks, numbers, (slice + ranks) as u64);
                check_with(&mut communicator, op, dtype, &given, None);
            }
        }
    }
}

#[test]
fn two_ranks_agree_with_the_definition() {
    product(2, 1, 32, &SIZES);
}

#[test]
fn three_ranks_agree_with_the_definition() {
    product(3, 4, 64, &SIZES);
}

#[test]
fn four_ranks_agree_with_the_definition() {
    product(4, 2, 32, &SIZES);
}

#[test]
fn eight_ranks_agree_with_the_definition() {
    product(8, 3, 64, &FEW);
}

#[test]
fn other_numbers_of_ranks_do_too() {
    for ranks in [1, 5, 6, 7] {
        let mut communicator = virtual_ranks(sim(4, 2 * ranks as u32, 32), ranks);
        for op in Op::ALL {
            for algorithm in algorithms(2) {
                check(&mut communicator, op, Dtype::F16, 261, algorithm);
            }
        }
    }
}

/// Numbers whose sums are beyond a format's largest, below its smallest, cancel, or lie between
/// two neighbours.
#[test]
fn sums_at_the_edges_of_a_format() {
    let odd = [0.0, -0.0, 65504.0, 65519.0, -65504.0, 6e-8, -5.9e-8, 3e-5, 1.0, 2048.0, 2049.0];
    let more = [3.3e38, -3.3e38, 1e-40, -1.2e-38, f32::INFINITY, 1.003_906_3, -1.0, 4096.5];
    let values: Vec<f32> = odd.into_iter().chain(more).collect();
    for ranks in [2, 4] {
        let one = |rank: usize, dtype: Dtype| -> Vec<u8> {
            let turn = |n: usize| values[(n * (rank + 1) + n / values.len()) % values.len()];
            let number = |n: usize| match dtype {
                Dtype::F16 => half::f16::from_f32(turn(n)).to_le_bytes().to_vec(),
                Dtype::Bf16 => half::bf16::from_f32(turn(n)).to_le_bytes().to_vec(),
                Dtype::F32 | Dtype::U8 => turn(n).to_le_bytes().to_vec(),
            };
            (0..values.len() * values.len()).flat_map(number).collect()
        };
        let mut machines =
            [Communicator::cpu(ranks).unwrap(), virtual_ranks(sim(8, 2 * ranks as u32, 32), ranks)];
        for dtype in [Dtype::F16, Dtype::Bf16, Dtype::F32] {
            let given: Vec<Vec<u8>> = (0..ranks).map(|rank| one(rank, dtype)).collect();
            for communicator in &mut machines {
                for algorithm in algorithms(2) {
                    check_with(communicator, Op::AllReduce, dtype, &given, Some(algorithm));
                }
            }
        }
    }
}

/// Of the planned algorithm: the largest message that is pushed, and a number more and less.
#[test]
fn both_sides_of_a_change_of_ways() {
    for ranks in [2, 4] {
        let more = Options { message_bytes: 4 << 20, ..options() };
        let machine = sim(9, 2 * ranks as u32, 32);
        let mut communicator = Communicator::virtual_ranks(machine, ranks, &more).unwrap();
        for (op, dtype) in [
            (Op::AllReduce, Dtype::F16),
            (Op::ReduceScatter, Dtype::F32),
            (Op::AllGather, Dtype::Bf16),
            (Op::Broadcast, Dtype::U8),
            (Op::AllToAll, Dtype::F32),
        ] {
            let most = crate::algorithm::threshold_bytes(op, communicator.topology()) as usize;
            let unit = dtype.bytes() * op.slices(ranks);
            let edge = most / unit;
            let kinds: Vec<Kind> =
                [edge, edge + 1].map(|n| communicator.plan(op, n * unit).kind).into();
            assert_eq!(kinds, [Kind::OneShot, Kind::Bulk], "{} {most}", op.name());
            for numbers in [edge - 1, edge, edge + 1] {
                let all = numbers * op.slices_in(ranks);
                let given = inputs(dtype, ranks, all, numbers as u64);
                check_with(&mut communicator, op, dtype, &given, None);
            }
        }
    }
}

#[test]
fn interleavings_change_no_bit() {
    for seed in 10..22 {
        let (warp, ranks) = (32 + seed as u32 % 2 * 32, [2, 4, 8][seed as usize / 2 % 3]);
        let mut communicator = virtual_ranks(sim(seed, 2 * ranks as u32, warp), ranks);
        for op in [Op::AllReduce, Op::Broadcast, Op::AllToAll, Op::ReduceScatter] {
            for algorithm in algorithms(2) {
                check(&mut communicator, op, Dtype::F16, 300, algorithm);
            }
        }
    }
}

#[test]
fn one_after_another_in_one_kernel() {
    for op in Op::ALL {
        for algorithm in algorithms(2) {
            let mut communicator = virtual_ranks(sim(5, 8, 32), 4);
            let given = inputs(Dtype::F32, 4, 512 * op.slices_in(4), 9);
            let first = communicator.run_as(op, Dtype::F32, 0, &slices(&given), algorithm).unwrap();
            let bytes = 2048 * op.slices(4);
            communicator.measure(op, Dtype::F32, bytes, 20, Some(algorithm)).unwrap();
            assert_eq!(communicator.seqno(), Some(1 + 1 + 22));
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
                    assert!(last == mean, "rank {rank}, {algorithm}");
                } else if op != Op::ReduceScatter {
                    assert!(last == first[rank], "{} rank {rank}, {algorithm}", op.name());
                }
            }
        }
    }
}

#[test]
fn seqnos_end_and_start_anew() {
    let more = Options { first_seqno: (1 << 31) - 3, ..options() };
    let mut communicator = Communicator::virtual_ranks(sim(6, 4, 32), 2, &more).unwrap();
    for round in 0..6 {
        for algorithm in algorithms(2) {
            check(&mut communicator, Op::AllReduce, Dtype::F32, 100 + round, algorithm);
        }
    }
    assert_eq!(communicator.seqno(), Some(1 + 10));
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
