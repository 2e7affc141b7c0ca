//! The stub driver of `stub.c`: built, loaded and told what to do. Each test has a library of its
//! own, so that tests run side by side.

use std::ffi::{c_char, c_int, c_long, CStr, CString};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::cuda::Cuda;
use crate::error::Result;
use crate::gpu::api::Paths;
use crate::machine::cache::Cache;
use crate::machine::library::{symbols, Library};
use crate::machine::Source;

symbols! {
    /// What tests say to the stub.
    Script {
        fn stub_set(*const c_char, c_long) -> ();
        fn stub_get(*const c_char) -> c_long;
        fn stub_depth() -> c_int;
        fn stub_launches() -> *const c_char;
    }
}

/// A stub in a folder that goes with it.
pub struct Stub {
    pub folder: PathBuf,
    pub paths: Paths,
    script: Script,
}

impl Stub {
    /// None, and the test is skipped, where there is no C compiler.
    pub fn new(test: &str) -> Option<Self> {
        Self::with(test, &[])
    }

    /// The same with further options of the compiler.
    pub fn with(test: &str, options: &[&str]) -> Option<Self> {
        static TURN: AtomicUsize = AtomicUsize::new(0);
        let turn = TURN.fetch_add(1, Ordering::Relaxed);
        let name = format!("kie-stub-{}-{turn}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&folder).unwrap();
        let file = folder.join("libstub.so");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda/tests/stub.c");
        let mut cc = Command::new("cc");
        cc.args(["-O1", "-shared", "-fPIC", "-o"]).arg(&file).arg(source).args(options);
        let Ok(built) = cc.output() else {
            let _ = std::fs::remove_dir_all(&folder);
            super::skipped(test, "no C compiler (cc)");
            return None;
        };
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        let script = Script::load(&Library::open(&file).unwrap()).unwrap();
        let paths = Paths {
            driver: vec![file.clone()],
            compiler: vec![file],
            nodes: PathBuf::new(),
            cache: Cache::at(folder.join("cache")),
            patience: Duration::from_millis(50),
        };
        Some(Self { folder, paths, script })
    }

    pub fn open(&self) -> Result<Cuda> {
        Cuda::open("cuda", &self.paths)
    }

    pub fn set(&self, name: &str, value: i64) {
        let name = CString::new(name).unwrap();
        // SAFETY: a C string; the library is loaded for ever.
        unsafe { (self.script.stub_set)(name.as_ptr(), value) };
    }

    pub fn get(&self, name: &str) -> i64 {
        let name = CString::new(name).unwrap();
        // SAFETY: as above.
        unsafe { (self.script.stub_get)(name.as_ptr()) }
    }

    /// Grid, block, shared memory and first word of each launch so far.
    pub fn launches(&self) -> String {
        // SAFETY: as above.
        let launches = unsafe { (self.script.stub_launches)() };
        // SAFETY: a C string that stands for ever, and no launch is being made.
        unsafe { CStr::from_ptr(launches) }.to_str().unwrap().to_owned()
    }

    /// Nothing of ours is left, no context is current on this thread, and nothing waited for a
    /// kernel.
    pub fn check_clean(&self) {
        let counts = ["violations", "blocks", "pinned", "modules", "streams", "events", "contexts"];
        for count in counts.into_iter().chain(["opened"]) {
            assert_eq!(self.get(count), 0, "{count}");
        }
        // SAFETY: as above.
        assert_eq!(unsafe { (self.script.stub_depth)() }, 0, "contexts pushed and not popped");
    }
}

impl Drop for Stub {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// A source with one kernel.
pub fn source(text: &str) -> Source {
    Source { defines: Vec::new(), text: text.into(), entries: vec!["kernel"] }
}
