// The matrix product of cuda/tile.h on AMD, same fragments: d (16 x 8) += a (16 x 16) b (16 x 8) by
// one team. Lane = 4 g + t; it holds columns {2t.., 2t + 8..} of rows g and g + 8 of a, rows {2t..,
// 2t + 8..} of column g of b, and rows g and g + 8 of columns 2t and 2t + 1 of d.
// Correct everywhere, not tuned: each lane collects its two rows from its four neighbours and its
// two columns from theirs and adds products of two halves at a time, in the order of k. The matrix
// unit works on whole waves, of which a team is half.
#pragma once

#include "platform.h"

// Lane `kOf` of each four, to all four.
template <int kOf>
KIE_DEVICE Half2 of_four(u32 v) {
    return __builtin_bit_cast(Half2,
                              __builtin_amdgcn_update_dpp(0, (int)v, kOf * 0x55, 0xf, 0xf, true));
}
template <int kOf>
KIE_DEVICE void mma_part(float (&d)[4], u32 a_first, u32 a_second, u32 b) {
    const u32 t = wave_lane() % 4;
    const Half2 a0 = of_four<kOf>(a_first), a1 = of_four<kOf>(a_second);
    const Half2 b0 = __builtin_bit_cast(Half2, shuffle(b, 8 * t + kOf)),
                b1 = __builtin_bit_cast(Half2, shuffle(b, 8 * t + 4 + kOf));
    d[0] = __builtin_amdgcn_fdot2(a0, b0, d[0], false);
    d[1] = __builtin_amdgcn_fdot2(a0, b1, d[1], false);
    d[2] = __builtin_amdgcn_fdot2(a1, b0, d[2], false);
    d[3] = __builtin_amdgcn_fdot2(a1, b1, d[3], false);
}
KIE_DEVICE void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    // One product after another: fragments collected for several do not fit in the registers.
    asm volatile("" : "+v"(d[0]), "+v"(d[1]), "+v"(d[2]), "+v"(d[3]), "+v"(b0), "+v"(b1));
    mma_part<0>(d, a0, a1, b0), mma_part<1>(d, a0, a1, b0);
    mma_part<2>(d, a0, a1, b0), mma_part<3>(d, a0, a1, b0);
    mma_part<0>(d, a2, a3, b1), mma_part<1>(d, a2, a3, b1);
    mma_part<2>(d, a2, a3, b1), mma_part<3>(d, a2, a3, b1);
}
