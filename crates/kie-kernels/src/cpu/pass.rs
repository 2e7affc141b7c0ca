//! Walks a program once over a set of columns, every member of the team through the same steps.
//!
//! # Who writes what
//! A step is one or more phases with a barrier behind each. Inside a phase a member writes only
//! the rows of its own block (by the row partition) or the items whose number is congruent to
//! its own; all other data of the phase is read-only. The barrier's release/acquire makes a
//! phase's writes visible to the next. That is the argument behind every `Field` access below.
//!
//! # Layout
//! Vectors are lane-major: `[lane][column][width]`, so that one lane's columns are contiguous.

mod compressed;
mod delta;
mod experts;
mod hyper;
mod latent;
mod mtp;
mod states;
mod steps;

use std::collections::HashMap;
use std::ops::Range;

use super::attention;
use super::compressed::{Scratch as CompressedScratch, INDEX_COLUMNS};
use super::delta::{arranged, Scratch as DeltaScratch};
use super::digits::Digits;
use super::experts::{Largest as LargestExperts, Lines, Scratch as ExpertScratch, DECODE_COLUMNS};
use super::ops;
use super::prefill::{Form, Packed, Panels};
use super::team::{Barrier, Team};
use super::watch::Watch;
use crate::abi::{
    Attend, Compress, CompressedAttend, CompressedDown, CompressedIndex, CompressedQuery,
    DeltaHeads, DeltaRule, Dims, GroupedDown, LatentDown, LatentQuery, PageGroup, Program, Project,
    ProjectNormed, Qkv, Rotary, StateKind, Step, StepKind, Tensor, Vector, PAGE,
};
use crate::buffer::Buffer;
use crate::error::Result;
use crate::field::Field;
use crate::mailbox::Mailbox;
use crate::matrix::{row_to_f32, Matrix};
use crate::room;
use crate::simd::Level;
use crate::validate::ValidProgram;

/// Heads that a member attends latents with at a time: they read a page once.
const LATENT_HEADS: usize = 8;
/// Query positions of one prefill attention item.
const QUERY_BLOCK: usize = 16;

/// Which arithmetic a column gets; part of what it computes, so never a matter of neighbours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Path {
    /// Float32 activations.
    Decode,
    /// Many columns at once; 16-bit weights meet 16-bit activations where the processor has units
    /// for that.
    Prefill,
}

/// One position of one sequence.
#[derive(Debug, Clone, Copy)]
pub(super) struct Column {
    pub slot: usize,
    pub position: usize,
    pub token: u32,
    pub path: Path,
    /// Its logits are wanted.
    pub wanted: bool,
    /// Its token is a draft of what the column before chooses.
    pub drafted: bool,
}

/// What one member alone uses.
struct Scratch {
    attention: attention::Scratch,
    compressed: CompressedScratch,
    delta: DeltaScratch,
    experts: ExpertScratch,
    /// One stream, where the head combines lanes.
    stream: Vec<f32>,
    /// Latents of the columns of one product.
    latents: Vec<f32>,
}

/// Where the columns of a pass stand on one rotary table.
struct Angles {
    /// The table, by tensor.
    table: u32,
    /// Radians a position of each pair, then what its cos and sin are multiplied by.
    pairs: [Box<[f32]>; 2],
    /// cos then sin of the pass's columns, `[column][2][pairs]`.
    turned: Field<f32>,
}

/// cos, then sin, of the pairs of a rotary table at a position.
fn angles_at([frequencies, lengths]: &[Box<[f32]>; 2], position: usize, out: &mut [f32]) {
    let (cos, sin) = out.split_at_mut(frequencies.len());
    let pairs = frequencies.iter().zip(lengths);
    for ((c, s), (frequency, length)) in cos.iter_mut().zip(sin).zip(pairs) {
        [*c, *s] = ops::turned(position as u32, *frequency, *length);
    }
}

/// A slot's two recurrent states, by number: the one that is current comes first. And how many
/// positions that one has seen.
#[derive(Clone, Copy)]
struct Behind {
    states: [usize; 2],
    position: usize,
}

impl Behind {
    const fn of_slot(slot: usize) -> Self {
        Self { states: [2 * slot, 2 * slot + 1], position: 0 }
    }
}

/// The largest operands of a program's steps, in numbers a column and lane.
#[derive(Default)]
struct Largest {
    /// What is packed for a product.
    input: usize,
    /// What a product leaves in `raw`.
    raw: usize,
    /// Query heads of a kv head.
    shared: usize,
    head_dim: usize,
    /// Heads of a delta rule; models have one kind.
    delta: Option<DeltaHeads>,
    /// Width of latents.
    rank: usize,
    /// Bytes of the stored rows that compressed attention sees of a column.
    seen: usize,
    /// Entries that an indexer scores for a column, and numbers of a key.
    scored: [usize; 2],
}

impl Largest {
    fn of(program: &Program) -> Self {
        let hidden = program.dims.hidden as usize;
        let mut most =
            Self { input: hidden, raw: hidden, shared: 1, head_dim: 2, ..Self::default() };
        for step in &program.steps {
            match &step.kind {
                StepKind::Qkv(qkv) => {
                    most.raw = most.raw.max((qkv.all_heads() * qkv.heads.dim) as usize);
                }
                StepKind::Attend(Attend { heads, .. }) => {
                    most.shared = most.shared.max((heads.query / heads.kv) as usize);
                    most.head_dim = most.head_dim.max(heads.dim as usize);
                }
                StepKind::DeltaRule(DeltaRule { heads, .. }) => {
                    let larger = |one: &DeltaHeads| one.kept() >= heads.kept();
                    most.delta = Some(most.delta.filter(larger).unwrap_or(*heads));
                }
                StepKind::LatentDown(LatentDown { width, heads, .. }) => {
                    most.raw = most.raw.max((width + heads.key()) as usize);
                }
                StepKind::LatentQuery(LatentQuery { heads, input, .. }) => {
                    let width = program.vectors[*input as usize].width;
                    most.input = most.input.max(width.max(heads.rank) as usize);
                    most.raw = most.raw.max((heads.count * heads.query()) as usize);
                    most.rank = most.rank.max(heads.rank as usize);
                    most.shared = most.shared.max(LATENT_HEADS.min(heads.count as usize));
                    most.head_dim = most.head_dim.max(heads.key() as usize);
                }
                StepKind::CompressedDown(down) => {
                    most.raw = most.raw.max((down.rank + down.heads.dim) as usize);
                }
                StepKind::Compress(compress) => {
                    most.raw = most.raw.max((2 * compress.sets() * compress.dim) as usize);
                }
                StepKind::CompressedIndex(index) => most.index(program, index),
                StepKind::CompressedAttend(attend) => most.entries(program, attend),
                StepKind::CompressedQuery(CompressedQuery { input, .. })
                | StepKind::GroupedDown(GroupedDown { input, .. })
                | StepKind::Project(Project { input, .. })
                | StepKind::ProjectNormed(ProjectNormed { input, .. }) => {
                    let width = program.vectors[*input as usize].width;
                    most.input = most.input.max(width as usize);
                }
                StepKind::GateUp(gate_up) => most.raw = most.raw.max(gate_up.ffn as usize),
                StepKind::Route(route) => most.raw = most.raw.max(route.experts as usize),
                StepKind::HyperIn(hyper) => most.raw = most.raw.max(hyper.rows() as usize),
                StepKind::MtpIn(_) => most.input = most.input.max(2 * hidden),
                StepKind::Embed(_)
                | StepKind::DeltaIn(_)
                | StepKind::LatentAttend(_)
                | StepKind::LatentUp(_)
                | StepKind::HyperOut(_)
                | StepKind::ExpertsGateUp(_)
                | StepKind::ExpertsDown(_)
                | StepKind::Head(_)
                | StepKind::Sample(_) => {}
            }
        }
        most
    }

    fn index(&mut self, program: &Program, index: &CompressedIndex) {
        let entries = (program.dims.max_positions / index.every) as usize;
        let scored = [entries, index.dim as usize];
        (0..2).for_each(|n| self.scored[n] = self.scored[n].max(scored[n]));
        let width = program.vectors[index.latent as usize].width;
        self.input = self.input.max(width as usize);
        self.raw = self.raw.max(index.rows() as usize);
    }

    fn entries(&mut self, program: &Program, attend: &CompressedAttend) {
        let entries = attend.entries.map_or(0, |entries| match entries.choice {
            Some(choice) => program.vectors[choice as usize].width - 1,
            None => program.dims.max_positions / entries.every,
        });
        let rows = ((attend.window + entries) as usize).next_multiple_of(PAGE);
        let row = match program.groups[attend.state.group as usize].state {
            StateKind::Latents { dtype, width } => width as usize * dtype.bytes(),
            _ => unreachable!("the validator saw keys"),
        };
        self.seen = self.seen.max(rows * row);
        let shared = (attend.heads.count / attend.heads.groups) as usize;
        self.shared = self.shared.max(LATENT_HEADS.min(shared));
        self.head_dim = self.head_dim.max(attend.heads.dim as usize);
    }
}

/// Bytes of pages and of what a pass works on.
fn bytes(program: &Program, most: &Largest, experts: &LargestExperts) -> u64 {
    let d = &program.dims;
    let columns = u64::from(d.columns);
    let vectors = program.vectors.iter().map(|v| u64::from(v.lanes) * u64::from(v.width));
    let numbers = vectors.sum::<u64>() + normed_width(program) as u64;
    let numbers = numbers + u64::from(d.lanes) * (most.raw + 2 * most.input) as u64;
    let kept = |g: &PageGroup| 4 * working(g, d) as u64;
    let pages = program.groups.iter().map(|g| g.page_bytes() * u64::from(g.pages) + kept(g));
    let logits = decode_rows(d) as u64 * u64::from(d.vocab);
    let experts = experts.bytes(d.columns as usize, program.blocks as usize);
    let digits = Digits::bytes(DECODE_COLUMNS, most.input.max((d.lanes * d.hidden) as usize));
    let own =
        digits + 4 * DECODE_COLUMNS * most.rank + most.seen + 4 * most.scored[0] + Panels::BYTES;
    let members = u64::from(program.blocks) * own as u64;
    let logits = logits + (INDEX_COLUMNS * most.scored[0]) as u64;
    4 * (numbers * columns + logits) + pages.sum::<u64>() + experts + members
}

/// Numbers of a column's normed input, all lanes'.
fn normed_width(program: &Program) -> usize {
    let lanes = if program.predicts() { program.dims.lanes.max(2) } else { program.dims.lanes };
    (lanes * program.dims.hidden) as usize
}

/// Rows of decoding sequences and of their drafts in a pass, at most.
pub(super) fn decode_rows(dims: &Dims) -> usize {
    (dims.slots as usize).max(DECODE_COLUMNS).min(dims.columns as usize)
}

/// Numbers of the recurrent states that sequences go on with.
fn working(group: &PageGroup, dims: &Dims) -> usize {
    let states = if group.is_recurrent() { working_states(dims) } else { 0 };
    states * (group.page_bytes() / 4) as usize
}

/// States: two of each slot, and one behind each row of a pass that has a draft behind it.
fn working_states(dims: &Dims) -> usize {
    2 * dims.slots as usize + decode_rows(dims)
}

/// A program with its memory.
pub(super) struct Pass {
    program: Program,
    buffers: Vec<Buffer>,
    level: Level,
    /// Of products of prompts' columns. Where entries are chosen it is one with float32
    /// activations: each rounding of them changes some choices, and a wrong one shows as 1e-1.
    prompts: Level,
    vectors: Vec<Field<f32>>,
    /// Normed (or lane-combined) input of the current step, `[lane][column][width]`.
    normed: Field<f32>,
    /// Columns of the last pass that those of a pass of drafts go on from, and whether it was one
    /// of drafts, too.
    from: Vec<usize>,
    after_drafts: bool,
    /// Raw matrix outputs, `[lane][column][rows]`: q|k|v, up, or a module's output.
    raw: Field<f32>,
    /// Packed prefill activations, one a lane.
    packed: Field<Packed>,
    /// The same of experts.
    lines: Lines,
    /// KV pages, one arena a group.
    pages: Vec<Field<u8>>,
    /// Recurrent states of running sequences, by group. A pass reads a slot's current one and
    /// writes its other one, which is current when the pass was whole.
    working: Vec<Field<f32>>,
    /// By slot.
    behind: Vec<Behind>,
    /// Numbers of states that a pass leaves behind its rows, where a draft comes next.
    between: Vec<usize>,
    /// Of each rotary table that a step names.
    angles: Vec<Angles>,
    /// Scores of entries of [`INDEX_COLUMNS`] columns.
    scores: Field<f32>,
    /// Entries that a column has scores of at most.
    most_entries: usize,
    /// Norm scales and biases as float32, by tensor; empty for the others.
    constants: Vec<Box<[f32]>>,
    /// Factors of the norms over all heads of q and of k, `[column][2]`.
    factors: Field<f32>,
    /// Final streams of the wanted columns, and their logits.
    logits: Field<f32>,
    wanted: Vec<usize>,
    members: Field<Scratch>,
    /// Columns of products of integers, one a member.
    digits: Field<Digits>,
    /// The same of the prefill path.
    panels: Field<Panels>,
}

impl Pass {
    pub(super) fn new(program: ValidProgram, buffers: Vec<Buffer>, level: Level) -> Result<Self> {
        let program = program.program().clone();
        let d = program.dims;
        let columns = d.columns as usize;
        let lanes = d.lanes as usize;
        let field = |v: &Vector| Field::new((v.lanes * v.width) as usize * columns);
        let widest = (d.lanes * d.hidden) as usize;
        let most = Largest::of(&program);
        let chooses = |step: &Step| matches!(step.kind, StepKind::CompressedIndex(_));
        let choice = program.steps.iter().any(chooses);
        let prompts = if choice { level.min(Level::Avx512) } else { level };
        let form = |tensor: u32| Form::of(prompts, program.tensors[tensor as usize].encoding.codes);
        let experts = LargestExperts::of(&program, form);
        room::ask(bytes(&program, &most, &experts))?;
        let packed = || Packed::with_capacity(d.chunk(), most.input);
        let member = || {
            let stream = vec![0.0; d.hidden as usize];
            let attention =
                attention::Scratch::with_capacity(most.shared, most.head_dim, QUERY_BLOCK);
            let delta = most.delta.map(DeltaScratch::with_capacity).unwrap_or_default();
            let latents = vec![0.0; DECODE_COLUMNS * most.rank];
            let experts = experts.scratch(columns);
            let compressed = CompressedScratch {
                rows: vec![0; most.seen],
                order: Vec::with_capacity(most.scored[0]),
                key: vec![0.0; most.scored[1]],
                angles: vec![0.0; most.head_dim],
            };
            Scratch { attention, compressed, delta, experts, stream, latents }
        };
        let digits = || Digits::with_capacity(columns.min(DECODE_COLUMNS), most.input.max(widest));
        let panels = || Panels::of((0..program.tensors.len() as u32).map(form));
        let arena = |g: &PageGroup| Field::new(g.page_bytes() as usize * g.pages as usize);
        let mut pass = Self {
            vectors: program.vectors.iter().map(field).collect(),
            normed: Field::new(normed_width(&program) * columns),
            from: Vec::with_capacity(columns),
            after_drafts: false,
            raw: Field::new(lanes * most.raw * columns),
            packed: Field::of((0..lanes).map(|_| packed()).collect()),
            lines: experts.lines(),
            pages: program.groups.iter().map(arena).collect(),
            working: program.groups.iter().map(|g| Field::new(working(g, &d))).collect(),
            behind: (0..d.slots as usize).map(Behind::of_slot).collect(),
            between: (2 * d.slots as usize..working_states(&d)).collect(),
            angles: Vec::new(),
            constants: Vec::new(),
            scores: Field::new(INDEX_COLUMNS * most.scored[0]),
            most_entries: most.scored[0],
            factors: Field::new(2 * columns),
            logits: Field::new(decode_rows(&d) * d.vocab as usize),
            wanted: Vec::with_capacity(columns),
            members: Field::of((0..program.blocks).map(|_| member()).collect()),
            digits: Field::of((0..program.blocks).map(|_| digits()).collect()),
            panels: Field::of((0..program.blocks).map(|_| panels()).collect()),
            level,
            prompts,
            buffers,
            program,
        };
        pass.constants = pass.constants();
        pass.angles = pass.angles();
        Ok(pass)
    }

    /// Room for the angles of each rotary table.
    fn angles(&self) -> Vec<Angles> {
        let mut all: Vec<Angles> = Vec::new();
        for step in &self.program.steps {
            let (StepKind::Qkv(Qkv { rotary: Rotary { table, .. }, .. })
            | StepKind::LatentDown(LatentDown { rotary: Rotary { table, .. }, .. })
            | StepKind::LatentQuery(LatentQuery { rotary: Rotary { table, .. }, .. })
            | StepKind::CompressedDown(CompressedDown { rotary: Rotary { table, .. }, .. })
            | StepKind::Compress(Compress { rotary: Rotary { table, .. }, .. })
            | StepKind::CompressedIndex(CompressedIndex {
                rotary: Rotary { table, .. }, ..
            })
            | StepKind::CompressedQuery(CompressedQuery {
                rotary: Rotary { table, .. }, ..
            })
            | StepKind::CompressedAttend(CompressedAttend {
                rotary: Rotary { table, .. }, ..
            })) = step.kind
            else {
                continue;
            };
            if all.iter().all(|angles| angles.table != table) {
                let stored = &self.constants[table as usize];
                let (frequencies, lengths) = stored.split_at(stored.len() / 2);
                let pairs = [frequencies, lengths].map(Box::from);
                let numbers = stored.len() * self.program.dims.columns as usize;
                all.push(Angles { table, pairs, turned: Field::new(numbers) });
            }
        }
        all
    }

    pub(super) fn dims(&self) -> &Dims {
        &self.program.dims
    }

    /// Logits of the `row`-th wanted column of the last pass.
    pub(super) fn logits(&self, row: usize) -> &[f32] {
        let vocab = self.program.dims.vocab as usize;
        // SAFETY: no pass runs: `run` takes `&mut self`.
        unsafe { self.logits.read(row * vocab..(row + 1) * vocab) }
    }

    /// A page of a group.
    pub(super) fn page_bytes(&mut self, group: usize, page: usize) -> &mut [u8] {
        let bytes = self.program.groups[group].page_bytes() as usize;
        &mut self.pages[group].all()[page * bytes..(page + 1) * bytes]
    }

    /// A slot's next sequence has nothing to do with the last one.
    pub(super) fn forget(&mut self, slot: usize) {
        self.behind[slot].position = 0;
    }

    /// Computes the model for `columns`; decode-path columns must come first. False if it was given
    /// up: then logits, vectors and the columns' positions in the pages hold nothing.
    pub(super) fn run(
        &mut self,
        columns: &[Column],
        team: &Team,
        mailbox: &Mailbox,
        watch: &Watch<'_>,
    ) -> bool {
        self.steps(0..self.program.model_steps(), columns, team, mailbox, watch);
        self.after_drafts = false;
        let whole = watch.is_whole();
        for sequence in columns.chunk_by(|a, b| a.slot == b.slot).filter(|_| whole) {
            let last = sequence[sequence.len() - 1];
            let behind = &mut self.behind[last.slot];
            behind.states.reverse();
            behind.position = last.position + 1;
        }
        whole
    }

    /// Whether [`predict`](Self::predict) can be asked.
    pub(super) fn predicts(&self) -> bool {
        self.program.predicts()
    }

    /// Computes what predicts further tokens, for `columns` with the tokens behind their own, each
    /// on from the column `from` of the last pass: of the model, or of this. It is short, and never
    /// given up.
    pub(super) fn predict(
        &mut self,
        columns: &[Column],
        from: &[usize],
        team: &Team,
        mailbox: &Mailbox,
    ) {
        self.from.clear();
        self.from.extend_from_slice(from);
        let steps = self.program.model_steps()..self.program.steps.len();
        self.steps(steps, columns, team, mailbox, &Watch::new(&|| true));
        self.after_drafts = true;
    }

    /// Some of the steps, for `columns`; those of the decode path come first.
    fn steps(
        &mut self,
        steps: Range<usize>,
        columns: &[Column],
        team: &Team,
        mailbox: &Mailbox,
        watch: &Watch<'_>,
    ) {
        self.wanted.clear();
        let wanted = columns.iter().enumerate().filter(|(_, c)| c.wanted);
        self.wanted.extend(wanted.map(|(i, _)| i));
        let rows = self.wanted.len() * self.program.dims.vocab as usize;
        self.logits.reserve(rows);
        self.turn(columns);
        let decode = columns.iter().take_while(|c| c.path == Path::Decode).count();
        let pass: &Self = self;
        team.run(|member, barrier| {
            let mut walk =
                Walk { pass, columns, decode, member, barrier, mailbox, watch, number: 0 };
            for number in steps.clone() {
                if !watch.has(number) {
                    break;
                }
                walk.number = number;
                walk.step(&pass.program.steps[number]);
            }
        });
    }

    /// The drafts behind a row of the last pass were wrong: its slot goes on from there.
    pub(super) fn go_back(&mut self, row: usize, slot: usize, position: usize) {
        let behind = &mut self.behind[slot];
        std::mem::swap(&mut behind.states[0], &mut self.between[row]);
        behind.position = position + 1;
    }

    /// Rotary angles of the pass.
    fn turn(&mut self, columns: &[Column]) {
        for angles in &mut self.angles {
            let numbers = 2 * angles.pairs[0].len();
            let turned = angles.turned.all();
            for (at, column) in turned.chunks_exact_mut(numbers).zip(columns) {
                angles_at(&angles.pairs, column.position, at);
            }
        }
    }

    /// One lane of a tensor.
    fn matrix(&self, tensor: u32, lane: usize) -> Matrix<'_> {
        Matrix::of(&self.program.tensors[tensor as usize], lane, &self.buffers)
    }

    /// How a tensor wants packed activations.
    fn form(&self, tensor: u32) -> Form {
        Form::of(self.prompts, self.program.tensors[tensor as usize].encoding.codes)
    }

    /// What steps use number by number, converted once.
    fn constants(&self) -> Vec<Box<[f32]>> {
        let mut used: Vec<u32> = Vec::new();
        self.program.steps.iter().for_each(|step| numbers_of(step, &mut used));
        let taps = |step: &Step| {
            let StepKind::DeltaRule(rule) = &step.kind else { return None };
            Some((rule.conv, rule.heads))
        };
        let taps: HashMap<u32, DeltaHeads> = self.program.steps.iter().filter_map(taps).collect();
        let convert = |(index, tensor): (usize, &Tensor)| {
            if !used.contains(&(index as u32)) {
                return Box::default();
            }
            let (rows, cols) = (tensor.rows as usize, tensor.cols as usize);
            let mut numbers = vec![0.0; rows * cols];
            for (row, out) in numbers.chunks_exact_mut(cols).enumerate() {
                row_to_f32(&self.matrix(index as u32, 0), row, out);
            }
            match taps.get(&(index as u32)) {
                Some(heads) => arranged(&numbers, *heads),
                None => numbers.into(),
            }
        };
        self.program.tensors.iter().enumerate().map(convert).collect()
    }

    /// A norm scale or bias.
    fn constant(&self, index: u32) -> &[f32] {
        &self.constants[index as usize]
    }
}

/// What a step uses number by number.
fn numbers_of(step: &Step, used: &mut Vec<u32>) {
    match &step.kind {
        StepKind::Qkv(qkv) => {
            used.push(qkv.rotary.table);
            used.extend(qkv.norm);
            used.extend(qkv.biases.iter().flatten());
            used.extend(qkv.head_norms.iter().flatten());
        }
        StepKind::Attend(attend) => used.extend(attend.sinks),
        StepKind::DeltaIn(delta) => used.extend(delta.norm),
        StepKind::DeltaRule(delta) => {
            used.extend([delta.conv, delta.decay, delta.bias, delta.norm]);
        }
        StepKind::LatentDown(down) => {
            used.extend([down.rotary.table, down.scale]);
            used.extend(down.norm.into_iter().chain(down.query.map(|[_, norm]| norm)));
        }
        StepKind::LatentQuery(query) => used.push(query.rotary.table),
        StepKind::CompressedDown(down) => {
            used.push(down.rotary.table);
            used.extend(down.norm.iter().chain(&down.scales));
        }
        StepKind::Compress(compress) => {
            used.extend([compress.rotary.table, compress.bias, compress.scale]);
            used.extend(compress.norm);
        }
        StepKind::CompressedIndex(index) => {
            used.push(index.rotary.table);
            used.extend(index.norm);
        }
        StepKind::CompressedQuery(query) => used.push(query.rotary.table),
        StepKind::CompressedAttend(attend) => {
            used.extend([attend.rotary.table, attend.sinks]);
        }
        StepKind::HyperIn(hyper) => used.extend([hyper.scale, hyper.base]),
        StepKind::Project(project) => used.extend(project.bias),
        StepKind::ProjectNormed(project) => used.push(project.norm),
        StepKind::GateUp(gate_up) => used.extend(gate_up.norm.iter().chain(&gate_up.scale)),
        StepKind::Route(route) => {
            let beside = [route.norm, route.bias, route.correction, route.by_token];
            used.extend(beside.into_iter().flatten());
        }
        StepKind::ExpertsGateUp(experts) => {
            used.extend(experts.norm);
            used.extend(experts.biases.iter().flatten());
        }
        StepKind::ExpertsDown(experts) => used.extend(experts.bias),
        StepKind::Head(head) => used.push(head.norm),
        StepKind::MtpIn(mtp) => {
            used.extend([mtp.embedding_norm, mtp.hidden_norm]);
            used.extend(mtp.end_norms);
        }
        StepKind::Embed(_)
        | StepKind::LatentAttend(_)
        | StepKind::LatentUp(_)
        | StepKind::GroupedDown(_)
        | StepKind::HyperOut(_)
        | StepKind::Sample(_) => {}
    }
}

/// One member's walk through one pass.
struct Walk<'a> {
    pass: &'a Pass,
    columns: &'a [Column],
    /// Columns of the decode path; they come first.
    decode: usize,
    member: usize,
    barrier: &'a Barrier,
    mailbox: &'a Mailbox,
    watch: &'a Watch<'a>,
    /// Of the step that it is in.
    number: usize,
}

impl Walk<'_> {
    fn step(&self, step: &Step) {
        match &step.kind {
            StepKind::Embed(embed) => self.embed(embed),
            StepKind::Qkv(qkv) => self.qkv(qkv),
            StepKind::Attend(attend) => self.attend(attend),
            StepKind::DeltaIn(delta) => self.delta_in(delta),
            StepKind::DeltaRule(delta) => self.delta_rule(delta),
            StepKind::LatentDown(down) => self.latent_down(down),
            StepKind::LatentQuery(query) => self.latent_query(query),
            StepKind::LatentAttend(attend) => self.latent_attend(attend),
            StepKind::LatentUp(up) => self.latent_up(up),
            StepKind::CompressedDown(down) => self.compressed_down(down),
            StepKind::Compress(compress) => self.compress(compress),
            StepKind::CompressedIndex(index) => self.compressed_index(index),
            StepKind::CompressedQuery(query) => self.compressed_query(query),
            StepKind::CompressedAttend(attend) => self.compressed_attend(attend),
            StepKind::GroupedDown(down) => self.grouped_down(down),
            StepKind::HyperIn(hyper) => self.hyper_in(hyper),
            StepKind::HyperOut(hyper) => self.hyper_out(hyper),
            StepKind::Project(project) => self.project(project),
            StepKind::ProjectNormed(project) => self.project_normed(project),
            StepKind::GateUp(gate_up) => self.gate_up(gate_up),
            StepKind::Route(route) => self.route(route),
            StepKind::ExpertsGateUp(experts) => self.experts_gate_up(experts),
            StepKind::ExpertsDown(experts) => self.experts_down(experts),
            StepKind::Head(head) => self.head(head),
            StepKind::MtpIn(mtp) => self.mtp_in(mtp),
            // Tokens are chosen between passes, where the control plane needs them.
            StepKind::Sample(_) => return,
        }
        self.goes_on();
        self.barrier.wait();
    }

    /// Whether what is dear is still to be done.
    fn goes_on(&self) -> bool {
        self.watch.goes_on(self.member, self.number)
    }

    fn dims(&self) -> &Dims {
        &self.pass.program.dims
    }

    /// Items of this member: those congruent to its number.
    fn mine(&self, items: usize) -> impl Iterator<Item = usize> {
        (self.member..items).step_by(self.pass.program.blocks as usize)
    }

    /// Rows of this member's block in a partition.
    fn rows(&self, partition: u32) -> Range<usize> {
        let at = partition as usize + self.member;
        let ends = &self.pass.program.row_partition;
        ends[at] as usize..ends[at + 1] as usize
    }

    fn at(&self, lane: usize, column: usize, width: usize) -> usize {
        (lane * self.dims().columns as usize + column) * width
    }

    /// Elements of a vector's field that are `part` of one lane and column.
    fn place(&self, index: u32, lane: usize, column: usize, part: Range<usize>) -> Range<usize> {
        let width = self.pass.program.vectors[index as usize].width as usize;
        let at = self.at(lane, column, width);
        at + part.start..at + part.end
    }

    /// Part of a vector that no member writes in this phase.
    fn read(&self, index: u32, lane: usize, column: usize, part: Range<usize>) -> &[f32] {
        let place = self.place(index, lane, column, part);
        // SAFETY: what a phase reads of others it does not write (module docs).
        unsafe { self.pass.vectors[index as usize].read(place) }
    }

    /// Part of a vector that is this member's own in this phase.
    #[allow(clippy::mut_from_ref)]
    fn write(&self, index: u32, lane: usize, column: usize, part: Range<usize>) -> &mut [f32] {
        let place = self.place(index, lane, column, part);
        // SAFETY: rows and items of a phase are disjoint between members (module docs), and no
        // step holds two references to one of them.
        unsafe { self.pass.vectors[index as usize].write(place) }
    }

    /// This member's own; a product takes it once.
    #[allow(clippy::mut_from_ref)]
    fn digits(&self) -> &mut Digits {
        // SAFETY: as `scratch`, for the length of a product.
        unsafe { &mut self.pass.digits.write(self.member..self.member + 1)[0] }
    }

    /// This member's own; a product takes it once.
    #[allow(clippy::mut_from_ref)]
    fn panels(&self) -> &mut Panels {
        // SAFETY: as `digits`.
        unsafe { &mut self.pass.panels.write(self.member..self.member + 1)[0] }
    }

    /// This member's own; a step takes it once.
    #[allow(clippy::mut_from_ref)]
    fn scratch(&self) -> &mut Scratch {
        // SAFETY: a member takes its own alone, and has done with it before it takes it again.
        unsafe { &mut self.pass.members.write(self.member..self.member + 1)[0] }
    }
}
