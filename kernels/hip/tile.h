// The matrix product of cuda/tile.h on AMD, same fragments: d (16 x 8) += a (16 x 16) b (16 x 8) by
// one team. Lane = 4 g + t; it holds columns {2t.., 2t + 8..} of rows g and g + 8 of a, rows {2t..,
// 2t + 8..} of column g of b, and rows g and g + 8 of columns 2t and 2t + 1 of d.
// Correct everywhere, not tuned: each lane collects its two rows from its four neighbours and its
// two columns from theirs. The matrix unit works on whole waves, of which a team is half.
//
// The order of a sum is that of four shares, one for each lane's columns of a: d + ((s0 + s1) +
// (s2 + s3)). So one column alone, of which each lane makes its own share, has the same bits.
#pragma once

#include "platform.h"

constexpr bool kSumsByTurns = false;  // dot products hardly wait, and a second sum takes registers
KIE_DEVICE float dot(u32 a, u32 b, float onto) {
    return __builtin_amdgcn_fdot2(__builtin_bit_cast(Half2, a), __builtin_bit_cast(Half2, b), onto,
                                  false);
}
// What a lane's four halves of a row give with those of a column.
KIE_DEVICE float share_of(u32 a_low, u32 a_high, u32 b_low, u32 b_high) {
    return dot(a_high, b_high, dot(a_low, b_low, 0));
}
// Lane `kOf` of each four, to all four.
template <int kOf>
KIE_DEVICE u32 of_four(u32 v) {
    return (u32)__builtin_amdgcn_update_dpp(0, (int)v, kOf * 0x55, 0xf, 0xf, true);
}
struct Shares {
    float v[4];
};
template <int kOf>
KIE_DEVICE Shares shares_of(u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const u32 from = 8 * (wave_lane() % 4) + kOf;
    const u32 first_low = of_four<kOf>(a0), first_high = of_four<kOf>(a2);
    const u32 second_low = of_four<kOf>(a1), second_high = of_four<kOf>(a3);
    Shares s;
    KIE_UNROLL for (u32 i = 0; i < 2; ++i) {
        const u32 low = shuffle(b0, from + 4 * i), high = shuffle(b1, from + 4 * i);
        s.v[i] = share_of(first_low, first_high, low, high);
        s.v[2 + i] = share_of(second_low, second_high, low, high);
    }
    return s;
}
KIE_DEVICE Shares operator+(const Shares& a, const Shares& b) {
    return {{a.v[0] + b.v[0], a.v[1] + b.v[1], a.v[2] + b.v[2], a.v[3] + b.v[3]}};
}
KIE_DEVICE void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    // One product after another: fragments collected for several do not fit in the registers.
    asm volatile("" : "+v"(d[0]), "+v"(d[1]), "+v"(d[2]), "+v"(d[3]), "+v"(b0), "+v"(b1));
    const Shares first =
        shares_of<0>(a0, a1, a2, a3, b0, b1) + shares_of<1>(a0, a1, a2, a3, b0, b1);
    const Shares all =
        first + (shares_of<2>(a0, a1, a2, a3, b0, b1) + shares_of<3>(a0, a1, a2, a3, b0, b1));
    KIE_UNROLL for (int i = 0; i < 4; ++i) d[i] += all.v[i];
}

// One column, which is the same in all of b, in a sixth of the instructions; of d only what the
// first column has.
#define KIE_MMA_ALONE
template <int kControl>
KIE_DEVICE float add_of_four(float v) {
    const u32 others = __builtin_amdgcn_update_dpp(0, (int)bits(v), kControl, 0xf, 0xf, true);
    return v + number(others);
}
KIE_DEVICE float add_shares(float v) { return add_of_four<0x4e>(add_of_four<0xb1>(v)); }
KIE_DEVICE void mma_alone(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    // As above: what is decoded for several products does not fit in the registers.
    asm volatile("" : "+v"(d[0]), "+v"(d[2]), "+v"(b0), "+v"(b1));
    d[0] += add_shares(share_of(a0, a2, b0, b1));
    d[2] += add_shares(share_of(a1, a3, b0, b1));
}
