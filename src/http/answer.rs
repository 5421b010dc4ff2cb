//! From outcome to response: the one match that submissions, executions, receipts and replays share.

use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use http::header::{CONTENT_TYPE, LOCATION, RETRY_AFTER};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use serde::Serialize;

use super::problem::{Code, Original, Problem, Remains};
use crate::engine::intake::Preference;
use crate::engine::outcome::{Known, Outcome, Refusal};
use crate::ledger::fingerprint::Fingerprint;
use crate::ledger::operation::StateName;
use crate::ledger::operation_id::OperationId;
use crate::ledger::receipt::{Omitted, Receipt, format_time};
use crate::outbound;

pub const OPERATION_ID: HeaderName = HeaderName::from_static("operation-id");
pub const OPERATION_STATE: HeaderName = HeaderName::from_static("operation-state");
pub const RECEIPT_EXPIRES: HeaderName = HeaderName::from_static("receipt-expires");
pub const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");
pub const PREFERENCE_APPLIED: HeaderName = HeaderName::from_static("preference-applied");

/// When to ask again for an operation that is being run.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// Answers with an outcome.
pub fn answer(outcome: Result<Outcome, Refusal>, preference: Preference) -> Response {
    // A refusal honours nothing.
    let has_outcome = outcome.is_ok();
    let mut response = match outcome {
        Ok(Outcome::Settled {
            operation,
            receipt,
            expires_at,
            replayed,
            ..
        }) => settled(&operation, &receipt, &format_time(expires_at), replayed),
        Ok(Outcome::Accepted { operation, .. }) => accepted(&operation),
        Ok(Outcome::InProgress { operation }) => Problem::new(
            Code::OperationInProgress,
            "another delivery of this operation is being run; send the same request again later for its receipt",
        )
        .of(&operation)
        .retry_after(ASK_AGAIN)
        .into_response(),
        Ok(Outcome::Unknown { operation, .. }) => unknown(&operation),
        Ok(Outcome::Mismatch {
            original,
            created_at,
            requested,
        }) => mismatch(&original, created_at.map(format_time), requested),
        Ok(Outcome::Expired {
            operation,
            settled_at,
            expires_at,
        }) => {
            let mut response = Problem::new(
                Code::ReceiptExpired,
                "this operation was settled and its receipt is no longer kept; the id is spent and will not run again",
            )
            .of(&operation)
            .settled_at(format_time(settled_at))
            .into_response();
            insert(response.headers_mut(), RECEIPT_EXPIRES, &format_time(expires_at));
            response
        }
        Ok(Outcome::NotStored { operation, receipt }) => not_stored(&operation, &receipt),
        Ok(Outcome::HandlerBroken { id, raised }) => Problem::new(
            Code::HandlerBroken,
            format!(
                "{}; no effect was made and nothing was stored: the same request may be sent again once it is repaired",
                // What it said itself is for those who repair it.
                if raised.by_ledger {
                    &*raised.message
                } else {
                    "the handler raised an error that handlers may not raise"
                },
            ),
        )
        .about(&id)
        .sqlstate(raised.sqlstate)
        .into_response(),
        Err(refusal) => Problem::from(refusal).into_response(),
    };
    if has_outcome {
        note_preference(response.headers_mut(), preference);
    }
    response
}

fn unknown(operation: &Known) -> Response {
    let detail = if operation.state == Some(StateName::Compensating) {
        "this operation may have taken effect, and its reversal is not known to have succeeded yet; do not send it again under any key, read operation_url until it is settled"
    } else {
        "this operation may have taken effect and nobody can know yet; do not send it again under any key, read operation_url until it is settled"
    };
    Problem::new(Code::OutcomeUnknown, detail).of(operation).into_response()
}

/// 410: the effect stands, nothing is sent again, and this is all that is left of the answer.
fn not_stored(operation: &Known, receipt: &Receipt) -> Response {
    Problem::new(
        Code::ResponseNotStored,
        "this operation was settled with an answer that was too large to store; it will not be sent again, look the result up where it was made",
    )
    .of(operation)
    .response(Remains {
        status: receipt.status,
        headers: receipt.headers.clone(),
        size: receipt.omitted.map_or(0, Omitted::bytes),
        body_sha256: super::hex(&receipt.body_sha256),
    })
    .into_response()
}

/// The receipt, byte for byte; replays say that they are.
pub fn settled(operation: &Known, receipt: &Receipt, expires: &str, replayed: bool) -> Response {
    let mut response = Response::new(Body::from(receipt.body.clone()));
    *response.status_mut() = StatusCode::from_u16(receipt.status).unwrap_or(StatusCode::OK);
    let headers = response.headers_mut();
    append_lines(headers, &receipt.headers);
    if replayed {
        headers.insert(REPLAYED, HeaderValue::from_static("true"));
    }
    insert(headers, RECEIPT_EXPIRES, expires);
    name_operation(headers, Some(&operation.id), operation.state);
    response
}

/// Stored header lines, in their order.
pub fn append_lines(headers: &mut HeaderMap, lines: &[(String, String)]) {
    for (name, value) in lines {
        let value = outbound::headers::encode_latin1(value).and_then(|value| HeaderValue::from_bytes(&value).ok());
        if let (Ok(name), Some(value)) = (HeaderName::try_from(name.as_str()), value) {
            headers.append(name, value);
        }
    }
}

/// 202: stored and not settled.
fn accepted(operation: &Known) -> Response {
    #[derive(Serialize)]
    struct Accepted<'a> {
        operation_id: &'a str,
        kind: &'a str,
        state: &'static str,
        fingerprint: Fingerprint,
        operation_url: String,
    }
    let state = operation.state.unwrap_or(StateName::Running);
    let url = operation.id.url();
    let body = Accepted {
        operation_id: operation.id.as_str(),
        kind: &operation.kind,
        state: state.as_str(),
        fingerprint: operation.fingerprint,
        operation_url: url.clone(),
    };
    let mut response = json(StatusCode::ACCEPTED, &body);
    let headers = response.headers_mut();
    insert(headers, LOCATION, &url);
    // A person's decision comes when it comes.
    if matches!(state, StateName::Running | StateName::RetryWait) {
        headers.insert(RETRY_AFTER, HeaderValue::from(ASK_AGAIN.as_secs()));
    }
    name_operation(headers, Some(&operation.id), Some(state));
    response
}

fn mismatch(original: &Known, created_at: Option<String>, requested: Fingerprint) -> Response {
    let described = Original {
        kind: original.kind.to_string(),
        state: Some(original.state.unwrap_or(StateName::Running).as_str()),
        created_at,
        fingerprint: original.fingerprint,
        operation_url: original.id.url(),
    };
    Problem::new(
        Code::FingerprintMismatch,
        "this operation id belongs to another request. Nothing was done. Read the original at operation_url; do not go on under a new key unless you mean a second, separate action",
    )
    .of(original)
    .mismatch(requested, described)
    .into_response()
}

/// A JSON answer of our own.
pub fn json(status: StatusCode, body: &impl Serialize) -> Response {
    // Our own shapes hold strings, numbers and JSON text; they always serialise.
    let body = serde_json::to_vec(body).unwrap_or_default();
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// `Operation-Id` and `Operation-State`.
pub fn name_operation(headers: &mut HeaderMap, id: Option<&OperationId>, state: Option<StateName>) {
    if let Some(id) = id {
        insert(headers, OPERATION_ID, id.as_str());
    }
    if let Some(state) = state {
        headers.insert(OPERATION_STATE, HeaderValue::from_static(state.as_str()));
    }
}

fn note_preference(headers: &mut HeaderMap, preference: Preference) {
    let applied = match (preference.respond_async, preference.wait) {
        (false, None) => return,
        (true, None) => "respond-async".to_owned(),
        (false, Some(wait)) => format!("wait={}", wait.as_secs()),
        (true, Some(wait)) => format!("respond-async, wait={}", wait.as_secs()),
    };
    insert(headers, PREFERENCE_APPLIED, &applied);
}

/// Operation ids, times and paths are printable ASCII, so they are always header values.
pub fn insert(headers: &mut HeaderMap, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        headers.insert(name, value);
    }
}
