//! Launches on all ranks: what each is given, the orders to a running one, and the sequence numbers
//! that tell steps apart.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::Arc;
use std::time::Duration;

use super::schedule::{Slot, LONG};
use crate::error::Result;
use crate::machine::Flight;
use crate::mailbox::{Mailbox, SlotMemory};
use crate::meter::{Meter, Mode};
use crate::mono::interleave::Chunk;
use crate::mono::loaded::Loaded;
use crate::mono::lower::layout::{Exchange, Kind};
use crate::mono::lower::segments::head_segment;
use crate::mono::prefill::{Part, Prefill};
use crate::mono::wire::{wants, Drafting, ExpiredWait, Order, Sequence};

/// What every rank's launch is given, beside what is its own.
#[derive(Default)]
pub(super) struct Ask {
    pub columns: u32,
    pub steps: u32,
    /// Sequences, the first columns.
    pub live: u32,
    /// Of one column's kernels, the one with streamed pages.
    pub streamed: bool,
    /// Drafts of each sequence, by the kernel that makes them.
    pub drafting: Option<[Drafting; 8]>,
    /// Positions of a prompt, or 0.
    pub prompt: u32,
    /// The first step begins at the head: a prefill launch leaves what it takes.
    pub at_head: bool,
    /// Positions whose logits are kept.
    pub logits: Option<u32>,
    pub column: [Sequence; 8],
}

/// A launch on its way on every rank, and how it is measured, if it is.
pub(super) type Started = (Vec<Box<dyn Flight>>, Option<Mode>);

/// The ranks, and what tells their launches apart.
pub(super) struct Launches {
    /// One a machine. All are told the same; the first one's tokens count.
    pub ranks: Vec<Loaded>,
    pub seqno: u32,
    /// How long a wait inside the kernel lasts at most.
    pub budget_ns: u64,
    pub meter: Option<Arc<Meter>>,
}

impl Launches {
    pub fn new(ranks: Vec<Loaded>, first_seqno: u32, hang_timeout: Duration) -> Self {
        let budget_ns = u64::try_from(hang_timeout.as_nanos()).unwrap_or(u64::MAX);
        Self { ranks, seqno: first_seqno, budget_ns, meter: None }
    }

    /// The machine that the host listens to.
    pub fn first(&self) -> &Loaded {
        &self.ranks[0]
    }

    /// How long a wait inside the kernel lasts at most.
    pub fn budget(&self) -> Duration {
        Duration::from_nanos(self.budget_ns)
    }

    /// Whether every machine has the prefill kernel.
    pub fn is_wide(&self) -> bool {
        self.ranks.iter().all(|rank| rank.prefill.is_some())
    }

    /// Whether what launches of tokens compute now means nothing.
    pub fn is_garbage(&self) -> bool {
        self.meter.as_ref().is_some_and(|meter| meter.mode().is_garbage())
    }

    /// Tells the running launch; the first rank's watches.
    pub fn order(&self, order: Order) {
        self.first().room.control.word32(0).store(order as u32, Release);
    }

    /// The host is there. The first rank's kernel watches it; each does when it is measured alone.
    pub fn heartbeat(&self) {
        for rank in &self.ranks {
            rank.room.control.word32(4).fetch_add(1, Relaxed);
        }
    }

    /// Steps that the last launch made.
    pub fn steps_made(&self) -> u32 {
        self.first().room.control.word32(12).load(Acquire)
    }

    /// The waits that expired, by rank.
    pub fn expired_waits(&self) -> Result<Vec<Option<Vec<ExpiredWait>>>> {
        self.ranks.iter().map(Loaded::expired_waits).collect()
    }

    /// Logits of the last launch, rows `from ..` into the rows of `out`.
    pub fn read_logits(&self, from: usize, out: &mut [f32]) -> Result<()> {
        self.ranks.iter().try_for_each(|rank| rank.read_logits(from, out))
    }

    /// A slot's request and page tables to where kernels look for them.
    pub fn write_slot(&self, row: usize, request: &SlotMemory, mailbox: &Mailbox) -> Result<()> {
        self.ranks.iter().try_for_each(|rank| {
            rank.write_slot(row, request)?;
            rank.write_pages(row, mailbox.pages(row))
        })
    }

    /// A slot's page tables to where kernels look for them.
    pub fn write_pages(&self, row: usize, mailbox: &Mailbox) -> Result<()> {
        let pages = mailbox.pages(row);
        self.ranks.iter().try_for_each(|rank| rank.write_pages(row, pages))
    }

    /// What the next token of a row may be, which is its `emitted`-th, or, with so many drafts
    /// `ahead` of it, a later one; a launch may be on its way.
    pub fn write_mask(&self, row: usize, emitted: u32, ahead: usize, mask: &[AtomicU32]) {
        self.ranks.iter().for_each(|rank| rank.write_mask(row, emitted, ahead, mask));
    }

    /// Tokens to where prompts are read.
    pub fn write_prompt(&self, tokens: &[u32]) -> Result<()> {
        let bytes: Vec<u8> = tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
        self.ranks.iter().try_for_each(|r| r.machine.write(&r.room.prompt, 0, &bytes))
    }

    /// Ids of a slot's text or prediction to where kernels look for them (`Loaded::write_ids`).
    pub fn write_ids(&self, row: usize, which: usize, from: usize, ids: &[u32]) -> Result<()> {
        self.ranks.iter().try_for_each(|rank| rank.write_ids(row, which, from, ids))
    }

    /// So many sequence numbers of steps were used.
    pub fn advance(&mut self, steps: u32) {
        self.seqno += steps;
    }

    /// Starts sequence numbers anew where a longest launch would pass the last: the words are
    /// zeroed. Kernels tell a step's layers, and the choice of its token, apart by 32 bits.
    pub fn renew_seqnos(&mut self) -> Result<()> {
        if self.seqno >= u32::MAX / (self.first().model.layers() + 1) - LONG {
            self.ranks.iter().try_for_each(Loaded::clear_words)?;
            self.seqno = 1;
        }
        Ok(())
    }

    /// Starts the decode kernel on every rank. `measured`: what its meter looks at.
    pub fn decode(&mut self, ask: &Ask, measured: bool) -> Result<Started> {
        self.renew_seqnos()?;
        let seqno = self.seqno;
        self.order(Order::GoOn);
        let mode = self.meter.as_ref().filter(|_| measured).map(|m| m.mode());
        let mut flights = Vec::with_capacity(self.ranks.len());
        let (columns, streamed) = (ask.columns, ask.streamed);
        let kind = Kind { columns, streamed, lookup: ask.drafting.is_some() };
        for loaded in &mut self.ranks {
            let mut args = loaded.args(ask.columns);
            if mode == Some(Mode::Alone) {
                (args.rank, args.peer_offset) = (0, [0; 8]);
            }
            (args.seqno, args.budget_ns, args.steps) = (seqno, self.budget_ns, ask.steps);
            (args.live, args.count, args.column) = (ask.live, ask.prompt, ask.column);
            args.at_head = u64::from(ask.at_head);
            args.drafting = ask.drafting.unwrap_or_default();
            if ask.prompt > 0 {
                args.prompt = loaded.room.prompt.address;
            }
            match ask.logits {
                Some(positions) => args.logits = loaded.logits_for(positions as usize)?,
                // A prompt's positions need no head.
                None if ask.live == 0 => {
                    args.segment_count = head_segment(&loaded.model, &loaded.partition)
                }
                None => {}
            }
            let measuring = mode.zip(loaded.probe.as_ref());
            let probing =
                measuring.and_then(|(mode, probe)| probe.module(mode, ask.streamed, &mut args));
            let module = match probing {
                Some(module) => Arc::clone(module),
                None => loaded.module(kind)?,
            };
            flights.push(loaded.decode(&module, &args)?);
        }
        Ok((flights, mode))
    }

    /// Where the residual behind the last layer of a launch of so many columns stands, by rank, and
    /// how many words a column has.
    pub fn residuals(&self, columns: u32) -> Vec<[u64; 2]> {
        let of = |rank: &Loaded| {
            let exchange = Exchange::new(&rank.model, &rank.partition, columns);
            let buffers = exchange.num_buffers;
            let at = buffers + (rank.model.layers() - 1) % buffers;
            let address =
                rank.words_address() + 8 * u64::from(at * rank.model.lanes) * exchange.vec_h;
            [address, exchange.words_h]
        };
        self.ranks.iter().map(of).collect()
    }

    /// Starts the prefill kernel on every rank, over the next layers of a chunk, whose tokens are
    /// at `prompt`. `state`: as in [`Sequence`]. `to_head`: it leaves what a launch that begins at
    /// the head takes.
    pub fn prefill(
        &mut self,
        chunk: &Chunk,
        layers: u32,
        state: u32,
        to_head: bool,
    ) -> Result<Vec<Box<dyn Flight>>> {
        self.renew_seqnos()?;
        let seqno = if to_head { self.seqno } else { 0 };
        let all = || self.ranks.iter().filter_map(|l| Some((l, l.prefill.as_ref()?)));
        for (loaded, prefill) in all() {
            prefill.clear(&*loaded.machine)?;
        }
        let part = Part {
            row: chunk.slot as u32,
            first: chunk.first as u32,
            count: chunk.count as u32,
            layers: chunk.done..chunk.done + layers,
            state,
        };
        let launch = |(loaded, prefill): (&Loaded, &Prefill)| {
            let mut args = loaded.args(1);
            (args.prompt, args.budget_ns) = (loaded.room.prompt.address, self.budget_ns);
            args.seqno = seqno;
            prefill.launch(&*loaded.machine, args, &part)
        };
        all().map(launch).collect()
    }
}

/// A column of a slot's sequence, in a program with so many positions.
pub(super) fn sequence(
    row: usize,
    slot: &Slot,
    request: &SlotMemory,
    max_positions: usize,
) -> Sequence {
    let params = &request.params;
    let s = params.sampling;
    let flag = |on: bool, bit: u32| if on { bit } else { 0 };
    let filter = s.temperature > 0.0 && (s.top_k > 0 || s.top_p < 1.0 || s.min_p > 0.0);
    let left = params.max_new as usize - slot.generated;
    Sequence {
        seed: s.seed,
        row: row as u32,
        position: slot.next as u32,
        token: slot.token.unwrap_or(0),
        generated: slot.generated as u32,
        min_new: params.min_new,
        last: (slot.next + left).min(max_positions).min(slot.granted) as u32,
        stop_count: params.stop_ids,
        wants: flag(s.logprobs > 0, wants::LOGPROB)
            | flag(params.bias > 0, wants::BIAS)
            | flag(s.penalises(), wants::PENALTIES)
            | flag(filter, wants::FILTER)
            | flag(request.masks.is_some(), wants::MASK),
        temperature: s.temperature,
        top_p: s.top_p,
        min_p: s.min_p,
        repetition: s.repetition_penalty,
        presence: s.presence_penalty,
        frequency: s.frequency_penalty,
        top_k: s.top_k,
        emitted: slot.emitted,
        state: slot.recurrent.ask(slot.next),
        padding: 0,
    }
}
