//! Problems: the one shape of every error (RFC 9457), and the one place where errors become statuses.

use std::time::Duration;

use axum::response::{IntoResponse, Response};
use http::header::{CONNECTION, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{HeaderValue, StatusCode};
use serde::Serialize;

use crate::engine::outcome::{Known, Refusal};
use crate::ledger::fingerprint::Fingerprint;
use crate::ledger::operation::StateName;
use crate::ledger::operation_id::OperationId;
use crate::ledger::receipt::format_time;

/// What went wrong, for programs. Each has a page under `/problems/`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    KeyMissing,
    KeyInvalid,
    KeyConflict,
    PayloadInvalid,
    RequestInvalid,
    Unauthenticated,
    Forbidden,
    NotFound,
    MethodNotAllowed,
    RequestTimeout,
    OperationInProgress,
    OutcomeUnknown,
    StateConflict,
    ResolutionTooEarly,
    ReceiptExpired,
    ResponseNotStored,
    TooLarge,
    UriTooLong,
    UnsupportedMediaType,
    FingerprintMismatch,
    RateLimited,
    HeadersTooLarge,
    HandlerBroken,
    Internal,
    DownstreamUnreachable,
    DownstreamFailed,
    LedgerUnavailable,
}

impl Code {
    /// Name, status, whether the very same request may end differently later, and title.
    fn row(self) -> (&'static str, u16, bool, &'static str) {
        match self {
            Self::KeyMissing => ("key-missing", 400, false, "The operation has no key"),
            Self::KeyInvalid => ("key-invalid", 400, false, "The key is not well formed"),
            Self::KeyConflict => ("key-conflict", 400, false, "The keys disagree"),
            Self::PayloadInvalid => ("payload-invalid", 400, false, "The submission was refused"),
            Self::RequestInvalid => ("request-invalid", 400, false, "The request was refused"),
            Self::Unauthenticated => ("unauthenticated", 401, false, "No valid API key"),
            Self::Forbidden => ("forbidden", 403, false, "This API key may not do that"),
            Self::NotFound => ("not-found", 404, false, "Not found"),
            Self::MethodNotAllowed => ("method-not-allowed", 405, false, "Method not allowed"),
            Self::RequestTimeout => ("request-timeout", 408, true, "The request took too long to arrive"),
            Self::OperationInProgress => ("operation-in-progress", 409, true, "The operation is running"),
            Self::OutcomeUnknown => ("outcome-unknown", 409, false, "The outcome is unknown"),
            Self::StateConflict => (
                "state-conflict",
                409,
                false,
                "The operation's state does not allow that",
            ),
            Self::ResolutionTooEarly => ("resolution-too-early", 409, true, "It is too early to decide that"),
            Self::ReceiptExpired => ("receipt-expired", 410, false, "The receipt has expired"),
            Self::ResponseNotStored => ("response-not-stored", 410, false, "The answer was too large to store"),
            Self::TooLarge => ("too-large", 413, false, "The body is too large"),
            Self::UriTooLong => ("uri-too-long", 414, false, "The address is too long"),
            Self::UnsupportedMediaType => ("unsupported-media-type", 415, false, "The body is not plain JSON"),
            Self::FingerprintMismatch => ("fingerprint-mismatch", 422, false, "The key belongs to another request"),
            Self::RateLimited => ("rate-limited", 429, true, "Too many requests"),
            Self::HeadersTooLarge => ("headers-too-large", 431, false, "The headers are too large"),
            Self::HandlerBroken => ("handler-broken", 500, true, "The handler is broken"),
            Self::Internal => ("internal", 500, true, "Internal error"),
            Self::DownstreamUnreachable => ("downstream-unreachable", 502, true, "The downstream was not reached"),
            Self::DownstreamFailed => ("downstream-failed", 502, false, "The downstream did not answer"),
            Self::LedgerUnavailable => ("ledger-unavailable", 503, true, "The ledger is unavailable"),
        }
    }

    pub fn as_str(self) -> &'static str {
        self.row().0
    }
}

/// One error answer.
#[derive(Debug)]
pub struct Problem {
    code: Code,
    // Boxed: problems travel as errors through every handler.
    body: Box<Body>,
    retry_after: Option<Duration>,
    state: Option<StateName>,
    id: Option<OperationId>,
    receipt_expires: Option<String>,
    /// The connection ends with it.
    last: bool,
}

/// The members, in the order in which they are written.
#[derive(Debug, Serialize)]
struct Body {
    r#type: String,
    title: &'static str,
    status: u16,
    code: &'static str,
    detail: String,
    retryable: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    operation_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    operation_url: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pointer: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    parameter: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fingerprint: Option<Fingerprint>,
    #[serde(skip_serializing_if = "Option::is_none")]
    original: Option<Original>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sqlstate: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    settled_at: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    response: Option<Remains>,
}

/// What is left of an answer that was too large to store.
#[derive(Debug, Serialize)]
pub struct Remains {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub size: i64,
    pub body_sha256: String,
}

/// The operation a key belongs to; never its payload.
#[derive(Debug, Serialize)]
pub struct Original {
    pub kind: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<&'static str>,
    /// Absent while the operation runs in a transaction that nobody else can see yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub created_at: Option<String>,
    pub fingerprint: Fingerprint,
    pub operation_url: String,
}

impl Problem {
    pub fn new(code: Code, detail: impl Into<String>) -> Self {
        let (name, status, retryable, title) = code.row();
        let body = Box::new(Body {
            r#type: format!("/problems/{name}"),
            title,
            status,
            code: name,
            detail: detail.into(),
            retryable,
            operation_id: None,
            operation_url: None,
            pointer: None,
            parameter: None,
            state: None,
            fingerprint: None,
            original: None,
            sqlstate: None,
            settled_at: None,
            response: None,
        });
        Self {
            code,
            body,
            retry_after: None,
            state: None,
            id: None,
            receipt_expires: None,
            last: false,
        }
    }

    /// A refused member of the body, by JSON pointer.
    pub fn payload(pointer: impl Into<String>, detail: impl Into<String>) -> Self {
        let mut problem = Self::new(Code::PayloadInvalid, detail);
        problem.body.pointer = Some(pointer.into());
        problem
    }

    /// A refused member of a body that is no submission, by JSON pointer.
    pub fn member(pointer: impl Into<String>, detail: impl Into<String>) -> Self {
        let mut problem = Self::new(Code::RequestInvalid, detail);
        problem.body.pointer = Some(pointer.into());
        problem
    }

    /// A refused query parameter.
    pub fn parameter(name: impl Into<String>, detail: impl Into<String>) -> Self {
        let mut problem = Self::new(Code::RequestInvalid, detail);
        problem.body.parameter = Some(name.into());
        problem
    }

    /// Missing and foreign things look the same.
    pub fn not_found() -> Self {
        Self::new(
            Code::NotFound,
            "there is nothing here for this API key; check the id and the path",
        )
    }

    pub fn unauthenticated() -> Self {
        Self::new(
            Code::Unauthenticated,
            "send an API key as `Authorization: Bearer <key>`, or as the user name of Basic; this one is missing, unknown or revoked",
        )
    }

    /// A large body would have been kept on a disk that does not take it.
    pub fn no_room() -> Self {
        Self::new(
            Code::LedgerUnavailable,
            "this process cannot keep a large body now (its temporary directory); nothing was stored and nothing sent, \
             send the same request again later",
        )
        .retry_after(Duration::from_secs(5))
    }

    /// The router adds `Allow`.
    pub fn method_not_allowed() -> Self {
        Self::new(
            Code::MethodNotAllowed,
            "this address does not take that method; the header Allow names those it takes",
        )
    }

    /// Names the operation this is about, without saying that it is stored.
    pub fn about(mut self, id: &OperationId) -> Self {
        self.body.operation_id = Some(id.as_str().to_owned());
        self.id = Some(id.clone());
        self
    }

    /// Names a stored operation.
    pub fn of(mut self, known: &Known) -> Self {
        self = self.about(&known.id);
        self.body.operation_url = Some(known.id.url());
        self.receipt_expires = known.receipt_expires_at.map(format_time);
        let state = known.state.unwrap_or(StateName::Running);
        self.body.state = Some(state.as_str());
        self.state = Some(state);
        self
    }

    /// This request's fingerprint beside the operation that the key belongs to.
    pub fn mismatch(mut self, requested: Fingerprint, original: Original) -> Self {
        // The state is the original's, and said there.
        self.body.state = None;
        self.body.fingerprint = Some(requested);
        self.body.original = Some(original);
        self
    }

    pub fn sqlstate(mut self, sqlstate: String) -> Self {
        self.body.sqlstate = Some(sqlstate);
        self
    }

    pub fn settled_at(mut self, time: String) -> Self {
        self.body.settled_at = Some(time);
        self
    }

    pub fn response(mut self, remains: Remains) -> Self {
        self.body.response = Some(remains);
        self
    }

    pub fn retry_after(mut self, delay: Duration) -> Self {
        self.retry_after = Some(delay);
        self
    }

    /// Ends the connection with this answer: what is left of the request's body is not read.
    pub fn last(mut self) -> Self {
        self.last = true;
        self
    }

    pub fn code(&self) -> Code {
        self.code
    }
}

impl Problem {
    /// The bytes of an answer that no request led to, which is the last of its connection.
    pub fn closing(&self, request_id: &str) -> Vec<u8> {
        let status = StatusCode::from_u16(self.body.status).unwrap_or(StatusCode::BAD_REQUEST);
        // Strings and numbers always serialise.
        let body = serde_json::to_string(&self.body).unwrap_or_default();
        format!(
            "HTTP/1.1 {} {}\r\ncontent-type: application/problem+json\r\nrequest-id: {request_id}\r\n\
             x-content-type-options: nosniff\r\ncache-control: no-store\r\nconnection: close\r\n\
             content-length: {}\r\n\r\n{body}",
            status.as_str(),
            status.canonical_reason().unwrap_or_default(),
            body.len(),
        )
        .into_bytes()
    }
}

impl From<Refusal> for Problem {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Busy { retry_after } => Self::new(
                Code::RateLimited,
                "too many operations are waiting; send the same request again later",
            )
            .retry_after(retry_after),
            Refusal::Unavailable => Self::new(
                Code::LedgerUnavailable,
                "the ledger's database cannot be used now; nothing was acknowledged, send the same request again later",
            )
            .retry_after(Duration::from_secs(2)),
            Refusal::Overtime { ref kind, .. } => Self::new(
                Code::LedgerUnavailable,
                format!(
                    "{refusal}; nothing was stored and no effect was made. Send the same request again later; if it goes \
                     on, the operator has to make the handler faster or raise timeout under [kinds.\"{kind}\"]"
                ),
            )
            .retry_after(Duration::from_secs(2)),
            Refusal::Unreachable { downstream, cause } => Self::new(
                Code::DownstreamUnreachable,
                format!("{downstream} was not reached ({cause}); nothing was sent and nothing is stored, send the same request again later"),
            )
            .retry_after(Duration::from_secs(2)),
            Refusal::NoAnswer { downstream, cause } => Self::new(
                Code::DownstreamFailed,
                format!("{downstream} did not answer ({cause}); this request was not protected, and nothing is stored of it"),
            ),
            Refusal::Unrecorded { operation } => Self::new(
                Code::LedgerUnavailable,
                "the downstream has answered, and the ledger's database cannot store the answer now; do not send this under another key, read operation_url later",
            )
            .of(&operation)
            .retry_after(Duration::from_secs(5)),
            Refusal::Stopping => Self::new(
                Code::LedgerUnavailable,
                "this process is stopping; send the same request again, to another process or later",
            )
            .retry_after(Duration::from_secs(1)),
            Refusal::Internal => Self::new(
                Code::Internal,
                "the ledger failed and has logged why under this answer's Request-Id; the same request may be sent again",
            ),
        }
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        // Strings and numbers always serialise.
        let body = serde_json::to_vec(&self.body).unwrap_or_default();
        let mut response = Response::new(axum::body::Body::from(body));
        *response.status_mut() = StatusCode::from_u16(self.body.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if let Some(delay) = self.retry_after {
            headers.insert(
                RETRY_AFTER,
                HeaderValue::from(delay.as_millis().div_ceil(1000).clamp(1, u128::from(u32::MAX)) as u64),
            );
        }
        if self.last {
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        if self.code == Code::Unauthenticated {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static(r#"Bearer realm="opledger""#));
        }
        super::answer::name_operation(headers, self.id.as_ref(), self.state);
        if let Some(expires) = &self.receipt_expires {
            super::answer::insert(headers, super::answer::RECEIPT_EXPIRES, expires);
        }
        response
    }
}
