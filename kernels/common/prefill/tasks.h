// Tensor-parallel prefill: many positions through slices of one lane on several ranks, without grid
// barriers. The work is one queue of tile tasks (items): of a layer, each stage's groups of
// positions. A block takes the next task shortly before its present one ends, and waits for what
// that task needs: the stage before it at the same positions, for attention at all earlier
// positions too. So while some blocks finish a group of a stage, others are at the next group or
// stage, and sums travel meanwhile. A task needs only tasks before it in the queue, so there is
// always one to run.
#pragma once

#include "chiplets.h"
#include "exchange.h"
#include "lowered.h"
#include "platform.h"
#include "prefill/attend.h"
#include "prefill/feed.h"
#include "prefill/grid.h"
#include "prefill/layout.h"
#include "prefill/norm_heads.h"
#include "prefill/pipe.h"
#include "prefill/product.h"
#include "prefill/reduce_tp.h"
#include "prefill/residual.h"
#include "prefill/tiles.h"
#include "shape.h"
#include "wide.h"

enum SliceStage {
    kDoQkv,
    kDoNorms,  // of heads, where a model has them
    kDoAttend,
    kDoO,
    kDoMixO,
    kDoGateUp,
    kDoDown,
    kDoMixDown,
    kStages8
};
static_assert(kStreams == kStages8 * kGroups, "a stream a stage and group");
KIE_CONST_FN bool is_product(int stage) {
    return stage == kDoQkv || stage == kDoO || stage == kDoGateUp || stage == kDoDown;
}
KIE_CONST_FN int product_of(int stage) {
    return stage == kDoQkv      ? kToQkv
           : stage == kDoO      ? kToO
           : stage == kDoGateUp ? kToGateUp
                                : kToDown;
}
// What a stage has in the ring of shared memory.
enum RingUse { kNoRing, kOfPages, kOfStages };
KIE_CONST_FN int ring_of(int stage) {
    return is_product(stage) ? kOfStages : stage == kDoAttend ? kOfPages : kNoRing;
}
// Whether other ranks need what a stage makes.
KIE_CONST_FN bool is_for_all(int stage) { return stage >= kDoO && stage != kDoGateUp; }

constexpr u32 kItemBits = 24, kItemMask = (1u << kItemBits) - 1;
// An item: the stage and group of the layer that it is of, and the number of the first one of
// these.
struct Work {
    int layer, stage, group;
    u32 first;
};
KIE_DEVICE Span places_of(const Chunk& c, const Work& w) {
    return {w.group * kGroupPlaces, min_i((w.group + 1) * kGroupPlaces, c.to)};
}
KIE_DEVICE int groups_of(const Chunk& c) { return over(c.to, kGroupPlaces); }
// Items of a stage's group; `ends`: those that end with telling that they are done.
KIE_DEVICE int items_at(const PrefillArgs& args, const Chunk& c, const Work& w, bool ends = false) {
    const Span s = places_of(c, w);
    if (is_product(w.stage)) {
        const int product = product_of(w.stage);
        const int parts = cut_at(c, product).parts;
        // As items_of, without divisions by what is not known before.
        return over(s.to - s.first, kWideN) * over(frags_of(product), kWideTiles) *
               (ends ? 1 : parts);
    }
    if (w.stage == kDoAttend) return runs_of(s);
    if (w.stage == kDoNorms) return kHeadNorm ? over(s.to - s.first, 16) : 0;
    return mix_items(args, s);
}
// Goes on to the item of this number. False: it is of another chunk.
KIE_DEVICE bool find_work(const PrefillArgs& args, const Chunk& c, u32 item, Work& w) {
    for (;;) {
        const u32 items = items_at(args, c, w);
        if ((item - w.first & kItemMask) < items) return true;
        w.first += items;
        if (++w.group < groups_of(c)) continue;
        w.group = 0;
        if (++w.stage < kStages8) continue;
        w.stage = 0;
        if (++w.layer == (int)args.to) return false;
    }
}

// Completion counters. The rank's own blocks count the finished tasks of a stage's group in the
// chunk; where other ranks wait, too, the block that finishes a layer's last task publishes to all
// ranks how many layers are done (`turn`).
KIE_DEVICE u64* stream_counter(const PrefillArgs& args, int stage, int group) {
    return args.arrivals + kCountStreams + (stage * kGroups + group) * kStreamWords;
}
KIE_DEVICE u64* stream_word(const PrefillArgs& args, int stage, int group, int of, int at) {
    return (u64*)((u8*)(stream_counter(args, stage, group) + 16 + of) + args.hops[at]);
}
// What the counter says once all of a layer's items are done.
KIE_DEVICE u64 counted_at(const PrefillArgs& args, const Chunk& c, const Work& w) {
    return (u64)(w.layer - (int)args.from + 1) * items_at(args, c, w, true);
}
// By all workers, behind a task, unless the maker of its last part publishes it (`told`). One
// thread publishes while the others go on.
KIE_DEVICE void tell(const PrefillArgs& args, const Chunk& c, const Work& w, u32 turn, bool told) {
    push_done();
    writes_before_copies();
    sync_consumers<kWorkers>();
    if (thread() != kCrew || told || *stop_word()) return;
    u64* counter = stream_counter(args, w.stage, w.group);
    if (!is_for_all(w.stage)) {
        count_up(counter);
        return;
    }
    fence_system();
    if (count_in(counter) + 1 != counted_at(args, c, w)) return;
    fence_system();
    KIE_UNROLL for (int r = 0; r < kRanks; ++r)
        store_word_system(stream_word(args, w.stage, w.group, args.model.rank, r), turn);
}
// By one thread: of all ranks ...
KIE_DEVICE void await_ranks_at(Watch& w, const PrefillArgs& args, int stage, int group, u32 turn) {
    w.polls = 0;
    for (;;) {
        u64 seen = turn;  // of all at once, since each takes a while
        KIE_UNROLL for (int r = 0; r < kRanks; ++r) {
            const u64 one = load_word_system(stream_word(args, stage, group, r, args.model.rank));
            seen = one < seen ? one : seen;
        }
        if (seen >= turn || !patient(w, 0x6000 | stage << 4 | group, turn, (u32)seen)) break;
        pause_ns(40);
    }
    fence_system();
}
// ... or of its own.
KIE_DEVICE void await_blocks_at(Watch& w, const PrefillArgs& args, int stage, int group,
                                u64 wanted) {
    const u64* counter = stream_counter(args, stage, group);
    w.polls = 0;
    for (u64 seen = load_word(counter); seen < wanted; seen = load_word(counter)) {
        if (!patient(w, 0x8000 | stage << 4 | group, (u32)wanted, (u32)seen)) break;
        pause_ns(40);
    }
}
// What an item needs; `turn`: this layer's.
KIE_DEVICE void await_needs(Watch& w, const PrefillArgs& args, const Chunk& c, const Work& work,
                            u32 turn) {
    const bool first = work.stage == kDoQkv, attends = work.stage == kDoAttend;
    const int before = first ? kDoMixDown : attends && !kHeadNorm ? kDoQkv : work.stage - 1;
    if (is_for_all(before)) {
        await_ranks_at(w, args, before, work.group, first ? turn - 1 : turn);
        return;
    }
    KIE_NO_UNROLL for (int g = attends ? 0 : work.group; g <= work.group; ++g)
        await_blocks_at(w, args, before, g, counted_at(args, c, {work.layer, before, g, 0}));
    fence_device();
}

constexpr int kLooks = 2;  // the copying warp that waits for what an item needs

// ---- Task numbers. One copying warp takes the block's next task; the block's other warps read the
// number's low bits from two words of shared memory in rotation, each tagged with the block-local
// task index (n).
KIE_DEVICE volatile u32* item_word(u32 n) {
    return (volatile u32*)(prefill_shared() + kPfItems) + n % 2;
}
// So many of the block's items are ready, or begun; from this one on there will be none.
KIE_DEVICE volatile u32* ready_word() { return (volatile u32*)(prefill_shared() + kPfReady); }
KIE_DEVICE volatile u32* limit_word() { return (volatile u32*)(prefill_shared() + kPfLimit); }
KIE_DEVICE volatile u32* now_word() { return (volatile u32*)(prefill_shared() + kPfNow); }
KIE_DEVICE volatile u32* seen_word(int warp) {
    return (volatile u32*)(prefill_shared() + kPfSeen) + warp;
}
// False: there is none. All workers find the same, since numbers below the limit are there.
KIE_DEVICE bool hear_item(u32 n, u32& item) {
    constexpr u32 kWhose = 1u << (32 - kItemBits);
    for (;;) {
        const u32 said = *item_word(n);
        item = said & kItemMask;
        if (said >> kItemBits == (n + 1) % kWhose) return true;
        if (*limit_word() <= n) return false;
        pause_ns(20);
    }
}
// By a copying warp: not before the workers ask, and all have read the last number that stood
// there.
KIE_DEVICE bool take_item(Watch& w, const PrefillArgs& args, u32 n, u32& item) {
    const int warp = (int)(thread() - kWorkers) / (int)kTeam;
    if (warp == 0 && lane() == 0) {
        bool early = true;
        w.polls = 0;
        while (early && *stop_word() == 0) {
            early = *asked_word() < n;
            KIE_UNROLL for (int other = 1; other < kCopiers; ++other) early |=
                *seen_word(other) + 1 < n;
            if (!early) break;
            if (!patient(w, 0x7000, n, *asked_word())) *stop_word() = 1;
            pause_ns(20);
        }
        if (early)
            *limit_word() = n;
        else
            *item_word(n) =
                (n + 1) << kItemBits | ((u32)count_in(args.arrivals + kCountItems) & kItemMask);
    }
    sync_warp();
    const bool heard = hear_item(n, item);
    sync_warp();
    if (lane() == 0) *seen_word(warp) = n + 1;
    return ballot(heard) == ~0u;
}

KIE_DEVICE void attend_item(const PrefillArgs& args, const Chunk& chunk, const Span& span,
                            int layer, int i, PagePipe& pages) {
    const int team = thread() / kCrew;
    attend_run(args, chunk, layer, run_at(args, chunk, span, layer, i, team), pages);
}
// False: nothing to publish yet.
KIE_DEVICE bool do_item(const PrefillArgs& args, Pipe& pipe, PagePipe& pages, const Chunk& chunk,
                        const Work& w, int i) {
    const Span span = places_of(chunk, w);
    if (is_product(w.stage)) {
        const int product = product_of(w.stage);
        const Cut cut = cut_at(chunk, product);
        float d[kWideN / 2];
        return product_item(args, pipe, chunk, cut, item_at(product, span, cut, i), product,
                            w.layer, (float*)(prefill_shared() + kPfScale), d);
    }
    if (w.stage == kDoAttend)
        attend_item(args, chunk, span, w.layer, i, pages);
    else if (w.stage == kDoNorms)
        norm_heads(args, chunk, span, w.layer, i, over(span.to - span.first, 16));
    else
        mix_places(args, span, w.stage == kDoMixDown, w.layer, i);
    return true;
}
// By all workers, where no stage says that what an item needs is there.
KIE_DEVICE void await_ready(u32 n) {
    if (thread() == 0) {
        while (*ready_word() <= n && *stop_word() == 0) pause_ns(20);
        fence_device();
    }
    sync_consumers<kWorkers>();
}
// All that ranks add to a chunk is here, so that others may be behind by nothing of it.
KIE_DEVICE bool await_chunk(Watch& w, const PrefillArgs& args, const Chunk& chunk, u32 turn) {
    sync_consumers<kWorkers>();
    if (thread() == 0) {
        KIE_NO_UNROLL for (int g = 0; g < groups_of(chunk); ++g)
            await_ranks_at(w, args, kDoMixDown, g, turn);
        // No block reads these any more or counts before the next chunk begins.
        KIE_NO_UNROLL for (int i = 0; i < kStreams && block() == 0; ++i)
            store_word(stream_counter(args, 0, i), 0);
        if (w.lost) *stop_word() = 1;
        *now_word() = *stop_word() == 0;
    }
    sync_consumers<kWorkers>();
    return *now_word() != 0;
}
KIE_DEVICE void work_slices(const PrefillArgs& args, Pipe& pipe) {
    PagePipe pages = {0};
    Watch watch = {args.model, 0, 0, 0, false};
    Phase phase = {0};
    Clock clock = {args.model.trace, 0};
    const int chunks = chunks_of(args), layers = (int)(args.to - args.from);
    u32 n = 0, item;
    Work w = {0, 0, 0, 0};
    tick(clock, -1);
    KIE_NO_UNROLL for (int c = 0; c < chunks; ++c) {
        const Chunk chunk = chunk_at(args, c);
        if (args.from == 0) embed_chunk(args, chunk);
        if (!meet(watch, args, phase)) return;
        tick(clock, 31);
        w.layer = args.from, w.stage = w.group = 0;
        const u32 before = c * layers + 1 - args.from;
        int last = kNoRing;
        KIE_NO_UNROLL for (;; ++n) {
            if (!hear_item(n, item)) return;
            if (!find_work(args, chunk, item, w)) break;
            watch.step = w.layer;
            const u32 turn = before + w.layer;
            const int ring = ring_of(w.stage);
            if (thread() == 0) {
                if (ring != kNoRing && ring != last) fence_device();  // what was there is read
                *begun_word() = n + 1;
            }
            if (ring != kNoRing) last = ring;
            if (ring != kOfStages) await_ready(n);
            if (ring == kNoRing) ask_next();
            tick(clock, 16 + w.stage);
            const int i = (int)(item - w.first & kItemMask);
            const bool whole = do_item(args, pipe, pages, chunk, w, i);
            tell(args, chunk, w, turn, !whole);
            tick(clock, w.stage);
        }
        if (!await_chunk(watch, args, chunk, (c + 1) * layers)) return;
        if (args.model.epoch != 0 && c + 1 == chunks) put_last(args, chunk);
    }
    if (thread() == 0) *begun_word() = n + 1;
}

template <class S>
KIE_DEVICE bool feed_product(Watch& w, const PrefillArgs& args, Pipe& pipe, const Chunk& chunk,
                             const Work& work, int i, long at, const u8* x) {
    const int product = product_of(work.stage);
    const Cut cut = cut_at(chunk, product);
    const WideItem item = item_at(product, places_of(chunk, work), cut, i);
    return feed_item<S>(w, args, pipe, cut, item, product, at, x, chunk.to <= cut.width,
                        stream_policy());
}
KIE_DEVICE bool feed_slice(Watch& w, const PrefillArgs& args, Pipe& pipe, const Chunk& chunk,
                           const Work& work, int i) {
    const u8* x = args.scratch;
    long at = (long)args.model.layers[work.layer].stream;
    if (work.stage == kDoQkv)
        return feed_product<TilingQkv>(w, args, pipe, chunk, work, i, at, x + kScrX);
    at += product_bytes<TilingQkv>();
    if (work.stage == kDoO)
        return feed_product<TilingO>(w, args, pipe, chunk, work, i, at, x + kScrAttn);
    at += product_bytes<TilingO>();
    if (work.stage == kDoGateUp)
        return feed_product<TilingGu>(w, args, pipe, chunk, work, i, at, x + kScrX);
    at += product_bytes<TilingGu>();
    return feed_product<TilingDown>(w, args, pipe, chunk, work, i, at, x + kScrAct);
}
KIE_DEVICE void await_begun(Watch& w, u32 n) {
    w.polls = 0;
    while (*begun_word() <= n && *stop_word() == 0) {
        if (!patient(w, 0x4000, n, *begun_word())) *stop_word() = 1;
        pause_ns(20);
    }
}
// Weights depend on no other block, so the warps that copy them run ahead. Pages use the ring that
// stages use: where one follows the other, or a chunk begins, all wait until the workers are there
// (`behind`). One warp polls for what the task needs, for the whole block: more pollers delay the
// flag.
KIE_DEVICE bool await_item(Watch& w, const PrefillArgs& args, const Chunk& chunk, const Work& work,
                           u32 n, u32 turn, bool behind) {
    const int warp = (int)(thread() - kWorkers) / (int)kTeam, ring = ring_of(work.stage);
    const bool looks = warp == kLooks,
               brings = ring == kOfPages || (ring == kOfStages && warp >= 2);
    if (!behind && !brings && !looks) return *stop_word() == 0;
    if (lane() == 0) {
        if (behind) await_begun(w, n);
        if (looks) {
            await_needs(w, args, chunk, work, turn);
            if (w.lost) *stop_word() = 1;
            *ready_word() = n + 1;
        } else if (brings) {
            while (*ready_word() <= n && *stop_word() == 0) pause_ns(20);
        }
        fence_device();
    }
    sync_warp();
    writes_before_copies();
    return *stop_word() == 0;
}
// The warp that takes tasks gives up: workers get no more.
KIE_DEVICE void limit(u32 n) {
    if (thread() == kWorkers) *limit_word() = n;
}
KIE_DEVICE void feed_slices(const PrefillArgs& args, Pipe& pipe) {
    PagePipe pages = {0};
    Watch watch = {args.model, 0, 0, 0, false};
    const int chunks = chunks_of(args), layers = (int)(args.to - args.from);
    u32 n = 0, item = 0;
    Work w = {0, 0, 0, 0};
    bool heard = false;  // of the n-th item
    KIE_NO_UNROLL for (int c = 0; c < chunks; ++c) {
        const Chunk chunk = chunk_at(args, c);
        w.layer = args.from, w.stage = w.group = 0;
        const u32 before = c * layers + 1 - args.from;
        int last = kNoRing;
        KIE_NO_UNROLL for (;; ++n, heard = false) {
            if (!heard && !take_item(watch, args, n, item)) return;
            heard = true;
            if (!find_work(args, chunk, item, w)) break;
            watch.step = w.layer;
            const int ring = ring_of(w.stage);
            const bool behind = ring != kNoRing && ring != last;
            if (!await_item(watch, args, chunk, w, n, before + w.layer, behind))
                return limit(n + 1);
            if (ring == kNoRing) continue;
            last = ring;
            const int i = (int)(item - w.first & kItemMask);
            const Span span = places_of(chunk, w);
            const bool fed = ring == kOfPages ? feed_run(watch, args, pages, w.layer,
                                                         run_at(args, chunk, span, w.layer, i, 0))
                                              : feed_slice(watch, args, pipe, chunk, w, i);
            if (!fed) return limit(n + 1);
        }
    }
    await_begun(watch, n);  // the workers' waits look at `stop`, not the clock
}
