//! `/metrics`: what Prometheus reads.
//!
//! Invariants: gaps between tokens are of the device's stamps, not of when they were sent; what the
//! engine counts (tokens, ended requests, pages) is read from it and counted nowhere else.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use axum::extract::State;
use axum::http::{header, HeaderName};
use kie_core::grammar::times::BOUNDS_US;
use kie_core::request::Completion;

use crate::app::{App, Served};

/// Seconds; from a fast engine's token to a stall.
const GAPS: [f64; 20] = [
    50e-6, 100e-6, 150e-6, 200e-6, 300e-6, 400e-6, 500e-6, 700e-6, 1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3,
    10e-3, 25e-3, 50e-3, 100e-3, 250e-3, 500e-3, 1.0,
];
/// Seconds; from a cached prompt to a long answer.
const TIMES: [f64; 18] = [
    0.5e-3, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3, 250e-3, 500e-3, 1.0, 2.5, 5.0, 10.0,
    30.0, 60.0, 120.0, 300.0,
];
/// A gap so many times the request's median, and at least this long, is a stall.
const STALL: (f64, u64) = (20.0, 5_000_000);
/// Prompts that a stall may have been beside.
const PROMPTS: usize = 64;
/// Seconds over which the rate of tokens is told.
const RATE_SECONDS: usize = 5;

/// Observations by size.
pub(crate) struct Histogram {
    bounds: &'static [f64],
    counts: Box<[AtomicU64]>,
    sum_ns: AtomicU64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Self {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self { bounds, counts, sum_ns: AtomicU64::new(0) }
    }

    /// Adds an observation.
    pub(crate) fn observe(&self, seconds: f64) {
        let at = self.bounds.partition_point(|bound| *bound < seconds);
        self.counts[at].fetch_add(1, Ordering::Relaxed);
        self.sum_ns.fetch_add((seconds * 1e9) as u64, Ordering::Relaxed);
    }

    fn write(&self, out: &mut String, name: &str) {
        let bound = |at: usize| self.bounds.get(at).map_or("+Inf".to_owned(), f64::to_string);
        let counts = self.counts.iter().map(|cell| cell.load(Ordering::Relaxed));
        let counts = counts.enumerate().map(|(at, count)| (bound(at), count));
        let sum_s = self.sum_ns.load(Ordering::Relaxed) as f64 / 1e9;
        rows(out, name, counts, sum_s);
    }
}

/// A histogram from its buckets' bounds and counts.
fn rows(out: &mut String, name: &str, buckets: impl Iterator<Item = (String, u64)>, sum_s: f64) {
    let mut all = 0;
    for (bound, count) in buckets {
        all += count;
        put(out, format_args!("{name}_bucket{{le=\"{bound}\"}} {all}"));
    }
    put(out, format_args!("{name}_sum {sum_s}"));
    put(out, format_args!("{name}_count {all}"));
}

/// Tokens of the last seconds.
#[derive(Default)]
struct Rate {
    second: u64,
    /// The present second, then those before it.
    tokens: [u64; RATE_SECONDS + 1],
}

impl Rate {
    fn turn(&mut self, now: u64) {
        let passed = usize::try_from(now - self.second).unwrap_or(usize::MAX);
        self.second = now;
        for _ in 0..passed.min(self.tokens.len()) {
            self.tokens.rotate_right(1);
            self.tokens[0] = 0;
        }
    }
}

/// All that the server itself counts.
pub(crate) struct Metrics {
    pub(crate) first_token: Histogram,
    pub(crate) gap: Histogram,
    pub(crate) whole: Histogram,
    queue: Histogram,
    prefill: Histogram,
    decode: Histogram,
    /// Beside another request's prompt, and others.
    stalls: [AtomicU64; 2],
    pub(crate) watchdog_trips: AtomicU64,
    /// By path and code.
    http: Mutex<BTreeMap<(&'static str, u16), u64>>,
    /// When the last prompts were computed, in nanoseconds.
    prompts: Mutex<VecDeque<(u64, u64)>>,
    rate: Mutex<Rate>,
    began: Instant,
    /// Bits of the last request's share of the bandwidth.
    bandwidth: AtomicU64,
    /// Tokens that were drafted, and those of them that were right.
    drafts: [AtomicU64; 2],
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn put(out: &mut String, line: std::fmt::Arguments<'_>) {
    writeln!(out, "{line}").expect("a String takes all");
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let times = || Histogram::new(&TIMES);
        Self {
            first_token: times(),
            gap: Histogram::new(&GAPS),
            whole: times(),
            queue: times(),
            prefill: times(),
            decode: times(),
            stalls: [AtomicU64::new(0), AtomicU64::new(0)],
            watchdog_trips: AtomicU64::new(0),
            http: Mutex::new(BTreeMap::new()),
            prompts: Mutex::new(VecDeque::new()),
            rate: Mutex::new(Rate::default()),
            began: Instant::now(),
            bandwidth: AtomicU64::new(0),
            drafts: [AtomicU64::new(0), AtomicU64::new(0)],
        }
    }

    /// An answer's head was made.
    pub(crate) fn answered(&self, path: &'static str, code: u16) {
        *lock(&self.http).entry((path, code)).or_default() += 1;
    }

    /// So many tokens were read.
    pub(crate) fn tokens(&self, count: usize) {
        let mut rate = lock(&self.rate);
        rate.turn(self.began.elapsed().as_secs());
        rate.tokens[0] += count as u64;
    }

    /// A request came to its end; `first_ns` is the stamp of its first token, `gaps` are the
    /// longest of its gaps, from and to.
    pub(crate) fn completed(&self, done: &Completion, first_ns: u64, gaps: &[(u64, u64)]) {
        let t = &done.timings;
        self.queue.observe(t.queue_ms / 1e3);
        if first_ns > 0 {
            self.first_token.observe(t.ttft_ms / 1e3);
            self.prefill.observe(t.prompt_ms / 1e3);
            self.decode.observe(t.predicted_ms / 1e3);
            self.bandwidth.store(t.mbu.to_bits(), Ordering::Relaxed);
        }
        for (count, more) in self.drafts.iter().zip([t.draft_n, t.draft_n_accepted]) {
            count.fetch_add(more as u64, Ordering::Relaxed);
        }
        let prompts = lock(&self.prompts);
        let median_ns = t.itl_p50_us * 1e3;
        for (from, to) in gaps {
            if (to - from) as f64 > STALL.0 * median_ns {
                let beside = prompts.iter().any(|(began, ended)| began < to && from < ended);
                self.stalls[usize::from(!beside)].fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// A prompt was computed.
    pub(crate) fn prompt(&self, began_ns: u64, ended_ns: u64) {
        let mut prompts = lock(&self.prompts);
        if prompts.len() == PROMPTS {
            prompts.pop_front();
        }
        prompts.push_back((began_ns, ended_ns));
    }

    /// A gap long enough to be looked at when the request has ended.
    pub(crate) fn is_long(gap_ns: u64) -> bool {
        gap_ns >= STALL.1
    }

    fn rate(&self) -> f64 {
        let mut rate = lock(&self.rate);
        rate.turn(self.began.elapsed().as_secs());
        // The present second is not over.
        rate.tokens[1..].iter().sum::<u64>() as f64 / RATE_SECONDS as f64
    }
}

/// The handler.
pub(crate) async fn metrics(
    State(app): State<Arc<App>>,
) -> ([(HeaderName, &'static str); 1], String) {
    let mut out = String::new();
    if let Ok(served) = app.served() {
        of_engine(&mut out, &app.metrics, served);
    }
    of_server(&mut out, &app.metrics);
    if app.config.metrics_compat_vllm {
        out.push_str(&vllm(&out));
    }
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], out)
}

fn of_engine(out: &mut String, own: &Metrics, served: &Served) {
    let m = served.engine.metrics();
    let counter = |out: &mut String, name: &str, value: u64| {
        put(out, format_args!("# TYPE {name} counter\n{name} {value}"));
    };
    let gauge = |out: &mut String, name: &str, value: f64| {
        put(out, format_args!("# TYPE {name} gauge\n{name} {value}"));
    };
    counter(out, "kie_prompt_tokens_total", m.prompt_tokens);
    counter(out, "kie_generation_tokens_total", m.generated_tokens);
    put(out, format_args!("# TYPE kie_requests_total counter"));
    for (reason, count) in [
        ("stop", m.requests_stop),
        ("length", m.requests_length),
        ("cancelled", m.requests_cancelled),
        ("timeout", m.requests_timeout),
        ("error", m.requests_error),
    ] {
        put(out, format_args!("kie_requests_total{{finish_reason=\"{reason}\"}} {count}"));
    }
    let masks = served.engine.mask_times();
    put(out, format_args!("# TYPE kie_grammar_mask_seconds histogram"));
    let bounds = BOUNDS_US.iter().map(|us| (*us as f64 / 1e6).to_string());
    let bounds = bounds.chain(["+Inf".to_owned()]);
    rows(out, "kie_grammar_mask_seconds", bounds.zip(masks.counts), masks.sum_s);
    counter(out, "kie_prefix_cache_queried_tokens_total", m.prompt_tokens);
    counter(out, "kie_prefix_cache_hit_tokens_total", m.cached_tokens);
    let [drafted, accepted] = [0, 1].map(|at: usize| own.drafts[at].load(Ordering::Relaxed));
    counter(out, "kie_draft_tokens_total", drafted);
    counter(out, "kie_draft_tokens_accepted_total", accepted);
    gauge(out, "kie_requests_running", m.running as f64);
    gauge(out, "kie_requests_waiting", m.waiting as f64);
    let usage = m.kv_pages_used as f64 / m.kv_pages.max(1) as f64;
    gauge(out, "kie_kv_cache_usage_ratio", usage);
    gauge(out, "kie_decode_tokens_per_second", own.rate());
    let bandwidth = f64::from_bits(own.bandwidth.load(Ordering::Relaxed));
    gauge(out, "kie_memory_bandwidth_utilization_ratio", bandwidth);
    let label = |text: &str| text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    put(
        out,
        format_args!(
            "# TYPE kie_build_info gauge\n\
             kie_build_info{{version=\"{}\",backend=\"{}\",model=\"{}\"}} 1",
            env!("CARGO_PKG_VERSION"),
            label(&served.info.device),
            label(&served.name),
        ),
    );
}

fn of_server(out: &mut String, m: &Metrics) {
    for (name, histogram) in [
        ("kie_time_to_first_token_seconds", &m.first_token),
        ("kie_inter_token_latency_seconds", &m.gap),
        ("kie_e2e_request_latency_seconds", &m.whole),
        ("kie_request_queue_time_seconds", &m.queue),
        ("kie_request_prefill_time_seconds", &m.prefill),
        ("kie_request_decode_time_seconds", &m.decode),
    ] {
        put(out, format_args!("# TYPE {name} histogram"));
        histogram.write(out, name);
    }
    put(out, format_args!("# TYPE kie_stalls_total counter"));
    for (cause, count) in ["prefill", "other"].iter().zip(&m.stalls) {
        let count = count.load(Ordering::Relaxed);
        put(out, format_args!("kie_stalls_total{{cause=\"{cause}\"}} {count}"));
    }
    let trips = m.watchdog_trips.load(Ordering::Relaxed);
    put(out, format_args!("# TYPE kie_watchdog_trips_total counter"));
    put(out, format_args!("kie_watchdog_trips_total {trips}"));
    put(out, format_args!("# TYPE kie_http_requests_total counter"));
    for ((path, code), count) in lock(&m.http).iter() {
        let labels = format_args!("path=\"{path}\",code=\"{code}\"");
        put(out, format_args!("kie_http_requests_total{{{labels}}} {count}"));
    }
}

/// The same values under the names that dashboards for vLLM ask for.
fn vllm(ours: &str) -> String {
    let names = [
        ("kie_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
        ("kie_inter_token_latency_seconds", "vllm:inter_token_latency_seconds"),
        ("kie_e2e_request_latency_seconds", "vllm:e2e_request_latency_seconds"),
        ("kie_request_queue_time_seconds", "vllm:request_queue_time_seconds"),
        ("kie_request_prefill_time_seconds", "vllm:request_prefill_time_seconds"),
        ("kie_request_decode_time_seconds", "vllm:request_decode_time_seconds"),
        ("kie_prompt_tokens_total", "vllm:prompt_tokens_total"),
        ("kie_generation_tokens_total", "vllm:generation_tokens_total"),
        ("kie_requests_running", "vllm:num_requests_running"),
        ("kie_requests_waiting", "vllm:num_requests_waiting"),
        ("kie_kv_cache_usage_ratio", "vllm:kv_cache_usage_perc"),
        ("kie_prefix_cache_queried_tokens_total", "vllm:prefix_cache_queries_total"),
        ("kie_prefix_cache_hit_tokens_total", "vllm:prefix_cache_hits_total"),
        ("kie_requests_total", "vllm:request_success_total"),
        ("kie_draft_tokens_total", "vllm:spec_decode_num_draft_tokens_total"),
        ("kie_draft_tokens_accepted_total", "vllm:spec_decode_num_accepted_tokens_total"),
    ];
    let mut out = String::new();
    for line in ours.lines() {
        let rest = line.strip_prefix("# TYPE ").unwrap_or(line);
        let lead = &line[..line.len() - rest.len()];
        let renamed = names.iter().find_map(|(ours, theirs)| {
            let tail = rest.strip_prefix(ours)?;
            let whole = [" ", "{", "_bucket{", "_sum ", "_count "];
            whole.iter().any(|end| tail.starts_with(end)).then(|| format!("{lead}{theirs}{tail}"))
        });
        if let Some(line) = renamed {
            put(&mut out, format_args!("{line}"));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histograms_count_up() {
        let histogram = Histogram::new(&GAPS);
        for seconds in [40e-6, 50e-6, 51e-6, 2.0] {
            histogram.observe(seconds);
        }
        let mut out = String::new();
        histogram.write(&mut out, "x");
        assert!(
            out.starts_with("x_bucket{le=\"0.00005\"} 2\nx_bucket{le=\"0.0001\"} 3\n"),
            "{out}"
        );
        assert!(out.contains("x_bucket{le=\"1\"} 3\nx_bucket{le=\"+Inf\"} 4\n"), "{out}");
        assert!(out.ends_with("x_count 4\n"), "{out}");
    }

    #[test]
    fn seconds_without_tokens_count() {
        let mut rate = Rate::default();
        rate.tokens[0] = 10;
        rate.turn(2);
        assert_eq!(rate.tokens[..4], [0, 0, 10, 0]);
        rate.turn(1_000_000);
        assert_eq!(rate.tokens, [0; RATE_SECONDS + 1]);
    }

    #[test]
    fn names_of_vllm_are_copies() {
        let ours =
            "# TYPE kie_requests_total counter\nkie_requests_total{finish_reason=\"stop\"} 1\n\
                    kie_requests_running 2\nkie_time_to_first_token_seconds_sum 3\n";
        let theirs = "# TYPE vllm:request_success_total counter\n\
                      vllm:request_success_total{finish_reason=\"stop\"} 1\n\
                      vllm:num_requests_running 2\nvllm:time_to_first_token_seconds_sum 3\n";
        assert_eq!(vllm(ours), theirs);
    }
}
