//! An instruction made ready to run: what it does as a function, its operands as places.

use std::collections::BTreeMap;

use crate::clocks::{self, Clocks};
use crate::meaning::{self, Kind};
use crate::text::{far, Function, Line};
use crate::wave::{Next, Wave, World};
use crate::Fault;

/// What an instruction does.
pub(crate) type Run = fn(&mut Wave, &Inst, &mut World) -> Next;

/// Numbers of special scalar registers.
pub(crate) const VCC: u8 = 106;
/// The memory register.
pub(crate) const M0: u8 = 124;
/// Lanes at work.
pub(crate) const EXEC: u8 = 126;
/// The upper half of addresses in shared memory.
pub(crate) const SHARED_APERTURE: u64 = 0x0100_0000;

/// Where a number comes from or goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operand {
    /// Nothing stands there.
    None,
    /// Scalar registers from this one on.
    S(u8),
    /// Vector registers from this one on.
    V(u8),
    /// A number, widened as the instruction wants it.
    Value(u64),
}

/// A part of a register, as SDWA has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Part {
    /// Its lowest bit.
    pub(crate) at: u8,
    /// Its bits.
    pub(crate) bits: u8,
    /// Widened with its sign.
    pub(crate) signed: bool,
}

const WHOLE: Part = Part { at: 0, bits: 32, signed: false };

/// What a part that is written does to the rest of the register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rest {
    /// Becomes 0.
    Pad,
    /// Gets the part's sign.
    Sign,
    /// Stays.
    Keep,
}

/// One instruction.
pub(crate) struct Inst {
    pub(crate) run: Run,
    /// As they stand in the text, without keywords such as `off`.
    pub(crate) o: [Operand; 5],
    /// An offset, or the number that the instruction is about.
    pub(crate) imm: i64,
    /// A second offset.
    pub(crate) imm2: i64,
    /// Where a branch goes.
    pub(crate) to: usize,
    /// 1: sc0, 2: sc1, 4: nt.
    pub(crate) scope: u8,
    /// Operands that are negated, by bit, and of which the size is taken; first the latter.
    pub(crate) neg: u8,
    pub(crate) abs: u8,
    /// Any of the following, or of `neg` and `abs`.
    pub(crate) modified: bool,
    /// Results are kept between 0 and 1, or from wrapping round.
    pub(crate) clamp: bool,
    /// Results are multiplied.
    pub(crate) omod: f32,
    /// Of operands; the first is the result's.
    pub(crate) part: [Part; 3],
    pub(crate) rest: Rest,
    /// Lanes of each four that a first source comes from.
    pub(crate) quad: Option<[u8; 4]>,
    /// Halves of packed operands, by bit.
    pub(crate) op_sel: u8,
    pub(crate) op_sel_hi: u8,
    pub(crate) neg_lo: u8,
    pub(crate) neg_hi: u8,
    /// Registers that it reads or writes, which must not be awaited.
    pub(crate) uses_v: [u64; 4],
    pub(crate) uses_s: u128,
    /// Registers that it has filled once it was waited for.
    pub(crate) fills_v: [u64; 4],
    pub(crate) fills_s: u128,
    /// Where its numbers' signs are.
    pub(crate) kind: Kind,
    /// What it keeps busy.
    pub(crate) clocks: Clocks,
}

/// Numbers of registers: `v3`, `s[4:7]`.
fn registers(word: &str) -> Option<(u8, u8)> {
    let digits = |text: &str| text.parse::<u8>().ok();
    match word.strip_prefix('[').and_then(|range| range.strip_suffix(']')) {
        None => digits(word).map(|at| (at, 1)),
        Some(range) => {
            let (from, to) = range.split_once(':').unwrap_or((range, range));
            let (from, to) = (digits(from)?, digits(to)?);
            Some((from, to.checked_sub(from)?.checked_add(1)?))
        }
    }
}

/// A place, and how many registers it has.
fn place(word: &str) -> Option<(Operand, u8)> {
    let named = match word {
        "vcc" => (Operand::S(VCC), 2),
        "vcc_lo" => (Operand::S(VCC), 1),
        "vcc_hi" => (Operand::S(VCC + 1), 1),
        "exec" => (Operand::S(EXEC), 2),
        "exec_lo" => (Operand::S(EXEC), 1),
        "exec_hi" => (Operand::S(EXEC + 1), 1),
        "m0" => (Operand::S(M0), 1),
        "flat_scratch" => (Operand::S(102), 2),
        "src_shared_base" => (Operand::Value(SHARED_APERTURE << 32), 0),
        _ => {
            let (first, rest) = word.split_at_checked(1)?;
            let (at, count) = registers(rest)?;
            return match first {
                "s" if u16::from(at) + u16::from(count) <= 102 => Some((Operand::S(at), count)),
                "v" if u16::from(at) + u16::from(count) <= 256 => Some((Operand::V(at), count)),
                _ => None,
            };
        }
    };
    Some(named)
}

/// A constant, as an instruction over such numbers gets it.
fn constant(word: &str, kind: Kind) -> Option<u64> {
    if let Some(hex) = word.strip_prefix("0x") {
        let value = u64::from_str_radix(hex, 16).ok()?;
        // Of a number of 64 bits with a point the text has the upper half.
        return Some(if kind == Kind::F64 { value << 32 } else { value });
    }
    if let Ok(whole) = word.parse::<i64>() {
        return Some(whole as u64);
    }
    let number: f64 = word.parse().ok()?;
    // The one constant that no decimal of this length says exactly.
    let is_inverse = word.starts_with("0.1591549");
    Some(match kind {
        Kind::F64 if is_inverse => 0x3fc4_5f30_6dc9_c882,
        Kind::F64 => number.to_bits(),
        Kind::F16 if is_inverse => 0x3118,
        Kind::F16 => u64::from(crate::number::narrow(number as f32)),
        Kind::F32 | Kind::Whole if is_inverse => 0x3e22_f983,
        Kind::F32 | Kind::Whole => u64::from((number as f32).to_bits()),
    })
}

/// Bits of the registers.
fn mark(inst: &mut Inst, place: Operand, count: u8) {
    for at in 0..count {
        match place {
            Operand::V(first) => {
                let at = first.wrapping_add(at);
                inst.uses_v[usize::from(at / 64)] |= 1 << (at % 64);
            }
            Operand::S(first) => inst.uses_s |= 1 << (first + at),
            Operand::None | Operand::Value(_) => {}
        }
    }
}

/// An operand of the text goes into `at`.
fn operand(inst: &mut Inst, at: usize, word: &str) -> Option<()> {
    let mut word = word;
    let bit = 1 << at;
    if let Some(inner) = word.strip_prefix("sext(").and_then(|w| w.strip_suffix(')')) {
        inst.part.get_mut(at)?.signed = true;
        word = inner;
    }
    if let Some(rest) =
        word.strip_prefix('-').filter(|rest| place(rest.trim_matches('|')).is_some())
    {
        inst.neg |= bit;
        word = rest;
    }
    if let Some(inner) = word.strip_prefix('|').and_then(|w| w.strip_suffix('|')) {
        inst.abs |= bit;
        word = inner;
    }
    let (found, count) = match place(word) {
        Some(found) => found,
        None => (Operand::Value(constant(word, inst.kind)?), 0),
    };
    mark(inst, found, count);
    *inst.o.get_mut(at)? = found;
    Some(())
}

fn part(word: &str) -> Option<Part> {
    let (at, bits) = match word {
        "DWORD" => (0, 32),
        "WORD_0" => (0, 16),
        "WORD_1" => (16, 16),
        "BYTE_0" => (0, 8),
        "BYTE_1" => (8, 8),
        "BYTE_2" => (16, 8),
        "BYTE_3" => (24, 8),
        _ => return None,
    };
    Some(Part { at, bits, signed: false })
}

/// `[1,0,1]` as bits.
fn bits(word: &str) -> Option<u8> {
    let list = word.strip_prefix('[')?.strip_suffix(']')?;
    let one = |(at, digit): (usize, &str)| Some(digit.parse::<u8>().ok().filter(|d| *d < 2)? << at);
    list.split(',').enumerate().try_fold(0, |all, digit| Some(all | one(digit)?))
}

/// `quad_perm:[0,1,2,3]`.
fn quad(word: &str) -> Option<[u8; 4]> {
    let list = word.strip_prefix('[')?.strip_suffix(']')?;
    let lanes: Vec<u8> = list.split(',').map_while(|n| n.parse().ok().filter(|n| *n < 4)).collect();
    lanes.try_into().ok()
}

/// The pattern of a swizzle: `swizzle(SWAP,16)`, or a number.
fn swizzle(word: &str) -> Option<i64> {
    let Some(inner) = word.strip_prefix("swizzle(").and_then(|w| w.strip_suffix(')')) else {
        return word.parse().ok();
    };
    let (how, rest) = inner.split_once(',')?;
    let number = || rest.parse::<i64>().ok();
    match how {
        "SWAP" => Some(number()? << 10 | 0x1f),
        "REVERSE" => Some((number()? - 1) << 10 | 0x1f),
        "BITMASK_PERM" => {
            let mask = rest.trim_matches('"');
            mask.chars().try_fold(0_i64, |all, c| {
                let (and, or, xor) = match c {
                    '0' => (0, 0, 0),
                    '1' => (0, 1, 0),
                    'p' => (1, 0, 0),
                    'i' => (1, 0, 1),
                    _ => return None,
                };
                Some((all << 1 & 0x7bde) | and | or << 5 | xor << 10)
            })
        }
        _ => None,
    }
}

/// A modifier; false where it is not understood.
fn modifier(inst: &mut Inst, word: &str) -> Option<()> {
    let (name, value) = word.split_once(':').unwrap_or((word, ""));
    match name {
        "sc0" => inst.scope |= 1,
        "sc1" => inst.scope |= 2,
        "nt" => inst.scope |= 4,
        "clamp" => inst.clamp = true,
        "mul" => inst.omod = value.parse().ok()?,
        "div" => inst.omod = 1.0 / value.parse::<f32>().ok()?,
        "offset" => {
            inst.imm = swizzle(value).or_else(|| constant(value, Kind::Whole).map(|v| v as i64))?
        }
        "offset0" => inst.imm = value.parse().ok()?,
        "offset1" => inst.imm2 = value.parse().ok()?,
        "op_sel" => inst.op_sel = bits(value)?,
        "op_sel_hi" => inst.op_sel_hi = bits(value)?,
        "neg_lo" => inst.neg_lo = bits(value)?,
        "neg_hi" => inst.neg_hi = bits(value)?,
        "dst_sel" => inst.part[0] = part(value)?,
        "src0_sel" => inst.part[1] = Part { signed: inst.part[1].signed, ..part(value)? },
        "src1_sel" => inst.part[2] = Part { signed: inst.part[2].signed, ..part(value)? },
        "dst_unused" => {
            inst.rest = match value {
                "UNUSED_PAD" => Rest::Pad,
                "UNUSED_SEXT" => Rest::Sign,
                "UNUSED_PRESERVE" => Rest::Keep,
                _ => return None,
            }
        }
        "quad_perm" => inst.quad = Some(quad(value)?),
        "row_mask" | "bank_mask" => return (value == "0xf").then_some(()),
        // Sources beyond the lanes at work are 0; a quad has none beyond it.
        "bound_ctrl" => {}
        _ => return None,
    }
    Some(())
}

/// `vmcnt(0) lgkmcnt(3)` as `imm` and `imm2`; what is not named is not waited for.
fn counters(inst: &mut Inst, line: &Line<'_>) -> Option<()> {
    let count = |name: &str| line.value(name).map_or(Some(i64::MAX), |n| n.parse().ok());
    (inst.imm, inst.imm2) = (count("vmcnt")?, count("lgkmcnt")?);
    let known = ["vmcnt(", "lgkmcnt(", "expcnt("];
    line.modifiers.iter().all(|word| known.iter().any(|k| word.starts_with(k))).then_some(())
}

/// Which instruction stands at an address.
type Places = BTreeMap<u64, usize>;

/// What does `run` to nothing yet.
fn blank(run: Run, base: &str) -> Inst {
    Inst {
        run,
        o: [Operand::None; 5],
        imm: 0,
        imm2: 0,
        to: usize::MAX,
        scope: 0,
        neg: 0,
        abs: 0,
        modified: false,
        clamp: false,
        omod: 1.0,
        part: [WHOLE; 3],
        rest: Rest::Pad,
        quad: None,
        op_sel: 0,
        op_sel_hi: if base.starts_with("v_pk_") { 7 } else { 0 },
        neg_lo: 0,
        neg_hi: 0,
        uses_v: [0; 4],
        uses_s: 0,
        fills_v: [0; 4],
        fills_s: 0,
        kind: meaning::kind(base),
        clocks: clocks::of(base),
    }
}

fn decode(lines: &[Line<'_>], at: usize, places: &Places) -> Result<Inst, Fault> {
    let line = &lines[at];
    let unknown = || Fault::Unknown { address: line.address, text: line.text.to_owned() };
    let base = line.name.trim_end_matches("_e32").trim_end_matches("_e64");
    let base = base.trim_end_matches("_sdwa").trim_end_matches("_dpp");
    // Of these sc0 says that what was there comes back.
    let base = match base {
        "global_atomic_add_x2" if line.has("sc0") => "global_atomic_add_rtn_x2",
        base => base,
    };
    let run = meaning::of(base).ok_or_else(unknown)?;
    let mut inst = blank(run, base);
    let strange = |what: &str| line.fault(format!("{what} is not understood"));
    if base == "s_waitcnt" {
        return counters(&mut inst, line).map(|()| inst).ok_or_else(|| strange("a counter"));
    }
    if base.starts_with("s_branch") || base.starts_with("s_cbranch") || base == "s_setpc_b64" {
        let to = if base == "s_setpc_b64" { far(lines, at)? } else { line.target()? };
        inst.to = *places.get(&to).ok_or_else(|| strange("where it goes"))?;
        if base.contains("vcc") {
            mark(&mut inst, Operand::S(VCC), 2);
        }
        return Ok(inst);
    }
    let words = line.operands.iter().filter(|word| **word != "off");
    for (at, word) in words.enumerate() {
        operand(&mut inst, at, word).ok_or_else(|| strange(word))?;
        if at == 0 && meaning::fills(base) {
            (inst.fills_v, inst.fills_s) = (inst.uses_v, inst.uses_s);
            // Loads come in order: a later one may fill what an earlier one fills.
            if base.starts_with("global_load") {
                inst.uses_v = [0; 4];
            }
        }
    }
    if base == "s_getpc_b64" {
        inst.imm = line.address as i64 + 4;
    }
    for word in &line.modifiers {
        modifier(&mut inst, word).ok_or_else(|| strange(word))?;
    }
    if base.starts_with("global_load_lds") {
        mark(&mut inst, Operand::S(M0), 1);
    }
    if base == "v_div_fmas_f32" {
        mark(&mut inst, Operand::S(VCC), 2);
    }
    inst.modified = inst.neg | inst.abs != 0
        || inst.clamp
        || inst.omod != 1.0
        || inst.part != [WHOLE; 3]
        || inst.quad.is_some();
    meaning::checked(base, inst).ok_or_else(|| strange("an operand"))
}

/// A function, ready to run.
pub(crate) struct Code {
    pub(crate) insts: Vec<Inst>,
    /// As printed, with addresses.
    pub(crate) texts: Vec<(u64, String)>,
}

/// Makes a function ready.
///
/// # Errors
/// [`Fault::Unknown`] for a mnemonic that has no meaning here, [`Fault::Line`] for an operand or a
/// modifier.
pub(crate) fn code(function: &Function<'_>) -> Result<Code, Fault> {
    let lines = &function.lines;
    // Behind the end of a function stand words that pad it.
    let last = lines.iter().rposition(|line| line.name != "s_nop").map_or(0, |at| at + 1);
    let lines = &lines[..last];
    let places: Places = lines.iter().enumerate().map(|(at, line)| (line.address, at)).collect();
    let one = |at| decode(lines, at, &places);
    let insts = (0..lines.len()).map(one).collect::<Result<_, _>>()?;
    let texts = lines.iter().map(|line| (line.address, line.text.to_owned())).collect();
    Ok(Code { insts, texts })
}
