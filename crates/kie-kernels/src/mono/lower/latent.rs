//! Attention over latents: a class's sizes, a layer's tensors, and how heads, their positions and
//! their rows are dealt out.

use crate::abi::PAGE;

/// Heads that a block attends with, at most (ops/latent_attend.h): columns of the matrix unit's
/// second operand.
pub const HEADS_AT_ONCE: u32 = 8;
/// Floats of a warp's part of a head's scores of a unit, which has 16 positions: so padded that
/// lanes meet different banks.
pub const PART_HEAD: u32 = 20;
/// Partials of a word that one thread combines, at most: all of them are in flight at once.
const MOST_COMBINED: u32 = 8;

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

    /// [`LatentPartition::kept`] as the matrix unit takes it: 32 numbers of a row at a time.
    pub const fn kept_padded(&self) -> u32 {
        self.kept.next_multiple_of(32)
    }

    /// Halves from a head's query to the next: 16 banks apart.
    pub const fn head_stride(&self) -> u32 {
        let odd = self.kept_padded() / 32 % 2 == 1;
        self.kept_padded() + if odd { 0 } else { 32 }
    }

    /// Bytes of the heads that attend together and of what warps leave for each other: halves, and
    /// parts of two units' scores; or, of two parts, floats.
    pub const fn attend_bytes(&self, parts: u32, warps: u32) -> u32 {
        if parts > 1 {
            4 * HEADS_AT_ONCE * (self.kept + 8)
        } else {
            HEADS_AT_ONCE * (2 * self.head_stride() + 2 * warps * PART_HEAD * 4)
        }
    }

    /// Floats of a page's scores, of two pages in turn, which numbers of two parts need.
    pub const fn score_floats(parts: u32) -> u32 {
        if parts > 1 {
            2 * HEADS_AT_ONCE * PAGE as u32
        } else {
            0
        }
    }

    /// Numbers of the widest vector of a product, of one column.
    pub fn widest(&self) -> u32 {
        let [keys, values] = self.heads;
        self.query_rank.max(keys * self.plain).max(values * self.rank)
    }
}

/// Heads that a block attends with, of so many: two groups, or more.
pub fn group_heads(heads: u32) -> u32 {
    heads.div_ceil(2).min(HEADS_AT_ONCE)
}

/// Blocks that share the positions of a group of heads, `most` at most: each group has its own.
pub fn splits(heads: u32, blocks: u32, most: u32) -> u32 {
    (blocks / heads.div_ceil(group_heads(heads))).clamp(1, most)
}

/// Neighbouring threads that combine a word's partials, of `splits`: as many as leave none more
/// than are in flight, and all a block's words of a column to one pass of its threads.
pub fn combine_sharers(splits: u32, words: u32, threads: u32) -> u32 {
    let more = |n: u32| splits.div_ceil(n) > MOST_COMBINED || 2 * n * words <= threads;
    let all = (0..5).map(|power| 1 << power);
    all.into_iter().find(|n| 2 * n > splits || !more(*n)).unwrap_or(32)
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Kimi-K2 and DeepSeek-V3 on one to eight GPUs of 132 blocks: nearly all of them have heads
    /// and positions of their own, and a block combines its words in two passes at most.
    #[test]
    fn heads_and_positions_are_cut_over_nearly_all_blocks() {
        for (heads, wanted) in [(128_u32, 8), (64, 16), (32, 33), (16, 64), (8, 64)] {
            let groups = heads.div_ceil(group_heads(heads));
            let splits = splits(heads, 132, 64);
            assert_eq!(splits, wanted, "{heads} heads");
            assert!((120..=132).contains(&(groups * splits)), "{heads} heads: {groups} groups");
            let words = (heads * 512 / 2).div_ceil(132);
            let sharers = combine_sharers(splits, words, 256);
            assert!(splits.div_ceil(sharers) <= MOST_COMBINED, "{heads} heads: {sharers}");
            assert!(sharers <= 32 && words * sharers <= 512, "{heads} heads: {sharers}");
        }
        assert_eq!([1, 2, 3, 4].map(group_heads), [1, 1, 2, 2]);
        assert_eq!(splits(4, 3, 64), 1);
        assert_eq!(splits(128, 4, 64), 1, "a block has several groups");
    }
}
