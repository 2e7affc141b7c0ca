//! Small kernels that are right or wrong about memory, on a memory as weak as it is documented:
//! what is wrong is found by some seed, what the platform's header does by none.

use super::*;

/// How a message is sent, and what is received.
const TEXT: &str = r#"
#include "platform.h"
struct Args { u32* data; u64* flag; u32* out; const u32* junk; };
constexpr u32 kEach = 8, kThreads = 128;
KIE_DEVICE void store_all(KIE_GLOBAL u32* data) {
    for (u32 i = 0; i < kEach; ++i) data[i * kThreads + thread()] = 7;
}
KIE_DEVICE void fetch(const Args& a) {
    for (u32 i = 0; i < kEach; ++i)
        a.out[i * kThreads + thread()] = a.data[i * kThreads + thread()];
}
KIE_DEVICE void await_flag(const Args& a) {
    while (load_word(a.flag) != 1) pause_ns(1);
}
// A load that nothing else needs, so that the compiler knows of something under way.
KIE_DEVICE void load_junk(const Args& a) {
    const u32 j = a.junk[thread()];
    asm volatile("; %0" ::"v"(j));
}
KIE_DEVICE void old_fence() { __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "agent"); }
KIE_DEVICE void old_sync() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
KIE_DEVICE void receive(const Args& a) { await_flag(a), fence_device(), fetch(a); }
KIE_KERNEL(edge_old, kThreads, Args a) {
    if (grid_block() == 1) return receive(a);
    store_all((KIE_GLOBAL u32*)a.data), load_junk(a), old_fence();
    if (thread() == 0) store_word(a.flag, 1);
}
KIE_KERNEL(edge, kThreads, Args a) {
    if (grid_block() == 1) return receive(a);
    store_all((KIE_GLOBAL u32*)a.data), load_junk(a), fence_device();
    if (thread() == 0) store_word(a.flag, 1);
}
KIE_DEVICE void store_far(const Args& a) {
    for (u32 i = 0; i < kEach; ++i) store_host(a.data + i * kThreads + thread(), 7u);
}
KIE_KERNEL(tell_old, kThreads, Args a) {
    if (grid_block() == 1) return receive(a);
    store_far(a), old_sync();
    if (thread() == 0) fence_system(), store_word_system(a.flag, 1);
}
KIE_KERNEL(tell, kThreads, Args a) {
    if (grid_block() == 1) return receive(a);
    store_far(a), sync_block();
    if (thread() == 0) fence_system(), store_word_system(a.flag, 1);
}
KIE_KERNEL(plain_flag, kThreads, Args a) {
    if (grid_block() == 1) return receive(a);
    store_all((KIE_GLOBAL u32*)a.data), fence_device();
    if (thread() == 0)
        __hip_atomic_store((KIE_GLOBAL u64*)a.flag, 1ull, __ATOMIC_RELAXED,
                           __HIP_MEMORY_SCOPE_WORKGROUP);
}
KIE_KERNEL(no_invalidate, kThreads, Args a) {
    if (grid_block() == 1) {
        u32 warm = 0;
        for (u32 i = 0; i < kEach; ++i) warm += a.data[i * kThreads + thread()];
        if (warm == 99) a.out[4000] = 1;
        await_flag(a);
        asm volatile("" ::: "memory");
        return fetch(a);
    }
    store_all((KIE_GLOBAL u32*)a.data), fence_device();
    if (thread() == 0) store_word(a.flag, 1);
}
KIE_KERNEL(no_wait, kThreads, Args a) {
    u32 v;
    const KIE_GLOBAL u32* p = (const KIE_GLOBAL u32*)a.junk + thread();
    asm volatile("global_load_dword %0, %1, off" : "=v"(v) : "v"(p) : "memory");
    a.out[thread()] = v + 1;
}
"#;
const ENTRIES: [&str; 7] =
    ["edge_old", "edge", "tell_old", "tell", "plain_flag", "no_invalidate", "no_wait"];
const NUMBERS: usize = 8 * 128;

fn source() -> Source {
    let text = join(Platform::Hip, ("litmus.h", TEXT));
    Source { defines: Vec::new(), text, entries: ENTRIES.to_vec() }
}

#[derive(Debug, PartialEq)]
enum Outcome {
    Fine,
    Stale,
    Hang,
    Fault(String),
}

/// One schedule of a kernel.
fn outcome(compiled: &Compiled, entry: &'static str, seed: u64) -> Outcome {
    let name = format!("gcn:seed={seed},blocks=2,chiplets=2,weak=1,steps=30000");
    let gcn = Gcn::open(&name).unwrap();
    let module = gcn.module(compiled, &ENTRIES).unwrap();
    let [data, flag, out, junk] = [0; 4].map(|_: u8| gcn.alloc(4 * NUMBERS + 64).unwrap());
    let args = [&data, &flag, &out, &junk].map(|memory| memory.address.to_le_bytes()).concat();
    let blocks = if entry == "no_wait" { 1 } else { 2 };
    let threads = if entry.starts_with("tell") { 128 } else { 64 };
    let launch = Launch { entry, blocks, threads, shared_bytes: 0, args: &args };
    let ended = wait_within(&mut *gcn.launch(&module, &launch).unwrap(), Duration::MAX);
    match ended {
        Ok(_) => {}
        Err(Error::Failed(why)) if why.contains("no end after") => return Outcome::Hang,
        Err(why) => return Outcome::Fault(why.to_string()),
    }
    let mut bytes = vec![0; 4 * NUMBERS];
    gcn.read(&out, 0, &mut bytes).unwrap();
    let all = (0..NUMBERS).filter(|at| at % 128 < threads as usize);
    let fresh = all.into_iter().all(|at| bytes[4 * at] == 7);
    if fresh {
        Outcome::Fine
    } else {
        Outcome::Stale
    }
}

/// How many of `seeds` schedules end so.
fn count(compiled: &Compiled, entry: &'static str, seeds: u64, how: &Outcome) -> u64 {
    (0..seeds).filter(|seed| outcome(compiled, entry, *seed) == *how).count() as u64
}

fn compiled() -> Option<Compiled> {
    super::compiled("litmus kernels", &source())
}

/// Schedules of each kernel; `LITMUS` asks for more.
fn seeds() -> u64 {
    std::env::var("LITMUS").map_or(40, |seeds| seeds.parse().unwrap())
}

#[test]
fn what_the_platform_promises_holds_in_every_schedule() {
    let Some(compiled) = compiled() else { return };
    for entry in ["edge", "tell"] {
        for seed in 0..seeds() {
            assert_eq!(outcome(&compiled, entry, seed), Outcome::Fine, "{entry} seed {seed}");
        }
    }
}

#[test]
fn what_compilers_drop_is_found() {
    let Some(compiled) = compiled() else { return };
    for entry in ["edge_old", "tell_old", "no_invalidate"] {
        let stale = count(&compiled, entry, seeds(), &Outcome::Stale);
        assert!(stale > seeds() / 10, "{entry}: {stale} of {}", seeds());
    }
    assert_eq!(count(&compiled, "plain_flag", 5, &Outcome::Hang), 5);
    let Outcome::Fault(why) = outcome(&compiled, "no_wait", 1) else { panic!("it went unnoticed") };
    assert!(why.contains("touches a register that it has not waited for"), "{why}");
}

/// The listing with the `n`th line that says `from` saying something else.
fn mutant(compiled: &Compiled, entry: &str, from: &str, to: &str) -> Compiled {
    let begin = compiled.listing.find(&format!("<{entry}>:")).unwrap();
    let at = begin + compiled.listing[begin..].find(from).unwrap();
    let mut listing = compiled.listing.clone();
    listing.replace_range(at..at + from.len(), to);
    Compiled { listing, ..compiled.clone() }
}

#[test]
fn mutants_of_the_machine_code_are_found() {
    let Some(compiled) = compiled() else { return };
    let flag = "global_store_dwordx2 v3, v[4:5], s[6:7] sc0 sc1";
    for (entry, from, to) in [
        ("edge", "buffer_wbl2 sc1", "s_nop 0"),
        ("tell", "s_waitcnt vmcnt(0)", "s_nop 0"),
        ("tell", flag, flag.strip_suffix(" sc1").unwrap()),
    ] {
        let mutant = mutant(&compiled, entry, from, to);
        let fine = count(&mutant, entry, seeds(), &Outcome::Fine);
        assert!(fine < seeds(), "{entry} with {to:?} for {from:?} goes unnoticed");
    }
}

#[test]
fn the_lint_finds_the_same() {
    let Some(compiled) = compiled() else { return };
    let faults = lint::check(&compiled.listing, Words::Device).unwrap();
    let of = |entry: &str| -> Vec<&String> {
        faults.iter().filter(|f| f.starts_with(&format!("{entry}:"))).collect()
    };
    for (entry, what) in [
        ("edge_old", "the write-back is not waited for"),
        ("tell_old", "met with stores on their way"),
        ("plain_flag", "a word that stays in a cache"),
    ] {
        assert!(of(entry).iter().any(|fault| fault.ends_with(what)), "{entry}: {faults:#?}");
    }
    assert!(of("edge").is_empty() && of("tell").is_empty(), "{faults:#?}");
}
