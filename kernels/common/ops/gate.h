// What becomes of an expert's gate and up.
#pragma once

#include "lowered.h"
#include "platform.h"

enum GateKind { kGateSilu, kGateClamped, kGateClampedSilu };
template <class C>
KIE_DEVICE float gated(float gate, float up) {
    if constexpr (C::kGate == kGateClamped) {
        gate = min_f(gate, C::kGateLimit), up = max_f(min_f(up, C::kGateLimit), -C::kGateLimit);
        return (up + 1.0f) * gate * reciprocal_f(1.0f + exp2_f(C::kGateExponent * gate));
    } else if constexpr (C::kGate == kGateClampedSilu) {
        gate = min_f(gate, C::kGateLimit), up = max_f(min_f(up, C::kGateLimit), -C::kGateLimit);
        return up * gate * reciprocal_f(1.0f + exp2_f(-1.44269504f * gate));
    } else {
        return up * gate * reciprocal_f(1.0f + exp2_f(-1.44269504f * gate));
    }
}
