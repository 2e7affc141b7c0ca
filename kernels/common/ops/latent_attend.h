// Attention of heads to the latents that pages keep (ops/latent.h).
//   partial = softmax(s (a c + t r)) c   of some heads over the units of a block
// Heads and positions are both cut over the blocks of a lane: a unit is 16 neighbouring positions,
// unit u of a column with shift s (block.h) belongs to split (u + s) % kSplitsMax of every group of
// heads for as long as a launch lasts. So several blocks read a page; each of them stores what is
// new in its units itself, all the same bits, and takes nothing of this step from another's store.
// Latents are operands of the matrix unit as they stand in a page: rows of it against eight heads'
// queries, then its columns against their weights. A warp has some of the features of all
// positions, so a page passes through the registers once for scores and once for sums, and warps
// meet once a unit, when the parts of its scores are there. Numbers of two parts (ops/parts.h) are
// floats, outside of matrix units, a page at a time.
// Traffic: 2 (rank + turned) bytes a position and group of heads, twice.
#pragma once

#include "args.h"
#include "block.h"
#include "exchange.h"
#include "lowered.h"
#include "ops/attend_exact.h"
#include "ops/gather.h"
#include "ops/latent_words.h"
#include "ops/parts.h"
#include "ops/residual.h"
#include "pages.h"
#include "platform.h"
#include "shape.h"
#include "tile.h"

// Positions of a unit.
constexpr int kLatentUnit = kParts == 1 ? 16 : kPage;
KIE_DEVICE int units_of(int position) { return position / kLatentUnit + 1; }
template <class C>
KIE_DEVICE int split_of_unit(int unit, int shift) {
    return (unit + shift) % C::kSplitsMax;
}
// The first unit of a split.
template <class C>
KIE_DEVICE int first_unit(int split, int shift) {
    return (split + C::kSplitsMax - shift % C::kSplitsMax) % C::kSplitsMax;
}

// Pages have a row a position: the latent, then the turned key; halves, or floats (two parts).
template <class C>
constexpr int kLatentRow = C::kKept * 2 * kParts;
KIE_DEVICE void store_pair(u8* row, int pair, float a, float b) {
    if constexpr (kParts == 1)
        store_alike((u32*)row + pair, pack_half2(a, b));
    else
        store_alike((u64*)row + pair, (u64)bits(b) << 32 | bits(a));
}
template <class C>
KIE_DEVICE u8* latent_row(const DecodeArgs& args, const u8* shared, int layer, int column, int page,
                          int slot) {
    return page_at<C>(args, shared, {layer, 0, column}, page) + slot * kLatentRow<C>;
}
// Pair `n` of the turned features, turned.
template <class C>
KIE_DEVICE void turn_pair(const DecodeArgs& args, int position, int n, float& a, float& b) {
    const float* r = args.rope + C::kRope + ((long)position * (C::kRopeDim / 2) + n) * 2;
    const float x = a * r[0] - b * r[1];
    b = a * r[1] + b * r[0], a = x;
}
// A column's new latent, by a warp, into its page.
template <class C>
KIE_DEVICE void store_latent(Watch& watch, const DecodeArgs& args, const Block& b, int layer,
                             int column, int position) {
    constexpr int kPairs = C::kRankReal / 2, kEach = (kPairs + kTeam - 1) / kTeam;
    const int my = lane() % kTeam;
    const u32 where = layer << 4 | kWaitLatents;
    const u64* from = latent_words<C>(args, b, layer, column);
    const float* norm = extras_of(args, b, layer) + C::kAtLatentNorm;
    u8* row = latent_row<C>(args, b.shared, layer, column, position / kPage, position % kPage);
    const auto address = [&](int n) { return from + heard_latent<C>(C::kQueryRank / 2 + n); };
    float scales[kEach][2];  // asked for before the wait, not after it
    KIE_UNROLL for (int i = 0; i < kEach; ++i) {
        const int n = min_i(i * kTeam + my, kPairs - 1);
        scales[i][0] = norm[2 * n], scales[i][1] = norm[2 * n + 1];
    }
    Halves taken[kEach];
    take_each(watch, taken, C::kWordsQ, b.seqno, where, [&](int i) -> const u64* {
        const int n = i * kTeam + my;
        return n < kPairs ? address(n) : nullptr;
    });
    float v[kEach][2], sum = 0;
    KIE_UNROLL for (int i = 0; i < kEach; ++i) {
        numbers_of(taken[i], v[i][0], v[i][1]);
        sum += v[i][0] * v[i][0] + v[i][1] * v[i][1];
    }
    sync_warp();
    KIE_UNROLL for (int m = 16; m > 0; m /= 2) sum += shuffle_xor(sum, m);
    const float scale = rsqrt_f(sum * (1.0f / C::kRankReal) + C::kLatentEps);
    KIE_UNROLL for (int i = 0; i < kEach; ++i) {
        const int n = i * kTeam + my;
        if (n < kPairs)
            store_pair(row, n, v[i][0] * scale * scales[i][0], v[i][1] * scale * scales[i][1]);
    }
    KIE_NO_UNROLL for (int n = my; n < (C::kKept - C::kRankReal) / 2; n += kTeam) {
        float a = 0, c = 0;
        if (n < C::kTurned / 2) {
            numbers_of(take_halves(watch, address(C::kRank / 2 + n), C::kWordsQ, b.seqno, where), a,
                       c);
            turn_pair<C>(args, position, n, a, c);
        }
        store_pair(row, kPairs + n, a, c);
    }
}

// A unit's rows of a column, of which the first `to` are positions that it sees.
struct LatentUnit {
    const u8* rows;
    int to;
};
template <class C>
KIE_DEVICE LatentUnit latent_unit(const DecodeArgs& args, const Block& b, int layer, int column,
                                  int unit, int position) {
    const int first = unit * kLatentUnit;
    const u8* rows = latent_row<C>(args, b.shared, layer, column, first / kPage, first % kPage);
    // What this step adds this block has stored itself; others store it, too.
    const int sequences = sequences_of(args),
              first_new = kLookup ? sequence_at(b.shared, column) : sequences;
    const int added =
        column < sequences ? position : (int)position_at(args, b.shared, b.step, first_new);
    const int skip = max_i(added - first, 0);
    reads_without(0, rows + skip * kLatentRow<C>, kLatentRow<C>, kLatentRow<C>,
                  (u32)max_i(kLatentUnit - skip, 0));
    return {rows, min_i(position + 1 - first, kLatentUnit)};
}

// Queries of the heads `first` to `end` as they meet what pages keep, where vectors stand, of which
// none is at work: halves [head][kHeadStride], or (two parts) floats [head][kKept] times what
// scores are multiplied by.
template <class C>
KIE_DEVICE void take_latent_heads(Watch& watch, const DecodeArgs& args, const Block& b, int layer,
                                  int column, int position, int first, int end) {
    constexpr int kPairs = (kParts == 1 ? C::kKeptPadded : C::kKept) / 2,
                  kLatents = C::kRankReal / 2,
                  kRows = kParts == 1 ? C::kGroupHeads : C::kHeadsAtOnce;
    constexpr int kAll = kRows * kPairs, kEach = (kAll + kThreads - 1) / kThreads;
    const u64* from = latent_words<C>(args, b, layer, column);
    u8* q = b.shared + kShXa;
    const int me = thread();
    Halves v[kEach];
    take_each(watch, v, C::kWordsQ, b.seqno, layer << 4 | 1, [&](int i) -> const u64* {
        const int n = i * kThreads + me, head = first + n / kPairs, pair = n % kPairs,
                  turned = pair - kLatents;
        if (n >= kAll || head >= end || turned >= C::kTurned / 2) return nullptr;
        if (turned < 0) return from + C::kAtAbsorbed + head * (C::kRank / 2) + pair;
        return from + C::kAtQuery + head * (C::kQueryHead / 2) + C::kPlain / 2 + turned;
    });
    KIE_UNROLL for (int i = 0; i < kEach; ++i) {
        const int n = i * kThreads + me, pair = n % kPairs, turned = pair - kLatents;
        if (n >= kAll) continue;
        float v0, v1;
        numbers_of(v[i], v0, v1);
        if (turned >= 0 && turned < C::kTurned / 2) turn_pair<C>(args, position, turned, v0, v1);
        if constexpr (kParts == 1)
            ((u32*)q)[n / kPairs * (C::kHeadStride / 2) + pair] = pack_half2(v0, v1);
        else
            ((u64*)q)[n] = (u64)bits(v1 * C::kScoreScale) << 32 | bits(v0 * C::kScoreScale);
    }
}

// How a unit is dealt out to warps: blocks of 32 numbers of a row for scores, of 64 features for
// sums; and the parts of scores that warps leave for each other, [warp][head][position], so padded
// that lanes meet different banks.
template <class C>
struct UnitShares {
    static constexpr int kQuads = C::kKept / 8, kBlocks = C::kKeptPadded / 32,
                         kKeyTurns = (kBlocks + kWarps - 1) / kWarps,
                         kScoreWarps = min_i(kWarps, kBlocks);
    static constexpr int kValueQuads = (C::kRankReal + 7) / 8, kFeatures = (C::kRank + 63) / 64,
                         kValueTurns = (kFeatures + kWarps - 1) / kWarps;
    static constexpr int kPartHead = C::kPartHead, kPartWarp = C::kHeadsAtOnce * kPartHead;
};
// What a thread holds of a unit: quads of the rows g and g + 8, and of each fourth row pair one of
// eight features.
template <class C>
struct UnitRows {
    Quad keys[UnitShares<C>::kKeyTurns][2], values[UnitShares<C>::kValueTurns][4];
};
// Rows behind the last position may be no numbers, and others may be at work there.
template <class C>
KIE_DEVICE Quad load_quad(const LatentUnit& unit, int row, int quad) {
    return load_state(unit.rows + min_i(row, unit.to - 1) * kLatentRow<C> + quad * 16);
}
template <class C>
KIE_DEVICE void load_keys(UnitRows<C>& r, const LatentUnit& unit) {
    using U = UnitShares<C>;
    const int me = thread(), warp = me / kTeam, g = me % kTeam / 4, t = me % 4;
    KIE_UNROLL for (int i = 0; i < U::kKeyTurns; ++i) {
        const int quad = 4 * (i * kWarps + warp) + t;
        KIE_UNROLL for (int j = 0; j < 2; ++j) {
            r.keys[i][j] = {{0, 0, 0, 0}};
            if (quad < U::kQuads) r.keys[i][j] = load_quad<C>(unit, g + 8 * j, quad);
        }
    }
}
template <class C>
KIE_DEVICE void load_values(UnitRows<C>& r, const LatentUnit& unit) {
    using U = UnitShares<C>;
    const int me = thread(), warp = me / kTeam, g = me % kTeam / 4, t = me % 4;
    KIE_UNROLL for (int i = 0; i < U::kValueTurns; ++i) {
        const int quad = 8 * (i * kWarps + warp) + g;
        KIE_UNROLL for (int j = 0; j < 4; ++j) {
            r.values[i][j] = {{0, 0, 0, 0}};
            if (quad < U::kValueQuads)
                r.values[i][j] = load_quad<C>(unit, 2 * t + j % 2 + j / 2 * 8, quad);
        }
    }
}
// This warp's part of a unit's scores.
template <class C>
KIE_DEVICE void score_unit(const UnitRows<C>& r, const u8* q, float* part) {
    using U = UnitShares<C>;
    const int me = thread(), warp = me / kTeam, g = me % kTeam / 4, t = me % 4;
    if (warp >= U::kScoreWarps) return;
    float d[4] = {0, 0, 0, 0};
    KIE_UNROLL for (int i = 0; i < U::kKeyTurns; ++i) {
        const int at = i * kWarps + warp;
        if (at >= U::kBlocks) continue;
        const Quad x =
            *(const Quad*)(q + (g % C::kGroupHeads * C::kHeadStride + 32 * at + 8 * t) * 2);
        const Quad &r0 = r.keys[i][0], &r1 = r.keys[i][1];
        mma(d, r0.v[0], r1.v[0], r0.v[1], r1.v[1], x.v[0], x.v[1]);
        mma(d, r0.v[2], r1.v[2], r0.v[3], r1.v[3], x.v[2], x.v[3]);
    }
    float* mine = part + warp * U::kPartWarp + 2 * t * U::kPartHead + g;
    KIE_UNROLL for (int j = 0; j < 4; ++j) mine[j % 2 * U::kPartHead + j / 2 * 8] = d[j];
}
// Weights of the positions 2t, 2t + 1, 2t + 8 and 2t + 9 for head g, as halves; by how much earlier
// sums shrink. Every warp makes them for itself.
template <class C>
KIE_DEVICE float weigh_unit(Softmax& s, const float* part, int to, u32 (&weights)[2]) {
    using U = UnitShares<C>;
    const int me = thread(), g = me % kTeam / 4, t = me % 4;
    const float* mine = part + g * U::kPartHead + 2 * t;
    float v[4] = {0, 0, 0, 0}, top = s.best, sum = 0;
    KIE_UNROLL for (int w = 0; w < U::kScoreWarps; ++w) {
        KIE_UNROLL for (int j = 0; j < 4; j += 2) {
            const u64 both = *(const u64*)(mine + w * U::kPartWarp + 4 * j);
            v[j] += number((u32)both), v[j + 1] += number((u32)(both >> 32));
        }
    }
    KIE_UNROLL for (int j = 0; j < 4; ++j) {
        v[j] = 2 * t + j % 2 + j / 2 * 8 < to ? v[j] * C::kScoreScale : -1e30f;
        top = max_f(top, v[j]);
    }
    top = max_f(top, shuffle_xor(top, 1)), top = max_f(top, shuffle_xor(top, 2));
    const float keep = exp2_f(s.best - top);
    KIE_UNROLL for (int j = 0; j < 4; ++j) v[j] = exp2_f(v[j] - top), sum += v[j];
    sum += shuffle_xor(sum, 2), sum += shuffle_xor(sum, 1);
    s.exp_sum = s.exp_sum * keep + sum, s.best = top;
    weights[0] = pack_half2(v[0], v[1]), weights[1] = pack_half2(v[2], v[3]);
    return keep;
}
// Of each block of 64 features eight of a thread, two in each of four tiles: of the heads 2t and
// 2t + 1 the first feature, then of both the second.
template <class C>
using UnitSums = float[UnitShares<C>::kValueTurns][4][4];
template <class C>
KIE_DEVICE void add_unit_values(UnitSums<C>& sums, const UnitRows<C>& r, const u32 (&weights)[2],
                                float keep) {
    using U = UnitShares<C>;
    const int me = thread(), warp = me / kTeam, t = me % 4;
    const float k0 = shuffle(keep, 8 * t), k1 = shuffle(keep, 8 * t + 4);
    KIE_UNROLL for (int i = 0; i < U::kValueTurns; ++i) {
        if (i * kWarps + warp >= U::kFeatures) continue;
        const Quad(&v)[4] = r.values[i];
        KIE_UNROLL for (int n = 0; n < 4; ++n) {
            float (&d)[4] = sums[i][n];
            d[0] *= k0, d[1] *= k1, d[2] *= k0, d[3] *= k1;
            // Positions side by side, of the first feature and of the second.
            mma(d, (v[0].v[n] & 0xffffu) | v[1].v[n] << 16,
                v[0].v[n] >> 16 | (v[1].v[n] & 0xffff0000u),
                (v[2].v[n] & 0xffffu) | v[3].v[n] << 16,
                v[2].v[n] >> 16 | (v[3].v[n] & 0xffff0000u), weights[0], weights[1]);
        }
    }
}
// Where the partials of a split begin.
template <class C>
KIE_DEVICE u64* latent_partials(const DecodeArgs& args, const Block& b, int layer, int column,
                                int split) {
    return args.ll_words + kAtPartial + buffer_of(layer, b.lane_index) * kVecPartial +
           ((long)split * kColumns + column) * C::kPartialWords;
}
template <class C>
KIE_DEVICE void publish_unit_sums(const UnitSums<C>& sums, const Softmax& s, u64* to, int first,
                                  int end, u32 seqno) {
    using U = UnitShares<C>;
    const int me = thread(), warp = me / kTeam, g = me % kTeam / 4, t = me % 4;
    const float inverse = reciprocal_f(s.exp_sum), lse = s.best + log2_f(s.exp_sum);
    KIE_UNROLL for (int h = 0; h < 2; ++h) {
        const int head = 2 * t + h;
        const float by = shuffle(inverse, 4 * head), its = shuffle(lse, 4 * head);
        if (head >= C::kGroupHeads || first + head >= end) continue;
        KIE_UNROLL for (int i = 0; i < U::kValueTurns; ++i) {
            const int feature = 64 * (i * kWarps + warp) + 8 * g;
            if (feature >= C::kRank) continue;
            u64* line = to + (first + head) * C::kPartialHead + feature / 16 * kPartialLine;
            KIE_UNROLL for (int n = 0; n < 4; ++n) {
                const bool real = feature + 2 * n < C::kRankReal;
                publish(line + feature % 16 / 2 + n,
                        real ? pack_half2(sums[i][n][h] * by, sums[i][n][2 + h] * by) : 0, seqno);
            }
            if (feature % 16 == 0) publish(line + kPartialLse, bits(its), seqno);
        }
    }
}
// Attention of the heads `first` to `end` of a column to this block's units from `unit` on.
template <class C>
KIE_DEVICE void attend_units(Watch& watch, const DecodeArgs& args, const Block& b, int layer,
                             int column, int split, int unit, int first, int end) {
    using U = UnitShares<C>;
    const int position = (int)position_at(args, b.shared, b.step, column),
              units = units_of(position);
    const u8* q = b.shared + kShXa;
    float* parts = (float*)(b.shared + kShXa + C::kGroupHeads * C::kHeadStride * 2);
    LatentUnit at = latent_unit<C>(args, b, layer, column, unit, position);
    UnitRows<C> rows;
    load_keys<C>(rows, at), load_values<C>(rows, at);
    take_latent_heads<C>(watch, args, b, layer, column, position, first, end);
    sync_consumers<kThreads>();
    Softmax softmax = {-1e30f, 0};
    UnitSums<C> sums;
    KIE_UNROLL for (int i = 0; i < U::kValueTurns; ++i) {
        KIE_UNROLL for (int n = 0; n < 4; ++n) {
            KIE_UNROLL for (int j = 0; j < 4; ++j) sums[i][n][j] = 0;
        }
    }
    KIE_NO_UNROLL for (int turn = 0; unit < units; ++turn) {
        float* part = parts + turn % 2 * (U::kScoreWarps * U::kPartWarp);
        score_unit<C>(rows, q, part);
        const int to = at.to;
        unit += C::kSplitsMax;
        if (unit < units) {
            at = latent_unit<C>(args, b, layer, column, unit, position);
            load_keys<C>(rows, at);
        }
        sync_consumers<kThreads>();
        u32 weights[2];
        const float keep = weigh_unit<C>(softmax, part, to, weights);
        add_unit_values<C>(sums, rows, weights, keep);
        if (unit < units) load_values<C>(rows, at);
    }
    publish_unit_sums<C>(sums, softmax, latent_partials<C>(args, b, layer, column, split), first,
                         end, b.seqno);
}

// The same of two parts: floats, four numbers at a time.
// Scores of a page's positions into `scores` ([head][64]): four threads a position.
template <class C>
KIE_DEVICE void score_latents(const LatentUnit& page, const float* q, float* scores) {
    constexpr int kQuads = C::kKept / 4, kOnce = 4;
    const int row = thread() / 4, t = thread() % 4;
    if (row >= kPage) return;
    float d[C::kHeadsAtOnce];
    KIE_UNROLL for (int head = 0; head < C::kHeadsAtOnce; ++head) d[head] = 0;
    KIE_NO_UNROLL for (int first = t; first < kQuads; first += 4 * kOnce) {
        Quad k[kOnce];
        KIE_UNROLL for (int i = 0; i < kOnce; ++i) k[i] =
            load_quad<C>(page, row, min_i(first + 4 * i, kQuads - 1));
        KIE_UNROLL for (int i = 0; i < kOnce; ++i) {
            const int quad = first + 4 * i;
            if (quad >= kQuads) continue;
            KIE_UNROLL for (int head = 0; head < C::kHeadsAtOnce; ++head) {
                const Quad f = *(const Quad*)(q + head * C::kKept + quad * 4);
                KIE_UNROLL for (int n = 0; n < 4; ++n) d[head] +=
                    number(f.v[n]) * number(k[i].v[n]);
            }
        }
    }
    KIE_UNROLL for (int head = 0; head < C::kHeadsAtOnce; ++head) {
        d[head] += shuffle_xor(d[head], 1), d[head] += shuffle_xor(d[head], 2);
        if (t == 0) scores[head * kPage + row] = row < page.to ? d[head] : -1e30f;
    }
}
// Four features of four heads a thread, or of more where latents are wide.
template <class C>
struct LatentSums {
    static constexpr int kFours = C::kRank / 4, kAll = C::kHeadsAtOnce / 4 * kFours,
                         kCount = (kAll + kThreads - 1) / kThreads;
    float v[kCount][4][4];
    // visit(index, first head, first feature)
    template <class F>
    static KIE_DEVICE void each(F visit) {
        KIE_UNROLL for (int i = 0; i < kCount; ++i) {
            const int n = i * kThreads + (int)thread();
            if (n < kAll) visit(i, n / kFours * 4, n % kFours * 4);
        }
    }
};
template <class C>
KIE_DEVICE void add_latents(LatentSums<C>& sums, const LatentUnit& page, const float* weights,
                            const float* keep) {
    constexpr int kOnce = 4;
    static_assert(C::kRankReal % 4 == 0, "whole fours");
    LatentSums<C>::each([&](int i, int head, int feature) {
        KIE_UNROLL for (int h = 0; h < 4; ++h) {
            KIE_UNROLL for (int j = 0; j < 4; ++j) sums.v[i][h][j] *= keep[head + h];
        }
        if (feature >= C::kRankReal) return;
        KIE_NO_UNROLL for (int first = 0; first < page.to; first += kOnce) {
            Quad v[kOnce];
            KIE_UNROLL for (int n = 0; n < kOnce; ++n) v[n] =
                load_quad<C>(page, first + n, feature / 4);
            KIE_UNROLL for (int h = 0; h < 4; ++h) {
                const Quad w = *(const Quad*)(weights + (head + h) * kPage + first);
                KIE_UNROLL for (int n = 0; n < kOnce; ++n) {
                    KIE_UNROLL for (int j = 0; j < 4; ++j) sums.v[i][h][j] +=
                        number(w.v[n]) * number(v[n].v[j]);
                }
            }
        }
    });
}
template <class C>
KIE_DEVICE void attend_pages(Watch& watch, const DecodeArgs& args, const Block& b, int layer,
                             int column, int split, int page, int first, int end) {
    static_assert(C::kHeadsAtOnce <= kWarps && C::kHeadsAtOnce % 4 == 0, "a warp a head");
    const int warp = thread() / kTeam, position = (int)position_at(args, b.shared, b.step, column);
    float* q = (float*)(b.shared + kShXa);
    // On which factor earlier sums shrink (of two pages in turn), 1 / the sum of exponentials, and
    // its log2.
    float* stats = q + C::kHeadsAtOnce * C::kKept;
    sync_consumers<kThreads>();  // what stood there has been used
    take_latent_heads<C>(watch, args, b, layer, column, position, first, end);
    sync_consumers<kThreads>();
    Softmax mine = {-1e30f, 0};
    LatentSums<C> sums;
    LatentSums<C>::each([&](int i, int, int) {
        KIE_UNROLL for (int h = 0; h < 4; ++h) {
            KIE_UNROLL for (int j = 0; j < 4; ++j) sums.v[i][h][j] = 0;
        }
    });
    KIE_NO_UNROLL for (int turn = 0; page < units_of(position); ++turn, page += C::kSplitsMax) {
        const LatentUnit at = latent_unit<C>(args, b, layer, column, page, position);
        float* scores = (float*)(b.shared + kShScores) + turn % 2 * (C::kHeadsAtOnce * kPage);
        float* keep = stats + turn % 2 * C::kHeadsAtOnce;
        score_latents<C>(at, q, scores);
        sync_consumers<kThreads>();
        if (warp < C::kHeadsAtOnce) {
            const float factor = weigh_exact(mine, scores + warp * kPage);
            if (lane() == 0) keep[warp] = factor;
        }
        sync_consumers<kThreads>();
        add_latents<C>(sums, at, scores, keep);
    }
    if (warp < C::kHeadsAtOnce && lane() == 0)
        stats[2 * C::kHeadsAtOnce + warp] = reciprocal_f(mine.exp_sum),
                                    stats[3 * C::kHeadsAtOnce + warp] =
                                        mine.best + log2_f(mine.exp_sum);
    sync_consumers<kThreads>();
    u64* to = latent_partials<C>(args, b, layer, column, split);
    LatentSums<C>::each([&](int i, int head, int feature) {
        KIE_UNROLL for (int h = 0; h < 4; ++h) {
            if (first + head + h >= end) continue;
            u64* line = to + (first + head + h) * C::kPartialHead + feature / 16 * kPartialLine;
            const float by = stats[2 * C::kHeadsAtOnce + head + h];
            const float* v = sums.v[i][h];
            KIE_UNROLL for (int j = 0; j < 4; j += 2)
                publish(line + (feature + j) % 16 / 2, C::kPartialWords,
                        halves_of(v[j] * by, v[j + 1] * by), b.seqno);
            if (feature % 16 == 0)
                publish(line + kPartialLse, bits(stats[3 * C::kHeadsAtOnce + head + h]), b.seqno);
        }
    });
}

// Attention of this block's heads to its units, for each column.
template <class C>
KIE_DEVICE void attend_latents(Watch& watch, const DecodeArgs& args, const Block& b, int layer) {
    constexpr int kGroupsAtOnce = min_i(kBlocksPerLane / C::kSplitsMax, C::kHeadGroups);
    const int split = b.block_in_lane % C::kSplitsMax,
              first_group = b.block_in_lane / C::kSplitsMax, warp = thread() / kTeam;
    if (first_group >= kGroupsAtOnce) return;
    KIE_NO_UNROLL for (int c = warp; c < live_of(b); c += kWarps) {
        const int position = (int)position_at(args, b.shared, b.step, c);
        if (split_of_unit<C>(position / kLatentUnit, shift_at(args, b.shared, c)) == split)
            store_latent<C>(watch, args, b, layer, c, position);
    }
    // Columns may be positions of one sequence; and what stood where heads go has been used.
    sync_consumers<kThreads>();
    KIE_NO_UNROLL for (int c = 0; c < live_of(b); ++c) {
        const int unit = first_unit<C>(split, shift_at(args, b.shared, c));
        if (unit >= units_of((int)position_at(args, b.shared, b.step, c))) continue;
        KIE_NO_UNROLL for (int group = first_group; group < C::kHeadGroups;
                           group += kGroupsAtOnce) {
            const int first = group * C::kGroupHeads,
                      end = min_i(first + C::kGroupHeads, C::kHeads);
            if constexpr (kParts == 1)
                attend_units<C>(watch, args, b, layer, c, split, unit, first, end);
            else
                attend_pages<C>(watch, args, b, layer, c, split, unit, first, end);
        }
    }
}
