// FP8 e4m3 (OCP, "fn": no infinity, 0x7f and 0xff are NaN) as halves, exactly: every value is a
// half, subnormal ones included. A lane's 16 bytes are rows 2g and 2g + 1 of a tile by columns 8t
// to 8t + 7 of a unit: of word w its low half is row 2g's columns 8t + 2w and the next, its high
// half row 2g + 1's.
#pragma once

#include "ops/unit.h"
#include "platform.h"

#ifndef KIE_UNPACK_F8
// Four codes: the lower two as halves, then the upper two. Shifted into a half, a code's value is
// 2^-8 of what it should be.
KIE_DEVICE u32 unpack_two_f8(u32 codes) {
    const u32 c = (codes & 0xff) | (codes & 0xff00) << 8;
    const u32 nan = ((c & 0x007f007f) + 0x00010001) >> 7 & 0x00010001;  // where a code is one
    float a, b;
    unpack_half2((c & 0x007f007f) << 7 | (c & 0x00800080) << 8, a, b);
    return pack_half2(a * 256.0f, b * 256.0f) | nan * 0x7e00;
}
KIE_DEVICE void unpack_f8(u32 codes, u32& low, u32& high) {
    low = unpack_two_f8(codes & 0xffff), high = unpack_two_f8(codes >> 16);
}
#endif
KIE_DEVICE UnitHalves decode_f8(const Quad& codes) {
    UnitHalves h;
    KIE_UNROLL for (int w = 0; w < 4; ++w) unpack_f8(codes.v[w], h.v[2 * w], h.v[2 * w + 1]);
    return h;
}
