// Codes as halves times the scales of their two rows, for products that have no place for sums of
// their own: each is rounded to a half.
#pragma once

#include "ops/unit.h"
#include "platform.h"

#ifndef KIE_MULTIPLY_HALVES
// Of each half, rounded once: a float holds the product of two.
KIE_DEVICE u32 multiply_halves(u32 a, u32 b) {
    float x[2], y[2];
    unpack_half2(a, x[0], x[1]), unpack_half2(b, y[0], y[1]);
    return pack_half2(x[0] * y[0], x[1] * y[1]);
}
#endif
// A word of both halves for each row.
KIE_DEVICE void multiply_rows(UnitHalves& h, const u32 (&by)[2]) {
    KIE_UNROLL for (int i = 0; i < 8; ++i) h.v[i] = multiply_halves(h.v[i], by[i % 2]);
}

// Scales that are powers of two, as floats would do it and round once: times the part of it that is
// a half (a smaller one leaves nothing of a code), and twice times what is left of a larger one.
// What is no power (2^128) stays so.
constexpr int kHalfPower = 15;
KIE_DEVICE u32 half_power(u32 exponent, int turn) {
    int power = (int)exponent - 127 - turn * kHalfPower;
    if (power > kHalfPower) power = kHalfPower;
    if (turn > 0 && power < 0) power = 0;
    if (turn > 0 && exponent == 255) power = kHalfPower + 1;
    return power < -kHalfPower ? 0 : (u32)(power + kHalfPower) * (1 << 10 | 1 << 26);
}
KIE_DEVICE void times_powers(UnitHalves& h, const float (&scale)[2]) {
    const u32 e[2] = {bits(scale[0]) >> 23, bits(scale[1]) >> 23};
    // Those that are halves themselves, as nearly all are.
    if (e[0] - 113 < 30 && e[1] - 113 < 30) {
        const u32 by[2] = {(e[0] - 112) * (1 << 10 | 1 << 26), (e[1] - 112) * (1 << 10 | 1 << 26)};
        return multiply_rows(h, by);
    }
    KIE_UNROLL for (int turn = 0; turn < 3; ++turn) {
        const u32 by[2] = {half_power(e[0], turn), half_power(e[1], turn)};
        multiply_rows(h, by);
    }
}

// Other scales: rounded to halves where they keep their bits as such, else as floats.
KIE_CONST_FN bool is_half_scale(u32 scale) { return scale - (113u << 23) < 29u << 23; }
KIE_DEVICE void times_scales(UnitHalves& h, const float (&scale)[2]) {
    if (is_half_scale(bits(scale[0])) && is_half_scale(bits(scale[1]))) {
        const u32 by[2] = {pack_half2(scale[0], scale[0]), pack_half2(scale[1], scale[1])};
        return multiply_rows(h, by);
    }
    KIE_UNROLL for (int i = 0; i < 8; ++i) {
        float a, b;
        unpack_half2(h.v[i], a, b);
        h.v[i] = pack_half2(a * scale[i % 2], b * scale[i % 2]);
    }
}
