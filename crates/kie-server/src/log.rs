//! Lines on standard error: one a request, one a generation. Never a text of either.
//!
//! Invariant: who logs never waits. Lines go through a bounded channel to a thread of their own;
//! while nobody reads standard error, lines are dropped, not requests held up.

use std::io::Write;
use std::sync::mpsc::{sync_channel, SyncSender};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{json, Map, Value};

/// Lines that may wait.
const ROOM: usize = 4096;

/// What is logged, and how.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Log {
    /// Nothing.
    #[default]
    Off,
    /// A line of words.
    Text,
    /// A JSON object a line.
    Json,
}

/// See the module.
pub(crate) struct Logger {
    kind: Log,
    lines: Option<SyncSender<String>>,
}

impl Logger {
    pub(crate) fn new(kind: Log) -> Self {
        if kind == Log::Off {
            return Self { kind, lines: None };
        }
        let (lines, written) = sync_channel::<String>(ROOM);
        let write = move || {
            for line in written {
                // Nobody is left to be told that standard error is gone.
                drop(std::io::stderr().lock().write_all(line.as_bytes()));
            }
        };
        let thread = std::thread::Builder::new().name("kie-log".to_owned()).spawn(write);
        Self { kind, lines: thread.ok().map(|_| lines) }
    }

    /// Logs `event` of a request with these facts.
    pub(crate) fn line(&self, event: &str, request_id: &str, facts: Value) {
        let Some(lines) = &self.lines else { return };
        let facts = match facts {
            Value::Object(facts) => facts,
            _ => Map::new(),
        };
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64());
        let line = match self.kind {
            Log::Off => return,
            Log::Json => {
                let mut line = Map::new();
                line.insert("ts".to_owned(), json!((seconds * 1e3).round() / 1e3));
                line.insert("level".to_owned(), json!("info"));
                line.insert("event".to_owned(), json!(event));
                line.insert("request_id".to_owned(), json!(request_id));
                line.extend(facts);
                format!("{}\n", Value::Object(line))
            }
            Log::Text => {
                let facts: Vec<String> =
                    facts.iter().map(|(name, value)| format!("{name}={value}")).collect();
                format!("{event} {request_id} {}\n", facts.join(" "))
            }
        };
        drop(lines.try_send(line));
    }
}
