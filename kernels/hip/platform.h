// The platform contract (cuda/platform.h says what each primitive promises) on AMD gfx9 and gfx942,
// by clang's builtins alone: no includes, so that plain clang and a run-time compiler take it.
//
// Invariants:
// - A wave has 64 lanes and holds two teams. The lanes of a wave that meet a branch differently run
//   one side after the other, so a team must never wait for what the other team of its wave does
//   later in the program. kernels/common waits only for words and stages asked for earlier.
// - Threads with work of their own (the producer, the host's watcher) each have a wave: see kWarp.
// - There is no bulk-copy engine here: the producer's whole wave loads past registers into shared
//   memory, and whoever asked for a copy has to look after it (`copies_go_on`).
#pragma once

#define KIE_DEVICE __attribute__((device)) __attribute__((always_inline)) inline
#ifdef KIE_PREFILL  // a call would want memory of a thread's own
#define KIE_CONST_FN \
    __attribute__((host)) __attribute__((device)) __attribute__((always_inline)) constexpr
#else
#define KIE_CONST_FN __attribute__((host)) __attribute__((device)) constexpr
#endif
#define KIE_KERNEL(name, threads, args)                             \
    extern "C" __attribute__((global))                              \
    __attribute__((amdgpu_flat_work_group_size(1, (threads)))) void \
    name(const args)
#define KIE_SHARED_BYTES(name) \
    extern __attribute__((shared)) __attribute__((aligned(16))) unsigned char name[]
#define KIE_UNROLL _Pragma("unroll")
#define KIE_NO_UNROLL _Pragma("unroll 1")

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 kWarp = 64, kTeamLanes = 32;
template <u32 kWarps, u32 kHelpers, u32 kKept>
KIE_DEVICE void be_helper() {}
template <u32 kWarps, u32 kHelpers, u32 kKept>
KIE_DEVICE void be_consumer() {}
struct alignas(16) Quad {
    u32 v[4];
#ifdef KIE_PREFILL
    // Word by word: what is copied as a whole stays in memory of a thread's own.
    KIE_DEVICE Quad& operator=(const Quad& from) {
        KIE_UNROLL for (int i = 0; i < 4; ++i) v[i] = from.v[i];
        return *this;
    }
#endif
};

// Memory by where it lies: a pointer that may be anything costs both counters of every wait.
#define KIE_GLOBAL __attribute__((address_space(1)))
#define KIE_LOCAL __attribute__((address_space(3)))
#define KIE_CONSTANT __attribute__((address_space(4)))
typedef u32 __attribute__((may_alias)) AnyWord;

// Where.
KIE_DEVICE u32 opaque(u32 v) {
    asm volatile("" : "+v"(v));
    return v;
}
#ifdef KIE_PREFILL
// The prefill kernel numbers a wave's threads for the matrix unit, whose rows are the lowest four
// bits of a lane: thread 4 g + t of team h is lane 16 t + 8 h + g (see wide.h).
KIE_CONST_FN u32 number_of(u32 lane) { return lane % 16 * 4 + lane / 16; }
KIE_CONST_FN u32 lane_of(u32 number) { return number % 4 * 16 + number / 4; }
KIE_DEVICE u32 thread() {
    const u32 at = __builtin_amdgcn_workitem_id_x();
    return opaque(at / kWarp * kWarp + number_of(at % kWarp));
}
#else
KIE_CONST_FN u32 number_of(u32 lane) { return lane; }
KIE_CONST_FN u32 lane_of(u32 number) { return number; }
KIE_DEVICE u32 thread() { return opaque(__builtin_amdgcn_workitem_id_x()); }
#endif
KIE_DEVICE u32 grid_block() { return __builtin_amdgcn_workgroup_id_x(); }
KIE_DEVICE u32 lane() { return thread() % kTeamLanes; }
#ifdef KIE_PREFILL  // as thread(): what follows from it is not kept through all phases
KIE_DEVICE u32 wave_lane() { return opaque(__builtin_amdgcn_workitem_id_x()) % kWarp; }
#else
KIE_DEVICE u32 wave_lane() {
    return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0));
}
#endif

// What is the same in all lanes, as a scalar.
KIE_DEVICE u32 alike(u32 v) { return (u32)__builtin_amdgcn_readfirstlane((int)v); }

// Until all that this wave asked of memory is done. Written out, so that no pass of a compiler
// takes it for idle.
KIE_DEVICE void await_memory() { asm volatile("s_waitcnt vmcnt(0)" ::: "memory"); }

// Meet.
// Whoever of the block fences and tells others behind it speaks for all its waves, but waits for
// its own stores only: a workgroup's release waits for none on gfx942 (all compilers up to clang
// 23; LLVM closed the same hole for gfx10 in llvm#161638). So each wave waits here.
KIE_DEVICE void sync_block() {
    await_memory();
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
// The hardware's barrier counts every wave of the block, the producer's too, so consumers meet on a
// counter of their own: the last to arrive starts the next turn. It orders shared memory and what
// the block itself reads again; what other blocks read behind it are words, which need no such
// order.
struct Meeting {
    u32 arrived, turn;
};
static __attribute__((shared)) Meeting meeting;
template <u32 kThreads>
KIE_DEVICE void sync_consumers() {
    static_assert(kThreads % kWarp == 0, "consumers share no wave with others");
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_wave_barrier();
    if (wave_lane() == 0) {
        const u32 turn =
            __hip_atomic_load(&meeting.turn, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
        const u32 before = __hip_atomic_fetch_add(&meeting.arrived, 1u, __ATOMIC_ACQ_REL,
                                                  __HIP_MEMORY_SCOPE_WORKGROUP);
        if (before == kThreads / kWarp - 1) {
            __hip_atomic_store(&meeting.arrived, 0u, __ATOMIC_RELAXED,
                               __HIP_MEMORY_SCOPE_WORKGROUP);
            __hip_atomic_store(&meeting.turn, turn + 1, __ATOMIC_RELEASE,
                               __HIP_MEMORY_SCOPE_WORKGROUP);
        } else {
            while (__hip_atomic_load(&meeting.turn, __ATOMIC_ACQUIRE,
                                     __HIP_MEMORY_SCOPE_WORKGROUP) == turn) {
            }
        }
    }
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
// Lanes of a wave run in step and its accesses keep their order; the compiler has to keep it too.
KIE_DEVICE void sync_warp() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}

// Not to be moved into a branch, so the wave is whole here.
KIE_DEVICE void join_wave() { __builtin_amdgcn_wave_barrier(); }

// Between the lanes of a team. The swizzle works on 32 lanes at a time, which is the team, unless
// threads are numbered otherwise.
KIE_DEVICE u32 shuffle(u32 v, u32 from) {
    const u32 lane_of_wave = (wave_lane() & lane_of(kTeamLanes)) | lane_of(from % kTeamLanes);
    return (u32)__builtin_amdgcn_ds_bpermute((int)(lane_of_wave * 4), (int)v);
}
template <u32 kMask>
KIE_DEVICE u32 swizzle_xor(u32 v) {
    constexpr u32 kLanes = lane_of(kMask);
    if constexpr (kLanes < 32)
        return (u32)__builtin_amdgcn_ds_swizzle((int)v, kLanes << 10 | 0x1f);
    else
        return (u32)__builtin_amdgcn_ds_bpermute((int)((wave_lane() ^ kLanes) * 4), (int)v);
}
KIE_DEVICE u32 shuffle_xor(u32 v, u32 mask) {
    switch (mask) {
        case 1:
            return swizzle_xor<1>(v);
        case 2:
            return swizzle_xor<2>(v);
        case 4:
            return swizzle_xor<4>(v);
        case 8:
            return swizzle_xor<8>(v);
        case 16:
            return swizzle_xor<16>(v);
        default:
            return shuffle(v, number_of(wave_lane()) ^ mask);
    }
}
KIE_DEVICE u32 bits(float f) { return __builtin_bit_cast(u32, f); }
KIE_DEVICE float number(u32 u) { return __builtin_bit_cast(float, u); }
KIE_DEVICE float shuffle(float v, u32 from) { return number(shuffle(bits(v), from)); }
KIE_DEVICE u32 uniform(u32 v) { return v; }  // of a team: a wave may have two
KIE_DEVICE float shuffle_xor(float v, u32 mask) { return number(shuffle_xor(bits(v), mask)); }
// Adds to a word of the block's shared memory.
KIE_DEVICE void add_shared(u32* p, u32 v) {
    __hip_atomic_fetch_add((KIE_LOCAL u32*)p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}
KIE_DEVICE void add_shared(u64* p, u64 v) {
    __hip_atomic_fetch_add((KIE_LOCAL u64*)p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}
KIE_DEVICE int count_ones(u32 v) { return __builtin_popcount(v); }
// One bit a lane of the team.
KIE_DEVICE u32 ballot(bool yes) {
    const u64 all = __builtin_amdgcn_ballot_w64(yes);
#ifdef KIE_PREFILL
    u32 mine = 0;
    KIE_UNROLL for (u32 t = 0; t < 4; ++t) {  // its eight of each sixteen, four apart
        u32 bits = (u32)(all >> (16 * t + (wave_lane() & 8))) & 0xff;
        bits = (bits | bits << 12) & 0x000f000f;
        bits = (bits | bits << 6) & 0x03030303;
        bits = (bits | bits << 3) & 0x11111111;
        mine |= bits << t;
    }
    return mine;
#else
    return (u32)(all >> (wave_lane() & kTeamLanes));
#endif
}

// Words.
#if KIE_RANKS > 1
#define KIE_WORD_SCOPE __HIP_MEMORY_SCOPE_SYSTEM
#else
#define KIE_WORD_SCOPE __HIP_MEMORY_SCOPE_AGENT
#endif
KIE_DEVICE u64 load_word(const u64* p) {
    return __hip_atomic_load((const KIE_GLOBAL u64*)p, __ATOMIC_RELAXED, KIE_WORD_SCOPE);
}
KIE_DEVICE void load_words(const u64* p, u64& a, u64& b) { a = load_word(p), b = load_word(p + 1); }
KIE_DEVICE void store_word(u64* p, u64 v) {
    __hip_atomic_store((KIE_GLOBAL u64*)p, v, __ATOMIC_RELAXED, KIE_WORD_SCOPE);
}
KIE_DEVICE void works_at(u32) {}
KIE_DEVICE void reads_without(int, const u8*, u32, u32, u32) {}
// Release, then acquire. Of the write-back between them (`buffer_wbl2`) compilers drop the wait
// where they think that nothing is on its way: llvm#178316, seen in clang 19.1, 21.1 (hipRTC 6.4)
// and 22.1, not in 23.1.
KIE_DEVICE void fence_device() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
    await_memory();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
}

// The same for memory that the host reads and writes, too.
KIE_DEVICE u32 load_host(const u32* p) {
    return __hip_atomic_load((const KIE_GLOBAL u32*)p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
KIE_DEVICE u64 load_host(const u64* p) {
    return __hip_atomic_load((const KIE_GLOBAL u64*)p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
KIE_DEVICE void store_host(u32* p, u32 v) {
    __hip_atomic_store((KIE_GLOBAL u32*)p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
KIE_DEVICE void store_host(u64* p, u64 v) {
    __hip_atomic_store((KIE_GLOBAL u64*)p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
KIE_DEVICE u64 load_word_system(const u64* p) { return load_host(p); }
KIE_DEVICE void load_words_system(const u64* p, u64& a, u64& b) {
    a = load_host(p), b = load_host(p + 1);
}
KIE_DEVICE void store_word_system(u64* p, u64 v) { store_host(p, v); }
KIE_DEVICE void store_words_system(u64* p, u64 a, u64 b) { store_host(p, a), store_host(p + 1, b); }
KIE_DEVICE void fence_system() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "");
    await_memory();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "");
}

// 16 bytes of state as two words: the widest access that carries a scope.
KIE_DEVICE Quad load_state(const void* p) {
    u64 a, b;
    load_words((const u64*)p, a, b);
    return {{(u32)a, (u32)(a >> 32), (u32)b, (u32)(b >> 32)}};
}
KIE_DEVICE void store_state(void* p, Quad q) {
    store_word((u64*)p, (u64)q.v[1] << 32 | q.v[0]);
    store_word((u64*)p + 1, (u64)q.v[3] << 32 | q.v[2]);
}
// As words are, like all state.
KIE_DEVICE void store_alike(u32* p, u32 v) {
    __hip_atomic_store((KIE_GLOBAL u32*)p, v, __ATOMIC_RELAXED, KIE_WORD_SCOPE);
}
KIE_DEVICE void store_alike(u64* p, u64 v) { store_word(p, v); }
// gfx942 has no such hint.
KIE_DEVICE void prefetch(const void*) {}

// Stream. `filled` counts the copies into a slot, `freed` how often all `teams` gave it back; the
// lowest bit of a count is the phase that is under way. `loads`: of the copy under way. The orders
// of these counts (unlike those of the fences) hold for shared memory, which is where both a slot
// and its bytes lie.
struct Slot {
    u32 filled, freed, released;
    u16 teams, loads;
};
static_assert(sizeof(Slot) == 16, "a slot has 16 bytes of shared memory");
KIE_DEVICE KIE_LOCAL u32* counter(const u32& c) { return (KIE_LOCAL u32*)&c; }
template <u32 kEach = 1>
KIE_DEVICE bool count_passed(const u32& count, u32 parity) {
    return (__hip_atomic_load(counter(count), __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_WORKGROUP) /
                kEach &
            1) != parity;
}
// To one more than it is; by whoever alone may, with all that he did before.
KIE_DEVICE void count_up(u32& count) {
    __hip_atomic_fetch_add(counter(count), 1u, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_WORKGROUP);
}
KIE_DEVICE void slot_init(Slot* s, u32 teams, u32 = 1) { *s = {0, 0, 0, (u16)teams, 0}; }
// By the thread that called slot_init, before the block's first barrier.
KIE_DEVICE void slots_ready() { meeting = {0, 0}; }
// The prefill kernel's slots are filled by two waves.
#ifdef KIE_PREFILL
constexpr u32 kFills = 2;
#else
constexpr u32 kFills = 1;
#endif
KIE_DEVICE bool slot_filled(const Slot* s, u32 parity) {
    return count_passed<kFills>(s->filled, parity);
}
KIE_DEVICE bool slot_free(const Slot* s, u32 parity) { return count_passed(s->freed, parity); }
KIE_DEVICE bool slot_passed(const Slot* s, bool filled, u32 parity) {
    return filled ? slot_filled(s, parity) : slot_free(s, parity);
}
KIE_DEVICE void slot_release(Slot* s) {
    const u32 before = __hip_atomic_fetch_add(counter(s->released), 1u, __ATOMIC_ACQ_REL,
                                              __HIP_MEMORY_SCOPE_WORKGROUP);
    if (before + 1 == s->teams) {
        __hip_atomic_store(counter(s->released), 0u, __ATOMIC_RELAXED,
                           __HIP_MEMORY_SCOPE_WORKGROUP);
        count_up(s->freed);
    }
}
// Copies take the same path as every other access: `slot_free` has ordered them.
KIE_DEVICE void reads_before_copy() {}
// Its loads carry no scope: what they find in a cache may be older than the state in memory.
constexpr bool kCopiesState = false;
KIE_DEVICE void state_before_copy() {}
// Scalar loads, which no wait of the copies' counter waits for.
template <class T>
KIE_DEVICE T load_constant(const T* p) {
    const u64 at = (u64)alike((u32)((u64)p >> 32)) << 32 | alike((u32)(u64)p);
    const KIE_CONSTANT AnyWord* from = (const KIE_CONSTANT AnyWord*)at;
    T out;
    KIE_UNROLL for (u32 i = 0; i < sizeof(T) / 4; ++i)((AnyWord*)&out)[i] = from[i];
    return out;
}
template <class T>
KIE_DEVICE T look(const volatile T* p) {
    return *(const volatile KIE_LOCAL T*)p;
}

// Copies of a wave: 256 bytes a load, which arrive in the order in which they were asked for. At
// most kLoadsMost are on their way (15 KB; the hardware counts to 63). The oldest copy that has not
// been counted is that of slot `tail`, with so many loads `left`.
constexpr u32 kCopyThreads = kWarp, kLoadBytes = 4 * kWarp, kLoadsMost = 60;
KIE_CONST_FN bool looks_ahead(bool) { return false; }
// All of a wave look at once and see the same.
KIE_DEVICE bool is_leader() { return true; }
KIE_DEVICE u32 from_leader(u32 v) { return alike(v); }
struct Copies {
    Slot* slots;
    u32 count, flying, left, tail;
};
KIE_DEVICE Copies copies_into(Slot* slots, u32 count) { return {slots, count, 0, 0, 0}; }
// Until at most `left` loads are on their way, or up to three less: the number stands in the
// instruction.
KIE_DEVICE void await_loads(u32 left) {
#define KIE_LEFT(n)                                           \
    case n / 4:                                               \
        asm volatile("s_waitcnt vmcnt(" #n ")" ::: "memory"); \
        break;
    switch (left / 4) {
        KIE_LEFT(0)
        KIE_LEFT(4)
        KIE_LEFT(8)
        KIE_LEFT(12)
        KIE_LEFT(16)
        KIE_LEFT(20)
        KIE_LEFT(24)
        KIE_LEFT(28)
        KIE_LEFT(32)
        KIE_LEFT(36)
        KIE_LEFT(40)
        KIE_LEFT(44)
        KIE_LEFT(48)
        KIE_LEFT(52)
        KIE_LEFT(56)
    }
#undef KIE_LEFT
}
KIE_DEVICE void copies_go_on(Copies& p) {
    if (p.flying == 0) return;
    Slot* s = p.slots + p.tail;
    if (p.left == 0) p.left = alike(s->loads);
    const u32 now = p.left < 4 ? p.left : 4;
    p.flying = alike(p.flying - now), p.left = alike(p.left - now);
    await_loads(p.flying);
    if (p.left > 0) return;
    if (wave_lane() == 0) count_up(s->filled);
    p.tail = alike(p.tail + 1 == p.count ? 0 : p.tail + 1);
}
// Past registers and, where possible, caches: lane n's word goes to `to` + 4 n, with 1 KB to
// `to` + 256, ... as well. Written out: compilers wait for all of such loads before they look at
// any shared memory. The memory register cannot be named as changed; compilers set it right before
// they use it.
KIE_DEVICE void load_kilobyte(const KIE_GLOBAL u8* from, u32 to) {
    asm volatile(
        "s_mov_b32 m0, %1\n\ts_nop 0\n\t"
        "global_load_lds_dword %0, off nt\n\t"
        "global_load_lds_dword %0, off offset:256 nt\n\t"
        "global_load_lds_dword %0, off offset:512 nt\n\t"
        "global_load_lds_dword %0, off offset:768 nt" ::"v"(from),
        "s"(to)
        : "memory");
}
KIE_DEVICE void load_word_each(const KIE_GLOBAL u8* from, u32 to) {
    asm volatile("s_mov_b32 m0, %1\n\ts_nop 0\n\tglobal_load_lds_dword %0, off nt" ::"v"(from),
                 "s"(to)
                 : "memory");
}
// While as many are on their way as may be, with fewer instructions: one wave copies for a whole
// multiprocessor.
KIE_DEVICE void make_room(Copies& p) {
    if (p.flying <= kLoadsMost - 4) return;
    if (p.left > 4) {
        await_loads(kLoadsMost - 8);
        p.flying -= 4, p.left -= 4;
    }
    while (p.flying > kLoadsMost - 4) copies_go_on(p);
}
KIE_DEVICE void copy_begins(Slot* s, u32 parts, u32 bytes) {
    s->loads = (u16)(parts * ((alike(bytes) + kLoadBytes - 1) / kLoadBytes));
}
KIE_DEVICE void copy_ends(Slot*) {}
KIE_DEVICE void copy_part(Slot*, void* to, const void* from, u32 bytes, Copies& p) {
    const KIE_GLOBAL u8* source = (const KIE_GLOBAL u8*)from + 4 * wave_lane();
    u32 target = alike((u32)(u64)(KIE_LOCAL u8*)to), left = alike(bytes);
    KIE_NO_UNROLL for (; left >= 4 * kLoadBytes; left -= 4 * kLoadBytes) {
        make_room(p);
        load_kilobyte(source, target);
        p.flying += 4, source += 4 * kLoadBytes, target += 4 * kLoadBytes;
    }
    KIE_NO_UNROLL while (left > 0) {
        make_room(p);
        if (4 * wave_lane() < left) load_word_each(source, target);
        p.flying += 1, source += kLoadBytes, target += kLoadBytes;
        left -= left < kLoadBytes ? left : kLoadBytes;
    }
}
KIE_DEVICE void copy_async(Slot* s, void* to, const void* from, u32 bytes, Copies& copies) {
    copy_begins(s, 1, bytes), copy_part(s, to, from, bytes, copies), copy_ends(s);
}

// Time. The real-time counter runs at 100 MHz; a sleep of 1 is 64 clocks, about 30 ns.
KIE_DEVICE void pause_ns(u32 ns) {
    KIE_NO_UNROLL for (u32 slept = 0; slept < ns; slept += 30) __builtin_amdgcn_s_sleep(1);
}
KIE_DEVICE u64 clock_ns() { return __builtin_amdgcn_s_memrealtime() * 10; }
KIE_DEVICE u64 clock_ticks() { return __builtin_readcyclecounter(); }

// Numbers.
typedef _Float16 Half2 __attribute__((ext_vector_type(2)));
KIE_DEVICE u32 pack_half2(float a, float b) {
    return __builtin_bit_cast(u32, Half2{(_Float16)a, (_Float16)b});
}
KIE_DEVICE void unpack_half2(u32 h, float& a, float& b) {
    const Half2 two = __builtin_bit_cast(Half2, h);
    a = (float)two.x, b = (float)two.y;
}
// Of each half, rounded once.
#define KIE_MULTIPLY_HALVES
KIE_DEVICE u32 multiply_halves(u32 a, u32 b) {
    return __builtin_bit_cast(u32, __builtin_bit_cast(Half2, a) * __builtin_bit_cast(Half2, b));
}
KIE_DEVICE float exp2_f(float x) { return __builtin_amdgcn_exp2f(x); }
KIE_DEVICE float log2_f(float x) { return __builtin_amdgcn_logf(x); }
KIE_DEVICE float reciprocal_f(float x) { return __builtin_amdgcn_rcpf(x); }
KIE_DEVICE float rsqrt_f(float x) { return __builtin_amdgcn_rsqf(x); }
KIE_DEVICE float min_f(float a, float b) { return __builtin_fminf(a, b); }
KIE_DEVICE float max_f(float a, float b) { return __builtin_fmaxf(a, b); }
KIE_DEVICE float fma_f(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#define KIE_UNPACK_F8
// Two codes of e4m3, in the upper bytes of halves. As a half a code's value is 2^-8 of what it
// should be. Like ops/decode_fp8.h, in fewer instructions: this is what bounds products of such
// weights.
KIE_DEVICE u32 unpack_two_f8(u32 c) {
    const u32 size = c & 0x7f007f00;
    const u32 nan = (size + 0x01000100) & 0x80008000;  // where a code is one
    const Half2 halves = __builtin_bit_cast(Half2, size >> 1 | (c & 0x80008000));
    const Half2 values = halves * (Half2){(_Float16)256, (_Float16)256};
    return __builtin_bit_cast(u32, values) | (nan - (nan >> 6));
}
KIE_DEVICE void unpack_f8(u32 codes, u32& low, u32& high) {
    low = unpack_two_f8(__builtin_amdgcn_perm(0, codes, 0x010c000c));
    high = unpack_two_f8(__builtin_amdgcn_perm(0, codes, 0x030c020c));
}
