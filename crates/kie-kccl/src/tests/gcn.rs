//! The collectives as machine code of gfx942, executed on an emulator of it, never on the hardware.

use kie_gcn::Gcn;

use super::product::product_on;
use super::*;

fn gcn(name: &str) -> Arc<dyn Machine> {
    Arc::new(Gcn::open(name).unwrap())
}

/// Whether there is a compiler; in CI there must be.
fn has_compiler() -> bool {
    let found = kie_gcn::toolchain::is_here();
    assert!(found || std::env::var("CI").as_deref() != Ok("true"), "no clang++-19");
    found
}

#[test]
fn machine_code_agrees_with_the_definition() {
    if has_compiler() {
        product_on(gcn("gcn:seed=1,blocks=4"), 2, &[0, 1, 9, 257]);
    }
}

/// Each rank's blocks on dies of their own, on a memory as weak as it is documented.
#[test]
fn machine_code_orders_what_it_tells_of() {
    if has_compiler() {
        for seed in 0..3 {
            product_on(gcn(&format!("gcn:seed={seed},blocks=4,chiplets=4,weak=1")), 2, &[65]);
        }
    }
}

/// Eight machines meet as two do.
#[test]
#[ignore = "minutes: make gcn"]
fn machine_code_agrees_on_more_ranks() {
    if has_compiler() {
        product_on(gcn("gcn:seed=4,blocks=2"), 4, &[0, 9, 65]);
        product_on(gcn("gcn:seed=5,blocks=2"), 8, &[9, 257]);
        product_on(gcn("gcn:seed=6,blocks=2,chiplets=2,weak=1"), 4, &[65]);
    }
}
