//! Comparisons: a bit a lane at work, 0 for the others.

// A comparison and the negation of its opposite differ where a number is NaN.
#![allow(clippy::double_comparisons, clippy::neg_cmp_op_on_partial_ord)]

use crate::inst::{Inst, Run};
use crate::wave::{Next, Wave, LANES};

/// A mask from two words a lane.
macro_rules! mask {
    ($of:ty, |$a:ident, $b:ident| $e:expr) => {
        |w, i, _| {
            let (x, y, exec) = (w.lanes(i, 1), w.lanes(i, 2), w.exec());
            let mut out = [0_u8; LANES];
            for k in 0..LANES {
                let ($a, $b) = (x[k] as $of, y[k] as $of);
                out[k] = u8::from($e);
            }
            w.set_scalar64(i.o[0], packed(&out) & exec);
            Next::Go
        }
    };
}
macro_rules! mask_f32 {
    (|$a:ident, $b:ident| $e:expr) => {
        |w, i, _| {
            let (x, y, exec) = (w.lanes(i, 1), w.lanes(i, 2), w.exec());
            let mut out = [0_u8; LANES];
            for k in 0..LANES {
                let ($a, $b) = (f32::from_bits(x[k]), f32::from_bits(y[k]));
                out[k] = u8::from($e);
            }
            w.set_scalar64(i.o[0], packed(&out) & exec);
            Next::Go
        }
    };
}

fn packed(bits: &[u8; LANES]) -> u64 {
    bits.iter().enumerate().fold(0, |all, (k, bit)| all | u64::from(*bit) << k)
}

/// A mask from two numbers of 64 bits a lane.
fn mask64(w: &mut Wave, i: &Inst, of: fn(u64, u64) -> bool) -> Next {
    let (x, y, exec) = (w.lanes64(i, 1), w.lanes64(i, 2), w.exec());
    let all = (0..LANES).fold(0, |all, k| all | u64::from(of(x[k], y[k])) << k);
    w.set_scalar64(i.o[0], all & exec);
    Next::Go
}

/// What a comparison does.
pub(super) fn of(base: &str) -> Option<Run> {
    let (how, kind) = base.strip_prefix("v_cmp_")?.rsplit_once('_')?;
    match kind {
        "u32" => of_u32(how),
        "i32" => of_i32(how),
        "u16" => of_u16(how),
        "i16" => of_i16(how),
        "u64" => of_u64(how),
        "i64" => of_i64(how),
        "f32" => of_f32(how),
        "f64" => of_f64(how),
        _ => None,
    }
}

macro_rules! orders {
    ($how:ident, $of:ty) => {
        Some(match $how {
            "lt" => mask!($of, |a, b| a < b),
            "eq" => mask!($of, |a, b| a == b),
            "le" => mask!($of, |a, b| a <= b),
            "gt" => mask!($of, |a, b| a > b),
            "ne" => mask!($of, |a, b| a != b),
            "ge" => mask!($of, |a, b| a >= b),
            _ => return None,
        })
    };
}

fn of_u32(how: &str) -> Option<Run> {
    orders!(how, u32)
}

fn of_i32(how: &str) -> Option<Run> {
    orders!(how, i32)
}

fn of_u16(how: &str) -> Option<Run> {
    orders!(how, u16)
}

fn of_i16(how: &str) -> Option<Run> {
    orders!(how, i16)
}

fn of_u64(how: &str) -> Option<Run> {
    Some(match how {
        "lt" => |w, i, _| mask64(w, i, |a, b| a < b),
        "eq" => |w, i, _| mask64(w, i, |a, b| a == b),
        "le" => |w, i, _| mask64(w, i, |a, b| a <= b),
        "gt" => |w, i, _| mask64(w, i, |a, b| a > b),
        "ne" => |w, i, _| mask64(w, i, |a, b| a != b),
        "ge" => |w, i, _| mask64(w, i, |a, b| a >= b),
        _ => return None,
    })
}

fn of_i64(how: &str) -> Option<Run> {
    Some(match how {
        "lt" => |w, i, _| mask64(w, i, |a, b| (a as i64) < b as i64),
        "eq" => |w, i, _| mask64(w, i, |a, b| a == b),
        "le" => |w, i, _| mask64(w, i, |a, b| a as i64 <= b as i64),
        "gt" => |w, i, _| mask64(w, i, |a, b| a as i64 > b as i64),
        "ne" => |w, i, _| mask64(w, i, |a, b| a != b),
        "ge" => |w, i, _| mask64(w, i, |a, b| a as i64 >= b as i64),
        _ => return None,
    })
}

/// `n..` is true where one of them is no number.
fn of_f32(how: &str) -> Option<Run> {
    Some(match how {
        "lt" => mask_f32!(|a, b| a < b),
        "eq" => mask_f32!(|a, b| a == b),
        "le" => mask_f32!(|a, b| a <= b),
        "gt" => mask_f32!(|a, b| a > b),
        "lg" => mask_f32!(|a, b| a < b || a > b),
        "ge" => mask_f32!(|a, b| a >= b),
        "o" => mask_f32!(|a, b| !a.is_nan() && !b.is_nan()),
        "u" => mask_f32!(|a, b| a.is_nan() || b.is_nan()),
        "nge" => mask_f32!(|a, b| !(a >= b)),
        "nlg" => mask_f32!(|a, b| !(a < b || a > b)),
        "ngt" => mask_f32!(|a, b| !(a > b)),
        "nle" => mask_f32!(|a, b| !(a <= b)),
        "neq" => mask_f32!(|a, b| a != b),
        "nlt" => mask_f32!(|a, b| !(a < b)),
        // Which of ten classes: the second operand has a bit for each.
        "class" => |w, i, _| {
            let (x, which, exec) = (w.lanes(i, 1), w.lanes(i, 2), w.exec());
            let is = |k: usize| which[k] >> class(f32::from_bits(x[k])) & 1;
            let all = (0..LANES).fold(0, |all, k| all | u64::from(is(k)) << k);
            w.set_scalar64(i.o[0], all & exec);
            Next::Go
        },
        _ => return None,
    })
}

/// Signalling and quiet no-numbers, then from negative infinity to positive infinity.
fn class(x: f32) -> u32 {
    use std::num::FpCategory::{Infinite, Nan, Normal, Subnormal, Zero};
    let negative = x.is_sign_negative();
    match x.classify() {
        Nan => u32::from(x.to_bits() >> 22 & 1 == 1),
        Infinite => {
            if negative {
                2
            } else {
                9
            }
        }
        Normal => {
            if negative {
                3
            } else {
                8
            }
        }
        Subnormal => {
            if negative {
                4
            } else {
                7
            }
        }
        Zero => {
            if negative {
                5
            } else {
                6
            }
        }
    }
}

fn doubles(w: &mut Wave, i: &Inst, of: fn(&f64, &f64) -> bool) -> Next {
    let [x, y] = [1, 2].map(|n| w.lanes64(i, n).map(f64::from_bits));
    let all = (0..LANES).fold(0, |all, k| all | u64::from(of(&x[k], &y[k])) << k);
    let exec = w.exec();
    w.set_scalar64(i.o[0], all & exec);
    Next::Go
}

fn of_f64(how: &str) -> Option<Run> {
    Some(match how {
        "lt" => |w, i, _| doubles(w, i, f64::lt),
        "eq" => |w, i, _| doubles(w, i, f64::eq),
        "le" => |w, i, _| doubles(w, i, f64::le),
        "gt" => |w, i, _| doubles(w, i, f64::gt),
        "ge" => |w, i, _| doubles(w, i, f64::ge),
        "neq" => |w, i, _| doubles(w, i, f64::ne),
        "nge" => |w, i, _| doubles(w, i, |a, b| !(a >= b)),
        "ngt" => |w, i, _| doubles(w, i, |a, b| !(a > b)),
        "nle" => |w, i, _| doubles(w, i, |a, b| !(a <= b)),
        "nlt" => |w, i, _| doubles(w, i, |a, b| !(a < b)),
        _ => return None,
    })
}
