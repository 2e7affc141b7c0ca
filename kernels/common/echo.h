// How long the host takes to answer a token: one thread tells of it as the decode kernel does, and
// waits until the host has written its number back.
#pragma once

#include "emit.h"
#include "platform.h"

struct EchoArgs {
    u64* out;      // host memory: [ring][kTokenWords]
    u32* control;  // host memory: tokens that the host has answered
    u64* times;    // [rounds] clock ticks; behind them ticks and nanoseconds of all rounds together
    u64 budget_ns;
    u32 rounds, ring;
};
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
