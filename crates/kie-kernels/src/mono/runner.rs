//! A program at work on a machine: which sequences the next launch has, what it is given, and how
//! its tokens reach the mailbox.
//!
//! A launch holds the whole decode loop of the sequences it was made for: it ends when one of them
//! ends, or when the host asks because something else waits (a new request, a cancel). Prompts run
//! in launches of the prefill kernel where there is one: beside sequences at work some layers at a
//! time, with a token between. Elsewhere, and where they are short, they are columns of the decode
//! kernel: beside sequences those that they leave free. So what a column is for never changes while
//! a launch runs, pages and tables are written only between launches, and the host only reads
//! tokens as they come.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::clock::DeviceClock;
use super::loaded::Loaded;
use super::lower::segments::head_segment;
use super::prefill::{self, Part, Prefill};
use super::slices::{Chunk, Pace};
use super::wire::{self, wants, Lost, Order, Sequence, Wire};
use crate::abi::{Command, CommandKind, Record, SlotEnd, MAX_ALTERNATIVES, PAGE};
use crate::device::{Phase, Running};
use crate::error::{Error, Result};
use crate::machine::{Flight, Launch, Platform};
use crate::mailbox::Mailbox;
use crate::meter::{Meter, Mode};
use crate::sample::top_logprobs;

/// Prompt positions of a launch beside decoding sequences that leave no column free, and tokens of
/// a launch where others wait for their turn.
const TURN_POSITIONS: usize = 128;
const TURN_TOKENS: u32 = 8;
/// Steps of a launch when nobody else waits.
const LONG: u32 = 1 << 20;
/// Behind the kernel's own patience, the host's with a launch of which nothing comes.
const LOOK_AFTER: Duration = Duration::from_millis(500);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Idle,
    /// Prompt positions below `next` are done.
    Prefill,
    /// Feeds `token` at position `next`.
    Decode,
}

struct Slot {
    state: State,
    next: usize,
    /// Positions that have pages: a slot that decodes waits there for more.
    granted: usize,
    /// The page table is to be written before the next launch.
    grown: bool,
    token: u32,
    made: usize,
    /// Tokens that the row's ring ever held.
    told: u32,
    /// Order of arrival.
    since: u64,
    /// The prompt runs in the prefill kernel, to its end.
    wide: bool,
    cancelled: bool,
    /// Why it ended, once its last record is published.
    end: Option<SlotEnd>,
}

impl Slot {
    /// It decodes, and its next position has a page.
    fn has_pages(&self) -> bool {
        self.state == State::Decode && self.next < self.granted
    }
}

/// What a launch on its way is for.
enum Work {
    /// Positions of one slot's prompt, up to here.
    Prompt(usize, usize),
    /// A chunk through so many layers more.
    Layers(Chunk, u32),
    /// Tokens of these slots.
    Tokens(Vec<usize>),
    /// Tokens of the slots, and positions of another's prompt in the columns that are left.
    Both(Vec<usize>, Beside),
    /// Logits of some positions of a slot.
    Logits(Command),
}

/// A prompt beside sequences at work.
struct Beside {
    slot: usize,
    /// Positions of the launch, and how many of them a step takes.
    count: usize,
    share: usize,
}

/// What every rank's launch is given, beside what is its own.
struct Ask {
    columns: u32,
    steps: u32,
    /// Sequences, the first columns.
    live: u32,
    /// Of one column's kernels, the one with streamed pages.
    streamed: bool,
    /// Positions of a prompt, or 0.
    prompt: u32,
    /// The first step begins at the head: a prefill launch leaves what it takes.
    at_head: bool,
    /// Positions whose logits are kept.
    logits: Option<u32>,
    column: [Sequence; 8],
}

struct Going {
    flights: Vec<Box<dyn Flight>>,
    work: Work,
    steps: u32,
    /// How it is measured, if it is.
    mode: Option<Mode>,
    since: Instant,
    /// The end of a prompt stands before the tokens.
    behind_prompt: bool,
    /// Asked to leave.
    leaving: bool,
    /// Since nothing has come of it, or since somebody last looked why.
    quiet: Instant,
    /// Somebody gave up waiting.
    poisoned: bool,
}

impl Going {
    fn new(flights: Vec<Box<dyn Flight>>, work: Work, steps: u32, mode: Option<Mode>) -> Self {
        let (quiet, since) = (Instant::now(), Instant::now());
        let (behind_prompt, leaving, poisoned) = (false, false, false);
        Self { flights, work, steps, mode, since, behind_prompt, leaving, quiet, poisoned }
    }
}

/// First position and number of those that a command wants the logits of.
fn logits_range(command: Command) -> (usize, usize) {
    let count = match command.kind {
        CommandKind::LogitsDecode => 1,
        CommandKind::LogitsPrefill
        | CommandKind::Start
        | CommandKind::Cancel
        | CommandKind::Grow => command.b as usize,
    };
    (command.a as usize, count)
}

/// A program at work.
pub struct Runner {
    /// One a machine. All are told the same; the first one's tokens count.
    ranks: Vec<Loaded>,
    mailbox: Arc<Mailbox>,
    slots: Vec<Slot>,
    logits: VecDeque<Command>,
    going: Option<Going>,
    epoch: u32,
    arrivals: u64,
    /// The last launch was a prompt's.
    prompted: bool,
    clock: DeviceClock,
    /// How long a wait inside the kernel lasts at most.
    budget_ns: u64,
    meter: Option<Arc<Meter>>,
    /// What is between its layers, of the oldest prompt.
    chunk: Option<Chunk>,
    pace: Pace,
    /// Which kernel takes a prompt is a matter of its length, not of what is cached of it.
    pub(super) reproducible: bool,
}

impl Runner {
    /// Over a program whose weights are on the machines. `gap`: the longest that a prompt may hold
    /// up a token.
    pub fn new(
        ranks: Vec<Loaded>,
        mailbox: Arc<Mailbox>,
        first_epoch: u32,
        hang_timeout: Duration,
        gap: Option<Duration>,
    ) -> Self {
        let slot = |_| Slot {
            state: State::Idle,
            next: 0,
            granted: 0,
            grown: false,
            token: 0,
            made: 0,
            told: 0,
            since: 0,
            wide: false,
            cancelled: false,
            end: None,
        };
        Self {
            slots: (0..ranks[0].dims.slots).map(slot).collect(),
            ranks,
            mailbox,
            logits: VecDeque::new(),
            going: None,
            epoch: first_epoch,
            arrivals: 0,
            prompted: false,
            clock: DeviceClock::default(),
            budget_ns: u64::try_from(hang_timeout.as_nanos()).unwrap_or(u64::MAX),
            meter: None,
            chunk: None,
            pace: Pace::new(gap),
            reproducible: false,
        }
    }

    /// The same, with launches timed.
    #[must_use]
    pub fn metered(mut self, meter: Option<Arc<Meter>>) -> Self {
        self.meter = meter;
        self
    }

    /// Whether every machine has the prefill kernel.
    fn is_wide(&self) -> bool {
        self.ranks.iter().all(|l| l.prefill.is_some())
    }

    /// The machine that the host listens to.
    fn first(&self) -> &Loaded {
        &self.ranks[0]
    }

    fn command(&mut self, command: Command) -> Result<()> {
        match command.kind {
            CommandKind::Start => {
                self.arrivals += 1;
                let slot = &mut self.slots[command.slot as usize];
                (slot.state, slot.since) = (State::Prefill, self.arrivals);
                (slot.made, slot.cancelled, slot.end) = (0, false, None);
                // SAFETY: a start command for the slot was just received: the device owns it.
                let memory = unsafe { self.mailbox.slot_of_device(command.slot as usize) };
                slot.next = memory.params.cached as usize;
                (slot.granted, slot.grown) = (command.a as usize, false);
                // What the kernel reads of it is written when no kernel runs.
                slot.token = u32::MAX;
            }
            CommandKind::Cancel => {
                let slot = &mut self.slots[command.slot as usize];
                slot.cancelled = slot.state != State::Idle;
            }
            CommandKind::Grow => {
                let slot = &mut self.slots[command.slot as usize];
                (slot.granted, slot.grown) = (command.a as usize, slot.state != State::Idle);
            }
            CommandKind::LogitsPrefill | CommandKind::LogitsDecode => {
                self.logits.push_back(command);
            }
        }
        Ok(())
    }

    /// Whether a launch of tokens should make room.
    fn somebody_waits(&self, slots: &[usize]) -> bool {
        let waits = |s: &Slot| s.state == State::Prefill;
        // It waited for pages when the launch began, and has some now.
        let resumes = |(i, s): (usize, &Slot)| s.grown && s.has_pages() && !slots.contains(&i);
        !self.logits.is_empty()
            || self.slots.iter().any(waits)
            || self.slots.iter().enumerate().any(resumes)
            || slots.iter().any(|s| self.slots[*s].cancelled)
    }

    /// Reads what a launch on its way has made; ends it where it has ended.
    fn follow(&mut self, mut going: Going) -> Result<()> {
        let landed: Result<Vec<bool>> = going.flights.iter_mut().map(|f| f.done()).collect();
        let landed = match landed {
            Ok(landed) => landed,
            Err(error) => {
                self.going = Some(going);
                return Err(error);
            }
        };
        if let Work::Tokens(slots) | Work::Both(slots, _) = &going.work {
            if slots.iter().fold(false, |any, slot| self.collect(*slot) | any) {
                going.quiet = Instant::now();
            }
        }
        if landed.iter().all(|landed| *landed) {
            return self.land(going);
        }
        self.first().machine.platform().between_looks();
        // The first rank's kernel watches the host; each does when it is measured alone.
        for rank in &self.ranks {
            rank.room.control.word32(4).fetch_add(1, Relaxed);
        }
        if let Some(error) = self.look(&mut going, landed.contains(&true))? {
            // Its end may take long to come, or never does.
            self.going = Some(going);
            return Err(error);
        }
        let leave = !going.leaving
            && match &going.work {
                Work::Tokens(slots) => self.somebody_waits(slots),
                // Other prompts wait until this one is done.
                Work::Both(slots, beside) => {
                    let mut all = slots.iter().chain([&beside.slot]);
                    !self.logits.is_empty() || all.any(|s| self.slots[*s].cancelled)
                }
                Work::Prompt(slot, _) => self.slots[*slot].cancelled,
                Work::Layers(..) | Work::Logits(..) => false,
            };
        if leave {
            self.first().room.control.word32(0).store(Order::Leave as u32, Release);
            going.leaving = true;
        }
        self.going = Some(going);
        Ok(())
    }

    /// Whether a launch of which nothing has come for long was given up by somebody, and then does
    /// not end either: a block is stuck for good. A launch that waits for its turn is no such.
    /// `partly`: it has ended on some machines, which soon ends it on all.
    fn look(&self, going: &mut Going, partly: bool) -> Result<Option<Error>> {
        let budget = Duration::from_nanos(self.budget_ns);
        let long = if partly { LOOK_AFTER / 5 } else { budget.saturating_add(LOOK_AFTER) };
        // The simulator finds such blocks by itself.
        if self.first().machine.platform() == Platform::Sim || going.quiet.elapsed() < long {
            return Ok(None);
        }
        going.quiet = Instant::now();
        let lost = self.ranks.iter().map(Loaded::lost).collect::<Result<Vec<_>>>()?;
        if lost.iter().all(Option::is_none) || !std::mem::replace(&mut going.poisoned, true) {
            return Ok(None);
        }
        let Error::Hang(detail) = hang(&lost) else { return Ok(None) };
        Ok(Some(Error::Hang(format!("{detail}; the launch does not end"))))
    }

    /// Takes the tokens of a row's ring that are there; whether there were any.
    fn collect(&mut self, index: usize) -> bool {
        let mut any = false;
        loop {
            let slot = &mut self.slots[index];
            if slot.end.is_some() {
                return any;
            }
            let found = wire::told(&self.ranks[0].room.out, index, slot.told);
            let Some(told) = found else { return any };
            any = true;
            slot.told = slot.told.wrapping_add(1);
            let t_ns = self.clock.host_ns(told.t_ns);
            self.token(index, told.token, told.logprob, t_ns);
        }
    }

    /// Publishes a token and says whether the sequence ends with it, by the kernel's own rule.
    fn token(&mut self, index: usize, token: u32, logprob: f32, t_ns: u64) {
        let garbage = self.meter.as_ref().is_some_and(|m| m.mode().is_garbage());
        let token = if garbage { 0 } else { token };
        let slot = &mut self.slots[index];
        if token >= self.ranks[0].dims.vocab {
            slot.end = Some(SlotEnd::NotFinite);
            return;
        }
        // SAFETY: the slot runs, so the device owns it.
        let memory = unsafe { self.mailbox.slot_of_device(index) };
        let record = Record { token, logprob, t_ns };
        // SAFETY: as above; this record is the next to be published.
        unsafe { self.mailbox.write_record(index, slot.made, record) };
        slot.made += 1;
        slot.next += 1;
        slot.token = token;
        let params = &memory.params;
        // Alternatives come after the launch; such launches are one token long.
        if params.sampling.logprobs <= 1 {
            self.mailbox.publish(index, slot.made as u32);
        }
        if memory.stop_ids[..params.stop_ids as usize].contains(&token) {
            slot.end = Some(SlotEnd::StopId);
        } else if slot.made == params.max_new as usize
            || slot.next + 1 > self.ranks[0].dims.max_positions as usize
        {
            slot.end = Some(SlotEnd::Length);
        }
    }

    /// A launch has ended.
    fn land(&mut self, going: Going) -> Result<()> {
        let Going { flights, work, steps, mode, since, behind_prompt, .. } = going;
        drop(flights);
        self.check()?;
        let made = self.first().room.control.word32(12).load(Acquire);
        self.note(&work, steps, mode)?;
        match work {
            Work::Tokens(slots) => {
                if !behind_prompt {
                    self.pace.note_steps(made, since.elapsed());
                }
                let most = slots.iter().map(|s| self.slots[*s].made).max().unwrap_or(0);
                self.epoch += (most as u32).min(steps) + 1;
                self.finish_all(&slots)?;
            }
            Work::Both(slots, beside) => {
                self.epoch += steps;
                let done = made as usize * beside.share;
                self.slots[beside.slot].next += done.min(beside.count);
                self.finish_all(&slots)?;
                self.finish(beside.slot);
            }
            Work::Prompt(slot, to) => {
                self.epoch += steps;
                // A kernel that believed its host gone may have left before the end.
                let done =
                    if made < steps { made as usize * self.first().most_columns() } else { to };
                let slot_now = &mut self.slots[slot];
                slot_now.next = to.min(slot_now.next.saturating_add(done));
                self.finish(slot);
            }
            Work::Layers(mut chunk, layers) => {
                self.pace.note_layers(&chunk, layers, since.elapsed());
                chunk.done += layers;
                if chunk.done == self.first().model.layers() {
                    self.slots[chunk.slot].next = chunk.first + chunk.count;
                } else {
                    self.chunk = Some(chunk);
                }
                self.finish(chunk.slot);
            }
            Work::Logits(command) => {
                self.epoch += steps;
                if made < steps {
                    self.logits.push_front(command);
                    return Ok(());
                }
                self.hand_logits(command)?;
            }
        }
        Ok(())
    }

    /// Tells the meter of a launch that made all its steps.
    fn note(&self, work: &Work, steps: u32, mode: Option<Mode>) -> Result<()> {
        let (Some(meter), Some(mode), Work::Tokens(slots)) = (&self.meter, mode, work) else {
            return Ok(());
        };
        let (first, slot) = (self.first(), &self.slots[slots[0]]);
        if let Some(probe) = first.probe.as_ref().filter(|_| slot.end == Some(SlotEnd::Length)) {
            meter.note(probe.read(&*first.machine, mode, steps)?);
        }
        Ok(())
    }

    /// What is to be done for each column of a launch that has ended.
    fn finish_all(&mut self, slots: &[usize]) -> Result<()> {
        for (column, slot) in slots.iter().enumerate() {
            self.alternatives(*slot, column)?;
            self.finish(*slot);
        }
        Ok(())
    }

    /// Gives a slot back where it has ended.
    fn finish(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        let end = slot.end.take().or(slot.cancelled.then_some(SlotEnd::Cancelled));
        if let Some(end) = end {
            slot.state = State::Idle;
            slot.cancelled = false;
            self.chunk = self.chunk.take().filter(|c| c.slot != index);
            self.mailbox.end(index, end);
        }
    }

    /// The likeliest tokens of the step that a one-token launch made, from its logits.
    fn alternatives(&mut self, index: usize, column: usize) -> Result<()> {
        let slot = &self.slots[index];
        // SAFETY: the slot runs, so the device owns it.
        let memory = unsafe { self.mailbox.slot_of_device(index) };
        let wanted = memory.params.sampling.logprobs.saturating_sub(1) as usize;
        if wanted == 0 || slot.made == 0 {
            return Ok(());
        }
        let vocab = self.first().dims.vocab as usize;
        let mut logits = vec![0.0; vocab];
        for rank in &self.ranks {
            rank.read_logits(column, &mut logits)?;
        }
        let mut alternatives = [(0, 0.0); MAX_ALTERNATIVES];
        top_logprobs(&logits, &mut alternatives[..wanted]);
        // SAFETY: as above; this record is the next to be published.
        unsafe { self.mailbox.write_alternatives(index, slot.made - 1, &alternatives[..wanted]) };
        self.mailbox.publish(index, slot.made as u32);
        Ok(())
    }

    fn hand_logits(&mut self, command: Command) -> Result<()> {
        let (index, (_, count)) = (command.slot as usize, logits_range(command));
        let vocab = self.first().dims.vocab as usize;
        let mut logits = vec![0.0; count * vocab];
        for rank in &self.ranks {
            rank.read_logits(0, &mut logits)?;
        }
        // SAFETY: this slot's is the one logits command in flight.
        let out = unsafe { self.mailbox.logits() };
        *out = logits.into();
        self.mailbox.end(index, SlotEnd::Logits);
        Ok(())
    }

    /// After a launch: whether somebody gave up waiting, on any rank.
    fn check(&mut self) -> Result<()> {
        let lost = self.ranks.iter().map(Loaded::lost).collect::<Result<Vec<_>>>()?;
        if lost.iter().any(Option::is_some) {
            return Err(hang(&lost));
        }
        Ok(())
    }

    /// Starts the next launch, if there is work.
    fn take_off(&mut self) -> Result<()> {
        for index in 0..self.slots.len() {
            if self.slots[index].cancelled {
                self.finish(index);
            }
        }
        if let Some(command) = self.logits.pop_front() {
            return self.start_logits(command);
        }
        self.write_grown()?;
        let decoding: Vec<usize> =
            (0..self.slots.len()).filter(|i| self.slots[*i].has_pages()).collect();
        let waiting = (0..self.slots.len()).filter(|i| self.slots[*i].state == State::Prefill);
        let oldest = waiting.min_by_key(|i| self.slots[*i].since);
        let mut left = 0;
        if let Some(slot) = oldest {
            left = self.prompt_left(slot)?;
            if left == 0 {
                return self.take_off();
            }
        }
        match oldest {
            Some(slot) if self.goes_beside(&decoding, slot) => {
                self.start_both(decoding, slot, left)
            }
            Some(slot) if decoding.is_empty() || !self.prompted => {
                self.prompted = true;
                self.start_prompt(slot, left, !decoding.is_empty())
            }
            Some(_) | None if decoding.is_empty() => Ok(()),
            waits => {
                self.prompted = false;
                let most = self.first().most_columns();
                let crowded = decoding.len() > most;
                // Those who have made the least come first, so that all get their turn.
                let mut slots = decoding;
                slots.sort_by_key(|i| (self.slots[*i].made, *i));
                slots.truncate(most);
                slots.sort_unstable();
                let steps = match waits {
                    Some(slot) if self.slots[slot].wide => 1,
                    None if !crowded => LONG,
                    Some(_) | None => TURN_TOKENS,
                };
                self.start_tokens(slots, steps, false)
            }
        }
    }

    /// Page tables that have grown, to where kernels look for them. Of a prompt that no launch has
    /// seen they are written with all else.
    fn write_grown(&mut self) -> Result<()> {
        for (index, slot) in self.slots.iter_mut().enumerate() {
            if std::mem::take(&mut slot.grown) && slot.token != u32::MAX {
                let pages = self.mailbox.pages(index);
                self.ranks.iter().try_for_each(|rank| rank.write_pages(index, pages))?;
            }
        }
        Ok(())
    }

    /// Whether a prompt takes the columns that these sequences leave free.
    fn goes_beside(&self, decoding: &[usize], slot: usize) -> bool {
        let free = self.first().most_columns().saturating_sub(decoding.len());
        !decoding.is_empty() && free > 0 && !self.slots[slot].wide
    }

    /// Positions of a prompt that are still to be done; its last token is the first that the
    /// decode loop feeds, so with none left the slot decodes.
    fn prompt_left(&mut self, index: usize) -> Result<usize> {
        // SAFETY: the slot runs, so the device owns it.
        let memory = unsafe { self.mailbox.slot_of_device(index) };
        let last = memory.params.prompt as usize - 1;
        if self.slots[index].token == u32::MAX {
            for rank in &self.ranks {
                rank.write_slot(index, memory)?;
                rank.write_pages(index, self.mailbox.pages(index))?;
            }
            // A few positions are done sooner as columns, in steps of a token's time.
            let few = 2 * self.first().most_columns();
            let begin = if self.reproducible { 0 } else { self.slots[index].next };
            let wide = self.is_wide() && last - begin > few;
            (self.slots[index].token, self.slots[index].wide) = (0, wide);
        }
        let slot = &mut self.slots[index];
        if slot.next == last {
            (slot.state, slot.token) = (State::Decode, memory.tokens[last]);
        }
        Ok(last - slot.next)
    }

    /// The `count` positions left of a prompt, in the columns that the sequences leave free.
    fn start_both(&mut self, slots: Vec<usize>, index: usize, count: usize) -> Result<()> {
        self.write_prompt(index, self.slots[index].next, count)?;
        let columns = self.first().most_columns();
        let share = columns - slots.len();
        let (mut column, dump) = self.sequences(&slots);
        let (row, position) = (index as u32, self.slots[index].next as u32);
        column[slots.len()..].fill(Sequence { row, position, ..Sequence::default() });
        let steps = if dump { 1 } else { count.div_ceil(share) } as u32;
        let (beside, prompt) = (Beside { slot: index, count, share }, count as u32);
        let (columns, live) = (columns as u32, slots.len() as u32);
        let logits = dump.then_some(columns);
        let ask =
            Ask { columns, steps, live, streamed: false, prompt, at_head: false, logits, column };
        self.launch(&ask, Work::Both(slots, beside))
    }

    /// A slot's tokens `from .. from + count` to where prompts are read.
    fn write_prompt(&self, index: usize, from: usize, count: usize) -> Result<()> {
        // SAFETY: the slot runs (or its logits are asked for), so the device owns it.
        let memory = unsafe { self.mailbox.slot_of_device(index) };
        let tokens = &memory.tokens[from..from + count];
        let bytes: Vec<u8> = tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
        self.ranks.iter().try_for_each(|r| r.machine.write(&r.room.prompt, 0, &bytes))
    }

    /// The next positions of a prompt that has so many left, in a launch of their own.
    fn start_prompt(&mut self, index: usize, left: usize, beside: bool) -> Result<()> {
        if self.slots[index].wide {
            return self.start_layers(index, left, beside);
        }
        let position = self.slots[index].next;
        let count = if beside { left.min(TURN_POSITIONS) } else { left };
        self.launch_prompt(index, position, count, None, Work::Prompt(index, position + count))
    }

    /// A prompt's next positions through the prefill kernel, or those that are between its layers.
    fn start_layers(&mut self, index: usize, left: usize, beside: bool) -> Result<()> {
        let begun = self.chunk.take().filter(|c| c.slot == index);
        let chunk = match begun {
            Some(chunk) => chunk,
            None => {
                let first = self.slots[index].next;
                // Chunks start at whole pages, so launches end there.
                let count = left.min(self.launch_positions(beside) - first % PAGE);
                let whole = count == left && self.takes_last(first, count);
                let count = count + usize::from(whole);
                self.write_prompt(index, first, count)?;
                Chunk { slot: index, first, count, done: 0, whole }
            }
        };
        let left = self.first().model.layers() - chunk.done;
        let layers = if beside { self.pace.layers(&chunk, left) } else { left };
        self.launch_layers(chunk, layers)
    }

    /// Positions of a launch of the prefill kernel: beside sequences one chunk, else many.
    fn launch_positions(&self, beside: bool) -> usize {
        let chunk = self.first().prefill.as_ref().map_or(PAGE, Prefill::chunk);
        if beside {
            chunk
        } else {
            chunk * (prefill::MOST_POSITIONS / chunk).max(1)
        }
    }

    fn start_logits(&mut self, command: Command) -> Result<()> {
        let index = command.slot as usize;
        // SAFETY: a logits command for the slot was received: the device owns it.
        let memory = unsafe { self.mailbox.slot_of_device(index) };
        for rank in &self.ranks {
            rank.write_slot(index, memory)?;
            rank.write_pages(index, self.mailbox.pages(index))?;
        }
        let (position, count) = logits_range(command);
        let columns = (command.kind == CommandKind::LogitsDecode).then_some(1);
        self.launch_prompt(index, position, count, columns, Work::Logits(command))
    }

    fn launch_prompt(
        &mut self,
        index: usize,
        position: usize,
        count: usize,
        columns: Option<u32>,
        work: Work,
    ) -> Result<()> {
        let columns = columns.unwrap_or(self.first().most_columns() as u32);
        self.write_prompt(index, position, count)?;
        let count = count as u32;
        // Every column is of this sequence, whose pages it finds by its own row.
        let (row, position) = (index as u32, position as u32);
        let column = [Sequence { row, position, ..Sequence::default() }; 8];
        let steps = count.div_ceil(columns);
        let logits = matches!(work, Work::Logits(..)).then_some(steps * columns);
        // What a token's launch would take.
        let streamed = count == 1 && position >= self.first().streams_from();
        let at_head = false;
        let ask = Ask { columns, steps, live: 0, streamed, prompt: count, at_head, logits, column };
        self.launch(&ask, work)
    }

    /// Whether the prefill kernel takes the very last token of a prompt with these positions before
    /// it, so that the decode kernel's first step is but the head.
    fn takes_last(&self, first: usize, count: usize) -> bool {
        let chunk = self.first().prefill.as_ref().map_or(1, Prefill::chunk);
        // A chunk of one position is a pass over all weights, too; what is measured is whole steps.
        !(first % PAGE + count).is_multiple_of(chunk) && self.meter.is_none()
    }

    /// The next layers of a chunk, whose tokens are at `prompt`.
    fn launch_layers(&mut self, chunk: Chunk, layers: u32) -> Result<()> {
        let to_head = chunk.whole && chunk.done + layers == self.first().model.layers();
        self.renew_epochs()?;
        let epoch = if to_head { self.epoch } else { 0 };
        let all = || self.ranks.iter().filter_map(|l| Some((l, l.prefill.as_ref()?)));
        for (loaded, prefill) in all() {
            prefill.clear(&*loaded.machine)?;
        }
        let part = Part {
            row: chunk.slot as u32,
            first: chunk.first as u32,
            count: chunk.count as u32,
            layers: chunk.done..chunk.done + layers,
        };
        let mut flights = Vec::with_capacity(self.ranks.len());
        for (loaded, prefill) in all() {
            let mut args = loaded.args(1);
            (args.prompt, args.budget_ns) = (loaded.room.prompt.address, self.budget_ns);
            args.epoch = epoch;
            flights.push(prefill.launch(&*loaded.machine, args, &part)?);
        }
        if to_head {
            return self.start_at_head(&chunk, flights);
        }
        self.going = Some(Going::new(flights, Work::Layers(chunk, layers), 0, None));
        Ok(())
    }

    /// Tokens of a slot, behind the launches that take its prompt to the end: only one beside
    /// others, which wait for it.
    fn start_at_head(&mut self, chunk: &Chunk, prompt: Vec<Box<dyn Flight>>) -> Result<()> {
        let others = self.slots.iter().any(|s| s.state == State::Decode);
        self.slots[chunk.slot].next = chunk.first + chunk.count - 1;
        self.prompt_left(chunk.slot)?;
        self.start_tokens(vec![chunk.slot], if others { 1 } else { LONG }, true)?;
        if let Some(going) = &mut self.going {
            going.flights.extend(prompt);
            going.behind_prompt = true;
        }
        Ok(())
    }

    fn start_tokens(&mut self, slots: Vec<usize>, most: u32, at_head: bool) -> Result<()> {
        let columns = if slots.len() == 1 { 1 } else { self.first().most_columns() as u32 };
        let (column, dump) = self.sequences(&slots);
        // Measured launches make their steps and no more.
        let left = column[0].last - column[0].position;
        let most = if self.meter.is_some() { most.min(left) } else { most };
        // A launch of one column ends where the kernel with streamed pages takes over.
        let from = self.first().streams_from();
        let streamed = column[0].position >= from;
        let most = if streamed || columns > 1 { most } else { most.min(from - column[0].position) };
        let (live, steps) = (slots.len() as u32, if dump { 1 } else { most });
        let logits = dump.then_some(columns);
        let ask = Ask { columns, steps, live, streamed, prompt: 0, at_head, logits, column };
        self.launch(&ask, Work::Tokens(slots))
    }

    /// The columns of these slots, and whether some slot's logits are wanted.
    fn sequences(&self, slots: &[usize]) -> ([Sequence; 8], bool) {
        let (mut dump, mut column) = (false, [Sequence::default(); 8]);
        for (column, index) in column.iter_mut().zip(slots) {
            *column = self.sequence(*index, &mut dump);
        }
        (column, dump)
    }

    fn sequence(&self, index: usize, dump: &mut bool) -> Sequence {
        let slot = &self.slots[index];
        // SAFETY: the slot runs, so the device owns it.
        let params = unsafe { self.mailbox.slot_of_device(index) }.params;
        let s = params.sampling;
        *dump |= s.logprobs > 1;
        let flag = |on: bool, bit: u32| if on { bit } else { 0 };
        let filter = s.temperature > 0.0 && (s.top_k > 0 || s.top_p < 1.0 || s.min_p > 0.0);
        let left = params.max_new as usize - slot.made;
        let longest = self.first().dims.max_positions as usize;
        Sequence {
            seed: s.seed,
            row: index as u32,
            position: slot.next as u32,
            token: slot.token,
            made: slot.made as u32,
            min_new: params.min_new,
            last: (slot.next + left).min(longest).min(slot.granted) as u32,
            stop_count: params.stop_ids,
            wants: flag(s.logprobs > 0, wants::LOGPROB)
                | flag(params.bias > 0, wants::BIAS)
                | flag(s.penalises(), wants::PENALTIES)
                | flag(filter, wants::FILTER),
            temperature: s.temperature,
            top_p: s.top_p,
            min_p: s.min_p,
            repetition: s.repetition_penalty,
            presence: s.presence_penalty,
            frequency: s.frequency_penalty,
            top_k: s.top_k,
            told: slot.told,
        }
    }

    /// Starts epochs anew where a longest launch would pass the last: the words are zeroed. Kernels
    /// tell a step's layers, and the choice of its token, apart by 32 bits.
    fn renew_epochs(&mut self) -> Result<()> {
        if self.epoch >= u32::MAX / (self.first().model.layers() + 1) - LONG {
            for rank in &self.ranks {
                rank.clear_words()?;
            }
            self.epoch = 1;
        }
        Ok(())
    }

    fn launch(&mut self, ask: &Ask, work: Work) -> Result<()> {
        self.renew_epochs()?;
        let epoch = self.epoch;
        let control = &self.first().room.control;
        control.word32(0).store(Order::GoOn as u32, Release);
        let measured = matches!(work, Work::Tokens(_)) && ask.columns == 1;
        let mode = self.meter.as_ref().filter(|_| measured).map(|m| m.mode());
        let mut flights = Vec::with_capacity(self.ranks.len());
        for loaded in &mut self.ranks {
            let mut args = loaded.args(ask.columns);
            if mode == Some(Mode::Alone) {
                (args.rank, args.hops) = (0, [0; 8]);
            }
            (args.epoch, args.budget_ns, args.steps) = (epoch, self.budget_ns, ask.steps);
            (args.live, args.count, args.column) = (ask.live, ask.prompt, ask.column);
            args.at_head = u64::from(ask.at_head);
            if ask.prompt > 0 {
                args.prompt = loaded.room.prompt.address;
            }
            match ask.logits {
                Some(positions) => args.logits = loaded.logits_for(positions as usize)?,
                // A prompt's positions need no head.
                None if ask.live == 0 => args.segment_count = head_segment(&loaded.model),
                None => {}
            }
            let measuring = mode.zip(loaded.probe.as_ref());
            let probing =
                measuring.and_then(|(mode, probe)| probe.module(mode, ask.streamed, &mut args));
            let module = match probing {
                Some(module) => Arc::clone(module),
                None => loaded.module(ask.columns, ask.streamed)?,
            };
            let launch = Launch {
                entry: "kie_decode",
                blocks: loaded.partition.blocks,
                threads: loaded.partition.threads(loaded.machine.platform(), loaded.machine.warp()),
                shared_bytes: loaded.partition.shared_max,
                args: args.as_bytes(),
            };
            flights.push(loaded.machine.launch(&module, &launch)?);
        }
        self.going = Some(Going::new(flights, work, ask.steps, mode));
        Ok(())
    }
}

/// Who gave up on each rank, as an error: the ranks and their blocks that had come least far first.
fn hang(lost: &[Option<Vec<Lost>>]) -> Error {
    let one = |l: &Lost| {
        format!(
            "block {} in step {} waited for {} (wanted {}, seen {})",
            l.block,
            l.step,
            l.what(),
            l.wanted,
            l.seen
        )
    };
    let mut ranks: Vec<_> = (0_usize..).zip(lost.iter().flatten()).collect();
    ranks.retain(|(_, lost)| !lost.is_empty());
    ranks.sort_by_key(|(rank, lost)| (lost[0].turn(), *rank));
    let most = if ranks.len() > 1 { 2 } else { 4 };
    let of = |(rank, lost): &(usize, &Vec<Lost>)| {
        let some: Vec<String> = lost.iter().take(most).map(one).collect();
        format!("rank {rank}: {} blocks gave up: {}", lost.len(), some.join("; "))
    };
    let mut told: Vec<String> = ranks.iter().map(of).collect();
    if told.is_empty() {
        told.push("a kernel left before its end and no block says why".to_owned());
    }
    Error::Hang(told.join(". "))
}

impl Running for Runner {
    fn drive(&mut self) -> Result<bool> {
        while let Some(command) = self.mailbox.receive() {
            self.command(command)?;
        }
        if let Some(going) = self.going.take() {
            self.follow(going)?;
        }
        if self.going.is_none() {
            self.take_off()?;
        }
        Ok(self.going.is_some())
    }

    /// Of the machine that took longest, phase by phase: they load side by side.
    fn phases(&self) -> Vec<Phase> {
        let mut all = self.ranks[0].phases.clone();
        for (n, phase) in all.iter_mut().enumerate() {
            let others = self.ranks.iter().filter_map(|rank| rank.phases.get(n));
            phase.seconds = others.clone().map(|p| p.seconds).fold(0.0, f64::max);
            phase.bytes = others.map(|p| p.bytes).sum();
        }
        all
    }

    fn warnings(&self) -> Vec<String> {
        let of =
            |(rank, l): (usize, &Loaded)| Some(format!("rank {rank}: {}", l.warning.as_ref()?));
        self.ranks.iter().enumerate().filter_map(of).collect()
    }

    fn park(&mut self) {}
}

impl Drop for Runner {
    fn drop(&mut self) {
        self.first().room.control.word32(0).store(Order::Abort as u32, Release);
        let Some(mut going) = self.going.take() else { return };
        // As long as a kernel runs it may store into any rank's words, whoever else has ended.
        let mut ended = true;
        for flight in &mut going.flights {
            ended &= flight.wait();
        }
        if !ended {
            std::mem::forget(std::mem::take(&mut self.ranks));
        }
    }
}

const _: () = assert!(wire::CONTROL_BYTES >= 16);
