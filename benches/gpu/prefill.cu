// Stand-alone harness of the prefill kernel: random weights on the device, the residual stream and
// every key and value against a plain float32 reference on the same device, then the time of whole
// prompts. Build: variants.py (KIE_PREFILL_CHUNK among the shape's constants).
// Run: ./prefill NAME first count[,count..] repeats check_count check_first [hang]
// `hang` launches with one block less than the kernel counts on: every wait must end by itself.
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cuda/platform.h"
#include "cuda/tile.h"
#include "cuda/wide.h"
#include "common/shape.h"
#include "common/args.h"
#include "common/exchange.h"
#include "common/ring.h"
#include "common/matvec.h"
#include "common/attention.h"
#include "common/prefill_shape.h"
#include "common/prefill_attention.h"
#include "common/prefill.h"

#include "weights.cuh"

// ---- The reference, one lane and one matrix at a time.
#define EACH(i, n)                                                            \
    for (long i = blockIdx.x * (long)blockDim.x + threadIdx.x; i < (long)(n); \
         i += (long)gridDim.x * blockDim.x)
__global__ void make_matrix(float* w, int matrix, int layer, int lane, int rows, int k) {
    const float scale = 1.0f / sqrtf((float)k);
    EACH(i, (long)rows * k) w[i] = uniform(stream_of(matrix, layer, lane), i / k, i % k, scale);
}
// y [n][rows] = x [n][k] w [rows][k]; tiles of 64 x 64, four by four a thread.
__global__ void product(float* y, const float* w, const float* x, int n, int rows, int k) {
    __shared__ float ws[16][65], xs[16][65];
    const int r0 = blockIdx.x * 64, n0 = blockIdx.y * 64, tx = threadIdx.x % 16,
              ty = threadIdx.x / 16;
    float s[4][4] = {};
    for (int k0 = 0; k0 < k; k0 += 16) {
        for (int i = threadIdx.x; i < 1024; i += 256) {
            const int a = i / 16, b = i % 16;
            ws[b][a] = r0 + a < rows ? w[(long)(r0 + a) * k + k0 + b] : 0;
            xs[b][a] = n0 + a < n ? x[(long)(n0 + a) * k + k0 + b] : 0;
        }
        __syncthreads();
        for (int b = 0; b < 16; ++b)
            for (int i = 0; i < 4; ++i)
                for (int j = 0; j < 4; ++j) s[i][j] += xs[b][ty + 16 * i] * ws[b][tx + 16 * j];
        __syncthreads();
    }
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 4; ++j)
            if (n0 + ty + 16 * i < n && r0 + tx + 16 * j < rows)
                y[(long)(n0 + ty + 16 * i) * rows + r0 + tx + 16 * j] = s[i][j];
}
__global__ void embed_reference(float* x, const u32* tokens, int n) {
    EACH(i, (long)n * kHidden) x[i] = uniform(kEmbedStream, tokens[i / kHidden], i % kHidden, 1);
}
__global__ void norm_reference(float* y, const float* x, int which) {
    __shared__ float all[8];
    float s = 0;
    const float* row = x + (long)blockIdx.x * kHidden;
    for (int i = threadIdx.x; i < kHidden; i += 256) s += row[i] * row[i];
    for (int m = 16; m; m /= 2) s += __shfl_xor_sync(~0u, s, m);
    if (threadIdx.x % 32 == 0) all[threadIdx.x / 32] = s;
    __syncthreads();
    s = 0;
    for (int i = 0; i < 8; ++i) s += all[i];
    const float f = 1.0f / sqrtf(s / kHidden + kEps);
    for (int i = threadIdx.x; i < kHidden; i += 256)
        y[(long)blockIdx.x * kHidden + i] =
            row[i] * f * __half2float(__float2half(1.0f + uniform(kNormStream, which, i, 0.1f)));
}
__device__ inline float angle(int pos, int j) {
    return (float)(pos * pow(10000.0, -2.0 * j / kHeadDim));
}
// Rotates q and k in place; keys and values also go to [kv head][position][d].
__global__ void heads_reference(float* y, float* keys, float* values, int n, int first) {
    EACH(i, (long)n * kQkv / 2) {
        const int p = i / (kQkv / 2), r = i % (kQkv / 2) * 2;
        float* v = y + (long)p * kQkv + r;
        if (r < (kHeads + kKvHeads) * kHeadDim) {
            const float a = angle(first + p, r % kHeadDim / 2), s = sinf(a), c = cosf(a);
            const float v0 = v[0], v1 = v[1];
            v[0] = v0 * c - v1 * s, v[1] = v0 * s + v1 * c;
        }
        if (r < kAttn) continue;
        const int h = r / kHeadDim - kHeads;
        float* to = (h < kKvHeads ? keys : values) +
                    ((long)(h % kKvHeads) * (first + n) + first + p) * kHeadDim + r % kHeadDim;
        to[0] = v[0], to[1] = v[1];
    }
}
__global__ void past_reference(float* keys, float* values, int unit, int n, int first) {
    EACH(i, (long)kKvHeads * first * kHeadDim) {
        const int d = i % kHeadDim, p = i / kHeadDim % first, h = i / kHeadDim / first;
        const long to = ((long)h * (first + n) + p) * kHeadDim + d;
        keys[to] = uniform(kKeyStream + unit + h, p, d, 1);
        values[to] = uniform(kValueStream + unit + h, p, d, 1);
    }
}
// One warp a query.
__global__ void attention_reference(float* out, const float* y, const float* keys,
                                    const float* values, int n, int first, int layer) {
    const int w = blockIdx.x * 8 + threadIdx.x / 32, my = threadIdx.x % 32;
    if (w >= n * kHeads) return;
    const int p = w / kHeads, head = w % kHeads, kv = head / kGroup, pos = first + p;
    constexpr int kEach = (kHeadDim + 31) / 32;
    float q[kEach], o[kEach] = {}, best = -1e30f, mass = 0;
    for (int i = 0; i < kEach; ++i)
        q[i] = my + 32 * i < kHeadDim
                   ? y[(long)p * kQkv + head * kHeadDim + my + 32 * i] * rsqrtf((float)kHeadDim)
                   : 0;
    const int from = layer < kWindowLayers && pos >= kWindow ? pos - kWindow + 1 : 0;
    for (int t = from; t <= pos; ++t) {
        const long at = ((long)kv * (first + n) + t) * kHeadDim + my;
        float s = 0;
        for (int i = 0; i < kEach; ++i)
            if (my + 32 * i < kHeadDim) s += q[i] * keys[at + 32 * i];
        for (int m = 16; m; m /= 2) s += __shfl_xor_sync(~0u, s, m);
        const float top = fmaxf(best, s), keep = expf(best - top), e = expf(s - top);
        best = top, mass = mass * keep + e;
        for (int i = 0; i < kEach; ++i)
            if (my + 32 * i < kHeadDim) o[i] = o[i] * keep + e * values[at + 32 * i];
    }
    for (int i = 0; i < kEach; ++i)
        if (my + 32 * i < kHeadDim)
            out[(long)p * kAttn + head * kHeadDim + my + 32 * i] = o[i] / mass;
}
__global__ void act_reference(float* a, const float* gu, long n) {
    EACH(i, n) a[i] = gu[2 * i] / (1 + expf(-gu[2 * i])) * gu[2 * i + 1];
}
struct Sources {
    const float* v[kLanes];
};
__global__ void residual_reference(float* x, const float* own, Sources past, int lane, bool add,
                                   float keep, long n) {
    EACH(i, n) {
        float s = keep * own[i];
        if (add)
            for (int l = 0; l < kLanes; ++l)
                if (l != lane) s += past.v[l][i];
        x[i] += s;
    }
}
// sums: {difference squared, reference squared}.
__device__ void add_sums(double* sums, double a, double b) {
    for (int m = 16; m; m /= 2) a += __shfl_xor_sync(~0u, a, m), b += __shfl_xor_sync(~0u, b, m);
    if (threadIdx.x % 32 == 0) atomicAdd(sums, a), atomicAdd(sums + 1, b);
}
__global__ void compare_hidden(double* sums, const float* got, const float* want, int lane, int n) {
    double a = 0, b = 0;
    EACH(i, (long)n * kHidden) {
        const float g = got[(i / kHidden * kLanes + lane) * kHidden + i % kHidden], w = want[i];
        a += (double)(g - w) * (g - w), b += (double)w * w;
    }
    add_sums(sums, a, b);
}
constexpr u16 kMark = 0x3c42;  // what no slot of a page should hold after a write
__global__ void compare_pages(double* key_sums, double* value_sums, u64* strays, const u8* pool,
                              const u32* pages, int pages_max, const float* keys,
                              const float* values, int unit, int n, int first) {
    double a = 0, b = 0, c = 0, d = 0;
    EACH(i, (long)kKvHeads * pages_max * kPage * kHeadDim) {
        const int f = i % kHeadDim, pos = i / kHeadDim % (pages_max * kPage),
                  h = i / kHeadDim / (pages_max * kPage);
        const u8* p =
            pool + ((u64)pages[pos / kPage] * (kAll * kKvHeads) + unit + h) * (2 * kPageHalf);
        const u16 k = ((const u16*)p)[pos % kPage * kHeadDim + f],
                  v = ((const u16*)(p + kPageHalf))[f * kPage + pos % kPage];
        if (pos >= first + n) {
            if (k != kMark || v != kMark) atomicAdd((unsigned long long*)strays, 1);
            continue;
        }
        const long at = ((long)h * (first + n) + pos) * kHeadDim + f;
        const float x = __half2float(__ushort_as_half(k)), y = __half2float(__ushort_as_half(v));
        if (pos < first) {
            if (x != keys[at] || y != values[at]) atomicAdd((unsigned long long*)strays, 1);
            continue;
        }
        a += (double)(x - keys[at]) * (x - keys[at]), b += (double)keys[at] * keys[at];
        c += (double)(y - values[at]) * (y - values[at]), d += (double)values[at] * values[at];
    }
    add_sums(key_sums, a, b), add_sums(value_sums, c, d);
}
__global__ void fill_words(u32* p, u32 v, long n) { EACH(i, n) p[i] = v; }

float* floats(long n) {
    float* p;
    CK(cudaMalloc(&p, n * 4));
    return p;
}
struct Checked {
    double hidden, keys, values;
    u64 strays;
};
Checked compare(const float* hidden, const u8* pool, const u32* pages, int pages_max,
                const u32* tokens, int n, int first) {
    const auto launch = [](auto kernel, auto... a) { kernel<<<1024, 256>>>(a...); };
    double* sums;
    u64* strays;
    CK(cudaMalloc(&sums, 64));
    CK(cudaMemset(sums, 0, 64));
    CK(cudaMalloc(&strays, 8));
    CK(cudaMemset(strays, 0, 8));
    float *w = floats((long)2 * kFfn * kHidden), *h = floats((long)n * kHidden),
          *y = floats((long)n * max_i(kQkv, 2 * kFfn)), *z = floats((long)n * max_i(kAttn, kFfn));
    float *keys = floats((long)kKvHeads * (first + n) * kHeadDim),
          *values = floats((long)kKvHeads * (first + n) * kHeadDim);
    std::vector<float*> x(kLanes);
    std::vector<std::vector<float*>> made(2 * kPast);
    for (auto& p : x) launch(embed_reference, p = floats((long)n * kHidden), tokens, n);
    for (auto& m : made)
        for (int l = 0; l < kLanes; ++l) m.push_back(floats((long)n * kHidden));
    const auto times = [&](float* to, int m, int layer, int lane, int rows, int k,
                           const float* from) {
        launch(make_matrix, w, m, layer, lane, rows, k);
        product<<<dim3((rows + 63) / 64, (n + 63) / 64), 256>>>(to, w, from, n, rows, k);
    };
    for (int layer = 0; layer < kLayers; ++layer)
        for (int kind = 0; kind < 2; ++kind) {
            auto& own = made[kind * kPast + layer % kPast];
            for (int l = 0; l < kLanes; ++l) {
                norm_reference<<<n, 256>>>(h, x[l], 2 * layer + kind);
                if (kind == 0) {
                    const int unit = (layer * kLanes + l) * kKvHeads;
                    times(y, kMatQkv, layer, l, kQkv, kHidden, h);
                    launch(past_reference, keys, values, unit, n, first);
                    launch(heads_reference, y, keys, values, n, first);
                    attention_reference<<<(n * kHeads + 7) / 8, 256>>>(z, y, keys, values, n, first,
                                                                       layer);
                    launch(compare_pages, sums + 2, sums + 4, strays, pool, pages, pages_max, keys,
                           values, unit, n, first);
                    times(own[l], kMatO, layer, l, kHidden, kAttn, z);
                } else {
                    times(y, kMatGu, layer, l, 2 * kFfn, kHidden, h);
                    launch(act_reference, z, y, (long)n * kFfn);
                    times(own[l], kMatDown, layer, l, kHidden, kFfn, z);
                }
            }
            Sources past;
            const bool add = kLanes > 1 && layer >= kDelay;
            for (int l = 0; l < kLanes; ++l)
                past.v[l] = made[kind * kPast + (layer + kPast - kDelay) % kPast][l];
            for (int l = 0; l < kLanes; ++l)
                launch(residual_reference, x[l], own[l], past, l, add,
                       kLanes > 1 && layer < kDelay ? sqrtf((float)kLanes) : 1.0f,
                       (long)n * kHidden);
        }
    for (int l = 0; l < kLanes; ++l) launch(compare_hidden, sums, hidden, x[l], l, n);
    CK(cudaDeviceSynchronize());
    double s[6];
    Checked c;
    CK(cudaMemcpy(s, sums, 48, cudaMemcpyDeviceToHost));
    CK(cudaMemcpy(&c.strays, strays, 8, cudaMemcpyDeviceToHost));
    c.hidden = std::sqrt(s[0] / s[1]), c.keys = std::sqrt(s[2] / s[3]),
    c.values = std::sqrt(s[4] / s[5]);
    for (float* p : {w, h, y, z, keys, values}) CK(cudaFree(p));
    for (float* p : x) CK(cudaFree(p));
    for (auto& m : made)
        for (float* p : m) CK(cudaFree(p));
    return c;
}

struct Bench {
    PrefillArgs a = {};
    int pages_max = 0, blocks = 0;
    u8* pool;
    u32* pages;
    size_t pool_bytes;
    void init(int positions);
    float launch(int first, int count, float* hidden, int from = 0, int to = kLayers);
    u64 hash();
};
void Bench::init(int positions) {
    cudaDeviceProp prop;
    CK(cudaGetDeviceProperties(&prop, 0));
    blocks = prop.multiProcessorCount;
    pages_max = positions / kPage + 2;
    std::vector<Segment> segs;
    const std::vector<Op> ops = plan_line(segs);
    u8* line;
    CK(cudaMalloc(&line, kLineBytes * kBlocks));
    for (const Op& o : ops)
        if (o.matrix != kMatHead) fill_line<<<2048, 256>>>(line, o);
    __half *embed, *norms;
    const long vocab = (long)kLanes * kVocab;
    CK(cudaMalloc(&embed, vocab * kHidden * 2));
    fill_plain<<<1024, 256>>>(embed, vocab, kHidden, kEmbedStream, 1, 0);
    CK(cudaMalloc(&norms, (2L * kLayers + 1) * kHidden * 2));
    fill_plain<<<256, 256>>>(norms, 2 * kLayers + 1, kHidden, kNormStream, 0.1f, 1);
    std::vector<float> hrope((size_t)pages_max * kPage * kHeadDim);
    for (int p = 0; p < pages_max * kPage; ++p)
        for (int j = 0; j < kHeadDim / 2; ++j) {
            const float g = p * std::pow(10000.0, -2.0 * j / kHeadDim);
            hrope[(long)p * kHeadDim + 2 * j] = std::cos(g);
            hrope[(long)p * kHeadDim + 2 * j + 1] = std::sin(g);
        }
    float* rope = floats(hrope.size());
    CK(cudaMemcpy(rope, hrope.data(), hrope.size() * 4, cudaMemcpyHostToDevice));
    std::vector<u32> hpages(pages_max), htokens(positions);
    for (int i = 0; i < pages_max; ++i) hpages[i] = pages_max - 1 - i;
    for (int i = 0; i < positions; ++i) htokens[i] = mix(i + 5) % (u32)vocab;
    u32* tokens;
    CK(cudaMalloc(&pages, pages_max * 4));
    CK(cudaMemcpy(pages, hpages.data(), pages_max * 4, cudaMemcpyHostToDevice));
    CK(cudaMalloc(&tokens, positions * 4));
    CK(cudaMemcpy(tokens, htokens.data(), positions * 4, cudaMemcpyHostToDevice));
    pool_bytes = (size_t)pages_max * kAll * kKvHeads * 2 * kPageHalf;
    CK(cudaMalloc(&pool, pool_bytes));
    CK(cudaMalloc(&a.scratch, kPrefillScratch));
    CK(cudaMemset(a.scratch, 0xff, kPrefillScratch));  // NaN where nothing was written
    CK(cudaMalloc(&a.arrivals, 8 * kPrefillCounters));
    CK(cudaMalloc(&a.model.poison, 8));
    CK(cudaMemset(a.model.poison, 0, 8));
    CK(cudaMalloc(&a.model.records, sizeof(Record) * blocks));
    CK(cudaMemset(a.model.records, 0, sizeof(Record) * blocks));
    CK(cudaMalloc(&a.model.trace, 8 * 16 * blocks));
    a.model.line = line, a.model.embed = (u32*)embed, a.model.norms = (u32*)norms;
    a.model.rope = rope, a.model.pool = pool, a.model.pages = pages, a.model.pages_max = pages_max;
    a.model.budget_ns = 1000000000, a.tokens = tokens, a.blocks = blocks;
    CK(cudaFuncSetAttribute(kie_prefill, cudaFuncAttributeMaxDynamicSharedMemorySize,
                            kPrefillShared));
    CK(cudaDeviceSynchronize());
}
float Bench::launch(int first, int count, float* hidden, int layer, int end) {
    a.first = first, a.count = count, a.hidden = hidden, a.from = layer, a.to = end;
    cudaEvent_t from, to;
    CK(cudaEventCreate(&from));
    CK(cudaEventCreate(&to));
    CK(cudaMemset(a.arrivals, 0, 8 * kPrefillCounters));
    void* p[] = {&a};
    CK(cudaEventRecord(from));
    CK(cudaLaunchCooperativeKernel((void*)kie_prefill, blocks, kPrefillThreads, p, kPrefillShared,
                                   0));
    CK(cudaEventRecord(to));
    CK(cudaDeviceSynchronize());
    u64 poison;
    CK(cudaMemcpy(&poison, a.model.poison, 8, cudaMemcpyDeviceToHost));
    if (poison) {
        std::vector<Record> r(blocks);
        CK(cudaMemcpy(r.data(), a.model.records, sizeof(Record) * blocks, cudaMemcpyDeviceToHost));
        for (int b = 0, n = 0; b < blocks && n < 8; ++b)
            if (r[b].when_ns)
                printf("block %d gave up: where %x layer %u wanted %u seen %u\n", b, r[b].where,
                       r[b].step, r[b].wanted, r[b].seen),
                    ++n;
        exit(2);
    }
    float ms;
    CK(cudaEventElapsedTime(&ms, from, to));
    return ms;
}
__global__ void hash_words(u64* sum, const u32* p, long n) {
    u64 s = 0;
    EACH(i, n) s += mix(p[i] ^ mix((u32)i));
    atomicAdd((unsigned long long*)sum, s);
}
u64 Bench::hash() {
    u64 *d, h;
    CK(cudaMalloc(&d, 8));
    CK(cudaMemset(d, 0, 8));
    hash_words<<<1024, 256>>>(d, (const u32*)pool, pool_bytes / 4);
    CK(cudaMemcpy(&h, d, 8, cudaMemcpyDeviceToHost));
    CK(cudaFree(d));
    return h;
}
void print_trace(const Bench& b) {
#ifdef KIE_TRACE
    std::vector<u64> tr(16 * b.blocks);
    CK(cudaMemcpy(tr.data(), b.a.model.trace, tr.size() * 8, cudaMemcpyDeviceToHost));
    const char* names[] = {"qkv", "o", "gate/up", "down", "attention", "embed"};
    for (int i = 0; i < 16; ++i) {
        double s = 0, low = 1e30, high = 0;
        for (int k = 0; k < b.blocks; ++k) {
            const double v = tr[k * 16 + i] * 1e-6;
            s += v, low = std::min(low, v), high = std::max(high, v);
        }
        printf("    %-9s %s mean %7.2f min %7.2f max %7.2f Mticks\n",
               names[i < 12 ? i / 2 : i - 12],
               i >= 12 ? "products"
               : i % 2 ? "wait"
                       : "work",
               s / b.blocks, low, high);
    }
#endif
}

int main(int argc, char** argv) {
    if (argc < 7) return 1;
    const char* name = argv[1];
    const int first = atoi(argv[2]), repeats = atoi(argv[4]), check_count = atoi(argv[5]),
              check_first = atoi(argv[6]);
    std::vector<int> counts;
    for (char* s = strtok(argv[3], ","); s; s = strtok(nullptr, ",")) counts.push_back(atoi(s));
    int most = check_count + check_first;
    for (int c : counts) most = std::max(most, first + c);
    Bench b;
    b.init(most);
    printf("%s: scratch %.1f MB, shared %d B, %d stages, %d blocks\n", name, kPrefillScratch * 1e-6,
           kPrefillShared, kStages, b.blocks);
    if (argc > 7) {
        ++b.a.blocks, b.a.model.budget_ns = 50000000;
        b.launch(0, 64, nullptr);
        printf("HANG not noticed\n");
        return 1;
    }
    if (check_count) {
        float* hidden = floats((long)check_count * kLanes * kHidden);
        CK(cudaMemset(hidden, 0xff, (long)check_count * kLanes * kHidden * 4));
        // The second time in slices of layers, as between other requests' tokens.
        const bool sliced = check_first % kPage + check_count <= kChunk;
        for (int slice = kLayers; slice > 0; slice = slice == kLayers && sliced ? 2 : 0) {
            fill_words<<<1024, 256>>>((u32*)b.pool, kMark * 0x10001u, b.pool_bytes / 4);
            if (check_first) fill_pages<<<1024, 256>>>(b.pool, b.pages, b.pages_max, check_first);
            CK(cudaMemset(hidden, 0xff, (long)check_count * kLanes * kHidden * 4));
            for (int l = 0; l < kLayers; l += slice)
                b.launch(check_first, check_count, hidden, l, std::min(l + slice, kLayers));
            const Checked c =
                compare(hidden, b.pool, b.pages, b.pages_max, b.a.tokens, check_count, check_first);
            const bool ok = c.hidden < 3e-3 && c.keys < 3e-3 && c.values < 3e-3 && c.strays == 0;
            printf(
                "CHECK %s %s: %d positions from %d, %d layers a launch: residual %.2e, keys "
                "%.2e, values %.2e, strays %llu\n",
                name, ok ? "ok" : "FAILED", check_count, check_first, slice, c.hidden, c.keys,
                c.values, c.strays);
        }
        CK(cudaFree(hidden));
    }
    const double weights =
        (double)kLanes * kLayers *
        ((double)kQkv * kHidden + (double)kAttn * kHidden + 3.0 * kFfn * kHidden);
    for (int count : counts) {
        std::vector<float> ms;
        u64 h = 0;
        bool steady = true;
        for (int r = 0; r <= repeats; ++r) {
            fill_words<<<1024, 256>>>((u32*)b.pool, 0, b.pool_bytes / 4);
            CK(cudaMemset(b.a.model.trace, 0, 8 * 16 * b.blocks));
            const float t = b.launch(first, count, nullptr);
            const u64 now = b.hash();
            if (r > 0) ms.push_back(t), steady &= now == h;
            h = now;
        }
        if (ms.empty()) continue;
        const float last = ms.back();
        std::sort(ms.begin(), ms.end());
        const double m = ms[ms.size() / 2];
        printf(
            "ROW %s %d positions from %d: %.2f ms (min %.2f max %.2f last %.2f), products %.0f "
            "TFLOP/s, "
            "%.0f positions/s, pages %s %016llx\n",
            name, count, first, m, ms.front(), ms.back(), last, 2e-9 * weights * count / m,
            count / m * 1e3, steady ? "steady" : "MOVING", h);
        print_trace(b);
        fflush(stdout);
    }
    return 0;
}
