//! What the API answers, before anything happens to it on the way.

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderName};
use http::{HeaderMap, HeaderValue, StatusCode};
use serde::Serialize;
use serde_json::json;

#[derive(Debug, Clone)]
pub struct Reply {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Reply {
    pub fn json(status: StatusCode, body: &impl Serialize) -> Self {
        Self {
            status,
            headers: HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static("application/json"))]),
            // Only maps with text as keys, which always serialise.
            body: serde_json::to_vec(body).unwrap_or_default().into(),
        }
    }

    pub fn empty(status: StatusCode) -> Self {
        Self {
            status,
            headers: HeaderMap::new(),
            body: Bytes::new(),
        }
    }

    pub fn refused(status: StatusCode, code: &str, message: &str) -> Self {
        Self::json(status, &json!({"error": {"code": code, "message": message}}))
    }

    /// Nothing is forgotten to make room: the counts would lie.
    pub fn full() -> Self {
        let message = "the sandbox remembers no more than this; DELETE /_effects begins anew";
        Self::refused(StatusCode::INSUFFICIENT_STORAGE, "full", message)
    }

    /// With a header more; one whose value no header can carry is left out.
    pub fn with(mut self, name: HeaderName, value: &str) -> Self {
        if let Ok(value) = HeaderValue::from_str(value) {
            self.headers.append(name, value);
        }
        self
    }
}
