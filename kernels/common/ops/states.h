// Recurrent states of the sequences at work: with which one a column begins, and where the one
// behind it goes. A launch reads the state that the last one wrote of a row, or the copy in a page,
// and writes the row's other one, step after step. Behind a draft (ops/lookup.h) a state stands
// beside those of rows: the step that knows which drafts were right goes on with one of them, and
// before the launch ends it becomes its row's. A state's parts are each touched by one thread.
#pragma once

#include "args.h"
#include "block.h"
#include "lowered.h"
#include "ops/drafts.h"
#include "pages.h"
#include "platform.h"

// States of `args.states`: two of each row, then those behind drafts.
KIE_DEVICE u64 state_of_row(const DecodeArgs& args, int sequence, u32 half) {
    return (u64)args.column[sequence].row * 2 + half;
}
KIE_DEVICE u64 state_behind_draft(const DecodeArgs& args, int column) {
    return args.draft_states + (column - (int)args.live);
}
KIE_DEVICE u32 written_half(const DecodeArgs& args, int sequence) {
    return args.column[sequence].state & 1;
}

// Whether a column goes on from the one before: a prompt's position, or a draft.
KIE_DEVICE bool follows(const DecodeArgs& args, const Block& b, int column) {
    if constexpr (kLookup)
        return column > 0 && sequence_at(b.shared, column - 1) == sequence_at(b.shared, column);
    return column > sequences_of(args);
}
// What a column that follows no other begins with.
struct StateBefore {
    bool none;  // it is its sequence's first position
    int page;   // the copy in that page; -1: `number`
    u64 number;
};
KIE_DEVICE StateBefore state_before(const DecodeArgs& args, const Block& b, int column) {
    const int position = (int)position_at(args, b.shared, b.step, column),
              sequence = sequence_at(b.shared, column);
    const u32 half = written_half(args, sequence);
    if (position == 0) return {true, -1, 0};
    u64 number = state_of_row(args, sequence, half);
    if constexpr (kLookup) {
        // Its sequence's own column has left it there.
        if (column >= (int)args.live) return {false, -1, number};
        const int kept = (int)drafts_of(b).sequence[sequence].kept;
        if (kept >= (int)args.live) number = state_behind_draft(args, kept);
    }
    if (b.step > 0) return {false, -1, number};
    if (args.column[sequence].state & 2) return {false, position / kPage - 1, 0};
    return {false, -1, state_of_row(args, sequence, half ^ 1)};
}
// Whether the state behind a column is read again, and which one it is.
KIE_DEVICE bool leaves_state(const DecodeArgs& args, const Block& b, int column) {
    return kLookup || column < sequences_of(args) || column + 1 == live_of(b);
}
KIE_DEVICE u64 state_behind(const DecodeArgs& args, const Block& b, int column) {
    if (kLookup && column >= (int)args.live) return state_behind_draft(args, column);
    const int sequence = sequence_at(b.shared, column);
    return state_of_row(args, sequence, written_half(args, sequence));
}
