//! The machine over a driver that works: values, sizes, order, and what a running kernel forbids.

use std::sync::atomic::Ordering;
use std::sync::Arc;

use super::stub::{source, Stub};
use crate::cuda::{CudaModule, Driver};
use crate::error::Error;
use crate::gpu::api::Api;
use crate::machine::cache::Cache;
use crate::machine::handle::{Handle, HandleFault};
use crate::machine::{Launch, Machine, Memory, Module, Platform};

const CHUNK_BYTES: usize = Driver::STAGING.chunk_bytes;
const LAUNCH: Launch<'static> =
    Launch { entry: "kernel", blocks: 4, threads: 416, shared_bytes: 232_000, args: &[7; 8] };

fn as_cuda(module: &Arc<dyn Module>) -> &CudaModule {
    module.as_any().downcast_ref().unwrap()
}

/// Bytes that differ from their neighbours and from chunk to chunk.
fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes as u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

#[test]
fn info_tells_what_the_driver_says() {
    let Some(stub) = Stub::new("info") else { return };
    stub.set("count", 4);
    stub.set("major", 10);
    stub.set("minor", 3);
    stub.set("memory", 1 << 30);
    let cuda = crate::cuda::Cuda::open("cuda:3", &stub.paths).unwrap();
    let info = cuda.info().unwrap();
    assert_eq!((info.name.as_str(), info.model.as_str()), ("cuda:3", "Stub GPU"));
    assert_eq!((info.arch.as_str(), info.multiprocessors), ("sm_103a", 4));
    assert_eq!((info.shared_bytes, info.memory_bytes), (232_448, 1 << 40));
    assert_eq!(info.free_bytes, 1 << 30);
    assert_eq!(cuda.platform(), Platform::Cuda);
}

#[test]
fn peers_are_asked_for_and_opened_once() {
    let Some(stub) = Stub::new("peers") else { return };
    stub.set("count", 2);
    let one = |name| crate::cuda::Cuda::open(name, &stub.paths).unwrap();
    let (first, second) = (one("cuda:0"), one("cuda:1"));
    assert_eq!(second.peer().unwrap().bus.as_deref(), Some("0000:18:00.0"));
    assert!(!first.reaches(&second).unwrap() && first.reaches(&first).unwrap());
    let error = first.enable_peer(&second).unwrap_err().to_string();
    assert!(error.contains("cuda:0 cannot reach the memory of cuda:1"), "{error}");
    assert_eq!(stub.get("enabled"), 0);
    stub.set("peers", 1);
    first.enable_peer(&second).unwrap();
    first.enable_peer(&second).unwrap();
    assert_eq!(stub.get("enabled"), 2);
    let sim = crate::sim::Sim::open("sim").unwrap();
    assert!(first.enable_peer(&sim).is_err() && sim.enable_peer(&first).is_err());
    sim.enable_peer(&crate::sim::Sim::open("sim").unwrap()).unwrap();
}

#[test]
fn memory_of_another_process_is_opened_and_closed() {
    let Some(stub) = Stub::new("handles") else { return };
    let cuda = stub.open().unwrap();
    let memory = cuda.alloc_symmetric(1000).unwrap();
    cuda.write(&memory, 5, b"here").unwrap();
    let handle = cuda.export(&memory).unwrap();
    let process = std::process::id();
    assert_eq!((handle.bytes, handle.process, handle.token.len()), (1000, process, 64));
    let fault = |handle: &Handle, bytes: usize| match cuda.import(handle, bytes).err().unwrap() {
        Error::Handle { device, fault } if device == "cuda:0" => fault,
        other => panic!("{other}"),
    };
    let opened = cuda.import(&handle, 1000).unwrap();
    let mut out = [0; 4];
    cuda.read(&opened, 5, &mut out).unwrap();
    assert_eq!((&out, stub.get("opened")), (b"here", 1));
    assert!(matches!(cuda.export(&opened), Err(Error::Handle { .. })), "it is not ours to give");
    let part = Memory { address: memory.address + 256, bytes: 8, owner: memory.owner.clone() };
    assert!(matches!(cuda.export(&part), Err(Error::Handle { .. })), "a part");
    drop(opened);
    assert_eq!(stub.get("opened"), 0);
    assert_eq!(fault(&handle, 999), HandleFault::Size { wanted: 999, got: 1000 });
    let (wanted, got) = (Platform::Cuda, Platform::Sim);
    let other = Handle { platform: got, ..handle.clone() };
    assert_eq!(fault(&other, 1000), HandleFault::Kind { wanted, got });
    let short = Handle { token: vec![7; 63], ..handle.clone() };
    assert_eq!(fault(&short, 1000), HandleFault::Garbled(63));
    for code in [1, 205, 400] {
        stub.set("stale", code);
        let fault = fault(&handle, 1000);
        assert!(matches!(fault, HandleFault::Stale { .. }), "{code}: {fault}");
    }
    stub.set("stale", 719);
    assert!(matches!(cuda.import(&handle, 1000), Err(Error::Failed(_))));
    drop((cuda, memory, part));
    stub.check_clean();
}

#[test]
fn memory_is_zeroed_written_and_read() {
    let Some(stub) = Stub::new("memory") else { return };
    let cuda = stub.open().unwrap();
    let memory = cuda.alloc(1000).unwrap();
    assert_eq!((memory.bytes, memory.address % 256), (1000, 0));
    let mut out = vec![1; 1000];
    cuda.read(&memory, 0, &mut out).unwrap();
    assert_eq!(out, vec![0; 1000]);
    cuda.write(&memory, 3, b"abc").unwrap();
    cuda.write(&memory, 1000, b"").unwrap();
    cuda.read(&memory, 0, &mut out[..8]).unwrap();
    assert_eq!(&out[..8], b"\0\0\0abc\0\0");

    let shared = cuda.alloc_shared(100).unwrap();
    assert_eq!((shared.len(), shared.address % 64), (100, 0));
    assert!((0..25).all(|word| shared.word32(4 * word).load(Ordering::Relaxed) == 0));
    shared.word64(8).store(5, Ordering::Release);
    assert_eq!(shared.word32(8).load(Ordering::Acquire), 5);
    drop((cuda, memory, shared));
    stub.check_clean();
}

#[test]
fn large_copies_arrive_whole() {
    let Some(stub) = Stub::new("large copies") else { return };
    let cuda = stub.open().unwrap();
    let bytes = pattern(11 * CHUNK_BYTES + 12_345);
    let memory = cuda.alloc(bytes.len() + 7).unwrap();
    cuda.write(&memory, 7, &bytes).unwrap();
    assert_eq!(stub.get("copies"), 12);
    let mut out = vec![0; bytes.len()];
    cuda.read(&memory, 7, &mut out).unwrap();
    assert!(out == bytes, "the bytes differ");
    stub.set("copy", 999);
    let error = cuda.write(&memory, 7, &bytes).unwrap_err();
    assert!(error.to_string().contains("(999)"), "{error}");
    stub.set("copy", 0);
    cuda.write(&memory, 0, &bytes[..CHUNK_BYTES + 1]).unwrap();
    cuda.read(&memory, 0, &mut out[..CHUNK_BYTES + 1]).unwrap();
    assert!(out[..CHUNK_BYTES + 1] == bytes[..CHUNK_BYTES + 1], "the bytes differ");
    drop((cuda, memory));
    stub.check_clean();
}

#[test]
fn small_pieces_travel_together() {
    let Some(stub) = Stub::new("pieces") else { return };
    let cuda = stub.open().unwrap();
    let bytes = pattern(3 * CHUNK_BYTES);
    let memory = cuda.alloc(4 * CHUNK_BYTES).unwrap();
    // Every second 700 bytes, one behind the other; then some elsewhere, and nothing.
    let (near, far) = bytes.split_at(2 * CHUNK_BYTES + 1400);
    let mut pieces: Vec<(usize, &[u8])> = near
        .chunks(1400)
        .enumerate()
        .map(|(n, two)| (700 * n, &two[..two.len().min(700)]))
        .collect();
    let wanted: Vec<u8> = pieces.iter().flat_map(|(_, piece)| *piece).copied().collect();
    pieces.extend([(3 * CHUNK_BYTES, &far[..CHUNK_BYTES / 2]), (5, &far[..0])]);
    cuda.write_all(&memory, &pieces).unwrap();
    assert_eq!(stub.get("copies"), 3, "a buffer and a bit, and what lies elsewhere");
    let mut out = vec![0; 4 * CHUNK_BYTES];
    cuda.read(&memory, 0, &mut out).unwrap();
    assert!(out[..wanted.len()] == wanted && wanted.len() > CHUNK_BYTES, "the bytes differ");
    assert!(out[3 * CHUNK_BYTES..][..CHUNK_BYTES / 2] == far[..CHUNK_BYTES / 2]);
    drop((cuda, memory));
    stub.check_clean();
}

#[test]
fn copies_stay_inside_their_memory() {
    let Some(stub) = Stub::new("bounds") else { return };
    let cuda = stub.open().unwrap();
    let memory = cuda.alloc(1024).unwrap();
    let part = Memory { address: memory.address + 512, bytes: 256, owner: memory.owner.clone() };
    cuda.write(&part, 255, &[9]).unwrap();
    let mut out = [0];
    cuda.read(&memory, 767, &mut out).unwrap();
    assert_eq!(out, [9]);
    let beyond = Memory { address: memory.address + 512, bytes: 1024, owner: part.owner.clone() };
    let before = Memory { address: memory.address - 1, bytes: 16, owner: part.owner.clone() };
    for (memory, offset) in
        [(&memory, 1024), (&memory, usize::MAX), (&part, 256), (&beyond, 0), (&before, 0)]
    {
        for result in [cuda.write(memory, offset, &[1]), cuda.read(memory, offset, &mut out)] {
            let Err(Error::Failed(words)) = result else { panic!("{result:?} at {offset}") };
            assert!(words.contains("1 bytes at"), "{words}");
        }
    }
    let other = stub.open().unwrap();
    let foreign = Memory { owner: Arc::new(()), ..memory.clone() };
    for result in [other.write(&memory, 0, &[1]), cuda.write(&foreign, 0, &[1])] {
        assert!(result.unwrap_err().to_string().contains("another machine"));
    }
}

#[test]
fn launches_are_given_as_asked_and_end_in_order() {
    let Some(stub) = Stub::new("launches") else { return };
    let cuda = stub.open().unwrap();
    let module = cuda.compile(&source("text")).unwrap();
    let entry = &as_cuda(&module).entries[0];
    let facts = &entry.facts;
    assert_eq!((entry.name, facts.registers, facts.local_bytes), ("kernel", 40, 16));
    assert_eq!((facts.threads_max, entry.args_bytes()), (1024, 8));
    let mut first = cuda.launch(&module, &LAUNCH).unwrap();
    let other = Launch { blocks: 1, threads: 32, shared_bytes: 0, args: &[1; 8], ..LAUNCH };
    let mut second = cuda.launch(&module, &other).unwrap();
    assert_eq!(
        stub.launches(),
        "4x1x1 416x1x1 232000 707070707070707;1x1x1 32x1x1 0 101010101010101;"
    );
    assert_eq!((first.done(), second.done()), (Ok(false), Ok(false)));
    stub.set("landed", 1);
    assert_eq!((first.done(), second.done()), (Ok(true), Ok(false)));
    stub.set("landed", 2);
    assert_eq!((first.done(), second.done()), (Ok(true), Ok(true)));
    drop((first, second, module, cuda));
    stub.check_clean();
}

#[test]
fn nothing_waits_for_a_running_kernel() {
    let Some(stub) = Stub::new("a running kernel") else { return };
    let cuda = stub.open().unwrap();
    let (kept, freed) = (cuda.alloc(5000).unwrap(), cuda.alloc(64).unwrap());
    let shared = cuda.alloc_shared(64).unwrap();
    let module = cuda.compile(&source("text")).unwrap();
    let unused = cuda.compile(&source("other text")).unwrap();
    let mut flight = cuda.launch(&module, &LAUNCH).unwrap();
    let (memsets, pinned) = (stub.get("memsets"), stub.get("pinned"));

    let mut out = vec![1; 5000];
    cuda.write(&kept, 0, &pattern(5000)).unwrap();
    cuda.read(&kept, 0, &mut out).unwrap();
    assert_eq!(out, pattern(5000));
    let late = cuda.alloc(5000).unwrap();
    cuda.read(&late, 0, &mut out).unwrap();
    assert_eq!(out, vec![0; 5000]);
    assert_eq!(stub.get("memsets"), memsets, "zeroed by copies");
    assert_eq!(cuda.info().unwrap().name, "cuda:0");
    drop((freed, shared, unused));
    assert_eq!(flight.done(), Ok(false));
    assert_eq!((stub.get("blocks"), stub.get("modules")), (3, 2), "nothing is freed yet");
    assert_eq!((stub.get("pinned"), stub.get("violations")), (pinned, 0));

    stub.set("landed", 1);
    assert_eq!(flight.done(), Ok(true));
    assert_eq!((stub.get("blocks"), stub.get("modules")), (2, 1), "now it is");
    assert_eq!(stub.get("pinned"), pinned - 1);
    drop((late, kept, cuda, module, flight));
    stub.check_clean();
}

#[test]
fn a_dropped_flight_is_waited_for() {
    let Some(stub) = Stub::new("a dropped flight") else { return };
    let cuda = stub.open().unwrap();
    let module = cuda.compile(&source("text")).unwrap();
    let memory = cuda.alloc(64).unwrap();
    let flight = cuda.launch(&module, &LAUNCH).unwrap();
    drop((module, memory, cuda));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(stub.paths.patience / 5);
            stub.set("landed", 1);
        });
        drop(flight);
        assert_eq!(stub.get("landed"), 1);
    });
    stub.check_clean();
}

#[test]
fn any_thread_may_call() {
    let Some(stub) = Stub::new("threads") else { return };
    let cuda = stub.open().unwrap();
    std::thread::scope(|scope| {
        for n in 0..4_u8 {
            let cuda = &cuda;
            scope.spawn(move || {
                for round in 0..10 {
                    let bytes = vec![n; CHUNK_BYTES + round];
                    let memory = cuda.alloc(bytes.len()).unwrap();
                    cuda.write(&memory, 0, &bytes).unwrap();
                    let mut out = vec![0; bytes.len()];
                    cuda.read(&memory, 0, &mut out).unwrap();
                    assert!(out == bytes, "thread {n}");
                }
            });
        }
    });
    drop(cuda);
    stub.check_clean();
}

#[test]
fn compiled_code_is_kept_on_disk() {
    let Some(mut stub) = Stub::new("compiled code on disk") else { return };
    let cuda = stub.open().unwrap();
    let first = cuda.compile(&source("text")).unwrap();
    assert!(!as_cuda(&first).cached && as_cuda(&first).notes.is_empty());
    let again = stub.open().unwrap().compile(&source("text")).unwrap();
    assert!(as_cuda(&again).cached);
    assert_eq!(as_cuda(&again).log, "stub log: line 7: as the test set");
    assert_eq!(stub.get("compiled"), 1);
    let mut defined = source("text");
    defined.defines.push(("KIE_N".into(), "1".into()));
    cuda.compile(&defined).unwrap();
    stub.set("nvrtc_minor", 1);
    stub.open().unwrap().compile(&source("text")).unwrap();
    assert_eq!(stub.get("compiled"), 3, "defines and the compiler's version count");

    for entry in std::fs::read_dir(stub.paths.cache.folder().unwrap()).unwrap() {
        let path = entry.unwrap().path();
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    }
    assert!(!as_cuda(&cuda.compile(&source("text")).unwrap()).cached, "a cut entry");
    assert!(as_cuda(&cuda.compile(&source("text")).unwrap()).cached, "is written anew");

    let file = stub.folder.join("file");
    std::fs::write(&file, b"").unwrap();
    stub.paths.cache = Cache::at(file);
    let module = stub.open().unwrap().compile(&source("text")).unwrap();
    assert!(as_cuda(&module).notes[0].contains("KIE_CACHE"), "{:?}", as_cuda(&module).notes);
}
