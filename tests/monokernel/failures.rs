//! Kernels that are wrong on purpose, through a machine that edits the sources on their way to the
//! compiler: each must be found out, and a lost word must be reported as one.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kie_core::engine::{Engine, LogitsPath};
use kie_core::{Error, Result};
use kie_kernels::device::Options;
use kie_kernels::machine::{Flight, Launch, Machine, Memory, Module, Source};
use kie_kernels::mono::lower::tuning::Tuning;
use kie_kernels::mono::Mono;

use super::support::{float32, goldens, greedy_request};
use super::{bound, fixture, two_at_a_time, PREFILL_GATE};

/// What the sources say, and what is to stand there instead.
pub type Edit = (&'static str, &'static str);

/// A machine whose compiler reads something else than the sources of a kernel say, which may break
/// and whose host may fall silent.
struct Edited {
    machine: Arc<dyn Machine>,
    entry: &'static str,
    edits: Vec<Edit>,
    /// Launches are refused while it is set.
    broken: Arc<AtomicBool>,
    /// Launches are not looked at before they have ended.
    silent: bool,
    launches: Arc<AtomicUsize>,
    /// What is behind each symmetric memory for edits to write to.
    behind: Option<Behind>,
}

impl Machine for Edited {
    as_the_machine_does!();
    fn compile(&self, source: &Source) -> kie_kernels::Result<Arc<dyn Module>> {
        if !source.entries.contains(&self.entry) {
            return self.machine.compile(source);
        }
        let mut text = source.text.clone();
        for (from, to) in &self.edits {
            let found = text.matches(from).count();
            if found != 1 {
                // Whoever expects that an edit fails must not take this for it.
                eprintln!("{from:?} stands {found} times in the sources");
                std::process::abort();
            }
            // Of a generated constant the name is known, not the value.
            let at = text.find(from).unwrap();
            let value = if from.ends_with(" = ") { text[at..].find(';').unwrap() } else { 0 };
            text.replace_range(at..at + from.len().max(value), to);
        }
        self.machine.compile(&Source { text, ..source.clone() })
    }
    fn alloc(&self, bytes: usize) -> kie_kernels::Result<Memory> {
        self.machine.alloc(bytes)
    }
    fn alloc_symmetric(&self, bytes: usize) -> kie_kernels::Result<Memory> {
        let more = self.behind.as_ref().map_or(0, |behind| behind.bytes);
        let whole = self.machine.alloc_symmetric(bytes + more)?;
        if let Some(behind) = &self.behind {
            behind.memory.lock().unwrap().push(whole.clone());
        }
        Ok(Memory { bytes, ..whole })
    }
    fn launch(
        &self,
        module: &Arc<dyn Module>,
        launch: &Launch<'_>,
    ) -> kie_kernels::Result<Box<dyn Flight>> {
        if self.broken.load(Relaxed) {
            return Err(kie_kernels::Error::Failed("broken on purpose".into()));
        }
        self.launches.fetch_add(1, Relaxed);
        let flight = self.machine.launch(module, launch)?;
        Ok(match &self.behind {
            Some(behind) => Box::new(Noted { flight, behind: behind.clone(), landed: false }),
            None if self.silent => Box::new(Unseen(flight)),
            None => flight,
        })
    }
}

/// Bytes behind a rank's symmetric memory.
#[derive(Clone)]
pub struct Behind {
    bytes: usize,
    /// The first one allocated, of prompts, is looked at, not the last.
    first: bool,
    machine: Arc<dyn Machine>,
    memory: Arc<Mutex<Vec<Memory>>>,
    /// The symmetric memory's words after each launch, from the first word behind it the number of
    /// the first one, up to the second word behind it the number of the last.
    pub landings: Arc<Mutex<Vec<Vec<u64>>>>,
}

impl Behind {
    /// The words of the memory, and behind them what edits wrote.
    fn all(&self) -> (Vec<u64>, Vec<u64>) {
        let memory = self.memory.lock().unwrap();
        let memory = if self.first { memory.first() } else { memory.last() }.unwrap();
        let mut bytes = vec![0; memory.bytes];
        self.machine.read(memory, 0, &mut bytes).unwrap();
        let word = |b: &[u8]| u64::from_le_bytes(b.try_into().unwrap());
        let (words, told) = bytes.split_at(memory.bytes - self.bytes);
        (words.chunks_exact(8).map(word).collect(), told.chunks_exact(8).map(word).collect())
    }

    /// What edits wrote.
    pub fn told(&self) -> Vec<u64> {
        self.all().1
    }
}

/// A launch after which the words are kept.
struct Noted {
    flight: Box<dyn Flight>,
    behind: Behind,
    landed: bool,
}

impl Flight for Noted {
    fn done(&mut self) -> kie_kernels::Result<bool> {
        let done = self.flight.done()?;
        if done && !std::mem::replace(&mut self.landed, true) {
            let (all, told) = self.behind.all();
            let words = all[told[0] as usize..told[1] as usize].to_vec();
            self.behind.landings.lock().unwrap().push(words);
        }
        Ok(done)
    }
}

/// A launch whose host does nothing until it has ended by itself, for 20 s at most.
struct Unseen(Box<dyn Flight>);

impl Flight for Unseen {
    fn done(&mut self) -> kie_kernels::Result<bool> {
        let start = Instant::now();
        while !self.0.done()? {
            assert!(start.elapsed() < Duration::from_secs(20), "the launch outlives its host");
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(true)
    }
}

/// The GPU that `KIE_DEVICE` names, else the simulator.
fn here(simulated: &str) -> String {
    std::env::var("KIE_DEVICE").unwrap_or_else(|_| simulated.to_owned())
}

/// The GPUs that `KIE_DEVICE` names if they are so many, else so many simulated machines.
pub fn several(ranks: u32, simulated: &str) -> Option<String> {
    match std::env::var("KIE_DEVICE") {
        Ok(device) => (device.split(',').count() == ranks as usize).then_some(device),
        Err(_) => Some(format!("sim:ranks={ranks},{simulated}")),
    }
}

fn machines(device: &str) -> Vec<Arc<dyn Machine>> {
    kie_kernels::devices::machines(device, &Options::default()).unwrap()
}

/// Patience of edited kernels; on the simulator time is its own.
fn patience(device: &str) -> Duration {
    Duration::from_millis(if device.starts_with("sim") { 50 } else { 500 })
}

/// The device over edited sources of a kernel, whose waits soon expire; the last of its
/// machines breaks where `broken` is set.
pub fn edited(
    entry: &'static str,
    device: &str,
    edit: Edit,
    broken: &Arc<AtomicBool>,
) -> Arc<Mono> {
    edited_by(entry, device, &[edit], broken)
}

/// The same with several edits.
pub fn edited_by(
    entry: &'static str,
    device: &str,
    edits: &[Edit],
    broken: &Arc<AtomicBool>,
) -> Arc<Mono> {
    edited_of(entry, device, edits, broken, Options::default())
}

/// The same, tuned otherwise than the machine is.
pub fn edited_and_tuned(
    entry: &'static str,
    device: &str,
    edits: &[Edit],
    broken: &Arc<AtomicBool>,
    tuning: Option<Tuning>,
) -> Arc<Mono> {
    edited_of(entry, device, edits, broken, Options { tuning, ..Options::default() })
}

/// The same of two halves a number.
pub fn edited_exact(entry: &'static str, device: &str, edits: &[Edit]) -> Arc<Mono> {
    let options = Options { exact: true, ..Options::default() };
    edited_of(entry, device, edits, &Arc::default(), options)
}

fn edited_of(
    entry: &'static str,
    device: &str,
    edits: &[Edit],
    broken: &Arc<AtomicBool>,
    options: Options,
) -> Arc<Mono> {
    let machines = machines(device);
    let last = machines.len() - 1;
    let one = |(at, machine)| -> Arc<dyn Machine> {
        let broken = if at == last { broken.clone() } else { Arc::default() };
        let (edits, launches) = (edits.to_vec(), Arc::default());
        Arc::new(Edited { machine, entry, edits, broken, silent: false, launches, behind: None })
    };
    let machines = machines.into_iter().enumerate().map(one).collect();
    let hang_timeout = Some(patience(device));
    let prefill_kernel = Some(entry == "kie_prefill");
    let options = Options { hang_timeout, prefill_kernel, ..options };
    Arc::new(Mono::new(device, machines, &options).unwrap())
}

/// The device over sources of a kernel that write down more than they need, `bytes` bytes behind
/// each symmetric memory; and where that is, on each rank.
pub fn told(
    entry: &'static str,
    device: &str,
    edits: &[Edit],
    bytes: usize,
) -> (Arc<Mono>, Vec<Behind>) {
    told_of(entry, device, edits, (bytes, false))
}

/// The same, of one half a number or (`exact`) two.
pub fn told_of(
    entry: &'static str,
    device: &str,
    edits: &[Edit],
    (bytes, exact): (usize, bool),
) -> (Arc<Mono>, Vec<Behind>) {
    let one = |machine: Arc<dyn Machine>| {
        let reader = machine.clone();
        let (memory, landings) = (Arc::default(), Arc::default());
        let first = entry == "kie_prefill";
        let behind = Behind { bytes, first, machine: reader, memory, landings };
        let (edits, broken, launches) = (edits.to_vec(), Arc::default(), Arc::default());
        let noted = Some(behind.clone());
        let edited =
            Edited { machine, entry, edits, broken, silent: false, launches, behind: noted };
        (Arc::new(edited) as Arc<dyn Machine>, behind)
    };
    let (machines, behind): (Vec<_>, Vec<_>) = machines(device).into_iter().map(one).unzip();
    let prefill_kernel = Some(entry == "kie_prefill");
    let options = Options { prefill_kernel, exact, ..Options::default() };
    (Arc::new(Mono::new(device, machines, &options).unwrap()), behind)
}

/// The fixture's engine on it.
pub fn open_over(name: &str, runner: Arc<Mono>) -> Engine {
    Engine::builder(fixture(name)).max_batch(4).runner(runner).build().unwrap()
}

pub fn open(name: &str, device: &str, from: &'static str, to: &'static str) -> Engine {
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
    Ok(engine.generate(greedy_request(ids, count))?.token_ids)
}

/// Whether a fixture comes out as recorded: some logits of both paths, some tokens. Those that one
/// column makes come first: what they show needs no other kernel compiled.
pub fn conforms(engine: &Engine, name: &str) -> Result<bool> {
    let folder = fixture(name);
    let goldens = goldens(&folder, if float32(&folder) { "bf16w." } else { "" });
    let (short, long) = (&goldens[1], &goldens[2]);
    let decode = engine.logits(&short.ids, LogitsPath::Decode)?;
    let near = short.error(&decode.values) <= bound(name, "sim");
    if !near {
        return Ok(false);
    }
    let ids = &long.ids[..long.ids.len().min(32)];
    let prefill = engine.logits(ids, LogitsPath::Prefill)?;
    Ok(long.error(&prefill.values) <= PREFILL_GATE
        && continue_greedily(engine, &short.ids, 4)? == short.generated[..4])
}

/// Name, what the sources say, what they should not say.
pub type Mutant = (&'static str, &'static str, &'static str);

const MUTANTS: &[Mutant] = &[
    (
        "a wait is dropped",
        "while (!kNoWaits && seqno_of(v) != seqno && !wait_expired(",
        "while (false && !wait_expired(",
    ),
    (
        "a reduction over four lanes takes two",
        "sum += shuffle_xor(sum, 1), sum += shuffle_xor(sum, 2);",
        "sum += shuffle_xor(sum, 1);",
    ),
    (
        "words of the step before will do",
        "(seqno_of(a[c][i]) ^ seqno) | (seqno_of(b[c][i]) ^ seqno);",
        "(seqno_of(a[c][i]) == 0) | (seqno_of(b[c][i]) == 0);",
    ),
    (
        "sequence numbers start anew with each launch",
        "seqno_at(args.seqno + b.step, first)",
        "seqno_at(1 + b.step, first)",
    ),
    (
        "a layer's words are overwritten before other lanes have read them",
        "(u32)layer % kNumBuffersOther",
        "(u32)layer % 1",
    ),
    (
        "words are overwritten while others read: the step barrier is dropped",
        "sync_consumers<kThreads>();  // the step barrier: see exchange.h",
        "",
    ),
    (
        "keys are read before all columns have stored theirs",
        "store_new<C>(watch, args, at, position, pages, b.seqno, b.shared);\n    }\n    \
         sync_consumers<kThreads>();",
        "store_new<C>(watch, args, at, position, pages, b.seqno, b.shared);\n    }",
    ),
];

#[test]
fn every_mutant_is_found_out() {
    all_are_found_out("laneformer_d2", "blocks=8", 6, MUTANTS);
}

/// Each of the mutants of a fixture's kernels shows on one of so many schedules, a change that is
/// none on no one.
pub fn all_are_found_out(name: &str, machine: &str, seeds: u32, mutants: &[Mutant]) {
    all_are_found_out_by((machine, seeds), mutants, |device, edit| {
        conforms(&open(name, device, edit.0, edit.1), name)
    });
}

/// The same by what `conforms` says of a device and an edit.
pub fn all_are_found_out_by(
    (machine, seeds): (&str, u32),
    mutants: &[Mutant],
    conforms: impl Fn(&str, Edit) -> Result<bool> + Sync,
) {
    let found = |at: usize, from, to| {
        let warp = if at.is_multiple_of(2) { 32 } else { 64 };
        (0..seeds).any(|seed| {
            let device = format!("sim:seed={seed},warp={warp},{machine},host=300");
            match conforms(&device, (from, to)) {
                Ok(good) => !good,
                Err(error) => {
                    // Kernels are compiled when they are first launched.
                    assert!(!error.to_string().contains("compilation failed"), "{error}");
                    true
                }
            }
        })
    };
    let same = ("nothing", "watch.step = b.step = step;", "watch.step = b.step = step; ");
    let all = mutants.iter().copied().chain([same]).enumerate();
    let hidden = Mutex::new(Vec::new());
    two_at_a_time(all.collect(), |(at, (what, from, to))| {
        if found(at, from, to) != (what != "nothing") {
            hidden.lock().unwrap().push(what);
        }
    });
    let hidden = hidden.into_inner().unwrap();
    assert!(hidden.is_empty(), "not found out, or found out for nothing: {hidden:?}");
}

/// What an engine says of eight tokens that do not come.
pub fn hang(engine: &Engine, within: Duration) -> String {
    assert!(continue_greedily(engine, &[5, 6, 7], 3).is_ok(), "no fourth step, no loss");
    let start = Instant::now();
    let error = continue_greedily(engine, &[5, 6, 7], 8).unwrap_err();
    assert!(start.elapsed() < within, "{:?}", start.elapsed());
    let Error::EngineHang { detail } = &error else { panic!("{error}") };
    assert!(engine.is_closed());
    let after = continue_greedily(engine, &[5], 1).unwrap_err();
    assert!(matches!(after, Error::EngineHang { .. }), "{after}");
    println!("{detail}");
    detail.clone()
}

pub fn says(detail: &str, parts: &[&str]) {
    for part in parts {
        assert!(detail.contains(part), "no {part:?} in {detail:?}");
    }
}

#[test]
fn a_lost_word_is_told_and_the_engine_closes() {
    let from = "publish(to + (long)column * C::kWordsF + at, C::kWordsF, halves_of(y, next),";
    let to = "if (!(layer == 1 && block() == 1 && b.step == 3)) \
              publish(to + (long)column * C::kWordsF + at, C::kWordsF, halves_of(y, next),";
    let device = here("sim:seed=3,blocks=8");
    let engine = open("llama", &device, from, to);
    let detail = hang(&engine, Duration::from_secs(10));
    let seqnos: Vec<u32> = ["wanted ", "seen "]
        .map(|word| {
            let digits = detail.split(word).nth(1).unwrap();
            digits.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap()
        })
        .into();
    // Three layers and the choice of a token; 0 and 2 share a place, so layer 1 has its own.
    assert_eq!(seqnos[0], seqnos[1] + 4, "{detail}");
    says(
        &detail,
        &["rank 0: ", "blocks gave up", "block ", "in step 3", "layer 1, the mlp's activations"],
    );
    engine.close();
}

const STEP: &str = "watch.step = b.step = step;";

#[test]
fn a_stuck_block_is_told() {
    let to = "watch.step = b.step = step; \
              while (block() == 1 && step == 3 && load_word(args.abort_flag) == 0) pause_ns(1000);";
    let engine = open("llama", &here("sim:seed=4,blocks=8"), STEP, to);
    let detail = hang(&engine, Duration::from_secs(10));
    says(&detail, &["rank 0: ", "in step 3 waited for layer 0", "wanted ", "seen "]);
    assert!(!detail.contains("block 1 "), "the stuck one waits for nobody: {detail}");
    engine.close();
}

/// On the simulator such a block is an error of the simulator's own.
#[test]
#[ignore = "needs a GPU: KIE_DEVICE=cuda:0"]
fn a_block_that_never_ends_is_told() {
    // Longer than anybody waits for it: the engine, when it closes, for 10 s.
    let to = "watch.step = b.step = step; const u64 since = clock_ns(); \
              while (block() == 1 && step == 3 && clock_ns() - since < 16000000000ull) \
              pause_ns(1000);";
    let engine = open("llama", &here("no simulator"), STEP, to);
    let detail = hang(&engine, Duration::from_secs(14));
    says(&detail, &["in step 3 waited for layer 0", "the launch does not end"]);
    engine.close();
}

/// A device of one machine over edited sources of the decode kernel, and how often it launched.
fn counted(
    device: &str,
    edits: Vec<Edit>,
    silent: bool,
    options: Options,
) -> (Arc<Mono>, Arc<AtomicUsize>) {
    let (machine, launches) = (machines(device).remove(0), Arc::<AtomicUsize>::default());
    let (counts, broken) = (Arc::clone(&launches), Arc::default());
    let edited =
        Edited { machine, entry: "kie_decode", edits, broken, silent, launches, behind: None };
    let options = Options { hang_timeout: Some(patience(device)), ..options };
    (Arc::new(Mono::new(device, vec![Arc::new(edited)], &options).unwrap()), counts)
}

/// Launches that are to be short end soon, and the next one goes on: of prompts by layers and by
/// columns, of tokens, and of tokens beside a prompt.
#[test]
fn launches_that_have_a_bound_are_short_and_change_no_token() {
    let prompt: Vec<u32> = (0..200).map(|i| 3 + i % 90).collect();
    for (name, prefill) in [("llama", true), ("llama", false), ("own_qwen3_next", true)] {
        let tokens = |max_launch| {
            let options =
                Options { prefill_kernel: Some(prefill), max_launch, ..Options::default() };
            let (runner, launches) =
                counted(&here("sim:seed=5,blocks=4"), Vec::new(), false, options);
            let engine = open_over(name, runner);
            let mut other = engine.stream(greedy_request(&prompt[..9], 20)).unwrap();
            let tokens = continue_greedily(&engine, &prompt, 12).unwrap();
            let other = other.completion().unwrap().token_ids;
            engine.close();
            ((tokens, other), launches.load(Relaxed))
        };
        let (wanted, usual) = tokens(None);
        let (got, more) = tokens(Some(Duration::from_micros(1)));
        println!("{name}: {usual} launches, {more} short ones");
        assert_eq!(got, wanted, "{name}");
        assert!(more > usual + 10, "{name}: {more} launches, {usual} without a bound");
    }
}

/// The kernel leaves when its host is silent, and a host that comes back goes on where it was.
#[test]
fn a_silent_host_ends_the_launch() {
    let (slow, count) = (
        "watch.step = b.step = step; \
         for (int i = 0; thread() == 0 && block() == 0 && i < 20; ++i) pause_ns(1000000);",
        100,
    );
    let soon =
        ("constexpr u64 kHostSilent = 1000000000ull;", "constexpr u64 kHostSilent = 400000;");
    let watched =
        ("const bool watched = load_host(args.control + 2) != 0;", "const bool watched = true;");
    let simulated = std::env::var_os("KIE_DEVICE").is_none();
    let (edits, count) =
        if simulated { (vec![soon, watched], 20) } else { (vec![(STEP, slow)], count) };
    // Longer than what goes as a few columns at once: launches of prompts are left, too.
    let prompt: Vec<u32> = (0..200).map(|i| 3 + i % 90).collect();
    let tokens = |edits, silent| {
        let options = Options { prefill_kernel: Some(false), ..Options::default() };
        let (runner, launches) = counted(&here("sim:seed=5,blocks=8"), edits, silent, options);
        let engine = open_over("llama", runner);
        let tokens = continue_greedily(&engine, &prompt, count).unwrap();
        engine.close();
        (tokens, launches.load(Relaxed))
    };
    let (wanted, usual) = tokens(vec![], false);
    let (got, more) = tokens(edits, true);
    println!("{usual} launches, {more} with a silent host");
    assert_eq!(got, wanted);
    assert!(more > usual, "{more} launches with a silent host, {usual} without");
}
