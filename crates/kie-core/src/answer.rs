//! The text of one answer, token by token: bytes and possible stop strings are held back. The
//! engine thread (only where there are stop strings) and the reader run it over the same ids and so
//! come to the same end.

use std::sync::Arc;

use crate::text::{StopMatcher, TextDecoder};
use crate::tokenizer::Tokenizer;

/// Text of the ids pushed so far.
pub(crate) struct Answer {
    decoder: TextDecoder,
    matcher: StopMatcher,
    stop_ids: Arc<[u32]>,
    min_tokens: usize,
    pushed: usize,
}

impl Answer {
    /// Nothing yet. Ids in `stop_ids` have no text; before `min_tokens` ids no string stops.
    pub(crate) fn new(
        tokenizer: &Tokenizer,
        stop: &[String],
        stop_ids: Arc<[u32]>,
        min_tokens: usize,
    ) -> Self {
        let (decoder, matcher) = (TextDecoder::new(tokenizer), StopMatcher::new(stop));
        Self { decoder, matcher, stop_ids, min_tokens, pushed: 0 }
    }

    /// Takes the next id; returns the text that became certain.
    pub(crate) fn push(&mut self, id: u32) -> &str {
        self.pushed += 1;
        if self.stop_ids.contains(&id) {
            return "";
        }
        let text = self.decoder.push(id);
        if self.pushed < self.min_tokens {
            return text;
        }
        self.matcher.push(text)
    }

    /// The stop string that ended the text, as an index into the list.
    pub(crate) fn hit(&self) -> Option<usize> {
        self.matcher.hit()
    }

    /// True if text is held back.
    pub(crate) fn holds_back(&self) -> bool {
        self.matcher.hit().is_none() && (self.decoder.holds_back() || self.matcher.holds_back())
    }

    /// Appends what was held back: the answer has ended.
    pub(crate) fn finish(&mut self, out: &mut String) {
        if self.pushed < self.min_tokens {
            return out.push_str(self.decoder.finish());
        }
        out.push_str(self.matcher.push(self.decoder.finish()));
        out.push_str(self.matcher.finish());
    }
}
