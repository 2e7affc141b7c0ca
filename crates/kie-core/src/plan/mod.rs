//! What runs, where and in which order: a [`Spec`] and its checkpoint become a [`Plan`], whose
//! program is all that a device ever sees. Decisions are made here, before anything is allocated,
//! and print (`Display`).

mod convert;
mod memory;
pub mod quantize;
pub mod save;
mod schedule;
mod state;
mod stored;

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

use kie_kernels::abi::{Codes, Dims, Dtype, Encoding, Layout, Program, Tensor};
use kie_kernels::buffer::Buffer;
use kie_kernels::device::{Device, DeviceInfo, Footprint};
use kie_kernels::numbers::code_to_f32;
use kie_kernels::partition::partition_rows;
use kie_kernels::validate::{validate, ValidProgram};

use crate::error::{Error, Result};
use crate::model::{Role, Rope, Spec};
use crate::request::EngineConfig;
use crate::weights::{self, Checkpoint, Parts};
use convert::{Losses, Tally, Wanted};

pub use memory::Memory;
use stored::{describe, not_quantised};
pub use stored::{Progress, Reads};

/// A model planned for a device, with its weights where the device reads them.
pub struct Plan {
    /// What the device runs.
    pub program: ValidProgram,
    /// What it reads, in the order of the program's buffer indices.
    pub buffers: Vec<Buffer>,
    /// Sizes, as in the program.
    pub dims: Dims,
    /// Sizes in bytes.
    pub memory: Memory,
    /// Bytes of weights that one decoded token reads.
    pub weight_bytes_per_token: u64,
    /// Bytes of KV that one position adds, and that later tokens read.
    pub kv_bytes_per_position: u64,
    device: DeviceInfo,
    /// What each of the device's machines holds.
    machines: Vec<Footprint>,
    /// How the device will run it, in its own words.
    how: String,
    notes: Vec<String>,
}

/// Plans `spec` for `device` and makes the checkpoint's bytes readable to it.
///
/// # Errors
/// [`Error::OutOfMemory`] before anything is loaded, [`Error::Load`] for weights that are not
/// finite, [`Error::InvalidRequest`] for options that do not fit the model.
pub fn prepare(
    spec: &Spec,
    checkpoint: &Checkpoint,
    device: &dyn Device,
    config: &EngineConfig,
    reads: &Reads<'_>,
) -> Result<Plan> {
    // What its machines have no room for is refused before a weight is read.
    outline(spec, checkpoint, device, config)?;
    assemble(spec, checkpoint, device, config, Some(reads))
}

/// As [`prepare`], but no weight is read, checked or converted: good for compiling, not for
/// running.
///
/// # Errors
/// As [`prepare`], but for what only the weights tell.
pub fn outline(
    spec: &Spec,
    checkpoint: &Checkpoint,
    device: &dyn Device,
    config: &EngineConfig,
) -> Result<Plan> {
    assemble(spec, checkpoint, device, config, None)
}

fn assemble(
    spec: &Spec,
    checkpoint: &Checkpoint,
    device: &dyn Device,
    config: &EngineConfig,
    reads: Option<&Reads<'_>>,
) -> Result<Plan> {
    let info = device.info();
    let wanted = convert::wanted(&config.dtype)?;
    check_float32(checkpoint, spec, device, &config.dtype)?;
    if let Wanted::Quantised(_) = wanted {
        not_quantised(spec, checkpoint)?;
    }
    let weights = weights_of(spec, checkpoint, wanted);
    let (dims, states, mut memory) = memory::size(spec, config, (device, &info), weights)?;
    let rotary = rotary_tables(spec, checkpoint, dims.max_positions as usize);
    let mut placed = Placed {
        buffers: vec![load(device, Arc::new(rotary.bytes))?],
        tensors: rotary.tensors,
        roles: HashMap::new(),
        made: Vec::new(),
        notes: Vec::new(),
    };
    placed.all(spec, checkpoint, device, wanted, reads)?;
    let Placed { buffers, tensors, roles, notes, made: _ } = placed;
    let made = schedule::Planned {
        spec,
        dims: &dims,
        tensors: &roles,
        states: &states.layers,
        rotary: &rotary.of_layer,
    };
    let schedule::Schedule { mut steps, vectors } = schedule::schedule(&made);
    let row_partition = partition_rows(&mut steps, &dims, info.blocks);
    let groups = states.groups;
    let program =
        Program { dims, blocks: info.blocks, steps, tensors, vectors, groups, row_partition };
    let program = validate(program, &buffers)?;
    let not_run = |error| not_run(spec, &info, error);
    let how = device.describe(&program).map_err(not_run)?;
    let halves = device.as_halves(&program).map_err(not_run)?;
    let weight_bytes_per_token = read_per_token(spec, &roles, &program.program().tensors, &halves);
    let machines = device.footprints(&program)?;
    memory.held(&machines)?;
    let kv_bytes_per_position = memory.kv_bytes_per_position;
    Ok(Plan {
        program,
        buffers,
        dims,
        memory,
        weight_bytes_per_token,
        kv_bytes_per_position,
        device: info,
        machines,
        how,
        notes,
    })
}

/// What a device says of a valid program that it has no code for.
fn not_run(spec: &Spec, info: &DeviceInfo, error: kie_kernels::Error) -> Error {
    match error {
        kie_kernels::Error::InvalidProgram { step, detail } => Error::UnsupportedModel {
            what: format!("{} on {}", spec.architecture, info.name),
            detail: format!("step {step}, {detail}; device=\"cpu\" runs it"),
        },
        other => other.into(),
    }
}

/// Whether the device keeps float32 weights as they are, or was told what to make of them.
fn check_float32(
    checkpoint: &Checkpoint,
    spec: &Spec,
    device: &dyn Device,
    dtype: &str,
) -> Result<()> {
    let wide = |role| checkpoint.tensor(role).filter(|t| t.encoding.codes == Codes::F32);
    let matrices = spec.tensors.iter().filter(|tensor| tensor.role.is_matrix());
    let found = matrices.filter_map(|tensor| wide(tensor.role)).next();
    let (Some(tensor), true, "auto" | "f32") = (found, device.rounds_f32(), dtype) else {
        return Ok(());
    };
    let detail = format!(
        "dtype must be \"f16\" or \"bf16\" for {} on {}, whose kernels take 16 bits a weight, got \
         {dtype:?}: {} is stored in F32 (\"f16\" rounds less, \"bf16\" takes larger numbers)",
        tensor.path.display(),
        device.info().name,
        tensor.name
    );
    Err(Error::InvalidRequest(detail))
}

/// Tensors where the device reads them.
struct Placed {
    buffers: Vec<Buffer>,
    tensors: Vec<Tensor>,
    /// Index of the tensor of each role.
    roles: HashMap<Role, u32>,
    /// Of tensors that the files have otherwise: the next buffer.
    made: Vec<u8>,
    /// What conversions cost.
    notes: Vec<String>,
}

impl Placed {
    /// All of a checkpoint, in the format `wanted` or one that the device carries.
    fn all(
        &mut self,
        spec: &Spec,
        checkpoint: &Checkpoint,
        device: &dyn Device,
        wanted: Wanted,
        reads: Option<&Reads<'_>>,
    ) -> Result<()> {
        for file in checkpoint.files() {
            let file = Arc::clone(file);
            // Nothing is read of what is only outlined.
            let read = reads.is_some();
            self.buffers.push(if read { load(device, file)? } else { Buffer::in_place(file) });
        }
        let stored = || spec.tensors.iter().flat_map(|tensor| checkpoint.all(tensor.role));
        let total = stored().count() as u64;
        if let Some(Reads { progress, stop }) = reads {
            let tensors: Vec<_> = stored().collect();
            let told = |done: usize| progress("load", done as u64, total);
            checkpoint.check_all_finite(&tensors, &told, stop)?;
        }
        let (mut tally, mut losses) = (Tally::default(), Losses::default());
        for tensor in &spec.tensors {
            self.roles.insert(tensor.role, self.tensors.len() as u32);
            let delta = checkpoint.adapter().and_then(|adapter| adapter.delta(tensor.role));
            for stored in checkpoint.all(tensor.role) {
                let sums = (&mut tally, &mut losses);
                let (entry, bytes) = self.one((stored, delta), device, wanted, sums, reads)?;
                self.push(device, entry, bytes)?;
            }
            self.flush(device)?;
        }
        if let Wanted::Quantised(scheme) = wanted {
            self.notes.extend(tally.note(scheme));
        }
        self.notes.extend(losses.notes());
        self.notes.extend(checkpoint.adapter().map(|adapter| {
            format!("adapter {}: merged into {} matrices", adapter.name, adapter.matrices())
        }));
        reads.inspect(|reads| (reads.progress)("load", total, total));
        if let (true, Some(embedding)) = (spec.tied, self.roles.get(&Role::Embedding).copied()) {
            self.roles.insert(Role::Head, embedding);
        }
        Ok(())
    }
}

impl Placed {
    /// A tensor in its file, or, where the file has it otherwise, the bytes that the device is to
    /// read, and where in them it is. Without `reads` nothing is made, and it is only described.
    fn one(
        &self,
        (stored, delta): (&weights::Tensor, Option<&weights::Delta>),
        device: &dyn Device,
        wanted: Wanted,
        (tally, losses): (&mut Tally, &mut Losses),
        reads: Option<&Reads<'_>>,
    ) -> Result<(Tensor, Vec<u8>)> {
        let mut entry = describe(stored);
        let mut encoding = wanted.encoding(stored, &entry);
        let carried = device.carries(&encoding);
        let as_stored = encoding == entry.encoding && carried;
        let as_stored = as_stored && stored.adjusted.is_none() && delta.is_none();
        let columns = stored.by_columns().filter(|_| as_stored && device.carries_columns());
        if let Some((offset, row_step)) = columns {
            let (layout, offset, row_step) = (Layout::ColumnMajor, offset as u64, row_step as u32);
            return Ok((Tensor { layout, offset, row_step, ..entry }, Vec::new()));
        }
        let as_stored = as_stored && !stored.is_repacked();
        let Some(Reads { stop, .. }) = reads.filter(|_| !as_stored) else {
            return Ok((entry, Vec::new()));
        };
        stop.check()?;
        if let Some((one, factor)) = stored.adjusted {
            let numbers = convert::numbers(&entry, stored).into_iter();
            let bytes = numbers.flat_map(|x| (factor * (x + one)).to_le_bytes()).collect();
            entry.encoding = Encoding::plain(Codes::F32);
            return Ok((entry, bytes));
        }
        let mut parts = stored.parts();
        if let Some(delta) = delta {
            let dtype = convert::merged_as(wanted, stored, &entry)?;
            let bytes = convert::merge(&entry, stored, delta, dtype, stop)?;
            entry.encoding = Codes::plain(dtype).map_or(entry.encoding, Encoding::plain);
            encoding = wanted.encoding(stored, &entry);
            let [scales, zeros] = [&[][..]; 2].map(Cow::Borrowed);
            parts = Parts { codes: Cow::Owned(bytes), scales, zeros };
        }
        match wanted {
            Wanted::Quantised(scheme) if encoding != entry.encoding => {
                parts = tally.quantise(scheme, &entry, &parts, stop)?;
                entry.encoding = encoding;
            }
            Wanted::Stored | Wanted::Plain(_) | Wanted::Quantised(_) => {}
        }
        let plain = match wanted {
            Wanted::Plain(dtype) if encoding != entry.encoding => Some(dtype),
            Wanted::Stored | Wanted::Plain(_) | Wanted::Quantised(_) => {
                (!carried).then_some(Dtype::F16)
            }
        };
        if let Some(dtype) = plain {
            let (bytes, error) = convert::convert(&entry, &parts, stored, dtype, stop)?;
            losses.add(&entry.encoding, dtype, error);
            entry.encoding = Codes::plain(dtype).map_or(entry.encoding, Encoding::plain);
            let [scales, zeros] = [&[][..]; 2].map(Cow::Borrowed);
            parts = Parts { codes: Cow::Owned(bytes), scales, zeros };
        }
        entry.row_step = match &parts.codes {
            Cow::Borrowed(_) => entry.row_step,
            Cow::Owned(_) => 1,
        };
        let scale_offset = (parts.codes.len() as u64).next_multiple_of(4);
        let zero_offset = scale_offset + parts.scales.len() as u64;
        let mut bytes = parts.codes.into_owned();
        bytes.resize(scale_offset as usize, 0);
        bytes.extend(&*parts.scales);
        bytes.extend(&*parts.zeros);
        Ok((Tensor { scale_offset, zero_offset, ..entry }, bytes))
    }

    /// The next tensor, in its file where there are no bytes; else in a buffer that it shares with
    /// those before it, as experts do.
    fn push(&mut self, device: &dyn Device, mut entry: Tensor, bytes: Vec<u8>) -> Result<()> {
        if !bytes.is_empty() {
            if self.made.len() + bytes.len() > MADE_BYTES {
                self.flush(device)?;
            }
            self.made.resize(self.made.len().next_multiple_of(64), 0);
            let (at, buffer) = (self.made.len() as u64, self.buffers.len() as u32);
            (entry.buffer, entry.scale_buffer, entry.offset) = (buffer, buffer, at);
            (entry.scale_offset, entry.zero_offset) =
                (entry.scale_offset + at, entry.zero_offset + at);
            self.made.extend(bytes);
        }
        self.tensors.push(entry);
        Ok(())
    }

    /// What was made becomes a buffer.
    fn flush(&mut self, device: &dyn Device) -> Result<()> {
        if !self.made.is_empty() {
            self.buffers.push(load(device, Arc::new(std::mem::take(&mut self.made)))?);
        }
        Ok(())
    }
}

/// Bytes of tensors that share a buffer, at most, where there are several.
const MADE_BYTES: usize = 256 << 20;

/// Bytes of all weights as they will be read, and whether they are float32.
fn weights_of(spec: &Spec, checkpoint: &Checkpoint, wanted: Wanted) -> (u64, bool) {
    let held = |stored: &weights::Tensor| {
        let entry = describe(stored);
        Tensor { encoding: wanted.encoding(stored, &entry), ..entry }
    };
    let tensors = spec.tensors.iter().flat_map(|tensor| checkpoint.all(tensor.role));
    let mixes = |role: &Role| matches!(role, Role::Q(_) | Role::DeltaIn(_));
    let first = spec.tensors.iter().map(|tensor| tensor.role).find(mixes);
    let first = first.and_then(|role| checkpoint.tensor(role)).map(held);
    let wide = first.is_none_or(|t| t.encoding == Encoding::plain(Codes::F32));
    (tensors.map(|tensor| held(tensor).bytes()).sum(), wide)
}

fn load(device: &dyn Device, bytes: Arc<dyn kie_kernels::buffer::HostBytes>) -> Result<Buffer> {
    Ok(device.load(bytes)?)
}

/// Every tensor but those that a token has a row of, each once; of experts the chosen ones'.
fn read_per_token(
    spec: &Spec,
    roles: &HashMap<Role, u32>,
    tensors: &[Tensor],
    halves: &[u32],
) -> u64 {
    let by_token = |role: &Role| matches!(role, Role::Embedding | Role::TokenExperts(_));
    // What predicts further tokens is read for drafts.
    let mtp = spec.mtp.iter().flat_map(|mtp| &mtp.tensors);
    let beside: HashSet<Role> = mtp.map(|tensor| tensor.role).collect();
    let read = roles.iter().filter(|(role, _)| !by_token(role) && !beside.contains(role));
    let bytes = |(role, index): (&Role, &u32)| {
        let tensor = &tensors[*index as usize];
        let numbers = u64::from(tensor.lanes) * u64::from(tensor.rows) * u64::from(tensor.cols);
        let one = if halves.contains(index) { 2 * numbers } else { tensor.bytes() };
        one * spec.experts(*role).map_or(1, |experts| experts.chosen as u64)
    };
    read.map(bytes).sum()
}

/// A rotary table: frequencies, divided by the checkpoint's factors where it has some, then
/// lengths.
fn turns(
    rope: &Rope,
    head_dim: usize,
    (spec, checkpoint): (&Spec, &Checkpoint),
    positions: usize,
) -> Vec<f32> {
    let factors = checkpoint.tensor(Role::RopeFactors);
    let factor =
        |j: usize| factors.map_or(1.0, |t| f64::from(code_to_f32(t.encoding.codes, t.bytes(), j)));
    let turns = rope.turns(head_dim, &spec.rope_factors, positions);
    let frequencies = turns.frequencies.iter().enumerate().map(|(j, f)| f / factor(j));
    let lengths = turns.frequencies.iter().map(|_| turns.length);
    frequencies.chain(lengths).map(|number| number as f32).collect()
}

/// The rotary tables of a model, in the planner's buffer.
struct RotaryTables {
    bytes: Vec<u8>,
    /// The first tensors of the program.
    tensors: Vec<Tensor>,
    /// Which of them each layer turns by, if any does.
    of_layer: Vec<Option<u32>>,
}

/// One table for all layers that turn alike, where a context of `positions` is served.
fn rotary_tables(spec: &Spec, checkpoint: &Checkpoint, positions: usize) -> RotaryTables {
    let mut all = RotaryTables { bytes: Vec::new(), tensors: Vec::new(), of_layer: Vec::new() };
    let mut known: Vec<(Rope, usize)> = Vec::new();
    for layer in &spec.layers {
        let Some((rope, head_dim)) = layer.mixer.rope() else {
            all.of_layer.push(None);
            continue;
        };
        let at = known.iter().position(|table| *table == (rope, head_dim));
        let at = at.unwrap_or_else(|| {
            known.push((rope, head_dim));
            let table = turns(&rope, head_dim, (spec, checkpoint), positions);
            all.tensors.push(Tensor {
                buffer: 0,
                encoding: Encoding::plain(Codes::F32),
                layout: Layout::RowMajor,
                lanes: 1,
                rows: 2,
                cols: (table.len() / 2) as u32,
                row_step: 1,
                scale_buffer: 0,
                offset: all.bytes.len() as u64,
                scale_offset: 0,
                zero_offset: 0,
            });
            all.bytes.extend(table.iter().flat_map(|number| number.to_le_bytes()));
            known.len() - 1
        });
        all.of_layer.push(Some(at as u32));
    }
    all
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let d = &self.dims;
        let device = &self.device;
        writeln!(
            f,
            "device    {} ({}), {} {}, {}",
            device.name,
            device.model,
            device.blocks,
            if device.name.starts_with("cpu") { "threads" } else { "blocks" },
            device.arch
        )?;
        writeln!(
            f,
            "program   {} steps, {} tensors, {} slots, {} token rows a pass, context {}",
            self.program.program().steps.len(),
            self.program.program().tensors.len(),
            d.slots,
            d.columns,
            d.max_positions
        )?;
        write!(f, "{}", self.memory)?;
        if self.machines.len() > 1 {
            let rows = self.machines.iter().enumerate();
            rows.map(|(rank, machine)| memory::row(rank, machine))
                .try_for_each(|row| f.write_str(&row))?;
        }
        writeln!(
            f,
            "a token   reads {} of weights and {} of KV a position",
            memory::human(self.weight_bytes_per_token),
            memory::human(self.kv_bytes_per_position)
        )?;
        f.write_str(&self.how)?;
        self.notes.iter().try_for_each(|note| writeln!(f, "converted {note}"))
    }
}

impl Plan {
    /// What conversions cost, one line a tensor that was converted.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// What each of the device's machines holds, in order of rank; nothing for the CPU.
    pub fn machines(&self) -> &[Footprint] {
        &self.machines
    }

    /// The device it is planned for.
    pub fn device(&self) -> &DeviceInfo {
        &self.device
    }
}

impl From<kie_kernels::Error> for Error {
    fn from(error: kie_kernels::Error) -> Self {
        match error {
            kie_kernels::Error::NoDevice { device, detail } => Self::NoDevice { device, detail },
            kie_kernels::Error::BackendMissing { device, detail } => {
                Self::BackendMissing { device, detail }
            }
            kie_kernels::Error::DriverTooOld { have, need, .. } => {
                Self::DriverTooOld { have, need }
            }
            kie_kernels::Error::GivenUp => Self::GivenUp { what: "loading", late: false },
            kie_kernels::Error::OutOfMemory { wanted_bytes, device } => {
                let plan = format!("{device}\nlower max_seq_len, max_batch or kv_bytes");
                Self::OutOfMemory { need: wanted_bytes, free: 0, plan }
            }
            kie_kernels::Error::Indivisible { ranks, detail } => {
                Self::UnsupportedModel { what: format!("{ranks} ranks"), detail }
            }
            kie_kernels::Error::Hang(detail) => Self::EngineHang { detail },
            other => Self::Device(other.to_string()),
        }
    }
}
