//! How many bytes of what: weights, KV pages, scratch. Refuses before anything is loaded.

use std::fmt;

use kie_kernels::abi::{Dims, Dtype, PAGE};
use kie_kernels::device::{Device, DeviceInfo, Holding};

use super::{interleaved, schedule};
use crate::error::{Error, Result};
use crate::memory::ring_pages;
use crate::model::Spec;
use crate::request::EngineConfig;

/// Sizes of a plan, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// Weights as the device reads them.
    pub weight_bytes: u64,
    /// All KV pages.
    pub kv_bytes: u64,
    /// Activations of one pass, and the mailbox.
    pub scratch_bytes: u64,
    /// Free on the device when the plan was made.
    pub free_bytes: u64,
    /// KV of one position over all layers.
    pub kv_bytes_per_position: u64,
    /// KV positions that fit at once.
    pub kv_positions: u64,
}

impl Memory {
    /// Everything.
    pub fn need(&self) -> u64 {
        self.weight_bytes + self.kv_bytes + self.scratch_bytes
    }

    /// What the device's machines truly hold, once it knows the program; nothing where there is
    /// nothing to add.
    pub(super) fn held(&mut self, machines: &[Holding]) -> Result<()> {
        if machines.is_empty() {
            return Ok(());
        }
        let sum = |of: fn(&Holding) -> u64| machines.iter().map(of).sum();
        self.weight_bytes = sum(|m| m.weight_bytes);
        self.kv_bytes = sum(|m| m.kv_bytes);
        self.scratch_bytes = sum(|m| m.scratch_bytes);
        let Some(short) = machines.iter().find(|m| m.need() > m.free_bytes) else {
            return Ok(());
        };
        let (need, free) = (short.need(), short.free_bytes);
        let rows: String = machines.iter().enumerate().map(|(rank, m)| row(rank, m)).collect();
        let plan = format!("{self}{rows}lower max_batch or kv_bytes");
        Err(Error::OutOfMemory { need, free, plan })
    }
}

/// A line of what a machine holds.
pub(super) fn row(rank: usize, machine: &Holding) -> String {
    format!(
        "  rank {rank}: {}; weights {} + KV {} + scratch {} = {}, free {}\n",
        machine.part,
        human(machine.weight_bytes),
        human(machine.kv_bytes),
        human(machine.scratch_bytes),
        human(machine.need()),
        human(machine.free_bytes)
    )
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "memory    weights {} + KV {} ({} positions) + scratch {} = {}, free {}",
            human(self.weight_bytes),
            human(self.kv_bytes),
            self.kv_positions,
            human(self.scratch_bytes),
            human(self.need()),
            human(self.free_bytes)
        )
    }
}

/// A byte count for people.
pub(crate) fn human(bytes: u64) -> String {
    let units = ["B", "kB", "MB", "GB", "TB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    if unit == 0 {
        format!("{bytes} B")
    } else {
        format!("{value:.1} {}", units[unit])
    }
}

/// Sizes of the model on this device under this configuration: its weights take so many bytes, and
/// are float32 or not.
pub(super) fn size(
    spec: &Spec,
    config: &EngineConfig,
    (device, info): (&dyn Device, &DeviceInfo),
    (weight_bytes, wide): (u64, bool),
) -> Result<(Dims, Memory)> {
    let context = config.max_seq_len.unwrap_or(spec.max_positions);
    if context < 2 || context > spec.max_positions {
        return Err(Error::InvalidRequest(format!(
            "max_seq_len must be 2 to {} for this model, got {context}",
            spec.max_positions
        )));
    }
    if config.max_batch == 0 || config.max_batch > 256 {
        let got = config.max_batch;
        return Err(Error::InvalidRequest(format!("max_batch must be 1 to 256, got {got}")));
    }
    let slots = config.max_batch as u32;
    let windowed = spec.layers.iter().filter(|l| l.window.is_some()).count() as u32;
    let lanes = spec.lanes as u32;
    let mut dims = Dims {
        hidden: spec.hidden as u32,
        lanes,
        heads: spec.heads as u32 / lanes,
        kv_heads: spec.kv_heads as u32 / lanes,
        head_dim: spec.head_dim as u32,
        ffn: spec.ffn as u32 / lanes,
        vocab: spec.vocab as u32,
        eps: spec.norm_eps,
        rope_interleaved: interleaved(spec.rope.style),
        head_mode: schedule::head_mode(spec.head),
        kv_dtype: kv_dtype(spec, wide),
        max_positions: context as u32,
        slots,
        columns: slots + device.chunk().min(context as u32),
        group_layers: [spec.layers.len() as u32 - windowed, windowed],
        group_pages: [0, 0],
    };
    let scratch_bytes = scratch(spec, &dims);
    let left = info.free_bytes.saturating_sub(weight_bytes + scratch_bytes);
    let page_bytes = [0, 1].map(|group| device.page_bytes(&dims, group));
    pages(&mut dims, spec, config, left, page_bytes);
    let kv_bytes = (0..2).map(|g| page_bytes[g] * u64::from(dims.group_pages[g])).sum();
    let memory = Memory {
        weight_bytes,
        kv_bytes,
        scratch_bytes,
        free_bytes: info.free_bytes,
        kv_bytes_per_position: (page_bytes[0] + page_bytes[1]) / PAGE as u64,
        kv_positions: u64::from(dims.group_pages[0]) * PAGE as u64,
    };
    let short = u64::from(dims.group_pages[0]) < dims.max_pages() as u64;
    if memory.need() > info.free_bytes || short {
        let one = dims.max_pages() as u64 * (page_bytes[0] + page_bytes[1]);
        let need = weight_bytes + scratch_bytes + kv_bytes.max(one);
        if let Some(got) = config.kv_bytes.filter(|_| short && need <= info.free_bytes) {
            return Err(Error::InvalidRequest(format!(
                "kv_bytes must be at least {one}, one sequence of max_seq_len {context}, got {got}"
            )));
        }
        let lower = match config.kv_bytes {
            None => "lower max_seq_len or max_batch",
            Some(_) => "lower kv_bytes, max_seq_len or max_batch",
        };
        let plan = format!("{memory}{lower}: one sequence of {context} needs {} of KV", human(one));
        return Err(Error::OutOfMemory { need, free: info.free_bytes, plan });
    }
    Ok((dims, memory))
}

/// Widest position, in bytes of float32 KV, that is kept in float32.
const WIDE_KV: usize = 64 << 10;

/// Float32 for float32 weights and wherever a position is small: rounding keys to float16 costs up
/// to 1e-3 of the logits, and memory is what it saves. A function of the model alone, so that the
/// same request gives the same bits whatever is free.
fn kv_dtype(spec: &Spec, wide: bool) -> Dtype {
    let position = spec.layers.len() * spec.kv_heads * spec.head_dim * 2 * 4;
    if wide || position <= WIDE_KV {
        Dtype::F32
    } else {
        Dtype::F16
    }
}

/// Shares the budget among the groups: room for every slot's longest sequence where there is
/// memory for it, else at least the rings of the windowed layers and the rest for the others.
fn pages(dims: &mut Dims, spec: &Spec, config: &EngineConfig, left: u64, bytes: [u64; 2]) {
    let most = u64::from(dims.slots) * dims.max_pages() as u64;
    let budget = config.kv_bytes.unwrap_or(left / 10 * 8);
    let both = (budget / (bytes[0] + bytes[1]).max(1)).min(most);
    let window = spec.layers.iter().filter_map(|l| l.window).max().unwrap_or(0);
    // A ring may be longer than a sequence; `Pages` counts on it for every slot all the same.
    let rings = u64::from(dims.slots) * ring_pages(window, dims.chunk()) as u64;
    let windowed = if dims.group_layers[1] > 0 { both.max(rings) } else { 0 };
    let full = match bytes[0] {
        // No layer sees everything: the group's pages are free of charge and only count positions.
        0 => most,
        bytes_0 => (budget.saturating_sub(windowed * bytes[1]) / bytes_0).min(most),
    };
    dims.group_pages = [full as u32, windowed as u32];
}

/// Activations of a pass (each vector, its normed and raw twins, packed copies) and the mailbox.
fn scratch(spec: &Spec, dims: &Dims) -> u64 {
    let streams = 6 * u64::from(dims.lanes * dims.hidden);
    let heads = 3 * u64::from(dims.lanes * (dims.heads + 2 * dims.kv_heads) * dims.head_dim);
    let inner = 3 * u64::from(dims.lanes * dims.ffn);
    let delays = spec.layers.iter().filter_map(|l| l.mlp_mix.others).max().unwrap_or(0) as u64;
    let partials = 2 * (delays + 1) * u64::from(dims.lanes * dims.hidden);
    let columns = u64::from(dims.columns) * 4 * (streams + heads + inner + partials);
    let slot = u64::from(dims.max_positions) * 24 + u64::from(dims.vocab) * 40;
    columns + u64::from(dims.slots) * slot
}
