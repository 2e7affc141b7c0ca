// Which tokens a grammar allows, as bits that the host writes while the step is computed: words
// {tag, 32 bits} of host memory, [rows][kMaskRow][kMaskAll], of which bit id % 32 of word id / 32
// allows id. A row's first mask is that of its next token, the others those of the tokens behind
// each draft that the host gave with the launch (ops/lookup.h).
// Tag n + 1 says that a word is of the n-th token that the row ever made, as tokens say it that
// travel the other way (emit.h). So each word tells by itself whether it is there, and no fence and
// no flag is needed. A mask is made of the token before, which is made of candidates of all blocks:
// nobody still reads the words that it replaces.
//
// A block reads the words of its own rows of the head. Where they have not come in time its
// candidate is kLate, which wins over every token, so all blocks choose it: the host hears of it as
// of a token, and the launch ends. The sequence computes the same position again once its mask is
// there, while the others go on without it. No wait for the host is longer than these.
#pragma once

#include "args.h"
#include "block.h"
#include "exchange.h"
#include "lowered.h"
#include "platform.h"
#include "shape.h"

constexpr u64 kMaskWaitAlone = 1000000, kMaskWaitBeside = 20000;  // ns
constexpr u32 kMaskStride = kMaskWords + 1;

KIE_DEVICE bool is_masked(const Sequence& q) { return (q.wants & kWantsMask) != 0; }
// In shared memory, where nobody works once logits are there: the words from that of the block's
// first row on, then whether they are late.
KIE_DEVICE u32* mask_of(const Block& b, int column) {
    return (u32*)(b.shared + kShMasks) + column * kMaskStride;
}
KIE_DEVICE bool is_late(const DecodeArgs& args, const Block& b, int column) {
    if (kLookup && column >= choosing_of(args, b)) return false;  // it is nobody's
    return is_masked(sequence_of(args, b, column)) && mask_of(b, column)[kMaskWords] != 0;
}
// Of a mask from the word on that has the bit of `first`.
KIE_DEVICE bool allows(const u32* mask, u32 first, u32 id) {
    return (mask[id / 32 - first / 32] >> (id % 32) & 1) != 0;
}

// One warp a column; `first` is the id of the block's first row.
KIE_DEVICE void take_mask(const DecodeArgs& args, const Block& b, int column, u32 first) {
    constexpr int kOnce = 2;
    const Sequence& q = sequence_of(args, b, column);
    const u32 ahead = ahead_at(b.shared, b.step, column), tag = q.emitted + ahead + 1;
    // Of a row's drafts the first is one token ahead, as they are checked in the first step.
    const u32 mask = q.row * kMaskRow + (kLookup && column >= (int)args.live ? ahead : 0);
    const int count = min_i(kMaskWords, kMaskAll - (int)(first / 32));
    const u64* from = args.masks + (u64)mask * kMaskAll + first / 32;
    u32* to = mask_of(b, column);
    const u64 since = clock_ns(), most = sequences_of(args) > 1 ? kMaskWaitBeside : kMaskWaitAlone;
    bool there = true;
    KIE_NO_UNROLL for (int n = lane(); n < count; n += kOnce * kTeam) {
        for (;;) {
            u64 w[kOnce];
            KIE_UNROLL for (int i = 0; i < kOnce; ++i) w[i] =
                load_host(from + min_i(n + i * (int)kTeam, count - 1));
            bool all = true;
            KIE_UNROLL for (int i = 0; i < kOnce; ++i) {
                all &= seqno_of(w[i]) == tag;
                if (n + i * (int)kTeam < count) to[n + i * (int)kTeam] = (u32)w[i];
            }
            if (all) break;
            there = clock_ns() - since <= most;
            if (!there) break;
            pause_ns(500);
        }
    }
    const u32 late = ballot(!there);
    if (lane() == 0) to[kMaskWords] = late;
}
