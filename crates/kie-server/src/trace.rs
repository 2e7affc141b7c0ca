//! Spans for OpenTelemetry, as OTLP in JSON over HTTP (`opentelemetry-proto` 1.x, `/v1/traces`),
//! where the feature `otlp` is built in and a collector is named.
//!
//! A request is a span, its generation one below it; `traceparent` of the client is the parent.
//! Spans hold counts, times and names, never a text. The exporters that there are bring sixty
//! crates for these few fields, so this is our own.
//!
//! Invariant: who ends a span never waits. Spans go through a bounded channel to a thread of their
//! own; while the collector is away they are dropped.

use std::time::SystemTime;

use axum::http::HeaderMap;
use serde_json::Value;

/// A span that has begun. Without the feature, or a collector, it is empty.
#[derive(Clone, Copy, Default)]
pub(crate) struct Span {
    #[cfg(feature = "otlp")]
    ids: Option<otlp::Ids>,
}

/// Where spans go.
#[derive(Default)]
pub(crate) struct Tracer {
    #[cfg(feature = "otlp")]
    out: Option<otlp::Exporter>,
}

impl Tracer {
    /// Exports to the collector at `endpoint` (`http://host:port`), where there is one.
    ///
    /// # Errors
    /// What is wrong with the endpoint, or that the feature is not built in.
    pub(crate) fn new(endpoint: Option<&str>) -> Result<Self, String> {
        let Some(endpoint) = endpoint else { return Ok(Self::default()) };
        #[cfg(feature = "otlp")]
        return Ok(Self { out: Some(otlp::Exporter::new(endpoint)?) });
        #[cfg(not(feature = "otlp"))]
        Err(format!("otlp endpoint {endpoint}: this kie was built without the feature otlp"))
    }

    /// The span of a request with these headers.
    pub(crate) fn request(&self, headers: &HeaderMap) -> Span {
        #[cfg(feature = "otlp")]
        return Span { ids: self.out.as_ref().map(|_| otlp::Ids::of(headers)) };
        #[cfg(not(feature = "otlp"))]
        {
            let _ = headers;
            Span::default()
        }
    }

    /// A span below another.
    pub(crate) fn below(&self, parent: Span) -> Span {
        #[cfg(feature = "otlp")]
        return Span { ids: parent.ids.map(otlp::Ids::below) };
        #[cfg(not(feature = "otlp"))]
        parent
    }

    /// A span ends now; `facts` is an object.
    pub(crate) fn end(&self, span: Span, name: &str, began: SystemTime, facts: &Value) {
        #[cfg(feature = "otlp")]
        if let (Some(out), Some(ids)) = (&self.out, span.ids) {
            out.send(otlp::span(ids, name, began, facts));
        }
        #[cfg(not(feature = "otlp"))]
        let _ = (span, name, began, facts);
    }
}

#[cfg(feature = "otlp")]
mod otlp {
    use std::io::{Read, Write};
    use std::net::{TcpStream, ToSocketAddrs};
    use std::sync::mpsc::{sync_channel, Receiver, SyncSender};
    use std::time::{Duration, SystemTime, UNIX_EPOCH};

    use axum::http::{HeaderMap, Uri};
    use serde_json::{json, Value};

    /// Spans that may wait.
    const ROOM: usize = 4096;
    /// Most spans of a message.
    const BATCH: usize = 256;
    /// How long spans are gathered.
    const GATHER: Duration = Duration::from_millis(200);
    /// Patience with the collector.
    const PATIENCE: Duration = Duration::from_secs(5);

    #[derive(Clone, Copy)]
    pub(super) struct Ids {
        trace: u128,
        own: u64,
        parent: Option<u64>,
    }

    impl Ids {
        /// From `traceparent` (W3C Trace Context), where the client sent one.
        pub(super) fn of(headers: &HeaderMap) -> Self {
            let given = headers.get("traceparent").and_then(|value| value.to_str().ok());
            let (trace, parent) = match given.and_then(parent) {
                Some((trace, parent)) => (trace, Some(parent)),
                None => (u128::from(random()) << 64 | u128::from(random()), None),
            };
            Self { trace, own: random(), parent }
        }

        pub(super) fn below(self) -> Self {
            Self { trace: self.trace, own: random(), parent: Some(self.own) }
        }
    }

    fn parent(text: &str) -> Option<(u128, u64)> {
        let mut parts = text.split('-');
        let (version, trace, span) = (parts.next()?, parts.next()?, parts.next()?);
        let sound = version.len() == 2 && trace.len() == 32 && span.len() == 16;
        let ids = (u128::from_str_radix(trace, 16).ok()?, u64::from_str_radix(span, 16).ok()?);
        (sound && ids.0 != 0 && ids.1 != 0).then_some(ids)
    }

    fn random() -> u64 {
        use std::hash::{BuildHasher, Hasher};
        std::hash::RandomState::new().build_hasher().finish().max(1)
    }

    /// A span as OTLP writes it in JSON.
    pub(super) fn span(ids: Ids, name: &str, began: SystemTime, facts: &Value) -> Value {
        let nanos = |at: SystemTime| {
            let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
            since.as_nanos().to_string()
        };
        let attribute = |(key, value): (&String, &Value)| {
            let value = match value {
                Value::Bool(value) => json!({"boolValue": value}),
                Value::Number(n) if n.is_f64() => json!({"doubleValue": n}),
                Value::Number(n) => json!({"intValue": n.to_string()}),
                Value::String(text) => json!({"stringValue": text}),
                other => json!({"stringValue": other.to_string()}),
            };
            json!({"key": key, "value": value})
        };
        let attributes = facts.as_object().into_iter().flatten().map(attribute);
        json!({
            "traceId": format!("{:032x}", ids.trace),
            "spanId": format!("{:016x}", ids.own),
            "parentSpanId": ids.parent.map_or(String::new(), |id| format!("{id:016x}")),
            "name": name,
            // SERVER, or INTERNAL for what is below a request.
            "kind": if name == "generate" { 1 } else { 2 },
            "startTimeUnixNano": nanos(began),
            "endTimeUnixNano": nanos(SystemTime::now()),
            "attributes": attributes.collect::<Vec<_>>(),
        })
    }

    pub(super) struct Exporter(SyncSender<Value>);

    impl Exporter {
        pub(super) fn new(endpoint: &str) -> Result<Self, String> {
            let wrong = |why: &str| format!("otlp endpoint {endpoint:?}: {why}");
            let uri: Uri = endpoint.parse().map_err(|_| wrong("wanted http://host:port"))?;
            let host = uri.host().filter(|_| uri.scheme_str() == Some("http"));
            let host = host.ok_or_else(|| wrong("wanted http://host:port"))?;
            let place = format!("{host}:{}", uri.port_u16().unwrap_or(4318));
            let path = format!("{}/v1/traces", uri.path().trim_end_matches('/'));
            let (spans, taken) = sync_channel(ROOM);
            let thread = std::thread::Builder::new().name("kie-otlp".to_owned());
            let export = move || export(&taken, &place, &path);
            thread.spawn(export).map_err(|e| wrong(&e.to_string()))?;
            Ok(Self(spans))
        }

        pub(super) fn send(&self, span: Value) {
            drop(self.0.try_send(span));
        }
    }

    fn export(taken: &Receiver<Value>, place: &str, path: &str) {
        while let Ok(first) = taken.recv() {
            let mut spans = vec![first];
            std::thread::sleep(GATHER);
            spans.extend(taken.try_iter().take(BATCH - 1));
            let service = json!({"key": "service.name", "value": {"stringValue": "kie"}});
            let scope = json!({"name": "kie", "version": env!("CARGO_PKG_VERSION")});
            let body = json!({"resourceSpans": [{
                "resource": {"attributes": [service]},
                "scopeSpans": [{"scope": scope, "spans": spans}],
            }]});
            // A collector that is away loses spans, not requests.
            drop(post(place, path, &body.to_string()));
        }
    }

    fn post(place: &str, path: &str, body: &str) -> std::io::Result<()> {
        let address = place.to_socket_addrs()?.next().ok_or(std::io::ErrorKind::NotFound)?;
        let mut link = TcpStream::connect_timeout(&address, PATIENCE)?;
        link.set_read_timeout(Some(PATIENCE))?;
        link.set_write_timeout(Some(PATIENCE))?;
        let length = body.len();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: {place}\r\ncontent-type: application/json\r\n\
             content-length: {length}\r\nconnection: close\r\n\r\n"
        );
        link.write_all(head.as_bytes())?;
        link.write_all(body.as_bytes())?;
        // The answer is read so that the collector is not cut off; what it says changes nothing.
        let mut answer = [0; 1024];
        while link.read(&mut answer)? > 0 {}
        Ok(())
    }
}

#[cfg(all(test, feature = "otlp"))]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use serde_json::json;

    use super::*;

    #[test]
    fn spans_reach_the_collector() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let tracer = Tracer::new(Some(&endpoint)).unwrap();
        let mut headers = HeaderMap::new();
        let given = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        headers.insert("traceparent", given.parse().unwrap());
        let request = tracer.request(&headers);
        let inner = tracer.below(request);
        tracer.end(inner, "generate", SystemTime::now(), &json!({"tokens": 3, "rate": 0.5}));
        tracer.end(request, "POST /v1/messages", SystemTime::now(), &json!({"status": "ok"}));
        let (mut link, _) = listener.accept().unwrap();
        let mut text = Vec::new();
        let body = loop {
            let mut piece = [0; 4096];
            let read = link.read(&mut piece).unwrap();
            text.extend_from_slice(&piece[..read]);
            let at = text.windows(4).position(|w| w == b"\r\n\r\n");
            let body = at.and_then(|at| serde_json::from_slice::<Value>(&text[at + 4..]).ok());
            if let Some(body) = body {
                break body;
            }
            assert!(read > 0);
        };
        link.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").unwrap();
        assert!(text.starts_with(b"POST /v1/traces HTTP/1.1\r\n"));
        let spans = &body["resourceSpans"][0]["scopeSpans"][0]["spans"];
        let (inner, request) = (&spans[0], &spans[1]);
        assert_eq!(request["traceId"], "0af7651916cd43dd8448eb211c80319c");
        assert_eq!(request["parentSpanId"], "b7ad6b7169203331");
        assert_eq!(inner["traceId"], request["traceId"]);
        assert_eq!(inner["parentSpanId"], request["spanId"]);
        assert_eq!(inner["attributes"][0], json!({"key": "tokens", "value": {"intValue": "3"}}));
        assert_eq!((&request["kind"], &inner["kind"]), (&json!(2), &json!(1)));
    }

    #[test]
    fn endpoints_are_checked() {
        for wrong in ["", "collector", "https://collector:4318", "http://"] {
            assert!(Tracer::new(Some(wrong)).is_err(), "{wrong}");
        }
        let none = Tracer::new(None).unwrap();
        assert!(none.request(&HeaderMap::new()).ids.is_none());
    }
}
