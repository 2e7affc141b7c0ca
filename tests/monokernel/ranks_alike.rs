//! All ranks hold the same bits, whatever the interleaving. The host reads rank 0's tokens; here
//! the kernels' sources are edited so that every rank folds what it holds of a run, step after
//! step, into numbers behind its symmetric memory, and the words that ranks push to each other are
//! compared after each launch.

use kie_core::engine::Engine;
use kie_core::request::Request;

use super::failures::{open_over, told, Behind, Edit};
use super::rank_failures::SHARE;
use super::support::{goldens, greedy_request};
use super::{fixture, two_at_a_time};

/// What edits write: where pushed words begin and end, a fold a block and column, one a place of
/// the residual.
const AT_TOKENS: usize = 2;
const AT_RESIDUAL: usize = 1024;
const BYTES: usize = 8 * (AT_RESIDUAL + (1 << 18));

/// The residual as floats, of each owner's rows after each addition.
const RESIDUAL: Edit = (
    "        const Halves both = halves_of(own.v[item][0], own.v[item][1]);",
    "        const Halves both = halves_of(own.v[item][0], own.v[item][1]);
        u64* seen = args.abort_flag + 16 + 1024 + (to + at - args.ll_words);
        *seen = (*seen ^ (*seen >> 29)) * 0x9e3779b97f4a7c15ull +
                ((u64)bits(own.v[item][1]) << 32 | bits(own.v[item][0])) + 1;",
);
/// The token that each block goes on with, and the number that it was offered with.
const TOKEN: Edit = (
    "    tokens_of(b)[c] = id < (u32)kVocabAll ? id : 0;",
    "    tokens_of(b)[c] = id < (u32)kVocabAll ? id : 0;
    args.abort_flag[16] = kAtOther, args.abort_flag[17] = kAtTally;
    u64* seen = args.abort_flag + 16 + 2 + block() * 8 + c;
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
        for (seed, one_by_one) in
            [(2, true), (3, false)].into_iter().take(if ranks < 8 { 2 } else { 1 })
        {
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

#[test]
fn a_rank_with_other_bits_is_found_out() {
    // One rank that adds its own part unrounded, and one that hears another word than the others.
    const ALONE: Edit = (
        "const bool alike = r.delay == 0 && keep == 1.0f;",
        "const bool alike = r.delay == 0 && keep == 1.0f && args.rank != 1;",
    );
    const OTHER: Edit = (
        SHARE,
        "for (int to = 0; to < kRanks; ++to)
             store_word_system(share + (long)column * kWordsH + pair + args.peer_offset[to],
                               ll_word(mine[item].v[0] ^ (to == 1 && pair == 3), b.seqno));",
    );
    let all = [
        ("llama", true, ALONE, "residual of rank 1"),
        ("laneformer_d2", false, OTHER, "words of rank 1 after launch"),
    ];
    two_at_a_time(all.into(), |(name, at_once, mutant, wanted)| {
        let edits = [RESIDUAL, TOKEN, mutant];
        let run = Run::new(name, "sim:ranks=2,blocks=8,seed=1", &edits, request(name, true));
        let differs = run.differs(at_once).unwrap_or_default();
        assert!(differs.contains(wanted), "{name}: {differs:?}");
    });
}

/// The residual of a prompt's positions as floats, in the prefill kernel.
const PROMPT: Edit = (
    "            residual[j * 32] = {{bits(v[0]), bits(v[1]), bits(v[2]), bits(v[3])}};",
    "            residual[j * 32] = {{bits(v[0]), bits(v[1]), bits(v[2]), bits(v[3])}};
            u64* seen = args.arrivals + 4096 +
                        (residual + j * 32 - (Quad*)(args.scratch + kScrResidual));
            KIE_UNROLL for (int i = 0; i < 4; ++i) *seen =
                (*seen ^ (*seen >> 29)) * 0x9e3779b97f4a7c15ull + bits(v[i]) + 1;",
);

/// Where ranks add up at once, all have the same residual of a prompt, too; where sums come later,
/// each has its own lanes', whatever the interleaving.
#[test]
fn all_ranks_hold_the_same_bits_of_a_prompt() {
    let all = [("llama", 2, 8, true), ("own_llama_fp8_tied", 4, 6, true)];
    let all = all.into_iter().chain([("laneformer_d2", 2, 8, false)]);
    two_at_a_time(all.collect(), |(name, ranks, blocks, at_once)| {
        let goldens = goldens(&fixture(name), "");
        let golden = goldens.iter().max_by_key(|golden| golden.ids.len()).unwrap();
        let run = |seed: u32| -> Vec<Vec<u64>> {
            let device = format!("sim:ranks={ranks},blocks={blocks},seed={seed}");
            let (runner, behind) = told("kie_prefill", &device, &[PROMPT], BYTES);
            let engine = open_over(name, runner);
            let tokens = engine.generate(greedy_request(&golden.ids, 1)).unwrap().token_ids;
            assert_eq!(tokens, golden.generated[..1], "{name} on {ranks}");
            engine.close();
            // Each rank's begins at another place behind its memory.
            let folds = |rank: &Behind| rank.told().into_iter().filter(|fold| *fold != 0).collect();
            behind.iter().map(folds).collect()
        };
        let first = run(1);
        assert!(first.iter().all(|folds| folds.len() > 1000), "{name}: some residual");
        assert!(!at_once || first.iter().all(|folds| *folds == first[0]), "{name} on {ranks}");
        assert!(run(2) == first, "{name} on {ranks}: bits by interleaving");
    });
}
