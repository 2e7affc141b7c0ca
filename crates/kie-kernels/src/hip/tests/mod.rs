//! AMD without a GPU: a stand-in for the runtime and the compiler, built from `stub.c` for each
//! test, does what the test tells it to.
#![allow(clippy::unwrap_used)]

mod faults;
mod flights;
mod kernels;
mod object;

use std::ffi::{c_char, c_int, c_void, CString};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::OnceLock;
use std::time::Duration;

use super::Hip;
use crate::gpu::api::Paths;
use crate::machine::cache::Cache;
use crate::machine::library::{symbols, Library};
use crate::machine::{Launch, Machine, Source};

/// A folder that goes when the test ends.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        static TURN: AtomicU32 = AtomicU32::new(0);
        let turn = TURN.fetch_add(1, Ordering::Relaxed);
        let path =
            std::env::temp_dir().join(format!("kie-hip-{name}-{}-{turn}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Says that a test cannot run here; in CI, where all of them must, it fails.
fn skipped(test: &str, why: &str) {
    assert_ne!(std::env::var("CI").as_deref(), Ok("true"), "{test}: {why}");
    let _ = writeln!(std::io::stderr(), "skipped: {test}: {why}");
}

fn build(source: &Path, to: &Path) {
    let flags = ["-shared", "-fPIC", "-O1", "-x", "c"];
    let done = Command::new("cc").args(flags).arg(source).arg("-o").arg(to).status().unwrap();
    assert!(done.success(), "cc {}", source.display());
}

symbols! {
    /// The stub's own functions.
    Control {
        fn stub_fail(*const c_char, c_int) -> ();
        fn stub_calls(*const c_char) -> c_int;
        fn stub_set(*const c_char, c_int) -> ();
        fn stub_code(*const c_void, usize) -> ();
        fn stub_live() -> c_int;
        fn stub_device() -> c_int;
        fn stub_args() -> *const u8;
    }
}

/// One stand-in, with state of its own.
struct Stub {
    folder: Folder,
    control: Control,
    paths: Paths,
}

impl Stub {
    fn new() -> Self {
        static BUILT: OnceLock<Vec<u8>> = OnceLock::new();
        let folder = Folder::new("stub");
        let library = folder.0.join("libstub.so");
        let bytes = BUILT.get_or_init(|| {
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/hip/tests/stub.c");
            build(&source, &library);
            std::fs::read(&library).unwrap()
        });
        std::fs::write(&library, bytes).unwrap();
        let control = Control::load(&Library::open(&library).unwrap()).unwrap();
        let paths = Paths {
            driver: vec![library.clone()],
            compiler: vec![library],
            cache: Cache::at(folder.0.join("cache")),
            nodes: folder.0.join("nodes"),
            patience: Duration::from_millis(30),
        };
        let stub = Self { folder, control, paths };
        stub.code(&object::object_of_k(&[24]));
        stub.set("args_bytes", 24);
        stub
    }

    fn open(&self) -> crate::Result<Hip> {
        Hip::open("hip:1", &self.paths)
    }

    /// From now on `call` answers with this error; 0: it works.
    fn fail(&self, call: &str, code: i32) {
        let call = CString::new(call).unwrap();
        // SAFETY: a C string.
        unsafe { (self.control.stub_fail)(call.as_ptr(), code) };
    }

    /// How often it was called, since the last `fail`.
    fn calls(&self, call: &str) -> i32 {
        let call = CString::new(call).unwrap();
        // SAFETY: a C string.
        unsafe { (self.control.stub_calls)(call.as_ptr()) }
    }

    fn set(&self, what: &str, value: i32) {
        let what = CString::new(what).unwrap();
        // SAFETY: a C string that the stub knows.
        unsafe { (self.control.stub_set)(what.as_ptr(), value) };
    }

    /// What the compiler gives.
    fn code(&self, bytes: &[u8]) {
        // SAFETY: so many bytes, copied.
        unsafe { (self.control.stub_code)(bytes.as_ptr().cast(), bytes.len()) };
    }

    /// Allocations, streams, events, modules and programs not given back.
    fn live(&self) -> i32 {
        // SAFETY: no arguments.
        unsafe { (self.control.stub_live)() }
    }

    /// The current device of this thread (the stub has one for all).
    fn device(&self) -> i32 {
        // SAFETY: no arguments.
        unsafe { (self.control.stub_device)() }
    }

    /// The argument of the last launch.
    fn args(&self) -> [u8; 24] {
        // SAFETY: no arguments.
        let at = unsafe { (self.control.stub_args)() };
        // SAFETY: the stub keeps 256 bytes.
        unsafe { at.cast::<[u8; 24]>().read() }
    }
}

fn source() -> Source {
    let defines = vec![("KIE_N".into(), "3".into())];
    Source { defines, text: "the stub reads nothing".into(), entries: vec!["k"] }
}

const ARGS: [u8; 24] = [7; 24];

fn four_blocks() -> Launch<'static> {
    Launch { entry: "k", blocks: 4, threads: 416, shared_bytes: 65_520, args: &ARGS }
}

#[test]
fn dies_and_peers_are_asked_for() {
    let mut stub = Stub::new();
    assert_eq!(stub.open().unwrap().info().unwrap().chiplets, 1, "nobody tells");
    stub.paths.nodes = crate::kfd::tests::recorded("hip");
    let [a, b] = [0, 1].map(|n| Hip::open(&format!("hip:{n}"), &stub.paths).unwrap());
    assert_eq!(b.info().unwrap().chiplets, 8);
    assert_eq!(b.peer().unwrap().bus.as_deref(), Some("0000:9f:00.0"));
    assert!(a.reaches(&b).unwrap() && b.reaches(&a).unwrap() && a.reaches(&a).unwrap());
    assert!(a.enable_peer(&b).is_err());
    stub.fail("hipDeviceCanAccessPeer", 1);
    assert!(a.reaches(&b).is_err());
    std::fs::remove_dir_all(&stub.paths.nodes).unwrap();
}
