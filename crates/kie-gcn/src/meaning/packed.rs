//! Two numbers at a time, and products of floats and halves mixed.

use crate::inst::{Inst, Operand, Run};
use crate::number::{larger, narrow, smaller, wide};
use crate::wave::{Lanes, Next, Wave, World, LANES};

/// What a mnemonic does.
pub(super) fn of(base: &str) -> Option<Run> {
    Some(match base {
        "v_pk_fma_f32" => |w, i, _| floats(w, i, |[a, b, c]| a.mul_add(b, c)),
        "v_pk_mul_f32" => |w, i, _| floats(w, i, |[a, b, _]| a * b),
        "v_pk_add_f32" => |w, i, _| floats(w, i, |[a, b, _]| a + b),
        "v_pk_mov_b32" => |w, i, _| {
            let (low, high) = (word(w, i, 1, i.op_sel & 1), word(w, i, 2, i.op_sel >> 1 & 1));
            put(w, i, &low, &high)
        },
        "v_pk_fma_f16" => |w, i, _| halves(w, i, |[a, b, c]| a.mul_add(b, c)),
        "v_pk_mul_f16" => |w, i, _| halves(w, i, |[a, b, _]| a * b),
        "v_pk_add_f16" => |w, i, _| halves(w, i, |[a, b, _]| a + b),
        "v_pk_max_f16" => |w, i, _| halves(w, i, |[a, b, _]| larger(a as f32, b as f32).into()),
        "v_pk_min_f16" => |w, i, _| halves(w, i, |[a, b, _]| smaller(a as f32, b as f32).into()),
        "v_pk_add_u16" => |w, i, _| shorts(w, i, |[a, b, _]| a.wrapping_add(b)),
        "v_pk_sub_i16" | "v_pk_sub_u16" => |w, i, _| shorts(w, i, |[a, b, _]| a.wrapping_sub(b)),
        "v_pk_mul_lo_u16" => |w, i, _| shorts(w, i, |[a, b, _]| a.wrapping_mul(b)),
        "v_pk_mad_u16" => |w, i, _| shorts(w, i, |[a, b, c]| a.wrapping_mul(b).wrapping_add(c)),
        "v_pk_lshlrev_b16" => |w, i, _| shorts(w, i, |[a, b, _]| b << (a & 15)),
        "v_pk_lshrrev_b16" => |w, i, _| shorts(w, i, |[a, b, _]| b >> (a & 15)),
        "v_pk_ashrrev_i16" => |w, i, _| shorts(w, i, |[a, b, _]| (b as i16 >> (a & 15)) as u16),
        "v_pk_max_i16" => |w, i, _| shorts(w, i, |[a, b, _]| (a as i16).max(b as i16) as u16),
        "v_pk_min_i16" => |w, i, _| shorts(w, i, |[a, b, _]| (a as i16).min(b as i16) as u16),
        "v_pk_max_u16" => |w, i, _| shorts(w, i, |[a, b, _]| a.max(b)),
        "v_pk_min_u16" => |w, i, _| shorts(w, i, |[a, b, _]| a.min(b)),
        "v_fma_mix_f32" => |w, i, _| {
            let x = mixed(w, i).map(f32::to_bits);
            w.put(i, &x);
            Next::Go
        },
        "v_mfma_f32_16x16x16_f16" => matrix,
        "v_fma_mixlo_f16" => |w, i, _| half_of(w, i, 0),
        "v_fma_mixhi_f16" => |w, i, _| half_of(w, i, 16),
        _ => return None,
    })
}

/// The matrix unit: d (16 x 16) = a (16 x 16) b (16 x 16) + c. Lane 16 t + n has k 4 t .. of row n
/// of a and of column n of b, halves, and rows 4 t .. of column n of c and d, floats. It works for
/// all lanes, whoever is at work. In which order it adds is not documented: here a sum is rounded
/// once.
fn matrix(w: &mut Wave, i: &Inst, world: &mut World) -> Next {
    let (Operand::V(d), Operand::V(a), Operand::V(b)) = (i.o[0], i.o[1], i.o[2]) else {
        return world.fail("a matrix that is not in vector registers".to_owned());
    };
    let before: [Lanes; 4] = match i.o[3] {
        Operand::V(c) => std::array::from_fn(|n| w.v[usize::from(c) + n]),
        Operand::Value(0) => [[0; LANES]; 4],
        _ => return world.fail("a constant for a matrix".to_owned()),
    };
    // [row or column][k]
    let halves = |from: u8| -> [[f64; 16]; 16] {
        let one = |n: usize, k: usize| {
            let word = w.v[usize::from(from) + k % 4 / 2][k / 4 * 16 + n];
            f64::from(wide(word >> (k % 2 * 16) & 0xffff))
        };
        std::array::from_fn(|n| std::array::from_fn(|k| one(n, k)))
    };
    let (rows, columns) = (halves(a), halves(b));
    for (n, before) in before.iter().enumerate() {
        w.v[usize::from(d) + n] = std::array::from_fn(|lane| {
            let (row, column) = (&rows[lane / 16 * 4 + n], &columns[lane % 16]);
            let products = row.iter().zip(column).map(|(x, y)| x * y);
            (f64::from(f32::from_bits(before[lane])) + products.sum::<f64>()) as f32
        })
        .map(f32::to_bits);
    }
    Next::Go
}

/// Operand `n`, or the register behind it.
fn word(w: &Wave, i: &Inst, n: usize, behind: u8) -> Lanes {
    match i.o[n] {
        Operand::V(at) => w.v[usize::from(at + behind)],
        Operand::S(at) => [w.s[usize::from(at + behind)]; LANES],
        from => [w.scalar(from); LANES],
    }
}

/// Whether operand `n` (from 1 on) has its bit.
fn bit(mask: u8, n: usize) -> u8 {
    mask >> (n - 1) & 1
}

fn put(w: &mut Wave, i: &Inst, low: &Lanes, high: &Lanes) -> Next {
    if let Operand::V(at) = i.o[0] {
        w.put_at(at, low);
        w.put_at(at + 1, high);
    }
    Next::Go
}

fn floats(w: &mut Wave, i: &Inst, of: fn([f32; 3]) -> f32) -> Next {
    let side = |select: u8, negate: u8| -> Lanes {
        let all: [Lanes; 3] = std::array::from_fn(|n| {
            let flip = u32::from(bit(negate, n + 1)) << 31;
            word(w, i, n + 1, bit(select, n + 1)).map(|x| x ^ flip)
        });
        std::array::from_fn(|k| {
            let x = of([0, 1, 2].map(|n| f32::from_bits(all[n][k])));
            f32::to_bits(if i.clamp { smaller(larger(x, 0.0), 1.0) } else { x })
        })
    };
    let (low, high) = (side(i.op_sel, i.neg_lo), side(i.op_sel_hi, i.neg_hi));
    put(w, i, &low, &high)
}

/// The halves of three operands that one half of the result comes from.
fn picked(w: &Wave, i: &Inst, select: u8, negate: u8) -> [Lanes; 3] {
    std::array::from_fn(|n| {
        let (down, flip) = (16 * bit(select, n + 1), u32::from(bit(negate, n + 1)) << 15);
        word(w, i, n + 1, 0).map(|x| (x >> down & 0xffff) ^ flip)
    })
}

/// In doubles, where products and sums of halves are exact but for a last rounding.
fn halves(w: &mut Wave, i: &Inst, of: fn([f64; 3]) -> f64) -> Next {
    let side = |select: u8, negate: u8| -> Lanes {
        let all = picked(w, i, select, negate);
        std::array::from_fn(|k| {
            let x = of([0, 1, 2].map(|n| f64::from(wide(all[n][k]))));
            // Rounded to odd on its way through a float, so that it is rounded once in the end.
            let x = odd(x);
            narrow(if i.clamp { smaller(larger(x, 0.0), 1.0) } else { x })
        })
    };
    let (low, high) = (side(i.op_sel, i.neg_lo), side(i.op_sel_hi, i.neg_hi));
    let x = std::array::from_fn(|k| low[k] | high[k] << 16);
    w.put(i, &x);
    Next::Go
}

/// The float towards zero from `x`, its last bit set where it is not `x` itself.
fn odd(x: f64) -> f32 {
    let near = x as f32;
    if f64::from(near) == x || !near.is_finite() || x.is_nan() {
        return near;
    }
    let towards = if f64::from(near).abs() > x.abs() { near.to_bits() - 1 } else { near.to_bits() };
    f32::from_bits(towards | 1)
}

fn shorts(w: &mut Wave, i: &Inst, of: fn([u16; 3]) -> u16) -> Next {
    let (low, high) = (picked(w, i, i.op_sel, 0), picked(w, i, i.op_sel_hi, 0));
    let one = |all: &[Lanes; 3], k: usize| u32::from(of([0, 1, 2].map(|n| all[n][k] as u16)));
    let x = std::array::from_fn(|k| one(&low, k) | one(&high, k) << 16);
    w.put(i, &x);
    Next::Go
}

/// `a * b + c`, rounded once, of floats or of halves that `op_sel` picks.
fn mixed(w: &Wave, i: &Inst) -> [f32; LANES] {
    let operand = |n: usize| -> [f32; LANES] {
        let x = word(w, i, n, 0);
        let is_half = bit(i.op_sel_hi, n) == 1;
        let down = 16 * bit(i.op_sel, n);
        let (negative, size) = (i.neg >> n & 1 == 1, i.abs >> n & 1 == 1);
        x.map(|x| {
            let x = if is_half { wide(x >> down & 0xffff) } else { f32::from_bits(x) };
            let x = if size { x.abs() } else { x };
            if negative {
                -x
            } else {
                x
            }
        })
    };
    let (a, b, c) = (operand(1), operand(2), operand(3));
    std::array::from_fn(|k| {
        let x = a[k].mul_add(b[k], c[k]);
        if i.clamp {
            smaller(larger(x, 0.0), 1.0)
        } else {
            x
        }
    })
}

/// Into the half of the register that begins at bit `at`; the other stays.
fn half_of(w: &mut Wave, i: &Inst, at: u32) -> Next {
    let (x, Operand::V(to)) = (mixed(w, i), i.o[0]) else { return Next::Go };
    let before = w.v[usize::from(to)];
    let out = std::array::from_fn(|k| before[k] & !(0xffff << at) | narrow(x[k]) << at);
    w.put_at(to, &out);
    Next::Go
}
