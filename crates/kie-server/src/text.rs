//! POST `/tokenize` and `/detokenize`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::Json;
use serde_json::{json, Value};

use crate::app::App;
use crate::chat::Conversation;
use crate::errors::ApiError;
use crate::messages;
use crate::openai::{prepared, received};
use crate::request::Fields;
use crate::tools::Tools;

/// `{"prompt": text}` or `{"messages": [...]}` to the ids that a request with it would have.
pub(crate) async fn tokenize(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let (body, _) = received(&app, request).await?;
    prepared(&app, body, |app, mut fields: Fields| {
        let served = app.served()?;
        fields.ignore(&["model"]);
        let (text, messages) = (fields.text("prompt")?, fields.take("messages"));
        let ids = match (text, messages) {
            (Some(text), None) => {
                let refused = |e: kie_core::Error| ApiError::engine(&e, "prompt");
                served.engine.tokenize(&text, true).map_err(refused)?
            }
            (None, Some(messages)) => {
                let messages = messages::checked(messages)?;
                let tools = Arc::new(Tools::take(&mut fields)?);
                let talk = Conversation { messages, tools, ..Conversation::default() };
                talk.encode(served, "messages")?.ids
            }
            (Some(_), Some(_)) | (None, None) => {
                let message = "wanted exactly one of prompt and messages";
                return Err(ApiError::field("prompt", message));
            }
        };
        fields.finish()?;
        let count = ids.len();
        Ok(Json(json!({"tokens": ids, "count": count})))
    })
    .await
}

/// `{"tokens": [ids]}` to their text, without what `/tokenize` puts in front of every prompt.
pub(crate) async fn detokenize(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let (body, _) = received(&app, request).await?;
    prepared(&app, body, |app, mut fields: Fields| {
        let engine = &app.served()?.engine;
        fields.ignore(&["model"]);
        let missing = || ApiError::field("tokens", "tokens: missing");
        let ids = fields.ids("tokens")?.ok_or_else(missing)?;
        fields.finish()?;
        let refused = |e: kie_core::Error| ApiError::engine(&e, "tokens");
        let front = engine.tokenize("", true).map_err(refused)?;
        let ids = ids.strip_prefix(front.as_slice()).unwrap_or(&ids);
        let text = engine.detokenize(ids, false).map_err(refused)?;
        Ok(Json(json!({"prompt": text})))
    })
    .await
}
