//! What machines and people ask about the process itself: health, readiness, metrics, the API's description, the pages
//! about problems.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use axum::routing::get;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, StatusCode};

use super::App;
use super::answer;
use super::extract::Segment;
use super::problem::Problem;
use crate::telemetry::metrics::Readings;

const OPENAPI: &str = include_str!("../../openapi.yaml");

macro_rules! pages {
    ($($code:literal),* $(,)?) => {
        /// The pages of docs/problems, by code.
        pub const PAGES: &[(&str, &str)] = &[$(($code, include_str!(concat!("../../docs/problems/", $code, ".md")))),*];
    };
}

pages!(
    "downstream-failed",
    "downstream-unreachable",
    "fingerprint-mismatch",
    "forbidden",
    "handler-broken",
    "headers-too-large",
    "internal",
    "key-conflict",
    "key-invalid",
    "key-missing",
    "ledger-unavailable",
    "method-not-allowed",
    "not-found",
    "operation-cancelled",
    "operation-failed",
    "operation-in-progress",
    "operation-rejected",
    "outcome-unknown",
    "payload-invalid",
    "rate-limited",
    "receipt-expired",
    "request-invalid",
    "request-timeout",
    "resolution-too-early",
    "response-not-stored",
    "state-conflict",
    "too-large",
    "unauthenticated",
    "unsupported-media-type",
    "uri-too-long",
);

pub fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/healthz", get(health))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .route(
            "/openapi.yaml",
            get(async || text("application/yaml", OPENAPI.to_owned())),
        )
        .route("/problems/{code}", get(page))
}

/// The process answers.
async fn health() -> Response {
    answer::json(StatusCode::OK, &serde_json::json!({ "status": "ok" }))
}

/// The process can serve: its database answers, its heartbeat is written, it is not stopping.
async fn ready(State(app): State<Arc<App>>) -> Response {
    let database = tokio::time::timeout(Duration::from_secs(2), app.pool.ping()).await;
    let database = match database {
        Ok(Ok(())) => (true, "answers".to_owned()),
        Ok(Err(error)) => (false, error.to_string()),
        Err(_) => (false, "does not answer within 2 s".to_owned()),
    };
    let age = app.heartbeat.age();
    let heartbeat = (age < app.recovery.lease, format!("written {} ms ago", age.as_millis()));
    let serving = match app.is_stopping() {
        true => (false, "the process is stopping".to_owned()),
        false => (true, "takes requests".to_owned()),
    };
    let checks = [("database", database), ("heartbeat", heartbeat), ("serving", serving)];
    let good = checks.iter().all(|(_, (good, _))| *good);
    let checks: serde_json::Map<String, serde_json::Value> = checks
        .into_iter()
        .map(|(name, (good, detail))| (name.to_owned(), serde_json::json!({ "ok": good, "detail": detail })))
        .collect();
    let (status, word) = if good {
        (StatusCode::OK, "ready")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "not-ready")
    };
    answer::json(status, &serde_json::json!({ "status": word, "checks": checks }))
}

async fn metrics(State(app): State<Arc<App>>) -> Response {
    let readings = Readings {
        queued: app.intake.apply.queued(),
        running_alone: app.intake.apply.running_alone(),
        connections: app.pool.usage(),
        heartbeat_age: app.heartbeat.age(),
    };
    text(
        "application/openmetrics-text; version=1.0.0; charset=utf-8",
        app.metrics.encode(readings),
    )
}

async fn page(code: Segment) -> Result<Response, Problem> {
    let code = code.text()?;
    let (_, page) = PAGES
        .iter()
        .find(|(known, _)| *known == code)
        .ok_or_else(Problem::not_found)?;
    Ok(text("text/markdown; charset=utf-8", (*page).to_owned()))
}

fn text(content_type: &'static str, body: String) -> Response {
    let mut response = Response::new(Body::from(body));
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}
