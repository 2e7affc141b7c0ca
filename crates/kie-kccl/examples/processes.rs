//! Ranks of several processes: starts itself once more for each further device, hands handles
//! around, checks every operation against the definition and measures all-reduces.
//!
//!     processes cuda:0 cuda:1                      one process a GPU
//!     processes cuda:0 cuda:0                      two on one GPU, which take turns
//!
//! Options: `--steps N` (2000), `--nvrtc FOLDER`, `--topology FILE` (what lies between the GPUs).
#![allow(clippy::print_stdout)]

mod common;

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use kie_kccl::{cpu, Communicator, Dtype, Joining, Op, Options, Topology};

use common::{open, pattern, Failure};

#[derive(Default)]
struct Asked {
    devices: Vec<String>,
    /// Of a process that was started by another.
    rank: Option<usize>,
    steps: Option<u32>,
    nvrtc: Vec<PathBuf>,
    topology: Option<PathBuf>,
}

fn asked() -> Result<Asked, Failure> {
    let mut asked = Asked::default();
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} wants a value"));
        match word.as_str() {
            "--rank" => asked.rank = Some(value()?.parse()?),
            "--steps" => asked.steps = Some(value()?.parse()?),
            "--nvrtc" => asked.nvrtc.push(value()?.into()),
            "--topology" => asked.topology = Some(value()?.into()),
            name if name.starts_with("--") => return Err(format!("no option {name}").into()),
            _ => asked.devices.push(word),
        }
    }
    if asked.devices.is_empty() {
        return Err("name the devices, such as cuda:0 cuda:1".into());
    }
    Ok(asked)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes_of(hex: &str) -> Result<Vec<u8>, Failure> {
    let hex = hex.trim();
    let pair = |at: usize| hex.get(at..at + 2).ok_or("half a byte");
    (0..hex.len()).step_by(2).map(|at| Ok(u8::from_str_radix(pair(at)?, 16)?)).collect()
}

/// Every operation, every rank on its own output.
fn check(communicator: &mut Communicator) -> Result<usize, Failure> {
    let (ranks, rank) = (communicator.ranks(), communicator.local().start);
    let mut count = 0;
    for op in Op::ALL {
        for dtype in op.dtypes() {
            for numbers in [1, 63, 4096, 100_001] {
                let bytes = numbers * op.slices_in(ranks) * dtype.bytes();
                let given: Vec<_> = (0..ranks).map(|rank| pattern(bytes, rank)).collect();
                let given: Vec<_> = given.iter().map(Vec::as_slice).collect();
                let wanted = &cpu::run(op, dtype, ranks - 1, &given)[rank];
                let got = communicator.run(op, dtype, ranks - 1, &given[rank..=rank])?;
                if got[0] != *wanted {
                    let name = op.name();
                    return Err(format!("rank {rank}: {name} {dtype:?} x {numbers}: wrong").into());
                }
                count += 1;
            }
        }
    }
    Ok(count)
}

fn work(mut communicator: Communicator, steps: u32) -> Result<(), Failure> {
    let count = check(&mut communicator)?;
    let rank = communicator.local().start;
    println!("rank {rank}: {count} results are those of the definition");
    for bytes in [16, 8 << 10, 256 << 10, 4 << 20] {
        let steps = if bytes > 1 << 20 { steps.div_ceil(10) } else { steps };
        let timing = communicator.measure(Op::AllReduce, Dtype::F16, bytes, steps, None)?;
        let (us, way) = (timing.ns() / 1e3, timing.algorithm);
        println!("rank {rank}: all-reduce of {bytes} B: {us:.2} us ({way})");
    }
    // Nobody's memory goes before all are done.
    Ok(communicator.barrier()?)
}

/// One more process for each further device, and what each says first.
fn others(asked: &Asked) -> Result<Vec<(Child, String)>, Failure> {
    let mut all = Vec::new();
    for rank in 1..asked.devices.len() {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(std::env::args().skip(1)).args(["--rank", &rank.to_string()]);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let output = process.stdout.take().ok_or("no pipe")?;
        let (mut line, mut output) = (String::new(), BufReader::new(output));
        output.read_line(&mut line)?;
        std::thread::spawn(move || {
            output.lines().map_while(Result::ok).for_each(|line| println!("{line}"));
        });
        all.push((process, line));
    }
    Ok(all)
}

fn main() -> Result<(), Failure> {
    let asked = asked()?;
    let (ranks, rank) = (asked.devices.len(), asked.rank.unwrap_or(0));
    let topology = asked.topology.as_deref().map(Topology::load).transpose()?;
    let budget = Duration::from_secs(20);
    let options = Options { message_bytes: 8 << 20, budget, topology, ..Options::default() };
    let machine = open(&asked.devices[rank], &asked.nvrtc)?;
    let joining = Joining::new(machine, rank, ranks, &options)?;
    let steps = asked.steps.unwrap_or(2000);
    let ours = hex(&joining.handle()?);
    if asked.rank.is_some() {
        println!("{ours}");
        let mut line = String::new();
        std::io::stdin().read_line(&mut line)?;
        let handles: Result<Vec<_>, _> = line.split_whitespace().map(bytes_of).collect();
        return work(joining.join(&handles?)?, steps);
    }
    let mut others = others(&asked)?;
    let mut all = vec![ours];
    all.extend(others.iter().map(|(_, line)| line.trim().to_owned()));
    for (process, _) in &mut others {
        let mut input = process.stdin.take().ok_or("no pipe")?;
        writeln!(input, "{}", all.join(" "))?;
    }
    let handles: Result<Vec<_>, _> = all.iter().map(|handle| bytes_of(handle)).collect();
    work(joining.join(&handles?)?, steps)?;
    for (mut process, _) in others {
        if !process.wait()?.success() {
            return Err("another process failed".into());
        }
    }
    Ok(())
}
