//! The tensors of a quantised matrix: its codes and scales under the names of its scheme, read in
//! place where the scheme stores rows of codes, repacked to rows where it stores columns (AWQ and
//! GPTQ: `casper-hansen/AutoAWQ` and `AutoGPTQ`, their packers). Repacking keeps four bits a code.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use kie_kernels::abi::{Codes, Dtype, Encoding};

use super::safetensors::{Entry, Mapped};
use super::tensor::{Columns, Repack, Scales, Slice, Tensor};
use crate::error::{Error, Result};
use crate::model::quantization::{Group, Quantization};
use crate::model::spec::TensorSpec;

/// Tensors of all files by name, with the number of their file.
pub(super) type Entries = HashMap<String, (usize, Entry)>;

/// A scheme's matrix being put together.
pub(super) struct Finder<'a> {
    pub(super) files: &'a [Arc<Mapped>],
    pub(super) wanted: &'a TensorSpec,
    pub(super) entries: &'a mut Entries,
    pub(super) paths: &'a [PathBuf],
    /// What lists the tensors, for messages.
    pub(super) listed: PathBuf,
}

impl Finder<'_> {
    /// The tensor, if it is stored under the scheme's names.
    ///
    /// # Errors
    /// [`Error::Load`] for parts that are missing, or of another shape or type than they should be.
    pub(super) fn find(&mut self, scheme: Quantization) -> Result<Option<Tensor>> {
        let name = self.wanted.name.clone();
        let stored =
            |entries: &Entries, name: &str| entries.get(name).map(|(_, e)| e.stored.clone());
        let own = stored(self.entries, &name);
        let is = |wanted: &str| own.as_deref() == Some(wanted);
        let packed = format!("{name}_packed");
        match scheme {
            Quantization::Fp8(group) if is("F8_E4M3") => {
                self.rows(&name, &format!("{name}_scale_inv"), Codes::E4m3, group).map(Some)
            }
            Quantization::Fp8Fp4(group) if is("F8_E4M3") || is("I8") => {
                let scales = format!("{}.scale", name.strip_suffix(".weight").unwrap_or(&name));
                let (codes, group) = match is("I8") {
                    true => (Codes::E2m1, Group::Columns(32)),
                    false => (Codes::E4m3, group),
                };
                self.rows(&name, &scales, codes, group).map(Some)
            }
            Quantization::Float(group) if is("F8_E4M3") => {
                self.rows(&name, &format!("{name}_scale"), Codes::E4m3, group).map(Some)
            }
            Quantization::Int8(group) if is("I8") => {
                self.rows(&name, &format!("{name}_scale"), Codes::I8, group).map(Some)
            }
            Quantization::Int4(group) if self.entries.contains_key(&packed) => {
                self.shape_of(&format!("{name}_shape"))?;
                self.rows(&packed, &format!("{name}_scale"), Codes::I4, group).map(Some)
            }
            Quantization::Mxfp4 if self.entries.contains_key(&packed) => {
                let group = Group::Columns(32);
                self.rows(&packed, &format!("{name}_scale"), Codes::E2m1, group).map(Some)
            }
            Quantization::Awq { group } => self.columns(group, true, false),
            Quantization::Gptq { group, less_one } => self.columns(group, false, less_one),
            Quantization::Fp8(_)
            | Quantization::Fp8Fp4(_)
            | Quantization::Float(_)
            | Quantization::Int8(_)
            | Quantization::Int4(_)
            | Quantization::Mxfp4
            | Quantization::Mxfp4Experts => Ok(None),
        }
    }

    fn missing(&self, name: &str) -> Error {
        Error::tensor(&self.listed, name, "the tensor", "nothing")
    }

    fn take(&mut self, name: &str) -> Result<(usize, Entry)> {
        self.entries.remove(name).ok_or_else(|| self.missing(name))
    }

    /// A part of one of several types and shapes.
    fn part(
        &mut self,
        name: &str,
        types: &[&str],
        shapes: &[Vec<usize>],
    ) -> Result<(usize, Entry)> {
        let (file, entry) = self.take(name)?;
        if !types.contains(&entry.stored.as_str()) || !shapes.contains(&entry.shape) {
            let got = format!("{} {:?}", entry.stored, entry.shape);
            let want = format!("{} {:?}", types.join(" or "), shapes[0]);
            return Err(Error::tensor(&self.paths[file], name, want, got));
        }
        Ok((file, entry))
    }

    /// The matrix's shape, told by a tensor of its own.
    fn shape_of(&mut self, name: &str) -> Result<()> {
        let dims = self.wanted.shape.len();
        let (file, entry) = self.part(name, &["I64", "I32"], &[vec![dims]])?;
        let slice = Slice::of(self.files, file, &entry);
        let each = slice.bytes().len() / dims;
        let number = |bytes: &[u8]| {
            bytes.iter().rev().fold(0_usize, |n, byte| n.wrapping_shl(8) | usize::from(*byte))
        };
        let told: Vec<usize> = slice.bytes().chunks_exact(each).map(number).collect();
        if told != self.wanted.shape {
            let (want, got) = (format!("{:?}", self.wanted.shape), format!("{told:?}"));
            return Err(Error::tensor(&self.paths[file], name, want, got));
        }
        Ok(())
    }

    /// Rows of codes with their scales beside them.
    fn rows(&mut self, codes: &str, scales: &str, kind: Codes, group: Group) -> Result<Tensor> {
        let shape = self.wanted.shape.clone();
        let (lanes, [rows, cols]) = match shape[..] {
            [lanes, rows, cols] => (vec![lanes], [rows, cols]),
            [rows, cols] => (vec![], [rows, cols]),
            _ => unreachable!("a matrix has two or three dimensions"),
        };
        let with = |last: [usize; 2]| [&lanes[..], &last].concat();
        let (stored, each): (&[&str], usize) = match kind {
            Codes::I4 => (&["I32"], 8),
            Codes::E2m1 => (&["U8", "I8"], 2),
            Codes::I8 => (&["I8"], 1),
            _ => (&["F8_E4M3"], 1),
        };
        let whole = if kind == Codes::E2m1 { 32 } else { each };
        let [down, across] = group.of([rows, cols]);
        if !cols.is_multiple_of(whole) || across < cols && !across.is_multiple_of(whole) {
            let want = format!("rows of a multiple of {whole} numbers");
            return Err(Error::tensor(&self.listed, codes, want, format!("{cols}")));
        }
        let (file, entry) = self.part(codes, stored, &[with([rows, cols / each])])?;
        let grid = [rows.div_ceil(down), cols.div_ceil(across)];
        let mut shapes = vec![with(grid)];
        match group {
            Group::Tensor if lanes.is_empty() => shapes.extend([vec![], vec![1]]),
            Group::Channel if lanes.is_empty() => shapes.push(vec![rows]),
            Group::Tensor | Group::Channel | Group::Columns(_) | Group::Block(..) => {}
        }
        let types: &[&str] = match kind {
            Codes::E2m1 => &["U8", "F8_E8M0"],
            Codes::E4m3 => &["F32", "BF16", "F16", "F8_E8M0"],
            _ => &["F32", "BF16", "F16"],
        };
        let (scale_file, scale) = self.part(scales, types, &shapes)?;
        let dtype = scale.dtype.unwrap_or(Dtype::F8E8m0);
        let encoding = Encoding::scaled(kind, [down as u32, across as u32], dtype);
        let scales = Scales {
            file: scale_file,
            offset: scale.offset,
            bytes: Slice::of(self.files, scale_file, &scale),
        };
        Ok(self.tensor(encoding, (file, &entry), scales, None))
    }

    fn tensor(
        &self,
        encoding: Encoding,
        (file, entry): (usize, &Entry),
        scales: Scales,
        repack: Option<Repack>,
    ) -> Tensor {
        let bytes = Slice::of(self.files, file, entry);
        let tensor = Tensor::of(self.wanted, (file, &self.paths[file]), encoding, bytes);
        Tensor { scales: Some(scales), repack, ..tensor }
    }

    /// Columns of codes, by AWQ's or GPTQ's names.
    fn columns(&mut self, group: usize, awq: bool, less_one: bool) -> Result<Option<Tensor>> {
        let (Some(stem), &[rows, cols]) =
            (self.wanted.name.strip_suffix(".weight").map(str::to_owned), &self.wanted.shape[..])
        else {
            return Ok(None);
        };
        let name = format!("{stem}.qweight");
        if !self.entries.contains_key(&name) {
            return Ok(None);
        }
        if !rows.is_multiple_of(8) || !cols.is_multiple_of(group) {
            let want = format!("a multiple of 8 rows of a multiple of {group} numbers");
            return Err(Error::tensor(&self.listed, name, want, format!("{rows} x {cols}")));
        }
        let shape = if awq { vec![cols, rows / 8] } else { vec![cols / 8, rows] };
        let (file, entry) = self.part(&name, &["I32"], &[shape])?;
        let groups = cols / group;
        let zeros = self.part(&format!("{stem}.qzeros"), &["I32"], &[vec![groups, rows / 8]])?;
        let scales = self.part(&format!("{stem}.scales"), &["F16"], &[vec![groups, rows]])?;
        if !awq {
            self.no_order(&format!("{stem}.g_idx"), cols, group)?;
        }
        let slice = |(file, entry): &(usize, Entry)| Slice::of(self.files, *file, entry);
        let repack = Columns {
            words: Slice::of(self.files, file, &entry),
            zeros: slice(&zeros),
            scales: slice(&scales),
            group,
            awq,
            less_one,
        };
        let encoding = Encoding::scaled(Codes::I4, [1, group as u32], Dtype::F16);
        let encoding = Encoding { zeros: true, ..encoding };
        let scales = Scales { file: scales.0, offset: scales.1.offset, bytes: slice(&scales) };
        let repack = Repack::Columns(repack);
        Ok(Some(self.tensor(encoding, (file, &entry), scales, Some(repack))))
    }

    /// Columns are in groups one after another: no activation order.
    fn no_order(&mut self, name: &str, cols: usize, group: usize) -> Result<()> {
        if !self.entries.contains_key(name) {
            return Ok(());
        }
        let (file, entry) = self.part(name, &["I32"], &[vec![cols]])?;
        let slice = Slice::of(self.files, file, &entry);
        let (words, _) = slice.bytes().as_chunks::<4>();
        let told = words.iter().map(|word| u32::from_le_bytes(*word) as usize).enumerate();
        match told.into_iter().find(|(col, told)| *told != col / group) {
            None => Ok(()),
            Some((col, told)) => {
                let want = format!("column {col} in group {}: no activation order", col / group);
                Err(Error::tensor(&self.paths[file], name, want, format!("group {told}")))
            }
        }
    }
}
