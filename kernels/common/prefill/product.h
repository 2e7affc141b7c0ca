// One tile of a product: its sums, then what becomes of them.
#pragma once

#include "platform.h"
#include "prefill/delta.h"
#include "prefill/experts.h"
#include "prefill/lanes.h"
#include "prefill/layout.h"
#include "prefill/multiply.h"
#include "prefill/pipe.h"
#include "prefill/project.h"
#include "prefill/residual.h"
#include "prefill/tiles.h"

// Of the mlp's first product.
template <class C>
KIE_DEVICE void put_first(const PrefillArgs& args, int layer, const TileTask& task,
                          const WideRows& rows, int place, int batches, const float* scale,
                          float (&d)[kSums]) {
    if constexpr (C::kRouted)
        put_logits<C>(args, layer, rows, place, batches, scale, d);
    else
        put_act<C>(args, task, C::kFfn, rows, place, batches, scale, d);
}
// Of those with a layer's input, and of those that only some layers have.
template <class C>
KIE_DEVICE void put_input(const PrefillArgs& args, const Chunk& chunk, int layer,
                          const TileTask& task, const WideRows& rows, int place, int batches,
                          const float* scale, float (&d)[kSums]) {
    if constexpr (C::kDelta)
        put_delta_input<C>(args, rows, place, batches, scale, d);
    else
        put_qkv<C>(args, chunk, layer, task, rows, place, batches, scale, d);
}
template <class C>
KIE_DEVICE void put_more(const PrefillArgs& args, int product, const TileTask& task,
                         const WideRows& rows, int place, int batches, const float* scale,
                         float (&d)[kSums]) {
    if constexpr (C::kDelta) {
        if (product == kToGates) return put_delta_gates<C>(args, rows, place, batches, scale, d);
    }
    if constexpr (C::kShares) {
        if (product == kToSharedUp)
            put_act<C>(args, task, C::kSharedFfn, rows, place, batches, scale, d);
        else
            put_shared<C>(args, rows, place, batches, scale, d);
    }
}

// False: of a task in splits of k others have yet to make theirs.
template <class C>
KIE_DEVICE bool product_task(const PrefillArgs& args, Pipe& pipe, const Chunk& chunk,
                             const TileConfig& config, const TileTask& task, int product, int layer,
                             float* scale, float (&d)[kSums]) {
    if (kQueued) await_stage(pipe);  // what the squares are of is there, too
    if (C::kHasMore && product == kToSharedDown)
        take_shared_factors<C>(args, task, scale);
    else if (product == kToQkv || product == kToGateUp || (C::kHasMore && is_more(product)))
        take_scales(args, task, scale);
    Clock clock = {args.model.trace, 0};
    tick(clock, -1);
    multiply_task<C>(args, pipe, config, product, layer, task, d);
    sync_consumers<kWorkers>();  // scales are there, the last task's squares are read
    tick(clock, 12 + product);
    ask_next();
    if (config.k_splits > 1 && !join_k_splits(args, task, config.k_splits, d)) return false;
    KIE_NO_UNROLL for (int turn = 0; turn < result_tiles(task); ++turn) {
        const ResultTile at = result_tile(task, turn);
        const WideRows rows = rows_of_product<C>(product, task.frag + at.tile);
        const float* scales = scale + (at.place - task.place);
        if (C::kHasMore && is_more(product))
            put_more<C>(args, product, task, rows, at.place, at.batches, scales, d);
        else if (product == kToQkv)
            put_input<C>(args, chunk, layer, task, rows, at.place, at.batches, scales, d);
        else if (product == kToGateUp)
            put_first<C>(args, layer, task, rows, at.place, at.batches, scales, d);
        else
            put_sums<C>(args, pipe, config.k_splits > 1, product == kToDown, layer, task, rows,
                        turn, at.batches, d);
    }
    const bool adds = product == kToO || product == kToDown;
    if (adds && !is_reduced(args, product, layer)) put_squares(args, task);
    return true;
}
