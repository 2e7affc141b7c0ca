//! What steps of several kinds refer to.

/// A rotary embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rotary {
    /// float32 `[2, turned / 2]`: radians a position of each pair, then what its cos and sin are
    /// multiplied by. `turned` features of a head turn, the first ones.
    pub table: u32,
    /// Pairs are (2j, 2j+1); otherwise (j, j + turned/2).
    pub interleaved: bool,
}

/// A layer's place in the pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateAt {
    /// Index into [`super::Program::groups`].
    pub group: u32,
    /// The layer's number inside the group.
    pub layer: u32,
}
