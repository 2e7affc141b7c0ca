//! A checkpoint folder as tensors by role, each a slice of a mapped file: nothing is copied here.
//!
//! The maps are for loading alone: devices copy what they run on, so that nobody reads a file
//! afterwards. A file that is cut short meanwhile is read as zeros (`guard`), one that is written
//! to as anything; [`Checkpoint::unchanged`] tells, and what was loaded then is of no use.

mod adapter;
mod experts;
mod finite;
mod guard;
mod quantized;
pub(crate) mod safetensors;
mod tensor;

use std::collections::HashMap;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use kie_kernels::abi::Encoding;
use kie_kernels::device::Stop;
use kie_kernels::file::is_listed;
use kie_kernels::machine::cache::Key;

use crate::error::{Error, Result};
use crate::gguf;
use crate::json;
use crate::model::spec::{Role, Spec, Stored, TensorSpec};
pub use adapter::{Adapter, Delta};
use quantized::{Entries, Finder};
pub use safetensors::Mapped;
use tensor::{plain, Integers, Slice};
pub use tensor::{Parts, Scales, Tensor};

/// The files of a folder and the tensors that a spec asked for.
pub struct Checkpoint {
    files: Vec<Arc<Mapped>>,
    /// One, or one an expert.
    tensors: HashMap<Role, Vec<Tensor>>,
    adapter: Option<Adapter>,
}

/// Pieces of a tensor that its hash is made of, and bytes of each.
const SAMPLES: usize = 64;
const SAMPLE_BYTES: usize = 64;

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

impl Checkpoint {
    /// Maps the files and checks that they hold exactly the tensors of `spec`.
    ///
    /// # Errors
    /// [`Error::Load`] names file, tensor, wanted and got: a file that is missing or cut short, a
    /// hostile header, a tensor that is missing, surplus, or of the wrong shape or type.
    pub fn open(folder: &Path, spec: &Spec) -> Result<Self> {
        let (paths, index) = files_of(folder)?;
        let files: Vec<_> = paths.iter().map(|p| Mapped::open(p)).collect::<Result<_>>()?;
        let checkpoint = Self { files, tensors: HashMap::new(), adapter: None };
        let kept = checkpoint.files.clone();
        checkpoint.read(folder, spec, &paths, &index).or_else(|error| {
            kept.iter().try_for_each(|file| file.unchanged())?;
            Err(error)
        })
    }

    /// Whether the files are what they were when they were opened.
    ///
    /// # Errors
    /// [`Error::Load`] names the first that is not, with its length or time then and now.
    pub fn unchanged(&self) -> Result<()> {
        self.files.iter().try_for_each(|file| file.unchanged())?;
        self.adapter.as_ref().map_or(Ok(()), Adapter::unchanged)
    }

    /// The same with the adapter of a folder, if one is named.
    ///
    /// # Errors
    /// As [`Adapter::open`].
    pub fn with_adapter(mut self, folder: Option<&Path>, spec: &Spec) -> Result<Self> {
        let wanted = "pass a LoRA adapter's folder: adapter_config.json, adapter_model.safetensors";
        let opened = folder.map(|folder| Adapter::open(folder, spec)).transpose();
        self.adapter = opened.map_err(|error| error.or_hint(wanted))?;
        Ok(self)
    }

    /// What is merged into it.
    pub fn adapter(&self) -> Option<&Adapter> {
        self.adapter.as_ref()
    }

    /// Finds the tensors in the files.
    fn read(
        mut self,
        folder: &Path,
        spec: &Spec,
        paths: &[PathBuf],
        index: &HashMap<String, usize>,
    ) -> Result<Self> {
        let mut entries = Entries::new();
        for (file, map) in self.files.iter().enumerate() {
            for (name, entry) in map.entries()? {
                if let Some((other, _)) = entries.insert(name.clone(), (file, entry)) {
                    let got = format!("it also stands in {}", paths[other].display());
                    return Err(Error::tensor(&paths[file], name, "each tensor once", got));
                }
            }
        }
        check_index(folder, index, &entries, paths)?;
        for wanted in &spec.tensors {
            let listed = || if paths.len() == 1 { paths[0].clone() } else { folder.join(INDEX) };
            let tensors = match wanted.stored {
                Stored::Stacked { .. } | Stored::Alternate { .. } => {
                    let (files, entries, listed) = (&self.files[..], &entries, listed());
                    let stack = experts::Stack { files, wanted, entries, paths, listed };
                    stack.tensors(spec.quantization)?
                }
                Stored::Whole
                | Stored::Rows { .. }
                | Stored::Less { .. }
                | Stored::Integers { .. } => {
                    let names = wanted.each();
                    let take = |wanted| self.take(&listed, &wanted, spec, &mut entries, paths);
                    names.map(take).collect::<Result<_>>()?
                }
            };
            experts::check_alike(&tensors)?;
            self.tensors.insert(wanted.role, tensors);
        }
        // Several tensors have parts of these.
        for wanted in &spec.tensors {
            match wanted.stored {
                Stored::Rows { .. } | Stored::Alternate { .. } => {
                    entries.remove(&wanted.name);
                }
                Stored::Stacked { .. } => experts::remove(wanted, &mut entries),
                Stored::Whole | Stored::Less { .. } | Stored::Integers { .. } => {}
            }
        }
        let below = |name: &str| spec.ignored_below.iter().any(|start| name.starts_with(start));
        let harmless = |name: &String| {
            spec.ignored.contains(name) || below(name) || name.ends_with(".rotary_emb.inv_freq")
        };
        let mut surplus: Vec<_> = entries.iter().filter(|(name, _)| !harmless(name)).collect();
        surplus.sort_by_key(|(name, _)| *name);
        if let Some((name, (file, entry))) = surplus.first() {
            let got = format!("a surplus tensor {:?}", entry.shape);
            let wanted = format!("only the tensors of {}", spec.architecture);
            return Err(Error::tensor(&paths[*file], *name, wanted, got));
        }
        Ok(self)
    }

    fn take(
        &self,
        listed: &dyn Fn() -> PathBuf,
        wanted: &TensorSpec,
        spec: &Spec,
        entries: &mut Entries,
        paths: &[PathBuf],
    ) -> Result<Tensor> {
        let name = &wanted.name;
        if let (Some(scheme), true) = (spec.quantization, wanted.role.is_matrix()) {
            let listed = listed();
            let mut finder = Finder { files: &self.files, wanted, entries, paths, listed };
            if let Some(tensor) = finder.find(scheme)? {
                return Ok(tensor);
            }
        }
        let missing = || Error::tensor(listed(), name, "the tensor", "nothing");
        let mut shape = wanted.shape.clone();
        let found = match wanted.stored {
            Stored::Rows { of, .. } => {
                shape[0] = of;
                entries.get(name).cloned()
            }
            Stored::Whole | Stored::Less { .. } | Stored::Integers { .. } => entries.remove(name),
            Stored::Stacked { .. } | Stored::Alternate { .. } => unreachable!("experts::Stack"),
        };
        let (file, mut entry) = found.ok_or_else(missing)?;
        let path = &paths[file];
        if entry.shape != shape {
            let (want, got) = (format!("shape {shape:?}"), format!("{:?}", entry.shape));
            return Err(Error::tensor(path, name, want, got));
        }
        if let Stored::Rows { first, of } = wanted.stored {
            let row = entry.len / of;
            entry.offset += first * row;
            entry.len = wanted.shape[0] * row;
        }
        let adjusted = match wanted.stored {
            Stored::Less { one, factor } => Some((one, factor)),
            _ => None,
        };
        let bytes = Slice::of(&self.files, file, &entry);
        if let Stored::Integers { below } = wanted.stored {
            let integers = Integers::of(bytes, &entry, below);
            return integers.tensor(wanted, (file, path), &entry.stored);
        }
        let codes = plain(wanted, &entry, path)?;
        let tensor = Tensor::of(wanted, (file, path), Encoding::plain(codes), bytes);
        Ok(Tensor { adjusted, ..tensor })
    }

    /// What tells these weights from others, in hex: the hash of names, shapes, types and evenly
    /// spaced bytes of each tensor. Two checkpoints that differ in few numbers may have the same.
    pub fn sample(&self, spec: &Spec) -> String {
        let mut parts: Vec<Vec<u8>> = Vec::new();
        for tensors in spec.tensors.iter().map(|tensor| self.all(tensor.role)) {
            let samples = (SAMPLES / tensors.len().max(1)).max(2);
            for Tensor { name, shape, encoding, bytes, .. } in tensors {
                parts.push(format!("{name} {shape:?} {encoding}").into_bytes());
                parts.push(sample_of(bytes.bytes(), samples));
            }
        }
        // Its thin matrices lie one behind the other.
        parts.extend(self.adapter.as_ref().map(|a| sample_of(a.bytes(), 64 * SAMPLES)));
        let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        Key::of(&parts).to_string()
    }

    /// Refuses a tensor with numbers that are not finite.
    ///
    /// # Errors
    /// As [`Checkpoint::check_all_finite`].
    pub fn check_finite(&self, tensor: &Tensor) -> Result<()> {
        self.check_all_finite(&[tensor], &|_| {}, &Stop::default())
    }

    /// Refuses numbers that are not finite; `told` hears which tensor comes next.
    ///
    /// # Errors
    /// [`Error::Load`] with the first bad number's tensor and index; [`Error::GivenUp`] once
    /// `stop` is set.
    pub fn check_all_finite(
        &self,
        tensors: &[&Tensor],
        told: &dyn Fn(usize),
        stop: &Stop,
    ) -> Result<()> {
        finite::check(tensors, told, stop)
    }

    /// The mapped files.
    pub fn files(&self) -> &[Arc<Mapped>] {
        &self.files
    }

    /// The tensor of a role, if the model has one; of experts the first one's.
    pub fn tensor(&self, role: Role) -> Option<&Tensor> {
        self.all(role).first()
    }

    /// The tensors of a role: none, one, or one an expert.
    pub fn all(&self, role: Role) -> &[Tensor] {
        self.tensors.get(&role).map_or(&[], Vec::as_slice)
    }
}

/// Evenly spaced pieces.
fn sample_of(bytes: &[u8], pieces: usize) -> Vec<u8> {
    let piece = bytes.len().min(SAMPLE_BYTES);
    let most = bytes.len() - piece;
    let starts = (0..pieces).map(|n| most * n / (pieces - 1));
    starts.flat_map(|start| &bytes[start..start + piece]).copied().collect()
}

/// The weight files of a folder, and for a sharded one which file each tensor must be in.
fn files_of(folder: &Path) -> Result<(Vec<PathBuf>, HashMap<String, usize>)> {
    if gguf::is_gguf(folder) {
        return Ok((vec![folder.to_owned()], HashMap::new()));
    }
    let index_file = folder.join(INDEX);
    if !is_listed(&index_file) {
        let single = folder.join(SINGLE);
        if !is_listed(&single) {
            let got = if folder.is_dir() { "neither" } else { "no such folder" };
            return Err(Error::load(folder, format!("{SINGLE} or {INDEX}"), got));
        }
        return Ok((vec![single], HashMap::new()));
    }
    let index = json::read(&index_file)?;
    let map = index["weight_map"].as_object().filter(|m| !m.is_empty()).ok_or_else(|| {
        Error::tensor(&index_file, "weight_map", "an object of tensor: file", "something else")
    })?;
    let mut paths = Vec::new();
    let mut places = HashMap::new();
    let mut numbers: HashMap<&str, usize> = HashMap::new();
    for (tensor, file) in map {
        let name = file.as_str().unwrap_or_default();
        let plain = Path::new(name).components().collect::<Vec<_>>();
        if !matches!(plain[..], [Component::Normal(_)]) {
            let got = format!("{file}");
            return Err(Error::tensor(&index_file, tensor, "a file name in the folder", got));
        }
        let number = *numbers.entry(name).or_insert(paths.len());
        if number == paths.len() {
            paths.push(folder.join(name));
            if !is_listed(&paths[number]) {
                let wanted = format!("the file {name}");
                return Err(Error::tensor(&index_file, tensor, wanted, "no such file"));
            }
        }
        places.insert(tensor.clone(), number);
    }
    Ok((paths, places))
}

/// Every indexed tensor must be in the file that the index names, and, where there is an index,
/// every tensor must be in it.
fn check_index(
    folder: &Path,
    index: &HashMap<String, usize>,
    entries: &Entries,
    paths: &[PathBuf],
) -> Result<()> {
    for (name, wanted) in index {
        let got = entries.get(name).map(|(file, _)| *file);
        if got != Some(*wanted) {
            let got = got.map_or("in no file".to_owned(), |f| format!("in {}", paths[f].display()));
            return Err(Error::tensor(&paths[*wanted], name, "the tensor, as indexed", got));
        }
    }
    match entries.keys().find(|name| !index.is_empty() && !index.contains_key(*name)) {
        Some(name) => {
            let got = "nothing, though a file holds the tensor";
            Err(Error::tensor(folder.join(INDEX), name, "its place in weight_map", got))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
