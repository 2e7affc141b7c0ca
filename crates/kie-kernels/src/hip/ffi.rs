//! The HIP runtime and hipRTC as C sees them: types, numbers and symbols of their headers, all
//! taken from libraries found at run time.
//!
//! Handles (`hipStream_t`, `hipModule_t`, ...) are opaque pointers; here they are numbers of that
//! size, since only the runtime follows them. So are device addresses.

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::mono::library::symbols;

/// `hipError_t`.
pub(crate) type Code = c_int;
/// A pointer that only the runtime follows.
pub(crate) type Handle = usize;
/// `hipDeviceptr_t`.
pub(crate) type Address = u64;

pub(crate) const SUCCESS: Code = 0;
pub(crate) const OUT_OF_MEMORY: Code = 2;
pub(crate) const NOT_INITIALIZED: Code = 3;
pub(crate) const INSUFFICIENT_DRIVER: Code = 35;
pub(crate) const NO_DEVICE: Code = 100;
pub(crate) const NO_BINARY_FOR_GPU: Code = 209;
pub(crate) const NOT_FOUND: Code = 500;
pub(crate) const NOT_READY: Code = 600;
pub(crate) const COOPERATIVE_LAUNCH_TOO_LARGE: Code = 720;
pub(crate) const UNKNOWN: Code = 999;

/// Errors after which the process can use the device no more: faults of a kernel or of memory.
pub(crate) const STICKY: [Code; 6] = [214, 700, 702, 709, 710, 719];

/// `hipDeviceAttribute*`; the numbers are the same since ROCm 5.
pub(crate) mod device_attribute {
    use std::ffi::c_int;

    pub(crate) const COOPERATIVE_LAUNCH: c_int = 10;
    pub(crate) const CAPABILITY_MAJOR: c_int = 23;
    pub(crate) const CAPABILITY_MINOR: c_int = 61;
    pub(crate) const MULTIPROCESSORS: c_int = 63;
    pub(crate) const SHARED_BYTES: c_int = 74;
    pub(crate) const WAVE_LANES: c_int = 87;
}

/// `hipStreamNonBlocking`: no order with the null stream, whoever uses that.
pub(crate) const STREAM_NON_BLOCKING: c_uint = 1;
/// `hipEventDisableTiming`.
pub(crate) const EVENT_DISABLE_TIMING: c_uint = 2;
/// `hipHostMallocPortable | hipHostMallocMapped | hipHostMallocCoherent`: a running kernel sees
/// what the host writes, and the other way round.
pub(crate) const HOST_PORTABLE_MAPPED_COHERENT: c_uint = 0x4000_0003;

symbols! {
    /// What tells a runtime's age, in every runtime.
    Version {
        fn hipRuntimeGetVersion(*mut c_int) -> Code;
    }
}

symbols! {
    /// The runtime.
    Api {
        fn hipInit(c_uint) -> Code;
        fn hipGetErrorName(Code) -> *const c_char;
        fn hipGetErrorString(Code) -> *const c_char;
        fn hipGetDeviceCount(*mut c_int) -> Code;
        fn hipGetDevice(*mut c_int) -> Code;
        fn hipSetDevice(c_int) -> Code;
        fn hipDeviceGetName(*mut c_char, c_int, c_int) -> Code;
        fn hipDeviceGetAttribute(*mut c_int, c_int, c_int) -> Code;
        fn hipDeviceGetPCIBusId(*mut c_char, c_int, c_int) -> Code;
        fn hipDeviceCanAccessPeer(*mut c_int, c_int, c_int) -> Code;
        fn hipMemGetInfo(*mut usize, *mut usize) -> Code;
        fn hipMalloc(*mut Address, usize) -> Code;
        fn hipFree(Address) -> Code;
        fn hipHostMalloc(*mut *mut c_void, usize, c_uint) -> Code;
        fn hipHostFree(*mut c_void) -> Code;
        fn hipHostGetDevicePointer(*mut Address, *mut c_void, c_uint) -> Code;
        fn hipMemcpyHtoDAsync(Address, *const c_void, usize, Handle) -> Code;
        fn hipMemcpyDtoHAsync(*mut c_void, Address, usize, Handle) -> Code;
        fn hipMemsetD8Async(Address, u8, usize, Handle) -> Code;
        fn hipStreamCreateWithFlags(*mut Handle, c_uint) -> Code;
        fn hipStreamSynchronize(Handle) -> Code;
        fn hipStreamDestroy(Handle) -> Code;
        fn hipEventCreateWithFlags(*mut Handle, c_uint) -> Code;
        fn hipEventRecord(Handle, Handle) -> Code;
        fn hipEventQuery(Handle) -> Code;
        fn hipEventDestroy(Handle) -> Code;
        fn hipModuleLoadData(*mut Handle, *const c_void) -> Code;
        fn hipModuleUnload(Handle) -> Code;
        fn hipModuleGetFunction(*mut Handle, Handle, *const c_char) -> Code;
        fn hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(
            *mut c_int, Handle, c_int, usize,
        ) -> Code;
        fn hipModuleLaunchCooperativeKernel(
            Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle,
            *mut *mut c_void,
        ) -> Code;
    }
}

/// `hiprtcResult`.
pub(crate) const HIPRTC_INVALID_OPTION: c_int = 5;
pub(crate) const HIPRTC_COMPILATION: c_int = 6;

symbols! {
    /// The run-time compiler.
    HiprtcApi {
        fn hiprtcVersion(*mut c_int, *mut c_int) -> c_int;
        fn hiprtcGetErrorString(c_int) -> *const c_char;
        fn hiprtcCreateProgram(
            *mut Handle, *const c_char, *const c_char, c_int, *const *const c_char,
            *const *const c_char,
        ) -> c_int;
        fn hiprtcCompileProgram(Handle, c_int, *const *const c_char) -> c_int;
        fn hiprtcGetProgramLogSize(Handle, *mut usize) -> c_int;
        fn hiprtcGetProgramLog(Handle, *mut c_char) -> c_int;
        fn hiprtcGetCodeSize(Handle, *mut usize) -> c_int;
        fn hiprtcGetCode(Handle, *mut c_char) -> c_int;
        fn hiprtcDestroyProgram(*mut Handle) -> c_int;
    }
}
