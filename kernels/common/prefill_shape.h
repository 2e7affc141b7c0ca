// What the prefill kernel is given, how it cuts its work, and where its activations lie.
// A chunk of positions of one sequence goes through all layers at once; its first position is
// rounded down to a whole page, so places in the chunk and places in pages agree (the positions
// before the first are dead: computed, never stored).
#pragma once

#include "args.h"
#include "chiplets.h"
#include "lowered.h"
#include "ops/unit.h"
#include "platform.h"
#include "shape.h"

struct PrefillArgs {
    DecodeArgs model;   // all that a prompt's positions need of it; `records` for all blocks;
                        // `epoch`: of the decode launch behind this one, or 0: see put_last
    const u32* tokens;  // [count]
    u8* scratch;        // kPrefillScratch bytes, 1,024-byte aligned, then the counters
    u64* arrivals;      // kPrefillCounters, all 0 at the launch
    long hops[8];       // bytes from this rank's scratch (and counters) to each rank's
    u32 first, count;   // positions
    u32 from, to;       // layers; less than all only where the positions are one chunk
    u32 row;            // whose pages
    u32 blocks;         // of the grid, all resident
};

// The kernel is made for layers of one class (mono/prefill.rs): these are its numbers.
using TilingQkv = Class0::TilingQkv;
using TilingO = Class0::TilingO;
using TilingGu = Class0::TilingGu;
using TilingDown = Class0::TilingDown;
constexpr int kHeads = Class0::kHeads, kKvHeads = Class0::kKvHeads, kGroup = Class0::kGroup;
constexpr int kHeadDim = Class0::kHeadDim, kHeadDimReal = Class0::kHeadDimReal,
              kAttn = Class0::kAttn, kQkv = Class0::kQkv, kFfn = Class0::kFfn;
constexpr int kPageHalf = Class0::kPageHalf;
constexpr bool kHeadNorm = Class0::kHeadNorm, kBias = Class0::kBias;
constexpr float kQueryScale = Class0::kQueryScale;
static_assert(kClasses == 1, "others take prompts as columns of the decode kernel");

constexpr int kChunk = KIE_PREFILL_CHUNK;  // positions that go through together
// Ranks have slices of one lane (tensor parallelism), whose outputs are added at once. Each group
// of eight places has an owner, the only rank that keeps their residual.
constexpr bool kSliced = KIE_PREFILL_SLICED;
KIE_CONST_FN int owner_of(int eight) { return eight % kRanks; }
// The kernel is compiled twice: code for narrow tiles, without which blocks are idle where there
// are few positions, takes registers that wide tiles need.
constexpr bool kFew = KIE_PREFILL_FEW;  // for up to kNarrowN positions
// Slices of many positions: blocks take items from a list instead of meeting (prefill_slices.h).
constexpr bool kListed = kSliced && !kFew;
constexpr int kWideN = 256, kNarrowN = 128;  // positions of a wide tile, of a narrow one
constexpr int kWideRows = 128, kWideTiles = kWideRows / 16;  // row tiles of 16 of a wide tile
constexpr int kNarrowTiles = 16;                             // of a narrow one, at most
static_assert(kChunk % kWideN == 0, "whole tiles");
constexpr u32 kCrew = 128, kWorkers = 2 * kCrew, kPrefillThreads = kWorkers + kCrew;

KIE_CONST_FN int over(int a, int b) { return (a + b - 1) / b; }
// Row tiles of 16 of a lane's matrix of kRows, over the blocks that own them when decoding: those
// that have any of its rows.
template <class S, int kRows>
KIE_CONST_FN int frags_of() {
    return over(kRows, S::rows) * S::tiles_all;
}
// Slices leave blocks few rows each, and tiles that each block has for itself part empty: those of
// slices are the matrix's own instead, of as many blocks as it takes. A wide tile's rows come as
// tiles that blocks own, from the one with its first row to the one with its last.
struct Touched {
    int first, end;  // rows
};
template <class S>
KIE_CONST_FN Touched touched_by(int row, int end) {
    const int last = (end - 1) / S::rows * S::rows, tiles = over(end - last, 16);
    return {row - row % S::rows % 16, last + min_i(16 * tiles, S::rows)};
}
constexpr int kDenseRows = 144;  // for which there is room
template <class S, int kRows>
KIE_CONST_FN bool is_dense() {
    for (int row = 0; row < kRows; row += kWideRows) {
        const Touched t = touched_by<S>(row, min_i(row + kWideRows, kRows));
        if (t.end - t.first > kDenseRows) return false;
    }
    return S::rows >= 6 && S::rows % 2 == 0;
}
constexpr bool kDense = kListed && (TilingQkv::rows % 16 != 0 || TilingGu::rows % 16 != 0) &&
                        is_dense<TilingQkv, kQkv>() && is_dense<TilingGu, 2 * kFfn>();
// Of a norm's squares there is a sum for every four row tiles.
constexpr int kFrags = frags_of<TilingO, kHidden>(), kFours = over(kFrags, 4);

// Operands of the matrix unit, [lane][k / 32][position / 8][4 cores][8 positions][8 halves]. Within
// 32 elements of k the order is that of the weights: 8 t + 4 h + 2 w + e stands in core 2 h + w at
// half 2 t + e.
constexpr int kEights = kChunk / 8, kCores = 4 * 128;
KIE_CONST_FN long operand_bytes(int k) { return (long)kLanes * (k / 32) * kEights * kCores; }
// The residual as floats and, with several lanes, what each lane added, as halves: in the order in
// which the threads of a tile hold their results, [lane][row tile of 16][position / 8][32][4].
constexpr long kResidual = (long)kLanes * kFrags * kEights * 32;  // times four numbers
// Layers whose outputs are kept for the other lanes: the longest delay and the layer at work. Lanes
// of other ranks write theirs into every rank's scratch, and may be `kSlack` layers behind or ahead
// where nobody needs what is newer: outputs are kept for as many layers more.
constexpr int kPast = KIE_PREFILL_PAST, kSlack = KIE_PREFILL_SLACK;
constexpr u32 kPhases = kHeadNorm ? 6 : 5;  // of a layer whose outputs are added later
constexpr long kLaneResidual = (long)kFrags * kEights * 32;  // of one lane
constexpr long kScrX = 0, kScrAttn = kScrX + operand_bytes(kHidden),
               kScrAct = kScrAttn + operand_bytes(kAttn), kScrQ = kScrAct + operand_bytes(kFfn),
               kScrResidual = kScrQ + (long)kLanes * kAttn * kChunk * 2,
               kScrSquares = kScrResidual + kResidual * 16,
               kScrPast = kScrSquares + (long)kLanes * kFours * kChunk * 4;
// What all lanes made together, of attention and of the mlp, as floats.
constexpr long kScrTotals =
    kScrPast + (kLanesAll > 1 ? 2L * kPast * kLanesAll * kLaneResidual * 8 : 0);
constexpr long kScrParts = kScrTotals + (kLanesAll > 1 ? 2L * kLaneResidual * 16 : 0);
// Sums of parts of k, for products with too few tiles: as threads hold them.
constexpr int kPartItems = 576, kPartsMost = 8;  // items of 128 rows x 128 places
constexpr long kPartBytes = (long)kWideRows * 128 * 4;
constexpr long kPrefillScratch = kScrParts + kPartItems * kPartBytes;
// The grid's arrivals, one a tile that is made in parts, each rank's meetings.
constexpr int kCountRanks = 1 + kPartItems;
// Slices: of what is done with each group of places, on lines of their own, how many items are
// ready and each rank's word; then the number of the next item of all.
constexpr int kGroupPlaces = 2 * kWideN, kGroups = (kChunk + kGroupPlaces - 1) / kGroupPlaces;
constexpr int kStreams = 8 * kGroups, kStreamWords = 32,
              kCountStreams = (kCountRanks + 8 + 15) / 16 * 16,
              kCountItems = kCountStreams + kStreams * kStreamWords;
constexpr int kPrefillCounters = kCountItems + 16;

// A batch of results: 8 groups of 8 places. Behind the stages of a tile that changes the residual
// the ring brings, for each batch, the tile's old residual and what its lane made some layers ago,
// then what all lanes did.
constexpr int kBatch = 8, kOldBytes = kWideTiles * kBatch * 512;

// Shared memory. A stage: 64 of k, as 2 x 8 weight tiles of 16 x 32, then 2 x kWideN positions; of
// a narrow tile 2 x 16 weight tiles, then 2 x kNarrowN positions.
constexpr int kStageWeights = 2 * (kDense ? kDenseRows * 64 : kWideTiles * 1024),
              kStagePart = kWideN * 64;
constexpr int kStageBytes = kStageWeights + 2 * kStagePart;
constexpr int kNarrowWeights = 2 * kNarrowTiles * 1024, kNarrowPart = kNarrowN * 64;
static_assert(kNarrowWeights + 2 * kNarrowPart <= kStageBytes, "stages of one size");
static_assert(kOldBytes + kOldBytes / 2 <= kStageBytes, "a lane's part stands beside its residual");
constexpr int kPfSlots = 0, kPfPages = 64, kPfStop = 256, kPfLast = 260, kPfPhase = 264,
              kPfPassed = 268, kPfBegun = 272, kPfItems = 276, kPfSeen = 284, kPfNow = 300,
              kPfReady = 304, kPfLimit = 308, kPfAsked = 312, kPfScale = 320,
              kPfSquares = kPfScale + 2 * kWideN * 4;
constexpr int kPfRing = (kPfSquares + kWideTiles * kWideN * 4 + 1023) / 1024 * 1024;
constexpr int kStages = (kSharedMax - kPfRing) / kStageBytes;
// Behind the stages, for slices: what a warp has under way to the ranks (mix_places), some 64 rows
// of eight places.
constexpr int kPfPush = kPfRing + kStages * kStageBytes, kPushBytes = 64 * 8 * 2;
constexpr int kPushSlots = min_i((kSharedMax - kPfPush) / ((int)kWorkers / kTeam * kPushBytes), 3);
static_assert(!kSliced || kPushSlots > 0, "slices want room behind the stages");
static_assert(kStages >= 2 && kStages <= 4, "one stage in use, one under way; slots fit");

// The block's shared memory. Asked for anew wherever it is needed: it is a constant, where pointers
// into it that are handed around would each take registers.
KIE_DEVICE u8* prefill_shared() {
    KIE_SHARED_BYTES(prefill_bytes);
    return prefill_bytes;
}
KIE_DEVICE volatile u32* stop_word() { return (volatile u32*)(prefill_shared() + kPfStop); }
KIE_DEVICE volatile u32* passed_word() { return (volatile u32*)(prefill_shared() + kPfPassed); }
// Of slices (prefill_slices.h): how many of the block's items the workers have begun, and with how
// many they are almost done, so that the next one may be taken: earlier, others might do it sooner.
KIE_DEVICE volatile u32* begun_word() { return (volatile u32*)(prefill_shared() + kPfBegun); }
KIE_DEVICE volatile u32* asked_word() { return (volatile u32*)(prefill_shared() + kPfAsked); }
KIE_DEVICE void ask_next() {
    if (kListed && thread() == 0) *asked_word() = *begun_word();
}
KIE_DEVICE volatile u32* phase_word() { return (volatile u32*)(prefill_shared() + kPfPhase); }

// A tile of a product: `tiles` row tiles of one lane's matrix, from `frag` on, times `width`
// positions, over a part of k. Of a wide tile each warp multiplies a row tile; of a narrow one
// (kNarrowN positions) each team half of the positions, its warps four row tiles at a time.
struct WideItem {
    int lane_index, frag, tiles, place, width, part, tile, part_items;
};
KIE_CONST_FN bool is_narrow(const WideItem& item) { return kFew && item.width == kNarrowN; }
// A warp's results: so many turns, each some batches of one row tile.
KIE_CONST_FN int turns_of(const WideItem& item) {
    return is_narrow(item) ? over(item.tiles, 4) : 1;
}
KIE_CONST_FN int batches_of(const WideItem& item) {
    return is_narrow(item) ? turns_of(item) : item.width / (8 * kBatch);
}
struct Turn {
    int tile, place, batches;
};
KIE_DEVICE Turn turn_at(const WideItem& item, int turn) {
    const int warp = (int)(thread() / kTeam);
    if (is_narrow(item)) return {4 * turn + warp % 4, item.place + warp / 4 * (8 * kBatch), 1};
    return {warp, item.place, batches_of(item)};
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
template <class S, int kRows>
KIE_DEVICE WideRows product_rows(int f) {
    if (!kDense) return rows_at<S, kRows>(f);
    const int live = min_i(kRows - 16 * f, 16);
    return live > 0 ? WideRows{f, 16 * f, 16, live} : WideRows{f, 0, 0, 0};
}
KIE_DEVICE WideRows residual_rows(int f) { return rows_at<TilingO, kHidden>(f); }
enum Product { kToQkv, kToO, kToGateUp, kToDown };
KIE_CONST_FN int frags_of(int product) {
    return product == kToQkv      ? kDense ? over(kQkv, 16) : frags_of<TilingQkv, kQkv>()
           : product == kToGateUp ? kDense ? over(2 * kFfn, 16) : frags_of<TilingGu, 2 * kFfn>()
                                  : kFrags;
}
KIE_CONST_FN int bits_of(int product) {  // StoredBits of its stages
    return product == kToQkv      ? TilingQkv::bits
           : product == kToO      ? TilingO::bits
           : product == kToGateUp ? TilingGu::bits
                                  : TilingDown::bits;
}
KIE_CONST_FN bool any_has(int bits) {
    return bits_of(kToQkv) == bits || bits_of(kToO) == bits || bits_of(kToGateUp) == bits ||
           bits_of(kToDown) == bits;
}
KIE_CONST_FN bool all_have(int bits) {
    return bits_of(kToQkv) == bits && bits_of(kToO) == bits && bits_of(kToGateUp) == bits &&
           bits_of(kToDown) == bits;
}
KIE_CONST_FN int pairs_of(int product) {  // of 32 columns
    return (product == kToO ? kAttn : product == kToDown ? kFfn : kHidden) / 32;
}
// How a product of so many positions is cut: narrow tiles, and parts of k that are added up in
// order, where whole tiles would leave blocks idle. Costs are in 64 ticks, as measured: a stage
// (where weights are read once, what memory takes for those of all blocks at work), what follows
// the stages, and joining parts.
struct Cut {
    int width, tiles, parts;
};
KIE_CONST_FN int stage_cost(const Cut& cut, int across, int blocks) {
    if (cut.width == kWideN) return 17;
    return max_i(5 + cut.tiles, blocks * cut.tiles / (68 * across));
}
KIE_CONST_FN long cost_of(int product, const Cut& cut, int places, int blocks) {
    const int across = over(places, cut.width),
              stages = over(over(pairs_of(product), 2), cut.parts);
    const int items = across * over(frags_of(product), cut.tiles) * kLanes * cut.parts;
    const int others = product == kToO || product == kToDown ? (kLanesAll - 1) * 50 : 0;
    const int extra = 200 + others + (cut.parts > 1 ? 120 + 50 * cut.parts : 0);
    const int left = items % blocks, rounds = over(items, blocks);
    const long work = (items / blocks) * stage_cost(cut, across, blocks) +
                      (left > 0 ? stage_cost(cut, across, left) : 0);
    return stages * work + rounds * (cut.width == kWideN ? extra : extra * cut.tiles * 9 / 128);
}
KIE_CONST_FN Cut unpack_cut(u32 v) {
    return {v >> 9 != 0 ? kWideN : kNarrowN, (int)(v >> 4 & 31), (int)(v & 15)};
}
KIE_CONST_FN int part_items(const Cut& cut) {
    return cut.width / 128 * over(cut.tiles, kWideTiles);
}
KIE_CONST_FN u32 cut_of(int product, int places, int blocks) {
    const int stages = over(pairs_of(product), 2);
    u32 best = 0;
    long least = 1L << 60;
    // Wide, then narrow ones of 4, 8, 12 row tiles.
    for (int kind = 0; kind <= (kFew ? 3 : 0); ++kind) {
        const u32 tiles = kind == 0 ? kWideTiles : 4 * kind, wide = kind == 0;
        for (u32 parts = 1; parts <= (u32)min_i(kPartsMost, stages); ++parts) {
            const u32 packed = wide << 9 | tiles << 4 | parts;
            const Cut cut = unpack_cut(packed);
            const int all = over(places, cut.width) * over(frags_of(product), cut.tiles) * kLanes;
            if (parts > 1 && all * cut.parts * part_items(cut) > kPartItems) break;
            const long cost = cost_of(product, cut, places, blocks);
            if (cost < least) least = cost, best = packed;
        }
    }
    return best;
}

// A chunk under way: absolute position of its place 0, the places that are alive, its cuts.
struct Chunk {
    int base, from, to;
    u64 cuts;
};
// Places of it, whole tiles but for the chunk's last.
struct Span {
    int first, to;
};
KIE_DEVICE Span all_of(const Chunk& c) { return {0, c.to}; }
KIE_DEVICE int chunks_of(const PrefillArgs& a) {
    return ((int)(a.first % kPage + a.count) + kChunk - 1) / kChunk;
}
KIE_DEVICE Chunk chunk_at(const PrefillArgs& a, int i) {
    const int start = (int)(a.first / kPage * kPage), base = start + i * kChunk,
              end = (int)(a.first + a.count) - base;
    Chunk c = {base, i == 0 ? (int)a.first - start : 0, end < kChunk ? end : kChunk, 0};
    KIE_NO_UNROLL for (int p = kToQkv; p <= kToDown; ++p) {
        // Parts have one place for their sums, and groups of places are multiplied side by side.
        const bool whole = kSliced && c.to > kGroupPlaces;
        const u32 cut = whole ? 1 << 9 | kWideTiles << 4 | 1 : cut_of(p, c.to, (int)a.blocks);
        c.cuts |= (u64)cut << 16 * p;
    }
    return c;
}
KIE_DEVICE Cut cut_at(const Chunk& c, int product) {
    return unpack_cut(opaque((u32)(c.cuts >> 16 * product) & 0xffff));  // not kept for all
}
KIE_DEVICE int items_of(int product, const Span& s, const Cut& cut) {
    return over(s.to - s.first, cut.width) * over(frags_of(product), cut.tiles) * kLanes *
           cut.parts;
}
// Neighbouring items share their rows, so that weights come from memory once.
KIE_DEVICE WideItem item_at(int product, const Span& s, const Cut& cut, int i) {
    const int across = over(s.to - s.first, cut.width), rows = over(frags_of(product), cut.tiles),
              all = across * rows, tile = i % (all * kLanes), r = tile / across;
    const int place = s.first + tile % across * cut.width, lane_index = kLanes == 1 ? 0 : r / rows,
              frag = (kLanes == 1 ? r : r % rows) * cut.tiles;
    return {lane_index,
            frag,
            min_i(cut.tiles, frags_of(product) - frag),
            place,
            kFew && s.to - place <= kNarrowN ? kNarrowN : cut.width,
            i / (all * kLanes),
            tile,
            part_items(cut)};
}
// The stages of 64 columns that a part takes.
KIE_DEVICE int part_from(int product, const Cut& cut, int part) {
    return over(pairs_of(product), 2) * part / cut.parts;
}
// Byte of operand element c (even) of a place, for a matrix of `k`.
KIE_DEVICE long operand_at(int lane_index, int k, int place, int c) {
    return ((long)(lane_index * (k / 32) + c / 32) * kEights + place / 8) * kCores +
           c % 8 / 2 * 128 + place % 8 * 16 + c % 32 / 8 * 4;
}
KIE_DEVICE u8* prefill_page(const PrefillArgs& args, int layer, int kv_index, int page) {
    const Layer& l = args.model.layers[layer];
    const u32 physical = args.model.pages[(args.row * kPools + l.pool) * kPagesMax + page];
    return args.model.pools[l.pool] + (u64)physical * args.model.page_bytes[l.pool] + l.page_at +
           kv_index * (2 * kPageHalf);
}
// The row of the norm that the residual takes next, behind step `kind` of a layer.
KIE_DEVICE u32 next_norm(const PrefillArgs& args, int kind, int layer, int lane_all) {
    if (kind == 1 && layer + 1 == kLayers) return kFinalNorm + (kFinalNormLanes > 1 ? lane_all : 0);
    const Layer& l = args.model.layers[kind == 1 ? layer + 1 : layer];
    const int which = kind == 0;  // the embedding's is the first layer's first
    return l.norm[which] + (kLanesAll > 1 && (l.norm_lanes >> which & 1) != 0 ? lane_all : 0);
}
// Queries go to scratch as fragments [lane][head][place / 16][d / 16][lane][4]: what attention
// multiplies.
KIE_DEVICE long query_at(int lane_index, int head, int place) {
    return ((long)(lane_index * kHeads + head) * (kChunk / 16) + place / 16) * (kHeadDim / 16) *
           512;
}

// The host's arithmetic is the same, or nothing compiles.
static_assert(sizeof(PrefillArgs) == KIE_PREFILL_ARGS_BYTES && kPartItems == KIE_PREFILL_ITEMS &&
                  kPrefillThreads == KIE_PREFILL_THREADS,
              "host structures");
static_assert(kPrefillCounters <= KIE_PREFILL_COUNTERS, "host counters");
static_assert(kPrefillScratch <= KIE_PREFILL_SCRATCH, "host plan");
