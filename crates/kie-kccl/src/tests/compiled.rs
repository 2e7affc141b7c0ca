//! The kernel for GPUs, by their compilers where they are found: it compiles, and no thread needs
//! memory for registers.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use kie_gcn::lint::{self, Words};
use kie_gcn::toolchain::disassemble;
use kie_kernels::cuda::nvrtc::{self, candidates};
use kie_kernels::machine::Platform;

use crate::device::source;

/// One line says that the test is skipped, which CI does not accept.
fn skipped(test: &str, why: &str) {
    assert_ne!(std::env::var("CI").as_deref(), Ok("true"), "{test}: {why}");
    // Past the capture of the test runner; nobody may be listening.
    let _ = std::io::stderr().write_all(format!("skipped: {test}: {why}\n").as_bytes());
}

/// `libnvrtc` folders of the repository's own Python environment.
fn environment() -> Vec<PathBuf> {
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

#[test]
fn nvidia() {
    let nvrtc = match nvrtc::open(&candidates(&environment()), None) {
        Ok(nvrtc) => nvrtc,
        Err(why) => return skipped("compiling collectives for sm_90a", &why.to_string()),
    };
    for ranks in [1, 2, 4, 8] {
        let compiled = nvrtc.compile(&source(Platform::Cuda, ranks), "sm_90a").unwrap();
        let usage = compiled.usage();
        assert_eq!(usage.len(), 2, "{}", compiled.log);
        for kernel in &usage {
            let most = if kernel.entry == "kie_collective" && ranks <= 4 { 64 } else { 128 };
            assert!(kernel.registers <= most, "{ranks}: {kernel:?}");
            assert_eq!((kernel.stack_bytes, kernel.spill_bytes), (0, 0), "{ranks}: {kernel:?}");
        }
    }
}

#[test]
fn amd() {
    let folder = std::env::temp_dir().join(format!("kie-kccl-hip-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let [from, to] = ["kccl.hip", "kccl.co"].map(|name| folder.join(name));
    let flags = "-x hip --offload-arch=gfx942 --offload-device-only --no-gpu-bundle-output \
                 -nogpuinc -nogpulib -std=c++17 -O3 -Wall -Werror -Wno-unused-const-variable \
                 -Wno-unused-function";
    for ranks in [2, 8] {
        let source = source(Platform::Hip, ranks);
        let defines = source.defines.iter().map(|(name, to)| format!("#define {name} {to}\n"));
        std::fs::write(&from, defines.collect::<String>() + &source.text).unwrap();
        let mut clang = Command::new("clang++-19");
        let done = clang.args(flags.split_whitespace()).arg(&from).arg("-o").arg(&to).output();
        let done = match done {
            Ok(done) => done,
            Err(why) => return skipped("compiling collectives for gfx942", &why.to_string()),
        };
        let words = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "{}", words.chars().take(4000).collect::<String>());
        let faults = lint::check(&disassemble(&to).unwrap(), Words::Flags).unwrap();
        assert!(faults.is_empty(), "{ranks} ranks: {faults:#?}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}
