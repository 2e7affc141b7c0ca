//! The monokernel as machine code of gfx942, executed on an emulator of it, never on the hardware:
//! tokens are the recorded ones, logits within the gate.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

#[macro_use]
mod support;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use kie_core::engine::{Engine, LogitsPath};
use kie_core::request::EngineConfig;
use kie_core::{selftest, Grammar};
use kie_kernels::device::Options;
use kie_kernels::devices;
use kie_kernels::machine::{Flight, Launch, Machine, Memory, Module, Source};
use kie_kernels::Result;
use support::prompts;
use support::{goldens, greedy, greedy_request, half, open_on, repository};

/// Relative L2 over a prompt, as for the monokernel elsewhere, or what tests/data/bounds.json has
/// for a fixture.
fn gate(name: &str, ranks: &str) -> f64 {
    let text = std::fs::read(repository().join("tests/data/bounds.json")).unwrap();
    let bounds: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let known = bounds.get(name).and_then(|known| {
        known.get("flips").or_else(|| known.get(if ranks == "1" { "one" } else { "several" }))
    });
    known.and_then(serde_json::Value::as_f64).unwrap_or(2e-3)
}

fn fixture(name: &str) -> PathBuf {
    repository().join("tests/data").join(name)
}

/// False, with one line that says so, where LLVM's tools are missing and this is not CI.
fn has_tools(test: &str) -> bool {
    let found = kie_gcn::toolchain::is_here();
    assert!(found || std::env::var("CI").as_deref() != Ok("true"), "{test}: no llvm-objdump-19");
    if !found {
        eprintln!("skipped: {test}: no llvm-objdump-19");
    }
    found
}

/// Positions of a prompt and tokens of a continuation.
fn check(name: &str, device: &str, positions: usize, tokens: usize) -> Engine {
    let folder = fixture(name);
    let golden = &goldens(&folder, "")[0];
    let engine = open_on(&folder, device);
    let begin = Instant::now();
    let ids = &golden.ids[..golden.ids.len().min(positions)];
    let ours = engine.logits(ids, LogitsPath::Decode).unwrap();
    let error = golden.error(&ours.values);
    eprintln!("{name} {device}: relative L2 {error:.2e}, {:?}", begin.elapsed());
    let ranks = device.split("ranks=").nth(1).map_or("1", |rest| &rest[..1]);
    assert!(error <= gate(name, ranks), "{name} {device}: {error:.2e}");
    let (begin, count) = (Instant::now(), golden.generated.len().min(tokens));
    let got = greedy(&engine, &golden.ids, count);
    let all = golden.ids.len() + count;
    eprintln!("{name} {device}: {all} positions and tokens, {:?}", begin.elapsed());
    assert_eq!(got, golden.generated[..count], "{name} {device}");
    engine
}

#[test]
fn a_lane_model_runs_as_machine_code() {
    if has_tools("laneformer_d2 on gcn") {
        check("laneformer_d2", "gcn:seed=1,blocks=4", 4, 4);
    }
}

#[test]
fn a_dense_model_runs_as_machine_code() {
    if has_tools("llama on gcn") {
        let engine = check("llama", "gcn:seed=2,blocks=4", 4, 4);
        let mut request = greedy_request(&[3, 4], 3);
        request.params.ignore_eos = false;
        request.params.grammar = Some(Grammar::Regex("[0-9]{3}[a-f]{9}".into()));
        let cpu = Engine::builder(fixture("llama")).device("cpu").dtype(half(&fixture("llama")));
        let wanted = cpu.build().unwrap().generate(request.clone()).unwrap().token_ids;
        assert_eq!(engine.generate(request).unwrap().token_ids, wanted, "under a grammar");
    }
}

#[test]
fn ranks_run_as_machine_code() {
    if has_tools("laneformer_d2 on two gcn") {
        check("laneformer_d2", "gcn:seed=3,blocks=4,ranks=2", 2, 3);
    }
}

#[test]
fn a_model_runs_on_weak_memory() {
    if has_tools("llama on weak gcn") {
        check("llama", "gcn:seed=4,blocks=4,weak=1", 2, 2);
    }
}

/// An engine whose prompts go through the prefill kernel.
fn with_prompts(name: &str, device: &str, machines: Vec<Arc<dyn Machine>>) -> Engine {
    let folder = fixture(name);
    let options = Options { prefill_kernel: Some(true), ..Options::default() };
    let device = devices::of_machines(device, machines, &options).unwrap();
    let config = EngineConfig { max_batch: 2, prefix_cache: false, ..EngineConfig::default() };
    let builder = Engine::builder(&folder).config(config).dtype(half(&folder));
    let engine = builder.runner(device).build().unwrap();
    let plan = &engine.info().plan;
    assert!(plan.contains("prompts   up to") && !plan.contains("no prefill kernel"), "{plan}");
    engine
}

/// Recorded continuations of prompts through that kernel, within the gate that it has in the
/// simulator.
fn check_prompts(name: &str, device: &str) {
    let engine = with_prompts(name, device, kie_gcn::ranks::open(device).unwrap());
    let begin = Instant::now();
    let off = prompts::check(&fixture(name), &engine).unwrap();
    eprintln!("{name} {device}: prompts {off:.2e}, {:?}", begin.elapsed());
    assert!(off <= prompts::GATE, "{name} {device}: {off:.2e}");
}

#[test]
fn prompts_run_as_machine_code() {
    if has_tools("prompts on gcn") {
        check_prompts("llama", "gcn:seed=3,blocks=4,weak=1");
        check_prompts("llama", "gcn:seed=4,blocks=4,ranks=2");
        check_prompts("laneformer_d2", "gcn:seed=2,blocks=4,ranks=2");
    }
}

/// A machine whose compiler makes something else of what was written.
struct Misread<C> {
    machine: Arc<dyn Machine>,
    compile: C,
}

impl<C> Machine for Misread<C>
where
    C: Fn(&dyn Machine, &Source) -> Result<Arc<dyn Module>> + Send + Sync,
{
    as_the_machine_does!();

    fn compile(&self, source: &Source) -> Result<Arc<dyn Module>> {
        (self.compile)(&*self.machine, source)
    }

    fn alloc(&self, bytes: usize) -> Result<Memory> {
        self.machine.alloc(bytes)
    }

    fn alloc_symmetric(&self, bytes: usize) -> Result<Memory> {
        self.machine.alloc_symmetric(bytes)
    }

    fn launch(&self, module: &Arc<dyn Module>, launch: &Launch<'_>) -> Result<Box<dyn Flight>> {
        self.machine.launch(module, launch)
    }
}

/// One that reads `to` for `from`, in all kernels or in one.
fn misread(
    machine: Arc<dyn Machine>,
    (from, to): (&'static str, &'static str),
    entry: Option<&'static str>,
) -> Arc<dyn Machine> {
    let compile = move |machine: &dyn Machine, source: &Source| {
        if entry.is_some_and(|entry| source.entries != [entry]) {
            return machine.compile(source);
        }
        let text = source.text.replace(from, to);
        machine.compile(&Source { text, ..source.clone() })
    };
    Arc::new(Misread { machine, compile })
}

/// Fails unless recorded continuations of prompts go wrong on one of the machines.
fn found(what: &str, machines: &mut dyn Iterator<Item = (String, Vec<Arc<dyn Machine>>)>) {
    let good = |(device, machines): (String, Vec<Arc<dyn Machine>>)| {
        let begin = Instant::now();
        let engine = with_prompts("llama", &device, machines);
        let off = prompts::check(&fixture("llama"), &engine);
        eprintln!("{what}, {device}: {off:?}, {:?}", begin.elapsed());
        off.is_ok_and(|off| off <= prompts::GATE)
    };
    assert!(machines.map(good).any(|good| !good), "{what} goes unnoticed");
}

/// Finds a prefill kernel that reads `to` for `from`, on the weak memory of so many machines.
fn found_misread((from, to): (&'static str, &'static str), ranks: u32) {
    let mutant = |seed: u32| {
        let device = format!("gcn:seed={seed},blocks=4,ranks={ranks},weak=1");
        let machines = kie_gcn::ranks::open(&device).unwrap().into_iter();
        let machines = machines.map(|one| misread(one, (from, to), Some("kie_prefill")));
        (device, machines.collect())
    };
    found(from, &mut (0..8).map(mutant));
}

/// What the prefill kernel must not do without: operands where the matrix unit has them, a release
/// before blocks are counted, the wait for what goes into a stage.
#[test]
fn broken_prefill_kernels_are_found() {
    if !has_tools("prefill mutants on gcn") {
        return;
    }
    found_misread(("four_halves(q.v[0], q.v[2])", "four_halves(q.v[2], q.v[0])"), 1);
    found_misread(("__builtin_amdgcn_fence(__ATOMIC_RELEASE, \"agent\");", ""), 1);
    let folder = support::Folder::new("gcn-mutants");
    let cache = folder.0.clone();
    let gcn = kie_gcn::Gcn::open("gcn:seed=1,blocks=4").unwrap();
    let own = gcn.clone();
    let compile = move |machine: &dyn Machine, source: &Source| {
        if source.entries != ["kie_prefill"] {
            return machine.compile(source);
        }
        let compiled = kie_gcn::toolchain::compile(source, &cache)?;
        let listing = without_waits_for_stages(&compiled.listing);
        assert_ne!(listing, compiled.listing, "nothing has changed");
        own.module(&kie_gcn::toolchain::Compiled { listing, ..compiled }, &source.entries)
    };
    let machine: Arc<dyn Machine> = Arc::new(Misread { machine: Arc::new(gcn), compile });
    let one = ("gcn:seed=1,blocks=4".to_owned(), vec![machine]);
    found("a stage without waits", &mut std::iter::once(one));
}

/// And what it must not do without where several machines share a model: to write back what others
/// are told of, and to wait for them between phases.
#[test]
#[ignore = "minutes: make gcn"]
fn broken_prefill_kernels_of_several_machines_are_found() {
    if !has_tools("prefill mutants on two gcn") {
        return;
    }
    found_misread(("__builtin_amdgcn_fence(__ATOMIC_RELEASE, \"\");", ""), 2);
    let meets = "if (!meet(watch, args, phase, kTensorParallel)) return false;";
    found_misread((meets, "if (!meet(watch, args, phase)) return false;"), 2);
}

/// The listing without the waits right before what was loaded goes to shared memory.
fn without_waits_for_stages(listing: &str) -> String {
    let lines: Vec<&str> = listing.lines().collect();
    let one = |at: usize| {
        let next = lines[at + 1..].iter().take(3).any(|line| line.contains("ds_write_b128"));
        match lines[at].split_once("s_waitcnt vmcnt(") {
            Some((before, rest)) if next => {
                let (_, address) = rest.split_once("//").unwrap();
                format!("{before}s_nop 0 //{address}\n")
            }
            _ => format!("{}\n", lines[at]),
        }
    };
    (0..lines.len()).map(one).collect()
}

#[test]
fn a_device_is_tried_before_it_serves() {
    if !has_tools("self-test on gcn") {
        return;
    }
    let open = || kie_gcn::ranks::open("gcn:seed=6,blocks=3,weak=1").unwrap().remove(0);
    selftest::check("hip:0", &open(), 20).unwrap();
    for (from, to, what) in [
        ("store_word(args.words + me, round);", "store_word(args.words + me, round + 1);", "stale"),
        ("__builtin_amdgcn_fence(__ATOMIC_RELEASE, \"agent\");", "", "kie_litmus_words: stale"),
        ("offset:512 nt", "offset:256 nt", "kie_litmus_copies"),
        ("add_of_four<0x4e>", "add_of_four<0xe4>", "logits of a tiny model"),
        (
            "four_halves(q.v[0], q.v[2])",
            "four_halves(q.v[2], q.v[0])",
            "tokens behind 40 positions",
        ),
    ] {
        let tried = selftest::check("hip:0", &misread(open(), (from, to), None), 20);
        let error = tried.expect_err(&format!("{to} for {from}")).to_string();
        for word in
            [what, "failed kie's self-test and will not serve", "report", "3 multiprocessors"]
        {
            assert!(error.contains(word), "{from}: no {word:?} in {error}");
        }
    }
}

/// What went wrong of all jobs, each told with its time as it ends.
fn all_of(jobs: impl Iterator<Item = (String, &'static str, usize, usize)>) {
    let mut failed = Vec::new();
    for (name, device, positions, tokens) in jobs {
        let begin = Instant::now();
        let run = || check(&name, device, positions, tokens);
        if std::panic::catch_unwind(run).is_err() {
            failed.push(format!("{name} {device}"));
        }
        eprintln!("{name} {device}: {:?} with compiling", begin.elapsed());
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

/// Every fixture of the repository that the monokernel takes.
#[test]
#[ignore = "minutes: make gcn"]
fn every_fixture_runs_as_machine_code() {
    // The last two's kernels, of so few features, keep registers in memory of a thread, which the
    // emulator does not know; those of real sizes do not (hip/tests/kernels.rs).
    let refused = ["own_gemma3", "own_olmo2", "own_phi3", "own_qwen3_next", "own_deepseek_v4"];
    let names = support::fixtures().into_iter();
    let names = names.map(|folder| folder.file_name().unwrap().to_str().unwrap().to_owned());
    let only = std::env::var("KIE_ONLY").ok();
    let names = names.filter(|name| only.as_ref().is_none_or(|only| name == only));
    if has_tools("every fixture on gcn") {
        let taken = names.filter(|name| !refused.contains(&name.as_str()));
        all_of(taken.map(|name| (name, "gcn:seed=5,blocks=8", 4, 8)));
    }
}

/// Recorded prompts of every kind of model that the prefill kernel has.
#[test]
#[ignore = "minutes: make gcn"]
fn every_kind_of_prompt_runs_as_machine_code() {
    if !has_tools("prompts of all kinds on gcn") {
        return;
    }
    let mut failed = Vec::new();
    for name in prompts::FIXTURES {
        let begin = Instant::now();
        if std::panic::catch_unwind(|| check_prompts(name, "gcn:seed=5,blocks=8,weak=1")).is_err() {
            failed.push(name);
        }
        eprintln!("{name}: {:?} with compiling", begin.elapsed());
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

/// The same on two and four machines: lanes, shards, experts.
#[test]
#[ignore = "minutes: make gcn"]
fn prompts_run_on_several_machines_as_machine_code() {
    if has_tools("prompts on several gcn") {
        for (name, device) in [
            ("llama", "gcn:seed=5,blocks=4,ranks=2,weak=1"),
            ("qwen2", "gcn:seed=6,blocks=3,ranks=4,weak=1"),
            ("laneformer_d2", "gcn:seed=7,blocks=4,ranks=2,weak=1"),
            ("own_mixtral", "gcn:seed=8,blocks=4,ranks=2,weak=1"),
        ] {
            check_prompts(name, device);
        }
    }
}

/// More than a tile, and a last page that is not whole.
#[test]
#[ignore = "minutes: make gcn"]
fn long_prompts_run_as_machine_code() {
    if has_tools("long prompts on gcn") {
        for name in ["own_llama_f16", "laneformer_d2", "own_mixtral"] {
            let device = "gcn:seed=6,blocks=8";
            let engine = with_prompts(name, device, kie_gcn::ranks::open(device).unwrap());
            let reference = prompts::reference(&fixture(name));
            prompts::judge(name, &engine, &reference, &prompts::ids(301), 4);
        }
    }
}

/// Two, four and eight machines, and a memory as weak as it is documented.
#[test]
#[ignore = "minutes: make gcn"]
fn more_ranks_run_as_machine_code() {
    let all = [
        ("llama", "gcn:seed=6,blocks=4,ranks=2"),
        ("qwen2", "gcn:seed=7,blocks=3,ranks=4"),
        ("own_laneformer_mixed", "gcn:seed=8,blocks=2,ranks=8"),
        ("own_llama_fp8_tied", "gcn:seed=9,blocks=2,ranks=8"),
        ("laneformer_d2", "gcn:seed=10,blocks=4,ranks=2,weak=1"),
        ("own_llama_fp8_tied", "gcn:seed=11,blocks=2,ranks=4,weak=1"),
    ];
    if has_tools("ranks on gcn") {
        all_of(all.into_iter().map(|(name, device)| (name.to_owned(), device, 2, 3)));
    }
}
