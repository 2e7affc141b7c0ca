//! What measurements decide, by GPU: sizes of stages, bytes in flight, prefetch depths, and the
//! stream lengths at which one way of waiting is sooner than another. No size of a model is in
//! here, and no result depends on any of it but in speed.

use crate::machine::MachineInfo;

/// A row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tuning {
    /// The GPU that it was measured on.
    pub name: &'static str,
    /// Blocks that split the pages of one kv head, at most, where every block combines all partials
    /// of its lane: more partials cost registers.
    pub most_splits: u32,
    /// The same where partials are combined by owners, which leaves each block few words.
    pub most_splits_by_owners: u32,
    /// The same of latents, whose partials are each combined by several threads.
    pub most_splits_latents: u32,
    /// Bytes of a block's stream from which on the weights, not the exchange, make the step's time:
    /// those of a whole 2B are, those of a quarter of an 8B are not.
    pub long_stream_bytes: u64,
    /// The same where weights have 4 bits, since decoding takes part of the time.
    pub long_stream_bytes_4_bits: u64,
    /// Below which the words of a step are waited for more than its weights.
    pub short_stream_bytes: u64,
    /// Below which a step is hardly more than its exchanges.
    pub shortest_stream_bytes: u64,
    /// Widest vectors that all blocks may ask for again and again.
    pub narrow: u32,
    /// Bytes of a ring's slot to choose from, with twelve warps and with eight.
    pub slots_12_warps: &'static [u32],
    /// See above.
    pub slots_8_warps: &'static [u32],
    /// With eight and weights of 4 bits: four units of a warp, and their scales.
    pub slots_4_bits: &'static [u32],
    /// The same beside experts, whose other matrices are halves: eight of them fit, or nearly.
    pub slots_experts_4_bits: &'static [u32],
    /// Weight bytes in flight of a block: of the shortest streams, ...
    pub in_flight_shortest: u32,
    /// ... with twelve warps, ...
    pub in_flight_12_warps: u32,
    /// ... with eight and a residual narrower than `wide_hidden`, ...
    pub in_flight_narrow: u32,
    /// ... and with a wide one.
    pub in_flight_wide: u32,
    /// See above.
    pub wide_hidden: u32,
    /// Stages in registers before a product's vector is there, where the stream is not long.
    pub ahead_short: u32,
    /// Nanoseconds before the first look at a vector's words: where all are asked for at once, ...
    pub poll_delay_retries_ns: u32,
    /// ... and where one of them is waited for first.
    pub poll_delay_ns: u32,
    /// Stages of different sizes stand side by side in every kernel's ring: for tests.
    pub variable_stages_always: bool,
    /// Bytes of the ring, at most; rounded up to two slots. For tests.
    pub ring_most: u32,
}

/// One H200 (benches/gpu/HISTORY.md has what each number gave).
pub const H200: Tuning = Tuning {
    name: "H200",
    most_splits: 8,
    most_splits_by_owners: 16,
    most_splits_latents: 64,
    long_stream_bytes: 32 << 20,
    long_stream_bytes_4_bits: 16 << 20,
    short_stream_bytes: 12 << 20,
    shortest_stream_bytes: 6 << 20,
    narrow: 4096,
    slots_12_warps: &[18 << 10, 24 << 10],
    slots_8_warps: &[16 << 10],
    slots_4_bits: &[20 << 10],
    slots_experts_4_bits: &[20 << 10, 43 << 9],
    in_flight_shortest: 36 << 10,
    in_flight_12_warps: 72 << 10,
    in_flight_narrow: 56 << 10,
    in_flight_wide: 144 << 10,
    wide_hidden: 4096,
    ahead_short: 4,
    poll_delay_retries_ns: 100,
    poll_delay_ns: 250,
    variable_stages_always: false,
    ring_most: u32::MAX,
};

/// All rows. The first one is for every GPU that has none: nobody has measured those.
const ROWS: &[Tuning] = &[H200];

impl Tuning {
    /// Bytes of a block's stream from which on decoding and weights make the step's time.
    pub const fn long_stream(&self, has_4_bits: bool) -> u64 {
        if has_4_bits {
            self.long_stream_bytes_4_bits
        } else {
            self.long_stream_bytes
        }
    }

    /// The row of a machine.
    pub fn of(machine: &MachineInfo) -> Self {
        *ROWS.iter().find(|row| machine.model.contains(row.name)).unwrap_or(&ROWS[0])
    }
}
