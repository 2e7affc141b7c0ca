//! How other threads reach the engine thread: a queue behind a lock that is touched only after the
//! bell rang, so a running engine never takes it for nothing.
//!
//! Invariants: at most `room` requests are in flight (waiting or running) at a time; once the
//! inbox is closed nothing enters it, and every request that did enter gets an end.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kie_kernels::abi::{Record, SlotParams};

use crate::answer::Answer;
use crate::errand::Errand;
use crate::error::{Error, Result};
use crate::grammar::follower::Follower;
use crate::request::{FinishReason, LogitsPath, StopReason};
use crate::ring::{Bell, Writer};

/// Why a request ended and what stopped it, or the error it ended with.
pub(crate) type Outcome = Result<(FinishReason, Option<StopReason>)>;

/// How a request ended.
pub(crate) struct Ending {
    /// Why, and what stopped it.
    pub(crate) result: Outcome,
    /// CLOCK_MONOTONIC when it got its slot; 0 if it never did.
    pub(crate) admitted_ns: u64,
    /// Prompt tokens whose KV was there already.
    pub(crate) cached: usize,
    /// Tokens that were drafted, and those of them that were right.
    pub(crate) drafts: [u32; 2],
}

/// What a slot is used for. A few dozen of them exist, so the larger variant's size is no matter.
#[allow(clippy::large_enum_variant)]
pub(crate) enum Work {
    /// Tokens.
    Generate(Box<Generate>),
    /// Logits of every position.
    Logits(Logits),
}

/// A validated request for tokens.
pub(crate) struct Generate {
    /// Where rows go: a record, then its alternatives.
    pub(crate) out: Writer<Record, Ending>,
    /// What the device gets; `cached` is filled in at admission.
    pub(crate) params: SlotParams,
    pub(crate) stop_ids: Vec<u32>,
    pub(crate) bias: Vec<(u32, f32)>,
    /// Tokens that the caller expects.
    pub(crate) prediction: Vec<u32>,
    /// Text so far, where stop strings need it, and those strings.
    pub(crate) answer: Option<Answer>,
    pub(crate) stop: Vec<String>,
    /// A session's turn: its end is told when its pages are the cache's.
    pub(crate) session: bool,
    /// Makes the masks, where the text must be that of a grammar.
    pub(crate) follower: Option<Follower>,
}

/// A request for logits.
pub(crate) struct Logits {
    pub(crate) out: Sender<Result<Vec<f32>>>,
    pub(crate) path: LogitsPath,
    /// Room for all of them.
    pub(crate) values: Vec<f32>,
}

/// One thing to do in a slot.
pub(crate) struct Job {
    /// The prompt; of a request that begins anew, what it had made, too.
    pub(crate) tokens: Vec<u32>,
    pub(crate) prompt: usize,
    /// Positions it may grow to.
    pub(crate) reserve: usize,
    pub(crate) cancelled: Arc<AtomicBool>,
    /// CLOCK_MONOTONIC at which it ends; `u64::MAX`: never.
    pub(crate) deadline_ns: u64,
    pub(crate) work: Work,
    /// Order of arrival, by the engine thread.
    pub(crate) since: u64,
    /// When it first began, and what was cached of it then; it begins anew.
    pub(crate) begun: Option<(u64, usize)>,
}

impl Job {
    /// Something new to do.
    pub(crate) fn new(prompt: Vec<u32>, reserve: usize, work: Work) -> Box<Self> {
        let cancelled = Arc::new(AtomicBool::new(false));
        let (deadline_ns, since, begun) = (u64::MAX, 0, None);
        let (tokens, prompt) = (prompt.clone(), prompt.len());
        Box::new(Self { tokens, prompt, reserve, cancelled, deadline_ns, work, since, begun })
    }
}

/// See the module.
pub(crate) struct Inbox {
    queue: Mutex<VecDeque<Box<Job>>>,
    errands: Mutex<VecDeque<Errand>>,
    bell: Bell,
    closed: AtomicBool,
    failure: Mutex<Option<Error>>,
    in_flight: AtomicUsize,
    room: usize,
    max_queue: usize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Inbox {
    /// For an engine of `slots` slots where `max_queue` requests may wait.
    pub(crate) fn new(slots: usize, max_queue: usize) -> Self {
        Self {
            queue: Mutex::new(VecDeque::new()),
            errands: Mutex::new(VecDeque::new()),
            bell: Bell::default(),
            closed: AtomicBool::new(false),
            failure: Mutex::new(None),
            in_flight: AtomicUsize::new(0),
            room: slots.saturating_add(max_queue),
            max_queue,
        }
    }

    /// Leaves a job, or refuses it.
    pub(crate) fn submit(&self, job: Box<Job>) -> Result<()> {
        let more = |n: usize| (n < self.room).then_some(n + 1);
        let order = Ordering::AcqRel;
        if self.in_flight.fetch_update(order, Ordering::Acquire, more).is_err() {
            return Err(Error::QueueFull(self.max_queue));
        }
        let mut queue = lock(&self.queue);
        if self.is_closed() {
            self.leave();
            return Err(self.failure());
        }
        queue.push_back(job);
        drop(queue);
        self.bell.ring();
        Ok(())
    }

    /// Leaves an errand, or refuses it.
    pub(crate) fn send(&self, errand: Errand) -> Result<()> {
        let mut errands = lock(&self.errands);
        if self.is_closed() {
            return Err(self.failure());
        }
        errands.push_back(errand);
        drop(errands);
        self.bell.ring();
        Ok(())
    }

    /// Engine thread: the oldest errand.
    pub(crate) fn take_errand(&self) -> Option<Errand> {
        lock(&self.errands).pop_front()
    }

    /// A job that entered has ended.
    pub(crate) fn leave(&self) {
        self.in_flight.fetch_sub(1, Ordering::AcqRel);
    }

    /// Something about a job changed that the engine thread should look at.
    pub(crate) fn nudge(&self) {
        self.bell.ring();
    }

    /// Nothing enters any more; `why` is what later callers hear. The first reason stays.
    pub(crate) fn close(&self, why: Option<Error>) {
        let queue = lock(&self.queue);
        if !self.closed.swap(true, Ordering::AcqRel) {
            *lock(&self.failure) = why;
        }
        drop(queue);
        self.bell.ring();
    }

    /// True after [`close`](Self::close).
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Why it is closed.
    pub(crate) fn failure(&self) -> Error {
        lock(&self.failure).clone().unwrap_or(Error::EngineClosed)
    }

    /// Engine thread: true if something came since the last call.
    pub(crate) fn rang(&self) -> bool {
        self.bell.rang()
    }

    /// Engine thread: the oldest job.
    pub(crate) fn take(&self) -> Option<Box<Job>> {
        lock(&self.queue).pop_front()
    }

    /// Engine thread: sleeps until the bell rings.
    pub(crate) fn listen(&self, timeout: Option<std::time::Duration>) {
        self.bell.listen(timeout);
    }
}
