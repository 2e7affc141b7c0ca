// The gated delta rule of a chunk (ops/delta.h says what it is): three phases in place of
// attention's. Products leave q, k, v and z of each place as floats, and b and a of each head. Then
// a block takes a unit, as when decoding, through all places: S stays in its threads' registers,
// and columns know nothing of each other, so threads meet only where the convolved inputs of some
// places are made for all of them. Outputs stand where v was; behind a meeting, since a head's norm
// is over all its units, they become the operand of the o product.
// Positions are taken by four: what S before them says to their k and q, then what they say to each
// other, of which a warp makes factors for all columns. So S is read once for four positions, and
// sums over threads wait for each other once.
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
// How four positions change S and each other, by i and j < i: with k and q divided by their
// lengths, kept(i, j) what is left of S from behind j to behind i, and kept(i) from before all
// four,
//   u_i = of_v[i] v_i - of_k[i] S^T k_i - sum of before[i][j] u_j
//   o_i = of_q[i] S^T q_i + sum of beside[i][j] u_j, j <= i
//   S = kept S + sum of k_i (into[i] u_i)^T
struct FourFactors {
    float of_v[4], of_k[4], of_q[4], into[4], before[4][4], beside[4][4], kept, padding[3];
};
// Floats of shared memory, where stages stand else: of each place q, k and v, how much of S it
// keeps and how strong it is; then the factors of each four.
template <class C>
struct DeltaInputs {
    static constexpr int kRow = 2 * C::kKeyPadded + over(C::kUnitCols, 4) * 4;
    static constexpr int kAtGates = kDeltaPlaces * kRow;
    static constexpr int kAtFactors = kAtGates + 2 * kDeltaPlaces;
    static constexpr int kFloats = kAtFactors + kDeltaPlaces / 4 * (int)sizeof(FourFactors) / 4;
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
// Of a thread's place b and a, too.
template <class C>
struct RawInputs {
    float channel[UnitState<C>::kOwn][kDeltaPlaces];
    u64 gates;
};
template <class C>
KIE_DEVICE void ask_inputs(const PrefillArgs& args, const Chunk& chunk, const Unit& u, int place,
                           RawInputs<C>& raw) {
    KIE_UNROLL for (int i = 0; i < UnitState<C>::kOwn; ++i) {
        const int n = i * kThreads + (int)thread();
        const int at = input_of<C>(u, n < C::kUnitChannels ? n : 0);
        KIE_UNROLL for (int t = 0; t < kDeltaPlaces; ++t) raw.channel[i][t] =
            *delta_row<C>(args, min_i(place + t, chunk.to - 1), u.key, at);
    }
    const int own = min_i(place + (int)thread() % kDeltaPlaces, chunk.to - 1);
    raw.gates = *delta_gates(args, C::kHeads, own, u.head);
}
// Their convolution into shared memory, and (threads of the first warp) how S moves on.
template <class C>
KIE_DEVICE void make_inputs(const Chunk& chunk, int place, const RawInputs<C>& raw,
                            const float (&taps)[UnitState<C>::kOwn][C::kTaps],
                            const float (&decay)[2], UnitState<C>& state) {
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
            const bool live = place + t >= chunk.from && place + t < chunk.to;
            in[t * In::kRow + to] =
                live ? convolve<C::kTaps>(taps[i], state.past[i], raw.channel[i][t]) : 0;
        }
    }
    if (me < kDeltaPlaces) {
        const bool live = place + me >= chunk.from && place + me < chunk.to;
        const float kept = kept_of(decay[0], number((u32)(raw.gates >> 32)) + decay[1]);
        in[In::kAtGates + 2 * me] = live ? kept : 1;
        in[In::kAtGates + 2 * me + 1] = live ? sigmoid_f(number((u32)raw.gates)) : 0;
    }
}
template <class C>
KIE_DEVICE FourFactors* four_factors(int four) {
    return (FourFactors*)(delta_inputs() + DeltaInputs<C>::kAtFactors) + four;
}
// Of each four positions, by a warp.
template <class C>
KIE_DEVICE void make_factors() {
    using In = DeltaInputs<C>;
    const int my = lane();
    KIE_NO_UNROLL for (int four = thread() / kTeam; four < kDeltaPlaces / 4; four += kWarps) {
        const float* in = delta_inputs() + 4 * four * In::kRow;
        // By pairs of places, j <= i; a square of q each.
        float squares[4] = {0, 0, 0, 0}, keys[4][4], queries[4][4];
        KIE_UNROLL for (int n = 0; n < 16; ++n) keys[n / 4][n % 4] = queries[n / 4][n % 4] = 0;
        KIE_NO_UNROLL for (int n = my; n < C::kKeyDim; n += kTeam) {
            float q[4], k[4];
            KIE_UNROLL for (int i = 0; i < 4; ++i) q[i] = in[i * In::kRow + n],
                                                   k[i] = in[i * In::kRow + C::kKeyPadded + n];
            KIE_UNROLL for (int i = 0; i < 4; ++i) {
                squares[i] += q[i] * q[i];
                KIE_UNROLL for (int j = 0; j <= i; ++j) keys[i][j] += k[i] * k[j],
                    queries[i][j] += q[i] * k[j];
            }
        }
        KIE_UNROLL for (int m = 16; m > 0; m /= 2) {
            KIE_UNROLL for (int i = 0; i < 4; ++i) {
                squares[i] += shuffle_xor(squares[i], m);
                KIE_UNROLL for (int j = 0; j <= i; ++j) {
                    keys[i][j] += shuffle_xor(keys[i][j], m);
                    queries[i][j] += shuffle_xor(queries[i][j], m);
                }
            }
        }
        const float* gates = delta_inputs() + In::kAtGates + 8 * four;
        FourFactors& f = *four_factors<C>(four);
        const auto put = [&](float& to, float v) {
            if (my == 0) to = v;
        };
        float of_k[4], kept[4], all = 1;
        KIE_UNROLL for (int i = 0; i < 4; ++i) {
            const UnitFactors own =
                unit_factors<C>(squares[i], keys[i][i], gates[2 * i], gates[2 * i + 1]);
            all *= own.keep, of_k[i] = own.of_k, kept[i] = 1;
            put(f.of_v[i], own.beta), put(f.of_k[i], own.beta * all * own.of_k);
            put(f.of_q[i], all * own.of_q);
            KIE_UNROLL for (int j = 0; j <= i; ++j) {
                if (j < i) {
                    kept[j] *= own.keep;
                    put(f.before[i][j], own.beta * kept[j] * keys[i][j] * own.of_k * of_k[j]);
                }
                put(f.beside[i][j], kept[j] * queries[i][j] * own.of_q * of_k[j]);
            }
        }
        put(f.kept, all);
        KIE_UNROLL for (int i = 0; i < 4; ++i) put(f.into[i], kept[i] * of_k[i]);
    }
}
// S moves on by four positions, whose q, k and v stand at `in`; put(position, column, output).
template <class C, class Put>
KIE_DEVICE void move_by_four(UnitState<C>& state, const float* in, const FourFactors& f, Put put) {
    using In = DeltaInputs<C>;
    const int me = thread();
    KIE_UNROLL for (int t = 0; t < C::kUnitTurns; ++t) {
        const int column = (t * kThreads + me) / C::kUnitLanes;
        const bool live = column < C::kUnitCols;
        float recalled[4] = {0, 0, 0, 0}, out[4] = {0, 0, 0, 0}, u[4];
        // What comes next is on its way while sums are made. For the last part k is read anew:
        // there are no registers to keep it in.
        constexpr int kQuads = C::kUnitHeld / 4;
        Quad keys[2][4], queries[2][4];
        const auto ask = [&](int i, bool both) {
            KIE_UNROLL for (int p = 0; p < 4; ++p) {
                const Quad* row = (const Quad*)(in + p * In::kRow) + row_quad<C>(i);
                keys[i % 2][p] = row[C::kKeyPadded / 4];
                if (both) queries[i % 2][p] = row[0];
            }
            sync_warp();
        };
        ask(0, true);
        KIE_UNROLL for (int i = 0; i < kQuads; ++i) {
            if (i + 1 < kQuads) ask(i + 1, true);
            KIE_UNROLL for (int j = 0; j < 4; ++j) {
                KIE_UNROLL for (int p = 0; p < 4; ++p) {
                    recalled[p] += state.s[t][4 * i + j] * number(keys[i % 2][p].v[j]);
                    out[p] += state.s[t][4 * i + j] * number(queries[i % 2][p].v[j]);
                }
            }
        }
        ask(0, false);
        KIE_UNROLL for (int m = 1; m < C::kUnitLanes; m *= 2) {
            KIE_UNROLL for (int p = 0; p < 4; ++p) recalled[p] += shuffle_xor(recalled[p], m),
                out[p] += shuffle_xor(out[p], m);
        }
        KIE_UNROLL for (int p = 0; p < 4; ++p) {
            const float v = in[p * In::kRow + 2 * C::kKeyPadded + (live ? column : 0)];
            u[p] = f.of_v[p] * v - f.of_k[p] * recalled[p];
            KIE_UNROLL for (int j = 0; j < p; ++j) u[p] -= f.before[p][j] * u[j];
            out[p] *= f.of_q[p];
            KIE_UNROLL for (int j = 0; j <= p; ++j) out[p] += f.beside[p][j] * u[j];
            if (live && me % C::kUnitLanes == p % C::kUnitLanes) put(p, column, out[p]);
        }
        KIE_UNROLL for (int p = 0; p < 4; ++p) u[p] *= f.into[p];
        KIE_UNROLL for (int i = 0; i < kQuads; ++i) {
            if (i + 1 < kQuads) ask(i + 1, false);
            KIE_UNROLL for (int j = 0; j < 4; ++j) {
                float& s = state.s[t][4 * i + j];
                s *= f.kept;
                KIE_UNROLL for (int p = 0; p < 4; ++p) s += u[p] * number(keys[i % 2][p].v[j]);
            }
        }
    }
}
template <class C>
KIE_DEVICE void scan_unit(const PrefillArgs& args, const Chunk& chunk, int layer, const Unit& u) {
    using In = DeltaInputs<C>;
    const Layer& l = args.model.layers[layer];
    float* in = delta_inputs();
    float taps[UnitState<C>::kOwn][C::kTaps];
    const float* extras = extras_of(args, layer);
    take_taps<C>(extras, u, taps);
    const float decay[2] = {extras[C::kAtDecay + u.head], extras[C::kAtDecayBias + u.head]};
    UnitState<C> state;
    load_unit<C>(state, unit_from<C>(args, chunk, l, u.number));
    int place = chunk.from / kDeltaPlaces * kDeltaPlaces;
    KIE_NO_UNROLL for (; place < chunk.to; place += kDeltaPlaces) {
        // Not earlier: what registers do not hold stands in memory.
        RawInputs<C> raw;
        ask_inputs<C>(args, chunk, u, place, raw);
        sync_consumers<kWorkers>();  // the inputs before have been used
        make_inputs<C>(chunk, place, raw, taps, decay, state);
        sync_consumers<kWorkers>();
        make_factors<C>();
        sync_consumers<kWorkers>();
        const int next = place + kDeltaPlaces, end = min_i(next, chunk.to);
        float* out = delta_row<C>(args, place, u.key, input_of<C>(u, 2 * C::kKeyDim));
        KIE_NO_UNROLL for (int t = 0; t < end - place; t += 4) {
            move_by_four<C>(state, in + t * In::kRow, *four_factors<C>(t / 4),
                            [&](int p, int column, float value) {
                                const int at = place + t + p;
                                if (at >= chunk.from && at < end)
                                    out[(long)(t + p) * C::kRowsIn + column] = value;
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
