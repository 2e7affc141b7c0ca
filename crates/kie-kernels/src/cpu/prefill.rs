//! Matrix times many columns: the prefill path, bound by arithmetic.
//!
//! Activations are packed once a step into blocks of 16 columns. Weights whose codes are exact in
//! BF16 meet BF16 activations on machines with BF16 units (AMX tiles or AVX-512 dot products), and
//! their scales multiply the float32 sums. All other combinations compute in float32. Weights go
//! through panels in a cache: in place, rows of 4 KB multiples would all fall on the same few sets.
//!
//! Invariant: the bits of one output depend on the level, its row's weights and its column only:
//! every column has accumulators of its own, and the row is cut into the same pieces always.

#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use crate::abi::Codes;

use super::codes::Unpack;
use crate::field::Columns;
use crate::matrix::{Factors, FactorsOf, Matrix, FACTORS};
use crate::simd::{dispatch, Kernel, Level, Vector};

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod bf16;
#[cfg(target_arch = "x86_64")]
mod lines;
mod packed;

use self::packed::CHUNK;
pub use self::packed::{Form, Packed, Panels, Part};
pub(super) use self::packed::{Line, BLOCK};

/// Rows of a panel.
const ROWS: usize = 32;
/// Numbers of a row that a panel holds at a time.
const PIECE: usize = 256;

/// Packs `n` columns of `cols` numbers each (`x[c * cols + k]`) for weights of each of `codes`.
///
/// # Panics
/// When `x` is too short or the machine lacks `level`.
pub fn pack(level: Level, codes: &[Codes], x: &[f32], n: usize, cols: usize, packed: &mut Packed) {
    assert!(level.is_available(), "this machine has no {}", level.name());
    assert!(x.len() >= n * cols, "x holds {} numbers, wanted {n} x {cols}", x.len());
    (packed.ready, packed.n, packed.cols) = ([false; 2], n, cols);
    for codes in codes {
        let form = Form::of(level, *codes);
        if !std::mem::replace(&mut packed.ready[form as usize], true) {
            pack_as(form, x, n, cols, &mut packed.lines[form as usize]);
        }
    }
}

fn pack_as(form: Form, x: &[f32], n: usize, cols: usize, out: &mut Vec<Line>) {
    let lines = form.lines(cols);
    out.resize(n.div_ceil(BLOCK) * lines, Line([0; 64]));
    if lines == 0 {
        return;
    }
    for (block, out) in out.chunks_exact_mut(lines).enumerate() {
        pack_block(form, &x[block * BLOCK * cols..n.min((block + 1) * BLOCK) * cols], cols, out);
    }
}

/// Packs up to 16 columns of `cols` numbers in a form that the machine has the level of.
pub(super) fn pack_block(form: Form, columns: &[f32], cols: usize, out: &mut [Line]) {
    match form {
        Form::Single => pack_single(columns, cols, out),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: this form is chosen only with AVX-512 BF16, and the level is available.
        Form::Pairs => unsafe { bf16::pack(columns, cols, out) },
        #[cfg(not(target_arch = "x86_64"))]
        Form::Pairs => unreachable!("no BF16 level here"),
    }
}

fn pack_single(columns: &[f32], cols: usize, out: &mut [Line]) {
    for (k, line) in out.iter_mut().enumerate() {
        let mut numbers = [0f32; BLOCK];
        for (number, column) in numbers.iter_mut().zip(columns.chunks_exact(cols)) {
            *number = column[k];
        }
        for (bytes, number) in line.0.chunks_exact_mut(4).zip(numbers) {
            bytes.copy_from_slice(&number.to_ne_bytes());
        }
    }
}

/// Piece `c` of `y` at `r - rows.start` = sum over k of `m[r, k] * packed[c][k]`, for the rows `r`
/// of `rows` and all packed columns; some of them while it `goes_on`.
///
/// # Panics
/// When the columns were packed for another length, level or encoding, `y` is too short, or the
/// panels have no room for weights of this form.
pub fn prefill(
    level: Level,
    panels: &mut Panels,
    m: &Matrix<'_>,
    rows: Range<usize>,
    packed: Part<'_>,
    mut y: Columns<'_, f32>,
    goes_on: &dyn Fn() -> bool,
) {
    m.check(&rows);
    let n = packed.n;
    if rows.is_empty() || n == 0 {
        return;
    }
    assert_eq!(packed.cols, m.cols, "packed columns of another length");
    let form = Form::of(level, m.codes);
    assert!(packed.is_ready(form), "packed for another level or encoding");
    assert_eq!((y.count(), y.width()), (n, rows.len()), "columns of so many rows");
    if form == Form::Pairs {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the form was checked against the level, and `pack` saw that it exists.
        unsafe {
            bf16::run(level == Level::Amx, panels, m, rows, packed, y, goes_on);
        }
        return;
    }
    let mut scratch = Scratch::ZERO;
    for first in (0..n).step_by(CHUNK) {
        let columns = first..n.min(first + CHUNK);
        for r in rows.clone().step_by(ROWS) {
            if !goes_on() {
                return;
            }
            let panel = r..rows.end.min(r + ROWS);
            let at = panel.start - rows.start..panel.end - rows.start;
            let task = Single { m, rows: panel, packed, columns: columns.clone() };
            dispatch(level, Run { task: &task, scratch: &mut scratch });
            task.write(&scratch.sums, y.some(task.columns.clone(), at));
        }
    }
}

/// Working memory of the float32 path: a panel of weights and the sums of its rows.
#[repr(C, align(64))]
struct Scratch {
    /// `[ROWS][PIECE]`.
    panel: [[f32; PIECE]; ROWS],
    /// `[block][ROWS][16]`.
    sums: [f32; ROWS * CHUNK],
}

impl Scratch {
    const ZERO: Self = Self { panel: [[0.0; PIECE]; ROWS], sums: [0.0; ROWS * CHUNK] };
}

/// One panel's rows times one chunk of columns, in float32.
struct Single<'a> {
    m: &'a Matrix<'a>,
    rows: Range<usize>,
    packed: Part<'a>,
    columns: Range<usize>,
}

impl Single<'_> {
    /// Packed blocks of the chunk.
    fn blocks(&self) -> Range<usize> {
        self.columns.start / BLOCK..self.columns.end.div_ceil(BLOCK)
    }

    /// Whether the panel holds numbers with their scales, as those of small groups; FP8 blocks have
    /// theirs on the sums.
    fn scales_in_panel(&self) -> bool {
        self.m.is_scaled() && self.m.codes != Codes::E4m3
    }

    /// The cut of a row that starts at `from` and the column of its factors: a cut ends where
    /// factors of the sums end, after FACTORS groups, or after PIECE numbers.
    fn cut(&self, from: usize) -> Option<(Range<usize>, usize)> {
        let cols = self.m.cols;
        if from >= cols {
            return None;
        }
        let width = self.m.group_cols();
        let (block, most) = (from / width, if self.scales_in_panel() { FACTORS } else { 1 });
        Some((from..cols.min((block + most) * width).min(from + PIECE), block))
    }

    /// Factors of the panel's rows for a block column; 1 where the panel has the scales.
    fn factors(&self, block: usize) -> [f32; ROWS] {
        let mut factors = [1.0; ROWS];
        if !self.scales_in_panel() {
            for (factor, row) in factors.iter_mut().zip(self.rows.clone()) {
                [*factor, _] = self.m.factor(row, block);
            }
        }
        factors
    }

    /// Sums to `y`: the panel's rows of the chunk's columns.
    fn write(&self, sums: &[f32; ROWS * CHUNK], mut y: Columns<'_, f32>) {
        for c in 0..self.columns.len() {
            let sums = &sums[c / BLOCK * ROWS * BLOCK + c % BLOCK..];
            for (r, y) in y.piece(c).iter_mut().enumerate() {
                *y = sums[r * BLOCK];
            }
        }
    }
}

/// The arithmetic of a [`Single`].
struct Run<'a> {
    task: &'a Single<'a>,
    scratch: &'a mut Scratch,
}

impl Kernel for Run<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(mut self) {
        let rows = self.task.rows.len();
        let mut from = 0;
        while let Some((k, block)) = self.task.cut(from) {
            let factors = self.task.factors(block);
            // SAFETY: the caller has V's level; the cut lies in the rows.
            unsafe {
                self.fill::<V>(&k, block);
                let mut row = 0;
                while row < rows {
                    if V::REGISTERS == 32 {
                        self.columns::<V, 8>(&k, row, &factors);
                        row += 8;
                    } else {
                        self.columns::<V, 4>(&k, row, &factors);
                        row += 4;
                    }
                }
            }
            from = k.end;
        }
    }
}

impl Run<'_> {
    /// The cut `k` of the rows as float32 in the panel. Safety: V's level; `k` lies in the rows,
    /// its first group is `block`.
    #[inline(always)]
    unsafe fn fill<V: Vector>(&mut self, k: &Range<usize>, block: usize) {
        let (m, rows) = (self.task.m, self.task.rows.clone());
        let panel = &mut self.scratch.panel;
        // SAFETY: the caller has V's level; a cut has at most PIECE numbers.
        unsafe { V::apart(Unpack { m, rows: rows.clone(), k: k.clone(), panel }) };
        if !self.task.scales_in_panel() {
            return;
        }
        let width = m.group_cols();
        let count = k.end.div_ceil(width) - block;
        let mut factors = Factors::NONE;
        for (row, panel) in rows.zip(panel) {
            // SAFETY: the caller has V's level; the groups exist.
            unsafe { V::apart(FactorsOf { m, row, group: block, count, factors: &mut factors }) };
            let mut at = k.start;
            while at < k.end {
                let group = at / width;
                let len = V::LANES.min(k.end - at).min((group + 1) * width - at);
                let (scale, offset) = (factors.scales, factors.offsets);
                // SAFETY: as above: the panel's row holds the cut.
                unsafe {
                    let numbers = panel.as_mut_ptr().add(at - k.start);
                    let [scale, offset] = [scale, offset].map(|f| V::splat(f[group - block]));
                    V::load_part(numbers, len).fma(scale, offset).store_part(numbers, len);
                }
                at += len;
            }
        }
    }

    /// `R` rows of the panel times all columns. Safety: V's level.
    #[inline(always)]
    unsafe fn columns<V: Vector, const R: usize>(
        &mut self,
        k: &Range<usize>,
        row: usize,
        factors: &[f32; ROWS],
    ) {
        let blocks = self.task.blocks();
        // Two vectors: two blocks of columns where a vector is a line, else one.
        let step = 2 * V::LANES / BLOCK;
        for block in blocks.clone().step_by(step) {
            // A missing second block repeats the first.
            let second = if step == 2 && block + 1 < blocks.end { block + 1 } else { block };
            let half = if step == 2 { 0 } else { V::LANES };
            // SAFETY: the blocks have a line for each k; sums hold ROWS x 16 a block of the chunk.
            unsafe {
                let x = [
                    self.task.packed.block(Form::Single, block).add(k.start).cast::<f32>(),
                    self.task
                        .packed
                        .block(Form::Single, second)
                        .add(k.start)
                        .cast::<f32>()
                        .add(half),
                ];
                let w = self.scratch.panel[row].as_ptr();
                let part = products::<V, R>(w, x, k.len());
                for i in 0..R {
                    let factor = V::splat(factors[row + i]);
                    for (j, b) in [block, second].into_iter().enumerate() {
                        if j == 1 && step == 2 && second == block {
                            break;
                        }
                        let at = ((b - blocks.start) * ROWS + row + i) * BLOCK + j * half;
                        let sum = self.scratch.sums.as_mut_ptr().add(at);
                        let before = if k.start == 0 { V::splat(0.0) } else { V::load(sum) };
                        part[i][j].fma(factor, before).store(sum);
                    }
                }
            }
        }
    }
}

/// Sums over `len` of `R` panel rows from `w` with two vectors of columns, a line apart in k.
/// Safety: V's level; `len` numbers of each row and `len` lines of each `x`.
#[inline(always)]
unsafe fn products<V: Vector, const R: usize>(
    w: *const f32,
    x: [*const f32; 2],
    len: usize,
) -> [[V; 2]; R] {
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [[V::splat(0.0); 2]; R];
        for k in 0..len {
            let (a, b) = (V::load(x[0].add(k * BLOCK)), V::load(x[1].add(k * BLOCK)));
            for i in 0..R {
                let weight = V::splat(*w.add(i * PIECE + k));
                acc[i][0] = weight.fma(a, acc[i][0]);
                acc[i][1] = weight.fma(b, acc[i][1]);
            }
        }
        acc
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::Encoding;
    use crate::cpu::matmul::tests::{encodings, noise, Owned};
    use crate::simd::available;
    use proptest::prelude::*;

    fn all(level: Level, m: &Matrix<'_>, x: &[f32], n: usize) -> Vec<f32> {
        let panels = &mut Panels::of([Form::of(level, m.codes)].into_iter());
        through(panels, level, m, x, n)
    }

    fn through(panels: &mut Panels, level: Level, m: &Matrix<'_>, x: &[f32], n: usize) -> Vec<f32> {
        let mut packed = Packed::default();
        pack(level, &[m.codes], x, n, m.cols, &mut packed);
        let mut y = vec![f32::NAN; n * m.rows];
        let out = Columns::of(&mut y, m.rows, m.rows, n);
        prefill(level, panels, m, 0..m.rows, packed.all(), out, &|| true);
        y
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn equals_a_float64_product(
            encoding in encodings(), rows in 1usize..70, cols in 1usize..700, n in 1usize..70,
            skew in 0usize..5, seed in 1u64..1000,
        ) {
            let owned = Owned::random(encoding, (rows, cols), skew, seed);
            let (cols, codes) = (owned.cols(), encoding.codes);
            let mut x = noise(seed + 7, n * cols);
            for level in available() {
                if Form::of(level, codes) == Form::Pairs {
                    // Rounded beforehand, BF16 activations cost nothing.
                    for v in &mut x {
                        *v = half::bf16::from_f32(*v).to_f32();
                    }
                }
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
        fn bits_ignore_neighbours_and_split(
            encoding in encodings(), rows in 1usize..70, cols in 1usize..300, n in 1usize..70,
            split in 0usize..70, seed in 1u64..1000,
        ) {
            let owned = Owned::random(encoding, (rows, cols), 0, seed);
            let (cols, codes) = (owned.cols(), encoding.codes);
            let other = owned.shifted(3);
            let (split, m) = (split.min(rows), other.matrix());
            let x = noise(seed + 7, n * cols);
            let mut packed = Packed::default();
            for level in available() {
                let whole = all(level, &owned.matrix(), &x, n);
                let panels = &mut Panels::of([Form::of(level, codes)].into_iter());
                for c in [0, n / 2, n - 1] {
                    pack(level, &[codes], &x[c * cols..][..cols], 1, cols, &mut packed);
                    let mut alone = vec![f32::NAN; rows];
                    let (upper, lower) = alone.split_at_mut(split);
                    for (rows, y) in [(0..split, upper), (split..rows, lower)] {
                        prefill(level, panels, &m, rows, packed.all(), Columns::one(y), &|| true);
                    }
                    for r in 0..rows {
                        prop_assert_eq!(whole[c * rows + r].to_bits(), alone[r].to_bits());
                    }
                }
            }
        }
    }

    #[test]
    fn panels_bring_nothing_from_one_matrix_to_the_next() {
        let (rows, cols, n) = (40, 512, 40);
        let among = [Codes::Q4k, Codes::Bf16, Codes::Q8x0, Codes::Q6k, Codes::E4m3, Codes::Q4k];
        let x = noise(9, n * cols);
        for level in available() {
            let panels = &mut Panels::of(among.map(|codes| Form::of(level, codes)).into_iter());
            for codes in among {
                let owned = Owned::random(Encoding::plain(codes), (rows, cols), 0, 5);
                let y = through(panels, level, &owned.matrix(), &x, n);
                assert_eq!(y, all(level, &owned.matrix(), &x, n), "{level:?} {codes:?}");
            }
        }
    }

    #[test]
    fn more_than_a_chunk_and_a_group_and_a_nan_stays_in_its_column() {
        let (rows, cols, n) = (300, 270, CHUNK + 20);
        for codes in [Codes::Bf16, Codes::E4m3, Codes::F32] {
            let owned = Owned::random(Encoding::plain(codes), (rows, cols), 0, 5);
            let mut x = noise(9, n * cols);
            let clean = x.clone();
            x[CHUNK * cols + 3] = f32::NAN;
            for level in available() {
                let (y, want) =
                    (all(level, &owned.matrix(), &x, n), all(level, &owned.matrix(), &clean, n));
                for c in 0..n {
                    for (y, want) in y[c * rows..][..rows].iter().zip(&want[c * rows..]) {
                        assert!(if c == CHUNK { y.is_nan() } else { y == want });
                    }
                }
            }
        }
    }
}
