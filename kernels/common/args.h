// What a launch is given. Plain data; written by the host before the launch, read-only to the
// kernel except through the pointers that say otherwise. The structures (Segment, Record, Layer,
// Sequence, DecodeArgs) stand in the generated header, from their definition in mono/wire.rs.
#pragma once

#include "lowered.h"
#include "platform.h"

// Where a segment's stages come from: a block's weights, the block's pages of a layer, or its part
// of the experts' gate and up, or down, that the step's columns chose in the layer.
enum SegmentSource { kFromStream = 0, kFromPages = 1, kFromGateUp = 2, kFromDown = 3 };
// In `place` of a record that was written.
constexpr u32 kWritten = 0x80000000u;
constexpr u32 kRecordsBlock = 16;  // one a warp, which waits for one thing at a time
enum Wants {
    kWantsLogprob = 1,
    kWantsBias = 2,
    kWantsPenalties = 4,
    kWantsFilter = 8,
    kWantsMask = 16
};
