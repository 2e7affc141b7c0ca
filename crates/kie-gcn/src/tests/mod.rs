//! The emulator against what is known: small kernels, the project's own, and the instruction set.
#![allow(clippy::unwrap_used)]

mod isa;
mod kernels;
mod litmus;
mod stream;
mod wide;

use std::io::Write;
use std::time::Duration;

use kie_kernels::machine::{wait_within, Launch, Machine, Platform, Source};
use kie_kernels::mono::source::join;
use kie_kernels::Error;

use crate::clocks::Clocks;
use crate::lint::{self, Words};
use crate::toolchain::{self, Compiled};
use crate::{Fault, Gcn};

/// What is compiled, or one line that says why a test cannot run here; in CI it must.
fn compiled(test: &str, source: &Source) -> Option<Compiled> {
    match toolchain::compile(source, &crate::machine::cache_folder()) {
        Ok(compiled) => Some(compiled),
        Err(Error::BackendMissing { detail, .. }) => {
            assert_ne!(std::env::var("CI").as_deref(), Ok("true"), "{test}: {detail}");
            let _ = writeln!(std::io::stderr(), "skipped: {test}: {detail}");
            None
        }
        Err(error) => panic!("{test}: {error}"),
    }
}

#[test]
fn an_unknown_mnemonic_is_told_with_its_line() {
    let listing = "0000000000001000 <k>:\n\tv_frobnicate_b32 v0, v1    // 000000001000: 00000000\n\
                   \ts_endpgm     // 000000001004: BF810000\n";
    let error = lint::check(listing, Words::None).unwrap_err();
    assert!(matches!(&error, Fault::Unknown { address: 0x1000, .. }), "{error}");
    assert!(error.to_string().contains("v_frobnicate_b32 v0, v1"), "{error}");
    for strange in ["v_mov_b32_e32 v0, v256", "v_add_u32_e32 v0, v1, v2 row_shl:1"] {
        let listing = listing.replace("v_frobnicate_b32 v0, v1", strange);
        let error = lint::check(&listing, Words::None).unwrap_err();
        assert!(matches!(&error, Fault::Line { address: 0x1000, .. }), "{error}");
    }
}
