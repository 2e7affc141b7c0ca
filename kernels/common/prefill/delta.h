// The gated delta rule of a chunk (ops/delta.h says what it is): three phases in place of
// attention's. Products leave q, k, v and z of each place as floats, and b and a of each head. Then
// a block takes a unit, as when decoding, through all places: S stays in its threads' registers,
// and columns know nothing of each other, so threads meet only where the convolved inputs of some
// places are made for all of them. Outputs stand where v was; behind a meeting, since a head's norm
// is over all its units, they become the operand of the o product.
// A position costs a unit about 250 clock ticks of an SM, all units side by side: 2,048 positions
// through 36 layers of Qwen3-Coder-Next 11 ms of an H200.
#pragma once

#include "lowered.h"
#include "ops/delta.h"
#include "platform.h"
#include "prefill/layout.h"
#include "prefill/multiply.h"
#include "prefill/tiles.h"
#include "shape.h"

constexpr int kDeltaPlaces = 16;  // whose inputs stand in shared memory
static_assert(kPage % kDeltaPlaces == 0, "states are kept between these");
// Floats of shared memory, where stages stand else: of each place q, k and v, then its factors.
template <class C>
struct DeltaInputs {
    static constexpr int kRow = 2 * C::kKeyPadded + over(C::kUnitCols, 4) * 4;
    static constexpr int kAtFactors = kDeltaPlaces * kRow;
    static constexpr int kFloats = kAtFactors + 4 * kDeltaPlaces;
    static_assert(4 * kFloats <= kStages * kStageBytes, "inputs of a turn fit the ring's place");
    static_assert(C::kUnits > 0 && kThreads == (int)kWorkers && kLanes == 1,
                  "units are those of decoding");
};
KIE_DEVICE float* delta_inputs() { return (float*)(prefill_shared() + kPfRing); }
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

// Where a state is: behind a page's last position, or among those that the row goes on with.
KIE_DEVICE u8* kept_at(const PrefillArgs& args, const Layer& l, int page) {
    const u32 physical = args.model.pages[(args.row * kPools + l.pool) * kPagesMax + page];
    return args.model.pools[l.pool] + (u64)physical * args.model.page_bytes[l.pool] + l.page_at;
}
KIE_DEVICE u8* working_at(const PrefillArgs& args, const Layer& l, u32 half) {
    return args.model.states + ((u64)args.row * 2 + half) * args.model.page_bytes[l.pool] +
           l.page_at;
}
template <class C>
KIE_DEVICE const u8* unit_from(const PrefillArgs& args, const Chunk& chunk, const Layer& l,
                               int unit) {
    const int first = chunk.base + chunk.from;
    if (first == 0) return nullptr;
    const u32 half = args.state & 1;
    const u8* from;
    if (first > (int)args.first)
        from = working_at(args, l, half);  // the chunk before left it
    else if (args.state & 2)
        from = kept_at(args, l, first / kPage - 1);
    else
        from = working_at(args, l, half ^ 1);
    return from + unit * C::kUnitBytes;
}

// A unit's inputs of some places as products left them; of those behind the last its own again.
template <class C>
using RawInputs = float[UnitState<C>::kOwn][kDeltaPlaces];
template <class C>
KIE_DEVICE void ask_inputs(const PrefillArgs& args, const Chunk& chunk, const Unit& u, int place,
                           RawInputs<C>& raw) {
    KIE_UNROLL for (int i = 0; i < UnitState<C>::kOwn; ++i) {
        const int n = i * kThreads + (int)thread();
        const int at = input_of<C>(u, n < C::kUnitChannels ? n : 0);
        KIE_UNROLL for (int t = 0; t < kDeltaPlaces; ++t) raw[i][t] =
            *delta_row<C>(args, min_i(place + t, chunk.to - 1), u.key, at);
    }
}
// Their convolution into shared memory, and (threads of the first warp) how S moves on.
template <class C>
KIE_DEVICE void make_inputs(const PrefillArgs& args, const Chunk& chunk, int layer, const Unit& u,
                            int place, const RawInputs<C>& raw,
                            const float (&taps)[UnitState<C>::kOwn][C::kTaps],
                            UnitState<C>& state) {
    using In = DeltaInputs<C>;
    constexpr int kKeys = 2 * C::kKeyDim;
    float* in = delta_inputs();
    const int me = thread();
    KIE_UNROLL for (int i = 0; i < UnitState<C>::kOwn; ++i) {
        const int n = i * kThreads + me;
        if (n >= C::kUnitChannels) continue;
        const int to = n < C::kKeyDim ? n
                       : n < kKeys    ? C::kKeyPadded + n - C::kKeyDim
                                      : 2 * C::kKeyPadded + n - kKeys;
        KIE_UNROLL for (int t = 0; t < kDeltaPlaces; ++t) {
            if (place + t >= chunk.from && place + t < chunk.to)
                in[t * In::kRow + to] = convolve<C::kTaps>(taps[i], state.past[i], raw[i][t]);
        }
    }
    if (me < kDeltaPlaces) {
        const float* extras = extras_of(args, layer);
        const u64 gates = *delta_gates(args, C::kHeads, min_i(place + me, chunk.to - 1), u.head);
        float* factors = in + In::kAtFactors + 4 * me;
        factors[2] = kept_of(extras[C::kAtDecay + u.head],
                             number((u32)(gates >> 32)) + extras[C::kAtDecayBias + u.head]);
        factors[3] = sigmoid_f(number((u32)gates));
    }
}
// Lengths of q and of k, a warp a place.
template <class C>
KIE_DEVICE void make_lengths() {
    using In = DeltaInputs<C>;
    float* in = delta_inputs();
    const int my = lane();
    KIE_NO_UNROLL for (int t = thread() / kTeam; t < kDeltaPlaces; t += kWarps) {
        const float *q = in + t * In::kRow, *k = q + C::kKeyPadded;
        float squares[2] = {0, 0};
        KIE_NO_UNROLL for (int n = my; n < C::kKeyDim; n += kTeam) squares[0] += q[n] * q[n],
            squares[1] += k[n] * k[n];
        KIE_UNROLL for (int m = 16; m > 0; m /= 2) squares[0] += shuffle_xor(squares[0], m),
            squares[1] += shuffle_xor(squares[1], m);
        float* factors = in + In::kAtFactors + 4 * t;
        const UnitFactors f = unit_factors<C>(squares[0], squares[1], 0, 0);
        if (my == 0) factors[0] = f.of_q, factors[1] = f.of_k;
    }
}
template <class C>
KIE_DEVICE void scan_unit(const PrefillArgs& args, const Chunk& chunk, int layer, const Unit& u) {
    using In = DeltaInputs<C>;
    const Layer& l = args.model.layers[layer];
    float* in = delta_inputs();
    float taps[UnitState<C>::kOwn][C::kTaps];
    take_taps<C>(extras_of(args, layer), u, taps);
    UnitState<C> state;
    load_unit<C>(state, unit_from<C>(args, chunk, l, u.number));
    int place = chunk.from / kDeltaPlaces * kDeltaPlaces;
    RawInputs<C> raw;
    ask_inputs<C>(args, chunk, u, place, raw);
    KIE_NO_UNROLL for (; place < chunk.to; place += kDeltaPlaces) {
        sync_consumers<kWorkers>();  // the inputs before have been used
        make_inputs<C>(args, chunk, layer, u, place, raw, taps, state);
        sync_consumers<kWorkers>();
        make_lengths<C>();
        sync_consumers<kWorkers>();
        const int next = place + kDeltaPlaces, end = min_i(next, chunk.to);
        if (next < chunk.to) ask_inputs<C>(args, chunk, u, next, raw);
        float* out = delta_row<C>(args, place, u.key, input_of<C>(u, 2 * C::kKeyDim));
        KIE_NO_UNROLL for (int t = max_i(chunk.from - place, 0); t < end - place; ++t) {
            const Quad f = *(const Quad*)(in + In::kAtFactors + 4 * t);
            const UnitFactors factors = {number(f.v[0]), number(f.v[1]), number(f.v[2]),
                                         number(f.v[3])};
            move_unit<C>(state, in + t * In::kRow, factors, [&](int column, float value) {
                out[(long)t * C::kRowsIn + column] = value;
            });
        }
        if (end == next && (chunk.base + next) % kPage == 0)
            store_unit<C>(state, kept_at(args, l, (chunk.base + next) / kPage - 1) +
                                     u.number * C::kUnitBytes);
    }
    store_unit<C>(state, working_at(args, l, args.state & 1) + u.number * C::kUnitBytes);
}
template <class C>
KIE_DEVICE void scan_units(const PrefillArgs& args, const Chunk& chunk, int layer) {
    using In = DeltaInputs<C>;
    // Rows of S that there are not.
    constexpr int kMore = C::kKeyPadded - C::kKeyDim;
    KIE_NO_UNROLL for (int i = thread(); i < 2 * kDeltaPlaces * kMore; i += kWorkers) {
        const int vector = i / max_i(kMore, 1);
        delta_inputs()[vector / 2 * In::kRow + vector % 2 * C::kKeyPadded + C::kKeyDim +
                       i % max_i(kMore, 1)] = 0;
    }
    KIE_NO_UNROLL for (int i = block(); i < C::kUnits; i += args.blocks)
        scan_unit<C>(args, chunk, layer, unit_of<C>(i));
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
