//! Kernels with experts, wrong on purpose: the producer's wait for a choice, the copies that
//! follow from it, and lost words of the router.

use std::time::Duration;

use super::failures::{conforms, hang, open, says};
use super::two_at_a_time;

/// Name, what the sources say, what they should not say.
const MUTANTS: &[(&str, &str, &str)] = &[
    (
        "the choice of an earlier step or layer will do",
        "for (; seqno_of(v) != seqno; v = *word) {",
        "for (; seqno_of(v) == 0; v = *word) {",
    ),
    (
        "a piece is too short",
        "i < S::long_stages ? S::long_bytes : S::short_bytes",
        "(i < S::long_stages ? S::long_bytes : S::short_bytes) - 64",
    ),
    (
        "codes and scales of another expert",
        "bank + (u64)id * C::kExpertBytes",
        "bank + (u64)(id ^ 1) * C::kExpertBytes",
    ),
    (
        "a place of the list has the bias and factor of another",
        "const float factor = chosen_factor(b, c, n);",
        "const float factor = chosen_factor(b, c, 0);",
    ),
];

#[test]
fn every_mutant_of_experts_is_found_out() {
    let name = "gpt_oss_mxfp4";
    let found = |at: usize, from, to| {
        let warp = if at.is_multiple_of(2) { 32 } else { 64 };
        (0..4).any(|seed| {
            let device = format!("sim:seed={seed},warp={warp},blocks=4,host=300");
            match conforms(&open(name, &device, from, to), name) {
                Ok(good) => !good,
                Err(error) => {
                    assert!(!error.to_string().contains("compilation failed"), "{error}");
                    true
                }
            }
        })
    };
    let same = ("nothing", "watch.step = b.step = step;", "watch.step = b.step = step; ");
    let all = MUTANTS.iter().copied().chain([same]).enumerate();
    two_at_a_time(all.collect(), |(at, (what, from, to))| {
        assert_eq!(found(at, from, to), what != "nothing", "{what}: {from:?} -> {to:?}");
    });
}

/// A logit that never comes, and a choice that the producer waits for in vain.
#[test]
fn a_lost_word_of_the_router_is_told_and_the_engine_closes() {
    let lost = |statement: &str| -> &'static str {
        let to = format!("if (!(layer == 1 && block() == 1 && b.step == 3)) {{ {statement} }}");
        Box::leak(to.into_boxed_str())
    };
    let logits = "publish(p, bits(v0), b.seqno), publish(p + 1, bits(v1), b.seqno);";
    let choice = "*choice_word(b.shared, column, place) = ll_word(id, b.seqno);";
    for (statement, what) in
        [(logits, "layer 1, the router's logits"), (choice, "layer 1, the choice of experts")]
    {
        let engine = open("own_gpt_oss", "sim:seed=3,blocks=4", statement, lost(statement));
        let detail = hang(&engine, Duration::from_secs(10));
        says(&detail, &["rank 0: ", "in step 3", what]);
        engine.close();
    }
}
