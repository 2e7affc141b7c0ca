//! The HIP runtime: loaded, new enough or refused, its errors in words with a remedy, and what it
//! does in its own way.

use std::path::Path;

use super::code_object::kernels;
use super::ffi::{device_attribute, Own};
use super::{ffi, hiprtc};
use crate::error::{Error, Result};
use crate::gpu::api::{
    first_of, told, Answer, Api, Calls, Code, Facts, Fault, Handle, KernelFacts, Ordinal, Paths,
    StagingShape, OUT_OF_MEMORY, SUCCESS,
};
use crate::gpu::rtc::{Compiled, Compiler};
use crate::kfd;
use crate::machine::library::{text_of, Library};
use crate::machine::Platform;

/// Oldest runtime, as HIP counts: the first of ROCm 6, which is the first for gfx942.
const OLDEST: i32 = 60_000_000;
/// Names of the library, newest first.
pub(super) const NAMES: [&str; 3] = ["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"];
const NO_GPU: &str =
    "use device='cpu', or see that the machine has an AMD GPU with its driver and \
                      ROCm, and that a container is given /dev/kfd and /dev/dri";

/// The runtime, ready for use.
#[derive(Debug)]
pub struct Runtime {
    calls: Calls,
    own: Own,
    /// As HIP counts, such as 60342134.
    version: i32,
}

impl Runtime {
    fn open_one(path: &Path) -> std::result::Result<Self, String> {
        let library = Library::open(path)?;
        let missing = |name| format!("has no symbol {name}; install a whole ROCm");
        let version = ffi::Version::load(&library).map_err(missing)?;
        let mut found = 0;
        // SAFETY: a live integer; the one call that needs no device.
        let code = unsafe { (version.hipRuntimeGetVersion)(&mut found) };
        if code != SUCCESS {
            return Err(format!("does not tell its version (hipRuntimeGetVersion: error {code})"));
        }
        if found < OLDEST {
            return Err(format!(
                "is of HIP {}.{}, at least {}.0 is needed: update ROCm",
                found / 10_000_000,
                found % 10_000_000 / 100_000,
                OLDEST / 10_000_000
            ));
        }
        let calls = Calls::load(&library, &ffi::NAMES).map_err(missing)?;
        Ok(Self { calls, own: Own::load(&library).map_err(missing)?, version: found })
    }
}

impl Api for Runtime {
    const PLATFORM: Platform = Platform::Hip;
    const KIND: &'static str = "hip";
    const WARP: u32 = 64;
    const HOST_FLAGS: u32 = ffi::HOST_PORTABLE_MAPPED_COHERENT;
    const STAGING: StagingShape =
        StagingShape { chunk_bytes: 4 << 20, lanes_max: 1, num_buffers: 1 };
    const PLATFORM_SHARED_BYTES: u32 = 16;
    /// No kernel of a real model's shape has more (hip/tests/kernels.rs); whose threads keep a good
    /// part of their numbers in memory was tried nowhere.
    const SPILLED_MAX: u32 = 32;
    /// The runtime may say yes, which people are told; several of these have never worked together.
    const NO_PEER: &'static str = "machines of this kind do not reach each other";

    fn open(paths: &Paths, device: &str) -> Result<Self> {
        let none = |detail: String| Error::NoDevice { device: device.into(), detail };
        let runtime = first_of(&paths.driver, Self::open_one)
            .map_err(|tried| none(format!("no usable HIP runtime ({tried}); {NO_GPU}")))?;
        // SAFETY: no flags are defined.
        match runtime.calls.init.with(|f| unsafe { f(0) }) {
            Ok(()) => Ok(runtime),
            Err(fault) => Err(none(runtime.words(fault))),
        }
    }

    fn calls(&self) -> &Calls {
        &self.calls
    }

    fn words(&self, Fault { call, code }: Fault) -> String {
        // SAFETY: takes any number; the text stands for ever.
        let name = unsafe { text_of((self.own.hipGetErrorName)(code)) };
        // SAFETY: as above.
        let sentence = unsafe { text_of((self.own.hipGetErrorString)(code)) };
        let [name, sentence] =
            [name, sentence].map(|text| text.unwrap_or_else(|| "unknown error".into()));
        format!("{call}: {name} ({code}): {sentence}{}", hint(code))
    }

    fn count(&self, device: &str) -> Result<u32> {
        let mut count = 0;
        // SAFETY: a live integer.
        match self.calls.device_count.with(|f| unsafe { f(&mut count) }) {
            Err(Fault { code: ffi::NO_DEVICE, .. }) => Ok(0),
            answer => self.check(device, answer).map(|()| count.max(0) as u32),
        }
    }

    fn find(&self, device: &str, index: u32) -> Result<Ordinal> {
        let none = |detail: String| Error::NoDevice { device: device.into(), detail };
        const HIDDEN: &str = "HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES may hide others";
        match self.count(device)? {
            0 => Err(none(format!("the runtime sees no GPU; {NO_GPU}; {HIDDEN}"))),
            count if index >= count => Err(none(format!(
                "the runtime sees {count} GPU(s), hip:0 to hip:{}; {HIDDEN}",
                count - 1
            ))),
            _ => Ok(index as Ordinal),
        }
    }

    fn arch(&self, device: &str, ordinal: Ordinal) -> Result<String> {
        let ask = |which| self.attribute(device, ordinal, which);
        let none = |detail: String| Error::NoDevice { device: device.into(), detail };
        let major = ask(device_attribute::CAPABILITY_MAJOR)?;
        let minor = ask(device_attribute::CAPABILITY_MINOR)?;
        let lanes = ask(device_attribute::WAVE_LANES)?;
        // The numbers have no stepping: of 9.4 only gfx942 was sold.
        if (major, minor, lanes) != (9, 4, 64) {
            let model = self.model(device, ordinal)?;
            return Err(none(format!(
                "{model} is of the family gfx{major}{minor}x with waves of {lanes} lanes; there \
                 are kernels for gfx942 (MI300) only; use device='cpu'"
            )));
        }
        if ask(device_attribute::COOPERATIVE_LAUNCH)? == 0 {
            return Err(none("no cooperative launch: update ROCm and the amdgpu driver".into()));
        }
        Ok("gfx942".into())
    }

    fn facts(&self, device: &str, ordinal: Ordinal, paths: &Paths) -> Result<Facts> {
        let ask = |which| self.attribute(device, ordinal, which).map(|n| n.max(0) as u32);
        let multiprocessors = ask(device_attribute::MULTIPROCESSORS)?;
        let shared_bytes = ask(device_attribute::SHARED_BYTES)?;
        let bus = self.bus(device, ordinal)?;
        let node = kfd::gpus(&paths.nodes).into_iter().find(|node| node.bus == bus);
        Ok(Facts { multiprocessors, shared_bytes, chiplets: node.map_or(1, |node| node.chiplets) })
    }

    fn enter(&self, _: Handle, ordinal: Ordinal) -> Answer<Ordinal> {
        let mut before = 0;
        // SAFETY: a live integer.
        told("hipGetDevice", unsafe { (self.own.hipGetDevice)(&mut before) })?;
        if before != ordinal {
            // SAFETY: an index below the count.
            told("hipSetDevice", unsafe { (self.own.hipSetDevice)(ordinal) })?;
        }
        Ok(before)
    }

    fn leave(&self, ordinal: Ordinal, before: Ordinal) {
        if before != ordinal {
            // SAFETY: an index that the runtime gave. Should it fail, our device stays current.
            let _ = unsafe { (self.own.hipSetDevice)(before) };
        }
    }

    fn memory(&self, _: Ordinal) -> Answer<[usize; 2]> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: two live integers.
        self.calls.memory_info.with(|f| unsafe { f(&mut free, &mut total) })?;
        Ok([free, total])
    }

    fn load(&self, image: &[u8]) -> Answer<Handle> {
        let (mut handle, image) = (0, image.as_ptr().cast());
        // SAFETY: the image is an ELF file (it was read as one), which tells its own length.
        let code = unsafe { (self.own.hipModuleLoadData)(&mut handle, image) };
        told("hipModuleLoadData", code).map(|()| handle)
    }

    /// From the code itself: the runtime tells less.
    fn kernel(&self, _: Handle, name: &str, code: &Compiled) -> Answer<Option<KernelFacts>> {
        let all = kernels(&code.code).unwrap_or_default();
        let found = all.into_iter().find(|kernel| kernel.name == name);
        Ok(found.map(|kernel| KernelFacts {
            registers: kernel.registers,
            local_bytes: kernel.private_bytes,
            spilled_registers: kernel.spilled_registers,
            shared_bytes: kernel.shared_bytes,
            threads_max: kernel.threads_max,
            args_bytes: kernel.args_bytes,
        }))
    }

    fn allow_shared(
        &self,
        _: Handle,
        facts: &KernelFacts,
        shared_bytes: u32,
        most: u32,
    ) -> std::result::Result<(), String> {
        match facts.shared_bytes.saturating_add(shared_bytes) {
            all if all > most => Err(format!(", but a block has {most}")),
            _ => Ok(()),
        }
    }

    fn compiler(&self, paths: &Paths, device: &str) -> Result<Compiler> {
        hiprtc::open(&paths.compiler, device)
    }

    /// The compiler's own version lacks the patch.
    fn code_version(&self) -> Option<i32> {
        Some(self.version)
    }
}

/// What to do about an error.
fn hint(code: Code) -> &'static str {
    match code {
        OUT_OF_MEMORY => "; the device's memory is taken: amd-smi shows by whom; or lower kv_bytes",
        ffi::NOT_INITIALIZED => {
            "; after a fork the runtime cannot be used: start processes with the spawn method"
        }
        ffi::INSUFFICIENT_DRIVER => "; the amdgpu driver is older than ROCm: update it",
        ffi::NO_DEVICE => {
            "; use device='cpu', or see that this user may open /dev/kfd (group render) and \
             HIP_VISIBLE_DEVICES does not hide the GPU"
        }
        ffi::NO_BINARY_FOR_GPU => "; the code was compiled for another architecture",
        ffi::COOPERATIVE_LAUNCH_TOO_LARGE => {
            "; not all blocks fit at once: fewer blocks, threads or bytes of shared memory"
        }
        ffi::UNKNOWN => "; amd-smi and the kernel's log (dmesg) may say more",
        code if ffi::STICKY.contains(&code) => {
            "; this process cannot use the GPU any more: restart it"
        }
        _ => "",
    }
}
