//! The prefill kernel (`kernels/common/prefill.h`): a prompt's positions through all layers at
//! once, where a machine and a model fit it. Elsewhere prompts run as columns of the decode
//! kernel.
//!
//! Layers go by class, as when decoding; here are the sizes that all classes share and where each
//! activation lies in scratch ([`Plan::constants`], which the kernel is compiled with). Every
//! launch finds its arrivals at zero: they are written before it, while no kernel runs.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use super::lower::delta::DeltaPartition;
use super::lower::model::{Class, Model};
use super::lower::partition::{ClassPartition, Partition};
use super::source;
use super::wire::{Args, PrefillArgs, Wire};
use crate::abi::{NormSpan, PAGE};
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
/// Tasks of partial sums, and bytes of each: 128 rows of as many places.
const ITEMS: u32 = 576;
const ITEM_BYTES: u32 = 128 * 128 * 4;
/// Places of a group of the queue of tasks.
const GROUP: u32 = 2 * TILE;
/// Words of a counter of the queue: lines of its own.
const STREAM_WORDS: u32 = 32;
/// Counters: the grid's arrivals, one a tile of partial sums; one a rank; of the queue, what is
/// done of eight stages at each group of places, and the number of the next task.
const COUNT_RANKS: u32 = 1 + ITEMS;
const COUNT_STREAMS: u32 = (COUNT_RANKS + 8).next_multiple_of(16);
const COUNT_TASKS: u32 = COUNT_STREAMS + 8 * CHUNK.div_ceil(GROUP) * STREAM_WORDS;
const COUNTERS: usize = COUNT_TASKS as usize + 16;
/// Of scratch: machines promise less.
const ALIGN: usize = 1024;
/// Row tiles of 16 that have a sum of squares together.
const FOUR: u32 = 4;
const STAGE_BYTES: u32 = 48 << 10;
const STAGES_MOST: u32 = 4;
/// Rows of a tile of an expert.
const ROUTED_TILE: u32 = 96;
/// Shared memory before the stages.
const RING: u32 = 11 << 10;
/// The same, and a stage, where there are narrow tiles alone: 192 rows of weights and [`FEW`]
/// positions. Pages of wide heads take more.
const RING_NARROW: u32 = 8 << 10;
const STAGE_NARROW: u32 = 40 << 10;
/// The same where two of these do not fit (64 KB, as on gfx942): of half as much of k, and 128 rows
/// of weights; what is left of three stages is for pages.
const RING_SHORT: u32 = 6 << 10;
const STAGE_SHORT: u32 = 19 << 10;
/// Features of a head at most, for which there are registers; from half as many on two teams share
/// a head's values.
const HEAD_DIM_MAX: u32 = 256;
/// Warps of decoding that have as many threads as multiply here: units of a delta rule are theirs.
const UNIT_WARPS: u32 = 8;
/// Places that a delta rule takes at a time, and words of their rows (`Scan`,
/// prefill/delta_scan.h).
const SCAN_PLACES: u32 = 16;
const SCAN_THIN: u32 = 12;
const SCAN_SOLVED: u32 = 20;

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

/// How products are cut, by what a machine multiplies with, and the shared memory for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tiles {
    /// By each warp for itself, which asks for less of shared memory then.
    narrow: bool,
    /// A stage has half as much of k.
    short: bool,
    /// Positions of a tile, at most.
    positions: u32,
    /// Bytes before the stages, and of a stage.
    ring: u32,
    stage: u32,
    /// Pages of keys and values that are there at once, at least.
    pages: u32,
}

impl Tiles {
    fn of(machine: &MachineInfo, head_dim: u32) -> Self {
        if machine.multiplies_wide() {
            let pages = if head_dim > HEAD_DIM_MAX / 2 { 3 } else { 4 };
            let (ring, stage) = (RING, STAGE_BYTES);
            return Self { narrow: false, short: false, positions: TILE, ring, stage, pages };
        }
        let short = machine.shared_bytes < RING_NARROW + 2 * STAGE_NARROW;
        let (ring, stage, pages) = match short {
            true => (RING_SHORT, STAGE_SHORT, 1),
            false if head_dim > HEAD_DIM_MAX / 2 => (RING_NARROW, STAGE_BYTES, 2),
            false => (RING_NARROW, STAGE_NARROW, 2),
        };
        Self { narrow: true, short, positions: FEW, ring, stage, pages }
    }
}

/// How the kernel runs a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    platform: Platform,
    tiles: Tiles,
    /// Positions of a tile of many. Beside a delta rule the compiler has registers for half as
    /// many: with more it lets no products run while others are made ready (C7512).
    tile: u32,
    /// Positions that go through a layer together.
    pub chunk: u32,
    /// Bytes of activations and sums.
    pub scratch_bytes: u64,
    /// Shared memory of a block.
    pub shared_bytes: u32,
    /// Blocks of the grid.
    pub blocks: u32,
    /// Classes of layers.
    classes: usize,
    /// It leaves the residual of all positions behind.
    residuals: bool,
}

/// Whether the kernel has code for all that a model's layers have: sinks, biases of attention's
/// output, delta rules, shared experts and a scaled residual only where a rank has one lane; norms
/// over all heads nowhere, nor latents, nor entries.
fn is_known(model: &Model) -> bool {
    let plain_heads = |c: &Class| c.latent.is_none() && c.compressed.is_none();
    let by_head = |c: &Class| c.head_norm != Some(NormSpan::AllHeads) && plain_heads(c);
    let shares = |c: &Class| c.experts.is_some_and(|e| e.shared.is_some());
    let plain = |c: &Class| !c.sinks && !c.output_bias && c.delta.is_none() && !shares(c);
    let chosen = |c: &Class| c.experts.is_none_or(|e| !e.by_token);
    model.classes.iter().all(|c| by_head(c) && chosen(c))
        && (model.lanes == 1 || (model.residual_shift == 0 && model.classes.iter().all(plain)))
}

/// Whether so many stages have room for pages, of which two are at work and one under way, and for
/// the inputs of delta rules.
fn has_room(partition: &Partition, head_dim: u32, tiles: Tiles, stages: u32) -> bool {
    let room = stages * tiles.stage;
    let delta =
        |d: &DeltaPartition| partition.warps == UNIT_WARPS && scan_bytes(d, tiles.short) <= room;
    head_dim <= HEAD_DIM_MAX
        && tiles.pages * 4 * PAGE as u32 * head_dim <= room
        && partition.classes.iter().filter_map(|class| class.delta.as_ref()).all(delta)
}

/// Shared memory of a delta rule's scan: `Scan` in prefill/delta_scan.h has what is where.
fn scan_bytes(delta: &DeltaPartition, short: bool) -> u32 {
    let (columns, keys) = (delta.unit.cols.div_ceil(16), delta.key().div_ceil(16));
    let inputs = delta.unit.channels.next_multiple_of(4) * if short { 1 } else { 2 };
    let values = delta.unit.cols.next_multiple_of(4);
    let of_place = inputs + 2 * values + 2 * (8 * keys + 4) + SCAN_SOLVED + SCAN_THIN + 8;
    let of_column = SCAN_SOLVED + 2 * SCAN_THIN;
    4 * (SCAN_PLACES * of_place + 16 * (keys * SCAN_THIN + columns * of_column))
        + 512 * columns * keys
        + 16 * values
}

impl Plan {
    /// The plan of a model for a machine; none where the kernel does not fit: it wants shared
    /// memory for two stages, and registers for a head. A sequence has `positions` at most; one
    /// whose layers have windows has pages for a window and `ring` positions more. `bounded`: so
    /// is the gap between the tokens of sequences beside a prompt.
    pub fn new(
        model: &Model,
        partition: &Partition,
        (platform, machine): (Platform, &MachineInfo),
        (positions, ring): (u32, u32),
        bounded: bool,
    ) -> Option<Self> {
        let attends = partition.classes.iter().filter(|class| class.attends());
        let head_dim = attends.map(|class| class.head_dim).max().unwrap_or(0);
        let tiles = Tiles::of(machine, head_dim);
        let has_delta = partition.classes.iter().any(|class| class.delta.is_some());
        let stages = partition.shared_max.checked_sub(tiles.ring)? / tiles.stage;
        let stages = stages.min(STAGES_MOST);
        // Its products are those of gfx942's matrix unit.
        let can_multiply = platform != Platform::Hip || machine.arch.starts_with("gfx942");
        let fits = can_multiply
            && is_known(model)
            && stages >= 2
            && has_room(partition, head_dim, tiles, stages);
        // Positions that go through together must not overwrite what the first of them still see.
        let sees_all = model.layer.iter().all(|l| l.window == 0 || l.window >= positions);
        let together = if sees_all || ring >= positions { CHUNK } else { ring / TILE * TILE };
        let most = if bounded { CHUNK_BOUNDED * model.ranks } else { CHUNK };
        let chunk = together.min(most).min(positions.next_multiple_of(TILE));
        (fits && chunk > 0).then(|| Self {
            platform,
            tiles,
            tile: tiles.positions / if has_delta && !tiles.narrow { 2 } else { 1 },
            chunk,
            scratch_bytes: Scratch::new(model, partition, chunk).bytes,
            // Slices use what is left, experts have longer stages (prefill/layout.h).
            shared_bytes: if model.sliced || partition.has_experts() {
                partition.shared_max
            } else {
                tiles.ring + stages * tiles.stage
            },
            blocks: machine.multiprocessors,
            classes: partition.classes.len(),
            residuals: false,
        })
    }

    /// With the residual of all positions left behind, if something predicts further tokens from
    /// it: code that other models' kernels go without.
    #[must_use]
    pub fn with_residuals(self, predicts: bool) -> Self {
        Self { residuals: predicts, ..self }
    }

    /// Positions whose residual is left behind.
    pub fn residuals(&self) -> u32 {
        if self.residuals {
            self.chunk
        } else {
            0
        }
    }

    /// Device memory that it takes: scratch and counters.
    pub fn bytes(&self) -> u64 {
        self.scratch_bytes + (ALIGN + COUNTERS * 8) as u64
    }

    /// What the compiler is given: of the kernel for many positions, then of that for few, where
    /// these are cut in another way.
    ///
    /// # Errors
    /// Where the kernel does not fit the machine.
    pub fn sources(&self, model: &Model, partition: &Partition) -> Result<Vec<Source>> {
        let all = if self.tiles.narrow { &[true][..] } else { &[false, true] };
        all.iter().map(|few| self.source(model, partition, *few)).collect()
    }

    fn source(&self, model: &Model, partition: &Partition, few: bool) -> Result<Source> {
        // Its grid is the whole machine's, and every block works with every other.
        let partition = &Partition { chiplets: 1, ..partition.clone() };
        let own = self.constants(model, partition, few);
        let source = source::prefill(self.platform, (model, partition), &own)?;
        Ok(source.expect("the plan's platform has it"))
    }

    /// What the generated header has for this kernel besides the sizes of decoding.
    pub fn constants(&self, model: &Model, partition: &Partition, few: bool) -> String {
        let scratch = Scratch::new(model, partition, self.chunk);
        let ints = [
            ("kChunk", self.chunk),
            ("kWideN", if few { self.tiles.positions } else { self.tile }),
            ("kNarrowN", FEW),
            ("kNarrowStage", self.tiles.stage),
            ("kPrefillThreads", THREADS),
            ("kFrags", frags(partition)),
            ("kFours", frags(partition).div_ceil(FOUR)),
            ("kAttnMost", attn_most(partition, model)),
            ("kPast", past(model)),
            ("kSlack", slack(model)),
            ("kKSplitTiles", ITEMS),
            ("kGroups", self.chunk.div_ceil(GROUP)),
            ("kStreamWords", STREAM_WORDS),
            ("kCountRanks", COUNT_RANKS),
            ("kCountStreams", COUNT_STREAMS),
            ("kCountTasks", COUNT_TASKS),
            ("kRoutedWide", ROUTED_TILE),
            ("kRoutedRows", scratch.routed.rows),
            ("kRoutedTiles", scratch.routed.tiles),
            ("kLogitsRow", scratch.routed.logits),
            ("kTakersRow", scratch.routed.experts),
        ];
        let bools = [
            ("kTensorParallel", model.sliced && model.ranks > 1),
            ("kFew", few),
            ("kAllNarrow", self.tiles.narrow),
            ("kShortStages", self.tiles.short),
            ("kLeavesResiduals", self.residuals),
        ];
        let line =
            |kind: &str, name: &str, value: u64| format!("constexpr {kind} {name} = {value};\n");
        let ints = ints.iter().map(|(name, value)| line("int", name, u64::from(*value)));
        let bools = bools.iter().map(|(name, value)| line("bool", name, u64::from(*value)));
        let at = scratch.at.iter().map(|(name, at)| line("long", &format!("kScr{name}"), *at));
        ints.chain(bools).chain(at).collect()
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { chunk, tile, blocks, classes, .. } = self;
        let megabytes = self.scratch_bytes.div_ceil(1 << 20);
        let of =
            if *classes > 1 { format!(", {classes} classes of layers") } else { String::new() };
        writeln!(
            f,
            "prompts   up to {chunk} positions at once, {tile} a tile, {blocks} blocks, \
             {megabytes} MiB of scratch{of}"
        )
    }
}

/// Row tiles of 16 of the residual, over the blocks that own its rows.
const fn frags(partition: &Partition) -> u32 {
    partition.hidden.div_ceil(partition.residual) * partition.residual.div_ceil(16)
}

/// Numbers of all query heads, of the class that has most.
fn attn_most(partition: &Partition, model: &Model) -> u32 {
    let classes = partition.classes.iter().zip(&model.classes);
    classes.map(|(class, of)| of.heads * class.head_dim).max().unwrap_or(0)
}

/// Sizes of what goes to experts, of the class that has most of each; nothing where there are none.
#[derive(Debug, Default)]
struct Routed {
    /// Experts.
    experts: u32,
    /// Experts of a place.
    chosen: u32,
    /// Logits of a place, with padding.
    logits: u32,
    /// Rows of all places that go to an expert: each expert's begin at a whole eight.
    rows: u32,
    /// Tiles of them.
    tiles: u32,
    /// Width of an activation.
    ffn: u32,
}

impl Routed {
    fn new(model: &Model, partition: &Partition, chunk: u32) -> Self {
        let mut most = Self::default();
        for (of, class) in model.classes.iter().zip(&partition.classes) {
            let Some(of) = &of.experts else { continue };
            let rows = chunk * of.chosen + 7 * of.count + ROUTED_TILE;
            most.experts = most.experts.max(of.count);
            most.chosen = most.chosen.max(of.chosen);
            most.logits = most.logits.max(of.logits().next_multiple_of(2));
            most.rows = most.rows.max(rows.next_multiple_of(8));
            most.tiles = most.tiles.max(of.count + chunk * of.chosen / ROUTED_TILE);
            most.ffn = most.ffn.max(class.ffn);
        }
        most
    }
}

/// Where activations and sums lie in scratch, each with room for the class that needs most.
struct Scratch {
    routed: Routed,
    /// Names, and bytes from the beginning.
    at: Vec<(&'static str, u64)>,
    bytes: u64,
}

impl Scratch {
    fn new(model: &Model, partition: &Partition, chunk: u32) -> Self {
        let routed = Routed::new(model, partition, chunk);
        let most = |of: &dyn Fn(&Class, &ClassPartition) -> u32| {
            let all = model.classes.iter().zip(&partition.classes);
            u64::from(all.map(|(class, part)| of(class, part)).max().unwrap_or(0))
        };
        let ffn = most(&|_, part| part.experts.map_or(part.ffn, |e| e.shared));
        let shared = u64::from(u8::from(most(&|_, p| p.experts.map_or(0, |e| e.shared)) > 0));
        let is_delta = |class: &Class, count| if class.delta.is_some() { count } else { 0 };
        let delta_rows = most(&|class, part| is_delta(class, class.input_rows(part.head_dim)));
        let delta_heads = most(&|class, _| is_delta(class, class.heads));
        let (lanes, attn) = (u64::from(model.lanes), u64::from(attn_most(partition, model)));
        let (chunk, hidden) = (u64::from(chunk), u64::from(partition.hidden));
        let frags = u64::from(frags(partition));
        // Of a lane, as threads hold it: four numbers each.
        let residual = frags * chunk / 8 * 32 * 4;
        let others = if model.lanes_all() > 1 { u64::from(model.lanes_all()) } else { 0 };
        let (past, totals) = (u64::from(past(model)), u64::from(u8::from(others > 0)));
        let Routed { experts, chosen, logits, rows, tiles, .. } = routed;
        let [experts, chosen, logits, rows, tiles, routed_ffn] =
            [experts, chosen, logits, rows, tiles, routed.ffn].map(u64::from);
        let sizes = [
            ("X", lanes * hidden * chunk * 2),
            ("Attn", lanes * attn * chunk * 2),
            ("Act", lanes * ffn * chunk * 2),
            ("Q", lanes * attn * chunk * 2),
            ("Residual", lanes * residual * 4),
            ("Squares", lanes * frags.div_ceil(u64::from(FOUR)) * chunk * 4),
            // What each lane made, as halves, all together, as floats; of attention and the mlp.
            ("Past", 2 * past * others * residual * 2),
            ("Totals", 2 * totals * residual * 4),
            ("KSplits", u64::from(ITEMS) * u64::from(ITEM_BYTES)),
            ("Logits", chunk * 4 * logits),
            ("Choices", chunk * 8 * chosen),
            ("Scales", if rows > 0 { chunk * 4 } else { 0 }),
            ("Takers", chunk / 32 * 4 * experts),
            ("Places", chunk * 4 * chosen),
            ("Factors", rows * 8),
            ("Tiles", if rows > 0 { (1 + tiles) * 8 } else { 0 }),
            ("RoutedX", 2 * rows * hidden),
            ("RoutedAct", 2 * rows * routed_ffn),
            ("Parts", 2 * rows * hidden),
            ("Shared", 2 * shared * chunk * hidden),
            ("Delta", 4 * chunk * delta_rows),
            ("Gates", 8 * chunk * delta_heads),
        ];
        let mut bytes = 0;
        let at = sizes.map(|(name, size)| {
            let at = bytes;
            bytes += size.next_multiple_of(ALIGN as u64);
            (name, at)
        });
        Self { routed, at: at.into(), bytes }
    }
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
    /// Its recurrent states, as in [`wire::Sequence`](super::wire::Sequence).
    pub state: u32,
}

/// A kernel that is compiled, or will be when it is first launched.
pub enum Kernel {
    /// It is.
    Made(Arc<dyn Module>),
    /// It will be.
    Later(Source, OnceLock<Arc<dyn Module>>),
}

impl Kernel {
    fn module(&self, machine: &dyn Machine) -> Result<Arc<dyn Module>> {
        let (source, made) = match self {
            Self::Made(module) => return Ok(Arc::clone(module)),
            Self::Later(source, made) => (source, made),
        };
        if let Some(module) = made.get() {
            return Ok(Arc::clone(module));
        }
        let module = machine.compile(source)?;
        Ok(Arc::clone(made.get_or_init(|| module)))
    }
}

/// The kernel and its memory.
pub struct Prefill {
    plan: Plan,
    /// For many positions, and for up to [`FEW`].
    kernels: Vec<Kernel>,
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
    pub fn new(machine: &dyn Machine, plan: Plan, kernels: Vec<Kernel>) -> Result<Self> {
        let bytes = plan.bytes() as usize;
        Ok(Self { plan, kernels, memory: machine.alloc_symmetric(bytes)?, hops: [0; 8] })
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
            peer_offset: self.hops,
            first: part.first,
            count: part.count,
            from: part.layers.start,
            to: part.layers.end,
            row: part.row,
            blocks: self.plan.blocks,
            state: part.state,
            padding: 0,
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
        let kernel = if few { self.kernels.last() } else { self.kernels.first() };
        machine.launch(&kernel.expect("there is one").module(machine)?, &launch)
    }

    /// How it runs the model.
    pub const fn plan(&self) -> &Plan {
        &self.plan
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
