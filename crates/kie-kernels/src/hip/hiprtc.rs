//! hipRTC, found at run time: where it may lie, and one compilation.

use std::ffi::{c_char, c_int, CStr, CString};
use std::path::{Path, PathBuf};

use super::code_object::{kernels, Kernel};
use super::ffi::{self, Handle, HiprtcApi};
use super::runtime;
use crate::error::{Error, Result};
use crate::mono::cache::Key;
use crate::mono::library::Library;
use crate::mono::machine::Source;

/// Names of the library, newest first.
const NAMES: [&str; 3] = ["libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so"];
const REMEDY: &str = "install ROCm's hiprtc, or name the file in KIE_HIPRTC";
/// What every kernel is compiled with, besides its architecture.
const OPTIONS: [&str; 2] = ["-std=c++17", "-O3"];

/// The compiler.
#[derive(Debug)]
pub struct Hiprtc {
    api: HiprtcApi,
    /// Major and minor.
    pub version: (i32, i32),
    /// The file.
    pub path: PathBuf,
}

/// What a compilation gives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiled {
    /// A code object for one architecture.
    pub code: Vec<u8>,
    /// Warnings.
    pub log: String,
    /// What the code object says of its kernels.
    pub kernels: Vec<Kernel>,
}

/// Where hipRTC may be, in order: the file in `KIE_HIPRTC` and nothing else if that is set; by
/// name; in ROCm's folders.
pub fn candidates() -> Vec<PathBuf> {
    match std::env::var_os("KIE_HIPRTC").filter(|file| !file.is_empty()) {
        Some(file) => vec![file.into()],
        None => runtime::candidates(&NAMES),
    }
}

impl Hiprtc {
    /// The first of `candidates` that works.
    ///
    /// # Errors
    /// [`Error::BackendMissing`] with what was tried and why it did not do.
    pub fn open(candidates: &[PathBuf], device: &str) -> Result<Self> {
        runtime::first_of(candidates, Self::open_one).map_err(|tried| Error::BackendMissing {
            device: device.into(),
            detail: format!("no usable hipRTC, which compiles the kernels ({tried}); {REMEDY}"),
        })
    }

    fn open_one(path: &Path) -> std::result::Result<Self, String> {
        let library = Library::open(path)?;
        let api = HiprtcApi::load(&library).map_err(|name| format!("has no symbol {name}"))?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: two live integers.
        let code = unsafe { (api.hiprtcVersion)(&mut major, &mut minor) };
        if code != 0 {
            return Err(format!("does not tell its version (hiprtcVersion: error {code})"));
        }
        Ok(Self { api, version: (major, minor), path: path.to_path_buf() })
    }

    /// What a cached result of [`compile_source`] depends on. The runtime's version is the finer
    /// one: it tells the patch, too.
    pub fn key(&self, source: &Source, arch: &str, runtime: i32) -> Key {
        let version = format!("hiprtc {}.{} {runtime}", self.version.0, self.version.1);
        let text = with_defines(source);
        let entries = source.entries.join(" ");
        let options = OPTIONS.join(" ");
        Key::of(&[&version, arch, &options, &entries, &text].map(str::as_bytes))
    }

    fn fault(&self, arch: &str, what: &str, code: c_int) -> Error {
        // SAFETY: takes any number.
        let words = unsafe { (self.api.hiprtcGetErrorString)(code) };
        let words = if words.is_null() {
            "unknown error".to_owned()
        } else {
            // SAFETY: not null, hence a C string that stands for ever.
            unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned()
        };
        let hint = match code {
            ffi::HIPRTC_INVALID_OPTION => {
                "; if it does not know the architecture, it is too old: update ROCm"
            }
            _ => "",
        };
        let (major, minor) = self.version;
        let file = self.path.display();
        let detail = format!("{what}: {words} ({code}; hipRTC {major}.{minor}, {file}){hint}");
        Error::Compile { arch: arch.into(), detail }
    }
}

impl Compiled {
    /// With what the code says of its kernels.
    ///
    /// # Errors
    /// What is wrong with the code.
    pub fn new(code: Vec<u8>, log: String) -> std::result::Result<Self, String> {
        let kernels = kernels(&code)?;
        Ok(Self { code, log, kernels })
    }
}

/// Compiles for `arch`, such as `gfx942`. Needs no GPU and no driver.
///
/// # Errors
/// [`Error::Compile`] with the compiler's log.
pub fn compile_source(hiprtc: &Hiprtc, source: &Source, arch: &str) -> Result<Compiled> {
    let refuse = |detail: &str| Error::Compile { arch: arch.into(), detail: detail.into() };
    let zero = |_| refuse("a zero byte in the source");
    let text = CString::new(with_defines(source)).map_err(zero)?;
    let program = Program::new(hiprtc, arch, &text)?;
    let options = OPTIONS.iter().map(|&option| option.to_owned());
    let options = options.chain([format!("--offload-arch={arch}")]);
    let options = options.map(CString::new).collect::<std::result::Result<Vec<_>, _>>();
    let options = options.map_err(zero)?;
    let pointers: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
    let count = pointers.len() as c_int;
    // SAFETY: the program is live, the options are C strings that outlive the call.
    let code =
        unsafe { (hiprtc.api.hiprtcCompileProgram)(program.handle, count, pointers.as_ptr()) };
    let log = program.log();
    match code {
        0 => Compiled::new(program.code()?, log)
            .map_err(|why| refuse(&format!("hipRTC made code that is not understood: {why}"))),
        ffi::HIPRTC_COMPILATION => Err(refuse(&log)),
        _ => Err(hiprtc.fault(arch, &format!("hiprtcCompileProgram: {}", log.trim()), code)),
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

/// A program of hipRTC, destroyed at the end.
struct Program<'a> {
    hiprtc: &'a Hiprtc,
    arch: &'a str,
    handle: Handle,
}

type SizeOf = unsafe extern "C" fn(Handle, *mut usize) -> c_int;
type BytesOf = unsafe extern "C" fn(Handle, *mut c_char) -> c_int;

impl<'a> Program<'a> {
    fn new(hiprtc: &'a Hiprtc, arch: &'a str, text: &CStr) -> Result<Self> {
        let (mut handle, none) = (0, std::ptr::null());
        let (text, name) = (text.as_ptr(), c"kie".as_ptr());
        // SAFETY: the text and the name are C strings; there are no headers.
        let code =
            unsafe { (hiprtc.api.hiprtcCreateProgram)(&mut handle, text, name, 0, none, none) };
        match code {
            0 => Ok(Self { hiprtc, arch, handle }),
            _ => Err(hiprtc.fault(arch, "hiprtcCreateProgram", code)),
        }
    }

    /// What `bytes` writes, as long as `size` says.
    fn take(&self, what: &str, size: SizeOf, bytes: BytesOf) -> Result<Vec<u8>> {
        let mut len = 0;
        // SAFETY: the program is live.
        let code = unsafe { size(self.handle, &mut len) };
        if code != 0 {
            return Err(self.hiprtc.fault(self.arch, &format!("{what}Size"), code));
        }
        let mut out = vec![0_u8; len];
        // SAFETY: the program is live and `out` has the length that it asked for.
        match unsafe { bytes(self.handle, out.as_mut_ptr().cast()) } {
            0 => Ok(out),
            code => Err(self.hiprtc.fault(self.arch, what, code)),
        }
    }

    fn log(&self) -> String {
        let api = &self.hiprtc.api;
        let log = self.take("log", api.hiprtcGetProgramLogSize, api.hiprtcGetProgramLog);
        let log = log.unwrap_or_else(|error| error.to_string().into_bytes());
        String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned()
    }

    fn code(&self) -> Result<Vec<u8>> {
        let api = &self.hiprtc.api;
        self.take("hiprtcGetCode", api.hiprtcGetCodeSize, api.hiprtcGetCode)
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: the program is live and used no more. Failing to free it does no harm.
        let _ = unsafe { (self.hiprtc.api.hiprtcDestroyProgram)(&mut self.handle) };
    }
}
