//! The command line: one file a command. `main` parses, this dispatches.

mod check;
mod client;
mod completions;
mod dev;
mod doctor;
mod exit;
mod healthcheck;
mod keys;
mod migrate;
mod operations;
mod output;
mod pages;
mod purge;
mod sandbox;
mod serve;
mod shop;
mod unknowns;

use std::process::ExitCode;
use std::time::Duration;

use clap::{CommandFactory, Parser, Subcommand};

use crate::config::{LogArgs, TraceArgs};
use crate::telemetry::{self, trace};

/// The receiving side that makes an agent's retries safe: one operation id, one effect, one receipt.
#[derive(Debug, Parser)]
#[command(name = "opledger", version, after_help = EXAMPLES)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    log: LogArgs,
    #[command(flatten)]
    trace: TraceArgs,
}

const EXAMPLES: &str = "\
Examples:
  opledger dev                                     a private PostgreSQL, an example business, keys, curl commands
  opledger migrate --grant-to opledger             prepare a database (as its owner)
  opledger serve --config opledger.toml            serve it (as the role opledger)
  opledger operations get acme:order-1001:refund:rev-1
  opledger unknowns                                what a person has to settle
  opledger sandbox                                 a small API that counts its effects and breaks on request
  opledger doctor                                  what is wrong with database, clock, settings, handlers, downstreams";

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve the API over your own PostgreSQL
    Serve(serve::Args),
    /// Serve an example business over a private PostgreSQL, to try things out
    Dev(dev::Args),
    /// Bring the database to this program's schema
    Migrate(migrate::Args),
    /// Check a configuration file, its schemas and its handlers
    Check(check::Args),
    /// Remove expired receipts now
    Purge(purge::Args),
    /// Make, list, change and revoke API keys
    #[command(subcommand)]
    Keys(keys::Command),
    /// Submit, look up and settle operations
    #[command(subcommand)]
    Operations(operations::Command),
    /// Show what nobody knows the outcome of, oldest first, and what to do about it
    Unknowns(unknowns::Args),
    /// Say what is wrong with database, clock, settings, handlers and downstreams
    Doctor(doctor::Args),
    /// Serve a small API to try the proxy against, which counts its effects and breaks on request
    Sandbox(sandbox::Args),
    /// Ask a running service whether it is healthy (exit code 0 or 1)
    Healthcheck(healthcheck::Args),
    /// Print completions for a shell
    Completions(completions::Args),
}

/// An error with its causes, each said once.
pub fn in_words(error: &anyhow::Error) -> String {
    exit::chain(error.as_ref())
}

/// How long the last spans may take to reach the collector.
const LAST_SPANS: Duration = Duration::from_secs(3);

impl Cli {
    /// Runs the command. Called on the main thread, which `dev`'s private PostgreSQL is bound to.
    pub async fn run(self) -> anyhow::Result<ExitCode> {
        let exporter = self.trace.exporter()?;
        let traces = exporter.as_ref().map(trace::Exporter::handle);
        telemetry::start(self.log.log_format, &self.log.log, exporter)?;
        let code = self.command.run().await;
        if let Some(traces) = traces {
            traces.shutdown(LAST_SPANS).await;
        }
        code
    }
}

impl Command {
    async fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Command::Serve(args) => serve::run(args).await,
            Command::Dev(args) => dev::run(args).await,
            Command::Migrate(args) => migrate::run(args).await,
            Command::Check(args) => check::run(args).await,
            Command::Purge(args) => purge::run(args).await,
            Command::Keys(command) => keys::run(command).await,
            Command::Operations(command) => operations::run(command).await,
            Command::Unknowns(args) => unknowns::run(args).await,
            Command::Doctor(args) => doctor::run(args).await,
            Command::Sandbox(args) => sandbox::run(args).await,
            Command::Healthcheck(args) => healthcheck::run(args).await,
            Command::Completions(args) => completions::run(args, Cli::command()),
        }
    }
}
