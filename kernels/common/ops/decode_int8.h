// Signed bytes as halves, exactly. They lie as e4m3 codes do (decode_fp8.h).
#pragma once

#include "ops/decode_int4.h"
#include "ops/unit.h"
#include "platform.h"

// Two bytes, of which 128 was added to each, behind the bits of 1024.
KIE_DEVICE u32 unpack_two_i8(u32 codes) {
    const u32 both = (codes & 0xff) | (codes & 0xff00) << 8 | 0x64006400;
    return less_half2(both, 0x3c003c00, 0xe480e480);  // (1024 + u) - 1152
}
KIE_DEVICE UnitHalves decode_i8(const Quad& codes) {
    UnitHalves h;
    KIE_UNROLL for (int w = 0; w < 4; ++w) {
        const u32 c = codes.v[w] ^ 0x80808080;
        h.v[2 * w] = unpack_two_i8(c), h.v[2 * w + 1] = unpack_two_i8(c >> 16);
    }
    return h;
}
