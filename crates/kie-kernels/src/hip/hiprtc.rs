//! hipRTC, found at run time: where it may lie, and what it is asked.

use std::ffi::c_int;
use std::path::PathBuf;

use super::code_object::kernels;
use super::{ffi, rocm};
use crate::error::{Error, Result};
use crate::gpu::api::first_of;
use crate::gpu::rtc::{Compiler, Dialect};

/// Names of the library, newest first.
const NAMES: [&str; 3] = ["libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so"];
const REMEDY: &str = "install ROCm's hiprtc, or name the file in KIE_HIPRTC";

static HIPRTC: Dialect = Dialect {
    name: "hipRTC",
    prefix: "hiprtc",
    code: "Code",
    virtual_code: None,
    options: &["-std=c++17", "-O3"],
    arch_option: "--offload-arch=",
    hint,
    check: |code| kernels(code).map(drop),
};

/// Where hipRTC may be, in order: the file in `KIE_HIPRTC` and nothing else if that is set; by
/// name; in ROCm's folders.
pub(super) fn candidates() -> Vec<PathBuf> {
    match std::env::var_os("KIE_HIPRTC").filter(|file| !file.is_empty()) {
        Some(file) => vec![file.into()],
        None => rocm::candidates(&NAMES),
    }
}

/// The first of `candidates` that works.
///
/// # Errors
/// [`Error::BackendMissing`] with what was tried and why it did not do.
pub(super) fn open(candidates: &[PathBuf], device: &str) -> Result<Compiler> {
    first_of(candidates, |path| Compiler::open(&HIPRTC, path)).map_err(|tried| {
        let detail = format!("no usable hipRTC, which compiles the kernels ({tried}); {REMEDY}");
        Error::BackendMissing { device: device.into(), detail }
    })
}

fn hint(code: c_int) -> &'static str {
    match code {
        ffi::HIPRTC_INVALID_OPTION => {
            "; if it does not know the architecture, it is too old: update ROCm"
        }
        _ => "",
    }
}
