//! What does protection cost on the way to another API? Four proxies in front of one trivial downstream, in turns:
//!
//! - `plain`: an axum reverse proxy that protects nothing (servers.rs);
//! - `nginx`: the same by nginx, if it is installed;
//! - `handwritten`: what a competent team writes itself: commit the claim, send, commit the answer (servers.rs);
//! - `opledger`: this project, as `opledger dev` starts it, with a downstream that remembers nothing (`none`).
//!
//! Ratios are taken within a round. A run in which one answer is no success, or in which the downstream has counted more
//! or fewer effects than a protected proxy acknowledged, ends with an error.
//!
//!     cargo bench --bench proxy -- --report docs/BENCHMARKS-PROXY.md
//!     cargo bench --bench proxy -- --waiting 10000

#![expect(
    clippy::disallowed_methods,
    reason = "a benchmark has no tracker, and times are of this machine"
)]

#[path = "../throughput/connection.rs"]
mod connection;
mod contestants;
#[path = "../throughput/histogram.rs"]
mod histogram;
#[path = "../throughput/load.rs"]
mod load;
#[path = "../throughput/process.rs"]
mod process;
mod report;
mod rounds;
mod servers;
mod waiting;

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};
use tokio::runtime;

#[derive(Parser)]
#[command(
    name = "proxy",
    about = "Compare protected forwarding with hand-written, with unprotected and with nginx's."
)]
struct Options {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    measure: Measure,
    /// Cargo passes this to every benchmark.
    #[arg(long, hide = true, global = true)]
    bench: bool,
}

#[derive(Args)]
pub struct Measure {
    /// How often every proxy is measured; the report gives the median and the range over the rounds.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
    /// How long a proxy is measured at a time, in seconds.
    #[arg(long, default_value_t = 2.0)]
    pub seconds: f64,
    /// How long it is driven before that, uncounted, in seconds.
    #[arg(long, default_value_t = 0.3)]
    pub warm_up: f64,
    /// Numbers of clients, each with one request at a time.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 16, 64, 256])]
    pub clients: Vec<usize>,
    /// Size of the hand-written proxy's pool.
    #[arg(long, default_value_t = 16)]
    pub pool: u32,
    /// Instead: let this many requests wait for a slow downstream, and show what that costs.
    #[arg(long)]
    pub waiting: Option<usize>,
    /// The opledger binary.
    #[arg(long, default_value = option_env!("CARGO_BIN_EXE_opledger"))]
    pub opledger: Option<PathBuf>,
    /// Where opledger keeps its PostgreSQL during the run: on the disk to be measured. Default: below `target/tmp`.
    #[arg(long)]
    pub dir: Option<PathBuf>,
    /// Write the report to this file. Default: to standard output.
    #[arg(long)]
    pub report: Option<PathBuf>,
}

#[derive(Subcommand)]
enum Command {
    #[command(hide = true, name = "serve-downstream")]
    Downstream,
    #[command(hide = true, name = "serve-plain")]
    Plain {
        #[arg(long)]
        downstream: String,
    },
    #[command(hide = true, name = "serve-handwritten")]
    Handwritten {
        #[arg(long)]
        downstream: String,
        #[arg(long)]
        database_url: String,
        #[arg(long)]
        pool: u32,
    },
}

fn main() -> Result<()> {
    let options = Options::parse();
    match options.command {
        Some(Command::Downstream) => server_runtime()?.block_on(servers::downstream()),
        Some(Command::Plain { downstream }) => server_runtime()?.block_on(servers::plain(downstream)),
        Some(Command::Handwritten {
            downstream,
            database_url,
            pool,
        }) => server_runtime()?.block_on(servers::handwritten(downstream, database_url, pool)),
        None => match options.measure.waiting {
            Some(count) => client_runtime()?.block_on(waiting::run(options.measure, count)),
            None => client_runtime()?.block_on(rounds::run(options.measure)),
        },
    }
}

/// What `#[tokio::main]` would build, as in any server.
fn server_runtime() -> std::io::Result<runtime::Runtime> {
    runtime::Builder::new_multi_thread().enable_all().build()
}

/// One thread makes all the load: it leaves the most of a small machine to the servers.
fn client_runtime() -> std::io::Result<runtime::Runtime> {
    runtime::Builder::new_current_thread().enable_all().build()
}
