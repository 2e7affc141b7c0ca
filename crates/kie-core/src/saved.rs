//! A session as a file: what was said, its ids, and the keys and values that the cache has of them.
//!
//! The container is safetensors. `session` is a JSON text, `ids` the ids of all turns, `page.D.G`
//! the bytes of page D of page group G, `sums` the CRC-32 of each of these, in that order.
//!
//! # Invariants
//! * A file appears whole or not at all; what is read is checked before anything is made of it.
//! * Ids and words are of one model: the file names its weights, `dtype` and pages, and only an
//!   engine that has the same takes it. Pages are used only where this engine would have made the
//!   same bits; elsewhere they are computed again when the session speaks.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::io::Read as _;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use safetensors::tensor::{serialize_to_file, Dtype, SafeTensors, View};
use serde_json::{json, Value};

use crate::errand::{Copied, Stored};
use crate::error::{Error, Result};
use crate::json;
use crate::memory::PAGE;
use crate::patience::Patience;
use crate::primitive::now_ns;

/// Version of the file's format.
const FORMAT: u64 = 1;
/// Bytes of all but the pages, at most.
const WORDS_MAX: u64 = 64 << 20;
/// Bytes that are read or written between two looks at what may end it, about.
const BITE_BYTES: usize = 4 << 20;
const SAVING: &str = "saving a session";
const LOADING: &str = "loading a session";

/// What a file of a session must agree with.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Identity {
    /// The model's name, for messages.
    pub(crate) model: String,
    /// Sample of the weights, in hex.
    pub(crate) weights: String,
    /// As the configuration has it.
    pub(crate) dtype: String,
    /// What a page of each group holds, in words, and its bytes.
    pub(crate) layout: Vec<(String, u64)>,
    /// What computes keys and values: bits are the same where it is.
    pub(crate) made_by: String,
    /// Cached pages have the bits of a cold run.
    pub(crate) reproducible: bool,
    /// Positions of a longest sequence.
    pub(crate) context: usize,
}

/// The state behind a number of turns.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct State {
    pub(crate) tokens: Vec<u32>,
    /// Chat only: what the template is given.
    pub(crate) messages: Vec<Value>,
    /// Chat only: what `tokens` are the text of, so far as the template wrote it.
    pub(crate) text: String,
}

/// A session that was read.
pub(crate) struct Read {
    pub(crate) states: Vec<State>,
    /// Pages of the last state's ids; none where they are of no use here.
    pub(crate) pages: Option<Arc<dyn Stored>>,
}

/// A tensor to be written.
struct Piece<'a> {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Cow<'a, [u8]>,
    patience: &'a Patience<'a>,
    /// What ended it; what is written from then on is of no use.
    failed: &'a RefCell<Option<Error>>,
}

impl View for Piece<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let mut failed = self.failed.borrow_mut();
        if let (None, Err(error)) = (&*failed, self.patience.check(SAVING)) {
            *failed = Some(error);
        }
        Cow::Borrowed(if failed.is_some() { &[] } else { &self.bytes })
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

fn words(ids: &[u32]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect()
}

/// Writes a session.
///
/// # Errors
/// [`Error::Write`]; [`Error::GivenUp`].
pub(crate) fn write(
    path: &Path,
    identity: &Identity,
    (chat, states): (bool, &[State]),
    copied: &[Copied],
    patience: &Patience<'_>,
) -> Result<()> {
    let unwritten = |why: &dyn std::fmt::Display| Error::Write {
        file: path.to_owned(),
        detail: why.to_string(),
    };
    if path.metadata().is_ok_and(|about| !about.is_file()) {
        return Err(unwritten(&"something that is no regular file is there"));
    }
    let (told, ids) = described(identity, chat, states, copied);
    let failed = RefCell::new(None);
    let piece =
        |dtype, shape: Vec<usize>, bytes| Piece { dtype, shape, bytes, patience, failed: &failed };
    let bytes = |bytes| {
        let bytes: Cow<'_, [u8]> = bytes;
        piece(Dtype::U8, vec![bytes.len()], bytes)
    };
    let numbers = |all: &[u32]| piece(Dtype::I32, vec![all.len()], Cow::Owned(words(all)));
    let mut pieces = vec![
        ("session".to_owned(), bytes(Cow::Owned(told.to_string().into_bytes()))),
        ("ids".to_owned(), numbers(&ids)),
    ];
    for Copied { depth, group, bytes: page } in copied {
        pieces.push((format!("page.{depth}.{group}"), bytes(Cow::Borrowed(&page[..]))));
    }
    let mut sums = Vec::with_capacity(pieces.len());
    for (_, piece) in &pieces {
        patience.check(SAVING)?;
        sums.push(crc32fast::hash(&piece.bytes));
    }
    pieces.push(("sums".to_owned(), numbers(&sums)));
    let name = path.file_name().ok_or_else(|| unwritten(&"it names no file"))?;
    let unique = format!("{}-{}.partial", std::process::id(), now_ns());
    let partial = path.with_file_name(format!(".{}.{unique}", name.to_string_lossy()));
    let written =
        serialize_to_file(pieces, None, &partial).map_err(|why| unwritten(&why)).and_then(|()| {
            let synced = fs::File::open(&partial).and_then(|file| file.sync_all());
            synced.map_err(|why| unwritten(&why))
        });
    let written = failed.take().map_or(written, Err);
    written
        .and_then(|()| fs::rename(&partial, path).map_err(|why| unwritten(&why)))
        .inspect_err(|_| drop(fs::remove_file(&partial)))
}

/// The JSON text, and all ids. A state is told by what it has in common with the one before, and
/// what is new.
fn described(
    identity: &Identity,
    chat: bool,
    states: &[State],
    copied: &[Copied],
) -> (Value, Vec<u32>) {
    let none = State::default();
    let mut ids = Vec::new();
    let mut before = &none;
    let mut told = Vec::new();
    for state in states {
        let common = before.tokens.iter().zip(&state.tokens).take_while(|(a, b)| a == b).count();
        let said = before.messages.iter().zip(&state.messages);
        let said = said.take_while(|(a, b)| a == b).count();
        let rest = state.text.strip_prefix(&before.text);
        ids.extend(&state.tokens[common..]);
        told.push(json!({
            "ids_kept": common, "ids_new": state.tokens.len() - common,
            "messages_kept": said, "messages_new": state.messages[said..],
            "text_kept": rest.map_or(0, |_| before.text.len()),
            "text_new": rest.unwrap_or(&state.text),
        }));
        before = state;
    }
    let layout: Vec<&str> = identity.layout.iter().map(|(what, _)| what.as_str()).collect();
    let told = json!({
        "format": FORMAT, "kie": env!("CARGO_PKG_VERSION"), "model": identity.model,
        "weights": identity.weights, "dtype": identity.dtype, "layout": layout,
        "made_by": identity.made_by, "reproducible": identity.reproducible,
        "pages": copied.last().map_or(0, |last| last.depth + 1), "chat": chat, "states": told,
    });
    (told, ids)
}

/// The bytes of a file, and where its pages lie in them.
struct Pages {
    file: Vec<u8>,
    /// By depth and group.
    at: BTreeMap<(usize, usize), Range<usize>>,
    pages: usize,
}

impl Stored for Pages {
    fn pages(&self) -> usize {
        self.pages
    }

    fn bytes(&self, depth: usize, group: usize) -> Option<&[u8]> {
        self.at.get(&(depth, group)).map(|range| &self.file[range.clone()])
    }
}

/// A file that is read.
struct Reader<'a> {
    path: &'a Path,
    identity: &'a Identity,
}

/// Reads a session.
///
/// # Errors
/// [`Error::Load`] names the file, the field, what is wanted and what there is; [`Error::GivenUp`].
pub(crate) fn read(
    path: &Path,
    identity: &Identity,
    (vocab, chat): (usize, bool),
    patience: &Patience<'_>,
) -> Result<Read> {
    let reader = Reader { path, identity };
    let file = reader.bytes(patience)?;
    let (told, ids, at) = reader.parts(&file, patience)?;
    reader.check(&told, chat)?;
    for ((depth, group), range) in &at {
        let bytes = identity.layout.get::<usize>(*group).map(|(_, bytes)| *bytes);
        if bytes != Some(range.len() as u64) {
            let wanted = bytes.map_or("no such group".to_owned(), |n| format!("{n} bytes"));
            let got = format!("{} bytes", range.len());
            return Err(reader.wrong(&format!("page.{depth}.{group}"), wanted, got));
        }
    }
    let states = reader.states(&told, &ids, vocab)?;
    let longest = states.iter().map(|state| state.tokens.len()).max().unwrap_or(0);
    if longest > identity.context {
        let wanted = format!("at most {} tokens, this engine's max_seq_len", identity.context);
        return Err(reader.wrong("states", wanted, format!("{longest} tokens")));
    }
    let pages = told["pages"].as_u64().unwrap_or_default() as usize;
    let tokens = states.last().map_or(0, |state| state.tokens.len());
    if pages > tokens / PAGE || (0..pages).any(|depth| !at.contains_key(&(depth, 0))) {
        let wanted = format!("a page.D.0 for each of {pages} pages of {tokens} ids");
        return Err(reader.wrong("pages", wanted, format!("{} tensors", at.len())));
    }
    // Bits that this engine would have made itself.
    let exact = told["reproducible"] == Value::Bool(true);
    let same = told["made_by"].as_str() == Some(&identity.made_by);
    let of_use = pages > 0 && same && (exact || !identity.reproducible);
    let pages = of_use.then(|| Arc::new(Pages { file, at, pages }) as Arc<dyn Stored>);
    Ok(Read { states, pages })
}

/// Where each page lies, by depth and group.
type Places = BTreeMap<(usize, usize), Range<usize>>;

impl Reader<'_> {
    fn wrong(&self, field: &str, wanted: impl Into<String>, got: impl Into<String>) -> Error {
        Error::tensor(self.path, field, wanted, got)
    }

    /// The file's bytes, no more than a session of this engine can have.
    fn bytes(&self, patience: &Patience<'_>) -> Result<Vec<u8>> {
        let wanted = "a file of kie's session.save()";
        let failed = |got: String| Error::load(self.path, wanted, got);
        let (mut file, length) = kie_kernels::file::open(self.path).map_err(failed)?;
        let page: u64 = self.identity.layout.iter().map(|(_, bytes)| bytes).sum();
        let most = WORDS_MAX + self.identity.context.div_ceil(PAGE) as u64 * page;
        if length > most {
            let wanted = format!("{wanted}, at most {most} bytes for this engine's context");
            return Err(Error::load(self.path, wanted, format!("{length} bytes")));
        }
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(length as usize).map_err(|_| Error::OutOfMemory {
            need: length,
            free: 0,
            plan: format!("{} on the host", self.path.display()),
        })?;
        // What grows meanwhile is not followed; what shrinks is found by its header.
        while (bytes.len() as u64) < length {
            patience.check(LOADING)?;
            let left = (length - bytes.len() as u64).min(BITE_BYTES as u64);
            let got = file.by_ref().take(left).read_to_end(&mut bytes);
            if got.map_err(|why| failed(why.to_string()))? == 0 {
                break;
            }
        }
        Ok(bytes)
    }

    /// What the tensors hold, their sums checked.
    fn parts(&self, file: &[u8], patience: &Patience<'_>) -> Result<(Value, Vec<u32>, Places)> {
        let wanted = "a file of kie's session.save()";
        let tensors = SafeTensors::deserialize(file)
            .map_err(|why| Error::load(self.path, wanted, why.to_string()))?;
        let one = |name: &str, dtype: Dtype| {
            let tensor = tensors.tensor(name).ok();
            let tensor = tensor.filter(|t| t.dtype() == dtype && t.shape().len() == 1);
            tensor.ok_or_else(|| self.wrong(name, format!("a list of {dtype:?}"), "none"))
        };
        let numbers = |name: &str| -> Result<Vec<u32>> {
            let list = one(name, Dtype::I32)?;
            let words = list.data().as_chunks::<4>().0.iter();
            Ok(words.map(|word| u32::from_le_bytes(*word)).collect())
        };
        let (session, ids) = (one("session", Dtype::U8)?, numbers("ids")?);
        let mut places = Places::new();
        for (name, tensor) in tensors.iter() {
            if ["session", "ids", "sums"].contains(&name) {
                continue;
            }
            let place = name.strip_prefix("page.").and_then(|rest| rest.split_once('.'));
            let place = place.and_then(|(d, g)| Some((d.parse().ok()?, g.parse().ok()?)));
            let Some((depth, group)) = place else {
                return Err(self.wrong(
                    name,
                    "session, ids, sums and page.D.G",
                    "a surplus tensor",
                ));
            };
            let start = tensor.data().as_ptr() as usize - file.as_ptr() as usize;
            places.insert((depth, group), start..start + tensor.data().len());
        }
        let sums = numbers("sums")?;
        let named = [
            ("session".to_owned(), session.data()),
            ("ids".to_owned(), one("ids", Dtype::I32)?.data()),
        ];
        let pages = places.iter().map(|((d, g), at)| (format!("page.{d}.{g}"), &file[at.clone()]));
        if sums.len() != named.len() + places.len() {
            let wanted = format!("{} sums", named.len() + places.len());
            return Err(self.wrong("sums", wanted, sums.len().to_string()));
        }
        for ((name, bytes), sum) in named.into_iter().chain(pages).zip(&sums) {
            patience.check(LOADING)?;
            let got = crc32fast::hash(bytes);
            if got != *sum {
                return Err(self.wrong(
                    &name,
                    format!("bytes with CRC-32 {sum:08x}"),
                    format!("{got:08x}"),
                ));
            }
        }
        let told = json::parse(session.data())
            .map_err(|why| self.wrong("session", "a JSON text", why.to_string()))?;
        Ok((told, ids, places))
    }

    /// Whether the file is of this format, model and kind.
    fn check(&self, told: &Value, chat: bool) -> Result<()> {
        let identity = self.identity;
        if told["format"].as_u64() != Some(FORMAT) {
            let got = format!("{}, written by kie {}", told["format"], told["kie"]);
            return Err(self.wrong("format", FORMAT.to_string(), got));
        }
        let of = |weights: &str, model: &str| format!("{weights} ({model})");
        let text = |key: &str| told[key].as_str().unwrap_or_default();
        if text("weights") != identity.weights {
            let wanted = of(&identity.weights, &identity.model);
            return Err(self.wrong("weights", wanted, of(text("weights"), text("model"))));
        }
        if text("dtype") != identity.dtype {
            return Err(self.wrong("dtype", &identity.dtype, text("dtype")));
        }
        let layout = Value::from_iter(identity.layout.iter().map(|(what, _)| what.as_str()));
        if told["layout"] != layout {
            return Err(self.wrong("layout", layout.to_string(), told["layout"].to_string()));
        }
        if told["chat"] != Value::Bool(chat) {
            let wanted = format!("{chat}, as the model's tokenizer has a chat template or none");
            return Err(self.wrong("chat", wanted, told["chat"].to_string()));
        }
        Ok(())
    }

    /// What the model has seen after each turn.
    fn states(&self, told: &Value, ids: &[u32], vocab: usize) -> Result<Vec<State>> {
        let list = told["states"].as_array().filter(|list| !list.is_empty());
        let list = list.ok_or_else(|| self.wrong("states", "a list of states", "none"))?;
        if let Some(id) = ids.iter().find(|id| **id as usize >= vocab) {
            return Err(self.wrong("ids", format!("ids below {vocab}"), id.to_string()));
        }
        let mut left = ids;
        let mut states: Vec<State> = Vec::with_capacity(list.len());
        for (at, one) in list.iter().enumerate() {
            let before = states.last().cloned().unwrap_or_default();
            let next = after(before, one, &mut left).ok_or_else(|| {
                let got: String = one.to_string().chars().take(80).collect();
                self.wrong(&format!("states[{at}]"), "what it has of the state before", got)
            })?;
            states.push(next);
        }
        if !left.is_empty() {
            return Err(self.wrong("ids", "ids of all states", format!("{} more", left.len())));
        }
        Ok(states)
    }
}

/// The state that is told by what it keeps of the one before, and what is new.
fn after(mut state: State, told: &Value, left: &mut &[u32]) -> Option<State> {
    let count = |key: &str| told[key].as_u64().and_then(|n| usize::try_from(n).ok());
    let (kept, new) = (count("ids_kept")?, count("ids_new")?);
    let said = count("messages_kept")?;
    if kept > state.tokens.len() || new > left.len() || said > state.messages.len() {
        return None;
    }
    state.tokens.truncate(kept);
    let (these, rest) = left.split_at(new);
    state.tokens.extend_from_slice(these);
    *left = rest;
    state.messages.truncate(said);
    state.messages.extend_from_slice(told["messages_new"].as_array()?);
    let text = state.text.get(..count("text_kept")?)?.len();
    state.text.truncate(text);
    state.text.push_str(told["text_new"].as_str()?);
    Some(state)
}
