// What a consumer knows of its block and of the step at hand.
#pragma once

#include "args.h"
#include "chiplets.h"
#include "lowered.h"
#include "platform.h"
#include "shape.h"

struct Block {
    int lane_index, block_in_lane;  // lane on this machine, block inside the lane
    int lane_all;                   // lane of the model
    u8* shared;
    u32 seqno, step;
    int live;    // columns at work; the others compute on zeros and touch no pages
    u64* trace;  // shared, or null for all threads but one
    u64 traced_at;
};
// The time since the last stamp was this phase's; mono/probe.rs has the phases' names.
KIE_DEVICE void stamp(Block& b, int phase) {
#ifdef KIE_TRACE
    if (b.trace) {
        const u64 now = clock_ticks();
        b.trace[phase] += now - b.traced_at, b.traced_at = now;
    }
#endif
}
KIE_DEVICE u32* tokens_of(const Block& b) { return (u32*)(b.shared + kShTokens); }
KIE_DEVICE u32* ends_of(const Block& b) { return (u32*)(b.shared + kShEnds); }
// Not 0 once a wait of the block has expired: no token may be made of what it has.
KIE_DEVICE volatile u32& timed_out_of(const Block& b) {
    return ((volatile u32*)(b.shared + kShMisc))[3];
}
KIE_DEVICE const Layer& layer_of(const Block& b, int layer) {
    return ((const Layer*)(b.shared + kShLayers))[layer];
}
// The first columns are sequences that make tokens, the others positions of one prompt, where the
// launch has one: so many a step, one after another.
KIE_DEVICE int sequences_of(const DecodeArgs& args) {
    return kColumns == 1 ? (args.prompt ? 0 : 1) : (int)args.live;
}
KIE_DEVICE u32 prompt_at(const DecodeArgs& args, u32 step, int column) {
    const int sequences = sequences_of(args);
    return step * (kColumns - sequences) + (column - sequences);
}
// In the kernel that checks drafts of tokens (ops/lookup.h) columns behind the sequences' own are
// of sequences, too, and each sequence goes on by as many positions a step as it may. Elsewhere a
// column is what it was, and a step is a token.
struct Columns {
    u32 sequence[kColumns],
        ahead[kColumns];  // whose, and how many tokens behind the launch's first
    u32 live;
};
KIE_DEVICE Columns& columns_of(const u8* shared) { return *(Columns*)(shared + kShDrafts); }
KIE_DEVICE int sequence_at(const u8* shared, int column) {
    return kLookup ? (int)columns_of(shared).sequence[column] : column;
}
KIE_DEVICE const Sequence& sequence_of(const DecodeArgs& args, const Block& b, int column) {
    return args.column[sequence_at(b.shared, column)];
}
KIE_DEVICE u32 ahead_at(const u8* shared, u32 step, int column) {
    return kLookup ? columns_of(shared).ahead[column] : step;
}
// The position at work in a column.
KIE_DEVICE u32 position_at(const DecodeArgs& args, const u8* shared, u32 step, int column) {
    if constexpr (kLookup)
        return args.column[sequence_at(shared, column)].position + ahead_at(shared, step, column);
    const int c = kColumns == 1 ? 0 : column;
    const bool prompt = args.prompt && (kColumns == 1 || column >= sequences_of(args));
    return args.column[c].position + (prompt ? prompt_at(args, step, column) : step);
}
KIE_DEVICE int live_at(const DecodeArgs& args, u32 step) {
    const int sequences = sequences_of(args);
    if (!args.prompt) return sequences;
    const u32 done = prompt_at(args, step, sequences);
    return sequences +
           min_i(kColumns - sequences, (int)(args.count > done ? args.count - done : 0));
}
// Which block's pages come first, so that the sequences of a launch use different blocks; the same
// for all positions of a prompt, and for a sequence's drafts as for itself.
KIE_DEVICE int shift_at(const DecodeArgs& args, const u8* shared, int column) {
    if constexpr (kLookup) return sequence_at(shared, column);
    return kColumns == 1 ? 0 : args.prompt ? min_i(column, sequences_of(args)) : column;
}
// Behind a prompt that the prefill kernel took to its end, the first step has no layers.
KIE_DEVICE bool begins_at_head(const DecodeArgs& args, u32 step) {
    return kColumns == 1 && step == 0 && args.at_head != 0;
}
KIE_DEVICE int live_of(const Block& b) { return kColumns == 1 ? 1 : b.live; }
// The columns that choose a token: the first ones.
KIE_DEVICE int choosing_of(const DecodeArgs& args, const Block& b) {
    return kLookup ? b.live : sequences_of(args);
}
// This block among all ranks' blocks, and which rows of the head are its own.
KIE_DEVICE int block_all(const DecodeArgs& args) { return (int)args.rank * kBlocks + (int)block(); }
KIE_DEVICE int head_block(const DecodeArgs& args, const Block& b) {
    return kHeadMode == kHeadPerLane ? b.block_in_lane : block_all(args);
}
KIE_DEVICE u32 head_base(const Block& b) {
    return kHeadMode == kHeadPerLane ? b.lane_all * kVocab : 0;
}
