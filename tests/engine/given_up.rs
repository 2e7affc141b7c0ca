//! Passes of the CPU that are given up: by chance, at any step, beside others; and for a caller who
//! left. What they wrote is seen by nobody.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use kie_core::request::{Completion, FinishReason, Prompt, Request, SamplingParams};
use kie_core::{Engine, LogitsPath, TokenStream};
use kie_kernels::device::{Gone, Options, Running};
use kie_kernels::devices;
use kie_kernels::simd::Level;

use super::demo;
use super::support::Around;

/// What is answered where a pass asks whether a request is gone.
#[derive(Default)]
struct Answers {
    /// Each is given up with a chance of one in so many; 0: none is.
    chance: AtomicU64,
    drawn: AtomicU64,
    said: AtomicU64,
    /// Cancelled by the first pass that asks.
    victim: Mutex<Option<TokenStream>>,
    has_victim: AtomicBool,
}

impl Answers {
    fn gone(&self) -> bool {
        // The stream is there a moment after its request.
        while self.has_victim.load(Ordering::Acquire) {
            if let Some(stream) = &*self.victim.lock().unwrap() {
                stream.cancel();
                self.has_victim.store(false, Ordering::Release);
            }
        }
        let chance = self.chance.load(Ordering::Relaxed);
        let n = self.drawn.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let gone = chance > 0 && (n >> 33).is_multiple_of(chance);
        self.said.fetch_add(u64::from(gone), Ordering::Relaxed);
        gone
    }
}

/// A run whose passes are asked for less than they believe.
struct Impatient(Box<dyn Running>, Arc<Answers>);

impl Running for Impatient {
    fn drive(&mut self, gone: Gone<'_>) -> kie_kernels::Result<bool> {
        let Self(inner, answers) = self;
        inner.drive(&|slot| answers.gone() || gone(slot))
    }

    fn park(&mut self) {
        self.0.park();
    }
}

fn open(folder: &Path, level: Option<Level>) -> (Engine, Arc<Answers>) {
    let options = Options { threads: Some(2), level, ..Options::default() };
    let inner = devices::open("cpu", &options).unwrap();
    let answers = Arc::<Answers>::default();
    let asked = Arc::clone(&answers);
    let run = move |run| Box::new(Impatient(run, Arc::clone(&asked))) as Box<dyn Running>;
    let runner = Arc::new(Around(inner, run, false));
    let builder = Engine::builder(folder).runner(runner);
    (builder.max_batch(4).build().unwrap(), answers)
}

fn request(n: u32, prompt: u32, max_tokens: usize, vocab: u32) -> Request {
    let params = SamplingParams {
        max_tokens: Some(max_tokens),
        temperature: Some(0.8),
        seed: Some(u64::from(n)),
        repetition_penalty: Some(1.1),
        ignore_eos: true,
        logprobs: Some(0),
        ..SamplingParams::default()
    };
    let ids = (0..prompt).map(|at| 5 + (at * 31 + n * 977) % vocab).collect();
    Request { prompt: Prompt::Ids(ids), params }
}

/// Ids and the bits of their log-probabilities.
fn bits(done: &Completion) -> Vec<(u32, u32)> {
    done.logprobs.iter().flatten().map(|token| (token.id, token.logprob.to_bits())).collect()
}

#[test]
fn passes_given_up_by_chance_change_no_bit() {
    given_up_by_chance(&demo(), None, 300, &[2, 7, 40]);
}

/// A position that is computed again changes no state twice.
#[test]
fn a_recurrent_state_knows_nothing_of_passes_given_up() {
    for name in ["own_qwen3_next", "own_deepseek_v4"] {
        let folder = demo().join("../../../tests/data").join(name);
        // So small a model is otherwise done before anybody looks.
        given_up_by_chance(&folder, Some(Level::Scalar), 140, &[2, 3]);
    }
}

/// Prompts of 40 tokens, and of `step` more each; looks say with a chance of one in so many that
/// nobody waits.
fn given_up_by_chance(folder: &Path, level: Option<Level>, step: u32, chances: &[u64]) {
    let (engine, _) = open(folder, level);
    let (vocab, most) = (engine.info().vocab as u32 / 2, engine.context().min(600));
    let prompt = |n: u32| request(n, 40 + step * n, 6, vocab);
    let ask = |n: u32| engine.generate(prompt(n)).unwrap();
    let alone: Vec<_> = (0..4).map(|n| bits(&ask(n))).collect();
    let ids = vec![7; most];
    let logits = engine.logits(&ids, LogitsPath::Prefill).unwrap().values;
    engine.close();
    for &chance in chances {
        let round = || {
            let (engine, answers) = open(folder, level);
            answers.chance.store(chance, Ordering::Relaxed);
            let streams: Vec<_> = (0..4).map(|n| engine.stream(prompt(n)).unwrap()).collect();
            let together: Vec<_> =
                streams.into_iter().map(|mut stream| bits(&stream.completion().unwrap())).collect();
            assert_eq!(together, alone, "one in {chance}");
            (engine, answers)
        };
        // Where this machine is busy elsewhere all passes may end before anybody looks.
        let (engine, answers) = (0..50)
            .map(|_| round())
            .find(|(_, answers)| answers.said.load(Ordering::Relaxed) > 0)
            .unwrap_or_else(|| panic!("one in {chance}: none was given up"));
        // A prefix that the cache kept is one of whole passes.
        answers.chance.store(0, Ordering::Relaxed);
        let again = engine.generate(prompt(3)).unwrap();
        assert!(again.usage.cached_tokens > 0, "{:?}", again.usage);
        assert_eq!(bits(&again), alone[3], "one in {chance}");
        assert!(engine.logits(&ids, LogitsPath::Prefill).unwrap().values == logits);
    }
}

#[test]
fn who_leaves_in_a_pass_ends_it_and_leaves_nothing_behind() {
    let (engine, _) = open(&demo(), None);
    let wanted = bits(&engine.generate(request(1, 500, 6, 4000)).unwrap());
    engine.close();
    let (engine, answers) = open(&demo(), None);
    answers.has_victim.store(true, Ordering::Release);
    let stream = engine.stream(request(1, 500, 6, 4000)).unwrap();
    *answers.victim.lock().unwrap() = Some(stream);
    while answers.has_victim.load(Ordering::Acquire) {
        std::thread::yield_now();
    }
    let mut stream = answers.victim.lock().unwrap().take().unwrap();
    let done = stream.completion().unwrap();
    assert_eq!(done.finish_reason, FinishReason::Cancelled);
    assert!(done.token_ids.is_empty(), "the pass was not finished");
    let again = engine.generate(request(1, 500, 6, 4000)).unwrap();
    assert_eq!(again.usage.cached_tokens, 0);
    assert_eq!(bits(&again), wanted);
}
