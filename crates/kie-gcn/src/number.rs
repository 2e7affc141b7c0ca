//! Halves and floats, lane by lane: written without calls or branches, so that loops over 64 lanes
//! become vector instructions.

/// A half as a float; exact.
#[inline(always)]
pub(crate) fn wide(half: u32) -> f32 {
    // The exponents' biases differ by 112; a product with 2^112 moves normal numbers and makes
    // normal ones of the others.
    let shifted = f32::from_bits((half & 0x7fff) << 13);
    let finite = (shifted * f32::from_bits((112 + 127) << 23)).to_bits();
    let special = 0_u32.wrapping_sub(u32::from(half & 0x7c00 == 0x7c00)) & 0x7f80_0000;
    f32::from_bits((half & 0x8000) << 16 | finite | special)
}

/// The nearest half, ties to even.
#[inline(always)]
pub(crate) fn narrow(number: f32) -> u32 {
    let bits = number.to_bits();
    let (sign, size) = (bits >> 16 & 0x8000, bits & 0x7fff_ffff);
    // Below the smallest normal half: adding 0.5 leaves the digits of a half in the lowest bits.
    let small = (f32::from_bits(size) + 0.5).to_bits().wrapping_sub(0.5_f32.to_bits());
    let normal = size.wrapping_sub(112 << 23).wrapping_add(0xfff + (size >> 13 & 1)) >> 13;
    let of_numbers = if size < 113 << 23 { small } else { normal };
    let finite = if size >= 0x477f_f000 { 0x7c00 } else { of_numbers };
    let quiet = 0x7e00 | size >> 13 & 0x3ff;
    sign | if size > 0x7f80_0000 { quiet } else { finite }
}

/// What transcendental units make of numbers too small to be normal.
#[inline(always)]
pub(crate) fn flushed(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE {
        0.0_f32.copysign(x)
    } else {
        x
    }
}

/// The larger one; a number if one of them is, and +0 of two zeros.
#[inline(always)]
pub(crate) fn larger(a: f32, b: f32) -> f32 {
    let both = f32::from_bits(a.to_bits() & b.to_bits());
    let greater = if a > b || b.is_nan() { a } else { b };
    if a == b {
        both
    } else {
        greater
    }
}

/// The smaller one; a number if one of them is, and -0 of two zeros.
#[inline(always)]
pub(crate) fn smaller(a: f32, b: f32) -> f32 {
    let both = f32::from_bits(a.to_bits() | b.to_bits());
    let less = if a < b || b.is_nan() { a } else { b };
    if a == b {
        both
    } else {
        less
    }
}

/// The exponent as stored, and whether it is that of a number that is not normal.
pub(crate) fn exponent(x: f32) -> i32 {
    (x.to_bits() >> 23 & 0xff) as i32
}

fn denormal(x: f32) -> bool {
    x != 0.0 && exponent(x) == 0
}

/// `v_div_scale_f32`: the number to divide with, and whether the quotient must be scaled back.
pub(crate) fn div_scale(x: f32, denominator: f32, numerator: f32) -> (f32, bool) {
    let (up, down) = (x * 2_f32.powi(64), x * 2_f32.powi(-64));
    let reciprocal = 1.0 / denominator;
    let quotient = numerator / denominator;
    let of = |one: f32| if x.to_bits() == one.to_bits() { up } else { x };
    if numerator == 0.0 || denominator == 0.0 {
        (f32::NAN, false)
    } else if exponent(numerator) - exponent(denominator) >= 96 {
        (of(denominator), true)
    } else if denormal(denominator) {
        (up, false)
    } else if denormal(reciprocal) && denormal(quotient) {
        (of(denominator), true)
    } else if denormal(reciprocal) {
        (down, false)
    } else if denormal(quotient) {
        (of(numerator), true)
    } else if exponent(numerator) <= 23 {
        (up, false)
    } else {
        (x, false)
    }
}

/// `v_div_fixup_f32`: the quotient, or what the operands say that it is.
pub(crate) fn div_fixup(quotient: f32, denominator: f32, numerator: f32) -> f32 {
    let sign = (denominator.to_bits() ^ numerator.to_bits()) & 1 << 31;
    let signed = |x: f32| f32::from_bits(x.to_bits() & !(1 << 31) | sign);
    let none = f32::from_bits(0xffc0_0000);
    if numerator.is_nan() || denominator.is_nan() {
        let which = if numerator.is_nan() { numerator } else { denominator };
        f32::from_bits(which.to_bits() | 1 << 22)
    } else if numerator == 0.0 && denominator == 0.0
        || numerator.is_infinite() && denominator.is_infinite()
    {
        none
    } else if denominator == 0.0 || numerator.is_infinite() {
        signed(f32::INFINITY)
    } else if denominator.is_infinite() || numerator == 0.0 {
        signed(0.0)
    } else {
        signed(quotient)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_and_floats_are_each_others() {
        for half in 0..=0xffff_u32 {
            let float = wide(half);
            let back = narrow(float);
            assert!(back == half || float.is_nan() && half & 0x7c00 == 0x7c00, "{half:04x}");
            if half & 0x7fff >= 0x7c00 {
                continue;
            }
            // What lies half-way goes to the even one, what lies beside it to the nearer.
            let next =
                if half & 0x7fff == 0x7bff { 65536_f32.copysign(float) } else { wide(half + 1) };
            let middle = (f64::from(float) + f64::from(next)) as f32 / 2.0;
            assert_eq!(narrow(middle), half + (half & 1), "{half:04x}");
            let towards = |way: i32| f32::from_bits(middle.to_bits().wrapping_add_signed(way));
            assert_eq!([narrow(towards(-1)), narrow(towards(1))], [half, half + 1], "{half:04x}");
        }
        assert_eq!([narrow(f32::INFINITY), narrow(-1e9), narrow(1e-9)], [0x7c00, 0xfc00, 0]);
    }

    #[test]
    fn quotients_are_scaled_and_put_right() {
        assert_eq!(div_scale(3.0, 3.0, 1.0), (3.0, false));
        assert_eq!(div_scale(1e-3, 1e-3, 1e38), (1e-3 * 2_f32.powi(64), true));
        assert!(div_scale(0.0, 0.0, 1.0).0.is_nan());
        assert_eq!(div_fixup(9.0, 0.0, -2.0), f32::NEG_INFINITY);
        assert_eq!(div_fixup(-9.0, 2.0, 18.0), 9.0);
        assert!(div_fixup(1.0, f32::INFINITY, f32::INFINITY).is_nan());
    }
}
