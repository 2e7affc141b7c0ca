// The platform contract in the simulator; kernels/cuda/platform.h says what each primitive
// promises, fibers.h how threads, waits, copies and time are made.
#pragma once

#include "fibers.h"

#define KIE_DEVICE inline
#define KIE_CONST_FN constexpr
#define KIE_KERNEL(name, threads, args)                                              \
    static void name##_body(const args);                                             \
    extern "C" __attribute__((visibility("default"))) const unsigned name##_threads; \
    const unsigned name##_threads = threads;                                         \
    extern "C" __attribute__((visibility("default"))) void name(const void* given) { \
        kie_sim::call(name##_body, given);                                           \
    }                                                                                \
    static void name##_body(const args)
#define KIE_SHARED_BYTES(name) unsigned char* const name = kie_sim::me->team->block->shared
#define KIE_UNROLL
#define KIE_NO_UNROLL

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 kWarp = KIE_SIM_WARP;
template <u32 kWarps, u32 kHelpers, u32 kKept>
KIE_DEVICE void be_helper() {}
template <u32 kWarps, u32 kHelpers, u32 kKept>
KIE_DEVICE void be_consumer() {}
struct alignas(16) Quad {
    u32 v[4];
};

namespace kie_sim {
template <class A>
void call(void (*body)(A), const void* args) {
    body(*(const A*)args);
}
inline void check_aligned(const void* p, u32 bytes, const char* at) {
    if ((u64)p % bytes) fail("%s: %p is not %u-byte aligned", at, p, bytes);
}
}  // namespace kie_sim

// Where.
KIE_DEVICE u32 opaque(u32 v) { return v; }
KIE_DEVICE u32 thread() { return kie_sim::me->thread; }
KIE_DEVICE u32 grid_block() {
    return kie_sim::me->team->block->index % kie_sim::machine.launch->blocks;
}
KIE_DEVICE u32 lane() { return kie_sim::me->index; }

// Meet. A value stands in one of two rows: nobody is two collectives ahead.
KIE_DEVICE void sync_block() { kie_sim::barrier(0, 0); }
template <u32 kThreads>
KIE_DEVICE void sync_consumers() {
    kie_sim::barrier(1, kThreads);
}
KIE_DEVICE void sync_warp() { kie_sim::meet(kie_sim::kSyncWarp); }
KIE_DEVICE void join_wave() { kie_sim::meet_wave(); }
// In a register of its own: GCC 12 drops the mask of `f = number(bits(f) & 0xffff0000)` from -O1
// on, where both are the same one.
KIE_DEVICE u32 bits(float f) {
    u32 v = __builtin_bit_cast(u32, f);
    asm("" : "+r"(v));
    return v;
}
KIE_DEVICE float number(u32 u) { return __builtin_bit_cast(float, u); }
KIE_UNSEEN KIE_DEVICE u32 shuffle_xor(u32 v, u32 mask) {
    const u32* row = kie_sim::offer_value(v);
    kie_sim::meet(kie_sim::kShuffleXor);
    return row[(lane() ^ mask) % kie_sim::kTeam];
}
KIE_DEVICE float shuffle_xor(float v, u32 mask) { return number(shuffle_xor(bits(v), mask)); }
KIE_UNSEEN KIE_DEVICE u32 shuffle(u32 v, u32 from) {
    const u32* row = kie_sim::offer_value(v);
    kie_sim::meet(kie_sim::kShuffle);
    return row[from % kie_sim::kTeam];
}
KIE_DEVICE float shuffle(float v, u32 from) { return number(shuffle(bits(v), from)); }
// A shuffle on CUDA: the whole warp has to come to it.
KIE_DEVICE u32 uniform(u32 v) { return shuffle(v, 0); }
KIE_DEVICE int count_ones(u32 v) { return __builtin_popcount(v); }
KIE_UNSEEN KIE_DEVICE u32 ballot(bool v) {
    u32* row = kie_sim::offer_value(v);
    kie_sim::meet(kie_sim::kBallot, [row](kie_sim::Team& t) KIE_UNSEEN {
        u32 all = 0;
        for (u32 i = 0; i < kie_sim::kTeam; ++i) all |= (t.arrived >> i & row[i]) << i;
        for (u32 i = 0; i < kie_sim::kTeam; ++i) row[i] = all;
    });
    return row[lane()];
}

// Words.
namespace kie_sim {
KIE_UNSEEN inline u64 take(const u64* p) {
    const u64 v = *(const volatile u64*)p;
    order_seen(p);
    if (kOrders && me->seqno && v >> 32 == me->seqno) order_took(p, me->seqno);
    return v;
}
KIE_UNSEEN inline u64 load(const u64* p, const char* at) {
    touch(p, kOwn, at);
    look(p, at);
    return take(p);
}
KIE_UNSEEN inline void load_pair(const u64* p, u64& a, u64& b, const char* at) {
    check_aligned(p, 16, at);
    touch(p, kOwn, at);
    look(p, at);
    a = take(p), b = take(p + 1);
}
KIE_UNSEEN inline void store(u64* p, u64 v, Reach reach, const char* at) {
    touch(p, reach, at);
    act();
    if (kOrders && me->seqno && v >> 32 == me->seqno) order_put(p, me->seqno, (u32)(*p >> 32));
    order_sent(p, me->fenced);
    *(volatile u64*)p = v;
    maybe_preempt(16);
}
}  // namespace kie_sim
#if defined(__SANITIZE_THREAD__)
// Volatile words are words, too. The compiler calls these before each access.
extern "C" KIE_UNSEEN void __tsan_volatile_read4(void* p) { kie_sim::order_seen(p); }
extern "C" KIE_UNSEEN void __tsan_volatile_write4(void* p) {
    kie_sim::order_sent(p, kie_sim::me->fenced);
}
extern "C" KIE_UNSEEN void __tsan_volatile_read8(void* p) { kie_sim::order_seen(p); }
extern "C" KIE_UNSEEN void __tsan_volatile_write8(void* p) {
    kie_sim::order_sent(p, kie_sim::me->fenced);
}
#endif
// What has this sequence number, this thread works at from here on.
KIE_UNSEEN KIE_DEVICE void works_at(u32 seqno) {
    kie_sim::me->seqno = seqno;
    kie_sim::me->without[0].count = kie_sim::me->without[1].count = 0;
}
KIE_UNSEEN KIE_DEVICE void reads_without(int which, const u8* at, u32 bytes, u32 stride,
                                         u32 count) {
    kie_sim::me->without[which] = {at, bytes, stride, count};
}
KIE_DEVICE u64 load_word(const u64* p) { return kie_sim::load(p, "load_word"); }
KIE_DEVICE void load_words(const u64* p, u64& a, u64& b) {
    kie_sim::load_pair(p, a, b, "load_words");
}
KIE_DEVICE void store_word(u64* p, u64 v) { kie_sim::store(p, v, kie_sim::kOwn, "store_word"); }
KIE_DEVICE void fence_device() {
    asm volatile("" ::: "memory");
    kie_sim::order_fence(kie_sim::me->fenced);
}

// Words of the host, which runs beside.
namespace kie_sim {
template <class T>
KIE_UNSEEN T load_shared_with_host(const T* p) {
    machine.host_seen = true;
    touch(p, kOwn, "load_host");
    look(p, "load_host");
    return __atomic_load_n(p, __ATOMIC_RELAXED);
}
template <class T>
KIE_UNSEEN void store_shared_with_host(T* p, T v) {
    touch(p, kOwn, "store_host");
    act();
    __atomic_store_n(p, v, __ATOMIC_RELAXED);
    maybe_preempt(4);
}
}  // namespace kie_sim
KIE_DEVICE u32 load_host(const u32* p) { return kie_sim::load_shared_with_host(p); }
KIE_DEVICE u64 load_host(const u64* p) { return kie_sim::load_shared_with_host(p); }
KIE_DEVICE void store_host(u32* p, u32 v) { kie_sim::store_shared_with_host(p, v); }
KIE_DEVICE void store_host(u64* p, u64 v) { kie_sim::store_shared_with_host(p, v); }
// Words of other devices: virtual ones, whose blocks are fibers of the same launch. The two words
// of a pair arrive one after the other, in either order.
KIE_DEVICE u64 load_word_system(const u64* p) { return kie_sim::load(p, "load_word_system"); }
KIE_DEVICE void load_words_system(const u64* p, u64& a, u64& b) {
    kie_sim::load_pair(p, a, b, "load_words_system");
}
KIE_DEVICE void store_word_system(u64* p, u64 v) {
    kie_sim::store(p, v, kie_sim::kPeers, "store_word_system");
}
KIE_DEVICE void store_words_system(u64* p, u64 a, u64 b) {
    kie_sim::check_aligned(p, 16, "store_words_system");
    const u32 first = kie_sim::draw_below(2);
    store_word_system(p + first, first ? b : a), store_word_system(p + 1 - first, first ? a : b);
}
KIE_DEVICE void fence_system() {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    kie_sim::order_fence(kie_sim::me->fenced);
}

KIE_UNSEEN KIE_DEVICE void add_shared(u32* p, u32 v) { *p += v; }
KIE_UNSEEN KIE_DEVICE void add_shared(u64* p, u64 v) { *p += v; }

KIE_UNSEEN KIE_DEVICE Quad load_state(const void* p) {
    kie_sim::check_aligned(p, 16, "load_state");
    kie_sim::touch(p, kie_sim::kOwn, "load_state");
    kie_sim::order_read(p, 16, kie_sim::me->without);
    return *(const Quad*)p;
}
KIE_DEVICE void store_state(void* p, Quad q) {
    kie_sim::check_aligned(p, 16, "store_state");
    kie_sim::touch(p, kie_sim::kPeers, "store_state");
    *(Quad*)p = q;
}
KIE_DEVICE void store_alike(u32* p, u32 v) {
    kie_sim::touch(p, kie_sim::kOwn, "store_alike");
    __atomic_store_n(p, v, __ATOMIC_RELAXED);
}
KIE_DEVICE void store_alike(u64* p, u64 v) {
    kie_sim::touch(p, kie_sim::kOwn, "store_alike");
    __atomic_store_n(p, v, __ATOMIC_RELAXED);
}
KIE_DEVICE void prefetch(const void*) {}

// Stream.
struct Slot {
    u64 full, empty;
};
// Warps of 32 copy as CUDA's engines do, asked by one thread; of wider ones a team does.
constexpr u32 kCopyThreads = kWarp == 32 ? 1 : 32;
KIE_CONST_FN bool looks_ahead(bool small) { return small || kCopyThreads > 1; }
KIE_DEVICE bool is_leader() { return kCopyThreads == 1 || lane() == 0; }
KIE_DEVICE u32 from_leader(u32 v) {
    if (kCopyThreads == 1) return v;
    sync_warp();
    return shuffle(v, 0);
}
KIE_UNSEEN KIE_DEVICE void slot_init(Slot* s, u32 warps, u32 fillers = kCopyThreads) {
    s->full = fillers << 16 | fillers, s->empty = warps << 16 | warps;
}
KIE_DEVICE void slots_ready() { asm volatile("" ::: "memory"); }
KIE_UNSEEN KIE_DEVICE bool barrier_passed_yet(const u64* b, u32 parity) {
    if (!kie_sim::passed(b, parity)) return false;
    kie_sim::order_acquire(b);
    return true;
}
KIE_UNSEEN KIE_DEVICE bool barrier_passed(const u64* b, u32 parity, const char* at) {
    if (!kie_sim::passed(b, parity)) kie_sim::wait(at);
    return barrier_passed_yet(b, parity);
}
KIE_DEVICE bool slot_filled(const Slot* s, u32 parity) {
    return barrier_passed(&s->full, parity, "slot_filled");
}
KIE_DEVICE bool slot_free(const Slot* s, u32 parity) {
    return barrier_passed(&s->empty, parity, "slot_free");
}
KIE_DEVICE bool slot_passed(const Slot* s, bool filled, u32 parity) {
    return barrier_passed_yet(filled ? &s->full : &s->empty, parity);
}
KIE_DEVICE void slot_release(Slot* s) {
    kie_sim::act();
    kie_sim::order_release(&s->empty);
    kie_sim::arrive(&s->empty);
    kie_sim::maybe_preempt(4);
}
KIE_DEVICE void reads_before_copy() { asm volatile("" ::: "memory"); }
constexpr bool kCopiesState = true;
KIE_DEVICE void state_before_copy() { asm volatile("" ::: "memory"); }
template <class T>
KIE_DEVICE T load_constant(const T* p) {
    return *p;
}
template <class T>
KIE_DEVICE T look(const volatile T* p) {
    return *p;
}
struct StreamPolicy {};
KIE_DEVICE StreamPolicy stream_policy() { return {}; }
struct Copies {};
KIE_DEVICE Copies copies_into(Slot*, u32) { return {}; }
KIE_DEVICE void copies_go_on(Copies&) {}
KIE_DEVICE void copy_begins(Slot*, u32, u32) {}
KIE_DEVICE void copy_ends(Slot* s) { kie_sim::arrive_behind(&s->full); }
KIE_DEVICE void copy_part(Slot* s, void* to, const void* from, u32 bytes, Copies&) {
    const u32 each = (bytes / 16 + kCopyThreads - 1) / kCopyThreads * 16;
    const u32 begin = lane() * each < bytes ? lane() * each : bytes;
    const u32 end = begin + each < bytes ? begin + each : bytes;
    kie_sim::copy(&s->full, (u8*)to + begin, (const u8*)from + begin, end - begin, false);
}
KIE_DEVICE void copy_async(Slot* s, void* to, const void* from, u32 bytes, Copies& copies) {
    if (kCopyThreads == 1) return kie_sim::copy(&s->full, to, from, bytes);
    copy_begins(s, 1, bytes), copy_part(s, to, from, bytes, copies), copy_ends(s);
}

// Time.
KIE_DEVICE void pause_ns(u32) { kie_sim::wait("pause_ns"); }
KIE_UNSEEN KIE_DEVICE u64 clock_ns() { return ++kie_sim::machine.now; }
KIE_DEVICE u64 clock_ticks() { return clock_ns() * kie_sim::kTicksPerNs; }

// Numbers. Halves are rounded to nearest, ties to even.
KIE_DEVICE u32 half_of(float f) {
#if defined(__F16C__)
    typedef float Floats __attribute__((vector_size(16)));
    typedef u16 Halves __attribute__((vector_size(16)));
    Halves h;
    asm("vcvtps2ph $0, %1, %0" : "=x"(h) : "x"(Floats{f, 0, 0, 0}));
    return h[0];
#else
    const u32 u = bits(f), sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000) return sign | 0x7e00 | (a >> 13 & 0x1ff);
    if (a >= 0x47800000) return sign | 0x7c00;
    // Added to a number of a fixed exponent, a subnormal's mantissa is rounded in place.
    if (a < 0x38800000) return sign | (bits(number(a) + 0.5f) - bits(0.5f));
    return sign | ((a - 0x38000000 + 0xfff + (a >> 13 & 1)) >> 13);
#endif
}
KIE_DEVICE float float_of(u32 h) {
#if defined(__F16C__)
    typedef float Floats __attribute__((vector_size(16)));
    typedef u16 Halves __attribute__((vector_size(16)));
    Floats f;
    asm("vcvtph2ps %1, %0" : "=x"(f) : "x"(Halves{(u16)h, 0, 0, 0, 0, 0, 0, 0}));
    return f[0];
#else
    const u32 sign = (h & 0x8000) << 16, a = h & 0x7fff;
    if (a >= 0x7c00) return number(sign | 0x7f800000 | (a & 0x3ff) << 13 | (a > 0x7c00) << 22);
    if (a < 0x400) return number(sign | bits((float)a * 5.9604645e-8f));
    return number(sign | ((a << 13) + 0x38000000));
#endif
}
KIE_DEVICE u32 pack_half2(float a, float b) { return half_of(b) << 16 | half_of(a); }
KIE_DEVICE void unpack_half2(u32 h, float& a, float& b) {
    a = float_of(h & 0xffff), b = float_of(h >> 16);
}
KIE_DEVICE float exp2_f(float x) { return __builtin_exp2f(x); }
KIE_DEVICE float log2_f(float x) { return __builtin_log2f(x); }
KIE_DEVICE float reciprocal_f(float x) { return 1.0f / x; }
KIE_DEVICE float rsqrt_f(float x) { return 1.0f / __builtin_sqrtf(x); }
KIE_DEVICE float min_f(float a, float b) { return __builtin_fminf(a, b); }
KIE_DEVICE float max_f(float a, float b) { return __builtin_fmaxf(a, b); }
// Rounded in between: processors without the instruction take long for it.
KIE_DEVICE float fma_f(float a, float b, float c) { return a * b + c; }
