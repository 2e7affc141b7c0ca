//! DeepSeek-V4 in the monokernel: several residual streams, attention over a window and entries
//! with an indexer, experts by token. Sequences taken up at any position and behind copies of
//! running softmaxes, on one machine and on two.

use kie_core::engine::Engine;
use kie_core::request::{EngineConfig, Prompt, Request, SamplingParams};

use super::failures::{all_are_found_out, Mutant};
use super::support::{goldens, half};
use super::{fixture, two_at_a_time};

const NAME: &str = "own_deepseek_v4";

fn open(device: &str) -> Engine {
    let folder = fixture(NAME);
    let config = EngineConfig { max_batch: 4, ..EngineConfig::default() };
    Engine::builder(&folder).config(config).dtype(half(&folder)).device(device).build().unwrap()
}

/// Tokens with the bits of their log-probabilities, and how many of a prompt the cache had.
type Bits = (Vec<(u32, u32)>, usize);

fn bits(mut stream: kie_core::TokenStream) -> Bits {
    let done = stream.completion().unwrap();
    let all = done.logprobs.unwrap();
    (all.iter().map(|t| (t.id, t.logprob.to_bits())).collect(), done.usage.cached_tokens)
}

/// A sequence's bits are its own: taken up again at any of its positions, beside others, and where
/// the cache has its entries and a copy of its running softmaxes; entries of 128 positions are half
/// done then.
#[test]
fn entries_go_on_with_their_bits_from_any_position() {
    let jobs = [
        ("sim:blocks=4,seed=7", 125, &[4, 7][..], &[5][..]),
        ("sim:ranks=2,blocks=2,seed=8,warp=64", 61, &[4, 7], &[6]),
    ];
    two_at_a_time(jobs.into(), |(device, count, again, beside)| {
        let engine = open(device);
        let ask = |ids: &[u32], count: usize| {
            let params = SamplingParams {
                max_tokens: Some(count),
                temperature: Some(0.0),
                logprobs: Some(2),
                ignore_eos: true,
                ..SamplingParams::default()
            };
            engine.stream(Request { prompt: Prompt::Ids(ids.to_vec()), params }).unwrap()
        };
        let prompt = &goldens(&fixture(NAME), "").pop().unwrap().ids[..count];
        let (whole, _) = bits(ask(prompt, 8));
        let ids: Vec<u32> = prompt.iter().copied().chain(whole.iter().map(|t| t.0)).collect();
        let mut cached = Vec::new();
        for at in again.iter().copied() {
            let (tokens, behind) = bits(ask(&ids[..count + at], 8 - at));
            assert_eq!(tokens, whole[at..], "{device}: token {at}");
            cached.push(behind);
        }
        assert!(cached.contains(&(count / 64 * 64 + 64)), "copies are used: {cached:?}");
        let beside = beside.iter().map(|at| (*at, ask(&ids[..count + at], 8 - at)));
        let beside: Vec<_> = beside.collect();
        for (at, stream) in beside {
            assert_eq!(bits(stream).0, whole[at..], "{device}: token {at} beside others");
        }
    });
}

/// Name, what the sources say, what they should not say.
const MUTANTS: &[Mutant] = &[
    (
        "parts of the streams are not waited for",
        "if (block < kBlocksPerLane && seqno_of(v[i]) != b.seqno)\n                    v[i] =",
        "if (block < kBlocksPerLane)\n                    v[i] = (u64)b.seqno << 32 | (u32)",
    ),
    (
        "streams join by columns",
        "comb[from * kHyperStreams + to] * s[from][i];",
        "comb[to * kHyperStreams + from] * s[from][i];",
    ),
    (
        "a launch goes on from the running softmaxes that it writes",
        "return running_at<C>(args, b, layer, column, half ^ 1, n);",
        "return running_at<C>(args, b, layer, column, half, n);",
    ),
    (
        "positions of a prompt begin where the first one did",
        "if (c <= sequences) {\n                const u8* from = running_from",
        "if (c <= live) {\n                const u8* from = running_from",
    ),
    (
        "an entry has nothing of the one before",
        "if constexpr (C::kSets > 1) state[C::kSets - 1] = state[0];",
        "if constexpr (C::kSets > 1) state[C::kSets - 1] = {-infinity(), 0, 0};",
    ),
    (
        "index keys have the places of entries",
        "place_of_state<C>(args, b, layer, kKind);",
        "place_of_state<C>(args, b, layer, 1);",
    ),
    ("equal scores go to the higher entry", "before(equal) < ties)", "before(equal) + 1 < ties)"),
    ("heads have no sink", "mass = exp2_f(sink - top);", "mass = 0;"),
    ("tokens' experts are the first one's", "(long)tokens_of(b)[column] * C::kChosen;", "0;"),
];

#[test]
#[ignore = "minutes: cargo test -p kie-core --test monokernel every_mutant_of_entries -- --ignored"]
fn every_mutant_of_entries_is_found_out() {
    all_are_found_out(NAME, "blocks=4", 2, MUTANTS);
}
