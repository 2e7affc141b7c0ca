//! The HIP runtime: loaded, new enough or refused, and its errors in words with a remedy.

use std::ffi::{c_char, c_int, CStr};
use std::path::{Path, PathBuf};

use super::ffi::{self, device_attribute, Api, Code};
use crate::error::{Error, Result};
use crate::mono::library::Library;

/// Oldest runtime, as HIP counts: the first of ROCm 6, which is the first for gfx942.
const OLDEST: i32 = 60_000_000;
/// Names of the library, newest first.
const NAMES: [&str; 3] = ["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"];
const NO_GPU: &str =
    "use device='cpu', or see that the machine has an AMD GPU with its driver and \
                      ROCm, and that a container is given /dev/kfd and /dev/dri";

/// The runtime, ready for use.
#[derive(Debug)]
pub(super) struct Runtime {
    pub api: Api,
    /// As HIP counts, such as 60342134.
    pub version: i32,
}

/// Where a library of ROCm may be: by name, then in its folders.
pub(super) fn candidates(names: &[&str]) -> Vec<PathBuf> {
    let homes = ["ROCM_PATH", "HIP_PATH"].iter().filter_map(std::env::var_os);
    let homes = homes.filter(|home| !home.is_empty()).map(PathBuf::from);
    let files = homes
        .chain([PathBuf::from("/opt/rocm")])
        .flat_map(|home| names.iter().map(move |name| home.join("lib").join(name)))
        .filter(|file| file.is_file());
    names.iter().map(PathBuf::from).chain(files).collect()
}

/// Where the runtime may be.
pub(super) fn runtime_candidates() -> Vec<PathBuf> {
    candidates(&NAMES)
}

/// The first of `paths` that `open` takes, or what was wrong with each of them.
pub(super) fn first_of<T>(
    paths: &[PathBuf],
    open: impl Fn(&Path) -> std::result::Result<T, String>,
) -> std::result::Result<T, String> {
    let mut tried = Vec::new();
    for path in paths {
        match open(path) {
            Ok(found) => return Ok(found),
            Err(why) if why.contains(&*path.to_string_lossy()) => tried.push(why),
            Err(why) => tried.push(format!("{}: {why}", path.display())),
        }
    }
    Err(if tried.is_empty() { "nowhere to look".into() } else { tried.join("; ") })
}

impl Runtime {
    /// Loads and initialises it. `device` is for messages.
    pub fn open(paths: &[PathBuf], device: &str) -> Result<Self> {
        let none = |detail: String| Error::NoDevice { device: device.into(), detail };
        let runtime = first_of(paths, Self::open_one)
            .map_err(|tried| none(format!("no usable HIP runtime ({tried}); {NO_GPU}")))?;
        // SAFETY: no flags are defined.
        match unsafe { (runtime.api.hipInit)(0) } {
            ffi::SUCCESS => Ok(runtime),
            code => Err(none(runtime.words("hipInit", code))),
        }
    }

    fn open_one(path: &Path) -> std::result::Result<Self, String> {
        let library = Library::open(path)?;
        let missing = |name| format!("has no symbol {name}; install a whole ROCm");
        let version = ffi::Version::load(&library).map_err(missing)?;
        let mut found = 0;
        // SAFETY: a live integer; the one call that needs no device.
        let code = unsafe { (version.hipRuntimeGetVersion)(&mut found) };
        if code != ffi::SUCCESS {
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
        Ok(Self { api: Api::load(&library).map_err(missing)?, version: found })
    }

    /// How many devices there are.
    pub fn count(&self, device: &str) -> Result<u32> {
        let mut count = 0;
        // SAFETY: a live integer.
        match unsafe { (self.api.hipGetDeviceCount)(&mut count) } {
            ffi::NO_DEVICE => Ok(0),
            code => self.check(device, "hipGetDeviceCount", code).map(|()| count.max(0) as u32),
        }
    }

    /// Refuses an index that the runtime does not know.
    pub fn find(&self, device: &str, index: u32) -> Result<c_int> {
        let none = |detail: String| Error::NoDevice { device: device.into(), detail };
        const HIDDEN: &str = "HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES may hide others";
        match self.count(device)? {
            0 => Err(none(format!("the runtime sees no GPU; {NO_GPU}; {HIDDEN}"))),
            count if index >= count => Err(none(format!(
                "the runtime sees {count} GPU(s), hip:0 to hip:{}; {HIDDEN}",
                count - 1
            ))),
            _ => Ok(index as c_int),
        }
    }

    /// A `hipDeviceAttribute*`.
    pub fn attribute(&self, device: &str, ordinal: c_int, which: c_int) -> Result<i32> {
        let mut value = 0;
        // SAFETY: a live integer; an attribute that is not known is answered with an error.
        let code = unsafe { (self.api.hipDeviceGetAttribute)(&mut value, which, ordinal) };
        self.check(device, "hipDeviceGetAttribute", code)?;
        Ok(value)
    }

    /// Architecture to compile for.
    ///
    /// # Errors
    /// [`Error::NoDevice`] where kie has no kernels for the device, or it cannot run them.
    pub fn arch(&self, device: &str, ordinal: c_int) -> Result<String> {
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

    /// What a person calls the device.
    pub fn model(&self, device: &str, ordinal: c_int) -> Result<String> {
        let mut name = [0 as c_char; 256];
        // SAFETY: the length is that of the buffer less a closing zero.
        let code = unsafe { (self.api.hipDeviceGetName)(name.as_mut_ptr(), 255, ordinal) };
        self.check(device, "hipDeviceGetName", code)?;
        // SAFETY: the last byte is zero.
        Ok(unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
    }

    /// PCI address of the device, such as `0000:0c:00.0`.
    pub fn bus(&self, device: &str, ordinal: c_int) -> Result<String> {
        let mut text = [0 as c_char; 32];
        // SAFETY: the length is that of the buffer less a closing zero.
        let code = unsafe { (self.api.hipDeviceGetPCIBusId)(text.as_mut_ptr(), 31, ordinal) };
        self.check(device, "hipDeviceGetPCIBusId", code)?;
        // SAFETY: the last byte is zero.
        Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().to_lowercase())
    }

    /// Whether kernels of one device may reach the other's memory.
    pub fn reaches(&self, device: &str, from: c_int, to: c_int) -> Result<bool> {
        let mut can = 0;
        // SAFETY: a live integer; the runtime knows which numbers are devices.
        let code = unsafe { (self.api.hipDeviceCanAccessPeer)(&mut can, from, to) };
        self.check(device, "hipDeviceCanAccessPeer", code)?;
        Ok(can != 0)
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

    /// An error in words: the call, the runtime's name and sentence, what to do.
    pub fn words(&self, call: &str, code: Code) -> String {
        // SAFETY: takes any number.
        let name = word(unsafe { (self.api.hipGetErrorName)(code) });
        // SAFETY: takes any number.
        let sentence = word(unsafe { (self.api.hipGetErrorString)(code) });
        format!("{call}: {name} ({code}): {sentence}{}", hint(code))
    }
}

fn word(words: *const c_char) -> String {
    if words.is_null() {
        return "unknown error".into();
    }
    // SAFETY: not null: a C string that stands for ever.
    unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned()
}

/// What to do about an error.
fn hint(code: Code) -> &'static str {
    match code {
        ffi::OUT_OF_MEMORY => {
            "; the device's memory is taken: amd-smi shows by whom; or lower kv_bytes"
        }
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

/// The index in `hip` (0) or `hip:N`.
///
/// # Errors
/// [`Error::NoDevice`] for every other name.
pub(super) fn index_of(name: &str) -> Result<u32> {
    let index = match name.strip_prefix("hip") {
        Some("") => Some(0),
        Some(rest) => rest.strip_prefix(':').and_then(|number| {
            let plain = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
            plain.then(|| number.parse().ok()).flatten()
        }),
        None => None,
    };
    index.ok_or_else(|| Error::NoDevice {
        device: name.into(),
        detail: "one GPU is written hip or hip:N, N from 0".into(),
    })
}
