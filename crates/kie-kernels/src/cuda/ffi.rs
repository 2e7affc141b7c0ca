//! The CUDA driver and NVRTC as C sees them: types, numbers and symbols of their headers, all taken
//! from libraries found at run time. What all drivers have is in [`NAMES`]; the tables here are
//! CUDA's own.

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::gpu::api::{Address, Code, Handle, Names, Ordinal};
use crate::machine::library::symbols;

/// `CUipcMemHandle`, which goes by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct IpcHandle(pub [u8; 64]);
/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
pub(crate) const IPC_ENABLE_PEER: c_uint = 1;

pub(crate) const INVALID_VALUE: Code = 1;
pub(crate) const NOT_INITIALIZED: Code = 3;
pub(crate) const DEVICE_UNAVAILABLE: Code = 46;
pub(crate) const NO_DEVICE: Code = 100;
pub(crate) const MAP_FAILED: Code = 205;
pub(crate) const NO_BINARY_FOR_GPU: Code = 209;
pub(crate) const INVALID_HANDLE: Code = 400;
pub(crate) const PEER_ACCESS_ALREADY_ENABLED: Code = 704;
pub(crate) const COOPERATIVE_LAUNCH_TOO_LARGE: Code = 720;
pub(crate) const SYSTEM_NOT_READY: Code = 802;
pub(crate) const SYSTEM_DRIVER_MISMATCH: Code = 803;
pub(crate) const UNKNOWN: Code = 999;

/// Errors after which the context answers nothing else: faults of a kernel, of memory, of a link.
pub(crate) const STICKY: [Code; 13] =
    [214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721];

/// `CU_DEVICE_ATTRIBUTE_*`.
pub(crate) mod device_attribute {
    use std::ffi::c_int;

    pub(crate) const MULTIPROCESSORS: c_int = 16;
    pub(crate) const COMPUTE_MODE: c_int = 20;
    pub(crate) const UNIFIED_ADDRESSING: c_int = 41;
    pub(crate) const CAPABILITY_MAJOR: c_int = 75;
    pub(crate) const CAPABILITY_MINOR: c_int = 76;
    pub(crate) const COOPERATIVE_LAUNCH: c_int = 95;
    pub(crate) const SHARED_BYTES_OPT_IN: c_int = 97;
}
/// `CU_COMPUTEMODE_PROHIBITED`.
pub(crate) const COMPUTE_PROHIBITED: c_int = 2;

/// `CU_FUNC_ATTRIBUTE_*`.
pub(crate) mod function_attribute {
    use std::ffi::c_int;

    pub(crate) const THREADS_MAX: c_int = 0;
    pub(crate) const SHARED_BYTES: c_int = 1;
    pub(crate) const LOCAL_BYTES: c_int = 3;
    pub(crate) const REGISTERS: c_int = 4;
    pub(crate) const DYNAMIC_SHARED_BYTES_MAX: c_int = 8;
}

/// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`.
pub(crate) const HOST_PORTABLE_MAPPED: c_uint = 3;

symbols! {
    /// What tells a driver's age, in every driver.
    Version {
        fn cuDriverGetVersion(*mut c_int) -> Code;
    }
}

/// What all drivers have, by its names here.
pub(crate) const NAMES: Names = Names {
    init: "cuInit",
    device_count: "cuDeviceGetCount",
    device_name: "cuDeviceGetName",
    device_attribute: "cuDeviceGetAttribute",
    device_bus: "cuDeviceGetPCIBusId",
    can_access_peer: "cuDeviceCanAccessPeer",
    memory_info: "cuMemGetInfo_v2",
    alloc: "cuMemAlloc_v2",
    free: "cuMemFree_v2",
    alloc_host: "cuMemHostAlloc",
    free_host: "cuMemFreeHost",
    host_address: "cuMemHostGetDevicePointer_v2",
    copy_in: "cuMemcpyHtoDAsync_v2",
    copy_out: "cuMemcpyDtoHAsync_v2",
    fill: "cuMemsetD8Async",
    stream: "cuStreamCreate",
    wait_stream: "cuStreamSynchronize",
    free_stream: "cuStreamDestroy_v2",
    event: "cuEventCreate",
    record_event: "cuEventRecord",
    query_event: "cuEventQuery",
    wait_event: "cuEventSynchronize",
    free_event: "cuEventDestroy_v2",
    unload: "cuModuleUnload",
    function: "cuModuleGetFunction",
    occupancy: "cuOccupancyMaxActiveBlocksPerMultiprocessor",
    launch: "cuLaunchCooperativeKernel",
};

symbols! {
    /// What no other driver has, or not with these parameters.
    Own {
        fn cuGetErrorName(Code, *mut *const c_char) -> Code;
        fn cuGetErrorString(Code, *mut *const c_char) -> Code;
        fn cuDeviceGet(*mut Ordinal, c_int) -> Code;
        fn cuDeviceTotalMem_v2(*mut usize, Ordinal) -> Code;
        fn cuCtxEnablePeerAccess(Handle, c_uint) -> Code;
        fn cuDevicePrimaryCtxRetain(*mut Handle, Ordinal) -> Code;
        fn cuDevicePrimaryCtxRelease_v2(Ordinal) -> Code;
        fn cuCtxPushCurrent_v2(Handle) -> Code;
        fn cuCtxPopCurrent_v2(*mut Handle) -> Code;
        fn cuIpcGetMemHandle(*mut IpcHandle, Address) -> Code;
        fn cuIpcOpenMemHandle_v2(*mut Address, IpcHandle, c_uint) -> Code;
        fn cuIpcCloseMemHandle(Address) -> Code;
        fn cuModuleLoadDataEx(*mut Handle, *const c_void, c_uint, *mut c_int, *mut *mut c_void)
            -> Code;
        fn cuFuncGetAttribute(*mut c_int, c_int, Handle) -> Code;
        fn cuFuncSetAttribute(Handle, c_int, c_int) -> Code;
        fn cuFuncGetParamInfo(Handle, usize, *mut usize, *mut usize) -> Code;
    }
}

/// `nvrtcResult`.
pub(crate) const NVRTC_INVALID_OPTION: c_int = 5;
pub(crate) const NVRTC_BUILTINS: c_int = 7;
