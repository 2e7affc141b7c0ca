//! What is kept about one request while it runs, for metrics and the log: counts and times only.

use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use kie_core::request::{Completion, Token};
use kie_core::Error;
use serde_json::json;

use crate::app::App;
use crate::metrics::Metrics;
use crate::router::RequestId;

/// Long gaps that are kept.
const LONG_GAPS: usize = 256;

/// One request's entry; written when it ends or is dropped.
pub(crate) struct Ledger {
    app: Arc<App>,
    id: RequestId,
    began: Instant,
    started: SystemTime,
    first_ns: u64,
    last_ns: u64,
    tokens: usize,
    gaps: Vec<(u64, u64)>,
    closed: bool,
}

impl Ledger {
    pub(crate) fn new(app: &Arc<App>, id: RequestId) -> Self {
        Self {
            app: Arc::clone(app),
            id,
            began: Instant::now(),
            started: SystemTime::now(),
            first_ns: 0,
            last_ns: 0,
            tokens: 0,
            gaps: Vec::new(),
            closed: false,
        }
    }

    /// A token was read.
    pub(crate) fn token(&mut self, token: &Token) {
        let at = token.t_ns;
        if self.tokens == 0 {
            self.first_ns = at;
        } else {
            let gap = at.saturating_sub(self.last_ns);
            self.app.metrics.gap.observe(gap as f64 / 1e9);
            if Metrics::is_long(gap) && self.gaps.len() < LONG_GAPS {
                self.gaps.push((self.last_ns, at));
            }
        }
        self.last_ns = at;
        self.tokens += 1;
        self.app.metrics.tokens(1);
    }

    /// It came to its end.
    pub(crate) fn completed(&mut self, done: &Completion) {
        let metrics = &self.app.metrics;
        if self.first_ns > 0 {
            let prompt_ns = (done.timings.prompt_ms * 1e6) as u64;
            metrics.completed(done, self.first_ns, &self.gaps);
            metrics.prompt(self.first_ns.saturating_sub(prompt_ns), self.first_ns);
        } else {
            metrics.completed(done, 0, &[]);
        }
        let whole = self.began.elapsed().as_secs_f64();
        metrics.whole.observe(whole);
        let (usage, timings) = (&done.usage, &done.timings);
        self.app.queue.held((whole - timings.queue_ms / 1e3).max(0.0));
        self.close(json!({
            "finish_reason": done.finish_reason.name(),
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "queue_ms": timings.queue_ms,
            "ttft_ms": timings.ttft_ms,
            "tokens_per_second": timings.predicted_per_second,
        }));
    }

    /// It failed.
    pub(crate) fn failed(&mut self, error: &Error) {
        if matches!(error, Error::EngineHang { .. }) {
            self.app.metrics.watchdog_trips.fetch_add(1, Ordering::Relaxed);
        }
        self.close(json!({
            "finish_reason": "error", "code": error.code(), "completion_tokens": self.tokens,
        }));
    }

    fn close(&mut self, facts: serde_json::Value) {
        if !std::mem::replace(&mut self.closed, true) {
            let span = self.app.tracer.below(self.id.1);
            self.app.tracer.end(span, "generate", self.started, &facts);
            self.app.log.line("generation", &self.id.0, facts);
        }
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        let tokens = self.tokens;
        self.close(json!({"finish_reason": "cancelled", "completion_tokens": tokens}));
    }
}
