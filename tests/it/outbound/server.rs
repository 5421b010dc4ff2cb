//! A server that does with each connection what a test tells it to, and counts.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

pub struct Server {
    pub address: SocketAddr,
    seen: Arc<Seen>,
    accepting: tokio::task::JoinHandle<()>,
}

#[derive(Default)]
struct Seen {
    connections: AtomicUsize,
    requests: Mutex<Vec<Received>>,
    /// Connections that the other side has closed or reset.
    gone: AtomicUsize,
}

/// One request as it came over the wire.
#[derive(Debug, Clone)]
pub struct Received {
    pub head: String,
    pub body: Vec<u8>,
}

pub struct Peer {
    pub stream: TcpStream,
    seen: Arc<Seen>,
    buffer: Vec<u8>,
}

impl Server {
    pub async fn start<Behaviour, Run>(behaviour: Behaviour) -> Self
    where
        Behaviour: Fn(Peer) -> Run + Send + Sync + 'static,
        Run: Future<Output = ()> + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::new(Seen::default());
        let counted = seen.clone();
        let accepting = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                counted.connections.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(behaviour(Peer {
                    stream,
                    seen: counted.clone(),
                    buffer: Vec::new(),
                }));
            }
        });
        Self {
            address,
            seen,
            accepting,
        }
    }

    /// Reads one request on each connection, says this, and closes.
    pub async fn saying(answer: impl Into<Vec<u8>>) -> Self {
        let answer: Arc<[u8]> = answer.into().into();
        Self::start(move |mut peer| {
            let answer = answer.clone();
            async move {
                if peer.request().await.is_some() {
                    peer.say(&answer).await;
                }
            }
        })
        .await
    }

    /// Answers every request on each connection, for as long as there are any.
    pub async fn keeping(answer: impl Into<Vec<u8>>) -> Self {
        let answer: Arc<[u8]> = answer.into().into();
        Self::start(move |mut peer| {
            let answer = answer.clone();
            async move {
                while peer.request().await.is_some() {
                    peer.say(&answer).await;
                }
            }
        })
        .await
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn connections(&self) -> usize {
        self.seen.connections.load(Ordering::SeqCst)
    }

    /// Connections of which the other side was seen to let go.
    pub fn gone(&self) -> usize {
        self.seen.gone.load(Ordering::SeqCst)
    }

    pub fn requests(&self) -> Vec<Received> {
        self.seen.requests.lock().unwrap().clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl Peer {
    /// The next whole request; `None` when the other side lets go.
    pub async fn request(&mut self) -> Option<Received> {
        let (head, length) = self.head().await?;
        let body = self.body(length).await?;
        let received = Received { head, body };
        self.seen.requests.lock().unwrap().push(received.clone());
        Some(received)
    }

    /// The head of the next request, and how long its body will be.
    pub async fn head(&mut self) -> Option<(String, usize)> {
        loop {
            if let Some(end) = self.buffer.windows(4).position(|window| window == b"\r\n\r\n") {
                let head: Vec<u8> = self.buffer.drain(..end + 4).collect();
                let head = String::from_utf8(head).unwrap();
                assert!(!head.to_lowercase().contains("transfer-encoding"), "{head}");
                let length = head
                    .lines()
                    .find_map(|line| line.to_lowercase().strip_prefix("content-length: ")?.parse().ok())
                    .unwrap_or(0);
                return Some((head, length));
            }
            self.more().await?;
        }
    }

    /// The body of the request whose head was read last.
    pub async fn body(&mut self, length: usize) -> Option<Vec<u8>> {
        while self.buffer.len() < length {
            self.more().await?;
        }
        Some(self.buffer.drain(..length).collect())
    }

    async fn more(&mut self) -> Option<()> {
        match self.stream.read_buf(&mut self.buffer).await {
            Ok(count) if count > 0 => Some(()),
            Ok(_) | Err(_) => {
                self.seen.gone.fetch_add(1, Ordering::SeqCst);
                None
            }
        }
    }

    pub async fn say(&mut self, bytes: impl AsRef<[u8]>) {
        // Whoever has gone does not listen.
        let _ = self.stream.write_all(bytes.as_ref()).await;
    }

    /// Ends the connection with a reset.
    pub fn reset(self) {
        self.stream.set_zero_linger().unwrap();
    }

    /// How many requests the server has got so far, on all connections.
    pub fn received(&self) -> usize {
        self.seen.requests.lock().unwrap().len()
    }

    /// Does nothing more until the other side lets go.
    pub async fn hold(mut self) {
        while self.more().await.is_some() {}
    }
}
