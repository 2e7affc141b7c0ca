//! The sampler against a plain one that sorts everything, and against statistics.
#![allow(clippy::unwrap_used)]

use super::*;
use proptest::prelude::*;

/// Everything spelled out, nothing skipped.
fn oracle(
    logits: &[f32],
    s: &Sampling,
    bias: &[(u32, f32)],
    counts: &[u32],
    banned: &[u32],
    position: u32,
) -> Option<u32> {
    let mut all: Vec<(f64, u32)> = Vec::new();
    for (id, &raw) in (0u32..).zip(logits) {
        let mut l = f64::from(raw);
        for b in bias.iter().filter(|b| b.0 == id) {
            l += f64::from(b.1);
        }
        let count = counts[id as usize];
        if count != 0 {
            let r = f64::from(s.repetition_penalty);
            l = if l > 0.0 { l / r } else { l * r };
        }
        let outputs = count & 0x7fff_ffff;
        if outputs > 0 {
            l -= f64::from(s.presence_penalty);
        }
        l -= f64::from(s.frequency_penalty) * f64::from(outputs);
        if !banned.contains(&id) && l != f64::NEG_INFINITY {
            all.push((l, id));
        }
    }
    let rank =
        |a: &(f64, u32), b: &(f64, u32)| b.0.partial_cmp(&a.0).unwrap().then_with(|| a.1.cmp(&b.1));
    if s.temperature == 0.0 {
        all.sort_by(rank);
        return all.first().map(|a| a.1);
    }
    all.iter_mut().for_each(|a| a.0 /= f64::from(s.temperature));
    let max = all.iter().map(|a| a.0).fold(f64::NEG_INFINITY, f64::max);
    if s.top_k > 0 && (s.top_k as usize) < all.len() {
        all.sort_by(rank);
        all.truncate(s.top_k as usize);
    }
    if s.top_p < 1.0 {
        let wanted = f64::from(s.top_p) * all.iter().map(|a| (a.0 - max).exp()).sum::<f64>();
        all.sort_by(rank);
        let mut mass = 0.0;
        all.retain(|a| {
            let keep = mass < wanted || a.0 == max && mass == 0.0;
            mass += (a.0 - max).exp();
            keep
        });
    }
    if s.min_p > 0.0 {
        all.retain(|a| a.0 - max >= f64::from(s.min_p).ln());
    }
    let score = |a: &(f64, u32)| {
        let key = [s.seed as u32, (s.seed >> 32) as u32];
        let x = philox::philox4x32_10(key, [a.1, 0, position, 0])[0];
        a.0 - (-((f64::from(x) + 0.5) / 4294967296.0).ln()).ln()
    };
    all.sort_by_key(|a| a.1);
    let mut best: Option<(f64, u32)> = None;
    for a in &all {
        if best.is_none_or(|b| score(a) > b.0) {
            best = Some((score(a), a.1));
        }
    }
    best.map(|b| b.1)
}

fn plain(logits: &[f32], s: &Sampling, position: u32) -> Choice {
    sample(logits, s, &Rules::default(), position, &mut Scratch::new(logits.len()))
}

fn any_sampling() -> impl Strategy<Value = Sampling> {
    (
        prop_oneof![Just(0.0f32), 0.01f32..3.0, Just(1.0f32)],
        prop_oneof![Just(1.0f32), 0.001f32..1.0, Just(0.9f32)],
        prop_oneof![Just(0.0f32), 0.0001f32..1.0, Just(1.0f32)],
        prop_oneof![Just(1.0f32), 0.5f32..2.0],
        prop_oneof![Just(0.0f32), -2.0f32..2.0],
        prop_oneof![Just(0.0f32), -2.0f32..2.0],
        prop_oneof![Just(0u32), 1u32..40, Just(2000u32)],
        any::<u64>(),
    )
        .prop_map(|(temperature, top_p, min_p, rep, presence, frequency, top_k, seed)| {
            Sampling {
                temperature,
                top_p,
                min_p,
                repetition_penalty: rep,
                presence_penalty: presence,
                frequency_penalty: frequency,
                top_k,
                logprobs: 0,
                seed,
            }
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]
    #[test]
    fn agrees_with_the_plain_one(
        s in any_sampling(),
        // Coarse values make ties common; the scale makes flat and peaked distributions.
        raw in prop::collection::vec(-40i32..40, 1..700),
        scale in prop_oneof![Just(0.0f32), Just(0.25), Just(0.01), Just(1.0)],
        bias in prop::collection::vec((0u32..700, -5.0f32..5.0), 0..4),
        seen in prop::collection::vec((0usize..700, any::<bool>(), 0u32..4), 0..30),
        banned in prop::collection::vec(0u32..700, 0..3),
        masked in prop::option::of(prop::collection::vec(any::<u32>(), 0..23)),
        position in any::<u32>(),
    ) {
        let logits: Vec<f32> = raw.iter().map(|&r| r as f32 * scale).collect();
        let mut counts = vec![0u32; logits.len()];
        for (id, prompt, n) in seen {
            if let Some(c) = counts.get_mut(id) {
                *c = n | if prompt { SEEN_IN_PROMPT } else { 0 };
            }
        }
        let mut scratch = Scratch::new(logits.len());
        let masks = crate::mask::Masks::new(logits.len(), 0);
        masks.write(7, masked.as_deref().unwrap_or_default());
        let mask = masked.as_ref().and_then(|_| masks.read(7));
        let rules = Rules { bias: &bias, counts: &counts, banned: &banned, mask };
        let got = sample(&logits, &s, &rules, position, &mut scratch);
        // What a mask does not allow is as what is banned.
        let allowed = |words: &[u32], id: u32| {
            words.get(id as usize / 32).is_some_and(|word| word & 1 << (id % 32) != 0)
        };
        let ids = 0..logits.len() as u32;
        let gone = ids.filter(|id| masked.as_deref().is_some_and(|words| !allowed(words, *id)));
        let banned: Vec<u32> = banned.iter().copied().chain(gone).collect();
        match oracle(&logits, &s, &bias, &counts, &banned, position) {
            Some(want) => prop_assert_eq!((got.id, got.bad), (want, false)),
            None => prop_assert!(got.bad),
        }
    }

    #[test]
    fn top_logprobs_are_the_sorted_softmax(
        raw in prop::collection::vec(-9i32..9, 1..60),
        k in 0usize..25,
    ) {
        let logits: Vec<f32> = raw.iter().map(|&r| r as f32 * 0.5).collect();
        let norm = logits.iter().map(|&l| f64::from(l).exp()).sum::<f64>().ln();
        let mut want: Vec<(u32, f64)> =
            (0u32..).zip(&logits).map(|(i, &l)| (i, f64::from(l) - norm)).collect();
        want.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap().then(a.0.cmp(&b.0)));
        let mut out = vec![(0, 0.0); k];
        prop_assert_eq!(top_logprobs(&logits, &mut out), k.min(logits.len()));
        for (got, want) in out.iter().zip(&want) {
            prop_assert_eq!(got.0, want.0);
            prop_assert!((f64::from(got.1) - want.1).abs() < 1e-5);
        }
        let s = Sampling { logprobs: 1, ..Sampling::greedy() };
        let choice = plain(&logits, &s, 0);
        prop_assert!((f64::from(choice.logprob) - want[0].1).abs() < 1e-5);
    }
}

/// Chi-square of 100,000 draws at successive positions; 31 degrees of freedom, the 0.1 % point
/// is 61.1.
#[test]
fn draws_follow_the_distribution() {
    let logits: Vec<f32> = (0..32).map(|i| ((i * 37) % 32) as f32 * 0.12).collect();
    let s = Sampling { temperature: 0.8, seed: 0x1234_5678_9abc, ..Sampling::greedy() };
    let mut scratch = Scratch::new(32);
    let mut hits = [0u32; 32];
    let draws = 100_000u32;
    for position in 0..draws {
        hits[sample(&logits, &s, &Rules::default(), position, &mut scratch).id as usize] += 1;
    }
    let weights: Vec<f64> = logits.iter().map(|&l| (f64::from(l) / 0.8).exp()).collect();
    let total: f64 = weights.iter().sum();
    let chi: f64 = (0..32)
        .map(|i| {
            let want = weights[i] / total * f64::from(draws);
            (f64::from(hits[i]) - want).powi(2) / want
        })
        .sum();
    assert!(chi < 61.1, "chi-square {chi}");
    assert!(chi > 8.0, "chi-square {chi}: too even to be random");
}

#[test]
fn edges() {
    let logits = [1.0, 5.0, 5.0, 2.0];
    let warm = Sampling { temperature: 1.5, seed: 3, ..Sampling::greedy() };
    assert_eq!(plain(&logits, &Sampling::greedy(), 0).id, 1, "ties go to the lower id");
    for position in 0..200 {
        let id = |s: Sampling| plain(&logits, &s, position).id;
        assert_eq!(id(Sampling { top_k: 1, ..warm }), 1);
        assert_eq!(id(Sampling { top_p: 1e-9, ..warm }), 1);
        assert_eq!(id(Sampling { top_p: 0.0, ..warm }), 1);
        assert!([1, 2].contains(&id(Sampling { min_p: 1.0, ..warm })));
        let mut scratch = Scratch::new(4);
        let choose = |bias: &[(u32, f32)], banned: &[u32], scratch: &mut Scratch| {
            let rules = Rules { bias, banned, ..Rules::default() };
            sample(&logits, &warm, &rules, position, scratch)
        };
        assert_eq!(choose(&[(3, 1e30)], &[], &mut scratch).id, 3);
        assert_eq!(choose(&[(9, 1e30)], &[0, 1, 2], &mut scratch).id, 3, "all banned but one");
        assert!(choose(&[], &[0, 1, 2, 3], &mut scratch).bad);
        assert!(choose(&[(0, f32::NAN)], &[], &mut scratch).bad);
    }
    let tiny = Sampling { temperature: f32::MIN_POSITIVE, ..warm };
    assert_eq!(plain(&[3.0, f32::MAX, f32::MIN], &tiny, 0).id, 1);
}

#[test]
fn broken_logits_are_told() {
    for s in [Sampling::greedy(), Sampling { temperature: 1.0, ..Sampling::greedy() }] {
        for wrong in [f32::NAN, f32::INFINITY] {
            for at in [0, 31, 32, 69] {
                let mut logits = vec![0.5; 70];
                logits[at] = wrong;
                assert!(plain(&logits, &s, 0).bad);
            }
        }
        assert!(plain(&[], &s, 0).bad);
        assert!(plain(&[f32::NEG_INFINITY; 3], &s, 0).bad);
        assert_eq!(plain(&[f32::NEG_INFINITY, 0.0], &s, 0).id, 1);
    }
}

/// The largest 32-bit draw is what the prune assumes.
#[test]
fn gumbel_bound_holds() {
    assert!(gumbel(u32::MAX) < GUMBEL_MAX && gumbel(u32::MAX) > GUMBEL_MAX - 0.01);
}

/// Not a gate (machines are shared): `cargo test sample -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn times() {
    let key = |i: u32| philox::uniform(philox::bits(1, 2, i));
    let logits: Vec<f32> = (0..32_000).map(|i| (key(i) * 20.0 - 10.0) as f32).collect();
    let flat = vec![0.0f32; 32_000];
    let warm = Sampling { temperature: 1.0, ..Sampling::greedy() };
    let mut scratch = Scratch::new(32_000);
    for (name, logits, s) in [
        ("greedy", &logits, Sampling::greedy()),
        ("greedy, logprobs", &logits, Sampling { logprobs: 1, ..Sampling::greedy() }),
        ("temperature", &logits, warm),
        ("temperature, flat", &flat, warm),
        ("top_k 40", &logits, Sampling { top_k: 40, ..warm }),
        ("top_p 0.9", &logits, Sampling { top_p: 0.9, ..warm }),
        ("top_p 0.9, flat", &flat, Sampling { top_p: 0.9, ..warm }),
        ("min_p 0.05", &logits, Sampling { min_p: 0.05, ..warm }),
    ] {
        let mut times: Vec<f64> = (0..101)
            .map(|p| {
                let t = std::time::Instant::now();
                std::hint::black_box(sample(logits, &s, &Rules::default(), p, &mut scratch));
                t.elapsed().as_secs_f64() * 1e6
            })
            .collect();
        times.sort_by(f64::total_cmp);
        eprintln!("{name:20} {:8.1} us", times[50]);
    }
}
