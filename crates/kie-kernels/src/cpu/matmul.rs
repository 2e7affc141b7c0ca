//! Matrix times a few columns: the decode path, bound by memory.
//!
//! Weights are read in place (row-major, any alignment), once for all columns, a few rows at a
//! time; activations and sums are float32. Invariant: the bits of one output depend on the level,
//! its row's weights and its column only: every (row, column) has accumulators of its own, filled
//! along the row in an order that is a function of the level, the encoding and the row's length;
//! the number of columns, the row range, the alignment and the register blocking do not enter.

// Register blocks are indexed by the same number as pointers and other blocks.
#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use crate::abi::{Codes, Dtype, Tensor};
use crate::device::Buffer;

use super::numbers::number_to_f32;
use super::simd::{dispatch, prefetch, Kernel, Level, Vector};

/// Scales of a matrix, one for each group of `block_rows` x `block_cols` weights.
#[derive(Debug, Clone, Copy)]
pub struct Scales<'a> {
    /// Little-endian `dtype`, `[ceil(rows / block_rows), ceil(cols / block_cols)]`, any alignment.
    pub data: &'a [u8],
    /// Storage type of a scale.
    pub dtype: Dtype,
    /// Zero points of the groups, a byte each; none: codes are signed.
    pub zeros: Option<&'a [u8]>,
    /// Rows that share a scale.
    pub block_rows: usize,
    /// Columns that share a scale.
    pub block_cols: usize,
}

impl Scales<'_> {
    /// Index of the first scale of `row`, of a matrix with `cols` columns.
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

    /// The zero point at `index`; 0 without zero points.
    #[inline(always)]
    pub(crate) fn zero(&self, index: usize) -> f32 {
        self.zeros.map_or(0.0, |zeros| f32::from(zeros[index]))
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
    /// Scales beside the codes.
    pub scales: Option<Scales<'a>>,
}

impl<'a> Matrix<'a> {
    /// One lane's matrix of a program's tensor, in the buffers that the program was checked with.
    pub fn of(tensor: &Tensor, lane: usize, buffers: &'a [Buffer]) -> Self {
        let part = |buffer: u32, offset: u64, bytes: u64| {
            let begin = (offset + bytes * lane as u64) as usize;
            &buffers[buffer as usize].host()[begin..begin + bytes as usize]
        };
        let beside = |offset, bytes| part(tensor.scale_buffer, offset, bytes);
        Self::described(
            tensor,
            part(tensor.buffer, tensor.offset, tensor.lane_bytes()),
            || beside(tensor.scale_offset, tensor.scale_bytes()),
            || beside(tensor.zero_offset, tensor.zero_bytes()),
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
        Self { data, codes: encoding.codes, rows, cols, scales }
    }

    /// Bytes from one row to the next.
    #[inline(always)]
    pub fn row_bytes(&self) -> usize {
        self.codes.bytes_of(self.cols)
    }

    /// The codes of a row.
    pub fn row(&self, row: usize) -> &'a [u8] {
        &self.data[row * self.row_bytes()..(row + 1) * self.row_bytes()]
    }

    /// Asserts that the slices have the sizes that the dims ask for.
    pub(crate) fn check(&self, rows: &Range<usize>) {
        assert_eq!(self.data.len(), self.rows * self.row_bytes(), "weight bytes");
        assert!(rows.start <= rows.end && rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        if let Some(s) = &self.scales {
            assert!(s.block_rows > 0 && s.block_cols > 0, "empty scale blocks");
            let blocks = self.rows.div_ceil(s.block_rows) * self.cols.div_ceil(s.block_cols);
            assert_eq!(s.data.len(), s.dtype.bytes() * blocks, "scale bytes");
            assert!(s.zeros.is_none_or(|z| z.len() == blocks), "zero points");
        }
    }
}

/// `y[c * y_stride + (r - rows.start)] = sum over k of m[r, k] * x[c * m.cols + k]` for the rows
/// `r` of `rows` and the columns `c < n`.
///
/// Traffic: the rows once, `x` once for each row block (from cache).
///
/// # Panics
/// When a slice is shorter than the dims ask for, or the machine lacks `level`.
pub fn matmul(
    level: Level,
    m: &Matrix<'_>,
    rows: Range<usize>,
    x: &[f32],
    n: usize,
    y: &mut [f32],
    y_stride: usize,
) {
    m.check(&rows);
    if rows.is_empty() || n == 0 {
        return;
    }
    assert!(x.len() >= n * m.cols, "x holds {} numbers, wanted {n} x {}", x.len(), m.cols);
    assert!(n == 1 || y_stride >= rows.len(), "y_stride {y_stride} below {} rows", rows.len());
    assert!(y.len() >= (n - 1) * y_stride + rows.len(), "y holds {} numbers", y.len());
    dispatch(level, Decode { m, rows, x, n, y, y_stride });
}

/// The arguments of [`matmul`], checked.
struct Decode<'a> {
    m: &'a Matrix<'a>,
    rows: Range<usize>,
    x: &'a [f32],
    n: usize,
    y: &'a mut [f32],
    y_stride: usize,
}

impl Kernel for Decode<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(mut self) {
        // SAFETY: the caller has V's level; `matmul` checked the slices.
        unsafe {
            match self.m.codes {
                Codes::F32 => self.all::<V, F32>(),
                Codes::F16 => self.all::<V, F16>(),
                Codes::Bf16 => self.all::<V, Bf16>(),
                Codes::E4m3 => self.all::<V, F8>(),
            }
        }
    }
}

/// How weights of one kind of codes become float32 lanes.
pub(super) trait Weight {
    /// Bytes of one weight.
    const BYTES: usize;
    /// Vectors that are loaded together, at most 4.
    const GROUP: usize;
    /// One vector. Safety: V's level, `LANES * BYTES` readable bytes.
    unsafe fn one<V: Vector>(from: *const u8) -> V;
    /// `GROUP` vectors in order; the rest of the array repeats. Safety: as `one`, `GROUP` times.
    unsafe fn group<V: Vector>(from: *const u8) -> [V; 4];
}

/// See [`Codes`].
pub(super) struct F32;
/// See [`Codes`].
pub(super) struct F16;
/// See [`Codes`].
pub(super) struct Bf16;
/// See [`Codes`].
pub(super) struct F8;

impl Weight for F32 {
    const BYTES: usize = 4;
    const GROUP: usize = 2;
    #[inline(always)]
    unsafe fn one<V: Vector>(from: *const u8) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load(from.cast()) }
    }
    #[inline(always)]
    unsafe fn group<V: Vector>(from: *const u8) -> [V; 4] {
        // SAFETY: the caller's promise for two vectors.
        let (a, b) = unsafe { (V::load(from.cast()), V::load(from.add(4 * V::LANES).cast())) };
        [a, b, a, b]
    }
}

impl Weight for F16 {
    const BYTES: usize = 2;
    const GROUP: usize = 2;
    #[inline(always)]
    unsafe fn one<V: Vector>(from: *const u8) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load_f16(from) }
    }
    #[inline(always)]
    unsafe fn group<V: Vector>(from: *const u8) -> [V; 4] {
        // SAFETY: the caller's promise for two vectors.
        let (a, b) = unsafe { (V::load_f16(from), V::load_f16(from.add(2 * V::LANES))) };
        [a, b, a, b]
    }
}

impl Weight for Bf16 {
    const BYTES: usize = 2;
    const GROUP: usize = 2;
    #[inline(always)]
    unsafe fn one<V: Vector>(from: *const u8) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load_bf16(from) }
    }
    #[inline(always)]
    unsafe fn group<V: Vector>(from: *const u8) -> [V; 4] {
        // SAFETY: the caller's promise for two vectors.
        let [a, b] = unsafe { V::load_bf16x2(from) };
        [a, b, a, b]
    }
}

impl Weight for F8 {
    const BYTES: usize = 1;
    const GROUP: usize = 4;
    #[inline(always)]
    unsafe fn one<V: Vector>(from: *const u8) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load_f8(from) }
    }
    #[inline(always)]
    unsafe fn group<V: Vector>(from: *const u8) -> [V; 4] {
        // SAFETY: the caller's promise for four vectors.
        unsafe { V::load_f8x4(from) }
    }
}

/// Bytes between a row's load and the prefetch that runs ahead of it.
const AHEAD: usize = 2048;

impl Decode<'_> {
    /// All rows. Safety: V's level; the slices were checked.
    #[inline(always)]
    unsafe fn all<V: Vector, W: Weight>(&mut self) {
        let mut r = self.rows.start;
        // SAFETY: rows r.. lie in the range; the caller's promise otherwise.
        unsafe {
            while r + 4 <= self.rows.end {
                self.four::<V, W>(r);
                r += 4;
            }
            while r < self.rows.end {
                for c in 0..self.n {
                    self.tile::<V, W, 1, 1>(r, c);
                }
                r += 1;
            }
        }
    }

    /// Four rows from `r`, all columns: blocks that fit the registers, since what they leave out
    /// waits in the first cache. Safety: as `all`; the rows lie in the range.
    #[inline(always)]
    unsafe fn four<V: Vector, W: Weight>(&mut self, r: usize) {
        let mut c = 0;
        while c < self.n {
            let left = self.n - c;
            // SAFETY: the columns c.. exist; the caller's promise otherwise.
            c += unsafe {
                if left >= 8 && V::REGISTERS == 32 {
                    self.tile::<V, W, 2, 8>(r, c);
                    self.tile::<V, W, 2, 8>(r + 2, c);
                    8
                } else if left >= 4 && V::REGISTERS == 32 {
                    self.tile::<V, W, 4, 4>(r, c);
                    4
                } else if left >= 2 && V::REGISTERS >= 16 {
                    self.tile::<V, W, 4, 2>(r, c);
                    2
                } else {
                    self.tile::<V, W, 4, 1>(r, c);
                    1
                }
            };
        }
    }

    /// `R` rows x `N` columns. Safety: as `all`; rows and columns exist.
    #[inline(always)]
    unsafe fn tile<V: Vector, W: Weight, const R: usize, const N: usize>(
        &mut self,
        r: usize,
        c: usize,
    ) {
        let cols = self.m.cols;
        let block_cols = self.m.scales.map_or(cols.max(1), |s| s.block_cols);
        let mut factors = [0; R];
        if let Some(s) = &self.m.scales {
            for i in 0..R {
                factors[i] = s.first(r + i, cols);
            }
        }
        // SAFETY: the caller has V's level.
        let mut total = unsafe { [[V::splat(0.0); N]; R] };
        for block in 0..cols.div_ceil(block_cols) {
            let k = block * block_cols;
            // SAFETY: the caller's promise: the rows and columns exist, and `check` saw the sizes.
            unsafe {
                let w = self.m.data.as_ptr().add(r * cols * W::BYTES);
                let x = self.x.as_ptr().add(c * cols);
                let part = segment::<V, W, R, N>(w, x, cols, k, cols.min(k + block_cols));
                for i in 0..R {
                    let scale = match &self.m.scales {
                        None => 1.0,
                        Some(s) => s.at(factors[i] + block),
                    };
                    let scale = V::splat(scale);
                    for j in 0..N {
                        total[i][j] = part[i][j].fma(scale, total[i][j]);
                    }
                }
            }
        }
        for (i, row) in total.iter().enumerate() {
            for (j, lanes) in row.iter().enumerate() {
                self.y[(c + j) * self.y_stride + r + i - self.rows.start] = lanes.sum();
            }
        }
    }
}

/// Lane sums over `k..end` of `R` rows (from `w`, `cols` apart) with `N` columns (from `x`,
/// `cols` apart). Safety: V's level; the rows and columns are readable.
#[inline(always)]
unsafe fn segment<V: Vector, W: Weight, const R: usize, const N: usize>(
    w: *const u8,
    x: *const f32,
    cols: usize,
    mut k: usize,
    end: usize,
) -> [[V; N]; R] {
    let step = V::LANES * W::GROUP;
    // SAFETY: all offsets stay below `end <= cols` of existing rows and columns; the caller has
    // the level.
    unsafe {
        let mut acc = [[V::splat(0.0); N]; R];
        while k + step <= end {
            let mut weights = [[V::splat(0.0); 4]; R];
            // Past the rows' end comes the start of the next `R` rows.
            let ahead = k + AHEAD / W::BYTES;
            let ahead = if ahead < cols { ahead } else { ahead + (R - 1) * cols };
            for i in 0..R {
                let at = w.add((i * cols + k) * W::BYTES);
                prefetch(w.wrapping_add((i * cols + ahead) * W::BYTES));
                weights[i] = W::group::<V>(at);
            }
            for g in 0..W::GROUP {
                for j in 0..N {
                    let column = V::load(x.add(j * cols + k + g * V::LANES));
                    for i in 0..R {
                        acc[i][j] = weights[i][g].fma(column, acc[i][j]);
                    }
                }
            }
            k += step;
        }
        while k < end {
            let len = V::LANES.min(end - k);
            for i in 0..R {
                let weight = part::<V, W>(w.add((i * cols + k) * W::BYTES), len);
                for j in 0..N {
                    let column = V::load_part(x.add(j * cols + k), len);
                    acc[i][j] = weight.fma(column, acc[i][j]);
                }
            }
            k += len;
        }
        acc
    }
}

/// The first `len <= LANES` weights at `from`, then zeros. Safety: V's level, readable bytes.
#[inline(always)]
pub(super) unsafe fn part<V: Vector, W: Weight>(from: *const u8, len: usize) -> V {
    if len == V::LANES {
        // SAFETY: the caller's promise.
        return unsafe { W::one(from) };
    }
    let mut bytes = [0u8; 64];
    // SAFETY: `len * BYTES <= 16 * 4`, and the caller promised them readable.
    unsafe {
        std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), len * W::BYTES);
        W::one(bytes.as_ptr())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use super::*;
    use crate::cpu::simd::{available, f8_to_f32};
    use proptest::prelude::*;

    /// A matrix that owns its bytes, `skew` bytes off alignment.
    pub(crate) struct Owned {
        bytes: Vec<u8>,
        skew: usize,
        codes: Codes,
        rows: usize,
        cols: usize,
        scales: Vec<u8>,
        block: Option<(usize, usize)>,
    }

    /// Numbers in -1..1 from a counter-based generator.
    pub(crate) fn noise(seed: u64, len: usize) -> Vec<f32> {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        };
        (0..len).map(|_| next()).collect()
    }

    impl Owned {
        pub(crate) fn random(
            codes: Codes,
            (rows, cols): (usize, usize),
            block: Option<(usize, usize)>,
            skew: usize,
            seed: u64,
        ) -> Self {
            let mut bytes = vec![0u8; skew];
            for v in noise(seed, rows * cols) {
                match codes {
                    Codes::F32 => bytes.extend(v.to_le_bytes()),
                    Codes::F16 => bytes.extend(half::f16::from_f32(v).to_le_bytes()),
                    Codes::Bf16 => bytes.extend(half::bf16::from_f32(v).to_le_bytes()),
                    // Any code but NaN.
                    Codes::E4m3 => {
                        let code = v.to_bits() as u8;
                        bytes.push(if code & 0x7f == 0x7f { code ^ 1 } else { code });
                    }
                }
            }
            let mut scales = Vec::new();
            if let Some((br, bc)) = block {
                for s in noise(seed + 1, rows.div_ceil(br) * cols.div_ceil(bc)) {
                    scales.extend((s * 0.01).to_le_bytes());
                }
            }
            Self { bytes, skew, codes, rows, cols, scales, block }
        }

        pub(crate) fn matrix(&self) -> Matrix<'_> {
            Matrix {
                data: &self.bytes[self.skew..],
                codes: self.codes,
                rows: self.rows,
                cols: self.cols,
                scales: self.block.map(|(block_rows, block_cols)| Scales {
                    data: &self.scales,
                    dtype: Dtype::F32,
                    zeros: None,
                    block_rows,
                    block_cols,
                }),
            }
        }

        /// The same numbers at another alignment.
        pub(crate) fn shifted(&self, skew: usize) -> Self {
            let mut bytes = vec![0u8; skew];
            bytes.extend(&self.bytes[self.skew..]);
            Self { bytes, skew, scales: self.scales.clone(), ..*self }
        }

        pub(crate) fn weight(&self, r: usize, k: usize) -> f64 {
            let b = &self.bytes[self.skew + (r * self.cols + k) * self.codes.bytes_of(1)..];
            let value = match self.codes {
                Codes::F32 => f32::from_le_bytes(b[..4].try_into().unwrap()),
                Codes::F16 => half::f16::from_le_bytes([b[0], b[1]]).to_f32(),
                Codes::Bf16 => half::bf16::from_le_bytes([b[0], b[1]]).to_f32(),
                Codes::E4m3 => f8_to_f32(b[0]),
            };
            let scale = match self.block {
                None => 1.0,
                Some((_, bc)) => {
                    let scales = self.matrix().scales.unwrap();
                    scales.at(scales.first(r, self.cols) + k / bc)
                }
            };
            f64::from(value) * f64::from(scale)
        }

        /// The product in float64 and the sum of magnitudes, which bounds the rounding.
        pub(crate) fn product(&self, r: usize, x: &[f32]) -> (f64, f64) {
            let mut sums = (0.0, 0.0);
            for (k, &v) in x.iter().enumerate() {
                let term = self.weight(r, k) * f64::from(v);
                sums = (sums.0 + term, sums.1 + term.abs());
            }
            sums
        }
    }

    pub(crate) fn codes() -> impl Strategy<Value = Codes> {
        prop_oneof![Just(Codes::F32), Just(Codes::F16), Just(Codes::Bf16), Just(Codes::E4m3)]
    }

    pub(crate) fn blocks() -> impl Strategy<Value = Option<(usize, usize)>> {
        prop_oneof![
            Just(None),
            Just(Some((128, 128))),
            Just(Some((1, 1000))),
            Just(Some((5, 33))),
            Just(Some((16, 64))),
        ]
    }

    fn all(level: Level, m: &Matrix<'_>, x: &[f32], n: usize) -> Vec<f32> {
        let mut y = vec![f32::NAN; n * m.rows];
        matmul(level, m, 0..m.rows, x, n, &mut y, m.rows);
        y
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]

        #[test]
        fn equals_a_float64_product(
            codes in codes(), rows in 1usize..40, cols in 1usize..400, n in 1usize..12,
            block in blocks(), skew in 0usize..5, seed in 1u64..1000,
        ) {
            let owned = Owned::random(codes, (rows, cols), block, skew, seed);
            let x = noise(seed + 7, n * cols);
            for level in available() {
                let y = all(level, &owned.matrix(), &x, n);
                for c in 0..n {
                    for r in 0..rows {
                        let (want, size) = owned.product(r, &x[c * cols..][..cols]);
                        let error = (f64::from(y[c * rows + r]) - want).abs();
                        prop_assert!(error <= 3e-6 * size + 1e-30, "{level:?} {r} {c}: {error}");
                    }
                }
            }
        }

        #[test]
        fn bits_ignore_neighbours_split_and_alignment(
            codes in codes(), rows in 1usize..24, cols in 1usize..300, n in 1usize..10,
            block in blocks(), split in 0usize..24, seed in 1u64..1000,
        ) {
            let owned = Owned::random(codes, (rows, cols), block, 0, seed);
            let other = owned.shifted(3);
            let split = split.min(rows);
            let x = noise(seed + 7, n * cols);
            for level in available() {
                let whole = all(level, &owned.matrix(), &x, n);
                for c in 0..n {
                    let column = &x[c * cols..][..cols];
                    let mut alone = vec![f32::NAN; rows];
                    let (upper, lower) = alone.split_at_mut(split);
                    let m = other.matrix();
                    matmul(level, &m, 0..split, column, 1, upper, 0);
                    matmul(level, &m, split..rows, column, 1, lower, 0);
                    for r in 0..rows {
                        prop_assert_eq!(whole[c * rows + r].to_bits(), alone[r].to_bits());
                    }
                }
            }
        }
    }

    #[test]
    fn every_fp8_code_at_every_level() {
        let codes: Vec<u8> = (0..=255).collect();
        let m = Matrix { data: &codes, codes: Codes::E4m3, rows: 1, cols: 256, scales: None };
        for level in available() {
            for code in 0..256usize {
                let mut x = vec![0f32; 256];
                x[code] = 1.0;
                // The two NaN codes poison a whole row, so they stand in a row without them.
                let row: Vec<u8> =
                    codes.iter().map(|&c| if c & 0x7f == 0x7f { 0 } else { c }).collect();
                let clean = Matrix { data: &row, ..m };
                let mut y = [0f32];
                matmul(level, &clean, 0..1, &x, 1, &mut y, 1);
                assert_eq!(y[0], f8_to_f32(row[code]), "{level:?} code {code:#x}");
            }
            let mut y = [0f32];
            matmul(level, &m, 0..1, &[0f32; 256], 1, &mut y, 1);
            assert!(y[0].is_nan(), "{level:?} hides a NaN code");
        }
        assert_eq!(f8_to_f32(0x7e), 448.0);
        assert_eq!(f8_to_f32(0x81), -(2f32.powi(-9)));
        assert_eq!(f8_to_f32(0x38), 1.0);
    }
}
