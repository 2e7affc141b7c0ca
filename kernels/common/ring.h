// The weight stream: one warp copies a block's weights into a ring for ever, independent of the
// data; consumers take the stages in the same order. Three limits: room in the ring, bytes in
// flight, and a pace: bursts at the memory's full speed stand in the way of the exchange's words.
//
// A slot says when a stage is there and when it has been read. Each has room for the largest stage,
// or (kVariableStages) a stage stands behind the one before it, or at the ring's beginning where
// the end is too short: more fit then, and who copies has more to do.
#pragma once

#include "args.h"
#include "lowered.h"
#include "platform.h"
#include "shape.h"

// Who copies looks at several slots at once where its looks take as long as its copies: stages of
// experts are small.
constexpr bool kLooksAhead = looks_ahead(kHasExperts);

struct Ring {
    Slot* slots;
    u8* bytes;
    u32 at, parity, from;   // slot; kVariableStages: where the stage before ended
    const u8* scale_index;  // [kIndexBytes] which of a stage's scales a row has
};
KIE_DEVICE u32 stage_offset(u32 from, u32 bytes) {
    return from + bytes > (u32)kRingBytes ? 0 : from;
}
KIE_DEVICE void advance(u32& at, u32& parity) {
    if (++at == kSlots) at = 0, parity ^= 1;
}
// Whether the stage at hand has arrived; asking early hides the asking.
KIE_DEVICE bool stage_here(const Ring& r) {
    return kNoStream || slot_filled(r.slots + r.at, r.parity);
}
// The same without a wait, however short.
KIE_DEVICE bool stage_here_yet(const Ring& r) {
    return kNoStream || slot_passed(r.slots + r.at, true, r.parity);
}
// The stage of so many bytes, once it is there. The producer waits for nobody but us, so no clock
// is read.
KIE_DEVICE const u8* take_stage(Ring& r, bool here, u32 bytes) {
    if (!kNoStream && !here)
        while (!slot_filled(r.slots + r.at, r.parity)) {
        }
    if (!kVariableStages) return r.bytes + (u32)r.at * kSlotBytes;
    const u32 at = stage_offset(r.from, bytes);
    r.from = at + bytes;
    return r.bytes + at;
}
// Gives a stage back; what was read of it is in registers. `one`: a single lane of the warp's.
KIE_DEVICE void give_back(Slot* slot, bool one) {
    if (kNoStream) return;
    sync_warp();
    if (one) slot_release(slot);
}
// The stage at hand.
KIE_DEVICE void release_stage(Ring& r) {
    give_back(r.slots + r.at, lane() == 0);
    advance(r.at, r.parity);
}
// A stage that is read while others are multiplied, and the slot to give back then.
struct HeldStage {
    const u8* bytes;
    Slot* slot;
};
KIE_DEVICE HeldStage hold_stage(Ring& r, u32 bytes, bool here = false) {
    Slot* const slot = r.slots + r.at;
    const u8* const at = take_stage(r, here, bytes);
    advance(r.at, r.parity);
    return {at, slot};
}

// The producer's side: the threads that a copy takes, all at the same place. The leader looks, and
// the others hear of it, so that all go the same way; in each loop that waits it keeps copies
// going. `stop` (shared memory) ends it early; nothing is in flight when it leaves.
struct Feed {
    const DecodeArgs& args;
    Slot* slots;
    u8* bytes;
    u32* sizes;
    const volatile u32* stop;
    Copies copies;
    u32 head, head_parity, tail, tail_parity, flying, open;
    u64 next;
    // kVariableStages: most copies in flight; where the last stage ends; the first that has not
    // been read, how many there are, and the bytes from its beginning on.
    u32 most, from, last, last_parity, kept, used;
    // kLooksAhead: whether the leader has seen the first copy in flight to be there; slots from the
    // head on that are known to have been read.
    bool here;
    u32 free;
};
// Whether copies in flight are counted, or their bytes.
constexpr bool kCountsCopies = kVariableStages || kLooksAhead;
// The next stages have so many bytes.
KIE_DEVICE void expect_stages(Feed& f, u32 bytes) {
    if (kCountsCopies) f.most = max_i(1, min_i(kSlots - 1, (int)(f.args.in_flight_bytes / bytes)));
}
KIE_DEVICE void land(Feed& f) {
    if (is_leader() && !f.here)
        while (!slot_filled(f.slots + f.tail, f.tail_parity)) copies_go_on(f.copies);
    from_leader(0);
    f.here = false;
    if (!kCountsCopies) f.flying -= f.sizes[f.tail];
    --f.open, advance(f.tail, f.tail_parity);
}
KIE_DEVICE void land_all(Feed& f) {
    while (f.open > 0) land(f);
}
// Waits until a slot has been read; false where the kernel ends.
KIE_DEVICE bool await_slot(Feed& f, u32 slot, u32 parity) {
    bool goes_on = true;
    if (is_leader())
        while (goes_on && !slot_free(f.slots + slot, parity))
            copies_go_on(f.copies), goes_on = !look(f.stop);
    if (from_leader(goes_on)) return true;
    land_all(f);
    return false;
}
KIE_DEVICE void before_copy(bool state) {
    if (state)
        state_before_copy();
    else
        reads_before_copy();
}
KIE_DEVICE void keep_pace(Feed& f, u32 bytes) {
    if (!f.args.pace || !is_leader()) return;
    while (clock_ticks() < f.next) copies_go_on(f.copies), pause_ns(20);
    f.next = clock_ticks() + (u64)f.args.pace * bytes / 1024;
}
// Copies so many bytes more into the slot that is next, as copy(slot, to, copies) asks for them;
// false where the kernel ends. `state`: they were written by this block's consumers in earlier
// steps.
template <class F>
KIE_DEVICE bool feed_fixed(Feed& f, u32 bytes, bool state, F copy) {
    while (f.open > 0 && f.flying + bytes > f.args.in_flight_bytes) land(f);
    if (!await_slot(f, f.head, f.head_parity)) return false;
    keep_pace(f, bytes);
    before_copy(state);
    copy(f.slots + f.head, f.bytes + f.head * kSlotBytes, f.copies);
    if (is_leader()) f.sizes[f.head] = bytes;
    f.flying += bytes, ++f.open;
    advance(f.head, f.head_parity);
    if (f.open == kSlots) land(f);
    return true;
}
// The same where looks are on their way together: at some slots at once, and early at the first
// copy in flight.
constexpr u32 kSlotsAhead = min_i(4, kSlots - 1);
// How many slots from the head on have been read, one at least; none where the kernel ends.
KIE_DEVICE u32 await_slots(Feed& f) {
    u32 free = 0;
    if (is_leader()) {
        bool passed[kSlotsAhead], all = true;
        u32 at = f.head, parity = f.head_parity;
        KIE_UNROLL for (u32 i = 0; i < kSlotsAhead; ++i) {
            passed[i] = slot_passed(f.slots + at, false, parity);
            advance(at, parity);
        }
        KIE_UNROLL for (u32 i = 0; i < kSlotsAhead; ++i) all = all && passed[i], free += all;
    }
    free = from_leader(free);
    return free > 0 ? free : await_slot(f, f.head, f.head_parity);
}
template <class F>
KIE_DEVICE bool feed_ahead(Feed& f, u32 bytes, bool state, F copy) {
    while (f.open >= f.most) land(f);
    if (f.free == 0) f.free = await_slots(f);
    if (f.free == 0) return false;
    keep_pace(f, bytes);
    before_copy(state);
    copy(f.slots + f.head, f.bytes + f.head * kSlotBytes, f.copies);
    --f.free, ++f.open;
    advance(f.head, f.head_parity);
    f.here = f.open >= f.most && is_leader() && slot_passed(f.slots + f.tail, true, f.tail_parity);
    return true;
}
// The same, behind the stage before it. A copy in flight is waited for last: each instruction from
// there on keeps the memory waiting.
template <class F>
KIE_DEVICE bool feed_variable(Feed& f, u32 bytes, bool state, F copy) {
    const u32 at = stage_offset(f.from, bytes), left = at < f.from ? kRingBytes - f.from : 0;
    while (f.kept == kSlots || f.used + left + bytes > kRingBytes) {
        if (!await_slot(f, f.last, f.last_parity)) return false;
        f.used -= f.sizes[f.last], --f.kept;
        advance(f.last, f.last_parity);
    }
    before_copy(state);
    while (f.open >= f.most) land(f);
    keep_pace(f, bytes);
    copy(f.slots + f.head, f.bytes + at, f.copies);
    if (is_leader()) f.sizes[f.head] = left + bytes;
    f.used += left + bytes, ++f.kept;
    f.from = at + bytes, ++f.open;
    advance(f.head, f.head_parity);
    return true;
}
template <class F>
KIE_DEVICE bool feed_by(Feed& f, u32 bytes, bool state, F copy) {
    if constexpr (kVariableStages)
        return feed_variable(f, bytes, state, copy);
    else if constexpr (kLooksAhead)
        return feed_ahead(f, bytes, state, copy);
    else
        return feed_fixed(f, bytes, state, copy);
}
// One more stage, which lies at `from`.
KIE_DEVICE bool feed(Feed& f, const u8* from, u32 bytes, bool state) {
    const auto copy = [from, bytes](Slot* slot, u8* to, Copies& copies) {
        copy_async(slot, to, from, bytes, copies);
    };
    return feed_by(f, bytes, state, copy);
}
