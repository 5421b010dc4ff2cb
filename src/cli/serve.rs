//! `opledger serve`: production. One process of any number over one PostgreSQL.

use std::process::ExitCode;

use anyhow::Context;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::app::{self, Running};
use crate::config::{self, DatabaseArgs, FileArgs, ListenArgs, WaitArgs};

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  DATABASE_URL=postgres://opledger@db/ledger opledger serve
  opledger serve --database-url-file /run/secrets/database_url --listen 0.0.0.0:8080 --config /etc/opledger.toml

Signals: SIGHUP reads the configuration's kinds and downstreams again; SIGTERM and SIGINT stop accepting, drain, and exit.")]
pub struct Args {
    #[command(flatten)]
    file: FileArgs,
    #[command(flatten)]
    database: DatabaseArgs,
    #[command(flatten)]
    wait: WaitArgs,
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
        database_wait: args.wait.database_wait,
        allow_unsafe_durability: args.allow_unsafe_durability,
    };
    // The first process of a container is not stopped by a signal that it does not listen for.
    let mut signals = Signals::listen()?;
    let running = tokio::select! {
        started = app::start(start) => started?,
        () = signals.told_to_stop() => return Ok(ExitCode::SUCCESS),
    };
    tracing::info!(address = %running.address, version = env!("CARGO_PKG_VERSION"), "serving");
    until_stopped(&running, &mut signals).await;
    stop(running).await;
    Ok(ExitCode::SUCCESS)
}

/// What this process is told by signals. Heard by one listener from its start to its end: a second one does not get what
/// arrived before it, and what the first one got would be lost with it.
pub struct Signals {
    hangup: Signal,
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    pub fn listen() -> anyhow::Result<Self> {
        Ok(Self {
            hangup: signal(SignalKind::hangup()).context("cannot listen for SIGHUP")?,
            terminate: signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?,
            interrupt: signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?,
        })
    }

    /// Returns on SIGTERM or SIGINT.
    pub async fn told_to_stop(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Reloads on SIGHUP, returns on SIGTERM or SIGINT.
pub async fn until_stopped(running: &Running, signals: &mut Signals) {
    loop {
        tokio::select! {
            _ = signals.terminate.recv() => return,
            _ = signals.interrupt.recv() => return,
            _ = signals.hangup.recv() => reload(running).await,
        }
    }
}

async fn reload(running: &Running) {
    match running.reload().await {
        Ok((kinds, downstreams)) => tracing::info!(
            kinds,
            downstreams,
            "configuration reloaded: kinds, with their retention, and downstreams are in force, other settings need a restart"
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
