// Tensor-parallel prefill: many positions through shards of one lane on several ranks, without grid
// barriers. The work is one queue of tile tasks: of a layer, each stage's groups of
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

enum TaskStage {
    kDoQkv,
    kDoNorms,  // of heads, where a model has them
    kDoAttend,
    kDoO,
    kDoReduceO,
    kDoGateUp,
    kDoDown,
    kDoReduceDown,
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

constexpr u32 kTaskBits = 24, kTaskMask = (1u << kTaskBits) - 1;
// Where a task stands: the stage and group of its layer, and the number of the first task of
// these.
struct TaskCursor {
    int layer, stage, group;
    u32 first;
};
KIE_DEVICE Span places_of(const Chunk& c, const TaskCursor& w) {
    return {w.group * kGroupPlaces, min_i((w.group + 1) * kGroupPlaces, c.to)};
}
KIE_DEVICE int groups_of(const Chunk& c) { return over(c.to, kGroupPlaces); }
// Tasks of a stage's group; `ends`: those that publish that they are done.
struct CountTasks {
    const PrefillArgs& args;
    const Chunk& c;
    const TaskCursor& w;
    bool ends;
    template <class C>
    KIE_DEVICE int operator()(C) const {
        const Span s = places_of(c, w);
        if (is_product(w.stage)) {
            const int product = product_of(w.stage);
            const int k_splits = config_at<C>(c, product).k_splits;
            // As tasks_of, without divisions by what is not known before.
            return over(s.to - s.first, kWideN) * over(frags_of<C>(product), kWideTiles) *
                   (ends ? 1 : k_splits);
        }
        if (w.stage == kDoAttend) return runs_of<C>(s);
        if (w.stage == kDoNorms) return C::kHeadNorm ? over(s.to - s.first, 16) : 0;
        return reduce_tasks(args, s);
    }
};
KIE_DEVICE int tasks_at(const PrefillArgs& args, const Chunk& c, const TaskCursor& w,
                        bool ends = false) {
    return of_layer(args, w.layer, CountTasks{args, c, w, ends});
}
// Goes on to the task of this number. False: it is of another chunk.
KIE_DEVICE bool find_task(const PrefillArgs& args, const Chunk& c, u32 task, TaskCursor& w) {
    for (;;) {
        const u32 tasks = tasks_at(args, c, w);
        if ((task - w.first & kTaskMask) < tasks) return true;
        w.first += tasks;
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
    return (u64*)((u8*)(stream_counter(args, stage, group) + 16 + of) + args.peer_offset[at]);
}
// What the counter says once all of a layer's tasks are done: those of the layers before, too.
KIE_DEVICE u64 counted_at(const PrefillArgs& args, const Chunk& c, const TaskCursor& w) {
    if constexpr (kClasses == 1)
        return (u64)(w.layer - (int)args.from + 1) * tasks_at(args, c, w, true);
    u64 tasks = 0;
    KIE_NO_UNROLL for (int layer = args.from; layer <= w.layer; ++layer) tasks +=
        tasks_at(args, c, {layer, w.stage, w.group, 0}, true);
    return tasks;
}
// By all workers, behind a task, unless the maker of its last part publishes it (`published`). One
// thread publishes while the others go on.
KIE_DEVICE void publish_done(const PrefillArgs& args, const Chunk& c, const TaskCursor& w, u32 turn,
                             bool published) {
    push_done();
    writes_before_copies();
    writes_before_telling();
    sync_consumers<kWorkers>();
    if (thread() != kCrew || published || *stop_word()) return;
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
        if (seen >= turn || wait_expired(w, 0x6000 | stage << 4 | group, turn, (u32)seen)) break;
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
        if (wait_expired(w, 0x8000 | stage << 4 | group, (u32)wanted, (u32)seen)) break;
        pause_ns(40);
    }
}
struct HasHeadNorm {
    template <class C>
    KIE_DEVICE bool operator()(C) const {
        return C::kHeadNorm;
    }
};
// What a task needs; `turn`: this layer's.
KIE_DEVICE void await_needs(Watch& w, const PrefillArgs& args, const Chunk& c,
                            const TaskCursor& cursor, u32 turn) {
    const bool first = cursor.stage == kDoQkv, attends = cursor.stage == kDoAttend;
    const bool skips = attends && !of_layer(args, cursor.layer, HasHeadNorm{});
    const int before = first ? kDoReduceDown : skips ? kDoQkv : cursor.stage - 1;
    if (is_for_all(before)) {
        await_ranks_at(w, args, before, cursor.group, first ? turn - 1 : turn);
        return;
    }
    KIE_NO_UNROLL for (int g = attends ? 0 : cursor.group; g <= cursor.group; ++g)
        await_blocks_at(w, args, before, g, counted_at(args, c, {cursor.layer, before, g, 0}));
    fence_device();
}

constexpr int kLooks = 2;  // the copying warp that waits for what a task needs

// ---- Task numbers. One copying warp takes the block's next task; the block's other warps read the
// number's low bits from two words of shared memory in rotation, each tagged with the block-local
// task index (n).
KIE_DEVICE volatile u32* task_word(u32 n) {
    return (volatile u32*)(prefill_shared() + kPfTasks) + n % 2;
}
// So many of the block's tasks are ready, or begun; from this one on there will be none.
KIE_DEVICE volatile u32* ready_word() { return (volatile u32*)(prefill_shared() + kPfReady); }
KIE_DEVICE volatile u32* limit_word() { return (volatile u32*)(prefill_shared() + kPfLimit); }
KIE_DEVICE volatile u32* now_word() { return (volatile u32*)(prefill_shared() + kPfNow); }
KIE_DEVICE volatile u32* seen_word(int warp) {
    return (volatile u32*)(prefill_shared() + kPfSeen) + warp;
}
// False: there is none. All workers find the same, since numbers below the limit are there.
KIE_DEVICE bool hear_task(u32 n, u32& task) {
    constexpr u32 kWhose = 1u << (32 - kTaskBits);
    for (;;) {
        const u32 said = *task_word(n);
        task = said & kTaskMask;
        if (said >> kTaskBits == (n + 1) % kWhose) return true;
        if (*limit_word() <= n) return false;
        pause_ns(20);
    }
}
// By a copying warp: not before the workers ask, and all have read the last number that stood
// there.
KIE_DEVICE bool take_task(Watch& w, const PrefillArgs& args, u32 n, u32& task) {
    const int warp = (int)(thread() - kWorkers) / (int)kTeam;
    if (warp == 0 && lane() == 0) {
        bool early = true;
        w.polls = 0;
        while (early && *stop_word() == 0) {
            early = *asked_word() < n;
            KIE_UNROLL for (int other = 1; other < kCopiers; ++other) early |=
                *seen_word(other) + 1 < n;
            if (!early) break;
            if (wait_expired(w, 0x7000, n, *asked_word())) *stop_word() = 1;
            pause_ns(20);
        }
        if (early)
            *limit_word() = n;
        else
            *task_word(n) =
                (n + 1) << kTaskBits | ((u32)count_in(args.arrivals + kCountTasks) & kTaskMask);
    }
    sync_warp();
    const bool heard = hear_task(n, task);
    sync_warp();
    if (lane() == 0) *seen_word(warp) = n + 1;
    return ballot(heard) == ~0u;
}

template <class C>
KIE_DEVICE void attend_task(const PrefillArgs& args, const Chunk& chunk, const Span& span,
                            int layer, int i, PagePipe& pages) {
    const int team = thread() / kCrew;
    if constexpr (!C::kDelta)
        attend_run<C>(args, chunk, layer, run_at<C>(args, chunk, span, layer, i, team), pages);
}
// False: nothing to publish yet.
struct RunTask {
    const PrefillArgs& args;
    Pipe& pipe;
    PagePipe& pages;
    const Chunk& chunk;
    const TaskCursor& w;
    int i;
    template <class C>
    KIE_DEVICE bool operator()(C) const {
        const Span span = places_of(chunk, w);
        if (is_product(w.stage)) {
            const int product = product_of(w.stage);
            const TileConfig config = config_at<C>(chunk, product);
            float d[kSums];
            return product_task<C>(args, pipe, chunk, config, task_at<C>(product, span, config, i),
                                   product, w.layer, (float*)(prefill_shared() + kPfScale), d);
        }
        if (w.stage == kDoAttend)
            attend_task<C>(args, chunk, span, w.layer, i, pages);
        else if (w.stage == kDoNorms)
            norm_heads<C>(args, chunk, span, w.layer, i, over(span.to - span.first, 16));
        else
            reduce_places(args, span, w.stage == kDoReduceDown, w.layer, i);
        return true;
    }
};
// By all workers, where no stage says that what a task needs is there.
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
            await_ranks_at(w, args, kDoReduceDown, g, turn);
        // No block reads these any more or counts before the next chunk begins.
        KIE_NO_UNROLL for (int i = 0; i < kStreams && block() == 0; ++i)
            store_word(stream_counter(args, 0, i), 0);
        if (w.timed_out) *stop_word() = 1;
        *now_word() = *stop_word() == 0;
    }
    sync_consumers<kWorkers>();
    return *now_word() != 0;
}
KIE_DEVICE void run_tasks(const PrefillArgs& args, Pipe& pipe) {
    PagePipe pages = {0};
    Watch watch = {args.model, 0, 0, 0, false};
    Phase phase = {0};
    Clock clock = {args.model.trace, 0};
    const int chunks = chunks_of(args), layers = (int)(args.to - args.from);
    u32 n = 0, task;
    TaskCursor w = {0, 0, 0, 0};
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
            if (!hear_task(n, task)) return;
            if (!find_task(args, chunk, task, w)) break;
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
            const int i = (int)(task - w.first & kTaskMask);
            const bool whole = of_layer(args, w.layer, RunTask{args, pipe, pages, chunk, w, i});
            publish_done(args, chunk, w, turn, !whole);
            tick(clock, w.stage);
        }
        if (!await_chunk(watch, args, chunk, (c + 1) * layers)) return;
        put_behind(args, chunk, c + 1 == chunks);
    }
    if (thread() == 0) *begun_word() = n + 1;
}

template <class C, class S>
KIE_DEVICE bool feed_product(Watch& w, const PrefillArgs& args, Pipe& pipe, const Chunk& chunk,
                             const TaskCursor& cursor, int i, long at, const u8* x) {
    const int product = product_of(cursor.stage);
    const TileConfig config = config_at<C>(chunk, product);
    const TileTask task = task_at<C>(product, places_of(chunk, cursor), config, i);
    return feed_task<C, S>(w, args, pipe, config, task, product, at, x, chunk.to <= config.width,
                           stream_policy());
}
template <class C>
KIE_DEVICE bool feed_task_product(Watch& w, const PrefillArgs& args, Pipe& pipe, const Chunk& chunk,
                                  const TaskCursor& cursor, int i) {
    using Qkv = typename C::TilingQkv;
    using O = typename C::TilingO;
    using First = typename C::TilingFirst;
    const u8* x = args.scratch;
    const int product = product_of(cursor.stage);
    const long at = (long)args.model.layers[cursor.layer].stream + product_offset<C>(product);
    if (product == kToQkv)
        return feed_product<C, Qkv>(w, args, pipe, chunk, cursor, i, at, x + kScrX);
    if (product == kToO)
        return feed_product<C, O>(w, args, pipe, chunk, cursor, i, at, x + kScrAttn);
    if (product == kToGateUp)
        return feed_product<C, First>(w, args, pipe, chunk, cursor, i, at, x + kScrX);
    return feed_product<C, typename C::TilingDown>(w, args, pipe, chunk, cursor, i, at,
                                                   x + kScrAct);
}
// What a task has in the ring.
struct FeedTask {
    Watch& watch;
    const PrefillArgs& args;
    Pipe& pipe;
    PagePipe& pages;
    const Chunk& chunk;
    const TaskCursor& w;
    int i;
    template <class C>
    KIE_DEVICE bool operator()(C) const {
        if (ring_of(w.stage) != kOfPages)
            return feed_task_product<C>(watch, args, pipe, chunk, w, i);
        const Span span = places_of(chunk, w);
        if constexpr (C::kDelta)
            return false;
        else
            return feed_run<C>(watch, args, pages, w.layer,
                               run_at<C>(args, chunk, span, w.layer, i, 0));
    }
};
KIE_DEVICE void await_begun(Watch& w, u32 n) {
    w.polls = 0;
    while (*begun_word() <= n && *stop_word() == 0) {
        if (wait_expired(w, 0x4000, n, *begun_word())) *stop_word() = 1;
        pause_ns(20);
    }
}
// Weights depend on no other block, so the warps that copy them run ahead. Pages use the ring that
// stages use: where one follows the other, or a chunk begins, all wait until the workers are there
// (`behind`). One warp polls for what the task needs, for the whole block: more pollers delay the
// flag.
KIE_DEVICE bool await_task(Watch& w, const PrefillArgs& args, const Chunk& chunk,
                           const TaskCursor& cursor, u32 n, u32 turn, bool behind) {
    const int warp = (int)(thread() - kWorkers) / (int)kTeam, ring = ring_of(cursor.stage);
    const bool looks = warp == kLooks,
               brings = ring == kOfPages || (ring == kOfStages && warp >= 2);
    if (!behind && !brings && !looks) return *stop_word() == 0;
    if (lane() == 0) {
        if (behind) await_begun(w, n);
        if (looks) {
            await_needs(w, args, chunk, cursor, turn);
            if (w.timed_out) *stop_word() = 1;
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
KIE_DEVICE void feed_tasks(const PrefillArgs& args, Pipe& pipe) {
    PagePipe pages = {0};
    Watch watch = {args.model, 0, 0, 0, false};
    const int chunks = chunks_of(args), layers = (int)(args.to - args.from);
    u32 n = 0, task = 0;
    TaskCursor w = {0, 0, 0, 0};
    bool heard = false;  // of the n-th task
    KIE_NO_UNROLL for (int c = 0; c < chunks; ++c) {
        const Chunk chunk = chunk_at(args, c);
        w.layer = args.from, w.stage = w.group = 0;
        const u32 before = c * layers + 1 - args.from;
        int last = kNoRing;
        KIE_NO_UNROLL for (;; ++n, heard = false) {
            if (!heard && !take_task(watch, args, n, task)) return;
            heard = true;
            if (!find_task(args, chunk, task, w)) break;
            watch.step = w.layer;
            const int ring = ring_of(w.stage);
            const bool behind = ring != kNoRing && ring != last;
            if (!await_task(watch, args, chunk, w, n, before + w.layer, behind))
                return limit(n + 1);
            if (ring == kNoRing) continue;
            last = ring;
            const int i = (int)(task - w.first & kTaskMask);
            if (!of_layer(args, w.layer, FeedTask{watch, args, pipe, pages, chunk, w, i}))
                return limit(n + 1);
        }
    }
    await_begun(watch, n);  // the workers' waits look at `stop`, not the clock
}
