//! NVRTC, found at run time: where it may lie, which versions do, and what it says of registers.
//! Works without a GPU and without a driver, so that every machine can check that the kernels
//! compile.

use std::ffi::c_int;
use std::path::{Path, PathBuf};

use super::ffi;
use crate::error::{Error, Result};
use crate::gpu::api::first_of;
use crate::gpu::rtc::{Compiled, Compiler, Dialect};
use crate::machine::library::Library;

/// Oldest version that knows sm_90a.
const OLDEST: (i32, i32) = (12, 0);
/// Names of the library, newest first.
const NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
const REMEDY: &str = "pip install 'kie[cuda]', or name the file in KIE_NVRTC";

/// ptxas tells registers and spills.
static NVRTC: Dialect = Dialect {
    name: "NVRTC",
    prefix: "nvrtc",
    code: "CUBIN",
    virtual_code: Some(("compute_", "PTX")),
    options: &["--std=c++17", "--ptxas-options=-v", "--generate-line-info"],
    arch_option: "--gpu-architecture=",
    hint,
    check: |_| Ok(()),
};

/// What ptxas says of one kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Usage {
    /// The kernel.
    pub entry: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of stack of a thread.
    pub stack_bytes: u32,
    /// Bytes of registers stored to the stack because there are too few.
    pub spill_bytes: u32,
}

/// Where NVRTC may be, in order: the file in `KIE_NVRTC` and nothing else if that is set; or else,
/// version by version and the newest first, where the loader searches, in the toolkits' folders,
/// and in `folders` (a pip package's).
pub fn candidates(folders: &[PathBuf]) -> Vec<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    if let Some(file) = set("KIE_NVRTC") {
        return vec![file];
    }
    let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(set);
    let homes = homes.chain([PathBuf::from("/usr/local/cuda")]).map(|home| home.join("lib64"));
    in_order(homes.chain(folders.iter().cloned()).collect())
}

/// Version before place: newer compilers make better code of the same kernels.
fn in_order(folders: Vec<PathBuf>) -> Vec<PathBuf> {
    let files = |name| {
        let files = folders.iter().map(move |folder: &PathBuf| folder.join(name));
        std::iter::once(PathBuf::from(name)).chain(files.filter(|file| file.is_file()))
    };
    NAMES.into_iter().flat_map(files).collect()
}

/// The first of `candidates` that works; one newer than a driver of version `newest_major` would,
/// is passed over.
///
/// # Errors
/// [`Error::BackendMissing`] with what was tried and why it did not do.
pub fn open(candidates: &[PathBuf], newest_major: Option<i32>) -> Result<Compiler> {
    open_for("cuda", candidates, newest_major)
}

/// The same for a device, which the error names.
pub(super) fn open_for(
    device: &str,
    candidates: &[PathBuf],
    newest_major: Option<i32>,
) -> Result<Compiler> {
    first_of(candidates, |path| open_one(path, newest_major)).map_err(|tried| {
        let detail = format!("no usable NVRTC, which compiles the kernels ({tried}); {REMEDY}");
        Error::BackendMissing { device: device.into(), detail }
    })
}

fn open_one(path: &Path, newest_major: Option<i32>) -> std::result::Result<Compiler, String> {
    let nvrtc = Compiler::open(&NVRTC, path)?;
    let (major, minor) = nvrtc.version;
    if (major, minor) < OLDEST {
        let (major_min, minor_min) = OLDEST;
        return Err(format!(
            "is version {major}.{minor}, at least {major_min}.{minor_min} is needed"
        ));
    }
    if let Some(most) = newest_major.filter(|&most| major > most) {
        // Up to 12 the packages carry the version in their name.
        let package = match most {
            ..=12 => format!("nvidia-cuda-nvrtc-cu{most}"),
            _ => format!("'nvidia-cuda-nvrtc<{}'", most + 1),
        };
        return Err(format!(
            "is version {major}.{minor}, newer than the driver (CUDA {most}): update the driver, \
             or pip install {package}"
        ));
    }
    // The compiler asks the loader for this library by its bare name, which finds one that is
    // loaded already; a pip package's folder is not where the loader searches. If it is not there,
    // the compiler says so when it needs it.
    let builtins = format!("libnvrtc-builtins.so.{major}.{minor}");
    let _ = Library::open(&nvrtc.path.with_file_name(builtins));
    Ok(nvrtc)
}

fn hint(code: c_int) -> &'static str {
    match code {
        ffi::NVRTC_INVALID_OPTION => {
            "; if it does not know the architecture, it is too old: pip install -U 'kie[cuda]'"
        }
        ffi::NVRTC_BUILTINS => "; libnvrtc-builtins of the same version must lie beside it",
        _ => "",
    }
}

impl Compiled {
    /// Registers and spills of each kernel, as the log tells them.
    pub fn usage(&self) -> Vec<Usage> {
        let mut found: Vec<Usage> = Vec::new();
        for line in self.log.lines() {
            if let Some((_, rest)) = line.split_once("Compiling entry function '") {
                let entry = rest.split('\'').next().unwrap_or("").to_owned();
                found.push(Usage { entry, registers: 0, stack_bytes: 0, spill_bytes: 0 });
            } else if let Some(usage) = found.last_mut() {
                let before = |what| number_before(line, what);
                usage.registers = before(" registers").unwrap_or(usage.registers);
                // Functions that were not inlined have lines of their own.
                let most = |seen: u32, what| seen.max(before(what).unwrap_or(0));
                usage.stack_bytes = most(usage.stack_bytes, " bytes stack frame");
                usage.spill_bytes = most(usage.spill_bytes, " bytes spill stores");
            }
        }
        found
    }
}

/// The number that stands right before `what`.
fn number_before(line: &str, what: &str) -> Option<u32> {
    let before = &line[..line.find(what)?];
    before.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn newer_versions_come_first_and_then_places() {
        let name = format!("kie-nvrtc-{}", std::process::id());
        let root = std::env::temp_dir().join(name);
        let [one, two] = ["one", "two"].map(|name| root.join(name));
        for (folder, files) in [(&one, &NAMES[1..]), (&two, &NAMES[..2])] {
            std::fs::create_dir_all(folder).unwrap();
            files.iter().for_each(|file| std::fs::write(folder.join(file), b"").unwrap());
        }
        let found = in_order(vec![one.clone(), root.join("none"), two.clone()]);
        let wanted = [
            NAMES[0].into(),
            two.join(NAMES[0]),
            NAMES[1].into(),
            one.join(NAMES[1]),
            two.join(NAMES[1]),
            NAMES[2].into(),
            one.join(NAMES[2]),
        ];
        std::fs::remove_dir_all(&root).unwrap();
        assert_eq!(found, wanted);
    }

    #[test]
    fn usage_is_read_from_the_log() {
        let log = "ptxas info    : 0 bytes gmem\n\
                   ptxas info    : Compiling entry function 'a' for 'sm_90a'\n\
                   ptxas info    : Function properties for a\n\
                   \x20   8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads\n\
                   ptxas info    : Used 128 registers, used 2 barriers, 8 bytes cumulative stack\n\
                   ptxas info    : Compiling entry function 'b' for 'sm_90a'\n\
                   ptxas info    : Used 9 registers\n";
        let usage = Compiled { code: Vec::new(), log: log.into() }.usage();
        let kernel = |entry: &str, registers, stack_bytes, spill_bytes| Usage {
            entry: entry.into(),
            registers,
            stack_bytes,
            spill_bytes,
        };
        assert_eq!(usage, [kernel("a", 128, 8, 12), kernel("b", 9, 0, 0)]);
    }
}
