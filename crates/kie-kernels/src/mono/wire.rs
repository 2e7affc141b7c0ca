//! What crosses to a launch: the host's mirror of `kernels/common/args.h`. The kernel's own
//! `static_assert`s hold its sizes against ours.

use std::sync::atomic::Ordering::Acquire;

use super::lower::model::MOST_POOLS;
use crate::machine::Shared;

/// Most stop ids of a sequence.
pub const STOPS: usize = crate::abi::MAX_STOP_IDS;
/// Entries of a row's ring of tokens.
pub const RING: usize = 8192;
/// Token codes: nothing could be chosen, or a logit was not finite.
pub const FIRST_CODE: u32 = 0xffff_fff0;

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

/// A token as the kernel emits it (tell.h).
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

/// Bytes of the host's control words: order, heartbeat, whether the heartbeat counts, and steps
/// that the last launch made.
pub const CONTROL_BYTES: usize = 64;

/// What differs between layers, and where each layer's own is. Index 0 is attention's (input or
/// output), 1 the mlp's.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[repr(C)]
pub struct Layer {
    /// Bytes from the beginning of a block's weights.
    pub stream: u64,
    /// Positions a query sees; 0: all.
    pub window: u32,
    /// Bytes from the beginning of a page of the pool.
    pub page_at: u32,
    /// The first row of a norm's scale.
    pub norm: [u32; 2],
    /// Half pairs of head norms from the first layer's.
    pub head_norms: u32,
    /// Biases from the first layer's.
    pub biases: u32,
    /// Factor on the lane's own output.
    pub own: [f32; 2],
    /// Layers since the others' output that is added; -1: none is.
    pub delay: [i32; 2],
    /// Class.
    pub kind: u8,
    /// Which pages.
    pub pool: u8,
    /// Bit i: others want output i.
    pub shares: u8,
    /// Bit i: norm i has a row a lane.
    pub norm_lanes: u8,
    /// 0.
    pub padding: u32,
}

/// What passes through a block's ring, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Segment {
    /// Bytes from the beginning of a block's weights.
    pub at: u64,
    /// How many stages.
    pub stages: u32,
    /// Bytes of each.
    pub bytes: u32,
    /// args.h's `SegmentSource`.
    pub source: u32,
    /// Of which layer.
    pub layer: u32,
}

/// A sequence at work.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[repr(C)]
pub struct Sequence {
    /// Key of the random numbers.
    pub seed: u64,
    /// Row of page table, stop ids and token ring.
    pub row: u32,
    /// Position of the first step.
    pub position: u32,
    /// Token of the first step.
    pub token: u32,
    /// Tokens generated before.
    pub made: u32,
    /// Tokens before which no stop id is chosen.
    pub min_new: u32,
    /// Position behind which the sequence ends.
    pub last: u32,
    /// Stop ids.
    pub stop_count: u32,
    /// Bits of [`wants`].
    pub wants: u32,
    /// 0 is greedy.
    pub temperature: f32,
    /// 1 keeps all.
    pub top_p: f32,
    /// 0 keeps all.
    pub min_p: f32,
    /// 1 is neutral.
    pub repetition: f32,
    /// 0 is neutral.
    pub presence: f32,
    /// 0 is neutral.
    pub frequency: f32,
    /// 0 keeps all.
    pub top_k: u32,
    /// Tokens the row has told before.
    pub told: u32,
}

/// The launch's one parameter. Addresses are the device's.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Args {
    pub line: u64,
    pub embed: u64,
    pub norms: u64,
    pub head_norms: u64,
    pub biases: u64,
    pub rope: u64,
    pub layers: u64,
    pub pools: [u64; MOST_POOLS],
    pub pages: u64,
    pub stop_ids: u64,
    pub logit_bias: u64,
    pub counts: u64,
    pub values: u64,
    pub prompt: u64,
    pub segments: u64,
    /// `[blocks][index bytes]`: which of a stage's scales each row has.
    pub scale_index: u64,
    pub words: u64,
    pub poison: u64,
    pub records: u64,
    pub logits: u64,
    pub stamps: u64,
    pub trace: u64,
    pub out: u64,
    pub control: u64,
    pub hops: [i64; 8],
    pub budget_ns: u64,
    pub at_head: u64,
    pub page_bytes: [u32; MOST_POOLS],
    pub segment_count: u32,
    pub steps: u32,
    pub epoch: u32,
    pub in_flight_bytes: u32,
    pub pace: u32,
    pub live: u32,
    pub count: u32,
    pub rank: u32,
    pub column: [Sequence; 8],
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

// SAFETY: 37 u64s, 12 u32s, 8 sequences: every field on its own alignment, 8-byte multiples.
unsafe impl Wire for Args {}
// SAFETY: a u64, ten 4-byte fields, four bytes and one more u32.
unsafe impl Wire for Layer {}
// SAFETY: a u64, then four u32s.
unsafe impl Wire for Segment {}

const _: () = assert!(size_of::<Layer>() == 8 + 10 * 4 + 4 + 4 && size_of::<Segment>() == 24);
const _: () = assert!(size_of::<Sequence>() == 8 + 16 * 4);
const _: () = assert!(size_of::<Args>() == 37 * 8 + 12 * 4 + 8 * size_of::<Sequence>());

/// Who gave up waiting, where (args.h's `Record`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpiredWait {
    /// Block.
    pub block: u32,
    /// Layer and wait, as the kernel numbers them; above 16 bits 1 + the rank that was waited for,
    /// where it is known.
    pub place: u32,
    /// Step of the launch.
    pub step: u32,
    /// Epoch waited for.
    pub wanted: u32,
    /// Epoch seen.
    pub seen: u32,
}

/// Bytes of one record.
pub const RECORD_BYTES: usize = 16;
/// Set in the place of a record that was written.
const WRITTEN: u32 = 1 << 31;
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
            place => place,
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
            (_, _) => format!("layer {layer}, the mlp's activations"),
        }
    }
}
