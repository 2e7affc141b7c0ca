//! 20,000 broken model folders: config.json, the safetensors header, the index, the
//! generation_config. Whatever a mutation does, opening answers with a spec or a typed error, in
//! bounded time and without a panic. Seeded, so that a failure repeats: the case number is printed.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kie_core::model::Spec;
use kie_core::weights::Checkpoint;
use kie_core::Error;

const CASES: u64 = 20_000;

/// Far above what a case takes (0.2 ms), also on a busy machine.
const CASE_TIME_MAX: Duration = Duration::from_secs(5);

/// SplitMix64 (Steele et al., 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

/// Numbers, strings and structures that parsers trip over.
const HOSTILE: &[&str] = &[
    "-1",
    "0",
    "1e308",
    "1e999",
    "18446744073709551615",
    "9223372036854775808",
    "null",
    "true",
    "\"\"",
    "[]",
    "{}",
    "[[[[[[[[]]]]]]]]",
    "\"\\ud800\"",
    "\"F8_E4M3\"",
    "\"F64\"",
    "[0]",
    "[4294967295,4294967295]",
    "[1,1,1,1,1]",
    "0.5",
    "NaN",
    "\"../../etc/passwd\"",
    "16777217",
    "16777216",
    "4096",
    "[0,18446744073709551615]",
];

fn mutate(random: &mut Random, bytes: &mut Vec<u8>) {
    for _ in 0..1 + random.below(2) {
        let at = random.below(bytes.len());
        match random.below(7) {
            0 if !bytes.is_empty() => bytes[at] ^= 1 << random.below(8),
            1 => bytes.truncate(at),
            2 => {
                let end = (at + random.below(64)).min(bytes.len());
                bytes.drain(at..end);
            }
            3 => {
                let end = (at + random.below(256)).min(bytes.len());
                let copy = bytes[at..end].to_vec();
                let to = random.below(bytes.len());
                bytes.splice(to..to, copy);
            }
            4 | 5 => replace_value(random, bytes),
            _ => {
                let byte = random.next() as u8;
                bytes.insert(at.min(bytes.len()), byte);
            }
        }
        if bytes.is_empty() {
            return;
        }
    }
}

/// Puts something hostile in the place of a JSON value.
fn replace_value(random: &mut Random, bytes: &mut Vec<u8>) {
    let colons: Vec<usize> = (0..bytes.len()).filter(|i| bytes[*i] == b':').collect();
    if colons.is_empty() {
        return;
    }
    let begin = colons[random.below(colons.len())] + 1;
    let len = bytes[begin..].iter().position(|b| matches!(b, b',' | b'}' | b']')).unwrap_or(0);
    let value = HOSTILE[random.below(HOSTILE.len())];
    bytes.splice(begin..begin + len, value.bytes());
}

/// A folder with links to what stays whole and the mutated file in the place of the original.
struct Folder(PathBuf);

impl Folder {
    fn new(source: &Path) -> Self {
        let name = format!("kie-fuzz-{}-{:?}", std::process::id(), std::thread::current().id());
        let path = std::env::temp_dir().join(name);
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        for entry in source.read_dir().unwrap() {
            let entry = entry.unwrap();
            std::os::unix::fs::symlink(entry.path(), path.join(entry.file_name())).unwrap();
        }
        Self(path)
    }

    fn put(&self, name: &str, bytes: &[u8]) {
        let path = self.0.join(name);
        let _ = std::fs::remove_file(&path);
        std::fs::write(path, bytes).unwrap();
    }

    /// A weight file of a mutated header and, as a hole of zeros, the data it had.
    fn put_header(&self, random: &mut Random, whole: &[u8]) {
        let end = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
        let mut header = whole[..end].to_vec();
        if random.below(8) > 0 {
            // Past the parser more often than a wrong length would let it.
            header.drain(..8);
            mutate(random, &mut header);
            header.splice(..0, (header.len() as u64).to_le_bytes());
        } else {
            mutate(random, &mut header);
        }
        let len = header.len() + whole.len() - end;
        self.put("model.safetensors", &header);
        let mut options = std::fs::OpenOptions::new();
        let file = options.write(true).open(self.0.join("model.safetensors")).unwrap();
        file.set_len((len - random.below(2) * random.below(len)) as u64).unwrap();
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Opens the folder; the answer's kind.
fn open(folder: &Path) -> &'static str {
    let opened = Spec::read(folder).and_then(|spec| {
        let checkpoint = Checkpoint::open(folder, &spec)?;
        for tensor in &spec.tensors {
            // Touches every byte that a runner would touch.
            let _ = checkpoint.check_finite(checkpoint.tensor(tensor.role).unwrap());
        }
        Ok(())
    });
    match opened {
        Ok(()) => "opened",
        Err(error) => {
            let told = !error.hint().is_empty() || error.class() == "InvalidRequestError";
            assert!(!error.to_string().is_empty() && told);
            match error {
                Error::Load { tensor: Some(_), .. } => "key or tensor refused",
                Error::Load { tensor: None, .. } => "file refused",
                other => other.class(),
            }
        }
    }
}

#[test]
fn broken_folders_get_typed_errors() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data");
    let data = data.canonicalize().unwrap();
    let sources = ["qwen2", "llama", "laneformer_d2", "own_llama_fp8_tied"];
    let mut kinds = std::collections::BTreeMap::new();
    for (which, source) in sources.into_iter().enumerate() {
        let source = data.join(source);
        let folder = Folder::new(&source);
        let config = std::fs::read(source.join("config.json")).unwrap();
        let generation = std::fs::read(source.join("generation_config.json")).unwrap();
        let weights = std::fs::read(source.join("model.safetensors")).unwrap();
        for case in 0..CASES / sources.len() as u64 {
            let mut random = Random(case << 8 | which as u64);
            let name = match case % 8 {
                0 => "generation_config.json",
                1..=3 => "model.safetensors",
                _ => "config.json",
            };
            if name == "model.safetensors" {
                folder.put_header(&mut random, &weights);
            } else {
                let original = if name == "config.json" { &config } else { &generation };
                let mut bytes = original.clone();
                mutate(&mut random, &mut bytes);
                folder.put(name, &bytes);
            }
            let begun = Instant::now();
            let outcome = std::panic::catch_unwind(|| open(&folder.0));
            let kind = outcome.unwrap_or_else(|_| panic!("case {case} of {}", source.display()));
            assert!(begun.elapsed() < CASE_TIME_MAX, "case {case} of {}", source.display());
            *kinds.entry((name, kind)).or_insert(0) += 1;
            let _ = std::fs::remove_file(folder.0.join(name));
            std::os::unix::fs::symlink(source.join(name), folder.0.join(name)).unwrap();
        }
    }
    // The mutator must keep reaching all ends of each file, or it tests the JSON parser alone.
    for (name, kind) in [
        ("config.json", "file refused"),
        ("config.json", "key or tensor refused"),
        ("config.json", "UnsupportedModelError"),
        ("config.json", "opened"),
        ("generation_config.json", "file refused"),
        ("generation_config.json", "key or tensor refused"),
        ("generation_config.json", "opened"),
        ("model.safetensors", "file refused"),
        ("model.safetensors", "key or tensor refused"),
    ] {
        let count = kinds.get(&(name, kind)).copied().unwrap_or(0);
        assert!(count > 100, "{name} {kind}: {count} of {kinds:?}");
    }
}

/// The index of a sharded checkpoint, mutated.
#[test]
fn broken_indices_get_typed_errors() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../python/kie/demo");
    let demo = demo.canonicalize().unwrap();
    let folder = Folder::new(&demo);
    let name = "model.safetensors.index.json";
    let index = std::fs::read(demo.join(name)).unwrap();
    let spec = Spec::read(&demo).unwrap();
    let mut refused = 0;
    for case in 0..1_000 {
        let mut bytes = index.clone();
        mutate(&mut Random(case), &mut bytes);
        folder.put(name, &bytes);
        let opened = std::panic::catch_unwind(|| Checkpoint::open(&folder.0, &spec).map(drop));
        refused += usize::from(opened.unwrap_or_else(|_| panic!("case {case}")).is_err());
    }
    assert!(refused > 500, "{refused}");
}
