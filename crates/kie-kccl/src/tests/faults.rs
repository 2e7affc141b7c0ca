//! Late ranks, lost words, dead ranks, and requests that make no sense.

use super::*;
use crate::cpu;
use crate::error::{Error, What};
use crate::Joining;

const START: &str = "    u64* stamps = (u64*)";

fn fault(text: &str) -> String {
    format!("{text}\n{START}")
}

/// As many as CI has of each.
const RANKS: [usize; 3] = [2, 4, 8];

fn given() -> Vec<Vec<u8>> {
    of_ranks(4)
}

fn of_ranks(ranks: usize) -> Vec<Vec<u8>> {
    inputs(Dtype::F32, ranks, 400, 1)
}

/// Ranks of a machine whose kernels' text has been changed.
fn changed(seed: u64, ranks: usize, from: &'static str, to: &str) -> Communicator {
    virtual_ranks(mutant(sim(seed, 2 * ranks as u32, 32), from, to), ranks)
}

fn stalled(
    communicator: &mut Communicator,
    op: Op,
    algorithm: Algorithm,
) -> Vec<crate::error::Wait> {
    let given = of_ranks(communicator.ranks());
    match communicator.run_as(op, Dtype::F32, 0, &slices(&given), algorithm) {
        Err(Error::Stalled { op: name, waits, .. }) => {
            assert_eq!(name, op.name());
            assert!(!waits.is_empty());
            waits
        }
        other => panic!("{} {algorithm}: {other:?}", op.name()),
    }
}

#[test]
fn a_dead_rank_ends_every_operation() {
    for ranks in RANKS {
        let dead = ranks as u32 / 2;
        let text = fault(&format!("    if (r.rank == {dead}) return;"));
        let mut communicator = changed(1, ranks, START, &text);
        for op in Op::ALL {
            for algorithm in algorithms(2) {
                if op == Op::Barrier {
                    assert!(matches!(communicator.barrier(), Err(Error::Stalled { .. })));
                    continue;
                }
                let waits = stalled(&mut communicator, op, algorithm);
                assert!(waits.iter().all(|wait| wait.rank != dead), "{ranks}: {waits:?}");
                assert!(waits.iter().any(|wait| wait.peer == dead), "{ranks}: {waits:?}");
            }
        }
    }
}

#[test]
fn a_rank_that_dies_once_leaves_the_communicator_usable() {
    let text = "    if (r.rank == 1 && r.seqno == 3) return;";
    let mut communicator = virtual_ranks(mutant(sim(2, 8, 32), START, &fault(text)), 4);
    let given = given();
    let wanted = cpu::run(Op::AllReduce, Dtype::F32, 0, &slices(&given));
    for algorithm in algorithms(2) {
        for round in 1..=2 {
            let got = communicator.run_as(Op::AllReduce, Dtype::F32, 0, &slices(&given), algorithm);
            assert!(got.unwrap() == wanted, "{round} {algorithm}");
        }
        let waits = stalled(&mut communicator, Op::AllReduce, algorithm);
        assert!(waits.iter().any(|wait| wait.peer == 1), "{waits:?}");
        assert_eq!(communicator.seqno(), Some(1));
    }
}

#[test]
fn a_kernel_that_faults_closes_the_communicator() {
    let text = "    if (r.rank == 1 && r.seqno == 2) kie_sim::fail(\"on purpose\");";
    let mut communicator = virtual_ranks(mutant(sim(2, 8, 32), START, &fault(text)), 4);
    let given = given();
    communicator.all_reduce(Dtype::F32, &slices(&given)).unwrap();
    let error = communicator.all_reduce(Dtype::F32, &slices(&given)).unwrap_err();
    assert!(matches!(error, Error::Device(_)) && error.to_string().contains("on purpose"));
    for _ in 0..2 {
        let error = communicator.all_reduce(Dtype::F32, &slices(&given)).unwrap_err();
        assert!(matches!(&error, Error::Closed { why } if why.contains("on purpose")), "{error}");
    }
}

#[test]
fn a_refused_launch_leaves_the_communicator_usable() {
    let mut communicator = virtual_ranks(sim(2, 8, 32), 4);
    let given = given();
    let large = Algorithm { blocks: 3, ..algorithms(2)[0] };
    let error = communicator.run_as(Op::AllReduce, Dtype::F32, 0, &slices(&given), large);
    let error = error.unwrap_err();
    assert!(matches!(error, Error::Device(_)), "{error}");
    let got = communicator.all_reduce(Dtype::F32, &slices(&given)).unwrap();
    assert!(got == cpu::run(Op::AllReduce, Dtype::F32, 0, &slices(&given)));
}

#[test]
fn a_late_rank_is_waited_for_within_the_budget() {
    let late = |ranks: usize, ms: u64| {
        let text = format!(
            "    for (u64 from = clock_ns(); r.rank == {} && clock_ns() - from < {ms}000000;)\n\
             \x20       pause_ns(1000);",
            ranks - 1
        );
        changed(3, ranks, START, &fault(&text))
    };
    for ranks in RANKS {
        let given = of_ranks(ranks);
        let wanted = cpu::run(Op::AllReduce, Dtype::F32, 0, &slices(&given));
        for algorithm in algorithms(2) {
            let got =
                late(ranks, 300).run_as(Op::AllReduce, Dtype::F32, 0, &slices(&given), algorithm);
            assert!(got.unwrap() == wanted, "{ranks}: {algorithm}");
            let waits = stalled(&mut late(ranks, 3000), Op::AllReduce, algorithm);
            assert!(waits.iter().any(|wait| wait.peer as usize == ranks - 1), "{ranks}: {waits:?}");
        }
    }
}

#[test]
fn a_lost_word_is_missed() {
    const PUSH: &str = "    store_words_system(slot_in(r, memory_of(r, to), r.rank) + 2 * pair,";
    for ranks in RANKS {
        let last = ranks as u32 - 1;
        let lost = format!(
            "    if (r.rank == 0 && to == {last} && pair == 5 && r.seqno == 1) return;\n{PUSH}"
        );
        let mut communicator = changed(4, ranks, PUSH, &lost);
        let waits = stalled(&mut communicator, Op::AllReduce, algorithms(2)[0]);
        let (rank, peer, what) = (waits[0].rank, waits[0].peer, waits[0].what);
        assert_eq!((rank, peer, what), (last, 0, What::Words));
    }
}

#[test]
fn a_lost_flag_is_missed() {
    const FLAG: &str = "        store_word_system(flag_in(r, memory_of(r, to), r.rank, phase),";
    for ranks in RANKS {
        let last = ranks as u32 - 1;
        for (phase, what) in [(0, What::Arrival), (1, What::Parts), (2, What::Results)] {
            let lost = format!(
                "        if (r.rank == 0 && to == {last} && phase == {phase}) return;\n{FLAG}"
            );
            let mut communicator = changed(5, ranks, FLAG, &lost);
            let waits = stalled(&mut communicator, Op::AllReduce, algorithms(2)[1]);
            let found = waits.iter().any(|w| (w.rank, w.peer, w.what) == (last, 0, what));
            assert!(found, "{ranks}: {waits:?}");
        }
    }
}

#[test]
fn sums_in_another_order_are_seen() {
    // The product's tests must be able to fail: ranks that start with their own part do not agree.
    const SUM: &str = "unpack<kDtype>(parts[i], c, d);";
    let machine = mutant(sim(6, 8, 32), SUM, "unpack<kDtype>(parts[kRanks - i], c, d);");
    let mut communicator = virtual_ranks(machine, 4);
    let given = given();
    let wanted = cpu::run(Op::AllReduce, Dtype::F32, 0, &slices(&given));
    let got = communicator.run_as(Op::AllReduce, Dtype::F32, 0, &slices(&given), algorithms(2)[0]);
    assert!(got.unwrap() != wanted);
}

#[test]
fn what_makes_no_sense_is_refused() {
    let mut communicator = virtual_ranks(sim(7, 8, 32), 4);
    let mut ask = |op, root, lengths: [usize; 4]| {
        let given = lengths.map(|bytes| vec![0; bytes]);
        communicator.run(op, Dtype::F32, root, &slices(&given)).map_err(|e| e.to_string())
    };
    let even = ask(Op::AllReduce, 0, [8, 8, 4, 8]).unwrap_err();
    assert_eq!(even, "all-reduce: bytes of rank 2: wanted 8, as of rank 0, got 4");
    let unit = ask(Op::AllToAll, 0, [8; 4]).unwrap_err();
    assert_eq!(unit, "all-to-all: bytes of a rank: wanted a multiple of 16, got 8");
    let root = ask(Op::Broadcast, 4, [8; 4]).unwrap_err();
    assert_eq!(root, "broadcast: root: wanted below 4, got 4");
    let large = ask(Op::AllGather, 0, [1 << 15; 4]).unwrap_err();
    assert!(large.contains("131072 bytes") && large.contains("message_bytes"), "{large}");
    assert_eq!(ask(Op::AllReduce, 0, [0; 4]).unwrap(), vec![Vec::<u8>::new(); 4]);
    let bytes = communicator.all_reduce(Dtype::U8, &[&[1], &[2], &[3], &[4]]).unwrap_err();
    assert!(matches!(bytes, Error::NotNumbers { op: "all-reduce", dtype: "u8" }), "{bytes}");
    let two = [vec![0; 4], vec![0; 4]];
    let few = communicator.all_reduce(Dtype::F32, &slices(&two)).unwrap_err();
    assert!(matches!(few, Error::Size { .. }), "{few}");
    for ranks in [0, 9] {
        let error = Communicator::virtual_ranks(sim(0, 16, 32), ranks, &options()).err().unwrap();
        assert!(matches!(error, Error::Ranks { .. }), "{error}");
    }
    let error = Communicator::virtual_ranks(sim(0, 2, 32), 4, &options()).err().unwrap();
    assert!(error.to_string().contains("2 multiprocessors"), "{error}");
    for (options, what) in [
        (Options { threads: 0, ..options() }, "communicator: threads: wanted 1 or more, got 0"),
        // Three of these, and a little, are 64 bits' worth of bytes and that little.
        (Options { message_bytes: usize::MAX / 3, ..options() }, "message_bytes: wanted at most"),
    ] {
        let error = Communicator::virtual_ranks(sim(0, 4, 32), 2, &options).err().unwrap();
        assert!(error.to_string().contains(what), "{error}");
        let error = Joining::new(sim(0, 4, 32), 0, 2, &options).err().unwrap();
        assert!(error.to_string().contains(what), "{error}");
    }
    let error = communicator.measure(Op::AllReduce, Dtype::F32, 64, 0, None).unwrap_err();
    assert_eq!(error.to_string(), "all-reduce: steps: wanted 1 or more, got 0");
    let error = Communicator::new(&[sim(0, 2, 32), sim(1, 2, 32)], &options()).err().unwrap();
    assert!(matches!(error, Error::NotBuilt { .. }), "{error}");
    assert!(Communicator::cpu(2).unwrap().measure(Op::Barrier, Dtype::F32, 0, 1, None).is_err());
}
