//! One request at the engine: prepared, submitted, its tokens in chunks, its end.
//!
//! # Invariants
//! * A chunk is sent when 2 ms have passed since the last one or 8 tokens wait; the first and the
//!   last at once. Nothing is sent by a clock of its own: a slow engine's token waits for nobody.
//! * Who reads slowly holds back nobody: the engine writes into the request's own memory, of
//!   `max_tokens` records, and a chunk is made when the socket takes it.

use std::sync::Arc;
use std::time::Duration;

use kie_core::request::{Completion, Prompt, Request, SamplingParams, Token};
use kie_core::{Engine, Grammar, Next};
use tokio::sync::watch;
use tokio::time::{sleep_until, Instant};

use crate::app::{reached, App, Phase, Served};
use crate::conn::Peer;
use crate::errors::ApiError;
use crate::format::Format;
use crate::ledger::Ledger;
use crate::openai::Caller;
use crate::queue::Place;
use crate::sse::Frames;
use crate::tokens::Tokens;

/// Longest time between two chunks of a stream whose tokens come faster.
const CHUNK_TIME: Duration = Duration::from_millis(2);
/// Most tokens of a chunk.
const CHUNK_TOKENS: usize = 8;
/// How long the head of an answer waits for the engine's first word, so that what fails at once has
/// a status of its own.
const FIRST_WORD: Duration = Duration::from_millis(500);

/// A request that may be submitted.
pub(crate) struct Prepared {
    /// Ids of the prompt.
    pub(crate) ids: Vec<u32>,
    /// How tokens are chosen; the seed is set.
    pub(crate) params: SamplingParams,
    /// Tokens a chunk, where the client says so.
    pub(crate) interval: Option<usize>,
    /// The field that the prompt came in.
    pub(crate) prompt_field: &'static str,
    /// What the whole answer must be.
    pub(crate) format: Option<Format>,
}

/// What comes out of a request.
pub(crate) enum Event {
    /// Tokens, at least one.
    Tokens(Vec<Token>),
    /// The end.
    Done(Box<Completion>),
    /// Another end.
    Failed(ApiError),
}

/// How an API writes a request that runs.
pub(crate) trait Writer: Send + 'static {
    /// What stands before all else: while the first token is waited for, or with it.
    fn begin(&mut self, out: &mut Vec<u8>);
    /// Tokens, at least one.
    fn tokens(&mut self, tokens: &[Token], out: &mut Vec<u8>);
    /// The end.
    fn done(&mut self, done: &Completion, out: &mut Vec<u8>);
    /// Another end.
    fn failed(&mut self, error: &ApiError, out: &mut Vec<u8>);
}

/// A request that runs, as a stream of what `writer` makes of it.
pub(crate) struct Written<W> {
    generation: Generation,
    writer: W,
    begun: bool,
}

impl<W: Writer> Written<W> {
    pub(crate) fn new(generation: Generation, writer: W) -> Self {
        Self { generation, writer, begun: false }
    }

    fn begin(&mut self, out: &mut Vec<u8>) {
        if !std::mem::replace(&mut self.begun, true) {
            self.writer.begin(out);
        }
    }
}

impl<W: Writer> Frames for Written<W> {
    fn waits(&self) -> String {
        self.generation.waits()
    }

    async fn next(&mut self, out: &mut Vec<u8>) -> bool {
        if !self.begun && !self.generation.has_news() {
            self.begin(out);
            return true;
        }
        let event = self.generation.next().await;
        self.begin(out);
        match event {
            Event::Tokens(tokens) => {
                self.writer.tokens(&tokens, out);
                return true;
            }
            Event::Done(done) => self.writer.done(&done, out),
            Event::Failed(error) => self.writer.failed(&error, out),
        }
        false
    }
}

/// A request that runs. Dropped, it is cancelled.
pub(crate) struct Generation {
    tokens: Tokens,
    phase: watch::Receiver<Phase>,
    peer: Peer,
    ledger: Ledger,
    place: Place,
    slots: usize,
    prompt_field: &'static str,
    /// The field that the grammar came in.
    grammar_field: Option<String>,
    /// Tokens a chunk; `None`: [`CHUNK_TOKENS`] or [`CHUNK_TIME`].
    interval: Option<usize>,
    batch: Vec<Token>,
    ended: bool,
    /// When the next chunk may go; `None`: at once.
    not_before: Option<Instant>,
}

/// Clamps `max_tokens` to the context that `prompt` tokens leave.
///
/// # Errors
/// 400 `context_length_exceeded` if they leave none.
pub(crate) fn clamp(
    served: &Served,
    params: &mut SamplingParams,
    prompt: usize,
    field: &str,
) -> Result<(), ApiError> {
    let context = served.info.context;
    if prompt >= context {
        let message = format!(
            "this model's context is {context} tokens; the prompt has {prompt}, which leaves none \
             to generate"
        );
        return Err(ApiError::field(field, message).with_code("context_length_exceeded"));
    }
    let room = context - prompt;
    params.max_tokens = Some(params.max_tokens.map_or(room, |n| n.min(room)));
    Ok(())
}

/// Compiles a grammar where it stops nobody else; the engine then finds it.
async fn compile(engine: Engine, grammar: Grammar, field: String) -> Result<(), ApiError> {
    let work = tokio::task::spawn_blocking(move || engine.compile_grammar(&grammar));
    let ended = |_| ApiError::unavailable("the server is shutting down");
    work.await.map_err(ended)?.map_err(|e| refusal_of(&e, &field, Some(&field)))
}

/// What the engine said, with the field that it is about.
fn refusal_of(error: &kie_core::Error, prompt: &str, grammar: Option<&str>) -> ApiError {
    match (error, grammar) {
        (kie_core::Error::Grammar(why), Some(field)) => {
            ApiError::field(field, format!("{field}: {why}"))
        }
        _ => ApiError::engine(error, prompt),
    }
}

impl Generation {
    /// Submits a request.
    ///
    /// # Errors
    /// What the engine refuses, and 503 while draining.
    pub(crate) async fn start(
        app: &Arc<App>,
        caller: Caller,
        request: Prepared,
    ) -> Result<Self, ApiError> {
        let served = app.served()?;
        let Prepared { ids, mut params, interval, prompt_field, format } = request;
        clamp(served, &mut params, ids.len(), prompt_field)?;
        let grammar_field = format.as_ref().map(|format| format.field.clone());
        if let Some(Format { grammar, field }) = format {
            params.grammar = Some(grammar.clone());
            compile(served.engine.clone(), grammar, field).await?;
        }
        let request = Request { prompt: Prompt::Ids(ids), params };
        let slots = served.info.max_batch;
        let refused = |e: kie_core::Error| {
            let mut error = refusal_of(&e, prompt_field, grammar_field.as_deref());
            if matches!(e, kie_core::Error::QueueFull(_)) {
                error.retry_after = Some(app.queue.retry_after(slots));
            }
            error
        };
        let stream = served.engine.stream(request).map_err(refused)?;
        Ok(Self {
            tokens: Tokens::new(stream),
            phase: app.phase.subscribe(),
            peer: caller.peer,
            ledger: Ledger::new(app, caller.id),
            place: app.queue.enter(),
            slots,
            prompt_field,
            grammar_field,
            interval,
            batch: Vec::new(),
            ended: false,
            not_before: None,
        })
    }

    /// The next chunk, or the end. May be dropped and called again.
    pub(crate) async fn next(&mut self) -> Event {
        loop {
            if let Err(error) = self.take(self.interval.unwrap_or(CHUNK_TOKENS)) {
                return self.failed(&error);
            }
            if self.is_due() {
                let interval = self.interval.is_none();
                self.not_before = interval.then(|| Instant::now() + CHUNK_TIME);
                return Event::Tokens(std::mem::take(&mut self.batch));
            }
            if self.ended {
                return self.done();
            }
            if let Err(event) = self.wait().await {
                return event;
            }
        }
    }

    /// All tokens and the end.
    ///
    /// # Errors
    /// What the request ended with.
    pub(crate) async fn collect(mut self) -> Result<(Vec<Token>, Box<Completion>), ApiError> {
        loop {
            if let Err(error) = self.take(usize::MAX) {
                return Err(self.refusal(&error));
            }
            let event = match self.ended {
                true => self.done(),
                false => match self.wait().await {
                    Ok(()) => continue,
                    Err(event) => event,
                },
            };
            return match event {
                Event::Done(done) => Ok((self.batch, done)),
                Event::Failed(error) => Err(error),
                Event::Tokens(_) => unreachable!("neither end is one"),
            };
        }
    }

    /// Waits for the engine's first word for a moment; an error that is there by then is one.
    ///
    /// # Errors
    /// What the request ended with.
    pub(crate) async fn first_word(&mut self) -> Result<(), ApiError> {
        let until = Instant::now() + FIRST_WORD;
        loop {
            if let Err(error) = self.take(1) {
                return Err(self.refusal(&error));
            }
            if self.ended || !self.batch.is_empty() {
                return Ok(());
            }
            tokio::select! {
                woken = self.wait() => match woken {
                    Ok(()) => {}
                    Err(Event::Failed(error)) => return Err(error),
                    Err(Event::Tokens(_) | Event::Done(_)) => return Ok(()),
                },
                () = sleep_until(until) => return Ok(()),
            }
        }
    }

    /// Whether [`next`](Self::next) has something without waiting.
    pub(crate) fn has_news(&self) -> bool {
        self.ended || !self.batch.is_empty()
    }

    /// What it waits for, for a comment in its stream.
    pub(crate) fn waits(&self) -> String {
        match self.place.position(self.slots) {
            Some(position) => format!("queued, position {position}"),
            None => "waiting".to_owned(),
        }
    }

    /// Takes tokens that are there, until the chunk has `most`.
    fn take(&mut self, most: usize) -> kie_core::Result<()> {
        while !self.ended && self.batch.len() < most {
            match self.tokens.try_next()? {
                Next::Token(token) => {
                    self.place.begin();
                    self.ledger.token(&token);
                    self.batch.push(token);
                }
                Next::Pending => return Ok(()),
                Next::Finished => self.ended = true,
            }
        }
        Ok(())
    }

    fn is_due(&self) -> bool {
        if self.batch.is_empty() {
            return false;
        }
        let full = self.batch.len() >= self.interval.unwrap_or(CHUNK_TOKENS);
        let first = self.batch[0].index == 0;
        let passed = self.interval.is_none()
            && self.not_before.is_none_or(|earliest| Instant::now() >= earliest);
        self.ended || first || full || passed
    }

    /// Until there may be something to do; the error is what ends the request.
    async fn wait(&mut self) -> Result<(), Event> {
        let due = self.not_before.filter(|_| !self.batch.is_empty());
        let clock = async {
            match due {
                Some(due) => sleep_until(due).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            ready = self.tokens.ready() => match ready {
                Ok(()) => Ok(()),
                Err(error) => Err(Event::Failed(self.of_engine(&error))),
            },
            () = clock => Ok(()),
            () = self.peer.gone() => Err(Event::Failed(ApiError::new(
                axum::http::StatusCode::BAD_REQUEST,
                "the client closed the connection",
            ))),
            () = reached(&mut self.phase, |phase| phase == Phase::Over) => {
                let why = "the server is shutting down: the request was ended";
                Err(Event::Failed(ApiError::unavailable(why)))
            }
        }
    }

    fn done(&mut self) -> Event {
        match self.tokens.stream().completion() {
            Ok(done) => {
                self.ledger.completed(&done);
                Event::Done(Box::new(done))
            }
            Err(error) => self.failed(&error),
        }
    }

    fn failed(&mut self, error: &kie_core::Error) -> Event {
        self.ended = true;
        Event::Failed(self.refusal(error))
    }

    fn refusal(&mut self, error: &kie_core::Error) -> ApiError {
        self.ledger.failed(error);
        self.of_engine(error)
    }

    fn of_engine(&self, error: &kie_core::Error) -> ApiError {
        refusal_of(error, self.prompt_field, self.grammar_field.as_deref())
    }
}
