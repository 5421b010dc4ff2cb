//! What people decide about operations: how an unknown ended, and that an effect is to be undone.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use axum::routing::post;
use http::{HeaderMap, HeaderName, HeaderValue};

use super::App;
use super::extract::{self, Segment};
use super::members::{members, parsed, text, unknown, whole};
use super::operations::document;
use super::problem::{Code, Problem};
use crate::engine::perform::resolve::{NotResolved, Resolution, Verdict};
use crate::ledger::canonical::{Node, Value};
use crate::ledger::key::Role;
use crate::ledger::operation_id::OperationId;
use crate::ledger::receipt::Receipt;
use crate::ledger::submission;
use crate::outbound::headers;

/// Longest reason, in characters.
const MAX_REASON: usize = 2_000;

pub fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/v1/operations/{operation_id}/resolve", post(resolve))
        .route("/v1/operations/{operation_id}/compensate", post(compensate))
}

/// `POST /v1/operations/{operation_id}/resolve`: a named person says how an unknown ended.
async fn resolve(State(app): State<Arc<App>>, id: Segment, lines: HeaderMap, body: Body) -> Result<Response, Problem> {
    let caller = extract::caller(&app, &lines, &[Role::Operator]).await?;
    let id = id.operation_id()?;
    let body = extract::json_body(&app, &lines, body).await?;
    let resolution = resolution(&parsed(&body)?)?;
    let verdict = resolution.verdict.as_str();
    app.perform
        .resolve(&caller, &id, resolution)
        .await
        .map_err(|why| not_resolved(why, &id))?;
    tracing::info!(operation.id = %id, verdict, "an unknown was resolved");
    document(&app, &caller, &id).await
}

/// `POST /v1/operations/{operation_id}/compensate`: undoes a succeeded operation by its declared reversal.
async fn compensate(
    State(app): State<Arc<App>>,
    id: Segment,
    lines: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    let caller = extract::caller(&app, &lines, &[Role::Operator]).await?;
    let id = id.operation_id()?;
    let body = extract::json_body(&app, &lines, body).await?;
    let (mut version, mut reason) = (None, None);
    let body = parsed(&body)?;
    for (name, value) in members(&body)? {
        match name {
            "version" => version = Some(whole("/version", value, 1, i32::MAX)?),
            "reason" => reason = Some(reason_of(value)?),
            _ => return Err(unknown(name)),
        }
    }
    let (version, reason) = (required_version(version)?, required_reason(reason)?);
    app.perform
        .compensate(&caller, &id, version, &reason)
        .await
        .map_err(|why| not_resolved(why, &id))?;
    tracing::info!(operation.id = %id, "an operation is being undone");
    document(&app, &caller, &id).await
}

fn resolution(body: &Node<'_>) -> Result<Resolution, Problem> {
    let (mut verdict, mut version, mut reason, mut evidence) = (None, None, None, None);
    let (mut reference, mut answer) = (None, None);
    for (name, value) in members(body)? {
        match name {
            "verdict" => verdict = Some(text("/verdict", value)?),
            "version" => version = Some(whole("/version", value, 1, i32::MAX)?),
            "reason" => reason = Some(reason_of(value)?),
            "evidence" => evidence = Some(value.raw().to_owned()),
            "external_reference" => {
                let text = text("/external_reference", value)?;
                if !submission::is_reference(text) {
                    let detail = "must be 1 to 255 characters, none of them a control character";
                    return Err(Problem::member("/external_reference", detail));
                }
                reference = Some(text.to_owned());
            }
            "answer" => answer = Some(answer_of(value)?),
            _ => return Err(unknown(name)),
        }
    }
    let only_for_success = reference.is_some() || answer.is_some();
    let verdict = match verdict {
        Some("succeeded") => Verdict::Succeeded {
            answer,
            external_reference: reference,
        },
        Some(other) if only_for_success && ["not-executed", "failed", "compensate"].contains(&other) => {
            let detail = "answer and external_reference belong to the verdict succeeded only";
            return Err(Problem::member("/verdict", detail));
        }
        Some("not-executed") => Verdict::NotExecuted,
        Some("failed") => Verdict::Failed,
        Some("compensate") => Verdict::Compensate,
        Some(_) | None => {
            let detail = "\"verdict\" is one of succeeded, not-executed, failed, compensate";
            return Err(Problem::member("/verdict", detail));
        }
    };
    Ok(Resolution {
        verdict,
        version: required_version(version)?,
        reason: required_reason(reason)?,
        evidence,
    })
}

fn required_version(version: Option<i32>) -> Result<i32, Problem> {
    let missing = "\"version\" is missing: send the version of the operation that you have seen";
    version.ok_or_else(|| Problem::member("/version", missing))
}

fn required_reason(reason: Option<String>) -> Result<String, Problem> {
    let missing = "\"reason\" is missing: say how you know; it is kept in the history";
    reason.ok_or_else(|| Problem::member("/reason", missing))
}

fn reason_of(node: &Node<'_>) -> Result<String, Problem> {
    let reason = text("/reason", node)?;
    let printable = |character: char| !character.is_control() || character == '\n';
    if reason.trim().is_empty() || reason.chars().count() > MAX_REASON || !reason.chars().all(printable) {
        let detail =
            format!("a reason is 1 to {MAX_REASON} characters, none of them a control character but line feeds");
        return Err(Problem::member("/reason", detail));
    }
    Ok(reason.to_owned())
}

/// The downstream's own answer, as a person has found it: callers get it from now on.
fn answer_of(node: &Node<'_>) -> Result<Receipt, Problem> {
    let (mut status, mut lines, mut body, mut raw) = (None, Vec::new(), None, None);
    for (name, value) in members(node).map_err(|_| Problem::member("/answer", "must be a JSON object"))? {
        match name {
            "status" => status = Some(whole("/answer/status", value, 200, 599)?),
            "headers" => lines = lines_of(value)?,
            "body" => body = Some(value.raw().to_owned()),
            "text" => raw = Some(text("/answer/text", value)?.to_owned()),
            other => return Err(Problem::member(format!("/answer/{other}"), "there is no such member")),
        }
    }
    let status = status.ok_or_else(|| Problem::member("/answer/status", "\"status\" is missing"))?;
    let typed = |lines: &[(String, String)]| lines.iter().any(|(name, _)| name == "content-type");
    let body = match (body, raw) {
        (Some(_), Some(_)) => return Err(Problem::member("/answer", "send body (JSON) or text, not both")),
        (Some(json), None) => {
            if !typed(&lines) {
                lines.push(("content-type".to_owned(), "application/json".to_owned()));
            }
            json
        }
        (None, Some(text)) => text,
        (None, None) => String::new(),
    };
    // From 200 to 599.
    Ok(Receipt::new(status.unsigned_abs() as u16, lines, body.into()))
}

fn lines_of(node: &Node<'_>) -> Result<Vec<(String, String)>, Problem> {
    let bad = |detail: &str| Problem::member("/answer/headers", detail);
    let Value::Array(items) = node.value() else {
        return Err(bad("must be a list of [name, value]"));
    };
    let mut lines = Vec::with_capacity(items.len());
    for item in items {
        let Value::Array(pair) = item.value() else {
            return Err(bad("must be a list of [name, value]"));
        };
        let [name, value] = pair.as_slice() else {
            return Err(bad("must be a list of [name, value]"));
        };
        let (name, value) = (text("/answer/headers", name)?, text("/answer/headers", value)?);
        let name = HeaderName::try_from(name).map_err(|_| bad("a name is not one of a header"))?;
        if !headers::may_be_replayed(&name) || name == http::header::CONTENT_LENGTH {
            return Err(bad("a header is one that is never replayed"));
        }
        let fits = headers::encode_latin1(value).is_some_and(|value| HeaderValue::from_bytes(&value).is_ok());
        if !fits {
            return Err(bad("a value is not one of a header"));
        }
        lines.push((name.as_str().to_owned(), value.to_owned()));
    }
    Ok(lines)
}

fn not_resolved(why: NotResolved, id: &OperationId) -> Problem {
    match why {
        NotResolved::NotFound => Problem::not_found(),
        NotResolved::NotCovered => Problem::new(
            Code::Forbidden,
            "this API key does not cover operations of this kind",
        )
        .about(id),
        NotResolved::Changed { known, version } => Problem::new(
            Code::StateConflict,
            format!("the operation is not as you have seen it: it is at version {version} now, in the state that this answer names; read it again and decide anew"),
        )
        .of(&known),
        NotResolved::TooEarly { known, wait } => Problem::new(
            Code::ResolutionTooEarly,
            "the last request may still be on its way to the downstream, and a new attempt could act twice; decide again after the time in Retry-After",
        )
        .of(&known)
        .retry_after(wait),
        NotResolved::NoReversal { known, cause } => {
            Problem::new(Code::StateConflict, format!("that cannot be done with this operation: {cause}")).of(&known)
        }
        NotResolved::Refused(refusal) => Problem::from(refusal).about(id),
    }
}
