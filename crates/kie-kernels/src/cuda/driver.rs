//! The driver: loaded, old enough to be refused or not, its errors in words with a remedy, and what
//! it does in its own way.

use std::ffi::{c_char, c_int};

use super::ffi::{device_attribute, function_attribute, IpcHandle, Own};
use super::{ffi, nvrtc};
use crate::error::{Error, Result};
use crate::gpu::api::{
    first_of, told, Address, Answer, Api, Calls, Code, Facts, Fault, Handle, Ipc, KernelFacts,
    Ordinal, Paths, StagingShape, OUT_OF_MEMORY, SUCCESS,
};
use crate::gpu::rtc::{Compiled, Compiler};
use crate::machine::library::{text_of, Library};
use crate::machine::Platform;

/// Oldest driver, as CUDA counts: the first that tells the size of a kernel's parameters, without
/// which a launch would read past the arguments it is given.
const OLDEST: i32 = 12_040;
/// Oldest compute capability: the first with copies that barriers of shared memory wait for.
const OLDEST_GPU: c_int = 8;
/// Names an older architecture that kernels are compiled for, so that they can be tried on a newer
/// GPU: the driver translates them.
const FORCE_ARCH: &str = "KIE_CUDA_ARCH";
/// Those that may be named, and the shared memory that a block has there (CUDA C++ Programming
/// Guide, table of technical specifications).
const FORCED: [(&str, u32); 3] = [("80", 163 << 10), ("86", 99 << 10), ("89", 99 << 10)];

fn forced_shared_bytes() -> u32 {
    let forced = std::env::var(FORCE_ARCH).unwrap_or_default();
    FORCED.iter().find(|(name, _)| *name == forced).map_or(u32::MAX, |(_, bytes)| *bytes)
}

const NO_GPU: &str = "use device='cpu', or see that the machine (or the container: --gpus all) \
                      has an NVIDIA GPU with its driver";

/// The driver, ready for use.
#[derive(Debug)]
pub struct Driver {
    calls: Calls,
    own: Own,
    /// CUDA version it speaks, such as 13000.
    version: i32,
}

impl Driver {
    fn word(
        &self,
        ask: unsafe extern "C" fn(Code, *mut *const c_char) -> Code,
        code: Code,
    ) -> String {
        let mut words = std::ptr::null();
        // SAFETY: takes any number, writes a pointer.
        let answer = unsafe { ask(code, &mut words) };
        // SAFETY: where that succeeds, null or a C string that stands for ever.
        let text = (answer == SUCCESS).then(|| unsafe { text_of(words) });
        text.flatten().unwrap_or_else(|| "unknown error".into())
    }

    /// Size of the parameters, of the first two at most.
    fn args_bytes(&self, function: Handle) -> Answer<Vec<usize>> {
        let mut sizes = Vec::new();
        for index in 0..2 {
            let (mut at, mut bytes) = (0, 0);
            // SAFETY: live integers; an index without a parameter is answered with an error.
            let code =
                unsafe { (self.own.cuFuncGetParamInfo)(function, index, &mut at, &mut bytes) };
            // Every kernel has a first one.
            if index == 0 || code != ffi::INVALID_VALUE {
                told("cuFuncGetParamInfo", code)?;
                sizes.push(bytes);
            }
        }
        Ok(sizes)
    }
}

impl Api for Driver {
    const PLATFORM: Platform = Platform::Cuda;
    const KIND: &'static str = "cuda";
    const WARP: u32 = 32;
    const HOST_FLAGS: u32 = ffi::HOST_PORTABLE_MAPPED;
    /// Four threads fill buffers at 28 GB/s on a server with one H200, eight at 39, more no faster.
    const STAGING: StagingShape =
        StagingShape { chunk_bytes: 2 << 20, lanes_max: 8, num_buffers: 2 };
    const NO_PEER: &'static str = "the driver says no: different kinds of devices, no link, or a \
                                   virtual machine that isolates them; nvidia-smi topo -p2p r \
                                   shows it";

    fn open(paths: &Paths, device: &str) -> Result<Self> {
        let none = |detail: String| Error::NoDevice { device: device.into(), detail };
        let library = first_of(&paths.driver, Library::open)
            .map_err(|why| none(format!("no CUDA driver ({why}); {NO_GPU}")))?;
        let missing = |name| {
            let file = library.path.display();
            none(format!("the CUDA driver {file} has no symbol {name}: install a whole driver"))
        };
        let version = ffi::Version::load(&library).map_err(missing)?;
        let mut found = 0;
        // SAFETY: a live integer; the one call that needs no initialisation.
        let code = unsafe { (version.cuDriverGetVersion)(&mut found) };
        if code != SUCCESS {
            return Err(none(format!("cuDriverGetVersion: error {code}; {NO_GPU}")));
        }
        if found < OLDEST {
            let cuda = |version: i32| format!("CUDA {}.{}", version / 1000, version % 1000 / 10);
            return Err(Error::DriverTooOld {
                device: device.into(),
                have: cuda(found),
                need: format!("{} (NVIDIA driver 550)", cuda(OLDEST)),
            });
        }
        let calls = Calls::load(&library, &ffi::NAMES).map_err(missing)?;
        let driver = Self { calls, own: Own::load(&library).map_err(missing)?, version: found };
        // SAFETY: no flags are defined.
        match driver.calls.init.with(|f| unsafe { f(0) }) {
            Ok(()) => Ok(driver),
            Err(fault) => Err(none(driver.words(fault))),
        }
    }

    fn calls(&self) -> &Calls {
        &self.calls
    }

    fn words(&self, Fault { call, code }: Fault) -> String {
        let name = self.word(self.own.cuGetErrorName, code);
        let sentence = self.word(self.own.cuGetErrorString, code);
        format!("{call}: {name} ({code}): {sentence}{}", hint(code))
    }

    fn count(&self, device: &str) -> Result<u32> {
        let mut count = 0;
        // SAFETY: a live integer.
        let answer = self.calls.device_count.with(|f| unsafe { f(&mut count) });
        self.check(device, answer).map(|()| count.max(0) as u32)
    }

    fn find(&self, device: &str, index: u32) -> Result<Ordinal> {
        let none = |detail: String| Error::NoDevice { device: device.into(), detail };
        let count = self.count(device)?;
        if count == 0 {
            return Err(none(format!(
                "the driver sees no GPU; {NO_GPU}; CUDA_VISIBLE_DEVICES may hide them"
            )));
        }
        if index >= count {
            return Err(none(format!(
                "the driver sees {count} GPU(s), cuda:0 to cuda:{}; CUDA_VISIBLE_DEVICES may hide \
                 others",
                count - 1
            )));
        }
        let mut ordinal = 0;
        // SAFETY: a live integer, an index below the count.
        let code = unsafe { (self.own.cuDeviceGet)(&mut ordinal, index as c_int) };
        self.check(device, told("cuDeviceGet", code)).map(|()| ordinal)
    }

    fn arch(&self, device: &str, ordinal: Ordinal) -> Result<String> {
        let ask = |which| self.attribute(device, ordinal, which);
        let none = |detail: String| Error::NoDevice { device: device.into(), detail };
        let major = ask(device_attribute::CAPABILITY_MAJOR)?;
        let minor = ask(device_attribute::CAPABILITY_MINOR)?;
        if major < OLDEST_GPU {
            let model = self.model(device, ordinal)?;
            return Err(none(format!(
                "{model} has compute capability {major}.{minor}, at least {OLDEST_GPU}.0 (Ampere) \
                 is needed; use device='cpu'"
            )));
        }
        if ask(device_attribute::COMPUTE_MODE)? == ffi::COMPUTE_PROHIBITED {
            let detail = "compute mode is Prohibited; nvidia-smi -c DEFAULT allows it";
            return Err(none(detail.into()));
        }
        let cooperative = ask(device_attribute::COOPERATIVE_LAUNCH)?;
        if cooperative == 0 || ask(device_attribute::UNIFIED_ADDRESSING)? == 0 {
            let detail = "no cooperative launch or no unified addressing (a virtual GPU?)";
            return Err(none(detail.into()));
        }
        if let Some(forced) = std::env::var_os(FORCE_ARCH).filter(|arch| !arch.is_empty()) {
            let known = forced.to_str().filter(|arch| FORCED.iter().any(|(name, _)| name == arch));
            let [(first, _), .., (last, _)] = FORCED;
            let refuse =
                || none(format!("{FORCE_ARCH} is {forced:?}, one of {first} to {last} is known"));
            return known.map(|arch| format!("compute_{arch}")).ok_or_else(refuse);
        }
        // Every family since Hopper has the variant with its own instructions.
        Ok(format!("sm_{major}{minor}{}", if major >= 9 { "a" } else { "" }))
    }

    fn facts(&self, device: &str, ordinal: Ordinal, _: &Paths) -> Result<Facts> {
        let ask = |which| self.attribute(device, ordinal, which).map(|n| n.max(0) as u32);
        Ok(Facts {
            multiprocessors: ask(device_attribute::MULTIPROCESSORS)?,
            shared_bytes: ask(device_attribute::SHARED_BYTES_OPT_IN)?.min(forced_shared_bytes()),
            chiplets: 1,
        })
    }

    fn retain(&self, device: &str, ordinal: Ordinal) -> Result<Handle> {
        let mut context = 0;
        // SAFETY: a live handle; `release` gives it back.
        let code = unsafe { (self.own.cuDevicePrimaryCtxRetain)(&mut context, ordinal) };
        let refuse = |fault| Error::NoDevice { device: device.into(), detail: self.words(fault) };
        told("cuDevicePrimaryCtxRetain", code).map_err(refuse).map(|()| context)
    }

    fn release(&self, ordinal: Ordinal) {
        // SAFETY: retained once by `retain`.
        let _ = unsafe { (self.own.cuDevicePrimaryCtxRelease_v2)(ordinal) };
    }

    fn enter(&self, owner: Handle, ordinal: Ordinal) -> Answer<Ordinal> {
        // SAFETY: the context is retained as long as it is used; `leave` takes it back.
        let code = unsafe { (self.own.cuCtxPushCurrent_v2)(owner) };
        told("cuCtxPushCurrent", code).map(|()| ordinal)
    }

    fn leave(&self, _: Ordinal, _: Ordinal) {
        let mut ours = 0;
        // SAFETY: takes back what `enter` pushed on this thread.
        let _ = unsafe { (self.own.cuCtxPopCurrent_v2)(&mut ours) };
    }

    fn memory(&self, ordinal: Ordinal) -> Answer<[usize; 2]> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: two live integers.
        self.calls.memory_info.with(|f| unsafe { f(&mut free, &mut total) })?;
        // SAFETY: a live integer.
        let code = unsafe { (self.own.cuDeviceTotalMem_v2)(&mut total, ordinal) };
        told("cuDeviceTotalMem", code).map(|()| [free, total])
    }

    fn load(&self, image: &[u8]) -> Answer<Handle> {
        let (mut handle, none) = (0, std::ptr::null_mut);
        let image = image.as_ptr().cast();
        // SAFETY: the image is an ELF file, which tells its own length; no options.
        let code =
            unsafe { (self.own.cuModuleLoadDataEx)(&mut handle, image, 0, none(), none().cast()) };
        told("cuModuleLoadDataEx", code).map(|()| handle)
    }

    fn kernel(&self, function: Handle, _: &str, _: &Compiled) -> Answer<Option<KernelFacts>> {
        let ask = |which| -> Answer<u32> {
            let mut value = 0;
            // SAFETY: a live integer and function.
            let code = unsafe { (self.own.cuFuncGetAttribute)(&mut value, which, function) };
            told("cuFuncGetAttribute", code).map(|()| value.max(0) as u32)
        };
        Ok(Some(KernelFacts {
            registers: ask(function_attribute::REGISTERS)?,
            local_bytes: ask(function_attribute::LOCAL_BYTES)?,
            spilled_registers: 0,
            shared_bytes: ask(function_attribute::SHARED_BYTES)?,
            threads_max: ask(function_attribute::THREADS_MAX)?,
            args_bytes: self.args_bytes(function)?,
        }))
    }

    fn allow_shared(
        &self,
        function: Handle,
        _: &KernelFacts,
        shared_bytes: u32,
        _: u32,
    ) -> std::result::Result<(), String> {
        let most = function_attribute::DYNAMIC_SHARED_BYTES_MAX;
        // SAFETY: a live function; the driver refuses what the device does not have.
        let code = unsafe { (self.own.cuFuncSetAttribute)(function, most, shared_bytes as c_int) };
        let answer = told("cuFuncSetAttribute", code);
        answer.map_err(|fault| format!(": {}", self.words(fault)))
    }

    fn compiler(&self, paths: &Paths, device: &str) -> Result<Compiler> {
        let newest = self.version / 1000;
        nvrtc::open_for(device, &paths.compiler, Some(newest))
    }

    fn ipc(&self) -> Option<&dyn Ipc> {
        Some(self)
    }

    fn enable_peer(&self, owner: Handle) -> Option<Answer<()>> {
        // SAFETY: a primary context, retained by the machine that named it; no flags are defined.
        let code = unsafe { (self.own.cuCtxEnablePeerAccess)(owner, 0) };
        Some(match code {
            ffi::PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            code => told("cuCtxEnablePeerAccess", code),
        })
    }
}

impl Ipc for Driver {
    fn token_bytes(&self) -> usize {
        size_of::<IpcHandle>()
    }

    fn export(&self, address: Address) -> Answer<Vec<u8>> {
        let mut handle = IpcHandle([0; 64]);
        // SAFETY: a live structure; the driver knows what is memory of this context.
        let code = unsafe { (self.own.cuIpcGetMemHandle)(&mut handle, address) };
        told("cuIpcGetMemHandle", code).map(|()| handle.0.to_vec())
    }

    fn import(&self, token: &[u8]) -> Answer<Address> {
        let mut handle = IpcHandle([0; 64]);
        handle.0.copy_from_slice(token);
        let (mut address, flags) = (0, ffi::IPC_ENABLE_PEER);
        // SAFETY: a live integer; the driver looks through whatever bytes it is given.
        let code = unsafe { (self.own.cuIpcOpenMemHandle_v2)(&mut address, handle, flags) };
        told("cuIpcOpenMemHandle", code).map(|()| address)
    }

    fn is_stale(&self, code: Code) -> bool {
        matches!(code, ffi::INVALID_VALUE | ffi::MAP_FAILED | ffi::INVALID_HANDLE)
    }

    fn close(&self, address: Address) -> Answer<()> {
        // SAFETY: opened by `import`; who opened it closes it once, when no kernel runs.
        told("cuIpcCloseMemHandle", unsafe { (self.own.cuIpcCloseMemHandle)(address) })
    }
}

/// What to do about an error.
fn hint(code: Code) -> &'static str {
    match code {
        OUT_OF_MEMORY => {
            "; the device's memory is taken: nvidia-smi shows by whom; or lower kv_bytes"
        }
        ffi::NOT_INITIALIZED => {
            "; after a fork the driver cannot be used: start processes with the spawn method"
        }
        ffi::DEVICE_UNAVAILABLE => {
            "; another process holds the GPU (compute mode Exclusive_Process) or it is being \
             reset: end that process, or nvidia-smi -c DEFAULT"
        }
        ffi::NO_DEVICE => {
            "; use device='cpu', or see that the container is given its GPUs (--gpus all) and \
             CUDA_VISIBLE_DEVICES does not hide them"
        }
        ffi::NO_BINARY_FOR_GPU => "; the code was compiled for another architecture",
        ffi::COOPERATIVE_LAUNCH_TOO_LARGE => {
            "; not all blocks fit at once: fewer blocks, threads or bytes of shared memory"
        }
        ffi::SYSTEM_NOT_READY => "; start nvidia-fabricmanager",
        ffi::SYSTEM_DRIVER_MISMATCH => {
            "; the driver's library and its kernel module differ: reboot after a driver update"
        }
        ffi::UNKNOWN => "; nvidia-smi and the kernel's log (dmesg, Xid) may say more",
        code if ffi::STICKY.contains(&code) => {
            "; this process cannot use the GPU any more: restart it"
        }
        _ => "",
    }
}
