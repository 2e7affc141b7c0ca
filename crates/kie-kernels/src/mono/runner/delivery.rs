//! What requests ask for and what comes of them: the mailbox's device end. Tokens arrive in pinned
//! rings while a kernel runs; each becomes one record of its slot.

use std::sync::Arc;

use super::schedule::Slot;
use crate::abi::{Record, SlotEnd, MAX_ALTERNATIVES};
use crate::machine::Shared;
use crate::mailbox::{Mailbox, SlotMemory};
use crate::mono::clock::DeviceClock;
use crate::mono::wire;
use crate::sample::top_logprobs;

/// Carries tokens from rings to the mailbox.
pub(super) struct Delivery {
    pub mailbox: Arc<Mailbox>,
    clock: DeviceClock,
    vocab: u32,
    max_positions: usize,
}

impl Delivery {
    pub fn new(mailbox: Arc<Mailbox>, vocab: u32, max_positions: u32) -> Self {
        let max_positions = max_positions as usize;
        Self { mailbox, clock: DeviceClock::default(), vocab, max_positions }
    }

    /// What a slot at work was asked for.
    pub fn request(&self, slot: usize) -> &SlotMemory {
        // SAFETY: a start or logits command for the slot was received and it has not ended, so the
        // device owns it; nothing here asks for another's.
        unsafe { self.mailbox.slot_of_device(slot) }
    }

    /// Takes the tokens of a row's ring that are there, or hears that a mask is late; whether there
    /// was anything. `garbage`: they mean nothing and are told as id 0.
    pub fn collect(&mut self, out: &Shared, row: usize, slot: &mut Slot, garbage: bool) -> bool {
        let mut any = false;
        while slot.end.is_none() {
            let Some(found) = wire::next_token(out, row, slot.emitted) else { return any };
            any = true;
            slot.emitted = slot.emitted.wrapping_add(1);
            if found.token == wire::LATE {
                slot.late = true;
                continue;
            }
            let t_ns = self.clock.host_ns(found.t_ns);
            let token = if garbage { 0 } else { found.token };
            self.publish(row, slot, Record { token, logprob: found.logprob, t_ns });
        }
        any
    }

    /// Publishes a token; what is none ends the sequence.
    fn publish(&self, row: usize, slot: &mut Slot, record: Record) {
        if record.token >= self.vocab {
            slot.end = Some(SlotEnd::NotFinite);
            return;
        }
        // SAFETY: the slot runs, so the device owns it; this record is the next to be published.
        unsafe { self.mailbox.write_record(row, slot.generated, record) };
        let request = self.request(row);
        slot.generate(record.token, request, self.max_positions);
        // Alternatives come after the launch; such launches are one token long.
        if request.params.sampling.logprobs <= 1 {
            self.mailbox.publish(row, slot.generated as u32);
        }
    }

    /// Alternatives that the token of a launch is to have; 0 for none.
    pub fn alternatives_wanted(&self, row: usize, slot: &Slot) -> usize {
        match slot.generated {
            _ if slot.late => 0,
            0 => 0,
            _ => self.request(row).params.sampling.logprobs.saturating_sub(1) as usize,
        }
    }

    /// The likeliest tokens of the step that a one-token launch made, from its logits.
    pub fn publish_alternatives(&self, row: usize, slot: &Slot, wanted: usize, logits: &[f32]) {
        let mut alternatives = [(0, 0.0); MAX_ALTERNATIVES];
        top_logprobs(logits, &mut alternatives[..wanted]);
        let last = slot.generated - 1;
        // SAFETY: the slot runs, so the device owns it; this record is the next to be published.
        unsafe { self.mailbox.write_alternatives(row, last, &alternatives[..wanted]) };
        self.mailbox.publish(row, slot.generated as u32);
    }

    /// The answer to a logits command for the slot.
    pub fn publish_logits(&self, slot: usize, logits: Vec<f32>) {
        // SAFETY: this slot's is the one logits command in flight.
        let out = unsafe { self.mailbox.logits() };
        *out = logits.into();
        self.mailbox.end(slot, SlotEnd::Logits);
    }
}
