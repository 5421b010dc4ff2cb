//! The processes: the downstream, and the proxies in front of it.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::timeout;

use crate::load::{Numbers, Requests};

/// A first `opledger dev` also creates its PostgreSQL.
const START_LIMIT: Duration = Duration::from_secs(120);
const STOP_LIMIT: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Name {
    Plain,
    Nginx,
    Handwritten,
    Opledger,
}

impl Name {
    pub const ALL: [Self; 4] = [Self::Plain, Self::Nginx, Self::Handwritten, Self::Opledger];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Nginx => "nginx",
            Self::Handwritten => "handwritten",
            Self::Opledger => "opledger",
        }
    }

    /// Whether a second delivery is answered from the first.
    pub fn replays(self) -> bool {
        match self {
            Self::Handwritten | Self::Opledger => true,
            Self::Plain | Self::Nginx => false,
        }
    }
}

/// A process that ends with the benchmark.
pub struct Server {
    pub url: String,
    pub address: SocketAddr,
    pub pid: u32,
    process: Child,
    /// Ends when its standard input does; others are sent SIGTERM.
    ends_with_input: bool,
}

pub struct Contestant {
    pub name: Name,
    pub server: Server,
    pub requests: Arc<Requests>,
    /// The number of the next new request.
    pub next_number: u64,
}

/// The one line that a server prints when it is ready.
#[derive(Deserialize)]
struct Ready {
    url: String,
    pid: u32,
    #[serde(default)]
    keys: HashMap<String, String>,
    #[serde(default)]
    database_url: Option<String>,
}

/// What `opledger dev` says of itself beside its address.
pub struct Opledger {
    pub server: Server,
    pub agent_key: String,
    pub database_url: String,
}

impl Server {
    /// This very program, as a process of its own.
    pub async fn own(arguments: &[&str]) -> Result<Self> {
        let process = Command::new(std::env::current_exe().context("find this program")?)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("start a server")?;
        let (process, ready) = readiness(process).await?;
        Self::new(ready.url, ready.pid, process, true)
    }

    fn new(url: String, pid: u32, process: Child, ends_with_input: bool) -> Result<Self> {
        let address = url.strip_prefix("http://").unwrap_or(&url).trim_end_matches('/');
        Ok(Self {
            address: address
                .parse()
                .with_context(|| format!("understand the address {url}"))?,
            url,
            pid,
            process,
            ends_with_input,
        })
    }

    /// Asks for one page, e.g. the downstream's count.
    pub async fn get(&self, path: &str) -> Result<String> {
        let mut stream = TcpStream::connect(self.address).await.context("ask a server")?;
        let request = format!(
            "GET {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n",
            self.address
        );
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        let (_, body) = answer.split_once("\r\n\r\n").context("read a server's answer")?;
        Ok(body.to_owned())
    }

    pub async fn stop(mut self) -> Result<()> {
        if self.ends_with_input {
            drop(self.process.stdin.take());
        } else if let Some(pid) = self.process.id() {
            Command::new("kill").args(["-TERM", &pid.to_string()]).status().await?;
        }
        // Beyond the limit the process is killed, when it is dropped.
        timeout(STOP_LIMIT, self.process.wait())
            .await
            .context("wait for a server to end")??;
        Ok(())
    }
}

/// Starts `opledger dev` with the downstream declared, and a PostgreSQL of its own in `directory`.
pub async fn opledger(binary: &Path, directory: &Path, downstream: &str) -> Result<Opledger> {
    std::fs::create_dir_all(directory.parent().context("find a directory")?)?;
    let config = directory.with_extension("toml");
    std::fs::write(
        &config,
        format!(
            "[limits]\nmax_connections = 20000\nmax_queued = 20000\n\n\
             [downstreams.trivial]\nurl = \"{downstream}\"\nconcurrency = 20000\nhead_timeout = \"300s\"\n"
        ),
    )?;
    let log_path = directory.with_extension("log");
    let process = Command::new(binary)
        .arg("dev")
        .arg("--dir")
        .arg(directory)
        .arg("--config")
        .arg(&config)
        .args(["--listen", "127.0.0.1:0", "--json"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(std::fs::File::create(&log_path)?)
        .kill_on_drop(true)
        .spawn()
        .with_context(|| format!("start {}", binary.display()))?;
    let (process, ready) = readiness(process)
        .await
        .with_context(|| format!("start opledger; its log is {}", log_path.display()))?;
    Ok(Opledger {
        agent_key: ready.keys.get("agent").context("find the agent's key")?.clone(),
        database_url: ready.database_url.context("find the database")?,
        server: Server::new(ready.url, ready.pid, process, false)?,
    })
}

/// Starts nginx in front of the downstream; `None` if it is not installed.
async fn nginx(directory: &Path, downstream: SocketAddr) -> Result<Option<Server>> {
    let directory = directory.with_extension("nginx");
    std::fs::create_dir_all(&directory)?;
    // A port that was free a moment ago.
    let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let config = format!(
        "daemon off; worker_processes {cores}; pid {0}/pid; error_log {0}/error.log;\n\
         events {{ worker_connections 4096; }}\n\
         http {{ access_log off; client_body_temp_path {0}/body; proxy_temp_path {0}/proxy; fastcgi_temp_path {0}/f;\n\
         uwsgi_temp_path {0}/u; scgi_temp_path {0}/s; keepalive_requests 1000000000;\n\
         upstream downstream {{ server {downstream}; keepalive 512; keepalive_requests 1000000000; }}\n\
         server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://downstream; proxy_http_version 1.1;\n\
         proxy_set_header Connection \"\"; }} }} }}\n",
        directory.display()
    );
    let path = directory.join("nginx.conf");
    std::fs::write(&path, config)?;
    let started = Command::new("nginx")
        .arg("-p")
        .arg(&directory)
        .arg("-c")
        .arg(&path)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .spawn();
    let process = match started {
        Ok(process) => process,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).context("start nginx"),
    };
    let pid = process.id().context("find nginx's process")?;
    let server = Server::new(format!("http://127.0.0.1:{port}"), pid, process, false)?;
    for _ in 0..100 {
        if TcpStream::connect(server.address).await.is_ok() {
            return Ok(Some(server));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    bail!("nginx does not listen; see {}", directory.display())
}

/// All proxies in front of the downstream; those that are not installed are left out.
pub async fn all(opledger: Opledger, downstream: &Server, directory: &Path, pool: u32) -> Result<Vec<Contestant>> {
    let plain = Server::own(&["serve-plain", "--downstream", &downstream.url]).await?;
    let pool = pool.to_string();
    let handwritten = Server::own(&[
        "serve-handwritten",
        "--downstream",
        &downstream.url,
        "--database-url",
        &opledger.database_url,
        "--pool",
        &pool,
    ])
    .await?;
    let mut contestants = vec![
        Contestant::new(Name::Plain, plain, "/effects", ""),
        Contestant::new(Name::Handwritten, handwritten, "/effects", ""),
    ];
    match nginx(directory, downstream.address).await? {
        Some(nginx) => contestants.push(Contestant::new(Name::Nginx, nginx, "/effects", "")),
        None => eprintln!("nginx is not installed (Debian: apt-get install nginx-light); going on without it"),
    }
    let credential = format!("Authorization: Bearer {}\r\n", opledger.agent_key);
    let path = "/v1/proxy/trivial/effects";
    contestants.push(Contestant::new(Name::Opledger, opledger.server, path, &credential));
    Ok(contestants)
}

impl Contestant {
    pub fn new(name: Name, server: Server, path: &str, credential: &str) -> Self {
        let body = |_| r#"{"amount":1,"currency":"eur"}"#.to_owned();
        let requests = Requests::new(server.address, path, credential, 1, body);
        Self {
            name,
            requests: Arc::new(requests),
            server,
            next_number: Numbers::start(),
        }
    }
}

async fn readiness(mut process: Child) -> Result<(Child, Ready)> {
    let output = process.stdout.take().context("read what a server prints")?;
    let line = timeout(START_LIMIT, BufReader::new(output).lines().next_line())
        .await
        .context("wait for a server to be ready")??
        .context("a server ended before it was ready")?;
    let ready = serde_json::from_str(&line).with_context(|| format!("understand what a server printed: {line}"))?;
    Ok((process, ready))
}
