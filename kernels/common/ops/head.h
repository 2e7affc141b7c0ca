// The head: logits of this block's rows of the vocabulary, from the last layer's residual of one
// lane or of all of them.
#pragma once

#include "args.h"
#include "block.h"
#include "exchange.h"
#include "lowered.h"
#include "ops/gather.h"
#include "ops/matvec.h"
#include "ops/parts.h"
#include "ops/project.h"
#include "ops/residual.h"
#include "ops/sample.h"
#include "platform.h"
#include "ring.h"
#include "shape.h"

// The head's input where it combines lanes, this warp's share of it: a look at all lanes' streams
// for their sums of squares (or the squares of their sum), then another for the numbers.
KIE_DEVICE void gather_lanes(Watch& watch, const DecodeArgs& args, const Block& b) {
    constexpr int kShare = kHidden / 2 / kWarps;
    const int warp = thread() / kTeam, my = lane();
    const u32 seqno = b.seqno - 1;
    float* all = (float*)(b.shared + kShNorm);  // [kNormSets][kColumns][kWarps]
    const auto words_of = [&](int from, int c) {
        return args.ll_words + kAtLast + heard_lane(from) * kVecH + (long)c * kWordsH +
               warp * kShare;
    };
    KIE_NO_UNROLL for (int c = 0; c < live_of(b); ++c) {
        float sum = 0;
        KIE_NO_UNROLL for (int set = 0; set < kNormSets; ++set) {
            if (kHeadMode != kHeadSum) sum = 0;
            for (int i = my; i < kShare; i += kTeam) {
                float v0 = 0, v1 = 0;
                for (int l = kHeadMode == kHeadSum ? 0 : set;
                     l < (kHeadMode == kHeadSum ? kLanesAll : set + 1); ++l) {
                    float a, e;
                    numbers_of(
                        take_halves(watch, words_of(l, c) + i, kWordsH, seqno, of_rank(l) | 0xffe),
                        a, e);
                    v0 += a, v1 += e;
                }
                sum += v0 * v0 + v1 * v1;
            }
            KIE_UNROLL for (int m = 16; m > 0; m /= 2) sum += shuffle_xor(sum, m);
            if (my == 0) all[(set * kColumns + c) * kWarps + warp] = sum;
        }
    }
    sync_consumers<kThreads>();
    u32* x = (u32*)(b.shared + kShXa) + warp * kShare;
    KIE_NO_UNROLL for (int c = 0; c < live_of(b); ++c) {
        for (int i = my; i < kShare; i += kTeam) {
            float s0 = 0, s1 = 0;
            for (int l = 0; l < kLanesAll; ++l) {
                float v0, v1, n0, n1;
                numbers_of(
                    take_halves(watch, words_of(l, c) + i, kWordsH, seqno, of_rank(l) | 0xffe), v0,
                    v1);
                const int row = kFinalNorm + (kFinalNormLanes > 1 && kHeadMode != kHeadSum ? l : 0);
                norm_weights(args.norms + (long)row * (kParts * kHidden / 2), kHidden / 2,
                             warp * kShare + i, n0, n1);
                const float scale = kHeadMode == kHeadSum ? 1 : set_scale(b, l, c);
                v0 *= n0 * scale, v1 *= n1 * scale;
                if (kHeadMode == kHeadConcat)
                    put_halves(x, c, kStrideA, l * (kHidden / 2) + i, halves_of(v0, v1));
                s0 += v0, s1 += v1;
            }
            const float part = kHeadMode == kHeadMean ? 1.0f / kLanesAll : 1;
            if (kHeadMode != kHeadConcat)
                put_halves(x, c, kStrideA, i, halves_of(s0 * part, s1 * part));
        }
    }
    sync_consumers<kThreads>();
}
KIE_DEVICE float head_scale(const Block& b, int column) {
    return kHeadMode == kHeadMean || kHeadMode == kHeadConcat ? 1.0f : rms_scale(b, column);
}
template <class S>
KIE_DEVICE void step_head(const DecodeArgs& args, Block& b, Sums<S>& s, int row,
                          Candidate& candidate) {
    const int first = head_block(args, b) * kRowsHead;
    const u32 base = head_base(b);
    finish<S>(s, (float*)(b.shared + kShPartA),
              [&](int item, int pair, int column, float v0, float v1, bool live, bool leader) {
                  const float scale = head_scale(b, live ? column : 0);
                  const int local = first + row + 2 * pair;
                  if (!live || column >= live_of(b)) return;
                  const bool chooses = column < choosing_of(args, b);
                  const bool plain = chooses && is_plain(args.column[column], b.step);
                  float* raw = args.values + ((u64)column * 2 + 1) * kVocabAll + base;
                  KIE_UNROLL for (int i = 0; i < 2; ++i) {
                      const float v = (i ? v1 : v0) * scale;
                      const u32 id = base + local + i;
                      if (local + i >= kVocab || id >= (u32)kVocabAll) continue;
                      if (args.logits && leader)
                          args.logits[((long)b.step * kColumns + column) * kVocabAll + id] = v;
                      if (!plain) {
                          if (leader && chooses) raw[local + i] = v;
                      } else if (better(v, id, candidate.best, candidate.id) || !is_finite(v)) {
                          candidate.best = is_finite(v) ? v : infinity();
                          candidate.id = is_finite(v) ? id : kNotFinite;
                      }
                  }
              });
}

KIE_DEVICE void decode_head(Ring& ring, Watch& watch, const DecodeArgs& args, Block& b,
                            Candidate& candidate) {
    {
        Prefetched<TilingHead> prefetched;
        prefetch_weights<TilingHead>(ring, prefetched);
        if constexpr (kHeadMode == kHeadPerLane) {
            vector_free<TilingOwned>();
            // Of several residual streams what the head takes (ops/hyper.h).
            constexpr int kTaken = kHyperStreams > 1 ? 1 : 0;
            Squares squares = gather_normed(
                watch, args, b, hidden_slot(args, 1, kLayers - 1 + kTaken, b.lane_index), false,
                kFinalNorm + (kFinalNormLanes > 1 ? b.lane_all : 0), b.seqno - 1 + kTaken, 0xffe);
            stamp(b, 13);
            Sums<TilingHead> s = multiply_normed<TilingHead>(ring, prefetched, b, squares);
            step_head<TilingHead>(args, b, s, 0, candidate);
        } else {
            sync_consumers<kThreads>();  // the squares of the layer before have been read
            gather_lanes(watch, args, b);
            stamp(b, 13);
            Sums<TilingHead> s = multiply<TilingHead>(ring, prefetched, b.shared + kShXa, kStrideA);
            step_head<TilingHead>(args, b, s, 0, candidate);
        }
    }
    KIE_NO_UNROLL for (int p = 1; p < kHeadPasses; ++p) {
        if (TilingHead::k_warps > 1) sync_consumers<kThreads>();
        const int row = p * kHeadPassRows;
        Prefetched<TilingHead> prefetched;
        prefetch_weights<TilingHead>(ring, prefetched, row);
        Sums<TilingHead> s =
            multiply<TilingHead>(ring, prefetched, b.shared + kShXa, kStrideA, row);
        step_head<TilingHead>(args, b, s, row, candidate);
    }
    if constexpr (kHeadTail > 0) {
        if (TilingHead::k_warps > 1 || TilingTail::k_warps > 1) sync_consumers<kThreads>();
        constexpr int kRow = kHeadPasses * kHeadPassRows;
        Prefetched<TilingTail> prefetched;
        prefetch_weights<TilingTail>(ring, prefetched, kRow);
        Sums<TilingTail> s =
            multiply<TilingTail>(ring, prefetched, b.shared + kShXa, kStrideA, kRow);
        step_head<TilingTail>(args, b, s, kRow, candidate);
    }
}
