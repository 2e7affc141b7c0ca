// Entries of attention over a window and what lies behind it: one for every kEvery positions,
// channel by channel the sum of values weighted by a softmax over positions of scores; then normed,
// its last features turned as at its first position. With two sets a position's first half goes
// into the entry behind its own. Channels are cut over the blocks of a lane: who has one keeps its
// running softmaxes (greatest score, mass, weighted sum: a quad each), as a delta rule keeps its
// state (ops/delta.h), and publishes it where an entry ends.
// Every block makes what this step adds of all that is published: each column's key, and what
// ends of entries and index keys. They stand in shared memory, from where this step takes them, and
// every block stores them in pages, all the same bits, so that none waits for another's store.
#pragma once

#include "args.h"
#include "block.h"
#include "chiplets.h"
#include "exchange.h"
#include "lowered.h"
#include "ops/drafts.h"
#include "ops/latent_attend.h"
#include "ops/latent_words.h"
#include "ops/order.h"
#include "ops/parts.h"
#include "ops/residual.h"
#include "ops/states.h"
#include "pages.h"
#include "platform.h"
#include "shape.h"

// A row of a page, of kDim numbers, dealt out to a warp: every 32nd quad of it a lane's.
template <int kDim>
struct Row {
    static constexpr int kOfQuad = 8 / kParts, kQuads = kDim / kOfQuad,
                         kTurns = (kQuads + kTeam - 1) / kTeam, kPairs = kOfQuad / 2,
                         kBytes = kDim * 2 * kParts;
    static_assert(kDim % 8 == 0, "whole quads");
    float v[kTurns][kOfQuad];
    // visit(turn, quad) of those that there are.
    template <class F>
    static KIE_DEVICE void each(F visit) {
        KIE_UNROLL for (int i = 0; i < kTurns; ++i) {
            const int quad = i * kTeam + (int)thread() % kTeam;
            if (quad < kQuads) visit(i, quad);
        }
    }
};
template <int kDim>
KIE_DEVICE void clear_row(Row<kDim>& r) {
    KIE_UNROLL for (int i = 0; i < Row<kDim>::kTurns; ++i) {
        KIE_UNROLL for (int j = 0; j < Row<kDim>::kOfQuad; ++j) r.v[i][j] = 0;
    }
}
KIE_DEVICE void open_quad(const Quad& q, float (&v)[8 / kParts]) {
    if constexpr (kParts == 1) {
        KIE_UNROLL for (int j = 0; j < 4; ++j) unpack_half2(q.v[j], v[2 * j], v[2 * j + 1]);
    } else {
        KIE_UNROLL for (int j = 0; j < 4; ++j) v[j] = number(q.v[j]);
    }
}
KIE_DEVICE Quad make_quad(const float (&v)[8 / kParts]) {
    Quad q;
    if constexpr (kParts == 1) {
        KIE_UNROLL for (int j = 0; j < 4; ++j) q.v[j] = pack_half2(v[2 * j], v[2 * j + 1]);
    } else {
        KIE_UNROLL for (int j = 0; j < 4; ++j) q.v[j] = bits(v[j]);
    }
    return q;
}
// Of pairs of numbers that stand in words: address(pair).
template <int kDim, class F>
KIE_DEVICE void take_pairs(Watch& watch, Row<kDim>& r, long words, u32 seqno, u32 where,
                           F address) {
    using R = Row<kDim>;
    constexpr int kEach = R::kTurns * R::kPairs;
    Halves h[kEach];
    take_each(watch, h, words, seqno, where, [&](int i) -> const u64* {
        const int quad = i / R::kPairs * kTeam + (int)thread() % kTeam;
        return quad < R::kQuads ? address(quad * R::kPairs + i % R::kPairs) : nullptr;
    });
    KIE_UNROLL for (int i = 0; i < kEach; ++i) numbers_of(
        h[i], r.v[i / R::kPairs][i % R::kPairs * 2], r.v[i / R::kPairs][i % R::kPairs * 2 + 1]);
    sync_warp();
}
// Of words that are floats.
template <int kDim>
KIE_DEVICE void take_floats(Watch& watch, Row<kDim>& r, const u64* from, u32 seqno, u32 where) {
    using R = Row<kDim>;
    Row<kDim>::each([&](int i, int quad) {
        u64 v[R::kOfQuad];
        KIE_UNROLL for (int j = 0; j < R::kOfQuad; ++j) v[j] =
            load_word(from + quad * R::kOfQuad + j);
        watch.polls = 0;
        for (;;) {
            u32 late = 0;
            KIE_UNROLL for (int j = 0; j < R::kOfQuad; ++j) late |= seqno_of(v[j]) ^ seqno;
            if (late == 0 || kNoWaits || wait_expired(watch, where, seqno, seqno ^ late)) break;
            KIE_UNROLL for (int j = 0; j < R::kOfQuad; ++j) if (seqno_of(v[j]) != seqno) v[j] =
                load_word(from + quad * R::kOfQuad + j);
        }
        KIE_UNROLL for (int j = 0; j < R::kOfQuad; ++j) r.v[i][j] = number((u32)v[j]);
    });
    sync_warp();
}
// visit(pair among those that turn, a, b)
template <class C, int kDim, class F>
KIE_DEVICE void each_turned(Row<kDim>& r, F visit) {
    constexpr int kFirst = kDim - C::kTurned;
    Row<kDim>::each([&](int i, int quad) {
        KIE_UNROLL for (int j = 0; j < Row<kDim>::kPairs; ++j) {
            const int feature = quad * Row<kDim>::kOfQuad + 2 * j;
            if (feature >= kFirst) visit((feature - kFirst) / 2, r.v[i][2 * j], r.v[i][2 * j + 1]);
        }
    });
}
template <class C, int kDim>
KIE_DEVICE void turn_row(const DecodeArgs& args, Row<kDim>& r, int position) {
    each_turned<C>(r, [&](int n, float& a, float& e) { turn_pair<C>(args, position, n, a, e); });
}
template <int kDim>
KIE_DEVICE float row_scale(const Row<kDim>& r) {
    float sum = 0;
    Row<kDim>::each([&](int i, int) {
        KIE_UNROLL for (int j = 0; j < Row<kDim>::kOfQuad; ++j) sum += r.v[i][j] * r.v[i][j];
    });
    KIE_UNROLL for (int m = 16; m > 0; m /= 2) sum += shuffle_xor(sum, m);
    return rsqrt_f(sum * (1.0f / kDim) + kEps);
}
// A row by one warp: normed, turned as at `position`, into shared memory and its page.
template <class C, int kDim>
KIE_DEVICE void finish_row(const DecodeArgs& args, Row<kDim>& r, const float* norm, int position,
                           u8* here, u8* page) {
    using R = Row<kDim>;
    const float scale = row_scale(r);
    R::each([&](int i, int quad) {
        KIE_UNROLL for (int j = 0; j < R::kOfQuad; ++j) r.v[i][j] *=
            scale * norm[quad * R::kOfQuad + j];
    });
    turn_row<C>(args, r, position);
    R::each([&](int i, int quad) {
        const Quad q = make_quad(r.v[i]);
        *(Quad*)(here + quad * 16) = q;
        u64* to = (u64*)(page + quad * 16);
        store_alike(to, (u64)q.v[1] << 32 | q.v[0]);
        store_alike(to + 1, (u64)q.v[3] << 32 | q.v[2]);
    });
}

// What each column adds in this step: a key, and what ends of an entry and of an index key.
enum RowKind { kRowKey, kRowEntry, kRowIndex };
template <class C, int kKind>
KIE_CONST_FN int row_width() {
    if constexpr (kKind == kRowIndex)
        return C::kIndexDim;
    else
        return C::kDim;
}
template <class C, int kKind>
KIE_CONST_FN int row_pool() {
    if constexpr (kKind == kRowIndex)
        return C::kPoolIndex;
    else
        return C::kPoolEntries;
}
template <class C, int kKind>
KIE_DEVICE u8* new_row(const Block& b, int column) {
    constexpr int kAt = kKind == kRowKey ? 0 : kKind == kRowEntry ? C::kNewEntry : C::kNewIndex;
    return b.shared + kShStates + column * C::kNewRow + kAt;
}
// The first position that the step adds to a column's sequence, and the column of one of those.
KIE_DEVICE int first_new(const DecodeArgs& args, const Block& b, int column) {
    const int sequences = sequences_of(args),
              first = kLookup ? sequence_at(b.shared, column) : min_i(column, sequences);
    return (int)position_at(args, b.shared, b.step, first);
}
KIE_DEVICE int column_of_new(const DecodeArgs& args, const Block& b, int column, int position) {
    const int sequences = sequences_of(args), ahead = position - first_new(args, b, column);
    if (column < sequences) return column;
    if constexpr (kLookup) {
        const int sequence = sequence_at(b.shared, column);
        return ahead == 0 ? sequence : (int)drafts_of(b).sequence[sequence].first + ahead - 1;
    }
    return sequences + ahead;
}
// Where a layer's running softmaxes (0), entries (1) and index keys (2) stand in their pages.
template <class C>
KIE_DEVICE u32 place_of_state(const DecodeArgs& args, const Block& b, int layer, int which) {
    return ((const u32*)extras_of(args, b, layer))[C::kAtPlaces + which];
}
template <class C, int kKind>
KIE_DEVICE u8* entry_page(const DecodeArgs& args, const Block& b, int layer, int column,
                          int entry) {
    constexpr int kPool = row_pool<C, kKind>();
    // In the page of its last position.
    const int last = (entry + 1) * C::kEvery - 1;
    const u32 at = place_of_state<C>(args, b, layer, kKind);
    return pool_page<kPool>(args, b.shared, column, last / kPage, at) +
           last % kPage / C::kEvery * Row<row_width<C, kKind>()>::kBytes;
}
// A row of what a column sees, and whether this step adds it.
struct SeenRow {
    const u8* at;
    bool here;
};
template <class C>
KIE_DEVICE SeenRow seen_key(const DecodeArgs& args, const Block& b, int layer, int column,
                            int position) {
    if (position >= first_new(args, b, column))
        return {new_row<C, kRowKey>(b, column_of_new(args, b, column, position)), true};
    return {layer_page(args, b.shared, layer, column, position / kPage) +
                position % kPage * Row<C::kDim>::kBytes,
            false};
}
template <class C, int kKind>
KIE_DEVICE SeenRow seen_entry(const DecodeArgs& args, const Block& b, int layer, int column,
                              int entry) {
    const int last = (entry + 1) * C::kEvery - 1;
    if (last >= first_new(args, b, column))
        return {new_row<C, kKind>(b, column_of_new(args, b, column, last)), true};
    return {entry_page<C, kKind>(args, b, layer, column, entry), false};
}
KIE_DEVICE Quad load_seen(const SeenRow& row, int quad) {
    return row.here ? *(const Quad*)(row.at + quad * 16) : load_state(row.at + quad * 16);
}

// A running softmax takes one more position in.
struct Running {
    float top, mass, sum;
};
KIE_DEVICE void take_in(Running& r, float score, float value) {
    constexpr float kLog2e = 1.44269504f;
    if (score > r.top) {
        const float keep = exp2_f((r.top - score) * kLog2e);
        r = {score, r.mass * keep + 1.0f, r.sum * keep + value};
    } else {
        const float weight = exp2_f((score - r.top) * kLog2e);
        r.mass += weight, r.sum += weight * value;
    }
}
// Running softmaxes of this block's channel `n` in a state, and where a column's begin.
template <class C>
KIE_DEVICE u8* running_at(const DecodeArgs& args, const Block& b, int layer, u64 state, int n) {
    return args.states + state * C::kStatesBytes + C::kAtStates +
           place_of_state<C>(args, b, layer, 0) + n * (C::kSets * 16);
}
template <class C>
KIE_DEVICE u8* running_copy(const DecodeArgs& args, const Block& b, int layer, int column, int page,
                            int n) {
    const u32 at = place_of_state<C>(args, b, layer, 0);
    return pool_page<C::kPoolSums>(args, b.shared, column, page, at) + n * (C::kSets * 16);
}
template <class C>
KIE_DEVICE const u8* running_from(const DecodeArgs& args, const Block& b, int layer, int column,
                                  int n) {
    const StateBefore before = state_before(args, b, column);
    if (before.none) return nullptr;
    if (before.page >= 0) return running_copy<C>(args, b, layer, column, before.page, n);
    return running_at<C>(args, b, layer, before.number, n);
}
// A channel: what its values and scores are made of.
struct Channel {
    int number, width, at, at_score, at_bias;
};
template <class C>
KIE_DEVICE Channel channel_of(int n) {
    if constexpr (C::kIndexed) {
        if (n >= C::kDim)
            return {n - C::kDim, C::kIndexDim, C::kAtIndex, C::kAtIndexScore, C::kAtIndexBias};
    }
    return {n, C::kDim, C::kAtEntry, C::kAtEntryScore, C::kAtEntryBias};
}
template <class C>
KIE_DEVICE u64* entry_words(const DecodeArgs& args, const Block& b, int layer, int column) {
    return args.ll_words + kAtPartial + buffer_of(layer, b.lane_index) * kVecPartial +
           (long)column * C::kPartialWords;
}
// One position of a channel: the entry behind its own, then its own, which is made where it ends.
template <class C>
KIE_DEVICE void pool_position(Watch& watch, const DecodeArgs& args, const Block& b, int layer,
                              int column, int position, const Channel& of, int n,
                              Running (&state)[C::kSets]) {
    const u64* words = latent_words<C>(args, b, layer, column);
    const auto number_at = [&](int i) {  // values of the sets, then scores
        return (i < C::kSets ? of.at : of.at_score) + i % C::kSets * of.width + of.number;
    };
    Halves h[2 * C::kSets];
    take_each(watch, h, C::kWordsQ, b.seqno, layer << 4 | kWaitLatents,
              [&](int i) { return words + heard_latent<C>(number_at(i) / 2); });
    const float* bias = extras_of(args, b, layer) + of.at_bias +
                        position % C::kEvery * (C::kSets * of.width) + of.number;
    float v[2 * C::kSets];
    KIE_UNROLL for (int i = 0; i < 2 * C::kSets; ++i) {
        float both[2];
        numbers_of(h[i], both[0], both[1]);
        v[i] = number_at(i) % 2 ? both[1] : both[0];
    }
    KIE_UNROLL for (int set = 0; set < C::kSets; ++set)
        take_in(state[set], v[C::kSets + set] + bias[set * of.width], v[set]);
    if ((position + 1) % C::kEvery != 0) return;
    const Running& own = state[C::kSets - 1];
    publish(entry_words<C>(args, b, layer, column) + n, bits(own.sum * reciprocal_f(own.mass)),
            b.seqno);
    if constexpr (C::kSets > 1) state[C::kSets - 1] = state[0];
    state[0] = {-infinity(), 0, 0};
}
// This block's channels, a thread each.
template <class C>
KIE_DEVICE void pool_channels(Watch& watch, const DecodeArgs& args, const Block& b, int layer) {
    const int live = live_of(b);
    for (int i = thread(); i < C::kChannels; i += kThreads) {
        const int n = b.block_in_lane * C::kChannels + i;
        if (n >= C::kChannelsAll) break;
        const Channel of = channel_of<C>(n);
        Running state[C::kSets];
        KIE_NO_UNROLL for (int c = 0; c < live; ++c) {
            const int position = (int)position_at(args, b.shared, b.step, c);
            const auto store = [&](u8* to) {
                KIE_UNROLL for (int set = 0; set < C::kSets; ++set) store_state(
                    to + set * 16,
                    {{bits(state[set].top), bits(state[set].mass), bits(state[set].sum), 0}});
            };
            if (!follows(args, b, c)) {
                const u8* from = running_from<C>(args, b, layer, c, n);
                KIE_UNROLL for (int set = 0; set < C::kSets; ++set) {
                    state[set] = {-infinity(), 0, 0};
                    if (!from) continue;
                    const Quad q = load_state(from + set * 16);
                    state[set] = {number(q.v[0]), number(q.v[1]), number(q.v[2])};
                }
            }
            pool_position<C>(watch, args, b, layer, c, position, of, n, state);
            if (leaves_state(args, b, c))
                store(running_at<C>(args, b, layer, state_behind(args, b, c), n));
            if ((position + 1) % kPage == 0)
                store(running_copy<C>(args, b, layer, c, position / kPage, n));
        }
    }
    join_wave();  // all wait for what some have published
}
// What this block's channels have behind the draft `kept` becomes its sequence's.
template <class C>
KIE_DEVICE void keep_channels(const DecodeArgs& args, const Block& b, int layer, int sequence,
                              int kept) {
    for (int i = thread(); i < C::kChannels; i += kThreads) {
        const int n = b.block_in_lane * C::kChannels + i;
        if (n >= C::kChannelsAll) break;
        const u8* from = running_at<C>(args, b, layer, state_behind(args, b, kept), n);
        u8* to = running_at<C>(args, b, layer, state_behind(args, b, sequence), n);
        KIE_UNROLL for (int set = 0; set < C::kSets; ++set)
            store_state(to + set * 16, load_state(from + set * 16));
    }
}
// What the step adds, a column a warp.
template <class C>
KIE_DEVICE void make_rows(Watch& watch, const DecodeArgs& args, const Block& b, int layer) {
    const float* extras = extras_of(args, b, layer);
    const u32 where = layer << 4 | kWaitChannels;
    KIE_NO_UNROLL for (int c = (int)(thread() / kTeam); c < live_of(b); c += kWarps) {
        const int position = (int)position_at(args, b.shared, b.step, c);
        Row<C::kDim> row;
        const u64* words = latent_words<C>(args, b, layer, c);
        take_pairs(watch, row, C::kWordsQ, b.seqno, layer << 4 | kWaitLatents,
                   [&](int pair) { return words + heard_latent<C>(C::kAtKey + pair); });
        u8* page = layer_page(args, b.shared, layer, c, position / kPage);
        finish_row<C>(args, row, extras + C::kAtKeyNorm, position, new_row<C, kRowKey>(b, c),
                      page + position % kPage * Row<C::kDim>::kBytes);
        if constexpr (C::kEntries) {
            if ((position + 1) % C::kEvery != 0) continue;
            const int entry = position / C::kEvery, begin = position + 1 - C::kEvery;
            const u64* made = entry_words<C>(args, b, layer, c);
            take_floats(watch, row, made, b.seqno, where);
            finish_row<C>(args, row, extras + C::kAtEntryNorm, begin, new_row<C, kRowEntry>(b, c),
                          entry_page<C, kRowEntry>(args, b, layer, c, entry));
            if constexpr (C::kIndexed) {
                Row<C::kIndexDim> key;
                take_floats(watch, key, made + C::kDim, b.seqno, where);
                finish_row<C>(args, key, extras + C::kAtIndexNorm, begin,
                              new_row<C, kRowIndex>(b, c),
                              entry_page<C, kRowIndex>(args, b, layer, c, entry));
            }
        }
    }
    sync_consumers<kThreads>();
}
