// What the prefill kernel is given, its sizes, and where its activations lie.
// A chunk of positions of one sequence goes through all layers at once; its first position is
// rounded down to a whole page, so places in the chunk and places in pages agree (the positions
// before the first are dead: computed, never stored).
#pragma once

#include "args.h"
#include "lowered.h"
#include "platform.h"
#include "shape.h"

struct PrefillArgs {
    DecodeArgs model;     // all that a prompt's positions need of it; `records` for all blocks;
                          // `seqno`: of the decode launch behind this one, or 0: see put_last
    const u32* tokens;    // [count]
    u8* scratch;          // kPrefillScratch bytes, 1,024-byte aligned, then the counters
    u64* arrivals;        // kPrefillCounters, all 0 at the launch
    long peer_offset[8];  // bytes from this rank's scratch (and counters) to each rank's
    u32 first, count;     // positions
    u32 from, to;         // layers; less than all only where the positions are one chunk
    u32 row;              // whose pages
    u32 blocks;           // of the grid, all resident
};

// Where layers have experts, the router takes the place of gate and up among the products that all
// positions go through (prefill/experts.h has the others).
template <class C, bool kRouted>
struct MlpOf {
    using First = typename C::TilingGu;
    static constexpr int kRows = 2 * C::kFfn, kChosen = 0;
};
template <class C>
struct MlpOf<C, true> {
    using First = typename C::TilingRouter;
    static constexpr int kRows = C::kExperts, kChosen = C::kChosen;
};
using Mlp = MlpOf<Class0, kHasExperts>;

// The kernel is made for layers of one class (mono/prefill.rs): these are its numbers.
using TilingQkv = Class0::TilingQkv;
using TilingO = Class0::TilingO;
using TilingGu = Mlp::First;
using TilingDown = Class0::TilingDown;
constexpr int kRowsFirst = Mlp::kRows;  // of the mlp's first product
constexpr int kHeads = Class0::kHeads, kKvHeads = Class0::kKvHeads, kGroup = Class0::kGroup;
constexpr int kHeadDim = Class0::kHeadDim, kHeadDimReal = Class0::kHeadDimReal,
              kAttn = Class0::kAttn, kQkv = Class0::kQkv, kFfn = Class0::kFfn;
constexpr int kPageHalf = Class0::kPageHalf;
constexpr bool kHeadNorm = Class0::kHeadNorm, kBias = Class0::kBias;
constexpr float kQueryScale = Class0::kQueryScale;
static_assert(kClasses == 1, "others take prompts as columns of the decode kernel");

constexpr int kChunk = KIE_PREFILL_CHUNK;  // positions that go through together
// Ranks have shards of one lane (tensor parallelism), whose outputs are added at once. Each group
// of eight places has an owner, the only rank that keeps their residual.
constexpr bool kTensorParallel = KIE_PREFILL_TP;
KIE_CONST_FN int owner_of(int eight) { return eight % kRanks; }
// The kernel is compiled twice: code for narrow tiles, without which blocks are idle where there
// are few positions, takes registers that wide tiles need.
constexpr bool kFew = KIE_PREFILL_FEW;  // for up to kNarrowN positions
// Of many positions then: blocks take tasks from a queue instead of meeting (prefill/tasks.h).
constexpr bool kQueued = kTensorParallel && !kFew && !kHasExperts;
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
// Shards leave blocks few rows each, and tiles that each block has for itself part empty: those of
// shards are the matrix's own instead, of as many blocks as it takes. A wide tile's rows come as
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
KIE_CONST_FN bool is_dense(int most = kDenseRows, int tile = kWideRows) {
    for (int row = 0; row < kRows; row += tile) {
        const Touched t = touched_by<S>(row, min_i(row + tile, kRows));
        if (t.end - t.first > most) return false;
    }
    return 24 * S::rows > tile && S::rows % 2 == 0;  // a lane a block
}
constexpr bool kDense = kQueued && (TilingQkv::rows % 16 != 0 || TilingGu::rows % 16 != 0) &&
                        is_dense<TilingQkv, kQkv>() && is_dense<TilingGu, kRowsFirst>();
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
constexpr long kScrKSplits = kScrTotals + (kLanesAll > 1 ? 2L * kLaneResidual * 16 : 0);
// Sums of splits of k, for products with too few tiles: as threads hold them.
constexpr int kKSplitTiles = 576, kKSplitsMost = 8;  // tasks of 128 rows x 128 places
constexpr long kKSplitBytes = (long)kWideRows * 128 * 4;
// Experts (prefill/experts.h): logits and choices of each place, which of each 32 places go to each
// expert, and rows of the places that go to an expert one after another, from a whole eight on.
constexpr int kExperts = Class0::kExperts, kChosen = Mlp::kChosen;
constexpr int kRoutedWide = 96, kRoutedNarrow = 64;  // rows of a tile
constexpr int kRouted = (kChunk * kChosen + 7 * kExperts + kRoutedWide + 7) / 8 * 8;
constexpr int kRoutedTiles = kExperts + kChunk * kChosen / kRoutedWide;
constexpr int kLogitsRow = (kExperts + 1) / 2 * 2;
KIE_CONST_FN long aligned(long bytes) { return kHasExperts ? (bytes + 127) / 128 * 128 : 0; }
constexpr long kScrLogits = kScrKSplits + kKSplitTiles * kKSplitBytes,
               kScrChoices = kScrLogits + aligned(kChunk * 4L * kLogitsRow),
               kScrScales = kScrChoices + aligned(kChunk * 8L * kChosen),
               kScrTakers = kScrScales + aligned(kChunk * 4L),
               kScrPlaces = kScrTakers + aligned(kChunk / 32 * 4L * kExperts),
               kScrFactors = kScrPlaces + aligned(kChunk * 4L * kChosen),
               kScrTiles = kScrFactors + aligned(kRouted * 8L),
               kScrRoutedX = kScrTiles + aligned((1 + kRoutedTiles) * 8L),
               kScrRoutedAct = kScrRoutedX + aligned(2L * kRouted * kHidden),
               kScrParts = kScrRoutedAct + aligned(2L * kRouted * kFfn);
constexpr long kPrefillScratch = kScrParts + aligned(2L * kRouted * kHidden);
// The grid's arrivals, one a tile that is made in splits of k, each rank's meetings.
constexpr int kCountRanks = 1 + kKSplitTiles;
// The queue: of what is done with each group of places, on lines of their own, how many tasks are
// ready and each rank's word; then the number of the next task of all.
constexpr int kGroupPlaces = 2 * kWideN, kGroups = (kChunk + kGroupPlaces - 1) / kGroupPlaces;
constexpr int kStreams = 8 * kGroups, kStreamWords = 32,
              kCountStreams = (kCountRanks + 8 + 15) / 16 * 16,
              kCountTasks = kCountStreams + kStreams * kStreamWords;
constexpr int kPrefillCounters = kCountTasks + 16;

// A batch of results: 8 groups of 8 places. Behind the stages of a tile that changes the residual
// the ring brings, for each batch, the tile's old residual and what its lane made some layers ago,
// then what all lanes did.
constexpr int kBatch = 8, kOldBytes = kWideTiles * kBatch * 512;

// Shared memory. A stage: 64 of k, as 2 x 8 weight tiles of 16 x 32, then 2 x kWideN positions; of
// a narrow tile 2 x 16 weight tiles, then 2 x kNarrowN positions.
constexpr int kStageWeights = 2 * (kDense || kHasExperts ? kDenseRows * 64 : kWideTiles * 1024),
              kStagePart = kWideN * 64;
constexpr int kStageBytes = kStageWeights + 2 * kStagePart;
constexpr int kNarrowWeights = 2 * kNarrowTiles * 1024, kNarrowPart = kNarrowN * 64;
static_assert(kNarrowWeights + 2 * kNarrowPart <= kStageBytes, "stages of one size");
static_assert(kOldBytes + kOldBytes / 2 <= kStageBytes, "a lane's part stands beside its residual");
constexpr int kPfSlots = 0, kPfPages = 64, kPfStop = 256, kPfLast = 260, kPfPhase = 264,
              kPfPassed = 268, kPfBegun = 272, kPfTasks = 276, kPfSeen = 284, kPfNow = 300,
              kPfReady = 304, kPfLimit = 308, kPfAsked = 312, kPfScale = 320,
              kPfSquares = kPfScale + 2 * kWideN * 4;
constexpr int kPfRing = (kPfSquares + kWideTiles * kWideN * 4 + 1023) / 1024 * 1024;
constexpr int kStages = (kSharedMax - kPfRing) / kStageBytes;
// Behind the stages, of shards: what a warp has under way to the ranks (reduce_places), some 64
// rows of eight places.
constexpr int kPfPush = kPfRing + kStages * kStageBytes, kPushBytes = 64 * 8 * 2;
constexpr int kPushSlots = min_i((kSharedMax - kPfPush) / ((int)kWorkers / kTeam * kPushBytes), 3);
static_assert(!kTensorParallel || kPushSlots > 0, "slices want room behind the stages");
static_assert(kStages >= 2 && kStages <= 4, "one stage in use, one under way; slots fit");

// The block's shared memory. Asked for anew wherever it is needed: it is a constant, where pointers
// into it that are handed around would each take registers.
KIE_DEVICE u8* prefill_shared() {
    KIE_SHARED_BYTES(prefill_bytes);
    return prefill_bytes;
}
KIE_DEVICE volatile u32* stop_word() { return (volatile u32*)(prefill_shared() + kPfStop); }
KIE_DEVICE volatile u32* passed_word() { return (volatile u32*)(prefill_shared() + kPfPassed); }
// Of the queue (prefill/tasks.h): how many of the block's tasks the workers have begun, and with
// how many they are almost done, so that the next one may be taken: earlier, others might do it
// sooner.
KIE_DEVICE volatile u32* begun_word() { return (volatile u32*)(prefill_shared() + kPfBegun); }
KIE_DEVICE volatile u32* asked_word() { return (volatile u32*)(prefill_shared() + kPfAsked); }
KIE_DEVICE void ask_next() {
    if (kQueued && thread() == 0) *asked_word() = *begun_word();
}
KIE_DEVICE volatile u32* phase_word() { return (volatile u32*)(prefill_shared() + kPfPhase); }
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
// A layer's numbers that are in no product (lower/extras.rs).
KIE_DEVICE const float* extras_of(const PrefillArgs& args, int layer) {
    return args.model.extras + args.model.layers[layer].extras;
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
static_assert(sizeof(PrefillArgs) == KIE_PREFILL_ARGS_BYTES && kKSplitTiles == KIE_PREFILL_ITEMS &&
                  kPrefillThreads == KIE_PREFILL_THREADS,
              "host structures");
static_assert(kPrefillCounters <= KIE_PREFILL_COUNTERS, "host counters");
static_assert(kPrefillScratch <= KIE_PREFILL_SCRATCH, "host plan");
