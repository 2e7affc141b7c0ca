//! One GGUF file (format: ggml's `docs/gguf.md`, versions 2 and 3): metadata, the list of tensors,
//! their data. It is a container of weights like safetensors, and its metadata take the place of
//! `config.json` and `tokenizer.json`.
//!
//! Invariants: nothing is allocated for a length before that many bytes are known to be there; all
//! tensors lie inside the file and are as long as their shape and type say.

pub(crate) mod model;

use std::path::Path;

use kie_kernels::abi::Codes;
use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// Most tensors, and most keys of metadata.
const COUNT_MAX: u64 = 1 << 17;
/// Most dimensions of a tensor.
const DIMS_MAX: u32 = 4;

/// Whether a path names a GGUF file.
pub(crate) fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|end| end == "gguf") && !path.is_dir()
}

/// A tensor of the file.
#[derive(Debug)]
pub(crate) struct Info {
    pub name: String,
    /// Its type as ggml names it, or its number.
    pub stored: String,
    /// What kie computes with; none: it does not know the type.
    pub codes: Option<Codes>,
    /// Slowest dimension first.
    pub shape: Vec<usize>,
    /// From the start of the file.
    pub offset: usize,
    pub len: usize,
}

/// What stands before the data.
pub(crate) struct Gguf {
    pub metadata: Map<String, Value>,
    pub tensors: Vec<Info>,
}

/// A type that kie reads, by its number in the format.
fn codes(kind: u32) -> Option<Codes> {
    match kind {
        0 => Some(Codes::F32),
        1 => Some(Codes::F16),
        2 => Some(Codes::Q4x0),
        8 => Some(Codes::Q8x0),
        12 => Some(Codes::Q4k),
        14 => Some(Codes::Q6k),
        30 => Some(Codes::Bf16),
        _ => None,
    }
}

struct Reader<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn wrong(&self, field: &str, wanted: impl Into<String>, got: impl Into<String>) -> Error {
        Error::tensor(self.path, field, wanted.into(), got.into())
    }

    fn take(&mut self, field: &str, len: u64) -> Result<&'a [u8]> {
        let left = self.bytes.len() - self.at;
        if len > left as u64 {
            let (want, got) = (format!("{len} bytes at {}", self.at), format!("{left} to its end"));
            return Err(self.wrong(field, want, got));
        }
        let bytes = &self.bytes[self.at..self.at + len as usize];
        self.at += len as usize;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self, field: &str) -> Result<[u8; N]> {
        let bytes = self.take(field, N as u64)?;
        Ok(bytes.try_into().expect("as many as were taken"))
    }

    fn u32(&mut self, field: &str) -> Result<u32> {
        self.array(field).map(u32::from_le_bytes)
    }

    fn u64(&mut self, field: &str) -> Result<u64> {
        self.array(field).map(u64::from_le_bytes)
    }

    fn count(&mut self, field: &str) -> Result<u64> {
        match self.u64(field)? {
            count if count <= COUNT_MAX => Ok(count),
            count => Err(self.wrong(field, format!("at most {COUNT_MAX}"), count.to_string())),
        }
    }

    fn text(&mut self, field: &str) -> Result<String> {
        let len = self.u64(field)?;
        let bytes = self.take(field, len)?;
        let text = std::str::from_utf8(bytes);
        let text = text.map_err(|_| self.wrong(field, "UTF-8", "other bytes"))?;
        Ok(text.to_owned())
    }

    /// Bytes of the shortest value of a type.
    fn least(kind: u32) -> u64 {
        match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            _ => 8,
        }
    }

    fn value(&mut self, field: &str, kind: u32) -> Result<Value> {
        Ok(match kind {
            0 => self.array::<1>(field)?[0].into(),
            1 => i8::from_le_bytes(self.array(field)?).into(),
            2 => u16::from_le_bytes(self.array(field)?).into(),
            3 => i16::from_le_bytes(self.array(field)?).into(),
            4 => self.u32(field)?.into(),
            5 => i32::from_le_bytes(self.array(field)?).into(),
            // The shortest digits that mean the number: 1e-5 stays 1e-5.
            6 => {
                let number = f32::from_le_bytes(self.array(field)?);
                number.to_string().parse::<f64>().map_or(Value::Null, Value::from)
            }
            7 => (self.array::<1>(field)?[0] != 0).into(),
            8 => self.text(field)?.into(),
            10 => self.u64(field)?.into(),
            11 => i64::from_le_bytes(self.array(field)?).into(),
            12 => f64::from_le_bytes(self.array(field)?).into(),
            other => return Err(self.wrong(field, "a type 0 to 12", other.to_string())),
        })
    }

    /// A value or a flat list of them.
    fn metadata(&mut self, field: &str) -> Result<Value> {
        const LIST: u32 = 9;
        let kind = self.u32(field)?;
        if kind != LIST {
            return self.value(field, kind);
        }
        let (kind, len) = (self.u32(field)?, self.u64(field)?);
        let left = (self.bytes.len() - self.at) as u64;
        if kind == LIST || len > left / Self::least(kind) {
            let got = format!("{len} values of type {kind} in {left} bytes");
            return Err(self.wrong(field, "a flat list inside the file", got));
        }
        (0..len).map(|_| self.value(field, kind)).collect::<Result<Vec<_>>>().map(Value::Array)
    }

    /// One tensor; its offset counts from where the data begin.
    fn tensor(&mut self, number: u64) -> Result<Info> {
        let name = self.text(&format!("name of tensor {number}"))?;
        let dims = self.u32(&name)?;
        if dims == 0 || dims > DIMS_MAX {
            let want = format!("1 to {DIMS_MAX} dimensions");
            return Err(self.wrong(&name, want, dims.to_string()));
        }
        let mut shape = Vec::new();
        for _ in 0..dims {
            let size = self.u64(&name)?;
            shape.push(usize::try_from(size).unwrap_or(usize::MAX));
        }
        shape.reverse();
        let kind = self.u32(&name)?;
        let offset = usize::try_from(self.u64(&name)?).unwrap_or(usize::MAX);
        let codes = codes(kind);
        let stored = codes.map_or_else(|| format!("ggml type {kind}"), |c| c.name().to_owned());
        let mut len = 0;
        if let Some(codes) = codes {
            let piece = codes.row().numbers as usize;
            let cols = shape[shape.len() - 1];
            let numbers = shape.iter().try_fold(1_usize, |n, d| n.checked_mul(*d));
            let pieces = numbers.map(|n| n / piece);
            let bytes = pieces.and_then(|n| n.checked_mul(codes.bytes_of(piece)));
            match bytes {
                Some(bytes) if cols.is_multiple_of(piece) => len = bytes,
                Some(_) | None => {
                    let want = format!("rows of a multiple of {piece} numbers");
                    return Err(self.wrong(&name, want, format!("{shape:?}")));
                }
            }
        }
        Ok(Info { name, stored, codes, shape, offset, len })
    }
}

impl Gguf {
    /// Reads what stands before the data of a file whose bytes are given.
    ///
    /// # Errors
    /// [`Error::Load`] names the file and the field.
    pub(crate) fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader { path, bytes, at: 0 };
        let magic = reader.array::<4>("magic")?;
        if &magic != b"GGUF" {
            return Err(reader.wrong("magic", "GGUF", format!("{magic:?}")));
        }
        match reader.u32("version")? {
            2 | 3 => {}
            other => return Err(reader.wrong("version", "2 or 3", other.to_string())),
        }
        let (tensors, keys) = (reader.count("tensor count")?, reader.count("metadata count")?);
        let mut metadata = Map::new();
        for number in 0..keys {
            let key = reader.text(&format!("key {number}"))?;
            let value = reader.metadata(&key)?;
            if metadata.insert(key.clone(), value).is_some() {
                return Err(reader.wrong(&key, "each key once", "it stands twice"));
            }
        }
        let mut list = Vec::new();
        for number in 0..tensors {
            list.push(reader.tensor(number)?);
        }
        let align = match metadata.get("general.alignment").map(Value::as_u64) {
            None => 32,
            Some(Some(align)) if align.is_power_of_two() && align <= 1 << 20 => align as usize,
            Some(other) => {
                let got = format!("{other:?}");
                return Err(reader.wrong("general.alignment", "a power of two", got));
            }
        };
        let data = reader.at.next_multiple_of(align);
        for tensor in &mut list {
            let end = tensor.offset.checked_add(data).and_then(|at| at.checked_add(tensor.len));
            if end.is_none_or(|end| end > bytes.len()) || !tensor.offset.is_multiple_of(align) {
                let want = format!("{} bytes at a multiple of {align} in the file", tensor.len);
                let got = format!("offset {} in {} bytes", tensor.offset, bytes.len());
                return Err(reader.wrong(&tensor.name, want, got));
            }
            tensor.offset += data;
        }
        Ok(Self { metadata, tensors: list })
    }
}
