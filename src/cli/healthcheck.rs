//! `opledger healthcheck`: for containers and supervisors that have no HTTP client.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::process::ExitCode;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::config::ListenArgs;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  opledger healthcheck                              asks the address of OPLEDGER_LISTEN for /healthz
  opledger healthcheck --listen 127.0.0.1:8080 --ready")]
pub struct Args {
    #[command(flatten)]
    listen: ListenArgs,
    /// Ask whether it can serve (/readyz), not only whether it runs
    #[arg(long)]
    ready: bool,
}

pub async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let path = if args.ready { "/readyz" } else { "/healthz" };
    let address = reachable(args.listen.listen);
    match tokio::time::timeout(Duration::from_secs(5), status_line(address, path)).await {
        Ok(Ok(line)) if line.starts_with("HTTP/1.1 200") => Ok(ExitCode::SUCCESS),
        Ok(Ok(line)) => fail(&format!("{address}{path} answers {line}")),
        Ok(Err(error)) => fail(&format!("cannot ask {address}{path}: {error}")),
        Err(_) => fail(&format!("{address}{path} does not answer within 5 s")),
    }
}

fn fail(reason: &str) -> anyhow::Result<ExitCode> {
    eprintln!("opledger: {reason}");
    Ok(ExitCode::FAILURE)
}

/// Where a service that listens on this address is reached from its own machine.
fn reachable(mut listen: SocketAddr) -> SocketAddr {
    if listen.ip().is_unspecified() {
        listen.set_ip(match listen.ip() {
            IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        });
    }
    listen
}

async fn status_line(address: SocketAddr, path: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(address).await?;
    stream
        .write_all(format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").as_bytes())
        .await?;
    let mut answer = Vec::new();
    stream.take(64 << 10).read_to_end(&mut answer).await?;
    let line = answer.split(|byte| *byte == b'\r').next().unwrap_or_default();
    Ok(String::from_utf8_lossy(line).into_owned())
}
