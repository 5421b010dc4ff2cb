//! `opledger`: parse the arguments, run one command, report an error with its causes.

use std::process::ExitCode;

use clap::Parser;

/// Many small, short-lived allocations on several threads are what this program makes; see docs/DESIGN.md.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[tokio::main]
async fn main() -> ExitCode {
    match opledger::cli::Cli::parse().run().await {
        Ok(code) => code,
        Err(error) => {
            eprintln!("opledger: {error:#}");
            ExitCode::FAILURE
        }
    }
}
