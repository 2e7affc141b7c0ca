//! The real kernels for gfx942, by plain clang without ROCm's headers: they compile, no thread
//! needs memory for registers, and what a wave may have is not exceeded. What kernels/hip promises
//! between lanes and between waves is run on the host.

use std::path::Path;
use std::process::Command;

use kie_gcn::lint::{self, Words};
use kie_gcn::toolchain::disassemble;

use super::Folder;
use crate::gpu::api::Api;
use crate::hip::code_object::{kernels, Kernel};
use crate::machine::{Platform, Source};
use crate::meter::Mode;
use crate::mono::echo;
use crate::mono::lower::model::Model;
use crate::mono::lower::partition::Partition;
use crate::mono::{shapes, source, upload};

/// Vector registers of a unit's lane, which its waves share; units of a multiprocessor.
const REGISTERS: u32 = 512;
const UNITS: u32 = 4;

/// Shapes, and how many instructions of their kernels of one column, of several and (of one shape)
/// with drafts reach a thread's own memory, at most: one kernel's threads have a register or two
/// too few.
const SPILLS: [(&str, [usize; 3]); 7] = [
    ("2b", [0, 0, 0]),
    ("lane", [0, 0, 0]),
    ("1b", [0, 0, 0]),
    ("lane of eight", [0, 0, 0]),
    ("gpt-oss-120b of eight", [0, 0, 0]),
    ("kimi-k2 of eight", [0, 0, 0]),
    ("qwen3-coder-next of eight", [7, 0, 0]),
];

/// Runs clang; false, with one line that says so, where there is none and this is not CI.
fn clang(test: &str, args: &[&str], files: [&Path; 2]) -> bool {
    let [from, to] = files;
    let done = Command::new("clang++-19").args(args).arg(from).arg("-o").arg(to).output();
    match done {
        Ok(done) => {
            let words = String::from_utf8_lossy(&done.stderr);
            assert!(
                done.status.success(),
                "{test}: {}",
                words.chars().take(4000).collect::<String>()
            );
            true
        }
        Err(why) => {
            super::skipped(test, &format!("clang++-19: {why}; apt-get install clang-19 lld-19"));
            false
        }
    }
}

/// What the compiler says of the kernel, and the code as text.
fn compile(test: &str, source: &Source) -> Option<(Kernel, String)> {
    let folder = Folder::new("kernels");
    let [from, to] = ["kie.hip", "kie.co"].map(|name| folder.0.join(name));
    let defines = source.defines.iter().map(|(name, value)| format!("#define {name} {value}\n"));
    std::fs::write(&from, defines.collect::<String>() + &source.text).unwrap();
    // A loop that stays rolled after all (four columns) is no fault: spills would be.
    let flags = "-x hip --offload-arch=gfx942 --offload-device-only --no-gpu-bundle-output \
                 -nogpuinc -nogpulib -std=c++17 -O3 -Wall -Werror -Wno-unused-const-variable \
                 -Wno-pass-failed";
    let flags: Vec<_> = flags.split_whitespace().collect();
    if !clang(test, &flags, [&from, &to]) {
        return None;
    }
    let found = kernels(&std::fs::read(&to).unwrap()).unwrap();
    let [kernel] = &found[..] else { panic!("{found:?}") };
    assert_eq!(kernel.name, source.entries[0]);
    Some((kernel.clone(), disassemble(&to).unwrap()))
}

/// The rules over machine code are kept; how many instructions reach memory of a thread's own,
/// which is a fault but in the widest kernels.
fn keeps_rules(test: &str, (_, listing): &(Kernel, String), words: Words) -> usize {
    let faults = lint::check(listing, words).unwrap();
    let (own, others): (Vec<_>, Vec<_>) =
        faults.iter().partition(|fault| fault.ends_with(lint::MEMORY_OF_A_THREAD));
    assert!(others.is_empty(), "{test}: {others:#?}");
    own.len()
}

#[test]
fn the_decode_kernel_compiles_without_spills() {
    let machine = shapes::amd();
    let one_of_eight = Model { ranks: 8, ..shapes::model("lane") };
    let experts = shapes::with_experts("gpt-oss-120b", 8);
    let latents = shapes::with_latents("kimi-k2", 8);
    let recurrent = shapes::coder_next(8);
    let models = ["2b", "lane", "1b"].map(shapes::model).into_iter();
    let models = models.chain([one_of_eight, experts, latents, recurrent]);
    let mut seen = SPILLS.map(|(name, _)| (name, [0; 3]));
    for ((name, spills), model) in seen.iter_mut().zip(models) {
        let kinds =
            Partition::new(&model, &machine, 33_280).unwrap().kernels(&model, Platform::Hip);
        // Where classes of layers differ, 64 KB may have room for one.
        assert!(kinds.len() > 1 || model.classes.len() > 1, "{name}: several columns, too");
        for kind in kinds.into_iter().filter(|kind| !kind.lookup || *name == "2b") {
            let (source, partition) = shapes::decode(&model, &machine, Platform::Hip, kind);
            let words = if model.ranks > 1 { Words::System } else { Words::Device };
            let Some(compiled) = compile(name, &source) else { return };
            // A slot whose scalar registers went into lanes of a vector register still counts in
            // `private_bytes`, so accesses are counted instead.
            spills[usize::from(kind.columns > 1) + usize::from(kind.lookup)] =
                keeps_rules(name, &compiled, words);
            let kernel = compiled.0;
            let threads = partition.threads(64);
            assert_eq!(
                (kernel.threads_max, kernel.wave_lanes),
                (threads, 64),
                "{name}: {kernel:?}"
            );
            let waves = threads.div_ceil(64).div_ceil(UNITS);
            assert!(kernel.registers <= REGISTERS / waves, "{name}: {kernel:?}");
            let most = crate::hip::Runtime::SPILLED_MAX;
            assert!(kernel.spilled_registers <= most, "{name}: {kernel:?}");
            assert_eq!(kernel.args_bytes, [size_of::<crate::mono::wire::Args>()], "{name}");
            assert_eq!(kernel.shared_bytes, crate::hip::Runtime::PLATFORM_SHARED_BYTES, "{name}");
        }
    }
    for ((name, now), (_, most)) in seen.iter().zip(&SPILLS) {
        assert!(now.iter().zip(most).all(|(now, most)| now <= most), "{name}: {now:?} of {most:?}");
    }
}

/// DeepSeek-V4-Flash: on one GPU its kernel of one column fits and keeps the rules; on several the
/// vectors of a step take the shared memory that weights want, which is said.
#[test]
#[ignore = "minutes: make gcn"]
fn entries_compile_on_one_gpu_and_are_refused_on_several() {
    let machine = shapes::amd();
    for ranks in [1, 2, 4, 8] {
        let model = shapes::with_entries(ranks);
        let made = Partition::new(&model, &machine, 33_280).and_then(|partition| {
            let kinds = partition.kernels(&model, Platform::Hip);
            source::decode(Platform::Hip, (&model, &partition), kinds[0], Mode::Full)
        });
        if ranks > 1 {
            let error = made.err().unwrap().to_string();
            assert!(error.contains("bytes of shared memory"), "{ranks} ranks: {error}");
            continue;
        }
        let Some(compiled) = compile("entries", &made.unwrap()) else { return };
        assert_eq!(keeps_rules("entries", &compiled, Words::Device), 0);
        assert_eq!(compiled.0.spilled_registers, 0, "{:?}", compiled.0);
    }
}

/// Shapes, how many instructions of their prefill kernels reach a thread's own memory, and
/// registers of a thread, at most: of six waves two share a unit's, so none may have more than 256.
const PREFILL: [(&str, usize, u32); 11] = [
    ("1b", 0, 174),
    ("8b", 0, 184),
    ("lane", 0, 157),
    ("2b", 0, 158),
    ("1b-int4", 0, 174),
    ("1b-fp8", 0, 174),
    ("qwen3-30b-fp8", 0, 256),
    ("8b on eight", 0, 189),
    ("2b on eight", 0, 164),
    ("qwen3-30b-fp8 on four", 4, 256),
    ("gpt-oss-120b on eight", 0, 184),
];

#[test]
fn the_prefill_kernel_compiles_without_spills() {
    let machine = shapes::amd();
    let mut seen = Vec::new();
    for (name, ..) in PREFILL {
        let model = match name {
            "8b on eight" => shapes::sliced(8),
            "2b on eight" => Model { ranks: 8, ..shapes::model("lane") },
            "qwen3-30b-fp8" => shapes::with_experts(name, 1),
            "qwen3-30b-fp8 on four" => shapes::with_experts("qwen3-30b-fp8", 4),
            "gpt-oss-120b on eight" => shapes::with_experts("gpt-oss-120b", 8),
            name => shapes::model(name),
        };
        let sources = shapes::prefill_on(&model, &machine);
        let [source] = &sources[..] else { panic!("{name}: {} kernels", sources.len()) };
        let Some(compiled) = compile(name, source) else { return };
        let spills = keeps_rules(name, &compiled, Words::Phases);
        let products = compiled.1.matches("v_mfma_f32_16x16x16_f16").count();
        assert!(products > 0, "{name}: nothing for the matrix unit");
        let kernel = compiled.0;
        assert_eq!((kernel.threads_max, kernel.wave_lanes), (384, 64), "{name}: {kernel:?}");
        assert_eq!(kernel.shared_bytes, crate::hip::Runtime::PLATFORM_SHARED_BYTES, "{name}");
        seen.push((name, spills, kernel.registers));
    }
    let fits = |(now, most): (&(&str, usize, u32), &(&str, usize, u32))| {
        now.1 <= most.1 && now.2 <= most.2 && most.2 <= 256
    };
    assert!(seen.iter().zip(&PREFILL).all(fits), "{seen:?} of {PREFILL:?}");
    // A page of a wide head does not fit: the decode kernel has its prompts.
    assert!(shapes::prefill_on(&shapes::coder_next(1), &machine).is_empty());
}

#[test]
fn the_packing_kernel_compiles_without_spills() {
    let Some(compiled) = compile("packing", &upload::kernel(Platform::Hip)) else { return };
    assert_eq!(keeps_rules("packing", &compiled, Words::None), 0);
    let kernel = compiled.0;
    assert_eq!((kernel.threads_max, kernel.args_bytes.as_slice()), (1024, &[32][..]));
}

#[test]
fn the_echo_kernel_compiles() {
    let Some(compiled) = compile("echo", &echo::kernel(Platform::Hip)) else { return };
    assert_eq!(keeps_rules("echo", &compiled, Words::None), 0);
}

#[test]
fn spills_are_seen() {
    let text = "extern \"C\" __attribute__((global)) void k(int* p, int n) {\n  int a[64];\n  \
                for (int i = 0; i < 64; ++i) a[i] = p[i] * i;\n  p[0] = a[n] + a[p[n]];\n}\n";
    let source = Source { defines: vec![], text: text.into(), entries: vec!["k"] };
    let Some((kernel, text)) = compile("spills", &source) else { return };
    let faults = lint::check(&text, Words::None).unwrap();
    let found = faults.iter().any(|fault| fault.ends_with("memory of a thread"));
    assert!(found && kernel.private_bytes >= 256, "{kernel:?} {faults:?}");
    assert_eq!(kernel.args_bytes, [8, 4]);
}

#[test]
fn lanes_and_waves_do_what_they_promise() {
    let folder = Folder::new("host");
    let program = folder.0.join("amd_on_host");
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let source = root.join("src/hip/tests/on_host.cc");
    let include = format!("-I{}", root.join("kernels").display());
    let flags = ["-std=c++20", "-O1", "-w", "-pthread", &include];
    if !clang("lanes and waves on the host", &flags, [&source, &program]) {
        return;
    }
    let ran = Command::new(&program).output().unwrap();
    let words = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success() && words == "passed\n", "{words}");
}
