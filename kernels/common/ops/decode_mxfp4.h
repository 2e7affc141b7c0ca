// MXFP4's e2m1 (OCP MX) as halves of 2^-14 of their value, exactly: a half has the same bits at the
// ends of its exponent and mantissa, and what is subnormal stays so. Scales make up for it
// (kE2m1Shift). A word has eight columns of a row, columns 2j and 2j + 1 in its halves: sign and
// other bits of j = 0 where a half has them (15; 11 to 9), of 1 at 12 and 8 to 6, of 2 at 14 and 5
// to 3, of 3 at 13 and 2 to 0.
#pragma once

#include "platform.h"

constexpr u32 kE2m1Shift = 14;

KIE_DEVICE void unpack_e2m1(u32 codes, u32 (&halves)[4]) {
    halves[0] = codes & 0x8e008e00;
    halves[1] = codes << 3 & 0x8e008e00;
    // Sign and other bits shift differently: a product has both shifts, and what it adds up beside
    // the wanted bits carries into none of them. Multiplies have a unit of their own.
    halves[2] = (codes & 0x40384038) * ((1 << 1) + (1 << 6)) & 0x8e008e00;
    halves[3] = (codes & 0x20072007) * ((1 << 2) + (1 << 9)) & 0x8e008e00;
}
