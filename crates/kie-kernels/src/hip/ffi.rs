//! The HIP runtime and hipRTC as C sees them: types, numbers and symbols of their headers, all
//! taken from libraries found at run time. What all drivers have is in [`NAMES`]; the tables here
//! are HIP's own.

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::gpu::api::{Code, Handle, Names};
use crate::machine::library::symbols;

pub(crate) const NOT_INITIALIZED: Code = 3;
pub(crate) const INSUFFICIENT_DRIVER: Code = 35;
pub(crate) const NO_DEVICE: Code = 100;
pub(crate) const NO_BINARY_FOR_GPU: Code = 209;
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

/// `hipHostMallocPortable | hipHostMallocMapped | hipHostMallocCoherent`: a running kernel sees
/// what the host writes, and the other way round.
pub(crate) const HOST_PORTABLE_MAPPED_COHERENT: c_uint = 0x4000_0003;

symbols! {
    /// What tells a runtime's age, in every runtime.
    Version {
        fn hipRuntimeGetVersion(*mut c_int) -> Code;
    }
}

/// What all drivers have, by its names here.
pub(crate) const NAMES: Names = Names {
    init: "hipInit",
    device_count: "hipGetDeviceCount",
    device_name: "hipDeviceGetName",
    device_attribute: "hipDeviceGetAttribute",
    device_bus: "hipDeviceGetPCIBusId",
    can_access_peer: "hipDeviceCanAccessPeer",
    memory_info: "hipMemGetInfo",
    alloc: "hipMalloc",
    free: "hipFree",
    alloc_host: "hipHostMalloc",
    free_host: "hipHostFree",
    host_address: "hipHostGetDevicePointer",
    copy_in: "hipMemcpyHtoDAsync",
    copy_out: "hipMemcpyDtoHAsync",
    fill: "hipMemsetD8Async",
    stream: "hipStreamCreateWithFlags",
    wait_stream: "hipStreamSynchronize",
    free_stream: "hipStreamDestroy",
    event: "hipEventCreateWithFlags",
    record_event: "hipEventRecord",
    query_event: "hipEventQuery",
    wait_event: "hipEventSynchronize",
    free_event: "hipEventDestroy",
    unload: "hipModuleUnload",
    function: "hipModuleGetFunction",
    occupancy: "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor",
    launch: "hipModuleLaunchCooperativeKernel",
};

symbols! {
    /// What no other driver has, or not with these parameters.
    Own {
        fn hipGetErrorName(Code) -> *const c_char;
        fn hipGetErrorString(Code) -> *const c_char;
        fn hipGetDevice(*mut c_int) -> Code;
        fn hipSetDevice(c_int) -> Code;
        fn hipModuleLoadData(*mut Handle, *const c_void) -> Code;
    }
}

/// `hiprtcResult`.
pub(crate) const HIPRTC_INVALID_OPTION: c_int = 5;
