// The mlp of a layer with experts, of several columns: each expert that any of them chose goes
// through the ring once. The pairs of a column and an expert stand by expert (ops/route.h). They
// are worked on in batches: whole experts, of no more pairs than there are columns, so that a
// batch's sums, or its activations, have room in shared memory.
#pragma once

#include "args.h"
#include "block.h"
#include "exchange.h"
#include "lowered.h"
#include "ops/experts.h"
#include "ops/gate.h"
#include "ops/gather.h"
#include "ops/matvec.h"
#include "ops/parts.h"
#include "ops/residual.h"
#include "ops/route.h"
#include "platform.h"
#include "ring.h"
#include "shape.h"

// Behind the pairs of an expert that begin at `n`.
KIE_DEVICE int behind_expert(const Block& b, int n, int pairs) {
    const u32 expert = routed_pair(b, n).expert;
    do ++n;
    while (n < pairs && routed_pair(b, n).expert == expert);
    return n;
}
KIE_DEVICE int behind_batch(const Block& b, int from, int pairs) {
    int to = from;
    while (to < pairs) {
        const int end = behind_expert(b, to, pairs);
        if (end - from > kColumns) break;
        to = end;
    }
    return to;
}
// An expert's sums, of the columns of pairs from .. to, for whoever adds up those of warps that
// share its columns: [k-warp][pair of the batch][row].
template <class S>
KIE_DEVICE void leave_pairs(const Block& b, const Sums<S>& s, float* part, int batch, int from,
                            int to) {
    const int me = thread(), warp = me / kTeam, my = me % kTeam, g = my / 4, t = my % 4;
    const int row_warp = S::row_warps == 1 ? 0 : warp % S::row_warps;
    const int k_warp = S::k_warps == 1 ? 0 : warp / S::row_warps;
    KIE_NO_UNROLL for (int n = from; n < to; ++n) {
        const int column = routed_pair(b, n).column;
        if (column / 2 != t) continue;
        const bool odd = column % 2 != 0;
        float* its = part + (k_warp * kColumns + n - batch) * S::rows;
        KIE_UNROLL for (int i = 0; i < S::tiles; ++i) {
            const int pair = (row_warp * S::tiles + i) * 8 + g;
            if (pair < S::row_pairs)
                *(u64*)(its + 2 * pair) = (u64)bits(odd ? s.v[i][3] : s.v[i][2]) << 32 |
                                          bits(odd ? s.v[i][1] : s.v[i][0]);
        }
    }
}
// Activations of a batch: two neighbouring features make a word.
template <class C>
KIE_DEVICE void publish_pairs(const DecodeArgs& args, const Block& b, int layer, const float* part,
                              int from, int to) {
    using S = typename C::TilingGu;
    constexpr int kOfPair = S::rows / 4;
    u64* act = args.ll_words + kAtAct + buffer_of(layer, b.lane_index) * kVecF;
    KIE_NO_UNROLL for (int item = thread(); item < (to - from) * kOfPair; item += kThreads) {
        const int slot = item / kOfPair, word = item % kOfPair;
        const RoutedPair p = routed_pair(b, from + slot);
        const float factor = chosen_factor(b, p.column, p.n);
        const float scale = rms_scale(b, p.column);
        float v[4] = {0, 0, 0, 0};
        KIE_UNROLL for (int k = 0; k < S::k_warps; ++k) {
            const Quad q = *(const Quad*)(part + (k * kColumns + slot) * S::rows + 4 * word);
            KIE_UNROLL for (int j = 0; j < 4; ++j) v[j] += number(q.v[j]);
        }
        KIE_UNROLL for (int j = 0; j < 4; ++j) v[j] *= scale;
        if constexpr (C::kExpertBias) {
            const float* bias = extras_of(args, b, layer) + C::kAtGateUpBias +
                                (p.expert * kBlocksPerLane + b.block_in_lane) * S::rows + 4 * word;
            KIE_UNROLL for (int j = 0; j < 4; ++j) v[j] += bias[j];
        }
        const int at = b.block_in_lane * kOfPair + word;
        if (at < C::kFfn / 2)
            publish(act + (long)p.column * C::kWordsF + p.n * (C::kFfn / 2) + at, C::kWordsF,
                    halves_of(gated<C>(v[0], v[1]) * factor, gated<C>(v[2], v[3]) * factor),
                    b.seqno);
    }
}
template <class C>
KIE_DEVICE void step_experts_gate_up_columns(Ring& ring, const DecodeArgs& args, Block& b,
                                             int layer) {
    using S = typename C::TilingGu;
    float* part = (float*)(b.shared + kShPartA);
    const int pairs = live_of(b) * C::kChosen;
    Prefetched<S> first;
    prefetch_weights<S>(ring, first);
    KIE_NO_UNROLL for (int from = 0; from < pairs;) {
        const int to = behind_batch(b, from, pairs);
        KIE_NO_UNROLL for (int n = from; n < to;) {
            const int end = behind_expert(b, n, pairs);
            const Sums<S> s = multiply<S>(ring, first, b.shared + kShXa, kStrideA);
            if (end < pairs) prefetch_weights<S>(ring, first);
            leave_pairs<S>(b, s, part, from, n, end);
            n = end;
        }
        join_wave();
        sync_consumers<kThreads>();
        publish_pairs<C>(args, b, layer, part, from, to);
        join_wave();
        sync_consumers<kThreads>();  // the sums, or the vectors, have been used
        from = to;
    }
}

// A batch's activations into shared memory, a vector a pair: of each warp a share of every vector,
// some vectors at a time.
template <class C>
KIE_DEVICE void gather_pairs(Watch& watch, const DecodeArgs& args, const Block& b, int layer,
                             int from, int to) {
    constexpr int kWords = C::kFfn / 2,
                  kLoads = (kWords / 2 + kTeam * kWarps - 1) / (kTeam * kWarps);
    constexpr int kAtOnce = max_i(kFlight / kLoads, 1);
    static_assert(kWords % 2 == 0, "pairs of words");
    const u32 where = layer << 4 | 6;
    const u64* act = args.ll_words + kAtAct + buffer_of(layer, b.lane_index) * kVecF;
    const int mine = 2 * (int)thread();
    const auto has = [&](int i) { return 2 * kTeam * kWarps * i + mine < kWords; };
    KIE_NO_UNROLL for (int first = from; first < to; first += kAtOnce) {
        u64 v[kAtOnce][kLoads][2];
        const u64* words[kAtOnce];
        KIE_UNROLL for (int n = 0; n < kAtOnce; ++n) {
            const RoutedPair p = routed_pair(b, min_i(first + n, to - 1));
            words[n] = act + (long)p.column * C::kWordsF + p.n * kWords + mine;
            KIE_UNROLL for (int i = 0; i < kLoads; ++i) v[n][i][0] = v[n][i][1] = 0;
        }
        const auto late_by = [&](int n, int i) {
            return (seqno_of(v[n][i][0]) ^ b.seqno) | (seqno_of(v[n][i][1]) ^ b.seqno);
        };
        watch.polls = 0;
        for (;;) {
            u32 late = 0;
            KIE_UNROLL for (int n = 0; n < kAtOnce; ++n) {
                KIE_UNROLL for (int i = 0; i < kLoads; ++i) if (has(i) && late_by(n, i) != 0)
                    load_words(words[n] + 2 * kTeam * kWarps * i, v[n][i][0], v[n][i][1]);
            }
            KIE_UNROLL for (int n = 0; n < kAtOnce; ++n) {
                KIE_UNROLL for (int i = 0; i < kLoads; ++i) if (has(i)) late |= late_by(n, i);
            }
            if (late == 0 || kNoWaits || wait_expired(watch, where, b.seqno, b.seqno ^ late)) break;
        }
        KIE_UNROLL for (int n = 0; n < kAtOnce; ++n) {
            if (first + n >= to) continue;
            u32* x = (u32*)(b.shared + kShXb) + (first + n - from) * (C::kStrideAct / 2) + mine;
            KIE_UNROLL for (int i = 0; i < kLoads; ++i) if (has(i)) *
                (u64*)(x + 2 * kTeam * kWarps * i) = v[n][i][1] << 32 | (u32)v[n][i][0];
        }
    }
}
// `all` has the sums of all columns; those that did not choose the expert keep theirs.
template <class C>
KIE_DEVICE void multiply_pairs(Ring& ring, Prefetched<typename C::TilingDown>& first,
                               const Block& b, Sums<typename C::TilingDown>& all, int batch,
                               int from, int to) {
    using S = typename C::TilingDown;
    const int me = thread(), warp = me / kTeam, my = me % kTeam, g = my / 4, t = my % 4;
    const int k_warp = S::k_warps == 1 ? 0 : warp / S::row_warps;
    int slot = from - batch;  // whatever stands there, where the lane's column has none
    bool takes[2] = {false, false};
    KIE_NO_UNROLL for (int n = from; n < to; ++n) {
        const int column = routed_pair(b, n).column;
        if (column == g) slot = n - batch;
        KIE_UNROLL for (int i = 0; i < 2; ++i) takes[i] |= column == 2 * t + i;
    }
    const Sums<S> before = all;
    multiply_onto<S>(
        all, ring, first,
        b.shared + kShXb + (slot * C::kStrideAct + k_warp * S::pairs * 32 + 8 * t) * 2);
    KIE_UNROLL for (int i = 0; i < S::tiles; ++i) {
        KIE_UNROLL for (int j = 0; j < 4; ++j) all.v[i][j] =
            takes[j % 2] ? all.v[i][j] : before.v[i][j];
    }
}
template <class C>
KIE_DEVICE Sums<typename C::TilingDown> multiply_down_columns(
    Ring& ring, Watch& watch, Prefetched<typename C::TilingDown>& first, const DecodeArgs& args,
    const Block& b, int layer, const Sums<typename C::TilingDown>& shared) {
    using S = typename C::TilingDown;
    const int pairs = live_of(b) * C::kChosen;
    Sums<S> all = no_sums<S>();
    KIE_NO_UNROLL for (int from = 0; from < pairs;) {
        const int to = behind_batch(b, from, pairs);
        // The batch before, or what the shared expert's is made of, has been used.
        if (C::kShared || from > 0) sync_consumers<kThreads>();
        gather_pairs<C>(watch, args, b, layer, from, to);
        join_wave();
        sync_consumers<kThreads>();
        KIE_NO_UNROLL for (int n = from; n < to;) {
            const int end = behind_expert(b, n, pairs);
            multiply_pairs<C>(ring, first, b, all, from, n, end);
            if (end < pairs) prefetch_weights<S>(ring, first);
            n = end;
        }
        from = to;
    }
    if constexpr (C::kShared) add_sums<S>(all, shared);
    return all;
}

// Of one column, or of several.
template <class C, bool kAlone>
struct FirstStages {
    using Type = ChosenOfDown<C>;
};
template <class C>
struct FirstStages<C, false> {
    using Type = Prefetched<typename C::TilingDown>;
};
template <class C>
using FirstOfDown = typename FirstStages<C, kColumns == 1>::Type;
template <class S, int kTimes>
KIE_DEVICE void prefetch_first(Ring& ring, ChosenStages<S, kTimes>& first) {
    prefetch_chosen(ring, first);
}
template <class S>
KIE_DEVICE void prefetch_first(Ring& ring, Prefetched<S>& first) {
    prefetch_weights<S>(ring, first);
}
template <class C>
KIE_DEVICE void step_experts_gate_up(Ring& ring, const DecodeArgs& args, Block& b, int layer) {
    if constexpr (kColumns == 1)
        step_experts_gate_up_alone<C>(ring, args, b, layer);
    else
        step_experts_gate_up_columns<C>(ring, args, b, layer);
}
// `shared`: the shared expert's sums, or zeros.
template <class C>
KIE_DEVICE Sums<typename C::TilingDown> multiply_experts(
    Ring& ring, Watch& watch, FirstOfDown<C>& first, const DecodeArgs& args, const Block& b,
    int layer, const Sums<typename C::TilingDown>& shared) {
    if constexpr (kColumns == 1)
        return multiply_down_alone<C>(ring, watch, first, args, b, layer, shared);
    else
        return multiply_down_columns<C>(ring, watch, first, args, b, layer, shared);
}
