// Wide tiles in the simulator; kernels/cuda/wide.h says what lies where. Products and copies are
// done where they are asked for: an order of the asynchronous ones that is wrong is not seen.
#pragma once

#include "platform.h"

// Warps of 32 are Hopper's, with wide tiles and engines that copy; wider ones stand for GPUs that
// have neither.
constexpr bool kWideAsync = kWarp == 32, kTeamStages = kWarp != 32;

namespace kie_sim {
// Bytes that a stage still waits for: copies may come before its size is said.
struct Expected {
    const void* slot;
    long bytes;
    bool said;
};
static Expected expected_stages[4096];
KIE_UNSEEN inline Expected& expected_at(const void* slot) {
    for (u32 i = (u64)slot / 16 % 4096;; i = (i + 1) % 4096) {
        Expected& e = expected_stages[i];
        if (!e.slot) e.slot = slot;
        if (e.slot == slot) return e;
    }
}
KIE_UNSEEN inline void settle(Slot* s, long bytes, bool said) {
    order_release(&s->full);
    Expected& e = expected_at(s);
    e.bytes += bytes, e.said |= said;
    if (!e.said || e.bytes != 0) return;
    e.said = false;
    arrive(&s->full);
}
}  // namespace kie_sim

// An address, and above it the bytes between neighbours along k.
struct WideOperand {
    u64 v;
};
KIE_DEVICE WideOperand wide_operand(const void* p, u32 along, u32) {
    return {(u64)p | (u64)(along >> 4) << 48};
}
KIE_DEVICE WideOperand wide_shift(WideOperand b, u32 bytes) { return {b.v + bytes}; }

// As in fibers.h.
#ifdef KIE_SIM_O2
#pragma GCC push_options
#pragma GCC optimize("O2")
#endif
template <int kN, int kAt, bool kFresh = false, int kAll>
KIE_DEVICE void multiply_wide(float (&all)[kAll], const Quad& q, WideOperand where, u32 across) {
    static_assert(kN % 8 == 0 && kAt + kN / 2 <= kAll, "whole groups of columns");
    float a[2][16];  // rows g and g + 8
    const u32 g = lane() / 4, t = lane() % 4;
    for (u32 i = 0; i < 4; ++i) {
        for (u32 from = 0; from < 4; ++from) {
            float* to = &a[i & 1][2 * from + 4 * (i & 2)];
            unpack_half2(bits(shuffle(number(q.v[i]), 4 * g + from)), to[0], to[1]);
        }
    }
    const u8* b = (const u8*)(where.v & 0xffffffffffffull);
    const u64 along = where.v >> 48 << 4;
    float* d = all + kAt;
    for (int j = 0; j < kN / 8; ++j) {
        for (u32 e = 0; e < 2; ++e) {
            float sum[2] = {kFresh ? 0 : d[4 * j + e], kFresh ? 0 : d[4 * j + 2 + e]};
            for (u32 k = 0; k < 16; k += 2) {
                float x0, x1;
                unpack_half2(*(const u32*)(b + (u64)j * across + k / 8 * along + (2 * t + e) * 16 +
                                           k % 8 * 2),
                             x0, x1);
                for (u32 r = 0; r < 2; ++r) sum[r] += a[r][k] * x0 + a[r][k + 1] * x1;
            }
            d[4 * j + e] = sum[0], d[4 * j + 2 + e] = sum[1];
        }
    }
}
#ifdef KIE_SIM_O2
#pragma GCC pop_options
#endif
// `a` in shared memory, with as much between its rows' cores as between columns'.
template <int kN, int kAt, bool kFresh = false, int kAll>
KIE_DEVICE void multiply_wide(float (&all)[kAll], const WideOperand& a, WideOperand where,
                              u32 across) {
    const u32 warp = thread() / kie_sim::kTeam % 4;
    const u8* from = (const u8*)(a.v & 0xffffffffffffull) + (u64)(2 * warp) * across +
                     lane() / 4 * 16 + lane() % 4 * 4;
    Quad q;
    for (u32 i = 0; i < 4; ++i)
        q.v[i] = *(const u32*)(from + (u64)(i & 1) * across + (i / 2) * (a.v >> 48 << 4));
    multiply_wide<kN, kAt, kFresh>(all, q, where, across);
}
KIE_DEVICE void wide_begin() {}
KIE_DEVICE void wide_commit() {}
// A warp does these together, so what one of its threads does behind them, all have come to.
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
KIE_DEVICE void writes_before_tiles() {}
KIE_DEVICE void writes_before_copies() {}
template <class T>
KIE_DEVICE T of_wave(T v) {
    return v;
}
KIE_DEVICE u32 word_at(const Quad& q, int i) { return q.v[i]; }
KIE_DEVICE void writes_before_telling() {}

KIE_DEVICE void stage_expect(Slot* s, u32 bytes) {
    if (kTeamStages) return;
    kie_sim::act();
    kie_sim::settle(s, bytes, true);
    kie_sim::maybe_preempt(4);
}
KIE_DEVICE void stage_copy(Slot* s, void* to, const void* from, u32 bytes) {
    // Who of a warp brings which bytes makes no difference: here each what it has.
    if (kTeamStages) return kie_sim::copy(&s->full, to, from, bytes, false);
    kie_sim::act();
    if (((u64)to | (u64)from | bytes) & 15) kie_sim::fail("stage_copy: not 16-byte aligned");
    kie_sim::order_access(from, bytes, false), kie_sim::order_access(to, bytes, true);
    __builtin_memcpy(to, from, bytes);
    kie_sim::settle(s, -(long)bytes, false);
    kie_sim::maybe_preempt(4);
}
KIE_DEVICE void stage_copy(Slot* s, void* to, const void* from, u32 bytes, StreamPolicy) {
    stage_copy(s, to, from, bytes);
}
KIE_DEVICE void stage_asked(Slot* s) {
    if (kTeamStages) kie_sim::arrive_behind(&s->full);
}
KIE_DEVICE void quad_copy(void* to, const void* from) {
    kie_sim::check_aligned(from, 16, "quad_copy");
    *(Quad*)to = *(const Quad*)from;
}
KIE_DEVICE void quads_here() {}
KIE_DEVICE void push_copy(void* to, const void* from, u32 bytes) {
    kie_sim::check_aligned(from, 16, "push_copy");
    for (u32 i = 0; i < bytes; i += 16)
        store_state((u8*)to + i, *(const Quad*)((const u8*)from + i));
}
KIE_DEVICE void push_commit() {}
template <int kLeft>
KIE_DEVICE void push_read() {}
KIE_DEVICE void push_done() {}
KIE_DEVICE void slot_fill(Slot* s) {
    kie_sim::act();
    kie_sim::order_release(&s->full);
    kie_sim::arrive(&s->full);
    kie_sim::maybe_preempt(4);
}
KIE_UNSEEN KIE_DEVICE u64 count_in(u64* p) {
    const u64 before = *(volatile u64*)p;
    kie_sim::order_acquire(p), kie_sim::order_release(p);
    store_word(p, before + 1);
    return before;
}
KIE_DEVICE void count_up(u64* p) { count_in(p); }
template <u32 kCount>
KIE_DEVICE void more_registers() {}
template <u32 kCount>
KIE_DEVICE void fewer_registers() {}
