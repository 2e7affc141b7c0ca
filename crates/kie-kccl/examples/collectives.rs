//! Measures collectives inside one kernel on each GPU and prints them as a table.
//!
//!     collectives cuda:0 cuda:1                    one rank a GPU
//!     collectives --virtual 4 cuda:0               virtual ranks: what the links do not cost
//!     collectives --check sim:blocks=16            results against the definition, then the table
//!
//! Options: `--steps N` (2000), `--most BYTES` (64 MB), `--nvrtc FOLDER`.
#![allow(clippy::print_stdout)]

mod common;

use std::path::PathBuf;

use kie_kccl::algorithm::{Kind, Table};
use kie_kccl::{cpu, Algorithm, Communicator, Dtype, Op, Options};

use common::{open, pattern, Failure};

struct Asked {
    devices: Vec<String>,
    virtual_ranks: Option<usize>,
    check: bool,
    steps: u32,
    most: usize,
    nvrtc: Vec<PathBuf>,
}

fn asked() -> Result<Asked, Failure> {
    let mut asked = Asked {
        devices: Vec::new(),
        virtual_ranks: None,
        check: false,
        steps: 2000,
        most: 64 << 20,
        nvrtc: Vec::new(),
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} wants a value"));
        match word.as_str() {
            "--virtual" => asked.virtual_ranks = Some(value()?.parse()?),
            "--check" => asked.check = true,
            "--steps" => asked.steps = value()?.parse()?,
            "--most" => asked.most = value()?.parse()?,
            "--nvrtc" => asked.nvrtc.push(value()?.into()),
            name if name.starts_with("--") => return Err(format!("no option {name}").into()),
            _ => asked.devices.push(word),
        }
    }
    if asked.devices.is_empty() {
        return Err("name the devices, such as cuda:0 cuda:1".into());
    }
    Ok(asked)
}

fn check(communicator: &mut Communicator, most: usize) -> Result<(), Failure> {
    let ranks = communicator.ranks();
    let mut count = 0;
    for op in Op::ALL {
        for dtype in op.dtypes() {
            for numbers in [1, 63, 4096, 100_001, 1_000_003] {
                let bytes = numbers * op.slices_in(ranks) * dtype.bytes();
                let message = numbers * op.slices(ranks) * dtype.bytes();
                if message > most {
                    continue;
                }
                let given: Vec<_> = (0..ranks).map(|rank| pattern(bytes, rank)).collect();
                let given: Vec<_> = given.iter().map(Vec::as_slice).collect();
                let wanted = cpu::run(op, dtype, ranks - 1, &given);
                for way in ways(communicator, op, message) {
                    let got = communicator.run_as(op, dtype, ranks - 1, &given, way)?;
                    if got != wanted {
                        let name = op.name();
                        return Err(format!("{name} {dtype:?} x {numbers}, {way}: wrong").into());
                    }
                    count += 1;
                }
            }
        }
    }
    println!("{count} results have the bits of the definition\n");
    Ok(())
}

/// Each way that can carry the message: the planned one of its kind.
fn ways(communicator: &Communicator, op: Op, bytes: usize) -> Vec<Algorithm> {
    let planned = communicator.plan(op, bytes);
    let mut found = vec![planned];
    if op != Op::Barrier && planned.kind == Kind::OneShot {
        let bulk = communicator.plan(op, 64 << 20);
        let ranks = communicator.ranks() as u32;
        let piece = (bytes as u32 / ranks / bulk.blocks).next_multiple_of(16).clamp(4096, 65_536);
        found.push(Algorithm { piece_bytes: piece, ..bulk });
    }
    found
}

fn table(communicator: &mut Communicator, asked: &Asked) -> Result<(), Failure> {
    for op in Op::ALL {
        println!("{}, f16, us of the slowest rank inside one kernel", op.name());
        println!("{:>10}  {:>9}  {:>9}  way", "bytes", "us", "GB/s");
        for shift in 4..=26 {
            let bytes = 1_usize << shift;
            if bytes > asked.most || (op == Op::Barrier && shift > 4) {
                break;
            }
            let steps = asked.steps.min((1 << 31_u32.saturating_sub(shift)).max(20));
            for way in ways(communicator, op, bytes) {
                let timing = communicator.measure(op, Dtype::F16, bytes, steps, Some(way))?;
                let ns = timing.ns();
                let mark = if way == communicator.plan(op, bytes) { '*' } else { ' ' };
                println!("{bytes:>10}  {:>9.3}  {:>9.1} {mark}{way}", ns / 1e3, bytes as f64 / ns);
            }
        }
        println!();
    }
    println!("all-reduce, f16, 8192 bytes, a dependent chain, by blocks and threads");
    for (blocks, threads) in [(1, 1024), (1, 512), (2, 512), (4, 256), (8, 128), (16, 64), (32, 32)]
    {
        let planned = communicator.plan(Op::AllReduce, 8192);
        let way = Algorithm { blocks, threads, ..planned };
        let planned = communicator.plan(Op::AllReduce, 1 << 17);
        let most = communicator.topology().gpus.iter().map(|gpu| gpu.multiprocessors).min();
        if threads > planned.threads || Some(blocks) > most {
            continue;
        }
        let timing =
            communicator.measure(Op::AllReduce, Dtype::F16, 8192, asked.steps, Some(way))?;
        let each: Vec<_> = timing.rank_ns.iter().map(|ns| format!("{:.3}", ns / 1e3)).collect();
        println!("{blocks:>4} x {threads:<5} {:>9.3} us  ({})", timing.ns() / 1e3, each.join(" "));
    }
    Ok(())
}

fn main() -> Result<(), Failure> {
    let asked = asked()?;
    let machines: Result<Vec<_>, _> =
        asked.devices.iter().map(|name| open(name, &asked.nvrtc)).collect();
    let machines = machines?;
    let sim = asked.devices[0].starts_with("sim");
    let options = Options {
        message_bytes: asked.most,
        threads: if sim { 64 } else { 1024 },
        ..Options::default()
    };
    let mut communicator = match asked.virtual_ranks {
        Some(ranks) => Communicator::virtual_ranks(machines[0].clone(), ranks, &options)?,
        None if sim => Communicator::virtual_ranks(machines[0].clone(), 4, &options)?,
        None => Communicator::new(&machines, &options)?,
    };
    println!("{}", Table(communicator.topology()));
    if asked.check {
        check(&mut communicator, asked.most)?;
    }
    table(&mut communicator, &asked)
}
