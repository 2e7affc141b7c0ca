//! Kernels with experts, wrong on purpose: the producer's wait for a choice, the copies that
//! follow from it, and lost words of the router.

use std::time::Duration;

use super::failures::{all_are_found_out, hang, open, says, Mutant};

/// Name, what the sources say, what they should not say.
const MUTANTS: &[Mutant] = &[
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
    all_are_found_out("gpt_oss_mxfp4", "blocks=4", 4, MUTANTS);
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
