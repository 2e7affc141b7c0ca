// A token on its way to the host: entry n % kRing of a row's ring holds, for the n-th token that
// the row ever made,
//   {n + 1, token}, {n + 1, log-probability}, {(n + 1) mod 2^24, time in ns mod 2^40}
// (tag in the high bits), so that a poller knows of each word by itself which token it is of.
#pragma once

#include "platform.h"

constexpr int kTokenWords = 3;

KIE_DEVICE void emit(u64* to, u32 n, u32 token, float logprob) {
    const u64 tag = n + 1;
    store_host(to, tag << 32 | token);
    store_host(to + 1, tag << 32 | bits(logprob));
    store_host(to + 2, (tag & 0xffffff) << 40 | (clock_ns() & 0xffffffffffull));
}
