//! Drafts by prompt lookup: what followed where the text last read as it ends now.
//!
//! An agent's output is full of what its context already says, so the tokens behind the longest
//! earlier match are a good guess (Saxena, Prompt Lookup Decoding, 2023). They are rows of the next
//! pass; those that the sampler chooses as well are kept, so the tokens are the same as without.
//! Kernels of GPUs have the same rule (`kernels/common/ops/lookup.h`), with these numbers.

/// Most tokens that a pass drafts.
pub const DRAFT_MAX: usize = 7;
/// Most drafts of a model's own layers. Each is one more pass of such a layer and of the head, and
/// is right only if those before it are.
pub(crate) const PREDICTED_MAX: usize = 3;
/// Fewest tokens that must match.
pub(crate) const MATCH_MIN: usize = 2;
/// Tokens beyond which a longer match says no more; it takes some to tell repeated lines apart.
pub(crate) const MATCH_MAX: usize = 16;
/// Most steps without a draft after drafts that were all wrong.
pub(crate) const REST_MAX: u32 = 32;

/// What one sequence's drafts were so far.
#[derive(Debug, Clone)]
pub struct Lookup {
    /// Tokens of the next draft at most.
    pub(crate) reach: usize,
    /// Drafts in a row of which nothing was right, then steps to go without one.
    pub(crate) misses: u32,
    pub(crate) rest: u32,
    /// What is expected next of the prediction, and where the last draft began in it, if it did.
    pub(crate) cursor: usize,
    began: Option<usize>,
    /// The text goes along with the prediction: what is expected next is drafted without a match,
    /// too, since a token that differs most often stands in place of one.
    pub(crate) along: bool,
    /// The last draft was made so.
    unmatched: bool,
}

impl Default for Lookup {
    /// Of a sequence that has not drafted yet.
    fn default() -> Self {
        Self {
            reach: DRAFT_MAX,
            misses: 0,
            rest: 0,
            cursor: 0,
            began: None,
            along: false,
            unmatched: false,
        }
    }
}

impl Lookup {
    /// Tokens that the next step may draft.
    pub fn reach(&mut self) -> usize {
        if self.rest > 0 {
            self.rest -= 1;
            return 0;
        }
        self.reach
    }

    /// A step checked `drafted` tokens, of which the first `accepted` were right.
    pub fn saw(&mut self, drafted: usize, accepted: usize) {
        if let Some(began) = self.began {
            // The step's last token stands where the first wrong one did.
            self.cursor = began + accepted + 1;
        }
        self.along = self.began.is_some() && (accepted > 0 || !self.unmatched);
        if accepted == 0 {
            // Once is an edit. Wrong again and again costs ever less: 1 row in 33 at the end.
            self.misses = (self.misses + 1).min(REST_MAX.ilog2() + 1);
            self.rest = (1 << (self.misses - 1)) - 1;
            self.reach = if self.misses > 1 { 1 } else { self.reach };
            return;
        }
        self.misses = 0;
        self.reach = if accepted == drafted { DRAFT_MAX } else { DRAFT_MAX.min(2 * accepted + 1) };
    }

    /// Writes up to `out.len()` tokens that may follow `text`, and says how many: those behind the
    /// longest match of the text's end. Of equal ones it is the next in `prediction`, which reads
    /// as what follows the first `prompt` tokens, then the latest in the text itself. Where nothing
    /// matches, those expected next, if the text went along with the prediction.
    pub fn draft(
        &mut self,
        text: &[u32],
        prompt: usize,
        prediction: &[u32],
        out: &mut [u32],
    ) -> usize {
        let (start, mut longest) = (&text[..prompt], MATCH_MIN - 1);
        let mut source = &text[..0];
        self.began = None;
        let cursor = self.cursor.min(prediction.len());
        for at in (cursor..prediction.len()).chain((0..cursor).rev()) {
            let length = common(text, prediction[..at].iter().rev().chain(start.iter().rev()));
            if length > longest {
                (longest, source, self.began) = (length, &prediction[at..], Some(at));
            }
        }
        for at in (1..text.len()).rev() {
            if longest == MATCH_MAX {
                break;
            }
            let length = common(text, text[..at].iter().rev());
            if length > longest {
                (longest, source, self.began) = (length, &text[at..], None);
            }
        }
        self.unmatched = source.is_empty() && self.along && cursor < prediction.len();
        if self.unmatched {
            (source, self.began) = (&prediction[cursor..], Some(cursor));
        }
        // What ends with the text goes on as it began: it is a repetition.
        let repeats = self.began.is_none() && !source.is_empty();
        let count = if repeats { out.len() } else { out.len().min(source.len()) };
        for (to, token) in out.iter_mut().zip(source.iter().cycle().take(count)) {
            *to = *token;
        }
        count
    }
}

/// How many tokens before the text's end equal those of `before`, both counted from the back.
fn common<'a>(text: &[u32], before: impl Iterator<Item = &'a u32>) -> usize {
    let pairs = text.iter().rev().zip(before).take(MATCH_MAX);
    pairs.take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn drafted(text: &[u32], prompt: usize, prediction: &[u32]) -> Vec<u32> {
        let mut out = [0; DRAFT_MAX];
        let count = Lookup::default().draft(text, prompt, prediction, &mut out);
        out[..count].to_vec()
    }

    #[test]
    fn what_followed_the_longest_and_latest_match_is_drafted() {
        assert_eq!(drafted(&[1, 2, 3, 4, 5, 1, 2], 7, &[]), [3, 4, 5, 1, 2, 3, 4]);
        // Longest before latest: 9 1 2 is followed by 3, 8 1 2 by 4.
        assert_eq!(drafted(&[9, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2], 11, &[])[..1], [3]);
        // Latest of equals.
        assert_eq!(drafted(&[9, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 11, &[])[..1], [4]);
        assert_eq!(drafted(&[6, 6, 6], 3, &[]), [6; DRAFT_MAX]);
        for text in [&[][..], &[1], &[1, 2], &[1, 2, 3, 9, 3]] {
            assert_eq!(drafted(text, text.len(), &[]), [], "one token is no match");
        }
    }

    #[test]
    fn a_prediction_follows_the_prompt() {
        let prediction = [5, 6, 7, 8];
        assert_eq!(drafted(&[1, 2], 2, &prediction), prediction);
        assert_eq!(drafted(&[1, 2, 5, 6], 2, &prediction), [7, 8]);
        // After an edit it is found again.
        assert_eq!(drafted(&[1, 2, 5, 9, 6, 7], 2, &prediction), [8]);
        assert_eq!(drafted(&[1, 2, 5, 6, 7, 8], 2, &prediction), []);
    }

    /// Steps for `text`, of which each draft is checked, where `prediction` is expected; and how
    /// many of them had drafts.
    fn steps(text: &[u32], prediction: &[u32]) -> (usize, usize) {
        let (mut lookup, mut at, mut steps, mut drafted) = (Lookup::default(), 2, 0, 0);
        while at < text.len() {
            let mut out = [0; DRAFT_MAX];
            let reach = lookup.reach();
            let count = lookup.draft(&text[..at], 2, prediction, &mut out[..reach]);
            let right = out[..count].iter().zip(&text[at..]).take_while(|(a, b)| a == b).count();
            if count > 0 {
                lookup.saw(count, right);
                drafted += 1;
            }
            (at, steps) = (at + right + 1, steps + 1);
        }
        (steps, drafted)
    }

    #[test]
    fn a_token_that_differs_is_stepped_over() {
        let text: Vec<u32> = (0..162).collect();
        let mut prediction = text[2..].to_vec();
        assert_eq!(steps(&text, &prediction), (160 / 8, 160 / 8));
        // One in twenty, at other places of a draft each time: a step more for each, and none
        // without a draft.
        for at in (7..prediction.len()).step_by(20) {
            prediction[at] = 1000;
        }
        let (found, _) = steps(&text, &prediction);
        assert!(found <= 160 / 8 + 8, "{found}");
        // What was put in or left out is found again behind two tokens.
        prediction.splice(50..50, [1001, 1002]);
        prediction.drain(100..103);
        let (found, _) = steps(&text, &prediction);
        assert!(found <= 160 / 8 + 8 + 2 * 4, "{found}");
    }

    #[test]
    fn what_goes_another_way_is_not_followed_for_long() {
        let text: Vec<u32> = (0..400).collect();
        let prediction: Vec<u32> = text[2..10].iter().copied().chain(1000..1400).collect();
        let (_, drafts) = steps(&text, &prediction);
        assert!(drafts <= 3, "{drafts}");
    }

    proptest! {
        /// Beside a search that looks at every place with every length.
        #[test]
        fn equals_the_plain_search(
            text in prop::collection::vec(0u32..3, 0..40), split in 0usize..40,
            prediction in prop::collection::vec(0u32..3, 0..20), room in 0usize..DRAFT_MAX,
        ) {
            let prompt = split.min(text.len());
            let mut wanted: Option<(usize, Vec<u32>)> = None;
            let mut offer = |before: Vec<u32>, after: Vec<u32>| {
                let ends = |n: &usize| {
                    *n <= before.len() && before[before.len() - n..] == text[text.len() - n..]
                };
                let length = (MATCH_MIN..=MATCH_MAX.min(text.len())).rev().find(ends);
                if length > wanted.as_ref().map(|(n, _)| *n) {
                    wanted = length.map(|length| (length, after));
                }
            };
            for at in 0..prediction.len() {
                offer([&text[..prompt], &prediction[..at]].concat(), prediction[at..].to_vec());
            }
            for at in (1..text.len()).rev() {
                offer(text[..at].to_vec(), text[at..].repeat(room + 1));
            }
            let mut wanted = wanted.map_or(Vec::new(), |(_, after)| after);
            wanted.truncate(room);
            let mut out = vec![0; room];
            let count = Lookup::default().draft(&text, prompt, &prediction, &mut out);
            prop_assert_eq!(&out[..count], &wanted);
        }
    }

    #[test]
    fn drafts_that_are_always_wrong_become_rare() {
        let mut lookup = Lookup::default();
        let steps = (0..330).filter(|_| match lookup.reach() {
            0 => false,
            drafted => {
                lookup.saw(drafted, 0);
                true
            }
        });
        assert!(steps.count() < 6 + 330 / 32);
        lookup.saw(1, 1);
        assert_eq!(lookup.reach, DRAFT_MAX);
    }

    #[test]
    fn a_prediction_is_read_on_where_it_was_left() {
        let (prediction, mut out) = ([1, 2, 3, 1, 2, 4, 1, 2, 5], [0; 2]);
        let mut lookup = Lookup::default();
        let mut text = vec![8, 9];
        while lookup.draft(&text, 2, &prediction, &mut out) == 2 {
            text.extend(out);
            lookup.saw(2, 2);
            text.extend(prediction.get(text.len() - 2));
        }
        assert_eq!(text[2..], prediction);
    }
}
