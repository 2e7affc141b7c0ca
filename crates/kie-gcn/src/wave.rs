//! A wave: 64 lanes' registers, and what it has asked for and not waited for.

use std::collections::VecDeque;

use crate::clocks::Clocks;
use crate::inst::{Inst, Operand, Part, Rest, EXEC};
use crate::meaning::Kind;
use crate::memory::Space;

/// Lanes of a wave.
pub(crate) const LANES: usize = 64;
/// A vector register.
pub(crate) type Lanes = [u32; LANES];

/// How a wave goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// With the next instruction.
    Go,
    /// Where its `pc` says.
    Jump,
    /// There, after others: a loop has seen what it saw before, and stored nothing.
    Vain,
    /// With the next instruction, after others.
    Rest,
    /// With the same instruction, after others.
    Again,
    /// When all waves of its block are here.
    Barrier,
    /// Not at all.
    End,
    /// Not at all: [`World::fault`] says why.
    Fault,
}

/// What a wave waits for with a counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum From {
    /// Global memory, which answers in order.
    Global,
    /// Shared memory, in order.
    Local,
    /// One or the other; it counts with both, in no order.
    Flat,
    /// Scalar loads, in no order.
    Scalar,
}

/// Something on its way.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pending {
    pub(crate) from: From,
    /// Of the weak memory; 0: done when it was asked for.
    pub(crate) op: u64,
    /// Registers that it writes.
    pub(crate) v: [u64; 4],
    pub(crate) s: u128,
    /// The first of them, where the weak memory fills them, and how.
    pub(crate) to: u8,
    pub(crate) form: Form,
    /// It goes to shared memory: the first of [`Wave::direct`].
    pub(crate) direct: bool,
}

/// What goes past registers into shared memory, and is not there yet.
#[derive(Debug, Clone)]
pub(crate) struct Direct {
    /// Where the first lane's word goes; the others' follow.
    pub(crate) at: usize,
    pub(crate) exec: u64,
    pub(crate) words: Lanes,
}

/// How what is loaded becomes a register, or a register what is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// So many words.
    Words(usize),
    /// A part of a word: bytes, and whether its sign is kept.
    Part(usize, bool),
    /// The lower or upper half of a register, whose other half stays.
    Half(u32),
}

impl Form {
    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::Words(words) => 4 * words,
            Self::Part(bytes, _) => bytes,
            Self::Half(_) => 2,
        }
    }

    /// The register's new value.
    pub(crate) fn loaded(self, part: u32, before: u32) -> u32 {
        match self {
            Self::Words(_) | Self::Part(_, false) => part,
            Self::Part(bytes, true) => {
                let up = 32 - 8 * bytes as u32;
                ((part << up) as i32 >> up) as u32
            }
            Self::Half(at) => before & !(0xffff << at) | part << at,
        }
    }

    /// What a register gives.
    pub(crate) fn stored(self, register: u32) -> u32 {
        match self {
            Self::Half(at) => register >> at & 0xffff,
            Self::Words(_) | Self::Part(..) => register,
        }
    }
}

/// What a loop has seen since it last went back.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Poll {
    /// Where it went back, and a hash of what it loaded before that.
    pub(crate) at: usize,
    pub(crate) seen: u64,
    /// The same since then.
    pub(crate) now: u64,
    /// It has stored something, loaded something, and that from global memory.
    pub(crate) stored: bool,
    pub(crate) loaded: bool,
    pub(crate) global: bool,
    /// The last turn of the loop loaded from global memory.
    pub(crate) global_before: bool,
}

/// One wave.
pub(crate) struct Wave {
    pub(crate) s: [u32; 128],
    pub(crate) v: Box<[Lanes; 256]>,
    pub(crate) scc: bool,
    pub(crate) pc: usize,
    /// Of all blocks of all ranks.
    pub(crate) block: usize,
    /// Where it is in its block.
    pub(crate) number: usize,
    pub(crate) vm: VecDeque<Pending>,
    pub(crate) lgkm: VecDeque<Pending>,
    pub(crate) direct: VecDeque<Direct>,
    /// Registers that are awaited, and of these the ones that only global loads write.
    pub(crate) busy_v: [u64; 4],
    pub(crate) loading_v: [u64; 4],
    pub(crate) busy_s: u128,
    pub(crate) poll: Poll,
    /// It polls in vain: what had been stored when it looked last.
    pub(crate) parked: Option<[u64; 2]>,
    /// Its next turn does not end where it polls in vain.
    pub(crate) patient: bool,
    /// It sleeps until then.
    pub(crate) wakes_ns: u64,
    pub(crate) state: Next,
    pub(crate) issued: Clocks,
}

/// What waves reach.
pub(crate) struct World {
    pub(crate) space: Space,
    /// Shared memory of each block.
    pub(crate) local: Vec<Vec<u8>>,
    pub(crate) weak: Option<Box<crate::weak::Weak>>,
    /// Stores to global memory, and to each block's shared memory.
    pub(crate) changes: u64,
    pub(crate) local_changes: Vec<u64>,
    /// Where the code's image lies.
    pub(crate) image: u64,
    pub(crate) now_ns: u64,
    /// Draws what is there before anybody waits for it.
    pub(crate) random: u64,
    pub(crate) fault: Option<String>,
}

impl World {
    /// The oldest of what goes to shared memory is there.
    pub(crate) fn fill_local(&mut self, w: &mut Wave) {
        let Some(direct) = w.direct.pop_front() else { return };
        self.local_changes[w.block] += 1;
        let local = self.local[w.block].get_mut(direct.at..).unwrap_or_default();
        let lanes = local.chunks_exact_mut(4).zip(direct.words).enumerate();
        for (_, (to, word)) in lanes.filter(|(lane, _)| direct.exec >> lane & 1 == 1) {
            to.copy_from_slice(&word.to_le_bytes());
        }
    }

    pub(crate) fn fail(&mut self, why: String) -> Next {
        self.fault.get_or_insert(why);
        Next::Fault
    }

    /// Bytes of memory, at once; nothing where there are none, or not aligned.
    #[inline]
    pub(crate) fn load(&mut self, at: u64, bytes: usize, words: &mut [u32; 4]) -> Option<()> {
        if bytes >= 4 {
            return self.space.load(at, &mut words[..bytes / 4]);
        }
        let (region, offset) = self.space.find(at, bytes)?;
        words[0] = region.load(offset, bytes) as u32;
        Some(())
    }

    /// The same, written.
    #[inline]
    pub(crate) fn store(&mut self, at: u64, bytes: usize, words: &[u32; 4]) -> Option<()> {
        self.changes += 1;
        if bytes >= 4 {
            return self.space.store(at, &words[..bytes / 4]);
        }
        let (region, offset) = self.space.find(at, bytes)?;
        region.store(offset, bytes, words[0].into());
        Some(())
    }
}

impl Wave {
    pub(crate) fn new(block: usize, number: usize, threads: u32) -> Self {
        let first = (number * LANES) as u32;
        let left = threads.saturating_sub(first).min(LANES as u32);
        let mut wave = Self {
            s: [0; 128],
            v: vec![[0; LANES]; 256].try_into().unwrap_or_else(|_| unreachable!()),
            scc: false,
            pc: 0,
            block,
            number,
            vm: VecDeque::new(),
            lgkm: VecDeque::new(),
            direct: VecDeque::new(),
            busy_v: [0; 4],
            loading_v: [0; 4],
            busy_s: 0,
            poll: Poll::default(),
            parked: None,
            patient: false,
            wakes_ns: 0,
            state: Next::Go,
            issued: Clocks::default(),
        };
        wave.v[0] = std::array::from_fn(|lane| first + lane as u32);
        wave.set64(EXEC, if left == 64 { !0 } else { (1 << left) - 1 });
        wave
    }

    pub(crate) fn get64(&self, at: u8) -> u64 {
        let at = usize::from(at);
        u64::from(self.s[at]) | u64::from(self.s[at + 1]) << 32
    }

    pub(crate) fn set64(&mut self, at: u8, value: u64) {
        let at = usize::from(at);
        (self.s[at], self.s[at + 1]) = (value as u32, (value >> 32) as u32);
    }

    pub(crate) fn exec(&self) -> u64 {
        self.get64(EXEC)
    }

    /// The lowest lane at work, or the first.
    pub(crate) fn first_lane(&self) -> usize {
        self.exec().trailing_zeros() as usize % LANES
    }

    /// A scalar operand.
    pub(crate) fn scalar(&self, from: Operand) -> u32 {
        match from {
            Operand::S(at) => self.s[usize::from(at)],
            Operand::Value(value) => value as u32,
            Operand::V(at) => self.v[usize::from(at)][self.first_lane()],
            Operand::None => 0,
        }
    }

    pub(crate) fn scalar64(&self, from: Operand) -> u64 {
        match from {
            Operand::S(at) => self.get64(at),
            Operand::Value(value) => value,
            Operand::V(_) | Operand::None => 0,
        }
    }

    /// A scalar operand of 32 bits as an offset.
    pub(crate) fn offset(&self, from: Operand) -> u64 {
        match from {
            Operand::S(at) => self.s[usize::from(at)].into(),
            from => self.scalar64(from),
        }
    }

    pub(crate) fn set_scalar(&mut self, to: Operand, value: u32) {
        if let Operand::S(at) = to {
            self.s[usize::from(at)] = value;
        }
    }

    pub(crate) fn set_scalar64(&mut self, to: Operand, value: u64) {
        if let Operand::S(at) = to {
            self.set64(at, value);
        }
    }

    /// Operand `n` in all lanes, as its modifiers have it.
    #[inline]
    pub(crate) fn lanes(&self, i: &Inst, n: usize) -> Lanes {
        let mut x = match i.o[n] {
            Operand::V(at) => self.v[usize::from(at)],
            from => [self.scalar(from); LANES],
        };
        if i.modified {
            self.modify(&mut x, i, n);
        }
        x
    }

    #[cold]
    fn modify(&self, x: &mut Lanes, i: &Inst, n: usize) {
        if let Some(quad) = i.quad.filter(|_| n == 1) {
            let (before, exec) = (*x, self.exec());
            *x = std::array::from_fn(|lane| {
                let from = lane & !3 | usize::from(quad[lane & 3]);
                before[from] & 0_u32.wrapping_sub((exec >> from & 1) as u32)
            });
        }
        if let Some(&Part { at, bits, signed }) = i.part.get(n).filter(|part| part.bits < 32) {
            let up = 32 - bits - at;
            for lane in x.iter_mut() {
                let top = *lane << up;
                *lane = if signed { (top as i32 >> (up + at)) as u32 } else { top >> (up + at) };
            }
        }
        let sign = if i.kind == Kind::F16 { 1 << 15 } else { 1 << 31 };
        let keep = if i.abs >> n & 1 != 0 { !sign } else { !0 };
        let flip = if i.neg >> n & 1 != 0 { sign } else { 0 };
        x.iter_mut().for_each(|lane| *lane = *lane & keep ^ flip);
    }

    /// Operand `n` of 64 bits in all lanes.
    #[inline]
    pub(crate) fn lanes64(&self, i: &Inst, n: usize) -> [u64; LANES] {
        let mut x = match i.o[n] {
            Operand::V(at) => {
                let (low, high) = (&self.v[usize::from(at)], &self.v[usize::from(at) + 1]);
                std::array::from_fn(|lane| u64::from(low[lane]) | u64::from(high[lane]) << 32)
            }
            from => [self.scalar64(from); LANES],
        };
        if i.modified {
            let keep = if i.abs >> n & 1 != 0 { !(1 << 63) } else { !0 };
            let flip = if i.neg >> n & 1 != 0 { 1 << 63 } else { 0 };
            x.iter_mut().for_each(|lane| *lane = *lane & keep ^ flip);
        }
        x
    }

    /// Writes the first operand in the lanes at work.
    #[inline]
    pub(crate) fn put(&mut self, i: &Inst, x: &Lanes) {
        let Operand::V(at) = i.o[0] else { return };
        if i.modified && i.part[0].bits < 32 {
            let whole = self.part_of(i, usize::from(at), x);
            self.put_at(at, &whole);
        } else {
            self.put_at(at, x);
        }
    }

    #[inline]
    pub(crate) fn put_at(&mut self, at: u8, x: &Lanes) {
        let exec = self.exec();
        let to = &mut self.v[usize::from(at)];
        if exec == !0 {
            *to = *x;
            return;
        }
        for lane in 0..LANES {
            let on = 0_u32.wrapping_sub((exec >> lane & 1) as u32);
            to[lane] = to[lane] & !on | x[lane] & on;
        }
    }

    /// `x` as the part of the register that is written, with the rest of it.
    #[cold]
    fn part_of(&self, i: &Inst, at: usize, x: &Lanes) -> Lanes {
        let Part { at: low, bits, .. } = i.part[0];
        let mask = ((1_u64 << bits) - 1) as u32;
        std::array::from_fn(|lane| {
            let (before, part) = (self.v[at][lane], x[lane] & mask);
            let sign = 0_u32.wrapping_sub(part >> (bits - 1));
            match i.rest {
                Rest::Pad => part << low,
                Rest::Sign => part << low | (sign & !mask) << low,
                Rest::Keep => before & !(mask << low) | part << low,
            }
        })
    }

    #[inline]
    pub(crate) fn put64(&mut self, i: &Inst, x: &[u64; LANES]) {
        let Operand::V(at) = i.o[0] else { return };
        let (low, high) = (x.map(|lane| lane as u32), x.map(|lane| (lane >> 32) as u32));
        self.put_at(at, &low);
        self.put_at(at + 1, &high);
    }

    /// Whether it must not touch what `i` touches yet.
    #[inline]
    pub(crate) fn awaits(&self, i: &Inst) -> bool {
        if self.vm.is_empty() && self.lgkm.is_empty() {
            return false;
        }
        let one = |n: usize| i.uses_v[n] | i.fills_v[n] & !self.loading_v[n];
        (0..4).any(|n| self.busy_v[n] & one(n) != 0) || self.busy_s & (i.uses_s | i.fills_s) != 0
    }

    /// Asked for, and to be waited for before its registers are touched.
    pub(crate) fn expect(&mut self, pending: Pending) {
        let loads = pending.from == From::Global;
        for n in 0..4 {
            let others = self.busy_v[n] & !self.loading_v[n];
            self.busy_v[n] |= pending.v[n];
            self.loading_v[n] = match loads {
                true => self.loading_v[n] | pending.v[n] & !others,
                false => self.loading_v[n] & !pending.v[n],
            };
        }
        self.busy_s |= pending.s;
        match pending.from {
            From::Global => self.vm.push_back(pending),
            From::Local | From::Scalar => self.lgkm.push_back(pending),
            From::Flat => {
                self.lgkm.push_back(Pending { op: 0, ..pending });
                self.vm.push_back(pending);
            }
        }
    }

    /// What is awaited, from what is on its way.
    pub(crate) fn sum_up(&mut self) {
        let (mut v, mut s, mut other) = ([0; 4], 0, [0; 4]);
        for pending in self.vm.iter().chain(&self.lgkm) {
            for n in 0..4 {
                v[n] |= pending.v[n];
                other[n] |= if pending.from == From::Global { 0 } else { pending.v[n] };
            }
            s |= pending.s;
        }
        (self.busy_v, self.busy_s) = (v, s);
        self.loading_v = std::array::from_fn(|n| v[n] & !other[n]);
    }

    /// A word was loaded: what a loop polls.
    #[inline]
    pub(crate) fn note(&mut self, word: u32) {
        self.poll.loaded = true;
        self.poll.now = (self.poll.now ^ u64::from(word)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}
