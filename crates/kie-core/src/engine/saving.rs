//! Sessions to and from files, as the engine sees them: what its cache has of them.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{channel, Sender};
use std::sync::Arc;

use super::Engine;
use crate::errand::{Copied, Errand, Task};
use crate::error::Result;
use crate::patience::Patience;
use crate::saved::{self, Identity};
use crate::session::Session;

impl Engine {
    /// A session that [`Session::save`] wrote, with the keys and values that it had.
    ///
    /// # Errors
    /// [`crate::Error::Load`] for a file that is none, is damaged, or is of other weights, another
    /// `dtype`, a longer context or a format that this kie does not know: it names the field, what
    /// is wanted and what there is. [`crate::Error::EngineClosed`].
    pub fn load_session(&self, path: &Path) -> Result<Session> {
        self.load_session_within(path, &Patience::ENDLESS)
    }

    /// [`load_session`](Self::load_session), while there is patience.
    ///
    /// # Errors
    /// As [`load_session`](Self::load_session), and [`crate::Error::GivenUp`].
    pub fn load_session_within(&self, path: &Path, patience: &Patience<'_>) -> Result<Session> {
        self.0.check_open()?;
        let chat = self.0.tokenizer.has_chat_template();
        let kind = (self.0.limits.vocab, chat);
        let saved::Read { states, pages } = saved::read(path, &self.0.identity, kind, patience)
            .map_err(|error| {
                error.or_hint("pass a file that Session.save wrote with this model")
            })?;
        if let (Some(pages), Some(last)) = (pages, states.last()) {
            let task = |out| Task::Load { pages, out };
            self.errand(last.tokens.clone(), task, patience, "loading a session")?;
        }
        Ok(Session::of(self.clone(), chat, states))
    }

    /// Copies of what the cache has of a prefix of `tokens`.
    pub(crate) fn copy_out(
        &self,
        tokens: Vec<u32>,
        patience: &Patience<'_>,
    ) -> Result<Vec<Copied>> {
        let task = |out| Task::Save { copied: Vec::new(), out };
        self.errand(tokens, task, patience, "saving a session")
    }

    /// Has the engine thread run an errand between its turns.
    fn errand<T>(
        &self,
        tokens: Vec<u32>,
        task: impl FnOnce(Sender<Result<T>>) -> Task,
        patience: &Patience<'_>,
        what: &'static str,
    ) -> Result<T> {
        let (out, result) = channel();
        let given_up = Arc::<AtomicBool>::default();
        let told = Arc::clone(&given_up);
        self.0.inbox.send(Errand { tokens, task: task(out), given_up, hold: None })?;
        let received = patience.receive(&result, what).inspect_err(|_| {
            told.store(true, Ordering::Release);
            self.0.nudge();
        })?;
        received.ok_or_else(|| self.0.failure())?
    }

    /// What a file of a session must agree with.
    pub(crate) fn identity(&self) -> &Identity {
        &self.0.identity
    }
}
