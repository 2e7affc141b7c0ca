//! The engine as callers hold it: open a checkpoint, stream tokens, close.
//!
//! # Invariants
//! * An [`Engine`] is a handle; all clones, streams and sessions share one engine thread, which
//!   ends when the last of them is dropped or the engine is closed.
//! * Every request is checked here, on the caller's thread, before it is queued (`admission.rs`);
//!   every request that was queued gets an end.
//! * No panic crosses this interface: one on the engine thread becomes [`Error::Device`].

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kie_kernels::abi::{Dims, SlotParams};
use kie_kernels::cpu::simd::Level;
use kie_kernels::device::{self, Buffer, Device, ExactReuse, Stop};
use kie_kernels::mailbox::Mailbox;
use kie_kernels::mono::meter::Meter;
use kie_kernels::room;
use kie_kernels::validate::ValidProgram;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::admission::{Limits, Resolved};
use crate::answer::Answer;
use crate::compare;
use crate::error::{Error, Result};
use crate::folder;
use crate::host::Host;
use crate::inbox::{Ending, Generate, Inbox, Job, Logits as LogitsJob, Work};
use crate::load::{Lap, LoadPhase, LoadReport};
use crate::memory::{GroupConfig, Pages, PagesConfig};
use crate::metrics::{Counters, Metrics};
use crate::model::{Generation, Spec};
use crate::outlook;
use crate::patience::Patience;
use crate::plan::{self, quantize::Scheme, Progress, Reads};
use crate::primitive::now_ns;
use crate::process::Process;
use crate::request::{Completion, EngineConfig, FinishReason, Prompt, Request, SamplingParams};
use crate::ring::{sequence, HostRing};
use crate::session::Session;
use crate::stream::{Next, Ticket, TokenStream};
use crate::tokenizer::Tokenizer;
use crate::weights::Checkpoint;

/// How [`Engine::logits`] feeds the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitsPath {
    /// Whole chunks at a time, as a prompt is.
    Prefill,
    /// One token at a time, as generated ones are.
    Decode,
}

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

/// What an engine is made of.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Info {
    /// Name of the model: its folder's.
    pub model: String,
    /// Name of the device.
    pub device: String,
    /// Why `device="auto"` is the CPU, where it is: what the first GPU's opening said.
    pub passed_over: Option<String>,
    /// What a person would call the device.
    pub device_model: String,
    /// Its instruction set.
    pub device_arch: String,
    /// Threads, or on a GPU blocks of threads, that a pass is spread over.
    pub threads: usize,
    /// `model_type` of the config.
    pub arch: String,
    /// Number format of the weights as asked for.
    pub dtype: String,
    /// Numbers in all tensors.
    pub parameters: u64,
    /// Token ids.
    pub vocab: usize,
    /// Positions of a longest sequence.
    pub context: usize,
    /// Requests that run at once.
    pub max_batch: usize,
    /// Requests that may wait.
    pub max_queue: usize,
    /// KV pages of each layer group.
    pub kv_pages: Vec<usize>,
    /// Bytes of all KV pages.
    pub kv_bytes: u64,
    /// Bytes of KV a position.
    pub kv_bytes_per_position: u64,
    /// Bytes of the weights.
    pub weight_bytes: u64,
    /// Bytes of weights that a decoded token reads.
    pub bytes_per_token: u64,
    /// Bytes a second that the device's memory gives; `None` where it was not measured, or is not
    /// that of the processor.
    pub read_bandwidth: Option<f64>,
    /// The printed plan.
    pub plan: String,
    /// Where the time of opening it went.
    pub load: LoadReport,
}

/// Opens an [`Engine`]; see [`EngineConfig`] for what each option means.
pub struct Builder {
    pub(crate) path: PathBuf,
    pub(crate) config: EngineConfig,
    level: Option<Level>,
    first_epoch: Option<u32>,
    prefill_kernel: Option<bool>,
    runner: Option<Arc<dyn Device>>,
    pub(crate) meter: Option<Arc<Meter>>,
    pub(crate) stop: Stop,
    progress: Arc<Progress>,
}

macro_rules! options {
    ($($(#[$doc:meta])* $name:ident: $type:ty = $value:expr;)*) => {
        $($(#[$doc])* #[must_use]
        pub fn $name(mut self, $name: $type) -> Self {
            self.config.$name = $value;
            self
        })*
    };
}

impl Builder {
    options! {
        /// See [`EngineConfig::device`].
        device: impl Into<String> = device.into();
        /// See [`EngineConfig::dtype`].
        dtype: impl Into<String> = dtype.into();
        /// See [`EngineConfig::max_seq_len`].
        max_seq_len: usize = Some(max_seq_len);
        /// See [`EngineConfig::max_batch`].
        max_batch: usize = max_batch;
        /// See [`EngineConfig::max_queue`].
        max_queue: usize = max_queue;
        /// See [`EngineConfig::kv_bytes`].
        kv_bytes: u64 = Some(kv_bytes);
        /// See [`EngineConfig::threads`].
        threads: usize = Some(threads);
        /// See [`EngineConfig::prefix_cache`].
        prefix_cache: bool = prefix_cache;
        /// See [`EngineConfig::reproducible`].
        reproducible: bool = reproducible;
    }

    /// All options at once.
    #[must_use]
    pub fn config(mut self, config: EngineConfig) -> Self {
        self.config = config;
        self
    }

    /// Forces an instruction set of the CPU, for tests; the best there is otherwise.
    #[must_use]
    pub fn level(mut self, level: Level) -> Self {
        self.level = Some(level);
        self
    }

    /// Where a GPU's steps start counting, for tests of the end; 1 otherwise.
    #[doc(hidden)]
    #[must_use]
    pub fn first_epoch(mut self, first_epoch: u32) -> Self {
        self.first_epoch = Some(first_epoch);
        self
    }

    /// Whether a GPU's prompts run in the prefill kernel where it fits, for tests.
    #[doc(hidden)]
    #[must_use]
    pub fn prefill_kernel(mut self, on: bool) -> Self {
        self.prefill_kernel = Some(on);
        self
    }

    /// Runs on a device that is open already; its name in the options is not looked at.
    #[must_use]
    pub fn runner(mut self, runner: Arc<dyn Device>) -> Self {
        self.runner = Some(runner);
        self
    }

    /// Who is told how loading goes: phase, done, total.
    #[must_use]
    pub fn progress(mut self, progress: Arc<Progress>) -> Self {
        self.progress = progress;
        self
    }

    /// What ends opening before its time, from any thread.
    #[must_use]
    pub fn stop(mut self, stop: Stop) -> Self {
        self.stop = stop;
        self
    }

    /// Reads, plans, loads and starts.
    ///
    /// # Errors
    /// [`Error::Load`] and [`Error::UnsupportedModel`] for the folder, [`Error::NoDevice`],
    /// [`Error::OutOfMemory`] before weights are loaded, [`Error::InvalidRequest`] for options,
    /// [`Error::Interrupted`].
    pub fn build(self) -> Result<Engine> {
        let (path, config) = (&self.path, &self.config);
        let hot = match config.idle.as_str() {
            "park" => false,
            "hot" => true,
            other => {
                let detail = format!("idle must be \"park\" or \"hot\", got {other:?}");
                return Err(Error::InvalidRequest(detail));
            }
        };
        let mut lap = Lap::start();
        let explain = |error| folder::explain(path, error);
        let spec = Spec::read(path).map_err(explain)?;
        let tokenizer = Tokenizer::from_dir(path, spec.vocab).map_err(explain)?;
        let checkpoint = Checkpoint::open(path, &spec).map_err(explain)?;
        lap.next("configuration and tokenizer", 0);
        let engine = self.load(&spec, tokenizer, &checkpoint, hot, lap);
        // What was read of a file that changed is garbage, whatever came of it.
        checkpoint.unchanged()?;
        let mut engine = engine?;
        if Scheme::named(&config.dtype).is_some() && self.runner.is_none() {
            let line = compare::with_stored(&engine, &self)?;
            let inner = Arc::get_mut(&mut engine.0).expect("nobody else has it yet");
            inner.info.plan.push_str(&line);
        }
        Ok(engine)
    }

    /// A builder of the same model with other options.
    pub(crate) fn another(&self, config: EngineConfig) -> Self {
        let mut builder = Engine::builder(&self.path).config(config).stop(self.stop.clone());
        builder.level = self.level;
        builder
    }

    /// An engine with the checkpoint's weights.
    fn load(
        &self,
        spec: &Spec,
        tokenizer: Tokenizer,
        checkpoint: &Checkpoint,
        hot: bool,
        mut lap: Lap,
    ) -> Result<Engine> {
        let (path, config) = (&self.path, &self.config);
        self.stop.check()?;
        let (device, passed_over) = self.choose(spec, checkpoint)?;
        lap.next("device", 0);
        let reads = Reads { progress: &*self.progress, stop: &self.stop };
        let plan = plan::prepare(spec, checkpoint, &*device, config, &reads)?;
        let info = Info { passed_over, ..describe(path, spec, config, &plan) };
        lap.next("plan and check of weights", plan.memory.weight_bytes);
        let exact = config.reproducible.then(|| device.exact_reuse(&plan.program)).transpose()?;
        let mut generation = Generation::read(path)?;
        if generation.eos.is_empty() {
            generation.eos.clone_from(&spec.eos);
        }
        let (vocab, context) = (spec.vocab, plan.dims.max_positions as usize);
        let began = lap.began;
        let info = Info { load: LoadReport { seconds: 0.0, phases: lap.phases }, ..info };
        let mut engine = Engine::start(Parts {
            device,
            program: plan.program,
            buffers: plan.buffers,
            dims: plan.dims,
            tokenizer,
            limits: Limits { vocab, context, generation },
            prefix_cache: config.prefix_cache,
            exact,
            max_queue: config.max_queue,
            hot,
            info,
        })?;
        self.stop.check()?;
        let inner = Arc::get_mut(&mut engine.0).expect("nobody else has it yet");
        inner.info.load.seconds = began.elapsed().as_secs_f64();
        Ok(engine)
    }

    /// Compiles ahead what [`build`](Self::build) with the same options would, reads no weights,
    /// and returns the printed plan.
    ///
    /// # Errors
    /// As [`build`](Self::build).
    pub fn compile(self) -> Result<String> {
        let spec = Spec::read(&self.path)?;
        let checkpoint = Checkpoint::open(&self.path, &spec)?;
        let (device, _) = self.choose(&spec, &checkpoint)?;
        let plan = plan::outline(&spec, &checkpoint, &*device, &self.config)?;
        device.compile(&plan.program)?;
        Ok(plan.to_string())
    }

    /// The device that the options name, and why it is not a GPU where that was open. "auto" is
    /// the first NVIDIA GPU that takes the model; asking for threads means the CPU's. AMD's are
    /// named or not used: nothing has run on one.
    pub(crate) fn choose(
        &self,
        spec: &Spec,
        checkpoint: &Checkpoint,
    ) -> Result<(Arc<dyn Device>, Option<String>)> {
        let config = &self.config;
        if config.device != "auto" || self.runner.is_some() {
            return Ok((self.open(&config.device)?, None));
        }
        if config.threads.is_some() || self.level.is_some() {
            return Ok((self.open("cpu")?, None));
        }
        let gpu = self.open("cuda:0").and_then(|device| {
            plan::outline(spec, checkpoint, &*device, config)?;
            Ok(device)
        });
        match gpu {
            Ok(device) => Ok((device, None)),
            Err(why) => Ok((self.open("cpu")?, Some(why.to_string()))),
        }
    }

    fn open(&self, name: &str) -> Result<Arc<dyn Device>> {
        let options = self.options()?;
        match &self.runner {
            Some(runner) => Ok(Arc::clone(runner)),
            None => outlook::open(name, &options),
        }
    }

    /// What a device is opened with.
    pub(crate) fn options(&self) -> Result<device::Options> {
        let config = &self.config;
        if let Some(got) = config.threads.filter(|n| !(1..=1024).contains(n)) {
            let detail = format!("threads must be 1 to 1024, got {got}");
            return Err(Error::InvalidRequest(detail));
        }
        let time = |name: &str, unit: &str, seconds: f64, got: f64| {
            let time = Duration::try_from_secs_f64(seconds).ok().filter(|t| !t.is_zero());
            let detail = || format!("{name} must be a number of {unit} above 0, got {got}");
            time.ok_or_else(|| Error::InvalidRequest(detail()))
        };
        let seconds = config.hang_timeout_s;
        let hang_timeout = time("hang_timeout_s", "seconds", seconds, seconds)?;
        let gap = config.max_itl_ms.map(|ms| time("max_itl_ms", "milliseconds", ms / 1e3, ms));
        Ok(device::Options {
            threads: config.threads,
            level: self.level,
            nvrtc_dirs: config.nvrtc_dirs.clone(),
            cache_dir: config.cache_dir.clone(),
            hang_timeout: Some(hang_timeout),
            max_itl: gap.transpose()?,
            first_epoch: self.first_epoch,
            prefill_kernel: self.prefill_kernel,
            tuning: None,
            meter: self.meter.clone(),
            reproducible: config.reproducible,
            stop: self.stop.clone(),
        })
    }
}

fn describe(path: &Path, spec: &Spec, config: &EngineConfig, plan: &plan::Plan) -> Info {
    let absolute = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let folder = || absolute.file_name().map(|n| n.to_string_lossy().into_owned());
    let name = config.name.clone().or_else(folder);
    let device = plan.device();
    Info {
        model: name.unwrap_or_default(),
        device: device.name.clone(),
        passed_over: None,
        device_model: device.model.clone(),
        device_arch: device.arch.clone(),
        threads: device.blocks as usize,
        arch: spec.architecture.clone(),
        dtype: config.dtype.clone(),
        parameters: spec.parameters(),
        vocab: spec.vocab,
        context: plan.dims.max_positions as usize,
        max_batch: plan.dims.slots as usize,
        max_queue: config.max_queue,
        kv_pages: plan.program.program().groups.iter().map(|group| group.pages as usize).collect(),
        kv_bytes: plan.memory.kv_bytes,
        kv_bytes_per_position: plan.kv_bytes_per_position,
        weight_bytes: plan.memory.weight_bytes,
        bytes_per_token: plan.weight_bytes_per_token,
        read_bandwidth: config.read_bandwidth.filter(|_| device.name == "cpu"),
        plan: plan.to_string(),
        load: LoadReport::default(),
    }
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
}

/// What clones, streams and sessions share.
pub(crate) struct Inner {
    inbox: Arc<Inbox>,
    counters: Arc<Counters>,
    thread: Mutex<Option<JoinHandle<()>>>,
    tokenizer: Tokenizer,
    limits: Limits,
    info: Info,
    opened: Instant,
    process: Process,
}

/// A model, loaded and running. Cheap to clone, safe from any thread.
#[derive(Clone)]
pub struct Engine(pub(crate) Arc<Inner>);

impl Engine {
    /// An engine for the checkpoint folder at `path`.
    pub fn builder(path: impl Into<PathBuf>) -> Builder {
        let progress: Arc<Progress> = Arc::new(|_: &str, _, _| {});
        let path = path.into();
        let config = EngineConfig::default();
        Builder {
            path,
            config,
            level: None,
            first_epoch: None,
            prefill_kernel: None,
            runner: None,
            meter: None,
            stop: Stop::default(),
            progress,
        }
    }

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
            tokenizer,
            limits,
            info,
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
            self.submit(ids, &params, false, began_ns)
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
        out.end(Ending { result: Ok((FinishReason::Timeout, None)), admitted_ns: 0, cached: 0 });
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

    /// A conversation whose KV is kept between turns. With a chat template its turns are messages
    /// behind `system`; without one `system` and the turns are plain text.
    ///
    /// # Errors
    /// [`Error::EngineClosed`], or [`Error::InvalidRequest`] for a text the tokenizer refuses.
    pub fn session(&self, system: Option<&str>) -> Result<Session> {
        self.0.check_open()?;
        Session::new(self.clone(), system, &Patience::ENDLESS)
    }

    /// [`session`](Self::session), while there is patience to tokenize `system`.
    ///
    /// # Errors
    /// As [`session`](Self::session), and [`Error::GivenUp`].
    pub fn session_within(&self, system: Option<&str>, patience: &Patience<'_>) -> Result<Session> {
        self.0.check_open()?;
        Session::new(self.clone(), system, patience)
    }

    /// Positions of a longest sequence.
    pub fn context(&self) -> usize {
        self.0.limits.context
    }

    /// Queues a checked request.
    pub(crate) fn submit(
        &self,
        prompt: Vec<u32>,
        params: &SamplingParams,
        session: bool,
        submitted_ns: u64,
    ) -> Result<Ticket> {
        let inner = &self.0;
        inner.limits.check_prompt(&prompt, params.max_tokens)?;
        let resolved = inner.limits.resolve(params, prompt.len())?;
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
            min_new: resolved.min_new as u32,
            stop_ids: resolved.stop_ids.len() as u32,
            bias: resolved.bias.len() as u32,
            sampling: resolved.sampling,
        };
        let answer = (!params.stop.is_empty()).then(answer);
        let work = Work::Generate(Box::new(Generate {
            out,
            params: device_params,
            stop_ids: resolved.stop_ids,
            bias: resolved.bias,
            answer,
            stop: params.stop.clone(),
            session,
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
        self.0.tokenizer.decode_within(ids, skip_special, patience)
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

    /// Touches every weight once, so that the first request finds them in memory.
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

    /// Ends all requests with [`Error::EngineClosed`] and frees what the engine holds. Idempotent.
    pub fn close(&self) {
        self.0.close();
    }

    /// True after [`close`](Self::close), or if the device failed.
    pub fn is_closed(&self) -> bool {
        self.0.inbox.is_closed()
    }
}

impl Inner {
    /// The engine thread exists only in the process that opened the engine.
    pub(crate) fn check_process(&self) -> Result<()> {
        if self.process.is_current() {
            return Ok(());
        }
        Err(Error::InvalidRequest(format!(
            "the engine was opened in process {}, not in its fork {}: open one there",
            self.process.id(),
            std::process::id()
        )))
    }

    pub(crate) fn check_open(&self) -> Result<()> {
        self.check_process()?;
        if self.inbox.is_closed() {
            return Err(self.failure());
        }
        Ok(())
    }

    /// Why the engine is closed.
    pub(crate) fn failure(&self) -> Error {
        self.inbox.failure()
    }

    /// Has the engine thread look at cancel flags.
    pub(crate) fn nudge(&self) {
        self.inbox.nudge();
    }

    pub(crate) fn model(&self) -> &str {
        &self.info.model
    }

    pub(crate) fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Bytes a second that the device's memory gives, where that was measured.
    pub(crate) fn read_bandwidth(&self) -> Option<f64> {
        self.info.read_bandwidth
    }

    /// Bytes that a decoded token at `position` reads.
    pub(crate) fn bytes_per_token(&self, position: usize) -> u64 {
        self.info.bytes_per_token + self.info.kv_bytes_per_position * position as u64
    }

    fn answer(&self, params: &SamplingParams, resolved: &Resolved) -> Answer {
        let stop_ids = resolved.stop_ids.as_slice().into();
        Answer::new(&self.tokenizer, &params.stop, stop_ids, params.min_tokens)
    }

    /// An answer of a session's turn, to decode it once more.
    pub(crate) fn answer_of(&self, params: &SamplingParams, prompt: usize) -> Result<Answer> {
        Ok(self.answer(params, &self.limits.resolve(params, prompt)?))
    }

    fn encode(&self, prompt: &Prompt, patience: &Patience<'_>) -> Result<Vec<u32>> {
        match prompt {
            Prompt::Text(text) => self.tokenizer.encode_within(text, true, patience),
            Prompt::Ids(ids) => Ok(ids.clone()),
            Prompt::Messages(messages) => {
                let messages = Value::Array(messages.clone());
                self.tokenizer.encode_chat_within(&messages, true, &Map::new(), patience)
            }
        }
    }

    fn close(&self) {
        if !self.process.is_current() {
            return;
        }
        self.inbox.close(None);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // A panic of the thread was caught inside and told to its requests.
            drop(thread.join());
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.close();
    }
}

fn message(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("panicked")
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks, missing_docs)]
pub(crate) mod fake;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod stop_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
