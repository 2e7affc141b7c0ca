//! Which rank can reach which, how, and how fast: plain data, printed, saved and loaded, so that a
//! machine can be planned for and simulated without having it.
//!
//! Invariants: GPUs are numbered as ranks are; every pair has exactly one [`Link`]; speeds are what
//! the hardware carries in one direction, not what was measured.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use kie_kernels::machine::recorded::Recorded;
use kie_kernels::machine::{Machine, MachineInfo, Platform};

use crate::error::{Error, Result};

/// Version of the files that are read and written.
pub const VERSION: u32 = 1;

/// Longest file that is read, in bytes; one of eight GPUs has 15 kB.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// The GPUs of one host and what lies between them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    /// [`VERSION`].
    pub version: u32,
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
    /// Architecture that kernels are compiled for, such as `sm_90a`.
    pub arch: String,
    /// PCI address.
    pub bus: Option<String>,
    /// NUMA node that it is attached to.
    pub numa: Option<u32>,
    /// SMs or CUs that a collective may use.
    pub multiprocessors: u32,
    /// Threads that run in step.
    pub warp: u32,
    /// Most shared memory of a block, in bytes.
    pub shared_bytes: u32,
    /// Its memory, in bytes.
    pub memory_bytes: u64,
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
    /// What is wrong with it beside those before it.
    fn check(&self, before: &[Self]) -> std::result::Result<(), String> {
        let sizes = [
            ("multiprocessors", self.multiprocessors, 4096),
            ("chiplets", self.chiplets, self.multiprocessors.min(64)),
            ("io_dies", self.io_dies, self.chiplets),
            ("threads", self.threads, 1024),
        ];
        for (name, got, most) in sizes {
            if !(1..=most).contains(&got) {
                return Err(format!("{name}: wanted 1 to {most}, got {got}"));
            }
        }
        if self.egress_mb_s == 0 {
            return Err("egress_mb_s: wanted 1 or more, got 0".to_owned());
        }
        if self.warp != 32 && self.warp != 64 {
            return Err(format!("warp: wanted 32 or 64, got {}", self.warp));
        }
        let again = |other: &&Self| {
            other.name == self.name || (other.bus.is_some() && other.bus == self.bus)
        };
        match before.iter().position(|other| again(&other)) {
            Some(other) => Err(format!("wanted a name and a bus of its own, got those of {other}")),
            None => Ok(()),
        }
    }

    /// The machine that it is, as far as a plan asks: nothing can run on it.
    ///
    /// # Errors
    /// What is missing in it, in words.
    pub fn recorded(&self) -> std::result::Result<Recorded, String> {
        let platform = match (self.arch.split_at_checked(3), self.shared_bytes, self.memory_bytes) {
            (_, 0, _) => return Err("shared_bytes: wanted 1 or more, got 0".to_owned()),
            (_, _, 0) => return Err("memory_bytes: wanted 1 or more, got 0".to_owned()),
            (Some(("sm_", _)), ..) => Platform::Cuda,
            (Some(("gfx", _)), ..) => Platform::Hip,
            _ => return Err(format!("arch: wanted sm_.. or gfx.., got {:?}", self.arch)),
        };
        let info = MachineInfo {
            name: self.name.clone(),
            model: self.model.clone(),
            arch: self.arch.clone(),
            multiprocessors: self.multiprocessors,
            chiplets: self.chiplets,
            shared_bytes: self.shared_bytes,
            memory_bytes: self.memory_bytes,
            free_bytes: self.memory_bytes,
        };
        Ok(Recorded { info, platform, warp: self.warp })
    }

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
    /// Its kind.
    pub via: Via,
    /// MB/s in one direction.
    pub mb_s: u64,
    /// Whether each may map the other's memory; nothing where no driver was asked.
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
    /// Unknown.
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
            arch: name.split(':').next().unwrap_or(name).to_owned(),
            bus: None,
            numa: None,
            multiprocessors: multiprocessors / ranks.max(1),
            warp: 32,
            shared_bytes: 0,
            memory_bytes: 0,
            chiplets: 1,
            io_dies: 1,
            threads,
            egress_mb_s: 1_000_000 / u64::from(ranks.max(1)),
        };
        let link = |a, b| Link { a, b, via: Via::Same, mb_s: 1_000_000, peer_access: Some(true) };
        Self {
            version: VERSION,
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

    /// The slowest link, which sets the pace of all.
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
        let mut part = Self { gpus: Vec::new(), links: Vec::new(), ..self.clone() };
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

    /// The part of it that `--device` names: `cuda:0,1` or `hip:3` by the names of its GPUs, `auto`
    /// for all.
    ///
    /// # Errors
    /// [`Error::Topology`] for a name that is not among them.
    pub fn named(&self, device: &str) -> Result<Self> {
        if device == "auto" {
            return Ok(self.clone());
        }
        let (kind, list) = device.split_once(':').unwrap_or((device, "0"));
        let find = |number: &str| {
            let name = format!("{kind}:{number}");
            let found = self.gpus.iter().position(|gpu| gpu.name == name);
            found.map(|at| at as u32).ok_or_else(|| {
                let all: Vec<_> = self.gpus.iter().map(|gpu| gpu.name.as_str()).collect();
                self.fault(&format!("device {name}: wanted one of {}", all.join(", ")))
            })
        };
        let found = list.split(',').map(find).collect::<Result<Vec<_>>>()?;
        self.subset(&found)
    }

    /// Whether it can be: every pair has one link, numbers are in range, nothing contradicts.
    ///
    /// # Errors
    /// [`Error::Topology`] with the first that is wrong: where, wanted, got.
    pub fn check(&self) -> Result<()> {
        let fault = |detail: String| Err(self.fault(&detail));
        if self.version != VERSION {
            return fault(format!("version: wanted {VERSION}, got {}", self.version));
        }
        let ranks = self.gpus.len() as u32;
        if ranks == 0 {
            return fault("gpus: wanted 1 or more, got none".to_owned());
        }
        for (rank, gpu) in self.gpus.iter().enumerate() {
            if let Err(detail) = gpu.check(&self.gpus[..rank]) {
                return fault(format!("GPU {rank}: {detail}"));
            }
        }
        for (at, link) in self.links.iter().enumerate() {
            if let Err(detail) = self.check_link(link, &self.links[..at]) {
                return fault(format!("link {}-{}: {detail}", link.a, link.b));
            }
        }
        match pairs(ranks).find(|(a, b)| self.link(*a, *b).is_none()) {
            Some((a, b)) => fault(format!("GPUs {a} and {b}: wanted 1 link, got 0")),
            None => Ok(()),
        }
    }

    fn check_link(&self, link: &Link, before: &[Link]) -> std::result::Result<(), String> {
        let (a, b) = (link.a, link.b);
        if a == b {
            return Err("wanted two GPUs, got one and the same".to_owned());
        }
        let ends = [a, b].map(|end| self.gpus.get(end as usize).ok_or(end));
        let ends = match ends {
            [Ok(a), Ok(b)] => [a, b],
            [Err(end), _] | [_, Err(end)] => {
                return Err(format!("GPU {end}: wanted 0 to {}", self.gpus.len() - 1))
            }
        };
        let same =
            |other: &&Link| (other.a.min(other.b), other.a.max(other.b)) == (a.min(b), a.max(b));
        if let Some(other) = before.iter().find(same) {
            let alike = (other.via, other.mb_s, other.peer_access);
            return Err(if alike == (link.via, link.mb_s, link.peer_access) {
                "wanted 1 for the pair, got 2".to_owned()
            } else {
                format!(
                    "wanted the same both ways, got {} of {} MB/s and {} of {} MB/s",
                    other.via, other.mb_s, link.via, link.mb_s
                )
            });
        }
        if a > b {
            return Err(format!("wanted the smaller number first, \"a\": {b}, \"b\": {a}"));
        }
        let (least, all) = (1, ends.map(|gpu| gpu.egress_mb_s));
        let most = all[0].min(all[1]);
        if link.via != Via::Same && !(least..=most).contains(&link.mb_s) {
            return Err(format!(
                "mb_s: wanted 1 to {most}, all that a GPU sends, got {}",
                link.mb_s
            ));
        }
        match (link.via, ends[0].numa, ends[1].numa) {
            (Via::Nvlink { links: 0 } | Via::Xgmi { links: 0 }, ..) => {
                Err("links: wanted 1 or more, got 0".to_owned())
            }
            (Via::Socket, Some(one), Some(other)) if one == other => {
                Err(format!("wanted two sockets, got NUMA node {one} at both ends"))
            }
            _ => Ok(()),
        }
    }

    /// From a file that [`Topology::save`] or a person wrote.
    ///
    /// # Errors
    /// [`Error::Topology`] with the file and what is wrong in it.
    pub fn load(path: &Path) -> Result<Self> {
        /// What every version has: files of another are told by it, not by what else they hold.
        #[derive(Deserialize)]
        struct Versioned {
            version: Option<u32>,
        }
        let fault = |detail: String| Error::Topology { path: path.to_path_buf(), detail };
        let bytes = kie_kernels::file::read(path, FILE_BYTES_MAX).map_err(fault)?;
        let text = String::from_utf8(bytes).map_err(|error| fault(error.to_string()))?;
        let broken = |error: serde_json::Error| fault(format!("no topology: {error}"));
        let first: Versioned = serde_json::from_str(&text).map_err(broken)?;
        if first.version != Some(VERSION) {
            let got = first.version.map_or("none".to_owned(), |version| version.to_string());
            return Err(fault(format!("version: wanted {VERSION}, got {got}")));
        }
        let this: Self = serde_json::from_str(&text).map_err(broken)?;
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

/// A device's name without `topology=FILE`, which a simulator's name may have: what the file says
/// of its first GPU stands there instead, as far as the name says nothing of its own, and one rank
/// a GPU of the file unless the name has `ranks`. Beside it the part of the file that is simulated.
///
/// # Errors
/// [`Error::Topology`] for the file, or a number of ranks that it has not.
pub fn simulated(device: &str) -> Result<(String, Option<Topology>)> {
    let Some(list) = device.strip_prefix("sim:").filter(|list| list.contains("topology=")) else {
        return Ok((device.to_owned(), None));
    };
    let parts: Vec<_> =
        list.split(',').map(|part| part.split_once('=').unwrap_or((part, ""))).collect();
    let file: Vec<_> = parts.iter().filter(|(key, _)| *key == "topology").collect();
    let path = Path::new(file.first().map_or("", |(_, file)| file));
    let fault = |detail: String| Error::Topology { path: path.to_path_buf(), detail };
    if file.len() > 1 {
        return Err(fault(format!("{device}: topology stands twice")));
    }
    let all = Topology::load(path)?;
    let said = |key: &str| parts.iter().find(|(said, _)| *said == key).map(|(_, value)| *value);
    let ranks = said("ranks").map_or(Some(all.ranks()), |ranks| ranks.parse().ok());
    let Some(ranks) = ranks.filter(|ranks| (1..=all.ranks()).contains(ranks)) else {
        let got = said("ranks").unwrap_or("nothing");
        return Err(fault(format!("ranks: wanted 1 to {}, got {got}", all.ranks())));
    };
    let gpu = &all.gpus[0];
    let ours = [
        ("ranks", ranks as u32),
        ("warp", gpu.warp),
        ("blocks", gpu.multiprocessors),
        ("chiplets", gpu.chiplets),
        ("shared", gpu.shared_bytes),
    ];
    let ours = ours.into_iter().filter(|(key, _)| said(key).is_none());
    let ours = ours.map(|(key, value)| format!("{key}={value}"));
    let theirs = parts.iter().filter(|(key, _)| *key != "topology");
    let theirs = theirs.map(|(key, value)| match value.is_empty() {
        true => (*key).to_owned(),
        false => format!("{key}={value}"),
    });
    let name = format!("sim:{}", ours.chain(theirs).collect::<Vec<_>>().join(","));
    let part = all.subset(&(0..ranks as u32).collect::<Vec<_>>())?;
    Ok((name, Some(part)))
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
    pub fn discover(machines: &[Arc<dyn Machine>]) -> Result<Self> {
        crate::discover::discover(machines, &crate::discover::System::usual())
    }

    /// The machines that it describes, for planning: nothing can run on them.
    ///
    /// # Errors
    /// [`Error::Topology`] with what is missing in a GPU.
    pub fn machines(&self) -> Result<Vec<Arc<dyn Machine>>> {
        let one = |(rank, gpu): (usize, &Gpu)| -> Result<Arc<dyn Machine>> {
            let machine = gpu.recorded();
            Ok(Arc::new(machine.map_err(|why| self.fault(&format!("GPU {rank}: {why}")))?))
        };
        self.gpus.iter().enumerate().map(one).collect()
    }
}
