//! Launches: refused when they cannot be resident, watched until they end, and nothing that a
//! kernel may use is freed before.

use std::time::Duration;

use super::{four_blocks, source, Stub};
use crate::error::Error;
use crate::machine::{Launch, Machine};

#[test]
fn launches_that_are_refused() {
    let stub = Stub::new();
    let hip = stub.open().unwrap();
    let module = hip.compile(&source()).unwrap();
    let refused = |launch: Launch<'_>| match hip.launch(&module, &launch) {
        Ok(_) => panic!("{launch:?} was started"),
        Err(error) => error.to_string(),
    };
    let usual = four_blocks();
    assert!(refused(Launch { entry: "other", ..usual }).contains("has only k"));
    assert!(refused(Launch { args: &[0; 23], ..usual }).contains("24 bytes, not 23"));
    assert!(refused(Launch { args: &[], ..usual }).contains("not 0"));
    assert!(refused(Launch { threads: 417, ..usual }).contains("1 to 416 threads"));
    assert!(refused(Launch { threads: 0, ..usual }).contains("0 threads"));
    assert!(refused(Launch { blocks: 0, ..usual }).contains("0 blocks"));
    assert!(refused(Launch { blocks: 5, ..usual }).contains("1 fit on each of 4"));
    assert!(refused(Launch { shared_bytes: 65_521, ..usual }).contains("a block has 65536"));
    assert!(refused(Launch { shared_bytes: u32::MAX, ..usual }).contains("a block has 65536"));
    stub.set("fit", 0);
    assert!(refused(usual).contains("0 fit"));
    assert_eq!(stub.calls("hipModuleLaunchCooperativeKernel"), 0);
    stub.set("fit", 1);
    stub.fail("hipModuleLaunchCooperativeKernel", 720);
    assert!(refused(usual).contains("not all blocks fit"));
    let other = stub.open().unwrap();
    let error = other.launch(&module, &usual).err().unwrap().to_string();
    assert!(error.contains("another machine"), "{error}");
    drop((module, hip, other));
    assert_eq!(stub.live(), 0);
}

#[test]
fn a_kernel_is_watched_and_what_it_uses_is_kept() {
    let stub = Stub::new();
    let hip = stub.open().unwrap();
    let module = hip.compile(&source()).unwrap();
    let (memory, shared) = (hip.alloc(100).unwrap(), hip.alloc_shared(100).unwrap());
    stub.set("landed", 0);
    let mut flight = hip.launch(&module, &four_blocks()).unwrap();
    assert_eq!(stub.args(), super::ARGS);
    assert!(!flight.done().unwrap());
    drop((memory, shared, module));
    let late = hip.alloc(300).unwrap();
    let mut seen = [1; 300];
    hip.read(&late, 0, &mut seen).unwrap();
    assert_eq!((seen, stub.calls("hipMemsetD8Async")), ([0; 300], 1), "zeros were copied");
    for call in ["hipFree", "hipHostFree", "hipModuleUnload"] {
        assert_eq!(stub.calls(call), 0, "{call} while a kernel runs");
    }
    stub.set("landed", 1);
    assert!(flight.done().unwrap());
    assert!(flight.done().unwrap(), "also when asked again");
    assert_eq!((stub.calls("hipFree"), stub.calls("hipHostFree")), (1, 1));
    assert_eq!(stub.calls("hipModuleUnload"), 0, "the flight still has it");
    drop((flight, late, hip));
    assert_eq!(stub.live(), 0);
}

#[test]
fn a_dropped_flight_waits_for_its_end() {
    let mut stub = Stub::new();
    stub.paths.patience = Duration::from_secs(60);
    let hip = stub.open().unwrap();
    let module = hip.compile(&source()).unwrap();
    stub.set("landed", 0);
    let flight = hip.launch(&module, &four_blocks()).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while stub.calls("hipEventQuery") < 3 {
                std::thread::yield_now();
            }
            stub.set("landed", 1);
        });
        drop(flight);
    });
    drop((module, hip));
    assert_eq!(stub.live(), 0);
}

#[test]
fn a_kernel_that_never_ends_is_left_alone() {
    let stub = Stub::new();
    let hip = stub.open().unwrap();
    let module = hip.compile(&source()).unwrap();
    let memory = hip.alloc(100).unwrap();
    stub.set("landed", 0);
    drop(hip.launch(&module, &four_blocks()).unwrap());
    drop((memory, module, hip));
    for call in ["hipFree", "hipHostFree", "hipModuleUnload", "hipStreamDestroy"] {
        assert_eq!(stub.calls(call), 0, "{call} while a kernel may run");
    }
}

#[test]
fn a_fault_of_a_kernel_is_told_again_and_again() {
    let stub = Stub::new();
    let hip = stub.open().unwrap();
    let module = hip.compile(&source()).unwrap();
    stub.set("landed", 0);
    let mut flight = hip.launch(&module, &four_blocks()).unwrap();
    stub.fail("hipEventQuery", 700);
    for _ in 0..2 {
        let Error::Failed(words) = flight.done().unwrap_err() else { panic!() };
        assert!(words.contains("hip:1") && words.contains("hipErrorIllegalAddress"), "{words}");
        assert!(words.contains("restart"), "{words}");
    }
    assert_eq!(stub.calls("hipEventQuery"), 1, "a lost flight is not asked again");
}
