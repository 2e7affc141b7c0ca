//! Drafts of a model's own layers, of one sequence, and what its launches leave for them.

use crate::abi::Drafts;
use crate::lookup::{Lookup, DRAFT_MAX, PREDICTED_MAX};
use crate::mailbox::SlotMemory;
use crate::mono::wire::Drafting;

/// Of a sequence whose request wants drafts of the model's own layers.
#[derive(Debug, Clone, Default)]
pub(super) struct Predicted {
    /// How many are worth it.
    lookup: Lookup,
    /// Of the next tokens.
    drafts: Vec<u32>,
}

impl Predicted {
    /// Of a request that has made no tokens; none where it wants others, or none.
    pub fn new(request: &SlotMemory) -> Option<Self> {
        let params = &request.params;
        let own = params.drafts == Drafts::Mtp && params.prediction == 0;
        (own && request.masks.is_none()).then(Self::default)
    }

    /// What follows was predicted.
    pub fn came(&mut self, drafts: Vec<u32>) {
        self.drafts = drafts;
    }

    /// Whether there are drafts for the next launch.
    pub fn is_ready(&self) -> bool {
        !self.drafts.is_empty()
    }

    /// What the next launch is told, which has room for so many: they are drafted once.
    pub fn take(&mut self, room: usize) -> Drafting {
        self.drafts.truncate(room.min(DRAFT_MAX));
        let mut drafting = Drafting { given: self.drafts.len() as u32, ..Drafting::default() };
        drafting.ids[..self.drafts.len()].copy_from_slice(&self.drafts);
        self.drafts.clear();
        drafting
    }

    /// A launch checked so many drafts.
    pub fn saw(&mut self, drafted: u32, accepted: u32) {
        if drafted > 0 {
            self.lookup.saw(drafted as usize, accepted as usize);
        }
    }

    /// Tokens to predict, where so many more may come.
    fn reach(&mut self, left: usize) -> usize {
        self.drafts.clear();
        self.lookup.reach().min(left.saturating_sub(1)).min(PREDICTED_MAX)
    }
}

/// Columns of a launch of the model that one sequence had, and what came behind them.
pub(super) struct Seen {
    pub slot: usize,
    /// Position of the first.
    pub position: usize,
    /// In the launch: of the first, then of those behind it.
    pub columns: Vec<usize>,
    /// The token behind each of them.
    pub tokens: Vec<u32>,
    /// How many are to be predicted behind the last.
    pub wanted: usize,
}

impl Seen {
    /// Of columns that a slot wants nothing of but that they were seen.
    pub fn all(slot: usize, position: usize, columns: Vec<usize>, tokens: Vec<u32>) -> Self {
        Self { slot, position, columns, tokens, wanted: 0 }
    }

    /// The same, and what follows is predicted, where so many more tokens may come.
    pub fn predicted(self, predicted: &mut Predicted, left: usize) -> Self {
        Self { wanted: predicted.reach(left), ..self }
    }
}

/// What was not seen yet, and where the residual of its columns stands.
pub(super) struct Unseen {
    pub seen: Vec<Seen>,
    pub residual: Residual,
}

/// Where the model has left a residual.
#[derive(Debug, Clone, Copy)]
pub(super) enum Residual {
    /// In the words of a decode launch of so many columns.
    OfColumns(u32),
    /// Behind them, of all positions of a chunk.
    OfChunk,
}
