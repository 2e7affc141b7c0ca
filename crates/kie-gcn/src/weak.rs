//! Memory as gfx942's is documented, at its worst: a compute unit has a queue for each channel and
//! a first-level cache, a die (XCD) a second-level cache that is not coherent with the others',
//! and between those and memory there is no order but that of one address. What carries sc1 goes to
//! memory; what does not stays in the die's cache until it is written back. The seed draws which
//! of all that is under way goes on next, and makes one channel slow.
//!
//! Words of 8 bytes are the unit, so that aligned ones are never torn. Scalar loads are not weak.

use std::collections::{BTreeMap, VecDeque};

use crate::wave::{Form, Wave, World};

const CHANNELS: usize = 16;
const LINE: u64 = 128;
/// Another's die does not see it before it is written back.
const DEVICE: u8 = 2;

/// Bytes of an aligned word of 8, those of `mask`.
#[derive(Debug, Clone, Copy, Default)]
struct Cell {
    value: u64,
    mask: u64,
}

impl Cell {
    /// With the bytes of `other` put over.
    fn over(self, other: Self) -> Self {
        let value = self.value & !other.mask | other.value & other.mask;
        Self { value, mask: self.mask | other.mask }
    }
}

/// What a cache has of an aligned word.
#[derive(Debug, Clone, Copy, Default)]
struct Cached {
    cell: Cell,
    /// Bytes that memory has not yet.
    dirty: u64,
}

type Cache = BTreeMap<u64, Cached>;

#[derive(Debug)]
enum What {
    /// Of an operation, which of its words.
    Load {
        at: u64,
        lane: u8,
        first: u8,
    },
    Store {
        at: u64,
        cell: Cell,
    },
    /// In memory, past the caches, for a lane.
    Add {
        at: u64,
        more: u64,
        lane: u8,
    },
    WriteBack,
    Invalidate,
}

#[derive(Debug)]
struct Request {
    op: u64,
    scope: u8,
    what: What,
}

/// A write on its way to memory.
#[derive(Debug)]
struct Write {
    op: u64,
    at: u64,
    cell: Cell,
    /// A lane's, which is added to what is there instead.
    adds: Option<u8>,
}

#[derive(Debug, Default)]
struct Op {
    /// Parts that are not done.
    left: usize,
    /// Lane, first byte of its words, the aligned word.
    loaded: Vec<(u8, u8, u64)>,
    /// Of each lane, where it loads from.
    lanes: Vec<(u8, u64)>,
}

/// All that is on its way.
pub(crate) struct Weak {
    queues: Vec<[VecDeque<Request>; CHANNELS]>,
    /// Of each compute unit, and which die it is on.
    near: Vec<Cache>,
    die_of: Vec<usize>,
    dies: Vec<Cache>,
    fabric: Vec<Write>,
    ops: BTreeMap<u64, Op>,
    next: u64,
    random: u64,
    slow: usize,
    /// Requests in queues.
    queued: usize,
}

fn channel(at: u64) -> usize {
    (at / 256) as usize % CHANNELS
}

impl Weak {
    /// Compute units on the dies that the list names.
    pub(crate) fn new(die_of: Vec<usize>, seed: u64) -> Self {
        let dies = die_of.iter().max().map_or(0, |most| most + 1);
        Self {
            queues: die_of.iter().map(|_| Default::default()).collect(),
            near: vec![Cache::new(); die_of.len()],
            die_of,
            dies: vec![Cache::new(); dies],
            fabric: Vec::new(),
            ops: BTreeMap::new(),
            next: 1,
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            slow: (seed % (CHANNELS as u64 + 1)) as usize,
            queued: 0,
        }
    }

    fn draw(&mut self, most: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 16) as usize % most
    }

    fn begin(&mut self) -> u64 {
        let op = self.next;
        self.next += 1;
        self.ops.insert(op, Op::default());
        op
    }

    fn send(&mut self, unit: usize, at: usize, request: Request) {
        if let Some(op) = self.ops.get_mut(&request.op) {
            op.left += 1;
        }
        self.queued += 1;
        self.queues[unit][at].push_back(request);
    }

    fn done(&mut self, op: u64) {
        if let Some(op) = self.ops.get_mut(&op) {
            op.left -= 1;
        }
    }
}

impl World {
    /// Something of what is on its way goes on; false where nothing is.
    pub(crate) fn tick(&mut self) -> bool {
        let Some(weak) = &mut self.weak else { return false };
        let under_way = weak.queued + weak.fabric.len();
        if under_way == 0 {
            return false;
        }
        let mut pick = weak.draw(under_way);
        // One channel's way is slow.
        for _ in 0..12 {
            let write = pick.checked_sub(weak.queued).map(|at| weak.fabric[at].at);
            if write.is_none_or(|at| channel(at) != weak.slow) {
                break;
            }
            pick = weak.draw(under_way);
        }
        if let Some(at) = pick.checked_sub(weak.queued) {
            // Of one address the oldest first.
            let address = weak.fabric[at].at;
            let oldest = weak.fabric.iter().position(|write| write.at == address).unwrap_or(at);
            let write = weak.fabric.remove(oldest);
            self.arrive(&write);
        } else {
            let (mut unit, mut at) = (weak.draw(weak.queues.len()), weak.draw(CHANNELS));
            while weak.queues[unit][at].is_empty() {
                at = (at + 1) % CHANNELS;
                unit = if at == 0 { (unit + 1) % weak.queues.len() } else { unit };
            }
            if let Some(request) = weak.queues[unit][at].pop_front() {
                weak.queued -= 1;
                self.serve(unit, at, request);
            }
        }
        true
    }

    /// All that is on its way arrives, and what caches hold back is written: a kernel's end.
    pub(crate) fn settle(&mut self) {
        while self.tick() {}
        let Some(weak) = &mut self.weak else { return };
        let mut held = Vec::new();
        for cache in &mut weak.dies {
            let dirty = cache.iter().filter(|(_, cached)| cached.dirty != 0);
            held.extend(dirty.map(|(at, cached)| (*at, cached.cell.value, cached.dirty)));
            cache.clear();
        }
        weak.near.iter_mut().for_each(Cache::clear);
        for (at, value, mask) in held {
            self.arrive(&Write { op: 0, at, cell: Cell { value, mask }, adds: None });
        }
    }

    fn arrive(&mut self, write: &Write) {
        self.changes += 1;
        if let Some((region, offset)) = self.space.find(write.at, 8) {
            let before = Cell { value: region.load(offset, 8), mask: !0 };
            let after = match write.adds {
                Some(_) => before.value.wrapping_add(write.cell.value),
                None => before.over(write.cell).value,
            };
            region.store(offset, 8, after);
            let op = self.weak.as_mut().and_then(|weak| weak.ops.get_mut(&write.op));
            if let (Some(op), Some(lane)) = (op, write.adds) {
                op.loaded.push((lane, 0, before.value));
            }
        }
        if let Some(weak) = &mut self.weak {
            weak.done(write.op);
        }
    }

    fn in_memory(&mut self, at: u64) -> u64 {
        self.space.find(at, 8).map_or(0, |(region, offset)| region.load(offset, 8))
    }

    fn serve(&mut self, unit: usize, at: usize, request: Request) {
        match request.what {
            What::Load { at, lane, first } => {
                let value = self.seen(unit, at, request.scope);
                let Some(weak) = &mut self.weak else { return };
                if let Some(op) = weak.ops.get_mut(&request.op) {
                    op.loaded.push((lane, first, value));
                }
                weak.done(request.op);
            }
            What::Store { at, cell } => {
                let Some(weak) = &mut self.weak else { return };
                weak.put(unit, at, cell, &request);
                weak.done(request.op);
            }
            What::Add { at, more, lane } => {
                let Some(weak) = &mut self.weak else { return };
                let cell = Cell { value: more, mask: !0 };
                weak.fabric.push(Write { op: request.op, at, cell, adds: Some(lane) });
            }
            What::WriteBack | What::Invalidate => {
                let Some(weak) = &mut self.weak else { return };
                let die = weak.die_of[unit];
                let here = |other: &u64| channel(*other) == at;
                if matches!(request.what, What::Invalidate) {
                    weak.near[unit].retain(|other, _| !here(other));
                    if request.scope & DEVICE != 0 {
                        weak.dies[die].retain(|other, cached| !here(other) || cached.dirty != 0);
                        let held = weak.dies[die].iter_mut().filter(|(other, _)| here(other));
                        held.for_each(|(_, cached)| cached.cell.mask = cached.dirty);
                    }
                } else if request.scope & DEVICE != 0 {
                    let dirty = weak.dies[die].iter_mut();
                    let dirty = dirty.filter(|(other, cached)| here(other) && cached.dirty != 0);
                    for (at, cached) in dirty {
                        let cell = Cell { value: cached.cell.value, mask: cached.dirty };
                        cached.dirty = 0;
                        weak.fabric.push(Write { op: request.op, at: *at, cell, adds: None });
                        weak.ops.entry(request.op).or_default().left += 1;
                    }
                }
                weak.done(request.op);
            }
        }
    }

    /// What a unit's load of an aligned word finds.
    fn seen(&mut self, unit: usize, at: u64, scope: u8) -> u64 {
        let memory = self.in_memory(at);
        let line = at / LINE * LINE;
        let around: Vec<u64> = if scope & DEVICE == 0 {
            (0..LINE / 8).map(|n| self.in_memory(line + 8 * n)).collect()
        } else {
            Vec::new()
        };
        let Some(weak) = &mut self.weak else { return memory };
        let die = &mut weak.dies[weak.die_of[unit]];
        if scope & DEVICE != 0 {
            // Past the caches, but for what is newer here.
            let held = die.get(&at).copied().unwrap_or_default();
            let newer = Cell { value: held.cell.value, mask: held.dirty };
            return Cell { value: memory, mask: !0 }.over(newer).value;
        }
        if let Some(near) = weak.near[unit].get(&at).filter(|near| near.cell.mask == !0) {
            return near.cell.value;
        }
        for (n, value) in (0..).zip(around) {
            let cached = die.entry(line + 8 * n).or_default();
            cached.cell = Cell { value, mask: !0 }.over(cached.cell);
            weak.near[unit].insert(line + 8 * n, *cached);
        }
        die.get(&at).map_or(memory, |cached| cached.cell.value)
    }

    /// A load of the lanes in `at`, of so many bytes each; or the lane whose bytes are nowhere.
    pub(crate) fn load_weakly(
        &mut self,
        unit: usize,
        (scope, bytes): (u8, usize),
        at: &[(u8, u64)],
    ) -> Result<u64, (usize, u64)> {
        if at.is_empty() {
            return Ok(0);
        }
        for &(lane, at) in at {
            self.space.find(at, bytes).ok_or((lane.into(), at))?;
        }
        let Some(weak) = &mut self.weak else { return Ok(0) };
        let op = weak.begin();
        for &(lane, at) in at {
            for word in at / 8..=(at + bytes as u64 - 1) / 8 {
                // Where the lane's bytes begin, from the word on: before it for later words.
                let what = What::Load { at: word * 8, lane, first: (word - at / 8) as u8 };
                weak.send(unit, channel(word * 8), Request { op, scope, what });
            }
        }
        if let Some(known) = weak.ops.get_mut(&op) {
            known.lanes = at.to_vec();
        }
        Ok(op)
    }

    /// A store, as [`World::load_weakly`].
    pub(crate) fn store_weakly(
        &mut self,
        unit: usize,
        (scope, bytes): (u8, usize),
        at: &[(u8, u64, [u32; 4])],
    ) -> Result<u64, (usize, u64)> {
        if at.is_empty() {
            return Ok(0);
        }
        for &(lane, at, _) in at {
            self.space.find(at, bytes).ok_or((lane.into(), at))?;
        }
        let Some(weak) = &mut self.weak else { return Ok(0) };
        let op = weak.begin();
        for &(_, at, words) in at {
            let whole = words.iter().rev().fold(0_u128, |all, word| all << 32 | u128::from(*word));
            let mask = if bytes == 16 { !0 } else { (1_u128 << (8 * bytes)) - 1 };
            let first = at % 8;
            for n in 0..=(first + bytes as u64 - 1) / 8 {
                let part = |all: u128| match n {
                    0 => (all << (8 * first)) as u64,
                    n => (all >> (8 * (8 * n - first))) as u64,
                };
                let (at, cell) =
                    (at / 8 * 8 + 8 * n, Cell { value: part(whole), mask: part(mask) });
                let what = What::Store { at, cell };
                weak.send(unit, channel(at), Request { op, scope, what });
            }
        }
        Ok(op)
    }

    /// Sums of words of 8 bytes in memory, as [`World::load_weakly`]; `back`: what was there is
    /// wanted.
    pub(crate) fn add_weakly(
        &mut self,
        unit: usize,
        back: bool,
        at: &[(u8, u64, u64)],
    ) -> Result<u64, (usize, u64)> {
        if at.is_empty() {
            return Ok(0);
        }
        for &(lane, at, _) in at {
            let known = at.is_multiple_of(8).then(|| self.space.find(at, 8));
            known.flatten().ok_or((lane.into(), at))?;
        }
        let Some(weak) = &mut self.weak else { return Ok(0) };
        let op = weak.begin();
        for &(lane, at, more) in at {
            let what = What::Add { at, more, lane };
            weak.send(unit, channel(at), Request { op, scope: DEVICE, what });
        }
        if let (true, Some(known)) = (back, weak.ops.get_mut(&op)) {
            known.lanes = at.iter().map(|&(lane, at, _)| (lane, at)).collect();
        }
        Ok(op)
    }

    /// A write-back of the die's cache, or that what caches have is forgotten.
    pub(crate) fn maintain(&mut self, unit: usize, scope: u8, writes: bool) -> u64 {
        let Some(weak) = &mut self.weak else { return 0 };
        let op = weak.begin();
        for at in 0..CHANNELS {
            let what = if writes { What::WriteBack } else { What::Invalidate };
            weak.send(unit, at, Request { op, scope, what });
        }
        op
    }

    /// Takes what the wave asked for first, if it is there.
    pub(crate) fn land(&mut self, w: &mut Wave) -> bool {
        let Some(&first) = w.vm.front() else { return true };
        let Some(weak) = self.weak.as_mut().filter(|_| first.op != 0) else {
            w.vm.pop_front();
            if first.direct {
                self.fill_local(w);
            }
            return true;
        };
        if weak.ops.get(&first.op).is_some_and(|op| op.left > 0) {
            return false;
        }
        w.vm.pop_front();
        let op = weak.ops.remove(&first.op).unwrap_or_default();
        let (mut seen, count) = (0_u32, first.form.bytes().div_ceil(4));
        for (lane, at) in &op.lanes {
            let mine = op.loaded.iter().filter(|(other, ..)| other == lane);
            let whole = mine.fold(0_u128, |all, (_, n, value)| match at % 8 {
                skip if *n == 0 => all | u128::from(*value) >> (8 * skip),
                skip => all | u128::from(*value) << (64 * u64::from(*n) - 8 * skip),
            });
            if first.direct {
                w.direct[0].words[usize::from(*lane)] = whole as u32;
                continue;
            }
            for n in 0..count {
                let word = (whole >> (32 * n)) as u32;
                let word = match first.form {
                    Form::Words(_) => word,
                    form => word & ((1_u64 << (8 * form.bytes())) - 1) as u32,
                };
                seen = seen.rotate_left(5) ^ word;
                let register = &mut w.v[usize::from(first.to) + n][usize::from(*lane)];
                *register = first.form.loaded(word, *register);
            }
        }
        w.note(seen);
        if first.direct {
            self.fill_local(w);
        }
        true
    }
}

impl Weak {
    /// A store reaches the die: the unit's own later loads see it.
    fn put(&mut self, unit: usize, at: u64, cell: Cell, request: &Request) {
        if let Some(near) = self.near[unit].get_mut(&at) {
            near.cell = near.cell.over(cell);
        }
        let die = &mut self.dies[self.die_of[unit]];
        if request.scope & DEVICE == 0 {
            let cached = die.entry(at).or_default();
            cached.cell = cached.cell.over(cell);
            cached.dirty |= cell.mask;
            return;
        }
        if let Some(cached) = die.get_mut(&at) {
            cached.cell = cached.cell.over(cell);
            cached.dirty &= !cell.mask;
        }
        self.fabric.push(Write { op: request.op, at, cell, adds: None });
        self.ops.entry(request.op).or_default().left += 1;
    }
}
