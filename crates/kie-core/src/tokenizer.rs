//! Text to ids and back: a model folder's `tokenizer.json`, `tokenizer_config.json` and
//! `chat_template.jinja`.
//!
//! Invariants: every id that comes out is below the model's vocabulary; nothing in these files or
//! in a text makes it panic (the library behind it does on some, which is caught here); truncation
//! and padding that a file asks for are ignored, as transformers does.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use kie_kernels::{file, room};
use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::gguf;
use crate::growth::{decoded, Growth};
use crate::guarded::guarded;
use crate::patience::{apart, Patience};
use crate::pieces::{Kind, Shape, TextTable};
use crate::template::ChatTemplates;
use crate::weights::safetensors::Mapped;

/// Largest file read, in bytes. The largest published tokenizer.json has about 35 MB.
const FILE_BYTES_MAX: u64 = 256 << 20;

/// Of a thread that tokenizes.
pub(crate) const STACK_BYTES: usize = 16 << 20;

/// The tokens that a template sees by name, where `tokenizer_config.json` sets them.
const NAMED_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// What `add_special` does beyond the post-processor of `tokenizer.json`, where `add_bos_token` in
/// `tokenizer_config.json` says otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bos {
    AsProcessed,
    Prepend(u32),
    Drop,
}

/// The tokenizer of one model. Cheap to clone: clones share everything.
#[derive(Debug, Clone)]
pub struct Tokenizer(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    tokenizer: tokenizers::Tokenizer,
    growth: Growth,
    text: TextTable,
    templates: ChatTemplates,
    /// Ids of the tokenizer: the highest plus one.
    ids: usize,
    /// Ids of the model.
    model_ids: usize,
    bos: Option<u32>,
    eos: Option<u32>,
    bos_rule: Bos,
}

/// What a parsed tokenizer takes for each byte of its file, at most: maps of its vocabulary and
/// merges, in both directions.
const PARSED_BYTES: u64 = 48;
/// The same of what each has, whatever its size: patterns that are compiled.
const PARSED_LEAST: u64 = 1 << 20;

impl Tokenizer {
    /// Reads the tokenizer of the model in `dir`, whose embedding has `vocab` rows.
    ///
    /// # Errors
    /// [`Error::Load`] with file, wanted and got if a file is missing, broken or too large, or if
    /// the tokenizer has an id that the model has not (fewer ids than rows are fine).
    pub fn from_dir(dir: &Path, vocab: usize) -> Result<Self> {
        let (file, bytes, config) = if gguf::is_gguf(dir) {
            let found = Mapped::gguf(dir)?;
            let tokens = gguf::model::tokenizer(&found, dir)?;
            let config = Config::parse(dir.to_owned(), tokens.config)?;
            (dir.to_owned(), tokens.tokenizer.to_string().into_bytes(), config)
        } else {
            let file = dir.join("tokenizer.json");
            let bytes = read(&file, "the tokenizer of the model")?;
            (file, bytes, Config::read(dir)?)
        };
        let fail = |got: String| Error::load(&file, "a tokenizer.json", got);
        room::ask(parsed_bytes(&bytes))?;
        let growth = check_growth(&file, &bytes)?;
        let tokenizer = guarded(|| tokenizers::Tokenizer::from_bytes(&bytes)).map_err(fail)?;
        let tokenizer = guarded(|| without_limits(tokenizer)).map_err(fail)?;

        let ids = tokenizer.get_vocab(true).values().max().map_or(0, |&id| id as usize + 1);
        let processed = guarded(|| tokenizer.encode_fast("", true)).map_err(fail)?;
        let added = processed.get_ids().iter().max().map_or(0, |&id| id as usize + 1);
        if ids.max(added) > vocab || ids == 0 {
            let wanted = format!("at least one id, and none above the model's {vocab}");
            return Err(Error::load(&file, wanted, format!("{} ids", ids.max(added))));
        }
        let text = guarded(|| TextTable::new(&tokenizer, ids)).map_err(fail)?;
        let bos = config.id("bos_token", &tokenizer)?;
        let eos = config.id("eos_token", &tokenizer)?;
        let has_bos = bos.is_some() && processed.get_ids().first().copied() == bos;
        let bos_rule = match (config.add_bos, bos) {
            (Some(true), Some(bos)) if !has_bos => Bos::Prepend(bos),
            (Some(false), _) if has_bos => Bos::Drop,
            (Some(true | false) | None, _) => Bos::AsProcessed,
        };
        let templates = ChatTemplates::new(config.templates, config.tokens);
        let inner =
            Inner { tokenizer, growth, text, templates, ids, model_ids: vocab, bos, eos, bos_rule };
        Ok(Self(Arc::new(inner)))
    }

    /// Ids of `text`. Special tokens written in it are read as such; with `add_special` those that
    /// the model wants around a text (mostly: a first bos) are added.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`] for a text that the tokenizer gives up on.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        self.encode_within(text, add_special, &Patience::ENDLESS)
    }

    /// [`encode`](Self::encode), for as long as there is patience.
    ///
    /// # Errors
    /// As [`encode`](Self::encode), and [`Error::GivenUp`].
    pub fn encode_within(
        &self,
        text: &str,
        add_special: bool,
        patience: &Patience<'_>,
    ) -> Result<Vec<u32>> {
        // The library behind it takes a second for 500 kB, or much longer for odd expressions.
        let (this, text) = (self.clone(), text.to_owned());
        apart("tokenizing", STACK_BYTES, patience, move |_| this.encode_here(&text, add_special))?
    }

    fn encode_here(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        let encode = || {
            self.0.growth.check(text)?;
            self.0.tokenizer.encode_fast(text, add_special)
        };
        let encoding = guarded(encode).map_err(|e| {
            let bytes = text.len();
            Error::InvalidRequest(format!("text of {bytes} bytes cannot be tokenized: {e}"))
        })?;
        let mut ids = encoding.get_ids().to_vec();
        match self.0.bos_rule {
            Bos::Prepend(bos) if add_special => ids.insert(0, bos),
            Bos::Drop if add_special && !ids.is_empty() => drop(ids.remove(0)),
            Bos::AsProcessed | Bos::Prepend(_) | Bos::Drop => {}
        }
        match ids.iter().find(|&&id| id as usize >= self.0.model_ids) {
            None => Ok(ids),
            Some(id) => Err(Error::InvalidRequest(format!(
                "the tokenizer made id {id}, the model has ids below {}",
                self.0.model_ids
            ))),
        }
    }

    /// Text of `ids`, without special tokens if `skip_special`. Ids of the model that the tokenizer
    /// does not use add nothing.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`] for an id that the model does not have.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        let Inner { tokenizer, .. } = &*self.0;
        self.check_ids(ids)?;
        let special = |token: &str| tokenizer.get_added_vocabulary().is_special_token(token);
        let mut tokens = ids.iter().filter_map(|&id| tokenizer.id_to_token(id));
        // Some decoders of the library count below zero where there is nothing to decode.
        if tokens.all(|token| skip_special && special(&token)) {
            return Ok(String::new());
        }
        guarded(|| tokenizer.decode(ids, skip_special))
            .map_err(|e| Error::InvalidRequest(format!("ids cannot be decoded: {e}")))
    }

    /// Whether the model has all of `ids`.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`] for one that it does not have.
    pub(crate) fn check_ids(&self, ids: &[u32]) -> Result<()> {
        let most = self.0.model_ids;
        match ids.iter().find(|&&id| id as usize >= most) {
            None => Ok(()),
            Some(id) => Err(Error::InvalidRequest(format!("id {id}: wanted one below {most}"))),
        }
    }

    /// Id of a token as it stands in the vocabulary (`"<s>"`, `"Ġthe"`).
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.0.tokenizer.token_to_id(token)
    }

    /// Bytes that a token adds to a text. Of a special token those of its name; of an id that the
    /// tokenizer does not use none.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        match self.0.text.bytes(id) {
            [] => self.0.tokenizer.id_to_token(id).unwrap_or_default().into_bytes(),
            bytes => bytes.to_vec(),
        }
    }

    /// Ids of the tokenizer: the highest plus one. At most the model's.
    pub fn vocab(&self) -> usize {
        self.0.ids
    }

    /// The beginning-of-sequence id, where `tokenizer_config.json` names one.
    pub fn bos(&self) -> Option<u32> {
        self.0.bos
    }

    /// The end-of-sequence id, where `tokenizer_config.json` names one. A model's
    /// `generation_config.json` may list more.
    pub fn eos(&self) -> Option<u32> {
        self.0.eos
    }

    /// Whether the model comes with a chat template.
    pub fn has_chat_template(&self) -> bool {
        !self.0.templates.is_empty()
    }

    /// The text of the template that renders chats, with or without tools.
    pub fn chat_template(&self, with_tools: bool) -> Option<&str> {
        self.0.templates.source(with_tools)
    }

    /// Renders `messages` (a list of objects with `role` and `content`) with the model's chat
    /// template; `extra` are further variables (`tools`, `enable_thinking`, ...).
    ///
    /// # Errors
    /// [`Error::Template`] if there is no template, or it is broken, refuses the messages or runs
    /// over its budget.
    pub fn apply_chat_template(
        &self,
        messages: &Value,
        add_generation_prompt: bool,
        extra: &Map<String, Value>,
    ) -> Result<String> {
        self.apply_chat_template_within(messages, add_generation_prompt, extra, &Patience::ENDLESS)
    }

    /// [`apply_chat_template`](Self::apply_chat_template), for as long as there is patience (and
    /// for 10 s at most).
    ///
    /// # Errors
    /// As [`apply_chat_template`](Self::apply_chat_template), and [`Error::GivenUp`].
    pub fn apply_chat_template_within(
        &self,
        messages: &Value,
        add_generation_prompt: bool,
        extra: &Map<String, Value>,
        patience: &Patience<'_>,
    ) -> Result<String> {
        self.0.templates.render(messages, add_generation_prompt, extra, patience)
    }

    /// Ids of a rendered chat. The template writes the special tokens; none are added.
    ///
    /// # Errors
    /// As [`apply_chat_template`](Self::apply_chat_template) and [`encode`](Self::encode).
    pub fn encode_chat(
        &self,
        messages: &Value,
        add_generation_prompt: bool,
        extra: &Map<String, Value>,
    ) -> Result<Vec<u32>> {
        self.encode_chat_within(messages, add_generation_prompt, extra, &Patience::ENDLESS)
    }

    /// [`encode_chat`](Self::encode_chat), for as long as there is patience.
    ///
    /// # Errors
    /// As [`encode_chat`](Self::encode_chat), and [`Error::GivenUp`].
    pub fn encode_chat_within(
        &self,
        messages: &Value,
        add_generation_prompt: bool,
        extra: &Map<String, Value>,
        patience: &Patience<'_>,
    ) -> Result<Vec<u32>> {
        let text =
            self.apply_chat_template_within(messages, add_generation_prompt, extra, patience)?;
        self.encode_within(&text, false, patience)
    }

    /// Whether what an id adds to a text depends on that id alone.
    pub(crate) fn has_words(&self) -> bool {
        self.0.text.shape != Shape::Windowed
    }

    /// An id as a grammar sees it: its bytes, or of a special token its name behind a byte that no
    /// text has; nothing for what no grammar can ask for.
    pub(crate) fn grammar_word(&self, id: u32) -> Option<Vec<u8>> {
        const SPECIAL: u8 = 0xFF;
        match self.0.text.rest.get(id) {
            (Kind::Skip, _) => {
                let name = self.0.tokenizer.id_to_token(id)?;
                Some([&[SPECIAL], name.as_bytes()].concat())
            }
            (Kind::Text | Kind::Byte, bytes) => (!bytes.contains(&SPECIAL)).then(|| bytes.to_vec()),
        }
    }

    /// Ids whose text at the beginning is another than later, where the tokenizer has such.
    pub(crate) fn otherwise_at_first(&self) -> Option<Vec<u32>> {
        let TextTable { first, rest, shape, .. } = &self.0.text;
        let stripped = match shape {
            Shape::Texts(c, n) if *n > 0 => Some(*c),
            Shape::Texts(..) | Shape::Bytes | Shape::Windowed => None,
        };
        if first.is_none() && stripped.is_none() {
            return None;
        }
        let otherwise = |id: &u32| {
            let (kind, later) = rest.get(*id);
            let at_first = first.as_ref().map_or(later, |first| first.get(*id).1);
            let cut = stripped.is_some_and(|c| at_first.starts_with(c.to_string().as_bytes()));
            kind != Kind::Skip && (at_first != later || cut)
        };
        Some((0..self.0.ids as u32).filter(otherwise).collect())
    }

    pub(crate) fn text_table(&self) -> &TextTable {
        &self.0.text
    }
}

/// What `tokenizer_config.json` and `chat_template.jinja` say.
struct Config {
    file: std::path::PathBuf,
    tokens: Vec<(&'static str, String)>,
    add_bos: Option<bool>,
    templates: BTreeMap<String, String>,
}

impl Config {
    fn read(dir: &Path) -> Result<Self> {
        let file = dir.join("tokenizer_config.json");
        let bytes = read(&file, "the special tokens of the model")?;
        let fail = |got: String| Error::load(&file, "a JSON object", got);
        let json: Value = serde_json::from_slice(&bytes).map_err(|e| fail(e.to_string()))?;
        let mut config = Self::parse(file, json)?;
        let jinja = dir.join("chat_template.jinja");
        if file::is_listed(&jinja) {
            let source = String::from_utf8(read(&jinja, "a chat template")?)
                .map_err(|e| Error::load(&jinja, "UTF-8", e.to_string()))?;
            config.templates.insert("default".to_string(), source);
        }
        Ok(config)
    }

    /// A parsed `tokenizer_config.json`; `file` is for messages.
    fn parse(file: std::path::PathBuf, json: Value) -> Result<Self> {
        let Value::Object(json) = json else {
            return Err(Error::load(&file, "a JSON object", "something else"));
        };
        let mut tokens = Vec::new();
        for name in NAMED_TOKENS {
            match json.get(name) {
                None | Some(Value::Null) => {}
                Some(Value::String(s)) => tokens.push((name, s.clone())),
                Some(v) => match v.get("content").and_then(Value::as_str) {
                    Some(s) => tokens.push((name, s.to_string())),
                    None => return Err(wrong(&file, name, "a string or {content: string}", v)),
                },
            }
        }
        let add_bos = match json.get("add_bos_token") {
            None | Some(Value::Null) => None,
            Some(Value::Bool(b)) => Some(*b),
            Some(v) => return Err(wrong(&file, "add_bos_token", "true or false", v)),
        };
        let templates = match json.get("chat_template") {
            None | Some(Value::Null) => BTreeMap::new(),
            Some(v) => named_templates(v).ok_or_else(|| {
                wrong(&file, "chat_template", "a string or a list of {name, template}", v)
            })?,
        };
        Ok(Self { file, tokens, add_bos, templates })
    }

    fn id(&self, name: &str, tokenizer: &tokenizers::Tokenizer) -> Result<Option<u32>> {
        let Some((_, token)) = self.tokens.iter().find(|(n, _)| *n == name) else {
            return Ok(None);
        };
        match tokenizer.token_to_id(token) {
            Some(id) => Ok(Some(id)),
            None => Err(Error::tensor(
                &self.file,
                name,
                "a token of tokenizer.json",
                format!("{token:?}"),
            )),
        }
    }
}

/// A template alone is called `default`.
fn named_templates(value: &Value) -> Option<BTreeMap<String, String>> {
    if let Some(source) = value.as_str() {
        return Some(BTreeMap::from([("default".to_string(), source.to_string())]));
    }
    let text = |v: &Value, key: &str| Some(v.get(key)?.as_str()?.to_string());
    value.as_array()?.iter().map(|v| Some((text(v, "name")?, text(v, "template")?))).collect()
}

fn wrong(file: &Path, key: &str, wanted: &str, got: &Value) -> Error {
    let got: String = got.to_string().chars().take(80).collect();
    Error::tensor(file, key, wanted, got)
}

fn read(path: &Path, what: &str) -> Result<Vec<u8>> {
    file::read(path, FILE_BYTES_MAX).map_err(|got| Error::load(path, what, got))
}

/// Bytes that the rules of a tokenizer may make of one of its own tokens.
const TOKEN_BYTES_MAX: u64 = 1 << 20;

/// Reads how much the rules of a file multiply, before they are applied to anything: the library
/// applies them to added tokens as it reads the file.
fn check_growth(file: &Path, bytes: &[u8]) -> Result<Growth> {
    /// What of the file is looked at.
    #[derive(serde::Deserialize)]
    struct Rules {
        #[serde(default)]
        normalizer: Value,
        #[serde(default)]
        decoder: Value,
        #[serde(default)]
        added_tokens: Vec<Value>,
    }
    let rules: Rules = serde_json::from_slice(bytes)
        .map_err(|e| Error::load(file, "a tokenizer.json", e.to_string()))?;
    let wanted = |key: &str, got: String| {
        let wanted = format!("rules that make at most {TOKEN_BYTES_MAX} bytes of a token");
        Error::tensor(file, key, wanted, got)
    };
    let growth = guarded(|| Ok(Growth::of(&rules.normalizer)?));
    let growth = growth.map_err(|got| wanted("normalizer", got))?;
    let content = |token: &Value| token.get("content")?.as_str().map(str::to_owned);
    for token in rules.added_tokens.iter().filter_map(content) {
        let short = || Ok(growth.check(&token)?);
        guarded(short).map_err(|got| wanted("normalizer", got))?;
    }
    // Tokens of a vocabulary are shorter than this, or the file is longer than it may be.
    let longest = 4096;
    match guarded(|| Ok(decoded(&rules.decoder, longest)?)) {
        Ok(bytes) if bytes <= TOKEN_BYTES_MAX => Ok(growth),
        Ok(bytes) => Err(wanted("decoder", format!("{bytes} of one of {longest}"))),
        Err(got) => Err(wanted("decoder", got)),
    }
}

fn without_limits(mut t: tokenizers::Tokenizer) -> tokenizers::Result<tokenizers::Tokenizer> {
    t.with_truncation(None)?;
    t.with_padding(None);
    Ok(t)
}

fn parsed_bytes(file: &[u8]) -> u64 {
    PARSED_LEAST + file.len() as u64 * PARSED_BYTES
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::engine::fake::peak_bytes;

    #[test]
    fn room_for_a_parsed_tokenizer_is_asked_for() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        for folder in ["python/kie/demo", "tests/data/llama", "tests/data/qwen3"] {
            let folder = root.join(folder);
            let bytes = std::fs::read(folder.join("tokenizer.json")).unwrap();
            let peak = peak_bytes(|| tokenizers::Tokenizer::from_bytes(&bytes).unwrap());
            let most = parsed_bytes(&bytes);
            assert!(peak <= most, "{}: {peak} bytes, {most} asked for", folder.display());
        }
    }
}
