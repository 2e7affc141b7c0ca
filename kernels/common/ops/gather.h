// Vectors of LL words into shared memory, as the operand of the next product: a warp takes a share
// of each, multiplied by a norm's weights on the way where there is one. Products are linear, so 1
// / rms multiplies their results: the squares are summed where nobody waits for them.
#pragma once

#include "args.h"
#include "block.h"
#include "chiplets.h"
#include "exchange.h"
#include "lowered.h"
#include "ops/parts.h"
#include "platform.h"
#include "shape.h"

// A warp's share of the words of all live columns' vectors (ops/parts.h), `kCount` of each from
// `base` on, into halves in shared memory (`x`; vectors `x_stride` words apart), multiplied by a
// norm's weights (kHidden / 2 words a part) on the way. `words`: of one column. Adds this lane's
// part of each column's sum of squares to `squares`. Several vectors are in flight at once.
constexpr int kFlight = 8;  // loads of a lane
template <int kCount, bool kNorm>
KIE_DEVICE void gather(Watch& w, const u64* base, int words, u32 seqno, u32 where, int live,
                       const u32* norm, u32* x, int x_stride, float (&squares)[kColumns]) {
    static_assert(kCount % 2 == 0, "pairs of words");
    constexpr int kPairs = (kCount + 63) / 64, kMost = max_i(kFlight / kPairs, kParts);
    constexpr int kAtOnce = kVectors < kMost ? kVectors
                            : kMost >= 8     ? 8
                            : kMost >= 4     ? 4
                            : kMost >= 2     ? 2
                                             : 1;
    static_assert(kVectors % kAtOnce == 0 && kAtOnce % kParts == 0, "vectors in groups");
    const int mine = 2 * (int)lane();
    const auto has = [&](int i) { return kCount % 64 == 0 || 64 * i + mine < kCount; };
    u64 scale[kPairs][kParts];  // asked for before the wait, not after it
    if (kNorm) KIE_UNROLL for (int i = 0; i < kPairs; ++i) {
            KIE_UNROLL for (int part = 0; part < kParts; ++part) scale[i][part] =
                has(i) ? *(const u64*)(norm + part * (kHidden / 2) + 64 * i + mine) : 0;
        }
    // Blocks watch different words, since one line serves few readers at a time.
    if (kPollMode == 1)
        await_one(w, base + block() * 10 % kCount, seqno, where, kPollDelayNs);
    else if (!kNoWaits && kPollDelayNs > 0)
        pause_ns(kPollDelayNs);
    KIE_UNROLL for (int first = 0; first < kVectors; first += kAtOnce) {
        if (kColumns > 1 && first >= live * kParts) continue;
        u64 a[kAtOnce][kPairs], b[kAtOnce][kPairs];
        // A thread without words loads another's; the result is unused.
        const auto from = [&](int c) {
            return base +
                   (long)(kColumns == 1 || c < live * kParts ? c : first) * (words / kParts) + mine;
        };
        const auto late_by = [&](int c, int i) {  // bits in which a word's number differs
            return (seqno_of(a[c][i]) ^ seqno) | (seqno_of(b[c][i]) ^ seqno);
        };
        KIE_UNROLL for (int c = 0; c < kAtOnce; ++c) {
            KIE_UNROLL for (int i = 0; i < kPairs; ++i) {
                if (kPollMode == 0 || (kCount % 64 != 0 && i + 1 == kPairs))
                    a[c][i] = b[c][i] = 0;  // no step's number
            }
        }
        w.polls = 0;
        for (;;) {
            u32 late = 0;
            KIE_UNROLL for (int c = 0; c < kAtOnce; ++c) {
                const u64* p = from(first + c);
                KIE_UNROLL for (int i = 0; i < kPairs; ++i) {
                    if (has(i) && (kPollMode == 1 || late_by(c, i) != 0))
                        load_words(p + 64 * i, a[c][i], b[c][i]);
                }
            }
            KIE_UNROLL for (int c = 0; c < kAtOnce; ++c) {
                KIE_UNROLL for (int i = 0; i < kPairs; ++i) if (has(i)) late |= late_by(c, i);
            }
            if (late == 0 || kNoWaits || wait_expired(w, where, seqno, seqno ^ late)) break;
        }
        KIE_UNROLL for (int c = 0; c < kAtOnce; c += kParts) {
            KIE_UNROLL for (int i = 0; i < kPairs; ++i) {
                if (!has(i)) continue;
                Halves p0, p1;
                KIE_UNROLL for (int part = 0; part < kParts; ++part)
                    p0.v[part] = (u32)a[c + part][i],
                    p1.v[part] = (u32)b[c + part][i];
                if (kNorm) {
                    float v0, v1, v2, v3, n0, n1, n2, n3;
                    numbers_of(p0, v0, v1), numbers_of(p1, v2, v3);
                    squares[(first + c) / kParts] += v0 * v0 + v1 * v1 + v2 * v2 + v3 * v3;
                    Halves s0, s1;
                    KIE_UNROLL for (int part = 0; part < kParts; ++part)
                        s0.v[part] = (u32)scale[i][part],
                        s1.v[part] = (u32)(scale[i][part] >> 32);
                    numbers_of(s0, n0, n1), numbers_of(s1, n2, n3);
                    p0 = halves_of(v0 * n0, v1 * n1), p1 = halves_of(v2 * n2, v3 * n3);
                }
                KIE_UNROLL for (int part = 0; part < kParts; ++part) *
                    (u64*)(x + (first + c + part) * x_stride + 64 * i + mine) =
                    (u64)p1.v[part] << 32 | p0.v[part];
            }
        }
    }
}
// A warp's share of all live columns' vectors, a few words of each, into shared memory.
template <int kCount>
KIE_DEVICE void gather_narrow(Watch& w, const u64* base, int words, u32 seqno, u32 where, int live,
                              u32* x, int x_stride) {
    constexpr int kEach = kCount / 2, kLoads = (kEach * kVectors + kTeam - 1) / kTeam;
    const int stride = words / kParts, vectors = live * kParts;
    const int my = lane();
    await_one(w, base + block() * 10 % kCount, seqno, where, kPollDelayNs);
    u64 a[kLoads], b[kLoads];
    KIE_UNROLL for (int i = 0; i < kLoads; ++i) a[i] = b[i] = 0;
    w.polls = 0;
    for (;;) {
        bool ok = true;
        KIE_UNROLL for (int i = 0; i < kLoads; ++i) {
            const int n = i * kTeam + my;
            if (n / kEach < vectors)
                load_words(base + (long)(n / kEach) * stride + n % kEach * 2, a[i], b[i]);
        }
        KIE_UNROLL for (int i = 0; i < kLoads; ++i) if ((i * kTeam + my) / kEach < vectors) ok &=
            seqno_of(a[i]) == seqno && seqno_of(b[i]) == seqno;
        if (ok || kNoWaits || wait_expired(w, where, seqno, seqno_of(a[0]))) break;
    }
    KIE_UNROLL for (int i = 0; i < kLoads; ++i) {
        const int n = i * kTeam + my;
        if (n / kEach < vectors)
            *(u64*)(x + n / kEach * x_stride + n % kEach * 2) = b[i] << 32 | (u32)a[i];
    }
}

// Two numbers of a column into shared memory, where its vectors have `stride` halves each.
KIE_DEVICE void put_halves(u32* x, int column, int stride, int at, const Halves& h) {
    KIE_UNROLL for (int part = 0; part < kParts; ++part)
        x[(column * kParts + part) * (stride / 2) + at] = h.v[part];
}

// The row of a layer's norm's scale: attention's (0) or the mlp's (1).
KIE_DEVICE u32 norm_row(const Block& b, int layer, int kind) {
    const Layer& l = layer_of(b, layer);
    return l.norm[kind] + (kLanesAll > 1 && (l.norm_lanes >> kind & 1) != 0 ? b.lane_all : 0);
}
// Two weights of a norm, whose row has `words` words a part.
KIE_DEVICE void norm_weights(const u32* row, int words, int at, float& n0, float& n1) {
    Halves h;
    KIE_UNROLL for (int part = 0; part < kParts; ++part) h.v[part] = row[part * words + at];
    numbers_of(h, n0, n1);
}
// This warp's share of a normed vector into shared memory: words, or the embedding of the tokens.
struct Squares {
    float v[kColumns];
};  // a lane's part of each column's sum of squares
KIE_DEVICE Squares gather_normed(Watch& watch, const DecodeArgs& args, const Block& b,
                                 const u64* from, bool embedded, u32 norm, u32 seqno, u32 where) {
    constexpr int kShare = kHidden / 2 / kWarps;
    const int warp = thread() / kTeam;
    const u32* weights = args.norms + (long)norm * (kParts * kHidden / 2) + warp * kShare;
    Squares squares;
    KIE_UNROLL for (int c = 0; c < kColumns; ++c) squares.v[c] = 0;
    u32* x = (u32*)(b.shared + kShXa) + warp * kShare;
    if (!embedded) {
        gather<kShare, true>(watch, from + warp * kShare, kWordsH, seqno, where, live_of(b),
                             weights, x, kStrideA / 2, squares.v);
        return squares;
    }
    KIE_UNROLL for (int c = 0; c < kColumns; ++c) {
        if (c >= live_of(b)) continue;
        const u32* e = args.embed + (long)tokens_of(b)[c] * (kHidden / 2) + warp * kShare;
        KIE_UNROLL for (int i = 0; i < (kShare + kTeam - 1) / kTeam; ++i) {
            const int at = kTeam * i + lane();
            if (at >= kShare) continue;
            float v0, v1, n0, n1;
            unpack_half2(e[at], v0, v1), norm_weights(weights, kHidden / 2, at, n0, n1);
            if (kResidualScaled) v0 *= kResidualScale, v1 *= kResidualScale;
            squares.v[c] += v0 * v0 + v1 * v1;
            put_halves(x, c, kStrideA, at, halves_of(v0 * n0, v1 * n1));
        }
    }
    return squares;
}
KIE_DEVICE void add_squares(const Block& b, Squares& s) {
    float* all = (float*)(b.shared + kShNorm);
    const int my = lane();
    // Each step that adds up lanes halves the columns that a lane looks after.
    KIE_UNROLL for (int half = kColumns / 2, m = 16; half > 0; half /= 2, m /= 2) {
        KIE_UNROLL for (int c = 0; c < half; ++c) {
            const bool upper = (my & m) != 0;
            const float give = upper ? s.v[c] : s.v[c + half];
            s.v[c] = (upper ? s.v[c + half] : s.v[c]) + shuffle_xor(give, m);
        }
    }
    KIE_UNROLL for (int m = 16 / kColumns; m > 0; m /= 2) s.v[0] += shuffle_xor(s.v[0], m);
    if (my % (32 / kColumns) == 0) all[my / (32 / kColumns) * kWarps + thread() / kTeam] = s.v[0];
}
// Behind a barrier after the squares were added: 1 / rms of a column, of one of several streams.
KIE_DEVICE float set_scale(const Block& b, int set, int column) {
    const float* s = (const float*)(b.shared + kShNorm) + (set * kColumns + column) * kWarps;
    float sum = 0;
    KIE_UNROLL for (int i = 0; i < kWarps; ++i) sum += s[i];
    return rsqrt_f(sum * (1.0f / kHiddenReal) + kEps);
}
KIE_DEVICE float rms_scale(const Block& b, int column) { return set_scale(b, 0, column); }
// Before the place of vectors is filled again, after the product `S` with what stands there: where
// parts were added up all had met by then.
template <class S>
KIE_DEVICE void vector_free() {
    if (kOneVector && S::k_warps == 1) sync_consumers<kThreads>();
}
template <class S>
KIE_DEVICE void vector_ready() {
    if (S::row_warps > 1 || S::uneven)
        sync_consumers<kThreads>();
    else
        sync_warp();
}
