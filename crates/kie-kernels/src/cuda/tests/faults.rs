//! Every way in which a driver or a compiler says no: a typed error with the remedy, never a hang.

use std::time::{Duration, Instant};

use super::stub::{source, Stub};
use crate::cuda::{paths, Cuda};
use crate::error::Error;
use crate::gpu::api::index_of;
use crate::machine::{Launch, Machine};

/// Opening fails with [`Error::NoDevice`], or [`Error::DriverTooOld`] where `parts` say so, and the
/// text has all of `parts`.
fn refuses(stub: &Stub, parts: &[&str]) {
    let Err(error) = stub.open() else { panic!("opened; wanted {parts:?}") };
    let old = matches!(error, Error::DriverTooOld { .. });
    assert!(old || matches!(error, Error::NoDevice { .. }), "{error:?}");
    assert_eq!(old, parts.contains(&"too old"), "{error:?}");
    has(&error, parts);
    stub.check_clean();
}

fn has(error: &Error, parts: &[&str]) {
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "no {part:?} in: {text}");
    }
}

#[test]
fn a_missing_driver_names_the_library_and_the_remedy() {
    let mut paths = paths(&[], None);
    paths.driver = vec!["libkie-no-driver.so.1".into()];
    let Err(error) = Cuda::open("cuda:1", &paths) else { panic!("opened") };
    assert!(matches!(error, Error::NoDevice { .. }), "{error:?}");
    has(&error, &["cuda:1", "libkie-no-driver.so.1", "--gpus all", "device='cpu'"]);
}

#[test]
fn names_of_devices_are_checked() {
    assert_eq!(index_of("cuda", "cuda"), Ok(0));
    assert_eq!(index_of("cuda", "cuda:0"), Ok(0));
    assert_eq!(index_of("cuda", "cuda:12"), Ok(12));
    for bad in [
        "",
        "cud",
        "cuda:",
        "cuda:x",
        "cuda:-1",
        "cuda:+1",
        "cuda0",
        "cuda:0,1",
        "cuda:99999999999",
    ] {
        has(&index_of("cuda", bad).unwrap_err(), &["cuda:N"]);
    }
}

#[test]
fn a_driver_that_will_not_do_is_refused() {
    let test = "a driver that will not do";
    let Some(stub) = Stub::new(test) else { return };
    stub.set("version", 12_020);
    refuses(&stub, &["too old", "12.2", "12.4", "550"]);
    stub.set("version", 13_000);
    stub.set("init", 100);
    refuses(&stub, &["cuInit", "(100)", "--gpus all"]);
    stub.set("init", 803);
    refuses(&stub, &["cuInit", "reboot"]);
    stub.set("init", 0);
    stub.set("count", 0);
    refuses(&stub, &["sees no GPU", "CUDA_VISIBLE_DEVICES"]);
    stub.set("count", 2);
    let Err(error) = Cuda::open("cuda:2", &stub.paths) else { panic!("opened") };
    has(&error, &["cuda:2", "2 GPU(s)", "cuda:1"]);

    let Some(stub) = Stub::with(test, &["-DcuMemHostAlloc=gone"]) else { return };
    refuses(&stub, &["no symbol cuMemHostAlloc", "libstub.so"]);
}

#[test]
fn a_device_that_will_not_do_is_refused() {
    let Some(stub) = Stub::new("a device that will not do") else { return };
    stub.set("major", 7);
    refuses(&stub, &["Stub GPU", "7.0", "8.0"]);
    stub.set("major", 9);
    stub.set("mode", 2);
    refuses(&stub, &["Prohibited", "nvidia-smi -c DEFAULT"]);
    stub.set("mode", 3);
    stub.set("retain", 46);
    refuses(&stub, &["(46)", "Exclusive_Process", "nvidia-smi -c DEFAULT"]);
    stub.set("retain", 0);
    stub.set("cooperative", 0);
    refuses(&stub, &["cooperative"]);
    stub.set("cooperative", 1);
    stub.set("host_memory", 1 << 20);
    let Err(error) = stub.open() else { panic!("opened") };
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error:?}");
    stub.check_clean();
}

#[test]
fn memory_that_is_not_there_is_out_of_memory() {
    let Some(stub) = Stub::new("out of memory") else { return };
    let cuda = stub.open().unwrap();
    stub.set("memory", 1000);
    let wanted = Error::OutOfMemory { device: "cuda:0".into(), wanted_bytes: 1024 };
    assert_eq!(cuda.alloc(1001).err(), Some(wanted));
    stub.set("host_memory", 100);
    let Some(Error::OutOfMemory { device, wanted_bytes: 128 }) = cuda.alloc_shared(101).err()
    else {
        panic!("allocated")
    };
    assert!(device.contains("host memory"), "{device}");
    stub.set("memory", 4096);
    cuda.alloc(1001).unwrap();
    drop(cuda);
    stub.check_clean();
}

#[test]
fn a_launch_that_does_not_fit_is_refused() {
    let Some(stub) = Stub::new("launches that do not fit") else { return };
    let cuda = stub.open().unwrap();
    let module = cuda.compile(&source("text")).unwrap();
    let good =
        Launch { entry: "kernel", blocks: 4, threads: 128, shared_bytes: 1000, args: &[0; 8] };
    let refuses = |launch: Launch<'_>, parts: &[&str]| {
        let Err(error) = cuda.launch(&module, &launch) else { panic!("launched {launch:?}") };
        assert!(matches!(error, Error::Failed(_)), "{error:?}");
        has(&error, parts);
    };
    refuses(Launch { blocks: 5, ..good }, &["5 blocks", "1 fit on each of 4"]);
    refuses(Launch { threads: 1025, ..good }, &["1025", "1 to 1024"]);
    refuses(Launch { blocks: 0, ..good }, &["0 blocks"]);
    refuses(Launch { entry: "other", ..good }, &["other", "only kernel"]);
    refuses(Launch { args: &[0; 12], ..good }, &["8 bytes, not 12"]);
    refuses(Launch { shared_bytes: 232_449, ..good }, &["232449 bytes of shared memory"]);
    for code in [1, 701, 720] {
        stub.set("launch", code);
        refuses(good, &[&format!("({code})"), "4 blocks of 128 threads", "1000 bytes"]);
    }
    stub.set("launch", 0);
    let other = stub.open().unwrap();
    let Err(error) = other.launch(&module, &good) else { panic!("launched") };
    has(&error, &["another machine"]);
    assert_eq!(stub.get("launched"), 0);
    drop((other, module));
    drop(cuda);
    stub.check_clean();
}

#[test]
fn a_fault_of_the_kernel_is_told_each_time() {
    let Some(stub) = Stub::new("faults of a kernel") else { return };
    let cuda = stub.open().unwrap();
    let module = cuda.compile(&source("text")).unwrap();
    let memory = cuda.alloc(64).unwrap();
    let launch = Launch { entry: "kernel", blocks: 1, threads: 32, shared_bytes: 0, args: &[0; 8] };
    let mut flight = cuda.launch(&module, &launch).unwrap();
    assert_eq!(flight.done(), Ok(false));
    stub.set("query", 700);
    for _ in 0..2 {
        let error = flight.done().unwrap_err();
        assert!(matches!(error, Error::Failed(_)), "{error:?}");
        has(&error, &["cuda:0", "kernel", "STUB_ERROR_700", "(700)", "restart it"]);
    }
    stub.set("copy", 700);
    has(&cuda.write(&memory, 0, &[1]).unwrap_err(), &["(700)", "restart it"]);
    let start = Instant::now();
    drop((flight, module, memory));
    drop(cuda);
    assert!(start.elapsed() < Duration::from_secs(5));
    assert_eq!(stub.get("violations"), 0, "nothing waits for a kernel whose end is unknown");
}

#[test]
fn a_kernel_that_never_ends_is_left_alone() {
    let Some(stub) = Stub::new("a kernel that never ends") else { return };
    let cuda = stub.open().unwrap();
    let module = cuda.compile(&source("text")).unwrap();
    let memory = cuda.alloc(64).unwrap();
    let launch = Launch { entry: "kernel", blocks: 1, threads: 32, shared_bytes: 0, args: &[0; 8] };
    let flight = cuda.launch(&module, &launch).unwrap();
    let start = Instant::now();
    drop(flight);
    assert!(start.elapsed() >= stub.paths.patience);
    drop((module, memory));
    drop(cuda);
    assert_eq!(stub.get("violations"), 0);
    assert_eq!((stub.get("blocks"), stub.get("contexts")), (1, 1), "what it uses stays");
}

#[test]
fn a_compiler_that_will_not_do_is_refused() {
    let test = "a compiler that will not do";
    let Some(stub) = Stub::new(test) else { return };
    let refuses = |stub: &Stub, parts: &[&str]| {
        let cuda = stub.open().unwrap();
        let Err(error) = cuda.compile(&source("text")) else { panic!("compiled") };
        assert!(matches!(&error, Error::BackendMissing { device, .. } if device == "cuda:0"));
        has(&error, parts);
        assert_eq!(cuda.compile(&source("text")).err(), Some(error));
    };
    stub.set("nvrtc_major", 14);
    refuses(&stub, &["14.0", "newer than the driver (CUDA 13)", "'nvidia-cuda-nvrtc<14'"]);
    stub.set("version", 12_080);
    stub.set("nvrtc_major", 13);
    refuses(&stub, &["13.0", "newer than the driver (CUDA 12)", "nvidia-cuda-nvrtc-cu12"]);
    stub.set("nvrtc_major", 11);
    refuses(&stub, &["11.0", "12.0", "kie[cuda]"]);
    let Some(mut stub) = Stub::with(test, &["-DnvrtcGetCUBIN=gone"]) else { return };
    refuses(&stub, &["no symbol nvrtcGetCUBIN", "kie[cuda]", "KIE_NVRTC"]);
    stub.paths.compiler = vec!["libkie-no-nvrtc.so.13".into()];
    refuses(&stub, &["libkie-no-nvrtc.so.13", "kie[cuda]"]);
    let file = stub.folder.join("libnvrtc.so.13");
    std::fs::write(&file, b"not a library").unwrap();
    stub.paths.compiler.push(file);
    refuses(&stub, &["libkie-no-nvrtc.so.13", "libnvrtc.so.13: ", "kie[cuda]"]);
}

#[test]
fn a_source_that_does_not_compile_gives_the_log() {
    let Some(stub) = Stub::new("a source that does not compile") else { return };
    let cuda = stub.open().unwrap();
    stub.set("nvrtc_code", 6);
    let Err(Error::Compile { arch, detail }) = cuda.compile(&source("text")) else {
        panic!("compiled")
    };
    assert_eq!((arch.as_str(), detail.as_str()), ("sm_90a", "stub log: line 7: as the test set"));
    stub.set("nvrtc_code", 5);
    let Err(error) = cuda.compile(&source("text")) else { panic!("compiled") };
    has(&error, &["STUB_NVRTC_ERROR", "too old", "pip install -U"]);
    stub.set("nvrtc_code", 0);
    let mut absent = source("text");
    absent.entries = vec!["absent"];
    let Err(error) = cuda.compile(&absent) else { panic!("compiled") };
    assert!(matches!(error, Error::Compile { .. }), "{error:?}");
    has(&error, &["kernel absent"]);
    stub.set("parameters", 2);
    let Err(error) = cuda.compile(&source("text")) else { panic!("compiled") };
    has(&error, &["several parameters"]);
    drop(cuda);
    stub.check_clean();
}
