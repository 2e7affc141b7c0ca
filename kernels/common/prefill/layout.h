// The prefill kernel's sizes, and the order of its activations; PrefillArgs, and where in scratch
// each activation begins, stand in the generated header (mono/prefill.rs).
// A chunk of positions of one sequence goes through all layers at once; its first position is
// rounded down to a whole page, so places in the chunk and places in pages agree (the positions
// before the first are dead: computed, never stored).
#pragma once

#include "args.h"
#include "lowered.h"
#include "platform.h"
#include "shape.h"
#include "wide.h"

constexpr bool kAnyHeadNorm =
    Class0::kHeadNorm || Class1::kHeadNorm || Class2::kHeadNorm || ClassLast::kHeadNorm;
// Ranks have shards of one lane (tensor parallelism, kTensorParallel), whose outputs are added at
// once. Each group of eight places has an owner, the only rank that keeps their residual.
KIE_CONST_FN int owner_of(int eight) { return eight % kRanks; }
// The kernel is compiled twice: code for narrow tiles, without which blocks are idle where there
// are few positions (kFew: up to kNarrowN), takes registers that wide tiles need.
constexpr bool kAnyDelta = Class0::kDelta || Class1::kDelta || Class2::kDelta || ClassLast::kDelta;
// Of many positions of shards: blocks take tasks from a queue instead of meeting (prefill/tasks.h).
constexpr bool kQueued = kTensorParallel && !kFew && !kHasExperts && !kAnyDelta;
constexpr int kWideRows = 128, kWideTiles = kWideRows / 16;  // row tiles of 16 of a wide tile
// Of a narrow one, at most. Where no unit multiplies for four warps at once, each warp asks shared
// memory for all operands of its own: of narrow tiles, 48 rows by 64 positions a warp, it is the
// least, and there are no others (kAllNarrow).
constexpr int kNarrowTiles = kShortStages ? 8 : kAllNarrow ? 12 : 16;
constexpr int kStagePairs = kShortStages ? 1 : 2;  // of 32 columns, in a stage
static_assert(kChunk % kWideN == 0, "whole tiles");
static_assert(kAllNarrow != kWideAsync, "tiles are cut for what multiplies them");
static_assert(!kAllNarrow || (kFew && kWideN == kNarrowN), "no wide tiles");
constexpr int kSums = kAllNarrow ? 2 * kNarrowTiles * kNarrowN / 32 : kWideN / 2;  // of a thread
constexpr int kRun = 64;  // queries of a team
constexpr u32 kCrew = 128, kWorkers = 2 * kCrew;
static_assert(kPrefillThreads == kWorkers + kCrew, "two teams multiply, one copies");

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

// Where layers have experts, the router takes the place of gate and up among the products that all
// positions go through (prefill/experts.h has the others); behind it may stand the gate of an
// expert that all positions go to.
template <class C, bool kRouted>
struct FirstOf {
    using Tiling = typename C::TilingGu;
    static constexpr int kRows = 2 * C::kFfn;
    static constexpr bool kShares = false;
};
template <class C>
struct FirstOf<C, true> {
    using Tiling = typename C::TilingRouter;
    static constexpr int kRows = C::kExperts + (C::kSharedScaled ? 1 : 0);
    static constexpr bool kShares = C::kShared;
};
// Rows of the products with a layer's input: queries, keys, values, gates; of a delta rule q, k, v
// and z of each head of keys.
template <class C, bool kOfDelta>
struct InputOf {
    static constexpr int kRows = C::kQkv + (C::kGated ? C::kAttn : 0);
};
template <class C>
struct InputOf<C, true> {
    static constexpr int kRows = C::kKvHeads * C::kKeyRows;
};
// A class of layers as this kernel works on it, the `kNumber`th: what decoding has, and how
// positions are cut.
template <class C, int kNumber>
struct PrefillClass : C {
    static constexpr int kIndex = kNumber;
    static constexpr bool kRouted = C::kExperts > 0;
    using TilingFirst = typename FirstOf<C, kRouted>::Tiling;  // of the mlp's first product
    static constexpr int kRowsFirst = FirstOf<C, kRouted>::kRows;
    static constexpr int kRowsIn = InputOf<C, C::kDelta>::kRows;
    static constexpr bool kDense =
        kQueued && (C::TilingQkv::rows % 16 != 0 || TilingFirst::rows % 16 != 0) &&
        is_dense<typename C::TilingQkv, kRowsIn>() && is_dense<TilingFirst, kRowsFirst>();
    // An expert that all positions go to; products that not all layers have (prefill/tiles.h).
    static constexpr bool kShares = FirstOf<C, kRouted>::kShares;
    static constexpr bool kHasMore = kShares || C::kDelta;
    // Norms of heads, or the positions of a delta rule, are a phase. Where ranks count each other's
    // phases, all layers have as many.
    static constexpr bool kNormPhase = C::kHeadNorm || C::kDelta || (kSlack > 0 && kAnyHeadNorm);
    // Attention: two teams have half of a wide head's values each, of which one has no registers
    // for all; or two heads of a group, or two runs of queries of one head.
    static constexpr bool kHalved = C::kHeadDim > 128;
    static constexpr bool kPaired = !kHalved && C::kGroup % 2 == 0;
    // A wide head's queries take registers that there are not where products go on meanwhile: they
    // stand in shared memory.
    static constexpr bool kQueriesShared = kHalved && kWideAsync;
    static constexpr int kTaskRun = kPaired || kHalved ? kRun : 2 * kRun;  // queries of a task
    static constexpr int kTaskHeads = kPaired ? C::kHeads / 2 : C::kHeads;
    static constexpr int kValues = kHalved ? C::kHeadDim / 2 : C::kHeadDim;  // of a team
    static constexpr int kSteps = C::kHeadDim / 16, kPageQuads = 8 * C::kHeadDim;
    static_assert(C::kHeadDim % 16 == 0 && kValues % 16 == 0, "whole fragments");
};
using Prefill0 = PrefillClass<Class0, 0>;
using Prefill1 = PrefillClass<Class1, 1>;
using Prefill2 = PrefillClass<Class2, 2>;
using PrefillLast = PrefillClass<ClassLast, kClasses - 1>;
constexpr bool kAnyDense =
    Prefill0::kDense || Prefill1::kDense || Prefill2::kDense || PrefillLast::kDense;
constexpr bool kAnyQueriesShared = Prefill0::kQueriesShared || Prefill1::kQueriesShared ||
                                   Prefill2::kQueriesShared || PrefillLast::kQueriesShared;

// visit(PrefillClass{}) with the class of a layer.
template <class F>
KIE_DEVICE auto of_layer(const PrefillArgs& args, int layer, F visit) {
    if constexpr (kClasses == 1) {
        return visit(Prefill0{});
    } else {
        const u32 kind = args.model.layers[layer].kind;
        if (kind == 0) return visit(Prefill0{});
        if constexpr (kClasses > 2) {
            if (kind == 1) return visit(Prefill1{});
        }
        if constexpr (kClasses > 3) {
            if (kind == 2) return visit(Prefill2{});
        }
        return visit(PrefillLast{});
    }
}
// visit(PrefillClass{}) with each class.
template <class F>
KIE_DEVICE void each_prefill_class(F visit) {
    visit(Prefill0{});
    if constexpr (kClasses > 2) visit(Prefill1{});
    if constexpr (kClasses > 3) visit(Prefill2{});
    if constexpr (kClasses > 1) visit(PrefillLast{});
}

// Operands of the matrix unit, [lane][k / 32][position / 8][4 cores][8 positions][8 halves]. Within
// 32 elements of k the order is that of the weights: 8 t + 4 h + 2 w + e stands in core 2 h + w at
// half 2 t + e.
constexpr int kEights = kChunk / 8, kCores = 4 * 128;
// The residual as floats and, with several lanes, what each lane added, as halves: in the order in
// which the threads of a tile hold their results, [lane][row tile of 16][position / 8][32][4].
// Layers whose outputs are kept for the other lanes (kPast): the longest delay and the layer at
// work. Lanes of other ranks write theirs into every rank's scratch, and may be `kSlack` layers
// behind or ahead where nobody needs what is newer: outputs are kept for as many layers more.
constexpr u32 kPhases = kAnyHeadNorm ? 6 : 5;  // of a layer whose outputs are added later
constexpr long kLaneResidual = (long)kFrags * kEights * 32;  // of one lane
// Sums of splits of k, for products with too few tiles, as threads hold them: kKSplitTiles tasks of
// 128 rows x 128 places.
constexpr int kKSplitsMost = 8;
constexpr long kKSplitBytes = (long)kWideRows * 128 * 4;
// Experts (prefill/experts.h): logits and choices of each place, which of each 32 places go to each
// expert, and rows of the places that go to an expert one after another, from a whole eight on:
// tiles of kRoutedWide or fewer.
constexpr int kRoutedNarrow = 64;
// Counters: the grid's arrivals, one a tile that is made in splits of k, each rank's meetings; then
// the queue's: of what is done with each group of places, on lines of their own, how many tasks are
// ready and each rank's word; then the number of the next task of all.
constexpr int kGroupPlaces = 2 * kWideN, kStreams = 8 * kGroups;

// A batch of results: 8 groups of 8 places. Behind the stages of a tile that changes the residual
// the ring brings, for each batch, the tile's old residual and what its lane made some layers ago,
// then what all lanes did.
constexpr int kBatch = 8, kOldBytes = kWideTiles * kBatch * 512;

// Shared memory. A stage: 64 of k, as 2 x 8 weight tiles of 16 x 32, then 2 x kWideN positions; of
// a narrow tile 2 x 16 weight tiles, then 2 x kNarrowN positions. Where that leaves no room for two
// stages, they have 32 of k (kShortStages).
// (With tiles of half as many positions they are as long: experts fill them.)
constexpr int kStageWeights =
                  kStagePairs * (kAnyDense || kHasExperts ? kDenseRows * 64 : kWideTiles * 1024),
              kStagePart = (kAllNarrow ? kWideN : 256) * 64;
constexpr int kNarrowWeights = kStagePairs * kNarrowTiles * 1024, kNarrowPart = kNarrowN * 64;
constexpr int kStageBytes = kAllNarrow ? kNarrowStage : kStageWeights + 2 * kStagePart;
static_assert(kNarrowWeights + kStagePairs * kNarrowPart <= kStageBytes, "stages of one size");
static_assert(kStageWeights + kStagePairs * kStagePart <= kStageBytes, "stages of one size");
// What a lane made stands beside its residual where a stage has room for both; short stages have
// room for neither, and both come straight from memory.
constexpr int kOldStages = kShortStages ? 0
                           : kAllNarrow ? 3
                                        : 2,
              kOldOwn = kAllNarrow ? 0 : kOldBytes;
static_assert(kOldStages == 0 || kOldBytes + kOldOwn / 2 <= kStageBytes, "a batch in a stage");
constexpr int kPfSlots = 0, kPfPages = 64, kPfStop = 256, kPfLast = 260, kPfPhase = 264,
              kPfPassed = 268, kPfBegun = 272, kPfTasks = 276, kPfSeen = 284, kPfNow = 300,
              kPfReady = 304, kPfLimit = 308, kPfAsked = 312, kPfScale = 320,
              kPfSquares = kPfScale + 2 * kWideN * 4;
constexpr int kSquaresBytes = (kAllNarrow ? kNarrowTiles : kWideTiles) * kWideN * 4;
// Then where the scales of each 32 of k of a product stand (multiply.h), of models with experts.
constexpr int kPfPlaces = kPfSquares + kSquaresBytes;
constexpr int kPfRing = (kPfPlaces + (kHasExperts ? 640 : 0) + 1023) / 1024 * 1024;
constexpr int kStages = min_i((kSharedMax - kPfRing) / kStageBytes, 4);
// Behind the stages, of shards: what a warp has under way to the ranks (reduce_places), some 64
// rows of eight places. Short stages leave no room for that.
constexpr int kPfPush = kPfRing + kStages * kStageBytes, kPushBytes = 64 * 8 * 2;
constexpr int kPushSlots = min_i((kSharedMax - kPfPush) / ((int)kWorkers / kTeam * kPushBytes), 3);
static_assert(!kTensorParallel || kPushSlots > 0 || kShortStages,
              "slices want room behind the stages");
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
template <class C>
KIE_DEVICE u8* prefill_page(const PrefillArgs& args, int layer, int kv_index, int page) {
    const Layer& l = args.model.layers[layer];
    const u32 physical = args.model.pages[(args.row * kPools + l.pool) * kPagesMax + page];
    return args.model.pools[l.pool] + (u64)physical * args.model.page_bytes[l.pool] + l.page_at +
           kv_index * (2 * C::kPageHalf);
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
// Queries go to scratch as fragments [lane][place / 16][head][d / 16][lane][4]: what attention
// multiplies. A place has room for the heads of any class, so that other places' of the layer
// before, which may be in use (prefill/tasks.h), stay as they are.
template <class C>
KIE_DEVICE long query_at(int lane_index, int head, int place) {
    return (long)(lane_index * (kChunk / 16) + place / 16) * (kAttnMost * 32) +
           head * (C::kHeadDim / 16) * 512;
}
