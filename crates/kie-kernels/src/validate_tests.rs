//! A small program that holds, and ways in which it does not.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use super::*;
use crate::abi::{
    Codes, Compress, CompressedAttend, CompressedDown, CompressedHeads, CompressedIndex,
    CompressedQuery, Dims, Encoding, Entries, Gate, GroupedDown, HyperIn, HyperJoin, HyperOut,
    Layout, Rotary, Sample, Scoring, Vector,
};
use crate::partition::partition_rows;

const HIDDEN: u32 = 8;
const VOCAB: u32 = 10;
const LANES: u32 = 2;
const HEADS: [Heads; 2] = [Heads { query: 2, kv: 1, dim: 4 }, Heads { query: 1, kv: 1, dim: 6 }];

/// Two layers of other sizes, the second windowed and with the first one's outputs delayed.
struct Made {
    program: Program,
    bytes: u64,
}

impl Made {
    fn tensor(&mut self, lanes: u32, rows: u32, cols: u32) -> u32 {
        let tensor = Tensor {
            buffer: 0,
            encoding: Encoding::plain(Codes::F32),
            layout: Layout::RowMajor,
            lanes,
            rows,
            cols,
            row_step: 1,
            scale_buffer: 0,
            offset: self.bytes,
            scale_offset: 0,
            zero_offset: 0,
        };
        self.bytes += tensor.bytes();
        self.program.tensors.push(tensor);
        self.program.tensors.len() as u32 - 1
    }

    fn vector(&mut self, lanes: u32, width: u32) -> u32 {
        self.program.vectors.push(Vector { lanes, width });
        self.program.vectors.len() as u32 - 1
    }

    fn push(&mut self, layer: u16, kind: StepKind) {
        self.program.steps.push(Step { layer, kind });
    }

    fn layer(&mut self, layer: u16, kept: [u32; 2]) {
        let (heads, state) = (HEADS[layer as usize], StateAt { group: layer.into(), layer: 0 });
        let (q, kv, ffn) = (heads.query_width(), heads.kv_width(), 3 + u32::from(layer));
        let (query, attended) = (self.vector(LANES, q), self.vector(LANES, q));
        let inner = self.vector(LANES, ffn);
        let (keep, join) = match layer {
            0 => (kept.map(Some), [Join::Own { factor: 1.5 }, Join::Sum]),
            _ => ([None; 2], kept.map(|from| Join::Delayed { layers: 1, from })),
        };
        let qkv = Qkv {
            norm: Some(self.tensor(1, 1 + u32::from(layer), HIDDEN)),
            weights: [q, kv, kv].map(|rows| self.tensor(LANES, rows, HIDDEN)),
            biases: (layer == 1).then(|| [q, kv, kv].map(|rows| self.tensor(1, LANES, rows))),
            head_norms: (layer == 0).then(|| [self.tensor(1, 1, 4), self.tensor(1, 1, 4)]),
            norm_span: NormSpan::Head,
            rotary: Rotary { table: self.tensor(1, 2, heads.dim / 2), interleaved: false },
            heads,
            input: 0,
            output: query,
            gates: None,
            state,
            partition: 0,
        };
        self.push(layer, StepKind::Qkv(qkv));
        let window = (layer == 1).then_some(5);
        let (input, output, gates, sinks) = (query, attended, None, None);
        let attend = Attend { heads, input, gates, output, state, window, sinks };
        self.push(layer, StepKind::Attend(attend));
        let weight = self.tensor(LANES, HIDDEN, q);
        let project = |weight, input, at: usize| {
            let (join, keep) = (join[at], keep[at]);
            let (bias, residual, partition) = (None, 0, 0);
            StepKind::Project(Project { weight, bias, input, residual, join, keep, partition })
        };
        self.push(layer, project(weight, attended, 0));
        let gate_up = GateUp {
            norm: Some(self.tensor(1, 1, HIDDEN)),
            gate: Gate::Silu,
            scale: Some(self.tensor(1, 1, HIDDEN)),
            weights: [(); 2].map(|()| self.tensor(LANES, ffn, HIDDEN)),
            ffn,
            input: 0,
            output: inner,
            partition: 0,
        };
        self.push(layer, StepKind::GateUp(gate_up));
        let weight = self.tensor(LANES, HIDDEN, ffn);
        self.push(layer, project(weight, inner, 1));
    }

    fn new() -> Self {
        let dims = Dims {
            hidden: HIDDEN,
            lanes: LANES,
            vocab: VOCAB,
            eps: 1e-5,
            max_positions: 128,
            slots: 1,
            columns: 5,
        };
        let group = |(layer, heads): (usize, Heads)| PageGroup {
            state: StateKind::KeysValues {
                dtype: Dtype::F32,
                lanes: LANES,
                kv_heads: heads.kv,
                head_dim: heads.dim,
            },
            layers: 1,
            window: (layer == 1).then_some(5),
            pages: 2,
        };
        let program = Program {
            dims,
            blocks: 3,
            steps: vec![],
            tensors: vec![],
            vectors: vec![],
            groups: HEADS.into_iter().enumerate().map(group).collect(),
            row_partition: vec![],
        };
        let mut made = Self { program, bytes: 0 };
        let residual = made.vector(LANES, HIDDEN);
        let kept = [made.vector(LANES, HIDDEN), made.vector(LANES, HIDDEN)];
        let logits = made.vector(1, VOCAB);
        let table = made.tensor(1, VOCAB, HIDDEN);
        made.push(0, StepKind::Embed(Embed { table, factor: 1.0, output: residual }));
        made.layer(0, kept);
        made.layer(1, kept);
        let head = Head {
            norm: made.tensor(1, 1, HIDDEN),
            weight: table,
            mode: HeadMode::Mean,
            input: residual,
            output: logits,
            partition: 0,
        };
        made.push(2, StepKind::Head(head));
        made.push(2, StepKind::Sample(Sample { input: logits }));
        let Program { steps, dims, blocks, .. } = &mut made.program;
        made.program.row_partition = partition_rows(steps, dims, *blocks);
        made
    }

    fn check(self) -> Result<ValidProgram> {
        validate(self.program, &[Buffer::in_place(Arc::new(vec![0_u8; self.bytes as usize]))])
    }
}

impl Made {
    /// The second layer's mlp is 5 experts, of which 2 are chosen; the bias of its attention's
    /// output joins by a sum.
    fn with_experts() -> Self {
        let mut made = Self::new();
        let (experts, chosen, ffn) = (5, 2, 6);
        let choice = made.vector(1, 2 * chosen);
        let inner = made.vector(LANES, chosen * ffn);
        let bank = |made: &mut Self, rows, cols| {
            let all: Vec<u32> = (0..experts).map(|_| made.tensor(LANES, rows, cols)).collect();
            all[0]
        };
        let route = Route {
            norm: Some(made.tensor(1, 1, HIDDEN)),
            weight: made.tensor(1, experts, HIDDEN),
            bias: Some(made.tensor(1, 1, experts)),
            scoring: Scoring::Sigmoid { normed: true },
            correction: Some(made.tensor(1, 1, experts)),
            by_token: None,
            groups: Some(ExpertGroups { count: experts, chosen }),
            factor: 1.0,
            experts,
            chosen,
            input: 0,
            output: choice,
            partition: 0,
        };
        let gate_up = ExpertsGateUp {
            norm: route.norm,
            weights: [bank(&mut made, ffn, HIDDEN), bank(&mut made, ffn, HIDDEN)],
            biases: Some([(); 2].map(|()| made.tensor(1, experts * LANES * ffn, 1))),
            gate: Gate::ClampedSwiglu { alpha: 1.702, limit: 7.0 },
            ffn,
            experts,
            chosen,
            input: 0,
            choice,
            output: inner,
            partition: 0,
        };
        let down = ExpertsDown {
            weight: bank(&mut made, HIDDEN, ffn),
            bias: Some(made.tensor(1, experts, HIDDEN)),
            ffn,
            experts,
            chosen,
            input: inner,
            choice,
            residual: 0,
            partition: 0,
        };
        let sinks = made.tensor(1, LANES, HEADS[1].query);
        let bias = made.tensor(1, 1, HIDDEN);
        attend(&mut made.program, 1).sinks = Some(sinks);
        let output = project(&mut made.program, 8);
        (output.bias, output.join) = (Some(bias), Join::Sum);
        let kinds =
            [StepKind::Route(route), StepKind::ExpertsGateUp(gate_up), StepKind::ExpertsDown(down)];
        let steps = kinds.map(|kind| Step { layer: 1, kind });
        made.program.steps.splice(9..11, steps);
        let Program { steps, dims, blocks, .. } = &mut made.program;
        made.program.row_partition = partition_rows(steps, dims, *blocks);
        made
    }
}

/// Key heads that share value heads unevenly in every size.
const DELTA: DeltaHeads = DeltaHeads { keys: 2, values: 6, key_dim: 3, value_dim: 5, taps: 4 };

impl Made {
    /// A gated delta rule behind the embeddings, in a page group of its own.
    fn with_delta() -> Self {
        let mut made = Self::new();
        let state = StateKind::Recurrent { lanes: LANES, heads: DELTA };
        made.program.groups.push(PageGroup { state, layers: 1, window: Some(2), pages: 2 });
        let rows = [DELTA.keys * DELTA.rows(), 2 * DELTA.values];
        let delta = DeltaIn {
            norm: Some(made.tensor(1, 1, HIDDEN)),
            weights: rows.map(|rows| made.tensor(LANES, rows, HIDDEN)),
            heads: DELTA,
            input: 0,
            outputs: rows.map(|rows| made.vector(LANES, rows)),
            partition: 0,
        };
        let rule = DeltaRule {
            heads: DELTA,
            conv: made.tensor(1, LANES * DELTA.keys * DELTA.channels(), DELTA.taps),
            decay: made.tensor(1, 1, LANES * DELTA.values),
            bias: made.tensor(1, 1, LANES * DELTA.values),
            norm: made.tensor(1, 1, DELTA.value_dim),
            inputs: delta.outputs,
            output: made.vector(LANES, DELTA.value_width()),
            state: StateAt { group: 2, layer: 0 },
        };
        let kinds = [StepKind::DeltaIn(delta), StepKind::DeltaRule(rule)];
        made.program.steps.splice(1..1, kinds.map(|kind| Step { layer: 0, kind }));
        let Program { steps, dims, blocks, .. } = &mut made.program;
        made.program.row_partition = partition_rows(steps, dims, *blocks);
        made
    }
}

fn delta_in(program: &mut Program) -> &mut DeltaIn {
    match &mut program.steps[1].kind {
        StepKind::DeltaIn(delta) => delta,
        other => panic!("{other:?}"),
    }
}

fn delta_rule(program: &mut Program) -> &mut DeltaRule {
    match &mut program.steps[2].kind {
        StepKind::DeltaRule(delta) => delta,
        other => panic!("{other:?}"),
    }
}

#[test]
fn delta_rules() {
    Made::with_delta().check().unwrap();
    let cases: &[(usize, &str, Spoil)] = &[
        (WHOLE, "page group", |p| p.groups[2].window = None),
        (WHOLE, "page group", |p| p.groups[2].window = Some(3)),
        (WHOLE, "page group", |p| {
            let StateKind::Recurrent { heads, .. } = &mut p.groups[2].state else { return };
            heads.taps = 1;
        }),
        (1, "heads of a delta rule", |p| delta_in(p).heads.values = 5),
        (1, "heads of a delta rule", |p| delta_in(p).heads.keys = 0),
        (1, "wanted, got", |p| delta_in(p).heads.value_dim = 6),
        (1, "vector", |p| delta_in(p).outputs[1] = 0),
        (1, "does not cover", |p| delta_in(p).partition += 1),
        (2, "taps", |p| delta_rule(p).conv = 0),
        (2, "decay", |p| delta_rule(p).decay = 0),
        (2, "bias", |p| delta_rule(p).bias = 0),
        (2, "norm of heads", |p| delta_rule(p).norm = 0),
        (2, "vector", |p| delta_rule(p).inputs.swap(0, 1)),
        (2, "keeps KeysValues", |p| delta_rule(p).state.group = 0),
        (2, "does not exist", |p| delta_rule(p).state.layer = 1),
        (3, "keeps no keys and values", |p| {
            let StepKind::Qkv(qkv) = &mut p.steps[3].kind else { return };
            qkv.state.group = 2;
        }),
        (3, "is another layer's", |p| {
            let first = p.steps[2];
            p.steps.insert(3, first);
        }),
    ];
    for (wanted, said, spoil) in cases {
        let mut made = Made::with_delta();
        spoil(&mut made.program);
        let Err(Error::InvalidProgram { step, detail }) = made.check() else {
            panic!("{said} was let in")
        };
        assert_eq!(step, *wanted, "{said}: {detail}");
        assert!(detail.contains(said), "{said:?} in {detail:?}");
    }
}

fn route(program: &mut Program) -> &mut Route {
    match &mut program.steps[9].kind {
        StepKind::Route(route) => route,
        other => panic!("{other:?}"),
    }
}

fn experts_gate_up(program: &mut Program) -> &mut ExpertsGateUp {
    match &mut program.steps[10].kind {
        StepKind::ExpertsGateUp(experts) => experts,
        other => panic!("{other:?}"),
    }
}

fn experts_down(program: &mut Program) -> &mut ExpertsDown {
    match &mut program.steps[11].kind {
        StepKind::ExpertsDown(experts) => experts,
        other => panic!("{other:?}"),
    }
}

#[test]
fn experts() {
    Made::with_experts().check().unwrap();
    let cases: &[(usize, &str, Spoil)] = &[
        (7, "sinks 0: 2 numbers wanted", |p| attend(p, 1).sinks = Some(0)),
        (8, "a bias of what joins by Own", |p| project(p, 8).join = Join::Own { factor: 1.0 }),
        (8, "bias 0: 8 numbers wanted", |p| project(p, 8).bias = Some(0)),
        (9, "6 of 5 experts", |p| route(p).chosen = 6),
        (9, "0 of 5 experts", |p| route(p).chosen = 0),
        (9, "1 x 4 wanted", |p| {
            let choice = route(p).output as usize;
            p.vectors[choice].width = 3;
        }),
        (9, "[1, 6, 8] wanted, got [1, 5, 8]", |p| route(p).experts = 6),
        (9, "does not cover 5 rows", |p| route(p).partition = 0),
        (9, "bias 0: 5 numbers wanted", |p| route(p).correction = Some(0)),
        (9, "a factor of NaN", |p| route(p).factor = f32::NAN),
        (9, "beside SoftmaxOfAll", |p| route(p).scoring = Scoring::SoftmaxOfAll),
        (9, "in 1 of 5 groups", |p| route(p).groups.as_mut().unwrap().chosen = 1),
        (9, "in 6 of 5 groups", |p| route(p).groups.as_mut().unwrap().chosen = 6),
        (9, "in 2 of 2 groups", |p| route(p).groups.as_mut().unwrap().count = 2),
        (9, "in 2 of 0 groups", |p| route(p).groups.as_mut().unwrap().count = 0),
        (10, "an inner width of 0", |p| experts_gate_up(p).ffn = 0),
        (10, "limit 0", |p| {
            experts_gate_up(p).gate = Gate::ClampedSwiglu { alpha: 1.0, limit: 0.0 };
        }),
        // One expert too few, and one that is stored otherwise.
        (10, "[2, 6, 8] wanted", |p| experts_gate_up(p).weights[1] += 1),
        (10, "expert 3", |p| {
            let at = experts_gate_up(p).weights[0] as usize + 3;
            p.tensors[at].encoding = Encoding::plain(Codes::F16);
        }),
        (10, "numbers wanted, got 40", |p| {
            let other = experts_down(p).bias.unwrap();
            experts_gate_up(p).biases = Some([other; 2]);
        }),
        (11, "vector", |p| experts_down(p).input = 0),
        (11, "2 x 14 wanted", |p| experts_down(p).ffn = 7),
    ];
    for (wanted, said, spoil) in cases {
        let mut made = Made::with_experts();
        spoil(&mut made.program);
        let Err(Error::InvalidProgram { step, detail }) = made.check() else {
            panic!("{said} was let in")
        };
        assert_eq!(step, *wanted, "{said}: {detail}");
        assert!(detail.contains(said), "{said:?} in {detail:?}");
    }
}

/// Where a broken program is refused, and what is said.
fn refusal(name: &str, spoil: impl FnOnce(&mut Program)) -> (usize, String) {
    let mut made = Made::new();
    spoil(&mut made.program);
    match made.check() {
        Err(Error::InvalidProgram { step, detail }) => (step, detail),
        Err(other) => panic!("{name}: {other}"),
        Ok(_) => panic!("{name} was let in"),
    }
}

fn qkv(program: &mut Program, layer: usize) -> &mut Qkv {
    match &mut program.steps[1 + 5 * layer].kind {
        StepKind::Qkv(qkv) => qkv,
        other => panic!("{other:?}"),
    }
}

fn attend(program: &mut Program, layer: usize) -> &mut Attend {
    match &mut program.steps[2 + 5 * layer].kind {
        StepKind::Attend(attend) => attend,
        other => panic!("{other:?}"),
    }
}

fn project(program: &mut Program, at: usize) -> &mut Project {
    match &mut program.steps[at].kind {
        StepKind::Project(project) => project,
        other => panic!("{other:?}"),
    }
}

fn gate_up(program: &mut Program, layer: usize) -> &mut GateUp {
    match &mut program.steps[4 + 5 * layer].kind {
        StepKind::GateUp(gate_up) => gate_up,
        other => panic!("{other:?}"),
    }
}

fn head(program: &mut Program) -> &mut Head {
    match &mut program.steps[11].kind {
        StepKind::Head(head) => head,
        other => panic!("{other:?}"),
    }
}

type Spoil = fn(&mut Program);

/// Runs all of them: the step that is named, a part of what is said, and what is wrong.
fn all_are_refused(cases: &[(usize, &str, Spoil)]) {
    for (wanted, said, spoil) in cases {
        let (step, detail) = refusal(said, spoil);
        assert_eq!(step, *wanted, "{said}: {detail}");
        assert!(detail.contains(said), "{said:?} in {detail:?}");
    }
}

/// What belongs to no step.
const WHOLE: usize = usize::MAX;

#[test]
fn a_program_that_holds() {
    Made::new().check().unwrap();
}

#[test]
fn sizes_tensors_and_groups() {
    all_are_refused(&[
        (WHOLE, "a size is zero", |p| p.dims.hidden = 0),
        (WHOLE, "a size is zero", |p| p.dims.slots = 0),
        (WHOLE, "a size is zero", |p| p.blocks = 0),
        (WHOLE, "1 columns for 1 slots", |p| p.dims.columns = 1),
        (WHOLE, "tensor 0 leaves its buffer", |p| p.tensors[0].offset = u64::MAX),
        (WHOLE, "tensor 1 leaves its buffer", |p| p.tensors[1].buffer = 1),
        (WHOLE, "tensor 2 leaves its buffer", |p| p.tensors[2].rows = 1 << 20),
        (WHOLE, "scales of tensor 3", |p| {
            p.tensors[3].encoding = Encoding::scaled(Codes::F32, [2, 2], Dtype::F32);
            p.tensors[3].scale_buffer = 7;
        }),
        (WHOLE, "columns of tensor 1 are no plain numbers of one lane", |p| {
            (p.tensors[1].layout, p.tensors[1].lanes) = (Layout::ColumnMajor, 2);
        }),
        (WHOLE, "must see all positions", |p| p.groups[0].window = Some(5)),
        (WHOLE, "must see all positions", |p| p.groups.clear()),
        (WHOLE, "page group", |p| p.groups[1].window = Some(0)),
        (WHOLE, "page group", |p| {
            let StateKind::KeysValues { lanes, .. } = &mut p.groups[1].state else { return };
            *lanes = 1;
        }),
        (WHOLE, "page group", |p| {
            let StateKind::KeysValues { dtype, .. } = &mut p.groups[0].state else { return };
            *dtype = Dtype::Bf16;
        }),
    ]);
}

#[test]
fn operands() {
    all_are_refused(&[
        (0, "[1, 10, 8] wanted", |p| p.tensors[0].rows -= 1),
        (1, "qkv of layer 0: tensor 999 of", |p| qkv(p, 0).weights[1] = 999),
        (1, "norm scale", |p| qkv(p, 0).norm = Some(0)),
        (1, "[2, 8, 8] wanted", |p| qkv(p, 0).weights.swap(0, 1)),
        (1, "norm of heads", |p| qkv(p, 0).head_norms = Some([0, 0])),
        (1, "rotary table", |p| qkv(p, 0).rotary.table = 0),
        (1, "over the heads of several lanes", |p| {
            let step = qkv(p, 0);
            let weights = step.weights;
            (step.norm_span, step.head_norms) = (NormSpan::AllHeads, Some([weights[0]; 2]));
        }),
        (1, "heads do not divide", |p| qkv(p, 0).heads.kv = 3),
        (1, "heads do not divide", |p| qkv(p, 0).heads.kv = 0),
        (1, "heads do not divide", |p| qkv(p, 0).heads.dim = 5),
        (6, "bias 0: 12 numbers wanted", |p| qkv(p, 1).biases.as_mut().unwrap()[2] = 0),
        (3, "tensor 4294967295 of", |p| project(p, 3).weight = u32::MAX),
        (3, "a factor of inf", |p| project(p, 3).join = Join::Own { factor: f32::INFINITY }),
        (4, "an inner width of 0", |p| gate_up(p, 0).ffn = 0),
        (4, "[2, 4, 8] wanted", |p| gate_up(p, 0).ffn = 4),
        (4, "scale 0: 8 numbers wanted", |p| gate_up(p, 0).scale = Some(0)),
        (4, "norm scale 1 is", |p| {
            qkv(p, 0).norm = gate_up(p, 0).norm;
            gate_up(p, 0).norm = Some(1);
            p.tensors[1].cols = 4;
        }),
        (11, "[2, 5, 8] wanted", |p| head(p).mode = HeadMode::PerLane),
        (11, "[1, 10, 16] wanted", |p| head(p).mode = HeadMode::Concat),
    ]);
}

#[test]
fn vectors_and_states() {
    all_are_refused(&[
        (1, "vector 0 is read before it is written", |p| {
            p.steps[0].kind = StepKind::Embed(Embed { table: 0, factor: 1.0, output: 1 });
        }),
        (0, "vector 99 does not exist", |p| {
            p.steps[0].kind = StepKind::Embed(Embed { table: 0, factor: 1.0, output: 99 });
        }),
        (1, "2 x 8 wanted, got 2 x 9", |p| p.vectors[4].width = 9),
        (3, "vector 1: 2 x 8 wanted", |p| p.vectors[1].width = 7),
        (3, "vector 2 is read before", |p| {
            project(p, 3).join = Join::Delayed { layers: 1, from: 2 };
        }),
        (8, "a delay of no layers", |p| {
            project(p, 8).join = Join::Delayed { layers: 0, from: 1 };
        }),
        (8, "vector 1 is read before", |p| project(p, 3).keep = None),
        (2, "is read before it is written", |p| {
            attend(p, 0).state = StateAt { group: 0, layer: 1 };
            p.groups[0].layers = 2;
        }),
        (1, "does not exist", |p| qkv(p, 0).state.layer = 1),
        (6, "does not exist", |p| qkv(p, 1).state.group = 2),
        (6, "keeps 1 heads of 4", |p| qkv(p, 1).state.group = 0),
        (6, "is another layer's", |p| {
            let (first, second) = (*qkv(p, 0), p.steps[6]);
            p.steps[6] = Step { kind: StepKind::Qkv(first), ..second };
        }),
        (2, "a window of Some(0)", |p| attend(p, 0).window = Some(0)),
        (7, "a window of Some(6)", |p| attend(p, 1).window = Some(6)),
        (7, "a window of None", |p| attend(p, 1).window = None),
        (12, "vector 0: 1 x 10 wanted", |p| {
            p.steps[12].kind = StepKind::Sample(Sample { input: 0 });
        }),
    ]);
}

#[test]
fn rows_have_one_owner() {
    all_are_refused(&[
        (1, "does not cover 8 rows", |p| p.row_partition[0] = 1),
        (1, "does not cover 8 rows", |p| p.row_partition[3] -= 1),
        (1, "does not cover 8 rows", |p| p.row_partition.swap(1, 2)),
        (3, "does not cover 8 rows", |p| project(p, 3).partition = u32::MAX),
        (4, "does not cover 6 rows", |p| gate_up(p, 0).partition = 0),
        (11, "does not cover 10 rows", |p| head(p).partition += 1),
    ]);
}

/// Heads on one key, in groups.
const COMPRESSED: CompressedHeads = CompressedHeads { count: 4, dim: 4, turned: 2, groups: 2 };
const EVERY: u32 = 4;
const STREAMS: u32 = 3;
const RANK: u32 = 5;

impl Made {
    /// Page groups of attention over a window and entries, and what turns and norms it.
    fn compressed_places(&mut self) -> (Rotary, Option<u32>) {
        let dtype = Dtype::F32;
        for (state, layers, window) in [
            (StateKind::Latents { dtype, width: COMPRESSED.dim }, 1, Some(6)),
            (StateKind::Entries { dtype, width: COMPRESSED.dim, every: EVERY }, 2, None),
            (StateKind::Sums { numbers: 48 }, 1, Some(2)),
        ] {
            self.program.groups.push(PageGroup { state, layers, window, pages: 2 });
        }
        let table = self.tensor(1, 2, COMPRESSED.turned / 2);
        (Rotary { table, interleaved: true }, Some(self.tensor(1, 1, HIDDEN)))
    }

    /// What is taken of streams, and what joins them.
    fn streams(&mut self) -> (HyperIn, HyperOut) {
        let [residual, mix] =
            [STREAMS * HIDDEN, STREAMS * (1 + STREAMS)].map(|n| self.vector(1, n));
        let [output, sum] = [(); 2].map(|()| self.vector(LANES, HIDDEN));
        let rows = STREAMS * (2 + STREAMS);
        let take = HyperIn {
            weight: self.tensor(1, rows, STREAMS * HIDDEN),
            scale: self.tensor(1, 1, 3),
            base: self.tensor(1, 1, rows),
            streams: STREAMS,
            eps: 1e-6,
            input: residual,
            output,
            join: Some(HyperJoin { rounds: 2, mix, sum }),
            partition: 0,
        };
        (take, HyperOut { streams: STREAMS, mix, input: sum, residual, partition: 0 })
    }

    /// Entries, then keys of an indexer, and the choice by them.
    fn entries(
        &mut self,
        (rotary, norm): (Rotary, Option<u32>),
        down: &CompressedDown,
    ) -> ([Compress; 2], CompressedIndex) {
        let (dim, turned, every) = (COMPRESSED.dim, COMPRESSED.turned, EVERY);
        let both = [(0, 0), (24, 1)].map(|(first, layer)| Compress {
            norm,
            weights: [(); 2].map(|()| self.tensor(1, 2 * dim, HIDDEN)),
            bias: self.tensor(1, every, 2 * dim),
            scale: self.tensor(1, 1, dim),
            rotary,
            dim,
            turned,
            every,
            overlap: true,
            input: down.input,
            sums: StateAt { group: 4, layer: 0 },
            first,
            entries: StateAt { group: 3, layer },
            partition: 0,
        });
        let index = CompressedIndex {
            norm,
            weights: [self.tensor(1, 3 * dim, RANK), self.tensor(1, 3, HIDDEN)],
            rotary,
            heads: 3,
            dim,
            turned,
            chosen: 3,
            every,
            input: down.input,
            latent: down.output,
            keys: both[1].entries,
            output: self.vector(1, 4),
            partition: 0,
        };
        (both, index)
    }

    /// Attention over a window and entries of several residual streams.
    fn with_compressed() -> Self {
        let mut made = Self::new();
        let (heads, (rotary, norm)) = (COMPRESSED, made.compressed_places());
        let (take, give) = made.streams();
        let down = CompressedDown {
            norm,
            weights: [RANK, heads.dim].map(|rows| made.tensor(1, rows, HIDDEN)),
            scales: [RANK, heads.dim].map(|count| made.tensor(1, 1, count)),
            rotary,
            rank: RANK,
            heads,
            input: take.output,
            output: made.vector(1, RANK),
            state: StateAt { group: 2, layer: 0 },
            partition: 0,
        };
        let ([entries, keys], index) = made.entries((rotary, norm), &down);
        let query = CompressedQuery {
            weight: made.tensor(LANES, heads.width(), RANK),
            rotary,
            heads,
            input: down.output,
            output: made.vector(LANES, heads.width()),
            partition: 0,
        };
        let seen = Entries { state: entries.entries, every: EVERY, choice: Some(index.output) };
        let attend = CompressedAttend {
            rotary,
            heads,
            sinks: made.tensor(1, LANES, heads.count),
            window: 6,
            input: query.output,
            output: made.vector(LANES * heads.groups, heads.group()),
            state: down.state,
            entries: Some(seen),
        };
        let grouped = GroupedDown {
            weight: made.tensor(LANES, heads.groups * 3, heads.group()),
            groups: heads.groups,
            rank: 3,
            input: attend.output,
            output: made.vector(LANES, heads.groups * 3),
            partition: 0,
        };
        let StepKind::Embed(embed) = made.program.steps[0].kind else { panic!("no embedding") };
        let kinds = [
            StepKind::Embed(Embed { output: take.input, ..embed }),
            StepKind::HyperIn(take),
            StepKind::CompressedDown(down),
            StepKind::Compress(entries),
            StepKind::Compress(keys),
            StepKind::CompressedIndex(index),
            StepKind::CompressedQuery(query),
            StepKind::CompressedAttend(attend),
            StepKind::GroupedDown(grouped),
            StepKind::HyperOut(give),
        ];
        made.program.steps.splice(1..1, kinds.map(|kind| Step { layer: 0, kind }));
        let Program { steps, dims, blocks, .. } = &mut made.program;
        made.program.row_partition = partition_rows(steps, dims, *blocks);
        made
    }
}

impl Made {
    /// Behind the model what a layer that predicts further tokens takes in.
    fn with_mtp() -> Self {
        let mut made = Self::new();
        let mtp = MtpIn {
            table: made.tensor(1, VOCAB, HIDDEN),
            embedding_norm: made.tensor(1, 1, HIDDEN),
            hidden_norm: made.tensor(1, 1, HIDDEN),
            end_norms: [(); 2].map(|()| made.tensor(1, 1, HIDDEN)),
            weight: made.tensor(1, HIDDEN, 2 * HIDDEN),
            input: 0,
            output: 0,
            partition: 0,
        };
        let [.., head, sample] = made.program.steps[..] else { panic!("no head") };
        made.push(2, StepKind::MtpIn(mtp));
        made.program.steps.extend([head, sample]);
        let Program { steps, dims, blocks, .. } = &mut made.program;
        made.program.row_partition = partition_rows(steps, dims, *blocks);
        made
    }
}

/// A step of a kind, to be spoilt.
macro_rules! step {
    ($program:expr, $at:literal, $kind:ident) => {
        match &mut $program.steps[$at].kind {
            StepKind::$kind(step) => step,
            other => panic!("{other:?}"),
        }
    };
}

#[test]
fn windows_entries_and_streams() {
    Made::with_compressed().check().unwrap();
    let cases: &[(usize, &str, Spoil)] = &[
        (WHOLE, "page group", |p| p.groups[4].window = None),
        (WHOLE, "page group", |p| {
            let StateKind::Entries { every, .. } = &mut p.groups[3].state else { return };
            *every = 96;
        }),
        (1, "wanted, got", |p| p.vectors[step!(p, 1, Embed).output as usize].width -= 1),
        (2, "streams", |p| step!(p, 2, HyperIn).streams = 17),
        (2, "base", |p| step!(p, 2, HyperIn).base = 0),
        (2, "wanted, got", |p| step!(p, 2, HyperIn).join = None),
        (2, "vector", |p| step!(p, 2, HyperIn).output = 99),
        (3, "heads on one key", |p| step!(p, 3, CompressedDown).heads.groups = 3),
        (3, "norm of a product", |p| step!(p, 3, CompressedDown).scales.swap(0, 1)),
        (3, "not keys of 4 in a window", |p| p.groups[2].window = None),
        (4, "an entry of 96", |p| step!(p, 4, Compress).every = 96),
        (4, "Sums", |p| step!(p, 4, Compress).first = 25),
        (4, "not entries of 4", |p| step!(p, 4, Compress).entries.group = 2),
        (4, "wanted, got", |p| step!(p, 4, Compress).overlap = false),
        (5, "is another layer's", |p| step!(p, 5, Compress).entries.layer = 0),
        (6, "wanted, got", |p| step!(p, 6, CompressedIndex).heads = 2),
        (6, "entries of 4 for 2", |p| step!(p, 6, CompressedIndex).every = 2),
        (6, "does not cover", |p| step!(p, 6, CompressedIndex).partition += 1),
        (7, "wanted, got", |p| step!(p, 7, CompressedQuery).input = 0),
        (8, "a window of 7", |p| step!(p, 8, CompressedAttend).window = 7),
        (8, "sinks", |p| step!(p, 8, CompressedAttend).sinks = 0),
        (8, "pairs turn", |p| step!(p, 8, CompressedAttend).heads.turned = 4),
        (8, "wanted, got", |p| step!(p, 8, CompressedAttend).output = 0),
        (9, "none of any rows", |p| step!(p, 9, GroupedDown).rank = 0),
        (10, "vector", |p| step!(p, 10, HyperOut).mix = 0),
    ];
    for (wanted, said, spoil) in cases {
        let mut made = Made::with_compressed();
        spoil(&mut made.program);
        let Err(Error::InvalidProgram { step, detail }) = made.check() else {
            panic!("{said} was let in")
        };
        assert_eq!(step, *wanted, "{said}: {detail}");
        assert!(detail.contains(said), "{said}: {detail}");
    }
}

#[test]
fn what_predicts_stands_behind_the_model() {
    let made = Made::with_mtp();
    let at = made.program.steps.len() - 3;
    assert_eq!((made.program.model_steps(), made.program.predicts()), (at, true));
    made.check().unwrap();
    let without = Made::new().program;
    assert_eq!((without.model_steps(), without.predicts()), (without.steps.len(), false));
    fn last(p: &mut Program) -> &mut MtpIn {
        let at = p.model_steps();
        let StepKind::MtpIn(mtp) = &mut p.steps[at].kind else { panic!("no mtp_in") };
        mtp
    }
    let cases: &[(usize, &str, Spoil)] = &[
        (at, "wanted, got", |p| last(p).table = last(p).weight),
        (at, "wanted, got", |p| last(p).weight = last(p).table),
        (at, "norm", |p| last(p).embedding_norm = last(p).weight),
        (at, "norm", |p| last(p).hidden_norm = last(p).weight),
        (at, "norm", |p| last(p).end_norms[1] = last(p).weight),
        (at, "does not exist", |p| last(p).input = 99),
        (at, "vector", |p| last(p).output = 3),
        (at, "does not cover", |p| last(p).partition += 1),
        (at, "behind sample", |p| {
            let at = p.model_steps();
            p.steps[at] = p.steps[1];
        }),
        (at - 1, "behind sample", |p| {
            let at = p.model_steps();
            p.steps.swap(at, at - 1);
        }),
        (at + 1, "sample ends it", |p| _ = p.steps.pop()),
        (at + 3, "behind sample", |p| {
            let at = p.model_steps();
            p.steps.extend_from_within(at..);
        }),
    ];
    for (wanted, said, spoil) in cases {
        let mut made = Made::with_mtp();
        spoil(&mut made.program);
        let Err(Error::InvalidProgram { step, detail }) = made.check() else {
            panic!("{said} was let in")
        };
        assert_eq!(step, *wanted, "{said}: {detail}");
        assert!(detail.contains(said), "{said}: {detail}");
    }
}
