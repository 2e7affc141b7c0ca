//! The thread of a request with a grammar: it reads the tokens that the device chose and writes
//! what the next one may be, while the device computes the step between.
//!
//! # Invariants
//! * The engine thread announces tokens and never waits: a mask that is late is the device's matter
//!   (`kie_kernels::mask`), and stalls this sequence only.
//! * Drafts that the device checks beside a mask are guesses and change no token.
//! * A sequence that begins anew is followed anew, with masks and a way for tokens of its own.
//! * `max_tokens`: from time to time the tokens of a legal ending are counted, so often that no
//!   token of usual length can have made it too long in between; where few more than those are
//!   left, they alone are allowed, and the end is the budget's (`length`). A text that is complete
//!   already goes on until the budget ends.

use std::collections::VecDeque;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use kie_kernels::lookup::Lookup;
use kie_kernels::mask::Masks;
use llguidance::{CancellationHandle, Matcher};

use super::compiled::{told, Compiled};
use super::times::Counted;
use crate::error::{Error, Result};
use crate::ring::{sequence, Reader, Writer};

const STACK_BYTES: usize = 8 << 20;
/// Below so many tokens to go the first mask waits for the count of a whole legal text.
const SHORT: usize = 256;
/// Tokens until an ending that was not found, or is too long, is looked for again.
const AGAIN: usize = 16;

/// What of a request matters here.
pub(crate) struct Plan {
    pub(crate) max_new: usize,
    /// Before so many tokens nothing stops it, as long as something else is legal.
    pub(crate) min_new: usize,
    pub(crate) stop_ids: Vec<u32>,
    /// Drafts beside a mask at most.
    pub(crate) drafts: usize,
    /// How long the thread looks out for a token before it sleeps.
    pub(crate) watch: Duration,
    /// Where they come from, besides a grammar that leaves no choice.
    pub(crate) expected: Option<Expected>,
}

/// What drafts are looked up in.
pub(crate) struct Expected {
    pub(crate) prompt: Vec<u32>,
    pub(crate) prediction: Vec<u32>,
}

/// What the thread tells.
struct Told {
    failure: OnceLock<String>,
    /// The budget shaped the end.
    shaped: AtomicBool,
    over: AtomicBool,
    matcher: OnceLock<CancellationHandle>,
}

impl Told {
    /// Nobody wants masks any more.
    fn end(&self) {
        self.over.store(true, Ordering::Release);
        if let Some(matcher) = self.matcher.get() {
            matcher.cancel();
        }
    }
}

/// A sequence to follow.
struct Job {
    masks: Arc<Masks>,
    tokens: Reader<u32, ()>,
    told: Arc<Told>,
}

/// The engine thread's half.
pub(crate) struct Follower {
    jobs: Sender<Job>,
    capacity: usize,
    ids: usize,
    drafts: usize,
    now: Option<(Writer<u32, ()>, Arc<Told>)>,
}

impl Follower {
    /// Starts a thread; `nudge` has the engine thread look for a failure.
    ///
    /// # Errors
    /// [`Error::Device`] where there can be none.
    pub(crate) fn new(
        compiled: Arc<Compiled>,
        plan: Plan,
        times: Arc<Counted>,
        nudge: impl Fn() + Send + 'static,
    ) -> Result<Self> {
        let (jobs, received) = channel();
        let (capacity, ids, drafts) = (plan.max_new, compiled.vocabulary.ids, plan.drafts);
        let thread = std::thread::Builder::new().name("kie-grammar".to_owned());
        let body = move || follow(&received, &compiled, &plan, &times, &nudge);
        let thread = thread.stack_size(STACK_BYTES).spawn(body);
        thread.map_err(|e| Error::Device(format!("no thread for a grammar: {e}")))?;
        Ok(Self { jobs, capacity, ids, drafts, now: None })
    }

    /// The sequence begins; where its masks will be.
    pub(crate) fn begin(&mut self) -> Arc<Masks> {
        self.stop();
        let masks = Arc::new(Masks::new(self.ids, self.drafts));
        let (writer, tokens) = sequence(self.capacity);
        let told = Arc::new(Told {
            failure: OnceLock::new(),
            shaped: AtomicBool::new(false),
            over: AtomicBool::new(false),
            matcher: OnceLock::new(),
        });
        let job = Job { masks: Arc::clone(&masks), tokens, told: Arc::clone(&told) };
        if self.jobs.send(job).is_err() {
            drop(told.failure.set("its thread died".to_owned()));
        }
        self.now = Some((writer, told));
        masks
    }

    /// The device chose a token.
    pub(crate) fn push(&mut self, token: u32) {
        if let Some((tokens, _)) = &mut self.now {
            tokens.push(token);
        }
    }

    /// Announces what was pushed.
    pub(crate) fn publish(&mut self) {
        if let Some((tokens, _)) = &mut self.now {
            tokens.publish();
        }
    }

    /// The sequence gave its slot back.
    pub(crate) fn stop(&mut self) {
        if let Some((_, told)) = self.now.take() {
            told.end();
        }
    }

    /// Why there are no more masks.
    pub(crate) fn failure(&self) -> Option<Error> {
        let (_, told) = self.now.as_ref()?;
        told.failure.get().map(|why| Error::Grammar(why.clone()))
    }

    /// Whether the budget shaped the end.
    pub(crate) fn shaped(&self) -> bool {
        self.now.as_ref().is_some_and(|(_, told)| told.shaped.load(Ordering::Acquire))
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The thread: one sequence after another until nobody sends any more.
fn follow(
    jobs: &Receiver<Job>,
    compiled: &Compiled,
    plan: &Plan,
    times: &Counted,
    nudge: &dyn Fn(),
) {
    let mut ready = Some(compiled.begin());
    while let Ok(Job { masks, tokens, told }) = jobs.recv() {
        let matcher = ready.take().unwrap_or_else(|| compiled.begin());
        if let Some(handle) = matcher.cancellation_handle() {
            drop(told.matcher.set(handle));
        }
        if told.over.load(Ordering::Acquire) {
            continue;
        }
        let text = plan.expected.as_ref().map_or_else(Vec::new, |of| of.prompt.clone());
        let (closing, check, ending, lookup) = (None, 0, Vec::new(), Lookup::default());
        let sequence =
            Sequence { compiled, plan, matcher, closing, check, ending, told: &told, text, lookup };
        let run = AssertUnwindSafe(|| sequence.run(&masks, &tokens, times));
        let failed = |_| Err("the library behind grammars failed on it".to_owned());
        if let Err(why) = catch_unwind(run).unwrap_or_else(failed) {
            if !told.over.load(Ordering::Acquire) {
                drop(told.failure.set(why));
                nudge();
            }
        }
    }
}

struct Sequence<'a> {
    compiled: &'a Compiled,
    plan: &'a Plan,
    matcher: Matcher,
    /// The tokens to end with, once the budget asks for it.
    closing: Option<VecDeque<u32>>,
    /// The token before which an ending is counted again.
    check: usize,
    /// The one that was counted last, less what the text took of it since.
    ending: Vec<u32>,
    told: &'a Told,
    /// Prompt and tokens, where drafts are looked up.
    text: Vec<u32>,
    lookup: Lookup,
}

impl Sequence<'_> {
    fn run(
        mut self,
        masks: &Masks,
        tokens: &Reader<u32, ()>,
        times: &Counted,
    ) -> std::result::Result<(), String> {
        if self.plan.max_new > SHORT {
            self.check = 1;
        }
        let mut index = 0;
        let mut begun = None;
        while index < self.plan.max_new {
            let mask = self.mask(index)?;
            masks.write(index, &mask);
            begun.take().into_iter().for_each(|begun: Instant| times.add(begun.elapsed()));
            let (guesses, looked_up) = self.guesses(index, masks.drafts_max());
            let drafts = self.draft(&guesses, index, mask, masks, tokens)?;
            // The first token that is no draft.
            let mut right = 0;
            let token = loop {
                tokens.watch(index, self.plan.watch);
                tokens.wait(index, None);
                let Some(token) = tokens.get(index) else { return Ok(()) };
                index += 1;
                self.compiled.vocabulary.take_from(&mut self.ending, token);
                if self.plan.expected.is_some() {
                    self.text.push(token);
                }
                if drafts.get(right) != Some(&token) {
                    break token;
                }
                right += 1;
            };
            if self.plan.stop_ids.contains(&token) {
                return Ok(());
            }
            begun = Some(Instant::now());
            if looked_up && !drafts.is_empty() {
                self.lookup.saw(drafts.len(), right);
            }
            self.matcher.rollback(drafts.len() - right).map_err(|e| told(&e))?;
            self.matcher.consume_token(token).map_err(|e| told(&e))?;
        }
        Ok(())
    }

    /// What token `index` and those behind it are guessed to be: the text that is the only legal
    /// one, about as a model splits it, or what was looked up, and whether that is so.
    fn guesses(&mut self, index: usize, most: usize) -> (Vec<u32>, bool) {
        // Where an ending is counted the matcher goes back, and nothing is written ahead of that.
        let most = most.min(self.check.min(self.plan.max_new).saturating_sub(index + 1));
        if most == 0 || self.closing.is_some() || !self.compiled.goes_back() {
            return (Vec::new(), false);
        }
        let forced = self.matcher.compute_ff_bytes();
        if !forced.is_empty() {
            let mut ids = self.compiled.vocabulary.split(&forced);
            ids.truncate(most);
            return (ids, false);
        }
        let Some(Expected { prompt, prediction }) = &self.plan.expected else {
            return (Vec::new(), false);
        };
        let mut ids = vec![0; most.min(self.lookup.reach())];
        let count = self.lookup.draft(&self.text, prompt.len(), prediction, &mut ids);
        ids.truncate(count);
        (ids, true)
    }

    /// Adds drafts behind `mask`, of token `index`: guesses up to the first that is not legal, or
    /// that is known to be wrong. The matcher stands behind them then.
    fn draft(
        &mut self,
        guesses: &[u32],
        index: usize,
        mut mask: Vec<u32>,
        masks: &Masks,
        tokens: &Reader<u32, ()>,
    ) -> std::result::Result<Vec<u32>, String> {
        let mut drafts = Vec::new();
        for (at, id) in (index..).zip(guesses) {
            let allowed =
                mask.get(*id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1);
            let wrong = tokens.get(at).is_some_and(|token| token != *id);
            if !allowed || wrong || self.plan.stop_ids.contains(id) {
                break;
            }
            self.matcher.consume_token(*id).map_err(|e| told(&e))?;
            mask = self.mask(at + 1)?;
            masks.add_draft(*id, &mask);
            drafts.push(*id);
        }
        Ok(drafts)
    }

    /// What token `index` may be.
    fn mask(&mut self, index: usize) -> std::result::Result<Vec<u32>, String> {
        if self.closing.is_none() && index >= self.check {
            self.weigh(index);
        }
        let mut mask = match index {
            0 => self.compiled.first.clone(),
            _ => {
                let mask = self.matcher.compute_mask_or_eos().map_err(|e| told(&e))?;
                mask.as_slice().to_vec()
            }
        };
        if let Some(closing) = &mut self.closing {
            let mut wanted = vec![0; mask.len()];
            match closing.pop_front() {
                Some(id) => wanted[id as usize / 32] |= 1 << (id % 32),
                None => wanted.clone_from(&self.compiled.vocabulary.eos),
            }
            if mask.iter().zip(&wanted).any(|(all, wanted)| all & !wanted != 0) {
                self.told.shaped.store(true, Ordering::Release);
            }
            return Ok(wanted);
        }
        if index < self.plan.min_new {
            let mut more = mask.clone();
            for id in &self.plan.stop_ids {
                if let Some(word) = more.get_mut(*id as usize / 32) {
                    *word &= !(1 << (id % 32));
                }
            }
            if more.iter().any(|word| *word != 0) {
                mask = more;
            }
        }
        Ok(mask)
    }

    /// Counts the tokens of a legal ending, and begins it where it is time to.
    fn weigh(&mut self, index: usize) {
        let left = self.plan.max_new - index;
        let growth = self.compiled.growth();
        let ending = match index {
            0 => self.compiled.shortest().map(<[u32]>::to_vec),
            _ if !self.compiled.goes_back() => None,
            _ => self.compiled.vocabulary.ending(&mut self.matcher, &self.ending),
        };
        self.ending = ending.clone().unwrap_or_default();
        self.check = match ending.map(|ending| (left.checked_sub(ending.len()), ending)) {
            // Complete as it is: what is said further is cut wherever the budget ends.
            Some((Some(spare), ending)) if spare < growth && ending.is_empty() => index + 1,
            Some((Some(spare), ending)) if spare < growth => {
                self.closing = Some(ending.into());
                usize::MAX
            }
            Some((Some(spare), _)) => index + (spare - growth) / (growth + 1) + 1,
            Some((None, _)) | None => index + AGAIN,
        };
    }
}
