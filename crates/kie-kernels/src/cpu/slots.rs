//! The CPU's control plane: which columns the next pass has, and what its tokens do to the slots.
//!
//! A pass takes every decoding slot as one column, puts drafts of what follows behind some, and
//! fills the rest with prompt positions, oldest request first. A slot whose pages end waits for
//! more. What a column computes does not depend on the others, so neither the chunking of a prompt
//! nor the neighbours nor drafts change a request's bits.
//!
//! A pass that takes long is given up when the caller of one of its requests is gone: no slot moves
//! on, and the next pass writes the same positions again. That one is whole, unless all are gone,
//! so that those beside lose half of their time at most.
//!
//! A slot whose mask is not there when its logits are keeps them and chooses later: the others go
//! on without it. Where there are masks drafts come with them: what a grammar leaves no choice of.
//!
//! Where the model has a layer that predicts further tokens, it sees the columns of each pass once
//! the tokens behind them are known, whoever wants drafts, so that a prefix is of use to all.
//! Drafts are what it holds most likely, one after another.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::pass::{decode_rows, Column, Pass, Path};
use super::team::Team;
use super::watch::Watch;
use crate::abi::{Command, CommandKind, Drafts, Record, SlotEnd, MAX_ALTERNATIVES, NONE};
use crate::device::{Gone, Running};
use crate::error::Result;
use crate::lookup::{Lookup, DRAFT_MAX, PREDICTED_MAX};
use crate::mailbox::{Mailbox, SlotMemory};
use crate::mask::Place;
use crate::sample::{sample, top_logprobs, Rules, Scratch, SEEN_IN_PROMPT};

/// Fewest prompt columns of a pass beside decoding requests, however tight the latency bound.
const MIN_CHUNK: usize = 16;
/// Part of the latency bound that a pass is sized for; the rest is for what the next one takes
/// longer than the last.
const AIM: f64 = 0.85;
/// What is left of a slow pass's cost of a column, pass by pass: columns far into a prompt, and a
/// machine that does other things, are dearer for a while.
const REMEMBERED: f64 = 0.9;

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Idle,
    /// Prompt positions below `next` are done.
    Prefill,
    /// Feeds its last token at position `next`.
    Decode,
    /// Chooses the token at position `next` as soon as its mask is there.
    Late,
}

struct Slot {
    state: State,
    /// Next position to compute.
    next: usize,
    /// Positions that have pages.
    granted: usize,
    /// Tokens made.
    made: usize,
    /// Order of arrival.
    since: u64,
    /// Output count and prompt flag of every token, kept only where penalties ask for it.
    counts: Vec<u32>,
    penalised: bool,
    /// Prompt and output, kept only where steps may check drafts.
    text: Vec<u32>,
    lookup: Lookup,
    /// Drafts of the model's own layers of what follows, as many as may be, for the next pass.
    predicted: Vec<u32>,
    reach: usize,
    /// The first token of the masks that were read last.
    masked_from: usize,
    /// Logits of the position before `next`, kept while the mask is late.
    late: Vec<f32>,
    scratch: Scratch,
}

impl Slot {
    /// Writes what may follow the `last` token, as far as there is room for it, and says how many.
    fn draft(&mut self, memory: &SlotMemory, last: u32, spare: usize, out: &mut [u32]) -> usize {
        let params = &memory.params;
        if params.drafts == Drafts::None && memory.masks.is_none() {
            return 0;
        }
        let own = params.drafts == Drafts::Mtp && memory.masks.is_none();
        let reach = if own { std::mem::take(&mut self.reach) } else { self.reach(memory) };
        let most = reach.min(spare);
        if let Some(masks) = &memory.masks {
            return masks.drafted(&self.place(last), &mut out[..most]);
        }
        let (prompt, prediction) = (params.prompt as usize, params.prediction as usize);
        let prediction = &memory.tokens[prompt..][..prediction];
        let mut count = 0;
        if !own || !prediction.is_empty() {
            count = self.lookup.draft(&self.text, prompt, prediction, &mut out[..most]);
        }
        if own && count == 0 {
            count = most.min(self.predicted.len());
            out[..count].copy_from_slice(&self.predicted[..count]);
        }
        self.predicted.clear();
        count
    }

    /// Tokens that the next pass may draft.
    fn reach(&mut self, memory: &SlotMemory) -> usize {
        // The last of a step's tokens is chosen behind its last draft.
        let left = (memory.params.max_new as usize - self.made).min(self.granted - self.next);
        self.lookup.reach().min(left.saturating_sub(1))
    }

    /// Where it stands among its masks.
    const fn place(&self, last: u32) -> Place {
        Place { made: self.made, last, begin: self.masked_from }
    }
}

/// Columns of the passes that predict further tokens, and those of the pass before that they go on
/// from.
struct Ahead {
    columns: Vec<Column>,
    from: Vec<usize>,
    /// Of each column of the model's pass the token behind it, if it is one of the prompt.
    prompt: Vec<u32>,
}

/// A program at work on the CPU.
pub(super) struct Slots {
    pass: Pass,
    team: Team,
    mailbox: Arc<Mailbox>,
    slots: Vec<Slot>,
    columns: Vec<Column>,
    ahead: Ahead,
    arrivals: u64,
    max_itl_ms: Option<f64>,
    /// The host thread has taken its core.
    joined: bool,
    /// The last pass was given up, and somebody still waits for a part of it.
    owed: bool,
    /// Measured time of one prompt column, of the slower ones of late, for `max_itl_ms`.
    prompt_column_ms: f64,
}

impl Slots {
    pub(super) fn new(
        pass: Pass,
        team: Team,
        mailbox: Arc<Mailbox>,
        max_itl: Option<Duration>,
    ) -> Self {
        let dims = pass.dims();
        let vocab = dims.vocab as usize;
        let slot = || Slot {
            state: State::Idle,
            next: 0,
            granted: 0,
            made: 0,
            since: 0,
            counts: vec![0; vocab],
            penalised: false,
            text: Vec::with_capacity(dims.max_positions as usize),
            lookup: Lookup::default(),
            predicted: Vec::with_capacity(PREDICTED_MAX),
            reach: 0,
            masked_from: 0,
            late: Vec::new(),
            scratch: Scratch::new(vocab),
        };
        Self {
            slots: (0..dims.slots).map(|_| slot()).collect(),
            columns: Vec::with_capacity(dims.columns as usize),
            ahead: Ahead {
                columns: Vec::with_capacity(dims.columns as usize),
                from: Vec::with_capacity(dims.columns as usize),
                prompt: Vec::with_capacity(dims.columns as usize),
            },
            arrivals: 0,
            max_itl_ms: max_itl.map(|t| 1e3 * t.as_secs_f64()),
            joined: false,
            owed: false,
            prompt_column_ms: 0.0,
            pass,
            team,
            mailbox,
        }
    }

    fn command(&mut self, command: Command, gone: Gone<'_>) {
        let index = command.slot as usize;
        match command.kind {
            CommandKind::Start => self.start(index, command.a as usize),
            // A slot that has ended is told anew when it starts.
            CommandKind::Grow => self.slots[index].granted = command.a as usize,
            CommandKind::Cancel => {
                if self.slots[index].state != State::Idle {
                    self.finish(index, SlotEnd::Cancelled);
                }
            }
            CommandKind::LogitsPrefill => {
                self.logits(index, command.a..command.a + command.b, Path::Prefill, gone);
            }
            CommandKind::LogitsDecode => {
                self.logits(index, command.a..command.a + 1, Path::Decode, gone);
            }
        }
    }

    fn start(&mut self, index: usize, granted: usize) {
        // SAFETY: a start command for the slot was just received, so the device owns it.
        let memory = unsafe { self.mailbox.slot_of_device(index) };
        self.pass.forget(index);
        let slot = &mut self.slots[index];
        slot.state = State::Prefill;
        slot.granted = granted;
        slot.next = memory.params.cached as usize;
        slot.made = 0;
        slot.since = self.arrivals;
        self.arrivals += 1;
        let s = &memory.params.sampling;
        slot.penalised = s.penalises();
        if slot.penalised {
            slot.counts.fill(0);
            for token in &memory.tokens[..memory.params.prompt as usize] {
                slot.counts[*token as usize] = SEEN_IN_PROMPT;
            }
        }
        slot.text.clear();
        slot.lookup = Lookup::default();
        slot.predicted.clear();
        slot.reach = 0;
        slot.masked_from = 0;
        if memory.params.drafts != Drafts::None {
            slot.text.extend_from_slice(&memory.tokens[..memory.params.prompt as usize]);
        }
        slot.late.clear();
        if memory.masks.is_some() {
            slot.late.reserve_exact(self.pass.dims().vocab as usize);
        }
    }

    fn finish(&mut self, index: usize, end: SlotEnd) {
        self.slots[index].state = State::Idle;
        self.mailbox.end(index, end);
    }

    /// Prompt columns that the latency bound leaves room for.
    fn chunk(&self, decoding: usize) -> usize {
        let most = self.pass.dims().columns as usize - decoding;
        match self.max_itl_ms {
            Some(ms) if decoding > 0 && self.prompt_column_ms > 0.0 => {
                most.min(MIN_CHUNK.max((AIM * ms / self.prompt_column_ms) as usize))
            }
            Some(_) | None => most,
        }
    }

    /// Fills `columns`; decoding ones first, each with its drafts behind it.
    fn gather(&mut self) {
        self.columns.clear();
        let decodes = |slot: &Slot| slot.state == State::Decode && slot.next < slot.granted;
        let decoding = self.slots.iter().filter(|slot| decodes(slot)).count();
        let mut spare = decode_rows(self.pass.dims()) - decoding;
        for index in 0..self.slots.len() {
            if !decodes(&self.slots[index]) {
                continue;
            }
            let mut tokens = [0; 1 + DRAFT_MAX];
            tokens[0] = self.last(index);
            // SAFETY: the slot runs, so the device owns it.
            let memory = unsafe { self.mailbox.slot_of_device(index) };
            let slot = &mut self.slots[index];
            let drafted = slot.draft(memory, tokens[0], spare, &mut tokens[1..]);
            spare -= drafted;
            for (at, token) in tokens[..=drafted].iter().enumerate() {
                let (position, path) = (slot.next + at, Path::Decode);
                let (slot, token, drafted) = (index, *token, at > 0);
                self.columns.push(Column { slot, position, token, path, wanted: true, drafted });
            }
        }
        let mut room = self.chunk(self.columns.len());
        let mut before = 0;
        while room > 0 {
            let waiting = self.slots.iter().enumerate();
            let oldest = waiting
                .filter(|(_, s)| s.state == State::Prefill && s.since >= before)
                .min_by_key(|(_, s)| s.since);
            let Some((index, slot)) = oldest else { break };
            before = slot.since + 1;
            // SAFETY: the slot runs, so the device owns it.
            let memory = unsafe { self.mailbox.slot_of_device(index) };
            let prompt = memory.params.prompt as usize;
            let count = room.min(prompt - slot.next);
            for position in slot.next..slot.next + count {
                let wanted = position + 1 == prompt;
                let token = memory.tokens[position];
                let (path, drafted) = (Path::Prefill, false);
                self.columns.push(Column { slot: index, position, token, path, wanted, drafted });
            }
            room -= count;
        }
    }

    /// What the columns' slots do after the pass.
    fn advance(&mut self) {
        let now = crate::host::now_ns();
        let (mut at, mut row) = (0, 0);
        while at < self.columns.len() {
            let column = self.columns[at];
            let slot = &mut self.slots[column.slot];
            slot.next = column.position + 1;
            at += 1;
            if column.wanted {
                let drafts = self.columns[at..].iter();
                let drafted = drafts
                    .take_while(|c| c.slot == column.slot && column.path == Path::Decode)
                    .count();
                self.tokens(at - 1..at + drafted, row, now);
                at += drafted;
                row += 1 + drafted;
            }
        }
    }

    /// Chooses the token that follows the first of these columns, of one slot, and those behind its
    /// drafts for as long as each draft is what was chosen.
    fn tokens(&mut self, columns: Range<usize>, row: usize, now: u64) {
        let (index, drafted) = (self.columns[columns.start].slot, columns.len() - 1);
        self.choose(index, Some(row), now);
        let mut accepted = 0;
        while accepted < drafted && self.slots[index].state == State::Decode {
            let draft = self.columns[columns.start + 1 + accepted];
            if self.last(index) != draft.token {
                break;
            }
            accepted += 1;
            self.slots[index].next = draft.position + 1;
            self.choose(index, Some(row + accepted), now);
        }
        if accepted < drafted {
            let last = columns.start + accepted;
            self.pass.go_back(last, index, self.columns[last].position);
        }
        if drafted > 0 {
            self.slots[index].lookup.saw(drafted, accepted);
            self.mailbox.count_drafts(index, drafted as u32, accepted as u32);
        }
    }

    /// Which tokens of prompts stand behind the pass's columns.
    fn look_ahead(&mut self) {
        self.ahead.prompt.clear();
        for column in self.columns.iter().filter(|_| self.pass.predicts()) {
            // SAFETY: the slot runs, so the device owns it.
            let memory = unsafe { self.mailbox.slot_of_device(column.slot) };
            let prompt = &memory.tokens[..memory.params.prompt as usize];
            self.ahead.prompt.push(prompt.get(column.position + 1).copied().unwrap_or(NONE));
        }
    }

    /// What predicts further tokens sees the pass's columns, and drafts for who wants it. Prompts
    /// of slots that have just ended are seen, too: the host, on this thread, still keeps their
    /// pages.
    fn predict(&mut self) {
        let decodes = |slot: &&Slot| slot.state == State::Decode;
        let decoding = self.slots.iter().filter(decodes).count();
        let room = decode_rows(self.pass.dims()) > decoding;
        self.ahead.columns.clear();
        self.ahead.from.clear();
        for (at, known) in self.ahead.prompt.iter().enumerate() {
            let column = self.columns[at];
            let slot = &mut self.slots[column.slot];
            let (mut token, mut wanted) = (*known, false);
            if token == NONE {
                if slot.state == State::Idle || column.position >= slot.next {
                    continue;
                }
                // SAFETY: the slot runs, so the device owns it.
                let memory = unsafe { self.mailbox.slot_of_device(column.slot) };
                let behind = column.position + 1 - memory.params.prompt as usize;
                // Any token, where the mask of the next one is late.
                token = column.token;
                if behind < slot.made {
                    token = self.mailbox.record(column.slot, behind as u32, 0, &mut []).token;
                }
                let last = behind + 1 == slot.made && slot.state == State::Decode;
                if last && room && memory.params.drafts == Drafts::Mtp && memory.masks.is_none() {
                    slot.predicted.clear();
                    slot.reach = slot.reach(memory);
                    wanted = slot.reach > 0;
                }
            }
            self.ahead.columns.push(Column { token, wanted, drafted: false, ..column });
            self.ahead.from.push(at);
        }
        while !self.ahead.columns.is_empty() {
            let Ahead { columns, from, .. } = &mut self.ahead;
            self.pass.predict(columns, from, &self.team, &self.mailbox);
            from.clear();
            let (mut at, mut row) = (0, 0);
            columns.retain_mut(|column| {
                at += 1;
                if !column.wanted {
                    return false;
                }
                let slot = &mut self.slots[column.slot];
                column.token = likeliest(self.pass.logits(row));
                column.position += 1;
                column.path = Path::Decode;
                row += 1;
                slot.predicted.push(column.token);
                let goes_on = slot.predicted.len() < slot.reach.min(PREDICTED_MAX);
                if goes_on {
                    from.push(at - 1);
                }
                goes_on
            });
        }
    }

    /// The last token that was chosen in a slot.
    fn last(&self, index: usize) -> u32 {
        self.mailbox.record(index, self.slots[index].made as u32 - 1, 0, &mut []).token
    }

    /// Has the slots whose masks were late choose where those have come; whether any did.
    fn catch_up(&mut self) -> bool {
        let now = crate::host::now_ns();
        let late = |slot: &Slot| slot.state == State::Late;
        let mut any = false;
        for index in 0..self.slots.len() {
            any |= late(&self.slots[index]) && self.choose(index, None, now);
        }
        any
    }

    /// Chooses and publishes a slot's token at `next`, of this row of logits or of those that were
    /// kept; false where its mask is not there yet.
    fn choose(&mut self, index: usize, row: Option<usize>, now: u64) -> bool {
        // SAFETY: the slot runs, so the device owns it.
        let memory = unsafe { self.mailbox.slot_of_device(index) };
        let last = if self.slots[index].made > 0 { self.last(index) } else { 0 };
        let slot = &mut self.slots[index];
        let params = &memory.params;
        let mut place = slot.place(last);
        let mask = memory.masks.as_ref().map(|masks| masks.next(&mut place));
        slot.masked_from = place.begin;
        if let Some(None) = mask {
            if let Some(row) = row {
                slot.state = State::Late;
                slot.late.clear();
                slot.late.extend_from_slice(self.pass.logits(row));
            }
            return false;
        }
        slot.state = State::Decode;
        let logits = row.map_or(&slot.late[..], |row| self.pass.logits(row));
        let stop_ids = &memory.stop_ids[..params.stop_ids as usize];
        let banned = if slot.made < params.min_new as usize { stop_ids } else { &[] };
        let bias = &memory.bias[..params.bias as usize];
        let counts: &[u32] = if slot.penalised { &slot.counts } else { &[] };
        let rules = Rules { bias, counts, banned, mask: mask.flatten() };
        let position = slot.next as u32;
        let choice = sample(logits, &params.sampling, &rules, position, &mut slot.scratch);
        if choice.bad {
            self.finish(index, SlotEnd::NotFinite);
            return true;
        }
        if slot.penalised {
            slot.counts[choice.id as usize] += 1;
        }
        if params.drafts != Drafts::None {
            slot.text.push(choice.id);
        }
        let mut alternatives = [(0, 0.0); MAX_ALTERNATIVES];
        let alternatives = &mut alternatives[..params.sampling.logprobs.saturating_sub(1) as usize];
        if !alternatives.is_empty() {
            top_logprobs(logits, alternatives);
        }
        let record = Record { token: choice.id, logprob: choice.logprob, t_ns: now };
        // SAFETY: the slot runs, so the device owns it; this record is the next to be published.
        unsafe {
            self.mailbox.write_alternatives(index, slot.made, alternatives);
            self.mailbox.write_record(index, slot.made, record);
        }
        slot.made += 1;
        self.mailbox.publish(index, slot.made as u32);
        let stopped = stop_ids.contains(&choice.id);
        let full = slot.next + 1 > self.pass.dims().max_positions as usize;
        if stopped {
            self.finish(index, SlotEnd::StopId);
        } else if slot.made == params.max_new as usize || full {
            self.finish(index, SlotEnd::Length);
        }
        true
    }

    /// Runs some positions and leaves their logits in the mailbox.
    fn logits(&mut self, index: usize, positions: Range<u32>, path: Path, gone: Gone<'_>) {
        // SAFETY: a logits command for the slot was just received, so the device owns it.
        let memory = unsafe { self.mailbox.slot_of_device(index) };
        self.columns.clear();
        for position in positions.start as usize..positions.end as usize {
            let token = memory.tokens[position];
            self.columns.push(Column {
                slot: index,
                position,
                token,
                path,
                wanted: true,
                drafted: false,
            });
        }
        // SAFETY: as above; it is the one logits command in flight.
        let out = unsafe { self.mailbox.logits() };
        let vocab = self.pass.dims().vocab as usize;
        let numbers = positions.len() * vocab;
        if out.len() != numbers {
            *out = vec![0.0; numbers].into();
        }
        let wanted = || !gone(index);
        if !self.pass.run(&self.columns, &self.team, &self.mailbox, &Watch::new(&wanted)) {
            return self.mailbox.end(index, SlotEnd::Cancelled);
        }
        for (row, values) in out.chunks_exact_mut(vocab).enumerate() {
            values.copy_from_slice(self.pass.logits(row));
        }
        self.mailbox.end(index, SlotEnd::Logits);
    }
}

/// The id of the largest logit, of equal ones the lowest.
fn likeliest(logits: &[f32]) -> u32 {
    let first = (0, f32::NEG_INFINITY);
    let larger = |best: (u32, f32), (id, logit): (u32, &f32)| {
        if *logit > best.1 {
            (id, *logit)
        } else {
            best
        }
    };
    (0..).zip(logits).fold(first, larger).0
}

impl Running for Slots {
    fn drive(&mut self, gone: Gone<'_>) -> Result<bool> {
        if !std::mem::replace(&mut self.joined, true) {
            self.team.pin_caller();
        }
        while let Some(command) = self.mailbox.receive() {
            self.command(command, gone);
        }
        if self.catch_up() {
            // Whoever makes the next masks learns of the tokens before the next pass.
            return Ok(true);
        }
        self.gather();
        if self.columns.is_empty() {
            if self.slots.iter().any(|slot| slot.state == State::Late) {
                std::thread::yield_now(); // to whoever makes the mask
            }
            return Ok(false);
        }
        let begin = Instant::now();
        let (columns, owed) = (&self.columns, self.owed);
        // Columns of one request are neighbours.
        let requests = columns.chunk_by(|a, b| a.slot == b.slot).map(|of| of[0].slot);
        let all_gone = || requests.clone().all(gone);
        let wanted = || if owed { !all_gone() } else { !requests.clone().any(gone) };
        if !self.pass.run(columns, &self.team, &self.mailbox, &Watch::new(&wanted)) {
            self.owed = !all_gone();
            return Ok(true);
        }
        self.owed = false;
        self.look_ahead();
        self.advance();
        self.predict();
        let prompts = self.columns.iter().filter(|c| c.path == Path::Prefill).count();
        if prompts >= MIN_CHUNK {
            let column_ms = begin.elapsed().as_secs_f64() * 1e3 / prompts as f64;
            self.prompt_column_ms = column_ms.max(REMEMBERED * self.prompt_column_ms);
        }
        Ok(true)
    }

    fn page(&mut self, group: usize, page: u32) -> Option<&mut [u8]> {
        Some(self.pass.page_bytes(group, page as usize))
    }

    fn park(&mut self) {
        self.team.park();
    }
}
