//! Spec → steps: the order of operations, which vector each reads and writes, and which block owns
//! which rows. Pure: the same spec and block count give the same steps.

use std::collections::HashMap;

use kie_kernels::abi::{Dims, HeadMode, Op, Step, Vector, NONE};

use crate::model::{HeadKind, Mix, Role, Spec};

/// The vectors of a program by their use.
struct Vectors {
    all: Vec<Vector>,
    residual: u32,
    query: u32,
    attended: u32,
    inner: u32,
    logits: u32,
    /// Module outputs that later layers add, by (is the MLP's, layer modulo ring length).
    partials: HashMap<(bool, usize), u32>,
}

impl Vectors {
    fn new(spec: &Spec, dims: &Dims) -> Self {
        let mut all = Vec::new();
        let mut add = |lanes, width| {
            all.push(Vector { lanes, width });
            all.len() as u32 - 1
        };
        let lanes = dims.lanes;
        let residual = add(lanes, dims.hidden);
        let query = add(lanes, dims.heads * dims.head_dim);
        let attended = add(lanes, dims.heads * dims.head_dim);
        let inner = add(lanes, dims.ffn);
        let logits = add(1, dims.vocab);
        let mut partials = HashMap::new();
        for mlp in [false, true] {
            let delays =
                spec.layers.iter().map(|l| delay(if mlp { l.mlp_mix } else { l.attention_mix }));
            let ring = delays.max().unwrap_or(0);
            if ring > 0 {
                // One slot more than the delay: a layer is read while a newer one is written.
                (0..=ring).for_each(|at| {
                    partials.insert((mlp, at), add(lanes, dims.hidden));
                });
            }
        }
        Self { all, residual, query, attended, inner, logits, partials }
    }

    fn partial(&self, mlp: bool, layer: usize) -> u32 {
        let ring = self.partials.keys().filter(|k| k.0 == mlp).count();
        if ring == 0 {
            return NONE;
        }
        self.partials[&(mlp, layer % ring)]
    }
}

fn delay(mix: Mix) -> usize {
    mix.others.unwrap_or(0)
}

/// Steps, vectors and row splits of one pass.
pub(super) struct Schedule {
    pub steps: Vec<Step>,
    pub vectors: Vec<Vector>,
    pub splits: Vec<u32>,
}

/// Splits `rows` evenly over `blocks`, on multiples of `unit` (the last block takes the rest).
fn split(rows: u32, unit: u32, blocks: u32) -> impl Iterator<Item = u32> {
    let units = u64::from(rows.div_ceil(unit));
    (0..=blocks)
        .map(move |b| (units * u64::from(b) / u64::from(blocks)) as u32 * unit)
        .map(move |row| row.min(rows))
}

struct Builder<'a> {
    spec: &'a Spec,
    dims: &'a Dims,
    blocks: u32,
    tensors: &'a HashMap<Role, u32>,
    vectors: Vectors,
    steps: Vec<Step>,
    splits: Vec<u32>,
}

/// Rows that one block takes at least: an AMX or mma tile.
const TILE_ROWS: u32 = 16;

impl Builder<'_> {
    fn tensor(&self, role: Role) -> u32 {
        self.tensors.get(&role).copied().unwrap_or(NONE)
    }

    fn push(&mut self, op: Op, layer: usize, rows: u32, unit: u32) -> &mut Step {
        let at = self.splits.len() as u32;
        self.splits.extend(split(rows, unit, self.blocks));
        let group = usize::from(self.spec.layers.get(layer).is_some_and(|l| l.window.is_some()));
        let earlier = self.spec.layers[..layer.min(self.spec.layers.len())].iter();
        let group_layer = earlier.filter(|l| usize::from(l.window.is_some()) == group).count();
        self.steps.push(Step {
            op,
            layer: layer as u16,
            weights: [NONE; 3],
            biases: [NONE; 3],
            norm: NONE,
            head_norms: [NONE; 2],
            input: self.vectors.residual,
            output: self.vectors.residual,
            partial: NONE,
            others: NONE,
            mix_own: 1.0,
            mix_delay: -1,
            group: group as u32,
            group_layer: group_layer as u32,
            window: NONE,
            split: at,
        });
        self.steps.last_mut().expect("just pushed")
    }

    fn attention(&mut self, layer: usize) {
        let d = *self.dims;
        let window = self.spec.layers[layer].window.map_or(NONE, |w| w as u32);
        let weights = [Role::Q(layer), Role::K(layer), Role::V(layer)].map(|r| self.tensor(r));
        let biases =
            [Role::QBias(layer), Role::KBias(layer), Role::VBias(layer)].map(|r| self.tensor(r));
        let norm = self.tensor(Role::AttentionNorm(layer));
        let head_norms = [Role::QNorm(layer), Role::KNorm(layer)].map(|r| self.tensor(r));
        let (query, attended) = (self.vectors.query, self.vectors.attended);
        let step = self.push(Op::Qkv, layer, d.lanes * (d.heads + 2 * d.kv_heads), 1);
        (step.weights, step.biases, step.norm) = (weights, biases, norm);
        (step.head_norms, step.output, step.window) = (head_norms, query, window);
        let step = self.push(Op::Attend, layer, d.lanes * d.kv_heads, 1);
        (step.input, step.output, step.window) = (query, attended, window);
        let mix = self.spec.layers[layer].attention_mix;
        self.project(layer, Role::O(layer), attended, mix, false);
    }

    fn mlp(&mut self, layer: usize) {
        let d = *self.dims;
        let (gate, up) = (self.tensor(Role::Gate(layer)), self.tensor(Role::Up(layer)));
        let norm = self.tensor(Role::MlpNorm(layer));
        let inner = self.vectors.inner;
        let step = self.push(Op::GateUp, layer, d.lanes * d.ffn, TILE_ROWS);
        (step.weights, step.norm, step.output) = ([gate, up, NONE], norm, inner);
        let mix = self.spec.layers[layer].mlp_mix;
        self.project(layer, Role::Down(layer), inner, mix, true);
    }

    fn project(&mut self, layer: usize, role: Role, input: u32, mix: Mix, mlp: bool) {
        let weight = self.tensor(role);
        let later = self.spec.layers.iter().enumerate().skip(layer + 1).any(|(i, l)| {
            let mix = if mlp { l.mlp_mix } else { l.attention_mix };
            delay(mix) > 0 && i - delay(mix) == layer
        });
        let partial = if later { self.vectors.partial(mlp, layer) } else { NONE };
        let others = match mix.others {
            Some(delay) if delay > 0 => self.vectors.partial(mlp, layer - delay),
            Some(_) | None => NONE,
        };
        let step = self.push(Op::Project, layer, self.dims.hidden, TILE_ROWS);
        step.weights[0] = weight;
        (step.input, step.partial, step.others) = (input, partial, others);
        (step.mix_own, step.mix_delay) = (mix.own, mix.others.map_or(-1, |d| d as i32));
    }
}

/// The steps of a model on one device. `tensors` maps roles to the program's tensor table.
pub(super) fn schedule(
    spec: &Spec,
    dims: &Dims,
    blocks: u32,
    tensors: &HashMap<Role, u32>,
) -> Schedule {
    let vectors = Vectors::new(spec, dims);
    let (steps, splits) = (Vec::new(), Vec::new());
    let mut b = Builder { spec, dims, blocks, tensors, vectors, steps, splits };
    let embedding = b.tensor(Role::Embedding);
    b.push(Op::Embed, 0, dims.hidden, TILE_ROWS).weights[0] = embedding;
    for layer in 0..spec.layers.len() {
        b.attention(layer);
        b.mlp(layer);
    }
    let (head, norm, logits) = (b.tensor(Role::Head), b.tensor(Role::FinalNorm), b.vectors.logits);
    let step = b.push(Op::Head, spec.layers.len(), dims.vocab, TILE_ROWS);
    (step.weights[0], step.norm, step.output) = (head, norm, logits);
    let step = b.push(Op::Sample, spec.layers.len(), 1, 1);
    (step.input, step.output) = (logits, NONE);
    Schedule { steps: b.steps, vectors: b.vectors.all, splits: b.splits }
}

/// The head's mode in the program.
pub(super) fn head_mode(kind: HeadKind) -> HeadMode {
    match kind {
        HeadKind::Replicate => HeadMode::Mean,
        HeadKind::SumThenNorm => HeadMode::SumThenNorm,
        HeadKind::VocabParallel => HeadMode::PerLane,
        HeadKind::Concat => HeadMode::Concat,
    }
}
