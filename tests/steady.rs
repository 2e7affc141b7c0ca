//! What is allocated: by the engine thread in its steady state, on the default model, nothing over
//! 1,000 tokens; while a checkpoint is loaded whose experts stand by columns, little beside it.
//! Alone in their process and one after another, so that there is one engine to watch.
#![allow(clippy::unwrap_used)]

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use kie_core::request::{Prompt, Request, SamplingParams};
use kie_core::{Engine, Error};
use kie_kernels::abi::Encoding;
use kie_kernels::buffer::{Buffer, HostBytes};
use kie_kernels::device::{Device, DeviceInfo, Footprint, Options, Running};
use kie_kernels::mailbox::Mailbox;
use kie_kernels::validate::ValidProgram;
use support::Folder;

/// Counts what one thread allocates, and the bytes of all.
struct Counting;

static WATCHED: AtomicI32 = AtomicI32::new(0);
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
/// Allocated now, and at most so far.
static LIVE: AtomicI64 = AtomicI64::new(0);
static MOST: AtomicI64 = AtomicI64::new(0);
static ALONE: Mutex<()> = Mutex::new(());

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
        let bytes = layout.size() as i64;
        MOST.fetch_max(LIVE.fetch_add(bytes, Ordering::Relaxed) + bytes, Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count();
        LIVE.fetch_sub(layout.size() as i64, Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_thousand_steady_tokens_allocate_nothing() {
    let _alone = ALONE.lock().unwrap();
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

/// A copy of own_gpt_oss in bfloat16 with more and wider experts, all of whose weights are 0: the
/// file has holes.
fn with_wide_experts(to: &Path) -> u64 {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/own_gpt_oss");
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(from.join(name), to.join(name)).unwrap();
    }
    let config = std::fs::read_to_string(from.join("config.json")).unwrap();
    let (experts, ffn) = (32, 768);
    let config = config
        .replace("float16", "bfloat16")
        .replace("\"num_local_experts\": 4", &format!("\"num_local_experts\": {experts}"))
        .replace("\"intermediate_size\": 24", &format!("\"intermediate_size\": {ffn}"));
    std::fs::write(to.join("config.json"), config).unwrap();
    let stored = std::fs::read(from.join("model.safetensors")).unwrap();
    let (length, rest) = stored.split_first_chunk().unwrap();
    let header = &rest[..u64::from_le_bytes(*length) as usize];
    let header: serde_json::Value = serde_json::from_slice(header).unwrap();
    let (mut end, mut entries) = (0, serde_json::Map::new());
    for (name, entry) in header.as_object().unwrap() {
        let Some(shape) = entry["shape"].as_array() else { continue };
        let mut shape: Vec<u64> = shape.iter().map(|n| n.as_u64().unwrap()).collect();
        if name.contains("mlp") {
            shape[0] = experts;
            for size in &mut shape[1..] {
                *size = if *size % 24 == 0 { *size / 24 * ffn } else { *size };
            }
        }
        let begin = end;
        end += 2 * shape.iter().product::<u64>();
        let entry = serde_json::json!({
            "dtype": "BF16", "shape": shape, "data_offsets": [begin, end],
        });
        entries.insert(name.clone(), entry);
    }
    let mut header = serde_json::to_vec(&entries).unwrap();
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    let path = to.join("model.safetensors");
    std::fs::write(&path, &bytes).unwrap();
    let file = std::fs::File::options().write(true).open(path).unwrap();
    file.set_len(bytes.len() as u64 + end).unwrap();
    end
}

/// GPT-OSS in 16 bits has its experts in one tensor a layer, by columns: rows are made of some
/// columns at a time as they go to a GPU, and no copy of a layer is ever there.
#[test]
fn experts_by_columns_are_loaded_in_pieces() {
    let _alone = ALONE.lock().unwrap();
    let folder = Folder::new("wide-experts");
    let stored = with_wide_experts(&folder.0) as i64;
    let before = LIVE.load(Ordering::Relaxed);
    MOST.store(before, Ordering::Relaxed);
    let builder = Engine::builder(&folder.0).device("sim:blocks=4").max_batch(1);
    let engine = builder.max_seq_len(64).build().unwrap();
    let most = MOST.load(Ordering::Relaxed) - before;
    eprintln!("{stored} bytes of weights, {most} allocated at most");
    assert!(stored > 9 << 20 && most < stored / 3, "{most} of {stored} bytes");
    let request = Request {
        prompt: Prompt::Ids(vec![5, 6]),
        params: SamplingParams { max_tokens: Some(2), ignore_eos: true, ..Default::default() },
    };
    assert_eq!(engine.generate(request).unwrap().token_ids.len(), 2);
}

/// A device whose machines have no room.
struct Full(Arc<dyn Device>);

impl Device for Full {
    fn info(&self) -> DeviceInfo {
        self.0.info()
    }

    fn load(&self, bytes: Arc<dyn HostBytes>) -> kie_kernels::Result<Buffer> {
        self.0.load(bytes)
    }

    fn carries(&self, encoding: &Encoding) -> bool {
        self.0.carries(encoding)
    }

    fn carries_columns(&self) -> bool {
        self.0.carries_columns()
    }

    fn footprints(&self, program: &ValidProgram) -> kie_kernels::Result<Vec<Footprint>> {
        let mut all = self.0.footprints(program)?;
        all.iter_mut().for_each(|machine| machine.free_bytes = machine.weight_bytes / 2);
        Ok(all)
    }

    fn start(
        &self,
        _: ValidProgram,
        _: Vec<Buffer>,
        _: Arc<Mailbox>,
    ) -> kie_kernels::Result<Box<dyn Running>> {
        unreachable!("there is no room")
    }
}

/// What has no room is refused with the plan, and no weight has been read.
#[test]
fn what_does_not_fit_is_refused_before_weights_are_read() {
    let _alone = ALONE.lock().unwrap();
    let folder = Folder::new("wide-experts");
    with_wide_experts(&folder.0);
    let sim = kie_kernels::devices::open("sim:blocks=4", &Options::default()).unwrap();
    let read = Arc::new(AtomicBool::new(false));
    let told = read.clone();
    let error = Engine::builder(&folder.0)
        .runner(Arc::new(Full(sim)))
        .progress(Arc::new(move |_, _, _| told.store(true, Ordering::Relaxed)))
        .build()
        .err()
        .unwrap();
    let Error::OutOfMemory { plan, .. } = &error else { panic!("{error}") };
    assert!(plan.contains("rank 0: all of it; weights "), "{plan}");
    assert!(!read.load(Ordering::Relaxed), "weights were read");
}
