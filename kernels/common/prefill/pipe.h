// The ring of shared memory through which weights, positions and the old residual reach the teams
// that multiply, in the order in which these take them.
#pragma once

#include "chiplets.h"
#include "platform.h"
#include "prefill/layout.h"
#include "wide.h"

struct Pipe {
    u32 at, parity;
    u32 passed;  // residual stages so far, for the copying warps
};
KIE_DEVICE Slot* stage_slot(u32 at) { return (Slot*)(prefill_shared() + kPfSlots) + at; }
KIE_DEVICE u8* stage_bytes(u32 at) { return prefill_shared() + kPfRing + at * kStageBytes; }
KIE_DEVICE void forward(Pipe& p) {
    if (++p.at == kStages) p.at = 0, p.parity ^= 1;
}

KIE_DEVICE void await_stage(const Pipe& p) {
    while (!of_wave(slot_filled(stage_slot(p.at), p.parity)))
        if (of_wave(*stop_word())) break;
}
KIE_DEVICE void leave_stage(Pipe& p) {
    sync_warp();
    if (lane() == 0) slot_release(stage_slot(p.at));
    forward(p);
}

// Ticks of a phase's work and of the wait behind it, by one thread of each block.
struct Clock {
    u64* trace;
    u64 at;
};
KIE_DEVICE void tick(Clock& c, int what) {
#ifdef KIE_TRACE
    if (thread() == 0) {
        const u64 now = clock_ticks();
        if (what >= 0) c.trace[block() * 32 + what] += now - c.at;
        c.at = now;
    }
#endif
}
