//! What all handles of one engine share: its queue, its thread, its tokenizer, what it is made of.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kie_kernels::abi::Drafts;
use kie_kernels::host::allowed_cores;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::admission::{Limits, Resolved};
use crate::answer::Answer;
use crate::error::{Error, Result};
use crate::grammar::compiled::Grammars;
use crate::grammar::follower::{Expected, Follower, Plan};
use crate::inbox::Inbox;
use crate::load::LoadReport;
use crate::metrics::Counters;
use crate::patience::Patience;
use crate::process::Process;
use crate::request::{Prediction, Prompt, SamplingParams};
use crate::saved::Identity;
use crate::tokenizer::Tokenizer;

/// How long who makes masks looks out for the next token without sleeping: the time of a step.
const MASK_WATCH: Duration = Duration::from_millis(1);
/// So many cores are for the host loop, the caller and their system.
const CORES_FEW: usize = 4;

/// What an engine is made of.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Info {
    /// Name of the model: its folder's.
    pub model: String,
    /// Name of the adapter that was merged into it: its folder's.
    pub adapter: Option<String>,
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

/// What clones, streams and sessions share.
pub(crate) struct Inner {
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) thread: Mutex<Option<JoinHandle<()>>>,
    pub(crate) tokenizer: Tokenizer,
    pub(crate) grammars: Grammars,
    pub(crate) limits: Limits,
    pub(crate) info: Info,
    pub(crate) identity: Identity,
    pub(crate) opened: Instant,
    pub(crate) process: Process,
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

    pub(crate) fn answer(&self, params: &SamplingParams, resolved: &Resolved) -> Answer {
        let stop_ids = resolved.stop_ids.as_slice().into();
        Answer::new(&self.tokenizer, &params.stop, stop_ids, params.min_tokens)
    }

    /// Compiles the grammar of a request, if it has one, and what follows it.
    pub(crate) fn follower(
        &self,
        (prompt, prediction): (&[u32], &[u32]),
        params: &SamplingParams,
        resolved: &Resolved,
        patience: &Patience<'_>,
    ) -> Result<Option<Follower>> {
        let Some(grammar) = &params.grammar else { return Ok(None) };
        if params.ignore_eos {
            let why = "ignore_eos does not go with a grammar, which ends with an end of sequence";
            return Err(Error::Grammar(why.to_owned()));
        }
        let compiled = self.grammars.compiled(grammar, patience)?;
        let Resolved { max_new, min_new, stop_ids, .. } = resolved;
        let (max_new, min_new, stop_ids) = (*max_new, *min_new, stop_ids.clone());
        let drafts = self.limits.masked_drafts;
        let expected = (resolved.drafts != Drafts::None)
            .then(|| Expected { prompt: prompt.to_vec(), prediction: prediction.to_vec() });
        // A step of a GPU may take less than waking a thread does. Where there are few cores, or
        // they are the device, others need them.
        let spare = !self.info.device.starts_with("cpu") && allowed_cores() > CORES_FEW;
        let watch = if spare { MASK_WATCH } else { Duration::ZERO };
        let plan = Plan { max_new, min_new, stop_ids, drafts, watch, expected };
        let inbox = Arc::clone(&self.inbox);
        let times = Arc::clone(self.grammars.times());
        Follower::new(compiled, plan, times, move || inbox.nudge()).map(Some)
    }

    /// An answer of a session's turn, to decode it once more.
    pub(crate) fn answer_of(&self, params: &SamplingParams, prompt: usize) -> Result<Answer> {
        Ok(self.answer(params, &self.limits.resolve(params, prompt)?))
    }

    pub(crate) fn encode(&self, prompt: &Prompt, patience: &Patience<'_>) -> Result<Vec<u32>> {
        match prompt {
            Prompt::Text(text) => self.tokenizer.encode_within(text, true, patience),
            Prompt::Ids(ids) => Ok(ids.clone()),
            Prompt::Messages(messages) => {
                let messages = Value::Array(messages.clone());
                self.tokenizer.encode_chat_within(&messages, true, &Map::new(), patience)
            }
        }
    }

    /// Tokens that a caller expects.
    pub(crate) fn encode_prediction(
        &self,
        params: &SamplingParams,
        patience: &Patience<'_>,
    ) -> Result<Vec<u32>> {
        match &params.prediction {
            None => Ok(Vec::new()),
            Some(Prediction::Text(text)) => self.tokenizer.encode_within(text, false, patience),
            Some(Prediction::Ids(ids)) => Ok(ids.clone()),
        }
    }

    pub(crate) fn close(&self) {
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
