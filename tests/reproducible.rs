//! What an engine has done before changes no bit of what it does next: random histories of
//! requests, sessions, forks and rollbacks, each answer compared with that of an engine without
//! a cache.
//!
//! Invariant: an answer is compared by its ids and by the bits of its log-probabilities, so that
//! two continuations that only happen to choose the same ids do not pass for equal.

#![allow(clippy::unwrap_used)]

mod support;

use std::path::PathBuf;

use kie_core::request::{Completion, Prompt, Request, SamplingParams};
use kie_core::{Builder, Engine, Next, Session, TokenStream};
use support::repository;

/// Numbers that look random (xorshift), from a seed.
struct Source(u64);

impl Source {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 11) % end.max(1) as u64) as usize
    }
}

/// Ids, and bits of their log-probabilities with two alternatives each.
type Bits = Vec<(u32, u32, Vec<(u32, u32)>)>;

fn read(stream: &mut TokenStream) -> (Bits, Completion) {
    let mut bits = Vec::new();
    loop {
        match stream.recv_timeout(std::time::Duration::from_secs(60)).unwrap() {
            Next::Token(token) => {
                let alternatives = token.top_logprobs.iter().map(|t| (t.id, t.logprob.to_bits()));
                let chosen = token.logprob.unwrap().to_bits();
                bits.push((token.token_ids[0], chosen, alternatives.collect()));
            }
            Next::Pending => panic!("nothing came for a minute"),
            Next::Finished => return (bits, stream.completion().unwrap()),
        }
    }
}

/// One engine's life.
struct World {
    source: Source,
    warm: Engine,
    cold: Engine,
    vocab: usize,
    context: usize,
    most_new: usize,
    /// What was ever said and answered, to begin prompts with.
    past: Vec<Vec<u32>>,
    sessions: Vec<Session>,
    /// Requests that found something, and those whose bits were others.
    cached: usize,
    apart: usize,
}

impl World {
    fn new(seed: u64, open: &dyn Fn() -> Builder, (most, most_new): (usize, usize)) -> Self {
        let warm = open().build().unwrap();
        let cold = open().prefix_cache(false).build().unwrap();
        let (vocab, context) = (warm.info().vocab, warm.info().context.min(most));
        Self {
            source: Source(seed | 1),
            warm,
            cold,
            vocab,
            context,
            most_new,
            past: vec![Vec::new()],
            sessions: Vec::new(),
            cached: 0,
            apart: 0,
        }
    }

    /// The beginning of something that was there before, and something new.
    fn prompt(&mut self, most: usize) -> Vec<u32> {
        let from = self.source.below(self.past.len());
        let kept = match self.source.below(4) {
            0 => self.source.below(self.past[from].len() + 1),
            // At a page's edge, or beside it.
            1 => (self.source.below(self.past[from].len() + 1) / 64 * 64)
                .saturating_sub(self.source.below(3)),
            _ => self.past[from].len(),
        };
        let mut ids = self.past[from][..kept.min(most)].to_vec();
        let more = match self.source.below(3) {
            0 => 1 + self.source.below(4),
            1 => 1 + self.source.below(90),
            _ => 1 + self.source.below(130),
        };
        for _ in 0..more.min(most.saturating_sub(ids.len())).max(usize::from(ids.is_empty())) {
            ids.push(self.source.below(self.vocab) as u32);
        }
        ids
    }

    fn params(&mut self) -> SamplingParams {
        SamplingParams {
            max_tokens: Some(1 + self.source.below(self.most_new)),
            temperature: Some([0.0, 0.9][self.source.below(2)]),
            seed: Some(self.source.below(1 << 20) as u64),
            logprobs: Some(2),
            ignore_eos: true,
            ..SamplingParams::default()
        }
    }

    fn compare(&mut self, ids: Vec<u32>, params: SamplingParams, (bits, done): (Bits, Completion)) {
        let request = Request { prompt: Prompt::Ids(ids.clone()), params };
        let (wanted, _) = read(&mut self.cold.stream(request).unwrap());
        self.cached += usize::from(done.usage.cached_tokens > 0);
        self.apart += usize::from(bits != wanted);
        let mut all = ids;
        all.extend(&done.token_ids);
        self.past.push(all);
    }

    /// One to three requests at once.
    fn requests(&mut self) {
        let most = self.context - self.most_new - 1;
        let asked: Vec<_> =
            (0..1 + self.source.below(3)).map(|_| (self.prompt(most), self.params())).collect();
        let start = |(ids, params): &(Vec<u32>, SamplingParams)| {
            let request = Request { prompt: Prompt::Ids(ids.clone()), params: params.clone() };
            self.warm.stream(request).unwrap()
        };
        let streams: Vec<_> = asked.iter().map(start).collect();
        let answers: Vec<_> = streams.into_iter().map(|mut stream| read(&mut stream)).collect();
        for ((ids, params), answer) in asked.into_iter().zip(answers) {
            self.compare(ids, params, answer);
        }
    }

    /// A turn of a session, perhaps of a fork or behind a rollback.
    fn turn(&mut self) {
        if self.sessions.len() < 2 {
            self.sessions.push(self.warm.session(None).unwrap());
        }
        let at = self.source.below(self.sessions.len());
        match self.source.below(4) {
            0 => {
                let fork = self.sessions[at].fork().unwrap();
                let old = std::mem::replace(&mut self.sessions[at], fork);
                self.sessions.push(old);
            }
            1 => {
                let to = self.source.below(self.sessions[at].turns() + 1);
                self.sessions[at].rollback(to).unwrap();
            }
            _ => {}
        }
        self.sessions.truncate(4);
        let at = at.min(self.sessions.len() - 1);
        let words: Vec<String> =
            (0..1 + self.source.below(60)).map(|i| format!("x{} = {i}", i * 7)).collect();
        let params = self.params();
        let before = self.sessions[at].tokens().unwrap().len();
        if before + 6 * words.len() + 80 + self.most_new > self.context {
            self.sessions[at].rollback(0).unwrap();
        }
        let said = Prompt::Text(words.join("\n"));
        let Ok(mut stream) = self.sessions[at].stream(said, params.clone()) else { return };
        let answer = read(&mut stream);
        let prompt = answer.1.usage.prompt_tokens;
        let ids = self.sessions[at].tokens().unwrap()[..prompt].to_vec();
        self.compare(ids, params, answer);
    }

    fn live(&mut self, steps: usize) {
        for _ in 0..steps {
            match self.source.below(3) {
                0 => self.turn(),
                _ => self.requests(),
            }
        }
    }
}

fn folder(name: &str) -> PathBuf {
    repository().join(if name == "demo" {
        "python/kie/demo".into()
    } else {
        format!("tests/data/{name}")
    })
}

#[test]
fn a_history_changes_no_bit_on_the_cpu() {
    // Of one model pages run short, so that they are evicted, and windows run on rings.
    let models = [
        ("demo", None),
        ("qwen3_moe", None),
        ("own_llama_fp8_tied", None),
        ("own_deepseek_v3", None),
        ("own_mistral", Some(1)),
        ("own_qwen3_next", None),
        ("own_deepseek_v4", None),
    ];
    let (mut told, mut good) = (Vec::new(), true);
    for (seed, (name, kv_bytes)) in (20_261_122..).zip(models) {
        let open = || {
            let builder = Engine::builder(folder(name)).device("cpu").threads(2).max_batch(4);
            kv_bytes.into_iter().fold(builder, Builder::kv_bytes)
        };
        let mut world = World::new(seed, &open, (500, 40));
        world.live(12);
        let (of, apart, cached) = (world.past.len() - 1, world.apart, world.cached);
        told.push(format!("{name}: {of} answers, {cached} behind a prefix, {apart} not as cold"));
        good &= apart == 0 && cached > 3;
    }
    assert!(good, "{told:#?}");
}

#[test]
fn a_history_changes_no_bit_on_a_gpus_kernels() {
    for (seed, name, wide) in [(3, "llama", false), (5, "llama", true), (7, "own_gpt_oss", false)] {
        let open = || {
            let device = "sim:seed=5,warp=32,blocks=4";
            let builder = Engine::builder(folder(name)).device(device).max_batch(4);
            builder.prefill_kernel(wide).max_seq_len(400)
        };
        let mut world = World::new(seed, &open, (200, 4));
        world.live(6);
        assert_eq!(world.apart, 0, "{name}, wide: {wide}");
    }
}

/// Where two requests want more pages than there are, the younger gives its pages up and begins
/// anew: both have the bits that they have alone.
fn pages_run_out(open: &dyn Fn() -> Builder, (prompt, tokens): (u32, usize)) {
    let (warm, cold) = (open().build().unwrap(), open().prefix_cache(false).build().unwrap());
    let request = |seed: u64| Request {
        prompt: Prompt::Ids((0..prompt).map(|i| 3 + i * (seed as u32 + 5) % 200).collect()),
        params: SamplingParams {
            max_tokens: Some(tokens),
            temperature: Some(0.9),
            seed: Some(seed),
            logprobs: Some(2),
            ignore_eos: true,
            ..SamplingParams::default()
        },
    };
    // A pair may pass one behind the other where this thread is held up between them.
    for first in (0..40).step_by(2) {
        let seeds = first..first + 2;
        let mut streams: Vec<_> =
            seeds.clone().map(|seed| warm.stream(request(seed)).unwrap()).collect();
        let both: Vec<Bits> = streams.iter_mut().map(|stream| read(stream).0).collect();
        for (seed, bits) in seeds.zip(both) {
            let (alone, _) = read(&mut cold.stream(request(seed)).unwrap());
            assert!(bits == alone, "request {seed} has other bits");
        }
        if warm.metrics().preempted > 0 {
            return;
        }
    }
    panic!("no request gave its pages up: {:?}", warm.metrics());
}

#[test]
fn giving_pages_up_changes_no_bit() {
    // Of one model a layer's window is shorter than the sequence, of the other there is none.
    for (name, context) in
        [("demo", 1024), ("qwen3", 256), ("own_qwen3_next", 256), ("own_deepseek_v4", 256)]
    {
        let open = || {
            let builder = Engine::builder(folder(name)).device("cpu").threads(2).max_batch(4);
            builder.max_seq_len(context)
        };
        pages_run_out(&with_least_kv(open), (40, context - 41));
    }
}

#[test]
fn giving_pages_up_changes_no_bit_on_a_gpus_kernels() {
    let open = || {
        let builder = Engine::builder(folder("llama")).device("sim:seed=5,warp=32,blocks=4");
        builder.max_batch(2).max_seq_len(256)
    };
    pages_run_out(&with_least_kv(open), (60, 72));
}

/// The same with the least bytes of KV that the engine opens with.
fn with_least_kv(open: impl Fn() -> Builder) -> impl Fn() -> Builder {
    let refused = open().kv_bytes(1).build().err().unwrap().to_string();
    let least = refused.split("at least ").nth(1).and_then(|rest| rest.split(',').next());
    let least: u64 = least.and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("{refused}"));
    move || open().kv_bytes(least)
}
