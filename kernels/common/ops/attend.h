// Attention of one position over its pages, split over the blocks of a lane.
//   partial = softmax(q k / sqrt(d)) v over the pages that a block owns, and log2 of its sum of
//   exponentials (flash-decoding's lse); partials are combined at the end (attend_combine.h).
// Here a page comes by plain loads into the registers of all warps, which is soonest for one page;
// kernels for contexts of several pages a block have them in the ring (attend_ring.h), with the
// same bits where there is one. q carries 1 / sqrt(d) and log2 e (kQueryScale). Traffic: 2 *
// positions * head_dim * 2 bytes a kv head.
#pragma once

#include "args.h"
#include "block.h"
#include "exchange.h"
#include "lowered.h"
#include "ops/gather.h"
#include "pages.h"
#include "platform.h"
#include "shape.h"
#include "tile.h"

constexpr int kScoreWarps = 4, kValueWarps = kWarps - kScoreWarps;

// What a warp holds of a page: 16 keys, or 16 (32) features of 64 values.
template <class C>
struct KvFragment {
    Quad v[C::kKvQuads];
};
// Before what only some threads fill: otherwise the compiler keeps the registers from the last use
// on, through everything in between.
template <class C>
KIE_DEVICE void clear(KvFragment<C>& h) {
    KIE_UNROLL for (int i = 0; i < C::kKvQuads; ++i) h.v[i] = {{0, 0, 0, 0}};
}
template <class C>
KIE_DEVICE void load_kv(KvFragment<C>& h, const u8* page) {
    const int me = thread(), warp = me / kTeam, g = me % kTeam / 4, t = me % 4;
    if (warp < kScoreWarps) {
        KIE_UNROLL for (int j = 0; j < C::kHeadDim / 32; ++j) {
            KIE_UNROLL for (int r = 0; r < 2; ++r) h.v[2 * j + r] =
                load_state(page + ((16 * warp + g + 8 * r) * C::kHeadDim + 32 * j + 8 * t) * 2);
        }
    } else {
        KIE_UNROLL for (int i = 0; i < C::kValueTiles; ++i) {
            const int tile = warp - kScoreWarps + i * kValueWarps;
            if (tile < C::kHeadDim / 16) KIE_UNROLL for (int j = 0; j < 2; ++j) {
                    KIE_UNROLL for (int r = 0; r < 2; ++r) h.v[4 * i + 2 * j + r] =
                        load_state(page + C::kPageHalf +
                                   ((16 * tile + 2 * g + r) * kPage + 32 * j + 8 * t) * 2);
                }
        }
    }
}
template <class C>
KIE_DEVICE void load_kv_next(KvFragment<C>& h, const u8* page, bool newest, int position) {
    if (newest) without_newest<C>(page, position);
    load_kv<C>(h, page);
}
// `two` with its half number `which` (0 or 1; any other: none) replaced. Masks, because a choice of
// registers by index would put them into memory.
KIE_DEVICE u32 with_half(u32 two, int which, u32 half) {
    const u32 mask = which == 0 ? 0xffffu : which == 1 ? 0xffff0000u : 0u;
    return (two & ~mask) | ((half * 0x10001u) & mask);
}

// The current position's value into the features that a warp holds.
template <class C>
KIE_DEVICE void put_value(KvFragment<C>& h, const u16* value, int slot) {
    const int me = thread(), warp = me / kTeam, g = me % kTeam / 4, t = me % 4;
    KIE_UNROLL for (int i = 0; i < C::kValueTiles; ++i) {
        const int tile = warp - kScoreWarps + i * kValueWarps;
        if (tile >= C::kHeadDim / 16) continue;
        const u32 a = value[16 * tile + 2 * g], b = value[16 * tile + 2 * g + 1];
        KIE_UNROLL for (int j = 0; j < 2; ++j) {
            KIE_UNROLL for (int e = 0; e < 4; ++e) {
                const int which = slot - 32 * j - 8 * t - 2 * e;
                Quad &r0 = h.v[4 * i + 2 * j], &r1 = h.v[4 * i + 2 * j + 1];
                r0.v[e] = with_half(r0.v[e], which, a), r1.v[e] = with_half(r1.v[e], which, b);
            }
        }
    }
}

// One column in one layer.
struct AttendAt {
    int layer, lane_index, kv_head, split, column, shift;
};

// The query heads' words, then the key's, then the value's: where word `n` of them stands.
template <class C>
KIE_DEVICE const u64* head_word(const DecodeArgs& args, const AttendAt& at, int n) {
    const long buffer = buffer_of(at.layer, at.lane_index);
    const int j = n < C::kQWords ? at.kv_head * C::kQWords + n
                  : n < C::kQWords + C::kHalfHead
                      ? C::kAttn / 2 + at.kv_head * C::kHalfHead + n - C::kQWords
                      : (C::kAttn + C::kKvHeads * C::kHeadDim) / 2 + at.kv_head * C::kHalfHead + n -
                            C::kQWords - C::kHalfHead;
    return args.ll_words + kAtQkv + buffer * kVecQ + (long)at.column * C::kWordsQ + j;
}
// Two features of a head in shared memory: halves, or floats.
KIE_DEVICE void unpack_pair(u32 both, float& a, float& b) { unpack_half2(both, a, b); }
KIE_DEVICE void unpack_pair(u64 both, float& a, float& b) {
    a = number((u32)both), b = number((u32)(both >> 32));
}
template <class Pair>
KIE_DEVICE Pair pack_pair(float a, float b) {
    if constexpr (sizeof(Pair) == 4)
        return pack_half2(a, b);
    else
        return (u64)bits(b) << 32 | bits(a);
}
// Where norms are over all heads (kNormAllHeads): each column's squares of q, then of k, summed by
// every block for itself, of all words. They stand behind the residual's, a sum a warp, and are
// read behind the barrier that heads are taken with.
template <class C>
KIE_DEVICE void square_heads(Watch& watch, const DecodeArgs& args, const Block& b, int layer) {
    constexpr int kQuery = C::kAttn / 2, kWords = kQuery + C::kKvHeads * C::kHalfHead;
    constexpr int kEach = (kWords + kThreads - 1) / kThreads;
    const int me = thread();
    const u32 where = layer << 4 | 1;
    KIE_NO_UNROLL for (int c = 0; c < live_of(b); ++c) {
        const u64* from =
            args.ll_words + kAtQkv + buffer_of(layer, b.lane_index) * kVecQ + (long)c * C::kWordsQ;
        const auto word = [&](int i, int part) {
            return from + i * kThreads + me + part * (C::kWordsQ / kParts);
        };
        await_one(watch, from + block() * 10 % kWords, b.seqno, where, 0);
        u64 v[kEach][kParts];  // on their way at once
        KIE_UNROLL for (int i = 0; i < kEach; ++i) {
            KIE_UNROLL for (int part = 0; part < kParts; ++part) v[i][part] =
                i * kThreads + me < kWords ? load_word(word(i, part)) : ll_word(0, b.seqno);
        }
        float sums[2] = {0, 0};
        KIE_UNROLL for (int i = 0; i < kEach; ++i) {
            Halves h;
            KIE_UNROLL for (int part = 0; part < kParts; ++part) {
                watch.polls = 0;
                while (!kNoWaits && seqno_of(v[i][part]) != b.seqno &&
                       !wait_expired(watch, where, b.seqno, seqno_of(v[i][part])))
                    v[i][part] = load_word(word(i, part));
                h.v[part] = (u32)v[i][part];
            }
            float v0, v1;
            numbers_of(h, v0, v1);
            const float square = v0 * v0 + v1 * v1;
            if (i * kThreads + me < kQuery)
                sums[0] += square;
            else
                sums[1] += square;
        }
        sync_warp();
        KIE_UNROLL for (int which = 0; which < 2; ++which) {
            KIE_UNROLL for (int m = 16; m > 0; m /= 2) sums[which] += shuffle_xor(sums[which], m);
            if (me % kTeam == 0)
                ((float*)(b.shared + kShNorm))[((1 + which) * kColumns + c) * kWarps + me / kTeam] =
                    sums[which];
        }
    }
}
// Norms and turns head `head` of those taken (the key comes last), a warp a head. Only where heads
// have norms: otherwise their producer has rotated them.
template <class C, class Pair>
KIE_DEVICE void norm_head(const DecodeArgs& args, const u8* shared, const AttendAt& at,
                          int position, int head, Pair* heads) {
    const int my = lane();
    constexpr int kEach = (C::kHalfHead + kTeam - 1) / kTeam;
    const bool is_key = head == C::kGroup;
    Pair* x = heads + head * C::kHalfHead;
    int row = is_key;  // of the weights
    if constexpr (C::kNormAllHeads)
        row = is_key ? C::kHeads + at.kv_head : at.kv_head * C::kGroup + head;
    const u32* weights = args.head_norms +
                         ((const Layer*)(shared + kShLayers))[at.layer].head_norms +
                         row * (kParts * C::kHalfHead);
    float v[kEach][2], sum = 0;
    KIE_UNROLL for (int i = 0; i < kEach; ++i) {
        const int n = i * kTeam + my;
        unpack_pair(n < C::kHalfHead ? x[n] : 0, v[i][0], v[i][1]);
        sum += v[i][0] * v[i][0] + v[i][1] * v[i][1];
    }
    float by = 1.0f / C::kHeadDimReal;
    if constexpr (C::kNormAllHeads) {
        const float* sums =
            (const float*)(shared + kShNorm) + ((1 + is_key) * kColumns + at.column) * kWarps;
        sum = 0;
        KIE_UNROLL for (int i = 0; i < kWarps; ++i) sum += sums[i];
        by *= is_key ? 1.0f / C::kKvHeads : 1.0f / C::kHeads;
    } else {
        KIE_UNROLL for (int m = 16; m > 0; m /= 2) sum += shuffle_xor(sum, m);
    }
    const float scale = rsqrt_f(sum * by + kEps);
    const float keep = is_key ? 1.0f : C::kQueryScale;
    KIE_UNROLL for (int i = 0; i < kEach; ++i) {
        const int n = i * kTeam + my;
        if (n >= C::kHalfHead) continue;
        float n0, n1;
        norm_weights(weights, C::kHalfHead, n, n0, n1);
        const float* r = args.rope + C::kRope + ((long)position * C::kHalfHead + n) * 2;
        const float a = v[i][0] * scale * n0, b = v[i][1] * scale * n1;
        x[n] = pack_pair<Pair>((a * r[0] - b * r[1]) * keep, (a * r[1] + b * r[0]) * keep);
    }
}

// Takes the query heads and, where this split owns the newest page, the new key and value into
// shared memory.
template <class C>
KIE_DEVICE void take_heads(Watch& watch, const DecodeArgs& args, const AttendAt& at,
                           const PageSpan& span, u32 seqno, bool fresh, u8* shared) {
    const int me = thread();
    u32* q_sh = (u32*)(shared + kShQkv);
    constexpr int kEach = (C::kTake + kThreads - 1) / kThreads;
    const auto wanted = [&](int n) { return n < C::kQWords || (fresh && n < C::kTake); };
    u64 v[kEach];  // on their way at once
    KIE_UNROLL for (int i = 0; i < kEach; ++i) {
        const int n = i * kThreads + me;
        v[i] = wanted(n) ? load_word(head_word<C>(args, at, n)) : 0;
    }
    KIE_UNROLL for (int i = 0; i < kEach; ++i) {
        const int n = i * kThreads + me;
        if (!wanted(n)) continue;
        watch.polls = 0;
        while (!kNoWaits && seqno_of(v[i]) != seqno &&
               !wait_expired(watch, at.layer << 4 | 1, seqno, seqno_of(v[i])))
            v[i] = load_word(head_word<C>(args, at, n));
        q_sh[n] = (u32)v[i];
    }
    if constexpr (C::kHeadNorm) {
        sync_consumers<kThreads>();
        for (int head = me / kTeam; head < C::kGroup + (fresh ? 1 : 0); head += kWarps)
            norm_head<C>(args, shared, at, span.position, head, q_sh);
    }
}
// The newest key and value, which were taken, into their page for later steps: behind a barrier,
// and when this step's partial is out.
template <class C>
KIE_DEVICE void keep_newest(const DecodeArgs& args, const PageSpan& span, const Pages& pages,
                            const u8* shared) {
    const u32* q_sh = (const u32*)(shared + kShQkv);
    u8* page = page_at<C>(args, shared, pages, span.last);
    for (int n = C::kQWords + (int)thread(); n < C::kTake; n += kThreads) {
        if (n < C::kQWords + C::kHalfHead)
            store_key<C>(page, span.position % kPage, n - C::kQWords, q_sh[n]);
        else
            store_value<C>(page, span.position % kPage, n - C::kQWords - C::kHalfHead, q_sh[n]);
    }
}
// With several columns: the new keys and values of all of them that land in pages of this split,
// before anybody attends, since columns may be positions of one sequence.
template <class C>
KIE_DEVICE void store_new(Watch& watch, const DecodeArgs& args, const AttendAt& at, int position,
                          const Pages& pages, u32 seqno, u8* shared) {
    const int me = thread(), slot = position % kPage;
    u32* q_sh = (u32*)(shared + kShQkv);
    u8* page = page_at<C>(args, shared, pages, position / kPage);
    for (int n = me; n < 2 * C::kHalfHead; n += kThreads) {
        const u32 v =
            take_word(watch, head_word<C>(args, at, C::kQWords + n), seqno, at.layer << 4 | 1);
        if (n >= C::kHalfHead)
            store_value<C>(page, slot, n - C::kHalfHead, v);
        else if (C::kHeadNorm)
            q_sh[C::kQWords + n] = v;
        else
            store_key<C>(page, slot, n, v);
    }
    if constexpr (C::kHeadNorm) {
        sync_consumers<kThreads>();
        if (me / kTeam == 0) {
            norm_head<C>(args, shared, at, position, C::kGroup, q_sh);
            sync_warp();
            for (int n = me; n < C::kHalfHead; n += kTeam)
                store_key<C>(page, slot, n, q_sh[C::kQWords + n]);
        }
        sync_consumers<kThreads>();
    }
}

// Where this block's partial of a kv head goes: the line of its first head's first
// features.
template <class C>
KIE_DEVICE u64* partial_at(const DecodeArgs& args, const AttendAt& at) {
    const long buffer = buffer_of(at.layer, at.lane_index);
    const long lot = (long)at.split * kColumns + at.column;
    return args.ll_words + kAtPartial + buffer * kVecPartial + lot * C::kPartialWords +
           at.kv_head * C::kGroup * C::kPartialHead;
}
// A tile's 16 features of each head; `i0` and `i1` turn the sums of this thread's heads into means.
template <class C>
KIE_DEVICE void publish_features(u64* line, const float (&sums)[4], float i0, float i1, u32 seqno) {
    const int g = thread() % kTeam / 4, t = thread() % 4;
    if (2 * t < C::kGroup)
        publish(line + 2 * t * C::kPartialHead + g, pack_half2(sums[0] * i0, sums[2] * i0), seqno);
    if (2 * t + 1 < C::kGroup)
        publish(line + (2 * t + 1) * C::kPartialHead + g, pack_half2(sums[1] * i1, sums[3] * i1),
                seqno);
}

template <class C>
KIE_DEVICE void attend(Watch& watch, const DecodeArgs& args, const Layer& layer, const AttendAt& at,
                       const PageSpan& span, u32 seqno, KvFragment<C>& kv, int page, u8* shared) {
    const int me = thread(), warp = me / kTeam, g = me % kTeam / 4, t = me % 4;
    u32* q_sh = (u32*)(shared + kShQkv);
    float* scores = (float*)(shared + kShScores);
    const int kv_index = at.lane_index * C::kKvHeads + at.kv_head, slot = span.position % kPage;
    const Pages pages = {at.layer, kv_index, at.column};
    // With one column the newest key and value are used from the words' copy, not from the page.
    const bool fresh = kColumns == 1 && (span.last + at.shift) % C::kSplitsMax == at.split;
    take_heads<C>(watch, args, at, span, seqno, fresh, shared);
    sync_consumers<kThreads>();
    float best = -1e30f, exp_sum = 0, sums[C::kValueTiles][4];
    KIE_UNROLL for (int i = 0; i < C::kValueTiles; ++i) {
        KIE_UNROLL for (int j = 0; j < 4; ++j) sums[i][j] = 0;
    }
    const u8* q_bytes = (const u8*)q_sh;
    const u8* k_new = q_bytes + C::kGroup * C::kHeadDim * 2;
    const u16* v_new = (const u16*)(k_new + C::kHeadDim * 2);
    const int lowest = layer.window > 0 ? span.position - (int)layer.window : -1;
    KIE_NO_UNROLL for (int turn = 0; page <= span.last; ++turn, page += C::kSplitsMax) {
        const bool here = fresh && page == span.last;
        float* sc = scores + (turn & 1) * (C::kGroup * kPage);
        if (warp < kScoreWarps) {
            float d[4] = {0, 0, 0, 0};
            KIE_UNROLL for (int j = 0; j < C::kHeadDim / 32; ++j) {
                const Quad b =
                    *(const Quad*)(q_bytes + ((g % C::kGroup) * C::kHeadDim + 32 * j + 8 * t) * 2);
                Quad r0 = kv.v[2 * j], r1 = kv.v[2 * j + 1];
                if (here && 16 * warp + g == slot)
                    r0 = *(const Quad*)(k_new + (32 * j + 8 * t) * 2);
                if (here && 16 * warp + g + 8 == slot)
                    r1 = *(const Quad*)(k_new + (32 * j + 8 * t) * 2);
                mma(d, r0.v[0], r1.v[0], r0.v[1], r1.v[1], b.v[0], b.v[1]);
                mma(d, r0.v[2], r1.v[2], r0.v[3], r1.v[3], b.v[2], b.v[3]);
            }
            KIE_UNROLL for (int i = 0; i < 4; ++i) {
                const int head = 2 * t + (i & 1), row = 16 * warp + g + (i & 2) * 4,
                          position = page * kPage + row;
                if (head < C::kGroup)
                    sc[head * kPage + row] =
                        position <= span.position && position > lowest ? d[i] : -1e30f;
            }
            if (page + C::kSplitsMax <= span.last)
                load_kv_next<C>(kv, page_at<C>(args, shared, pages, page + C::kSplitsMax),
                                fresh && page + C::kSplitsMax == span.last, span.position);
        } else if (here) {
            put_value<C>(kv, v_new, slot);  // while the scores are being made
        }
        sync_consumers<kThreads>();
        if (warp >= kScoreWarps) {
            float s[16], top = -1e30f, sum = 0, odd = 0;
            u32 p[8];
            KIE_UNROLL for (int j = 0; j < 4; ++j) {
                const Quad f = *(const Quad*)(sc + (g % C::kGroup) * kPage + (j / 2) * 32 + 8 * t +
                                              (j & 1) * 4);
                KIE_UNROLL for (int i = 0; i < 4; ++i) s[4 * j + i] = number(f.v[i]),
                                                                 top = max_f(top, s[4 * j + i]);
            }
            top = max_f(top, shuffle_xor(top, 1)), top = max_f(top, shuffle_xor(top, 2));
            top = max_f(top, best);
            const float keep = exp2_f(best - top);
            KIE_UNROLL for (int i = 0; i < 8; ++i) {
                s[2 * i] = exp2_f(s[2 * i] - top), s[2 * i + 1] = exp2_f(s[2 * i + 1] - top);
                sum += s[2 * i], odd += s[2 * i + 1];  // in the order of attend_ring.h
                p[i] = pack_half2(s[2 * i], s[2 * i + 1]);
            }
            sum += odd, sum += shuffle_xor(sum, 1), sum += shuffle_xor(sum, 2);
            exp_sum = exp_sum * keep + sum, best = top;
            const float k0 = shuffle(keep, 8 * t), k1 = shuffle(keep, 8 * t + 4);
            KIE_UNROLL for (int i = 0; i < C::kValueTiles; ++i) {
                const int tile = warp - kScoreWarps + i * kValueWarps;
                if (tile >= C::kHeadDim / 16) continue;
                sums[i][0] *= k0, sums[i][1] *= k1, sums[i][2] *= k0, sums[i][3] *= k1;
                KIE_UNROLL for (int j = 0; j < 2; ++j) {
                    const Quad &r0 = kv.v[4 * i + 2 * j], &r1 = kv.v[4 * i + 2 * j + 1];
                    mma(sums[i], r0.v[0], r1.v[0], r0.v[1], r1.v[1], p[4 * j], p[4 * j + 1]);
                    mma(sums[i], r0.v[2], r1.v[2], r0.v[3], r1.v[3], p[4 * j + 2], p[4 * j + 3]);
                }
            }
            if (page + C::kSplitsMax <= span.last)
                load_kv_next<C>(kv, page_at<C>(args, shared, pages, page + C::kSplitsMax),
                                fresh && page + C::kSplitsMax == span.last, span.position);
        }
    }
    if (warp >= kScoreWarps) {
        const float inverse = reciprocal_f(exp_sum);
        const float i0 = shuffle(inverse, 8 * t), i1 = shuffle(inverse, 8 * t + 4);
        u64* to = partial_at<C>(args, at);
        KIE_UNROLL for (int i = 0; i < C::kValueTiles; ++i) {
            const int tile = warp - kScoreWarps + i * kValueWarps;
            if (tile >= C::kHeadDim / 16) continue;
            u64* line = to + tile * kPartialLine;
            publish_features<C>(line, sums[i], i0, i1, seqno);
            if (t == 0 && g < C::kGroup)
                publish(line + g * C::kPartialHead + kPartialLse, bits(best + log2_f(exp_sum)),
                        seqno);
        }
    }
    if (fresh) keep_newest<C>(args, span, pages, shared);
}

// The first page of the only column, asked for while the layer's input is waited for: who attends
// has its share of queries, keys and values to compute, too, and everybody waits for those.
template <class C>
KIE_DEVICE void early_page(const DecodeArgs& args, const Block& b, int layer, KvFragment<C>& kv) {
    if (kVectors > 1 || kStreamed) return;
    clear<C>(kv);
    const int kv_head = b.block_in_lane / C::kSplitBlocks,
              split = b.block_in_lane % C::kSplitBlocks;
    const Layer& l = layer_of(b, layer);
    const PageSpan span = pages_of(l, (int)position_at(args, b.shared, b.step, 0));
    const int page = first_page<C>(span, split, 0);
    if (split < C::kSplitsMax && kv_head < C::kKvHeads && page <= span.last)
        load_kv_next<C>(
            kv, page_at<C>(args, b.shared, {layer, b.lane_index * C::kKvHeads + kv_head, 0}, page),
            page == span.last, span.position);
}

// The new keys and values of columns from `first` on, all before anybody attends.
template <class C>
KIE_DEVICE void store_columns(Watch& watch, const DecodeArgs& args, const Block& b, int layer,
                              int first) {
    const int kv_head = b.block_in_lane / C::kSplitBlocks,
              split = b.block_in_lane % C::kSplitBlocks;
    const int kv_index = b.lane_index * C::kKvHeads + kv_head;
    KIE_NO_UNROLL for (int c = first; c < live_of(b); ++c) {
        const int position = position_at(args, b.shared, b.step, c),
                  shift = shift_at(args, b.shared, c);
        if ((position / kPage + shift) % C::kSplitsMax != split) continue;
        const AttendAt at = {layer, b.lane_index, kv_head, split, c, shift};
        const Pages pages = {layer, kv_index, c};
        store_new<C>(watch, args, at, position, pages, b.seqno, b.shared);
    }
    sync_consumers<kThreads>();
}
// Attention of this block's share of pages, for each column from `first` on.
template <class C>
KIE_DEVICE void attend_columns(Watch& watch, const DecodeArgs& args, Block& b, int layer, int first,
                               KvFragment<C>& kv) {
    const int kv_head = b.block_in_lane / C::kSplitBlocks,
              split = b.block_in_lane % C::kSplitBlocks;
    const Layer& l = layer_of(b, layer);
    bool any = false;
    if (kColumns > 1) clear<C>(kv);
    if (split >= C::kSplitsMax || kv_head >= C::kKvHeads) return;
    const int kv_index = b.lane_index * C::kKvHeads + kv_head;
    if constexpr (kColumns > 1) store_columns<C>(watch, args, b, layer, first);
    KIE_NO_UNROLL for (int c = first; c < live_of(b); ++c) {
        const int shift = shift_at(args, b.shared, c);
        const PageSpan span = pages_of(l, (int)position_at(args, b.shared, b.step, c));
        const int page = first_page<C>(span, split, shift);
        if (page > span.last) continue;
        if (kColumns > 1) {
            if (any) sync_consumers<kThreads>();
            load_kv<C>(kv, page_at<C>(args, b.shared, {layer, kv_index, c}, page));
        }
        any = true;
        attend<C>(watch, args, l, {layer, b.lane_index, kv_head, split, c, shift}, span, b.seqno,
                  kv, page, b.shared);
    }
}
