//! Registers of AMX tiles: four of sums, over products of panels of bfloat16 with two blocks of
//! columns.
//!
//! Invariant: tiles are configured before anything else and released behind it.

use std::arch::asm;

use super::packed::{Line, STEPS};

/// Eight tiles of 16 rows x 64 bytes.
///
/// # Safety
/// AMX is granted.
pub(super) unsafe fn configure() {
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
pub(super) unsafe fn zero() {
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
pub(super) unsafe fn load(near: *const f32, far: *const f32) {
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
pub(super) unsafe fn store(near: *mut f32, far: *mut f32) {
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
pub(super) unsafe fn multiply(
    panel: *const Line,
    near: *const Line,
    far: *const Line,
    steps: usize,
) {
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

/// Gives the tiles back. Safety: configured.
#[inline(always)]
pub(super) unsafe fn release() {
    // SAFETY: the caller's promise.
    unsafe { asm!("tilerelease", options(nomem, nostack)) };
}
