//! Machines that are not at hand: their recorded topologies, and the plans made for them. A plan
//! that changes changes its golden, which `KIE_BLESS=1` writes.

use std::path::{Path, PathBuf};

use super::*;
use crate::algorithm::Table;
use crate::cpu;
use crate::error::Error;
use crate::topology::Topology;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("topologies")
}

fn load(name: &str) -> Topology {
    Topology::load(&folder().join(format!("{name}.json"))).unwrap()
}

fn golden(name: &str) {
    let topology = load(name);
    let printed = Table(&topology).to_string();
    let file = folder().join(format!("{name}.plan"));
    if std::env::var("KIE_BLESS").is_ok() {
        std::fs::write(&file, &printed).unwrap();
    }
    let wanted = std::fs::read_to_string(&file).unwrap();
    assert!(printed == wanted, "{name}: the plan has changed:\n{printed}");
}

#[test]
fn four_h200() {
    golden("h200x4");
}

#[test]
fn eight_mi300x() {
    golden("mi300xx8");
    let gpu = &load("mi300xx8").gpus[0];
    let placed: Vec<_> = (0..9).map(|block| gpu.chiplet_of(block)).collect();
    assert_eq!(placed, [0, 1, 2, 3, 4, 5, 6, 7, 0]);
    let under: Vec<_> = (0..8).map(|chiplet| gpu.io_die_of(chiplet)).collect();
    assert_eq!(under, [0, 0, 1, 1, 2, 2, 3, 3]);
}

#[test]
fn two_sockets() {
    golden("pcie4");
    let near = load("pcie4").subset(&[0, 1]).unwrap();
    let far = load("pcie4").subset(&[0, 2]).unwrap();
    assert!(near.slowest() < far.slowest());
    let cost = |topology| crate::choose(Op::AllReduce, 1 << 20, topology).cost_ns;
    assert!(cost(&near) < cost(&far));
}

#[test]
fn a_recorded_machine_is_simulated() {
    // Wave 64 and the recorded plans, but few threads: fibers are slow.
    let topology = load("mi300xx8");
    let options = Options { topology: Some(topology), ..options() };
    let mut communicator = Communicator::virtual_ranks(sim(8, 64, 64), 8, &options).unwrap();
    let mut seen = Vec::new();
    for numbers in [4, 300, 1500] {
        for op in [Op::AllReduce, Op::AllGather] {
            let given = inputs(Dtype::F16, 8, numbers, 5);
            seen.push(communicator.plan(op, numbers * 2 * op.slices(8)).kind);
            let got = communicator.run(op, Dtype::F16, 0, &slices(&given)).unwrap();
            assert!(got == cpu::run(op, Dtype::F16, 0, &slices(&given)), "{numbers}");
        }
    }
    assert!(seen.iter().all(|kind| *kind == crate::algorithm::Kind::OneShot), "{seen:?}");
}

#[test]
fn a_topology_survives_its_file() {
    let file = std::env::temp_dir().join(format!("kie-kccl-topology-{}", std::process::id()));
    for name in ["h200x4", "mi300xx8", "pcie4"] {
        let topology = load(name);
        topology.save(&file).unwrap();
        assert_eq!(Topology::load(&file).unwrap(), topology);
    }
    let refuse = |change: &dyn Fn(&mut Topology)| {
        let mut topology = load("h200x4");
        change(&mut topology);
        topology.save(&file).unwrap();
        match Topology::load(&file) {
            Err(Error::Topology { path, detail }) if path == file => detail,
            other => panic!("{other:?}"),
        }
    };
    let lost = refuse(&|topology| topology.links.truncate(5));
    assert_eq!(lost, "GPUs 2 and 3: wanted 1 link, got 0");
    let twice = refuse(&|topology| topology.links.push(topology.links[0].clone()));
    assert_eq!(twice, "GPUs 0 and 1: wanted 1 link, got 2");
    assert!(refuse(&|topology| topology.links[0].mb_s = 0).contains("0 MB/s"));
    assert!(refuse(&|topology| topology.gpus.clear()).contains("no GPUs"));
    std::fs::write(&file, "{\"name\": \"x\"").unwrap();
    let broken = Topology::load(&file).unwrap_err().to_string();
    assert!(broken.contains("EOF"), "{broken}");
    std::fs::remove_file(&file).unwrap();
    assert!(matches!(Topology::load(&file), Err(Error::Topology { .. })));
    assert!(load("h200x4").subset(&[0, 4]).is_err() && load("h200x4").subset(&[1, 1]).is_err());
}
