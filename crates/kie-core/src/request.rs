//! What a caller says and what a caller gets: requests, tokens, completions. Plain data.

use serde_json::Value;

use crate::grammar::Grammar;

/// How [`Engine::logits`](crate::Engine::logits) feeds the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitsPath {
    /// Whole chunks at a time, as a prompt is.
    Prefill,
    /// One token at a time, as generated ones are.
    Decode,
}

/// How tokens are chosen. `None` takes the model's `generation_config.json`, else what is neutral.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// Most tokens to generate; `None`: to the end of the context.
    pub max_tokens: Option<usize>,
    /// 0 is greedy. Neutral: 1.0.
    pub temperature: Option<f64>,
    /// Smallest set of tokens whose probabilities reach this. Neutral: 1.0.
    pub top_p: Option<f64>,
    /// Only the k most probable tokens; 0: all.
    pub top_k: Option<u32>,
    /// Only tokens at least this probable relative to the best. Neutral: 0.0.
    pub min_p: Option<f64>,
    /// Divides (positive) or multiplies (negative) logits of seen tokens. Neutral: 1.0.
    pub repetition_penalty: Option<f64>,
    /// Subtracted from logits of generated tokens.
    pub presence_penalty: f64,
    /// Subtracted from logits once per earlier generation of the token.
    pub frequency_penalty: f64,
    /// Strings that end the text; they are not part of it.
    pub stop: Vec<String>,
    /// Ids that end the sequence, besides the model's own.
    pub stop_token_ids: Vec<u32>,
    /// Tokens before which nothing stops the sequence.
    pub min_tokens: usize,
    /// The model's own end-of-sequence ids do not stop.
    pub ignore_eos: bool,
    /// Key of the random numbers; `None` draws one. Always reported.
    pub seed: Option<u64>,
    /// Log-probabilities: `Some(0)` of the chosen token, `Some(k)` with k alternatives.
    pub logprobs: Option<usize>,
    /// Added to the logits of these ids.
    pub logit_bias: Vec<(u32, f64)>,
    /// Seconds after which the request ends with reason `timeout`.
    pub timeout: Option<f64>,
    /// Where drafts of tokens come from that a step checks beside its own, for the same tokens
    /// sooner.
    pub speculate: Option<Speculate>,
    /// What is expected to be generated, such as a file before an edit: drafts come from it and, as
    /// with [`Speculate::Lookup`], from the text. The tokens are the same whatever it says.
    pub prediction: Option<Prediction>,
    /// What the text must be; it ends with `stop` where it is complete.
    pub grammar: Option<Grammar>,
}

/// Where drafts come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Speculate {
    /// What followed where prompt and output last read as they end now.
    Lookup,
    /// The model's own layers for it, of an engine with [`EngineConfig::mtp`]; where there is a
    /// prediction, and with a grammar, as with [`Speculate::Lookup`] first, and on GPUs only so.
    Mtp,
}

/// A text that is expected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prediction {
    /// Text; encoded without special tokens.
    Text(String),
    /// Token ids, as they are.
    Ids(Vec<u32>),
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            max_tokens: None,
            temperature: None,
            top_p: None,
            top_k: None,
            min_p: None,
            repetition_penalty: None,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            min_tokens: 0,
            ignore_eos: false,
            seed: None,
            logprobs: None,
            logit_bias: Vec::new(),
            timeout: None,
            speculate: None,
            prediction: None,
            grammar: None,
        }
    }
}

/// What to continue.
#[derive(Debug, Clone, PartialEq)]
pub enum Prompt {
    /// Text; encoded with the tokenizer's special tokens in front.
    Text(String),
    /// Token ids, as they are.
    Ids(Vec<u32>),
    /// Chat messages, `{"role": ..., "content": ...}` each, through the model's template.
    Messages(Vec<Value>),
}

/// One request.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// What to continue.
    pub prompt: Prompt,
    /// How.
    pub params: SamplingParams,
}

impl Request {
    /// A request with default parameters.
    pub fn new(prompt: Prompt) -> Self {
        Self { prompt, params: SamplingParams::default() }
    }
}

/// A token and how probable it was.
#[derive(Debug, Clone, PartialEq)]
pub struct TopLogprob {
    /// The token.
    pub id: u32,
    /// Natural log of its probability under the raw logits.
    pub logprob: f32,
}

/// One generated token.
#[derive(Debug, Clone, PartialEq)]
pub struct Token {
    /// Text that became certain with it; empty while bytes or a possible stop string are held back.
    pub text: String,
    /// Its id (one id a token).
    pub token_ids: Vec<u32>,
    /// 0 for the first generated token.
    pub index: usize,
    /// Natural log of its probability under the raw logits, where asked for.
    pub logprob: Option<f32>,
    /// The most probable alternatives, where asked for.
    pub top_logprobs: Vec<TopLogprob>,
    /// Host CLOCK_MONOTONIC in nanoseconds when the device chose it.
    pub t_ns: u64,
}

/// A generated token, how probable it was, and what else was.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub id: u32,
    /// Natural log of its probability under the raw logits.
    pub logprob: f32,
    /// The most probable tokens, most probable first; as many as were asked for.
    pub top_logprobs: Vec<TopLogprob>,
}

/// Why a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop id or stop string.
    Stop,
    /// `max_tokens` or the end of the context.
    Length,
    /// The caller.
    Cancelled,
    /// `timeout` seconds.
    Timeout,
    /// The engine failed; the stream's result is the error.
    Error,
}

impl FinishReason {
    /// As users read it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Cancelled => "cancelled",
            Self::Timeout => "timeout",
            Self::Error => "error",
        }
    }

    /// The reason of that name.
    pub fn named(name: &str) -> Option<Self> {
        let all = [Self::Stop, Self::Length, Self::Cancelled, Self::Timeout, Self::Error];
        all.into_iter().find(|reason| reason.name() == name)
    }
}

/// What stopped it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StopReason {
    /// A stop string.
    Text(String),
    /// A stop id.
    Id(u32),
}

/// Token counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens generated.
    pub completion_tokens: usize,
    /// Prompt tokens whose KV was already there.
    pub cached_tokens: usize,
}

/// Where the time went. Milliseconds unless the name says otherwise.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Timings {
    /// Prompt tokens computed.
    pub prompt_n: usize,
    /// Time from admission to the first token.
    pub prompt_ms: f64,
    /// `prompt_n` a second.
    pub prompt_per_second: f64,
    /// Tokens generated.
    pub predicted_n: usize,
    /// Time from the first to the last token.
    pub predicted_ms: f64,
    /// Tokens a second after the first.
    pub predicted_per_second: f64,
    /// Prompt tokens taken from the cache.
    pub cache_n: usize,
    /// Tokens that were drafted.
    pub draft_n: usize,
    /// Drafted tokens that were right.
    pub draft_n_accepted: usize,
    /// Time spent waiting for a slot.
    pub queue_ms: f64,
    /// Time from submission to the first token.
    pub ttft_ms: f64,
    /// Median gap between tokens, in microseconds.
    pub itl_p50_us: f64,
    /// 99th percentile of the gaps.
    pub itl_p99_us: f64,
    /// Largest gap.
    pub itl_max_us: f64,
    /// Bytes that one decoded token reads: weights and KV at the mean position.
    pub bytes_per_token: u64,
    /// Bytes a second over the measured stream limit; 0 where that was not measured.
    pub mbu: f64,
    /// Bytes a second over the data sheet's; 0 where unknown.
    pub mbu_peak: f64,
}

/// A finished request.
#[derive(Debug, Clone, PartialEq)]
pub struct Completion {
    /// The generated text.
    pub text: String,
    /// The generated ids, a stop id included, what lies behind a stop string not.
    pub token_ids: Vec<u32>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// What stopped it, where something did.
    pub stop_reason: Option<StopReason>,
    /// One entry a token of `token_ids`, where asked for.
    pub logprobs: Option<Vec<TokenLogprob>>,
    /// Counts.
    pub usage: Usage,
    /// Times.
    pub timings: Timings,
    /// The seed in use.
    pub seed: u64,
    /// Name of the model.
    pub model: String,
}

/// How an engine is opened.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineConfig {
    /// What reports and completions call the model; `None`: the name of its folder.
    pub name: Option<String>,
    /// Device name, `auto`, `cpu`, `cuda:0`, ...
    pub device: String,
    /// `auto`, `f32`, `f16` or `bf16`.
    pub dtype: String,
    /// Folder of a LoRA adapter, as PEFT writes it, that is merged into the weights.
    pub adapter: Option<std::path::PathBuf>,
    /// Longest sequence; `None`: what the model was made for.
    pub max_seq_len: Option<usize>,
    /// Requests that run at once.
    pub max_batch: usize,
    /// Requests that may wait.
    pub max_queue: usize,
    /// Bytes for KV pages; `None`: one sequence of `max_seq_len` a slot, as far as memory allows.
    pub kv_bytes: Option<u64>,
    /// CPU threads; `None`: all this process may use.
    pub threads: Option<usize>,
    /// Share KV pages between requests with equal beginnings.
    pub prefix_cache: bool,
    /// A request has the same bits whatever ran before it: shared pages are those that prefill made
    /// as it would make them again. Otherwise also those that decoding made, which differ from them
    /// in rounding, so that a session's next turn need not compute the last answer again.
    pub reproducible: bool,
    /// On a GPU numbers have two halves, keys and values are float32: logits are those of float32
    /// arithmetic, where a half a number costs up to some thousandths. Prompts then have no kernel
    /// of their own. The CPU's are float32 anyway.
    pub exact: bool,
    /// Load the layers of multi-token prediction that the checkpoint has beside the model, so that
    /// [`Speculate::Mtp`] can draft. They see every prompt, and outputs: on the CPU all, on GPUs
    /// those of requests that draft with them.
    pub mtp: bool,
    /// `park` (idle costs nothing) or `hot`.
    pub idle: String,
    /// Bound on the gap of a decoding request beside a prefill, in milliseconds.
    pub max_itl_ms: Option<f64>,
    /// Milliseconds after which a launch on a GPU ends, with the step or layer that it is in, so
    /// that a display on the same GPU stays usable; `None`: when there is nothing left to do. A
    /// CPU has no launches.
    pub max_launch_ms: Option<f64>,
    /// Seconds after which a silent device is reported as hanging.
    pub hang_timeout_s: f64,
    /// Where compiled kernels are kept; `None`: the user's cache folder.
    pub cache_dir: Option<std::path::PathBuf>,
    /// Bytes a second that this machine's cores read from memory, where it was measured:
    /// [`Timings::mbu`] of an engine on the CPU is a part of it.
    pub read_bandwidth: Option<f64>,
    /// Further folders in which the compiler of a GPU's kernels may lie.
    pub nvrtc_dirs: Vec<std::path::PathBuf>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            name: None,
            device: "auto".to_owned(),
            dtype: "auto".to_owned(),
            adapter: None,
            max_seq_len: None,
            max_batch: 8,
            max_queue: 64,
            kv_bytes: None,
            threads: None,
            prefix_cache: true,
            reproducible: true,
            exact: false,
            mtp: false,
            idle: "park".to_owned(),
            max_itl_ms: None,
            max_launch_ms: None,
            hang_timeout_s: 1.0,
            cache_dir: None,
            read_bandwidth: None,
            nvrtc_dirs: Vec::new(),
        }
    }
}
