//! What orders what, judged by ThreadSanitizer: kernels compiled for it run in a process of its
//! own, since its library must be there before anything else is. `kernels/sim/order.h` says what
//! it is told; it looks at order alone, so a schedule in which all goes well hides nothing.

use std::os::unix::process::CommandExt;
use std::process::{Command, Output};

use super::failures::{edited_by, open_over};
use super::support::greedy_request;

/// What a process of its own is to run.
const CASE: &str = "KIE_ORDER_CASE";

/// Runs a case under the sanitizer, which ends the process with its first report.
fn run(case: usize) -> Output {
    let library = Command::new("g++").arg("-print-file-name=libtsan.so").output().unwrap();
    let library = String::from_utf8(library.stdout).unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "order::in_a_process_of_its_own", "--ignored", "--nocapture"])
        .env(CASE, case.to_string())
        .env("LD_PRELOAD", library.trim())
        // Rust's own code is not compiled for it: what its threads do to each other is not seen.
        .env("TSAN_OPTIONS", "ignore_noninstrumented_modules=1 halt_on_error=1 exitcode=66");
    // The sanitizer knows few layouts of memory. Where this is refused, it may still like it.
    // SAFETY: between fork and exec, a system call that allocates nothing.
    unsafe {
        command.pre_exec(|| {
            libc::personality(libc::ADDR_NO_RANDOMIZE as libc::c_ulong);
            Ok(())
        });
    }
    command.output().unwrap()
}

#[test]
fn try_it() {
    let out = run(0);
    println!("{}", String::from_utf8_lossy(&out.stdout));
    println!("{}", String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{:?}", out.status);
}

#[test]
#[ignore = "run by the tests above"]
fn in_a_process_of_its_own() {
    let case: usize = std::env::var(CASE).unwrap().parse().unwrap();
    let name = std::env::var("T_FIX").unwrap_or("laneformer_d2".into());
    let n: u32 = std::env::var("T_N").map_or(5, |v| v.parse().unwrap());
    let start = std::time::Instant::now();
    let seed = case;
    let engine = open_over(&name, edited_by("kie_decode", &format!("sim:seed={seed},warp=32,blocks=8,races=1"), &[], &std::sync::Arc::default()));
    println!("open {:?}", start.elapsed());
    let ids: Vec<u32> = (0..n).map(|i| 3 + i * 7 % 90).collect();
    println!("{:?}", engine.generate(greedy_request(&ids, 4)).unwrap().token_ids);
    println!("all {:?}", start.elapsed());
}
