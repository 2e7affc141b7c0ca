//! A program on a machine: compiled kernels, packed weights, pages and tables, all allocated here
//! and nowhere later but for logits that somebody asks for.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use super::lower::extras::Extras;
use super::lower::layout::{Exchange, Kind};
use super::lower::matrix::Matrix;
use super::lower::model::{self, Model, FIRST_POOLS, MOST_POOLS};
use super::lower::partition::{ClassPartition, Partition};
use super::lower::segments;
use super::pack::{To, Weights};
use super::prefill::{self, Plan, Prefill};
use super::probe::Probe;
use super::source;
use super::upload;
use super::wire::{self, Args, ExpiredWait, Wire};
use super::wire::{RECORDS_BLOCK, RECORD_BYTES, RING, STOPS};
use crate::abi::{Dims, HeadMode, Program};
use crate::buffer::Buffer;
use crate::cpu::ops::turned;
use crate::device::Phase;
use crate::error::Result;
use crate::host::side_by_side;
use crate::machine::{Flight, Launch, Machine, Memory, Module, Platform, Shared};
use crate::mailbox::SlotMemory;
use crate::matrix::{row_to_f32, Matrix as Stored};
use crate::meter::Mode;
use crate::sample::SEEN_IN_PROMPT;
use crate::validate::ValidProgram;

/// A line of its own behind the exchange.
const ABORT_FLAG_BYTES: usize = 128;

/// Everything a launch refers to.
pub struct Loaded {
    /// Where it runs.
    pub machine: Arc<dyn Machine>,
    /// What it is.
    pub model: Model,
    /// Its partition on the machine.
    pub partition: Partition,
    /// Sizes of the program.
    pub dims: Dims,
    /// What launches write, and what tells them apart.
    pub room: Room,
    /// The prefill kernel, where it fits.
    pub prefill: Option<Prefill>,
    /// Kernels to measure with, where somebody does.
    pub(super) probe: Option<Probe>,
    /// Why there is none, though there should be.
    pub warning: Option<String>,
    /// What loading did, in order.
    pub phases: Vec<Phase>,
    kernels: Vec<Kernel>,
    base: Args,
    logits: Option<Memory>,
    /// What `base` points to.
    _kept: Vec<Memory>,
}

fn segments(model: &Model, partition: &Partition) -> Vec<wire::Segment> {
    segments::segments(model, partition).iter().map(segments::Segment::wire).collect()
}

fn bytes_of_all<T: Wire>(all: &[T]) -> Vec<u8> {
    all.iter().flat_map(|one| one.as_bytes().to_vec()).collect()
}

/// Floats as bytes.
fn bytes_of(floats: &[f32]) -> Vec<u8> {
    floats.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// Bytes of a group's pages; none where there is no such group.
fn pool_bytes(program: &Program, model: &Model, partition: &Partition, group: usize) -> u64 {
    let page = segments::page_bytes(model, partition)[group];
    let pages = program.groups.get(group).map_or(0, |group| group.pages);
    u64::from(page) * u64::from(pages)
}

/// Bytes that a rank takes: weights as packed, KV pages, and the rest: tables, exchange, the
/// prefill kernel's scratch, and the upload's as far as there is no room for it where pages and the
/// others will be.
pub fn bytes(
    program: &Program,
    model: &Model,
    partition: &Partition,
    plan: Option<&Plan>,
) -> [u64; 3] {
    let dims = &program.dims;
    let (vocab, slots, columns) =
        (u64::from(dims.vocab), u64::from(dims.slots), u64::from(partition.columns));
    let (row, layers) = (u64::from(partition.hidden) * 2, u64::from(model.layers()));
    let lines = partition.stream_bytes(model) * u64::from(partition.blocks);
    let norms = u64::from(model.norm_rows() * model.parts) * row;
    let packed = lines + partition.bank_bytes(model) + vocab * row + norms;
    let pools = || (0..MOST_POOLS).map(|group| pool_bytes(program, model, partition, group));
    let empty = pools().filter(|bytes| *bytes == 0).count() as u64 * POOL_BYTES_LEAST;
    let pools: u64 = pools().sum();
    let of_layers = |of: &dyn Fn(&model::Class, &ClassPartition) -> u64| {
        let one = |l: &model::Layer| of(&model.classes[l.class], &partition.classes[l.class]);
        model.layer.iter().map(one).sum::<u64>()
    };
    let head_norms = of_layers(&|c, p| 4 * u64::from(model.parts * c.head_norm_words(p.head_dim)));
    let bias = |c: &model::Class, p: &ClassPartition| {
        let rows = if c.bias { p.tiling(Matrix::Qkv).rows } else { 0 };
        4 * u64::from(rows) * u64::from(partition.blocks)
    };
    let biases = of_layers(&bias);
    let rope_dims: u64 = partition.classes.iter().map(|c| u64::from(c.rope_dim)).sum();
    let rope = u64::from(dims.max_positions) * rope_dims * 4;
    let of_slots = slots * 4 * (u64::from(model.pools * partition.pages_max) + STOPS as u64);
    let tables = (slots + columns) * vocab * 8 + of_slots + u64::from(dims.max_positions) * 4;
    let texts = slots * 8 * wire::text_row(partition.pages_max) as u64;
    let segments = segments(model, partition).len() * size_of::<wire::Segment>();
    let lists = layers * size_of::<wire::Layer>() as u64 + segments as u64;
    let lists = lists + u64::from(partition.blocks * partition.index_bytes());
    let extras = |l: &model::Layer| u64::from(Extras::new(model, partition, l.class).count);
    let extras = 4
        * (model.layer.iter().map(extras).sum::<u64>()
            + u64::from(Extras::of_head(model, partition)));
    let writers = u64::from(plan.map_or(0, |plan| plan.blocks).max(partition.blocks));
    let records = writers * (RECORDS_BLOCK * RECORD_BYTES) as u64;
    let words = Exchange::new(model, partition, partition.columns).words * 8
        + residual_bytes(model, partition, plan) as u64
        + ABORT_FLAG_BYTES as u64;
    let prefill = plan.map_or(0, Plan::bytes);
    let states = segments::working_bytes(model, partition, dims.slots);
    let others = head_norms + biases + extras + rope + tables + texts + lists + records + words;
    let others = others + prefill + states + empty;
    [packed, pools, others + upload::most_bytes(packed).saturating_sub(pools + others)]
}

/// Bytes of the residual of a chunk's positions, where something predicts further tokens.
fn residual_bytes(model: &Model, partition: &Partition, plan: Option<&Plan>) -> usize {
    let positions = plan.map_or(0, Plan::residuals) as usize;
    positions * Exchange::new(model, partition, 1).words_h as usize * 8
}

/// What a pool takes that has no pages.
const POOL_BYTES_LEAST: u64 = 256;

/// Memory that does not depend on the weights.
pub struct Room {
    /// Host memory for tokens, `[slots][RING][3]` words.
    pub out: Shared,
    /// Host memory for orders.
    pub control: Shared,
    /// Host memory for what grammars allow, `[slots][columns][Model::mask_words]` words: of each
    /// slot's next token, and of those behind its drafts.
    masks: Shared,
    /// Who gave up.
    records: Memory,
    /// Tokens of a prompt's launch.
    pub prompt: Memory,
    /// Texts and predictions, `[slots][2]` rows ([`wire::text_row`]).
    texts: Memory,
    pages: Memory,
    stop_ids: Memory,
    logit_bias: Memory,
    counts: Memory,
    words: Memory,
    values: Memory,
    pools: [Memory; MOST_POOLS],
    states: Memory,
    /// How many of them stand before those behind drafts.
    draft_states: u32,
    /// Of `words`, before the flag.
    residual_bytes: usize,
}

impl Room {
    fn new(
        m: &dyn Machine,
        program: &Program,
        (model, partition): (&Model, &Partition),
        writers: u32,
        residual_bytes: usize,
    ) -> Result<Self> {
        let dims = &program.dims;
        let (slots, vocab) = (dims.slots as usize, dims.vocab as usize);
        let bytes = |group| pool_bytes(program, model, partition, group).max(POOL_BYTES_LEAST);
        let pool = |group: usize| m.alloc(bytes(group) as usize);
        let pools = (0..MOST_POOLS).map(pool).collect::<Result<Vec<_>>>()?;
        let room = Self {
            out: m.alloc_shared(slots * RING * wire::TOKEN_BYTES)?,
            control: m.alloc_shared(wire::CONTROL_BYTES)?,
            masks: m.alloc_shared(slots * (partition.columns * model.mask_words()) as usize * 8)?,
            records: m.alloc(writers as usize * RECORDS_BLOCK * RECORD_BYTES)?,
            prompt: m.alloc(dims.max_positions as usize * 4)?,
            texts: m.alloc(slots * 8 * wire::text_row(partition.pages_max))?,
            pages: m.alloc(slots * (model.pools * partition.pages_max) as usize * 4)?,
            stop_ids: m.alloc(slots * STOPS * 4)?,
            logit_bias: m.alloc(slots * vocab * 4)?,
            counts: m.alloc(slots * vocab * 4)?,
            words: m.alloc_symmetric(
                (Exchange::new(model, partition, partition.columns).words * 8) as usize
                    + residual_bytes
                    + ABORT_FLAG_BYTES,
            )?,
            residual_bytes,
            values: m.alloc(partition.columns as usize * 2 * vocab * 4)?,
            pools: pools.try_into().unwrap_or_else(|_| unreachable!("as many as asked for")),
            states: m
                .alloc((segments::working_bytes(model, partition, dims.slots) as usize).max(256))?,
            draft_states: segments::states_of_rows(dims.slots),
        };
        // The simulator's clock is not the host's.
        let watched = m.platform() != Platform::Sim;
        room.control.word32(8).store(u32::from(watched), Release);
        Ok(room)
    }

    /// Offset in `words` of the word that is not 0 once somebody gave up. Behind the exchange, so
    /// that a rank finds another's as it finds its words.
    fn abort_flag_at(&self) -> usize {
        self.words.bytes - ABORT_FLAG_BYTES
    }

    /// Where the residual of a chunk's positions comes to stand; 0: nowhere.
    fn residuals(&self) -> u64 {
        let at = self.words.address + (self.abort_flag_at() - self.residual_bytes) as u64;
        if self.residual_bytes > 0 {
            at
        } else {
            0
        }
    }

    /// `others`, and where all this is.
    fn args(&self, others: Args) -> Args {
        Args {
            pools: std::array::from_fn(|at| self.pools[at].address),
            more_pools: std::array::from_fn(|at| self.pools[FIRST_POOLS + at].address),
            states: self.states.address,
            draft_states: self.draft_states.into(),
            texts: self.texts.address,
            pages: self.pages.address,
            stop_ids: self.stop_ids.address,
            logit_bias: self.logit_bias.address,
            counts: self.counts.address,
            values: self.values.address,
            ll_words: self.words.address,
            abort_flag: self.words.address + self.abort_flag_at() as u64,
            records: self.records.address,
            out: self.out.address,
            control: self.control.address,
            masks: self.masks.address,
            residuals: self.residuals(),
            ..others
        }
    }
}

/// The weights, which are packed and uploaded here.
fn weights_args(
    m: &dyn Machine,
    weights: &Weights<'_>,
    kept: &mut Vec<Memory>,
    phases: &mut Phases,
) -> Result<Args> {
    let (model, partition) = (weights.model, weights.partition);
    let mut keep = |memory: Memory| {
        kept.push(memory.clone());
        memory.address
    };
    let row = partition.hidden as usize * 2;
    let to = To {
        line: keep(
            m.alloc((partition.stream_bytes(model) * u64::from(partition.blocks)) as usize)?,
        ),
        embed: keep(m.alloc(weights.program.dims.vocab as usize * row)?),
        experts: keep(m.alloc((partition.bank_bytes(model) as usize).max(256))?),
    };
    phases.next("memory for weights", 0);
    let packing = weights.packing(to);
    phases.next("places of weights", 0);
    phases.all.extend(upload::run(m, weights, &packing)?);
    phases.last = Instant::now();
    let args = Args {
        weights: to.line,
        embed: to.embed,
        norms: keep(upload(m, &weights.norms()?)?),
        experts: to.experts,
        extras: keep(upload(m, &weights.extras())?),
        head_norms: keep(upload(m, &weights.head_norms())?),
        biases: keep(upload(m, &weights.biases())?),
        rope: keep(upload(m, &rope(weights))?),
        layers: keep(upload(m, &bytes_of_all(&segments::layers(model, partition)))?),
        segments: keep(upload(m, &bytes_of_all(&segments(model, partition)))?),
        scale_index: keep(upload(m, &packing.scale_index)?),
        ..Args::default()
    };
    phases.next("rotary table and others", 0);
    Ok(args)
}

/// What has been done, and when the last of it ended.
struct Phases {
    all: Vec<Phase>,
    last: Instant,
}

impl Phases {
    /// What was done since the last phase.
    fn next(&mut self, name: &'static str, bytes: u64) {
        self.all.push(Phase::new(name, self.last.elapsed(), bytes));
        self.last = Instant::now();
    }
}

impl Loaded {
    /// Compiles, packs and uploads.
    ///
    /// # Errors
    /// [`Error::InvalidProgram`] for what the monokernel cannot run, [`Error::Compile`],
    /// [`Error::OutOfMemory`], or what the machine says.
    pub fn new(
        machine: Arc<dyn Machine>,
        program: &ValidProgram,
        buffers: &[Buffer],
        (model, partition, plan): (Model, Partition, Option<Plan>),
        rank: u32,
    ) -> Result<Self> {
        let program = program.program();
        let dims = program.dims;
        let mut phases = Phases { all: Vec::new(), last: Instant::now() };
        // The simulator's tests launch few of many kernels.
        let at_once = machine.platform() != Platform::Sim;
        let (kernels, wide) = compile(&*machine, &model, &partition, plan.as_ref(), at_once)?;
        phases.next("kernels", 0);
        let weights = Weights { program, buffers, model: &model, partition: &partition, rank };
        let mut kept = Vec::new();
        // First, as it needs memory for a while that the others may have afterwards.
        let packed = weights_args(&*machine, &weights, &mut kept, &mut phases)?;
        let (prefill, warning) = match plan.zip(wide) {
            Some((plan, Ok(both))) => (Some(Prefill::new(&*machine, plan, both)?), None),
            // Slow prompts are better than none.
            Some((_, Err(why))) => (None, Some(format!("no prefill kernel: {why}"))),
            None => (None, None),
        };
        let writers = prefill.as_ref().map_or(0, Prefill::blocks).max(partition.blocks);
        let plan = prefill.as_ref().map(Prefill::plan);
        let residual_bytes = residual_bytes(&model, &partition, plan);
        let room = Room::new(&*machine, program, (&model, &partition), writers, residual_bytes)?;
        let page_bytes = segments::page_bytes(&model, &partition);
        let base = Args {
            rank,
            page_bytes: std::array::from_fn(|at| page_bytes[at]),
            more_page_bytes: std::array::from_fn(|at| page_bytes[FIRST_POOLS + at]),
            segment_count: segments(&model, &partition).len() as u32,
            in_flight_bytes: partition.in_flight_bytes,
            ..room.args(packed)
        };
        phases.next("pages and buffers", 0);
        Ok(Self {
            machine,
            model,
            partition,
            dims,
            room,
            prefill,
            probe: None,
            phases: phases.all,
            warning,
            kernels,
            base,
            logits: None,
            _kept: kept,
        })
    }

    /// Columns of the widest kernel.
    pub fn most_columns(&self) -> usize {
        self.partition.columns as usize
    }

    /// Tells the kernel where each rank's words are; `all` are in order of rank.
    ///
    /// # Errors
    /// What the machine says where it cannot reach another.
    pub fn connect(&mut self, all: &[(Arc<dyn Machine>, u64)]) -> Result<()> {
        for (rank, (machine, words)) in all.iter().enumerate() {
            if rank != self.base.rank as usize {
                self.machine.enable_peer(&**machine)?;
            }
            self.base.peer_offset[rank] = (*words as i64 - self.room.words.address as i64) / 8;
        }
        Ok(())
    }

    /// Where the residual of a chunk's positions stands, for what predicts further tokens, and how
    /// many words a position has.
    pub fn residuals(&self) -> [u64; 2] {
        [self.room.residuals(), Exchange::new(&self.model, &self.partition, 1).words_h]
    }

    /// Where others write their words.
    pub fn words_address(&self) -> u64 {
        self.room.words.address
    }

    /// Ids whose logits this machine computes.
    pub fn ids(&self) -> std::ops::Range<usize> {
        let (m, c, rank) = (&self.model, &self.partition, self.base.rank);
        let each = match m.head_mode {
            HeadMode::PerLane => m.lanes * m.vocab,
            HeadMode::Mean | HeadMode::SumThenNorm | HeadMode::Concat => c.blocks * c.rows_head,
        };
        let end = |rank: u32| (rank * each).min(m.vocab_all) as usize;
        end(rank)..end(rank + 1)
    }

    /// The kernel for so many columns, with drafts or without. Of those for one column, the one
    /// that streams pages, or the other.
    ///
    /// # Errors
    /// What the machine's compiler says of a kernel that nobody has asked for before.
    pub fn module(&self, kind: Kind) -> Result<Arc<dyn Module>> {
        let Kind { columns, streamed, lookup } = kind;
        let good = |k: &Kind| {
            (k.columns, k.lookup) == (columns, lookup) && (columns > 1 || k.streamed == streamed)
        };
        let found = self.kernels.iter().find(|kernel| good(&kernel.kind));
        let kernel = found.expect("one of the partition's kernels");
        if let Some(module) = kernel.module.get() {
            return Ok(Arc::clone(module));
        }
        let module = compile_decode(&*self.machine, &self.model, &self.partition, kernel.kind)?;
        Ok(Arc::clone(kernel.module.get_or_init(|| module)))
    }

    /// Starts a decode kernel of this partition.
    ///
    /// # Errors
    /// What the machine says.
    pub fn decode(&self, module: &Arc<dyn Module>, args: &Args) -> Result<Box<dyn Flight>> {
        let launch = Launch {
            entry: "kie_decode",
            blocks: self.partition.blocks,
            threads: self.partition.threads(self.machine.warp()),
            shared_bytes: self.partition.shared_max,
            args: args.as_bytes(),
        };
        self.machine.launch(module, &launch)
    }

    /// The kernels there are.
    pub fn kinds(&self) -> impl Iterator<Item = Kind> + '_ {
        self.kernels.iter().map(|kernel| kernel.kind)
    }

    /// The first position of a sequence that the kernel with streamed pages is for.
    pub fn streams_from(&self) -> u32 {
        let any = self.kernels.iter().any(|k| k.kind.columns == 1 && k.kind.streamed);
        if any {
            self.partition.streams_from(&self.model)
        } else {
            u32::MAX
        }
    }

    /// What every launch is given.
    pub fn args(&self, columns: u32) -> Args {
        debug_assert!(self.kernels.iter().any(|k| k.kind.columns == columns));
        self.base
    }

    /// A slot's page tables, where kernels look for them.
    ///
    /// # Errors
    /// What the machine says.
    pub fn write_pages(&self, index: usize, tables: &[Box<[AtomicU32]>]) -> Result<()> {
        let bytes = |page: &AtomicU32| page.load(Relaxed).to_le_bytes();
        let pages: Vec<u8> = tables.iter().flatten().flat_map(bytes).collect();
        let each = (self.model.pools * self.partition.pages_max) as usize * 4;
        self.machine.write(&self.room.pages, index * each, &pages)
    }

    /// What the token may be that a slot's row emits as its `emitted`-th, or, with so many drafts
    /// `ahead` of it, as a later one, for a kernel that may be running.
    pub fn write_mask(&self, index: usize, emitted: u32, ahead: usize, mask: &[AtomicU32]) {
        let words = self.model.mask_words() as usize;
        let (tag, index) =
            (emitted.wrapping_add(ahead as u32 + 1), index * self.most_columns() + ahead);
        for at in 0..words {
            let bits = mask.get(at).map_or(0, |word| word.load(Relaxed));
            let word = u64::from(tag) << 32 | u64::from(bits);
            self.room.masks.word64((index * words + at) * 8).store(word, Relaxed);
        }
    }

    /// Ids of a slot's text (0) or prediction (1) from the `from`-th on, where kernels look for
    /// them; the first of them stands [`wire::TEXT_PAD`] numbers behind the row's beginning.
    ///
    /// # Errors
    /// What the machine says.
    pub fn write_ids(&self, index: usize, which: usize, from: usize, ids: &[u32]) -> Result<()> {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let row = wire::text_row(self.partition.pages_max);
        self.machine.write(&self.room.texts, ((2 * index + which) * row + from) * 4, &bytes)
    }

    /// A slot's stop ids, bias and counts, where kernels look for them.
    ///
    /// # Errors
    /// What the machine says.
    pub fn write_slot(&self, index: usize, slot: &SlotMemory) -> Result<()> {
        let m = &*self.machine;
        let ids = |ids: &[u32]| -> Vec<u8> { ids.iter().flat_map(|i| i.to_le_bytes()).collect() };
        let params = &slot.params;
        let stops = ids(&slot.stop_ids[..params.stop_ids as usize]);
        m.write(&self.room.stop_ids, index * STOPS * 4, &stops)?;
        let vocab = self.dims.vocab as usize;
        if params.bias > 0 {
            let mut row = vec![0.0f32; vocab];
            for (id, bias) in &slot.bias[..params.bias as usize] {
                if let Some(at) = row.get_mut(*id as usize) {
                    *at += bias;
                }
            }
            m.write(&self.room.logit_bias, index * vocab * 4, &bytes_of(&row))?;
        }
        if params.sampling.penalises() {
            let counts = prompt_counts(&slot.tokens[..params.prompt as usize], vocab);
            m.write(&self.room.counts, index * vocab * 4, &counts)?;
        }
        Ok(())
    }

    /// Address of room for the logits of so many positions.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn logits_for(&mut self, positions: usize) -> Result<u64> {
        let bytes = positions * self.dims.vocab as usize * 4;
        match &self.logits {
            Some(memory) if memory.bytes >= bytes => Ok(memory.address),
            Some(_) | None => {
                let memory = self.machine.alloc(bytes)?;
                let address = memory.address;
                self.logits = Some(memory);
                Ok(address)
            }
        }
    }

    /// This machine's ids of the last launch's logits, rows `from ..` into the rows of `out`.
    ///
    /// # Errors
    /// What the machine says.
    pub fn read_logits(&self, from: usize, out: &mut [f32]) -> Result<()> {
        let memory = self.logits.as_ref().expect("the launch had logits");
        let vocab = self.dims.vocab as usize;
        let mut bytes = vec![0; out.len() * 4];
        self.machine.read(memory, from * vocab * 4, &mut bytes)?;
        let ids = self.ids();
        for (to, from) in out.chunks_exact_mut(vocab).zip(bytes.chunks_exact(vocab * 4)) {
            let from = from[ids.start * 4..ids.end * 4].chunks_exact(4);
            for (to, b) in to[ids.clone()].iter_mut().zip(from) {
                *to = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            }
        }
        Ok(())
    }

    /// Whether somebody gave up waiting, and who says so of this machine's blocks.
    ///
    /// # Errors
    /// What the machine says.
    pub fn expired_waits(&self) -> Result<Option<Vec<ExpiredWait>>> {
        let mut flag = [0; 8];
        self.machine.read(&self.room.words, self.room.abort_flag_at(), &mut flag)?;
        if flag == [0; 8] {
            return Ok(None);
        }
        let mut records = vec![0; self.room.records.bytes];
        self.machine.read(&self.room.records, 0, &mut records)?;
        Ok(Some(ExpiredWait::read(&records)))
    }

    /// Zeroes the exchange, so that sequence numbers may start anew.
    ///
    /// # Errors
    /// What the machine says.
    pub fn clear_words(&self) -> Result<()> {
        self.machine.write(&self.room.words, 0, &vec![0; self.room.words.bytes])
    }
}

/// A decode kernel and what it is for.
pub(super) struct Kernel {
    kind: Kind,
    module: OnceLock<Arc<dyn Module>>,
}
/// Decode kernels, and the prefill kernels (see `Prefill`), if they compiled.
type Kernels = (Vec<Kernel>, Option<Result<Vec<prefill::Kernel>>>);

fn compile_decode(
    machine: &dyn Machine,
    model: &Model,
    partition: &Partition,
    kind: Kind,
) -> Result<Arc<dyn Module>> {
    let platform = machine.platform();
    machine.compile(&source::decode(platform, (model, partition), kind, Mode::Full)?)
}

/// The kernels of a partition, and the planned prefill kernels, compiled side by side; unless
/// `at_once`, those for decoding and the one for many positions when they are first launched.
///
/// # Errors
/// What the machine's compiler says.
pub(super) fn compile(
    machine: &dyn Machine,
    model: &Model,
    partition: &Partition,
    plan: Option<&Plan>,
    at_once: bool,
) -> Result<Kernels> {
    let kinds = partition.kernels(model, machine.platform());
    let wide = plan.map(|plan| plan.sources(model, partition)).transpose()?;
    let now = if at_once { kinds.len() } else { 0 };
    let all = wide.as_ref().map_or(0, Vec::len);
    let later = if at_once { 0 } else { all.saturating_sub(1) };
    let jobs: Vec<usize> = (0..now + all - later).collect();
    // A prefill kernel that does not compile is no error.
    let mut made = side_by_side(&jobs, "compiler", |&job| {
        Ok(match (kinds[..now].get(job), &wide) {
            (Some(kind), _) => compile_decode(machine, model, partition, *kind),
            (None, Some(sources)) => machine.compile(&sources[later + job - now]),
            (None, None) => unreachable!("as many jobs as kernels"),
        })
    })?;
    let prefill = wide.map(|sources| {
        let made = made.split_off(now).into_iter().map(|one| one.map(prefill::Kernel::Made));
        let late = |source| Ok(prefill::Kernel::Later(source, OnceLock::new()));
        sources.into_iter().take(later).map(late).chain(made).collect()
    });
    let modules = made.into_iter().collect::<Result<Vec<_>>>()?;
    let mut modules = modules.into_iter();
    let kernel =
        |kind| Kernel { kind, module: modules.next().map_or_else(OnceLock::new, Into::into) };
    Ok((kinds.into_iter().map(kernel).collect(), prefill))
}

fn upload(machine: &dyn Machine, bytes: &[u8]) -> Result<Memory> {
    let memory = machine.alloc(bytes.len().max(256))?;
    machine.write(&memory, 0, bytes)?;
    Ok(memory)
}

/// Counts of a prompt's tokens, as the sampler keeps them.
fn prompt_counts(tokens: &[u32], vocab: usize) -> Vec<u8> {
    let mut counts = vec![0u32; vocab];
    tokens.iter().for_each(|t| counts[*t as usize] = SEEN_IN_PROMPT);
    counts.iter().flat_map(|c| c.to_le_bytes()).collect()
}

/// cos and sin of every position and pair, `[positions][rope_dim / 2][2]`, a table a class.
fn rope(weights: &Weights<'_>) -> Vec<u8> {
    let program = weights.program;
    let mut out = Vec::new();
    for (class, part) in weights.model.classes.iter().zip(&weights.partition.classes) {
        let half = part.rope_dim as usize / 2;
        if half == 0 {
            continue;
        }
        let (mut frequencies, mut lengths) = (vec![0.0; half], vec![1.0; half]);
        let tensor = &program.tensors[class.rope as usize];
        let stored = Stored::of(tensor, 0, weights.buffers);
        row_to_f32(&stored, 0, &mut frequencies[..stored.cols]);
        row_to_f32(&stored, 1, &mut lengths[..stored.cols]);
        out.reserve(program.dims.max_positions as usize * frequencies.len() * 8);
        for position in 0..program.dims.max_positions {
            for (frequency, length) in frequencies.iter().zip(&lengths) {
                let [cos, sin] = turned(position, *frequency, *length);
                out.extend(cos.to_le_bytes());
                out.extend(sin.to_le_bytes());
            }
        }
    }
    out
}
