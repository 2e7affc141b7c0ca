//! What each mnemonic does: one line an instruction, after AMD's description of the instruction set
//! (CDNA3). Whoever is not named here is refused.

mod access;
mod compare;
mod float;
mod lanes;
mod packed;
mod scalar;
mod vector;

use crate::inst::{Inst, Operand, Run};

/// What an instruction's numbers are: how its constants are written, where its signs are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Bits or whole numbers.
    Whole,
    /// Halves.
    F16,
    /// Floats.
    F32,
    /// Doubles.
    F64,
}

/// What a mnemonic without its encoding's suffix does.
pub(crate) fn of(base: &str) -> Option<Run> {
    if base.starts_with("s_") {
        return scalar::of(base).or_else(|| access::of(base));
    }
    if base.starts_with("v_cmp_") {
        return compare::of(base);
    }
    if base.starts_with("v_") {
        return vector::of(base).or_else(|| float::of(base)).or_else(|| packed::of(base));
    }
    access::of(base)
}

/// Whether its first operand is filled some time later.
pub(crate) fn fills(base: &str) -> bool {
    let loads =
        ["global_load", "flat_load", "ds_read", "s_load", "ds_bpermute", "ds_swizzle", "s_mem"];
    let direct = base.starts_with("global_load_lds");
    loads.iter().any(|load| base.starts_with(load)) && !direct || base.contains("_rtn_")
}

/// What its sources are.
pub(crate) fn kind(base: &str) -> Kind {
    let last = base.rsplit('_').next().unwrap_or("");
    let source =
        if base.starts_with("v_dot2") || base.starts_with("v_fma_mix") { "f32" } else { last };
    match source {
        "f16" => Kind::F16,
        "f32" => Kind::F32,
        "f64" => Kind::F64,
        _ => Kind::Whole,
    }
}

/// The instruction, unless it has what nothing here looks at.
pub(crate) fn checked(base: &str, inst: Inst) -> Option<Inst> {
    let halves = base.starts_with("v_pk_") || base.starts_with("v_fma_mix");
    let low = halves || base == "v_pack_b32_f16";
    let carries = base.contains("_co_") || base.starts_with("v_mad_") || base.starts_with("v_div_");
    let is_part = inst.part.iter().any(|part| part.bits < 32 || part.signed);
    let whole = kind(base) == Kind::Whole && base != "v_cndmask_b32";
    let saturates =
        inst.clamp && !["v_sub_u16", "v_add_u16", "v_sub_u32", "v_add_u32"].contains(&base);
    let signs = inst.neg | inst.abs != 0;
    let fine = (halves || inst.op_sel_hi | inst.neg_lo | inst.neg_hi == 0)
        && (low || inst.op_sel == 0)
        && !(carries && is_part)
        && !(whole && (signs || saturates || inst.omod != 1.0))
        && (inst.quad.is_none() || matches!(inst.o[1], Operand::V(_)));
    fine.then_some(inst)
}
