//! Drafts of tokens, the host's side: kernels make and check them (`kernels/common/ops/lookup.h`);
//! here is which launches have some, and what kernels are told of texts. Where nothing matches, or
//! drafts were wrong, sequences go on in the kernels without, which are faster.
//!
//! Under a grammar drafts come with masks (`crate::mask`), and a launch is given those that are
//! there when it begins, each with what the token behind it may be.

use std::sync::Arc;

use crate::abi;
use crate::error::Result;
use crate::lookup::{Lookup, DRAFT_MAX};
use crate::mailbox::SlotMemory;
use crate::mask::{Masks, Place};
use crate::mono::wire::{Drafted, Drafting, NO_ID, QUIET_STEPS, TEXT_PAD};

/// Of a sequence whose request wants drafts.
#[derive(Debug, Clone)]
pub(super) struct SlotDrafts {
    /// As kernels left it.
    lookup: Lookup,
    /// Prompt and output.
    pub text: Vec<u32>,
    /// Ids of it that kernels have.
    known: usize,
    /// The last launch with drafts ended since none were made.
    quiet: bool,
}

impl SlotDrafts {
    /// Of a request that has made no tokens; none where it wants no drafts.
    pub fn new(request: &SlotMemory, positions: usize) -> Option<Self> {
        let params = &request.params;
        if params.drafts == abi::Drafts::None || request.masks.is_some() {
            return None;
        }
        let mut text = Vec::with_capacity(positions + 1);
        text.extend_from_slice(&request.tokens[..params.prompt as usize]);
        Some(Self { lookup: Lookup::default(), text, known: 0, quiet: false })
    }

    /// Whether the next step would have a draft, or may.
    pub fn wants(&self, request: &SlotMemory) -> bool {
        !self.quiet || (self.lookup.rest == 0 && self.matches(request))
    }

    /// Whether the text has read before as it ends now.
    fn matches(&self, request: &SlotMemory) -> bool {
        let prompt = request.params.prompt as usize;
        self.lookup.clone().draft(&self.text, prompt, prediction(request), &mut [0]) > 0
    }

    /// Steps to go without drafts that were wrong, or 0.
    pub const fn rest(&self) -> u32 {
        self.lookup.rest
    }

    /// What a launch with drafts is told. `write` puts ids of the text (0) or of the prediction (1)
    /// where kernels look for them, from there on.
    ///
    /// # Errors
    /// Those of `write`.
    pub fn begin(
        &mut self,
        request: &SlotMemory,
        write: impl Fn(usize, usize, &[u32]) -> Result<()>,
    ) -> Result<Drafting> {
        let prediction = prediction(request);
        if self.known == 0 {
            // Numbers that are no id stand before a text, and before its prediction its prompt.
            let prompt = &self.text[..request.params.prompt as usize];
            let last = &prompt[prompt.len().saturating_sub(TEXT_PAD)..];
            let mut pad = vec![NO_ID; TEXT_PAD];
            write(0, 0, &pad)?;
            pad[TEXT_PAD - last.len()..].copy_from_slice(last);
            write(1, 0, &[&pad, prediction].concat())?;
        }
        write(0, TEXT_PAD + self.known, &self.text[self.known..])?;
        self.quiet = false;
        let Lookup { reach, misses, rest, cursor, along, .. } = self.lookup;
        Ok(Drafting {
            reach: reach as u32,
            misses,
            rest,
            cursor: cursor as u32,
            along: along.into(),
            prediction: prediction.len() as u32,
            ..Drafting::default()
        })
    }

    /// A launch with drafts has ended and its tokens are in the text, as they are in the kernels'.
    pub fn ended(&mut self, told: &Drafted) {
        self.lookup.reach = told.next.reach as usize;
        (self.lookup.misses, self.lookup.rest) = (told.next.misses, told.next.rest);
        self.lookup.cursor = told.next.cursor as usize;
        self.lookup.along = told.next.along != 0;
        self.quiet = told.quiet >= QUIET_STEPS;
        self.known = self.text.len();
    }

    /// A launch without drafts made so many tokens.
    pub fn passed(&mut self, made: u32) {
        self.lookup.rest = self.lookup.rest.saturating_sub(made);
    }
}

/// What a launch is told of drafts that came with the masks of a sequence that stands there; at
/// most so many.
pub(super) fn beside(place: &Place, request: &SlotMemory, most: usize) -> Drafting {
    let mut ids = [0; DRAFT_MAX];
    let drafted = |masks: &Arc<Masks>| masks.drafted(place, &mut ids[..most.min(DRAFT_MAX)]);
    let given = request.masks.as_ref().map_or(0, drafted) as u32;
    Drafting { given, ids, ..Drafting::default() }
}

/// What the caller expects.
fn prediction(request: &SlotMemory) -> &[u32] {
    &request.tokens[request.params.prompt as usize..][..request.params.prediction as usize]
}

/// What some sequences' drafts ask of their next launch.
pub(super) enum Drafts {
    /// Nothing.
    None,
    /// The kernel that makes them.
    Now,
    /// One without, of so many steps at most.
    Later(u32),
}
