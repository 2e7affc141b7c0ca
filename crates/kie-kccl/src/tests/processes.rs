//! Ranks of two real processes, each with a simulator of its own, over memory that both map.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use kie_kernels::machine::handle::{Handle, HandleFault};

use super::*;
use crate::cpu;
use crate::error::Error;
use crate::Joining;

/// What a child shall do, and the name that it is found by.
const ROLE: &str = "KIE_TEST_ROLE";
const CHILD: &str = "tests::processes::a_process_of_its_own";

/// The other process may have to wait for a processor.
fn patient() -> Options {
    Options { budget: Duration::from_secs(20), ..options() }
}

fn machine(rank: u64) -> Arc<dyn Machine> {
    let name = format!("sim:seed={rank},blocks=2,host=30000");
    Arc::new(Sim::open(&name).unwrap())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes_of(hex: &str) -> Vec<u8> {
    let pairs = hex.trim().as_bytes().chunks_exact(2);
    pairs.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

/// This very test program once more, and what it says.
struct Other {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Other {
    fn start(role: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", CHILD, "--ignored", "--nocapture"]).env(ROLE, role);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let input = process.stdin.take().unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        Self { process, input, output }
    }

    fn handle(&mut self) -> Vec<u8> {
        let mut lines = self.output.by_ref().lines().map(|line| line.unwrap());
        bytes_of(
            lines.find_map(|line| Some(line.split_once("handle ")?.1.to_owned())).unwrap().as_str(),
        )
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }

    fn end(mut self) -> bool {
        drop(self.input);
        self.process.wait().unwrap().success()
    }
}

/// Every operation, by both algorithms, one after another; each process checks its own rank.
fn work_together(communicator: &mut Communicator) {
    let rank = communicator.local().start;
    for op in Op::ALL {
        for dtype in [Dtype::F16, Dtype::F32] {
            for slice in [1, 33, 700] {
                for algorithm in algorithms(2) {
                    let given = inputs(dtype, 2, slice * op.slices_in(2), slice as u64);
                    let wanted = cpu::run(op, dtype, 1, &slices(&given));
                    let got =
                        communicator.run_as(op, dtype, 1, &[&given[rank]], algorithm).unwrap();
                    let what = format!("{} of {slice} {dtype:?}, {algorithm}", op.name());
                    assert!(got == [wanted[rank].clone()], "rank {rank}: {what}");
                }
            }
        }
    }
    communicator.barrier().unwrap();
}

/// What the other process does. Never on its own.
#[test]
#[ignore = "the other process of the tests here"]
fn a_process_of_its_own() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let joining = Joining::new(machine(1), 1, 2, &patient()).unwrap();
    let ours = joining.handle().unwrap();
    let mut out = std::io::stdout();
    writeln!(out, "handle {}", hex(&ours)).unwrap();
    out.flush().unwrap();
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    if role == "works" {
        let mut communicator = joining.join(&[bytes_of(&line), ours]).unwrap();
        work_together(&mut communicator);
    }
}

#[test]
fn two_processes_hold_the_bits_of_one() {
    let mut other = Other::start("works");
    let joining = Joining::new(machine(0), 0, 2, &patient()).unwrap();
    let (ours, theirs) = (joining.handle().unwrap(), other.handle());
    other.tell(&hex(&ours));
    let mut communicator = joining.join(&[ours, theirs]).unwrap();
    assert_eq!((communicator.ranks(), communicator.local()), (2, 0..1));
    work_together(&mut communicator);
    // It keeps its memory until all are done with it.
    assert!(other.end(), "the other process found other bits");
}

#[test]
fn handles_that_will_not_do_are_told_apart() {
    let mut other = Other::start("waits");
    let theirs = other.handle();
    let join = |theirs: Vec<u8>, options: &Options| {
        let joining = Joining::new(machine(0), 0, 2, options).unwrap();
        let ours = joining.handle().unwrap();
        joining.join(&[ours, theirs]).map(drop)
    };
    join(theirs.clone(), &patient()).unwrap();
    let fault = |theirs: Vec<u8>, options: &Options| match join(theirs, options) {
        Err(Error::Handle { rank: 1, fault }) => fault,
        other => panic!("{other:?}"),
    };
    let more = Options { message_bytes: 1 << 17, ..patient() };
    assert!(matches!(fault(theirs.clone(), &more), HandleFault::Size { .. }));
    assert_eq!(fault(theirs[..20].to_vec(), &patient()), HandleFault::Garbled(20));
    let handle = Handle::from_bytes(&theirs).unwrap();
    let cuda = Handle { platform: Platform::Cuda, ..handle.clone() };
    let (wanted, got) = (Platform::Sim, Platform::Cuda);
    assert_eq!(fault(cuda.to_bytes(), &patient()), HandleFault::Kind { wanted, got });
    // A file descriptor that is another file's by now.
    let mut token = handle.token.clone();
    token[4] ^= 1;
    let another = Handle { token, ..handle.clone() };
    assert!(matches!(fault(another.to_bytes(), &patient()), HandleFault::Stale { .. }));
    other.tell("");
    assert!(other.end());
    let gone = fault(theirs, &patient());
    assert!(matches!(gone, HandleFault::Stale { process, .. } if process == handle.process));
    // Memory that was never meant for others, and a number of handles that is none.
    let plain = machine(0).alloc(64).unwrap();
    assert!(matches!(machine(0).export(&plain), Err(kie_kernels::Error::Handle { .. })));
    let joining = Joining::new(machine(0), 0, 2, &patient()).unwrap();
    assert!(matches!(joining.join(&[]), Err(Error::Ranks { .. })));
    assert!(matches!(Joining::new(machine(0), 2, 2, &patient()), Err(Error::Ranks { got: 2, .. })));
}

#[test]
fn a_process_that_never_comes_closes_the_communicator() {
    let brief = || Options { budget: Duration::from_millis(50), ..options() };
    let one = |rank: usize| Joining::new(machine(rank as u64), rank, 2, &brief()).unwrap();
    let (first, second) = (one(0), one(1));
    let handles = [first.handle().unwrap(), second.handle().unwrap()];
    let mut communicator = first.join(&handles).unwrap();
    for round in 0..2 {
        let error = communicator.all_reduce(Dtype::F32, &[&[0; 64]]).unwrap_err();
        match error {
            Error::Stalled { waits, .. } if round == 0 => assert_eq!(waits[0].peer, 1),
            Error::Closed { why } if round == 1 => assert!(why.contains("stalled"), "{why}"),
            other => panic!("{round}: {other}"),
        }
    }
}
