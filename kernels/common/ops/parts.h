// The numbers of a vector as products take them: halves (kParts 1), or two halves each (kParts 2):
// the nearest, and what it leaves, times 2^11, so that it is as far from the smallest half as the
// first. Together they have 22 bits. A column then has two vectors, one a part, side by side among
// the eight of a matrix unit's second operand; words of a vector, the other part's kWords / 2
// behind, and rows in shared memory likewise.
#pragma once

#include "lowered.h"
#include "platform.h"

constexpr int kVectors = kColumns * kParts;  // of a pass
static_assert(kVectors <= 8, "columns of a matrix unit's second operand");
constexpr float kRest = 2048.0f, kRestScale = 1.0f / kRest;

// Two numbers: as halves, then what these leave.
struct Halves {
    u32 v[kParts];
};
KIE_DEVICE Halves halves_of(float a, float b) {
    Halves h;
    h.v[0] = pack_half2(a, b);
    if constexpr (kParts > 1) {
        float x, y;
        unpack_half2(h.v[0], x, y);
        h.v[1] = pack_half2((a - x) * kRest, (b - y) * kRest);
    }
    return h;
}
KIE_DEVICE void numbers_of(const Halves& h, float& a, float& b) {
    unpack_half2(h.v[0], a, b);
    if constexpr (kParts > 1) {
        float x, y;
        unpack_half2(h.v[1], x, y);
        a += x * kRestScale, b += y * kRestScale;
    }
}
// The vector that is column g of a matrix unit's second operand; columns that are too many repeat.
KIE_DEVICE int vector_of(int g) {
    if constexpr (kParts == 1) return kColumns == 1 ? 0 : (g < kColumns ? g : kColumns - 1);
    const int column = g / kParts;
    return (column < kColumns ? column : kColumns - 1) * kParts + g % kParts;
}
