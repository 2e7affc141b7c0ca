//! Products of integer codes: activations are split into digits, and digits meet codes in dot
//! products of bytes, which cost a fraction of decoding codes to float32.
//!
//! Numbers of a block of a column are `unit * (low + mid * 2^8 + high * 2^16)`, with digits in
//! -128..=127 and a power of two for each block that makes the largest number fit: 24 bits, as many
//! as a float32 has. Where products of bytes saturate (levels without such dot products, codes of
//! eight bits), digits have seven bits, and a number 21. Sums of products of one group are exact;
//! the group's scale and the block's unit multiply them in float32. A block with a number that is
//! not finite makes every sum NaN.

// Register blocks are indexed by the same number as pointers and other blocks.
#![allow(clippy::needless_range_loop)]

use std::marker::PhantomData;
use std::ops::Range;

use super::codes::{ahead, four, Whole};
use super::prefill::Line;
use crate::abi::Codes;
use crate::field::Columns;
use crate::matrix::{among, Factors, Matrix, Scales, FACTORS};
use crate::simd::{prefetch, reads_rows_alone, Ints, Kernel, Vector};

/// Numbers below which a row is too short to be worth splitting a column.
const COLS_MIN: usize = 64;
/// Numbers of the longest vector, which may be read behind a column.
const BEHIND: usize = 16;
/// Numbers of the longest step.
const STEP_MAX: usize = 256;

/// Room for columns as digits. Reused from product to product, it grows to the largest.
#[derive(Default)]
pub struct Digits {
    /// Steps of the columns.
    lines: Vec<Line>,
    /// Units of the blocks of each column, then their sums; zeros at the end.
    units: Vec<f32>,
    sums: Vec<f32>,
    /// Of one column the numbers that are split, zeros at the end.
    whole: Vec<i32>,
}

/// Lines and blocks of a column of `cols` numbers, at most.
const fn sizes(cols: usize) -> [usize; 2] {
    let numbers = cols.next_multiple_of(STEP_MAX);
    // Three digits a number, and two sums of 32 bits for four numbers of a vector.
    [(5 * numbers).div_ceil(64), (numbers / 16).next_multiple_of(FACTORS)]
}

impl Digits {
    /// Room for `n` columns of `cols` numbers, so that splitting never allocates.
    pub fn with_capacity(n: usize, cols: usize) -> Self {
        let [lines, blocks] = sizes(cols);
        Self {
            lines: Vec::with_capacity(n * lines),
            units: Vec::with_capacity(n * blocks),
            sums: Vec::with_capacity(n * blocks),
            whole: Vec::with_capacity(cols.next_multiple_of(STEP_MAX) + BEHIND),
        }
    }

    /// Bytes of such room.
    pub const fn bytes(n: usize, cols: usize) -> usize {
        let [lines, blocks] = sizes(cols);
        n * (64 * lines + 8 * blocks) + 4 * (cols.next_multiple_of(STEP_MAX) + BEHIND)
    }

    /// Splits `n` columns of `cols` numbers as the steps of `D` want them. Safety: V's level.
    #[inline(always)]
    pub(super) unsafe fn split<V: Vector, D: Whole>(
        &mut self,
        (x, n, cols): (&[f32], usize, usize),
        block: usize,
    ) -> Split<'_> {
        let steps = cols.div_ceil(step::<V, D>());
        let numbers = steps * step::<V, D>();
        let column = (steps * step_bytes::<V, D>()).next_multiple_of(64);
        let blocks = numbers.div_ceil(block).next_multiple_of(FACTORS);
        let grow = |numbers: &mut Vec<f32>| numbers.resize(n * blocks, 0.0);
        grow(&mut self.units);
        grow(&mut self.sums);
        self.lines.resize(n * column / 64, Line([0; 64]));
        self.whole.resize(numbers + BEHIND, 0);
        for c in 0..n {
            let x = &x[c * cols..(c + 1) * cols];
            let units = &mut self.units[c * blocks..(c + 1) * blocks];
            let sums = &mut self.sums[c * blocks..(c + 1) * blocks];
            let lines = &mut self.lines[c * column / 64..(c + 1) * column / 64];
            // SAFETY: the caller has the level.
            unsafe {
                let whole = &mut self.whole[..];
                V::apart(Rounding { bits: bits::<V, D>(), x, block, units, sums, whole });
                if D::UNIT != 1.0 {
                    units.iter_mut().for_each(|unit| *unit *= D::UNIT);
                }
                apart::<V, D>(whole, steps, lines);
            }
        }
        let lanes = lanes::<V, D>(block);
        Split {
            lines: &self.lines,
            units: &self.units,
            sums: &self.sums,
            block,
            column,
            blocks,
            lanes,
        }
    }
}

/// Columns as digits.
pub(super) struct Split<'a> {
    lines: &'a [Line],
    units: &'a [f32],
    sums: &'a [f32],
    /// Numbers that share a unit.
    block: usize,
    /// Bytes from a column's first step to the next column's.
    column: usize,
    /// Units from one column to the next.
    blocks: usize,
    /// Of the first step the blocks that the lanes of each set belong to.
    lanes: [[i32; 16]; 4],
}

/// Numbers of a step.
#[inline(always)]
fn step<V: Vector, D: Whole>() -> usize {
    D::SETS * D::VECTORS * V::Ints::BYTES
}

/// Vectors of a set: two corrections where codes are biased, then three digits for each vector.
#[inline(always)]
fn set_vectors<D: Whole>() -> usize {
    3 * D::VECTORS + if D::BIAS > 0 { 2 } else { 0 }
}

/// Bytes of a step of a column.
#[inline(always)]
fn step_bytes<V: Vector, D: Whole>() -> usize {
    D::SETS * set_vectors::<D>() * V::Ints::BYTES
}

/// Bits of a digit.
#[inline(always)]
fn bits<V: Vector, D: Whole>() -> u32 {
    if D::LARGEST > V::Ints::LARGEST {
        7
    } else {
        8
    }
}

/// Numbers of a block of activations, all of one group of the matrix; none where groups are cut
/// too small, or rows too short.
pub(super) fn block_of(m: &Matrix<'_>) -> Option<usize> {
    let width = m.group_cols();
    if m.cols < COLS_MIN {
        return None;
    }
    [128, 64, 32, 16].into_iter().find(|&block| width.is_multiple_of(block) || width >= m.cols)
}

/// Numbers of a column to integers, with the unit and the sum of each block.
struct Rounding<'a> {
    /// Of a digit.
    bits: u32,
    x: &'a [f32],
    block: usize,
    units: &'a mut [f32],
    sums: &'a mut [f32],
    whole: &'a mut [i32],
}

impl Kernel for Rounding<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let cols = self.x.len();
        let done = cols.div_ceil(self.block);
        self.units[done..].fill(0.0);
        self.sums[done..].fill(0.0);
        self.whole[cols..].fill(0);
        for b in 0..done {
            let k = b * self.block..cols.min((b + 1) * self.block);
            let (x, whole) = (&self.x[k.clone()], &mut self.whole[k.start..]);
            let mut most = 0;
            for v in x {
                most = most.max(v.to_bits() & 0x7fff_ffff);
            }
            if most >= 0x7f80_0000 {
                whole[..x.len()].fill(0);
                (self.units[b], self.sums[b]) = (f32::NAN, f32::NAN);
                continue;
            }
            // The next power of two above the largest number and a little more, since the largest
            // integer of balanced digits is a little less than one.
            let exponent = (f32::from_bits(most) * 1.02).to_bits() >> 23;
            let exponent = exponent.max(3 * self.bits);
            let unit = f32::from_bits((exponent + 2 - 3 * self.bits) << 23);
            let inverse = f32::from_bits((252 + 3 * self.bits - exponent) << 23);
            for k in (0..x.len()).step_by(V::LANES) {
                let len = V::LANES.min(x.len() - k);
                // SAFETY: the caller has the level; `len` numbers are there, and a vector of
                // integers has room.
                unsafe {
                    let part = V::load_part(x.as_ptr().add(k), len).mul(V::splat(inverse));
                    part.ints().store(whole[k..k + V::LANES].as_mut_ptr().cast());
                }
            }
            let mut sum = 0;
            for v in &whole[..x.len()] {
                sum += v;
            }
            (self.units[b], self.sums[b]) = (unit, sum as f32 * unit);
        }
    }
}

/// Integers to digits, in the order of the steps, with what the bias of codes adds to sums. Safety:
/// V's level; behind the steps is one vector.
#[inline(always)]
unsafe fn apart<V: Vector, D: Whole>(whole: &[i32], steps: usize, lines: &mut [Line]) {
    let (bits, bytes) = (bits::<V, D>(), V::Ints::BYTES);
    let half = 1 << (bits - 1);
    let corrections = set_vectors::<D>() - 3 * D::VECTORS;
    // SAFETY: as many steps as integers have room in the lines, each of sets of vectors; the
    // numbers of a step are below its length. The caller has the level.
    unsafe {
        // With half of what a digit counts added to each, none is below zero.
        let above = V::Ints::splat(half << (2 * bits) | half << bits | half);
        let (mask, half) = (V::Ints::splat(2 * half - 1), V::Ints::splat(half));
        let mut to = lines.as_mut_ptr().cast::<u8>();
        for step in 0..steps {
            let whole = whole.as_ptr().add(step * self::step::<V, D>());
            for set in 0..D::SETS {
                for v in 0..D::VECTORS {
                    let vector = set * D::VECTORS + v;
                    let to = to.add((corrections + 3 * v) * bytes);
                    for at in (0..bytes).step_by(V::LANES) {
                        let first = D::number(vector, at);
                        let from = whole.add(first).cast::<u8>();
                        let mut numbers = V::Ints::load(from);
                        if D::number(vector, at + 1) - first == 2 {
                            numbers = numbers.evens(V::Ints::load(from.add(bytes)));
                        }
                        let numbers = numbers.add(above);
                        for digit in 0..3 {
                            let value = numbers.shr((2 - digit) * bits).and(mask).sub(half);
                            value.narrow(to.add(digit as usize * bytes + at));
                        }
                    }
                }
                if D::BIAS > 0 {
                    let bias = V::Ints::splat(four(D::BIAS));
                    let none = V::Ints::splat(0);
                    let mut sums = [none; 3];
                    for v in 0..D::VECTORS {
                        for digit in 0..3 {
                            let at = (corrections + 3 * v + digit) * bytes;
                            sums[digit] = sums[digit].dot(bias, V::Ints::load(to.add(at)));
                        }
                    }
                    none.sub(sums[0]).store(to);
                    none.sub(sums[1].shl(bits).add(sums[2])).store(to.add(bytes));
                }
                to = to.add(set_vectors::<D>() * bytes);
            }
        }
    }
}

/// The arguments of a product: rows of integers with columns of digits.
pub(super) struct Product<'a> {
    pub m: &'a Matrix<'a>,
    pub rows: Range<usize>,
    pub split: Split<'a>,
    pub y: Columns<'a, f32>,
}

impl Product<'_> {
    /// All rows and columns. Safety: V's level; the slices were checked, and the columns split for
    /// the matrix's kind `D` at this level.
    #[inline(always)]
    pub unsafe fn all<V: Vector, D: Whole>(mut self) {
        let Range { start, end } = self.rows;
        // Codes below a byte with a scale for few of them are bound by instructions, of which rows
        // side by side take fewer, as far as registers hold them.
        let alone = self.y.count() == 1 && reads_rows_alone();
        let light = D::LARGEST == u8::MAX || self.split.block > 32;
        let side = match V::REGISTERS {
            32 if !alone => 4,
            32 if light => 1,
            16 if D::SETS > 1 => 1,
            _ => 2,
        };
        let most = start + (end - start) / side * side;
        // SAFETY: the rows lie in the range; the caller's promise otherwise.
        unsafe {
            match side {
                4 => self.columns::<V, D, 4>(start..most),
                2 => self.columns::<V, D, 2>(start..most),
                _ => self.columns::<V, D, 1>(start..most),
            }
            self.columns::<V, D, 1>(most..end);
        }
    }

    /// Rows, `R` side by side, all columns. Safety: as `all`; the rows lie in the range and are a
    /// multiple of `R`.
    #[inline(always)]
    unsafe fn columns<V: Vector, D: Whole, const R: usize>(&mut self, rows: Range<usize>) {
        let n = self.y.count();
        // Of several columns all, before the next rows are read.
        let band = if n == 1 { rows.len().max(1) } else { R };
        for r in rows.clone().step_by(band) {
            let (rows, mut c) = (r..rows.end.min(r + band), 0);
            // SAFETY: the columns c.. exist; the caller's promise otherwise.
            unsafe {
                while R == 4 && c + 2 <= n {
                    let rows = rows.clone();
                    V::apart(Tiles::<D, R, 2> { product: self, rows, c, kind: PhantomData });
                    c += 2;
                }
                while c < n {
                    let rows = rows.clone();
                    V::apart(Tiles::<D, R, 1> { product: self, rows, c, kind: PhantomData });
                    c += 1;
                }
            }
        }
    }
}

/// Rows, `R` side by side, x `N` columns from `c` of a product, which exist.
struct Tiles<'p, 'a, D, const R: usize, const N: usize> {
    product: &'p mut Product<'a>,
    rows: Range<usize>,
    c: usize,
    kind: PhantomData<D>,
}

impl<D: Whole, const R: usize, const N: usize> Kernel for Tiles<'_, '_, D, R, N> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let Self { product, rows, c, .. } = self;
        let factors = RowFactors::<D>::of(product.m, product.split.block);
        let ahead = distance(product.m, R);
        for r in rows.step_by(R) {
            // SAFETY: the caller has the level; the rows and columns exist.
            unsafe { tile::<V, D, R, N>(product, (&factors, ahead), r, c) };
        }
    }
}

/// `R` rows from `r` x `N` columns from `c` of a product. Safety: V's level; they exist.
#[inline(always)]
unsafe fn tile<V: Vector, D: Whole, const R: usize, const N: usize>(
    product: &mut Product<'_>,
    (factors, ahead): (&RowFactors<'_, D>, usize),
    r: usize,
    c: usize,
) {
    let (m, split) = (product.m, &product.split);
    let (cols, stride, block) = (m.cols, m.stride(), split.block);
    let offsets = D::CODES == Codes::Q4k || D::CODES == Codes::I4 && m.has_zeros();
    // SAFETY: the caller has the level.
    let mut total = unsafe { [[V::splat(0.0); N]; R] };
    for at in (0..factors.blocks).step_by(V::LANES) {
        let begin = at * block;
        let end = cols.min(begin + V::LANES * block);
        // SAFETY: the rows and columns exist, `check` saw the sizes, and columns have units
        // and steps up to the end of the last vector; the caller has the level.
        unsafe {
            let mut scales = [[V::splat(0.0); N]; R];
            for i in 0..R {
                let [scale, offset] = factors.vector::<V>(r + i, at);
                for j in 0..N {
                    let place = (c + j) * split.blocks + at;
                    let unit = V::load(split.units.as_ptr().add(place));
                    scales[i][j] = scale.mul(unit);
                    if offsets {
                        let sums = V::load(split.sums.as_ptr().add(place));
                        total[i][j] = offset.fma(sums, total[i][j]);
                    }
                }
            }
            let w = m.data.get_unchecked(r * stride..);
            let x = split.lines.as_ptr().cast::<u8>().add(c * split.column);
            for k in (begin..end).step_by(step::<V, D>()) {
                let passed = ((k - begin) >> block.trailing_zeros()) as i32;
                let x = x.add(k / step::<V, D>() * step_bytes::<V, D>());
                let codes = codes_of_step::<V, D, R>((w, stride), ahead, k, cols);
                for set in 0..D::SETS {
                    let index = V::Ints::load(split.lanes[set].as_ptr().cast());
                    let index = index.add(V::Ints::splat(passed));
                    for j in 0..N {
                        let x = x.add(j * split.column);
                        for i in 0..R {
                            let sum = sum_of_set::<V, D>(&codes[i], x, set);
                            total[i][j] = sum.fma(scales[i][j].pick(index), total[i][j]);
                        }
                    }
                }
            }
        }
    }
    for (i, row) in total.iter().enumerate() {
        for (j, lanes) in row.iter().enumerate() {
            product.y.piece(c + j)[r + i - product.rows.start] = lanes.sum();
        }
    }
}

/// Of the first step of a row the blocks that the lanes of each set belong to.
#[inline(always)]
fn lanes<V: Vector, D: Whole>(block: usize) -> [[i32; 16]; 4] {
    let mut all = [[0; 16]; 4];
    for set in 0..D::SETS {
        for lane in 0..V::LANES {
            all[set][lane] = (D::number(set * D::VECTORS, 4 * lane) / block) as i32;
        }
    }
    all
}

/// Bytes between a load of one of so many rows side by side and its prefetch, which leads to codes
/// that are read: between rows that have others between them lie as many whole rows.
fn distance(m: &Matrix<'_>, rows: usize) -> usize {
    match m.row_step {
        1 => ahead(rows),
        _ => (ahead(rows) / m.row_bytes()).max(1) * rows * m.stride(),
    }
}

/// The step at `k` of `R` rows (from the first to the matrix's end, a stride apart). What lies
/// behind a row meets digits of zero. Safety: V's level; the rows exist.
#[inline(always)]
unsafe fn codes_of_step<V: Vector, D: Whole, const R: usize>(
    (w, stride): (&[u8], usize),
    ahead: usize,
    k: usize,
    cols: usize,
) -> [[V::Ints; 4]; R] {
    let row = D::CODES.row();
    let (piece, piece_bytes) = (row.numbers as usize, row.bytes as usize);
    let from = k / piece * piece_bytes;
    let step = step::<V, D>();
    let length = step * piece_bytes / piece;
    // Past the rows' end comes the start of the next `R` rows.
    let ahead = from + ahead;
    let ahead = if ahead < stride { ahead } else { ahead + (R - 1) * stride };
    let whole = k + step <= cols || (R - 1) * stride + from + length <= w.len();
    // SAFETY: the step lies in the matrix, or what there is of it is copied; the caller has the
    // level.
    unsafe {
        let mut codes = [[V::Ints::splat(0); 4]; R];
        for i in 0..R {
            let row = w.as_ptr().add(i * stride);
            // Of steps that begin within lines no line is left out: one that nobody asked for costs
            // as much as several asked for twice.
            for line in (0..length).step_by(64) {
                prefetch(row.wrapping_add(ahead + line));
            }
            if whole {
                codes[i] = D::bytes::<V>(row.add(from), k);
            } else {
                let mut tail = [0u8; STEP_MAX];
                let (to, len) = (tail.as_mut_ptr(), D::CODES.bytes_of(cols) - from);
                std::ptr::copy_nonoverlapping(row.add(from), to, len);
                codes[i] = D::bytes::<V>(to, k);
            }
        }
        codes
    }
}

/// Lane sums of the codes of a set with the digits of a step of a column, in units. Safety: V's
/// level; the step exists.
#[inline(always)]
unsafe fn sum_of_set<V: Vector, D: Whole>(codes: &[V::Ints; 4], x: *const u8, set: usize) -> V {
    let (bits, bytes) = (bits::<V, D>(), V::Ints::BYTES);
    // SAFETY: the caller's promise.
    unsafe {
        let mut x = x.add(set * set_vectors::<D>() * bytes);
        let none = V::Ints::splat(0);
        let (mut high, mut mid, mut low) = (none, none, none);
        if D::BIAS > 0 {
            (high, low) = (V::Ints::load(x), V::Ints::load(x.add(bytes)));
            x = x.add(2 * bytes);
        }
        for v in 0..D::VECTORS {
            let (x, codes) = (x.add(3 * v * bytes), codes[set * D::VECTORS + v]);
            high = high.dot(codes, V::Ints::load(x));
            mid = mid.dot(codes, V::Ints::load(x.add(bytes)));
            low = low.dot(codes, V::Ints::load(x.add(2 * bytes)));
        }
        let above = V::splat((1u32 << (2 * bits)) as f32);
        V::of(high).fma(above, V::of(mid.shl(bits).add(low)))
    }
}

/// Where the factors of blocks come from, which divide groups; among codes a block is a group.
enum Source<'a> {
    /// Among the codes, or there are none.
    Codes,
    /// Beside them: a block is a group.
    Direct(&'a Scales<'a>),
    /// A row is a group.
    Row(&'a Scales<'a>),
    /// Groups have several blocks.
    Several,
}

/// Factors of the blocks of rows of codes `D`.
struct RowFactors<'a, D> {
    m: &'a Matrix<'a>,
    block: usize,
    /// Of a row.
    blocks: usize,
    source: Source<'a>,
    /// From one row to the next, and of a row.
    stride: usize,
    bytes: usize,
    /// Groups of a row.
    groups: usize,
    kind: PhantomData<D>,
}

impl<'a, D: Whole> RowFactors<'a, D> {
    #[inline(always)]
    fn of(m: &'a Matrix<'a>, block: usize) -> Self {
        let width = m.group_cols();
        let source = match &m.scales {
            None => Source::Codes,
            Some(scales) if width >= m.cols => Source::Row(scales),
            Some(scales) if width == block => Source::Direct(scales),
            Some(_) => Source::Several,
        };
        let (stride, groups) = (m.stride(), m.cols.div_ceil(width));
        let blocks = m.cols.div_ceil(block);
        let bytes = m.row_bytes();
        Self { m, block, blocks, source, stride, bytes, groups, kind: PhantomData }
    }

    /// Scales and offsets of the blocks of a row from `at` on; lanes behind the row's last block
    /// are finite. Safety: V's level; the row has the block `at`.
    #[inline(always)]
    unsafe fn vector<V: Vector>(&self, row: usize, at: usize) -> [V; 2] {
        let whole = at + V::LANES <= self.blocks;
        let first = |scales: &Scales<'_>| row * self.m.row_step / scales.block_rows * self.groups;
        // SAFETY: the caller has the level; the row and its groups exist.
        unsafe {
            if D::CODES.row().group > 0 {
                if whole {
                    let row = self.m.data.as_ptr().add(row * self.stride);
                    return among::<V>(D::CODES, std::slice::from_raw_parts(row, self.bytes), at);
                }
            } else {
                match self.source {
                    Source::Codes => return [V::splat(1.0), V::splat(0.0)],
                    Source::Direct(scales) if whole => {
                        return scales.vector::<V>(first(scales) + at);
                    }
                    Source::Row(scales) => {
                        let first = first(scales);
                        let (scale, zero) = (scales.at(first), scales.zero(first));
                        return [V::splat(scale), V::splat(-zero * scale)];
                    }
                    Source::Direct(_) | Source::Several => {}
                }
            }
            let (m, block, count) = (self.m, self.block, V::LANES.min(self.blocks - at));
            let mut all = Factors::NONE;
            V::apart(OfBlocks { m, row, block, first: at, count, factors: &mut all });
            [V::load(all.scales.as_ptr()), V::load(all.offsets.as_ptr())]
        }
    }
}

/// Scales and offsets of `count <= FACTORS` blocks of a row, which divide its groups.
struct OfBlocks<'a> {
    m: &'a Matrix<'a>,
    row: usize,
    /// Numbers of a block.
    block: usize,
    first: usize,
    count: usize,
    factors: &'a mut Factors,
}

impl Kernel for OfBlocks<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let Self { m, row, block, first, count, factors } = self;
        let width = m.group_cols();
        let group_of = |at: usize| at * block / width;
        let (group, last) = (group_of(first), group_of(first + count - 1));
        // SAFETY: the caller has the level; the groups exist.
        unsafe { m.factors::<V>(row, group, last + 1 - group, factors) };
        if block == width {
            return;
        }
        for at in (0..count).rev() {
            let of = group_of(first + at) - group;
            factors.scales[at] = factors.scales[of];
            factors.offsets[at] = factors.offsets[of];
        }
    }
}
