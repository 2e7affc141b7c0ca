//! `/health`: whether a balancer should send requests here.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::Json;
use serde_json::json;

use crate::app::{App, Phase};

/// 200 `ok` while it serves, else 503 with what it does instead.
pub(crate) async fn health(State(app): State<Arc<App>>) -> Response {
    let status = match (app.phase(), app.served()) {
        (Phase::Draining | Phase::Over, _) => "draining",
        (Phase::Open, Err(_)) => "loading",
        (Phase::Open, Ok(served)) if served.engine.is_closed() => "failed",
        (Phase::Open, Ok(_)) => "ok",
    };
    let code = if status == "ok" { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (code, Json(json!({"status": status}))).into_response()
}
