// Products whose outputs change the residual (o, down), and what other lanes and ranks add to it.
#pragma once

#include "args.h"
#include "block.h"
#include "exchange.h"
#include "lowered.h"
#include "matvec.h"
#include "ops/gather.h"
#include "ops/matvec_words.h"
#include "platform.h"
#include "ring.h"
#include "shape.h"

// Residual rows: h += own (+ the other lanes' sums, of this layer or earlier), then publish both.
struct Owned {
    float v[TilingOwned::items][2];
};
// Words of other lanes that a thread looks after. Where four lanes of a team hold the same result
// (kQuad), each adds some of the lanes. Where every thread owns results (kAlone), see add_far.
// Otherwise the words are dealt out to all threads, who leave them in shared memory for the owner
// of the row.
constexpr bool kQuad = TilingOwned::k_warps == 1 && kColumns == 1;
constexpr bool kAlone = TilingOwned::k_warps == 1 && kColumns > 1, kFar = kAlone && kLanesAll > 1;
constexpr int kOthers =
    kQuad ? TilingOwned::items * ((kLanesAll + 3) / 4) : (kOtherWords + kThreads - 1) / kThreads;
struct Others {
    u64 v[kOthers > 0 ? kOthers : 1];
};
// Calls visit(index, lane, pair, column, place in shared memory) for each of this thread's words.
template <class S, class F>
KIE_DEVICE void each_other(const Block& b, F visit) {
    if constexpr (kQuad) {
        each_item<S>([&](int item, int pair, int column, bool live) {
            KIE_UNROLL for (int i = 0; i < (kLanesAll + 3) / 4; ++i) {
                const int from = (int)lane() % 4 + 4 * i;
                if (live && from < kLanesAll && from != b.lane_all)
                    visit(item * ((kLanesAll + 3) / 4) + i, from, pair, column, 0);
            }
        });
    } else {
        constexpr int kEach = S::row_pairs * kColumns;
        KIE_UNROLL for (int i = 0; i < kOthers; ++i) {
            const int n = i * kThreads + (int)thread(), from = n / kEach;
            const int column = n % kEach / S::row_pairs;
            if (n < kOtherWords && from != b.lane_all && column < live_of(b))
                visit(i, from, n % kEach % S::row_pairs, column, n);
        }
    }
}
KIE_DEVICE const u64* other_word(const DecodeArgs& args, const Block& b, int kind, int layer,
                                 int from, int pair, int column) {
    return other_slot(args, kind, layer, from) + (long)column * kWordsH + b.seat * (kRowsO / 2) +
           pair;
}
template <class S>
KIE_DEVICE void early_others(const DecodeArgs& args, const Block& b, int kind, int layer, int delay,
                             Others& o) {
    if (kLanesAll == 1 || delay < 0) return;
    each_other<S>(b, [&](int i, int from, int pair, int column, int) {
        o.v[i] = load_word(other_word(args, b, kind, layer - delay, from, pair, column));
    });
}
template <class S>
KIE_DEVICE void take_others(Watch& watch, const DecodeArgs& args, const Block& b, int kind,
                            int layer, int delay, Others& o) {
    if (kLanesAll == 1 || delay < 0) return;
    each_other<S>(b, [&](int i, int from, int pair, int column, int place) {
        const u64* p = other_word(args, b, kind, layer - delay, from, pair, column);
        const u32 epoch = b.epoch - delay;
        watch.polls = 0;
        while (!kNoWaits && epoch_of(o.v[i]) != epoch &&
               patient(watch, of_rank(from) | layer << 4 | (kind ? 7 : 3), epoch, epoch_of(o.v[i])))
            o.v[i] = load_word(p);
        if (!kQuad) ((u32*)(b.shared + kShOthers))[place] = (u32)o.v[i];
    });
}
// The others' sum for a row pair that this thread owns; with `alike` its own part in its place.
template <class S>
KIE_DEVICE void add_others(const Block& b, const Others& o, int item, int pair, int column,
                           bool live, bool alike, u32 mine, float& a0, float& a1) {
    constexpr int kTurns = kQuad ? (kLanesAll + 3) / 4 : kLanesAll;
    KIE_UNROLL for (int i = 0; i < kTurns; ++i) {
        const int from = kQuad ? (int)lane() % 4 + 4 * i : i;
        const bool self = from == b.lane_all;
        if (!live || from >= kLanesAll || (self && !alike)) continue;
        const int place = (i * kColumns + column) * S::row_pairs + pair;
        const u32 word = kQuad ? (u32)o.v[kQuad ? item * kTurns + i : 0]
                               : ((const u32*)(b.shared + kShOthers))[kQuad ? 0 : place];
        float x0, x1;
        unpack_half2(self ? mine : word, x0, x1);
        a0 += x0, a1 += x1;
    }
    if (kQuad) {
        a0 += shuffle_xor(a0, 1), a1 += shuffle_xor(a1, 1);
        a0 += shuffle_xor(a0, 2), a1 += shuffle_xor(a1, 2);
    }
}

// The other lanes' sum for each result of a thread that owns it alone.
template <class S>
struct Far {
    float v[S::items][2];
};
// Their words in the order of the one-column kernel's four lanes. `alike`: this lane's own part, a
// word like the others', counts, too.
template <class S>
KIE_DEVICE void add_far(Watch& watch, const DecodeArgs& args, const Block& b, int kind, int layer,
                        int delay, bool alike, Far<S>& far) {
    const u64* from = others_of(args, kind, layer - delay);
    const u32 epoch = b.epoch - delay;
    constexpr int kOnce = S::items < 2 ? S::items : 2;
    static_assert(S::items % kOnce == 0, "results in groups");
    KIE_UNROLL for (int first = 0; first < S::items; first += kOnce) {
        const u64* p[kOnce];
        each_item<S>([&](int item, int pair, int column, bool live) {
            if (item < first || item >= first + kOnce) return;
            // Who has no such result takes another's.
            const long at = live && column < live_of(b) ? (long)column * kWordsH + pair : 0;
            p[item - first] = from + b.seat * (kRowsO / 2) + at;
        });
        u64 v[kOnce][kLanesAll];
        watch.polls = 0;
        for (;;) {
            bool ok = true;
            u32 seen = epoch;
            int late = 0;
            KIE_UNROLL for (int i = 0; i < kOnce; ++i) {
                KIE_UNROLL for (int l = 0; l < kLanesAll; ++l) v[i][l] =
                    load_word(p[i] + l * kVecH);
            }
            KIE_UNROLL for (int i = 0; i < kOnce; ++i) {
                KIE_UNROLL for (int l = 0; l < kLanesAll; ++l) if (epoch_of(v[i][l]) != epoch)
                    ok = false,
                    seen = epoch_of(v[i][l]), late = l;
            }
            const u32 where = of_rank(late) | layer << 4 | (kind ? 7 : 3);
            if (ok || kNoWaits || !patient(watch, where, epoch, seen)) break;
        }
        KIE_UNROLL for (int i = 0; i < kOnce; ++i) {
            float sum[4][2];
            KIE_UNROLL for (int t = 0; t < 4; ++t) {
                sum[t][0] = sum[t][1] = 0;
                KIE_UNROLL for (int l = t; l < kLanesAll; l += 4) {
                    float x0, x1;
                    unpack_half2((u32)v[i][l], x0, x1);
                    if (l != b.lane_all || alike) sum[t][0] += x0, sum[t][1] += x1;
                }
            }
            KIE_UNROLL for (int j = 0; j < 2; ++j) far.v[first + i][j] =
                (sum[0][j] + sum[1][j]) + (sum[2][j] + sum[3][j]);
        }
    }
}
// The sum of other lanes' earlier outputs, where each thread owns its results alone: before there
// is something else to do, since they have long been there.
template <class S>
KIE_DEVICE Far<S> early_far(Watch& watch, const DecodeArgs& args, const Block& b, int kind,
                            int layer) {
    Far<S> far;
    KIE_UNROLL for (int i = 0; i < S::items; ++i) far.v[i][0] = far.v[i][1] = 0;
    const int delay = layer_of(b, layer).delay[kind];
    if (kFar && delay > 0) add_far<S>(watch, args, b, kind, layer, delay, false, far);
    return far;
}
// The same where one thread alone owns a result of the only column: it takes the others' words
// itself, the earlier ones asked for before a wait and added up behind it.
constexpr bool kByOwner = kBrought && kColumns == 1;
template <class S>
struct Near {
    u64 v[kByOwner ? kLanesAll : 1];
    float sum[2];
};
template <class S>
KIE_DEVICE void ask_near(const DecodeArgs& args, const Block& b, int kind, int layer, int delay,
                         Near<S>& near) {
    static_assert(!kByOwner || S::items == 1, "one result a thread");
    near.sum[0] = near.sum[1] = 0;
    if constexpr (kByOwner) {
        KIE_UNROLL for (int l = 0; l < kLanesAll; ++l) near.v[l] = 0;
        const int pair = (int)thread();
        if (delay < 0 || pair >= S::row_pairs) return;
        KIE_UNROLL for (int l = 0; l < kLanesAll; ++l) if (l != b.lane_all) near.v[l] =
            load_word(other_word(args, b, kind, layer - delay, l, pair, 0));
    }
}
// `mine`: this lane's own part, where it counts as the others' do.
template <class S>
KIE_DEVICE void take_near(Watch& watch, const DecodeArgs& args, const Block& b, int kind, int layer,
                          int delay, bool alike, u32 mine, Near<S>& near) {
    if constexpr (kByOwner) {
        const int pair = (int)thread();
        if (delay < 0 || pair >= S::row_pairs) return;
        const u32 epoch = b.epoch - delay;
        watch.polls = 0;
        for (;;) {
            u32 late = 0;
            int from = 0;
            KIE_UNROLL for (int l = 0; l < kLanesAll; ++l) {
                const u32 off = epoch_of(near.v[l]) ^ epoch;
                if (l != b.lane_all && off != 0) late = off, from = l;
            }
            const u32 where = of_rank(from) | layer << 4 | (kind ? 7 : 3);
            if (late == 0 || kNoWaits || !patient(watch, where, epoch, epoch ^ late)) break;
            KIE_UNROLL for (int l = 0; l < kLanesAll; ++l) {
                if (l != b.lane_all && epoch_of(near.v[l]) != epoch)
                    near.v[l] = load_word(other_word(args, b, kind, layer - delay, l, pair, 0));
            }
        }
        KIE_UNROLL for (int l = 0; l < kLanesAll; ++l) {
            const bool self = l == b.lane_all;
            if (self && !alike) continue;
            float x0, x1;
            unpack_half2(self ? mine : (u32)near.v[l], x0, x1);
            near.sum[0] += x0, near.sum[1] += x1;
        }
    }
}
// A rank's words for the others, each other rank's stored by a warp of its own: those that own
// results go on at once.
constexpr bool kSpread =
    kByOwner && kRanks > 1 && kRanks <= kWarps&& TilingOwned::row_pairs <= kTeam;
KIE_DEVICE void publish_share(const DecodeArgs& args, u64* p, u32 payload, u32 epoch) {
    if constexpr (kSpread) {
        publish_to(args, (thread() / kTeam + args.rank) % kRanks, p, payload, epoch);
    } else {
        publish_all(args, p, payload, epoch);
    }
}
// `product` is the block's own part of the output.
template <class S, class Product>
KIE_DEVICE void step_residual(Watch& watch, const DecodeArgs& args, Block& b, int kind, int layer,
                              Owned& own, int phase, Far<S>& far, Near<S>& near, Product product) {
    Others others;
    KIE_UNROLL for (int i = 0; i < kOthers; ++i) others.v[i] = 0;
    const Layer& l = layer_of(b, layer);
    const int delay = l.delay[kind];
    if (!kAlone && !kByOwner) early_others<S>(args, b, kind, layer, delay, others);
    Sums<S> s = product();
    stamp(b, phase);
    const float keep = l.own[kind];
    const bool shares = kLanesAll > 1 && (l.shares >> kind & 1) != 0;
    // Without delay all lanes add the same halves in the same order: the same bits everywhere. But
    // they wait for what others publish in this very step, so their own must be out before.
    const bool alike = delay == 0 && keep == 1.0f;
    u64* to = hidden_slot(args, kind, layer, b.lane_index) + b.seat * (kRowsO / 2);
    u64* share = other_slot(args, kind, layer, b.lane_all) + b.seat * (kRowsO / 2);
    if (!kAlone && !kByOwner && delay > 0)
        take_others<S>(watch, args, b, kind, layer, delay, others);
    u32 mine[S::items];
    float sum[S::items][2];
    KIE_UNROLL for (int i = 0; i < S::items; ++i) mine[i] = 0, sum[i][0] = sum[i][1] = 0;
    const auto give = [&](int item, int pair, int column) {
        if (shares) publish_share(args, share + (long)column * kWordsH + pair, mine[item], b.epoch);
    };
    const bool later = kByOwner && delay > 0;  // what nobody waits for yet
    finish<S, kSpread ? kRanks : 1>(
        s, (float*)(b.shared + kShPartB),
        [&](int item, int pair, int column, float v0, float v1, bool live, bool lead) {
            mine[item] = pack_half2(v0, v1), sum[item][0] = v0, sum[item][1] = v1;
            if (live && (lead ? !later : kSpread) && column < live_of(b)) give(item, pair, column);
        });
    if (kFar && delay == 0) add_far<S>(watch, args, b, kind, layer, 0, alike, far);
    if (kByOwner && delay == 0) take_near<S>(watch, args, b, kind, layer, 0, alike, mine[0], near);
    if (!kAlone && !kByOwner && delay == 0)
        take_others<S>(watch, args, b, kind, layer, delay, others);
    if (kLanesAll > 1 && !kQuad && !kAlone && (delay == 0 || S::k_warps == 1))
        sync_consumers<kThreads>();
    each_owned<S>([&](int item, int pair, int column, bool live, bool lead) {
        float a0 = far.v[item][0], a1 = far.v[item][1];
        if (kByOwner) a0 = near.sum[0], a1 = near.sum[1];
        if (!kAlone && !kByOwner && kLanesAll > 1 && delay >= 0)
            add_others<S>(b, others, item, pair, column, live, alike, mine[item], a0, a1);
        const bool whole = kLanesAll > 1 && alike;
        own.v[item][0] += whole ? a0 : keep * sum[item][0] + a0;
        own.v[item][1] += whole ? a1 : keep * sum[item][1] + a1;
        if (!live || !lead || column >= live_of(b)) return;
        const long at = (long)column * kWordsH + pair;
        const u32 both = pack_half2(own.v[item][0], own.v[item][1]);
        publish(to + at, both, b.epoch);
        if (later) give(item, pair, column);
        if (kHeadMode != kHeadPerLane && kind == 1 && layer == kLayers - 1)
            publish_all(args, last_slot(args, b.lane_all) + b.seat * (kRowsO / 2) + at, both,
                        b.epoch);
    });
    stamp(b, phase + 1);
}
// The output of attention, or of the mlp, of this block's rows.
template <class S, bool kDirect>
KIE_DEVICE Sums<S> multiply_output(Ring& ring, Watch& watch, Lots<S>& lots, const Block& b,
                                   const u64* words, int stride, u32 where) {
    if constexpr (kDirect) {
        return multiply_words<S>(ring, watch, lots, words, stride, b.epoch, where, live_of(b));
    } else {
        vector_ready<S>();
        return multiply<S>(ring, lots, b.shared + kShXb, kStrideB);
    }
}
