//! Weights that somebody changes: while they are loaded that is an error, afterwards it is nothing.

#![allow(clippy::unwrap_used)]

mod support;

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use kie_core::{Engine, Error, Stop};
use support::{greedy, repository, Folder};

const WEIGHTS: &str = "model.safetensors";
const IDS: [u32; 9] = [5, 7, 11, 13, 17, 19, 23, 29, 31];

/// A copy of a fixture, to be changed.
struct Copy(Folder);

impl Copy {
    fn new(fixture: &str, test: &str) -> Self {
        let from = repository().join("tests/data").join(fixture);
        let to = Folder::new(test);
        for name in ["config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS] {
            std::fs::copy(from.join(name), to.0.join(name)).unwrap();
        }
        Self(to)
    }

    fn weights(&self) -> PathBuf {
        self.0 .0.join(WEIGHTS)
    }

    /// Opens an engine; `change` happens when the first weights are about to be read.
    fn open(&self, device: &str, change: fn(&Path)) -> kie_core::Result<Engine> {
        let (file, done) = (self.weights(), AtomicBool::new(false));
        let told = move |stage: &str, _, _| {
            if stage == "load" && !done.swap(true, Ordering::Relaxed) {
                change(&file);
            }
        };
        Engine::builder(&self.0 .0).device(device).progress(Arc::new(told)).build()
    }
}

fn cut(file: &Path) {
    OpenOptions::new().write(true).open(file).unwrap().set_len(4096).unwrap();
}

/// Other bits in the middle, the same length.
fn rewrite(file: &Path) {
    let mut file = OpenOptions::new().read(true).write(true).open(file).unwrap();
    let middle = file.metadata().unwrap().len() / 2;
    let mut bytes = [0; 4096];
    file.seek(SeekFrom::Start(middle)).unwrap();
    file.read_exact(&mut bytes).unwrap();
    bytes.iter_mut().step_by(2).for_each(|byte| *byte ^= 1);
    file.seek(SeekFrom::Start(middle)).unwrap();
    file.write_all(&bytes).unwrap();
}

fn nothing(_: &Path) {}

#[test]
fn weights_that_change_while_they_are_loaded_are_refused() {
    for device in ["cpu", "cpu:0,1"] {
        for (change, got) in [(cut as fn(&Path), "then 4096"), (rewrite, "written to")] {
            let copy = Copy::new("llama", "loading");
            let error = copy.open(device, change).err().unwrap();
            assert_eq!(error.class(), "LoadError", "{error}");
            let said = error.to_string();
            assert!(said.contains(WEIGHTS) && said.contains(got), "{said}");
        }
    }
}

#[test]
fn weights_that_change_under_an_engine_change_nothing() {
    let copy = Copy::new("llama", "running");
    let engine = copy.open("cpu", nothing).unwrap();
    let wanted = greedy(&engine, &IDS, 8);
    rewrite(&copy.weights());
    assert_eq!(greedy(&engine, &IDS, 8), wanted);
    cut(&copy.weights());
    assert_eq!(greedy(&engine, &IDS, 8), wanted);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.contains(&*copy.0 .0.to_string_lossy()), "{maps}");
}

/// A handler that was there before gets what is not ours.
#[test]
fn a_file_that_is_mapped_by_somebody_else_is_none_of_our_business() {
    let copy = Copy::new("llama", "others");
    drop(copy.open("cpu", nothing).unwrap());
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.contains(&*copy.0 .0.to_string_lossy()));
    let status = support::ended_by(|| {
        let file = File::open(copy.weights()).unwrap();
        // SAFETY: that it is cut short below is what the test is about.
        let map = unsafe { memmap2::Mmap::map(&file) }.unwrap();
        cut(&copy.weights());
        std::hint::black_box(map[map.len() - 1]);
    });
    assert_eq!(status, Some(7), "SIGBUS, as without us");
}

#[test]
fn loading_ends_when_it_is_told_to_and_leaves_nothing() {
    let copy = Copy::new("llama", "stop");
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let maps = || std::fs::read_to_string("/proc/self/maps").unwrap();
    for at in 0..30 {
        let stop = Stop::default();
        let told = stop.clone();
        let told = move |_: &str, done: u64, _| {
            if done >= at {
                told.set();
            }
        };
        let builder = Engine::builder(&copy.0 .0).device("cpu").stop(stop);
        let error = builder.progress(Arc::new(told)).build().err().unwrap();
        assert!(matches!(error, Error::GivenUp { late: false, .. }), "{error}");
        assert!(!maps().contains(&*copy.0 .0.to_string_lossy()));
    }
    assert!(threads() < 30, "{} threads are left of 30 engines", threads());
}
