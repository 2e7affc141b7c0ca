//! What a model is, as data: [`Spec`], and the registry that reads one from `config.json`.
//!
//! Model files (`laneformer.rs`, `llama.rs`, ...) hold no arithmetic: each turns its config dialect
//! and its tensor names into a `Spec`. A model of one lane is an ordinary transformer; a Laneformer
//! has several lanes, each with its own residual stream and its own slice of heads and neurons.

mod config;
mod gemma3;
mod hybrid;
mod laneformer;
mod llama;
mod mistral;
mod olmo2;
mod phi3;
mod quantization;
mod qwen2;
mod qwen3;
mod rope;
mod smollm3;
mod transformer;

use std::fmt;
use std::path::Path;

use kie_kernels::abi::MAX_STOP_IDS;
pub use kie_kernels::abi::{Gate, NormSpan};
use serde_json::Value;

use crate::error::{Error, Result};
use crate::gguf;
use crate::json;
use crate::weights::Mapped;
use config::Config;
pub use quantization::{Group, Quantization};
pub use rope::{Factors, Llama3Scaling, Rope, RopeStyle, Scaling, Turns, YarnScaling};

/// Turns a family's config into a spec.
type Read = fn(&Config<'_>) -> Result<Spec>;

/// One line a `model_type`.
const REGISTRY: &[(&str, Read)] = &[
    ("gemma3_text", gemma3::spec),
    ("kie_hybrid", hybrid::spec),
    ("laneformer", laneformer::spec),
    ("laneformer_tp", laneformer::spec),
    ("llama", llama::spec),
    ("mistral", mistral::spec),
    ("olmo2", olmo2::spec),
    ("phi3", phi3::spec),
    ("qwen2", qwen2::spec),
    ("qwen3", qwen3::spec),
    ("smollm3", smollm3::spec),
];

/// The `model_type`s that kie reads.
pub fn architectures() -> impl Iterator<Item = &'static str> {
    REGISTRY.iter().map(|(name, _)| *name)
}

/// How weights may be stored.
pub fn encodings() -> &'static [&'static str] {
    &[
        "F32",
        "F16",
        "BF16",
        "FP8 (E4M3 in blocks)",
        "compressed-tensors (FP8, INT8, INT4, MXFP4)",
        "AWQ",
        "GPTQ",
        "GGUF",
    ]
}

/// What kie runs, in one line.
pub(crate) fn supported() -> &'static str {
    static LINE: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    LINE.get_or_init(|| {
        let architectures: Vec<_> = architectures().collect();
        let (architectures, encodings) = (architectures.join(", "), encodings().join(", "));
        format!("kie runs {architectures}, stored as {encodings}; `kie models` has examples")
    })
}

/// Everything the planner needs to know about a model. Sizes are of the whole, over all lanes.
#[derive(Debug, Clone, PartialEq)]
pub struct Spec {
    /// `model_type` of the config.
    pub architecture: String,
    /// Width of a residual stream.
    pub hidden: usize,
    /// Rows of the embedding table and of the head.
    pub vocab: usize,
    /// Longest context the model was made for, in tokens.
    pub max_positions: usize,
    /// Longest one that may be asked for: more where rope scaling stretches it.
    pub stretched: usize,
    /// Epsilon of every RMSNorm.
    pub norm_eps: f32,
    /// Parallel residual streams; 1 for an ordinary transformer.
    pub lanes: usize,
    /// One entry a layer.
    pub layers: Vec<LayerSpec>,
    /// How the logits come from the lanes' final streams.
    pub head: HeadKind,
    /// The head shares the embedding table.
    pub tied: bool,
    /// Norm scales are per lane, `[lanes, hidden]`, rather than shared, `[hidden]`.
    pub norm_per_lane: bool,
    /// On embeddings, before the first layer.
    pub embedding_factor: f32,
    /// Divisors of the rotary frequencies, with longrope.
    pub rope_factors: Factors,
    /// How matrices are quantised, where the config says so.
    pub quantization: Option<Quantization>,
    /// Every tensor the model needs. A checkpoint with others is refused.
    pub tensors: Vec<TensorSpec>,
    /// Tensors that may be there and take no part (exact names).
    pub ignored: Vec<String>,
    /// Declared token ids: (bos, all eos ids).
    pub bos: Option<u32>,
    /// End-of-sequence ids.
    pub eos: Vec<u32>,
}

/// One layer: what mixes positions, what works on each position alone, and how the outputs of both
/// join the residual streams.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerSpec {
    /// What mixes positions.
    pub mixer: Mixer,
    /// How the mixer's outputs join the residual streams.
    pub mixer_join: Join,
    /// What works on each position alone.
    pub mlp: Mlp,
    /// How the MLP's outputs join the residual streams.
    pub mlp_join: Join,
    /// Where the RMSNorms of both stand.
    pub norms: Norms,
}

/// Where the RMSNorms of a module stand. An output that is normed joins by [`Join::Sum`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Norms {
    /// On its input.
    Before,
    /// On its output (OLMo 2).
    Behind,
    /// On both (Gemma 3).
    Around,
}

impl Norms {
    /// On the input.
    pub fn before(self) -> bool {
        self != Self::Behind
    }

    /// On the output.
    pub fn behind(self) -> bool {
        self != Self::Before
    }
}

/// What mixes positions in a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Mixer {
    /// Softmax attention over keys and values.
    Attention(Attention),
}

/// Softmax attention with grouped heads. Sizes are of the whole, over all lanes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attention {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Features of one head; even.
    pub head_dim: usize,
    /// A query sees the last `window` positions, itself included; `None` sees all.
    pub window: Option<usize>,
    /// Rotary embedding of q and k.
    pub rope: Rope,
    /// RMSNorm of q and k before the rotary embedding: of each head (Qwen3), or over all of them.
    pub qk_norm: Option<NormSpan>,
    /// Biases on q, k and v (Qwen2).
    pub qkv_bias: bool,
}

/// What works on each position alone.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Mlp {
    /// `down(f(gate x) * up x)`.
    Gated(Gated),
}

/// A gated MLP. Sizes are of the whole, over all lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gated {
    /// Inner width.
    pub ffn: usize,
    /// The function of the gate.
    pub gate: Gate,
}

impl LayerSpec {
    /// Positions that its mixer looks back, the own included; `None`: all.
    pub fn window(&self) -> Option<usize> {
        let Mixer::Attention(attention) = self.mixer;
        attention.window
    }
}

/// How a module's outputs o_l, one a lane, join the residual streams x_l.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Join {
    /// Each stream adds the sum over all lanes: an ordinary all-reduce, and the only join that a
    /// model of one lane has.
    Sum,
    /// Each stream adds `factor` times its own lane's output.
    Own {
        /// On the output.
        factor: f32,
    },
    /// Each stream adds its own lane's output, and the sum over the other lanes of what the same
    /// kind of module put out `layers` earlier (delayed tensor parallelism).
    Delayed {
        /// 1 or more.
        layers: usize,
    },
}

/// How logits come from the lanes' final streams x_l.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadKind {
    /// W · mean_l norm(x_l); W is `[vocab, hidden]`. With one lane the ordinary head.
    Replicate,
    /// W · norm(sum_l x_l); the final norm is shared.
    SumThenNorm,
    /// Lane l yields vocab slice l from norm(x_l); W is `[lanes, vocab/lanes, hidden]`.
    VocabParallel,
    /// W · concat_l norm(x_l); W is `[vocab, lanes * hidden]`.
    Concat,
}

/// What a tensor is for. The number is the layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Role {
    Embedding,
    AttentionNorm(usize),
    Q(usize),
    K(usize),
    V(usize),
    QBias(usize),
    KBias(usize),
    VBias(usize),
    QNorm(usize),
    KNorm(usize),
    O(usize),
    AttentionOutNorm(usize),
    MlpNorm(usize),
    MlpOutNorm(usize),
    Gate(usize),
    Up(usize),
    Down(usize),
    FinalNorm,
    Head,
    /// Divisors of the rotary frequencies, `[head_dim / 2]`.
    RopeFactors,
}

impl Role {
    /// True for the large matrices, which may be quantised.
    pub fn is_matrix(self) -> bool {
        matches!(
            self,
            Self::Q(_)
                | Self::K(_)
                | Self::V(_)
                | Self::O(_)
                | Self::Gate(_)
                | Self::Up(_)
                | Self::Down(_)
                | Self::Head
                | Self::Embedding
        )
    }
}

impl Role {
    /// True for the scales of RMSNorms.
    pub fn is_norm(self) -> bool {
        matches!(
            self,
            Self::AttentionNorm(_)
                | Self::AttentionOutNorm(_)
                | Self::MlpNorm(_)
                | Self::MlpOutNorm(_)
                | Self::QNorm(_)
                | Self::KNorm(_)
                | Self::FinalNorm
        )
    }

    /// True for the matrices of layers, which `dtype` quantises; embedding and head stay.
    pub fn is_linear(self) -> bool {
        self.is_matrix() && !matches!(self, Self::Head | Self::Embedding)
    }
}

/// A tensor that must be in the checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorSpec {
    /// What it is for.
    pub role: Role,
    /// Its name in the checkpoint.
    pub name: String,
    /// Its shape; lane tensors have the lane first.
    pub shape: Vec<usize>,
    /// How it stands there.
    pub stored: Stored,
}

/// How a tensor stands in the checkpoint.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Stored {
    /// As it is.
    Whole,
    /// As rows of a matrix that other tensors have rows of, too.
    Rows {
        /// The first one.
        first: usize,
        /// Rows of the whole matrix.
        of: usize,
    },
    /// Each number is `factor * (stored + one)`, which is made of them in float32.
    Less {
        /// What is added.
        one: f32,
        /// What that is multiplied by.
        factor: f32,
    },
}

impl Spec {
    /// Reads `config.json` and what `generation_config.json` says about the end of a sequence.
    ///
    /// # Errors
    /// [`Error::Load`] for a file that is not what it should be, [`Error::UnsupportedModel`] for
    /// what kie does not know.
    pub fn read(folder: &Path) -> Result<Self> {
        if gguf::is_gguf(folder) {
            let file = Mapped::gguf(folder)?;
            let mut spec = Self::from_config(&gguf::config(&file, folder)?, folder)?;
            gguf::rope(&mut spec, &file);
            return Ok(spec);
        }
        let file = folder.join("config.json");
        let mut spec = Self::from_config(&json::read(&file)?, &file)?;
        let generation = Generation::read(folder)?;
        let named = generation.eos.iter().chain(&generation.bos);
        if let Some(id) = named.into_iter().find(|id| **id as usize >= spec.vocab) {
            let wanted = format!("ids below vocab_size {}", spec.vocab);
            let file = folder.join(GENERATION);
            return Err(Error::tensor(file, "bos_token_id/eos_token_id", wanted, id.to_string()));
        }
        spec.bos = generation.bos.or(spec.bos);
        if !generation.eos.is_empty() {
            spec.eos = generation.eos;
        }
        Ok(spec)
    }

    /// The spec in a parsed `config.json`; `file` is for messages.
    ///
    /// # Errors
    /// As [`Spec::read`].
    pub fn from_config(value: &Value, file: &Path) -> Result<Self> {
        let config = Config::new(value, file)?;
        let name = config.need("model_type")?.as_str().unwrap_or_default();
        let Some((name, read)) = REGISTRY.iter().find(|(known, _)| *known == name) else {
            return config.unsupported("model_type", format!("{name:?}"));
        };
        let mut spec = read(&config)?;
        spec.architecture = (*name).to_owned();
        let ropes = spec.layers.iter().map(|layer| {
            let Mixer::Attention(attention) = layer.mixer;
            attention.rope.stretched(spec.max_positions)
        });
        spec.stretched = ropes.max().unwrap_or(spec.max_positions);
        for layer in &mut spec.layers {
            let Mixer::Attention(attention) = &mut layer.mixer;
            // One that sees the whole context is none.
            attention.window = attention.window.filter(|window| *window < spec.stretched);
        }
        spec.check(&config)?;
        Ok(spec)
    }

    /// What no family may break.
    fn check(&self, config: &Config<'_>) -> Result<()> {
        for layer in &self.layers {
            let Mixer::Attention(attention) = &layer.mixer;
            attention.check(config)?;
        }
        self.check_ropes(config)?;
        if !self.norm_eps.is_normal() {
            return config.unsupported("rms_norm_eps/norm_eps", "no normal float32 number");
        }
        let vocab = self.vocab as u32;
        if let Some(id) = self.eos.iter().chain(&self.bos).find(|id| **id >= vocab) {
            let detail = format!("{id} is not below vocab_size {vocab}");
            return config.unsupported("bos_token_id/eos_token_id", detail);
        }
        let most = 1u64 << 46;
        match self.tensors.iter().map(TensorSpec::numbers).try_fold(0u64, u64::checked_add) {
            Some(numbers) if numbers < most => Ok(()),
            Some(_) | None => config.unsupported("hidden_size", "the model is absurdly large"),
        }
    }

    /// What rotary embeddings may not be. A position turns by a radian at most; more is noise, and
    /// soon not finite.
    fn check_ropes(&self, config: &Config<'_>) -> Result<()> {
        let mut known: Vec<(Rope, usize)> = Vec::new();
        for layer in &self.layers {
            let Mixer::Attention(Attention { rope, head_dim, .. }) = layer.mixer;
            if known.contains(&(rope, head_dim)) {
                continue;
            }
            known.push((rope, head_dim));
            for positions in [1, self.stretched] {
                let turns = rope.turns(head_dim, &self.rope_factors, positions);
                let bad = |f: &&f64| !(0.0..=1.0).contains(*f);
                if let Some(got) = turns.frequencies.iter().find(bad) {
                    let got = format!("{got:e} radians a position; 1 at most (rope_theta from 1)");
                    return config.unsupported("rope_theta/rope_scaling", got);
                }
                if !(turns.length as f32).is_normal() {
                    let got = format!("cos and sin times {:e}", turns.length);
                    return config.unsupported("rope_scaling.attention_factor", got);
                }
            }
        }
        Ok(())
    }

    /// Numbers in all tensors, scales excluded.
    pub fn parameters(&self) -> u64 {
        self.tensors.iter().map(TensorSpec::numbers).sum()
    }
}

impl Attention {
    /// Numbers of q.
    pub fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Numbers of k, or of v.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    fn check(&self, config: &Config<'_>) -> Result<()> {
        if !self.heads.is_multiple_of(self.kv_heads) {
            let detail = format!("{} query heads on {}", self.heads, self.kv_heads);
            return config.unsupported("num_key_value_heads", detail);
        }
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(2) {
            return config.unsupported("head_dim", format!("{}; it must be even", self.head_dim));
        }
        Ok(())
    }
}

impl TensorSpec {
    /// A tensor that stands in the checkpoint as it is.
    pub fn of(role: Role, name: String, shape: &[usize]) -> Self {
        Self { role, name, shape: shape.to_vec(), stored: Stored::Whole }
    }

    /// Numbers in the tensor.
    pub fn numbers(&self) -> u64 {
        self.shape.iter().map(|n| *n as u64).fold(1, u64::saturating_mul)
    }
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "model     {}, {:.1} M parameters, {} tensors",
            self.architecture,
            self.parameters() as f64 / 1e6,
            self.tensors.len()
        )?;
        write!(
            f,
            "shape     {} layers x {}, {}, vocabulary {}, context {}",
            self.layers.len(),
            self.hidden,
            self.classes(),
            self.vocab,
            self.max_positions
        )?;
        if self.lanes > 1 {
            write!(f, ", {} lanes", self.lanes)?;
        }
        let windows: Vec<usize> = self.layers.iter().filter_map(LayerSpec::window).collect();
        if let Some(window) = windows.iter().max() {
            write!(f, ", window {window} on {} layers", windows.len())?;
        }
        writeln!(f)
    }
}

impl Spec {
    /// Heads and MLP widths in the order of their first layers, each with how many layers have it
    /// where not all do.
    fn classes(&self) -> String {
        let mut classes: Vec<(String, usize)> = Vec::new();
        for layer in &self.layers {
            let (Mixer::Attention(a), Mlp::Gated(m)) = (&layer.mixer, &layer.mlp);
            let heads = format!("{}/{} heads of {}", a.heads, a.kv_heads, a.head_dim);
            let class = format!("{heads}, MLP {}", m.ffn);
            match classes.iter_mut().find(|(known, _)| *known == class) {
                Some((_, count)) => *count += 1,
                None => classes.push((class, 1)),
            }
        }
        match &classes[..] {
            [(class, _)] => class.clone(),
            several => {
                let each = several.iter().map(|(class, count)| format!("{count} of {class}"));
                each.collect::<Vec<_>>().join(" + ")
            }
        }
    }
}

/// What `generation_config.json` recommends.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Generation {
    /// Id that begins a sequence.
    pub bos: Option<u32>,
    /// Ids that end a sequence.
    pub eos: Vec<u32>,
    /// False: greedy, whatever the temperature says.
    pub do_sample: Option<bool>,
    /// See [`crate::request::SamplingParams`].
    pub temperature: Option<f64>,
    /// The same.
    pub top_p: Option<f64>,
    /// The same.
    pub top_k: Option<u32>,
    /// The same.
    pub min_p: Option<f64>,
    /// The same.
    pub repetition_penalty: Option<f64>,
}

const GENERATION: &str = "generation_config.json";

impl Generation {
    /// Reads the file; a folder without one recommends nothing.
    ///
    /// # Errors
    /// [`Error::Load`] for a file that is not JSON or has a value of the wrong kind.
    pub fn read(folder: &Path) -> Result<Self> {
        let file = folder.join(GENERATION);
        if !kie_kernels::file::is_listed(&file) {
            return Ok(Self::default());
        }
        let value = json::read(&file)?;
        let config = Config::new(&value, &file)?;
        // Here and not when a request comes without its own: the file is at fault.
        let number = |key: &str, wanted: &str, inside: fn(f64) -> bool| -> Result<Option<f64>> {
            let wrong = |v: &Value| Error::tensor(&file, key, wanted, v.to_string());
            let fits = |n: &f64| (*n as f32).is_finite() && inside(*n);
            let good = |v: &Value| v.as_f64().filter(fits).ok_or_else(|| wrong(v));
            config.get(key).map(good).transpose()
        };
        let whole = |v: &Value| v.as_u64().and_then(|k| u32::try_from(k).ok());
        let top_k = |v: &Value| {
            let wanted = "a whole number from 0";
            whole(v).ok_or_else(|| Error::tensor(&file, "top_k", wanted, v.to_string()))
        };
        let do_sample = config.get("do_sample").map(|_| config.flag_or("do_sample", false));
        let eos = config.token_ids("eos_token_id")?;
        if eos.len() > MAX_STOP_IDS {
            let (wanted, got) = (format!("at most {MAX_STOP_IDS} ids"), eos.len().to_string());
            return Err(Error::tensor(file, "eos_token_id", wanted, got));
        }
        let share = "a number above 0 and at most 1";
        let above = "a number above 0";
        Ok(Self {
            bos: config.token_ids("bos_token_id")?.first().copied(),
            eos,
            do_sample: do_sample.transpose()?,
            temperature: number("temperature", "a number from 0", |n| n >= 0.0)?,
            top_p: number("top_p", share, |n| n > 0.0 && n <= 1.0)?,
            top_k: config.get("top_k").map(top_k).transpose()?,
            min_p: number("min_p", "a number from 0 to 1", |n| (0.0..=1.0).contains(&n))?,
            repetition_penalty: number("repetition_penalty", above, |n| n as f32 > 0.0)?,
        })
    }
}

#[cfg(test)]
mod tests;
