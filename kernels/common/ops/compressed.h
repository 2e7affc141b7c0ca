// Attention over a window and compressed entries (DeepSeek-V4): heads share one vector a position,
// key and value at once.
//   q latent, key, values and scores of entries, weights of an indexer = down x   (one product;
//   ranks share the rows, each is told of all)
//   q_h, index queries = up (norm of the q latent);   each head divided by its root mean square
//   out_h = softmax(q_h c / sqrt(kDim), beside it a sink) c   c: chosen entries, then the window
//   grouped = W_g (the heads of group g, turned back)   the operand of the o product
// A block takes a head of a column at a time, its warps share what the head sees.
#pragma once

#include "args.h"
#include "block.h"
#include "chiplets.h"
#include "exchange.h"
#include "lowered.h"
#include "ops/entries.h"
#include "ops/gather.h"
#include "ops/indexer.h"
#include "ops/latent.h"
#include "ops/latent_words.h"
#include "ops/matvec.h"
#include "ops/parts.h"
#include "ops/residual.h"
#include "pages.h"
#include "platform.h"
#include "ring.h"
#include "shape.h"

// A warp's part of a head's output.
template <class C>
struct HeadPart {
    Softmax softmax;
    Row<C::kDim> sum;
};
// A few rows at once: scores, then their values.
template <class C, int kOnce>
KIE_DEVICE void attend_rows(HeadPart<C>& part, const Row<C::kDim>& q, const SeenRow (&rows)[kOnce],
                            int live) {
    using R = Row<C::kDim>;
    Row<C::kDim> k[kOnce];
    KIE_UNROLL for (int n = 0; n < kOnce; ++n)
        R::each([&](int i, int quad) { open_quad(load_seen(rows[n], quad), k[n].v[i]); });
    float score[kOnce], top = part.softmax.best;
    KIE_UNROLL for (int n = 0; n < kOnce; ++n) {
        score[n] = 0;
        R::each([&](int i, int) {
            KIE_UNROLL for (int j = 0; j < R::kOfQuad; ++j) score[n] += q.v[i][j] * k[n].v[i][j];
        });
        KIE_UNROLL for (int m = 16; m > 0; m /= 2) score[n] += shuffle_xor(score[n], m);
        if (n < live) top = max_f(top, score[n]);
    }
    const float keep = exp2_f(part.softmax.best - top);
    part.softmax.best = top, part.softmax.exp_sum *= keep;
    R::each([&](int i, int) {
        KIE_UNROLL for (int j = 0; j < R::kOfQuad; ++j) part.sum.v[i][j] *= keep;
    });
    KIE_UNROLL for (int n = 0; n < kOnce; ++n) {
        if (n >= live) continue;
        const float weight = exp2_f(score[n] - top);
        part.softmax.exp_sum += weight;
        R::each([&](int i, int) {
            KIE_UNROLL for (int j = 0; j < R::kOfQuad; ++j) part.sum.v[i][j] +=
                weight * k[n].v[i][j];
        });
    }
}
// Warps' parts, [warp][kDim] and each one's greatest score and mass, become a head's output, turned
// back.
template <class C>
KIE_DEVICE void join_parts(const DecodeArgs& args, const Block& b, int layer, int column, int head,
                           const float* parts) {
    constexpr int kEach = C::kDim + 2, kStill = (C::kDim - C::kTurned) / 2;
    const float sink = extras_of(args, b, layer)[C::kAtSinks + head];
    const int position = (int)position_at(args, b.shared, b.step, column);
    u64* to = seen_words<C>(args, b, layer, column) + head * (C::kHeadDim / 2);
    float top = sink;
    KIE_UNROLL for (int w = 0; w < kWarps; ++w) top = max_f(top, parts[w * kEach + C::kDim]);
    float by[kWarps], mass = exp2_f(sink - top);
    KIE_UNROLL for (int w = 0; w < kWarps; ++w) {
        by[w] = exp2_f(parts[w * kEach + C::kDim] - top);
        mass += by[w] * parts[w * kEach + C::kDim + 1];
    }
    const float inverse = reciprocal_f(mass);
    KIE_NO_UNROLL for (int n = thread(); n < C::kHeadDim / 2; n += kThreads) {
        float v[2] = {0, 0};
        if (n < C::kDim / 2) {
            KIE_UNROLL for (int w = 0; w < kWarps; ++w) {
                KIE_UNROLL for (int i = 0; i < 2; ++i) v[i] += by[w] * parts[w * kEach + 2 * n + i];
            }
            KIE_UNROLL for (int i = 0; i < 2; ++i) v[i] *= inverse;
            if (n >= kStill) {  // (a, -b), turned, and its b's sign again
                v[1] = -v[1];
                turn_pair<C>(args, position, n - kStill, v[0], v[1]);
                v[1] = -v[1];
            }
        }
        publish(to + n, C::kWordsA, halves_of(v[0], v[1]), b.seqno);
    }
}
// A head of a column. `listed`: the entries that it sees are in the list.
template <class C>
KIE_DEVICE void attend_head(Watch& watch, const DecodeArgs& args, const Block& b, int layer,
                            int column, int head, int entries, bool listed) {
    constexpr int kOnce = 4;
    using R = Row<C::kDim>;
    const int warp = thread() / kTeam, position = (int)position_at(args, b.shared, b.step, column);
    R q;
    const u64* words =
        latent_words<C>(args, b, layer, column) + C::kAtQuery + head * (C::kHeadDim / 2);
    take_pairs(watch, q, C::kWordsQ, b.seqno, layer << 4 | 1,
               [&](int pair) { return words + pair; });
    const float scale = row_scale(q) * C::kQueryScale;
    R::each(
        [&](int i, int) { KIE_UNROLL for (int j = 0; j < R::kOfQuad; ++j) q.v[i][j] *= scale; });
    turn_row<C>(args, q, position);
    HeadPart<C> part = {{-1e30f, 0}, {}};
    clear_row(part.sum);
    const int window = (int)layer_of(b, layer).window, from = max_i(position + 1 - window, 0),
              all = entries + position + 1 - from;
    KIE_NO_UNROLL for (int first = warp * kOnce; first < all; first += kWarps * kOnce) {
        SeenRow rows[kOnce];
        KIE_UNROLL for (int i = 0; i < kOnce; ++i) {
            const int n = min_i(first + i, all - 1);
            if constexpr (C::kEntries) {
                if (n < entries) {
                    int entry = n;
                    if constexpr (C::kIndexed) entry = listed ? (int)chosen_entries<C>(b)[n] : n;
                    rows[i] = seen_entry<C, kRowEntry>(args, b, layer, column, entry);
                    continue;
                }
            }
            rows[i] = seen_key<C>(args, b, layer, column, from + n - entries);
        }
        attend_rows<C>(part, q, rows, all - first);
    }
    float* parts = (float*)(b.shared + kShXa);
    float* mine = parts + warp * (C::kDim + 2);
    R::each([&](int i, int quad) {
        KIE_UNROLL for (int j = 0; j < R::kOfQuad; ++j) mine[quad * R::kOfQuad + j] =
            part.sum.v[i][j];
    });
    if (thread() % kTeam == 0)
        mine[C::kDim] = part.softmax.best, mine[C::kDim + 1] = part.softmax.exp_sum;
    sync_consumers<kThreads>();
    join_parts<C>(args, b, layer, column, head, parts);
    sync_consumers<kThreads>();
}
// This block's heads of all columns.
template <class C>
KIE_DEVICE void attend_entries(Watch& watch, const DecodeArgs& args, const Block& b, int layer) {
    [[maybe_unused]] int listed = -1;  // whose entries are in the list
    KIE_NO_UNROLL for (int item = b.block_in_lane; item < live_of(b) * C::kHeads;
                       item += kBlocksPerLane) {
        const int column = item / C::kHeads;
        int entries = 0;
        bool some = false;
        if constexpr (C::kEntries) entries = entries_at<C>(args, b, column);
        if constexpr (C::kIndexed) {
            some = entries > C::kIndexChosen;
            if (some) {
                if (listed != column) choose_entries<C>(watch, args, b, layer, column);
                listed = column, entries = C::kIndexChosen;
            }
        }
        attend_head<C>(watch, args, b, layer, column, item % C::kHeads, entries, some);
    }
    join_wave();  // all wait for what some have published
}
// What groups of heads are projected to.
template <class C>
KIE_DEVICE void step_groups(Ring& ring, Watch& watch, const DecodeArgs& args, Block& b, int layer) {
    using S = typename C::TilingValueUp;
    Prefetched<S> prefetched;
    prefetch_weights<S>(ring, prefetched);
    gather_heads<C, S, C::kGroupRank, C::kBlockGroups, C::kGroupWords, C::kOutGroups>(
        watch, b, seen_words<C>(args, b, layer, 0), C::kWordsA, C::kGroupWords,
        layer << 4 | kWaitSeen);
    Sums<S> s = multiply_heads<S, C::kGroupRank>(ring, prefetched, b.shared + kShXb, kStrideB,
                                                 b.block_in_lane * S::rows % C::kGroupRank);
    finish<S>(s, (float*)(b.shared + kShPartA),
              [&](int, int pair, int column, float v0, float v1, bool live, bool leader) {
                  const int at = b.block_in_lane * (S::rows / 2) + pair;
                  if (live && leader && column < live_of(b) && at < C::kAttn / 2)
                      publish(seen_words<C>(args, b, layer, column) + C::kAtValues + at, C::kWordsA,
                              halves_of(v0, v1), b.seqno);
              });
}
// All of it, behind the products of the layer's input, up to the operand of the o product.
template <class C>
KIE_DEVICE void compressed_attention(Ring& ring, Watch& watch, const DecodeArgs& args, Block& b,
                                     int layer) {
    if constexpr (C::kEntries) pool_channels<C>(watch, args, b, layer);
    {
        Prefetched<typename C::TilingQueryUp> prefetched;
        prefetch_weights<typename C::TilingQueryUp>(ring, prefetched);
        gather_query_latent<C>(watch, args, b, layer);
        step_queries<C>(ring, args, b, layer, prefetched);
    }
    make_rows<C>(watch, args, b, layer);
    if constexpr (C::kIndexed) score_entries<C>(watch, args, b, layer);
    attend_entries<C>(watch, args, b, layer);
    stamp(b, 3);
    step_groups<C>(ring, watch, args, b, layer);
}
