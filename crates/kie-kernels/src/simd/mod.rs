//! Instruction-set levels and the one vector type the kernels are written against.
//!
//! A kernel is a struct that implements [`Kernel`]; its body is generic over [`Vector`] and is
//! compiled once for each level. Invariants: a value of a vector type exists only where its level
//! is available (the constructors are `unsafe`, so arithmetic on values is safe); everything
//! between [`dispatch`] and an intrinsic is `#[inline(always)]`, without closures, since only
//! then is it compiled with the level's instructions; forcing a level changes bits, nothing else
//! does.

use std::sync::OnceLock;

mod ints;
mod vector;
#[cfg(target_arch = "x86_64")]
pub(crate) mod x86;

pub(crate) use self::ints::Ints;
use self::vector::V8;
pub use self::vector::{f8_to_f32, E2M1};
pub(crate) use self::vector::{Kernel, Vector};

/// An instruction-set level, weakest first; each includes the ones before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Portable code, whatever the build's target offers.
    Scalar,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// AVX-512 with dot products of BF16 and of bytes and VBMI (Zen 4, Sapphire Rapids).
    Avx512Bf16,
    /// AMX tiles of BF16, granted to this process by the kernel.
    Amx,
}

impl Level {
    /// All levels, weakest first.
    pub const ALL: [Self; 5] =
        [Self::Scalar, Self::Avx2, Self::Avx512, Self::Avx512Bf16, Self::Amx];

    /// Name as `kie doctor` prints it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512-bf16",
            Self::Amx => "amx-bf16",
        }
    }

    /// Whether this machine can run the level.
    pub fn is_available(self) -> bool {
        self <= detect()
    }
}

/// The strongest level of this machine. The first call asks the kernel for the AMX state.
pub fn detect() -> Level {
    static BEST: OnceLock<Level> = OnceLock::new();
    *BEST.get_or_init(detect_uncached)
}

/// Every level that this machine can run, weakest first.
pub fn available() -> Vec<Level> {
    Level::ALL.into_iter().filter(|level| level.is_available()).collect()
}

#[cfg(target_arch = "x86_64")]
fn detect_uncached() -> Level {
    use std::arch::is_x86_feature_detected as has;
    if !(has!("avx2") && has!("fma") && has!("f16c")) {
        return Level::Scalar;
    }
    if !(has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl")) {
        return Level::Avx2;
    }
    if !(has!("avx512bf16") && has!("avx512vbmi") && has!("avx512vnni")) {
        return Level::Avx512;
    }
    if x86::amx_granted() {
        Level::Amx
    } else {
        Level::Avx512Bf16
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn detect_uncached() -> Level {
    Level::Scalar
}

/// Runs `kernel` with the instructions of `level`.
///
/// # Panics
/// When the machine lacks the level.
#[inline]
pub(crate) fn dispatch<K: Kernel>(level: Level, kernel: K) -> K::Output {
    assert!(level.is_available(), "this machine has no {}", level.name());
    #[cfg(target_arch = "x86_64")]
    {
        match level {
            // SAFETY: V8 needs nothing.
            Level::Scalar => unsafe { kernel.run::<V8>() },
            // SAFETY: the assertion above checked the level.
            Level::Avx2 => unsafe { x86::avx2(kernel) },
            // SAFETY: as above.
            Level::Avx512 => unsafe { x86::avx512(kernel) },
            // SAFETY: as above; Amx includes Avx512Bf16.
            Level::Avx512Bf16 | Level::Amx => unsafe { x86::avx512_vbmi(kernel) },
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: V8 needs nothing.
    unsafe {
        kernel.run::<V8>()
    }
}

/// Whether rows of a matrix are read faster one after another, far ahead, than side by side: so on
/// AMD's cores (one stream a core of Zen 5 reads 15 to 25 % more than four), not on Intel's, where
/// one stream leaves bandwidth unused.
pub(crate) fn reads_rows_alone() -> bool {
    static ALONE: OnceLock<bool> = OnceLock::new();
    *ALONE.get_or_init(|| match std::env::var("KIE_ROWS").as_deref() {
        Ok("1") => true,
        Ok("4") => false,
        _ => is_amd(),
    })
}

#[cfg(target_arch = "x86_64")]
fn is_amd() -> bool {
    let vendor = std::arch::x86_64::__cpuid(0);
    [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat() == b"AuthenticAMD"
}

#[cfg(not(target_arch = "x86_64"))]
fn is_amd() -> bool {
    false
}

/// Asks for the cache line at `at`; any address is allowed.
#[inline(always)]
pub(crate) fn prefetch(at: *const u8) {
    ask_for::<3>(at);
}

/// The same as far as the second-level cache.
#[inline(always)]
pub(crate) fn prefetch_near(at: *const u8) {
    ask_for::<2>(at);
}

/// `HINT`: 3 for all caches (`_MM_HINT_T0`), 2 for those from the second on (`_MM_HINT_T1`).
#[inline(always)]
fn ask_for<const HINT: i32>(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch never faults; SSE is part of every x86-64.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<HINT>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}
