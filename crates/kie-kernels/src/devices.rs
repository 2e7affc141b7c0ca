//! Devices and machines by their names; the GPUs that are here.

use std::sync::Arc;

use crate::device::{Device, DeviceInfo, Options};
use crate::error::{Error, Result};
use crate::machine::Machine;
use crate::mono::Mono;

/// Opens a device by its name: `cpu` or `cpu:0,1` (virtual ranks), `cuda` or `cuda:0`, `sim` or
/// `sim:seed=3,warp=64`.
///
/// # Errors
/// [`Error::NoDevice`] with what was looked for, [`Error::DriverTooOld`].
pub fn open(name: &str, options: &Options) -> Result<Arc<dyn Device>> {
    if name.split(':').next() == Some("cpu") {
        return Ok(Arc::new(crate::cpu::Cpu::new(name, options)?));
    }
    of_machines(name, machines(name, options)?, options)
}

/// Machines that run a program together, in order of rank, as a device of this name.
///
/// # Errors
/// What a machine says when asked what it has.
pub fn of_machines(
    name: &str,
    machines: Vec<Arc<dyn Machine>>,
    options: &Options,
) -> Result<Arc<dyn Device>> {
    Ok(Arc::new(Mono::new(name, machines, options)?))
}

/// The machines that a name stands for, in order of rank; see [`open`].
///
/// # Errors
/// As [`open`], and for the CPU, whose ranks are virtual.
pub fn machines(name: &str, options: &Options) -> Result<Vec<Arc<dyn Machine>>> {
    #[cfg(target_os = "linux")]
    let cache = options.cache_dir.as_deref();
    #[cfg(not(target_os = "linux"))]
    let _ = options;
    match name.split(':').next() {
        #[cfg(target_os = "linux")]
        Some("cuda") => each_of(name)?
            .iter()
            .map(|one| crate::cuda::open(one, &options.nvrtc_dirs, cache))
            .collect(),
        #[cfg(target_os = "linux")]
        Some("hip") => each_of(name)?.iter().map(|one| crate::hip::open(one, cache)).collect(),
        Some("sim") => crate::sim::ranks::open(name),
        Some(_) | None => Err(Error::NoDevice {
            device: name.to_owned(),
            detail:
                "devices are \"cpu\" or \"cpu:0,1\", \"cuda:N\" or \"cuda:N,M\", \"hip:N\" and, \
                     for tests, \"sim\""
                    .to_owned(),
        }),
    }
}

/// `kind:0,1` as `kind:0` and `kind:1`: each once, 8 at most.
#[cfg(target_os = "linux")]
fn each_of(name: &str) -> Result<Vec<String>> {
    let Some((kind, list)) = name.split_once(':') else { return Ok(vec![name.to_owned()]) };
    let all: Vec<String> = list.split(',').map(|n| format!("{kind}:{n}")).collect();
    let repeated = all.iter().enumerate().any(|(i, n)| all[..i].contains(n));
    if repeated || all.len() > 8 {
        let detail = "a list of up to 8 different numbers is wanted".to_owned();
        return Err(Error::NoDevice { device: name.to_owned(), detail });
    }
    Ok(all)
}

/// The GPUs of this machine, as far as their drivers see them: what each has, or why it cannot be
/// used; and why a driver that is there sees none.
pub fn gpus() -> Vec<Result<DeviceInfo>> {
    #[cfg(target_os = "linux")]
    {
        let of = |kind: &str, count: Result<u32>| -> Vec<Result<DeviceInfo>> {
            let open = |name: String| open(&name, &Options::default()).map(|d| d.info());
            match count {
                Ok(count) => (0..count).map(|n| open(format!("{kind}:{n}"))).collect(),
                // No driver at all is how most machines are.
                Err(Error::NoDevice { .. }) => Vec::new(),
                Err(error) => vec![Err(error)],
            }
        };
        let mut found = of("cuda", crate::cuda::count());
        found.extend(of("hip", crate::hip::count()));
        found
    }
    #[cfg(not(target_os = "linux"))]
    Vec::new()
}
