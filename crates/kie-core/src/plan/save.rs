//! A checkpoint's folder written again with the matrices of its layers quantised, in the names and
//! the `quantization_config` of its scheme: block FP8 as transformers' `FineGrainedFP8Config` has
//! it, INT4 and MXFP4 as the compressed-tensors package does.
//!
//! Invariant: the folder appears whole or not at all, and holds the bits that `dtype=` makes.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use kie_kernels::abi::Codes;
use safetensors::tensor::{serialize_to_file, Dtype as Stored, View};
use safetensors::SafeTensorError;
use serde_json::{json, Value};

use super::convert::{Tally, Wanted};
use super::quantize::Scheme;
use super::stored::{describe, not_quantised, Reads};
use crate::error::{Error, Result};
use crate::model::{Role, Spec, Stored as TensorPart, TensorSpec};
use crate::weights::{Checkpoint, Tensor};
use crate::{gguf, json};

/// Writes the model of `folder` to the new folder `out`, quantised to the scheme named `to`;
/// a line for people says what it saved and what rounding lost.
///
/// # Errors
/// [`Error::InvalidRequest`] for an unknown scheme, a model that is quantised already or a folder
/// that exists, [`Error::Load`] and [`Error::UnsupportedModel`] for the model, [`Error::Write`] for
/// what cannot be written, [`Error::GivenUp`].
pub fn quantize(folder: &Path, out: &Path, to: &str, reads: &Reads<'_>) -> Result<String> {
    let Some(scheme) = Scheme::named(to) else {
        let detail = format!("weights are quantised to fp8, int4 or mxfp4, got {to:?}");
        return Err(Error::InvalidRequest(detail));
    };
    if out.symlink_metadata().is_ok() {
        let detail = format!("{} exists; name a folder that does not", out.display());
        return Err(Error::InvalidRequest(detail));
    }
    if gguf::is_gguf(folder) {
        let detail = format!("{} is a GGUF file; wanted a folder", folder.display());
        return Err(Error::InvalidRequest(detail));
    }
    let spec = Spec::read(folder)?;
    let parts = |tensor: &&TensorSpec| match tensor.stored {
        TensorPart::Rows { .. }
        | TensorPart::Stacked { .. }
        | TensorPart::Alternate { .. }
        | TensorPart::Integers { .. } => true,
        TensorPart::Whole | TensorPart::Less { .. } => false,
    };
    if let Some(tensor) = spec.tensors.iter().find(parts) {
        let what = format!("{}: {}", folder.display(), tensor.name);
        let kind = match tensor.stored {
            TensorPart::Integers { .. } => "integers",
            _ => "a matrix of several parts",
        };
        let detail = format!("{kind}; open it with dtype= instead");
        return Err(Error::UnsupportedModel { what, detail });
    }
    let checkpoint = Checkpoint::open(folder, &spec)?;
    not_quantised(&spec, &checkpoint)?;
    let stored = spec.tensors.iter().flat_map(|tensor| checkpoint.all(tensor.role));
    let tensors: Vec<_> = stored.collect();
    let total = 2 * tensors.len();
    let told = |done: usize| (reads.progress)("quantise", done as u64, total as u64);
    checkpoint.check_all_finite(&tensors, &told, reads.stop)?;
    let (partial, _held) = partial(out)?;
    let writer = Writer { scheme, reads, total, state: RefCell::default() };
    let written = writer
        .all(folder, &partial, &tensors)
        .and_then(|note| checkpoint.unchanged().map(|()| note))
        .and_then(|note| {
            fs::rename(&partial, out).map(|()| note).map_err(|why| unwritten(out, &why))
        });
    written.inspect_err(|_| drop(fs::remove_dir_all(&partial)))
}

fn unwritten(file: &Path, why: &dyn std::fmt::Display) -> Error {
    Error::Write { file: file.to_owned(), detail: why.to_string() }
}

/// An empty folder beside `out` that is this process's as long as it holds the file. One that a
/// process left behind which was killed is taken over: its lock went with it.
fn partial(out: &Path) -> Result<(PathBuf, File)> {
    let mut name = out.as_os_str().to_owned();
    name.push(".partial");
    let partial = PathBuf::from(name);
    let failed = |why: io::Error| unwritten(&partial, &why);
    match fs::create_dir(&partial) {
        Err(why) if why.kind() != io::ErrorKind::AlreadyExists => return Err(failed(why)),
        Ok(()) | Err(_) => {}
    }
    let held = File::open(&partial).map_err(failed)?;
    match held.try_lock() {
        Err(TryLockError::WouldBlock) => {
            return Err(unwritten(&partial, &"another process writes it"));
        }
        // Some file systems have no locks.
        Err(TryLockError::Error(why)) if why.kind() != io::ErrorKind::Unsupported => {
            return Err(failed(why));
        }
        Ok(()) | Err(TryLockError::Error(_)) => {}
    }
    for entry in fs::read_dir(&partial).map_err(failed)? {
        fs::remove_file(entry.map_err(failed)?.path()).map_err(failed)?;
    }
    Ok((partial, held))
}

/// What is written of a tensor.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// As it is stored.
    Whole,
    Codes,
    Scales,
    /// The shape, as numbers.
    Shape,
}

/// A tensor of the new file; its bytes are made when they are written.
struct Piece<'a> {
    writer: &'a Writer<'a>,
    tensor: &'a Tensor,
    kind: Kind,
    dtype: Stored,
    shape: Vec<usize>,
    len: usize,
}

#[derive(Default)]
struct State {
    tally: Tally,
    /// Of matrices whose codes are written already.
    scales: HashMap<String, Vec<u8>>,
    done: usize,
    /// What ended it; what is written from then on is of no use.
    failed: Option<Error>,
}

struct Writer<'a> {
    scheme: Scheme,
    reads: &'a Reads<'a>,
    total: usize,
    state: RefCell<State>,
}

impl Writer<'_> {
    /// Weights, configuration and all other files.
    fn all(&self, folder: &Path, out: &Path, tensors: &[&Tensor]) -> Result<String> {
        let file = out.join("model.safetensors");
        let pieces = tensors.iter().flat_map(|tensor| self.pieces(tensor));
        let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        let written = serialize_to_file(pieces, Some(metadata), &file);
        if let Some(error) = self.state.borrow_mut().failed.take() {
            return Err(error);
        }
        written.map_err(|why| match why {
            SafeTensorError::IoError(why) => unwritten(&file, &why),
            other => unwritten(&file, &other),
        })?;
        let kept = tensors.iter().filter(|t| t.role.is_matrix() && self.encoding(t).is_none());
        let kept = kept.filter(|tensor| tensor.role != Role::Embedding);
        let kept: Vec<_> =
            kept.map(|t| t.name.strip_suffix(".weight").unwrap_or(&t.name)).collect();
        let path = folder.join("config.json");
        let mut config = json::read(&path)?;
        config["quantization_config"] = described(self.scheme, &kept);
        let text = format!("{config:#}\n");
        let path = out.join("config.json");
        fs::write(&path, text).map_err(|why| unwritten(&path, &why))?;
        copy_others(folder, out)?;
        let note = self.state.borrow().tally.note(self.scheme);
        note.ok_or_else(|| {
            let detail = format!("no matrix of the model can be {}", self.scheme.name());
            Error::InvalidRequest(detail)
        })
    }

    /// How a tensor will be stored, if otherwise than now.
    fn encoding(&self, tensor: &Tensor) -> Option<kie_kernels::abi::Encoding> {
        let now = describe(tensor);
        let then = Wanted::Quantised(self.scheme).encoding(tensor, &now);
        (then != now.encoding).then_some(then)
    }

    fn pieces<'a>(&'a self, tensor: &'a Tensor) -> Vec<(String, Piece<'a>)> {
        let piece = |end: &str, kind, dtype: Stored, shape: Vec<usize>| {
            let len = shape.iter().product::<usize>() * dtype.bitsize() / 8;
            let piece = Piece { writer: self, tensor, kind, dtype, shape, len };
            (format!("{}{end}", tensor.name), piece)
        };
        let shape = tensor.shape.clone();
        let Some(encoding) = self.encoding(tensor) else {
            return vec![piece("", Kind::Whole, stored(tensor.encoding.codes), shape)];
        };
        let (lead, last) = shape.split_at(shape.len() - 2);
        let [rows, cols] = [last[0], last[1]];
        let with = |last: [usize; 2]| [lead, &last].concat();
        let grid = encoding.grid(rows as u32, cols as u32).map(|n| n as usize);
        let codes = |end, dtype, each| piece(end, Kind::Codes, dtype, with([rows, cols / each]));
        let scales = |end, dtype| piece(end, Kind::Scales, dtype, with(grid));
        match self.scheme {
            Scheme::Fp8 => vec![codes("", Stored::F8_E4M3, 1), scales("_scale_inv", Stored::F32)],
            Scheme::Int4 => vec![
                codes("_packed", Stored::I32, 8),
                scales("_scale", Stored::BF16),
                piece("_shape", Kind::Shape, Stored::I64, vec![shape.len()]),
            ],
            Scheme::Mxfp4 => {
                vec![codes("_packed", Stored::U8, 2), scales("_scale", Stored::U8)]
            }
        }
    }

    /// Codes or scales of a matrix. Each is made when it is written: of one that is large nothing
    /// but the scales is kept.
    fn made(&self, tensor: &Tensor, kind: Kind) -> Result<Vec<u8>> {
        self.reads.stop.check()?;
        let mut state = self.state.borrow_mut();
        if let (Kind::Scales, Some(scales)) = (kind, state.scales.remove(&tensor.name)) {
            return Ok(scales);
        }
        let mut aside = Tally::default();
        let tally = if kind == Kind::Codes { &mut state.tally } else { &mut aside };
        let (described, parts) = (describe(tensor), tensor.parts());
        let made = tally.quantise(self.scheme, &described, &parts, self.reads.stop)?;
        if kind == Kind::Scales {
            return Ok(made.scales.into_owned());
        }
        // Scales of FP8 stand before their codes.
        if self.scheme != Scheme::Fp8 {
            state.scales.insert(tensor.name.clone(), made.scales.into_owned());
        }
        state.done += 1;
        (self.reads.progress)("quantise", (self.total / 2 + state.done) as u64, self.total as u64);
        Ok(made.codes.into_owned())
    }
}

impl View for Piece<'_> {
    fn dtype(&self) -> Stored {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        if self.writer.state.borrow().failed.is_some() {
            return Cow::Borrowed(&[]);
        }
        let made = match self.kind {
            Kind::Whole => return Cow::Borrowed(self.tensor.bytes()),
            Kind::Shape => {
                let shape = self.tensor.shape.iter();
                return shape.flat_map(|n| (*n as i64).to_le_bytes()).collect();
            }
            Kind::Codes | Kind::Scales => self.writer.made(self.tensor, self.kind),
        };
        Cow::Owned(made.unwrap_or_else(|error| {
            self.writer.state.borrow_mut().failed = Some(error);
            Vec::new()
        }))
    }

    fn data_len(&self) -> usize {
        self.len
    }
}

/// The type of a tensor that stays as it is.
fn stored(codes: Codes) -> Stored {
    match codes {
        Codes::F32 => Stored::F32,
        Codes::F16 => Stored::F16,
        Codes::Bf16 => Stored::BF16,
        Codes::E4m3
        | Codes::I8
        | Codes::I4
        | Codes::E2m1
        | Codes::Q8x0
        | Codes::Q4x0
        | Codes::Q4k
        | Codes::Q6k => unreachable!("no tensor is quantised already"),
    }
}

/// `quantization_config` of a scheme; `kept` are modules of linear layers that stay as they are.
fn described(scheme: Scheme, kept: &[&str]) -> Value {
    let compressed = |format: &str, kind: &str, scales: Value| {
        json!({"quant_method": "compressed-tensors", "format": format, "ignore": kept,
            "quantization_status": "compressed", "kv_cache_scheme": null,
            "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": null,
                "output_activations": null, "weights": {"num_bits": 4, "type": kind,
                "symmetric": true, "strategy": "group", "group_size": 32, "dynamic": false,
                "actorder": null, "observer": "mse", "scale_dtype": scales}}}})
    };
    match scheme {
        Scheme::Fp8 => json!({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [128, 128], "modules_to_not_convert": kept}),
        Scheme::Int4 => compressed("pack-quantized", "int", Value::Null),
        Scheme::Mxfp4 => compressed("mxfp4-pack-quantized", "float", json!("torch.uint8")),
    }
}

/// Copies what is no weight: tokenizer, templates, generation defaults, licence.
fn copy_others(folder: &Path, out: &Path) -> Result<()> {
    const WEIGHTS: [&str; 9] =
        ["safetensors", "bin", "pt", "pth", "gguf", "h5", "msgpack", "onnx", "ot"];
    let unread = |why: std::io::Error| Error::load(folder, "its files", why.to_string());
    for entry in fs::read_dir(folder).map_err(unread)? {
        let path = entry.map_err(unread)?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        let weights = path.extension().is_some_and(|end| WEIGHTS.iter().any(|w| end == *w));
        let skip = weights || name.ends_with(".index.json") || name == "config.json";
        if skip || name.starts_with('.') || !path.is_file() {
            continue;
        }
        let to = out.join(name);
        fs::copy(&path, &to).map_err(|why| unwritten(&to, &why))?;
    }
    Ok(())
}
