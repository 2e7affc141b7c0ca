//! Life of a request, on the fake device.

use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use super::fake::{next_token, open, tokenizer, Knobs, Setup, EOS, VOCAB};
use super::*;
use crate::primitive::{in_fork, poll};
use crate::request::{FinishReason, StopReason, Token};
use crate::stream::Next;

fn greedy(max_tokens: usize) -> SamplingParams {
    SamplingParams { max_tokens: Some(max_tokens), temperature: Some(0.0), ..Default::default() }
}

fn ids(prompt: &[u32], params: SamplingParams) -> Request {
    Request { prompt: Prompt::Ids(prompt.to_vec()), params }
}

fn text(prompt: &str, params: SamplingParams) -> Request {
    Request { prompt: Prompt::Text(prompt.to_owned()), params }
}

fn numbers(n: usize, salt: u32) -> Vec<u32> {
    (0..n as u32).map(|i| 100 + (i * 31 + salt * 7) % 3000).collect()
}

fn sane(knobs: &Knobs) {
    assert_eq!(*knobs.corrupt.lock().unwrap(), None);
}

/// Waits for something that another thread is about to do.
fn soon(what: impl Fn() -> bool) {
    let begin = Instant::now();
    while !what() {
        assert!(begin.elapsed() < Duration::from_secs(10), "it never happened");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn tokens_come_one_by_one_and_the_completion_sums_them_up() {
    let (engine, knobs) = open(&Setup::default());
    let mut params = greedy(20);
    params.logprobs = Some(3);
    let mut stream = engine.stream(text("def f(x):\n    return x", params)).unwrap();
    let tokens: Vec<Token> = stream.by_ref().map(Result::unwrap).collect();
    let prompt = engine.tokenize("def f(x):\n    return x", true).unwrap();
    let wanted: Vec<u32> = prompt.iter().cycle().take(20).copied().collect();
    let got: Vec<u32> = tokens.iter().flat_map(|t| t.token_ids.clone()).collect();
    assert_eq!(got, wanted);
    assert!(tokens.iter().enumerate().all(|(i, t)| t.index == i && t.token_ids.len() == 1));
    assert_eq!((tokens[5].logprob, tokens[5].top_logprobs.len()), (Some(-0.5), 3));
    assert_eq!(tokens[5].top_logprobs[2].id, wanted[5] + 2);
    let done = stream.completion().unwrap();
    let joined: String = tokens.iter().map(|t| t.text.as_str()).collect();
    assert_eq!(done.text, joined);
    assert_eq!(done.text, engine.detokenize(&wanted, true).unwrap());
    assert_eq!((done.finish_reason, done.stop_reason), (FinishReason::Length, None));
    assert_eq!(done.usage.completion_tokens, 20);
    assert_eq!(done.usage.prompt_tokens, prompt.len());
    let t = done.timings;
    assert_eq!((t.predicted_n, t.prompt_n), (20, prompt.len()));
    assert!(t.ttft_ms > 0.0 && t.itl_max_us >= t.itl_p99_us && t.itl_p99_us >= t.itl_p50_us);
    assert_eq!(t.bytes_per_token, 100);
    sane(&knobs);
}

#[test]
fn what_makes_no_sense_is_refused_before_it_is_queued() {
    let (engine, knobs) = open(&Setup { context: 128, ..Setup::default() });
    type Change = fn(&mut SamplingParams);
    let cases: &[(&str, Change)] = &[
        ("temperature", |p| p.temperature = Some(f64::NAN)),
        ("temperature", |p| p.temperature = Some(-0.1)),
        ("temperature", |p| p.temperature = Some(1e300)),
        ("top_p", |p| p.top_p = Some(0.0)),
        ("top_p", |p| p.top_p = Some(1.1)),
        ("min_p", |p| p.min_p = Some(-0.1)),
        ("repetition_penalty", |p| p.repetition_penalty = Some(0.0)),
        ("presence_penalty", |p| p.presence_penalty = f64::INFINITY),
        ("frequency_penalty", |p| p.frequency_penalty = f64::NAN),
        ("max_tokens", |p| p.max_tokens = Some(0)),
        ("min_tokens", |p| p.min_tokens = 99),
        ("stop strings", |p| p.stop = vec![String::new()]),
        ("stop must", |p| p.stop = vec!["x".into(); 65]),
        ("stop_token_ids", |p| p.stop_token_ids = vec![VOCAB as u32]),
        ("stop_token_ids", |p| p.stop_token_ids = (0..65).collect()),
        ("logprobs", |p| p.logprobs = Some(21)),
        ("logit_bias", |p| p.logit_bias = vec![(VOCAB as u32, 1.0)]),
        ("logit_bias", |p| p.logit_bias = vec![(1, f64::NAN)]),
        ("logit_bias", |p| p.logit_bias = vec![(1, 1.0); 1025]),
        ("timeout", |p| p.timeout = Some(0.0)),
        ("timeout", |p| p.timeout = Some(f64::NAN)),
    ];
    for (name, change) in cases {
        let mut params = greedy(4);
        change(&mut params);
        match engine.stream(ids(&[5, 6], params)).err() {
            Some(Error::InvalidRequest(detail)) => assert!(detail.contains(name), "{detail}"),
            other => panic!("{name}: {other:?}"),
        }
    }
    for bad in [&[][..], &[1, VOCAB as u32]] {
        assert!(matches!(engine.stream(ids(bad, greedy(1))).err(), Some(Error::InvalidRequest(_))));
    }
    for (prompt, max) in [(128, None), (100, Some(29)), (1, Some(usize::MAX))] {
        let params = SamplingParams { max_tokens: max, ..greedy(1) };
        let error = engine.stream(ids(&numbers(prompt, 0), params)).err();
        assert!(matches!(error, Some(Error::ContextLength { limit: 128, .. })), "{error:?}");
    }
    assert_eq!(knobs.passes.load(SeqCst), 0);
    let to_the_end = SamplingParams { max_tokens: None, ..greedy(1) };
    let done = engine.generate(ids(&numbers(100, 0), to_the_end)).unwrap();
    assert_eq!(done.token_ids.len(), 28);
}

#[test]
fn seeds_decide_and_defaults_come_from_the_model() {
    let (engine, _) = open(&Setup::default());
    let with = |seed| {
        let params = SamplingParams { seed, max_tokens: Some(30), ..Default::default() };
        engine.generate(ids(&[9, 8, 7], params)).unwrap()
    };
    let (a, b, c) = (with(Some(1)), with(Some(1)), with(Some(2)));
    assert_eq!(a.token_ids, b.token_ids);
    assert_ne!(a.token_ids, c.token_ids);
    let drawn = with(None);
    assert_eq!(with(Some(drawn.seed)).token_ids, drawn.token_ids);
    assert_ne!(with(None).seed, drawn.seed);
    let mut history = vec![9, 8, 7];
    for id in &a.token_ids {
        assert_eq!(*id, next_token(&history, 3, 1, false, VOCAB as u32));
        history.push(*id);
    }
}

#[test]
fn stop_strings_hit_across_tokens_and_leave_nothing_behind() {
    let (engine, knobs) = open(&Setup::default());
    let prompt = "alpha beta gamma delta";
    let plain = engine.generate(text(prompt, greedy(12))).unwrap();
    for stop in ["ta gam", "delta", "mma d", "a"] {
        let params = SamplingParams { stop: vec!["zzz".into(), stop.into()], ..greedy(400) };
        let mut stream = engine.stream(text(prompt, params)).unwrap();
        let tokens: Vec<Token> = stream.by_ref().map(Result::unwrap).collect();
        let done = stream.completion().unwrap();
        let cut = plain.text.find(stop).unwrap();
        assert_eq!(done.text, plain.text[..cut], "{stop:?}");
        let joined: String = tokens.iter().map(|t| t.text.as_str()).collect();
        assert_eq!(joined, done.text);
        assert_eq!(done.finish_reason, FinishReason::Stop);
        assert_eq!(done.stop_reason, Some(StopReason::Text(stop.into())));
        let behind = engine.detokenize(&done.token_ids, true).unwrap();
        assert!(behind.contains(stop), "the ids include what hit");
        let less = &done.token_ids[..done.token_ids.len() - 1];
        assert!(!engine.detokenize(less, true).unwrap().contains(stop), "and no more");
    }
    let late = SamplingParams { stop: vec!["a".into()], min_tokens: 9, ..greedy(400) };
    assert!(engine.generate(text(prompt, late)).unwrap().token_ids.len() >= 9);
    sane(&knobs);
}

#[test]
fn stop_ids_end_without_text() {
    let (engine, _) = open(&Setup::default());
    let prompt = [500, 501, EOS, 502];
    let done = engine.generate(ids(&prompt, greedy(10))).unwrap();
    assert_eq!(done.token_ids, [500, 501, EOS]);
    assert_eq!(done.stop_reason, Some(StopReason::Id(EOS)));
    let on = SamplingParams { ignore_eos: true, ..greedy(10) };
    assert_eq!(engine.generate(ids(&prompt, on)).unwrap().finish_reason, FinishReason::Length);
    let own = SamplingParams { stop_token_ids: vec![501], ..greedy(10) };
    let done = engine.generate(ids(&prompt, own)).unwrap();
    assert_eq!(done.text, engine.detokenize(&[500], true).unwrap());
    assert_eq!(done.stop_reason, Some(StopReason::Id(501)));
}

#[test]
fn text_held_back_at_the_end_is_in_the_last_token() {
    let (engine, _) = open(&Setup::default());
    // The bytes of one character, cut off before the last.
    let mut prompt = engine.tokenize("\u{1F9CA}", false).unwrap();
    assert!(prompt.len() > 1, "one token a byte or so");
    prompt.rotate_right(1);
    let n = prompt.len() - 1;
    let mut stream = engine.stream(ids(&prompt, greedy(n))).unwrap();
    let tokens: Vec<Token> = stream.by_ref().map(Result::unwrap).collect();
    let joined: String = tokens.iter().map(|t| t.text.as_str()).collect();
    let done = stream.completion().unwrap();
    assert_eq!((tokens.len(), &joined), (n, &done.text));
    assert_eq!(joined, engine.detokenize(&done.token_ids, true).unwrap());
}

#[test]
fn cancel_ends_within_a_token_and_a_drop_cancels() {
    let (engine, knobs) = open(&Setup::default());
    knobs.pass_us.store(2000, SeqCst);
    let mut stream = engine.stream(ids(&[7, 8], greedy(2000))).unwrap();
    assert!(stream.by_ref().take(5).all(|t| t.is_ok()));
    let before = knobs.passes.load(SeqCst);
    stream.cancel();
    let done = stream.completion().unwrap();
    assert_eq!(done.finish_reason, FinishReason::Cancelled);
    assert!(done.token_ids.len() >= 5);
    assert!(knobs.passes.load(SeqCst) <= before + 3);
    assert!(matches!(stream.try_next(), Ok(Next::Finished)));
    drop(engine.stream(ids(&[7, 8], greedy(2000))).unwrap());
    soon(|| engine.metrics().requests_cancelled == 2 && engine.metrics().running == 0);
    sane(&knobs);
}

#[test]
fn timeouts_end_running_and_waiting_requests() {
    let (engine, knobs) = open(&Setup { slots: 1, ..Setup::default() });
    knobs.pass_us.store(2000, SeqCst);
    let params = SamplingParams { timeout: Some(0.05), ..greedy(2000) };
    let mut running = engine.stream(ids(&[7, 8], greedy(300))).unwrap();
    let mut waiting = engine.stream(ids(&[7, 8], params.clone())).unwrap();
    let mut dropped = engine.stream(ids(&[7, 8], greedy(5))).unwrap();
    dropped.cancel();
    assert_eq!(dropped.completion().unwrap().finish_reason, FinishReason::Cancelled);
    let done = waiting.completion().unwrap();
    assert_eq!((done.finish_reason, done.token_ids.len()), (FinishReason::Timeout, 0));
    assert!(matches!(running.try_next(), Ok(Next::Token(_))));
    running.cancel();
    let done = engine.generate(ids(&[7, 8], params)).unwrap();
    assert_eq!(done.finish_reason, FinishReason::Timeout);
    assert!(!done.token_ids.is_empty());
}

#[test]
fn the_queue_is_bounded_and_first_come_first_served() {
    let (engine, knobs) = open(&Setup { slots: 2, queue: 3, ..Setup::default() });
    knobs.pass_us.store(500, SeqCst);
    let submit = |n| engine.stream(ids(&[7, 8], greedy(n)));
    let mut streams: Vec<_> = (0..5).map(|_| submit(60).unwrap()).collect();
    assert!(matches!(submit(1).err(), Some(Error::QueueFull(3))));
    let ends: Vec<u64> =
        streams.iter_mut().map(|s| s.by_ref().map(|t| t.unwrap().t_ns).next().unwrap()).collect();
    assert!(ends.windows(2).all(|w| w[0] <= w[1]), "{ends:?}");
    streams.iter_mut().for_each(|s| assert!(s.completion().is_ok()));
    soon(|| submit(1).is_ok());
}

#[test]
fn a_slow_reader_stalls_nobody_and_loses_nothing() {
    let (engine, _) = open(&Setup::default());
    let mut slow = engine.stream(ids(&[7, 8], greedy(1500))).unwrap();
    for _ in 0..20 {
        assert_eq!(engine.generate(ids(&[5], greedy(50))).unwrap().token_ids.len(), 50);
    }
    soon(|| engine.metrics().running == 0);
    assert_eq!(slow.by_ref().map(Result::unwrap).count(), 1500);
    assert_eq!(slow.completion().unwrap().finish_reason, FinishReason::Length);
}

#[test]
fn a_thousand_steady_tokens_allocate_nothing() {
    let (engine, knobs) = open(&Setup::default());
    knobs.pass_us.store(50, SeqCst);
    let params = SamplingParams { logprobs: Some(4), timeout: Some(60.0), ..greedy(1900) };
    let mut stream = engine.stream(ids(&numbers(100, 0), params.clone())).unwrap();
    let mut beside = engine.stream(ids(&numbers(70, 1), params)).unwrap();
    assert!(stream.by_ref().take(50).all(|t| t.is_ok()));
    assert!(beside.by_ref().take(50).all(|t| t.is_ok()));
    let before = knobs.allocations.load(SeqCst);
    assert_eq!(stream.by_ref().take(1000).filter(|t| t.is_ok()).count(), 1000);
    assert_eq!(knobs.allocations.load(SeqCst), before);
    assert!(before > 0 && beside.next().is_some());
}

#[test]
fn a_polled_descriptor_misses_nothing() {
    let (engine, knobs) = open(&Setup::default());
    knobs.pass_us.store(300, SeqCst);
    let mut stream = engine.stream(ids(&[7, 8], greedy(200))).unwrap();
    let fd = stream.poll_fd().unwrap();
    let mut count = 0;
    loop {
        assert!(poll(fd, 5000), "after {count} tokens");
        match stream.try_next().unwrap() {
            Next::Token(_) => count += 1,
            Next::Pending => {}
            Next::Finished => break,
        }
    }
    assert_eq!(count, 200);
    assert!(matches!(stream.recv_timeout(Duration::ZERO), Ok(Next::Finished)));
}

#[test]
fn equal_beginnings_are_computed_once() {
    let (engine, knobs) = open(&Setup::default());
    let long = numbers(1000, 1);
    engine.generate(ids(&long, greedy(4))).unwrap();
    let before = knobs.prefilled.load(SeqCst);
    let mut other = long.clone();
    other.extend([3, 4, 5]);
    let done = engine.generate(ids(&other, greedy(4))).unwrap();
    assert!(done.usage.cached_tokens >= 960, "{:?}", done.usage);
    assert_eq!(done.timings.cache_n, done.usage.cached_tokens);
    assert!(knobs.prefilled.load(SeqCst) - before < 64);
    sane(&knobs);
}

#[test]
fn many_threads_and_few_pages_keep_their_kv_apart() {
    let (engine, knobs) = open(&Setup { pages: 40, context: 600, ..Setup::default() });
    std::thread::scope(|scope| {
        for thread in 0..6u32 {
            let engine = engine.clone();
            scope.spawn(move || {
                for i in 0..60u32 {
                    let prompt = numbers(10 + (i * 37 + thread * 11) as usize % 300, i % 5);
                    let mut stream = engine.stream(ids(&prompt, greedy(100))).unwrap();
                    let take = if i % 3 == 0 { 20 } else { 1000 };
                    let got: Vec<u32> =
                        stream.by_ref().take(take).map(|t| t.unwrap().token_ids[0]).collect();
                    let wanted: Vec<u32> =
                        prompt.iter().cycle().take(take.min(100)).copied().collect();
                    assert_eq!(got, wanted);
                }
            });
        }
    });
    sane(&knobs);
}

#[test]
fn logits_run_beside_requests_on_private_pages() {
    let (engine, knobs) = open(&Setup::default());
    let prompt = numbers(150, 2);
    let mut beside = engine.stream(ids(&prompt, greedy(1000))).unwrap();
    for path in [LogitsPath::Prefill, LogitsPath::Decode] {
        let logits = engine.logits(&prompt, path).unwrap();
        assert_eq!((logits.tokens, logits.vocab), (150, VOCAB));
        for (at, row) in logits.values.chunks(VOCAB).enumerate() {
            assert_eq!(row[prompt[at] as usize], at as f32);
        }
    }
    assert_eq!(beside.completion().unwrap().token_ids.len(), 1000);
    assert!(engine.logits(&[], LogitsPath::Prefill).is_err());
    assert!(engine.logits(&numbers(3000, 0), LogitsPath::Prefill).is_err());
    sane(&knobs);
}

#[test]
fn closing_ends_running_and_waiting_requests_once() {
    let (engine, knobs) = open(&Setup { slots: 1, ..Setup::default() });
    knobs.pass_us.store(1000, SeqCst);
    let mut running = engine.stream(ids(&[7], greedy(2000))).unwrap();
    let mut waiting = engine.stream(ids(&[7], greedy(2000))).unwrap();
    assert!(running.next().is_some());
    engine.close();
    engine.close();
    assert!(engine.is_closed());
    let last = running.by_ref().last();
    assert!(matches!(last, Some(Err(Error::EngineClosed))), "{last:?}");
    assert!(running.next().is_none());
    assert!(matches!(waiting.next(), Some(Err(Error::EngineClosed))));
    assert!(matches!(waiting.completion(), Err(Error::EngineClosed)));
    assert!(matches!(engine.stream(ids(&[7], greedy(1))).err(), Some(Error::EngineClosed)));
    assert!(matches!(engine.logits(&[7], LogitsPath::Decode).err(), Some(Error::EngineClosed)));
    assert!(engine.session(None).is_err());
    assert_eq!(knobs.stopped.load(SeqCst), 1);
    assert_eq!(engine.metrics().requests_error, 2);
}

#[test]
fn a_failing_device_is_an_error_for_all_and_never_a_panic() {
    for panics in [false, true] {
        let (engine, knobs) = open(&Setup { slots: 1, ..Setup::default() });
        knobs.pass_us.store(1000, SeqCst);
        let mut running = engine.stream(ids(&[7], greedy(2000))).unwrap();
        let mut waiting = engine.stream(ids(&[7], greedy(2000))).unwrap();
        assert!(running.next().is_some());
        if panics { &knobs.panic } else { &knobs.fail }.store(true, SeqCst);
        let wanted = if panics { "told to panic" } else { "pulled the plug" };
        for error in [
            running.by_ref().last().unwrap().err(),
            waiting.completion().err(),
            engine.generate(ids(&[7], greedy(1))).err(),
        ] {
            match error {
                Some(Error::Device(detail)) => assert!(detail.contains(wanted), "{detail}"),
                other => panic!("{other:?}"),
            }
        }
        assert!(engine.is_closed());
        assert_eq!(knobs.stopped.load(SeqCst), 1);
    }
}

#[test]
fn logits_that_are_not_finite_end_one_request() {
    let (engine, knobs) = open(&Setup::default());
    knobs.not_finite.store(true, SeqCst);
    let error = engine.generate(ids(&numbers(100, 0), greedy(3))).unwrap_err();
    assert!(error.to_string().contains("not finite"), "{error}");
    knobs.not_finite.store(false, SeqCst);
    let done = engine.generate(ids(&numbers(100, 0), greedy(3))).unwrap();
    assert_eq!((done.token_ids.len(), done.usage.cached_tokens), (3, 0));
    sane(&knobs);
}

#[test]
fn requests_that_can_never_fit_are_refused() {
    let (engine, _) = open(&Setup { pages: 8, context: 1024, ..Setup::default() });
    let error = engine.generate(ids(&numbers(10, 0), greedy(600))).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error:?}");
    // What an idle session left is given up, and computed again when it speaks.
    let mut session = engine.session(None).unwrap();
    session.generate(Prompt::Text("x ".repeat(150)), greedy(2)).unwrap();
    assert_eq!(engine.generate(ids(&numbers(10, 0), greedy(500))).unwrap().token_ids.len(), 500);
    let again = session.generate(Prompt::Text("y".to_owned()), greedy(2)).unwrap();
    assert_eq!(again.usage.cached_tokens, 0);
}

/// Requests that together want more pages than there are: the youngest give theirs up and begin
/// anew, all tell the tokens that they would tell alone, once, and the oldest never waits.
#[test]
fn the_youngest_gives_its_pages_up_and_begins_anew() {
    for slots in [2, 3, 8] {
        let setup = Setup { pages: 16, context: 1024, slots, ..Setup::default() };
        let (engine, knobs) = open(&setup);
        knobs.pass_us.store(5, SeqCst);
        let params = |seed| SamplingParams {
            seed: Some(seed),
            logprobs: Some(1),
            ignore_eos: true,
            stop: if seed == 1 { vec!["\u{1}never".to_owned()] } else { vec![] },
            max_tokens: Some(700),
            ..Default::default()
        };
        let ask = |seed| engine.stream(ids(&numbers(40, seed as u32), params(seed))).unwrap();
        let streams: Vec<_> = (0..12).map(ask).collect();
        let mut ends = Vec::new();
        for (seed, mut stream) in (0..).zip(streams) {
            let tokens: Vec<Token> = stream.by_ref().map(Result::unwrap).collect();
            let done = stream.completion().unwrap();
            let mut history = numbers(40, seed as u32);
            for token in &tokens {
                let wanted = next_token(&history, 40, seed, false, VOCAB as u32);
                assert_eq!(token.token_ids, [wanted], "request {seed}");
                assert_eq!(token.top_logprobs[0].id, wanted);
                history.push(wanted);
            }
            assert_eq!(done.token_ids, history[40..]);
            assert_eq!((tokens.len(), done.usage.prompt_tokens), (700, 40));
            ends.push(tokens.last().unwrap().t_ns);
        }
        assert!(engine.metrics().preempted > 0, "{slots}: {:?}", engine.metrics());
        assert!(ends[0] < ends[11]);
        soon(|| engine.metrics().kv_pages_used == 0);
        sane(&knobs);
    }
}

/// Who waits for pages hears a cancel and its timeout, and what began anew is found by neither
/// twice.
#[test]
fn who_lacks_pages_can_be_cancelled() {
    let (engine, knobs) = open(&Setup { pages: 12, context: 768, slots: 4, ..Setup::default() });
    knobs.pass_us.store(200, SeqCst);
    let mut old = engine.stream(ids(&numbers(40, 0), greedy(720))).unwrap();
    let mut young = engine.stream(ids(&numbers(40, 1), greedy(600))).unwrap();
    soon(|| engine.metrics().preempted > 0);
    let late = SamplingParams { timeout: Some(0.02), ..greedy(20) };
    let late = engine.generate(ids(&numbers(40, 2), late)).unwrap();
    assert_eq!(late.finish_reason, FinishReason::Timeout);
    young.cancel();
    let young = young.completion().unwrap();
    assert_eq!(young.finish_reason, FinishReason::Cancelled);
    assert!(!young.token_ids.is_empty(), "what was told stays told");
    assert_eq!(old.completion().unwrap().token_ids.len(), 720);
    soon(|| engine.metrics().kv_pages_used == 0 && engine.metrics().running == 0);
    sane(&knobs);
}

#[test]
fn an_idle_engine_sleeps() {
    let (engine, knobs) = open(&Setup::default());
    engine.warmup().unwrap();
    soon(|| knobs.parks.load(SeqCst) > 0);
    let ticks = || {
        let stat = knobs.thread.lock().unwrap().join("stat");
        let stat = std::fs::read_to_string(stat).unwrap();
        let field = |n: usize| stat.rsplit(") ").next()?.split(' ').nth(n)?.parse::<u64>().ok();
        field(11).unwrap() + field(12).unwrap()
    };
    let (before, parks) = (ticks(), knobs.parks.load(SeqCst));
    std::thread::sleep(Duration::from_millis(300));
    assert!(knobs.parks.load(SeqCst) <= parks + 1);
    assert!(ticks() - before <= 1);
}

fn resident_kb() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmRSS")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
#[ignore = "measures the whole process: run alone"]
fn ten_thousand_requests_leave_memory_where_it_was() {
    let (engine, knobs) = open(&Setup::default());
    let run = |n: u32| {
        for i in 0..n {
            let prompt = numbers(20 + i as usize % 200, i % 50);
            let stop = if i % 7 == 0 { vec!["\u{1}never".to_owned()] } else { vec![] };
            let params = SamplingParams { stop, logprobs: Some(i as usize % 3), ..greedy(8) };
            let mut stream = engine.stream(ids(&prompt, params)).unwrap();
            if i % 5 > 0 {
                stream.completion().unwrap();
            }
        }
    };
    run(2000);
    let before = resident_kb();
    run(10_000);
    let grown = resident_kb().saturating_sub(before);
    assert!(grown < 2048, "{grown} kB more than {before}");
    sane(&knobs);
}

#[test]
#[ignore = "measures the whole process: run alone"]
fn a_thousand_engines_leave_nothing() {
    let cycle = |n: usize| {
        for i in 0..n {
            let (engine, knobs) = open(&Setup { context: 256, pages: 16, ..Setup::default() });
            let mut stream = engine.stream(ids(&[5, 6], greedy(100))).unwrap();
            if i % 2 == 0 {
                engine.close();
            }
            drop(engine);
            let end = stream.completion();
            assert_eq!(end.is_ok(), end.is_ok_and(|d| d.token_ids.len() == 100));
            drop(stream);
            assert_eq!(knobs.stopped.load(SeqCst), 1);
        }
    };
    let counts = || {
        let count = |of: &str| std::fs::read_dir(of).unwrap().count();
        (count("/proc/self/fd"), count("/proc/self/task"))
    };
    cycle(50);
    let (before, open) = (resident_kb(), counts());
    cycle(1000);
    let grown = resident_kb().saturating_sub(before);
    assert!(grown < 2048, "{grown} kB more than {before}");
    assert_eq!(counts(), open);
}

#[test]
fn a_fork_of_the_process_is_told_so() {
    let (engine, _) = open(&Setup::default());
    engine.warmup().unwrap();
    let clone = engine.clone();
    let refused = |e: Option<Error>| matches!(e, Some(Error::InvalidRequest(_)));
    assert!(in_fork(|| {
        let good = refused(clone.stream(ids(&[5], greedy(1))).err())
            && refused(clone.logits(&[5], LogitsPath::Decode).err())
            && refused(clone.session(None).err());
        clone.close();
        good
    }));
    engine.warmup().unwrap();
}

#[test]
fn a_tokenizer_of_a_test_matches_its_fake() {
    assert_eq!(tokenizer(true).vocab(), VOCAB);
    assert!(!tokenizer(false).has_chat_template());
}
