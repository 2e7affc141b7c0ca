//! Steps of attention over a window and compressed entries (DeepSeek-V4): one vector a position,
//! key and value of all heads at once; of what lies behind the window, one entry for every so many
//! positions, of which an indexer chooses some.

use super::places::{Rotary, StateAt};

/// Sizes of one lane's heads, which share one key that is their value as well.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CompressedHeads {
    /// Heads.
    pub count: u32,
    /// Features of a head, of which the last ones turn.
    pub dim: u32,
    /// Those; even.
    pub turned: u32,
    /// Groups of heads, one behind the other, whose outputs are projected together.
    pub groups: u32,
}

impl CompressedHeads {
    /// Numbers of q.
    pub const fn width(self) -> u32 {
        self.count * self.dim
    }

    /// Numbers of one group's heads.
    pub const fn group(self) -> u32 {
        self.width() / self.groups
    }
}

/// `output = norm(Wq · norm(input))`, the latent that queries are made of; `norm(Wk ·
/// norm(input))`, its last features turned, goes into the pages of `state`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompressedDown {
    /// RMSNorm scale of the input, `[hidden]`; without one it is taken as it is.
    pub norm: Option<u32>,
    /// Wq, `[rank, hidden]`, and Wk, `[heads.dim, hidden]`.
    pub weights: [u32; 2],
    /// RMSNorm scales of their products.
    pub scales: [u32; 2],
    /// How keys turn.
    pub rotary: Rotary,
    /// Numbers of the latent.
    pub rank: u32,
    /// Heads of one lane.
    pub heads: CompressedHeads,
    /// Residual streams.
    pub input: u32,
    /// `[rank]`, shared by the lanes.
    pub output: u32,
    /// Where keys are kept: [`super::StateKind::Latents`], windowed.
    pub state: StateAt,
    /// Which block does which rows of Wq, then of Wk.
    pub partition: u32,
}

/// An entry of every so many positions: channel by channel the sum of `kv = Wv · norm(input)`,
/// weighted by a softmax over positions of `Wg · norm(input) + bias of the place`; then normed, its
/// last features turned as at its first position. Kept is the running softmax of each channel: its
/// maximum, mass and weighted sum.
///
/// With `overlap` matrices have twice the rows: a position's first half goes into the entry
/// *behind* its own, its second half into its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Compress {
    /// RMSNorm scale of the input, `[hidden]`; without one it is taken as it is.
    pub norm: Option<u32>,
    /// Wv and Wg, `[sets * dim, hidden]`.
    pub weights: [u32; 2],
    /// `[every, sets * dim]`.
    pub bias: u32,
    /// RMSNorm scale of an entry, `[dim]`.
    pub scale: u32,
    /// How entries turn.
    pub rotary: Rotary,
    /// Numbers of an entry.
    pub dim: u32,
    /// Those that turn, the last ones.
    pub turned: u32,
    /// Positions of an entry; divides a page, or is whole pages.
    pub every: u32,
    /// Entries see the positions of the one before, too.
    pub overlap: bool,
    /// Residual streams.
    pub input: u32,
    /// Where running softmaxes are kept, `[dim][sets][3]` numbers: [`super::StateKind::Sums`].
    pub sums: StateAt,
    /// The first of those numbers.
    pub first: u32,
    /// Where entries are kept: [`super::StateKind::Entries`].
    pub entries: StateAt,
    /// Which block does which rows of Wv, then of Wg.
    pub partition: u32,
}

impl Compress {
    /// Halves of a position.
    pub const fn sets(&self) -> u32 {
        if self.overlap {
            2
        } else {
            1
        }
    }

    /// Numbers that are kept of running softmaxes.
    pub const fn kept(&self) -> u32 {
        3 * self.sets() * self.dim
    }
}

/// Which entries a position sees: all that are complete where they are no more than `chosen`, else
/// those with the largest scores, equal ones by the lower number:
///
/// ```text
/// score of c = sum over heads h of (Ww · norm(input))_h max(0, q_h cᵀ) / sqrt(dim heads)
/// ```
///
/// with `q = Wq · latent`, its last features turned, and a key c for each entry. Products are in
/// float32, whatever the path: a choice is as good as its scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompressedIndex {
    /// RMSNorm scale of the input, `[hidden]`; without one it is taken as it is.
    pub norm: Option<u32>,
    /// Wq, `[heads * dim, width of latent]`, and Ww, `[heads, hidden]`.
    pub weights: [u32; 2],
    /// How queries turn.
    pub rotary: Rotary,
    /// Heads.
    pub heads: u32,
    /// Features of each, and of a key.
    pub dim: u32,
    /// Those that turn, the last ones.
    pub turned: u32,
    /// Most entries of a position.
    pub chosen: u32,
    /// Positions of an entry.
    pub every: u32,
    /// Residual streams.
    pub input: u32,
    /// What [`CompressedDown`] put out.
    pub latent: u32,
    /// Where keys are kept: [`super::StateKind::Entries`].
    pub keys: StateAt,
    /// How many, then their numbers, ascending, `[1 + chosen]`, shared by the lanes.
    pub output: u32,
    /// Which block does which rows of Wq, then of Ww.
    pub partition: u32,
}

impl CompressedIndex {
    /// Rows of both matrices.
    pub const fn rows(&self) -> u32 {
        self.heads * (self.dim + 1)
    }
}

/// Queries: each head of `W · input`, divided by its root mean square, its last features turned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompressedQuery {
    /// `[lanes, heads.width(), width of input]`.
    pub weight: u32,
    /// How queries turn.
    pub rotary: Rotary,
    /// Heads of one lane.
    pub heads: CompressedHeads,
    /// What [`CompressedDown`] put out.
    pub input: u32,
    /// `[heads.width()]` a lane.
    pub output: u32,
    /// Which block does which heads.
    pub partition: u32,
}

/// `output_h = softmax(q_h cᵀ / sqrt(heads.dim), beside it a sink) c`, c the keys of the last
/// `window` positions and the complete entries, or those chosen of them; then the last features are
/// turned back from the query's position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompressedAttend {
    /// How features turn.
    pub rotary: Rotary,
    /// Heads of one lane.
    pub heads: CompressedHeads,
    /// Sinks, `[lanes, heads.count]`.
    pub sinks: u32,
    /// Positions that a query sees, itself included.
    pub window: u32,
    /// What [`CompressedQuery`] put out.
    pub input: u32,
    /// `[heads.group()]` for each group of each lane.
    pub output: u32,
    /// Where keys are kept.
    pub state: StateAt,
    /// What lies behind the window.
    pub entries: Option<Entries>,
}

/// Entries that attention sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entries {
    /// Where they are kept.
    pub state: StateAt,
    /// Positions of one.
    pub every: u32,
    /// What [`CompressedIndex`] put out; all of them where there is none.
    pub choice: Option<u32>,
}

/// `output_g = W_g · input_g`, group by group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupedDown {
    /// `[lanes, groups * rank, width of input]`, the rows of a group together.
    pub weight: u32,
    /// Groups of one lane.
    pub groups: u32,
    /// Rows of a group.
    pub rank: u32,
    /// What [`CompressedAttend`] put out.
    pub input: u32,
    /// `[groups * rank]` a lane.
    pub output: u32,
    /// Which block does which rows.
    pub partition: u32,
}
