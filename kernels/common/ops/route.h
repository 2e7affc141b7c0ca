// Which experts a column goes to. Blocks share the router's rows; its logits travel as float words,
// every block takes all of them and chooses by itself, alike on all ranks since the words are. What
// was chosen stands in shared memory, ids ascending: words {id, sequence number} for the producer,
// which waits for them before it can ask for a weight, and factors for who publishes activations.
// ops/choose.h says how. A row behind the router's may be the gate of the shared expert, whose
// factor is the sigmoid of its logit (kSharedScaled) and stands behind the others. A logit that is
// not finite makes all factors NaN, and with them the token's logits.
// Of several columns the words are those of all, each expert once.
#pragma once

#include "args.h"
#include "block.h"
#include "exchange.h"
#include "lowered.h"
#include "ops/choose.h"
#include "ops/gather.h"
#include "ops/matvec.h"
#include "ops/project.h"
#include "ops/residual.h"
#include "platform.h"
#include "ring.h"
#include "shape.h"
#include "stream.h"

KIE_DEVICE u32& chosen_id(const Block& b, int column, int n) {  // of several columns
    return ((u32*)(b.shared + kShIds))[column * kChosenMost + n];
}
KIE_DEVICE u32 chosen_expert(const Block& b, int column, int n) {
    if constexpr (kColumns > 1) return chosen_id(b, column, n);
    return (u32)*choice_word(b.shared, n);
}
// Of several columns: experts by their ids, how many, and pairs of a column and an expert, those of
// an expert side by side.
KIE_DEVICE RoutedExpert routed_expert(const Block& b, int n) {
    return unpack_routed(((const u32*)(b.shared + kShChoice))[2 * n]);
}
KIE_DEVICE u32& routed_experts(const Block& b) { return *(u32*)(b.shared + kShPairs); }
struct RoutedPair {
    u32 expert;
    int column, n;  // whose n-th it is
};
KIE_DEVICE u32& pair_word(const Block& b, int n) { return ((u32*)(b.shared + kShPairs))[1 + n]; }
KIE_DEVICE RoutedPair routed_pair(const Block& b, int n) {
    const u32 v = pair_word(b, n);
    return {v & 0xffff, (int)(v >> 16 & 0xff), (int)(v >> 24)};
}
KIE_DEVICE float& chosen_factor(const Block& b, int column, int n) {
    return ((float*)(b.shared + kShFactors))[column * kChosenMost + n];
}
template <class C>
KIE_DEVICE void step_route(Ring& ring, const DecodeArgs& args, Block& b, int layer,
                           Prefetched<typename C::TilingRouter>& prefetched, Squares& squares) {
    using S = typename C::TilingRouter;
    float bias[S::items][2];
    if constexpr (C::kRouterBias) {
        const float* from =
            extras_of(args, b, layer) + C::kAtRouterBias + b.block_in_lane * S::rows;
        each_item<S>([&](int item, int pair, int, bool live) {
            KIE_UNROLL for (int i = 0; i < 2; ++i) bias[item][i] = live ? from[2 * pair + i] : 0;
        });
    }
    Sums<S> s = multiply_normed<S>(ring, prefetched, b, squares);
    u64* to = args.ll_words + kAtLogits + buffer_of(layer, b.lane_index) * kVecLogits +
              b.block_in_lane * S::rows;
    finish<S>(s, (float*)(b.shared + kShPartA),
              [&](int item, int pair, int column, float v0, float v1, bool live, bool leader) {
                  const float scale = rms_scale(b, live ? column : 0);
                  v0 *= scale, v1 *= scale;
                  if constexpr (C::kRouterBias) v0 += bias[item][0], v1 += bias[item][1];
                  if (!live || !leader || column >= live_of(b)) return;
                  u64* p = to + (long)column * kWordsLogits + 2 * pair;
                  publish(p, bits(v0), b.seqno), publish(p + 1, bits(v1), b.seqno);
              });
}

// One column's choice, by one warp.
template <class C>
KIE_DEVICE void choose_column(Watch& watch, const DecodeArgs& args, const Block& b, int layer,
                              int column) {
    constexpr int kEach = (C::kExperts + kTeam - 1) / kTeam;
    const int my = lane() % kTeam;
    const u32 where = layer << 4 | 8;
    const u64* from = args.ll_words + kAtLogits + buffer_of(layer, b.lane_index) * kVecLogits +
                      (long)column * kWordsLogits;
    u64 words[kEach];
    KIE_UNROLL for (int i = 0; i < kEach; ++i) words[i] = 0;
    float correction[kEach];
    if constexpr (C::kCorrection) {
        const float* its = extras_of(args, b, layer) + C::kAtCorrection;
        KIE_UNROLL for (int i = 0; i < kEach; ++i) {
            const int id = i * kTeam + my;
            correction[i] = id < C::kExperts ? its[id] : 0;
        }
    }
    watch.polls = 0;
    for (;;) {
        u32 late = 0;
        KIE_UNROLL for (int i = 0; i < kEach; ++i) {
            const int id = i * kTeam + my;
            if (id < C::kExperts && seqno_of(words[i]) != b.seqno) words[i] = load_word(from + id);
        }
        KIE_UNROLL for (int i = 0; i < kEach; ++i) if (i * kTeam + my < C::kExperts) late |=
            seqno_of(words[i]) ^ b.seqno;
        if (late == 0 || kNoWaits || wait_expired(watch, where, b.seqno, b.seqno ^ late)) break;
    }
    sync_warp();
    float logits[kEach];
    KIE_UNROLL for (int i = 0; i < kEach; ++i) logits[i] = number((u32)words[i]);
    Choice made;
    const u32* told = nullptr;
    if constexpr (C::kByToken)
        told = (const u32*)extras_of(args, b, layer) + C::kAtTokenExperts +
               (long)tokens_of(b)[column] * C::kChosen;
    if constexpr (C::kByScores)
        made = choose_by_scores<C>(logits, correction, told);
    else
        made = choose<C>(logits);
    if constexpr (C::kSharedScaled) {
        if (my == 0) {
            const float gate = number(take_word(watch, from + C::kExperts, b.seqno, where));
            chosen_factor(b, column, C::kChosen) = reciprocal_f(1.0f + exp2_f(-1.44269504f * gate));
        }
        sync_warp();
    }
    if (my < C::kChosen) {
        const u32 id = made.id;
        const int place = made.place;
        chosen_factor(b, column, place) = made.factor;
        if constexpr (kColumns > 1)
            chosen_id(b, column, place) = id;
        else
            *choice_word(b.shared, place) = ll_word(id, b.seqno);
    }
}
// The experts of all pairs, by one team.
KIE_DEVICE void list_experts(const Block& b, int pairs) {
    const int my = lane() % kTeam;
    int count = 0;
    KIE_NO_UNROLL for (int first = 0; first < pairs; first += kTeam) {
        const int n = first + my;
        const u32 id = n < pairs ? routed_pair(b, n).expert : 0;
        const bool begins = n < pairs && (n == 0 || routed_pair(b, n - 1).expert != id);
        const u32 all = ballot(begins);
        if (begins) {
            u32 columns = 0;
            for (int m = n; m < pairs && routed_pair(b, m).expert == id; ++m)
                columns |= 1u << routed_pair(b, m).column;
            *choice_word(b.shared, count + count_ones(all & ((1u << my) - 1))) =
                ll_word(pack_routed({id, columns, n}), b.seqno);
        }
        count += count_ones(all);
    }
    if (my < kStackMost)
        *choice_word(b.shared, count + my) = ll_word(pack_routed({0, 0, pairs}), b.seqno);
    if (my == 0) routed_experts(b) = (u32)count;
}
// All columns' choices by expert, then by column.
template <class C>
KIE_DEVICE void sort_pairs(const Block& b) {
    const int live = live_of(b);
    KIE_NO_UNROLL for (int i = thread(); i < live * C::kChosen; i += kThreads) {
        const int column = i / C::kChosen, n = i % C::kChosen;
        const u32 id = chosen_id(b, column, n);
        int before = 0;
        KIE_NO_UNROLL for (int other = 0; other < live; ++other) {
            KIE_UNROLL for (int m = 0; m < C::kChosen; ++m) {
                const u32 its = chosen_id(b, other, m);
                before += its < id || (its == id && other < column);
            }
        }
        pair_word(b, before) = id | (u32)column << 16 | (u32)n << 24;
    }
    join_wave();
    sync_consumers<kThreads>();
    if ((int)thread() < kTeam) list_experts(b, live * C::kChosen);
    join_wave();
    sync_consumers<kThreads>();
}
// All columns', a warp each. The words of the layer before have been used: the stages that they
// led to are behind us.
template <class C>
KIE_DEVICE void choose_experts(Watch& watch, const DecodeArgs& args, const Block& b, int layer) {
    KIE_NO_UNROLL for (int c = (int)(thread() / kTeam); c < live_of(b); c += kWarps)
        choose_column<C>(watch, args, b, layer, c);
    join_wave();
    sync_consumers<kThreads>();
    if constexpr (kColumns > 1) sort_pairs<C>(b);
}
