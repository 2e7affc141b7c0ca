//! What is asked of the ring's slots.

/// Their bytes.
#[derive(Debug, Clone, Copy)]
pub(super) enum Slots {
    /// As machines have them.
    Usual,
    /// At least so many: stages of many rows need them, and fewer slots fit.
    AtLeast(u32),
    /// So many, where vectors leave no room for others, and whether tables of pages have a place
    /// beside them. The head goes in shorter passes.
    Tight(u32, bool),
}

impl Slots {
    /// Those to try, one after another.
    pub(super) const ALL: [Self; 4] =
        [Self::Usual, Self::AtLeast(24 << 10), Self::AtLeast(32 << 10), Self::AtLeast(48 << 10)];
    /// The same where none of these does: behind those for 64 KB a block such as stages of many
    /// rows need, of few multiprocessors with 99 KB.
    pub(super) const TIGHT: [Self; 14] = [
        Self::Tight(8 << 10, true),
        Self::Tight(7 << 10, true),
        Self::Tight(8 << 10, false),
        Self::Tight(7 << 10, false),
        Self::Tight(6 << 10, false),
        Self::Tight(12 << 10, true),
        Self::Tight(14 << 10, true),
        Self::Tight(16 << 10, true),
        Self::Tight(18 << 10, true),
        Self::Tight(20 << 10, true),
        Self::Tight(22 << 10, true),
        Self::Tight(24 << 10, true),
        Self::Tight(26 << 10, true),
        Self::Tight(28 << 10, true),
    ];

    /// Bytes of one.
    pub(super) fn bytes(self, usual: impl Fn() -> u32) -> u32 {
        match self {
            Self::Usual => usual(),
            Self::AtLeast(least) => usual().max(least),
            Self::Tight(bytes, _) => bytes,
        }
    }

    /// Which shared memory is asked for: about what is needed, or what is at least.
    pub(super) fn asked(self, about: impl Fn() -> u32, least: impl Fn() -> u32) -> u32 {
        match self {
            Self::AtLeast(_) => about(),
            Self::Usual | Self::Tight(..) => least(),
        }
    }

    /// Whether tables of pages may stand in shared memory.
    pub(super) const fn table(self) -> bool {
        !matches!(self, Self::Tight(_, false))
    }

    /// Rows of the head that a pass may take: a tile for each warp, as far as a stage has room.
    pub(super) fn pass_rows(self, warps: u32) -> u32 {
        match self {
            Self::Usual | Self::AtLeast(_) => 16 * warps,
            Self::Tight(bytes, _) => (16 * warps).min(bytes / 1024 * 16),
        }
    }
}
