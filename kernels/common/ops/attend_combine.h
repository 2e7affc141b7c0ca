// Partials of attention's splits, combined: the weighted mean of what the blocks of a kv head made
// of their pages, then all heads as the operand of the o product.
#pragma once

#include "args.h"
#include "block.h"
#include "chiplets.h"
#include "exchange.h"
#include "lowered.h"
#include "ops/gather.h"
#include "pages.h"
#include "platform.h"
#include "shape.h"

// The merged output of up to 32 neighbouring words a warp pass: a lane takes one word (two features
// of a head) of some of the splits, lanes that share a word add up at the end, in a fixed order.
// `kCount`: words this warp takes, from `first` of the column's kAttn / 2; `kMost`: parts, of which
// there are `live`.
template <class C, int kCount, int kMost>
KIE_DEVICE void merge_parts(Watch& watch, const DecodeArgs& args, int layer, int lane_index,
                            int column, int shift, const PageSpan& span, int live, u32 epoch,
                            int first, u32* x, u64* out, u32 rest_ns) {
    constexpr int kLow = kCount & -kCount, kWide = kLow < 32 ? kLow : 32, kGroups = 32 / kWide;
    constexpr int kEach = (kMost + kGroups - 1) / kGroups;
    const long unit = unit_of(layer, lane_index);
    const int my = lane(), group = my / kWide;
    constexpr int kPasses = kCount / kWide;
    constexpr int kOnce = kPasses == 2 && kEach <= 4 ? 2 : 1;  // passes whose words travel together
    const u64* parts = args.words + kAtPart + unit * kVecPart;
    KIE_NO_UNROLL for (int n = 0; n < kCount; n += kOnce * kWide) {
        // Heads are whole numbers of lines.
        const auto word_of = [&](int pass) { return first + n + pass * kWide + my % kWide; };
        const auto lot = [&](int split, int pass) {
            return parts + (long)(split * kColumns + column) * C::kPartWords +
                   word_of(pass) / 8 * kPartLine;
        };
        u64 a[kOnce][kEach], m[kOnce][kEach];
        if (n == 0)
            await_one(watch, lot((span.last + shift) % C::kSplitsMax, 0) + kPartMass, epoch,
                      layer << 4 | 2, rest_ns);
        KIE_UNROLL for (int c = 0; c < kOnce; ++c) {
            KIE_UNROLL for (int i = 0; i < kEach; ++i) a[c][i] = m[c][i] = 0;
        }
        watch.polls = 0;
        for (;;) {
            bool ok = true;
            KIE_UNROLL for (int i = 0; i < kEach; ++i) {
                const int s = group + i * kGroups;
                KIE_UNROLL for (int c = 0; c < kOnce; ++c) {
                    const u64* p = lot((span.first + s + shift) % C::kSplitsMax, c);
                    if (s < live)
                        m[c][i] = load_word(p + kPartMass), a[c][i] = load_word(p + word_of(c) % 8);
                }
            }
            KIE_UNROLL for (int i = 0; i < kEach; ++i) {
                KIE_UNROLL for (int c = 0; c < kOnce; ++c) if (group + i * kGroups < live) ok &=
                    epoch_of(a[c][i]) == epoch && epoch_of(m[c][i]) == epoch;
            }
            if (ok || kNoWaits || !patient(watch, layer << 4 | 2, epoch, epoch_of(a[0][0]))) break;
        }
        KIE_UNROLL for (int c = 0; c < kOnce; ++c) {
            float top = -1e30f, total = 0, x0 = 0, x1 = 0;
            KIE_UNROLL for (int i = 0; i < kEach; ++i) if (group + i * kGroups < live) top =
                max_f(top, number((u32)m[c][i]));
            KIE_UNROLL for (int k = kWide; k < 32; k *= 2) top = max_f(top, shuffle_xor(top, k));
            KIE_UNROLL for (int i = 0; i < kEach; ++i) if (group + i * kGroups < live) {
                const float f = exp2_f(number((u32)m[c][i]) - top);
                float v0, v1;
                unpack_half2((u32)a[c][i], v0, v1);
                total += f, x0 += f * v0, x1 += f * v1;
            }
            KIE_UNROLL for (int k = kWide; k < 32; k *= 2) total += shuffle_xor(total, k),
                x0 += shuffle_xor(x0, k), x1 += shuffle_xor(x1, k);
            total = reciprocal_f(total);
            const u32 both = pack_half2(x0 * total, x1 * total);
            if (group == 0) {
                if (out)
                    publish(out + word_of(c), both, epoch);
                else
                    x[n + c * kWide + my % kWide] = both;
            }
        }
    }
}
// Few parts have a way of their own: what the others would need costs time even where it is not
// there.
template <class C, int kCount>
KIE_DEVICE void merge(Watch& watch, const DecodeArgs& args, int layer, int lane_index, int column,
                      int shift, const PageSpan& span, u32 epoch, int first, u32* x, u64* out,
                      u32 rest_ns) {
    constexpr int kFew = (C::kSplitsMax + 1) / 2;
    const int pages = span.last - span.first + 1;
    if (pages <= kFew)
        merge_parts<C, kCount, kFew>(watch, args, layer, lane_index, column, shift, span, pages,
                                     epoch, first, x, out, rest_ns);
    else
        merge_parts<C, kCount, C::kSplitsMax>(watch, args, layer, lane_index, column, shift, span,
                                              min_i(pages, C::kSplitsMax), epoch, first, x, out,
                                              rest_ns);
}

// Attention's parts, merged by owners: the blocks of a lane share all words of all columns, a word
// of one column a thread. Everybody gathers them afterwards.
// Parts are added up as the one-column kernel's warps do it (see merge). With many parts two warps
// of an owner share its words: all of one warp's looks are in flight at once.
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
