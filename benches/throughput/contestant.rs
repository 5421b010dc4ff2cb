//! A server under test: its process, and the requests that suit it.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde::Deserialize;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use crate::load::{Numbers, Requests};

/// A first `opledger dev` also creates its PostgreSQL.
const START_LIMIT: Duration = Duration::from_secs(120);
const STOP_LIMIT: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Name {
    Handwritten,
    Bare,
    Opledger,
}

pub struct Contestant {
    pub name: Name,
    pub tenant: String,
    pub address: SocketAddr,
    pub requests: Arc<Requests>,
    pub pid: u32,
    /// The size of a baseline's pool.
    pub pool: Option<u32>,
    /// The number of the next new deposit.
    pub next_number: u64,
    /// Deposits of 1 that were answered with a success for the first time.
    pub acknowledged: u64,
    /// What the tenant's accounts held together when this server started.
    pub balance_before: i64,
    process: Child,
}

/// The one line that a server prints when it is ready.
#[derive(Deserialize)]
pub struct Ready {
    url: String,
    pid: u32,
    #[serde(default)]
    tenant: String,
    #[serde(default)]
    keys: HashMap<String, String>,
    #[serde(default)]
    pub database_url: Option<String>,
    #[serde(default)]
    pub owner_database_url: Option<String>,
}

impl Name {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Handwritten => "handwritten",
            Self::Bare => "bare",
            Self::Opledger => "opledger",
        }
    }

    /// Whether a second delivery is answered from the first. The bare server would deposit again.
    pub fn replays(self) -> bool {
        match self {
            Self::Handwritten | Self::Opledger => true,
            Self::Bare => false,
        }
    }
}

impl Contestant {
    /// Starts a baseline: this very program, as a process of its own.
    pub async fn baseline(name: Name, database_url: &str, pool: u32, accounts: u32) -> Result<Self> {
        // A tenant each, so that each one's deposits can be counted.
        let tenant = format!("bench-{}", name.as_str());
        let process = Command::new(std::env::current_exe().context("find this program")?)
            .arg(format!("serve-{}", name.as_str()))
            .args([
                "--database-url",
                database_url,
                "--tenant",
                &tenant,
                "--pool",
                &pool.to_string(),
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("start the server {}", name.as_str()))?;
        let (process, ready) = readiness(process, name).await?;
        let address = address(&ready.url)?;
        let requests = Requests::new(address, "/deposits", "", accounts, |account| {
            format!(r#"{{"account":"acct-{account}","amount":1}}"#)
        });
        Ok(Self::new(
            name,
            tenant,
            address,
            requests,
            ready.pid,
            Some(pool),
            process,
        ))
    }

    /// Starts `opledger dev`, with a PostgreSQL of its own in `directory`.
    pub async fn opledger(binary: &Path, directory: &Path, accounts: u32) -> Result<(Self, Ready)> {
        let log_path = directory.with_extension("log");
        let log = std::fs::File::create(&log_path).context("create opledger's log")?;
        let process = Command::new(binary)
            .arg("dev")
            .arg("--dir")
            .arg(directory)
            .args(["--listen", "127.0.0.1:0", "--json"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("start {}", binary.display()))?;
        let (process, ready) = readiness(process, Name::Opledger)
            .await
            .with_context(|| format!("start opledger; its log is {}", log_path.display()))?;
        let address = address(&ready.url)?;
        let key = ready
            .keys
            .get("agent")
            .context("find the agent's key in what opledger printed")?;
        let credential = format!("Authorization: Bearer {key}\r\n");
        let requests = Requests::new(address, "/v1/operations", &credential, accounts, |account| {
            format!(r#"{{"kind":"account.deposit","payload":{{"account":"acct-{account}","amount":1}}}}"#)
        });
        let contestant = Self::new(
            Name::Opledger,
            ready.tenant.clone(),
            address,
            requests,
            ready.pid,
            None,
            process,
        );
        Ok((contestant, ready))
    }

    fn new(
        name: Name,
        tenant: String,
        address: SocketAddr,
        requests: Requests,
        pid: u32,
        pool: Option<u32>,
        process: Child,
    ) -> Self {
        let requests = Arc::new(requests);
        let next_number = Numbers::start();
        Self {
            name,
            tenant,
            address,
            requests,
            pid,
            pool,
            next_number,
            acknowledged: 0,
            balance_before: 0,
            process,
        }
    }

    /// Asks the server to end, the way its kind is asked, and waits for it.
    pub async fn stop(mut self) -> Result<()> {
        match self.name {
            Name::Handwritten | Name::Bare => drop(self.process.stdin.take()),
            Name::Opledger => terminate(&self.process).await?,
        }
        // Beyond the limit the process is killed, when it is dropped.
        timeout(STOP_LIMIT, self.process.wait())
            .await
            .with_context(|| format!("wait for the server {} to end", self.name.as_str()))?
            .context("wait for a server to end")?;
        Ok(())
    }
}

async fn readiness(mut process: Child, name: Name) -> Result<(Child, Ready)> {
    let output = process.stdout.take().context("read what a server prints")?;
    let line = timeout(START_LIMIT, BufReader::new(output).lines().next_line())
        .await
        .with_context(|| format!("wait for the server {} to be ready", name.as_str()))?
        .context("read what a server prints")?
        .with_context(|| format!("the server {} ended before it was ready", name.as_str()))?;
    let ready = serde_json::from_str(&line).with_context(|| format!("understand what a server printed: {line}"))?;
    Ok((process, ready))
}

fn address(url: &str) -> Result<SocketAddr> {
    let address = url.strip_prefix("http://").unwrap_or(url).trim_end_matches('/');
    address.parse().with_context(|| format!("understand the address {url}"))
}

async fn terminate(process: &Child) -> Result<()> {
    // None: it has ended already.
    let Some(pid) = process.id() else { return Ok(()) };
    Command::new("kill")
        .args(["-TERM", &pid.to_string()])
        .status()
        .await
        .context("ask opledger to end")?;
    Ok(())
}
