// Attention over latents (DeepSeek-V2, arXiv 2405.04434), absorbed: heads share one latent and one
// turned key a position, which pages keep; heads' keys and values are never made.
//   c, r, q = down x   normed but for r   (ranks share the rows, each is told of all)
//   [p, t] = up q, a = K^T p   of each head: what meets the latent c; t, turned, meets r
//   partial = softmax(s (a c + t r)) c   over a block's positions (ops/latent_attend.h); combined
//   by owners value = V partial   of each head, the operand of the o product
#pragma once

#include "args.h"
#include "block.h"
#include "chiplets.h"
#include "exchange.h"
#include "lowered.h"
#include "ops/gather.h"
#include "ops/latent_attend.h"
#include "ops/latent_words.h"
#include "ops/matvec.h"
#include "ops/parts.h"
#include "ops/project.h"
#include "ops/residual.h"
#include "pages.h"
#include "platform.h"
#include "ring.h"
#include "shape.h"

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
    float scales[kEach][2];  // asked for before the wait, not after it
    KIE_UNROLL for (int i = 0; i < kEach; ++i) {
        const int n = min_i(i * kThreads + me, kWords - 1);
        scales[i][0] = norm[2 * n], scales[i][1] = norm[2 * n + 1];
    }
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
                       halves_of(v0 * scales[i][0], v1 * scales[i][1]));
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
    Sums<S> s = multiply<S>(ring, prefetched, b.shared + kShXb, kStrideB);
    finish<S>(s, (float*)(b.shared + kShPartA),
              [&](int, int pair, int column, float v0, float v1, bool live, bool leader) {
                  const float scale = query_latent_scale<C>(b, live ? column : 0);
                  const int at = b.block_in_lane * (S::rows / 2) + pair;
                  if (live && leader && column < live_of(b) && at < C::kWordsQueries)
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
            // One sum: what two would give here has not been measured.
            KIE_UNROLL for (int n = 0; n < kScaleRuns<S>; ++n)
                add_tile_run<S, false>(s.v[i], f, i, column, n);
        }
    }
    return s;
}
// The vectors of the heads of which this block has rows, `kWords` words of each, `step` words from
// one to the next: into shared memory, where the vector before has been used.
template <class C, class S, int kOfHead, int kMost, int kWords, int kHeads = C::kHeads>
KIE_DEVICE void gather_heads(Watch& watch, Block& b, const u64* from, long column_words, int step,
                             u32 where) {
    constexpr int kAll = kMost * kWords, kEach = (kAll + kThreads - 1) / kThreads;
    const int me = thread(), head = b.block_in_lane * S::rows / kOfHead;
    sync_consumers<kThreads>();
    KIE_NO_UNROLL for (int c = 0; c < live_of(b); ++c) {
        Halves v[kEach];
        take_each(watch, v, column_words, b.seqno, where, [&](int i) -> const u64* {
            const int n = i * kThreads + me, its = head + n / kWords;
            if (n >= kAll || its >= kHeads) return nullptr;
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
        const int units = units_of((int)position_at(args, b.shared, b.step, column)),
                  live = min_i(units, C::kSplitsMax), shift = shift_at(args, b.shared, column);
        const auto has = [&](int i) { return real && sharer + i * kSharers < live; };
        u64 m[kMost], a[kMost][kParts];
        watch.polls = 0;
        for (;;) {
            u32 late = 0;
            KIE_UNROLL for (int i = 0; i < kMost; ++i) {
                const int split = split_of_unit<C>(sharer + i * kSharers, shift);
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
