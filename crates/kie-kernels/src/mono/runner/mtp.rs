//! What predicts further tokens: a kernel of its own beside the model's (`kernels/common/ops/mtp.h`).
//! Behind each launch of the model whose next tokens are known it sees the launch's last columns,
//! whose residual stands in the model's words still, and predicts what follows for who wants it. A
//! launch of the model then checks that, as drafts that the host gives.

use std::time::Duration;

use super::launches::Launches;
use crate::abi::Drafts;
use crate::lookup::{Lookup, DRAFT_MAX, PREDICTED_MAX};
use crate::mailbox::SlotMemory;
use crate::mono::loaded::Loaded;
use crate::mono::wire::{self, Drafting, Sequence};

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

/// What its kernel is told of a launch's columns.
pub(super) struct Ask {
    pub column: [Sequence; 8],
    pub drafting: [Drafting; 8],
    pub before_column: [u32; 8],
    pub steps: u32,
    /// Slots in the order of the columns, with how many tokens are predicted of each.
    pub slots: Vec<(usize, usize)>,
}

impl Ask {
    /// Sequences that want more stand first.
    pub fn new(mut seen: Vec<Seen>) -> Self {
        seen.sort_by_key(|one| std::cmp::Reverse(one.wanted));
        let mut ask = Self {
            column: [Sequence::default(); 8],
            drafting: [Drafting::default(); 8],
            before_column: [0; 8],
            steps: seen.iter().map(|one| one.wanted).max().unwrap_or(0).max(1) as u32,
            slots: seen.iter().map(|one| (one.slot, one.wanted)).collect(),
        };
        let mut next = seen.len();
        for (at, one) in seen.iter().enumerate() {
            let (own, behind) = (one.columns[0], &one.columns[1..]);
            ask.before_column[at] = own as u32;
            for column in behind {
                ask.before_column[next] = *column as u32;
                next += 1;
            }
            ask.column[at] = Sequence {
                row: one.slot as u32,
                position: one.position as u32,
                token: one.tokens[0],
                last: i32::MAX as u32,
                ..Sequence::default()
            };
            let known = behind.len() as u32;
            let drafting = &mut ask.drafting[at];
            (drafting.given, drafting.known, drafting.wanted) = (known, known, one.wanted as u32);
            drafting.ids[..behind.len()].copy_from_slice(&one.tokens[1..]);
        }
        ask
    }
}

/// The kernel on every rank.
pub(super) struct Predictor {
    pub launches: Launches,
}

impl Predictor {
    pub fn new(ranks: Vec<Loaded>, first_seqno: u32, hang_timeout: Duration) -> Self {
        Self { launches: Launches::new(ranks, first_seqno, hang_timeout) }
    }

    /// What its last launch predicted of a slot, so many tokens.
    pub fn predicted(&self, slot: usize, count: usize) -> Vec<u32> {
        let out = &self.launches.first().room.out;
        let vocab = self.launches.first().dims.vocab;
        let tokens = (0..count as u32).map_while(|n| wire::next_token(out, slot, n));
        // One that is no id ends them: there is nothing behind it.
        tokens.map(|told| told.token).take_while(|token| *token < vocab).collect()
    }
}
