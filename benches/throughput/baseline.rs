//! What the two baseline servers have in common: the request, the pool, and how they start and end.

use std::time::Duration;

use anyhow::{Context as _, Result};
use axum::Router;
use serde::Deserialize;
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpListener;

use crate::options::Baseline;

#[derive(Deserialize)]
pub struct Deposit {
    pub account: String,
    pub amount: i64,
}

pub async fn pool(settings: &Baseline) -> Result<PgPool> {
    PgPoolOptions::new()
        .min_connections(settings.pool)
        .max_connections(settings.pool)
        // sqlx would otherwise ping before every use: one more round trip per request, to the baselines' disadvantage.
        .test_before_acquire(false)
        .acquire_timeout(Duration::from_secs(30))
        .connect(&settings.database_url)
        .await
        .context("connect a baseline server to the database")
}

/// Serves until the benchmark, which holds the other end of standard input, is gone.
pub async fn serve(router: Router) -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0")
        .await
        .context("open a port for a baseline server")?;
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
