// What a launch is given. Plain data; written by the host before the launch, read-only to the
// kernel except through the pointers that say otherwise. The host's mirror is mono/wire.rs.
#pragma once

// `stages` stages of `bytes` bytes, in the line's order.
struct Segment {
    u32 stages, bytes;
};
// Who gave up, where, in which step, at which word. `where`: kWritten and what wire.rs tells.
struct Record {
    u32 where, step, wanted, seen;
};
constexpr u32 kWritten = 0x80000000u;
constexpr u32 kRecordsBlock = 16;  // one a warp, which waits for one thing at a time
// What differs between layers. Index 0 is attention's output, 1 the mlp's.
struct Layer {
    u32 window;            // positions a query sees, itself included; 0: all
    u32 pool, pool_layer;  // which pages, and which layer inside them
    u32 shares;            // bit i: other lanes will want output i
    float own[2];          // factor on the lane's own output
    int delay[2];          // layers since the others' output that is added; -1: none is
};
// A sequence at work. Its tokens come from the prompt while there are any left, then from itself.
struct Sequence {
    u64 seed;
    u32 row;            // its pages' row of the table, and its record ring's
    u32 position;       // of the first step
    u32 token;          // of the first step
    u32 made, min_new;  // tokens generated before; before which no stop id is chosen
    u32 last;           // the position behind which the sequence ends
    u32 stop_count;     // of stop ids
    u32 wants;          // kWants bits
    float temperature, top_p, min_p, repetition, presence, frequency;
    u32 top_k;
    u32 told;  // tokens that the row has told the host of before
};
enum Wants { kWantsLogprob = 1, kWantsBias = 2, kWantsPenalties = 4, kWantsFilter = 8 };

struct DecodeArgs {
    const u8* line;    // [kBlocks][kLineBytes] weights in the order in which a block takes them
    const u32* embed;  // [vocabulary][kHidden / 2] half pairs
    const u32* norms;  // [2 kLayers + 1][kNormLanes][kHidden / 2] half pairs
    const u32* head_norms;    // [kLayers][q, k][kHeadDim / 2] half pairs, or null
    const float* biases;      // [kLayers][kLanes][kRowsQkv kBlocksPerLane], or null
    const float* rope;        // [positions][kHeadDim / 2][cos, sin]
    const Layer* layers;      // [kLayers]
    u8* pools[2];             // KV pages; see attention.h
    const u32* pages;         // [rows][kPools][kPagesMax] physical page of each 64 positions
    const u32* stop_ids;      // [rows][kStopsMax]
    const float* logit_bias;  // [rows][kVocabAll], or null
    u32* counts;              // [rows][kVocabAll] as sample.h says, or null
    float* values;            // [kColumns][kVocabAll] logits at work, or null
    const u32* prompt;        // tokens of a prompt, or null: see `count`
    const Segment* segments;  // one step's segments
    u64* words;               // [kWords] exchange
    u64* poison;              // not 0: everybody stops; as far from any rank's as the words are
    Record* records;          // [kBlocks][kRecordsBlock] who gave up where
    float* logits;            // [steps][kColumns][kVocabAll] out, or null
    u64* stamps;              // [steps + 1] device time at each step's start, ns, or null
    u64* trace;               // [kBlocks][16] clock ticks a phase, or null
    u64* out;                 // host memory: [rows][kRing][3] tokens as they are made; see tell.h
    u32* control;             // host memory: what the host asks for and the end; see control.h
    long hops[8];             // words from this rank's exchange to each rank's, its own 0
    u64 budget_ns;
    u64 at_head;  // not 0: the first step begins at the head, whose input is there (prefill.h)
    u32 pool_layers[2];
    u32 segment_count, steps, epoch, in_flight_bytes;
    u32 pace;            // least clock ticks between stages, per KiB of the earlier one; 0: none
    u32 live;            // columns with a sequence that makes tokens, the first ones
    u32 count;           // positions of `prompt`, which the other columns take one after another
    u32 rank;            // of this machine among those that run the model together
    Sequence column[8];  // the sequence of each column
};
