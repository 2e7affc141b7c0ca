// How a product of many positions is cut: tiles of row tiles by positions, over a split of k.
#pragma once

#include "lowered.h"
#include "ops/unit.h"
#include "platform.h"
#include "prefill/layout.h"
#include "shape.h"
#include "wide.h"

// A tile of a product: `tiles` row tiles of one lane's matrix, from `frag` on, times `width`
// positions, over a part of k. Of a wide tile each warp multiplies a row tile; of a narrow one
// (kNarrowN positions) each team half of the positions, its warps four row tiles at a time.
struct TileTask {
    int lane_index, frag, tiles, place, width, k_split, tile, k_split_tiles;
    bool routed = false;  // of positions that go to an expert: cut as wide ones
};
KIE_CONST_FN bool is_narrow(const TileTask& task) {
    return kFew && task.width == kNarrowN && !task.routed;
}
// A warp's results: so many tiles, each some batches of one row tile.
KIE_CONST_FN int result_tiles(const TileTask& task) {
    return is_narrow(task) ? over(task.tiles, 4) : 1;
}
KIE_CONST_FN int batches_of(const TileTask& task) {
    return is_narrow(task) ? result_tiles(task) : task.width / (8 * kBatch);
}
struct ResultTile {
    int tile, place, batches;
};
KIE_DEVICE ResultTile result_tile(const TileTask& task, int turn) {
    const int warp = (int)(thread() / kTeam);
    if (is_narrow(task)) return {4 * turn + warp % 4, task.place + warp / 4 * (8 * kBatch), 1};
    return {kWideTiles * turn + warp, task.place, batches_of(task)};
}
struct WideRows {
    int frag, row, rows;  // 16-row tile of the lane, its first row, how many rows there are
    int live;             // and how many of those are not beyond the matrix
};
template <class S, int kRows>  // of kRows rows in all
KIE_DEVICE WideRows rows_at(int f) {
    if (f >= frags_of<S, kRows>()) return {frags_of<S, kRows>() - 1, 0, 0, 0};
    const int i = f % S::tiles_all, row = f / S::tiles_all * S::rows + 16 * i;
    const int rows = min_i(S::rows - 16 * i, 16);
    return {f, row, rows, min_i(rows, kRows - row)};
}
template <class C, class S, int kRows>
KIE_DEVICE WideRows product_rows(int f) {
    if (!C::kDense) return rows_at<S, kRows>(f);
    const int live = min_i(kRows - 16 * f, 16);
    return live > 0 ? WideRows{f, 16 * f, 16, live} : WideRows{f, 0, 0, 0};
}
KIE_DEVICE WideRows residual_rows(int f) { return rows_at<TilingOwned, kHidden>(f); }
// Where there are experts kToGateUp is the router, and kToDown and the last one are each expert's.
// Before that one stand those that not all layers have: gates of a delta rule, and both of the
// expert that all positions go to.
enum Product { kToQkv, kToO, kToGateUp, kToDown, kToGates, kToSharedUp, kToSharedDown, kToExperts };
// A layer's, but for those of its experts, in their order.
template <class C>
KIE_CONST_FN int products_of() {
    return (C::kDelta ? 4 : 3) + (C::kShares ? 2 : C::kRouted ? 0 : 1);
}
template <class C>
KIE_CONST_FN int nth_product(int n) {
    if (C::kDelta && n == 1) return kToGates;
    if (C::kDelta && n > 1) --n;
    return n < 3 || !C::kShares ? n : kToSharedUp + (n - 3);
}
KIE_CONST_FN bool is_more(int product) { return product >= kToGates && product < kToExperts; }
template <class C>
KIE_CONST_FN int frags_of(int product) {
    if constexpr (C::kDelta) {
        if (product == kToGates) return frags_of<typename C::TilingGates, 2 * C::kUnits>();
    }
    if constexpr (C::kShares) {
        if (product == kToSharedUp)
            return frags_of<typename C::TilingSharedGu, 2 * C::kSharedFfn>();
    }
    if (product == kToQkv)
        return C::kDense ? over(C::kRowsIn, 16) : frags_of<typename C::TilingQkv, C::kRowsIn>();
    if (product == kToGateUp)
        return C::kDense ? over(C::kRowsFirst, 16)
                         : frags_of<typename C::TilingFirst, C::kRowsFirst>();
    return kFrags;
}
template <class C>
KIE_CONST_FN int bits_of(int product) {  // StoredBits of its stages, unless it is an expert's
    if constexpr (C::kDelta) {
        if (product == kToGates) return C::TilingGates::bits;
    }
    if constexpr (C::kShares) {
        if (product == kToSharedUp) return C::TilingSharedGu::bits;
        if (product == kToSharedDown) return C::TilingSharedDown::bits;
    }
    return product == kToQkv               ? C::TilingQkv::bits
           : product == kToGateUp          ? C::TilingFirst::bits
           : product == kToO || C::kRouted ? C::TilingO::bits
                                           : C::TilingDown::bits;
}
// Of a layer's products so many have such codes; those that it has not count as one that it has.
template <class C>
KIE_CONST_FN int count_with(int bits) {
    int count = 0;
    for (int product = kToQkv; product < (C::kHasMore ? kToExperts : kToGates); ++product)
        count += bits_of<C>(product) == bits;
    return count;
}
template <class C>
KIE_CONST_FN bool any_has(int bits) {
    return count_with<C>(bits) > 0;
}
template <class C>
KIE_CONST_FN bool all_have(int bits) {
    return count_with<C>(bits) == (C::kHasMore ? kToExperts : kToGates);
}
template <class C>
KIE_CONST_FN int pairs_of(int product) {  // of 32 columns
    if constexpr (C::kShares) {
        if (product == kToSharedDown) return C::kSharedFfn / 32;
    }
    return (product == kToO ? C::kAttn : product == kToDown ? C::kFfn : kHidden) / 32;
}
// How a product of so many positions is cut: narrow tiles, and splits of k that are added up in
// order, where whole tiles would leave blocks idle. Costs are in 64 ticks, as measured: a stage
// (where weights are read once, what memory takes for those of all blocks at work), what follows
// the stages, and joining splits.
struct TileConfig {
    int width, tiles, k_splits;
};
KIE_CONST_FN int stage_cost(const TileConfig& config, int across, int blocks) {
    if (!kAllNarrow && config.width == kWideN) return 17 * kWideN / 256;
    return max_i(5 + config.tiles, blocks * config.tiles / (68 * across));
}
template <class C>
KIE_CONST_FN long cost_of(int product, const TileConfig& config, int places, int blocks) {
    const int across = over(places, config.width),
              stages = over(over(pairs_of<C>(product), 2), config.k_splits);
    const int tasks = across * over(frags_of<C>(product), config.tiles) * kLanes * config.k_splits;
    const int others = product == kToO || product == kToDown ? (kLanesAll - 1) * 50 : 0;
    const int extra = 200 + others + (config.k_splits > 1 ? 120 + 50 * config.k_splits : 0);
    const int left = tasks % blocks, rounds = over(tasks, blocks);
    const long cursor = (tasks / blocks) * stage_cost(config, across, blocks) +
                        (left > 0 ? stage_cost(config, across, left) : 0);
    return stages * cursor + rounds * (!kAllNarrow && config.width == kWideN
                                           ? extra * kWideN / 256
                                           : extra * config.tiles * 9 / 128);
}
KIE_CONST_FN TileConfig unpack_config(u32 v) {
    return {v >> 9 != 0 ? kWideN : kNarrowN, (int)(v >> 4 & 31), (int)(v & 15)};
}
KIE_CONST_FN int k_split_tiles(const TileConfig& config) {
    return config.width / 128 * over(config.tiles, kWideTiles);
}
template <class C>
KIE_CONST_FN u32 config_of(int product, int places, int blocks) {
    const int stages = over(pairs_of<C>(product), 2);
    // Gates follow another product without a meeting, and parts have one place for their sums.
    const u32 most = product == kToGates ? 1 : min_i(kKSplitsMost, stages);
    u32 best = 0;
    long least = 1L << 60;
    // Wide, then narrow ones of 4, 8, 12 row tiles.
    for (int kind = kAllNarrow ? 1 : 0; kind <= (kFew ? min_i(kNarrowTiles / 4, 3) : 0); ++kind) {
        const u32 tiles = kind == 0 ? kWideTiles : 4 * kind, wide = kind == 0;
        for (u32 k_splits = 1; k_splits <= most; ++k_splits) {
            const u32 packed = wide << 9 | tiles << 4 | k_splits;
            const TileConfig config = unpack_config(packed);
            const int all =
                over(places, config.width) * over(frags_of<C>(product), config.tiles) * kLanes;
            if (k_splits > 1 && all * config.k_splits * k_split_tiles(config) > kKSplitTiles) break;
            const long cost = cost_of<C>(product, config, places, blocks);
            if (cost < least) least = cost, best = packed;
        }
    }
    return best;
}

// A chunk under way: absolute position of its place 0, the places that are alive, its tile configs
// in layers of each class.
struct Chunk {
    int base, from, to;
    u64 configs[kClasses], more[kClasses];
    KIE_DEVICE bool has(int place) const { return place >= from && place < to; }
};
// Places of it, whole tiles but for the chunk's last.
struct Span {
    int first, to;
};
KIE_DEVICE Span all_of(const Chunk& c) { return {0, c.to}; }
KIE_DEVICE int chunks_of(const PrefillArgs& a) {
    return ((int)(a.first % kPage + a.count) + kChunk - 1) / kChunk;
}
struct ConfigureClass {
    const PrefillArgs& a;
    Chunk& c;
    template <class C>
    KIE_DEVICE u64 some(int first, int count) const {
        u64 configs = 0;
        KIE_NO_UNROLL for (int p = 0; p < count; ++p) {
            // Parts have one place for their sums, and groups of places are multiplied side by
            // side.
            const bool whole = kTensorParallel && !kAllNarrow && c.to > kGroupPlaces;
            const u32 config =
                whole ? 1 << 9 | kWideTiles << 4 | 1 : config_of<C>(first + p, c.to, (int)a.blocks);
            configs |= (u64)of_wave(config) << 16 * p;
        }
        return configs;
    }
    template <class C>
    KIE_DEVICE void operator()(C) const {
        c.configs[C::kIndex] = some<C>(kToQkv, kToGates);
        if constexpr (C::kHasMore) c.more[C::kIndex] = some<C>(kToGates, kToExperts - kToGates);
    }
};
KIE_DEVICE Chunk chunk_at(const PrefillArgs& a, int i) {
    const int start = (int)(a.first / kPage * kPage), base = start + i * kChunk,
              end = (int)(a.first + a.count) - base;
    Chunk c = {base, i == 0 ? (int)a.first - start : 0, end < kChunk ? end : kChunk, {}, {}};
    each_prefill_class(ConfigureClass{a, c});
    return c;
}
template <class C>
KIE_DEVICE TileConfig config_at(const Chunk& c, int product) {
    if constexpr (C::kHasMore) {
        if (is_more(product))
            return unpack_config(
                of_wave(opaque((u32)(c.more[C::kIndex] >> 16 * (product - kToGates)) & 0xffff)));
    }
    return unpack_config(
        of_wave(opaque((u32)(c.configs[C::kIndex] >> 16 * product) & 0xffff)));  // not kept for all
}
template <class C>
KIE_DEVICE int tasks_of(int product, const Span& s, const TileConfig& config) {
    return over(s.to - s.first, config.width) * over(frags_of<C>(product), config.tiles) * kLanes *
           config.k_splits;
}
// Neighbouring tasks share their rows, so that weights come from memory once.
template <class C>
KIE_DEVICE TileTask task_at(int product, const Span& s, const TileConfig& config, int i) {
    const int across = over(s.to - s.first, config.width),
              rows = over(frags_of<C>(product), config.tiles), all = across * rows,
              tile = of_wave(i % (all * kLanes)), r = of_wave(tile / across);
    const int place = s.first + of_wave(tile % across) * config.width,
              lane_index = kLanes == 1 ? 0 : of_wave(r / rows),
              frag = (kLanes == 1 ? r : of_wave(r % rows)) * config.tiles;
    return {lane_index,
            frag,
            min_i(config.tiles, frags_of<C>(product) - frag),
            place,
            kFew && s.to - place <= kNarrowN ? kNarrowN : config.width,
            (int)of_wave(i / (all * kLanes)),
            tile,
            k_split_tiles(config)};
}
// The stages of 64 columns that a split takes.
template <class C>
KIE_DEVICE int k_split_from(int product, const TileConfig& config, int k_split) {
    return over(pairs_of<C>(product), 2) * k_split / config.k_splits;
}
