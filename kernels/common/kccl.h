// Collectives among the ranks of one host: device functions for any kernel, and two kernels over
// them, `kie_collective` and `kie_collective_bulk`. Needs platform.h alone and shares no name with
// the headers beside it.
//
// Every rank has one symmetric memory, of the same layout on all of them, mapped on all of them:
//   abort flag, reason, stamps | flags | slots of LL words | staging | the owner's own
// A rank stores into its peers' memory and loads from its own only.
//
// Invariants:
// - All ranks call the same collectives with the same sizes, in the same order, with the same grid.
// - Seqnos are sequence numbers of collectives: one each, never 0, the same on all ranks. Words
//   carry their seqno (NCCL's LL protocol), so nothing is ever cleared. There are two sets of
//   slots, by the seqno's parity: every collective receives from every peer, so a rank that has
//   finished seqno e + 1 knows that all have finished e.
// - Within one kernel that argument holds for each thread by itself (push) or each block (bulk), so
//   consecutive collectives of one kernel have the same size, or a grid barrier between them.
// - Sums are float32, in the order of the ranks, wherever they are made: the same bits on all.
// - Every wait is bounded. The first wait that expires sets every rank's abort flag; all waiting
//   threads then record what they waited for and run to the end on whatever there is; the host
//   discards the result.
#pragma once

#include "chiplets.h"
#include "platform.h"

namespace kccl {
#ifndef KIE_RANKS
#define KIE_RANKS 1
#endif
constexpr u32 kRanks = KIE_RANKS, kRanksMax = 8, kBlocksMax = 128;
static_assert(kRanks >= 1 && kRanks <= kRanksMax, "ranks of one host");

enum Op { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kAllToAll, kBarrier };
enum Dtype { kF16, kBf16, kF32 };
// Flags of a block: it has come, its part is in your staging, its result is in your memory.
enum Phase { kHere, kSent, kDone, kPhases };
// What a rank gave up on.
enum Where { kWords = 1, kArrival = 2, kParts = 3, kResults = 4 };

constexpr u64 kAtAbort = 0, kAtWhy = 8, kAtStamps = 64, kAtFlags = 4096;
constexpr u64 kAtSlots = kAtFlags + 8ull * kPhases * kRanksMax * kBlocksMax;
static_assert(kAtStamps + 16 * kBlocksMax <= kAtFlags, "two stamps a block");

// Where each rank's memory is.
struct Peers {
    u8* base[kRanksMax];  // of each rank, as this device sees it
    u64 slot_words;       // words that a rank may push to another at once
    u64 staging;          // offset of the staging
    u64 budget_ns;        // of any one wait
};
// What a thread knows of its place, and how long it has waited.
struct Ranks {
    const Peers& peers;
    u8* own;  // this rank's memory
    u32 rank, block, blocks, threads;
    u32 seqno, polls;
    u64 since;
    bool lost;
};

KIE_DEVICE u64 word(u32 payload, u32 seqno) { return (u64)seqno << 32 | payload; }
KIE_DEVICE u32 seqno_of(u64 w) { return (u32)(w >> 32); }
// Chosen, not indexed: an array that is indexed by a variable would have to lie in memory.
KIE_DEVICE u8* choose(const Peers& peers, u32 rank) {
    u8* at = peers.base[0];
    KIE_UNROLL for (u32 i = 1; i < kRanks; ++i) at = i == rank ? peers.base[i] : at;
    return at;
}
KIE_DEVICE u8* memory_of(const Ranks& r, u32 rank) { return choose(r.peers, rank); }
KIE_DEVICE u64* abort_flag_of(const Ranks& r, u32 rank) {
    return (u64*)(memory_of(r, rank) + kAtAbort);
}
// In a rank's memory: what `from` pushes in this seqno, and its flags for this block.
KIE_DEVICE u64* slot_in(const Ranks& r, u8* memory, u32 from) {
    const u64 index = (r.seqno & 1) * kRanksMax + from;
    return (u64*)(memory + kAtSlots) + index * r.peers.slot_words;
}
KIE_DEVICE u64* flag_in(const Ranks& r, u8* memory, u32 from, u32 phase) {
    const u32 index = (phase * kRanksMax + from) * kBlocksMax + r.block;
    return (u64*)(memory + kAtFlags) + index;
}
// The rank that is `i` behind this one: peers are served in turn, not all rank 0 first.
KIE_DEVICE u32 after(const Ranks& r, u32 i) {
    const u32 next = r.rank + i;
    return next < kRanks ? next : next - kRanks;
}

// ---- Waiting.
// Stops waiting. Every rank keeps the first reason of its own: what was outstanding when the first
// wait expired is the cause.
KIE_DEVICE void give_up(Ranks& r, u32 where, u32 peer, u32 seen) {
    r.lost = true;
    const u64 why = 1ull << 63 | (u64)where << 56 | (u64)r.rank << 48 | (u64)peer << 40 | seen;
    u64* own = (u64*)(r.own + kAtWhy);
    if (load_word_system(own) == 0) store_word_system(own, why);
}
// After a failed poll, the `polls`th: whether to poll again.
KIE_DEVICE bool patient(Ranks& r, u32 where, u32 peer, u32 seen) {
    if (r.lost) return false;
    if ((++r.polls & 63) == 0) {
        const u64 now = clock_ns();
        if (r.polls == 64) r.since = now;
        const bool late = now - r.since > r.peers.budget_ns;
        if (late)
            for (u32 i = 0; i < kRanks; ++i) store_word_system(abort_flag_of(r, after(r, i)), 1);
        if (late || load_word_system((const u64*)(r.own + kAtAbort)) != 0)
            give_up(r, where, peer, seen);
    }
    return !r.lost;
}

// ---- Flags. Whole blocks call these.
// Signals the blocks of the same number on all ranks, with all that this block stored before.
KIE_DEVICE void tell(const Ranks& r, u32 phase, u32 count) {
    sync_block();
    const u32 to = thread();
    if (to < kRanks && to != r.rank) {
        fence_system();
        store_word_system(flag_in(r, memory_of(r, to), r.rank, phase), word(count, r.seqno));
    }
}
// A later seqno's flag stands for this one's, too.
KIE_DEVICE void hear_one(Ranks& r, u32 from, u32 phase, u32 count, u32 where) {
    const u64* flag = flag_in(r, r.own, from, phase);
    r.polls = 0;
    for (;;) {
        const u64 v = load_word_system(flag);
        const int ahead = (int)(seqno_of(v) - r.seqno);
        if (ahead > 0 || (ahead == 0 && (u32)v >= count)) break;
        if (!patient(r, where, from, seqno_of(v))) break;
    }
    fence_system();
}
KIE_DEVICE void hear(Ranks& r, u32 phase, u32 count, u32 where) {
    const u32 from = thread();
    if (from < kRanks && from != r.rank) hear_one(r, from, phase, count, where);
    sync_block();
}
// Barrier of the blocks of the same number; each may then store into the others' memory.
KIE_DEVICE void meet(Ranks& r) {
    tell(r, kHere, 1);
    hear(r, kHere, 1, kArrival);
}

// ---- Numbers: 32 bits hold two 16-bit elements, the first in the low half, or one float.
KIE_DEVICE u32 bf16_of(float f) {
    const u32 u = bits(f);
    if ((u & 0x7fffffff) > 0x7f800000) return u >> 16 | 0x40;
    return (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
template <int kDtype>
KIE_DEVICE void unpack(u32 v, float& a, float& b) {
    if (kDtype == kF16)
        unpack_half2(v, a, b);
    else if (kDtype == kBf16)
        a = number(v << 16), b = number(v & 0xffff0000);
    else
        a = number(v), b = 0;
}
template <int kDtype>
KIE_DEVICE u32 pack(float a, float b) {
    if (kDtype == kF16) return pack_half2(a, b);
    if (kDtype == kBf16) return bf16_of(b) << 16 | bf16_of(a);
    return bits(a);
}
// The sum of one 32-bit part of every rank.
template <int kDtype>
KIE_DEVICE u32 sum(const u32 (&parts)[kRanks], float scale) {
    float a, b;
    unpack<kDtype>(parts[0], a, b);
    KIE_UNROLL for (u32 i = 1; i < kRanks; ++i) {
        float c, d;
        unpack<kDtype>(parts[i], c, d);
        a += c, b += d;
    }
    return pack<kDtype>(a * scale, b * scale);
}

// ---- One-shot push: the data are the flags. A pair is 8 bytes of data, two words on their way.
KIE_DEVICE void push(const Ranks& r, u32 to, u32 pair, u64 data) {
    store_words_system(slot_in(r, memory_of(r, to), r.rank) + 2 * pair, word((u32)data, r.seqno),
                       word((u32)(data >> 32), r.seqno));
}
// One pair of every peer. All loads are in flight before the first is checked.
KIE_DEVICE void take_all(Ranks& r, u32 pair, u64 own, u32 (&low)[kRanks], u32 (&high)[kRanks]) {
    u64 a[kRanks], b[kRanks];
    r.polls = 0;
    for (;;) {
        u32 late = kRanks;
        KIE_UNROLL for (u32 i = 0; i < kRanks; ++i) {
            if (i == r.rank)
                a[i] = word((u32)own, r.seqno), b[i] = word((u32)(own >> 32), r.seqno);
            else
                load_words_system(slot_in(r, r.own, i) + 2 * pair, a[i], b[i]);
        }
        KIE_UNROLL for (u32 i = 0; i < kRanks;
                        ++i) if (seqno_of(a[i]) != r.seqno || seqno_of(b[i]) != r.seqno) late = i;
        if (late == kRanks || !patient(r, kWords, late, 0)) break;
    }
    KIE_UNROLL for (u32 i = 0; i < kRanks; ++i) low[i] = (u32)a[i], high[i] = (u32)b[i];
}
// All-reduce, reduce-scatter (sums) and all-gather, all-to-all (none), of slices of `pairs` pairs.
// What goes to rank i stands `i * stride` pairs into `in`; what comes from it is added, or stands
// `i * pairs` into `out`.
template <int kDtype, bool kSum>
KIE_DEVICE void exchange_push(Ranks& r, const u64* in, u32 stride, u64* out, u32 pairs,
                              float scale) {
    const u32 first = r.block * r.threads + thread(), step = r.blocks * r.threads;
    for (u32 p = first; p < pairs; p += step) {
        KIE_UNROLL for (u32 i = 1; i < kRanks; ++i) {
            const u32 to = after(r, i);
            push(r, to, p, in[to * stride + p]);
        }
    }
    for (u32 p = first; p < pairs; p += step) {
        const u64 own = in[r.rank * stride + p];
        u32 low[kRanks], high[kRanks];
        take_all(r, p, own, low, high);
        if (kSum) {
            const u32 a = sum<kDtype>(low, scale), b = sum<kDtype>(high, scale);
            out[p] = (u64)b << 32 | a;
        } else {
            KIE_UNROLL for (u32 i = 0; i < kRanks; ++i) out[i * pairs + p] =
                (u64)high[i] << 32 | low[i];
        }
    }
}
KIE_DEVICE void broadcast_push(Ranks& r, u32 root, const u64* in, u64* out, u32 pairs) {
    const u32 first = r.block * r.threads + thread(), step = r.blocks * r.threads;
    // The root receives no data, so it could run ahead: it waits until all have come this far.
    tell(r, kHere, 1);
    for (u32 p = first; p < pairs; p += step) {
        u64 a = in[p], b = 0;
        if (r.rank == root) {
            KIE_UNROLL for (u32 i = 1; i < kRanks; ++i) push(r, after(r, i), p, a);
            out[p] = a;
            continue;
        }
        r.polls = 0;
        for (;;) {
            load_words_system(slot_in(r, r.own, root) + 2 * p, a, b);
            if (seqno_of(a) == r.seqno && seqno_of(b) == r.seqno) break;
            if (!patient(r, kWords, root, seqno_of(a))) break;
        }
        out[p] = b << 32 | (u32)a;
    }
    hear(r, kHere, 1, kArrival);
}

// ---- Bulk: plain 16-byte stores, then a flag. Work is cut into a part for each rank, a part into
// pieces; piece n belongs to block n % blocks, on all ranks.
struct Cut {
    u64 quads, part;  // in all, and of each part but perhaps the last ones
    u32 piece;        // quads of a piece
};
KIE_DEVICE u64 quads_of(const Cut& c, u32 rank) {
    const u64 from = rank * c.part;
    if (from >= c.quads) return 0;
    return c.quads - from < c.part ? c.quads - from : c.part;
}
// How many pieces of `quads` quads are this block's.
KIE_DEVICE u32 pieces_of(const Ranks& r, const Cut& c, u64 quads) {
    const u32 all = (u32)((quads + c.piece - 1) / c.piece);
    return all > r.block ? (all - r.block + r.blocks - 1) / r.blocks : 0;
}
struct Piece {
    u64 at;  // in its part
    u32 quads;
};
KIE_DEVICE Piece piece_of(const Ranks& r, const Cut& c, u64 quads, u32 i) {
    const u64 at = ((u64)i * r.blocks + r.block) * c.piece;
    if (at >= quads) return {0, 0};
    return {at, quads - at < c.piece ? (u32)(quads - at) : c.piece};
}
KIE_DEVICE void copy(const Ranks& r, u8* to, const u8* from, u32 quads) {
    constexpr u32 kAtOnce = 4;
    for (u32 first = thread(); first < quads; first += kAtOnce * r.threads) {
        Quad v[kAtOnce];
        KIE_UNROLL for (u32 j = 0; j < kAtOnce; ++j) {
            const u32 q = first + j * r.threads;
            if (q < quads) v[j] = load_state(from + 16ull * q);
        }
        KIE_UNROLL for (u32 j = 0; j < kAtOnce; ++j) {
            const u32 q = first + j * r.threads;
            if (q < quads) store_state(to + 16ull * q, v[j]);
        }
    }
}
// Adds one piece of this rank's part; the sum goes to every rank (all) or here alone.
template <int kDtype>
KIE_DEVICE void reduce_piece(const Ranks& r, const Cut& c, const u8* in, u64 out, bool all,
                             Piece piece, float scale) {
    const u8* staged = r.own + r.peers.staging;
    for (u32 q = thread(); q < piece.quads; q += r.threads) {
        const u64 at = piece.at + q;
        Quad v[kRanks], total;
        KIE_UNROLL for (u32 i = 0; i < kRanks; ++i) v[i] = load_state(
            i == r.rank ? in + 16 * (r.rank * c.part + at) : staged + 16 * (i * c.part + at));
        KIE_UNROLL for (u32 j = 0; j < 4; ++j) {
            u32 parts[kRanks];
            KIE_UNROLL for (u32 i = 0; i < kRanks; ++i) parts[i] = v[i].v[j];
            total.v[j] = sum<kDtype>(parts, scale);
        }
        const u64 to = out + 16 * (all ? r.rank * c.part + at : at);
        if (all)
            KIE_UNROLL for (u32 i = 1; i < kRanks; ++i)
                store_state(memory_of(r, after(r, i)) + to, total);
        store_state(r.own + to, total);
    }
}
// Two-shot all-reduce (`all`), or its first half, a reduce-scatter. `out` is an offset into
// every rank's memory; `in` may be the same address when `all`.
template <int kDtype>
KIE_DEVICE void reduce_bulk(Ranks& r, const Cut& c, const u8* in, u64 out, bool all, float scale) {
    meet(r);
    const u32 most = pieces_of(r, c, quads_of(c, 0));
    for (u32 i = 0; i < most; ++i) {
        for (u32 k = 1; k < kRanks; ++k) {
            const u32 to = after(r, k);
            const Piece piece = piece_of(r, c, quads_of(c, to), i);
            copy(r, memory_of(r, to) + r.peers.staging + 16 * (r.rank * c.part + piece.at),
                 in + 16 * (to * c.part + piece.at), piece.quads);
        }
        tell(r, kSent, i + 1);
    }
    const u64 own = quads_of(c, r.rank);
    const u32 mine = pieces_of(r, c, own);
    for (u32 i = 0; i < mine; ++i) {
        hear(r, kSent, i + 1, kParts);
        reduce_piece<kDtype>(r, c, in, out, all, piece_of(r, c, own, i), scale);
        if (all) tell(r, kDone, i + 1);
    }
    if (!all) return;
    const u32 from = thread();
    if (from < kRanks && from != r.rank)
        if (const u32 count = pieces_of(r, c, quads_of(c, from)))
            hear_one(r, from, kDone, count, kResults);
    sync_block();
}
// All-gather and all-to-all, of slices of `c.quads`; `stride` as in exchange_push, in quads.
KIE_DEVICE void exchange_bulk(Ranks& r, const Cut& c, const u8* in, u64 stride, u64 out) {
    meet(r);
    const u32 mine = pieces_of(r, c, c.quads);
    for (u32 i = 0; i < mine; ++i) {
        const Piece piece = piece_of(r, c, c.quads, i);
        for (u32 k = 1; k <= kRanks; ++k) {
            const u32 to = after(r, k % kRanks);
            copy(r, memory_of(r, to) + out + 16 * (r.rank * c.quads + piece.at),
                 in + 16 * (to * stride + piece.at), piece.quads);
        }
        tell(r, kDone, i + 1);
    }
    if (mine) hear(r, kDone, mine, kResults);
}
// The root deals its data out, a part to each rank, which passes it on to the others.
KIE_DEVICE void broadcast_bulk(Ranks& r, const Cut& c, u32 root, const u8* in, u64 out) {
    meet(r);
    const bool deals = r.rank == root;
    const u32 most = pieces_of(r, c, quads_of(c, 0));
    for (u32 i = 0; deals && i < most; ++i) {
        for (u32 to = 0; to < kRanks; ++to) {
            const Piece piece = piece_of(r, c, quads_of(c, to), i);
            const u64 at = 16 * (to * c.part + piece.at);
            if (to != root) copy(r, memory_of(r, to) + out + at, in + at, piece.quads);
            copy(r, memory_of(r, root) + out + at, in + at, piece.quads);
        }
        tell(r, kSent, i + 1);
    }
    const u64 own = quads_of(c, r.rank);
    const u32 mine = pieces_of(r, c, own);
    const u8* source = deals ? in : r.own + out;
    for (u32 i = 0; i < mine; ++i) {
        if (!deals) {
            if (thread() == root) hear_one(r, root, kSent, i + 1, kParts);
            sync_block();
        }
        const Piece piece = piece_of(r, c, own, i);
        const u64 at = 16 * (r.rank * c.part + piece.at);
        for (u32 k = 1; k < kRanks; ++k) {
            const u32 to = after(r, k);
            if (to != root) copy(r, memory_of(r, to) + out + at, source + at, piece.quads);
        }
        tell(r, kDone, i + 1);
    }
    const u32 from = thread();
    if (from < kRanks && from != r.rank)
        if (const u32 count = pieces_of(r, c, quads_of(c, from)))
            hear_one(r, from, kDone, count, kResults);
    sync_block();
}

// ---- The kernel of its own. One launch holds one rank, or several with so many blocks each.
struct Args {
    Peers peers;
    u64 in, out;  // offsets into each rank's memory
    u64 quads;    // of a slice: what one rank gives to, or gets from, another
    u32 first_rank, blocks, threads, op, dtype, spare, root, piece;
    u32 seqno;  // of the first step
    u32 steps;  // times that it is done; an all-reduce takes the last one's result
    u32 warm;   // steps before the clock starts
    float scale;
};
static_assert(sizeof(Args) == 160, "device.rs has the same");

// One step the one-shot way, or in bulk; `in` is where an all-reduce finds its own data.
template <int kDtype, bool kBulk>
KIE_DEVICE void reduce(Ranks& r, const Args& args, u64 in) {
    const bool all = args.op == kAllReduce;
    const u64 part = (args.quads + kRanks - 1) / kRanks;
    if (kBulk) {
        const Cut cut = {all ? args.quads : args.quads * kRanks, all ? part : args.quads,
                         args.piece};
        reduce_bulk<kDtype>(r, cut, r.own + in, args.out, all, args.scale);
    } else {
        const u32 pairs = 2 * (u32)args.quads;
        exchange_push<kDtype, true>(r, (const u64*)(r.own + in), all ? 0 : pairs,
                                    (u64*)(r.own + args.out), pairs, args.scale);
    }
}
KIE_DEVICE void move_push(Ranks& r, const Args& args) {
    const u64* in = (const u64*)(r.own + args.in);
    u64* out = (u64*)(r.own + args.out);
    const u32 pairs = 2 * (u32)args.quads, stride = args.op == kAllToAll ? pairs : 0;
    if (args.op == kBroadcast)
        broadcast_push(r, args.root, in, out, pairs);
    else
        exchange_push<kF32, false>(r, in, stride, out, pairs, 1.0f);
}
KIE_DEVICE void move_bulk(Ranks& r, const Args& args) {
    const u64 part = (args.quads + kRanks - 1) / kRanks;
    const Cut parts = {args.quads, part, args.piece}, whole = {args.quads, args.quads, args.piece};
    const u64 stride = args.op == kAllToAll ? args.quads : 0;
    if (args.op == kBroadcast)
        broadcast_bulk(r, parts, args.root, r.own + args.in, args.out);
    else
        exchange_bulk(r, whole, r.own + args.in, stride, args.out);
}
template <bool kBulk>
KIE_DEVICE void run(const Args& args) {
    const u32 at = block() / args.blocks, rank = args.first_rank + at;
    Ranks r = {args.peers,  choose(args.peers, rank),
               rank,        block() - at * args.blocks,
               args.blocks, args.threads,
               args.seqno,  0,
               0,           false};
    u64* stamps = (u64*)(r.own + kAtStamps) + 2 * r.block;
    for (u32 step = 0; step < args.steps; ++step, ++r.seqno) {
        if (step == args.warm && thread() == 0) stamps[0] = clock_ns();
        const u64 in = step == 0 || args.op != kAllReduce ? args.in : args.out;
        if (args.op == kBarrier)
            meet(r);
        else if (args.op > kReduceScatter)
            kBulk ? move_bulk(r, args) : move_push(r, args);
        else if (args.dtype == kF16)
            reduce<kF16, kBulk>(r, args, in);
        else if (args.dtype == kBf16)
            reduce<kBf16, kBulk>(r, args, in);
        else
            reduce<kF32, kBulk>(r, args, in);
        sync_block();
    }
    if (thread() == 0) stamps[1] = clock_ns();
}
}  // namespace kccl

// A thread holds a pair of every rank: with more ranks, fewer threads have the registers for it.
KIE_KERNEL(kie_collective, kccl::kRanks <= 4 ? 1024 : 512, kccl::Args args) {
    kccl::run<false>(args);
}
KIE_KERNEL(kie_collective_bulk, 512, kccl::Args args) { kccl::run<true>(args); }
