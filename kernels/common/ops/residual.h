// Products whose outputs change the residual (o, down), and what other lanes and ranks add to it.
#pragma once

#include "args.h"
#include "block.h"
#include "exchange.h"
#include "lowered.h"
#include "ops/all_reduce.h"
#include "ops/gather.h"
#include "ops/matvec.h"
#include "ops/matvec_words.h"
#include "ops/parts.h"
#include "platform.h"
#include "ring.h"
#include "shape.h"

// Residual rows: h += own (+ the other lanes' sums, of this layer or earlier), then publish both.
struct Owned {
    float v[TilingOwned::items][2];
};
// A layer's numbers that are in no product (lower/extras.rs).
KIE_DEVICE const float* extras_of(const DecodeArgs& args, const Block& b, int layer) {
    return args.extras + layer_of(b, layer).extras;
}
// The residual is carried as 2^-s of what it is where that may be beyond halves.
KIE_DEVICE void scale_output(float& v0, float& v1) {
    if (kResidualScaled) v0 *= kResidualScale, v1 *= kResidualScale;
}
// The results that this thread is handed: those that it will own, or (kSpread) copies of them.
template <class S, class F>
KIE_DEVICE void each_handed(F visit) {
    if constexpr (kSpread) {
        const int me = thread(), pair = me % kTeam;
        visit(0, pair, 0, me / kTeam < kRanks && pair < S::row_pairs);
    } else {
        each_item<S>(visit);
    }
}
// What is made of a result before it joins the residual: of attention's output, asked for early,
// ...
template <class C>
struct OutputAdjust {
    using S = typename C::TilingO;
    float v[S::items][2];
    KIE_DEVICE void ask(const DecodeArgs& args, const Block& b, int layer) {
        if constexpr (C::kOutputBias) {
            const float* from =
                extras_of(args, b, layer) + C::kAtOutputBias + b.block_in_lane * S::rows;
            each_handed<S>([&](int item, int pair, int, bool live) {
                KIE_UNROLL for (int i = 0; i < 2; ++i) v[item][i] = live ? from[2 * pair + i] : 0;
            });
        }
    }
    KIE_DEVICE void operator()(int item, float& v0, float& v1) const {
        if constexpr (C::kOutputBias) v0 += v[item][0], v1 += v[item][1];
        scale_output(v0, v1);
    }
};
// ... and of an mlp's that has no bias.
struct DownAsItIs {
    KIE_DEVICE void operator()(int, float& v0, float& v1) const { scale_output(v0, v1); }
};
// `product` is the block's own part of the output.
template <class S, class Product, class Adjust>
KIE_DEVICE void step_residual(Watch& watch, const DecodeArgs& args, Block& b, int kind, int layer,
                              Owned& own, int phase, AllReduce<S>& others, const Adjust& adjust,
                              Product product) {
    const Layer& l = layer_of(b, layer);
    const Reduction r = reduction_of(b, kind, layer);
    others.ask(args, b, r);
    Sums<S> s = product();
    stamp(b, phase);
    const float keep = l.own[kind];
    const bool shares = kLanesAll > 1 && (l.shares >> kind & 1) != 0;
    // Without delay all lanes add the same halves in the same order: the same bits everywhere. But
    // they wait for what others publish in this very step, so their own must be out before.
    const bool alike = r.delay == 0 && keep == 1.0f;
    u64* to = hidden_slot(args, kind, layer, b.lane_index) + b.block_in_lane * (kRowsO / 2);
    u64* share = other_slot(args, kind, layer, b.lane_all) + b.block_in_lane * (kRowsO / 2);
    if (r.delay > 0) others.take(watch, args, b, r);
    Halves mine[S::items];
    float sum[S::items][2];
    KIE_UNROLL for (int i = 0; i < S::items; ++i) mine[i] = {}, sum[i][0] = sum[i][1] = 0;
    const auto give = [&](int item, int pair, int column) {
        if (shares) publish_share(args, share + (long)column * kWordsH + pair, mine[item], b.seqno);
    };
    const bool later = kAllReduceRead == kReadByOwner && r.delay > 0;  // what nobody waits for yet
    finish<S, kSpread ? kRanks : 1>(
        s, (float*)(b.shared + kShPartB),
        [&](int item, int pair, int column, float v0, float v1, bool live, bool leader) {
            adjust(item, v0, v1);
            mine[item] = halves_of(v0, v1), sum[item][0] = v0, sum[item][1] = v1;
            if (live && (leader ? !later : kSpread) && column < live_of(b))
                give(item, pair, column);
        });
    if (r.delay == 0) others.take_undelayed(watch, args, b, r, alike, mine);
    each_owned<S>([&](int item, int pair, int column, bool live, bool leader) {
        float a0 = 0, a1 = 0;
        others.add(b, r, item, pair, column, live, alike, mine[item], a0, a1);
        const bool whole = kLanesAll > 1 && alike;
        own.v[item][0] += whole ? a0 : keep * sum[item][0] + a0;
        own.v[item][1] += whole ? a1 : keep * sum[item][1] + a1;
        if constexpr (kHyperStreams > 1) return;  // it joins the streams first (ops/hyper.h)
        if (!live || !leader || column >= live_of(b)) return;
        const long at = (long)column * kWordsH + pair;
        const Halves both = halves_of(own.v[item][0], own.v[item][1]);
        publish(to + at, kWordsH, both, b.seqno);
        if (later) give(item, pair, column);
        if (kHeadMode != kHeadPerLane && kind == 1 && layer == kLayers - 1)
            KIE_UNROLL for (int part = 0; part < kParts; ++part)
                publish_all(args,
                            last_slot(args, b.lane_all) + b.block_in_lane * (kRowsO / 2) + at +
                                part * (kWordsH / kParts),
                            both.v[part], b.seqno);
    });
    stamp(b, phase + 1);
}
// The output of attention, or of the mlp, of this block's rows.
template <class S, bool kDirect>
KIE_DEVICE Sums<S> multiply_output(Ring& ring, Watch& watch, Prefetched<S>& prefetched,
                                   const Block& b, const u64* words, int stride, u32 where) {
    if constexpr (kDirect) {
        return multiply_words<S>(ring, watch, prefetched, words, stride, b.seqno, where,
                                 live_of(b));
    } else {
        vector_ready<S>();
        return multiply<S>(ring, prefetched, b.shared + kShXb, kStrideB);
    }
}
