//! BF16 panels times BF16 columns, float32 sums: AMX tiles, or AVX-512 dot products.
//!
//! Rows pass in groups, whose numbers lie as AMX tiles in the second-level cache: packed
//! columns are read once for each group, weights once for all columns of a chunk. A packed block is
//! 16 columns of pairs; both kernels take two blocks at a time, AMX with 32 rows, dot products with
//! 8. Invariants: a panel starts at a multiple of 32 in k, with zeros around what it holds; tile
//! registers are configured and released within [`run`].

#![allow(clippy::needless_range_loop)]

use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;

use super::packed::{Form, Line, Panels, Part, BLOCK, CHUNK, GROUP, STEPS};
use crate::abi::Codes;
use crate::cpu::codes::Unpack;
use crate::field::Columns;
use crate::matrix::Matrix;
use crate::simd::x86::{f8_to_bf16, to_bf16, V512};
use crate::simd::Vector;

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

/// Where FP8 codes have to stand so that unpacking leaves 32 and 32 in order.
const ORDER: [u8; 64] = {
    let mut index = [0; 64];
    let mut at = 0;
    while at < 64 {
        let (l, w) = (at / 16, at % 16);
        index[at] = (32 * (w / 8) + 8 * l + w % 8) as u8;
        at += 1;
    }
    index
};

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
        unsafe { configure() };
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
        unsafe { asm!("tilerelease", options(nomem, nostack)) };
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
    /// Steps that share factors.
    cut: usize,
    /// Column of the first cut's factors.
    block: usize,
}

impl Piece {
    fn steps(&self) -> usize {
        (self.k.end - self.first).div_ceil(32)
    }
}

impl Task<'_> {
    /// The piece that starts at `from`: whole factor blocks where they end on steps, else one.
    fn piece(&self, from: usize) -> Piece {
        let cols = self.m.cols;
        let (width, first) = (self.m.group_cols(), from / 32 * 32);
        let block = from / width;
        let most = first + 32 * STEPS;
        let (end, cut) = if width < 32 * STEPS && width.is_multiple_of(32) {
            (from + 32 * STEPS / width * width, width / 32)
        } else {
            (most.min((block + 1) * width), STEPS)
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
            unsafe { self.fill(&piece, &mut panels.panel) };
            self.factors(&piece, &mut panels.factors);
            let height = if self.amx { 32 } else { 8 };
            for pair in 0..pairs {
                let block = blocks.start + 2 * pair;
                let meet = Meet {
                    piece: &piece,
                    near: self.lines(block, &piece),
                    far: (block + 1 < blocks.end).then(|| self.lines(block + 1, &piece)),
                    sums: 2 * pair * GROUP,
                    scaled: self.m.is_scaled(),
                };
                for row in (0..self.rows.len()).step_by(height) {
                    // SAFETY: the panel is filled; the caller has the levels.
                    unsafe {
                        if self.amx {
                            meet.tiles(row, panels);
                        } else {
                            meet.dots(row, panels);
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

    /// The piece's numbers of the rows as bfloat16 tiles, zeros around.
    ///
    /// # Safety
    /// The CPU has AVX-512 BF16 and VBMI; `piece.k` lies in the rows.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16")]
    unsafe fn fill(&self, piece: &Piece, panel: &mut [Line]) {
        let m = self.m;
        // SAFETY: 64 bytes.
        let order = unsafe { _mm512_loadu_si512(ORDER.as_ptr().cast()) };
        let steps = piece.steps();
        let plain = matches!(m.codes, Codes::E4m3 | Codes::Bf16);
        let mut unpacked = [0.0; 32 * STEPS];
        for i in 0..self.rows.len().next_multiple_of(32) {
            let live = i < self.rows.len();
            let row = (self.rows.start + i) * m.stride();
            let row = m.data.as_ptr().wrapping_add(row);
            if !plain {
                let row = live.then_some(self.rows.start + i);
                // SAFETY: the caller has the levels; `piece.k` lies in the row.
                unsafe { self.unpack(row, piece, &mut unpacked) };
            }
            for step in (0..steps).step_by(2) {
                // Numbers from.. + 64 that belong to the piece, as bits.
                let from = piece.first + 32 * step;
                let (skip, end) = (piece.k.start.saturating_sub(from), piece.k.end - from);
                let mask = if live { below(end) & !below(skip) } else { 0 };
                let halves = match m.codes {
                    Codes::E4m3 => {
                        // SAFETY: masked-off bytes are not read, the others lie in the row.
                        let codes =
                            unsafe { _mm512_maskz_loadu_epi8(mask, row.wrapping_add(from).cast()) };
                        // SAFETY: the caller has VBMI.
                        unsafe { f8_to_bf16(_mm512_permutexvar_epi8(order, codes)) }
                    }
                    Codes::Bf16 => {
                        let at = row.wrapping_add(2 * from).cast::<i16>();
                        // SAFETY: as above.
                        unsafe {
                            [
                                _mm512_maskz_loadu_epi16(mask as u32, at),
                                _mm512_maskz_loadu_epi16((mask >> 32) as u32, at.wrapping_add(32)),
                            ]
                        }
                    }
                    Codes::F32
                    | Codes::F16
                    | Codes::I8
                    | Codes::I4
                    | Codes::E2m1
                    | Codes::Q8x0
                    | Codes::Q4x0
                    | Codes::Q4k
                    | Codes::Q6k => {
                        let numbers = unpacked[32 * step..].as_ptr();
                        // SAFETY: the caller has the levels; the buffer holds whole steps.
                        unsafe { [pairs(numbers), pairs(numbers.wrapping_add(32))] }
                    }
                };
                // STEPS is even, so the second half has its place, too.
                for (half, numbers) in halves.into_iter().enumerate() {
                    let line = &mut panel[(i / 16 * STEPS + step + half) * 16 + i % 16];
                    // SAFETY: a line is 64 bytes, aligned.
                    unsafe { _mm512_store_si512(line.0.as_mut_ptr().cast(), numbers) };
                }
            }
        }
    }

    /// The piece's numbers of a row, less their zero points, and zeros around them.
    ///
    /// # Safety
    /// The CPU has AVX-512 BF16 and VBMI; `piece.k` lies in the row.
    unsafe fn unpack(&self, row: Option<usize>, piece: &Piece, out: &mut [f32; 32 * STEPS]) {
        out.fill(0.0);
        let Some(row) = row else { return };
        let (m, k) = (self.m, piece.k.clone());
        let before = k.start - piece.first;
        let mut panel = [[0.0; 32 * STEPS]];
        let count = k.len();
        // SAFETY: the caller has the level; a piece has at most as many numbers.
        unsafe { V512::<true>::apart(Unpack { m, rows: row..row + 1, k, panel: &mut panel }) };
        let out = &mut out[before..before + count];
        out.copy_from_slice(&panel[0][..count]);
        if let Some(scales) = m.scales.filter(|scales| scales.zeros.is_some()) {
            let group = m.first_scale(row, &scales) + piece.block;
            for (at, numbers) in out.chunks_mut(scales.block_cols).enumerate() {
                let zero = scales.zero(group + at);
                numbers.iter_mut().for_each(|number| *number -= zero);
            }
        }
    }

    /// The factors of each cut and row.
    fn factors(&self, piece: &Piece, factors: &mut [[f32; GROUP]]) {
        if !self.m.is_scaled() {
            return;
        }
        for (i, row) in self.rows.clone().enumerate() {
            for cut in 0..piece.steps().div_ceil(piece.cut) {
                // Zero points are gone from the panel.
                [factors[cut][i], _] = self.m.factor(row, piece.block + cut);
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

/// Two vectors as bfloat16.
///
/// # Safety
/// The CPU has AVX-512 BF16; 32 numbers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16")]
unsafe fn pairs(numbers: *const f32) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe { to_bf16(V512::load(numbers), V512::load(numbers.add(16))) }
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
    /// Line of `Panels::sums` where the first block's rows begin; the second's are GROUP on.
    sums: usize,
    scaled: bool,
}

impl Meet<'_> {
    fn fresh(&self) -> bool {
        self.piece.k.start == 0
    }

    /// Adds 32 rows from `row` by AMX tiles.
    ///
    /// # Safety
    /// AMX is there and configured; AVX-512; the panel is filled.
    #[target_feature(enable = "avx512f")]
    unsafe fn tiles(&self, row: usize, panels: &mut Panels) {
        let sums = panels.sums.as_mut_ptr().wrapping_add(self.sums + row).cast::<f32>();
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
                    zero();
                } else {
                    load(sums, far);
                }
                multiply(panel, self.near, second, self.piece.steps());
                store(sums, far);
            }
            return;
        }
        let (steps, cut) = (self.piece.steps(), self.piece.cut);
        for (number, step) in (0..steps).step_by(cut).enumerate() {
            let count = cut.min(steps - step);
            let at = step * 16;
            let (near, far) = (self.near.wrapping_add(at), second.wrapping_add(at));
            // SAFETY: as above.
            unsafe {
                zero();
                multiply(panel.wrapping_add(at), near, far, count);
                store(aside, aside.wrapping_add(2 * TILE));
            }
            let factors = &panels.factors[number][row..row + 32];
            let fresh = self.fresh() && number == 0;
            for block in 0..1 + usize::from(self.far.is_some()) {
                for (i, factor) in factors.iter().enumerate() {
                    let part = aside.wrapping_add((2 * block * 16 + i) * BLOCK);
                    let sum = sums.wrapping_add((block * GROUP + i) * BLOCK);
                    // SAFETY: tiles and sums hold 32 rows a block from here.
                    unsafe { add(sum, _mm512_loadu_ps(part), *factor, fresh) };
                }
            }
        }
    }

    /// Adds 8 rows from `row` by dot products of pairs.
    ///
    /// # Safety
    /// AVX-512 BF16; the panel is filled.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    unsafe fn dots(&self, row: usize, panels: &mut Panels) {
        let sums = panels.sums.as_mut_ptr().wrapping_add(self.sums + row).cast::<f32>();
        let panel = panels.panel[row / 16 * STEPS * 16 + row % 16..].as_ptr();
        let second = self.far.unwrap_or(self.near);
        let (steps, cut) = (self.piece.steps(), self.piece.cut);
        for (number, step) in (0..steps).step_by(cut).enumerate() {
            let (at, count) = (step * 16, cut.min(steps - step));
            let x = [self.near.wrapping_add(at), second.wrapping_add(at)];
            // SAFETY: as in `tiles`.
            let part = unsafe { dots_8(panel.wrapping_add(at), x, count) };
            for i in 0..8 {
                let factor = if self.scaled { panels.factors[number][row + i] } else { 1.0 };
                for block in 0..1 + usize::from(self.far.is_some()) {
                    let sum = sums.wrapping_add((block * GROUP + i) * BLOCK);
                    // SAFETY: sums hold 8 rows a block from here.
                    unsafe { add(sum, part[i][block], factor, self.fresh() && number == 0) };
                }
            }
        }
    }
}

/// `sum = part * factor + sum`, or without the old sum.
///
/// # Safety
/// AVX-512; 16 floats at `sum`.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn add(sum: *mut f32, part: __m512, factor: f32, fresh: bool) {
    // SAFETY: the caller's promise.
    let before = if fresh { _mm512_setzero_ps() } else { unsafe { _mm512_loadu_ps(sum) } };
    let after = _mm512_fmadd_ps(part, _mm512_set1_ps(factor), before);
    // SAFETY: as above.
    unsafe { _mm512_storeu_ps(sum, after) };
}

/// Sums over `steps` steps of 8 panel rows with two blocks.
///
/// # Safety
/// AVX-512 BF16; tiles and lines are readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn dots_8(panel: *const Line, x: [*const Line; 2], steps: usize) -> [[__m512; 2]; 8] {
    let mut acc = [[_mm512_setzero_ps(); 2]; 8];
    // SAFETY: the caller's promise; the vectors are plain bits.
    unsafe {
        for step in 0..steps {
            let tile = panel.add(16 * step).cast::<i32>();
            for pair in 0..16 {
                let line = 16 * step + pair;
                let columns = [
                    std::mem::transmute::<__m512i, __m512bh>(_mm512_load_si512(
                        x[0].add(line).cast(),
                    )),
                    std::mem::transmute::<__m512i, __m512bh>(_mm512_load_si512(
                        x[1].add(line).cast(),
                    )),
                ];
                for i in 0..8 {
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

/// Eight tiles of 16 rows x 64 bytes.
///
/// # Safety
/// AMX is granted.
unsafe fn configure() {
    #[repr(C, align(64))]
    struct Config([u8; 64]);
    let mut config = Config([0; 64]);
    config.0[0] = 1;
    for tile in 0..8 {
        config.0[16 + 2 * tile] = 64;
        config.0[48 + tile] = 16;
    }
    // SAFETY: palette 1 allows these shapes; the caller has AMX.
    unsafe {
        asm!("ldtilecfg [{0}]", in(reg) &config, options(nostack, readonly),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _);
    }
}

/// Clears the four tiles of sums. Safety: configured.
#[inline(always)]
unsafe fn zero() {
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            options(nomem, nostack)
        );
    }
}

/// Loads rows 0..16 and 16..32 of two blocks. Safety: configured; two tiles from each pointer.
#[inline(always)]
unsafe fn load(near: *const f32, far: *const f32) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "tileloadd tmm0, [{near} + {stride}]",
            "tileloadd tmm1, [{far} + {stride}]",
            "tileloadd tmm2, [{near} + {stride} + 1024]",
            "tileloadd tmm3, [{far} + {stride} + 1024]",
            near = in(reg) near, far = in(reg) far, stride = in(reg) 64usize,
            options(nostack, readonly),
        );
    }
}

/// Stores what `load` loads. Safety: as `load`, writable.
#[inline(always)]
unsafe fn store(near: *mut f32, far: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "tilestored [{near} + {stride}], tmm0",
            "tilestored [{far} + {stride}], tmm1",
            "tilestored [{near} + {stride} + 1024], tmm2",
            "tilestored [{far} + {stride} + 1024], tmm3",
            near = in(reg) near, far = in(reg) far, stride = in(reg) 64usize,
            options(nostack),
        );
    }
}

/// Adds `steps` steps of 32 in k. Safety: configured; panel and lines hold that many.
#[inline(always)]
unsafe fn multiply(panel: *const Line, near: *const Line, far: *const Line, steps: usize) {
    // SAFETY: the caller's promise; the loop runs `steps > 0` times.
    unsafe {
        asm!(
            "2:",
            "tileloadd tmm6, [{near} + {line}]",
            "tileloadd tmm4, [{upper} + {line}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{far} + {line}]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{lower} + {line}]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {near}, 1024",
            "add {far}, 1024",
            "add {upper}, 1024",
            "add {lower}, 1024",
            "dec {steps}",
            "jnz 2b",
            near = inout(reg) near => _,
            far = inout(reg) far => _,
            upper = inout(reg) panel => _,
            lower = inout(reg) panel.wrapping_add(16 * STEPS) => _,
            steps = inout(reg) steps => _,
            line = in(reg) 64usize,
            options(nostack, readonly),
        );
    }
}
