//! `opledger sandbox`: a downstream to try things against.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};

use crate::config;
use crate::sandbox::{self, Settings};

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  opledger sandbox                              charges, mails and bookings under /key, /conditional, /lookup, /none
  curl http://127.0.0.1:8090/none/charges -H 'Content-Type: application/json' -d '{\"amount\":500,\"ref\":\"order-1001\"}'
  curl 'http://127.0.0.1:8090/_effects?ref=order-1001'
  curl … -H 'Sandbox-Fault: drop-after, times=1'   it acts, and hangs up; the same sent again is answered

It is a toy: everything is in memory, and nobody is authenticated. `opledger dev` starts one of its own.")]
pub struct Args {
    /// Address and port to listen on; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:8090", value_name = "ADDRESS")]
    listen: SocketAddr,
    /// How long an Idempotency-Key is remembered under /key
    #[arg(long, default_value = "24h", value_name = "TIME", value_parser = config::parse_duration)]
    key_memory: Duration,
    /// How long something done stays invisible to look-ups under /lookup
    #[arg(long, default_value = "0s", value_name = "TIME", value_parser = config::parse_duration)]
    lookup_delay: Duration,
    /// Print exactly one JSON line on stdout when ready
    #[arg(long)]
    json: bool,
}

pub async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    let settings = Settings {
        listen: args.listen,
        key_memory: args.key_memory,
        lookup_delay: args.lookup_delay,
        ..Settings::default()
    };
    let running = sandbox::start(settings)
        .await
        .with_context(|| format!("cannot listen on {}; is another process using it?", args.listen))?;
    let url = format!("http://{}", running.address);
    if args.json {
        println!("{}", serde_json::json!({ "url": url, "pid": std::process::id() }));
    } else {
        println!("The sandbox is ready at {url}; `opledger sandbox --help` shows what to try. Stop it with Ctrl-C.");
    }
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    running.stop().await;
    Ok(ExitCode::SUCCESS)
}
