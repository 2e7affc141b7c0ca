//! Steps of models whose residual is several streams, which modules take from and give to by
//! numbers that the streams make themselves: manifold-constrained hyper-connections (Zhu et al.,
//! "Hyper-Connections", 2024; Xie et al., "mHC", 2025).

/// Most streams of a residual.
pub const STREAMS_MAX: usize = 16;

/// What a module takes of n streams s_i, with f = W · (all streams) / their root mean square:
///
/// ```text
/// output = sum over i of (sigmoid(scale_0 f_i + base_i) + eps) s_i
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HyperIn {
    /// W, `[rows, streams * hidden]`, see [`HyperIn::rows`].
    pub weight: u32,
    /// `[1]`, or `[3]` with `join`.
    pub scale: u32,
    /// `[rows]`.
    pub base: u32,
    /// n, 1 to [`STREAMS_MAX`].
    pub streams: u32,
    /// Beside what is divided by, and on what is taken.
    pub eps: f32,
    /// All streams, one behind the other, `[streams * hidden]`, shared by the lanes.
    pub input: u32,
    /// `[hidden]` a lane.
    pub output: u32,
    /// How the module's output will join the streams; nothing before the head.
    pub join: Option<HyperJoin>,
    /// Which block does which rows.
    pub partition: u32,
}

/// How a module's output joins n streams: [`HyperOut`] has what is done with these numbers.
///
/// ```text
/// post_i = 2 sigmoid(scale_1 f_(n + i) + base_(n + i))
/// comb = softmax of each row of (scale_2 f_(2n..) + base_(2n..)) + eps
/// comb = comb / (sums of columns + eps), then `rounds - 1` times the same of rows and of columns
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HyperJoin {
    /// From 1 on.
    pub rounds: u32,
    /// post, then comb row by row, `[streams * (1 + streams)]`, shared by the lanes.
    pub mix: u32,
    /// Zeros, to which the module adds its output, `[hidden]` a lane.
    pub sum: u32,
}

impl HyperIn {
    /// Rows of W.
    pub const fn rows(&self) -> u32 {
        match self.join {
            Some(_) => self.streams * (2 + self.streams),
            None => self.streams,
        }
    }
}

/// `s_j = post_j · input + sum over i of comb_ij s_i`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HyperOut {
    /// n.
    pub streams: u32,
    /// As [`HyperJoin::mix`].
    pub mix: u32,
    /// The module's output, `[hidden]` a lane, all the same.
    pub input: u32,
    /// All streams, read and written.
    pub residual: u32,
    /// Which block does which numbers of each stream.
    pub partition: u32,
}
