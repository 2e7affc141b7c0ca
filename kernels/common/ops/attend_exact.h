// Attention where numbers have two parts (ops/parts.h): keys, values and weights are floats, and so
// are the products, outside of matrix units. Pages come by loads, those of the newest position
// after it has been stored.
//   partial = softmax(q k / sqrt(d)) v over the pages that a block owns, as in attend.h
// A page has 64 keys of floats, then 64 values, row after row. Traffic: 2 * positions * head_dim *
// 4 bytes a kv head.
#pragma once

#include "args.h"
#include "block.h"
#include "exchange.h"
#include "lowered.h"
#include "ops/attend.h"
#include "ops/parts.h"
#include "pages.h"
#include "platform.h"
#include "shape.h"

// What warps leave for each other behind the query heads: of each head on which factor earlier sums
// shrink (of two pages in turn), 1 / the sum of exponentials, and its log2.
constexpr int kStatKeep = 0, kStatInverse = 16, kStatLse = 24;
template <class C>
KIE_DEVICE float* stats_of(u8* shared) {
    static_assert(2 * C::kHeadDim >= kStatLse + 8 && C::kGroup <= 8, "where key and value stood");
    return (float*)(shared + kShQkv) + C::kGroup * C::kHeadDim;
}

// Pair `n` of the query heads, then of the key, then of the value.
template <class C>
KIE_DEVICE u64 take_pair(Watch& watch, const DecodeArgs& args, const AttendAt& at, int n,
                         u32 seqno) {
    float a, b;
    numbers_of(take_halves(watch, head_word<C>(args, at, n), C::kWordsQ, seqno, at.layer << 4 | 1),
               a, b);
    return pack_pair<u64>(a, b);
}
// The new key and value into their page.
template <class C>
KIE_DEVICE void store_exact(Watch& watch, const DecodeArgs& args, const AttendAt& at, int position,
                            const Pages& pages, u32 seqno, u8* shared) {
    const int me = thread();
    u64* heads = (u64*)(shared + kShQkv);
    u64* key =
        (u64*)page_at<C>(args, shared, pages, position / kPage) + position % kPage * C::kHalfHead;
    u64* value = key + C::kPageHalf / 8;
    for (int n = me; n < 2 * C::kHalfHead; n += kThreads) {
        const u64 both = take_pair<C>(watch, args, at, C::kQWords + n, seqno);
        if (n >= C::kHalfHead)
            value[n - C::kHalfHead] = both;
        else if (C::kHeadNorm)
            heads[C::kQWords + n] = both;
        else
            key[n] = both;
    }
    if constexpr (C::kHeadNorm) {
        sync_consumers<kThreads>();
        if (me / kTeam == 0) {
            norm_head<C>(args, shared, at, position, C::kGroup, heads);
            sync_warp();
            for (int n = me; n < C::kHalfHead; n += kTeam) key[n] = heads[C::kQWords + n];
        }
        sync_consumers<kThreads>();
    }
}

// Scores of a page's keys into `scores` ([head][64]): four threads a key.
template <class C>
KIE_DEVICE void score_exact(const u8* page, const float* q, int from, int to, float* scores) {
    const int row = thread() / 4, t = thread() % 4;
    if (row >= kPage) return;
    Quad key[C::kHeadDim / 16];
    KIE_UNROLL for (int j = 0; j < C::kHeadDim / 16; ++j) key[j] =
        load_state(page + (row * C::kHeadDim + 16 * j + 4 * t) * 4);
    KIE_UNROLL for (int head = 0; head < C::kGroup; ++head) {
        float d = 0;
        KIE_UNROLL for (int j = 0; j < C::kHeadDim / 16; ++j) {
            const float* mine = q + head * C::kHeadDim + 16 * j + 4 * t;
            KIE_UNROLL for (int i = 0; i < 4; ++i) d += mine[i] * number(key[j].v[i]);
        }
        d += shuffle_xor(d, 1), d += shuffle_xor(d, 2);
        if (t == 0) scores[head * kPage + row] = row >= from && row < to ? d : -1e30f;
    }
}
// Of a warp's head: scores to weights, in place.
struct Softmax {
    float best, exp_sum;
};
KIE_DEVICE float weigh_exact(Softmax& s, float* scores) {
    const int my = lane();
    float v[2] = {scores[my], scores[kTeam + my]}, top = max_f(v[0], v[1]), sum = 0;
    static_assert(kPage == 2 * kTeam, "two keys a lane");
    KIE_UNROLL for (int m = 16; m > 0; m /= 2) top = max_f(top, shuffle_xor(top, m));
    top = max_f(top, s.best);
    const float keep = exp2_f(s.best - top);
    KIE_UNROLL for (int i = 0; i < 2; ++i) v[i] = exp2_f(v[i] - top), sum += v[i],
                                           scores[i * kTeam + my] = v[i];
    KIE_UNROLL for (int m = 16; m > 0; m /= 2) sum += shuffle_xor(sum, m);
    s.exp_sum = s.exp_sum * keep + sum, s.best = top;
    return keep;
}

// Four features of a head a thread.
template <class C>
struct ExactSums {
    static constexpr int kEach = C::kHeadDim / 4,
                         kCount = (C::kGroup * kEach + kThreads - 1) / kThreads;
    float v[kCount][4];
    // visit(index, head, first feature)
    template <class F>
    static KIE_DEVICE void each(F visit) {
        KIE_UNROLL for (int i = 0; i < kCount; ++i) {
            const int n = i * kThreads + (int)thread();
            if (n < C::kGroup * kEach) visit(i, n / kEach, n % kEach * 4);
        }
    }
};
template <class C>
KIE_DEVICE void add_values_exact(ExactSums<C>& sums, const u8* values, const float* weights, int to,
                                 const float* keep) {
    constexpr int kOnce = 8;
    ExactSums<C>::each([&](int i, int head, int feature) {
        KIE_UNROLL for (int j = 0; j < 4; ++j) sums.v[i][j] *= keep[head];
        KIE_NO_UNROLL for (int first = 0; first < to; first += kOnce) {
            Quad v[kOnce];
            // What stands behind the last position may be no number.
            KIE_UNROLL for (int n = 0; n < kOnce; ++n) v[n] =
                load_state(values + (min_i(first + n, to - 1) * C::kHeadDim + feature) * 4);
            KIE_UNROLL for (int n = 0; n < kOnce; ++n) {
                const float w = weights[head * kPage + first + n];
                KIE_UNROLL for (int j = 0; j < 4; ++j) sums.v[i][j] += w * number(v[n].v[j]);
            }
        }
    });
}

template <class C>
KIE_DEVICE void attend_exact(Watch& watch, const DecodeArgs& args, const Layer& layer,
                             const AttendAt& at, const PageSpan& span, u32 seqno, u8* shared) {
    const int me = thread(), warp = me / kTeam;
    u64* heads = (u64*)(shared + kShQkv);
    float* stats = stats_of<C>(shared);
    const Pages pages = {at.layer, at.lane_index * C::kKvHeads + at.kv_head, at.column};
    for (int n = me; n < C::kQWords; n += kThreads)
        heads[n] = take_pair<C>(watch, args, at, n, seqno);
    sync_consumers<kThreads>();
    if constexpr (C::kHeadNorm) {
        if (warp < C::kGroup) norm_head<C>(args, shared, at, span.position, warp, heads);
        sync_consumers<kThreads>();
    }
    Softmax mine = {-1e30f, 0};
    ExactSums<C> sums;
    ExactSums<C>::each(
        [&](int i, int, int) { KIE_UNROLL for (int j = 0; j < 4; ++j) sums.v[i][j] = 0; });
    const int lowest = layer.window > 0 ? span.position - (int)layer.window : -1;
    int page = first_page<C>(span, at.split, at.shift);
    KIE_NO_UNROLL for (int turn = 0; page <= span.last; ++turn, page += C::kSplitsMax) {
        const u8* keys = page_at<C>(args, shared, pages, page);
        const int first = page * kPage, to = min_i(span.position + 1 - first, kPage);
        float* scores = (float*)(shared + kShScores) + turn % 2 * (C::kGroup * kPage);
        float* keep = stats + kStatKeep + turn % 2 * 8;
        score_exact<C>(keys, (const float*)heads, lowest + 1 - first, to, scores);
        sync_consumers<kThreads>();
        if (warp < C::kGroup) {
            const float factor = weigh_exact(mine, scores + warp * kPage);
            if (lane() == 0) keep[warp] = factor;
        }
        sync_consumers<kThreads>();
        add_values_exact<C>(sums, keys + C::kPageHalf, scores, to, keep);
    }
    if (warp < C::kGroup && lane() == 0)
        stats[kStatInverse + warp] = reciprocal_f(mine.exp_sum),
                             stats[kStatLse + warp] = mine.best + log2_f(mine.exp_sum);
    sync_consumers<kThreads>();
    u64* to = partial_at<C>(args, at);
    ExactSums<C>::each([&](int i, int head, int feature) {
        u64* line = to + head * C::kPartialHead + feature / 16 * kPartialLine;
        const float by = stats[kStatInverse + head];
        float* v = sums.v[i];
        KIE_UNROLL for (int j = 0; j < 4; j += 2)
            publish(line + (feature + j) % 16 / 2, C::kPartialWords,
                    halves_of(v[j] * by, v[j + 1] * by), seqno);
        if (feature % 16 == 0) publish(line + kPartialLse, bits(stats[kStatLse + head]), seqno);
    });
}

// Attention of this block's share of pages, for each column.
template <class C>
KIE_DEVICE void attend_columns_exact(Watch& watch, const DecodeArgs& args, const Block& b,
                                     int layer) {
    const int kv_head = b.block_in_lane / C::kSplitBlocks,
              split = b.block_in_lane % C::kSplitBlocks;
    if (split >= C::kSplitsMax || kv_head >= C::kKvHeads) return;
    const Layer& l = layer_of(b, layer);
    KIE_NO_UNROLL for (int c = 0; c < live_of(b); ++c) {
        const int position = position_at(args, b.shared, b.step, c),
                  shift = shift_at(args, b.shared, c);
        if ((position / kPage + shift) % C::kSplitsMax != split) continue;
        const Pages pages = {layer, b.lane_index * C::kKvHeads + kv_head, c};
        store_exact<C>(watch, args, {layer, b.lane_index, kv_head, split, c, shift}, position,
                       pages, b.seqno, b.shared);
    }
    // Columns may be positions of one sequence.
    sync_consumers<kThreads>();
    KIE_NO_UNROLL for (int c = 0; c < live_of(b); ++c) {
        const int shift = shift_at(args, b.shared, c);
        const PageSpan span = pages_of(l, (int)position_at(args, b.shared, b.step, c));
        if (first_page<C>(span, split, shift) > span.last) continue;
        attend_exact<C>(watch, args, l, {layer, b.lane_index, kv_head, split, c, shift}, span,
                        b.seqno, b.shared);
        sync_consumers<kThreads>();  // the heads have been used
    }
}
