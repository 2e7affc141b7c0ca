// The decode kernel: one block a multiprocessor, resident for `steps` tokens, a layer after
// another. A block belongs to one lane of the model and owns the same rows of every matrix. The
// residual rows it owns stay in registers as floats; what others need travels as epoch words
// (exchange.h). Per layer: qkv -> attention -> o -> gate/up -> down, five exchanges (six with
// kMerge).
#pragma once

#include "args.h"
#include "attend_pages.h"
#include "attention.h"
#include "block.h"
#include "chiplets.h"
#include "columns.h"
#include "control.h"
#include "exchange.h"
#include "filter.h"
#include "lowered.h"
#include "matvec.h"
#include "platform.h"
#include "ring.h"
#include "sample.h"
#include "shape.h"
#include "stream.h"

KIE_DEVICE u64* other_slot(const DecodeArgs& args, int kind, int layer, int lane_all) {
    return others_of(args, kind, layer) + heard_lane(lane_all) * kVecH;
}

// The row of a layer's norm's scale: attention's (0) or the mlp's (1).
KIE_DEVICE u32 norm_row(const Block& b, int layer, int kind) {
    const Layer& l = layer_of(b, layer);
    return l.norm[kind] + (kLanesAll > 1 && (l.norm_lanes >> kind & 1) != 0 ? b.lane_all : 0);
}
// This warp's share of a normed vector into shared memory: words, or the embedding of the tokens.
struct Squares {
    float v[kColumns];
};  // a lane's part of each column's sum of squares
KIE_DEVICE Squares gather_normed(Watch& watch, const DecodeArgs& args, const Block& b,
                                 const u64* from, bool embedded, u32 norm, u32 epoch, u32 where) {
    constexpr int kShare = kHidden / 2 / kWarps;
    const int warp = thread() / kTeam;
    const u32* weights = args.norms + (long)norm * (kHidden / 2) + warp * kShare;
    Squares squares;
    KIE_UNROLL for (int c = 0; c < kColumns; ++c) squares.v[c] = 0;
    u32* x = (u32*)(b.shared + kShXa) + warp * kShare;
    if (!embedded) {
        gather<kShare, true>(watch, from + warp * kShare, kWordsH, epoch, where, live_of(b),
                             weights, x, kStrideA / 2, squares.v);
        return squares;
    }
    KIE_UNROLL for (int c = 0; c < kColumns; ++c) {
        if (c >= live_of(b)) continue;
        const u32* e = args.embed + (long)tokens_of(b)[c] * (kHidden / 2) + warp * kShare;
        KIE_UNROLL for (int i = 0; i < (kShare + kTeam - 1) / kTeam; ++i) {
            const int at = kTeam * i + lane();
            if (at >= kShare) continue;
            float v0, v1, n0, n1;
            unpack_half2(e[at], v0, v1), unpack_half2(weights[at], n0, n1);
            squares.v[c] += v0 * v0 + v1 * v1;
            x[c * (kStrideA / 2) + at] = pack_half2(v0 * n0, v1 * n1);
        }
    }
    return squares;
}
KIE_DEVICE void add_squares(const Block& b, Squares& s) {
    float* all = (float*)(b.shared + kShNorm);
    const int my = lane();
    // Each step that adds up lanes halves the columns that a lane looks after.
    KIE_UNROLL for (int half = kColumns / 2, m = 16; half > 0; half /= 2, m /= 2) {
        KIE_UNROLL for (int c = 0; c < half; ++c) {
            const bool upper = (my & m) != 0;
            const float give = upper ? s.v[c] : s.v[c + half];
            s.v[c] = (upper ? s.v[c + half] : s.v[c]) + shuffle_xor(give, m);
        }
    }
    KIE_UNROLL for (int m = 16 / kColumns; m > 0; m /= 2) s.v[0] += shuffle_xor(s.v[0], m);
    if (my % (32 / kColumns) == 0) all[my / (32 / kColumns) * kWarps + thread() / kTeam] = s.v[0];
}
// Behind a barrier after the squares were added: 1 / rms of a column, of one of several streams.
KIE_DEVICE float set_scale(const Block& b, int set, int column) {
    const float* s = (const float*)(b.shared + kShNorm) + (set * kColumns + column) * kWarps;
    float sum = 0;
    KIE_UNROLL for (int i = 0; i < kWarps; ++i) sum += s[i];
    return rsqrt_f(sum * (1.0f / kHiddenReal) + kEps);
}
KIE_DEVICE float rms_scale(const Block& b, int column) { return set_scale(b, 0, column); }
// Before the place of vectors is filled again, after the product `S` with what stands there: where
// parts were added up all had met by then.
template <class S>
KIE_DEVICE void vector_free() {
    if (kOneVector && S::k_warps == 1) sync_consumers<kThreads>();
}
template <class S>
KIE_DEVICE void vector_ready() {
    if (S::row_warps > 1)
        sync_consumers<kThreads>();
    else
        sync_warp();
}
// The product with a normed vector; the squares are summed where nobody waits for them.
template <class S>
KIE_DEVICE Sums<S> multiply_normed(Ring& ring, Lots<S>& lots, const Block& b, Squares& squares) {
    if (S::row_warps > 1) add_squares(b, squares);
    vector_ready<S>();
    const Sums<S> s = multiply<S>(ring, lots, b.shared + kShXa, kStrideA);
    if (S::row_warps == 1) add_squares(b, squares);
    return s;
}

// The first page of the only column, asked for while the layer's input is waited for: who attends
// has its share of queries, keys and values to compute, too, and everybody waits for those.
template <class C>
KIE_DEVICE void early_page(const DecodeArgs& args, const Block& b, int layer, Held<C>& held) {
    if (kColumns > 1 || kStreamed) return;
    clear<C>(held);
    const int kv_head = b.seat / C::kSplitBlocks, split = b.seat % C::kSplitBlocks;
    const Layer& l = layer_of(b, layer);
    const PageSpan span = pages_of(l, (int)position_at(args, b.step, 0));
    const int page = first_page<C>(span, split, 0);
    if (split < C::kSplitsMax && kv_head < C::kKvHeads && page <= span.last)
        hold_next<C>(
            held,
            page_at<C>(args, b.shared, {layer, b.lane_index * C::kKvHeads + kv_head, 0}, page),
            page == span.last, span.position);
}
// What every layer or token looks at, into shared memory: layers, stop ids, page tables.
KIE_DEVICE void take_tables(const DecodeArgs& args, u8* shared) {
    constexpr int kAllThreads = kThreads + kHelpers * kWarp;
    const int me = thread();
    u32* layers = (u32*)(shared + kShLayers);
    for (int i = me; i < kLayers * (int)sizeof(Layer) / 4; i += kAllThreads)
        layers[i] = ((const u32*)args.layers)[i];
    u32* stops = (u32*)(shared + kShStops);
    for (int i = me; i < kColumns * kStopsMax; i += kAllThreads)
        stops[i] = args.stop_ids[args.column[i / kStopsMax].row * kStopsMax + i % kStopsMax];
    const u8* index = args.scale_index + block() * kIndexBytes;
    for (int i = me; i < kIndexBytes; i += kAllThreads) shared[kShIndex + i] = index[i];
    if (!kTableShared) return;
    u32* table = (u32*)(shared + kShTable);
    constexpr int kEach = kPools * kPagesMax;
    for (int i = me; i < kTableWords; i += kAllThreads)
        table[i] = args.pages[(u64)args.column[i / kEach].row * kEach + i % kEach];
}

template <class C>
KIE_DEVICE void step_qkv(Ring& ring, const DecodeArgs& args, Block& b, int layer, Held<C>& held,
                         Lots<typename C::TilingQkv>& lots, Squares& squares) {
    float bias[C::TilingQkv::items][2];
    if constexpr (C::kBias) {
        const float* from = args.biases + layer_of(b, layer).biases +
                            (b.lane_index * kBlocksPerLane + b.seat) * C::kRowsQkv;
        each_item<typename C::TilingQkv>([&](int item, int pair, int, bool live) {
            KIE_UNROLL for (int i = 0; i < 2; ++i) bias[item][i] = live ? from[2 * pair + i] : 0;
        });
    }
    Sums<typename C::TilingQkv> s = multiply_normed<typename C::TilingQkv>(ring, lots, b, squares);
    stamp(b, 1);
    if (!kPacked) early_page<C>(args, b, layer, held);
    u64* to =
        args.words + kAtQkv + unit_of(layer, b.lane_index) * kVecQ + b.seat * (C::kRowsQkv / 2);
    finish<typename C::TilingQkv>(
        s, (float*)(b.shared + kShPartA),
        [&](int item, int pair, int column, float v0, float v1, bool live, bool lead) {
            const float scale = rms_scale(b, live ? column : 0);
            const u64 turn =
                ((const u64*)(b.shared +
                              C::kShTurn))[live || !kTurnsOwned ? item * kThreads + thread() : 0];
            float c = number((u32)turn), d = number((u32)(turn >> 32));
            if constexpr (C::kBias)
                v0 = v0 * scale + bias[item][0], v1 = v1 * scale + bias[item][1];
            else
                c *= scale, d *= scale;
            if (live && lead && column < live_of(b))
                publish(to + (long)column * C::kWordsQ + pair,
                        pack_half2(v0 * c - v1 * d, v0 * d + v1 * c), b.epoch);
        });
    stamp(b, 2);
}
// Rotation of each row pair that this thread will own, for the step's positions; the identity for
// v, and for all where heads have norms: then who takes a head turns it. Each thread keeps its own
// in shared memory. q also takes the softmax's 1 / sqrt(head_dim) and log2 e.
template <class C>
KIE_DEVICE void rotations(const DecodeArgs& args, const Block& b, u32 step) {
    const int live_columns = live_at(args, step);
    each_item<typename C::TilingQkv>([&](int item, int pair, int column, bool live) {
        const int row = b.seat * C::kRowsQkv + 2 * pair;
        float c = 1, s = 0;
        if (!C::kHeadNorm && live && row < C::kAttn + C::kKvHeads * C::kHeadDim) {
            const float* r = args.rope + C::kRope +
                             ((long)position_at(args, step, column < live_columns ? column : 0) *
                                  (C::kHeadDim / 2) +
                              row % C::kHeadDim / 2) *
                                 2;
            c = r[0], s = r[1];
            if (row < C::kAttn) {
                c *= C::kQueryScale, s *= C::kQueryScale;
            }
        }
        if (live || !kTurnsOwned)
            ((u64*)(b.shared + C::kShTurn))[item * kThreads + thread()] =
                (u64)bits(s) << 32 | bits(c);
    });
}

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

template <class C>
KIE_DEVICE void step_gate_up(Ring& ring, const DecodeArgs& args, Block& b, int layer,
                             Lots<typename C::TilingGu>& lots, Squares& squares) {
    Sums<typename C::TilingGu> s = multiply_normed<typename C::TilingGu>(ring, lots, b, squares);
    stamp(b, 8);
    u64* to = args.words + kAtAct + unit_of(layer, b.lane_index) * kVecF;
    finish<typename C::TilingGu>(
        s, (float*)(b.shared + kShPartA),
        [&](int, int pair, int column, float v0, float v1, bool live, bool lead) {
            const float scale = rms_scale(b, live ? column : 0), gate = v0 * scale, up = v1 * scale;
            const float y = gate * up * reciprocal_f(1.0f + exp2_f(-1.44269504f * gate));
            const float next = shuffle_xor(y, neighbour<typename C::TilingGu>());
            const int n = b.seat * (C::kRowsGu / 4) + pair / 2,
                      at = C::kDirectDown ? direct_word(n) : n;
            if (live && lead && pair % 2 == 0 && column < live_of(b))
                publish(to + (long)column * C::kWordsF + at, pack_half2(y, next), b.epoch);
        });
    stamp(b, 9);
}

// The head's input where it combines lanes, this warp's share of it: a look at all lanes' streams
// for their sums of squares (or the squares of their sum), then another for the numbers.
KIE_DEVICE void gather_lanes(Watch& watch, const DecodeArgs& args, const Block& b) {
    constexpr int kShare = kHidden / 2 / kWarps;
    const int warp = thread() / kTeam, my = lane();
    const u32 epoch = b.epoch - 1;
    float* all = (float*)(b.shared + kShNorm);  // [kNormSets][kColumns][kWarps]
    const auto words_of = [&](int from, int c) {
        return args.words + kAtLast + heard_lane(from) * kVecH + (long)c * kWordsH + warp * kShare;
    };
    KIE_NO_UNROLL for (int c = 0; c < live_of(b); ++c) {
        float sum = 0;
        KIE_NO_UNROLL for (int set = 0; set < kNormSets; ++set) {
            if (kHeadMode != kHeadSum) sum = 0;
            for (int i = my; i < kShare; i += kTeam) {
                float v0 = 0, v1 = 0;
                for (int l = kHeadMode == kHeadSum ? 0 : set;
                     l < (kHeadMode == kHeadSum ? kLanesAll : set + 1); ++l) {
                    float a, e;
                    unpack_half2(take_word(watch, words_of(l, c) + i, epoch, of_rank(l) | 0xffe), a,
                                 e);
                    v0 += a, v1 += e;
                }
                sum += v0 * v0 + v1 * v1;
            }
            KIE_UNROLL for (int m = 16; m > 0; m /= 2) sum += shuffle_xor(sum, m);
            if (my == 0) all[(set * kColumns + c) * kWarps + warp] = sum;
        }
    }
    sync_consumers<kThreads>();
    u32* x = (u32*)(b.shared + kShXa) + warp * kShare;
    KIE_NO_UNROLL for (int c = 0; c < live_of(b); ++c) {
        for (int i = my; i < kShare; i += kTeam) {
            float s0 = 0, s1 = 0;
            for (int l = 0; l < kLanesAll; ++l) {
                float v0, v1, n0, n1;
                unpack_half2(take_word(watch, words_of(l, c) + i, epoch, of_rank(l) | 0xffe), v0,
                             v1);
                const int row = kFinalNorm + (kFinalNormLanes > 1 && kHeadMode != kHeadSum ? l : 0);
                unpack_half2(args.norms[(long)row * (kHidden / 2) + warp * kShare + i], n0, n1);
                const float scale = kHeadMode == kHeadSum ? 1 : set_scale(b, l, c);
                v0 *= n0 * scale, v1 *= n1 * scale;
                if (kHeadMode == kHeadConcat)
                    x[c * (kStrideA / 2) + l * (kHidden / 2) + i] = pack_half2(v0, v1);
                s0 += v0, s1 += v1;
            }
            const float part = kHeadMode == kHeadMean ? 1.0f / kLanesAll : 1;
            if (kHeadMode != kHeadConcat)
                x[c * (kStrideA / 2) + i] = pack_half2(s0 * part, s1 * part);
        }
    }
    sync_consumers<kThreads>();
}
KIE_DEVICE float head_scale(const Block& b, int column) {
    return kHeadMode == kHeadMean || kHeadMode == kHeadConcat ? 1.0f : rms_scale(b, column);
}
template <class S>
KIE_DEVICE void step_head(const DecodeArgs& args, Block& b, Sums<S>& s, int row, Pick& pick) {
    const int first = head_seat(args, b) * kRowsHead;
    const u32 base = head_base(b);
    finish<S>(s, (float*)(b.shared + kShPartA),
              [&](int item, int pair, int column, float v0, float v1, bool live, bool lead) {
                  const float scale = head_scale(b, live ? column : 0);
                  const int local = first + row + 2 * pair;
                  if (!live || column >= live_of(b)) return;
                  const bool chooses = column < sequences_of(args);
                  const bool plain = chooses && is_plain(args.column[column], b.step);
                  float* raw = args.values + ((u64)column * 2 + 1) * kVocabAll + base;
                  KIE_UNROLL for (int i = 0; i < 2; ++i) {
                      const float v = (i ? v1 : v0) * scale;
                      const u32 id = base + local + i;
                      if (local + i >= kVocab || id >= (u32)kVocabAll) continue;
                      if (args.logits && lead)
                          args.logits[((long)b.step * kColumns + column) * kVocabAll + id] = v;
                      if (!plain) {
                          if (lead && chooses) raw[local + i] = v;
                      } else if (better(v, id, pick.best, pick.id) || !is_finite(v)) {
                          pick.best = is_finite(v) ? v : infinity();
                          pick.id = is_finite(v) ? id : kNotFinite;
                      }
                  }
              });
}

// Attention of this block's share of pages, for each column from `first` on; whether there were
// any.
template <class C>
KIE_DEVICE bool attend_columns(Watch& watch, const DecodeArgs& args, Block& b, int layer, int first,
                               Held<C>& held) {
    const int kv_head = b.seat / C::kSplitBlocks, split = b.seat % C::kSplitBlocks;
    const Layer& l = layer_of(b, layer);
    bool any = false;
    if (kColumns > 1) clear<C>(held);
    if (split >= C::kSplitsMax || kv_head >= C::kKvHeads) return any;
    const int kv_index = b.lane_index * C::kKvHeads + kv_head;
    if constexpr (kColumns > 1) {
        KIE_NO_UNROLL for (int c = first; c < live_of(b); ++c) {
            const int position = position_at(args, b.step, c), shift = shift_at(args, c);
            if ((position / kPage + shift) % C::kSplitsMax != split) continue;
            const AttendAt at = {layer, b.lane_index, kv_head, split, c, shift};
            const Pages pages = {layer, kv_index, c};
            store_new<C>(watch, args, at, position, pages, b.epoch, b.shared);
        }
        sync_consumers<kThreads>();
    }
    KIE_NO_UNROLL for (int c = first; c < live_of(b); ++c) {
        const int shift = shift_at(args, c);
        const PageSpan span = pages_of(l, (int)position_at(args, b.step, c));
        const int page = first_page<C>(span, split, shift);
        if (page > span.last) continue;
        if (kColumns > 1) {
            if (any) sync_consumers<kThreads>();
            hold<C>(held, page_at<C>(args, b.shared, {layer, kv_index, c}, page));
        }
        any = true;
        attend<C>(watch, args, l, {layer, b.lane_index, kv_head, split, c, shift}, span, b.epoch,
                  held, page, b.shared);
    }
    return any;
}
// The same for the only column, whose pages come through the ring.
template <class C>
KIE_DEVICE bool attend_stream(Ring& ring, Watch& watch, const DecodeArgs& args, Block& b,
                              int layer) {
    const int kv_head = b.seat / C::kSplitBlocks, split = b.seat % C::kSplitBlocks;
    const Streamed s = streamed_pages<C>(args, b.shared, b.seat, layer, b.step, 0);
    if (s.count == 0) return false;
    const PageSpan span = pages_of(layer_of(b, layer), (int)position_at(args, b.step, 0));
    const bool fresh = s.first + (s.count - 1) * C::kSplitsMax == span.last;
    take_heads<C>(watch, args, {layer, b.lane_index, kv_head, split, 0, 0}, span, b.epoch, fresh,
                  b.shared);
    sync_consumers<kThreads>();
    attend_pages<C>(ring, args, b, layer, 0, s, 0, (const u32*)(b.shared + kShQkv));
    if (fresh)
        keep_newest<C>(args, span, {layer, b.lane_index * C::kKvHeads + kv_head, 0}, b.shared);
    return true;
}
// The merged attention output, this warp's share of it, into shared memory.
template <class C>
KIE_DEVICE void gather_attention(Watch& watch, const DecodeArgs& args, Block& b, int layer,
                                 bool attended) {
    const int warp = thread() / kTeam;
    constexpr int kShare = C::kWordsA / kWarps;
    const long unit = unit_of(layer, b.lane_index);
    u32* x = (u32*)(b.shared + kShXb) + warp * kShare;
    u64* to = args.words + kAtAttn + unit * kVecA;
    if constexpr (kColumns > 1) {
        merge_columns<C>(watch, args, b, layer);
        join_wave();  // as below
        stamp(b, 4);
        if (kOneVector) sync_consumers<kThreads>();  // attention's vectors may stand there, too
        if constexpr (!C::kDirectO)
            gather_narrow<kShare>(watch, to + warp * kShare, C::kWordsA, b.epoch, layer << 4 | 4,
                                  live_of(b), x, kStrideB / 2);
        return;
    }
    const PageSpan span = pages_of(layer_of(b, layer), (int)position_at(args, b.step, 0));
    const u32 rest = attended ? 0 : kRestMerge;
    if constexpr (C::kMerge == 0) {
        merge<C, C::kMergeCount>(watch, args, layer, b.lane_index, 0, 0, span, b.epoch,
                                 warp * kShare, x, nullptr, rest);
    } else {
        if (warp < C::kMergeSharers)
            merge<C, C::kMergeCount>(watch, args, layer, b.lane_index, 0, 0, span, b.epoch,
                                     b.seat * C::kMergeOwn + warp * C::kMergeCount, nullptr, to,
                                     rest);
        join_wave();  // some of these words are published above, by one team of a wave
        Squares none;
        gather<kShare, false>(watch, to + warp * kShare, C::kWordsA, b.epoch, layer << 4 | 4, 1,
                              nullptr, x, kStrideB / 2, none.v);
    }
    stamp(b, 4);
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

template <class C>
KIE_DEVICE void decode_layer(Ring& ring, Watch& watch, const DecodeArgs& args, Block& b, int layer,
                             Owned& own) {
    Held<C> held;
    const int delay[2] = {layer_of(b, layer).delay[0], layer_of(b, layer).delay[1]};
    Near<typename C::TilingO> near_o;
    ask_near<typename C::TilingO>(args, b, 0, layer, delay[0] > 0 ? delay[0] : -1, near_o);
    {
        Lots<typename C::TilingQkv> lots;
        take_first<typename C::TilingQkv>(ring, lots);
        vector_free<typename C::TilingDown>();
        if (kPacked) early_page<C>(args, b, layer, held);
        Squares squares =
            gather_normed(watch, args, b, hidden_slot(args, 1, layer - 1, b.lane_index), layer == 0,
                          norm_row(b, layer, 0), b.epoch - 1, layer << 4);
        stamp(b, 0);
        step_qkv<C>(ring, args, b, layer, held, lots, squares);
    }
    if (layer == 0)
        KIE_UNROLL for (int i = 0; i < C::TilingO::items; ++i)
            unpack_half2(bits(own.v[i][0]), own.v[i][0], own.v[i][1]);
    const long unit = unit_of(layer, b.lane_index);
    Lots<typename C::TilingGu> gate_up;
    {
        bool attended = false;
        if constexpr (kStreamed && kColumns == 1) {
            attended = attend_stream<C>(ring, watch, args, b, layer);
        } else {
            // The positions of a prompt have many keys of this step among them: they stay with
            // loads.
            const int first = kStreamed ? sequences_of(args) : 0;
            if constexpr (kStreamed) attended = attend_sequences<C>(ring, watch, args, b, layer);
            if (first < live_of(b))
                attended |= attend_columns<C>(watch, args, b, layer, first, held);
        }
        stamp(b, 3);
        Lots<typename C::TilingO> lots;
        take_first<typename C::TilingO>(ring, lots);
        take_first<typename C::TilingGu, 0, C::kEarlyGu>(ring, gate_up);
        Far<typename C::TilingO> far = early_far<typename C::TilingO>(watch, args, b, 0, layer);
        if (delay[0] > 0)
            take_near<typename C::TilingO>(watch, args, b, 0, layer, delay[0], false, 0, near_o);
        gather_attention<C>(watch, args, b, layer, attended);
        step_residual<typename C::TilingO>(watch, args, b, 0, layer, own, 5, far, near_o, [&]() {
            return multiply_output<typename C::TilingO, C::kDirectO>(
                ring, watch, lots, b, args.words + kAtAttn + unit * kVecA, C::kWordsA,
                layer << 4 | 4);
        });
    }
    Far<typename C::TilingDown> far = early_far<typename C::TilingDown>(watch, args, b, 1, layer);
    Near<typename C::TilingDown> near_down;
    ask_near<typename C::TilingDown>(args, b, 1, layer, delay[1] > 0 ? delay[1] : -1, near_down);
    {
        take_first<typename C::TilingGu, C::kEarlyGu>(ring, gate_up);
        vector_free<typename C::TilingO>();
        Squares squares = gather_normed(watch, args, b, hidden_slot(args, 0, layer, b.lane_index),
                                        false, norm_row(b, layer, 1), b.epoch, layer << 4 | 5);
        stamp(b, 7);
        step_gate_up<C>(ring, args, b, layer, gate_up, squares);
    }
    Lots<typename C::TilingDown> lots;
    take_first<typename C::TilingDown>(ring, lots);
    const u64* act = args.words + kAtAct + unit * kVecF;
    if (delay[1] > 0)
        take_near<typename C::TilingDown>(watch, args, b, 1, layer, delay[1], false, 0, near_down);
    if constexpr (!C::kDirectDown) {
        vector_free<typename C::TilingGu>();
        constexpr int kShare = C::kFfn / 2 / kWarps;
        const int first = (int)(thread() / kTeam) * kShare;
        Squares none;
        gather<kShare, false>(watch, act + first, C::kWordsF, b.epoch, layer << 4 | 6, live_of(b),
                              nullptr, (u32*)(b.shared + kShXb) + first, kStrideB / 2, none.v);
    }
    stamp(b, 10);
    step_residual<typename C::TilingDown>(watch, args, b, 1, layer, own, 11, far, near_down, [&]() {
        return multiply_output<typename C::TilingDown, C::kDirectDown>(ring, watch, lots, b, act,
                                                                       C::kWordsF, layer << 4 | 6);
    });
}

KIE_DEVICE void decode_head(Ring& ring, Watch& watch, const DecodeArgs& args, Block& b,
                            Pick& pick) {
    {
        Lots<TilingHead> lots;
        take_first<TilingHead>(ring, lots);
        if constexpr (kHeadMode == kHeadPerLane) {
            vector_free<TilingOwned>();
            Squares squares = gather_normed(
                watch, args, b, hidden_slot(args, 1, kLayers - 1, b.lane_index), false,
                kFinalNorm + (kFinalNormLanes > 1 ? b.lane_all : 0), b.epoch - 1, 0xffe);
            stamp(b, 13);
            Sums<TilingHead> s = multiply_normed<TilingHead>(ring, lots, b, squares);
            step_head<TilingHead>(args, b, s, 0, pick);
        } else {
            sync_consumers<kThreads>();  // the squares of the layer before have been read
            gather_lanes(watch, args, b);
            stamp(b, 13);
            Sums<TilingHead> s = multiply<TilingHead>(ring, lots, b.shared + kShXa, kStrideA);
            step_head<TilingHead>(args, b, s, 0, pick);
        }
    }
    KIE_NO_UNROLL for (int p = 1; p < kHeadPasses; ++p) {
        if (TilingHead::k_warps > 1) sync_consumers<kThreads>();
        const int row = p * kHeadPassRows;
        Lots<TilingHead> lots;
        take_first<TilingHead>(ring, lots, row);
        Sums<TilingHead> s = multiply<TilingHead>(ring, lots, b.shared + kShXa, kStrideA, row);
        step_head<TilingHead>(args, b, s, row, pick);
    }
    if constexpr (kHeadTail > 0) {
        if (TilingHead::k_warps > 1 || TilingTail::k_warps > 1) sync_consumers<kThreads>();
        constexpr int kRow = kHeadPasses * kHeadPassRows;
        Lots<TilingTail> lots;
        take_first<TilingTail>(ring, lots, kRow);
        Sums<TilingTail> s = multiply<TilingTail>(ring, lots, b.shared + kShXa, kStrideA, kRow);
        step_head<TilingTail>(args, b, s, kRow, pick);
    }
}

// Structs, since NVRTC knows no generic lambdas.
struct RunLayer {
    Ring& ring;
    Watch& watch;
    const DecodeArgs& args;
    Block& b;
    int layer;
    Owned& own;
    template <class C>
    KIE_DEVICE void operator()(C) const {
        decode_layer<C>(ring, watch, args, b, layer, own);
    }
};
struct Rotate {
    const DecodeArgs& args;
    const Block& b;
    u32 step;
    template <class C>
    KIE_DEVICE void operator()(C) const {
        rotations<C>(args, b, step);
    }
};
KIE_DEVICE void decode_step(Ring& ring, Watch& watch, const DecodeArgs& args, Block& b) {
    Owned own;
    each_item<TilingOwned>([&](int item, int pair, int column, bool live) {
        const int row = b.seat * (kRowsO / 2) + pair;
        own.v[item][0] = number(live && row < kHidden / 2
                                    ? args.embed[(long)tokens_of(b)[column] * (kHidden / 2) + row]
                                    : 0u);
    });
    const int first = begins_at_head(args, b.step) ? kLayers : 0;
    b.epoch = epoch_at(args.epoch + b.step, first);
    KIE_NO_UNROLL for (int layer = first; layer < kLayers; ++layer)
        of_class(b.shared, layer, RunLayer{ring, watch, args, b, layer, own}),
        ++b.epoch;
    Pick pick = {kLowest, kNone};
    if (sequences_of(args) > 0 || args.logits) decode_head(ring, watch, args, b, pick);
    stamp(b, 14);
    if (watch.lost) lost_of(b) = 1;
    offer(args, b, pick);
    // The next step's, while the offers travel.
    each_class(Rotate{args, b, b.step + 1});
    accept(watch, args, b);
    stamp(b, 15);
}

// The first token of each column, or the step's share of a prompt.
KIE_DEVICE void take_tokens(const DecodeArgs& args, const u8* shared, u32 step) {
    u32* tokens = (u32*)(shared + kShTokens);
    const u32 c = thread();
    if (c >= (u32)kColumns) return;
    if (args.prompt && (int)c >= sequences_of(args)) {
        const u32 at = prompt_at(args, step, c);
        tokens[c] = at < args.count ? args.prompt[at] : 0;
    } else if (step == 0) {
        tokens[c] = c < args.live ? args.column[c].token : 0;
    }
}

// Whether the step that has just been accepted was the last: some sequence ended, the host asked,
// or somebody gave up. All blocks decide alike, from the same words.
KIE_DEVICE bool at_the_end(const DecodeArgs& args, const Block& b) {
    if (((volatile u32*)(b.shared + kShMisc))[2] != kGoOn) return true;
    for (int c = 0; c < sequences_of(args); ++c)
        if (ends_of(b)[c] != 0) return true;
    return false;
}

KIE_DEVICE void run_steps(Ring& ring, Watch& watch, const DecodeArgs& args, Block& b,
                          volatile u32* stop) {
    KIE_NO_UNROLL for (u32 step = 0; step < args.steps; ++step) {
        if (thread() == 0 && block() == 0 && args.stamps) args.stamps[step] = clock_ns();
        watch.step = b.step = step;
        works_at(epoch_at(args.epoch + step, kLayers));
        b.live = live_at(args, step);
        decode_step(ring, watch, args, b);
        if (watch.lost) *stop = step + 1;
        take_tokens(args, b.shared, step + 1);
        if (thread() == 0 && (step + 1 == args.steps || at_the_end(args, b))) *stop = step + 1;
        sync_consumers<kThreads>();  // the edge: see exchange.h
        if (*stop) break;
    }
    if (thread() == 0 && kRanks > 1 && lost_of(b)) poison_all(args);
    if (thread() == 0 && block() == 0 && args.stamps) args.stamps[args.steps] = clock_ns();
}

// Behind the consumers two threads with work of their own, each in a warp of the machine's: on some
// machines a warp runs one side of a branch after the other, and neither of these ever ends first.
static_assert(kThreads % kWarp == 0, "consumers share no warp with others");
KIE_KERNEL(kie_decode, kThreads + kHelpers * kWarp, DecodeArgs args) {
    KIE_SHARED_BYTES(shared);
    Slot* slots = (Slot*)(shared + kShSlots);
    // The number of steps once the last is done, order seen, order agreed, lost (block.h). Whoever
    // meets nobody polls some of these: each says all that it has to say.
    volatile u32* misc = (volatile u32*)(shared + kShMisc);
    u64* trace = (u64*)(shared + kShTrace);
    if (thread() == 0) {
        for (int i = 0; i < kSlots; ++i) slot_init(slots + i, kWarps);
        slots_ready();
        misc[0] = misc[3] = 0, misc[1] = misc[2] = kGoOn;
        for (int i = 0; i < 16; ++i) trace[i] = 0;
    }
    take_tables(args, shared);
    take_tokens(args, shared, 0);
    sync_block();
    if (thread() >= kThreads) {
        be_helper<kWarps>();
        if (thread() == kThreads)
            stream_line(args, shared, misc);
        else if (thread() == kThreads + kWarp && block_all(args) == 0)
            watch_host(args, misc + 1, misc);
        return;
    }
    be_consumer<kWarps>();
    Ring ring = {slots, shared + kShRing, 0, 0, 0, shared + kShIndex};
    Watch watch = {args, 0, 0, 0, false};
    Block b = {(int)block() / kBlocksPerLane,
               (int)block() % kBlocksPerLane,
               (int)args.rank * kLanes + (int)block() / kBlocksPerLane,
               shared,
               0,
               0,
               0,
               nullptr,
               0};
    if (thread() == 0 && args.trace) b.trace = trace, b.traced_at = clock_ticks();
    each_class(Rotate{args, b, 0});
    run_steps(ring, watch, args, b, misc);
    if (b.trace)
        for (int i = 0; i < 16; ++i) args.trace[block() * 16 + i] = trace[i];
}
