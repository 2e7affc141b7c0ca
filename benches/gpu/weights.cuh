// What the harnesses share: random weights that the filling kernels and the references agree on,
// the plan of a line, and how it is filled. Include after the kernel's headers.
#pragma once

#define CK(x)                                                                 \
    do {                                                                      \
        cudaError_t e_ = (x);                                                 \
        if (e_ != cudaSuccess) {                                              \
            printf("%s line %d: %s\n", #x, __LINE__, cudaGetErrorString(e_)); \
            exit(1);                                                          \
        }                                                                     \
    } while (0)

// ---- Random numbers that kernel filling and reference agree on, computed anywhere.
__host__ __device__ inline u32 mix(u32 x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    x ^= x >> 16;
    return x;
}
__host__ __device__ inline float uniform(u32 stream, u32 row, u32 col, float scale) {
    const u32 h = mix(mix(mix(stream * 0x9e3779b9u + 77u) ^ row) + col * 0x85ebca6bu);
    return __half2float(
        __float2half(((h >> 8) * (1.0f / 16777216.0f) - 0.5f) * 3.4641016f * scale));
}
enum Matrix { kMatQkv, kMatO, kMatGu, kMatDown, kMatHead };
__host__ __device__ inline u32 stream_of(int m, int layer, int lane) {
    return 1000 + (layer * 8 + lane) * 8 + m;
}
constexpr u32 kEmbedStream = 1, kNormStream = 2, kKeyStream = 100000, kValueStream = 200000;

struct Op {
    int matrix, layer, rows, k, row_warps, k_warps, chunk, stage_bytes, first_row, rows_a_block;
    long at;
};

// Fills one matrix of every block's line. One thread a half pair.
__global__ void fill_line(u8* line, Op o) {
    const long pairs_block = (long)o.rows * o.k / 2;
    for (long i = blockIdx.x * (long)blockDim.x + threadIdx.x; i < pairs_block * kBlocks;
         i += (long)gridDim.x * blockDim.x) {
        const int b = i / pairs_block;
        const long at = (i % pairs_block) * 4;  // byte inside the op
        const int stage = at / o.stage_bytes;
        int r = at % o.stage_bytes;
        const int pair_bytes = o.rows * 64, kw = r / (o.chunk * pair_bytes);
        r %= o.chunk * pair_bytes;
        const int c = r / pair_bytes;
        r %= pair_bytes;
        const int tile = r / 1024;
        r %= 1024;
        const int rows = o.rows - 16 * tile < 16 ? o.rows - 16 * tile : 16;
        const int half = r / (rows * 32);
        r %= rows * 32;
        const int ln = r / 16, word = r % 16 / 4, g = ln / 4, t = ln % 4;
        const int pairs = o.k / 32 / o.k_warps,
                  col = (kw * pairs + stage * o.chunk + c) * 32 + 8 * t + 4 * half + 2 * (word / 2);
        const int row = 16 * tile + 2 * g + word % 2, lane_index = b / kBlocksPerLane,
                  rank = b % kBlocksPerLane;
        const int global = rank * o.rows_a_block + o.first_row + row;
        const float scale = 1.0f / sqrtf((float)o.k);
        const u32 s = stream_of(o.matrix, o.layer, lane_index);
        *(__half2*)(line + (long)b * kLineBytes + o.at + at) =
            __halves2half2(__float2half(uniform(s, global, col, scale)),
                           __float2half(uniform(s, global, col + 1, scale)));
    }
}
__global__ void fill_plain(__half* p, long rows, int cols, u32 stream, float scale, float offset) {
    for (long i = blockIdx.x * (long)blockDim.x + threadIdx.x; i < rows * cols;
         i += (long)gridDim.x * blockDim.x)
        p[i] = __float2half(offset + uniform(stream, i / cols, i % cols, scale));
}
// Keys and values of every position below `context`, as earlier steps would have left them.
__global__ void fill_pages(u8* pool, const u32* pages, int pages_max, int context) {
    const long n = (long)kColumns * kAll * kKvHeads * context * kHeadDim;
    for (long i = blockIdx.x * (long)blockDim.x + threadIdx.x; i < n;
         i += (long)gridDim.x * blockDim.x) {
        const int d = i % kHeadDim, pos = i / kHeadDim % context;
        const long unit = i / kHeadDim / context % (kAll * kKvHeads);
        const int c = i / kHeadDim / context / (kAll * kKvHeads);
        u8* p = pool + ((u64)pages[c * pages_max + pos / kPage] * (kAll * kKvHeads) + unit) *
                           (2 * kPageHalf);
        ((__half*)p)[pos % kPage * kHeadDim + d] =
            __float2half(uniform(kKeyStream + unit, pos + 7919 * c, d, 1));
        ((__half*)(p + kPageHalf))[d * kPage + pos % kPage] =
            __float2half(uniform(kValueStream + unit, pos + 7919 * c, d, 1));
    }
}
template <class S>
Op op_of(int matrix, int layer, int first, int rows_a_block, long& at, std::vector<Segment>& segs) {
    const Op o = {matrix,         layer, S::rows,      S::k, S::row_warps, S::k_warps, S::chunk,
                  S::stage_bytes, first, rows_a_block, at};
    segs.push_back({(u32)S::stages, (u32)S::stage_bytes});
    at += (long)S::stages * S::stage_bytes;
    return o;
}
// Every product of a step, in the line's order.
inline std::vector<Op> plan_line(std::vector<Segment>& segs) {
    std::vector<Op> ops;
    long at = 0;
    for (int l = 0; l < kLayers; ++l) {
        ops.push_back(op_of<SplitQkv>(kMatQkv, l, 0, kRowsQkv, at, segs));
        ops.push_back(op_of<SplitO>(kMatO, l, 0, kRowsO, at, segs));
        ops.push_back(op_of<SplitGu>(kMatGu, l, 0, kRowsGu, at, segs));
        ops.push_back(op_of<SplitDown>(kMatDown, l, 0, kRowsO, at, segs));
    }
    for (int p = 0; p < kHeadPasses; ++p)
        ops.push_back(op_of<SplitHead>(kMatHead, kLayers, p * kHeadPassRows, kRowsHead, at, segs));
    if (kHeadTail)
        ops.push_back(
            op_of<SplitTail>(kMatHead, kLayers, kHeadPasses * kHeadPassRows, kRowsHead, at, segs));
    if (at != kLineBytes) {
        printf("plan: %ld != %ld\n", at, kLineBytes);
        exit(1);
    }
    return ops;
}
