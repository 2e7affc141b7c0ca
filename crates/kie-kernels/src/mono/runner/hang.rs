//! Launches that do not end: when somebody looks why, and what is told of it.

use std::time::{Duration, Instant};

use crate::error::Error;
use crate::mono::wire::ExpiredWait;

/// Behind the kernel's own patience, the host's with a launch of which nothing comes.
const LOOK_AFTER: Duration = Duration::from_millis(500);

/// Watches a launch of which nothing may come. A queued launch is not stuck: only one in which a
/// wait has expired, and which does not end then either.
pub(super) struct Watch {
    /// Since nothing has come of it, or since somebody last looked why.
    quiet: Instant,
    /// A wait has expired.
    expired: bool,
}

impl Watch {
    pub fn new() -> Self {
        Self { quiet: Instant::now(), expired: false }
    }

    /// Something has come.
    pub fn heard(&mut self) {
        self.quiet = Instant::now();
    }

    /// Whether it is time to look, given how long waits inside the kernel last. `partly`: it has
    /// ended on some machines, which soon ends it on all.
    pub fn is_due(&mut self, budget: Duration, partly: bool) -> bool {
        let long = if partly { LOOK_AFTER / 5 } else { budget.saturating_add(LOOK_AFTER) };
        let due = self.quiet.elapsed() >= long;
        if due {
            self.heard();
        }
        due
    }

    /// What a look found: an error from the second on that finds an expired wait, since a block is
    /// stuck for good then.
    pub fn look(&mut self, lost: &[Option<Vec<ExpiredWait>>]) -> Option<Error> {
        let any = lost.iter().any(Option::is_some);
        if !any || !std::mem::replace(&mut self.expired, true) {
            return None;
        }
        Some(Error::Hang(format!("{}; the launch does not end", report(lost))))
    }
}

/// The error of a launch that has ended in which a wait had expired, on any rank.
pub(super) fn of_ended(lost: &[Option<Vec<ExpiredWait>>]) -> Option<Error> {
    lost.iter().any(Option::is_some).then(|| Error::Hang(report(lost)))
}

/// The waits that expired on each rank: the ranks and their blocks that had come least far first.
fn report(lost: &[Option<Vec<ExpiredWait>>]) -> String {
    let one = |l: &ExpiredWait| {
        format!(
            "block {} in step {} waited for {} (wanted {}, seen {})",
            l.block,
            l.step,
            l.what(),
            l.wanted,
            l.seen
        )
    };
    let mut ranks: Vec<_> = (0_usize..).zip(lost.iter().flatten()).collect();
    ranks.retain(|(_, lost)| !lost.is_empty());
    ranks.sort_by_key(|(rank, lost)| (lost[0].turn(), *rank));
    let most = if ranks.len() > 1 { 2 } else { 4 };
    let of = |(rank, lost): &(usize, &Vec<ExpiredWait>)| {
        let some: Vec<String> = lost.iter().take(most).map(one).collect();
        format!("rank {rank}: {} blocks gave up: {}", lost.len(), some.join("; "))
    };
    if ranks.is_empty() {
        return "a kernel left before its end and no block says why".to_owned();
    }
    ranks.iter().map(of).collect::<Vec<_>>().join(". ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_earliest_wait_of_any_rank_is_told_first() {
        let lost = |block, place, step| ExpiredWait { block, place, step, wanted: 9, seen: 8 };
        let first: Vec<ExpiredWait> = (0..6).map(|block| lost(block, 0x20, 1)).collect();
        let ranks = [Some(vec![lost(7, 0x31, 1)]), Some(first.clone())];
        let Some(Error::Hang(told)) = of_ended(&ranks) else { panic!("no error") };
        let (one, other) = told.split_once(". ").expect("two ranks");
        assert!(one.starts_with("rank 1: 6 blocks gave up: block 0 in step 1 waited for"), "{one}");
        assert_eq!(one.matches("; ").count(), 1, "two of several ranks' blocks: {one}");
        assert!(other.starts_with("rank 0: 1 blocks"), "{other}");
        let Some(Error::Hang(told)) = of_ended(&[Some(first)]) else { panic!("no error") };
        assert_eq!(told.matches("; ").count(), 3, "four of one: {told}");
        let Some(Error::Hang(told)) = of_ended(&[Some(Vec::new())]) else { panic!("no error") };
        assert!(told.contains("no block says why"), "{told}");
        assert_eq!(of_ended(&[None, None]), None);
    }

    #[test]
    fn a_launch_is_given_up_at_the_second_look() {
        let mut watch = Watch::new();
        assert!(!watch.is_due(Duration::ZERO, true), "something may have come just now");
        assert_eq!(watch.look(&[None]), None);
        assert_eq!(watch.look(&[Some(Vec::new())]), None, "its end may be near");
        let again = watch.look(&[Some(Vec::new())]);
        assert!(matches!(again, Some(Error::Hang(told)) if told.ends_with("does not end")));
    }
}
