// Results of products with the normed residual, to where they are needed: queries, keys and values,
// rotated; the mlp's activation.
#pragma once

#include "lowered.h"
#include "ops/gate.h"
#include "platform.h"
#include "prefill/layout.h"
#include "prefill/multiply.h"
#include "prefill/tiles.h"

// 1 / rms of each place of a task, into shared memory.
KIE_DEVICE void take_scales(const PrefillArgs& args, const TileTask& task, float* scale) {
    const int n = thread();
    if (n >= task.width) return;
    const float* from = (const float*)(args.scratch + kScrSquares) +
                        (long)task.lane_index * kFours * kChunk + task.place + n;
    float sum = 0;
    KIE_UNROLL for (int r = 0; r < kFours; ++r) sum += from[(long)r * kChunk];
    scale[n] = rsqrt_f(sum * (1.0f / kHiddenReal) + kEps);
}
// Two neighbouring places (v[place][row]) of two neighbouring rows of a head, f and f + 1.
template <class C>
KIE_DEVICE void put_query(const PrefillArgs& args, int lane_index, int head, int f, int place,
                          const float (&v)[2][2]) {
    u32* q = (u32*)(args.scratch + kScrQ + query_at<C>(lane_index, head, place)) + f / 16 * 128 +
             place % 8 * 16 + f % 8 / 2 * 4 + place % 16 / 8 + f % 16 / 8 * 2;
    q[0] = pack_half2(v[0][0], v[0][1]), q[16] = pack_half2(v[1][0], v[1][1]);
}
template <class C>
KIE_DEVICE void put_state(u8* page, int f, int place, bool is_v, bool live0, bool live1,
                          const float (&v)[2][2]) {
    const int slot = place % kPage;
    if (!is_v) {
        u32* k = (u32*)(page + (slot * C::kHeadDim + f) * 2);
        if (live0) k[0] = pack_half2(v[0][0], v[0][1]);
        if (live1) k[C::kHeadDim / 2] = pack_half2(v[1][0], v[1][1]);
        return;
    }
    u16* p = (u16*)(page + C::kPageHalf) + f * kPage + slot;
    const u32 a = pack_half2(v[0][0], v[1][0]), b = pack_half2(v[0][1], v[1][1]);
    if (live0 && live1) {
        *(u32*)p = a, *(u32*)(p + kPage) = b;
    } else if (live0) {
        p[0] = (u16)a, p[kPage] = (u16)b;
    } else if (live1) {
        p[1] = (u16)(a >> 16), p[kPage + 1] = (u16)(b >> 16);
    }
}

// Gates of attention's output stand where the output will.
template <class C>
KIE_DEVICE void put_gate(const PrefillArgs& args, int lane_index, int row, int place,
                         const float (&v)[2][2]) {
    u8* to = args.scratch + kScrAttn + operand_at(lane_index, C::kAttn, place, row);
    *(u32*)to = pack_half2(v[0][0], v[0][1]), *(u32*)(to + 16) = pack_half2(v[1][0], v[1][1]);
}

// q and k rotated (those with norms later, behind the norms), k and v into their pages.
template <class C>
KIE_DEVICE void put_qkv(const PrefillArgs& args, const Chunk& chunk, int layer,
                        const TileTask& task, const WideRows& rows, int place, int batches,
                        const float* scale, float (&d)[kSums]) {
    const int my = lane(), g = my / 4, t = my % 4, row = rows.row + 2 * g;
    const bool live = 2 * g < rows.live;
    // Gates behind the values turn as little.
    const bool is_q = row < C::kAttn, is_v = row >= C::kAttn + C::kKvHeads * C::kHeadDim,
               is_gate = C::kGated && row >= C::kQkv;
    const int head = row / C::kHeadDim, f = row % C::kHeadDim;
    const int kv_head = is_q ? 0 : is_v ? head - C::kHeads - C::kKvHeads : head - C::kHeads;
    const float factor = is_q && !C::kHeadNorm ? C::kQueryScale : 1.0f;
    const int kv_index = task.lane_index * C::kKvHeads + kv_head;
    float bias[2] = {0, 0};
    if constexpr (C::kBias) {
        const float* from = args.model.biases + args.model.layers[layer].biases +
                            task.lane_index * (C::TilingQkv::rows * kBlocksPerLane);
        bias[0] = from[row] * factor, bias[1] = from[row + 1] * factor;
    }
    const u64* rope = (const u64*)(args.model.rope + C::kRope + f);
    const int last_page = (chunk.base + chunk.to - 1) / kPage;
    place += 2 * t, scale += 2 * t;
    const auto page_of = [&](int place) -> u8* {
        const int at = (chunk.base + place) / kPage;
        return is_q || is_gate
                   ? nullptr
                   : prefill_page<C>(args, layer, kv_index, at < last_page ? at : last_page);
    };
    u8* next = page_of(place);
    KIE_NO_UNROLL for (int n = 2 * batches; n > 0; --n, place += 32, scale += 32) {
        u64 turn[4][2];
        u8* page = next;
        next = page_of(place + 32);  // asked for before this one's stores
        KIE_UNROLL for (int i = 0; i < 8; ++i) {
            const int at = place + i / 2 * 8 + i % 2,
                      to = chunk.base + (at < chunk.to ? at : chunk.to - 1);
            turn[i / 2][i % 2] =
                is_v || C::kHeadNorm ? 0x3f800000u : rope[(long)to * (C::kHeadDim / 2)];
        }
        KIE_UNROLL for (int j = 0; j < 4; ++j) {
            const int at = place + 8 * j;
            float v[2][2];  // [place][row]
            KIE_UNROLL for (int e = 0; e < 2; ++e) {
                const float s = scale[8 * j + e] * factor, a = d[4 * j + e] * s + bias[0],
                            b = d[4 * j + 2 + e] * s + bias[1], c = number((u32)turn[j][e]),
                            i = number((u32)(turn[j][e] >> 32));
                v[e][0] = a * c - b * i, v[e][1] = a * i + b * c;
            }
            if (!live) continue;
            if (is_gate)
                put_gate<C>(args, task.lane_index, row - C::kQkv, at, v);
            else if (is_q)
                put_query<C>(args, task.lane_index, head, f, at, v);
            else
                put_state<C>(page, f, at, is_v, chunk.has(at), chunk.has(at + 1), v);
        }
        move_up<16>(d);
    }
}

// Of an mlp of `ffn` features: that of the layer, or that of the expert that all positions go to.
template <class C>
KIE_DEVICE void put_act(const PrefillArgs& args, const TileTask& task, int ffn,
                        const WideRows& rows, int place, int batches, const float* scale,
                        float (&d)[kSums]) {
    const int my = lane(), g = my / 4, t = my % 4, odd = g & 1;
    const int f = (rows.row + 2 * g) / 2 - odd;  // of a pair: the even one stores the first place
    u8* to = args.scratch + kScrAct + operand_at(task.lane_index, ffn, place + 2 * t + odd, f);
    scale += 2 * t;
    KIE_NO_UNROLL for (; batches > 0; --batches, to += kBatch * kCores, scale += 8 * kBatch) {
        KIE_UNROLL for (int j = 0; j < kBatch; ++j) {
            float y[2];
            KIE_UNROLL for (int e = 0; e < 2; ++e) {
                const float s = scale[8 * j + e], gate = d[4 * j + e] * s,
                            up = d[4 * j + 2 + e] * s;
                if constexpr (C::kRouted)
                    y[e] = gated<C>(gate, up);
                else
                    y[e] = gate * up * reciprocal_f(1.0f + exp2_f(-1.44269504f * gate));
            }
            const float mine = odd ? y[1] : y[0], other = shuffle_xor(odd ? y[0] : y[1], 4);
            if (2 * g < rows.live)
                *(u32*)(to + j * kCores) = odd ? pack_half2(other, mine) : pack_half2(mine, other);
        }
        move_up<4 * kBatch>(d);
    }
}
