//! Vector instructions over whole numbers and bits.

use super::lanes::{m1, m2, m3};
use crate::inst::{Inst, Operand, Run};
use crate::wave::{Lanes, Next, Wave, World, LANES};

/// What a mnemonic over whole numbers does.
pub(super) fn of(base: &str) -> Option<Run> {
    let of_two = || sums(base).or_else(|| bits(base)).or_else(|| short(base));
    moves(base)
        .or_else(of_two)
        .or_else(|| three(base))
        .or_else(|| carries(base))
        .or_else(|| wide(base))
}

/// The low 24 bits, and with their sign.
fn low24(a: u32) -> u32 {
    a & 0xff_ffff
}

fn low24s(a: u32) -> i32 {
    (a << 8) as i32 >> 8
}

/// Between lanes, and by lane.
fn moves(base: &str) -> Option<Run> {
    Some(match base {
        "v_nop" => |_, _, _| Next::Go,
        "v_mov_b32" => m1!(|a| a),
        "v_mov_b64" => |w, i, _| {
            let x = w.lanes64(i, 1);
            w.put64(i, &x);
            Next::Go
        },
        "v_cndmask_b32" => |w, i, _| {
            let (a, b, mask) = (w.lanes(i, 1), w.lanes(i, 2), w.scalar64(i.o[3]));
            let x: Lanes = std::array::from_fn(|k| if mask >> k & 1 == 1 { b[k] } else { a[k] });
            w.put(i, &x);
            Next::Go
        },
        "v_readfirstlane_b32" => |w, i, _| {
            let value = w.scalar(i.o[1]);
            w.set_scalar(i.o[0], value);
            Next::Go
        },
        "v_readlane_b32" => |w, i, _| {
            let (Operand::V(from), lane) = (i.o[1], w.scalar(i.o[2]) as usize % LANES) else {
                return Next::Go;
            };
            let value = w.v[usize::from(from)][lane];
            w.set_scalar(i.o[0], value);
            Next::Go
        },
        "v_writelane_b32" => |w, i, _| {
            let (Operand::V(to), lane) = (i.o[0], w.scalar(i.o[2]) as usize % LANES) else {
                return Next::Go;
            };
            w.v[usize::from(to)][lane] = w.scalar(i.o[1]);
            Next::Go
        },
        "v_mbcnt_lo_u32_b32" => |w, i, _| below(w, i, 0),
        "v_mbcnt_hi_u32_b32" => |w, i, _| below(w, i, 32),
        _ => return None,
    })
}

/// A number and how many bits of a mask of 32 lanes from `first` on stand for lanes below.
fn below(w: &mut Wave, i: &Inst, first: usize) -> Next {
    let (mask, add) = (w.lanes(i, 1), w.lanes(i, 2));
    let x = std::array::from_fn(|k| {
        let lower = k.saturating_sub(first).min(32);
        let of_lower = ((1_u64 << lower) - 1) as u32;
        (mask[k] & of_lower).count_ones().wrapping_add(add[k])
    });
    w.put(i, &x);
    Next::Go
}

fn sums(base: &str) -> Option<Run> {
    Some(match base {
        "v_add_u32" => m2!(|a, b, i| if i.clamp { a.saturating_add(b) } else { a.wrapping_add(b) }),
        "v_sub_u32" => m2!(|a, b, i| if i.clamp { a.saturating_sub(b) } else { a.wrapping_sub(b) }),
        "v_subrev_u32" => m2!(|a, b| b.wrapping_sub(a)),
        "v_mul_lo_u32" => m2!(|a, b| a.wrapping_mul(b)),
        "v_mul_hi_u32" => m2!(|a, b| ((u64::from(a) * u64::from(b)) >> 32) as u32),
        "v_mul_hi_i32" => m2!(|a, b| ((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u32),
        "v_mul_u32_u24" => m2!(|a, b| low24(a).wrapping_mul(low24(b))),
        "v_mul_hi_u32_u24" => {
            m2!(|a, b| ((u64::from(low24(a)) * u64::from(low24(b))) >> 32) as u32)
        }
        "v_mul_i32_i24" => m2!(|a, b| low24s(a).wrapping_mul(low24s(b)) as u32),
        "v_mul_hi_i32_i24" => {
            m2!(|a, b| ((i64::from(low24s(a)) * i64::from(low24s(b))) >> 32) as u32)
        }
        "v_min_u32" => m2!(|a, b| a.min(b)),
        "v_max_u32" => m2!(|a, b| a.max(b)),
        "v_min_i32" => m2!(|a, b| (a as i32).min(b as i32) as u32),
        "v_max_i32" => m2!(|a, b| (a as i32).max(b as i32) as u32),
        _ => return None,
    })
}

fn bits(base: &str) -> Option<Run> {
    Some(match base {
        "v_and_b32" => m2!(|a, b| a & b),
        "v_or_b32" => m2!(|a, b| a | b),
        "v_xor_b32" => m2!(|a, b| a ^ b),
        "v_xnor_b32" => m2!(|a, b| !(a ^ b)),
        "v_not_b32" => m1!(|a| !a),
        "v_bfrev_b32" => m1!(|a| a.reverse_bits()),
        "v_ffbh_u32" => m1!(|a| if a == 0 { !0 } else { a.leading_zeros() }),
        "v_ffbl_b32" => m1!(|a| if a == 0 { !0 } else { a.trailing_zeros() }),
        "v_bcnt_u32_b32" => m2!(|a, b| a.count_ones().wrapping_add(b)),
        "v_lshlrev_b32" => m2!(|a, b| b << (a & 31)),
        "v_lshrrev_b32" => m2!(|a, b| b >> (a & 31)),
        "v_ashrrev_i32" => m2!(|a, b| (b as i32 >> (a & 31)) as u32),
        "v_pack_b32_f16" => m2!(|a, b, i| {
            let half = |x: u32, n: u32| x >> (16 * (i.op_sel >> n & 1)) & 0xffff;
            half(a, 0) | half(b, 1) << 16
        }),
        _ => return None,
    })
}

/// Numbers of 16 bits; the upper half of the result is 0.
fn short(base: &str) -> Option<Run> {
    Some(match base {
        "v_add_u16" => m2!(|a, b, i| {
            let sum = (a & 0xffff) + (b & 0xffff);
            if i.clamp {
                sum.min(0xffff)
            } else {
                sum & 0xffff
            }
        }),
        "v_sub_u16" => m2!(|a, b, i| {
            let (a, b) = (a & 0xffff, b & 0xffff);
            if i.clamp {
                a.saturating_sub(b)
            } else {
                a.wrapping_sub(b) & 0xffff
            }
        }),
        "v_subrev_u16" => m2!(|a, b| b.wrapping_sub(a) & 0xffff),
        "v_mul_lo_u16" => m2!(|a, b| a.wrapping_mul(b) & 0xffff),
        "v_mad_legacy_u16" | "v_mad_u16" => {
            m3!(|a, b, c| a.wrapping_mul(b).wrapping_add(c) & 0xffff)
        }
        "v_lshlrev_b16" => m2!(|a, b| b << (a & 15) & 0xffff),
        "v_lshrrev_b16" => m2!(|a, b| (b & 0xffff) >> (a & 15)),
        "v_ashrrev_i16" => m2!(|a, b| (i32::from(b as i16) >> (a & 15)) as u32 & 0xffff),
        "v_min_u16" => m2!(|a, b| (a & 0xffff).min(b & 0xffff)),
        "v_max_u16" => m2!(|a, b| (a & 0xffff).max(b & 0xffff)),
        "v_min_i16" => m2!(|a, b| (a as i16).min(b as i16) as u32 & 0xffff),
        "v_max_i16" => m2!(|a, b| (a as i16).max(b as i16) as u32 & 0xffff),
        _ => return None,
    })
}

/// Bits of `c` bytes chosen from two words by `v_perm_b32`.
fn chosen(a: u32, b: u32, c: u32) -> u32 {
    let all = u64::from(a) << 32 | u64::from(b);
    let byte = |n: u32| {
        let which = c >> (8 * n) & 0xff;
        match which {
            0..=7 => (all >> (8 * which)) as u32 & 0xff,
            // The sign of one of the four halves.
            8..=11 => 0xff * ((all >> (16 * (which - 8) + 15)) as u32 & 1),
            12 => 0,
            _ => 0xff,
        }
    };
    byte(0) | byte(1) << 8 | byte(2) << 16 | byte(3) << 24
}

fn three(base: &str) -> Option<Run> {
    Some(match base {
        "v_add3_u32" => m3!(|a, b, c| a.wrapping_add(b).wrapping_add(c)),
        "v_lshl_add_u32" => m3!(|a, b, c| (a << (b & 31)).wrapping_add(c)),
        "v_add_lshl_u32" => m3!(|a, b, c| a.wrapping_add(b) << (c & 31)),
        "v_lshl_or_b32" => m3!(|a, b, c| a << (b & 31) | c),
        "v_and_or_b32" => m3!(|a, b, c| a & b | c),
        "v_or3_b32" => m3!(|a, b, c| a | b | c),
        "v_xad_u32" => m3!(|a, b, c| (a ^ b).wrapping_add(c)),
        "v_bfi_b32" => m3!(|a, b, c| a & b | !a & c),
        "v_bfe_u32" => m3!(|a, b, c| a >> (b & 31) & ((1_u64 << (c & 31)) - 1) as u32),
        "v_bfe_i32" => m3!(|a, b, c| {
            let (part, count) = (a >> (b & 31), c & 31);
            let up = (32 - count) & 31;
            if count == 0 {
                0
            } else {
                ((part << up) as i32 >> up) as u32
            }
        }),
        "v_alignbit_b32" => m3!(|a, b, c| ((u64::from(a) << 32 | u64::from(b)) >> (c & 31)) as u32),
        "v_alignbyte_b32" => {
            m3!(|a, b, c| ((u64::from(a) << 32 | u64::from(b)) >> (8 * (c & 3))) as u32)
        }
        "v_perm_b32" => m3!(|a, b, c| chosen(a, b, c)),
        "v_mad_u32_u24" => m3!(|a, b, c| low24(a).wrapping_mul(low24(b)).wrapping_add(c)),
        "v_mad_i32_i24" => {
            m3!(|a, b, c| (low24s(a).wrapping_mul(low24s(b)) as u32).wrapping_add(c))
        }
        "v_min3_i32" => m3!(|a, b, c| (a as i32).min(b as i32).min(c as i32) as u32),
        "v_max3_i32" => m3!(|a, b, c| (a as i32).max(b as i32).max(c as i32) as u32),
        "v_med3_i32" => m3!(|a, b, c| {
            let (a, b, c) = (a as i32, b as i32, c as i32);
            a.max(b).min(a.min(b).max(c)) as u32
        }),
        "v_min3_u32" => m3!(|a, b, c| a.min(b).min(c)),
        "v_max3_u32" => m3!(|a, b, c| a.max(b).max(c)),
        "v_med3_u32" => m3!(|a, b, c| a.max(b).min(a.min(b).max(c))),
        _ => return None,
    })
}

/// A sum of two lanes and a carry, which goes on in a mask.
fn carry(w: &mut Wave, i: &Inst, of: fn(u32, u32, bool) -> (u32, bool)) -> Next {
    let (a, b, exec) = (w.lanes(i, 2), w.lanes(i, 3), w.exec());
    let carried = w.scalar64(i.o[4]);
    let (mut x, mut out) = ([0; LANES], 0);
    for k in 0..LANES {
        let (sum, carry) = of(a[k], b[k], carried >> k & 1 == 1);
        x[k] = sum;
        out |= u64::from(carry) << k;
    }
    w.put(i, &x);
    w.set_scalar64(i.o[1], out & exec);
    Next::Go
}

fn less(a: u32, b: u32, c: bool) -> (u32, bool) {
    let rest = i64::from(a) - i64::from(b) - i64::from(c);
    (rest as u32, rest < 0)
}

fn carries(base: &str) -> Option<Run> {
    fn sum(a: u32, b: u32, c: bool) -> (u32, bool) {
        let sum = u64::from(a) + u64::from(b) + u64::from(c);
        (sum as u32, sum >> 32 != 0)
    }
    Some(match base {
        "v_add_co_u32" | "v_addc_co_u32" => |w, i, _| carry(w, i, sum),
        "v_sub_co_u32" | "v_subb_co_u32" => |w, i, _| carry(w, i, less),
        "v_subrev_co_u32" | "v_subbrev_co_u32" => |w, i, _| carry(w, i, |a, b, c| less(b, a, c)),
        "v_mad_u64_u32" => |w, i, _| {
            let (a, b, c) = (w.lanes(i, 2), w.lanes(i, 3), w.lanes64(i, 4));
            product(w, i, |k| u128::from(a[k]) * u128::from(b[k]) + u128::from(c[k]))
        },
        "v_mad_i64_i32" => |w, i, _| {
            let (a, b, c) = (w.lanes(i, 2), w.lanes(i, 3), w.lanes64(i, 4));
            product(w, i, |k| {
                let product = i128::from(a[k] as i32) * i128::from(b[k] as i32);
                // Whether it leaves 64 bits is told as for a number without a sign.
                (product + i128::from(c[k] as i64)) as u128
            })
        },
        _ => return None,
    })
}

/// Products and sums of 64 bits; what does not fit is told in a mask.
fn product(w: &mut Wave, i: &Inst, of: impl Fn(usize) -> u128) -> Next {
    let (mut x, mut over) = ([0; LANES], 0);
    for k in 0..LANES {
        let all = of(k);
        x[k] = all as u64;
        over |= u64::from(all >> 64 & 1 != 0) << k;
    }
    let exec = w.exec();
    w.put64(i, &x);
    w.set_scalar64(i.o[1], over & exec);
    Next::Go
}

/// Lanes of 64 bits from one of 32 and one of 64.
fn shift(w: &mut Wave, i: &Inst, of: fn(u32, u64) -> u64) -> Next {
    let (a, b) = (w.lanes(i, 1), w.lanes64(i, 2));
    let x = std::array::from_fn(|k| of(a[k], b[k]));
    w.put64(i, &x);
    Next::Go
}

fn wide(base: &str) -> Option<Run> {
    Some(match base {
        "v_lshlrev_b64" => |w, i, _| shift(w, i, |a, b| b << (a & 63)),
        "v_lshrrev_b64" => |w, i, _| shift(w, i, |a, b| b >> (a & 63)),
        "v_ashrrev_i64" => |w, i, _| shift(w, i, |a, b| (b as i64 >> (a & 63)) as u64),
        "v_lshl_add_u64" => shift_and_add,
        _ => return None,
    })
}

fn shift_and_add(w: &mut Wave, i: &Inst, _: &mut World) -> Next {
    let (a, b, c) = (w.lanes64(i, 1), w.lanes(i, 2), w.lanes64(i, 3));
    let x = std::array::from_fn(|k| (a[k] << (b[k] & 7)).wrapping_add(c[k]));
    w.put64(i, &x);
    Next::Go
}
