//! A raw socket, for the tests whose subject is the wire: what is sent is exactly what the test writes.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::client::Answer;
use super::contract;

/// How long an answer or a close may take before the test fails.
const PATIENCE: Duration = Duration::from_secs(15);

pub struct Wire {
    stream: TcpStream,
    received: Vec<u8>,
    /// Whether the peer took everything that was sent.
    pub taken: bool,
}

impl Wire {
    pub async fn connect(address: SocketAddr) -> Self {
        Self {
            stream: TcpStream::connect(address).await.unwrap(),
            received: Vec::new(),
            taken: true,
        }
    }

    /// Connects and sends.
    pub async fn sent(address: SocketAddr, bytes: impl AsRef<[u8]>) -> Self {
        let mut wire = Self::connect(address).await;
        wire.send(bytes).await;
        wire
    }

    /// Writes everything; a peer that closes meanwhile is for the answer to show.
    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.taken &= self.stream.write_all(bytes.as_ref()).await.is_ok();
    }

    /// The next answer, held to the description; `None` if the connection ends before one.
    pub async fn answer_to(&mut self, method: &str, target: &str) -> Option<Answer> {
        let answer = tokio::time::timeout(PATIENCE, self.next(method == "HEAD"))
            .await
            .expect("an answer comes in time")?;
        contract::check(method, target, b"", &answer);
        Some(answer)
    }

    /// Whether the peer closes, and nothing more comes before.
    pub async fn is_closed(&mut self) -> bool {
        let more = tokio::time::timeout(PATIENCE, self.fill())
            .await
            .expect("the connection is closed in time");
        !more && self.received.is_empty()
    }

    /// The status of the next head, for interim answers.
    pub async fn status(&mut self) -> Option<u16> {
        tokio::time::timeout(PATIENCE, self.next(true))
            .await
            .expect("an answer comes in time")
            .map(|answer| answer.status)
    }

    /// Ends the sending side; the answer, if one comes.
    pub async fn half_closed(mut self) -> Option<Answer> {
        let _ = self.stream.shutdown().await;
        self.answer_to("POST", "/v1/operations").await
    }

    async fn next(&mut self, head: bool) -> Option<Answer> {
        let end = loop {
            if let Some(end) = self.received.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
                break end + 4;
            }
            if !self.fill().await {
                return None;
            }
        };
        let text = String::from_utf8(self.received.drain(..end).collect()).expect("a head is text");
        let mut lines = text.trim_end().split("\r\n");
        let status = lines
            .next()
            .and_then(|line| line.split(' ').nth(1)?.parse().ok())
            .expect("a status line");
        let mut headers = HeaderMap::new();
        for line in lines {
            let (name, value) = line.split_once(':').expect("a header line");
            headers.append(
                HeaderName::try_from(name).unwrap(),
                HeaderValue::from_str(value.trim()).unwrap(),
            );
        }
        let length = headers
            .get("content-length")
            .map_or(0, |length| length.to_str().unwrap().parse().unwrap());
        let length = if head { 0 } else { length };
        while self.received.len() < length {
            assert!(self.fill().await, "the answer {status} breaks off");
        }
        let body: Bytes = self.received.drain(..length).collect::<Vec<u8>>().into();
        Some(Answer { status, headers, body })
    }

    /// Reads more; false at the end, however it came.
    async fn fill(&mut self) -> bool {
        matches!(self.stream.read_buf(&mut self.received).await, Ok(count) if count > 0)
    }
}
