// How long the host takes to answer a token: one thread tells of it as the decode kernel does, and
// waits until the host has written its number back.
#pragma once

#include "emit.h"
#include "lowered.h"
#include "platform.h"

// A round that nobody answers is left with no time, and so are those behind it.
KIE_KERNEL(kie_echo, kWarp, EchoArgs args) {
    if (thread() != 0) return;
    const u64 begin_ns = clock_ns(), begin = clock_ticks();
    for (u32 n = 0; n < args.rounds; ++n) {
        const u64 since_ns = clock_ns(), since = clock_ticks();
        emit(args.out + (u64)(n % args.ring) * kTokenWords, n, n, 0);
        while (load_host(args.control) != n + 1)
            if (clock_ns() - since_ns > args.budget_ns) return;
        args.times[n] = clock_ticks() - since;
    }
    args.times[args.rounds] = clock_ticks() - begin;
    args.times[args.rounds + 1] = clock_ns() - begin_ns;
}
