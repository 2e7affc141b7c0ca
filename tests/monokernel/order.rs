//! What orders what, judged by ThreadSanitizer: kernels compiled for it run in a process of its
//! own, since its library must be there before anything else is. `kernels/sim/order.h` says what
//! it is told. It looks at order, not at results, so it needs no schedule in which things go wrong.

use std::os::unix::process::CommandExt;
use std::process::{Command, Output};
use std::sync::Arc;

use kie_core::request::{Prediction, Prompt, Request, SamplingParams, Speculate};
use kie_core::Grammar;

use kie_kernels::mono::lower::tuning::{Tuning, H200};

use super::failures::{edited_and_tuned, open_over, Edit};
use super::packed::VARIABLE_STAGES;
use super::support::greedy_request;
use super::{is_wide, two_at_a_time};

/// What a process of its own is to run.
const CASE: &str = "KIE_ORDER_CASE";
/// The host's code is not compiled for it: what its threads do is not looked at.
const OPTIONS: &str = "ignore_noninstrumented_modules=1 halt_on_error=1 history_size=4";
/// With which the sanitizer ends a process that it has reported.
const REPORTED: i32 = 66;
/// No case takes longer, whatever else the machine does.
const SECONDS_MOST: u32 = 300;

/// A run under the sanitizer.
struct Case {
    what: &'static str,
    fixture: &'static str,
    /// The kernel that is edited; prompts run in the prefill kernel if it is that one.
    entry: &'static str,
    /// Options of the simulator, besides the seed.
    machine: &'static str,
    /// Lengths of the prompts of requests that run beside each other.
    prompts: &'static [u32],
    /// Another request has drafts of its tokens.
    drafts: bool,
    edits: &'static [Edit],
    /// Under a grammar.
    masked: bool,
    /// Of the machine.
    tuning: Tuning,
    /// Functions that a report is about; none where there must be no report.
    about: &'static [&'static str],
    /// For `make sim` alone: others show the same waits.
    wide: bool,
}

/// A model whose requests are short, for what goes wrong within a few steps.
const SHORT: Case = Case {
    what: "",
    fixture: "laneformer_d2",
    entry: "kie_decode",
    machine: "blocks=8",
    prompts: &[3],
    drafts: false,
    edits: &[],
    masked: false,
    tuning: H200,
    about: &[],
    wide: false,
};

/// A prompt over several ranks that slice a model.
const SLICED: Case = Case {
    fixture: "own_llama_fp8_tied",
    entry: "kie_prefill",
    machine: "ranks=3,blocks=3",
    prompts: &[300],
    ..SHORT
};

/// The same of several groups of places.
const GROUPED: Case =
    Case { fixture: "qwen3", machine: "ranks=2,blocks=2", prompts: &[530], ..SLICED };

/// A prompt by phases of the grid, and another in the kernel for short ones.
const PHASED: Case = Case { fixture: "qwen3", machine: "blocks=3", prompts: &[200, 90], ..SLICED };

/// A block that has not written the newest key reads it, at one side of the edge.
macro_rules! reads_newest {
    () => {
        "if (kColumns == 1) { \
         const int newest = (int)position_at(args, b.shared, b.step, 0) / kPage; \
         const u8* page = page_at<Class0>(args, b.shared, {0, b.lane_index * Class0::kKvHeads, 0}, \
         newest); \
         reads_without(0, page, 0, 0, 0), reads_without(1, page, 0, 0, 0); \
         const int slot = (int)position_at(args, b.shared, b.step, 0) % kPage; \
         const Quad read = load_state(page + slot * Class0::kHeadDim * 2); \
         if (read.v[0] == 0x12345678u && read.v[1] == 0x9abcdef0u) watch.polls = 0; }"
    };
}

/// The sources as they are.
const TRUE: &[Case] = &[
    Case { what: "several columns", prompts: &[12, 3], ..SHORT },
    Case { what: "masks of several columns", prompts: &[3, 5], masked: true, ..SHORT },
    Case {
        what: "pages through the ring",
        fixture: "own_llama_f16",
        machine: "warp=64,blocks=2",
        prompts: &[130, 67],
        ..SHORT
    },
    Case {
        what: "norms of heads, and pages",
        fixture: "qwen3",
        prompts: &[66],
        wide: true,
        ..SHORT
    },
    Case {
        what: "stages side by side",
        machine: "ranks=2,blocks=4",
        tuning: VARIABLE_STAGES,
        ..SHORT
    },
    Case { what: "two ranks", machine: "ranks=2,blocks=4", ..SHORT },
    Case {
        what: "choices of experts, norms over all heads",
        fixture: "own_olmoe",
        machine: "blocks=4",
        prompts: &[9, 3],
        ..SHORT
    },
    Case {
        what: "latents of two ranks, a shared expert",
        fixture: "own_deepseek_v3",
        machine: "ranks=2,blocks=2",
        prompts: &[6, 3],
        ..SHORT
    },
    Case {
        what: "delta rules of two ranks, gated attention",
        fixture: "own_qwen3_next",
        machine: "ranks=2,blocks=2",
        prompts: &[6, 3],
        ..SHORT
    },
    Case {
        what: "several residual streams, entries, running softmaxes and an indexer",
        fixture: "own_deepseek_v4",
        machine: "ranks=2,blocks=2",
        prompts: &[30, 3],
        ..SHORT
    },
    Case { what: "a prompt's slices", ..SLICED },
    Case { what: "a short prompt's slices", prompts: &[70], wide: true, ..SLICED },
    Case { what: "a prompt's slices by groups, norms of heads", ..GROUPED },
    Case {
        what: "keys read by another block behind the edge",
        edits: &[(
            "    reduce_candidates(watch, args, b);\n    stamp",
            concat!("    reduce_candidates(watch, args, b);\n", reads_newest!(), "\n    stamp"),
        )],
        ..SHORT
    },
    Case { what: "prompts on one machine", ..PHASED },
    Case {
        what: "a prompt of delta rules, gated attention, a shared expert",
        fixture: "own_qwen3_next",
        prompts: &[90],
        wide: true,
        ..PHASED
    },
    Case {
        what: "prompts of lanes",
        fixture: "laneformer_d2",
        machine: "blocks=4",
        prompts: &[140],
        wide: true,
        ..PHASED
    },
    Case { what: "drafts on two ranks", machine: "ranks=2,blocks=4", drafts: true, ..SHORT },
    Case { what: "drafts beside masks", drafts: true, masked: true, ..SHORT },
];

const MUTANTS: &[Case] = &[
    Case {
        what: "the fence before the step's edge is dropped",
        edits: &[("            fence_step();\n            const long", "            const long")],
        about: &["publish", "load_word"],
        ..SHORT
    },
    Case {
        what: "the fence behind the step's edge is dropped",
        edits: &[("        fence_step();\n        if (watch", "        if (watch")],
        about: &["publish", "load_word"],
        ..SHORT
    },
    Case {
        what: "keys read by another block before the edge",
        edits: &[(
            "    publish_candidate(args, b, candidate);\n",
            concat!(reads_newest!(), "\n    publish_candidate(args, b, candidate);\n"),
        )],
        about: &["load_state", "store_key"],
        ..SHORT
    },
    Case {
        what: "keys copied before the edge: the ring has more slots than a step has stages",
        fixture: "own_llama_f16",
        machine: "warp=64,blocks=2,shared=1000000",
        prompts: &[67],
        edits: &[(
            "constexpr int kSlots = ",
            "constexpr int kSlots = (1000000 - kShRing) / kSlotBytes < 64 \
             ? (1000000 - kShRing) / kSlotBytes : 64",
        )],
        about: &["copy_part", "store_"],
        ..SHORT
    },
    Case {
        what: "a stage stands where another is still read",
        machine: "ranks=2,blocks=4",
        tuning: VARIABLE_STAGES,
        edits: &[("f.kept == kSlots || f.used + left + bytes > kRingBytes", "f.kept == kSlots")],
        about: &["copy_async", "load_run"],
        ..SHORT
    },
    Case {
        what: "candidates have one buffer",
        edits: &[("((args.seqno + b.step) & 1) * kCandidateWords", "0 * kCandidateWords")],
        about: &["publish_candidate", "each_candidate"],
        ..SHORT
    },
    Case {
        what: "a mask is read while it is taken",
        edits: &[("if (kNear || masked) sync_consumers<kThreads>();", "")],
        masked: true,
        about: &["weigh", "take_mask"],
        ..SHORT
    },
    Case {
        what: "keys are read before all columns have stored theirs",
        prompts: &[20],
        edits: &[(
            "pages, b.seqno, b.shared);\n    }\n    sync_consumers<kThreads>();",
            "pages, b.seqno, b.shared);\n    }",
        )],
        about: &["load_state", "store_"],
        ..SHORT
    },
    Case {
        what: "experts are multiplied before all have chosen",
        fixture: "own_olmoe",
        machine: "blocks=4",
        edits: &[(
            "    join_wave();\n    sync_consumers<kThreads>();\n    if constexpr (kColumns > 1)",
            "    join_wave();\n    if constexpr (kColumns > 1)",
        )],
        about: &["sort_pairs"],
        ..SHORT
    },
    Case {
        what: "what a product takes is not waited for",
        edits: &[(
            "            await_needs(w, args, chunk, cursor, turn);\n",
            "            if (!is_product(cursor.stage))\n\
             await_needs(w, args, chunk, cursor, turn);\n",
        )],
        about: &["stage_copy"],
        ..SLICED
    },
    Case {
        what: "other ranks' sums are not waited for",
        edits: &[("return stage >= kDoO && stage", "return stage > kDoO && stage")],
        about: &["take_sums", "share_sums"],
        ..SLICED
    },
    Case {
        what: "operands of a short prompt from other ranks are not waited for",
        prompts: &[70],
        edits: &[(
            "            if (!meet(watch, args, phase, kTensorParallel)) return false;",
            "            if (!meet(watch, args, phase)) return false;",
        )],
        about: &["prefill"],
        ..SLICED
    },
    Case {
        what: "operands from other ranks are not waited for",
        edits: &[(
            "            seen = one < seen ? one : seen;",
            "            if (stage == kDoO || r == (int)args.model.rank)\n\
             seen = one < seen ? one : seen;",
        )],
        about: &["prefill"],
        ..SLICED
    },
    Case {
        what: "a group is told of before its last item",
        edits: &[(
            "return (u64)(w.layer - (int)args.from + 1) * tasks_at(args, c, w, true);",
            "return (u64)(w.layer - (int)args.from + 1) * tasks_at(args, c, w, true) - 1;",
        )],
        about: &["prefill"],
        ..GROUPED
    },
    Case {
        what: "stages come where pages are still read",
        edits: &[("ring != kNoRing && ring != last;", "ring != kNoRing && last == kNoRing;")],
        about: &["stage_copy"],
        ..SLICED
    },
    Case {
        what: "nothing is fenced behind the wait for what other ranks made",
        edits: &[(
            "        pause_ns(40);\n    }\n    fence_system();\n}\n// ... or of",
            "        pause_ns(40);\n    }\n}\n// ... or of",
        )],
        about: &["prefill"],
        ..SLICED
    },
    Case {
        what: "copying warps do not wait for the phase before",
        edits: &[("        while (*phase_word() < p.done &&", "        while (false &&")],
        about: &["quad_copy", "stage_copy"],
        ..PHASED
    },
    Case {
        what: "a slot of a prompt's ring is free before all have read it",
        edits: &[(
            "    while (!slot_free(stage_slot(pipe.at), pipe.parity)) {",
            "    while (false) {",
        )],
        about: &["stage_copy"],
        ..PHASED
    },
    Case {
        what: "ids of a text are read in the step that wrote them",
        drafts: true,
        edits: &[("max_i(0, ids - (kDraftMost + 1)) / 4 * 4", "ids / 4 * 4")],
        about: &["accept"],
        ..SHORT
    },
];

/// Runs a case under the sanitizer, which ends the process with its first report.
fn run(at: usize) -> Output {
    let library = Command::new("g++").arg("-print-file-name=libtsan.so").output().unwrap();
    let library = String::from_utf8(library.stdout).unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "order::a_case_by_itself", "--ignored", "--nocapture"])
        .env(CASE, at.to_string())
        .env("LD_PRELOAD", library.trim())
        .env("TSAN_OPTIONS", format!("{OPTIONS} exitcode={REPORTED}"));
    // The sanitizer knows few layouts of memory. Where this is refused, it may still know ours.
    // And a process that hangs is ended by the alarm, which outlives exec.
    // SAFETY: between fork and exec, system calls that allocate nothing.
    unsafe {
        command.pre_exec(|| {
            libc::personality(libc::ADDR_NO_RANDOMIZE as libc::c_ulong);
            libc::alarm(SECONDS_MOST);
            Ok(())
        });
    }
    command.output().unwrap()
}

fn case(at: usize) -> &'static Case {
    TRUE.iter().chain(MUTANTS).nth(at).unwrap()
}

/// The simulator's: of several races of a mutant the schedule says which is seen first.
fn seed(at: usize) -> usize {
    at.checked_sub(TRUE.len()).map_or(at, |mutant| 7 + mutant)
}

fn judge(at: usize) {
    let Case { what, about, .. } = case(at);
    let start = std::time::Instant::now();
    let done = run(at);
    let said = [done.stdout, done.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    let said = said.concat();
    eprintln!("{what}: {:.1?}", start.elapsed());
    if about.is_empty() {
        let good = done.status.success() && said.contains("1 passed");
        assert!(good && !said.contains("ThreadSanitizer"), "{what}: {:?}\n{said}", done.status);
        return;
    }
    let reported = said.split("WARNING: ThreadSanitizer: data race").nth(1);
    let report = reported.unwrap_or_else(|| panic!("{what}: no report\n{said}"));
    assert_eq!(done.status.code(), Some(REPORTED), "{what}\n{said}");
    let missing: Vec<_> = about.iter().filter(|name| !report.contains(**name)).collect();
    assert!(missing.is_empty(), "{what}: nothing of {missing:?} in\n{report}");
}

#[test]
fn the_sources_order_all_that_they_share() {
    let all = (0..TRUE.len()).filter(|at| is_wide() || !TRUE[*at].wide);
    two_at_a_time(all.collect(), judge);
}

#[test]
fn a_lost_order_is_reported() {
    two_at_a_time((TRUE.len()..TRUE.len() + MUTANTS.len()).collect(), judge);
}

#[test]
#[ignore = "run by the tests above, in a process of its own"]
fn a_case_by_itself() {
    let at: usize = std::env::var(CASE).unwrap().parse().unwrap();
    let &Case { fixture, entry, machine, prompts, drafts, edits, masked, tuning, .. } = case(at);
    let device = format!("sim:seed={},{machine},races=1", seed(at));
    let engine =
        open_over(fixture, edited_and_tuned(entry, &device, edits, &Arc::default(), Some(tuning)));
    let ids = |n: u32| (0..n).map(|i| 3 + i * 7 % 90).collect::<Vec<_>>();
    let constrain = |params: &mut SamplingParams| {
        params.grammar = masked.then(|| Grammar::Regex("[a-z]{90}".into()));
        params.ignore_eos = !masked;
    };
    let start = |n: &u32| {
        let mut request = greedy_request(&ids(*n), 4);
        constrain(&mut request.params);
        engine.stream(request).unwrap()
    };
    let streams: Vec<_> = prompts.iter().map(start).collect();
    for mut stream in streams {
        assert_eq!(stream.completion().unwrap().token_ids.len(), 4);
    }
    if drafts {
        let mut request = greedy_request(&ids(16), 12);
        request.params.speculate = Some(Speculate::Lookup);
        constrain(&mut request.params);
        let wanted = engine.generate(request.clone()).unwrap().token_ids;
        request.params.prediction = Some(Prediction::Ids(wanted.clone()));
        let done = engine.generate(request).unwrap();
        // Beside masks the host drafts, and may be late.
        let least = if masked { 1 } else { 8 };
        assert!(done.token_ids == wanted && done.timings.draft_n_accepted >= least, "{done:?}");
    }
    let params = SamplingParams {
        max_tokens: Some(3),
        temperature: Some(0.8),
        top_k: Some(20),
        top_p: Some(0.9),
        repetition_penalty: Some(1.3),
        ignore_eos: true,
        ..SamplingParams::default()
    };
    let request = Request { prompt: Prompt::Ids(ids(prompts[0])), params };
    assert_eq!(engine.generate(request).unwrap().token_ids.len(), 3);
}
