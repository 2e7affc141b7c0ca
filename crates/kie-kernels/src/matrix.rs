//! A weight matrix as it is stored: codes, and scales among or beside them.

use std::ops::Range;

use crate::abi::{stored_rows, Codes, Dtype, Tensor};
use crate::buffer::Buffer;
use crate::numbers::{code_to_f32, eight_pairs, number_to_f32, scales_among};
use crate::simd::{Kernel, Vector};

/// Scales of a matrix, one for each group of `block_rows` x `block_cols` weights.
#[derive(Debug, Clone, Copy)]
pub struct Scales<'a> {
    /// Little-endian `dtype`, `[ceil(rows / block_rows), ceil(cols / block_cols)]`, any alignment.
    pub data: &'a [u8],
    /// Storage type of a scale.
    pub dtype: Dtype,
    /// Zero points of the groups, a signed byte each; none: they are 0.
    pub zeros: Option<&'a [u8]>,
    /// Rows that share a scale.
    pub block_rows: usize,
    /// Columns that share a scale.
    pub block_cols: usize,
}

impl Scales<'_> {
    /// Index of the first scale of the stored row `row`, of a matrix with `cols` columns.
    #[inline(always)]
    pub(crate) fn first(&self, row: usize, cols: usize) -> usize {
        row / self.block_rows * cols.div_ceil(self.block_cols)
    }

    /// The scale at `index`, which is [`Scales::first`] plus the block column.
    ///
    /// # Panics
    /// When it lies outside `data`.
    #[inline(always)]
    pub(crate) fn at(&self, index: usize) -> f32 {
        let size = self.dtype.bytes();
        number_to_f32(self.dtype, &self.data[size * index..size * (index + 1)])
    }

    /// Scales of `LANES` groups from `first` on, and their offsets. Safety: V's level.
    #[inline(always)]
    pub(crate) unsafe fn vector<V: Vector>(&self, first: usize) -> [V; 2] {
        let size = self.dtype.bytes();
        let from = self.data[first * size..(first + V::LANES) * size].as_ptr();
        // SAFETY: the slice has LANES scales; the caller has the level.
        unsafe {
            let scale: V = match self.dtype {
                Dtype::F32 => V::load(from.cast()),
                Dtype::F16 => V::load_f16(from),
                Dtype::Bf16 => V::load_bf16(from),
                Dtype::F8E8m0 => V::load_e8m0(from),
                Dtype::F8E4m3 => V::load_f8(from),
            };
            let none = V::splat(0.0);
            let Some(zeros) = self.zeros else {
                return [scale, none];
            };
            let zeros = V::load_i8(zeros[first..first + V::LANES].as_ptr());
            [scale, none.sub(zeros).mul(scale)]
        }
    }

    /// The zero point at `index`; 0 without zero points.
    #[inline(always)]
    pub(crate) fn zero(&self, index: usize) -> f32 {
        self.zeros.map_or(0.0, |zeros| f32::from(zeros[index] as i8))
    }
}

/// Groups whose factors are read together.
pub(crate) const FACTORS: usize = 16;

/// Scales and offsets of groups of one row: a number is `scale * code + offset`.
#[derive(Clone, Copy)]
pub(crate) struct Factors {
    pub scales: [f32; FACTORS],
    pub offsets: [f32; FACTORS],
}

impl Factors {
    pub const NONE: Self = Self { scales: [1.0; FACTORS], offsets: [0.0; FACTORS] };
}

/// [`Matrix::factors`] as a body of its own.
pub(crate) struct FactorsOf<'a> {
    pub m: &'a Matrix<'a>,
    pub row: usize,
    pub group: usize,
    pub count: usize,
    pub factors: &'a mut Factors,
}

impl Kernel for FactorsOf<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // SAFETY: the caller has V's level.
        unsafe { self.m.factors::<V>(self.row, self.group, self.count, self.factors) };
    }
}

/// A weight matrix as it lies in a checkpoint: row-major, possibly unaligned.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    /// `rows` rows of codes.
    pub data: &'a [u8],
    /// What the codes stand for.
    pub codes: Codes,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// Stored rows from one row to the next.
    pub row_step: usize,
    /// Scales beside the codes.
    pub scales: Option<Scales<'a>>,
}

impl<'a> Matrix<'a> {
    /// One lane's matrix of a program's tensor, in the buffers that the program was checked with.
    pub fn of(tensor: &Tensor, lane: usize, buffers: &'a [Buffer]) -> Self {
        let part = |buffer: u32, offset: u64, range: Range<u64>| {
            let [begin, end] = [range.start, range.end].map(|at| (offset + at) as usize);
            &buffers[buffer as usize].host()[begin..end]
        };
        let (lane, beside) = (lane as u32, tensor.scale_buffer);
        Self::described(
            tensor,
            part(tensor.buffer, tensor.offset, tensor.lane_range(lane)),
            || part(beside, tensor.scale_offset, tensor.scale_range(lane)),
            || part(beside, tensor.zero_offset, tensor.zero_range(lane)),
        )
    }

    /// One lane's matrix of a tensor whose bytes are given; scales and zero points are asked for
    /// where the encoding has them.
    pub fn described(
        tensor: &Tensor,
        data: &'a [u8],
        scales: impl FnOnce() -> &'a [u8],
        zeros: impl FnOnce() -> &'a [u8],
    ) -> Self {
        let encoding = &tensor.encoding;
        let scales = encoding.has_scales().then(|| Scales {
            data: scales(),
            dtype: encoding.scale,
            zeros: encoding.zeros.then(zeros),
            block_rows: encoding.group[0] as usize,
            block_cols: encoding.group[1] as usize,
        });
        let (rows, cols) = (tensor.rows as usize, tensor.cols as usize);
        let row_step = tensor.row_step as usize;
        Self { data, codes: encoding.codes, rows, cols, row_step, scales }
    }

    /// Bytes of a row.
    #[inline(always)]
    pub fn row_bytes(&self) -> usize {
        self.codes.bytes_of(self.cols)
    }

    /// Bytes from one row to the next.
    #[inline(always)]
    pub fn stride(&self) -> usize {
        self.row_step * self.row_bytes()
    }

    /// The codes of a row.
    pub fn row(&self, row: usize) -> &'a [u8] {
        &self.data[row * self.stride()..][..self.row_bytes()]
    }

    /// Index of the first scale of a row.
    #[inline(always)]
    pub(crate) fn first_scale(&self, row: usize, scales: &Scales<'_>) -> usize {
        scales.first(row * self.row_step, self.cols)
    }

    /// Columns that share a scale; all where there is none.
    #[inline(always)]
    pub(crate) fn group_cols(&self) -> usize {
        match (self.codes.row().group, &self.scales) {
            (0, None) => self.cols.max(1),
            (0, Some(scales)) => scales.block_cols,
            (group, _) => group as usize,
        }
    }

    /// Scales and offsets of `LANES` groups from `group` on of a row, in one go: where the matrix
    /// goes on behind a row, groups may be of what follows. Safety: V's level.
    #[inline(always)]
    unsafe fn vector_of_groups<V: Vector>(&self, row: usize, group: usize) -> Option<[V; 2]> {
        let piece = self.codes.row();
        // SAFETY: the caller has the level.
        unsafe {
            match &self.scales {
                None if piece.group > 0 => {
                    // As `among` wants them.
                    let aligned = V::LANES.min((piece.numbers / piece.group) as usize);
                    let row = &self.data[row * self.stride()..];
                    let end = self.codes.bytes_of((group + V::LANES) * piece.group as usize);
                    if !group.is_multiple_of(aligned) || end > row.len() {
                        return None;
                    }
                    Some(among::<V>(self.codes, row, group))
                }
                Some(scales) => {
                    let first = self.first_scale(row, scales) + group;
                    if (first + V::LANES) * scales.dtype.bytes() > scales.data.len() {
                        return None;
                    }
                    Some(scales.vector::<V>(first))
                }
                None => None,
            }
        }
    }

    /// Whether codes are not the numbers themselves.
    #[inline(always)]
    pub(crate) fn is_scaled(&self) -> bool {
        self.codes.row().group > 0 || self.scales.is_some()
    }

    /// Whether groups have offsets besides scales.
    #[inline(always)]
    pub(crate) fn has_offsets(&self) -> bool {
        self.has_zeros() || self.codes == Codes::Q4k
    }

    /// Whether groups have zero points.
    #[inline(always)]
    pub(crate) fn has_zeros(&self) -> bool {
        self.scales.is_some_and(|scales| scales.zeros.is_some())
    }

    /// Scale and offset of a group of a row.
    pub(crate) fn factor(&self, row: usize, group: usize) -> [f32; 2] {
        match &self.scales {
            Some(scales) => {
                let index = self.first_scale(row, scales) + group;
                [scales.at(index), -scales.zero(index) * scales.at(index)]
            }
            None if self.codes.row().group > 0 => scales_among(self.codes, self.row(row), group),
            None => [1.0, 0.0],
        }
    }

    /// Those of `count <= FACTORS` groups from `group` on, 1 and 0 behind them. Safety: V's level;
    /// the groups exist.
    #[inline(always)]
    pub(crate) unsafe fn factors<V: Vector>(
        &self,
        row: usize,
        group: usize,
        count: usize,
        out: &mut Factors,
    ) {
        for at in (0..count).step_by(V::LANES) {
            // SAFETY: the caller has the level; FACTORS has room for whole vectors.
            unsafe {
                if let Some([scales, offsets]) = self.vector_of_groups::<V>(row, group + at) {
                    scales.store(out.scales[at..].as_mut_ptr());
                    offsets.store(out.offsets[at..].as_mut_ptr());
                } else {
                    for at in at..count.min(at + V::LANES) {
                        [out.scales[at], out.offsets[at]] = self.factor(row, group + at);
                    }
                }
            }
        }
        out.scales[count..].fill(1.0);
        out.offsets[count..].fill(0.0);
    }

    /// Asserts that the slices have the sizes that the dims ask for.
    pub(crate) fn check(&self, rows: &Range<usize>) {
        let piece = self.codes.row().numbers as usize;
        assert!(self.cols.is_multiple_of(piece), "{} columns of {}", self.cols, self.codes.name());
        let stored = stored_rows(self.rows as u64, self.row_step as u64) as usize;
        assert_eq!(self.data.len(), stored * self.row_bytes(), "weight bytes");
        assert!(rows.start <= rows.end && rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        if let Some(s) = &self.scales {
            assert!(s.block_rows > 0 && s.block_cols > 0, "empty scale blocks");
            assert!(s.block_cols.is_multiple_of(piece) || s.block_cols >= self.cols, "cut codes");
            let blocks = stored.div_ceil(s.block_rows) * self.cols.div_ceil(s.block_cols);
            assert_eq!(s.data.len(), s.dtype.bytes() * blocks, "scale bytes");
            assert!(s.zeros.is_none_or(|z| z.len() == blocks), "zero points");
        }
    }
}

/// Some rows of a matrix of numbers of `size` bytes that is stored by columns (of `of` rows each, a
/// row `row_step` stored ones behind the one before; `data` begins with the first row), of some of
/// its columns: row after row.
///
/// # Panics
/// Where `data` ends before.
pub fn rows_of_columns(
    data: &[u8],
    (size, of, row_step): (usize, usize, usize),
    rows: Range<usize>,
    cols: Range<usize>,
) -> Vec<u8> {
    // Some rows at a time: what a column has of them lies in few cache lines.
    const TOGETHER: usize = 64;
    let width = cols.len() * size;
    let mut out = vec![0; rows.len() * width];
    for (block, out) in out.chunks_mut((TOGETHER * width).max(1)).enumerate() {
        let first = rows.start + block * TOGETHER;
        for (at, col) in cols.clone().enumerate() {
            let column = &data[col * of * size..];
            for (row, out) in out.chunks_exact_mut(width).enumerate() {
                let from = (first + row) * row_step * size;
                out[at * size..(at + 1) * size].copy_from_slice(&column[from..from + size]);
            }
        }
    }
    out
}

/// Row `row` of a matrix, scales applied, into `out[..cols]`.
pub fn row_to_f32(m: &Matrix<'_>, row: usize, out: &mut [f32]) {
    let bytes = m.row(row);
    for (col, out) in out[..m.cols].iter_mut().enumerate() {
        *out = code_to_f32(m.codes, bytes, col);
    }
    if !m.is_scaled() {
        return;
    }
    for (group, out) in out[..m.cols].chunks_mut(m.group_cols()).enumerate() {
        let [scale, offset] = m.factor(row, group);
        let zero = m.scales.map_or(0.0, |s| s.zero(m.first_scale(row, &s) + group));
        if zero == 0.0 {
            out.iter_mut().for_each(|x| *x = *x * scale + offset);
        } else {
            out.iter_mut().for_each(|x| *x = (*x - zero) * scale);
        }
    }
}

/// Scales of `LANES` groups from `group` on of a row whose scales lie among its codes, and their
/// offsets. A vector's groups begin with a block, or multiples of LANES behind. Safety: V's level.
#[inline(always)]
pub(crate) unsafe fn among<V: Vector>(codes: Codes, row: &[u8], group: usize) -> [V; 2] {
    let piece = codes.row();
    let (per_block, size) = ((piece.numbers / piece.group) as usize, piece.bytes as usize);
    let block = group / per_block * size;
    let half = |at: usize| [row[at], row[at + 1]];
    // SAFETY: slices have what is read; the caller has the level.
    unsafe {
        let none = V::splat(0.0);
        match codes {
            Codes::Q8x0 | Codes::Q4x0 => {
                let halves = &row[block..block + (V::LANES - 1) * size + 2];
                [V::load_halves(halves.as_ptr(), size), none]
            }
            Codes::Q4k => {
                // As many blocks as a vector has eights of lanes.
                let blocks = [block, block + (V::LANES / 8 - 1) * size];
                let (mut bits, mut factors) = ([[0; 2]; 2], [[0.0; 2]; 2]);
                for b in 0..2 {
                    let block = &row[blocks[b]..blocks[b] + 16];
                    let bytes = block[4..].first_chunk().expect("twelve bytes");
                    [bits[0][b], bits[1][b]] = eight_pairs(bytes);
                    factors[0][b] = V::half([block[0], block[1]]);
                    factors[1][b] = -V::half([block[2], block[3]]);
                }
                [
                    V::bytes(bits[0]).mul(V::eights(factors[0])),
                    V::bytes(bits[1]).mul(V::eights(factors[1])),
                ]
            }
            Codes::Q6k => {
                let at = block + 192 + group % per_block;
                let scales = V::load_i8(row[at..at + V::LANES].as_ptr());
                [scales.mul(V::splat(V::half(half(block + 208)))), none]
            }
            Codes::F32
            | Codes::F16
            | Codes::Bf16
            | Codes::E4m3
            | Codes::I8
            | Codes::I4
            | Codes::E2m1 => unreachable!("no scales among the codes"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_made_of_columns_some_at_a_time() {
        // Two matrices whose rows alternate, 70 x 3; the second one's.
        let (rows, cols, step, part) = (70_usize, 3_usize, 2_usize, 1_usize);
        let number = |row: usize, col: usize| (row * cols + col) as u16;
        let mut stored = vec![0xffff_u16; cols * rows * step];
        for (row, col) in (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col))) {
            stored[col * rows * step + row * step + part] = number(row, col);
        }
        let bytes: Vec<u8> = stored[part..].iter().flat_map(|n| n.to_le_bytes()).collect();
        for (some, of) in [(0..rows, 0..cols), (3..69, 1..3), (65..70, 0..1), (9..9, 0..2)] {
            let made = rows_of_columns(&bytes, (2, rows * step, step), some.clone(), of.clone());
            let wanted = some.flat_map(|row| of.clone().map(move |col| number(row, col)));
            assert!(made.into_iter().eq(wanted.flat_map(u16::to_le_bytes)));
        }
    }
}
