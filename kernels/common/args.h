// What a launch is given. Plain data; written by the host before the launch, read-only to the
// kernel except through the pointers that say otherwise.
#pragma once

struct Segment {
    u32 stages, bytes;
};  // `stages` stages of `bytes` bytes, in the line's order
struct Record {
    u64 when_ns;
    u32 where, step, wanted, seen;
};

struct DecodeArgs {
    const u8* line;     // [kBlocks][kLineBytes] weights in the order in which a block takes them
    const u32* embed;   // [vocabulary of all lanes][kHidden / 2] half pairs
    const u32* norms;   // [2 kLayers + 1][kHidden / 2] half pairs
    const float* rope;  // [positions][kHeadDim / 2][cos, sin]
    u8* pool;           // KV pages; see attention.h
    const u32* pages;   // [kColumns][pages_max] physical page of each 64 positions
    const Segment* segments;  // one step's segments
    u64* words;               // [kWords] exchange
    u64* poison;              // not 0: everybody stops
    Record* records;          // [kBlocks] who gave up where
    u32* tokens;              // [steps][kColumns] out
    float* logits;            // [dump_steps][kColumns][vocabulary of all lanes] out, or null
    u64* stamps;              // [steps + 1] device time at each step's start, ns
    u64* trace;               // [kBlocks][16] clock ticks a phase, or null
    u32 segment_count, pages_max, steps, dump_steps, epoch, in_flight_bytes;
    u32 pace;  // least clock ticks between stages, per KiB of the earlier one; 0: none
    u64 budget_ns;
    u32 position[8], token[8];  // of each column, at the first step
};
