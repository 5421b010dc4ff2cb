//! `/v1/proxy/{downstream}/{*path}`: forward once, replay for ever.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::Response;
use axum::routing::{MethodRouter, get};
use bytes::Bytes;
use http::header::{CONTENT_TYPE, UPGRADE};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use http_body::Frame;
use sha2::{Digest, Sha256};
use tokio::sync::Semaphore;

use super::App;
use super::answer::{self, answer};
use super::body;
use super::extract;
use super::problem::{Code, Problem};
use super::spool::IN_MEMORY;
use crate::engine::intake::Preference;
use crate::engine::outcome::{Outcome, Refusal};
use crate::engine::perform::{Delivered, Passing, Piece};
use crate::ledger::canonical;
use crate::ledger::fingerprint::{self, Fingerprint};
use crate::ledger::forward::{self, Forward, PROXY_KINDS};
use crate::ledger::key::{Caller, Role};
use crate::ledger::operation::{Operation, StateName};
use crate::ledger::operation_id::OperationId;
use crate::ledger::submission::MAX_DEPTH;
use crate::ledger::tenant::Tenant;
use crate::outbound::downstream::{Ability, Downstream, Route};
use crate::outbound::{headers, path, send};

/// Large bodies that are read for comparison at a time: as a document, JSON takes a multiple of its size in memory.
static READING: Semaphore = Semaphore::const_new(2);

/// How long a caller waits for a retry or a recovery that goes on by itself, unless it says otherwise.
const PATIENCE: Duration = Duration::from_secs(20);

pub fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/v1/proxy/{downstream}", every_method())
        .route("/v1/proxy/{downstream}/", every_method())
        .route("/v1/proxy/{downstream}/{*path}", every_method())
}

fn every_method() -> MethodRouter<Arc<App>> {
    get(proxy)
        .head(proxy)
        .options(proxy)
        .post(proxy)
        .put(proxy)
        .patch(proxy)
        .delete(proxy)
}

/// What is asked for.
enum Asking {
    Pass(send::Request, Arc<Downstream>),
    Settle {
        forward: Arc<Forward>,
        downstream: Arc<Downstream>,
        route: Arc<Route>,
        preference: Preference,
    },
}

fn proxy(State(app): State<Arc<App>>, request: Request) -> impl Future<Output = Result<Response, Problem>> + Send {
    // On the heap, and gone before the downstream's answer is waited for: many wait at a time.
    let asking = Box::pin(read(app.clone(), request));
    async move {
        match asking.await? {
            Asking::Pass(request, downstream) => {
                let passing = Box::pin(app.perform.pass(request, downstream)).await?;
                Ok(pass_on(passing))
            }
            Asking::Settle {
                forward,
                downstream,
                route,
                preference,
            } => settle(&app, forward, downstream, route, preference).await,
        }
    }
}

/// Everything about a request that can be wrong is found here.
async fn read(app: Arc<App>, request: Request) -> Result<Asking, Problem> {
    let (parts, body) = request.into_parts();
    let (lines, method) = (&parts.headers, parts.method.clone());
    let caller = extract::caller(&app, lines, &[Role::Agent]).await?;
    let (downstream, rest) = downstream(&app, &caller, parts.uri.path())?;
    if lines.contains_key(UPGRADE) {
        let detail = "this route forwards requests and their answers; it cannot switch to another protocol (Upgrade)";
        return Err(Problem::new(Code::RequestInvalid, detail));
    }
    if lines.get_all(CONTENT_TYPE).iter().nth(1).is_some() {
        let detail = "Content-Type was sent more than once; send one line: what is compared must be what is sent";
        return Err(Problem::new(Code::RequestInvalid, detail));
    }
    let path_and_query = path::join(&downstream.base, rest, parts.uri.query())
        .map_err(|refused| Problem::new(Code::RequestInvalid, format!("this path is not forwarded: {refused}")))?;
    let route = downstream.route(&method, rest).clone();
    let is_safe = [Method::GET, Method::HEAD, Method::OPTIONS].contains(&method);
    let key = if is_safe { None } else { extract::key(lines)? };
    if key.is_none() && !is_safe && route.key_required {
        let detail = "send an Idempotency-Key: one key per intended action, the same on every retry";
        return Err(Problem::new(Code::KeyMissing, detail));
    }
    let body = body::spooled(&app, body, downstream.limits.request_bytes).await?;
    let request = send::Request {
        method,
        path_and_query,
        headers: headers::forwarded(lines),
        body,
    };
    let Some(id) = key else {
        return Ok(Asking::Pass(request, downstream));
    };
    let content = Content::of(&downstream, &route, &request).await?;
    let forward = describe(&app, &caller, lines, &downstream, rest, id, request, content);
    // The request's lines end here: they are slices of the connection's read buffer, which would wait as long as the caller.
    Ok(Asking::Settle {
        forward,
        downstream,
        route,
        preference: extract::preference(lines),
    })
}

/// Forwards it, and waits for what the downstream's abilities can still make of it.
pub async fn settle(
    app: &App,
    forward: Arc<Forward>,
    downstream: Arc<Downstream>,
    route: Arc<Route>,
    preference: Preference,
) -> Result<Response, Problem> {
    note(&forward);
    let asked = Asked::of(&forward, is_repeated(&route));
    let delivered = app
        .perform
        .deliver(forward, downstream, route, preference.respond_async)
        .await;
    if let Ok(Delivered::Known(outcome)) = &delivered {
        app.intake.count(&asked.tenant, outcome);
    }
    Box::pin(conclude(app, asked, delivered, preference)).await
}

/// Stores it without sending anything.
pub async fn plan(app: &App, forward: Arc<Forward>, preference: Preference) -> Result<Response, Problem> {
    note(&forward);
    let outcome = app.perform.plan(&forward).await;
    if let Ok(outcome) = &outcome {
        app.intake.count(&forward.tenant, outcome);
    }
    let asked = Asked::of(&forward, false);
    conclude(app, asked, outcome.map(Delivered::Known), preference).await
}

/// Sends a plan; whatever else the operation is by now is told.
pub async fn execute(
    app: &App,
    caller: &Caller,
    operation: Operation,
    preference: Preference,
) -> Result<Response, Problem> {
    let mut asked = Asked {
        tenant: operation.tenant.clone(),
        id: operation.id.clone(),
        fingerprint: operation.fingerprint,
        is_repeated: false,
    };
    let delivered = match app.perform.planned(&operation, caller.actor()).await {
        Ok(Some(planned)) => {
            asked.is_repeated = is_repeated(planned.declared());
            app.perform.execute(planned, preference.respond_async).await
        }
        Ok(None) => app.perform.operation(&asked.tenant, &asked.id).await.map(|found| {
            let operation = found.unwrap_or(operation);
            Delivered::Known(Outcome::of(&operation, &operation.fingerprint))
        }),
        Err(refusal) => Err(refusal),
    };
    conclude(app, asked, delivered, preference).await
}

/// Which operation a delivery is about.
struct Asked {
    tenant: Tenant,
    id: OperationId,
    fingerprint: Fingerprint,
    /// Its downstream lets an unknown request be sent again.
    is_repeated: bool,
}

impl Asked {
    fn of(forward: &Forward, is_repeated: bool) -> Self {
        Self {
            tenant: forward.tenant.clone(),
            id: forward.id.clone(),
            fingerprint: forward.fingerprint,
            is_repeated,
        }
    }
}

fn is_repeated(route: &Route) -> bool {
    matches!(route.ability, Ability::Key { .. } | Ability::Conditional { .. })
}

/// Answers with what a delivery has come to, after waiting for what it may still come to.
async fn conclude(
    app: &App,
    asked: Asked,
    delivered: Result<Delivered, Refusal>,
    preference: Preference,
) -> Result<Response, Problem> {
    let (outcome, first) = match delivered {
        Ok(Delivered::Passing(passing)) => return Ok(pass_on(passing)),
        Ok(Delivered::First(outcome)) => (Ok(outcome), true),
        Ok(Delivered::Known(outcome)) => (Ok(outcome), false),
        Err(refusal) => (Err(refusal), true),
    };
    let outcome = match outcome {
        Ok(outcome) => {
            let usual = || patience(&outcome, asked.is_repeated, preference.respond_async);
            match preference.wait.or_else(usual) {
                Some(patience) => {
                    let waiting =
                        app.perform
                            .settled_within(&asked.tenant, &asked.id, &asked.fingerprint, outcome, patience);
                    Box::pin(waiting).await
                }
                None => Ok(outcome),
            }
        }
        Err(refusal) => Err(refusal),
    };
    // The delivery that began it gets the first answer, not a replay of one.
    let outcome = outcome.map(|outcome| if first { outcome.as_first() } else { outcome });
    app.metrics.delivered(outcome.as_ref());
    super::operations::link(&outcome);
    super::operations::log_mismatch(&outcome);
    Ok(answer(outcome, preference))
}

/// Without a wish, a caller waits for what is likely to settle soon, but not for another delivery's attempt, nor for a
/// look-up, which may take as long as a request may be on its way.
fn patience(outcome: &Outcome, is_repeated: bool, respond_async: bool) -> Option<Duration> {
    if respond_async {
        return None;
    }
    match outcome {
        Outcome::Unknown { recovers, .. } => (*recovers && is_repeated).then_some(PATIENCE),
        Outcome::Accepted { operation, .. } => (operation.state == Some(StateName::RetryWait)).then_some(PATIENCE),
        Outcome::Settled { .. }
        | Outcome::InProgress { .. }
        | Outcome::Mismatch { .. }
        | Outcome::Expired { .. }
        | Outcome::NotStored { .. }
        | Outcome::HandlerBroken { .. } => None,
    }
}

/// The downstream that a path names, and what follows its name; both exactly as they were sent.
fn downstream<'a>(app: &App, caller: &Caller, path: &'a str) -> Result<(Arc<Downstream>, &'a str), Problem> {
    let below = path.strip_prefix("/v1/proxy/").ok_or_else(Problem::not_found)?;
    let end = below.find('/').unwrap_or(below.len());
    let (name, rest) = below.split_at(end);
    let downstream = app
        .perform
        .downstreams()
        .get(name)
        .cloned()
        .ok_or_else(Problem::not_found)?;
    if !caller.covers(&kind(name)) {
        let detail = "this API key does not cover this downstream";
        return Err(Problem::new(Code::Forbidden, detail));
    }
    Ok((downstream, rest))
}

fn kind(downstream: &str) -> String {
    format!("{PROXY_KINDS}{downstream}")
}

#[expect(clippy::too_many_arguments, reason = "the parts of one request")]
fn describe(
    app: &App,
    caller: &Caller,
    lines: &HeaderMap,
    downstream: &Downstream,
    rest: &str,
    id: OperationId,
    request: send::Request,
    content: Content,
) -> Arc<Forward> {
    let path_and_query = request.path_and_query.as_str().to_owned();
    let payload = serde_json::json!({
        "method": request.method.as_str(),
        "path": path_and_query,
        "content_type": content.media,
        "body_bytes": request.body.len(),
        "body_sha256": content.body_sha256,
    });
    Arc::new(Forward {
        tenant: caller.tenant.clone(),
        fingerprint: content.fingerprint,
        kind: kind(&downstream.name).into(),
        downstream: downstream.name.clone(),
        target: format!("{} {}{rest}", request.method, downstream.name),
        payload: payload.to_string().into(),
        request: forward::Request {
            method: request.method.as_str().to_owned(),
            path_and_query,
            headers: headers::lines(&request.headers),
            body: request.body,
            downstream_key: forward::downstream_key(&caller.tenant, &id),
        },
        id,
        run: None,
        external_reference: None,
        requested_by: caller.key_id.clone(),
        trace_parent: super::operations::trace_parent(lines),
        retention: app.perform.retention(),
    })
}

/// What a request is, for comparison and for people.
struct Content {
    media: Option<String>,
    body_sha256: String,
    fingerprint: Fingerprint,
}

impl Content {
    /// A large body is read aside: it takes long, and may have to come from a disk.
    async fn of(downstream: &Arc<Downstream>, route: &Arc<Route>, request: &send::Request) -> Result<Self, Problem> {
        if request.body.len() <= IN_MEMORY {
            return Ok(Self::read(downstream, route, request));
        }
        let place = READING.acquire().await;
        let (downstream, route, request) = (downstream.clone(), route.clone(), request.clone());
        #[expect(
            clippy::disallowed_methods,
            reason = "the request waits for it; nothing has been claimed, and nobody else needs it"
        )]
        let reading = tokio::task::spawn_blocking(move || {
            // Held until it has been read, even if nobody waits any more.
            let _place = place;
            Self::read(&downstream, &route, &request)
        });
        reading.await.map_err(|error| {
            tracing::error!(error = %error, "a body could not be read");
            Problem::from(Refusal::Internal)
        })
    }

    fn read(downstream: &Downstream, route: &Route, request: &send::Request) -> Self {
        let media = request.headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
        let media = media.map(headers::decode_latin1);
        Self {
            fingerprint: fingerprint(downstream, route, media.as_deref(), request),
            body_sha256: super::hex(&Sha256::digest(&request.body)),
            media,
        }
    }
}

/// What makes two requests the same: the whole target, the content type, the body, and the headers that the route names.
fn fingerprint(
    downstream: &Downstream,
    route: &Route,
    content_type: Option<&str>,
    request: &send::Request,
) -> Fingerprint {
    let meaningful: Vec<(&str, &[u8])> = route
        .meaningful_headers
        .iter()
        .flat_map(|name| {
            request
                .headers
                .get_all(name)
                .iter()
                .map(move |value| (name.as_str(), value.as_bytes()))
        })
        .collect();
    // What is not JSON as we read it is compared byte by byte.
    let document = content_type
        .filter(|media| is_json(media))
        .and_then(|_| canonical::parse(&request.body, MAX_DEPTH).ok());
    let body = match &document {
        Some(document) => fingerprint::Body::Canonical(document),
        None => fingerprint::Body::Raw(&request.body),
    };
    Fingerprint::proxy(&fingerprint::ProxyRequest {
        downstream: &downstream.name,
        method: request.method.as_str(),
        path_and_query: request.path_and_query.as_str(),
        content_type,
        body,
        headers: &meaningful,
    })
}

fn is_json(content_type: &str) -> bool {
    let media = content_type
        .split(';')
        .next()
        .unwrap_or_default()
        .trim()
        .to_ascii_lowercase();
    media == "application/json" || media.ends_with("+json")
}

fn note(forward: &Forward) {
    tracing::Span::current()
        .record("operation.id", forward.id.as_str())
        .record("kind", &*forward.kind)
        .record("fingerprint", tracing::field::display(&forward.fingerprint));
}

/// An answer as it comes.
fn pass_on(passing: Passing) -> Response {
    let Passing {
        operation,
        status,
        headers: lines,
        body,
    } = passing;
    let mut response = Response::new(Body::new(Pieces(body)));
    // It was one when it came.
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or_default();
    let headers = response.headers_mut();
    answer::append_lines(headers, &lines);
    if let Some(operation) = operation {
        answer::name_operation(headers, Some(&operation.id), operation.state);
    }
    response
}

/// A body of pieces. If they stop without an end, the connection breaks: nobody must take it for a complete answer.
struct Pieces(tokio::sync::mpsc::Receiver<Piece>);

impl http_body::Body for Pieces {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
        self.0.poll_recv(context).map(|piece| match piece {
            Some(Piece::Data(bytes)) => Some(Ok(Frame::data(bytes))),
            Some(Piece::End) => None,
            None => Some(Err(std::io::ErrorKind::UnexpectedEof.into())),
        })
    }
}
