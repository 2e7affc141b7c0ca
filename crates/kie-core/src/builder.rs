//! Opening an engine: options, the device that they name, the plan, the weights.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kie_kernels::abi::PageGroup;
use kie_kernels::device::{Device, Options, Stop};
use kie_kernels::meter::Meter;
use kie_kernels::simd::Level;

use crate::admission::Limits;
use crate::compare;
use crate::device;
use crate::engine::{Engine, Parts};
use crate::error::{Error, Result};
use crate::folder;
use crate::load::{Lap, LoadReport};
use crate::model::{Generation, Spec};
use crate::plan::{self, quantize::Scheme, Progress, Reads};
use crate::request::{EngineConfig, LogitsPath};
use crate::saved::Identity;
use crate::shared::Info;
use crate::tokenizer::Tokenizer;
use crate::weights::Checkpoint;

/// Opens an [`Engine`]; see [`EngineConfig`] for what each option means.
pub struct Builder {
    pub(crate) path: PathBuf,
    pub(crate) config: EngineConfig,
    level: Option<Level>,
    first_seqno: Option<u32>,
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
        /// See [`EngineConfig::exact`].
        exact: bool = exact;
        /// See [`EngineConfig::mtp`].
        mtp: bool = mtp;
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
    pub fn first_seqno(mut self, first_seqno: u32) -> Self {
        self.first_seqno = Some(first_seqno);
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
    /// [`Error::GivenUp`].
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
        let spec = self.spec().map_err(explain)?;
        let tokenizer = Tokenizer::from_dir(path, spec.vocab).map_err(explain)?;
        let checkpoint = Checkpoint::open(path, &spec).map_err(explain)?;
        let checkpoint = checkpoint.with_adapter(config.adapter.as_deref(), &spec)?;
        lap.next("configuration and tokenizer", 0);
        let mut engine = self.load(&spec, tokenizer, &checkpoint, hot, lap);
        if let (Ok(engine), Some(_), None) =
            (&mut engine, Scheme::named(&config.dtype), &self.runner)
        {
            let line = self.compared_with_stored(engine, &spec, &checkpoint)?;
            let inner = Arc::get_mut(&mut engine.0).expect("nobody else has it yet");
            inner.info.plan.push_str(&line);
        }
        // What was read of a file that changed is garbage, whatever came of it.
        checkpoint.unchanged()?;
        engine
    }

    /// A line on the relative error of a quantised engine's logits. The weights are loaded once
    /// more, as they are stored, which is done on the CPU only, and where there is room.
    fn compared_with_stored(
        &self,
        engine: &Engine,
        spec: &Spec,
        checkpoint: &Checkpoint,
    ) -> Result<String> {
        let device = engine.info().device;
        if !device.starts_with("cpu") {
            return Ok(format!("converted logits were not compared: {device} is no CPU\n"));
        }
        let mut ids = engine.tokenize(compare::TEXT, true)?;
        ids.truncate(compare::TOKENS.min(engine.context()));
        // Some rotary tables are of the context that is served.
        let by_context = spec.turns_by_context();
        let config = EngineConfig {
            device,
            dtype: "auto".to_owned(),
            max_seq_len: Some(if by_context { engine.context() } else { ids.len() }),
            max_batch: 1,
            prefix_cache: false,
            ..self.config.clone()
        };
        let tokenizer = engine.tokenizer().clone();
        let stored = self.another(config).load(spec, tokenizer, checkpoint, false, Lap::start());
        let stored = stored.and_then(|stored| {
            let logits = stored.logits(&ids, LogitsPath::Prefill);
            stored.close();
            logits
        });
        let before = match stored {
            Ok(logits) => logits.values,
            Err(error @ Error::GivenUp { .. }) => return Err(error),
            Err(why) => {
                let why = why.to_string();
                let why = why.lines().next().unwrap_or_default();
                let line =
                    format!("converted logits were not compared: as stored it gives: {why}\n");
                return Ok(line);
            }
        };
        let after = engine.logits(&ids, LogitsPath::Prefill)?.values;
        let (count, relative) = (ids.len(), compare::relative_error(&after, &before));
        Ok(format!(
            "converted logits of a built-in text ({count} tokens): relative error {relative:.1e}\n"
        ))
    }

    /// A builder of the same model with other options.
    fn another(&self, config: EngineConfig) -> Self {
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
        let adapter = checkpoint.adapter().map(|adapter| adapter.name.clone());
        let info = Info { passed_over, adapter, ..describe(path, spec, config, &plan) };
        let identity = identity(&info, config, (spec, checkpoint), (&plan, &*device));
        lap.next("plan and check of weights", plan.memory.weight_bytes);
        let exact = config.reproducible.then(|| device.exact_reuse(&plan.program)).transpose()?;
        let mut generation = Generation::read(path)?;
        if generation.eos.is_empty() {
            generation.eos.clone_from(&spec.eos);
        }
        let (vocab, context) = (spec.vocab, plan.dims.max_positions as usize);
        let refuses_drafts = device.refuses_drafts(&plan.program);
        let masked_drafts = device.masked_drafts(&plan.program);
        let predicts = plan.program.program().predicts();
        let began = lap.began;
        let info = Info { load: LoadReport { seconds: 0.0, phases: lap.phases }, ..info };
        let mut engine = Engine::start(Parts {
            device,
            program: plan.program,
            buffers: plan.buffers,
            dims: plan.dims,
            tokenizer,
            limits: Limits { vocab, context, generation, refuses_drafts, masked_drafts, predicts },
            prefix_cache: config.prefix_cache,
            exact,
            max_queue: config.max_queue,
            hot,
            info,
            identity,
        })?;
        self.stop.check()?;
        let inner = Arc::get_mut(&mut engine.0).expect("nobody else has it yet");
        inner.info.load.seconds = began.elapsed().as_secs_f64();
        Ok(engine)
    }

    /// What the folder's model is, with the layers that the options want.
    pub(crate) fn spec(&self) -> Result<Spec> {
        let spec = Spec::read(&self.path)?;
        if self.config.mtp {
            return spec.predicting();
        }
        Ok(spec)
    }

    /// Compiles ahead what [`build`](Self::build) with the same options would, reads no weights,
    /// and returns the printed plan.
    ///
    /// # Errors
    /// As [`build`](Self::build).
    pub fn compile(self) -> Result<String> {
        let spec = self.spec()?;
        let checkpoint = Checkpoint::open(&self.path, &spec)?;
        let checkpoint = checkpoint.with_adapter(self.config.adapter.as_deref(), &spec)?;
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
            None => device::open(name, &options),
        }
    }

    /// What a device is opened with.
    pub(crate) fn options(&self) -> Result<Options> {
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
        let bound = |name: &str, bound: Option<f64>| {
            bound.map(|ms| time(name, "milliseconds", ms / 1e3, ms)).transpose()
        };
        Ok(Options {
            threads: config.threads,
            level: self.level,
            nvrtc_dirs: config.nvrtc_dirs.clone(),
            cache_dir: config.cache_dir.clone(),
            hang_timeout: Some(hang_timeout),
            max_itl: bound("max_itl_ms", config.max_itl_ms)?,
            max_launch: bound("max_launch_ms", config.max_launch_ms)?,
            first_seqno: self.first_seqno,
            prefill_kernel: self.prefill_kernel,
            tuning: None,
            meter: self.meter.clone(),
            reproducible: config.reproducible,
            exact: config.exact,
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
        adapter: None,
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

/// What a file of a session must agree with.
fn identity(
    info: &Info,
    config: &EngineConfig,
    (spec, checkpoint): (&Spec, &Checkpoint),
    (plan, device): (&plan::Plan, &dyn Device),
) -> Identity {
    let group = |group: &PageGroup| {
        let PageGroup { state, layers, window, .. } = group;
        let window = window.map_or_else(|| "all positions".to_owned(), |w| format!("window {w}"));
        (format!("{state:?}, {layers} layers, {window}"), device.page_bytes(group))
    };
    Identity {
        model: info.model.clone(),
        weights: checkpoint.sample(spec),
        dtype: config.dtype.clone(),
        layout: plan.program.program().groups.iter().map(group).collect(),
        made_by: format!(
            "kie {} on {}, {}",
            env!("CARGO_PKG_VERSION"),
            info.device,
            info.device_arch
        ),
        reproducible: config.reproducible,
        context: info.context,
    }
}

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
            first_seqno: None,
            prefill_kernel: None,
            runner: None,
            meter: None,
            stop: Stop::default(),
            progress,
        }
    }
}
