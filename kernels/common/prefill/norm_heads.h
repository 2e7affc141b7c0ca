// Norms of heads, where a model has them: a phase between the qkv product, which has left q and k
// as they are, and attention. Each is normed, turned and put back where it was.
#pragma once

#include "lowered.h"
#include "platform.h"
#include "prefill/layout.h"
#include "prefill/tiles.h"
#include "shape.h"
#include "wide.h"

// How a pair of features of a head turns, with the norm's weights on it.
struct Turned {
    float n0, n1, c, s;
    KIE_DEVICE u32 of(float a, float b, float scale, float keep) const {
        a *= scale * n0, b *= scale * n1;
        return pack_half2((a * c - b * s) * keep, (a * s + b * c) * keep);
    }
};
template <class C>
KIE_DEVICE Turned turned_at(const PrefillArgs& args, int layer, bool is_key, int position, int f) {
    const u64 turn =
        ((const u64*)(args.model.rope + C::kRope))[(long)position * (C::kHeadDim / 2) + f / 2];
    Turned r = {0, 0, number((u32)turn), number((u32)(turn >> 32))};
    unpack_half2(
        args.model
            .head_norms[args.model.layers[layer].head_norms + is_key * (C::kHeadDim / 2) + f / 2],
        r.n0, r.n1);
    return r;
}
template <class C>
KIE_DEVICE float head_scale(float squares) {
    return rsqrt_f(squares * (1.0f / C::kHeadDimReal) + kEps);
}
KIE_DEVICE float squares_of(u32 halves) {
    float a, b;
    unpack_half2(halves, a, b);
    return a * a + b * b;
}
// A query head at 16 places, by a warp.
template <class C>
KIE_DEVICE void norm_queries(const PrefillArgs& args, const Chunk& chunk, int layer, int unit,
                             int place) {
    const int my = lane(), g = my / 4, t = my % 4;
    Quad* q =
        (Quad*)(args.scratch + kScrQ + query_at<C>(unit / C::kHeads, unit % C::kHeads, place)) + my;
    Quad v[C::kHeadDim / 16];
    float sum[2] = {0, 0};
    KIE_UNROLL for (int i = 0; i < C::kHeadDim / 16; ++i) {
        v[i] = load_state(q + i * 32);
        KIE_UNROLL for (int n = 0; n < 4; ++n) sum[n % 2] += squares_of(v[i].v[n]);
    }
    KIE_UNROLL for (int r = 0; r < 2; ++r) {
        sum[r] += shuffle_xor(sum[r], 1), sum[r] += shuffle_xor(sum[r], 2);
        sum[r] = head_scale<C>(sum[r]);
    }
    KIE_UNROLL for (int i = 0; i < C::kHeadDim / 16; ++i) {
        KIE_UNROLL for (int n = 0; n < 4; ++n) {
            const int at = min_i(place + g + n % 2 * 8, chunk.to - 1);
            const Turned turned =
                turned_at<C>(args, layer, false, chunk.base + at, 16 * i + n / 2 * 8 + 2 * t);
            float a, b;
            unpack_half2(v[i].v[n], a, b);
            v[i].v[n] = turned.of(a, b, sum[n % 2], C::kQueryScale);
        }
        q[i * 32] = v[i];
    }
}
// A key, by a warp.
template <class C>
KIE_DEVICE void norm_key(const PrefillArgs& args, int layer, int kv_index, int position) {
    constexpr int kHalf = C::kHeadDim / 2, kEach = (kHalf + kTeam - 1) / kTeam;
    u32* k = (u32*)(prefill_page<C>(args, layer, kv_index, position / kPage) +
                    position % kPage * C::kHeadDim * 2);
    const int my = lane();
    u32 v[kEach];
    float sum = 0;
    KIE_UNROLL for (int i = 0; i < kEach; ++i) {
        v[i] = i * kTeam + my < kHalf ? k[i * kTeam + my] : 0;
        sum += squares_of(v[i]);
    }
    KIE_UNROLL for (int m = 1; m < kTeam; m *= 2) sum += shuffle_xor(sum, m);
    KIE_UNROLL for (int i = 0; i < kEach; ++i) {
        const int n = i * kTeam + my;
        if (n >= kHalf) continue;
        float a, b;
        unpack_half2(v[i], a, b);
        k[n] = turned_at<C>(args, layer, true, position, 2 * n).of(a, b, head_scale<C>(sum), 1);
    }
}
// Those of some places, by one of so many blocks.
template <class C>
KIE_DEVICE void norm_heads(const PrefillArgs& args, const Chunk& chunk, const Span& span, int layer,
                           int at, int blocks) {
    const int warps = kWorkers / kTeam, sixteens = over(span.to - span.first, 16),
              from = max_i(span.first, chunk.from), live = of_wave(max_i(span.to - from, 0));
    const int queries = kLanes * C::kHeads * sixteens, all = queries + kLanes * C::kKvHeads * live;
    KIE_NO_UNROLL for (int i = at * warps + thread() / kTeam; i < all; i += blocks * warps) {
        const int n = i - queries;
        if (n < 0)
            norm_queries<C>(args, chunk, layer, i / sixteens, span.first + i % sixteens * 16);
        else
            norm_key<C>(args, layer, n / live, chunk.base + from + n % live);
    }
}
