// What several columns do in their own way: many columns' words are on their way at once, and each
// result is added up in the order of the one-column kernel, so that a sequence's bits are the same
// alone and among others.
#pragma once

#include "args.h"
#include "attention.h"
#include "block.h"
#include "chiplets.h"
#include "exchange.h"
#include "lowered.h"
#include "matvec.h"
#include "platform.h"
#include "ring.h"
#include "shape.h"

// Attention's parts, merged by owners: the blocks of a lane share all words of all columns, a word
// of one column a thread. Everybody gathers them afterwards.
// How the one-column kernel's warps share the splits of a word (see merge). With many parts two
// warps of an owner share its words: all of one warp's looks are in flight at once.

template <class C>
KIE_DEVICE void merge_one(Watch& watch, const u64* parts, int word, int column, int shift,
                          const PageSpan& span, u32 epoch, u32 where, u64* out) {
    constexpr int kGroups = C::kMergeGroups < C::kSplitsMax ? C::kMergeGroups : C::kSplitsMax;
    constexpr int kOnce = C::kSplitsMax < 8 ? C::kSplitsMax : 8;
    const int pages = span.last - span.first + 1,
              live = pages < C::kSplitsMax ? pages : C::kSplitsMax;
    const auto lot = [&](int s) {
        const int split = (span.first + s + shift) % C::kSplitsMax;
        return parts + (long)(split * kColumns + column) * C::kPartWords + word / 8 * kPartLine;
    };
    u64 a[kOnce], m[C::kSplitsMax];
    KIE_UNROLL for (int s = 0; s < C::kSplitsMax; ++s) m[s] = 0;
    float top = -1e30f, total[kGroups], x0[kGroups], x1[kGroups];
    KIE_UNROLL for (int g = 0; g < kGroups; ++g) total[g] = x0[g] = x1[g] = 0;
    KIE_UNROLL for (int first = 0; first < C::kSplitsMax; first += kOnce) {
        if (first >= live) continue;
        KIE_UNROLL for (int i = 0; i < kOnce; ++i) a[i] = 0;
        watch.polls = 0;
        for (;;) {
            bool ok = true;
            KIE_UNROLL for (int s = 0; s < C::kSplitsMax; ++s) if (first == 0 && s < live) m[s] =
                load_word(lot(s) + kPartMass);
            KIE_UNROLL for (int i = 0; i < kOnce; ++i) if (first + i < live) a[i] =
                load_word(lot(first + i) + word % 8);
            KIE_UNROLL for (int s = 0; s < C::kSplitsMax; ++s) if (first == 0 && s < live) ok &=
                epoch_of(m[s]) == epoch;
            KIE_UNROLL for (int i = 0; i < kOnce; ++i) if (first + i < live) ok &=
                epoch_of(a[i]) == epoch;
            if (ok || kNoWaits || !patient(watch, where, epoch, epoch_of(a[0]))) break;
            pause_ns(20);
        }
        KIE_UNROLL for (int s = 0; s < C::kSplitsMax; ++s) if (first == 0 && s < live) top =
            max_f(top, number((u32)m[s]));
        KIE_UNROLL for (int i = 0; i < kOnce; ++i) if (first + i < live) {
            const int g = (first + i) % kGroups;
            const float f = exp2_f(number((u32)m[first + i]) - top);
            float v0, v1;
            unpack_half2((u32)a[i], v0, v1);
            total[g] += f, x0[g] += f * v0, x1[g] += f * v1;
        }
    }
    KIE_UNROLL for (int k = 1; k < kGroups; k *= 2) {
        KIE_UNROLL for (int g = 0; g + k < kGroups; g += 2 * k) total[g] += total[g + k],
            x0[g] += x0[g + k], x1[g] += x1[g + k];
    }
    const float inverse = reciprocal_f(total[0]);
    publish(out, pack_half2(x0[0] * inverse, x1[0] * inverse), epoch);
}
// This block's share.
template <class C>
KIE_DEVICE void merge_columns(Watch& watch, const DecodeArgs& args, const Block& b, int layer) {
    const long unit = unit_of(layer, b.lane_index);
    const u64* parts = args.words + kAtPart + unit * kVecPart;
    // The last warps: pages are the first ones' work.
    KIE_NO_UNROLL for (int n = kThreads - 1 - (int)thread(); n < C::kMergeItems; n += kThreads) {
        const int item = b.seat * C::kMergeItems + n, column = item / C::kWordsA,
                  word = item % C::kWordsA;
        if (column >= live_of(b)) continue;
        const PageSpan span = pages_of(layer_of(b, layer), (int)position_at(args, b.step, column));
        u64* out = args.words + kAtAttn + unit * kVecA + column * C::kWordsA +
                   (C::kDirectO ? direct_word(word) : word);
        merge_one<C>(watch, parts, word, column, shift_at(args, column), span, b.epoch,
                     layer << 4 | 2, out);
    }
}
// A warp's share of all live columns, a few words of each, into shared memory.
template <int kCount>
KIE_DEVICE void gather_narrow(Watch& w, const u64* base, int base_stride, u32 epoch, u32 where,
                              int live, u32* x, int x_stride) {
    constexpr int kEach = kCount / 2, kLoads = (kEach * kColumns + kTeam - 1) / kTeam;
    const int my = lane();
    await_one(w, base + block() * 10 % kCount, epoch, where, kRestGather);
    u64 a[kLoads], b[kLoads];
    KIE_UNROLL for (int i = 0; i < kLoads; ++i) a[i] = b[i] = 0;
    w.polls = 0;
    for (;;) {
        bool ok = true;
        KIE_UNROLL for (int i = 0; i < kLoads; ++i) {
            const int n = i * kTeam + my;
            if (n / kEach < live)
                load_words(base + (long)(n / kEach) * base_stride + n % kEach * 2, a[i], b[i]);
        }
        KIE_UNROLL for (int i = 0; i < kLoads; ++i) if ((i * kTeam + my) / kEach < live) ok &=
            epoch_of(a[i]) == epoch && epoch_of(b[i]) == epoch;
        if (ok || kNoWaits || !patient(w, where, epoch, epoch_of(a[0]))) break;
    }
    KIE_UNROLL for (int i = 0; i < kLoads; ++i) {
        const int n = i * kTeam + my;
        if (n / kEach < live)
            *(u64*)(x + n / kEach * x_stride + n % kEach * 2) = b[i] << 32 | (u32)a[i];
    }
}

// The product with vectors that are nowhere but in the words: each warp has a range of columns of
// its own and takes its operands as they are needed, some stages ahead. Traffic: the words once.
// Of 16 words, lane t of four needs 4t to 4t + 3; they stand where its two loads of two words, side
// by side with the other lanes', find them (direct_word).
template <class S>
struct WordStage {
    u64 v[S::chunk][4];
};
template <class S>
KIE_DEVICE void load_stage(WordStage<S>& w, const u64* from) {
    KIE_UNROLL for (int c = 0; c < S::chunk; ++c) {
        load_words(from + c * 16, w.v[c][0], w.v[c][1]);
        load_words(from + c * 16 + 8, w.v[c][2], w.v[c][3]);
    }
}
template <class S>
KIE_DEVICE Column<S> take_words(Watch& watch, WordStage<S>& w, const u64* from, u32 epoch,
                                u32 where) {
    watch.polls = 0;
    for (;;) {
        bool ok = true;
        KIE_UNROLL for (int c = 0; c < S::chunk; ++c) {
            KIE_UNROLL for (int i = 0; i < 4; ++i) ok &= epoch_of(w.v[c][i]) == epoch;
        }
        if (ok || kNoWaits || !patient(watch, where, epoch, epoch_of(w.v[0][0]))) break;
        load_stage<S>(w, from);
    }
    Column<S> x;
    KIE_UNROLL for (int c = 0; c < S::chunk; ++c) {
        KIE_UNROLL for (int i = 0; i < 4; ++i) x.v[c].v[i] = (u32)w.v[c][i];
    }
    return x;
}
template <class S>
KIE_DEVICE Sums<S> multiply_words(Ring& ring, Watch& watch, Lots<S>& lots, const u64* base,
                                  int stride, u32 epoch, u32 where, int live) {
    static_assert(S::row_warps == 1, "ranges of columns are a warp's own");
    constexpr int kMost = S::chunk == 1 ? 4 : 2, kAhead = S::stages < kMost ? S::stages : kMost;
    const int me = thread(), k_warp = me / kTeam, g = me % kTeam / 4, t = me % 4;
    const u64* mine = base + (long)(g < live ? g : 0) * stride + k_warp * S::pairs * 16 + 2 * t;
    constexpr int kStep = S::chunk * 16;
    await_one(watch, base + k_warp * S::pairs * 16 + block() * 10 % (S::pairs * 16), epoch, where,
              kRestGather);
    WordStage<S> ahead[kAhead];
    KIE_UNROLL for (int d = 0; d < kAhead; ++d) load_stage<S>(ahead[d], mine + d * kStep);
    Sums<S> s;
    KIE_UNROLL for (int i = 0; i < S::tiles; ++i) {
        KIE_UNROLL for (int j = 0; j < 4; ++j) s.v[i][j] = 0;
    }
    WeightFragment<S>&lot = lots.v[0], other;
    const Place<S> place = place_of<S>(ring);
    bool here = S::stages > 1 && stage_here(ring);
    KIE_NO_UNROLL for (int first = 0; first < S::stages; first += kAhead) {
        KIE_UNROLL for (int d = 0; d < kAhead; ++d) {
            const int stage = first + d;
            if (S::stages % kAhead != 0 && stage >= S::stages) continue;
            WeightFragment<S>&now = d % 2 ? other : lot, &next = d % 2 ? lot : other;
            const Column<S> x = take_words<S>(watch, ahead[d], mine, epoch, where);
            if (stage + kAhead < S::stages) load_stage<S>(ahead[d], mine + kAhead * kStep);
            mine += kStep;
            if (stage + 1 < S::stages) {
                take_fragment<S>(ring, next, here, place);
                here = stage + 2 < S::stages && stage_here(ring);
            }
            add_fragment<S>(s, now, x);
        }
    }
    return s;
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
