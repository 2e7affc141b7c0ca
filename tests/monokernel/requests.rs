//! Requests on a simulated machine, judged by the float64 reference on the kernel's own logits:
//! what is chosen, what neighbours, pages, sessions and the end of sequence numbers may not change.

use kie_core::engine::{Engine, LogitsPath};
use kie_core::request::{Completion, FinishReason, Prompt, Request, SamplingParams, StopReason};
use kie_kernels::sample::{sample, top_logprobs, Rules, Sampling, Scratch, SEEN_IN_PROMPT};

use super::support::{open_on, relative};
use super::{fixture, open_simulated};

pub const PROMPT: [u32; 5] = [3, 141, 59, 26, 53];

pub fn base(max_tokens: usize, seed: u64) -> SamplingParams {
    SamplingParams {
        max_tokens: Some(max_tokens),
        temperature: Some(1.0),
        top_p: Some(1.0),
        top_k: Some(0),
        min_p: Some(0.0),
        repetition_penalty: Some(1.0),
        ignore_eos: true,
        seed: Some(seed),
        ..SamplingParams::default()
    }
}

pub fn request(ids: &[u32], params: &SamplingParams) -> Request {
    Request { prompt: Prompt::Ids(ids.to_vec()), params: params.clone() }
}

pub fn generate(engine: &Engine, ids: &[u32], params: &SamplingParams) -> Completion {
    engine.generate(request(ids, params)).unwrap()
}

/// Every way to choose, none of which ends before `tokens` tokens.
pub fn ways(tokens: usize) -> Vec<(&'static str, SamplingParams)> {
    let base = |seed| base(tokens, seed);
    let greedy = SamplingParams { temperature: Some(0.0), ..base(0) };
    let bias = vec![(17, 4.0), (18, 3.5), (400, -100.0), (17, 0.5)];
    vec![
        ("temperature", SamplingParams { temperature: Some(0.7), ..base(11) }),
        ("top_k", SamplingParams { top_k: Some(7), ..base(12) }),
        ("top_p", SamplingParams { top_p: Some(0.6), ..base(13) }),
        ("min_p", SamplingParams { min_p: Some(0.2), ..base(14) }),
        (
            "all filters",
            SamplingParams { top_k: Some(40), top_p: Some(0.8), min_p: Some(0.05), ..base(15) },
        ),
        ("bias", SamplingParams { logit_bias: bias, ..base(16) }),
        ("greedy repetition", SamplingParams { repetition_penalty: Some(1.7), ..greedy.clone() }),
        (
            "penalties",
            SamplingParams {
                repetition_penalty: Some(1.2),
                presence_penalty: 0.7,
                frequency_penalty: 0.4,
                top_p: Some(0.9),
                ..base(17)
            },
        ),
    ]
}

/// What the reference has chosen at every step, given the tokens before it, and how often it said
/// otherwise only because two ids were as good as equal.
fn judge(name: &str, engine: &Engine, p: &SamplingParams, done: &Completion) {
    let chosen = &done.token_ids;
    let ids = [&PROMPT[..], &chosen[..chosen.len() - 1]].concat();
    let logits = engine.logits(&ids, LogitsPath::Decode).unwrap();
    let s = Sampling {
        temperature: p.temperature.unwrap() as f32,
        top_p: p.top_p.unwrap() as f32,
        min_p: p.min_p.unwrap() as f32,
        repetition_penalty: p.repetition_penalty.unwrap() as f32,
        presence_penalty: p.presence_penalty as f32,
        frequency_penalty: p.frequency_penalty as f32,
        top_k: p.top_k.unwrap(),
        logprobs: 0,
        seed: p.seed.unwrap(),
    };
    let bias: Vec<_> = p.logit_bias.iter().map(|(id, b)| (*id, *b as f32)).collect();
    let mut counts = vec![0; logits.vocab];
    PROMPT.iter().for_each(|id| counts[*id as usize] = SEEN_IN_PROMPT);
    let mut scratch = Scratch::new(logits.vocab);
    let mut ties = 0;
    for (i, token) in chosen.iter().enumerate() {
        let position = PROMPT.len() + i;
        let banned = if i < p.min_tokens { &p.stop_token_ids[..] } else { &[] };
        let mut row = logits.values[(position - 1) * logits.vocab..][..logits.vocab].to_vec();
        let rules = Rules { bias: &bias, counts: &counts, banned, mask: None };
        let mut ask = |row: &[f32]| sample(row, &s, &rules, position as u32, &mut scratch).id;
        if ask(&row) != *token {
            row[*token as usize] += 1e-3;
            assert_eq!(ask(&row), *token, "{name}: token {i} of {chosen:?}");
            ties += 1;
        }
        counts[*token as usize] += 1;
    }
    assert!(ties <= 1, "{name}: {ties} of {} steps differ by a hair", chosen.len());
}

/// Each way alone, against the reference; then four at a time, token for token the same.
fn choices(folder: &str, warp: u32) {
    let engine = open_simulated(&fixture(folder), warp);
    let ways = ways(12);
    let alone: Vec<_> = ways.iter().map(|(_, p)| generate(&engine, &PROMPT, p)).collect();
    for ((name, params), done) in ways.iter().zip(&alone) {
        assert_eq!(done.token_ids.len(), 12, "{name}");
        judge(name, &engine, params, done);
    }
    let start = |p: &SamplingParams| engine.stream(request(&PROMPT, p)).unwrap();
    for (ways, alone) in ways.chunks(4).zip(alone.chunks(4)) {
        let streams: Vec<_> = ways.iter().map(|(_, p)| start(p)).collect();
        for ((mut stream, (name, _)), alone) in streams.into_iter().zip(ways).zip(alone) {
            let beside = stream.completion().unwrap().token_ids;
            assert_eq!(beside, alone.token_ids, "{name}: neighbours change a token");
        }
    }
}

#[test]
fn choices_are_the_references_and_neighbours_change_none() {
    choices("llama", 32);
}

#[test]
fn choices_over_lanes_are_the_references_too() {
    choices("laneformer_d2", 64);
}

#[test]
fn stop_ids_end_a_sequence_and_wait_for_min_tokens() {
    let engine = open_simulated(&fixture("llama"), 64);
    let free = generate(&engine, &PROMPT, &base(10, 5));
    let stop = free.token_ids[4];
    let first = free.token_ids.iter().position(|id| *id == stop).unwrap();
    let params = SamplingParams { stop_token_ids: vec![stop], ..base(10, 5) };
    let done = generate(&engine, &PROMPT, &params);
    assert_eq!(done.token_ids, free.token_ids[..=first]);
    assert_eq!(done.finish_reason, FinishReason::Stop);
    assert_eq!(done.stop_reason, Some(StopReason::Id(stop)));
    let later = SamplingParams { min_tokens: 8, ..params };
    let done = generate(&engine, &PROMPT, &later);
    assert!(!done.token_ids[..8].contains(&stop), "{:?}", done.token_ids);
    judge("min_tokens", &engine, &later, &done);
}

#[test]
fn logprobs_are_those_of_the_raw_logits() {
    let engine = open_simulated(&fixture("llama"), 32);
    let params = SamplingParams { logprobs: Some(5), ..base(6, 9) };
    let tokens: Vec<_> =
        engine.stream(request(&PROMPT, &params)).unwrap().map(Result::unwrap).collect();
    let chosen: Vec<u32> = tokens.iter().flat_map(|t| t.token_ids.clone()).collect();
    let plain = generate(&engine, &PROMPT, &base(6, 9));
    assert_eq!(chosen, plain.token_ids, "asking for log-probabilities changes a token");
    let ids = [&PROMPT[..], &chosen[..]].concat();
    let logits = engine.logits(&ids, LogitsPath::Decode).unwrap();
    for (i, token) in tokens.iter().enumerate() {
        let row = &logits.values[(PROMPT.len() + i - 1) * logits.vocab..][..logits.vocab];
        let mut all = vec![(0, 0.0); logits.vocab];
        top_logprobs(row, &mut all);
        let of = |id: u32| all.iter().find(|(other, _)| *other == id).unwrap().1;
        assert!((token.logprob.unwrap() - of(chosen[i])).abs() < 1e-3, "{token:?}");
        assert_eq!(token.top_logprobs.len(), 5);
        for (ours, (id, logprob)) in token.top_logprobs.iter().zip(&all) {
            assert_eq!(ours.id, *id, "{token:?} {:?}", &all[..5]);
            assert!((ours.logprob - logprob).abs() < 1e-3, "{token:?} {:?}", &all[..5]);
        }
    }
}

#[test]
fn a_cancelled_stream_ends_soon_and_leaves_its_slot_to_others() {
    let engine = open_simulated(&fixture("laneformer_d2"), 32);
    let before = generate(&engine, &PROMPT, &base(8, 3));
    let mut stream = engine.stream(request(&PROMPT, &base(300, 3))).unwrap();
    let mut seen: Vec<u32> = Vec::new();
    while seen.len() < 4 {
        seen.extend(stream.next().unwrap().unwrap().token_ids);
    }
    stream.cancel();
    let done = stream.completion().unwrap();
    assert_eq!(done.finish_reason, FinishReason::Cancelled);
    assert!(done.token_ids.len() < 40, "{} tokens after a cancel at 4", done.token_ids.len());
    assert_eq!(done.token_ids[..4], before.token_ids[..4]);
    let after: Vec<_> =
        (0..4).map(|_| engine.stream(request(&PROMPT, &base(8, 3))).unwrap()).collect();
    for mut stream in after {
        assert_eq!(stream.completion().unwrap().token_ids, before.token_ids);
    }
}

#[test]
fn a_prompt_of_several_pages_is_computed_once() {
    let folder = fixture("own_mistral");
    let engine = open_simulated(&folder, 32);
    let ids: Vec<u32> = (0..200u32).map(|i| (i * 37 + i * i * 11) % 500).collect();
    let ours = engine.logits(&ids, LogitsPath::Prefill).unwrap();
    let cpu = open_on(&folder, "cpu").logits(&ids, LogitsPath::Prefill).unwrap();
    let error = relative(&ours.values, &cpu.values);
    assert!(error <= super::PREFILL_GATE, "{error:.2e} from the CPU's logits");
    let first = generate(&engine, &ids, &base(6, 1));
    let again = generate(&engine, &ids, &base(6, 1));
    assert_eq!(first.usage.cached_tokens, 0);
    assert_eq!(again.usage.cached_tokens, 192);
    assert_eq!(first.token_ids, again.token_ids);
    let whole = [&ids[..], &first.token_ids[..5]].concat();
    let fed = engine.logits(&whole, LogitsPath::Prefill).unwrap();
    let mut scratch = Scratch::new(fed.vocab);
    let s = Sampling { temperature: 1.0, seed: 1, ..Sampling::greedy() };
    for (i, token) in first.token_ids.iter().enumerate() {
        let row = &fed.values[(199 + i) * fed.vocab..][..fed.vocab];
        let choice = sample(row, &s, &Rules::default(), 200 + i as u32, &mut scratch);
        assert_eq!(choice.id, *token, "token {i}");
    }
}

#[test]
fn a_session_finds_its_past() {
    let engine = open_simulated(&fixture("llama"), 32);
    let mut session = engine.session(None).unwrap();
    let say = |text: &str| Prompt::Text(text.to_owned());
    session.generate(say(&"abcdefgh ".repeat(16)), base(4, 2)).unwrap();
    let mut fork = session.fork().unwrap();
    let a = session.generate(say("and"), base(4, 2)).unwrap();
    let b = fork.generate(say("and"), base(4, 2)).unwrap();
    assert!(a.usage.cached_tokens >= 64, "{:?}", a.usage);
    assert_eq!((&a.token_ids, a.usage.prompt_tokens), (&b.token_ids, b.usage.prompt_tokens));
}

#[test]
fn tokens_stay_the_same_across_the_end_of_seqnos() {
    let folder = fixture("laneformer_d2");
    let usual = open_simulated(&folder, 32);
    let wanted = generate(&usual, &PROMPT, &base(6, 4)).token_ids;
    // The runner starts anew where a longest launch would pass 2^32, with as many seqnos a step as
    // there are layers, and one: here behind the first request.
    let first_seqno = u32::MAX / (6 + 1) - (1 << 20) - 4;
    let device = "sim:seed=7,warp=32,blocks=4";
    let late = Engine::builder(&folder).device(device).max_batch(4).first_seqno(first_seqno);
    let late = late.build().unwrap();
    for turn in 0..3 {
        assert_eq!(generate(&late, &PROMPT, &base(6, 4)).token_ids, wanted, "request {turn}");
    }
}

/// A prompt takes the columns that a sequence at work leaves free: a few positions a step, so that
/// the sequence goes on meanwhile, and neither changes the other.
#[test]
fn a_prompt_beside_a_sequence_holds_it_up_for_no_more_than_a_step() {
    for (name, warp) in [("own_llama_f16", 32), ("laneformer_d2", 64)] {
        let engine = open_simulated(&fixture(name), warp);
        let ids: Vec<u32> = (0..150u32).map(|i| 3 + (i * 37 + i * i * 11) % 300).collect();
        let long = generate(&engine, &PROMPT, &base(80, 8)).token_ids;
        let mut victim = engine.stream(request(&PROMPT, &base(80, 8))).unwrap();
        let mut tokens: Vec<_> = victim.by_ref().take(2).map(Result::unwrap).collect();
        let mut newcomer = engine.stream(request(&ids, &base(5, 9))).unwrap();
        let first = newcomer.next().unwrap().unwrap();
        tokens.extend(victim.map(Result::unwrap));
        let made: Vec<u32> = tokens.iter().flat_map(|t| t.token_ids.clone()).collect();
        assert_eq!(made, long, "{name}: the prompt beside it changes a token");
        let all = [&first.token_ids[..], &newcomer.completion().unwrap().token_ids[..]].concat();
        // Alone, and by then mostly from pages that it filled beside the other.
        let late = generate(&engine, &ids, &base(5, 9)).token_ids;
        assert_eq!(all[all.len() - 5..], late, "{name}: the sequence beside it changes a token");
        let steps = tokens.iter().filter(|t| t.t_ns < first.t_ns).count();
        assert!(steps >= 149 / 7, "{name}: {steps} tokens beside 149 positions, seven a step");
    }
}
