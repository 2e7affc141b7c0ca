//! The real NVRTC, where it is found, on the real kernels.

use std::path::{Path, PathBuf};

use crate::abi::NormSpan;
use crate::cuda::nvrtc::{self, candidates, Usage};
use crate::error::Error;
use crate::gpu::rtc::Compiler;
use crate::machine::{MachineInfo, Platform, Source};
use crate::mono::echo;
use crate::mono::lower::layout::Kind;
use crate::mono::lower::model::{Class, Model};
use crate::mono::lower::partition::Partition;
use crate::mono::{shapes, upload};

/// `libnvrtc` folders of the repository's own Python environment.
pub fn environment() -> Vec<PathBuf> {
    let entries = |folder: &Path| -> Vec<PathBuf> {
        let found = std::fs::read_dir(folder).into_iter().flatten();
        found.flatten().map(|entry| entry.path()).collect()
    };
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    entries(&root.join(".venv/lib"))
        .iter()
        .flat_map(|python| entries(&python.join("site-packages/nvidia")))
        .map(|package| package.join("lib"))
        .collect()
}

/// The compiler, or the test is skipped.
fn nvrtc(test: &str) -> Option<Compiler> {
    match nvrtc::open(&candidates(&environment()), None) {
        Ok(nvrtc) => Some(nvrtc),
        Err(why) => {
            super::skipped(test, &why.to_string());
            None
        }
    }
}

fn defines(list: &[(&str, u32)]) -> Vec<(String, String)> {
    list.iter().map(|&(name, value)| (format!("KIE_{name}"), value.to_string())).collect()
}

fn source(text: &str) -> Source {
    Source { defines: defines(&[("N", 3)]), text: text.into(), entries: vec!["k"] }
}

/// (model, bytes of stack, bytes of spills) of the decode kernel, as version 13 of the compiler
/// leaves it. A number may only shrink: a kernel that needs less than its row fails, too.
type Spills = (&'static str, u32, u32);
const ONE_COLUMN: [Spills; 8] = [
    ("2b", 0, 0),
    ("lane", 0, 0),
    ("1b", 0, 0),
    ("8b", 0, 0),
    ("2b-fp8", 0, 0),
    ("8b-fp8", 0, 0),
    ("8b-int4", 0, 0),
    ("8b-mxfp4", 0, 0),
];
const ONE_STREAMED: [Spills; 8] = ONE_COLUMN;
const EIGHT_COLUMNS: [Spills; 4] = [("2b", 0, 0), ("lane", 0, 0), ("1b", 0, 0), ("8b", 0, 0)];

/// What the one kernel of a source takes.
fn sole(nvrtc: &Compiler, source: &Source) -> Usage {
    let compiled = nvrtc.compile(source, "sm_90a").unwrap();
    assert!(compiled.code.starts_with(b"\x7fELF"));
    let mut usage = compiled.usage();
    assert_eq!(usage.len(), 1, "{usage:?}\n{}", compiled.log);
    usage.remove(0)
}

fn compare(kind: Kind, wanted: &[Spills]) {
    let Some(nvrtc) = nvrtc("compiling the decode kernel") else { return };
    let mut seen = Vec::new();
    for &(name, ..) in wanted {
        let (source, partition) =
            shapes::decode(&shapes::model(name), &shapes::nvidia(), Platform::Cuda, kind);
        let kernel = sole(&nvrtc, &source);
        assert_eq!(kernel.entry, "kie_decode");
        let most = 65_536 / partition.threads(32) / 8 * 8;
        assert!(kernel.registers > 0 && kernel.registers <= most, "{name}: {kernel:?}");
        seen.push((name, kernel.stack_bytes, kernel.spill_bytes));
    }
    // Other compilers share out registers differently.
    if nvrtc.version.0 == 13 {
        assert_eq!(seen, wanted, "(model, stack, spills) of {kind:?}");
    }
}

#[test]
fn one_column_spills_no_more_than_it_did() {
    compare(Kind::plain(1, false), &ONE_COLUMN);
    compare(Kind::plain(1, true), &ONE_STREAMED);
}

#[test]
fn eight_columns_spill_no_more_than_they_did() {
    compare(Kind::plain(8, true), &EIGHT_COLUMNS);
}

/// Of the kernel that makes drafts.
const DRAFTS: [Spills; 2] = [("2b", 56, 84), ("8b", 32, 60)];

#[test]
fn drafts_spill_no_more_than_they_did() {
    compare(Kind { lookup: true, ..Kind::plain(8, true) }, &DRAFTS);
}

/// The same of models with experts: of one column with pages through the ring, and of eight.
const EXPERTS: [[Spills; 3]; 2] = [
    [("gpt-oss-120b", 0, 0), ("qwen3-30b-fp8 on four", 0, 0), ("qwen3-30b-fp8", 0, 0)],
    [("gpt-oss-120b", 48, 64), ("qwen3-30b-fp8 on four", 0, 0), ("qwen3-30b-fp8", 0, 0)],
];

#[test]
fn layers_with_experts_spill_no_more_than_they_did() {
    let Some(nvrtc) = nvrtc("compiling kernels with experts") else { return };
    let seen = [1, 8].map(|columns| {
        EXPERTS[0].map(|(name, ..)| {
            let (shape, ranks) = name.strip_suffix(" on four").map_or((name, 1), |s| (s, 4));
            let model = shapes::with_experts(shape, ranks);
            let kind = Kind::plain(columns, true);
            let (source, partition) =
                shapes::decode(&model, &shapes::nvidia(), Platform::Cuda, kind);
            let kernel = sole(&nvrtc, &source);
            let most = 65_536 / partition.threads(32) / 8 * 8;
            assert!(kernel.registers <= most, "{name}: {kernel:?}");
            (name, kernel.stack_bytes, kernel.spill_bytes)
        })
    });
    if nvrtc.version.0 == 13 {
        assert_eq!(seen, EXPERTS, "(model, stack, spills) with one column and with eight");
    }
}

/// (model, columns, bytes of stack, bytes of spills) of kernels with latents and shared experts, of
/// one of eight machines.
const LATENTS: [(&str, u32, u32, u32); 4] = [
    ("kimi-k2", 1, 0, 0),
    ("kimi-k2", 8, 0, 0),
    ("deepseek-v3", 1, 0, 0),
    ("deepseek-v3", 8, 0, 0),
];

#[test]
fn layers_with_latents_spill_no_more_than_they_did() {
    let Some(nvrtc) = nvrtc("compiling kernels with latents") else { return };
    let seen = LATENTS.map(|(name, columns, ..)| {
        let model = shapes::with_latents(name, 8);
        let kind = Kind::plain(columns, false);
        let (source, partition) = shapes::decode(&model, &shapes::nvidia(), Platform::Cuda, kind);
        assert!(partition.kernels(&model, Platform::Cuda).contains(&kind), "{partition}");
        let kernel = sole(&nvrtc, &source);
        let most = 65_536 / partition.threads(32) / 8 * 8;
        assert!(kernel.registers <= most, "{name}: {kernel:?}");
        (name, columns, kernel.stack_bytes, kernel.spill_bytes)
    });
    if nvrtc.version.0 == 13 {
        assert_eq!(seen, LATENTS, "(model, columns, stack, spills)");
    }
}

/// Ranks and columns, bytes of stack, bytes of spills of DeepSeek-V4-Flash's decode kernels.
const ENTRIES: [((u32, u32), u32, u32); 4] =
    [((2, 1), 32, 0), ((2, 8), 64, 24), ((4, 1), 32, 0), ((4, 8), 48, 28)];

#[test]
#[ignore = "minutes: make gpu"]
fn layers_with_entries_spill_no_more_than_they_did() {
    let Some(nvrtc) = nvrtc("compiling kernels with entries") else { return };
    let mut seen = Vec::new();
    for ranks in [2, 4] {
        let (model, machine) = (shapes::with_entries(ranks), shapes::nvidia());
        let partition = Partition::new(&model, &machine, 33_280).unwrap();
        for kind in partition.kernels(&model, Platform::Cuda) {
            if kind.lookup {
                continue; // minutes more
            }
            let (source, _) = shapes::decode(&model, &machine, Platform::Cuda, kind);
            let kernel = sole(&nvrtc, &source);
            let most = 65_536 / partition.threads(32) / 8 * 8;
            assert!(kernel.registers <= most, "{ranks} ranks, {kind:?}: {kernel:?}");
            seen.push(((ranks, kind.columns), kernel.stack_bytes, kernel.spill_bytes));
        }
    }
    if nvrtc.version.0 == 13 {
        assert_eq!(seen, ENTRIES, "((ranks, columns), stack, spills)");
    }
}

/// Ranks and columns, bytes of stack, bytes of spills of Qwen3-Coder-Next's decode kernels, last
/// the one that checks drafts.
const RECURRENT: [((u32, u32), u32, u32); 6] = [
    ((1, 1), 0, 0),
    ((1, 8), 168, 204),
    ((1, 8), 232, 264),
    ((4, 1), 0, 0),
    ((4, 8), 0, 0),
    ((4, 8), 0, 0),
];

#[test]
fn layers_with_delta_rules_spill_no_more_than_they_did() {
    let Some(nvrtc) = nvrtc("compiling kernels with delta rules") else { return };
    let mut seen = Vec::new();
    for ranks in [1, 4] {
        let (model, machine) = (shapes::coder_next(ranks), shapes::nvidia());
        let partition = Partition::new(&model, &machine, 33_280).unwrap();
        for kind in partition.kernels(&model, Platform::Cuda) {
            let (source, _) = shapes::decode(&model, &machine, Platform::Cuda, kind);
            let kernel = sole(&nvrtc, &source);
            let most = 65_536 / partition.threads(32) / 8 * 8;
            assert!(kernel.registers <= most, "{ranks} ranks, {kind:?}: {kernel:?}");
            seen.push(((ranks, kind.columns), kernel.stack_bytes, kernel.spill_bytes));
        }
    }
    if nvrtc.version.0 == 13 {
        assert_eq!(seen, RECURRENT, "((ranks, columns), stack, spills)");
    }
}

#[test]
fn what_predicts_further_tokens_goes_beside_its_model() {
    let machine = shapes::nvidia();
    for ranks in [1, 4] {
        let of = |model: &Model| Partition::new(model, &machine, 33_280).unwrap();
        let (model, mtp) = (shapes::coder_next(ranks), shapes::coder_next_mtp(ranks));
        let [beside, own] = [&model, &mtp].map(of);
        assert_eq!((own.hidden, own.columns), (beside.hidden, beside.columns), "{ranks} ranks");
        let kinds = own.kernels(&mtp, Platform::Cuda);
        assert_eq!(
            kinds.iter().map(|kind| (kind.columns, kind.lookup)).collect::<Vec<_>>(),
            [(8, true)]
        );
        let Some(nvrtc) = nvrtc("compiling what predicts further tokens") else { return };
        let (source, _) = shapes::decode(&mtp, &machine, Platform::Cuda, kinds[0]);
        let kernel = sole(&nvrtc, &source);
        assert!(kernel.registers <= 65_536 / own.threads(32) / 8 * 8, "{ranks} ranks: {kernel:?}");
        if nvrtc.version.0 == 13 {
            assert_eq!((kernel.stack_bytes, kernel.spill_bytes), (0, 0), "{ranks} ranks");
        }
    }
}

/// (model, bytes of stack, bytes of spills) of the prefill kernel.
const PREFILL: [Spills; 4] =
    [("1b", 128, 268), ("8b", 128, 276), ("2b", 176, 458), (SLICED, 64, 68)];
/// The same of the one for few positions.
const PREFILL_FEW: [Spills; 4] =
    [("1b", 144, 220), ("8b", 304, 488), ("2b", 224, 530), (SLICED, 304, 384)];
/// 8b over four machines.
const SLICED: &str = "8b on four";

#[test]
fn the_prefill_kernel_spills_no_more_than_it_did() {
    let Some(nvrtc) = nvrtc("compiling the prefill kernel") else { return };
    let mut seen = [Vec::new(), Vec::new()];
    for (name, ..) in PREFILL {
        let sources = shapes::prefill(&match name {
            SLICED => shapes::sliced(4),
            name => shapes::model(name),
        });
        for (source, seen) in sources.iter().zip(&mut seen) {
            let kernel = sole(&nvrtc, source);
            assert_eq!((kernel.entry.as_str(), kernel.registers), ("kie_prefill", 168), "{name}");
            seen.push((name, kernel.stack_bytes, kernel.spill_bytes));
        }
    }
    if nvrtc.version.0 == 13 {
        assert_eq!(seen, [PREFILL.to_vec(), PREFILL_FEW.to_vec()], "(model, stack, spills)");
    }
}

/// The same of layers with experts, of many positions.
const PREFILL_EXPERTS: [Spills; 3] =
    [("gpt-oss-120b", 256, 544), ("qwen3-30b-fp8", 256, 550), (CODER_NEXT, 320, 1084)];
/// Delta rules, gated attention, a shared expert.
const CODER_NEXT: &str = "qwen3-coder-next";

#[test]
fn prompts_of_layers_with_experts_spill_no_more_than_they_did() {
    let Some(nvrtc) = nvrtc("compiling the prefill kernel with experts") else { return };
    let seen = PREFILL_EXPERTS.map(|(name, ..)| {
        let sources = shapes::prefill(&match name {
            CODER_NEXT => shapes::coder_next(1),
            name => shapes::with_experts(name, 1),
        });
        let kernel = sole(&nvrtc, sources.first().expect("it fits"));
        assert_eq!((kernel.entry.as_str(), kernel.registers), ("kie_prefill", 168), "{name}");
        (name, kernel.stack_bytes, kernel.spill_bytes)
    });
    if nvrtc.version.0 == 13 {
        assert_eq!(seen, PREFILL_EXPERTS, "(model, stack, spills)");
    }
}

#[test]
fn the_packing_kernel_spills_nothing() {
    let Some(nvrtc) = nvrtc("compiling the packing kernel") else { return };
    let kernel = sole(&nvrtc, &upload::kernel(Platform::Cuda));
    assert_eq!((kernel.entry.as_str(), kernel.stack_bytes), ("kie_pack", 0), "{kernel:?}");
    assert_eq!(kernel.spill_bytes, 0, "{kernel:?}");
    assert!(kernel.registers <= 64, "{kernel:?}");
}

/// Odd sizes: rows beyond the matrices, padded heads, heads of odd groups, biases, heads with
/// norms, ranks.
#[test]
fn the_prefill_kernel_takes_all_that_its_plan_takes() {
    let Some(nvrtc) = nvrtc("compiling the prefill kernel") else { return };
    let dense = shapes::model("1b");
    let small = |heads, kv_heads, head_dim, hidden, ffn, bias| {
        let sizes = |c: &mut Class| *c = Class { heads, kv_heads, head_dim, ffn, bias, ..*c };
        let model = shapes::with_class(dense.clone(), sizes);
        let layer = model.layer[..2].to_vec();
        Model { layer, hidden, vocab: 512, vocab_all: 512, ..model }
    };
    for model in [
        small(4, 2, 16, 64, 160, false),
        small(6, 2, 96, 576, 1536, true),
        small(14, 2, 64, 896, 4864, true),
        shapes::with_class(small(32, 8, 128, 2048, 6144, false), |c| {
            c.head_norm = Some(NormSpan::Head)
        }),
        Model { ranks: 2, sliced: true, ..small(16, 4, 128, 4096, 7168, false) },
        Model { ranks: 2, lanes: 4, ..shapes::model("2b") },
    ] {
        let sources = shapes::prefill(&model);
        assert!(!sources.is_empty(), "it fits");
        for source in sources {
            nvrtc.compile(&source, "sm_90a").unwrap_or_else(|e| panic!("{model:?}: {e}"));
        }
    }
    let wide_heads = small(8, 4, 288, 2304, 8192, false);
    assert!(shapes::prefill(&wide_heads).is_empty(), "{wide_heads:?}");
}

/// Architectures, KB of shared memory of a block there, bytes that the kernel of one column spills.
const FAMILIES: [(&str, u32, u32); 5] = [
    ("sm_80", 163, 0),
    ("sm_86", 99, 8),
    ("sm_89", 99, 8),
    ("sm_100a", 227, 0),
    ("sm_120a", 99, 0),
];

#[test]
fn other_families_spill_no_more_than_they_did() {
    let Some(nvrtc) = nvrtc("kernels of other families") else { return };
    if nvrtc.version.0 < 13 {
        return; // older ones do not know them all
    }
    let model = shapes::model("1b");
    let seen = FAMILIES.map(|(arch, shared, _)| {
        let shared_bytes = shared << 10;
        let machine = MachineInfo { arch: arch.into(), shared_bytes, ..shapes::nvidia() };
        let kind = Kind::plain(1, false);
        let (source, partition) = shapes::decode(&model, &machine, Platform::Cuda, kind);
        let compiled = nvrtc.compile(&source, arch).unwrap();
        let [kernel] = &compiled.usage()[..] else { panic!("{}", compiled.log) };
        assert!(kernel.registers <= 65_536 / partition.threads(32) / 8 * 8, "{arch}: {kernel:?}");
        (arch, shared, kernel.spill_bytes)
    });
    assert_eq!(seen, FAMILIES, "(architecture, KB of shared memory, spills)");
}

/// The same of prompts: architectures, KB of shared memory, registers, bytes of stack and of
/// spills. Where registers are not passed on all threads have alike; what spills is in attention
/// and between tiles.
const PREFILL_FAMILIES: [(&str, u32, u32, u32, u32); 5] = [
    ("sm_80", 163, 168, 208, 328),
    ("sm_86", 99, 168, 208, 328),
    ("sm_89", 99, 168, 208, 328),
    ("sm_100a", 227, 168, 80, 132),
    ("sm_120a", 99, 168, 128, 262),
];

#[test]
fn prompts_of_other_families_spill_no_more_than_they_did() {
    let Some(nvrtc) = nvrtc("prompts of other families") else { return };
    if nvrtc.version.0 < 13 {
        return; // older ones do not know them all
    }
    let seen = PREFILL_FAMILIES.map(|(arch, shared, ..)| {
        let shared_bytes = shared << 10;
        let machine = MachineInfo { arch: arch.into(), shared_bytes, ..shapes::nvidia() };
        let sources = shapes::prefill_on(&shapes::model("1b"), &machine);
        let [source] = &sources[..] else { panic!("{arch}: {} kernels", sources.len()) };
        let compiled = nvrtc.compile(source, arch).unwrap();
        let [kernel] = &compiled.usage()[..] else { panic!("{}", compiled.log) };
        (arch, shared, kernel.registers, kernel.stack_bytes, kernel.spill_bytes)
    });
    assert_eq!(seen, PREFILL_FAMILIES, "(architecture, KB, registers, stack, spills)");
}

#[test]
fn code_that_a_driver_translates_is_text() {
    let Some(nvrtc) = nvrtc("code for any GPU") else { return };
    let text = "extern \"C\" __global__ void k(int* p) { *p = KIE_N; }";
    let code = nvrtc.compile(&source(text), "compute_80").unwrap().code;
    assert!(String::from_utf8_lossy(&code).contains(".target sm_80"));
}

#[test]
fn the_echo_kernel_compiles() {
    let Some(nvrtc) = nvrtc("compiling the echo kernel") else { return };
    let kernel = sole(&nvrtc, &echo::kernel(Platform::Cuda));
    assert_eq!((kernel.entry.as_str(), kernel.spill_bytes), ("kie_echo", 0));
}

#[test]
fn a_fault_in_the_source_is_told_with_its_line() {
    let Some(nvrtc) = nvrtc("faults of the source") else { return };
    let text = "extern \"C\" __global__ void k(int* p) {\n  *p = KIE_N + nothing;\n}\n";
    let error = nvrtc.compile(&source(text), "sm_90a").unwrap_err();
    let Error::Compile { arch, detail } = &error else { panic!("{error}") };
    assert_eq!(arch, "sm_90a");
    assert!(detail.contains("kie(2)") && detail.contains("nothing"), "{detail}");
}

#[test]
fn an_unknown_architecture_is_told() {
    let Some(nvrtc) = nvrtc("an unknown architecture") else { return };
    let text = "extern \"C\" __global__ void k(int* p) { *p = KIE_N; }";
    let error = nvrtc.compile(&source(text), "sm_970a").unwrap_err();
    assert!(error.to_string().contains("sm_970a") && error.to_string().contains("pip"), "{error}");
}

#[test]
fn keys_differ_with_all_they_depend_on() {
    let Some(nvrtc) = nvrtc("keys of the cache") else { return };
    let one = source("text");
    let key = nvrtc.key(&one, "sm_90a", None);
    assert_eq!(key, nvrtc.key(&one.clone(), "sm_90a", None));
    assert_ne!(key, nvrtc.key(&one, "sm_100a", None));
    assert_ne!(key, nvrtc.key(&source("text "), "sm_90a", None));
    assert_ne!(key, nvrtc.key(&Source { defines: defines(&[("N", 4)]), ..one }, "sm_90a", None));
}

/// Prints what every kernel of the usual shapes takes; run it by name before and after a change
/// that should make no difference.
#[test]
#[ignore = "a measurement"]
fn sizes() {
    let Some(nvrtc) = nvrtc("sizes of kernels") else { return };
    let show = |what: String, source: &Source| {
        let compiled = nvrtc.compile(source, "sm_90a").unwrap();
        let usage = compiled.usage();
        let hash = compiled.code.iter().fold(0u64, |h, b| h.wrapping_mul(31) + u64::from(*b));
        eprintln!("{what}: {} bytes, {hash:016x}, {usage:?}", compiled.code.len());
    };
    for name in ["2b", "lane", "1b", "8b"] {
        let model = shapes::model(name);
        let plain = [(1, false), (1, true), (8, true)];
        let kinds = plain.map(|(columns, streamed)| Kind::plain(columns, streamed));
        for kind in kinds.into_iter().chain([Kind { lookup: true, ..kinds[2] }]) {
            let (source, _) = shapes::decode(&model, &shapes::nvidia(), Platform::Cuda, kind);
            show(format!("{name} decode {kind:?}"), &source);
        }
    }
    for name in ["1b", "8b", "2b", SLICED] {
        let model = if name == SLICED { shapes::sliced(4) } else { shapes::model(name) };
        for source in shapes::prefill(&model) {
            show(format!("{name} prefill"), &source);
        }
    }
}
