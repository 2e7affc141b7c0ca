// Several residual streams (Zhu et al., "Hyper-Connections", 2024), of which each module takes a
// mixture, and which its output joins. A block keeps the rows that it owns of all of them, as
// floats in shared memory. With n streams s and f = W (all of s) / their root mean square:
//   x      = sum over i of (sigmoid(a_0 f_i + b_i) + eps) s_i   what the module takes
//   post_j = 2 sigmoid(a_1 f_(n + j) + b_(n + j)),   comb = a_2 f_(2n..) + b_(2n..)   an n x n
//            matrix, made such that rows and columns sum to 1
//   s_j    = post_j out + sum over i of comb_ij s_i   behind the module
// Blocks share W by the columns of their rows: each publishes its part of the products and of the
// squares, and adds up those of all blocks, in the order of blocks. x travels as others' residual
// does. post and comb are made while it does.
// Traffic: 4 n bytes a residual row and row of W.
#pragma once

#include "args.h"
#include "block.h"
#include "chiplets.h"
#include "exchange.h"
#include "lowered.h"
#include "ops/matvec.h"
#include "ops/parts.h"
#include "ops/residual.h"
#include "ops/sigmoid.h"
#include "platform.h"
#include "shape.h"

KIE_DEVICE float* streams_of(const Block& b) { return (float*)(b.shared + kShStreams); }
KIE_DEVICE float& stream_at(const Block& b, int stream, int column, int row) {
    return streams_of(b)[(stream * kColumns + column) * kRowsO + row];
}
// post of each stream, then comb row by row.
KIE_DEVICE float* joins_of(const Block& b, int column) {
    return streams_of(b) + kAtMixNumbers + column * (kHyperStreams * (1 + kHyperStreams));
}
// Products with all of W, then the sum of squares.
KIE_DEVICE float* mix_sums(const Block& b, int column) {
    return streams_of(b) + kAtMixSums + column * kMixWords;
}

// All streams begin as the embedding; a module's output is summed from 0 on.
KIE_DEVICE void begin_streams(const Block& b, Owned& own) {
    each_owned<TilingOwned>([&](int item, int pair, int column, bool live, bool leader) {
        if (!live || !leader) return;
        float v[2];
        unpack_half2(bits(own.v[item][0]), v[0], v[1]);
        KIE_UNROLL for (int stream = 0; stream < kHyperStreams; ++stream) {
            KIE_UNROLL for (int i = 0; i < 2; ++i) stream_at(b, stream, column, 2 * pair + i) =
                v[i];
        }
    });
    KIE_UNROLL for (int i = 0; i < TilingOwned::items; ++i) own.v[i][0] = own.v[i][1] = 0;
}
// A module's output joins them.
KIE_DEVICE void give_streams(const Block& b, Owned& own) {
    each_owned<TilingOwned>([&](int item, int pair, int column, bool live, bool leader) {
        if (live && leader && column < live_of(b)) {
            const float* post = joins_of(b, column);
            const float* comb = post + kHyperStreams;
            float s[kHyperStreams][2];
            KIE_UNROLL for (int stream = 0; stream < kHyperStreams; ++stream) {
                KIE_UNROLL for (int i = 0; i < 2; ++i) s[stream][i] =
                    stream_at(b, stream, column, 2 * pair + i);
            }
            KIE_UNROLL for (int to = 0; to < kHyperStreams; ++to) {
                KIE_UNROLL for (int i = 0; i < 2; ++i) {
                    float sum = post[to] * own.v[item][i];
                    KIE_UNROLL for (int from = 0; from < kHyperStreams; ++from) sum +=
                        comb[from * kHyperStreams + to] * s[from][i];
                    stream_at(b, to, column, 2 * pair + i) = sum;
                }
            }
        }
        own.v[item][0] = own.v[item][1] = 0;
    });
}

// Where blocks put their parts, before a layer's attention (0) or mlp (1).
KIE_DEVICE u64* mix_words(const DecodeArgs& args, int kind, int layer) {
    return args.ll_words + kAtMix + (long)(kind * kNumBuffers + (u32)layer % kNumBuffers) * kVecMix;
}
// This block's part of `kRows` products and of the squares, a warp each.
template <int kRows>
KIE_DEVICE void publish_parts(const Block& b, const float* weights, u64* to) {
    constexpr int kOwn = kHyperStreams * kRowsO;
    const int warp = thread() / kTeam, my = thread() % kTeam;
    const float* mine = weights + (long)b.block_in_lane * kRows * kOwn;
    KIE_NO_UNROLL for (int row = warp; row <= kRows; row += kWarps) {
        float sum[kColumns];
        KIE_UNROLL for (int c = 0; c < kColumns; ++c) sum[c] = 0;
        for (int n = my; n < kOwn; n += kTeam) {
            const float weight = row < kRows ? mine[row * kOwn + n] : 0;
            KIE_UNROLL for (int c = 0; c < kColumns; ++c) {
                const float x = stream_at(b, n / kRowsO, c, n % kRowsO);
                sum[c] += x * (row < kRows ? weight : x);
            }
        }
        KIE_UNROLL for (int c = 0; c < kColumns; ++c) {
            KIE_UNROLL for (int m = 16; m > 0; m /= 2) sum[c] += shuffle_xor(sum[c], m);
            if (my == 0 && c < live_of(b))
                publish(to + (long)(c * kMixWords + row) * kBlocksPerLane + b.block_in_lane,
                        bits(sum[c]), b.seqno);
        }
    }
    join_wave();  // all wait for what some have published
}
// The sums of all blocks' parts, a warp each.
template <int kRows>
KIE_DEVICE void add_mix_parts(Watch& watch, const Block& b, const u64* from, u32 where) {
    constexpr int kEach = (kBlocksPerLane + kTeam - 1) / kTeam;
    const int warp = thread() / kTeam, my = thread() % kTeam;
    KIE_NO_UNROLL for (int n = warp; n < live_of(b) * (kRows + 1); n += kWarps) {
        const int column = n / (kRows + 1), row = n % (kRows + 1);
        const u64* words = from + (long)(column * kMixWords + row) * kBlocksPerLane;
        u64 v[kEach];
        KIE_UNROLL for (int i = 0; i < kEach; ++i) v[i] = 0;
        watch.polls = 0;
        for (;;) {
            u32 late = 0;
            KIE_UNROLL for (int i = 0; i < kEach; ++i) {
                const int block = i * kTeam + my;
                if (block < kBlocksPerLane && seqno_of(v[i]) != b.seqno)
                    v[i] = load_word(words + block);
            }
            KIE_UNROLL for (int i = 0; i < kEach; ++i) if (i * kTeam + my < kBlocksPerLane) late |=
                seqno_of(v[i]) ^ b.seqno;
            if (late == 0 || kNoWaits || wait_expired(watch, where, b.seqno, b.seqno ^ late)) break;
        }
        sync_warp();
        float sum = 0;
        KIE_UNROLL for (int i = 0; i < kEach; ++i) if (i * kTeam + my < kBlocksPerLane) sum +=
            number((u32)v[i]);
        KIE_UNROLL for (int m = 16; m > 0; m /= 2) sum += shuffle_xor(sum, m);
        if (my == 0) mix_sums(b, column)[row] = sum;
    }
}
KIE_DEVICE float streams_scale(float squares) {
    return rsqrt_f(squares * (1.0f / ((float)kHyperStreams * kHiddenReal)) + kEps);
}
// How a module's output will join a column's streams, by one warp: a number of comb a lane.
KIE_DEVICE void make_joins(const Block& b, int column, const float* base, const float* scale) {
    constexpr float kLog2e = 1.44269504f;
    constexpr int kAll = kHyperStreams * kHyperStreams;
    static_assert(kAll <= kTeam, "a number a lane");
    const int my = (int)thread() % kTeam, at = my < kAll ? my : 0;
    const int row = at / kHyperStreams, col = at % kHyperStreams;
    const float* sums = mix_sums(b, column);
    const float by = streams_scale(sums[kMixWords - 1]);
    float v = sums[2 * kHyperStreams + at] * by * scale[2] + base[2 * kHyperStreams + at], top = v,
          sum = 0;
    KIE_UNROLL for (int n = 0; n < kHyperStreams; ++n) top =
        max_f(top, shuffle(v, row * kHyperStreams + n));
    v = exp2_f((v - top) * kLog2e);
    KIE_UNROLL for (int n = 0; n < kHyperStreams; ++n) sum += shuffle(v, row * kHyperStreams + n);
    v = v * reciprocal_f(sum) + kMixEps;
    KIE_NO_UNROLL for (int round = 0; round < kMixRounds; ++round) {
        if (round > 0) {
            sum = kMixEps;
            KIE_UNROLL for (int n = 0; n < kHyperStreams; ++n) sum +=
                shuffle(v, row * kHyperStreams + n);
            v *= reciprocal_f(sum);
        }
        sum = kMixEps;
        KIE_UNROLL for (int n = 0; n < kHyperStreams; ++n) sum +=
            shuffle(v, n * kHyperStreams + col);
        v *= reciprocal_f(sum);
    }
    float* joins = joins_of(b, column);
    if (my < kHyperStreams)
        joins[my] =
            2.0f * sigmoid_f(sums[kHyperStreams + my] * by * scale[1] + base[kHyperStreams + my]);
    if (my < kAll) joins[kHyperStreams + my] = v;
}
// What a module takes of the streams, or (not kJoins) the head, whose number of the layer is one
// behind the last: words of `to`. `numbers`: W of all blocks, and, `beside` floats behind, b and a.
template <bool kJoins>
KIE_DEVICE void take_streams(Watch& watch, const DecodeArgs& args, const Block& b,
                             const float* numbers, int beside, int kind, int layer, u64* to,
                             u32 where) {
    constexpr int kRows = kJoins ? kMixWords - 1 : kHyperStreams;
    const float *base = numbers + beside, *scale = base + kRows;
    u64* words = mix_words(args, kind, layer);
    sync_consumers<kThreads>();  // the streams are whole
    publish_parts<kRows>(b, numbers, words);
    add_mix_parts<kRows>(watch, b, words, where);
    sync_consumers<kThreads>();
    each_owned<TilingOwned>([&](int, int pair, int column, bool live, bool leader) {
        if (!live || !leader || column >= live_of(b)) return;
        const float* sums = mix_sums(b, column);
        const float by = streams_scale(sums[kRows]);
        float x[2] = {0, 0};
        KIE_UNROLL for (int stream = 0; stream < kHyperStreams; ++stream) {
            const float pre = sigmoid_f(sums[stream] * by * scale[0] + base[stream]) + kMixEps;
            KIE_UNROLL for (int i = 0; i < 2; ++i) x[i] +=
                pre * stream_at(b, stream, column, 2 * pair + i);
        }
        publish(to + b.block_in_lane * (kRowsO / 2) + (long)column * kWordsH + pair, kWordsH,
                halves_of(x[0], x[1]), b.seqno);
    });
    join_wave();  // all wait for these
    const int warp = thread() / kTeam;
    if (kJoins)
        for (int c = warp; c < live_of(b); c += kWarps) make_joins(b, c, base, scale);
}
