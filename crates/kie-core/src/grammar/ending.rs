//! How a text ends legally with few tokens: a search that takes at every step what closes most.
//!
//! The ending it finds is legal, and mostly a shortest one; where there is a shorter one a text is
//! closed some tokens earlier than it would have to be.

use llguidance::Matcher;

/// Tokens after which a search gives up.
const TOKENS_MAX: usize = 256;
/// Characters that close something in most notations.
const CLOSERS: &[u8] = b"}])\"";
/// Characters behind which mostly less is wanted than before.
const DIVIDERS: &[u8] = b"@:/-.=,;<>";
/// Where this may stand, a text is inside of a string: a bracket is one character more, and a quote
/// ends it.
const LETTER: &[u8] = b"q";

/// All tokens with a text, in the order in which an ending takes them.
pub(super) struct Order {
    /// What closes, the most of it first; quotes, which open and close; digits; dividers; then the
    /// longest.
    ids: Vec<u32>,
    /// What closes a string, and more with it.
    quotes: Vec<u32>,
    letter: Option<u32>,
    /// First byte, and bytes, of each id's text.
    begins: Vec<u8>,
    lengths: Vec<usize>,
}

impl Order {
    pub(super) fn of(words: &[Vec<u8>]) -> Self {
        let text = |id: &u32| &words[*id as usize];
        let mut ids: Vec<u32> = (0..words.len() as u32).collect();
        ids.retain(|id| text(id).first().is_some_and(|byte| *byte != 0xFF));
        ids.sort_by_cached_key(|id| {
            let word = text(id);
            let all = |of: &[u8]| word.iter().all(|byte| of.contains(byte));
            let longest_first = TOKENS_MAX.wrapping_sub(word.len());
            match () {
                () if all(b"\"") => (1, word.len()),
                () if all(CLOSERS) => (0, longest_first),
                () if word.iter().all(u8::is_ascii_digit) => (2, word.len()),
                () if word.len() == 1 && all(DIVIDERS) => (3, 0),
                () => (4, longest_first),
            }
        });
        let closes = |id: &u32| {
            let word = text(id);
            word.starts_with(b"\"") && word.iter().all(|byte| CLOSERS.contains(byte))
        };
        let mut quotes: Vec<u32> = ids.iter().copied().filter(closes).collect();
        quotes.sort_by_key(|id| TOKENS_MAX.wrapping_sub(text(id).len()));
        let letter = ids.iter().copied().find(|id| text(id) == LETTER);
        let begins = words.iter().map(|word| word.first().copied().unwrap_or(0)).collect();
        let lengths = words.iter().map(Vec::len).collect();
        Self { ids, quotes, letter, begins, lengths }
    }

    /// Bytes of a text of these tokens.
    pub(super) fn bytes(&self, ids: &[u32]) -> usize {
        ids.iter().map(|id| self.lengths[*id as usize]).sum()
    }
}

/// Tokens that end the text legally from where `matcher` stands, an end of sequence not counted;
/// the matcher stands there again afterwards.
/// `eos`: bits of the ids that end a sequence.
pub(super) fn of(matcher: &mut Matcher, order: &Order, eos: &[u32]) -> Option<Vec<u32>> {
    search(matcher, order, eos, false).or_else(|| search(matcher, order, eos, true))
}

/// Whether the text may end with these tokens from where `matcher` stands; it stands there again
/// afterwards. A search asks for a mask at each token, this for one.
pub(super) fn is_one(matcher: &mut Matcher, ids: &[u32], eos: &[u32]) -> bool {
    let Ok(taken) = matcher.try_consume_tokens(ids) else { return false };
    let ends = taken == ids.len()
        && matcher.compute_mask_or_eos().is_ok_and(|mask| allows_end(mask.as_slice(), eos));
    matcher.rollback(taken).is_ok() && ends
}

/// Whether a mask allows one of the ids that end a sequence.
fn allows_end(mask: &[u32], eos: &[u32]) -> bool {
    mask.iter().zip(eos).any(|(a, b)| a & b != 0)
}

/// `vary`: rather what begins otherwise than the tokens taken before, so that a repetition which
/// only some token leaves is left.
fn search(matcher: &mut Matcher, order: &Order, eos: &[u32], vary: bool) -> Option<Vec<u32>> {
    let mut taken = Vec::new();
    let mut begun = [0usize; 256];
    let mut ends = false;
    while taken.len() < TOKENS_MAX {
        let Ok(mask) = matcher.compute_mask_or_eos() else { break };
        let mask = mask.as_slice();
        ends = allows_end(mask, eos);
        if ends {
            break;
        }
        let allowed = |id: &&u32| mask[**id as usize / 32] >> (**id % 32) & 1 == 1;
        let times = |id: &&u32| begun[usize::from(order.begins[**id as usize])];
        let inside = order.letter.as_ref().is_some_and(|id| allowed(&id));
        let quote = order.quotes.iter().find(|id| inside && allowed(id));
        let mut able = order.ids.iter().filter(allowed);
        let other = || if vary { able.min_by_key(times) } else { able.next() };
        let Some(next) = quote.or_else(other).copied() else { break };
        if quote.is_some() {
            begun = [0; 256];
        }
        begun[usize::from(order.begins[next as usize])] += 1;
        if matcher.consume_token(next).is_err() {
            break;
        }
        taken.push(next);
    }
    matcher.rollback(taken.len()).ok()?;
    ends.then_some(taken)
}
