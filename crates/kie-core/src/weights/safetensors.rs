//! One mapped safetensors file (format: the `safetensors` repository, README): eight bytes of
//! header length, a JSON header, the data.
//!
//! Invariant: the tensors of an opened file tile its data exactly, without gap or overlap, each
//! named once and as long as its shape and type say.

use std::fs::{File, Metadata};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use kie_kernels::abi::{Codes, Dtype};
use serde_json::Value;

use super::guard::Guard;
use crate::error::{Error, Result};
use crate::gguf::{self, Gguf};
use crate::json;

/// Longest header that is read, in bytes.
const MAX_HEADER: u64 = 100 << 20;

/// A file mapped read-only.
pub struct Mapped {
    path: PathBuf,
    // Before the map, which must outlive it.
    guard: Guard,
    map: memmap2::Mmap,
    file: File,
    written: Option<SystemTime>,
}

impl AsRef<[u8]> for Mapped {
    fn as_ref(&self) -> &[u8] {
        &self.map
    }
}

/// Where a tensor is.
#[derive(Clone)]
pub(super) struct Entry {
    /// Its type as the file names it.
    pub stored: String,
    /// Its type, if kie knows numbers of it.
    pub dtype: Option<Dtype>,
    /// The codes that are its numbers, if it needs no scheme to be understood.
    pub codes: Option<Codes>,
    pub shape: Vec<usize>,
    /// From the start of the file.
    pub offset: usize,
    pub len: usize,
}

impl Mapped {
    /// Maps a file.
    pub(super) fn open(path: &Path) -> Result<Arc<Self>> {
        let failed = |e: std::io::Error| Error::load(path, "a readable file", e.to_string());
        let kind = if gguf::is_gguf(path) { "a GGUF file" } else { "a safetensors file" };
        let wrong = |got: &str| Error::load(path, kind, got);
        let (file, bytes) = kie_kernels::file::open(path).map_err(|got| wrong(&got))?;
        if bytes < 8 {
            return Err(wrong("less than 8 bytes"));
        }
        let about = file.metadata().map_err(failed)?;
        // SAFETY: the map is read-only and private. Where the file is cut short its guard puts
        // zeros; what others write to it may be read as anything, and is plain bytes whatever it
        // is; `unchanged` tells of both.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(failed)?;
        if map.len() < 8 {
            return Err(wrong("less than 8 bytes"));
        }
        // A hint: a file system that does not take it is only slower.
        let _ = map.advise(memmap2::Advice::WillNeed);
        let (guard, written) = (Guard::over(&map), written(&about));
        Ok(Arc::new(Self { path: path.to_owned(), guard, map, file, written }))
    }

    /// Whether the file is as long and as old as when it was opened, and could be read.
    pub(super) fn unchanged(&self) -> Result<()> {
        let wanted = "the same file from beginning to end of loading";
        let changed = |got: String| Err(Error::load(&self.path, wanted, got));
        let about = match self.file.metadata() {
            Ok(about) => about,
            Err(error) => return changed(error.to_string()),
        };
        if about.len() != self.map.len() as u64 {
            return changed(format!("{} bytes, then {}", self.map.len(), about.len()));
        }
        if self.guard.is_cut() {
            return changed("pages that could not be read".to_owned());
        }
        if written(&about) != self.written {
            return changed("one that was written to meanwhile".to_owned());
        }
        Ok(())
    }

    /// The tensors by name, in the order of their bytes.
    pub(super) fn entries(&self) -> Result<Vec<(String, Entry)>> {
        if gguf::is_gguf(&self.path) {
            return self.gguf_entries();
        }
        let wrong = |got: String| Error::load(&self.path, "a safetensors header", got);
        let length = u64::from_le_bytes(self.map[..8].try_into().expect("8 bytes"));
        if length > MAX_HEADER || length > self.map.len() as u64 - 8 {
            let file = self.map.len();
            return Err(wrong(format!("a header of {length} bytes in a file of {file}")));
        }
        let start = 8 + length as usize;
        let header = json::parse(&self.map[8..start]).map_err(|e| wrong(e.to_string()))?;
        let Value::Object(header) = header else { return Err(wrong("no object".to_owned())) };
        let tensors = header.into_iter().filter(|(name, _)| name != "__metadata__");
        let mut entries = tensors
            .map(|(name, info)| {
                let entry = self.entry(&name, &info, start)?;
                Ok((name, entry))
            })
            .collect::<Result<Vec<_>>>()?;
        entries.sort_by_key(|(_, e)| (e.offset, e.len));
        let mut end = start;
        for (name, entry) in &entries {
            if entry.offset != end {
                let want = format!("bytes from {}, where the last tensor ends", end - start);
                let got = format!("from {}", entry.offset - start);
                return Err(Error::tensor(&self.path, name, want, got));
            }
            end += entry.len;
        }
        if end != self.map.len() {
            let got = format!("{} bytes", self.map.len());
            return Err(Error::load(&self.path, format!("{end} bytes, as its header says"), got));
        }
        Ok(entries)
    }

    fn gguf_entries(&self) -> Result<Vec<(String, Entry)>> {
        let file = Gguf::parse(&self.path, &self.map)?;
        let entry = |info: gguf::Info| {
            let gguf::Info { name, stored, codes, shape, offset, len } = info;
            (name, Entry { stored, dtype: None, codes, shape, offset, len })
        };
        Ok(file.tensors.into_iter().map(entry).collect())
    }

    /// What a GGUF file says before its data.
    ///
    /// # Errors
    /// As [`Gguf::parse`], and for a file that cannot be mapped.
    pub(crate) fn gguf(path: &Path) -> Result<Gguf> {
        let file = Self::open(path)?;
        Gguf::parse(path, &file.map)
    }

    /// One entry of the header; `start` is where the data begin. Its bytes are inside the file and
    /// as many as its shape and type say.
    fn entry(&self, name: &str, info: &Value, start: usize) -> Result<Entry> {
        let wrong = |want: &str, got: &Value| {
            Error::tensor(
                &self.path,
                name,
                want,
                got.to_string().chars().take(80).collect::<String>(),
            )
        };
        let numbers = |value: &Value| -> Option<Vec<usize>> {
            let number = |v: &Value| v.as_u64().and_then(|n| usize::try_from(n).ok());
            value.as_array()?.iter().map(number).collect()
        };
        let stored = info["dtype"].as_str().ok_or_else(|| wrong("a dtype", info))?.to_owned();
        let shape = numbers(&info["shape"]).ok_or_else(|| wrong("a shape", info))?;
        let size = self.map.len() - start;
        let offsets = numbers(&info["data_offsets"]);
        let Some([begin, end]) = offsets.as_deref().and_then(|o| <[usize; 2]>::try_from(o).ok())
        else {
            return Err(wrong("two data_offsets", info));
        };
        if begin > end || end > size {
            let want = format!("data_offsets inside the {size} bytes of data");
            return Err(wrong(&want, &info["data_offsets"]));
        }
        let dtype = dtype(&stored);
        let size = dtype.map(Dtype::bytes).or_else(|| integer_bytes(&stored));
        if let Some(size) = size {
            let bytes = shape.iter().try_fold(size, |n, d| n.checked_mul(*d));
            if bytes != Some(end - begin) {
                let want = format!("{stored} {shape:?}");
                let got = format!("{} bytes", end - begin);
                return Err(Error::tensor(&self.path, name, want, got));
            }
        }
        let codes = dtype.and_then(Codes::plain);
        Ok(Entry { stored, dtype, codes, shape, offset: start + begin, len: end - begin })
    }
}

/// When it was written to last; `None` on systems that do not know.
fn written(about: &Metadata) -> Option<SystemTime> {
    about.modified().ok()
}

/// The types that kie computes with, under their names in the format.
fn dtype(name: &str) -> Option<Dtype> {
    match name {
        "F32" => Some(Dtype::F32),
        "F16" => Some(Dtype::F16),
        "BF16" => Some(Dtype::Bf16),
        "F8_E4M3" => Some(Dtype::F8E4m3),
        "F8_E8M0" => Some(Dtype::F8E8m0),
        _ => None,
    }
}

/// Bytes of the integers that packed codes are stored as.
fn integer_bytes(name: &str) -> Option<usize> {
    match name {
        "I8" | "U8" => Some(1),
        "I32" => Some(4),
        "I64" => Some(8),
        _ => None,
    }
}
