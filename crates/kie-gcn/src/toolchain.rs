//! From a source to machine code and its text: clang, lld and llvm-objdump of LLVM 19, and a cache
//! on disk.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

use kie_kernels::machine::cache::{Cache, Key};
use kie_kernels::machine::Source;
use kie_kernels::{Error, Result};

/// What is compiled for.
pub const ARCH: &str = "gfx942";
const COMPILER: &str = "clang++-19";
const DISASSEMBLER: &str = "llvm-objdump-19";
const REMEDY: &str = "apt-get install clang-19 lld-19 llvm-19";
/// As hipRTC compiles for a GPU.
const FLAGS: &str = "-x hip --offload-arch=gfx942 --offload-device-only --no-gpu-bundle-output \
                     -nogpuinc -nogpulib -std=c++17 -O3 -w";

/// Machine code, and the same as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiled {
    /// A linked code object.
    pub object: Vec<u8>,
    /// What llvm-objdump prints of it.
    pub listing: String,
}

/// A name that no other call in any process has.
fn unique(folder: &Path, extension: &str) -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    folder.join(format!("kie-gcn-{}-{number}.{extension}", std::process::id()))
}

fn run(command: &mut Command) -> Result<Vec<u8>> {
    let name = command.get_program().to_string_lossy().into_owned();
    let missing = |why: std::io::Error| Error::BackendMissing {
        device: "gcn".to_owned(),
        detail: format!("{name}: {why}; {REMEDY}"),
    };
    let done = command.output().map_err(missing)?;
    if done.status.success() {
        return Ok(done.stdout);
    }
    let words = String::from_utf8_lossy(&done.stderr);
    let detail = words.lines().take(60).collect::<Vec<_>>().join("\n");
    Err(Error::Compile { arch: ARCH.to_owned(), detail })
}

/// Whether the tools are here.
pub fn is_here() -> bool {
    [COMPILER, DISASSEMBLER].iter().all(|tool| run(Command::new(tool).arg("--version")).is_ok())
}

/// The text of a linked code object.
///
/// # Errors
/// [`Error::BackendMissing`] where there is no llvm-objdump, [`Error::Compile`] with its words.
pub fn disassemble(object: &Path) -> Result<String> {
    let printed = run(Command::new(DISASSEMBLER).args(["-d", "--mcpu=gfx942"]).arg(object))?;
    Ok(String::from_utf8_lossy(&printed).into_owned())
}

/// Compiles, unless the cache in `folder` has it.
///
/// # Errors
/// [`Error::BackendMissing`] where a tool is missing, [`Error::Compile`] with the compiler's words.
pub fn compile(source: &Source, folder: &Path) -> Result<Compiled> {
    let defines = source.defines.iter().map(|(name, value)| format!("#define {name} {value}\n"));
    let text = defines.collect::<String>() + &source.text;
    let key = Key::of(&[COMPILER.as_bytes(), FLAGS.as_bytes(), text.as_bytes()]);
    let cache = Cache::at(folder);
    if let Some(found) = cache.get(key).and_then(|bytes| split(&bytes)) {
        return Ok(found);
    }
    let failed = |why: std::io::Error| Error::Failed(format!("{}: {why}", folder.display()));
    std::fs::create_dir_all(folder).map_err(failed)?;
    let (from, to) = (unique(folder, "hip"), unique(folder, "co"));
    std::fs::write(&from, text).map_err(failed)?;
    let flags = FLAGS.split_whitespace();
    let built = run(Command::new(COMPILER).args(flags).arg(&from).arg("-o").arg(&to))
        .and_then(|_| Ok((std::fs::read(&to).map_err(failed)?, disassemble(&to)?)));
    for file in [&from, &to] {
        let _ = std::fs::remove_file(file);
    }
    let (object, listing) = built?;
    let mut bytes = (object.len() as u64).to_le_bytes().to_vec();
    bytes.extend(&object);
    bytes.extend(listing.as_bytes());
    // The cache only saves time.
    let _ = cache.put(key, &bytes);
    Ok(Compiled { object, listing })
}

/// An entry of the cache: the object's length, the object, its text.
fn split(bytes: &[u8]) -> Option<Compiled> {
    let (length, rest) = bytes.split_first_chunk::<8>()?;
    let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
    let (object, listing) = rest.split_at_checked(length)?;
    let listing = String::from_utf8(listing.to_vec()).ok()?;
    Some(Compiled { object: object.to_vec(), listing })
}
