//! Kernels that are wrong on purpose, through a machine that edits the sources on their way to the
//! compiler: each must be found out, and a lost word must be told for what it is.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kie_core::engine::{Engine, LogitsPath};
use kie_core::{Error, Result};
use kie_kernels::device::Options;
use kie_kernels::mono::machine::{
    Flight, Launch, Machine, MachineInfo, Memory, Module, Peer, Platform, Shared, Source,
};
use kie_kernels::mono::Mono;
use kie_kernels::sim;

use super::support::{float32, goldens, relative};
use super::{fixture, two_at_a_time, DECODE_GATE, PREFILL_GATE};

/// A machine whose compiler reads `to` where the sources of a kernel say `from`, and which may
/// break.
struct Edited {
    machine: Arc<dyn Machine>,
    entry: &'static str,
    from: &'static str,
    to: &'static str,
    /// Launches are refused while it is set.
    broken: Arc<AtomicBool>,
}

impl Machine for Edited {
    fn platform(&self) -> Platform {
        self.machine.platform()
    }
    fn warp(&self) -> u32 {
        self.machine.warp()
    }
    fn info(&self) -> kie_kernels::Result<MachineInfo> {
        self.machine.info()
    }
    fn compile(&self, source: &Source) -> kie_kernels::Result<Arc<dyn Module>> {
        if !source.entries.contains(&self.entry) {
            return self.machine.compile(source);
        }
        let found = source.text.matches(self.from).count();
        assert_eq!(found, 1, "{:?} stands {found} times in the sources", self.from);
        let text = source.text.replace(self.from, self.to);
        self.machine.compile(&Source { text, ..source.clone() })
    }
    fn alloc(&self, bytes: usize) -> kie_kernels::Result<Memory> {
        self.machine.alloc(bytes)
    }
    fn alloc_shared(&self, bytes: usize) -> kie_kernels::Result<Shared> {
        self.machine.alloc_shared(bytes)
    }
    fn write(&self, to: &Memory, offset: usize, bytes: &[u8]) -> kie_kernels::Result<()> {
        self.machine.write(to, offset, bytes)
    }
    fn read(&self, from: &Memory, offset: usize, out: &mut [u8]) -> kie_kernels::Result<()> {
        self.machine.read(from, offset, out)
    }
    fn launch(
        &self,
        module: &Arc<dyn Module>,
        launch: &Launch<'_>,
    ) -> kie_kernels::Result<Box<dyn Flight>> {
        if self.broken.load(Relaxed) {
            return Err(kie_kernels::Error::Failed("broken on purpose".into()));
        }
        self.machine.launch(module, launch)
    }
    fn peer(&self) -> kie_kernels::Result<Peer> {
        self.machine.peer()
    }
    fn reaches(&self, other: &dyn Machine) -> kie_kernels::Result<bool> {
        self.machine.reaches(other)
    }
    fn enable_peer(&self, other: &dyn Machine) -> kie_kernels::Result<()> {
        self.machine.enable_peer(other)
    }
}

/// The device over edited sources of a kernel, which loses patience after 50 ms; the last of its
/// machines breaks where `broken` is set.
pub fn edited(
    entry: &'static str,
    device: &str,
    (from, to): (&'static str, &'static str),
    broken: &Arc<AtomicBool>,
) -> Arc<Mono> {
    let machines = sim::open(device).unwrap();
    let last = machines.len() - 1;
    let one = |(at, machine)| -> Arc<dyn Machine> {
        let broken = if at == last { broken.clone() } else { Arc::default() };
        Arc::new(Edited { machine, entry, from, to, broken })
    };
    let machines = machines.into_iter().enumerate().map(one).collect();
    let hang_timeout = Some(Duration::from_millis(50));
    let prefill_kernel = Some(entry == "kie_prefill");
    let options = Options { hang_timeout, prefill_kernel, ..Options::default() };
    Arc::new(Mono::new(device, machines, &options).unwrap())
}

/// The fixture's engine on it.
pub fn open_over(name: &str, runner: Arc<Mono>) -> Engine {
    Engine::builder(fixture(name)).max_batch(4).runner(runner).build().unwrap()
}

fn open(name: &str, device: &str, from: &'static str, to: &'static str) -> Engine {
    open_kernel("kie_decode", name, device, from, to)
}

/// The fixture's engine over edited sources of a kernel.
pub fn open_kernel(
    entry: &'static str,
    name: &str,
    device: &str,
    from: &'static str,
    to: &'static str,
) -> Engine {
    open_over(name, edited(entry, device, (from, to), &Arc::default()))
}

pub fn continue_greedily(engine: &Engine, ids: &[u32], count: usize) -> Result<Vec<u32>> {
    use kie_core::request::{Prompt, Request, SamplingParams};
    let params = SamplingParams {
        max_tokens: Some(count),
        temperature: Some(0.0),
        ignore_eos: true,
        ..SamplingParams::default()
    };
    let request = Request { prompt: Prompt::Ids(ids.to_vec()), params };
    Ok(engine.generate(request)?.token_ids)
}

/// Whether a fixture comes out as recorded: some logits of both paths, some tokens.
fn conforms(engine: &Engine, name: &str) -> Result<bool> {
    let folder = fixture(name);
    let goldens = goldens(&folder, if float32(&folder) { "bf16w." } else { "" });
    let short = &goldens[1];
    let tokens = continue_greedily(engine, &short.ids, 4)?;
    let decode = engine.logits(&short.ids, LogitsPath::Decode)?;
    let long = &goldens[2].ids[..32];
    let prefill = engine.logits(long, LogitsPath::Prefill)?;
    let wanted = &goldens[2].logits[..prefill.values.len()];
    Ok(tokens == short.generated[..4]
        && relative(&decode.values, &short.logits) <= DECODE_GATE
        && relative(&prefill.values, wanted) <= PREFILL_GATE)
}

/// Name, what the sources say, what they should not say.
const MUTANTS: &[(&str, &str, &str)] = &[
    (
        "a wait is dropped",
        "while (!kNoWaits && epoch_of(v) != epoch && patient(",
        "while (false && patient(",
    ),
    (
        "a reduction over four lanes takes two",
        "sum += shuffle_xor(sum, 1), sum += shuffle_xor(sum, 2);",
        "sum += shuffle_xor(sum, 1);",
    ),
    (
        "words of the step before will do",
        "epoch_of(a[c][i]) == epoch && epoch_of(b[c][i]) == epoch;",
        "epoch_of(a[c][i]) != 0 && epoch_of(b[c][i]) != 0;",
    ),
    ("epochs start anew with each launch", "b.epoch = args.epoch + step;", "b.epoch = 1 + step;"),
    (
        "words are overwritten while others read: the step's edge is dropped",
        "sync_consumers<kThreads>();  // the edge: see exchange.h",
        "",
    ),
    (
        "keys are read before all columns have stored theirs",
        "store_new(watch, args, at, position, pages, b.epoch, b.shared);\n        }\n        \
         sync_consumers<kThreads>();",
        "store_new(watch, args, at, position, pages, b.epoch, b.shared);\n        }",
    ),
];

#[test]
fn every_mutant_is_found_out() {
    let name = "laneformer_d2";
    let found = |at: usize, from, to| {
        let warp = if at.is_multiple_of(2) { 32 } else { 64 };
        (0..6).any(|seed| {
            let device = format!("sim:seed={seed},warp={warp},blocks=8,host=300");
            let engine = open(name, &device, from, to);
            !matches!(conforms(&engine, name), Ok(true))
        })
    };
    let same = ("nothing", "b.epoch = args.epoch + step;", "b.epoch = args.epoch + step; ");
    let all = MUTANTS.iter().copied().chain([same]).enumerate();
    two_at_a_time(all.collect(), |(at, (what, from, to))| {
        assert_eq!(found(at, from, to), what != "nothing", "{what}: {from:?} -> {to:?}");
    });
}

#[test]
fn a_lost_word_is_told_and_the_engine_closes() {
    let from = "publish(to + (long)column * kWordsF + pair / 2, pack_half2(y, next), b.epoch);";
    let to = "if (!(layer == 1 && block() == 1 && b.step == 3)) \
              publish(to + (long)column * kWordsF + pair / 2, pack_half2(y, next), b.epoch);";
    let engine = open("llama", "sim:seed=3,blocks=8", from, to);
    assert!(continue_greedily(&engine, &[5, 6, 7], 3).is_ok(), "no fourth step, no loss");
    let start = Instant::now();
    let error = continue_greedily(&engine, &[5, 6, 7], 8).unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    let Error::EngineHang { detail } = &error else { panic!("{error}") };
    let epochs: Vec<u32> = ["wanted ", "seen "]
        .map(|word| {
            let digits = detail.split(word).nth(1).unwrap();
            digits.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap()
        })
        .into();
    assert_eq!(epochs[0], epochs[1] + 1, "{detail}");
    let parts =
        ["rank 0: ", "of 8 blocks", "block ", "in step 3", "layer 1, the mlp's activations"];
    for part in parts {
        assert!(detail.contains(part), "no {part:?} in {detail:?}");
    }
    assert!(engine.is_closed());
    let after = continue_greedily(&engine, &[5], 1).unwrap_err();
    assert!(matches!(after, Error::EngineHang { .. }), "{after}");
    engine.close();
}
