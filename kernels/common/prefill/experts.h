// The mlp of a chunk where layers have experts. The router is a product like others; then, with a
// grid barrier behind each:
//   choice   each place's experts and factors, as a decode step chooses them (ops/route.h); gate/up
//            of the expert that all places go to, where there is one
//   rows     the places that go to an expert one after another, experts ascending, places in their
//            order: of whole numbers only, so it is the same each time; their x is copied there
//   gate/up  of each expert, 128 rows x its places: activations times factors; before them down of
//            the one of all places
//   down     of each expert: each row's part of its place's output, as halves
//   sum      of the parts of a place, experts ascending, the one of all places last
// A place's sums do not depend on what else is in the chunk.
#pragma once

#include "chiplets.h"
#include "lowered.h"
#include "ops/choose.h"
#include "ops/gate.h"
#include "platform.h"
#include "prefill/feed.h"
#include "prefill/grid.h"
#include "prefill/layout.h"
#include "prefill/multiply.h"
#include "prefill/pipe.h"
#include "prefill/reduce_tp.h"
#include "prefill/residual.h"
#include "prefill/tiles.h"
#include "shape.h"

constexpr int kRoutedEights = kRoutedRows / 8;
static_assert(kTakersRow * 4 + 32 * kChosenMost * 4 <= kSquaresBytes, "shared words");
static_assert(kTakersRow <= 1 << 10 && kRoutedTiles <= 1 << 11 && kChunk <= 1 << 15, "bits");

// A tile of rows of an expert: at most kRoutedWide, `live` of them its own. It is one of `tiles`
// from the `first` on.
struct RoutedTile {
    int expert, first, tiles, place, live;
};
KIE_CONST_FN u64 pack_tile(const RoutedTile& t) {
    return (u64)t.expert | (u64)t.first << 10 | (u64)t.tiles << 21 | (u64)t.live << 28 |
           (u64)t.place << 40;
}
KIE_CONST_FN RoutedTile unpack_tile(u64 v) {
    return {(int)(v & 0x3ff), (int)(v >> 10 & 0x7ff), (int)(v >> 21 & 0x7f), (int)(v >> 40),
            (int)(v >> 28 & 0xfff)};
}
KIE_DEVICE u64* tile_words(const PrefillArgs& args) {  // how many, then each
    return (u64*)(args.scratch + kScrTiles);
}
KIE_DEVICE u32* takers_at(const PrefillArgs& args, int word) {
    return (u32*)(args.scratch + kScrTakers) + (long)word * kTakersRow;
}
KIE_DEVICE u32 count_bits(u32 v) {
    v -= v >> 1 & 0x55555555;
    v = (v & 0x33333333) + (v >> 2 & 0x33333333);
    return ((v + (v >> 4) & 0x0f0f0f0f) * 0x01010101) >> 24;
}

// Results of the router.
template <class C>
KIE_DEVICE void put_logits(const PrefillArgs& args, int layer, const WideRows& rows, int place,
                           int batches, const float* scale, float (&d)[kSums]) {
    const int my = lane(), t = my % 4, row = rows.row + my / 4 * 2;
    const bool live = my / 4 * 2 < rows.live;
    float bias[2] = {0, 0};
    if constexpr (C::kRouterBias) {
        const float* from = extras_of(args, layer) + C::kAtRouterBias + row;
        if (live) bias[0] = from[0], bias[1] = from[1];
    }
    float* to = (float*)(args.scratch + kScrLogits) + (long)(place + 2 * t) * kLogitsRow + row;
    scale += 2 * t;
    KIE_NO_UNROLL for (; batches > 0;
                       --batches, to += 8 * kBatch * kLogitsRow, scale += 8 * kBatch) {
        KIE_UNROLL for (int j = 0; j < kBatch; ++j) {
            KIE_UNROLL for (int e = 0; e < 2; ++e) {
                const float s = scale[8 * j + e];
                const u64 both = (u64)bits(d[4 * j + 2 + e] * s + bias[1]) << 32 |
                                 bits(d[4 * j + e] * s + bias[0]);
                if (live) *(u64*)(to + (8 * j + e) * kLogitsRow) = both;
            }
        }
        move_up<4 * kBatch>(d);
    }
}

// The expert that all places go to: factors of some of them, which logits behind the router's say
// if it has any, and its part of a place's output, as halves.
template <class C>
KIE_DEVICE void take_shared_factors(const PrefillArgs& args, const TileTask& task, float* scale) {
    if constexpr (C::kShares) {
        const int n = thread();
        if (n >= task.width) return;
        scale[n] = 1;
        if constexpr (C::kSharedScaled) {
            const float* from = (const float*)(args.scratch + kScrLogits) +
                                (long)(task.place + n) * kLogitsRow + C::kExperts;
            scale[n] = reciprocal_f(1.0f + exp2_f(-1.44269504f * *from));
        }
    }
}
template <class C>
KIE_DEVICE void put_shared(const PrefillArgs& args, const WideRows& rows, int place, int batches,
                           const float* scale, float (&d)[kSums]) {
    const int my = lane(), t = my % 4, row = rows.row + my / 4 * 2;
    u8* to = args.scratch + kScrShared + ((long)(place + 2 * t) * kHidden + row) * 2;
    scale += 2 * t;
    KIE_NO_UNROLL for (; batches > 0;
                       --batches, to += 8 * kBatch * (kHidden * 2), scale += 8 * kBatch) {
        KIE_UNROLL for (int j = 0; j < kBatch; ++j) {
            KIE_UNROLL for (int e = 0; e < 2; ++e) {
                const float s = scale[8 * j + e] * kResidualScale;
                if (my / 4 * 2 < rows.live)
                    *(u32*)(to + (8 * j + e) * (kHidden * 2)) =
                        pack_half2(d[4 * j + e] * s, d[4 * j + 2 + e] * s);
            }
        }
        move_up<4 * kBatch>(d);
    }
}

// What a place's warp chose: words {id, factor} in the order of ids, and 1 / rms.
template <class C>
KIE_DEVICE void choose_place(const PrefillArgs& args, int layer, int place, u32* ids) {
    constexpr int kEach = (C::kExperts + kTeam - 1) / kTeam;
    const int my = lane();
    const float* from = (const float*)(args.scratch + kScrLogits) + (long)place * kLogitsRow;
    const float* squares = (const float*)(args.scratch + kScrSquares) + place;
    float logits[kEach], sum = 0;
    KIE_UNROLL for (int i = 0; i < kEach; ++i) logits[i] =
        i * kTeam + my < C::kExperts ? from[i * kTeam + my] : 0;
    KIE_UNROLL for (int r = my; r < kFours; r += kTeam) sum += squares[(long)r * kChunk];
    KIE_UNROLL for (int m = 16; m > 0; m /= 2) sum += shuffle_xor(sum, m);
    Choice made;
    if constexpr (C::kByScores) {
        float correction[kEach];
        KIE_UNROLL for (int i = 0; i < kEach; ++i) {
            const int id = i * kTeam + my;
            correction[i] = C::kCorrection && id < C::kExperts
                                ? extras_of(args, layer)[C::kAtCorrection + id]
                                : 0;
        }
        made = choose_by_scores<C>(logits, correction, nullptr);
    } else {
        made = choose<C>(logits);
    }
    u64* to = (u64*)(args.scratch + kScrChoices) + (long)place * C::kChosen;
    if (my < C::kChosen) {
        ids[made.place] = made.id;
        to[made.place] = (u64)bits(made.factor) << 32 | made.id;
    }
    if (my == 0)
        ((float*)(args.scratch + kScrScales))[place] = rsqrt_f(sum * (1.0f / kHiddenReal) + kEps);
}
// Of all places, and which of each 32 take an expert.
template <class C>
KIE_DEVICE void choose_chunk(const PrefillArgs& args, const Chunk& chunk, int layer) {
    u32* ids = (u32*)(prefill_shared() + kPfSquares);
    KIE_NO_UNROLL for (int w = block(); w < over(chunk.to, 32); w += args.blocks) {
        sync_consumers<kWorkers>();  // the last ones are read
        KIE_NO_UNROLL for (int i = thread() / kTeam; i < 32; i += kWorkers / kTeam) {
            const int place = 32 * w + i;
            u32* own = ids + i * C::kChosen;
            if (chunk.has(place))
                choose_place<C>(args, layer, place, own);
            else if ((int)lane() < C::kChosen)
                own[lane()] = ~0u;
        }
        sync_consumers<kWorkers>();
        KIE_NO_UNROLL for (int e = thread(); e < C::kExperts; e += kWorkers) {
            u32 takers = 0;
            KIE_NO_UNROLL for (int i = 0; i < 32; ++i) {
                KIE_UNROLL for (int n = 0; n < C::kChosen; ++n) takers |=
                    (u32)(ids[i * C::kChosen + n] == (u32)e) << i;
            }
            takers_at(args, w)[e] = takers;
        }
    }
}

// By a warp: `counts` has, of each expert, how many places there are and (lower half) how many
// before those at work; then the row of the first at work. `tells`: writes the tiles.
template <class C>
KIE_DEVICE void place_experts(const PrefillArgs& args, u32* counts, bool tells) {
    constexpr int kEach = (C::kExperts + kTeam - 1) / kTeam;
    const int my = lane(), from = my * kEach, to = min_i(from + kEach, C::kExperts);
    u32 mine = 0, before = 0;  // rows, and tiles in the upper half
    KIE_NO_UNROLL for (int e = from; e < to; ++e) {
        const u32 count = counts[e] >> 16;
        mine += (u32)over(count, 8) | (u32)over(count, kRoutedWide) << 16;
    }
    KIE_NO_UNROLL for (int m = 0; m < (int)kTeam; ++m) {
        const u32 of = bits(shuffle(number(mine), m));
        if (m < my) before += of;
    }
    if (tells && my == (int)kTeam - 1) tile_words(args)[0] = (before + mine) >> 16;
    u64* tile = tile_words(args) + 1;
    KIE_NO_UNROLL for (int e = from; e < to; ++e) {
        const int count = counts[e] >> 16, tiles = over(count, kRoutedWide),
                  row = (before & 0xffff) * 8, first = before >> 16;
        KIE_NO_UNROLL for (int i = 0; i < tiles && tells; ++i) {
            const int done = i * kRoutedWide;
            tile[first + i] =
                pack_tile({e, first, tiles, row + done, min_i(count - done, kRoutedWide)});
        }
        counts[e] = row + (counts[e] & 0xffff);
        before += (u32)over(count, 8) | (u32)tiles << 16;
    }
}
// A word of places at a time, some of its columns: their x to where they stand.
template <class C>
KIE_DEVICE void place_rows(const PrefillArgs& args, const Chunk& chunk) {
    constexpr int kUnits = kHidden / 32, kCopies = kWorkers / kTeam / 4;
    u32* first = (u32*)(prefill_shared() + kPfSquares);
    u32* rows = first + C::kExperts;
    const int my = lane(), warp = thread() / kTeam, words = over(chunk.to, 32),
              slices = min_i(max_i((int)args.blocks / words, 1), over(kUnits, kCopies));
    KIE_NO_UNROLL for (int i = block(); i < words * slices; i += args.blocks) {
        const int w = i % words, slice = i / words;
        sync_consumers<kWorkers>();  // the last ones are read
        KIE_NO_UNROLL for (int e = thread(); e < C::kExperts; e += kWorkers) {
            u32 count = 0, before = 0;
            const u32* from = takers_at(args, 0) + e;
            KIE_NO_UNROLL for (int v = 0; v < words; v += 8) {
                KIE_UNROLL for (int j = v; j < v + 8; ++j) {
                    const u32 n = j < words ? count_bits(from[(long)j * kTakersRow]) : 0;
                    count += n, before += j < w ? n : 0;
                }
            }
            first[e] = count << 16 | before;
        }
        sync_consumers<kWorkers>();
        if (warp == 0) place_experts<C>(args, first, i == 0);
        sync_consumers<kWorkers>();
        KIE_NO_UNROLL for (int n = thread(); n < 32 * C::kChosen; n += kWorkers) {
            const int t = n / C::kChosen, place = 32 * w + t;
            rows[n] = ~0u;
            if (!chunk.has(place)) continue;
            const long at = (long)place * C::kChosen + n % C::kChosen;
            const u64 choice = ((const u64*)(args.scratch + kScrChoices))[at];
            const u32 id = (u32)choice;
            const u32 row = first[id] + count_bits(takers_at(args, w)[id] & ((1u << t) - 1));
            rows[n] = row;
            if (slice > 0) continue;
            ((u32*)(args.scratch + kScrPlaces))[at] = row;
            const float scale = ((const float*)(args.scratch + kScrScales))[place];
            ((u64*)(args.scratch + kScrFactors))[row] = (u64)bits(scale) << 32 | choice >> 32;
        }
        sync_consumers<kWorkers>();
        // A lane has a place and an eighth of each 32 columns.
        const int eight = warp % 4, p = my % 8;
        u32 to[C::kChosen];
        KIE_UNROLL for (int n = 0; n < C::kChosen; ++n) {
            const u32 row = rows[(8 * eight + p) * C::kChosen + n];
            to[n] = row == ~0u ? row : row / 8 * kCores + row % 8 * 16 + my / 8 * 128;
        }
        const u8* x = args.scratch + kScrX + (w * 4 + eight) * kCores + my * 16;
        u8* routed = args.scratch + kScrRoutedX;
        const int end = kUnits * (slice + 1) / slices;
        KIE_NO_UNROLL for (int u = kUnits * slice / slices + warp / 4; u < end; u += 4 * kCopies) {
            Quad v[4];
            KIE_UNROLL for (int j = 0; j < 4; ++j) v[j] =
                *(const Quad*)(x + (long)min_i(u + j * kCopies, end - 1) * (kEights * kCores));
            KIE_UNROLL for (int j = 0; j < 4; ++j) {
                if (u + j * kCopies >= end) continue;
                u8* there = routed + (long)(u + j * kCopies) * (kRoutedEights * kCores);
                KIE_UNROLL for (int n = 0; n < C::kChosen; ++n) if (to[n] != ~0u) *
                    (Quad*)(there + to[n]) = v[j];
            }
        }
    }
}

// Where engines copy, a copy takes its warp about 50 ticks however few bytes it brings: stages have
// as many units of k as there is room for, and a block's, where they lie one behind another, are
// one copy.
template <class S>
KIE_CONST_FN bool joins(int units, int tiles) {
    const int rows = (over(16 * tiles - 1, S::rows) + 1) * S::rows;
    return S::unit_bytes == S::rows * S::row_bytes &&
           units * (rows * S::row_bytes + kRoutedWide * 64) <= kStageBytes;
}
// Products of experts: matrices' own tiles where as many rows as they touch fit a stage; of codes
// of 4 bits two a warp, so that positions are copied half as often. Others leave no registers for
// two.
template <class S, int kAll>
struct Routed {
    using Tiling = S;
    static constexpr int kRows = kAll;
    static constexpr int kMost = kStageWeights / kStagePairs / S::row_bytes;
    static constexpr bool kOwn = is_dense<S, kRows>(kMost),
                          kTwo = S::row_bytes <= 16 && kOwn &&
                                 is_dense<S, kRows>(kMost, 2 * kWideRows);
    static constexpr int kTurns = kTwo ? 2 : 1, kTiles = kTurns * kWideTiles;
    static constexpr int kJoined = !kOwn || kTwo || kTeamStages ? 0
                                   : joins<S>(4, kTiles)        ? 4
                                   : joins<S>(2, kTiles)        ? 2
                                                                : 0;
    static constexpr bool kSoleScale = kJoined > 0 && S::group % max_i(kJoined, 1) == 0,
                          kWhole = S::k / 32 % (kJoined > 0 ? kJoined : 2) == 0;
    static constexpr int kFrags = kOwn ? over(kRows, 16) : frags_of<S, kRows>();
    static constexpr int kAcross = over(kFrags, kTiles), kPairs = S::k / 32;
    static constexpr int kPairsInStages = 2 * over(kPairs, 2);
    KIE_DEVICE static WideRows rows(const TileTask& task, int turn) {
        const int f = task.frag + result_tile(task, turn).tile;
        if constexpr (!kOwn) return rows_at<S, kRows>(f);
        const int live = min_i(kRows - 16 * f, 16);
        return live > 0 ? WideRows{f, 16 * f, 16, live} : WideRows{f, 0, 0, 0};
    }
};
struct RoutedTask {
    TileTask task;
    int expert, live;
    bool sole;  // of its expert's rows
};
// Tiles of an expert that share weights are neighbours.
template <class R>
KIE_DEVICE RoutedTask routed_task(const PrefillArgs& args, int i) {
    const u64* tiles = tile_words(args) + 1;
    RoutedTile t = unpack_tile(load_word(tiles + i / R::kAcross));
    const int in = i - t.first * R::kAcross, frag = in / t.tiles * R::kTiles;
    if (t.tiles > 1) t = unpack_tile(load_word(tiles + t.first + in % t.tiles));
    const int width = t.live > kRoutedNarrow ? kRoutedWide : kRoutedNarrow;
    return {{0, frag, min_i(R::kTiles, R::kFrags - frag), t.place, width, 0, 0, 0, true},
            t.expert,
            t.live,
            t.tiles == 1};
}
template <class R>
KIE_DEVICE int routed_tasks(const PrefillArgs& args) {
    return (int)load_word(tile_words(args)) * R::kAcross;
}
// Where a layer's experts begin among those of all.
struct AddBank {
    long& bytes;
    template <class C>
    KIE_DEVICE void operator()(C) const {
        if constexpr (C::kRouted) bytes += C::kExperts * C::kExpertBytes;
    }
};
template <class C>
KIE_CONST_FN long bank_bytes() {
    if constexpr (C::kRouted)
        return C::kExperts * C::kExpertBytes;
    else
        return 0;
}
template <class C>
KIE_DEVICE long bank_at(const PrefillArgs& args, int layer) {
    constexpr long kEach = bank_bytes<C>();
    if constexpr (kEach == bank_bytes<Prefill0>() && kEach == bank_bytes<Prefill1>() &&
                  kEach == bank_bytes<Prefill2>() && kEach == bank_bytes<PrefillLast>())
        return layer * kEach;
    long bytes = 0;
    KIE_NO_UNROLL for (int i = 0; i < layer; ++i) of_layer(args, i, AddBank{bytes});
    return bytes;
}
template <class C>
KIE_DEVICE MatrixAt expert_at(const PrefillArgs& args, int layer, int expert, long at) {
    return {args.model.experts + bank_at<C>(args, layer) + (long)expert * C::kExpertBytes + at,
            C::kPieceBytes};
}
// The blocks that have rows of a tile, one behind another.
struct BlockRun {
    int first, count;
};
template <class S>
KIE_DEVICE BlockRun blocks_of(const TileTask& task, int rows) {
    const int row = 16 * task.frag, end = min_i(row + 16 * task.tiles, rows), first = row / S::rows;
    return {first, (end - 1) / S::rows + 1 - first};
}
// Where positions begin in a stage of so many joined units.
KIE_CONST_FN int routed_x(int units) { return kStageBytes - units * (kRoutedWide * 64); }
// The stages of a task, whose weights two warps bring, block by block, and two its positions.
template <class S, class R>
KIE_DEVICE bool feed_joined(Watch& w, Pipe& pipe, const MatrixAt& matrix, const RoutedTask& t,
                            const u8* x, StreamPolicy policy, u32 where) {
    constexpr int kUnits = R::kJoined, kPairs = S::k / 32;
    const int my = lane(), warp = (int)(thread() - kWorkers) / (int)kTeam;
    const auto [first, runs] = blocks_of<S>(t.task, R::kRows);
    // Each warp has a part in every stage (see await_free): of one run half.
    const int halves = runs == 1 ? 2 : 1, run = runs == 1 ? 0 : 2 * my + warp;
    const int part = 2 * my + warp - 2;
    const bool brings = warp < 2 ? run < runs && (runs > 1 || my == 0) : part < kUnits;
    const u8* from = warp < 2 ? matrix.at + (first + run) * matrix.stride
                              : x + (long)(t.task.place / 8) * kCores;
    u8* const shared = prefill_shared() + kPfRing;
    const u32 to =
        warp < 2 ? run * (kUnits * S::unit_bytes) : routed_x(kUnits) + part * (kRoutedWide * 64);
    KIE_NO_UNROLL for (int p = 0; p < kPairs; p += kUnits) {
        if (!await_free(w, pipe, where, p)) return false;
        Slot* s = stage_slot(pipe.at);
        const int units = min_i(kUnits, kPairs - p);
        if (warp == 0 && my == 0)
            stage_expect(s, runs * units * S::unit_bytes + kUnits * (t.task.width * 64));
        if (brings) {
            reads_before_copy();
            u8* there = shared + pipe.at * kStageBytes + to;
            if (warp >= 2) {
                const long pair = min_i(p + part, kPairs - 1);
                stage_copy(s, there, from + pair * (kRoutedEights * kCores), t.task.width * 64);
            } else {
                for (int u = 0, n; u < units; u += n) {
                    n = joined_units<S>(p + u, units - u);
                    const u32 bytes = n * S::unit_bytes / halves,
                              skip = halves == 2 ? warp * bytes : 0;
                    const u8* source = from + unit_at<S>(p + u) + skip;
                    u8* at = there + u * S::unit_bytes + skip;
                    if (t.sole)
                        stage_copy(s, at, source, bytes, policy);
                    else
                        stage_copy(s, at, source, bytes);
                }
            }
        }
        forward(pipe);
    }
    return true;
}
// Scales come a few bytes at a time, straight from where they lie: all of a task's come near when
// its copies begin.
template <class S>
KIE_DEVICE void prefetch_scales(const MatrixAt& matrix, const TileTask& task, int rows) {
    constexpr int kBytes = S::scales_at > 0 ? S::stage_bytes - S::scales_at : S::codes_at,
                  kLines = (kBytes + 127) / 128;
    if (S::bits == kBitsF16 || (thread() - kWorkers) / kTeam != 1) return;
    const auto [first, runs] = blocks_of<S>(task, rows);
    KIE_NO_UNROLL for (int n = lane(); n < runs * S::stages * kLines; n += kTeam) {
        const int area = n / kLines, line = n % kLines;
        prefetch(matrix.at + (first + area / S::stages) * matrix.stride +
                 area % S::stages * S::stage_bytes + S::scales_at + line * 128);
    }
}
template <class C, class S, int kRows>
KIE_DEVICE bool feed_routed(Watch& w, const PrefillArgs& args, Pipe& pipe, int product, int layer,
                            long at, const u8* x) {
    using R = Routed<S, kRows>;
    const int tasks = routed_tasks<R>(args);
    const StreamPolicy policy = stream_policy();
    KIE_NO_UNROLL for (int i = block(); i < tasks; i += args.blocks) {
        const RoutedTask t = routed_task<R>(args, i);
        const MatrixAt matrix = expert_at<C>(args, layer, t.expert, at);
        if constexpr (R::kJoined > 0) {
            if (!feed_joined<S, R>(w, pipe, matrix, t, x, policy, 0x2000 | product)) return false;
            continue;
        }
        if constexpr (R::kOwn) prefetch_scales<S>(matrix, t.task, kRows);
        const Load load = load_of<S>(matrix, t.task, R::kOwn ? kRows : 0, x);
        if (!feed_stages<S>(w, pipe, load, 0, R::kPairsInStages, kRoutedEights * kCores, t.sole,
                            policy, 0x2000 | product))
            return false;
    }
    return true;
}
// Sums of kTurns row tiles a warp and kN positions, a pair of k at a time. Codes of all tiles come
// before any are decoded. Rows that a matrix does not have may have results: nobody takes them.
template <int kBits, int kTurns, class Rows>
KIE_DEVICE void take_routed(const u8* weights, const Rows (&rows)[kTurns],
                            UnitCodes<kBits> (&codes)[kTurns]) {
    KIE_UNROLL for (int m = 0; m < kTurns; ++m) codes[m] =
        take_codes<kBits>(weights + rows[m].at(), rows[m].tile_rows());
}
template <int kBits, int kTurns>
KIE_DEVICE void decode_routed(const UnitCodes<kBits> (&codes)[kTurns], bool there,
                              const Scale (&scale)[kTurns], NarrowShare<kTurns>& a) {
    KIE_UNROLL for (int m = 0; m < kTurns; ++m) {
        Quad &low = a.v[m][0], &high = a.v[m][1];
        if constexpr (kBits == kBitsF16)
            low = codes[m].v[0], high = codes[m].v[1];
        else
            decode_share<kBits>(codes[m], scale[m], low, high);
        if (!there) low = high = {{0, 0, 0, 0}};
    }
}
template <int kN, int kTurns>
KIE_DEVICE void multiply_turns(const NarrowShare<kTurns>& a, const WideOperand& x,
                               float (&d)[kTurns * kN / 2]) {
    wide_begin();
    KIE_UNROLL for (int i = 0; i < 2; ++i) {
        const WideOperand at = wide_shift(x, i * 256);
        multiply_tiles<kN, kTurns>(d, a.v, i, at, kCores);
    }
    wide_commit();
}
// As scale_places, of a product of experts.
KIE_DEVICE u32* routed_places() { return (u32*)(prefill_shared() + kPfSquares) + 4 * kRoutedWide; }
template <class S>
KIE_DEVICE void find_routed_places() {
    static_assert((4 * kRoutedWide + S::k / 32) * 4 <= kSquaresBytes, "shared words");
    KIE_NO_UNROLL for (int p = thread(); p < S::k / 32; p += kWorkers) routed_places()[p] =
        scale_offset<S>(p);
}
template <int kBits, int kN, int kTurns, class Rows, class P>
KIE_DEVICE void accumulate_routed(Pipe& pipe, int pairs, const Rows (&rows)[kTurns],
                                  const ScaleRows<kTurns>& scales, const P& product,
                                  float (&d)[kTurns * kN / 2]) {
    KIE_UNROLL for (int i = 0; i < kTurns * kN / 2; ++i) d[i] = 0;
    NarrowShare<kTurns> a, b;
    UnitCodes<kBits> codes[kTurns];
    Scale ahead[2][kTurns];
    const auto ask = [&](int p, Scale(&to)[kTurns]) {
        if constexpr (kBits != kBitsF16)
            take_scales_at<kBits>(scales, product.scale_at(min_i(p, pairs - 1)), to);
    };
    ask(0, ahead[0]), ask(1, ahead[1]);
    await_stage(pipe);
    take_routed<kBits>(stage_bytes(pipe.at), rows, codes);
    decode_routed<kBits>(codes, true, ahead[0], a);
    ask(2, ahead[0]);
    u32 last = kStages;  // whose products are still under way
    KIE_NO_UNROLL for (int p = 0; p < pairs; p += 2) {
        const u8* stage = stage_bytes(pipe.at);
        const WideOperand x = wide_operand(stage + kStageWeights, 128, kCores);
        if (!kShortStages) take_routed<kBits>(stage + second_pair(kStageWeights), rows, codes);
        multiply_turns<kN, kTurns>(a, x, d);
        leave_before(pipe, last);
        enter_second(pipe);
        if (kShortStages) stage = stage_bytes(pipe.at), take_routed<kBits>(stage, rows, codes);
        decode_routed<kBits>(codes, P::kWhole || p + 1 < pairs, ahead[1], b);
        ask(p + 3, ahead[1]);
        const WideOperand next = kShortStages ? wide_operand(stage + kStageWeights, 128, kCores)
                                              : wide_shift(x, kStagePart);
        multiply_turns<kN, kTurns>(b, next, d);
        leave_after(pipe);
        forward(pipe);
        if (p + 2 >= pairs) break;
        await_stage(pipe);
        take_routed<kBits>(stage_bytes(pipe.at), rows, codes);
        decode_routed<kBits>(codes, true, ahead[0], a);
        ask(p + 4, ahead[0]);
    }
    wide_finish(d);
    leave_last(last);
}
// The same of stages of joined units, `unit` bytes each of all blocks.
template <int kBits, int kN, int kTurns, class P>
KIE_DEVICE void accumulate_joined(Pipe& pipe, int pairs, int unit, const DenseRows (&rows)[kTurns],
                                  const ScaleRows<kTurns>& scales, const P& product,
                                  float (&d)[kTurns * kN / 2]) {
    constexpr int kUnits = P::kJoined;
    static_assert(kUnits % 2 == 0, "what products still read is not written over");
    KIE_UNROLL for (int i = 0; i < kTurns * kN / 2; ++i) d[i] = 0;
    NarrowShare<kTurns> share[2];
    UnitCodes<kBits> codes[kTurns];
    // Of the next two units; or of this stage's and of the next one's.
    Scale ahead[2][kTurns];
    const auto ask = [&](int p, Scale(&to)[kTurns]) {
        if constexpr (kBits != kBitsF16)
            take_scales_at<kBits>(scales, product.scale_at(min_i(p, pairs - 1)), to);
    };
    ask(0, ahead[P::kSoleScale ? 1 : 0]);
    if (!P::kSoleScale) ask(1, ahead[1]);
    u32 last = kStages;  // whose products are still under way
    KIE_NO_UNROLL for (int p = 0; p < pairs; p += kUnits) {
        await_stage(pipe);
        const u8* stage = stage_bytes(pipe.at);
        const WideOperand x = wide_operand(stage + routed_x(kUnits), 128, kCores);
        take_routed<kBits>(stage, rows, codes);
        if (P::kSoleScale) {
            KIE_UNROLL for (int m = 0; m < kTurns; ++m) ahead[0][m] = ahead[1][m];
            ask(p + kUnits, ahead[1]);
        }
        KIE_UNROLL for (int i = 0; i < kUnits; ++i) {
            NarrowShare<kTurns>& now = share[i % 2];
            Scale(&scale)[kTurns] = ahead[P::kSoleScale ? 0 : i % 2];
            decode_routed<kBits>(codes, P::kWhole || p + i < pairs, scale, now);
            if (!P::kSoleScale) ask(p + i + 2, scale);
            if (i + 1 < kUnits) take_routed<kBits>(stage + (i + 1) * unit, rows, codes);
            multiply_turns<kN, kTurns>(now, wide_shift(x, i * (kRoutedWide * 64)), d);
            if (i == 0)
                leave_before(pipe, last);
            else if (i + 1 == kUnits)
                leave_after(pipe);
            else
                wide_wait<1>();
        }
        forward(pipe);
    }
    wide_finish(d);
    leave_last(last);
}
// Results of a row tile: `scale` has 1 / rms of each place, then, kRoutedWide on, factors; `d`
// moves up to the next tile's. A pass has four groups of eight places.
constexpr int kRoutedPass = 4;
template <class C, int kN, int kAll>
KIE_DEVICE void put_routed_act(const PrefillArgs& args, int layer, const RoutedTask& at,
                               const WideRows& rows, const float* scale, float (&d)[kAll]) {
    const int my = lane(), g = my / 4, t = my % 4, odd = g & 1, row = rows.row + 2 * g;
    const int f = row / 2 - odd;  // of a pair: the even one stores the first place
    const int place = at.task.place + 2 * t + odd;
    u8* to = args.scratch + kScrRoutedAct + ((long)(f / 32) * kRoutedEights + place / 8) * kCores +
             f % 8 / 2 * 128 + place % 8 * 16 + f % 32 / 8 * 4;
    float bias[2] = {0, 0};
    if constexpr (C::kExpertBias) {
        const float* from = extras_of(args, layer) + C::kAtGateUpBias +
                            at.expert * (kBlocksPerLane * C::TilingGu::rows) + row;
        if (2 * g < rows.live) bias[0] = from[0], bias[1] = from[1];
    }
    int left = 2 * g < rows.live ? at.live - (2 * t + odd) : 0;
    scale += 2 * t;
    KIE_NO_UNROLL for (int b = 0; b < kN / (8 * kRoutedPass); ++b) {
        KIE_UNROLL for (int j = 0; j < kRoutedPass; ++j) {
            float y[2];
            KIE_UNROLL for (int e = 0; e < 2; ++e) {
                const float s = scale[8 * j + e];
                y[e] = gated<C>(d[4 * j + e] * s + bias[0], d[4 * j + 2 + e] * s + bias[1]) *
                       scale[kRoutedWide + 8 * j + e];
            }
            const float mine = odd ? y[1] : y[0], other = shuffle_xor(odd ? y[0] : y[1], 4);
            if (8 * j < left)
                *(u32*)(to + j * kCores) = odd ? pack_half2(other, mine) : pack_half2(mine, other);
        }
        move_up<4 * kRoutedPass>(d);
        to += kRoutedPass * kCores, scale += 8 * kRoutedPass, left -= 8 * kRoutedPass;
    }
}
template <class C, int kN, int kAll>
KIE_DEVICE void put_parts(const PrefillArgs& args, int layer, const RoutedTask& at,
                          const WideRows& rows, const float* scale, float (&d)[kAll]) {
    const int my = lane(), g = my / 4, t = my % 4, row = rows.row + 2 * g;
    u8* to = args.scratch + kScrParts + ((long)(at.task.place + 2 * t) * kHidden + row) * 2;
    float bias[2] = {0, 0};
    if constexpr (C::kExpertBias) {
        const float* from = extras_of(args, layer) + C::kAtDownBias +
                            at.expert * (kBlocksPerLane * C::TilingDown::rows) + row;
        if (2 * g < rows.live) bias[0] = from[0], bias[1] = from[1];
    }
    int left = 2 * g < rows.live ? at.live - 2 * t : 0;
    scale += kRoutedWide + 2 * t;
    KIE_NO_UNROLL for (int b = 0; b < kN / (8 * kRoutedPass); ++b) {
        KIE_UNROLL for (int j = 0; j < kRoutedPass; ++j) {
            KIE_UNROLL for (int e = 0; e < 2; ++e) {
                float v[2];
                KIE_UNROLL for (int i = 0; i < 2; ++i) {
                    v[i] = d[4 * j + 2 * i + e];
                    if constexpr (C::kExpertBias) v[i] += scale[8 * j + e] * bias[i];
                    if (kResidualScaled) v[i] *= kResidualScale;
                }
                if (8 * j + e < left)
                    *(u32*)(to + (8 * j + e) * (kHidden * 2)) = pack_half2(v[0], v[1]);
            }
        }
        move_up<4 * kRoutedPass>(d);
        to += 8 * kRoutedPass * (kHidden * 2);
        scale += 8 * kRoutedPass, left -= 8 * kRoutedPass;
    }
}
// Either product of experts, or (kProduct < 0) both by the same code, where they are cut alike: the
// compiler has registers for the products of few widths.
template <class C, int kProduct>
struct RoutedProduct {
    using Up = Routed<typename C::TilingGu, 2 * C::kFfn>;
    using Down = Routed<typename C::TilingDown, kHidden>;
    static constexpr bool kAlike = C::TilingGu::bits == C::TilingDown::bits && Up::kOwn &&
                                   Down::kOwn && Up::kTwo == Down::kTwo &&
                                   Up::kJoined == Down::kJoined;
    static constexpr int kBits = kProduct == kToDown ? C::TilingDown::bits : C::TilingGu::bits,
                         kTurns = kProduct == kToDown ? Down::kTurns : Up::kTurns;
    static constexpr bool kOwn = kProduct == kToDown ? Down::kOwn : Up::kOwn;
    static constexpr int kJoined = kProduct == kToDown ? Down::kJoined : Up::kJoined;
    // Whether units of a stage have the same scales, and all stages as many units.
    static constexpr bool kSoleScale = kJoined > 0 && (Up::kSoleScale && Down::kSoleScale),
                          kWhole = (Up::kWhole && Down::kWhole);
    int product;
    KIE_DEVICE bool is_down() const {
        return kProduct < 0 ? product == kToDown : kProduct == kToDown;
    }
    KIE_DEVICE RoutedTask task(const PrefillArgs& args, int i) const {
        return is_down() ? routed_task<Down>(args, i) : routed_task<Up>(args, i);
    }
    KIE_DEVICE WideRows rows(const TileTask& task, int turn) const {
        return is_down() ? Down::rows(task, turn) : Up::rows(task, turn);
    }
    // Where a pair's scales stand: worked out beforehand where registers are left for it.
    KIE_DEVICE int scale_at(int pair) const {
        if constexpr (!kTeamStages) return (int)routed_places()[pair];
        return is_down() ? scale_offset<typename C::TilingDown>(pair)
                         : scale_offset<typename C::TilingGu>(pair);
    }
    KIE_DEVICE void find_places() const {
        if constexpr (kBits == kBitsF16 || kTeamStages) return;
        if (is_down())
            find_routed_places<typename C::TilingDown>();
        else
            find_routed_places<typename C::TilingGu>();
        sync_consumers<kWorkers>();
    }
};
template <class C, int kProduct, int kN>
KIE_DEVICE void multiply_routed(const PrefillArgs& args, Pipe& pipe, int layer,
                                const RoutedProduct<C, kProduct>& p, const RoutedTask& at,
                                const float* scale) {
    using P = RoutedProduct<C, kProduct>;
    constexpr int kTurns = P::kTurns;
    ScaleRows<kTurns> scales = {p.product};
    if constexpr (P::kBits != kBitsF16) {
        if (p.is_down())
            find_scales<typename C::TilingDown>(
                args, expert_at<C>(args, layer, at.expert, C::kStreamDown), at.task, kHidden,
                P::kOwn, scales);
        else
            find_scales<typename C::TilingGu>(args, expert_at<C>(args, layer, at.expert, 0),
                                              at.task, 2 * C::kFfn, P::kOwn, scales);
    }
    const int pairs = p.is_down() ? P::Down::kPairs : P::Up::kPairs;
    float d[kTurns * kN / 2];
    if constexpr (P::kOwn) {
        DenseRows rows[kTurns];
        KIE_UNROLL for (int m = 0; m < kTurns; ++m) rows[m] =
            p.is_down() ? dense_rows<typename C::TilingDown, P::kJoined>(at.task, kHidden, m)
                        : dense_rows<typename C::TilingGu, P::kJoined>(at.task, 2 * C::kFfn, m);
        if constexpr (P::kJoined > 0) {
            const int unit = p.is_down() ? C::TilingDown::unit_bytes : C::TilingGu::unit_bytes;
            accumulate_joined<P::kBits, kN, kTurns>(pipe, pairs, unit, rows, scales, p, d);
        } else {
            accumulate_routed<P::kBits, kN, kTurns>(pipe, pairs, rows, scales, p, d);
        }
    } else {
        const OwnRows<P::kBits> rows[1] = {{p.rows(at.task, 0).rows}};
        accumulate_routed<P::kBits, kN, kTurns>(pipe, pairs, rows, scales, p, d);
    }
    sync_consumers<kWorkers>();  // scales are there, those of the task before the last are read
    KIE_NO_UNROLL for (int m = 0; m < kTurns; ++m) {
        const WideRows rows = p.rows(at.task, m);
        if (p.is_down())
            put_parts<C, kN>(args, layer, at, rows, scale, d);
        else
            put_routed_act<C, kN>(args, layer, at, rows, scale, d);
    }
}
template <class C, int kProduct>
KIE_DEVICE void routed_phase(const PrefillArgs& args, Pipe& pipe, int layer, int product) {
    const RoutedProduct<C, kProduct> p = {product};
    using P = RoutedProduct<C, kProduct>;
    const int tasks = p.is_down() ? routed_tasks<typename P::Down>(args)
                                  : routed_tasks<typename P::Up>(args),
              n = thread();
    int turn = 0;
    p.find_places();
    KIE_NO_UNROLL for (int i = block(); i < tasks; i += args.blocks, turn ^= 1) {
        const RoutedTask at = p.task(args, i);
        float* scale = (float*)(prefill_shared() + kPfSquares) + turn * (2 * kRoutedWide);
        if (n < at.task.width) {
            const u64 v = ((const u64*)(args.scratch + kScrFactors))[at.task.place + n];
            scale[n] = number((u32)(v >> 32)), scale[kRoutedWide + n] = number((u32)v);
        }
        if (at.task.width == kRoutedNarrow)
            multiply_routed<C, kProduct, kRoutedNarrow>(args, pipe, layer, p, at, scale);
        else
            multiply_routed<C, kProduct, kRoutedWide>(args, pipe, layer, p, at, scale);
    }
}

// The parts of each place, added up: to the residual, or to the rank that owns the place.
template <class C>
KIE_DEVICE void sum_experts(const PrefillArgs& args, const Chunk& chunk, int layer) {
    const TileConfig config = {8 * kBatch, kWideTiles, 1};
    const int tasks = tasks_of<C>(kToO, all_of(chunk), config), t = lane() % 4;
    const u32* places = (const u32*)(args.scratch + kScrPlaces);
    KIE_NO_UNROLL for (int i = block(); i < tasks; i += args.blocks) {
        TileTask task = task_at<C>(kToO, all_of(chunk), config, i);
        task.width = config.width;
        const WideRows rows = residual_rows(task.frag + result_tile(task, 0).tile);
        sync_consumers<kWorkers>();  // the last task's squares are read
        Residual r = residual_of(args, 1, layer, task, rows, 0);
        const int own = (rows.row + lane() / 4 * 2) * 2;
        const u8 *parts = args.scratch + kScrParts + own, *shared = args.scratch + kScrShared + own;
        float d[4 * kBatch];
        KIE_UNROLL for (int j = 0; j < kBatch; ++j) {
            KIE_UNROLL for (int e = 0; e < 2; ++e) {
                const int place = task.place + 8 * j + 2 * t + e;
                float sum[2] = {0, 0};
                if (r.live && chunk.has(place)) {
                    KIE_UNROLL for (int n = 0; n < C::kChosen; ++n) {
                        const u32 row = places[place * C::kChosen + n];
                        float v[2];
                        unpack_half2(*(const u32*)(parts + (long)row * (kHidden * 2)), v[0], v[1]);
                        sum[0] += v[0], sum[1] += v[1];
                    }
                    if constexpr (C::kShares) {
                        float v[2];
                        unpack_half2(*(const u32*)(shared + (long)place * (kHidden * 2)), v[0],
                                     v[1]);
                        sum[0] += v[0], sum[1] += v[1];
                    }
                }
                d[4 * j + e] = sum[0], d[4 * j + 2 + e] = sum[1];
            }
        }
        if constexpr (kTensorParallel) {
            if (r.live) share_sums(args, own_past(args, 1, layer, 0) + r.at, task.place / 8, d);
        } else {
            const Quad* from = old_at(args, 0) + r.at;
            Quad old[kBatch];
            // Warps without rows stand at the last tile, which another one writes.
            KIE_UNROLL for (int j = 0; j < kBatch; ++j) old[j] =
                r.live ? from[j * 32] : Quad{{0, 0, 0, 0}};
            put_residual(args, r, old, d);
            put_squares(args, task);
        }
    }
}
