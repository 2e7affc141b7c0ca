//! Panics of the libraries that read tokenizers and templates, as errors.

use std::panic::{catch_unwind, AssertUnwindSafe};

/// Runs code of a library that panics on some inputs. Whatever it was working on is either dropped
/// or only read, so nothing half-changed is seen later.
pub(crate) fn guarded<T>(
    f: impl FnOnce() -> tokenizers::Result<T>,
) -> std::result::Result<T, String> {
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(result) => result.map_err(|e| e.to_string()),
        Err(panic) => Err(panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("the tokenizer library failed")
            .to_string()),
    }
}
