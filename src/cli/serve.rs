//! `opledger serve`: production. One process of any number over one PostgreSQL.

use std::process::ExitCode;

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};

use crate::app::{self, Running};
use crate::config::{self, DatabaseArgs, FileArgs, ListenArgs};

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  DATABASE_URL=postgres://opledger@db/ledger opledger serve
  opledger serve --database-url-file /run/secrets/database_url --listen 0.0.0.0:8080 --config /etc/opledger.toml

Signals: SIGHUP reads the configuration's kinds again; SIGTERM and SIGINT stop accepting, drain, and exit.")]
pub struct Args {
    #[command(flatten)]
    file: FileArgs,
    #[command(flatten)]
    database: DatabaseArgs,
    #[command(flatten)]
    listen: ListenArgs,
    /// Serve although fsync, full_page_writes or synchronous_commit is off: a crash may lose acknowledged receipts
    #[arg(long)]
    allow_unsafe_durability: bool,
}

pub async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let start = app::Start {
        config: config::load(&args.file.config)?,
        config_path: Some(args.file.config),
        database_url: args.database.url()?,
        listen: args.listen.listen,
        allow_unsafe_durability: args.allow_unsafe_durability,
    };
    let running = app::start(start).await?;
    tracing::info!(address = %running.address, version = env!("CARGO_PKG_VERSION"), "serving");
    until_stopped(&running).await?;
    stop(running).await;
    Ok(ExitCode::SUCCESS)
}

/// Reloads on SIGHUP, returns on SIGTERM or SIGINT.
pub async fn until_stopped(running: &Running) -> anyhow::Result<()> {
    let mut hangup = signal(SignalKind::hangup()).context("cannot listen for SIGHUP")?;
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    loop {
        tokio::select! {
            _ = terminate.recv() => return Ok(()),
            _ = interrupt.recv() => return Ok(()),
            _ = hangup.recv() => reload(running).await,
        }
    }
}

async fn reload(running: &Running) {
    match running.reload().await {
        Ok(kinds) => tracing::info!(
            kinds,
            "configuration reloaded: kinds and their retention are in force, other settings need a restart"
        ),
        Err(error) => {
            let error = anyhow::Error::from(error);
            tracing::error!(
                error = format!("{error:#}"),
                "configuration refused; the old one stays in force"
            );
        }
    }
}

/// Drains and reports what was left.
pub async fn stop(running: Running) {
    tracing::info!("stopping: no more requests are accepted");
    let left = running.stop().await;
    if left == app::Left::default() {
        tracing::info!("stopped; everything that had begun is finished");
    } else {
        tracing::warn!(
            connections = left.connections,
            operations = left.operations,
            "stopped; requests were cut off, their retries will find out what became of them"
        );
    }
}
