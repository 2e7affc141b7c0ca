//! What is missing or broken is told, with the call and a remedy, and nothing is left behind.

use super::{build, four_blocks, object, source, Folder, Stub};
use crate::error::Error;
use crate::gpu::api::Api;
use crate::hip::{Hip, HipModule, Runtime};
use crate::machine::{Machine, Platform, Source};

fn detail(error: &Error) -> &str {
    match error {
        Error::NoDevice { detail, .. } => detail,
        other => panic!("{other}"),
    }
}

fn refused(stub: &Stub, name: &str) -> Error {
    match Hip::open(name, &stub.paths) {
        Ok(_) => panic!("{name} was opened"),
        Err(error) => error,
    }
}

#[test]
fn names_of_devices() {
    let stub = Stub::new();
    for name in ["hip", "hip:0", "hip:1"] {
        assert!(Hip::open(name, &stub.paths).is_ok(), "{name}");
    }
    for name in ["", "cuda:0", "hip:", "hip:x", "hip:+1", "hip:-1", "hip 0", "hip:4294967296"] {
        let error = refused(&stub, name);
        assert!(detail(&error).contains("hip:N"), "{name}: {error}");
    }
    let error = refused(&stub, "hip:2");
    assert!(detail(&error).contains("hip:0 to hip:1"), "{error}");
}

#[test]
fn a_runtime_that_will_not_do() {
    let mut stub = Stub::new();
    stub.set("version", 50_721_000);
    let error = refused(&stub, "hip");
    assert!(detail(&error).contains("HIP 5.7") && detail(&error).contains("update"), "{error}");
    let folder = Folder::new("half");
    let (text, half) = (folder.0.join("half.c"), folder.0.join("libhalf.so"));
    std::fs::write(&text, "int hipRuntimeGetVersion(int* v) { *v = 60000000; return 0; }").unwrap();
    build(&text, &half);
    stub.paths.driver = vec![half.clone()];
    let error = refused(&stub, "hip");
    assert!(detail(&error).contains("hipInit") && detail(&error).contains("half"), "{error}");
    stub.paths.driver = vec!["libkie-no-such.so.6".into(), half];
    let error = refused(&stub, "hip");
    assert!(
        detail(&error).contains("libkie-no-such") && detail(&error).contains("half"),
        "{error}"
    );
    assert!(detail(&error).contains("device='cpu'"), "{error}");
}

#[test]
fn devices_that_will_not_do() {
    let stub = Stub::new();
    let with = |what: &str, value: i32, usual: i32| {
        stub.set(what, value);
        let error = refused(&stub, "hip:1");
        stub.set(what, usual);
        error
    };
    assert!(detail(&with("devices", 0, 2)).contains("/dev/kfd"));
    assert!(detail(&with("major", 11, 9)).contains("gfx114x"));
    assert!(detail(&with("minor", 0, 4)).contains("Stub GPU"));
    assert!(detail(&with("lanes", 32, 64)).contains("32 lanes"));
    assert!(detail(&with("cooperative", 0, 1)).contains("cooperative"));
    stub.fail("hipGetDeviceCount", 100);
    assert!(detail(&refused(&stub, "hip")).contains("HIP_VISIBLE_DEVICES"));
    stub.fail("hipGetDeviceCount", 0);
    stub.fail("hipInit", 35);
    assert!(detail(&refused(&stub, "hip")).contains("amdgpu driver"));
    stub.fail("hipInit", 0);
    assert!(stub.open().is_ok());
    assert_eq!(stub.live(), 0);
}

#[test]
fn what_a_machine_says_of_itself() {
    let stub = Stub::new();
    let hip = stub.open().unwrap();
    let info = hip.info().unwrap();
    assert_eq!(hip.platform(), Platform::Hip);
    assert_eq!((info.name.as_str(), info.model.as_str()), ("hip:1", "Stub GPU"));
    assert_eq!((info.arch.as_str(), info.multiprocessors), ("gfx942", 4));
    assert_eq!((info.shared_bytes, info.memory_bytes, info.free_bytes), (65_520, 2000, 1000));
    assert_eq!(stub.device(), 0, "the caller's device is current again");
}

#[test]
fn memory_holds_what_was_written_and_no_more() {
    let stub = Stub::new();
    let hip = stub.open().unwrap();
    // Three pieces of a copy, the last one short.
    let bytes = 2 * Runtime::STAGING.chunk_bytes + 777;
    let memory = hip.alloc(bytes).unwrap();
    let mut seen = vec![1; bytes];
    hip.read(&memory, 0, &mut seen).unwrap();
    assert!(seen.iter().all(|&byte| byte == 0));
    let wanted: Vec<u8> = (0..bytes - 10).map(|n| (n % 251) as u8).collect();
    hip.write(&memory, 5, &wanted).unwrap();
    hip.read(&memory, 0, &mut seen).unwrap();
    assert_eq!(seen[..5], [0; 5]);
    assert_eq!(seen[5..bytes - 5], wanted[..]);
    assert_eq!(seen[bytes - 5..], [0; 5]);
    hip.write(&memory, bytes, &[]).unwrap();
    for (offset, len) in [(bytes, 1), (bytes - 1, 2), (usize::MAX, 2)] {
        assert!(hip.write(&memory, offset, &vec![0; len]).is_err());
        assert!(hip.read(&memory, offset, &mut vec![0; len]).is_err());
    }
    let other = stub.open().unwrap();
    let error = other.write(&memory, 0, &[1]).unwrap_err().to_string();
    assert!(error.contains("another machine"), "{error}");
    let mut wider = memory.clone();
    wider.bytes += 512;
    assert!(hip.write(&wider, bytes, &[1]).is_err(), "a length that was made up");
    let shared = hip.alloc_shared(100).unwrap();
    assert_eq!(
        (shared.len(), shared.word64(64).load(std::sync::atomic::Ordering::SeqCst)),
        (100, 0)
    );
    drop((memory, wider, shared, hip, other));
    assert_eq!(stub.live(), 0);
}

#[test]
fn memory_that_cannot_be_had() {
    let stub = Stub::new();
    let hip = stub.open().unwrap();
    stub.fail("hipMalloc", 2);
    let error = hip.alloc(1000).err().unwrap();
    assert_eq!(error, Error::OutOfMemory { device: "hip:1".into(), wanted_bytes: 1024 });
    stub.fail("hipHostMalloc", 2);
    let error = hip.alloc_shared(1).err().unwrap();
    assert!(matches!(error, Error::OutOfMemory { wanted_bytes: 64, .. }), "{error}");
}

#[test]
fn a_compilation_is_kept() {
    let stub = Stub::new();
    let hip = stub.open().unwrap();
    let compile = |source: &Source| {
        let module = hip.compile(source).unwrap();
        let module = module.as_any().downcast_ref::<HipModule>().unwrap();
        assert_eq!(module.entries[0].facts.registers, 130);
        (module.cached, module.notes.clone())
    };
    assert_eq!(compile(&source()), (false, vec![]));
    assert_eq!(compile(&source()), (true, vec![]));
    assert_eq!(stub.calls("hiprtcCompileProgram"), 1);
    let other = Source { text: "another text".into(), ..source() };
    assert!(!compile(&other).0);
    for entry in std::fs::read_dir(stub.folder.0.join("cache")).unwrap() {
        std::fs::write(entry.unwrap().path(), b"broken").unwrap();
    }
    assert!(!compile(&source()).0, "a broken entry is compiled anew");
    stub.set("version", 60_400_000);
    let newer = stub.open().unwrap();
    newer.compile(&source()).unwrap();
    assert_eq!(stub.calls("hiprtcCompileProgram"), 4, "another ROCm compiles anew");
}

#[test]
fn a_cache_that_cannot_be_written_is_told() {
    let mut stub = Stub::new();
    let file = stub.folder.0.join("file");
    std::fs::write(&file, b"").unwrap();
    stub.paths.cache = crate::machine::cache::Cache::at(file.join("cache"));
    let module = stub.open().unwrap().compile(&source()).unwrap();
    let notes = &module.as_any().downcast_ref::<HipModule>().unwrap().notes;
    assert!(notes.len() == 1 && notes[0].contains("KIE_CACHE"), "{notes:?}");
}

#[test]
fn sources_that_do_not_compile() {
    let stub = Stub::new();
    let hip = stub.open().unwrap();
    let error = || match hip.compile(&source()).err().unwrap() {
        Error::Compile { arch, detail } => {
            assert_eq!(arch, "gfx942");
            detail
        }
        other => panic!("{other}"),
    };
    stub.fail("hiprtcCompileProgram", 6);
    assert_eq!(error(), "kie:2: error: no such thing");
    stub.fail("hiprtcCompileProgram", 5);
    assert!(error().contains("too old"));
    stub.fail("hiprtcCompileProgram", 0);
    stub.code(b"\x7fELF but not really");
    assert!(error().contains("not understood"));
    stub.code(&object::object_of_k(&[8, 8]));
    assert!(error().contains("several parameters"));
    let other = Source { entries: vec!["other"], ..source() };
    let error = hip.compile(&other).err().unwrap();
    assert!(matches!(&error, Error::Compile { detail, .. } if detail.contains("other")), "{error}");
    stub.code(&object::spilled_object_of_k(&[24], 33));
    let wide = Source { text: "wide".into(), ..source() };
    let error = hip.compile(&wide).err().unwrap().to_string();
    assert!(error.contains("33 registers of a thread of k do not fit, 32 may"), "{error}");
    let zero = Source { text: "a\0b".into(), ..source() };
    assert!(hip.compile(&zero).err().unwrap().to_string().contains("zero byte"));
    drop(hip);
    assert_eq!(stub.live(), 0);
}

#[test]
fn no_compiler() {
    let mut stub = Stub::new();
    stub.paths.compiler = vec!["libkie-no-such.so.6".into()];
    let error = stub.open().unwrap().compile(&source()).err().unwrap();
    let Error::BackendMissing { device, detail } = &error else { panic!("{error}") };
    assert_eq!(device, "hip:1");
    assert!(detail.contains("KIE_HIPRTC") && detail.contains("libkie-no-such"), "{error}");
}

/// Everything once, up to a kernel's end.
fn all_of_it(stub: &Stub) -> crate::Result<()> {
    let hip = stub.open()?;
    hip.info()?;
    let memory = hip.alloc(300)?;
    hip.write(&memory, 0, &[1, 2])?;
    hip.read(&memory, 0, &mut [0; 2])?;
    let _shared = hip.alloc_shared(100)?;
    let module = hip.compile(&source())?;
    let mut flight = hip.launch(&module, &four_blocks())?;
    assert!(flight.done()?);
    Ok(())
}

#[test]
fn every_call_may_fail() {
    // What fails after a launch loses the kernel, which keeps what it may use.
    let calls = [
        ("hipRuntimeGetVersion", true),
        ("hipInit", true),
        ("hipGetDeviceCount", true),
        ("hipGetDevice", true),
        ("hipSetDevice", true),
        ("hipDeviceGetAttribute", true),
        ("hipDeviceGetName", true),
        ("hipMemGetInfo", true),
        ("hipMalloc", true),
        ("hipHostMalloc", true),
        ("hipHostGetDevicePointer", true),
        ("hipMemcpyHtoDAsync", true),
        ("hipMemcpyDtoHAsync", true),
        ("hipMemsetD8Async", true),
        ("hipStreamCreateWithFlags", true),
        ("hipStreamSynchronize", true),
        ("hipEventCreateWithFlags", true),
        ("hipEventRecord", false),
        ("hipEventQuery", false),
        ("hipModuleLoadData", true),
        ("hipModuleGetFunction", true),
        ("hipModuleOccupancyMaxActiveBlocksPerMultiprocessor", true),
        ("hipModuleLaunchCooperativeKernel", true),
        ("hiprtcVersion", true),
        ("hiprtcCreateProgram", true),
        ("hiprtcGetCodeSize", true),
        ("hiprtcGetCode", true),
    ];
    for (call, all_freed) in calls {
        let stub = Stub::new();
        stub.fail(call, 999);
        let error = all_of_it(&stub).unwrap_err().to_string();
        let named = error.contains(call) || error.contains("999");
        assert!(named || call.ends_with("Version"), "{call}: {error}");
        assert_eq!(stub.live() == 0, all_freed, "{call}: {} left", stub.live());
        stub.fail(call, 0);
        all_of_it(&stub).unwrap();
    }
}

#[test]
fn giving_back_may_fail_in_silence() {
    for call in ["hipFree", "hipHostFree", "hipStreamDestroy", "hipEventDestroy", "hipModuleUnload"]
    {
        let stub = Stub::new();
        stub.fail(call, 709);
        all_of_it(&stub).unwrap();
        assert!(stub.calls(call) > 0, "{call}");
    }
}
