// The matrix unit on CUDA. d (16 x 8) += a (16 x 16) b (16 x 8), halves in, floats out.
// Lane = 4 g + t. a: {row g, row g + 8} x {columns 2t.., 2t + 8..} as {g lo, g + 8 lo, g hi, g + 8
// hi}; b: column g, rows {2t.., 2t + 8..}; d: {row g: columns 2t, 2t + 1; row g + 8: the same}.
#pragma once

#include "platform.h"

// A product is there some 30 cycles after it was asked for, and one onto the same sum waits for it.
constexpr bool kSumsByTurns = true;
KIE_DEVICE void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9},"
        " {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
