//! What many requests cost that wait for a slow downstream.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use sqlx::PgPool;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::contestants::{self, Server};
use crate::rounds::default_directory;
use crate::{Measure, process};

pub async fn run(options: Measure, count: usize) -> Result<()> {
    let directory = options.dir.clone().unwrap_or_else(default_directory);
    let binary = options
        .opledger
        .as_deref()
        .context("find opledger: name it with --opledger")?;
    let downstream = Server::own(&["serve-downstream"]).await?;
    let opledger = contestants::opledger(binary, &directory, &downstream.url).await?;
    let pool = PgPool::connect(&opledger.database_url)
        .await
        .context("connect as the database's owner")?;
    let before = process::peak_memory(opledger.server.pid)?;
    let began = Instant::now();
    let mut requests = JoinSet::new();
    for number in 0..count {
        let (address, key) = (opledger.server.address, opledger.agent_key.clone());
        requests.spawn(async move { one(address, &key, number).await });
    }
    let waiting = loop {
        let waiting: usize = downstream.get("/slow").await?.parse()?;
        if waiting >= count || began.elapsed() > Duration::from_secs(120) {
            break waiting;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    println!(
        "{waiting} of {count} requests wait at the downstream after {:.1} s",
        began.elapsed().as_secs_f64()
    );
    let memory = process::peak_memory(opledger.server.pid)?;
    let connections: i64 = sqlx::query_scalar("select count(*) from pg_stat_activity where usename = 'opledger'")
        .fetch_one(&pool)
        .await?;
    let open: i64 = sqlx::query_scalar(
        "select count(*) from pg_stat_activity where usename = 'opledger' and state like 'idle in transaction%'",
    )
    .fetch_one(&pool)
    .await?;
    println!(
        "opledger: {:.1} MiB at most ({:.1} MiB before); {connections} database connections, {open} open transactions",
        memory as f64 / 1_048_576.0,
        before as f64 / 1_048_576.0
    );
    downstream.get("/release").await?;
    let mut answered = 0;
    while let Some(request) = requests.join_next().await {
        request.context("wait for a client")??;
        answered += 1;
    }
    println!(
        "{answered} answered with success after {:.1} s",
        began.elapsed().as_secs_f64()
    );
    ensure!(waiting == count, "not all requests were waiting at the same time");
    pool.close().await;
    opledger.server.stop().await?;
    downstream.stop().await?;
    std::fs::remove_dir_all(&directory).context("remove opledger's directory")?;
    Ok(())
}

async fn one(address: std::net::SocketAddr, key: &str, number: usize) -> Result<()> {
    let mut stream = TcpStream::connect(address).await.context("connect a client")?;
    let request = format!(
        "POST /v1/proxy/trivial/slow HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {key}\r\n\
         Idempotency-Key: waiting-{number}\r\nContent-Type: application/json\r\nContent-Length: 12\r\n\
         Connection: close\r\n\r\n{{\"amount\":1}}"
    );
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    ensure!(
        answer.starts_with("HTTP/1.1 200"),
        "the answer was not a success: {answer}"
    );
    Ok(())
}
