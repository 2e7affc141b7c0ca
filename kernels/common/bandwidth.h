// How fast a device's memory is read: each block streams bytes of its own through a ring, as the
// decode kernel streams its weights, and multiplies nothing. bandwidth.rs launches these.
#pragma once

#include "lowered.h"
#include "platform.h"

constexpr u32 kReadStage = 16384, kFillThreads = 256;
constexpr u32 kReadTeams = kWarp / 32;  // of the warp that gives stages back

// Numbers that no compression of the device's could shorten.
KIE_KERNEL(kie_bandwidth_fill, kFillThreads, BandwidthArgs args) {
    const u64 quads = (u64)args.stages * (kReadStage / 16);
    u8* to = args.data + grid_block() * quads * 16;
    for (u64 i = thread(); i < quads; i += kFillThreads) {
        Quad q;
        KIE_UNROLL for (u32 k = 0; k < 4; ++k) {
            u32 v = (u32)(i * 4 + k) * 0x9e3779b9 + grid_block() * 0x85ebca6b;
            v = (v ^ v >> 15) * 0x2c1b3c6d;
            q.v[k] = v ^ v >> 13;
        }
        store_state(to + i * 16, q);
    }
}

// One warp copies, one gives the stages back; when a block began and ended stands in its words.
KIE_KERNEL(kie_bandwidth_read, 2 * kWarp, BandwidthArgs args) {
    KIE_SHARED_BYTES(shared);
    Slot* slots = (Slot*)shared;
    u8* ring = shared + 1024;
    const u64 began = clock_ns();
    if (thread() == 0) {
        for (u32 i = 0; i < args.slots; ++i) slot_init(slots + i, kReadTeams);
        slots_ready();
    }
    sync_block();
    const u32 all = args.stages * args.passes;
    u32 at = 0, parity = 0;
    if (thread() >= kWarp) {
        if (thread() >= kWarp + kCopyThreads) return;
        Copies copies = copies_into(slots, args.slots);
        const u8* const first = args.data + (u64)grid_block() * args.stages * kReadStage;
        const u8* from = first;
        for (u32 i = 0, stage = 0; i < all; ++i) {
            while (!slot_free(slots + at, parity ^ 1)) copies_go_on(copies);
            reads_before_copy();
            copy_async(slots + at, ring + at * kReadStage, from, kReadStage, copies);
            if (++at == args.slots) at = 0, parity ^= 1;
            from += kReadStage;
            if (++stage == args.stages) stage = 0, from = first;
        }
        for (u32 i = all - (all < args.slots ? all : args.slots); i < all; ++i)
            while (!slot_filled(slots + i % args.slots, i / args.slots & 1)) copies_go_on(copies);
        return;
    }
    for (u32 i = 0; i < all; ++i) {
        while (!slot_filled(slots + at, parity)) {
        }
        sync_warp();
        if (lane() == 0) slot_release(slots + at);
        if (++at == args.slots) at = 0, parity ^= 1;
    }
    if (thread() == 0) {
        store_word(args.times + 2 * grid_block(), began);
        store_word(args.times + 2 * grid_block() + 1, clock_ns());
    }
}
