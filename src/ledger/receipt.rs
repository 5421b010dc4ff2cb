//! The receipt: the immutable answer, the same bytes every time.
//!
//! This file fixes the bytes of an in-database operation's answer. They are written once, when the operation settles,
//! and never again: a later release may write new receipts differently, but it replays old ones as they are.

use bytes::Bytes;
use serde::Serialize;
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};
use time::OffsetDateTime;
use time::format_description::BorrowedFormatItem;
use time::macros::format_description;

use super::fingerprint::Fingerprint;
use super::operation::StateName;
use super::operation_id::OperationId;

/// RFC 3339 in UTC with microseconds, as every time in our answers.
const TIME: &[BorrowedFormatItem<'static>] =
    format_description!("[year]-[month]-[day]T[hour]:[minute]:[second].[subsecond digits:6]Z");

/// The same for PostgreSQL's `to_char`, of a time in UTC.
pub const TIME_IN_SQL: &str = r#"YYYY-MM-DD"T"HH24:MI:SS.US"Z""#;

/// The title of `operation-failed`, whoever refused.
const FAILED: &str = "The operation failed without an effect";

/// Formats a time as answers show it.
pub fn format_time(time: OffsetDateTime) -> String {
    // Formatting fails only for years beyond four digits, which PostgreSQL's clock will not show.
    time.to_offset(time::UtcOffset::UTC).format(TIME).unwrap_or_default()
}

/// A stored answer: status, header lines in order, body bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Receipt {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Bytes,
    /// Of the whole answer, even if it was too large to store.
    pub body_sha256: [u8; 32],
    pub omitted: Option<Omitted>,
}

/// The answer had this many bytes, too many to store; `Receipt::body` is empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Omitted(i64);

impl Omitted {
    /// Of an answer that had at least one byte.
    pub fn new(bytes: u64) -> Self {
        Self(i64::try_from(bytes).unwrap_or(i64::MAX).max(1))
    }

    pub fn bytes(self) -> i64 {
        self.0
    }
}

/// What a handler refused with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Raised {
    pub sqlstate: String,
    pub message: String,
    pub detail: Option<String>,
    /// The words are ours, about the handler: its callers may read them, although it is broken.
    pub by_ledger: bool,
}

impl Raised {
    /// Keeps the detail that a handler wrote itself, and drops PostgreSQL's own: that of a constraint shows the whole
    /// failing row, which is not the caller's to see.
    pub fn without_row_contents(mut self) -> Self {
        if !self.sqlstate.starts_with("OL") && self.sqlstate != "P0001" {
            self.detail = None;
        }
        self
    }
}

/// What every receipt says about its operation.
#[derive(Debug, Clone, Copy)]
pub struct Settled<'a> {
    pub id: &'a OperationId,
    pub kind: &'a str,
    pub fingerprint: &'a Fingerprint,
    pub attempt: i32,
    pub settled_at: OffsetDateTime,
}

/// What a receipt of ours says of an operation whose downstream's answer is not known.
#[derive(Debug, Clone, Copy)]
pub struct Unanswered<'a> {
    pub id: &'a OperationId,
    pub kind: &'a str,
    pub fingerprint: &'a Fingerprint,
    pub attempt: i32,
}

/// A success's bytes are [`success_head`], the handler's result, this, the time, and [`SUCCESS_END`]. For a group the
/// database joins them (`claim`): result and time are its own, and the rest it is given.
pub const SUCCESS_TIME: &str = r#","settled_at":""#;
pub const SUCCESS_END: &str = r#""}"#;

/// Status of a success.
pub const SUCCESS: u16 = 200;

/// What a success's bytes begin with, up to the handler's result.
pub fn success_head(id: &OperationId, kind: &str, fingerprint: &Fingerprint, attempt: i32) -> String {
    #[derive(Serialize)]
    struct Head<'a> {
        operation_id: &'a str,
        kind: &'a str,
        state: &'static str,
        fingerprint: &'a Fingerprint,
        attempt: i32,
    }
    let head = Head {
        operation_id: id.as_str(),
        kind,
        state: StateName::Succeeded.as_str(),
        fingerprint,
        attempt,
    };
    let mut text = to_json(&head);
    // The object goes on.
    text.pop();
    text.push_str(r#","result":"#);
    text
}

/// Header lines of a success.
pub fn success_headers() -> Vec<(String, String)> {
    content_type("application/json")
}

fn content_type(value: &str) -> Vec<(String, String)> {
    vec![("content-type".to_owned(), value.to_owned())]
}

fn to_json(value: &impl Serialize) -> String {
    // Ours are structs of strings, numbers and JSON text: none of them can fail to serialise.
    serde_json::to_string(value).unwrap_or_default()
}

impl Receipt {
    pub fn new(status: u16, headers: Vec<(String, String)>, body: Bytes) -> Self {
        let body_sha256 = Sha256::digest(&body).into();
        Self {
            status,
            headers,
            body,
            body_sha256,
            omitted: None,
        }
    }

    /// An answer that was too large to store: what is left of it.
    pub fn omitted(status: u16, headers: Vec<(String, String)>, bytes: u64, body_sha256: [u8; 32]) -> Self {
        Self {
            status,
            headers,
            body: Bytes::new(),
            body_sha256,
            omitted: Some(Omitted::new(bytes)),
        }
    }

    /// 200: the effect is committed; `result` is what the handler returned, as JSON text.
    pub fn succeeded(settled: Settled<'_>, result: &RawValue) -> Self {
        let body = [
            &*success_head(settled.id, settled.kind, settled.fingerprint, settled.attempt),
            result.get(),
            SUCCESS_TIME,
            &format_time(settled.settled_at),
            SUCCESS_END,
        ];
        Self::success(body.concat().into())
    }

    /// The same from the whole of its bytes.
    pub fn success(body: Bytes) -> Self {
        Self::new(SUCCESS, success_headers(), body)
    }

    /// 422: a business rule refused; no effect, and a new try needs a new intent.
    pub fn failed(settled: Settled<'_>, raised: &Raised) -> Self {
        #[derive(Serialize)]
        struct Body<'a> {
            r#type: &'static str,
            title: &'static str,
            status: u16,
            code: &'static str,
            detail: &'a str,
            retryable: bool,
            operation_id: &'a str,
            operation_url: String,
            kind: &'a str,
            state: &'static str,
            fingerprint: &'a Fingerprint,
            attempt: i32,
            sqlstate: &'a str,
            handler_detail: Option<&'a str>,
            result: Option<()>,
            settled_at: String,
        }
        let body = Body {
            r#type: "/problems/operation-failed",
            title: FAILED,
            status: 422,
            code: "operation-failed",
            detail: &raised.message,
            retryable: false,
            operation_id: settled.id.as_str(),
            operation_url: settled.id.url(),
            kind: settled.kind,
            state: StateName::Failed.as_str(),
            fingerprint: settled.fingerprint,
            attempt: settled.attempt,
            sqlstate: &raised.sqlstate,
            handler_detail: raised.detail.as_deref(),
            result: None,
            settled_at: format_time(settled.settled_at),
        };
        Self::json(422, "application/problem+json", &body)
    }

    /// 200: a person has found that it acted; the downstream's own answer is not known.
    pub fn resolved(operation: Unanswered<'_>, reason: &str) -> Self {
        #[derive(Serialize)]
        struct Body<'a> {
            operation_id: &'a str,
            kind: &'a str,
            state: &'static str,
            fingerprint: &'a Fingerprint,
            attempt: i32,
            result: Option<()>,
            resolution: &'a str,
        }
        let body = Body {
            operation_id: operation.id.as_str(),
            kind: operation.kind,
            state: StateName::Succeeded.as_str(),
            fingerprint: operation.fingerprint,
            attempt: operation.attempt,
            result: None,
            resolution: reason,
        };
        Self::json(200, "application/json", &body)
    }

    /// 422: it did not act and will not be tried again.
    pub fn gave_up(operation: Unanswered<'_>, detail: &str) -> Self {
        #[derive(Serialize)]
        struct Body<'a> {
            r#type: &'static str,
            title: &'static str,
            status: u16,
            code: &'static str,
            detail: &'a str,
            retryable: bool,
            operation_id: &'a str,
            operation_url: String,
            kind: &'a str,
            state: &'static str,
            fingerprint: &'a Fingerprint,
            attempt: i32,
            result: Option<()>,
        }
        let body = Body {
            r#type: "/problems/operation-failed",
            title: FAILED,
            status: 422,
            code: "operation-failed",
            detail,
            retryable: false,
            operation_id: operation.id.as_str(),
            operation_url: operation.id.url(),
            kind: operation.kind,
            state: StateName::Failed.as_str(),
            fingerprint: operation.fingerprint,
            attempt: operation.attempt,
            result: None,
        };
        Self::json(422, "application/problem+json", &body)
    }

    /// 409: withdrawn before it ran.
    pub fn cancelled(settled: Settled<'_>) -> Self {
        #[derive(Serialize)]
        struct Body<'a> {
            r#type: &'static str,
            title: &'static str,
            status: u16,
            code: &'static str,
            detail: &'static str,
            retryable: bool,
            operation_id: &'a str,
            operation_url: String,
            kind: &'a str,
            state: &'static str,
            fingerprint: &'a Fingerprint,
            settled_at: String,
        }
        let body = Body {
            r#type: "/problems/operation-cancelled",
            title: "The operation was cancelled before it ran",
            status: 409,
            code: "operation-cancelled",
            detail: "this operation was withdrawn and will never run; a new intent needs a new operation id",
            retryable: false,
            operation_id: settled.id.as_str(),
            operation_url: settled.id.url(),
            kind: settled.kind,
            state: StateName::Cancelled.as_str(),
            fingerprint: settled.fingerprint,
            settled_at: format_time(settled.settled_at),
        };
        Self::json(409, "application/problem+json", &body)
    }

    fn json(status: u16, content_type_value: &str, body: &impl Serialize) -> Self {
        // Kept for a while by the thousand, so not with the room it grew in.
        let body = Bytes::from(to_json(body).into_boxed_str().into_boxed_bytes());
        Self::new(status, content_type(content_type_value), body)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_utc_with_microseconds() {
        let time = OffsetDateTime::from_unix_timestamp_nanos(1_700_000_000_000_120_999).unwrap();
        assert_eq!(format_time(time), "2023-11-14T22:13:20.000120Z");
    }

    #[test]
    fn a_receipt_keeps_the_handlers_result_to_the_byte() {
        let id = OperationId::parse("a/b").unwrap();
        let fingerprint = format!("v1:{}", "0".repeat(64)).parse().unwrap();
        let settled = Settled {
            id: &id,
            kind: "k",
            fingerprint: &fingerprint,
            attempt: 1,
            settled_at: OffsetDateTime::UNIX_EPOCH,
        };
        let result = RawValue::from_string(r#"{"n": 12233344445555567, "d": 0.1000}"#.to_owned()).unwrap();
        let receipt = Receipt::succeeded(settled, &result);
        let body = std::str::from_utf8(&receipt.body).unwrap();
        assert!(
            body.contains(r#""result":{"n": 12233344445555567, "d": 0.1000}"#),
            "{body}"
        );
        assert_eq!(receipt.body_sha256, <[u8; 32]>::from(Sha256::digest(&receipt.body)));
    }
}
