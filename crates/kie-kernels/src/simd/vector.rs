//! The vector type that kernels are written against, and its portable implementation.

use super::ints::{Ints, I8};

/// A computation whose body is compiled once for each level.
pub(crate) trait Kernel {
    /// What the computation returns.
    type Output;

    /// Runs the body; must be `#[inline(always)]`.
    ///
    /// # Safety
    /// The CPU has the level that `V` stands for.
    unsafe fn run<V: Vector>(self) -> Self::Output;
}

/// A vector of float32 lanes. Pointers may have any alignment.
///
/// # Safety contract
/// Constructors (`splat`, `load*`): the CPU has the level, and the stated bytes are readable.
pub(crate) trait Vector: Copy {
    /// Number of float32 lanes, a divisor of 16.
    const LANES: usize;
    /// Vectors that registers hold, which bounds the blocking; 8 for the portable code, whose
    /// vectors are pairs of SSE registers.
    const REGISTERS: usize;
    /// As many integers.
    type Ints: Ints;

    /// Runs `kernel` with this level's instructions, in a function of its own.
    unsafe fn apart<K: Kernel>(kernel: K) -> K::Output;
    /// All lanes `value`.
    unsafe fn splat(value: f32) -> Self;
    /// `LANES` float32.
    unsafe fn load(from: *const f32) -> Self;
    /// `LANES` float16.
    unsafe fn load_f16(from: *const u8) -> Self;
    /// `LANES` bfloat16.
    unsafe fn load_bf16(from: *const u8) -> Self;
    /// `LANES` FP8 e4m3 codes; 0x7f and 0xff give NaN.
    unsafe fn load_f8(from: *const u8) -> Self;
    /// `2 * LANES` bfloat16 in order.
    #[inline(always)]
    unsafe fn load_bf16x2(from: *const u8) -> [Self; 2] {
        // SAFETY: the caller's promise covers both halves.
        unsafe { [Self::load_bf16(from), Self::load_bf16(from.add(2 * Self::LANES))] }
    }
    /// `4 * LANES` FP8 codes in order.
    #[inline(always)]
    unsafe fn load_f8x4(from: *const u8) -> [Self; 4] {
        // SAFETY: the caller's promise covers all four quarters.
        unsafe {
            [
                Self::load_f8(from),
                Self::load_f8(from.add(Self::LANES)),
                Self::load_f8(from.add(2 * Self::LANES)),
                Self::load_f8(from.add(3 * Self::LANES)),
            ]
        }
    }
    /// `LANES` signed bytes.
    unsafe fn load_i8(from: *const u8) -> Self;
    /// `LANES` integers, each plus 8, two a byte.
    unsafe fn load_i4(from: *const u8) -> Self;
    /// `LANES` e2m1 codes, two a byte.
    unsafe fn load_e2m1(from: *const u8) -> Self;
    /// Of `LANES` bytes the bits of `mask` behind a shift to the right.
    unsafe fn load_bits(from: *const u8, shift: u32, mask: u8) -> Self;
    /// `LANES` e8m0 codes; 255 gives infinity.
    unsafe fn load_e8m0(from: *const u8) -> Self;
    /// One float16, little-endian.
    unsafe fn half(bytes: [u8; 2]) -> f32;
    /// `LANES` float16, `stride` bytes apart.
    unsafe fn load_halves(from: *const u8, stride: usize) -> Self;
    /// Sixteen unsigned bytes, or the first eight.
    unsafe fn bytes(bytes: [u64; 2]) -> Self;
    /// The first number in eight lanes, the second in the others.
    unsafe fn eights(numbers: [f32; 2]) -> Self;
    /// The integers as numbers, rounded to nearest.
    fn of(ints: Self::Ints) -> Self;
    /// The numbers, below 2^31, as integers, rounded to nearest.
    fn ints(self) -> Self::Ints;
    /// In each lane the number of the lane that `index` says there.
    fn pick(self, index: Self::Ints) -> Self;
    /// Writes `LANES` float32; they must be writable.
    unsafe fn store(self, to: *mut f32);
    /// `self * b + c`, fused where the level has it.
    fn fma(self, b: Self, c: Self) -> Self;
    /// Lane-wise sum.
    fn add(self, b: Self) -> Self;
    /// Lane-wise difference.
    fn sub(self, b: Self) -> Self;
    /// Lane-wise product.
    fn mul(self, b: Self) -> Self;
    /// Lane-wise quotient.
    fn div(self, b: Self) -> Self;
    /// The larger; `b` where either is NaN.
    fn max(self, b: Self) -> Self;
    /// The smaller; `b` where either is NaN.
    fn min(self, b: Self) -> Self;
    /// Nearest integer, ties to even.
    fn round(self) -> Self;
    /// 2 to the power of an integral `self` in -126..=127.
    fn exp2_integral(self) -> Self;
    /// `self` where `x >= limit` or either is NaN, else 0.
    fn zero_below(self, x: Self, limit: Self) -> Self;
    /// Sum of the lanes, in a fixed order.
    fn sum(self) -> f32;

    /// e^self within 2 ulp for -87.3 <= self <= 88; 0 below; NaN stays NaN.
    #[inline(always)]
    fn exp(self) -> Self {
        // SAFETY: `self` exists, so the level is available.
        let [log2e, ln2_hi, ln2_lo, low, high] = unsafe {
            [
                Self::splat(std::f32::consts::LOG2_E),
                Self::splat(-0.693_359_4),
                Self::splat(2.121_944_4e-4),
                Self::splat(-87.3),
                Self::splat(88.0),
            ]
        };
        // Constants first: `max` and `min` then keep a NaN of `self`.
        let x = high.min(low.max(self));
        let n = x.mul(log2e).round();
        let r = n.fma(ln2_lo, n.fma(ln2_hi, x));
        // SAFETY: as above. Coefficients: Cephes expf.
        let (mut p, rest, one) = unsafe {
            let rest = [
                Self::splat(1.398_2e-3),
                Self::splat(8.333_452e-3),
                Self::splat(4.166_579_6e-2),
                Self::splat(1.666_666_5e-1),
                Self::splat(5.0e-1),
            ];
            (Self::splat(1.987_569_1e-4), rest, Self::splat(1.0))
        };
        for c in rest {
            p = p.fma(r, c);
        }
        let p = p.fma(r.mul(r), r).add(one);
        p.mul(n.exp2_integral()).zero_below(self, low)
    }

    /// The first `len <= LANES` float32 at `from`, then zeros.
    #[inline(always)]
    unsafe fn load_part(from: *const f32, len: usize) -> Self {
        if len == Self::LANES {
            // SAFETY: the caller's promise: `len` numbers are readable.
            return unsafe { Self::load(from) };
        }
        let mut lanes = [0f32; 16];
        // SAFETY: `len <= LANES <= 16`, and the caller promised `len` readable numbers; the copy
        // is bytewise, so alignment does not matter.
        unsafe {
            std::ptr::copy_nonoverlapping(from.cast::<u8>(), lanes.as_mut_ptr().cast(), len * 4);
            Self::load(lanes.as_ptr())
        }
    }

    /// Writes the first `len <= LANES` lanes.
    #[inline(always)]
    unsafe fn store_part(self, to: *mut f32, len: usize) {
        if len == Self::LANES {
            // SAFETY: the caller's promise: `len` numbers are writable.
            return unsafe { self.store(to) };
        }
        let mut lanes = [0f32; 16];
        // SAFETY: `len <= LANES <= 16`, and the caller promised `len` writable numbers.
        unsafe {
            self.store(lanes.as_mut_ptr());
            std::ptr::copy_nonoverlapping(lanes.as_ptr().cast::<u8>(), to.cast::<u8>(), len * 4);
        }
    }
}

/// Value of an FP8 e4m3 code.
pub fn f8_to_f32(code: u8) -> f32 {
    // Shifted into float16 the value is 2^-8 of what it should be, denormals included.
    let magnitude = u16::from(code & 0x7f) << 7;
    if magnitude == 0x3f80 {
        return f32::NAN;
    }
    let value = half::f16::from_bits(magnitude).to_f32() * 256.0;
    if code & 0x80 == 0 {
        value
    } else {
        -value
    }
}

/// Values of the e2m1 codes.
pub const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// The halves of four bytes, low ones first. Safety: they are readable.
#[inline(always)]
unsafe fn nibbles(from: *const u8) -> [u8; 8] {
    // SAFETY: the caller's promise.
    let [a, b, c, d] = unsafe { from.cast::<[u8; 4]>().read_unaligned() };
    [a & 15, a >> 4, b & 15, b >> 4, c & 15, c >> 4, d & 15, d >> 4]
}

/// Eight lanes of portable code.
#[derive(Clone, Copy)]
pub(crate) struct V8([f32; 8]);

macro_rules! lanewise {
    ($a:expr, $b:expr, $op:expr) => {{
        let (a, b): ([f32; 8], [f32; 8]) = ($a, $b);
        let mut out = [0f32; 8];
        for i in 0..8 {
            out[i] = $op(a[i], b[i]);
        }
        Self(out)
    }};
}

impl Vector for V8 {
    const LANES: usize = 8;
    const REGISTERS: usize = 8;
    type Ints = I8;

    #[inline(never)]
    unsafe fn apart<K: Kernel>(kernel: K) -> K::Output {
        // SAFETY: V8 needs nothing.
        unsafe { kernel.run::<Self>() }
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Self([value; 8])
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller promised 8 readable numbers of any alignment.
        Self(unsafe { from.cast::<[f32; 8]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> Self {
        // SAFETY: the caller promised 16 readable bytes.
        let bits = unsafe { from.cast::<[u16; 8]>().read_unaligned() };
        Self(bits.map(|b| half::f16::from_bits(b).to_f32()))
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u8) -> Self {
        // SAFETY: the caller promised 16 readable bytes.
        let bits = unsafe { from.cast::<[u16; 8]>().read_unaligned() };
        Self(bits.map(|b| f32::from_bits(u32::from(b) << 16)))
    }
    #[inline(always)]
    unsafe fn load_f8(from: *const u8) -> Self {
        // SAFETY: the caller promised 8 readable bytes.
        let codes = unsafe { from.cast::<[u8; 8]>().read_unaligned() };
        Self(codes.map(f8_to_f32))
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const u8) -> Self {
        // SAFETY: the caller promised 8 readable bytes.
        let codes = unsafe { from.cast::<[i8; 8]>().read_unaligned() };
        Self(codes.map(f32::from))
    }
    #[inline(always)]
    unsafe fn load_i4(from: *const u8) -> Self {
        // SAFETY: the caller promised 4 readable bytes.
        Self(unsafe { nibbles(from) }.map(|code| f32::from(code) - 8.0))
    }
    #[inline(always)]
    unsafe fn load_e2m1(from: *const u8) -> Self {
        // SAFETY: the caller promised 4 readable bytes.
        Self(unsafe { nibbles(from) }.map(|code| E2M1[code as usize]))
    }
    #[inline(always)]
    unsafe fn load_bits(from: *const u8, shift: u32, mask: u8) -> Self {
        // SAFETY: the caller promised 8 readable bytes.
        let bytes = unsafe { from.cast::<[u8; 8]>().read_unaligned() };
        Self(bytes.map(|b| f32::from(b >> shift & mask)))
    }
    #[inline(always)]
    unsafe fn load_e8m0(from: *const u8) -> Self {
        // SAFETY: the caller promised 8 readable bytes.
        let codes = unsafe { from.cast::<[u8; 8]>().read_unaligned() };
        Self(codes.map(|code| f32::from_bits((u32::from(code) << 23).max(1 << 22))))
    }
    #[inline(always)]
    unsafe fn half(bytes: [u8; 2]) -> f32 {
        half::f16::from_le_bytes(bytes).to_f32()
    }
    #[inline(always)]
    unsafe fn load_halves(from: *const u8, stride: usize) -> Self {
        let mut out = [0f32; 8];
        for (i, out) in out.iter_mut().enumerate() {
            // SAFETY: the caller promised these bytes.
            *out = unsafe { Self::half(from.add(i * stride).cast::<[u8; 2]>().read_unaligned()) };
        }
        Self(out)
    }
    #[inline(always)]
    unsafe fn bytes([first, _]: [u64; 2]) -> Self {
        Self(first.to_le_bytes().map(f32::from))
    }
    #[inline(always)]
    unsafe fn eights([first, _]: [f32; 2]) -> Self {
        Self([first; 8])
    }
    #[inline(always)]
    fn of(ints: I8) -> Self {
        Self(ints.0.map(|i| i as f32))
    }
    #[inline(always)]
    fn ints(self) -> I8 {
        I8(self.0.map(|v| v.round_ties_even() as i32))
    }
    #[inline(always)]
    fn pick(self, index: I8) -> Self {
        Self(index.0.map(|i| self.0[i as usize % 8]))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller promised 8 writable numbers.
        unsafe { to.cast::<[f32; 8]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        self.mul(b).add(c)
    }
    #[inline(always)]
    fn add(self, b: Self) -> Self {
        lanewise!(self.0, b.0, |a: f32, b: f32| a + b)
    }
    #[inline(always)]
    fn sub(self, b: Self) -> Self {
        lanewise!(self.0, b.0, |a: f32, b: f32| a - b)
    }
    #[inline(always)]
    fn mul(self, b: Self) -> Self {
        lanewise!(self.0, b.0, |a: f32, b: f32| a * b)
    }
    #[inline(always)]
    fn div(self, b: Self) -> Self {
        lanewise!(self.0, b.0, |a: f32, b: f32| a / b)
    }
    #[inline(always)]
    fn max(self, b: Self) -> Self {
        lanewise!(self.0, b.0, |a: f32, b: f32| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, b: Self) -> Self {
        lanewise!(self.0, b.0, |a: f32, b: f32| if a < b { a } else { b })
    }
    #[inline(always)]
    fn round(self) -> Self {
        Self(self.0.map(f32::round_ties_even))
    }
    #[inline(always)]
    fn exp2_integral(self) -> Self {
        Self(self.0.map(|n| f32::from_bits(((n as i32 + 127) << 23) as u32)))
    }
    #[inline(always)]
    fn zero_below(self, x: Self, limit: Self) -> Self {
        let mut out = self.0;
        for (out, (x, limit)) in out.iter_mut().zip(x.0.iter().zip(&limit.0)) {
            if x < limit {
                *out = 0.0;
            }
        }
        Self(out)
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        let v = self.0;
        ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]))
    }
}
