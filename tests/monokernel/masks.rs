//! Grammars on the monokernel: the host makes a mask while the device computes the step. What is
//! chosen is what the CPU chooses, alone, beside others, on several machines, and however late
//! masks are.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::Arc;

use kie_core::engine::Engine;
use kie_core::request::{Completion, FinishReason, SamplingParams};
use kie_core::{Grammar, Result};
use kie_kernels::device::{Device, Gone, Running};

use super::failures::{edited_by, several, Edit};
use super::fixture;
use super::requests::{base, generate, request, ways, PROMPT};
use super::support::{half, open_on, Around};

/// The same, of a text that is two letters at a time, two digits and a mark.
fn under(params: SamplingParams) -> SamplingParams {
    let grammar = Some(Grammar::Regex("(ab|cd|é)+[0-9]{2}!".into()));
    SamplingParams { grammar, ignore_eos: false, ..params }
}

fn greedy(max_tokens: usize) -> SamplingParams {
    SamplingParams { temperature: Some(0.0), ..base(max_tokens, 0) }
}

/// The CPU over the weights that a GPU has.
fn reference(folder: &Path) -> Engine {
    Engine::builder(folder).device("cpu").dtype(half(folder)).max_batch(4).build().unwrap()
}

fn told(done: &Completion) -> (&[u32], FinishReason) {
    (&done.token_ids, done.finish_reason)
}

/// All of these at once.
fn together(engine: &Engine, all: &[&SamplingParams]) -> Vec<Completion> {
    let start = |p: &&SamplingParams| engine.stream(request(&PROMPT, p)).unwrap();
    let streams: Vec<_> = all.iter().map(start).collect();
    streams.into_iter().map(|mut stream| stream.completion().unwrap()).collect()
}

/// A run whose host hears of no token before there is nothing left to do: every mask but a
/// request's first comes late. Counts how often that was.
struct Deaf(Box<dyn Running>, Arc<AtomicUsize>);

impl Running for Deaf {
    fn drive(&mut self, gone: Gone<'_>) -> kie_kernels::Result<bool> {
        let mut any = false;
        while self.0.drive(gone)? {
            any = true;
        }
        self.1.fetch_add(usize::from(any), Relaxed);
        Ok(false)
    }

    fn park(&mut self) {
        self.0.park();
    }
}

/// A device with such runs; with drafts beside masks or without.
pub fn deafened(inner: Arc<dyn Device>, count: Arc<AtomicUsize>, drafts: bool) -> Arc<dyn Device> {
    let run = move |run| Box::new(Deaf(run, Arc::clone(&count))) as Box<dyn Running>;
    Arc::new(Around(inner, run, drafts))
}

/// A fixture with such runs, over sources with these edits, and the count.
fn deaf(name: &str, device: &str, edits: &[Edit]) -> (Engine, Arc<AtomicUsize>) {
    let count = Arc::<AtomicUsize>::default();
    let inner = edited_by("kie_decode", device, edits, &Arc::default());
    let runner = deafened(inner, Arc::clone(&count), false);
    let builder = Engine::builder(fixture(name)).dtype(half(&fixture(name))).max_batch(4);
    (builder.runner(runner).build().unwrap(), count)
}

#[test]
fn answers_are_the_cpus_and_neighbours_change_none() {
    let folder = fixture("llama");
    let cpu = reference(&folder);
    let all: Vec<_> = ways(14).into_iter().map(|(name, p)| (name, under(p))).collect();
    let wanted: Vec<_> = all.iter().map(|(_, p)| generate(&cpu, &PROMPT, p)).collect();
    let (free, alone) = (base(14, 5), open_on(&folder, "sim:seed=7,blocks=4"));
    let untouched = generate(&alone, &PROMPT, &free);
    for ((name, params), wanted) in all.iter().zip(&wanted).take(4) {
        assert_eq!(told(&generate(&alone, &PROMPT, params)), told(wanted), "{name}");
    }
    drop(alone);
    for machine in ["seed=8,warp=32,blocks=4", "seed=9,warp=64,blocks=5,hold=1"] {
        let engine = open_on(&folder, &format!("sim:{machine}"));
        for (some, wanted) in all.chunks(3).zip(wanted.chunks(3)) {
            let asked: Vec<_> = some.iter().map(|(_, p)| p).chain([&free]).collect();
            let done = together(&engine, &asked);
            for ((got, wanted), (name, _)) in done.iter().zip(wanted).zip(some) {
                assert_eq!(told(got), told(wanted), "{name}, {machine}");
            }
            let beside = done.last().unwrap();
            assert_eq!(beside.token_ids, untouched.token_ids, "a mask of another shows");
        }
    }
}

#[test]
fn every_rank_reads_the_same_masks() {
    for (name, ranks) in [("llama", 2), ("laneformer_d2", 4)] {
        let Some(device) = several(ranks, "seed=3,blocks=4") else { continue };
        let (cpu, folder) = (reference(&fixture(name)), fixture(name));
        let engine = open_on(&folder, &device);
        let all = [under(greedy(9)), under(base(9, 6)), under(ways(9)[4].1.clone()), greedy(9)];
        let done = together(&engine, &all.each_ref());
        for (got, params) in done.iter().zip(&all).take(3) {
            assert_eq!(told(got), told(&generate(&cpu, &PROMPT, params)), "{name}");
        }
    }
}

/// A late mask holds its own sequence up, which computes a position again; recurrent states and
/// penalties count each token once.
#[test]
fn late_masks_change_no_token() {
    for (name, machine) in [("llama", "seed=1,blocks=4"), ("own_qwen3_next", "warp=64,blocks=4")] {
        let cpu = reference(&fixture(name));
        let (engine, rounds) = deaf(name, &format!("sim:{machine}"), &[]);
        let penalised = under(ways(8)[7].1.clone());
        let told_apart = SamplingParams { logprobs: Some(2), ..under(base(8, 9)) };
        let all = [under(greedy(8)), penalised, told_apart];
        let wanted: Vec<_> = all.iter().map(|p| generate(&cpu, &PROMPT, p)).collect();
        for (params, wanted) in all.iter().zip(&wanted) {
            let before = rounds.load(Relaxed);
            let got = generate(&engine, &PROMPT, params);
            assert_eq!(told(&got), told(wanted), "{name}");
            let late = rounds.load(Relaxed) - before;
            assert!(late >= got.token_ids.len(), "{late} rounds");
            if let Some(wanted) = &wanted.logprobs {
                for (got, wanted) in got.logprobs.as_ref().unwrap().iter().zip(wanted) {
                    let apart = (got.logprob - wanted.logprob).abs();
                    assert!(apart < 0.05, "{name}: {got:?} {wanted:?}");
                }
            }
        }
        // The one that waits for nothing is done before the others have gone far.
        let free = base(40, 2);
        let alone = generate(&engine, &PROMPT, &free);
        let asked: Vec<_> = all.iter().chain([&free]).collect();
        let before = rounds.load(Relaxed);
        let done = together(&engine, &asked);
        let longest = wanted.iter().map(|done| done.token_ids.len()).max().unwrap();
        assert!(rounds.load(Relaxed) - before >= longest, "a token of each a round");
        for (got, wanted) in done.iter().zip(wanted.iter().chain([&alone])) {
            assert_eq!(told(got), told(wanted), "{name}, together");
        }
    }
}

#[test]
fn a_mask_of_the_step_before_is_found_out() {
    let params = under(greedy(8));
    let wanted = generate(&reference(&fixture("llama")), &PROMPT, &params);
    let same = ("seqno_of(w[i]) == tag;", "seqno_of(w[i]) == tag; ");
    let before = ("seqno_of(w[i]) == tag;", "seqno_of(w[i]) + 1 >= tag;");
    let ignored = ("if (is_masked(q) && !allows(", "if (false && !allows(");
    for (edit, good) in [(same, true), (before, false), (ignored, false)] {
        let (engine, _) = deaf("llama", "sim:seed=2,blocks=4", &[edit]);
        let got: Result<Completion> = engine.generate(request(&PROMPT, &params));
        let alike = got.is_ok_and(|got| told(&got) == told(&wanted));
        assert_eq!(alike, good, "{edit:?}");
    }
}

#[test]
fn requests_end_while_their_masks_are_late() {
    let (engine, _) = deaf("llama", "sim:seed=4,blocks=4", &[]);
    let long = Some(Grammar::Regex("[a-z]{300}".into()));
    let long = SamplingParams { grammar: long, ignore_eos: false, ..base(400, 1) };
    let mut stream = engine.stream(request(&PROMPT, &long)).unwrap();
    assert!(stream.next().unwrap().is_ok());
    stream.cancel();
    assert_eq!(stream.completion().unwrap().finish_reason, FinishReason::Cancelled);
    let soon = SamplingParams { timeout: Some(0.2), ..long.clone() };
    assert_eq!(generate(&engine, &PROMPT, &soon).finish_reason, FinishReason::Timeout);
    // The row's next request has masks of its own, and stops are the device's.
    let cpu = reference(&fixture("llama"));
    let free = generate(&cpu, &PROMPT, &SamplingParams { max_tokens: Some(6), ..long.clone() });
    assert_eq!((free.token_ids.len(), free.finish_reason), (6, FinishReason::Length));
    let stopped = SamplingParams { stop_token_ids: vec![free.token_ids[3]], ..long };
    let wanted = generate(&cpu, &PROMPT, &stopped);
    assert_eq!(told(&generate(&engine, &PROMPT, &stopped)), told(&wanted));
    let stream = engine.stream(request(&PROMPT, &stopped)).unwrap();
    engine.close();
    drop(stream);
}

/// A prompt over several pages: as columns, once computed and once found; and in the prefill
/// kernel, behind which the position before the first token is a step of its own.
#[test]
fn prompts_stand_before_masks() {
    let (name, params) = ("qwen3", under(base(5, 3)));
    let ids: Vec<u32> = (0..150u32).map(|i| 3 + (i * 37 + i * i * 11) % 300).collect();
    for entry in ["kie_decode", "kie_prefill"] {
        let open = |late: bool| {
            let inner = edited_by(entry, "sim:seed=6,blocks=3", &[], &Arc::default());
            let runner = if late { deafened(inner, Arc::default(), false) } else { inner };
            let builder = Engine::builder(fixture(name)).dtype(half(&fixture(name)));
            builder.runner(runner).build().unwrap()
        };
        let engine = open(false);
        let first = generate(&engine, &ids, &params);
        let again = generate(&engine, &ids, &params);
        assert_eq!(again.usage.cached_tokens >= 64, entry == "kie_decode", "{:?}", again.usage);
        assert_eq!(told(&again), told(&first));
        assert_eq!(told(&generate(&open(true), &ids, &params)), told(&first), "{entry}, late");
    }
}
