// The weight stream: one warp copies the block's line into a ring of slots for ever, independent of
// the data; consumers take the stages in the same order. Three limits: free slots, bytes in
// flight, and a pace: bursts at the memory's full speed stand in the way of the exchange's words.
#pragma once

struct Ring {
    Slot* slots;
    u8* bytes;
    u32 at, parity;
};

KIE_DEVICE void advance(Ring& r) {
    if (++r.at == kSlots) r.at = 0, r.parity ^= 1;
}
// Whether the stage at hand has arrived; asking early hides the asking.
KIE_DEVICE bool stage_here(const Ring& r) {
    return kNoStream || slot_filled(r.slots + r.at, r.parity);
}
// The stage's bytes, once they are there. The producer waits for nobody but us, so no clock is
// read.
KIE_DEVICE const u8* take_stage(const Ring& r, bool here) {
    if (!kNoStream && !here)
        while (!slot_filled(r.slots + r.at, r.parity)) {
        }
    return r.bytes + (u32)r.at * kSlotBytes;
}
// Gives the stage back; what was read of it is in registers.
KIE_DEVICE void release_stage(Ring& r) {
    if (!kNoStream) {
        sync_warp();
        if (lane() == 0) slot_release(r.slots + r.at);
    }
    advance(r);
}

// The producer, one thread. `stop` (shared memory) ends it early; nothing is in flight when it
// leaves.
KIE_DEVICE void stream_weights(const DecodeArgs& args, Slot* slots, u8* ring, u32* sizes,
                               const volatile u32* stop) {
    if (kNoStream) return;
    const StreamPolicy policy = stream_policy();
    const u8* line = args.line + (u64)block() * kLineBytes;
    u32 head = 0, head_parity = 1, tail = 0, tail_parity = 0, flying = 0, open = 0;
    u64 next = 0;
    const auto land = [&]() {
        while (!slot_filled(slots + tail, tail_parity)) {
        }
        flying -= sizes[tail], --open;
        if (++tail == kSlots) tail = 0, tail_parity ^= 1;
    };
    for (u32 step = 0; step < args.steps; ++step) {
        const u8* from = line;
        for (u32 s = 0; s < args.segment_count; ++s) {
            const Segment g = args.segments[s];
            for (u32 i = 0; i < g.stages; ++i, from += g.bytes) {
                while (open > 0 && flying + g.bytes > args.in_flight_bytes) land();
                while (!slot_free(slots + head, head_parity))
                    if (*stop) {
                        while (open > 0) land();
                        return;
                    }
                if (args.pace) {
                    while (clock_ticks() < next) pause_ns(20);
                    next = clock_ticks() + (u64)args.pace * g.bytes / 1024;
                }
                reads_before_copy();
                copy_async(slots + head, ring + head * kSlotBytes, from, g.bytes, policy);
                sizes[head] = g.bytes, flying += g.bytes, ++open;
                if (++head == kSlots) head = 0, head_parity ^= 1;
                if (open == kSlots) land();
            }
        }
    }
    while (open > 0) land();
}
