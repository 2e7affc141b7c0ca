// Attention over latents (DeepSeek-V2, arXiv 2405.04434), absorbed: heads share one latent and one
// turned key a position, which pages keep; heads' keys and values are never made.
//   c, r, q = down x   normed but for r   (ranks share the rows, each is told of all)
//   [p, t] = up q, a = K^T p   of each head: what meets the latent c; t, turned, meets r
//   partial = softmax(s (a c + t r)) c   over a block's pages; combined by owners
//   value = V partial   of each head, the operand of the o product
// A block attends with all heads of the rank, some at a time, so nobody else reads its pages: they
// are its own, as those of keys and values are. Scores and sums are floats, outside of matrix
// units. Traffic: 2 (rank + turned) bytes a position, twice, the second time from the cache.
#pragma once

#include "args.h"
#include "block.h"
#include "chiplets.h"
#include "exchange.h"
#include "lowered.h"
#include "ops/attend_exact.h"
#include "ops/gather.h"
#include "ops/matvec.h"
#include "ops/parts.h"
#include "ops/project.h"
#include "ops/residual.h"
#include "pages.h"
#include "platform.h"
#include "ring.h"
#include "shape.h"

// Codes of waits (mono/wire.rs).
enum LatentWait { kWaitLatents = 10, kWaitQueries = 11, kWaitSeen = 12 };

// A column's words: latents, then heads' queries, then what of these meets latents.
template <class C>
KIE_DEVICE u64* latent_words(const DecodeArgs& args, const Block& b, int layer, int column) {
    return args.ll_words + kAtQkv + buffer_of(layer, b.lane_index) * kVecQ +
           (long)column * C::kWordsQ;
}
// What heads saw of latents, then their values.
template <class C>
KIE_DEVICE u64* seen_words(const DecodeArgs& args, const Block& b, int layer, int column) {
    return args.ll_words + kAtAttn + buffer_of(layer, b.lane_index) * kVecA +
           (long)column * C::kWordsA;
}
// Where a rank that takes its own words for others' finds one.
template <class C>
KIE_DEVICE int heard_latent(int word) {
    return kNoRanks ? word % (kBlocksPerLane * (C::TilingLatentDown::rows / 2)) : word;
}

// Some words of a vector a thread, all asked for at once. address(i): of its i-th one, or null.
template <int kEach, class F>
KIE_DEVICE void take_each(Watch& watch, Halves (&out)[kEach], long words, u32 seqno, u32 where,
                          F address) {
    u64 v[kEach][kParts];
    KIE_UNROLL for (int i = 0; i < kEach; ++i) {
        const u64* p = address(i);
        KIE_UNROLL for (int part = 0; part < kParts; ++part) v[i][part] =
            p ? load_word(p + part * (words / kParts)) : ll_word(0, seqno);
    }
    KIE_UNROLL for (int i = 0; i < kEach; ++i) {
        KIE_UNROLL for (int part = 0; part < kParts; ++part) {
            watch.polls = 0;
            while (!kNoWaits && seqno_of(v[i][part]) != seqno &&
                   !wait_expired(watch, where, seqno, seqno_of(v[i][part])))
                v[i][part] = load_word(address(i) + part * (words / kParts));
            out[i].v[part] = (u32)v[i][part];
        }
    }
}

template <class C>
KIE_DEVICE void step_latents(Ring& ring, const DecodeArgs& args, Block& b, int layer,
                             Prefetched<typename C::TilingLatentDown>& prefetched,
                             Squares& squares) {
    using S = typename C::TilingLatentDown;
    Sums<S> s = multiply_normed<S>(ring, prefetched, b, squares);
    const int first =
        ((kNoRanks ? 0 : (int)args.rank) * kBlocksPerLane + b.block_in_lane) * (S::rows / 2);
    finish<S>(s, (float*)(b.shared + kShPartA),
              [&](int, int pair, int column, float v0, float v1, bool live, bool leader) {
                  const float scale = rms_scale(b, live ? column : 0);
                  const int at = first + pair;
                  if (!live || !leader || column >= live_of(b) || at >= C::kWordsLatent) return;
                  const Halves both = halves_of(v0 * scale, v1 * scale);
                  u64* to = latent_words<C>(args, b, layer, column) + at;
                  KIE_UNROLL for (int part = 0; part < kParts; ++part)
                      publish_all(args, to + part * (C::kWordsQ / kParts), both.v[part], b.seqno);
              });
}

// The latent of queries, times its norm's weights, into shared memory; each column's squares are
// summed where those of the residual stood, which have been used.
template <class C>
KIE_DEVICE void gather_query_latent(Watch& watch, const DecodeArgs& args, Block& b, int layer) {
    constexpr int kWords = C::kQueryRank / 2, kEach = (kWords + kThreads - 1) / kThreads;
    const int me = thread();
    const u32 where = layer << 4 | kWaitLatents;
    const float* norm = extras_of(args, b, layer) + C::kAtQueryNorm;
    sync_consumers<kThreads>();
    KIE_NO_UNROLL for (int c = 0; c < live_of(b); ++c) {
        const u64* from = latent_words<C>(args, b, layer, c);
        await_one(watch, from + heard_latent<C>(block() * 10 % kWords), b.seqno, where, 0);
        Halves v[kEach];
        take_each(watch, v, C::kWordsQ, b.seqno, where, [&](int i) -> const u64* {
            const int n = i * kThreads + me;
            return n < kWords ? from + heard_latent<C>(n) : nullptr;
        });
        float sum = 0;
        KIE_UNROLL for (int i = 0; i < kEach; ++i) {
            const int n = i * kThreads + me;
            if (n >= kWords) continue;
            float v0, v1;
            numbers_of(v[i], v0, v1);
            sum += v0 * v0 + v1 * v1;
            put_halves((u32*)(b.shared + kShXb), c, kStrideB, n,
                       halves_of(v0 * norm[2 * n], v1 * norm[2 * n + 1]));
        }
        sync_warp();
        KIE_UNROLL for (int m = 16; m > 0; m /= 2) sum += shuffle_xor(sum, m);
        if (me % kTeam == 0) ((float*)(b.shared + kShNorm))[c * kWarps + me / kTeam] = sum;
    }
    sync_consumers<kThreads>();
}
template <class C>
KIE_DEVICE float query_latent_scale(const Block& b, int column) {
    const float* s = (const float*)(b.shared + kShNorm) + column * kWarps;
    float sum = 0;
    KIE_UNROLL for (int i = 0; i < kWarps; ++i) sum += s[i];
    return rsqrt_f(sum * (1.0f / C::kQueryRankReal) + C::kLatentEps);
}
template <class C>
KIE_DEVICE void step_queries(Ring& ring, const DecodeArgs& args, Block& b, int layer,
                             Prefetched<typename C::TilingQueryUp>& prefetched) {
    using S = typename C::TilingQueryUp;
    constexpr int kWords = C::kHeads * C::kQueryHead / 2;
    Sums<S> s = multiply<S>(ring, prefetched, b.shared + kShXb, kStrideB);
    finish<S>(s, (float*)(b.shared + kShPartA),
              [&](int, int pair, int column, float v0, float v1, bool live, bool leader) {
                  const float scale = query_latent_scale<C>(b, live ? column : 0);
                  const int at = b.block_in_lane * (S::rows / 2) + pair;
                  if (live && leader && column < live_of(b) && at < kWords)
                      publish(latent_words<C>(args, b, layer, column) + C::kAtQuery + at,
                              C::kWordsQ, halves_of(v0 * scale, v1 * scale), b.seqno);
              });
}

// Rows of heads, each head's times a vector of its own. `x`: those of this block's heads, one
// behind the other; `first`: the block's first row among its first head's.
template <class S, int kOfHead>
KIE_DEVICE Sums<S> multiply_heads(Ring& ring, Prefetched<S>& prefetched, const u8* x, int stride,
                                  int first) {
    static_assert(S::prefetch_depth == 1, "one stage at a time");
    const int me = thread(), warp = me / kTeam, my = me % kTeam, t = my % 4;
    const int k_warp = S::k_warps == 1 ? 0 : warp / S::row_warps;
    const int row_warp = S::row_warps == 1 ? 0 : warp % S::row_warps;
    const u8* mine[S::tiles];
    KIE_UNROLL for (int i = 0; i < S::tiles; ++i) {
        const int row = 16 * (row_warp * S::tiles + i);
        const int head = row < S::rows ? (first + row) / kOfHead : 0;
        mine[i] =
            x + (vector_of(my / 4) * stride + head * S::k + k_warp * S::pairs * 32 + 8 * t) * 2;
    }
    const FragmentOffset<S> offset = fragment_offset<S>(ring);
    const int own = own_stages<S>(k_warp);
    WeightFragment<S>& f = prefetched.v[0];
    Sums<S> s;
    KIE_UNROLL for (int i = 0; i < S::tiles; ++i) {
        KIE_UNROLL for (int j = 0; j < 4; ++j) s.v[i][j] = 0;
    }
    KIE_NO_UNROLL for (int stage = 0; stage < S::stages; ++stage) {
        if (stage > 0) load_fragment<S>(ring, f, false, offset);
        if (S::uneven && stage >= own) continue;
        KIE_UNROLL for (int i = 0; i < S::tiles; ++i) {
            const Column<S> column = take_column<S>(mine[i] + stage * (S::chunk * 64));
            if constexpr (!S::scaled) {
                KIE_UNROLL for (int c = 0; c < S::chunk; ++c)
                    add_unit<S>(s.v[i], f.codes[c][i], column.v[c]);
            } else {
                KIE_UNROLL for (int n = 0; n < S::spans; ++n) {
                    float d[4] = {0, 0, 0, 0};
                    KIE_UNROLL for (int c = n * S::span; c < (n + 1) * S::span; ++c)
                        add_unit<S>(d, f.codes[c][i], column.v[c], zero_of<S>(f.scale[n][i], 0),
                                    zero_of<S>(f.scale[n][i], 1));
                    KIE_UNROLL for (int j = 0; j < 4; ++j) s.v[i][j] +=
                        scale_of<S>(f.scale[n][i], j / 2) * d[j];
                }
            }
        }
    }
    return s;
}
// The vectors of the heads of which this block has rows, `kWords` words of each, `step` words from
// one to the next: into shared memory, where the vector before has been used.
template <class C, class S, int kOfHead, int kMost, int kWords>
KIE_DEVICE void gather_heads(Watch& watch, Block& b, const u64* from, long column_words, int step,
                             u32 where) {
    constexpr int kAll = kMost * kWords, kEach = (kAll + kThreads - 1) / kThreads;
    const int me = thread(), head = b.block_in_lane * S::rows / kOfHead;
    sync_consumers<kThreads>();
    KIE_NO_UNROLL for (int c = 0; c < live_of(b); ++c) {
        Halves v[kEach];
        take_each(watch, v, column_words, b.seqno, where, [&](int i) -> const u64* {
            const int n = i * kThreads + me, its = head + n / kWords;
            if (n >= kAll || its >= C::kHeads) return nullptr;
            return from + c * column_words + (long)its * step + n % kWords;
        });
        KIE_UNROLL for (int i = 0; i < kEach; ++i) {
            const int n = i * kThreads + me;
            if (n < kAll) put_halves((u32*)(b.shared + kShXb), c, kStrideB, n, v[i]);
        }
    }
    sync_consumers<kThreads>();
}
// What of heads' queries meets latents.
template <class C>
KIE_DEVICE void step_absorb(Ring& ring, Watch& watch, const DecodeArgs& args, Block& b, int layer) {
    using S = typename C::TilingKeyUp;
    Prefetched<S> prefetched;
    prefetch_weights<S>(ring, prefetched);
    gather_heads<C, S, C::kRank, C::kKeyHeads, C::kPlain / 2>(
        watch, b, latent_words<C>(args, b, layer, 0) + C::kAtQuery, C::kWordsQ, C::kQueryHead / 2,
        layer << 4 | kWaitQueries);
    Sums<S> s = multiply_heads<S, C::kRank>(ring, prefetched, b.shared + kShXb, kStrideB,
                                            b.block_in_lane * S::rows % C::kRank);
    finish<S>(s, (float*)(b.shared + kShPartA),
              [&](int, int pair, int column, float v0, float v1, bool live, bool leader) {
                  const int at = b.block_in_lane * (S::rows / 2) + pair;
                  if (live && leader && column < live_of(b) && at < C::kHeads * C::kRank / 2)
                      publish(latent_words<C>(args, b, layer, column) + C::kAtAbsorbed + at,
                              C::kWordsQ, halves_of(v0, v1), b.seqno);
              });
}
// Values of heads, behind what they saw.
template <class C>
KIE_DEVICE void step_values(Ring& ring, Watch& watch, const DecodeArgs& args, Block& b, int layer) {
    using S = typename C::TilingValueUp;
    Prefetched<S> prefetched;
    prefetch_weights<S>(ring, prefetched);
    gather_heads<C, S, C::kHeadDim, C::kValueHeads, C::kRank / 2>(
        watch, b, seen_words<C>(args, b, layer, 0), C::kWordsA, C::kRank / 2,
        layer << 4 | kWaitSeen);
    Sums<S> s = multiply_heads<S, C::kHeadDim>(ring, prefetched, b.shared + kShXb, kStrideB,
                                               b.block_in_lane * S::rows % C::kHeadDim);
    finish<S>(s, (float*)(b.shared + kShPartA),
              [&](int, int pair, int column, float v0, float v1, bool live, bool leader) {
                  const int at = b.block_in_lane * (S::rows / 2) + pair;
                  if (live && leader && column < live_of(b) && at < C::kAttn / 2)
                      publish(seen_words<C>(args, b, layer, column) + C::kAtValues + at, C::kWordsA,
                              halves_of(v0, v1), b.seqno);
              });
}

// Pages have a row a position: the latent, then the turned key; halves, or floats (two parts).
KIE_DEVICE void store_pair(u8* row, int pair, float a, float b) {
    if constexpr (kParts == 1)
        ((u32*)row)[pair] = pack_half2(a, b);
    else
        ((u64*)row)[pair] = (u64)bits(b) << 32 | bits(a);
}
// Neighbouring numbers of a row: 16 bytes.
constexpr int kOfQuad = 8 / kParts;
KIE_DEVICE void unpack_quad(const Quad& q, float (&v)[kOfQuad]) {
    KIE_UNROLL for (int i = 0; i < 4; ++i) {
        if constexpr (kParts == 1)
            unpack_half2(q.v[i], v[2 * i % kOfQuad], v[(2 * i + 1) % kOfQuad]);
        else
            v[i % kOfQuad] = number(q.v[i]);
    }
}
template <class C>
KIE_DEVICE u8* latent_row(const DecodeArgs& args, const u8* shared, int layer, int column, int page,
                          int slot) {
    return page_at<C>(args, shared, {layer, 0, column}, page) + slot * (C::kKept * 2 * kParts);
}
// Pair `n` of the turned features, turned.
template <class C>
KIE_DEVICE void turn_pair(const DecodeArgs& args, int position, int n, float& a, float& b) {
    const float* r = args.rope + C::kRope + ((long)position * (C::kRopeDim / 2) + n) * 2;
    const float x = a * r[0] - b * r[1];
    b = a * r[1] + b * r[0], a = x;
}
// A column's new latent, by a warp, into its page.
template <class C>
KIE_DEVICE void store_latent(Watch& watch, const DecodeArgs& args, const Block& b, int layer,
                             int column, int position) {
    constexpr int kPairs = C::kRankReal / 2, kEach = (kPairs + kTeam - 1) / kTeam;
    const int my = lane() % kTeam;
    const u32 where = layer << 4 | kWaitLatents;
    const u64* from = latent_words<C>(args, b, layer, column);
    const float* norm = extras_of(args, b, layer) + C::kAtLatentNorm;
    u8* row = latent_row<C>(args, b.shared, layer, column, position / kPage, position % kPage);
    const auto address = [&](int n) { return from + heard_latent<C>(C::kQueryRank / 2 + n); };
    Halves taken[kEach];
    take_each(watch, taken, C::kWordsQ, b.seqno, where, [&](int i) -> const u64* {
        const int n = i * kTeam + my;
        return n < kPairs ? address(n) : nullptr;
    });
    float v[kEach][2], sum = 0;
    KIE_UNROLL for (int i = 0; i < kEach; ++i) {
        numbers_of(taken[i], v[i][0], v[i][1]);
        sum += v[i][0] * v[i][0] + v[i][1] * v[i][1];
    }
    sync_warp();
    KIE_UNROLL for (int m = 16; m > 0; m /= 2) sum += shuffle_xor(sum, m);
    const float scale = rsqrt_f(sum * (1.0f / C::kRankReal) + C::kLatentEps);
    KIE_UNROLL for (int i = 0; i < kEach; ++i) {
        const int n = i * kTeam + my;
        if (n < kPairs)
            store_pair(row, n, v[i][0] * scale * norm[2 * n], v[i][1] * scale * norm[2 * n + 1]);
    }
    KIE_NO_UNROLL for (int n = my; n < (C::kKept - C::kRankReal) / 2; n += kTeam) {
        float a = 0, c = 0;
        if (n < C::kTurned / 2) {
            numbers_of(take_halves(watch, address(C::kRank / 2 + n), C::kWordsQ, b.seqno, where), a,
                       c);
            turn_pair<C>(args, position, n, a, c);
        }
        store_pair(row, kPairs + n, a, c);
    }
}

// Some heads' queries as they meet what pages keep, times what scores are multiplied by, as floats:
// [head][kKept], where vectors stand, of which none is at work.
template <class C>
KIE_DEVICE void take_latent_heads(Watch& watch, const DecodeArgs& args, const Block& b, int layer,
                                  int column, int position, int first) {
    constexpr int kPairs = C::kKept / 2, kLatents = C::kRankReal / 2;
    constexpr int kAll = C::kHeadsAtOnce * kPairs, kEach = (kAll + kThreads - 1) / kThreads;
    const u64* from = latent_words<C>(args, b, layer, column);
    float* q = (float*)(b.shared + kShXa);
    const int me = thread();
    Halves v[kEach];
    take_each(watch, v, C::kWordsQ, b.seqno, layer << 4 | 1, [&](int i) -> const u64* {
        const int n = i * kThreads + me, head = first + n / kPairs, pair = n % kPairs,
                  turned = pair - kLatents;
        if (n >= kAll || head >= C::kHeads || turned >= C::kTurned / 2) return nullptr;
        if (turned < 0) return from + C::kAtAbsorbed + head * (C::kRank / 2) + pair;
        return from + C::kAtQuery + head * (C::kQueryHead / 2) + C::kPlain / 2 + turned;
    });
    KIE_UNROLL for (int i = 0; i < kEach; ++i) {
        const int n = i * kThreads + me, turned = n % kPairs - kLatents;
        if (n >= kAll) continue;
        float v0, v1;
        numbers_of(v[i], v0, v1);
        if (turned >= 0 && turned < C::kTurned / 2) turn_pair<C>(args, position, turned, v0, v1);
        *(u64*)(q + 2 * n) = (u64)bits(v1 * C::kScoreScale) << 32 | bits(v0 * C::kScoreScale);
    }
}
// Scores of a page's positions into `scores` ([head][64]): four threads a position.
template <class C>
KIE_DEVICE void score_latents(const u8* page, const float* q, int to, float* scores) {
    constexpr int kQuads = C::kKept / kOfQuad, kOnce = 4;
    const int row = thread() / 4, t = thread() % 4;
    if (row >= kPage) return;
    const u8* mine = page + row * (C::kKept * 2 * kParts);
    float d[C::kHeadsAtOnce];
    KIE_UNROLL for (int head = 0; head < C::kHeadsAtOnce; ++head) d[head] = 0;
    KIE_NO_UNROLL for (int first = t; first < kQuads; first += 4 * kOnce) {
        Quad k[kOnce];
        KIE_UNROLL for (int i = 0; i < kOnce; ++i) k[i] =
            load_state(mine + min_i(first + 4 * i, kQuads - 1) * 16);
        KIE_UNROLL for (int i = 0; i < kOnce; ++i) {
            const int quad = first + 4 * i;
            if (quad >= kQuads) continue;
            float v[kOfQuad];
            unpack_quad(k[i], v);
            KIE_UNROLL for (int head = 0; head < C::kHeadsAtOnce; ++head) {
                const float* its = q + head * C::kKept + quad * kOfQuad;
                KIE_UNROLL for (int j = 0; j < kOfQuad; j += 4) {
                    const Quad f = *(const Quad*)(its + j);
                    KIE_UNROLL for (int n = 0; n < 4; ++n) d[head] += number(f.v[n]) * v[j + n];
                }
            }
        }
    }
    KIE_UNROLL for (int head = 0; head < C::kHeadsAtOnce; ++head) {
        d[head] += shuffle_xor(d[head], 1), d[head] += shuffle_xor(d[head], 2);
        if (t == 0) scores[head * kPage + row] = row < to ? d[head] : -1e30f;
    }
}
// Four features of four heads a thread, or of more where latents are wide.
template <class C>
struct LatentSums {
    static constexpr int kFours = C::kRank / 4, kAll = C::kHeadsAtOnce / 4 * kFours,
                         kCount = (kAll + kThreads - 1) / kThreads;
    float v[kCount][4][4];
    // visit(index, first head, first feature)
    template <class F>
    static KIE_DEVICE void each(F visit) {
        KIE_UNROLL for (int i = 0; i < kCount; ++i) {
            const int n = i * kThreads + (int)thread();
            if (n < kAll) visit(i, n / kFours * 4, n % kFours * 4);
        }
    }
};
struct LatentFour {
    float v[4];
};
KIE_DEVICE LatentFour load_four(const u8* p) {
    LatentFour f;
    if constexpr (kParts == 1) {
        const u64 v = load_word((const u64*)p);
        unpack_half2((u32)v, f.v[0], f.v[1]), unpack_half2((u32)(v >> 32), f.v[2], f.v[3]);
    } else {
        const Quad v = load_state(p);
        KIE_UNROLL for (int j = 0; j < 4; ++j) f.v[j] = number(v.v[j]);
    }
    return f;
}
template <class C>
KIE_DEVICE void add_latents(LatentSums<C>& sums, const u8* page, const float* weights, int to,
                            const float* keep) {
    constexpr int kOnce = 4, kRow = C::kKept * 2 * kParts;
    static_assert(C::kRankReal % 4 == 0, "whole fours");
    LatentSums<C>::each([&](int i, int head, int feature) {
        KIE_UNROLL for (int h = 0; h < 4; ++h) {
            KIE_UNROLL for (int j = 0; j < 4; ++j) sums.v[i][h][j] *= keep[head + h];
        }
        if (feature >= C::kRankReal) return;
        KIE_NO_UNROLL for (int first = 0; first < to; first += kOnce) {
            // What stands behind the last position may be no number.
            LatentFour v[kOnce];
            KIE_UNROLL for (int n = 0; n < kOnce; ++n) v[n] =
                load_four(page + min_i(first + n, to - 1) * kRow + feature * (2 * kParts));
            KIE_UNROLL for (int h = 0; h < 4; ++h) {
                const Quad w = *(const Quad*)(weights + (head + h) * kPage + first);
                KIE_UNROLL for (int n = 0; n < kOnce; ++n) {
                    KIE_UNROLL for (int j = 0; j < 4; ++j) sums.v[i][h][j] +=
                        number(w.v[n]) * v[n].v[j];
                }
            }
        }
    });
}
// Some heads' attention of a column to this block's pages.
template <class C>
KIE_DEVICE void attend_heads(Watch& watch, const DecodeArgs& args, const Block& b, int layer,
                             int column, int split, int shift, int first) {
    static_assert(C::kHeadsAtOnce <= kWarps && C::kHeadsAtOnce % 4 == 0, "a warp a head");
    const int warp = thread() / kTeam;
    const PageSpan span = pages_of(layer_of(b, layer), (int)position_at(args, b.step, column));
    float* q = (float*)(b.shared + kShXa);
    // On which factor earlier sums shrink (of two pages in turn), 1 / the sum of exponentials, and
    // its log2.
    float* stats = q + C::kHeadsAtOnce * C::kKept;
    sync_consumers<kThreads>();  // what stood there has been used
    take_latent_heads<C>(watch, args, b, layer, column, span.position, first);
    sync_consumers<kThreads>();
    Softmax mine = {-1e30f, 0};
    LatentSums<C> sums;
    LatentSums<C>::each([&](int i, int, int) {
        KIE_UNROLL for (int h = 0; h < 4; ++h) {
            KIE_UNROLL for (int j = 0; j < 4; ++j) sums.v[i][h][j] = 0;
        }
    });
    int page = first_page<C>(span, split, shift);
    KIE_NO_UNROLL for (int turn = 0; page <= span.last; ++turn, page += C::kSplitsMax) {
        const u8* rows = latent_row<C>(args, b.shared, layer, column, page, 0);
        const int to = min_i(span.position + 1 - page * kPage, kPage);
        float* scores = (float*)(b.shared + kShScores) + turn % 2 * (C::kHeadsAtOnce * kPage);
        float* keep = stats + turn % 2 * C::kHeadsAtOnce;
        score_latents<C>(rows, q, to, scores);
        sync_consumers<kThreads>();
        if (warp < C::kHeadsAtOnce) {
            const float factor = weigh_exact(mine, scores + warp * kPage);
            if (lane() == 0) keep[warp] = factor;
        }
        sync_consumers<kThreads>();
        add_latents<C>(sums, rows, scores, to, keep);
    }
    if (warp < C::kHeadsAtOnce && lane() == 0)
        stats[2 * C::kHeadsAtOnce + warp] = reciprocal_f(mine.exp_sum),
                                    stats[3 * C::kHeadsAtOnce + warp] =
                                        mine.best + log2_f(mine.exp_sum);
    sync_consumers<kThreads>();
    u64* to = args.ll_words + kAtPartial + buffer_of(layer, b.lane_index) * kVecPartial +
              ((long)split * kColumns + column) * C::kPartialWords;
    LatentSums<C>::each([&](int i, int head, int feature) {
        KIE_UNROLL for (int h = 0; h < 4; ++h) {
            if (first + head + h >= C::kHeads) continue;
            u64* line = to + (first + head + h) * C::kPartialHead + feature / 16 * kPartialLine;
            const float by = stats[2 * C::kHeadsAtOnce + head + h];
            const float* v = sums.v[i][h];
            KIE_UNROLL for (int j = 0; j < 4; j += 2)
                publish(line + (feature + j) % 16 / 2, C::kPartialWords,
                        halves_of(v[j] * by, v[j + 1] * by), b.seqno);
            if (feature % 16 == 0)
                publish(line + kPartialLse, bits(stats[3 * C::kHeadsAtOnce + head + h]), b.seqno);
        }
    });
}
template <class C>
KIE_DEVICE void attend_latents(Watch& watch, const DecodeArgs& args, const Block& b, int layer) {
    const int split = b.block_in_lane, warp = thread() / kTeam;
    if (split >= C::kSplitsMax) return;
    KIE_NO_UNROLL for (int c = warp; c < live_of(b); c += kWarps) {
        const int position = (int)position_at(args, b.step, c);
        if ((position / kPage + shift_at(args, c)) % C::kSplitsMax == split)
            store_latent<C>(watch, args, b, layer, c, position);
    }
    // Columns may be positions of one sequence; all meet before heads are taken.
    KIE_NO_UNROLL for (int c = 0; c < live_of(b); ++c) {
        const int shift = shift_at(args, c);
        const PageSpan span = pages_of(layer_of(b, layer), (int)position_at(args, b.step, c));
        if (first_page<C>(span, split, shift) > span.last) continue;
        KIE_NO_UNROLL for (int first = 0; first < C::kHeads; first += C::kHeadsAtOnce)
            attend_heads<C>(watch, args, b, layer, c, split, shift, first);
    }
}
// This block's share of what heads saw: partials combined. Neighbouring threads share a word, each
// takes some of its partials; which of them does not depend on the other columns.
template <class C>
KIE_DEVICE void combine_latents(Watch& watch, const DecodeArgs& args, const Block& b, int layer) {
    constexpr int kEach = C::kHeads * C::kRank / 2, kSharers = C::kCombineSharers,
                  kMost = (C::kSplitsMax + kSharers - 1) / kSharers, kWarpWords = kTeam / kSharers;
    const int warp = thread() / kTeam, my = thread() % kTeam, sharer = my % kSharers;
    const u32 where = layer << 4 | 2;
    const u64* partials = args.ll_words + kAtPartial + buffer_of(layer, b.lane_index) * kVecPartial;
    join_wave();  // some of them are this wave's
    KIE_NO_UNROLL for (int n = warp * kWarpWords; n < C::kCombineWords; n += kWarps * kWarpWords) {
        const int mine = n + my / kSharers, item = b.block_in_lane * C::kCombineWords + mine;
        const bool real = mine < C::kCombineWords && item / kEach < live_of(b);
        const int column = real ? item / kEach : 0, word = real ? item % kEach : 0;
        const PageSpan span = pages_of(layer_of(b, layer), (int)position_at(args, b.step, column));
        const int live = min_i(span.last - span.first + 1, C::kSplitsMax);
        const auto has = [&](int i) { return real && sharer + i * kSharers < live; };
        u64 m[kMost], a[kMost][kParts];
        watch.polls = 0;
        for (;;) {
            u32 late = 0;
            KIE_UNROLL for (int i = 0; i < kMost; ++i) {
                const int split =
                    (span.first + sharer + i * kSharers + shift_at(args, column)) % C::kSplitsMax;
                const u64* line = partials + (long)(split * kColumns + column) * C::kPartialWords +
                                  word / 8 * kPartialLine;
                m[i] = has(i) ? load_word(line + kPartialLse) : ll_word(0, b.seqno);
                KIE_UNROLL for (int part = 0; part < kParts; ++part) a[i][part] =
                    has(i) ? load_word(line + word % 8 + part * (C::kPartialWords / kParts))
                           : ll_word(0, b.seqno);
            }
            KIE_UNROLL for (int i = 0; i < kMost; ++i) {
                late |= seqno_of(m[i]) ^ b.seqno;
                KIE_UNROLL for (int part = 0; part < kParts; ++part) late |=
                    seqno_of(a[i][part]) ^ b.seqno;
            }
            if (late == 0 || kNoWaits || wait_expired(watch, where, b.seqno, b.seqno ^ late)) break;
            pause_ns(20);
        }
        sync_warp();
        float top = -1e30f, total = 0, x0 = 0, x1 = 0;
        KIE_UNROLL for (int i = 0; i < kMost; ++i) if (has(i)) top = max_f(top, number((u32)m[i]));
        KIE_UNROLL for (int k = 1; k < kSharers; k *= 2) top = max_f(top, shuffle_xor(top, k));
        KIE_UNROLL for (int i = 0; i < kMost; ++i) if (has(i)) {
            const float f = exp2_f(number((u32)m[i]) - top);
            float v0, v1;
            Halves its;
            KIE_UNROLL for (int part = 0; part < kParts; ++part) its.v[part] = (u32)a[i][part];
            numbers_of(its, v0, v1);
            total += f, x0 += f * v0, x1 += f * v1;
        }
        KIE_UNROLL for (int k = 1; k < kSharers; k *= 2) total += shuffle_xor(total, k),
            x0 += shuffle_xor(x0, k), x1 += shuffle_xor(x1, k);
        const float inverse = reciprocal_f(total);
        if (real && sharer == 0)
            publish(seen_words<C>(args, b, layer, column) + word, C::kWordsA,
                    halves_of(x0 * inverse, x1 * inverse), b.seqno);
    }
    join_wave();  // words of these are waited for by all
}

// All of it, up to the operand of the o product.
template <class C>
KIE_DEVICE void latent_attention(Ring& ring, Watch& watch, const DecodeArgs& args, Block& b,
                                 int layer) {
    {
        Prefetched<typename C::TilingQueryUp> prefetched;
        prefetch_weights<typename C::TilingQueryUp>(ring, prefetched);
        gather_query_latent<C>(watch, args, b, layer);
        step_queries<C>(ring, args, b, layer, prefetched);
    }
    step_absorb<C>(ring, watch, args, b, layer);
    attend_latents<C>(watch, args, b, layer);
    stamp(b, 3);
    combine_latents<C>(watch, args, b, layer);
    step_values<C>(ring, watch, args, b, layer);
}
template <class C>
KIE_DEVICE void gather_values(Watch& watch, const DecodeArgs& args, Block& b, int layer) {
    constexpr int kShare = C::kAttn / 2 / kWarps;
    const int from = (int)(thread() / kTeam) * kShare;
    sync_consumers<kThreads>();  // the vector before has been used
    Squares none;
    gather<kShare, false>(watch, seen_words<C>(args, b, layer, 0) + C::kAtValues + from, C::kWordsA,
                          b.seqno, layer << 4 | 4, live_of(b), nullptr,
                          (u32*)(b.shared + kShXb) + from, kStrideB / 2, none.v);
    stamp(b, 4);
}
