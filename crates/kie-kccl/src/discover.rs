//! The topology of the machines at hand, from the system's files and from what the drivers say.
//! What no source says stays unknown; nothing is guessed from a product's name.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kie_kernels::kfd::{self, Node};
use kie_kernels::machine::{Machine, MachineInfo, Platform};

use crate::error::Result;
use crate::nvml::{self, NvLinks};
use crate::topology::{pairs, Gpu, Link, Topology, Via, VERSION};

/// MB/s of a link of which only its existence is known: PCIe 4.0, 16 lanes, less its framing.
const UNKNOWN_MB_S: u64 = 25_000;

/// Where the system's answers are, apart so that tests can put recorded ones in their place.
pub(crate) struct System {
    /// Linux's folder of PCI devices.
    pub devices: PathBuf,
    /// Its folder of AMD's nodes.
    pub nodes: PathBuf,
    /// NVML; `None`: the driver's.
    pub nvml: Option<PathBuf>,
}

impl System {
    pub fn usual() -> Self {
        Self { devices: "/sys/bus/pci/devices".into(), nodes: kfd::NODES.into(), nvml: None }
    }
}

/// What the system says of one PCI device.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Slot {
    /// Root complex, such as `pci0000:16`.
    pub root: Option<String>,
    pub numa: Option<u32>,
    /// MB/s in one direction.
    pub mb_s: Option<u64>,
}

/// All that is known of one machine.
struct Found {
    info: MachineInfo,
    platform: Platform,
    warp: u32,
    bus: Option<String>,
    slot: Slot,
    nvlinks: Option<NvLinks>,
    node: Option<Node>,
}

impl Found {
    fn new(machine: &dyn Machine, system: &System, nodes: &[Node]) -> Result<Self> {
        let platform = machine.platform();
        let bus = machine.peer().ok().and_then(|peer| peer.bus);
        let at = |bus: &str| slot(&system.devices, bus);
        let node = |bus: &String| nodes.iter().find(|node| node.bus == *bus).cloned();
        Ok(Self {
            info: machine.info()?,
            platform,
            warp: machine.warp(),
            slot: bus.as_deref().map(at).unwrap_or_default(),
            nvlinks: match (platform, &bus) {
                (Platform::Cuda, Some(bus)) => nvml::links(bus, system.nvml.as_deref()),
                _ => None,
            },
            node: bus.as_ref().filter(|_| platform == Platform::Hip).and_then(node),
            bus,
        })
    }

    /// Its links to GPUs together, in one direction.
    fn egress_mb_s(&self, gpus: &[u32]) -> u64 {
        let nvlink = self.nvlinks.as_ref().map_or(0, |links| links.to.len() as u64 * links.mb_s);
        let to_gpus = |node: &Node| -> u64 {
            let links = node.links.iter().filter(|link| link.xgmi && gpus.contains(&link.to));
            links.filter_map(|link| link.mb_s).sum()
        };
        let xgmi = self.node.as_ref().map_or(0, to_gpus);
        nvlink.max(xgmi).max(self.slot.mb_s.unwrap_or(UNKNOWN_MB_S))
    }

    fn gpu(self, gpus: &[u32]) -> Gpu {
        let egress_mb_s = self.egress_mb_s(gpus);
        Gpu {
            name: self.info.name,
            model: self.info.model,
            arch: self.info.arch,
            bus: self.bus,
            numa: self.slot.numa,
            multiprocessors: self.info.multiprocessors,
            warp: self.warp,
            shared_bytes: self.info.shared_bytes,
            memory_bytes: self.info.memory_bytes,
            chiplets: self.info.chiplets,
            io_dies: self.node.map_or(1, |node| node.io_dies),
            threads: 1024,
            egress_mb_s,
        }
    }

    /// The link to another, and its MB/s; `buses` are those of all GPUs.
    fn link_to(&self, other: &Self, buses: &[&str]) -> (Via, u64) {
        if self.platform == Platform::Sim {
            return (Via::Same, 1_000_000);
        }
        let pair = self.bus.as_deref().zip(other.bus.as_deref());
        if let (Some((a, b)), Some((ours, theirs))) =
            (pair, self.nvlinks.as_ref().zip(other.nvlinks.as_ref()))
        {
            // Through a switch each GPU can give all its links to one peer.
            let links = ours.shared(theirs, [a, b], buses);
            if links > 0 {
                return (Via::Nvlink { links }, u64::from(links) * ours.mb_s.min(theirs.mb_s));
            }
        }
        if let Some((ours, theirs)) = self.node.as_ref().zip(other.node.as_ref()) {
            let link = ours.links.iter().find(|link| link.to == theirs.id && link.xgmi);
            if let Some(link) = link {
                return (Via::Xgmi { links: link.links }, link.mb_s.unwrap_or(UNKNOWN_MB_S));
            }
        }
        pcie_between(&self.slot, &other.slot)
    }
}

pub(crate) fn discover(machines: &[Arc<dyn Machine>], system: &System) -> Result<Topology> {
    let nodes = kfd::gpus(&system.nodes);
    let found = machines.iter().map(|machine| Found::new(&**machine, system, &nodes));
    let found = found.collect::<Result<Vec<_>>>()?;
    let buses: Vec<_> = found.iter().filter_map(|found| found.bus.as_deref()).collect();
    let link = |(a, b): (u32, u32)| {
        let (i, j) = (a as usize, b as usize);
        let reaches = |from: usize, to: usize| machines[from].reaches(&*machines[to]).ok();
        let peer_access = reaches(i, j).zip(reaches(j, i)).map(|(there, back)| there && back);
        let (via, mb_s) = found[i].link_to(&found[j], &buses);
        Link { a, b, via, mb_s, peer_access }
    };
    let links = pairs(machines.len() as u32).map(link).collect();
    let name = format!("{} GPUs of this host", found.len());
    let gpus: Vec<_> = nodes.iter().map(|node| node.id).collect();
    let gpus = found.into_iter().map(|found| found.gpu(&gpus)).collect();
    Ok(Topology { version: VERSION, name, gpus, links })
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
    use kie_kernels::machine::{Flight, Launch, Memory, Module, Peer, Shared, Source};

    use super::*;

    /// A GPU that answers questions.
    struct Asked {
        ordinal: i32,
        bus: &'static str,
        platform: Platform,
    }

    impl Machine for Asked {
        fn platform(&self) -> Platform {
            self.platform
        }
        fn info(&self) -> kie_kernels::Result<MachineInfo> {
            Ok(MachineInfo {
                name: format!("gpu:{}", self.ordinal),
                model: "a GPU".into(),
                arch: "gfx942".into(),
                multiprocessors: 304,
                chiplets: 8,
                shared_bytes: 65_520,
                memory_bytes: 1 << 30,
                free_bytes: 1 << 29,
            })
        }
        fn peer(&self) -> kie_kernels::Result<Peer> {
            let (name, bus) = (String::new(), Some(self.bus.to_owned()));
            Ok(Peer { platform: self.platform, name, ordinal: self.ordinal, owner: 0, bus })
        }
        fn reaches(&self, other: &dyn Machine) -> kie_kernels::Result<bool> {
            // One way only between the first and the third.
            Ok((self.ordinal, other.peer()?.ordinal) != (2, 0))
        }
        fn compile(&self, _: &Source) -> kie_kernels::Result<Arc<dyn Module>> {
            unreachable!("nobody asks")
        }
        fn alloc(&self, _: usize) -> kie_kernels::Result<Memory> {
            unreachable!("nobody asks")
        }
        fn alloc_shared(&self, _: usize) -> kie_kernels::Result<Shared> {
            unreachable!("nobody asks")
        }
        fn write(&self, _: &Memory, _: usize, _: &[u8]) -> kie_kernels::Result<()> {
            unreachable!("nobody asks")
        }
        fn read(&self, _: &Memory, _: usize, _: &mut [u8]) -> kie_kernels::Result<()> {
            unreachable!("nobody asks")
        }
        fn launch(
            &self,
            _: &Arc<dyn Module>,
            _: &Launch<'_>,
        ) -> kie_kernels::Result<Box<dyn Flight>> {
            unreachable!("nobody asks")
        }
    }

    /// A file of one line in a folder of nodes.
    fn node(root: &Path, path: &str, lines: &str) {
        std::fs::create_dir_all(root.join(path)).unwrap();
        std::fs::write(root.join(path).join("properties"), lines).unwrap();
    }

    #[test]
    fn a_recorded_machine_of_amd_is_discovered() {
        let root = std::env::temp_dir().join(format!("kie-kccl-kfd-{}", std::process::id()));
        // Two with a link of two lanes between them, and a third that only PCIe reaches.
        for (id, place) in [(1, 0x0c00), (2, 0x9f00), (3, 0xaf00)] {
            let text = format!(
                "simd_count 1216\nsimd_per_cu 4\nnum_xcc 8\ngfx_target_version 90402\n\
                 location_id {place}\ndomain 0\n"
            );
            node(&root, &format!("{id}"), &text);
        }
        for (from, to) in [(1, 2), (2, 1)] {
            let text = format!(
                "type 11\nnode_from {from}\nnode_to {to}\nmin_bandwidth 50000\n\
                 max_bandwidth 100000\n"
            );
            node(&root, &format!("{from}/io_links/0"), &text);
        }
        let system = System { devices: root.join("none"), nodes: root.clone(), nvml: None };
        let buses = ["0000:0c:00.0", "0000:9f:00.0", "0000:af:00.0"];
        let machine = |(at, bus): (usize, &&'static str)| -> Arc<dyn Machine> {
            Arc::new(Asked { ordinal: at as i32, bus, platform: Platform::Hip })
        };
        let machines: Vec<_> = buses.iter().enumerate().map(machine).collect();
        let topology = discover(&machines, &system).unwrap();
        topology.check().unwrap();
        let gpu = &topology.gpus[0];
        assert_eq!((gpu.chiplets, gpu.io_dies, gpu.multiprocessors), (8, 4, 304));
        assert_eq!((gpu.egress_mb_s, topology.gpus[2].egress_mb_s), (100_000, UNKNOWN_MB_S));
        let link = |a, b| topology.link(a, b).unwrap();
        assert_eq!(link(0, 1).via, Via::Xgmi { links: 2 });
        assert_eq!((link(0, 1).mb_s, link(0, 1).peer_access), (100_000, Some(true)));
        assert_eq!((link(0, 2).via, link(0, 2).peer_access), (Via::Unknown, Some(false)));
        std::fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn a_recorded_machine_of_nvidia_is_discovered() {
        let root = std::env::temp_dir().join(format!("kie-kccl-nvidia-{}", std::process::id()));
        // Two on one socket with a bridge between them, and a third on the other.
        let buses = ["0000:19:00.0", "0000:3b:00.0", "0000:98:00.0"];
        for (bus, numa) in buses.iter().zip([0, 0, 1]) {
            let device = root.join(bus);
            std::fs::create_dir_all(&device).unwrap();
            std::fs::write(device.join("numa_node"), format!("{numa}\n")).unwrap();
            std::fs::write(device.join("max_link_speed"), "32.0 GT/s PCIe\n").unwrap();
            std::fs::write(device.join("max_link_width"), "16\n").unwrap();
        }
        let nvml = Some(crate::nvml::tests::stub(&root));
        let system = System { devices: root.clone(), nodes: root.join("none"), nvml };
        let machine = |(at, bus): (usize, &&'static str)| -> Arc<dyn Machine> {
            Arc::new(Asked { ordinal: at as i32, bus, platform: Platform::Cuda })
        };
        let machines: Vec<_> = buses.iter().enumerate().map(machine).collect();
        let topology = discover(&machines, &system).unwrap();
        topology.check().unwrap();
        let link = |a, b| topology.link(a, b).unwrap();
        assert_eq!((link(0, 1).via, link(0, 1).mb_s), (Via::Nvlink { links: 2 }, 50_000));
        assert_eq!((link(1, 2).via, link(1, 2).mb_s), (Via::Socket, 31_507));
        let peers = [link(0, 1), link(1, 2), link(0, 2)].map(|link| link.peer_access);
        assert_eq!(peers, [Some(true), Some(true), Some(false)]);
        let egress = topology.gpus.iter().map(|gpu| gpu.egress_mb_s);
        assert!(egress.eq([100_000, 63_015, 63_015]));
        let nodes = topology.gpus.iter().map(|gpu| gpu.numa);
        assert!(nodes.eq([Some(0), Some(0), Some(1)]));
        let printed = topology.to_string();
        assert!(printed.contains("NV2 50") && printed.contains("SOCK 31 no"), "{printed}");
        std::fs::remove_dir_all(&root).unwrap();
    }

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
