//! Attention over latents: a class's sizes, a layer's tensors, and how rows of heads are dealt out.

/// Heads that attend together (ops/latent.h).
pub const HEADS_AT_ONCE: u32 = 8;

/// Latents of a layer's attention, and what heads make of them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Latent {
    /// Numbers of the latent of queries.
    pub query_rank: u32,
    /// Numbers of the latent of keys and values.
    pub rank: u32,
    /// Features of a head's query and key that do not turn.
    pub plain: u32,
    /// Those behind them, which do.
    pub turned: u32,
    /// Epsilon of the latents' norms.
    pub eps: f32,
    /// On scores.
    pub scale: f32,
}

impl Latent {
    /// Numbers that are kept of a position, padded: whole 16 bytes of halves.
    pub const fn kept(&self) -> u32 {
        (self.rank + self.turned).next_multiple_of(8)
    }
}

/// Tensors of attention over latents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentTensors {
    /// What makes the latent of queries, and that of keys and values.
    pub down: [u32; 2],
    /// Norms of both.
    pub norms: [u32; 2],
    /// What makes heads' queries.
    pub query: u32,
    /// What would make heads' keys and values, in turn.
    pub up: u32,
}

/// Sizes of attention over latents, padded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentPartition {
    /// Numbers of the latent of queries.
    pub query_rank: u32,
    /// Numbers of the latent of keys and values.
    pub rank: u32,
    /// Features of a head's query that do not turn, and those that do.
    pub plain: u32,
    /// See above.
    pub turned: u32,
    /// [`Latent::kept`].
    pub kept: u32,
    /// Heads of which a block has rows that meet latents, and rows of values, at most.
    pub heads: [u32; 2],
}

impl LatentPartition {
    /// Of a class; heads are counted where rows are dealt out.
    pub fn new(of: &Latent, unit: u32) -> Self {
        Self {
            query_rank: of.query_rank.next_multiple_of(unit),
            rank: of.rank.next_multiple_of(32),
            plain: of.plain.next_multiple_of(32),
            turned: of.turned.next_multiple_of(8),
            kept: of.kept(),
            heads: [0; 2],
        }
    }

    /// Numbers of a position's latents, of queries too.
    pub const fn down(&self) -> u32 {
        self.query_rank + self.rank + self.turned
    }

    /// Numbers of a head's query.
    pub const fn query(&self) -> u32 {
        self.plain + self.turned
    }

    /// Bytes of the heads that attend together, as floats, and of what warps leave for each other.
    pub const fn attend_bytes(&self) -> u32 {
        4 * HEADS_AT_ONCE * (self.kept + 8)
    }

    /// Numbers of the widest vector of a product, of one column.
    pub fn widest(&self) -> u32 {
        let [keys, values] = self.heads;
        self.query_rank.max(keys * self.plain).max(values * self.rank)
    }
}

/// Rows of a block of a matrix of so many heads' rows: whole heads', or such that no tile of 16 has
/// those of two.
pub fn share_heads(rows: u32, heads: u32, blocks: u32) -> u32 {
    let fits = |n: &u32| {
        rows.is_multiple_of(*n)
            || (rows.is_multiple_of(16) && (n.is_multiple_of(16) || n.is_multiple_of(rows)))
    };
    let first = (heads * rows).div_ceil(blocks).next_multiple_of(2);
    (first..).step_by(2).find(fits).unwrap_or(rows)
}

/// Heads that so many neighbouring rows of a block are of, at most.
pub fn heads_of_rows(rows: u32, head: u32) -> u32 {
    if head.is_multiple_of(rows) {
        1
    } else {
        (rows + head - 2) / head + 1
    }
}

/// As many warps by rows as have equally many tiles.
pub fn rows_first(rows: u32, warps: u32) -> u32 {
    let good = |w: &u32| warps.is_multiple_of(*w) && rows.div_ceil(16).is_multiple_of(*w);
    (1..=warps).rev().find(good).unwrap_or(1)
}
