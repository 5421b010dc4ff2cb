//! The servers that are not ours: the downstream, the plain proxy, the hand-written one.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result};
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use sha2::{Digest as _, Sha256};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpListener;
use tokio::sync::Notify;

/// The hand-written proxy's own table.
const TABLE: &str = "
    create schema if not exists bench;
    create table if not exists bench.forwarded (
        idempotency_key text        not null primary key,
        request_sha256  bytea       not null,
        created_at      timestamptz not null default clock_timestamp(),
        status          smallint,
        content_type    text,
        body            bytea,
        settled_at      timestamptz
    );
";

#[derive(Default)]
struct Effects {
    count: AtomicU64,
    waiting: AtomicU64,
    release: Notify,
}

/// Counts effects, and answers at once; below `/slow` when it is told to.
pub async fn downstream() -> Result<()> {
    let effects = Arc::new(Effects::default());
    let router = Router::new()
        .route(
            "/effects",
            post(async |State(effects): State<Arc<Effects>>, _body: Bytes| {
                let number = effects.count.fetch_add(1, Ordering::Relaxed) + 1;
                (
                    StatusCode::CREATED,
                    [(header::CONTENT_TYPE, "application/json")],
                    format!(r#"{{"id":"effect-{number}","amount":1}}"#),
                )
            })
            .get(async |State(effects): State<Arc<Effects>>| effects.count.load(Ordering::Relaxed).to_string()),
        )
        .route(
            "/slow",
            post(async |State(effects): State<Arc<Effects>>, _body: Bytes| {
                let released = effects.release.notified();
                effects.waiting.fetch_add(1, Ordering::Relaxed);
                released.await;
                "{}"
            })
            .get(async |State(effects): State<Arc<Effects>>| effects.waiting.load(Ordering::Relaxed).to_string()),
        )
        .route(
            "/release",
            get(async |State(effects): State<Arc<Effects>>| {
                effects.release.notify_waiters();
                "released"
            }),
        )
        .with_state(effects);
    serve(router).await
}

type Forwarding = Client<HttpConnector, Full<Bytes>>;

fn client() -> Forwarding {
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    Client::builder(TokioExecutor::new())
        .pool_max_idle_per_host(usize::MAX)
        .build(connector)
}

struct Plain {
    client: Client<HttpConnector, Body>,
    downstream: String,
}

/// Forwards everything, stores nothing.
pub async fn plain(downstream: String) -> Result<()> {
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    let client = Client::builder(TokioExecutor::new())
        .pool_max_idle_per_host(usize::MAX)
        .build(connector);
    let router = Router::new()
        .fallback(forward)
        .with_state(Arc::new(Plain { client, downstream }));
    serve(router).await
}

async fn forward(State(plain): State<Arc<Plain>>, mut request: Request) -> Result<Response, StatusCode> {
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
    *request.uri_mut() = format!("{}{path}", plain.downstream)
        .parse()
        .map_err(|_| StatusCode::BAD_REQUEST)?;
    request.headers_mut().remove(header::HOST);
    let answer = plain
        .client
        .request(request)
        .await
        .map_err(|_| StatusCode::BAD_GATEWAY)?;
    Ok(answer.map(Body::new))
}

struct Handwritten {
    client: Forwarding,
    downstream: String,
    pool: PgPool,
}

/// Commit the claim, send, commit the answer: correct, and no more than that.
pub async fn handwritten(downstream: String, database_url: String, pool: u32) -> Result<()> {
    let pool = PgPoolOptions::new()
        .min_connections(pool)
        .max_connections(pool)
        .test_before_acquire(false)
        .acquire_timeout(Duration::from_secs(30))
        .connect(&database_url)
        .await
        .context("connect the hand-written proxy to the database")?;
    sqlx::raw_sql(TABLE).execute(&pool).await.context("create its table")?;
    let app = Handwritten {
        client: client(),
        downstream,
        pool,
    };
    serve(Router::new().fallback(protected).with_state(Arc::new(app))).await
}

async fn protected(
    State(app): State<Arc<Handwritten>>,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, StatusCode> {
    let key = headers.get("idempotency-key").and_then(|key| key.to_str().ok());
    let key = key.ok_or(StatusCode::BAD_REQUEST)?;
    let mut digest = Sha256::new();
    digest.update(uri.path());
    digest.update(&body);
    let digest = digest.finalize();
    let claimed: Option<bool> = sqlx::query_scalar(
        "insert into bench.forwarded (idempotency_key, request_sha256) values ($1, $2) on conflict do nothing returning true",
    )
    .bind(key)
    .bind(&digest[..])
    .fetch_optional(&app.pool)
    .await
    .map_err(broken)?;
    if claimed.is_none() {
        return replay(&app.pool, key, &digest).await;
    }
    let request = http::Request::post(format!("{}{}", app.downstream, uri.path()))
        .header(header::CONTENT_TYPE, "application/json")
        .body(Full::new(body))
        .map_err(|_| StatusCode::BAD_REQUEST)?;
    let answer = app.client.request(request).await.map_err(|_| StatusCode::BAD_GATEWAY)?;
    let status = answer.status();
    let content_type = answer.headers().get(header::CONTENT_TYPE).cloned();
    let content_type = content_type.and_then(|value| value.to_str().ok().map(ToOwned::to_owned));
    let body = answer
        .into_body()
        .collect()
        .await
        .map_err(|_| StatusCode::BAD_GATEWAY)?
        .to_bytes();
    sqlx::query(
        "update bench.forwarded set status = $2, content_type = $3, body = $4, settled_at = clock_timestamp()
         where idempotency_key = $1",
    )
    .bind(key)
    .bind(status.as_u16().cast_signed())
    .bind(&content_type)
    .bind(&body[..])
    .execute(&app.pool)
    .await
    .map_err(broken)?;
    Ok(answered(status, content_type, body))
}

async fn replay(pool: &PgPool, key: &str, digest: &[u8]) -> Result<Response, StatusCode> {
    type Row = (Vec<u8>, Option<i16>, Option<String>, Option<Vec<u8>>);
    let (first, status, content_type, body): Row = sqlx::query_as(
        "select request_sha256, status, content_type, body from bench.forwarded where idempotency_key = $1",
    )
    .bind(key)
    .fetch_one(pool)
    .await
    .map_err(broken)?;
    if first != digest {
        return Err(StatusCode::UNPROCESSABLE_ENTITY);
    }
    let status = status.ok_or(StatusCode::CONFLICT)?;
    let status = StatusCode::from_u16(status.cast_unsigned()).map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
    Ok(answered(status, content_type, body.unwrap_or_default().into()))
}

fn answered(status: StatusCode, content_type: Option<String>, body: Bytes) -> Response {
    let content_type = content_type.unwrap_or_else(|| "application/octet-stream".to_owned());
    (status, [(header::CONTENT_TYPE, content_type)], body).into_response()
}

fn broken(error: sqlx::Error) -> StatusCode {
    eprintln!("handwritten: {error}");
    StatusCode::INTERNAL_SERVER_ERROR
}

/// Serves until the benchmark, which holds the other end of standard input, is gone.
async fn serve(router: Router) -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0")
        .await
        .context("open a port for a server")?;
    println!(
        r#"{{"url":"http://{}","pid":{}}}"#,
        listener.local_addr()?,
        std::process::id()
    );
    let service = axum::serve(
        axum::serve::ListenerExt::tap_io(listener, |stream| {
            // As good as any: a failure only costs speed.
            let _ = stream.set_nodelay(true);
        }),
        router,
    );
    let mut benchmark = tokio::io::stdin();
    tokio::select! {
        served = service => served.context("serve"),
        _ = benchmark.read_u8() => Ok(()),
    }
}
