// Logits as what can be compared.
#pragma once

#include "platform.h"

KIE_DEVICE float infinity() { return number(0x7f800000u); }
KIE_DEVICE bool is_finite(float logit) { return logit < infinity(); }  // -inf is a lawful "never"
// The bits of a number, in an order that compares like the float.
KIE_DEVICE u32 order_of(float v) {
    const u32 k = bits(v);
    return k >> 31 ? ~k : k | 0x80000000u;
}
