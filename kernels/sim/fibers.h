// The machine of the simulator: every device thread is a fiber, all fibers of a launch run on one
// thread of the host, and a seed draws the order. It keeps its state in statics: a loaded module
// runs one launch at a time.
//
// Model. Collectives meet among teams of 32 neighbouring threads. A wave is one team (warp 32) or
// two (warp 64). A wave runs until each of its live lanes stands at a collective, a barrier or a
// wait, or until it is taken off after a publish, a copy or a barrier; then the seed draws the
// next one. At warp 64 a wave is in lock step: its lanes pass collectives and barriers only when
// all of them stand at something. A team that waits does not stop the other one, as it would not
// where control flow joins again before the wait; with `hold` it does (from its first failed look
// to its next other primitive), and what might hang a divergent wave hangs. Memory is sequentially
// consistent: a missing fence is not seen.
// A wait is a poll that fails: slot_filled and slot_free say so themselves, a loop of load_word or
// load_host is known by coming back to the same address, pause_ns is always one.
// Time is virtual: it moves with every scheduling step, and in growing steps while only waiting
// lanes are left, so that bounded waits expire. While some of them wait for the host, it moves with
// the host's clock instead, and a host that holds all threads up for too long ends the launch.
// Of several ranks, each owns memory. Words, states and copies are seen: a rank loads from its own
// memory alone, and stores into another's only what was made for it to reach, in the system's
// scope. Plain loads and stores of C++ are not seen.
#pragma once

#include "order.h"

namespace kie_sim {

// What all lanes run through is worth more of the compiler's time than a kernel is.
#ifdef KIE_SIM_O2
#pragma GCC push_options
#pragma GCC optimize("O2")
#endif
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 kTeam = 32, kBarriers = 2, kPoison = 0xff;
constexpr u64 kStepNs = 20, kTicksPerNs = 2;
constexpr u64 kQuietFirst = 4096, kQuietMax = 12288;  // rounds in which nobody got any further

// Memory of one rank; `open`: others may store into it.
struct Owned {
    u64 from, to;
    u32 rank, open;
};
// What Rust hands over and gets back; crates/kie-kernels/src/sim.rs has the same.
struct Launch {
    void (*entry)(const void* args);
    const void* args;
    u64 seed, switches_max, host_ns_max, now_ns;
    u8 *shared, *stacks;
    u64 shared_stride, shared_bytes, stack_stride;
    u64 (*host_pace)(u64 ns);  // rests about so long, returns how long it was
    char* error;
    u64 error_bytes;
    u32 blocks, threads, warp, hold;  // blocks of a rank
    u64 ranks, args_stride;           // each rank has parameters of its own
    u64 switches, steps, schedule;    // out
    const Owned* owned;               // in the order of addresses; none where nobody is a rank
    u64 owned_count;
    u64 others;  // memory of other processes is open, whose stores let anybody go on
};

enum Kind { kNothing, kSyncWarp, kShuffle, kShuffleXor, kBallot, kMma, kJoin };
KIE_UNSEEN inline const char* name_of(int kind) {
    const char* names[] = {"nothing", "sync_warp", "shuffle",  "shuffle_xor",
                           "ballot",  "mma",       "join_wave"};
    return names[kind];
}

struct Team;
struct Lane {
    void* stack;
    Team* team;
    u32 thread, index, bit;
    u32 looks;           // loads of words since the last switch
    const void* anchor;  // one of their addresses
    const char* waits;   // primitive of the last failed look
    const void* inputs;  // of an mma
    void* context;       // where there is no switch of our own
    u32 seqno;           // of the words that it works at; 0: it says nothing of them
    bool fenced;         // it has passed a fence
    Without without[2];  // what it reads without
    u32 asked, flying;   // copies and arrivals behind them: so far, and of copies not yet there
};
struct Block;
struct Wave {
    Team* teams;
    u32 count, index, list, place;
    u64 seen;  // `activity` when it last looked
    u32 meetings;
};
// Masks of lanes. Every live lane is in exactly one of ready (the running one too), polling,
// arrived, at[..] and granted.
struct Team {
    Lane* lanes;
    Wave* wave;
    Block* block;
    u32 live, ready, polling, arrived, at[kBarriers], granted;
    u32 waiting;  // between a failed look and the next other primitive
    u32 phase, kind, turn, fuel;
    u32 value[2][kTeam];
    u32 meetings[kBarriers];
    Order order;
};
struct Block {
    Team* teams;
    u8* shared;
    u32 index, team_count, live, arrived[kBarriers], meetings[kBarriers];
};
struct Copy {
    u64* full;
    void* to;
    const void* from;
    u32 bytes, block;  // none: an arrival behind what its lane asked for before
    Lane* by;
    u32 turn;      // of its lane
    bool arrives;  // when it is there
};
enum List { kNone, kRunnable, kPolling };

struct Machine {
    Launch* launch;
    void* stack;  // of the scheduler
    void* context;
    Lane* lanes;
    Team* teams;
    Wave* waves;
    Block* blocks;
    Wave** lists[3];
    u32 lengths[3];
    Copy* copies;
    u32 copy_count, copy_room, wave_count, live_waves, slow_block;
    u64 random, now, activity, quiet, switches, steps, schedule;
    u64 since;    // switches when the host was last waited for
    u64 host_ns;  // waited for the host since the last event
    bool acted, off, failed, lock_step, hold, host_seen;
};
static Machine machine;
static Lane* me;

// ---- Switching.
#if defined(__x86_64__) && !defined(KIE_SIM_PORTABLE)
extern "C" __attribute__((visibility("hidden"))) void kie_sim_switch(void** save, void* load);
asm(R"(
    .text
    .p2align 4
    .hidden kie_sim_switch
    .globl kie_sim_switch
    .type kie_sim_switch, @function
kie_sim_switch:
    popq %rdx
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    pushq %rdx
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %rdx
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    jmp *%rdx
    .size kie_sim_switch, . - kie_sim_switch
)");
KIE_UNSEEN inline void change(void** save, void* load) { kie_sim_switch(save, load); }
KIE_UNSEEN inline void* prepare(u8* bottom, u64 bytes, void (*run)()) {
    u64* top = (u64*)(((u64)bottom + bytes) & ~15ull);
    *--top = 0;  // as if called, from nowhere
    for (u32 i = 0; i < 7; ++i) *--top = 0;
    *top = (u64)run;
    return top;
}
#else
}  // namespace kie_sim
#include <ucontext.h>
namespace kie_sim {
// The saved "stack" is the address of a context at the bottom of the fiber's stack.
static ucontext_t scheduler_context;
KIE_UNSEEN inline void change(void** save, void* load) {
    ucontext_t* from = *save ? (ucontext_t*)*save : &scheduler_context;
    *save = from;
    swapcontext(from, (ucontext_t*)load);
}
KIE_UNSEEN inline void* prepare(u8* bottom, u64 bytes, void (*run)()) {
    ucontext_t* c = (ucontext_t*)bottom;
    const u64 head = (sizeof(ucontext_t) + 63) / 64 * 64;
    getcontext(c);
    c->uc_stack.ss_sp = bottom + head, c->uc_stack.ss_size = bytes - head, c->uc_link = nullptr;
    makecontext(c, run, 0);
    return c;
}
#endif

KIE_UNSEEN inline u64 draw() {
    u64& x = machine.random;
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    return x * 0x2545f4914f6cdd1dull >> 16;
}
KIE_UNSEEN inline u32 draw_below(u32 n) { return (u32)((draw() & 0xffffffff) * n >> 32); }

KIE_UNSEEN inline void to_scheduler() {
    ++machine.switches;
    order_leave();
    change(&me->stack, machine.stack);
}
// Leaves this lane, which is not ready, for the next of its team or for the scheduler.
KIE_UNSEEN inline void to_next(Team& t) {
    if (!t.ready) return to_scheduler();
    const u32 later = t.ready & (~0u << t.turn);
    Lane* next = t.lanes + __builtin_ctz(later ? later : t.ready);
    Lane* mine = me;
    ++machine.switches;
    me = next;
    change(&mine->stack, next->stack);
}
// Takes the wave off; the lane stays ready.
KIE_UNSEEN inline void preempt() {
    machine.off = true;
    to_scheduler();
}
KIE_UNSEEN inline void maybe_preempt(u32 one_in) {
    if (draw_below(one_in) == 0) preempt();
}

// ---- Failing.
KIE_UNSEEN __attribute__((noinline, format(printf, 1, 2))) static void fail(const char* format,
                                                                            ...) {
    Launch& l = *machine.launch;
    if (!machine.failed) {
        __builtin_va_list list;
        __builtin_va_start(list, format);
        int n = 0;
        if (me)
            n = __builtin_snprintf(l.error, l.error_bytes,
                                   "block %u thread %u: ", me->team->block->index, me->thread);
        __builtin_vsnprintf(l.error + n, l.error_bytes - n, format, list);
        __builtin_va_end(list);
    }
    machine.failed = machine.off = true;
    if (me)
        for (;;) to_scheduler();
}

// ---- Whose memory it is.
enum Reach { kOwn, kPeers };
KIE_UNSEEN __attribute__((noinline)) static void touch_owned(const void* p, Reach reach,
                                                             const char* at) {
    const Launch& l = *machine.launch;
    const u32 rank = me->team->block->index / l.blocks;
    u64 low = 0, high = l.owned_count;
    while (low < high) {
        const u64 middle = (low + high) / 2;
        if (l.owned[middle].to <= (u64)p)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == l.owned_count) return;
    const Owned& o = l.owned[low];
    if ((u64)p < o.from || o.rank == rank || (reach == kPeers && o.open)) return;
    const char* why = o.open ? "which others only store into, in the system's scope"
                             : "which others must not reach";
    fail("rank %u: %s at %p is memory of rank %u, %s", rank, at, p, o.rank, why);
}
KIE_UNSEEN inline void touch(const void* p, Reach reach, const char* at) {
    if (machine.launch->owned_count) touch_owned(p, reach, at);
}

// ---- Lists of waves.
KIE_UNSEEN inline void unlist(Wave& w) {
    if (w.list == kNone) return;
    Wave** list = machine.lists[w.list];
    Wave* last = list[--machine.lengths[w.list]];
    list[w.place] = last, last->place = w.place, w.list = kNone;
}
KIE_UNSEEN inline void enlist(Wave& w, u32 list) {
    if (w.list == list) return;
    unlist(w);
    w.list = list, w.place = machine.lengths[list]++;
    machine.lists[list][w.place] = &w;
}
KIE_UNSEEN inline bool waits(const Wave& w) {
    u32 waiting = w.teams[0].waiting;
    for (u32 i = 1; i < w.count; ++i) waiting |= w.teams[i].waiting;
    return waiting != 0;
}
// Lets lanes go on, at once or, in lock step, when their wave stands and none of it waits.
KIE_UNSEEN inline void grant(Team& t, u32 mask) {
    (machine.lock_step ? t.granted : t.ready) |= mask;
    if (mask && t.wave != me->team->wave && !(machine.hold && waits(*t.wave)))
        enlist(*t.wave, kRunnable);
}

// ---- Events that are not looks.
KIE_UNSEEN inline void act() { me->team->waiting &= ~me->bit, me->looks = 0, machine.acted = true; }
KIE_UNSEEN inline void complete(Team& t) {
    const u32 all = t.arrived;
    t.arrived = 0, t.phase ^= 1, t.turn = (t.turn + 11) % kTeam;
    grant(t, all);
}
KIE_UNSEEN __attribute__((noinline)) static void meet_otherwise(Team& t, u32 kind) {
    fail("%s, while other lanes of its team are at %s", name_of(kind), name_of(t.kind));
}
// All live lanes of the team; `last` is run by the last one before anybody goes on.
template <class F>
KIE_UNSEEN inline void meet(u32 kind, F last) {
    act();
    Team& t = *me->team;
    if (t.arrived == 0) t.kind = kind;
    if (t.kind != kind) meet_otherwise(t, kind);
    t.arrived |= me->bit, t.ready &= ~me->bit;
    if (t.arrived != t.live) return to_next(t);
    last(t);
    complete(t);
    if (!(t.ready & me->bit)) return to_next(t);
    if (--t.fuel == 0) t.fuel = 1 + draw_below(512), preempt();
}
KIE_UNSEEN inline void meet(u32 kind) {
    meet(kind, [](Team&) KIE_UNSEEN {});
}
// All live lanes of the wave, of each team that has any.
KIE_UNSEEN inline void meet_wave() {
    act();
    Team& t = *me->team;
    if (t.arrived == 0) t.kind = kJoin;
    if (t.kind != kJoin) meet_otherwise(t, kJoin);
    t.arrived |= me->bit, t.ready &= ~me->bit;
    Wave& w = *t.wave;
    // Two buffers in rotation: no lane reaches the meeting after the next before all left this one.
    const u8* place = (const u8*)&w.meetings + w.meetings % 2;
    order_release(place);
    bool all = true;
    for (u32 i = 0; i < w.count && all; ++i) {
        const Team& other = w.teams[i];
        all = !other.live || (other.arrived == other.live && other.kind == kJoin);
    }
    if (all) ++w.meetings;
    for (u32 i = 0; i < w.count && all; ++i)
        if (w.teams[i].live) complete(w.teams[i]);
    if (!(t.ready & me->bit)) to_next(t);
    order_acquire(place);
}
// A lane's value for the collective that comes next; the row holds until all have left it.
KIE_UNSEEN inline u32* offer_value(u32 v) {
    Team& t = *me->team;
    u32* row = t.value[t.phase];
    row[me->index] = v;
    return row;
}
KIE_UNSEEN static void open_barrier(Block& b, u32 id) {
    b.arrived[id] = 0, ++b.meetings[id];
    for (u32 i = 0; i < b.team_count; ++i) {
        const u32 all = b.teams[i].at[id];
        b.teams[i].at[id] = 0;
        grant(b.teams[i], all);
    }
}
KIE_UNSEEN __attribute__((noinline)) static void barrier(u32 id, u32 expected) {
    act();
    Team& t = *me->team;
    Block& b = *t.block;
    if (id == 0) expected = b.live;
    t.at[id] |= me->bit, t.ready &= ~me->bit;
    const u32 meeting = b.meetings[id];
    const u8* place = (const u8*)&b.meetings[id] + meeting % 2;  // as in meet_wave
    if (t.at[id] == t.live) order_release(place);
    if (++b.arrived[id] == expected) open_barrier(b, id);
    if (t.ready & me->bit)
        maybe_preempt(2);
    else
        to_next(t);
    if (t.meetings[id] == meeting + 1) return;
    t.meetings[id] = meeting + 1;
    order_acquire(place);
}
// A failed look: the lane is off until others have done something, or time has gone by.
KIE_UNSEEN __attribute__((noinline)) static void wait(const char* at) {
    Team& t = *me->team;
    me->looks = 0, me->waits = at;
    t.waiting |= me->bit, t.polling |= me->bit, t.ready &= ~me->bit;
    to_next(t);
}
// A look at a word. Coming back to the same address is waiting; the address is remembered at each
// power of two, so that a loop over any number of words is found within two rounds.
KIE_UNSEEN inline void look(const void* p, const char* at) {
    if (me->looks && me->anchor == p) wait(at);
    const u32 n = ++me->looks;
    if ((n & (n - 1)) == 0) me->anchor = p;
}

// ---- Copies and slots. A slot's word: phase << 32 | what completes it << 16 | what is missing.
KIE_UNSEEN inline bool passed(const u64* word, u32 parity) { return (*word >> 32 & 1) != parity; }
KIE_UNSEEN inline void arrive(u64* word) {
    const u32 left = (u32)*word & 0xffff, all = (u32)(*word >> 16) & 0xffff;
    if (left == 0) fail("arrival at a slot that slot_init has not seen");
    *word = left > 1 ? *word - 1 : ((*word >> 32) + 1) << 32 | all << 16 | all;
}
KIE_UNSEEN static void put_copy(const Copy& c) {
    Machine& m = machine;
    if (m.copy_count == m.copy_room) {
        m.copy_room = 2 * m.copy_room + 64;
        m.copies = (Copy*)__builtin_realloc(m.copies, m.copy_room * sizeof(Copy));
    }
    m.copies[m.copy_count++] = c;
}
// `arrives`: at the slot, by itself; else it is waited for by arrive_behind.
KIE_UNSEEN __attribute__((noinline)) static void copy(u64* full, void* to, const void* from,
                                                      u32 bytes, bool arrives = true) {
    Machine& m = machine;
    act();
    const Block& b = *me->team->block;
    const u64 at = (u64)((u8*)to - b.shared);
    if (((u64)to | (u64)from | bytes) & 15) fail("copy_async: not 16-byte aligned");
    if (bytes == 0) {  // a share of none
        if (arrives) order_release(full), arrive(full);
        return;
    }
    touch(from, kOwn, "copy_async");
    if (at > m.launch->shared_bytes || at + bytes > m.launch->shared_bytes)
        fail("copy_async: %u bytes at %llu of %llu shared bytes", bytes, at,
             m.launch->shared_bytes);
    for (u32 i = 0; i < m.copy_count; ++i)
        if (m.copies[i].full == full && m.copies[i].by == me && m.copies[i].arrives)
            fail("copy_async into a slot that is still being filled");
    order_read(from, bytes, me->without);
    order_access(to, bytes, true), order_release(full);
    __builtin_memset(to, kPoison, bytes);
    put_copy({full, to, from, bytes, b.index, me, me->asked++, arrives});
    ++me->flying;
    maybe_preempt(2);
}
// Arrives once all is there that this lane asked for so far.
KIE_UNSEEN __attribute__((noinline)) static void arrive_behind(u64* full) {
    act();
    order_release(full);
    if (me->flying == 0)
        arrive(full);
    else
        put_copy({full, nullptr, nullptr, 0, me->team->block->index, me, me->asked++, true});
    maybe_preempt(4);
}
KIE_UNSEEN static void land_one() {
    Machine& m = machine;
    u32 i = draw_below(m.copy_count);
    if (m.copies[i].bytes == 0 && m.copies[i].by->flying > 0) {
        const Copy behind = m.copies[i];  // what it waits for comes first
        for (u32 n = 0; n < m.copy_count; ++n) {
            const Copy& c = m.copies[n];
            if (c.by == behind.by && c.bytes > 0 && c.turn < behind.turn) i = n;
        }
    }
    const Copy c = m.copies[i];
    m.copies[i] = m.copies[--m.copy_count];
    if (c.bytes > 0) --c.by->flying, __builtin_memcpy(c.to, c.from, c.bytes);
    if (c.arrives) arrive(c.full);
    ++m.activity, m.quiet = 0;
    m.schedule = (m.schedule ^ (0x10000 + c.block)) * 0x100000001b3ull;
}

// ---- Lanes from start to end.
KIE_UNSEEN static void leave() {
    act();
    Team& t = *me->team;
    Block& b = *t.block;
    t.live &= ~me->bit, t.ready &= ~me->bit, --b.live;
    if (t.arrived && t.arrived == t.live) {
        if (t.kind == kMma || t.kind == kJoin)
            fail("returns while its team is at %s", name_of(t.kind));
        complete(t);
    }
    if (b.arrived[0] && b.arrived[0] == b.live) open_barrier(b, 0);
    for (u32 i = 0; b.live == 0 && i < machine.copy_count; ++i)
        if (machine.copies[i].block == b.index) fail("the block ends with copies in flight");
    for (;;) to_next(t);
}
KIE_UNSEEN static void run_lane() {
    const Launch& l = *machine.launch;
    l.entry((const u8*)l.args + me->team->block->index / l.blocks * l.args_stride);
    leave();
}

// ---- The scheduler.
KIE_UNSEEN static void resume(Team& t) {
    const u32 later = t.ready & (~0u << t.turn);
    me = t.lanes + __builtin_ctz(later ? later : t.ready);
    ++machine.switches;
    order_enter(t.order);
    change(&machine.stack, me->stack);
    me = nullptr;
}
KIE_UNSEEN static void run_wave(Wave& w) {
    Machine& m = machine;
    m.off = false;
    const u32 first = w.count > 1 ? draw_below(w.count) : 0;
    for (u32 i = 0; i < w.count; ++i)
        w.teams[i].ready |= w.teams[i].polling, w.teams[i].polling = 0,
                                                w.teams[i].turn = draw_below(kTeam);
    for (bool ran = true; ran;) {
        ran = false;
        for (u32 i = 0; i < w.count; ++i) {
            Team& t = w.teams[(first + i) % w.count];
            while (t.ready) {
                ran = true;
                resume(t);
                if (m.off) return;
            }
        }
        if (!m.lock_step || (m.hold && waits(w))) continue;
        if (--w.teams->fuel == 0) {
            w.teams->fuel = 1 + draw_below(512);
            return;
        }
        for (u32 i = 0; i < w.count; ++i) {
            Team& t = w.teams[i];
            if (t.granted) t.ready |= t.granted, t.granted = 0, ran = true;
        }
    }
}
// After its turn.
KIE_UNSEEN static void put_back(Wave& w) {
    u32 ready = 0, polling = 0, live = 0;
    for (u32 i = 0; i < w.count; ++i)
        ready |= w.teams[i].ready, polling |= w.teams[i].polling, live |= w.teams[i].live;
    for (u32 i = 0; i < w.count && !(machine.hold && waits(w)); ++i) ready |= w.teams[i].granted;
    if (live == 0) --machine.live_waves;
    if (live && ready) enlist(w, kRunnable);
    if (live && !ready && polling) w.seen = machine.activity, enlist(w, kPolling);
}
KIE_UNSEEN static Wave* pick() {
    Machine& m = machine;
    const u32 runnable = m.lengths[kRunnable], polling = m.lengths[kPolling];
    if (polling && (!runnable || draw_below(4) == 0)) {
        const u32 first = draw_below(polling), most = runnable && polling > 8 ? 8 : polling;
        for (u32 i = 0; i < most; ++i) {
            Wave* w = m.lists[kPolling][(first + i) % polling];
            if (w->seen != m.activity) return w;
        }
    }
    if (!runnable) return nullptr;
    if (m.steps % 1024 == 0) m.slow_block = draw_below(m.launch->blocks * (u32)m.launch->ranks);
    Wave* w = nullptr;
    for (u32 i = 0; i < 4; ++i) {
        w = m.lists[kRunnable][draw_below(runnable)];
        if (w->teams->block->index != m.slow_block) break;
    }
    return w;
}

struct Text {
    char* at;
    u64 left;
};
KIE_UNSEEN __attribute__((format(printf, 2, 3))) static void say(Text& text, const char* format,
                                                                 ...) {
    __builtin_va_list list;
    __builtin_va_start(list, format);
    const int n = __builtin_vsnprintf(text.at, text.left, format, list);
    __builtin_va_end(list);
    const u64 took = n < 0 ? 0 : (u64)n < text.left ? (u64)n : text.left - (text.left > 0);
    text.at += took, text.left -= took;
}
KIE_UNSEEN static void describe(Text& text, const Team& t) {
    const auto lanes = [&](u32 mask) KIE_UNSEEN {
        const u32 first = t.lanes[0].thread + __builtin_ctz(mask),
                  last = t.lanes[0].thread + 31 - __builtin_clz(mask);
        say(text, "\n  block %u threads %u..%u (%d): ", t.block->index, first, last,
            __builtin_popcount(mask));
    };
    const Block& b = *t.block;
    if (t.polling)
        lanes(t.polling), say(text, "wait in %s", t.lanes[__builtin_ctz(t.polling)].waits);
    if (t.arrived)
        lanes(t.arrived), say(text, "at %s, the team has %d live lanes", name_of(t.kind),
                              __builtin_popcount(t.live));
    if (t.at[0]) lanes(t.at[0]), say(text, "at sync_block, %u of %u there", b.arrived[0], b.live);
    if (t.at[1]) lanes(t.at[1]), say(text, "at sync_consumers, %u there", b.arrived[1]);
    if (t.granted) lanes(t.granted), say(text, "held by a waiting lane of their wave");
}
KIE_UNSEEN static void stuck(const char* why) {
    Machine& m = machine;
    Text text = {m.launch->error, m.launch->error_bytes};
    say(text, "%s", why);
    for (u32 i = 0; i < m.wave_count; ++i)
        for (u32 j = 0; j < m.waves[i].count; ++j)
            if (m.waves[i].teams[j].live && text.left > 160) describe(text, m.waves[i].teams[j]);
    m.failed = true;
}
// Only waiting lanes are left, and all have looked since the last event.
KIE_UNSEEN static void idle() {
    Machine& m = machine;
    if (m.host_seen || m.launch->others) {
        m.host_seen = false, m.quiet = 0, m.since = m.switches;
        const u64 rest = m.launch->host_pace(20000);
        m.now += rest, m.host_ns += rest;
        if (m.host_ns > m.launch->host_ns_max)
            return stuck("no progress: the host lets nobody go on");
    } else {
        const u64 most = m.quiet < kQuietFirst ? 1000000 : 10000000;
        const u64 step = m.quiet < 20 ? kStepNs << m.quiet : most;
        m.now += step < most ? step : most;
        if (++m.quiet > kQuietMax) return stuck("no progress: only waits that never end are left");
    }
    ++m.activity;
}
KIE_UNSEEN static void schedule() {
    Machine& m = machine;
    while (m.live_waves && !m.failed) {
        ++m.steps;
        if (m.switches - m.since > m.launch->switches_max)
            return stuck("the bound on switches is reached");
        m.now += kStepNs;
        if (m.copy_count && draw_below(4) == 0) land_one();
        Wave* w = pick();
        if (!w) {
            if (m.copy_count)
                land_one();
            else if (m.lengths[kPolling])
                idle();
            else
                stuck("deadlock: nobody can go on");
            continue;
        }
        m.schedule = (m.schedule ^ w->index) * 0x100000001b3ull;
        unlist(*w);
        m.acted = false;
        run_wave(*w);
        if (m.acted) ++m.activity, m.quiet = m.host_ns = 0;
        put_back(*w);
    }
}

// ---- Launch.
template <class T>
KIE_UNSEEN T* zeroed(u32 n) {
    return (T*)__builtin_calloc(n, sizeof(T));
}
KIE_UNSEEN static void set_up(Launch& l) {
    Machine& m = machine;
    const u32 teams = (l.threads + kTeam - 1) / kTeam, a_wave = l.warp / kTeam,
              waves = (teams + a_wave - 1) / a_wave;
    const u32 blocks = l.blocks * (u32)l.ranks;
    m = {};
    order_begin((const void*)l.host_pace);
    m.launch = &l, m.now = l.now_ns, m.lock_step = l.warp > kTeam;
    m.hold = l.hold && m.lock_step;
    m.random = (l.seed + 1) * 0x9e3779b97f4a7c15ull | 1;
    for (int i = 0; i < 8; ++i) draw();
    m.schedule = 0xcbf29ce484222325ull, m.wave_count = m.live_waves = blocks * waves;
    m.lanes = zeroed<Lane>(blocks * l.threads), m.teams = zeroed<Team>(blocks * teams);
    m.waves = zeroed<Wave>(m.wave_count), m.blocks = zeroed<Block>(blocks);
    for (int i = 0; i < 3; ++i) m.lists[i] = zeroed<Wave*>(m.wave_count);
    for (u32 i = 0; i < blocks; ++i) {
        Block& b = m.blocks[i];
        b = {m.teams + i * teams, l.shared + i * l.shared_stride, i, teams, l.threads, {}, {}};
        __builtin_memset(b.shared, kPoison, l.shared_bytes);
        for (u32 j = 0; j < teams; ++j) {
            Team& t = b.teams[j];
            Wave& w = m.waves[i * waves + j / a_wave];
            if (j % a_wave == 0) w.teams = &t, w.index = i * waves + j / a_wave;
            ++w.count;
            const u32 lanes = l.threads - j * kTeam < kTeam ? l.threads - j * kTeam : kTeam;
            t.lanes = m.lanes + i * l.threads + j * kTeam, t.wave = &w, t.block = &b;
            t.live = t.ready = ~0u >> (kTeam - lanes), t.fuel = 1 + draw_below(512);
            t.turn = draw_below(kTeam);
            order_start(t.order);
            for (u32 k = 0; k < lanes; ++k) {
                Lane& lane = t.lanes[k];
                lane.team = &t, lane.thread = j * kTeam + k, lane.index = k, lane.bit = 1u << k;
                u8* stack = l.stacks + (u64)(&lane - m.lanes) * l.stack_stride;
                *(u64*)stack = 0x6b69652073696d21ull;
                lane.stack = prepare(stack + 64, l.stack_stride - 64, run_lane);
            }
        }
    }
    for (u32 i = 0; i < m.wave_count; ++i) enlist(m.waves[i], kRunnable);
}
KIE_UNSEEN static void check_stacks(Launch& l) {
    for (u32 i = 0; i < l.blocks * (u32)l.ranks * l.threads; ++i)
        if (*(u64*)(l.stacks + i * l.stack_stride) != 0x6b69652073696d21ull && !machine.failed) {
            __builtin_snprintf(l.error, l.error_bytes, "block %u thread %u: stack overflow",
                               i / l.threads, i % l.threads);
            machine.failed = true;
        }
}
}  // namespace kie_sim

// Runs one launch to its end. 0: ended; 1: `error` says why not.
extern "C" KIE_UNSEEN __attribute__((visibility("default"))) int kie_sim_run(
    kie_sim::Launch* launch) {
    using namespace kie_sim;
    set_up(*launch);
    schedule();
    check_stacks(*launch);
    Machine& m = machine;
    for (u32 i = 0; i < m.wave_count; ++i)
        for (u32 j = 0; j < m.waves[i].count; ++j) order_end(m.waves[i].teams[j].order);
    order_done((const void*)launch->host_pace);
    launch->now_ns = m.now, launch->switches = m.switches, launch->steps = m.steps;
    launch->schedule = m.schedule;
    void* all[] = {m.lanes,    m.teams,    m.waves,    m.blocks,
                   m.lists[0], m.lists[1], m.lists[2], m.copies};
    for (void* p : all) __builtin_free(p);
    return m.failed;
}
#ifdef KIE_SIM_O2
#pragma GCC pop_options
#endif
