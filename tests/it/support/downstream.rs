//! An API that the service forwards to, written by hand so that the test controls every byte of it.
//!
//! It reads whole requests, keeps them, and answers each by a script: pieces, pauses, gates that the test opens, and the
//! way in which the connection ends. What it has received is counted here and nowhere else.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};

/// Longest request that is read.
const LONGEST: usize = 64 << 20;

/// A request that has arrived whole.
#[derive(Debug, Clone)]
pub struct Received {
    pub method: String,
    /// Path and query, as they came.
    pub target: String,
    /// Header lines, as they came.
    pub lines: Vec<String>,
    pub body: Vec<u8>,
    /// How many requests had arrived before it.
    pub number: usize,
}

impl Received {
    /// The values of every line of that name.
    pub fn all(&self, name: &str) -> Vec<&str> {
        self.lines
            .iter()
            .filter_map(|line| line.split_once(':'))
            .filter(|(line, _)| line.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.trim())
            .collect()
    }

    /// The value of the only line of that name; empty if there is none.
    pub fn header(&self, name: &str) -> &str {
        let all = self.all(name);
        assert!(all.len() <= 1, "{name}: {all:?}");
        all.first().copied().unwrap_or_default()
    }

    pub fn names(&self) -> Vec<String> {
        self.lines
            .iter()
            .filter_map(|line| Some(line.split_once(':')?.0.to_ascii_lowercase()))
            .collect()
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap()
    }
}

/// Opened by the test, once; whoever waits for it goes on.
#[derive(Debug, Clone)]
pub struct Gate(Arc<watch::Sender<bool>>);

impl Gate {
    pub fn new() -> Self {
        Self(Arc::new(watch::Sender::new(false)))
    }

    pub fn open(&self) {
        self.0.send_replace(true);
    }

    async fn passed(&self) {
        let _ = self.0.subscribe().wait_for(|open| *open).await;
    }
}

#[derive(Debug, Clone)]
enum Step {
    Bytes(Vec<u8>),
    Pause(Duration),
    Gate(Gate),
    Close,
    Reset,
    Hang,
}

/// What becomes of one request. At its end the next request is read from the same connection.
#[derive(Debug, Clone, Default)]
pub struct Script(Vec<Step>);

impl Script {
    /// A whole answer with a length.
    pub fn answer(status: u16, body: impl AsRef<[u8]>) -> Self {
        Self::with_lines(status, "Content-Type: application/json\r\n", body)
    }

    /// A whole answer with these header lines, each ended by CRLF, and a length.
    pub fn with_lines(status: u16, lines: &str, body: impl AsRef<[u8]>) -> Self {
        let body = body.as_ref();
        let head = format!(
            "HTTP/1.1 {status} Whatever\r\n{lines}Content-Length: {}\r\n\r\n",
            body.len()
        );
        Self::default().then(head).then(body)
    }

    /// Nothing so far.
    pub fn new() -> Self {
        Self::default()
    }

    pub fn then(mut self, bytes: impl AsRef<[u8]>) -> Self {
        self.0.push(Step::Bytes(bytes.as_ref().to_vec()));
        self
    }

    pub fn pause(mut self, pause: Duration) -> Self {
        self.0.push(Step::Pause(pause));
        self
    }

    pub fn gate(mut self, gate: &Gate) -> Self {
        self.0.push(Step::Gate(gate.clone()));
        self
    }

    /// Ends the connection in order.
    pub fn close(mut self) -> Self {
        self.0.push(Step::Close);
        self
    }

    /// Ends it with a reset.
    pub fn reset(mut self) -> Self {
        self.0.push(Step::Reset);
        self
    }

    /// Says nothing more for as long as the test lasts.
    pub fn hang(mut self) -> Self {
        self.0.push(Step::Hang);
        self
    }

    /// This before what follows.
    pub fn before(mut self, other: Self) -> Self {
        self.0.extend(other.0);
        self
    }
}

type Answers = Arc<dyn Fn(&Received) -> Script + Send + Sync>;

struct Inner {
    requests: Mutex<Vec<Received>>,
    /// Bytes of requests that were cut off.
    fragments: Mutex<Vec<Vec<u8>>>,
    planned: Mutex<VecDeque<Script>>,
    answers: Mutex<Answers>,
    connections: AtomicUsize,
    /// Resets a connection when this many bytes of a request have come; 0: never.
    cut_at: AtomicUsize,
}

/// The running API; its connections end with it.
pub struct Downstream {
    pub address: SocketAddr,
    inner: Arc<Inner>,
    _end: DropGuard,
}

impl Downstream {
    /// Answers every request with 200 and its number until it is told otherwise.
    pub async fn start() -> Self {
        Self::start_at("127.0.0.1:0".parse().unwrap()).await
    }

    /// At an address where one has been before.
    pub async fn start_at(address: SocketAddr) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let counting: Answers =
            Arc::new(|request: &Received| Script::answer(200, format!("{{\"n\":{}}}", request.number)));
        let inner = Arc::new(Inner {
            requests: Mutex::default(),
            fragments: Mutex::default(),
            planned: Mutex::default(),
            answers: Mutex::new(counting),
            connections: AtomicUsize::new(0),
            cut_at: AtomicUsize::new(0),
        });
        let end = CancellationToken::new();
        tokio::spawn(
            end.clone()
                .run_until_cancelled_owned(accept(listener, inner.clone(), end.clone())),
        );
        Self {
            address,
            inner,
            _end: end.drop_guard(),
        }
    }

    /// How requests are answered from now on.
    pub fn answers(&self, answers: impl Fn(&Received) -> Script + Send + Sync + 'static) {
        *self.inner.answers.lock().unwrap() = Arc::new(answers);
    }

    /// What the next request gets that none has been planned for, whatever is said of the others.
    pub fn plan(&self, script: Script) {
        self.inner.planned.lock().unwrap().push_back(script);
    }

    /// Resets each connection when this many bytes of its request have come.
    pub fn cuts_at(&self, bytes: usize) {
        self.inner.cut_at.store(bytes, Ordering::Relaxed);
    }

    /// `[downstreams.NAME]` for a service that forwards to it, below `/base`; `lines` are its settings and routes.
    pub fn config(&self, name: &str, lines: &str) -> String {
        format!(
            "[downstreams.{name}]\nurl = \"http://{}/base\"\n{}\n",
            self.address,
            lines.replace("[[routes]]", &format!("[[downstreams.{name}.routes]]"))
        )
    }

    pub fn requests(&self) -> Vec<Received> {
        self.inner.requests.lock().unwrap().clone()
    }

    /// How many whole requests have come.
    pub fn count(&self) -> usize {
        self.inner.requests.lock().unwrap().len()
    }

    /// How many whole requests have come for this path below the base.
    pub fn sends(&self, path: &str) -> usize {
        let target = format!("/base{path}");
        self.inner
            .requests
            .lock()
            .unwrap()
            .iter()
            .filter(|request| request.target == target)
            .count()
    }

    /// What has come of requests that were cut off before they were whole.
    pub fn fragments(&self) -> Vec<Vec<u8>> {
        self.inner.fragments.lock().unwrap().clone()
    }

    pub fn connections(&self) -> usize {
        self.inner.connections.load(Ordering::Relaxed)
    }

    /// Waits until so many whole requests have come.
    pub async fn received(&self, count: usize) {
        super::until("requests arrive at the downstream", async || self.count() >= count).await;
    }
}

async fn accept(listener: TcpListener, inner: Arc<Inner>, end: CancellationToken) {
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        inner.connections.fetch_add(1, Ordering::Relaxed);
        stream.set_nodelay(true).unwrap();
        let inner = inner.clone();
        tokio::spawn(end.clone().run_until_cancelled_owned(async move {
            let _ = serve(stream, &inner).await;
        }));
    }
}

async fn serve(mut stream: TcpStream, inner: &Inner) -> std::io::Result<()> {
    let mut unread = Vec::new();
    while let Some(mut request) = next(&mut stream, &mut unread, inner).await? {
        let planned = {
            let mut requests = inner.requests.lock().unwrap();
            request.number = requests.len();
            requests.push(request.clone());
            inner.planned.lock().unwrap().pop_front()
        };
        let answers = inner.answers.lock().unwrap().clone();
        for step in planned.unwrap_or_else(|| answers(&request)).0 {
            match step {
                Step::Bytes(bytes) => stream.write_all(&bytes).await?,
                Step::Pause(pause) => tokio::time::sleep(pause).await,
                Step::Gate(gate) => gate.passed().await,
                Step::Close => return Ok(()),
                Step::Reset => return stream.set_zero_linger(),
                Step::Hang => std::future::pending().await,
            }
        }
    }
    Ok(())
}

async fn next(stream: &mut TcpStream, unread: &mut Vec<u8>, inner: &Inner) -> std::io::Result<Option<Received>> {
    let mut head = None;
    loop {
        let cut_at = inner.cut_at.load(Ordering::Relaxed);
        if cut_at > 0 && unread.len() >= cut_at {
            stream.set_zero_linger()?;
            return Ok(None);
        }
        if head.is_none() {
            head = unread
                .windows(4)
                .position(|bytes| bytes == b"\r\n\r\n")
                .map(|end| (end + 4, parsed(&unread[..end])));
        }
        if let Some((end, (request, length))) = &head
            && unread.len() >= end + length
        {
            let mut request = request.clone();
            request.body = unread[*end..end + length].to_vec();
            unread.drain(..end + length);
            return Ok(Some(request));
        }
        if unread.len() > LONGEST || stream.read_buf(unread).await? == 0 {
            if !unread.is_empty() {
                inner.fragments.lock().unwrap().push(std::mem::take(unread));
            }
            return Ok(None);
        }
    }
}

/// The head, and how long the body is. Other framing than a length is never sent to a downstream.
fn parsed(head: &[u8]) -> (Received, usize) {
    // As ISO-8859-1, so that no byte is lost.
    let text: String = head.iter().map(|byte| char::from(*byte)).collect();
    let mut lines = text.split("\r\n");
    let mut first = lines.next().unwrap_or_default().split(' ');
    let request = Received {
        method: first.next().unwrap_or_default().to_owned(),
        target: first.next().unwrap_or_default().to_owned(),
        lines: lines.map(str::to_owned).collect(),
        body: Vec::new(),
        number: 0,
    };
    let coding = request.all("transfer-encoding");
    assert!(coding.is_empty(), "{coding:?}");
    let length = request.header("content-length").parse().unwrap_or(0);
    (request, length)
}
