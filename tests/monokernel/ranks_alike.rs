//! All ranks hold the same bits, whatever the interleaving. The host reads rank 0's tokens; here
//! the kernels' sources are edited so that every rank folds what it holds of a run, step after
//! step, into numbers behind its symmetric memory, and the words that ranks push to each other are
//! compared after each launch.

use kie_core::engine::Engine;
use kie_core::request::Request;

use super::failures::{open_over, told, Behind, Edit};
use super::support::{goldens, greedy_request};
use super::{fixture, two_at_a_time};

/// What edits write: where pushed words begin and end, a fold a block and column, one a place of
/// the residual.
const AT_TOKENS: usize = 2;
const AT_RESIDUAL: usize = 1024;
const BYTES: usize = 8 * (AT_RESIDUAL + (1 << 18));

/// The residual as floats, of each owner's rows after each addition.
const RESIDUAL: Edit = (
    "        const u32 both = pack_half2(own.v[item][0], own.v[item][1]);",
    "        const u32 both = pack_half2(own.v[item][0], own.v[item][1]);
        u64* seen = args.poison + 16 + 1024 + (to + at - args.words);
        *seen = (*seen ^ (*seen >> 29)) * 0x9e3779b97f4a7c15ull +
                ((u64)bits(own.v[item][1]) << 32 | bits(own.v[item][0])) + 1;",
);
/// The token that each block goes on with, and the number that it was offered with.
const TOKEN: Edit = (
    "    tokens_of(b)[c] = id < (u32)kVocabAll ? id : 0;",
    "    tokens_of(b)[c] = id < (u32)kVocabAll ? id : 0;
    args.poison[16] = kAtOther, args.poison[17] = kAtTally;
    u64* seen = args.poison + 16 + 2 + block() * 8 + c;
    *seen = (*seen ^ (*seen >> 29)) * 0x9e3779b97f4a7c15ull +
            ((u64)bits(best.value) << 32 | id) + 1;",
);

/// Fixture, ranks, blocks of each, and whether sums are made at once, so that each lane's residual
/// is the same: dense models with whole kv heads, shared ones and an uneven number; lanes over
/// ranks, whose words arrive later.
const ALIKE: &[(&str, u32, u32, bool)] = &[
    ("llama", 2, 8, true),
    ("qwen2", 4, 4, true),
    ("own_llama_fp8_tied", 3, 6, true),
    ("own_llama_fp8_tied", 8, 4, true),
    ("laneformer_d2", 2, 8, false),
    ("laneformer_d2", 4, 4, false),
    ("own_laneformer_mixed", 8, 3, false),
];

/// What a run leaves.
struct Run {
    tokens: Vec<u32>,
    ranks: Vec<Behind>,
}

impl Run {
    fn new(name: &str, device: &str, edits: &[Edit], request: Request) -> Self {
        let (runner, ranks) = told("kie_decode", device, edits, BYTES);
        let engine: Engine = open_over(name, runner);
        let tokens = engine.generate(request).unwrap().token_ids;
        engine.close();
        Self { tokens, ranks }
    }

    /// The token that every block of every rank went on with, folded; 0 where there is no block.
    fn folds(&self, rank: usize) -> Vec<u64> {
        self.ranks[rank].told()[AT_TOKENS..AT_RESIDUAL].to_vec()
    }

    fn residual(&self, rank: usize) -> Vec<u64> {
        self.ranks[rank].told()[AT_RESIDUAL..].to_vec()
    }

    /// The first thing that the ranks do not agree on.
    fn differs(&self, at_once: bool) -> Option<String> {
        let (first, landings) = (self.folds(0), |r: &Behind| r.landings.lock().unwrap().clone());
        let block = first[0];
        assert!(block != 0, "somebody chose a token");
        for rank in 0..self.ranks.len() {
            let mut folds = self.folds(rank).into_iter().step_by(8).filter(|fold| *fold != 0);
            if !folds.all(|fold| fold == block) {
                return Some(format!("tokens of rank {rank}"));
            }
            if at_once && self.residual(rank) != self.residual(0) {
                return Some(format!("residual of rank {rank}"));
            }
            let (ours, theirs) = (landings(&self.ranks[rank]), landings(&self.ranks[0]));
            assert!(theirs.len() > 4 && theirs.last().is_some_and(|words| !words.is_empty()));
            if let Some(at) = (0..theirs.len()).find(|at| ours[*at] != theirs[*at]) {
                return Some(format!("words of rank {rank} after launch {at}"));
            }
        }
        None
    }
}

/// Tokens one by one: a launch each, so that the words of each step are seen.
fn request(name: &str, one_by_one: bool) -> Request {
    let mut request = greedy_request(&goldens(&fixture(name), "")[0].ids, 6);
    request.params.logprobs = one_by_one.then_some(2);
    request
}

#[test]
fn all_ranks_hold_the_same_bits_run_after_run() {
    let edits = [RESIDUAL, TOKEN];
    two_at_a_time(ALIKE.iter().collect(), |&(name, ranks, blocks, at_once)| {
        let run = |seed: u32, one_by_one: bool| {
            let device = format!("sim:ranks={ranks},blocks={blocks},seed={seed}");
            let run = Run::new(name, &device, &edits, request(name, one_by_one));
            if one_by_one {
                let differs = run.differs(at_once);
                assert!(differs.is_none(), "{name} {device}: {}", differs.unwrap_or_default());
            }
            run
        };
        let first = run(1, true);
        let golden = &goldens(&fixture(name), "")[0].generated;
        assert_eq!(first.tokens, golden[..6], "{name} on {ranks}");
        // Other interleavings, and all tokens in one launch.
        for (seed, one_by_one) in [(2, true), (3, false)] {
            let again = run(seed, one_by_one);
            assert_eq!(again.tokens, first.tokens, "{name} on {ranks}, seed {seed}");
            for rank in 0..ranks as usize {
                let same = again.residual(rank) == first.residual(rank)
                    && (!one_by_one || again.folds(rank) == first.folds(rank));
                assert!(same, "{name} on {ranks}, seed {seed}: rank {rank} holds other bits");
            }
        }
    });
}
