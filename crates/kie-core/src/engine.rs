//! The engine as callers hold it: open a checkpoint, stream tokens, close.
//!
//! # Invariants
//! * An [`Engine`] is a handle; all clones, streams and sessions share one engine thread, which
//!   ends when the last of them is dropped or the engine is closed.
//! * Every request is checked here, on the caller's thread, before it is queued (`admission.rs`);
//!   every request that was queued gets an end.
//! * No panic crosses this interface: one on the engine thread becomes [`Error::Device`].

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use kie_kernels::abi::{Dims, SlotParams};
use kie_kernels::buffer::Buffer;
use kie_kernels::device::{Device, ExactReuse};
use kie_kernels::mailbox::Mailbox;
use kie_kernels::room;
use kie_kernels::validate::ValidProgram;
use serde_json::{Map, Value};

use crate::admission::Limits;
use crate::error::{Error, Result};
use crate::grammar::compiled::Grammars;
use crate::grammar::times::MaskTimes;
use crate::grammar::Grammar;
use crate::host::Host;
use crate::inbox::{Ending, Generate, Inbox, Job, Logits as LogitsJob, Work};
use crate::load::LoadPhase;
use crate::memory::{GroupConfig, Pages, PagesConfig};
use crate::metrics::{Counters, Metrics};
use crate::patience::Patience;
use crate::primitive::now_ns;
use crate::process::Process;
pub use crate::request::LogitsPath;
use crate::request::{Completion, FinishReason, Prompt, Request, SamplingParams};
use crate::ring::{sequence, HostRing};
use crate::saved::Identity;
use crate::shared::{Info, Inner};
use crate::stream::{Next, Ticket, TokenStream};
use crate::tokenizer::Tokenizer;

/// Raw logits, `[tokens][vocab]`: row i is what follows token i.
#[derive(Debug, Clone, PartialEq)]
pub struct Logits {
    /// Rows.
    pub tokens: usize,
    /// Columns.
    pub vocab: usize,
    /// The numbers, row after row.
    pub values: Vec<f32>,
}

/// What an engine is started from.
pub(crate) struct Parts {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) program: ValidProgram,
    pub(crate) buffers: Vec<Buffer>,
    pub(crate) dims: Dims,
    pub(crate) tokenizer: Tokenizer,
    pub(crate) limits: Limits,
    pub(crate) prefix_cache: bool,
    /// See [`PagesConfig::exact`].
    pub(crate) exact: Option<ExactReuse>,
    pub(crate) max_queue: usize,
    pub(crate) hot: bool,
    pub(crate) info: Info,
    pub(crate) identity: Identity,
}

/// A model, loaded and running. Cheap to clone, safe from any thread.
#[derive(Clone)]
pub struct Engine(pub(crate) Arc<Inner>);

impl Engine {
    /// Starts the engine thread; returns when the device runs.
    pub(crate) fn start(parts: Parts) -> Result<Self> {
        let Parts { device, program, buffers, dims, tokenizer, limits, mut info, .. } = parts;
        room::ask(Mailbox::bytes(&dims))?;
        let inbox = Arc::new(Inbox::new(dims.slots as usize, parts.max_queue));
        let counters = Arc::new(Counters::default());
        let groups: Vec<_> = program.program().groups.iter().map(GroupConfig::of).collect();
        let ring = HostRing::new(&dims, groups.len());
        let mailbox = ring.mailbox();
        let pages = Pages::new(PagesConfig {
            groups,
            slots: dims.slots as usize,
            chunk: dims.chunk(),
            prefix_cache: parts.prefix_cache,
            exact: parts.exact,
        });
        let grammars = Grammars::new(tokenizer.clone(), limits.vocab, &limits.generation.eos);
        let (in_thread, in_counters) = (Arc::clone(&inbox), Arc::clone(&counters));
        let mut host = Host::new(in_thread, in_counters, ring, pages, dims, parts.hot);
        let at_end = Arc::clone(&inbox);
        let (started, starts) = channel();
        let body = move || {
            // The device's host thread is the one that starts it.
            let mut running = match device.start(program, buffers, mailbox) {
                Ok(running) => running,
                Err(error) => return drop(started.send(Err(Error::from(error)))),
            };
            drop(started.send(Ok((running.phases(), running.warnings()))));
            let work = std::panic::AssertUnwindSafe(|| host.run(&mut *running));
            let why = match std::panic::catch_unwind(work) {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error),
                Err(panic) => Some(Error::Device(format!("engine thread: {}", message(&*panic)))),
            };
            at_end.close(why);
            // The device stops before its slots are given away.
            let stop = std::panic::AssertUnwindSafe(|| drop(running));
            drop(std::panic::catch_unwind(stop));
            host.end_all(&at_end.failure());
        };
        let failed = |e: &dyn std::fmt::Display| Error::Device(format!("engine thread: {e}"));
        let thread = std::thread::Builder::new().name("kie-engine".to_owned()).spawn(body);
        let thread = thread.map_err(|e| failed(&e))?;
        let died = |_| failed(&"it died while the device started");
        let (phases, warnings) = match starts.recv().map_err(died).flatten() {
            Ok(started) => started,
            Err(why) => {
                // What it took is free again when the error is told: whoever is short of memory
                // tries at once with less.
                drop(thread.join());
                return Err(why);
            }
        };
        info.load.phases.extend(phases.into_iter().map(LoadPhase::from));
        warnings.iter().for_each(|w| info.plan.push_str(&format!("warning   {w}\n")));
        Ok(Self(Arc::new(Inner {
            inbox,
            counters,
            thread: Mutex::new(Some(thread)),
            grammars,
            tokenizer,
            limits,
            info,
            identity: parts.identity,
            opened: Instant::now(),
            process: Process::current(),
        })))
    }

    /// Starts a request.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`], [`Error::ContextLength`] or [`Error::Template`] for what was
    /// asked, [`Error::QueueFull`], [`Error::EngineClosed`], or what the device failed with.
    pub fn stream(&self, request: Request) -> Result<TokenStream> {
        self.stream_within(request, &Patience::ENDLESS)
    }

    /// [`stream`](Self::stream), while there is patience: templates and tokenizers may take long.
    /// The request's own timeout counts from here; where it ends before the request is queued, the
    /// stream ends with it.
    ///
    /// # Errors
    /// As [`stream`](Self::stream), and [`Error::GivenUp`].
    pub fn stream_within(&self, request: Request, patience: &Patience<'_>) -> Result<TokenStream> {
        let began_ns = now_ns();
        self.0.check_open()?;
        let Request { prompt, params } = request;
        let ticket = self.within(&params, began_ns, patience, |patience| {
            let ids = self.0.encode(&prompt, patience)?;
            let prediction = self.0.encode_prediction(&params, patience)?;
            self.submit((ids, prediction), &params, (false, began_ns), patience)
        })?;
        Ok(TokenStream::new(ticket))
    }

    /// The ticket that `submit` gets with as much patience as a request has; a request whose time
    /// is over before ends as others do.
    pub(crate) fn within(
        &self,
        params: &SamplingParams,
        began_ns: u64,
        patience: &Patience<'_>,
        submit: impl FnOnce(&Patience<'_>) -> Result<Ticket>,
    ) -> Result<Ticket> {
        self.0.limits.timeout_ns(params)?;
        match submit(&patience.at_most(params.timeout)) {
            Err(Error::GivenUp { what, late: true }) => {
                // Unless it was the caller's own.
                patience.check(what)?;
                self.expired(params, began_ns)
            }
            other => other,
        }
    }

    /// A request that ended with reason `timeout` before it was queued.
    fn expired(&self, params: &SamplingParams, submitted_ns: u64) -> Result<Ticket> {
        let inner = &self.0;
        let resolved = inner.limits.resolve(params, 0)?;
        let (out, reader) = sequence(1);
        let result = Ok((FinishReason::Timeout, None));
        out.end(Ending { result, admitted_ns: 0, cached: 0, drafts: [0; 2] });
        Ok(Ticket {
            engine: Arc::clone(inner),
            reader,
            cancelled: Arc::new(AtomicBool::new(false)),
            answer: inner.answer(params, &resolved),
            logprobs: params.logprobs,
            prompt_tokens: 0,
            seed: resolved.sampling.seed,
            submitted_ns,
        })
    }

    /// [`stream`](Self::stream) and its [`completion`](TokenStream::completion).
    ///
    /// # Errors
    /// As [`stream`](Self::stream).
    pub fn generate(&self, request: Request) -> Result<Completion> {
        self.stream(request)?.completion()
    }

    /// Positions of a longest sequence.
    pub fn context(&self) -> usize {
        self.0.limits.context
    }

    /// Queues a checked request.
    pub(crate) fn submit(
        &self,
        (prompt, mut prediction): (Vec<u32>, Vec<u32>),
        params: &SamplingParams,
        (session, submitted_ns): (bool, u64),
        patience: &Patience<'_>,
    ) -> Result<Ticket> {
        let inner = &self.0;
        inner.limits.check_prompt(&prompt, params.max_tokens)?;
        let resolved = inner.limits.resolve(params, prompt.len())?;
        // More than what can be generated is of no use.
        prediction.truncate(resolved.max_new.min(inner.limits.context - prompt.len()));
        let follower = inner.follower((&prompt, &prediction), params, &resolved, patience)?;
        let answer = || inner.answer(params, &resolved);
        let (out, reader) = sequence(resolved.max_new * (1 + params.logprobs.unwrap_or(0)));
        let mut ticket = Ticket {
            engine: Arc::clone(inner),
            reader,
            cancelled: Arc::default(),
            answer: answer(),
            logprobs: params.logprobs,
            prompt_tokens: prompt.len(),
            seed: resolved.sampling.seed,
            submitted_ns,
        };
        let device_params = SlotParams {
            prompt: prompt.len() as u32,
            cached: 0,
            max_new: resolved.max_new as u32,
            // With a grammar the masks say it.
            min_new: if params.grammar.is_some() { 0 } else { resolved.min_new as u32 },
            stop_ids: resolved.stop_ids.len() as u32,
            bias: resolved.bias.len() as u32,
            drafts: resolved.drafts,
            prediction: prediction.len() as u32,
            sampling: resolved.sampling,
        };
        let answer = (!params.stop.is_empty()).then(answer);
        let work = Work::Generate(Box::new(Generate {
            out,
            params: device_params,
            stop_ids: resolved.stop_ids,
            bias: resolved.bias,
            prediction,
            answer,
            stop: params.stop.clone(),
            session,
            follower,
        }));
        let mut job = Job::new(prompt, ticket.prompt_tokens + resolved.max_new, work);
        job.deadline_ns = resolved.timeout_ns.map_or(u64::MAX, |t| submitted_ns.saturating_add(t));
        ticket.cancelled = Arc::clone(&job.cancelled);
        inner.inbox.submit(job)?;
        Ok(ticket)
    }

    /// Raw logits behind every one of `ids`.
    ///
    /// # Errors
    /// As [`stream`](Self::stream), and [`Error::OutOfMemory`] if there is no room for them.
    pub fn logits(&self, ids: &[u32], path: LogitsPath) -> Result<Logits> {
        self.logits_within(ids, path, &Patience::ENDLESS)
    }

    /// [`logits`](Self::logits), while there is patience.
    ///
    /// # Errors
    /// As [`logits`](Self::logits), and [`Error::GivenUp`].
    pub fn logits_within(
        &self,
        ids: &[u32],
        path: LogitsPath,
        patience: &Patience<'_>,
    ) -> Result<Logits> {
        self.0.check_open()?;
        let vocab = self.0.limits.vocab;
        self.0.limits.check_prompt(ids, Some(0))?;
        let mut values = Vec::new();
        let need = ids.len().saturating_mul(vocab);
        values.try_reserve_exact(need).map_err(|_| Error::OutOfMemory {
            need: need as u64 * 4,
            free: 0,
            plan: format!("{} x {vocab} logits on the host\nask for fewer at a time", ids.len()),
        })?;
        let (out, result) = channel();
        let work = Work::Logits(LogitsJob { out, path, values });
        let job = Job::new(ids.to_vec(), ids.len(), work);
        let cancelled = Arc::clone(&job.cancelled);
        self.0.inbox.submit(job)?;
        let received = patience.receive(&result, "logits").inspect_err(|_| {
            cancelled.store(true, Ordering::Release);
            self.0.nudge();
        })?;
        let values = received.ok_or_else(|| self.0.failure())??;
        Ok(Logits { tokens: ids.len(), vocab, values })
    }

    /// Ids of a text.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`] for a text that the tokenizer refuses.
    pub fn tokenize(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        self.0.tokenizer.encode(text, add_special)
    }

    /// [`tokenize`](Self::tokenize), while there is patience.
    ///
    /// # Errors
    /// As [`tokenize`](Self::tokenize), and [`Error::GivenUp`].
    pub fn tokenize_within(
        &self,
        text: &str,
        add_special: bool,
        patience: &Patience<'_>,
    ) -> Result<Vec<u32>> {
        self.0.tokenizer.encode_within(text, add_special, patience)
    }

    /// [`detokenize`](Self::detokenize), while there is patience.
    ///
    /// # Errors
    /// As [`detokenize`](Self::detokenize), and [`Error::GivenUp`].
    pub fn detokenize_within(
        &self,
        ids: &[u32],
        skip_special: bool,
        patience: &Patience<'_>,
    ) -> Result<String> {
        crate::text::decode_within(&self.0.tokenizer, ids, skip_special, patience)
    }

    /// Text of ids.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`] for an id that the model does not have.
    pub fn detokenize(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        self.0.tokenizer.decode(ids, skip_special)
    }

    /// Bytes of one token: part of a character may be all of it. See
    /// [`Tokenizer::token_bytes`].
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        self.0.tokenizer.token_bytes(id)
    }

    /// The model's tokenizer, for templates with variables of their own.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.0.tokenizer
    }

    /// Messages as the model's chat template writes them.
    ///
    /// # Errors
    /// [`Error::Template`] if there is none or it refuses them.
    pub fn apply_chat_template(
        &self,
        messages: &[Value],
        add_generation_prompt: bool,
    ) -> Result<String> {
        self.apply_chat_template_within(messages, add_generation_prompt, &Patience::ENDLESS)
    }

    /// [`apply_chat_template`](Self::apply_chat_template), while there is patience.
    ///
    /// # Errors
    /// As [`apply_chat_template`](Self::apply_chat_template), and [`Error::GivenUp`].
    pub fn apply_chat_template_within(
        &self,
        messages: &[Value],
        add_generation_prompt: bool,
        patience: &Patience<'_>,
    ) -> Result<String> {
        let messages = Value::Array(messages.to_vec());
        let tokenizer = &self.0.tokenizer;
        let none = Map::new();
        tokenizer.apply_chat_template_within(&messages, add_generation_prompt, &none, patience)
    }

    /// Touches every weight once, so that the first request finds them in memory, and makes what
    /// grammars share.
    ///
    /// # Errors
    /// As [`stream`](Self::stream).
    pub fn warmup(&self) -> Result<()> {
        self.warmup_within(&Patience::ENDLESS)
    }

    /// [`warmup`](Self::warmup), while there is patience.
    ///
    /// # Errors
    /// As [`warmup`](Self::warmup), and [`Error::GivenUp`].
    pub fn warmup_within(&self, patience: &Patience<'_>) -> Result<()> {
        self.0.grammars.warm(patience)?;
        let mut request = Request::new(Prompt::Ids(vec![0]));
        request.params.max_tokens = Some(1);
        request.params.temperature = Some(0.0);
        let mut stream = self.stream_within(request, patience)?;
        while !matches!(stream.recv_timeout(patience.slice())?, Next::Finished) {
            patience.check("warming up")?;
        }
        Ok(())
    }

    /// What the engine is made of.
    pub fn info(&self) -> Info {
        self.0.info.clone()
    }

    /// What it has counted.
    pub fn metrics(&self) -> Metrics {
        let pages = self.0.info.kv_pages.iter().sum::<usize>();
        self.0.counters.read(pages as u64, self.0.opened.elapsed().as_secs_f64())
    }

    /// Whether requests may have grammars.
    ///
    /// # Errors
    /// [`Error::Grammar`] that says why not.
    pub fn runs_grammars(&self) -> Result<()> {
        self.0.grammars.check()
    }

    /// Compiles a grammar, so that requests find it.
    ///
    /// # Errors
    /// [`Error::Grammar`] for one that cannot be kept to.
    pub fn compile_grammar(&self, grammar: &Grammar) -> Result<()> {
        self.0.grammars.compiled(grammar, &Patience::ENDLESS).map(drop)
    }

    /// How long the masks of grammars took.
    pub fn mask_times(&self) -> MaskTimes {
        self.0.grammars.times().read()
    }

    /// Ends all requests with [`Error::EngineClosed`] and frees what the engine holds. Idempotent.
    pub fn close(&self) {
        self.0.close();
    }

    /// True after [`close`](Self::close), or if the device failed.
    pub fn is_closed(&self) -> bool {
        self.0.inbox.is_closed()
    }
}

fn message(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("panicked")
}

mod saving;

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks, missing_docs)]
pub(crate) mod fake;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod stop_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
