//! Weights in the order in which blocks take them: [`Cut`]'s rows, sixteen rows by sixteen columns
//! a tile, in the order of a matrix unit's first operand, as halves.
//!
//! A *unit* is 16 rows x 32 columns, two tiles of 32 bytes a row: lane `4 g + t` of a team takes,
//! of the rows `2 g` and `2 g + 1`, the columns `8 t .. 8 t + 4` (first tile) and the four after
//! them.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::cut::{Cut, Matrix, Split};
use super::model::Model;
use crate::abi::{Dtype, Program, Tensor};
use crate::cpu::matmul::Matrix as Stored;
use crate::cpu::numbers::row_to_f32;
use crate::device::Buffer;
use crate::error::{Error, Result};

/// A program's weights, as they are stored.
pub struct Weights<'a> {
    /// The program.
    pub program: &'a Program,
    /// Its buffers.
    pub buffers: &'a [Buffer],
    /// The program as the monokernel sees it.
    pub model: &'a Model,
    /// Its cut.
    pub cut: &'a Cut,
    /// The machine among those that run it together.
    pub rank: u32,
}

/// One row of a matrix as it is stored.
type Source = Option<(u32, u32, u32)>; // tensor, lane, row

/// Numbers of a row in equal parts, each padded to a width of its own.
#[derive(Clone, Copy)]
struct Parts {
    count: usize,
    real: usize,
    padded: usize,
    /// Numbers of the stored row before the first part.
    skip: usize,
}

impl Weights<'_> {
    fn tensor(&self, index: u32) -> &Tensor {
        &self.program.tensors[index as usize]
    }

    /// `row` of a tensor, as halves into `out`, padded.
    fn row(
        &self,
        source: Source,
        parts: Parts,
        floats: &mut Vec<f32>,
        out: &mut [f16],
    ) -> Result<()> {
        out.fill(f16::ZERO);
        let Some((index, lane, row)) = source else { return Ok(()) };
        let stored = Stored::of(self.tensor(index), lane as usize, self.buffers);
        floats.resize(stored.cols, 0.0);
        row_of(&stored, row as usize, floats);
        if let Some(far) = floats.iter().find(|x| x.abs() > f16::MAX.to_f32()) {
            return Err(Error::InvalidProgram {
                step: usize::MAX,
                detail: format!(
                    "a weight of {far} is beyond float16 (tensor {index}, row {row}); run on the \
                     CPU, or convert the checkpoint"
                ),
            });
        }
        for part in 0..parts.count {
            let from = &floats[(parts.skip + part * parts.real).min(floats.len())..];
            let from = &from[..parts.real.min(from.len())];
            out[part * parts.padded..][..from.len()].convert_from_f32_slice(from);
        }
        Ok(())
    }

    /// Where a feature of a turned head lies in the checkpoint: pairs are neighbours on the device.
    fn feature(&self, at: u32) -> Option<u32> {
        let dim = self.model.head_dim;
        match (at < dim, self.model.interleaved) {
            (false, _) => None,
            (true, true) => Some(at),
            (true, false) => Some(at / 2 + at % 2 * (dim / 2)),
        }
    }

    /// Row `row` of q, k and v one after another, heads padded: (which, row in the checkpoint).
    fn qkv_row(&self, row: u32) -> Option<(usize, u32)> {
        let (m, dim) = (self.model, self.cut.head_dim);
        let (head, at) = (row / dim, row % dim);
        let real = |head: u32, at: u32| head * m.head_dim + at;
        if head < m.heads {
            Some((0, real(head, self.feature(at)?)))
        } else if head < m.heads + m.kv_heads {
            Some((1, real(head - m.heads, self.feature(at)?)))
        } else if head < m.heads + 2 * m.kv_heads && at < m.head_dim {
            Some((2, real(head - m.heads - m.kv_heads, at)))
        } else {
            None
        }
    }

    /// Row `row` (over all blocks of a lane) of a layer's matrix.
    fn source(&self, layer: usize, matrix: Matrix, lane: u32, row: u32) -> Source {
        let (m, l) = (self.model, &self.model.layer[layer]);
        match matrix {
            Matrix::Qkv => {
                let (which, row) = self.qkv_row(row)?;
                let rows = if which == 0 { m.heads } else { m.kv_heads } * m.head_dim;
                self.lane_row(l.qkv[which], lane, row, rows)
            }
            Matrix::Output => (row < m.hidden).then(|| self.lane_of(l.outputs[0], lane, row)),
            Matrix::Down => (row < m.hidden).then(|| self.lane_of(l.outputs[1], lane, row)),
            Matrix::GateUp => {
                let tensor = l.gate_up[(row % 2) as usize];
                (row / 2 < m.ffn).then(|| self.lane_row(tensor, lane, row / 2, m.ffn))?
            }
        }
    }

    /// A row of a lane's own matrix, all of whose columns (or a slice of them) are the lane's.
    fn lane_of(&self, tensor: u32, lane: u32, row: u32) -> (u32, u32, u32) {
        (tensor, if self.model.sliced { 0 } else { self.lane_all(lane) }, row)
    }

    /// A row of a lane's `rows` rows: of its own matrix, or of its slice of the whole one.
    fn lane_row(&self, tensor: u32, lane: u32, row: u32, rows: u32) -> Source {
        if !self.model.sliced {
            return Some((tensor, self.lane_all(lane), row));
        }
        let row = self.lane_all(lane) * rows + row;
        (row < self.tensor(tensor).rows).then_some((tensor, 0, row))
    }

    /// A lane of this machine among all lanes.
    fn lane_all(&self, lane: u32) -> u32 {
        self.rank * self.model.lanes + lane
    }

    fn parts(&self, matrix: Matrix, lane: u32) -> Parts {
        let (m, c) = (self.model, self.cut);
        let lane = if m.sliced { self.lane_all(lane) } else { 0 };
        let (count, real, padded, skip) = match matrix {
            Matrix::Qkv | Matrix::GateUp => (1, m.hidden, c.hidden, 0),
            Matrix::Output => (m.heads, m.head_dim, c.head_dim, lane * m.heads * m.head_dim),
            Matrix::Down => (1, m.ffn, c.ffn, lane * m.ffn),
        };
        let [count, real, padded, skip] = [count, real, padded, skip].map(|n| n as usize);
        Parts { count, real, padded, skip }
    }

    /// One layer of one block's line.
    ///
    /// # Errors
    /// [`Error::InvalidProgram`] for weights beyond float16.
    pub fn layer(&self, block: u32, layer: usize, out: &mut Vec<u8>) -> Result<()> {
        let each = self.cut.blocks_a_lane(self.model);
        let (lane, rank) = (block / each, block % each);
        for (matrix, split) in &self.cut.layer {
            let parts = self.parts(*matrix, lane);
            let source = |row| self.source(layer, *matrix, lane, rank * split.rows + row);
            self.matrix(split, parts, source, out)?;
        }
        Ok(())
    }

    /// The head's part of one block's line.
    ///
    /// # Errors
    /// [`Error::InvalidProgram`] for weights beyond float16.
    pub fn head(&self, block: u32, out: &mut Vec<u8>) -> Result<()> {
        let (m, c) = (self.model, self.cut);
        let per_lane = m.head_mode == crate::abi::HeadMode::PerLane;
        let each = c.blocks_a_lane(m);
        let (lane, seat) =
            if per_lane { (block / each, block % each) } else { (0, self.rank * c.blocks + block) };
        let concat = m.head_mode == crate::abi::HeadMode::Concat;
        let count = if concat { m.lanes_all() } else { 1 };
        let (real, padded) = (m.hidden as usize, c.hidden as usize);
        let parts = Parts { count: count as usize, real, padded, skip: 0 };
        let passes = (0..c.head_passes).map(|_| c.head).chain(c.tail);
        let mut first = seat * c.rows_head;
        for split in passes {
            let source = |row: u32| -> Source {
                let row = first + row;
                (row < m.vocab).then(|| match per_lane {
                    true => self.lane_row(m.head, lane, row, m.vocab),
                    false => Some((m.head, 0, row)),
                })?
            };
            self.matrix(&split, parts, source, out)?;
            first += split.rows;
        }
        Ok(())
    }

    /// A block's rows of one matrix, stage by stage.
    fn matrix(
        &self,
        split: &Split,
        parts: Parts,
        source: impl Fn(u32) -> Source,
        out: &mut Vec<u8>,
    ) -> Result<()> {
        let (rows, k) = (split.rows as usize, split.k as usize);
        let mut floats = Vec::new();
        let mut all = vec![f16::ZERO; rows * k];
        for (row, to) in all.chunks_exact_mut(k).enumerate() {
            self.row(source(row as u32), parts, &mut floats, to)?;
        }
        let pairs = k / 32 / split.k_warps as usize;
        for stage in 0..split.stages as usize {
            for warp in 0..split.k_warps as usize {
                for pair in 0..split.chunk as usize {
                    let column = (warp * pairs + stage * split.chunk as usize + pair) * 32;
                    (0..rows).step_by(16).for_each(|row| unit(&all, k, row, column, rows, out));
                }
            }
        }
        Ok(())
    }

    /// The embedding table as halves, `[vocab][hidden]` padded, rows `from..to`.
    ///
    /// # Errors
    /// [`Error::InvalidProgram`] for weights beyond float16.
    pub fn embedding(&self, from: u32, to: u32) -> Result<Vec<u8>> {
        let parts = Parts {
            count: 1,
            real: self.model.hidden as usize,
            padded: self.cut.hidden as usize,
            skip: 0,
        };
        self.table((from..to).map(|row| Some((self.model.embed, 0, row))), parts)
    }

    /// All norm scales as halves, `[2 layers + 1][norm lanes][hidden]` padded.
    ///
    /// # Errors
    /// [`Error::InvalidProgram`] for weights beyond float16.
    pub fn norms(&self) -> Result<Vec<u8>> {
        let m = self.model;
        let all = m.layer.iter().flat_map(|l| l.norms).chain([m.final_norm]);
        let parts =
            Parts { count: 1, real: m.hidden as usize, padded: self.cut.hidden as usize, skip: 0 };
        let rows = all.flat_map(|t| (0..m.norm_lanes).map(move |lane| Some((t, 0, lane))));
        self.table(rows, parts)
    }

    fn table(&self, rows: impl Iterator<Item = Source>, parts: Parts) -> Result<Vec<u8>> {
        let mut floats = Vec::new();
        let mut halves = vec![f16::ZERO; parts.count * parts.padded];
        let mut out = Vec::new();
        for row in rows {
            self.row(row, parts, &mut floats, &mut halves)?;
            halves.iter().for_each(|h| out.extend(h.to_le_bytes()));
        }
        Ok(out)
    }

    /// Norm scales of heads as halves, `[layers][q, k][head_dim]`, in the device's order.
    pub fn head_norms(&self) -> Vec<u8> {
        let mut floats = vec![0.0; self.model.head_dim as usize];
        let mut out = Vec::new();
        for norm in self.model.layer.iter().flat_map(|l| l.head_norms) {
            row_of(&Stored::of(self.tensor(norm), 0, self.buffers), 0, &mut floats);
            for at in 0..self.cut.head_dim {
                let value = self.feature(at).map_or(0.0, |f| floats[f as usize]);
                out.extend(f16::from_f32(value).to_le_bytes());
            }
        }
        out
    }

    /// Biases of q, k, v as floats, `[layers][lanes][rows of all blocks]`.
    pub fn biases(&self) -> Vec<u8> {
        let (m, c) = (self.model, self.cut);
        let rows = c.rows(Matrix::Qkv) * c.blocks_a_lane(m);
        let mut out = Vec::new();
        for layer in &m.layer {
            for lane in 0..m.lanes {
                let lane = self.lane_all(lane);
                let values = layer.biases.map(|bias| self.bias(bias, lane));
                for row in 0..rows {
                    let at = self.qkv_row(row).map(|(which, row)| {
                        let rows = if which == 0 { m.heads } else { m.kv_heads } * m.head_dim;
                        (which, if m.sliced { lane * rows + row } else { row })
                    });
                    let value = at.map_or(0.0, |(which, row)| values[which][row as usize]);
                    out.extend(value.to_le_bytes());
                }
            }
        }
        out
    }

    /// A lane's numbers of a bias: a row a lane, or one row for all.
    fn bias(&self, index: u32, lane: u32) -> Vec<f32> {
        let tensor = self.tensor(index);
        let stored = Stored::of(tensor, 0, self.buffers);
        let mut floats = vec![0.0; stored.cols];
        row_of(&stored, if tensor.rows > 1 { lane as usize } else { 0 }, &mut floats);
        floats
    }
}

/// A row as numbers. Float32 checkpoints are rounded to bfloat16, as the field publishes them in 16
/// bits: half the digits, but no range is lost, and the result is that of the published model.
fn row_of(stored: &Stored<'_>, row: usize, out: &mut [f32]) {
    row_to_f32(stored, row, out);
    if stored.dtype == Dtype::F32 {
        out.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
    }
}

/// One unit: rows `row..` (up to 16, fewer at the end) x 32 columns from `column`.
fn unit(all: &[f16], k: usize, row: usize, column: usize, rows: usize, out: &mut Vec<u8>) {
    let here = (rows - row).min(16);
    for half in 0..2 {
        for pair in 0..here / 2 {
            let a = &all[(row + 2 * pair) * k + column..][..32];
            let b = &all[(row + 2 * pair + 1) * k + column..][..32];
            for t in 0..4 {
                for two in 0..2 {
                    let at = 8 * t + 4 * half + 2 * two;
                    for x in [a[at], a[at + 1], b[at], b[at + 1]] {
                        out.extend_from_slice(&x.to_le_bytes());
                    }
                }
            }
        }
    }
}
