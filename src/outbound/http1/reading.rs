//! An answer as it comes off a connection. While nothing comes, nothing is held for it to be read into.

use std::io;
use std::pin::pin;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use http::{Method, Response};
use tokio::io::{AsyncRead, AsyncReadExt};

use super::Fault;
use super::body::Body;
use super::head::Heads;

/// What is read at once, at first and at most.
const LEAST: usize = 8 << 10;
const MOST: usize = 64 << 10;

#[derive(Debug)]
pub struct Reading {
    heads: Heads,
    body: Body,
    bytes: BytesMut,
    /// What is read at once.
    room: usize,
}

/// How an answer breaks off.
#[derive(Debug, thiserror::Error)]
pub enum Broke {
    #[error("the connection ended")]
    Ended,
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Fault(#[from] Fault),
}

impl Reading {
    /// Of the next answer on the same connection.
    pub fn new() -> Self {
        Self {
            heads: Heads::default(),
            body: Body::END,
            bytes: BytesMut::new(),
            room: LEAST,
        }
    }

    /// The answer's head, and how its body ends.
    pub fn poll_head(
        &mut self,
        io: &mut (impl AsyncRead + Unpin),
        cx: &mut Context<'_>,
        method: &Method,
    ) -> Poll<Result<Response<()>, Broke>> {
        loop {
            if let Some(head) = self.heads.take(&mut self.bytes)? {
                self.body = Body::of(method, &head).map_err(Fault::new)?;
                return Poll::Ready(Ok(head));
            }
            if ready!(self.poll_read(io, cx))? == 0 {
                return Poll::Ready(Err(Broke::Ended));
            }
        }
    }

    /// The next piece of its body.
    pub fn poll_piece(
        &mut self,
        io: &mut (impl AsyncRead + Unpin),
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, Broke>>> {
        loop {
            if let Some(piece) = self.body.take(&mut self.bytes).map_err(Broke::Fault).transpose() {
                return Poll::Ready(Some(piece));
            }
            if self.body.is_end() {
                return Poll::Ready(None);
            }
            match ready!(self.poll_read(io, cx)) {
                Ok(0) => return Poll::Ready(self.body.close().err().map(|fault| Err(fault.into()))),
                Ok(_) => {}
                Err(error) => return Poll::Ready(Some(Err(error.into()))),
            }
        }
    }

    pub fn body(&self) -> &Body {
        &self.body
    }

    /// Whether more has come than the answer.
    pub fn has_more(&self) -> bool {
        self.body.is_end() && !self.bytes.is_empty()
    }

    fn poll_read(&mut self, io: &mut (impl AsyncRead + Unpin), cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let room = match self.body {
            Body::Length(left) if left > 0 => self.room.min(usize::try_from(left).unwrap_or(self.room)),
            Body::Length(_) | Body::Chunked(_) | Body::UntilClose => self.room,
        };
        self.bytes.reserve(room);
        let Poll::Ready(read) = pin!(io.read_buf(&mut self.bytes)).poll(cx) else {
            if self.bytes.is_empty() {
                self.bytes = BytesMut::new();
            }
            return Poll::Pending;
        };
        if let Ok(read) = read {
            self.room = if read >= self.room {
                (self.room * 2).min(MOST)
            } else if read < self.room / 4 {
                LEAST
            } else {
                self.room
            };
        }
        Poll::Ready(read)
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use http::StatusCode;
    use tokio::io::AsyncWriteExt;

    use super::*;

    #[tokio::test]
    async fn while_nothing_comes_nothing_is_held_for_it() {
        let (mut io, mut peer) = tokio::io::duplex(1 << 20);
        let mut cx = Context::from_waker(Waker::noop());
        let mut reading = Reading::new();
        assert!(reading.poll_head(&mut io, &mut cx, &Method::POST).is_pending());
        assert_eq!(reading.bytes.capacity(), 0);
        peer.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            .await
            .unwrap();
        let Poll::Ready(Ok(head)) = reading.poll_head(&mut io, &mut cx, &Method::POST) else {
            panic!("the head is there");
        };
        assert_eq!(head.status(), StatusCode::OK);
        for piece in 0..3 {
            assert!(reading.poll_piece(&mut io, &mut cx).is_pending(), "{piece}");
            assert_eq!(reading.bytes.capacity(), 0, "{piece}");
            peer.write_all(b"2\r\nab\r\n").await.unwrap();
            let Poll::Ready(Some(Ok(piece))) = reading.poll_piece(&mut io, &mut cx) else {
                panic!("a piece is there");
            };
            assert_eq!(piece, "ab");
        }
    }

    #[tokio::test]
    async fn large_bodies_are_read_in_large_pieces() {
        const WHOLE: usize = 1 << 20;
        let (mut io, mut peer) = tokio::io::duplex(2 << 20);
        let mut cx = Context::from_waker(Waker::noop());
        let mut reading = Reading::new();
        peer.write_all(format!("HTTP/1.1 200 OK\r\nContent-Length: {WHOLE}\r\n\r\n").as_bytes())
            .await
            .unwrap();
        peer.write_all(&vec![b'x'; WHOLE]).await.unwrap();
        assert!(reading.poll_head(&mut io, &mut cx, &Method::POST).is_ready());
        let (mut pieces, mut read) = (0, 0);
        while let Poll::Ready(Some(Ok(piece))) = reading.poll_piece(&mut io, &mut cx) {
            (pieces, read) = (pieces + 1, read + piece.len());
        }
        assert_eq!(read, WHOLE);
        assert!(reading.body().is_end() && pieces < 25, "{pieces} pieces");
    }
}
