// Which experts a place or column goes to, by a warp that has all logits.
//   chosen = the k largest logits, equal ones by the lower id
//   factor = softmax over the chosen logits, or over all (kOverAll)
// A logit that is not finite makes all factors NaN.
#pragma once

#include "lowered.h"
#include "ops/order.h"
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
    KIE_UNROLL for (int n = 0; n < C::kChosen; ++n) {
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
    const float factor =
        max_team(bad ? 1 : 0) != 0 ? number(0x7fc00000u) : mass * reciprocal_f(sum);
    int place = 0;
    KIE_UNROLL for (int n = 0; n < C::kChosen; ++n) place += bits(shuffle(number(id), n)) < id;
    return {id, factor, place};
}
