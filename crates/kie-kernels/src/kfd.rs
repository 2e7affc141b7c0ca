//! What Linux tells of AMD GPUs: the folders of `/sys/class/kfd/kfd/topology/nodes`, where every
//! processor is a numbered node with its properties and its links to others.
//!
//! Invariants: nothing is guessed from a product's name; what a driver does not tell is left out.
//! The folder is a parameter, so that recorded trees can be read.

use std::collections::BTreeMap;
use std::path::Path;

/// Where Linux has the nodes.
pub const NODES: &str = "/sys/class/kfd/kfd/topology/nodes";

/// A GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Its number among the nodes.
    pub id: u32,
    /// PCI address, such as `0000:0c:00.0`.
    pub bus: String,
    /// Compute units, of all dies together.
    pub units: u32,
    /// Dies with compute units (XCDs); 1 where the driver is older than they are.
    pub chiplets: u32,
    /// Dies under them (IODs), by the architecture; 1 where there is no such division.
    pub io_dies: u32,
    /// Links to other nodes, CPUs among them.
    pub links: Vec<NodeLink>,
}

/// What leads from a GPU to another node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeLink {
    /// The other's number.
    pub to: u32,
    /// xGMI; otherwise PCIe or what else there is.
    pub xgmi: bool,
    /// How many links work as this one.
    pub links: u32,
    /// MB/s of them together, where the driver tells.
    pub mb_s: Option<u64>,
}

/// Type of an xGMI link (amdgpu's `CRAT_IOLINK_TYPE_XGMI`).
const XGMI: u64 = 11;

/// The GPUs of a folder of nodes, in order of number; none where there is no such folder.
pub fn gpus(nodes: &Path) -> Vec<Node> {
    let mut all: Vec<_> = folders(nodes).filter_map(|(id, folder)| node(id, &folder)).collect();
    all.sort_by_key(|node| node.id);
    all
}

/// Subfolders with a number for a name.
fn folders(folder: &Path) -> impl Iterator<Item = (u32, std::path::PathBuf)> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|e| Some((e.file_name().to_str()?.parse().ok()?, e.path())))
}

/// Lines of a name and a number.
fn properties(folder: &Path) -> Option<BTreeMap<String, u64>> {
    let text = std::fs::read_to_string(folder.join("properties")).ok()?;
    let pair = |line: &str| {
        let (name, value) = line.split_once(' ')?;
        Some((name.to_owned(), value.trim().parse().ok()?))
    };
    Some(text.lines().filter_map(pair).collect())
}

fn node(id: u32, folder: &Path) -> Option<Node> {
    let found = properties(folder)?;
    let ask = |name: &str| found.get(name).copied().unwrap_or(0);
    let units = ask("simd_count").checked_div(ask("simd_per_cu"))?;
    if units == 0 {
        return None; // A CPU.
    }
    let (place, domain) = (ask("location_id"), ask("domain"));
    let (bus, device, function) = (place >> 8 & 0xff, place >> 3 & 0x1f, place & 7);
    let chiplets = ask("num_xcc").max(1);
    let under = match ask("gfx_target_version") {
        90_402 => chiplets.div_ceil(2),
        90_500 => chiplets.div_ceil(4),
        _ => 1,
    };
    let links = ["io_links", "p2p_links"].iter().flat_map(|kind| folders(&folder.join(kind)));
    let mut links: Vec<_> = links.filter_map(|(_, folder)| link(id, &folder)).collect();
    // Fast ones first, and of each pair that one.
    links.sort_by_key(|link| (link.to, !link.xgmi, std::cmp::Reverse(link.mb_s)));
    links.dedup_by_key(|link| link.to);
    Some(Node {
        id,
        bus: format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}"),
        units: units as u32,
        chiplets: chiplets as u32,
        io_dies: under as u32,
        links,
    })
}

fn link(from: u32, folder: &Path) -> Option<NodeLink> {
    let found = properties(folder)?;
    let ask = |name: &str| found.get(name).copied();
    if ask("node_from")? != u64::from(from) {
        return None;
    }
    let (least, most) = (ask("min_bandwidth").unwrap_or(0), ask("max_bandwidth").unwrap_or(0));
    let links = most.checked_div(least).unwrap_or(1).clamp(1, 16);
    let (to, xgmi) = (ask("node_to")? as u32, ask("type")? == XGMI);
    Some(NodeLink { to, xgmi, links: links as u32, mb_s: (most > 0).then_some(most) })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use std::path::PathBuf;

    use super::*;

    /// A folder of nodes as a machine with two sockets and two MI300X has it: two CPUs, two GPUs of
    /// eight XCDs, xGMI between them.
    pub(crate) fn recorded(name: &str) -> PathBuf {
        let root = std::env::temp_dir().join(format!("kie-kfd-{name}-{}", std::process::id()));
        let write = |path: &str, text: String| {
            let folder = root.join(path);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join("properties"), text).unwrap();
        };
        let link = |from: u32, to: u32, kind: u32, least: u32, most: u32| {
            format!(
                "type {kind}\nversion_major 0\nnode_from {from}\nnode_to {to}\nweight 15\n\
                 min_bandwidth {least}\nmax_bandwidth {most}\n"
            )
        };
        for cpu in 0..2 {
            write(&format!("{cpu}"), "cpu_cores_count 96\nsimd_count 0\nsimd_per_cu 0\n".into());
            write(&format!("{cpu}/io_links/0"), link(cpu, 2 + cpu, 2, 0, 0));
        }
        for (gpu, other, place) in [(2, 3, 0x0c00), (3, 2, 0x9f00)] {
            write(
                &format!("{gpu}"),
                format!(
                    "cpu_cores_count 0\nsimd_count 1216\nsimd_per_cu 4\nnum_xcc 8\n\
                     gfx_target_version 90402\nlocation_id {place}\ndomain 0\n\
                     unique_id 11743213141723840999\n"
                ),
            );
            write(&format!("{gpu}/io_links/0"), link(gpu, gpu - 2, 2, 0, 63_015));
            write(&format!("{gpu}/io_links/1"), link(gpu, other, 11, 64_000, 64_000));
            write(&format!("{gpu}/p2p_links/0"), link(gpu, other, 2, 312, 63_015));
        }
        root
    }

    #[test]
    fn a_recorded_tree_is_read() {
        let root = recorded("read");
        let found = gpus(&root);
        let names: Vec<_> = found.iter().map(|node| (node.id, node.bus.as_str())).collect();
        assert_eq!(names, [(2, "0000:0c:00.0"), (3, "0000:9f:00.0")]);
        for node in &found {
            assert_eq!((node.units, node.chiplets, node.io_dies), (304, 8, 4));
            let other = 5 - node.id;
            let cpu = NodeLink { to: node.id - 2, xgmi: false, links: 1, mb_s: Some(63_015) };
            let gpu = NodeLink { to: other, xgmi: true, links: 1, mb_s: Some(64_000) };
            assert_eq!(node.links, [cpu, gpu]);
        }
        // An older driver, of another architecture, and a folder that says nothing.
        let text = "simd_count 440\nsimd_per_cu 4\nlocation_id 8707\ndomain 1\n";
        std::fs::write(root.join("3/properties"), text).unwrap();
        std::fs::remove_file(root.join("2/properties")).unwrap();
        let [old] = &gpus(&root)[..] else { panic!("one") };
        assert_eq!((old.units, old.chiplets, old.io_dies), (110, 1, 1));
        assert_eq!(old.bus, "0001:22:00.3");
        std::fs::remove_dir_all(&root).unwrap();
        assert_eq!(gpus(&root), []);
    }
}
