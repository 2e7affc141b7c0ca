//! What drivers of GPUs have in common, and what each says for itself.
//!
//! Handles (streams, modules, ...) are opaque pointers; here they are numbers of that size, since
//! only the driver follows them.

use std::ffi::{c_char, c_int, c_uint, c_void, CStr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::rtc::{Compiled, Compiler};
use crate::error::{Error, Result};
use crate::machine::cache::Cache;
use crate::machine::library::Library;
use crate::machine::Platform;

/// What a call of a driver gives: `CUresult`, `hipError_t`.
pub type Code = c_int;
/// A pointer that only the driver follows.
pub type Handle = usize;
/// The driver's number of a device.
pub type Ordinal = c_int;
/// An address in a device's space.
pub type Address = u64;

/// The call did what it should.
pub const SUCCESS: Code = 0;
/// There is no such memory.
pub const OUT_OF_MEMORY: Code = 2;
/// Of a name: the module has no function of it.
pub const NOT_FOUND: Code = 500;
/// Of an event: what it marks has not ended.
pub const NOT_READY: Code = 600;

/// A stream that has no order with the null stream, whoever uses that.
pub const STREAM_NON_BLOCKING: c_uint = 1;
/// An event that takes no time.
pub const EVENT_DISABLE_TIMING: c_uint = 2;

/// A call that did not do what it should.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// Its name.
    pub call: &'static str,
    /// What it gave.
    pub code: Code,
}

/// What a call gives, with its name where it failed.
pub type Answer<T> = std::result::Result<T, Fault>;

/// What a call gave.
///
/// # Errors
/// With its name, if it failed.
pub fn told(call: &'static str, code: Code) -> Answer<()> {
    match code {
        SUCCESS => Ok(()),
        code => Err(Fault { call, code }),
    }
}

/// A function of a driver.
#[derive(Debug, Clone, Copy)]
pub struct Call<F> {
    /// As messages have it: without the suffix of its version.
    name: &'static str,
    at: F,
}

impl<F: Copy> Call<F> {
    /// Calls it.
    ///
    /// # Errors
    /// With its name, if it fails.
    pub fn with(&self, go: impl FnOnce(F) -> Code) -> Answer<()> {
        told(self.name, go(self.at))
    }
}

/// The functions of a driver that have the same parameters in all drivers, and their names in one.
macro_rules! calls {
    ($($(#[$doc:meta])* $name:ident($($arg:ty),* $(,)?);)*) => {
        /// Functions that every driver has, with the same parameters.
        #[derive(Debug)]
        pub struct Calls {
            $($(#[$doc])* pub $name: Call<unsafe extern "C" fn($($arg),*) -> Code>,)*
        }

        /// What one driver calls them.
        #[derive(Debug)]
        pub struct Names {
            $($(#[$doc])* pub $name: &'static str,)*
        }

        impl Calls {
            /// All of them, or the name of the first that the library lacks.
            pub(crate) fn load(
                library: &Library,
                names: &Names,
            ) -> std::result::Result<Self, &'static str> {
                Ok(Self {
                    $($name: {
                        let at = library.symbol(names.$name).ok_or(names.$name)?;
                        // SAFETY: the vendor's symbol of this name has this signature, and the
                        // library is never closed.
                        let at = unsafe {
                            std::mem::transmute::<
                                std::ptr::NonNull<c_void>,
                                unsafe extern "C" fn($($arg),*) -> Code,
                            >(at)
                        };
                        Call { name: names.$name.trim_end_matches("_v2"), at }
                    },)*
                })
            }
        }
    };
}

calls! {
    /// Readies the driver; no flags are defined.
    init(c_uint);
    /// How many devices there are.
    device_count(*mut c_int);
    /// What a person calls a device.
    device_name(*mut c_char, c_int, Ordinal);
    /// A property, by its number.
    device_attribute(*mut c_int, c_int, Ordinal);
    /// Its address on the bus.
    device_bus(*mut c_char, c_int, Ordinal);
    /// Whether one device may reach another's memory.
    can_access_peer(*mut c_int, Ordinal, Ordinal);
    /// Bytes that are free, and all.
    memory_info(*mut usize, *mut usize);
    /// Device memory.
    alloc(*mut Address, usize);
    /// Gives it back.
    free(Address);
    /// Pinned host memory.
    alloc_host(*mut *mut c_void, usize, c_uint);
    /// Gives it back.
    free_host(*mut c_void);
    /// Where the device sees pinned memory; no flags are defined.
    host_address(*mut Address, *mut c_void, c_uint);
    /// Copies to the device, in a stream.
    copy_in(Address, *const c_void, usize, Handle);
    /// Copies from it.
    copy_out(*mut c_void, Address, usize, Handle);
    /// Sets so many bytes.
    fill(Address, u8, usize, Handle);
    /// A stream, with flags.
    stream(*mut Handle, c_uint);
    /// Waits until all in it has ended.
    wait_stream(Handle);
    /// Gives it back.
    free_stream(Handle);
    /// An event, with flags.
    event(*mut Handle, c_uint);
    /// Marks the end of what is in a stream now.
    record_event(Handle, Handle);
    /// Whether that has ended.
    query_event(Handle);
    /// Waits until it has.
    wait_event(Handle);
    /// Gives it back.
    free_event(Handle);
    /// Unloads a module.
    unload(Handle);
    /// A function of a module by its name.
    function(*mut Handle, Handle, *const c_char);
    /// How many of a function's blocks of so many threads, and bytes of shared memory each, fit on
    /// one multiprocessor.
    occupancy(*mut c_int, Handle, c_int, usize);
    /// Launches a grid, all of whose blocks are resident at once.
    launch(
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void,
    );
}

/// Where things are, apart so that tests can put others in their place.
#[derive(Debug, Clone)]
pub struct Paths {
    /// The driver, in the order in which files are tried.
    pub driver: Vec<PathBuf>,
    /// The run-time compiler, likewise.
    pub compiler: Vec<PathBuf>,
    /// Where compiled kernels are kept.
    pub cache: Cache,
    /// What Linux tells of AMD's GPUs.
    pub nodes: PathBuf,
    /// How long the drop of a flight waits for its end.
    pub patience: Duration,
}

/// What a device has.
#[derive(Debug, Clone, Copy)]
pub struct Facts {
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Most shared memory of a block, in bytes.
    pub shared_bytes: u32,
    /// Dies among which the grid's blocks are dealt out.
    pub chiplets: u32,
}

/// What is known of one kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelFacts {
    /// Registers of a thread.
    pub registers: u32,
    /// Local memory of a thread, in bytes: arrays and registers that did not fit.
    pub local_bytes: u32,
    /// Registers that did not fit, where the code says it.
    pub spilled_registers: u32,
    /// Shared memory of a block besides what a launch asks for, in bytes.
    pub shared_bytes: u32,
    /// Most threads of a block.
    pub threads_max: u32,
    /// Bytes of its parameters; of more than two those of the first two.
    pub args_bytes: Vec<usize>,
}

/// How copies go through pinned memory.
#[derive(Debug, Clone, Copy)]
pub struct StagingShape {
    /// Bytes of one buffer.
    pub chunk_bytes: usize,
    /// Most threads that fill buffers.
    pub lanes_max: usize,
    /// Buffers that each of them fills in rotation.
    pub num_buffers: usize,
}

/// Memory of one process that another opens.
pub trait Ipc {
    /// Bytes of what the other process is handed.
    fn token_bytes(&self) -> usize;
    /// The token of an allocation, which begins at `address`.
    ///
    /// # Errors
    /// Where no other process can open it.
    fn export(&self, address: Address) -> Answer<Vec<u8>>;
    /// Opens another process's memory by its token.
    ///
    /// # Errors
    /// What the driver says.
    fn import(&self, token: &[u8]) -> Answer<Address>;
    /// Whether [`Ipc::import`] failed since the memory is no more.
    fn is_stale(&self, code: Code) -> bool;
    /// Closes what was opened.
    ///
    /// # Errors
    /// What the driver says.
    fn close(&self, address: Address) -> Answer<()>;
}

/// A driver, ready for use: its functions, and all in which it differs from the others.
pub trait Api: Sized + Send + Sync + 'static {
    /// Whose kernels it runs.
    const PLATFORM: Platform;
    /// What names of its devices begin with.
    const KIND: &'static str;
    /// Threads that run in step.
    const WARP: u32;
    /// Flags of pinned memory that every device of the process reaches while kernels run.
    const HOST_FLAGS: c_uint;
    /// How copies go.
    const STAGING: StagingShape;
    /// Shared memory of a block that the platform's header keeps for itself, in bytes.
    const PLATFORM_SHARED_BYTES: u32 = 0;
    /// Most registers of a kernel's thread that do not fit, where the code says how many.
    const SPILLED_MAX: u32 = u32::MAX;
    /// Why devices do not reach each other's memory, and how to see it.
    const NO_PEER: &'static str;

    /// Loads and readies it. `device` is for messages.
    ///
    /// # Errors
    /// [`Error::NoDevice`] with what is missing, [`Error::DriverTooOld`].
    fn open(paths: &Paths, device: &str) -> Result<Self>;

    /// Its functions.
    fn calls(&self) -> &Calls;

    /// A failed call in words: its name, the driver's name and sentence for it, what to do.
    fn words(&self, fault: Fault) -> String;

    /// How many devices there are.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn count(&self, device: &str) -> Result<u32>;

    /// The device of this number; `device` is its name.
    ///
    /// # Errors
    /// [`Error::NoDevice`] where there are fewer.
    fn find(&self, device: &str, index: u32) -> Result<Ordinal>;

    /// Architecture to compile for.
    ///
    /// # Errors
    /// [`Error::NoDevice`] where kie has no kernels for the device, or it cannot run them.
    fn arch(&self, device: &str, ordinal: Ordinal) -> Result<String>;

    /// What the device has.
    ///
    /// # Errors
    /// [`Error::Failed`] if the driver does not answer.
    fn facts(&self, device: &str, ordinal: Ordinal, paths: &Paths) -> Result<Facts>;

    /// Takes what owns the device's memory; [`Api::release`] gives it back.
    ///
    /// # Errors
    /// [`Error::NoDevice`] where the driver refuses.
    fn retain(&self, device: &str, ordinal: Ordinal) -> Result<Handle> {
        let _ = (device, ordinal);
        Ok(0)
    }

    /// Gives back what [`Api::retain`] took.
    fn release(&self, ordinal: Ordinal) {
        let _ = ordinal;
    }

    /// Makes the device this thread's current one; gives which was so before.
    ///
    /// # Errors
    /// What the driver says.
    fn enter(&self, owner: Handle, ordinal: Ordinal) -> Answer<Ordinal>;

    /// Takes back what [`Api::enter`] did, which gave `before`.
    fn leave(&self, ordinal: Ordinal, before: Ordinal);

    /// Bytes of the current device that are free, and all.
    ///
    /// # Errors
    /// What the driver says.
    fn memory(&self, ordinal: Ordinal) -> Answer<[usize; 2]>;

    /// Loads all of a module's code at once.
    ///
    /// # Errors
    /// What the driver says.
    fn load(&self, image: &[u8]) -> Answer<Handle>;

    /// What is known of a kernel of a module, if the module has it.
    ///
    /// # Errors
    /// What the driver says.
    fn kernel(&self, function: Handle, name: &str, code: &Compiled) -> Answer<Option<KernelFacts>>;

    /// Readies a function for blocks with so much shared memory besides their own; a block has
    /// `most` in all.
    ///
    /// # Errors
    /// Why it cannot have it.
    fn allow_shared(
        &self,
        function: Handle,
        facts: &KernelFacts,
        shared_bytes: u32,
        most: u32,
    ) -> std::result::Result<(), String>;

    /// The first of [`Paths::compiler`] that goes with this driver.
    ///
    /// # Errors
    /// [`Error::BackendMissing`] with what was tried.
    fn compiler(&self, paths: &Paths, device: &str) -> Result<Compiler>;

    /// What compiled code depends on besides the compiler's version.
    fn code_version(&self) -> Option<i32> {
        None
    }

    /// Memory between processes, where the driver has it.
    fn ipc(&self) -> Option<&dyn Ipc> {
        None
    }

    /// Lets kernels of the current device reach the memory of another's owner; none where devices
    /// of this kind do not.
    fn enable_peer(&self, owner: Handle) -> Option<Answer<()>> {
        let _ = owner;
        None
    }

    /// [`Error::Failed`] about `device` where a call failed.
    ///
    /// # Errors
    /// Where it failed.
    fn check<T>(&self, device: &str, answer: Answer<T>) -> Result<T> {
        answer.map_err(|fault| Error::Failed(format!("{device}: {}", self.words(fault))))
    }

    /// The same for a call that takes memory.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] too.
    fn check_memory<T>(&self, device: &str, bytes: usize, answer: Answer<T>) -> Result<T> {
        if answer.as_ref().is_err_and(|fault| fault.code == OUT_OF_MEMORY) {
            return Err(Error::OutOfMemory { device: device.into(), wanted_bytes: bytes as u64 });
        }
        self.check(device, answer)
    }

    /// A property of a device, by its number.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn attribute(&self, device: &str, ordinal: Ordinal, which: c_int) -> Result<i32> {
        let mut value = 0;
        // SAFETY: a live integer; an attribute that is not known is answered with an error.
        let answer =
            self.calls().device_attribute.with(|f| unsafe { f(&mut value, which, ordinal) });
        self.check(device, answer).map(|()| value)
    }

    /// What a person calls the device.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn model(&self, device: &str, ordinal: Ordinal) -> Result<String> {
        let mut name = [0 as c_char; 256];
        // SAFETY: the length is that of the buffer less a closing zero.
        let answer =
            self.calls().device_name.with(|f| unsafe { f(name.as_mut_ptr(), 255, ordinal) });
        self.check(device, answer)?;
        // SAFETY: the last byte is zero.
        Ok(unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
    }

    /// PCI address of the device, such as `0000:0c:00.0`.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn bus(&self, device: &str, ordinal: Ordinal) -> Result<String> {
        let mut text = [0 as c_char; 32];
        // SAFETY: the length is that of the buffer less a closing zero.
        let answer = self.calls().device_bus.with(|f| unsafe { f(text.as_mut_ptr(), 31, ordinal) });
        self.check(device, answer)?;
        // SAFETY: the last byte is zero whatever the driver wrote before it.
        Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().to_lowercase())
    }

    /// Whether kernels of one device may reach the other's memory.
    ///
    /// # Errors
    /// [`Error::Failed`].
    fn can_access(&self, device: &str, from: Ordinal, to: Ordinal) -> Result<bool> {
        let mut can = 0;
        // SAFETY: a live integer; the driver knows which numbers are devices.
        let answer = self.calls().can_access_peer.with(|f| unsafe { f(&mut can, from, to) });
        self.check(device, answer).map(|()| can != 0)
    }
}

/// The index in `KIND` (0) or `KIND:N`.
///
/// # Errors
/// [`Error::NoDevice`] for every other name.
pub(crate) fn index_of(kind: &str, name: &str) -> Result<u32> {
    let index = match name.strip_prefix(kind) {
        Some("") => Some(0),
        Some(rest) => rest.strip_prefix(':').and_then(|number| {
            let plain = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
            plain.then(|| number.parse().ok()).flatten()
        }),
        None => None,
    };
    index.ok_or_else(|| Error::NoDevice {
        device: name.into(),
        detail: format!("one GPU is written {kind} or {kind}:N, N from 0"),
    })
}

/// The first of `paths` that `open` takes, or what was wrong with each of them.
pub(crate) fn first_of<T>(
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
