// What passes through a block's ring: its weight stream, the same every step, and between the
// stages of qkv and those of o its pages of that layer, as many as the positions need. So keys and
// values are in flight while queries are still being computed and exchanged.
//
// Even the newest page comes this way, though its last key and value are written in the very step
// that reads it: the warp that takes the page inserts them (attend_ring.h). All that it holds
// besides this block's own consumers wrote a step ago or earlier, before they took that step's
// first stage of o. From there to this step's pages of the layer are at least kLayerSlots slots,
// and the ring has no more slots than that: each of its slots has been released since, by every
// consumer, so the fence in `feed` stands between those writes and the copy.
#pragma once

#include "args.h"
#include "block.h"
#include "chiplets.h"
#include "exchange.h"
#include "lowered.h"
#include "pages.h"
#include "platform.h"
#include "ring.h"
#include "shape.h"

// Word `n` of the choice of experts (ops/route.h), its sequence number in the upper half: of one
// column its n-th expert; of several a RoutedExpert, behind the last one some without columns.
KIE_DEVICE volatile u64* choice_word(u8* shared, int n) {
    return (volatile u64*)(shared + kShChoice) + n;
}
// An expert that some columns chose. Pairs of a column and an expert stand by expert, then by
// column; its own begin at `first`.
struct RoutedExpert {
    u32 id, columns;  // a bit for each
    int first;
};
KIE_CONST_FN u32 pack_routed(const RoutedExpert& e) {
    return e.id | e.columns << 16 | (u32)e.first << 24;
}
KIE_CONST_FN RoutedExpert unpack_routed(u32 v) {
    return {v & 0xffff, v >> 16 & 0xff, (int)(v >> 24)};
}

// Pages first, first + kSplitsMax, ... of one column (of several: of a sequence) reach this block
// through the ring in a layer.
struct Streamed {
    int first, count;
};
template <class C>
KIE_DEVICE Streamed streamed_pages(const DecodeArgs& args, const u8* shared, int block_in_lane,
                                   int layer, u32 step, int column) {
    const int kv_head = block_in_lane / C::kSplitBlocks, split = block_in_lane % C::kSplitBlocks;
    if (!kStreamed || split >= C::kSplitsMax || kv_head >= C::kKvHeads) return {0, 0};
    const u32 position = opaque(position_at(args, shared, step, column));
    // The producer is ahead: what it finds behind the end is never used.
    const bool alone = kColumns == 1 && args.prompt;
    if (alone ? step >= args.count : position >= args.column[column].last) return {0, 0};
    const PageSpan span = pages_of(((const Layer*)(shared + kShLayers))[layer], (int)position);
    const int first = first_page<C>(span, split, shift_at(args, shared, column));
    return {first, first > span.last ? 0 : (span.last - first) / C::kSplitsMax + 1};
}

template <class C>
KIE_DEVICE bool feed_pages(Feed& f, const u8* shared, int layer, u32 step) {
    const int block_in_lane = (int)block() % kBlocksPerLane,
              lane_index = (int)block() / kBlocksPerLane;
    const int kv_index = lane_index * C::kKvHeads + block_in_lane / C::kSplitBlocks;
    const int columns = kColumns == 1 ? 1 : sequences_of(f.args);
    static_assert(!kStreamed || (kCopiesState && C::kPageStages > 0), "pages do not fit");
    static_assert(kWarps * C::kHeadPairs * 16 <= kScores * 4, "bests and masses beside scores");
    expect_stages(f, C::kPageStageBytes);
    bool first = true;  // what stands before its copy stands before them all; fences cost 0.7 us
    for (int c = 0; c < columns; ++c) {
        const Streamed s = streamed_pages<C>(f.args, shared, block_in_lane, layer, step, c);
        for (int i = 0; i < s.count; ++i) {
            const int at = s.first + i * C::kSplitsMax;
            const u8* page = page_at<C>(f.args, shared, {layer, kv_index, c}, at);
            const int position = (int)position_at(f.args, shared, step, c);
            if (at == position / kPage) without_newest<C>(page, position);
            for (int stage = 0; stage < C::kPageStages; ++stage) {
                if (!feed(f, page + stage * C::kPageStageBytes, C::kPageStageBytes, first))
                    return false;
                first = false;
            }
        }
    }
    return true;
}

struct FeedPages {
    Feed& f;
    const u8* shared;
    const Segment& segment;
    u32 step;
    template <class C>
    KIE_DEVICE bool operator()(C) const {
        // Those of latents and entries come by loads, a delta rule has none.
        if constexpr (C::kLatent || C::kCompressed || C::kDelta)
            return true;
        else
            return feed_pages<C>(f, shared, (int)segment.layer, step);
    }
};
// Waits for a choice; false where the kernel ends. One that is not made in time is an expired wait
// like others': any expert's weights go on their way, so that consumers come to the step's end.
KIE_DEVICE bool await_choice(Feed& f, u8* shared, u32 step, u32 layer, int n, u32& payload) {
    const volatile u64* word = choice_word(shared, n);
    const u32 seqno = seqno_at(f.args.seqno + step, (int)layer);
    Watch watch = {f.args, step, 0, 0, false};
    bool goes_on = true;
    u64 v = 0;
    if (is_leader())
        for (v = look(word); goes_on && seqno_of(v) != seqno; v = look(word)) {
            copies_go_on(f.copies);
            if (wait_expired(watch, layer << 4 | 9, seqno, seqno_of(v))) {
                ((volatile u32*)(shared + kShMisc))[3] = 1;
                v = 0;
                break;
            }
            goes_on = !look(f.stop);
            pause_ns(20);
        }
    payload = from_leader((u32)v);
    if (from_leader(goes_on)) return true;
    land_all(f);
    return false;
}
// The block's part `S` of an expert. Stages' last warps may have no units: theirs is not copied.
template <class C, class S>
KIE_DEVICE bool feed_expert(Feed& f, const u8* bank, u32 id) {
    const u8* from = bank + (u64)id * C::kExpertBytes;
    for (int i = 0; i < S::stages; ++i, from += S::stage_bytes)
        if (!feed(f, from, i < S::long_stages ? S::long_bytes : S::short_bytes, false))
            return false;
    return true;
}
// The same of a stack of so many experts (lower/tiling.rs).
template <class C, class S>
KIE_DEVICE bool feed_stack(Feed& f, const u8* bank, const u32 (&ids)[S::pieces], int count) {
    for (int stage = 0; stage < S::stages; ++stage) {
        const u32 bytes = stage < S::long_stages ? S::long_bytes : S::short_bytes;
        const u8* from = bank + stage * S::stage_bytes;
        const auto copy = [&](Slot* slot, u8* to, Copies& copies) {
            copy_begins(slot, count, bytes);
            KIE_UNROLL for (int i = 0; i < S::pieces; ++i) if (i < count) copy_part(
                slot, to + i * S::stage_bytes, from + (u64)ids[i] * C::kExpertBytes, bytes, copies);
            copy_ends(slot);
        };
        if (!feed_by(f, count * bytes, false, copy)) return false;
    }
    return true;
}
// Those that a column chose, in the order of its list.
template <class C, class S>
KIE_DEVICE bool feed_chosen(Feed& f, u8* shared, const Segment& g, u32 step, const u8* bank) {
    for (int n = 0; n < C::kChosen; n += S::pieces) {
        u32 ids[S::pieces];
        KIE_UNROLL for (int i = 0; i < S::pieces;
                        ++i) if (!await_choice(f, shared, step, g.layer, n + i,
                                               ids[i])) return false;
        if constexpr (S::pieces > 1) {
            if (!feed_stack<C, S>(f, bank, ids, S::pieces)) return false;
        } else {
            if (!feed_expert<C, S>(f, bank, ids[0])) return false;
        }
    }
    return true;
}
// The next word of the list that several columns have; false where the kernel ends. Nobody knows
// how many experts a list has that was not made in time.
template <class S>
KIE_DEVICE bool await_routed(Feed& f, u8* shared, const Segment& g, u32 step, const u8* bank, int n,
                             RoutedExpert& e) {
    u32 v;
    if (!await_choice(f, shared, step, g.layer, n, v)) return false;
    const volatile u32* timed_out = (volatile u32*)(shared + kShMisc) + 3;
    while (from_leader(look(timed_out)))
        if (!feed(f, bank, S::stage_bytes, false)) return false;
    e = unpack_routed(v);
    return true;
}
// Those that some of several columns chose, each once.
template <class C, class S>
KIE_DEVICE bool feed_routed(Feed& f, u8* shared, const Segment& g, u32 step, const u8* bank) {
    RoutedExpert e;
    int n = 0;
    if (!await_routed<S>(f, shared, g, step, bank, n, e)) return false;
    while (e.columns != 0) {
        // Whether another one follows is known before a stage goes: behind the last one consumers
        // write the next layer's list.
        u32 ids[S::pieces];
        int count = 0;
        KIE_UNROLL for (int i = 0; i < S::pieces; ++i) {
            ids[i] = e.id;
            if (e.columns == 0) continue;
            ++count;
            if (!await_routed<S>(f, shared, g, step, bank, ++n, e)) return false;
        }
        if constexpr (S::pieces > 1) {
            if (!feed_stack<C, S>(f, bank, ids, count)) return false;
        } else {
            if (!feed_expert<C, S>(f, bank, ids[0])) return false;
        }
    }
    return true;
}
template <class C, class S>
KIE_DEVICE bool feed_experts(Feed& f, u8* shared, const Segment& g, u32 step) {
    const u8* bank = f.args.experts + g.at + (u64)block() * C::kPieceBytes;
    expect_stages(f, S::pieces * S::stage_bytes);
    if constexpr (kColumns == 1)
        return feed_chosen<C, S>(f, shared, g, step, bank);
    else
        return feed_routed<C, S>(f, shared, g, step, bank);
}
struct FeedExperts {
    Feed& f;
    u8* shared;
    const Segment& segment;
    u32 step;
    template <class C>
    KIE_DEVICE bool operator()(C) const {
        if constexpr (C::kExperts > 0) {
            if (segment.source == kFromGateUp)
                return feed_experts<C, typename C::StackedGu>(f, shared, segment, step);
            return feed_experts<C, typename C::TilingDown>(f, shared, segment, step);
        } else {
            return true;
        }
    }
};

// The producer: as many threads as a copy takes. `stop` (shared memory) ends it early.
KIE_DEVICE void feed_stream(const DecodeArgs& args, u8* shared, const volatile u32* stop) {
    if (kNoStream) return;
    Slot* const slots = (Slot*)(shared + kShSlots);
    Feed f = {args, slots, shared + kShRing, (u32*)(shared + kShSizes), stop};
    f.copies = copies_into(slots, kSlots);
    f.head_parity = 1;  // all slots are free
    for (u32 step = 0; step < args.steps; ++step) {
        for (u32 s = begins_at_head(args, step) ? kHeadSegment : 0; s < args.segment_count; ++s) {
            Segment g = load_constant(args.segments + s);
            if (g.source == kFromPages) {
                if (kStreamed && !of_class(shared, (int)g.layer, FeedPages{f, shared, g, step}))
                    return;
                continue;
            }
            if (kHasExperts && g.source != kFromStream) {
                if (!of_class(shared, (int)g.layer, FeedExperts{f, shared, g, step})) return;
                continue;
            }
            expect_stages(f, g.bytes);
            const u8* from = args.weights + (u64)opaque(block()) * kStreamBytes + g.at;
            for (u32 i = 0; i < g.stages; ++i, from += g.bytes)
                if (!feed(f, from, g.bytes, false)) return;
        }
    }
    land_all(f);
}
