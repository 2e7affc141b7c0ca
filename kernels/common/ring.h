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

// The producer's side, one thread. `stop` (shared memory) ends it early; nothing is in flight when
// it leaves.
struct Feed {
    const DecodeArgs& args;
    Slot* slots;
    u8* bytes;
    u32* sizes;
    const volatile u32* stop;
    StreamPolicy policy;
    u32 head, head_parity, tail, tail_parity, flying, open;
    u64 next;
};
KIE_DEVICE void land(Feed& f) {
    while (!slot_filled(f.slots + f.tail, f.tail_parity)) {
    }
    f.flying -= f.sizes[f.tail], --f.open;
    if (++f.tail == kSlots) f.tail = 0, f.tail_parity ^= 1;
}
KIE_DEVICE void land_all(Feed& f) {
    while (f.open > 0) land(f);
}
// Copies one more stage; false where the kernel ends. `state`: its bytes were written by this
// block's consumers in earlier steps.
KIE_DEVICE bool feed(Feed& f, const u8* from, u32 bytes, bool state) {
    while (f.open > 0 && f.flying + bytes > f.args.in_flight_bytes) land(f);
    while (!slot_free(f.slots + f.head, f.head_parity))
        if (*f.stop) {
            land_all(f);
            return false;
        }
    if (f.args.pace) {
        while (clock_ticks() < f.next) pause_ns(20);
        f.next = clock_ticks() + (u64)f.args.pace * bytes / 1024;
    }
    if (state)
        state_before_copy();
    else
        reads_before_copy();
    copy_async(f.slots + f.head, f.bytes + f.head * kSlotBytes, from, bytes, f.policy);
    f.sizes[f.head] = bytes, f.flying += bytes, ++f.open;
    if (++f.head == kSlots) f.head = 0, f.head_parity ^= 1;
    if (f.open == kSlots) land(f);
    return true;
}
