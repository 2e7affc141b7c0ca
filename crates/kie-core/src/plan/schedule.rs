//! Spec → steps: the order of operations, and which vector each reads and writes. Pure: the same
//! spec gives the same steps.

use std::collections::HashMap;

use kie_kernels::abi::{
    Attend, Compress, CompressedAttend, CompressedDown, CompressedHeads, CompressedIndex,
    CompressedQuery, DeltaHeads, DeltaIn, DeltaRule, Dims, Embed, Entries, ExpertsDown,
    ExpertsGateUp, GateUp, GroupedDown, Head, HeadMode, Heads, HyperIn, HyperJoin, HyperOut, Join,
    LatentAttend, LatentDown, LatentHeads, LatentQuery, LatentUp, MtpIn, NormSpan, Project,
    ProjectNormed, Qkv, Rotary, Route, Sample, StateAt, Step, StepKind, Vector,
};

use super::state;
use crate::model::{
    self, Attention, Compressed, Delta, Experts, Gated, HeadKind, Latent, Mixer, Mlp, Role, Rope,
    RopeStyle, Spec,
};

/// What steps are made of. Lists are by layer.
pub(super) struct Planned<'a> {
    pub spec: &'a Spec,
    pub dims: &'a Dims,
    /// The program's tensors.
    pub tensors: &'a HashMap<Role, u32>,
    /// Places in the page groups.
    pub states: &'a [Vec<StateAt>],
    /// Rotary tables, as tensors.
    pub rotary: &'a [Option<u32>],
}

/// Steps and vectors of one pass.
pub(super) struct Schedule {
    pub steps: Vec<Step>,
    pub vectors: Vec<Vector>,
}

/// Which of a layer's two modules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Module {
    Mixer,
    Mlp,
}

/// What a vector is for. Layers of the same sizes use the same ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Use {
    Residual,
    Query(Heads),
    Attended(Heads),
    /// What attention's output is gated by.
    Gates(Heads),
    /// What a delta rule takes in, what gates its state, and what it puts out.
    DeltaIn(DeltaHeads),
    DeltaGates(DeltaHeads),
    DeltaOut(DeltaHeads),
    /// Latents of queries, so wide.
    Latent(u32),
    LatentQuery(LatentHeads),
    LatentAttended(LatentHeads),
    Values(LatentHeads),
    CompressedQuery(CompressedHeads),
    CompressedAttended(CompressedHeads),
    /// What groups of heads are projected to, so many numbers.
    Grouped(u32),
    /// Entries of a position, so many at most.
    Chosen(u32),
    /// All residual streams, so many; what a module adds to, and how they are mixed with it.
    Streams(u32),
    Sum,
    Mix(u32),
    Inner(u32),
    /// The same of an expert that all columns go to.
    Shared(u32),
    /// Ids and factors of so many experts.
    Choice(u32),
    Logits,
    /// A module's outputs that later layers add: the layer, modulo what is kept at a time.
    Kept(Module, usize),
}

struct Builder<'a> {
    planned: &'a Planned<'a>,
    vectors: Vec<Vector>,
    known: HashMap<Use, u32>,
    steps: Vec<Step>,
}

impl Builder<'_> {
    fn tensor(&self, role: Role) -> u32 {
        self.planned.tensors[&role]
    }

    fn vector(&mut self, what: Use) -> u32 {
        let d = self.planned.dims;
        let (lanes, width) = match what {
            Use::Residual | Use::Sum | Use::Kept(..) => (d.lanes, d.hidden),
            Use::Streams(streams) => (1, streams * d.hidden),
            Use::Mix(streams) => (1, streams * (1 + streams)),
            Use::CompressedQuery(heads) => (d.lanes, heads.width()),
            Use::CompressedAttended(heads) => (d.lanes * heads.groups, heads.group()),
            Use::Grouped(rows) => (d.lanes, rows),
            Use::Chosen(most) => (1, 1 + most),
            Use::Query(heads) | Use::Attended(heads) | Use::Gates(heads) => {
                (d.lanes, heads.query_width())
            }
            Use::DeltaIn(heads) => (d.lanes, heads.keys * heads.rows()),
            Use::DeltaGates(heads) => (d.lanes, 2 * heads.values),
            Use::DeltaOut(heads) => (d.lanes, heads.value_width()),
            Use::Latent(width) => (1, width),
            Use::LatentQuery(heads) | Use::LatentAttended(heads) => {
                (d.lanes, heads.count * heads.key())
            }
            Use::Values(heads) => (d.lanes, heads.count * heads.value),
            Use::Inner(ffn) | Use::Shared(ffn) => (d.lanes, ffn),
            Use::Choice(chosen) => (1, 2 * chosen),
            Use::Logits => (1, d.vocab),
        };
        *self.known.entry(what).or_insert_with(|| {
            self.vectors.push(Vector { lanes, width });
            self.vectors.len() as u32 - 1
        })
    }

    fn push(&mut self, layer: usize, kind: StepKind) {
        self.steps.push(Step { layer: layer as u16, kind });
    }

    fn attention(&mut self, layer: usize, attention: &Attention) {
        let lanes = self.planned.spec.lanes;
        let heads = Heads {
            query: (attention.heads / lanes) as u32,
            kv: (attention.kv_heads / lanes) as u32,
            dim: attention.head_dim as u32,
        };
        let residual = self.vector(Use::Residual);
        let (query, attended) = (self.vector(Use::Query(heads)), self.vector(Use::Attended(heads)));
        let gates = attention.gated.then(|| self.vector(Use::Gates(heads)));
        let biases = [Role::QBias(layer), Role::KBias(layer), Role::VBias(layer)];
        let head_norms = [Role::QNorm(layer), Role::KNorm(layer)];
        let state = self.planned.states[layer][0];
        let qkv = Qkv {
            norm: self.before(layer, Role::AttentionNorm(layer)),
            weights: [Role::Q(layer), Role::K(layer), Role::V(layer)].map(|r| self.tensor(r)),
            biases: attention.qkv_bias.then(|| biases.map(|role| self.tensor(role))),
            head_norms: attention.qk_norm.map(|_| head_norms.map(|role| self.tensor(role))),
            norm_span: attention.qk_norm.unwrap_or(NormSpan::Head),
            rotary: self.rotary(layer, &attention.rope),
            heads,
            input: residual,
            output: query,
            gates,
            state,
            partition: 0,
        };
        self.push(layer, StepKind::Qkv(qkv));
        let window = attention.window.map(|window| window as u32);
        let sinks = attention.sinks.then(|| self.tensor(Role::Sinks(layer)));
        let (input, output) = (query, attended);
        let attend = Attend { heads, input, gates, output, state, window, sinks };
        self.push(layer, StepKind::Attend(attend));
        let bias = attention.out_bias.then(|| self.tensor(Role::OBias(layer)));
        self.project(layer, (Role::O(layer), bias), attended, Module::Mixer);
    }

    fn delta(&mut self, layer: usize, delta: &Delta) {
        let heads = state::delta_heads(delta, self.planned.dims.lanes);
        let inputs = [Use::DeltaIn(heads), Use::DeltaGates(heads)].map(|what| self.vector(what));
        let delta_in = DeltaIn {
            norm: self.before(layer, Role::AttentionNorm(layer)),
            weights: [Role::DeltaIn(layer), Role::DeltaGates(layer)].map(|role| self.tensor(role)),
            heads,
            input: self.vector(Use::Residual),
            outputs: inputs,
            partition: 0,
        };
        let rule = DeltaRule {
            heads,
            conv: self.tensor(Role::DeltaConv(layer)),
            decay: self.tensor(Role::DeltaDecay(layer)),
            bias: self.tensor(Role::DeltaBias(layer)),
            norm: self.tensor(Role::DeltaNorm(layer)),
            inputs,
            output: self.vector(Use::DeltaOut(heads)),
            state: self.planned.states[layer][0],
        };
        self.push(layer, StepKind::DeltaIn(delta_in));
        self.push(layer, StepKind::DeltaRule(rule));
        self.project(layer, (Role::O(layer), None), rule.output, Module::Mixer);
    }

    /// How a layer turns.
    fn rotary(&self, layer: usize, rope: &Rope) -> Rotary {
        let interleaved = rope.style == RopeStyle::Interleaved;
        let table = self.planned.rotary[layer].expect("attention has a table");
        Rotary { table, interleaved }
    }

    /// Latent attention; a model of it has one lane.
    fn latent(&mut self, layer: usize, latent: &Latent) {
        let &Latent { heads, rank, plain, turned, value, query_rank, eps, ref rope } = latent;
        let [count, rank, plain, turned, value] =
            [heads, rank, plain, turned, value].map(|size| size as u32);
        let heads = LatentHeads { count, rank, plain, turned, value };
        let (rotary, state) = (self.rotary(layer, rope), self.planned.states[layer][0]);
        let width = query_rank.unwrap_or(self.planned.spec.hidden) as u32;
        let query = [Role::QDown(layer), Role::QDownNorm(layer)];
        let down = LatentDown {
            norm: self.before(layer, Role::AttentionNorm(layer)),
            query: query_rank.map(|_| query.map(|role| self.tensor(role))),
            width,
            weight: self.tensor(Role::KvDown(layer)),
            scale: self.tensor(Role::KvDownNorm(layer)),
            eps,
            rotary,
            heads,
            input: self.vector(Use::Residual),
            output: self.vector(Use::Latent(width)),
            state,
            partition: 0,
        };
        let query = LatentQuery {
            weight: self.tensor(Role::Q(layer)),
            up: self.tensor(Role::KvUp(layer)),
            rotary,
            heads,
            input: down.output,
            output: self.vector(Use::LatentQuery(heads)),
            partition: 0,
        };
        let attend = LatentAttend {
            heads,
            scale: latent.scale(),
            input: query.output,
            output: self.vector(Use::LatentAttended(heads)),
            state,
        };
        let up = LatentUp {
            weight: query.up,
            heads,
            input: attend.output,
            output: self.vector(Use::Values(heads)),
            partition: 0,
        };
        self.push(layer, StepKind::LatentDown(down));
        self.push(layer, StepKind::LatentQuery(query));
        self.push(layer, StepKind::LatentAttend(attend));
        self.push(layer, StepKind::LatentUp(up));
        self.project(layer, (Role::O(layer), None), up.output, Module::Mixer);
    }

    /// Attention over a window and entries; a model of it has one lane.
    fn compressed(&mut self, layer: usize, of: &Compressed) {
        let heads = CompressedHeads {
            count: of.heads as u32,
            dim: of.dim as u32,
            turned: of.turned as u32,
            groups: of.groups as u32,
        };
        let (rotary, state) = (self.rotary(layer, &of.rope), self.planned.states[layer][0]);
        let rank = of.query_rank as u32;
        let down = CompressedDown {
            norm: self.before(layer, Role::AttentionNorm(layer)),
            weights: [Role::QDown(layer), Role::KvDown(layer)].map(|role| self.tensor(role)),
            scales: [Role::QDownNorm(layer), Role::KvDownNorm(layer)].map(|r| self.tensor(r)),
            rotary,
            rank,
            heads,
            input: self.vector(Use::Residual),
            output: self.vector(Use::Latent(rank)),
            state,
            partition: 0,
        };
        self.push(layer, StepKind::CompressedDown(down));
        let entries = of.entries.as_ref().map(|entries| self.entries(layer, of, entries, down));
        let query = CompressedQuery {
            weight: self.tensor(Role::Q(layer)),
            rotary,
            heads,
            input: down.output,
            output: self.vector(Use::CompressedQuery(heads)),
            partition: 0,
        };
        let attend = CompressedAttend {
            rotary,
            heads,
            sinks: self.tensor(Role::Sinks(layer)),
            window: of.window as u32,
            input: query.output,
            output: self.vector(Use::CompressedAttended(heads)),
            state,
            entries,
        };
        let grouped = GroupedDown {
            weight: self.tensor(Role::GroupDown(layer)),
            groups: heads.groups,
            rank: of.group_rank as u32,
            input: attend.output,
            output: self.vector(Use::Grouped(of.group_rows() as u32)),
            partition: 0,
        };
        self.push(layer, StepKind::CompressedQuery(query));
        self.push(layer, StepKind::CompressedAttend(attend));
        self.push(layer, StepKind::GroupedDown(grouped));
        self.project(layer, (Role::O(layer), None), grouped.output, Module::Mixer);
    }

    /// Entries of what lies behind the window, and which of them a position sees.
    fn entries(
        &mut self,
        layer: usize,
        of: &Compressed,
        entries: &model::Entries,
        down: CompressedDown,
    ) -> Entries {
        let CompressedDown { norm, rotary, input, .. } = down;
        let (states, every) = (&self.planned.states[layer], entries.every as u32);
        let compress = |weights: [Role; 4], dim: usize, first: u32, kept: StateAt| {
            let [values, scores, bias, scale] = weights.map(|role| self.tensor(role));
            Compress {
                norm,
                weights: [values, scores],
                bias,
                scale,
                rotary,
                dim: dim as u32,
                turned: down.heads.turned,
                every,
                overlap: entries.overlap,
                input,
                sums: states[1],
                first,
                entries: kept,
                partition: 0,
            }
        };
        let roles = [Role::EntryValues, Role::EntryScores, Role::EntryBias, Role::EntryNorm];
        let main = compress(roles.map(|role| role(layer)), of.dim, 0, states[2]);
        let keys = entries.index.map(|index| {
            let roles = [Role::IndexValues, Role::IndexScores, Role::IndexBias, Role::IndexNorm];
            let roles = roles.map(|role| role(layer));
            (index, compress(roles, index.dim, main.kept(), states[3]))
        });
        self.push(layer, StepKind::Compress(main));
        let choice = keys.map(|(of, keys)| {
            let chosen = of.chosen as u32;
            let index = CompressedIndex {
                norm,
                weights: [Role::IndexQuery(layer), Role::IndexWeights(layer)]
                    .map(|role| self.tensor(role)),
                rotary,
                heads: of.heads as u32,
                dim: keys.dim,
                turned: keys.turned,
                chosen,
                every,
                input,
                latent: down.output,
                keys: keys.entries,
                output: self.vector(Use::Chosen(chosen)),
                partition: 0,
            };
            self.push(layer, StepKind::Compress(keys));
            self.push(layer, StepKind::CompressedIndex(index));
            index.output
        });
        Entries { state: main.entries, every, choice }
    }

    /// What a module takes of several residual streams; the head, which adds nothing, is behind
    /// all of them.
    fn take_streams(&mut self, layer: usize, module: usize) {
        let Some(hyper) = self.planned.spec.hyper else { return };
        let streams = hyper.streams as u32;
        let joins = module < 2 * self.planned.spec.layers.len();
        let join = joins.then(|| HyperJoin {
            rounds: hyper.rounds as u32,
            mix: self.vector(Use::Mix(streams)),
            sum: self.vector(Use::Sum),
        });
        let take = HyperIn {
            weight: self.tensor(Role::HyperWeight(module)),
            scale: self.tensor(Role::HyperScale(module)),
            base: self.tensor(Role::HyperBase(module)),
            streams,
            eps: hyper.eps,
            input: self.vector(Use::Streams(streams)),
            output: self.vector(Use::Residual),
            join,
            partition: 0,
        };
        self.push(layer, StepKind::HyperIn(take));
    }

    /// What a module put out joins several residual streams.
    fn give_streams(&mut self, layer: usize) {
        let Some(hyper) = self.planned.spec.hyper else { return };
        let streams = hyper.streams as u32;
        let give = HyperOut {
            streams,
            mix: self.vector(Use::Mix(streams)),
            input: self.vector(Use::Sum),
            residual: self.vector(Use::Streams(streams)),
            partition: 0,
        };
        self.push(layer, StepKind::HyperOut(give));
    }

    /// What modules add their outputs to.
    fn joined(&mut self) -> u32 {
        let several = self.planned.spec.hyper.is_some();
        self.vector(if several { Use::Sum } else { Use::Residual })
    }

    /// The norm of a module's input, where the layer has one there.
    fn before(&self, layer: usize, role: Role) -> Option<u32> {
        self.planned.spec.layers[layer].norms.before().then(|| self.tensor(role))
    }

    fn mixer(&mut self, layer: usize, mixer: &Mixer) {
        match mixer {
            Mixer::Attention(attention) => self.attention(layer, attention),
            Mixer::Delta(delta) => self.delta(layer, delta),
            Mixer::Latent(latent) => self.latent(layer, latent),
            Mixer::Compressed(compressed) => self.compressed(layer, compressed),
        }
    }

    fn mlp(&mut self, layer: usize, mlp: &Mlp) {
        match mlp {
            Mlp::Gated(gated) => self.gated(layer, gated),
            Mlp::Experts(experts) => self.experts(layer, experts),
        }
    }

    /// What a layer that predicts further tokens takes in.
    fn mtp_in(&mut self, layer: usize) {
        let residual = self.vector(Use::Residual);
        let mtp = MtpIn {
            table: self.tensor(Role::Embedding),
            embedding_norm: self.tensor(Role::MtpEmbeddingNorm),
            hidden_norm: self.tensor(Role::MtpHiddenNorm),
            end_norms: [Role::FinalNorm, Role::MtpNorm].map(|role| self.tensor(role)),
            weight: self.tensor(Role::MtpIn),
            input: residual,
            output: residual,
            partition: 0,
        };
        self.push(layer, StepKind::MtpIn(mtp));
    }

    /// Logits behind the last layer, and what is chosen by them.
    fn head(&mut self, layer: usize, norm: Role) {
        let (norm, weight) = (self.tensor(norm), self.tensor(Role::Head));
        let (input, output) = (self.vector(Use::Residual), self.vector(Use::Logits));
        let (mode, partition) = (head_mode(self.planned.spec.head), 0);
        let head = Head { norm, weight, mode, input, output, partition };
        self.push(layer, StepKind::Head(head));
        self.push(layer, StepKind::Sample(Sample { input: output }));
    }

    fn gated(&mut self, layer: usize, gated: &Gated) {
        let weights = [Role::Gate(layer), Role::Up(layer)];
        let inner = self.gate_up(layer, gated, weights, None, Use::Inner);
        self.project(layer, (Role::Down(layer), None), inner, Module::Mlp);
    }

    /// Gate and up of an MLP that all columns go to; where they put out.
    fn gate_up(
        &mut self,
        layer: usize,
        &Gated { ffn, gate }: &Gated,
        weights: [Role; 2],
        scale: Option<Role>,
        output: fn(u32) -> Use,
    ) -> u32 {
        let ffn = (ffn / self.planned.spec.lanes) as u32;
        let gate_up = GateUp {
            norm: self.before(layer, Role::MlpNorm(layer)),
            weights: weights.map(|role| self.tensor(role)),
            gate,
            scale: scale.map(|role| self.tensor(role)),
            ffn,
            input: self.vector(Use::Residual),
            output: self.vector(output(ffn)),
            partition: 0,
        };
        self.push(layer, StepKind::GateUp(gate_up));
        gate_up.output
    }

    /// The router, then the chosen experts, whose sum joins the residual streams; a shared one
    /// beside them, which reads what they read.
    fn experts(&mut self, layer: usize, of: &Experts) {
        let [experts, chosen, ffn] = [of.count, of.chosen, of.each.ffn].map(|size| size as u32);
        let (input, choice) = (self.vector(Use::Residual), self.vector(Use::Choice(chosen)));
        let norm = self.before(layer, Role::MlpNorm(layer));
        let bias = |role: Role| of.bias.then(|| self.tensor(role));
        let route = Route {
            norm,
            weight: self.tensor(Role::Router(layer)),
            bias: bias(Role::RouterBias(layer)),
            scoring: of.scoring,
            correction: of.correction.then(|| self.tensor(Role::RouterCorrection(layer))),
            by_token: of.by_token.then(|| self.tensor(Role::TokenExperts(layer))),
            groups: of.groups,
            factor: of.factor,
            experts,
            chosen,
            input,
            output: choice,
            partition: 0,
        };
        let biases = [Role::ExpertGateBias(layer), Role::ExpertUpBias(layer)];
        let biases = of.bias.then(|| biases.map(|role| self.tensor(role)));
        let down_bias = bias(Role::ExpertDownBias(layer));
        let gate_up = ExpertsGateUp {
            norm,
            weights: [Role::ExpertGate(layer), Role::ExpertUp(layer)].map(|r| self.tensor(r)),
            biases,
            gate: of.each.gate,
            ffn,
            experts,
            chosen,
            input,
            choice,
            output: self.vector(Use::Inner(chosen * ffn)),
            partition: 0,
        };
        let down = ExpertsDown {
            weight: self.tensor(Role::ExpertDown(layer)),
            bias: down_bias,
            ffn,
            experts,
            chosen,
            input: gate_up.output,
            choice,
            residual: self.joined(),
            partition: 0,
        };
        self.push(layer, StepKind::Route(route));
        self.push(layer, StepKind::ExpertsGateUp(gate_up));
        let shared = of.shared.map(|shared| {
            let weights = [Role::SharedGate(layer), Role::SharedUp(layer)];
            let scale = shared.scaled.then_some(Role::SharedScale(layer));
            self.gate_up(layer, &shared.each, weights, scale, Use::Shared)
        });
        self.push(layer, StepKind::ExpertsDown(down));
        if let Some(shared) = shared {
            self.project(layer, (Role::SharedDown(layer), None), shared, Module::Mlp);
        }
    }

    /// Layers between a module's output and where others' streams add it; 0 where none do later.
    fn delay(&self, layer: usize, module: Module) -> usize {
        let layer = &self.planned.spec.layers[layer];
        let join = match module {
            Module::Mixer => layer.mixer_join,
            Module::Mlp => layer.mlp_join,
        };
        match join {
            model::Join::Sum | model::Join::Own { .. } => 0,
            model::Join::Delayed { layers } => layers,
        }
    }

    /// The vector that keeps a layer's output. One more is in use than the delay: a layer is read
    /// while a newer one is written.
    fn kept(&mut self, layer: usize, module: Module) -> u32 {
        let layers = 0..self.planned.spec.layers.len();
        let longest = layers.map(|layer| self.delay(layer, module)).max().unwrap_or(0);
        self.vector(Use::Kept(module, layer % (longest + 1)))
    }

    fn project(
        &mut self,
        layer: usize,
        (role, bias): (Role, Option<u32>),
        input: u32,
        module: Module,
    ) {
        let spec = self.planned.spec;
        if spec.layers[layer].norms.behind() {
            let norm = match module {
                Module::Mixer => Role::AttentionOutNorm(layer),
                Module::Mlp => Role::MlpOutNorm(layer),
            };
            let (weight, norm) = (self.tensor(role), self.tensor(norm));
            let residual = self.joined();
            let project = ProjectNormed { weight, norm, input, residual, partition: 0 };
            return self.push(layer, StepKind::ProjectNormed(project));
        }
        let join = match module {
            Module::Mixer => spec.layers[layer].mixer_join,
            Module::Mlp => spec.layers[layer].mlp_join,
        };
        let join = match join {
            model::Join::Sum => Join::Sum,
            model::Join::Own { factor } => Join::Own { factor },
            model::Join::Delayed { layers } => {
                Join::Delayed { layers: layers as u32, from: self.kept(layer - layers, module) }
            }
        };
        let wanted = (layer + 1..spec.layers.len()).any(|later| {
            let delay = self.delay(later, module);
            delay > 0 && later - delay == layer
        });
        let keep = wanted.then(|| self.kept(layer, module));
        let (weight, residual) = (self.tensor(role), self.joined());
        let project = Project { weight, bias, input, residual, join, keep, partition: 0 };
        self.push(layer, StepKind::Project(project));
    }
}

/// The steps of a model on one device; their partitions are filled in afterwards.
pub(super) fn schedule(planned: &Planned<'_>) -> Schedule {
    let (vectors, known, steps) = (Vec::new(), HashMap::new(), Vec::new());
    let mut b = Builder { planned, vectors, known, steps };
    let spec = planned.spec;
    let (table, residual) = (b.tensor(Role::Embedding), b.vector(Use::Residual));
    let output = match spec.hyper {
        Some(hyper) => b.vector(Use::Streams(hyper.streams as u32)),
        None => residual,
    };
    b.push(0, StepKind::Embed(Embed { table, factor: spec.embedding_factor, output }));
    let layers = spec.model_layers().len();
    for (at, layer) in spec.model_layers().iter().enumerate() {
        b.take_streams(at, 2 * at);
        b.mixer(at, &layer.mixer);
        b.give_streams(at);
        b.take_streams(at, 2 * at + 1);
        b.mlp(at, &layer.mlp);
        b.give_streams(at);
    }
    b.take_streams(layers, 2 * layers);
    b.head(layers, Role::FinalNorm);
    if let Some(layer) = spec.layers.get(layers) {
        b.mtp_in(layers);
        b.mixer(layers, &layer.mixer);
        b.mlp(layers, &layer.mlp);
        b.head(layers + 1, Role::MtpNorm);
    }
    Schedule { steps: b.steps, vectors: b.vectors }
}

/// The head's mode in the program.
fn head_mode(kind: HeadKind) -> HeadMode {
    match kind {
        HeadKind::Replicate => HeadMode::Mean,
        HeadKind::SumThenNorm => HeadMode::SumThenNorm,
        HeadKind::VocabParallel => HeadMode::PerLane,
        HeadKind::Concat => HeadMode::Concat,
    }
}
