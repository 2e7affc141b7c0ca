//! CUDA without a GPU: the real compiler where there is one, and a stub driver that does what a
//! test tells it to. With one, `cargo test -p kie-kernels --lib cuda::tests::gpu -- --ignored`.

#![allow(clippy::unwrap_used)]

use std::io::Write;

mod compiler;
mod faults;
mod gpu;
mod machine;
mod stub;

/// One line says that the test is skipped, which CI does not accept.
fn skipped(test: &str, why: &str) {
    assert_ne!(std::env::var("CI").as_deref(), Ok("true"), "{test}: {why}");
    let line = format!("skipped: {test}: {why}\n");
    // Past the capture of the test runner; nobody may be listening.
    let _ = std::io::stderr().write_all(line.as_bytes());
}
