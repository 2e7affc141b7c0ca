//! Grammars over a model's vocabulary: compiled once each, kept by what they say.
//!
//! Invariants: a compiled grammar is never changed, its readers have copies; at most
//! [`KEPT_MAX`] are kept, the least recently used one goes first; compiling has a bound on time
//! ([`COMPILE_S`]) besides llguidance's own on steps and states, runs on a thread apart, and
//! whoever waits for it hears signals.

use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use llguidance::api::{GrammarWithLexer, ParserLimits, TopLevelGrammar};
use llguidance::toktrie::{InferenceCapabilities, TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use llguidance::{earley::SlicedBiasComputer, Matcher, ParserFactory};

use super::ending::{self, Order};
use super::schema;
use super::spec::Grammar;
use super::times::Counted;
use crate::error::{Error, Result};
use crate::patience::{apart, Patience};
use crate::tokenizer::Tokenizer;

/// Longest definition, in bytes.
const DEFINITION_BYTES_MAX: usize = 1 << 20;
/// Grammars that are kept.
const KEPT_MAX: usize = 32;
/// Longest time that compiling one may take, in seconds.
const COMPILE_S: f64 = 10.0;
/// Of the thread that compiles: schemas nest, and their intersections recurse.
const STACK_BYTES: usize = 128 << 20;
/// Most lines of a Lark grammar: a rule that names the next one is a step of a recursion.
const LINES_MAX: usize = 4096;
/// Longest token that grammars use; the library's trie has no deeper ones.
const TOKEN_BYTES_MAX: usize = 512;
/// Tokens that one token may make the shortest ending longer, at least: some brackets, a name.
const GROWTH_MIN: usize = 8;
/// Bytes of a text that is split at once.
const SPLIT_BYTES_MAX: usize = 128;
/// Most of what is said of an error of the library.
const MESSAGE_CHARS_MAX: usize = 400;

/// A vocabulary as grammars see it.
pub(super) struct Vocabulary {
    tokenizer: Tokenizer,
    factory: ParserFactory,
    /// Tokens in the order in which an ending takes them.
    order: Order,
    /// Bits of the ids that end a sequence.
    pub(super) eos: Vec<u32>,
    /// Bits of the ids that read otherwise at the beginning of a text, where some do.
    pub(super) otherwise_at_first: Option<Vec<u32>>,
    pub(super) ids: usize,
}

struct Words(TokTrie);

impl TokenizerEnv for Words {
    fn tok_trie(&self) -> &TokTrie {
        &self.0
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.0.greedy_tokenize(bytes)
    }

    /// Any split of a legal text into tokens is legal: the model chooses.
    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}

/// Bits of `ids` among `vocab`.
fn bits(ids: impl IntoIterator<Item = u32>, vocab: usize) -> Vec<u32> {
    let mut words = vec![0; vocab.div_ceil(32)];
    for id in ids {
        words[id as usize / 32] |= 1 << (id % 32);
    }
    words
}

impl Vocabulary {
    fn new(tokenizer: &Tokenizer, ids: usize, eos: &[u32]) -> std::result::Result<Self, String> {
        let words: Vec<Vec<u8>> = (0..ids as u32)
            .map(|id| match tokenizer.grammar_word(id) {
                Some(word) if word.len() <= TOKEN_BYTES_MAX => word,
                Some(_) | None => Vec::new(),
            })
            .collect();
        let order = Order::of(&words);
        let trie = TokTrie::from(&TokRxInfo::new(ids as u32, eos[0]), &words);
        let env = Arc::new(Words(trie.with_eos_tokens(eos)));
        let caps = InferenceCapabilities::default();
        let slices = SlicedBiasComputer::general_slices();
        let factory = ParserFactory::new(&(env as _), caps, &slices);
        let mut factory = factory.map_err(|e| told(&e))?;
        factory.quiet();
        *factory.limits_mut() =
            ParserLimits { max_lexer_states: 50_000, verbose_errors: false, ..Default::default() };
        let otherwise = tokenizer.otherwise_at_first();
        let otherwise_at_first = otherwise.map(|of| bits(of, ids));
        let (tokenizer, eos) = (tokenizer.clone(), bits(eos.iter().copied(), ids));
        Ok(Self { tokenizer, factory, order, eos, otherwise_at_first, ids })
    }

    /// Tokens of the beginning of a text as a model would split it, about.
    pub(super) fn split(&self, text: &[u8]) -> Vec<u32> {
        let text = &text[..text.len().min(SPLIT_BYTES_MAX)];
        let trie = self.factory.tok_env().tok_trie();
        let same = |ids: &Vec<u32>| trie.decode_raw(ids) == text;
        let text_of = std::str::from_utf8(text).ok();
        let ids = text_of.and_then(|text| self.tokenizer.encode(text, false).ok()).filter(same);
        ids.unwrap_or_else(|| trie.greedy_tokenize(text))
    }

    /// Takes from an ending what a token of the text says of it, in whichever tokens it does; what
    /// goes another way takes nothing.
    pub(super) fn take_from(&self, ending: &mut Vec<u32>, token: u32) {
        let trie = self.factory.tok_env().tok_trie();
        let said = trie.token(token);
        if !ending.iter().flat_map(|id| trie.token(*id)).take(said.len()).eq(said) {
            return;
        }
        let mut left = said.len();
        while left > 0 {
            let own = trie.token(ending.remove(0));
            if own.len() > left {
                ending.splice(0..0, self.split(&own[left..]));
            }
            left = left.saturating_sub(own.len());
        }
    }

    /// Tokens that end the text legally from where `matcher` stands, if some were found. `known`:
    /// those that did before, less what the text took of them; they do inside of a string still.
    pub(super) fn ending(&self, matcher: &mut Matcher, known: &[u32]) -> Option<Vec<u32>> {
        if !known.is_empty() && ending::is_one(matcher, known, &self.eos) {
            return Some(known.to_vec());
        }
        ending::of(matcher, &self.order, &self.eos)
    }
}

/// What an error of the library says, in one line.
pub(super) fn told(error: &dyn std::fmt::Display) -> String {
    let text = format!("{error:#}");
    let line = text.lines().next().unwrap_or_default().trim_end_matches("<non-verbose/>");
    line.chars().take(MESSAGE_CHARS_MAX).collect()
}

/// A grammar, ready for sequences.
pub(crate) struct Compiled {
    start: Mutex<Matcher>,
    pub(super) vocabulary: Arc<Vocabulary>,
    /// What the first token may be.
    pub(super) first: Vec<u32>,
    /// Bytes by which one token may make the ending longer, where the grammar tells.
    largest: Option<usize>,
    /// A shortest text that was found, in tokens; nothing where none was.
    shortest: OnceLock<Option<Vec<u32>>>,
    /// Whether matchers take tokens back.
    goes_back: OnceLock<bool>,
}

impl Compiled {
    fn new(vocabulary: Arc<Vocabulary>, grammar: &Grammar) -> std::result::Result<Self, String> {
        let mut largest = None;
        let source = match grammar {
            Grammar::JsonSchema(text) => {
                let schema = schema::prepared(text)?;
                largest = Some(schema::largest(&schema));
                GrammarWithLexer::from_json_schema(schema)
            }
            Grammar::Regex(text) if text.is_empty() => {
                return Err("the regular expression is empty".to_owned())
            }
            // The library would leave it out.
            Grammar::Regex(text) if text.len() % 2 != text.trim_end_matches('\\').len() % 2 => {
                return Err("the regular expression ends with a backslash".to_owned())
            }
            Grammar::Regex(text) => GrammarWithLexer::from_regex(text),
            Grammar::Lark(text) if text.lines().count() > LINES_MAX => {
                return Err(format!("wanted at most {LINES_MAX} lines"))
            }
            Grammar::Lark(text) => GrammarWithLexer::from_lark(text.clone()),
        };
        let parser = vocabulary.factory.create_parser(TopLevelGrammar::from_grammar(source));
        let mut start = Matcher::new(parser);
        let first = match start.get_error() {
            None => start.compute_mask_or_eos().map_err(|e| told(&e))?,
            Some(error) => return Err(told(&error)),
        };
        let mut first = first.as_slice().to_vec();
        first.resize(vocabulary.ids.div_ceil(32), 0);
        if let Some(otherwise) = &vocabulary.otherwise_at_first {
            // A grammar that begins with a space has no other way to begin.
            let rest: Vec<u32> = first.iter().zip(otherwise).map(|(a, b)| a & !b).collect();
            first = if rest.iter().any(|word| *word != 0) { rest } else { first };
        }
        let (start, shortest, goes_back) = (Mutex::new(start), OnceLock::new(), OnceLock::new());
        Ok(Self { start, vocabulary, first, largest, shortest, goes_back })
    }

    /// The state before the first token, to be moved on and to be called off.
    pub(super) fn begin(&self) -> Matcher {
        lock(&self.start).deep_clone().into_cancellable()
    }

    /// Whether matchers take tokens back: not where lexemes have bounds of their own.
    pub(super) fn goes_back(&self) -> bool {
        let works = || {
            let both = self.first.iter().zip(&self.vocabulary.eos);
            let words: Vec<u32> = both.map(|(all, eos)| all & !eos).collect();
            let Some(at) = words.iter().position(|word| *word != 0) else { return false };
            let id = 32 * at as u32 + words[at].trailing_zeros();
            let mut matcher = lock(&self.start).deep_clone();
            matcher.consume_token(id).is_ok() && matcher.rollback(1).is_ok()
        };
        *self.goes_back.get_or_init(works)
    }

    /// A legal text of few tokens, if one was found.
    pub(super) fn shortest(&self) -> Option<&[u32]> {
        let find = || self.vocabulary.ending(&mut lock(&self.start).deep_clone(), &[]);
        self.shortest.get_or_init(find).as_deref()
    }

    /// Tokens by which one token may make the shortest ending longer, about.
    pub(super) fn growth(&self) -> usize {
        let shortest = self.shortest().unwrap_or_default();
        let tokens = match self.largest {
            // As dense as the shortest text, whose tokens are mostly those of names and marks.
            Some(bytes) => {
                let all = self.vocabulary.order.bytes(shortest).max(1);
                let dense = shortest.len().max(all.div_ceil(4));
                (bytes * dense).div_ceil(all)
            }
            None => shortest.len(),
        };
        tokens.max(GROWTH_MIN)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// All grammars of an engine.
pub(crate) struct Grammars(Arc<Shared>);

struct Shared {
    tokenizer: Tokenizer,
    ids: usize,
    eos: Vec<u32>,
    vocabulary: OnceLock<std::result::Result<Arc<Vocabulary>, String>>,
    /// The most recently used one last.
    kept: Mutex<Vec<(Grammar, Arc<Compiled>)>>,
    times: Arc<Counted>,
}

impl Grammars {
    /// For a model with so many ids, of which `eos` end a sequence.
    pub(crate) fn new(tokenizer: Tokenizer, ids: usize, eos: &[u32]) -> Self {
        let eos = eos.iter().copied().filter(|id| (*id as usize) < ids).collect();
        let (vocabulary, kept, times) = (OnceLock::new(), Mutex::default(), Arc::default());
        Self(Arc::new(Shared { tokenizer, ids, eos, vocabulary, kept, times }))
    }

    /// How long masks took.
    pub(crate) fn times(&self) -> &Arc<Counted> {
        &self.0.times
    }

    /// Whether requests may have one.
    ///
    /// # Errors
    /// [`Error::Grammar`] with the reason where not.
    pub(crate) fn check(&self) -> Result<()> {
        let Shared { eos, tokenizer, .. } = &*self.0;
        let refuse = |why: String| Err(Error::Grammar(why));
        if eos.is_empty() {
            return refuse("the model has no end-of-sequence id to end one with".to_owned());
        }
        if !tokenizer.has_words() {
            return refuse("what this tokenizer's ids add to a text depends on others".to_owned());
        }
        Ok(())
    }

    /// Makes what all grammars share, where they can run: the first one need not wait for it.
    pub(crate) fn warm(&self, patience: &Patience<'_>) -> Result<()> {
        if self.check().is_err() {
            return Ok(());
        }
        let shared = Arc::clone(&self.0);
        apart(COMPILING, STACK_BYTES, patience, move |_| drop(shared.vocabulary()))
    }

    /// A grammar, from those that are kept or compiled now.
    ///
    /// # Errors
    /// [`Error::Grammar`] for one that cannot be kept to, [`Error::GivenUp`].
    pub(crate) fn compiled(
        &self,
        grammar: &Grammar,
        patience: &Patience<'_>,
    ) -> Result<Arc<Compiled>> {
        self.check()?;
        let bytes = grammar.definition().len();
        if bytes > DEFINITION_BYTES_MAX {
            let most = DEFINITION_BYTES_MAX;
            return Err(Error::Grammar(format!("wanted at most {most} bytes, got {bytes}")));
        }
        if let Some(found) = self.0.kept(grammar) {
            return Ok(found);
        }
        let (shared, wanted) = (Arc::clone(&self.0), grammar.clone());
        let hurried = patience.at_most(Some(COMPILE_S));
        let done = apart(COMPILING, STACK_BYTES, &hurried, move |_| shared.compile(&wanted));
        match done {
            Ok(compiled) => compiled.map_err(Error::Grammar),
            Err(Error::GivenUp { late: true, .. }) => {
                patience.check(COMPILING)?;
                Err(Error::Grammar(format!("compiling it takes longer than {COMPILE_S} s")))
            }
            Err(error) => Err(error),
        }
    }
}

const COMPILING: &str = "compiling a grammar";

impl Shared {
    fn vocabulary(&self) -> std::result::Result<Arc<Vocabulary>, String> {
        let make = || Vocabulary::new(&self.tokenizer, self.ids, &self.eos).map(Arc::new);
        self.vocabulary.get_or_init(|| guarded(make)).clone()
    }

    fn kept(&self, grammar: &Grammar) -> Option<Arc<Compiled>> {
        let mut kept = lock(&self.kept);
        let at = kept.iter().position(|(known, _)| known == grammar)?;
        kept[at..].rotate_left(1);
        kept.last().map(|(_, compiled)| Arc::clone(compiled))
    }

    fn compile(&self, grammar: &Grammar) -> std::result::Result<Arc<Compiled>, String> {
        let vocabulary = self.vocabulary()?;
        let compiled = Arc::new(guarded(|| Compiled::new(vocabulary, grammar))?);
        let mut kept = lock(&self.kept);
        let full = kept.len() >= KEPT_MAX;
        let gone = full.then(|| kept.remove(0));
        kept.push((grammar.clone(), Arc::clone(&compiled)));
        drop(kept);
        drop(gone);
        Ok(compiled)
    }
}

/// The library panics on some inputs; what it worked on is dropped.
fn guarded<T>(
    work: impl FnOnce() -> std::result::Result<T, String>,
) -> std::result::Result<T, String> {
    let failed = |_| Err("the library behind grammars failed on it".to_owned());
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(failed)
}
