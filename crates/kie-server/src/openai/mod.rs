//! OpenAI's paths.

pub(crate) mod chat;
mod chunk;
pub(crate) mod completions;
mod logprobs;
pub(crate) mod responses;
pub(crate) mod types;

use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::HeaderMap;

use crate::app::App;
use crate::conn::Peer;
use crate::errors::ApiError;
use crate::limits;
use crate::request::Fields;
use crate::router::RequestId;

/// Bodies longer than this are read and tokenized on a thread for that: it takes milliseconds.
const INLINE_BYTES: usize = 8 << 10;

/// Who sent a request.
#[derive(Clone, Default)]
pub(crate) struct Caller {
    pub(crate) peer: Peer,
    pub(crate) id: RequestId,
}

/// A request's whole body, and who sent it.
pub(crate) async fn received(app: &App, request: Request) -> Result<(Bytes, Caller), ApiError> {
    let (mut parts, body): (_, Body) = request.into_parts();
    let peer = parts.extensions.remove::<Peer>().unwrap_or_default();
    let id = parts.extensions.remove::<RequestId>().unwrap_or_default();
    let headers: HeaderMap = parts.headers;
    Ok((limits::body(&app.config, &headers, body).await?, Caller { peer, id }))
}

/// Runs `prepare` over the fields of `body`.
///
/// # Errors
/// What it refuses.
pub(crate) async fn prepared<T: Send + 'static>(
    app: &Arc<App>,
    body: Bytes,
    prepare: impl FnOnce(&App, Fields) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    if body.len() <= INLINE_BYTES {
        return prepare(app, Fields::parse(&body)?);
    }
    let app = Arc::clone(app);
    let work = tokio::task::spawn_blocking(move || prepare(&app, Fields::parse(&body)?));
    work.await.unwrap_or_else(|_| Err(ApiError::unavailable("the server is shutting down")))
}
