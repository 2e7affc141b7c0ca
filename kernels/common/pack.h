// Weights as a checkpoint stores them, into the order in which blocks take them: kernel `kie_pack`,
// by itself behind platform.h. The host (mono/pack.rs) says for each stored row where it goes; here
// are the number formats and the order of a row's columns (PackPlace, PackJob and PackArgs stand in
// the generated header). Padding is not written: it is zero.
#pragma once

#include "chiplets.h"
#include "lowered.h"
#include "ops/unit.h"
#include "platform.h"

constexpr u64 kPackNowhere = ~0ull;
constexpr u32 kPackNoScale = ~0u;

enum PackFormat : u32 {
    kPackF32,
    kPackF16,
    kPackBf16,
    kPackF8,
    kPackI8,
    kPackI4,
    kPackE2m1,
    kPackQ8,  // GGUF's blocks of 32, a float16 scale in front: Q8_0, Q4_0
    kPackQ4
};
constexpr u32 kPackE8m0 = 4;
KIE_CONST_FN bool has_4_bits(u32 codes) { return codes >= kBitsI4 && codes <= kBitsI4Zeros; }

constexpr u32 kPackThreads = 1024;
constexpr float kHalfMax = 65504.0f;

// Float32 is rounded to bfloat16 first, as the field publishes float32 checkpoints.
KIE_DEVICE float pack_round(float f) {
    const u32 u = bits(f);
    if ((u & 0x7fffffff) > 0x7f800000) return f;
    return number((u + 0x7fff + (u >> 16 & 1)) & 0xffff0000);
}
// Shifted into float16 the value is 2^-8 of what it should be, subnormal ones included.
KIE_DEVICE float pack_f8(u32 code) {
    if ((code & 0x7f) == 0x7f) return number(0x7fc00000);
    float low, high;
    unpack_half2((code & 0x7f) << 7 | (code & 0x80) << 8, low, high);
    return low * 256.0f;
}
// Two numbers a byte, the first in the low half.
KIE_DEVICE u32 pack_nibble(const PackJob& job, u64 at) {
    if (job.format == kPackQ4)
        return ((const u8*)job.from)[at / 32 * 18 + 2 + at % 16] >> at % 32 / 16 * 4 & 15;
    return ((const u8*)job.from)[at / 2] >> at % 2 * 4 & 15;
}
// 0, 0.5, 1, 1.5, 2, 3, 4, 6, the sign in front: as a half's bits 2^-14 of the value.
KIE_DEVICE float pack_e2m1(u32 code) {
    float low, high;
    unpack_half2((code & 8) << 12 | (code & 7) << 9, low, high);
    return low * 16384.0f;
}
KIE_DEVICE u32 pack_byte(const PackJob& job, u64 at) {
    return ((const u8*)job.from)[job.format == kPackQ8 ? at / 32 * 34 + 2 + at % 32 : at];
}
KIE_DEVICE float pack_stored(const PackJob& job, u64 at) {
    if (job.format == kPackI4 || job.format == kPackQ4)
        return (float)(int)pack_nibble(job, at) - 8.0f;
    if (job.format == kPackI8 || job.format == kPackQ8)
        return (float)(int)(signed char)pack_byte(job, at);
    if (job.format == kPackE2m1) return pack_e2m1(pack_nibble(job, at));
    if (job.format == kPackF32) return pack_round(((const float*)job.from)[at]);
    if (job.format == kPackBf16) return number((u32)((const u16*)job.from)[at] << 16);
    if (job.format == kPackF8) return pack_f8(((const u8*)job.from)[at]);
    float low, high;
    unpack_half2(((const u16*)job.from)[at], low, high);
    return low;
}
KIE_DEVICE float pack_e8m0(u32 code) {
    return code == 255 ? number(0x7fc00000) : number(code == 0 ? 1 << 22 : code << 23);
}
KIE_DEVICE u64 pack_group(const PackJob& job, u32 row, u32 column) {
    const u32 grid = (job.cols + job.block_cols - 1) / job.block_cols;
    const u32 down = (job.first + row) / job.block_rows - job.first / job.block_rows;
    return (u64)down * grid + column / job.block_cols;
}
KIE_DEVICE int pack_zero_of(const PackJob& job, u32 row, u32 column) {
    if (job.zeros == 0) return 0;
    return (int)((const signed char*)job.zeros)[pack_group(job, row, column)];
}
KIE_DEVICE float pack_scale_of(const PackJob& job, u32 row, u32 column) {
    if (job.format >= kPackQ8) {
        const u64 block = ((u64)row * job.stride + column) / 32;
        float scale, none;
        unpack_half2(*(const u16*)(job.from + block * (job.format == kPackQ8 ? 34 : 18)), scale,
                     none);
        return scale;
    }
    const u64 at = pack_group(job, row, column);
    if (job.scale_format == kPackE8m0) return pack_e8m0(((const u8*)job.scales)[at]);
    if (job.scale_format == kPackBf16) return number((u32)((const u16*)job.scales)[at] << 16);
    if (job.scale_format == kPackF32) return ((const float*)job.scales)[at];
    float low, high;
    unpack_half2(((const u16*)job.scales)[at], low, high);
    return low;
}
// The number at a column, 0 behind the last one.
KIE_DEVICE float pack_number(const PackJob& job, u32 row, u32 column) {
    if (column >= job.cols) return 0;
    const float stored = pack_stored(job, (u64)row * job.stride + column);
    if (job.block_rows == 0) return stored;
    return (stored - (float)pack_zero_of(job, row, column)) * pack_scale_of(job, row, column);
}
// Which stage, k-warp and unit of its share of the stage has a column.
struct PackUnit {
    u32 stage, warp, in_chunk;
};
KIE_DEVICE PackUnit pack_unit(const PackJob& job, u32 column) {
    const u32 unit = column / 32, pair = unit % job.pairs;
    return {pair / job.chunk, unit / job.pairs, pair % job.chunk};
}
// Bytes from a row's place to its two numbers from `column` on, which is even.
KIE_DEVICE u64 pack_offset(const PackJob& job, u32 half, u32 column) {
    if (job.unit_bytes == 0) return 2 * (u64)column;
    const PackUnit u = pack_unit(job, column);
    const u64 at =
        (u64)u.stage * job.stage_bytes + (u.warp * job.chunk + u.in_chunk) * job.unit_bytes;
    if (has_4_bits(job.codes)) return at + column / 8 % 4 * 8;
    if (job.codes) return at + column / 8 % 4 * 16 + column / 2 % 4 * 4;
    return at + (column / 4 % 2) * half + column / 8 % 4 * 16 + column / 2 % 2 * 8;
}
// The stored column of a padded one; past the last where there is none.
KIE_DEVICE u32 pack_column(const PackJob& job, u32 column) {
    const u32 part = column / job.padded, inside = column % job.padded;
    return inside < job.real ? job.skip + part * job.real + inside : ~0u;
}
KIE_DEVICE u32 pack_code(const PackJob& job, u32 row, u32 column) {
    return column < job.cols ? pack_byte(job, (u64)row * job.stride + column) : 0;
}
// A stored column of a run of units that share scales; past the last where there is none.
KIE_DEVICE u32 pack_run(const PackJob& job, u32 column) {
    const u32 first = column - column % (32 * job.span);
    u32 from = ~0u;
    for (u32 i = 0; i < 32 * job.span && from >= job.cols; i += 2)
        from = pack_column(job, first + i);
    return from;
}
// A run's scale: that of any of its columns, which all have the same.
KIE_DEVICE u64 pack_scale_at(const PackJob& job, const PackPlace& place, u32 column) {
    const PackUnit u = pack_unit(job, column);
    return (u64)u.stage * job.stage_bytes + (u64)(long long)(int)place.scale +
           (u.warp * (job.chunk / job.span) + u.in_chunk / job.span) * job.scale_rows *
               job.scale_bytes;
}
KIE_DEVICE void pack_scale(const PackJob& job, const PackPlace& place, u32 row, u32 column) {
    const u32 from = pack_run(job, column);
    const float scale = from < job.cols ? pack_scale_of(job, row, from) : 0;
    const u64 to = job.to + place.at + pack_scale_at(job, place, column);
    if (job.codes == kBitsI4) {
        *(u16*)to = (u16)(bits(scale) >> 16);
    } else if (job.codes == kBitsI4Half || job.codes == kBitsI8Half) {
        *(u16*)to = (u16)pack_half2(scale, 0);
    } else if (job.codes == kBitsI4Zeros) {
        const u32 zero = from < job.cols ? 8 + pack_zero_of(job, row, from) : 8;
        *(u32*)to = (pack_half2(scale, 0) & 0xffff) | zero << 16;
    } else if (job.codes == kBitsE2m1) {
        // Codes are halves of 2^-14 of their value. Where that is beyond the scales there are, all
        // of the group are 0: no number is beyond float16.
        const u32 exponent = bits(scale) >> 23;
        *(u8*)to = (u8)(scale == 0 ? 0 : exponent > 240 ? 254 : exponent + 14);
    } else {
        *(float*)to = scale;
    }
}
// Eight columns of a row as a word of 4-bit codes, in the order of their decoder.
KIE_DEVICE u32 pack_word(const PackJob& job, u32 row, u32 column) {
    u32 word = 0;
    KIE_UNROLL for (u32 i = 0; i < 8; ++i) {
        const u32 from = pack_column(job, column + i), pair = i / 2, half = i % 2 * 16;
        u32 code = 8;
        if (from < job.cols) {
            code = pack_nibble(job, (u64)row * job.stride + from);
        } else if (job.codes == kBitsI4Zeros) {  // padding is 0, too
            const u32 real = pack_run(job, column + i);
            if (real < job.cols) code = (u32)(8 + pack_zero_of(job, row, real)) & 15;
        } else {
            continue;
        }
        if (job.codes != kBitsE2m1) {
            word |= (code ^ 8) << (4 * pair + half);
        } else {
            const u32 sign = pair == 0 ? 15 : pair == 1 ? 12 : pair == 2 ? 14 : 13;
            const u32 rest = pair == 0 ? 9 : pair == 1 ? 6 : pair == 2 ? 3 : 0;
            word |= (code >> 3) << (sign + half) | (code & 7) << (rest + half);
        }
    }
    return word;
}
// A row that is a column of what is packed: as halves, or bytes with float scales.
KIE_DEVICE void pack_turned(const PackJob& job, u32 row, u32 threads, u64* beyond) {
    const u32 k = job.k_first + row;
    bool far = false;
    KIE_NO_UNROLL for (u32 column = thread(); column < job.cols; column += threads) {
        const PackPlace place = ((const PackPlace*)job.places)[column];
        if (place.at == kPackNowhere) continue;
        const float v = pack_number(job, row, column);
        far |= max_f(v, -v) > kHalfMax;
        const u64 to = job.to + place.at + pack_offset(job, place.half, k & ~1u);
        if (!job.codes) {
            *(u16*)(to + k % 2 * 2) = (u16)pack_half2(v, 0);
            continue;
        }
        *(u8*)(to + k % 2) = (u8)pack_code(job, row, column);
        if (place.scale != kPackNoScale && k % (32 * job.span) == 0)
            *(float*)(job.to + place.at + pack_scale_at(job, place, k)) =
                pack_scale_of(job, row, column);
    }
    if (far) store_word(beyond, (u64)job.tag << 32 | (job.first + row));
}
KIE_DEVICE void pack_row(const PackJob& job, u32 row, u32 threads, u64* beyond) {
    if (job.turned != 0) return pack_turned(job, row, threads, beyond);
    const PackPlace place = ((const PackPlace*)job.places)[row];
    if (place.at == kPackNowhere) return;
    bool far = false;
    KIE_NO_UNROLL for (u32 i = thread(); i < job.parts * job.padded / 2; i += threads) {
        const u32 column = 2 * i, from = pack_column(job, column),
                  next = pack_column(job, column + 1);
        const float a = pack_number(job, row, from), b = pack_number(job, row, next);
        far |= max_f(a, -a) > kHalfMax || max_f(b, -b) > kHalfMax;
        const u64 to = job.to + place.at + pack_offset(job, place.half, column);
        if (has_4_bits(job.codes)) {
            if (column % 8 == 0) *(u32*)to = pack_word(job, row, column);
        } else if (job.codes)
            *(u16*)to = (u16)(pack_code(job, row, from) | pack_code(job, row, next) << 8);
        else
            *(u32*)to = pack_half2(a, b);
        if (job.codes && place.scale != kPackNoScale && column % (32 * job.span) == 0)
            pack_scale(job, place, row, column);
    }
    if (far) store_word(beyond, (u64)job.tag << 32 | (job.first + row));
}

KIE_KERNEL(kie_pack, kPackThreads, PackArgs args) {
    // Rows of all jobs are dealt out in turn.
    u32 row = block();
    KIE_NO_UNROLL for (u32 n = 0; n < args.count; ++n) {
        const PackJob job = args.jobs[n];
        KIE_NO_UNROLL for (; row < job.rows; row += args.blocks)
            pack_row(job, row, args.threads, args.beyond);
        row -= job.rows;
    }
}
