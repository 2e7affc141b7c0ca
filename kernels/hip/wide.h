// What cuda/wide.h promises, on gfx942: products by the matrix unit for a whole wave, stages that
// the waves of the copying team fill through their registers.
//
// The matrix unit (v_mfma_f32_16x16x16_f16) works on the 64 lanes of a wave, which are two teams.
// Nothing goes from lane to lane for it: threads are numbered (platform.h) so that lane L, which is
// g = L % 8 of team h = L / 8 % 2 with t = L / 16, holds k {2t, 2t + 1, 2t + 8, 2t + 9} of rows g
// and g + 8 of its team's tile. That is what it should have of the unit's second operand, column
// L % 16 and four of k. So rows g of both tiles are one operand, rows g + 8 another, and the first
// operand are 16 positions in this order of k, which all products of a wave share: both teams must
// be at the same ones, and meet here. The unit leaves a lane rows 4t .. 4t + 3 of its column; with
// the positions in the order {2t, 2t + 1 of eight, 2t, 2t + 1 of the next eight} these are what
// it should have.
#pragma once

#include "platform.h"
#include "tile.h"

constexpr bool kWideAsync = false;

typedef _Float16 Half4 __attribute__((ext_vector_type(4)));
typedef float Float4 __attribute__((ext_vector_type(4)));
typedef u32 Words2 __attribute__((ext_vector_type(2)));
typedef u32 Words4 __attribute__((ext_vector_type(4), may_alias));

KIE_DEVICE u32 local_address(const void* p) { return (u32)(u64)(const KIE_LOCAL u8*)p; }

// Where this lane's part of the next 16 positions lies, of two cores that are neighbours along k.
struct WideOperand {
    u32 v, along;
};
KIE_DEVICE WideOperand wide_operand(const void* p, u32 along, u32 across) {
    const u32 i = wave_lane() % 16, t = wave_lane() / 16;
    return {local_address(p) + i / 2 % 2 * across + (i / 4 * 2 + i % 2) * 16 + 4 * t, along};
}
KIE_DEVICE WideOperand wide_shift(WideOperand b, u32 bytes) { return {b.v + bytes, b.along}; }
KIE_DEVICE Half4 load_cores(const WideOperand& b, u32 skip) {
    const u32 at = b.v + skip;
    const Words2 both = {*(const KIE_LOCAL AnyWord*)at, *(const KIE_LOCAL AnyWord*)(at + b.along)};
    return __builtin_bit_cast(Half4, both);
}
KIE_DEVICE Half4 four_halves(u32 low, u32 high) {
    return __builtin_bit_cast(Half4, Words2{low, high});
}
// 16 positions of 16 rows of each team.
KIE_DEVICE void add_wide(float* d, const Quad& q, Half4 x) {
    Float4 upper = {d[0], d[1], d[4], d[5]}, lower = {d[2], d[3], d[6], d[7]};
    upper = __builtin_amdgcn_mfma_f32_16x16x16f16(x, four_halves(q.v[0], q.v[2]), upper, 0, 0, 0);
    lower = __builtin_amdgcn_mfma_f32_16x16x16f16(x, four_halves(q.v[1], q.v[3]), lower, 0, 0, 0);
    d[0] = upper.x, d[1] = upper.y, d[4] = upper.z, d[5] = upper.w;
    d[2] = lower.x, d[3] = lower.y, d[6] = lower.z, d[7] = lower.w;
}
template <int kN, int kAt, bool kFresh = false, int kAll>
KIE_DEVICE void multiply_wide(float (&all)[kAll], const Quad& q, WideOperand where, u32 across) {
    static_assert(kN % 16 == 0 && kAt + kN / 2 <= kAll, "whole pairs of groups");
    KIE_UNROLL for (int j = 0; j < kN / 16; ++j) {
        float* d = all + kAt + 8 * j;
        if (kFresh) KIE_UNROLL for (int i = 0; i < 8; ++i) d[i] = 0;
        add_wide(d, q, load_cores(where, 2 * j * across));
    }
}
// What several row tiles take of shared memory is asked for once.
#define KIE_MULTIPLY_TILES
template <int kN, int kTurns, int kAll>
KIE_DEVICE void multiply_tiles(float (&all)[kAll], const Quad (&a)[kTurns][2], int half,
                               const WideOperand& where, u32 across) {
    static_assert(kN % 16 == 0 && kTurns * (kN / 2) <= kAll, "whole pairs of groups");
    KIE_UNROLL for (int j = 0; j < kN / 16; ++j) {
        const Half4 x = load_cores(where, 2 * j * across);
        KIE_UNROLL for (int m = 0; m < kTurns; ++m)
            add_wide(all + m * (kN / 2) + 8 * j, a[m][half], x);
    }
}
KIE_DEVICE void wide_begin() {}
KIE_DEVICE void wide_commit() {}
// What one of a warp's threads does behind them, all have come to.
template <int kLeft>
KIE_DEVICE void wide_wait() {
    sync_warp();
}
template <int kLeft, int kAll>
KIE_DEVICE void wide_wait(float (&)[kAll]) {
    sync_warp();
}
template <int kAll>
KIE_DEVICE void wide_finish(float (&)[kAll]) {
    sync_warp();
}

// Tiles and copies are reads and writes of the threads that ask for them.
KIE_DEVICE void writes_before_tiles() {}
KIE_DEVICE void writes_before_copies() {}
// A fence waits for its own wave's stores only.
KIE_DEVICE void writes_before_telling() { await_memory(); }

template <class T>
KIE_DEVICE T of_wave(T v) {
    static_assert(sizeof(T) <= 4, "one register");
    return (T)alike((u32)v);
}
// An index that is not known would want memory of a thread's own.
KIE_DEVICE u32 word_at(const Quad& q, int i) {
    const u32 low = i % 2 == 0 ? q.v[0] : q.v[1], high = i % 2 == 0 ? q.v[2] : q.v[3];
    return i < 2 ? low : high;
}

struct StreamPolicy {};
KIE_DEVICE StreamPolicy stream_policy() { return {}; }
constexpr bool kTeamStages = true;
KIE_DEVICE void stage_expect(Slot*, u32) {}
// What each lane has to bring is copied by all lanes of the wave, 16 bytes each, some kilobytes at
// once. `kOnce`: of bytes that are read once.
constexpr int kCopiesAtOnce = 8;
template <bool kOnce>
KIE_DEVICE void copy_of_wave(void* to, const void* from, u32 bytes) {
    const u32 skip = 16 * wave_lane(), target = local_address(to);
    const int low = (int)(u64)from, high = (int)((u64)from >> 32);
    u64 left = __builtin_amdgcn_ballot_w64(bytes > 0);
    u32 done = 0;  // of the first lane's that is left
    int who = 0;
    KIE_NO_UNROLL while (left != 0) {
        Words4 v[kCopiesAtOnce];
        u32 there[kCopiesAtOnce];
        KIE_UNROLL for (int n = 0; n < kCopiesAtOnce; ++n) {
            // Behind the last one once more what it had: without branches all are on their way.
            who = left != 0 ? __builtin_ctzll(left) : who;
            const u32 all = (u32)__builtin_amdgcn_readlane((int)bytes, who), at = done + skip;
            const u64 source = (u64)(u32)__builtin_amdgcn_readlane(high, who) << 32 |
                               (u32)__builtin_amdgcn_readlane(low, who);
            const u32 last = all - 16, capped = at < last ? at : last;
            const KIE_GLOBAL Words4* here = (const KIE_GLOBAL Words4*)(source + capped);
            v[n] = kOnce ? __builtin_nontemporal_load(here) : *here;
            there[n] =
                left != 0 && at < all ? (u32)__builtin_amdgcn_readlane((int)target, who) + at : ~0u;
            done += 16 * kWarp;
            const bool next = done >= all;
            done = next ? 0 : done, left = next ? left & (left - 1) : left;
        }
        KIE_UNROLL for (int n = 0; n < kCopiesAtOnce; ++n) if (there[n] != ~0u) *
            (KIE_LOCAL Words4*)there[n] = v[n];
    }
}
KIE_DEVICE void stage_copy(Slot*, void* to, const void* from, u32 bytes) {
    copy_of_wave<false>(to, from, bytes);
}
KIE_DEVICE void stage_copy(Slot*, void* to, const void* from, u32 bytes, StreamPolicy) {
    copy_of_wave<true>(to, from, bytes);
}
// By a whole wave, which is half of who fills; what it has copied is there.
KIE_DEVICE void stage_asked(Slot* s) {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_wave_barrier();
    if (wave_lane() == 0) count_up(s->filled);
}
KIE_DEVICE void quad_copy(void* to, const void* from) {
    *(KIE_LOCAL Words4*)local_address(to) = *(const KIE_GLOBAL Words4*)from;
}
KIE_DEVICE void quads_here() {}
// By one thread, for all that fill.
KIE_DEVICE void slot_fill(Slot* s) {
    __hip_atomic_fetch_add(counter(s->filled), kFills, __ATOMIC_RELEASE,
                           __HIP_MEMORY_SCOPE_WORKGROUP);
}

KIE_DEVICE void push_copy(void* to, const void* from, u32 bytes) {
    for (u32 at = 0; at < bytes; at += 16)
        store_state((u8*)to + at, *(const Quad*)((const u8*)from + at));
}
KIE_DEVICE void push_commit() {}
template <int kLeft>
KIE_DEVICE void push_read() {}
KIE_DEVICE void push_done() {}

// Counted where memory is, past the dies' caches, which are not coherent.
KIE_DEVICE u64 count_in(u64* p) {
    return __hip_atomic_fetch_add((KIE_GLOBAL u64*)p, 1ull, __ATOMIC_RELAXED,
                                  __HIP_MEMORY_SCOPE_SYSTEM);
}
KIE_DEVICE void count_up(u64* p) { count_in(p); }

template <u32 kCount>
KIE_DEVICE void more_registers() {}
template <u32 kCount>
KIE_DEVICE void fewer_registers() {}
