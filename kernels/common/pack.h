// Weights as a checkpoint stores them, into the order in which blocks take them: kernel `kie_pack`,
// by itself behind platform.h. The host (mono/pack.rs) says for each stored row where it goes; here
// are the number formats and the order of a row's columns. Padding is not written: it is zero.
#pragma once

// Where a row goes.
struct PackPlace {
    u64 at;       // bytes from PackJob::to; kPackNowhere: nowhere
    u32 half;     // bytes from the first tile of a unit to its second
    u32 padding;  // 0
};
constexpr u64 kPackNowhere = ~0ull;

// Rows of one stored matrix. A stored row is `parts` parts of `real` numbers behind `skip` others;
// each part is padded to `padded` numbers.
struct PackJob {
    u64 from;    // where the first row's first number stands, or would; aligned as numbers
    u64 scales;  // float32 factors, from those of the first row's blocks on
    u64 places;  // a PackPlace a row
    u64 to;      // what places count from
    u32 rows, cols;
    u32 first;                   // the first row's number in its matrix
    u32 format;                  // PackFormat
    u32 block_rows, block_cols;  // of a scale; 0: there are none
    u32 parts, real, padded, skip;
    u32 unit_bytes;             // 32 columns of all rows of a block; 0: halves in a row, no units
    u32 k_warps, pairs, chunk;  // units of a warp, and of a stage
    u32 tag;                    // names the matrix where a number is beyond float16
    u32 stride;  // numbers from row to row: of rows that are not there in full, fewer
};
enum PackFormat : u32 { kPackF32, kPackF16, kPackBf16, kPackF8 };

struct PackArgs {
    const PackJob* jobs;
    u64* beyond;  // some `tag << 32 | row` with a number that float16 does not hold; or untouched
    u32 count;    // jobs
    u32 blocks, threads;
    u32 padding;  // 0
};
static_assert(sizeof(PackPlace) == 16 && sizeof(PackJob) == 96 && sizeof(PackArgs) == 32,
              "as mono/upload.rs has them");

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
KIE_DEVICE float pack_stored(const PackJob& job, u64 at) {
    if (job.format == kPackF32) return pack_round(((const float*)job.from)[at]);
    if (job.format == kPackBf16) return number((u32)((const u16*)job.from)[at] << 16);
    if (job.format == kPackF8) return pack_f8(((const u8*)job.from)[at]);
    float low, high;
    unpack_half2(((const u16*)job.from)[at], low, high);
    return low;
}
// The number at a column, 0 behind the last one.
KIE_DEVICE float pack_number(const PackJob& job, u32 row, u32 column) {
    if (column >= job.cols) return 0;
    const float stored = pack_stored(job, (u64)row * job.stride + column);
    if (job.block_rows == 0) return stored;
    const u32 grid = (job.cols + job.block_cols - 1) / job.block_cols;
    const u32 down = (job.first + row) / job.block_rows - job.first / job.block_rows;
    return stored * ((const float*)job.scales)[(u64)down * grid + column / job.block_cols];
}
// Bytes from a row's place to its two numbers from `column` on, which is even.
KIE_DEVICE u64 pack_offset(const PackJob& job, u32 half, u32 column) {
    if (job.unit_bytes == 0) return 2 * (u64)column;
    const u32 unit = column / 32, warp = unit / job.pairs, pair = unit % job.pairs;
    const u32 stage = pair / job.chunk, turn = (stage * job.k_warps + warp) * job.chunk;
    const u32 inside = column / 8 % 4 * 16 + column / 2 % 2 * 8;
    return (u64)(turn + pair % job.chunk) * job.unit_bytes + (column / 4 % 2) * half + inside;
}
KIE_DEVICE void pack_row(const PackJob& job, u32 row, u32 threads, u64* beyond) {
    const PackPlace place = ((const PackPlace*)job.places)[row];
    if (place.at == kPackNowhere) return;
    bool far = false;
    KIE_NO_UNROLL for (u32 i = thread(); i < job.parts * job.padded / 2; i += threads) {
        const u32 column = 2 * i, part = column / job.padded, inside = column % job.padded;
        const u32 from = job.skip + part * job.real + inside;
        const float a = inside < job.real ? pack_number(job, row, from) : 0;
        const float b = inside + 1 < job.real ? pack_number(job, row, from + 1) : 0;
        far |= max_f(a, -a) > kHalfMax || max_f(b, -b) > kHalfMax;
        *(u32*)(job.to + place.at + pack_offset(job, place.half, column)) = pack_half2(a, b);
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
