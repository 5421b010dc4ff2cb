//! `opledger`: parse the arguments, run one command, report an error with its causes.

use std::process::ExitCode;

use clap::Parser;

/// A request costs some hundred allocations: this allocator makes them in two thirds of the C library's time, and keeps
/// less for connections that wait.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// One arena a core, and pages that are free go back within a tenth of a second, not ten: what one burst of requests took
/// on its way in would be kept beside what the next one takes. The environment's `_RJEM_MALLOC_CONF` goes before.
#[expect(
    unsafe_code,
    reason = "jemalloc reads a pointer to C text under this name, which is nobody else's"
)]
#[unsafe(export_name = "_rjem_malloc_conf")]
pub static MALLOC_CONF: &std::ffi::CStr = c"narenas_ratio:1,dirty_decay_ms:100,muzzy_decay_ms:0";

#[tokio::main]
async fn main() -> ExitCode {
    match opledger::cli::Cli::parse().run().await {
        Ok(code) => code,
        Err(error) => {
            eprintln!("opledger: {}", opledger::cli::in_words(&error));
            ExitCode::FAILURE
        }
    }
}
