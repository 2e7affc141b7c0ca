//! Ids to text, one id at a time: [`TextDecoder`] and, behind it, [`StopMatcher`].
//!
//! Invariants:
//! - Text comes out in whole characters. The pieces of one decoder joined are exactly
//!   `Tokenizer::decode(ids, true)`; for decoders outside the known shapes (see `pieces.rs`) that
//!   holds as far as decoding in a window does.
//! - What comes out of a matcher joined is the text before the stop, however it was cut in pieces.
//! - With a known shape neither allocates once made, but for runs of byte tokens and pieces of text
//!   longer than their buffers ([`HELD_BYTES`]).

use kie_kernels::device;

use crate::error::{Error, Result};
use crate::patience::{apart, Patience};
use crate::pieces::{Kind, Shape};
use crate::tokenizer::{Tokenizer, STACK_BYTES};

/// Room for text that is held back.
const HELD_BYTES: usize = 4096;

/// Ids that become text between two looks whether it is still wanted.
const LOOK_EVERY: usize = 1 << 16;

const DECODING: &str = "decoding token ids";

/// [`Tokenizer::decode`], for as long as there is patience. What is given up ends soon where the
/// decoder is of a known shape; the library behind the others goes on for seconds.
///
/// # Errors
/// As [`Tokenizer::decode`], and [`Error::GivenUp`].
pub fn decode_within(
    tokenizer: &Tokenizer,
    ids: &[u32],
    skip_special: bool,
    patience: &Patience<'_>,
) -> Result<String> {
    let (tokenizer, ids) = (tokenizer.clone(), ids.to_vec());
    let decode = move |given_up| {
        tokenizer.check_ids(&ids)?;
        let table = tokenizer.text_table();
        let special = || ids.iter().any(|id| table.rest.get(*id).0 == Kind::Skip);
        match table.shape != Shape::Windowed && (skip_special || !special()) {
            true => in_pieces(&tokenizer, &ids, &given_up),
            false => tokenizer.decode(&ids, skip_special),
        }
    };
    apart(DECODING, STACK_BYTES, patience, decode)?
}

fn in_pieces(tokenizer: &Tokenizer, ids: &[u32], given_up: &device::Stop) -> Result<String> {
    let (mut decoder, mut text) = (TextDecoder::new(tokenizer), String::new());
    for ids in ids.chunks(LOOK_EVERY) {
        if given_up.is_set() {
            return Err(Error::GivenUp { what: DECODING, late: false });
        }
        ids.iter().for_each(|id| text.push_str(decoder.push(*id)));
    }
    text.push_str(decoder.finish());
    Ok(text)
}

/// Ids of one sequence in, its text out.
///
/// Text is held back while it is not certain: the bytes of a character that is not complete, and,
/// with byte fallback, a whole run of byte tokens (one broken character turns all of the run into
/// U+FFFD). Special tokens add nothing.
#[derive(Debug)]
pub struct TextDecoder {
    tokenizer: Tokenizer,
    at_start: bool,
    buffer: Buffer,
    window: Window,
}

impl TextDecoder {
    /// A decoder at the start of a text.
    pub fn new(tokenizer: &Tokenizer) -> Self {
        let table = tokenizer.text_table();
        let strip = match table.shape {
            Shape::Texts(content, count) => (content, count),
            Shape::Bytes | Shape::Windowed => (' ', 0),
        };
        Self {
            tokenizer: tokenizer.clone(),
            at_start: true,
            buffer: Buffer::new(HELD_BYTES + table.piece_bytes_max, strip),
            window: Window::default(),
        }
    }

    /// Takes the next id; returns the text that it completes, which may be empty.
    pub fn push(&mut self, id: u32) -> &str {
        let Self { tokenizer, at_start, buffer, window } = self;
        buffer.out.clear();
        let table = tokenizer.text_table();
        if table.shape == Shape::Windowed {
            window.push(tokenizer, id, &mut buffer.out);
            return &buffer.out;
        }
        let pieces = table.first.as_ref().filter(|_| *at_start).unwrap_or(&table.rest);
        let (kind, bytes) = pieces.get(id);
        *at_start &= kind == Kind::Skip;
        match (kind, table.shape) {
            (Kind::Skip, _) => {}
            (Kind::Text, Shape::Bytes) => buffer.put_bytes(bytes),
            (Kind::Text, Shape::Texts(..) | Shape::Windowed) => {
                buffer.end_run();
                buffer.put(std::str::from_utf8(bytes).expect("the table was made from a String"));
            }
            (Kind::Byte, _) => buffer.put_run(bytes),
        }
        &buffer.out
    }

    /// True if text is held back.
    pub fn holds_back(&self) -> bool {
        !self.buffer.held.is_empty() || self.window.ids.len() > self.window.read
    }

    /// Ends the text; returns what was held back, with U+FFFD for what never became complete.
    pub fn finish(&mut self) -> &str {
        self.buffer.out.clear();
        match self.tokenizer.text_table().shape {
            Shape::Bytes => self.buffer.end_bytes(),
            Shape::Texts(..) => self.buffer.end_run(),
            Shape::Windowed => self.window.finish(&self.tokenizer, &mut self.buffer.out),
        }
        &self.buffer.out
    }
}

/// Text that a call returns, and bytes held back for a later one.
#[derive(Debug)]
struct Buffer {
    out: String,
    /// The first `checked` bytes of a run are whole characters.
    held: Vec<u8>,
    checked: usize,
    /// The run of byte tokens is known not to be UTF-8.
    broken_run: bool,
    /// A character, and how many of it may still be cut off the front of the whole text.
    strip: (char, usize),
}

impl Buffer {
    fn new(held_bytes: usize, strip: (char, usize)) -> Self {
        Self {
            // Each byte may turn into a U+FFFD of three.
            out: String::with_capacity(3 * held_bytes),
            held: Vec::with_capacity(held_bytes),
            checked: 0,
            broken_run: false,
            strip,
        }
    }

    /// `String::from_utf8_lossy`, holding back a last character that is not complete.
    fn put_bytes(&mut self, bytes: &[u8]) {
        self.held.extend_from_slice(bytes);
        let mut at = 0;
        while at < self.held.len() {
            let rest = &self.held[at..];
            let (valid, broken) = match std::str::from_utf8(rest) {
                Ok(_) => (rest.len(), Some(0)),
                Err(e) => (e.valid_up_to(), e.error_len()),
            };
            let text = std::str::from_utf8(&rest[..valid]).expect("from_utf8 found it valid");
            self.out.push_str(text);
            at += valid;
            match broken {
                Some(0) => {}
                Some(bytes) => {
                    self.out.push(char::REPLACEMENT_CHARACTER);
                    at += bytes;
                }
                None => break,
            }
        }
        self.held.drain(..at);
    }

    /// What was cut short is one U+FFFD, as for `String::from_utf8_lossy`.
    fn end_bytes(&mut self) {
        if !self.held.is_empty() {
            self.held.clear();
            self.out.push(char::REPLACEMENT_CHARACTER);
        }
    }

    /// Goes on with a run of byte tokens.
    fn put_run(&mut self, bytes: &[u8]) {
        self.held.extend_from_slice(bytes);
        if !self.broken_run {
            match std::str::from_utf8(&self.held[self.checked..]) {
                Ok(_) => self.checked = self.held.len(),
                Err(e) => {
                    self.checked += e.valid_up_to();
                    self.broken_run = e.error_len().is_some();
                }
            }
        }
        if self.broken_run {
            self.put_replacements();
        }
    }

    /// Ends a run of byte tokens, if there is one.
    fn end_run(&mut self) {
        if self.checked < self.held.len() {
            self.put_replacements();
        } else if !self.held.is_empty() {
            let held = std::mem::take(&mut self.held);
            self.put(std::str::from_utf8(&held).expect("all of it was checked"));
            self.held = held;
            self.held.clear();
        }
        self.checked = 0;
        self.broken_run = false;
    }

    fn put_replacements(&mut self) {
        for _ in 0..self.held.len() {
            self.put("\u{FFFD}");
        }
        self.held.clear();
        self.checked = 0;
    }

    /// Adds text, less what is to be cut off the front of the whole.
    fn put(&mut self, mut text: &str) {
        while self.strip.1 > 0 && !text.is_empty() {
            match text.strip_prefix(self.strip.0) {
                Some(rest) => (text, self.strip.1) = (rest, self.strip.1 - 1),
                None => self.strip.1 = 0,
            }
        }
        self.out.push_str(text);
    }
}

/// Decoding in a window: text of the ids since the last cut, less what they had given before.
#[derive(Debug, Default)]
struct Window {
    ids: Vec<u32>,
    /// Text of `ids` that is out already.
    given: String,
    /// How many of `ids` gave it.
    read: usize,
}

impl Window {
    fn push(&mut self, tokenizer: &Tokenizer, id: u32, out: &mut String) {
        self.ids.push(id);
        let text = tokenizer.decode(&self.ids, true).unwrap_or_default();
        let new = text.get(self.given.len()..).unwrap_or_default();
        if new.is_empty() || new.ends_with(char::REPLACEMENT_CHARACTER) {
            return;
        }
        out.push_str(new);
        self.ids.drain(..self.read);
        self.read = self.ids.len();
        self.given = tokenizer.decode(&self.ids, true).unwrap_or_default();
    }

    fn finish(&mut self, tokenizer: &Tokenizer, out: &mut String) {
        let text = tokenizer.decode(&self.ids, true).unwrap_or_default();
        out.push_str(text.get(self.given.len()..).unwrap_or_default());
        *self = Self::default();
    }
}

/// One stop string and how much of it the text so far ends with.
#[derive(Debug)]
struct Stop {
    bytes: Vec<u8>,
    /// `borders[n]`: length of the longest proper suffix of the first n + 1 bytes that is also a
    /// prefix (Knuth, Morris and Pratt 1977).
    borders: Vec<usize>,
    matched: usize,
}

impl Stop {
    fn new(text: &str) -> Self {
        let bytes = text.as_bytes().to_vec();
        let mut borders = vec![0; bytes.len()];
        let mut n = 0;
        for at in 1..bytes.len() {
            while n > 0 && bytes[n] != bytes[at] {
                n = borders[n - 1];
            }
            n += usize::from(bytes[n] == bytes[at]);
            borders[at] = n;
        }
        Self { bytes, borders, matched: 0 }
    }

    /// Takes one byte of text; true if the stop string ends with it.
    fn step(&mut self, byte: u8) -> bool {
        if self.bytes.is_empty() {
            return false;
        }
        while self.matched > 0 && self.bytes[self.matched] != byte {
            self.matched = self.borders[self.matched - 1];
        }
        self.matched += usize::from(self.bytes[self.matched] == byte);
        self.matched == self.bytes.len()
    }
}

/// Text in, text without stop strings out.
///
/// The stop that is complete first wins; of those that end together, the longest, then the first
/// in the list. The outcome does not depend on how the text was cut. An empty stop never matches.
#[derive(Debug)]
pub struct StopMatcher {
    stops: Vec<Stop>,
    /// Text of the last call (the first `released` bytes) and what is held back.
    held: String,
    released: usize,
    hit: Option<usize>,
}

impl StopMatcher {
    /// A matcher at the start of a text.
    pub fn new(stops: &[String]) -> Self {
        let longest = stops.iter().map(String::len).max().unwrap_or(0);
        Self {
            stops: stops.iter().map(|s| Stop::new(s)).collect(),
            held: String::with_capacity(HELD_BYTES + longest),
            released: 0,
            hit: None,
        }
    }

    /// Takes the next piece; returns what can be released. After a [`hit`](Self::hit) the stop
    /// string and all behind it are dropped, and further pieces too.
    pub fn push(&mut self, piece: &str) -> &str {
        self.held.drain(..self.released);
        self.released = 0;
        if self.hit.is_some() {
            return "";
        }
        for (at, byte) in piece.bytes().enumerate() {
            let mut longest = 0;
            for (i, stop) in self.stops.iter_mut().enumerate() {
                if stop.step(byte) && stop.bytes.len() > longest {
                    longest = stop.bytes.len();
                    self.hit = Some(i);
                }
            }
            if self.hit.is_some() {
                let end = self.held.len() + at + 1;
                self.held.push_str(piece);
                self.held.truncate(end - longest);
                self.released = self.held.len();
                return &self.held;
            }
        }
        self.held.push_str(piece);
        let held_back = self.stops.iter().map(|s| s.matched).max().unwrap_or(0);
        self.released = self.held.len() - held_back;
        &self.held[..self.released]
    }

    /// True if text is held back.
    pub fn holds_back(&self) -> bool {
        self.hit.is_none() && self.released < self.held.len()
    }

    /// Which stop string ended the text, as an index into the list given to [`new`](Self::new).
    pub fn hit(&self) -> Option<usize> {
        self.hit
    }

    /// Ends the text; returns what was held back (nothing after a hit).
    pub fn finish(&mut self) -> &str {
        self.held.drain(..self.released);
        self.stops.iter_mut().for_each(|s| s.matched = 0);
        self.released = self.held.len();
        &self.held
    }
}
