//! A downstream that does as it is told: answers with the bytes that a test has planned, or takes the request and closes,
//! after which nobody can know whether it acted.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::{CancellationToken, DropGuard};

pub struct Downstream {
    pub address: SocketAddr,
    seen: Arc<Mutex<Seen>>,
    // Dropping it ends the listener.
    _end: DropGuard,
}

#[derive(Default)]
struct Seen {
    planned: VecDeque<Vec<u8>>,
    requests: Vec<String>,
    connections: usize,
}

impl Downstream {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::<Mutex<Seen>>::default();
        let end = CancellationToken::new();
        tokio::spawn(end.clone().run_until_cancelled_owned(accept(listener, seen.clone())));
        Self {
            address,
            seen,
            _end: end.drop_guard(),
        }
    }

    /// The next request gets this answer; without one it is taken, and the connection closed.
    pub fn answers(&self, status: &str, headers: &str, body: &str) {
        let answer = format!(
            "HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n{headers}\r\n{body}",
            body.len()
        );
        self.seen.lock().unwrap().planned.push_back(answer.into());
    }

    /// Every request so far, as it came.
    pub fn requests(&self) -> Vec<String> {
        self.seen.lock().unwrap().requests.clone()
    }

    pub fn connections(&self) -> usize {
        self.seen.lock().unwrap().connections
    }
}

async fn accept(listener: TcpListener, seen: Arc<Mutex<Seen>>) {
    while let Ok((stream, _)) = listener.accept().await {
        seen.lock().unwrap().connections += 1;
        tokio::spawn(serve(stream, seen.clone()));
    }
}

async fn serve(mut stream: TcpStream, seen: Arc<Mutex<Seen>>) {
    let Some(request) = request(&mut stream).await else {
        return;
    };
    let answer = {
        let mut seen = seen.lock().unwrap();
        seen.requests.push(request);
        seen.planned.pop_front()
    };
    if let Some(answer) = answer {
        let _ = stream.write_all(&answer).await;
    }
}

/// A whole request; `None` if the peer closes before. What came of it until then is no request.
async fn request(stream: &mut TcpStream) -> Option<String> {
    let mut received = Vec::new();
    loop {
        if stream.read_buf(&mut received).await.ok()? == 0 {
            return (!received.is_empty()).then(|| format!("cut off: {}", String::from_utf8_lossy(&received)));
        }
        let text = String::from_utf8_lossy(&received).into_owned();
        let Some((head, body)) = text.split_once("\r\n\r\n") else {
            continue;
        };
        let length = head
            .lines()
            .find_map(|line| {
                line.to_ascii_lowercase()
                    .strip_prefix("content-length:")?
                    .trim()
                    .parse()
                    .ok()
            })
            .unwrap_or(0);
        if body.len() >= length {
            return Some(text);
        }
    }
}
