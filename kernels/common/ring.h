// The weight stream: one warp copies the block's line into a ring for ever, independent of the
// data; consumers take the stages in the same order. A stage stands behind the one before it, or at
// the ring's beginning where the end has no room for it, and has a slot of its own that says when
// it is there and when it has been read. Three limits: free bytes, bytes in flight, and a pace:
// bursts at the memory's full speed stand in the way of the exchange's words.
#pragma once

struct Ring {
    Slot* slots;
    u8* bytes;
    u32 at, parity, from;  // slot; where the stage before ended
};
KIE_DEVICE u32 place_of_stage(u32 from, u32 bytes) {
    return from + bytes > (u32)kRingBytes ? 0 : from;
}
KIE_DEVICE void advance(u32& at, u32& parity) {
    if (++at == kSlots) at = 0, parity ^= 1;
}
// Whether the stage at hand has arrived; asking early hides the asking.
KIE_DEVICE bool stage_here(const Ring& r) {
    return kNoStream || slot_filled(r.slots + r.at, r.parity);
}
// The stage of so many bytes, once it is there. The producer waits for nobody but us, so no clock
// is read.
KIE_DEVICE const u8* take_stage(Ring& r, bool here, u32 bytes) {
    if (!kNoStream && !here)
        while (!slot_filled(r.slots + r.at, r.parity)) {
        }
    const u32 at = place_of_stage(r.from, bytes);
    r.from = at + bytes;
    return r.bytes + at;
}
// Gives the stage back; what was read of it is in registers.
KIE_DEVICE void release_stage(Ring& r) {
    if (!kNoStream) {
        sync_warp();
        if (lane() == 0) slot_release(r.slots + r.at);
    }
    advance(r.at, r.parity);
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
    u32 head, from;                       // the next stage's slot, where the last one ends
    u32 tail, tail_parity, flying, open;  // what is in flight
    u32 last, last_parity, used, kept;    // what has not been read yet
    u64 next;
};
KIE_DEVICE void land(Feed& f) {
    while (!slot_filled(f.slots + f.tail, f.tail_parity)) {
    }
    f.flying -= f.sizes[f.tail] & 0xffff, --f.open;
    advance(f.tail, f.tail_parity);
}
KIE_DEVICE void land_all(Feed& f) {
    while (f.open > 0) land(f);
}
// Copies one more stage; false where the kernel ends. `state`: its bytes were written by this
// block's consumers in earlier steps.
KIE_DEVICE bool feed(Feed& f, const u8* from, u32 bytes, bool state) {
    while (f.open > 0 && f.flying + bytes > f.args.in_flight_bytes) land(f);
    const u32 at = place_of_stage(f.from, bytes), left = at < f.from ? kRingBytes - f.from : 0;
    while (f.kept == kSlots || f.used + left + bytes > kRingBytes) {
        while (!slot_free(f.slots + f.last, f.last_parity))
            if (*f.stop) {
                land_all(f);
                return false;
            }
        f.used -= (f.sizes[f.last] & 0xffff) + (f.sizes[f.last] >> 16), --f.kept;
        advance(f.last, f.last_parity);
    }
    if (f.args.pace) {
        while (clock_ticks() < f.next) pause_ns(20);
        f.next = clock_ticks() + (u64)f.args.pace * bytes / 1024;
    }
    if (state)
        state_before_copy();
    else
        reads_before_copy();
    copy_async(f.slots + f.head, f.bytes + at, from, bytes, f.policy);
    f.sizes[f.head] = left << 16 | bytes, f.from = at + bytes;
    f.flying += bytes, ++f.open, f.used += left + bytes, ++f.kept;
    if (++f.head == kSlots) f.head = 0;
    if (f.open == kSlots) land(f);
    return true;
}
