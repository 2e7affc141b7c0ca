// The team that copies: weights, positions, pages and the old residual go into a ring of shared
// memory, in the order in which the multiplying teams take them. Of each stage two warps bring the
// weights, two the positions.
#pragma once

#include "args.h"
#include "exchange.h"
#include "lowered.h"
#include "platform.h"
#include "prefill/attend.h"
#include "prefill/grid.h"
#include "prefill/lanes.h"
#include "prefill/layout.h"
#include "prefill/pipe.h"
#include "prefill/tiles.h"
#include "shape.h"
#include "wide.h"

template <class S>
KIE_DEVICE long unit_at(int pair) {  // bytes of 32 columns of a block's rows inside its product
    const int q = pair % S::pairs;
    return (long)(q / S::chunk) * S::stage_bytes + S::codes_at +
           (pair / S::pairs * S::chunk + q % S::chunk) * S::unit_bytes;
}
// How many of its units, from one on, lie one behind another, at most so many.
template <class S>
KIE_DEVICE int joined_units(int pair, int most) {
    int n = 1;
    while (n < most && unit_at<S>(pair + n) == unit_at<S>(pair) + (long)n * S::unit_bytes) ++n;
    return n;
}
// Where a matrix lies: what the first block has of it, and bytes from block to block.
struct MatrixAt {
    const u8* at;
    long stride;
};
KIE_DEVICE MatrixAt in_stream(const PrefillArgs& args, long at) {
    return {args.model.weights + at, kStreamBytes};
}
// What a lane of a copying warp brings of every stage of a task: a run of one block's tiles, or
// (lane 0 of the others) the positions. Where no engine copies, the warp does it together.
struct Load {
    const u8* from;
    u32 to, bytes, all;
};
// The same of a tile of the matrix's rows: what each block has of them.
template <class S>
KIE_DEVICE Load own_part(const MatrixAt& matrix, const TileTask& task, int rows) {
    const int row = 16 * task.frag, end = min_i(row + 16 * task.tiles, rows),
              own = (row / S::rows + (int)lane()) * S::rows;
    if (own >= end) return {nullptr, 0, 0, 0};
    const int from = touched_by<S>(row, end).first, first = max_i(from, own),
              to = touched_by<S>(row, min_i(end, own + S::rows)).end;
    constexpr int kRow = S::row_bytes;
    return {matrix.at + own / S::rows * matrix.stride + (first - own) * kRow,
            (u32)(first - from) * kRow, (u32)(to - first) * kRow, 0};
}
// `dense`: of a matrix of so many rows, its own tiles; or 0.
template <class S>
KIE_DEVICE Load load_of(const MatrixAt& matrix, const TileTask& task, int dense, const u8* x) {
    const int my = lane(), warp = (int)(thread() - kWorkers) / (int)kTeam, pair = warp % 2;
    const int f = task.frag + my, tile = f % S::tiles_all;
    const int left = S::tiles_all - tile, most = task.tiles - my, run = left < most ? left : most;
    const bool narrow = is_narrow(task);
    constexpr int kTile = 16 * S::row_bytes;
    u32 bytes = 0;
    if (my < task.tiles && (my == 0 || tile == 0)) {
        bytes = S::unit_bytes - tile * kTile;
        if (bytes > (u32)run * kTile) bytes = run * kTile;
    }
    Load part = {nullptr, 0, 0, 0};
    if (dense > 0) {
        part = own_part<S>(matrix, task, dense);
        bytes = part.bytes;
    }
    u32 all = bytes;
    KIE_UNROLL for (int m = 1; m < (kAnyDense || kHasExperts ? kTeam : kNarrowTiles); m *= 2) all +=
        shuffle_xor(all, m);
    all = kStagePairs * all + kStagePairs * task.width * 64;
    if (pair >= kStagePairs) return {x, 0, 0, all};  // the other warps bring all
    if (dense > 0 && warp < 2)
        return {part.from, part.to + pair * (kStageWeights / kStagePairs), bytes, all};
    if (warp < 2)
        return {matrix.at + (task.lane_index * kBlocksPerLane + f / S::tiles_all) * matrix.stride +
                    tile * kTile,
                (u32)(pair * (narrow ? kNarrowWeights : kStageWeights) / kStagePairs + my * kTile),
                bytes, all};
    return {x + ((long)task.lane_index * (S::k / 32) * kEights + task.place / 8) * kCores,
            (u32)(narrow ? kNarrowWeights + pair * kNarrowPart : kStageWeights + pair * kStagePart),
            my == 0 ? task.width * 64 : 0u, all};
}
// By a whole warp, which goes on together: a thread that looked only after the slot had been filled
// and freed once more would take it for one that is still in use, and wait for good.
KIE_DEVICE bool await_free(Watch& w, const Pipe& pipe, u32 where, u32 wanted) {
    w.polls = 0;
    bool free = true;
    while (!slot_free(stage_slot(pipe.at), pipe.parity)) {
        free = *stop_word() == 0;
        if (!free) break;
        if (lane() == 0 && wait_expired(w, where, wanted, pipe.at)) *stop_word() = 1;
    }
    return of_wave(ballot(free)) == ~0u;
}
// The second warp has no part in a residual stage: the first, without whom it does not fill, lets
// it look first.
KIE_DEVICE void await_second(Watch& w, u32 stages) {
    w.polls = 0;
    while (*passed_word() < stages && *stop_word() == 0) {
        if (wait_expired(w, 0x2008, stages, *passed_word())) *stop_word() = 1;
        pause_ns(20);
    }
}
// The old residual of a task and the lanes' sums, batch after batch.
KIE_DEVICE bool feed_residual(Watch& w, const PrefillArgs& args, Pipe& pipe, const TileTask& task,
                              int kind, int layer) {
    // The two warps that wait for the phases before take turns. Each must have a part in every
    // stage (see await_free): where there is one run only, half of it.
    const int warp = (int)(thread() - kWorkers) / (int)kTeam;
    const bool narrow = is_narrow(task), halved = !narrow && task.tiles == 1;
    const int copy = halved ? (int)lane() : (int)lane() * 2 + warp - 2, i = copy % kWideTiles;
    const int delay = delay_of(args, kind, layer), stages = delay > 0 ? kOldStages : 1;
    const u8* residual = args.scratch + kScrResidual + task.lane_index * kLaneResidual * 16;
    KIE_NO_UNROLL for (int b = 0; b < batches_of(task); ++b) {
        // Of each run whose it is, and where it lies: a warp's, as batch_at has them.
        const int runs = narrow ? 2 * min_i(4, task.tiles - 4 * b) : task.tiles;
        const int frag = task.frag + (narrow ? 4 * b + i / 2 : i),
                  group = task.place / 8 + (narrow ? i % 2 : b) * kBatch,
                  place = narrow ? i % 2 * 4 + i / 2 : i;
        const long at = ((long)frag * kEights + group) * 32;
        KIE_NO_UNROLL for (int stage = 0; stage < stages; ++stage) {
            const bool with_own = kOldStages == 2 && stage == 0 && delay > 0;
            if (!await_free(w, pipe, 0x2004 | kind, layer)) return false;
            ++pipe.passed;
            if (!kTeamStages && warp == 1 && lane() == 0) *passed_word() = pipe.passed;
            if (!kTeamStages && warp == 0 && lane() == 0) {
                await_second(w, pipe.passed);
                stage_expect(stage_slot(pipe.at), runs * kBatch * (with_own ? 768 : 512));
            }
            const bool own = kOldStages == 2 ? copy >= kWideTiles : stage == 1;  // else floats
            const bool brings = warp >= 2 && i < runs && copy < (with_own ? 2 : 1) * kWideTiles;
            if (kTeamStages || brings) {
                const u8* from =
                    own ? (const u8*)(own_past(args, kind, layer - delay, task.lane_index) + at)
                    : stage == 0 ? residual + at * 16
                                 : (const u8*)(totals_at(args, kind) + at);
                const u32 bytes = (own ? kBatch * 256 : kBatch * 512) >> halved,
                          skip = halved && warp == 3 ? bytes : 0,
                          to = own ? kOldOwn + place * (kBatch * 256) : place * (kBatch * 512);
                reads_before_copy();
                stage_copy(stage_slot(pipe.at), stage_bytes(pipe.at) + to + skip, from + skip,
                           kTeamStages && !brings ? 0 : bytes);
            }
            stage_asked(stage_slot(pipe.at));
            forward(pipe);
        }
    }
    return true;
}
// The stages of a task: pairs from .. to, kStagePairs a stage. `apart`: bytes from 32 columns of
// positions to the next; `once`: weights are read by one task.
template <class S>
KIE_DEVICE bool feed_stages(Watch& w, Pipe& pipe, const Load& load, int from, int to, long apart,
                            bool once, StreamPolicy policy, u32 where) {
    constexpr int kPairs = S::k / 32;
    const int my = lane(), warp = (int)(thread() - kWorkers) / (int)kTeam;
    KIE_NO_UNROLL for (int p = from; p < to; p += kStagePairs) {
        if (!await_free(w, pipe, where, p)) return false;
        Slot* s = stage_slot(pipe.at);
        const int next = p + warp % kStagePairs, mine = next < kPairs ? next : kPairs - 1;
        // Of the queue by who has waited for what others made: the workers are told by this.
        if (warp == (kQueued ? 2 : 0) && my == 0) stage_expect(s, load.all);
        if (kTeamStages || load.bytes > 0) {
            reads_before_copy();
            u8* to = stage_bytes(pipe.at) + load.to;
            if (kShortStages)
                stage_copy(s, to, load.from + (warp >= 2 ? mine * apart : unit_at<S>(mine)),
                           load.bytes);
            else if (warp >= 2)
                stage_copy(s, to, load.from + mine * apart, load.bytes);
            else if (once)
                stage_copy(s, to, load.from + unit_at<S>(mine), load.bytes, policy);
            else
                stage_copy(s, to, load.from + unit_at<S>(mine), load.bytes);
        }
        stage_asked(s);
        forward(pipe);
    }
    return true;
}
// A task of a product. `at`: the product in every block's line; `x`: its operand; `once`: weights
// are read by one task.
template <class C, class S>
KIE_DEVICE bool feed_task(Watch& w, const PrefillArgs& args, Pipe& pipe, const TileConfig& config,
                          const TileTask& task, int product, long at, const u8* x, bool once,
                          StreamPolicy policy) {
    const int dense = !C::kDense             ? 0
                      : product == kToQkv    ? C::kRowsIn
                      : product == kToGateUp ? C::kRowsFirst
                                             : 0;
    const Load load = load_of<S>(in_stream(args, at), task, dense, x);
    const int from = 2 * k_split_from<C>(product, config, task.k_split),
              to = 2 * k_split_from<C>(product, config, task.k_split + 1);
    return feed_stages<S>(w, pipe, load, from, to, kEights * kCores, once, policy,
                          0x2000 | product);
}
// One product of one layer.
template <class C, class S>
KIE_DEVICE bool feed(Watch& w, const PrefillArgs& args, Pipe& pipe, const Chunk& chunk, int product,
                     int layer, long at, const u8* x) {
    const TileConfig config = config_at<C>(chunk, product);
    const int tasks = tasks_of<C>(product, all_of(chunk), config);
    const bool once = chunk.to <= config.width;
    const StreamPolicy policy = stream_policy();
    KIE_NO_UNROLL for (int i = block(); i < tasks; i += args.blocks) {
        const TileTask task = task_at<C>(product, all_of(chunk), config, i);
        if (!feed_task<C, S>(w, args, pipe, config, task, product, at, x, once, policy))
            return false;
        if (kOldStages > 0 && (product == kToO || product == kToDown) && config.k_splits == 1 &&
            !is_reduced(args, product, layer) &&
            !feed_residual(w, args, pipe, task, product == kToDown, layer))
            return false;
    }
    return true;
}
template <class S>
KIE_CONST_FN long product_bytes() {
    return (long)S::stages * S::stage_bytes;
}
// Where a product stands in its layer's part of blocks' weights.
template <class C>
KIE_CONST_FN long product_offset(int product) {
    const long first = C::kStreamO + product_bytes<typename C::TilingO>(),
               next = first + product_bytes<typename C::TilingFirst>();
    if constexpr (C::kShares) {
        if (product == kToSharedDown) return next + product_bytes<typename C::TilingSharedGu>();
    }
    return product == kToQkv      ? 0
           : product == kToGates  ? product_bytes<typename C::TilingQkv>()
           : product == kToO      ? C::kStreamO
           : product == kToGateUp ? first
                                  : next;
}
// Weights depend on nobody: where the ring is not in use for pages, the warps that bring them go
// ahead, and only those that bring positions wait for the phases before. They hear of them from the
// workers; nobody here waits for another warp of the team, so each can give up by itself.
KIE_DEVICE bool await_feed(Watch& w, const PrefillArgs& args, Phase& p, u32 phases, bool all) {
    p.done += phases;
    if (!all && thread() - kWorkers < kCrew / 2) return of_wave(*stop_word()) == 0;
    if (lane() == 0) {
        w.polls = 0;
        while (*phase_word() < p.done && *stop_word() == 0) {
            if (wait_expired(w, 0x4000, p.done, *phase_word())) *stop_word() = 1;
            pause_ns(20);
        }
        fence_device();
    }
    sync_warp();
    writes_before_copies();
    return of_wave(*stop_word()) == 0;
}
// Nothing is in flight when the block leaves: the workers have taken every stage; where they gave
// up, copies land within microseconds, and a stage that lacks some never counts as filled.
KIE_DEVICE void drain() {
    if (*stop_word() == 0) return;
    const u64 since = clock_ns();
    while (clock_ns() - since < 1000000) pause_ns(1000);
}
