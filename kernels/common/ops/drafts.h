// What every block keeps of drafts of tokens, in shared memory. All blocks hold the same: they see
// the same candidates and the same text.
#pragma once

#include "args.h"
#include "block.h"
#include "lowered.h"
#include "platform.h"

// What a column chose: it counts where the drafts before it were right.
struct Picked {
    u32 id, end;  // end: the sequence ends behind it
    float logprob;
};
// Of one sequence; the second row as lookup.rs has it.
struct Drafter {
    u32 made, count, first, most;  // tokens of the launch; drafts of the step, their first column;
                                   // how many the next step may have
    u32 reach, misses, rest, cursor, began;  // began: 1 + where in the prediction; 0: elsewhere
    u32 along, unmatched;
    u32 drafted, accepted;  // of the launch
    u32 kept;               // the last step's column behind which the sequence goes on
};
struct Drafts {
    Columns columns;
    u32 quiet;  // steps in a row without a draft
    u32 best[2][kWarps];
    Drafter sequence[kColumns];
    Picked picked[kColumns];
    u32 recent[kColumns][kRecent];  // the last ids of a text, each at its place modulo kRecent
};
static_assert(!kLookup || sizeof(Drafts) == (u32)kDraftsBytes, "lower/layout.rs leaves its room");

KIE_DEVICE Drafts& drafts_of(const Block& b) { return *(Drafts*)(b.shared + kShDrafts); }
KIE_DEVICE Picked* picked_of(const Block& b) { return drafts_of(b).picked; }
// Whether the drafts up to a column's were all chosen, and nothing ended before.
KIE_DEVICE bool is_reached(const DecodeArgs& args, const Block& b, int column) {
    if (column < (int)args.live) return true;
    const int whose = sequence_at(b.shared, column);
    const bool first = (u32)column == drafts_of(b).sequence[whose].first;
    const Picked& before = picked_of(b)[first ? whose : column - 1];
    return before.end == 0 && before.id == tokens_of(b)[column];
}
