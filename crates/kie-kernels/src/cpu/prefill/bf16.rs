//! BF16 panels times BF16 columns, float32 sums: AMX tiles, or AVX-512 dot products.
//!
//! Rows pass in groups, whose numbers lie as AMX tiles in the second-level cache: packed
//! columns are read once for each group, weights once for all columns of a chunk. A packed block is
//! 16 columns of pairs; both kernels take two blocks at a time, AMX with 32 rows, dot products with
//! 8. Invariants: a panel starts at a multiple of 32 in k, with zeros around what it holds; tile
//! registers are configured and released within [`run`].

#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;
use std::ops::Range;

use super::amx;
use super::lines::{self, Values};
use super::packed::{Form, Line, Panels, Part, BLOCK, CHUNK, CUTS, GROUP, STEPS};
use crate::field::Columns;
use crate::matrix::{Factors, Matrix};
use crate::simd::x86::V512;
use crate::simd::{Kernel, Vector};

/// Floats of one tile of sums.
const TILE: usize = 16 * 16;

/// Transposes 16 x 16 dwords.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose(r: [__m512i; 16]) -> [__m512i; 16] {
    let mut a = r;
    for i in 0..8 {
        a[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    // b[4 i + j]: rows 4 i .. 4 i + 4 of column j of each 128-bit lane.
    let mut b = a;
    for i in 0..4 {
        b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
        b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
    }
    let mut out = b;
    for j in 0..4 {
        let low = _mm512_shuffle_i32x4::<0x44>(b[j], b[4 + j]);
        let high = _mm512_shuffle_i32x4::<0xee>(b[j], b[4 + j]);
        let low2 = _mm512_shuffle_i32x4::<0x44>(b[8 + j], b[12 + j]);
        let high2 = _mm512_shuffle_i32x4::<0xee>(b[8 + j], b[12 + j]);
        out[j] = _mm512_shuffle_i32x4::<0x88>(low, low2);
        out[4 + j] = _mm512_shuffle_i32x4::<0xdd>(low, low2);
        out[8 + j] = _mm512_shuffle_i32x4::<0x88>(high, high2);
        out[12 + j] = _mm512_shuffle_i32x4::<0xdd>(high, high2);
    }
    out
}

/// Packs up to 16 columns of `cols` numbers as pairs.
///
/// # Safety
/// The CPU has AVX-512 BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) unsafe fn pack(columns: &[f32], cols: usize, out: &mut [Line]) {
    for (step, lines) in out.chunks_exact_mut(16).enumerate() {
        let k = step * 32;
        let mask = |from: usize| -> __mmask16 {
            let left = cols.saturating_sub(from).min(16);
            ((1u32 << left) - 1) as u16
        };
        let mut rows = [_mm512_setzero_si512(); 16];
        for (row, column) in rows.iter_mut().zip(columns.chunks_exact(cols)) {
            let at = column.as_ptr().wrapping_add(k);
            // SAFETY: masked-off lanes are not read, the others lie in the column.
            let low = unsafe { _mm512_maskz_loadu_ps(mask(k), at) };
            // SAFETY: as above.
            let high = unsafe { _mm512_maskz_loadu_ps(mask(k + 16), at.wrapping_add(16)) };
            let pairs = _mm512_cvtne2ps_pbh(high, low);
            // SAFETY: both are 64 plain bytes.
            *row = unsafe { std::mem::transmute::<__m512bh, __m512i>(pairs) };
        }
        for (line, row) in lines.iter_mut().zip(transpose(rows)) {
            // SAFETY: a line is 64 bytes, aligned.
            unsafe { _mm512_store_si512(line.0.as_mut_ptr().cast(), row) };
        }
    }
}

/// Multiplies `rows` of `m` with all packed columns; see the parent's `prefill`, which checked the
/// arguments.
///
/// # Safety
/// The CPU has AVX-512 BF16 and VBMI; with `amx`, AMX-BF16 granted to the process.
pub(super) unsafe fn run(
    amx: bool,
    panels: &mut Panels,
    m: &Matrix<'_>,
    rows: Range<usize>,
    packed: Part<'_>,
    mut y: Columns<'_, f32>,
    goes_on: &dyn Fn() -> bool,
) {
    if amx {
        // SAFETY: the caller has AMX.
        unsafe { amx::configure() };
    }
    'all: for first in (0..packed.n).step_by(CHUNK) {
        let columns = first..packed.n.min(first + CHUNK);
        for r in rows.clone().step_by(GROUP) {
            if !goes_on() {
                break 'all;
            }
            let group = r..rows.end.min(r + GROUP);
            let at = group.start - rows.start..group.end - rows.start;
            let out = y.some(columns.clone(), at);
            let task = Task { amx, m, rows: group, packed, columns: columns.clone() };
            // SAFETY: the caller has the levels.
            unsafe {
                task.sum(panels);
                task.write(&panels.sums, out);
            }
        }
    }
    if amx {
        // SAFETY: the tiles were configured above.
        unsafe { amx::release() };
    }
}

/// A group of rows times a chunk of columns.
struct Task<'a> {
    amx: bool,
    m: &'a Matrix<'a>,
    rows: Range<usize>,
    packed: Part<'a>,
    columns: Range<usize>,
}

/// What a panel holds of its rows.
struct Piece {
    /// Numbers of each row.
    k: Range<usize>,
    /// Where the panel begins: `k.start`, or the multiple of 32 before it.
    first: usize,
    /// Lines of columns that share factors: pairs of numbers.
    cut: usize,
    /// Column of the first cut's factors.
    block: usize,
}

impl Piece {
    fn steps(&self) -> usize {
        (self.k.end - self.first).div_ceil(32)
    }

    /// The lines of each cut.
    fn cuts(&self) -> impl Iterator<Item = Range<usize>> {
        let (lines, cut) = (16 * self.steps(), self.cut);
        let numbers = 0..(self.k.end - self.first).div_ceil(2);
        numbers.step_by(cut).map(move |line| line..lines.min(line + cut))
    }
}

impl Task<'_> {
    /// The piece that starts at `from`: whole factor blocks where they end on steps, or in the
    /// middle of steps that have one zero point, else one.
    fn piece(&self, from: usize) -> Piece {
        let cols = self.m.cols;
        let (width, first) = (self.m.group_cols(), from / 32 * 32);
        let block = from / width;
        let most = first + 32 * STEPS;
        let whole = width.is_multiple_of(32) || width == 16 && !self.m.has_zeros();
        let (end, cut) = if width < 32 * STEPS && whole {
            (from + 32 * STEPS / width * width, width / 2)
        } else {
            (most.min((block + 1) * width), 16 * STEPS)
        };
        Piece { k: from..end.min(cols), first, cut, block }
    }

    /// Sums of all rows and columns.
    ///
    /// # Safety
    /// AVX-512 BF16 and VBMI, with `amx` configured tiles.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16")]
    unsafe fn sum(&self, panels: &mut Panels) {
        let blocks = self.columns.start / BLOCK..self.columns.end.div_ceil(BLOCK);
        let pairs = blocks.len().div_ceil(2);
        let mut from = 0;
        while from < self.m.cols {
            let piece = self.piece(from);
            // SAFETY: the piece lies in the rows; the caller has the level.
            unsafe { self.prepare(&piece, &blocks, panels) };
            let tiles = self.amx && piece.cut.is_multiple_of(16);
            // Of many cuts the sums stay in registers.
            let many = piece.cuts().count() > 2;
            let height = if tiles {
                32
            } else if many {
                4
            } else {
                8
            };
            for pair in 0..pairs {
                let block = blocks.start + 2 * pair;
                let meet = Meet {
                    piece: &piece,
                    near: self.lines(block, &piece),
                    far: (block + 1 < blocks.end).then(|| self.lines(block + 1, &piece)),
                    block: 2 * pair,
                    scaled: self.m.is_scaled(),
                    offsets: self.has_offsets(),
                };
                for row in (0..self.rows.len()).step_by(height) {
                    // SAFETY: the panel is filled; the caller has the levels.
                    unsafe {
                        if tiles {
                            meet.tiles(row, panels);
                        } else if !meet.scaled {
                            meet.few_cuts::<false>(row, panels);
                        } else if many && meet.offsets {
                            meet.many_cuts::<true>(row, panels);
                        } else if many {
                            meet.many_cuts::<false>(row, panels);
                        } else {
                            meet.few_cuts::<true>(row, panels);
                        }
                    }
                }
            }
            from = piece.k.end;
        }
    }

    /// Packed lines of a block at the panel's first k.
    fn lines(&self, block: usize, piece: &Piece) -> *const Line {
        self.packed.block(Form::Pairs, block).wrapping_add(piece.first / 2)
    }

    /// Whether sums get offsets; zero points are gone from the panel.
    fn has_offsets(&self) -> bool {
        self.m.has_offsets() && !self.m.has_zeros()
    }

    /// All that products of a piece need besides columns.
    ///
    /// # Safety
    /// The CPU has AVX-512 BF16 and VBMI; `piece.k` lies in the rows.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16")]
    unsafe fn prepare(&self, piece: &Piece, blocks: &Range<usize>, panels: &mut Panels) {
        // SAFETY: the caller's promise.
        unsafe { self.fill(piece, &mut panels.panel) };
        if self.m.is_scaled() {
            let Self { m, rows, .. } = self;
            let (group, count) = (piece.block, piece.cuts().count());
            let factors = &mut panels.factors[..];
            // SAFETY: the caller has the level; the groups exist.
            unsafe { V512::<true>::apart(FactorsOfRows { m, rows, group, count, factors }) };
        }
        if self.has_offsets() {
            for (block, sums) in blocks.clone().zip(panels.columns.chunks_exact_mut(CUTS)) {
                for (lines, sum) in piece.cuts().zip(sums) {
                    // SAFETY: the block has these lines; the caller has the level.
                    unsafe { sum_of(self.lines(block, piece), lines, sum) };
                }
            }
        }
    }

    /// The piece's numbers of the rows as bfloat16 tiles, less their zero points, zeros around.
    ///
    /// # Safety
    /// The CPU has AVX-512 BF16 and VBMI; `piece.k` lies in the rows.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16")]
    unsafe fn fill(&self, piece: &Piece, panel: &mut [Line]) {
        let m = self.m;
        // SAFETY: the caller has the level.
        let mut values = unsafe { [Values::of(m.codes, 0.0); 2] };
        let zeros = m.scales.filter(|scales| scales.zeros.is_some());
        for i in 0..self.rows.len().next_multiple_of(32) {
            let live = i < self.rows.len();
            let at = self.rows.start + i;
            let row = m.data.as_ptr().wrapping_add(at * m.stride());
            for step in (0..piece.steps()).step_by(2) {
                // Numbers from.. + 64 that belong to the piece, as bits.
                let from = piece.first + 32 * step;
                let (skip, end) = (piece.k.start.saturating_sub(from), piece.k.end - from);
                let mask = if live { below(end) & !below(skip) } else { 0 };
                if let (true, Some(scales)) = (live, &zeros) {
                    let last = m.first_scale(at, scales) + (m.cols - 1) / m.group_cols();
                    for (half, values) in values.iter_mut().enumerate() {
                        let cut = piece.block + 16 * (step + half) / piece.cut;
                        let zero = scales.zero(last.min(m.first_scale(at, scales) + cut));
                        // SAFETY: the caller has the level.
                        *values = unsafe { Values::of(m.codes, zero) };
                    }
                }
                // SAFETY: the caller has the level, and the row these numbers.
                let lines = unsafe { lines::two(m.codes, values, row, from, mask) };
                // STEPS is even, so the second half has its place, too.
                for (half, numbers) in lines.into_iter().enumerate() {
                    let line = &mut panel[(i / 16 * STEPS + step + half) * 16 + i % 16];
                    // SAFETY: a line is 64 bytes, aligned.
                    unsafe { _mm512_store_si512(line.0.as_mut_ptr().cast(), numbers) };
                }
            }
        }
    }

    /// Sums to `y`, transposed: the task's rows of its columns.
    ///
    /// # Safety
    /// AVX-512.
    #[target_feature(enable = "avx512f")]
    unsafe fn write(&self, sums: &[Line], mut y: Columns<'_, f32>) {
        let (rows, columns) = (self.rows.len(), self.columns.len());
        for block in 0..columns.div_ceil(BLOCK) {
            for row in (0..rows).step_by(16) {
                let mut tile = [_mm512_setzero_si512(); 16];
                for (line, from) in tile.iter_mut().zip(&sums[block * GROUP + row..]) {
                    // SAFETY: a line is 64 bytes, aligned.
                    *line = unsafe { _mm512_load_si512(from.0.as_ptr().cast()) };
                }
                let count = 16.min(rows - row);
                let mask = ((1u32 << count) - 1) as u16;
                let left = BLOCK.min(columns - block * BLOCK);
                for (c, line) in transpose(tile).into_iter().take(left).enumerate() {
                    let to = &mut y.piece(block * BLOCK + c)[row..row + count];
                    // SAFETY: `count` lanes are written.
                    unsafe { _mm512_mask_storeu_epi32(to.as_mut_ptr().cast(), mask, line) };
                }
            }
        }
    }
}

/// Factors of `count` groups from `group` on of some rows.
struct FactorsOfRows<'a> {
    m: &'a Matrix<'a>,
    rows: &'a Range<usize>,
    group: usize,
    count: usize,
    factors: &'a mut [Factors],
}

impl Kernel for FactorsOfRows<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        for (row, factors) in self.rows.clone().zip(self.factors) {
            // SAFETY: the caller has V's level; the groups exist.
            unsafe { self.m.factors::<V>(row, self.group, self.count, factors) };
        }
    }
}

/// Sums of the numbers of a block's columns in some of its lines.
///
/// # Safety
/// AVX-512 BF16; the lines are readable.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn sum_of(block: *const Line, lines: Range<usize>, sum: &mut Line) {
    let mut acc = _mm512_setzero_ps();
    for line in lines {
        // SAFETY: the caller's promise; the vectors are plain bits.
        unsafe {
            let pairs = _mm512_load_si512(block.wrapping_add(line).cast());
            let pairs = std::mem::transmute::<__m512i, __m512bh>(pairs);
            let ones = std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(0x3f80_3f80));
            acc = _mm512_dpbf16_ps(acc, pairs, ones);
        }
    }
    // SAFETY: a line is 64 bytes, aligned.
    unsafe { _mm512_store_ps(sum.0.as_mut_ptr().cast(), acc) };
}

/// The lowest `count` bits.
fn below(count: usize) -> u64 {
    if count >= 64 {
        u64::MAX
    } else {
        (1 << count) - 1
    }
}

/// A filled panel and two blocks of columns.
struct Meet<'a> {
    piece: &'a Piece,
    near: *const Line,
    /// The second block, if there is one.
    far: Option<*const Line>,
    /// The first block's number in the chunk.
    block: usize,
    scaled: bool,
    offsets: bool,
}

impl Meet<'_> {
    fn fresh(&self) -> bool {
        self.piece.k.start == 0
    }

    /// The two blocks' numbers, of which a missing second repeats the first.
    fn blocks(&self) -> [usize; 2] {
        [self.block, self.block + usize::from(self.far.is_some())]
    }

    /// Where a row's sums with a block are.
    fn sums(&self, block: usize, row: usize, panels: &mut Panels) -> *mut f32 {
        panels.sums.as_mut_ptr().wrapping_add(block * GROUP + row).cast()
    }

    /// Sums of a row with a block, and what a cut adds to them: `columns` are the block's own sums.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn with(
        &self,
        sums: __m512,
        part: __m512,
        (factors, cut): (&Factors, usize),
        columns: __m512,
    ) -> __m512 {
        let offset = || _mm512_fmadd_ps(columns, _mm512_set1_ps(factors.offsets[cut]), sums);
        let sums = if self.offsets { offset() } else { sums };
        _mm512_fmadd_ps(part, _mm512_set1_ps(factors.scales[cut]), sums)
    }

    /// Sums as they are before a cut.
    ///
    /// # Safety
    /// AVX-512; there are 16.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn before(&self, sums: *const f32, cut: usize) -> __m512 {
        let mask = if self.fresh() && cut == 0 { 0 } else { !0 };
        // SAFETY: the caller's promise.
        unsafe { _mm512_maskz_loadu_ps(mask, sums) }
    }

    /// A block's own sums in a cut; zeros where nobody wants them.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn columns(&self, panels: &Panels, block: usize, cut: usize) -> __m512 {
        if !self.offsets {
            return _mm512_setzero_ps();
        }
        let line = &panels.columns[block * CUTS + cut];
        // SAFETY: a line is 16 numbers, aligned.
        unsafe { _mm512_load_ps(line.0.as_ptr().cast()) }
    }

    /// Adds 32 rows from `row` by AMX tiles.
    ///
    /// # Safety
    /// AMX is there and configured; AVX-512; the panel is filled.
    #[target_feature(enable = "avx512f")]
    unsafe fn tiles(&self, row: usize, panels: &mut Panels) {
        let sums = self.sums(self.block, row, panels);
        let aside = panels.aside.as_mut_ptr().cast::<f32>();
        // A missing second block repeats the first, and its sums go nowhere.
        let second = self.far.unwrap_or(self.near);
        let panel = panels.panel[row / 16 * STEPS * 16..].as_ptr();
        if !self.scaled {
            let spare = aside.wrapping_add(2 * TILE);
            let far = if self.far.is_some() { sums.wrapping_add(GROUP * BLOCK) } else { spare };
            // SAFETY: the panel has 32 rows of `steps` steps from `row`, the blocks as many lines;
            // sums and tiles have room for what is loaded and stored.
            unsafe {
                if self.fresh() {
                    amx::zero();
                } else {
                    amx::load(sums, far);
                }
                amx::multiply(panel, self.near, second, self.piece.steps());
                amx::store(sums, far);
            }
            return;
        }
        for (cut, lines) in self.piece.cuts().enumerate() {
            let [near, far] = [self.near, second].map(|block| block.wrapping_add(lines.start));
            // SAFETY: as above; a cut is whole steps.
            unsafe {
                amx::zero();
                amx::multiply(panel.wrapping_add(lines.start), near, far, lines.len() / 16);
                amx::store(aside, aside.wrapping_add(2 * TILE));
            }
            for block in 0..1 + usize::from(self.far.is_some()) {
                let columns = self.columns(panels, self.block + block, cut);
                for i in 0..32 {
                    let part = aside.wrapping_add((2 * block * 16 + i) * BLOCK);
                    let sum = sums.wrapping_add((block * GROUP + i) * BLOCK);
                    let factors = (&panels.factors[row + i], cut);
                    // SAFETY: tiles and sums hold 32 rows a block from here.
                    unsafe {
                        let part = _mm512_loadu_ps(part);
                        let before = self.before(sum, cut);
                        _mm512_storeu_ps(sum, self.with(before, part, factors, columns));
                    }
                }
            }
        }
    }

    /// Adds 8 rows from `row` by dot products of pairs.
    ///
    /// # Safety
    /// AVX-512 BF16; the panel is filled.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn few_cuts<const SCALED: bool>(&self, row: usize, panels: &mut Panels) {
        let [near, far] = self.blocks().map(|block| self.sums(block, row, panels));
        let panel = panels.panel[row / 16 * STEPS * 16 + row % 16..].as_ptr();
        let x = [self.near, self.far.unwrap_or(self.near)];
        let factors: &[Factors; 8] = panels.factors[row..].first_chunk().expect("whole eights");
        for (cut, lines) in self.piece.cuts().enumerate() {
            // SAFETY: as in `tiles`.
            let part = unsafe { dots::<8>(panel, x, lines) };
            let columns = self.blocks().map(|block| self.columns(panels, block, cut));
            for i in 0..8 {
                let sums = [near, far].map(|sums| sums.wrapping_add(i * BLOCK));
                // SAFETY: sums hold 8 rows a block from here.
                let mut all = unsafe { [self.before(sums[0], cut), self.before(sums[1], cut)] };
                for block in 0..2 {
                    all[block] = if SCALED {
                        let factors = (&factors[i], cut);
                        self.with(all[block], part[i][block], factors, columns[block])
                    } else {
                        _mm512_add_ps(all[block], part[i][block])
                    };
                }
                // SAFETY: as above; where there is one block, both are the same.
                unsafe {
                    _mm512_storeu_ps(sums[0], all[0]);
                    _mm512_storeu_ps(sums[1], all[1]);
                }
            }
        }
    }

    /// Adds 4 rows from `row` by dot products of pairs; their sums stay in registers.
    ///
    /// # Safety
    /// AVX-512 BF16; the panel is filled, and has factors.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn many_cuts<const OFFSETS: bool>(&self, row: usize, panels: &mut Panels) {
        let sums = self.blocks().map(|block| self.sums(block, row, panels));
        let panel = panels.panel[row / 16 * STEPS * 16 + row % 16..].as_ptr();
        let x = [self.near, self.far.unwrap_or(self.near)];
        let mut all = [[_mm512_setzero_ps(); 2]; 4];
        for i in 0..4 {
            for block in 0..2 {
                // SAFETY: sums hold 4 rows a block from here.
                all[i][block] = unsafe { self.before(sums[block].add(i * BLOCK), 0) };
            }
        }
        let factors: &[Factors; 4] = panels.factors[row..].first_chunk().expect("whole fours");
        for (cut, lines) in self.piece.cuts().enumerate() {
            // SAFETY: as in `tiles`.
            let part = unsafe { dots::<4>(panel, x, lines) };
            let columns = self.blocks().map(|block| self.columns(panels, block, cut));
            for (i, factors) in factors.iter().enumerate() {
                let scale = _mm512_set1_ps(factors.scales[cut]);
                let offset = _mm512_set1_ps(factors.offsets[cut]);
                for block in 0..2 {
                    if OFFSETS {
                        all[i][block] = _mm512_fmadd_ps(columns[block], offset, all[i][block]);
                    }
                    all[i][block] = _mm512_fmadd_ps(part[i][block], scale, all[i][block]);
                }
            }
        }
        for i in 0..4 {
            for block in 0..2 {
                // SAFETY: as above; where there is one block, both are the same.
                unsafe { _mm512_storeu_ps(sums[block].add(i * BLOCK), all[i][block]) };
            }
        }
    }
}

/// Sums over some lines of `R` panel rows with two blocks; the lines are a multiple of 8, from one
/// on.
///
/// # Safety
/// AVX-512 BF16; tiles and lines are readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn dots<const R: usize>(
    panel: *const Line,
    x: [*const Line; 2],
    lines: Range<usize>,
) -> [[__m512; 2]; R] {
    let mut acc = [[_mm512_setzero_ps(); 2]; R];
    // SAFETY: the caller's promise; the vectors are plain bits.
    unsafe {
        for first in lines.step_by(8) {
            let tile = panel.add(first / 16 * 16).cast::<i32>().add(first % 16);
            for pair in 0..8 {
                let columns = [
                    std::mem::transmute::<__m512i, __m512bh>(_mm512_load_si512(
                        x[0].add(first + pair).cast(),
                    )),
                    std::mem::transmute::<__m512i, __m512bh>(_mm512_load_si512(
                        x[1].add(first + pair).cast(),
                    )),
                ];
                for i in 0..R {
                    let weight = _mm512_set1_epi32(*tile.add(16 * i + pair));
                    let weight = std::mem::transmute::<__m512i, __m512bh>(weight);
                    acc[i][0] = _mm512_dpbf16_ps(acc[i][0], weight, columns[0]);
                    acc[i][1] = _mm512_dpbf16_ps(acc[i][1], weight, columns[1]);
                }
            }
        }
    }
    acc
}
