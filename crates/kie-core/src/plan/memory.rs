//! How many bytes of what: weights, KV pages, scratch. Refuses before anything is loaded.

use std::collections::BTreeSet;
use std::fmt;

use kie_kernels::abi::{Dims, Dtype, PAGE};
use kie_kernels::device::{Device, DeviceInfo, Footprint};

use super::state::{self, States};
use crate::error::{Error, Result};
use crate::model::{Index, Join, Mixer, Mlp, Spec};
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
    pub(super) fn held(&mut self, machines: &[Footprint]) -> Result<()> {
        if machines.is_empty() {
            return Ok(());
        }
        let sum = |of: fn(&Footprint) -> u64| machines.iter().map(of).sum();
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
pub(super) fn row(rank: usize, machine: &Footprint) -> String {
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
) -> Result<(Dims, States, Memory)> {
    let context = config.max_seq_len.unwrap_or(spec.max_positions);
    if context < 2 || context > spec.stretched {
        return Err(Error::InvalidRequest(format!(
            "max_seq_len must be 2 to {} for this model, got {context}",
            spec.stretched
        )));
    }
    if config.max_batch == 0 || config.max_batch > 256 {
        let got = config.max_batch;
        return Err(Error::InvalidRequest(format!("max_batch must be 1 to 256, got {got}")));
    }
    let slots = config.max_batch as u32;
    let experts = spec.layers.iter().any(|l| matches!(l.mlp, Mlp::Experts(_)));
    let dims = Dims {
        hidden: spec.hidden as u32,
        lanes: spec.lanes as u32,
        vocab: spec.vocab as u32,
        eps: spec.norm_eps,
        max_positions: context as u32,
        slots,
        columns: slots + device.chunk(experts).min(context as u32),
    };
    let mut states = state::states(spec, kv_dtype(spec, wide));
    let scratch_bytes = scratch(spec, &dims) + state::working(&states.groups, &dims, device);
    let left = info.free_bytes.saturating_sub(weight_bytes + scratch_bytes);
    let budget = config.kv_bytes.unwrap_or(left / 10 * 8);
    state::share(&mut states.groups, &dims, device, budget);
    let (kv_bytes, page_bytes) =
        (state::bytes(&states.groups, device), state::bytes_of_one(&states.groups, device));
    let whole_pages = u64::from(states.groups[0].pages);
    let memory = Memory {
        weight_bytes,
        kv_bytes,
        scratch_bytes,
        free_bytes: info.free_bytes,
        kv_bytes_per_position: page_bytes / PAGE as u64,
        kv_positions: whole_pages * PAGE as u64,
    };
    let short = whole_pages < dims.max_pages() as u64;
    if memory.need() > info.free_bytes || short {
        let one = state::least(&states.groups, &dims, device);
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
    Ok((dims, states, memory))
}

/// Widest position, in bytes of float32 KV, that is kept in float32.
const WIDE_KV: usize = 64 << 10;

/// Float32 for float32 weights and wherever a position is small: rounding keys to float16 costs up
/// to 1e-3 of the logits, and memory is what it saves. A function of the model alone, so that the
/// same request gives the same bits whatever is free.
fn kv_dtype(spec: &Spec, wide: bool) -> Dtype {
    let layer = |mixer: &Mixer| match mixer {
        Mixer::Attention(attention) => attention.kv_width() * 2 * 4,
        Mixer::Latent(latent) => latent.key_width() * 4,
        // Windows are as long as they are; a position adds its share of entries.
        Mixer::Compressed(of) => of.entries.map_or(0, |entries| {
            (of.dim + entries.index.map_or(0, |index| index.dim)) * 4 / entries.every
        }),
        Mixer::Delta(_) => 0,
    };
    let position: usize = spec.layers.iter().map(|l| layer(&l.mixer)).sum();
    if wide || position <= WIDE_KV {
        Dtype::F32
    } else {
        Dtype::F16
    }
}

/// Activations of a pass (each vector, its normed and raw twins, packed copies) and the mailbox.
fn scratch(spec: &Spec, dims: &Dims) -> u64 {
    let parallel = spec.hyper.map_or(0, |hyper| 1 + hyper.streams as u64);
    let streams = (6 + parallel) * u64::from(dims.lanes * dims.hidden);
    let shapes = spec.layers.iter().map(|layer| {
        let heads = match &layer.mixer {
            Mixer::Attention(a) => (a.query_rows() + 2 * a.kv_width(), a.query_width()),
            Mixer::Latent(l) => {
                let down = l.query_rank.unwrap_or(spec.hidden) + l.key_width();
                let values = l.heads * l.value;
                (down + l.query_width() + l.heads * l.key_width() + values, values)
            }
            Mixer::Compressed(c) => {
                let made = c.entries.map_or(0, |entries| {
                    let of = |index: Index| index.heads * (index.dim + 1) + index.chosen;
                    2 * entries.rows(c.dim) + entries.index.map_or(0, of)
                });
                let down = c.query_rank + c.dim + c.group_rows();
                (down + made + c.query_width(), c.query_width())
            }
            Mixer::Delta(d) => {
                (d.channels() + d.value_width() + 2 * d.value_heads, d.value_width())
            }
        };
        let inner = match &layer.mlp {
            Mlp::Gated(mlp) => mlp.ffn,
            // Inputs are packed for each expert that a column goes to.
            Mlp::Experts(of) => {
                let shared = of.shared.map_or(0, |shared| shared.each.ffn);
                of.chosen * (of.each.ffn + spec.hidden.max(of.each.ffn)) + shared
            }
        };
        (heads, inner)
    });
    let (heads, inner): (BTreeSet<_>, BTreeSet<_>) = shapes.unzip();
    let heads: usize = heads.iter().map(|(taken_in, _)| taken_in).sum();
    let (heads, inner) = (3 * heads as u64, 3 * inner.iter().sum::<usize>() as u64);
    let delay = |join: Join| match join {
        Join::Sum | Join::Own { .. } => 0,
        Join::Delayed { layers } => layers,
    };
    let delays = spec.layers.iter().map(|l| delay(l.mlp_join)).max().unwrap_or(0) as u64;
    let kept = 2 * (delays + 1) * u64::from(dims.lanes * dims.hidden);
    let columns = u64::from(dims.columns) * 4 * (streams + heads + inner + kept);
    let slot = u64::from(dims.max_positions) * 24 + u64::from(dims.vocab) * 40;
    columns + u64::from(dims.slots) * slot
}
