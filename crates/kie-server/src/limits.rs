//! What a body may be: its type, its length, how long it may take.

use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::http::{header, HeaderMap, StatusCode};
use http_body_util::{BodyExt, LengthLimitError, Limited};

use crate::config::Config;
use crate::errors::ApiError;

/// Reads a body whole.
///
/// # Errors
/// 415 for a type that is not JSON and for a compressed one, 413 for one that is too long, 408 for
/// one that is too slow.
pub(crate) async fn body(
    config: &Config,
    headers: &HeaderMap,
    body: Body,
) -> Result<Bytes, ApiError> {
    json_type(headers)?;
    plain(headers)?;
    let most = config.max_body_bytes;
    let too_long = || {
        let message = format!("body: wanted at most {most} bytes");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message)
    };
    if body.size_hint().lower() > most as u64 {
        return Err(too_long());
    }
    let timeout: Duration = config.body_timeout;
    match tokio::time::timeout(timeout, Limited::new(body, most).collect()).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_long()),
        Ok(Err(error)) => {
            Err(ApiError::new(StatusCode::BAD_REQUEST, format!("body: cannot be read: {error}")))
        }
        Err(_) => {
            let message = format!("body: did not come whole within {} s", timeout.as_secs_f64());
            Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, message))
        }
    }
}

/// A body comes as it is, not compressed.
fn plain(headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(given) = headers.get(header::CONTENT_ENCODING) else { return Ok(()) };
    if given.as_bytes().eq_ignore_ascii_case(b"identity") {
        return Ok(());
    }
    let message = format!("content-encoding: wanted none, got {given:?}");
    Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message))
}

/// A missing type is read as JSON.
fn json_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(given) = headers.get(header::CONTENT_TYPE) else { return Ok(()) };
    let kind = given.to_str().unwrap_or_default().split(';').next().unwrap_or_default().trim();
    let kind = kind.to_ascii_lowercase();
    let is_json =
        kind == "application/json" || (kind.starts_with("application/") && kind.ends_with("+json"));
    if is_json {
        return Ok(());
    }
    let message = format!("content-type: wanted application/json, got {kind:?}");
    Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message))
}
