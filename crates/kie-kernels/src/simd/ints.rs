//! Vectors of integers: bytes that are multiplied in fours, and their 32-bit sums.

/// A vector of 32-bit integers, or of four bytes a lane. Pointers may have any alignment.
///
/// # Safety contract
/// Constructors: the CPU has the level, and the stated bytes are readable.
pub(crate) trait Ints: Copy {
    /// Bytes of a vector: 32 or 64.
    const BYTES: usize;
    /// The largest code that [`Ints::dot`] takes with every digit of eight bits; any code goes with
    /// digits of seven.
    const LARGEST: u8;

    /// All lanes `value`.
    unsafe fn splat(value: i32) -> Self;
    /// `BYTES` bytes.
    unsafe fn load(from: *const u8) -> Self;
    /// As many pieces of `SIZE` bytes (16 or 32) as there is room for, `stride` bytes apart.
    unsafe fn pieces<const SIZE: usize>(from: *const u8, stride: usize) -> Self;
    /// Of `2 * BYTES` bytes the first 16 of each 32, and the others.
    unsafe fn halves(from: *const u8) -> [Self; 2];
    /// 16 bytes, again and again.
    unsafe fn table(bytes: &[u8; 16]) -> Self;
    /// Writes `BYTES` bytes; they must be writable.
    unsafe fn store(self, to: *mut u8);
    /// Writes the lowest byte of each lane.
    unsafe fn narrow(self, to: *mut u8);
    /// Every second lane from the first on, of `self` and then of `b`.
    fn evens(self, b: Self) -> Self;
    /// Bits of both.
    fn and(self, b: Self) -> Self;
    /// Bits of either.
    fn or(self, b: Self) -> Self;
    /// Bits of one alone.
    fn xor(self, b: Self) -> Self;
    /// Sums of lanes, modulo 2^32.
    fn add(self, b: Self) -> Self;
    /// Differences of lanes, modulo 2^32.
    fn sub(self, b: Self) -> Self;
    /// Lanes shifted to the left by less than 32 bits.
    fn shl(self, bits: u32) -> Self;
    /// Lanes shifted to the right by less than 32 bits; zeros come in.
    fn shr(self, bits: u32) -> Self;
    /// Of a [`Ints::table`] the bytes that the bytes of `self`, below 16, say.
    fn lookup(self, table: Self) -> Self;
    /// `self` plus, in each lane, the products of four unsigned codes with four signed digits.
    fn dot(self, codes: Self, digits: Self) -> Self;
}

/// Eight lanes of portable code.
#[derive(Clone, Copy)]
pub(crate) struct I8(pub(super) [i32; 8]);

macro_rules! lanewise {
    ($a:expr, $op:expr) => {{
        let mut out = $a;
        for i in 0..8 {
            out[i] = $op(out[i], i);
        }
        I8(out)
    }};
}

impl Ints for I8 {
    const BYTES: usize = 32;
    const LARGEST: u8 = 255;

    #[inline(always)]
    unsafe fn splat(value: i32) -> Self {
        Self([value; 8])
    }
    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self {
        // SAFETY: the caller promised 32 readable bytes.
        Self(unsafe { from.cast::<[i32; 8]>().read_unaligned() }.map(i32::from_le))
    }
    #[inline(always)]
    unsafe fn pieces<const SIZE: usize>(from: *const u8, stride: usize) -> Self {
        let mut bytes = [0u8; 32];
        // SAFETY: the caller promised these pieces; they fill the array.
        unsafe {
            for i in 0..32 / SIZE {
                let to = bytes.as_mut_ptr().add(i * SIZE);
                std::ptr::copy_nonoverlapping(from.add(i * stride), to, SIZE);
            }
            Self::load(bytes.as_ptr())
        }
    }
    #[inline(always)]
    unsafe fn halves(from: *const u8) -> [Self; 2] {
        // SAFETY: the caller promised 64 readable bytes.
        unsafe { [Self::pieces::<16>(from, 32), Self::pieces::<16>(from.add(16), 32)] }
    }
    #[inline(always)]
    unsafe fn table(bytes: &[u8; 16]) -> Self {
        // SAFETY: 16 bytes, twice.
        unsafe { Self::pieces::<16>(bytes.as_ptr(), 0) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        // SAFETY: the caller promised 32 writable bytes.
        unsafe { to.cast::<[i32; 8]>().write_unaligned(self.0.map(i32::to_le)) }
    }
    #[inline(always)]
    unsafe fn narrow(self, to: *mut u8) {
        // SAFETY: the caller promised 8 writable bytes.
        unsafe { to.cast::<[u8; 8]>().write_unaligned(self.0.map(|lane| lane as u8)) }
    }
    #[inline(always)]
    fn evens(self, b: Self) -> Self {
        let (a, b) = (self.0, b.0);
        Self([a[0], a[2], a[4], a[6], b[0], b[2], b[4], b[6]])
    }
    #[inline(always)]
    fn and(self, b: Self) -> Self {
        lanewise!(self.0, |a: i32, i: usize| a & b.0[i])
    }
    #[inline(always)]
    fn or(self, b: Self) -> Self {
        lanewise!(self.0, |a: i32, i: usize| a | b.0[i])
    }
    #[inline(always)]
    fn xor(self, b: Self) -> Self {
        lanewise!(self.0, |a: i32, i: usize| a ^ b.0[i])
    }
    #[inline(always)]
    fn add(self, b: Self) -> Self {
        lanewise!(self.0, |a: i32, i: usize| a.wrapping_add(b.0[i]))
    }
    #[inline(always)]
    fn sub(self, b: Self) -> Self {
        lanewise!(self.0, |a: i32, i: usize| a.wrapping_sub(b.0[i]))
    }
    #[inline(always)]
    fn shl(self, bits: u32) -> Self {
        lanewise!(self.0, |a: i32, _| a << bits)
    }
    #[inline(always)]
    fn shr(self, bits: u32) -> Self {
        lanewise!(self.0, |a: i32, _| (a as u32 >> bits) as i32)
    }
    #[inline(always)]
    fn lookup(self, table: Self) -> Self {
        let byte = |index: u8| table.0[index as usize / 4].to_le_bytes()[index as usize % 4];
        Self(self.0.map(|lane| i32::from_le_bytes(lane.to_le_bytes().map(byte))))
    }
    #[inline(always)]
    fn dot(self, codes: Self, digits: Self) -> Self {
        let mut out = self.0;
        for i in 0..8 {
            let (codes, digits) = (codes.0[i].to_le_bytes(), digits.0[i].to_le_bytes());
            for at in 0..4 {
                out[i] += i32::from(codes[at]) * i32::from(digits[at] as i8);
            }
        }
        Self(out)
    }
}
