//! Who may ask: the key, and the name under which this machine was reached.

use std::net::IpAddr;

use axum::http::{header, HeaderMap, StatusCode, Uri};

use crate::config::Config;
use crate::errors::ApiError;

/// The key, as `Authorization: Bearer` or, as Anthropic's clients send it, `x-api-key`.
///
/// # Errors
/// 401.
pub(crate) fn key(config: &Config, headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(wanted) = &config.api_key else { return Ok(()) };
    let bearer = headers.get(header::AUTHORIZATION).map(|value| {
        let value = value.as_bytes();
        match value.split_at_checked(7) {
            Some((scheme, key)) if scheme.eq_ignore_ascii_case(b"bearer ") => key.trim_ascii(),
            _ => value,
        }
    });
    let plain = headers.get("x-api-key").map(|value| value.as_bytes().trim_ascii());
    let mut given = [bearer, plain].into_iter().flatten().peekable();
    let message = match given.peek() {
        None => "no API key: send it as Authorization: Bearer KEY",
        Some(_) => "incorrect API key",
    };
    if given.any(|key| equal(key, wanted.as_bytes())) {
        return Ok(());
    }
    Err(ApiError::new(StatusCode::UNAUTHORIZED, message).with_code("invalid_api_key"))
}

/// Compares in a time that does not tell how much is equal.
fn equal(given: &[u8], wanted: &[u8]) -> bool {
    let differ = given.iter().zip(wanted).fold(0, |differ, (a, b)| differ | (a ^ b));
    given.len() == wanted.len() && differ == 0
}

/// On loopback, a page of another site that has pointed its name here (DNS rebinding) is refused.
///
/// # Errors
/// 403.
pub(crate) fn host(config: &Config, uri: &Uri, headers: &HeaderMap) -> Result<(), ApiError> {
    if !is_loopback(&config.host) {
        return Ok(());
    }
    let given = match (uri.authority(), headers.get(header::HOST)) {
        (Some(authority), _) => authority.as_str(),
        (None, Some(host)) => host.to_str().unwrap_or("?"),
        // HTTP/1.0 without one: no browser sends that.
        (None, None) => return Ok(()),
    };
    let name = without_port(given);
    let allowed = |allowed: &String| allowed.eq_ignore_ascii_case(name) || allowed == "*";
    if is_loopback(name) || config.allowed_hosts.iter().any(allowed) {
        return Ok(());
    }
    let name: String = name.chars().take(100).collect();
    let message = format!("Host {name:?} is not this machine; --allowed-host {name} allows it");
    Err(ApiError::new(StatusCode::FORBIDDEN, message))
}

/// Whether a name or address can only be this machine's own.
pub(crate) fn is_loopback(name: &str) -> bool {
    let bare = name.trim_start_matches('[').trim_end_matches(']');
    name.eq_ignore_ascii_case("localhost")
        || bare.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, _)) if !name.contains(':') || name.ends_with(']') => name,
        _ => host,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_this_machine() {
        for name in ["localhost", "LOCALHOST", "127.0.0.1", "127.1.2.3", "::1", "[::1]"] {
            assert!(is_loopback(name), "{name}");
        }
        for name in ["localhost.evil.org", "0.0.0.0", "10.0.0.1", "evil.org", "", "[::]"] {
            assert!(!is_loopback(name), "{name}");
        }
        for (host, name) in [("a:80", "a"), ("[::1]:80", "[::1]"), ("[::1]", "[::1]"), ("a", "a")] {
            assert_eq!(without_port(host), name);
        }
    }

    #[test]
    fn keys_are_compared_whole() {
        assert!(equal(b"key", b"key"));
        for given in [&b"ke"[..], b"keys", b"", b"kez"] {
            assert!(!equal(given, b"key"));
        }
    }
}
