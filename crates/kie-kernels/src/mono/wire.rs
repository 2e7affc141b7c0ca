//! What crosses to a launch. Structures are defined here; the generated header has the kernel's
//! side of them ([`declarations`]).

use std::sync::atomic::Ordering::Acquire;

use super::lower::model::{FIRST_POOLS, MORE_POOLS};
use crate::lookup::DRAFT_MAX;
use crate::machine::Shared;

/// Most stop ids of a sequence.
pub const STOPS: usize = crate::abi::MAX_STOP_IDS;
/// Entries of a row's ring of tokens.
pub const RING: usize = 8192;
/// Token codes: nothing could be chosen, or a logit was not finite, ...
pub const FIRST_CODE: u32 = 0xffff_fff0;
/// ... or what the grammar allows was not there in time.
pub const LATE: u32 = 0xffff_fff1;

/// Bits of [`Sequence::wants`].
pub mod wants {
    /// The log-probability of the choice.
    pub const LOGPROB: u32 = 1;
    /// A bias on logits.
    pub const BIAS: u32 = 2;
    /// Penalties on what was seen.
    pub const PENALTIES: u32 = 4;
    /// `top_k`, `top_p` or `min_p`.
    pub const FILTER: u32 = 8;
    /// A mask for each token.
    pub const MASK: u32 = 16;
}

/// What the host may ask of a running kernel (control.h's `Order`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Order {
    /// Nothing.
    GoOn = 0,
    /// End at the next step barrier.
    Leave = 1,
    /// End now, whatever is waited for.
    Abort = 2,
}

/// Bytes of an entry of a row's ring of tokens.
pub const TOKEN_BYTES: usize = 24;

/// A token as the kernel emits it (emit.h).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EmittedToken {
    /// Its id, or a code.
    pub token: u32,
    /// Its log-probability, where it was asked for.
    pub logprob: f32,
    /// The low 40 bits of the device's time, in nanoseconds.
    pub t_ns: u64,
}

/// A row's next token behind the first `emitted`, if all of it is there.
pub fn next_token(out: &Shared, row: usize, emitted: u32) -> Option<EmittedToken> {
    let tag = emitted.wrapping_add(1);
    let at = (row * RING + emitted as usize % RING) * TOKEN_BYTES;
    let word = |n: usize| out.word64(at + 8 * n).load(Acquire);
    let (first, second, third) = (word(0), word(1), word(2));
    let whole = [first, second].iter().all(|w| (w >> 32) as u32 == tag)
        && (third >> 40) as u32 == tag & 0xff_ffff;
    let logprob = f32::from_bits(second as u32);
    whole.then_some(EmittedToken { token: first as u32, logprob, t_ns: third & 0xff_ffff_ffff })
}

/// Of the host's control words where those about drafts begin: before are order, heartbeat, whether
/// the heartbeat counts, and steps that the last launch made.
pub const DRAFTS_AT: usize = 64;
/// Bytes of a sequence's words about drafts: eight words of a [`Drafted`].
const DRAFTED_BYTES: usize = 32;
/// Bytes of the host's control words.
pub const CONTROL_BYTES: usize = DRAFTS_AT + 8 * DRAFTED_BYTES;
/// Steps in a row without a draft, behind which a launch ends.
pub const QUIET_STEPS: u32 = 8;
/// Numbers before the first id of a text (ops/lookup.h), and what they are where there is no id.
pub const TEXT_PAD: usize = 20;
/// See above.
pub const NO_ID: u32 = u32::MAX;

/// Numbers of a row's text, and of its prediction.
pub const fn text_row(pages: u32) -> usize {
    pages as usize * crate::abi::PAGE + TEXT_PAD + 12
}

/// What a launch tells of one sequence's drafts, besides what [`Drafting`] has.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Drafted {
    /// As the next launch is told.
    pub next: Drafting,
    /// Ids that were drafted, and those of them that were right.
    pub counts: [u32; 2],
    /// No draft was made for so many steps, at the end.
    pub quiet: u32,
}

impl Drafted {
    /// Of a column.
    pub fn read(control: &Shared, column: usize) -> Self {
        let word =
            |n: usize| control.word32(DRAFTS_AT + DRAFTED_BYTES * column + 4 * n).load(Acquire);
        let [reach, misses, rest, cursor, along] = [0, 1, 2, 3, 7].map(word);
        let next = Drafting { reach, misses, rest, cursor, along, ..Drafting::default() };
        Self { next, counts: [word(4), word(5)], quiet: word(6) }
    }
}

/// The platforms' own names of integers, which `platform.h` has as well: C++ lets them stand twice.
const TYPES: &str = "typedef unsigned char u8;\ntypedef unsigned int u32;\n\
                     typedef unsigned long long u64;\n";

/// A type as C++ declares a field of it.
trait Cpp {
    const NAME: &'static str;

    /// Behind the field's name.
    fn extent() -> String {
        String::new()
    }
}

macro_rules! cpp {
    ($($rust:ty = $name:literal),*) => {
        $(impl Cpp for $rust {
            const NAME: &'static str = $name;
        })*
    };
}

cpp!(u64 = "u64", u32 = "u32", u8 = "u8", i64 = "long", i32 = "int", f32 = "float");

impl<T: Cpp, const N: usize> Cpp for [T; N] {
    const NAME: &'static str = T::NAME;

    fn extent() -> String {
        format!("[{N}]{}", T::extent())
    }
}

/// Structures of both sides from one definition: the host's, plain numbers without padding, and the
/// text of the kernel's. Behind `=` stands what an address points to.
macro_rules! structures {
    ($($(#[$doc:meta])* $name:ident as $cpp:literal {
        $($(#[$about:meta])* $field:ident: $kind:ty $(= $pointer:literal)?,)*
    })*) => {
        $(
            $(#[$doc])*
            #[derive(Debug, Clone, Copy, PartialEq, Default)]
            #[repr(C)]
            pub struct $name {
                $($(#[$about])* pub $field: $kind,)*
            }

            impl Cpp for $name {
                const NAME: &'static str = $cpp;
            }

            const _: () = assert!(size_of::<$name>() == 0 $(+ size_of::<$kind>())*, "padding");
            // SAFETY: `repr(C)`; the fields, which are plain numbers, fill it (asserted above).
            unsafe impl Wire for $name {}
        )*

        /// The kernels' side of all of them.
        pub fn declarations() -> String {
            let mut out = TYPES.to_owned();
            $(
                out.push_str(concat!("struct ", $cpp, " {\n"));
                $({
                    let kind: &[&str] = &[$($pointer,)? <$kind as Cpp>::NAME];
                    let extent = <$kind as Cpp>::extent();
                    out.push_str(&format!("    {} {}{extent};\n", kind[0], stringify!($field)));
                })*
                let bytes = size_of::<$name>();
                out.push_str(&format!("}};\nstatic_assert(sizeof({}) == {bytes}, \"\");\n", $cpp));
            )*
            out
        }
    };
}

structures! {
    /// What differs between layers, and where each layer's own is: nothing multiplies a layer's
    /// number by a layer's size. Index 0 is attention's (input or output), 1 the mlp's.
    Layer as "Layer" {
        /// Bytes from the beginning of a block's weights.
        stream: u64,
        /// Positions a query sees, itself included; 0: all.
        window: u32,
        /// Bytes from the beginning of a page of the pool.
        page_at: u32,
        /// The first row of a norm's scale.
        norm: [u32; 2],
        /// Half pairs of head norms from the first layer's.
        head_norms: u32,
        /// Biases (floats) from the first layer's.
        biases: u32,
        /// Factor on the lane's own output.
        own: [f32; 2],
        /// Layers since the others' output that is added; -1: none is.
        delay: [i32; 2],
        /// Class.
        kind: u8,
        /// Which pages.
        pool: u8,
        /// Bit i: other lanes will want output i.
        shares: u8,
        /// Bit i: norm i has a row a lane.
        norm_lanes: u8,
        /// Sinks and biases (floats) from the first layer's (lower/extras.rs).
        extras: u32,
    }

    /// What passes through a block's ring, in order: of the block's weights `stages` stages of
    /// `bytes` bytes from `at` on, or the block's pages of a layer, as many as positions ask for.
    Segment as "Segment" {
        /// Bytes from the beginning of a block's weights.
        at: u64,
        /// How many stages.
        stages: u32,
        /// Bytes of each.
        bytes: u32,
        /// args.h's `SegmentSource`.
        source: u32,
        /// Of which layer.
        layer: u32,
    }

    /// Who gave up waiting; see [`ExpiredWait`].
    Record as "Record" {
        /// [`WRITTEN`] and what [`ExpiredWait::place`] tells.
        place: u32,
        /// Step of the launch.
        step: u32,
        /// Sequence number waited for.
        wanted: u32,
        /// Sequence number seen.
        seen: u32,
    }

    /// A sequence at work. Its tokens come from the prompt while there are any left, then from
    /// itself.
    Sequence as "Sequence" {
        /// Key of the random numbers.
        seed: u64,
        /// Row of page table, stop ids and token ring.
        row: u32,
        /// Position of the first step.
        position: u32,
        /// Token of the first step.
        token: u32,
        /// Tokens generated before.
        generated: u32,
        /// Tokens before which no stop id is chosen.
        min_new: u32,
        /// Position behind which the sequence ends.
        last: u32,
        /// Stop ids.
        stop_count: u32,
        /// Bits of [`wants`].
        wants: u32,
        /// 0 is greedy.
        temperature: f32,
        /// 1 keeps all.
        top_p: f32,
        /// 0 keeps all.
        min_p: f32,
        /// 1 is neutral.
        repetition: f32,
        /// 0 is neutral.
        presence: f32,
        /// 0 is neutral.
        frequency: f32,
        /// 0 keeps all.
        top_k: u32,
        /// Tokens that the row sent to the host before.
        emitted: u32,
        /// Bit 0: which of the row's recurrent states is written. Bit 1: the one before is a copy
        /// in a page; else, behind the first position, it is the row's other one.
        state: u32,
        /// 0.
        padding: u32,
    }

    /// What a sequence's next drafts depend on besides its text (`lookup.rs`), or those that the
    /// host has made of it.
    Drafting as "Drafting" {
        /// Ids of the next draft at most; 0: it has none.
        reach: u32,
        /// Drafts in a row of which nothing was right.
        misses: u32,
        /// Steps to go without one.
        rest: u32,
        /// What is expected next of the prediction.
        cursor: u32,
        /// Not 0: that is drafted without a match, too.
        along: u32,
        /// Ids of the prediction.
        prediction: u32,
        /// Drafts of the first step that the host gives; where it does, none are looked up.
        given: u32,
        /// These.
        ids: [u32; DRAFT_MAX],
        /// Of a layer that predicts further tokens, where those are what came: how many it is to
        /// predict behind them (ops/mtp.h).
        wanted: u32,
        /// 0.
        padding: u32,
    }

    /// The launch's one parameter. Addresses are the device's.
    Args as "DecodeArgs" {
        /// `[kBlocks][kStreamBytes]` weights in the order in which a block takes them.
        weights: u64 = "const u8*",
        /// `[vocabulary][kHidden / 2]` half pairs.
        embed: u64 = "const u32*",
        /// Rows of `[kHidden / 2]` half pairs: each layer's two, the final one.
        norms: u64 = "const u32*",
        /// Of layers that have them `[q, k][kHeadDim / 2]` half pairs.
        head_norms: u64 = "const u32*",
        /// Of layers that have them `[kLanes][kRowsQkv kBlocksPerLane]`.
        biases: u64 = "const float*",
        /// Of each class `[positions][kHeadDim / 2][cos, sin]`.
        rope: u64 = "const float*",
        /// `[kLayers]`.
        layers: u64 = "const Layer*",
        /// KV pages; see pages.h.
        pools: [u64; FIRST_POOLS] = "u8*",
        /// `[rows][kPools][kPagesMax]` physical page of each 64 positions.
        pages: u64 = "const u32*",
        /// `[rows][kStopsMax]`.
        stop_ids: u64 = "const u32*",
        /// `[rows][kVocabAll]`, or null.
        logit_bias: u64 = "const float*",
        /// `[rows][kVocabAll]` as ops/sample.h says, or null.
        counts: u64 = "u32*",
        /// `[kColumns][kVocabAll]` logits at work, or null.
        values: u64 = "float*",
        /// Tokens of a prompt, or null: see `count`.
        prompt: u64 = "const u32*",
        /// One step's segments.
        segments: u64 = "const Segment*",
        /// `[kBlocks][kIndexBytes]`: which of a stage's scales each row has.
        scale_index: u64 = "const u8*",
        /// `[kWords]` exchange.
        ll_words: u64 = "u64*",
        /// Not 0: everybody stops; as far from any rank's as the words are.
        abort_flag: u64 = "u64*",
        /// `[kBlocks][kRecordsBlock]` who gave up where.
        records: u64 = "Record*",
        /// `[steps][kColumns][kVocabAll]` out, or null.
        logits: u64 = "float*",
        /// `[steps + 1]` device time at each step's start, ns, or null.
        stamps: u64 = "u64*",
        /// `[kBlocks][16]` clock ticks a phase, or null.
        trace: u64 = "u64*",
        /// Host memory: `[rows][kRing][3]` tokens as they are generated; see emit.h.
        out: u64 = "u64*",
        /// Host memory: what the host asks for and the end; see control.h.
        control: u64 = "u32*",
        /// Words from this rank's exchange to each rank's, its own 0.
        peer_offset: [i64; 8],
        /// How long a wait lasts at most.
        budget_ns: u64,
        /// Not 0: the first step begins at the head, whose input is there
        /// (prefill/residual.h).
        at_head: u64,
        /// Of a page of each pool, all its layers.
        page_bytes: [u32; FIRST_POOLS],
        /// Segments of a step.
        segment_count: u32,
        /// Steps at most.
        steps: u32,
        /// Sequence number of the first.
        seqno: u32,
        /// Weight bytes in flight of a block.
        in_flight_bytes: u32,
        /// Least clock ticks between stages, per KiB of the earlier one; 0: none.
        pace: u32,
        /// Columns with a sequence that makes tokens, the first ones.
        live: u32,
        /// Positions of `prompt`, which the other columns take one after another.
        count: u32,
        /// Of this machine among those that run the model together.
        rank: u32,
        /// The sequence of each column.
        column: [Sequence; 8],
        /// Experts, of each layer that has them `[experts][kBlocks][kPieceBytes]`.
        experts: u64 = "const u8*",
        /// Sinks and biases of each layer.
        extras: u64 = "const float*",
        /// `[rows][2]` recurrent states, each like a page of their pool, then those behind drafts.
        states: u64 = "u8*",
        /// Host memory: `[rows][kMaskRow][kMaskAll]` words of what each row's next token may be,
        /// and those behind its drafts; see ops/mask.h.
        masks: u64 = "const u64*",
        /// `[rows][2][kTextRow]` texts and predictions (ops/lookup.h), or null.
        texts: u64 = "u32*",
        /// Drafts of each of the sequences.
        drafting: [Drafting; 8],
        /// Pools behind the first ones, and of a page of each, all its layers.
        more_pools: [u64; MORE_POOLS] = "u8*",
        /// See above.
        more_page_bytes: [u32; MORE_POOLS],
        /// How many of `states` stand before those behind drafts.
        draft_states: u64,
        /// Of a layer that predicts further tokens: words of the residual that the model's last
        /// launch left, `[columns][before_words]`, and which of these each column goes on from.
        before: u64 = "const u64*",
        /// See above.
        before_words: u64,
        /// See above.
        before_column: [u32; 8],
        /// Where the prefill kernel leaves the residual of a chunk's positions for that layer,
        /// `[positions][kWordsH]` behind the exchange, or null.
        residuals: u64 = "u64*",
        /// Not 0: tokens are to be predicted; else keys and values are all that is wanted.
        predicts: u64,
    }

    /// The prefill kernel's one parameter.
    PrefillArgs as "PrefillArgs" {
        /// All that a prompt's positions need of it; `records` for all blocks; `seqno`: of the
        /// decode launch behind this one, or 0 (prefill/residual.h, put_last).
        model: Args,
        /// `[count]`.
        tokens: u64 = "const u32*",
        /// `kPrefillScratch` bytes, 1,024-byte aligned, then the counters.
        scratch: u64 = "u8*",
        /// `kPrefillCounters`, all 0 at the launch.
        arrivals: u64 = "u64*",
        /// Bytes from this rank's scratch (and counters) to each rank's.
        peer_offset: [i64; 8],
        /// First position.
        first: u32,
        /// Positions.
        count: u32,
        /// First layer.
        from: u32,
        /// The layer behind the last; fewer than all only where the positions are one chunk.
        to: u32,
        /// Whose pages.
        row: u32,
        /// Of the grid, all resident.
        blocks: u32,
        /// As in [`Sequence`].
        state: u32,
        /// 0.
        padding: u32,
    }

    /// Where a stored row of a matrix goes (mono/pack.rs).
    PackPlace as "PackPlace" {
        /// Bytes from [`PackJob::to`]; [`PackPlace::NOWHERE`]'s is none.
        at: u64,
        /// Halves: bytes from the first tile of a unit to its second.
        half: u32,
        /// Codes: bytes from `at` to where a k-warp's first scale of the row stands, which may be
        /// below 0; [`PackPlace::NO_SCALE`] where another row of the block has the same scale and
        /// writes it.
        scale: u32,
    }

    /// Rows of one stored matrix. A stored row is `parts` parts of `real` numbers behind `skip`
    /// others; each part is padded to `padded` numbers.
    PackJob as "PackJob" {
        /// Where the first row's first number stands, or would; aligned as numbers.
        from: u64,
        /// Factors, from those of the first row's blocks on.
        scales: u64,
        /// Zero points likewise, signed bytes; 0: there are none.
        zeros: u64,
        /// A [`PackPlace`] a row.
        places: u64,
        /// What places count from.
        to: u64,
        /// Rows.
        rows: u32,
        /// Numbers of a whole row.
        cols: u32,
        /// The first row's number in its matrix.
        first: u32,
        /// pack.h's `PackFormat`.
        format: u32,
        /// Rows of a scale; 0: there are none.
        block_rows: u32,
        /// Columns of a scale; 0: there are none.
        block_cols: u32,
        /// Parts of a row.
        parts: u32,
        /// Numbers of a part.
        real: u32,
        /// The same with padding.
        padded: u32,
        /// Numbers before the first part.
        skip: u32,
        /// Bytes of 32 columns of all rows of a block; 0: halves in a row, no units.
        unit_bytes: u32,
        /// Warps that share columns.
        k_warps: u32,
        /// Units of a warp.
        pairs: u32,
        /// Units of a warp in a stage.
        chunk: u32,
        /// Names the matrix where a number is beyond float16.
        tag: u32,
        /// Numbers from row to row: of rows that are not there in full, fewer.
        stride: u32,
        /// ops/unit.h's `StoredBits`; not 0: the stored bits, and scales behind a stage's.
        codes: u32,
        /// Bytes of a stage.
        stage_bytes: u32,
        /// Units that share scales.
        span: u32,
        /// Scales of such a run.
        scale_rows: u32,
        /// Bytes of a scale of a stage.
        scale_bytes: u32,
        /// As it is stored: pack.h's `PackFormat`, or `kPackE8m0`.
        scale_format: u32,
        /// Not 0: rows are columns of what is packed, and there is a place a column.
        turned: u32,
        /// The first of those columns.
        k_first: u32,
    }

    /// The packing kernel's one parameter.
    PackArgs as "PackArgs" {
        /// `[count]`.
        jobs: u64 = "const PackJob*",
        /// Some `tag << 32 | row` with a number that float16 does not hold; or untouched.
        beyond: u64 = "u64*",
        /// Jobs.
        count: u32,
        /// Of the grid.
        blocks: u32,
        /// Of a block.
        threads: u32,
        /// 0.
        padding: u32,
    }

    /// The parameter of the kernel that times the host's answer.
    EchoArgs as "EchoArgs" {
        /// Host memory: `[ring][3]` tokens; see emit.h.
        out: u64 = "u64*",
        /// Host memory: tokens that the host has answered.
        control: u64 = "u32*",
        /// `[rounds]` clock ticks; behind them ticks and nanoseconds of all rounds together.
        times: u64 = "u64*",
        /// How long a round lasts at most.
        budget_ns: u64,
        /// Round trips.
        rounds: u32,
        /// Tokens of `out`.
        ring: u32,
    }

    /// The parameter of the kernels that look at a device itself.
    LitmusArgs as "LitmusArgs" {
        /// `[2][blocks][256]` numbers of this round and of the one before.
        data: u64 = "u32*",
        /// `[blocks]` rounds that were told of.
        words: u64 = "u64*",
        /// `[blocks]` not 0 where a number was not what it should be.
        wrong: u64 = "u64*",
        /// `[blocks][rounds][4096]` what is copied.
        from: u64 = "const u8*",
        /// How long a wait lasts at most.
        budget_ns: u64,
        /// Messages, or copies.
        rounds: u32,
        /// Blocks of the launch.
        blocks: u32,
    }

    /// The parameter of the kernels that read memory and nothing else.
    BandwidthArgs as "BandwidthArgs" {
        /// `[blocks][stages][16384]` what is read.
        data: u64 = "u8*",
        /// `[blocks][2]` when a block began and ended, in nanoseconds.
        times: u64 = "u64*",
        /// Stages of a block.
        stages: u32,
        /// How often a block reads its stages.
        passes: u32,
        /// Slots of the ring.
        slots: u32,
        /// Unused.
        padding: u32,
    }
}

/// Plain structures as the bytes that the device reads.
///
/// # Safety
/// Implementors are `repr(C)` without padding.
pub unsafe trait Wire: Sized {
    /// The bytes.
    fn as_bytes(&self) -> &[u8] {
        // SAFETY: no padding (the trait's promise), so every byte is initialised.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<Self>()) }
    }
}

/// Who gave up waiting, where: a [`Record`] that was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpiredWait {
    /// Block.
    pub block: u32,
    /// Layer and wait, as the kernel numbers them; above 16 bits 1 + the rank that was waited for,
    /// where it is known.
    pub place: u32,
    /// Step of the launch.
    pub step: u32,
    /// Sequence number waited for.
    pub wanted: u32,
    /// Sequence number seen.
    pub seen: u32,
}

/// Bytes of one record.
pub const RECORD_BYTES: usize = size_of::<Record>();
/// Set in the place of a record that was written.
pub const WRITTEN: u32 = 1 << 31;
/// Places from here on are the prefill kernel's.
const PREFILL: u32 = 0x1000;
/// Records of a block, one a warp.
pub const RECORDS_BLOCK: usize = 16;

impl ExpiredWait {
    /// What each block that gave up waited for, in the order of the work: the first is nearest to
    /// the cause.
    pub fn read(bytes: &[u8]) -> Vec<Self> {
        let word =
            |r: &[u8], at: usize| u32::from_le_bytes([r[at], r[at + 1], r[at + 2], r[at + 3]]);
        let all = bytes.chunks_exact(RECORD_BYTES).enumerate();
        let mut all: Vec<_> = all
            .filter(|(_, r)| word(r, 0) != 0)
            .map(|(warp, r)| Self {
                block: (warp / RECORDS_BLOCK) as u32,
                place: word(r, 0) & !WRITTEN,
                step: word(r, 4),
                wanted: word(r, 8),
                seen: word(r, 12),
            })
            .collect();
        // Of a block's warps the one that had come least far.
        all.sort_by_key(|lost| (lost.block, lost.turn()));
        all.dedup_by_key(|lost| lost.block);
        all.sort_by_key(|lost| (lost.turn(), lost.block));
        all
    }

    /// What comes first in the work has the smaller one: step, then place.
    pub fn turn(&self) -> (u32, u32) {
        // Layers of a prompt, behind which a launch of tokens may stand that waited in vain.
        if self.place & 0xffff >= PREFILL {
            return (0, self.step << 16 | self.place & 0xffff);
        }
        let place = match self.place & 0xffff {
            0xffe => 0x10_000,
            0xfff => 0x10_001,
            0xffa..=0xffd => 0x10_002,
            // The router's logits and the choice stand before activations, what a delta rule waits
            // for where attention's parts do.
            place => {
                let (layer, of) = (place & !15, place & 15);
                layer
                    | match of {
                        // So do latents and what is made of them before heads attend.
                        2..=7 => [4, 6, 7, 8, 12, 13][of as usize - 2],
                        8 | 9 => of + 2,
                        10 | 11 => of - 8,
                        12 => 5,
                        13 => 1,
                        14 => 4,
                        of => of,
                    }
            }
        };
        (self.step + 1, place)
    }

    /// What was waited for, in words.
    pub fn what(&self) -> String {
        let (place, from) = (self.place & 0xffff, self.place >> 16);
        let layer = place >> 4;
        let of = if from == 0 { String::new() } else { format!(" of rank {}", from - 1) };
        match (place, place & 15) {
            (PREFILL.., _) => format!("the prefill kernel's wait {place:#x}"),
            (0xfff, _) => "the token's candidates".to_owned(),
            (0xffe, _) => format!("the head's input{of}"),
            (0xffa..=0xffd, _) => "the choice of a token".to_owned(),
            (_, 0) => format!("layer {layer}, attention's input"),
            (_, 1) => format!("layer {layer}, query heads"),
            (_, 2) => format!("layer {layer}, attention's parts"),
            (_, 3) => format!("layer {layer}, other lanes' attention{of}"),
            (_, 4) => format!("layer {layer}, attention's output"),
            (_, 5) => format!("layer {layer}, the mlp's input"),
            (_, 7) => format!("layer {layer}, other lanes' mlp{of}"),
            (_, 8) => format!("layer {layer}, the router's logits"),
            (_, 9) => format!("layer {layer}, the choice of experts"),
            (_, 10) => format!("layer {layer}, latents"),
            (_, 11) => format!("layer {layer}, queries of latents"),
            (_, 12) => format!("layer {layer}, what heads saw of latents"),
            (_, 13) => format!("layer {layer}, the delta rule's inputs or entries"),
            (_, 14) => format!("layer {layer}, the delta rule's squares or scores"),
            (_, _) => format!("layer {layer}, the mlp's activations"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_side_has_the_same_fields() {
        let text = declarations();
        let of = |name: &str| {
            let (_, behind) = text.split_once(&format!("struct {name} {{\n")).expect("it is there");
            behind.split_once("};\n").expect("it ends").0.to_owned()
        };
        assert_eq!(of("Record"), "    u32 place;\n    u32 step;\n    u32 wanted;\n    u32 seen;\n");
        assert!(of("Layer").contains("    float own[2];\n    int delay[2];\n    u8 kind;\n"));
        let args = of("DecodeArgs");
        assert!(args.starts_with("    const u8* weights;\n    const u32* embed;\n"), "{args}");
        for field in
            ["const Layer* layers", "u8* pools[4]", "long peer_offset[8]", "Sequence column[8]"]
        {
            assert!(args.contains(&format!("    {field};\n")), "no {field}: {args}");
        }
        let prefill = of("PrefillArgs");
        assert!(
            prefill.starts_with("    DecodeArgs model;\n    const u32* tokens;\n"),
            "{prefill}"
        );
        assert!(of("PackArgs").starts_with("    const PackJob* jobs;\n    u64* beyond;\n"));
        let size = format!("static_assert(sizeof(DecodeArgs) == {},", size_of::<Args>());
        assert!(text.contains(&size), "{text}");
    }
}
