// A unit's weights as they are stored, and as halves: what decoders have in common. A lane has rows
// 2g and 2g + 1 of a tile by columns 8t to 8t + 7 of a unit.
#pragma once

#include "platform.h"

// Of the stream; scales of I4 are bfloat16, of Half and Zeros float16, of I8 float32.
enum StoredBits {
    kBitsF16,
    kBitsF8,
    kBitsI4,
    kBitsE2m1,
    kBitsI4Half,
    kBitsI4Zeros,
    kBitsI8,
    kBitsI8Half
};
KIE_CONST_FN bool is_bytes(int bits) {
    return bits == kBitsF8 || bits == kBitsI8 || bits == kBitsI8Half;
}

// Operands of a matrix unit for two products: columns 8t to 8t + 3, then the four behind them; of
// each two columns row 2g's, then row 2g + 1's.
struct UnitHalves {
    u32 v[8];
};
// What a lane has of a tile, by StoredBits: 16 bytes twice, 16 once, or 8.
template <int kBits>
struct alignas(8) UnitCodes {
    u32 v[2];  // a row each: shifted as one they cost the busier of two units
};
template <>
struct UnitCodes<kBitsF16> {
    Quad v[2];
};
template <>
struct UnitCodes<kBitsF8> {
    Quad v;
};
template <>
struct UnitCodes<kBitsI8> {
    Quad v;
};
template <>
struct UnitCodes<kBitsI8Half> {
    Quad v;
};
