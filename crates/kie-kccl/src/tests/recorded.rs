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
    std::fs::remove_file(&file).unwrap();
    assert!(load("h200x4").subset(&[0, 4]).is_err() && load("h200x4").subset(&[1, 1]).is_err());
}

/// A file that is gone when this is.
struct File(PathBuf);

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// What is said of a file with this text.
fn refused(file: &File, text: &str) -> String {
    std::fs::write(&file.0, text).unwrap();
    match Topology::load(&file.0) {
        Err(Error::Topology { path, detail }) if path == file.0 => detail,
        other => panic!("{other:?}"),
    }
}

#[test]
fn files_that_are_none_say_so() {
    let name = format!("kie-kccl-broken-{}", std::process::id());
    let file = File(std::env::temp_dir().join(name));
    let missing = Topology::load(&file.0).unwrap_err();
    let text = missing.to_string();
    assert!(matches!(missing, Error::Topology { .. }) && text.contains("No such file"), "{text}");
    let good = std::fs::read_to_string(folder().join("h200x4.json")).unwrap();
    for (text, wanted) in [
        ("", "EOF"),
        ("[]", "no topology"),
        ("\u{1f600}", "no topology"),
        (&good[..good.len() / 2], "no topology: EOF"),
        (&good.replacen("\"version\": 1", "\"version\": 7", 1), "version: wanted 1, got 7"),
        (&good.replacen("\"version\": 1,", "", 1), "version: wanted 1, got none"),
        (&good.replacen("\"warp\"", "\"wrap\"", 1), "unknown field `wrap`"),
        (&good.replacen("\"warp\": 32,", "", 1), "missing field `warp`"),
        (&good.replacen("\"nvlink\"", "\"string\"", 1), "unknown variant `string`"),
        (&good.replacen("132", "-1", 1), "invalid value: integer `-1`"),
        (&good.replacen("132", "\"all\"", 1), "invalid type: string"),
        (&format!("{good}}}"), "trailing characters"),
    ] {
        let got = refused(&file, text);
        assert!(got.contains(wanted), "wanted {wanted}, got {got}");
    }
}

#[test]
fn files_that_contradict_themselves_say_where() {
    let name = format!("kie-kccl-contradiction-{}", std::process::id());
    let file = File(std::env::temp_dir().join(name));
    type Change = fn(&mut Topology);
    let all: [(&str, Change, &str); 17] = [
        ("h200x4", |t| t.links.truncate(5), "GPUs 2 and 3: wanted 1 link, got 0"),
        ("h200x4", |t| t.links.push(t.links[0].clone()), "link 0-1: wanted 1 for the pair, got 2"),
        ("h200x4", |t| t.links[0].mb_s = 0, "link 0-1: mb_s: wanted 1 to 450000"),
        ("h200x4", |t| t.links[0].mb_s = 450_001, "link 0-1: mb_s: wanted 1 to 450000"),
        ("h200x4", |t| t.links[1].b = 9, "link 0-9: GPU 9: wanted 0 to 3"),
        ("h200x4", |t| t.links[1].b = 0, "link 0-0: wanted two GPUs"),
        (
            "h200x4",
            |t| (t.links[0].a, t.links[0].b) = (1, 0),
            "link 1-0: wanted the smaller number first",
        ),
        (
            "h200x4",
            |t| {
                let (a, b, mb_s) = (1, 0, 25_000);
                t.links.push(crate::topology::Link { a, b, mb_s, ..t.links[0].clone() });
            },
            "link 1-0: wanted the same both ways, got NV18 of 450000 MB/s and NV18 of 25000 MB/s",
        ),
        (
            "h200x4",
            |t| t.links[0].via = crate::topology::Via::Nvlink { links: 0 },
            "link 0-1: links: wanted 1 or more, got 0",
        ),
        (
            "pcie4",
            |t| t.gpus[2].numa = Some(0),
            "link 0-2: wanted two sockets, got NUMA node 0 at both ends",
        ),
        ("pcie4", |t| t.gpus.clear(), "gpus: wanted 1 or more, got none"),
        ("pcie4", |t| t.gpus[1].multiprocessors = 0, "GPU 1: multiprocessors: wanted 1 to 4096"),
        ("pcie4", |t| t.gpus[3].name = "cuda:0".into(), "GPU 3: wanted a name and a bus"),
        ("pcie4", |t| t.gpus[3].warp = 48, "GPU 3: warp: wanted 32 or 64, got 48"),
        ("mi300xx8", |t| t.gpus[0].chiplets = 0, "GPU 0: chiplets: wanted 1 to 64, got 0"),
        ("mi300xx8", |t| t.gpus[0].io_dies = 9, "GPU 0: io_dies: wanted 1 to 8, got 9"),
        ("mi300xx8", |t| t.gpus[7].egress_mb_s = 0, "GPU 7: egress_mb_s: wanted 1 or more"),
    ];
    for (name, change, wanted) in all {
        let mut topology = load(name);
        change(&mut topology);
        let got = refused(&file, &serde_json::to_string(&topology).unwrap());
        assert!(got.starts_with(wanted), "wanted {wanted}, got {got}");
    }
}

#[test]
fn recorded_machines_are_planned_for_and_run_nothing() {
    let topology = load("mi300xx8");
    let part = topology.named("hip:2,5").unwrap();
    assert_eq!((part.ranks(), part.gpus[1].name.as_str()), (2, "hip:5"));
    assert_eq!(topology.named("auto").unwrap(), topology);
    for (device, wanted) in [("hip:8", "hip:8: wanted one of hip:0, "), ("cuda", "cuda:0: wanted")]
    {
        let error = topology.named(device).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
    }
    let machines = part.machines().unwrap();
    let info = machines[1].info().unwrap();
    assert_eq!((info.chiplets, info.multiprocessors, machines[1].warp()), (8, 304, 64));
    assert_eq!(machines[1].platform(), kie_kernels::machine::Platform::Hip);
    let error = machines[1].alloc(64).err().unwrap().to_string();
    assert!(error.contains("known from a file only"), "{error}");
    let mut strange = part.clone();
    strange.gpus[1].arch = "riscv".into();
    let error = strange.machines().err().unwrap().to_string();
    assert!(error.contains("GPU 1: arch: wanted sm_.. or gfx.."), "{error}");
    strange.gpus[0].shared_bytes = 0;
    let error = strange.machines().err().unwrap().to_string();
    assert!(error.contains("GPU 0: shared_bytes: wanted 1 or more"), "{error}");
}

#[test]
fn a_simulator_takes_after_a_recorded_machine() {
    let file = folder().join("mi300xx8.json");
    let file = file.to_str().unwrap();
    for (name, wanted) in [
        ("sim:0,1", "sim:0,1".to_owned()),
        ("cuda:0", "cuda:0".to_owned()),
        (
            &format!("sim:topology={file}"),
            "sim:ranks=8,warp=64,blocks=304,chiplets=8,shared=65520".to_owned(),
        ),
        (
            &format!("sim:ranks=2,topology={file},blocks=16,seed=3"),
            "sim:warp=64,chiplets=8,shared=65520,ranks=2,blocks=16,seed=3".to_owned(),
        ),
    ] {
        let (told, topology) = crate::topology::simulated(name).unwrap();
        assert_eq!(told, wanted);
        assert_eq!(topology.is_some(), name.contains("topology"));
        let ranks = if name.contains("ranks=2") { 2 } else { 8 };
        assert!(topology.is_none_or(|t| t.ranks() == ranks && t.gpus[0].multiprocessors == 304));
    }
    for (name, wanted) in [
        ("sim:topology=/nowhere.json".to_owned(), "No such file"),
        (format!("sim:topology={file},topology={file}"), "topology stands twice"),
        (format!("sim:ranks=9,topology={file}"), "ranks: wanted 1 to 8, got 9"),
        (format!("sim:ranks=x,topology={file}"), "ranks: wanted 1 to 8, got x"),
    ] {
        let error = crate::topology::simulated(&name).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
    }
}
