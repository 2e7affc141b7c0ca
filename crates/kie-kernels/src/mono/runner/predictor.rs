//! What predicts further tokens: a kernel of its own beside the model's
//! (`kernels/common/ops/mtp.h`). Behind each launch of the model whose next tokens are known it
//! sees the launch's last columns, whose residual stands in the model's words still, and predicts
//! what follows for who wants it. A launch of the model then checks that, as drafts that the host
//! gives.

use std::time::Duration;

use super::launches::Launches;
use super::mtp::Seen;
use crate::error::Result;
use crate::machine::Flight;
use crate::mono::loaded::Loaded;
use crate::mono::lower::segments::head_segment;
use crate::mono::wire::{self, Drafting, Order, Sequence};

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
            (drafting.given, drafting.wanted) = (known, one.wanted as u32);
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

    /// Starts the kernel that predicts further tokens on every rank, behind residuals that stand
    /// there ([`Launches::residuals`] of the model).
    ///
    /// # Errors
    /// What the machines say.
    pub fn start(&mut self, ask: &Ask, before: &[[u64; 2]]) -> Result<Vec<Box<dyn Flight>>> {
        let launches = &mut self.launches;
        launches.renew_seqnos()?;
        launches.order(Order::GoOn);
        let wanted = ask.slots.iter().any(|(_, count)| *count > 0);
        let launch = |(loaded, before): (&Loaded, &[u64; 2])| {
            let kind = loaded.kinds().next().expect("one kernel");
            let mut args = loaded.args(kind.columns);
            (args.seqno, args.budget_ns) = (launches.seqno, launches.budget_ns);
            args.steps = ask.steps;
            (args.live, args.column) = (ask.slots.len() as u32, ask.column);
            (args.drafting, args.before_column) = (ask.drafting, ask.before_column);
            ([args.before, args.before_words], args.predicts) = (*before, u64::from(wanted));
            if !wanted {
                args.segment_count = head_segment(&loaded.model, &loaded.partition);
            }
            loaded.decode(&loaded.module(kind)?, &args)
        };
        launches.ranks.iter().zip(before).map(launch).collect()
    }

    /// What its last launch predicted of a slot, so many tokens.
    pub fn predicted(&self, slot: usize, count: usize) -> Vec<u32> {
        let out = &self.launches.first().room.out;
        let vocab = self.launches.first().dims.vocab;
        let made = self.launches.steps_made().min(count as u32);
        let tokens = (0..made).map_while(|n| wire::next_token(out, slot, n));
        // One that is no id ends them: there is nothing behind it.
        tokens.map(|told| told.token).take_while(|token| *token < vocab).collect()
    }
}
