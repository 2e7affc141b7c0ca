//! `/v1/models`: the one model there is.

use std::sync::Arc;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::Json;
use serde_json::{json, Value};

use crate::app::{App, Served};
use crate::errors::ApiError;

/// 404 in OpenAI's words.
pub(crate) fn unknown(model: &str) -> ApiError {
    let model: String = model.chars().take(100).collect();
    let message = format!("The model `{model}` does not exist or you do not have access to it.");
    let mut error = ApiError::new(StatusCode::NOT_FOUND, message).with_code("model_not_found");
    error.param = Some("model".to_owned());
    error
}

fn entry(app: &App, served: &Served) -> Value {
    json!({
        "id": served.name, "object": "model", "created": app.created, "owned_by": "kie",
        "max_model_len": served.info.context,
    })
}

/// All of them.
pub(crate) async fn list(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let served = app.served()?;
    Ok(Json(json!({"object": "list", "data": [entry(&app, served)]})))
}

/// One of them.
pub(crate) async fn one(
    State(app): State<Arc<App>>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let served = app.served()?;
    // A path whose bytes are no text names no model.
    let Ok(Path(id)) = id else { return Err(unknown("?")) };
    match served.answers_to(&id) {
        true => Ok(Json(entry(&app, served))),
        false => Err(unknown(&id)),
    }
}
