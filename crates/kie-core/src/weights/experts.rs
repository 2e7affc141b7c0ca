//! Experts whose matrices stand in one tensor: slices of it, or rows made of its columns.

use std::path::PathBuf;
use std::sync::Arc;

use kie_kernels::abi::{Codes, Dtype, Encoding};

use super::quantized::Entries;
use super::safetensors::{Entry, Mapped};
use super::tensor::{plain, Repack, Scales, Slice, Tensor};
use crate::error::{Error, Result};
use crate::model::quantization::Quantization;
use crate::model::spec::{Stored, TensorSpec};

/// Numbers that share a scale in MXFP4.
const GROUP: usize = 32;

/// Names of the codes and of the scales of a tensor in MXFP4.
fn mxfp4(name: &str) -> [String; 2] {
    [format!("{name}_blocks"), format!("{name}_scales")]
}

/// Takes away what a [`Stack`] looked at.
pub(super) fn remove(wanted: &TensorSpec, entries: &mut Entries) {
    let [codes, scales] = mxfp4(&wanted.name);
    for name in [&wanted.name, &codes, &scales] {
        entries.remove(name);
    }
}

/// What is looked for, and in what.
pub(super) struct Stack<'a> {
    pub(super) files: &'a [Arc<Mapped>],
    pub(super) wanted: &'a TensorSpec,
    pub(super) entries: &'a Entries,
    pub(super) paths: &'a [PathBuf],
    /// What lists the tensors, for messages.
    pub(super) listed: PathBuf,
}

impl Stack<'_> {
    /// The tensors of a role that is part of one: an expert's each, or the numbers of all.
    ///
    /// # Errors
    /// [`Error::Load`] for parts that are missing, or of another shape or type than they should be.
    pub(super) fn tensors(&self, scheme: Option<Quantization>) -> Result<Vec<Tensor>> {
        let [blocks, _] = mxfp4(&self.wanted.name);
        match self.wanted.stored {
            Stored::Stacked { part, of, .. }
                if scheme == Some(Quantization::Mxfp4Experts)
                    && self.entries.contains_key(&blocks) =>
            {
                self.coded(part, of)
            }
            Stored::Stacked { part, of, turned: true } => self.columns(part, of),
            Stored::Stacked { part, of, turned: false } => self.rows(part, of),
            Stored::Alternate { part, of } => self.numbers(part, of).map(|tensor| vec![tensor]),
            Stored::Whole | Stored::Rows { .. } | Stored::Less { .. } | Stored::Integers { .. } => {
                unreachable!("no stack")
            }
        }
    }

    /// Rows and columns: of an expert's matrix, or experts and numbers of each.
    fn sizes(&self) -> [usize; 2] {
        self.wanted.shape[..].try_into().expect("stacks are of matrices or of lists")
    }

    /// An entry of a shape and, where some are named, of one of these types.
    fn find(&self, name: &str, types: &[&str], shape: &[usize]) -> Result<(usize, &Entry)> {
        let missing = || Error::tensor(&self.listed, name, "the tensor", "nothing");
        let (file, entry) = self.entries.get(name).ok_or_else(missing)?;
        let fits = types.is_empty() || types.contains(&entry.stored.as_str());
        if !fits || entry.shape != shape {
            let want = format!("{} {shape:?}", types.join(" or "));
            let got = format!("{} {:?}", entry.stored, entry.shape);
            return Err(Error::tensor(&self.paths[*file], name, want.trim_start(), got));
        }
        Ok((*file, entry))
    }

    /// The same, of numbers that no scheme stores; with their codes.
    fn plain(&self, shape: &[usize]) -> Result<(usize, &Entry, Codes)> {
        let (file, entry) = self.find(&self.wanted.name, &[], shape)?;
        Ok((file, entry, plain(self.wanted, entry, &self.paths[file])?))
    }

    fn slice(&self, file: usize, entry: &Entry) -> Slice {
        Slice::of(self.files, file, entry)
    }

    fn tensor(&self, file: usize, encoding: Encoding, bytes: Slice) -> Tensor {
        Tensor::of(self.wanted, (file, &self.paths[file]), encoding, bytes)
    }

    /// Every `of`th number of the rows of all experts.
    fn numbers(&self, part: usize, of: usize) -> Result<Tensor> {
        let [rows, cols] = self.sizes();
        let (file, entry, codes) = self.plain(&[rows, of * cols])?;
        let (size, last) = (codes.bytes_of(1), (rows * cols - 1) * of + part);
        let bytes = self.slice(file, entry).part(part * size..(last + 1) * size);
        let tensor = self.tensor(file, Encoding::plain(codes), bytes);
        Ok(Tensor { shape: vec![rows * cols, 1], row_step: of, ..tensor })
    }

    /// MXFP4: rows of codes, and rows of scales.
    fn coded(&self, part: usize, of: usize) -> Result<Vec<Tensor>> {
        let ([rows, cols], experts) = (self.sizes(), self.wanted.experts);
        let [blocks, scales] = mxfp4(&self.wanted.name);
        if !cols.is_multiple_of(GROUP) {
            let want = format!("rows of a multiple of {GROUP} numbers");
            return Err(Error::tensor(&self.listed, blocks, want, format!("{cols}")));
        }
        let groups = cols / GROUP;
        let shape = [experts, of * rows, groups, GROUP / 2];
        let (file, codes) = self.find(&blocks, &["U8"], &shape)?;
        let (scale_file, beside) = self.find(&scales, &["U8", "F8_E8M0"], &shape[..3])?;
        let encoding = Encoding::scaled(Codes::E2m1, [1, GROUP as u32], Dtype::F8E8m0);
        let (codes, beside) = (self.slice(file, codes), self.slice(scale_file, beside));
        let one = |expert: usize| {
            let first = expert * of * rows + part;
            let scales = some_rows(&beside, first, (rows, of), groups);
            let scales = Scales { file: scale_file, offset: scales.offset(), bytes: scales };
            let codes = some_rows(&codes, first, (rows, of), cols / 2);
            let tensor = self.tensor(file, encoding, codes);
            Tensor { scales: Some(scales), row_step: of, ..tensor }
        };
        Ok((0..experts).map(one).collect())
    }

    /// Plain numbers by rows.
    fn rows(&self, part: usize, of: usize) -> Result<Vec<Tensor>> {
        let ([rows, cols], experts) = (self.sizes(), self.wanted.experts);
        let (file, entry, codes) = self.plain(&[experts, of * rows, cols])?;
        let all = self.slice(file, entry);
        let one = |expert: usize| {
            let first = expert * of * rows + part;
            let bytes = some_rows(&all, first, (rows, of), codes.bytes_of(cols));
            Tensor { row_step: of, ..self.tensor(file, Encoding::plain(codes), bytes) }
        };
        Ok((0..experts).map(one).collect())
    }

    /// Plain numbers by columns.
    fn columns(&self, part: usize, of: usize) -> Result<Vec<Tensor>> {
        let ([rows, cols], experts) = (self.sizes(), self.wanted.experts);
        let (file, entry, codes) = self.plain(&[experts, cols, of * rows])?;
        let (all, each) = (self.slice(file, entry), of * rows * codes.bytes_of(cols));
        let one = |expert: usize| {
            let stored = all.part(expert * each..(expert + 1) * each);
            let repack = Some(Repack::Turned { stored: stored.clone(), part, of });
            Tensor { repack, ..self.tensor(file, Encoding::plain(codes), stored) }
        };
        Ok((0..experts).map(one).collect())
    }
}

/// From the `first` of so many rows, `of` apart, to the last one; `row` bytes each.
fn some_rows(all: &Slice, first: usize, (rows, of): (usize, usize), row: usize) -> Slice {
    all.part(first * row..(first + (rows - 1) * of + 1) * row)
}

/// Refuses experts that are stored differently.
///
/// # Errors
/// [`Error::Load`] names the first that is not as expert 0.
pub(super) fn check_alike(tensors: &[Tensor]) -> Result<()> {
    let Some(first) = tensors.first() else { return Ok(()) };
    match tensors.iter().find(|tensor| tensor.encoding != first.encoding) {
        None => Ok(()),
        Some(other) => {
            let wanted = format!("{}, as {}", first.encoding, first.name);
            let got = other.encoding.to_string();
            Err(Error::tensor(&other.path, &other.name, wanted, got))
        }
    }
}
