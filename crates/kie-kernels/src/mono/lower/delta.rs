//! The gated delta rule on a machine: how a lane's heads of v are cut into units, each a run of
//! columns of one head's S, which one block reads and writes once a token (ops/delta.h). A unit
//! keeps the last inputs of its channels, too: those of q and k, which the units of a key head
//! share, each has for itself.

use crate::abi::{self, DeltaHeads, DeltaRule, NONE};

/// What a class has of its program's delta rule beside heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Delta {
    /// Features of a head of q and k.
    pub key_dim: u32,
    /// Taps of the convolution, the own position included.
    pub taps: u32,
}

/// Most taps: a thread keeps four earlier inputs of a channel.
const MOST_TAPS: u32 = 5;

impl Delta {
    /// Of a program's heads.
    pub const fn of(heads: DeltaHeads) -> Self {
        Self { key_dim: heads.key_dim, taps: heads.taps }
    }

    /// What the kernels have no code for.
    ///
    /// # Errors
    /// In words.
    pub fn known(&self) -> Result<(), String> {
        match self.taps {
            2..=MOST_TAPS => Ok(()),
            taps => Err(format!("a convolution of {taps} taps, 2 to {MOST_TAPS} wanted")),
        }
    }

    /// Rows of a key head with so many heads of v, padded to `value_dim`: q, k, then each head's v,
    /// then each head's z.
    pub const fn rows(&self, shared: u32, value_dim: u32) -> u32 {
        2 * self.key_dim + 2 * shared * value_dim
    }
}

/// Tensors of a layer's delta rule, or [`NONE`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tensors {
    /// b and a.
    pub gates: u32,
    /// Taps.
    pub conv: u32,
    /// A head's decay, ...
    pub decay: u32,
    /// ... its bias, ...
    pub bias: u32,
    /// ... and the scale of its output's norm.
    pub norm: u32,
}

impl Default for Tensors {
    fn default() -> Self {
        Self { gates: NONE, conv: NONE, decay: NONE, bias: NONE, norm: NONE }
    }
}

impl Tensors {
    /// Those that two steps name.
    pub const fn of(input: &abi::DeltaIn, rule: &DeltaRule) -> Self {
        let &DeltaRule { conv, decay, bias, norm, .. } = rule;
        Self { gates: input.weights[1], conv, decay, bias, norm }
    }
}

/// Numbers of S that a thread holds, at most.
const MOST_HELD: u32 = 32;

/// Columns of a unit from which on it pays to have fewer of them: what its channels of q and k need
/// is the same.
const LEAST_COLS: u32 = 8;

/// A unit: some columns of one head's S, on the threads of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unit {
    /// Columns, an even number.
    pub cols: u32,
    /// Units of a head of v.
    pub splits: u32,
    /// Neighbouring threads that share a column.
    pub lanes: u32,
    /// Numbers of a column that a thread has, whole quads.
    pub held: u32,
    /// Columns that a thread takes part in.
    pub turns: u32,
    /// Threads that hold any.
    pub threads: u32,
    /// Channels of the convolution: q, k, the own columns of v.
    pub channels: u32,
    /// Bytes kept of a sequence: S as threads hold it, then four earlier inputs a channel.
    pub bytes: u32,
}

impl Unit {
    fn new(key_dim: u32, value_dim: u32, splits: u32, threads: u32) -> Self {
        let cols = value_dim / splits;
        let lanes = 1 << (threads / cols).clamp(1, 32).ilog2();
        let held = key_dim.div_ceil(lanes).next_multiple_of(4);
        let turns = (cols * lanes).div_ceil(threads);
        let (threads, channels) = (threads.min(cols * lanes), 2 * key_dim + cols);
        let unit = Self { cols, splits, lanes, held, turns, threads, channels, bytes: 0 };
        Self { bytes: (unit.past() + 16 * channels).next_multiple_of(128), ..unit }
    }

    /// Where the earlier inputs begin.
    pub const fn past(&self) -> u32 {
        4 * self.turns * self.held * self.threads
    }

    /// Ways to cut a head, fewest units first.
    fn all(key_dim: u32, value_dim: u32, threads: u32) -> impl Iterator<Item = Self> {
        let even = (1..=value_dim / 2).filter(move |n| value_dim.is_multiple_of(2 * n));
        even.map(move |splits| Self::new(key_dim, value_dim, splits, threads))
            .filter(|unit| unit.held * unit.turns <= MOST_HELD)
    }

    /// Those that so many blocks may choose: a unit a block at most, or as few as there can be.
    fn choices(
        (heads, blocks): (u32, u32),
        key_dim: u32,
        value_dim: u32,
        threads: u32,
    ) -> impl Iterator<Item = Self> {
        let fits = move |unit: &Self| heads * unit.splits <= blocks && unit.cols >= LEAST_COLS;
        let all = Self::all(key_dim, value_dim, threads).enumerate();
        all.filter(move |(at, unit)| *at == 0 || fits(unit)).map(|(_, unit)| unit)
    }
}

/// What a class with a delta rule has of the partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaPartition {
    /// What a block does at a time.
    pub unit: Unit,
    /// Units of a lane: of the first head, the second ...
    pub units: u32,
    /// Those of a block; the last blocks may have none.
    pub each: u32,
}

/// How so many heads are cut for so many blocks of a lane; widths as they are padded. None where a
/// head cannot be.
pub fn unit(
    (heads, blocks): (u32, u32),
    delta: &Delta,
    value_dim: u32,
    threads: u32,
) -> Option<Unit> {
    Unit::choices((heads, blocks), delta.key_dim, value_dim, threads).last()
}

/// What a head of v is padded to.
pub const fn padded(value_dim: u32) -> u32 {
    value_dim.next_multiple_of(32)
}

impl DeltaPartition {
    /// Of so many heads, cut so, on so many blocks.
    pub const fn new(heads: u32, unit: Unit, blocks: u32) -> Self {
        let units = heads * unit.splits;
        Self { unit, units, each: units.div_ceil(blocks) }
    }

    /// Bytes that a layer keeps of a sequence on one machine.
    pub const fn state_bytes(&self) -> u32 {
        self.units * self.unit.bytes
    }

    /// Floats of shared memory: q and k padded, v and z of a unit, what warps leave of squares, and
    /// the output; then of each column b and a of the block's units, and of one the factors of all
    /// units.
    pub const fn floats(&self, warps: u32, columns: u32) -> u32 {
        self.factors_at(warps, columns) + self.units
    }

    /// Numbers of q, or of k, with the padding that the last threads' rows have.
    pub const fn key(&self) -> u32 {
        self.unit.lanes * self.unit.held
    }

    /// Where the squares that warps leave begin among [`DeltaPartition::floats`], ...
    pub const fn squares_at(&self) -> u32 {
        2 * self.key() + 2 * self.unit.cols
    }

    /// ... the output, ...
    pub const fn output_at(&self, warps: u32) -> u32 {
        self.squares_at() + 2 * warps
    }

    /// ... gates, ...
    pub const fn gates_at(&self, warps: u32) -> u32 {
        self.output_at(warps) + self.unit.cols
    }

    /// ... and factors.
    pub const fn factors_at(&self, warps: u32, columns: u32) -> u32 {
        self.gates_at(warps) + 2 * columns * self.each
    }
}

/// Bytes that a layer with such heads keeps of a sequence, at most: blocks may be fewer than the
/// machine has, and warps 8 or 12.
pub fn most_bytes(heads: DeltaHeads, blocks: u32) -> u64 {
    let (values, width) = (heads.values, padded(heads.value_dim));
    let of = |threads| {
        let all = Unit::choices((values, blocks), heads.key_dim, width, threads);
        all.map(|unit| u64::from(values * unit.splits) * u64::from(unit.bytes)).max()
    };
    [256, 384].into_iter().filter_map(of).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Platform;
    use crate::mono::lower::matrix::Matrix;
    use crate::mono::lower::partition::Partition;
    use crate::mono::lower::print::lowered;
    use crate::mono::lower::segments::{
        head_segment, layers, matrix_offset, page_bytes, segments, state_bytes, Source,
    };
    use crate::mono::shapes::{coder_next, nvidia};

    /// Each number of S has one thread, and a state is no larger than the planner was told.
    #[test]
    fn units_cover_heads_and_states_stay_below_what_is_planned() {
        for (values, key_dim, value_dim) in
            [(32, 128, 128), (8, 128, 128), (4, 8, 12), (2, 20, 64), (6, 256, 48), (1, 1024, 1024)]
        {
            let delta = Delta { key_dim, taps: 4 };
            let keys = values;
            let heads = DeltaHeads { keys, values, key_dim, value_dim, taps: 4 };
            for (blocks, threads) in [(132, 256), (128, 256), (99, 384), (304, 256), (4, 256)] {
                let width = padded(value_dim);
                let unit = unit((values, blocks), &delta, width, threads);
                let Some(unit) = unit else { panic!("{values} heads of {value_dim}") };
                assert_eq!(unit.cols * unit.splits, width);
                assert!(unit.lanes * unit.held >= key_dim && unit.held * unit.turns <= MOST_HELD);
                assert!(unit.turns * unit.threads >= unit.cols * unit.lanes);
                let bytes = u64::from(values * unit.splits) * u64::from(unit.bytes);
                assert!(bytes <= most_bytes(heads, blocks), "{unit:?}");
            }
        }
        let large = Delta { key_dim: 128, taps: 4 };
        let of = |heads| unit((heads, 132), &large, 128, 256).map(|u| (u.cols, u.lanes, u.held));
        assert_eq!([of(32), of(8)], [Some((32, 8, 16)), Some((8, 32, 4))], "Qwen3-Next, one, four");
    }

    /// Qwen3-Coder-Next: what passes through the ring of either class, and what a sequence keeps.
    #[test]
    fn gates_stand_behind_the_input_and_states_have_a_pool() {
        for ranks in [1, 4] {
            let model = coder_next(ranks);
            let partition = Partition::new(&model, &nvidia(), 4096).expect("it fits");
            let all = segments(&model, &partition);
            let mut offset = 0;
            for segment in all.iter().filter(|s| s.source == Source::Fixed) {
                assert_eq!(segment.offset, offset, "{segment:?}");
                offset += u64::from(segment.stages) * u64::from(segment.bytes);
            }
            assert_eq!(offset, partition.stream_bytes(&model));
            assert_eq!(all[head_segment(&model, &partition) as usize].layer, model.layers());
            for (layer, of) in layers(&model, &partition).iter().enumerate() {
                let its: Vec<_> = all.iter().filter(|s| s.layer == layer as u32).collect();
                assert_eq!((its[0].offset, its[1].source), (of.stream, Source::Pages));
                let third = if layer % 4 < 3 { Matrix::Gates } else { Matrix::Output };
                let offset = matrix_offset(&partition, of.kind.into(), third);
                assert_eq!(its[2].offset, of.stream + offset, "layer {layer}");
            }
            let delta = partition.classes[0].delta.expect("the first class has one");
            let bytes = page_bytes(&model, &partition)[1];
            assert_eq!(bytes, 36 * delta.state_bytes());
            assert_eq!(state_bytes(&model, &partition), u64::from(bytes));
            let text = lowered(&model, &partition, Platform::Cuda).expect("it fits");
            let units = format!("{} units of {} columns", delta.units, delta.unit.cols);
            assert!(text.contains("class 0 Gates") && text.contains(&units), "{text}");
        }
    }
}
