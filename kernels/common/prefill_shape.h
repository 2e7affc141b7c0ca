// What the prefill kernel is given, how it cuts its work, and where its activations lie.
// A chunk of positions of one sequence goes through all layers at once; its first position is
// rounded down to a whole page, so places in the chunk and places in pages agree (the positions
// before the first are dead: computed, never stored).
#pragma once

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

constexpr int kChunk = KIE_PREFILL_CHUNK;  // positions that go through together
constexpr int kWideN = 256;                // positions of a tile
constexpr int kWideRows = 128, kWideTiles = kWideRows / 16;
static_assert(kChunk % kWideN == 0, "whole tiles");
constexpr u32 kCrew = 128, kWorkers = 2 * kCrew, kPrefillThreads = kWorkers + kCrew;

// Row tiles of 16 of a lane's matrix, over the blocks that own them when decoding.
template <class S>
KIE_CONST_FN int frags_of() {
    return kBlocksPerLane * S::tiles_all;
}
template <class S>
KIE_CONST_FN int row_tiles_of() {
    return (frags_of<S>() + kWideTiles - 1) / kWideTiles;
}
constexpr int kFrags = frags_of<SplitO>(), kRowTiles = row_tiles_of<SplitO>();

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
               kScrPast = kScrSquares + (long)kLanes * kRowTiles * kChunk * 4;
constexpr long kScrParts =
    kScrPast + (kLanesAll > 1 ? 2L * kPast * kLanesAll * kLaneResidual * 8 : 0);
// Sums of parts of k, for products with too few tiles: as threads hold them.
constexpr int kPartItems = 576, kPartsMost = 8;  // items of 128 places; a wide one counts twice
constexpr long kPartBytes = (long)kWideRows * 128 * 4;
constexpr long kPrefillScratch = kScrParts + kPartItems * kPartBytes;
// The grid's arrivals, one a tile that is made in parts, each rank's meetings.
constexpr int kCountRanks = 1 + kPartItems, kPrefillCounters = kCountRanks + kRanks;

// A batch of results: 8 groups of 8 places. Behind the stages of a tile that changes the residual
// the ring brings, for each batch, the tile's old residual and what the other lanes made: the first
// stage the residual and as many lanes as fit, then lanes only.
constexpr int kBatch = 8, kOldBytes = kWideTiles * kBatch * 512, kLaneBytes = kOldBytes / 2;
KIE_CONST_FN int batches_of(int width) { return width / (8 * kBatch); }

// Shared memory. A stage: 64 of k, as 2 x 8 weight tiles of 16 x 32, then 2 x kWideN positions.
constexpr int kStageWeights = 2 * kWideTiles * 1024, kStagePart = kWideN * 64;
constexpr int kStageBytes = kStageWeights + 2 * kStagePart;
constexpr int kLanesFirst = (kStageBytes - kOldBytes) / kLaneBytes,
              kLanesNext = kStageBytes / kLaneBytes;
constexpr int kPfSlots = 0, kPfPages = 64, kPfStop = 128, kPfLast = 132, kPfPhase = 136,
              kPfPassed = 140, kPfScale = 256, kPfSquares = kPfScale + 2 * kWideN * 4;
constexpr int kPfRing = (kPfSquares + kWideTiles * kWideN * 4 + 1023) / 1024 * 1024;
constexpr int kStages = (kSharedMax - kPfRing) / kStageBytes;
constexpr int kPrefillShared = kPfRing + kStages * kStageBytes;
static_assert(kStages >= 2 && kStages <= 4, "one stage in use, one under way; slots fit");

// The block's shared memory. Asked for anew wherever it is needed: it is a constant, where pointers
// into it that are handed around would each take registers.
KIE_DEVICE u8* prefill_shared() {
    KIE_SHARED_BYTES(prefill_bytes);
    return prefill_bytes;
}
KIE_DEVICE volatile u32* stop_word() { return (volatile u32*)(prefill_shared() + kPfStop); }
KIE_DEVICE volatile u32* passed_word() { return (volatile u32*)(prefill_shared() + kPfPassed); }
KIE_DEVICE volatile u32* phase_word() { return (volatile u32*)(prefill_shared() + kPfPhase); }

// A tile of a product: rows of one lane's matrix times `width` positions, over a part of k.
struct WideItem {
    int lane_index, row_tile, place, width, part, tile, cut_width;
};
struct WideRows {
    int frag, row, rows;  // 16-row tile of the lane, its first row, how many rows there are
    int live;             // and how many of those are not beyond the matrix
};
template <class S, int kRows>  // of kRows rows in all
KIE_DEVICE WideRows rows_at(int row_tile, int j) {
    const int f = row_tile * kWideTiles + j;
    if (f >= frags_of<S>()) return {frags_of<S>() - 1, 0, 0, 0};
    const int i = f % S::tiles_all, row = f / S::tiles_all * S::rows + 16 * i;
    const int rows = min_i(S::rows - 16 * i, 16);
    return {f, row, rows, min_i(rows, kRows - row)};
}
KIE_DEVICE WideRows residual_rows(int row_tile, int j) {
    return rows_at<SplitO, kHidden>(row_tile, j);
}
enum Product { kToQkv, kToO, kToGateUp, kToDown };
KIE_CONST_FN int row_tiles(int product) {
    return product == kToQkv      ? row_tiles_of<SplitQkv>()
           : product == kToGateUp ? row_tiles_of<SplitGu>()
                                  : kRowTiles;
}
KIE_CONST_FN int pairs_of(int product) {  // of 32 columns
    return (product == kToO ? kAttn : product == kToDown ? kFfn : kHidden) / 32;
}
KIE_CONST_FN int over(int a, int b) { return (a + b - 1) / b; }
// How a product of so many positions is cut: narrow tiles, and parts of k that are added up in
// order, where whole tiles would leave blocks idle. Costs are in 64 ticks, as measured: a stage,
// what follows the stages, and joining parts.
struct Cut {
    int width, parts;
};
KIE_CONST_FN u32 cut_of(int product, int places, int blocks) {
    const int stages = over(pairs_of(product), 2);
    u32 best = 0;
    long least = 1L << 60;
    for (int wide = 1; wide >= 0; --wide) {
        const int across = over(places, 128 << wide);
        const int tiles = across * row_tiles(product) * kLanes;
        const int stage = wide ? 17 : 13;
        for (int parts = 1; parts <= kPartsMost && parts <= stages; ++parts) {
            if (parts > 1 && (tiles * parts << wide) > kPartItems) break;
            const int extra = 200 + (parts > 1 ? 120 + 50 * parts : 0);
            const long cost = (long)over(tiles * parts, blocks) *
                              (over(stages, parts) * stage + (wide ? extra : extra * 9 / 16));
            if (cost < least) least = cost, best = parts * 2 + wide;
        }
    }
    return best;
}

// A chunk under way: absolute position of its place 0, the places that are alive, and its cuts.
struct Chunk {
    int base, from, to;
    u64 cuts;
};
KIE_DEVICE int chunks_of(const PrefillArgs& a) {
    return ((int)(a.first % kPage + a.count) + kChunk - 1) / kChunk;
}
KIE_DEVICE Chunk chunk_at(const PrefillArgs& a, int i) {
    const int start = (int)(a.first / kPage * kPage), base = start + i * kChunk,
              end = (int)(a.first + a.count) - base;
    Chunk c = {base, i == 0 ? (int)a.first - start : 0, end < kChunk ? end : kChunk, 0};
    KIE_NO_UNROLL for (int p = kToQkv; p <= kToDown; ++p) c.cuts |=
        (u64)cut_of(p, c.to, (int)a.blocks) << 16 * p;
    return c;
}
KIE_DEVICE Cut cut_at(const Chunk& c, int product) {
    const u32 v = opaque((u32)(c.cuts >> 16 * product) & 0xffff);  // not kept for all products
    return {128 << (v & 1), (int)(v >> 1)};
}
KIE_DEVICE int items_of(int product, const Chunk& c, const Cut& cut) {
    return over(c.to, cut.width) * row_tiles(product) * kLanes * cut.parts;
}
// Neighbouring items share their rows, so that weights come from memory once.
KIE_DEVICE WideItem item_at(int product, const Chunk& c, const Cut& cut, int i) {
    const int across = over(c.to, cut.width), tiles = row_tiles(product), all = across * tiles,
              tile = i % (all * kLanes), r = tile / across;
    const int place = tile % across * cut.width;
    const int width = c.to - place <= 128 ? 128 : cut.width;
    if (kLanes == 1) return {0, r, place, width, i / all, tile, cut.width};
    return {r / tiles, r % tiles, place, width, i / (all * kLanes), tile, cut.width};
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
    const u32 unit = physical * args.model.pool_layers[l.pool] + l.pool_layer;
    return args.model.pools[l.pool] +
           ((u64)unit * (kLanes * kKvHeads) + kv_index) * (2 * kPageHalf);
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
static_assert(kLineBytes == KIE_LINE_BYTES && kPrefillScratch <= KIE_PREFILL_SCRATCH, "host plan");
