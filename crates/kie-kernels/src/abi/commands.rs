//! What host and device tell each other while they run: requests, commands, tokens.

use crate::sample::Sampling;

/// What a request wants of the device. Written by the host before the command that names the slot.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct SlotParams {
    /// Prompt tokens.
    pub prompt: u32,
    /// Positions whose KV is already in the pages.
    pub cached: u32,
    /// Most tokens to generate.
    pub max_new: u32,
    /// Tokens before which no stop id may be chosen.
    pub min_new: u32,
    /// Entries in the slot's stop ids.
    pub stop_ids: u32,
    /// Entries in the slot's logit bias.
    pub bias: u32,
    /// Where drafts of tokens come from that steps may check, for the same tokens sooner.
    pub drafts: Drafts,
    /// Tokens behind the prompt's in the slot's that the caller expects to be generated.
    pub prediction: u32,
    /// How tokens are chosen.
    pub sampling: Sampling,
}

/// Where drafts of tokens come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Drafts {
    /// There are none.
    None = 0,
    /// What followed where the text last read as it ends now, and the prediction.
    Lookup = 1,
    /// The model's own layers for it; with a prediction what that says comes first.
    Mtp = 2,
}

/// What the device is told to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum CommandKind {
    /// Prefill the slot's prompt from `cached`, then decode until a stop rule hits. Positions
    /// below `a` have pages; a slot that needs more waits for [`Grow`](Self::Grow).
    Start = 1,
    /// End the slot after the token in flight.
    Cancel = 2,
    /// Run prompt positions `a .. a + b` as prompt chunk and leave their logits in the mailbox.
    LogitsPrefill = 3,
    /// The same for the single position `a`, by the decode path.
    LogitsDecode = 4,
    /// Positions of the slot below `a` have pages now. Without effect on a slot that has ended.
    Grow = 5,
}

impl CommandKind {
    /// Whether the command hands the slot to the device.
    pub fn begins(self) -> bool {
        match self {
            Self::Start | Self::LogitsPrefill | Self::LogitsDecode => true,
            Self::Cancel | Self::Grow => false,
        }
    }
}

/// One order to the device, 64 bytes.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub struct Command {
    /// What to do.
    pub kind: CommandKind,
    /// For which slot.
    pub slot: u32,
    /// First argument.
    pub a: u32,
    /// Second argument.
    pub b: u32,
}

/// Why a slot ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum SlotEnd {
    /// Still running.
    Running = 0,
    /// A stop id was chosen; it is the last record.
    StopId = 1,
    /// `max_new` tokens were made.
    Length = 2,
    /// A cancel took effect.
    Cancelled = 3,
    /// Logits were not finite: the weights or the conversion are at fault.
    NotFinite = 4,
    /// A logits command is done.
    Logits = 5,
}

/// One token as the device reports it.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct Record {
    /// The token.
    pub token: u32,
    /// Natural log of its probability under the raw logits; 0 where not asked for.
    pub logprob: f32,
    /// CLOCK_MONOTONIC when it was chosen.
    pub t_ns: u64,
}
