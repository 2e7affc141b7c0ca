// Prefill by phases, which the whole grid takes one after another: a phase is a list of equal tasks
// (128 rows x 256 positions of a product), dealt out in turn, with a grid barrier behind it.
#pragma once

#include "chiplets.h"
#include "exchange.h"
#include "lowered.h"
#include "platform.h"
#include "prefill/attend.h"
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
    float d[kWideN / 2];
    int turn = 0;
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
// A layer's phases; false: somebody gave up.
template <class C>
KIE_DEVICE bool work_layer(const PrefillArgs& args, Pipe& pipe, PagePipe& pages, const Chunk& chunk,
                           int layer, Watch& watch, Phase& phase, Clock& clock) {
    constexpr int kLast = C::kRouted ? kToGateUp : kToDown;
    KIE_NO_UNROLL for (int product = kToQkv; product <= kLast; ++product) {
        if (product == kToO) {
            attend_chunk<C>(args, chunk, layer, pages);
            add_lanes<C>(args, chunk, layer);
            tick(clock, 8);
            if (!meet(watch, args, phase)) return false;
            tick(clock, 9);
        }
        product_phase<C>(args, pipe, chunk, product, layer);
        tick(clock, 2 * product);
        const u32 behind = kPhases * min_i(kSlack, layer - (int)args.from);
        if (!meet(watch, args, phase, is_shared(args, product, layer), behind)) return false;
        tick(clock, 2 * product + 1);
        if (is_reduced(args, product, layer)) {
            if (kTensorParallel)
                reduce_chunk(args, chunk, product == kToDown, layer);
            else
                mix_chunk(args, chunk, product == kToDown, layer);
            if (!meet(watch, args, phase, kTensorParallel)) return false;
        }
        if constexpr (C::kNormPhase) {
            if (product != kToQkv) continue;
            if constexpr (C::kHeadNorm)
                norm_heads<C>(args, chunk, all_of(chunk), layer, block(), (int)args.blocks);
            if (!meet(watch, args, phase)) return false;
        }
    }
    if constexpr (C::kRouted) return run_experts<C>(args, pipe, chunk, layer, watch, phase, clock);
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
        if (args.model.seqno != 0 && c + 1 == chunks) put_last(args, chunk);
    }
}
template <class C>
KIE_DEVICE bool feed_layer(Watch& watch, const PrefillArgs& args, Pipe& pipe, PagePipe& pages,
                           const Chunk& chunk, int layer, Phase& phase) {
    using Qkv = typename C::TilingQkv;
    using O = typename C::TilingO;
    using First = typename C::TilingFirst;
    const u8* s = args.scratch;
    long at = (long)args.model.layers[layer].stream;
    if (!await_feed(watch, args, phase, 1, false)) return false;
    if (!feed<C, Qkv>(watch, args, pipe, chunk, kToQkv, layer, at, s + kScrX)) return false;
    at += product_bytes<Qkv>();
    if (!await_feed(watch, args, phase, C::kNormPhase ? 2 : 1, true)) return false;
    if (!feed_pages<C>(watch, args, pages, chunk, layer)) return false;
    if (!await_feed(watch, args, phase, 1, true)) return false;
    if (!feed<C, O>(watch, args, pipe, chunk, kToO, layer, at, s + kScrAttn)) return false;
    at += product_bytes<O>();
    const u32 mixed = is_reduced(args, kToO, layer) ? 2 : 1;
    if (!await_feed(watch, args, phase, mixed, false)) return false;
    if (!feed<C, First>(watch, args, pipe, chunk, kToGateUp, layer, at, s + kScrX)) return false;
    at += product_bytes<First>();
    if constexpr (C::kRouted) {
        if (!feed_experts<C>(watch, args, pipe, phase, layer)) return false;
    } else {
        using Down = typename C::TilingDown;
        if (!await_feed(watch, args, phase, 1, false)) return false;
        if (!feed<C, Down>(watch, args, pipe, chunk, kToDown, layer, at, s + kScrAct)) return false;
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
