// What a launch is given. Plain data; written by the host before the launch, read-only to the
// kernel except through the pointers that say otherwise. The host's mirror is mono/wire.rs.
#pragma once

#include "platform.h"

// What passes through a block's ring, in order: of the block's weights `stages` stages of `bytes`
// bytes from `at` on, or (kFromPages) the block's pages of a layer, as many as positions ask for.
// A third source is reserved: stages whose address is looked up by an id that the device computed.
enum SegmentSource { kFromStream = 0, kFromPages = 1 };
struct Segment {
    u64 at;
    u32 stages, bytes;
    u32 source, layer;
};
// Who gave up, where, in which step, at which word. `where`: kWritten and what wire.rs tells.
struct Record {
    u32 where, step, wanted, seen;
};
constexpr u32 kWritten = 0x80000000u;
constexpr u32 kRecordsBlock = 16;  // one a warp, which waits for one thing at a time
// What differs between layers, and where each layer's own is: nothing multiplies a layer's number
// by a layer's size. Index 0 is attention's (input or output), 1 the mlp's.
struct Layer {
    u64 stream;      // bytes from the beginning of a block's weights
    u32 window;      // positions a query sees, itself included; 0: all
    u32 page_at;     // bytes from the beginning of a page of the pool
    u32 norm[2];     // the first row of a norm's scale
    u32 head_norms;  // half pairs from the first layer's
    u32 biases;      // floats from the first layer's
    float own[2];    // factor on the lane's own output
    int delay[2];    // layers since the others' output that is added; -1: none is
    u8 kind;         // class
    u8 pool;         // which pages
    u8 shares;       // bit i: other lanes will want output i
    u8 norm_lanes;   // bit i: norm i has a row a lane
    u32 padding;
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
    const u32* norms;  // rows of [kHidden / 2] half pairs: each layer's two, the final one
    const u32* head_norms;    // of layers that have them [q, k][kHeadDim / 2] half pairs
    const float* biases;      // of layers that have them [kLanes][kRowsQkv kBlocksPerLane]
    const float* rope;        // of each class [positions][kHeadDim / 2][cos, sin]
    const Layer* layers;      // [kLayers]
    u8* pools[4];             // KV pages; see pages.h
    const u32* pages;         // [rows][kPools][kPagesMax] physical page of each 64 positions
    const u32* stop_ids;      // [rows][kStopsMax]
    const float* logit_bias;  // [rows][kVocabAll], or null
    u32* counts;              // [rows][kVocabAll] as ops/sample.h says, or null
    float* values;            // [kColumns][kVocabAll] logits at work, or null
    const u32* prompt;        // tokens of a prompt, or null: see `count`
    const Segment* segments;  // one step's segments
    const u8* scale_index;    // [kBlocks][kIndexBytes] which of a stage's scales a row has
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
    u64 at_head;  // not 0: the first step begins at the head, whose input is there (prefill/residual.h)
    u32 page_bytes[4];  // of a page of each pool, all its layers
    u32 segment_count, steps, epoch, in_flight_bytes;
    u32 pace;            // least clock ticks between stages, per KiB of the earlier one; 0: none
    u32 live;            // columns with a sequence that makes tokens, the first ones
    u32 count;           // positions of `prompt`, which the other columns take one after another
    u32 rank;            // of this machine among those that run the model together
    Sequence column[8];  // the sequence of each column
};
