// One tile of a product: its sums, then what becomes of them.
#pragma once

#include "platform.h"
#include "prefill/lanes.h"
#include "prefill/layout.h"
#include "prefill/multiply.h"
#include "prefill/pipe.h"
#include "prefill/project.h"
#include "prefill/residual.h"
#include "prefill/tiles.h"

// False: of an item in parts others have yet to make theirs.
KIE_DEVICE bool product_item(const PrefillArgs& args, Pipe& pipe, const Chunk& chunk,
                             const Cut& cut, const WideItem& item, int product, int layer,
                             float* scale, float (&d)[kWideN / 2]) {
    if (kListed) await_stage(pipe);  // what the squares are of is there, too
    if (product == kToQkv || product == kToGateUp) take_scales(args, item, scale);
    Clock clock = {args.model.trace, 0};
    tick(clock, -1);
    multiply_item(args, pipe, cut, product, layer, item, d);
    sync_consumers<kWorkers>();  // scales are there, the last item's squares are read
    tick(clock, 12 + product);
    ask_next();
    if (cut.parts > 1 && !join_parts(args, item, cut.parts, d)) return false;
    KIE_NO_UNROLL for (int turn = 0; turn < turns_of(item); ++turn) {
        const Turn at = turn_at(item, turn);
        const WideRows rows = rows_of_product(product, item.frag + at.tile);
        const float* scales = scale + (at.place - item.place);
        if (product == kToQkv)
            put_qkv(args, chunk, layer, item, rows, at.place, at.batches, scales, d);
        else if (product == kToGateUp)
            put_act(args, item, rows, at.place, at.batches, scales, d);
        else
            put_sums(args, pipe, cut.parts > 1, product == kToDown, layer, item, rows, turn,
                     at.batches, d);
    }
    const bool adds = product == kToO || product == kToDown;
    if (adds && !is_mixed(args, product, layer)) put_squares(args, item);
    return true;
}
