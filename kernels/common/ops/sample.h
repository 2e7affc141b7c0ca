// Choosing a token on the device, in the order of the crate's reference (sample.rs): bias,
// penalties, bans and masks, temperature, filters, then argmax of value + Gumbel noise. Each thread
// reduces the logits that it owns, each block publishes its best as a candidate, and every block
// picks the same token from the same candidates. Noise is Philox4x32-10 keyed by the seed, counted
// by position and id.
#pragma once

#include "args.h"
#include "block.h"
#include "control.h"
#include "exchange.h"
#include "lowered.h"
#include "ops/drafts.h"
#include "ops/mask.h"
#include "ops/order.h"
#include "platform.h"
#include "shape.h"

// Codes where no token can be had; of several the lowest is told.
constexpr u32 kNone = 0xffffffffu, kNotFinite = 0xfffffff0u, kLate = 0xfffffff1u;
constexpr u32 kSeenInPrompt = 0x80000000u;  // of a count; the other bits count outputs
constexpr float kLowest = -3.4e38f;

KIE_DEVICE u32 philox(u64 seed, u32 position, u32 id) {
    u32 k0 = (u32)seed, k1 = (u32)(seed >> 32), c0 = id, c1 = 0, c2 = position, c3 = 0;
    KIE_NO_UNROLL for (int round = 0; round < 10; ++round) {
        const u64 p0 = 0xD2511F53ull * c0, p1 = 0xCD9E8D57ull * c2;
        c0 = (u32)(p1 >> 32) ^ c1 ^ k0, c1 = (u32)p1;
        c2 = (u32)(p0 >> 32) ^ c3 ^ k1, c3 = (u32)p0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return c0;
}
KIE_DEVICE float log_f(float x) { return 0.69314718f * log2_f(x); }
KIE_DEVICE float exp_f(float x) { return exp2_f(1.44269504f * x); }
// -ln(-ln u), u = (x + 1/2) / 2^32. Where u is near 1, from w = 1 - u, which keeps its digits.
KIE_DEVICE float gumbel(u32 x) {
    const float w = ((float)~x + 0.5f) * 2.3283064e-10f;
    const float e = w < 0.0625f ? w * (1 + w * (0.5f + w * (0.33333333f + w * (0.25f + w * 0.2f))))
                                : -log_f(((float)x + 0.5f) * 2.3283064e-10f);
    return -log_f(e);
}

// Best logit so far of those that a thread owns: all that a plain greedy choice of one column
// needs.
struct Candidate {
    float best;
    u32 id;
};
KIE_DEVICE bool better(float a, u32 ia, float b, u32 ib) { return a > b || (a == b && ia < ib); }
KIE_DEVICE void add_mass(float& top, float& mass, float other_top, float other_mass) {
    const float high = max_f(top, other_top);
    mass = mass * exp_f(top - high) + other_mass * exp_f(other_top - high);
    top = high;
}

// How often an id is among a sequence's drafts up to this column: were they not right, nobody would
// take what it chooses.
KIE_DEVICE u32 drafted_before(const DecodeArgs& args, const Block& b, int column, u32 id) {
    u32 count = 0;
    if constexpr (kLookup)
        for (int c = column;
             c >= (int)args.live && sequence_at(b.shared, c) == sequence_at(b.shared, column); --c)
            count += tokens_of(b)[c] == id;
    return count;
}
// Bias, penalties and bans.
KIE_DEVICE float adjusted(const DecodeArgs& args, const Block& b, int column, u32 id, float v) {
    const Sequence& q = sequence_of(args, b, column);
    if (q.wants & kWantsBias) v += args.logit_bias[(u64)q.row * kVocabAll + id];
    if (q.wants & kWantsPenalties) {
        const u32 count = args.counts[(u64)q.row * kVocabAll + id] +
                          drafted_before(args, b, column, id),
                  outputs = count & ~kSeenInPrompt;
        if (count != 0) v = v > 0 ? v / q.repetition : v * q.repetition;
        if (outputs > 0) v -= q.presence + q.frequency * (float)outputs;
    }
    if (q.generated + ahead_at(b.shared, b.step, column) < q.min_new)
        for (u32 i = 0; i < q.stop_count; ++i)
            if (args.stop_ids[q.row * kStopsMax + i] == id) v = -infinity();
    return v;
}

// One column, greedy without anything else: the largest logit as it is, chosen in registers.
KIE_DEVICE bool is_plain(const Sequence& q, u32 step) {
    return kColumns == 1 && q.temperature <= 0 && q.wants == 0 && q.generated + step >= q.min_new;
}
// The best of a block, or of all blocks.
struct Chosen {
    float value, raw, top, mass;
    u32 id;
};
// Over the lanes whose numbers differ in the bits from `from` up; all of them end up with the same.
KIE_DEVICE void best_of_team(Chosen& c, int from, bool masses) {
    KIE_UNROLL for (int m = from; m < kTeam; m *= 2) {
        const float value = shuffle_xor(c.value, m), raw = shuffle_xor(c.raw, m);
        const u32 id = shuffle_xor(c.id, m);
        if (better(value, id, c.value, c.id)) c.value = value, c.id = id, c.raw = raw;
        if (!masses) continue;
        // Both sides add in the same order, so that both hold the same bits.
        float top = shuffle_xor(c.top, m), mass = shuffle_xor(c.mass, m);
        if (((int)lane() & m) == 0) {
            add_mass(c.top, c.mass, top, mass);
        } else {
            add_mass(top, mass, c.top, c.mass);
            c.top = top, c.mass = mass;
        }
    }
}

// The step's one release and acquire: every block publishes its candidate, all choose the same
// token.
KIE_DEVICE u64* candidates_of(const DecodeArgs& args, const Block& b) {
    return args.ll_words + ((args.seqno + b.step) & 1) * kCandidateWords;
}
KIE_DEVICE bool any_wants(const DecodeArgs& args, u32 what) {
    u32 wants = 0;
    KIE_UNROLL for (int c = 0; c < kColumns; ++c) wants |= args.column[c].wants;
    return (wants & what) != 0;
}
KIE_DEVICE bool masses_wanted(const DecodeArgs& args) { return any_wants(args, kWantsLogprob); }
// Calls visit(id, values) for each of the column's logits that this thread owns: values[0]
// is the one at work, values[kVocabAll] the raw one.
template <class F>
KIE_DEVICE void each_value(const DecodeArgs& args, const Block& b, int column, F visit) {
    const int first = head_block(args, b) * kRowsHead;
    const u32 base = head_base(b);
    float* values = args.values + (u64)column * 2 * kVocabAll + base;
    const int last = min_i(min_i(kVocab, kVocabAll - (int)base), first + kRowsHead);
    for (int n = first + thread(); n < last; n += kThreads) visit(base + n, values + n);
}
// The raw logits of this block's rows for a column: where the head put them or, with several
// columns, in shared memory, where the head's input was.
constexpr bool kNear = kColumns > 1 && kStrideA >= 2 * kRowsHead;
KIE_DEVICE float* near_logits(const Block& b, int column) {
    return (float*)(b.shared + kShXa) + column * kRowsHead;
}
// All columns' logits at once, instead of a wait for each. Rows beyond the vocabulary are whatever.
KIE_DEVICE void bring_logits(const DecodeArgs& args, const Block& b) {
    constexpr int kOnce = 8;
    const int first = head_base(b) + head_block(args, b) * kRowsHead,
              all = choosing_of(args, b) * kRowsHead;
    KIE_NO_UNROLL for (int n = thread(); n < all; n += kOnce * kThreads) {
        float v[kOnce];
        KIE_UNROLL for (int i = 0; i < kOnce; ++i) {
            const int at = min_i(n + i * kThreads, all - 1),
                      id = min_i(first + at % kRowsHead, kVocabAll - 1);
            v[i] = args.values[((u64)(at / kRowsHead) * 2 + 1) * kVocabAll + id];
        }
        KIE_UNROLL for (int i = 0; i < kOnce; ++i) {
            if (n + i * kThreads < all) near_logits(b, 0)[n + i * kThreads] = v[i];
        }
    }
}
// The best of the logits that this thread owns, for a column that is more than greedy.
KIE_DEVICE Chosen weigh(const DecodeArgs& args, const Block& b, int column) {
    const Sequence& q = sequence_of(args, b, column);
    const u32 first = head_base(b) + head_block(args, b) * kRowsHead,
              position = position_at(args, b.shared, b.step, column) + 1;
    Chosen best = {kLowest, 0, kLowest, 0, kNone};
    each_value(args, b, column, [&](u32 id, float* values) {
        const float logit = kNear ? near_logits(b, column)[id - first] : values[kVocabAll];
        if (!is_finite(logit)) best.value = infinity(), best.id = kNotFinite;
        if ((q.wants & kWantsLogprob) && logit > kLowest)
            add_mass(best.top, best.mass, logit, 1.0f);
        float v = adjusted(args, b, column, id, logit);
        if (is_masked(q) && !allows(mask_of(b, column), first, id)) v = -infinity();
        if (q.temperature > 0) {
            v /= q.temperature;
            if (q.wants & kWantsFilter)
                values[0] = v;
            else if (v > kLowest)
                v += gumbel(philox(q.seed, position, id));
        }
        if (v > kLowest && better(v, id, best.value, best.id))
            best.value = v, best.id = id, best.raw = logit;
    });
    return best;
}
KIE_DEVICE void weigh_columns(const DecodeArgs& args, const Block& b, Chosen* mine) {
    const bool masked = any_wants(args, kWantsMask);
    if (kColumns > 1 || masked) sync_consumers<kThreads>();  // the logits are there
    if (masked) {
        const int column = thread() / kTeam;
        if (column < choosing_of(args, b) && is_masked(sequence_of(args, b, column)))
            take_mask(args, b, column, head_base(b) + head_block(args, b) * kRowsHead);
    }
    if (kNear) bring_logits(args, b);
    if (kNear || masked) sync_consumers<kThreads>();
    KIE_NO_UNROLL for (int column = 0; column < choosing_of(args, b); ++column) {
        if (is_plain(args.column[column], b.step)) continue;
        if (kColumns == 1 && !masked) sync_consumers<kThreads>();  // the logits are there
        Chosen best = weigh(args, b, column);
        best_of_team(best, 1, (sequence_of(args, b, column).wants & kWantsLogprob) != 0);
        if (lane() == 0) mine[thread() / kTeam * kColumns + column] = best;
    }
}
KIE_DEVICE void publish_candidate(const DecodeArgs& args, Block& b, Candidate& candidate) {
    const int warp = thread() / kTeam, my = lane();
    const bool masses = masses_wanted(args);
    Chosen* mine = (Chosen*)(b.shared + kShCandidates);  // [kWarps][kColumns]
    static_assert(kColumns <= kWarps, "a warp chooses a column's token");
    const Chosen none = {kLowest, 0, kLowest, 0, kNone};
    if (my < kColumns) mine[warp * kColumns + my] = none;
    if (kColumns == 1) {
        Chosen best = {candidate.best, candidate.best, kLowest, 0, candidate.id};
        best_of_team(best, 1, false);
        sync_warp();
        if (my == 0) mine[warp] = best;
    }
    weigh_columns(args, b, mine);
    sync_consumers<kThreads>();
    if (warp < kColumns) {  // one warp a column; a fence drains, so few do
        Chosen best = none;
        if (my < kWarps) best = mine[my * kColumns + warp];
        best_of_team(best, 1, masses);
        if (is_late(args, b, warp) && best.id != kNotFinite)
            best.value = infinity(), best.id = kLate;
        if (timed_out_of(b)) best.value = infinity(), best.id = kNotFinite;
        if (my == 0) {
            fence_step();
            const long at = (long)block_all(args) * kColumns + warp;
            u64* const candidates = candidates_of(args, b);
            u64* to = candidates + kAtCandidate + 2 * at;
            publish_all(args, to, bits(best.value), b.seqno);
            publish_all(args, to + 1, best.id, b.seqno);
            if (masses) {
                const u32 more[4] = {bits(best.top), bits(best.mass), bits(best.raw), 0};
                to = candidates + kAtMore + 4 * at;
                KIE_UNROLL for (int i = 0; i < 4; ++i) publish_all(args, to + i, more[i], b.seqno);
            }
            if (block_all(args) == 0 && warp == 0)
                publish_all(args, candidates + kAtOrder, ((volatile u32*)(b.shared + kShMisc))[1],
                            b.seqno);
        }
        if (best.id < (u32)kVocabAll)  // should it win, its embedding is near
            for (int i = my; i < kHidden / 64; i += kTeam)
                prefetch(args.embed + (long)best.id * (kHidden / 2) + i * 32);
    }
}
// Two words of each block for one column, `stride` words apart, a few a lane:
// take(first, second, block). `beside`: one more word that is waited for with them, or null.
template <class F>
KIE_DEVICE u32 each_candidate(Watch& watch, const DecodeArgs& args, const Block& b, const u64* from,
                              int stride, const u64* beside, F take) {
    constexpr int kEach = (kBlocksAll + kTeam - 1) / kTeam,
                  kAtOnce = min_i(kEach, kColumns == 1 ? 16 : 4);
    u64 extra = (u64)b.seqno << 32;
    KIE_NO_UNROLL for (int first = 0; first < kEach; first += kAtOnce) {
        const auto at = [&](int i) { return kTeam * (first + i) + (int)lane(); };
        u64 x[kAtOnce], y[kAtOnce];
        KIE_UNROLL for (int i = 0; i < kAtOnce; ++i) x[i] = y[i] = 0;
        sync_warp();
        watch.polls = 0;
        for (;;) {
            KIE_UNROLL for (int i = 0; i < kAtOnce; ++i) if (at(i) < kBlocksAll)
                load_words(from + (long)heard_block(at(i)) * stride, x[i], y[i]);
            if (beside) extra = load_word(beside);
            bool ok = seqno_of(extra) == b.seqno;
            KIE_UNROLL for (int i = 0; i < kAtOnce; ++i) if (at(i) < kBlocksAll) ok &=
                seqno_of(x[i]) == b.seqno && seqno_of(y[i]) == b.seqno;
            if (ok || kNoWaits || wait_expired(watch, 0xfff, b.seqno, seqno_of(x[0]))) break;
        }
        KIE_UNROLL for (int i = 0; i < kAtOnce; ++i) if (at(i) < kBlocksAll)
            take((u32)x[i], (u32)y[i], at(i));
    }
    return (u32)extra;
}
// All blocks' candidates for one column, reduced by a warp; and the host's order, where wanted.
KIE_DEVICE Chosen take_candidates(Watch& watch, const DecodeArgs& args, const Block& b, int c,
                                  bool masses, u32& order) {
    Chosen best = {kLowest, 0, kLowest, 0, kNone};
    int from = 0;
    const u64* const candidates = candidates_of(args, b);
    const u64* more = candidates + kAtMore + 4 * c;
    order =
        each_candidate(watch, args, b, candidates + kAtCandidate + 2 * c, 2 * kColumns,
                       c == 0 ? candidates + kAtOrder : nullptr, [&](u32 value, u32 id, int block) {
                           if (better(number(value), id, best.value, best.id))
                               best.value = number(value), best.id = id, from = block;
                       });
    if (masses) {
        each_candidate(watch, args, b, more, 4 * kColumns, nullptr, [&](u32 top, u32 mass, int) {
            add_mass(best.top, best.mass, number(top), number(mass));
        });
        best.raw = number(take_word(watch, more + 4l * from * kColumns + 2, b.seqno, 0xfff));
        sync_warp();
    }
    best_of_team(best, 1, masses);
    return best;
}

KIE_DEVICE bool owns_row(const DecodeArgs& args, const Block& b, u32 id) {
    const int local = (int)(id - head_base(b));
    return local >= 0 && local < kVocab && local / kRowsHead == head_block(args, b);
}
// One thread: a sequence's next token for the host, the `n`-th of the launch, and the count of it.
KIE_DEVICE void tell(const DecodeArgs& args, const Block& b, const Sequence& q, u32 n, u32 id,
                     float logprob) {
    if (block_all(args) == 0) emit_token(args, q.row, q.emitted + n, id, logprob);
    if ((q.wants & kWantsPenalties) && id < (u32)kVocabAll && owns_row(args, b, id))
        ++args.counts[(u64)q.row * kVocabAll + id];
}
// A column's token is known to this warp: whether the sequence ends behind it, the token for the
// next step, the count of it, and the host's copy.
KIE_DEVICE void settle(const DecodeArgs& args, const Block& b, int c, const Chosen& best) {
    const Sequence& q = sequence_of(args, b, c);
    const u32* stops = (const u32*)(b.shared + kShStops) + sequence_at(b.shared, c) * kStopsMax;
    const u32 id = timed_out_of(b) ? kNotFinite : best.id;
    bool hit =
        (!kGarbage && id >= (u32)kVocabAll) || position_at(args, b.shared, b.step, c) + 1 >= q.last;
    for (u32 i = lane(); i < q.stop_count; i += kTeam) hit |= stops[i] == id;
    const bool end = ballot(hit) != 0;
    if (lane() != 0) return;
    const float logprob = q.wants & kWantsLogprob ? best.raw - best.top - log_f(best.mass) : 0;
    ends_of(b)[c] = end;
    if constexpr (kLookup) {
        picked_of(b)[c] = {id, end, logprob};  // it counts if the drafts before it were right
    } else {
        tokens_of(b)[c] = id < (u32)kVocabAll ? id : 0;
        tell(args, b, q, b.step, id, logprob);
    }
}
KIE_DEVICE bool is_filtered(const DecodeArgs& args, const Block& b, int c) {
    const Sequence& q = sequence_of(args, b, c);
    return q.temperature > 0 && (q.wants & kWantsFilter) != 0;
}
