//! What NVML tells of NVLinks, where there is one.

use std::path::Path;

use nvml_wrapper::{Device, Nvml};

/// Most links of a GPU that NVML numbers.
const LINKS_MAX: u32 = 18;
/// MB/s of one link in one direction: of generations 2 to 4, and from the fifth on.
const LINK_MB_S: [u64; 2] = [25_000, 50_000];
/// NVML's number of the fifth generation; it counts 2.2 and 3.1, too, so a H200's fourth is 6.
const FIFTH: u32 = 7;

/// The NVLinks of a GPU that are up.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct NvLinks {
    /// PCI address of what each leads to: another GPU, or a switch.
    pub to: Vec<String>,
    /// MB/s of one in one direction.
    pub mb_s: u64,
}

impl NvLinks {
    /// How many lead from one GPU to another: those between the two, or what both give to switches.
    /// `gpus` are the addresses of all GPUs.
    pub fn shared(&self, other: &Self, bus: [&str; 2], gpus: &[&str]) -> u32 {
        let direct = |links: &Self, to: &str| links.to.iter().filter(|at| *at == to).count();
        let straight = direct(self, bus[1]).min(direct(other, bus[0]));
        if straight > 0 {
            return straight as u32;
        }
        let away = |links: &Self| links.to.iter().filter(|at| !gpus.contains(&at.as_str())).count();
        away(self).min(away(other)) as u32
    }
}

/// Of the GPU at a PCI address; `None` where NVML says nothing. `library` is NVML's, the usual one
/// if there is none.
pub(crate) fn links(bus: &str, library: Option<&Path>) -> Option<NvLinks> {
    let mut builder = Nvml::builder();
    if let Some(library) = library {
        builder.lib_path(library.as_os_str());
    }
    let nvml = builder.init().ok()?;
    let device = nvml.device_by_pci_bus_id(bus).ok()?;
    let up: Vec<u32> = (0..LINKS_MAX)
        .filter(|link| device.link_wrapper_for(*link).is_active().unwrap_or(false))
        .collect();
    let newer = |link: &u32| device.link_wrapper_for(*link).version().is_ok_and(|v| v >= FIFTH);
    let mb_s = LINK_MB_S[usize::from(up.first().is_some_and(newer))];
    Some(NvLinks { to: up.iter().map(|link| remote(&device, *link)).collect(), mb_s })
}

/// What a link leads to, as the driver writes addresses; empty where it does not tell, as behind
/// switches of a virtual machine.
fn remote(device: &Device<'_>, link: u32) -> String {
    let found = device.link_wrapper_for(link).remote_pci_info();
    found.map_or_else(|_| String::new(), |info| address(&info.bus_id))
}

/// NVML's address, whose domain has eight digits, as the driver and Linux write it.
fn address(bus: &str) -> String {
    let bus = bus.to_lowercase();
    match bus.split_once(':') {
        Some((domain, rest)) if domain.len() == 8 && domain.starts_with("0000") => {
            format!("{}:{rest}", &domain[4..])
        }
        _ => bus,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use std::path::PathBuf;

    use super::*;

    fn links(to: &[&str]) -> NvLinks {
        NvLinks { to: to.iter().map(|at| (*at).to_owned()).collect(), mb_s: 25_000 }
    }

    #[test]
    fn links_lead_straight_or_through_switches() {
        let gpus = ["a", "b", "c"];
        let shared = |one: &NvLinks, other: &NvLinks| one.shared(other, ["a", "b"], &gpus);
        let switched = links(&["s", "s", "t", "t"]);
        assert_eq!(shared(&switched, &switched), 4);
        assert_eq!(shared(&switched, &links(&["s"])), 1);
        // Bridges in pairs: what leads to c is of no use to b.
        assert_eq!(shared(&links(&["b", "b", "c"]), &links(&["a", "a", "c"])), 2);
        assert_eq!(shared(&links(&["c", "c"]), &links(&["c"])), 0);
        assert_eq!(shared(&links(&[]), &switched), 0);
        // A driver that does not say whereto.
        assert_eq!(shared(&links(&["", ""]), &links(&["", "", ""])), 2);
        assert_eq!(address("00000000:1B:00.0"), "0000:1b:00.0");
        assert_eq!(address("0000:1B:00.0"), "0000:1b:00.0");
    }

    /// NVML as a library with three links: two to the other GPU, one that is down. The first GPU's
    /// are of the fifth generation, the second's of the fourth.
    const STUB: &str = r#"
        #include <stdio.h>
        #include <string.h>
        struct pci { char legacy[16]; unsigned n[5]; char bus[32]; };
        int nvmlInit_v2(void) { return 0; }
        int nvmlShutdown(void) { return 0; }
        int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** device) {
            *device = (void*)(long)(strcmp(bus, "0000:19:00.0") ? 2 : 1);
            return strcmp(bus, "0000:19:00.0") && strcmp(bus, "0000:3b:00.0") ? 6 : 0;
        }
        int nvmlDeviceGetNvLinkState(void* device, unsigned link, unsigned* up) {
            (void)device;
            *up = link < 2;
            return link < 3 ? 0 : 2;
        }
        int nvmlDeviceGetNvLinkVersion(void* device, unsigned link, unsigned* version) {
            (void)link;
            *version = device == (void*)1 ? 7 : 6;
            return 0;
        }
        int nvmlDeviceGetNvLinkRemotePciInfo_v2(void* device, unsigned link, struct pci* to) {
            (void)link;
            strcpy(to->bus, device == (void*)1 ? "00000000:3B:00.0" : "00000000:19:00.0");
            return 0;
        }
    "#;

    /// That library in a folder.
    pub(crate) fn stub(folder: &Path) -> PathBuf {
        let (source, library) = (folder.join("stub.c"), folder.join("libnvidia-ml.so"));
        std::fs::write(&source, STUB).unwrap();
        let mut cc = std::process::Command::new("cc");
        let built = cc.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status();
        assert!(built.unwrap().success());
        library
    }

    #[test]
    fn a_library_is_asked() {
        let folder = std::env::temp_dir().join(format!("kie-nvml-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let none = folder.join("none.so");
        assert_eq!(super::links("0000:19:00.0", Some(&none)), None, "no such library");
        let library = stub(&folder);
        let of = |bus| super::links(bus, Some(&library));
        let (a, b) = (of("0000:19:00.0").unwrap(), of("0000:3b:00.0").unwrap());
        assert_eq!(a, NvLinks { to: vec!["0000:3b:00.0".into(); 2], mb_s: 50_000 });
        assert_eq!(b, NvLinks { to: vec!["0000:19:00.0".into(); 2], mb_s: 25_000 });
        let bus = ["0000:19:00.0", "0000:3b:00.0"];
        assert_eq!(a.shared(&b, bus, &bus), 2);
        assert_eq!(of("0000:99:00.0"), None, "no such GPU");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
