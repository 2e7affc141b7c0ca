//! The topology of the machines at hand, from the system's files and from what the drivers say.
//! What nobody tells stays unknown; nothing is guessed from a product's name.

use std::path::Path;
use std::sync::Arc;

use kie_kernels::mono::machine::{Machine, Peer, Platform};

use crate::error::Result;
use crate::topology::{pairs, Gpu, Link, Topology, Via};

/// MB/s of a way of which only that it exists is known: PCIe 4.0, 16 lanes, less its framing.
const UNKNOWN_MB_S: u64 = 25_000;
/// MB/s of one NVLink of the fourth generation in one direction.
const NVLINK_MB_S: u64 = 25_000;

/// What the system says of one PCI device.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Slot {
    /// Root complex, such as `pci0000:16`.
    pub root: Option<String>,
    pub numa: Option<u32>,
    /// MB/s in one direction.
    pub mb_s: Option<u64>,
}

/// `devices` is `/sys/bus/pci/devices`.
pub(crate) fn discover(machines: &[Arc<dyn Machine>], devices: &Path) -> Result<Topology> {
    let mut gpus = Vec::new();
    let mut slots = Vec::new();
    let mut nvlinks = Vec::new();
    for machine in machines {
        let info = machine.info()?;
        let bus = machine.peer().ok().and_then(|peer: Peer| peer.bus);
        let slot = bus.as_deref().map(|bus| slot(devices, bus)).unwrap_or_default();
        let links = match (machine.platform(), &bus) {
            (Platform::Cuda, Some(bus)) => crate::nvml::active_links(bus),
            _ => None,
        };
        let pcie = slot.mb_s.unwrap_or(UNKNOWN_MB_S);
        gpus.push(Gpu {
            name: info.name,
            model: info.model,
            bus,
            numa: slot.numa,
            multiprocessors: info.multiprocessors,
            chiplets: 1,
            io_dies: 1,
            threads: 1024,
            egress_mb_s: links.filter(|n| *n > 0).map_or(pcie, |n| u64::from(n) * NVLINK_MB_S),
        });
        slots.push(slot);
        nvlinks.push(links);
    }
    let mut links = Vec::new();
    for (a, b) in pairs(machines.len() as u32) {
        let (i, j) = (a as usize, b as usize);
        let reaches = |from: usize, to: usize| machines[from].reaches(&*machines[to]).ok();
        let peer_access = reaches(i, j).zip(reaches(j, i)).map(|(there, back)| there && back);
        let shared = nvlinks[i].zip(nvlinks[j]).map_or(0, |(a, b)| a.min(b));
        let (via, mb_s) = if machines[i].platform() == Platform::Sim {
            (Via::Same, 1_000_000)
        } else if shared > 0 {
            // Straight or through a switch: each GPU can give all its links to one peer.
            (Via::Nvlink { links: shared }, u64::from(shared) * NVLINK_MB_S)
        } else {
            pcie_between(&slots[i], &slots[j])
        };
        links.push(Link { a, b, via, mb_s, peer_access });
    }
    Ok(Topology { name: format!("{} GPUs of this host", gpus.len()), gpus, links })
}

fn pcie_between(a: &Slot, b: &Slot) -> (Via, u64) {
    let mb_s = a.mb_s.unwrap_or(UNKNOWN_MB_S).min(b.mb_s.unwrap_or(UNKNOWN_MB_S));
    match (&a.root, &b.root, a.numa, b.numa) {
        (Some(one), Some(other), _, _) if one == other => (Via::Pcie, mb_s),
        (_, _, Some(one), Some(other)) if one == other => (Via::Pcie, mb_s),
        // Half of it: what crosses sockets shares their link with everything else.
        (_, _, Some(_), Some(_)) => (Via::Socket, mb_s / 2),
        _ => (Via::Unknown, mb_s / 2),
    }
}

/// What stands in a device's folder; nothing where there is none.
pub(crate) fn slot(devices: &Path, bus: &str) -> Slot {
    let folder = devices.join(bus);
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).ok();
    let real = folder.canonicalize().ok();
    let root = real.as_deref().and_then(|path| {
        let names = path.components().filter_map(|part| part.as_os_str().to_str());
        names
            .into_iter()
            .find(|name| name.starts_with("pci") && name.contains(':'))
            .map(str::to_owned)
    });
    // A machine without nodes says -1.
    let numa = read("numa_node").and_then(|text| text.trim().parse().ok());
    let speed = read("max_link_speed").and_then(|text| {
        let number = text.split_whitespace().next()?.parse::<f64>().ok()?;
        Some((number * 1000.0) as u64)
    });
    let lanes: Option<u64> = read("max_link_width").and_then(|text| text.trim().parse().ok());
    // Megatransfers of a lane are megabits; from the third generation on 128 of 130 are data.
    let mb_s = speed.zip(lanes).map(|(speed, lanes)| speed * lanes / 8 * 128 / 130);
    Slot { root, numa, mb_s: mb_s.filter(|mb_s| *mb_s > 0) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_of_the_system_is_read() {
        let folder = std::env::temp_dir().join(format!("kie-kccl-sysfs-{}", std::process::id()));
        let device = folder.join("devices/pci0000:16/0000:16:01.0/0000:17:00.0");
        std::fs::create_dir_all(&device).unwrap();
        for (name, text) in [
            ("numa_node", "1\n"),
            ("max_link_speed", "32.0 GT/s PCIe\n"),
            ("max_link_width", "16\n"),
        ] {
            std::fs::write(device.join(name), text).unwrap();
        }
        let bus = folder.join("bus");
        std::fs::create_dir_all(&bus).unwrap();
        let link = bus.join("0000:17:00.0");
        let _ = std::fs::remove_file(&link);
        std::os::unix::fs::symlink(&device, &link).unwrap();
        let found = slot(&bus, "0000:17:00.0");
        let wanted = Slot { root: Some("pci0000:16".into()), numa: Some(1), mb_s: Some(63_015) };
        assert_eq!(found, wanted);
        assert_eq!(slot(&bus, "0000:18:00.0"), Slot::default());
        std::fs::write(device.join("numa_node"), "-1\n").unwrap();
        assert_eq!(slot(&bus, "0000:17:00.0").numa, None);
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn ways_over_pcie() {
        let slot = |root: &str, numa| Slot { root: Some(root.into()), numa, mb_s: Some(60_000) };
        let between = |a: &Slot, b: &Slot| pcie_between(a, b);
        let (a, b) = (slot("pci0000:16", Some(0)), slot("pci0000:60", Some(0)));
        assert_eq!(between(&a, &a), (Via::Pcie, 60_000));
        assert_eq!(between(&a, &b), (Via::Pcie, 60_000));
        assert_eq!(between(&a, &slot("pci0000:90", Some(1))), (Via::Socket, 30_000));
        let silent = Slot::default();
        assert_eq!(between(&a, &silent), (Via::Unknown, UNKNOWN_MB_S / 2));
    }
}
