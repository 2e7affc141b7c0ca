// The product with vectors that are nowhere but in LL words: each warp has a range of columns of
// its own and takes its operands as they are needed, some stages ahead. Traffic: the words once.
// Of 16 words, lane t of four needs 4t to 4t + 3; they stand where its two loads of two words, side
// by side with the other lanes', find them (direct_word).
#pragma once

#include "chiplets.h"
#include "exchange.h"
#include "lowered.h"
#include "ops/matvec.h"
#include "platform.h"
#include "ring.h"

template <class S>
struct WordStage {
    u64 v[S::chunk][4];
};
template <class S>
KIE_DEVICE void load_stage(WordStage<S>& w, const u64* from) {
    KIE_UNROLL for (int c = 0; c < S::chunk; ++c) {
        load_words(from + c * 16, w.v[c][0], w.v[c][1]);
        load_words(from + c * 16 + 8, w.v[c][2], w.v[c][3]);
    }
}
template <class S>
KIE_DEVICE Column<S> take_words(Watch& watch, WordStage<S>& w, const u64* from, u32 seqno,
                                u32 where) {
    watch.polls = 0;
    for (;;) {
        bool ok = true;
        KIE_UNROLL for (int c = 0; c < S::chunk; ++c) {
            KIE_UNROLL for (int i = 0; i < 4; ++i) ok &= seqno_of(w.v[c][i]) == seqno;
        }
        if (ok || kNoWaits || wait_expired(watch, where, seqno, seqno_of(w.v[0][0]))) break;
        load_stage<S>(w, from);
    }
    Column<S> x;
    KIE_UNROLL for (int c = 0; c < S::chunk; ++c) {
        KIE_UNROLL for (int i = 0; i < 4; ++i) x.v[c].v[i] = (u32)w.v[c][i];
    }
    return x;
}
template <class S>
KIE_DEVICE Sums<S> multiply_words(Ring& ring, Watch& watch, Prefetched<S>& prefetched,
                                  const u64* base, int stride, u32 seqno, u32 where, int live) {
    static_assert(S::row_warps == 1, "ranges of columns are a warp's own");
    constexpr int kMost = S::chunk == 1 ? 4 : 2, kAhead = S::stages < kMost ? S::stages : kMost;
    const int me = thread(), k_warp = me / kTeam, g = me % kTeam / 4, t = me % 4;
    const u64* mine = base + (long)(g < live * kParts ? g : 0) * (stride / kParts) +
                      k_warp * S::pairs * 16 + 2 * t;
    constexpr int kStep = S::chunk * 16;
    await_one(watch, base + k_warp * S::pairs * 16 + block() * 10 % (S::pairs * 16), seqno, where,
              kPollDelayNs);
    WordStage<S> ahead[kAhead];
    KIE_UNROLL for (int d = 0; d < kAhead; ++d) load_stage<S>(ahead[d], mine + d * kStep);
    Sums<S> s;
    KIE_UNROLL for (int i = 0; i < S::tiles; ++i) {
        KIE_UNROLL for (int j = 0; j < 4; ++j) s.v[i][j] = 0;
    }
    WeightFragment<S>&one = prefetched.v[0], other;
    const FragmentOffset<S> offset = fragment_offset<S>(ring);
    bool here = S::stages > 1 && stage_here(ring);
    KIE_NO_UNROLL for (int first = 0; first < S::stages; first += kAhead) {
        KIE_UNROLL for (int d = 0; d < kAhead; ++d) {
            const int stage = first + d;
            if (S::stages % kAhead != 0 && stage >= S::stages) continue;
            WeightFragment<S>&now = d % 2 ? other : one, &next = d % 2 ? one : other;
            const Column<S> x = take_words<S>(watch, ahead[d], mine, seqno, where);
            if (stage + kAhead < S::stages) load_stage<S>(ahead[d], mine + kAhead * kStep);
            mine += kStep;
            if (stage + 1 < S::stages) {
                load_fragment<S>(ring, next, here, offset);
                here = stage + 2 < S::stages && stage_here(ring);
            }
            add_fragment<S>(s, now, x);
        }
    }
    return s;
}
