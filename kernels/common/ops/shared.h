// The expert that all columns go to, beside those that are chosen: its gate and up while the
// router's logits travel, its down while the chosen ones' activations do, all columns at once.
//   act    = activation(W0 x, W1 x)   behind the activations of the chosen experts
//   output = factor W act   of each column, where its sum with the chosen ones' is made
// factor = 1, or (kSharedScaled) what ops/route.h made of a logit.
#pragma once

#include "args.h"
#include "block.h"
#include "exchange.h"
#include "lowered.h"
#include "ops/gate.h"
#include "ops/gather.h"
#include "ops/matvec.h"
#include "ops/project.h"
#include "ops/route.h"
#include "platform.h"
#include "ring.h"
#include "shape.h"

// A column's activations of the shared expert.
template <class C>
KIE_DEVICE u64* shared_words(const DecodeArgs& args, const Block& b, int layer) {
    return args.ll_words + kAtAct + buffer_of(layer, b.lane_index) * kVecF +
           C::kChosen * (C::kFfn / 2);
}
// The router has met since parts of attention's output were used, which stood where these do.
template <class C>
KIE_DEVICE void step_shared_gate_up(Ring& ring, const DecodeArgs& args, Block& b, int layer) {
    using S = typename C::TilingSharedGu;
    Prefetched<S> prefetched;
    prefetch_weights<S>(ring, prefetched);
    Sums<S> s = multiply<S>(ring, prefetched, b.shared + kShXa, kStrideA);
    u64* to = shared_words<C>(args, b, layer);
    finish<S>(
        s, (float*)(b.shared + kShPartB),
        [&](int, int pair, int column, float v0, float v1, bool live, bool leader) {
            const float scale = rms_scale(b, live ? column : 0);
            const float y = gated<C>(v0 * scale, v1 * scale);
            const float next = shuffle_xor(y, neighbour<S>());
            const int at = b.block_in_lane * (S::rows / 4) + pair / 2;
            u64* words = to + (long)column * C::kWordsF + at;
            if (live && leader && pair % 2 == 0 && column < live_of(b) && at < C::kSharedFfn / 2)
                publish(words, C::kWordsF, halves_of(y, next), b.seqno);
        });
}
// Its part of the mlp's output, in the registers of the chosen experts' sums. The vector's place is
// free: all have met since gate and up were multiplied.
template <class C>
KIE_DEVICE Sums<typename C::TilingDown> multiply_shared(Ring& ring, Watch& watch,
                                                        const DecodeArgs& args, const Block& b,
                                                        int layer) {
    using S = typename C::TilingSharedDown;
    static_assert(S::tiles == C::TilingDown::tiles && S::row_warps == C::TilingDown::row_warps,
                  "sums stand in the same registers");
    constexpr int kShare = C::kSharedFfn / 2 / kWarps;
    Prefetched<S> prefetched;
    prefetch_weights<S>(ring, prefetched);
    const int from = (int)(thread() / kTeam) * kShare;
    Squares none;
    gather<kShare, false>(watch, shared_words<C>(args, b, layer) + from, C::kWordsF, b.seqno,
                          layer << 4 | 6, live_of(b), nullptr, (u32*)(b.shared + kShXb) + from,
                          kStrideB / 2, none.v);
    sync_consumers<kThreads>();
    const Sums<S> s = multiply<S>(ring, prefetched, b.shared + kShXb, kStrideB);
    Sums<typename C::TilingDown> out;
    KIE_UNROLL for (int i = 0; i < S::tiles; ++i) {
        KIE_UNROLL for (int j = 0; j < 4; ++j) {
            out.v[i][j] = s.v[i][j];
            if constexpr (C::kSharedScaled) {
                // As finish() hands columns out.
                const int t = (int)thread() % 4, column = kColumns == 1 ? 0
                                                          : kParts > 1  ? t
                                                                        : 2 * t + j % 2;
                out.v[i][j] *= column < live_of(b) ? chosen_factor(b, column, C::kChosen) : 0.0f;
            }
        }
    }
    return out;
}
