//! The host loop in its steady state, on the default model: over 1,000 tokens the engine thread
//! allocates nothing. Alone in its process, so that there is one engine thread to watch.
#![allow(clippy::unwrap_used)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::PathBuf;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use kie_core::request::{Prompt, Request, SamplingParams};
use kie_core::Engine;

/// Counts what one thread allocates.
struct Counting;

static WATCHED: AtomicI32 = AtomicI32::new(0);
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

fn count() {
    let watched = WATCHED.load(Ordering::Relaxed);
    // SAFETY: gettid takes nothing.
    if watched != 0 && unsafe { libc::gettid() } == watched {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: all of it is the system's allocator; counting touches no memory of its own.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count();
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_thousand_steady_tokens_allocate_nothing() {
    let demo = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../python/kie/demo");
    let engine = Engine::builder(demo).threads(2).build().unwrap();
    engine.warmup().unwrap();
    let mut request = Request::new(Prompt::Text("def main():".to_owned()));
    request.params = SamplingParams {
        temperature: Some(0.7),
        top_p: Some(0.9),
        ignore_eos: true,
        logprobs: Some(3),
        ..SamplingParams::default()
    };
    let mut stream = engine.stream(request).unwrap();
    assert!(stream.by_ref().take(50).all(|t| t.is_ok()));
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let engines: Vec<i32> = tasks
        .filter(|t| std::fs::read_to_string(t.path().join("comm")).unwrap().trim() == "kie-engine")
        .map(|t| t.file_name().to_str().unwrap().parse().unwrap())
        .collect();
    // Threads that the engine thread started have its name too, and larger numbers.
    WATCHED.store(*engines.iter().min().unwrap(), Ordering::Relaxed);
    assert_eq!(stream.by_ref().take(1000).filter(|t| t.is_ok()).count(), 1000);
    WATCHED.store(0, Ordering::Relaxed);
    assert_eq!(ALLOCATIONS.load(Ordering::Relaxed), 0);
}
