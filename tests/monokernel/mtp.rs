//! Layers that predict further tokens, in a kernel of their own: their drafts are those of the CPU,
//! and change no token.

use std::sync::Arc;

use kie_core::engine::Engine;
use kie_core::request::{Prompt, Request, SamplingParams, Speculate};
use kie_kernels::mono::Mono;

use super::failures::{all_are_found_out_by, edited, Mutant};
use super::requests::ways;
use super::support::{goldens, greedy_request, half, Golden};
use super::{fixture, two_at_a_time};

const NAME: &str = "own_qwen3_next";

fn open(device: &str) -> Engine {
    let folder = fixture(NAME);
    let builder = Engine::builder(&folder).dtype(half(&folder)).mtp(true);
    builder.device(device).max_batch(4).build().unwrap()
}

/// Tokens drafted, and those accepted, on the way to a recorded continuation.
fn counts(engine: &Engine, golden: &Golden) -> kie_core::Result<[usize; 2]> {
    let mut request = greedy_request(&golden.ids, golden.generated.len());
    request.params.speculate = Some(Speculate::Mtp);
    let done = engine.generate(request)?;
    assert_eq!(done.token_ids, golden.generated);
    Ok([done.timings.draft_n, done.timings.draft_n_accepted])
}

#[test]
fn kernels_predict_what_the_cpu_predicts() {
    let all = goldens(&fixture(NAME), "");
    let cpu = open("cpu");
    let wanted: Vec<_> = all.iter().map(|golden| counts(&cpu, golden).unwrap()).collect();
    assert!(wanted.iter().all(|[drafted, accepted]| drafted > accepted && *accepted > 10));
    let machines = ["seed=1,blocks=8", "seed=2,ranks=2,blocks=4,warp=64,hold=1"];
    two_at_a_time(machines.into(), |machine| {
        let engine = open(&format!("sim:{machine}"));
        for (golden, wanted) in all.iter().zip(&wanted) {
            assert_eq!(counts(&engine, golden).unwrap(), *wanted, "{machine}");
        }
    });
}

/// What the prefill kernel leaves of a prompt is seen as columns are: the same drafts come of it.
#[test]
fn prompts_of_the_prefill_kernel_are_seen() {
    let golden = goldens(&fixture(NAME), "").remove(2);
    let wanted = counts(&open("cpu"), &golden).unwrap();
    let machines = ["seed=4,blocks=4", "seed=5,ranks=2,blocks=4,warp=64"];
    two_at_a_time(machines.into(), |machine| {
        let folder = fixture(NAME);
        let builder = Engine::builder(&folder).dtype(half(&folder)).mtp(true);
        let builder = builder.device(format!("sim:{machine}")).max_batch(4).prefill_kernel(true);
        let engine = builder.build().unwrap();
        assert_eq!(counts(&engine, &golden).unwrap(), wanted, "{machine}");
        // Several pages, and what is there already.
        let ids: Vec<u32> = (0..150).map(|n| 5 + n * n % 401).collect();
        let mut request = greedy_request(&ids, 24);
        let plain = engine.generate(request.clone()).unwrap();
        request.params.speculate = Some(Speculate::Mtp);
        let done = [(); 2].map(|()| engine.generate(request.clone()).unwrap());
        let counts = done.each_ref().map(|d| (d.timings.draft_n, d.timings.draft_n_accepted));
        assert!(done.iter().all(|done| done.token_ids == plain.token_ids), "{machine}");
        assert_eq!(counts[0], counts[1], "{machine}");
    });
}

/// Four at a time, each way to choose, one of them without drafts.
#[test]
fn predictions_beside_others_change_no_token() {
    let engine = open("sim:seed=3,blocks=4");
    let request = |params: &SamplingParams, at: usize| {
        let ids = [&[7 + at as u32][..], &[5, 6, 9, 8, 6][..at]].concat();
        let speculate = (at != 1).then_some(Speculate::Mtp);
        let params = SamplingParams { speculate, ..params.clone() };
        Request { prompt: Prompt::Ids(ids), params }
    };
    let ways = ways(16);
    for ways in ways.chunks(4) {
        let alone: Vec<_> = ways
            .iter()
            .enumerate()
            .map(|(at, (_, params))| {
                let mut plain = request(params, at);
                plain.params.speculate = None;
                engine.generate(plain).unwrap().token_ids
            })
            .collect();
        let start = |(at, (_, params)): (usize, &(&str, SamplingParams))| {
            engine.stream(request(params, at)).unwrap()
        };
        let streams: Vec<_> = ways.iter().enumerate().map(start).collect();
        for ((mut stream, (way, _)), alone) in streams.into_iter().zip(ways).zip(alone) {
            assert_eq!(stream.completion().unwrap().token_ids, alone, "{way}");
        }
    }
}

/// Edits of the kernel that change what is predicted.
const MUTANTS: &[Mutant] = &[
    ("nothing", "    TakenIn v;\n", "    TakenIn v; \n"),
    (
        "the residual has the embedding's norm",
        "norm_weights(norms + kParts * kHidden / 2,",
        "norm_weights(norms,",
    ),
    ("drafts go on behind the model's norm", "(b.step == 0 ? 3 : 0)", "3"),
    (
        "drafts go on from the model",
        "    if (b.step == 0) return {args.before +",
        "    return {args.before +",
    ),
    ("columns go on from the first one's residual", "args.before_column[column] * count", "0"),
    ("a draft that came is not seen", "known == 0 ? s : d.first + known - 1", "s"),
    ("positions are those of one token a step", "    d.made += 1 + known;", "    d.made += 1;"),
];

#[test]
#[ignore = "a minute: make sim"]
fn every_mutant_of_mtp_is_found_out() {
    // The one with most drafts behind drafts that come.
    let golden = goldens(&fixture(NAME), "").remove(1);
    let wanted = counts(&open("cpu"), &golden).unwrap();
    all_are_found_out_by(("blocks=4", 1), MUTANTS, |device, edit| {
        let runner: Arc<Mono> = edited("kie_decode", device, edit, &Arc::default());
        let builder = Engine::builder(fixture(NAME)).mtp(true).max_batch(4);
        let engine = builder.runner(runner).build()?;
        Ok(counts(&engine, &golden)? == wanted)
    });
}
