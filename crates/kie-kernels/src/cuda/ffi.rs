//! The CUDA driver and NVRTC as C sees them: types, numbers and symbols of their headers, all taken
//! from libraries found at run time.
//!
//! Handles (`CUstream`, `CUmodule`, ...) are opaque pointers; here they are numbers of that size,
//! since only the driver follows them.

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::mono::library::symbols;

/// `CUresult`.
pub(crate) type Code = c_int;
/// A pointer that only the driver follows.
pub(crate) type Handle = usize;
/// `CUdevice`.
pub(crate) type Ordinal = c_int;
/// `CUdeviceptr`.
pub(crate) type Address = u64;

/// `CUipcMemHandle`, which goes by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct IpcHandle(pub [u8; 64]);
/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
pub(crate) const IPC_ENABLE_PEER: c_uint = 1;

pub(crate) const SUCCESS: Code = 0;
pub(crate) const INVALID_VALUE: Code = 1;
pub(crate) const OUT_OF_MEMORY: Code = 2;
pub(crate) const NOT_INITIALIZED: Code = 3;
pub(crate) const DEVICE_UNAVAILABLE: Code = 46;
pub(crate) const NO_DEVICE: Code = 100;
pub(crate) const MAP_FAILED: Code = 205;
pub(crate) const NO_BINARY_FOR_GPU: Code = 209;
pub(crate) const INVALID_HANDLE: Code = 400;
pub(crate) const NOT_FOUND: Code = 500;
pub(crate) const NOT_READY: Code = 600;
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

/// `CU_STREAM_NON_BLOCKING`: no order with the null stream, whoever uses that.
pub(crate) const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_DISABLE_TIMING`.
pub(crate) const EVENT_DISABLE_TIMING: c_uint = 2;
/// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`.
pub(crate) const HOST_PORTABLE_MAPPED: c_uint = 3;

symbols! {
    /// What tells a driver's age, in every driver.
    Version {
        fn cuDriverGetVersion(*mut c_int) -> Code;
    }
}

symbols! {
    /// The driver.
    Api {
        fn cuInit(c_uint) -> Code;
        fn cuGetErrorName(Code, *mut *const c_char) -> Code;
        fn cuGetErrorString(Code, *mut *const c_char) -> Code;
        fn cuDeviceGetCount(*mut c_int) -> Code;
        fn cuDeviceGet(*mut Ordinal, c_int) -> Code;
        fn cuDeviceGetName(*mut c_char, c_int, Ordinal) -> Code;
        fn cuDeviceGetAttribute(*mut c_int, c_int, Ordinal) -> Code;
        fn cuDeviceTotalMem_v2(*mut usize, Ordinal) -> Code;
        fn cuDeviceGetPCIBusId(*mut c_char, c_int, Ordinal) -> Code;
        fn cuDeviceCanAccessPeer(*mut c_int, Ordinal, Ordinal) -> Code;
        fn cuCtxEnablePeerAccess(Handle, c_uint) -> Code;
        fn cuDevicePrimaryCtxRetain(*mut Handle, Ordinal) -> Code;
        fn cuDevicePrimaryCtxRelease_v2(Ordinal) -> Code;
        fn cuCtxPushCurrent_v2(Handle) -> Code;
        fn cuCtxPopCurrent_v2(*mut Handle) -> Code;
        fn cuMemGetInfo_v2(*mut usize, *mut usize) -> Code;
        fn cuMemAlloc_v2(*mut Address, usize) -> Code;
        fn cuMemFree_v2(Address) -> Code;
        fn cuIpcGetMemHandle(*mut IpcHandle, Address) -> Code;
        fn cuIpcOpenMemHandle_v2(*mut Address, IpcHandle, c_uint) -> Code;
        fn cuIpcCloseMemHandle(Address) -> Code;
        fn cuMemHostAlloc(*mut *mut c_void, usize, c_uint) -> Code;
        fn cuMemFreeHost(*mut c_void) -> Code;
        fn cuMemHostGetDevicePointer_v2(*mut Address, *mut c_void, c_uint) -> Code;
        fn cuMemcpyHtoDAsync_v2(Address, *const c_void, usize, Handle) -> Code;
        fn cuMemcpyDtoHAsync_v2(*mut c_void, Address, usize, Handle) -> Code;
        fn cuMemsetD8Async(Address, u8, usize, Handle) -> Code;
        fn cuStreamCreate(*mut Handle, c_uint) -> Code;
        fn cuStreamSynchronize(Handle) -> Code;
        fn cuStreamDestroy_v2(Handle) -> Code;
        fn cuEventCreate(*mut Handle, c_uint) -> Code;
        fn cuEventRecord(Handle, Handle) -> Code;
        fn cuEventQuery(Handle) -> Code;
        fn cuEventSynchronize(Handle) -> Code;
        fn cuEventDestroy_v2(Handle) -> Code;
        fn cuModuleLoadDataEx(*mut Handle, *const c_void, c_uint, *mut c_int, *mut *mut c_void)
            -> Code;
        fn cuModuleUnload(Handle) -> Code;
        fn cuModuleGetFunction(*mut Handle, Handle, *const c_char) -> Code;
        fn cuFuncGetAttribute(*mut c_int, c_int, Handle) -> Code;
        fn cuFuncSetAttribute(Handle, c_int, c_int) -> Code;
        fn cuFuncGetParamInfo(Handle, usize, *mut usize, *mut usize) -> Code;
        fn cuOccupancyMaxActiveBlocksPerMultiprocessor(*mut c_int, Handle, c_int, usize) -> Code;
        fn cuLaunchCooperativeKernel(
            Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle,
            *mut *mut c_void,
        ) -> Code;
    }
}

/// `nvrtcResult`.
pub(crate) const NVRTC_INVALID_OPTION: c_int = 5;
pub(crate) const NVRTC_COMPILATION: c_int = 6;
pub(crate) const NVRTC_BUILTINS: c_int = 7;

symbols! {
    /// The run-time compiler.
    NvrtcApi {
        fn nvrtcVersion(*mut c_int, *mut c_int) -> c_int;
        fn nvrtcGetErrorString(c_int) -> *const c_char;
        fn nvrtcCreateProgram(
            *mut Handle, *const c_char, *const c_char, c_int, *const *const c_char,
            *const *const c_char,
        ) -> c_int;
        fn nvrtcCompileProgram(Handle, c_int, *const *const c_char) -> c_int;
        fn nvrtcGetProgramLogSize(Handle, *mut usize) -> c_int;
        fn nvrtcGetProgramLog(Handle, *mut c_char) -> c_int;
        fn nvrtcGetCUBINSize(Handle, *mut usize) -> c_int;
        fn nvrtcGetCUBIN(Handle, *mut c_char) -> c_int;
        fn nvrtcDestroyProgram(*mut Handle) -> c_int;
    }
}
