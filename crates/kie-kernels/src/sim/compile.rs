//! From a source to a loaded library, by the C++ compiler of the host and a cache on disk.
//!
//! Invariants: what comes from the cache is whole and belongs to this user; a loaded library is a
//! copy of its own, because the runtime in it keeps its state in statics.

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_void, CStr, CString, OsStr};
use std::fmt::Write as _;
use std::io::Read as _;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::machine::cache::{Bounds, Cache, Key};
use crate::machine::Source;

const ARCH: &str = "the simulator";
/// The tests alone compile some hundreds.
const KEPT: Bounds = Bounds { entries: 1024, bytes: 512 << 20 };
/// Halves and text puns are as on a GPU; every product and sum is rounded by itself. With `-Og`
/// kernels compile in 0.85 of the time and run 1.6 times as long: tests take a fifth longer.
const FLAGS: &[&str] = &[
    "-std=c++17",
    "-O1",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fno-exceptions",
    "-w",
    "-x",
    "c++",
];

/// Passes of GCC's `-O1` that take a fifth of its time and gain kernels nothing. clang has others.
const GCC_FLAGS: &[&str] = &[
    "-fno-tree-dominator-opts",
    "-fno-tree-pta",
    "-fno-tree-dse",
    "-fno-dse",
    "-fno-inline-functions-called-once",
];

/// What a compiler says about itself is shorter, and said sooner.
const ANSWER_BYTES_MAX: u64 = 1 << 20;
const ANSWER_TIME_MAX: Duration = Duration::from_secs(10);

/// For ThreadSanitizer, as GCC spells it. Lanes of a team share one of its threads, so no stack of
/// calls can be kept; volatile words are not accesses that could race.
const RACES_FLAGS: &[&str] = &[
    "-fsanitize=thread",
    "-g1",
    "-fno-omit-frame-pointer",
    "--param=tsan-instrument-func-entry-exit=0",
    "--param=tsan-distinguish-volatile=1",
];

/// A C++ compiler and what to call it with.
pub(super) struct Compiler {
    words: Vec<String>,
    flags: Vec<&'static str>,
    races: bool,
    /// Its own first line about itself.
    pub(super) version: String,
    folder: PathBuf,
}

/// A kernel of a library.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    /// Of the function that a fiber calls.
    pub(super) address: usize,
    /// Most threads that it was compiled for.
    pub(super) threads: u32,
}

/// A library that is loaded as long as this lives.
pub(super) struct Library {
    handle: *mut c_void,
    /// `kie_sim_run`.
    pub(super) run: unsafe extern "C" fn(*mut c_void) -> c_int,
    /// To be removed with it.
    file: Option<PathBuf>,
    entries: BTreeMap<&'static str, Entry>,
}

// SAFETY: a handle of the dynamic linker may be used from any thread.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

/// What the environment says, read here and nowhere else.
fn environment() -> (Option<String>, Option<PathBuf>) {
    let full = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let compiler = full("CXX").map(|value| value.to_string_lossy().into_owned());
    (compiler, full("KIE_CACHE").map(PathBuf::from))
}

impl Compiler {
    /// `$CXX`, or the first of the usual names that answers; for ThreadSanitizer, if `races`.
    pub(super) fn find(device: &str, races: bool) -> Result<Self> {
        if races {
            check_sanitizer(device)?;
        }
        let cache = environment().1;
        let (candidates, named) = candidates();
        for candidate in &candidates {
            let words: Vec<String> = candidate.split_whitespace().map(str::to_owned).collect();
            if let Some((version, gcc)) = version_of(&words) {
                let folder = cache_folder(cache)?;
                let mut flags = processor_flags();
                flags.extend(GCC_FLAGS.iter().filter(|_| gcc));
                flags.extend(RACES_FLAGS.iter().filter(|_| races));
                return Ok(Self { words, flags, races, version, folder });
            }
        }
        let detail = if named {
            format!(
                "$CXX names {:?}, which is no C++ compiler: it does not answer to \
                     --version, or not to -x c++ -dM -E",
                candidates[0]
            )
        } else {
            "no C++ compiler: looked for g++, clang++, c++ in PATH; install one or set $CXX"
                .to_owned()
        };
        Err(Error::NoDevice { device: device.to_owned(), detail })
    }

    /// Compiles, unless the cache has it, and loads.
    pub(super) fn library(&self, source: &Source, warp: u32) -> Result<Library> {
        let text = text_of(source, warp);
        let key = self.key(&text);
        // Ranks, and tests that run at once, ask for the same kernels: one compiles, others wait.
        let turn = turn_of(key);
        let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
        let own = unique(&self.folder, "so");
        let cache = Cache::at(&self.folder).bounded(KEPT);
        // Whole or not there: the linker maps what it is given, and a file cut short would fault.
        match cache.get(key) {
            Some(library) => {
                std::fs::write(&own, library).map_err(|error| discarded(&own, &error))?;
            }
            None => {
                self.build(&text, &own)?;
                let built = std::fs::read(&own).map_err(|error| discarded(&own, &error))?;
                // The cache only saves time.
                let _ = cache.put(key, &built);
            }
        }
        let mut library = Library::load(&own, &source.entries);
        match &mut library {
            // Reports of races look up lines in the file.
            Ok(library) if self.races => library.file = Some(own),
            // Mapped by now; the name is needed no more.
            _ => drop(std::fs::remove_file(&own)),
        }
        library
    }

    /// Names everything that the result depends on.
    fn key(&self, text: &str) -> Key {
        let mut parts = vec![self.version.as_bytes(), text.as_bytes()];
        parts.extend(self.words.iter().map(|word| word.as_bytes()));
        parts.extend(FLAGS.iter().chain(&self.flags).map(|flag| flag.as_bytes()));
        Key::of(&parts)
    }

    fn build(&self, text: &str, to: &Path) -> Result<()> {
        let from = to.with_extension("cc");
        std::fs::write(&from, text).map_err(|error| failed(&from, &error))?;
        let mut command = Command::new(&self.words[0]);
        command.args(&self.words[1..]).args(FLAGS).args(&self.flags).arg(&from);
        // Under a sanitizer of this process a compiler takes half as long again.
        command.env_remove("LD_PRELOAD");
        let done = command.arg("-o").arg(to).output().map_err(|error| failed(&from, &error))?;
        let _ = std::fs::remove_file(&from);
        if done.status.success() {
            return Ok(());
        }
        let words = String::from_utf8_lossy(&done.stderr);
        let detail = words.lines().take(60).collect::<Vec<_>>().join("\n");
        Err(Error::Compile { arch: ARCH.to_owned(), detail })
    }
}

/// Held while what the key names is compiled.
fn turn_of(key: Key) -> Arc<Mutex<()>> {
    static TURNS: Mutex<BTreeMap<Key, Arc<Mutex<()>>>> = Mutex::new(BTreeMap::new());
    let mut turns = TURNS.lock().unwrap_or_else(PoisonError::into_inner);
    Arc::clone(turns.entry(key).or_default())
}

/// The whole translation unit.
fn text_of(source: &Source, warp: u32) -> String {
    let mut text = format!("#define KIE_SIM_WARP {warp}\n");
    for (name, value) in &source.defines {
        let _ = writeln!(text, "#define {name} {value}");
    }
    text.push_str("#line 1 \"kernel\"\n");
    text.push_str(&source.text);
    text
}

/// The first line of `--version`, and whether it is GCC; nothing if there is no such program or it
/// is no compiler of C++: many a program answers to `--version`.
fn version_of(words: &[String]) -> Option<(String, bool)> {
    let text = answer_of(words, &["--version"])?;
    let defines = answer_of(words, &["-x", "c++", "-dM", "-E", "/dev/null"])?;
    let has = |name| defines.contains(name);
    let gcc = has("__GNUC__") && !has("__clang__");
    has("__cplusplus").then(|| (text.lines().next().unwrap_or("").to_owned(), gcc))
}

/// What a program prints that is given nothing to read and a few seconds.
fn answer_of(words: &[String], arguments: &[&str]) -> Option<String> {
    let mut command = Command::new(words.first()?);
    command.args(&words[1..]).args(arguments).stdin(Stdio::null()).stderr(Stdio::null());
    // A sanitizer of this process is not the compiler's.
    command.env_remove("LD_PRELOAD");
    let mut child = command.stdout(Stdio::piped()).spawn().ok()?;
    let mut pipe = child.stdout.take()?.take(ANSWER_BYTES_MAX);
    let (said, answer) = std::sync::mpsc::channel();
    let listen = move || {
        let mut text = Vec::new();
        let _ = pipe.read_to_end(&mut text);
        // The receiver of one that took too long is gone.
        let _ = said.send(text);
    };
    let heard = std::thread::Builder::new().spawn(listen).is_ok();
    let until = if heard { Instant::now() + ANSWER_TIME_MAX } else { Instant::now() };
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() < until => std::thread::sleep(Duration::from_millis(2)),
            Ok(None) | Err(_) => {
                let _ = child.kill();
                let _ = child.wait();
                return None;
            }
        }
    };
    // A process that it started may hold the pipe open.
    let text = answer.recv_timeout(ANSWER_TIME_MAX).ok()?;
    status.success().then(|| String::from_utf8_lossy(&text).into_owned())
}

/// The compiler that the simulator would use, as it was named, and its first line about itself.
pub fn compiler() -> Option<(String, String)> {
    candidates().0.into_iter().find_map(|candidate| {
        let words: Vec<String> = candidate.split_whitespace().map(str::to_owned).collect();
        Some((candidate, version_of(&words)?.0))
    })
}

/// Compilers that are asked, in order, and whether the user named it.
fn candidates() -> (Vec<String>, bool) {
    match environment().0 {
        Some(words) => (vec![words], true),
        None => (["g++", "clang++", "c++"].map(str::to_owned).to_vec(), false),
    }
}

/// The sanitizer's library must have been there before anything else was.
fn check_sanitizer(device: &str) -> Result<()> {
    // SAFETY: a lookup by name runs no code of ours.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__tsan_create_fiber".as_ptr()) };
    if !found.is_null() {
        return Ok(());
    }
    let detail = "races=1 needs ThreadSanitizer in the process: start it with LD_PRELOAD=$(g++ \
                  -print-file-name=libtsan.so), and TSAN_OPTIONS=ignore_noninstrumented_modules=1";
    Err(Error::NoDevice { device: device.to_owned(), detail: detail.to_owned() })
}

/// Instructions of this processor that kernels gain from.
fn processor_flags() -> Vec<&'static str> {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
        return vec!["-mavx2", "-mf16c"];
    }
    Vec::new()
}

/// A folder of this user's own, made if it is not there.
fn cache_folder(wanted: Option<PathBuf>) -> Result<PathBuf> {
    // SAFETY: geteuid has no preconditions and cannot fail.
    let user = unsafe { libc::geteuid() };
    let folder = match wanted {
        Some(cache) => cache.join("sim"),
        None => std::env::temp_dir().join(format!("kie-sim-{user}")),
    };
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder);
    made.map_err(|error| failed(&folder, &error))?;
    let owner = std::fs::symlink_metadata(&folder).map_err(|error| failed(&folder, &error))?;
    if owner.uid() == user && owner.is_dir() && owner.mode() & 0o022 == 0 {
        return Ok(folder);
    }
    let folder = folder.display();
    Err(Error::Failed(format!(
        "{folder} is not a folder that only user {user} can write; code is loaded from there. \
         Remove it, or set $KIE_CACHE"
    )))
}

/// A new name in `folder`.
fn unique(folder: &Path, extension: &str) -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    folder.join(format!("tmp-{}-{number}.{extension}", std::process::id()))
}

/// As [`failed`], and what was begun is removed.
fn discarded(path: &Path, error: &std::io::Error) -> Error {
    let _ = std::fs::remove_file(path);
    failed(path, error)
}

fn failed(path: &Path, error: &std::io::Error) -> Error {
    Error::Failed(format!("{}: {error}", path.display()))
}

/// What the dynamic linker complained about last.
fn linker_error() -> String {
    // SAFETY: dlerror returns null or a string that lives until this thread's next dl call.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "unknown error of the dynamic linker".to_owned();
    }
    // SAFETY: not null, and no dl call lies between.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

impl Library {
    fn load(path: &Path, entries: &[&'static str]) -> Result<Self> {
        let refused = |detail| Error::Compile { arch: ARCH.to_owned(), detail };
        let name = CString::new(OsStr::as_bytes(path.as_os_str()))
            .map_err(|_| refused(format!("{}: a zero in a path", path.display())))?;
        // SAFETY: the file was made by `build` from kernel sources and runs nothing when loaded.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(refused(linker_error()));
        }
        let mut library = Self { handle, run: unloaded, file: None, entries: BTreeMap::new() };
        let run = library.symbol("kie_sim_run")?;
        // SAFETY: fibers.h defines this name with this type.
        library.run = unsafe {
            std::mem::transmute::<usize, unsafe extern "C" fn(*mut c_void) -> c_int>(run)
        };
        for &entry in entries {
            let address = library.symbol(entry)?;
            let threads = library.symbol(&format!("{entry}_threads"))? as *const u32;
            // SAFETY: KIE_KERNEL defines this name as a constant of this type.
            let threads = unsafe { threads.read() };
            library.entries.insert(entry, Entry { address, threads });
        }
        Ok(library)
    }

    fn symbol(&self, name: &str) -> Result<usize> {
        let text = CString::new(name).expect("names of kernels have no zeros");
        let pointer: *const c_char = text.as_ptr();
        // SAFETY: the handle is open as long as `self` lives.
        let address = unsafe { libc::dlsym(self.handle, pointer) };
        if address.is_null() {
            let detail = format!("the source has no kernel {name}: {}", linker_error());
            return Err(Error::Compile { arch: ARCH.to_owned(), detail });
        }
        Ok(address as usize)
    }

    pub(super) fn entry(&self, name: &str) -> Option<Entry> {
        self.entries.get(name).copied()
    }
}

/// Stands in until the symbol is found.
unsafe extern "C" fn unloaded(_: *mut c_void) -> c_int {
    1
}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: opened by `load`; flights own their module, so no code of it is running.
        unsafe { libc::dlclose(self.handle) };
        if let Some(file) = &self.file {
            let _ = std::fs::remove_file(file);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::machine::Platform;
    use crate::mono::source::join;

    #[test]
    fn a_library_cut_short_is_compiled_again() {
        let folder = std::env::temp_dir().join(format!("kie-cut-{}", std::process::id()));
        let mut compiler = Compiler::find("sim", false).unwrap();
        std::fs::create_dir_all(&folder).unwrap();
        compiler.folder.clone_from(&folder);
        let text = join(Platform::Sim, ("toy", "#include \"platform.h\"\n"));
        let source = Source { defines: Vec::new(), text, entries: Vec::new() };
        compiler.library(&source, 32).unwrap();
        let kept: Vec<_> = folder.read_dir().unwrap().map(|file| file.unwrap().path()).collect();
        assert_eq!(kept.len(), 1, "{kept:?}");
        let file = std::fs::File::options().write(true).open(&kept[0]).unwrap();
        let whole = file.metadata().unwrap().len();
        file.set_len(whole / 2).unwrap();
        // The dynamic linker would map what is not there.
        compiler.library(&source, 32).unwrap();
        assert_eq!(file.metadata().unwrap().len(), whole / 2, "replaced, not written over");
        assert_eq!(std::fs::metadata(&kept[0]).unwrap().len(), whole);
        compiler.library(&source, 32).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn what_answers_to_version_alone_is_no_compiler() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        for impostor in ["/bin/true", "/bin/cat", "/bin/false", "/nonexistent", "env true"] {
            assert_eq!(version_of(&words(impostor)), None, "{impostor}");
        }
        assert!(compiler().is_some());
    }
}
