//! A LoRA adapter beside a checkpoint: two thin matrices for some of its matrices, whose product is
//! added to them while they are loaded.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use kie_kernels::abi::Codes;
use kie_kernels::device::Stop;
use kie_kernels::host::allowed_cores;
use kie_kernels::numbers::code_to_f32;

use super::finite::{first_not_finite, Numbers};
use super::safetensors::{Entry, Mapped};
use super::tensor::Slice;
use crate::error::{Error, Result};
use crate::model::adapter::{ends_with, AdapterConfig};
use crate::model::spec::{Role, Spec, Stored, TensorSpec};

/// What PEFT puts before the names of the model's modules.
const PREFIX: &str = "base_model.model.";
const FILE: &str = "adapter_model.safetensors";
/// Rows that a thread takes at a time.
const ROWS: usize = 16;

/// An adapter's matrices by the role of the matrix that they change.
pub struct Adapter {
    path: PathBuf,
    /// Its folder's name.
    pub name: String,
    file: Arc<Mapped>,
    deltas: HashMap<Role, Delta>,
}

/// What is added to a matrix: `factor * b a`.
pub struct Delta {
    /// `[rank, columns]`.
    a: Thin,
    /// `[rows, rank]`, of the rows that the matrix has of it.
    b: Thin,
    rank: usize,
    factor: f32,
}

/// A thin matrix as it is stored.
struct Thin {
    codes: Codes,
    bytes: Slice,
}

impl Thin {
    fn numbers(&self) -> Vec<f32> {
        let bytes = self.bytes.bytes();
        let count = bytes.len() / self.codes.bytes_of(1);
        (0..count).map(|at| code_to_f32(self.codes, bytes, at)).collect()
    }
}

impl Adapter {
    /// Opens an adapter's folder for a model.
    ///
    /// # Errors
    /// [`Error::Load`] and [`Error::UnsupportedModel`] name the key or the tensor, what is wanted
    /// and what there is.
    pub fn open(folder: &Path, spec: &Spec) -> Result<Self> {
        let config = AdapterConfig::read(folder)?;
        let path = folder.join(FILE);
        let file = Mapped::open(&path)?;
        let absolute = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
        let name = absolute.file_name().map(|name| name.to_string_lossy().into_owned());
        let mut adapter =
            Self { path, name: name.unwrap_or_default(), file, deltas: HashMap::new() };
        adapter.read(&config, spec)?;
        Ok(adapter)
    }

    fn wrong(&self, name: &str, wanted: impl Into<String>, got: impl Into<String>) -> Error {
        Error::tensor(&self.path, name, wanted, got)
    }

    fn read(&mut self, config: &AdapterConfig, spec: &Spec) -> Result<()> {
        let mut entries: HashMap<String, Entry> = self.file.entries()?.into_iter().collect();
        let modules: BTreeSet<String> =
            entries.keys().filter_map(|name| module_of(name)).map(str::to_owned).collect();
        let matrices: Vec<&TensorSpec> =
            spec.tensors.iter().filter(|tensor| tensor.role.is_matrix()).collect();
        for target in &config.targets {
            let known = |tensor: &TensorSpec| ends_with(module(&tensor.name), target);
            if target != "all-linear" && !matrices.iter().copied().any(known) {
                let file = self.path.with_file_name("adapter_config.json");
                let what = format!("{}: target_modules", file.display());
                let detail =
                    format!("{target:?}; no matrix of {} has that name", spec.architecture);
                return Err(Error::UnsupportedModel { what, detail });
            }
        }
        for changed in &modules {
            let of = |tensor: &&TensorSpec| module(&tensor.name) == changed;
            let whole: Vec<&TensorSpec> = matrices.iter().copied().filter(of).collect();
            let linear =
                |t: &TensorSpec| t.role != Role::Embedding && t.shape.len() == 2 && t.experts == 1;
            if whole.is_empty() || !whole.iter().copied().all(linear) {
                let wanted = format!("a module of {} with a matrix of its own", spec.architecture);
                return Err(self.wrong(&format!("{PREFIX}{changed}"), wanted, "none of that name"));
            }
            let (rank, factor) = config.of(changed);
            let rows = match whole[0].stored {
                Stored::Rows { of, .. } => of,
                Stored::Whole
                | Stored::Less { .. }
                | Stored::Integers { .. }
                | Stored::Stacked { .. }
                | Stored::Alternate { .. } => whole[0].shape[0],
            };
            let name = |part: &str| format!("{PREFIX}{changed}.lora_{part}.weight");
            for tensor in whole {
                let a = self.thin(&entries, &name("A"), [rank, tensor.shape[1]], 0..rank)?;
                let first = match tensor.stored {
                    Stored::Rows { first, .. } => first,
                    Stored::Whole
                    | Stored::Less { .. }
                    | Stored::Integers { .. }
                    | Stored::Stacked { .. }
                    | Stored::Alternate { .. } => 0,
                };
                let mine = first..first + tensor.shape[0];
                let b = self.thin(&entries, &name("B"), [rows, rank], mine)?;
                let factor = factor as f32;
                self.deltas.insert(tensor.role, Delta { a, b, rank, factor });
            }
            ["A", "B"].iter().for_each(|part| drop(entries.remove(&name(part))));
        }
        if let Some(surplus) = entries.keys().min() {
            let wanted = format!("{PREFIX}MODULE.lora_A.weight and lora_B.weight");
            return Err(self.wrong(surplus, wanted, "another tensor"));
        }
        if self.deltas.is_empty() {
            return Err(self.wrong("its tensors", "at least one pair", "none"));
        }
        Ok(())
    }

    /// Some rows of a stored matrix of a shape.
    fn thin(
        &self,
        entries: &HashMap<String, Entry>,
        name: &str,
        [rows, cols]: [usize; 2],
        of: std::ops::Range<usize>,
    ) -> Result<Thin> {
        let entry = entries.get(name).ok_or_else(|| self.wrong(name, "the tensor", "nothing"))?;
        if entry.shape != [rows, cols] {
            let wanted = format!("shape [{rows}, {cols}]");
            return Err(self.wrong(name, wanted, format!("{:?}", entry.shape)));
        }
        let plain = entry.dtype.filter(|_| entry.codes.is_some_and(|codes| codes != Codes::E4m3));
        let (Some(dtype), Some(codes)) = (plain, entry.codes) else {
            return Err(self.wrong(name, "F32, F16 or BF16", &entry.stored));
        };
        let bytes = Slice::of_rows(&self.file, entry, rows, of);
        if let Some(index) = first_not_finite(Numbers::Plain(dtype), bytes.bytes()) {
            let got = format!("NaN or infinity at number {index}");
            return Err(self.wrong(name, "finite numbers", got));
        }
        Ok(Thin { codes, bytes })
    }

    /// What is added to the matrix of a role, if anything is.
    pub fn delta(&self, role: Role) -> Option<&Delta> {
        self.deltas.get(&role)
    }

    /// Matrices that it changes.
    pub fn matrices(&self) -> usize {
        self.deltas.len()
    }

    /// Whether the file is what it was when it was opened.
    ///
    /// # Errors
    /// [`Error::Load`] with its length or time then and now.
    pub fn unchanged(&self) -> Result<()> {
        self.file.unchanged()
    }

    /// Bytes that tell it from others.
    pub(super) fn bytes(&self) -> &[u8] {
        (*self.file).as_ref()
    }
}

impl Delta {
    /// Adds it to a matrix in float32, sums in the order of ranks; all cores share the rows.
    ///
    /// # Errors
    /// [`Error::GivenUp`] once `stop` is set.
    pub fn add_to(&self, matrix: &mut [f32], stop: &Stop) -> Result<()> {
        let (a, b) = (self.a.numbers(), self.b.numbers());
        let cols = a.len() / self.rank;
        let parts = matrix.chunks_mut(ROWS * cols).zip(b.chunks(ROWS * self.rank));
        let threads = allowed_cores().min(parts.len());
        let parts = Mutex::new(parts);
        let work = || {
            let mut sum = vec![0.0; cols];
            loop {
                let next = parts.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some((rows, weights)) = next.filter(|_| !stop.is_set()) else { return };
                let rows = rows.chunks_exact_mut(cols).zip(weights.chunks_exact(self.rank));
                for (row, weights) in rows {
                    sum.fill(0.0);
                    for (weight, a) in weights.iter().zip(a.chunks_exact(cols)) {
                        sum.iter_mut().zip(a).for_each(|(sum, a)| *sum += weight * a);
                    }
                    row.iter_mut().zip(&sum).for_each(|(w, sum)| *w += self.factor * sum);
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..threads {
                // With fewer threads it takes longer.
                if std::thread::Builder::new().spawn_scoped(scope, work).is_err() {
                    break;
                }
            }
            work();
        });
        Ok(stop.check()?)
    }
}

/// The module that a tensor of an adapter belongs to.
fn module_of(name: &str) -> Option<&str> {
    let module = name.strip_prefix(PREFIX)?;
    module.strip_suffix(".lora_A.weight").or_else(|| module.strip_suffix(".lora_B.weight"))
}

/// The module of a model's tensor.
fn module(name: &str) -> &str {
    name.strip_suffix(".weight").unwrap_or(name)
}
