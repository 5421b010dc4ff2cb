//! `opledger`: parse the arguments, run one command, report an error with its causes.

use std::process::ExitCode;

use clap::Parser;

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
