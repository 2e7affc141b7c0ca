//! How the codes of a row become float32 lanes or bytes, one type for each kind of [`Codes`].
//!
//! Decoded codes are exact; their scales multiply float32 sums later. `numbers.rs` has the slow and
//! obvious form of the same.

use std::ops::Range;

use crate::abi::Codes;
use crate::matrix::Matrix;
use crate::simd::{Ints, Kernel, Vector, E2M1};

/// Bytes between a load of one of so many rows side by side and the prefetch that runs ahead of it:
/// together a quarter of a first cache.
pub(super) const fn ahead(rows: usize) -> usize {
    8192 / rows
}

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
    /// The first `len <= LANES` numbers from `k` on, then zeros. Safety: V's level, as many numbers
    /// in the row.
    unsafe fn part<V: Vector>(row: *const u8, k: usize, len: usize) -> V;
}

/// How integers of a row become bytes without a sign, for products of integers. They come in steps
/// of whole pieces; a step is sets of vectors, and each set is summed up in lanes of its own, four
/// bytes of each vector a lane, which are of one group.
pub(super) trait Whole {
    /// Pieces, bytes and groups.
    const CODES: Codes;
    /// What bytes are above the integers.
    const BIAS: u8;
    /// The largest byte.
    const LARGEST: u8;
    /// What an integer counts.
    const UNIT: f32 = 1.0;
    /// Sets of a step.
    const SETS: usize = 1;
    /// Vectors of a set; with `SETS` at most 4 of a step.
    const VECTORS: usize = 1;

    /// Where in a step byte `at` of a vector stands; 16 bytes from a multiple of 16 on are equally
    /// far apart. Unless said otherwise the numbers of a set's vectors alternate.
    #[inline(always)]
    fn number(vector: usize, at: usize) -> usize {
        Self::VECTORS * at + vector
    }
    /// The vectors of the step at number `k`, whose piece begins at `from`. Safety: V's level, the
    /// step's pieces are readable.
    unsafe fn bytes<V: Vector>(from: *const u8, k: usize) -> [V::Ints; 4];
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
    #[inline(always)]
    unsafe fn part<V: Vector>(row: *const u8, k: usize, len: usize) -> V {
        // SAFETY: the caller's promise.
        unsafe { part::<V, W>(row.add(k * W::BYTES), len) }
    }
}

/// 4-bit integers, two a byte.
pub(super) struct I4;
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

/// A decoder of whole vectors, which `$one` makes.
macro_rules! decoder {
    ($name:ty, $one:expr, $part:expr) => {
        impl Decoder for $name {
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

decoder!(I4, i4, i4_part);
decoder!(E2m1, e2m1, e2m1_part);
decoder!(Q8x0, q8_0, no_tail);
decoder!(Q4x0, q4_0, no_tail);
decoder!(Q4k, q4_k, no_tail);
decoder!(Q6k, q6_k, no_tail);

impl Whole for I8 {
    const CODES: Codes = Codes::I8;
    const BIAS: u8 = 128;
    const LARGEST: u8 = 255;

    #[inline(always)]
    unsafe fn bytes<V: Vector>(from: *const u8, _: usize) -> [V::Ints; 4] {
        // SAFETY: the caller's promise.
        unsafe { [V::Ints::load(from).xor(V::Ints::splat(four(128))); 4] }
    }
}

impl Whole for Q8x0 {
    const CODES: Codes = Codes::Q8x0;
    const BIAS: u8 = 128;
    const LARGEST: u8 = 255;

    #[inline(always)]
    unsafe fn bytes<V: Vector>(from: *const u8, _: usize) -> [V::Ints; 4] {
        // SAFETY: the caller's promise.
        unsafe {
            let codes = V::Ints::pieces::<32>(from.add(2), 34);
            [codes.xor(V::Ints::splat(four(128))); 4]
        }
    }
}

impl Whole for I4 {
    const CODES: Codes = Codes::I4;
    const BIAS: u8 = 8;
    const LARGEST: u8 = 15;
    const VECTORS: usize = 2;

    #[inline(always)]
    unsafe fn bytes<V: Vector>(from: *const u8, _: usize) -> [V::Ints; 4] {
        // SAFETY: the caller's promise.
        unsafe { low_and_high::<V>(V::Ints::load(from)) }
    }
}

impl Whole for E2m1 {
    const CODES: Codes = Codes::E2m1;
    const BIAS: u8 = 12;
    const LARGEST: u8 = 24;
    const UNIT: f32 = 0.5;
    const VECTORS: usize = 2;

    #[inline(always)]
    unsafe fn bytes<V: Vector>(from: *const u8, _: usize) -> [V::Ints; 4] {
        // SAFETY: the caller's promise.
        unsafe {
            let table = V::Ints::table(&TWICE_E2M1);
            let [low, high, ..] = low_and_high::<V>(V::Ints::load(from));
            let (low, high) = (low.lookup(table), high.lookup(table));
            [low, high, low, high]
        }
    }
}

impl Whole for Q4x0 {
    const CODES: Codes = Codes::Q4x0;
    const BIAS: u8 = 8;
    const LARGEST: u8 = 15;
    const VECTORS: usize = 2;

    #[inline(always)]
    fn number(vector: usize, at: usize) -> usize {
        at / 16 * 32 + 16 * vector + at % 16
    }
    #[inline(always)]
    unsafe fn bytes<V: Vector>(from: *const u8, _: usize) -> [V::Ints; 4] {
        // SAFETY: the caller's promise.
        unsafe { low_and_high::<V>(V::Ints::pieces::<16>(from.add(2), 18)) }
    }
}

impl Whole for Q4k {
    const CODES: Codes = Codes::Q4k;
    const BIAS: u8 = 0;
    const LARGEST: u8 = 15;
    const SETS: usize = 2;
    const VECTORS: usize = 2;

    #[inline(always)]
    fn number(vector: usize, at: usize) -> usize {
        at / 16 * 64 + vector / 2 * 32 + vector % 2 * 16 + at % 16
    }
    #[inline(always)]
    unsafe fn bytes<V: Vector>(from: *const u8, k: usize) -> [V::Ints; 4] {
        // SAFETY: the caller's promise.
        unsafe {
            let [first, second] = V::Ints::halves(from.add(16 + k % 256 / 2));
            let ([a, c, ..], [b, d, ..]) = (low_and_high::<V>(first), low_and_high::<V>(second));
            [a, b, c, d]
        }
    }
}

impl Whole for Q6k {
    const CODES: Codes = Codes::Q6k;
    const BIAS: u8 = 32;
    const LARGEST: u8 = 63;
    const SETS: usize = 4;

    #[inline(always)]
    fn number(vector: usize, at: usize) -> usize {
        at / 32 * 128 + 32 * vector + at % 32
    }
    #[inline(always)]
    unsafe fn bytes<V: Vector>(from: *const u8, k: usize) -> [V::Ints; 4] {
        let half = k % 256 / 128;
        // SAFETY: the caller's promise.
        unsafe {
            let low = from.add(64 * half);
            let [a, c, ..] = low_and_high::<V>(V::Ints::pieces::<32>(low, 64));
            let [b, d, ..] = low_and_high::<V>(V::Ints::pieces::<32>(low.add(32), 64));
            let upper = V::Ints::load(from.add(128 + 32 * half));
            let mask = V::Ints::splat(four(0x30));
            [
                a.or(upper.shl(4).and(mask)),
                b.or(upper.shl(2).and(mask)),
                c.or(upper.and(mask)),
                d.or(upper.shr(2).and(mask)),
            ]
        }
    }
}

/// A lane of four times a byte.
pub(super) const fn four(byte: u8) -> i32 {
    i32::from_ne_bytes([byte; 4])
}

/// Twice the values of the e2m1 codes, each plus 12.
const TWICE_E2M1: [u8; 16] = {
    let mut table = [0; 16];
    let mut code = 0;
    while code < 16 {
        table[code] = (2.0 * E2M1[code] + 12.0) as u8;
        code += 1;
    }
    table
};

/// The lower and the upper halves of bytes. Safety: V's level.
#[inline(always)]
unsafe fn low_and_high<V: Vector>(bytes: V::Ints) -> [V::Ints; 4] {
    // SAFETY: the caller has the level.
    let mask = unsafe { V::Ints::splat(four(15)) };
    let (low, high) = (bytes.and(mask), bytes.shr(4).and(mask));
    [low, high, low, high]
}

/// Runs `$body` with `$D` as the kind of `$codes`, which are none of the plain numbers: those have
/// bodies of their own.
macro_rules! with_coded {
    ($codes:expr, $D:ident => $body:expr) => {{
        use crate::abi::Codes as C;
        use crate::cpu::codes as d;
        match $codes {
            C::I8 => {
                type $D = d::I8;
                $body
            }
            C::I4 => {
                type $D = d::I4;
                $body
            }
            C::E2m1 => {
                type $D = d::E2m1;
                $body
            }
            C::Q8x0 => {
                type $D = d::Q8x0;
                $body
            }
            C::Q4x0 => {
                type $D = d::Q4x0;
                $body
            }
            C::Q4k => {
                type $D = d::Q4k;
                $body
            }
            C::Q6k => {
                type $D = d::Q6k;
                $body
            }
            C::F32 | C::F16 | C::Bf16 | C::E4m3 => unreachable!("plain numbers"),
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
                codes => with_coded!(codes, D => self.all::<V, D>()),
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
