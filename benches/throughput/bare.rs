//! The unprotected server: one statement, its own commit, and a second delivery is a second deposit.

use std::sync::Arc;

use anyhow::Result;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post;
use axum::{Json, Router};
use serde_json::{Value, json};
use sqlx::PgPool;

use crate::baseline::{self, Deposit};
use crate::options::Baseline;

struct App {
    pool: PgPool,
    tenant: String,
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

async fn deposit(State(app): State<Arc<App>>, Json(deposit): Json<Deposit>) -> Result<Json<Value>, StatusCode> {
    let balance: Option<i64> = sqlx::query_scalar(
        "update shop.accounts set balance = balance + $3 where tenant_id = $1 and account = $2 returning balance",
    )
    .bind(&app.tenant)
    .bind(&deposit.account)
    .bind(deposit.amount)
    .fetch_optional(&app.pool)
    .await
    .map_err(|error| {
        eprintln!("bare: {error}");
        StatusCode::INTERNAL_SERVER_ERROR
    })?;
    let balance = balance.ok_or(StatusCode::NOT_FOUND)?;
    Ok(Json(
        json!({"account": deposit.account, "amount": deposit.amount, "balance": balance}),
    ))
}
