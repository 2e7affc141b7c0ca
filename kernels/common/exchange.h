// LL words, after NCCL's LL protocol: a value travels as {payload, sequence number} in one 8-byte
// store, and the reader polls the data itself. The sequence number is called epoch here; each layer
// of each step has one of its own, so no word is ever cleared.
//
// A vector's words have two buffers, which layers use in rotation. Layer l + 2's words never
// replace layer l's while these may still be read: a writer of layer l + 2 has read words of layer
// l + 1 that depend on all blocks of the lane, and each block had read all it needs of layer l to
// make them (a block's warps pass a barrier between reading a vector and storing its result). What
// was read is in registers before the result is stored, so this needs no fence. Words for other
// lanes have as many buffers as their delays need (ops/all_reduce.h). The sampling exchange
// orders one step's last read before the next step's first write.
#pragma once

#include "args.h"
#include "chiplets.h"
#include "lowered.h"
#include "platform.h"
#include "shape.h"

// Of a layer, or (kLayers) of the choice of the token. `turn`: the step's number in all launches.
KIE_DEVICE u32 epoch_at(u32 turn, int layer) { return turn * (kLayers + 1) + (u32)layer; }

// Bounded waiting. The first wait that expires sets its rank's abort flag (`poison`). Every waiting
// warp then records what it waited for, stops waiting, runs the step to its end on whatever it has,
// sets the other ranks' flags and leaves: the earliest recorded wait is the cause. Such a block's
// candidate for the step's token is kNotFinite (ops/sample.h), so no token of incomplete words is
// emitted.
struct Watch {
    const DecodeArgs& args;
    u32 step, polls;
    u64 since;
    bool lost;
};
KIE_DEVICE void give_up(Watch& w, u32 where, u32 wanted, u32 seen) {
    w.lost = true;
    store_word(w.args.poison, 1);
    Record& r = w.args.records[block() * kRecordsBlock + thread() / kTeam];
    if (r.place != 0) return;  // of a warp the first, which is the earliest in the work
    r.place = kWritten | where, r.step = w.step, r.wanted = wanted, r.seen = seen;
}
// On all ranks: `poison` lies beside the words, so each rank's is as far away as they are.
KIE_DEVICE void poison_all(const DecodeArgs& args) {
    if constexpr (kRanks == 1) {
        store_word(args.poison, 1);
    } else {
        for (int rank = 0; rank < kRanks; ++rank)
            store_word_system(args.poison + args.hops[rank], 1);
    }
}
// The rank that `lane_all` belongs to, for a record's `where`.
KIE_DEVICE u32 of_rank(int lane_all) {
    return kRanks == 1 ? 0 : (u32)(lane_all / kLanes + 1) << 16;
}
// After a failed test: whether to test again.
KIE_DEVICE bool patient(Watch& w, u32 where, u32 wanted, u32 seen) {
    if (w.lost) return false;
    if ((++w.polls & 63) == 0) {
        const u64 now = clock_ns();
        if (w.polls == 64) w.since = now;
        if (now - w.since > w.args.budget_ns || load_word(w.args.poison) != 0)
            give_up(w, where, wanted, seen);
    }
    return !w.lost;
}

KIE_DEVICE u64 word(u32 payload, u32 epoch) { return (u64)epoch << 32 | payload; }
KIE_DEVICE u32 epoch_of(u64 w) { return (u32)(w >> 32); }
KIE_DEVICE void publish(u64* p, u32 payload, u32 epoch) { store_word(p, word(payload, epoch)); }
// To the same word of another rank, or of every rank. `p` is this rank's.
KIE_DEVICE void publish_to(const DecodeArgs& args, int rank, u64* p, u32 payload, u32 epoch) {
    store_word_system(p + args.hops[rank], word(payload, epoch));
}
KIE_DEVICE void publish_all(const DecodeArgs& args, u64* p, u32 payload, u32 epoch) {
    if constexpr (kRanks == 1) {
        publish(p, payload, epoch);
    } else {
        KIE_UNROLL for (int rank = 0; rank < kRanks; ++rank)
            publish_to(args, rank, p, payload, epoch);
    }
}
// A lane's residual behind a layer's attention (0) or mlp (1), of this rank; behind the last layer
// that of each lane of the model, where the head combines lanes.
KIE_DEVICE u64* hidden_slot(const DecodeArgs& args, int kind, int layer, int lane_index) {
    const u32 at = (kind * kTurns + (u32)layer % kTurns) * kLanes + lane_index;
    return args.words + kAtHidden + at * kVecH;
}
// Of the other vectors: which of the places a lane's of a layer has.
KIE_DEVICE long unit_of(int layer, int lane_index) {
    return (long)((u32)layer % kTurns) * kLanes + lane_index;
}
// All lanes' words of what a layer adds to the others.
KIE_DEVICE u64* others_of(const DecodeArgs& args, int kind, int layer) {
    const u32 at = kind * kTurnsOther + (u32)layer % kTurnsOther;
    return args.words + kAtOther + at * kLanesAll * kVecH;
}

KIE_DEVICE u64* other_slot(const DecodeArgs& args, int kind, int layer, int lane_all) {
    return others_of(args, kind, layer) + heard_lane(lane_all) * kVecH;
}
KIE_DEVICE u64* last_slot(const DecodeArgs& args, int lane_all) {
    return args.words + kAtLast + lane_all * kVecH;
}
// Release and acquire of the step barrier, in the scope of all that take part.
KIE_DEVICE void fence_edge() {
    if constexpr (kRanks > 1)
        fence_system();
    else
        fence_device();
}

// Waits for one word and returns its payload.
KIE_DEVICE u32 take_word(Watch& watch, const u64* p, u32 epoch, u32 where) {
    watch.polls = 0;
    u64 v = load_word(p);
    while (!kNoWaits && epoch_of(v) != epoch && patient(watch, where, epoch, epoch_of(v)))
        v = load_word(p);
    return (u32)v;
}
// One thread of the warp polls one word, with a short delay between polls, before all threads load
// all words: 128 blocks that poll everything saturate the second-level cache. `rest_ns`: delay
// before the first poll, in which the word cannot have arrived.
KIE_DEVICE void await_one(Watch& w, const u64* p, u32 epoch, u32 where, u32 rest_ns) {
    if (kNoWaits) return;
    if (lane() == 0) {
        w.polls = 0;
        if (rest_ns > 0) pause_ns(rest_ns);
        for (u64 v = load_word(p); epoch_of(v) != epoch; v = load_word(p)) {
            if (!patient(w, where, epoch, epoch_of(v))) break;
            pause_ns(20);
        }
    }
    sync_warp();
}
