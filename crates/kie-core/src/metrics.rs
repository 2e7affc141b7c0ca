//! What the engine counts. Plain atomics: the engine thread writes, anyone reads.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

use crate::request::FinishReason;

/// Counters of an engine since it was opened.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Metrics {
    /// Requests that ended, by finish reason.
    pub requests_stop: u64,
    /// See [`FinishReason::Length`].
    pub requests_length: u64,
    /// See [`FinishReason::Cancelled`].
    pub requests_cancelled: u64,
    /// See [`FinishReason::Timeout`].
    pub requests_timeout: u64,
    /// See [`FinishReason::Error`].
    pub requests_error: u64,
    /// Tokens of admitted prompts.
    pub prompt_tokens: u64,
    /// Of those, tokens whose KV was there already.
    pub cached_tokens: u64,
    /// Tokens handed to readers.
    pub generated_tokens: u64,
    /// Requests that gave their pages up to older ones and began anew.
    pub preempted: u64,
    /// Requests in slots now.
    pub running: u64,
    /// Requests that wait for a slot now.
    pub waiting: u64,
    /// KV pages held by requests now, all groups.
    pub kv_pages_used: u64,
    /// KV pages kept only because a later request or turn may want them.
    pub kv_pages_cached: u64,
    /// KV pages in all.
    pub kv_pages: u64,
    /// Seconds since the engine was opened.
    pub uptime_s: f64,
}

/// The atomics behind [`Metrics`].
#[derive(Debug, Default)]
pub(crate) struct Counters {
    ended: [AtomicU64; 5],
    pub(crate) prompt_tokens: AtomicU64,
    pub(crate) cached_tokens: AtomicU64,
    pub(crate) generated_tokens: AtomicU64,
    pub(crate) preempted: AtomicU64,
    pub(crate) running: AtomicU64,
    pub(crate) waiting: AtomicU64,
    pub(crate) pages_used: AtomicU64,
    pub(crate) pages_cached: AtomicU64,
}

/// Adds to a counter.
pub(crate) fn add(counter: &AtomicU64, n: usize) {
    counter.fetch_add(n as u64, Ordering::Relaxed);
}

/// Sets a gauge.
pub(crate) fn set(gauge: &AtomicU64, n: usize) {
    gauge.store(n as u64, Ordering::Relaxed);
}

impl Counters {
    /// A request ended.
    pub(crate) fn ended(&self, reason: FinishReason) {
        add(&self.ended[reason as usize], 1);
    }

    /// All at (nearly) one time.
    pub(crate) fn read(&self, kv_pages: u64, uptime_s: f64) -> Metrics {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let ended = |reason: FinishReason| get(&self.ended[reason as usize]);
        Metrics {
            requests_stop: ended(FinishReason::Stop),
            requests_length: ended(FinishReason::Length),
            requests_cancelled: ended(FinishReason::Cancelled),
            requests_timeout: ended(FinishReason::Timeout),
            requests_error: ended(FinishReason::Error),
            prompt_tokens: get(&self.prompt_tokens),
            cached_tokens: get(&self.cached_tokens),
            generated_tokens: get(&self.generated_tokens),
            preempted: get(&self.preempted),
            running: get(&self.running),
            waiting: get(&self.waiting),
            kv_pages_used: get(&self.pages_used),
            kv_pages_cached: get(&self.pages_cached),
            kv_pages,
            uptime_s,
        }
    }
}
