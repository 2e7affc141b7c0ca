//! Copies into a ring as the platform's header makes them, and what they and the products behind
//! them take of a multiprocessor.

use std::collections::BTreeMap;
use std::path::Path;

use super::*;

/// What is wrong in a mutant's listing.
type Change = fn(&str) -> String;
/// Slots of a ring, and a kernel that copies through it; products of what stands in shared memory.
const TEXT: &str = r#"
#include "platform.h"
#include "tile.h"
#include "ops/unit.h"
#include "ops/decode_fp8.h"
#include "ops/decode_mxfp4.h"
struct StreamArgs { const u8* from; u32* out; u32* most; u32 stages, bytes; };
constexpr u32 kSlots = 3, kSlotBytes = 20480, kReaders = 128;
KIE_DEVICE void copy_all(const StreamArgs& a, Slot* slots, u8* ring) {
    Copies p = copies_into(slots, kSlots);
    u32 at = 0, parity = 1, most = 0;
    for (u32 i = 0; i < a.stages; ++i) {
        while (!slot_free(slots + at, parity)) copies_go_on(p);
        reads_before_copy();
        copy_async(slots + at, ring + at * kSlotBytes, a.from + (u64)i * a.bytes, a.bytes, p);
        if (p.flying > most) most = p.flying;
        if (++at == kSlots) at = 0, parity ^= 1;
    }
    while (p.flying > 0) copies_go_on(p);
    if (wave_lane() == 0) *a.most = most;
}
KIE_KERNEL(stream, kReaders + kWarp, StreamArgs a) {
    KIE_SHARED_BYTES(shared);
    Slot* slots = (Slot*)shared;
    u8* ring = shared + 64;
    if (thread() == 0) {
        for (u32 i = 0; i < kSlots; ++i) slot_init(slots + i, kReaders / kTeamLanes);
        slots_ready();
    }
    sync_block();
    if (thread() >= kReaders) return copy_all(a, slots, ring);
    u32 at = 0, parity = 0;
    for (u32 i = 0; i < a.stages; ++i) {
        while (!slot_filled(slots + at, parity)) {
        }
        const u32* stage = (const u32*)(ring + at * kSlotBytes);
        const u32 words = a.bytes / 4;
        for (u32 n = thread(); n < words; n += kReaders) a.out[i * words + n] = stage[n];
        sync_warp();
        if (lane() == 0) slot_release(slots + at);
        if (++at == kSlots) at = 0, parity ^= 1;
    }
}
struct ProductArgs { float* out; u32 units; };
template <int kBits>
KIE_DEVICE UnitHalves halves_of(const UnitCodes<kBits>& codes) {
    if constexpr (kBits == kBitsF8) {
        return decode_f8(codes.v);
    } else {
        UnitHalves h;
        KIE_UNROLL for (int row = 0; row < 2; ++row) {
            u32 halves[4];
            unpack_e2m1(codes.v[row], halves);
            KIE_UNROLL for (int j = 0; j < 4; ++j) h.v[2 * j + row] = halves[j];
        }
        return h;
    }
}
// Tiles of a team, a unit after another, times one vector.
template <int kBits>
KIE_DEVICE void product(const ProductArgs& a) {
    KIE_SHARED_BYTES(shared);
    float d[4] = {0, 0, 0, 0};
    const u8* codes = shared + thread() * sizeof(UnitCodes<kBits>);
    const u8* x = shared + 16384 + thread() % 4 * 16;
    KIE_NO_UNROLL for (u32 u = 0; u < a.units; ++u) {
        const UnitCodes<kBits> c = *(const UnitCodes<kBits>*)codes;
        const Quad v = *(const Quad*)x;
        if constexpr (kBits == kBitsF16) {
            const Quad &l = c.v[0], &h = c.v[1];
            mma_alone(d, l.v[0], l.v[1], l.v[2], l.v[3], v.v[0], v.v[1]);
            mma_alone(d, h.v[0], h.v[1], h.v[2], h.v[3], v.v[2], v.v[3]);
        } else {
            const UnitHalves w = halves_of<kBits>(c);
            mma_alone(d, w.v[0], w.v[1], w.v[2], w.v[3], v.v[0], v.v[1]);
            mma_alone(d, w.v[4], w.v[5], w.v[6], w.v[7], v.v[2], v.v[3]);
        }
        codes += kWarp * sizeof(UnitCodes<kBits>), x += 64;
    }
    for (u32 i = 0; i < 4; ++i) a.out[thread() * 4 + i] = d[i];
}
KIE_KERNEL(product_bf16, kWarp, ProductArgs a) { product<kBitsF16>(a); }
KIE_KERNEL(product_fp8, kWarp, ProductArgs a) { product<kBitsF8>(a); }
KIE_KERNEL(product_4bit, kWarp, ProductArgs a) { product<kBitsE2m1>(a); }
"#;
const ENTRIES: [&str; 4] = ["stream", "product_bf16", "product_fp8", "product_4bit"];
const SHARED: u32 = 64 + 3 * 20_480;

fn compiled() -> Option<Compiled> {
    let text = join(Platform::Hip, ("stream.h", TEXT));
    let source = Source { defines: Vec::new(), text, entries: ENTRIES.to_vec() };
    super::compiled("copies and products", &source)
}

fn run(gcn: &Gcn, compiled: &Compiled, launch: &Launch<'_>) {
    let module = gcn.module(compiled, &ENTRIES).unwrap();
    wait_within(&mut *gcn.launch(&module, launch).unwrap(), Duration::MAX).unwrap();
}

/// Whether stages arrive as they were sent, and how many loads were on their way at most.
fn copies(gcn: &Gcn, compiled: &Compiled, (stages, bytes): (u32, u32)) -> (bool, u32) {
    let all = (stages * bytes) as usize;
    let [from, out, most] = [all, all, 4].map(|bytes| gcn.alloc(bytes).unwrap());
    let sent: Vec<u8> =
        (0..all as u32).map(|at| (at.wrapping_mul(0x9e37_79b9) >> 24) as u8).collect();
    gcn.write(&from, 0, &sent).unwrap();
    let mut args = [&from, &out, &most].map(|memory| memory.address.to_le_bytes()).concat();
    args.extend([stages, bytes].map(u32::to_le_bytes).concat());
    let launch =
        Launch { entry: "stream", blocks: 1, threads: 192, shared_bytes: SHARED, args: &args };
    run(gcn, compiled, &launch);
    let (mut got, mut count) = (vec![0; all], [0; 4]);
    gcn.read(&out, 0, &mut got).unwrap();
    gcn.read(&most, 0, &mut count).unwrap();
    (got == sent, u32::from_le_bytes(count))
}

#[test]
fn copies_arrive_whole_and_nine_kilobytes_are_on_their_way() {
    let Some(compiled) = compiled() else { return };
    for (weak, seeds) in [(0, 4), (1, 2)] {
        for seed in 0..seeds {
            let gcn = Gcn::open(&format!("gcn:seed={seed},blocks=1,weak={weak}")).unwrap();
            for shape in [(7, 8192), (9, 1152), (5, 128), (4, 20_480)] {
                let (whole, most) = copies(&gcn, &compiled, shape);
                assert!(whole, "{shape:?} with seed {seed}, weak {weak}");
                assert!(most <= 60, "{most} loads on their way");
                assert!(shape.1 < 8192 || most * 256 >= 9 << 10, "{shape:?}: {most} loads of 256");
            }
        }
    }
}

#[test]
fn mutants_of_copies_are_found() {
    let Some(compiled) = compiled() else { return };
    let later = |listing: &str| {
        // Each wait lets four more loads be on their way.
        (0..15).rev().fold(listing.to_owned(), |all, n| {
            let [now, then] = [4 * n, 4 * n + 4].map(|left| format!("s_waitcnt vmcnt({left}) "));
            all.replace(&now, &then)
        })
    };
    let elsewhere = |listing: &str| listing.replace("offset:512 nt", "offset:256 nt");
    let mutants: [(&str, Change); 2] =
        [("a wait for too few", later), ("a place twice", elsewhere)];
    for (what, change) in mutants {
        let begin = compiled.listing.find("<stream>:").unwrap();
        let end = compiled.listing[begin..].find("<product_bf16>:").unwrap() + begin;
        let (before, after) = (&compiled.listing[..begin], &compiled.listing[end..]);
        let changed = change(&compiled.listing[begin..end]);
        assert_ne!(changed, compiled.listing[begin..end], "{what}: nothing has changed");
        let mutant = Compiled { listing: [before, &changed, after].concat(), ..compiled.clone() };
        for weak in [0, 1] {
            let gcn = Gcn::open(&format!("gcn:seed=1,blocks=1,weak={weak}")).unwrap();
            assert!(!copies(&gcn, &mutant, (7, 8192)).0, "{what} goes unnoticed, weak {weak}");
        }
    }
}

/// What `wave` keeps busy between a short run and a long one.
fn between(wave: usize, short: impl Fn(&Gcn), long: impl Fn(&Gcn)) -> Clocks {
    let of = |run: &dyn Fn(&Gcn)| {
        let gcn = Gcn::open("gcn:blocks=1").unwrap();
        run(&gcn);
        gcn.issued()[wave]
    };
    let (short, long) = (of(&short), of(&long));
    Clocks {
        instructions: long.instructions - short.instructions,
        vector: long.vector - short.vector,
        local: long.local - short.local,
        matrix: long.matrix - short.matrix,
    }
}

/// The figures that `kie bench roofline` counts with are those of the machine code.
#[test]
fn a_kilobyte_of_weights_takes_what_is_written() {
    let Some(compiled) = compiled() else { return };
    let products = |entry: &'static str, units: u32| {
        let compiled = &compiled;
        move |gcn: &Gcn| {
            let out = gcn.alloc(1024).unwrap();
            let mut args = out.address.to_le_bytes().to_vec();
            args.extend(units.to_le_bytes().into_iter().chain([0; 4]));
            run(
                gcn,
                compiled,
                &Launch { entry, blocks: 1, threads: 64, shared_bytes: SHARED, args: &args },
            );
        }
    };
    let mut found = BTreeMap::new();
    for (format, entry, unit_bytes) in [
        ("bf16", "product_bf16", 2048),
        ("fp8", "product_fp8", 1024),
        ("4bit", "product_4bit", 512),
    ] {
        let kilobytes = f64::from(8 * unit_bytes) / 1024.0;
        let clocks = between(0, products(entry, 8), products(entry, 16));
        found.insert(format, [clocks.vector as f64 / kilobytes, clocks.local as f64 / kilobytes]);
    }
    // Polls of a full ring are no part of it: long stages, which readers leave at once.
    let stream = |stages: u32| {
        let compiled = &compiled;
        move |gcn: &Gcn| assert!(copies(gcn, compiled, (stages, 20_480)).0)
    };
    let clocks = between(2, stream(1), stream(3));
    found.insert("copy", [clocks.instructions as f64 / 40.0, clocks.local as f64 / 40.0]);
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../python/kie/bench/gfx942.json");
    let text = std::fs::read_to_string(file).unwrap();
    for (name, got) in &found {
        let written =
            text.lines().find_map(|line| line.trim().strip_prefix(&format!("\"{name}\": [")));
        let written = written.unwrap_or_else(|| panic!("gfx942.json has no {name}; {found:?}"));
        let numbers =
            written.trim_end_matches([',', ']']).split(", ").map(|n| n.parse::<f64>().unwrap());
        for (got, written) in got.iter().zip(numbers) {
            let near = (got - written).abs() <= 0.05 * written;
            assert!(near, "{name}: {got} for {written} in gfx942.json; all: {found:?}");
        }
    }
}
