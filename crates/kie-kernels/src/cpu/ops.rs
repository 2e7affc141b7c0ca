//! Small vector operations of the norms and the gated MLP.

use crate::abi::Gate;
use crate::simd::{dispatch, Kernel, Level, Vector};

/// Mean of the squares of `x`, in float32 with a fixed order of sums.
pub fn mean_square(level: Level, x: &[f32]) -> f32 {
    struct Squares<'a>(&'a [f32]);
    impl Kernel for Squares<'_> {
        type Output = f32;

        #[inline(always)]
        unsafe fn run<V: Vector>(self) -> f32 {
            // SAFETY: the caller has V's level.
            let mut sum = unsafe { V::splat(0.0) };
            for part in self.0.chunks(V::LANES) {
                // SAFETY: the chunk has that many numbers.
                let x = unsafe { V::load_part(part.as_ptr(), part.len()) };
                sum = x.fma(x, sum);
            }
            sum.sum()
        }
    }
    dispatch(level, Squares(x)) / x.len() as f32
}

/// `1 / (1 + e^-x)`.
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// `ln(1 + e^x)`.
pub fn softplus(x: f32) -> f32 {
    // As in the reference: beyond 20 it is x to the last bit.
    if x > 20.0 {
        x
    } else {
        x.exp().ln_1p()
    }
}

/// cos and sin of a rotary pair at a position, by so many radians a position, times `length`: in
/// float64, and rounded once.
pub fn turned(position: u32, frequency: f32, length: f32) -> [f32; 2] {
    let (sin, cos) = (f64::from(position) * f64::from(frequency)).sin_cos();
    [cos, sin].map(|x| (f64::from(length) * x) as f32)
}

/// What a gated MLP makes of gate and up, into `gate`.
///
/// # Panics
/// When the lengths differ.
pub fn gate_mul(level: Level, kind: Gate, gate: &mut [f32], up: &[f32]) {
    match kind {
        Gate::Silu => silu_mul(level, gate, up),
        Gate::GeluTanh => gelu_tanh_mul(level, gate, up),
        Gate::ClampedSwiglu { alpha, limit } => {
            clamped_swiglu_mul(level, [alpha, limit, 1.0], gate, up);
        }
        Gate::ClampedSilu { limit } => clamped_swiglu_mul(level, [1.0, limit, 0.0], gate, up),
    }
}

/// `gate = (v + more) h / (1 + e^(-alpha h))` with gates clamped from above and ups from both
/// sides, h and v (`modeling_gpt_oss.py` of transformers, whose `more` is 1); numbers are alpha,
/// the limit and `more`.
///
/// # Panics
/// When the lengths differ.
pub fn clamped_swiglu_mul(level: Level, numbers: [f32; 3], gate: &mut [f32], up: &[f32]) {
    struct Clamped<'a>([f32; 3], &'a mut [f32], &'a [f32]);
    impl Kernel for Clamped<'_> {
        type Output = ();

        #[inline(always)]
        unsafe fn run<V: Vector>(self) {
            let [alpha, limit, more] = self.0;
            // SAFETY: the caller has V's level.
            let [one, more, alpha, most, least] =
                unsafe { [1.0, more, -alpha, limit, -limit].map(|x| V::splat(x)) };
            for (gate, up) in self.1.chunks_mut(V::LANES).zip(self.2.chunks(V::LANES)) {
                let len = gate.len();
                // SAFETY: the chunk has `len` numbers.
                let g = unsafe { V::load_part(gate.as_ptr(), len) };
                // SAFETY: as above; the lengths are equal.
                let u = unsafe { V::load_part(up.as_ptr(), len) };
                // Limits first: `max` and `min` then keep a NaN.
                let (g, u) = (most.min(g), least.max(most.min(u)));
                let result = u.add(more).mul(g).div(g.mul(alpha).exp().add(one));
                // SAFETY: as the loads.
                unsafe { result.store_part(gate.as_mut_ptr(), len) };
            }
        }
    }
    assert_eq!(gate.len(), up.len(), "gate and up");
    dispatch(level, Clamped(numbers, gate, up));
}

/// `gate = gelu(gate) * up`, GELU by its tanh approximation:
/// gelu(x) = x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3) (Hendrycks and Gimpel, 2016).
///
/// # Panics
/// When the lengths differ.
pub fn gelu_tanh_mul(level: Level, gate: &mut [f32], up: &[f32]) {
    struct GeluMul<'a>(&'a mut [f32], &'a [f32]);
    impl Kernel for GeluMul<'_> {
        type Output = ();

        #[inline(always)]
        unsafe fn run<V: Vector>(self) {
            // -2 sqrt(2 / pi), and that times 0.044715.
            // SAFETY: the caller has V's level.
            let [one, linear, cubic] =
                unsafe { [V::splat(1.0), V::splat(-1.595_769_2), V::splat(-0.071_354_816)] };
            for (gate, up) in self.0.chunks_mut(V::LANES).zip(self.1.chunks(V::LANES)) {
                let len = gate.len();
                // SAFETY: the chunk has `len` numbers.
                let g = unsafe { V::load_part(gate.as_ptr(), len) };
                // SAFETY: as above; the lengths are equal.
                let u = unsafe { V::load_part(up.as_ptr(), len) };
                let exponent = g.mul(g.mul(g).fma(cubic, linear));
                let result = g.mul(u).div(exponent.exp().add(one));
                // SAFETY: as the loads.
                unsafe { result.store_part(gate.as_mut_ptr(), len) };
            }
        }
    }
    assert_eq!(gate.len(), up.len(), "gate and up");
    dispatch(level, GeluMul(gate, up));
}

/// `gate = silu(gate) * up` with silu(x) = x / (1 + e^-x).
///
/// # Panics
/// When the lengths differ.
pub fn silu_mul(level: Level, gate: &mut [f32], up: &[f32]) {
    struct SiluMul<'a>(&'a mut [f32], &'a [f32]);
    impl Kernel for SiluMul<'_> {
        type Output = ();

        #[inline(always)]
        unsafe fn run<V: Vector>(self) {
            // SAFETY: the caller has V's level.
            let (zero, one) = unsafe { (V::splat(0.0), V::splat(1.0)) };
            for (gate, up) in self.0.chunks_mut(V::LANES).zip(self.1.chunks(V::LANES)) {
                let len = gate.len();
                // SAFETY: the chunk has `len` numbers.
                let g = unsafe { V::load_part(gate.as_ptr(), len) };
                // SAFETY: as above; the lengths are equal.
                let u = unsafe { V::load_part(up.as_ptr(), len) };
                let result = g.mul(u).div(zero.sub(g).exp().add(one));
                // SAFETY: as the loads.
                unsafe { result.store_part(gate.as_mut_ptr(), len) };
            }
        }
    }
    assert_eq!(gate.len(), up.len(), "gate and up");
    dispatch(level, SiluMul(gate, up));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_level_is_the_definition(x in prop::collection::vec(-30f32..30.0, 1..200)) {
            let square: f64 = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / x.len() as f64;
            let up: Vec<f32> = x.iter().rev().copied().collect();
            for level in simd::available() {
                let found = f64::from(mean_square(level, &x));
                prop_assert!((found - square).abs() <= 1e-5 * square, "{level:?}");
                let mut gelu = x.clone();
                gelu_tanh_mul(level, &mut gelu, &up);
                for ((found, x), up) in gelu.iter().zip(&x).zip(&up) {
                    let (x, up) = (f64::from(*x), f64::from(*up));
                    let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
                    let wanted = 0.5 * x * (1.0 + u.tanh()) * up;
                    let error = (f64::from(*found) - wanted).abs();
                    // An exponent near -88 is off by 2e-5 itself.
                    let bound = 5e-5 * wanted.abs() + 1e-9;
                    prop_assert!(error <= bound, "{level:?} {x} {found} {wanted}");
                }
                let mut gate = x.clone();
                silu_mul(level, &mut gate, &up);
                for ((found, x), up) in gate.iter().zip(&x).zip(&up) {
                    let (x, up) = (f64::from(*x), f64::from(*up));
                    let wanted = x / (1.0 + (-x).exp()) * up;
                    let error = (f64::from(*found) - wanted).abs();
                    let bound = 1e-5 * wanted.abs() + 1e-9;
                    prop_assert!(error <= bound, "{level:?} {x} {found} {wanted}");
                }
                for [alpha, more] in [[1.702, 1.0], [1.0, 0.0]] {
                    let mut gate = x.clone();
                    clamped_swiglu_mul(level, [alpha, 7.0, more], &mut gate, &up);
                    let [alpha, more] = [alpha, more].map(f64::from);
                    for ((found, x), up) in gate.iter().zip(&x).zip(&up) {
                        let (x, up) = (f64::from(*x).min(7.0), f64::from(*up).clamp(-7.0, 7.0));
                        let share = 1.0 / (1.0 + (-alpha * x).exp());
                        let wanted = (up + more) * x * share;
                        let error = (f64::from(*found) - wanted).abs();
                        // `up + more` is exact to a rounding of `up`.
                        let bound = 5e-5 * wanted.abs() + 1e-6 * x.abs() * share;
                        prop_assert!(error <= bound + 1e-9, "{level:?} {x} {found} {wanted}");
                    }
                }
                for bad in [0, 1] {
                    let (mut gate, mut up) = ([1.0; 3], [1.0; 3]);
                    [&mut gate, &mut up][bad][1] = f32::NAN;
                    clamped_swiglu_mul(level, [1.702, 7.0, 1.0], &mut gate, &up);
                    prop_assert!(gate[1].is_nan() && !gate[0].is_nan() && !gate[2].is_nan());
                }
            }
        }
    }
}
