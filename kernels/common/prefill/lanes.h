// What other lanes of the model add to a lane's residual, and where it lies.
#pragma once

#include "lowered.h"
#include "platform.h"
#include "prefill/layout.h"
#include "prefill/tiles.h"

// What a lane of the model added in a layer, as halves in the order of the residual.
KIE_DEVICE u64* past_at(const PrefillArgs& args, int kind, int layer, int lane_all) {
    return (u64*)(args.scratch + kScrPast) +
           ((kind * kPast + layer % kPast) * kLanesAll + lane_all) * kLaneResidual;
}
// Layers since the others' output that a layer adds, or -1.
KIE_DEVICE int delay_of(const PrefillArgs& args, int kind, int layer) {
    return kLanesAll > 1 ? args.model.layers[layer].delay[kind] : -1;
}
KIE_DEVICE bool shares_of(const PrefillArgs& args, int kind, int layer) {
    return kLanesAll > 1 && (args.model.layers[layer].shares >> kind & 1) != 0;
}
// Of this rank's lanes among all: where the first stands.
KIE_DEVICE int lane_of_model(const PrefillArgs& args, int lane_index) {
    return (int)args.model.rank * kLanes + lane_index;
}
KIE_DEVICE u64* own_past(const PrefillArgs& args, int kind, int layer, int lane_index) {
    return past_at(args, kind, layer, lane_of_model(args, lane_index));
}
// Outputs of the very same layer are added behind one more meeting, by nobody who copies.
KIE_DEVICE bool is_reduced(const PrefillArgs& args, int product, int layer) {
    if (kLanesAll == 1 || (product != kToO && product != kToDown)) return false;
    return kTensorParallel || delay_of(args, product == kToDown, layer) == 0;
}
// What all lanes of the model made in the layer whose outputs are added at this one.
KIE_DEVICE Quad* totals_at(const PrefillArgs& args, int kind) {
    return (Quad*)(args.scratch + kScrTotals) + kind * kLaneResidual;
}
KIE_DEVICE const Quad* old_at(const PrefillArgs& args, int lane_index) {
    return (const Quad*)(args.scratch + kScrResidual) + lane_index * kLaneResidual;
}
