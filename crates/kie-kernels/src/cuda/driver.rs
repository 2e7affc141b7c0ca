//! The driver: loaded, old enough to be refused or not, and its errors in words with a remedy.

use std::ffi::{c_char, c_int, CStr};
use std::path::Path;

use super::ffi::{self, device_attribute, Api, Code, Ordinal};
use crate::error::{Error, Result};
use crate::mono::library::Library;

/// Oldest driver, as CUDA counts: the first that tells the size of a kernel's parameters, without
/// which a launch would read past the arguments it is given.
const OLDEST: i32 = 12_040;
const NO_GPU: &str = "use device='cpu', or see that the machine (or the container: --gpus all) \
                      has an NVIDIA GPU with its driver";

/// The driver, ready for use.
#[derive(Debug)]
pub(super) struct Driver {
    pub api: Api,
    /// CUDA version it speaks, such as 13000.
    pub version: i32,
}

impl Driver {
    /// Loads and initialises it. `device` is for messages.
    pub fn open(path: &Path, device: &str) -> Result<Self> {
        let none = |detail: String| Error::NoDevice { device: device.into(), detail };
        let library =
            Library::open(path).map_err(|why| none(format!("no CUDA driver ({why}); {NO_GPU}")))?;
        let missing = |name| {
            let file = library.path.display();
            none(format!("the CUDA driver {file} has no symbol {name}: install a whole driver"))
        };
        let version = ffi::Version::load(&library).map_err(missing)?;
        let mut found = 0;
        // SAFETY: a live integer; the one call that needs no initialisation.
        let code = unsafe { (version.cuDriverGetVersion)(&mut found) };
        if code != ffi::SUCCESS {
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
        let driver = Self { api: Api::load(&library).map_err(missing)?, version: found };
        // SAFETY: no flags are defined.
        match unsafe { (driver.api.cuInit)(0) } {
            ffi::SUCCESS => Ok(driver),
            code => Err(none(driver.words("cuInit", code))),
        }
    }

    /// How many devices there are.
    pub fn count(&self, device: &str) -> Result<u32> {
        let mut count = 0;
        // SAFETY: a live integer.
        let code = unsafe { (self.api.cuDeviceGetCount)(&mut count) };
        self.check(device, "cuDeviceGetCount", code)?;
        Ok(count.max(0) as u32)
    }

    /// The device of this number; `device` is its name.
    pub fn device(&self, device: &str, index: u32) -> Result<Ordinal> {
        let none = |detail: String| Error::NoDevice { device: device.into(), detail };
        let count = self.count(device)?;
        if count == 0 {
            return Err(none(format!(
                "the driver sees no GPU; {NO_GPU}; CUDA_VISIBLE_DEVICES \
                                     may hide them"
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
        let code = unsafe { (self.api.cuDeviceGet)(&mut ordinal, index as c_int) };
        self.check(device, "cuDeviceGet", code)?;
        Ok(ordinal)
    }

    /// A `CU_DEVICE_ATTRIBUTE_*`.
    pub fn attribute(&self, device: &str, ordinal: Ordinal, which: c_int) -> Result<i32> {
        let mut value = 0;
        // SAFETY: a live integer; an attribute that is not known is answered with an error.
        let code = unsafe { (self.api.cuDeviceGetAttribute)(&mut value, which, ordinal) };
        self.check(device, "cuDeviceGetAttribute", code)?;
        Ok(value)
    }

    /// Architecture to compile for.
    ///
    /// # Errors
    /// [`Error::NoDevice`] where kie has no kernels for the device, or it cannot run them.
    pub fn arch(&self, device: &str, ordinal: Ordinal) -> Result<String> {
        let ask = |which| self.attribute(device, ordinal, which);
        let none = |detail: String| Error::NoDevice { device: device.into(), detail };
        let major = ask(device_attribute::CAPABILITY_MAJOR)?;
        let minor = ask(device_attribute::CAPABILITY_MINOR)?;
        if major < 9 {
            let model = self.model(device, ordinal)?;
            return Err(none(format!(
                "{model} has compute capability {major}.{minor}, at least 9.0 (Hopper) is needed; \
                 use device='cpu'"
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
        // Every family since Hopper has the variant with its own instructions.
        Ok(format!("sm_{major}{minor}a"))
    }

    /// What a person calls the device.
    pub fn model(&self, device: &str, ordinal: Ordinal) -> Result<String> {
        let mut name = [0 as c_char; 256];
        // SAFETY: the length is that of the buffer less a closing zero.
        let code = unsafe { (self.api.cuDeviceGetName)(name.as_mut_ptr(), 255, ordinal) };
        self.check(device, "cuDeviceGetName", code)?;
        // SAFETY: the last byte is zero.
        Ok(unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
    }

    /// [`Error::Failed`] unless `code` is success.
    pub fn check(&self, device: &str, call: &str, code: Code) -> Result<()> {
        match code {
            ffi::SUCCESS => Ok(()),
            _ => Err(Error::Failed(format!("{device}: {}", self.words(call, code)))),
        }
    }

    /// The same for a call that takes memory.
    pub fn check_memory(&self, device: &str, call: &str, code: Code, bytes: usize) -> Result<()> {
        if code == ffi::OUT_OF_MEMORY {
            return Err(Error::OutOfMemory { device: device.into(), wanted_bytes: bytes as u64 });
        }
        self.check(device, call, code)
    }

    /// An error in words: the call, the driver's name and sentence, what to do.
    pub fn words(&self, call: &str, code: Code) -> String {
        let name = self.word(self.api.cuGetErrorName, code);
        let sentence = self.word(self.api.cuGetErrorString, code);
        format!("{call}: {name} ({code}): {sentence}{}", hint(code))
    }

    fn word(
        &self,
        ask: unsafe extern "C" fn(Code, *mut *const c_char) -> Code,
        code: Code,
    ) -> String {
        let mut words = std::ptr::null();
        // SAFETY: takes any number, writes a pointer.
        let answer = unsafe { ask(code, &mut words) };
        if answer != ffi::SUCCESS || words.is_null() {
            return "unknown error".into();
        }
        // SAFETY: success and not null: a C string that stands for ever.
        unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned()
    }
}

/// What to do about an error.
fn hint(code: Code) -> &'static str {
    match code {
        ffi::OUT_OF_MEMORY => {
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

/// The index in `cuda` (0) or `cuda:N`.
///
/// # Errors
/// [`Error::NoDevice`] for every other name.
pub(super) fn index_of(name: &str) -> Result<u32> {
    let index = match name.strip_prefix("cuda") {
        Some("") => Some(0),
        Some(rest) => rest.strip_prefix(':').and_then(|number| {
            let plain = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
            plain.then(|| number.parse().ok()).flatten()
        }),
        None => None,
    };
    index.ok_or_else(|| Error::NoDevice {
        device: name.into(),
        detail: "one GPU is written cuda or cuda:N, N from 0".into(),
    })
}
