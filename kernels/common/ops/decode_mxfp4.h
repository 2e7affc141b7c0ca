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

#ifndef KIE_MULTIPLY_HALVES
// Of each half, rounded once: a float holds the product of two.
KIE_DEVICE u32 multiply_halves(u32 a, u32 b) {
    float x[2], y[2];
    unpack_half2(a, x[0], x[1]), unpack_half2(b, y[0], y[1]);
    return pack_half2(x[0] * y[0], x[1] * y[1]);
}
#endif
// Such halves times their scale, a float's power of two, as floats would do it and round once:
// times the part of it that is a half (a smaller one leaves nothing of a code), and twice times
// what is left of a larger one. What is no power (2^128) stays so.
constexpr int kHalfPower = 15;
KIE_DEVICE bool is_half_power(float scale) { return bits(scale) < (127 + kHalfPower + 1) << 23; }
KIE_DEVICE u32 half_power(float scale, int turn) {
    int power = (int)(bits(scale) >> 23) - 127 - turn * kHalfPower;
    if (power > kHalfPower) power = kHalfPower;
    if (turn > 0 && power < 0) power = 0;
    if (turn > 0 && bits(scale) == 255u << 23) power = kHalfPower + 1;
    return power < -kHalfPower ? 0 : (u32)(power + kHalfPower) * (1 << 10 | 1 << 26);
}
