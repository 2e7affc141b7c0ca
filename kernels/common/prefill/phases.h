// Prefill by phases, which the whole grid takes one after another: a phase is a list of equal tasks
// (128 rows x 256 positions of a product), dealt out in turn, with a grid barrier behind it.
#pragma once

#include "chiplets.h"
#include "exchange.h"
#include "lowered.h"
#include "platform.h"
#include "prefill/attend.h"
#include "prefill/delta.h"
#include "prefill/delta_scan.h"
#include "prefill/experts.h"
#include "prefill/feed.h"
#include "prefill/grid.h"
#include "prefill/lanes.h"
#include "prefill/layout.h"
#include "prefill/norm_heads.h"
#include "prefill/pipe.h"
#include "prefill/product.h"
#include "prefill/reduce_tp.h"
#include "prefill/residual.h"
#include "prefill/tiles.h"
#include "shape.h"

template <class C>
KIE_DEVICE void product_phase(const PrefillArgs& args, Pipe& pipe, const Chunk& chunk, int product,
                              int layer) {
    const TileConfig config = config_at<C>(chunk, product);
    const int tasks = tasks_of<C>(product, all_of(chunk), config);
    float d[kSums];
    int turn = 0;
    find_scale_places<C>(product);
    KIE_NO_UNROLL for (int i = block(); i < tasks; i += args.blocks, turn ^= 1) {
        float* scale = (float*)(prefill_shared() + kPfScale) + turn * kWideN;
        const TileTask task = task_at<C>(product, all_of(chunk), config, i);
        product_task<C>(args, pipe, chunk, config, task, product, layer, scale, d);
    }
}
// Whether ranks meet behind a phase: who reads others' outputs is done with them before these are
// written over, and what others wrote is there.
KIE_DEVICE bool is_shared(const PrefillArgs& args, int product, int layer) {
    if (kRanks == 1 || (product != kToO && product != kToDown)) return false;
    const int kind = product == kToDown;
    if (kSlack > 0) return true;  // so that layers can be counted
    return delay_of(args, kind, layer) >= 0 || shares_of(args, kind, layer);
}
// Experts (prefill/experts.h): behind the choice the places' rows, between the products of an
// expert that all places go to, if there is one; then those of the others. False: somebody gave up.
template <class C>
KIE_DEVICE bool place_chunk(const PrefillArgs& args, const Chunk& chunk, Watch& watch, Phase& phase,
                            Clock& clock) {
    tick(clock, 16);
    if (!meet(watch, args, phase)) return false;
    tick(clock, 17);
    place_rows<C>(args, chunk);
    tick(clock, 18);
    if (!meet(watch, args, phase)) return false;
    tick(clock, 19);
    return true;
}
template <class C>
KIE_DEVICE bool run_experts(const PrefillArgs& args, Pipe& pipe, const Chunk& chunk, int layer,
                            Watch& watch, Phase& phase, Clock& clock) {
    constexpr bool kAlike = RoutedProduct<C, -1>::kAlike;
    KIE_NO_UNROLL for (int down = 0; down < 2; ++down) {
        if constexpr (kAlike)
            routed_phase<C, -1>(args, pipe, layer, down ? kToDown : kToExperts);
        else if (down)
            routed_phase<C, kToDown>(args, pipe, layer, kToDown);
        else
            routed_phase<C, kToExperts>(args, pipe, layer, kToExperts);
        tick(clock, 20 + 2 * down);
        if (!meet(watch, args, phase)) return false;
        tick(clock, 21 + 2 * down);
    }
    sum_experts<C>(args, chunk, layer);
    tick(clock, 24);
    if (!meet(watch, args, phase, kTensorParallel)) return false;
    tick(clock, 25);
    if constexpr (kTensorParallel) {
        reduce_chunk(args, chunk, 1, layer);
        if (!meet(watch, args, phase, true)) return false;
    }
    return true;
}
// A layer's phases; false: somebody gave up.
template <class C>
KIE_DEVICE bool work_layer(const PrefillArgs& args, Pipe& pipe, PagePipe& pages, const Chunk& chunk,
                           int layer, Watch& watch, Phase& phase, Clock& clock) {
    KIE_NO_UNROLL for (int step = 0; step < products_of<C>(); ++step) {
        const int product = nth_product<C>(step);
        if (product == kToO) {
            if constexpr (C::kDelta)
                put_delta_outputs<C>(args, chunk, layer);
            else
                attend_chunk<C>(args, chunk, layer, pages);
            add_lanes<C>(args, chunk, layer);
            tick(clock, 8);
            if (!meet(watch, args, phase)) return false;
            tick(clock, 9);
        }
        if constexpr (C::kShares) {
            if (product == kToSharedUp) choose_chunk<C>(args, chunk, layer);
            if (product == kToSharedDown && !place_chunk<C>(args, chunk, watch, phase, clock))
                return false;
        }
        if (C::kDelta && product == kToGates)
            sync_consumers<kWorkers>();  // the last task's scales are read
        product_phase<C>(args, pipe, chunk, product, layer);
        // What follows needs nothing of the first of two products, or meets in another place.
        if (C::kDelta && product == kToQkv) continue;
        if (C::kShares && product >= kToSharedUp) continue;
        const int timed = 2 * (product == kToGates ? (int)kToQkv : product);
        tick(clock, timed);
        const u32 behind = kPhases * min_i(kSlack, layer - (int)args.from);
        if (!meet(watch, args, phase, is_shared(args, product, layer), behind)) return false;
        tick(clock, timed + 1);
        if (is_reduced(args, product, layer)) {
            if (kTensorParallel)
                reduce_chunk(args, chunk, product == kToDown, layer);
            else
                mix_chunk(args, chunk, product == kToDown, layer);
            if (!meet(watch, args, phase, kTensorParallel)) return false;
        }
        if constexpr (C::kNormPhase) {
            if (product != (C::kDelta ? kToGates : kToQkv)) continue;
            if constexpr (C::kDelta) scan_units<C>(args, chunk, layer);
            if constexpr (C::kHeadNorm)
                norm_heads<C>(args, chunk, all_of(chunk), layer, block(), (int)args.blocks);
            if (!meet(watch, args, phase)) return false;
        }
    }
    if constexpr (C::kRouted) {
        if constexpr (!C::kShares) {
            choose_chunk<C>(args, chunk, layer);
            if (!place_chunk<C>(args, chunk, watch, phase, clock)) return false;
        }
        return run_experts<C>(args, pipe, chunk, layer, watch, phase, clock);
    }
    return true;
}
struct WorkLayer {
    const PrefillArgs& args;
    Pipe& pipe;
    PagePipe& pages;
    const Chunk& chunk;
    int layer;
    Watch& watch;
    Phase& phase;
    Clock& clock;
    template <class C>
    KIE_DEVICE bool operator()(C) const {
        return work_layer<C>(args, pipe, pages, chunk, layer, watch, phase, clock);
    }
};
KIE_DEVICE void work_all(const PrefillArgs& args, Pipe& pipe) {
    PagePipe pages = {0};
    Watch watch = {args.model, 0, 0, 0, false};
    Phase phase = {0};
    Clock clock = {args.model.trace, 0};
    const int chunks = chunks_of(args);
    tick(clock, -1);
    KIE_NO_UNROLL for (int c = 0; c < chunks; ++c) {
        const Chunk chunk = chunk_at(args, c);
        if (args.from == 0) embed_chunk(args, chunk);
        tick(clock, 10);
        // Nobody starts while others still read the last layers' outputs of the chunk before.
        if (!meet(watch, args, phase, kSlack > 0)) return;
        tick(clock, 11);
        KIE_NO_UNROLL for (int layer = args.from; layer < (int)args.to; ++layer) {
            watch.step = layer;
            if (!of_layer(args, layer,
                          WorkLayer{args, pipe, pages, chunk, layer, watch, phase, clock}))
                return;
        }
        put_behind(args, chunk, c + 1 == chunks);
    }
}
// By the copying warps; the phases are those of run_experts.
template <class C>
KIE_DEVICE bool feed_experts(Watch& w, const PrefillArgs& args, Pipe& pipe, const Chunk& chunk,
                             Phase& phase, int layer, long at) {
    const u8* s = args.scratch;
    if constexpr (C::kShares) {
        if (!feed<C, typename C::TilingSharedGu>(w, args, pipe, chunk, kToSharedUp, layer,
                                                 at + product_offset<C>(kToSharedUp), s + kScrX))
            return false;
        if (!await_feed(w, args, phase, 2, false)) return false;
        if (!feed<C, typename C::TilingSharedDown>(w, args, pipe, chunk, kToSharedDown, layer,
                                                   at + product_offset<C>(kToSharedDown),
                                                   s + kScrAct))
            return false;
    }
    if (!await_feed(w, args, phase, C::kShares ? 1 : 3, true)) return false;
    if (!feed_routed<C, typename C::TilingGu, 2 * C::kFfn>(w, args, pipe, kToExperts, layer, 0,
                                                           s + kScrRoutedX))
        return false;
    if (!await_feed(w, args, phase, 1, false)) return false;
    if (!feed_routed<C, typename C::TilingDown, kHidden>(w, args, pipe, kToDown, layer,
                                                         C::kStreamDown, s + kScrRoutedAct))
        return false;
    ++phase.done;
    return true;
}
template <class C>
KIE_DEVICE bool feed_layer(Watch& watch, const PrefillArgs& args, Pipe& pipe, PagePipe& pages,
                           const Chunk& chunk, int layer, Phase& phase) {
    using Qkv = typename C::TilingQkv;
    using O = typename C::TilingO;
    using First = typename C::TilingFirst;
    const u8* s = args.scratch;
    const long stream = (long)args.model.layers[layer].stream;
    const auto at = [&](int product) { return stream + product_offset<C>(product); };
    if (!await_feed(watch, args, phase, 1, false)) return false;
    if (!feed<C, Qkv>(watch, args, pipe, chunk, kToQkv, layer, at(kToQkv), s + kScrX)) return false;
    if constexpr (C::kDelta) {
        using Gates = typename C::TilingGates;
        if (!feed<C, Gates>(watch, args, pipe, chunk, kToGates, layer, at(kToGates), s + kScrX))
            return false;
    }
    // Of a delta rule the ring's place is in use until its positions are done.
    if (!await_feed(watch, args, phase, C::kNormPhase ? 2 : 1, true)) return false;
    if constexpr (!C::kDelta) {
        if (!feed_pages<C>(watch, args, pages, chunk, layer)) return false;
    }
    if (!await_feed(watch, args, phase, 1, !C::kDelta)) return false;
    if (!feed<C, O>(watch, args, pipe, chunk, kToO, layer, at(kToO), s + kScrAttn)) return false;
    const u32 mixed = is_reduced(args, kToO, layer) ? 2 : 1;
    if (!await_feed(watch, args, phase, mixed, false)) return false;
    if (!feed<C, First>(watch, args, pipe, chunk, kToGateUp, layer, at(kToGateUp), s + kScrX))
        return false;
    if constexpr (C::kRouted) {
        if (!feed_experts<C>(watch, args, pipe, chunk, phase, layer, stream)) return false;
    } else {
        using Down = typename C::TilingDown;
        if (!await_feed(watch, args, phase, 1, false)) return false;
        if (!feed<C, Down>(watch, args, pipe, chunk, kToDown, layer, at(kToDown), s + kScrAct))
            return false;
    }
    phase.done += is_reduced(args, kToDown, layer) ? 1 : 0;
    return true;
}
struct FeedLayer {
    Watch& watch;
    const PrefillArgs& args;
    Pipe& pipe;
    PagePipe& pages;
    const Chunk& chunk;
    int layer;
    Phase& phase;
    template <class C>
    KIE_DEVICE bool operator()(C) const {
        return feed_layer<C>(watch, args, pipe, pages, chunk, layer, phase);
    }
};
KIE_DEVICE void feed_all(const PrefillArgs& args, Pipe& pipe) {
    PagePipe pages = {0};
    Watch watch = {args.model, 0, 0, 0, false};
    Phase phase = {0};
    const int chunks = chunks_of(args);
    KIE_NO_UNROLL for (int c = 0; c < chunks; ++c) {
        const Chunk chunk = chunk_at(args, c);
        KIE_NO_UNROLL for (int layer = args.from; layer < (int)args.to; ++layer) {
            watch.step = layer;
            if (!of_layer(args, layer, FeedLayer{watch, args, pipe, pages, chunk, layer, phase}))
                return;
        }
        ++phase.done;
    }
    await_feed(watch, args, phase, 0, true);  // the workers' waits look at `stop`, not the clock
}
