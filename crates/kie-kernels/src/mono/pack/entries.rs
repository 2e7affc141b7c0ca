//! Of attention over a window and entries, and of several residual streams: which stored row is
//! which of a block's, and what there is besides products.

use super::{Stored, Weights};
use crate::matrix::row_to_f32;
use crate::mono::lower::compressed::CompressedTensors;
use crate::mono::lower::extras::Extras;
use crate::mono::lower::hyper::{Hyper, HyperTensors};
use crate::mono::lower::matrix::Matrix;

impl Weights<'_> {
    /// Row `row` of a matrix that attention over entries has, as [`Weights::source`] says it.
    pub(super) fn compressed_source(
        &self,
        class: usize,
        matrix: Matrix,
        row: u32,
    ) -> Option<(usize, u32, u32)> {
        let (c, part) = self.class(class);
        let (of, padded) = (c.compressed?, part.compressed?);
        let [dim, _, index_dim] = padded.widths;
        match matrix {
            Matrix::LatentDown => {
                // Dealt out to all machines.
                let row = row + self.rank * self.partition.blocks * part.tiling(matrix).rows;
                let which = padded.down.iter().rposition(|first| *first <= row)?;
                // Of parts that are empty the last one that begins here is meant.
                let real = match which {
                    0 => of.query_rank,
                    6 => padded.index_heads,
                    1..6 => u32::MAX,
                    _ => 0,
                };
                let at = row - padded.down[which];
                (at < real).then_some((which, 0, at))
            }
            Matrix::QueryUp => {
                let heads = self.model.heads_of(self.rank, c)[0].clone();
                let (head, at) = (row / part.head_dim, row % part.head_dim);
                if head < c.heads {
                    let head = heads.start + head;
                    let real = head < heads.end && at < dim;
                    return real.then_some((0, 0, head * dim + at));
                }
                let at = row - c.heads * part.head_dim;
                (at < padded.index_heads * index_dim).then_some((1, 0, at))
            }
            Matrix::ValueUp => {
                let (group, at) = (row / padded.group[0], row % padded.group[0]);
                let first = (self.rank * of.groups + group) * of.group_rank;
                (group < of.groups && at < of.group_rank).then_some((0, 0, first + at))
            }
            _ => None,
        }
    }

    /// What attention over entries has besides products.
    pub(super) fn compressed_numbers(
        &self,
        at: &Extras,
        of: &CompressedTensors,
        put: &mut dyn FnMut(u32, &mut dyn Iterator<Item = f32>),
    ) {
        let [query, key] = of.norms;
        put(at.latent_norms[0], &mut self.numbers(query).into_iter());
        put(at.compressed_norms[0], &mut self.numbers(key).into_iter());
        for (n, entries) in of.entries.iter().enumerate() {
            let Some(entries) = entries else { continue };
            put(at.compressed_norms[1 + n], &mut self.numbers(entries.norm).into_iter());
            put(at.entry_biases[n], &mut self.numbers(entries.bias).into_iter());
        }
    }

    /// The experts of each token. No number is rounded, however the checkpoint is stored.
    pub(super) fn ids(&self, table: u32) -> Vec<u32> {
        let stored = Stored::of(self.tensor(table), 0, self.buffers);
        let (mut row_of, mut out) = (vec![0.0; stored.cols], Vec::new());
        for row in 0..stored.rows {
            row_to_f32(&stored, row, &mut row_of);
            out.extend(row_of.iter().map(|id| *id as u32));
        }
        out
    }

    /// What a module takes of several residual streams by: of each block, of each row, of each
    /// stream the numbers that the block owns; then what is beside them, and what products are
    /// multiplied by.
    pub(super) fn hyper_numbers(&self, hyper: &Hyper, of: &HyperTensors, joins: bool) -> Vec<f32> {
        let (own, hidden) = (self.partition.residual, self.model.hidden);
        let weights = self.numbers(of.weight);
        let mut out = Vec::new();
        for block in 0..self.partition.blocks {
            for row in 0..hyper.rows(joins) {
                for stream in 0..hyper.streams {
                    let first = (row * hyper.streams + stream) * hidden;
                    let one = |at: u32| match at < hidden {
                        true => weights[(first + at) as usize],
                        false => 0.0,
                    };
                    out.extend((block * own..(block + 1) * own).map(one));
                }
            }
        }
        out.extend(self.numbers(of.base));
        out.extend(self.numbers(of.scale));
        out
    }
}
