//! The wires of the host: the mailbox's host half, the write-once sequence between the engine
//! thread and a reader, and the bell that calls the engine thread.
//!
//! # Invariants
//! * A [`Sequence`]'s cell is written once, by its one [`Writer`], before the `word` that announces
//!   it is stored with release; readers touch announced cells only. So a reader never waits for a
//!   lock, and a slow one stalls nobody.
//! * `word` is `announced << 2 | PARKED | ENDED`. Only the writer changes the upper part and
//!   `ENDED`; a reader sets `PARKED` by compare-and-swap against what it saw, and the writer's swap
//!   both announces and learns that somebody sleeps. No wake-up can be lost between the two.
//! * The descriptor of a sequence is readable, or `PARKED` is set, or its reader has yet to see
//!   `Pending`: whoever polls misses nothing.

use std::mem::MaybeUninit;
use std::sync::atomic::Ordering;
use std::sync::Arc as HostArc;
use std::time::{Duration, Instant};

use kie_kernels::abi::{Command, Dims, Record, SlotEnd};
use kie_kernels::mailbox::{Mailbox, SlotMemory};

use super::primitive::{cells, pause, Arc, AtomicU32, UnsafeCell, Waker, SPINS};

const ENDED: u32 = 1;
const PARKED: u32 = 2;
const SHIFT: u32 = 2;

/// The shared half of [`sequence`].
pub(super) struct Sequence<T, E> {
    cells: Box<[UnsafeCell<MaybeUninit<T>>]>,
    end: UnsafeCell<Option<E>>,
    word: AtomicU32,
    pub(super) waker: Waker,
}

// SAFETY: cells and end are written by the one Writer before the release store that announces them
// and only read afterwards (module invariants), so sharing needs what sharing `&T` and moving `T`
// to the reader need.
unsafe impl<T: Send + Sync, E: Send + Sync> Sync for Sequence<T, E> {}
// SAFETY: as above; the cells are owned values.
unsafe impl<T: Send + Sync, E: Send + Sync> Send for Sequence<T, E> {}

/// Writes a sequence. Dropped without an [`end`](Writer::end), it ends it with nothing.
pub struct Writer<T, E> {
    sequence: Arc<Sequence<T, E>>,
    written: usize,
    ended: bool,
}

/// Reads a sequence; clones read the same one.
pub struct Reader<T, E> {
    pub(super) sequence: Arc<Sequence<T, E>>,
}

impl<T, E> Clone for Reader<T, E> {
    fn clone(&self) -> Self {
        Self { sequence: Arc::clone(&self.sequence) }
    }
}

/// A sequence of at most `capacity` values, then one `E`.
pub fn sequence<T: Copy, E>(capacity: usize) -> (Writer<T, E>, Reader<T, E>) {
    assert!(capacity < 1 << (32 - SHIFT), "a sequence of {capacity} values");
    let sequence = Arc::new(Sequence {
        cells: cells(capacity),
        end: UnsafeCell::new(None),
        word: AtomicU32::new(0),
        waker: Waker::default(),
    });
    (Writer { sequence: Arc::clone(&sequence), written: 0, ended: false }, Reader { sequence })
}

impl<T, E> Writer<T, E> {
    /// Adds a value that readers do not see yet. Beyond the capacity values are dropped.
    pub fn push(&mut self, value: T) {
        if let Some(cell) = self.sequence.cells.get(self.written) {
            // SAFETY: the cell is not announced, and this is the one writer.
            cell.with_mut(|place| unsafe { (*place).write(value) });
            self.written += 1;
        }
    }

    /// Announces all that was pushed. A system call only if a reader sleeps.
    pub fn publish(&mut self) {
        self.announce(0);
    }

    /// Announces all that was pushed, and that no more comes.
    pub fn end(mut self, end: E) {
        // SAFETY: `ENDED` is not announced, and this is the one writer.
        self.sequence.end.with_mut(|place| unsafe { *place = Some(end) });
        self.ended = true;
        self.announce(ENDED);
    }

    fn announce(&self, flags: u32) {
        let word = (self.written as u32) << SHIFT | flags;
        if self.sequence.word.swap(word, Ordering::AcqRel) & PARKED != 0 {
            self.sequence.waker.wake(&self.sequence.word);
        }
    }
}

impl<T, E> Drop for Writer<T, E> {
    fn drop(&mut self) {
        if !self.ended {
            self.announce(ENDED);
        }
    }
}

/// Whether `word` announces more than `have` values, or the end.
fn has_news(word: u32, have: usize) -> bool {
    (word >> SHIFT) as usize > have || word & ENDED != 0
}

impl<T: Copy, E> Reader<T, E> {
    /// Values announced so far, and whether more may come.
    pub fn seen(&self) -> (usize, bool) {
        let word = self.sequence.word.load(Ordering::Acquire);
        ((word >> SHIFT) as usize, word & ENDED != 0)
    }

    /// An announced value.
    pub fn get(&self, index: usize) -> Option<T> {
        if index >= self.seen().0 {
            return None;
        }
        // SAFETY: the cell was announced (acquired above): it is initialised and never written
        // again.
        self.sequence.cells[index].with(|place| Some(unsafe { (*place).assume_init() }))
    }

    /// What ended it: `None` while it runs or if its writer was dropped.
    pub fn end(&self) -> Option<&E> {
        if !self.seen().1 {
            return None;
        }
        // SAFETY: `ENDED` was acquired: the value is complete and never written again, and lives
        // as long as the sequence that `self` holds.
        self.sequence.end.with(|place| unsafe { (*place).as_ref() })
    }

    /// Looks out for more than `have` values, or the end, without sleeping: for so long at most.
    pub fn watch(&self, have: usize, most: Duration) {
        let begin = Instant::now();
        while begin.elapsed() < most {
            if has_news(self.sequence.word.load(Ordering::Acquire), have) {
                return;
            }
            pause();
        }
    }

    /// Sleeps until more than `have` values are announced or the sequence has ended: spins a few
    /// microseconds, then a futex. False if `timeout` passed first.
    pub fn wait(&self, have: usize, timeout: Option<Duration>) -> bool {
        let Sequence { word, waker, .. } = &*self.sequence;
        for _ in 0..SPINS {
            if has_news(word.load(Ordering::Acquire), have) {
                return true;
            }
            pause();
        }
        let until = timeout.and_then(|t| Instant::now().checked_add(t));
        loop {
            let seen = word.load(Ordering::Acquire);
            if has_news(seen, have) {
                return true;
            }
            let left = until.map(|t| t.saturating_duration_since(Instant::now()));
            if left.is_some_and(|t| t.is_zero()) {
                return false;
            }
            let parked = seen | PARKED;
            let set = word.compare_exchange(seen, parked, Ordering::AcqRel, Ordering::Acquire);
            if set.is_ok() {
                waker.wait(word, parked, left);
            }
        }
    }

    /// A descriptor that is readable while there is news, made on first use. Read with `get`
    /// until there is nothing more, then call [`rearm`](Self::rearm), then poll.
    pub fn fd(&self, have: usize) -> std::io::Result<std::os::fd::RawFd> {
        let (fd, first) = self.sequence.waker.fd()?;
        if first {
            self.rearm(have);
        }
        Ok(fd)
    }

    /// Makes the descriptor unreadable until there are more than `have` values or the end; true
    /// if there is news already. Does nothing without a descriptor.
    pub fn rearm(&self, have: usize) -> bool {
        let Sequence { word, waker, .. } = &*self.sequence;
        if !waker.has_fd() {
            return false;
        }
        waker.drain();
        loop {
            let seen = word.load(Ordering::Acquire);
            if has_news(seen, have) {
                waker.signal();
                return true;
            }
            let parked = seen | PARKED;
            let set = word.compare_exchange(seen, parked, Ordering::AcqRel, Ordering::Acquire);
            if set.is_ok() {
                return false;
            }
        }
    }
}

/// Calls the engine thread: anyone rings, one thread listens.
#[derive(Default)]
pub struct Bell {
    word: AtomicU32,
    waker: Waker,
}

const RUNG: u32 = 1;

impl Bell {
    /// Rings. What was written before is seen by the listener. A system call only if it sleeps.
    pub fn ring(&self) {
        if self.word.fetch_or(RUNG, Ordering::AcqRel) & PARKED != 0 {
            self.waker.wake(&self.word);
        }
    }

    /// True if it rang since the last call: one load in the common case.
    pub fn rang(&self) -> bool {
        self.word.load(Ordering::Relaxed) & RUNG != 0
            && self.word.swap(0, Ordering::AcqRel) & RUNG != 0
    }

    /// Sleeps until it rings, or for `timeout`.
    pub fn listen(&self, timeout: Option<Duration>) {
        let set = self.word.compare_exchange(0, PARKED, Ordering::AcqRel, Ordering::Acquire);
        if set.is_ok() {
            self.waker.wait(&self.word, PARKED, timeout);
            self.word.fetch_and(!PARKED, Ordering::AcqRel);
        }
    }
}

/// The host half of a mailbox. There is one a mailbox, so its owner is the one host thread.
pub struct HostRing {
    mailbox: HostArc<Mailbox>,
}

impl HostRing {
    /// A mailbox for the slots of a program with so many page groups, and its host half.
    pub fn new(dims: &Dims, groups: usize) -> Self {
        Self { mailbox: HostArc::new(Mailbox::new(dims, groups)) }
    }

    /// What the device gets.
    pub fn mailbox(&self) -> HostArc<Mailbox> {
        HostArc::clone(&self.mailbox)
    }

    /// A slot's memory; `None` while the device owns it.
    pub fn slot(&mut self, slot: usize) -> Option<&mut SlotMemory> {
        if self.mailbox.poll(slot).1 == SlotEnd::Running {
            return None;
        }
        // SAFETY: the slot has ended (acquired above), and `&mut self` of the only HostRing of
        // this mailbox is the one host thread.
        Some(unsafe { self.mailbox.slot_of_host(slot) })
    }

    /// Writes page tables, one a page group, from logical page `from` on: behind what the device
    /// was given.
    pub fn write_pages(&self, slot: usize, tables: &[Vec<u32>], from: usize) {
        for (to, table) in self.mailbox.pages(slot).iter().zip(tables) {
            for (to, page) in to.iter().zip(table).skip(from) {
                to.store(*page, Ordering::Relaxed);
            }
        }
    }

    /// Sends a command; false if the ring is full. See [`Mailbox::send`].
    pub fn send(&mut self, command: Command) -> bool {
        self.mailbox.send(command)
    }

    /// Records of a slot, and whether it has ended.
    pub fn poll(&self, slot: usize) -> (u32, SlotEnd) {
        self.mailbox.poll(slot)
    }

    /// An announced record and its first alternatives.
    pub fn record(&self, slot: usize, index: u32, alternatives: &mut [(u32, f32)]) -> Record {
        self.mailbox.record(slot, index, alternatives.len(), alternatives)
    }

    /// Tokens of a slot's request that were drafted, and those of them that were right.
    pub fn drafts(&self, slot: usize) -> [u32; 2] {
        self.mailbox.drafts(slot)
    }

    /// What the last logits command of `slot` left; `None` if that has not ended.
    pub fn logits(&mut self, slot: usize) -> Option<&[f32]> {
        if self.mailbox.poll(slot).1 != SlotEnd::Logits {
            return None;
        }
        // SAFETY: the slot's logits command has ended (acquired above) and the host sends one at
        // a time, so the device does not touch the logits while `self` is borrowed.
        Some(unsafe { self.mailbox.logits() })
    }
}
