// Integers of 4 bits as halves, exactly. A word has eight columns of a row, two's complement, so
// that zeros stand for 0: columns 2j and 2j + 1 at bits 4j and 16 + 4j.
#pragma once

#include "platform.h"

// Behind the bits of 1024 a code is added to it, or 16 times, with 8 more: the sum is a half, and
// so is what is left without them.
#ifdef KIE_FMA_HALF2
KIE_DEVICE u32 less_half2(u32 v, u32 factor, u32 more) { return fma_half2(v, factor, more); }
#else
KIE_DEVICE u32 less_half2(u32 v, u32 factor, u32 more) {
    float a, b, by, unused, plus;
    unpack_half2(v, a, b), unpack_half2(factor, by, unused), unpack_half2(more, plus, unused);
    return pack_half2(a * by + plus, b * by + plus);
}
#endif
#ifndef KIE_AND_XOR
KIE_DEVICE u32 and_xor(u32 v, u32 mask, u32 flip) { return (v & mask) ^ flip; }
#endif
// With a zero point, which is 8 more than what is taken from the numbers.
KIE_DEVICE void unpack_i4_zeros(u32 codes, u32 zero, u32 (&halves)[4]) {
    const u32 low = 0xe400e400 + zero * 0x00010001, high = 0xd400d400 + zero * 0x00100010;
    KIE_UNROLL for (int j = 0; j < 4; j += 2) {
        const u32 c = codes >> 4 * j;
        // (1024 + u) - (1024 + zero) and (1024 + 16 u) / 16 - (64 + zero).
        halves[j] = less_half2(and_xor(c, 0x000f000f, 0x64086408), 0x3c003c00, low);
        halves[j + 1] = less_half2(and_xor(c, 0x00f000f0, 0x64806480), 0x2c002c00, high);
    }
}
KIE_DEVICE void unpack_i4(u32 codes, u32 (&halves)[4]) {
    KIE_UNROLL for (int j = 0; j < 4; j += 2) {
        const u32 c = codes >> 4 * j;
        // (1024 + u) - 1032 and (1024 + 16 u) / 16 - 72, where u is 8 more than the number.
        halves[j] = less_half2(and_xor(c, 0x000f000f, 0x64086408), 0x3c003c00, 0xe408e408);
        halves[j + 1] = less_half2(and_xor(c, 0x00f000f0, 0x64806480), 0x2c002c00, 0xd480d480);
    }
}
