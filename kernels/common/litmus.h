// Whether a device keeps what its platform's header promises, in a moment and without a model: what
// a block stores is there for another one behind a fence and a word, and copies are whole when they
// are counted. mono/litmus.rs launches these where nobody knows yet.
#pragma once

#include "lowered.h"
#include "platform.h"

constexpr u32 kLitmusThreads = 256, kLitmusTeams = kLitmusThreads / 32, kLitmusSlots = 3,
              kLitmusBytes = 4096;
constexpr u32 kLitmusVain = 0xffffffff;

// What thread `n` of a block stores in a round, and every word of what is copied.
KIE_DEVICE u32 litmus_number(u32 block, u32 round, u32 n) {
    return (block * 0x9e3779b9 ^ round * 0x85ebca6b) + n * 0xc2b2ae35;
}
// One thread, until the word is at least `least`; false where that takes too long.
KIE_DEVICE bool litmus_await(const LitmusArgs& args, const u64* word, u64 least) {
    const u64 since = clock_ns();
    while (load_word(word) < least) {
        if (clock_ns() - since > args.budget_ns) return false;
        pause_ns(20);
    }
    return true;
}

// Each block stores numbers, tells of them, and reads those of the next block, over and over. A
// buffer is written again when the block that reads it has told of the round after that.
KIE_KERNEL(kie_litmus_words, kLitmusThreads, LitmusArgs args) {
    KIE_SHARED_BYTES(shared);
    volatile u32* vain = (volatile u32*)shared;
    const u32 me = grid_block(), next = (me + 1) % args.blocks,
              reader = (me + args.blocks - 1) % args.blocks, n = thread();
    if (n == 0) *vain = 0;
    sync_block();
    u32 wrong = 0;
    for (u32 round = 1; round <= args.rounds; ++round) {
        u32* buffer = args.data + (u64)(round % 2) * args.blocks * kLitmusThreads;
        if (n == 0 && !litmus_await(args, args.words + reader, round - 1)) *vain = 1;
        sync_block();
        buffer[me * kLitmusThreads + n] = litmus_number(me, round, n);
        sync_block();
        if (n == 0) {
            fence_device();
            store_word(args.words + me, round);
            if (!litmus_await(args, args.words + next, round)) *vain = 1;
            fence_device();
        }
        sync_block();
        if (*vain) break;
        wrong += buffer[next * kLitmusThreads + n] != litmus_number(next, round, n);
    }
    if (wrong) store_word(args.wrong + me, wrong);
    if (n == 0 && *vain) store_word(args.wrong + me, kLitmusVain);
}

// Each block's copies: `rounds` stages through a ring, of which every word is looked at.
KIE_KERNEL(kie_litmus_copies, kLitmusThreads + kWarp, LitmusArgs args) {
    KIE_SHARED_BYTES(shared);
    Slot* slots = (Slot*)shared;
    u8* ring = shared + 1024;
    if (thread() == 0) {
        for (u32 i = 0; i < kLitmusSlots; ++i) slot_init(slots + i, kLitmusTeams);
        slots_ready();
    }
    sync_block();
    u32 at = 0, parity = 0;
    if (thread() >= kLitmusThreads) {
        if (thread() >= kLitmusThreads + kCopyThreads) return;
        Copies copies = copies_into(slots, kLitmusSlots);
        for (u32 i = 0; i < args.rounds; ++i) {
            while (!slot_free(slots + at, parity ^ 1)) copies_go_on(copies);
            reads_before_copy();
            const u8* from = args.from + ((u64)grid_block() * args.rounds + i) * kLitmusBytes;
            copy_async(slots + at, ring + at * kLitmusBytes, from, kLitmusBytes, copies);
            if (++at == kLitmusSlots) at = 0, parity ^= 1;
        }
        for (u32 i = 0; i < kLitmusSlots && i < args.rounds; ++i) {
            const u32 stage = args.rounds - 1 - i;
            while (!slot_filled(slots + stage % kLitmusSlots, stage / kLitmusSlots & 1))
                copies_go_on(copies);
        }
        return;
    }
    u32 wrong = 0;
    for (u32 i = 0; i < args.rounds; ++i) {
        while (!slot_filled(slots + at, parity)) {
        }
        const u32* stage = (const u32*)(ring + at * kLitmusBytes);
        for (u32 n = thread(); n < kLitmusBytes / 4; n += kLitmusThreads)
            wrong += stage[n] != litmus_number(grid_block(), i, n);
        sync_warp();
        if (lane() == 0) slot_release(slots + at);
        if (++at == kLitmusSlots) at = 0, parity ^= 1;
    }
    if (wrong) store_word(args.wrong + grid_block(), wrong);
}
