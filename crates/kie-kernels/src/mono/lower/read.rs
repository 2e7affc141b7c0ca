//! A program's steps read as layers of a few classes. What is no such program is refused here, with
//! the step, before a byte is allocated.

use super::compressed::{Compressed, CompressedSteps, CompressedTensors};
use super::delta::{self, Delta};
use super::experts::{Experts, SharedExpert};
use super::hyper::{Hyper, HyperTensors, MOST_STREAMS};
use super::latent::{Latent, LatentTensors};
use super::matrix::Matrix;
use super::model::{
    Class, Coded, Extras, Layer, Model, Mtp, Norm, Stored, CLAMPED_SHIFT, FIRST_POOLS, MOST_CHOSEN,
    MOST_CLASSES, MOST_EXPERTS, MOST_GROUPS, MOST_POOLS,
};
use super::tiling::StoredBits;
use crate::abi::{
    Attend, CompressedDown, DeltaHeads, DeltaIn, DeltaRule, ExpertGroups, ExpertsDown,
    ExpertsGateUp, Gate, GateUp, HeadMode, Heads, HyperIn, Join, LatentAttend, LatentDown,
    LatentHeads, LatentQuery, LatentUp, MtpIn, NormSpan, PageGroup, Program, Project, Qkv, Rotary,
    Route, Scoring, StateAt, StateKind, StepKind, Tensor, NONE,
};
use crate::error::{Error, Result};
use crate::shard::{dealt, indivisible, normed_over_all_heads};

impl Model {
    /// Reads a program's model, for so many machines, with numbers of one part.
    ///
    /// # Errors
    /// [`Error::InvalidProgram`] with the step that is not as expected, [`Error::Indivisible`].
    pub fn read(program: &Program, ranks: u32) -> Result<Self> {
        let mut steps = Steps { program, at: 0 };
        let StepKind::Embed(embed) = steps.next()? else { return steps.refuse("embed") };
        if embed.factor != 1.0 {
            return refuse(0, format!("embeddings times {}, 1 wanted", embed.factor));
        }
        Self::read_layers(steps, ranks, (embed.table, None), program.model_steps())
    }

    /// Reads what predicts further tokens beside a program's model, if anything does.
    ///
    /// # Errors
    /// As [`Model::read`].
    pub fn read_mtp(program: &Program, ranks: u32) -> Result<Option<Self>> {
        let mut steps = Steps { program, at: program.model_steps() };
        if !program.predicts() {
            return Ok(None);
        }
        let first = steps.at;
        let StepKind::MtpIn(mtp) = steps.next()? else { return steps.refuse("mtp_in") };
        if program.dims.lanes > 1 {
            return refuse(first, "lanes, and a layer that predicts further tokens".to_owned());
        }
        let of = (mtp.table, Some(mtp));
        let model = Self::read_layers(steps, ranks, of, program.steps.len())?;
        let plain = model.hyper.is_none() && model.classes[0].attends();
        if model.layers() != 1 || !plain {
            let detail = "what predicts further tokens is no layer of attention".to_owned();
            return refuse(first, detail);
        }
        Ok(Some(model))
    }

    /// Layers, and the head behind them, up to step `end`.
    fn read_layers(
        mut steps: Steps<'_>,
        ranks: u32,
        (embed, mtp): (u32, Option<&MtpIn>),
        end: usize,
    ) -> Result<Self> {
        let (program, begin) = (steps.program, steps.at - 1);
        let (d, pools) = (&program.dims, pools(program)?);
        let sliced = d.lanes == 1 && ranks > 1;
        let lanes_all = if sliced { ranks } else { d.lanes };
        // A norm of slices is that of the one lane there is.
        let lanes = if sliced { 1 } else { lanes_all };
        let (mut classes, mut layer, interleaved) = layers(&mut steps, ranks, (lanes, sliced))?;
        let hyper = steps.head_takes(&layer)?;
        let StepKind::Head(head) = steps.next()? else { return steps.refuse("head") };
        let head_at = steps.at - 1;
        let StepKind::Sample(_) = steps.next()? else { return steps.refuse("sample") };
        if steps.at != end || layer.is_empty() {
            let count = layer.len();
            return refuse(steps.at, format!("{count} layers, then what is no step of theirs"));
        }
        if !lanes_all.is_multiple_of(ranks) {
            let [heads, kv_heads] = classes[0].heads_all;
            return Err(indivisible(d.lanes, heads, kv_heads, ranks));
        }
        let per_lane = d.lanes == 1 || head.mode == HeadMode::PerLane;
        let clamped =
            |c: &Class| c.experts.is_some_and(|e| matches!(e.gate, Gate::ClampedSwiglu { .. }));
        let residual_shift = if classes.iter().any(clamped) { CLAMPED_SHIFT } else { 0 };
        if lanes_all > ranks && classes.iter().any(|c: &Class| c.experts.is_some()) {
            return refuse(head_at, format!("experts in {lanes_all} lanes, one wanted"));
        }
        if let Some(mtp) = mtp {
            classes[0].predicts = true;
            layer[0].extras.mtp_in = mtp.weight;
        }
        let mut model = Self {
            parts: 1,
            ranks,
            lanes: lanes_all / ranks,
            sliced,
            vocab_all: d.vocab,
            hidden: d.hidden,
            vocab: if per_lane { d.vocab.div_ceil(lanes_all) } else { d.vocab },
            head_mode: if per_lane { HeadMode::PerLane } else { head.mode },
            interleaved,
            eps: d.eps,
            pools,
            classes,
            layer,
            coded: Vec::new(),
            coded_head: None,
            embed,
            head: head.weight,
            final_norm: Norm::read(program, head.norm, lanes, head_at)?,
            residual_shift,
            hyper,
            mtp: mtp.map(|of| Mtp::read(program, of, head.norm, begin)).transpose()?,
        };
        let width = program.tensors.get(model.embed as usize).map(|t| t.cols);
        if width != Some(model.hidden) {
            return refuse(begin, format!("embedding of width {width:?}, not {}", model.hidden));
        }
        model.coded = (0..model.classes.len()).map(|c| model.coded_of(program, c)).collect();
        model.coded_head = Self::coded_as(program, &[model.head]);
        Ok(model)
    }

    /// What [`Model::coded`] says of a program's class.
    fn coded_of(&self, program: &Program, class: usize) -> [Stored; Matrix::COUNT] {
        let experts = self.classes[class].experts.map_or(1, |e| e.count);
        Matrix::ALL.map(|matrix| {
            // The router's logits, and gates, are as good as their numbers.
            if matches!(matrix, Matrix::Router | Matrix::Gates) {
                return None;
            }
            let count = if matrix.is_experts() { experts } else { 1 };
            let of_layer =
                |l: &Layer| l.tensors(matrix).into_iter().flat_map(move |t| t..t + count);
            let layers = self.layer.iter().filter(|l| l.class == class);
            let stored = Self::coded_as(program, &layers.flat_map(of_layer).collect::<Vec<_>>());
            let turned = |coded: Coded| match coded {
                Coded { bits: StoredBits::F8, group: [rows, columns] } => {
                    Ok(Coded { bits: StoredBits::F8, group: [columns, rows] })
                }
                _ => Err("rows that are turned around, and scales a row".to_owned()),
            };
            if matrix == Matrix::KeyUp {
                stored.map(|coded| coded.and_then(turned))
            } else {
                stored
            }
        })
    }

    /// How all of some tensors are stored.
    fn coded_as(program: &Program, tensors: &[u32]) -> Stored {
        let all = tensors.iter().filter_map(|t| program.tensors.get(*t as usize));
        let all: Vec<_> = all.map(|t| Coded::of(&t.encoding)).collect();
        let first = all.first()?.clone();
        match all.iter().all(|coded| *coded == first) {
            true => first,
            false => Some(Err("layers or parts of it are stored differently".to_owned())),
        }
    }
}

/// The classes of a program's layers, the layers, and whether rotary pairs are neighbours; `lanes`
/// with whether they are slices.
fn layers(
    steps: &mut Steps<'_>,
    ranks: u32,
    lanes: (u32, bool),
) -> Result<(Vec<Class>, Vec<Layer>, bool)> {
    let program = steps.program;
    let (mut classes, mut layers): (Vec<Class>, Vec<Layer>) = (Vec::new(), Vec::new());
    let mut interleaved = false;
    while steps.at_layer() {
        let first = steps.at;
        let phases = steps.layer()?;
        phases.known(program, first)?;
        if let Some(Rotary { interleaved: turns, .. }) = phases.mixer.rotary() {
            let known = layers.iter().any(|l: &Layer| classes[l.class].delta.is_none());
            if known && interleaved != turns {
                return refuse(first, "rotary pairs differ from layer to layer".to_owned());
            }
            interleaved = turns;
        }
        let class = Class::read(program, &phases, ranks)?;
        let index = classes.iter().position(|c| *c == class).unwrap_or(classes.len());
        if index == classes.len() {
            classes.push(class);
        }
        if classes.len() > MOST_CLASSES {
            return refuse(first, format!("a layer of class {index}: {MOST_CLASSES} at most"));
        }
        layers.push(Layer::read(program, &phases, index, lanes, first)?);
    }
    Ok((classes, layers, interleaved))
}

/// The steps of a program, one after another.
struct Steps<'a> {
    program: &'a Program,
    at: usize,
}

/// The phases of a layer: attention or a delta rule, then an mlp.
struct Phases<'a> {
    mixer: Mixer<'a>,
    output: &'a Project,
    /// Number of the first step of the mlp.
    second: usize,
    mlp: Mlp<'a>,
    /// What both take of several residual streams.
    hyper: Option<[&'a HyperIn; 2]>,
}

enum Mixer<'a> {
    Attention {
        qkv: &'a Qkv,
        attend: &'a Attend,
    },
    Delta {
        input: &'a DeltaIn,
        rule: &'a DeltaRule,
    },
    Latent {
        down: &'a LatentDown,
        query: &'a LatentQuery,
        attend: &'a LatentAttend,
        up: &'a LatentUp,
    },
    Compressed(CompressedSteps<'a>),
}

/// Tensors of a mixer, or [`NONE`].
struct MixerTensors {
    qkv: [u32; 3],
    biases: [u32; 3],
    head_norms: [u32; 2],
    sinks: u32,
    delta: delta::Tensors,
    latent: Option<LatentTensors>,
    compressed: Option<CompressedTensors>,
}

impl MixerTensors {
    /// Of a mixer that has none of these.
    fn none() -> Self {
        Self {
            qkv: [NONE; 3],
            biases: [NONE; 3],
            head_norms: [NONE; 2],
            sinks: NONE,
            delta: Extras::default().delta,
            latent: None,
            compressed: None,
        }
    }
}

impl Mixer<'_> {
    fn rotary(&self) -> Option<Rotary> {
        match self {
            Self::Attention { qkv, .. } => Some(qkv.rotary),
            Self::Delta { .. } => None,
            Self::Latent { down, .. } => Some(down.rotary),
            Self::Compressed(of) => Some(of.down.rotary),
        }
    }

    /// The norm before it.
    fn norm(&self) -> Option<u32> {
        match self {
            Self::Attention { qkv, .. } => qkv.norm,
            Self::Delta { input, .. } => input.norm,
            Self::Latent { down, .. } => down.norm,
            Self::Compressed(of) => of.down.norm,
        }
    }

    /// Where its state is kept, and the positions that a query sees; 0: all.
    fn state(&self) -> (StateAt, u32) {
        match self {
            Self::Attention { qkv, attend } => (qkv.state, attend.window.unwrap_or(0)),
            Self::Delta { rule, .. } => (rule.state, 0),
            Self::Latent { down, .. } => (down.state, 0),
            Self::Compressed(of) => (of.down.state, of.attend.window),
        }
    }

    /// What it is made of.
    fn tensors(&self, program: &Program, first: usize) -> Result<MixerTensors> {
        let rows_of = |t: u32| program.tensors.get(t as usize).map_or(1, |t: &Tensor| t.rows);
        match self {
            Self::Attention { qkv, attend } => {
                if qkv.head_norms.into_iter().flatten().any(|norm| rows_of(norm) != 1) {
                    let detail = "norms of heads that differ from lane to lane";
                    return refuse(first, detail.to_owned());
                }
                Ok(MixerTensors {
                    qkv: qkv.weights,
                    biases: qkv.biases.unwrap_or([NONE; 3]),
                    head_norms: qkv.head_norms.unwrap_or([NONE; 2]),
                    sinks: attend.sinks.unwrap_or(NONE),
                    ..MixerTensors::none()
                })
            }
            Self::Delta { input, rule } => Ok(MixerTensors {
                qkv: [input.weights[0], NONE, NONE],
                delta: delta::Tensors::of(input, rule),
                ..MixerTensors::none()
            }),
            Self::Compressed(of) => Ok(MixerTensors {
                sinks: of.attend.sinks,
                compressed: Some(of.tensors()),
                ..MixerTensors::none()
            }),
            Self::Latent { down, query, up, .. } => {
                let [weight, norm] = down.query.unwrap_or([NONE; 2]);
                let latent = LatentTensors {
                    down: [weight, down.weight],
                    norms: [norm, down.scale],
                    query: query.weight,
                    up: up.weight,
                };
                Ok(MixerTensors { latent: Some(latent), ..MixerTensors::none() })
            }
        }
    }

    /// Refuses what there is no code for yet; `first` is its first step.
    fn known(&self, program: &Program, first: usize) -> Result<()> {
        let table = self.rotary().and_then(|rotary| program.tensors.get(rotary.table as usize));
        let features = 2 * table.map_or(0, |t| t.cols);
        if self.norm().is_none() {
            return refuse(first, "attention without a norm before it".to_owned());
        }
        let one_lane = match self {
            Self::Attention { qkv, attend } => {
                let (dim, gated) = (qkv.heads.dim, qkv.gates.is_some());
                let whole = features == dim || (features < dim && qkv.head_norms.is_some());
                if !whole {
                    let detail = format!("qkv turns {features} features of {dim}, all wanted");
                    return refuse(first, detail);
                }
                if gated != attend.gates.is_some() {
                    return refuse(first + 1, "gates that are not used".to_owned());
                }
                attend.sinks.is_some() || gated
            }
            Self::Delta { rule, .. } => {
                Delta::of(rule.heads).known().or_else(|got| refuse(first + 1, got))?;
                true
            }
            Self::Latent { down, .. } => {
                if down.query.is_none() {
                    return refuse(first, "queries without a latent of their own".to_owned());
                }
                let odd = down.width % 2 == 1 || down.heads.rank % 4 != 0;
                if odd || features != down.heads.turned {
                    return refuse(first, "latents of widths that are no whole pairs".to_owned());
                }
                false
            }
            Self::Compressed(of) => {
                if of.down.state.group as usize >= FIRST_POOLS {
                    let most = format!("the first {FIRST_POOLS} wanted");
                    return refuse(first, format!("keys of a window in a later group: {most}"));
                }
                of.known(features).or_else(|got| refuse(first, got))?;
                true
            }
        };
        if one_lane && program.dims.lanes > 1 {
            return refuse(first + 1, "lanes with sinks, gates or states".to_owned());
        }
        Ok(())
    }
}

enum Mlp<'a> {
    Dense {
        gate_up: &'a GateUp,
        down: &'a Project,
    },
    Experts {
        route: &'a Route,
        gate_up: &'a ExpertsGateUp,
        down: &'a ExpertsDown,
        /// Beside the chosen ones.
        shared: Option<(&'a GateUp, &'a Project)>,
    },
}

impl Mlp<'_> {
    /// The norm before it.
    fn norm(&self) -> Option<u32> {
        match self {
            Self::Dense { gate_up, .. } => gate_up.norm,
            Self::Experts { route, .. } => route.norm,
        }
    }

    /// Inner width, of one expert.
    fn ffn(&self) -> u32 {
        match self {
            Self::Dense { gate_up, .. } => gate_up.ffn,
            Self::Experts { gate_up, .. } => gate_up.ffn,
        }
    }

    fn experts(&self) -> Option<Experts> {
        let Self::Experts { route, gate_up, shared, .. } = self else { return None };
        let shared = shared.map(|(GateUp { ffn, scale, .. }, _)| SharedExpert {
            ffn: *ffn,
            ffn_all: *ffn,
            scaled: scale.is_some(),
        });
        Some(Experts {
            count: route.experts,
            chosen: route.chosen,
            scoring: route.scoring,
            correction: route.correction.is_some(),
            by_token: route.by_token.is_some(),
            groups: route.groups,
            factor: route.factor,
            gate: gate_up.gate,
            router_bias: route.bias.is_some(),
            bias: gate_up.biases.is_some(),
            shared,
        })
    }

    /// Refuses what there is no code for yet; `first` is its first step.
    fn known(&self, first: usize) -> Result<()> {
        if self.norm().is_none() {
            return refuse(first, "an mlp without a norm before it".to_owned());
        }
        match self {
            Self::Dense { down, .. } if down.bias.is_some() => {
                refuse(first + 1, "project with a bias, none wanted".to_owned())
            }
            Self::Dense { gate_up, .. } if gate_up.scale.is_some() => {
                refuse(first, "gate_up times a sigmoid, none wanted".to_owned())
            }
            Self::Dense { gate_up, .. } => match gate_up.gate {
                Gate::Silu => Ok(()),
                Gate::GeluTanh => refuse(first, "gate_up with a GELU, SiLU wanted".to_owned()),
                Gate::ClampedSwiglu { .. } => {
                    refuse(first, "gate_up with a clamped SwiGLU, SiLU wanted".to_owned())
                }
                Gate::ClampedSilu { .. } => {
                    refuse(first, "gate_up with a clamped SiLU, SiLU wanted".to_owned())
                }
            },
            Self::Experts { route, gate_up, down, shared } => {
                let (experts, chosen) = (route.experts, route.chosen);
                if experts > MOST_EXPERTS || chosen > MOST_CHOSEN.min(experts) {
                    let most = format!("{MOST_CHOSEN} of {MOST_EXPERTS} at most");
                    return refuse(first, format!("{chosen} of {experts} experts, {most}"));
                }
                if let Some(ExpertGroups { count, .. }) =
                    route.groups.filter(|g| g.count > MOST_GROUPS)
                {
                    return refuse(
                        first,
                        format!("{count} groups of experts, {MOST_GROUPS} at most"),
                    );
                }
                let by_scores = matches!(route.scoring, Scoring::SqrtSoftplus { .. });
                if route.by_token.is_some() && (!by_scores || route.groups.is_some()) {
                    return refuse(first, "a router by token that has no softplus".to_owned());
                }
                if gate_up.norm != route.norm {
                    return refuse(first, "the router and experts have norms of their own".into());
                }
                if let Some((of, down)) = shared {
                    let plain = matches!(down.join, Join::Sum | Join::Own { factor: 1.0 });
                    if of.norm != route.norm || of.gate != gate_up.gate || !plain {
                        let detail = "a shared expert with a norm, gate or sum of its own";
                        return refuse(first + 2, detail.to_owned());
                    }
                    if down.bias.is_some() || gate_up.biases.is_some() {
                        return refuse(first + 2, "a shared expert with biases".to_owned());
                    }
                }
                if gate_up.biases.is_some() != down.bias.is_some() {
                    return refuse(first + 2, "biases in some of the experts' products".into());
                }
                match gate_up.gate {
                    Gate::Silu | Gate::ClampedSwiglu { .. } | Gate::ClampedSilu { .. } => Ok(()),
                    Gate::GeluTanh => {
                        refuse(first + 1, "experts with a GELU, SiLU wanted".to_owned())
                    }
                }
            }
        }
    }
}

impl Phases<'_> {
    /// Refuses what a phase has no code for yet; `first` is the layer's first step.
    fn known(&self, program: &Program, first: usize) -> Result<()> {
        let Self { mixer, output, second, mlp, hyper } = self;
        mixer.known(program, first)?;
        if output.bias.is_some() && program.dims.lanes > 1 {
            return refuse(second - 1, "lanes with biases of attention's output".to_owned());
        }
        let streams = hyper.map_or(1, |[of, _]| of.streams);
        if streams > MOST_STREAMS {
            let most = format!("{MOST_STREAMS} at most");
            return refuse(first - 1, format!("{streams} residual streams, {most}"));
        }
        if hyper.is_some() && program.dims.lanes > 1 {
            return refuse(first - 1, "lanes with several residual streams".to_owned());
        }
        let compressed = matches!(mixer, Mixer::Compressed(_));
        if compressed != hyper.is_some() {
            let detail = "compressed attention with one residual stream, or other with several";
            return refuse(first, detail.to_owned());
        }
        mlp.known(*second)
    }
}

impl<'a> Steps<'a> {
    fn at_layer(&self) -> bool {
        let starts = |kind: &StepKind| match kind {
            StepKind::Qkv(_) | StepKind::DeltaIn(_) | StepKind::LatentDown(_) => true,
            StepKind::CompressedDown(_) => true,
            StepKind::HyperIn(take) => take.join.is_some(),
            _ => false,
        };
        self.program.steps.get(self.at).is_some_and(|step| starts(&step.kind))
    }

    fn next(&mut self) -> Result<&'a StepKind> {
        let Some(step) = self.program.steps.get(self.at) else {
            return refuse(self.at, "the end where the order of phases goes on".to_owned());
        };
        self.at += 1;
        Ok(&step.kind)
    }

    /// The step just taken is not the one that the order of known phases has here.
    fn refuse<T>(&self, wanted: &str) -> Result<T> {
        let got = self.program.steps[self.at - 1].kind.name();
        refuse(self.at - 1, format!("{got} where the order of known phases has {wanted}"))
    }

    fn project(&mut self) -> Result<&'a Project> {
        match self.next()? {
            StepKind::Project(project) => Ok(project),
            _ => self.refuse("project"),
        }
    }

    /// What a module takes of several residual streams.
    fn takes(&mut self) -> Option<&'a HyperIn> {
        let StepKind::HyperIn(take) = &self.program.steps.get(self.at)?.kind else { return None };
        self.at += 1;
        Some(take)
    }

    /// Where it takes from several, its output joins them.
    fn gives(&mut self, takes: Option<&HyperIn>) -> Result<()> {
        match takes {
            Some(_) if !matches!(self.next()?, StepKind::HyperOut(_)) => self.refuse("hyper_out"),
            Some(_) | None => Ok(()),
        }
    }

    /// What the head takes, and how many streams there are.
    fn head_takes(&mut self, layers: &[Layer]) -> Result<Option<Hyper>> {
        let Some(take) = self.takes() else { return Ok(None) };
        let before = self.program.steps[..self.at - 1].iter().rev();
        let mut joins = before.filter_map(|step| match &step.kind {
            StepKind::HyperIn(take) => take.join,
            _ => None,
        });
        let Some(join) = joins.next().filter(|_| !layers.is_empty()) else {
            return self.refuse("a layer of several residual streams");
        };
        let HyperIn { streams, eps, .. } = *take;
        Ok(Some(Hyper { streams, eps, rounds: join.rounds, head: HyperTensors::of(take) }))
    }

    /// The rest of attention over a window and entries.
    fn compressed(&mut self, down: &'a CompressedDown) -> Result<CompressedSteps<'a>> {
        let (mut compress, mut index) = ([None; 2], None);
        let query = loop {
            match self.next()? {
                StepKind::Compress(of) if compress[0].is_none() => compress[0] = Some(of),
                StepKind::Compress(of) if compress[1].is_none() => compress[1] = Some(of),
                StepKind::CompressedIndex(of) if compress[1].is_some() && index.is_none() => {
                    index = Some(of);
                }
                StepKind::CompressedQuery(query) if compress[1].is_some() == index.is_some() => {
                    break query;
                }
                _ => return self.refuse("compress, compressed_index or compressed_query"),
            }
        };
        let StepKind::CompressedAttend(attend) = self.next()? else {
            return self.refuse("compressed_attend");
        };
        let StepKind::GroupedDown(grouped) = self.next()? else {
            return self.refuse("grouped_down");
        };
        Ok(CompressedSteps { down, compress, index, query, attend, grouped })
    }

    fn layer(&mut self) -> Result<Phases<'a>> {
        let takes = self.takes();
        let mixer = match self.next()? {
            StepKind::Qkv(qkv) => {
                let StepKind::Attend(attend) = self.next()? else { return self.refuse("attend") };
                Mixer::Attention { qkv, attend }
            }
            StepKind::DeltaIn(input) => {
                let StepKind::DeltaRule(rule) = self.next()? else {
                    return self.refuse("delta_rule");
                };
                Mixer::Delta { input, rule }
            }
            StepKind::LatentDown(down) => {
                let StepKind::LatentQuery(query) = self.next()? else {
                    return self.refuse("latent_query");
                };
                let StepKind::LatentAttend(attend) = self.next()? else {
                    return self.refuse("latent_attend");
                };
                let StepKind::LatentUp(up) = self.next()? else { return self.refuse("latent_up") };
                Mixer::Latent { down, query, attend, up }
            }
            StepKind::CompressedDown(down) => Mixer::Compressed(self.compressed(down)?),
            _ => return self.refuse("qkv"),
        };
        let output = self.project()?;
        self.gives(takes)?;
        let takes_too = self.takes();
        let second = self.at;
        let mlp = match self.next()? {
            StepKind::GateUp(gate_up) => Mlp::Dense { gate_up, down: self.project()? },
            StepKind::Route(route) => {
                let StepKind::ExpertsGateUp(gate_up) = self.next()? else {
                    return self.refuse("experts_gate_up");
                };
                let (beside, down) = match self.next()? {
                    StepKind::GateUp(beside) => (Some(beside), self.next()?),
                    down => (None, down),
                };
                let StepKind::ExpertsDown(down) = down else {
                    return self.refuse("experts_down");
                };
                let shared = match beside {
                    Some(gate_up) => Some((gate_up, self.project()?)),
                    None => None,
                };
                Mlp::Experts { route, gate_up, down, shared }
            }
            _ => return self.refuse("gate_up or route"),
        };
        self.gives(takes_too)?;
        let hyper = match (takes, takes_too) {
            (Some(first), Some(second)) => Some([first, second]),
            (None, None) => None,
            _ => return self.refuse("hyper_in before attention and before the mlp"),
        };
        Ok(Phases { mixer, output, second, mlp, hyper })
    }
}

impl Class {
    fn read(program: &Program, phases: &Phases<'_>, ranks: u32) -> Result<Self> {
        let (ffn, experts) = (phases.mlp.ffn(), phases.mlp.experts());
        let whole = Self {
            heads: 0,
            kv_heads: 0,
            heads_all: [0, 0],
            head_dim: 0,
            still: 0,
            gated: false,
            delta: None,
            ffn,
            ffn_all: ffn,
            head_norm: None,
            bias: false,
            output_bias: phases.output.bias.is_some(),
            sinks: false,
            rope: phases.mixer.rotary().map_or(NONE, |rotary| rotary.table),
            latent: None,
            compressed: None,
            experts,
            predicts: false,
        };
        let whole = whole.with_mixer(program, &phases.mixer);
        let (query, kv, lanes) = (whole.heads, whole.kv_heads, program.dims.lanes);
        let whole = Self { heads_all: [query, kv], ..whole };
        if lanes > 1 || ranks == 1 {
            return Ok(whole);
        }
        if whole.head_norm == Some(NormSpan::AllHeads) {
            return Err(normed_over_all_heads(ranks));
        }
        let Some((heads, kv_heads)) = dealt(query, kv, ranks) else {
            return Err(indivisible(lanes, query, kv, ranks));
        };
        // Groups stay whole.
        let groups = whole.compressed.map_or(ranks, |of| of.groups);
        if !groups.is_multiple_of(ranks) {
            return Err(indivisible(lanes, query, kv, ranks));
        }
        let compressed = whole.compressed.map(|of| Compressed { groups: of.groups / ranks, ..of });
        // Whole units of an expert, whose groups of codes share scales.
        let share = |ffn: u32, unit| ffn.div_ceil(ranks).next_multiple_of(unit);
        let of_rank = |e: Experts| {
            let shared =
                e.shared.map(|shared| SharedExpert { ffn: share(shared.ffn, 32), ..shared });
            Experts { shared, ..e }
        };
        let ffn = share(ffn, if experts.is_some() { 32 } else { 1 });
        let experts = experts.map(of_rank);
        Ok(Self { heads, kv_heads, ffn, experts, compressed, ..whole })
    }

    /// The same with heads and what else it has of its mixer.
    fn with_mixer(self, program: &Program, mixer: &Mixer<'_>) -> Self {
        match mixer {
            Mixer::Attention { qkv, attend } => {
                let Heads { query, kv, dim } = qkv.heads;
                let table = program.tensors.get(qkv.rotary.table as usize);
                Self {
                    heads: query,
                    kv_heads: kv,
                    head_dim: dim,
                    still: dim - 2 * table.map_or(0, |t| t.cols),
                    gated: qkv.gates.is_some(),
                    head_norm: qkv.head_norms.map(|_| qkv.norm_span),
                    bias: qkv.biases.is_some(),
                    sinks: attend.sinks.is_some(),
                    rope: qkv.rotary.table,
                    ..self
                }
            }
            Mixer::Latent { down, attend, .. } => {
                let LatentHeads { count, rank, plain, turned, value } = down.heads;
                let (query_rank, eps, scale) = (down.width, down.eps, attend.scale);
                let latent = Some(Latent { query_rank, rank, plain, turned, eps, scale });
                Self { heads: count, kv_heads: 1, head_dim: value, latent, ..self }
            }
            Mixer::Compressed(of) => {
                let (heads, head_dim) = (of.down.heads.count, of.down.heads.dim);
                let compressed = Some(of.sizes());
                Self { heads, kv_heads: 1, head_dim, sinks: true, compressed, ..self }
            }
            Mixer::Delta { rule, .. } => {
                let DeltaHeads { keys, values, value_dim, .. } = rule.heads;
                let delta = Some(Delta::of(rule.heads));
                Self { heads: values, kv_heads: keys, head_dim: value_dim, delta, ..self }
            }
        }
    }
}

impl Mtp {
    fn read(program: &Program, of: &MtpIn, behind: u32, step: usize) -> Result<Self> {
        let norm = |tensor| Norm::read(program, tensor, 1, step);
        let [before, own] = of.end_norms;
        if own != behind {
            return refuse(step, "a norm behind drafts that is not their head's".to_owned());
        }
        Ok(Self { norms: [norm(of.embedding_norm)?, norm(of.hidden_norm)?, norm(before)?] })
    }
}

impl Norm {
    fn read(program: &Program, tensor: u32, lanes_all: u32, step: usize) -> Result<Self> {
        match program.tensors.get(tensor as usize).map(|t| t.rows) {
            Some(rows) if rows == 1 || rows == lanes_all => Ok(Self { tensor, rows }),
            Some(rows) => refuse(step, format!("a norm of {rows} rows for {lanes_all} lanes")),
            None => refuse(step, "a product without a norm".to_owned()),
        }
    }
}

impl Layer {
    fn read(
        program: &Program,
        phases: &Phases<'_>,
        class: usize,
        (lanes, sliced): (u32, bool),
        first: usize,
    ) -> Result<Self> {
        let Phases { mixer, output, second, mlp, hyper } = phases;
        let of = mixer.tensors(program, first)?;
        let (state, window) = mixer.state();
        // The lane's own factor, and the delay of the others.
        let join = |project: &Project| match project.join {
            Join::Sum => (1.0, 0),
            Join::Own { factor } => (factor, if sliced { 0 } else { -1 }),
            Join::Delayed { layers, .. } => (1.0, if sliced { 0 } else { layers as i32 }),
        };
        let shares = |p: &Project| sliced || p.keep.is_some() || p.join == Join::Sum;
        let mut extras = Extras {
            output_bias: output.bias.unwrap_or(NONE),
            sinks: of.sinks,
            delta: of.delta,
            ..Extras::default()
        };
        // Experts' outputs are summed at once.
        let (gate_up, down, of_down) = match mlp {
            Mlp::Dense { gate_up, down } => {
                (gate_up.weights, down.weight, (join(down), shares(down)))
            }
            Mlp::Experts { route, gate_up, down, shared } => {
                extras.router = route.weight;
                extras.router_bias = route.bias.unwrap_or(NONE);
                extras.correction = route.correction.unwrap_or(NONE);
                extras.token_experts = route.by_token.unwrap_or(NONE);
                if let Some((of, down)) = shared {
                    let [gate, up] = of.weights;
                    extras.shared = [gate, up, down.weight];
                    extras.shared_scale = of.scale.unwrap_or(NONE);
                }
                let [gate, up] = gate_up.biases.unwrap_or([NONE; 2]);
                extras.biases = [gate, up, down.bias.unwrap_or(NONE)];
                (gate_up.weights, down.weight, ((1.0, 0), true))
            }
        };
        let joins = [join(output), of_down.0];
        Ok(Self {
            class,
            qkv: of.qkv,
            biases: of.biases,
            head_norms: of.head_norms,
            outputs: [output.weight, down],
            gate_up,
            latent: of.latent,
            compressed: of.compressed,
            hyper: hyper.map_or([HyperTensors::NONE; 2], |of| of.map(HyperTensors::of)),
            extras,
            norms: [
                Norm::read(program, mixer.norm().unwrap_or(NONE), lanes, first)?,
                Norm::read(program, mlp.norm().unwrap_or(NONE), lanes, *second)?,
            ],
            window,
            pool: [state.group, state.layer],
            own: joins.map(|(own, _)| own),
            delay: joins.map(|(_, delay)| delay),
            shares: [shares(output), of_down.1],
        })
    }
}

/// Pools of pages that tables have room for.
fn pools(program: &Program) -> Result<u32> {
    let kept =
        |group: &&PageGroup| matches!(group.state, StateKind::Recurrent { .. }) && group.layers > 0;
    if program.groups.iter().filter(kept).count() > 1 {
        return refuse(1, "recurrent states of several shapes, one wanted".to_owned());
    }
    match program.groups.len() {
        // Tables have two rows also where one is empty.
        groups @ ..=MOST_POOLS => Ok(groups.max(2) as u32),
        groups => refuse(1, format!("{groups} page groups: {MOST_POOLS} at most")),
    }
}

fn refuse<T>(step: usize, detail: String) -> Result<T> {
    Err(Error::InvalidProgram { step, detail: format!("for the monokernel: {detail}") })
}
