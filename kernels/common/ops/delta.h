// The gated delta rule in place of attention (Yang, Kautz and Hatamizadeh, "Gated Delta Networks",
// 2024). q, k and v are silu of a convolution over positions, channel by channel; q and k are
// divided by their lengths, q by sqrt(kKeyDim), too. Of each head of v, with S [kKeyDim][head]:
//   S = S e^(-e^decay softplus(a + bias)),  S += k (sigmoid(b) (v - S^T k))^T,  o = S^T q
//   output = norm(o) silu(z)
// Columns of S know nothing of each other, so a head is cut into units of some of them, a block
// each (lower/delta.rs), which keeps their part of S and the last inputs of their channels. What
// the layer's input makes of q, k, v and z travels as floats; b and a every block makes for its own
// units. A head's output is normed over all its units: each publishes its own normed by itself,
// and its squares, of which who gathers the outputs makes the factor that is missing.
// Traffic: S and the inputs, read and written once a token.
#pragma once

#include "args.h"
#include "block.h"
#include "chiplets.h"
#include "exchange.h"
#include "lowered.h"
#include "ops/gather.h"
#include "ops/matvec.h"
#include "ops/parts.h"
#include "ops/project.h"
#include "ops/residual.h"
#include "ops/sigmoid.h"
#include "ops/states.h"
#include "pages.h"
#include "platform.h"
#include "ring.h"
#include "shape.h"

constexpr float kLengthEps = 1e-6f;  // no head is divided by 0

// How much of S is kept, given minus e^decay, and its logarithm.
KIE_DEVICE float log2_kept(float decay, float a) { return 1.44269504f * decay * softplus_f(a); }
KIE_DEVICE float kept_of(float decay, float a) { return exp2_f(log2_kept(decay, a)); }
KIE_DEVICE float* delta_floats(const Block& b) { return (float*)(b.shared + kShDelta); }

// The products: rows of q, k, v and z, which all who need them take.
template <class C>
KIE_DEVICE void step_delta_in(Ring& ring, const DecodeArgs& args, Block& b, int layer,
                              Prefetched<typename C::TilingQkv>& prefetched, Squares& squares) {
    using S = typename C::TilingQkv;
    Sums<S> s = multiply_normed<S>(ring, prefetched, b, squares);
    stamp(b, 1);
    u64* to =
        args.ll_words + kAtQkv + buffer_of(layer, b.lane_index) * kVecQ + b.block_in_lane * S::rows;
    finish<S>(s, (float*)(b.shared + kShPartA),
              [&](int, int pair, int column, float v0, float v1, bool live, bool leader) {
                  const float scale = rms_scale(b, live ? column : 0);
                  if (!live || !leader || column >= live_of(b)) return;
                  u64* p = to + (long)column * C::kWordsQ + 2 * pair;
                  publish(p, bits(v0 * scale), b.seqno), publish(p + 1, bits(v1 * scale), b.seqno);
              });
}
// b and a of this block's units, while those words travel.
template <class C>
KIE_DEVICE void step_gates(Ring& ring, Block& b) {
    using G = typename C::TilingGates;
    Prefetched<G> gates;
    prefetch_weights<G>(ring, gates);
    Sums<G> g = multiply<G>(ring, gates, b.shared + kShXa, kStrideA);
    float* own = delta_floats(b) + C::kAtUnitGates;
    finish<G>(g, (float*)(b.shared + kShPartB),
              [&](int, int pair, int column, float v0, float v1, bool live, bool leader) {
                  const float scale = rms_scale(b, live ? column : 0);
                  if (!live || !leader) return;
                  float* p = own + (column * C::kUnitsEach + pair) * 2;
                  p[0] = v0 * scale, p[1] = v1 * scale;
              });
    // All threads read these; and a wave must not wait for words of its own.
    sync_consumers<kThreads>();
    stamp(b, 2);
}

// A unit: some columns of a head of v.
struct Unit {
    int number, head, key, own, first;
};
template <class C>
KIE_DEVICE Unit unit_of(int number) {
    const int head = number / C::kUnitSplits;
    return {number, head, head / C::kGroup, head % C::kGroup,
            number % C::kUnitSplits * C::kUnitCols};
}
// Of a unit's inputs (q, k, its columns of v, then of z) the one behind `n` of those of its key
// head.
template <class C>
KIE_DEVICE int input_of(const Unit& u, int n) {
    constexpr int kKeys = 2 * C::kKeyDim;
    if (n < kKeys) return n;
    if (n < C::kUnitChannels) return n + u.own * C::kHeadDim + u.first;
    return n - C::kUnitCols + (C::kGroup + u.own) * C::kHeadDim + u.first;
}
// What a thread holds of a unit: of each of its columns every kUnitLanes-th quad of rows, and four
// earlier inputs, oldest first, of its channels.
template <class C>
struct UnitState {
    static constexpr int kOwn = (C::kUnitChannels + kThreads - 1) / kThreads;
    float s[C::kUnitTurns][C::kUnitHeld];
    float past[kOwn][4];
};
template <class C>
KIE_DEVICE int row_quad(int quad) {
    return quad * C::kUnitLanes + (int)thread() % C::kUnitLanes;
}
// The convolution's taps of a thread's channels, and a position of one of them: its earlier inputs
// move on.
template <class C>
KIE_DEVICE void take_taps(const float* extras, const Unit& u, int n, float (&taps)[C::kTaps]) {
    constexpr int kChannels = 2 * C::kKeyDim + C::kGroup * C::kHeadDim;
    const float* from =
        extras + C::kAtConv +
        (u.key * kChannels + input_of<C>(u, n < C::kUnitChannels ? n : 0)) * C::kTaps;
    KIE_UNROLL for (int tap = 0; tap < C::kTaps; ++tap) taps[tap] = from[tap];
}
template <int kTaps>
KIE_DEVICE float convolve(const float (&taps)[kTaps], float (&past)[4], float x) {
    constexpr int kLast = kTaps - 1;
    float y = taps[kLast] * x;
    KIE_UNROLL for (int tap = 0; tap < kLast; ++tap) y += taps[tap] * past[tap];
    KIE_UNROLL for (int tap = 0; tap + 1 < kLast; ++tap) past[tap] = past[tap + 1];
    past[kLast - 1] = x;
    return y * sigmoid_f(y);
}
// A quad of a state, from `from` or (null) before the first position. Those of S stand first, each
// of rows 4 `quad` to 4 `quad` + 3 of a column, then earlier inputs of each channel.
KIE_DEVICE void take_quad(const u8* from, bool is_there, int at, float* to) {
    Quad q = {{0, 0, 0, 0}};
    if (from && is_there) q = load_state(from + at * 16);
    KIE_UNROLL for (int j = 0; j < 4; ++j) to[j] = number(q.v[j]);
}
KIE_DEVICE void put_quad(u8* to, int at, const float* v) {
    store_state(to + at * 16, {{bits(v[0]), bits(v[1]), bits(v[2]), bits(v[3])}});
}
template <class C>
KIE_DEVICE int state_quad(int column, int quad) {
    const int holder = column * C::kUnitLanes + quad % C::kUnitLanes;
    return (holder / kThreads * (C::kUnitHeld / 4) + quad / C::kUnitLanes) * C::kUnitThreads +
           holder % kThreads;
}
template <class C>
KIE_CONST_FN int past_quad(int channel) {
    return C::kUnitPast / 16 + channel;
}
template <class C>
KIE_DEVICE void load_unit(UnitState<C>& state, const u8* from) {
    const int me = thread();
    KIE_UNROLL for (int t = 0; t < C::kUnitTurns; ++t) {
        KIE_UNROLL for (int q = 0; q < C::kUnitHeld / 4; ++q)
            take_quad(from, me < C::kUnitThreads,
                      (t * (C::kUnitHeld / 4) + q) * C::kUnitThreads + me, state.s[t] + 4 * q);
    }
    KIE_UNROLL for (int i = 0; i < UnitState<C>::kOwn; ++i) {
        const int channel = i * kThreads + me;
        take_quad(from, channel < C::kUnitChannels, past_quad<C>(channel), state.past[i]);
    }
}
template <class C>
KIE_DEVICE void store_unit(const UnitState<C>& state, u8* to) {
    const int me = thread();
    KIE_UNROLL for (int t = 0; t < C::kUnitTurns; ++t) {
        KIE_UNROLL for (int q = 0; q < C::kUnitHeld / 4; ++q) if (me < C::kUnitThreads)
            put_quad(to, (t * (C::kUnitHeld / 4) + q) * C::kUnitThreads + me, state.s[t] + 4 * q);
    }
    KIE_UNROLL for (int i = 0; i < UnitState<C>::kOwn; ++i) {
        const int channel = i * kThreads + me;
        if (channel < C::kUnitChannels) put_quad(to, past_quad<C>(channel), state.past[i]);
    }
}
KIE_DEVICE u8* delta_state(const DecodeArgs& args, const Layer& l, u64 number) {
    return args.states + number * args.page_bytes[l.pool] + l.page_at;
}
template <class C>
KIE_DEVICE const u8* unit_from(const DecodeArgs& args, const Block& b, int layer, int column,
                               int unit) {
    const StateBefore before = state_before(args, b, column);
    if (before.none) return nullptr;
    const u8* from = before.page < 0 ? delta_state(args, layer_of(b, layer), before.number)
                                     : layer_page(args, b.shared, layer, column, before.page);
    return from + unit * C::kUnitBytes;
}

// A column's inputs of a unit into shared memory, convolved where they are channels, whose earlier
// inputs move on; squares of q and of k, a sum a warp.
template <class C>
KIE_DEVICE void take_inputs(Watch& watch, const DecodeArgs& args, const Block& b, int layer,
                            int column, const Unit& u, UnitState<C>& state,
                            const float (&taps)[UnitState<C>::kOwn][C::kTaps]) {
    constexpr int kAll = C::kUnitChannels + C::kUnitCols, kEach = (kAll + kThreads - 1) / kThreads;
    constexpr int kKeys = 2 * C::kKeyDim;
    const int me = thread();
    const u32 where = layer << 4 | 13;
    const u64* from = args.ll_words + kAtQkv + buffer_of(layer, b.lane_index) * kVecQ +
                      (long)column * C::kWordsQ + u.key * C::kKeyRows;
    float* in = delta_floats(b);
    u64 v[kEach];  // on their way at once, and once more those that were late
    KIE_UNROLL for (int i = 0; i < kEach; ++i) {
        const int n = i * kThreads + me;
        v[i] = n < kAll ? load_word(from + input_of<C>(u, n)) : ll_word(0, b.seqno);
    }
    watch.polls = 0;
    for (;;) {
        u32 late = 0;
        KIE_UNROLL for (int i = 0; i < kEach; ++i) late |= seqno_of(v[i]) ^ b.seqno;
        if (late == 0 || kNoWaits || wait_expired(watch, where, b.seqno, b.seqno ^ late)) break;
        KIE_UNROLL for (int i = 0; i < kEach; ++i) if (seqno_of(v[i]) != b.seqno) v[i] =
            load_word(from + input_of<C>(u, i * kThreads + me));
    }
    float square[2] = {0, 0};
    KIE_UNROLL for (int i = 0; i < kEach; ++i) {
        const int n = i * kThreads + me;
        const float x = number((u32)v[i]);
        if (i < UnitState<C>::kOwn && n < C::kUnitChannels) {
            const int own = i < UnitState<C>::kOwn ? i : 0;
            const float y = convolve<C::kTaps>(taps[own], state.past[own], x);
            if (n < kKeys) {
                const int which = n / C::kKeyDim;
                in[which * C::kKeyPadded + n % C::kKeyDim] = y;
                square[0] += which == 0 ? y * y : 0, square[1] += which == 1 ? y * y : 0;
            } else {
                in[2 * C::kKeyPadded + n - kKeys] = y;
            }
        } else if (n < kAll) {
            in[2 * C::kKeyPadded + n - kKeys] = x;
        }
    }
    for (int n = C::kKeyDim + me; n < C::kKeyPadded; n += kThreads)
        in[n] = in[C::kKeyPadded + n] = 0;
    KIE_UNROLL for (int which = 0; which < 2; ++which) {
        KIE_UNROLL for (int m = 16; m > 0; m /= 2) square[which] += shuffle_xor(square[which], m);
        if (me % kTeam == 0) in[C::kAtSquares + which * kWarps + me / kTeam] = square[which];
    }
}
// What a position's q and k are multiplied by, and how S moves on.
struct UnitFactors {
    float of_q, of_k, keep, beta;
};
template <class C>
KIE_DEVICE UnitFactors unit_factors(float squares_q, float squares_k, float keep, float beta) {
    return {rsqrt_f(squares_q + kLengthEps) * rsqrt_f((float)C::kKeyDim),
            rsqrt_f(squares_k + kLengthEps), keep, beta};
}
// S moves on by a position, whose q, k and v stand at `in`; put(column, output).
template <class C, class Put>
KIE_DEVICE void move_unit(UnitState<C>& state, const float* in, const UnitFactors& f, Put put) {
    const auto [of_q, of_k, keep, beta] = f;
    const int me = thread();
    const Quad *q = (const Quad*)in, *k = (const Quad*)(in + C::kKeyPadded);
    KIE_UNROLL for (int t = 0; t < C::kUnitTurns; ++t) {
        const int column = (t * kThreads + me) / C::kUnitLanes;
        const bool live = column < C::kUnitCols;
        float recalled = 0, out = 0;
        KIE_UNROLL for (int i = 0; i < C::kUnitHeld / 4; ++i) {
            const Quad row = k[row_quad<C>(i)];
            KIE_UNROLL for (int j = 0; j < 4; ++j) recalled +=
                state.s[t][4 * i + j] * number(row.v[j]);
        }
        KIE_UNROLL for (int m = 1; m < C::kUnitLanes; m *= 2) recalled += shuffle_xor(recalled, m);
        const float v = in[2 * C::kKeyPadded + (live ? column : 0)];
        const float change = beta * (v - keep * (recalled * of_k)) * of_k;
        KIE_UNROLL for (int i = 0; i < C::kUnitHeld / 4; ++i) {
            const Quad row = k[row_quad<C>(i)], query = q[row_quad<C>(i)];
            KIE_UNROLL for (int j = 0; j < 4; ++j) {
                float& s = state.s[t][4 * i + j];
                s = keep * s + change * number(row.v[j]);
                out += s * number(query.v[j]);
            }
        }
        KIE_UNROLL for (int m = 1; m < C::kUnitLanes; m *= 2) out += shuffle_xor(out, m);
        if (live && me % C::kUnitLanes == 0) put(column, out * of_q);
    }
}
// The same, with the output's columns into shared memory.
template <class C>
KIE_DEVICE void update_unit(UnitState<C>& state, float* in, float keep, float beta) {
    float length[2] = {0, 0};
    KIE_UNROLL for (int i = 0; i < kWarps; ++i) length[0] += in[C::kAtSquares + i],
        length[1] += in[C::kAtSquares + kWarps + i];
    move_unit<C>(state, in, unit_factors<C>(length[0], length[1], keep, beta),
                 [&](int column, float out) { in[C::kAtOutput + column] = out; });
}
// What a block reads of a unit besides its state: taps of the channels that a thread has, the scale
// of two features of the output, and what gates are made of.
template <class C>
struct UnitNumbers {
    static constexpr int kPairs = (C::kUnitCols / 2 + kThreads - 1) / kThreads;
    float taps[UnitState<C>::kOwn][C::kTaps], scale[kPairs][2], decay, bias;
};
template <class C>
KIE_DEVICE void load_numbers(UnitNumbers<C>& numbers, const DecodeArgs& args, const Block& b,
                             int layer, const Unit& u) {
    const int me = thread();
    const float* extras = extras_of(args, b, layer);
    KIE_UNROLL for (int i = 0; i < UnitState<C>::kOwn; ++i)
        take_taps<C>(extras, u, i * kThreads + me, numbers.taps[i]);
    KIE_UNROLL for (int i = 0; i < UnitNumbers<C>::kPairs; ++i) {
        const float* scale = extras + C::kAtOutputNorm + u.first +
                             2 * min_i(i * kThreads + me, C::kUnitCols / 2 - 1);
        numbers.scale[i][0] = scale[0], numbers.scale[i][1] = scale[1];
    }
    numbers.decay = extras[C::kAtDecay + u.head], numbers.bias = extras[C::kAtDecayBias + u.head];
}
// A unit's squares, and its output normed by them, times the norm's scale and silu(z). Every warp
// that publishes adds up all squares.
template <class C>
KIE_DEVICE void publish_unit(const DecodeArgs& args, const Block& b, int layer, int column,
                             const Unit& u, const float* in, const UnitNumbers<C>& numbers) {
    const int me = thread(), my = me % kTeam;
    if (me - my >= C::kUnitCols / 2) return;
    const float* out = in + C::kAtOutput;
    const float* z = in + 2 * C::kKeyPadded + C::kUnitCols;
    const long buffer = buffer_of(layer, b.lane_index);
    float square = 0;
    KIE_UNROLL for (int n = 0; n < C::kUnitCols; n += kTeam) {
        const float v = n + my < C::kUnitCols ? out[n + my] : 0;
        square += v * v;
    }
    KIE_UNROLL for (int m = 16; m > 0; m /= 2) square += shuffle_xor(square, m);
    if (me == 0)
        publish(args.ll_words + kAtPartial + buffer * kVecPartial +
                    (long)column * C::kPartialWords + u.number,
                bits(square), b.seqno);
    const float by = square > 0 ? rsqrt_f(square * (1.0f / C::kUnitCols)) : 0;
    u64* to = args.ll_words + kAtAttn + buffer * kVecA + (long)column * C::kWordsA +
              (u.head * C::kHeadDim + u.first) / 2;
    KIE_UNROLL for (int i = 0; i < UnitNumbers<C>::kPairs; ++i) {
        const int n = i * kThreads + me;
        if (n >= C::kUnitCols / 2) continue;
        float y[2];
        KIE_UNROLL for (int j = 0; j < 2; ++j) {
            const float gate = z[2 * n + j];
            y[j] = out[2 * n + j] * by * numbers.scale[i][j] * (gate * sigmoid_f(gate));
        }
        publish(to + n, C::kWordsA, halves_of(y[0], y[1]), b.seqno);
    }
}
// This block's first unit as its first column wants it: asked for before the gates are made.
template <class C>
struct FirstUnit {
    UnitState<C> state;
    UnitNumbers<C> numbers;
    KIE_DEVICE void ask(const DecodeArgs& args, const Block& b, int layer) {
        const int number = b.block_in_lane * C::kUnitsEach;
        if (number >= C::kUnits) return;
        load_unit<C>(state, unit_from<C>(args, b, layer, 0, number));
        load_numbers<C>(numbers, args, b, layer, unit_of<C>(number));
    }
};
// All columns of a unit, in order. `asked`: the state that the first one wants has been asked for.
template <class C>
KIE_DEVICE void step_unit(Watch& watch, const DecodeArgs& args, const Block& b, int layer,
                          const Unit& u, int index, FirstUnit<C>& first, bool asked) {
    UnitState<C>& state = first.state;
    const UnitNumbers<C>& numbers = first.numbers;
    const int live = live_of(b);
    const Layer& l = layer_of(b, layer);
    float* in = delta_floats(b);
    KIE_NO_UNROLL for (int c = 0; c < live; ++c) {
        const u32 position = position_at(args, b.shared, b.step, c);
        if (!follows(args, b, c) && !(asked && c == 0))
            load_unit<C>(state, unit_from<C>(args, b, layer, c, u.number));
        const float* gates = in + C::kAtUnitGates + (c * C::kUnitsEach + index) * 2;
        const float beta = sigmoid_f(gates[0]);
        const float keep = kept_of(numbers.decay, gates[1] + numbers.bias);
        if (c > 0) sync_consumers<kThreads>();  // the inputs before have been used
        take_inputs<C>(watch, args, b, layer, c, u, state, numbers.taps);
        sync_consumers<kThreads>();
        update_unit<C>(state, in, keep, beta);
        sync_consumers<kThreads>();
        publish_unit<C>(args, b, layer, c, u, in, numbers);
        const long at = (long)u.number * C::kUnitBytes;
        if (leaves_state(args, b, c))
            store_unit<C>(state, delta_state(args, l, state_behind(args, b, c)) + at);
        if ((position + 1) % kPage == 0)
            store_unit<C>(state, layer_page(args, b.shared, layer, c, (int)position / kPage) + at);
    }
}
// This block's units.
template <class C>
KIE_DEVICE void step_delta(Watch& watch, const DecodeArgs& args, const Block& b, int layer,
                           FirstUnit<C>& first) {
    KIE_NO_UNROLL for (int i = 0; i < C::kUnitsEach; ++i) {
        const int number = b.block_in_lane * C::kUnitsEach + i;
        if (number >= C::kUnits) break;
        const Unit u = unit_of<C>(number);
        if (i > 0) {
            sync_consumers<kThreads>();
            load_numbers<C>(first.numbers, args, b, layer, u);
        }
        step_unit<C>(watch, args, b, layer, u, i, first, i == 0);
    }
    join_wave();  // all wait for what some have published
}
// What this block's units have behind the draft `kept` becomes its sequence's.
template <class C>
KIE_DEVICE void keep_units(const DecodeArgs& args, const Block& b, int layer, int sequence,
                           int kept) {
    const Layer& l = layer_of(b, layer);
    KIE_NO_UNROLL for (int i = 0; i < C::kUnitsEach; ++i) {
        const long number = b.block_in_lane * C::kUnitsEach + i;
        if (number >= C::kUnits) break;
        UnitState<C> state;
        load_unit<C>(state,
                     delta_state(args, l, state_behind(args, b, kept)) + number * C::kUnitBytes);
        store_unit<C>(
            state, delta_state(args, l, state_behind(args, b, sequence)) + number * C::kUnitBytes);
    }
}

// What a unit's output of a column lacks: its own norm in place of its head's.
template <class C>
KIE_DEVICE void take_factors(Watch& watch, const DecodeArgs& args, const Block& b, int layer,
                             int column, float* factors) {
    constexpr int kOnce = min_i(C::kUnitSplits, 8);
    const u32 where = layer << 4 | 14;
    const u64* squares = args.ll_words + kAtPartial + buffer_of(layer, b.lane_index) * kVecPartial +
                         (long)column * C::kPartialWords;
    for (int n = thread(); n < C::kUnits; n += kThreads) {
        const int first = n / C::kUnitSplits * C::kUnitSplits;
        float total = 0, own = 0;
        KIE_NO_UNROLL for (int from = 0; from < C::kUnitSplits; from += kOnce) {
            u64 v[kOnce];
            const auto at = [&](int i) {
                return squares + first + min_i(from + i, C::kUnitSplits - 1);
            };
            KIE_UNROLL for (int i = 0; i < kOnce; ++i) v[i] = load_word(at(i));
            watch.polls = 0;
            for (;;) {
                u32 late = 0;
                KIE_UNROLL for (int i = 0; i < kOnce; ++i) late |= seqno_of(v[i]) ^ b.seqno;
                if (late == 0 || kNoWaits || wait_expired(watch, where, b.seqno, b.seqno ^ late))
                    break;
                KIE_UNROLL for (int i = 0; i < kOnce; ++i) if (seqno_of(v[i]) != b.seqno) v[i] =
                    load_word(at(i));
            }
            KIE_UNROLL for (int i = 0; i < kOnce; ++i) {
                if (from + i >= C::kUnitSplits) continue;
                const float square = number((u32)v[i]);
                total += square;
                if (first + from + i == n) own = square * (1.0f / C::kUnitCols);
            }
        }
        const float norm = rsqrt_f(total * (1.0f / C::kHeadDimReal) + kEps);
        factors[n] = own == 0 ? 0 : own * rsqrt_f(own) * norm;
    }
}
// All heads' outputs as the operand of the o product. Words and squares are asked for at once.
template <class C>
KIE_DEVICE void gather_delta(Watch& watch, const DecodeArgs& args, Block& b, int layer) {
    constexpr int kPairs = C::kAttn / 4, kOnce = min_i(4, (kPairs + kThreads - 1) / kThreads);
    const int me = thread();
    const u32 where = layer << 4 | 4;
    const long buffer = buffer_of(layer, b.lane_index);
    float* factors = delta_floats(b) + C::kAtFactors;
    u32* x = (u32*)(b.shared + kShXb);
    KIE_NO_UNROLL for (int c = 0; c < live_of(b); ++c) {
        const u64* words = args.ll_words + kAtAttn + buffer * kVecA + (long)c * C::kWordsA;
        u64 v[kOnce][kParts][2];
        const auto load = [&](int first, int i) {
            const int at = min_i(first + i * kThreads, kPairs - 1);
            KIE_UNROLL for (int part = 0; part < kParts; ++part) load_words(
                words + part * (C::kWordsA / kParts) + 2 * at, v[i][part][0], v[i][part][1]);
        };
        const auto late_by = [&](int i) {
            u32 late = 0;
            KIE_UNROLL for (int part = 0; part < kParts; ++part) late |=
                (seqno_of(v[i][part][0]) ^ b.seqno) | (seqno_of(v[i][part][1]) ^ b.seqno);
            return late;
        };
        await_one(watch, words + block() * 10 % (2 * kPairs), b.seqno, where, kPollDelayNs);
        KIE_UNROLL for (int i = 0; i < kOnce; ++i) load(me, i);
        if (c > 0) sync_consumers<kThreads>();  // the factors before have been used
        take_factors<C>(watch, args, b, layer, c, factors);
        sync_consumers<kThreads>();
        KIE_NO_UNROLL for (int first = me; first < kPairs; first += kOnce * kThreads) {
            if (first != me) KIE_UNROLL for (int i = 0; i < kOnce; ++i) load(first, i);
            watch.polls = 0;
            for (;;) {
                u32 late = 0;
                KIE_UNROLL for (int i = 0; i < kOnce; ++i) late |= late_by(i);
                if (late == 0 || kNoWaits || wait_expired(watch, where, b.seqno, b.seqno ^ late))
                    break;
                KIE_UNROLL for (int i = 0; i < kOnce; ++i) if (late_by(i) != 0) load(first, i);
            }
            KIE_UNROLL for (int i = 0; i < kOnce; ++i) {
                const int at = first + i * kThreads;
                if (at >= kPairs) continue;
                KIE_UNROLL for (int j = 0; j < 2; ++j) {
                    Halves h;
                    KIE_UNROLL for (int part = 0; part < kParts; ++part) h.v[part] =
                        (u32)v[i][part][j];
                    const float by = factors[(4 * at + 2 * j) / C::kUnitCols];
                    float y0, y1;
                    numbers_of(h, y0, y1);
                    put_halves(x, c, kStrideB, 2 * at + j, halves_of(y0 * by, y1 * by));
                }
            }
        }
    }
    sync_consumers<kThreads>();
    stamp(b, 4);
}
