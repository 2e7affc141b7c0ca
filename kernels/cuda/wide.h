// Wide tiles, for four neighbouring warps (a team) at once: d (64 x n) += a (64 x 16) b (16 x n);
// on Hopper by one instruction (wgmma), while the warps go on (kWideAsync), elsewhere each warp its
// own rows (mma).
// `a` is each warp's own 16 rows in registers, as above; b lies in shared memory as cores of 8
// columns x 8 rows of halves (128 bytes: column after column, 16 bytes each), `along` bytes between
// cores that are neighbours along k and `across` between those of neighbouring columns. d: group j
// of 8 columns in d[4 j ..], each as above. Nothing of d or a may be touched between wide_begin and
// the wide_wait that says it is done; shared memory written by threads needs writes_before_tiles.
#pragma once

#include "platform.h"
#include "tile.h"

#if __CUDA_ARCH__ == 900
constexpr bool kWideAsync = true;

// The operand lists of the instructions: one register a float of d.
#define KIE_NAMES_16 "%0,%1,%2,%3,%4,%5,%6,%7"
#define KIE_NAMES_32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define KIE_NAMES_64                                                                        \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23" \
    ",%24,%25,%26,%27,%28,%29,%30,%31"
#define KIE_NAMES_128                                                                       \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23" \
    ",%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44"  \
    ",%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define KIE_NAMES_256                                                                         \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23"   \
    ",%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44"    \
    ",%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65"    \
    ",%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86"    \
    ",%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106" \
    ",%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123"   \
    ",%124,%125,%126,%127"
#define KIE_IO8(i)                                                                              \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define KIE_IO16(i) KIE_IO8(i), KIE_IO8(i + 8)
#define KIE_IO32(i) KIE_IO16(i), KIE_IO16(i + 16)
#define KIE_IO64(i) KIE_IO32(i), KIE_IO32(i + 32)
#define KIE_WIDE(n, names, a, b, one, ...)                                                         \
    asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, " one                                         \
                 ", 0;\n"                                                                          \
                 " wgmma.mma_async.sync.aligned.m64n" n "k16.f32.f16.f16 {" names "}, {" a "}, " b \
                 ", p, 1, 1, 0;\n}"                                                                \
                 : __VA_ARGS__                                                                     \
                 : "r"(q.v[0]), "r"(q.v[1]), "r"(q.v[2]), "r"(q.v[3]), "l"(where.v),               \
                   "r"(kFresh ? 0 : 1))

// Where b lies.
struct WideOperand {
    u64 v;
};
KIE_DEVICE WideOperand wide_operand(const void* p, u32 along, u32 across) {
    return {(u64)(shared_address(p) >> 4 & 0x3fff) | (u64)(along >> 4) << 16 |
            (u64)(across >> 4) << 32};
}
KIE_DEVICE WideOperand wide_shift(WideOperand b, u32 bytes) { return {b.v + (bytes >> 4)}; }

// kN columns into d[kAt ..], or, fresh, over what was there; pieces of a power of two, since few
// counts have an instruction here.
template <int kN, int kAt, bool kFresh = false, int kAll>
KIE_DEVICE void multiply_wide(float (&all)[kAll], const Quad& q, WideOperand where, u32 across) {
    float* d = all + kAt;
    if constexpr (kN == 256)
        KIE_WIDE("256", KIE_NAMES_256, "%128,%129,%130,%131", "%132", "%133", KIE_IO64(0),
                 KIE_IO64(64));
    else if constexpr (kN == 128)
        KIE_WIDE("128", KIE_NAMES_128, "%64,%65,%66,%67", "%68", "%69", KIE_IO64(0));
    else if constexpr (kN == 64)
        KIE_WIDE("64", KIE_NAMES_64, "%32,%33,%34,%35", "%36", "%37", KIE_IO32(0));
    else if constexpr (kN == 32)
        KIE_WIDE("32", KIE_NAMES_32, "%16,%17,%18,%19", "%20", "%21", KIE_IO16(0));
    else if constexpr (kN == 16)
        KIE_WIDE("16", KIE_NAMES_16, "%8,%9,%10,%11", "%12", "%13", KIE_IO8(0));
    else {
        constexpr int kPiece = kN > 128 ? 128 : kN > 64 ? 64 : kN > 32 ? 32 : 16;
        static_assert(kN % 16 == 0, "whole pieces");
        multiply_wide<kPiece, kAt, kFresh>(all, q, where, across);
        multiply_wide<kN - kPiece, kAt + kPiece / 2, kFresh>(
            all, q, wide_shift(where, kPiece / 8 * across), across);
    }
}
// The same with `a` in shared memory, too, cores of all 64 rows.
template <int kN, int kAt, bool kFresh = false, int kAll>
KIE_DEVICE void multiply_wide(float (&all)[kAll], const WideOperand& a, WideOperand where, u32) {
    static_assert(kN == 64, "what is multiplied so");
    float* d = all + kAt;
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.u32 p, %34, 0;\n"
        " wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" KIE_NAMES_64
        "}, %32, %33, p, 1, 1, 0, 0;\n}"
        : KIE_IO32(0)
        : "l"(a.v), "l"(where.v), "r"(kFresh ? 0 : 1));
}
#undef KIE_WIDE
#undef KIE_IO64
#undef KIE_IO32
#undef KIE_IO16
#undef KIE_IO8

KIE_DEVICE void wide_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
KIE_DEVICE void wide_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All but the newest kLeft groups are done.
template <int kLeft>
KIE_DEVICE void wide_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}
// The same, and d may be read: the compiler must not read it earlier.
template <int kLeft, int kAll>
KIE_DEVICE void wide_wait(float (&d)[kAll]) {
    wide_wait<kLeft>();
    KIE_UNROLL for (int i = 0; i < kAll; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int kAll>
KIE_DEVICE void wide_finish(float (&d)[kAll]) {
    wide_wait<0>(d);
}
#undef KIE_NAMES_16
#undef KIE_NAMES_32
#undef KIE_NAMES_64
#undef KIE_NAMES_128
#undef KIE_NAMES_256
#else
constexpr bool kWideAsync = false;

// Where this lane's row of the next four cores lies: two neighbours along k, of two groups of eight
// columns. A core is what ldmatrix reads, and 128 bytes in a row, so no two lanes share a bank.
struct WideOperand {
    u32 v;
};
KIE_DEVICE WideOperand wide_operand(const void* p, u32 along, u32 across) {
    const u32 my = lane();
    return {shared_address(p) + my % 8 * 16 + my / 8 % 2 * along + my / 16 * across};
}
KIE_DEVICE WideOperand wide_shift(WideOperand b, u32 bytes) { return {b.v + bytes}; }
KIE_DEVICE void load_cores(u32 from, u32 (&b)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                 : "r"(from));
}
template <int kN, int kAt, bool kFresh = false, int kAll>
KIE_DEVICE void multiply_wide(float (&all)[kAll], const Quad& q, WideOperand where, u32 across) {
    static_assert(kN % 16 == 0 && kAt + kN / 2 <= kAll, "whole pairs of groups");
    KIE_UNROLL for (int j = 0; j < kN / 16; ++j) {
        u32 b[4];
        load_cores(where.v + 2 * j * across, b);
        KIE_UNROLL for (int i = 0; i < 2; ++i) {
            float (&d)[4] = *(float (*)[4])(all + kAt + 8 * j + 4 * i);
            if (kFresh) d[0] = d[1] = d[2] = d[3] = 0;
            mma(d, q.v[0], q.v[1], q.v[2], q.v[3], b[2 * i], b[2 * i + 1]);
        }
    }
}
// What several row tiles take of shared memory is asked for once.
#define KIE_MULTIPLY_TILES
template <int kN, int kTurns, int kAll>
KIE_DEVICE void multiply_tiles(float (&all)[kAll], const Quad (&a)[kTurns][2], int half,
                               const WideOperand& where, u32 across) {
    static_assert(kN % 16 == 0 && kTurns * (kN / 2) <= kAll, "whole pairs of groups");
    KIE_UNROLL for (int j = 0; j < kN / 16; ++j) {
        u32 b[4];
        load_cores(where.v + 2 * j * across, b);
        KIE_UNROLL for (int m = 0; m < kTurns; ++m) {
            const Quad& q = a[m][half];
            KIE_UNROLL for (int i = 0; i < 2; ++i) {
                float (&d)[4] = *(float (*)[4])(all + m * (kN / 2) + 8 * j + 4 * i);
                mma(d, q.v[0], q.v[1], q.v[2], q.v[3], b[2 * i], b[2 * i + 1]);
            }
        }
    }
}
KIE_DEVICE void wide_begin() {}
KIE_DEVICE void wide_commit() {}
// What one of a warp's threads does behind them, all have come to.
template <int kLeft>
KIE_DEVICE void wide_wait() {
    __syncwarp();
}
template <int kLeft, int kAll>
KIE_DEVICE void wide_wait(float (&)[kAll]) {
    __syncwarp();
}
template <int kAll>
KIE_DEVICE void wide_finish(float (&)[kAll]) {
    __syncwarp();
}
#endif

#if __CUDA_ARCH__ >= 900
// Before the block's barrier, by every thread that wrote what tiles or copies will read next: in
// shared memory, and anywhere.
KIE_DEVICE void writes_before_tiles() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
KIE_DEVICE void writes_before_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Who fills a stage. One thread says its size, and engines copy, as single threads ask, and count.
// Or (kTeamStages) warps copy: stage_copy is then for all lanes at once, with no bytes for those
// that have nothing to bring, and each thread of the team fills, behind its part (stage_asked).
constexpr bool kTeamStages = false;
KIE_DEVICE void stage_asked(Slot*) {}
// A stage made of several copies: its size is said first.
KIE_DEVICE void stage_expect(Slot* s, u32 bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&s->full)),
        "r"(bytes)
        : "memory");
}
KIE_DEVICE void stage_copy(Slot* s, void* to, const void* from, u32 bytes) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(&s->full))
        : "memory");
}
// The same of bytes that are read once: evicted first.
KIE_DEVICE void stage_copy(Slot* s, void* to, const void* from, u32 bytes, StreamPolicy policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(&s->full)), "l"(policy.v)
        : "memory");
}
#else
// Tiles and copies are reads and writes of the threads that ask for them.
KIE_DEVICE void writes_before_tiles() {}
KIE_DEVICE void writes_before_copies() {}

constexpr bool kTeamStages = true;
KIE_DEVICE void stage_expect(Slot*, u32) {}
// What each lane has to bring is copied by all of them, 16 bytes each.
KIE_DEVICE void stage_copy(Slot*, void* to, const void* from, u32 bytes) {
    const u32 skip = 16 * lane();
    u32 left = ballot(bytes > 0);
    while (left != 0) {
        const u32 who = __ffs(left) - 1, all = shuffle(bytes, who),
                  target = shuffle(shared_address(to), who);
        const u64 low = shuffle((u32)(u64)from, who), high = shuffle((u32)((u64)from >> 32), who);
        const u8* source = (const u8*)(high << 32 | low);
        left &= left - 1;
#pragma unroll 4
        for (u32 at = skip; at < all; at += 16 * kWarp)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target + at),
                         "l"(source + at)
                         : "memory");
    }
}
KIE_DEVICE void stage_copy(Slot* s, void* to, const void* from, u32 bytes, StreamPolicy) {
    stage_copy(s, to, from, bytes);
}
// Arrives once what this thread asked for so far is there.
KIE_DEVICE void stage_asked(Slot* s) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&s->full))
                 : "memory");
}
#endif
// What threads that run together have alike: here nobody has to be told.
template <class T>
KIE_DEVICE T of_wave(T v) {
    return v;
}
KIE_DEVICE u32 word_at(const Quad& q, int i) { return q.v[i]; }
// Before the block's barrier, by every thread, where one of them tells others what all wrote: here
// its fence says it for all.
KIE_DEVICE void writes_before_telling() {}
// 16 bytes into shared memory, done by the thread's own quads_here, which
// is followed by slot_fill where a slot is filled that way; never from a cache that is not
// coherent.
KIE_DEVICE void quad_copy(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
                 : "memory");
}
KIE_DEVICE void quads_here() { asm volatile("cp.async.wait_all;" ::: "memory"); }
KIE_DEVICE void slot_fill(Slot* s) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&s->full))
                 : "memory");
#else
    asm volatile("{\n .reg .b64 state;\n mbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(
                     shared_address(&s->full))
                 : "memory");
#endif
}

// Bytes of shared memory to memory of any rank, under way when this returns; threads that wrote
// them call writes_before_tiles before. A thread's copies since its last push_commit are a group:
// of all but its newest kLeft groups the bytes have been read, or are where they belong and ordered
// like what the thread wrote itself.
#if __CUDA_ARCH__ >= 900
KIE_DEVICE void push_copy(void* to, const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                 "r"(shared_address(from)), "r"(bytes)
                 : "memory");
}
KIE_DEVICE void push_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int kLeft>
KIE_DEVICE void push_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
}
KIE_DEVICE void push_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
#else
KIE_DEVICE void push_copy(void* to, const void* from, u32 bytes) {
    for (u32 at = 0; at < bytes; at += 16)
        store_state((u8*)to + at, *(const Quad*)((const u8*)from + at));
}
KIE_DEVICE void push_commit() {}
template <int kLeft>
KIE_DEVICE void push_read() {}
KIE_DEVICE void push_done() {}
#endif

// One more arrival of a block, after its fence.
KIE_DEVICE void count_up(u64* p) {
    asm volatile("red.release.gpu.global.add.u64 [%0], 1;" ::"l"(p) : "memory");
}

// The same, saying how many were there before; orders what the caller's fences say.
KIE_DEVICE u64 count_in(u64* p) {
    u64 v;
    asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], 1;" : "=l"(v) : "l"(p) : "memory");
    return v;
}

// Registers move from teams that copy to teams that multiply; by whole teams.
#if __CUDA_ARCH__ >= 900
template <u32 kCount>
KIE_DEVICE void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <u32 kCount>
KIE_DEVICE void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
#else
template <u32 kCount>
KIE_DEVICE void more_registers() {}
template <u32 kCount>
KIE_DEVICE void fewer_registers() {}
#endif
