//! The only door to a device: a [`ValidProgram`] is a program whose every index is in bounds, whose
//! operands have the sizes that its steps say, whose vectors and states are written before they are
//! read, and whose rows are each owned by exactly one block.

mod compressed;

use crate::abi::{
    Attend, Codes, DeltaHeads, DeltaIn, DeltaRule, Dtype, Embed, Encoding, ExpertGroups,
    ExpertsDown, ExpertsGateUp, Gate, GateUp, Head, HeadMode, Heads, Join, LatentAttend,
    LatentDown, LatentHeads, LatentQuery, LatentUp, Layout, MtpIn, NormSpan, PageGroup, Program,
    Project, ProjectNormed, Qkv, Route, StateAt, StateKind, Step, StepKind, Tensor, PAGE,
};
use crate::buffer::Buffer;
use crate::error::{Error, Result};

/// A program that passed [`validate`]; nobody else can make one.
#[derive(Debug, Clone)]
pub struct ValidProgram(Program);

/// Whether entries of so many positions end where pages do.
fn divides_pages(every: u32) -> bool {
    let page = PAGE as u32;
    every > 0 && (page.is_multiple_of(every) || every.is_multiple_of(page))
}

impl ValidProgram {
    /// The program.
    pub fn program(&self) -> &Program {
        &self.0
    }
}

/// Checks a program against the buffers it will be started with.
///
/// # Errors
/// [`Error::InvalidProgram`] names the step and what is wrong with it.
pub fn validate(program: Program, buffers: &[Buffer]) -> Result<ValidProgram> {
    let lengths: Vec<u64> = buffers.iter().map(|b| b.len() as u64).collect();
    let mut checker = Checker {
        program: &program,
        lengths: &lengths,
        written: vec![false; program.vectors.len()],
        choices: vec![None; program.vectors.len()],
        kept: program.groups.iter().map(|group| vec![false; group.layers as usize]).collect(),
    };
    let whole = |detail| Error::InvalidProgram { step: usize::MAX, detail };
    checker.sizes().map_err(whole)?;
    program.groups.iter().try_for_each(|group| checker.group(group)).map_err(whole)?;
    let tensors = program.tensors.iter().enumerate();
    tensors.clone().try_for_each(|(index, tensor)| checker.tensor(index, tensor)).map_err(whole)?;
    for (index, step) in program.steps.iter().enumerate() {
        let sampled = |step: &Step| matches!(step.kind, StepKind::Sample(_));
        let behind = index > 0 && sampled(&program.steps[index - 1]);
        let mtp = matches!(step.kind, StepKind::MtpIn(_));
        let second = mtp && index != program.model_steps();
        let last = index + 1 == program.steps.len();
        if behind != mtp || second || program.predicts() && last && !sampled(step) {
            let detail = "one mtp_in stands behind sample, nothing else does, and sample ends it";
            return Err(Error::InvalidProgram { step: index, detail: detail.to_owned() });
        }
        checker.step(step).map_err(|detail| {
            let detail = format!("{} of layer {}: {detail}", step.kind.name(), step.layer);
            Error::InvalidProgram { step: index, detail }
        })?;
    }
    Ok(ValidProgram(program))
}

/// What is wrong, if anything is.
type Check = std::result::Result<(), String>;

struct Checker<'a> {
    program: &'a Program,
    lengths: &'a [u64],
    /// Vectors that an earlier step wrote.
    written: Vec<bool>,
    /// Vectors that hold a choice: of how many experts, and how many.
    choices: Vec<Option<[u32; 2]>>,
    /// Layers' states that an earlier step wrote, by group.
    kept: Vec<Vec<bool>>,
}

fn wanted(holds: bool, detail: impl FnOnce() -> String) -> Check {
    if holds {
        Ok(())
    } else {
        Err(detail())
    }
}

impl Checker<'_> {
    fn sizes(&self) -> Check {
        let d = &self.program.dims;
        let sizes = [d.hidden, d.lanes, d.vocab, d.slots, d.max_positions, self.program.blocks];
        wanted(!sizes.contains(&0), || format!("a size is zero: {d:?}"))?;
        let (columns, slots) = (d.columns, d.slots);
        wanted(columns > slots, || format!("{columns} columns for {slots} slots"))?;
        let first = self.program.groups.first();
        wanted(first.is_some_and(|group| group.window.is_none()), || {
            format!("the first page group must see all positions: {first:?}")
        })
    }

    fn group(&self, group: &PageGroup) -> Check {
        let all_lanes = self.program.dims.lanes;
        let stored = |dtype| matches!(dtype, Dtype::F32 | Dtype::F16) && group.window != Some(0);
        let fits = match group.state {
            StateKind::KeysValues { dtype, lanes, kv_heads, head_dim } => {
                lanes == all_lanes && kv_heads > 0 && head_dim > 0 && stored(dtype)
            }
            StateKind::Recurrent { lanes, heads } => {
                lanes == all_lanes && delta_heads(heads).is_ok() && group.window == Some(2)
            }
            StateKind::Latents { dtype, width } => width > 0 && stored(dtype),
            StateKind::Entries { dtype, width, every } => {
                width > 0 && divides_pages(every) && stored(dtype)
            }
            StateKind::Sums { numbers } => numbers > 0 && group.window == Some(2),
        };
        wanted(fits, || format!("page group {group:?}"))
    }

    fn tensor(&self, index: usize, t: &Tensor) -> Check {
        let inside = |buffer: u32, offset: u64, bytes: u64| {
            let end = offset.checked_add(bytes);
            let len = self.lengths.get(buffer as usize).copied();
            matches!((end, len), (Some(end), Some(len)) if end <= len)
        };
        let plain = !t.encoding.is_quantised() && t.lanes == 1;
        wanted(t.layout == Layout::RowMajor || plain, || {
            format!("columns of tensor {index} are no plain numbers of one lane: {t:?}")
        })?;
        let last = t.lanes.checked_sub(1);
        let last = last.ok_or_else(|| format!("tensor {index} has no matrix: {t:?}"))?;
        wanted(inside(t.buffer, t.offset, t.lane_range(last).end), || {
            format!("tensor {index} leaves its buffer: {t:?}")
        })?;
        // Rows that alternate with others' have scales of their own.
        wanted(t.row_step == 1 || t.row_step > 1 && t.encoding.group[0] <= 1, || {
            format!("rows of tensor {index} are {} apart: {t:?}", t.row_step)
        })?;
        wanted(t.cols.is_multiple_of(t.encoding.codes.row().numbers), || {
            format!("rows of tensor {index} are no whole bytes: {t:?}")
        })?;
        let [_, across] = t.encoding.group;
        let piece = t.encoding.codes.row().numbers;
        wanted(across >= t.cols || across.is_multiple_of(piece), || {
            format!("groups of tensor {index} cut its codes: {t:?}")
        })?;
        wanted(!t.encoding.zeros || t.encoding.codes == Codes::I4, || {
            format!("zero points of tensor {index}: {t:?}")
        })?;
        let [scales, zeros] = [t.scale_range(last).end, t.zero_range(last).end];
        let beside = [(t.scale_offset, scales), (t.zero_offset, zeros)];
        beside.into_iter().try_for_each(|(offset, bytes)| {
            wanted(bytes == 0 || inside(t.scale_buffer, offset, bytes), || {
                format!("scales of tensor {index} leave their buffer")
            })
        })
    }

    fn step(&mut self, step: &Step) -> Check {
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
            StepKind::Sample(sample) => self.reads(sample.input, 1, self.program.dims.vocab),
            StepKind::MtpIn(mtp) => self.mtp_in(mtp),
        }
    }

    fn embed(&mut self, &Embed { table, factor, output }: &Embed) -> Check {
        let d = self.program.dims;
        wanted(factor.is_finite(), || format!("a factor of {factor}"))?;
        self.matrix(table, [1, d.vocab, d.hidden])?;
        let width = self.program.vectors.get(output as usize).map_or(0, |v| v.width);
        match width / d.hidden {
            0 | 1 => self.writes(output, d.lanes, d.hidden),
            streams => self.writes(output, 1, streams * d.hidden),
        }
    }

    fn qkv(&mut self, step: &Qkv) -> Check {
        let (d, heads) = (self.program.dims, step.heads);
        let divide = heads.kv > 0 && heads.query > 0 && heads.query.is_multiple_of(heads.kv);
        let even = heads.dim > 0 && heads.dim.is_multiple_of(2);
        wanted(divide && even, || format!("heads do not divide: {heads:?}"))?;
        step.norm.map_or(Ok(()), |norm| self.norm(norm))?;
        let widths = [heads.query_width(), heads.kv_width(), heads.kv_width()];
        let mut rows = widths;
        rows[0] *= 1 + u32::from(step.gates.is_some());
        for (weight, rows) in step.weights.into_iter().zip(rows) {
            self.matrix(weight, [d.lanes, rows, d.hidden])?;
        }
        let plain = step.biases.is_none() && step.norm_span == NormSpan::Head;
        wanted(step.gates.is_none() || plain, || {
            "gates beside biases, or norms over all heads".to_owned()
        })?;
        for (bias, width) in step.biases.into_iter().flatten().zip(widths) {
            self.numbers(bias, d.lanes * width, "bias")?;
        }
        let one = d.lanes == 1 || step.head_norms.is_none() || step.norm_span == NormSpan::Head;
        wanted(one, || "norms over the heads of several lanes".to_owned())?;
        for (norm, width) in step.head_norms.into_iter().flatten().zip(widths) {
            let count = match step.norm_span {
                NormSpan::Head => heads.dim,
                NormSpan::AllHeads => width,
            };
            self.numbers(norm, count, "norm of heads")?;
        }
        self.rotary(step.rotary.table, heads.dim)?;
        self.reads(step.input, d.lanes, d.hidden)?;
        self.writes(step.output, d.lanes, heads.query_width())?;
        step.gates.map_or(Ok(()), |gates| self.writes(gates, d.lanes, heads.query_width()))?;
        self.state(step.state, heads)?;
        self.keeps(step.state)?;
        self.partition(step.partition, d.lanes * step.all_heads())
    }

    /// The place is this step's alone.
    fn keeps(&mut self, at: StateAt) -> Check {
        let kept = &mut self.kept[at.group as usize][at.layer as usize];
        wanted(!std::mem::replace(kept, true), || format!("{at:?} is another layer's"))
    }

    fn delta_in(&mut self, step: &DeltaIn) -> Check {
        let (d, heads) = (self.program.dims, step.heads);
        delta_heads(heads)?;
        step.norm.map_or(Ok(()), |norm| self.norm(norm))?;
        self.reads(step.input, d.lanes, d.hidden)?;
        let rows = [heads.keys * heads.rows(), 2 * heads.values];
        for ((weight, output), rows) in step.weights.into_iter().zip(step.outputs).zip(rows) {
            self.matrix(weight, [d.lanes, rows, d.hidden])?;
            self.writes(output, d.lanes, rows)?;
        }
        self.partition(step.partition, d.lanes * step.rows())
    }

    fn delta_rule(&mut self, step: &DeltaRule) -> Check {
        let (d, heads) = (self.program.dims, step.heads);
        delta_heads(heads)?;
        self.numbers(step.conv, d.lanes * heads.keys * heads.channels() * heads.taps, "taps")?;
        self.numbers(step.decay, d.lanes * heads.values, "decay")?;
        self.numbers(step.bias, d.lanes * heads.values, "bias")?;
        self.numbers(step.norm, heads.value_dim, "norm of heads")?;
        self.reads(step.inputs[0], d.lanes, heads.keys * heads.rows())?;
        self.reads(step.inputs[1], d.lanes, 2 * heads.values)?;
        self.writes(step.output, d.lanes, heads.value_width())?;
        let wanted_of = StateKind::Recurrent { lanes: d.lanes, heads };
        let found = self.group_of(step.state)?.state;
        wanted(found == wanted_of, || format!("{:?} keeps {found:?}", step.state))?;
        self.keeps(step.state)
    }

    /// A state was written before.
    fn is_kept(&self, at: StateAt) -> Check {
        let kept = self.kept[at.group as usize][at.layer as usize];
        wanted(kept, || format!("{at:?} is read before it is written"))
    }

    fn attend(&mut self, step: &Attend) -> Check {
        let (d, heads) = (self.program.dims, step.heads);
        self.state(step.state, heads)?;
        self.is_kept(step.state)?;
        let sees = self.program.groups[step.state.group as usize].window;
        let within = match (step.window, sees) {
            (Some(window), Some(most)) => (1..=most).contains(&window),
            (Some(window), None) => window > 0,
            (None, sees) => sees.is_none(),
        };
        wanted(within, || format!("a window of {:?} in a page group of {sees:?}", step.window))?;
        let sinks = |sinks| self.numbers(sinks, d.lanes * heads.query, "sinks");
        step.sinks.map_or(Ok(()), sinks)?;
        self.reads(step.input, d.lanes, heads.query_width())?;
        step.gates.map_or(Ok(()), |gates| self.reads(gates, d.lanes, heads.query_width()))?;
        self.writes(step.output, d.lanes, heads.query_width())
    }

    fn latent_down(&mut self, step: &LatentDown) -> Check {
        let (d, heads) = (self.program.dims, step.heads);
        latent_heads(heads)?;
        wanted(step.eps.is_finite() && step.eps >= 0.0, || format!("an epsilon of {}", step.eps))?;
        step.norm.map_or(Ok(()), |norm| self.numbers(norm, d.hidden, "norm"))?;
        match step.query {
            Some([weight, norm]) => {
                self.matrix(weight, [1, step.width, d.hidden])?;
                self.numbers(norm, step.width, "norm of queries")?;
            }
            None => wanted(step.width == d.hidden, || {
                format!("{} numbers of an input of {}", step.width, d.hidden)
            })?,
        }
        self.matrix(step.weight, [1, heads.key(), d.hidden])?;
        self.numbers(step.scale, heads.rank, "norm of latents")?;
        self.turns(step.rotary.table, heads)?;
        self.reads(step.input, d.lanes, d.hidden)?;
        self.writes(step.output, 1, step.width)?;
        self.latents(step.state, heads)?;
        self.keeps(step.state)?;
        let rows = step.query.map_or(0, |_| step.width) + heads.key();
        self.partition(step.partition, rows)
    }

    fn latent_query(&mut self, step: &LatentQuery) -> Check {
        let (d, heads) = (self.program.dims, step.heads);
        latent_heads(heads)?;
        let width = self.program.vectors.get(step.input as usize).map_or(0, |v| v.width);
        self.reads(step.input, 1, width)?;
        self.matrix(step.weight, [d.lanes, heads.count * heads.query(), width])?;
        self.matrix(step.up, [d.lanes, heads.count * heads.up(), heads.rank])?;
        self.turns(step.rotary.table, heads)?;
        self.writes(step.output, d.lanes, heads.count * heads.key())?;
        self.partition(step.partition, d.lanes * heads.count)
    }

    fn latent_attend(&mut self, step: &LatentAttend) -> Check {
        let (lanes, width) = (self.program.dims.lanes, step.heads.count * step.heads.key());
        wanted(step.scale.is_finite(), || format!("a scale of {}", step.scale))?;
        self.latents(step.state, step.heads)?;
        self.is_kept(step.state)?;
        self.reads(step.input, lanes, width)?;
        self.writes(step.output, lanes, width)
    }

    fn latent_up(&mut self, step: &LatentUp) -> Check {
        let (lanes, heads) = (self.program.dims.lanes, step.heads);
        latent_heads(heads)?;
        self.reads(step.input, lanes, heads.count * heads.key())?;
        self.matrix(step.weight, [lanes, heads.count * heads.up(), heads.rank])?;
        self.writes(step.output, lanes, heads.count * heads.value)?;
        self.partition(step.partition, lanes * heads.count)
    }

    /// The rotary table of latent attention: all of the turned features turn.
    fn turns(&self, table: u32, heads: LatentHeads) -> Check {
        self.rotary(table, heads.turned)?;
        let pairs = self.found(table)?.cols;
        wanted(2 * pairs == heads.turned, || format!("{pairs} pairs turn of {heads:?}"))
    }

    /// The place exists, keeps such latents, and sees all positions.
    fn latents(&self, at: StateAt, heads: LatentHeads) -> Check {
        let group = self.group_of(at)?;
        let keeps =
            |state| matches!(state, StateKind::Latents { width, .. } if width == heads.key());
        wanted(keeps(group.state) && group.window.is_none(), || {
            format!("{at:?} keeps {:?}, not latents of {}", group.state, heads.key())
        })
    }

    fn project(&mut self, step: &Project) -> Check {
        let d = self.program.dims;
        let width = self.program.vectors.get(step.input as usize).map_or(0, |v| v.width);
        self.reads(step.input, d.lanes, width)?;
        self.reads(step.residual, d.lanes, d.hidden)?;
        match step.join {
            Join::Sum => {}
            Join::Own { factor } => {
                wanted(factor.is_finite(), || format!("a factor of {factor}"))?;
            }
            Join::Delayed { layers, from } => {
                wanted(layers > 0, || "a delay of no layers".to_owned())?;
                self.reads(from, d.lanes, d.hidden)?;
            }
        }
        self.matrix(step.weight, [d.lanes, d.hidden, width])?;
        if let Some(bias) = step.bias {
            self.numbers(bias, d.hidden, "bias")?;
            wanted(step.join == Join::Sum && step.keep.is_none(), || {
                format!("a bias of what joins by {:?}", step.join)
            })?;
        }
        self.writes(step.residual, d.lanes, d.hidden)?;
        step.keep.map_or(Ok(()), |keep| self.writes(keep, d.lanes, d.hidden))?;
        self.partition(step.partition, d.hidden)
    }

    fn project_normed(&mut self, step: &ProjectNormed) -> Check {
        let d = self.program.dims;
        let width = self.program.vectors.get(step.input as usize).map_or(0, |v| v.width);
        self.reads(step.input, d.lanes, width)?;
        self.reads(step.residual, d.lanes, d.hidden)?;
        self.matrix(step.weight, [d.lanes, d.hidden, width])?;
        self.numbers(step.norm, d.hidden, "norm of an output")?;
        self.writes(step.residual, d.lanes, d.hidden)?;
        self.partition(step.partition, d.hidden)
    }

    fn gate_up(&mut self, step: &GateUp) -> Check {
        let (d, ffn) = (self.program.dims, step.ffn);
        wanted(ffn > 0, || "an inner width of 0".to_owned())?;
        gate(step.gate)?;
        step.norm.map_or(Ok(()), |norm| self.norm(norm))?;
        for weight in step.weights {
            self.matrix(weight, [d.lanes, ffn, d.hidden])?;
        }
        step.scale.map_or(Ok(()), |scale| self.numbers(scale, d.hidden, "scale"))?;
        self.reads(step.input, d.lanes, d.hidden)?;
        self.writes(step.output, d.lanes, ffn)?;
        self.partition(step.partition, d.lanes * ffn)
    }

    fn route(&mut self, step: &Route) -> Check {
        let (d, Route { experts, chosen, .. }) = (self.program.dims, *step);
        wanted((1..=experts).contains(&chosen), || format!("{chosen} of {experts} experts"))?;
        step.norm.map_or(Ok(()), |norm| self.numbers(norm, d.hidden, "norm"))?;
        self.matrix(step.weight, [1, experts, d.hidden])?;
        for bias in [step.bias, step.correction].into_iter().flatten() {
            self.numbers(bias, experts, "bias")?;
        }
        wanted(step.factor.is_finite(), || format!("a factor of {}", step.factor))?;
        let single = step.scoring.is_single();
        wanted(single || step.correction.is_none() && step.groups.is_none(), || {
            format!("a correction or groups beside {:?}", step.scoring)
        })?;
        if let Some(table) = step.by_token {
            self.numbers(table, d.vocab * chosen, "experts of tokens")?;
        }
        if let Some(ExpertGroups { count, chosen: some }) = step.groups {
            let divides = (1..=64).contains(&count) && experts.is_multiple_of(count);
            let enough = || some <= count && chosen <= experts / count * some;
            wanted(divides && enough(), || {
                format!("{chosen} of {experts} experts in {some} of {count} groups")
            })?;
        }
        self.reads(step.input, d.lanes, d.hidden)?;
        self.writes(step.output, 1, 2 * chosen)?;
        self.choices[step.output as usize] = Some([experts, chosen]);
        self.partition(step.partition, experts)
    }

    fn experts_gate_up(&mut self, step: &ExpertsGateUp) -> Check {
        let (d, ExpertsGateUp { ffn, experts, .. }) = (self.program.dims, *step);
        wanted(ffn > 0, || "an inner width of 0".to_owned())?;
        gate(step.gate)?;
        step.norm.map_or(Ok(()), |norm| self.numbers(norm, d.hidden, "norm"))?;
        for weight in step.weights {
            self.bank(weight, experts, [d.lanes, ffn, d.hidden])?;
        }
        for bias in step.biases.into_iter().flatten() {
            self.numbers(bias, experts * d.lanes * ffn, "bias")?;
        }
        self.reads(step.input, d.lanes, d.hidden)?;
        self.choice(step.choice, [experts, step.chosen])?;
        self.writes(step.output, d.lanes, step.chosen * ffn)?;
        self.partition(step.partition, d.lanes * ffn)
    }

    fn experts_down(&mut self, step: &ExpertsDown) -> Check {
        let (d, ExpertsDown { ffn, experts, .. }) = (self.program.dims, *step);
        self.reads(step.input, d.lanes, step.chosen * ffn)?;
        self.choice(step.choice, [experts, step.chosen])?;
        self.reads(step.residual, d.lanes, d.hidden)?;
        self.bank(step.weight, experts, [d.lanes, d.hidden, ffn])?;
        step.bias.map_or(Ok(()), |bias| self.numbers(bias, experts * d.hidden, "bias"))?;
        self.writes(step.residual, d.lanes, d.hidden)?;
        self.partition(step.partition, d.hidden)
    }

    /// One matrix of `[lanes, rows, cols]` an expert, all stored alike.
    fn bank(&self, first: u32, experts: u32, shape: [u32; 3]) -> Check {
        let alike = |t: &Tensor| (t.encoding, t.row_step);
        let one = alike(self.found(first)?);
        (0..experts).try_for_each(|expert| {
            let index = first.saturating_add(expert);
            self.matrix(index, shape)?;
            let other = alike(self.found(index)?);
            wanted(other == one, || format!("expert {expert}: {other:?}, the first {one:?}"))
        })
    }

    /// A vector that holds a choice of such experts.
    fn choice(&self, index: u32, wanted_of: [u32; 2]) -> Check {
        self.reads(index, 1, 2 * wanted_of[1])?;
        let found = self.choices[index as usize];
        wanted(found == Some(wanted_of), || {
            let [experts, chosen] = wanted_of;
            format!("vector {index} holds no choice of {chosen} of {experts} experts: {found:?}")
        })
    }

    fn head(&mut self, step: &Head) -> Check {
        let d = self.program.dims;
        self.norm(step.norm)?;
        let shape = match step.mode {
            HeadMode::Mean | HeadMode::SumThenNorm => [1, d.vocab, d.hidden],
            HeadMode::PerLane => [d.lanes, d.vocab.div_ceil(d.lanes), d.hidden],
            HeadMode::Concat => [1, d.vocab, d.lanes * d.hidden],
        };
        self.matrix(step.weight, shape)?;
        self.reads(step.input, d.lanes, d.hidden)?;
        self.writes(step.output, 1, d.vocab)?;
        self.partition(step.partition, d.vocab)
    }

    fn mtp_in(&mut self, step: &MtpIn) -> Check {
        let d = self.program.dims;
        self.matrix(step.table, [1, d.vocab, d.hidden])?;
        for norm in [step.embedding_norm, step.hidden_norm].iter().chain(&step.end_norms) {
            self.numbers(*norm, d.hidden, "norm")?;
        }
        self.matrix(step.weight, [1, d.hidden, 2 * d.hidden])?;
        self.reads(step.input, d.lanes, d.hidden)?;
        self.writes(step.output, d.lanes, d.hidden)?;
        self.partition(step.partition, d.hidden)
    }

    fn found(&self, index: u32) -> std::result::Result<&Tensor, String> {
        let tensors = &self.program.tensors;
        let none = || format!("tensor {index} of {}", tensors.len());
        tensors.get(index as usize).ok_or_else(none)
    }

    /// A matrix of `[lanes, rows, cols]`.
    fn matrix(&self, index: u32, shape: [u32; 3]) -> Check {
        let t = self.found(index)?;
        let found = [t.lanes, t.rows, t.cols];
        wanted(found == shape, || format!("tensor {index}: {shape:?} wanted, got {found:?}"))
    }

    /// The scale of a norm of the residual streams: one row for all lanes, or one a lane.
    fn norm(&self, index: u32) -> Check {
        let (t, d) = (self.found(index)?, &self.program.dims);
        let fits = t.cols == d.hidden && [1, d.lanes].contains(&t.rows);
        wanted(fits, || format!("norm scale {index} is {} x {}", t.rows, t.cols))
    }

    /// A list of `count` numbers, in rows of any length.
    fn numbers(&self, index: u32, count: u32, what: &str) -> Check {
        let t = self.found(index)?;
        let found = u64::from(t.rows) * u64::from(t.cols);
        wanted(found == u64::from(count), || {
            format!("{what} {index}: {count} numbers wanted, got {found}")
        })
    }

    /// A rotary table of heads of so many features.
    fn rotary(&self, index: u32, dim: u32) -> Check {
        let t = self.found(index)?;
        let fits = t.lanes == 1 && t.rows == 2 && (1..=dim / 2).contains(&t.cols);
        let float = t.encoding == Encoding::plain(Codes::F32);
        wanted(fits && float, || {
            let (rows, cols) = (t.rows, t.cols);
            format!("rotary table {index} is {rows} x {cols} for heads of {dim}")
        })
    }

    fn vector(&self, index: u32, lanes: u32, width: u32) -> Check {
        let found = self.program.vectors.get(index as usize);
        let v = found.ok_or_else(|| format!("vector {index} does not exist"))?;
        wanted((v.lanes, v.width) == (lanes, width), || {
            format!("vector {index}: {lanes} x {width} wanted, got {} x {}", v.lanes, v.width)
        })
    }

    fn reads(&self, index: u32, lanes: u32, width: u32) -> Check {
        self.vector(index, lanes, width)?;
        wanted(self.written[index as usize], || {
            format!("vector {index} is read before it is written")
        })
    }

    fn writes(&mut self, index: u32, lanes: u32, width: u32) -> Check {
        self.vector(index, lanes, width)?;
        self.written[index as usize] = true;
        self.choices[index as usize] = None;
        Ok(())
    }

    /// The group of a place, which exists.
    fn group_of(&self, at: StateAt) -> std::result::Result<&PageGroup, String> {
        let group = self.program.groups.get(at.group as usize);
        let group = group.filter(|group| at.layer < group.layers);
        group.ok_or_else(|| format!("{at:?} does not exist"))
    }

    /// The place exists, and is one of such heads.
    fn state(&self, at: StateAt, heads: Heads) -> Check {
        let StateKind::KeysValues { kv_heads, head_dim, .. } = self.group_of(at)?.state else {
            return Err(format!("{at:?} keeps no keys and values"));
        };
        wanted((kv_heads, head_dim) == (heads.kv, heads.dim), || {
            format!("{at:?} keeps {kv_heads} heads of {head_dim}, not {heads:?}")
        })
    }

    /// The partition covers every row once: it rises from 0 to the number of rows.
    fn partition(&self, first: u32, rows: u32) -> Check {
        let first = first as usize;
        let ends = first.checked_add(self.program.blocks as usize);
        let part = ends.and_then(|last| self.program.row_partition.get(first..=last));
        let covers = part.is_some_and(|p| {
            p[0] == 0 && p[p.len() - 1] == rows && p.windows(2).all(|w| w[0] <= w[1])
        });
        wanted(covers, || format!("row partition {part:?} does not cover {rows} rows"))
    }
}

/// What heads of a delta rule may be.
fn delta_heads(heads: DeltaHeads) -> Check {
    let DeltaHeads { keys, values, key_dim, value_dim, taps } = heads;
    let divide = keys > 0 && values > 0 && values.is_multiple_of(keys);
    let fits = divide && key_dim > 0 && value_dim > 0 && taps > 1;
    wanted(fits, || format!("heads of a delta rule: {heads:?}"))
}

/// What sizes of latent attention may be.
fn latent_heads(heads: LatentHeads) -> Check {
    let LatentHeads { count, rank, plain, turned, value } = heads;
    let sized = ![count, rank, plain, turned, value].contains(&0) && turned.is_multiple_of(2);
    wanted(sized, || format!("latent heads: {heads:?}"))
}

/// What a gate may be.
fn gate(gate: Gate) -> Check {
    match gate {
        Gate::Silu | Gate::GeluTanh => Ok(()),
        Gate::ClampedSilu { limit } => {
            let fits = limit.is_finite() && limit > 0.0;
            wanted(fits, || format!("a gate of limit {limit}"))
        }
        Gate::ClampedSwiglu { alpha, limit } => {
            let fits = alpha.is_finite() && limit.is_finite() && limit > 0.0;
            wanted(fits, || format!("a gate of alpha {alpha} and limit {limit}"))
        }
    }
}

#[cfg(test)]
#[path = "validate_tests.rs"]
mod tests;
