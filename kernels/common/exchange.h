// LL words, after NCCL's LL protocol: a value travels as {payload, sequence number} in one 8-byte
// store, and the reader polls the data itself. Each layer of each step has a sequence number of its
// own, so no word is ever cleared.
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
#include "ops/parts.h"
#include "platform.h"
#include "shape.h"

// Of a layer, or (kLayers) of the choice of the token. `step`: its number in all launches.
KIE_DEVICE u32 seqno_at(u32 step, int layer) { return step * (kLayers + 1) + (u32)layer; }

// Bounded waiting. The first wait that expires sets its rank's abort flag. Every waiting
// warp then records what it waited for, stops waiting, runs the step to its end on whatever it has,
// sets the other ranks' flags and leaves: the earliest recorded wait is the cause. Such a block's
// candidate for the step's token is kNotFinite (ops/sample.h), so no token of incomplete words is
// emitted.
struct Watch {
    const DecodeArgs& args;
    u32 step, polls;
    u64 since;
    bool timed_out;
};
KIE_DEVICE void give_up(Watch& w, u32 where, u32 wanted, u32 seen) {
    w.timed_out = true;
    store_word(w.args.abort_flag, 1);
    Record& r = w.args.records[block() * kRecordsBlock + thread() / kTeam];
    if (r.place != 0) return;  // of a warp the first, which is the earliest in the work
    r.place = kWritten | where, r.step = w.step, r.wanted = wanted, r.seen = seen;
}
// On all ranks: the flag lies beside the words, so each rank's is as far away as they are.
KIE_DEVICE void abort_all(const DecodeArgs& args) {
    if constexpr (kRanks == 1) {
        store_word(args.abort_flag, 1);
    } else {
        for (int rank = 0; rank < kRanks; ++rank)
            store_word_system(args.abort_flag + args.peer_offset[rank], 1);
    }
}
// The rank that `lane_all` belongs to, for a record's `where`.
KIE_DEVICE u32 of_rank(int lane_all) {
    return kRanks == 1 ? 0 : (u32)(lane_all / kLanes + 1) << 16;
}
// After a failed test: whether to give up, rather than to test again.
KIE_DEVICE bool wait_expired(Watch& w, u32 where, u32 wanted, u32 seen) {
    if (w.timed_out) return true;
    if ((++w.polls & 63) == 0) {
        const u64 now = clock_ns();
        if (w.polls == 64) w.since = now;
        if (now - w.since > w.args.budget_ns || load_word(w.args.abort_flag) != 0)
            give_up(w, where, wanted, seen);
    }
    return w.timed_out;
}

KIE_DEVICE u64 ll_word(u32 payload, u32 seqno) { return (u64)seqno << 32 | payload; }
KIE_DEVICE u32 seqno_of(u64 w) { return (u32)(w >> 32); }
KIE_DEVICE void publish(u64* p, u32 payload, u32 seqno) { store_word(p, ll_word(payload, seqno)); }
// Two numbers of a vector whose column has `words` words: each part's stand together.
KIE_DEVICE void publish(u64* p, long words, const Halves& h, u32 seqno) {
    publish(p, h.v[0], seqno);
    if constexpr (kParts > 1) publish(p + words / kParts, h.v[kParts - 1], seqno);
}
// To the same word of another rank, or of every rank. `p` is this rank's.
KIE_DEVICE void publish_to(const DecodeArgs& args, int rank, u64* p, u32 payload, u32 seqno) {
    store_word_system(p + args.peer_offset[rank], ll_word(payload, seqno));
}
KIE_DEVICE void publish_all(const DecodeArgs& args, u64* p, u32 payload, u32 seqno) {
    if constexpr (kRanks == 1) {
        publish(p, payload, seqno);
    } else {
        KIE_UNROLL for (int rank = 0; rank < kRanks; ++rank)
            publish_to(args, rank, p, payload, seqno);
    }
}
// A lane's residual behind a layer's attention (0) or mlp (1), of this rank; behind the last layer
// that of each lane of the model, where the head combines lanes.
KIE_DEVICE u64* hidden_slot(const DecodeArgs& args, int kind, int layer, int lane_index) {
    const u32 at = (kind * kNumBuffers + (u32)layer % kNumBuffers) * kLanes + lane_index;
    return args.ll_words + kAtHidden + at * kVecH;
}
// Of the other vectors: which buffer a lane's of a layer has.
KIE_DEVICE long buffer_of(int layer, int lane_index) {
    return (long)((u32)layer % kNumBuffers) * kLanes + lane_index;
}
// All lanes' words of what a layer adds to the others.
KIE_DEVICE u64* others_of(const DecodeArgs& args, int kind, int layer) {
    const u32 at = kind * kNumBuffersOther + (u32)layer % kNumBuffersOther;
    return args.ll_words + kAtOther + at * kLanesAll * kVecH;
}

KIE_DEVICE u64* other_slot(const DecodeArgs& args, int kind, int layer, int lane_all) {
    return others_of(args, kind, layer) + heard_lane(lane_all) * kVecH;
}
KIE_DEVICE u64* last_slot(const DecodeArgs& args, int lane_all) {
    return args.ll_words + kAtLast + lane_all * kVecH;
}
// Release and acquire of the step barrier, in the scope of all that take part.
KIE_DEVICE void fence_step() {
    if constexpr (kRanks > 1)
        fence_system();
    else
        fence_device();
}

// Waits for one word and returns its payload.
KIE_DEVICE u32 take_word(Watch& watch, const u64* p, u32 seqno, u32 where) {
    watch.polls = 0;
    u64 v = load_word(p);
    while (!kNoWaits && seqno_of(v) != seqno && !wait_expired(watch, where, seqno, seqno_of(v)))
        v = load_word(p);
    return (u32)v;
}
// The same of two numbers, of a vector whose column has `words` words.
KIE_DEVICE Halves take_halves(Watch& watch, const u64* p, long words, u32 seqno, u32 where) {
    Halves h;
    KIE_UNROLL for (int part = 0; part < kParts; ++part) h.v[part] =
        take_word(watch, p + part * (words / kParts), seqno, where);
    return h;
}
// One thread of the warp polls one word, with a short delay between polls, before all threads load
// all words: 128 blocks that poll everything saturate the second-level cache. `poll_delay_ns`:
// delay before the first poll, in which the word cannot have arrived.
KIE_DEVICE void await_one(Watch& w, const u64* p, u32 seqno, u32 where, u32 poll_delay_ns) {
    if (kNoWaits) return;
    if (lane() == 0) {
        w.polls = 0;
        if (poll_delay_ns > 0) pause_ns(poll_delay_ns);
        for (u64 v = load_word(p); seqno_of(v) != seqno; v = load_word(p)) {
            if (wait_expired(w, where, seqno, seqno_of(v))) break;
            pause_ns(20);
        }
    }
    sync_warp();
}
