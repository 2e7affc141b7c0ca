//! AVX2 and AVX-512 vectors, and the permission for AMX.
//!
//! Invariant: each type exists only where its level is available (see the parent module), which is
//! what every `SAFETY` line here that speaks of "the level" rests on.

mod ints;

use std::arch::x86_64::*;

use self::ints::{I256, I512};
use super::vector::{Kernel, Vector, E2M1};

/// Runs `kernel` as AVX2 code.
///
/// # Safety
/// The CPU has the features named.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn avx2<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the caller checked the level.
    unsafe { kernel.run::<V256>() }
}

/// Runs `kernel` as AVX-512 code.
///
/// # Safety
/// The CPU has the features named.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) unsafe fn avx512<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the caller checked the level.
    unsafe { kernel.run::<V512<false>>() }
}

/// Runs `kernel` as AVX-512 code with byte permutes and dot products.
///
/// # Safety
/// The CPU has the features named.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
#[target_feature(enable = "avx512vbmi,avx512bf16,avx512vnni")]
pub(crate) unsafe fn avx512_vbmi<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the caller checked the level.
    unsafe { kernel.run::<V512<true>>() }
}

/// Whether the CPU has AMX-BF16 and the kernel lets this process use the tile registers.
pub(super) fn amx_granted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    let leaf = __cpuid_count(7, 0);
    let (bf16, tile) = (leaf.edx >> 22 & 1, leaf.edx >> 24 & 1);
    let osxsave = __cpuid(1).ecx >> 27 & 1;
    if bf16 & tile & osxsave == 0 {
        return false;
    }
    let (low, _high): (u32, u32);
    // SAFETY: OSXSAVE is set, so xgetbv exists; it only reads XCR0.
    unsafe {
        std::arch::asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") _high,
            options(nomem, nostack));
    }
    if low >> 17 & 3 != 3 {
        return false;
    }
    if cfg!(not(target_os = "linux")) {
        return false;
    }
    #[cfg(target_os = "linux")]
    // SAFETY: arch_prctl with this code takes a number, no pointer.
    return unsafe {
        libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0
    };
    #[cfg(not(target_os = "linux"))]
    return false;
}

/// Eight lanes, AVX2.
#[derive(Clone, Copy)]
pub(crate) struct V256(__m256);

/// Sixteen lanes, AVX-512; `VBMI` says whether byte permutes and dot products exist.
#[derive(Clone, Copy)]
pub(crate) struct V512<const VBMI: bool>(__m512);

/// Values of the codes of 4-bit integers.
const I4: [f32; 16] =
    [-8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];

/// Eight halves of four bytes in order, in the lowest bits of each lane.
///
/// # Safety
/// The CPU has AVX2; the bytes are readable.
#[inline(always)]
unsafe fn nibbles8(from: *const u8) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let all = _mm256_set1_epi32(from.cast::<i32>().read_unaligned());
        _mm256_srlv_epi32(all, _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28))
    }
}

/// Sixteen halves of eight bytes in order, in the lowest bits of each lane.
///
/// # Safety
/// The CPU has AVX-512; the bytes are readable.
#[inline(always)]
unsafe fn nibbles16(from: *const u8) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe {
        let which = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
        let shift = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
        let all = _mm512_castsi128_si512(_mm_loadl_epi64(from.cast()));
        _mm512_srlv_epi32(_mm512_permutexvar_epi32(which, all), shift)
    }
}

/// Eight float16, `stride` bytes apart.
///
/// # Safety
/// They are readable.
#[inline(always)]
unsafe fn halves8(from: *const u8, stride: usize) -> __m128i {
    let mut all = [0i16; 8];
    for i in 0..8 {
        // SAFETY: the caller's promise.
        all[i] = unsafe { from.add(i * stride).cast::<i16>().read_unaligned() };
    }
    let [a, b, c, d, e, f, g, h] = all;
    // SAFETY: SSE2 is part of every x86-64. One by one into a register: a vector read from where
    // parts of it were just written waits for them.
    unsafe { _mm_setr_epi16(a, b, c, d, e, f, g, h) }
}

/// # Safety
/// The CPU has F16C.
#[inline(always)]
unsafe fn half(bytes: [u8; 2]) -> f32 {
    let bits = i32::from(u16::from_le_bytes(bytes));
    // SAFETY: the caller has F16C.
    unsafe { _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits))) }
}

impl Vector for V256 {
    const LANES: usize = 8;
    const REGISTERS: usize = 16;
    type Ints = I256;

    #[inline(always)]
    unsafe fn apart<K: Kernel>(kernel: K) -> K::Output {
        // SAFETY: the caller has the level.
        unsafe { avx2(kernel) }
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the caller has the level.
        Self(unsafe { _mm256_set1_ps(value) })
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller has the level and 32 readable bytes.
        Self(unsafe { _mm256_loadu_ps(from) })
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> Self {
        // SAFETY: the caller has the level and 16 readable bytes.
        Self(unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) })
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u8) -> Self {
        // SAFETY: the caller has the level and 16 readable bytes.
        Self(unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        })
    }
    #[inline(always)]
    unsafe fn load_f8(from: *const u8) -> Self {
        // SAFETY: the caller has the level and 8 readable bytes. The route through float16 is the
        // one of `f8_to_f32`; the all-ones of the comparison is a float16 NaN.
        Self(unsafe {
            let code = _mm_cvtepu8_epi16(_mm_loadl_epi64(from.cast()));
            let sign = _mm_and_si128(_mm_slli_epi16::<8>(code), _mm_set1_epi16(i16::MIN));
            let magnitude = _mm_and_si128(_mm_slli_epi16::<7>(code), _mm_set1_epi16(0x3f80));
            let nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x3f80));
            let half = _mm_or_si128(_mm_or_si128(sign, magnitude), nan);
            _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0))
        })
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Self {
        // SAFETY: the caller has the level and 8 readable bytes.
        Self(unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()))) })
    }
    #[inline(always)]
    unsafe fn load_i4(from: *const u8) -> Self {
        // SAFETY: the caller has the level and 4 readable bytes.
        Self(unsafe {
            let codes = _mm256_and_si256(nibbles8(from), _mm256_set1_epi32(15));
            _mm256_cvtepi32_ps(_mm256_sub_epi32(codes, _mm256_set1_epi32(8)))
        })
    }
    #[inline(always)]
    unsafe fn load_e2m1(from: *const u8) -> Self {
        // SAFETY: the caller has the level and 4 readable bytes; the table has 16 numbers. The
        // permutation reads the lowest three bits; the fourth is the sign.
        Self(unsafe {
            let codes = nibbles8(from);
            let size = _mm256_permutevar8x32_ps(_mm256_loadu_ps(E2M1.as_ptr()), codes);
            let sign = _mm256_slli_epi32::<28>(codes);
            let sign = _mm256_and_si256(sign, _mm256_set1_epi32(i32::MIN));
            _mm256_xor_ps(size, _mm256_castsi256_ps(sign))
        })
    }
    #[inline(always)]
    unsafe fn load_bits(from: *const u8, shift: u32, mask: u8) -> Self {
        // SAFETY: the caller has the level and 8 readable bytes.
        Self(unsafe {
            let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast()));
            let bits = _mm256_srl_epi32(bytes, _mm_cvtsi32_si128(shift as i32));
            _mm256_cvtepi32_ps(_mm256_and_si256(bits, _mm256_set1_epi32(mask.into())))
        })
    }
    #[inline(always)]
    unsafe fn load_e8m0(from: *const u8) -> Self {
        // SAFETY: the caller has the level and 8 readable bytes.
        Self(unsafe {
            let bits = _mm256_slli_epi32::<23>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast())));
            _mm256_castsi256_ps(_mm256_max_epi32(bits, _mm256_set1_epi32(1 << 22)))
        })
    }
    #[inline(always)]
    unsafe fn half(bytes: [u8; 2]) -> f32 {
        // SAFETY: the caller has the level.
        unsafe { half(bytes) }
    }
    #[inline(always)]
    unsafe fn load_halves(from: *const u8, stride: usize) -> Self {
        // SAFETY: the caller has the level and the bytes.
        Self(unsafe { _mm256_cvtph_ps(halves8(from, stride)) })
    }
    #[inline(always)]
    unsafe fn bytes([first, _]: [u64; 2]) -> Self {
        // SAFETY: the caller has the level.
        Self(unsafe { _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(first as i64))) })
    }
    #[inline(always)]
    unsafe fn eights([first, _]: [f32; 2]) -> Self {
        // SAFETY: the caller has the level.
        Self(unsafe { _mm256_set1_ps(first) })
    }
    #[inline(always)]
    fn of(ints: I256) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe { _mm256_cvtepi32_ps(ints.0) })
    }
    #[inline(always)]
    fn ints(self) -> I256 {
        // SAFETY: values exist only with the level.
        I256(unsafe { _mm256_cvtps_epi32(self.0) })
    }
    #[inline(always)]
    fn pick(self, index: I256) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe { _mm256_permutevar8x32_ps(self.0, index.0) })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller has 32 writable bytes.
        unsafe { _mm256_storeu_ps(to, self.0) }
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe { _mm256_fmadd_ps(self.0, b.0, c.0) })
    }
    #[inline(always)]
    fn add(self, b: Self) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe { _mm256_add_ps(self.0, b.0) })
    }
    #[inline(always)]
    fn sub(self, b: Self) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe { _mm256_sub_ps(self.0, b.0) })
    }
    #[inline(always)]
    fn mul(self, b: Self) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe { _mm256_mul_ps(self.0, b.0) })
    }
    #[inline(always)]
    fn div(self, b: Self) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe { _mm256_div_ps(self.0, b.0) })
    }
    #[inline(always)]
    fn max(self, b: Self) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe { _mm256_max_ps(self.0, b.0) })
    }
    #[inline(always)]
    fn min(self, b: Self) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe { _mm256_min_ps(self.0, b.0) })
    }
    #[inline(always)]
    fn round(self) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe {
            _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0)
        })
    }
    #[inline(always)]
    fn exp2_integral(self) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe {
            let n = _mm256_add_epi32(_mm256_cvtps_epi32(self.0), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(n))
        })
    }
    #[inline(always)]
    fn zero_below(self, x: Self, limit: Self) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe { _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(x.0, limit.0), self.0) })
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: values exist only with the level.
        unsafe { sum8(self.0) }
    }
}

/// Halves added, then quarters, then pairs.
#[inline(always)]
unsafe fn sum8(v: __m256) -> f32 {
    // SAFETY: the caller has AVX2.
    unsafe {
        let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
        _mm_cvtss_f32(_mm_add_ss(v, _mm_shuffle_ps::<1>(v, v)))
    }
}

/// Word i of the low half to word 2i, of the high half to word 2i + 1.
const SPLIT_WORDS: [u16; 32] = {
    let mut index = [0; 32];
    let mut i = 0;
    while i < 16 {
        index[2 * i] = i as u16;
        index[2 * i + 1] = 16 + i as u16;
        i += 1;
    }
    index
};

/// Where each code has to stand so that unpacking, shifting and masking end in natural order.
const SPREAD_BYTES: [u8; 64] = {
    let mut index = [0; 64];
    let mut at = 0;
    while at < 64 {
        // Output vector v takes, in its 128-bit lane l, dword j.
        let (l, rest) = (at / 16, at % 16);
        let v = 2 * (rest / 8) + rest % 2;
        let j = rest % 8 / 2;
        index[at] = (16 * v + 4 * l + j) as u8;
        at += 1;
    }
    index
};

/// Low or high byte of the bfloat16 of each non-negative FP8 code.
const fn f8_table(high: bool) -> [u8; 128] {
    let mut table = [0; 128];
    let mut code = 0;
    while code < 128 {
        let (e, m) = (code >> 3, code & 7);
        let bits: u32 = if code == 127 {
            0x7fc0
        } else if e > 0 {
            (((e + 120) << 7) | (m << 4)) as u32
        } else if m == 0 {
            0
        } else {
            // m * 2^-9, normalised.
            let top = (m as u32).ilog2();
            ((top + 127 - 9) << 7) | (((m as u32) << (7 - top)) & 0x7f)
        };
        table[code] = if high { (bits >> 8) as u8 } else { bits as u8 };
        code += 1;
    }
    table
}
const F8_LOW: [u8; 128] = f8_table(false);
const F8_HIGH: [u8; 128] = f8_table(true);

/// 64 FP8 codes as bfloat16: the words of lane-wise unpacking, low eight and high eight codes of
/// each 128-bit lane.
///
/// # Safety
/// The CPU has AVX-512 with VBMI.
#[inline(always)]
pub(crate) unsafe fn f8_to_bf16(codes: __m512i) -> [__m512i; 2] {
    // SAFETY: the tables are 128 bytes each; the caller has the level.
    unsafe {
        let table = |t: &[u8; 128], i: usize| _mm512_loadu_si512(t.as_ptr().add(i).cast());
        let low = _mm512_permutex2var_epi8(table(&F8_LOW, 0), codes, table(&F8_LOW, 64));
        let high = _mm512_permutex2var_epi8(table(&F8_HIGH, 0), codes, table(&F8_HIGH, 64));
        // high | (codes & 0x80)
        let sign = _mm512_set1_epi8(i8::MIN);
        let high = _mm512_ternarylogic_epi64::<0xf8>(high, codes, sign);
        [_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)]
    }
}

impl<const VBMI: bool> Vector for V512<VBMI> {
    const LANES: usize = 16;
    const REGISTERS: usize = 32;
    type Ints = I512<VBMI>;

    #[inline(always)]
    unsafe fn apart<K: Kernel>(kernel: K) -> K::Output {
        // SAFETY: the caller has the level.
        unsafe {
            if VBMI {
                avx512_vbmi(kernel)
            } else {
                avx512(kernel)
            }
        }
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the caller has the level.
        Self(unsafe { _mm512_set1_ps(value) })
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller has the level and 64 readable bytes.
        Self(unsafe { _mm512_loadu_ps(from) })
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> Self {
        // SAFETY: the caller has the level and 32 readable bytes.
        Self(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) })
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u8) -> Self {
        // SAFETY: the caller has the level and 32 readable bytes.
        Self(unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        })
    }
    #[inline(always)]
    unsafe fn load_f8(from: *const u8) -> Self {
        // SAFETY: the caller has the level and 16 readable bytes; as in V256.
        Self(unsafe {
            let code = _mm256_cvtepu8_epi16(_mm_loadu_si128(from.cast()));
            let sign = _mm256_and_si256(_mm256_slli_epi16::<8>(code), _mm256_set1_epi16(i16::MIN));
            let limit = _mm256_set1_epi16(0x3f80);
            let magnitude = _mm256_and_si256(_mm256_slli_epi16::<7>(code), limit);
            let nan = _mm256_cmpeq_epi16(magnitude, limit);
            let half = _mm256_or_si256(_mm256_or_si256(sign, magnitude), nan);
            _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0))
        })
    }
    #[inline(always)]
    unsafe fn load_bf16x2(from: *const u8) -> [Self; 2] {
        // SAFETY: the caller has the level and 64 readable bytes.
        unsafe {
            let index = _mm512_loadu_si512(SPLIT_WORDS.as_ptr().cast());
            let words = _mm512_permutexvar_epi16(index, _mm512_loadu_si512(from.cast()));
            let high = _mm512_set1_epi32(0xffff_0000_u32 as i32);
            [
                Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))),
                Self(_mm512_castsi512_ps(_mm512_and_si512(words, high))),
            ]
        }
    }
    #[inline(always)]
    unsafe fn load_f8x4(from: *const u8) -> [Self; 4] {
        // SAFETY: the caller has the level and 64 readable bytes.
        unsafe {
            if !VBMI {
                return [
                    Self::load_f8(from),
                    Self::load_f8(from.add(16)),
                    Self::load_f8(from.add(32)),
                    Self::load_f8(from.add(48)),
                ];
            }
            let index = _mm512_loadu_si512(SPREAD_BYTES.as_ptr().cast());
            let codes = _mm512_permutexvar_epi8(index, _mm512_loadu_si512(from.cast()));
            let [low, high] = f8_to_bf16(codes);
            let mask = _mm512_set1_epi32(0xffff_0000_u32 as i32);
            [
                Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(low))),
                Self(_mm512_castsi512_ps(_mm512_and_si512(low, mask))),
                Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(high))),
                Self(_mm512_castsi512_ps(_mm512_and_si512(high, mask))),
            ]
        }
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Self {
        // SAFETY: the caller has the level and 16 readable bytes.
        Self(unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))) })
    }
    #[inline(always)]
    unsafe fn load_i4(from: *const u8) -> Self {
        // SAFETY: the caller has the level and 8 readable bytes; the table has 16 numbers, and the
        // permutation reads the lowest four bits.
        Self(unsafe { _mm512_permutexvar_ps(nibbles16(from), _mm512_loadu_ps(I4.as_ptr())) })
    }
    #[inline(always)]
    unsafe fn load_e2m1(from: *const u8) -> Self {
        // SAFETY: as above.
        Self(unsafe { _mm512_permutexvar_ps(nibbles16(from), _mm512_loadu_ps(E2M1.as_ptr())) })
    }
    #[inline(always)]
    unsafe fn load_bits(from: *const u8, shift: u32, mask: u8) -> Self {
        // SAFETY: the caller has the level and 16 readable bytes.
        Self(unsafe {
            let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()));
            let bits = _mm512_srl_epi32(bytes, _mm_cvtsi32_si128(shift as i32));
            _mm512_cvtepi32_ps(_mm512_and_si512(bits, _mm512_set1_epi32(mask.into())))
        })
    }
    #[inline(always)]
    unsafe fn load_e8m0(from: *const u8) -> Self {
        // SAFETY: the caller has the level and 16 readable bytes.
        Self(unsafe {
            let bits = _mm512_slli_epi32::<23>(_mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast())));
            _mm512_castsi512_ps(_mm512_max_epi32(bits, _mm512_set1_epi32(1 << 22)))
        })
    }
    #[inline(always)]
    unsafe fn half(bytes: [u8; 2]) -> f32 {
        // SAFETY: the caller has the level.
        unsafe { half(bytes) }
    }
    #[inline(always)]
    unsafe fn load_halves(from: *const u8, stride: usize) -> Self {
        // SAFETY: the caller has the level and the bytes.
        Self(unsafe {
            let (low, high) = (halves8(from, stride), halves8(from.add(8 * stride), stride));
            _mm512_cvtph_ps(_mm256_set_m128i(high, low))
        })
    }
    #[inline(always)]
    unsafe fn bytes([first, second]: [u64; 2]) -> Self {
        // SAFETY: the caller has the level.
        Self(unsafe {
            let bytes = _mm_set_epi64x(second as i64, first as i64);
            _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes))
        })
    }
    #[inline(always)]
    unsafe fn eights([first, second]: [f32; 2]) -> Self {
        // SAFETY: the caller has the level.
        Self(unsafe { _mm512_insertf32x8::<1>(_mm512_set1_ps(first), _mm256_set1_ps(second)) })
    }
    #[inline(always)]
    fn of(ints: I512<VBMI>) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe { _mm512_cvtepi32_ps(ints.0) })
    }
    #[inline(always)]
    fn ints(self) -> I512<VBMI> {
        // SAFETY: values exist only with the level.
        I512(unsafe { _mm512_cvtps_epi32(self.0) })
    }
    #[inline(always)]
    fn pick(self, index: I512<VBMI>) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe { _mm512_permutexvar_ps(index.0, self.0) })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller has 64 writable bytes.
        unsafe { _mm512_storeu_ps(to, self.0) }
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe { _mm512_fmadd_ps(self.0, b.0, c.0) })
    }
    #[inline(always)]
    fn add(self, b: Self) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe { _mm512_add_ps(self.0, b.0) })
    }
    #[inline(always)]
    fn sub(self, b: Self) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe { _mm512_sub_ps(self.0, b.0) })
    }
    #[inline(always)]
    fn mul(self, b: Self) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe { _mm512_mul_ps(self.0, b.0) })
    }
    #[inline(always)]
    fn div(self, b: Self) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe { _mm512_div_ps(self.0, b.0) })
    }
    #[inline(always)]
    fn max(self, b: Self) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe { _mm512_max_ps(self.0, b.0) })
    }
    #[inline(always)]
    fn min(self, b: Self) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe { _mm512_min_ps(self.0, b.0) })
    }
    #[inline(always)]
    fn round(self) -> Self {
        // SAFETY: values exist only with the level. 0 scale bits, nearest even.
        Self(unsafe { _mm512_roundscale_ps::<0x08>(self.0) })
    }
    #[inline(always)]
    fn exp2_integral(self) -> Self {
        // SAFETY: values exist only with the level.
        Self(unsafe {
            let n = _mm512_add_epi32(_mm512_cvtps_epi32(self.0), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(n))
        })
    }
    #[inline(always)]
    fn zero_below(self, x: Self, limit: Self) -> Self {
        // SAFETY: values exist only with the level. NLT is also true for NaN.
        Self(unsafe {
            let keep = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x.0, limit.0);
            _mm512_maskz_mov_ps(keep, self.0)
        })
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: values exist only with the level.
        unsafe {
            let halves =
                _mm256_add_ps(_mm512_castps512_ps256(self.0), _mm512_extractf32x8_ps::<1>(self.0));
            sum8(halves)
        }
    }
}
