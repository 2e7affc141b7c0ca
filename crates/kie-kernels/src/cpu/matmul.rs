//! Matrix times a few columns: the decode path, bound by memory.
//!
//! Weights are read in place (row-major, any alignment), once for all columns, a few rows at a
//! time; activations and sums are float32. Invariant: the bits of one output depend on the level,
//! its row's weights and its column only: every (row, column) has accumulators of its own, filled
//! along the row in an order that is a function of the level, the encoding and the row's length;
//! the number of columns, the row range, the alignment and the register blocking do not enter.
//! Integers meet activations that are split into digits, see [`digits`](super::digits).

// Register blocks are indexed by the same number as pointers and other blocks.
#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use super::codes::{ahead, part, with_coded, Bf16, Unpack, Weight, F16, F32, F8};
use super::digits::{self, Digits};
use crate::abi::Codes;
use crate::field::Columns;
use crate::matrix::{Factors, FactorsOf, FACTORS};
pub use crate::matrix::{Matrix, Scales};
use crate::simd::{dispatch, prefetch, prefetch_near, reads_rows_alone, Kernel, Level, Vector};

/// Piece `c` of `y` at `r - rows.start` = sum over k of `m[r, k] * x[c * m.cols + k]`, for the rows
/// `r` of `rows` and each of the pieces.
///
/// Traffic: the rows once, `x` once for each row block (from cache). `digits` is room to work in.
///
/// # Panics
/// When a slice is shorter than the dims ask for, or the machine lacks `level`.
pub fn matmul(
    level: Level,
    m: &Matrix<'_>,
    rows: Range<usize>,
    x: &[f32],
    y: Columns<'_, f32>,
    digits: &mut Digits,
) {
    m.check(&rows);
    let n = y.count();
    if rows.is_empty() || n == 0 {
        return;
    }
    assert!(x.len() >= n * m.cols, "x holds {} numbers, wanted {n} x {}", x.len(), m.cols);
    assert_eq!(y.width(), rows.len(), "elements of a column, and rows");
    dispatch(level, Decode { m, rows, x, n, y, digits });
}

/// The arguments of [`matmul`], checked.
struct Decode<'a> {
    m: &'a Matrix<'a>,
    rows: Range<usize>,
    x: &'a [f32],
    n: usize,
    y: Columns<'a, f32>,
    digits: &'a mut Digits,
}

impl Kernel for Decode<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(mut self) {
        // SAFETY: the caller has V's level; `matmul` checked the slices.
        unsafe {
            let done = match self.m.codes {
                Codes::F32 => self.plain::<V, F32>(),
                Codes::F16 => self.plain::<V, F16>(),
                Codes::Bf16 => self.plain::<V, Bf16>(),
                Codes::E4m3 => self.plain::<V, F8>(),
                codes => match digits::block_of(self.m) {
                    Some(block) => {
                        with_coded!(codes, D => {
                            let x = (self.x, self.n, self.m.cols);
                            let split = self.digits.split::<V, D>(x, block);
                            digits::Product { m: self.m, rows: self.rows, split, y: self.y }
                                .all::<V, D>();
                        });
                        return;
                    }
                    None => self.rows.start,
                },
            };
            self.unpacked::<V>(done);
        }
    }
}

/// Numbers of four rows.
type Panel = [[f32; PIECE]; 4];
/// Numbers of a row that a panel holds.
const PIECE: usize = 512;

impl Decode<'_> {
    /// Fours of rows, which one is next. Safety: V's level; the slices were checked.
    #[inline(always)]
    unsafe fn plain<V: Vector, W: Weight>(&mut self) -> usize {
        let mut r = self.rows.start;
        while r + 4 <= self.rows.end {
            // SAFETY: rows r.. lie in the range; the caller's promise otherwise.
            unsafe { self.four::<V, W>(r) };
            r += 4;
        }
        r
    }

    /// Four rows from `r`, all columns: blocks that fit the registers, since what they leave out
    /// waits in the first cache. Safety: as `plain`; the rows lie in the range.
    #[inline(always)]
    unsafe fn four<V: Vector, W: Weight>(&mut self, r: usize) {
        let mut c = 0;
        while c < self.n {
            let left = self.n - c;
            // SAFETY: the columns c.. exist; the caller's promise otherwise.
            c += unsafe {
                if left >= 4 && V::REGISTERS == 32 {
                    self.tile::<V, W, 4, 4>(r, c);
                    4
                } else if left >= 2 && V::REGISTERS >= 16 {
                    self.tile::<V, W, 4, 2>(r, c);
                    2
                } else if reads_rows_alone() {
                    for i in 0..4 {
                        self.tile::<V, W, 1, 1>(r + i, c);
                    }
                    1
                } else {
                    self.tile::<V, W, 4, 1>(r, c);
                    1
                }
            };
        }
    }

    /// Rows from `r` on, of any codes, through a panel: one body for all codes where decoding is
    /// little beside what follows, or the rows are few. Its bits are those of `tile`. Safety: as
    /// `plain`.
    #[inline(always)]
    unsafe fn unpacked<V: Vector>(&mut self, mut r: usize) {
        if r == self.rows.end {
            return;
        }
        let mut panel = [[0.0; PIECE]; 4];
        while r < self.rows.end {
            let mut c = 0;
            while c < self.n {
                let left = self.n - c;
                // SAFETY: the columns c.. exist; the caller's promise otherwise.
                c += unsafe {
                    if left >= 4 && V::REGISTERS == 32 {
                        self.through::<V, 4>(r, c, &mut panel);
                        4
                    } else if left >= 2 && V::REGISTERS >= 16 {
                        self.through::<V, 2>(r, c, &mut panel);
                        2
                    } else {
                        self.through::<V, 1>(r, c, &mut panel);
                        1
                    }
                };
            }
            r += 4;
        }
    }

    /// Four rows, or as many as are left, x `N` columns. Safety: as `unpacked`; the columns exist.
    #[inline(always)]
    unsafe fn through<V: Vector, const N: usize>(&mut self, r: usize, c: usize, panel: &mut Panel) {
        let (m, cols, width) = (self.m, self.m.cols, self.m.group_cols());
        let rows = r..self.rows.end.min(r + 4);
        let mut factors = [Factors::NONE; 4];
        let mut held = 0..0;
        // SAFETY: the caller has V's level.
        let mut total = unsafe { [[V::splat(0.0); N]; 4] };
        for group in 0..cols.div_ceil(width) {
            let (mut from, end) = (group * width, cols.min((group + 1) * width));
            if group % FACTORS == 0 && m.is_scaled() {
                let count = FACTORS.min(cols.div_ceil(width) - group);
                for (row, factors) in rows.clone().zip(&mut factors) {
                    // SAFETY: as above; the groups exist.
                    unsafe { V::apart(FactorsOf { m, row, group, count, factors }) };
                }
            }
            // SAFETY: as above.
            let (mut part, mut sums) = unsafe { ([[V::splat(0.0); N]; 4], [V::splat(0.0); N]) };
            while from < end {
                if from == held.end {
                    // Whole groups, or a piece of one.
                    let len = if width > PIECE { PIECE } else { PIECE / width * width };
                    held = from..(from + len).min(if width > PIECE { end } else { cols });
                    // SAFETY: the numbers exist; a row of the panel has PIECE.
                    unsafe { V::apart(Unpack { m, rows: rows.clone(), k: held.clone(), panel }) };
                }
                let until = end.min(held.end);
                // SAFETY: the panel holds these numbers, the columns have them, too.
                unsafe {
                    let w = panel.as_ptr().cast::<f32>().add(from - held.start);
                    let x = self.x.as_ptr().add(c * cols + from);
                    products::<V, N>(w, (x, cols), until - from, &mut part);
                    if m.has_offsets() {
                        sums_of::<V, N>((x, cols), until - from, &mut sums);
                    }
                }
                from = until;
            }
            for i in 0..4 {
                // SAFETY: as above.
                let [scale, offset] = unsafe {
                    [factors[i].scales, factors[i].offsets].map(|f| V::splat(f[group % FACTORS]))
                };
                for j in 0..N {
                    total[i][j] = part[i][j].fma(scale, total[i][j]);
                    if m.has_offsets() {
                        total[i][j] = sums[j].fma(offset, total[i][j]);
                    }
                }
            }
        }
        for (row, total) in rows.zip(&total) {
            for (j, lanes) in total.iter().enumerate() {
                self.y.piece(c + j)[row - self.rows.start] = lanes.sum();
            }
        }
    }

    /// `R` rows x `N` columns. Safety: as `all`; rows and columns exist.
    #[inline(always)]
    unsafe fn tile<V: Vector, W: Weight, const R: usize, const N: usize>(
        &mut self,
        r: usize,
        c: usize,
    ) {
        let (m, cols) = (self.m, self.m.cols);
        let (width, stride) = (m.group_cols(), m.stride());
        let groups = cols.div_ceil(width);
        let mut factors = [Factors::NONE; R];
        // SAFETY: the caller has V's level.
        let mut total = unsafe { [[V::splat(0.0); N]; R] };
        for first in (0..groups).step_by(FACTORS) {
            let count = FACTORS.min(groups - first);
            for i in 0..R {
                let (row, factors) = (r + i, &mut factors[i]);
                if m.is_scaled() {
                    // SAFETY: as above; the groups exist.
                    unsafe { V::apart(FactorsOf { m, row, group: first, count, factors }) };
                }
            }
            for at in 0..count {
                let k = (first + at) * width;
                // SAFETY: the caller's promise: the rows and columns exist, and `check` saw the
                // sizes.
                unsafe {
                    let w = m.data.as_ptr().add(r * stride);
                    let x = self.x.as_ptr().add(c * cols);
                    let end = cols.min(k + width);
                    let part = segment::<V, W, R, N>((w, stride), x, cols, k, end);
                    for i in 0..R {
                        let scale = V::splat(factors[i].scales[at]);
                        for j in 0..N {
                            total[i][j] = part[i][j].fma(scale, total[i][j]);
                        }
                    }
                }
            }
        }
        for (i, row) in total.iter().enumerate() {
            for (j, lanes) in row.iter().enumerate() {
                self.y.piece(c + j)[r + i - self.rows.start] = lanes.sum();
            }
        }
    }
}

/// Bytes ahead of one row's load. As far as the second-level cache, which has more lines on their
/// way than the first: where memory is slow (30 GB/s for two cores of a Zen 4 with busy neighbours)
/// that reads 1.2 times as much, and less only of bytes that take long to decode.
const AHEAD_ALONE: usize = 16384;

/// Lane sums over `k..end` of `R` rows (from the first, a stride apart) with `N` columns (from `x`,
/// `cols` apart). Safety: V's level; the rows and columns are readable.
#[inline(always)]
unsafe fn segment<V: Vector, W: Weight, const R: usize, const N: usize>(
    (w, stride): (*const u8, usize),
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
            let (from, to) = (k * W::BYTES, (k + step) * W::BYTES);
            // A line is asked for once, by the first step that begins in it.
            let fetch = to - from >= 32 || from / 64 != to / 64;
            // Past the rows' end comes the start of the next `R` rows.
            let ahead = from + ahead(R);
            let ahead = if ahead < stride { ahead } else { ahead + (R - 1) * stride };
            for i in 0..R {
                if fetch && R == 1 && W::BYTES > 1 {
                    prefetch_near(w.wrapping_add(from + AHEAD_ALONE));
                } else if fetch {
                    prefetch(w.wrapping_add(i * stride + ahead));
                }
                weights[i] = W::group::<V>(w.add(i * stride + from));
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
            for j in 0..N {
                let column = V::load_part(x.add(j * cols + k), len);
                for i in 0..R {
                    let weight = part::<V, W>(w.add(i * stride + k * W::BYTES), len);
                    acc[i][j] = weight.fma(column, acc[i][j]);
                }
            }
            k += len;
        }
        acc
    }
}

/// Adds the lane products of `len` numbers of the panel's rows with `N` columns, a stride apart.
/// Safety: V's level; the rows and columns hold them.
#[inline(always)]
unsafe fn products<V: Vector, const N: usize>(
    w: *const f32,
    (x, stride): (*const f32, usize),
    len: usize,
    acc: &mut [[V; N]; 4],
) {
    let mut k = 0;
    while k < len {
        let count = V::LANES.min(len - k);
        // SAFETY: the caller's promise: `count` numbers at `k`.
        unsafe {
            let mut columns = [V::splat(0.0); N];
            for j in 0..N {
                columns[j] = V::load_part(x.add(j * stride + k), count);
            }
            for i in 0..4 {
                let weight = V::load_part(w.add(i * PIECE + k), count);
                for j in 0..N {
                    acc[i][j] = weight.fma(columns[j], acc[i][j]);
                }
            }
        }
        k += count;
    }
}

/// Adds the lanes of `len` numbers of the columns. Safety: as `products`.
#[inline(always)]
unsafe fn sums_of<V: Vector, const N: usize>(
    (x, stride): (*const f32, usize),
    len: usize,
    sums: &mut [V; N],
) {
    for k in (0..len).step_by(V::LANES) {
        for j in 0..N {
            // SAFETY: the caller's promise.
            let column = unsafe { V::load_part(x.add(j * stride + k), V::LANES.min(len - k)) };
            sums[j] = sums[j].add(column);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use super::*;
    use crate::abi::{Codes, Dtype, Encoding};
    use crate::numbers::code_to_f32;
    use crate::simd::{available, f8_to_f32};
    use proptest::prelude::*;
    use proptest::sample::select;

    /// A matrix that owns its bytes, `skew` bytes off alignment.
    #[derive(Clone)]
    pub(crate) struct Owned {
        bytes: Vec<u8>,
        skew: usize,
        encoding: Encoding,
        rows: usize,
        cols: usize,
        scales: Vec<u8>,
        zeros: Vec<u8>,
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

    /// A number as it is stored.
    fn push(bytes: &mut Vec<u8>, dtype: Dtype, v: f32) {
        match dtype {
            Dtype::F32 => bytes.extend(v.to_le_bytes()),
            Dtype::F16 => bytes.extend(half::f16::from_f32(v).to_le_bytes()),
            Dtype::Bf16 => bytes.extend(half::bf16::from_f32(v).to_le_bytes()),
            // Any code but NaN.
            Dtype::F8E4m3 => {
                let code = v.to_bits() as u8;
                bytes.push(if code & 0x7f == 0x7f { code ^ 1 } else { code });
            }
            // 2^-16 ... 2^-1, and now and then the smallest there is.
            Dtype::F8E8m0 => {
                let code = 111 + (v.to_bits() & 15) as u8;
                bytes.push(if v.to_bits() & 0xff0 == 0 { 0 } else { code });
            }
        }
    }

    impl Owned {
        /// Columns are rounded up to whole pieces of the codes.
        pub(crate) fn random(
            encoding: Encoding,
            (rows, cols): (usize, usize),
            skew: usize,
            seed: u64,
        ) -> Self {
            let codes = encoding.codes;
            let piece = codes.row().numbers as usize;
            let cols = cols.next_multiple_of(piece);
            let mut bytes = vec![0u8; skew];
            for v in noise(seed, rows * cols / piece) {
                match codes {
                    Codes::F32 => push(&mut bytes, Dtype::F32, v),
                    Codes::F16 => push(&mut bytes, Dtype::F16, v),
                    Codes::Bf16 => push(&mut bytes, Dtype::Bf16, v),
                    Codes::E4m3 => push(&mut bytes, Dtype::F8E4m3, v),
                    Codes::I8 | Codes::I4 | Codes::E2m1 => bytes.push(v.to_bits() as u8),
                    Codes::Q8x0 | Codes::Q4x0 | Codes::Q4k | Codes::Q6k => {
                        let len = codes.row().bytes as usize;
                        let at = bytes.len();
                        let random = noise(v.to_bits().into(), len);
                        bytes.extend(random.iter().map(|v| v.to_bits() as u8));
                        let (first, second) = match codes {
                            Codes::Q6k => (len - 2, len - 2),
                            Codes::Q4k => (0, 2),
                            _ => (0, 0),
                        };
                        for place in [first, second] {
                            let scale = half::f16::from_f32(random[place] * 0.01);
                            bytes[at + place..][..2].copy_from_slice(&scale.to_le_bytes());
                        }
                    }
                }
            }
            let [down, across] = encoding.grid(rows as u32, cols as u32);
            let groups = (down * across) as usize;
            let mut scales = Vec::new();
            for v in noise(seed + 1, groups) {
                push(&mut scales, encoding.scale, v * 0.01);
            }
            let zero = |v: f32| (v * 8.0) as i8 as u8;
            let zeros = noise(seed + 2, if encoding.zeros { groups } else { 0 });
            let zeros = zeros.into_iter().map(zero).collect();
            Self { bytes, skew, encoding, rows, cols, scales, zeros }
        }

        pub(crate) fn cols(&self) -> usize {
            self.cols
        }

        pub(crate) fn matrix(&self) -> Matrix<'_> {
            let encoding = &self.encoding;
            Matrix {
                data: &self.bytes[self.skew..],
                codes: encoding.codes,
                rows: self.rows,
                cols: self.cols,
                row_step: 1,
                scales: encoding.has_scales().then_some(Scales {
                    data: &self.scales,
                    dtype: encoding.scale,
                    zeros: encoding.zeros.then_some(&self.zeros[..]),
                    block_rows: encoding.group[0] as usize,
                    block_cols: encoding.group[1] as usize,
                }),
            }
        }

        /// The same numbers at another alignment.
        pub(crate) fn shifted(&self, skew: usize) -> Self {
            let mut bytes = vec![0u8; skew];
            bytes.extend(&self.bytes[self.skew..]);
            Self { bytes, skew, ..self.clone() }
        }

        /// A number's two terms: its code times the scale of its group, and the group's offset.
        pub(crate) fn weight(&self, r: usize, k: usize) -> [f64; 2] {
            let m = self.matrix();
            let code = code_to_f32(m.codes, m.row(r), k);
            let [scale, offset] = m.factor(r, k / m.group_cols());
            [f64::from(code) * f64::from(scale), f64::from(offset)]
        }

        /// The product in float64 and the sum of the terms' magnitudes, which bounds the rounding.
        pub(crate) fn product(&self, r: usize, x: &[f32]) -> (f64, f64) {
            let mut sums = (0.0, 0.0);
            for (k, &v) in x.iter().enumerate() {
                let terms = self.weight(r, k).map(|term| term * f64::from(v));
                sums = (sums.0 + terms[0] + terms[1], sums.1 + terms[0].abs() + terms[1].abs());
            }
            sums
        }
    }

    /// Every kind of codes, with every kind of scales that goes with them.
    pub(crate) fn encodings() -> impl Strategy<Value = Encoding> {
        let floats = [Codes::F32, Codes::F16, Codes::Bf16, Codes::E4m3, Codes::I8];
        let blocks = [[0, 0], [128, 128], [1, 1000], [5, 33], [16, 64], [1000, 1000]];
        let scales = [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::F8E8m0];
        let among = [Codes::Q8x0, Codes::Q4x0, Codes::Q4k, Codes::Q6k];
        let groups = [[1, 16], [1, 32], [1, 64], [1, 96], [1, 128], [1, 1000]];
        let zeros = |encoding: Encoding, zeros: bool| Encoding {
            zeros: zeros && encoding.has_scales(),
            ..encoding
        };
        prop_oneof![
            3 => (select(floats.to_vec()), select(blocks.to_vec()), select(scales.to_vec()))
                .prop_map(|(codes, group, scale)| Encoding::scaled(codes, group, scale)),
            3 => (select(groups.to_vec()), select(scales.to_vec()), any::<bool>())
                .prop_map(move |(group, s, z)| zeros(Encoding::scaled(Codes::I4, group, s), z)),
            1 => (select(groups.to_vec()), select(scales.to_vec()))
                .prop_map(|(group, scale)| Encoding::scaled(Codes::E2m1, group, scale)),
            3 => select(among.to_vec()).prop_map(Encoding::plain),
        ]
    }

    fn all(level: Level, m: &Matrix<'_>, x: &[f32], n: usize) -> Vec<f32> {
        let mut y = vec![f32::NAN; n * m.rows];
        let columns = Columns::of(&mut y, m.rows, m.rows, n);
        matmul(level, m, 0..m.rows, x, columns, &mut Digits::default());
        y
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        #[test]
        fn equals_a_float64_product(
            encoding in encodings(), rows in 1usize..40, cols in 1usize..800, n in 1usize..12,
            skew in 0usize..5, seed in 1u64..1000,
        ) {
            let owned = Owned::random(encoding, (rows, cols), skew, seed);
            let cols = owned.cols();
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
            encoding in encodings(), rows in 1usize..24, cols in 1usize..300, n in 1usize..10,
            split in 0usize..24, seed in 1u64..1000,
        ) {
            let owned = Owned::random(encoding, (rows, cols), 0, seed);
            let cols = owned.cols();
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
                    let digits = &mut Digits::default();
                    matmul(level, &m, 0..split, column, Columns::one(upper), digits);
                    matmul(level, &m, split..rows, column, Columns::one(lower), digits);
                    for r in 0..rows {
                        prop_assert_eq!(whole[c * rows + r].to_bits(), alone[r].to_bits());
                    }
                }
            }
        }
    }

    #[test]
    fn integers_meet_numbers_of_any_size() {
        let coded = [Codes::Q8x0, Codes::Q4x0, Codes::Q4k, Codes::Q6k].map(Encoding::plain);
        let beside = [Codes::I8, Codes::I4, Codes::E2m1]
            .map(|codes| Encoding::scaled(codes, [1, 32], Dtype::F16));
        for encoding in coded.into_iter().chain(beside) {
            let owned = Owned::random(encoding, (5, 512), 0, 11);
            for size in [0.0, 1e-36, 1e-20, 1.0, 1e30] {
                let mut x: Vec<f32> = noise(12, 512).iter().map(|v| v * size).collect();
                // One number far above its neighbours.
                x[100] *= 1e3;
                // Half of the last of 21 bits of that one, for each number of its block.
                let mut rest = vec![0.0; 512];
                rest[..128].fill(x[100].abs() * 2.0f32.powi(-22));
                for level in available() {
                    let y = all(level, &owned.matrix(), &x, 1);
                    for (r, y) in y.iter().enumerate() {
                        let (want, bound) = owned.product(r, &x);
                        let few =
                            if level < Level::Avx512Bf16 { owned.product(r, &rest).1 } else { 0.0 };
                        let error = (f64::from(*y) - want).abs();
                        let most = 3e-6 * bound + few + 1e-30;
                        assert!(error <= most, "{encoding:?} {level:?}: {error} of {most}");
                    }
                    for bad in [f32::NAN, f32::INFINITY] {
                        let mut x = x.clone();
                        x[200] = bad;
                        let y = all(level, &owned.matrix(), &x, 1);
                        assert!(y.iter().all(|y| !y.is_finite()), "{encoding:?} {level:?}: {y:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_scale_of_the_next_row_stays_there() {
        const NAN: [u8; 2] = 0x7e00_u16.to_le_bytes();
        const ONE: [u8; 2] = 0x3c00_u16.to_le_bytes();
        let (rows, cols) = (5, 160);
        let (groups, x) = (cols / 32, noise(3, 4 * cols));
        let scale = |group: usize| if group == 2 * groups { NAN } else { ONE };
        // Among the codes, and beside them.
        let among: Vec<u8> =
            (0..rows * groups).flat_map(|group| [&scale(group)[..], &[1; 32]].concat()).collect();
        let beside: Vec<u8> = (0..rows * groups).flat_map(scale).collect();
        let scales =
            Scales { data: &beside, dtype: Dtype::F16, zeros: None, block_rows: 1, block_cols: 32 };
        let codes = vec![0x12; rows * cols / 2];
        let m = |data, codes, scales| Matrix { data, codes, rows, cols, row_step: 1, scales };
        for m in [m(&among, Codes::Q8x0, None), m(&codes, Codes::I4, Some(scales))] {
            for level in available() {
                for n in [1, 4] {
                    let y = all(level, &m, &x[..n * cols], n);
                    for (at, y) in y.iter().enumerate() {
                        assert_eq!(y.is_nan(), at % rows == 2, "{level:?} {:?} {at}", m.codes);
                    }
                }
            }
        }
    }

    #[test]
    fn every_fp8_code_at_every_level() {
        let codes: Vec<u8> = (0..=255).collect();
        let (rows, cols) = (1, 256);
        let m = Matrix { data: &codes, codes: Codes::E4m3, rows, cols, row_step: 1, scales: None };
        for level in available() {
            for code in 0..256usize {
                let mut x = vec![0f32; 256];
                x[code] = 1.0;
                // The two NaN codes poison a whole row, so they stand in a row without them.
                let row: Vec<u8> =
                    codes.iter().map(|&c| if c & 0x7f == 0x7f { 0 } else { c }).collect();
                let clean = Matrix { data: &row, ..m };
                let mut y = [0f32];
                matmul(level, &clean, 0..1, &x, Columns::one(&mut y), &mut Digits::default());
                assert_eq!(y[0], f8_to_f32(row[code]), "{level:?} code {code:#x}");
            }
            let mut y = [0f32];
            let x = [0f32; 256];
            matmul(level, &m, 0..1, &x, Columns::one(&mut y), &mut Digits::default());
            assert!(y[0].is_nan(), "{level:?} hides a NaN code");
        }
        assert_eq!(f8_to_f32(0x7e), 448.0);
        assert_eq!(f8_to_f32(0x81), -(2f32.powi(-9)));
        assert_eq!(f8_to_f32(0x38), 1.0);
    }
}
