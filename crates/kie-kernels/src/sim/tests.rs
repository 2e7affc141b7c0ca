//! Toy kernels for every primitive, at both widths and several seeds, and what happens when a
//! kernel is wrong.

#![allow(clippy::unwrap_used)]

use super::*;
use crate::mono::lower::partition::Partition;
use crate::mono::shapes::{amd, model};
use crate::mono::source::join;

const SEEDS: u64 = 4;

fn open(seed: u64, warp: u32) -> Sim {
    Sim::open(&format!("sim:seed={seed},warp={warp},switches=2000000000")).unwrap()
}

/// The simulator's headers, and which block a block is.
fn platform() -> String {
    let root = "#include \"chiplets.h\"\n#include \"platform.h\"\n#include \"tile.h\"\n";
    join(Platform::Sim, ("toy", root))
}

fn source(text: &str, entry: &'static str) -> Source {
    Source { defines: Vec::new(), text: platform() + text, entries: vec![entry] }
}

fn bytes_of(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn filled(sim: &Sim, bytes: &[u8]) -> Memory {
    let memory = sim.alloc(bytes.len()).unwrap();
    sim.write(&memory, 0, bytes).unwrap();
    memory
}

pub(super) fn fetch(sim: &Sim, memory: &Memory) -> Vec<u8> {
    let mut out = vec![0; memory.bytes];
    sim.read(memory, 0, &mut out).unwrap();
    out
}

pub(super) fn fetch_u32(sim: &Sim, memory: &Memory) -> Vec<u32> {
    let bytes = fetch(sim, memory);
    bytes.chunks_exact(4).map(|part| u32::from_ne_bytes(part.try_into().unwrap())).collect()
}

fn fetch_u64(sim: &Sim, memory: &Memory) -> Vec<u64> {
    let bytes = fetch(sim, memory);
    bytes.chunks_exact(8).map(|part| u64::from_ne_bytes(part.try_into().unwrap())).collect()
}

pub(super) fn land(mut flight: Box<dyn Flight>) -> Result<()> {
    while !flight.done()? {
        std::thread::sleep(Duration::from_micros(200));
    }
    Ok(())
}

/// Runs a kernel with words as its args.
pub(super) fn run_with(
    sim: &Sim,
    module: &Arc<dyn Module>,
    entry: &str,
    args: &[u64],
    shape: (u32, u32),
) -> Result<()> {
    let args = bytes_of(args);
    let (blocks, threads) = shape;
    let launch = Launch { entry, blocks, threads, shared_bytes: 8192, args: &args };
    land(sim.launch(module, &launch)?)
}

fn run(sim: &Sim, text: &str, args: &[u64], shape: (u32, u32)) -> Result<()> {
    let module = sim.compile(&source(text, "toy"))?;
    run_with(sim, &module, "toy", args, shape)
}

#[test]
fn blocks_are_placed_as_the_cut_says() {
    let partition = Partition::new(&model("2b"), &amd(), 4096).unwrap();
    for (blocks, chiplets) in [(16, 8), (13, 4), (24, 6), (5, 8)] {
        let sim = Sim::open(&format!("sim:seed=2,blocks={blocks},chiplets={chiplets}")).unwrap();
        assert_eq!(sim.info().unwrap().chiplets, chiplets);
        let partition = Partition { blocks, chiplets, ..partition.clone() };
        let text = "struct Args { u32* out; };\nKIE_KERNEL(toy, 32, Args a) {\n\
                    if (thread() == 0) a.out[grid_block()] = block();\n}\n";
        let defines = [("KIE_CHIPLETS", chiplets), ("KIE_BLOCKS", blocks)];
        let defines = defines.map(|(name, n)| (name.to_owned(), n.to_string())).to_vec();
        let module = sim.compile(&Source { defines, ..source(text, "toy") }).unwrap();
        let out = sim.alloc(blocks as usize * 4).unwrap();
        run_with(&sim, &module, "toy", &[out.address], (blocks, 32)).unwrap();
        let wanted: Vec<_> = (0..blocks).map(|block| partition.block_of(block)).collect();
        assert_eq!(fetch_u32(&sim, &out), wanted, "{blocks} on {chiplets}");
    }
}

fn everywhere(check: impl Fn(&Sim)) {
    for warp in [32, 64] {
        for seed in 0..SEEDS {
            check(&open(seed, warp));
        }
    }
}

const COLLECTIVES: &str = "
struct Args { u32* out; };
KIE_KERNEL(toy, 288, Args a) {
    KIE_SHARED_BYTES(shared);
    u32* s = (u32*)shared;
    u32 sum = thread() + 1000 * block();
    for (u32 m = 16; m > 0; m /= 2) sum += shuffle_xor(sum, m);
    const float third = shuffle((float)thread(), 3);
    const u32 odd = ballot(lane() % 3 == 1);
    if (lane() == 0) s[thread() / 32] = sum;
    sync_block();
    u32 all = 0;
    for (u32 i = 0; i < 9; ++i) all += s[i];
    u32* mine = a.out + (block() * 288 + thread()) * 4;
    mine[0] = sum, mine[1] = (u32)third, mine[2] = odd, mine[3] = all;
}
";

#[test]
fn collectives_meet_in_teams_of_32() {
    everywhere(|sim| {
        let out = sim.alloc(8 * 288 * 16).unwrap();
        run(sim, COLLECTIVES, &[out.address], (8, 288)).unwrap();
        let odd = (0..32).filter(|lane| lane % 3 == 1).map(|lane| 1_u32 << lane).sum::<u32>();
        for (i, got) in fetch_u32(sim, &out).chunks(4).enumerate() {
            let (block, thread) = (i as u32 / 288, i as u32 % 288);
            let first = thread / 32 * 32;
            let sum = 32 * first + 496 + 32 * 1000 * block;
            let all = 288 * 287 / 2 + 288 * 1000 * block;
            assert_eq!(got, [sum, first + 3, odd, all], "block {block} thread {thread}");
        }
    });
}

const BARRIERS: &str = "
struct Args { u32* out; };
KIE_KERNEL(toy, 160, Args a) {
    KIE_SHARED_BYTES(shared);
    u32* s = (u32*)shared;
    if (thread() >= 128) {
        if (lane() > 0) return;
        sync_block();
        a.out[128] = s[0];
        return;
    }
    s[thread()] = thread();
    u32 sum = 0;
    for (u32 i = 0; i < 50; ++i) {
        sync_consumers<128>();
        sum += s[(thread() + i) % 128];
        sync_consumers<128>();
        s[thread()] += 1;
    }
    sync_block();
    a.out[thread()] = sum;
}
";

#[test]
fn barriers_count_the_threads_that_are_left() {
    everywhere(|sim| {
        let out = sim.alloc(129 * 4).unwrap();
        run(sim, BARRIERS, &[out.address], (1, 160)).unwrap();
        let got = fetch_u32(sim, &out);
        for thread in 0..128 {
            let want = (0..50).map(|i| (thread + i) % 128 + i).sum::<u32>();
            assert_eq!(got[thread as usize], want);
        }
        assert_eq!(got[128], 50);
    });
}

/// One warp streams, four take; more stages than slots, so that every slot is used again.
const STREAM: &str = "
struct Args { const u8* from; u64* out; u32 stages, spare; };
constexpr u32 kSlots = 5, kBytes = 512;
KIE_KERNEL(toy, 192, Args a) {
    KIE_SHARED_BYTES(shared);
    Slot* slots = (Slot*)shared;
    u8* ring = shared + 1024;
    if (thread() == 0) {
        for (u32 i = 0; i < kSlots; ++i) slot_init(slots + i, 4);
        slots_ready();
    }
    sync_block();
    if (thread() >= 128) {
        if (thread() >= 128 + kCopyThreads) return;
        Copies copies = copies_into(slots, kSlots);
        for (u32 i = 0; i < a.stages; ++i) {
            if (thread() == 128)
                while (!slot_free(slots + i % kSlots, 1 ^ (i / kSlots & 1))) {
                }
            from_leader(0);
            reads_before_copy();
            copy_async(slots + i % kSlots, ring + i % kSlots * kBytes,
                       a.from + (block() * a.stages + i) * kBytes, kBytes, copies);
        }
        for (u32 i = 0; i < kSlots; ++i) {
            const u32 stage = a.stages - kSlots + i;
            while (!slot_filled(slots + stage % kSlots, stage / kSlots & 1)) {
            }
        }
        return;
    }
    u64 sum = 0;
    for (u32 i = 0; i < a.stages; ++i) {
        while (!slot_filled(slots + i % kSlots, i / kSlots & 1)) {
        }
        sum = sum * 3 + ((const u32*)(ring + i % kSlots * kBytes))[thread()];
        sync_warp();
        if (lane() == 0) slot_release(slots + i % kSlots);
    }
    a.out[block() * 128 + thread()] = sum;
}
";

fn stream(sim: &Sim, text: &str) -> Result<bool> {
    let (blocks, stages) = (4_usize, 103_usize);
    let words: Vec<u32> =
        (0..(blocks * stages * 128) as u32).map(|i| i.wrapping_mul(2_654_435_761)).collect();
    let from = filled(sim, &words.iter().flat_map(|w| w.to_ne_bytes()).collect::<Vec<_>>());
    let out = sim.alloc(blocks * 128 * 8)?;
    run(sim, text, &[from.address, out.address, stages as u64], (blocks as u32, 192))?;
    let got = fetch_u64(sim, &out);
    Ok((0..blocks * 128).all(|i| {
        let at = |stage| u64::from(words[(i / 128 * stages + stage) * 128 + i % 128]);
        got[i] == (0..stages).fold(0_u64, |sum, s| sum.wrapping_mul(3).wrapping_add(at(s)))
    }))
}

#[test]
fn a_ring_of_copies_brings_every_stage() {
    everywhere(|sim| assert!(stream(sim, STREAM).unwrap()));
}

/// Every block gathers what all blocks publish, round after round, and publishes its sum.
const GATHER: &str = "
struct Args { u64 *words, *abort_flag, *record, *out, budget_ns; u32 rounds, lost; };
constexpr u32 kBlocks = 8, kEach = 32;
KIE_KERNEL(toy, 64, Args a) {
    KIE_SHARED_BYTES(shared);
    volatile u32* total = (volatile u32*)shared;
    u32 mine = block() * 64 + thread();
    bool lost = false;
    for (u32 round = 1; round <= a.rounds && !lost; ++round) {
        u64* row = a.words + (round & 1) * kBlocks * kEach;
        if (thread() < kEach && !(a.lost == round && block() == 3 && thread() == 7))
            store_word(row + block() * kEach + thread(), (u64)round << 32 | mine);
        u32 sum = 0;
        for (u32 i = 0; i < kBlocks; ++i) {
            u64 w = load_word(row + i * kEach + lane());
            u64 since = clock_ns();
            for (u32 polls = 1; (u32)(w >> 32) != round && !lost; ++polls) {
                if (polls % 64 == 0) {
                    if (load_word(a.abort_flag)) lost = true;
                    else if (clock_ns() - since > a.budget_ns) {
                        lost = true;
                        a.record[0] = round, a.record[1] = i, a.record[2] = lane();
                        store_word(a.abort_flag, 1);
                    }
                }
                w = load_word(row + i * kEach + lane());
            }
            sum += (u32)w;
        }
        for (u32 m = 16; m > 0; m /= 2) sum += shuffle_xor(sum, m);
        if (thread() == 0) *total = 0;
        sync_block();
        if (lost) *total = 1;
        sync_block();
        lost = *total != 0;
        mine = mine * 5 + sum;
        sync_block();
    }
    if (thread() < kEach) a.out[block() * kEach + thread()] = mine;
}
";

struct Gathered {
    outcome: Result<()>,
    out: Vec<u64>,
    abort_flag: u64,
    record: Vec<u64>,
    trace: Trace,
}

fn gather(sim: &Sim, text: &str, lost: u32) -> Gathered {
    let [words, abort_flag, record, out] =
        [2 * 8 * 32 * 8, 8, 24, 8 * 32 * 8].map(|bytes| sim.alloc(bytes).unwrap());
    let rounds = 40_u64;
    let args = [words.address, abort_flag.address, record.address, out.address, 200_000_000];
    let args: Vec<u64> = args.into_iter().chain([u64::from(lost) << 32 | rounds]).collect();
    let outcome = run(sim, text, &args, (8, 64));
    Gathered {
        outcome,
        out: fetch_u64(sim, &out),
        abort_flag: fetch_u64(sim, &abort_flag)[0],
        record: fetch_u64(sim, &record),
        trace: sim.last_trace().unwrap(),
    }
}

fn gathered() -> Vec<u64> {
    let mut mine: Vec<u32> = (0..8 * 64).collect();
    for _ in 0..40 {
        let sum =
            (0..8 * 64).filter(|i| i % 64 < 32).fold(0_u32, |sum, i| sum.wrapping_add(mine[i]));
        mine.iter_mut().for_each(|m| *m = m.wrapping_mul(5).wrapping_add(sum));
    }
    (0..8 * 64).filter(|i| i % 64 < 32).map(|i| u64::from(mine[i])).collect()
}

#[test]
fn epoch_words_reach_all_blocks() {
    let want = gathered();
    everywhere(|sim| {
        let got = gather(sim, GATHER, 0);
        got.outcome.unwrap();
        assert_eq!(got.abort_flag, 0);
        assert!(got.out == want);
    });
}

#[test]
fn a_lost_publish_ends_in_the_kernel_s_own_record() {
    everywhere(|sim| {
        let start = Instant::now();
        let got = gather(sim, GATHER, 17);
        got.outcome.unwrap();
        assert_eq!((got.abort_flag, &got.record[..]), (1, &[17, 3, 7][..]));
        assert!(got.trace.now_ns > 200_000_000, "{:?}", got.trace);
        assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    });
}

#[test]
fn a_seed_is_a_schedule() {
    let mut seen = std::collections::BTreeSet::new();
    for warp in [32, 64] {
        for seed in 0..SEEDS {
            let first = gather(&open(seed, warp), GATHER, 0).trace;
            let again = gather(&open(seed, warp), GATHER, 0).trace;
            assert_eq!(first, again, "seed {seed} warp {warp}");
            assert!(seen.insert(first.schedule), "seed {seed} warp {warp}");
        }
    }
}

const MMA: &str = "
struct Args { const u32* in; float* out; };
KIE_KERNEL(toy, 64, Args a) {
    const u32* mine = a.in + (block() * 64 + thread()) * 6;
    float d[4] = {1, 2, 3, 4};
    mma(d, mine[0], mine[1], mine[2], mine[3], mine[4], mine[5]);
    mma(d, mine[0], mine[1], mine[2], mine[3], mine[4], mine[5]);
    for (u32 i = 0; i < 4; ++i) a.out[(block() * 64 + thread()) * 4 + i] = d[i];
}
";

/// Halves that a test multiplies, all finite.
fn halves(count: usize) -> Vec<half::f16> {
    (0..count as u32)
        .map(|i| half::f16::from_f32((i.wrapping_mul(2_654_435_761) >> 20) as f32 / 1024.0 - 2.0))
        .collect()
}

#[test]
fn a_matrix_product_is_the_plain_one() {
    everywhere(|sim| {
        let given = halves(2 * 64 * 12);
        let bytes: Vec<u8> = given.iter().flat_map(|h| h.to_bits().to_ne_bytes()).collect();
        let (input, out) = (filled(sim, &bytes), sim.alloc(2 * 64 * 16).unwrap());
        run(sim, MMA, &[input.address, out.address], (2, 64)).unwrap();
        let got: Vec<f32> = fetch_u32(sim, &out).into_iter().map(f32::from_bits).collect();
        for team in 0..4 {
            let at = |lane: usize, word: usize, which: usize| {
                given[(team * 32 + lane) * 12 + 2 * word + which].to_f32()
            };
            // Row g, column c of a; row k, column n of b.
            let a = |g: usize, c: usize| at(g % 8 * 4 + c % 8 / 2, g / 8 + c / 8 * 2, c % 2);
            let b = |k: usize, n: usize| at(n * 4 + k % 8 / 2, 4 + k / 8, k % 2);
            for lane in 0..32 {
                for i in 0..4 {
                    let (row, column) = (lane / 4 + i / 2 * 8, 2 * (lane % 4) + i % 2);
                    let mut want = (i + 1) as f32;
                    for _ in 0..2 {
                        (0..16).for_each(|k| want += a(row, k) * b(k, column));
                    }
                    assert_eq!(got[(team * 32 + lane) * 4 + i], want, "{team} {lane} {i}");
                }
            }
        }
    });
}

/// All halves to floats, and floats of every kind to halves.
const ROUND: &str = "
struct Args { const u32* in; u32* out; u32* floats; u32 count, spare; };
KIE_KERNEL(toy, 1024, Args a) {
    for (u32 i = thread(); i < a.count; i += 1024)
        a.out[i] = pack_half2(number(a.in[i]), number(a.in[i] ^ 0x80000000u));
    for (u32 i = thread(); i < 32768; i += 1024) {
        float lo, hi;
        unpack_half2(2 * i | (2 * i + 1) << 16, lo, hi);
        a.floats[2 * i] = bits(lo), a.floats[2 * i + 1] = bits(hi);
    }
}
";

#[test]
fn halves_are_rounded_to_nearest_even() {
    let mut floats = Vec::new();
    for half in 0..=0x7c00_u16 {
        let here = half::f16::from_bits(half).to_f32();
        let next = half::f16::from_bits(half + 1).to_f32();
        let middle = if half < 0x7bff { here / 2.0 + next / 2.0 } else { 65520.0 };
        for float in [here, middle] {
            let bits = float.to_bits();
            floats.extend([bits.saturating_sub(1), bits, bits + 1]);
        }
    }
    floats.retain(|&bits| !f32::from_bits(bits).is_nan());
    floats.extend([0, 1, 0x7f7f_ffff, 0x3300_0000, 0x3300_0001, 0x32ff_ffff]);
    let text = ROUND.to_owned();
    let slow = format!("#undef __F16C__\n{}{ROUND}", platform());
    for text in [platform() + &text, slow] {
        let sim = open(1, 32);
        let bytes: Vec<u8> = floats.iter().flat_map(|bits| bits.to_ne_bytes()).collect();
        let (input, out) = (filled(&sim, &bytes), sim.alloc(bytes.len()).unwrap());
        let wide = sim.alloc(65536 * 4).unwrap();
        let whole = Source { defines: Vec::new(), text, entries: vec!["toy"] };
        let module = sim.compile(&whole).unwrap();
        let args = [input.address, out.address, wide.address, floats.len() as u64];
        run_with(&sim, &module, "toy", &args, (1, 1024)).unwrap();
        for (&bits, got) in floats.iter().zip(fetch_u32(&sim, &out)) {
            let want = u32::from(half::f16::from_f32(f32::from_bits(bits)).to_bits());
            assert_eq!(got, want | (want ^ 0x8000) << 16, "{bits:08x}");
        }
        for (half, got) in (0..=u16::MAX).zip(fetch_u32(&sim, &wide)) {
            let (want, got) = (half::f16::from_bits(half).to_f32(), f32::from_bits(got));
            assert!(want.to_bits() == got.to_bits() || want.is_nan() && got.is_nan(), "{half:x}");
        }
    }
}

/// The host asks, the kernel answers, until it is told to end.
const ECHO: &str = "
struct Args { u32* ring; };
KIE_KERNEL(toy, 32, Args a) {
    if (thread() != 0) return;
    for (u32 last = 0;;) {
        const u32 v = load_host(a.ring);
        if (v == ~0u) break;
        if (v != last) {
            fence_system();
            store_host(a.ring + 16, v * 3);
            last = v;
        } else {
            pause_ns(100);
        }
    }
}
";

#[test]
fn a_kernel_talks_with_the_host() {
    for warp in [32, 64] {
        let sim = open(5, warp);
        let ring = sim.alloc_shared(128).unwrap();
        let module = sim.compile(&source(ECHO, "toy")).unwrap();
        let args = ring.address.to_ne_bytes();
        let launch = Launch { entry: "toy", blocks: 1, threads: 32, shared_bytes: 0, args: &args };
        let mut flight = sim.launch(&module, &launch).unwrap();
        for i in 1..50 {
            ring.word32(0).store(i, Ordering::Release);
            let start = Instant::now();
            while ring.word32(64).load(Ordering::Acquire) != 3 * i {
                assert!(start.elapsed() < Duration::from_secs(10));
                std::thread::sleep(Duration::from_micros(50));
            }
            assert!(!flight.done().unwrap());
        }
        // Longer than any kernel's patience in steps: waiting for the host is not a hang.
        std::thread::sleep(Duration::from_millis(300));
        assert!(!flight.done().unwrap());
        ring.word32(0).store(u32::MAX, Ordering::Release);
        land(flight).unwrap();
    }
}

fn failure(sim: &Sim, text: &str, shape: (u32, u32)) -> String {
    let out = sim.alloc(65536).unwrap();
    let start = Instant::now();
    let error = run(sim, text, &[out.address], shape).expect_err(text);
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    let Error::Failed(text) = error else { panic!("{error:?}") };
    text
}

fn body(text: &str) -> String {
    format!("struct Args {{ u64* out; }};\nKIE_KERNEL(toy, 256, Args a) {{ {text} }}\n")
}

#[test]
fn hangs_and_faults_name_block_thread_and_place() {
    let cases = [
        (
            "if (block() == 1 && thread() == 5) return; sync_consumers<128>();",
            &["deadlock", "block 1 threads 0..31 (31): at sync_consumers, 127 there"][..],
        ),
        (
            "if (thread() == 70) sync_consumers<64>(); else sync_block();",
            &["deadlock", "block 0 threads 70..70 (1): at sync_consumers", "127 of 128"],
        ),
        (
            "if (thread() == 3) sync_warp(); else a.out[0] = shuffle_xor(lane(), 1);",
            &["block ", "while other lanes of its team are at"],
        ),
        (
            "if (thread() < 32) while (load_word(a.out) == 0) {}",
            &["no progress", "threads 0..31 (32): wait in load_word"],
        ),
        ("for (;;) store_word(a.out, 1);", &["bound on switches"]),
        ("for (;;) sync_warp();", &["bound on switches"]),
        (
            "KIE_SHARED_BYTES(s); Slot* x = (Slot*)s; if (thread() >= kCopyThreads) return; \
             if (thread() == 0) slot_init(x, 1); from_leader(0); Copies c = copies_into(x, 1); \
             copy_async(x, s + 64, a.out, 64, c); \
             copy_async(x, s + 64, a.out, 64, c);",
            &["thread ", "still being filled"],
        ),
        (
            "KIE_SHARED_BYTES(s); Slot* x = (Slot*)s; if (thread() >= kCopyThreads) return; \
             if (thread() == 0) slot_init(x, 1); from_leader(0); Copies c = copies_into(x, 1); \
             copy_async(x, s + 8192, a.out, 64, c);",
            &["bytes at 8192 of 8192"],
        ),
        ("u64 x, y; load_words(a.out + 1, x, y);", &["not 16-byte aligned"]),
        (
            "KIE_SHARED_BYTES(s); if (thread() >= kCopyThreads) return; \
             for (u32 i = 0; i < 9; ++i) { \
             Slot* x = (Slot*)s + i; if (thread() == 0) slot_init(x, 1); from_leader(0); \
             Copies c = copies_into(x, 1); copy_async(x, s + 1024, a.out, 64, c); }",
            &["block ", "copies in flight"],
        ),
    ];
    for warp in [32, 64] {
        for (text, wanted) in &cases {
            let sim = Sim::open(&format!("sim:warp={warp},switches=20000000,seed=9")).unwrap();
            let got = failure(&sim, &body(text), (2, 128));
            for part in *wanted {
                assert!(got.contains(part), "{text}\nwanted {part:?}, got {got}");
            }
        }
    }
}

/// Two teams that talk to each other: alive where they are two waves, dead where they are one.
const DIVERGENT: &str = "
struct Args { u64* out; };
KIE_KERNEL(toy, 64, Args a) {
    if (thread() < 32) {
        while (load_word(a.out) == 0) {}
    } else {
        sync_warp();
        sync_warp();
        if (lane() == 0) store_word(a.out, 1);
    }
}
";

#[test]
fn a_held_wave_of_64_does_not_pass_its_waiting_lanes() {
    for seed in 0..SEEDS {
        let sim = open(seed, 32);
        let out = sim.alloc(8).unwrap();
        run(&sim, DIVERGENT, &[out.address], (1, 64)).unwrap();
        let sim = Sim::open(&format!("sim:seed={seed},warp=64,hold=1")).unwrap();
        let got = failure(&sim, DIVERGENT, (1, 64));
        assert!(got.contains("no progress") && got.contains("held by a waiting lane"), "{got}");
    }
}

/// The same, where control flow joins between what one team does and what the other waits for.
const JOINED: &str = "
struct Args { u64* out; };
KIE_KERNEL(toy, 96, Args a) {
    if (thread() < 32) {
        sync_warp();
        if (lane() == 0) store_word(a.out, 1);
    }
    join_wave();
    while (load_word(a.out) == 0) {}
}
";

#[test]
fn a_held_wave_joins_behind_a_branch() {
    for (seed, warp) in (0..SEEDS).flat_map(|seed| [(seed, 32), (seed, 64)]) {
        let sim = Sim::open(&format!("sim:seed={seed},warp={warp},hold=1")).unwrap();
        let out = sim.alloc(8).unwrap();
        run(&sim, JOINED, &[out.address], (1, 96)).unwrap();
    }
    let apart = mutant(JOINED, "    join_wave();\n", "");
    let stuck = (0..SEEDS).filter(|seed| {
        let sim = Sim::open(&format!("sim:seed={seed},warp=64,hold=1")).unwrap();
        let out = sim.alloc(8).unwrap();
        run(&sim, &apart, &[out.address], (1, 96)).is_err()
    });
    assert!(stuck.count() > 0, "nobody misses the join");
}

fn mutant(text: &str, from: &str, to: &str) -> String {
    let source = Source { defines: Vec::new(), text: text.to_owned(), entries: Vec::new() };
    mutate(&source, from, to).unwrap().text
}

#[test]
fn a_mutant_needs_its_snippet_once() {
    let source = source("int a, b;", "toy");
    for (from, to) in [("int a, c;", ""), ("inline", ""), ("int a, b;", "int a, b;")] {
        assert!(matches!(mutate(&source, from, to), Err(Error::Failed(_))), "{from}");
    }
}

#[test]
fn mutants_fail() {
    let waits = [
        ("while (!slot_filled(slots + i % kSlots, i / kSlots & 1)) {\n        }", ""),
        ("while (!slot_free(slots + i % kSlots, 1 ^ (i / kSlots & 1))) {\n                }", ";"),
        ("1 ^ (i / kSlots & 1)", "i / kSlots & 1"),
        (
            "        sync_warp();\n        if (lane() == 0) slot_release",
            "        if (lane() == 0) slot_release",
        ),
        ("slot_init(slots + i, 4)", "slot_init(slots + i, 3)"),
    ];
    for (from, to) in waits {
        let text = mutant(STREAM, from, to);
        for warp in [32, 64] {
            let caught = (0..8).filter(|&seed| {
                let sim =
                    Sim::open(&format!("sim:seed={seed},warp={warp},switches=100000000")).unwrap();
                !matches!(stream(&sim, &text), Ok(true))
            });
            let caught = caught.count();
            assert!(caught > 0, "{from:?} -> {to:?} at warp {warp} goes unnoticed");
        }
    }
    let want = gathered();
    let words = [
        ("(u32)(w >> 32) != round && !lost; ++polls", "w == 0 && !lost; ++polls"),
        ("(round & 1) * kBlocks * kEach", "0"),
        ("(u64)round << 32 | mine", "(u64)(round == 9 ? 8 : round) << 32 | mine"),
    ];
    for (from, to) in words {
        let text = mutant(GATHER, from, to);
        let caught = (0..8).filter(|&seed| {
            let got = gather(&open(seed, 32), &text, 0);
            got.outcome.is_err() || got.abort_flag != 0 || got.out != want
        });
        let caught = caught.count();
        assert!(caught > 0, "{from:?} -> {to:?} goes unnoticed");
    }
}

#[test]
fn names_are_understood_or_refused_in_words() {
    let options = Options::parse("sim:seed=3,warp=64,blocks=12,hold=1").unwrap();
    assert_eq!((options.seed, options.warp, options.blocks), (3, 64, 12));
    assert_eq!(Options::parse("sim").unwrap(), Options::default());
    assert_eq!(Options::parse(&options.name()).unwrap(), options);
    let bad =
        ["simple", "sim:warp=48", "sim:warp=", "sim:seed", "sim:blocks=0", "sim:seed=1,seed=2"];
    for name in bad.into_iter().chain(["cuda", "sim:speed=3", "sim:seed=-1"]) {
        let Err(Error::NoDevice { device, detail }) = Options::parse(name) else {
            panic!("{name} was taken");
        };
        assert!(device == name && !detail.is_empty());
    }
}

#[test]
fn wrong_launches_and_sources_are_refused() {
    let sim = open(0, 32);
    let module = sim.compile(&source(COLLECTIVES, "toy")).unwrap();
    let launch = Launch { entry: "toy", blocks: 1, threads: 32, shared_bytes: 0, args: &[0; 8] };
    let refused = |launch: &Launch<'_>, machine: &Sim, word: &str| {
        let Err(Error::Failed(text)) = machine.launch(&module, launch).map(|_| ()) else {
            panic!("{launch:?} was taken");
        };
        assert!(text.contains(word), "{text}");
    };
    refused(&Launch { blocks: 9, ..launch }, &sim, "1 to 8 can be resident");
    refused(&Launch { threads: 320, ..launch }, &sim, "at most 288");
    refused(&Launch { shared_bytes: 1 << 20, ..launch }, &sim, "at most 232448");
    refused(&Launch { entry: "tay", ..launch }, &sim, "no such kernel");
    refused(&launch, &open(0, 32), "another machine");
    let missing = sim.compile(&source(COLLECTIVES, "tay")).map(|_| ());
    assert!(matches!(&missing, Err(Error::Compile { detail, .. }) if detail.contains("tay")));
    let wrong = sim.compile(&source("KIE_KERNEL(", "toy")).map(|_| ());
    assert!(matches!(&wrong, Err(Error::Compile { detail, .. }) if detail.contains("error")));
    assert!(matches!(sim.alloc(1 << 60).map(|_| ()), Err(Error::OutOfMemory { .. })));
    let memory = sim.alloc(100).unwrap();
    assert!(sim.write(&memory, 96, &[0; 8]).is_err());
    assert!(memory.address.is_multiple_of(256) && fetch(&sim, &memory) == [0; 100]);
}
