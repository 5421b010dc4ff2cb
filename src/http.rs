//! The edge: the route table, and what every request passes through.

pub mod answer;
pub mod body;
pub mod decisions;
pub mod extract;
pub mod health;
pub mod keys;
pub mod members;
pub mod operations;
pub mod problem;
pub mod proxy;
pub mod query;
pub mod server;
pub mod spool;
pub mod wire;

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use http::header::{CACHE_CONTROL, CONNECTION, TRANSFER_ENCODING};
use http::{HeaderName, HeaderValue};
use tower_http::catch_panic::CatchPanicLayer;
use tracing::Instrument;

use crate::config;
use crate::engine::accounts::Accounts;
use crate::engine::deliveries::Deliveries;
use crate::engine::intake::Intake;
use crate::engine::perform::Perform;
use crate::engine::recovery::{self, Heartbeat};
use crate::postgres::pool::Pool;
use crate::telemetry::metrics::Metrics;
use crate::telemetry::trace::{self, TraceParent};
use problem::{Code, Problem};

const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");
const NO_SNIFFING: (HeaderName, HeaderValue) = (
    http::header::X_CONTENT_TYPE_OPTIONS,
    HeaderValue::from_static("nosniff"),
);

/// What request handlers share.
pub struct App {
    pub intake: Arc<Intake>,
    pub perform: Arc<Perform>,
    pub accounts: Accounts,
    pub deliveries: Arc<Deliveries>,
    pub pool: Pool,
    pub metrics: Arc<Metrics>,
    pub heartbeat: Arc<Heartbeat>,
    pub limits: config::Limits,
    pub recovery: recovery::Settings,
    /// Set when the process has been told to stop.
    pub stopping: AtomicBool,
}

impl App {
    /// Whether the process has been told to stop.
    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }
}

/// Every route of the service.
pub fn router(app: Arc<App>) -> Router {
    Router::new()
        .merge(operations::routes())
        .merge(decisions::routes())
        .merge(keys::routes())
        .merge(proxy::routes())
        .merge(health::routes())
        .fallback(async || Problem::not_found())
        .method_not_allowed_fallback(async || Problem::method_not_allowed())
        .layer(CatchPanicLayer::custom(panicked))
        .layer(middleware::from_fn_with_state(app.clone(), every_request))
        .with_state(app)
}

/// Gives each request its id, span, limits and metrics, and each answer its common headers.
fn every_request(State(app): State<Arc<App>>, request: Request, next: Next) -> impl Future<Output = Response> + Send {
    let began = Instant::now();
    let id = uuid::Uuid::now_v7();
    let versioned = request.uri().path().starts_with("/v1/");
    let route = request
        .extensions()
        .get::<MatchedPath>()
        .map_or("none", |path| path.as_str())
        .to_owned();
    let span = tracing::info_span!(
        "request",
        otel.kind = "server",
        request.id = %id,
        method = %request.method(),
        route,
        tenant = tracing::field::Empty,
        key = tracing::field::Empty,
        operation.id = tracing::field::Empty,
        kind = tracing::field::Empty,
        run.id = tracing::field::Empty,
        fingerprint = tracing::field::Empty,
        status = tracing::field::Empty,
    );
    if let Some(parent) = TraceParent::of(request.headers()) {
        trace::continue_from(&span, &parent);
    }
    // On the heap: while it waits for its answer, a request would be in this future twice.
    let running = within_limits(&app, &request)
        .and_then(|()| framed(&request))
        .map(|()| Box::pin(next.run(request).instrument(span.clone())));
    async move {
        let mut response = match running {
            Ok(running) => running.await,
            Err(problem) => {
                let mut response = problem.into_response();
                // What follows the head is not worth reading.
                response
                    .headers_mut()
                    .insert(CONNECTION, HeaderValue::from_static("close"));
                response
            }
        };
        let status = response.status().as_u16();
        span.record("status", status);
        span.in_scope(|| tracing::debug!(duration_ms = began.elapsed().as_secs_f64() * 1e3, "answered"));
        app.metrics.answered(&route, status, began.elapsed());
        let headers = response.headers_mut();
        answer::insert(headers, REQUEST_ID, &id.to_string());
        headers.insert(NO_SNIFFING.0, NO_SNIFFING.1);
        if versioned {
            headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        }
        response
    }
}

fn within_limits(app: &App, request: &Request) -> Result<(), Problem> {
    let uri = request.uri().path_and_query().map_or(0, |path| path.as_str().len());
    if uri > app.limits.max_uri_bytes {
        let detail = format!("path and query have more than {} bytes", app.limits.max_uri_bytes);
        return Err(Problem::new(Code::UriTooLong, detail));
    }
    let head: usize = request
        .headers()
        .iter()
        .map(|(name, value)| name.as_str().len() + value.len() + 4)
        .sum();
    if head > app.limits.max_header_bytes || request.headers().len() > app.limits.max_headers {
        let detail = format!(
            "the headers have more than {} bytes or {} lines",
            app.limits.max_header_bytes, app.limits.max_headers
        );
        return Err(Problem::new(Code::HeadersTooLarge, detail));
    }
    Ok(())
}

/// Chunks are all that is undone here. Another coding would reach handlers and downstreams as if it were the content.
/// Source: RFC 9112, section 6.1.
fn framed(request: &Request) -> Result<(), Problem> {
    let mut codings = request.headers().get_all(TRANSFER_ENCODING).iter();
    let is_plain = match codings.next() {
        None => true,
        Some(coding) => coding.as_bytes().eq_ignore_ascii_case(b"chunked") && codings.next().is_none(),
    };
    if is_plain {
        return Ok(());
    }
    let detail = "no Transfer-Encoding but chunked is understood; a compressed body is declared by Content-Encoding";
    Err(Problem::new(Code::RequestInvalid, detail))
}

/// A bug: the request ends, the process goes on.
fn panicked(panic: Box<dyn Any + Send>) -> Response {
    let message = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_default();
    tracing::error!(message, "a handler panicked");
    Problem::new(
        Code::Internal,
        "the ledger failed and has logged why under this answer's Request-Id",
    )
    .into_response()
}

/// Lower-case hexadecimal digits.
fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
