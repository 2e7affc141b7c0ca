//! The prefill kernel (`kernels/common/prefill.h`): a prompt's positions through all layers at
//! once, where a machine and a model fit it. Elsewhere prompts run as columns of the decode
//! kernel.
//!
//! This is the host's half of `kernels/common/prefill/layout.h`: the scratch that a launch needs,
//! and the definitions by which the kernel checks it. Every launch finds its arrivals at zero:
//! they are written before it, while no kernel runs.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::lower::model::{Class, Experts, Model};
use super::lower::partition::Partition;
use super::source;
use super::wire::{Args, Wire};
use crate::abi::{NormSpan, Scoring, PAGE};
use crate::error::Result;
use crate::machine::{Launch, Machine, MachineInfo, Memory, Module, Platform, Source};

/// Most positions of a launch: so long does a cancel wait at most.
pub const MOST_POSITIONS: usize = 8192;
const THREADS: u32 = 384;
/// Positions of a chunk: what goes through a layer together.
const CHUNK: u32 = 2048;
/// The same, a rank, where the gap between tokens has a bound: tokens are made between layers, and
/// a layer of an 8B model takes about a millisecond then.
const CHUNK_BOUNDED: u32 = 1024;
/// Positions of a tile, and of a narrow one: so many are few.
const TILE: u32 = 256;
const FEW: u32 = 128;
/// Tiles of partial sums.
const ITEMS: u32 = 576;
/// The grid's arrivals, one a tile of partial sums, one a rank; of slices, what is done of eight
/// stages at four groups of places, and the number of the next item.
const COUNTERS: usize = (1 + ITEMS as usize + 8).next_multiple_of(16) + 8 * 4 * 32 + 16;
/// Of scratch: machines promise less.
const ALIGN: usize = 1024;
/// Row tiles of 16 that have a sum of squares together.
const FOUR: u32 = 4;
const STAGE_BYTES: u32 = 48 << 10;
/// Rows of a tile of an expert.
const ROUTED_TILE: u64 = 96;
/// Shared memory before the stages.
const RING: u32 = 11 << 10;
/// Features of a head at most, for which there are registers.
const HEAD_DIM_MAX: u32 = 128;

/// Positions of a chunk where layers have windows: a sequence's pages hold a window and a chunk.
/// The more machines share the lanes, the more positions it takes to keep all blocks at work; of
/// experts, each of which has few of them, as many as there are.
pub fn chunk(ranks: u32, experts: bool) -> u32 {
    if experts {
        CHUNK
    } else {
        (512 * ranks).clamp(1024, CHUNK)
    }
}

/// How the kernel runs a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    platform: Platform,
    /// Positions that go through a layer together.
    pub chunk: u32,
    /// Bytes of activations and sums.
    pub scratch_bytes: u64,
    /// Shared memory of a block.
    pub shared_bytes: u32,
    /// Blocks of the grid.
    pub blocks: u32,
}

/// Whether the kernel has code for all that a model's layers have: sinks, biases of attention's
/// output and a scaled residual only where a rank has one lane; norms over all heads nowhere, nor
/// shared experts, routers by sigmoids, latents, delta rules and gates of attention's output.
fn is_known(model: &Model) -> bool {
    let known = |e: Experts| e.shared.is_none() && !matches!(e.scoring, Scoring::Sigmoid { .. });
    let by_head = |c: &Class| {
        let mixer = c.latent.is_none() && c.delta.is_none() && !c.gated;
        c.head_norm != Some(NormSpan::AllHeads) && c.experts.is_none_or(known) && mixer
    };
    let plain = |c: &Class| !c.sinks && !c.output_bias;
    model.classes.iter().all(by_head)
        && (model.lanes == 1 || (model.residual_shift == 0 && model.classes.iter().all(plain)))
}

impl Plan {
    /// The plan of a model for a machine; none where the kernel does not fit: it wants wide tiles
    /// (sm_90a, or simulated ones), and registers for a head. A sequence has `positions` at most;
    /// one whose layers have windows has pages for a window and `ring` positions more. `bounded`:
    /// so is the gap between the tokens of sequences beside a prompt.
    pub fn new(
        model: &Model,
        partition: &Partition,
        (platform, machine): (Platform, &MachineInfo),
        (positions, ring): (u32, u32),
        bounded: bool,
    ) -> Option<Self> {
        let stages = partition.shared_max.checked_sub(RING)? / STAGE_BYTES;
        let wide_tiles = match platform {
            Platform::Cuda => machine.arch == "sm_90a",
            Platform::Sim => true,
            Platform::Hip => false,
        };
        // It is made for layers of one class: others take prompts as columns of the decode kernel.
        let [class] = &partition.classes[..] else { return None };
        if !is_known(model) {
            return None;
        }
        let fits = wide_tiles
            && class.head_dim <= HEAD_DIM_MAX
            && (2..=4).contains(&stages)
            && 4 * 4 * 64 * class.head_dim <= stages * STAGE_BYTES;
        // Positions that go through together must not overwrite what the first of them still see.
        let sees_all = model.layer.iter().all(|l| l.window == 0 || l.window >= positions);
        let together = if sees_all || ring >= positions { CHUNK } else { ring / TILE * TILE };
        let most = if bounded { CHUNK_BOUNDED * model.ranks } else { CHUNK };
        let chunk = together.min(most).min(positions.next_multiple_of(TILE));
        (fits && chunk > 0).then(|| Self {
            platform,
            chunk,
            scratch_bytes: scratch_bytes(model, partition, chunk),
            // Slices use what is left, experts have longer stages (prefill/layout.h).
            shared_bytes: if model.sliced || class.experts.is_some() {
                partition.shared_max
            } else {
                RING + stages * STAGE_BYTES
            },
            blocks: machine.multiprocessors,
        })
    }

    /// Device memory that it takes: scratch and counters.
    pub fn bytes(&self) -> u64 {
        self.scratch_bytes + (ALIGN + COUNTERS * 8) as u64
    }

    /// What the compiler is given: of the kernel for many positions, then of that for few.
    ///
    /// # Errors
    /// Where the kernel does not fit the machine.
    pub fn sources(&self, model: &Model, partition: &Partition) -> Result<Vec<Source>> {
        [false, true].into_iter().map(|few| self.source(model, partition, few)).collect()
    }

    fn source(&self, model: &Model, partition: &Partition, few: bool) -> Result<Source> {
        // Its grid is the whole machine's, and every block works with every other.
        let partition = &Partition { chiplets: 1, ..partition.clone() };
        let all = [
            ("CHUNK", u64::from(self.chunk)),
            ("PAST", u64::from(past(model))),
            ("SLACK", u64::from(slack(model))),
            ("TP", u64::from(model.sliced && model.ranks > 1)),
            ("ITEMS", u64::from(ITEMS)),
            ("COUNTERS", COUNTERS as u64),
            ("THREADS", u64::from(THREADS)),
            ("SCRATCH", self.scratch_bytes),
            ("ARGS_BYTES", size_of::<PrefillArgs>() as u64),
        ];
        let all = all.map(|(name, value)| (name, value.to_string()));
        let own = all.into_iter().chain([("FEW", few.to_string())]);
        let own = own.map(|(name, value)| (format!("KIE_PREFILL_{name}"), value));
        let source = source::prefill(self.platform, (model, partition), own)?;
        Ok(source.expect("the plan's platform has it"))
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { chunk, blocks, .. } = self;
        let megabytes = self.scratch_bytes.div_ceil(1 << 20);
        writeln!(
            f,
            "prompts   up to {chunk} positions at once, {blocks} blocks, {megabytes} MiB of scratch"
        )
    }
}

/// What shape.h lays out in scratch, and the partial sums behind it.
fn scratch_bytes(model: &Model, partition: &Partition, chunk: u32) -> u64 {
    let frags =
        u64::from(partition.blocks_a_lane(model)) * u64::from(partition.residual.div_ceil(16));
    let (class, of) = (&partition.classes[0], &model.classes[0]);
    let (chunk, attn) = (u64::from(chunk), u64::from(of.heads * class.head_dim));
    let operands = (u64::from(partition.hidden) + attn + u64::from(class.ffn)) * chunk * 2;
    let queries = attn * chunk * 2;
    let residual = frags * chunk / 8 * 32 * 16;
    let squares = frags.div_ceil(u64::from(FOUR)) * chunk * 4;
    let others = match model.lanes_all() {
        1 => 0,
        // What each made, as halves, and all together, as floats.
        lanes => u64::from(past(model) * lanes) * residual + 2 * residual,
    };
    let lane = operands + queries + residual + squares;
    u64::from(model.lanes) * lane
        + others
        + u64::from(ITEMS) * 128 * 128 * 4
        + routed_bytes(partition, chunk)
}

/// Of experts: logits, choices, scales, who takes an expert; of each row that goes to one where it
/// is and its factors, its tile, x, activation and output.
fn routed_bytes(partition: &Partition, chunk: u64) -> u64 {
    let class = &partition.classes[0];
    let Some(of) = &class.experts else { return 0 };
    let (experts, chosen) = (u64::from(of.count), u64::from(of.chosen));
    let rows = (chunk * chosen + 7 * experts + ROUTED_TILE).next_multiple_of(8);
    let tiles = 1 + experts + chunk * chosen / ROUTED_TILE;
    let words = u64::from(2 * partition.hidden + class.ffn) * 2;
    let tables = chunk * (4 * experts.next_multiple_of(2) + 12 * chosen + 4)
        + chunk / 32 * 4 * experts
        + rows * 8
        + tiles * 8;
    // Each begins at a line.
    tables + rows * words + 10 * 128
}

/// Layers whose outputs are kept for other lanes: the longest delay, the layer at work, slack.
fn past(model: &Model) -> u32 {
    let longest = model.layer.iter().flat_map(|l| l.delay).max().unwrap_or(0);
    longest.max(0) as u32 + 1 + slack(model)
}

/// Layers that a rank may be behind the others at their meetings: one less than the shortest delay.
fn slack(model: &Model) -> u32 {
    let delays = model.layer.iter().flat_map(|l| l.delay).filter(|d| *d >= 0);
    let shortest = delays.min().map_or(0, |d| d as u32);
    if model.ranks > 1 {
        shortest.saturating_sub(1)
    } else {
        0
    }
}

/// The launch's one parameter (prefill/layout.h's `PrefillArgs`).
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[repr(C)]
struct PrefillArgs {
    model: Args,
    tokens: u64,
    scratch: u64,
    arrivals: u64,
    hops: [i64; 8],
    first: u32,
    count: u32,
    from: u32,
    to: u32,
    row: u32,
    blocks: u32,
}

// SAFETY: `Args` has no padding (it is `Wire`), then eleven u64s and six u32s.
unsafe impl Wire for PrefillArgs {}
const _: () = assert!(size_of::<PrefillArgs>() == size_of::<Args>() + 11 * 8 + 6 * 4);

/// What a launch takes of a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Whose pages.
    pub row: u32,
    /// Its first position.
    pub first: u32,
    /// How many.
    pub count: u32,
    /// Less than all only where the positions are one chunk.
    pub layers: Range<u32>,
}

/// The compiled kernel and its memory.
pub struct Prefill {
    plan: Plan,
    /// For many positions, and for up to [`FEW`].
    modules: Vec<Arc<dyn Module>>,
    /// Scratch, then the counters.
    memory: Memory,
    /// Bytes from this rank's scratch to each rank's.
    hops: [i64; 8],
}

impl Prefill {
    /// Allocates what launches need.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn new(machine: &dyn Machine, plan: Plan, modules: Vec<Arc<dyn Module>>) -> Result<Self> {
        let bytes = plan.bytes() as usize;
        Ok(Self { plan, modules, memory: machine.alloc_symmetric(bytes)?, hops: [0; 8] })
    }

    /// Where scratch is, to be told to other ranks.
    pub fn scratch(&self) -> u64 {
        self.memory.address.next_multiple_of(ALIGN as u64)
    }

    /// Where each rank's scratch is; their machines have been made to reach each other.
    pub fn connect(&mut self, ranks: &[u64]) {
        let here = self.scratch() as i64;
        for (hop, there) in self.hops.iter_mut().zip(ranks) {
            *hop = *there as i64 - here;
        }
    }

    /// Makes ready for a launch: no rank may have been launched yet.
    ///
    /// # Errors
    /// What the machine says.
    pub fn clear(&self, machine: &dyn Machine) -> Result<()> {
        let at = self.counters() - self.memory.address;
        machine.write(&self.memory, at as usize, &[0; COUNTERS * 8])
    }

    fn counters(&self) -> u64 {
        self.scratch() + self.plan.scratch_bytes
    }

    /// Starts a part of the work on one rank; the tokens of its positions are at `args.prompt`.
    ///
    /// # Errors
    /// What the machine says.
    pub fn launch(
        &self,
        machine: &dyn Machine,
        args: Args,
        part: &Part,
    ) -> Result<Box<dyn crate::machine::Flight>> {
        let args = PrefillArgs {
            model: args,
            tokens: args.prompt,
            scratch: self.scratch(),
            arrivals: self.counters(),
            hops: self.hops,
            first: part.first,
            count: part.count,
            from: part.layers.start,
            to: part.layers.end,
            row: part.row,
            blocks: self.plan.blocks,
        };
        let launch = Launch {
            entry: "kie_prefill",
            blocks: self.plan.blocks,
            threads: THREADS,
            shared_bytes: self.plan.shared_bytes,
            args: args.as_bytes(),
        };
        // Places before the first position, up to a whole page, are computed, too.
        let few = part.first % PAGE as u32 + part.count <= FEW;
        let module = if few { self.modules.last() } else { self.modules.first() };
        machine.launch(module.expect("there is one"), &launch)
    }

    /// Positions that go through a layer together.
    pub fn chunk(&self) -> usize {
        self.plan.chunk as usize
    }

    /// Blocks of a launch.
    pub fn blocks(&self) -> u32 {
        self.plan.blocks
    }
}
