//! Text that a grammar leaves no choice of is drafted beside the masks: passes of several tokens,
//! and the same tokens as one by one.

use std::sync::Arc;

use kie_core::request::{Completion, Prediction, SamplingParams, Speculate};
use kie_core::{Engine, Grammar};
use kie_kernels::device::{Options, Running};
use kie_kernels::devices;
use serde_json::{json, Map};

use super::support::Around;
use super::{demo, text};

/// How often a busy machine may be late with drafts.
const TRIES: usize = 20;

/// A grammar with long names.
fn grammar() -> Grammar {
    let names = ["identifier_of_the_account", "description", "further_description_of_it"];
    let kind = |at: usize| match at {
        0 => json!({"type": "integer", "minimum": 100, "maximum": 999}),
        _ => json!({"type": "string", "maxLength": 20}),
    };
    let members: Map<_, _> = names.iter().zip(0..).map(|(n, at)| ((*n).into(), kind(at))).collect();
    Grammar::json_schema(&json!({
        "type": "object", "properties": members, "required": names, "additionalProperties": false,
    }))
}

/// Greedy, and each further way to choose.
fn ways() -> Vec<SamplingParams> {
    let base = |seed| SamplingParams {
        max_tokens: Some(120),
        temperature: Some(1.0),
        seed: Some(seed),
        grammar: Some(grammar()),
        logprobs: Some(2),
        ..SamplingParams::default()
    };
    vec![
        SamplingParams { temperature: Some(0.0), ..base(0) },
        SamplingParams { top_k: Some(30), top_p: Some(0.9), ..base(1) },
        SamplingParams { repetition_penalty: Some(1.3), frequency_penalty: 0.4, ..base(2) },
        SamplingParams { min_tokens: 60, logit_bias: vec![(300, 3.0)], ..base(3) },
        SamplingParams { stop: vec!["account".into()], ..base(4) },
        SamplingParams { max_tokens: Some(31), ..base(5) },
        SamplingParams { speculate: Some(Speculate::Lookup), ..base(6) },
    ]
}

/// The engine, of a device that checks drafts beside masks or of one that does not say so.
fn open(drafts: bool, max_batch: usize) -> Engine {
    let builder = Engine::builder(demo()).max_batch(max_batch);
    if drafts {
        return builder.threads(2).build().unwrap();
    }
    let options = Options { threads: Some(2), ..Options::default() };
    let inner = devices::open("cpu", &options).unwrap();
    builder.runner(Arc::new(Around(inner, |run: Box<dyn Running>| run, false))).build().unwrap()
}

/// Tokens, their log-probabilities and alternatives, and the end.
fn told(done: &Completion) -> String {
    format!("{:?} {:?} {:?} {:?}", done.token_ids, done.text, done.logprobs, done.finish_reason)
}

#[test]
fn forced_text_takes_fewer_passes_and_changes_no_token() {
    let [plain, alone] = [false, true].map(|drafts| open(drafts, 1));
    let request = |params: &SamplingParams| text("Say it as JSON: ", params.clone());
    let wanted: Vec<_> = ways()
        .iter()
        .map(|params| {
            let wanted = plain.generate(request(params)).unwrap();
            assert_eq!(wanted.timings.draft_n, 0);
            (params.clone(), told(&wanted))
        })
        .collect();
    let accepted = |(params, wanted): &(SamplingParams, String)| {
        let got = alone.generate(request(params)).unwrap();
        assert_eq!(told(&got), *wanted, "{params:?}");
        got.timings.draft_n_accepted
    };
    // A draft that comes late is none.
    let enough = |_| wanted.iter().map(accepted).sum::<usize>() > 6;
    assert!((0..TRIES).any(enough));
    let beside = open(true, 4);
    let streams: Vec<_> = ways().iter().map(|p| beside.stream(request(p)).unwrap()).collect();
    for (mut stream, (_, wanted)) in streams.into_iter().zip(wanted) {
        assert_eq!(told(&stream.completion().unwrap()), wanted);
    }
}

#[test]
fn what_is_expected_is_drafted_as_far_as_it_is_legal() {
    let engine = open(true, 1);
    let greedy = &ways()[0];
    let ask = |prediction: Option<Vec<u32>>| {
        let prediction = prediction.map(Prediction::Ids);
        let params = SamplingParams { prediction, ..greedy.clone() };
        engine.generate(text("Say it as JSON: ", params)).unwrap()
    };
    let wanted = ask(None);
    let same = wanted.token_ids.clone();
    let mut edited = same.clone();
    edited.splice(10..12, [300, 301, 302]);
    let illegal = vec![300; 40];
    for (prediction, least) in [(same, 1), (edited, 1), (illegal, 0)] {
        let enough = |_| {
            let got = ask(Some(prediction.clone()));
            assert_eq!(told(&got), told(&wanted));
            got.timings.draft_n_accepted >= least * wanted.token_ids.len() / 4
        };
        assert!((0..TRIES).any(enough), "{prediction:?}");
    }
}
