//! What this process may use of the machine's memory: control groups of both versions, at every
//! level above the process, and the limit on its address space.
//!
//! What a group counts as used holds cached files that give way (`inactive_file`); they are free.

use std::path::{Path, PathBuf};

/// A limit and what is free below it, in bytes; `u64::MAX`: none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Room {
    limit: u64,
    free: u64,
}

impl Room {
    const ALL: Self = Self { limit: u64::MAX, free: u64::MAX };

    fn and(self, other: Self) -> Self {
        Self { limit: self.limit.min(other.limit), free: self.free.min(other.free) }
    }

    fn below(limit: u64, used: u64) -> Self {
        Self { limit, free: limit.saturating_sub(used) }
    }
}

/// Total and available memory in bytes, the tightest of the machine's, the control groups' and the
/// address space's.
pub fn memory() -> (u64, u64) {
    let field = |text: &str, key: &str| {
        let line = text.lines().find(|l| l.starts_with(key))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok()
    };
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = field(&info, "MemTotal:").map_or_else(physical, |kb| kb * 1024);
    let free = field(&info, "MemAvailable:").map_or(total, |kb| kb * 1024);
    let room = room().and(Room { limit: total, free });
    (room.limit, room.free)
}

/// The tightest of all limits on this process.
fn room() -> Room {
    groups(Path::new("/")).and(address_space())
}

/// How one version of control groups spells it.
struct Names {
    file_system: &'static str,
    limit: &'static str,
    used: &'static str,
    cached: &'static str,
}

const V1: Names = Names {
    file_system: "cgroup",
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cached: "total_inactive_file ",
};
const V2: Names = Names {
    file_system: "cgroup2",
    limit: "memory.max",
    used: "memory.current",
    cached: "inactive_file ",
};

/// The tightest control group that this process is in. `root` stands for `/`.
fn groups(root: &Path) -> Room {
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap_or_default();
    let (memberships, mounts) = (read("proc/self/cgroup"), read("proc/self/mountinfo"));
    let mut room = Room::ALL;
    for line in memberships.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let names = match controllers {
            "" => V2,
            list if list.split(',').any(|name| name == "memory") => V1,
            _ => continue,
        };
        for (mount, inside) in mounts.lines().filter_map(|line| mounted(line, &names)) {
            // A mount may show a part of the tree only: that of a container, say.
            let Ok(rest) = Path::new(path).strip_prefix(inside) else { continue };
            let top = root.join(mount.trim_start_matches('/'));
            for folder in top.join(rest).ancestors().take_while(|f| f.starts_with(&top)) {
                room = room.and(group(folder, &names));
            }
        }
    }
    room
}

/// Where a line of mountinfo (proc(5)) mounts which part of this version's tree.
fn mounted<'a>(line: &'a str, names: &Names) -> Option<(&'a str, &'a str)> {
    let (left, right) = line.split_once(" - ")?;
    let mut kinds = right.split(' ');
    let options = kinds.clone().nth(2).unwrap_or_default();
    let is_ours = kinds.next() == Some(names.file_system)
        && (names.file_system == V2.file_system || options.split(',').any(|o| o == "memory"));
    let mut fields = left.split(' ').skip(3);
    let (inside, mount) = (fields.next()?, fields.next()?);
    is_ours.then_some((mount, inside))
}

fn group(folder: &Path, names: &Names) -> Room {
    let text = |name: &str| std::fs::read_to_string(folder.join(name)).ok();
    let number = |name: &str| text(name)?.trim().parse::<u64>().ok();
    let (Some(limit), Some(used)) = (number(names.limit), number(names.used)) else {
        return Room::ALL;
    };
    let stat = text("memory.stat").unwrap_or_default();
    let cached = stat.lines().find_map(|line| line.strip_prefix(names.cached)?.parse().ok());
    Room::below(limit, used.saturating_sub(cached.unwrap_or(0)))
}

/// `ulimit -v`, in bytes.
fn address_limit() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a valid rlimit to write to.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_AS, &mut limit) } == 0;
    (known && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// Has glibc's threads share one arena where address space is limited. An arena reserves 64 MB of
/// it; a thread that finds no room for its own takes a page for each allocation, however small, and
/// has soon taken all.
pub fn share_arenas() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    if address_limit().is_some() {
        // SAFETY: mallopt may be called at any time, by any thread.
        unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    }
}

/// Bytes of memory that the machine has, where nobody says how many are free.
fn physical() -> u64 {
    // SAFETY: sysconf has no preconditions.
    let pages = u64::try_from(unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) });
    pages.map_or(u64::MAX, |pages| pages.saturating_mul(page()))
}

fn page() -> u64 {
    // SAFETY: sysconf has no preconditions.
    u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

fn address_space() -> Room {
    let Some(limit) = address_limit() else { return Room::ALL };
    let statm = std::fs::read_to_string(PathBuf::from("/proc/self/statm")).unwrap_or_default();
    let pages: u64 = statm.split(' ').next().and_then(|n| n.parse().ok()).unwrap_or(0);
    Room::below(limit, pages.saturating_mul(page()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// A made `/` with these files.
    struct Root(PathBuf);

    impl Root {
        fn new(name: &str, files: &[(&str, &str)]) -> Self {
            let path = std::env::temp_dir().join(format!("kie-{name}-{}", std::process::id()));
            for (file, text) in files {
                let file = path.join(file);
                std::fs::create_dir_all(file.parent().unwrap()).unwrap();
                std::fs::write(file, text).unwrap();
            }
            Self(path)
        }
    }

    impl Drop for Root {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn the_tightest_of_nested_groups_counts() {
        let root = Root::new(
            "groups2",
            &[
                ("proc/self/cgroup", "0::/user.slice/job\n"),
                (
                    "proc/self/mountinfo",
                    "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n\
                     31 23 0:27 / /proc rw - proc proc rw\n",
                ),
                ("sys/fs/cgroup/user.slice/memory.max", "1000\n"),
                ("sys/fs/cgroup/user.slice/memory.current", "900\n"),
                ("sys/fs/cgroup/user.slice/memory.stat", "anon 200\ninactive_file 500\n"),
                ("sys/fs/cgroup/user.slice/job/memory.max", "max\n"),
                ("sys/fs/cgroup/user.slice/job/memory.current", "300\n"),
                ("sys/fs/cgroup/other/memory.max", "1\n"),
                ("sys/fs/cgroup/other/memory.current", "1\n"),
            ],
        );
        assert_eq!(groups(&root.0), Room { limit: 1000, free: 600 });
    }

    #[test]
    fn the_first_version_and_a_container_are_read_too() {
        let root = Root::new(
            "groups1",
            &[
                ("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/abc/inner\n0::/\n"),
                (
                    "proc/self/mountinfo",
                    "40 23 0:30 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                     41 23 0:31 /x /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n",
                ),
                ("sys/fs/cgroup/memory/memory.limit_in_bytes", "5000\n"),
                ("sys/fs/cgroup/memory/memory.usage_in_bytes", "100\n"),
                ("sys/fs/cgroup/memory/inner/memory.limit_in_bytes", "700\n"),
                ("sys/fs/cgroup/memory/inner/memory.usage_in_bytes", "90\n"),
                ("sys/fs/cgroup/memory/inner/memory.stat", "total_inactive_file 20\n"),
            ],
        );
        assert_eq!(groups(&root.0), Room { limit: 700, free: 630 });
        assert_eq!(groups(Path::new("/nowhere")), Room::ALL);
    }
}
