//! What handlers take from a request: the caller, the key, preferences, and a body of the right type.

use std::convert::Infallible;
use std::time::Duration;

use axum::extract::{FromRequestParts, Path};
use base64::Engine as _;
use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_ENCODING, CONTENT_TYPE};
use http::request::Parts;
use http::{HeaderMap, HeaderName};

use super::App;
use super::body;
use super::problem::{Code, Problem};
use crate::engine::intake::Preference;
use crate::ledger::key::{Caller, Role, Secret};
use crate::ledger::operation_id::OperationId;

pub const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
const PREFER: HeaderName = HeaderName::from_static("prefer");

/// Longest `Prefer: wait`.
const LONGEST_WAIT: u64 = 60;

/// The caller, if its key is good and its role one of these.
pub async fn caller(app: &App, headers: &HeaderMap, roles: &[Role]) -> Result<Caller, Problem> {
    let secret = secret(headers).ok_or_else(Problem::unauthenticated)?;
    let caller = app
        .accounts
        .caller(&secret)
        .await?
        .ok_or_else(Problem::unauthenticated)?;
    tracing::Span::current()
        .record("key", &*caller.key_id)
        .record("tenant", caller.tenant.as_str());
    if !roles.contains(&caller.role) {
        let allowed: Vec<_> = roles.iter().map(|role| role.as_str()).collect();
        return Err(Problem::new(
            Code::Forbidden,
            format!(
                "this takes a key with the role {}; this key's is {}",
                allowed.join(" or "),
                caller.role.as_str()
            ),
        ));
    }
    Ok(caller)
}

/// A key from `Authorization`: Bearer, or Basic with the key as user name.
fn secret(headers: &HeaderMap) -> Option<Secret> {
    let mut lines = headers.get_all(AUTHORIZATION).iter();
    let (Some(line), None) = (lines.next(), lines.next()) else {
        return None;
    };
    let (scheme, credentials) = line.to_str().ok()?.split_once(' ')?;
    let credentials = credentials.trim();
    if scheme.eq_ignore_ascii_case("bearer") {
        return Secret::parse(credentials);
    }
    if scheme.eq_ignore_ascii_case("basic") {
        let decoded = base64::engine::general_purpose::STANDARD.decode(credentials).ok()?;
        let decoded = std::str::from_utf8(&decoded).ok()?;
        return Secret::parse(decoded.split_once(':').map_or(decoded, |(user, _)| user));
    }
    None
}

/// The operation id of an `Idempotency-Key` header, if there is one.
pub fn key(headers: &HeaderMap) -> Result<Option<OperationId>, Problem> {
    let mut lines = headers.get_all(IDEMPOTENCY_KEY).iter();
    let Some(line) = lines.next() else { return Ok(None) };
    if lines.next().is_some() {
        return Err(Problem::new(
            Code::KeyConflict,
            "Idempotency-Key was sent more than once; send one line",
        ));
    }
    OperationId::from_key_header(line.as_bytes())
        .map(Some)
        .map_err(|error| Problem::new(Code::KeyInvalid, format!("Idempotency-Key: {error}")))
}

/// The variable segment of a path; `None` if it is not percent-encoded UTF-8.
pub struct Segment(Option<String>);

impl Segment {
    /// The operation id that it is.
    pub fn operation_id(&self) -> Result<OperationId, Problem> {
        let Some(segment) = &self.0 else {
            return Err(Problem::new(
                Code::KeyInvalid,
                "the operation id in the path is not percent-encoded ASCII",
            ));
        };
        OperationId::parse(segment).map_err(|error| Problem::new(Code::KeyInvalid, error.to_string()))
    }

    /// The text that it is; what cannot be text names nothing.
    pub fn text(&self) -> Result<&str, Problem> {
        self.0.as_deref().ok_or_else(Problem::not_found)
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Segment {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Infallible> {
        Ok(Self(
            Path::from_request_parts(parts, state)
                .await
                .ok()
                .map(|Path(segment)| segment),
        ))
    }
}

/// `Prefer: wait=N` and `Prefer: respond-async` (RFC 7240); anything else in it is ignored.
pub fn preference(headers: &HeaderMap) -> Preference {
    let mut preference = Preference::default();
    let lines = headers.get_all(PREFER).iter().filter_map(|line| line.to_str().ok());
    for token in lines.flat_map(|line| line.split(',')) {
        let token = token.split(';').next().unwrap_or_default().trim();
        if token.eq_ignore_ascii_case("respond-async") {
            preference.respond_async = true;
        } else if let Some((name, value)) = token.split_once('=')
            && name.trim().eq_ignore_ascii_case("wait")
            && let Ok(seconds) = value.trim().trim_matches('"').parse::<u64>()
            && preference.wait.is_none()
        {
            preference.wait = Some(Duration::from_secs(seconds.min(LONGEST_WAIT)));
        }
    }
    preference
}

/// A JSON body within the limits of size and time.
pub async fn json_body(app: &App, headers: &HeaderMap, body: axum::body::Body) -> Result<Bytes, Problem> {
    check_media_type(headers)?;
    body::in_memory(app, body, app.limits.max_body_bytes).await
}

/// A request that takes no body has none.
pub async fn no_body(app: &App, body: axum::body::Body) -> Result<(), Problem> {
    if body::in_memory(app, body, app.limits.max_body_bytes).await?.is_empty() {
        Ok(())
    } else {
        Err(Problem::member("", "this request takes no body; send it without one"))
    }
}

fn check_media_type(headers: &HeaderMap) -> Result<(), Problem> {
    let wrong = |detail: &str| Err(Problem::new(Code::UnsupportedMediaType, detail));
    if headers.contains_key(CONTENT_ENCODING) {
        return wrong("send the body without Content-Encoding");
    }
    let mut lines = headers.get_all(CONTENT_TYPE).iter();
    let (Some(line), None) = (lines.next(), lines.next()) else {
        return wrong("send the body with one line Content-Type: application/json");
    };
    let text = line.to_str().unwrap_or_default();
    let mut parts = text.split(';').map(str::trim);
    if !parts
        .next()
        .unwrap_or_default()
        .eq_ignore_ascii_case("application/json")
    {
        return wrong("send the body as Content-Type: application/json");
    }
    let charset = |part: &str| {
        part.split_once('=').is_some_and(|(name, value)| {
            name.trim().eq_ignore_ascii_case("charset") && !value.trim().trim_matches('"').eq_ignore_ascii_case("utf-8")
        })
    };
    if parts.any(charset) {
        return wrong("send the body in UTF-8");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
        lines
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap()))
            .collect()
    }

    #[test]
    fn preferences_are_read_and_the_rest_is_ignored() {
        let read = |value: &str| {
            let preference = preference(&headers(&[("prefer", value)]));
            (preference.respond_async, preference.wait.map(|wait| wait.as_secs()))
        };
        assert_eq!(read("wait=5"), (false, Some(5)));
        assert_eq!(read("respond-async, wait=600"), (true, Some(60)));
        assert_eq!(read("Respond-Async;x=1 , WAIT = \"7\""), (true, Some(7)));
        assert_eq!(read("wait=-1, wait=x, return=minimal"), (false, None));
    }

    #[test]
    fn only_plain_json_is_taken() {
        for good in [
            "application/json",
            "Application/JSON; charset=utf-8",
            "application/json;charset=\"UTF-8\"",
        ] {
            assert!(check_media_type(&headers(&[("content-type", good)])).is_ok(), "{good}");
        }
        for bad in [
            "text/plain",
            "application/json; charset=latin1",
            "application/jsonx",
            "",
        ] {
            assert!(check_media_type(&headers(&[("content-type", bad)])).is_err(), "{bad}");
        }
        assert!(check_media_type(&headers(&[])).is_err());
        assert!(
            check_media_type(&headers(&[
                ("content-type", "application/json"),
                ("content-encoding", "gzip")
            ]))
            .is_err()
        );
    }
}
