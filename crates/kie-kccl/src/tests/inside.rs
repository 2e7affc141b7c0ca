//! Ranks with memory of their own, in which the simulator tells a lawful access from a stray one,
//! and collectives inside a kernel that does other work between them.

use kie_kernels::sim;

use super::*;
use crate::cpu;
use crate::device::source;
use crate::error::Error;

/// One machine a rank, under one scheduler: each owns what it allocates.
fn apart(seed: u64, ranks: usize, blocks: u32) -> Vec<Arc<dyn Machine>> {
    sim::ranks::open(&format!("sim:ranks={ranks},blocks={blocks},seed={seed}")).unwrap()
}

#[test]
fn a_rank_touches_symmetric_memory_alone() {
    for ranks in [2, 4, 8] {
        let mut communicator = Communicator::new(&apart(1, ranks, 2), &options()).unwrap();
        for op in Op::ALL {
            for (dtype, slice) in [(Dtype::F16, 33), (Dtype::F32, 700)] {
                for algorithm in algorithms(2) {
                    let given = inputs(dtype, ranks, slice * op.slices_in(ranks), 3);
                    let wanted = cpu::run(op, dtype, 1, &slices(&given));
                    let got =
                        communicator.run_as(op, dtype, 1, &slices(&given), algorithm).unwrap();
                    assert!(got == wanted, "{} of {slice} on {ranks}, {algorithm}", op.name());
                }
            }
        }
    }
}

#[test]
fn a_stray_access_is_a_fault() {
    let all = [
        // Looks for its flag where the other has its own.
        (
            "const u64* flag = flag_in(r, r.own, from, phase);",
            "const u64* flag = flag_in(r, memory_of(r, from), from, phase);",
            1,
            "load_word_system",
        ),
        // Stores as if the other were on its own GPU.
        (
            "        store_word_system(flag_in(r, memory_of(r, to), r.rank, phase),",
            "        store_word(flag_in(r, memory_of(r, to), r.rank, phase),",
            1,
            "store_word",
        ),
        // Fetches what the other should have pushed.
        (
            "load_words_system(slot_in(r, r.own, i) + 2 * pair, a[i], b[i]);",
            "load_words_system(slot_in(r, memory_of(r, i), i) + 2 * pair, a[i], b[i]);",
            0,
            "load_words_system",
        ),
    ];
    for (from, to, algorithm, what) in all {
        let machines: Vec<_> = apart(2, 2, 2).into_iter().map(|m| mutant(m, from, to)).collect();
        let mut communicator = Communicator::new(&machines, &options()).unwrap();
        let given = inputs(Dtype::F32, 2, 400, 1);
        let algorithm = algorithms(2)[algorithm];
        let error = communicator.run_as(Op::AllReduce, Dtype::F32, 0, &slices(&given), algorithm);
        let error = error.unwrap_err().to_string();
        let parts = [&format!("{what} at 0x"), " is memory of rank ", ", which "];
        assert!(parts.iter().all(|part| error.contains(part)), "{to}: {error}");
        let again = communicator.all_reduce(Dtype::F32, &slices(&given)).unwrap_err();
        assert!(matches!(again, Error::Closed { .. }), "{again}");
    }
}

/// A kernel that adds its rank to each number, has them summed over all ranks, and does so again.
const KERNEL: &str = "
struct Work { kccl::Peers peers; u64 rank, in, out, pairs, rounds; };
KIE_KERNEL(work, 64, Work args) {
    kccl::Ranks r = {args.peers, kccl::choose(args.peers, (u32)args.rank), (u32)args.rank,
                     block(), 2, 64, 1, 0, 0, false};
    u64 *in = (u64*)(r.own + args.in), *out = (u64*)(r.own + args.out);
    for (u64 round = 0; round < args.rounds; ++round, ++r.seqno) {
        for (u64 p = block() * 64 + thread(); p < args.pairs; p += 128) {
            const u64 v = round == 0 ? in[p] : out[p];
            const float a = number((u32)v) + args.rank, b = number((u32)(v >> 32)) + args.rank;
            in[p] = (u64)bits(b) << 32 | bits(a);
        }
        kccl::exchange_push<kccl::kF32, true>(r, in, 0, out, (u32)args.pairs, 1.0f);
    }
    kccl::meet(r);
}
";

#[test]
fn another_kernel_has_collectives_between_its_own_work() {
    const ROUNDS: u64 = 4;
    for ranks in [2, 4, 8] {
        let machines = apart(3, ranks, 2);
        let communicator = Communicator::new(&machines, &options()).unwrap();
        let (memory, layout) = communicator.symmetric().unwrap();
        let mut all = source(Platform::Sim, ranks);
        all.text.push_str(KERNEL);
        all.entries = vec!["work"];
        let mut given = inputs(Dtype::F32, ranks, 300, 7);
        for (rank, bytes) in given.iter().enumerate() {
            memory.write(rank, layout.input, bytes).unwrap();
        }
        let launch = |rank: usize| {
            let base = (0..8).map(|r| if r < ranks { memory.address(r) } else { 0 });
            let places = [layout.slot_words as u64, layout.staging as u64, 1_000_000_000];
            let work = [rank as u64, layout.input as u64, layout.output as u64, 150, ROUNDS];
            let args: Vec<u8> = base.chain(places).chain(work).flat_map(u64::to_le_bytes).collect();
            let (entry, blocks, threads) = ("work", 2, 64);
            let launch = Launch { entry, blocks, threads, shared_bytes: 0, args: &args };
            machines[rank].launch(&machines[rank].compile(&all).unwrap(), &launch).unwrap()
        };
        let flights: Vec<_> = (0..ranks).map(launch).collect();
        for mut flight in flights {
            while !flight.done().unwrap() {
                std::thread::yield_now();
            }
        }
        for _ in 0..ROUNDS {
            for (rank, bytes) in given.iter_mut().enumerate() {
                for number in bytes.chunks_exact_mut(4) {
                    let value = f32::from_le_bytes(number.try_into().unwrap()) + rank as f32;
                    number.copy_from_slice(&value.to_le_bytes());
                }
            }
            given = cpu::run(Op::AllReduce, Dtype::F32, 0, &slices(&given));
        }
        for (rank, wanted) in given.iter().enumerate() {
            let mut got = vec![0; wanted.len()];
            memory.read(rank, layout.output, &mut got).unwrap();
            assert!(got == *wanted, "rank {rank} of {ranks}");
        }
    }
}
