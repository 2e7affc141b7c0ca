//! AVX2 and AVX-512 vectors of integers. What the parent module says of levels holds here.

use std::arch::x86_64::*;

use crate::simd::ints::Ints;

/// Eight lanes, AVX2.
#[derive(Clone, Copy)]
pub(crate) struct I256(pub(super) __m256i);

/// Sixteen lanes, AVX-512; `VNNI` says whether dot products of bytes exist.
#[derive(Clone, Copy)]
pub(crate) struct I512<const VNNI: bool>(pub(super) __m512i);

/// Without dot products of bytes, sums of two products saturate at 16 bits: `2 * 127 * 128` fits,
/// and so does `2 * 255 * 64`.
const PAIRED: u8 = 127;

impl Ints for I256 {
    const BYTES: usize = 32;
    const LARGEST: u8 = PAIRED;

    #[inline(always)]
    unsafe fn splat(value: i32) -> Self {
        // SAFETY: the caller has the level.
        Self(unsafe { _mm256_set1_epi32(value) })
    }
    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self {
        // SAFETY: the caller has the level and 32 readable bytes.
        Self(unsafe { _mm256_loadu_si256(from.cast()) })
    }
    #[inline(always)]
    unsafe fn pieces<const SIZE: usize>(from: *const u8, stride: usize) -> Self {
        // SAFETY: the caller has the level and the pieces.
        unsafe {
            if SIZE == 32 {
                return Self::load(from);
            }
            let low = _mm_loadu_si128(from.cast());
            Self(_mm256_set_m128i(_mm_loadu_si128(from.add(stride).cast()), low))
        }
    }
    #[inline(always)]
    unsafe fn halves(from: *const u8) -> [Self; 2] {
        // SAFETY: the caller has the level and 64 readable bytes.
        unsafe {
            let (a, b) = (Self::load(from).0, Self::load(from.add(32)).0);
            [
                Self(_mm256_permute2x128_si256::<0x20>(a, b)),
                Self(_mm256_permute2x128_si256::<0x31>(a, b)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn table(bytes: &[u8; 16]) -> Self {
        // SAFETY: the caller has the level; the array has 16 bytes.
        Self(unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(bytes.as_ptr().cast())) })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        // SAFETY: the caller has 32 writable bytes.
        unsafe { _mm256_storeu_si256(to.cast(), self.0) }
    }
    #[inline(always)]
    unsafe fn narrow(self, to: *mut u8) {
        // SAFETY: the caller has 8 writable bytes. The lowest bytes of each half, then both.
        unsafe {
            let lowest = _mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
            let bytes = _mm256_shuffle_epi8(self.0, _mm256_broadcastsi128_si256(lowest));
            let high = _mm256_extracti128_si256::<1>(bytes);
            _mm_storel_epi64(to.cast(), _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), high));
        }
    }
    #[inline(always)]
    fn evens(self, b: Self) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe {
            let (a, b) = (_mm256_castsi256_ps(self.0), _mm256_castsi256_ps(b.0));
            let pairs = _mm256_castps_si256(_mm256_shuffle_ps::<0b10_00_10_00>(a, b));
            _mm256_permute4x64_epi64::<0b11_01_10_00>(pairs)
        })
    }
    #[inline(always)]
    fn and(self, b: Self) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe { _mm256_and_si256(self.0, b.0) })
    }
    #[inline(always)]
    fn or(self, b: Self) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe { _mm256_or_si256(self.0, b.0) })
    }
    #[inline(always)]
    fn xor(self, b: Self) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe { _mm256_xor_si256(self.0, b.0) })
    }
    #[inline(always)]
    fn add(self, b: Self) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe { _mm256_add_epi32(self.0, b.0) })
    }
    #[inline(always)]
    fn sub(self, b: Self) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe { _mm256_sub_epi32(self.0, b.0) })
    }
    #[inline(always)]
    fn shl(self, bits: u32) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe { _mm256_sll_epi32(self.0, _mm_cvtsi32_si128(bits as i32)) })
    }
    #[inline(always)]
    fn shr(self, bits: u32) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe { _mm256_srl_epi32(self.0, _mm_cvtsi32_si128(bits as i32)) })
    }
    #[inline(always)]
    fn lookup(self, table: Self) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe { _mm256_shuffle_epi8(table.0, self.0) })
    }
    #[inline(always)]
    fn dot(self, codes: Self, digits: Self) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe {
            let pairs = _mm256_maddubs_epi16(codes.0, digits.0);
            _mm256_add_epi32(self.0, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        })
    }
}

impl<const VNNI: bool> Ints for I512<VNNI> {
    const BYTES: usize = 64;
    const LARGEST: u8 = if VNNI { 255 } else { PAIRED };

    #[inline(always)]
    unsafe fn splat(value: i32) -> Self {
        // SAFETY: the caller has the level.
        Self(unsafe { _mm512_set1_epi32(value) })
    }
    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self {
        // SAFETY: the caller has the level and 64 readable bytes.
        Self(unsafe { _mm512_loadu_si512(from.cast()) })
    }
    #[inline(always)]
    unsafe fn pieces<const SIZE: usize>(from: *const u8, stride: usize) -> Self {
        // SAFETY: the caller has the level and the pieces.
        Self(unsafe {
            if SIZE == 32 {
                let (a, b) = (I256::load(from).0, I256::load(from.add(stride)).0);
                _mm512_inserti64x4::<1>(_mm512_castsi256_si512(a), b)
            } else {
                let low = I256::pieces::<16>(from, stride).0;
                let high = I256::pieces::<16>(from.add(2 * stride), stride).0;
                _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
            }
        })
    }
    #[inline(always)]
    unsafe fn halves(from: *const u8) -> [Self; 2] {
        // SAFETY: the caller has the level and 128 readable bytes.
        unsafe {
            let (a, b) = (Self::load(from).0, Self::load(from.add(64)).0);
            [
                Self(_mm512_shuffle_i64x2::<0b10_00_10_00>(a, b)),
                Self(_mm512_shuffle_i64x2::<0b11_01_11_01>(a, b)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn table(bytes: &[u8; 16]) -> Self {
        // SAFETY: the caller has the level; the array has 16 bytes.
        Self(unsafe { _mm512_broadcast_i32x4(_mm_loadu_si128(bytes.as_ptr().cast())) })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        // SAFETY: the caller has 64 writable bytes.
        unsafe { _mm512_storeu_si512(to.cast(), self.0) }
    }
    #[inline(always)]
    unsafe fn narrow(self, to: *mut u8) {
        // SAFETY: the caller has 16 writable bytes.
        unsafe { _mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(self.0)) }
    }
    #[inline(always)]
    fn evens(self, b: Self) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe {
            let index =
                _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            _mm512_permutex2var_epi32(self.0, index, b.0)
        })
    }
    #[inline(always)]
    fn and(self, b: Self) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe { _mm512_and_si512(self.0, b.0) })
    }
    #[inline(always)]
    fn or(self, b: Self) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe { _mm512_or_si512(self.0, b.0) })
    }
    #[inline(always)]
    fn xor(self, b: Self) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe { _mm512_xor_si512(self.0, b.0) })
    }
    #[inline(always)]
    fn add(self, b: Self) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe { _mm512_add_epi32(self.0, b.0) })
    }
    #[inline(always)]
    fn sub(self, b: Self) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe { _mm512_sub_epi32(self.0, b.0) })
    }
    #[inline(always)]
    fn shl(self, bits: u32) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe { _mm512_sll_epi32(self.0, _mm_cvtsi32_si128(bits as i32)) })
    }
    #[inline(always)]
    fn shr(self, bits: u32) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe { _mm512_srl_epi32(self.0, _mm_cvtsi32_si128(bits as i32)) })
    }
    #[inline(always)]
    fn lookup(self, table: Self) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe { _mm512_shuffle_epi8(table.0, self.0) })
    }
    #[inline(always)]
    fn dot(self, codes: Self, digits: Self) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe {
            if VNNI {
                return Self(_mm512_dpbusd_epi32(self.0, codes.0, digits.0));
            }
            let pairs = _mm512_maddubs_epi16(codes.0, digits.0);
            _mm512_add_epi32(self.0, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
        })
    }
}
