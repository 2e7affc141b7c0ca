// The gated delta rule of a chunk (ops/delta.h says what it is): three phases in place of
// attention's. Products leave q, k, v and z of each place as floats, and b and a of each head. Then
// a block takes a unit, as when decoding, through all places (prefill/delta_scan.h). Outputs stand
// where v was; behind a meeting, since a head's norm is over all its units, they become the operand
// of the o product.
#pragma once

#include "lowered.h"
#include "ops/sigmoid.h"
#include "platform.h"
#include "prefill/layout.h"
#include "prefill/multiply.h"
#include "prefill/tiles.h"
#include "shape.h"

// A place's products, `n` of a head of keys on.
template <class C>
KIE_DEVICE float* delta_row(const PrefillArgs& args, int place, int key, int n) {
    return (float*)(args.scratch + kScrDelta) + (long)place * C::kRowsIn + key * C::kKeyRows + n;
}
KIE_DEVICE u64* delta_gates(const PrefillArgs& args, int heads, int place, int head) {
    return (u64*)(args.scratch + kScrGates) + (long)place * heads + head;
}

// Results of both products; put(place, pair of rows).
template <class Put>
KIE_DEVICE void put_floats(int place, int batches, const float* scale, float (&d)[kSums], Put put) {
    const int t = lane() % 4;
    place += 2 * t, scale += 2 * t;
    KIE_NO_UNROLL for (; batches > 0; --batches, place += 8 * kBatch, scale += 8 * kBatch) {
        KIE_UNROLL for (int j = 0; j < kBatch; ++j) {
            KIE_UNROLL for (int e = 0; e < 2; ++e) {
                const float s = scale[8 * j + e];
                put(place + 8 * j + e,
                    (u64)bits(d[4 * j + 2 + e] * s) << 32 | bits(d[4 * j + e] * s));
            }
        }
        move_up<4 * kBatch>(d);
    }
}
template <class C>
KIE_DEVICE void put_delta_input(const PrefillArgs& args, const WideRows& rows, int place,
                                int batches, const float* scale, float (&d)[kSums]) {
    const int own = (int)lane() / 4 * 2;
    const bool live = own < rows.live;
    float* to = delta_row<C>(args, 0, 0, rows.row + own);
    put_floats(place, batches, scale, d, [&](int at, u64 both) {
        if (live) *(u64*)(to + (long)at * C::kRowsIn) = both;
    });
}
// A pair of rows is b and a of a unit; a head's units have the same.
template <class C>
KIE_DEVICE void put_delta_gates(const PrefillArgs& args, const WideRows& rows, int place,
                                int batches, const float* scale, float (&d)[kSums]) {
    const int own = (int)lane() / 4 * 2, unit = (rows.row + own) / 2;
    const bool live = own < rows.live && unit % C::kUnitSplits == 0;
    put_floats(place, batches, scale, d, [&](int at, u64 both) {
        if (live) *delta_gates(args, C::kHeads, at, unit / C::kUnitSplits) = both;
    });
}

// All heads' outputs, normed and gated, as operand of the o product: a warp has a head at eight
// places, a lane a place and a quarter of the features.
template <class C>
KIE_DEVICE void put_delta_outputs(const PrefillArgs& args, const Chunk& chunk, int layer) {
    const int my = lane(), warps = kWorkers / kTeam, core = my / 8;
    const float* norm = extras_of(args, layer) + C::kAtOutputNorm + 2 * core;
    KIE_NO_UNROLL for (int i = block() * warps + thread() / kTeam;
                       i < over(chunk.to, 8) * C::kHeads; i += args.blocks * warps) {
        const int head = i % C::kHeads, place = i / C::kHeads * 8 + my % 8;
        const float *out = delta_row<C>(args, place, head / C::kGroup,
                                        2 * C::kKeyDim + head % C::kGroup * C::kHeadDim) +
                           2 * core,
                    *z = out + C::kGroup * C::kHeadDim;
        const auto pair = [](const float* from, float (&v)[2]) {
            const u64 both = *(const u64*)from;
            v[0] = number((u32)both), v[1] = number((u32)(both >> 32));
        };
        float square = 0;
        KIE_UNROLL for (int n = 0; n < C::kHeadDim; n += 8) {
            float v[2];
            pair(out + n, v);
            square += v[0] * v[0] + v[1] * v[1];
        }
        square += shuffle_xor(square, 8), square += shuffle_xor(square, 16);
        const float by = rsqrt_f(square * (1.0f / C::kHeadDimReal) + kEps);
        u8* to = args.scratch + kScrAttn + operand_at(0, C::kAttn, place, head * C::kHeadDim) +
                 core * 128;
        KIE_UNROLL for (int b = 0; b < C::kHeadDim / 32; ++b) {
            Quad x;
            KIE_UNROLL for (int j = 0; j < 4; ++j) {
                const int n = 32 * b + 8 * j;
                float v[2], gate[2], y[2];
                pair(out + n, v), pair(z + n, gate);
                KIE_UNROLL for (int e = 0; e < 2; ++e) y[e] =
                    v[e] * by * norm[n + e] * (gate[e] * sigmoid_f(gate[e]));
                x.v[j] = pack_half2(y[0], y[1]);
            }
            *(Quad*)(to + (long)b * kEights * kCores) = x;
        }
    }
}
