// What orders what, told to ThreadSanitizer where the sources are compiled for it; nothing
// elsewhere.
//
// To the sanitizer each team is one thread (order among a team's lanes is not looked at) and the
// scheduler none. It sees what the compiler sees: plain loads and stores of kernels, not what this
// folder does for them. Order comes from
//   meetings    of a wave and of a block: a thread that leaves knows what all that came had done;
//   slots       what was done before slot_release is known behind slot_free, what was done before
//               a copy was asked for, and the copy, behind slot_filled;
//   fences      as in C++: behind a fence, what others had done before a fence of theirs if one of
//               the words loaded so far was stored behind it;
//   counters    of the grid, which release and acquire;
//   launches    one after another,
// and from nothing else: a word (and what is volatile) carries itself. A copy reads and writes when
// it is issued: an access ordered neither before that nor behind slot_filled races with it.
//
// A thread may say that it reads without some bytes: they may change meanwhile, and it takes what
// should be there from elsewhere.
//
// Words stay where they are from step to step, so a reader must be done with one, in this sense,
// before the word of a later step takes its place. A load that returns the sequence number at which
// its thread works is seen as a read of byte sequence number % 8 of the word, a store as a write of
// the byte of the sequence number that it replaces.
#pragma once

#if defined(__SANITIZE_THREAD__)
#define KIE_UNSEEN __attribute__((no_sanitize("thread")))
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* at);
void __tsan_release(void* at);
void __tsan_read_range(void* at, unsigned long bytes);
void __tsan_write_range(void* at, unsigned long bytes);
void __tsan_func_entry(void* caller);
void __tsan_func_exit();
}
namespace kie_sim {

constexpr bool kOrders = true;
constexpr unsigned kNoSync = 1;  // a switch orders nothing
// A team: itself, itself as of its last fence, and what the words that it loaded carry.
struct Order {
    void *self, *before, *loaded;
    char at_before, at_loaded;
};
// `count` times `bytes` bytes, `stride` apart.
struct Without {
    const unsigned char* at;
    unsigned bytes, stride, count;
};
static void* order_home;  // the scheduler's
static Order* order_now;
static bool order_fenced;  // there was a fence in this launch

KIE_UNSEEN inline void order_switch(void* fiber) { __tsan_switch_to_fiber(fiber, kNoSync); }
KIE_UNSEEN inline void order_start(Order& o) { o.self = __tsan_create_fiber(0); }
KIE_UNSEEN inline void order_enter(Order& o) { order_now = &o, order_switch(o.self); }
KIE_UNSEEN inline void order_leave() { order_now = nullptr, order_switch(order_home); }
KIE_UNSEEN inline void order_release(const void* at) { __tsan_release((void*)at); }
KIE_UNSEEN inline void order_acquire(const void* at) { __tsan_acquire((void*)at); }
// `all`: an address that all launches share.
KIE_UNSEEN inline void order_begin(const void* all) {
    order_home = __tsan_get_current_fiber(), order_fenced = false;
    order_acquire(all);
}
KIE_UNSEEN inline void order_end(Order& o) {
    order_enter(o), order_release(&o.at_before), order_leave(), order_acquire(&o.at_before);
    __tsan_destroy_fiber(o.self);
    if (o.before) __tsan_destroy_fiber(o.before);
    if (o.loaded) __tsan_destroy_fiber(o.loaded);
}
KIE_UNSEEN inline void order_done(const void* all) { order_release(all); }

// Reports name the functions that the frame stands in.
KIE_UNSEEN static inline void order_frames(void** frame, int left) {
    if (left > 1) order_frames((void**)frame[0], left - 1);
    __tsan_func_entry(frame[1]);
}
constexpr int kFrames = 3;
KIE_UNSEEN __attribute__((noinline)) static void order_access(const void* at, unsigned long bytes,
                                                              bool write) {
    order_frames((void**)__builtin_frame_address(0), kFrames);
    if (write)
        __tsan_write_range((void*)at, bytes);
    else
        __tsan_read_range((void*)at, bytes);
    for (int i = 0; i < kFrames; ++i) __tsan_func_exit();
}

KIE_UNSEEN inline bool order_without(const Without& w, const unsigned char* p) {
    const unsigned long off = (unsigned long)(p - w.at);
    if (p < w.at || w.count == 0) return false;
    return w.stride ? off / w.stride < w.count && off % w.stride < w.bytes : off < w.bytes;
}
// A read of whole quads, without those bytes.
KIE_UNSEEN static void order_read(const void* from, unsigned long bytes, const Without (&w)[2]) {
    const unsigned char* p = (const unsigned char*)from;
    for (unsigned long done = 0, at = 0; at < bytes; done = ++at) {
        while (at < bytes && !order_without(w[0], p + at) && !order_without(w[1], p + at)) ++at;
        if (at > done) order_access(p + done, at - done, false);
    }
}

KIE_UNSEEN static void order_fence(bool& lane_fenced) {
    Order& o = *order_now;
    if (o.loaded) {
        order_switch(o.loaded), order_release(&o.at_loaded);
        order_switch(o.self), order_acquire(&o.at_loaded);
    }
    if (!o.before) o.before = __tsan_create_fiber(0);
    order_release(&o.at_before), order_switch(o.before);
    order_acquire(&o.at_before), order_switch(o.self);
    lane_fenced = order_fenced = true;
}
// A word goes out, or comes in.
KIE_UNSEEN inline void order_sent(const void* at, bool lane_fenced) {
    if (!lane_fenced) return;
    order_switch(order_now->before), order_release(at), order_switch(order_now->self);
}
KIE_UNSEEN inline void order_seen(const void* at) {
    Order& o = *order_now;
    if (!order_fenced) return;
    if (!o.loaded) o.loaded = __tsan_create_fiber(0);
    order_switch(o.loaded), order_acquire(at), order_switch(o.self);
}
KIE_UNSEEN inline void order_took(const void* at, unsigned seqno) {
    order_access((const char*)at + seqno % 8, 1, false);
}
KIE_UNSEEN inline void order_put(const void* at, unsigned seqno, unsigned old) {
    if (old != 0 && (seqno - old) % 8 != 0) order_access((const char*)at + old % 8, 1, true);
}
}  // namespace kie_sim
#else
#define KIE_UNSEEN
// GCC optimises parts of a file when it is told to, if it optimises at all.
#ifdef __OPTIMIZE__
#ifndef __clang__
#define KIE_SIM_O2
#endif
#endif
namespace kie_sim {
constexpr bool kOrders = false;
struct Order {};
struct Without {
    const unsigned char* at;
    unsigned bytes, stride, count;
};
inline void order_start(Order&) {}
inline void order_enter(Order&) {}
inline void order_leave() {}
inline void order_release(const void*) {}
inline void order_acquire(const void*) {}
inline void order_begin(const void*) {}
inline void order_end(Order&) {}
inline void order_done(const void*) {}
inline void order_access(const void*, unsigned long, bool) {}
inline void order_read(const void*, unsigned long, const Without (&)[2]) {}
inline void order_fence(bool&) {}
inline void order_sent(const void*, bool) {}
inline void order_seen(const void*) {}
inline void order_took(const void*, unsigned) {}
inline void order_put(const void*, unsigned, unsigned) {}
}  // namespace kie_sim
#endif
