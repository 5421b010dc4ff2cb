//! What is still to be written of a request.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use tokio::io::AsyncWrite;

#[derive(Debug, Default)]
pub struct Upload {
    head: Bytes,
    body: Bytes,
    /// What was written may still lie in TLS.
    unflushed: bool,
}

impl Upload {
    pub fn new(head: Bytes, body: Bytes) -> Self {
        Self {
            head,
            body,
            unflushed: true,
        }
    }

    pub fn is_done(&self) -> bool {
        !self.unflushed
    }

    /// One step: writes as much as is taken at once, or sees to it that it has left.
    pub fn poll_step(&mut self, io: &mut (impl AsyncWrite + Unpin), cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.head.is_empty() && self.body.is_empty() {
            ready!(Pin::new(io).poll_flush(cx))?;
            self.unflushed = false;
            return Poll::Ready(Ok(()));
        }
        let slices = [IoSlice::new(&self.head), IoSlice::new(&self.body)];
        // No empty one: to TLS, that is all there is to write.
        let slices = if self.head.is_empty() {
            &slices[1..]
        } else {
            &slices[..]
        };
        let taken = ready!(Pin::new(io).poll_write_vectored(cx, slices))?;
        if taken == 0 {
            return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
        }
        self.advance(taken);
        Poll::Ready(Ok(()))
    }

    fn advance(&mut self, taken: usize) {
        let of_head = taken.min(self.head.len());
        self.head.advance(of_head);
        self.body.advance(taken - of_head);
        // What is written is not kept while the answer is waited for.
        if self.head.is_empty() {
            self.head = Bytes::new();
        }
        if self.body.is_empty() {
            self.body = Bytes::new();
        }
    }
}
