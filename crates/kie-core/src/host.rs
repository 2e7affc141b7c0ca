//! The engine thread: admits requests to slots, drives the device, copies what it made to readers.
//!
//! # Invariants
//! * This thread alone talks to the mailbox, the device and the page books.
//! * A slot's pages are given back only after the device has ended the slot, however early its
//!   reader was told the end. A session's reader is told after that, so its next turn finds them.
//! * While requests run and none come or go, a turn of the loop takes no lock, allocates nothing
//!   and makes no system call but to wake a reader that sleeps. (Requests with stop strings decode
//!   text here.)
//! * Requests are admitted in the order they came.
//! * A request gets pages some positions before it needs them. Where there are none the youngest
//!   request waits for them, or gives its own up to an older one: it begins anew when there is
//!   room, and what it has told comes out again and is not told twice. The oldest never waits for
//!   good, since one request may grow to no more than there is; so all of them end.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::Arc;

use kie_kernels::abi::{Command, CommandKind, Dims, Record, SlotEnd, MAX_ALTERNATIVES, PAGE};
use kie_kernels::device::Running;

use crate::errand::Errand;
use crate::error::{Error, Result};
use crate::grammar::follower::Follower;
use crate::inbox::{Ending, Inbox, Job, Outcome, Work};
use crate::memory::{Lease, NoRoom, Pages};
use crate::metrics::{add, set, Counters};
use crate::primitive::now_ns;
use crate::request::{FinishReason, LogitsPath, StopReason};
use crate::ring::HostRing;

/// A slot at work.
struct Active {
    work: Option<Work>,
    lease: Lease,
    /// Prompt, then what was generated; room for all of it.
    tokens: Vec<u32>,
    prompt: usize,
    /// Positions it may grow to, and those that the device was given.
    reserve: usize,
    granted: usize,
    /// Records taken from the device, and those handed on (a stop string hides the rest).
    taken: u32,
    since: u64,
    cancelled: Arc<std::sync::atomic::AtomicBool>,
    deadline_ns: u64,
    admitted_ns: u64,
    /// Prompt tokens that were cached when it began.
    cached: usize,
    /// Tokens that were drafted, and those of them that were right.
    drafts: [u32; 2],
    session: bool,
    logits: bool,
    /// It gives its pages up, to begin anew.
    preempted: bool,
    /// It found no pages when so many requests had given theirs back.
    stuck: Option<u64>,
    /// The end of a session's turn, to be told when the device has ended it too.
    verdict: Option<Outcome>,
    /// To be sent as soon as the ring has room.
    command: Option<Command>,
    committed: bool,
    cancel_sent: bool,
    /// First position of the next logits command.
    next: usize,
}

impl Active {
    /// The device is to end it, or has.
    fn is_stopping(&self) -> bool {
        self.work.is_none() || self.verdict.is_some()
    }

    /// Something is to be sent to the device.
    fn has_to_send(&self) -> bool {
        let cancel = (self.is_stopping() || self.preempted) && !self.logits && !self.cancel_sent;
        self.command.is_some() || self.granted < self.lease.positions() || cancel
    }

    /// The position that the device has reached, by the records taken.
    fn at(&self) -> usize {
        self.prompt + self.taken as usize
    }

    /// What follows its grammar, if it has one.
    fn follower(&self) -> Option<&Follower> {
        match &self.work {
            Some(Work::Generate(g)) => g.follower.as_ref(),
            Some(Work::Logits(_)) | None => None,
        }
    }

    fn ending(&self, result: Outcome) -> Ending {
        let Self { admitted_ns, cached, drafts, .. } = *self;
        Ending { result, admitted_ns, cached, drafts }
    }
}

/// Everything the engine thread owns.
pub(crate) struct Host {
    inbox: Arc<Inbox>,
    counters: Arc<Counters>,
    ring: HostRing,
    pages: Pages,
    dims: Dims,
    waiting: VecDeque<Box<Job>>,
    errands: VecDeque<Errand>,
    slots: Vec<Option<Active>>,
    running: usize,
    arrivals: u64,
    /// Positions that a request has pages for before it gets there.
    ahead: usize,
    /// Requests that gave pages back.
    released: u64,
    /// No deadline is earlier.
    deadline_ns: u64,
    hot: bool,
}

impl Host {
    /// An idle engine.
    pub(crate) fn new(
        inbox: Arc<Inbox>,
        counters: Arc<Counters>,
        ring: HostRing,
        pages: Pages,
        dims: Dims,
        hot: bool,
    ) -> Self {
        Self {
            inbox,
            counters,
            ring,
            arrivals: 0,
            ahead: pages.ahead(),
            released: 0,
            pages,
            dims,
            waiting: VecDeque::new(),
            errands: VecDeque::new(),
            slots: (0..dims.slots).map(|_| None).collect(),
            running: 0,
            deadline_ns: u64::MAX,
            hot,
        }
    }

    /// Runs until the inbox is closed.
    ///
    /// # Errors
    /// The device failed.
    pub(crate) fn run(&mut self, device: &mut dyn Running) -> Result<()> {
        loop {
            if self.inbox.rang() {
                if self.inbox.is_closed() {
                    return Ok(());
                }
                self.read_inbox();
                self.review();
            }
            if !self.errands.is_empty() {
                self.run_errand(device);
                if self.running == 0 {
                    continue;
                }
            }
            if self.running == 0 && self.waiting.is_empty() && !self.hot {
                device.park();
                self.inbox.listen(None);
                continue;
            }
            self.turn(device)?;
        }
    }

    /// One turn with something to do.
    fn turn(&mut self, device: &mut dyn Running) -> Result<()> {
        if self.deadline_ns != u64::MAX && now_ns() >= self.deadline_ns {
            self.review();
        }
        let (slots, inbox) = (&self.slots, &self.inbox);
        let gone = |slot: usize| {
            let late = |a: &Active| due(&a.cancelled, a.deadline_ns, now_ns()).is_some();
            inbox.is_closed() || slots[slot].as_ref().is_some_and(late)
        };
        if !device.drive(&gone)? {
            std::hint::spin_loop();
        }
        let mut ended = false;
        for slot in 0..self.slots.len() {
            if self.slots[slot].is_some() {
                ended |= self.poll(slot);
            }
        }
        if ended {
            // Those who run come before those who wait.
            for slot in 0..self.slots.len() {
                self.grow(slot);
            }
            self.admit();
        }
        Ok(())
    }

    /// A bite of the oldest errand. Who waits for the pages that it held is looked at again.
    fn run_errand(&mut self, device: &mut dyn Running) {
        let Some(mut errand) = self.errands.pop_front() else { return };
        match errand.step(&mut self.pages, device) {
            true => {
                self.gauges();
                self.admit();
            }
            false => self.errands.push_front(errand),
        }
    }

    fn read_inbox(&mut self) {
        while let Some(errand) = self.inbox.take_errand() {
            self.errands.push_back(errand);
        }
        while let Some(mut job) = self.inbox.take() {
            self.arrivals += 1;
            job.since = self.arrivals;
            self.waiting.push_back(job);
        }
        self.gauges();
    }

    /// Looks at every cancel flag and deadline, then admits what fits.
    fn review(&mut self) {
        let now = now_ns();
        self.deadline_ns = u64::MAX;
        for _ in 0..self.waiting.len() {
            let Some(job) = self.waiting.pop_front() else { break };
            match due(&job.cancelled, job.deadline_ns, now) {
                Some(reason) => refuse(&self.inbox, &self.counters, *job, Ok((reason, None))),
                None => {
                    self.deadline_ns = self.deadline_ns.min(job.deadline_ns);
                    self.waiting.push_back(job);
                }
            }
        }
        for slot in 0..self.slots.len() {
            let Some(active) = &self.slots[slot] else { continue };
            if active.is_stopping() {
                continue;
            }
            let failure = active.follower().and_then(Follower::failure);
            let due = due(&active.cancelled, active.deadline_ns, now);
            match due.map(|reason| Ok((reason, None))).or(failure.map(Err)) {
                Some(outcome) => self.conclude(slot, outcome),
                None => self.deadline_ns = self.deadline_ns.min(active.deadline_ns),
            }
        }
        self.admit();
    }

    /// Nothing is under way that gives pages back.
    fn is_idle(&self) -> bool {
        self.running == 0 && self.errands.is_empty()
    }

    /// Gives slots to the requests that waited longest, while there are slots and pages.
    fn admit(&mut self) {
        while let Some(slot) = self.slots.iter().position(Option::is_none) {
            let Some(job) = self.waiting.front() else { break };
            let short = |a: &Active| a.preempted || a.stuck == Some(self.released);
            if self.slots.iter().flatten().any(short) {
                break; // pages that come back are for those who run
            }
            let logits = matches!(job.work, Work::Logits(_));
            if logits && self.slots.iter().flatten().any(|a| a.logits) {
                break; // the mailbox has room for the logits of one
            }
            // Logits are of every position, so nothing of theirs may come from shared pages.
            let known = if logits { &[] } else { &job.tokens[..job.prompt] };
            let now = self.pages.share().max(job.tokens.len() + self.ahead);
            match self.pages.admit(known, now.min(job.reserve), job.reserve) {
                Ok(lease) => {
                    let job = self.waiting.pop_front().expect("there was a front");
                    self.start(slot, *job, lease);
                }
                Err(room) if self.is_idle() || room.wanted > room.total => {
                    let job = self.waiting.pop_front().expect("there was a front");
                    let error = no_room(&room, self.pages.page_bytes(room.group));
                    refuse(&self.inbox, &self.counters, *job, Err(error));
                }
                Err(_) => break,
            }
        }
        self.gauges();
    }

    /// Hands a job to the device.
    fn start(&mut self, slot: usize, mut job: Job, lease: Lease) {
        let memory = self.ring.slot(slot).expect("a free slot is the host's");
        let prompt = job.prompt;
        memory.tokens[..prompt].copy_from_slice(&job.tokens[..prompt]);
        let granted = lease.positions();
        let mut next = 0;
        let mut session = false;
        let command = match &mut job.work {
            Work::Generate(g) => {
                memory.params = g.params;
                memory.params.cached = lease.cached as u32;
                memory.stop_ids[..g.stop_ids.len()].copy_from_slice(&g.stop_ids);
                memory.bias[..g.bias.len()].copy_from_slice(&g.bias);
                memory.tokens[prompt..][..g.prediction.len()].copy_from_slice(&g.prediction);
                memory.masks = g.follower.as_mut().map(Follower::begin);
                session = g.session;
                if job.begun.is_none() {
                    add(&self.counters.prompt_tokens, prompt);
                    add(&self.counters.cached_tokens, lease.cached);
                }
                let a = granted as u32;
                Command { kind: CommandKind::Start, slot: slot as u32, a, b: 0 }
            }
            Work::Logits(l) => {
                memory.params.prompt = prompt as u32;
                memory.params.cached = 0;
                memory.masks = None;
                let command = logits_command(l.path, slot, 0, prompt, self.dims.chunk());
                next = command.b as usize;
                command
            }
        };
        self.ring.write_pages(slot, &lease.tables, 0);
        let mut tokens = job.tokens;
        tokens.reserve_exact((job.reserve + 1).saturating_sub(tokens.len()));
        let (admitted_ns, cached) = job.begun.unwrap_or_else(|| (now_ns(), lease.cached));
        self.deadline_ns = self.deadline_ns.min(job.deadline_ns);
        self.slots[slot] = Some(Active {
            logits: matches!(job.work, Work::Logits(_)),
            verdict: None,
            work: Some(job.work),
            lease,
            tokens,
            prompt,
            reserve: job.reserve,
            granted,
            taken: 0,
            since: job.since,
            cancelled: job.cancelled,
            deadline_ns: job.deadline_ns,
            admitted_ns,
            cached,
            drafts: [0; 2],
            session,
            preempted: false,
            stuck: None,
            command: Some(command),
            committed: false,
            cancel_sent: false,
            next,
        });
        self.running += 1;
        self.flush(slot);
    }

    /// Sends what a slot has to send, if the ring has room.
    fn flush(&mut self, slot: usize) {
        let Some(active) = &mut self.slots[slot] else { return };
        if let Some(command) = active.command {
            if !self.ring.send(command) {
                return;
            }
            active.command = None;
        }
        let positions = active.lease.positions();
        if active.granted < positions {
            let a = positions as u32;
            if !self.ring.send(Command { kind: CommandKind::Grow, slot: slot as u32, a, b: 0 }) {
                return;
            }
            active.granted = positions;
        }
        if active.has_to_send() {
            let kind = CommandKind::Cancel;
            active.cancel_sent = self.ring.send(Command { kind, slot: slot as u32, a: 0, b: 0 });
        }
    }

    /// Takes what a slot has made; true if it is free now.
    fn poll(&mut self, slot: usize) -> bool {
        let active = self.slots[slot].as_ref().expect("the caller looked");
        if active.has_to_send() {
            self.flush(slot);
            if self.slots[slot].as_ref().is_some_and(|a| a.command.is_some()) {
                return false;
            }
        }
        let (made, end) = self.ring.poll(slot);
        let active = self.slots[slot].as_mut().expect("flush keeps it");
        active.drafts = self.ring.drafts(slot);
        if made > active.taken {
            if !active.committed {
                active.committed = true;
                let kept = self.pages.reusable(active.prompt, active.prompt);
                self.pages.commit(&active.lease, &active.tokens[..kept]);
            }
            if active.is_stopping() {
                active.taken = made;
            } else {
                self.take(slot, made);
            }
        }
        if end == SlotEnd::Running {
            self.grow(slot);
            return false;
        }
        self.device_ended(slot, end)
    }

    /// Sees to it that a request has pages before it needs them.
    fn grow(&mut self, slot: usize) {
        let Some(active) = &mut self.slots[slot] else { return };
        let (at, has) = (active.at(), active.lease.positions());
        let enough = has >= active.reserve || at + self.ahead / 2 < has;
        let vain = active.stuck == Some(self.released);
        if enough || vain || active.preempted || active.is_stopping() {
            return;
        }
        let to = (has + self.pages.share()).max(at + self.ahead);
        if self.pages.grow(&mut active.lease, to) {
            active.stuck = None;
            self.ring.write_pages(slot, &active.lease.tables, has / PAGE);
            return self.flush(slot);
        }
        active.stuck = Some(self.released);
        self.make_room(slot);
    }

    /// Has the youngest request give its pages up, unless that is the one that lacks some: then it
    /// waits, as it does while another's are on their way.
    fn make_room(&mut self, lacking: usize) {
        let running = self.slots.iter().enumerate().filter_map(|(i, a)| Some((i, a.as_ref()?)));
        if running.clone().any(|(_, a)| a.preempted) {
            return;
        }
        let able = running.filter(|(_, a)| !a.logits && !a.is_stopping());
        let Some((youngest, _)) = able.max_by_key(|(_, a)| a.since) else { return };
        if let Some(active) = self.slots[youngest].as_mut().filter(|_| youngest != lacking) {
            active.preempted = true;
            self.flush(youngest);
        }
    }

    /// A request that gave its pages up waits again, before all that came later.
    fn wait_again(&mut self, slot: usize) {
        let Some(active) = self.slots[slot].take() else { return };
        self.running -= 1;
        add(&self.counters.preempted, 1);
        self.give_back(&active, true);
        let (since, begun) = (active.since, Some((active.admitted_ns, active.cached)));
        let Active { work: Some(mut work), tokens, prompt, reserve, .. } = active else { return };
        if let Work::Generate(g) = &mut work {
            g.follower.iter_mut().for_each(Follower::stop);
        }
        let (cancelled, deadline_ns) = (active.cancelled, active.deadline_ns);
        let job = Job { tokens, prompt, reserve, cancelled, deadline_ns, work, since, begun };
        let later = self.waiting.iter().position(|job| job.since > since);
        self.waiting.insert(later.unwrap_or(self.waiting.len()), Box::new(job));
    }

    /// Copies records `taken..made` to the reader, as far as no stop string hits.
    fn take(&mut self, slot: usize, made: u32) {
        let Some(active) = &mut self.slots[slot] else { return };
        let Some(Work::Generate(g)) = &mut active.work else { return };
        let k = g.params.sampling.logprobs.saturating_sub(1) as usize;
        let mut alternatives = [(0, 0.0); MAX_ALTERNATIVES];
        let mut hit = None;
        let before = active.tokens.len();
        let mut otherwise = false;
        while active.taken < made && hit.is_none() {
            let record = self.ring.record(slot, active.taken, &mut alternatives[..k]);
            let told = active.tokens.get(active.prompt + active.taken as usize);
            active.taken += 1;
            if let Some(follower) = &mut g.follower {
                follower.push(record.token);
            }
            if let Some(told) = told {
                otherwise |= *told != record.token;
                continue;
            }
            active.tokens.push(record.token);
            g.out.push(record);
            for (token, logprob) in &alternatives[..k] {
                g.out.push(Record { token: *token, logprob: *logprob, t_ns: 0 });
            }
            if let Some(answer) = &mut g.answer {
                answer.push(record.token);
                hit = answer.hit();
            }
        }
        if let Some(follower) = &mut g.follower {
            follower.publish();
        }
        add(&self.counters.generated_tokens, active.tokens.len() - before);
        active.taken = made;
        if otherwise {
            return self.conclude(slot, Err(comes_out_otherwise()));
        }
        match hit {
            Some(index) => {
                let text = g.stop[index].clone();
                self.conclude(slot, Ok((FinishReason::Stop, Some(StopReason::Text(text)))));
            }
            None => g.out.publish(),
        }
    }

    /// Decides how a slot's request ends and tells the device to stop.
    fn conclude(&mut self, slot: usize, outcome: Outcome) {
        let Some(active) = &mut self.slots[slot] else { return };
        if active.session {
            active.verdict.get_or_insert(outcome);
        } else if let Some(work) = active.work.take() {
            let ending = active.ending(outcome);
            tell(&self.counters, work, ending);
        }
        self.flush(slot);
    }

    /// The device gave the slot back; true if it is free now.
    fn device_ended(&mut self, slot: usize, end: SlotEnd) -> bool {
        let Some(active) = &mut self.slots[slot] else { return true };
        let outcome = match end {
            SlotEnd::Running => return false,
            SlotEnd::Logits => match self.more_logits(slot) {
                true => return false,
                false => Ok((FinishReason::Length, None)),
            },
            SlotEnd::StopId => {
                let id = active.tokens.last().copied().unwrap_or_default();
                let stop = match active.follower() {
                    Some(follower) if follower.shaped() => (FinishReason::Length, None),
                    Some(_) | None => (FinishReason::Stop, Some(StopReason::Id(id))),
                };
                Ok(stop_at_end(active).unwrap_or(stop))
            }
            SlotEnd::Length => Ok(stop_at_end(active).unwrap_or((FinishReason::Length, None))),
            SlotEnd::Cancelled if active.preempted && !active.is_stopping() => {
                self.wait_again(slot);
                return true;
            }
            // Its caller is gone, or the engine is closed.
            SlotEnd::Cancelled if active.logits => Err(self.inbox.failure()),
            SlotEnd::Cancelled => Ok((FinishReason::Cancelled, None)),
            SlotEnd::NotFinite => Err(not_finite(active.at())),
        };
        self.free(slot, end, outcome);
        true
    }

    /// Copies the logits of a command and sends the next one; false when all are there.
    fn more_logits(&mut self, slot: usize) -> bool {
        let Some(active) = &mut self.slots[slot] else { return false };
        let Some(Work::Logits(l)) = &mut active.work else { return false };
        l.values.extend_from_slice(self.ring.logits(slot).unwrap_or_default());
        if active.next >= active.prompt {
            return false;
        }
        let chunk = self.dims.chunk();
        let command = logits_command(l.path, slot, active.next, active.prompt, chunk);
        active.next += command.b as usize;
        active.command = Some(command);
        self.flush(slot);
        true
    }

    /// Gives a slot's pages back, then tells the reader.
    fn free(&mut self, slot: usize, end: SlotEnd, outcome: Outcome) {
        let Some(mut active) = self.slots[slot].take() else { return };
        self.running -= 1;
        self.inbox.leave();
        self.give_back(&active, end != SlotEnd::NotFinite);
        // Who reads the end finds its pages given back.
        self.gauges();
        if let Some(work) = active.work.take() {
            let result = active.verdict.take().unwrap_or(outcome);
            tell(&self.counters, work, active.ending(result));
        }
    }

    /// Gives pages back, with the KV that is valid (where `good`) and wanted.
    fn give_back(&mut self, active: &Active, good: bool) {
        // The last token was chosen but never fed; what lies behind a stop string is not wanted.
        let written = active.at() + self.dims.chunk();
        let valid = match good && active.committed {
            true => active.tokens.len().min(active.at()) - 1,
            false => 0,
        };
        let kept = self.pages.reusable(active.prompt, valid);
        self.pages.retire(&active.lease, &active.tokens[..kept], written);
        self.released += 1;
    }

    fn gauges(&self) {
        let stats = self.pages.stats();
        set(&self.counters.running, self.running);
        set(&self.counters.waiting, self.waiting.len());
        set(&self.counters.pages_used, stats.used.iter().sum());
        set(&self.counters.pages_cached, stats.cached.iter().sum());
    }

    /// Ends everything that runs, waits or is still in the inbox. The inbox is closed.
    pub(crate) fn end_all(&mut self, error: &Error) {
        for slot in 0..self.slots.len() {
            let Some(mut active) = self.slots[slot].take() else { continue };
            self.inbox.leave();
            if let Some(work) = active.work.take() {
                tell(&self.counters, work, active.ending(Err(error.clone())));
            }
        }
        // Whoever waits for one hears that nobody is there any more.
        self.errands.clear();
        while self.inbox.take_errand().is_some() {}
        while let Some(job) = self.inbox.take() {
            self.waiting.push_back(job);
        }
        while let Some(job) = self.waiting.pop_front() {
            refuse(&self.inbox, &self.counters, *job, Err(error.clone()));
        }
        self.running = 0;
        set(&self.counters.running, 0);
        set(&self.counters.waiting, 0);
    }
}

/// The stop string that only the text held back to the end completes, as the reader will see it.
fn stop_at_end(active: &mut Active) -> Option<(FinishReason, Option<StopReason>)> {
    let Some(Work::Generate(g)) = &mut active.work else { return None };
    let answer = g.answer.as_mut().filter(|answer| answer.hit().is_none())?;
    answer.finish(&mut String::new());
    let text = g.stop[answer.hit()?].clone();
    Some((FinishReason::Stop, Some(StopReason::Text(text))))
}

/// Why a request must end now, if it must.
fn due(cancelled: &std::sync::atomic::AtomicBool, deadline: u64, now: u64) -> Option<FinishReason> {
    if cancelled.load(Ordering::Acquire) {
        return Some(FinishReason::Cancelled);
    }
    (now >= deadline).then_some(FinishReason::Timeout)
}

/// Ends a job that never got a slot.
fn refuse(inbox: &Inbox, counters: &Counters, job: Job, outcome: Outcome) {
    inbox.leave();
    let (admitted_ns, cached) = job.begun.unwrap_or_default();
    tell(counters, job.work, Ending { result: outcome, admitted_ns, cached, drafts: [0; 2] });
}

/// Tells a reader the end.
fn tell(counters: &Counters, work: Work, ending: Ending) {
    match work {
        Work::Generate(g) => {
            counters.ended(ending.result.as_ref().map_or(FinishReason::Error, |(r, _)| *r));
            g.out.end(ending);
        }
        // Nobody listens any more if the caller's thread died.
        Work::Logits(l) => drop(l.out.send(ending.result.map(|_| l.values))),
    }
}

fn logits_command(path: LogitsPath, slot: usize, at: usize, end: usize, chunk: usize) -> Command {
    let (kind, count) = match path {
        LogitsPath::Prefill => (CommandKind::LogitsPrefill, chunk.min(end - at)),
        LogitsPath::Decode => (CommandKind::LogitsDecode, 1),
    };
    Command { kind, slot: slot as u32, a: at as u32, b: count as u32 }
}

fn no_room(room: &NoRoom, page_bytes: u64) -> Error {
    let bytes = |pages: usize| pages as u64 * page_bytes.max(1);
    let plan = format!("{room} ({PAGE} positions each)\nlower max_tokens, or raise kv_bytes");
    Error::OutOfMemory { need: bytes(room.wanted), free: bytes(room.available), plan }
}

fn comes_out_otherwise() -> Error {
    let plan =
        "older requests took the pages of this one, and its tokens came out otherwise when it \
                began anew with reproducible=False\n\
                lower max_tokens or max_batch, raise kv_bytes, or leave reproducible=True";
    Error::OutOfMemory { need: 0, free: 0, plan: plan.to_owned() }
}

fn not_finite(position: usize) -> Error {
    Error::Device(format!(
        "logits at position {position} are not finite: the weights hold or produce NaN or \
         infinity; check the checkpoint, or open it with a wider dtype (dtype=\"f32\")"
    ))
}
