//! Codes of rows as lines of 32 bfloat16, which panels of pairs are made of.
//!
//! A line takes a few instructions whatever its codes: halves of bytes are looked up in a table of
//! words, bytes are converted. All codes that come here are exact in bfloat16.

use std::arch::x86_64::*;

use crate::abi::Codes;
use crate::simd::x86::f8_to_bf16;
use crate::simd::E2M1;

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

/// Values of the codes 0 to 15, less what the smallest one is above them.
const fn counted(from: f32) -> [f32; 16] {
    let mut values = [0.0; 16];
    let mut code = 0;
    while code < 16 {
        values[code] = code as f32 + from;
        code += 1;
    }
    values
}

/// What the codes of a group stand for.
#[derive(Clone, Copy)]
pub(super) struct Values {
    /// Of the codes of four bits, twice.
    words: __m512i,
    /// What all others are lessened by.
    zero: __m512,
}

impl Values {
    /// Of `codes` less a zero point.
    ///
    /// # Safety
    /// The CPU has AVX-512 BF16.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16")]
    pub unsafe fn of(codes: Codes, zero: f32) -> Self {
        let values = match codes {
            Codes::I4 | Codes::Q4x0 => const { counted(-8.0) },
            Codes::Q4k => const { counted(0.0) },
            Codes::E2m1 => E2M1,
            Codes::F32
            | Codes::F16
            | Codes::Bf16
            | Codes::E4m3
            | Codes::I8
            | Codes::Q8x0
            | Codes::Q6k => [0.0; 16],
        };
        let zero = _mm512_set1_ps(zero);
        // SAFETY: 16 numbers; 32 plain bytes.
        unsafe {
            let values = _mm512_sub_ps(_mm512_loadu_ps(values.as_ptr()), zero);
            let words = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(values));
            Self { words: _mm512_broadcast_i64x4(words), zero }
        }
    }
}

/// The lines of the numbers from `k` on, a multiple of 32, of a row whose codes begin at `row`:
/// numbers that `mask` leaves out are zeros, and what only they need is not read.
///
/// # Safety
/// The CPU has AVX-512 BF16 and VBMI; the row has the others; they are neighbours, and whole lines
/// of codes in blocks.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16")]
pub(super) unsafe fn two(
    codes: Codes,
    values: [Values; 2],
    row: *const u8,
    k: usize,
    mask: u64,
) -> [__m512i; 2] {
    let masks = [mask as u32, (mask >> 32) as u32];
    // SAFETY: masked-off bytes are not read, the others lie in the row; the caller has the level.
    unsafe {
        match codes {
            Codes::E4m3 => {
                let order = _mm512_loadu_si512(ORDER.as_ptr().cast());
                let codes = _mm512_maskz_loadu_epi8(mask, row.wrapping_add(k).cast());
                f8_to_bf16(_mm512_permutexvar_epi8(order, codes))
            }
            Codes::Bf16 => {
                let at = row.wrapping_add(2 * k).cast::<i16>();
                [
                    _mm512_maskz_loadu_epi16(masks[0], at),
                    _mm512_maskz_loadu_epi16(masks[1], at.wrapping_add(32)),
                ]
            }
            Codes::F32
            | Codes::F16
            | Codes::I8
            | Codes::I4
            | Codes::E2m1
            | Codes::Q8x0
            | Codes::Q4x0
            | Codes::Q4k
            | Codes::Q6k => [
                one(codes, values[0], row, k, masks[0]),
                one(codes, values[1], row, k + 32, masks[1]),
            ],
        }
    }
}

/// As [`two`], of 32 numbers.
///
/// # Safety
/// As there.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16")]
unsafe fn one(codes: Codes, values: Values, row: *const u8, k: usize, mask: u32) -> __m512i {
    if mask == 0 {
        return _mm512_setzero_si512();
    }
    let at = |bytes: usize| row.wrapping_add(bytes);
    // SAFETY: the caller's promise; a block is read whole.
    unsafe {
        match codes {
            Codes::I4 | Codes::E2m1 => {
                let (skip, end) = (mask.trailing_zeros(), 32 - mask.leading_zeros());
                let bytes = (1u32 << end.div_ceil(2)) - (1u32 << (skip / 2));
                let bytes = _mm_maskz_loadu_epi8(bytes as u16, at(k / 2).cast());
                // The lower half of each byte, and the upper one behind it.
                let wide = _mm512_cvtepu8_epi32(bytes);
                let halves = _mm512_or_si512(wide, _mm512_slli_epi32::<12>(wide));
                _mm512_maskz_permutexvar_epi16(mask, halves, values.words)
            }
            Codes::Q4x0 => {
                let bytes = _mm_loadu_si128(at(k / 32 * 18 + 2).cast());
                let low = _mm256_cvtepu8_epi16(bytes);
                let high = _mm256_srli_epi16::<4>(low);
                let halves = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
                _mm512_permutexvar_epi16(halves, values.words)
            }
            Codes::Q4k => {
                let bytes = at(k / 256 * 144 + 16 + k % 256 / 64 * 32);
                let wide = _mm512_cvtepu8_epi16(_mm256_loadu_si256(bytes.cast()));
                let halves = if k.is_multiple_of(64) { wide } else { _mm512_srli_epi16::<4>(wide) };
                _mm512_permutexvar_epi16(halves, values.words)
            }
            Codes::I8 => {
                let bytes = _mm256_maskz_loadu_epi8(mask, at(k).cast());
                _mm512_maskz_mov_epi16(mask, signed(bytes, values.zero))
            }
            Codes::Q8x0 => {
                let bytes = _mm256_loadu_si256(at(k / 32 * 34 + 2).cast());
                signed(bytes, values.zero)
            }
            Codes::Q6k => {
                let (block, half, quarter) = (at(k / 256 * 210), k % 256 / 128, k % 128 / 32);
                let low = block.wrapping_add(64 * half + quarter % 2 * 32);
                let high = block.wrapping_add(128 + 32 * half);
                let (low, high) = (_mm256_loadu_si256(low.cast()), _mm256_loadu_si256(high.cast()));
                let shift = |by: usize| _mm_cvtsi32_si128(by as i32);
                let low = _mm256_srl_epi16(low, shift(quarter / 2 * 4));
                let low = _mm256_and_si256(low, _mm256_set1_epi8(15));
                let high = _mm256_srl_epi16(high, shift(2 * quarter));
                let high = _mm256_and_si256(high, _mm256_set1_epi8(3));
                let codes = _mm256_or_si256(low, _mm256_slli_epi16::<4>(high));
                signed(_mm256_sub_epi8(codes, _mm256_set1_epi8(32)), values.zero)
            }
            Codes::F32 | Codes::F16 | Codes::Bf16 | Codes::E4m3 => unreachable!("plain numbers"),
        }
    }
}

/// Signed bytes less a number.
///
/// # Safety
/// The CPU has AVX-512 BF16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16")]
unsafe fn signed(bytes: __m256i, zero: __m512) -> __m512i {
    let [low, high] = [_mm256_castsi256_si128(bytes), _mm256_extracti128_si256::<1>(bytes)];
    let [low, high] = [low, high]
        .map(|bytes| _mm512_sub_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), zero));
    // SAFETY: both are 64 plain bytes.
    unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low)) }
}
