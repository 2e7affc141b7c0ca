// Words of attention over latents (ops/latent.h), and how many of them are taken at once.
#pragma once

#include "args.h"
#include "block.h"
#include "exchange.h"
#include "lowered.h"
#include "ops/parts.h"
#include "platform.h"
#include "shape.h"

// Codes of waits (mono/wire.rs).
enum LatentWait {
    kWaitLatents = 10,
    kWaitQueries = 11,
    kWaitSeen = 12,
    kWaitChannels = 13,
    kWaitScores = 14
};

// A column's words: latents, then heads' queries, then what of these meets latents.
template <class C>
KIE_DEVICE u64* latent_words(const DecodeArgs& args, const Block& b, int layer, int column) {
    return args.ll_words + kAtQkv + buffer_of(layer, b.lane_index) * kVecQ +
           (long)column * C::kWordsQ;
}
// What heads saw of latents, then their values.
template <class C>
KIE_DEVICE u64* seen_words(const DecodeArgs& args, const Block& b, int layer, int column) {
    return args.ll_words + kAtAttn + buffer_of(layer, b.lane_index) * kVecA +
           (long)column * C::kWordsA;
}
// Where a rank that takes its own words for others' finds one.
template <class C>
KIE_DEVICE int heard_latent(int word) {
    return kNoRanks ? word % (kBlocksPerLane * (C::TilingLatentDown::rows / 2)) : word;
}

// Some words of a vector a thread, all asked for at once, and those that were late all once more.
// address(i): of its i-th one, or null.
template <int kEach, class F>
KIE_DEVICE void take_each(Watch& watch, Halves (&out)[kEach], long words, u32 seqno, u32 where,
                          F address) {
    u64 v[kEach][kParts];
    KIE_UNROLL for (int i = 0; i < kEach; ++i) {
        const u64* p = address(i);
        KIE_UNROLL for (int part = 0; part < kParts; ++part) v[i][part] =
            p ? load_word(p + part * (words / kParts)) : ll_word(0, seqno);
    }
    watch.polls = 0;
    for (;;) {
        u32 late = 0;
        KIE_UNROLL for (int i = 0; i < kEach; ++i) {
            KIE_UNROLL for (int part = 0; part < kParts; ++part) late |=
                seqno_of(v[i][part]) ^ seqno;
        }
        if (late == 0 || kNoWaits || wait_expired(watch, where, seqno, seqno ^ late)) break;
        KIE_UNROLL for (int i = 0; i < kEach; ++i) {
            KIE_UNROLL for (int part = 0; part < kParts; ++part) if (seqno_of(v[i][part]) != seqno)
                v[i][part] = load_word(address(i) + part * (words / kParts));
        }
    }
    KIE_UNROLL for (int i = 0; i < kEach; ++i) {
        KIE_UNROLL for (int part = 0; part < kParts; ++part) out[i].v[part] = (u32)v[i][part];
    }
}
