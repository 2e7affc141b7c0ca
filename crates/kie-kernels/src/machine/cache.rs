//! Compiled kernels on disk, one file for each key, for any number of processes at once.
//!
//! An entry is `magic, length, hash, payload`; it appears by a rename of a finished and synced
//! file, so a reader sees all of it or nothing. What does not match its header counts as absent and
//! is replaced by the next publication. The cache only saves time: whatever fails here is told, and
//! the caller goes on without.
//!
//! A publication also clears up: broken entries, drafts that nobody writes any more, and what was
//! used the longest ago beyond [`Bounds`]. Whoever has an entry open keeps it.
//!
//! Hashes are FNV-1a of 128 bits: stable over builds and machines, and accidental collisions are
//! out of reach. It is no defence against somebody who may write into the folder.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use crate::file;

const MAGIC: &[u8; 8] = b"kie-bin1";
const HEADER_BYTES: usize = 8 + 8 + 16;
/// Longer files are not ours.
const ENTRY_BYTES_MAX: u64 = 1 << 30;
/// A draft that was begun so long ago will not be finished.
const DRAFT_AGE_MAX: Duration = Duration::from_secs(3600);

/// How much is kept: a model has 3 kernels of about 200 KB.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    pub(crate) entries: usize,
    pub(crate) bytes: u64,
}

const BOUNDS: Bounds = Bounds { entries: 64, bytes: 256 << 20 };

/// A folder of compiled kernels, or nothing where there is no place for one.
#[derive(Debug, Clone)]
pub struct Cache {
    folder: Option<PathBuf>,
    bounds: Bounds,
}

/// Name of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(u128);

impl Key {
    /// The key of a result that depends on all `parts`, in order.
    pub fn of(parts: &[&[u8]]) -> Self {
        // Each length goes in first: moving a byte from one part to the next is another key.
        let hash = parts.iter().fold(FNV_START, |hash, part| {
            fnv128(fnv128(hash, &(part.len() as u64).to_le_bytes()), part)
        });
        Self(hash)
    }
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

const FNV_START: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
const FNV_PRIME: u128 = (1 << 88) + 0x13b;

fn fnv128(start: u128, bytes: &[u8]) -> u128 {
    bytes.iter().fold(start, |hash, &byte| (hash ^ u128::from(byte)).wrapping_mul(FNV_PRIME))
}

impl Cache {
    /// In this folder, which is made when the first entry comes.
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Self { folder: Some(folder.into()), bounds: BOUNDS }
    }

    /// `$KIE_CACHE`, or else `kie/kernels` in the user's folder of caches.
    pub fn usual() -> Self {
        let set = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let user = || set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")));
        let folder = set("KIE_CACHE").or_else(|| Some(user()?.join("kie/kernels")));
        Self { folder, bounds: BOUNDS }
    }

    /// Keeps other than the usual number of entries.
    pub(crate) fn bounded(self, bounds: Bounds) -> Self {
        Self { bounds, ..self }
    }

    /// Where entries are, if anywhere.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// The payload under `key`; nothing if there is none, or only a broken one.
    pub fn get(&self, key: Key) -> Option<Vec<u8>> {
        let path = self.entry(key)?;
        let mut entry = file::read(&path, ENTRY_BYTES_MAX).ok()?;
        if entry.len() < HEADER_BYTES {
            return None;
        }
        let payload = entry.split_off(HEADER_BYTES);
        let whole = entry == header(&payload);
        if whole {
            // Its last use. Where the file is somebody else's, it only looks older than it is.
            let _ = File::open(&path).and_then(|file| file.set_modified(SystemTime::now()));
        }
        whole.then_some(payload)
    }

    /// Publishes `payload` under `key`, in place of what was there.
    ///
    /// # Errors
    /// A note for the user: what could not be written, and what to do.
    pub fn put(&self, key: Key, payload: &[u8]) -> Result<(), String> {
        let Some(entry) = self.entry(key) else {
            return Err("compiled kernels are not kept: neither KIE_CACHE nor HOME is set".into());
        };
        publish(&entry, payload).map_err(|(path, error)| {
            format!(
                "compiled kernels are not kept: {}: {error}; set KIE_CACHE to a folder that can \
                 be written",
                path.display()
            )
        })?;
        prune(&entry, self.bounds);
        Ok(())
    }

    fn entry(&self, key: Key) -> Option<PathBuf> {
        Some(self.folder.as_ref()?.join(format!("{:032x}.bin", key.0)))
    }
}

fn header(payload: &[u8]) -> Vec<u8> {
    let mut header = MAGIC.to_vec();
    header.extend((payload.len() as u64).to_le_bytes());
    header.extend(fnv128(FNV_START, payload).to_le_bytes());
    header
}

fn publish(entry: &Path, payload: &[u8]) -> Result<(), (PathBuf, std::io::Error)> {
    static TURN: AtomicU64 = AtomicU64::new(0);
    let folder = entry.parent().unwrap_or(Path::new("."));
    // Only for this user: kernels that others may write are kernels that others may choose.
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made.map_err(|error| (folder.to_path_buf(), error))?;
    let turn = TURN.fetch_add(1, Ordering::Relaxed);
    let draft = entry.with_extension(format!("{}.{turn}.tmp", std::process::id()));
    let written = write_synced(&draft, payload).and_then(|()| fs::rename(&draft, entry));
    written.map_err(|error| {
        // Nothing more can be done about a draft that cannot be removed either.
        let _ = fs::remove_file(&draft);
        (draft.clone(), error)
    })
}

/// Clears up beside a new entry. What cannot be looked at or removed stays: another process may
/// have been first.
fn prune(new: &Path, bounds: Bounds) {
    let Some(Ok(listed)) = new.parent().map(fs::read_dir) else { return };
    let (mut kept, mut bytes) = (Vec::new(), 0);
    for path in listed.flatten().map(|file| file.path()).filter(|path| path != new) {
        let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let Some((key, rest)) = name.split_once('.') else { continue };
        let Ok(about) = fs::metadata(&path) else { continue };
        if key.len() != 32 || !key.bytes().all(|b| b.is_ascii_hexdigit()) {
            continue;
        }
        let (used, length) = (about.modified().unwrap_or(SystemTime::UNIX_EPOCH), about.len());
        let age = SystemTime::now().duration_since(used).unwrap_or_default();
        let gone = match rest {
            "bin" => !is_whole(&path, length),
            draft => draft.ends_with(".tmp") && age > DRAFT_AGE_MAX,
        };
        if gone {
            let _ = fs::remove_file(&path);
        } else if rest == "bin" {
            bytes += length;
            kept.push((used, length, path));
        }
    }
    bytes += fs::metadata(new).map_or(0, |m| m.len());
    kept.sort();
    let mut entries = kept.len() + 1;
    for (_, length, path) in kept {
        if entries <= bounds.entries && bytes <= bounds.bytes {
            break;
        }
        let _ = fs::remove_file(&path);
        (entries, bytes) = (entries - 1, bytes - length);
    }
}

/// Whether a file is as long as its header says. Entries appear whole, so one that is not is
/// broken for good.
fn is_whole(path: &Path, length: u64) -> bool {
    let mut header = [0; HEADER_BYTES];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut header));
    let payload = length.checked_sub(HEADER_BYTES as u64).map(u64::to_le_bytes);
    read.is_ok() && header.starts_with(MAGIC) && payload.is_some_and(|n| header[8..16] == n)
}

fn write_synced(draft: &Path, payload: &[u8]) -> std::io::Result<()> {
    let mut file = File::create(draft)?;
    file.write_all(&header(payload))?;
    file.write_all(payload)?;
    file.sync_all()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// A folder that goes when the test ends.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path =
                std::env::temp_dir().join(format!("kie-cache-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            Self(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn the_hash_is_fnv1a() {
        assert_eq!(fnv128(FNV_START, b""), 0x6c62272e07bb014262b821756295c58d);
        assert_eq!(fnv128(FNV_START, b"a"), 0xd228cb696f1a8caf78912b704e4a8964);
        assert_ne!(Key::of(&[b"ab", b"c"]), Key::of(&[b"a", b"bc"]));
        assert_ne!(Key::of(&[b"a"]), Key::of(&[b"a", b""]));
    }

    #[test]
    fn what_was_put_is_found_and_only_that() {
        let folder = Folder::new("found");
        let cache = Cache::at(&folder.0);
        let (one, two) = (Key::of(&[b"one"]), Key::of(&[b"two"]));
        assert_eq!(cache.get(one), None);
        cache.put(one, b"first").unwrap();
        cache.put(one, b"second").unwrap();
        cache.put(two, b"").unwrap();
        assert_eq!(cache.get(one).as_deref(), Some(&b"second"[..]));
        assert_eq!(cache.get(two).as_deref(), Some(&b""[..]));
        assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 2, "no drafts are left");
    }

    #[test]
    fn every_broken_entry_counts_as_absent() {
        let folder = Folder::new("broken");
        let cache = Cache::at(&folder.0);
        let key = Key::of(&[b"key"]);
        cache.put(key, b"some payload").unwrap();
        let path = cache.entry(key).unwrap();
        let whole = fs::read(&path).unwrap();
        for bytes in 0..whole.len() {
            fs::write(&path, &whole[..bytes]).unwrap();
            assert_eq!(cache.get(key), None, "cut after {bytes} bytes");
        }
        for at in 0..whole.len() {
            let mut flipped = whole.clone();
            flipped[at] ^= 0x10;
            fs::write(&path, &flipped).unwrap();
            assert_eq!(cache.get(key), None, "byte {at} flipped");
        }
        fs::write(&path, [&whole[..], b"x"].concat()).unwrap();
        assert_eq!(cache.get(key), None, "one byte too many");
        cache.put(key, b"again").unwrap();
        assert_eq!(cache.get(key).as_deref(), Some(&b"again"[..]));
    }

    #[test]
    fn readers_never_see_half_an_entry() {
        let folder = Folder::new("concurrent");
        let cache = Cache::at(&folder.0);
        let key = Key::of(&[b"key"]);
        cache.put(key, &[0; 70_000]).unwrap();
        std::thread::scope(|scope| {
            let writers: Vec<_> = (1..4_u8)
                .map(|n| {
                    let cache = &cache;
                    scope.spawn(move || {
                        for _ in 0..20 {
                            cache.put(key, &vec![n; 70_000 + usize::from(n)]).unwrap();
                        }
                    })
                })
                .collect();
            while writers.iter().any(|w| !w.is_finished()) {
                let seen = cache.get(key).expect("an entry is always there and whole");
                assert_eq!(seen.len(), 70_000 + usize::from(seen[0]));
                assert!(seen.iter().all(|&byte| byte == seen[0]));
            }
        });
        assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 1, "no drafts are left");
    }

    fn aged(path: &Path, seconds: u64) {
        let file = File::options().write(true).open(path).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(seconds)).unwrap();
    }

    fn names(folder: &Folder) -> Vec<String> {
        let names = fs::read_dir(&folder.0).unwrap().map(|f| f.unwrap().file_name());
        let mut names: Vec<_> = names.map(|n| n.to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    #[test]
    fn what_was_used_the_longest_ago_goes() {
        let folder = Folder::new("bounds");
        let cache = Cache::at(&folder.0);
        let key = |n: usize| Key::of(&[&n.to_le_bytes()]);
        for n in 0..BOUNDS.entries + 3 {
            cache.put(key(n), b"payload").unwrap();
            aged(&cache.entry(key(n)).unwrap(), 1000 - n as u64);
            // The first one is in use all the time.
            assert!(cache.get(key(0)).is_some(), "{n}");
        }
        assert_eq!(names(&folder).len(), BOUNDS.entries);
        let there = |n: usize| cache.get(key(n)).is_some();
        assert!((1..=3).all(|n| !there(n)) && (4..BOUNDS.entries + 3).all(there));
        // The bound on bytes, which the new one alone may break.
        let new = cache.entry(key(BOUNDS.entries)).unwrap();
        let each = fs::metadata(&new).unwrap().len();
        prune(&new, Bounds { bytes: 3 * each, ..BOUNDS });
        assert_eq!(names(&folder).len(), 3);
        assert!(there(BOUNDS.entries));
        prune(&new, Bounds { bytes: 1, ..BOUNDS });
        assert_eq!(names(&folder), [new.file_name().unwrap().to_string_lossy()]);
    }

    #[test]
    fn what_is_broken_goes_and_what_is_not_ours_stays() {
        let folder = Folder::new("prune");
        let cache = Cache::at(&folder.0);
        let key = |n: u8| Key::of(&[&[n]]);
        (0..4).for_each(|n| cache.put(key(n), b"some payload").unwrap());
        let path = |n: u8| cache.entry(key(n)).unwrap();
        let whole = fs::read(path(0)).unwrap();
        fs::write(path(0), &whole[..whole.len() - 1]).unwrap();
        fs::write(path(1), &whole[..5]).unwrap();
        fs::write(path(2), [b"x", &whole[1..]].concat()).unwrap();
        let draft = |pid: u32| path(9).with_extension(format!("{pid}.0.tmp"));
        (1..3).for_each(|pid| fs::write(draft(pid), b"half").unwrap());
        aged(&draft(1), 2 * DRAFT_AGE_MAX.as_secs());
        for name in ["README", "notes.bin", "deadbeef.tmp"] {
            fs::write(folder.0.join(name), b"not ours").unwrap();
            aged(&folder.0.join(name), 1 << 20);
        }
        // Broken where it is published, broken where it is not looked at.
        cache.put(key(0), b"again").unwrap();
        assert_eq!(cache.get(key(0)).as_deref(), Some(&b"again"[..]));
        assert!(cache.get(key(3)).is_some());
        let name = |p: PathBuf| p.file_name().unwrap().to_string_lossy().into_owned();
        let mut wanted = vec![name(path(0)), name(path(3)), name(draft(2))];
        wanted.extend(["README", "notes.bin", "deadbeef.tmp"].map(str::to_owned));
        wanted.sort();
        assert_eq!(names(&folder), wanted);
    }

    #[test]
    fn a_folder_that_cannot_be_written_gives_a_note() {
        let folder = Folder::new("unwritable");
        fs::create_dir_all(&folder.0).unwrap();
        // A file where the folder should be: also refused to a superuser.
        let file = folder.0.join("file");
        fs::write(&file, b"").unwrap();
        let cache = Cache::at(file.join("kernels"));
        let note = cache.put(Key::of(&[b"key"]), b"payload").unwrap_err();
        assert!(note.contains("KIE_CACHE") && note.contains("file/kernels"), "{note}");
        assert_eq!(cache.get(Key::of(&[b"key"])), None);
        let nowhere = Cache { folder: None, bounds: BOUNDS };
        assert!(nowhere.put(Key::of(&[b"key"]), b"payload").unwrap_err().contains("HOME"));
    }
}
