//! The operations and number formats, with what follows from them and nothing else.

use serde::{Deserialize, Serialize};

/// What the ranks do together. A *slice* is what one rank gives to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Op {
    /// Every rank gets the sum of all.
    AllReduce,
    /// Rank r gets slice r of the sum.
    ReduceScatter,
    /// Every rank gets all, one after another.
    AllGather,
    /// Every rank gets the root's.
    Broadcast,
    /// Rank r gets slice r of each.
    AllToAll,
    /// Nothing moves; no rank leaves before all have come.
    Barrier,
}

impl Op {
    /// All of them, in the kernel's order.
    pub const ALL: [Self; 6] = [
        Self::AllReduce,
        Self::ReduceScatter,
        Self::AllGather,
        Self::Broadcast,
        Self::AllToAll,
        Self::Barrier,
    ];

    /// As people write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all-reduce",
            Self::ReduceScatter => "reduce-scatter",
            Self::AllGather => "all-gather",
            Self::Broadcast => "broadcast",
            Self::AllToAll => "all-to-all",
            Self::Barrier => "barrier",
        }
    }

    /// From its name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|op| op.name() == name)
    }

    /// Whether it adds numbers up; the others move whatever they are given.
    pub fn adds(self) -> bool {
        match self {
            Self::AllReduce | Self::ReduceScatter => true,
            Self::AllGather | Self::Broadcast | Self::AllToAll | Self::Barrier => false,
        }
    }

    /// Whether it can be asked of a format: bytes of no known kind are moved, never added.
    pub fn takes(self, dtype: Dtype) -> bool {
        !self.adds() || dtype != Dtype::U8
    }

    /// The formats that it can be asked of.
    pub fn dtypes(self) -> impl Iterator<Item = Dtype> {
        Dtype::ALL.into_iter().filter(move |dtype| self.takes(*dtype))
    }

    /// Slices in a rank's input.
    pub fn slices_in(self, ranks: usize) -> usize {
        match self {
            Self::ReduceScatter | Self::AllToAll => ranks,
            Self::AllReduce | Self::AllGather | Self::Broadcast => 1,
            Self::Barrier => 0,
        }
    }

    /// Slices in a rank's output.
    pub fn slices_out(self, ranks: usize) -> usize {
        match self {
            Self::AllGather | Self::AllToAll => ranks,
            Self::AllReduce | Self::ReduceScatter | Self::Broadcast => 1,
            Self::Barrier => 0,
        }
    }

    /// Slices in the message, by which operations are compared: the larger of both sides.
    pub fn slices(self, ranks: usize) -> usize {
        self.slices_in(ranks).max(self.slices_out(ranks))
    }
}

/// How numbers are stored; sums are float32 whatever this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE half.
    F16,
    /// The upper half of a float.
    Bf16,
    /// IEEE single.
    F32,
    /// Bytes of anything else, such as 8-bit floats and integers: moved, never added.
    U8,
}

impl Dtype {
    /// All of them, in the kernel's order.
    pub const ALL: [Self; 4] = [Self::F16, Self::Bf16, Self::F32, Self::U8];

    /// As people write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
            Self::U8 => "u8",
        }
    }

    /// From its name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    /// Bytes of a number.
    pub fn bytes(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
            Self::U8 => 1,
        }
    }
}
