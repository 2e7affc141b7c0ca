//! What a caller reads: tokens of one request as they are made, then the completion.
//!
//! # Invariants
//! * Text is decoded here, on the caller's thread, from the ids that the engine thread wrote.
//! * One [`Token`] a generated id; the texts joined are [`Completion::text`]. A token behind which
//!   text is held back is handed out when the next one, or the end, is known.
//! * Dropping a stream cancels its request.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kie_kernels::abi::Record;

use crate::answer::Answer;
use crate::error::{Error, Result};
use crate::inbox::Ending;
use crate::patience::Patience;
use crate::request::{Completion, FinishReason, Timings, Token, TokenLogprob, TopLogprob, Usage};
use crate::ring::Reader;
use crate::shared::Inner;

/// What [`TokenStream::try_next`] finds.
#[derive(Debug, Clone, PartialEq)]
pub enum Next {
    /// A token.
    Token(Token),
    /// Nothing yet.
    Pending,
    /// All tokens are out.
    Finished,
}

/// What the reading side needs to know about a request.
pub(crate) struct Ticket {
    pub(crate) engine: Arc<Inner>,
    pub(crate) reader: Reader<Record, Ending>,
    pub(crate) cancelled: Arc<AtomicBool>,
    pub(crate) answer: Answer,
    /// `None`: no log-probabilities; else alternatives a token.
    pub(crate) logprobs: Option<usize>,
    pub(crate) prompt_tokens: usize,
    pub(crate) seed: u64,
    pub(crate) submitted_ns: u64,
}

/// The tokens of one request, in order.
pub struct TokenStream {
    ticket: Ticket,
    /// Rows decoded.
    next: usize,
    /// The last of them, while text is held back behind it.
    held: Option<Token>,
    text: String,
    flushed: bool,
    failed: bool,
}

impl TokenStream {
    pub(crate) fn new(ticket: Ticket) -> Self {
        let (text, held) = (String::new(), None);
        Self { ticket, next: 0, held, text, flushed: false, failed: false }
    }

    /// The next token, if it is there. Never waits.
    ///
    /// # Errors
    /// What ended the request, once; then it is [`Next::Finished`].
    pub fn try_next(&mut self) -> Result<Next> {
        self.ticket.engine.check_process()?;
        loop {
            match self.step()? {
                Next::Pending if self.ticket.reader.rearm(self.have()) => {}
                next => return Ok(next),
            }
        }
    }

    /// The next token; [`Next::Pending`] if none came within `timeout`.
    ///
    /// # Errors
    /// As [`try_next`](Self::try_next).
    pub fn recv_timeout(&mut self, timeout: Duration) -> Result<Next> {
        let until = Instant::now().checked_add(timeout);
        loop {
            match self.step()? {
                Next::Pending => {}
                next => return Ok(next),
            }
            self.ticket.engine.check_process()?;
            let left = until.map(|t| t.saturating_duration_since(Instant::now()));
            if !self.ticket.reader.wait(self.have(), left) {
                return Ok(Next::Pending);
            }
        }
    }

    /// Ends the request after the token in flight.
    pub fn cancel(&self) {
        if !self.ticket.cancelled.swap(true, Ordering::AcqRel) && !self.ticket.reader.seen().1 {
            self.ticket.engine.nudge();
        }
    }

    /// An eventfd that is readable when [`try_next`](Self::try_next) has something; made on first
    /// use, closed with the stream. Call `try_next` until it is pending before polling again.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`] if the process has no descriptor left.
    pub fn poll_fd(&self) -> Result<RawFd> {
        self.ticket.engine.check_process()?;
        let fd = self.ticket.reader.fd(self.have());
        fd.map_err(|e| Error::InvalidRequest(format!("no eventfd for the stream: {e}")))
    }

    /// Tokens of the prompt.
    pub fn prompt_tokens(&self) -> usize {
        self.ticket.prompt_tokens
    }

    /// The seed in use.
    pub fn seed(&self) -> u64 {
        self.ticket.seed
    }

    /// Waits for the end, past all tokens, and sums up.
    ///
    /// # Errors
    /// What the request ended with, if that is an error.
    pub fn completion(&mut self) -> Result<Completion> {
        while !matches!(self.recv_timeout(Duration::from_secs(3600))?, Next::Finished) {}
        let (reason, stop) = match self.ending()? {
            Ending { result: Ok(end), .. } => end.clone(),
            Ending { result: Err(error), .. } => return Err(error.clone()),
        };
        let (rows, _) = self.ticket.reader.seen();
        let rows = rows / self.stride();
        let token_ids = (0..rows).filter_map(|row| Some(self.record(row)?.token)).collect();
        Ok(Completion {
            text: self.text.clone(),
            token_ids,
            finish_reason: reason,
            stop_reason: stop,
            logprobs: self.ticket.logprobs.map(|_| self.logprobs(rows)),
            usage: Usage {
                prompt_tokens: self.ticket.prompt_tokens,
                completion_tokens: rows,
                cached_tokens: self.ending()?.cached,
            },
            timings: self.timings(rows)?,
            seed: self.ticket.seed,
            model: self.ticket.engine.model().to_owned(),
        })
    }

    /// Values a row has in the sequence: the record and its alternatives.
    fn stride(&self) -> usize {
        1 + self.ticket.logprobs.unwrap_or(0)
    }

    /// Values that are needed for what was handed out.
    fn have(&self) -> usize {
        self.next * self.stride()
    }

    fn record(&self, row: usize) -> Option<Record> {
        self.ticket.reader.get(row * self.stride())
    }

    /// Log-probabilities of all rows.
    fn logprobs(&self, rows: usize) -> Vec<TokenLogprob> {
        let row = |row| {
            let Record { token: id, logprob, .. } = self.record(row)?;
            Some(TokenLogprob { id, logprob, top_logprobs: self.alternatives(row) })
        };
        (0..rows).filter_map(row).collect()
    }

    /// The alternatives of a row.
    fn alternatives(&self, row: usize) -> Vec<TopLogprob> {
        let at = row * self.stride();
        let top = |r: Record| TopLogprob { id: r.token, logprob: r.logprob };
        (at + 1..at + self.stride()).filter_map(|i| self.ticket.reader.get(i).map(top)).collect()
    }

    fn ending(&self) -> Result<&Ending> {
        self.ticket.reader.end().ok_or_else(|| self.ticket.engine.failure())
    }

    fn step(&mut self) -> Result<Next> {
        loop {
            // In this order: an ended sequence's length is final.
            let (values, ended) = self.ticket.reader.seen();
            let more = values > self.have();
            if let Some(held) = self.held.take() {
                if !more && !ended {
                    self.held = Some(held);
                    return Ok(Next::Pending);
                }
                return Ok(Next::Token(if more { held } else { self.flush(held) }));
            }
            if !more {
                return if ended { self.finish() } else { Ok(Next::Pending) };
            }
            let token = self.decode();
            if !self.ticket.answer.holds_back() {
                return Ok(Next::Token(token));
            }
            self.held = Some(token);
        }
    }

    /// Adds what was held back to the last token.
    fn flush(&mut self, mut token: Token) -> Token {
        if !std::mem::replace(&mut self.flushed, true) {
            let before = self.text.len();
            self.ticket.answer.finish(&mut self.text);
            token.text.push_str(&self.text[before..]);
        }
        token
    }

    fn finish(&mut self) -> Result<Next> {
        if self.failed {
            return Ok(Next::Finished);
        }
        self.failed = true;
        match &self.ending()?.result {
            Ok(_) => Ok(Next::Finished),
            Err(error) => Err(error.clone()),
        }
    }

    /// The next row as a token.
    fn decode(&mut self) -> Token {
        let record = self.record(self.next).expect("the caller saw that it is announced");
        let top_logprobs = self.alternatives(self.next);
        let text = self.ticket.answer.push(record.token).to_owned();
        self.text.push_str(&text);
        self.next += 1;
        Token {
            text,
            token_ids: vec![record.token],
            index: self.next - 1,
            logprob: self.ticket.logprobs.map(|_| record.logprob),
            top_logprobs,
            t_ns: record.t_ns,
        }
    }

    fn timings(&self, rows: usize) -> Result<Timings> {
        let ending = self.ending()?;
        let times: Vec<u64> = (0..rows).filter_map(|row| Some(self.record(row)?.t_ns)).collect();
        let ms = |from: u64, to: u64| to.saturating_sub(from) as f64 / 1e6;
        let rate = |n: usize, ms: f64| if ms > 0.0 { n as f64 / ms * 1e3 } else { 0.0 };
        let prompt = self.ticket.prompt_tokens;
        let submitted = self.ticket.submitted_ns;
        let admitted = ending.admitted_ns;
        let [drafted, accepted] = ending.drafts.map(|n| n as usize);
        let mut timings = Timings {
            cache_n: ending.cached,
            draft_n: drafted,
            draft_n_accepted: accepted,
            ..Timings::default()
        };
        if admitted > 0 {
            timings.queue_ms = ms(submitted, admitted);
        }
        let (Some(first), Some(last)) = (times.first(), times.last()) else { return Ok(timings) };
        timings.prompt_n = prompt - ending.cached;
        timings.prompt_ms = ms(admitted, *first);
        timings.prompt_per_second = rate(timings.prompt_n, timings.prompt_ms);
        timings.ttft_ms = ms(submitted, *first);
        timings.predicted_n = rows;
        timings.predicted_ms = ms(*first, *last);
        timings.predicted_per_second = rate(rows - 1, timings.predicted_ms);
        let gap = |pair: &[u64]| pair[1].saturating_sub(pair[0]) as f64 / 1e3;
        let mut gaps: Vec<f64> = times.windows(2).map(gap).collect();
        gaps.sort_by(f64::total_cmp);
        let quantile = |q: f64| {
            let at = (q * gaps.len() as f64).ceil() as usize;
            gaps.get(at.saturating_sub(1)).copied().unwrap_or(0.0)
        };
        timings.itl_p50_us = quantile(0.5);
        timings.itl_p99_us = quantile(0.99);
        timings.itl_max_us = quantile(1.0);
        timings.bytes_per_token = self.ticket.engine.bytes_per_token(prompt + rows / 2);
        if let Some(limit) = self.ticket.engine.read_bandwidth() {
            // A step that drafts reads its bytes once for all of its tokens.
            let steps = rows.saturating_sub(accepted) as f64 / rows as f64;
            let bytes = timings.bytes_per_token as f64 * steps;
            timings.mbu = bytes * timings.predicted_per_second / limit;
        }
        Ok(timings)
    }
}

impl Iterator for TokenStream {
    type Item = Result<Token>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.recv_timeout(Duration::from_secs(3600)) {
                Ok(Next::Token(token)) => return Some(Ok(token)),
                Ok(Next::Pending) => {}
                Ok(Next::Finished) => return None,
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

impl Drop for TokenStream {
    fn drop(&mut self) {
        self.cancel();
    }
}

/// A finished or running turn, as a session looks at it: waits for its end without reading it.
pub(crate) struct Turn {
    pub(crate) engine: Arc<Inner>,
    pub(crate) reader: Reader<Record, Ending>,
    pub(crate) cancelled: Arc<AtomicBool>,
    pub(crate) stride: usize,
    pub(crate) answer: Answer,
}

impl Turn {
    /// Asks it to end.
    pub(crate) fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
        self.engine.nudge();
    }

    /// Waits for the end.
    ///
    /// # Errors
    /// [`Error::GivenUp`], and where this is another process.
    pub(crate) fn wait(&self, patience: &Patience<'_>) -> Result<()> {
        let mut have = self.reader.seen().0;
        while !self.reader.seen().1 {
            self.engine.check_process()?;
            self.reader.wait(have, Some(patience.slice()));
            have = self.reader.seen().0;
            patience.check("the last turn")?;
        }
        Ok(())
    }

    /// Ids, text and why it ended; an error if it failed. It has ended.
    pub(crate) fn settle(mut self) -> Result<(Vec<u32>, String, FinishReason)> {
        let ending = self.reader.end().ok_or_else(|| self.engine.failure())?;
        let (reason, _) = ending.result.clone()?;
        let rows = self.reader.seen().0 / self.stride;
        let record = |row| self.reader.get(row * self.stride);
        let ids: Vec<u32> = (0..rows).filter_map(|row| Some(record(row)?.token)).collect();
        let mut text = String::new();
        ids.iter().for_each(|id| text.push_str(self.answer.push(*id)));
        self.answer.finish(&mut text);
        Ok((ids, text, reason))
    }
}
