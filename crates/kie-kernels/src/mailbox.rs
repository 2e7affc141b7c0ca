//! What the engine's scheduler and a device's runner hand each other: a ring of commands one way, a
//! sequence of records a slot the other way. Both ends run on the engine's thread, between passes
//! or launches; the words that the host shares with a kernel while it runs are `mono/wire.rs`'s.
//!
//! # Protocol
//! * The host owns a slot from the moment it saw the slot's `end` until it sends the next command
//!   for it; the device owns it in between. `params`, `tokens`, `stop_ids`, `bias`, `masks` are
//!   plain memory written by the owner only (what `masks` points to has a protocol of its own). The
//!   hand-over to the device is the release store of `sent` in [`Mailbox::send`], matched by the
//!   acquire load in [`Mailbox::receive`].
//! * The page table is the host's alone. The device reads the entries of the positions that the
//!   last start, logits or grow command gave it; the host writes only entries behind them.
//! * The device writes record `n`, then stores `made = n + 1` with release; the host loads `made`
//!   with acquire and may read the records below it at any later time while it owns or polls the
//!   slot. `end` is stored with release after the last `made`, so a host that sees `end != Running`
//!   with acquire sees all records. A slot's records are the whole sequence: a slow host loses
//!   nothing and stalls nobody.
//! * The protocol would hold for two threads, one at each end. No more than one is at an end.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;

use crate::abi::{
    Command, Dims, Drafts, Record, Sampling, SlotEnd, SlotParams, MAX_ALTERNATIVES, MAX_BIAS,
    MAX_STOP_IDS,
};
use crate::field::Field;
use crate::mask::Masks;

/// Commands in flight at most; the host never has more than one a slot.
const COMMANDS: usize = 64;

/// Plain memory whose owner alternates by the protocol above.
struct Plain<T>(UnsafeCell<T>);

// SAFETY: the mailbox protocol (module docs) hands each cell over with release/acquire pairs, so no
// two threads touch it at the same time; host and device uphold it.
unsafe impl<T: Send> Sync for Plain<T> {}

/// One slot's half-duplex memory.
struct Slot {
    made: AtomicU32,
    end: AtomicU32,
    /// Tokens that were drafted, and those of them that were right.
    drafts: [AtomicU32; 2],
    /// Physical page of each logical page, `[groups][max_pages]`.
    pages: Box<[Box<[AtomicU32]>]>,
    request: Plain<SlotMemory>,
    /// What was generated, `[max_positions]`.
    records: Field<Record>,
    /// Alternatives of the record with the same index, `[n][MAX_ALTERNATIVES]`: a ring over the
    /// last [`Mailbox::ALTERNATIVES`] records.
    alternatives: Field<(u32, f32)>,
}

/// What the host writes of a request before the slot is the device's.
pub struct SlotMemory {
    /// Scalars of the request.
    pub params: SlotParams,
    /// Prompt ids, then those of a prediction, `[max_positions]`.
    pub tokens: Box<[u32]>,
    /// Ids that end the sequence.
    pub stop_ids: Box<[u32]>,
    /// Logit bias.
    pub bias: Box<[(u32, f32)]>,
    /// What each token may be, where a grammar says so.
    pub masks: Option<Arc<Masks>>,
}

/// Shared memory of one device. See the module's protocol.
pub struct Mailbox {
    commands: Box<[Plain<Command>]>,
    sent: AtomicU32,
    received: AtomicU32,
    slots: Box<[Slot]>,
    logits: Plain<Box<[f32]>>,
}

impl Mailbox {
    /// Records whose alternatives are kept.
    pub const ALTERNATIVES: usize = 1024;

    /// Bytes that [`Mailbox::new`] takes, but for what does not grow with a program.
    pub fn bytes(dims: &Dims) -> u64 {
        let positions = u64::from(dims.max_positions) * (size_of::<Record>() + 4) as u64;
        let alternatives = Self::ALTERNATIVES * MAX_ALTERNATIVES * size_of::<(u32, f32)>();
        u64::from(dims.slots) * (positions + alternatives as u64)
    }

    /// Memory for the slots of a program with so many page groups. Large arrays come zeroed from
    /// the allocator, untouched.
    pub fn new(dims: &Dims, groups: usize) -> Self {
        let positions = dims.max_positions as usize;
        let zeros = |n: usize| (0..n).map(|_| AtomicU32::new(0)).collect();
        let slot = || Slot {
            made: AtomicU32::new(0),
            end: AtomicU32::new(SlotEnd::Cancelled as u32),
            drafts: [const { AtomicU32::new(0) }; 2],
            pages: (0..groups).map(|_| zeros(dims.max_pages())).collect(),
            records: Field::of(vec![Record { token: 0, logprob: 0.0, t_ns: 0 }; positions]),
            alternatives: Field::of(vec![(0, 0.0); Self::ALTERNATIVES * MAX_ALTERNATIVES]),
            request: Plain(UnsafeCell::new(SlotMemory {
                params: SlotParams {
                    prompt: 0,
                    cached: 0,
                    max_new: 0,
                    min_new: 0,
                    stop_ids: 0,
                    bias: 0,
                    drafts: Drafts::None,
                    prediction: 0,
                    sampling: Sampling::default(),
                },
                tokens: vec![0; positions].into(),
                stop_ids: vec![0; MAX_STOP_IDS].into(),
                bias: vec![(0, 0.0); MAX_BIAS].into(),
                masks: None,
            })),
        };
        let none = Command { kind: crate::abi::CommandKind::Cancel, slot: u32::MAX, a: 0, b: 0 };
        Self {
            commands: (0..COMMANDS).map(|_| Plain(UnsafeCell::new(none))).collect(),
            sent: AtomicU32::new(0),
            received: AtomicU32::new(0),
            slots: (0..dims.slots).map(|_| slot()).collect(),
            logits: Plain(UnsafeCell::new(Box::new([]))),
        }
    }

    /// Host: memory of a slot it owns.
    ///
    /// # Safety
    /// The caller is the one host thread, and the slot has ended (or never started).
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slot_of_host(&self, slot: usize) -> &mut SlotMemory {
        // SAFETY: ownership by the protocol, which the caller upholds.
        unsafe { &mut *self.slots[slot].request.0.get() }
    }

    /// Device: the request of a slot it owns, which nobody writes before the slot ends.
    ///
    /// # Safety
    /// The caller is the device's control thread and received a start command for the slot that
    /// has not ended yet.
    pub unsafe fn slot_of_device(&self, slot: usize) -> &SlotMemory {
        // SAFETY: ownership by the protocol, which the caller upholds.
        unsafe { &*self.slots[slot].request.0.get() }
    }

    /// Device: a record that it has not published.
    ///
    /// # Safety
    /// The caller is the device's control thread, owns the slot, and `index` is not below what it
    /// has published of it.
    pub unsafe fn write_record(&self, slot: usize, index: usize, record: Record) {
        // SAFETY: the host reads no record before it is published.
        unsafe { self.slots[slot].records.write(index..index + 1)[0] = record };
    }

    /// Device: alternatives of a record that it has not published.
    ///
    /// # Safety
    /// As [`write_record`](Self::write_record).
    ///
    /// # Panics
    /// For more than [`MAX_ALTERNATIVES`].
    pub unsafe fn write_alternatives(&self, slot: usize, index: usize, all: &[(u32, f32)]) {
        assert!(all.len() <= MAX_ALTERNATIVES, "{} alternatives", all.len());
        let at = index % Self::ALTERNATIVES * MAX_ALTERNATIVES;
        let alternatives = &self.slots[slot].alternatives;
        // SAFETY: as above; of the ring's earlier round the host has read them (see `record`).
        unsafe { alternatives.write(at..at + all.len()).copy_from_slice(all) };
    }

    /// Physical pages of a slot's logical pages, by page group. Entries behind the positions that
    /// the device was given mean nothing.
    pub fn pages(&self, slot: usize) -> &[Box<[AtomicU32]>] {
        &self.slots[slot].pages
    }

    /// Device: the physical page of a logical page whose positions it was given.
    pub fn page(&self, slot: usize, group: usize, logical: usize) -> u32 {
        self.slots[slot].pages[group][logical].load(Ordering::Relaxed)
    }

    /// Host: sends a command; false if the ring is full, which only a stuck device can cause.
    /// A start or logits command first resets the slot's counters.
    pub fn send(&self, command: Command) -> bool {
        let sent = self.sent.load(Ordering::Relaxed);
        if sent.wrapping_sub(self.received.load(Ordering::Acquire)) as usize >= COMMANDS {
            return false;
        }
        if command.kind.begins() {
            let slot = &self.slots[command.slot as usize];
            slot.made.store(0, Ordering::Relaxed);
            slot.drafts.iter().for_each(|count| count.store(0, Ordering::Relaxed));
            slot.end.store(SlotEnd::Running as u32, Ordering::Relaxed);
        }
        // SAFETY: the cell is free: the device's `received` has passed it (checked above), and the
        // one host thread is here.
        unsafe { *self.commands[sent as usize % COMMANDS].0.get() = command };
        self.sent.store(sent.wrapping_add(1), Ordering::Release);
        true
    }

    /// Device: the next command, if one waits.
    pub fn receive(&self) -> Option<Command> {
        let received = self.received.load(Ordering::Relaxed);
        if self.sent.load(Ordering::Acquire) == received {
            return None;
        }
        // SAFETY: `sent` (acquire) has passed the cell, so the host wrote it and will not touch it
        // before `received` passes it.
        let command = unsafe { *self.commands[received as usize % COMMANDS].0.get() };
        self.received.store(received.wrapping_add(1), Ordering::Release);
        Some(command)
    }

    /// Device: the records below `made` are complete.
    pub fn publish(&self, slot: usize, made: u32) {
        self.slots[slot].made.store(made, Ordering::Release);
    }

    /// Device: a step checked drafts.
    pub fn count_drafts(&self, slot: usize, drafted: u32, accepted: u32) {
        for (count, more) in self.slots[slot].drafts.iter().zip([drafted, accepted]) {
            count.fetch_add(more, Ordering::Relaxed);
        }
    }

    /// Host: tokens of a slot's request that were drafted, and those of them that were right.
    pub fn drafts(&self, slot: usize) -> [u32; 2] {
        [0, 1].map(|i| self.slots[slot].drafts[i].load(Ordering::Relaxed))
    }

    /// Device: gives the slot back.
    pub fn end(&self, slot: usize, end: SlotEnd) {
        self.slots[slot].end.store(end as u32, Ordering::Release);
    }

    /// Host: how many records there are, and whether the slot has ended. `end` is read first, so
    /// an ended slot's count is final.
    pub fn poll(&self, slot: usize) -> (u32, SlotEnd) {
        let end = match self.slots[slot].end.load(Ordering::Acquire) {
            0 => SlotEnd::Running,
            1 => SlotEnd::StopId,
            2 => SlotEnd::Length,
            3 => SlotEnd::Cancelled,
            4 => SlotEnd::NotFinite,
            _ => SlotEnd::Logits,
        };
        (self.slots[slot].made.load(Ordering::Acquire), end)
    }

    /// Host: a record that `poll` has announced, with its `k` alternatives copied to `out`.
    pub fn record(&self, slot: usize, index: u32, k: usize, out: &mut [(u32, f32)]) -> Record {
        let (slot, index) = (&self.slots[slot], index as usize);
        let at = index % Self::ALTERNATIVES * MAX_ALTERNATIVES;
        // SAFETY: record `index` is below an acquired `made`: the device wrote it and its
        // alternatives and will not write them again before the host sends a new command (or, for
        // alternatives, before `ALTERNATIVES` further records, which the polling host outruns).
        let (record, alternatives) =
            unsafe { (slot.records.read(index..index + 1)[0], slot.alternatives.read(at..at + k)) };
        out[..k].copy_from_slice(alternatives);
        record
    }

    /// Device, then host after [`SlotEnd::Logits`]: logits of a logits command, `[columns][vocab]`.
    ///
    /// # Safety
    /// The caller owns the slot of the one logits command in flight.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn logits(&self) -> &mut Box<[f32]> {
        // SAFETY: one logits command is in flight at a time and its slot's owner is the caller.
        unsafe { &mut *self.logits.0.get() }
    }
}
