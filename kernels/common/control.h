// Commands of the host to a running kernel, and how tokens reach the host. Both are words of host
// memory, each self-contained: no fence stands between them, and a late host reads old words, never
// torn ones.
//
// Orders: control[0] is kGoOn, or why to leave. One thread of block 0 of rank 0, which takes part
// in no exchange, polls it; what it saw travels with the step's candidates, so all blocks leave at
// the same step barrier. control[1], read with it as one, is the host's heartbeat, a number that
// changes; if it stands still for kHostSilent while control[2] is set, the host is gone and the
// kernel leaves. After its last step barrier the kernel writes the number of its steps to
// control[3]. Where it checked drafts, eight words a sequence from kControlDrafts on say what they
// were (ops/lookup.h, report_drafts).
//
// Tokens: emit.h says how they travel.
#pragma once

#include "args.h"
#include "emit.h"
#include "exchange.h"
#include "lowered.h"
#include "platform.h"

enum Order { kGoOn = 0, kLeave = 1, kAbort = 2, kHostGone = 3 };
constexpr u64 kHostSilent = 1000000000ull;
// Polls of the host are this many delays apart. Polled at every delay, the host's words cost some
// engines 4 %, depending on their address: half of the multiprocessors then got less of the
// memory's bandwidth than the others (benches/gpu/HISTORY.md).
constexpr u32 kHostPollEvery = 20;

// One thread. `seen`: the latest order, for block 0's candidate; `steps_done`: the kernel's steps,
// once they are done.
KIE_DEVICE void watch_host(const DecodeArgs& args, volatile u32* seen,
                           const volatile u32* steps_done) {
    const bool watched = load_host(args.control + 2) != 0;
    u32 beat = load_host(args.control + 1), steps;
    u64 since = clock_ns();
    for (u32 turn = 0; (steps = *steps_done) == 0; ++turn) {
        if (turn % kHostPollEvery == 0) {
            const u64 both = load_host((const u64*)args.control);
            const u32 order = (u32)both, now = (u32)(both >> 32);
            if (now != beat) beat = now, since = clock_ns();
            if (order != kGoOn)
                *seen = order;
            else if (watched && clock_ns() - since > kHostSilent)
                *seen = kHostGone;
            if (order == kAbort) abort_all(args);
        }
        pause_ns(500);
    }
    store_host(args.control + 3, steps);
}

KIE_DEVICE void emit_token(const DecodeArgs& args, u32 row, u32 n, u32 token, float logprob) {
    emit(args.out + ((u64)row * kRing + n % kRing) * kTokenWords, n, token, logprob);
}
