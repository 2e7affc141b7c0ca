// Products with the normed residual: queries, keys and values, rotated; the mlp's gate and up, and
// their activation.
#pragma once

#include "args.h"
#include "block.h"
#include "exchange.h"
#include "lowered.h"
#include "ops/attend.h"
#include "ops/gather.h"
#include "ops/matvec.h"
#include "ops/parts.h"
#include "platform.h"
#include "ring.h"

// The product with a normed vector; the squares are summed where nobody waits for them.
template <class S>
KIE_DEVICE Sums<S> multiply_normed(Ring& ring, Prefetched<S>& prefetched, const Block& b,
                                   Squares& squares) {
    if (S::row_warps > 1) add_squares(b, squares);
    vector_ready<S>();
    const Sums<S> s = multiply<S>(ring, prefetched, b.shared + kShXa, kStrideA);
    if (S::row_warps == 1) add_squares(b, squares);
    return s;
}

template <class C>
KIE_DEVICE void step_qkv(Ring& ring, const DecodeArgs& args, Block& b, int layer, KvFragment<C>& kv,
                         Prefetched<typename C::TilingQkv>& prefetched, Squares& squares) {
    float bias[C::TilingQkv::items][2];
    if constexpr (C::kBias) {
        const float* from = args.biases + layer_of(b, layer).biases +
                            (b.lane_index * kBlocksPerLane + b.block_in_lane) * C::kRowsQkv;
        each_item<typename C::TilingQkv>([&](int item, int pair, int, bool live) {
            KIE_UNROLL for (int i = 0; i < 2; ++i) bias[item][i] = live ? from[2 * pair + i] : 0;
        });
    }
    Sums<typename C::TilingQkv> s =
        multiply_normed<typename C::TilingQkv>(ring, prefetched, b, squares);
    stamp(b, 1);
    if (!kVariableStages) early_page<C>(args, b, layer, kv);
    u64* to = args.ll_words + kAtQkv + buffer_of(layer, b.lane_index) * kVecQ +
              b.block_in_lane * (C::kRowsQkv / 2);
    finish<typename C::TilingQkv>(
        s, (float*)(b.shared + kShPartA),
        [&](int item, int pair, int column, float v0, float v1, bool live, bool leader) {
            const float scale = rms_scale(b, live ? column : 0);
            const u64 turn = ((
                const u64*)(b.shared +
                            C::kShRotations))[live || !kRotationsOwned ? item * kThreads + thread()
                                                                       : 0];
            float c = number((u32)turn), d = number((u32)(turn >> 32));
            if constexpr (C::kBias)
                v0 = v0 * scale + bias[item][0], v1 = v1 * scale + bias[item][1];
            else
                c *= scale, d *= scale;
            if (live && leader && column < live_of(b))
                publish(to + (long)column * C::kWordsQ + pair, C::kWordsQ,
                        halves_of(v0 * c - v1 * d, v0 * d + v1 * c), b.seqno);
        });
    stamp(b, 2);
}
// Rotation of each row pair that this thread will own, for the step's positions; the identity for
// v, and for all where heads have norms: then who takes a head turns it. Each thread keeps its own
// in shared memory. q also takes the softmax's 1 / sqrt(head_dim) and log2 e.
template <class C>
KIE_DEVICE void rotations(const DecodeArgs& args, const Block& b, u32 step) {
    const int live_columns = kLookup ? b.live : live_at(args, step);
    each_item<typename C::TilingQkv>([&](int item, int pair, int column, bool live) {
        const int row = b.block_in_lane * C::kRowsQkv + 2 * pair;
        float c = 1, s = 0;
        if (!C::kHeadNorm && live && row < C::kAttn + C::kKvHeads * C::kHeadDim) {
            const float* r =
                args.rope + C::kRope +
                ((long)position_at(args, b.shared, step, column < live_columns ? column : 0) *
                     (C::kHeadDim / 2) +
                 row % C::kHeadDim / 2) *
                    2;
            c = r[0], s = r[1];
            if (row < C::kAttn) {
                c *= C::kQueryScale, s *= C::kQueryScale;
            }
        }
        if (live || !kRotationsOwned)
            ((u64*)(b.shared + C::kShRotations))[item * kThreads + thread()] =
                (u64)bits(s) << 32 | bits(c);
    });
}

template <class C>
KIE_DEVICE void step_gate_up(Ring& ring, const DecodeArgs& args, Block& b, int layer,
                             Prefetched<typename C::TilingGu>& prefetched, Squares& squares) {
    Sums<typename C::TilingGu> s =
        multiply_normed<typename C::TilingGu>(ring, prefetched, b, squares);
    stamp(b, 8);
    u64* to = args.ll_words + kAtAct + buffer_of(layer, b.lane_index) * kVecF;
    finish<typename C::TilingGu>(
        s, (float*)(b.shared + kShPartA),
        [&](int, int pair, int column, float v0, float v1, bool live, bool leader) {
            const float scale = rms_scale(b, live ? column : 0), gate = v0 * scale, up = v1 * scale;
            const float y = gate * up * reciprocal_f(1.0f + exp2_f(-1.44269504f * gate));
            const float next = shuffle_xor(y, neighbour<typename C::TilingGu>());
            const int n = b.block_in_lane * (C::kRowsGu / 4) + pair / 2,
                      at = C::kDirectDown ? direct_word(n) : n;
            if (live && leader && pair % 2 == 0 && column < live_of(b))
                publish(to + (long)column * C::kWordsF + at, C::kWordsF, halves_of(y, next),
                        b.seqno);
        });
    stamp(b, 9);
}
