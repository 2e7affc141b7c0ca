//! The real NVRTC, where it is found, on the real kernels.

use std::path::{Path, PathBuf};

use crate::cuda::nvrtc::{candidates, compile_source, Nvrtc};
use crate::error::Error;
use crate::mono::machine::Source;

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
fn nvrtc(test: &str) -> Option<Nvrtc> {
    match Nvrtc::open(&candidates(&environment()), None) {
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

/// The decode kernel as it is built for eight lanes of a two-billion-parameter laneformer.
fn decode() -> Source {
    let text = concat!(
        include_str!("../../../kernels/cuda/platform.h"),
        include_str!("../../../kernels/cuda/tile.h"),
        include_str!("../../../kernels/common/shape.h"),
        include_str!("../../../kernels/common/args.h"),
        include_str!("../../../kernels/common/exchange.h"),
        include_str!("../../../kernels/common/ring.h"),
        include_str!("../../../kernels/common/matvec.h"),
        include_str!("../../../kernels/common/attention.h"),
        include_str!("../../../kernels/common/decode.h"),
    );
    let model = [
        ("LAYERS", 15),
        ("HIDDEN", 3072),
        ("HEADS", 4),
        ("KV_HEADS", 2),
        ("HEAD_DIM", 96),
        ("FFN", 1536),
        ("VOCAB", 4000),
        ("DELAY", 2),
        ("WINDOW", 512),
        ("WINDOW_LAYERS", 10),
        ("LANES", 8),
    ];
    let cut = [
        ("BLOCKS", 128),
        ("WARPS", 12),
        ("COLUMNS", 1),
        ("SLOT_BYTES", 24576),
        ("SPLITS", 8),
        ("MERGE", 0),
        ("POLL", 1),
        ("NO_WAITS", 0),
        ("NO_STREAM", 0),
        ("PAGES_MAX", 520),
        ("REST_GATHER", 250),
        ("REST_MERGE", 0),
    ];
    let defines = [defines(&model), defines(&cut)].concat();
    Source { defines, text: text.into(), entries: vec!["kie_decode"] }
}

fn source(text: &str) -> Source {
    Source { defines: defines(&[("N", 3)]), text: text.into(), entries: vec!["k"] }
}

#[test]
fn the_decode_kernel_compiles_without_spills() {
    let Some(nvrtc) = nvrtc("compiling the decode kernel") else { return };
    let compiled = compile_source(&nvrtc, &decode(), "sm_90a").unwrap();
    assert!(compiled.cubin.starts_with(b"\x7fELF"));
    let usage = compiled.usage();
    let [kernel] = &usage[..] else { panic!("{usage:?}\n{}", compiled.log) };
    assert_eq!(kernel.entry, "kie_decode");
    assert!(kernel.registers > 0 && kernel.registers <= 128, "{kernel:?}");
    // The last compilers before 13 need one register more than there are.
    let most = if nvrtc.version.0 >= 13 { 0 } else { 8 };
    assert!(kernel.spill_bytes <= most, "{kernel:?}");
}

#[test]
fn a_fault_in_the_source_is_told_with_its_line() {
    let Some(nvrtc) = nvrtc("faults of the source") else { return };
    let text = "extern \"C\" __global__ void k(int* p) {\n  *p = KIE_N + nothing;\n}\n";
    let error = compile_source(&nvrtc, &source(text), "sm_90a").unwrap_err();
    let Error::Compile { arch, detail } = &error else { panic!("{error}") };
    assert_eq!(arch, "sm_90a");
    assert!(detail.contains("kie(2)") && detail.contains("nothing"), "{detail}");
}

#[test]
fn an_unknown_architecture_is_told() {
    let Some(nvrtc) = nvrtc("an unknown architecture") else { return };
    let text = "extern \"C\" __global__ void k(int* p) { *p = KIE_N; }";
    let error = compile_source(&nvrtc, &source(text), "sm_970a").unwrap_err();
    assert!(error.to_string().contains("sm_970a") && error.to_string().contains("pip"), "{error}");
}

#[test]
fn keys_differ_with_all_they_depend_on() {
    let Some(nvrtc) = nvrtc("keys of the cache") else { return };
    let one = source("text");
    let key = nvrtc.key(&one, "sm_90a");
    assert_eq!(key, nvrtc.key(&one.clone(), "sm_90a"));
    assert_ne!(key, nvrtc.key(&one, "sm_100a"));
    assert_ne!(key, nvrtc.key(&source("text "), "sm_90a"));
    assert_ne!(key, nvrtc.key(&Source { defines: defines(&[("N", 4)]), ..one }, "sm_90a"));
}
