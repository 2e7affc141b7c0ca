//! Decoders: how the codes of a row become float32 lanes, one type for each kind of [`Codes`].
//!
//! Decoded codes are exact; their scales multiply float32 sums later. `numbers.rs` has the slow and
//! obvious form of the same.

use std::ops::Range;

use crate::abi::Codes;
use crate::matrix::Matrix;
use crate::simd::{Kernel, Vector};

/// How numbers of one storage type become float32 lanes.
pub(super) trait Weight {
    /// Bytes of one number.
    const BYTES: usize;
    /// Vectors that are loaded together, at most 4.
    const GROUP: usize;
    /// One vector. Safety: V's level, `LANES * BYTES` readable bytes.
    unsafe fn one<V: Vector>(from: *const u8) -> V;
    /// `GROUP` vectors in order; the rest of the array repeats. Safety: as `one`, `GROUP` times.
    unsafe fn group<V: Vector>(from: *const u8) -> [V; 4];
}

/// How the codes of a row become float32 lanes.
pub(super) trait Decoder {
    /// Groups have offsets besides scales.
    const OFFSETS: bool;
    /// Vectors that are decoded together, at most 4.
    fn vectors<V: Vector>() -> usize;
    /// Bytes from a row's beginning to its number `k`, or just before.
    fn byte(k: usize) -> usize;
    /// The vectors from `k` on, a multiple of their numbers from a group's beginning; the rest of
    /// the array is arbitrary. Safety: V's level, as many numbers in the row.
    unsafe fn decode<V: Vector>(row: *const u8, k: usize) -> [V; 4];
    /// The first `len <= LANES` numbers from `k` on, then zeros. Safety: V's level, as many numbers
    /// in the row.
    unsafe fn part<V: Vector>(row: *const u8, k: usize, len: usize) -> V;
}

/// See [`crate::abi::Codes`].
pub(super) struct F32;
/// See [`crate::abi::Codes`].
pub(super) struct F16;
/// See [`crate::abi::Codes`].
pub(super) struct Bf16;
/// See [`crate::abi::Codes`].
pub(super) struct F8;
/// See [`crate::abi::Codes`].
pub(super) struct I8;

macro_rules! weight {
    ($name:ident, $bytes:expr, $group:expr, $one:ident, $all:expr) => {
        impl Weight for $name {
            const BYTES: usize = $bytes;
            const GROUP: usize = $group;
            #[inline(always)]
            unsafe fn one<V: Vector>(from: *const u8) -> V {
                // SAFETY: the caller's promise.
                unsafe { V::$one(from.cast()) }
            }
            #[inline(always)]
            unsafe fn group<V: Vector>(from: *const u8) -> [V; 4] {
                // SAFETY: the caller's promise for GROUP vectors.
                unsafe { $all(from) }
            }
        }
    };
}

/// Two vectors of `bytes` a lane, by `one`. Safety: as `Weight::group`.
#[inline(always)]
unsafe fn two<V: Vector, W: Weight>(from: *const u8) -> [V; 4] {
    // SAFETY: the caller's promise.
    let (a, b) = unsafe { (W::one(from), W::one(from.add(W::BYTES * V::LANES))) };
    [a, b, a, b]
}

/// Two vectors of bfloat16. Safety: as `Weight::group`.
#[inline(always)]
unsafe fn two_bf16<V: Vector>(from: *const u8) -> [V; 4] {
    // SAFETY: the caller's promise.
    let [a, b] = unsafe { V::load_bf16x2(from) };
    [a, b, a, b]
}

weight!(F32, 4, 2, load, two::<V, Self>);
weight!(F16, 2, 2, load_f16, two::<V, Self>);
weight!(Bf16, 2, 2, load_bf16, two_bf16::<V>);
weight!(F8, 1, 4, load_f8, V::load_f8x4);
weight!(I8, 1, 2, load_i8, two::<V, Self>);

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

impl<W: Weight> Decoder for W {
    const OFFSETS: bool = false;
    #[inline(always)]
    fn vectors<V: Vector>() -> usize {
        W::GROUP
    }
    #[inline(always)]
    fn byte(k: usize) -> usize {
        k * W::BYTES
    }
    #[inline(always)]
    unsafe fn decode<V: Vector>(row: *const u8, k: usize) -> [V; 4] {
        // SAFETY: the caller's promise.
        unsafe { W::group(row.add(k * W::BYTES)) }
    }
    #[inline(always)]
    unsafe fn part<V: Vector>(row: *const u8, k: usize, len: usize) -> V {
        // SAFETY: the caller's promise.
        unsafe { part::<V, W>(row.add(k * W::BYTES), len) }
    }
}

/// 4-bit integers, two a byte; `ZEROS`: with zero points.
pub(super) struct I4<const ZEROS: bool>;
/// 4-bit floats, two a byte.
pub(super) struct E2m1;
/// See [`crate::abi::Codes`].
pub(super) struct Q8x0;
/// See [`crate::abi::Codes`].
pub(super) struct Q4x0;
/// See [`crate::abi::Codes`].
pub(super) struct Q4k;
/// See [`crate::abi::Codes`].
pub(super) struct Q6k;

/// A decoder of whole vectors: `$numbers` of them together, of which `$one` makes the one at `k`.
macro_rules! decoder {
    ($name:ty, $offsets:expr, $numbers:expr, $byte:expr, $one:expr, $part:expr) => {
        impl Decoder for $name {
            const OFFSETS: bool = $offsets;
            #[inline(always)]
            fn vectors<V: Vector>() -> usize {
                $numbers / V::LANES
            }
            #[inline(always)]
            fn byte(k: usize) -> usize {
                $byte(k)
            }
            #[inline(always)]
            unsafe fn decode<V: Vector>(row: *const u8, k: usize) -> [V; 4] {
                // SAFETY: the caller's promise: `vectors` of LANES numbers from `k` on.
                unsafe {
                    let first: V = $one(row, k);
                    let mut all = [first; 4];
                    for i in 1..Self::vectors::<V>() {
                        all[i] = $one(row, k + i * V::LANES);
                    }
                    all
                }
            }
            #[inline(always)]
            unsafe fn part<V: Vector>(row: *const u8, k: usize, len: usize) -> V {
                if len == V::LANES {
                    // SAFETY: the caller's promise.
                    return unsafe { $one(row, k) };
                }
                // SAFETY: the caller's promise.
                unsafe { $part(row, k, len) }
            }
        }
    };
}

/// The bytes of `len <= 16` codes of two a byte, then zeros. Safety: they are readable.
#[inline(always)]
unsafe fn half_bytes(row: *const u8, k: usize, len: usize) -> [u8; 8] {
    let mut bytes = [0u8; 8];
    // SAFETY: 16 codes are 8 bytes, which the caller promised.
    unsafe {
        std::ptr::copy_nonoverlapping(row.add(k / 2), bytes.as_mut_ptr(), len.div_ceil(2));
    }
    bytes
}

/// The first `len` lanes, then zeros: code 0 of an integer is not 0. Safety: V's level.
#[inline(always)]
unsafe fn first<V: Vector>(vector: V, len: usize) -> V {
    let mut lanes = [0f32; 16];
    // SAFETY: a vector has 16 lanes at most.
    unsafe {
        vector.store(lanes.as_mut_ptr());
        lanes[len..].fill(0.0);
        V::load(lanes.as_ptr())
    }
}

/// Blocks are whole vectors: there is no tail. Safety: none is wanted.
#[inline(always)]
unsafe fn no_tail<V: Vector>(_: *const u8, k: usize, len: usize) -> V {
    unreachable!("{len} numbers of a block from {k}")
}

/// Safety: V's level, LANES numbers.
#[inline(always)]
unsafe fn i4<V: Vector>(row: *const u8, k: usize) -> V {
    // SAFETY: the caller's promise.
    unsafe { V::load_i4(row.add(k / 2)) }
}

/// Safety: V's level, LANES numbers.
#[inline(always)]
unsafe fn e2m1<V: Vector>(row: *const u8, k: usize) -> V {
    // SAFETY: the caller's promise.
    unsafe { V::load_e2m1(row.add(k / 2)) }
}

/// Safety: as `Decoder::part`.
#[inline(always)]
unsafe fn i4_part<V: Vector>(row: *const u8, k: usize, len: usize) -> V {
    // SAFETY: the caller's promise.
    unsafe { first(V::load_i4(half_bytes(row, k, len).as_ptr()), len) }
}

/// Safety: as `Decoder::part`.
#[inline(always)]
unsafe fn e2m1_part<V: Vector>(row: *const u8, k: usize, len: usize) -> V {
    // SAFETY: the caller's promise.
    unsafe { first(V::load_e2m1(half_bytes(row, k, len).as_ptr()), len) }
}

/// A block is a float16 scale and 32 signed bytes. Safety: V's level, LANES numbers of a block.
#[inline(always)]
unsafe fn q8_0<V: Vector>(row: *const u8, k: usize) -> V {
    // SAFETY: the caller's promise.
    unsafe { V::load_i8(row.add(k / 32 * 34 + 2 + k % 32)) }
}

/// A block is a float16 scale and 16 bytes: low halves are its first 16 numbers, high halves the
/// others, each plus 8. Safety: as `q8_0`.
#[inline(always)]
unsafe fn q4_0<V: Vector>(row: *const u8, k: usize) -> V {
    // SAFETY: the caller's promise.
    unsafe {
        let bytes = row.add(k / 32 * 18 + 2 + k % 16);
        V::load_bits(bytes, (k % 32 / 16 * 4) as u32, 15).sub(V::splat(8.0))
    }
}

/// A block is two float16, 12 bytes of scales and 4 times 32 bytes: of each, low halves are 32
/// numbers and high halves the next 32. Safety: as `q8_0`.
#[inline(always)]
unsafe fn q4_k<V: Vector>(row: *const u8, k: usize) -> V {
    let (block, at) = (k / 256, k % 256);
    // SAFETY: the caller's promise.
    unsafe {
        let bytes = row.add(block * 144 + 16 + at / 64 * 32 + at % 32);
        V::load_bits(bytes, (at % 64 / 32 * 4) as u32, 15)
    }
}

/// A block is twice 64 bytes of low halves, twice 32 bytes of upper pairs of bits, 16 signed scales
/// and a float16: number `128 h + 32 q + l` has its low four bits in byte `64 h + 32 (q % 2) + l`
/// and its upper two in byte `32 h + l`, each plus 32. Safety: as `q8_0`.
#[inline(always)]
unsafe fn q6_k<V: Vector>(row: *const u8, k: usize) -> V {
    let (block, at) = (k / 256, k % 256);
    let (half, quarter, l) = (at / 128, at % 128 / 32, at % 32);
    // SAFETY: the caller's promise.
    unsafe {
        let block = row.add(block * 210);
        let low = block.add(64 * half + 32 * (quarter % 2) + l);
        let low = V::load_bits(low, (quarter / 2 * 4) as u32, 15);
        let high = V::load_bits(block.add(128 + 32 * half + l), 2 * quarter as u32, 3);
        high.fma(V::splat(16.0), low.sub(V::splat(32.0)))
    }
}

decoder!(I4<false>, false, 32, |k| k / 2, i4, i4_part);
decoder!(I4<true>, true, 32, |k| k / 2, i4, i4_part);
decoder!(E2m1, false, 32, |k| k / 2, e2m1, e2m1_part);
decoder!(Q8x0, false, 32, |k| k / 32 * 34, q8_0, no_tail);
decoder!(Q4x0, false, 32, |k| k / 32 * 18, q4_0, no_tail);
decoder!(Q4k, true, 32, |k| k / 256 * 144 + k % 256 / 64 * 32, q4_k, no_tail);
decoder!(Q6k, false, 16, |k| k / 256 * 210 + k % 256 / 2, q6_k, no_tail);

/// Runs `$body` with `$D` as the decoder of `$codes`, with or without zero points; `$codes` are
/// none of the plain numbers, which have bodies of their own.
macro_rules! with_coded {
    ($codes:expr, $zeros:expr, $D:ident => $body:expr) => {{
        use crate::abi::Codes as C;
        use crate::cpu::codes as d;
        match ($codes, $zeros) {
            (C::I8, _) => {
                type $D = d::I8;
                $body
            }
            (C::I4, false) => {
                type $D = d::I4<false>;
                $body
            }
            (C::I4, true) => {
                type $D = d::I4<true>;
                $body
            }
            (C::E2m1, _) => {
                type $D = d::E2m1;
                $body
            }
            (C::Q8x0, _) => {
                type $D = d::Q8x0;
                $body
            }
            (C::Q4x0, _) => {
                type $D = d::Q4x0;
                $body
            }
            (C::Q4k, _) => {
                type $D = d::Q4k;
                $body
            }
            (C::Q6k, _) => {
                type $D = d::Q6k;
                $body
            }
            (C::F32 | C::F16 | C::Bf16 | C::E4m3, _) => unreachable!("plain numbers"),
        }
    }};
}
pub(super) use with_coded;

/// Codes `k` of rows of a matrix as float32, each row at the beginning of a row of a panel; scales
/// and zero points are left out. `k` starts with a group, or a multiple of 16 behind.
pub(super) struct Unpack<'a, const PIECE: usize> {
    pub m: &'a Matrix<'a>,
    pub rows: Range<usize>,
    /// At most PIECE numbers.
    pub k: Range<usize>,
    /// At least as many rows.
    pub panel: &'a mut [[f32; PIECE]],
}

impl<const PIECE: usize> Kernel for Unpack<'_, PIECE> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // SAFETY: the caller has V's level, and the matrix these rows and columns.
        unsafe {
            match self.m.codes {
                Codes::F32 => self.all::<V, F32>(),
                Codes::F16 => self.all::<V, F16>(),
                Codes::Bf16 => self.all::<V, Bf16>(),
                Codes::E4m3 => self.all::<V, F8>(),
                codes => with_coded!(codes, false, D => self.all::<V, D>()),
            }
        }
    }
}

impl<const PIECE: usize> Unpack<'_, PIECE> {
    /// Safety: V's level; rows and columns exist.
    #[inline(always)]
    unsafe fn all<V: Vector, D: Decoder>(self) {
        assert!(self.k.len() <= PIECE, "{} numbers of {PIECE}", self.k.len());
        for (row, out) in self.rows.zip(self.panel) {
            let row = self.m.row(row).as_ptr();
            for k in self.k.clone().step_by(V::LANES) {
                let len = V::LANES.min(self.k.end - k);
                // SAFETY: the caller's promise; `out` has PIECE numbers.
                unsafe {
                    let to = out.as_mut_ptr().add(k - self.k.start);
                    D::part::<V>(row, k, len).store_part(to, len);
                }
            }
        }
    }
}
