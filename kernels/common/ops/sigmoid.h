// Functions that squash numbers.
#pragma once

#include "platform.h"

KIE_DEVICE float sigmoid_f(float x) { return reciprocal_f(1.0f + exp2_f(-1.44269504f * x)); }
// ln(1 + e^x); beyond 20 it is x to the last bit.
KIE_DEVICE float softplus_f(float x) {
    return x > 20.0f ? x : 0.693147181f * log2_f(1.0f + exp2_f(1.44269504f * x));
}
