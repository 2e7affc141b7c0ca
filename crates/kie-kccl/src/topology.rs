//! Who can reach whom, how, and how fast: plain data, printed, saved and loaded, so that a machine
//! can be planned for and simulated without having it.
//!
//! Invariants: GPUs are numbered as ranks are; every pair has exactly one [`Link`]; speeds are what
//! the hardware carries in one direction, not what was measured.

use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The GPUs of one host and what lies between them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    /// What a person would call it.
    pub name: String,
    /// One a rank.
    pub gpus: Vec<Gpu>,
    /// One a pair.
    pub links: Vec<Link>,
}

/// One GPU, as far as collectives ask.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// Name to open it, such as `cuda:0`.
    pub name: String,
    /// What a person would call it.
    pub model: String,
    /// PCI address.
    pub bus: Option<String>,
    /// NUMA node that it is attached to.
    pub numa: Option<u32>,
    /// SMs or CUs that a collective may use.
    pub multiprocessors: u32,
    /// Dies with compute units and a second-level cache of their own (XCDs); 1: no such division.
    pub chiplets: u32,
    /// Dies under them with memory and links (IODs); 1: no such division.
    pub io_dies: u32,
    /// Most threads of a block.
    pub threads: u32,
    /// All its links together, MB/s in one direction.
    pub egress_mb_s: u64,
}

impl Gpu {
    /// The chiplet on which the hardware places a block: they take turns.
    pub fn chiplet_of(&self, block: u32) -> u32 {
        block % self.chiplets.max(1)
    }

    /// The I/O die under a chiplet: neighbours share one.
    pub fn io_die_of(&self, chiplet: u32) -> u32 {
        let each = self.chiplets.max(1).div_ceil(self.io_dies.max(1));
        chiplet / each
    }
}

/// What two GPUs talk through.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// One GPU.
    pub a: u32,
    /// The other, larger.
    pub b: u32,
    /// The way.
    pub via: Via,
    /// MB/s in one direction.
    pub mb_s: u64,
    /// Whether each may map the other's memory; nothing where nobody was asked.
    pub peer_access: Option<bool>,
}

/// Ways between two GPUs, fast ones first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum Via {
    /// Virtual ranks of one device.
    Same,
    /// So many NVLinks, straight or through a switch.
    Nvlink {
        /// Links.
        links: u32,
    },
    /// So many xGMI links.
    Xgmi {
        /// Links.
        links: u32,
    },
    /// PCIe below one root complex.
    Pcie,
    /// PCIe, and the link between two sockets.
    Socket,
    /// Nobody knows.
    Unknown,
}

impl Via {
    /// Nanoseconds from a pushed word's store to its value in a peer's register.
    pub fn push_ns(self) -> u64 {
        match self {
            // A store and a look in one second-level cache.
            Self::Same => 700,
            // 830 for the store (published for H100), 300 for a look that hits, a late look, start.
            Self::Nvlink { .. } => 1500,
            Self::Xgmi { .. } => 2000,
            Self::Pcie => 3000,
            Self::Socket | Self::Unknown => 4500,
        }
    }

    /// Nanoseconds of one round of stores, fence, flag and look: the fence waits for the stores'
    /// answers, so it costs a way there and back before the flag even leaves.
    pub fn round_ns(self) -> u64 {
        2 * self.push_ns()
    }
}

impl fmt::Display for Via {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Same => write!(f, "same"),
            Self::Nvlink { links } => write!(f, "NV{links}"),
            Self::Xgmi { links } => write!(f, "XGMI{links}"),
            Self::Pcie => write!(f, "PCIE"),
            Self::Socket => write!(f, "SOCK"),
            Self::Unknown => write!(f, "?"),
        }
    }
}

impl Topology {
    /// Virtual ranks of one device, which share its multiprocessors.
    pub fn virtual_ranks(name: &str, ranks: u32, multiprocessors: u32, threads: u32) -> Self {
        let gpu = |rank: u32| Gpu {
            name: format!("{name}#{rank}"),
            model: "virtual rank".to_owned(),
            bus: None,
            numa: None,
            multiprocessors: multiprocessors / ranks.max(1),
            chiplets: 1,
            io_dies: 1,
            threads,
            egress_mb_s: 1_000_000 / u64::from(ranks.max(1)),
        };
        let link = |a, b| Link { a, b, via: Via::Same, mb_s: 1_000_000, peer_access: Some(true) };
        Self {
            name: format!("{ranks} virtual ranks"),
            gpus: (0..ranks).map(gpu).collect(),
            links: pairs(ranks).map(|(a, b)| link(a, b)).collect(),
        }
    }

    /// How many GPUs there are.
    pub fn ranks(&self) -> usize {
        self.gpus.len()
    }

    /// What lies between two GPUs.
    pub fn link(&self, a: u32, b: u32) -> Option<&Link> {
        let (a, b) = (a.min(b), a.max(b));
        self.links.iter().find(|link| (link.a, link.b) == (a, b))
    }

    /// The slowest way, which sets the pace of all.
    pub fn slowest(&self) -> Via {
        self.links.iter().map(|link| link.via).max().unwrap_or(Via::Same)
    }

    /// MB/s of the slowest pair; of one rank, those of its memory.
    pub fn pair_mb_s(&self) -> u64 {
        self.links.iter().map(|link| link.mb_s).min().unwrap_or(1_000_000).max(1)
    }

    /// MB/s that every GPU can send in all.
    pub fn egress_mb_s(&self) -> u64 {
        self.gpus.iter().map(|gpu| gpu.egress_mb_s).min().unwrap_or(1_000_000).max(1)
    }

    /// The part of it that some of its GPUs form, in the order given.
    ///
    /// # Errors
    /// [`Error::Topology`] for a GPU that is not there, or is named twice.
    pub fn subset(&self, gpus: &[u32]) -> Result<Self> {
        let mut part = Self { name: self.name.clone(), gpus: Vec::new(), links: Vec::new() };
        for (rank, gpu) in gpus.iter().enumerate() {
            let found = self.gpus.get(*gpu as usize).filter(|_| !gpus[..rank].contains(gpu));
            let found = found.ok_or_else(|| {
                self.fault(&format!("no {}-GPU choice {gpus:?}", self.gpus.len()))
            })?;
            part.gpus.push(found.clone());
            for (other, before) in gpus[..rank].iter().enumerate() {
                let link = self.link(*before, *gpu).ok_or_else(|| self.fault("a link is missing"));
                part.links.push(Link { a: other as u32, b: rank as u32, ..link?.clone() });
            }
        }
        part.links.sort_by_key(|link| (link.a, link.b));
        Ok(part)
    }

    /// Every pair has one link, numbers are in range, speeds are not zero.
    ///
    /// # Errors
    /// [`Error::Topology`] with the first that is wrong.
    pub fn check(&self) -> Result<()> {
        let ranks = self.gpus.len() as u32;
        if ranks == 0 {
            return Err(self.fault("there are no GPUs"));
        }
        for (a, b) in pairs(ranks) {
            let found = self.links.iter().filter(|link| (link.a, link.b) == (a, b)).count();
            if found != 1 {
                return Err(self.fault(&format!("GPUs {a} and {b}: wanted 1 link, got {found}")));
            }
        }
        if self.links.len() != pairs(ranks).count() {
            let wanted = pairs(ranks).count();
            let got = self.links.len();
            return Err(self.fault(&format!("wanted {wanted} links (a < b), got {got}")));
        }
        for (rank, gpu) in self.gpus.iter().enumerate() {
            let sizes = [gpu.multiprocessors, gpu.chiplets, gpu.io_dies, gpu.threads];
            if sizes.contains(&0) || gpu.egress_mb_s == 0 || gpu.threads > 1024 {
                return Err(self.fault(&format!("GPU {rank}: a size is 0 or out of range")));
            }
        }
        match self.links.iter().find(|link| link.mb_s == 0) {
            Some(link) => Err(self.fault(&format!("link {}-{}: 0 MB/s", link.a, link.b))),
            None => Ok(()),
        }
    }

    /// From a file that [`Topology::save`] or a person wrote.
    ///
    /// # Errors
    /// [`Error::Topology`] with the file and what is wrong in it.
    pub fn load(path: &Path) -> Result<Self> {
        let fault = |detail: String| Error::Topology { path: path.to_path_buf(), detail };
        let text = std::fs::read_to_string(path).map_err(|error| fault(error.to_string()))?;
        let this: Self = serde_json::from_str(&text).map_err(|error| fault(error.to_string()))?;
        this.check().map_err(|error| match error {
            Error::Topology { detail, .. } => fault(detail),
            other => other,
        })?;
        Ok(this)
    }

    /// Writes it as JSON.
    ///
    /// # Errors
    /// [`Error::Topology`] with the system's words.
    pub fn save(&self, path: &Path) -> Result<()> {
        let fault = |detail: String| Error::Topology { path: path.to_path_buf(), detail };
        let text = serde_json::to_string_pretty(self).map_err(|error| fault(error.to_string()))?;
        std::fs::write(path, text + "\n").map_err(|error| fault(error.to_string()))
    }

    fn fault(&self, detail: &str) -> Error {
        Error::Topology { path: self.name.clone().into(), detail: detail.to_owned() }
    }
}

/// All pairs of so many, the smaller number first.
pub(crate) fn pairs(ranks: u32) -> impl Iterator<Item = (u32, u32)> {
    (0..ranks).flat_map(move |a| (a + 1..ranks).map(move |b| (a, b)))
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.name)?;
        writeln!(
            f,
            "{:<4}{:<10}{:<14}{:<14}{:>5}{:>6}{:>6}{:>6}{:>10}",
            "", "name", "model", "bus", "numa", "units", "dies", "iods", "GB/s out"
        )?;
        for (rank, gpu) in self.gpus.iter().enumerate() {
            let numa = gpu.numa.map_or("-".to_owned(), |node| node.to_string());
            writeln!(
                f,
                "{rank:<4}{:<10}{:<14}{:<14}{numa:>5}{:>6}{:>6}{:>6}{:>10}",
                gpu.name,
                gpu.model,
                gpu.bus.as_deref().unwrap_or("-"),
                gpu.multiprocessors,
                gpu.chiplets,
                gpu.io_dies,
                gpu.egress_mb_s / 1000
            )?;
        }
        write!(f, "{:<4}", "")?;
        for rank in 0..self.gpus.len() {
            write!(f, "{rank:>12}")?;
        }
        writeln!(f)?;
        for a in 0..self.gpus.len() as u32 {
            write!(f, "{a:<4}")?;
            for b in 0..self.gpus.len() as u32 {
                let cell = match self.link(a, b) {
                    None => "-".to_owned(),
                    Some(link) => {
                        let closed = if link.peer_access == Some(false) { " no" } else { "" };
                        format!("{} {}{closed}", link.via, link.mb_s / 1000)
                    }
                };
                write!(f, "{cell:>12}")?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

impl Topology {
    /// What the machines and the system tell.
    ///
    /// # Errors
    /// What a machine says.
    pub fn discover(
        machines: &[std::sync::Arc<dyn kie_kernels::mono::machine::Machine>],
    ) -> Result<Self> {
        crate::discover::discover(machines, Path::new("/sys/bus/pci/devices"))
    }
}
