// What kernels/hip promises between lanes and between waves, run on the host: the very headers,
// with clang's builtins for the device replaced by their documented meaning. Lanes of a wave are
// threads that meet at each exchange; waves are threads that run freely. It sees wrong lanes, wrong
// fragments and a wrong slot protocol, not the memory model of the device.
#include <barrier>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

constexpr int kLanesOfWave = 64;
static std::barrier wave_meets(kLanesOfWave);
static int exchanged[kLanesOfWave];
static thread_local int my_lane;

static int from_lane(int value, int lane) {
    exchanged[my_lane] = value;
    wave_meets.arrive_and_wait();
    const int got = exchanged[lane];
    wave_meets.arrive_and_wait();
    return got;
}
static int by_swizzle(int value, int pattern) {
    const int low = (((my_lane & 31 & pattern) | (pattern >> 5 & 31)) ^ (pattern >> 10 & 31));
    return from_lane(value, (my_lane & 32) | low);
}
static int by_quad(int value, int control) {
    return from_lane(value, (my_lane & ~3) | (control >> 2 * (my_lane & 3) & 3));
}
static unsigned long long by_ballot(bool yes) {
    unsigned long long all = 0;
    for (int i = 0; i < kLanesOfWave; ++i) all |= (unsigned long long)from_lane(yes, i) << i;
    return all;
}

// Bytes of the lower operand, or 0.
static unsigned by_bytes(unsigned value, unsigned select) {
    unsigned out = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned from = select >> 8 * i & 0xff;
        if (from < 4) out |= (value >> 8 * from & 0xff) << 8 * i;
    }
    return out;
}

#define asm
#define volatile(...) ((void)0)
#define __builtin_amdgcn_workitem_id_x() (unsigned)my_lane
#define __builtin_amdgcn_workgroup_id_x() 0u
#define __builtin_amdgcn_mbcnt_lo(mask, base) 0u
#define __builtin_amdgcn_mbcnt_hi(mask, base) (unsigned)my_lane
#define __builtin_amdgcn_fence(order, scope) __atomic_thread_fence(order)
#define __builtin_amdgcn_s_barrier() ((void)0)
#define __builtin_amdgcn_wave_barrier() ((void)0)
#define __builtin_amdgcn_ds_bpermute(at, value) from_lane(value, ((at) / 4) % kLanesOfWave)
#define __builtin_amdgcn_ds_swizzle(value, pattern) by_swizzle(value, pattern)
#define __builtin_amdgcn_update_dpp(old, value, control, row, bank, bound) by_quad(value, control)
#define __builtin_amdgcn_ballot_w64(yes) by_ballot(yes)
#define __builtin_amdgcn_readfirstlane(value) (value)
#define __builtin_amdgcn_fdot2(a, b, c, clamp) \
    ((float)(a).x * (float)(b).x + (float)(a).y * (float)(b).y + (c))
#define __builtin_amdgcn_perm(high, low, select) by_bytes(low, select)
#define __builtin_amdgcn_s_sleep(n) std::this_thread::yield()
#define __builtin_amdgcn_s_memrealtime() 0ull
#define __builtin_amdgcn_exp2f(x) __builtin_exp2f(x)
#define __builtin_amdgcn_logf(x) __builtin_log2f(x)
#define __builtin_amdgcn_rcpf(x) (1.0f / (x))
#define __builtin_amdgcn_rsqf(x) (1.0f / __builtin_sqrtf(x))
#define __hip_atomic_load(p, order, scope) (std::this_thread::yield(), __atomic_load_n(p, order))
#define __hip_atomic_store(p, v, order, scope) __atomic_store_n(p, v, order)
#define __hip_atomic_fetch_add(p, v, order, scope) __atomic_fetch_add(p, v, order)
#include "hip/platform.h"
#include "hip/tile.h"
#undef asm
#undef volatile

static void want(bool ok, const char* what, int at, double got, double wanted) {
    if (ok) return;
    std::printf("%s at %d: got %g, wanted %g\n", what, at, got, wanted);
    std::exit(1);
}
static void together(int count, const std::function<void(int)>& run) {
    std::vector<std::thread> all;
    for (int i = 0; i < count; ++i) all.emplace_back([&run, i] { run(i); });
    for (std::thread& one : all) one.join();
}

// Small whole numbers: every product and sum is exact. Each team has its own matrices.
static int in_a(int team, int row, int k) { return (row * 7 + k * 3 + team * 5) % 9 - 4; }
static int in_b(int team, int k, int column) { return (k * 5 + column * 11 + team * 3) % 7 - 3; }
static void fragments(int lane_of_wave) {
    my_lane = lane_of_wave;
    const int team = my_lane / 32, g = my_lane % 32 / 4, t = my_lane % 4;
    const auto a = [&](int row, int k) {
        return pack_half2(in_a(team, row, k), in_a(team, row, k + 1));
    };
    const auto b = [&](int k) { return pack_half2(in_b(team, k, g), in_b(team, k + 1, g)); };
    float d[4] = {1, 2, 3, 4};
    mma(d, a(g, 2 * t), a(g + 8, 2 * t), a(g, 2 * t + 8), a(g + 8, 2 * t + 8), b(2 * t),
        b(2 * t + 8));
    for (int i = 0; i < 4; ++i) {
        const int row = g + 8 * (i / 2), column = 2 * t + i % 2;
        float wanted = 1 + i;
        for (int k = 0; k < 16; ++k) wanted += in_a(team, row, k) * in_b(team, k, column);
        want(d[i] == wanted, "mma", my_lane, d[i], wanted);
    }
}
// Numbers whose sums are rounded: one column alone has the bits that it has beside seven others.
static u32 rounded(int seed) {
    return pack_half2((float)(seed * 37 % 101 - 50) / 7, (float)(seed * 53 % 97 - 48) / 11);
}
static void one_column(int lane_of_wave) {
    my_lane = lane_of_wave;
    const int g = my_lane % 32 / 4, t = my_lane % 4;
    float beside[4] = {0.1f, 0, 0.3f, 0}, alone[4] = {0.1f, 0, 0.3f, 0};
    for (int n = 0; n < 9; ++n) {
        u32 a[4];
        for (int i = 0; i < 4; ++i) a[i] = rounded(my_lane * 4 + i + n * 300);
        const int b = 1000 + n * 8 + t;
        // Seven columns are others than the first.
        mma(beside, a[0], a[1], a[2], a[3], rounded(b + g * 700), rounded(b + 4 + g * 900));
        mma_alone(alone, a[0], a[1], a[2], a[3], rounded(b), rounded(b + 4));
    }
    // Lane 0 of each four has the first column.
    for (int i = 0; t == 0 && i < 4; i += 2)
        want(bits(alone[i]) == bits(beside[i]), "mma_alone", my_lane, alone[i], beside[i]);
}
static void lanes(int lane_of_wave) {
    my_lane = lane_of_wave;
    const u32 base = my_lane & 32, mine = lane();
    want(mine == (u32)my_lane % 32, "lane", my_lane, mine, my_lane % 32);
    for (u32 mask = 1; mask < 32; ++mask) {
        const u32 got = shuffle_xor((u32)my_lane + 100, mask), wanted = (my_lane ^ mask) + 100;
        want(got == wanted, "shuffle_xor", my_lane, got, wanted);
    }
    for (u32 i = 0; i < 32; ++i) {
        const u32 from = (mine * 5 + i) % 32;
        const float got = shuffle((float)my_lane, from);
        want(got == base + from, "shuffle", my_lane, got, base + from);
    }
    const u32 votes = ballot(my_lane % 3 == 0);
    for (u32 i = 0; i < 32; ++i)
        want((votes >> i & 1) == ((base + i) % 3 == 0), "ballot", my_lane, votes, i);
}
static void numbers() {
    float a, b;
    unpack_half2(pack_half2(1.0f + 1.0f / 2048, -3.5f), a, b);
    want(a == 1.0f && b == -3.5f, "pack_half2 rounds to even", 0, a, 1);
    unpack_half2(pack_half2(1.0f + 3.0f / 2048, 6e-8f), a, b);
    want(a == 1.0f + 2.0f / 1024, "pack_half2 rounds to even", 1, a, 1.0f + 2.0f / 1024);
    want(b > 5.9e-8f && b < 6.0e-8f, "small halves live", 1, b, 5.96e-8);
    u32 halves[2];
    for (int code = 0; code < 256; ++code) {
        const int exponent = code >> 3 & 15, mantissa = code & 7;
        const double size =
            exponent ? (8 + mantissa) * std::exp2(exponent - 10) : mantissa * std::exp2(-9);
        const double wanted = code < 128 ? size : -size;
        unpack_f8(0x7f000000 | code << 16 | code << 8 | 0x38, halves[0], halves[1]);
        unpack_half2(halves[0], a, b);
        want(a == 1 && ((code & 127) == 127 ? b != b : b == wanted), "e4m3", code, b, wanted);
        unpack_half2(halves[1], a, b);
        want(b != b && ((code & 127) == 127 || a == wanted), "e4m3", code, a, wanted);
    }
}

// One thread a wave, as its lane 0.
static void meetings() {
    constexpr int kWaves = 6, kRounds = 3000;
    slots_ready();
    std::vector<int> seen(kWaves, 0);
    together(kWaves, [&](int wave) {
        my_lane = 0;
        for (int round = 1; round <= kRounds; ++round) {
            seen[wave] = round;
            sync_consumers<kWaves * 64>();
            for (int other : seen) want(other == round, "sync_consumers", wave, other, round);
            sync_consumers<kWaves * 64>();
        }
    });
}
static void ring() {
    constexpr int kSlots = 3, kTeams = 4, kStages = 2000, kBytes = 256;
    alignas(16) static u8 bytes[kSlots][kBytes];
    static Slot slots[kSlots];
    for (Slot& s : slots) slot_init(&s, kTeams);
    want(!slot_filled(slots, 0), "an empty slot's first phase", 0, 1, 0);
    want(slot_filled(slots, 1) && slot_free(slots, 1), "the phase before", 0, 0, 1);
    together(kTeams + 1, [&](int who) {
        for (int stage = 0; stage < kStages; ++stage) {
            Slot* s = slots + stage % kSlots;
            u8* slot = bytes[stage % kSlots];
            const u32 parity = stage / kSlots & 1;
            if (who == kTeams) {
                while (!slot_free(s, parity ^ 1)) {
                }
                reads_before_copy();
                // Copies are instructions of the device; an emulator of it runs those.
                for (int i = 0; i < kBytes; ++i) slot[i] = (u8)(stage * 3 + i);
                count_up(s->filled);
            } else {
                while (!slot_filled(s, parity)) {
                }
                for (int i = 0; i < kBytes; ++i)
                    want(slot[i] == (u8)(stage * 3 + i), "stage", stage, slot[i], stage * 3 + i);
                slot_release(s);
            }
        }
    });
}

int main() {
    together(kLanesOfWave, lanes);
    together(kLanesOfWave, fragments);
    together(kLanesOfWave, one_column);
    numbers(), meetings(), ring();
    std::printf("passed\n");
}
