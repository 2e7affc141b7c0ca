// Partials of attention's splits, combined: the weighted mean of what the blocks of a kv head made
// of their pages, then all heads as the operand of the o product.
#pragma once

#include "args.h"
#include "block.h"
#include "chiplets.h"
#include "exchange.h"
#include "lowered.h"
#include "ops/gather.h"
#include "ops/parts.h"
#include "pages.h"
#include "platform.h"
#include "shape.h"

// A head's sink: a score (times log2 e, as all are) beside its keys', whose value is 0.
template <class C>
KIE_DEVICE float sink_of(const DecodeArgs& args, const u8* shared, int layer, int word) {
    if constexpr (C::kSinks)
        return args.extras[((const Layer*)(shared + kShLayers))[layer].extras + C::kAtSinks +
                           word / C::kHalfHead];
    else
        return 0;
}
// A word of attention's output times the sigmoid of its gates, which travel behind q, k and v; of
// models of one lane.
template <class C>
KIE_DEVICE void gate_output(Watch& watch, int layer, int column, int word, u32 seqno, float& x0,
                            float& x1) {
    if constexpr (C::kGated) {
        const u64* from = watch.args.ll_words + kAtQkv + buffer_of(layer, 0) * kVecQ +
                          (long)column * C::kWordsQ + C::kAtGates + word;
        float g0, g1;
        numbers_of(take_halves(watch, from, C::kWordsQ, seqno, layer << 4 | 1), g0, g1);
        x0 *= reciprocal_f(1.0f + exp2_f(-1.44269504f * g0));
        x1 *= reciprocal_f(1.0f + exp2_f(-1.44269504f * g1));
    }
}
// The combined output of up to 32 neighbouring words a warp pass: a lane takes one word (two
// features of a head) of some of the splits, lanes that share a word add up at the end, in a fixed
// order. `kCount`: words this warp takes, from `first` of the column's kAttn / 2; `kMost`:
// partials, of which there are `live`.
template <class C, int kCount, int kMost>
KIE_DEVICE void combine_partials(Watch& watch, const DecodeArgs& args, const u8* shared, int layer,
                                 int lane_index, int column, int shift, const PageSpan& span,
                                 int live, u32 seqno, int first, u32* x, u64* out) {
    constexpr int kLow = kCount & -kCount, kWide = kLow < 32 ? kLow : 32, kGroups = 32 / kWide;
    constexpr int kEach = (kMost + kGroups - 1) / kGroups;
    const long buffer = buffer_of(layer, lane_index);
    const int my = lane(), group = my / kWide;
    constexpr int kPasses = kCount / kWide;
    constexpr int kOnce = kPasses == 2 && kEach <= 4 ? 2 : 1;  // passes whose words travel together
    const u64* partials = args.ll_words + kAtPartial + buffer * kVecPartial;
    KIE_NO_UNROLL for (int n = 0; n < kCount; n += kOnce * kWide) {
        // Heads are whole numbers of lines.
        const auto word_of = [&](int pass) { return first + n + pass * kWide + my % kWide; };
        const auto partial_of = [&](int split, int pass) {
            return partials + (long)(split * kColumns + column) * C::kPartialWords +
                   word_of(pass) / 8 * kPartialLine;
        };
        u64 a[kOnce][kEach], m[kOnce][kEach];
        if (n == 0)
            await_one(watch, partial_of((span.last + shift) % C::kSplitsMax, 0) + kPartialLse,
                      seqno, layer << 4 | 2, 0);
        KIE_UNROLL for (int c = 0; c < kOnce; ++c) {
            KIE_UNROLL for (int i = 0; i < kEach; ++i) a[c][i] = m[c][i] = 0;
        }
        float sink[kOnce];
        KIE_UNROLL for (int c = 0; c < kOnce; ++c) sink[c] =
            sink_of<C>(args, shared, layer, word_of(c));
        watch.polls = 0;
        for (;;) {
            bool ok = true;
            KIE_UNROLL for (int i = 0; i < kEach; ++i) {
                const int s = group + i * kGroups;
                KIE_UNROLL for (int c = 0; c < kOnce; ++c) {
                    const u64* p = partial_of((span.first + s + shift) % C::kSplitsMax, c);
                    if (s < live)
                        m[c][i] = load_word(p + kPartialLse),
                        a[c][i] = load_word(p + word_of(c) % 8);
                }
            }
            KIE_UNROLL for (int i = 0; i < kEach; ++i) {
                KIE_UNROLL for (int c = 0; c < kOnce; ++c) if (group + i * kGroups < live) ok &=
                    seqno_of(a[c][i]) == seqno && seqno_of(m[c][i]) == seqno;
            }
            if (ok || kNoWaits || wait_expired(watch, layer << 4 | 2, seqno, seqno_of(a[0][0])))
                break;
        }
        KIE_UNROLL for (int c = 0; c < kOnce; ++c) {
            float top = -1e30f, total = 0, x0 = 0, x1 = 0;
            KIE_UNROLL for (int i = 0; i < kEach; ++i) if (group + i * kGroups < live) top =
                max_f(top, number((u32)m[c][i]));
            KIE_UNROLL for (int k = kWide; k < 32; k *= 2) top = max_f(top, shuffle_xor(top, k));
            if (C::kSinks) top = max_f(top, sink[c]);
            KIE_UNROLL for (int i = 0; i < kEach; ++i) if (group + i * kGroups < live) {
                const float f = exp2_f(number((u32)m[c][i]) - top);
                float v0, v1;
                unpack_half2((u32)a[c][i], v0, v1);
                total += f, x0 += f * v0, x1 += f * v1;
            }
            KIE_UNROLL for (int k = kWide; k < 32; k *= 2) total += shuffle_xor(total, k),
                x0 += shuffle_xor(x0, k), x1 += shuffle_xor(x1, k);
            if (C::kSinks) total += exp2_f(sink[c] - top);
            total = reciprocal_f(total);
            x0 *= total, x1 *= total;
            if (group == 0) {
                gate_output<C>(watch, layer, column, word_of(c), seqno, x0, x1);
                const u32 both = pack_half2(x0, x1);
                if (out)
                    publish(out + word_of(c), both, seqno);
                else
                    x[n + c * kWide + my % kWide] = both;
            }
        }
    }
}
// Few partials have a way of their own: what the others would need costs time even where it is not
// there.
template <class C, int kCount>
KIE_DEVICE void combine(Watch& watch, const DecodeArgs& args, const u8* shared, int layer,
                        int lane_index, int column, int shift, const PageSpan& span, u32 seqno,
                        int first, u32* x, u64* out) {
    constexpr int kFew = (C::kSplitsMax + 1) / 2;
    const int pages = span.last - span.first + 1;
    if (pages <= kFew)
        combine_partials<C, kCount, kFew>(watch, args, shared, layer, lane_index, column, shift,
                                          span, pages, seqno, first, x, out);
    else
        combine_partials<C, kCount, C::kSplitsMax>(watch, args, shared, layer, lane_index, column,
                                                   shift, span, min_i(pages, C::kSplitsMax), seqno,
                                                   first, x, out);
}

// Attention's partials, combined by owners: the blocks of a lane share all words of all columns, a
// word of one column a thread. Everybody gathers them afterwards. Parts are added up as the
// one-column kernel's warps do it (see combine). With many partials two warps of an owner share its
// words: all of one warp's looks are in flight at once.
template <class C>
KIE_DEVICE void combine_one(Watch& watch, const u64* partials, int word, int column, int shift,
                            const PageSpan& span, float sink, u32 seqno, u32 where, u64* out) {
    constexpr int kGroups = C::kCombineGroups < C::kSplitsMax ? C::kCombineGroups : C::kSplitsMax;
    constexpr int kOnce = C::kSplitsMax < 8 ? C::kSplitsMax : 8;
    const int pages = span.last - span.first + 1,
              live = pages < C::kSplitsMax ? pages : C::kSplitsMax;
    const auto partial_of = [&](int s) {
        const int split = (span.first + s + shift) % C::kSplitsMax;
        return partials + (long)(split * kColumns + column) * C::kPartialWords +
               word / 8 * kPartialLine;
    };
    u64 a[kOnce][kParts], m[C::kSplitsMax];
    KIE_UNROLL for (int s = 0; s < C::kSplitsMax; ++s) m[s] = 0;
    float top = C::kSinks ? sink : -1e30f, total[kGroups], x0[kGroups], x1[kGroups];
    KIE_UNROLL for (int g = 0; g < kGroups; ++g) total[g] = x0[g] = x1[g] = 0;
    KIE_UNROLL for (int first = 0; first < C::kSplitsMax; first += kOnce) {
        if (first >= live) continue;
        KIE_UNROLL for (int i = 0; i < kOnce; ++i) {
            KIE_UNROLL for (int part = 0; part < kParts; ++part) a[i][part] = 0;
        }
        watch.polls = 0;
        for (;;) {
            bool ok = true;
            KIE_UNROLL for (int s = 0; s < C::kSplitsMax; ++s) if (first == 0 && s < live) m[s] =
                load_word(partial_of(s) + kPartialLse);
            KIE_UNROLL for (int i = 0; i < kOnce; ++i) if (first + i < live)
                KIE_UNROLL for (int part = 0; part < kParts; ++part) a[i][part] = load_word(
                    partial_of(first + i) + word % 8 + part * (C::kPartialWords / kParts));
            KIE_UNROLL for (int s = 0; s < C::kSplitsMax; ++s) if (first == 0 && s < live) ok &=
                seqno_of(m[s]) == seqno;
            KIE_UNROLL for (int i = 0; i < kOnce; ++i) if (first + i < live)
                KIE_UNROLL for (int part = 0; part < kParts; ++part) ok &=
                seqno_of(a[i][part]) == seqno;
            if (ok || kNoWaits || wait_expired(watch, where, seqno, seqno_of(a[0][0]))) break;
            pause_ns(20);
        }
        KIE_UNROLL for (int s = 0; s < C::kSplitsMax; ++s) if (first == 0 && s < live) top =
            max_f(top, number((u32)m[s]));
        KIE_UNROLL for (int i = 0; i < kOnce; ++i) if (first + i < live) {
            const int g = (first + i) % kGroups;
            const float f = exp2_f(number((u32)m[first + i]) - top);
            float v0, v1;
            Halves its;
            KIE_UNROLL for (int part = 0; part < kParts; ++part) its.v[part] = (u32)a[i][part];
            numbers_of(its, v0, v1);
            total[g] += f, x0[g] += f * v0, x1[g] += f * v1;
        }
    }
    KIE_UNROLL for (int k = 1; k < kGroups; k *= 2) {
        KIE_UNROLL for (int g = 0; g + k < kGroups; g += 2 * k) total[g] += total[g + k],
            x0[g] += x0[g + k], x1[g] += x1[g + k];
    }
    if (C::kSinks) total[0] += exp2_f(sink - top);
    const float inverse = reciprocal_f(total[0]);
    float y0 = x0[0] * inverse, y1 = x1[0] * inverse;
    gate_output<C>(watch, (int)(where >> 4), column, word, seqno, y0, y1);
    publish(out, C::kWordsA, halves_of(y0, y1), seqno);
}
// This block's share.
template <class C>
KIE_DEVICE void combine_columns(Watch& watch, const DecodeArgs& args, const Block& b, int layer) {
    const long buffer = buffer_of(layer, b.lane_index);
    const u64* partials = args.ll_words + kAtPartial + buffer * kVecPartial;
    // The last warps: pages are the first ones' work.
    KIE_NO_UNROLL for (int n = kThreads - 1 - (int)thread(); n < C::kCombineWords; n += kThreads) {
        constexpr int kEach = C::kWordsA / kParts;
        const int item = b.block_in_lane * C::kCombineWords + n, column = item / kEach,
                  word = item % kEach;
        if (column >= live_of(b)) continue;
        const PageSpan span =
            pages_of(layer_of(b, layer), (int)position_at(args, b.shared, b.step, column));
        u64* out = args.ll_words + kAtAttn + buffer * kVecA + column * C::kWordsA +
                   (C::kDirectO ? direct_word(word) : word);
        combine_one<C>(watch, partials, word, column, shift_at(args, b.shared, column), span,
                       sink_of<C>(args, b.shared, layer, word), b.seqno, layer << 4 | 2, out);
    }
}
// The combined attention output, this warp's share of it, into shared memory.
template <class C>
KIE_DEVICE void gather_attention(Watch& watch, const DecodeArgs& args, Block& b, int layer) {
    const int warp = thread() / kTeam;
    constexpr int kShare = C::kWordsA / kParts / kWarps;
    const long buffer = buffer_of(layer, b.lane_index);
    u32* x = (u32*)(b.shared + kShXb) + warp * kShare;
    u64* to = args.ll_words + kAtAttn + buffer * kVecA;
    if constexpr (kVectors > 1) {
        combine_columns<C>(watch, args, b, layer);
        join_wave();  // as below
        stamp(b, 4);
        if (kOneVector) sync_consumers<kThreads>();  // attention's vectors may stand there, too
        if constexpr (!C::kDirectO)
            gather_narrow<kShare>(watch, to + warp * kShare, C::kWordsA, b.seqno, layer << 4 | 4,
                                  live_of(b), x, kStrideB / 2);
        return;
    }
    const PageSpan span = pages_of(layer_of(b, layer), (int)position_at(args, b.shared, b.step, 0));
    if constexpr (C::kCombineByOwners == 0) {
        combine<C, C::kCombineCount>(watch, args, b.shared, layer, b.lane_index, 0, 0, span,
                                     b.seqno, warp * kShare, x, nullptr);
    } else {
        constexpr bool kAll = C::kCombineBlocks >= kBlocksPerLane;  // blocks have a share
        if (warp < C::kCombineSharers && (kAll || b.block_in_lane < C::kCombineBlocks))
            combine<C, C::kCombineCount>(
                watch, args, b.shared, layer, b.lane_index, 0, 0, span, b.seqno,
                b.block_in_lane * C::kCombineOwn + warp * C::kCombineCount, nullptr, to);
        join_wave();  // some of these words are published above, by one team of a wave
        Squares none;
        gather<kShare, false>(watch, to + warp * kShare, C::kWordsA, b.seqno, layer << 4 | 4, 1,
                              nullptr, x, kStrideB / 2, none.v);
    }
    stamp(b, 4);
}
