// The mlp of a layer with experts, of several columns: each expert that any of them chose goes
// through the ring once, and the stages of all of them follow each other like those of one matrix.
// Pairs of a column and an expert stand by expert (ops/route.h).
//
// Sums of gate and up are left for who adds up those of warps that share columns of the matrix, by
// pairs, in one of two places in turn: when one is full all meet, and publish it while the other is
// filled. Activations come a few pairs at a time into places in rotation, each warp its own share
// of every vector, so that nobody meets: they are on their way while those before are multiplied.
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

// Products with so many experts, or stacks of some, onto `s`. take(n, stage): the lane's columns of
// what is multiplied by a stage of the n-th; done(n, s) after each.
template <class S, class Take, class Done>
KIE_DEVICE void multiply_list(Sums<S>& s, Ring& ring, Prefetched<S>& first, int times, Take take,
                              Done done) {
    static_assert(S::prefetch_depth == 1, "one stage in registers");
    const int warp = uniform(thread() / kTeam);
    const int k_warp = S::k_warps == 1 ? 0 : warp / S::row_warps;
    const int own = own_stages<S>(k_warp), all = times * S::stages;
    const FragmentOffset<S> offset = fragment_offset<S>(ring);
    const bool gives = lane() == 0;
    WeightFragment<S>& f = first.v[0];
    Column<S> x = take(0, 0);
    HeldStage next = {nullptr, nullptr};  // the first stage went back when it was taken
    bool here = all > 1 && stage_here_yet(ring);
    int n = 0, inside = 0;  // the expert, and the stage of it
    KIE_NO_UNROLL for (int stage = 1; stage <= all; ++stage) {
        const bool more = stage < all, some = !S::uneven || inside < own;
        Slot* const read = next.slot;
        if (more) next = hold_stage(ring, S::stage_bytes, here);
        if (stage > 1) give_back(read, gives);
        here = stage + 1 < all && stage_here_yet(ring);
        if (some && more) {
            add_and_load<S>(s, f, x, next.bytes, offset);
        } else if (some) {
            add_fragment<S>(s, f, x);
        } else if (more) {
            KIE_UNROLL for (int i = 0; i < kScaleRuns<S>; ++i)
                load_run<S>(f, next.bytes, offset, i);
        }
        const int of = n;
        if (++inside == S::stages) {
            ++n, inside = 0;
            done(of, s);
        }
        if (more) x = take(n, inside);
    }
}
// Which of an expert's pairs is a column's, where it has one.
KIE_DEVICE int pair_of(const RoutedExpert& e, int column) {
    return e.first + count_ones(e.columns & ((1u << column) - 1));
}
KIE_DEVICE bool has_column(const RoutedExpert& e, int column) {
    return (e.columns >> column & 1) != 0;
}

// Sums of a stack: [k-warp][pair, counted from `from`][row].
template <class S>
KIE_DEVICE void leave_pairs(const Block& b, Sums<S>& s, float* part, int stack, int from,
                            int most) {
    const int me = thread(), warp = me / kTeam, my = me % kTeam, g = my / 4, t = my % 4;
    const int row_warp = S::row_warps == 1 ? 0 : warp % S::row_warps;
    const int k_warp = S::k_warps == 1 ? 0 : warp / S::row_warps;
    float* its = part + k_warp * (most * S::piece_rows);
    KIE_UNROLL for (int i = 0; i < S::tiles; ++i) {
        const int pair = (row_warp * S::tiles + i) * 8 + g;
        const int piece = S::pieces == 1 ? 0 : pair / (S::piece_rows / 2);
        const int row = 2 * (S::pieces == 1 ? pair : pair % (S::piece_rows / 2));
        if (pair < S::row_pairs) {
            const RoutedExpert e = routed_expert(b, stack * S::pieces + piece);
            KIE_UNROLL for (int j = 0; j < 2; ++j) if (has_column(e, 2 * t + j)) *
                (u64*)(its + (pair_of(e, 2 * t + j) - from) * S::piece_rows + row) =
                (u64)bits(s.v[i][2 + j]) << 32 | bits(s.v[i][j]);
        }
        KIE_UNROLL for (int j = 0; j < 4; ++j) s.v[i][j] = 0;
    }
}
// Activations of some pairs: two neighbouring features make a word.
template <class C>
KIE_DEVICE void publish_pairs(const DecodeArgs& args, const Block& b, int layer, const float* part,
                              int from, int to) {
    using S = typename C::StackedGu;
    constexpr int kOfPair = S::piece_rows / 4;
    u64* act = args.ll_words + kAtAct + buffer_of(layer, b.lane_index) * kVecF;
    KIE_NO_UNROLL for (int item = thread(); item < (to - from) * kOfPair; item += kThreads) {
        const int slot = item / kOfPair, word = item % kOfPair;
        const RoutedPair p = routed_pair(b, from + slot);
        const float factor = chosen_factor(b, p.column, p.n);
        const float scale = rms_scale(b, p.column);
        float v[4] = {0, 0, 0, 0};
        KIE_UNROLL for (int k = 0; k < S::k_warps; ++k) {
            const Quad q = *(const Quad*)(part + (k * C::kBatch + slot) * S::piece_rows + 4 * word);
            KIE_UNROLL for (int j = 0; j < 4; ++j) v[j] += number(q.v[j]);
        }
        if constexpr (C::kExpertBias) {
            const float* bias = extras_of(args, b, layer) + C::kAtGateUpBias +
                                (p.expert * kBlocksPerLane + b.block_in_lane) * S::piece_rows +
                                4 * word;
            KIE_UNROLL for (int j = 0; j < 4; ++j) v[j] = fma_f(v[j], scale, bias[j]);
        } else {
            KIE_UNROLL for (int j = 0; j < 4; ++j) v[j] *= scale;
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
    using S = typename C::StackedGu;
    const int g = (int)lane() % kTeam / 4, t = (int)lane() % 4;
    const int k_warp = S::k_warps == 1 ? 0 : (int)uniform(thread() / kTeam) / S::row_warps;
    const u8* mine =
        b.shared + kShXa + (vector_of(g) * kStrideA + k_warp * S::pairs * 32 + 8 * t) * 2;
    const int times = ((int)routed_experts(b) + S::pieces - 1) / S::pieces;
    const auto pairs_before = [&](int stack) { return routed_expert(b, stack * S::pieces).first; };
    float *part = (float*)(b.shared + kShPartA),
          *other = part + S::k_warps * C::kBatch * S::piece_rows;
    int from = 0, to = pairs_before(1);
    Prefetched<S> first;
    prefetch_weights<S>(ring, first);
    Sums<S> s = no_sums<S>();
    multiply_list<S>(
        s, ring, first, times,
        [&](int, int stage) { return take_column<S>(mine + stage * (S::chunk * 64)); },
        [&](int stack, Sums<S>& sums) {
            leave_pairs<S>(b, sums, part, stack, from, C::kBatch);
            const int next = stack + 1 < times ? pairs_before(stack + 2) : 0;
            if (stack + 1 < times && next - from <= C::kBatch) {
                to = next;
                return;
            }
            join_wave();
            sync_consumers<kThreads>();
            publish_pairs<C>(args, b, layer, part, from, to);
            float* const full = part;
            part = other, other = full;
            from = to, to = next;
        });
}

// A warp's share of the activations of the next kGathered pairs, on their way into shared memory.
template <class C>
struct PairWords {
    using S = typename C::TilingDown;
    // Words of a warp's columns; two are loaded at once.
    static constexpr int kWords = C::kFfn / 2, kShare = S::pairs * 16,
                         kItems = C::kGathered * (kShare / 2),
                         kLoads = (kItems + kTeam - 1) / kTeam, kPlaces = kColumns + C::kGathered;
    static_assert(kWords % 2 == 0, "pairs of words");
    u64 v[kLoads][2];
    const u64* act;
    u32* x;
    int share, pairs, next;  // the warp's first word; pairs in all, and in shared memory

    KIE_DEVICE PairWords(const DecodeArgs& args, const Block& b, int layer) {
        act = args.ll_words + kAtAct + buffer_of(layer, b.lane_index) * kVecF;
        x = (u32*)(b.shared + kShXb);
        const int warp = (int)uniform(thread() / kTeam);
        share = S::k_warps == 1 ? 0 : warp / S::row_warps * kShare;
        // Of warps that have the same columns one takes them.
        pairs = S::row_warps > 1 && warp % S::row_warps != 0 ? 0 : live_of(b) * C::kChosen;
        next = 0;
    }
    // visit(i, pair, word) of each of the lane's loads.
    template <class F>
    KIE_DEVICE void each(F visit) const {
        KIE_UNROLL for (int i = 0; i < kLoads; ++i) {
            const int item = i * kTeam + (int)lane() % kTeam;
            const int pair = next + item / (kShare / 2), word = share + item % (kShare / 2) * 2;
            if (item < kItems && pair < pairs && word < kWords) visit(i, pair, word);
        }
    }
    KIE_DEVICE void load(const Block& b, int i, int pair, int word) {
        const RoutedPair p = routed_pair(b, pair);
        load_words(act + (long)p.column * C::kWordsF + p.n * kWords + word, v[i][0], v[i][1]);
    }
    KIE_DEVICE void ask(const Block& b) {
        each([&](int i, int pair, int word) { load(b, i, pair, word); });
    }
    // Those that were asked for into their places, and asks for the next ones.
    KIE_DEVICE void take(Watch& watch, const Block& b, int layer) {
        watch.polls = 0;
        for (;;) {
            u32 late = 0;
            each([&](int i, int, int) {
                late |= (seqno_of(v[i][0]) ^ b.seqno) | (seqno_of(v[i][1]) ^ b.seqno);
            });
            if (late == 0 || kNoWaits ||
                wait_expired(watch, layer << 4 | 6, b.seqno, b.seqno ^ late))
                break;
            each([&](int i, int pair, int word) {
                if (seqno_of(v[i][0]) != b.seqno || seqno_of(v[i][1]) != b.seqno)
                    load(b, i, pair, word);
            });
        }
        meet();
        each([&](int i, int pair, int word) {
            *(u64*)(x + pair % kPlaces * (C::kStrideAct / 2) + word) = v[i][1] << 32 | (u32)v[i][0];
        });
        meet();
        next += C::kGathered;
        ask(b);
    }
    // Who reads what is taken here.
    static KIE_DEVICE void meet() {
        join_wave();
        if (S::row_warps > 1)
            sync_consumers<kThreads>();
        else
            sync_warp();
    }
};
template <class C>
KIE_DEVICE Sums<typename C::TilingDown> multiply_down_columns(
    Ring& ring, Watch& watch, Prefetched<typename C::TilingDown>& first, const DecodeArgs& args,
    const Block& b, int layer, const Sums<typename C::TilingDown>& shared) {
    using S = typename C::TilingDown;
    const int g = (int)lane() % kTeam / 4, t = (int)lane() % 4;
    const int k_warp = S::k_warps == 1 ? 0 : (int)uniform(thread() / kTeam) / S::row_warps;
    const int own = own_stages<S>(k_warp);
    const u8* mine = b.shared + kShXb + (k_warp * S::pairs * 32 + 8 * t) * 2;
    PairWords<C> words(args, b, layer);
    words.ask(b);
    // What the shared expert's is made of has been used.
    if (C::kShared) sync_consumers<kThreads>();
    RoutedExpert e = {0, 0, 0}, next = routed_expert(b, 0);  // the one behind it
    Sums<S> all = no_sums<S>();
    multiply_list<S>(
        all, ring, first, (int)routed_experts(b),
        [&](int n, int stage) {
            if (stage == 0) {
                e = next, next = routed_expert(b, n + 1);
                const int behind = e.first + count_ones(e.columns);
                while (words.next < behind) words.take(watch, b, layer);
            }
            // A column that did not choose the expert adds zeros, which leave a sum as it is.
            Column<S> x;
            KIE_UNROLL for (int c = 0; c < S::chunk; ++c) x.v[c] = {{0, 0, 0, 0}};
            if (has_column(e, g) && (!S::uneven || stage < own))
                x = take_column<S>(mine + (pair_of(e, g) % PairWords<C>::kPlaces * C::kStrideAct +
                                           stage * (S::chunk * 32)) *
                                              2);
            return x;
        },
        [](int, Sums<S>&) {});
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
