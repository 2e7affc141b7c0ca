//! Accesses: global memory, shared memory, and what is loaded for the whole wave. What is loaded
//! counts as there only behind the wait that waits for it.

use crate::inst::{Inst, Operand, Run, M0, SHARED_APERTURE};
use crate::wave::{Direct, Form, From, Lanes, Next, Pending, Wave, World, LANES};

/// What a mnemonic does.
pub(super) fn of(base: &str) -> Option<Run> {
    let global = || loads(base).or_else(|| stores(base));
    let more = || shared(base).or_else(|| shared_more(base)).or_else(|| sums(base));
    waits(base).or_else(global).or_else(more)
}

macro_rules! global {
    ($do:ident, $form:expr) => {
        |w, i, world| $do(w, i, world, $form, From::Global)
    };
}
macro_rules! flat {
    ($do:ident, $form:expr) => {
        |w, i, world| $do(w, i, world, $form, From::Flat)
    };
}

fn loads(base: &str) -> Option<Run> {
    use Form::{Half, Part, Words};
    Some(match base {
        "global_load_dword" => global!(load, Words(1)),
        "global_load_dwordx2" => global!(load, Words(2)),
        "global_load_dwordx3" => global!(load, Words(3)),
        "global_load_dwordx4" => global!(load, Words(4)),
        "global_load_ubyte" => global!(load, Part(1, false)),
        "global_load_sbyte" => global!(load, Part(1, true)),
        "global_load_ushort" => global!(load, Part(2, false)),
        "global_load_sshort" => global!(load, Part(2, true)),
        "global_load_short_d16" => global!(load, Half(0)),
        "global_load_short_d16_hi" => global!(load, Half(16)),
        "global_load_lds_dword" => load_direct,
        "flat_load_dword" => flat!(load, Words(1)),
        "flat_load_dwordx2" => flat!(load, Words(2)),
        "flat_load_dwordx3" => flat!(load, Words(3)),
        "flat_load_dwordx4" => flat!(load, Words(4)),
        "flat_load_ubyte" => flat!(load, Part(1, false)),
        "flat_load_sbyte" => flat!(load, Part(1, true)),
        "flat_load_ushort" => flat!(load, Part(2, false)),
        "flat_load_sshort" => flat!(load, Part(2, true)),
        _ => return None,
    })
}

fn stores(base: &str) -> Option<Run> {
    use Form::{Half, Part, Words};
    Some(match base {
        "global_store_dword" => global!(store, Words(1)),
        "global_store_dwordx2" => global!(store, Words(2)),
        "global_store_dwordx3" => global!(store, Words(3)),
        "global_store_dwordx4" => global!(store, Words(4)),
        "global_store_byte" => global!(store, Part(1, false)),
        "global_store_short" => global!(store, Part(2, false)),
        "global_store_short_d16_hi" => global!(store, Half(16)),
        "flat_store_dword" => flat!(store, Words(1)),
        "flat_store_dwordx2" => flat!(store, Words(2)),
        "flat_store_dwordx3" => flat!(store, Words(3)),
        "flat_store_dwordx4" => flat!(store, Words(4)),
        "flat_store_byte" => flat!(store, Part(1, false)),
        "flat_store_short" => flat!(store, Part(2, false)),
        "flat_store_short_d16_hi" => flat!(store, Half(16)),
        _ => return None,
    })
}

/// Sums in memory, of words of 8 bytes; the second gives back what was there.
fn sums(base: &str) -> Option<Run> {
    Some(match base {
        "global_atomic_add_x2" => |w, i, world| add(w, i, world, false),
        "global_atomic_add_rtn_x2" => |w, i, world| add(w, i, world, true),
        _ => return None,
    })
}

/// Each lane's address: a pair of registers, or a scalar base and 32 bits.
fn addresses(w: &Wave, i: &Inst, pointer: usize, base: Operand) -> [u64; LANES] {
    let mut at = match base {
        Operand::S(base) => {
            let (base, offset) = (w.get64(base), w.lanes(i, pointer));
            offset.map(|offset| base.wrapping_add(offset.into()))
        }
        _ => w.lanes64(i, pointer),
    };
    at.iter_mut().for_each(|at| *at = at.wrapping_add_signed(i.imm));
    at
}

/// Where a flat address is in shared memory, if it is there.
fn in_local(at: u64, from: From) -> Option<usize> {
    (from == From::Flat && at >> 32 == SHARED_APERTURE).then_some(at as u32 as usize)
}

fn outside(world: &mut World, lane: usize, at: u64, bytes: usize) -> Next {
    world.fail(format!("lane {lane}: no {bytes} bytes for it at {at:#x}"))
}

/// What is on its way into the registers that the instruction fills.
fn awaited(i: &Inst, from: From, (op, form): (u64, Form)) -> Pending {
    let to = if let Operand::V(at) = i.o[0] { at } else { 0 };
    Pending { from, op, v: i.fills_v, s: i.fills_s, to, form, direct: false }
}

/// What was there at once.
const THERE: (u64, Form) = (0, Form::Words(0));

/// A store on its way.
fn leaving(from: From, op: u64) -> Pending {
    Pending { from, op, v: [0; 4], s: 0, to: 0, form: Form::Words(0), direct: false }
}

fn load(w: &mut Wave, i: &Inst, world: &mut World, form: Form, from: From) -> Next {
    let (at, exec, bytes) = (addresses(w, i, 1, i.o[2]), w.exec(), form.bytes());
    let Operand::V(to) = i.o[0] else { return Next::Go };
    let (mut seen, mut weakly, count) = (0_u32, Vec::new(), bytes.div_ceil(4));
    for lane in (0..LANES).filter(|lane| exec >> lane & 1 == 1) {
        let mut words = [0; 4];
        let got = match in_local(at[lane], from) {
            Some(offset) => read_local(&world.local[w.block], offset, bytes, &mut words),
            None if world.weak.is_some() => {
                weakly.push((lane as u8, at[lane]));
                continue;
            }
            None => world.load(at[lane], bytes, &mut words),
        };
        if got.is_none() {
            return outside(world, lane, at[lane], bytes);
        }
        for (n, word) in words[..count].iter().enumerate() {
            seen = seen.rotate_left(5) ^ word;
            let register = &mut w.v[usize::from(to) + n][lane];
            *register = form.loaded(*word, *register);
        }
    }
    w.poll.global |= from == From::Global || !weakly.is_empty();
    w.note(seen);
    let op = match world.load_weakly(w.block, (i.scope, bytes), &weakly) {
        Ok(op) => op,
        Err((lane, at)) => return outside(world, lane, at, bytes),
    };
    w.expect(awaited(i, from, (op, form)));
    Next::Go
}

/// What the counter of such accesses counts to.
const COUNTED: usize = 63;

/// A word a lane, past the registers: to where the memory register says in shared memory, and
/// behind that by lanes. It is there when it was waited for, or before that.
fn load_direct(w: &mut Wave, i: &Inst, world: &mut World) -> Next {
    if w.vm.len() >= COUNTED && !world.land(w) {
        return Next::Again;
    }
    if i.o[1] != Operand::None {
        return world.fail("an address in scalar registers".to_owned());
    }
    let (at, exec) = (addresses(w, i, 0, i.o[2]), w.exec());
    let to = (w.s[usize::from(M0)] as usize & 0xffff).wrapping_add_signed(i.imm as isize);
    let most = world.local[w.block].len();
    if !to.is_multiple_of(4) || to + 4 * LANES > most && exec >> ((most - to.min(most)) / 4) != 0 {
        return world.fail(format!("no shared memory at {to:#x} for its words"));
    }
    let (mut direct, mut weakly) = (Direct { at: to, exec, words: [0; LANES] }, Vec::new());
    for lane in (0..LANES).filter(|lane| exec >> lane & 1 == 1) {
        let mut words = [0; 4];
        if world.weak.is_some() {
            weakly.push((lane as u8, at[lane]));
        } else if world.load(at[lane], 4, &mut words).is_none() {
            return outside(world, lane, at[lane], 4);
        }
        direct.words[lane] = words[0];
    }
    let op = match world.load_weakly(w.block, (i.scope, 4), &weakly) {
        Ok(op) => op,
        Err((lane, at)) => return outside(world, lane, at, 4),
    };
    w.direct.push_back(direct);
    world.random = world.random.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1);
    // Nothing may land before what was asked for earlier.
    let early = op == 0 && w.direct.len() == 1 && world.random >> 62 == 0;
    if early {
        world.fill_local(w);
        // It counts as on its way all the same.
        w.direct.push_back(Direct { at: to, exec: 0, words: [0; LANES] });
    }
    w.expect(Pending { direct: true, ..leaving(From::Global, op) });
    Next::Go
}

fn store(w: &mut Wave, i: &Inst, world: &mut World, form: Form, from: From) -> Next {
    let (at, exec, bytes) = (addresses(w, i, 0, i.o[2]), w.exec(), form.bytes());
    let Operand::V(data) = i.o[1] else { return Next::Go };
    let mut weakly = Vec::new();
    w.poll.stored = true;
    for lane in (0..LANES).filter(|lane| exec >> lane & 1 == 1) {
        let words = register_words(w, data, form, lane);
        let put = match in_local(at[lane], from) {
            Some(offset) => {
                world.local_changes[w.block] += 1;
                write_local(&mut world.local[w.block], offset, bytes, &words)
            }
            None if world.weak.is_some() => {
                weakly.push((lane as u8, at[lane], words));
                continue;
            }
            None => world.store(at[lane], bytes, &words),
        };
        if put.is_none() {
            return outside(world, lane, at[lane], bytes);
        }
    }
    let op = match world.store_weakly(w.block, (i.scope, bytes), &weakly) {
        Ok(op) => op,
        Err((lane, at)) => return outside(world, lane, at, bytes),
    };
    w.expect(leaving(from, op));
    Next::Go
}

/// Lane after lane: a word in memory grows by the lane's. Only where memory is (sc1): what a die's
/// cache adds up, other dies do not see.
fn add(w: &mut Wave, i: &Inst, world: &mut World, back: bool) -> Next {
    let first = usize::from(back);
    let (at, exec) = (addresses(w, i, first, i.o[first + 2]), w.exec());
    let Operand::V(data) = i.o[first + 1] else { return Next::Go };
    if i.scope & 2 == 0 {
        return world.fail("a sum in a die's cache".to_owned());
    }
    let mut weakly = Vec::new();
    w.poll.stored = true;
    for lane in (0..LANES).filter(|lane| exec >> lane & 1 == 1) {
        let both = |words: [u32; 4]| u64::from(words[0]) | u64::from(words[1]) << 32;
        let (more, mut words) = (both(register_words(w, data, Form::Words(2), lane)), [0; 4]);
        if world.weak.is_some() {
            weakly.push((lane as u8, at[lane], more));
            continue;
        }
        let known = at[lane].is_multiple_of(8).then(|| world.load(at[lane], 8, &mut words));
        if known.flatten().is_none() {
            return outside(world, lane, at[lane], 8);
        }
        let sum = both(words).wrapping_add(more);
        let _ = world.store(at[lane], 8, &[sum as u32, (sum >> 32) as u32, 0, 0]);
        if let (true, Operand::V(to)) = (back, i.o[0]) {
            for n in 0..2 {
                w.v[usize::from(to) + n][lane] = words[n];
            }
        }
    }
    let op = match world.add_weakly(w.block, back, &weakly) {
        Ok(op) => op,
        Err((lane, at)) => return outside(world, lane, at, 8),
    };
    let form = Form::Words(2);
    w.expect(if back { awaited(i, From::Global, (op, form)) } else { leaving(From::Global, op) });
    Next::Go
}

/// What a lane's registers from `data` on store.
#[inline]
fn register_words(w: &Wave, data: u8, form: Form, lane: usize) -> [u32; 4] {
    let count = form.bytes().div_ceil(4);
    let one = |n: usize| form.stored(w.v[usize::from(data) + n][lane]);
    std::array::from_fn(|n| if n < count { one(n) } else { 0 })
}

fn read_local(local: &[u8], at: usize, bytes: usize, words: &mut [u32; 4]) -> Option<()> {
    let from = local.get(at..at.checked_add(bytes)?).filter(|_| at.is_multiple_of(bytes.min(4)))?;
    for (word, bytes) in words.iter_mut().zip(from.chunks(4)) {
        let mut whole = [0; 4];
        whole[..bytes.len()].copy_from_slice(bytes);
        *word = u32::from_le_bytes(whole);
    }
    Some(())
}

fn write_local(local: &mut [u8], at: usize, bytes: usize, words: &[u32; 4]) -> Option<()> {
    let aligned = at.is_multiple_of(bytes.min(4));
    let to = local.get_mut(at..at.checked_add(bytes)?).filter(|_| aligned)?;
    for (to, word) in to.chunks_mut(4).zip(words) {
        to.copy_from_slice(&word.to_le_bytes()[..to.len()]);
    }
    Some(())
}

/// Counters, caches, clocks and scalar loads.
fn waits(base: &str) -> Option<Run> {
    Some(match base {
        "s_waitcnt" => wait,
        "buffer_wbl2" => |w, i, world| {
            let op = world.maintain(w.block, i.scope, true);
            w.expect(leaving(From::Global, op));
            Next::Go
        },
        "buffer_inv" => |w, i, world| {
            let op = world.maintain(w.block, i.scope, false);
            w.expect(leaving(From::Global, op));
            Next::Go
        },
        "s_load_dword" => |w, i, world| load_scalar(w, i, world, 1),
        "s_load_dwordx2" => |w, i, world| load_scalar(w, i, world, 2),
        "s_load_dwordx4" => |w, i, world| load_scalar(w, i, world, 4),
        "s_load_dwordx8" => |w, i, world| load_scalar(w, i, world, 8),
        "s_load_dwordx16" => |w, i, world| load_scalar(w, i, world, 16),
        "s_memrealtime" => |w, i, world| {
            // It counts at 100 MHz.
            w.set_scalar64(i.o[0], world.now_ns / 10);
            w.expect(awaited(i, From::Scalar, THERE));
            Next::Go
        },
        "s_memtime" => |w, i, world| {
            w.set_scalar64(i.o[0], world.now_ns * 21 / 10);
            w.expect(awaited(i, From::Scalar, THERE));
            Next::Go
        },
        _ => return None,
    })
}

fn load_scalar(w: &mut Wave, i: &Inst, world: &mut World, words: usize) -> Next {
    let at = w.scalar64(i.o[1]).wrapping_add(w.offset(i.o[2])).wrapping_add_signed(i.imm);
    let (at, mut got) = (at & !3, [0; 16]);
    let Operand::S(to) = i.o[0] else { return Next::Go };
    if world.space.load(at, &mut got[..words]).is_none() {
        return world.fail(format!("no {} bytes for the wave at {at:#x}", 4 * words));
    }
    w.s[usize::from(to)..][..words].copy_from_slice(&got[..words]);
    let seen = got.iter().fold(0_u32, |all, word| all.rotate_left(5) ^ word);
    w.poll.global = true;
    w.note(seen);
    w.expect(awaited(i, From::Scalar, THERE));
    Next::Go
}

/// Until so few are on their way; what comes in no order only counts when none is.
fn wait(w: &mut Wave, i: &Inst, world: &mut World) -> Next {
    let flat = w.vm.iter().any(|p| p.from == From::Flat);
    let mixed = w.lgkm.iter().any(|p| p.from != From::Local);
    let left = |most: i64, unordered: bool| match most {
        0 => 0,
        _ if unordered => usize::MAX,
        most => most as usize,
    };
    let (vm, lgkm) = (left(i.imm, flat), left(i.imm2, mixed));
    while w.vm.len() > vm {
        if !world.land(w) {
            w.sum_up();
            return Next::Again;
        }
    }
    while w.lgkm.len() > lgkm {
        w.lgkm.pop_front();
    }
    w.sum_up();
    Next::Go
}

macro_rules! read {
    ($form:expr) => {
        |w, i, world| read(w, i, world, $form, [i.imm, i64::MIN])
    };
}
macro_rules! write {
    ($form:expr) => {
        |w, i, world| write(w, i, world, $form, [i.imm, i64::MIN])
    };
}
/// Two accesses, `$unit` bytes between offsets.
macro_rules! both {
    ($do:ident, $form:expr, $unit:literal) => {
        |w, i, world| $do(w, i, world, $form, [i.imm * $unit, i.imm2 * $unit])
    };
}

/// Shared memory: loads and stores.
fn shared(base: &str) -> Option<Run> {
    use Form::{Half, Part, Words};
    Some(match base {
        "ds_read_b32" => read!(Words(1)),
        "ds_read_b64" => read!(Words(2)),
        "ds_read_b96" => read!(Words(3)),
        "ds_read_b128" => read!(Words(4)),
        "ds_read_u8" => read!(Part(1, false)),
        "ds_read_i8" => read!(Part(1, true)),
        "ds_read_u16" => read!(Part(2, false)),
        "ds_read_i16" => read!(Part(2, true)),
        "ds_read_u16_d16" => read!(Half(0)),
        "ds_read_u16_d16_hi" => read!(Half(16)),
        "ds_read2_b32" => both!(read, Words(1), 4),
        "ds_read2_b64" => both!(read, Words(2), 8),
        "ds_read2st64_b32" => both!(read, Words(1), 256),
        "ds_read2st64_b64" => both!(read, Words(2), 512),
        "ds_write_b8" => write!(Part(1, false)),
        "ds_write_b16" => write!(Part(2, false)),
        "ds_write_b16_d16_hi" => write!(Half(16)),
        "ds_write_b32" => write!(Words(1)),
        "ds_write_b64" => write!(Words(2)),
        "ds_write_b96" => write!(Words(3)),
        "ds_write_b128" => write!(Words(4)),
        "ds_write2_b32" => both!(write, Words(1), 4),
        "ds_write2_b64" => both!(write, Words(2), 8),
        "ds_write2st64_b32" => both!(write, Words(1), 256),
        "ds_write2st64_b64" => both!(write, Words(2), 512),
        _ => return None,
    })
}

fn read(w: &mut Wave, i: &Inst, world: &mut World, form: Form, offsets: [i64; 2]) -> Next {
    let (base, exec, bytes) = (w.lanes(i, 1), w.exec(), form.bytes());
    let Operand::V(to) = i.o[0] else { return Next::Go };
    let (mut seen, count) = (0_u32, bytes.div_ceil(4));
    for (which, offset) in offsets.into_iter().filter(|offset| *offset != i64::MIN).enumerate() {
        for lane in (0..LANES).filter(|lane| exec >> lane & 1 == 1) {
            let (at, mut words) = (u64::from(base[lane]).wrapping_add_signed(offset), [0; 4]);
            if read_local(&world.local[w.block], at as usize, bytes, &mut words).is_none() {
                return outside(world, lane, at, bytes);
            }
            for (n, word) in words[..count].iter().enumerate() {
                seen = seen.rotate_left(5) ^ word;
                let register = &mut w.v[usize::from(to) + which * count + n][lane];
                *register = form.loaded(*word, *register);
            }
        }
    }
    w.note(seen);
    w.expect(awaited(i, From::Local, THERE));
    Next::Go
}

fn write(w: &mut Wave, i: &Inst, world: &mut World, form: Form, offsets: [i64; 2]) -> Next {
    let (base, exec, bytes) = (w.lanes(i, 0), w.exec(), form.bytes());
    w.poll.stored = true;
    world.local_changes[w.block] += 1;
    for (which, offset) in offsets.into_iter().filter(|offset| *offset != i64::MIN).enumerate() {
        let Operand::V(data) = i.o[1 + which] else { return Next::Go };
        for lane in (0..LANES).filter(|lane| exec >> lane & 1 == 1) {
            let at = u64::from(base[lane]).wrapping_add_signed(offset);
            let words = register_words(w, data, form, lane);
            if write_local(&mut world.local[w.block], at as usize, bytes, &words).is_none() {
                return outside(world, lane, at, bytes);
            }
        }
    }
    w.expect(leaving(From::Local, 0));
    Next::Go
}

macro_rules! atomic {
    ($words:literal, $back:literal, |$a:ident, $b:ident| $e:expr) => {
        |w, i, world| atomic(w, i, world, ($words, $back), |$a, $b| $e)
    };
}

/// Shared memory: sums in place, and what only passes through its crossbar.
fn shared_more(base: &str) -> Option<Run> {
    Some(match base {
        "ds_add_u32" => atomic!(1, false, |a, b| a.wrapping_add(b)),
        "ds_add_u64" => atomic!(2, false, |a, b| a.wrapping_add(b)),
        "ds_add_rtn_u32" => atomic!(1, true, |a, b| a.wrapping_add(b)),
        "ds_add_rtn_u64" => atomic!(2, true, |a, b| a.wrapping_add(b)),
        "ds_sub_u32" => atomic!(1, false, |a, b| a.wrapping_sub(b)),
        "ds_or_b32" => atomic!(1, false, |a, b| a | b),
        "ds_and_b32" => atomic!(1, false, |a, b| a & b),
        "ds_max_u32" => atomic!(1, false, |a, b| a.max(b)),
        "ds_max_rtn_u32" => atomic!(1, true, |a, b| a.max(b)),
        "ds_min_u32" => atomic!(1, false, |a, b| a.min(b)),
        "ds_max_u64" => atomic!(2, false, |a, b| a.max(b)),
        "ds_wrxchg_rtn_b32" => atomic!(1, true, |_a, b| b),
        "ds_bpermute_b32" => |w, i, _| {
            let (at, data, exec) = (w.lanes(i, 1), w.lanes(i, 2), w.exec());
            let x = std::array::from_fn(|k| {
                let from = (at[k].wrapping_add(i.imm as u32) / 4) as usize % LANES;
                if exec >> from & 1 == 1 {
                    data[from]
                } else {
                    0
                }
            });
            passed(w, i, &x)
        },
        "ds_swizzle_b32" => |w, i, world| {
            let (data, exec, pattern) = (w.lanes(i, 1), w.exec(), i.imm as usize);
            if pattern >> 15 != 0 {
                return world.fail("a swizzle of this kind".to_owned());
            }
            let x = std::array::from_fn(|k| {
                let low = k & 31 & pattern & 31 | pattern >> 5 & 31;
                let from = k & 32 | (low ^ pattern >> 10 & 31);
                if exec >> from & 1 == 1 {
                    data[from]
                } else {
                    0
                }
            });
            passed(w, i, &x)
        },
        _ => return None,
    })
}

fn passed(w: &mut Wave, i: &Inst, x: &Lanes) -> Next {
    w.put(i, x);
    w.expect(awaited(i, From::Local, THERE));
    Next::Go
}

/// Lane after lane: a word of shared memory and the lane's become the word's new value.
fn atomic(
    w: &mut Wave,
    i: &Inst,
    world: &mut World,
    (count, back): (usize, bool),
    of: fn(u64, u64) -> u64,
) -> Next {
    let first = usize::from(back);
    let (base, exec, bytes) = (w.lanes(i, first), w.exec(), 4 * count);
    let Operand::V(data) = i.o[first + 1] else { return Next::Go };
    w.poll.stored = true;
    world.local_changes[w.block] += 1;
    let both = |words: [u32; 2]| u64::from(words[0]) | u64::from(words[1]) << 32;
    for lane in (0..LANES).filter(|lane| exec >> lane & 1 == 1) {
        let (at, mut words) = (u64::from(base[lane]).wrapping_add_signed(i.imm), [0; 4]);
        let local = &mut world.local[w.block];
        let ours = |n: usize| if n < count { w.v[usize::from(data) + n][lane] } else { 0 };
        let given = both([ours(0), ours(1)]);
        if read_local(local, at as usize, bytes, &mut words).is_none() {
            return outside(world, lane, at, bytes);
        }
        let new = of(both([words[0], words[1]]), given);
        let _ = write_local(local, at as usize, bytes, &[new as u32, (new >> 32) as u32, 0, 0]);
        if let (true, Operand::V(to)) = (back, i.o[0]) {
            for n in 0..count {
                w.v[usize::from(to) + n][lane] = words[n];
            }
        }
    }
    w.expect(if back { awaited(i, From::Local, THERE) } else { leaving(From::Local, 0) });
    Next::Go
}
