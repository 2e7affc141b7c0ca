//! Paths, and what stands around each of them: request ids, keys, the phase, the form of errors.
//!
//! Invariant: every answer passes [`around`], also those of paths and methods that do not exist.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{header, HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use axum::middleware::{from_fn_with_state, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use kie_core::Engine;
use serde_json::json;
use tower_http::cors::{AllowHeaders, AllowMethods, AllowOrigin, CorsLayer};

use crate::app::{unix_seconds, App, Phase};
use crate::config::Config;
use crate::errors::ApiError;
use crate::trace::{Span, Tracer};
use crate::{anthropic, auth, health, metrics, models, openai, page, text};

/// The paths of [`crate`] over `engine`, to serve alone or beside a program's own.
///
/// Limits that need the socket (slow heads, idle connections) are the embedding server's.
pub fn router(engine: Engine) -> Router {
    router_with(engine, Config::default())
}

/// [`router`] with options; those about the port are not looked at, but a `host` that is not
/// loopback turns the check of the `Host` header off.
pub fn router_with(engine: Engine, config: Config) -> Router {
    // A collector that cannot be one is told by `Server::bind`; here it gets no spans.
    let tracer = Tracer::new(config.otlp_endpoint.as_deref()).unwrap_or_default();
    let app = App::new(config, tracer);
    app.serve(engine);
    routes(&app)
}

/// The paths over an app whose engine may still be loading.
pub(crate) fn routes(app: &Arc<App>) -> Router {
    let router = page::routes(Router::new())
        .route("/health", get(health::health))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::one))
        .route("/v1/chat/completions", post(openai::chat::create))
        .route("/v1/completions", post(openai::completions::create))
        .route("/v1/responses", post(openai::responses::create))
        .route("/v1/messages", post(anthropic::create))
        .route("/v1/messages/count_tokens", post(anthropic::count))
        .route("/tokenize", post(text::tokenize))
        .route("/detokenize", post(text::detokenize))
        .route("/metrics", get(metrics::metrics))
        .fallback(no_path)
        .method_not_allowed_fallback(no_method)
        .with_state(Arc::clone(app));
    // As a whole: axum says what a path allows outside the layers of its routes.
    let router = Router::new().fallback_service(router);
    let router = router.layer(from_fn_with_state(Arc::clone(app), around));
    match cors(&app.config) {
        Some(layer) => router.layer(layer),
        None => router,
    }
}

async fn no_path(request: Request) -> ApiError {
    let path: String = request.uri().path().chars().take(200).collect();
    ApiError::new(StatusCode::NOT_FOUND, format!("there is no path {path}"))
}

async fn no_method(request: Request) -> ApiError {
    let message = format!("{} is not for {}", request.method(), request.uri().path());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, message)
}

fn cors(config: &Config) -> Option<CorsLayer> {
    let origins = &config.cors_origins;
    if origins.is_empty() {
        return None;
    }
    let allowed = match origins.iter().any(|origin| origin == "*") {
        true => AllowOrigin::any(),
        false => AllowOrigin::list(origins.iter().filter_map(|origin| origin.parse().ok())),
    };
    Some(
        CorsLayer::new()
            .allow_origin(allowed)
            .allow_methods(AllowMethods::list([Method::GET, Method::POST, Method::HEAD]))
            .allow_headers(AllowHeaders::mirror_request())
            .expose_headers([
                HeaderName::from_static("x-request-id"),
                HeaderName::from_static("request-id"),
                header::RETRY_AFTER,
            ])
            .max_age(std::time::Duration::from_secs(600)),
    )
}

/// The id of a request, for what is logged about it.
#[derive(Clone, Default)]
pub(crate) struct RequestId(pub(crate) Arc<str>, pub(crate) Span);

/// The client's own id if it is one, else a new one.
fn request_id(headers: &HeaderMap) -> (RequestId, HeaderValue) {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let named = |name: &str| headers.get(name).cloned();
    let given = named("x-request-id").or_else(|| named("request-id"));
    if let Some(value) = given.filter(|value| (1..=128).contains(&value.len())) {
        let printable = value.to_str().ok().filter(|id| id.bytes().all(|b| b.is_ascii_graphic()));
        if let Some(id) = printable {
            return (RequestId(id.into(), Span::default()), value);
        }
    }
    let id = format!("req_{:08x}{:08x}", unix_seconds(), COUNT.fetch_add(1, Ordering::Relaxed));
    let value = HeaderValue::from_str(&id).expect("letters and digits");
    (RequestId(id.into(), Span::default()), value)
}

/// Stands around every path; see the module.
async fn around(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let path = request.uri().path().to_owned();
    let began = Instant::now();
    let method = request.method().clone();
    let options = method == Method::OPTIONS;
    let (mut id, id_header) = request_id(request.headers());
    let started = SystemTime::now();
    id.1 = app.tracer.request(request.headers());
    request.extensions_mut().insert(id.clone());
    let mut response = match admit(&app, &path, options, &request) {
        Ok(()) => next.run(request).await,
        Err(refused) => refused.into_response(),
    };
    if options && response.status() == StatusCode::METHOD_NOT_ALLOWED {
        response = allowed(&response);
    }
    let anthropic = path.starts_with("/v1/messages");
    if let Some(error) = response.extensions_mut().remove::<ApiError>() {
        let body = if anthropic { error.anthropic(&id.0) } else { error.openai() };
        let (parts, _) = response.into_parts();
        let body = Json(body).into_response();
        let kind = body.headers().get(header::CONTENT_TYPE).cloned();
        response = Response::from_parts(parts, body.into_body());
        response.headers_mut().remove(header::CONTENT_LENGTH);
        if let Some(kind) = kind {
            response.headers_mut().insert(header::CONTENT_TYPE, kind);
        }
    }
    if app.phase() != Phase::Open {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    let name = if anthropic { "request-id" } else { "x-request-id" };
    response.headers_mut().insert(name, id_header);
    let code = response.status().as_u16();
    app.metrics.answered(label(&path), code);
    let name = format!("{method} {}", label(&path));
    let facts = json!({
        "http.request.method": method.as_str(),
        "http.route": label(&path),
        "http.response.status_code": code,
        "kie.request_id": &*id.0,
    });
    app.tracer.end(id.1, &name, started, &facts);
    let ms = began.elapsed().as_secs_f64() * 1e3;
    let path: String = path.chars().take(200).collect();
    let facts = json!({"method": method.as_str(), "path": path, "status": code, "ms": ms});
    app.log.line("request", &id.0, facts);
    response
}

/// A path as metrics name it: of the server's own, or `other`.
fn label(path: &str) -> &'static str {
    const PATHS: [&str; 12] = [
        "/health",
        "/metrics",
        "/",
        "/tokenize",
        "/detokenize",
        "/v1/models",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models/{id}",
    ];
    match PATHS.iter().find(|known| **known == path) {
        Some(known) => known,
        None if path.starts_with("/v1/models/") => "/v1/models/{id}",
        None => "other",
    }
}

/// Whether a request may go to its path at all.
fn admit(app: &App, path: &str, options: bool, request: &Request) -> Result<(), ApiError> {
    auth::host(&app.config, request.uri(), request.headers())?;
    let open = (path == "/metrics" && !app.config.protect_metrics)
        || (page::has(path) && !app.config.protect_page);
    if options || path == "/health" || open {
        return Ok(());
    }
    auth::key(&app.config, request.headers())?;
    match app.phase() {
        Phase::Open if request.method() == Method::POST => app.served().map(drop),
        Phase::Open => Ok(()),
        Phase::Draining | Phase::Over => Err(ApiError::unavailable("the server is shutting down")),
    }
}

/// The answer to OPTIONS: what `refused` says is allowed.
fn allowed(refused: &Response) -> Response {
    let allow = refused.headers().get(header::ALLOW).and_then(|allow| allow.to_str().ok());
    let allow = format!("{},OPTIONS", allow.unwrap_or_default());
    let mut response = StatusCode::NO_CONTENT.into_response();
    if let Ok(allow) = HeaderValue::from_str(allow.trim_start_matches(',')) {
        response.headers_mut().insert(header::ALLOW, allow);
    }
    response.map(|_| Body::empty())
}
