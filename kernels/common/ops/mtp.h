// A layer that predicts the token behind the next one (multi-token prediction), in a kernel of its
// own beside a model's: what it takes in, and which columns a step has.
//   taken in = W [norm(embedding of the token behind); norm(end(residual))]
// `end`: the norm behind the model's last layer; in later steps the one behind this layer.
// The first step's columns are those of the model's last launch whose next tokens are known, each
// sequence's own, then the ones behind it (`given`). What is predicted behind the last of them is
// the next step's token, a position later, for as many steps as there are tokens `wanted`;
// sequences that want more stand first.
// Traffic: the product's weights, and of each column and block its residual and an embedding.
#pragma once

#include "args.h"
#include "block.h"
#include "exchange.h"
#include "lowered.h"
#include "ops/drafts.h"
#include "ops/gather.h"
#include "ops/matvec.h"
#include "ops/parts.h"
#include "ops/residual.h"
#include "ops/sample.h"
#include "platform.h"
#include "ring.h"
#include "shape.h"

static_assert(!kMtp || (kLookup && kLayers == 1 && kNumBuffers == 2 && kNormSets >= 3),
              "lower/read.rs, lower/layout.rs");

// The residual's words that a column goes on from, and how many it has: nobody writes them in this
// launch, or before all have passed this step's first exchange.
struct ResidualBefore {
    const u64* words;
    long count;
};
KIE_DEVICE ResidualBefore residual_before(const DecodeArgs& args, const Block& b, int column) {
    const long count = (long)args.before_words;
    if (b.step == 0) return {args.before + args.before_column[column] * count, count};
    const int kept = (int)drafts_of(b).sequence[column].kept;
    return {hidden_slot(args, 1, kLayers - 1, b.lane_index) + (long)kept * kWordsH, kWordsH};
}
// Where it tells what it took in, as the layer before would.
KIE_DEVICE u64* taken_in(const DecodeArgs& args, const Block& b) {
    return hidden_slot(args, 1, kLayers, b.lane_index);
}
// Two numbers of both halves of what a column takes in, without norms.
struct TakenIn {
    float embedding[2], residual[2], end[2];
};
KIE_DEVICE TakenIn take_in(const DecodeArgs& args, const Block& b, const ResidualBefore& before,
                           int column, int at) {
    TakenIn v;
    unpack_half2(args.embed[(long)tokens_of(b)[column] * (kHidden / 2) + at], v.embedding[0],
                 v.embedding[1]);
    Halves h;
    KIE_UNROLL for (int part = 0; part < kParts; ++part) h.v[part] =
        (u32)load_word(before.words + part * (before.count / kParts) + at);
    numbers_of(h, v.residual[0], v.residual[1]);
    const int row = kFinalNorm + (b.step == 0 ? 3 : 0);  // lower/model.rs, norms
    norm_weights(args.norms + (long)row * (kParts * kHidden / 2), kHidden / 2, at, v.end[0],
                 v.end[1]);
    return v;
}
// This warp's share of all columns' vectors into shared memory, normed.
KIE_DEVICE void take_in_columns(const DecodeArgs& args, const Block& b) {
    constexpr int kShare = kHidden / 2 / kWarps;
    const int warp = thread() / kTeam, first = warp * kShare;
    float* sums = (float*)(b.shared + kShNorm);  // [kNormSets][kColumns][kWarps]
    KIE_NO_UNROLL for (int c = 0; c < live_of(b); ++c) {
        const ResidualBefore before = residual_before(args, b, c);
        float s[3] = {0, 0, 0};
        for (int i = lane(); i < kShare; i += kTeam) {
            const TakenIn v = take_in(args, b, before, c, first + i);
            KIE_UNROLL for (int n = 0; n < 2; ++n) {
                const float ended = v.residual[n] * v.end[n];
                s[0] += v.embedding[n] * v.embedding[n], s[1] += v.residual[n] * v.residual[n];
                s[2] += ended * ended;
            }
        }
        KIE_UNROLL for (int set = 0; set < 3; ++set) {
            KIE_UNROLL for (int m = kTeam / 2; m > 0; m /= 2) s[set] += shuffle_xor(s[set], m);
            if (lane() == 0) sums[(set * kColumns + c) * kWarps + warp] = s[set];
        }
    }
    sync_consumers<kThreads>();
    const u32* norms = args.norms + (long)(kFinalNorm + 1) * (kParts * kHidden / 2);
    u32* x = (u32*)(b.shared + kShXa);
    KIE_NO_UNROLL for (int c = 0; c < live_of(b); ++c) {
        const ResidualBefore before = residual_before(args, b, c);
        const float end = set_scale(b, 1, c);
        float mass = 0;
        KIE_UNROLL for (int i = 0; i < kWarps; ++i) mass += sums[(2 * kColumns + c) * kWarps + i];
        const float scale[2] = {set_scale(b, 0, c),
                                end * rsqrt_f(mass * end * end * (1.0f / kHiddenReal) + kEps)};
        for (int i = lane(); i < kShare; i += kTeam) {
            const int at = first + i;
            const TakenIn v = take_in(args, b, before, c, at);
            float n0, n1;
            norm_weights(norms, kHidden / 2, at, n0, n1);
            put_halves(x, c, kStrideA, at,
                       halves_of(v.embedding[0] * n0 * scale[0], v.embedding[1] * n1 * scale[0]));
            norm_weights(norms + kParts * kHidden / 2, kHidden / 2, at, n0, n1);
            put_halves(x, c, kStrideA, kHidden / 2 + at,
                       halves_of(v.residual[0] * v.end[0] * n0 * scale[1],
                                 v.residual[1] * v.end[1] * n1 * scale[1]));
        }
    }
    sync_consumers<kThreads>();
}
// The block's rows of what its columns take in: its own of the residual, which it tells all.
template <class C>
KIE_DEVICE void step_mtp_in(Ring& ring, const DecodeArgs& args, Block& b, Owned& own) {
    using S = typename C::TilingMtpIn;
    Prefetched<S> prefetched;
    prefetch_weights<S>(ring, prefetched);
    take_in_columns(args, b);
    Sums<S> s = multiply<S>(ring, prefetched, b.shared + kShXa, kStrideA);
    u64* to = taken_in(args, b) + b.block_in_lane * (kRowsO / 2);
    finish<S>(s, (float*)(b.shared + kShPartB),
              [&](int item, int pair, int column, float v0, float v1, bool live, bool leader) {
                  scale_output(v0, v1);
                  own.v[item][0] = v0, own.v[item][1] = v1;
                  if (!live || !leader || column >= live_of(b)) return;
                  publish(to + (long)column * kWordsH + pair, kWordsH, halves_of(v0, v1),
                          b.seqno - 1);
              });
    // The next vector comes where this one stands.
    if (S::k_warps == 1) sync_consumers<kThreads>();
}

// Sequences of the next step: all of the first one, then those that want a further token.
KIE_DEVICE int predicting(const DecodeArgs& args, const Block& b) {
    int count = (int)args.live;
    if (drafts_of(b).sequence[0].made == 0) return count;
    while (count > 0 && args.drafting[count - 1].wanted <= b.step + 1) --count;
    return count;
}
// What a step predicted of a sequence; one thread. It ends nothing.
KIE_DEVICE void accept_predicted(const DecodeArgs& args, const Block& b, int s) {
    Drafter& d = drafts_of(b).sequence[s];
    ends_of(b)[s] = 0;
    if (b.step > 0 && s >= b.live) return;
    const u32 known = d.made == 0 ? args.drafting[s].given : 0;
    d.kept = known == 0 ? s : d.first + known - 1;
    const u32 id = picked_of(b)[d.kept].id;
    if (args.predicts != 0) tell(args, b, args.column[s], b.step, id, 0);
    tokens_of(b)[s] = id < (u32)kVocabAll ? id : 0;
    d.made += 1 + known;
}
