// The mlp of a layer with experts: for each chosen one gate and up as ops/project.h has them, then
// one product with all their activations side by side.
//   act[n] = factor_n activation(W0 x + b0, W1 x + b1)   of expert n of the list, as one vector
//   out    = sum over n of W_n act[n] + factor_n b_n
// A block has the same rows of every expert, so whichever are chosen its stages are as many.
// Columns go one after another, each with its own list: bits do not depend on neighbours. Traffic:
// the chosen experts' bytes, once a column.
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
// The product with one column, for all columns of the matrix unit alike; its parts are `stride`
// halves apart.
template <class S>
KIE_DEVICE Sums<S> multiply_sole(Ring& ring, const u8* x, int stride) {
    Prefetched<S> prefetched;
    prefetch_weights<S>(ring, prefetched);
    return multiply<S>(ring, prefetched, x, kParts == 1 ? 0 : stride);
}

template <class C>
KIE_DEVICE void step_experts_gate_up(Ring& ring, const DecodeArgs& args, Block& b, int layer) {
    using S = typename C::TilingGu;
    u64* to = args.ll_words + kAtAct + buffer_of(layer, b.lane_index) * kVecF;
    int turn = 0;  // who reads parts of one expert may still do so when the next one's are left
    KIE_NO_UNROLL for (int c = 0; c < live_of(b); ++c) {
        KIE_NO_UNROLL for (int n = 0; n < C::kChosen; ++n, turn ^= 1) {
            float bias[S::items][2];
            if constexpr (C::kExpertBias) {
                const float* from =
                    extras_of(args, b, layer) + C::kAtGateUpBias +
                    (chosen_expert(b, c, n) * kBlocksPerLane + b.block_in_lane) * S::rows;
                each_item<S>([&](int item, int pair, int, bool live) {
                    KIE_UNROLL for (int i = 0; i < 2; ++i) bias[item][i] =
                        live ? from[2 * pair + i] : 0;
                });
            }
            Sums<S> s = multiply_sole<S>(ring, b.shared + kShXa + c * (kStrideA * 2), kStrideA);
            const float factor = chosen_factor(b, c, n);
            finish<S>(
                s, (float*)(b.shared + kShPartA) + turn * S::part_floats,
                [&](int item, int pair, int column, float v0, float v1, bool live, bool leader) {
                    const float scale = rms_scale(b, c);
                    v0 *= scale, v1 *= scale;
                    if constexpr (C::kExpertBias) v0 += bias[item][0], v1 += bias[item][1];
                    const float y = gated<C>(v0, v1) * factor;
                    const float next = shuffle_xor(y, neighbour<S>());
                    const int at = b.block_in_lane * (S::rows / 4) + pair / 2;
                    if (live && leader && pair % 2 == 0 && column == c && at < C::kFfn / 2)
                        publish(to + (long)c * C::kWordsF + n * (C::kFfn / 2) + at, C::kWordsF,
                                halves_of(y, next), b.seqno);
                });
        }
    }
}

// A column's results among those of all.
template <class S>
KIE_DEVICE void take_sums(Sums<S>& all, const Sums<S>& one, int column) {
    const int t = (int)thread() % 4;
    KIE_UNROLL for (int i = 0; i < S::tiles; ++i) {
        KIE_UNROLL for (int j = 0; j < 4; ++j) {
            if (kColumns == 1 || 2 * t + j % 2 == column) all.v[i][j] += one.v[i][j];
        }
    }
}
template <class C>
KIE_DEVICE Sums<typename C::TilingDown> multiply_experts(Ring& ring, Watch& watch,
                                                         const DecodeArgs& args, const Block& b,
                                                         int layer) {
    using S = typename C::TilingDown;
    constexpr int kShare = C::kChosen * C::kFfn / 2 / kWarps, kStride = C::kChosen * C::kFfn;
    const int first = (int)(thread() / kTeam) * kShare;
    const u64* act = args.ll_words + kAtAct + buffer_of(layer, b.lane_index) * kVecF;
    u32* x = (u32*)(b.shared + kShXb) + first;
    Sums<S> all;
    KIE_UNROLL for (int i = 0; i < S::tiles; ++i) {
        KIE_UNROLL for (int j = 0; j < 4; ++j) all.v[i][j] = 0;
    }
    KIE_NO_UNROLL for (int c = 0; c < live_of(b); ++c) {
        // The vector that stood here has been used.
        if (kOneVector || c > 0) sync_consumers<kThreads>();
        Squares none;
        gather<kShare, false>(watch, act + (long)c * C::kWordsF + first, C::kWordsF, b.seqno,
                              layer << 4 | 6, 1, nullptr, x, kParts == 1 ? 0 : kStride / 2, none.v);
        sync_consumers<kThreads>();
        KIE_NO_UNROLL for (int n = 0; n < C::kChosen; ++n) take_sums<S>(
            all, multiply_sole<S>(ring, b.shared + kShXb + n * (C::kFfn * 2), kStride), c);
    }
    return all;
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
