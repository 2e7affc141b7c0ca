// top_k, top_p and min_p on the device: the smallest rank that is kept is found digit by digit.
// A value's rank is a 64-bit number, its bits in an order that compares like the float, then the
// complement of its id, so that no two are equal and ties go to the lower id. In each round every
// block counts its values by the next four bits of their rank, one block adds up all counts and
// says which digit the bound has. Counts and masses are whole numbers (masses in units of 2^-44 of
// the largest probability), so their sums do not depend on any order.
#pragma once

#include "args.h"
#include "block.h"
#include "control.h"
#include "exchange.h"
#include "lowered.h"
#include "ops/drafts.h"
#include "ops/sample.h"
#include "platform.h"
#include "shape.h"

constexpr int kFloatDigits = 8, kIdDigits = 5;  // ids stay below 2^20
static_assert(kVocabAll <= 1 << 4 * kIdDigits && kRounds >= kFloatDigits + kIdDigits, "ids");
constexpr float kMassUnit = 17592186044416.0f;

struct Tally {
    u64 mass;
    u32 count, spare;
};
struct Bound {
    u64 rank;  // what is kept has at least this rank
    u32 above_count;
    u64 above_mass, wanted;
};
enum Goal { kByCount = 0, kByMass = 1 };

KIE_DEVICE u64 rank_of(float v, u32 id) { return (u64)order_of(v) << 32 | (u32)~id; }
KIE_DEVICE int digit_shift(int round) {
    return round < kFloatDigits ? 60 - 4 * round : 4 * (kFloatDigits + kIdDigits - 1 - round);
}
KIE_DEVICE u64* tally_slot(const DecodeArgs& args, int goal, int round, int from, int column) {
    return args.ll_words + kAtTally +
           ((((long)goal * kRounds + round) * kBlocksAll + from) * kColumns + column) * kCountWords;
}
KIE_DEVICE u64* verdict_slot(const DecodeArgs& args, int goal, int round, int column) {
    return args.ll_words + kAtVerdict + (((long)goal * kRounds + round) * kColumns + column) * 8;
}
// The block that adds up: which digit the bound has, what lies above it. Threads 0..47 add a word
// each over all blocks.
KIE_DEVICE void judge(Watch& watch, const DecodeArgs& args, const Block& b, int goal, int round,
                      int column, const Bound& bound, float share) {
    const int me = thread();
    u64* sums = (u64*)(b.shared + kShSum);
    if (me < kCountWords) {
        u64 sum = 0;
        for (int from = 0; from < kBlocksAll; ++from)
            sum +=
                take_word(watch, tally_slot(args, goal, round, from, column) + me, b.seqno, 0xffc);
        sums[me] = sum;
    }
    sync_consumers<kThreads>();
    if (me != 0) return;
    const auto count_of = [&](int digit) { return (u32)sums[3 * digit]; };
    const auto mass_of = [&](int digit) {
        return sums[3 * digit + 1] + (sums[3 * digit + 2] << 32);
    };
    u64 wanted = bound.wanted;
    if (goal == kByMass && round == 0) {
        u64 all = 0;
        for (int digit = 0; digit < kBins; ++digit) all += mass_of(digit);
        wanted = (u64)((double)share * (double)all);
    }
    u32 count = bound.above_count;
    u64 mass = bound.above_mass;
    int digit = kBins - 1, lowest = kBins - 1;
    for (int d = 0; d < kBins; ++d)
        if (count_of(kBins - 1 - d) > 0) lowest = kBins - 1 - d;
    while (digit > lowest) {
        const u32 with_count = count + count_of(digit);
        const u64 with_mass = mass + mass_of(digit);
        if (goal == kByCount ? with_count >= wanted : with_mass >= wanted) break;
        count = with_count, mass = with_mass, --digit;
    }
    const u32 here = count_of(digit);
    const bool settled = here == 1 || (goal == kByCount && count + here <= wanted);
    u64* to = verdict_slot(args, goal, round, column);
    const u32 words[8] = {(u32)digit | (u32)settled << 8,
                          count,
                          (u32)mass,
                          (u32)(mass >> 32),
                          (u32)wanted,
                          (u32)(wanted >> 32),
                          here,
                          0};
    KIE_UNROLL for (int i = 0; i < 8; ++i) publish_all(args, to + i, words[i], b.seqno);
}
// Finds the rank at which `count` values, or `share` of the mass, are reached among the values of
// at least `least`. All consumers of all blocks.
KIE_DEVICE u64 find_bound(Watch& watch, const DecodeArgs& args, const Block& b, int column,
                          int goal, u32 count, float share, u64 least, float top) {
    Bound bound = {0, 0, 0, count};
    Tally* bins = (Tally*)(b.shared + kShTally);
    u32* heard = (u32*)(b.shared + kShSum);
    const int me = thread();
    bound.rank = 0xfff00000ull;  // the part of the id that is the same for all
    for (int round = 0; round < kFloatDigits + kIdDigits; ++round) {
        const int shift = digit_shift(round);
        const u64 known = round == 0 ? 0 : ~0ull << digit_shift(round - 1);
        if (me < kBins) bins[me] = {0, 0, 0};
        sync_consumers<kThreads>();
        each_value(args, b, column, [&](u32 id, const float* values) {
            const float v = values[0];
            const u64 rank = rank_of(v, id);
            if (!(v > kLowest) || rank < least || ((rank ^ bound.rank) & known) != 0) return;
            Tally* bin = bins + (rank >> shift & (kBins - 1));
            add_shared(&bin->count, 1u);
            add_shared(&bin->mass, (u64)(exp_f(v - top) * kMassUnit));
        });
        sync_consumers<kThreads>();
        if (me < kCountWords) {
            const Tally& t = bins[me / 3];
            const u32 w = me % 3 == 0 ? t.count : me % 3 == 1 ? (u32)t.mass : (u32)(t.mass >> 32);
            publish_all(args, tally_slot(args, goal, round, block_all(args), column) + me, w,
                        b.seqno);
        }
        if (block_all(args) == column % kBlocksAll)
            judge(watch, args, b, goal, round, column, bound, share);
        sync_consumers<kThreads>();
        if (me < 8)
            heard[me] =
                take_word(watch, verdict_slot(args, goal, round, column) + me, b.seqno, 0xffb);
        sync_consumers<kThreads>();
        bound.rank |= (u64)(heard[0] & 255) << shift;
        bound.above_count = heard[1];
        bound.above_mass = (u64)heard[3] << 32 | heard[2];
        bound.wanted = (u64)heard[5] << 32 | heard[4];
        const bool settled = heard[0] >> 8 != 0;
        sync_consumers<kThreads>();
        if (settled) return bound.rank & ~0ull << shift;
    }
    return bound.rank;
}

// A filtered column's token: bounds, then the race among what is kept.
KIE_DEVICE void filter(Watch& watch, const DecodeArgs& args, Block& b, int column) {
    const Sequence& q = sequence_of(args, b, column);
    const u32 position = position_at(args, b.shared, b.step, column) + 1;
    const int warp = thread() / kTeam, my = lane();
    Chosen* mine = (Chosen*)(b.shared + kShCandidates);
    const Chosen all = mine[column];
    u64 least = 0;
    sync_consumers<kThreads>();
    if (q.top_k > 0 && q.top_k < (u32)kVocabAll)
        least = find_bound(watch, args, b, column, kByCount, q.top_k, 0, least, all.value);
    if (q.top_p < 1)
        least = find_bound(watch, args, b, column, kByMass, 0, q.top_p, least, all.value);
    const float lowest = q.min_p > 0 ? all.value + log_f(min_f(q.min_p, 1)) : kLowest;
    Chosen best = {kLowest, 0, all.top, all.mass, kNone};
    each_value(args, b, column, [&](u32 id, const float* values) {
        const float v = values[0], raw = values[kVocabAll];
        if (!(v > kLowest) || v < lowest || rank_of(v, id) < least) return;
        const float score = v + gumbel(philox(q.seed, position, id));
        if (better(score, id, best.value, best.id))
            best.value = score, best.id = id, best.raw = raw;
    });
    best_of_team(best, 1, false);
    if (my == 0) mine[kColumns + warp] = best;
    if (watch.timed_out) timed_out_of(b) = 1;
    sync_consumers<kThreads>();
    const auto final_slot = [&](int from) {
        return args.ll_words + kAtFinal + ((long)from * kColumns + column) * 4;
    };
    if (warp == 0) {
        if (my < kWarps) best = mine[kColumns + my];
        if (my >= kWarps) best.value = kLowest, best.id = kNone;
        best_of_team(best, 1, false);
        if (timed_out_of(b)) best.value = infinity(), best.id = kNotFinite;
        if (my == 0) {
            u64* to = final_slot(block_all(args));
            publish_all(args, to, bits(best.value), b.seqno);
            publish_all(args, to + 1, best.id, b.seqno);
            publish_all(args, to + 2, bits(best.raw), b.seqno);
        }
        best.value = kLowest, best.id = kNone;
        for (int from = my; from < kBlocksAll; from += kTeam) {
            const float value = number(take_word(watch, final_slot(from), b.seqno, 0xffa));
            const u32 id = take_word(watch, final_slot(from) + 1, b.seqno, 0xffa);
            const float raw = number(take_word(watch, final_slot(from) + 2, b.seqno, 0xffa));
            if (better(value, id, best.value, best.id))
                best.value = value, best.id = id, best.raw = raw;
        }
        if (watch.timed_out) timed_out_of(b) = 1;
        sync_warp();
        best_of_team(best, 1, false);
        settle(args, b, column, best);
    }
    sync_consumers<kThreads>();
}

KIE_DEVICE void reduce_candidates(Watch& watch, const DecodeArgs& args, Block& b) {
    const int c = thread() / kTeam;
    if (c < kColumns) {
        const bool live = c < choosing_of(args, b);
        const bool masses = live && (sequence_of(args, b, c).wants & kWantsLogprob) != 0;
        u32 order;
        const Chosen best = take_candidates(watch, args, b, c, masses, order);
        fence_step();
        if (watch.timed_out) timed_out_of(b) = 1;
        if (lane() == 0) {
            ends_of(b)[c] = 0;
            if constexpr (kLookup)
                picked_of(b)[c] = {kNone, 0, 0};
            else
                tokens_of(b)[c] = 0;
            if (c == 0) ((volatile u32*)(b.shared + kShMisc))[2] = order;
        }
        sync_warp();
        if (live && (!is_filtered(args, b, c) || best.id >= (u32)kVocabAll))
            settle(args, b, c, best);
        else if (live && lane() == 0)
            ((Chosen*)(b.shared + kShCandidates))[c] = best, ends_of(b)[c] = 2;
    }
    sync_consumers<kThreads>();
    KIE_NO_UNROLL for (int column = 0; column < choosing_of(args, b); ++column) {
        if (!is_filtered(args, b, column) || ends_of(b)[column] != 2) continue;
        if (kLookup && !is_reached(args, b, column)) continue;
        filter(watch, args, b, column);
    }
}
