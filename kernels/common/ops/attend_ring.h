// Attention over pages that come through the ring. A warp takes a whole page by itself: scores of
// 64 keys, weights in registers, values; no barrier. All warps pass all pages, so that the ring
// keeps its order, and each takes every kWarps-th. The warps' partials are joined at the end.
//   partial of page i = the softmax's sum of exponentials and weighted values of 64 positions, by
//   warp i % kWarps
// Traffic: 4 head_dim bytes a position, each read once from memory and once from shared memory.
// Where columns are positions of one sequence (kWholePages) pages are read where they lie, once a
// column, by warps that share them in the same way: the bits are the same.
#pragma once

#include "args.h"
#include "block.h"
#include "chiplets.h"
#include "exchange.h"
#include "lowered.h"
#include "ops/attend.h"
#include "pages.h"
#include "platform.h"
#include "ring.h"
#include "shape.h"
#include "stream.h"
#include "tile.h"

// What a warp has of a column's pages, for heads 2t and 2t + 1: the best score, this lane's part of
// the sum of exponentials, and tiles of 16 features (rows 2g and 2g + 1 of the page's values) of
// both heads.
template <class C>
struct Partial {
    float best[2], exp_sum[2], sums[C::kHeadDim / 16][4];
};
template <class C>
KIE_DEVICE Partial<C> empty_partial() {
    Partial<C> p = {{-1e30f, -1e30f}, {0, 0}, {}};
    KIE_UNROLL for (int i = 0; i < C::kHeadDim / 16; ++i) {
        KIE_UNROLL for (int j = 0; j < 4; ++j) p.sums[i][j] = 0;
    }
    return p;
}

// Key of row g of eight rows `b`, chosen so that eight rows of scores, transposed, are a lane's
// share of the operand that the values' tiles need.
KIE_DEVICE int key_of(int b, int g) { return 32 * (b / 4) + 8 * (g / 2) + 2 * (b % 4) + g % 2; }

// Of a page, in shared memory or where it lies.
KIE_DEVICE Quad page_quad(const u8* at) {
    if constexpr (kWholePages)
        return load_state(at);
    else
        return *(const Quad*)at;
}
struct Scores {
    float v[8][2];  // eight rows, heads 2t and 2t + 1
};
template <class C>
KIE_DEVICE Scores score_keys(const u8* keys, const u32* heads) {
    const int my = lane() % kTeam, g = my / 4, t = my % 4;
    const u8* mine = keys + (key_of(0, g) * C::kHeadDim + 8 * t) * 2;
    const u8* query = (const u8*)heads + ((g % C::kGroup) * C::kHeadDim + 8 * t) * 2;
    float d[4][4];
    KIE_UNROLL for (int i = 0; i < 4; ++i) { KIE_UNROLL for (int j = 0; j < 4; ++j) d[i][j] = 0; }
    KIE_UNROLL for (int j = 0; j < C::kHeadDim / 32; ++j) {
        const Quad q = *(const Quad*)(query + 64 * j);
        KIE_UNROLL for (int i = 0; i < 4; ++i) {
            const Quad r0 = page_quad(mine + (key_of(2 * i, 0) * C::kHeadDim + 32 * j) * 2),
                       r1 = page_quad(mine + (key_of(2 * i + 1, 0) * C::kHeadDim + 32 * j) * 2);
            mma(d[i], r0.v[0], r1.v[0], r0.v[1], r1.v[1], q.v[0], q.v[1]);
            mma(d[i], r0.v[2], r1.v[2], r0.v[3], r1.v[3], q.v[2], q.v[3]);
        }
    }
    Scores s;
    KIE_UNROLL for (int b = 0; b < 8; ++b) s.v[b][0] = d[b / 2][b % 2 * 2],
                                           s.v[b][1] = d[b / 2][b % 2 * 2 + 1];
    return s;
}
// Scores to weights, as the values' operand: lane (g, t) has those of head g for rows 2t, 2t + 1 of
// each eight. What was summed before shrinks.
struct Weights {
    u32 v[8];
};
template <class C>
KIE_DEVICE Weights weigh(Partial<C>& partial, Scores& s) {
    const int my = lane() % kTeam, g = my / 4, t = my % 4;
    float keep[2];
    KIE_UNROLL for (int h = 0; h < 2; ++h) {
        float top = -1e30f, sum = 0;
        KIE_UNROLL for (int b = 0; b < 8; ++b) top = max_f(top, s.v[b][h]);
        KIE_UNROLL for (int m = 4; m < 32; m *= 2) top = max_f(top, shuffle_xor(top, m));
        top = max_f(top, partial.best[h]);
        keep[h] = exp2_f(partial.best[h] - top), partial.best[h] = top;
        KIE_UNROLL for (int b = 0; b < 8; ++b) s.v[b][h] = exp2_f(s.v[b][h] - top),
                                               sum += s.v[b][h];
        partial.exp_sum[h] = partial.exp_sum[h] * keep[h] + sum;
    }
    KIE_UNROLL for (int i = 0; i < C::kHeadDim / 16; ++i) {
        KIE_UNROLL for (int j = 0; j < 4; ++j) partial.sums[i][j] *= keep[j % 2];
    }
    Weights w;
    KIE_UNROLL for (int b = 0; b < 8; ++b) {
        const float both = number(pack_half2(s.v[b][0], s.v[b][1]));
        const u32 lo = bits(shuffle(both, 8 * t + g / 2)),
                  hi = bits(shuffle(both, 8 * t + 4 + g / 2));
        w.v[b] = g % 2 ? lo >> 16 | (hi & 0xffff0000) : (lo & 0xffff) | hi << 16;
    }
    return w;
}
template <class C>
KIE_DEVICE void add_values(Partial<C>& partial, const u8* values, const Weights& w) {
    const int my = lane() % kTeam, g = my / 4, t = my % 4;
    const u8* mine = values + (2 * g * kPage + 8 * t) * 2;
    KIE_UNROLL for (int i = 0; i < C::kHeadDim / 16; ++i) {
        KIE_UNROLL for (int j = 0; j < 2; ++j) {
            const Quad r0 = page_quad(mine + (16 * i * kPage + 32 * j) * 2),
                       r1 = page_quad(mine + ((16 * i + 1) * kPage + 32 * j) * 2);
            mma(partial.sums[i], r0.v[0], r1.v[0], r0.v[1], r1.v[1], w.v[4 * j], w.v[4 * j + 1]);
            mma(partial.sums[i], r0.v[2], r1.v[2], r0.v[3], r1.v[3], w.v[4 * j + 2],
                w.v[4 * j + 3]);
        }
    }
}

// Keys that a position does not see.
KIE_DEVICE void hide_keys(Scores& s, const Block& b, int layer, int page, int position) {
    const int window = (int)layer_of(b, layer).window, g = lane() % kTeam / 4;
    const int lowest = window > 0 ? position - window : -1;
    if (page == position / kPage || page * kPage <= lowest) {
        KIE_UNROLL for (int i = 0; i < 8; ++i) {
            const int at = page * kPage + key_of(i, g);
            if (at > position || at <= lowest) s.v[i][0] = s.v[i][1] = -1e30f;
        }
    }
}
// Adds the page at hand. `heads`: queries, key and value of the position at work; the copy of its
// page may have missed the latter two.
template <class C>
KIE_DEVICE void take_page(Ring& ring, Partial<C>& partial, const DecodeArgs& args, const Block& b,
                          int layer, int column, int page, const u32* heads) {
    const int my = lane() % kTeam;
    const int position = (int)opaque(position_at(args, b.shared, b.step, column));
    const bool fresh = page == position / kPage;
    u8* keys = (u8*)take_stage(ring, false, C::kPageStageBytes);
    if (fresh) {
        KIE_NO_UNROLL for (int n = my; n < C::kHalfHead; n += kTeam)
            store_key<C>(keys, position % kPage, n, heads[C::kQWords + n]);
        sync_warp();
    }
    Scores s = score_keys<C>(keys, heads);
    hide_keys(s, b, layer, page, position);
    u8* values = keys + C::kPageHalf;
    if (C::kPageStages == 2) {
        release_stage(ring);
        values = (u8*)take_stage(ring, false, C::kPageStageBytes);
    }
    if (fresh) {
        KIE_NO_UNROLL for (int n = my; n < C::kHalfHead; n += kTeam) store_value<C>(
            values - C::kPageHalf, position % kPage, n, heads[C::kQWords + C::kHalfHead + n]);
        sync_warp();
    }
    const Weights w = weigh<C>(partial, s);
    add_values<C>(partial, values, w);
    release_stage(ring);
}
// The same where it lies, behind the barrier that stands behind new keys and values.
template <class C>
KIE_DEVICE void take_page_there(Partial<C>& partial, const u8* keys, const Block& b, int layer,
                                int page, int position, const u32* heads) {
    Scores s = score_keys<C>(keys, heads);
    hide_keys(s, b, layer, page, position);
    const Weights w = weigh<C>(partial, s);
    add_values<C>(partial, keys + C::kPageHalf, w);
}
template <class C>
KIE_DEVICE void pass_page(Ring& ring) {
    KIE_UNROLL for (int i = 0; i < C::kPageStages; ++i) take_stage(ring, false, C::kPageStageBytes),
        release_stage(ring);
}

template <class C>
KIE_DEVICE void publish_lse(u64* line, const float (&lse)[2], u32 seqno) {
    const int my = lane() % kTeam, t = my % 4;
    if (my >= 4) return;
    if (2 * t < C::kGroup)
        publish(line + 2 * t * C::kPartialHead + kPartialLse, bits(lse[0]), seqno);
    if (2 * t + 1 < C::kGroup)
        publish(line + (2 * t + 1) * C::kPartialHead + kPartialLse, bits(lse[1]), seqno);
}
// The partial of the one warp that took all of a column's pages.
template <class C>
KIE_DEVICE void publish_alone(Partial<C>& partial, u64* to, u32 seqno) {
    const float i0 = reciprocal_f(partial.exp_sum[0]), i1 = reciprocal_f(partial.exp_sum[1]);
    const float lse[2] = {partial.best[0] + log2_f(partial.exp_sum[0]),
                          partial.best[1] + log2_f(partial.exp_sum[1])};
    KIE_UNROLL for (int i = 0; i < C::kHeadDim / 16; ++i) {
        publish_features<C>(to + i * kPartialLine, partial.sums[i], i0, i1, seqno);
        publish_lse<C>(to + i * kPartialLine, lse, seqno);
    }
}
// Partials of several warps: in shared memory, each tile added up by one warp, in their order.
template <class C>
KIE_DEVICE void leave_partial(const Partial<C>& partial, int index, u8* shared) {
    const int my = lane() % kTeam, g = my / 4, t = my % 4;
    if (t >= C::kHeadPairs) return;
    Quad* to = (Quad*)(shared + C::kShJoin) + index * C::kJoinWarp + g * C::kHeadPairs + t;
    KIE_UNROLL for (int i = 0; i < C::kHeadDim / 16; ++i)
        to[i * C::kJoinTile] = {{bits(partial.sums[i][0]), bits(partial.sums[i][1]),
                                 bits(partial.sums[i][2]), bits(partial.sums[i][3])}};
    if (g == 0)
        ((Quad*)(shared + kShScores))[index * C::kHeadPairs + t] = {
            {bits(partial.best[0]), bits(partial.best[1]), bits(partial.exp_sum[0]),
             bits(partial.exp_sum[1])}};
}
template <class C>
KIE_DEVICE void join_partials(int partials, u64* to, u32 seqno, const u8* shared) {
    const int my = lane() % kTeam, g = my / 4, t = my % 4 < C::kHeadPairs ? my % 4 : 0;
    const Quad* heads = (const Quad*)(shared + kShScores) + t;
    const Quad* sums = (const Quad*)(shared + C::kShJoin) + g * C::kHeadPairs + t;
    KIE_NO_UNROLL for (int tile = (int)(thread() / kTeam); tile < C::kHeadDim / 16;
                       tile += kWarps) {
        float top[2] = {-1e30f, -1e30f}, exp_sum[2] = {0, 0}, all[4] = {0, 0, 0, 0};
        KIE_NO_UNROLL for (int i = 0; i < partials; ++i) {
            KIE_UNROLL for (int h = 0; h < 2; ++h) top[h] =
                max_f(top[h], number(heads[i * C::kHeadPairs].v[h]));
        }
        KIE_NO_UNROLL for (int i = 0; i < partials; ++i) {
            const Quad m = heads[i * C::kHeadPairs],
                       s = sums[i * C::kJoinWarp + tile * C::kJoinTile];
            const float f[2] = {exp2_f(number(m.v[0]) - top[0]), exp2_f(number(m.v[1]) - top[1])};
            exp_sum[0] += f[0] * number(m.v[2]), exp_sum[1] += f[1] * number(m.v[3]);
            KIE_UNROLL for (int j = 0; j < 4; ++j) all[j] += f[j % 2] * number(s.v[j]);
        }
        u64* line = to + tile * kPartialLine;
        publish_features<C>(line, all, reciprocal_f(exp_sum[0]), reciprocal_f(exp_sum[1]), seqno);
        const float lse[2] = {top[0] + log2_f(exp_sum[0]), top[1] + log2_f(exp_sum[1])};
        publish_lse<C>(line, lse, seqno);
    }
}

// Which of a column's partials a warp makes where the first falls to warp `turn` % kWarps.
KIE_DEVICE int partial_index(int turn) {
    return (int)(thread() / kTeam + kWarps - turn % kWarps) % kWarps;
}
// All pages of a column that come to this block. `heads`: queries, then, where the newest page is
// among them, the newest key and value. Returns the number of partials.
template <class C>
KIE_DEVICE int attend_pages(Ring& ring, const DecodeArgs& args, const Block& b, int layer,
                            int column, const Streamed& s, int turn, const u32* heads) {
    Partial<C> partial = empty_partial<C>();
    if constexpr (kWholePages) {
        const int position = (int)position_at(args, b.shared, b.step, column),
                  kv_head = b.block_in_lane / C::kSplitBlocks;
        const Pages pages = {layer, b.lane_index * C::kKvHeads + kv_head, column};
        KIE_NO_UNROLL for (int i = partial_index(turn); i < s.count; i += kWarps) {
            const int page = s.first + i * C::kSplitsMax;
            take_page_there<C>(partial, page_at<C>(args, b.shared, pages, page), b, layer, page,
                               position, heads);
        }
    } else {
        int wait = partial_index(turn);
        KIE_NO_UNROLL for (int i = 0; i < s.count; ++i) {
            if (wait == 0)
                take_page<C>(ring, partial, args, b, layer, column, s.first + i * C::kSplitsMax,
                             heads);
            else
                pass_page<C>(ring);
            wait = wait == 0 ? kWarps - 1 : wait - 1;
        }
    }
    KIE_UNROLL for (int h = 0; h < 2; ++h) {
        KIE_UNROLL for (int m = 4; m < 32; m *= 2) partial.exp_sum[h] +=
            shuffle_xor(partial.exp_sum[h], m);
    }
    const int block_in_lane = (int)opaque(block()) % kBlocksPerLane, index = partial_index(turn);
    const int partials = min_i(s.count, kWarps);
    u64* to = partial_at<C>(args, {layer, b.lane_index, block_in_lane / C::kSplitBlocks,
                                   block_in_lane % C::kSplitBlocks, column, 0});
    if (partials == 1) {
        if (index == 0) publish_alone<C>(partial, to, b.seqno);
        return partials;
    }
    if (index < partials) leave_partial<C>(partial, index, b.shared);
    sync_consumers<kThreads>();
    join_partials<C>(partials, to, b.seqno, b.shared);
    sync_consumers<kThreads>();  // vectors will stand here
    return partials;
}

// A column's heads into this warp's own shared memory; `fresh`: the newest key and value as well,
// into their page, too.
template <class C>
KIE_DEVICE void warp_heads(Watch& watch, const DecodeArgs& args, const AttendAt& at,
                           const PageSpan& span, const Pages& pages, u32 seqno, bool fresh,
                           u32* heads, const u8* shared) {
    constexpr int kWords = C::kQWords + 2 * C::kHalfHead, kEach = (kWords + kTeam - 1) / kTeam;
    const int my = lane() % kTeam, count = fresh ? kWords : C::kQWords;
    const u32 where = at.layer << 4 | 1;
    u64 v[kEach];
    watch.polls = 0;
    for (;;) {
        bool ok = true;
        KIE_UNROLL for (int i = 0; i < kEach; ++i) {
            const int n = i * kTeam + my;
            v[i] = n < count ? load_word(head_word<C>(args, at, n)) : ll_word(0, seqno);
        }
        KIE_UNROLL for (int i = 0; i < kEach; ++i) ok &= seqno_of(v[i]) == seqno;
        if (ok || kNoWaits || wait_expired(watch, where, seqno, seqno_of(v[0]))) break;
        pause_ns(20);
    }
    KIE_UNROLL for (int i = 0; i < kEach; ++i) if (i * kTeam + my < count) heads[i * kTeam + my] =
        (u32)v[i];
    sync_warp();
    if constexpr (C::kHeadNorm) {
        for (int head = 0; head < C::kGroup + (fresh ? 1 : 0); ++head)
            norm_head<C>(args, shared, at, span.position, head, heads);
        sync_warp();
    }
    if (!fresh) return;
    u8* page = page_at<C>(args, shared, pages, span.last);
    for (int n = my; n < C::kHalfHead; n += kTeam) {
        store_key<C>(page, span.position % kPage, n, heads[C::kQWords + n]);
        store_value<C>(page, span.position % kPage, n, heads[C::kQWords + C::kHalfHead + n]);
    }
}
// Several sequences side by side: each one's pages fall to other warps than those of the one
// before.
template <class C>
KIE_DEVICE void attend_sequences(Ring& ring, Watch& watch, const DecodeArgs& args, const Block& b,
                                 int layer) {
    const int kv_head = b.block_in_lane / C::kSplitBlocks,
              split = b.block_in_lane % C::kSplitBlocks;
    if (split >= C::kSplitsMax || kv_head >= C::kKvHeads) return;
    const Layer& l = layer_of(b, layer);
    u32* heads = (u32*)(b.shared + C::kShHeads + (int)(thread() / kTeam) * C::kWarpHeads);
    int turn = 0;
    const int my = lane() % kTeam, columns = sequences_of(args);
    // A lane looks at a column.
    const Streamed its =
        streamed_pages<C>(args, b.shared, b.block_in_lane, layer, b.step, my < columns ? my : 0);
    const float both = number((u32)its.first << 16 | (u32)its.count);
    sync_consumers<kThreads>();  // the vectors have been used
    KIE_NO_UNROLL for (int c = 0; c < columns; ++c) {
        const u32 of = bits(shuffle(both, c));
        const Streamed s = {(int)(of >> 16), (int)(of & 0xffff)};
        if (s.count == 0) continue;
        if (s.count == 1 && partial_index(turn) != 0) {  // another warp's only page
            pass_page<C>(ring), ++turn;
            continue;
        }
        const AttendAt at = {layer, b.lane_index, kv_head, split, c, shift_at(args, b.shared, c)};
        const Pages pages = {layer, b.lane_index * C::kKvHeads + kv_head, c};
        const PageSpan span = pages_of(l, (int)position_at(args, b.shared, b.step, c));
        const int index = partial_index(turn);
        const bool newest = s.first + (s.count - 1) * C::kSplitsMax == span.last;
        if (index < s.count)
            warp_heads<C>(watch, args, at, span, pages, b.seqno,
                          newest && (s.count - 1) % kWarps == index, heads, b.shared);
        turn += attend_pages<C>(ring, args, b, layer, c, s, turn, heads);
    }
}
// Columns of which some are positions of one sequence.
template <class C>
KIE_DEVICE void attend_there(Ring& ring, Watch& watch, const DecodeArgs& args, const Block& b,
                             int layer) {
    const int kv_head = b.block_in_lane / C::kSplitBlocks,
              split = b.block_in_lane % C::kSplitBlocks;
    if (split >= C::kSplitsMax || kv_head >= C::kKvHeads) return;
    store_columns<C>(watch, args, b, layer, 0);
    u32* heads = (u32*)(b.shared + C::kShHeads + (int)(thread() / kTeam) * C::kWarpHeads);
    int turn = 0;
    KIE_NO_UNROLL for (int c = 0; c < live_of(b); ++c) {
        const int shift = shift_at(args, b.shared, c);
        const PageSpan span =
            pages_of(layer_of(b, layer), (int)position_at(args, b.shared, b.step, c));
        const int first = first_page<C>(span, split, shift);
        if (first > span.last) continue;
        const Streamed s = {first, (span.last - first) / C::kSplitsMax + 1};
        const AttendAt at = {layer, b.lane_index, kv_head, split, c, shift};
        const int index = partial_index(turn);
        if (s.count == 1 && index != 0) {  // another warp's only page
            ++turn;
            continue;
        }
        const Pages pages = {layer, b.lane_index * C::kKvHeads + kv_head, c};
        if (index < s.count)
            warp_heads<C>(watch, args, at, span, pages, b.seqno, false, heads, b.shared);
        turn += attend_pages<C>(ring, args, b, layer, c, s, turn, heads);
    }
    join_wave();  // partials of one team of a wave are waited for by the other
}
// The same for the only column, whose pages come through the ring.
template <class C>
KIE_DEVICE void attend_stream(Ring& ring, Watch& watch, const DecodeArgs& args, Block& b,
                              int layer) {
    const int kv_head = b.block_in_lane / C::kSplitBlocks,
              split = b.block_in_lane % C::kSplitBlocks;
    const Streamed s = streamed_pages<C>(args, b.shared, b.block_in_lane, layer, b.step, 0);
    if (s.count == 0) return;
    const PageSpan span = pages_of(layer_of(b, layer), (int)position_at(args, b.shared, b.step, 0));
    const bool fresh = s.first + (s.count - 1) * C::kSplitsMax == span.last;
    take_heads<C>(watch, args, {layer, b.lane_index, kv_head, split, 0, 0}, span, b.seqno, fresh,
                  b.shared);
    sync_consumers<kThreads>();
    attend_pages<C>(ring, args, b, layer, 0, s, 0, (const u32*)(b.shared + kShQkv));
    if (fresh)
        keep_newest<C>(args, span, {layer, b.lane_index * C::kKvHeads + kv_head, 0}, b.shared);
}
