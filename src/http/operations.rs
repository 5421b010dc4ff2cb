//! `/v1/operations`: submit, read, list, execute, cancel.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{RawQuery, State};
use axum::response::Response;
use axum::routing::{get, post};
use http::header::{ETAG, IF_NONE_MATCH};
use http::{HeaderMap, StatusCode};
use serde::Serialize;
use serde_json::value::RawValue;
use time::format_description::well_known::Rfc3339;
use time::{OffsetDateTime, UtcOffset};

use super::App;
use super::answer::{self, answer};
use super::extract::{self, Segment};
use super::problem::{Code, Problem};
use super::proxy;
use super::query::{self, Parameters};
use crate::engine::intake::NotCancelled;
use crate::engine::outcome::{Outcome, Refusal};
use crate::engine::perform::resolve::call_request;
use crate::ledger::fingerprint::Fingerprint;
use crate::ledger::forward::{self, Forward};
use crate::ledger::key::{Caller, Role};
use crate::ledger::kind::{self, SchemaViolation, is_kind_name};
use crate::ledger::operation::{Operation, StateName};
use crate::ledger::operation_id::OperationId;
use crate::ledger::read::{self, Change, Filter, Order, Place, Summary};
use crate::ledger::receipt::format_time;
use crate::ledger::submission::{self, Envelope, Invalid, Mode, Submission};
use crate::outbound::downstream::{Downstream, Route};
use crate::outbound::template::Values;
use crate::telemetry::trace::{self, TraceParent};

const READERS: [Role; 3] = [Role::Agent, Role::Approver, Role::Operator];

pub fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/v1/operations", get(list).post(submit))
        .route("/v1/operations/{operation_id}", get(read))
        .route("/v1/operations/{operation_id}/receipt", get(receipt))
        .route("/v1/operations/{operation_id}/execute", post(execute))
        .route("/v1/operations/{operation_id}/cancel", post(cancel))
}

/// `POST /v1/operations`: one business intent, settled once.
async fn submit(State(app): State<Arc<App>>, headers: HeaderMap, body: Body) -> Result<Response, Problem> {
    let caller = extract::caller(&app, &headers, &[Role::Agent]).await?;
    let key = extract::key(&headers)?;
    let body = extract::json_body(&app, &headers, body).await?;
    let preference = extract::preference(&headers);
    let admitted = admit(&app, &caller, key, &headers, &body);
    // Nothing of the request is needed any more, and it may have to wait for long.
    drop((headers, body));
    let outcome = match admitted {
        Ok(Admitted::Function(submission, mode)) => {
            note(&submission);
            app.intake.submit(submission, mode, preference).await
        }
        Ok(Admitted::Downstream(forward, _, _, Mode::Plan)) => {
            return proxy::plan(&app, forward, preference).await;
        }
        Ok(Admitted::Downstream(forward, downstream, route, Mode::Execute)) => {
            return proxy::settle(&app, forward, downstream, route, preference).await;
        }
        // It could not run as a new operation; but if its id is known, the caller is told what became of it: a retry
        // must not be refused because the schema was tightened since.
        Err(Unfit::Rejected {
            id,
            fingerprint,
            problem,
        }) => match app.intake.known(&caller.tenant, &id, &fingerprint).await {
            Ok(Some(outcome)) => Ok(outcome),
            Ok(None) => return Err(*problem),
            Err(refusal) => Err(refusal),
        },
        Err(Unfit::Malformed(problem)) => return Err(*problem),
    };
    app.metrics.delivered(outcome.as_ref());
    link(&outcome);
    log_mismatch(&outcome);
    Ok(answer(outcome, preference))
}

/// A submission, by what performs it.
enum Admitted {
    Function(Submission, Mode),
    Downstream(Arc<Forward>, Arc<Downstream>, Arc<Route>, Mode),
}

/// Why a request is no submission.
enum Unfit {
    /// Malformed: nothing is known about it.
    Malformed(Box<Problem>),
    /// Well formed, and not to be run as a new operation.
    Rejected {
        id: OperationId,
        fingerprint: Fingerprint,
        problem: Box<Problem>,
    },
}

impl From<Problem> for Unfit {
    fn from(problem: Problem) -> Self {
        Self::Malformed(Box::new(problem))
    }
}

/// From bytes to a submission: every check that needs no database, in the order in which the answers are documented.
fn admit(
    app: &App,
    caller: &Caller,
    key: Option<OperationId>,
    headers: &HeaderMap,
    body: &[u8],
) -> Result<Admitted, Unfit> {
    let body = submission::parse(body).map_err(invalid)?;
    let envelope = Envelope::read(&body).map_err(invalid)?;
    let id = agreed(key, envelope.operation_id)?;
    if !caller.covers(envelope.kind) {
        let detail = "this API key does not cover operations of this kind";
        return Err(Problem::new(Code::Forbidden, detail).about(&id).into());
    }
    // Canonical JSON is text.
    let canonical = String::from_utf8(envelope.payload.canonical()).unwrap_or_default();
    let fingerprint = Fingerprint::of_canonical(envelope.kind, canonical.as_bytes());
    let rejected = |problem: Problem| Unfit::Rejected {
        id: id.clone(),
        fingerprint,
        problem: Box::new(problem.about(&id)),
    };
    let violated = |violation: SchemaViolation| {
        rejected(Problem::payload(
            format!("/payload{}", violation.pointer),
            violation.detail,
        ))
    };
    if let Some(kind) = app.perform.kinds().get(envelope.kind) {
        kind::validate(kind.schema.as_deref(), envelope.payload).map_err(violated)?;
        let downstream = kind.downstream.clone();
        let key = forward::downstream_key(&caller.tenant, &id);
        // Canonical JSON parses.
        let payload = serde_json::from_str(&canonical).unwrap_or_default();
        let values = Values {
            operation_id: id.as_str(),
            key: &key,
            payload: &payload,
        };
        let request = call_request(&downstream, &kind.call, &values)
            .map_err(|cause| rejected(Problem::payload("/payload", cause)))?;
        let path = request
            .path_and_query
            .strip_prefix(&downstream.base.path)
            .unwrap_or_default();
        let method = http::Method::from_bytes(request.method.as_bytes()).unwrap_or_default();
        let route = downstream
            .route(&method, path.split('?').next().unwrap_or_default())
            .clone();
        let forward = Forward {
            tenant: caller.tenant.clone(),
            kind: kind.name.clone(),
            fingerprint,
            downstream: downstream.name.clone(),
            target: format!("{} {}{path}", request.method, downstream.name),
            payload: envelope.payload.raw().into(),
            request,
            run: envelope.run,
            external_reference: envelope.external_reference,
            requested_by: caller.key_id.clone(),
            trace_parent: trace_parent(headers),
            retention: kind.retention,
            id,
        };
        return Ok(Admitted::Downstream(
            Arc::new(forward),
            downstream,
            route,
            envelope.mode,
        ));
    }
    let Some(kind) = app.intake.kinds().get(envelope.kind).cloned() else {
        return Err(rejected(Problem::payload(
            "/kind",
            "there is no such kind; ask the operator which are registered",
        )));
    };
    kind.validate(envelope.payload).map_err(violated)?;
    let submission = Submission {
        tenant: caller.tenant.clone(),
        id,
        kind,
        fingerprint,
        payload: envelope.payload.raw().into(),
        canonical: canonical.into(),
        run: envelope.run,
        external_reference: envelope.external_reference,
        requested_by: caller.key_id.clone(),
        trace_parent: trace_parent(headers),
    };
    Ok(Admitted::Function(submission, envelope.mode))
}

fn invalid(invalid: Invalid) -> Problem {
    match invalid {
        Invalid::Member { pointer, detail } => Problem::payload(pointer, detail),
        Invalid::OperationId(error) => Problem::new(Code::KeyInvalid, format!("operation_id: {error}")),
    }
}

/// The one key of a request; header and body may both name it if they agree.
fn agreed(header: Option<OperationId>, body: Option<OperationId>) -> Result<OperationId, Problem> {
    match (header, body) {
        (Some(header), Some(body)) if header != body => Err(Problem::new(
            Code::KeyConflict,
            "Idempotency-Key and operation_id differ; send one, or the same in both",
        )),
        (Some(id), _) | (None, Some(id)) => Ok(id),
        (None, None) => Err(Problem::new(
            Code::KeyMissing,
            "send an Idempotency-Key (or operation_id): one key per intended action, the same on every retry",
        )),
    }
}

/// The caller's trace context, or else our own span's if spans are exported.
pub fn trace_parent(headers: &HeaderMap) -> Option<String> {
    let caller = TraceParent::of(headers).or_else(|| trace::current(&tracing::Span::current()));
    caller.map(|parent| parent.to_string())
}

/// A replay belongs to its own caller's trace; a link leads to the trace in which the effect was made.
pub fn link(outcome: &Result<Outcome, Refusal>) {
    let Ok(Outcome::Settled {
        operation,
        replayed: true,
        ..
    }) = outcome
    else {
        return;
    };
    if let Some(original) = operation.trace_parent.as_deref().and_then(|text| text.parse().ok()) {
        trace::link_to(&tracing::Span::current(), &original);
    }
}

fn note(submission: &Submission) {
    tracing::Span::current()
        .record("operation.id", submission.id.as_str())
        .record("kind", &*submission.kind.name)
        .record("run.id", submission.run.as_ref().and_then(|run| run.run_id.as_deref()))
        .record("fingerprint", tracing::field::display(&submission.fingerprint));
}

pub fn log_mismatch(outcome: &Result<Outcome, Refusal>) {
    match outcome {
        Ok(Outcome::Mismatch {
            original, requested, ..
        }) => tracing::warn!(
            operation.id = %original.id,
            original = %original.fingerprint,
            requested = %requested,
            "an operation id was sent with another payload"
        ),
        Ok(Outcome::HandlerBroken { id, raised }) => tracing::error!(
            operation.id = %id,
            sqlstate = raised.sqlstate,
            raised = raised.message,
            "a handler is broken"
        ),
        Ok(_) | Err(_) => {}
    }
}

/// `GET /v1/operations/{operation_id}`.
async fn read(State(app): State<Arc<App>>, id: Segment, headers: HeaderMap) -> Result<Response, Problem> {
    let caller = extract::caller(&app, &headers, &READERS).await?;
    let id = id.operation_id()?;
    document(&app, &caller, &id).await
}

/// The operation with its history.
pub async fn document(app: &App, caller: &Caller, id: &OperationId) -> Result<Response, Problem> {
    let found = app
        .intake
        .read(async |session| {
            let Some(summary) = read::summary(session, &caller.tenant, id).await? else {
                return Ok(None);
            };
            let history = read::history(session, &caller.tenant, id, summary.version).await?;
            Ok(Some((summary, history)))
        })
        .await?;
    let Some((summary, history)) = found else {
        return Err(Problem::not_found());
    };
    covered(caller, &summary.kind)?;
    let state = summary.state;
    let expires = summary.receipt_expires_at.map(format_time);
    let mut response = answer::json(StatusCode::OK, &Document::with_history(app, caller, summary, history));
    answer::name_operation(response.headers_mut(), Some(id), Some(state));
    if let Some(expires) = expires {
        answer::insert(response.headers_mut(), answer::RECEIPT_EXPIRES, &expires);
    }
    Ok(response)
}

/// `GET /v1/operations/{operation_id}/receipt`: what a retry would be told, without being a delivery.
async fn receipt(State(app): State<Arc<App>>, id: Segment, headers: HeaderMap) -> Result<Response, Problem> {
    let caller = extract::caller(&app, &headers, &READERS).await?;
    let id = id.operation_id()?;
    let operation = own(&app, &caller, &id).await?;
    let outcome = Outcome::of(&operation, &operation.fingerprint);
    let Outcome::Settled { receipt, .. } = &outcome else {
        return Ok(answer(Ok(outcome), Default::default()));
    };
    let tag = format!("\"{}\"", super::hex(&receipt.body_sha256));
    let success = receipt.status < 300;
    let mut response = answer(Ok(outcome), Default::default());
    answer::insert(response.headers_mut(), ETAG, &tag);
    if success && matches_tag(&headers, &tag) {
        *response.status_mut() = StatusCode::NOT_MODIFIED;
        *response.body_mut() = Body::empty();
        response.headers_mut().remove(http::header::CONTENT_TYPE);
    }
    Ok(response)
}

/// `POST /v1/operations/{operation_id}/execute`: runs a planned operation.
async fn execute(
    State(app): State<Arc<App>>,
    id: Segment,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    let caller = extract::caller(&app, &headers, &[Role::Agent]).await?;
    let id = id.operation_id()?;
    extract::no_body(&app, body).await?;
    let operation = own(&app, &caller, &id).await?;
    let preference = extract::preference(&headers);
    if operation.is_downstreams {
        drop(headers);
        return proxy::execute(&app, &caller, operation, preference).await;
    }
    let outcome = app.intake.execute(&caller, &operation, preference).await;
    app.metrics.delivered(outcome.as_ref());
    log_mismatch(&outcome);
    Ok(answer(outcome, preference))
}

/// `POST /v1/operations/{operation_id}/cancel`: withdraws an operation that has not begun.
async fn cancel(State(app): State<Arc<App>>, id: Segment, headers: HeaderMap, body: Body) -> Result<Response, Problem> {
    let caller = extract::caller(&app, &headers, &[Role::Agent]).await?;
    let id = id.operation_id()?;
    extract::no_body(&app, body).await?;
    match app.intake.cancel(&caller, &id, &app.perform.kinds()).await {
        Ok(()) => document(&app, &caller, &id).await,
        Err(NotCancelled::NotFound) => Err(Problem::not_found()),
        Err(NotCancelled::NotYours) => Err(Problem::new(
            Code::Forbidden,
            "only the key that asked for an operation may cancel it, while it covers the kind",
        )
        .about(&id)),
        Err(NotCancelled::TooLate(known)) => Err(Problem::new(
            Code::StateConflict,
            "the operation has begun or is over; it cannot be withdrawn",
        )
        .of(&known)),
        Err(NotCancelled::Refused(refusal)) => Err(refusal.into()),
    }
}

/// An operation of the caller's tenant, of a kind that its key covers.
async fn own(app: &App, caller: &Caller, id: &OperationId) -> Result<Operation, Problem> {
    let operation = app
        .intake
        .operation(&caller.tenant, id)
        .await?
        .ok_or_else(Problem::not_found)?;
    covered(caller, &operation.kind)?;
    Ok(operation)
}

fn covered(caller: &Caller, kind: &str) -> Result<(), Problem> {
    if caller.covers(kind) {
        Ok(())
    } else {
        Err(Problem::new(
            Code::Forbidden,
            "this API key does not cover operations of this kind",
        ))
    }
}

fn matches_tag(headers: &HeaderMap, tag: &str) -> bool {
    let lines = headers
        .get_all(IF_NONE_MATCH)
        .iter()
        .filter_map(|line| line.to_str().ok());
    lines
        .flat_map(|line| line.split(','))
        .map(str::trim)
        .any(|sent| sent == "*" || sent.trim_start_matches("W/") == tag)
}

/// `GET /v1/operations`: newest or oldest first, page by page.
async fn list(State(app): State<Arc<App>>, RawQuery(query): RawQuery, headers: HeaderMap) -> Result<Response, Problem> {
    let caller = extract::caller(&app, &headers, &READERS).await?;
    let mut parameters = Parameters::parse(query.as_deref())?;
    let (filter, limit) = filter(&mut parameters, &caller)?;
    parameters.finish()?;
    // One more than asked for says whether there is a next page.
    let mut found = app
        .intake
        .read(async |session| read::list(session, &caller.tenant, &filter, limit + 1).await)
        .await?;
    let more = i64::try_from(found.len()).is_ok_and(|count| count > limit);
    if more {
        found.pop();
    }
    let next_cursor = found
        .last()
        .filter(|_| more)
        .map(|last| query::cursor(&format_time(last.created_at), &last.operation_id));
    let operations: Vec<Document> = found
        .into_iter()
        .map(|summary| Document::new(&app, &caller, summary))
        .collect();
    Ok(answer::json(
        StatusCode::OK,
        &Page {
            operations,
            next_cursor,
        },
    ))
}

fn filter(parameters: &mut Parameters, caller: &Caller) -> Result<(Filter, i64), Problem> {
    let state = match parameters.take("state") {
        Some(name) => Some(StateName::parse(&name).ok_or_else(|| {
            let names: Vec<_> = StateName::ALL.iter().map(|state| state.as_str()).collect();
            Problem::parameter("state", format!("a state is one of {}", names.join(", ")))
        })?),
        None => None,
    };
    let fingerprint = match parameters.take("fingerprint") {
        Some(text) => Some(
            text.parse::<Fingerprint>()
                .map_err(|error| Problem::parameter("fingerprint", error.to_string()))?
                .to_string(),
        ),
        None => None,
    };
    let filter = Filter {
        state,
        kind: checked(parameters, "kind", is_kind_name, "this is not the name of a kind")?,
        covered: caller.kinds.clone(),
        run_id: reference(parameters, "run_id")?,
        fingerprint,
        external_reference: reference(parameters, "external_reference")?,
        since: time(parameters, "since")?,
        until: time(parameters, "until")?,
        order: order(parameters)?,
        after: place(parameters)?,
    };
    Ok((filter, parameters.limit()?))
}

fn order(parameters: &mut Parameters) -> Result<Order, Problem> {
    match parameters.take("order").as_deref() {
        None | Some("newest") => Ok(Order::Newest),
        Some("oldest") => Ok(Order::Oldest),
        Some(_) => Err(Problem::parameter("order", "an order is newest or oldest")),
    }
}

/// A time, in UTC: with its offset it may lie outside the years that can be written.
fn time(parameters: &mut Parameters, name: &str) -> Result<Option<OffsetDateTime>, Problem> {
    let Some(text) = parameters.take(name) else {
        return Ok(None);
    };
    match utc(&text) {
        Some(time) => Ok(Some(time)),
        None => Err(Problem::parameter(
            name,
            "write a time as RFC 3339, e.g. 2026-01-31T12:00:00Z",
        )),
    }
}

fn utc(text: &str) -> Option<OffsetDateTime> {
    OffsetDateTime::parse(text, &Rfc3339)
        .ok()?
        .checked_to_offset(UtcOffset::UTC)
}

fn reference(parameters: &mut Parameters, name: &str) -> Result<Option<String>, Problem> {
    let detail = "it has 1 to 255 characters, none of them a control character";
    checked(parameters, name, submission::is_reference, detail)
}

/// A parameter that nothing stored could equal is refused rather than answered with an empty list.
fn checked(
    parameters: &mut Parameters,
    name: &str,
    is_good: fn(&str) -> bool,
    detail: &str,
) -> Result<Option<String>, Problem> {
    match parameters.take(name) {
        Some(text) if !is_good(&text) => Err(Problem::parameter(name, detail)),
        other => Ok(other),
    }
}

fn place(parameters: &mut Parameters) -> Result<Option<Place>, Problem> {
    let Some((created_at, operation_id)) = parameters.cursor()? else {
        return Ok(None);
    };
    let created_at = utc(&created_at).ok_or_else(query::bad_cursor)?;
    Ok(Some(Place {
        created_at,
        operation_id,
    }))
}

#[derive(Serialize)]
struct Page {
    operations: Vec<Document>,
    next_cursor: Option<String>,
}

/// An operation as it is shown.
#[derive(Serialize)]
struct Document {
    operation_id: String,
    kind: String,
    target: String,
    state: &'static str,
    fingerprint: String,
    version: i32,
    run: Option<Box<RawValue>>,
    external_reference: Option<String>,
    downstream_key: Option<String>,
    requested_by: String,
    deliveries: i64,
    attempts: i32,
    effects: Option<u32>,
    created_at: String,
    due_at: Option<String>,
    settled_at: Option<String>,
    receipt_expires_at: Option<String>,
    receipt: Option<ReceiptDocument>,
    links: Vec<LinkDocument>,
    #[serde(skip_serializing_if = "Option::is_none")]
    history: Option<Vec<Event>>,
}

#[derive(Serialize)]
struct ReceiptDocument {
    status: u16,
    headers: Option<Box<RawValue>>,
    body_sha256: String,
    size: i64,
}

#[derive(Serialize)]
struct LinkDocument {
    relation: String,
    operation_id: String,
}

#[derive(Serialize)]
struct Event {
    at: String,
    event: String,
    state: String,
    actor: String,
    attempt: i32,
    reason: Option<String>,
    evidence: Option<Box<RawValue>>,
}

impl Document {
    fn new(app: &App, caller: &Caller, summary: Summary) -> Self {
        let unwritten = app.deliveries.unwritten(&caller.tenant, &summary.operation_id);
        Self {
            kind: summary.kind,
            target: summary.target,
            state: summary.state.as_str(),
            fingerprint: summary.fingerprint,
            version: summary.version,
            run: raw(summary.run),
            external_reference: summary.external_reference,
            downstream_key: OperationId::parse(&summary.operation_id)
                .ok()
                .filter(|_| summary.is_forwarded)
                .map(|id| forward::downstream_key(&caller.tenant, &id)),
            requested_by: summary.requested_by,
            deliveries: summary.deliveries + unwritten,
            attempts: summary.attempts,
            effects: summary.state.effects(),
            created_at: format_time(summary.created_at),
            due_at: summary.due_at.map(format_time),
            settled_at: summary.settled_at.map(format_time),
            receipt_expires_at: summary.receipt_expires_at.map(format_time),
            receipt: summary.receipt.map(|receipt| ReceiptDocument {
                status: receipt.status,
                headers: raw(Some(receipt.headers)),
                body_sha256: receipt.body_sha256,
                size: receipt.size,
            }),
            links: summary
                .links
                .into_iter()
                .map(|link| LinkDocument {
                    relation: link.relation,
                    operation_id: link.operation_id,
                })
                .collect(),
            history: None,
            operation_id: summary.operation_id,
        }
    }

    fn with_history(app: &App, caller: &Caller, summary: Summary, history: Vec<Change>) -> Self {
        let events = history.into_iter().map(|change| Event {
            at: format_time(change.at),
            event: change.event,
            state: change.state,
            actor: change.actor,
            attempt: change.attempt,
            reason: change.reason,
            evidence: raw(change.evidence),
        });
        Self {
            history: Some(events.collect()),
            ..Self::new(app, caller, summary)
        }
    }
}

/// JSON that PostgreSQL printed.
fn raw(text: Option<String>) -> Option<Box<RawValue>> {
    RawValue::from_string(text?).ok()
}
