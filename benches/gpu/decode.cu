// Stand-alone harness of the decode kernel: plans the line, fills random weights on the device,
// checks the logits against a plain reference on the same device, then times tokens with in-kernel
// stamps. Build: nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -I kernels -D KIE_...
// (see run.py) Run:   ./decode NAME context tokens repeats in_flight_bytes[,..] check(0|1)
// [ticks_a_KiB[,..]]
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/platform.h"
#include "cuda/tile.h"
#include "common/shape.h"
#include "common/args.h"
#include "common/exchange.h"
#include "common/ring.h"
#include "common/matvec.h"
#include "common/attention.h"
#include "common/decode.h"

#include "weights.cuh"

// Reference matrix product, weights from the generator: one warp a row.
__global__ void plain(int matrix, int layer, int lane, int rows, int k, const float* x, float* y) {
    const int row = blockIdx.x * 8 + threadIdx.x / 32;
    if (row >= rows) return;
    const float scale = 1.0f / sqrtf((float)k);
    float s = 0;
    for (int i = threadIdx.x % 32; i < k; i += 32)
        s += uniform(stream_of(matrix, layer, lane), row, i, scale) * x[i];
    for (int m = 16; m; m /= 2) s += __shfl_xor_sync(~0u, s, m);
    if (threadIdx.x % 32 == 0) y[row] = s;
}

struct Reference {
    float *dx, *dy;
    std::vector<float> norms;
    std::vector<std::vector<float>> keys, values;  // [column][unit * positions * d]
    int context, positions;
    std::vector<float> product(int m, int layer, int lane, int rows, int k,
                               const std::vector<float>& x) {
        CK(cudaMemcpy(dx, x.data(), k * 4, cudaMemcpyHostToDevice));
        plain<<<(rows + 7) / 8, 256>>>(m, layer, lane, rows, k, dx, dy);
        std::vector<float> y(rows);
        CK(cudaMemcpy(y.data(), dy, rows * 4, cudaMemcpyDeviceToHost));
        return y;
    }
    std::vector<float> norm(const std::vector<float>& x, int which) {
        double s = 0;
        for (float v : x) s += (double)v * v;
        const float f = 1.0 / std::sqrt(s / kHidden + kEps);
        std::vector<float> y(kHidden);
        for (int i = 0; i < kHidden; ++i) y[i] = x[i] * f * norms[(long)which * kHidden + i];
        return y;
    }
    static float rope_angle(int pos, int j) { return pos * std::pow(10000.0, -2.0 * j / kHeadDim); }
    float* at(std::vector<float>& v, int unit, int pos) {
        return v.data() + ((long)unit * positions + pos) * kHeadDim;
    }
    void init(int ctx, int steps) {
        context = ctx, positions = ctx + steps;
        CK(cudaMalloc(&dx, 4 * 65536));
        CK(cudaMalloc(&dy, 4 * 262144));
        norms.resize((2L * kLayers + 1) * kHidden);
        for (long i = 0; i < (long)norms.size(); ++i)
            norms[i] = __half2float(
                __float2half(1.0f + uniform(kNormStream, i / kHidden, i % kHidden, 0.1f)));
        keys.resize(kColumns), values.resize(kColumns);
        for (int c = 0; c < kColumns; ++c) {
            keys[c].resize(kAll * kKvHeads * positions * kHeadDim), values[c] = keys[c];
            for (int u = 0; u < kAll * kKvHeads; ++u)
                for (int p = 0; p < context; ++p)
                    for (int d = 0; d < kHeadDim; ++d) {
                        at(keys[c], u, p)[d] = uniform(kKeyStream + u, p + 7919 * c, d, 1);
                        at(values[c], u, p)[d] = uniform(kValueStream + u, p + 7919 * c, d, 1);
                    }
        }
    }
    std::vector<float> step(int c, int token, int pos) {
        std::vector<std::vector<float>> x(kLanes, std::vector<float>(kHidden));
        for (int l = 0; l < kLanes; ++l)
            for (int i = 0; i < kHidden; ++i) x[l][i] = uniform(kEmbedStream, token, i, 1);
        std::vector<std::vector<std::vector<float>>> past[2];
        for (int layer = 0; layer < kLayers; ++layer) {
            for (int kind = 0; kind < 2; ++kind) {
                std::vector<std::vector<float>> o(kLanes);
                for (int l = 0; l < kLanes; ++l) {
                    const auto h = norm(x[l], 2 * layer + kind);
                    if (kind == 0)
                        o[l] = attention(c, layer, l, pos, h);
                    else {
                        const auto gu = product(kMatGu, layer, l, 2 * kFfn, kHidden, h);
                        std::vector<float> a(kFfn);
                        for (int i = 0; i < kFfn; ++i)
                            a[i] = gu[2 * i] / (1 + std::exp(-gu[2 * i])) * gu[2 * i + 1];
                        o[l] = product(kMatDown, layer, l, kHidden, kFfn, a);
                    }
                }
                for (int l = 0; l < kLanes; ++l)
                    for (int i = 0; i < kHidden; ++i) {
                        if (kLanes == 1) {
                            x[l][i] += o[l][i];
                            continue;
                        }
                        if (layer < kDelay) {
                            x[l][i] += std::sqrt((float)kLanes) * o[l][i];
                            continue;
                        }
                        float s = o[l][i];
                        for (int j = 0; j < kLanes; ++j)
                            if (j != l) s += past[kind][layer - kDelay][j][i];
                        x[l][i] += s;
                    }
                past[kind].push_back(o);
            }
        }
        std::vector<float> logits;
        for (int l = 0; l < kLanes; ++l) {
            const auto y = product(kMatHead, kLayers, l, kVocab, kHidden, norm(x[l], 2 * kLayers));
            logits.insert(logits.end(), y.begin(), y.end());
        }
        return logits;
    }
    std::vector<float> attention(int c, int layer, int l, int pos, const std::vector<float>& h) {
        auto y = product(kMatQkv, layer, l, kQkv, kHidden, h);
        for (int r = 0; r < (kHeads + kKvHeads) * kHeadDim; r += 2) {
            const float a = rope_angle(pos, r % kHeadDim / 2), s = std::sin(a), k = std::cos(a),
                        v0 = y[r], v1 = y[r + 1];
            y[r] = v0 * k - v1 * s, y[r + 1] = v0 * s + v1 * k;
        }
        std::vector<float> out(kAttn);
        int from = layer < kWindowLayers && pos >= kWindow ? pos - kWindow + 1 : 0;
        for (int kv = 0; kv < kKvHeads; ++kv) {
            const int u = (layer * kLanes + l) * kKvHeads + kv;
            std::copy_n(y.begin() + kAttn + kv * kHeadDim, kHeadDim, at(keys[c], u, pos));
            std::copy_n(y.begin() + kAttn + (kKvHeads + kv) * kHeadDim, kHeadDim,
                        at(values[c], u, pos));
            for (int q = kv * kGroup; q < (kv + 1) * kGroup; ++q) {
                std::vector<double> w(pos + 1);
                double top = -1e30, sum = 0;
                for (int p = from; p <= pos; ++p) {
                    double s = 0;
                    for (int d = 0; d < kHeadDim; ++d)
                        s += y[q * kHeadDim + d] * at(keys[c], u, p)[d];
                    w[p] = s / std::sqrt((double)kHeadDim), top = std::max(top, w[p]);
                }
                std::vector<double> o(kHeadDim, 0);
                for (int p = from; p <= pos; ++p) {
                    const double e = std::exp(w[p] - top);
                    sum += e;
                    for (int d = 0; d < kHeadDim; ++d) o[d] += e * at(values[c], u, p)[d];
                }
                for (int d = 0; d < kHeadDim; ++d) out[q * kHeadDim + d] = o[d] / sum;
            }
        }
        return product(kMatO, layer, l, kHidden, kAttn, out);
    }
};

template <class S>
void describe(const char* n) {
    printf("  %-5s %4d rows x %5d: %2d x %2d warps, %d tiles, %2d stages of %5d B\n", n, S::rows,
           S::k, S::row_warps, S::k_warps, S::tiles, S::stages, S::stage_bytes);
}

int main(int argc, char** argv) {
    const char* name = argv[1];
    const int context = atoi(argv[2]), tokens = atoi(argv[3]), repeats = atoi(argv[4]);
    const bool check = atoi(argv[6]) != 0;
    std::vector<int> paces;
    for (char* q = strtok(argc > 7 ? argv[7] : strdup("0"), ","); q; q = strtok(nullptr, ","))
        paces.push_back(atoi(q));
    const int pages_max = (context + tokens + kPage) / kPage + 1, check_steps = 3;
    std::vector<Segment> segs;
    const std::vector<Op> ops = plan_line(segs);
    if (check) {
        printf("%s: %.3f GB a token, ring %d x %d B, shared %d B, %ld words\n", name,
               kLineBytes * 1e-9 * kBlocks, kSlots, kSlotBytes, kSharedBytes, kWords);
        describe<SplitQkv>("qkv");
        describe<SplitO>("o");
        describe<SplitGu>("gu");
        describe<SplitDown>("down");
        describe<SplitHead>("head");
        if (kHeadTail) describe<SplitTail>("tail");
    }
    DecodeArgs a = {};
    u8 *line, *pool;
    __half *embed, *norms;
    float *rope, *logits;
    u32 *pages, *out;
    Segment* dsegs;
    CK(cudaMalloc(&line, kLineBytes * kBlocks));
    for (const Op& o : ops) fill_line<<<2048, 256>>>(line, o);
    const long vocab = (long)kLanes * kVocab;
    CK(cudaMalloc(&embed, vocab * kHidden * 2));
    fill_plain<<<1024, 256>>>(embed, vocab, kHidden, kEmbedStream, 1, 0);
    CK(cudaMalloc(&norms, (2L * kLayers + 1) * kHidden * 2));
    fill_plain<<<256, 256>>>(norms, 2 * kLayers + 1, kHidden, kNormStream, 0.1f, 1);
    std::vector<float> hrope((size_t)pages_max * kPage * kHeadDim);
    for (int p = 0; p < pages_max * kPage; ++p)
        for (int j = 0; j < kHeadDim / 2; ++j) {
            const float g = Reference::rope_angle(p, j);
            hrope[((long)p * kHeadDim / 2 + j) * 2] = std::cos(g),
                                                 hrope[((long)p * kHeadDim / 2 + j) * 2 + 1] =
                                                     std::sin(g);
        }
    CK(cudaMalloc(&rope, hrope.size() * 4));
    CK(cudaMemcpy(rope, hrope.data(), hrope.size() * 4, cudaMemcpyHostToDevice));
    std::vector<u32> hpages(kColumns * pages_max);
    for (int i = 0; i < (int)hpages.size(); ++i) hpages[i] = (int)hpages.size() - 1 - i;
    CK(cudaMalloc(&pages, hpages.size() * 4));
    CK(cudaMemcpy(pages, hpages.data(), hpages.size() * 4, cudaMemcpyHostToDevice));
    const size_t pool_bytes = (size_t)hpages.size() * kAll * kKvHeads * 2 * kPageHalf;
    CK(cudaMalloc(&pool, pool_bytes));
    CK(cudaMemset(pool, 0, pool_bytes));
    CK(cudaMalloc(&dsegs, segs.size() * 8));
    CK(cudaMemcpy(dsegs, segs.data(), segs.size() * 8, cudaMemcpyHostToDevice));
    CK(cudaMalloc(&logits, check_steps * kColumns * vocab * 4));
    CK(cudaMalloc(&out, tokens * kColumns * 4));
    CK(cudaMalloc(&a.words, kWords * 8));
    CK(cudaMemset(a.words, 0, kWords * 8));
    CK(cudaMalloc(&a.poison, 8));
    CK(cudaMemset(a.poison, 0, 8));
    CK(cudaMalloc(&a.records, sizeof(Record) * kBlocks));
    CK(cudaMemset(a.records, 0, sizeof(Record) * kBlocks));
    CK(cudaMalloc(&a.stamps, 8 * (tokens + 1)));
#ifdef KIE_TRACE
    CK(cudaMalloc(&a.trace, 8 * 16 * kBlocks));
#endif
    a.line = line, a.embed = (u32*)embed, a.norms = (u32*)norms, a.rope = rope, a.pool = pool,
    a.pages = pages;
    a.segments = dsegs, a.segment_count = segs.size(), a.pages_max = pages_max, a.tokens = out,
    a.logits = logits;
    a.budget_ns = 200000000, a.epoch = 0x7ffffffd;
    for (int c = 0; c < kColumns; ++c) a.position[c] = context, a.token[c] = 11 + 13 * c;
    CK(cudaDeviceSynchronize());
    CK(cudaFuncSetAttribute(kie_decode, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    const auto launch = [&](int steps, int dump) {
        fill_pages<<<1024, 256>>>(pool, pages, pages_max, context);
        a.steps = steps, a.dump_steps = dump;
        void* p[] = {&a};
        CK(cudaLaunchCooperativeKernel((void*)kie_decode, kBlocks, kThreads + 32, p, kSharedBytes,
                                       0));
        CK(cudaDeviceSynchronize());
        a.epoch += steps;
        u64 poison;
        CK(cudaMemcpy(&poison, a.poison, 8, cudaMemcpyDeviceToHost));
        if (poison) {
            std::vector<Record> r(kBlocks);
            CK(cudaMemcpy(r.data(), a.records, sizeof(Record) * kBlocks, cudaMemcpyDeviceToHost));
            for (int b = 0, n = 0; b < kBlocks && n < 8; ++b)
                if (r[b].when_ns)
                    printf("block %d gave up: where %x step %u wanted %x seen %x\n", b, r[b].where,
                           r[b].step, r[b].wanted, r[b].seen),
                        ++n;
            exit(2);
        }
    };
    std::vector<int> flights;
    for (char* s = strtok(argv[5], ","); s; s = strtok(nullptr, ",")) flights.push_back(atoi(s));
    a.in_flight_bytes = flights[0];
    if (check) {
        CK(cudaMemset(logits, 0xff, check_steps * kColumns * vocab * 4));
        launch(check_steps, check_steps);
        std::vector<float> got(check_steps * kColumns * vocab);
        std::vector<u32> chosen(check_steps * kColumns);
        CK(cudaMemcpy(got.data(), logits, got.size() * 4, cudaMemcpyDeviceToHost));
        CK(cudaMemcpy(chosen.data(), out, chosen.size() * 4, cudaMemcpyDeviceToHost));
        Reference ref;
        ref.init(context, check_steps);
        double worst = 0;
        int same = 0, picks = 0;
        for (int c = 0; c < kColumns; c += kColumns > 1 ? kColumns - 1 : 1) {
            int token = a.token[c];
            for (int s = 0; s < check_steps; ++s) {
                const auto want = ref.step(c, token, context + s);
                const float* y = got.data() + ((long)s * kColumns + c) * vocab;
                double d = 0, n = 0;
                for (long i = 0; i < vocab; ++i)
                    d += (y[i] - want[i]) * (double)(y[i] - want[i]),
                        n += (double)want[i] * want[i];
                const double e = std::sqrt(d / n);
                if (!(e <= worst)) worst = e;
                const long best = std::max_element(y, y + vocab) - y;
                token = chosen[s * kColumns + c], same += best == token, ++picks;
                printf(
                    "  column %d step %d: relative L2 %.2e, norm %.3g, token %d (argmax of dumped "
                    "logits %ld, of reference %ld)\n",
                    c, s, e, std::sqrt(n), token, best,
                    (long)(std::max_element(want.begin(), want.end()) - want.begin()));
            }
        }
        printf("CHECK %s %s worst %.2e, %d of %d tokens are the argmax\n", name,
               worst < 2e-3 && same == picks ? "ok" : "FAILED", worst, same, picks);
        if (!(worst < 2e-3) || same != picks) return 1;
    }
    u32 first_hash = 0;
    bool steady = true;
    std::vector<u32> first_tokens;
    for (int f : flights)
        for (int pace : paces) {
            a.in_flight_bytes = f, a.pace = pace;
            std::vector<double> us;
            std::vector<u64> stamps(tokens + 1);
            std::vector<double> gaps;
            for (int r = 0; r < repeats + 1; ++r) {
                launch(tokens, 0);
                std::vector<u32> chosen(tokens * kColumns);
                CK(cudaMemcpy(chosen.data(), out, chosen.size() * 4, cudaMemcpyDeviceToHost));
                u32 h = 0;
                for (u32 t : chosen) h = mix(h ^ t) + 1;
                if (first_hash == 0) first_hash = h, first_tokens = chosen;
                for (int i = 0; steady && i < tokens * kColumns; ++i)
                    if (chosen[i] != first_tokens[i])
                        printf("  repeat %d moved: step %d column %d\n", r, i / kColumns,
                               i % kColumns),
                            steady = false;
                CK(cudaMemcpy(stamps.data(), a.stamps, 8 * (tokens + 1), cudaMemcpyDeviceToHost));
                if (r == 0) continue;
                us.push_back((stamps[tokens] - stamps[4]) * 1e-3 / (tokens - 4));
                for (int t = 4; t < tokens; ++t) gaps.push_back((stamps[t + 1] - stamps[t]) * 1e-3);
            }
            std::sort(us.begin(), us.end());
            std::sort(gaps.begin(), gaps.end());
            const double m = us[us.size() / 2];
            printf(
                "ROW %-22s in flight %6d pace %3d: %8.1f us/token (min %.1f max %.1f; p99 gap "
                "%.1f) %6.0f GB/s, tokens %s %08x\n",
                name, f, pace, m, us.front(), us.back(), gaps[gaps.size() * 99 / 100],
                kNoStream ? 0.0 : kLineBytes * 1e-3 * kBlocks / m, steady ? "steady" : "MOVING",
                first_hash);
            fflush(stdout);
#ifdef KIE_TRACE
            std::vector<u64> tr(16 * kBlocks);
            CK(cudaMemcpy(tr.data(), a.trace, tr.size() * 8, cudaMemcpyDeviceToHost));
            const char* names[] = {"x.gather", "qkv.mul",     "qkv.out",    "attend",
                                   "merge",    "o.mul",       "o.out",      "h.gather",
                                   "gu.mul",   "gu.out",      "act.gather", "d.mul",
                                   "d.out",    "head.gather", "head.mul",   "choose"};
            for (int i = 0; i < 16; ++i) {
                std::vector<double> v;
                for (int b = 0; b < kBlocks; ++b)
                    v.push_back(tr[b * 16 + i] / 1980.0 / tokens / (i < 13 ? kLayers : 1));
                std::sort(v.begin(), v.end());
                double s = 0;
                for (double q : v) s += q;
                printf("    %-11s mean %6.3f min %6.3f max %6.3f us%s\n", names[i], s / kBlocks,
                       v.front(), v.back(), i < 13 ? " a layer" : "");
            }
#endif
        }
    return 0;
}
