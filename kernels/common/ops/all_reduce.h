// What lanes, and ranks, add to each other's residual: an all-reduce of a product's outputs (o or
// down), of the same layer or of one some layers ago (its delay). A lane publishes its outputs to
// all; who owns a row of the residual adds the others' outputs of it, in a fixed order.
//
// Buffers. Outputs are numbered in the order of the work; the words of output n have the buffer of
// output n - 2 kNumBuffersOther. When a lane stores n it has all that it read for the outputs
// before n, and the lanes that stored those were done with what they had read for outputs still
// earlier. So where all readers of the buffer's old words come before that, nobody reads them any
// more; what was read is in registers, so this needs no fence. lower/model.rs (num_buffers_other)
// takes the fewest buffers for which it holds.
#pragma once

#include "args.h"
#include "block.h"
#include "exchange.h"
#include "lowered.h"
#include "ops/matvec.h"
#include "ops/parts.h"
#include "platform.h"

// Which thread reads which of the other lanes' words; lower/layout.rs says which way a kernel has.
enum AllReduceRead {
    kReadNothing,    // there is one lane
    kReadByFour,     // four threads hold each result of the only column: each reads some lanes'
    kReadByOwner,    // a thread owns one result of the only column and reads all lanes' words of it
    kReadByColumns,  // a thread owns results of several columns and reads all lanes' words of them
    kReadByAll,      // words are dealt out to all threads, and reach the owner by shared memory
};

// Of outputs of o (kind 0) or down (1): those of layer - delay are added; delay -1: none are.
struct Reduction {
    int kind, layer, delay;
};
KIE_DEVICE Reduction reduction_of(const Block& b, int kind, int layer) {
    return {kind, layer, layer_of(b, layer).delay[kind]};
}
KIE_DEVICE const u64* other_word(const DecodeArgs& args, const Block& b, const Reduction& r,
                                 int from, int pair, int vector) {
    return other_slot(args, r.kind, r.layer - r.delay, from) + (long)vector * (kWordsH / kParts) +
           b.block_in_lane * (kRowsO / 2) + pair;
}
// For the record of a wait.
KIE_DEVICE u32 where_of(const Reduction& r, int from) {
    return of_rank(from) | r.layer << 4 | (r.kind ? 7 : 3);
}

// The interface: a product's output `S`, its owner's view of what others made. Called in this
// order, each where the words may travel while something else is done.
template <class S>
struct ReadNothing {
    // Of earlier layers: asked for long before ...
    KIE_DEVICE void ask_early(const DecodeArgs&, const Block&, const Reduction&) {}
    // ... or read at once, since it has long been there ...
    KIE_DEVICE void read_early(Watch&, const DecodeArgs&, const Block&, const Reduction&) {}
    // ... and added up before the product's input is waited for.
    KIE_DEVICE void take_early(Watch&, const DecodeArgs&, const Block&, const Reduction&) {}
    // Before the product, and behind it.
    KIE_DEVICE void ask(const DecodeArgs&, const Block&, const Reduction&) {}
    KIE_DEVICE void take(Watch&, const DecodeArgs&, const Block&, const Reduction&) {}
    // Of this layer: behind this lane's own, which others wait for. `alike`: this lane's own part,
    // a word (`mine`) like the others', counts, too.
    KIE_DEVICE void take_undelayed(Watch&, const DecodeArgs&, const Block&, const Reduction&, bool,
                                   const Halves (&)[S::items]) {}
    // The sum of others' outputs for a row pair that this thread owns.
    KIE_DEVICE void add(const Block&, const Reduction&, int, int, int, bool, bool, const Halves&,
                        float&, float&) const {}
};

// Both ways in which a thread looks after some words, whoever owns the rows.
template <class S, class Share>
struct ReadShare : ReadNothing<S> {
    u64 words[Share::kCount];
    KIE_DEVICE void ask(const DecodeArgs& args, const Block& b, const Reduction& r) {
        KIE_UNROLL for (int i = 0; i < Share::kCount; ++i) words[i] = 0;
        if (r.delay < 0) return;
        Share::each(b, [&](int i, int from, int pair, int vector, int) {
            words[i] = load_word(other_word(args, b, r, from, pair, vector));
        });
    }
    KIE_DEVICE void take(Watch& watch, const DecodeArgs& args, const Block& b, const Reduction& r) {
        Share::each(b, [&](int i, int from, int pair, int vector, int at) {
            const u64* p = other_word(args, b, r, from, pair, vector);
            const u32 seqno = b.seqno - r.delay;
            watch.polls = 0;
            while (!kNoWaits && seqno_of(words[i]) != seqno &&
                   !wait_expired(watch, where_of(r, from), seqno, seqno_of(words[i])))
                words[i] = load_word(p);
            Share::leave(b, at, (u32)words[i]);
        });
    }
};
// visit(index, lane, pair, vector, place in shared memory) for each of this thread's words.
template <class S>
struct ShareOfFour {
    static constexpr int kEach = (kLanesAll + 3) / 4, kCount = S::items * kEach * kParts;
    template <class F>
    static KIE_DEVICE void each(const Block& b, F visit) {
        each_item<S>([&](int item, int pair, int column, bool live) {
            KIE_UNROLL for (int i = 0; i < kEach; ++i) {
                const int from = (int)lane() % 4 + 4 * i;
                if (live && from < kLanesAll && from != b.lane_all)
                    KIE_UNROLL for (int part = 0; part < kParts; ++part) visit(
                        (item * kEach + i) * kParts + part, from, pair, column * kParts + part, 0);
            }
        });
    }
    static KIE_DEVICE void leave(const Block&, int, u32) {}
};
template <class S>
struct ShareOfAll {
    static constexpr int kEach = S::row_pairs * kVectors,
                         kCount = (kOtherWords + kThreads - 1) / kThreads;
    template <class F>
    static KIE_DEVICE void each(const Block& b, F visit) {
        KIE_UNROLL for (int i = 0; i < kCount; ++i) {
            const int n = i * kThreads + (int)thread(), from = n / kEach;
            const int vector = n % kEach / S::row_pairs;
            if (n < kOtherWords && from != b.lane_all && vector < live_of(b) * kParts)
                visit(i, from, n % kEach % S::row_pairs, vector, n);
        }
    }
    static KIE_DEVICE void leave(const Block& b, int at, u32 payload) {
        ((u32*)(b.shared + kShOthers))[at] = payload;
    }
};

template <class S>
struct ReadByFour : ReadShare<S, ShareOfFour<S>> {
    KIE_DEVICE void take_undelayed(Watch& watch, const DecodeArgs& args, const Block& b,
                                   const Reduction& r, bool, const Halves (&)[S::items]) {
        this->take(watch, args, b, r);
    }
    KIE_DEVICE void add(const Block& b, const Reduction& r, int item, int, int, bool live,
                        bool alike, const Halves& mine, float& a0, float& a1) const {
        if (r.delay < 0) return;
        constexpr int kEach = ShareOfFour<S>::kEach;
        KIE_UNROLL for (int i = 0; i < kEach; ++i) {
            const int from = (int)lane() % 4 + 4 * i;
            const bool self = from == b.lane_all;
            if (!live || from >= kLanesAll || (self && !alike)) continue;
            float x0, x1;
            Halves its;
            KIE_UNROLL for (int part = 0; part < kParts; ++part) its.v[part] =
                self ? mine.v[part] : (u32)this->words[(item * kEach + i) * kParts + part];
            numbers_of(its, x0, x1);
            a0 += x0, a1 += x1;
        }
        a0 += shuffle_xor(a0, 1), a1 += shuffle_xor(a1, 1);
        a0 += shuffle_xor(a0, 2), a1 += shuffle_xor(a1, 2);
    }
};
template <class S>
struct ReadByAll : ReadShare<S, ShareOfAll<S>> {
    KIE_DEVICE void take_undelayed(Watch& watch, const DecodeArgs& args, const Block& b,
                                   const Reduction& r, bool, const Halves (&)[S::items]) {
        this->take(watch, args, b, r);
        sync_consumers<kThreads>();  // what threads left for each other
    }
    KIE_DEVICE void add(const Block& b, const Reduction& r, int, int pair, int column, bool live,
                        bool alike, const Halves& mine, float& a0, float& a1) const {
        if (r.delay < 0) return;
        KIE_UNROLL for (int from = 0; from < kLanesAll; ++from) {
            const bool self = from == b.lane_all;
            if (!live || (self && !alike)) continue;
            const int at = (from * kVectors + column * kParts) * S::row_pairs + pair;
            const u32* words = (const u32*)(b.shared + kShOthers) + at;
            float x0, x1;
            Halves its;
            KIE_UNROLL for (int part = 0; part < kParts; ++part) its.v[part] =
                self ? mine.v[part] : words[part * S::row_pairs];
            numbers_of(its, x0, x1);
            a0 += x0, a1 += x1;
        }
    }
};

template <class S>
struct ReadByOwner : ReadNothing<S> {
    u64 v[kLanesAll][kParts];
    float sum[2];
    KIE_DEVICE void ask_early(const DecodeArgs& args, const Block& b, const Reduction& r) {
        static_assert(S::items == 1, "one result a thread");
        sum[0] = sum[1] = 0;
        KIE_UNROLL for (int l = 0; l < kLanesAll; ++l) {
            KIE_UNROLL for (int part = 0; part < kParts; ++part) v[l][part] = 0;
        }
        const int pair = (int)thread();
        if (r.delay <= 0 || pair >= S::row_pairs) return;
        KIE_UNROLL for (int l = 0; l < kLanesAll; ++l) {
            KIE_UNROLL for (int part = 0; part < kParts; ++part) if (l != b.lane_all) v[l][part] =
                load_word(other_word(args, b, r, l, pair, part));
        }
    }
    KIE_DEVICE void take_early(Watch& watch, const DecodeArgs& args, const Block& b,
                               const Reduction& r) {
        if (r.delay > 0) add_up(watch, args, b, r, false, {});
    }
    KIE_DEVICE void take_undelayed(Watch& watch, const DecodeArgs& args, const Block& b,
                                   const Reduction& r, bool alike, const Halves (&mine)[S::items]) {
        add_up(watch, args, b, r, alike, mine[0]);
        sync_consumers<kThreads>();
    }
    KIE_DEVICE void add(const Block&, const Reduction&, int, int, int, bool, bool, const Halves&,
                        float& a0, float& a1) const {
        a0 = sum[0], a1 = sum[1];
    }
    KIE_DEVICE void add_up(Watch& watch, const DecodeArgs& args, const Block& b, const Reduction& r,
                           bool alike, const Halves& mine) {
        const int pair = (int)thread();
        if (pair >= S::row_pairs) return;
        const u32 seqno = b.seqno - r.delay;
        watch.polls = 0;
        for (;;) {
            u32 late = 0;
            int from = 0;
            KIE_UNROLL for (int l = 0; l < kLanesAll; ++l) {
                KIE_UNROLL for (int part = 0; part < kParts; ++part) {
                    const u32 off = seqno_of(v[l][part]) ^ seqno;
                    if (l != b.lane_all && off != 0) late = off, from = l;
                }
            }
            if (late == 0 || kNoWaits ||
                wait_expired(watch, where_of(r, from), seqno, seqno ^ late))
                break;
            KIE_UNROLL for (int l = 0; l < kLanesAll; ++l) {
                KIE_UNROLL for (int part = 0; part < kParts; ++part) {
                    if (l != b.lane_all && seqno_of(v[l][part]) != seqno)
                        v[l][part] = load_word(other_word(args, b, r, l, pair, part));
                }
            }
        }
        KIE_UNROLL for (int l = 0; l < kLanesAll; ++l) {
            const bool self = l == b.lane_all;
            if (self && !alike) continue;
            float x0, x1;
            Halves its;
            KIE_UNROLL for (int part = 0; part < kParts; ++part) its.v[part] =
                self ? mine.v[part] : (u32)v[l][part];
            numbers_of(its, x0, x1);
            sum[0] += x0, sum[1] += x1;
        }
    }
};

template <class S>
struct ReadByColumns : ReadNothing<S> {
    float v[S::items][2];
    KIE_DEVICE void read_early(Watch& watch, const DecodeArgs& args, const Block& b,
                               const Reduction& r) {
        KIE_UNROLL for (int i = 0; i < S::items; ++i) v[i][0] = v[i][1] = 0;
        if (r.delay > 0) add_up(watch, args, b, r, false);
    }
    KIE_DEVICE void take_undelayed(Watch& watch, const DecodeArgs& args, const Block& b,
                                   const Reduction& r, bool alike, const Halves (&)[S::items]) {
        add_up(watch, args, b, r, alike);
    }
    KIE_DEVICE void add(const Block&, const Reduction&, int item, int, int, bool, bool,
                        const Halves&, float& a0, float& a1) const {
        a0 = v[item][0], a1 = v[item][1];
    }
    // In the order in which four threads of the one-column kernel add.
    KIE_DEVICE void add_up(Watch& watch, const DecodeArgs& args, const Block& b, const Reduction& r,
                           bool alike) {
        const u64* from = others_of(args, r.kind, r.layer - r.delay);
        const u32 seqno = b.seqno - r.delay;
        constexpr int kOnce = S::items < 2 || kParts > 1 ? 1 : 2;
        static_assert(S::items % kOnce == 0, "results in groups");
        KIE_UNROLL for (int first = 0; first < S::items; first += kOnce) {
            const u64* p[kOnce];
            each_item<S>([&](int item, int pair, int column, bool live) {
                if (item < first || item >= first + kOnce) return;
                // Who has no such result takes another's.
                const long at = live && column < live_of(b) ? (long)column * kWordsH + pair : 0;
                p[item - first] = from + b.block_in_lane * (kRowsO / 2) + at;
            });
            u64 words[kOnce][kLanesAll][kParts];
            watch.polls = 0;
            for (;;) {
                bool ok = true;
                u32 seen = seqno;
                int late = 0;
                KIE_UNROLL for (int i = 0; i < kOnce; ++i) {
                    KIE_UNROLL for (int l = 0; l < kLanesAll; ++l) {
                        KIE_UNROLL for (int part = 0; part < kParts; ++part) words[i][l][part] =
                            load_word(p[i] + l * kVecH + part * (kWordsH / kParts));
                    }
                }
                KIE_UNROLL for (int i = 0; i < kOnce; ++i) {
                    KIE_UNROLL for (int l = 0; l < kLanesAll; ++l) {
                        KIE_UNROLL for (int part = 0; part < kParts; ++part) {
                            if (seqno_of(words[i][l][part]) == seqno) continue;
                            ok = false, seen = seqno_of(words[i][l][part]), late = l;
                        }
                    }
                }
                if (ok || kNoWaits || wait_expired(watch, where_of(r, late), seqno, seen)) break;
            }
            KIE_UNROLL for (int i = 0; i < kOnce; ++i) {
                float sum[4][2];
                KIE_UNROLL for (int t = 0; t < 4; ++t) {
                    sum[t][0] = sum[t][1] = 0;
                    KIE_UNROLL for (int l = t; l < kLanesAll; l += 4) {
                        float x0, x1;
                        Halves its;
                        KIE_UNROLL for (int part = 0; part < kParts; ++part) its.v[part] =
                            (u32)words[i][l][part];
                        numbers_of(its, x0, x1);
                        if (l != b.lane_all || alike) sum[t][0] += x0, sum[t][1] += x1;
                    }
                }
                KIE_UNROLL for (int j = 0; j < 2; ++j) v[first + i][j] =
                    (sum[0][j] + sum[1][j]) + (sum[2][j] + sum[3][j]);
            }
        }
    }
};

template <class S, int kRead>
struct AllReduceBy : ReadNothing<S> {};
template <class S>
struct AllReduceBy<S, kReadByFour> : ReadByFour<S> {};
template <class S>
struct AllReduceBy<S, kReadByOwner> : ReadByOwner<S> {};
template <class S>
struct AllReduceBy<S, kReadByColumns> : ReadByColumns<S> {};
template <class S>
struct AllReduceBy<S, kReadByAll> : ReadByAll<S> {};
template <class S>
using AllReduce = AllReduceBy<S, kAllReduceRead>;

// A rank's words for the others, each other rank's stored by a warp of its own: those that own
// results go on at once.
constexpr bool kSpread = kAllReduceRead == kReadByOwner && kRanks > 1 &&
                         kRanks <= kWarps&& TilingOwned::row_pairs <= kTeam;
KIE_DEVICE void publish_share(const DecodeArgs& args, u64* p, const Halves& h, u32 seqno) {
    KIE_UNROLL for (int part = 0; part < kParts; ++part) {
        u64* to = p + part * (kWordsH / kParts);
        if constexpr (kSpread) {
            publish_to(args, (thread() / kTeam + args.rank) % kRanks, to, h.v[part], seqno);
        } else {
            publish_all(args, to, h.v[part], seqno);
        }
    }
}
