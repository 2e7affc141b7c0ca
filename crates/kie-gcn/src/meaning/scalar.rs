//! Scalar instructions: numbers of a wave, masks of lanes, and where it goes on.

use crate::inst::{Inst, Run, EXEC, VCC};
use crate::wave::{Next, Wave, World};

/// One number from two; the condition stays.
macro_rules! s2 {
    (|$a:ident, $b:ident| $e:expr) => {
        |w, i, _| {
            let ($a, $b) = (w.scalar(i.o[1]), w.scalar(i.o[2]));
            w.set_scalar(i.o[0], $e);
            Next::Go
        }
    };
}
/// One number and the condition from two and the condition.
macro_rules! s2c {
    (|$a:ident, $b:ident, $c:ident| $e:expr) => {
        |w, i, _| {
            let ($a, $b, $c): (u32, u32, bool) = (w.scalar(i.o[1]), w.scalar(i.o[2]), w.scc);
            let (value, scc): (u32, bool) = $e;
            w.set_scalar(i.o[0], value);
            w.scc = scc;
            Next::Go
        }
    };
}
/// The condition is whether the result is not 0.
macro_rules! bits {
    (|$a:ident, $b:ident| $e:expr) => {
        |w, i, _| {
            let ($a, $b): (u32, u32) = (w.scalar(i.o[1]), w.scalar(i.o[2]));
            let value: u32 = $e;
            w.set_scalar(i.o[0], value);
            w.scc = value != 0;
            Next::Go
        }
    };
}
macro_rules! bits64 {
    (|$a:ident, $b:ident| $e:expr) => {
        |w, i, _| {
            let ($a, $b): (u64, u64) = (w.scalar64(i.o[1]), w.scalar64(i.o[2]));
            let value: u64 = $e;
            w.set_scalar64(i.o[0], value);
            w.scc = value != 0;
            Next::Go
        }
    };
}
/// Of 64 bits, by a number of 32.
macro_rules! shift64 {
    (|$a:ident, $b:ident| $e:expr) => {
        |w, i, _| {
            let ($a, $b): (u64, u32) = (w.scalar64(i.o[1]), w.scalar(i.o[2]));
            let value: u64 = $e;
            w.set_scalar64(i.o[0], value);
            w.scc = value != 0;
            Next::Go
        }
    };
}
/// The condition from two numbers.
macro_rules! cmp {
    (|$a:ident, $b:ident| $e:expr) => {
        |w, i, _| {
            let ($a, $b): (u32, u32) = (w.scalar(i.o[0]), w.scalar(i.o[1]));
            w.scc = $e;
            Next::Go
        }
    };
}
/// A number and one that stands in the instruction, with its sign.
macro_rules! with_own {
    (|$a:ident, $b:ident, $c:ident| $e:expr) => {
        |w, i, _| {
            let ($a, $b) = (w.scalar(i.o[0]) as i32, i32::from(w.scalar(i.o[1]) as i16));
            let $c = w.scc;
            let (value, scc): (i32, bool) = $e;
            w.set_scalar(i.o[0], value as u32);
            w.scc = scc;
            Next::Go
        }
    };
}
/// Lanes at work from a mask and the lanes before, which are kept.
macro_rules! save {
    (|$a:ident, $b:ident| $e:expr) => {
        |w, i, _| {
            let ($a, $b): (u64, u64) = (w.scalar64(i.o[1]), w.exec());
            let value: u64 = $e;
            w.set_scalar64(i.o[0], $b);
            w.set64(EXEC, value);
            w.scc = value != 0;
            Next::Go
        }
    };
}
macro_rules! branch {
    (|$w:ident| $e:expr) => {
        |$w, i, _| if $e { jump($w, i.to) } else { Next::Go }
    };
}

/// Goes to `to`. A loop that goes back having stored nothing and seen what it saw before lets
/// others run.
fn jump(w: &mut Wave, to: usize) -> Next {
    let from = w.pc;
    w.pc = to;
    if to > from {
        return Next::Jump;
    }
    let vain = w.poll.at == from && w.poll.seen == w.poll.now && !w.poll.stored;
    (w.poll.at, w.poll.seen) = (from, w.poll.now);
    let loaded = w.poll.loaded;
    (w.poll.now, w.poll.stored, w.poll.loaded) = (0, false, false);
    w.poll.global_before = std::mem::take(&mut w.poll.global);
    if vain && loaded {
        Next::Vain
    } else {
        Next::Jump
    }
}

/// What a scalar mnemonic does.
pub(super) fn of(base: &str) -> Option<Run> {
    let whole = || sums(base).or_else(|| parts(base));
    let wide = || masks(base).or_else(|| saves(base));
    goes(base).or_else(whole).or_else(wide).or_else(|| chooses(base)).or_else(|| compares(base))
}

/// Where a wave goes on.
fn goes(base: &str) -> Option<Run> {
    Some(match base {
        "s_nop" | "s_setprio" => |_, _, _| Next::Go,
        "s_sleep" => |w, i, world| {
            // 64 clocks for each.
            w.wakes_ns = world.now_ns + u64::from(w.scalar(i.o[0])) * 30;
            Next::Rest
        },
        "s_endpgm" => |_, _, _| Next::End,
        "s_barrier" => |_, _, _| Next::Barrier,
        "s_trap" => |_, _, world| world.fail("the kernel trapped".to_owned()),
        "s_branch" | "s_setpc_b64" => |w, i, _| jump(w, i.to),
        "s_cbranch_scc0" => branch!(|w| !w.scc),
        "s_cbranch_scc1" => branch!(|w| w.scc),
        "s_cbranch_vccz" => branch!(|w| w.get64(VCC) == 0),
        "s_cbranch_vccnz" => branch!(|w| w.get64(VCC) != 0),
        "s_cbranch_execz" => branch!(|w| w.exec() == 0),
        "s_cbranch_execnz" => branch!(|w| w.exec() != 0),
        _ => return None,
    })
}

fn copy(w: &mut Wave, i: &Inst, _: &mut World) -> Next {
    let value = w.scalar(i.o[1]);
    w.set_scalar(i.o[0], value);
    Next::Go
}

fn shifted(a: u32, by: u32, b: u32) -> (u32, bool) {
    let sum = (u64::from(a) << by) + u64::from(b);
    (sum as u32, sum >> 32 != 0)
}

/// Sums and products of 32 bits.
fn sums(base: &str) -> Option<Run> {
    Some(match base {
        "s_mov_b32" => copy,
        "s_movk_i32" => s2!(|a, _b| i32::from(a as i16) as u32),
        "s_add_i32" => s2c!(|a, b, _c| {
            let (sum, over) = (a as i32).overflowing_add(b as i32);
            (sum as u32, over)
        }),
        "s_sub_i32" => s2c!(|a, b, _c| {
            let (rest, over) = (a as i32).overflowing_sub(b as i32);
            (rest as u32, over)
        }),
        "s_add_u32" => s2c!(|a, b, _c| a.overflowing_add(b)),
        "s_sub_u32" => s2c!(|a, b, _c| a.overflowing_sub(b)),
        "s_addc_u32" => s2c!(|a, b, c| {
            let sum = u64::from(a) + u64::from(b) + u64::from(c);
            (sum as u32, sum >> 32 != 0)
        }),
        "s_subb_u32" => s2c!(|a, b, c| {
            let rest = i64::from(a) - i64::from(b) - i64::from(c);
            (rest as u32, rest < 0)
        }),
        "s_addk_i32" => with_own!(|a, b, _c| a.overflowing_add(b)),
        "s_mulk_i32" => with_own!(|a, b, c| (a.wrapping_mul(b), c)),
        "s_min_i32" => s2c!(|a, b, _c| ((a as i32).min(b as i32) as u32, (a as i32) < b as i32)),
        "s_max_i32" => s2c!(|a, b, _c| ((a as i32).max(b as i32) as u32, (a as i32) > b as i32)),
        "s_min_u32" => s2c!(|a, b, _c| (a.min(b), a < b)),
        "s_max_u32" => s2c!(|a, b, _c| (a.max(b), a > b)),
        "s_mul_i32" => s2!(|a, b| a.wrapping_mul(b)),
        "s_mul_hi_u32" => s2!(|a, b| ((u64::from(a) * u64::from(b)) >> 32) as u32),
        "s_mul_hi_i32" => s2!(|a, b| ((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u32),
        "s_lshl1_add_u32" => s2c!(|a, b, _c| shifted(a, 1, b)),
        "s_lshl2_add_u32" => s2c!(|a, b, _c| shifted(a, 2, b)),
        "s_lshl3_add_u32" => s2c!(|a, b, _c| shifted(a, 3, b)),
        "s_lshl4_add_u32" => s2c!(|a, b, _c| shifted(a, 4, b)),
        "s_abs_i32" => bits!(|a, _b| (a as i32).unsigned_abs()),
        _ => return None,
    })
}

/// The bits that `what` names: from its lowest bits on, as many as it has above bit 16.
fn field(from: u64, what: u32) -> u64 {
    let (at, count) = (what & 0x3f, what >> 16 & 0x7f);
    let mask = if count >= 64 { !0 } else { (1 << count) - 1 };
    from >> at & mask
}

/// A number of `count` bits of at most `most`, with its sign.
fn signed(field: u64, count: u32, most: u32) -> i64 {
    match count.min(most) {
        0 => 0,
        count => (field << (64 - count)) as i64 >> (64 - count),
    }
}

/// Bits of numbers of 32 bits.
fn parts(base: &str) -> Option<Run> {
    Some(match base {
        "s_lshl_b32" => bits!(|a, b| a << (b & 31)),
        "s_lshr_b32" => bits!(|a, b| a >> (b & 31)),
        "s_ashr_i32" => bits!(|a, b| (a as i32 >> (b & 31)) as u32),
        "s_and_b32" => bits!(|a, b| a & b),
        "s_or_b32" => bits!(|a, b| a | b),
        "s_xor_b32" => bits!(|a, b| a ^ b),
        "s_andn2_b32" => bits!(|a, b| a & !b),
        "s_orn2_b32" => bits!(|a, b| a | !b),
        "s_xnor_b32" => bits!(|a, b| !(a ^ b)),
        "s_not_b32" => bits!(|a, _b| !a),
        "s_bcnt1_i32_b32" => bits!(|a, _b| a.count_ones()),
        "s_bfe_u32" => bits!(|a, b| field(a.into(), b & !0x20) as u32),
        "s_bfe_i32" => bits!(|a, b| signed(field(a.into(), b & !0x20), b >> 16 & 0x7f, 32) as u32),
        "s_bfm_b32" => s2!(|a, b| ((1_u32 << (a & 31)) - 1) << (b & 31)),
        "s_brev_b32" => s2!(|a, _b| a.reverse_bits()),
        "s_ff1_i32_b32" => s2!(|a, _b| if a == 0 { !0 } else { a.trailing_zeros() }),
        "s_flbit_i32_b32" => s2!(|a, _b| if a == 0 { !0 } else { a.leading_zeros() }),
        "s_sext_i32_i8" => s2!(|a, _b| i32::from(a as i8) as u32),
        "s_sext_i32_i16" => s2!(|a, _b| i32::from(a as i16) as u32),
        "s_pack_ll_b32_b16" => s2!(|a, b| a & 0xffff | b << 16),
        "s_pack_lh_b32_b16" => s2!(|a, b| a & 0xffff | b & 0xffff_0000),
        "s_pack_hh_b32_b16" => s2!(|a, b| a >> 16 | b & 0xffff_0000),
        "s_bitset0_b32" => |w, i, _| {
            let value = w.scalar(i.o[0]) & !(1 << (w.scalar(i.o[1]) & 31));
            w.set_scalar(i.o[0], value);
            Next::Go
        },
        "s_bitset1_b32" => |w, i, _| {
            let value = w.scalar(i.o[0]) | 1 << (w.scalar(i.o[1]) & 31);
            w.set_scalar(i.o[0], value);
            Next::Go
        },
        _ => return None,
    })
}

/// What is counted in a number of 64 bits.
fn count(w: &mut Wave, i: &Inst, of: fn(u64) -> u32) -> Next {
    let mask = w.scalar64(i.o[1]);
    w.set_scalar(i.o[0], of(mask));
    Next::Go
}

/// Numbers of 64 bits, which are mostly masks of lanes.
fn masks(base: &str) -> Option<Run> {
    Some(match base {
        "s_mov_b64" => |w, i, _| {
            let value = w.scalar64(i.o[1]);
            w.set_scalar64(i.o[0], value);
            Next::Go
        },
        "s_getpc_b64" => |w, i, world| {
            w.set_scalar64(i.o[0], world.image.wrapping_add_signed(i.imm));
            Next::Go
        },
        "s_and_b64" => bits64!(|a, b| a & b),
        "s_or_b64" => bits64!(|a, b| a | b),
        "s_xor_b64" => bits64!(|a, b| a ^ b),
        "s_andn2_b64" => bits64!(|a, b| a & !b),
        "s_orn2_b64" => bits64!(|a, b| a | !b),
        "s_nand_b64" => bits64!(|a, b| !(a & b)),
        "s_nor_b64" => bits64!(|a, b| !(a | b)),
        "s_xnor_b64" => bits64!(|a, b| !(a ^ b)),
        "s_not_b64" => bits64!(|a, _b| !a),
        "s_lshl_b64" => shift64!(|a, b| a << (b & 63)),
        "s_lshr_b64" => shift64!(|a, b| a >> (b & 63)),
        "s_ashr_i64" => shift64!(|a, b| (a as i64 >> (b & 63)) as u64),
        "s_bfe_u64" => shift64!(|a, b| field(a, b)),
        "s_bfe_i64" => shift64!(|a, b| signed(field(a, b), b >> 16 & 0x7f, 64) as u64),
        "s_bcnt1_i32_b64" => |w, i, _| {
            let value = w.scalar64(i.o[1]).count_ones();
            w.set_scalar(i.o[0], value);
            w.scc = value != 0;
            Next::Go
        },
        "s_ff1_i32_b64" => {
            |w, i, _| count(w, i, |mask| if mask == 0 { !0 } else { mask.trailing_zeros() })
        }
        "s_flbit_i32_b64" => {
            |w, i, _| count(w, i, |mask| if mask == 0 { !0 } else { mask.leading_zeros() })
        }
        _ => return None,
    })
}

/// Lanes at work, the old ones kept.
fn saves(base: &str) -> Option<Run> {
    Some(match base {
        "s_and_saveexec_b64" => save!(|a, b| a & b),
        "s_or_saveexec_b64" => save!(|a, b| a | b),
        "s_xor_saveexec_b64" => save!(|a, b| a ^ b),
        "s_andn2_saveexec_b64" => save!(|a, b| a & !b),
        "s_andn1_saveexec_b64" => save!(|a, b| !a & b),
        "s_orn2_saveexec_b64" => save!(|a, b| a | !b),
        _ => return None,
    })
}

/// Choices by the condition.
fn chooses(base: &str) -> Option<Run> {
    Some(match base {
        "s_cselect_b32" => |w, i, _| {
            let value = w.scalar(i.o[if w.scc { 1 } else { 2 }]);
            w.set_scalar(i.o[0], value);
            Next::Go
        },
        "s_cmov_b32" => |w, i, _| {
            let value = w.scalar(i.o[if w.scc { 1 } else { 0 }]);
            w.set_scalar(i.o[0], value);
            Next::Go
        },
        "s_cselect_b64" => |w, i, _| {
            let value = w.scalar64(i.o[if w.scc { 1 } else { 2 }]);
            w.set_scalar64(i.o[0], value);
            Next::Go
        },
        "s_cmov_b64" => |w, i, _| {
            let value = w.scalar64(i.o[if w.scc { 1 } else { 0 }]);
            w.set_scalar64(i.o[0], value);
            Next::Go
        },
        _ => return None,
    })
}

/// The condition from two numbers.
fn compares(base: &str) -> Option<Run> {
    Some(match base {
        "s_cmp_eq_u32" | "s_cmp_eq_i32" => cmp!(|a, b| a == b),
        "s_cmp_lg_u32" | "s_cmp_lg_i32" => cmp!(|a, b| a != b),
        "s_cmp_lt_u32" => cmp!(|a, b| a < b),
        "s_cmp_le_u32" => cmp!(|a, b| a <= b),
        "s_cmp_gt_u32" => cmp!(|a, b| a > b),
        "s_cmp_ge_u32" => cmp!(|a, b| a >= b),
        "s_cmp_lt_i32" => cmp!(|a, b| (a as i32) < b as i32),
        "s_cmp_le_i32" => cmp!(|a, b| a as i32 <= b as i32),
        "s_cmp_gt_i32" => cmp!(|a, b| a as i32 > b as i32),
        "s_cmp_ge_i32" => cmp!(|a, b| a as i32 >= b as i32),
        // The number in the instruction has a sign, or none.
        "s_cmpk_eq_i32" => cmp!(|a, b| a as i32 == i32::from(b as i16)),
        "s_cmpk_lg_i32" => cmp!(|a, b| a as i32 != i32::from(b as i16)),
        "s_cmpk_lt_i32" => cmp!(|a, b| (a as i32) < i32::from(b as i16)),
        "s_cmpk_le_i32" => cmp!(|a, b| a as i32 <= i32::from(b as i16)),
        "s_cmpk_gt_i32" => cmp!(|a, b| a as i32 > i32::from(b as i16)),
        "s_cmpk_ge_i32" => cmp!(|a, b| a as i32 >= i32::from(b as i16)),
        "s_cmpk_eq_u32" => cmp!(|a, b| a == b & 0xffff),
        "s_cmpk_lg_u32" => cmp!(|a, b| a != b & 0xffff),
        "s_cmpk_lt_u32" => cmp!(|a, b| a < b & 0xffff),
        "s_cmpk_le_u32" => cmp!(|a, b| a <= b & 0xffff),
        "s_cmpk_gt_u32" => cmp!(|a, b| a > b & 0xffff),
        "s_cmpk_ge_u32" => cmp!(|a, b| a >= b & 0xffff),
        "s_bitcmp0_b32" => cmp!(|a, b| a >> (b & 31) & 1 == 0),
        "s_bitcmp1_b32" => cmp!(|a, b| a >> (b & 31) & 1 == 1),
        "s_bitcmp0_b64" => |w, i, _| {
            w.scc = w.scalar64(i.o[0]) >> (w.scalar(i.o[1]) & 63) & 1 == 0;
            Next::Go
        },
        "s_bitcmp1_b64" => |w, i, _| {
            w.scc = w.scalar64(i.o[0]) >> (w.scalar(i.o[1]) & 63) & 1 == 1;
            Next::Go
        },
        "s_cmp_eq_u64" => |w, i, _| {
            w.scc = w.scalar64(i.o[0]) == w.scalar64(i.o[1]);
            Next::Go
        },
        "s_cmp_lg_u64" => |w, i, _| {
            w.scc = w.scalar64(i.o[0]) != w.scalar64(i.o[1]);
            Next::Go
        },
        _ => return None,
    })
}
