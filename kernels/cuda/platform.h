// The platform contract on CUDA: every primitive that kernels/common uses, nothing else. No header
// of a toolkit, so that a run-time compiler takes it as it is. A second platform implements the
// same names with the same meaning; what each one promises is said here, once.
#pragma once

#define KIE_DEVICE __device__ __forceinline__
#define KIE_CONST_FN __host__ __device__ constexpr
#define KIE_KERNEL(name, threads, args) \
    extern "C" __global__ void __launch_bounds__(threads, 1) name(const __grid_constant__ args)
#define KIE_SHARED_BYTES(name) extern __shared__ __align__(1024) unsigned char name[]
#define KIE_UNROLL _Pragma("unroll")
#define KIE_NO_UNROLL _Pragma("unroll 1")

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 kWarp = 32;  // the machine's; work is cut into teams of 32 threads on all of them
// Each in its branch for good, all warps of it: helpers give registers away, so that `kKept` are
// left, and consumers take them. A thread of a launch has as many as all its threads can have
// alike, a multiple of eight. Only whole groups of four warps may pass registers on: fewer helpers
// stand where nothing can be passed on.
template <u32 kWarps, u32 kHelpers, u32 kKept>
KIE_CONST_FN u32 consumer_registers() {
    constexpr u32 kAll = kWarps + kHelpers, kAlike = 65536 / (32 * kAll) / 8 * 8;
    return (kAlike * kAll - kKept * kHelpers) / kWarps / 8 * 8;
}
template <u32 kWarps, u32 kHelpers, u32 kKept>
KIE_DEVICE void be_helper() {
    static_assert(kWarps % 4 == 0, "groups of four");
    if constexpr (kHelpers == 4) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kKept));
}
template <u32 kWarps, u32 kHelpers, u32 kKept>
KIE_DEVICE void be_consumer() {
    if constexpr (kHelpers == 4)
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(
            consumer_registers<kWarps, kHelpers, kKept>()));
}
struct alignas(16) Quad {
    u32 v[4];
};

// Where. Each call is opaque to the optimiser: what is derived from it is computed where it is
// used, instead of being kept in registers over all layers (which made the kernel spill).
KIE_DEVICE u32 opaque(u32 v) {
    asm volatile("" : "+r"(v));
    return v;
}
KIE_DEVICE u32 thread() { return opaque(threadIdx.x); }
KIE_DEVICE u32 grid_block() { return blockIdx.x; }
KIE_DEVICE u32 lane() { return opaque(threadIdx.x) % kWarp; }

// Meet. A barrier orders all memory of the block among those who meet.
KIE_DEVICE void sync_block() { __syncthreads(); }
template <u32 kThreads>
KIE_DEVICE void sync_consumers() {
    asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}
KIE_DEVICE void sync_warp() { __syncwarp(); }
// The teams of a machine's warp come together again behind a branch that not all of them took: what
// one of them waits for next may be what another has done there. Here a warp is one team.
KIE_DEVICE void join_wave() {}
KIE_DEVICE float shuffle_xor(float v, u32 mask) { return __shfl_xor_sync(~0u, v, mask); }
KIE_DEVICE u32 shuffle_xor(u32 v, u32 mask) { return __shfl_xor_sync(~0u, v, mask); }
KIE_DEVICE float shuffle(float v, u32 from) { return __shfl_sync(~0u, v, from); }
KIE_DEVICE u32 shuffle(u32 v, u32 from) { return __shfl_sync(~0u, v, from); }
// What all threads of the warp have alike, so that the compiler knows: branches by it need no
// meeting behind them.
KIE_DEVICE u32 uniform(u32 v) { return __shfl_sync(~0u, v, 0); }

// Words: 8 bytes, single-copy atomic, visible to every block of the device (of all devices that run
// the model together), no ordering of others.
#if KIE_RANKS > 1
#define KIE_WORD_SCOPE "sys"
#else
#define KIE_WORD_SCOPE "gpu"
#endif
KIE_DEVICE u64 load_word(const u64* p) {
    u64 v;
    asm volatile("ld.relaxed." KIE_WORD_SCOPE ".global.u64 %0, [%1];"
                 : "=l"(v)
                 : "l"(p)
                 : "memory");
    return v;
}
// Two neighbouring words (16-byte aligned), each atomic by itself.
KIE_DEVICE void load_words(const u64* p, u64& a, u64& b) {
    asm volatile("ld.relaxed." KIE_WORD_SCOPE ".global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(a), "=l"(b)
                 : "l"(p)
                 : "memory");
}
KIE_DEVICE void store_word(u64* p, u64 v) {
    asm volatile("st.relaxed." KIE_WORD_SCOPE ".global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
// For who watches the order of accesses, and nothing here. What has this sequence number, the
// thread works at from here on. It reads states without `count` times `bytes` bytes, `stride`
// apart, which may change meanwhile, since it has from elsewhere what should be there; one of two
// such sets (0, 1).
KIE_DEVICE void works_at(u32) {}
KIE_DEVICE void reads_without(int, const u8*, u32, u32, u32) {}
// Release and acquire at device scope, cumulative with barriers.
KIE_DEVICE void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Words of host memory: complete in themselves, no ordering of others.
KIE_DEVICE u32 load_host(const u32* p) {
    u32 v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
KIE_DEVICE u64 load_host(const u64* p) {
    u64 v;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
KIE_DEVICE void store_host(u32* p, u32 v) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
KIE_DEVICE void store_host(u64* p, u64 v) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
// Release and acquire among the device and the host.
KIE_DEVICE void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
// Words that other devices of the host store into: as load_word and its kin, at system scope. They
// are stored wherever a peer's memory is mapped and polled only in the device's own memory.
KIE_DEVICE u64 load_word_system(const u64* p) { return load_host(p); }
KIE_DEVICE void load_words_system(const u64* p, u64& a, u64& b) {
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(a), "=l"(b)
                 : "l"(p)
                 : "memory");
}
KIE_DEVICE void store_word_system(u64* p, u64 v) { store_host(p, v); }
KIE_DEVICE void store_words_system(u64* p, u64 a, u64 b) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(a), "l"(b)
                 : "memory");
}
// Adds to a word of the block's shared memory.
KIE_DEVICE void add_shared(u32* p, u32 v) { atomicAdd_block(p, v); }
KIE_DEVICE void add_shared(u64* p, u64 v) { atomicAdd_block(p, v); }
KIE_DEVICE u32 ballot(bool v) { return __ballot_sync(~0u, v); }
KIE_DEVICE int count_ones(u32 v) { return __popc(v); }
// The largest number of a team, where there is an instruction for it (ops/route.h).
#define KIE_MAX_TEAM
KIE_DEVICE u32 max_team(u32 v) { return __reduce_max_sync(~0u, v); }

// 16 bytes that an earlier step wrote (keys, values): never from a cache that is not coherent.
KIE_DEVICE Quad load_state(const void* p) {
    Quad q;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(q.v[0]), "=r"(q.v[1]), "=r"(q.v[2]), "=r"(q.v[3])
                 : "l"(p)
                 : "memory");
    return q;
}
// 16 bytes for later steps, made visible by the step's edge.
KIE_DEVICE void store_state(void* p, Quad q) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(q.v[0]), "r"(q.v[1]),
                 "r"(q.v[2]), "r"(q.v[3])
                 : "memory");
}
// 4 or 8 bytes for later steps. Several blocks may store them at once, all the same bits; until the
// step's edge whoever reads them stands behind a barrier with a store of its own block.
KIE_DEVICE void store_alike(u32* p, u32 v) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
KIE_DEVICE void store_alike(u64* p, u64 v) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
// A hint: these 128 bytes will be read soon.
KIE_DEVICE void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Stream: a slot is filled when `fillers` threads have brought their share, as those of one copy
// into the ring do, and released by `warps` warps. A copy is asked for by `kCopyThreads` threads at
// once: by one where it goes by an engine of its own (9.0 and later), else by a warp, of which each
// thread copies its share. `is_leader`: who of them looks at slots and words. `from_leader`: what
// that one has, and what it did before is known to the others. `looks_ahead`: whether the time of
// looks counts, so that several are to be on their way together (ring.h): a warp's always does, a
// thread's where stages are `small`.
struct Slot {
    u64 full, empty;
};
#if __CUDA_ARCH__ >= 900
constexpr u32 kCopyThreads = 1;
KIE_CONST_FN bool looks_ahead(bool small) { return small; }
KIE_DEVICE bool is_leader() { return true; }
KIE_DEVICE u32 from_leader(u32 v) { return v; }
#else
constexpr u32 kCopyThreads = kWarp;
KIE_CONST_FN bool looks_ahead(bool) { return true; }
KIE_DEVICE bool is_leader() { return lane() == 0; }
KIE_DEVICE u32 from_leader(u32 v) {
    __syncwarp();
    return shuffle(v, 0);
}
#endif
KIE_DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
KIE_DEVICE void slot_init(Slot* s, u32 warps, u32 fillers = kCopyThreads) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&s->full)),
                 "r"(fillers)
                 : "memory");
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&s->empty)),
                 "r"(warps)
                 : "memory");
}
#if __CUDA_ARCH__ >= 900
#define KIE_BARRIER_PASSED "mbarrier.try_wait.parity.shared::cta.b64"
KIE_DEVICE void slots_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
KIE_DEVICE void slot_release(Slot* s) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&s->empty))
                 : "memory");
}
// Between a passed `slot_free` and the copy into that slot. Bulk copies write shared memory by a
// path of their own (the async proxy): the barrier alone does not order the consumers' reads first.
KIE_DEVICE void reads_before_copy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// The same, and before a copy of bytes of global memory that this block's threads stored before
// they released a slot whose `slot_free` has passed.
constexpr bool kCopiesState = true;  // whether copies may read such bytes at all
KIE_DEVICE void state_before_copy() { asm volatile("fence.proxy.async;" ::: "memory"); }
#else
#define KIE_BARRIER_PASSED "mbarrier.test_wait.parity.shared.b64"
KIE_DEVICE void slots_ready() {}
KIE_DEVICE void slot_release(Slot* s) {
    asm volatile("{\n .reg .b64 state;\n mbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(
                     shared_address(&s->empty))
                 : "memory");
}
// These copies are reads and writes of the threads that ask for them.
KIE_DEVICE void reads_before_copy() {}
constexpr bool kCopiesState = true;
KIE_DEVICE void state_before_copy() { fence_device(); }
#endif
#define KIE_LOOK_AT_BARRIER(name, look)                                                     \
    KIE_DEVICE bool name(const u64* b, u32 parity) {                                        \
        u32 ok;                                                                             \
        asm volatile("{\n .reg .pred p;\n " look " p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}" \
                     : "=r"(ok)                                                             \
                     : "r"(shared_address(b)), "r"(parity)                                  \
                     : "memory");                                                           \
        return ok != 0;                                                                     \
    }
KIE_LOOK_AT_BARRIER(barrier_passed, KIE_BARRIER_PASSED)
KIE_LOOK_AT_BARRIER(barrier_passed_yet, "mbarrier.test_wait.parity.shared.b64")  // without a wait
KIE_DEVICE bool slot_filled(const Slot* s, u32 parity) { return barrier_passed(&s->full, parity); }
KIE_DEVICE bool slot_free(const Slot* s, u32 parity) { return barrier_passed(&s->empty, parity); }
// Whether it is filled, or else free: a look beside other work, of no wait.
KIE_DEVICE bool slot_passed(const Slot* s, bool filled, u32 parity) {
    return barrier_passed_yet(filled ? &s->full : &s->empty, parity);
}
// What nobody writes while the kernel runs, by an address that all who copy have alike; and a word
// of shared memory that others of the block may write.
template <class T>
KIE_DEVICE T load_constant(const T* p) {
    return *p;
}
template <class T>
KIE_DEVICE T look(const volatile T* p) {
    return *p;
}
// Bytes that are read once and by one block: evicted first.
struct StreamPolicy {
    u64 v;
};
KIE_DEVICE StreamPolicy stream_policy() {
    StreamPolicy p;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p.v));
    return p;
}
// Copies on their way into slots, which come in turn. Where copies do not count themselves,
// `copies_go_on` waits for some of the oldest: whoever copies calls it in each loop that waits.
// A slot is filled by parts of equal sizes, between copy_begins, which says how many and of how
// many bytes each, and copy_ends.
struct Copies {};
KIE_DEVICE Copies copies_into(Slot*, u32) { return {}; }
KIE_DEVICE void copies_go_on(Copies&) {}
#if __CUDA_ARCH__ >= 900
KIE_DEVICE void copy_begins(Slot* s, u32 parts, u32 bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&s->full)),
        "r"(parts * bytes)
        : "memory");
}
KIE_DEVICE void copy_part(Slot* s, void* to, const void* from, u32 bytes, Copies&) {
    const StreamPolicy policy = stream_policy();
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(&s->full)), "l"(policy.v)
        : "memory");
}
KIE_DEVICE void copy_ends(Slot*) {}
#else
// So many pieces of 512 bytes, one an instruction. Their addresses differ by constants, since a
// piece whose address is computed takes twice as long.
constexpr u32 kPieceBytes = 16 * kWarp;
template <u32 kCount>
KIE_DEVICE void copy_pieces(u32 to, const u8* from, StreamPolicy policy) {
    if constexpr (kCount > 1) copy_pieces<kCount - 1>(to, from, policy);
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0+%3], [%1+%3], 16, %2;" ::"r"(to),
                 "l"(from), "l"(policy.v), "n"((kCount - 1) * kPieceBytes)
                 : "memory");
}
KIE_DEVICE void copy_begins(Slot*, u32, u32) {}
KIE_DEVICE void copy_part(Slot*, void* to, const void* from, u32 bytes, Copies&) {
    const StreamPolicy policy = stream_policy();
    const u8* source = (const u8*)from + 16 * lane();
    u32 target = shared_address(to) + 16 * lane(), left = bytes;
#pragma unroll 1
    for (; left >= 8 * kPieceBytes; left -= 8 * kPieceBytes) {
        copy_pieces<8>(target, source, policy);
        target += 8 * kPieceBytes, source += 8 * kPieceBytes;
    }
    if (left >= 4 * kPieceBytes) {
        copy_pieces<4>(target, source, policy);
        target += 4 * kPieceBytes, source += 4 * kPieceBytes, left -= 4 * kPieceBytes;
    }
#pragma unroll 1
    for (u32 at = 16 * lane(); at < left; at += kPieceBytes) {
        copy_pieces<1>(target, source, policy);
        target += kPieceBytes, source += kPieceBytes;
    }
}
// Arrives once what this thread asked for so far is there.
KIE_DEVICE void copy_ends(Slot* s) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&s->full))
                 : "memory");
}
#endif
KIE_DEVICE void copy_async(Slot* s, void* to, const void* from, u32 bytes, Copies& copies) {
    copy_begins(s, 1, bytes), copy_part(s, to, from, bytes, copies), copy_ends(s);
}

// Time.
KIE_DEVICE void pause_ns(u32 ns) { __nanosleep(ns); }
KIE_DEVICE u64 clock_ns() {
    u64 v;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v));
    return v;
}
KIE_DEVICE u64 clock_ticks() { return clock64(); }

// Numbers. Two halves travel in a u32, the first in the low 16 bits.
KIE_DEVICE u32 pack_half2(float a, float b) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(r) : "f"(a), "f"(b));
    return r;
}
// Of each half, rounded once.
#define KIE_MULTIPLY_HALVES
KIE_DEVICE u32 multiply_halves(u32 a, u32 b) {
    u32 v;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
}
KIE_DEVICE void unpack_half2(u32 h, float& a, float& b) {
    asm("{\n .reg .b16 x, y;\n mov.b32 {x, y}, %2;\n cvt.f32.f16 %0, x;\n cvt.f32.f16 %1, y;\n}"
        : "=f"(a), "=f"(b)
        : "r"(h));
}
#define KIE_FMA_HALF2
KIE_DEVICE u32 fma_half2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
#define KIE_AND_XOR
// (v & mask) ^ flip in one instruction. Of two constants the compiler makes two instructions, on
// the unit that bounds products of 4-bit weights: integers have 16 lanes a scheduler.
KIE_DEVICE u32 and_xor(u32 v, u32 mask, u32 flip) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(d) : "r"(v), "r"(mask), "r"(flip));
    return d;
}
// Four e4m3 codes: the lower two as halves, then the upper two. Where there is no instruction for
// it, ops/decode_fp8.h has it of others.
#if __CUDA_ARCH__ >= 890
#define KIE_UNPACK_F8
KIE_DEVICE void unpack_f8(u32 codes, u32& low, u32& high) {
    asm("{\n .reg .b16 x, y;\n mov.b32 {x, y}, %2;\n cvt.rn.f16x2.e4m3x2 %0, x;\n"
        " cvt.rn.f16x2.e4m3x2 %1, y;\n}"
        : "=r"(low), "=r"(high)
        : "r"(codes));
}
#endif
KIE_DEVICE u32 bits(float f) { return __float_as_uint(f); }
KIE_DEVICE float number(u32 u) { return __uint_as_float(u); }
KIE_DEVICE float exp2_f(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
KIE_DEVICE float log2_f(float x) {
    float r;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
// Within 1 ulp of 1 / x for normal x.
KIE_DEVICE float reciprocal_f(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
KIE_DEVICE float rsqrt_f(float x) { return rsqrtf(x); }
KIE_DEVICE float min_f(float a, float b) { return fminf(a, b); }
KIE_DEVICE float max_f(float a, float b) { return fmaxf(a, b); }
// a * b + c. Where a compiler may round in between or not, sums of several columns and of one would
// differ.
KIE_DEVICE float fma_f(float a, float b, float c) { return __fmaf_rn(a, b, c); }
