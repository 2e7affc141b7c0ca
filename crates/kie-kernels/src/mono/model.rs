//! A program read as what the monokernel runs: layers that are all alike but for numbers. Anything
//! else is refused here, before a byte is allocated.

use std::ops::Range;

use crate::abi::{
    GateUp, HeadMode, Heads, Join, PageGroup, Program, Project, Qkv, Rotary, StateKind, Step,
    StepKind, Tensor, NONE, PAGE,
};
use crate::error::{Error, Result};
use crate::shard::{dealt, heads_of, indivisible, state_of};

/// Sizes of one lane, and where its tensors are.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// Layers.
    pub layers: u32,
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
    /// Query heads.
    pub heads: u32,
    /// Key/value heads.
    pub kv_heads: u32,
    /// Features of a head.
    pub head_dim: u32,
    /// MLP width.
    pub ffn: u32,
    /// Rows of one head matrix: of the vocabulary, or of a lane's slice of it.
    pub vocab: u32,
    /// How the head combines lanes.
    pub head_mode: HeadMode,
    /// Rotary pairs are neighbours in the checkpoint.
    pub interleaved: bool,
    /// Epsilon of the norms.
    pub eps: f32,
    /// Rows of a norm's scale: 1, or one a lane.
    pub norm_lanes: u32,
    /// q and k heads have norms.
    pub head_norm: bool,
    /// q, k and v have biases.
    pub bias: bool,
    /// What differs from layer to layer.
    pub layer: Vec<Layer>,
    /// Query heads, kv heads and MLP width of the whole program, where lanes are slices of it.
    pub whole: [u32; 3],
    /// Tensor of the rotary frequencies.
    pub rope: u32,
    /// Tensor of the embedding table.
    pub embed: u32,
    /// Tensor of the head.
    pub head: u32,
    /// Tensor of the final norm's scale.
    pub final_norm: u32,
}

/// One layer: tensors by index, and numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
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
    pub norms: [u32; 2],
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
        let layers = self.layers as usize;
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
        let (d, steps) = (&program.dims, &program.steps);
        let count = steps.len().saturating_sub(3);
        let five = steps.get(1..=count).unwrap_or_default();
        let layers: Vec<Five<'_>> =
            five.chunks(5).enumerate().map(|(at, s)| Five::of(s, at)).collect::<Result<_>>()?;
        let (embed, head) = match (steps.first().map(|s| &s.kind), steps.get(count + 1..)) {
            (
                Some(StepKind::Embed(embed)),
                Some([Step { kind: StepKind::Head(head), .. }, Step { kind: last, .. }]),
            ) if matches!(last, StepKind::Sample(_)) => (embed, head),
            (_, _) => return refuse(count + 1, "no embedding, or no head behind it".to_owned()),
        };
        let Some(first) = layers.first() else {
            return refuse(1, "no layers".to_owned());
        };
        alike(&layers, program)?;
        let Heads { query, kv, dim } = first.qkv.heads;
        let ffn = first.gate_up.ffn;
        let rows_of = |t: u32| program.tensors.get(t as usize).map_or(1, |t: &Tensor| t.rows);
        let sliced = d.lanes == 1 && ranks > 1;
        let lanes_all = if sliced { ranks } else { d.lanes };
        let per_lane = d.lanes == 1 || head.mode == HeadMode::PerLane;
        let each = if sliced { dealt(query, kv, ranks) } else { Some((query, kv)) };
        let Some((heads, kv_heads)) = each.filter(|_| lanes_all.is_multiple_of(ranks)) else {
            return Err(indivisible(d.lanes, query, kv, ranks));
        };
        let model = Self {
            layers: layers.len() as u32,
            ranks,
            lanes: lanes_all / ranks,
            sliced,
            vocab_all: d.vocab,
            hidden: d.hidden,
            heads,
            kv_heads,
            head_dim: dim,
            ffn: if sliced { ffn.div_ceil(ranks) } else { ffn },
            vocab: if per_lane { d.vocab.div_ceil(lanes_all) } else { d.vocab },
            head_mode: if per_lane { HeadMode::PerLane } else { head.mode },
            interleaved: first.qkv.rotary.interleaved,
            eps: d.eps,
            norm_lanes: rows_of(first.qkv.norm),
            head_norm: first.qkv.head_norms.is_some(),
            bias: first.qkv.biases.is_some(),
            layer: layers.iter().map(|five| five.layer(sliced)).collect(),
            whole: [query, kv, ffn],
            rope: first.qkv.rotary.frequencies,
            embed: embed.table,
            head: head.weight,
            final_norm: head.norm,
        };
        model.check(rows_of)?;
        Ok(model)
    }

    /// Which of the program's query and kv heads a machine's lane has, of `self.heads` and
    /// `self.kv_heads` places; the last places may stay empty.
    pub fn heads_of(&self, rank: u32) -> [Range<u32>; 2] {
        if !self.sliced {
            return [0..self.heads, 0..self.kv_heads];
        }
        let [heads, kv_heads, _] = self.whole;
        heads_of(rank, self.ranks, heads, kv_heads)
    }

    /// Which part of the program a machine has, in words.
    pub fn part(&self, rank: u32) -> String {
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
            return format!("lanes {} of {}", span(lanes), self.lanes_all());
        }
        let [query, kv] = self.heads_of(rank);
        let [heads, kv_heads, ffn] = self.whole;
        let end = |rank: u32, each: u32, all: u32| (rank * each).min(all);
        let rows = |each, all| span(end(rank, each, all)..end(rank + 1, each, all));
        format!(
            "heads {} of {}, kv heads {} of {}, features {} of {}, ids {} of {}",
            span(query),
            heads,
            span(kv),
            kv_heads,
            rows(self.ffn, ffn),
            ffn,
            rows(self.vocab, self.vocab_all),
            self.vocab_all
        )
    }

    /// What the kernel takes for granted of norms.
    fn check(&self, rows_of: impl Fn(u32) -> u32) -> Result<()> {
        for (at, layer) in self.layer.iter().enumerate() {
            if layer.norms.iter().any(|n| rows_of(*n) != self.norm_lanes) {
                return refuse(1 + 5 * at, "norms that differ in kind".to_owned());
            }
            if layer.head_norms.iter().any(|n| *n != NONE && rows_of(*n) != 1) {
                return refuse(1 + 5 * at, "norms of heads in several rows".to_owned());
            }
        }
        if rows_of(self.final_norm) != self.norm_lanes {
            return refuse(5 * self.layer.len() + 1, "norms that differ in kind".to_owned());
        }
        Ok(())
    }
}

/// The steps of one layer.
struct Five<'a> {
    qkv: &'a Qkv,
    window: Option<u32>,
    output: &'a Project,
    gate_up: &'a GateUp,
    down: &'a Project,
}

impl<'a> Five<'a> {
    fn of(steps: &'a [Step], layer: usize) -> Result<Self> {
        let kinds: Vec<&StepKind> = steps.iter().map(|step| &step.kind).collect();
        match kinds[..] {
            [StepKind::Qkv(qkv), StepKind::Attend(attend), StepKind::Project(output), StepKind::GateUp(gate_up), StepKind::Project(down)] => {
                Ok(Self { qkv, window: attend.window, output, gate_up, down })
            }
            _ => refuse(1 + 5 * layer, "not in the order of a transformer's layers".to_owned()),
        }
    }

    fn layer(&self, sliced: bool) -> Layer {
        let Self { qkv, window, output, gate_up, down } = self;
        // The lane's own factor, and the delay of the others.
        let join = |project: &Project| match project.join {
            Join::Sum => (1.0, 0),
            Join::Own { factor } => (factor, if sliced { 0 } else { -1 }),
            Join::Delayed { layers, .. } => (1.0, if sliced { 0 } else { layers as i32 }),
        };
        let joins = [join(output), join(down)];
        let shares = |p: &Project| sliced || p.keep.is_some() || p.join == Join::Sum;
        Layer {
            qkv: qkv.weights,
            biases: qkv.biases.unwrap_or([NONE; 3]),
            head_norms: qkv.head_norms.unwrap_or([NONE; 2]),
            outputs: [output.weight, down.weight],
            gate_up: gate_up.weights,
            norms: [qkv.norm, gate_up.norm],
            window: window.unwrap_or(0),
            pool: [qkv.state.group, qkv.state.layer],
            own: joins.map(|(own, _)| own),
            delay: joins.map(|(_, delay)| delay),
            shares: [shares(output), shares(down)],
        }
    }
}

/// Layers have the same heads, widths, tables and kinds of operands, and their pages lie in the two
/// pools that the kernel has: one that sees everything, one that is windowed.
fn alike(layers: &[Five<'_>], program: &Program) -> Result<()> {
    let first = &layers[0];
    for (at, layer) in layers.iter().enumerate() {
        let (qkv, step) = (layer.qkv, 1 + 5 * at);
        let differ = |what: &str| refuse(step, format!("{what} differ from layer to layer"));
        let Rotary { frequencies, interleaved } = qkv.rotary;
        if qkv.heads != first.qkv.heads {
            return differ("heads");
        }
        if (frequencies, interleaved)
            != (first.qkv.rotary.frequencies, first.qkv.rotary.interleaved)
        {
            return differ("rotary embeddings");
        }
        if qkv.biases.is_some() != first.qkv.biases.is_some()
            || qkv.head_norms.is_some() != first.qkv.head_norms.is_some()
        {
            return differ("biases or head norms");
        }
        if layer.gate_up.ffn != first.gate_up.ffn {
            return refuse(step + 3, "widths of the MLP differ from layer to layer".to_owned());
        }
    }
    let windowed: Vec<bool> = program.groups.iter().map(|g| g.window.is_some()).collect();
    if !matches!(windowed[..], [false] | [false, true]) {
        return refuse(1, format!("{} page groups", windowed.len()));
    }
    Ok(())
}

/// Bytes of one KV page of a group on all of so many machines, each of which has whole kv heads
/// with what that pads, in float16; heads that do not divide are refused later.
pub fn page_bytes(group: &PageGroup, ranks: u32) -> u64 {
    let StateKind::KeysValues { lanes, kv_heads, head_dim, .. } = state_of(group, ranks);
    let width = u64::from(lanes * kv_heads) * u64::from(head_dim.next_multiple_of(32));
    u64::from(group.layers) * width * 2 * PAGE as u64 * 2
}

fn refuse<T>(step: usize, detail: String) -> Result<T> {
    Err(Error::InvalidProgram { step, detail: format!("for the monokernel: {detail}") })
}

#[cfg(test)]
mod tests {
    use super::super::shapes::model;
    use super::*;

    #[test]
    fn pages_are_halves_in_whole_tiles() {
        let group = |head_dim| PageGroup {
            state: StateKind::KeysValues {
                dtype: crate::abi::Dtype::F32,
                lanes: 1,
                kv_heads: 2,
                head_dim,
            },
            layers: 3,
            window: None,
            pages: 1,
        };
        // Keys and values of 64 positions of one head in three layers, as halves.
        let one = 3 * 2 * 64 * 128 * 2;
        assert_eq!(page_bytes(&group(128), 1), 2 * one);
        assert_eq!(page_bytes(&group(128), 8), 8 * one);
        // Heads are padded to whole tiles.
        assert_eq!(page_bytes(&group(40), 8), 8 * one / 2);
    }

    #[test]
    fn words_for_other_lanes_have_as_many_places_as_delays_ask_for() {
        let with = |delay: &dyn Fn(u32) -> i32| {
            let model = model("2b");
            let layer = |n| Layer { delay: [delay(n); 2], ..model.layer[0] };
            Model { layer: (0..model.layers).map(layer).collect(), ..model.clone() }.turns_other()
        };
        assert_eq!(model("8b").turns_other(), 1, "there is no other lane");
        assert_eq!(with(&|_| 0), 1);
        assert_eq!(with(&|_| 1), 3);
        assert_eq!(with(&|_| 2), 5);
        assert_eq!(with(&|n| if n < 3 { -1 } else { 3 }), 7);
        assert_eq!(with(&|n| if n == 14 { 2 } else { -1 }), 3, "12's words are read in layer 14");
        assert_eq!(with(&|n| if n == 14 { 14 } else { -1 }), 15, "and here layer 0's");
    }
}
