//! The machine on a real GPU. Ignored unless asked for; it prints what it measured.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::cuda::{open, CudaModule};
use crate::error::Error;
use crate::machine::{Flight, Launch, Machine, Source};

/// Fills every multiprocessor until the host's word is not 0 (or 20 s have passed), then doubles.
const TEXT: &str = r#"
typedef unsigned u32;
typedef unsigned long long u64;
struct Args {
    u32* word;
    const u32* in;
    u32* out;
};
extern "C" __global__ void wait_and_double(const __grid_constant__ Args a) {
    extern __shared__ u32 room[];
    if (threadIdx.x == 0) {
        u64 start, now;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
        do {
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(room[0]) : "l"(a.word)
                         : "memory");
            asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        } while (room[0] == 0 && now - start < 20000000000ull);
    }
    __syncthreads();
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(a.in + i) : "memory");
    a.out[i] = 2 * v;
}
extern "C" __global__ void fault(const __grid_constant__ Args a) { *(volatile u32*)16 = 1; }
"#;

fn source() -> Source {
    Source { defines: Vec::new(), text: TEXT.into(), entries: vec!["wait_and_double", "fault"] }
}

fn timed<T>(what: &str, body: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let value = body();
    eprintln!("{what}: {:.3} ms", start.elapsed().as_secs_f64() * 1e3);
    value
}

/// Waits for the end, for at most `bound`.
fn land(flight: &mut dyn Flight, bound: Duration) -> Result<(), Error> {
    let start = Instant::now();
    while !flight.done()? {
        assert!(start.elapsed() < bound, "the kernel does not end");
        std::thread::sleep(Duration::from_micros(50));
    }
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn the_machine_on_a_gpu() {
    let gpu = timed("open", || open("cuda", &super::compiler::environment(), None)).unwrap();
    let info = gpu.info().unwrap();
    eprintln!("{info:?}");
    let module = timed("compile", || gpu.compile(&source())).unwrap();
    let ours: &CudaModule = module.as_any().downcast_ref().unwrap();
    eprintln!("cached {} {:?} {:?}", ours.cached, ours.entries, ours.notes);

    let blocks = info.multiprocessors;
    let threads = 512;
    let bytes = (blocks * threads * 4) as usize;
    let shared = gpu.alloc_shared(64).unwrap();
    let (input, output) = (gpu.alloc(bytes).unwrap(), gpu.alloc(bytes).unwrap());
    let freed = gpu.alloc(64 << 20).unwrap();
    let args: Vec<u8> =
        [shared.address, input.address, output.address].map(u64::to_le_bytes).concat();
    let launch = Launch {
        entry: "wait_and_double",
        blocks,
        threads,
        shared_bytes: info.shared_bytes - 1024,
        args: &args,
    };
    let mut flight = timed("launch", || gpu.launch(&module, &launch)).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    let words: Vec<u8> = (0..blocks * threads).flat_map(u32::to_le_bytes).collect();
    timed("write while it runs", || gpu.write(&input, 0, &words)).unwrap();
    timed("write 1 word while it runs", || gpu.write(&input, 0, &words[..4])).unwrap();
    timed("free while it runs", || drop(freed));
    timed("info while it runs", || gpu.info()).unwrap();
    let mut out = vec![0; bytes];
    timed("read while it runs", || gpu.read(&input, 0, &mut out)).unwrap();
    assert_eq!(out, words);
    assert_eq!(flight.done(), Ok(false), "something waited for the kernel");
    shared.word32(0).store(1, Ordering::Release);
    timed("end", || land(&mut *flight, Duration::from_secs(5))).unwrap();
    gpu.read(&output, 0, &mut out).unwrap();
    for (i, word) in out.chunks_exact(4).enumerate() {
        assert_eq!(word, (2 * i as u32).to_le_bytes(), "word {i}");
    }
    let refused = gpu.launch(&module, &Launch { blocks: blocks + 1, ..launch });
    assert!(refused.err().unwrap().to_string().contains("1 fit on each"));

    speed(&*gpu);

    let mut flight = gpu.launch(&module, &Launch { entry: "fault", ..launch }).unwrap();
    let error = land(&mut *flight, Duration::from_secs(5)).unwrap_err();
    eprintln!("{error}");
    assert!(error.to_string().contains("restart"), "{error}");
}

/// A checkpoint's worth of bytes, as it is loaded.
fn speed(gpu: &dyn Machine) {
    let bytes: Vec<u8> = (0..1_u64 << 29).flat_map(|i| i.to_le_bytes()).collect();
    let memory = gpu.alloc(bytes.len()).unwrap();
    let start = Instant::now();
    gpu.write(&memory, 0, &bytes).unwrap();
    let seconds = start.elapsed().as_secs_f64();
    eprintln!("write {} bytes: {:.1} GB/s", bytes.len(), bytes.len() as f64 / seconds * 1e-9);
    let mut tail = vec![0; 1 << 20];
    gpu.read(&memory, bytes.len() - tail.len(), &mut tail).unwrap();
    assert!(tail == bytes[bytes.len() - tail.len()..], "the bytes differ");
}
