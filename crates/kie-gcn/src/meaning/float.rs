//! Vector instructions over floats and doubles. Sums, products and roundings are exact to the bit;
//! exponentials, logarithms, reciprocals and roots are rounded right, which the hardware is within
//! one place of.

use super::lanes::{floats, m1};
use crate::inst::{Inst, Run, VCC};
use crate::number::{div_fixup, div_scale, flushed, larger, narrow, smaller, wide};
use crate::wave::{Lanes, Next, Wave, World, LANES};

/// What the instruction's modifiers make of results.
#[inline]
pub(super) fn finish(i: &Inst, out: &mut Lanes) {
    if i.modified && (i.clamp || i.omod != 1.0) {
        for lane in out.iter_mut() {
            let x = f32::from_bits(*lane) * i.omod;
            // What is no number becomes 0.
            *lane = f32::to_bits(if i.clamp { smaller(larger(x, 0.0), 1.0) } else { x });
        }
    }
}

/// What a mnemonic over floats does.
pub(super) fn of(base: &str) -> Option<Run> {
    sums(base).or_else(|| rounds(base)).or_else(|| converts(base)).or_else(|| doubles(base))
}

fn sums(base: &str) -> Option<Run> {
    Some(match base {
        "v_add_f32" => floats!([1 a, 2 b] a + b),
        "v_sub_f32" => floats!([1 a, 2 b] a - b),
        "v_subrev_f32" => floats!([1 a, 2 b] b - a),
        "v_mul_f32" => floats!([1 a, 2 b] a * b),
        "v_max_f32" => floats!([1 a, 2 b] larger(a, b)),
        "v_min_f32" => floats!([1 a, 2 b] smaller(a, b)),
        "v_max3_f32" => floats!([1 a, 2 b, 3 c] larger(larger(a, b), c)),
        "v_min3_f32" => floats!([1 a, 2 b, 3 c] smaller(smaller(a, b), c)),
        "v_med3_f32" => floats!([1 a, 2 b, 3 c] smaller(larger(a, b), larger(smaller(a, b), c))),
        "v_fma_f32" | "v_fmaak_f32" | "v_fmamk_f32" => floats!([1 a, 2 b, 3 c] a.mul_add(b, c)),
        "v_fmac_f32" => floats!([0 d, 1 a, 2 b] a.mul_add(b, d)),
        "v_dot2c_f32_f16" => dot,
        "v_div_fixup_f32" => floats!([1 a, 2 b, 3 c] div_fixup(a, b, c)),
        "v_div_scale_f32" => scale,
        "v_div_fmas_f32" => |w, i, _| {
            let (a, b, c, back) = (w.lanes(i, 1), w.lanes(i, 2), w.lanes(i, 3), w.get64(VCC));
            let mut out = [0; LANES];
            for k in 0..LANES {
                let [a, b, c] = [a[k], b[k], c[k]].map(f32::from_bits);
                let up = if back >> k & 1 == 1 { 2_f32.powi(32) } else { 1.0 };
                out[k] = (up * a.mul_add(b, c)).to_bits();
            }
            w.put(i, &out);
            Next::Go
        },
        _ => return None,
    })
}

/// Two products of halves are added one after the other.
fn dot(w: &mut Wave, i: &Inst, _: &mut World) -> Next {
    let (d, a, b) = (w.lanes(i, 0), w.lanes(i, 1), w.lanes(i, 2));
    let mut out = [0; LANES];
    for k in 0..LANES {
        let low = wide(a[k] & 0xffff) * wide(b[k] & 0xffff);
        let high = wide(a[k] >> 16) * wide(b[k] >> 16);
        out[k] = (f32::from_bits(d[k]) + low + high).to_bits();
    }
    w.put(i, &out);
    Next::Go
}

fn scale(w: &mut Wave, i: &Inst, _: &mut World) -> Next {
    let (x, by, of, exec) = (w.lanes(i, 2), w.lanes(i, 3), w.lanes(i, 4), w.exec());
    let (mut out, mut back) = ([0; LANES], 0);
    for k in 0..LANES {
        let [x, by, of] = [x[k], by[k], of[k]].map(f32::from_bits);
        let (scaled, is_back) = div_scale(x, by, of);
        out[k] = scaled.to_bits();
        back |= u64::from(is_back) << k;
    }
    w.put(i, &out);
    w.set_scalar64(i.o[1], back & exec);
    Next::Go
}

/// By way of doubles, which are close enough to be rounded right.
fn precisely(x: f32, of: fn(f64) -> f64) -> f32 {
    of(f64::from(x)) as f32
}

fn rounds(base: &str) -> Option<Run> {
    Some(match base {
        "v_floor_f32" => floats!([1 a] a.floor()),
        "v_ceil_f32" => floats!([1 a] a.ceil()),
        "v_trunc_f32" => floats!([1 a] a.trunc()),
        "v_rndne_f32" => floats!([1 a] a.round_ties_even()),
        "v_fract_f32" => floats!([1 a] smaller(a - a.floor(), f32::from_bits(0x3f7f_ffff))),
        "v_exp_f32" => floats!([1 a] flushed(precisely(flushed(a), f64::exp2))),
        "v_log_f32" => floats!([1 a] precisely(flushed(a), f64::log2)),
        "v_rcp_f32" | "v_rcp_iflag_f32" => floats!([1 a] flushed(1.0 / flushed(a))),
        "v_rsq_f32" => floats!([1 a] precisely(flushed(a), |x| 1.0 / x.sqrt())),
        "v_sqrt_f32" => floats!([1 a] flushed(a).sqrt()),
        "v_sin_f32" => floats!([1 a] precisely(a, |x| (x * std::f64::consts::TAU).sin())),
        "v_cos_f32" => floats!([1 a] precisely(a, |x| (x * std::f64::consts::TAU).cos())),
        "v_ldexp_f32" => |w, i, _| {
            let (a, b) = (w.lanes(i, 1), w.lanes(i, 2));
            let mut out = [0; LANES];
            for k in 0..LANES {
                let by = 2_f64.powi((b[k] as i32).clamp(-400, 400));
                out[k] = ((f64::from(f32::from_bits(a[k])) * by) as f32).to_bits();
            }
            finish(i, &mut out);
            w.put(i, &out);
            Next::Go
        },
        _ => return None,
    })
}

/// Doubles from one word each.
fn to_doubles(w: &mut Wave, i: &Inst, of: fn(u32) -> f64) -> Next {
    let x = w.lanes(i, 1).map(|lane| of(lane).to_bits());
    w.put64(i, &x);
    Next::Go
}

/// One word from doubles.
fn from_doubles(w: &mut Wave, i: &Inst, of: fn(f64) -> u32) -> Next {
    let x = w.lanes64(i, 1).map(|lane| of(f64::from_bits(lane)));
    w.put(i, &x);
    Next::Go
}

fn converts(base: &str) -> Option<Run> {
    Some(match base {
        "v_cvt_f32_u32" => m1!(|a| (a as f32).to_bits()),
        "v_cvt_f32_i32" => m1!(|a| (a as i32 as f32).to_bits()),
        "v_cvt_u32_f32" => m1!(|a| f32::from_bits(a) as u32),
        "v_cvt_i32_f32" => m1!(|a| (f32::from_bits(a) as i32) as u32),
        "v_cvt_flr_i32_f32" => m1!(|a| (f32::from_bits(a).floor() as i32) as u32),
        "v_cvt_rpi_i32_f32" => m1!(|a| ((f32::from_bits(a) + 0.5).floor() as i32) as u32),
        "v_cvt_f32_ubyte0" => m1!(|a| ((a & 0xff) as f32).to_bits()),
        "v_cvt_f32_ubyte1" => m1!(|a| ((a >> 8 & 0xff) as f32).to_bits()),
        "v_cvt_f32_ubyte2" => m1!(|a| ((a >> 16 & 0xff) as f32).to_bits()),
        "v_cvt_f32_ubyte3" => m1!(|a| ((a >> 24) as f32).to_bits()),
        "v_cvt_f16_f32" => |w, i, _| {
            let mut out = w.lanes(i, 1);
            finish(i, &mut out);
            for lane in &mut out {
                *lane = narrow(f32::from_bits(*lane));
            }
            w.put(i, &out);
            Next::Go
        },
        "v_cvt_f32_f16" => |w, i, _| {
            let mut out = w.lanes(i, 1);
            for lane in &mut out {
                *lane = wide(*lane & 0xffff).to_bits();
            }
            finish(i, &mut out);
            w.put(i, &out);
            Next::Go
        },
        "v_cvt_f64_f32" => |w, i, _| to_doubles(w, i, |x| f64::from(f32::from_bits(x))),
        "v_cvt_f64_u32" => |w, i, _| to_doubles(w, i, f64::from),
        "v_cvt_f64_i32" => |w, i, _| to_doubles(w, i, |x| f64::from(x as i32)),
        "v_cvt_f32_f64" => |w, i, _| from_doubles(w, i, |x| (x as f32).to_bits()),
        "v_cvt_u32_f64" => |w, i, _| from_doubles(w, i, |x| x as u32),
        "v_cvt_i32_f64" => |w, i, _| from_doubles(w, i, |x| (x as i32) as u32),
        _ => return None,
    })
}

/// Doubles from doubles, from operand 0 on.
fn of_doubles(w: &mut Wave, i: &Inst, of: fn([f64; 3]) -> f64) -> Next {
    let all: [[u64; LANES]; 3] = std::array::from_fn(|n| w.lanes64(i, n));
    let x = std::array::from_fn(|k| of([0, 1, 2].map(|n| f64::from_bits(all[n][k]))).to_bits());
    w.put64(i, &x);
    Next::Go
}

fn doubles(base: &str) -> Option<Run> {
    Some(match base {
        "v_add_f64" => |w, i, _| of_doubles(w, i, |[_, a, b]| a + b),
        "v_mul_f64" => |w, i, _| of_doubles(w, i, |[_, a, b]| a * b),
        "v_fmac_f64" => |w, i, _| of_doubles(w, i, |[d, a, b]| a.mul_add(b, d)),
        "v_floor_f64" => |w, i, _| of_doubles(w, i, |[_, a, _]| a.floor()),
        "v_ceil_f64" => |w, i, _| of_doubles(w, i, |[_, a, _]| a.ceil()),
        "v_trunc_f64" => |w, i, _| of_doubles(w, i, |[_, a, _]| a.trunc()),
        "v_rndne_f64" => |w, i, _| of_doubles(w, i, |[_, a, _]| a.round_ties_even()),
        "v_fma_f64" => |w, i, _| {
            let [a, b, c] = [1, 2, 3].map(|n| w.lanes64(i, n).map(f64::from_bits));
            let x = std::array::from_fn(|k| a[k].mul_add(b[k], c[k]).to_bits());
            w.put64(i, &x);
            Next::Go
        },
        "v_ldexp_f64" => |w, i, _| {
            let (a, b) = (w.lanes64(i, 1), w.lanes(i, 2));
            let x = std::array::from_fn(|k| {
                let by = (b[k] as i32).clamp(-1000, 1000);
                (f64::from_bits(a[k]) * 2_f64.powi(by)).to_bits()
            });
            w.put64(i, &x);
            Next::Go
        },
        _ => return None,
    })
}
