//! A program read as what the monokernel runs: layers of a few classes. Layers of a class have the
//! same phases and sizes and differ in numbers alone (windows, delays, where their tensors and
//! pages are). What is no such program is refused here, with the step, before a byte is allocated.

use std::ops::Range;

use crate::abi::{Dims, HeadMode, Op, Program, Step, Tensor, NONE, PAGE};
use crate::error::{Error, Result};

/// Sizes of one lane, and where its tensors are.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// Machines that run it together, each the same number of lanes.
    pub ranks: u32,
    /// Lanes of one machine.
    pub lanes: u32,
    /// Lanes are slices of matrices that the program has whole (tensor parallelism), not matrices
    /// of their own.
    pub sliced: bool,
    /// Ids of the whole vocabulary.
    pub vocab_all: u32,
    /// Width of a residual stream.
    pub hidden: u32,
    /// Rows of one head matrix: of the vocabulary, or of a lane's slice of it.
    pub vocab: u32,
    /// How the head combines lanes.
    pub head_mode: HeadMode,
    /// Rotary pairs are neighbours in the checkpoint.
    pub interleaved: bool,
    /// Epsilon of the norms.
    pub eps: f32,
    /// What layers are alike in.
    pub classes: Vec<Class>,
    /// What differs from layer to layer.
    pub layer: Vec<Layer>,
    /// Tensor of the embedding table.
    pub embed: u32,
    /// Tensor of the head.
    pub head: u32,
    /// The final norm's scale.
    pub final_norm: Norm,
}

/// Most classes of a model: each is a copy of the layer's code.
pub const MOST_CLASSES: usize = 4;

/// What the layers of a class are alike in: all that is a constant while one of them runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Class {
    /// Query heads.
    pub heads: u32,
    /// Key/value heads.
    pub kv_heads: u32,
    /// The same two of the program, where these are a machine's share.
    pub heads_all: [u32; 2],
    /// Features of a head.
    pub head_dim: u32,
    /// MLP width.
    pub ffn: u32,
    /// The same of the program.
    pub ffn_all: u32,
    /// q and k heads have norms.
    pub head_norm: bool,
    /// q, k and v have biases.
    pub bias: bool,
    /// Tensor of the rotary frequencies.
    pub rope: u32,
}

impl Class {
    /// Query heads of a kv head.
    pub const fn group(&self) -> u32 {
        self.heads / self.kv_heads
    }
}

/// A norm's scale: a tensor, and its rows, 1 or one a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Norm {
    /// The tensor.
    pub tensor: u32,
    /// Its rows.
    pub rows: u32,
}

/// One layer: tensors by index, and numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    /// Index into [`Model::classes`].
    pub class: usize,
    /// q, k, v.
    pub qkv: [u32; 3],
    /// Their biases, or [`NONE`].
    pub biases: [u32; 3],
    /// Norms of each q and each k head, or [`NONE`].
    pub head_norms: [u32; 2],
    /// Attention's output matrix, then the mlp's.
    pub outputs: [u32; 2],
    /// Gate and up.
    pub gate_up: [u32; 2],
    /// Norm scales before attention and before the mlp.
    pub norms: [Norm; 2],
    /// Positions a query sees; 0: all.
    pub window: u32,
    /// Page group, and the layer's index in it.
    pub pool: [u32; 2],
    /// Factor on the lane's own output of attention and mlp.
    pub own: [f32; 2],
    /// Layers since the others' output that is added; -1: none is.
    pub delay: [i32; 2],
    /// Whether other lanes will want the outputs.
    pub shares: [bool; 2],
}

impl Model {
    /// Layers.
    pub fn layers(&self) -> u32 {
        self.layer.len() as u32
    }

    /// The class of a layer.
    pub fn class_of(&self, layer: usize) -> &Class {
        &self.classes[self.layer[layer].class]
    }

    /// Layers of a class.
    pub fn layers_of(&self, class: usize) -> u32 {
        self.layer.iter().filter(|layer| layer.class == class).count() as u32
    }

    /// All norms, in the order of their rows on a device.
    pub fn norms(&self) -> impl Iterator<Item = Norm> + '_ {
        self.layer.iter().flat_map(|l| l.norms).chain([self.final_norm])
    }

    /// Rows of all norms.
    pub fn norm_rows(&self) -> u32 {
        self.norms().map(|norm| norm.rows).sum()
    }

    /// Lanes of all machines.
    pub const fn lanes_all(&self) -> u32 {
        self.lanes * self.ranks
    }

    /// Places of the words of what other lanes want, which layers use in turn: as few as let no
    /// lane write a layer's where another may still read an earlier one's.
    pub fn turns_other(&self) -> u32 {
        if self.lanes_all() == 1 {
            return 1;
        }
        let layers = self.layer.len();
        // Outputs are numbered in the order of the work. Where output `at` is made, an earlier
        // one's words are read, if any.
        let source = |at: usize| {
            let delay = usize::try_from(self.layer.get(at / 2)?.delay[at % 2]).ok()?;
            at.checked_sub(2 * delay)
        };
        // When a lane stores output `at` it has all that it read for those before: the lanes that
        // stored that were done with what they read for what comes before it. Of what is read for
        // one and the same output threads read parts side by side, so nothing follows.
        let done = |at: usize| (0..at).filter_map(source).max().unwrap_or(0);
        let fits = |turns: &usize| {
            (2 * turns..2 * layers).all(|at| {
                let mut readers = (0..2 * layers).filter(|n| source(*n) == Some(at - 2 * turns));
                readers.all(|reader| reader < done(at))
            })
        };
        (1..layers).find(fits).unwrap_or(layers) as u32
    }

    /// Reads a program, for so many machines.
    ///
    /// # Errors
    /// [`Error::InvalidProgram`] with the step that is not as expected, [`Error::Indivisible`].
    pub fn read(program: &Program, ranks: u32) -> Result<Self> {
        let d = &program.dims;
        let mut steps = Steps { program, at: 0 };
        let embed = steps.take(Op::Embed)?;
        let sliced = d.lanes == 1 && ranks > 1;
        let lanes_all = if sliced { ranks } else { d.lanes };
        // A norm of slices is that of the one lane there is.
        let lanes = if sliced { 1 } else { lanes_all };
        let (mut classes, mut layer) = (Vec::new(), Vec::new());
        while steps.next_is(Op::Qkv) {
            let first = steps.at;
            let phases = steps.layer()?;
            let class = Class::read(program, &phases, ranks)?;
            let index = classes.iter().position(|c| *c == class).unwrap_or(classes.len());
            if index == classes.len() {
                classes.push(class);
            }
            if classes.len() > MOST_CLASSES {
                return refuse(first, format!("a layer of class {index}: {MOST_CLASSES} at most"));
            }
            layer.push(Layer::read(program, &phases, index, (lanes, sliced), first)?);
        }
        let head = steps.take(Op::Head)?;
        let head_at = steps.at - 1;
        steps.take(Op::Sample)?;
        if steps.at != program.steps.len() || layer.is_empty() {
            let count = layer.len();
            return refuse(steps.at, format!("{count} layers, then what is no step of theirs"));
        }
        if !lanes_all.is_multiple_of(ranks) {
            return Err(indivisible(d.lanes, &classes[0], ranks));
        }
        let per_lane = d.lanes == 1 || d.head_mode == HeadMode::PerLane;
        let model = Self {
            ranks,
            lanes: lanes_all / ranks,
            sliced,
            vocab_all: d.vocab,
            hidden: d.hidden,
            vocab: if per_lane { d.vocab.div_ceil(lanes_all) } else { d.vocab },
            head_mode: if per_lane { HeadMode::PerLane } else { d.head_mode },
            interleaved: d.rope_interleaved != 0,
            eps: d.eps,
            classes,
            layer,
            embed: embed.weights[0],
            head: head.weights[0],
            final_norm: Norm::read(program, head.norm, lanes, head_at)?,
        };
        let width = program.tensors.get(model.embed as usize).map(|t| t.cols);
        if width != Some(model.hidden) {
            return refuse(0, format!("embedding of width {width:?}, not {}", model.hidden));
        }
        Ok(model)
    }

    /// Which of the program's query and kv heads of a class a machine's lane has, of as many places
    /// as the class has heads; the last places may stay empty.
    pub fn heads_of(&self, rank: u32, class: &Class) -> [Range<u32>; 2] {
        let [heads, kv_heads] = class.heads_all;
        if !self.sliced {
            return [0..class.heads, 0..class.kv_heads];
        }
        let group = heads / kv_heads;
        if kv_heads >= self.ranks {
            let kv = |rank: u32| (rank * class.kv_heads).min(kv_heads);
            let (from, to) = (kv(rank), kv(rank + 1));
            return [from * group..to * group, from..to];
        }
        // Several machines share a kv head, each with a part of its query heads.
        let sharers = self.ranks / kv_heads;
        let (kv, part) = (rank / sharers, rank % sharers);
        let query = |part: u32| kv * group + (part * class.heads).min(group);
        [query(part)..query(part + 1), kv..kv + 1]
    }

    /// Which part of the program a machine has, in words.
    pub fn part(&self, rank: u32, dims: &Dims) -> String {
        let span = |range: Range<u32>| match range.len() {
            0 => "none".to_owned(),
            1 => range.start.to_string(),
            _ => format!("{} to {}", range.start, range.end - 1),
        };
        if self.ranks == 1 {
            return "all of it".to_owned();
        }
        if !self.sliced {
            let lanes = rank * self.lanes..(rank + 1) * self.lanes;
            return format!("lanes {} of {}", span(lanes), dims.lanes);
        }
        let end = |rank: u32, each: u32, all: u32| (rank * each).min(all);
        let rows = |each, all| span(end(rank, each, all)..end(rank + 1, each, all));
        let of_class = |class: &Class| {
            let [query, kv] = self.heads_of(rank, class);
            format!(
                "heads {} of {}, kv heads {} of {}, features {} of {}",
                span(query),
                class.heads_all[0],
                span(kv),
                class.heads_all[1],
                rows(class.ffn, class.ffn_all),
                class.ffn_all,
            )
        };
        let classes: Vec<_> = self.classes.iter().map(of_class).collect();
        format!("{}, ids {} of {}", classes.join(" or "), rows(self.vocab, dims.vocab), dims.vocab)
    }
}

/// The steps of a program, one after another.
struct Steps<'a> {
    program: &'a Program,
    at: usize,
}

impl<'a> Steps<'a> {
    fn next_is(&self, op: Op) -> bool {
        self.program.steps.get(self.at).is_some_and(|step| step.op == op)
    }

    /// The next step, which must be this one.
    fn take(&mut self, op: Op) -> Result<&'a Step> {
        match self.program.steps.get(self.at) {
            Some(step) if step.op == op => {
                self.at += 1;
                Ok(step)
            }
            Some(step) => {
                let got = step.op;
                refuse(self.at, format!("{got:?} where the order of known phases has {op:?}"))
            }
            None => refuse(self.at, format!("the end where the order of phases has {op:?}")),
        }
    }

    /// The phases of a layer: attention, then an mlp.
    fn layer(&mut self) -> Result<[&'a Step; 5]> {
        Ok([
            self.take(Op::Qkv)?,
            self.take(Op::Attend)?,
            self.take(Op::Project)?,
            self.take(Op::GateUp)?,
            self.take(Op::Project)?,
        ])
    }
}

impl Class {
    fn read(program: &Program, phases: &[&Step; 5], ranks: u32) -> Result<Self> {
        let d = &program.dims;
        let sliced = d.lanes == 1 && ranks > 1;
        let [qkv, ..] = phases;
        let whole = Self {
            heads: d.heads,
            kv_heads: d.kv_heads,
            heads_all: [d.heads, d.kv_heads],
            head_dim: d.head_dim,
            ffn: d.ffn,
            ffn_all: d.ffn,
            head_norm: qkv.head_norms[0] != NONE,
            bias: qkv.biases[0] != NONE,
            rope: program.rope,
        };
        if !sliced {
            return Ok(whole);
        }
        let Some((heads, kv_heads)) = dealt(whole.heads, whole.kv_heads, ranks) else {
            return Err(indivisible(d.lanes, &whole, ranks));
        };
        Ok(Self { heads, kv_heads, ffn: whole.ffn.div_ceil(ranks), ..whole })
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
        [qkv, _, output, gate_up, down]: &[&Step; 5],
        class: usize,
        (lanes, sliced): (u32, bool),
        first: usize,
    ) -> Result<Self> {
        let rows_of = |t: u32| program.tensors.get(t as usize).map_or(1, |t: &Tensor| t.rows);
        if qkv.head_norms.iter().any(|n| *n != NONE && rows_of(*n) != 1) {
            return refuse(first, "norms of heads that differ from lane to lane".to_owned());
        }
        Ok(Self {
            class,
            qkv: qkv.weights,
            biases: qkv.biases,
            head_norms: qkv.head_norms,
            outputs: [output.weights[0], down.weights[0]],
            gate_up: [gate_up.weights[0], gate_up.weights[1]],
            norms: [
                Norm::read(program, qkv.norm, lanes, first)?,
                Norm::read(program, gate_up.norm, lanes, first + 3)?,
            ],
            window: if qkv.window == NONE { 0 } else { qkv.window },
            pool: [qkv.group, qkv.group_layer],
            own: [output.mix_own, down.mix_own],
            delay: if sliced { [0; 2] } else { [output.mix_delay, down.mix_delay] },
            shares: [output, down].map(|s| sliced || s.partial != NONE || s.mix_delay == 0),
        })
    }
}

fn indivisible(lanes: u32, class: &Class, ranks: u32) -> Error {
    let [heads, kv_heads] = class.heads_all;
    let detail = format!(
        "{lanes} lanes, {heads} query and {kv_heads} kv heads do not divide by {ranks} ranks: each \
         takes as many lanes, or whole kv heads' heads, or an equal part of one's"
    );
    Error::Indivisible { ranks, detail }
}

/// Bytes of one KV page of a group on all of so many machines, each of which has whole kv heads
/// with what that pads, in float16; heads that do not divide count as in the program, which is
/// refused later.
pub fn page_bytes(dims: &Dims, group: usize, ranks: u32) -> u64 {
    let sliced = dims.lanes == 1 && ranks > 1;
    let dealt = if sliced { dealt(dims.heads, dims.kv_heads, ranks) } else { None };
    let kv_heads = dealt.map_or(dims.lanes * dims.kv_heads, |(_, each)| each * ranks);
    let width = u64::from(kv_heads) * u64::from(dims.head_dim.next_multiple_of(32));
    u64::from(dims.group_layers[group]) * width * 2 * PAGE as u64 * 2
}

/// Query and kv heads of each of so many machines: whole kv heads with all their query heads, fewer
/// on the last machine, or a part of the query heads of one kv head, which several machines then
/// have. None where a machine would have nothing.
pub(crate) fn dealt(heads: u32, kv_heads: u32, ranks: u32) -> Option<(u32, u32)> {
    let group = heads / kv_heads;
    if kv_heads >= ranks {
        let each = kv_heads.div_ceil(ranks);
        return ((ranks - 1) * each < kv_heads).then_some((each * group, each));
    }
    let sharers = ranks / kv_heads;
    let each = group.div_ceil(sharers);
    (ranks.is_multiple_of(kv_heads) && (sharers - 1) * each < group).then_some((each, 1))
}

fn refuse<T>(step: usize, detail: String) -> Result<T> {
    Err(Error::InvalidProgram { step, detail: format!("for the monokernel: {detail}") })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mono::shapes::model;

    #[test]
    fn shared_kv_heads_are_counted_on_every_machine() {
        let dims = |heads, kv_heads, lanes| Dims {
            hidden: 1024,
            lanes,
            heads,
            kv_heads,
            head_dim: 128,
            ffn: 4096,
            vocab: 1000,
            eps: 1e-5,
            rope_interleaved: 0,
            head_mode: HeadMode::PerLane,
            kv_dtype: crate::abi::Dtype::F16,
            max_positions: 4096,
            slots: 1,
            columns: 2,
            group_layers: [3, 1],
            group_pages: [1, 1],
        };
        // Keys and values of 64 positions of one head in three layers, as halves.
        let one = 3 * 2 * 64 * 128 * 2;
        for (heads, kv_heads, lanes, ranks, held) in [
            (16, 2, 1, 1, 2),
            (16, 2, 1, 2, 2),
            (16, 2, 1, 4, 4),
            (16, 2, 1, 8, 8),
            (32, 8, 1, 8, 8),
            // Three, three, and room for three on the last.
            (16, 8, 1, 3, 9),
            // Lanes are never shared.
            (4, 2, 8, 8, 16),
        ] {
            let dims = dims(heads, kv_heads, lanes);
            let got = page_bytes(&dims, 0, ranks);
            assert_eq!(got, held * one, "{heads}/{kv_heads} in {lanes} lanes on {ranks}");
            assert_eq!(page_bytes(&dims, 1, ranks), got / 3);
        }
        // Heads are padded to whole tiles.
        let narrow = Dims { head_dim: 40, ..dims(16, 2, 1) };
        assert_eq!(page_bytes(&narrow, 0, 8), 8 * one / 2);
    }

    #[test]
    fn words_for_other_lanes_have_as_many_places_as_delays_ask_for() {
        let with = |delay: &dyn Fn(u32) -> i32| {
            let model = model("2b");
            let layer = |n| Layer { delay: [delay(n); 2], ..model.layer[0] };
            Model { layer: (0..model.layers()).map(layer).collect(), ..model.clone() }.turns_other()
        };
        assert_eq!(model("8b").turns_other(), 1, "there is no other lane");
        assert_eq!(with(&|_| 0), 1);
        assert_eq!(with(&|_| 1), 3);
        assert_eq!(with(&|_| 2), 5);
        assert_eq!(with(&|n| if n < 3 { -1 } else { 3 }), 7);
        assert_eq!(with(&|n| if n == 14 { 2 } else { -1 }), 3, "12's words are read in layer 14");
        assert_eq!(with(&|n| if n == 14 { 14 } else { -1 }), 15, "and here layer 0's");
    }

    #[test]
    fn heads_are_dealt_out_whole_in_parts_or_not_at_all() {
        for (heads, kv_heads, ranks, wanted) in [
            (32, 8, 8, Some((4, 1))),
            (32, 8, 2, Some((16, 4))),
            (16, 8, 3, Some((6, 3))),
            (16, 2, 8, Some((2, 1))),
            (6, 2, 4, Some((2, 1))),
            (28, 4, 8, Some((4, 1))),
            (4, 1, 3, None),
            (4, 2, 8, None),
            (6, 3, 4, None),
            (12, 6, 4, None),
        ] {
            assert_eq!(dealt(heads, kv_heads, ranks), wanted, "{heads}/{kv_heads} on {ranks}");
            let Some((each, kv_each)) = wanted else { continue };
            let part = Model { sliced: true, ranks, ..model("1b") };
            let heads_all = [heads, kv_heads];
            let class = Class { heads: each, kv_heads: kv_each, heads_all, ..part.classes[0] };
            let mut seen = Vec::new();
            for rank in 0..ranks {
                let [query, kv] = part.heads_of(rank, &class);
                assert!(!query.is_empty() && query.len() <= each as usize, "{query:?}");
                assert!(!kv.is_empty() && kv.len() <= kv_each as usize, "{kv:?}");
                // A query head's kv head has the place that the kernel looks for it in.
                for (place, head) in query.clone().enumerate() {
                    let at = kv.start + place as u32 / (each / kv_each);
                    assert_eq!(at, head / (heads / kv_heads), "head {head} of rank {rank}");
                }
                seen.extend(query);
            }
            assert!(seen.into_iter().eq(0..heads), "{heads}/{kv_heads} on {ranks}");
        }
    }
}
