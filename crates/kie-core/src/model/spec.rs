//! A model as data: layers with what mixes positions and what follows it, and the tensors that a
//! checkpoint must have.

use std::fmt;

pub use kie_kernels::abi::{ExpertGroups, Gate, NormSpan, Scoring, PAGE};

use super::config::Config;
use super::quantization::Quantization;
use super::rope::{Factors, Rope, Scaling};
use crate::error::{Error, Result};

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
    /// Streams that modules take from and give to by numbers that the streams make themselves.
    pub hyper: Option<Hyper>,
    /// One entry a layer; with `predicts` the last one is [`Spec::mtp`]'s.
    pub layers: Vec<LayerSpec>,
    /// A layer that predicts the token behind the next one, where checkpoints may have it.
    pub mtp: Option<Mtp>,
    /// The model has it: [`Spec::predicting`].
    pub predicts: bool,
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
    /// The same of all whose names begin so.
    pub ignored_below: Vec<String>,
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

/// Manifold-constrained hyper-connections (Xie et al., "mHC", 2025).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Hyper {
    /// Residual streams.
    pub streams: usize,
    /// Rounds in which the matrix that mixes them is made doubly stochastic.
    pub rounds: usize,
    /// Beside what is divided by, and on what is taken of a stream.
    pub eps: f32,
}

/// A layer that predicts the token behind the next one (multi-token prediction).
#[derive(Debug, Clone, PartialEq)]
pub struct Mtp {
    /// The layer.
    pub layer: LayerSpec,
    /// Its tensors, roles as those of a layer behind the model's.
    pub tensors: Vec<TensorSpec>,
    /// What the names of its tensors in a checkpoint begin with.
    pub prefix: String,
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
    /// A recurrent state, which each position changes.
    Delta(Delta),
    /// Softmax attention over latents that all heads share.
    Latent(Latent),
    /// The same over a window of keys that all heads share, and compressed entries behind it.
    Compressed(Compressed),
}

impl Mixer {
    /// Softmax attention, if it is that.
    pub fn attention(&self) -> Option<&Attention> {
        match self {
            Self::Attention(attention) => Some(attention),
            Self::Delta(_) | Self::Latent(_) | Self::Compressed(_) => None,
        }
    }

    pub(crate) fn attention_mut(&mut self) -> Option<&mut Attention> {
        match self {
            Self::Attention(attention) => Some(attention),
            Self::Delta(_) | Self::Latent(_) | Self::Compressed(_) => None,
        }
    }

    /// How features turn by position, and how many features a head of them has.
    pub fn rope(&self) -> Option<(Rope, usize)> {
        match self {
            Self::Attention(attention) => Some((attention.rope, attention.head_dim)),
            Self::Latent(latent) => Some((latent.rope, latent.turned)),
            Self::Compressed(compressed) => Some((compressed.rope, compressed.turned)),
            Self::Delta(_) => None,
        }
    }
}

/// A gated delta rule behind a short convolution (Qwen3-Next). Sizes are of the whole, over all
/// lanes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Delta {
    /// Heads of q and k.
    pub key_heads: usize,
    /// Heads of v; a multiple of `key_heads`.
    pub value_heads: usize,
    /// Features of a head of q and k.
    pub key_dim: usize,
    /// Features of a head of v.
    pub value_dim: usize,
    /// Positions that the convolution sees, the own included.
    pub taps: usize,
}

/// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): of a position one latent is kept,
/// and one turned key, for all heads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Latent {
    /// Heads.
    pub heads: usize,
    /// Width of a latent of its own that queries are made of; `None`: they are made of the input.
    pub query_rank: Option<usize>,
    /// Width of the latent that keys and values are made of.
    pub rank: usize,
    /// Features of a head's query and key that do not turn.
    pub plain: usize,
    /// Those that turn; even.
    pub turned: usize,
    /// Features of a head's value.
    pub value: usize,
    /// Rotary embedding of the features that turn.
    pub rope: Rope,
    /// Epsilon of the latents' norms.
    pub eps: f32,
}

impl Latent {
    /// Numbers of q.
    pub fn query_width(&self) -> usize {
        self.heads * (self.plain + self.turned)
    }

    /// Numbers that are kept of a position.
    pub fn key_width(&self) -> usize {
        self.rank + self.turned
    }

    /// Numbers of all heads' keys, turned ones apart, and values.
    pub fn up_width(&self) -> usize {
        self.heads * (self.plain + self.value)
    }

    /// What scores are multiplied by.
    pub fn scale(&self) -> f32 {
        (self.rope.score_factor() / ((self.plain + self.turned) as f64).sqrt()) as f32
    }
}

/// Attention of DeepSeek-V4: of a position one key is kept, which is the value as well, for all
/// heads; a query sees a window of them, and behind it an entry for every so many positions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Compressed {
    /// Heads.
    pub heads: usize,
    /// Features of a head, and of the key.
    pub dim: usize,
    /// Those that turn, the last ones; even.
    pub turned: usize,
    /// Width of the latent that queries are made of.
    pub query_rank: usize,
    /// Groups of heads, whose outputs are projected to so many numbers each.
    pub groups: usize,
    /// Those numbers.
    pub group_rank: usize,
    /// A query sees the last `window` positions, itself included.
    pub window: usize,
    /// What lies behind them; `None`: nothing of it is seen.
    pub entries: Option<Entries>,
    /// Rotary embedding of the features that turn.
    pub rope: Rope,
}

/// Compressed entries of what lies behind a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entries {
    /// Positions of one.
    pub every: usize,
    /// Entries see the positions of the one before, too.
    pub overlap: bool,
    /// What chooses some of them; `None`: all are seen.
    pub index: Option<Index>,
}

/// What chooses entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Index {
    /// Heads.
    pub heads: usize,
    /// Features of each.
    pub dim: usize,
    /// Most entries of a position.
    pub chosen: usize,
}

impl Entries {
    /// Rows of the matrices that make entries of so many numbers.
    pub fn rows(&self, dim: usize) -> usize {
        dim * (1 + usize::from(self.overlap))
    }
}

impl Compressed {
    /// Numbers of q.
    pub fn query_width(&self) -> usize {
        self.heads * self.dim
    }

    /// Numbers of what groups' outputs are projected to.
    pub fn group_rows(&self) -> usize {
        self.groups * self.group_rank
    }

    /// Numbers that running softmaxes of entries and of an indexer's keys take.
    pub fn sums(&self) -> usize {
        let of = |entries: &Entries| {
            3 * (entries.rows(self.dim) + entries.index.map_or(0, |i| entries.rows(i.dim)))
        };
        self.entries.as_ref().map_or(0, of)
    }
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
    /// A bias on the output (GPT-OSS).
    pub out_bias: bool,
    /// A score beside those of the keys, one a query head, whose value is 0 (GPT-OSS).
    pub sinks: bool,
    /// The output is multiplied by the sigmoid of a projection of its own; each head's rows stand
    /// behind those of q (Qwen3-Next).
    pub gated: bool,
}

/// What works on each position alone.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Mlp {
    /// `down(f(gate x) * up x)`.
    Gated(Gated),
    /// Several of them, of which a router chooses some for each position.
    Experts(Experts),
}

/// A mixture of experts: the sum of the chosen ones' outputs, each times its factor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Experts {
    /// Experts of the layer.
    pub count: usize,
    /// Those of one position.
    pub chosen: usize,
    /// Each of them.
    pub each: Gated,
    /// What scores and factors are made of the router's logits.
    pub scoring: Scoring,
    /// A number an expert is added to scores for the choice (DeepSeek-V3).
    pub correction: bool,
    /// Each token has experts of its own, whatever the scores are (DeepSeek-V4).
    pub by_token: bool,
    /// The choice is among the experts of some groups (DeepSeek-V3).
    pub groups: Option<ExpertGroups>,
    /// On every factor.
    pub factor: f32,
    /// One more that every position goes to.
    pub shared: Option<Shared>,
    /// Biases on the router and in the experts (GPT-OSS).
    pub bias: bool,
}

/// An expert that every position goes to, beside those that a router chooses.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shared {
    /// Its MLP; several experts are one, as wide as all of them.
    pub each: Gated,
    /// Its output is multiplied by the sigmoid of a row's product with the input (Qwen).
    pub scaled: bool,
}

/// A gated MLP. Sizes are of the whole, over all lanes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gated {
    /// Inner width.
    pub ffn: usize,
    /// The function of the gate.
    pub gate: Gate,
}

impl LayerSpec {
    /// Positions that its mixer looks back, the own included; `None`: all.
    pub fn window(&self) -> Option<usize> {
        match &self.mixer {
            Mixer::Attention(attention) => attention.window,
            Mixer::Compressed(compressed) => Some(compressed.window),
            Mixer::Delta(_) | Mixer::Latent(_) => None,
        }
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
    /// `[query rank, hidden]`, and the norm of its product; what [`Role::Q`] is applied to.
    QDown(usize),
    QDownNorm(usize),
    /// `[rank + turned, hidden]`, and the norm of the latent.
    KvDown(usize),
    KvDownNorm(usize),
    /// Of each head the rows of its key, then those of its value, `[heads * both, rank]`.
    KvUp(usize),
    /// What makes entries: values, scores, biases of scores by place `[positions of an entry,
    /// rows]`, and the norm of an entry.
    EntryValues(usize),
    EntryScores(usize),
    EntryBias(usize),
    EntryNorm(usize),
    /// The same of an indexer's keys.
    IndexValues(usize),
    IndexScores(usize),
    IndexBias(usize),
    IndexNorm(usize),
    /// `[heads * features, query rank]`, and a row a head.
    IndexQuery(usize),
    IndexWeights(usize),
    /// Group by group, what [`Role::O`] is applied to.
    GroupDown(usize),
    QBias(usize),
    KBias(usize),
    VBias(usize),
    QNorm(usize),
    KNorm(usize),
    O(usize),
    OBias(usize),
    /// `[heads]`.
    Sinks(usize),
    /// q, k, v and z of each key head.
    DeltaIn(usize),
    /// b and a of each key head.
    DeltaGates(usize),
    /// `[channels, 1, taps]`.
    DeltaConv(usize),
    /// `[value heads]`.
    DeltaDecay(usize),
    /// The same.
    DeltaBias(usize),
    /// `[features of a value head]`.
    DeltaNorm(usize),
    AttentionOutNorm(usize),
    MlpNorm(usize),
    MlpOutNorm(usize),
    Gate(usize),
    Up(usize),
    Down(usize),
    Router(usize),
    RouterBias(usize),
    /// `[experts]`.
    RouterCorrection(usize),
    /// `[vocab, chosen]`.
    TokenExperts(usize),
    SharedGate(usize),
    SharedUp(usize),
    SharedDown(usize),
    /// `[1, hidden]`.
    SharedScale(usize),
    /// A matrix an expert.
    ExpertGate(usize),
    ExpertUp(usize),
    ExpertDown(usize),
    /// `[experts, numbers of an expert]`.
    ExpertGateBias(usize),
    ExpertUpBias(usize),
    ExpertDownBias(usize),
    /// What residual streams are mixed by; here the number counts modules, two a layer, and the
    /// head is the last.
    HyperWeight(usize),
    HyperScale(usize),
    HyperBase(usize),
    FinalNorm,
    Head,
    /// Of a layer that predicts further tokens: norms of what it takes in, `[hidden, 2 * hidden]`,
    /// and the norm behind it.
    MtpEmbeddingNorm,
    MtpHiddenNorm,
    MtpIn,
    MtpNorm,
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
                | Self::DeltaIn(_)
                | Self::DeltaGates(_)
                | Self::QDown(_)
                | Self::KvDown(_)
                | Self::KvUp(_)
                | Self::EntryValues(_)
                | Self::EntryScores(_)
                | Self::IndexValues(_)
                | Self::IndexScores(_)
                | Self::IndexQuery(_)
                | Self::IndexWeights(_)
                | Self::GroupDown(_)
                | Self::O(_)
                | Self::Gate(_)
                | Self::Up(_)
                | Self::Down(_)
                | Self::Router(_)
                | Self::ExpertGate(_)
                | Self::ExpertUp(_)
                | Self::ExpertDown(_)
                | Self::SharedGate(_)
                | Self::SharedUp(_)
                | Self::SharedDown(_)
                | Self::Head
                | Self::MtpIn
                | Self::Embedding
        )
    }

    /// True for the scales of RMSNorms.
    pub fn is_norm(self) -> bool {
        matches!(
            self,
            Self::AttentionNorm(_)
                | Self::AttentionOutNorm(_)
                | Self::MlpNorm(_)
                | Self::MlpOutNorm(_)
                | Self::QDownNorm(_)
                | Self::KvDownNorm(_)
                | Self::QNorm(_)
                | Self::KNorm(_)
                | Self::DeltaNorm(_)
                | Self::EntryNorm(_)
                | Self::IndexNorm(_)
                | Self::FinalNorm
                | Self::MtpEmbeddingNorm
                | Self::MtpHiddenNorm
                | Self::MtpNorm
        )
    }

    /// True for the matrices of layers, which `dtype` quantises; embedding, head, routers, what
    /// gates a recurrent state, what makes and chooses entries and what a layer that predicts
    /// further tokens takes in stay.
    pub fn is_linear(self) -> bool {
        let stays = matches!(
            self,
            Self::Head
                | Self::MtpIn
                | Self::Embedding
                | Self::Router(_)
                | Self::DeltaGates(_)
                | Self::EntryValues(_)
                | Self::EntryScores(_)
                | Self::IndexValues(_)
                | Self::IndexScores(_)
                | Self::IndexWeights(_)
        );
        self.is_matrix() && !stays
    }
}

/// A tensor that must be in the checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorSpec {
    /// What it is for.
    pub role: Role,
    /// Its name in the checkpoint; where each expert has a tensor, its number stands for `{e}`.
    pub name: String,
    /// Its shape, or that of one expert; lane tensors have the lane first.
    pub shape: Vec<usize>,
    /// Experts that have such a matrix; 1 for what is no expert's.
    pub experts: usize,
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
    /// All experts' matrices in one tensor, where the rows of several matrices of an expert
    /// alternate: `[experts, of * rows, cols]`.
    Stacked {
        /// Which of them it is.
        part: usize,
        /// How many alternate.
        of: usize,
        /// As columns, where it is of a plain type: `[experts, cols, of * rows]`.
        turned: bool,
    },
    /// As every so many numbers of a row.
    Alternate {
        /// The first one.
        part: usize,
        /// Numbers from one to the next.
        of: usize,
    },
    /// Each number is `factor * (stored + one)`, which is made of them in float32.
    Less {
        /// What is added.
        one: f32,
        /// What that is multiplied by.
        factor: f32,
    },
    /// As integers of 32 or 64 bits from 0 on, those of a row different, of which float32 are made.
    Integers {
        /// All of them are less, and small enough to be exact.
        below: usize,
    },
}

impl Spec {
    /// With the layer that predicts further tokens, which the checkpoint must have.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`] for architectures of which none is known.
    pub fn predicting(mut self) -> Result<Self> {
        let Some(mtp) = &self.mtp else {
            let detail = format!(
                "mtp=True: no layer of multi-token prediction is known of {}",
                self.architecture
            );
            return Err(Error::InvalidRequest(detail));
        };
        self.layers.push(mtp.layer);
        self.tensors.extend(mtp.tensors.iter().cloned());
        self.ignored_below.retain(|below| *below != mtp.prefix);
        self.predicts = true;
        Ok(self)
    }

    /// Layers of the model itself.
    pub fn model_layers(&self) -> &[LayerSpec] {
        &self.layers[..self.layers.len() - usize::from(self.predicts)]
    }

    /// Whether rotary embeddings depend on the context that is served.
    pub fn turns_by_context(&self) -> bool {
        self.layers.iter().any(|layer| {
            let scaling = layer.mixer.rope().map(|(rope, _)| rope.scaling);
            matches!(scaling, Some(Scaling::Dynamic { .. } | Scaling::LongRope { .. }))
        })
    }

    /// Numbers in all tensors, scales excluded.
    pub fn parameters(&self) -> u64 {
        self.tensors.iter().map(TensorSpec::numbers).sum()
    }

    /// The experts whose matrices have a role, if it is one of theirs.
    pub fn experts(&self, role: Role) -> Option<&Experts> {
        let (Role::ExpertGate(layer) | Role::ExpertUp(layer) | Role::ExpertDown(layer)) = role
        else {
            return None;
        };
        match &self.layers[layer].mlp {
            Mlp::Experts(experts) => Some(experts),
            Mlp::Gated(_) => None,
        }
    }
}

impl Attention {
    /// Attention that sees everything, with neither norms nor biases.
    pub(super) fn plain(heads: usize, kv_heads: usize, head_dim: usize, rope: Rope) -> Self {
        Self {
            heads,
            kv_heads,
            head_dim,
            window: None,
            rope,
            qk_norm: None,
            qkv_bias: false,
            out_bias: false,
            sinks: false,
            gated: false,
        }
    }

    /// Rows of q's matrix.
    pub fn query_rows(&self) -> usize {
        self.query_width() * (1 + usize::from(self.gated))
    }

    /// Numbers of q.
    pub fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Numbers of k, or of v.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    pub(super) fn check(&self, config: &Config<'_>) -> Result<()> {
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

impl Delta {
    pub(super) fn check(&self, config: &Config<'_>) -> Result<()> {
        if !self.value_heads.is_multiple_of(self.key_heads) {
            let detail = format!("{} value heads on {}", self.value_heads, self.key_heads);
            return config.unsupported("linear_num_key_heads", detail);
        }
        if self.taps < 2 {
            return config.unsupported("linear_conv_kernel_dim", "1; at least 2");
        }
        Ok(())
    }

    /// Channels of the convolution: all of q, k and v.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_width()
    }

    /// Numbers of v, or of the output.
    pub fn value_width(&self) -> usize {
        self.value_heads * self.value_dim
    }
}

impl Latent {
    pub(super) fn check(&self, config: &Config<'_>) -> Result<()> {
        if !self.turned.is_multiple_of(2) {
            let detail = format!("{}; it must be even", self.turned);
            return config.unsupported("qk_rope_head_dim", detail);
        }
        // Keeps the numbers of all heads inside 32 bits.
        let widest = (self.plain + self.turned).max(self.key_width()).max(self.plain + self.value);
        if self.heads.saturating_mul(widest) > 1 << 28 {
            let detail = format!("{} heads of {widest}", self.heads);
            return config.unsupported("num_attention_heads", detail);
        }
        Ok(())
    }
}

impl Compressed {
    pub(super) fn check(&self, config: &Config<'_>) -> Result<()> {
        if !self.turned.is_multiple_of(2) || self.turned > self.dim {
            let detail = format!("{} of {} features; an even number", self.turned, self.dim);
            return config.unsupported("qk_rope_head_dim", detail);
        }
        if !self.heads.is_multiple_of(self.groups) {
            let detail = format!("{} groups of {} heads", self.groups, self.heads);
            return config.unsupported("o_groups", detail);
        }
        // Keeps the numbers of all heads inside 32 bits.
        if self.heads.saturating_mul(self.dim).max(self.group_rows()) > 1 << 26 {
            let detail = format!("{} heads of {}", self.heads, self.dim);
            return config.unsupported("num_attention_heads", detail);
        }
        let Some(Entries { every, index, .. }) = self.entries else { return Ok(()) };
        if !PAGE.is_multiple_of(every) && !every.is_multiple_of(PAGE) || every > 1 << 16 {
            let detail = format!("{every}; a power of two up to {PAGE}, or a multiple of {PAGE}");
            return config.unsupported("compress_ratios", detail);
        }
        let Some(index) = index else { return Ok(()) };
        if self.turned > index.dim || index.heads.saturating_mul(index.dim) > 1 << 26 {
            let detail = format!("{}; {} features turn", index.dim, self.turned);
            return config.unsupported("index_head_dim", detail);
        }
        Ok(())
    }
}

impl TensorSpec {
    /// A tensor that stands in the checkpoint as it is.
    pub fn of(role: Role, name: String, shape: &[usize]) -> Self {
        Self { role, name, shape: shape.to_vec(), experts: 1, stored: Stored::Whole }
    }

    /// The tensors that it stands for: itself, or one an expert.
    pub fn each(&self) -> impl Iterator<Item = Self> + '_ {
        let of = |expert: usize| match self.experts {
            1 => self.clone(),
            _ => Self { name: self.name.replace("{e}", &expert.to_string()), ..self.clone() },
        };
        (0..self.experts).map(move |expert| Self { experts: 1, ..of(expert) })
    }

    /// Numbers in the tensor, or those of all experts.
    pub fn numbers(&self) -> u64 {
        self.shape.iter().map(|n| *n as u64).fold(self.experts as u64, u64::saturating_mul)
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
            self.model_layers().len(),
            self.hidden,
            self.classes(),
            self.vocab,
            self.max_positions
        )?;
        if self.lanes > 1 {
            write!(f, ", {} lanes", self.lanes)?;
        }
        if let Some(hyper) = self.hyper {
            write!(f, ", {} residual streams", hyper.streams)?;
        }
        let windows: Vec<usize> = self.layers.iter().filter_map(LayerSpec::window).collect();
        if let Some(window) = windows.iter().max() {
            write!(f, ", window {window} on {} layers", windows.len())?;
        }
        if self.predicts {
            f.write_str(", a layer that predicts further tokens")?;
        }
        writeln!(f)
    }
}

impl Spec {
    /// Heads and MLP widths in the order of their first layers, each with how many layers have it
    /// where not all do.
    fn classes(&self) -> String {
        let mut classes: Vec<(String, usize)> = Vec::new();
        for layer in self.model_layers() {
            let heads = match &layer.mixer {
                Mixer::Attention(a) => {
                    format!("{}/{} heads of {}", a.heads, a.kv_heads, a.head_dim)
                }
                Mixer::Delta(d) => {
                    let (values, keys) = (d.value_heads, d.key_heads);
                    format!("{values}/{keys} recurrent heads of {}x{}", d.key_dim, d.value_dim)
                }
                Mixer::Latent(l) => format!("{} heads on latents of {}", l.heads, l.key_width()),
                Mixer::Compressed(c) => {
                    let heads = format!("{} heads on keys of {}", c.heads, c.dim);
                    match c.entries {
                        None => heads,
                        Some(Entries { every, index: None, .. }) => {
                            format!("{heads}, an entry for {every} positions")
                        }
                        Some(Entries { every, index: Some(index), .. }) => {
                            let most = index.chosen;
                            format!("{heads}, an entry for {every} positions, {most} at most")
                        }
                    }
                }
            };
            let class = match &layer.mlp {
                Mlp::Gated(m) => format!("{heads}, MLP {}", m.ffn),
                Mlp::Experts(m) => {
                    let shared = m.shared.map_or(String::new(), |s| format!(" + {}", s.each.ffn));
                    let (chosen, count, ffn) = (m.chosen, m.count, m.each.ffn);
                    format!("{heads}, {chosen} of {count} experts of {ffn}{shared}")
                }
            };
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
