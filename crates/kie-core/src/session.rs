//! A conversation: its tokens, its turns, and the KV pages that the engine keeps for it.
//!
//! # Invariants
//! * `tokens` is what the model saw: the prompt of the last turn and its answer, without a stop id
//!   and without what lies behind a stop string. The next prompt starts with it where the chat
//!   template allows, so its KV is found.
//! * An idle session holds no pages. The cache keeps what its turns left until room is wanted,
//!   oldest use first; what is gone is computed again when it speaks.

use std::path::Path;
use std::sync::Arc;

use serde_json::{json, Map, Value};

use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::patience::Patience;
use crate::primitive::now_ns;
use crate::request::{Completion, FinishReason, Prompt, SamplingParams};
use crate::saved::{self, State};
use crate::stream::{TokenStream, Turn};

/// A conversation. Waits for the last turn to end wherever it needs its answer.
pub struct Session {
    engine: Engine,
    chat: bool,
    /// After 0, 1, 2, ... turns; never empty.
    states: Vec<State>,
    /// The turn whose answer is not in `states` yet, and its prompt.
    open: Option<(Turn, State)>,
}

impl Engine {
    /// A conversation whose KV is kept between turns. With a chat template its turns are messages
    /// behind `system`; without one `system` and the turns are plain text.
    ///
    /// # Errors
    /// [`Error::EngineClosed`], or [`Error::InvalidRequest`] for a text the tokenizer refuses.
    pub fn session(&self, system: Option<&str>) -> Result<Session> {
        self.0.check_open()?;
        Session::new(self.clone(), system, &Patience::ENDLESS)
    }

    /// [`session`](Self::session), while there is patience to tokenize `system`.
    ///
    /// # Errors
    /// As [`session`](Self::session), and [`Error::GivenUp`].
    pub fn session_within(&self, system: Option<&str>, patience: &Patience<'_>) -> Result<Session> {
        self.0.check_open()?;
        Session::new(self.clone(), system, patience)
    }
}

impl Session {
    pub(crate) fn new(
        engine: Engine,
        system: Option<&str>,
        patience: &Patience<'_>,
    ) -> Result<Self> {
        let chat = engine.0.tokenizer().has_chat_template();
        let mut first = State::default();
        match (system, chat) {
            (Some(system), true) => {
                first.messages.push(json!({"role": "system", "content": system}));
            }
            (Some(system), false) => {
                first.tokens = engine.tokenize_within(system, true, patience)?;
            }
            (None, _) => {}
        }
        Ok(Self { engine, chat, states: vec![first], open: None })
    }

    /// Starts a turn: `Text` is what the user says (or, without a chat template, how the text goes
    /// on), `Messages` are added as they are, `Ids` continue the tokens.
    ///
    /// # Errors
    /// As [`Engine::stream`]; [`Error::Template`] for messages without a template, and for ids
    /// with one. The session is then as it was.
    pub fn stream(&mut self, prompt: Prompt, params: SamplingParams) -> Result<TokenStream> {
        self.stream_within(prompt, params, &Map::new(), &Patience::ENDLESS)
    }

    /// [`stream`](Self::stream), while there is patience to wait for the last turn. A timeout that
    /// ends before the turn begins ends the stream; the session is as it was. `variables` are the
    /// chat template's (`tools`, ...) for this turn: where they are those of the last one, the past
    /// stays as it was computed.
    ///
    /// # Errors
    /// As [`stream`](Self::stream), [`Error::GivenUp`], and [`Error::Template`] for variables
    /// without a template.
    pub fn stream_within(
        &mut self,
        prompt: Prompt,
        params: SamplingParams,
        variables: &Map<String, Value>,
        patience: &Patience<'_>,
    ) -> Result<TokenStream> {
        let began_ns = now_ns();
        let engine = self.engine.clone();
        let ticket = engine.within(&params, began_ns, patience, |patience| {
            self.settle(patience)?;
            let state = self.ask(&prompt, variables, patience)?;
            let tokens = state.tokens.clone();
            let prediction = self.engine.0.encode_prediction(&params, patience)?;
            let ticket =
                self.engine.submit((tokens, prediction), &params, (true, began_ns), patience)?;
            let turn = Turn {
                engine: Arc::clone(&self.engine.0),
                reader: ticket.reader.clone(),
                cancelled: Arc::clone(&ticket.cancelled),
                stride: 1 + params.logprobs.unwrap_or(0),
                answer: self.engine.0.answer_of(&params, state.tokens.len())?,
            };
            self.open = Some((turn, state));
            Ok(ticket)
        })?;
        Ok(TokenStream::new(ticket))
    }

    /// [`stream`](Self::stream) and its completion.
    ///
    /// # Errors
    /// As [`stream`](Self::stream).
    pub fn generate(&mut self, prompt: Prompt, params: SamplingParams) -> Result<Completion> {
        self.stream(prompt, params)?.completion()
    }

    /// A second conversation with the same past. Copies no KV and computes nothing.
    ///
    /// # Errors
    /// [`Error::EngineClosed`].
    pub fn fork(&mut self) -> Result<Self> {
        self.fork_within(&Patience::ENDLESS)
    }

    /// [`fork`](Self::fork), while there is patience to wait for the last turn.
    ///
    /// # Errors
    /// As [`fork`](Self::fork), and [`Error::GivenUp`].
    pub fn fork_within(&mut self, patience: &Patience<'_>) -> Result<Self> {
        self.settle(patience)?;
        self.engine.0.check_open()?;
        let (engine, states) = (self.engine.clone(), self.states.clone());
        Ok(Self { engine, chat: self.chat, states, open: None })
    }

    /// A session that was saved.
    pub(crate) fn of(engine: Engine, chat: bool, states: Vec<State>) -> Self {
        Self { engine, chat, states, open: None }
    }

    /// Writes the turns to a file, with the keys and values that the engine has of them (where the
    /// host can read them: on the CPU), for [`Engine::load_session`]. The file appears whole or not
    /// at all; what stood there is replaced.
    ///
    /// # Errors
    /// What the last turn failed with, if it did; [`Error::Write`], [`Error::EngineClosed`].
    pub fn save(&mut self, path: &Path) -> Result<()> {
        self.save_within(path, &Patience::ENDLESS)
    }

    /// [`save`](Self::save), while there is patience.
    ///
    /// # Errors
    /// As [`save`](Self::save), and [`Error::GivenUp`].
    pub fn save_within(&mut self, path: &Path, patience: &Patience<'_>) -> Result<()> {
        self.settle(patience)?;
        self.engine.0.check_open()?;
        let copied = self.engine.copy_out(self.last().tokens.clone(), patience)?;
        let said = (self.chat, &self.states[..]);
        saved::write(path, self.engine.identity(), said, &copied, patience)
    }

    /// Forgets all turns but the first `to`; a running turn that is forgotten is cancelled.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`] if there are fewer.
    pub fn rollback(&mut self, to: usize) -> Result<()> {
        self.rollback_within(to, &Patience::ENDLESS)
    }

    /// [`rollback`](Self::rollback), while there is patience to wait for the last turn.
    ///
    /// # Errors
    /// As [`rollback`](Self::rollback), and [`Error::GivenUp`].
    pub fn rollback_within(&mut self, to: usize, patience: &Patience<'_>) -> Result<()> {
        if to > self.turns() {
            let turns = self.turns();
            let detail = format!("rollback must be to at most {turns} turns, got {to}");
            return Err(Error::InvalidRequest(detail));
        }
        if let Some((turn, _)) = self.open.as_ref().filter(|_| to < self.turns()) {
            turn.cancel();
        }
        self.settle(patience)?;
        self.states.truncate(to + 1);
        self.engine.0.check_open()
    }

    /// Turns so far, a running one included.
    pub fn turns(&self) -> usize {
        self.states.len() - 1 + usize::from(self.open.is_some())
    }

    /// What the model has seen.
    ///
    /// # Errors
    /// What the last turn failed with, if it did.
    pub fn tokens(&mut self) -> Result<&[u32]> {
        self.settle(&Patience::ENDLESS)?;
        Ok(&self.last().tokens)
    }

    fn last(&self) -> &State {
        self.states.last().expect("there is a state after 0 turns")
    }

    /// What the model is given for the next turn.
    fn ask(
        &self,
        prompt: &Prompt,
        variables: &Map<String, Value>,
        patience: &Patience<'_>,
    ) -> Result<State> {
        let mut state = self.last().clone();
        let refuse = |why: &str| Err(Error::Template(why.to_owned()));
        if !self.chat && !variables.is_empty() {
            return refuse("the model has none; tools and chat_template_kwargs go through one");
        }
        match (prompt, self.chat) {
            (Prompt::Text(text), true) => {
                state.messages.push(json!({"role": "user", "content": text}));
            }
            (Prompt::Messages(messages), true) => state.messages.extend_from_slice(messages),
            (Prompt::Ids(_), true) => return refuse("a chat session takes text or messages"),
            (Prompt::Messages(_), false) => {
                return refuse("the model has none; the session continues plain text")
            }
            (Prompt::Text(text), false) => {
                let first = state.tokens.is_empty();
                state.tokens.extend(self.engine.tokenize_within(text, first, patience)?);
                return Ok(state);
            }
            (Prompt::Ids(ids), false) => {
                state.tokens.extend_from_slice(ids);
                return Ok(state);
            }
        }
        let messages = Value::Array(state.messages.clone());
        let tokenizer = self.engine.0.tokenizer();
        let rendered =
            tokenizer.apply_chat_template_within(&messages, true, variables, patience)?;
        let known = !state.tokens.is_empty();
        match rendered.strip_prefix(&state.text).filter(|_| known) {
            Some(more) => state.tokens.extend(tokenizer.encode_within(more, false, patience)?),
            // The template rewrites the past: the cache keeps what is still equal.
            None => state.tokens = tokenizer.encode_within(&rendered, false, patience)?,
        }
        state.text = rendered;
        Ok(state)
    }

    /// Takes in the answer of the open turn. A turn that failed is no turn.
    fn settle(&mut self, patience: &Patience<'_>) -> Result<()> {
        if let Some((turn, _)) = &self.open {
            turn.wait(patience)?;
        }
        let Some((turn, mut state)) = self.open.take() else { return Ok(()) };
        let Ok((ids, text, reason)) = turn.settle() else { return self.engine.0.check_process() };
        let tokenizer = self.engine.0.tokenizer();
        // Plain text keeps special ids, which have no text; a chat is what its template writes.
        let read = |ids: &[u32]| tokenizer.decode(ids, !self.chat);
        let mut kept = &ids[..];
        // A stop id or string, or part of a character: back to whole tokens of the visible text.
        while !text.starts_with(&read(kept)?) {
            kept = &kept[..kept.len().saturating_sub(1)];
        }
        let decoded = read(kept)?;
        let rest = tokenizer.encode(&text[decoded.len()..], false)?;
        if reason == FinishReason::Stop && rest.is_empty() {
            // The stop id had no text.
            while let Some((_, before)) = kept.split_last() {
                if read(before)? != decoded {
                    break;
                }
                kept = before;
            }
        }
        state.tokens.extend_from_slice(kept);
        state.tokens.extend(rest);
        if self.chat {
            state.text.push_str(&text);
            state.messages.push(json!({"role": "assistant", "content": text}));
        }
        self.states.push(state);
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
#[path = "session_tests.rs"]
mod tests;
