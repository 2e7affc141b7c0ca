//! Errors as clients read them: one type inside, OpenAI's or Anthropic's form outside.
//!
//! Invariant: a handler returns [`ApiError`]; the form is chosen at the edge (`router.rs`),
//! by path, so that a missing path and a wrong key look like the API that was meant.

use axum::http::{header, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::{json, Value};

/// Parameters that the engine's messages begin with.
const PARAMS: [&str; 16] = [
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "logprobs",
    "logit_bias",
    "timeout",
    "speculate",
    "prediction",
];

/// Why a request has no answer.
#[derive(Debug, Clone)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) message: String,
    pub(crate) param: Option<String>,
    pub(crate) code: Option<&'static str>,
    /// Seconds after which to try again.
    pub(crate) retry_after: Option<u64>,
}

impl ApiError {
    /// An error of `status`.
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None, retry_after: None }
    }

    /// A field that is wrong.
    pub(crate) fn field(param: impl Into<String>, message: impl Into<String>) -> Self {
        let mut error = Self::new(StatusCode::BAD_REQUEST, message);
        error.param = Some(param.into());
        error
    }

    /// With a code for programs.
    pub(crate) fn with_code(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    /// The same about a field that an API calls otherwise.
    pub(crate) fn renamed(mut self, name: &str, theirs: &str) -> Self {
        if self.param.as_deref() == Some(name) {
            let rest = self.message.strip_prefix(name).unwrap_or(&self.message);
            self.message = format!("{theirs}{rest}");
            self.param = Some(theirs.to_owned());
        }
        self
    }

    /// Not now: loading or draining.
    pub(crate) fn unavailable(message: &str) -> Self {
        let mut error = Self::new(StatusCode::SERVICE_UNAVAILABLE, message);
        error.retry_after = Some(1);
        error
    }

    /// What the engine said; `prompt` is the field that the prompt came in.
    pub(crate) fn engine(error: &kie_core::Error, prompt: &str) -> Self {
        use kie_core::Error as E;
        let said = error.to_string();
        match error {
            E::InvalidRequest(detail) => match detail.split([' ', ':']).next() {
                Some(word) if PARAMS.contains(&word) => Self::field(word, said),
                Some("the" | "prompt" | "id") => Self::field(prompt, said),
                _ => Self::new(StatusCode::BAD_REQUEST, said),
            },
            E::ContextLength { .. } => {
                Self::field(prompt, said).with_code("context_length_exceeded")
            }
            E::Template(_) => Self::field(prompt, said),
            E::Grammar(_) => Self::field("grammar", said),
            // A request larger than all there is: the client asked for it.
            E::OutOfMemory { .. } => Self::field("max_tokens", said),
            E::QueueFull(_) => {
                let mut full = Self::new(StatusCode::TOO_MANY_REQUESTS, said);
                full.retry_after = Some(1);
                full.with_code("rate_limit_exceeded")
            }
            E::EngineClosed => Self::unavailable(&said),
            _ => Self::new(StatusCode::INTERNAL_SERVER_ERROR, said),
        }
    }

    /// `{"error": ...}` of OpenAI.
    pub(crate) fn openai(&self) -> Value {
        let kind = match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            429 => "rate_limit_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        };
        json!({"error": {
            "message": self.message, "type": kind, "param": self.param, "code": self.code,
        }})
    }

    /// `{"type": "error", ...}` of Anthropic.
    pub(crate) fn anthropic(&self, request_id: &str) -> Value {
        let kind = match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 => "overloaded_error",
            500.. => "api_error",
            _ => "invalid_request_error",
        };
        let message = match &self.param {
            Some(param) if !self.message.contains(param.as_str()) => {
                format!("{param}: {}", self.message)
            }
            _ => self.message.clone(),
        };
        json!({
            "type": "error", "error": {"type": kind, "message": message}, "request_id": request_id,
        })
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = self.status.into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            let bearer = HeaderValue::from_static("Bearer");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, bearer);
        }
        response.extensions_mut().insert(self);
        response
    }
}
