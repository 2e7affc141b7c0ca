// Which entries a position sees where they are more than kIndexChosen: those with the largest
// scores, equal ones by the lower number.
//   score of c = sum over heads h of w_h max(0, q_h c) / sqrt(kIndexDim kIndexHeads)
// Entries are dealt out to blocks, a warp takes one after another; scores travel as floats, and
// every block that attends for a column chooses by itself.
#pragma once

#include "args.h"
#include "block.h"
#include "chiplets.h"
#include "exchange.h"
#include "lowered.h"
#include "ops/choose.h"
#include "ops/entries.h"
#include "ops/latent_words.h"
#include "ops/parts.h"
#include "platform.h"
#include "shape.h"

template <class C>
KIE_DEVICE int entries_at(const DecodeArgs& args, const Block& b, int column) {
    return ((int)position_at(args, b.shared, b.step, column) + 1) / C::kEvery;
}
template <class C>
KIE_DEVICE u64* score_words(const DecodeArgs& args, const Block& b, int layer, int column) {
    return entry_words<C>(args, b, layer, column) + C::kAtScores;
}
// The chosen entries of a column, ascending; behind them what warps counted.
template <class C>
KIE_DEVICE u32* chosen_entries(const Block& b) {
    return (u32*)(b.shared + kShStates) + C::kAtChosen;
}

// A column's queries, turned, and heads' weights as floats, where vectors stand.
template <class C>
KIE_DEVICE void take_index_queries(Watch& watch, const DecodeArgs& args, const Block& b, int layer,
                                   int column, float* q) {
    constexpr int kHalf = C::kIndexDim / 2, kPairs = C::kIndexHeads * kHalf,
                  kOnce = min_i(8, (kPairs + kThreads - 1) / kThreads);
    constexpr int kStill = (C::kIndexDim - C::kTurned) / 2;
    const int me = thread(), position = (int)position_at(args, b.shared, b.step, column);
    const u64* words = latent_words<C>(args, b, layer, column);
    const u64* queries = words + C::kAtQuery + C::kHeads * (C::kHeadDim / 2);
    KIE_NO_UNROLL for (int first = 0; first < kPairs; first += kOnce * kThreads) {
        Halves h[kOnce];
        take_each(watch, h, C::kWordsQ, b.seqno, layer << 4 | kWaitQueries,
                  [&](int i) -> const u64* {
                      const int n = first + i * kThreads + me;
                      return n < kPairs ? queries + n : nullptr;
                  });
        KIE_UNROLL for (int i = 0; i < kOnce; ++i) {
            const int n = first + i * kThreads + me, pair = n % kHalf;
            if (n >= kPairs) continue;
            float a, e;
            numbers_of(h[i], a, e);
            if (pair >= kStill) turn_pair<C>(args, position, pair - kStill, a, e);
            q[2 * n] = a, q[2 * n + 1] = e;
        }
    }
    KIE_NO_UNROLL for (int n = me; n < (C::kIndexHeads + 1) / 2; n += kThreads) {
        float w[2];
        numbers_of(take_halves(watch, words + heard_latent<C>(C::kAtIndexWeights + n), C::kWordsQ,
                               b.seqno, layer << 4 | kWaitLatents),
                   w[0], w[1]);
        KIE_UNROLL for (int i = 0; i < 2; ++i) if (2 * n + i < C::kIndexHeads)
            q[2 * kPairs + 2 * n + i] = w[i] * C::kIndexFactor;
    }
}
// This block's entries of one column.
template <class C>
KIE_DEVICE void score_column(const DecodeArgs& args, const Block& b, int layer, int column,
                             const float* q) {
    using R = Row<C::kIndexDim>;
    const float* weights = q + C::kIndexHeads * C::kIndexDim;
    const int warp = thread() / kTeam, count = entries_at<C>(args, b, column);
    u64* to = score_words<C>(args, b, layer, column);
    KIE_NO_UNROLL for (int entry = b.block_in_lane + kBlocksPerLane * warp; entry < count;
                       entry += kBlocksPerLane * kWarps) {
        const SeenRow row = seen_entry<C, kRowIndex>(args, b, layer, column, entry);
        R key;
        R::each([&](int i, int quad) { open_quad(load_seen(row, quad), key.v[i]); });
        float score = 0;
        KIE_NO_UNROLL for (int head = 0; head < C::kIndexHeads; ++head) {
            float dot = 0;
            R::each([&](int i, int quad) {
                const float* its = q + head * C::kIndexDim + quad * R::kOfQuad;
                KIE_UNROLL for (int j = 0; j < R::kOfQuad; ++j) dot += key.v[i][j] * its[j];
            });
            KIE_UNROLL for (int m = 16; m > 0; m /= 2) dot += shuffle_xor(dot, m);
            score += (dot < 0 ? 0.0f : dot) * weights[head];
        }
        if (thread() % kTeam == 0) publish(to + entry, bits(score), b.seqno);
    }
}
template <class C>
KIE_DEVICE void score_entries(Watch& watch, const DecodeArgs& args, const Block& b, int layer) {
    float* q = (float*)(b.shared + kShXa);
    KIE_NO_UNROLL for (int c = 0; c < live_of(b); ++c) {
        if (entries_at<C>(args, b, c) <= C::kIndexChosen) continue;
        sync_consumers<kThreads>();  // what stood there has been used
        take_index_queries<C>(watch, args, b, layer, c, q);
        sync_consumers<kThreads>();
        score_column<C>(args, b, layer, c, q);
    }
    join_wave();  // all wait for what some have published
    sync_consumers<kThreads>();
}

// The entries of one column, by all threads: the key of the last chosen one bit by bit, then a
// warp's list.
template <class C>
KIE_DEVICE void choose_entries(Watch& watch, const DecodeArgs& args, const Block& b, int layer,
                               int column) {
    const int me = thread(), warp = me / kTeam, my = me % kTeam,
              count = entries_at<C>(args, b, column);
    const u32 where = layer << 4 | kWaitScores;
    const u64* from = score_words<C>(args, b, layer, column);
    u32* list = chosen_entries<C>(b);
    u32* counts = list + C::kIndexChosen;
    // A zero's sign is nothing that scores differ by.
    const auto key_of = [&](u64 word) { return ordered(number((u32)word) + 0.0f); };
    for (int n = me; n < count; n += kThreads) take_word(watch, from + n, b.seqno, where);
    sync_consumers<kThreads>();
    u32 last = 0;
    KIE_NO_UNROLL for (u32 bit = 1u << 31; bit > 0; bit >>= 1) {
        int mine = 0;
        for (int n = me; n < count; n += kThreads)
            mine += key_of(load_word(from + n)) >= (last | bit);
        float sum = (float)mine;  // exact: entries are fewer than 2^24
        KIE_UNROLL for (int m = 16; m > 0; m /= 2) sum += shuffle_xor(sum, m);
        if (my == 0) counts[warp] = (u32)sum;
        sync_consumers<kThreads>();
        int all = 0;
        KIE_UNROLL for (int i = 0; i < kWarps; ++i) all += (int)counts[i];
        if (all >= C::kIndexChosen) last |= bit;
        sync_consumers<kThreads>();
    }
    if (warp == 0) {
        const auto before = [&](u32 all) { return count_ones(all & ((1u << my) - 1)); };
        int greater = 0;
        for (int n = my; n < count; n += kTeam) greater += key_of(load_word(from + n)) > last;
        float sum = (float)greater;
        KIE_UNROLL for (int m = 16; m > 0; m /= 2) sum += shuffle_xor(sum, m);
        int ties = C::kIndexChosen - (int)sum, at = 0;
        KIE_NO_UNROLL for (int first = 0; first < count; first += kTeam) {
            const int n = first + my;
            const u32 key = n < count ? key_of(load_word(from + n)) : 0;
            const u32 equal = ballot(key == last && n < count);
            const bool taken = n < count && (key > last || (key == last && before(equal) < ties));
            const u32 all = ballot(taken);
            const int place = at + before(all);
            if (taken && place < C::kIndexChosen) list[place] = (u32)n;
            at += count_ones(all), ties -= min_i(ties, count_ones(equal));
        }
        // The list is full but where a wait has expired; pages are asked for by it all the same.
        for (int n = at + my; n < C::kIndexChosen; n += kTeam) list[n] = 0;
    }
    sync_consumers<kThreads>();
}
