//! The matrices of a layer, by their places in the stream.

/// A product of a layer. A class of layers has some of these.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Matrix {
    /// What a layer that predicts further tokens takes in.
    MtpIn,
    /// Queries, keys, values, and gates; of a delta rule q, k, v and z.
    Qkv,
    /// What gates a delta rule: b and a of each of a block's units.
    Gates,
    /// The latents of queries, then of keys and values.
    LatentDown,
    /// Heads' queries, of their latent.
    QueryUp,
    /// Of each head what meets latents, of its query: what would make its keys, turned around.
    KeyUp,
    /// Values of heads, of what they saw of latents.
    ValueUp,
    /// Attention's output.
    Output,
    /// The router's logits, and behind them the gate of the shared expert.
    Router,
    /// Gate and up of the shared expert, row by row in turn.
    SharedGateUp,
    /// The same of the mlp, or of one of its experts.
    GateUp,
    /// The shared expert's output.
    SharedDown,
    /// The mlp's output, or one expert's.
    Down,
}

impl Matrix {
    /// In the order of the stream.
    pub const ALL: [Self; Self::COUNT] = [
        Self::MtpIn,
        Self::Qkv,
        Self::Gates,
        Self::LatentDown,
        Self::QueryUp,
        Self::KeyUp,
        Self::ValueUp,
        Self::Output,
        Self::Router,
        Self::SharedGateUp,
        Self::GateUp,
        Self::SharedDown,
        Self::Down,
    ];

    /// How many.
    pub const COUNT: usize = 13;

    /// Whether it is an expert's own, where the mlp is some of several experts.
    pub const fn is_experts(self) -> bool {
        matches!(self, Self::GateUp | Self::Down)
    }

    /// Whether threads own its results: rows of the residual.
    pub const fn is_owned(self) -> bool {
        matches!(self, Self::MtpIn | Self::Output | Self::SharedDown | Self::Down)
    }

    /// Whether the layer's pages pass behind it.
    pub const fn is_before_pages(self) -> bool {
        matches!(self, Self::Qkv | Self::KeyUp)
    }

    /// Whether its rows are heads', each multiplied by a vector of the head's own.
    pub const fn is_by_head(self) -> bool {
        matches!(self, Self::KeyUp | Self::ValueUp)
    }

    /// Its name, to print.
    pub const fn name(self) -> &'static str {
        match self {
            Self::MtpIn => "mtp input projection",
            Self::Qkv => "q, k and v",
            Self::Gates => "gates of a delta rule",
            Self::LatentDown => "latents",
            Self::QueryUp => "queries of latents",
            Self::KeyUp => "keys of latents",
            Self::ValueUp => "values of latents",
            Self::Output => "attention's output",
            Self::Router => "router",
            Self::SharedGateUp => "gate and up of the shared expert",
            Self::GateUp => "gate and up",
            Self::SharedDown => "down of the shared expert",
            Self::Down => "down",
        }
    }
}
