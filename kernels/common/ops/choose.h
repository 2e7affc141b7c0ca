// Which experts a place or column goes to, by a warp that has all logits.
//   chosen = the k largest logits, equal ones by the lower id
//   factor = softmax over the chosen logits, or over all (kOverAll)
// or (kByScores, DeepSeek-V3's), with score = sigmoid(logit) and corrections for the choice alone:
//   chosen = the k largest of score + correction, of the groups whose two best have the largest
//   sums factor = score, over the sum of the chosen ones' (kFactorsNormed)
// or (kSoftplus, DeepSeek-V4's) with score = sqrt(ln(1 + e^logit)), where the token may say which
// are chosen (kByToken),
// all times kRouteFactor. A logit that is not finite makes all factors NaN.
#pragma once

#include "lowered.h"
#include "ops/order.h"
#include "ops/sigmoid.h"
#include "platform.h"

// The largest number of a team.
#ifndef KIE_MAX_TEAM
KIE_DEVICE u32 max_team(u32 v) {
    KIE_UNROLL for (int m = 16; m > 0; m /= 2) {
        const u32 other = bits(shuffle_xor(number(v), m));
        v = other > v ? other : v;
    }
    return v;
}
#endif
// Numbers in the order of floats, above 0; NaN somewhere.
KIE_DEVICE u32 ordered(float v) {
    const u32 o = order_of(v);
    return o > 0 ? o : 1;
}
KIE_DEVICE float from_ordered(u32 o) { return number(o >> 31 ? o & 0x7fffffffu : ~o); }

// A lane's part of a warp's choice: one of the chosen experts, where it stands in the list.
struct Choice {
    u32 id;
    float factor;
    int place;
};
// Where the chosen lane of a list stands in the order of ids.
template <class C>
KIE_DEVICE int place_of(u32 id) {
    int place = 0;
    KIE_UNROLL for (int n = 0; n < C::kChosen; ++n) place += bits(shuffle(number(id), n)) < id;
    return place;
}
// Experts in groups: those of all but the chosen groups are out of the choice. A lane that has
// experts of a group knows of its two best; lane n keeps group n's sum.
template <class C, int kEach>
KIE_DEVICE void keep_groups(u32 (&keys)[kEach]) {
    constexpr int kOfGroup = C::kExperts / C::kGroups;
    static_assert(C::kGroups <= kTeam && C::kExperts % C::kGroups == 0, "a lane a group");
    const int my = lane() % kTeam;
    float sum = 0;
    KIE_NO_UNROLL for (int group = 0; group < C::kGroups; ++group) {
        float best = -infinity(), second = -infinity();
        KIE_UNROLL for (int i = 0; i < kEach; ++i) {
            const int id = i * kTeam + my;
            const bool its = id < C::kExperts && id / kOfGroup == group;
            const float v = its ? from_ordered(keys[i]) : -infinity();
            second = max_f(second, min_f(best, v)), best = max_f(best, v);
        }
        KIE_UNROLL for (int m = 16; m > 0; m /= 2) {
            const float other = shuffle_xor(best, m), next = shuffle_xor(second, m);
            second = max_f(max_f(second, next), min_f(best, other)), best = max_f(best, other);
        }
        if (my == group) sum = kOfGroup > 1 ? best + second : best;
    }
    int before = 0;  // groups that come before this lane's
    KIE_NO_UNROLL for (int group = 0; group < C::kGroups; ++group) {
        const float other = shuffle(sum, group);
        before += other > sum || (other == sum && group < my);
    }
    const u32 kept = ballot(my < C::kGroups && before < C::kGroupsChosen);
    KIE_UNROLL for (int i = 0; i < kEach; ++i) {
        const int group = (i * kTeam + my) / kOfGroup;
        if (group < C::kGroups && (kept >> group & 1) == 0) keys[i] = 0;
    }
}
// The root of ln(1 + e^x). Factors are parts of a sum, so small ones count as large ones do: where
// e^x is small a sum with 1 would lose its last bits, and
//   ln(1 + y) = 2 (s + s^3 / 3 + s^5 / 5 + ...),   s = y / (2 + y).
KIE_DEVICE float softplus_root(float x) {
    const float e = exp2_f(1.44269504f * min_f(x, 0.0f));
    const float s = e * reciprocal_f(2.0f + e), q = s * s;
    const float small = 2.0f * s * (1.0f + q * (0.333333333f + q * (0.2f + q * 0.142857143f)));
    const float y = e < 0.25f ? small : softplus_f(x);
    return y > 0 ? y * rsqrt_f(y) : y;
}
// The choice by scores. `told`: of a token that says which, those.
template <class C, int kEach>
KIE_DEVICE Choice choose_by_scores(const float (&logits)[kEach], const float (&correction)[kEach],
                                   const u32* told) {
    constexpr float kLog2e = 1.44269504f;
    const int my = lane() % kTeam;
    u32 keys[kEach];
    float scores[kEach];
    bool bad = false;
    KIE_UNROLL for (int i = 0; i < kEach; ++i) {
        const bool real = i * kTeam + my < C::kExperts;
        if constexpr (C::kSoftplus)
            scores[i] = softplus_root(logits[i]);
        else
            scores[i] = reciprocal_f(1.0f + exp2_f(-kLog2e * logits[i]));
        keys[i] = real ? ordered(C::kCorrection ? scores[i] + correction[i] : scores[i]) : 0;
        bad |= real && !is_finite(logits[i]);
    }
    if constexpr (C::kGroupsChosen < C::kGroups) keep_groups<C>(keys);
    u32 id = 0;
    float score = 0;
    if constexpr (C::kByToken) {
        id = my < C::kChosen ? told[my] : 0;
        KIE_NO_UNROLL for (int n = 0; n < C::kChosen; ++n) {
            const u32 its = shuffle(id, n);
            float found = 0;
            KIE_UNROLL for (int i = 0; i < kEach; ++i) if ((u32)i == its / kTeam) found = scores[i];
            found = shuffle(found, its % kTeam);
            if (my == n) score = found;
        }
    } else {
        KIE_NO_UNROLL for (int n = 0; n < C::kChosen; ++n) {
            u32 best = 0, at = 0;
            float its = 0;
            KIE_UNROLL for (int i = 0; i < kEach; ++i) if (keys[i] > best) best = keys[i],
                                                                           at = i * kTeam + my,
                                                                           its = scores[i];
            const u32 all = max_team(best);
            const u32 first = ~max_team(best == all && all > 0 ? ~at : 0);
            KIE_UNROLL for (int i = 0; i < kEach; ++i) if (first == (u32)(i * kTeam + my)) keys[i] =
                0;
            const float of_first = shuffle(its, first % kTeam);
            if (my == n) id = first, score = of_first;
        }
    }
    float sum = my < C::kChosen ? score : 0;
    KIE_UNROLL for (int m = 16; m > 0; m /= 2) sum += shuffle_xor(sum, m);
    if constexpr (C::kFactorsNormed) score *= reciprocal_f(sum + 1e-20f);
    const bool none = max_team(bad ? 1 : 0) != 0;
    return {id, none ? number(0x7fc00000u) : score * C::kRouteFactor, place_of<C>(id)};
}
// By a warp, which has the logits of experts i * kTeam + lane; of the first kChosen lanes.
template <class C, int kEach>
KIE_DEVICE Choice choose(const float (&logits)[kEach]) {
    const int my = lane() % kTeam;
    u32 keys[kEach];
    bool bad = false;
    KIE_UNROLL for (int i = 0; i < kEach; ++i) {
        const bool real = i * kTeam + my < C::kExperts;
        keys[i] = real ? ordered(logits[i]) : 0;
        bad |= real && !is_finite(logits[i]);
    }
    // Lane n keeps the n-th choice.
    u32 id = 0;
    float logit = 0, top = 0;
    KIE_NO_UNROLL for (int n = 0; n < C::kChosen; ++n) {
        u32 best = 0, at = 0;
        KIE_UNROLL for (int i = 0; i < kEach; ++i) if (keys[i] > best) best = keys[i],
                                                                       at = i * kTeam + my;
        const u32 all = max_team(best);
        const u32 first = ~max_team(best == all && all > 0 ? ~at : 0);
        KIE_UNROLL for (int i = 0; i < kEach; ++i) if (first == (u32)(i * kTeam + my)) keys[i] = 0;
        if (n == 0) top = from_ordered(all);
        if (my == n) id = first, logit = from_ordered(all);
    }
    constexpr float kLog2e = 1.44269504f;
    const float mass = my < C::kChosen ? exp2_f((logit - top) * kLog2e) : 0;
    float sum = mass;
    if constexpr (C::kOverAll) {
        sum = 0;
        KIE_UNROLL for (int i = 0; i < kEach; ++i) if (i * kTeam + my < C::kExperts) sum +=
            exp2_f((logits[i] - top) * kLog2e);
    }
    KIE_UNROLL for (int m = 16; m > 0; m /= 2) sum += shuffle_xor(sum, m);
    const float factor = max_team(bad ? 1 : 0) != 0 ? number(0x7fc00000u)
                                                    : mass * reciprocal_f(sum) * C::kRouteFactor;
    return {id, factor, place_of<C>(id)};
}
