//! Several residual streams, which modules take from and give to by numbers that the streams make
//! themselves: their sizes, and where a block has what those numbers are made by.

use crate::abi::{HyperIn, NONE};

/// Residual streams.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Hyper {
    /// How many.
    pub streams: u32,
    /// Beside what is divided by, and on what is taken.
    pub eps: f32,
    /// Rounds of the numbers by which streams join.
    pub rounds: u32,
    /// What the head takes by.
    pub head: HyperTensors,
}

/// Most streams: what a thread owns of all of them is in registers.
pub const MOST_STREAMS: u32 = 4;

/// What a module takes of the streams by, or [`NONE`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HyperTensors {
    /// Of all streams.
    pub weight: u32,
    /// On its products.
    pub scale: u32,
    /// Beside them.
    pub base: u32,
}

impl HyperTensors {
    /// Of a residual that is one stream.
    pub const NONE: Self = Self { weight: NONE, scale: NONE, base: NONE };

    /// Of a step.
    pub const fn of(step: &HyperIn) -> Self {
        Self { weight: step.weight, scale: step.scale, base: step.base }
    }
}

impl Hyper {
    /// Products of the streams before a module, or before the head.
    pub const fn rows(&self, joins: bool) -> u32 {
        if joins {
            self.streams * (2 + self.streams)
        } else {
            self.streams
        }
    }

    /// Words of a block of one column: its part of each product, and of the sum of squares.
    pub const fn words(&self) -> u32 {
        self.rows(true) + 1
    }

    /// Numbers of a module: its rows, block by block, then what is beside them: base and scale.
    /// `owned`: rows of the residual that all blocks have.
    pub const fn numbers(&self, owned: u32, joins: bool) -> u32 {
        let beside = self.rows(joins) + if joins { 3 } else { 1 };
        self.beside_at(owned, joins) + beside
    }

    /// Where the latter begin.
    pub const fn beside_at(&self, owned: u32, joins: bool) -> u32 {
        self.rows(joins) * self.streams * owned
    }

    /// Floats of the streams' rows that a block owns.
    pub const fn stream_floats(&self, residual: u32, columns: u32) -> u32 {
        self.streams * columns * residual
    }

    /// Of the numbers that a module's output joins by.
    pub const fn mix_floats(&self, columns: u32) -> u32 {
        columns * self.streams * (1 + self.streams)
    }

    /// Of the sums of all blocks' words.
    pub const fn sum_floats(&self, columns: u32) -> u32 {
        columns * self.words()
    }

    /// Floats of a block's shared memory.
    pub const fn floats(&self, residual: u32, columns: u32) -> u32 {
        self.stream_floats(residual, columns) + self.mix_floats(columns) + self.sum_floats(columns)
    }
}
