//! One keep-alive HTTP/1.1 connection, no more of the protocol than the servers under test use.
//!
//! A full client would spend as much CPU as the servers. Here a request is a few copies into one buffer, and of an
//! answer only the status and the length are looked at.

use std::net::SocketAddr;

use anyhow::{Context as _, Result, bail};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

pub struct Connection {
    stream: TcpStream,
    received: Vec<u8>,
}

struct Head {
    status: u16,
    head_size: usize,
    body_size: usize,
}

impl Connection {
    pub async fn open(address: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect(address).await.context("connect a client")?;
        stream.set_nodelay(true).context("configure a client's connection")?;
        Ok(Self {
            stream,
            received: Vec::with_capacity(8192),
        })
    }

    /// Sends one request and reads one answer whole. Any status but 2xx is an error that quotes the answer.
    pub async fn exchange(&mut self, request: &[u8]) -> Result<()> {
        self.stream.write_all(request).await.context("send a request")?;
        self.received.clear();
        let head = loop {
            self.receive().await?;
            if let Some(head) = parse_head(&self.received)? {
                break head;
            }
        };
        while self.received.len() < head.head_size + head.body_size {
            self.receive().await?;
        }
        if !(200..300).contains(&head.status) {
            bail!(
                "the answer was not a success:\n{}",
                String::from_utf8_lossy(&self.received)
            );
        }
        Ok(())
    }

    async fn receive(&mut self) -> Result<()> {
        if self
            .stream
            .read_buf(&mut self.received)
            .await
            .context("read an answer")?
            == 0
        {
            bail!(
                "the server closed the connection; received until then: {:?}",
                String::from_utf8_lossy(&self.received)
            );
        }
        Ok(())
    }
}

/// None: the head has not arrived whole.
fn parse_head(received: &[u8]) -> Result<Option<Head>> {
    let Some(end) = received.windows(4).position(|window| window == b"\r\n\r\n") else {
        return Ok(None);
    };
    let head = std::str::from_utf8(&received[..end]).context("read the head of an answer")?;
    let status = head
        .get(9..12)
        .and_then(|status| status.parse().ok())
        .context("read the status of an answer")?;
    let body_size = head
        .split("\r\n")
        .filter_map(|line| line.split_once(':'))
        .find(|(name, _)| name.eq_ignore_ascii_case("content-length"))
        .and_then(|(_, size)| size.trim().parse().ok())
        .context("find the content-length of an answer")?;
    Ok(Some(Head {
        status,
        head_size: end + 4,
        body_size,
    }))
}
