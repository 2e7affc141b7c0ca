//! Attention over a window and compressed entries: a class's sizes, a layer's tensors, and where a
//! column's words and a block's numbers stand.

use super::latent::{heads_of_rows, share_heads};
use super::matrix::Matrix;
use super::parts::Parts;
use crate::abi::{
    Compress, CompressedAttend, CompressedDown, CompressedIndex, CompressedQuery, GroupedDown, PAGE,
};

/// Sizes of the attention; heads and their width are the class's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Compressed {
    /// Numbers of the latent of queries.
    pub query_rank: u32,
    /// Features of a head that turn, the last ones.
    pub turned: u32,
    /// Groups of heads whose outputs are projected together.
    pub groups: u32,
    /// Rows of a group.
    pub group_rank: u32,
    /// What lies behind the window.
    pub entries: Option<Entries>,
}

/// Entries of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Entries {
    /// Positions of one.
    pub every: u32,
    /// Entries that a position is part of: its own, and before it the one behind.
    pub sets: u32,
    /// Pools of running softmaxes, and of entries.
    pub pools: [u32; 2],
    /// What chooses among them.
    pub index: Option<Index>,
}

/// An indexer of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Index {
    /// Heads.
    pub heads: u32,
    /// Features of each, and of a key.
    pub dim: u32,
    /// Most entries of a position.
    pub chosen: u32,
    /// The pool of its keys.
    pub pool: u32,
}

/// What makes entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EntryTensors {
    /// Of values, and of their scores.
    pub weights: [u32; 2],
    /// On scores, by the place in an entry.
    pub bias: u32,
    /// The entry's norm.
    pub norm: u32,
}

/// Tensors of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompressedTensors {
    /// What makes the latent of queries, and the key.
    pub down: [u32; 2],
    /// Norms of both.
    pub norms: [u32; 2],
    /// What makes heads' queries.
    pub query: u32,
    /// What groups of heads are projected by.
    pub group: u32,
    /// What makes entries, then an indexer's keys.
    pub entries: [Option<EntryTensors>; 2],
    /// What makes an indexer's queries, and its heads' weights.
    pub index: Option<[u32; 2]>,
    /// The layer's number among those of the pools of running softmaxes, entries and index keys.
    pub places: [u32; 3],
}

impl CompressedTensors {
    /// All that the layer's input is multiplied by, in the order of [`Section`].
    pub fn down(&self) -> Vec<u32> {
        let entries = self.entries.iter().flatten().flat_map(|of| of.weights);
        let weights = self.index.map(|[_, weights]| weights);
        self.down.into_iter().chain(entries).chain(weights).collect()
    }

    /// What the latent of queries is multiplied by.
    pub fn queries(&self) -> Vec<u32> {
        [self.query].into_iter().chain(self.index.map(|[query, _]| query)).collect()
    }
}

/// The steps of a layer's attention.
pub(super) struct CompressedSteps<'a> {
    pub down: &'a CompressedDown,
    /// Of entries, and of index keys.
    pub compress: [Option<&'a Compress>; 2],
    pub index: Option<&'a CompressedIndex>,
    pub query: &'a CompressedQuery,
    pub attend: &'a CompressedAttend,
    pub grouped: &'a GroupedDown,
}

impl CompressedSteps<'_> {
    /// The class's part.
    pub(super) fn sizes(&self) -> Compressed {
        let index = self.index.map(|of| Index {
            heads: of.heads,
            dim: of.dim,
            chosen: of.chosen,
            pool: of.keys.group,
        });
        let entries = self.compress[0].map(|of| Entries {
            every: of.every,
            sets: of.sets(),
            pools: [of.sums.group, of.entries.group],
            index,
        });
        Compressed {
            query_rank: self.down.rank,
            turned: self.down.heads.turned,
            groups: self.grouped.groups,
            group_rank: self.grouped.rank,
            entries,
        }
    }

    /// A layer's tensors.
    pub(super) fn tensors(&self) -> CompressedTensors {
        let [main, keys] = self.compress;
        let place = |of: Option<u32>| of.unwrap_or(0);
        let entries =
            |of: &Compress| EntryTensors { weights: of.weights, bias: of.bias, norm: of.scale };
        CompressedTensors {
            down: self.down.weights,
            norms: self.down.scales,
            query: self.query.weight,
            group: self.grouped.weight,
            entries: self.compress.map(|of| of.map(entries)),
            index: self.index.map(|of| of.weights),
            places: [
                place(main.map(|of| of.sums.layer)),
                place(main.map(|of| of.entries.layer)),
                place(keys.map(|of| of.entries.layer)),
            ],
        }
    }

    /// Refuses what there is no code for; so many features turn by the table.
    pub(super) fn known(&self, features: u32) -> Result<(), String> {
        let (heads, rotary) = (self.down.heads, self.down.rotary);
        let index_dim = self.index.map_or(8, |of| of.dim);
        if !rotary.interleaved {
            return Err("compressed attention whose rotary pairs are no neighbours".to_owned());
        }
        let whole = [heads.dim, index_dim].iter().all(|dim| dim.is_multiple_of(8));
        if !whole || self.down.rank % 2 == 1 || features != heads.turned {
            return Err("compressed attention of widths that are no whole eights".to_owned());
        }
        let alike = |of: &Compress| {
            let first = self.compress[0].unwrap_or(of);
            (of.norm, of.rotary, of.turned) == (self.down.norm, rotary, heads.turned)
                && (of.every, of.sets(), of.sums) == (first.every, first.sets(), first.sums)
        };
        let known = |of: &CompressedIndex| {
            (of.norm, of.rotary, of.turned) == (self.down.norm, rotary, heads.turned)
        };
        if !self.compress.iter().flatten().all(|of| alike(of)) || !self.index.is_none_or(known) {
            return Err("entries that are not made as keys are".to_owned());
        }
        if self.compress[1].is_some_and(|of| of.first != self.compress[0].map_or(0, Compress::kept))
        {
            return Err("running softmaxes of index keys before those of entries".to_owned());
        }
        Ok(())
    }
}

/// Bytes of a row of a page, of so many numbers.
pub const fn row_bytes(width: u32, parts: u32) -> u32 {
    width * 2 * parts
}

/// Bytes of a layer's entries in a page.
pub const fn entries_bytes(width: u32, every: u32, parts: u32) -> u32 {
    row_bytes(width, parts) * (PAGE as u32).div_ceil(every)
}

/// Bytes of so many running softmaxes: 16 each.
pub const fn sums_bytes(count: u32) -> u32 {
    16 * count
}

/// Sizes of the attention, padded, and where the parts of a column's words begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompressedPartition {
    /// Numbers of the latent of queries.
    pub query_rank: u32,
    /// Features of a head, as products have them.
    pub head_dim: u32,
    /// Features of a key as pages have it, of an entry, and of an index key.
    pub widths: [u32; 3],
    /// Rows of a group, and columns.
    pub group: [u32; 2],
    /// Groups of a lane.
    pub groups: u32,
    /// Groups of which a block has rows, at most.
    pub block_groups: u32,
    /// Heads of an indexer.
    pub index_heads: u32,
    /// What the input is multiplied by: each part's first number, then the end. The latent of
    /// queries, the key, values and scores of entries, those of index keys, an indexer's weights.
    pub down: [u32; 8],
    /// Channels of running softmaxes that a block has.
    pub channels: u32,
    /// Entries that a sequence may have, where some are chosen; how many are.
    pub entries: [u32; 2],
}

impl CompressedPartition {
    /// Of so many heads of such a width, on so many blocks, for so many positions.
    pub fn new(
        [heads, dim]: [u32; 2],
        of: &Compressed,
        (unit, each, positions): (u32, u32, u32),
    ) -> Self {
        let head_dim = dim.next_multiple_of(32);
        let (entries, index) = (of.entries, of.entries.and_then(|e| e.index));
        let sets = entries.map_or(0, |e| e.sets);
        let index_dim = index.map_or(0, |i| i.dim);
        let query_rank = of.query_rank.next_multiple_of(unit);
        let index_heads = index.map_or(0, |i| i.heads);
        let entry = entries.map_or(0, |_| dim);
        let (values, keys) = (sets * entry, sets * index_dim);
        let weights = index_heads.next_multiple_of(2);
        let mut down = [query_rank, dim, values, values, keys, keys, weights, 0];
        let mut at = 0;
        for part in &mut down {
            (*part, at) = (at, at + *part);
        }
        let group_rank = of.group_rank.next_multiple_of(32);
        let rows = share_heads(group_rank, of.groups, each);
        Self {
            query_rank,
            head_dim,
            widths: [dim, entry, index_dim],
            group: [group_rank, heads / of.groups * head_dim],
            groups: of.groups,
            block_groups: heads_of_rows(rows, group_rank),
            index_heads,
            down,
            channels: (entry + index_dim).div_ceil(each),
            entries: match (entries, index) {
                (Some(e), Some(i)) => [positions / e.every, i.chosen],
                _ => [0; 2],
            },
        }
    }

    /// Numbers of the input's products.
    pub const fn down_all(&self) -> u32 {
        self.down[7]
    }

    /// Rows of what the latent of queries is multiplied by.
    pub const fn query_rows(&self, heads: u32) -> u32 {
        heads * self.head_dim + self.index_heads * self.widths[2]
    }

    /// Columns of what the latent of queries, or groups of heads, are multiplied by, or of
    /// attention's output of a machine's groups.
    pub const fn parts(&self, of: &Compressed, (matrix, rank): (Matrix, u32)) -> Parts {
        let (heads, real) = (self.group[1] / self.head_dim, self.widths[0]);
        let (own, skip) = (of.group_rank, rank * of.groups * of.group_rank);
        match matrix {
            Matrix::Output => Parts { count: of.groups, real: own, padded: self.group[0], skip },
            Matrix::ValueUp => Parts { count: heads, real, padded: self.head_dim, skip: 0 },
            _ => Parts { count: 1, real: of.query_rank, padded: self.query_rank, skip: 0 },
        }
    }

    /// Rows of a block of what groups are projected by.
    pub fn group_rows(&self, each: u32) -> u32 {
        share_heads(self.group[0], self.groups, each)
    }

    /// Numbers of what groups make, all of them.
    pub const fn grouped(&self) -> u32 {
        self.groups * self.group[0]
    }

    /// Channels of running softmaxes.
    pub const fn channels_all(&self) -> u32 {
        self.widths[1] + self.widths[2]
    }

    /// Numbers of the widest vector of a product, of one column.
    pub fn widest(&self) -> u32 {
        let all = self.block_groups * self.group[1];
        self.query_rank.max(all).max(self.grouped())
    }

    /// Bytes of what stands in the place of vectors while a block attends: of each warp a head's
    /// sums, their mass and their best score; or an indexer's queries and weights.
    pub fn attend_bytes(&self, warps: u32) -> u32 {
        let queries = self.index_heads * (self.widths[2] + 1);
        4 * (warps * (self.head_dim + 2)).max(queries)
    }

    /// Bytes of rows of this step: of each column a key, an entry and an index key, as pages have
    /// them; behind them the chosen entries of one column, how many, and the sums of warps.
    pub fn row_bytes(&self, columns: u32, parts: u32) -> u32 {
        columns * row_bytes(self.widths.iter().sum(), parts)
    }

    /// Floats of a block's shared memory.
    pub fn floats(&self, columns: u32, parts: u32, warps: u32) -> u32 {
        self.row_bytes(columns, parts).div_ceil(4) + self.entries[1] + warps
    }
}
