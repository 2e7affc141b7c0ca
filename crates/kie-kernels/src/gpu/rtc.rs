//! A run-time compiler, NVRTC or hipRTC: one compilation, and what its result depends on. Works
//! without a GPU and without a driver.

use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::machine::cache::Key;
use crate::machine::library::{text_of, Library};
use crate::machine::Source;

/// The sources do not compile: the same number in both.
const COMPILATION: c_int = 6;

/// A program, which only the compiler follows.
type Handle = usize;
type SizeOf = unsafe extern "C" fn(Handle, *mut usize) -> c_int;
type BytesOf = unsafe extern "C" fn(Handle, *mut c_char) -> c_int;
type Strings = *const *const c_char;

/// What makes one compiler different from the other.
#[derive(Debug)]
pub struct Dialect {
    /// As people write it.
    pub name: &'static str,
    /// What names of its functions begin with.
    pub prefix: &'static str,
    /// What its function for the code is called, behind `Get`.
    pub code: &'static str,
    /// The same for architectures that no machine is of, whose code a driver translates: how their
    /// names begin, and the function.
    pub virtual_code: Option<(&'static str, &'static str)>,
    /// What every kernel is compiled with, besides its architecture.
    pub options: &'static [&'static str],
    /// What stands before the architecture.
    pub arch_option: &'static str,
    /// What to do about an error; empty where nothing is known.
    pub hint: fn(c_int) -> &'static str,
    /// What is wrong with code that is not understood.
    pub check: fn(&[u8]) -> std::result::Result<(), String>,
}

/// Functions of a compiler.
#[derive(Debug)]
struct Calls {
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    create: unsafe extern "C" fn(
        *mut Handle,
        *const c_char,
        *const c_char,
        c_int,
        Strings,
        Strings,
    ) -> c_int,
    compile: unsafe extern "C" fn(Handle, c_int, Strings) -> c_int,
    log_size: SizeOf,
    log: BytesOf,
    code: (SizeOf, BytesOf),
    virtual_code: Option<(SizeOf, BytesOf)>,
    destroy: unsafe extern "C" fn(*mut Handle) -> c_int,
}

/// The compiler.
#[derive(Debug)]
pub struct Compiler {
    calls: Calls,
    dialect: &'static Dialect,
    /// Major and minor.
    pub version: (i32, i32),
    /// The file.
    pub path: PathBuf,
}

/// What a compilation gives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiled {
    /// Code for one architecture.
    pub code: Vec<u8>,
    /// Warnings, and what NVIDIA's assembler says of each kernel.
    pub log: String,
}

/// A function of a library by its name.
///
/// # Safety
/// The library's symbol has the type `F`, a function pointer.
unsafe fn function<F: Copy>(library: &Library, name: &str) -> std::result::Result<F, String> {
    const { assert!(size_of::<F>() == size_of::<*const c_void>()) };
    let at = library.symbol(name).ok_or_else(|| format!("has no symbol {name}"))?;
    // SAFETY: the caller's promise; the library is never closed.
    Ok(unsafe { std::mem::transmute_copy(&at) })
}

impl Compiler {
    /// The compiler in a file, or why it does not do.
    pub(crate) fn open(
        dialect: &'static Dialect,
        path: &Path,
    ) -> std::result::Result<Self, String> {
        let library = Library::open(path)?;
        let named = |what: &str| format!("{}{what}", dialect.prefix);
        // SAFETY: the vendors' symbols of these names have the signatures of `Calls`.
        let (calls, version) = unsafe {
            let code = |what: &str| -> std::result::Result<(SizeOf, BytesOf), String> {
                let size = function(&library, &named(&format!("Get{what}Size")))?;
                Ok((size, function(&library, &named(&format!("Get{what}")))?))
            };
            let version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int =
                function(&library, &named("Version"))?;
            let calls = Calls {
                error_string: function(&library, &named("GetErrorString"))?,
                create: function(&library, &named("CreateProgram"))?,
                compile: function(&library, &named("CompileProgram"))?,
                log_size: function(&library, &named("GetProgramLogSize"))?,
                log: function(&library, &named("GetProgramLog"))?,
                code: code(dialect.code)?,
                virtual_code: dialect.virtual_code.map(|(_, what)| code(what)).transpose()?,
                destroy: function(&library, &named("DestroyProgram"))?,
            };
            (calls, version)
        };
        let (mut major, mut minor) = (0, 0);
        // SAFETY: two live integers.
        let code = unsafe { version(&mut major, &mut minor) };
        if code != 0 {
            let call = named("Version");
            return Err(format!("does not tell its version ({call}: error {code})"));
        }
        let path = library.file_of(&named("Version")).unwrap_or_else(|| path.to_path_buf());
        Ok(Self { calls, dialect, version: (major, minor), path })
    }

    /// What a cached result of [`Compiler::compile`] depends on. `besides`: a version of something
    /// else.
    pub(crate) fn key(&self, source: &Source, arch: &str, besides: Option<i32>) -> Key {
        let (major, minor) = self.version;
        let besides = besides.map_or_else(String::new, |version| format!(" {version}"));
        let version = format!("{} {major}.{minor}{besides}", self.dialect.prefix);
        let text = with_defines(source);
        let entries = source.entries.join(" ");
        let options = self.dialect.options.join(" ");
        Key::of(&[&version, arch, &options, &entries, &text].map(str::as_bytes))
    }

    /// Compiles for `arch`, such as `sm_90a`. Needs no GPU and no driver.
    ///
    /// # Errors
    /// [`Error::Compile`] with the compiler's log.
    pub fn compile(&self, source: &Source, arch: &str) -> Result<Compiled> {
        let Dialect { name, prefix, .. } = self.dialect;
        let refuse = |detail: &str| Error::Compile { arch: arch.into(), detail: detail.into() };
        let zero = |_| refuse("a zero byte in the source");
        let text = CString::new(with_defines(source)).map_err(zero)?;
        let program = Program::new(self, arch, &text)?;
        let options = self.dialect.options.iter().map(|&option| option.to_owned());
        let options = options.chain([format!("{}{arch}", self.dialect.arch_option)]);
        let options = options.map(CString::new).collect::<std::result::Result<Vec<_>, _>>();
        let options = options.map_err(zero)?;
        let pointers: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
        let count = pointers.len() as c_int;
        // SAFETY: the program is live, the options are C strings that outlive the call.
        let code = unsafe { (self.calls.compile)(program.handle, count, pointers.as_ptr()) };
        let log = program.log();
        match code {
            0 => {
                let code = program.code()?;
                (self.dialect.check)(&code).map_err(|why| {
                    refuse(&format!("{name} made code that is not understood: {why}"))
                })?;
                Ok(Compiled { code, log })
            }
            COMPILATION => Err(refuse(&log)),
            _ => Err(self.fault(arch, &format!("{prefix}CompileProgram: {}", log.trim()), code)),
        }
    }

    /// An entry of the cache as a compilation gave it; none for one that is broken.
    pub(crate) fn kept(&self, entry: &[u8]) -> Option<Compiled> {
        let (length, rest) = entry.split_first_chunk::<8>()?;
        let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
        let (log, code) = rest.split_at_checked(length)?;
        (self.dialect.check)(code).ok()?;
        Some(Compiled { code: code.to_vec(), log: String::from_utf8(log.to_vec()).ok()? })
    }

    fn fault(&self, arch: &str, what: &str, code: c_int) -> Error {
        // SAFETY: takes any number; the text stands for ever.
        let words = unsafe { text_of((self.calls.error_string)(code)) };
        let words = words.unwrap_or_else(|| "unknown error".to_owned());
        let ((major, minor), file) = (self.version, self.path.display());
        let (name, hint) = (self.dialect.name, (self.dialect.hint)(code));
        let detail = format!("{what}: {words} ({code}; {name} {major}.{minor}, {file}){hint}");
        Error::Compile { arch: arch.into(), detail }
    }
}

impl Compiled {
    /// An entry of the cache: length of the log, log, code.
    pub(crate) fn to_entry(&self) -> Vec<u8> {
        let length = (self.log.len() as u64).to_le_bytes();
        [&length[..], self.log.as_bytes(), &self.code].concat()
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

/// A program of the compiler, destroyed at the end.
struct Program<'a> {
    compiler: &'a Compiler,
    arch: &'a str,
    handle: Handle,
}

impl<'a> Program<'a> {
    fn new(compiler: &'a Compiler, arch: &'a str, text: &CStr) -> Result<Self> {
        let (mut handle, none) = (0, std::ptr::null());
        let (text, name) = (text.as_ptr(), c"kie".as_ptr());
        // SAFETY: the text and the name are C strings; there are no headers.
        let code = unsafe { (compiler.calls.create)(&mut handle, text, name, 0, none, none) };
        match code {
            0 => Ok(Self { compiler, arch, handle }),
            _ => {
                let what = format!("{}CreateProgram", compiler.dialect.prefix);
                Err(compiler.fault(arch, &what, code))
            }
        }
    }

    /// What `bytes` writes, as long as `size` says.
    fn take(&self, what: &str, size: SizeOf, bytes: BytesOf) -> Result<Vec<u8>> {
        let mut len = 0;
        // SAFETY: the program is live.
        let code = unsafe { size(self.handle, &mut len) };
        if code != 0 {
            return Err(self.compiler.fault(self.arch, &format!("{what}Size"), code));
        }
        let mut out = vec![0_u8; len];
        // SAFETY: the program is live and `out` has the length that it asked for.
        match unsafe { bytes(self.handle, out.as_mut_ptr().cast()) } {
            0 => Ok(out),
            code => Err(self.compiler.fault(self.arch, what, code)),
        }
    }

    fn log(&self) -> String {
        let calls = &self.compiler.calls;
        let log = self.take("log", calls.log_size, calls.log);
        let log = log.unwrap_or_else(|error| error.to_string().into_bytes());
        String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned()
    }

    fn code(&self) -> Result<Vec<u8>> {
        let (calls, dialect) = (&self.compiler.calls, self.compiler.dialect);
        let of_virtual = dialect.virtual_code.zip(calls.virtual_code);
        let of_virtual = of_virtual.filter(|((begin, _), _)| self.arch.starts_with(begin));
        let (name, (size, code)) =
            of_virtual.map_or((dialect.code, calls.code), |((_, name), calls)| (name, calls));
        self.take(&format!("{}Get{name}", dialect.prefix), size, code)
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: the program is live and used no more. Failing to free it does no harm.
        let _ = unsafe { (self.compiler.calls.destroy)(&mut self.handle) };
    }
}
