//! NVRTC, found at run time: where it may lie, and one compilation. Works without a GPU and
//! without a driver, so that every machine can check that the kernels compile and how many
//! registers they take.

use std::ffi::{c_int, CStr, CString};
use std::path::{Path, PathBuf};

use super::ffi::{self, Handle, NvrtcApi};
use crate::error::{Error, Result};
use crate::mono::cache::Key;
use crate::mono::library::Library;
use crate::mono::machine::Source;

/// Oldest version that knows sm_90a.
const OLDEST: (i32, i32) = (12, 0);
/// Names of the library, newest first.
const NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
const REMEDY: &str = "pip install 'kie[cuda]', or name the file in KIE_NVRTC";
/// What every kernel is compiled with, besides its architecture. ptxas tells registers and spills.
const OPTIONS: [&str; 3] = ["--std=c++17", "--ptxas-options=-v", "--generate-line-info"];

/// The compiler.
#[derive(Debug)]
pub struct Nvrtc {
    api: NvrtcApi,
    /// Major and minor.
    pub version: (i32, i32),
    /// The file.
    pub path: PathBuf,
}

/// What a compilation gives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiled {
    /// Code for one architecture.
    pub cubin: Vec<u8>,
    /// Warnings, and what ptxas says of each kernel.
    pub log: String,
}

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

impl Nvrtc {
    /// The first of `candidates` that works; one newer than a driver of version `newest_major`
    /// would, is passed over.
    ///
    /// # Errors
    /// [`Error::BackendMissing`] with what was tried and why it did not do.
    pub fn open(candidates: &[PathBuf], newest_major: Option<i32>) -> Result<Self> {
        let mut tried = Vec::new();
        for path in candidates {
            match Self::open_one(path, newest_major) {
                Ok(found) => return Ok(found),
                Err(why) if why.contains(&*path.to_string_lossy()) => tried.push(why),
                Err(why) => tried.push(format!("{}: {why}", path.display())),
            }
        }
        let tried = if tried.is_empty() { "nowhere to look".into() } else { tried.join("; ") };
        Err(Error::BackendMissing {
            device: "cuda".into(),
            detail: format!("no usable NVRTC, which compiles the kernels ({tried}); {REMEDY}"),
        })
    }

    fn open_one(path: &Path, newest_major: Option<i32>) -> std::result::Result<Self, String> {
        let library = Library::open(path)?;
        let api = NvrtcApi::load(&library).map_err(|name| format!("has no symbol {name}"))?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: two live integers.
        let code = unsafe { (api.nvrtcVersion)(&mut major, &mut minor) };
        if code != 0 {
            return Err(format!("does not tell its version (nvrtcVersion: error {code})"));
        }
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
                "is version {major}.{minor}, newer than the driver (CUDA {most}): update the \
                 driver, or pip install {package}"
            ));
        }
        let path = library.file_of("nvrtcVersion").unwrap_or_else(|| path.to_path_buf());
        // The compiler asks the loader for this library by its bare name, which finds one that is
        // loaded already; a pip package's folder is not where the loader searches. If it is not
        // there, the compiler says so when it needs it.
        let builtins = format!("libnvrtc-builtins.so.{major}.{minor}");
        let _ = Library::open(&path.with_file_name(builtins));
        Ok(Self { api, version: (major, minor), path })
    }

    /// What a cached result of [`compile_source`] depends on.
    pub fn key(&self, source: &Source, arch: &str) -> Key {
        let version = format!("nvrtc {}.{}", self.version.0, self.version.1);
        let text = with_defines(source);
        let entries = source.entries.join(" ");
        let options = OPTIONS.join(" ");
        Key::of(&[&version, arch, &options, &entries, &text].map(str::as_bytes))
    }

    fn words(&self, code: c_int) -> String {
        // SAFETY: takes any number.
        let words = unsafe { (self.api.nvrtcGetErrorString)(code) };
        if words.is_null() {
            return format!("NVRTC error {code}");
        }
        // SAFETY: not null, hence a C string that stands for ever.
        unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned()
    }

    fn fault(&self, arch: &str, what: &str, code: c_int) -> Error {
        let hint = match code {
            ffi::NVRTC_INVALID_OPTION => {
                "; if it does not know the architecture, it is too old: pip install -U 'kie[cuda]'"
            }
            ffi::NVRTC_BUILTINS => "; libnvrtc-builtins of the same version must lie beside it",
            _ => "",
        };
        let (major, minor) = self.version;
        let detail = format!(
            "{what}: {} ({code}; NVRTC {major}.{minor}, {}){hint}",
            self.words(code),
            self.path.display()
        );
        Error::Compile { arch: arch.into(), detail }
    }
}

/// Compiles for `arch`, such as `sm_90a`. Needs no GPU and no driver.
///
/// # Errors
/// [`Error::Compile`] with the compiler's log.
pub fn compile_source(nvrtc: &Nvrtc, source: &Source, arch: &str) -> Result<Compiled> {
    let zero = |_| Error::Compile { arch: arch.into(), detail: "a zero byte in the source".into() };
    let text = CString::new(with_defines(source)).map_err(zero)?;
    let program = Program::new(nvrtc, arch, &text)?;
    let options = OPTIONS.iter().map(|&option| option.to_owned());
    let options = options.chain([format!("--gpu-architecture={arch}")]);
    let options = options.map(CString::new).collect::<std::result::Result<Vec<_>, _>>();
    let options = options.map_err(zero)?;
    let pointers: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
    // SAFETY: the program is live, the options are C strings that outlive the call.
    let code = unsafe {
        (nvrtc.api.nvrtcCompileProgram)(program.handle, pointers.len() as c_int, pointers.as_ptr())
    };
    let log = program.log();
    match code {
        0 => Ok(Compiled { cubin: program.cubin()?, log }),
        ffi::NVRTC_COMPILATION => Err(Error::Compile { arch: arch.into(), detail: log }),
        _ => Err(nvrtc.fault(arch, &format!("nvrtcCompileProgram: {}", log.trim()), code)),
    }
}

/// Line numbers of the log are those of `source.text`.
fn with_defines(source: &Source) -> String {
    let mut text = String::with_capacity(source.text.len() + 64 * source.defines.len());
    for (name, value) in &source.defines {
        text.extend(["#define ", name, " ", value, "\n"]);
    }
    text + "#line 1 \"kie\"\n" + &source.text
}

/// A program of NVRTC, destroyed at the end.
struct Program<'a> {
    nvrtc: &'a Nvrtc,
    arch: &'a str,
    handle: Handle,
}

type SizeOf = unsafe extern "C" fn(Handle, *mut usize) -> c_int;
type BytesOf = unsafe extern "C" fn(Handle, *mut std::ffi::c_char) -> c_int;

impl<'a> Program<'a> {
    fn new(nvrtc: &'a Nvrtc, arch: &'a str, text: &CStr) -> Result<Self> {
        let mut handle = 0;
        // SAFETY: the text and the name are C strings; there are no headers.
        let code = unsafe {
            (nvrtc.api.nvrtcCreateProgram)(
                &mut handle,
                text.as_ptr(),
                c"kie".as_ptr(),
                0,
                std::ptr::null(),
                std::ptr::null(),
            )
        };
        match code {
            0 => Ok(Self { nvrtc, arch, handle }),
            _ => Err(nvrtc.fault(arch, "nvrtcCreateProgram", code)),
        }
    }

    /// What `bytes` writes, as long as `size` says.
    fn take(&self, what: &str, size: SizeOf, bytes: BytesOf) -> Result<Vec<u8>> {
        let mut len = 0;
        // SAFETY: the program is live.
        let code = unsafe { size(self.handle, &mut len) };
        if code != 0 {
            return Err(self.nvrtc.fault(self.arch, &format!("{what}Size"), code));
        }
        let mut out = vec![0_u8; len];
        // SAFETY: the program is live and `out` has the length that it asked for.
        match unsafe { bytes(self.handle, out.as_mut_ptr().cast()) } {
            0 => Ok(out),
            code => Err(self.nvrtc.fault(self.arch, what, code)),
        }
    }

    fn log(&self) -> String {
        let api = &self.nvrtc.api;
        let log = self.take("log", api.nvrtcGetProgramLogSize, api.nvrtcGetProgramLog);
        let log = log.unwrap_or_else(|error| error.to_string().into_bytes());
        String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned()
    }

    fn cubin(&self) -> Result<Vec<u8>> {
        let api = &self.nvrtc.api;
        self.take("nvrtcGetCUBIN", api.nvrtcGetCUBINSize, api.nvrtcGetCUBIN)
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: the program is live and used no more. Failing to free it does no harm.
        let _ = unsafe { (self.nvrtc.api.nvrtcDestroyProgram)(&mut self.handle) };
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
        let usage = Compiled { cubin: Vec::new(), log: log.into() }.usage();
        let kernel = |entry: &str, registers, stack_bytes, spill_bytes| Usage {
            entry: entry.into(),
            registers,
            stack_bytes,
            spill_bytes,
        };
        assert_eq!(usage, [kernel("a", 128, 8, 12), kernel("b", 9, 0, 0)]);
    }
}
