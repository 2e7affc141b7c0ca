//! Event streams: `data: {json}` and a blank line, and a comment after some silence: some proxies
//! close what is silent for 30 s. A comment says what is waited for.

use std::convert::Infallible;
use std::future::Future;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{header, HeaderValue};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde::Serialize;
use tokio::time::{timeout_at, Instant};

/// No stream is made of comments alone.
const SILENCE_MIN: Duration = Duration::from_millis(10);

/// What a stream is made of.
pub(crate) trait Frames: Send + 'static {
    /// Appends what comes next; false: that was all. May be dropped and called again.
    fn next(&mut self, out: &mut Vec<u8>) -> impl Future<Output = bool> + Send;

    /// What it waits for, in a line.
    fn waits(&self) -> String;
}

/// Appends one `data` frame.
pub(crate) fn data<T: Serialize>(out: &mut Vec<u8>, value: &T) {
    out.extend_from_slice(b"data: ");
    serde_json::to_writer(&mut *out, value).expect("plain values into memory");
    out.extend_from_slice(b"\n\n");
}

/// Appends one frame of a named event.
pub(crate) fn event<T: Serialize>(out: &mut Vec<u8>, name: &str, value: &T) {
    out.extend_from_slice(b"event: ");
    out.extend_from_slice(name.as_bytes());
    out.push(b'\n');
    data(out, value);
}

/// A response that streams `frames`, with a comment after `silence`.
pub(crate) fn response(frames: impl Frames, silence: Duration) -> Response {
    let silence = silence.max(SILENCE_MIN);
    let body = stream::unfold(Some(frames), move |frames| async move {
        let mut frames = frames?;
        let mut out = Vec::new();
        let until = Instant::now() + silence;
        let more = loop {
            match timeout_at(until, frames.next(&mut out)).await {
                // Tokens of which nothing can be said yet are silence, too.
                Ok(true) if out.is_empty() => {}
                Ok(more) => break more,
                Err(_) => {
                    out.extend_from_slice(format!(": {}\n\n", frames.waits()).as_bytes());
                    break true;
                }
            }
        };
        let left = if more { Some(frames) } else { None };
        Some((Ok::<_, Infallible>(Bytes::from(out)), left))
    });
    let mut response = Body::from_stream(body).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // nginx would gather events otherwise.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    /// Says nothing for some steps, then one word.
    struct Quiet(usize);

    impl Frames for Quiet {
        fn waits(&self) -> String {
            "queued, position 3".to_owned()
        }

        async fn next(&mut self, out: &mut Vec<u8>) -> bool {
            tokio::time::sleep(Duration::from_millis(2)).await;
            self.0 -= 1;
            if self.0 == 0 {
                event(out, "word", &1);
            }
            self.0 > 0
        }
    }

    #[tokio::test]
    async fn steps_without_a_word_are_silence() {
        let body = response(Quiet(50), Duration::from_millis(20)).into_body();
        let text = String::from_utf8(body.collect().await.unwrap().to_bytes().to_vec()).unwrap();
        let (silence, word) = text.split_at(text.find("event").unwrap());
        assert_eq!(word, "event: word\ndata: 1\n\n");
        assert!(silence.starts_with(": queued, position 3\n\n"));
        assert_eq!(silence.replace(": queued, position 3\n\n", ""), "");
    }
}
