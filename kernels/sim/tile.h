// The matrix unit in the simulator: kernels/cuda/tile.h says which lane holds what. Products of
// halves are exact as floats; the sums are floats, in the order of the columns.
#pragma once

#include "platform.h"

constexpr bool kSumsByTurns = true;
namespace kie_sim {
// As in fibers.h.
#ifdef KIE_SIM_O2
#pragma GCC push_options
#pragma GCC optimize("O2")
#endif
typedef float Row __attribute__((vector_size(32)));
struct Tile {
    u32 a[4], b[2];
    float* d;
};
__attribute__((noinline)) static void multiply(Team& t) {
    if (t.live != ~0u) fail("mma in a team with lanes that have left");
    float a[16][16];
    Row b[16], d[16];
    for (u32 i = 0; i < kTeam; ++i) {
        const Tile& in = *(const Tile*)t.lanes[i].inputs;
        const u32 g = i / 4, c = 2 * (i % 4);
        for (u32 j = 0; j < 4; ++j) {
            float* to = &a[g + 8 * (j & 1)][c + 4 * (j & 2)];
            unpack_half2(in.a[j], to[0], to[1]);
            d[g + 4 * (j & 2)][c + (j & 1)] = in.d[j];
        }
        for (u32 j = 0; j < 2; ++j) {
            float lo, hi;
            unpack_half2(in.b[j], lo, hi);
            b[c + 8 * j][g] = lo, b[c + 8 * j + 1][g] = hi;
        }
    }
    for (u32 i = 0; i < 16; ++i) {
        Row sum = d[i];
        for (u32 k = 0; k < 16; ++k) sum += a[i][k] * b[k];
        d[i] = sum;
    }
    for (u32 i = 0; i < kTeam; ++i) {
        const Tile& in = *(const Tile*)t.lanes[i].inputs;
        for (u32 j = 0; j < 4; ++j) in.d[j] = d[i / 4 + 4 * (j & 2)][2 * (i % 4) + (j & 1)];
    }
}
}  // namespace kie_sim

KIE_DEVICE void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const kie_sim::Tile tile = {{a0, a1, a2, a3}, {b0, b1}, d};
    kie_sim::me->inputs = &tile;
    kie_sim::meet(kie_sim::kMma, kie_sim::multiply);
}
#ifdef KIE_SIM_O2
#pragma GCC pop_options
#endif
