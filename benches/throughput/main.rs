//! How fast are protected deposits? Three HTTP servers over one PostgreSQL, measured in turns:
//!
//! - `handwritten`: what a competent team writes itself, one transaction per request (handwritten.rs);
//! - `bare`: the same update with no protection at all (bare.rs);
//! - `opledger`: this project, as `opledger dev` starts it.
//!
//! Machines differ and shared ones waver, so the figures to look at are the ratios between servers that were measured
//! within the same round. A run that loses, doubles or refuses one deposit is no measurement: it ends with an error.
//!
//!     cargo bench --bench throughput -- --report docs/BENCHMARKS.md
//!     cargo bench --bench throughput -- --stored 10000,10000000 --clients 64
//!
//! The files: `options` what can be asked for; `rounds` who is measured when; `load` and `connection` the clients;
//! `contestant` the server processes; `database` preparation, preload and the final count; `process` CPU and memory;
//! `histogram` latencies; `report` the page that comes out.

#![expect(
    clippy::disallowed_methods,
    reason = "a benchmark has no tracker, and times are of this machine"
)]

mod bare;
mod baseline;
mod connection;
mod contestant;
mod database;
mod handwritten;
mod histogram;
mod load;
mod options;
mod preload;
mod process;
mod report;
mod rounds;

use anyhow::Result;
use clap::Parser as _;
use options::{Command, Options};
use tokio::runtime;

fn main() -> Result<()> {
    let options = Options::parse();
    match options.command {
        Some(Command::ServeHandwritten(settings)) => server_runtime()?.block_on(handwritten::serve(settings)),
        Some(Command::ServeBare(settings)) => server_runtime()?.block_on(bare::serve(settings)),
        None => client_runtime()?.block_on(rounds::run(options.measure)),
    }
}

/// What `#[tokio::main]` would build, as in any server.
fn server_runtime() -> std::io::Result<runtime::Runtime> {
    runtime::Builder::new_multi_thread().enable_all().build()
}

/// One thread makes all the load: it leaves the most of a small machine to the servers, and no lock is contended.
fn client_runtime() -> std::io::Result<runtime::Runtime> {
    runtime::Builder::new_current_thread().enable_all().build()
}
