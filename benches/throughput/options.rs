//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

#[derive(Parser)]
#[command(
    name = "throughput",
    about = "Compare protected deposits with hand-written and with unprotected ones."
)]
pub struct Options {
    #[command(subcommand)]
    pub command: Option<Command>,
    #[command(flatten)]
    pub measure: Measure,
    /// Cargo passes this to every benchmark.
    #[arg(long, hide = true, global = true)]
    bench: bool,
}

#[derive(Args)]
pub struct Measure {
    /// How often every server is measured; the report gives the median and the range over the rounds.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
    /// How long a server is measured at a time, in seconds.
    #[arg(long, default_value_t = 3.0)]
    pub seconds: f64,
    /// How long it is driven before that, uncounted, in seconds.
    #[arg(long, default_value_t = 0.5)]
    pub warm_up: f64,
    /// Numbers of clients, each with one request at a time.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 16, 64, 256])]
    pub clients: Vec<usize>,
    /// How many accounts the deposits are spread over.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    pub accounts: u32,
    /// Pool sizes to try for the hand-written and the bare server; each is measured with its own best one.
    #[arg(long, value_delimiter = ',', default_values_t = [8, 16, 32])]
    pub pools: Vec<u32>,
    /// Preload the ledgers to each of these numbers of operations, in this order, and measure at each.
    #[arg(long, value_delimiter = ',')]
    pub stored: Vec<u64>,
    /// The opledger binary.
    #[arg(long, default_value = option_env!("CARGO_BIN_EXE_opledger"))]
    pub opledger: Option<PathBuf>,
    /// Where opledger keeps its PostgreSQL during the run: on the disk to be measured. Default: below `target/tmp`.
    #[arg(long)]
    pub dir: Option<PathBuf>,
    /// Leave that directory behind.
    #[arg(long)]
    pub keep: bool,
    /// A database whose owner this is: for preparing it, and for the two baselines. Default: the one opledger names.
    #[arg(long)]
    pub owner_url: Option<String>,
    /// Measure the two baselines only, on the database of --owner-url.
    #[arg(long, requires = "owner_url")]
    pub baselines_only: bool,
    /// Write the report to this file. Default: to standard output.
    #[arg(long)]
    pub report: Option<PathBuf>,
}

#[derive(Subcommand)]
pub enum Command {
    #[command(hide = true)]
    ServeHandwritten(Baseline),
    #[command(hide = true)]
    ServeBare(Baseline),
}

/// How a baseline server is started.
#[derive(Args)]
pub struct Baseline {
    #[arg(long)]
    pub database_url: String,
    #[arg(long)]
    pub pool: u32,
    #[arg(long)]
    pub tenant: String,
}
