//! The playground at `/`: files of `page/`, embedded, which ask the paths beside them.
//!
//! Invariant: the page loads nothing from elsewhere and runs no script of its HTML; its
//! Content-Security-Policy says so to the browser.

use axum::http::{header, HeaderName};
use axum::response::IntoResponse;
use axum::routing::get;
use axum::Router;

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

macro_rules! files {
    ($($path:literal, $file:literal, $kind:expr;)*) => {
        /// Path, type and content of each file.
        const FILES: &[(&str, &str, &[u8])] =
            &[$(($path, $kind, include_bytes!(concat!("../page/", $file)))),*];
    };
}

files! {
    "/", "index.html", HTML;
    "/app.js", "app.js", SCRIPT;
    "/favicon.svg", "favicon.svg", "image/svg+xml";
    "/form.js", "form.js", SCRIPT;
    "/highlight.js", "highlight.js", SCRIPT;
    "/notice.js", "notice.js", SCRIPT;
    "/pace.js", "pace.js", SCRIPT;
    "/reader.js", "reader.js", SCRIPT;
    "/snippets.js", "snippets.js", SCRIPT;
    "/stage.js", "stage.js", SCRIPT;
    "/stream.js", "stream.js", SCRIPT;
    "/style.css", "style.css", CSS;
    "/theme.js", "theme.js", SCRIPT;
    "/view.js", "view.js", SCRIPT;
}

/// Whether a path is one of the page's.
pub(crate) fn has(path: &str) -> bool {
    FILES.iter().any(|(known, ..)| *known == path)
}

/// `router` with the page's paths.
pub(crate) fn routes<S: Clone + Send + Sync + 'static>(router: Router<S>) -> Router<S> {
    FILES.iter().fold(router, |router, &(path, kind, bytes)| {
        let headers = [
            (header::CONTENT_TYPE, kind),
            (header::CONTENT_SECURITY_POLICY, "default-src 'self'"),
            (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
            (header::CACHE_CONTROL, "no-cache"),
            (HeaderName::from_static("referrer-policy"), "no-referrer"),
        ];
        router.route(path, get(move || async move { (headers, bytes).into_response() }))
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_the_page_is_served() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/page");
        for entry in std::fs::read_dir(folder).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let path = if name == "index.html" { "/".to_owned() } else { format!("/{name}") };
            assert!(has(&path), "page/{name} is not in FILES");
        }
    }
}
