// The mlp of a layer with experts: gate and up of all that were chosen, one after another as one
// stream of stages, then one product with all their activations side by side.
//   act[n] = factor_n activation(W0 x + b0, W1 x + b1)   of expert n of the list, as one vector
//   out    = sum over n of W_n act[n] + factor_n b_n
// A block has the same rows of every expert, so whichever are chosen its stages are as many.
//
// Of several columns each expert that any of them chose comes once (experts_columns.h), and is
// multiplied with all of them side by side: a column's products are its own, and those of an expert
// that it did not choose are dropped, so its bits do not depend on its neighbours.
#pragma once

#include "args.h"
#include "block.h"
#include "exchange.h"
#include "lowered.h"
#include "ops/gate.h"
#include "ops/gather.h"
#include "ops/matvec.h"
#include "ops/residual.h"
#include "ops/route.h"
#include "platform.h"
#include "ring.h"
#include "shape.h"

static_assert(!kHasExperts || kParts == 1 || kColumns == 1, "one vector, or the parts of one");
// The first stages of a product with a column's experts, in registers before its vector is there.
template <class S, int kTimes>
struct ChosenStages {
    static constexpr int kAll = kTimes * S::stages, kDepth = min_i(kPrefetchDepth, kAll);
    WeightFragment<S> v[kDepth];
};
template <class S, int kTimes>
KIE_DEVICE void prefetch_chosen(Ring& ring, ChosenStages<S, kTimes>& first) {
    const FragmentOffset<S> offset = fragment_offset<S>(ring);
    KIE_UNROLL for (int i = 0; i < ChosenStages<S, kTimes>::kDepth; ++i)
        load_fragment<S>(ring, first.v[i], false, offset);
}
// One vector's product with a column's experts, or stacks of some (lower/tiling.rs), whose stages
// follow each other like those of one matrix: while an expert's last ones are multiplied, the next
// one's are on their way into registers. `x`: the vector, for all columns of the matrix unit alike,
// its parts `stride` halves apart; the next expert's begins `step` halves behind. done(n, sums)
// after each expert; it may clear the sums.
template <class S, int kTimes, class F>
KIE_DEVICE Sums<S> multiply_chosen(Ring& ring, ChosenStages<S, kTimes>& first, const u8* x,
                                   int stride, int step, F done) {
    using Of = ChosenStages<S, kTimes>;
    constexpr int kAll = Of::kAll, kMany = Of::kDepth, kStep = S::chunk * 64;
    const int me = thread(), warp = uniform(me / kTeam), my = me % kTeam, t = my % 4;
    const int k_warp = S::k_warps == 1 ? 0 : warp / S::row_warps;
    const int vector = kParts == 1 ? 0 : vector_of(my / 4);
    const u8* mine = x + (vector * stride + k_warp * S::pairs * 32 + 8 * t) * 2;
    const int own = own_stages<S>(k_warp), next_expert = 2 * step - (S::stages - 1) * kStep;
    const FragmentOffset<S> offset = fragment_offset<S>(ring);
    Sums<S> s;
    KIE_UNROLL for (int i = 0; i < S::tiles; ++i) {
        KIE_UNROLL for (int j = 0; j < 4; ++j) s.v[i][j] = 0;
    }
    int n = 0, inside = 0;  // the expert, and the stage of it
    const auto has_units = [&]() { return !S::uneven || inside < own; };
    const auto go_on = [&]() {
        if (++inside < S::stages)
            mine += kStep;
        else
            ++n, inside = 0, mine += next_expert;
    };
    if constexpr (kMany > 1) {
        Column<S> next;
        if (has_units()) next = take_column<S>(mine);
        KIE_NO_UNROLL for (int stage = 0; stage < kAll; stage += kMany) {
            KIE_UNROLL for (int i = 0; i < kMany; ++i) {
                if (kAll % kMany != 0 && stage + i >= kAll) continue;
                const int of = n;
                const bool some = has_units(), last = inside + 1 == S::stages;
                const Column<S> now = next;
                go_on();
                if (stage + i + 1 < kAll && has_units()) next = take_column<S>(mine);
                if (some) add_fragment<S>(s, first.v[i], now);
                if (stage + i + kMany < kAll) load_fragment<S>(ring, first.v[i], false, offset);
                if (last) done(of, s);
            }
        }
        return s;
    }
    // Where a warp has no units it reads what it had, or the vector's first columns.
    const u8* from = has_units() ? mine : mine - k_warp * (S::pairs * 64);
    WeightFragment<S>& f = first.v[0];
    Column<S> column = take_column<S>(from);
    const bool gives = lane() == 0;
    Slot* held = nullptr;  // the first stage went back when it was taken
    KIE_NO_UNROLL for (int stage = 1; stage < kAll; ++stage) {
        const HeldStage next = hold_stage(ring, S::stage_bytes);
        give_back(held, gives && stage > 1);
        held = next.slot;
        const int of = n;
        const bool some = has_units(), last = inside + 1 == S::stages;
        go_on();
        if (has_units()) from = mine;
        if (some) {
            add_and_load<S>(s, f, column, next.bytes, offset);
        } else {
            KIE_UNROLL for (int i = 0; i < kScaleRuns<S>; ++i)
                load_run<S>(f, next.bytes, offset, i);
        }
        column = take_column<S>(from);
        if (last) done(of, s);
    }
    if (kAll > 1) give_back(held, gives);
    if (has_units()) add_fragment<S>(s, f, column);
    done(n, s);
    return s;
}

// Sums of what warps that share columns leave for each other: [stack][k-warp][row]. Whoever adds
// them up takes the rows of two features, which make a word.
template <class C>
struct ActivationWord {
    using S = typename C::StackedGu;
    static constexpr int kOfExpert = S::piece_rows / 4, kAll = C::kChosen * kOfExpert,
                         kEach = (kAll + kThreads - 1) / kThreads;
    static_assert(S::piece_rows % 4 == 0, "words of two features");
    // visit(i, n, word): the thread's i-th one, word `word` of the block's of expert n.
    template <class F>
    static KIE_DEVICE void each(F visit) {
        KIE_UNROLL for (int i = 0; i < kEach; ++i) {
            const int item = i * kThreads + (int)thread();
            if (item < kAll) visit(i, item / kOfExpert, item % kOfExpert);
        }
    }
};
template <class S>
KIE_DEVICE void leave_sums(Sums<S>& s, float* part) {
    const int me = thread(), warp = me / kTeam, my = me % kTeam, g = my / 4;
    const int row_warp = S::row_warps == 1 ? 0 : warp % S::row_warps;
    const int k_warp = S::k_warps == 1 ? 0 : warp / S::row_warps;
    add_parts<S>(s);
    KIE_UNROLL for (int i = 0; i < S::tiles; ++i) {
        const int pair = (row_warp * S::tiles + i) * 8 + g;
        if (my % 4 == 0 && pair < S::row_pairs)
            *(u64*)(part + k_warp * S::rows + 2 * pair) =
                (u64)bits(s.v[i][2]) << 32 | bits(s.v[i][0]);
        KIE_UNROLL for (int j = 0; j < 4; ++j) s.v[i][j] = 0;
    }
}
template <class C>
KIE_DEVICE void step_experts_gate_up_alone(Ring& ring, const DecodeArgs& args, Block& b,
                                           int layer) {
    using S = typename C::StackedGu;
    using Words = ActivationWord<C>;
    constexpr int kStacks = C::kChosen / S::pieces;
    u64* to = args.ll_words + kAtAct + buffer_of(layer, b.lane_index) * kVecF;
    float bias[Words::kEach][4];
    if constexpr (C::kExpertBias)
        Words::each([&](int i, int n, int word) {
            const float* from =
                extras_of(args, b, layer) + C::kAtGateUpBias +
                (chosen_expert(b, 0, n) * kBlocksPerLane + b.block_in_lane) * S::piece_rows +
                4 * word;
            KIE_UNROLL for (int j = 0; j < 4; ++j) bias[i][j] = from[j];
        });
    float* part = (float*)(b.shared + kShPartA);
    ChosenStages<S, kStacks> first;
    prefetch_chosen(ring, first);
    multiply_chosen(ring, first, b.shared + kShXa, kStrideA, 0, [&](int n, Sums<S>& s) {
        leave_sums<S>(s, part + n * (S::k_warps * S::rows));
    });
    sync_consumers<kThreads>();
    Words::each([&](int i, int n, int word) {
        const float factor = chosen_factor(b, 0, n);
        const float scale = rms_scale(b, 0);
        float v[4] = {0, 0, 0, 0};
        KIE_UNROLL for (int k = 0; k < S::k_warps; ++k) {
            const Quad q = *(const Quad*)(part + (n / S::pieces * S::k_warps + k) * S::rows +
                                          n % S::pieces * S::piece_rows + 4 * word);
            KIE_UNROLL for (int j = 0; j < 4; ++j) v[j] += number(q.v[j]);
        }
        KIE_UNROLL for (int j = 0; j < 4; ++j) {
            if constexpr (C::kExpertBias)
                v[j] = fma_f(v[j], scale, bias[i][j]);
            else
                v[j] *= scale;
        }
        const int at = b.block_in_lane * (S::piece_rows / 4) + word;
        if (at < C::kFfn / 2)
            publish(to + n * (C::kFfn / 2) + at, C::kWordsF,
                    halves_of(gated<C>(v[0], v[1]) * factor, gated<C>(v[2], v[3]) * factor),
                    b.seqno);
    });
}
template <class S>
KIE_DEVICE Sums<S> no_sums() {
    Sums<S> s;
    KIE_UNROLL for (int i = 0; i < S::tiles; ++i) {
        KIE_UNROLL for (int j = 0; j < 4; ++j) s.v[i][j] = 0;
    }
    return s;
}
template <class S>
KIE_DEVICE void add_sums(Sums<S>& s, const Sums<S>& others) {
    KIE_UNROLL for (int i = 0; i < S::tiles; ++i) {
        KIE_UNROLL for (int j = 0; j < 4; ++j) s.v[i][j] += others.v[i][j];
    }
}
template <class C>
using ChosenOfDown = ChosenStages<typename C::TilingDown, C::kChosen>;
// `shared`: the shared expert's sums, or zeros.
template <class C>
KIE_DEVICE Sums<typename C::TilingDown> multiply_down_alone(
    Ring& ring, Watch& watch, ChosenOfDown<C>& first, const DecodeArgs& args, const Block& b,
    int layer, const Sums<typename C::TilingDown>& shared) {
    using S = typename C::TilingDown;
    constexpr int kStride = C::kChosen * C::kFfn,
                  kGatherers = kStride % (4 * kWarps) == 0 ? kWarps : 8,
                  kShare = kStride / 2 / kGatherers;
    const int from = (int)(thread() / kTeam) * kShare;
    const u64* words = args.ll_words + kAtAct + buffer_of(layer, b.lane_index) * kVecF;
    // What stood there has been used by all when gate and up's sums were, but for the shared
    // expert's.
    if (C::kShared) sync_consumers<kThreads>();
    Squares none;
    if (from < kStride / 2)
        gather<kShare, false>(watch, words + from, C::kWordsF, b.seqno, layer << 4 | 6, 1, nullptr,
                              (u32*)(b.shared + kShXb) + from, kParts == 1 ? 0 : kStride / 2,
                              none.v);
    sync_consumers<kThreads>();
    Sums<S> s =
        multiply_chosen(ring, first, b.shared + kShXb, kStride, C::kFfn, [](int, Sums<S>&) {});
    if constexpr (C::kShared) add_sums<S>(s, shared);
    return s;
}

// What the experts' output has besides products: biases by their factors.
template <class C>
struct DownAdjust {
    using S = typename C::TilingDown;
    float v[S::items][2];
    KIE_DEVICE void ask(const DecodeArgs& args, const Block& b, int layer) {
        if constexpr (C::kExpertBias) {
            const float* from =
                extras_of(args, b, layer) + C::kAtDownBias + b.block_in_lane * S::rows;
            each_handed<S>([&](int item, int pair, int column, bool live) {
                v[item][0] = v[item][1] = 0;
                if (!live || column >= live_of(b)) return;
                KIE_UNROLL for (int n = 0; n < C::kChosen; ++n) {
                    const u32 id = chosen_expert(b, column, n);
                    const float* its = from + id * (kBlocksPerLane * S::rows) + 2 * pair;
                    const float factor = chosen_factor(b, column, n);
                    v[item][0] += factor * its[0], v[item][1] += factor * its[1];
                }
            });
        }
    }
    KIE_DEVICE void operator()(int item, float& v0, float& v1) const {
        if constexpr (C::kExpertBias) v0 += v[item][0], v1 += v[item][1];
        scale_output(v0, v1);
    }
};
