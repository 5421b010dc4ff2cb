//! The hand-written server: an `Idempotency-Key`, a table of answers, and one transaction per request.
//!
//! It is what a competent team arrives at, and it is correct: claim by the unique key, compare, update, store the
//! answer, write an audit row, commit; a duplicate that comes meanwhile waits at the unique key and then replays. It
//! does less than the ledger: no credentials, no canonical form, no receipts to be read, no retention, no recovery.

use std::sync::Arc;

use anyhow::Result;
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use serde_json::json;
use sha2::{Digest as _, Sha256};
use sqlx::{PgConnection, PgPool};

use crate::baseline::{self, Deposit};
use crate::options::Baseline;

struct App {
    pool: PgPool,
    tenant: String,
}

enum Refusal {
    KeyMissing,
    BodyMalformed,
    NoSuchAccount,
    OtherBody,
    Database(sqlx::Error),
}

pub async fn serve(settings: Baseline) -> Result<()> {
    let app = App {
        pool: baseline::pool(&settings).await?,
        tenant: settings.tenant,
    };
    baseline::serve(
        Router::new()
            .route("/deposits", post(deposit))
            .with_state(Arc::new(app)),
    )
    .await
}

async fn deposit(State(app): State<Arc<App>>, headers: HeaderMap, body: Bytes) -> Result<Response, Refusal> {
    let key = headers
        .get("idempotency-key")
        .and_then(|key| key.to_str().ok())
        .ok_or(Refusal::KeyMissing)?;
    let deposit: Deposit = serde_json::from_slice(&body).map_err(|_| Refusal::BodyMalformed)?;
    let digest = Sha256::digest(&body);

    let mut transaction = app.pool.begin().await?;
    if !claim(&mut transaction, &app.tenant, key, &digest).await? {
        let answer = stored_answer(&mut transaction, &app.tenant, key, &digest).await?;
        transaction.rollback().await?;
        return Ok(replayed(answer));
    }
    let balance = apply(&mut transaction, &app.tenant, &deposit)
        .await?
        .ok_or(Refusal::NoSuchAccount)?;
    let answer = json!({"account": deposit.account, "amount": deposit.amount, "balance": balance}).to_string();
    store_answer(&mut transaction, &app.tenant, key, &answer).await?;
    audit(&mut transaction, &app.tenant, key).await?;
    transaction.commit().await?;
    Ok(first(answer))
}

async fn claim(connection: &mut PgConnection, tenant: &str, key: &str, digest: &[u8]) -> sqlx::Result<bool> {
    let claimed: Option<bool> = sqlx::query_scalar(
        "insert into bench.idempotency (tenant_id, idempotency_key, request_sha256) values ($1, $2, $3)
         on conflict do nothing returning true",
    )
    .bind(tenant)
    .bind(key)
    .bind(digest)
    .fetch_optional(connection)
    .await?;
    Ok(claimed.is_some())
}

/// A statement of its own: within the insert's, the row that a rival has just committed would not be visible.
async fn stored_answer(
    connection: &mut PgConnection,
    tenant: &str,
    key: &str,
    digest: &[u8],
) -> Result<String, Refusal> {
    let (first_digest, answer): (Vec<u8>, String) = sqlx::query_as(
        "select request_sha256, answer from bench.idempotency where tenant_id = $1 and idempotency_key = $2",
    )
    .bind(tenant)
    .bind(key)
    .fetch_one(connection)
    .await?;
    if first_digest == digest {
        Ok(answer)
    } else {
        Err(Refusal::OtherBody)
    }
}

async fn apply(connection: &mut PgConnection, tenant: &str, deposit: &Deposit) -> sqlx::Result<Option<i64>> {
    sqlx::query_scalar(
        "update shop.accounts set balance = balance + $3 where tenant_id = $1 and account = $2 returning balance",
    )
    .bind(tenant)
    .bind(&deposit.account)
    .bind(deposit.amount)
    .fetch_optional(connection)
    .await
}

async fn store_answer(connection: &mut PgConnection, tenant: &str, key: &str, answer: &str) -> sqlx::Result<()> {
    sqlx::query(
        "update bench.idempotency set answer = $3, settled_at = clock_timestamp()
         where tenant_id = $1 and idempotency_key = $2",
    )
    .bind(tenant)
    .bind(key)
    .bind(answer)
    .execute(connection)
    .await?;
    Ok(())
}

async fn audit(connection: &mut PgConnection, tenant: &str, key: &str) -> sqlx::Result<()> {
    sqlx::query("insert into bench.audit (tenant_id, idempotency_key, event) values ($1, $2, 'deposited')")
        .bind(tenant)
        .bind(key)
        .execute(connection)
        .await?;
    Ok(())
}

fn first(answer: String) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], answer).into_response()
}

fn replayed(answer: String) -> Response {
    (
        [(HeaderName::from_static("idempotent-replayed"), "true")],
        first(answer),
    )
        .into_response()
}

impl From<sqlx::Error> for Refusal {
    fn from(error: sqlx::Error) -> Self {
        Self::Database(error)
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        match self {
            Self::KeyMissing => (StatusCode::BAD_REQUEST, "Idempotency-Key is missing").into_response(),
            Self::BodyMalformed => (StatusCode::BAD_REQUEST, "the body is not a deposit").into_response(),
            Self::NoSuchAccount => (StatusCode::NOT_FOUND, "no such account").into_response(),
            Self::OtherBody => {
                (StatusCode::UNPROCESSABLE_ENTITY, "this key was used with another body").into_response()
            }
            Self::Database(error) => {
                eprintln!("handwritten: {error}");
                StatusCode::INTERNAL_SERVER_ERROR.into_response()
            }
        }
    }
}
