//! What every id of a tokenizer adds to a text, looked up once from its decoder.

use tokenizers::decoders::DecoderWrapper;
use tokenizers::Decoder as _;

/// Bytes of the texts of all tokens. The largest published vocabulary has about 3 MB.
const PIECES_BYTES_MAX: usize = 256 << 20;

/// What an id adds to the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Nothing: a special token, or no token at all.
    Skip,
    /// Its bytes.
    Text,
    /// One byte of a run that byte fallback spelled out.
    Byte,
}

#[derive(Debug, Clone, Copy)]
struct Piece {
    start: u32,
    len: u32,
    kind: Kind,
}

/// What each id adds to the text, indexed by id.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    pieces: Vec<Piece>,
    bytes: Vec<u8>,
}

impl Pieces {
    fn add(&mut self, kind: Kind, bytes: &[u8]) -> Option<()> {
        if self.bytes.len() + bytes.len() > PIECES_BYTES_MAX {
            return None;
        }
        let (start, len) = (self.bytes.len().try_into().ok()?, bytes.len().try_into().ok()?);
        self.bytes.extend_from_slice(bytes);
        self.pieces.push(Piece { start, len, kind });
        Some(())
    }

    pub(crate) fn get(&self, id: u32) -> (Kind, &[u8]) {
        match self.pieces.get(id as usize) {
            Some(p) => (p.kind, &self.bytes[p.start as usize..][..p.len as usize]),
            None => (Kind::Skip, &[]),
        }
    }
}

/// How the pieces of the ids become text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shape {
    /// Bytes of all tokens in a row, then broken UTF-8 to U+FFFD as `String::from_utf8_lossy`.
    Bytes,
    /// Texts in a row. A run of byte tokens is its text if all of it is UTF-8, else one U+FFFD for
    /// each byte; then at most `.1` characters `.0` are cut off the front.
    Texts(char, usize),
    /// Anything else: `decode` in a window that moves along.
    Windowed,
}

/// What every id adds to the text, made once per tokenizer from its decoder.
///
/// Known shapes: `ByteLevel`; and any sequence of steps that look at one token only (`Replace`,
/// `Metaspace`, `WordPiece`, `Strip`), then `ByteFallback`, `Fuse`, and `Strip` at the front, each
/// of which may be absent (Llama 2, Gemma, T5, ...); and no decoder at all (joined by spaces).
#[derive(Debug)]
pub(crate) struct TextTable {
    pub(crate) shape: Shape,
    pub(crate) rest: Pieces,
    /// Where the first token of a text reads differently.
    pub(crate) first: Option<Pieces>,
    pub(crate) piece_bytes_max: usize,
}

/// Steps of a decoder, taken apart.
struct Steps<'a> {
    single: Vec<&'a DecoderWrapper>,
    byte_level: bool,
    byte_fallback: bool,
    strip: (char, usize),
}

impl<'a> Steps<'a> {
    /// `None` if the steps make no known shape.
    fn of(decoder: Option<&'a DecoderWrapper>) -> Option<Self> {
        let mut flat = Vec::new();
        flatten(decoder, &mut flat);
        let mut steps = flat.into_iter().peekable();
        let mut out =
            Self { single: Vec::new(), byte_level: false, byte_fallback: false, strip: (' ', 0) };
        while let Some(step) = steps.next_if(|s| sees_one_token(s)) {
            out.single.push(step);
        }
        if steps.next_if(|s| matches!(s, DecoderWrapper::ByteLevel(_))).is_some() {
            out.byte_level = true;
        } else if steps.next_if(|s| matches!(s, DecoderWrapper::ByteFallback(_))).is_some() {
            out.byte_fallback = true;
        }
        let mut fused = false;
        while steps.next_if(|s| matches!(s, DecoderWrapper::Fuse(_))).is_some() {
            fused = true;
        }
        if let Some(DecoderWrapper::Strip(strip)) = steps.next_if(|_| fused && !out.byte_level) {
            if strip.stop == 0 {
                out.strip = (strip.content, strip.start);
            } else {
                return None;
            }
        }
        steps.all(|s| matches!(s, DecoderWrapper::Fuse(_))).then_some(out)
    }

    /// The token as the steps that look at one token leave it, first in the text and later.
    fn read(&self, token: String) -> tokenizers::Result<(String, String)> {
        let mut first = vec![token.clone()];
        let mut later = vec![String::from("x"), token];
        for step in &self.single {
            first = step.decode_chain(first)?;
            later = step.decode_chain(later)?;
        }
        Ok((first.pop().unwrap_or_default(), later.pop().unwrap_or_default()))
    }

    fn classify<'b>(&self, text: &'b str, scratch: &'b mut Vec<u8>) -> (Kind, &'b [u8]) {
        scratch.clear();
        if self.byte_level {
            scratch.extend(text.chars().map_while(byte_of));
            let all_known = scratch.len() == text.chars().count();
            return (Kind::Text, if all_known { scratch } else { text.as_bytes() });
        }
        let hex = text.strip_prefix("<0x").and_then(|t| t.strip_suffix('>'));
        let hex = hex.filter(|h| self.byte_fallback && h.len() == 2);
        match hex.and_then(|h| u8::from_str_radix(h, 16).ok()) {
            Some(byte) => {
                scratch.push(byte);
                (Kind::Byte, scratch)
            }
            None => (Kind::Text, text.as_bytes()),
        }
    }
}

fn flatten<'a>(decoder: Option<&'a DecoderWrapper>, out: &mut Vec<&'a DecoderWrapper>) {
    match decoder {
        Some(DecoderWrapper::Sequence(s)) => {
            s.get_decoders().iter().for_each(|d| flatten(Some(d), out));
        }
        Some(step) => out.push(step),
        None => {}
    }
}

/// True for steps that turn the list of tokens into a list of as many, each from its own token
/// and whether that is the first.
fn sees_one_token(step: &DecoderWrapper) -> bool {
    match step {
        DecoderWrapper::Replace(_)
        | DecoderWrapper::Metaspace(_)
        | DecoderWrapper::WordPiece(_) => true,
        // More would count below zero on a short token.
        DecoderWrapper::Strip(s) => s.stop == 0,
        DecoderWrapper::BPE(_)
        | DecoderWrapper::ByteLevel(_)
        | DecoderWrapper::CTC(_)
        | DecoderWrapper::Sequence(_)
        | DecoderWrapper::Fuse(_)
        | DecoderWrapper::ByteFallback(_) => false,
    }
}

/// The byte that a character of a byte-level token stands for, as GPT-2 numbers them: printable
/// bytes are themselves, the others follow from U+0100 on in order.
fn byte_of(c: char) -> Option<u8> {
    match u32::from(c) {
        n @ (0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF) => u8::try_from(n).ok(),
        n @ 0x100..=0x120 => u8::try_from(n - 0x100).ok(),
        n @ 0x121..=0x142 => u8::try_from(n - 0x121 + 0x7F).ok(),
        0x143 => Some(0xAD),
        _ => None,
    }
}

impl TextTable {
    /// Bytes that an id adds behind another one; none for a special token, or where they depend on
    /// more than the id.
    pub(crate) fn bytes(&self, id: u32) -> &[u8] {
        self.rest.get(id).1
    }

    /// For ids below `ids`. The error says which step of the decoder failed.
    pub(crate) fn new(tokenizer: &tokenizers::Tokenizer, ids: usize) -> tokenizers::Result<Self> {
        let (rest, first) = (Pieces::default(), Pieces::default());
        let shape = Shape::Windowed;
        let mut table = Self { shape, rest, first: None, piece_bytes_max: 0 };
        let decoder = tokenizer.get_decoder();
        let Some(steps) = Steps::of(decoder) else { return Ok(table) };
        let mut first = first;
        let mut scratch = Vec::new();
        let mut differs = false;
        let added = tokenizer.get_added_vocabulary();
        for id in 0..u32::try_from(ids)? {
            let token = tokenizer.id_to_token(id).filter(|t| !added.is_special_token(t));
            let Some(token) = token else {
                table.rest.add(Kind::Skip, &[]).ok_or("tokens of more than 256 MiB of text")?;
                first.add(Kind::Skip, &[]).ok_or("tokens of more than 256 MiB of text")?;
                continue;
            };
            let (at_first, mut later) = steps.read(token)?;
            if decoder.is_none() {
                later.insert(0, ' ');
            }
            differs |= at_first != later;
            for (pieces, text) in [(&mut first, at_first), (&mut table.rest, later)] {
                let (kind, bytes) = steps.classify(&text, &mut scratch);
                table.piece_bytes_max = table.piece_bytes_max.max(bytes.len());
                pieces.add(kind, bytes).ok_or("tokens of more than 256 MiB of text")?;
            }
        }
        table.first = differs.then_some(first);
        table.shape = if steps.byte_level {
            Shape::Bytes
        } else {
            Shape::Texts(steps.strip.0, steps.strip.1)
        };
        Ok(table)
    }
}
