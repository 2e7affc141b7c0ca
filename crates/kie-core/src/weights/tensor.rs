//! A tensor of a checkpoint: slices of mapped files, and the rows that columns are repacked to.

use std::borrow::Cow;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kie_kernels::abi::{Codes, Encoding};
use kie_kernels::matrix::rows_of_columns;

use super::safetensors::{Entry, Mapped};
use crate::error::{Error, Result};
use crate::model::spec::{Role, TensorSpec};

/// A tensor of a checkpoint.
#[derive(Clone)]
pub struct Tensor {
    /// What it is for.
    pub role: Role,
    /// Its name in the checkpoint.
    pub name: String,
    /// The file it is in.
    pub path: PathBuf,
    /// How its numbers are stored.
    pub encoding: Encoding,
    /// Shape; lane tensors have the lane first.
    pub shape: Vec<usize>,
    /// Index into [`super::Checkpoint::files`].
    pub file: usize,
    /// Offset of its first byte in the file.
    pub offset: usize,
    /// Its scales, where the encoding has them beside the codes.
    pub scales: Option<Scales>,
    /// Stored rows, of numbers and of scales, from one row to the next.
    pub row_step: usize,
    /// Its numbers are `factor * (stored + one)`, of these two.
    pub adjusted: Option<(f32, f32)>,
    /// It is stored by columns: [`Tensor::parts`] has its rows.
    pub(super) repack: Option<Repack>,
    pub(super) bytes: Slice,
}

/// A tensor's codes, scales and zero points, by rows.
pub struct Parts<'a> {
    /// The codes.
    pub codes: Cow<'a, [u8]>,
    /// The scales beside them, if any.
    pub scales: Cow<'a, [u8]>,
    /// The zero points, if any.
    pub zeros: Cow<'a, [u8]>,
}

/// Scales of a tensor, `[lanes,] rows / group, cols / group` rounded up.
#[derive(Clone)]
pub struct Scales {
    /// Index into [`super::Checkpoint::files`].
    pub file: usize,
    /// Offset of the first byte in the file.
    pub offset: usize,
    pub(super) bytes: Slice,
}

/// Bytes of a mapped file.
#[derive(Clone)]
pub(super) struct Slice {
    map: Arc<Mapped>,
    offset: usize,
    len: usize,
}

impl Slice {
    /// Those of an entry of file number `file`.
    pub(super) fn of(files: &[Arc<Mapped>], file: usize, entry: &Entry) -> Self {
        Self { map: files[file].clone(), offset: entry.offset, len: entry.len }
    }

    /// Some rows of an entry that has `all` of them.
    pub(super) fn of_rows(
        map: &Arc<Mapped>,
        entry: &Entry,
        all: usize,
        rows: Range<usize>,
    ) -> Self {
        let row = entry.len / all;
        let (offset, len) = (entry.offset + rows.start * row, rows.len() * row);
        Self { map: Arc::clone(map), offset, len }
    }

    /// A part of it.
    pub(super) fn part(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        Self { map: Arc::clone(&self.map), offset: self.offset + range.start, len: range.len() }
    }

    /// Where it begins in its file.
    pub(super) fn offset(&self) -> usize {
        self.offset
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &(*self.map).as_ref()[self.offset..self.offset + self.len]
    }
}

impl Tensor {
    /// What is `wanted`, in file number `file`: rows one after another, without scales.
    pub(super) fn of(
        wanted: &TensorSpec,
        (file, path): (usize, &Path),
        encoding: Encoding,
        bytes: Slice,
    ) -> Self {
        Self {
            role: wanted.role,
            name: wanted.name.clone(),
            path: path.to_owned(),
            encoding,
            shape: wanted.shape.clone(),
            file,
            offset: bytes.offset(),
            scales: None,
            row_step: 1,
            adjusted: None,
            repack: None,
            bytes,
        }
    }

    /// The numbers, little-endian, row-major.
    pub fn bytes(&self) -> &[u8] {
        self.bytes.bytes()
    }

    /// Whether the file holds columns, so that rows have to be made of them.
    pub fn is_repacked(&self) -> bool {
        self.repack.is_some()
    }

    /// Of plain numbers that the file has by columns: where the first one stands, and how many
    /// stored rows on the next row is.
    pub fn by_columns(&self) -> Option<(usize, usize)> {
        match &self.repack {
            Some(Repack::Turned { stored, part, of }) => {
                Some((stored.offset() + part * self.encoding.codes.bytes_of(1), *of))
            }
            Some(Repack::Columns(_) | Repack::Integers(_)) | None => None,
        }
    }

    /// Its codes, scales and zero points by rows: those of the file, or made of its columns.
    pub fn parts(&self) -> Parts<'_> {
        if let (Some(repack), [rows, cols]) = (&self.repack, &self.shape[..]) {
            let [codes, scales, zeros] = repack.rows(*rows, *cols).map(Cow::Owned);
            return Parts { codes, scales, zeros };
        }
        let scales = self.scales.as_ref().map_or(&[][..], Scales::bytes);
        let [codes, scales, zeros] = [self.bytes(), scales, &[]].map(Cow::Borrowed);
        Parts { codes, scales, zeros }
    }
}

impl Scales {
    /// The scales, little-endian.
    pub fn bytes(&self) -> &[u8] {
        self.bytes.bytes()
    }
}

/// The codes of a tensor that no scheme stores.
pub(super) fn plain(wanted: &TensorSpec, entry: &Entry, path: &Path) -> Result<Codes> {
    let fits = |codes: &Codes| codes.row().group == 0 || wanted.role.is_matrix();
    match entry.codes.filter(fits) {
        Some(Codes::E4m3) | None => {
            let want = "F32, F16 or BF16, or a matrix of the quantization_config's scheme";
            Err(Error::tensor(path, &wanted.name, want, &entry.stored))
        }
        Some(codes) => Ok(codes),
    }
}

/// Where in a word AWQ puts the codes of eight neighbouring columns.
const AWQ_ORDER: [u32; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// What has to become rows.
#[derive(Clone)]
pub(super) enum Repack {
    /// Columns of codes.
    Columns(Columns),
    /// Columns of plain numbers: every `of`th one, from `part` on.
    Turned { stored: Slice, part: usize, of: usize },
    /// Integers, of which float32 are made.
    Integers(Integers),
}

impl Repack {
    /// Codes, scales and zero points of `rows` x `cols`, one behind the other.
    fn rows(&self, rows: usize, cols: usize) -> [Vec<u8>; 3] {
        let (stored, part, of) = match self {
            Self::Columns(columns) => return columns.rows(rows, cols),
            Self::Integers(integers) => {
                let numbers = integers.numbers().flat_map(|n| (n as f32).to_le_bytes());
                return [numbers.collect(), Vec::new(), Vec::new()];
            }
            Self::Turned { stored, part, of } => (stored.bytes(), part, of),
        };
        let size = stored.len() / (of * rows * cols);
        let sizes = (size, of * rows, *of);
        let out = rows_of_columns(&stored[part * size..], sizes, 0..rows, 0..cols);
        [out, Vec::new(), Vec::new()]
    }
}

/// Integers of so many bytes each, little-endian; those of a row differ.
#[derive(Clone)]
pub(super) struct Integers {
    stored: Slice,
    bytes: usize,
    row: usize,
    below: usize,
}

impl Integers {
    /// Those of an entry, which are to be less than `below`.
    pub(super) fn of(stored: Slice, entry: &Entry, below: usize) -> Self {
        let count: usize = entry.shape.iter().product();
        let row = entry.shape.last().copied().unwrap_or(1).max(1);
        Self { bytes: stored.len / count.max(1), stored, row, below }
    }

    /// As a tensor of float32.
    ///
    /// # Errors
    /// [`Error::Load`] for another type, for a number that is out of range, and for one that a row
    /// has twice.
    pub(super) fn tensor(
        self,
        wanted: &TensorSpec,
        (file, path): (usize, &Path),
        stored: &str,
    ) -> Result<Tensor> {
        if !["I64", "I32"].contains(&stored) {
            return Err(Error::tensor(path, &wanted.name, "I64 or I32", stored));
        }
        if let Some((at, got)) = self.numbers().enumerate().find(|(_, n)| *n >= self.below as u64) {
            // A negative one is larger than any.
            let (want, got) = (format!("ids below {}", self.below), format!("{got} at {at}"));
            return Err(Error::tensor(path, &wanted.name, want, got));
        }
        let all: Vec<u64> = self.numbers().collect();
        let repeats = |row: &[u64]| (1..row.len()).any(|at| row[..at].contains(&row[at]));
        if let Some(at) = all.chunks_exact(self.row).position(repeats) {
            let got = format!("one twice in row {at}");
            return Err(Error::tensor(path, &wanted.name, "ids that differ in a row", got));
        }
        let tensor =
            Tensor::of(wanted, (file, path), Encoding::plain(Codes::F32), self.stored.clone());
        Ok(Tensor { repack: Some(Repack::Integers(self)), ..tensor })
    }

    fn numbers(&self) -> impl Iterator<Item = u64> + '_ {
        let number =
            |bytes: &[u8]| bytes.iter().rev().fold(0_u64, |n, byte| n << 8 | u64::from(*byte));
        self.stored.bytes().chunks_exact(self.bytes).map(number)
    }
}

/// Columns of codes of four bits.
#[derive(Clone)]
pub(super) struct Columns {
    /// Two-dimensional words of codes.
    pub(super) words: Slice,
    pub(super) zeros: Slice,
    pub(super) scales: Slice,
    pub(super) group: usize,
    /// Words hold neighbouring columns, AWQ's order; else neighbours along a column.
    pub(super) awq: bool,
    /// Zero points are stored less one.
    pub(super) less_one: bool,
}

impl Columns {
    /// Codes, scales and zero points of `rows` x `cols`, one behind the other.
    fn rows(&self, rows: usize, cols: usize) -> [Vec<u8>; 3] {
        let groups = cols / self.group;
        let word = |bytes: &[u8], at: usize| {
            u32::from_le_bytes(bytes[4 * at..4 * at + 4].try_into().expect("four bytes"))
        };
        let across = |bytes: &[u8], down: usize, row: usize| {
            let place = if self.awq { AWQ_ORDER[row % 8] } else { (row % 8) as u32 };
            (word(bytes, down * (rows / 8) + row / 8) >> (4 * place) & 15) as u8
        };
        let (words, zeros, scales) = (self.words.bytes(), self.zeros.bytes(), self.scales.bytes());
        let code = |row: usize, col: usize| match self.awq {
            true => across(words, col, row),
            false => (word(words, col / 8 * rows + row) >> (4 * (col % 8)) & 15) as u8,
        };
        let mut out =
            [Vec::with_capacity(rows * cols / 2), Vec::with_capacity(2 * rows * groups), vec![]];
        for row in 0..rows {
            out[0].extend((0..cols).step_by(2).map(|c| code(row, c) | code(row, c + 1) << 4));
            for group in 0..groups {
                let at = 2 * (group * rows + row);
                out[1].extend(&scales[at..at + 2]);
                let zero = across(zeros, group, row) + u8::from(self.less_one);
                // Codes have 8 taken from them.
                out[2].push((zero as i8 - 8) as u8);
            }
        }
        out
    }
}
